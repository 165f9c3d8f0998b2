"""TORCH_FLASHBACKEND, through the entry point that `import torch` calls."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from hooked import ROOT

REPORT = """
import sys
import torch
package = sys.modules.get("torch_flashbackend")
override = sys.modules.get("torch_flashbackend.override")
print(override is not None and override.is_enabled())
print(torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 8)] * 3).sum().item())
"""
# The same call that torch makes, for where the package is not installed but on the path.
BY_HAND = "import torch\nfrom torch_flashbackend.autoload import autoload\nautoload()\n"


def run(code, value=None, flags=()):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("TORCH_FLASHBACKEND", None)
    if value is not None:
        env["TORCH_FLASHBACKEND"] = value
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr


installed = pytest.mark.skipif(
    not any(entry.name == "flashbackend" for entry in entry_points(group="torch.backends")),
    reason="torch_flashbackend is not installed, so torch does not know its entry point",
)


@installed
@pytest.mark.parametrize("value, enabled", [(None, False), ("0", False), ("1", True), ("True", True), ("on", True)])
def test_import_torch_alone(value, enabled):
    out, err = run(REPORT, value)
    assert out == [str(enabled), "16.0"]
    assert "torch_flashbackend" not in err


@pytest.mark.parametrize("value, enabled", [("", False), ("off", False), ("1", True)])
def test_the_function(value, enabled):
    out, err = run(BY_HAND + REPORT, value)
    assert out == [str(enabled), "16.0"]
    assert "torch_flashbackend" not in err


def test_any_other_value_is_one_warning_and_off():
    out, err = run(BY_HAND.replace("import torch\n", "", 1) + REPORT, "yes please")
    assert out == ["False", "16.0"]
    assert "TORCH_FLASHBACKEND='yes please' is not understood" in err
    assert err.count("RuntimeWarning") <= 2  # the entry point's, and the one of the call by hand


def test_warnings_as_errors_do_not_break_the_import():
    out, err = run(BY_HAND + REPORT, "yes please", flags=["-W", "error::RuntimeWarning"])
    assert out == ["False", "16.0"]
    assert "is not understood" in err


def test_a_failure_is_a_warning():
    broken = """
import sys
sys.modules["torch_flashbackend.override"] = None
"""
    out, err = run(broken + BY_HAND + "print(1)", "1")
    assert out == ["1"]
    assert "could not start and is off: ModuleNotFoundError" in err


def test_unset_nothing_is_loaded():
    out, _ = run(BY_HAND + "import sys; print(sorted(n for n in sys.modules if n.startswith('torch_flashbackend')))")
    assert "".join(out) == "['torch_flashbackend','torch_flashbackend.autoload']"


def test_the_module_needs_the_standard_library_only():
    code = "import sys; sys.modules['torch'] = None\nfrom torch_flashbackend.autoload import autoload\n"
    assert run(code + "autoload()\nprint(1)")[0] == ["1"]


@installed
@pytest.mark.parametrize("first", ["override", "stats", "_torch", "selection"])
def test_a_module_of_ours_imported_before_torch(first):
    """As a worker does that was spawned with one of our functions."""
    out, err = run(f"import torch_flashbackend.{first}" + REPORT, "1")
    assert out == ["True", "16.0"]
    assert "torch_flashbackend" not in err


@installed
def test_activating_by_name_needs_no_import_of_ours():
    code = """
import torch
torch.nn.attention.activate_flash_attention_impl("flashbackend")
import torch_flashbackend
print(torch_flashbackend.is_enabled())
"""
    assert run(code)[0] == ["True"]
