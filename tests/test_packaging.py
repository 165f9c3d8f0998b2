"""What an installation holds: built with the hooks that pip calls, from a copy of the tree, so nothing is left behind.

Uses setuptools' build hooks directly (PEP 517 and 660): no network, no pip, no change to the running environment.
"""

import configparser
import email
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE_FOLDERS = {"torch_flashbackend": "torch_flashbackend", "kernels": "torch_flashbackend/kernels"}
SHIPPED_SUFFIXES = {".py", ".json", ".cu", ".cuh"}


def shipped_files() -> set[str]:
    """The path inside a wheel of each source and data file of the repository."""
    return {
        f"{target}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, target in SOURCE_FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHIPPED_SUFFIXES and "__pycache__" not in path.parts
    }


def build(hook: str, tree: Path, out: Path) -> Path:
    """Run one build hook in `tree`; returns the file that it made in `out`."""
    out.mkdir(exist_ok=True)
    code = f"import sys; from setuptools import build_meta; print('MADE', build_meta.{hook}(sys.argv[1]))"
    environment = {**os.environ, "CC": "no-compiler", "CXX": "no-compiler", "CUDA_HOME": ""}
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=tree, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    made = [line.split(" ", 1)[1] for line in done.stdout.splitlines() if line.startswith("MADE ")]
    return out / made[-1]


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of what a build reads."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in SOURCE_FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def wheel(tree) -> Path:
    """The wheel that `pip install .` makes."""
    return build("build_wheel", tree, tree / "dist")


def files_of(wheel: Path) -> set[str]:
    """The files in a wheel, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def read_metadata(wheel: Path, name: str) -> str:
    """One file of a wheel's metadata folder."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(next(n for n in archive.namelist() if n.endswith(f".dist-info/{name}"))).decode()


def run_without_site(code: str, cwd: Path) -> str:
    """Run code in a Python that has torch on its path but none of this environment's .pth files (editable installs)."""
    paths = [sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]]
    prologue = f"import sys; sys.path += {paths!r}\n"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    done = subprocess.run(
        [sys.executable, "-S", "-c", prologue + code], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_wheel_is_pure_python_and_builds_without_a_compiler(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")


def test_wheel_holds_every_source_and_data_file(wheel):
    missing = shipped_files() - files_of(wheel)
    assert not missing, f"not in the wheel: {sorted(missing)}; add packages or package-data in pyproject.toml"


def test_wheel_installs_no_other_top_level_module(wheel):
    assert {name.split("/")[0] for name in files_of(wheel)} == {"torch_flashbackend"}


def test_wheel_holds_no_tests_examples_or_benchmarks(wheel):
    assert files_of(wheel) - {"torch_flashbackend/py.typed"} == shipped_files()


def test_wheel_declares_the_entry_point_that_import_torch_calls(wheel):
    entry_points = configparser.ConfigParser()
    entry_points.read_string(read_metadata(wheel, "entry_points.txt"))
    assert dict(entry_points["torch.backends"]) == {"flashbackend": "torch_flashbackend.autoload:autoload"}


def test_wheel_needs_only_torch_and_triton(wheel):
    metadata = email.message_from_string(read_metadata(wheel, "METADATA"))
    needed = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    assert sorted(r.split(">")[0] for r in needed) == ["torch", "triton"]
    assert any(r.startswith("triton") and "Linux" in r for r in needed), "triton has wheels for Linux only"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "BSD-3-Clause"


def test_source_distribution_builds_the_same_wheel(tree, wheel, tmp_path):
    archive = build("build_sdist", tree, tmp_path / "sdist")
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert files_of(build("build_wheel", unpacked, tmp_path / "dist")) == files_of(wheel)


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_kernels_import_under_our_name_and_under_no_other(hook, tree, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(build(hook, tree, tmp_path / "dist")) as archive:
        archive.extractall(site)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = f"""
import importlib.util, site, sys
sys.path.insert(0, {str(site)!r})
site.addsitedir({str(site)!r})
import torch_flashbackend, torch_flashbackend.kernels
print(torch_flashbackend.kernels.__file__)
for name in ("kernels", "triton_kernels", "policies"):
    spec = importlib.util.find_spec(name)
    assert spec is None or "flashbackend" not in str(spec.origin), spec
"""
    origin = Path(run_without_site(code, elsewhere)).resolve()
    home = site / "torch_flashbackend" / "kernels" if hook == "build_wheel" else tree / "kernels"
    assert origin == (home / "__init__.py").resolve()


def test_version_is_one_number(wheel):
    declared = email.message_from_string(read_metadata(wheel, "METADATA"))["Version"]
    code = "import torch_flashbackend; print(getattr(torch_flashbackend, '__version__', None))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in (declared, "None")
