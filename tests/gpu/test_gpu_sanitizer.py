"""compute-sanitizer on every kernel: `sanitized.py` has the programs, each of which runs in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sanitized
from hopper_calls import HOPPER_ONLY

pytestmark = [*HOPPER_ONLY, pytest.mark.slow]
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Of Triton's own kernels, how shared memory is used is its compiler's affair.
OURS = [name for name, program in sanitized.PROGRAMS.items() if program.kernels[0].startswith("flash_")]
# Both warpgroups overwrite rows of the next sequence with the same zeros, each before it reads them itself.
HARMLESS = "clear_rows"


def run(name: str, tool: str) -> list[str]:
    """What the tool reports; the program must have come to its end."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    kernels = "flash_" if name in OURS else "attention_"
    command = [sanitizer, "--tool", tool, "--kernel-name", f"kernel_substring={kernels}", "--print-limit", "1000"]
    environment = {
        **os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }  # fmt: skip
    done = subprocess.run(
        [*command, "--show-backtrace", "no", sys.executable, HERE / "sanitized.py", name, tool],
        capture_output=True, text=True, env=environment, timeout=900,
    )  # fmt: skip
    # Not by the status: under the tools, some processes end in "terminate called" behind everything, PyTorch's imports.
    assert "done" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    return [line.strip("= ") for line in done.stdout.splitlines() if line.startswith("=========")]


def expect_no_errors(lines: list[str]) -> None:
    """By the summary that memcheck, synccheck and initcheck end with."""
    assert "ERROR SUMMARY: 0 errors" in lines, "\n".join(lines[:40])


def races(lines: list[str]) -> list[str]:
    """What racecheck reports, each with the accesses that it names, but for what is harmless."""
    found = "\n".join(lines).split("Error: ")[1:]
    return [text for text in found if not all(HARMLESS in side for side in sides(text))]


def sides(report: str) -> list[str]:
    """The one access, or all those that it is in conflict with, whichever may be the harmless one."""
    first, *others = [line for line in report.splitlines() if " access at " in line]
    return others if others and HARMLESS not in first else [first]


@pytest.mark.parametrize("name", sanitized.PROGRAMS)
def test_memcheck_finds_nothing(name):
    expect_no_errors(run(name, "memcheck"))


@pytest.mark.parametrize("name", OURS)
def test_synccheck_finds_nothing(name):
    expect_no_errors(run(name, "synccheck"))


@pytest.mark.parametrize("name", OURS)
def test_racecheck_finds_nothing(name):
    lines = run(name, "racecheck")
    found = races(lines)
    assert not found and any(line.startswith("RACECHECK SUMMARY") for line in lines), "\n".join(found[:5] or lines[-9:])


@pytest.mark.parametrize("name", [name for name in OURS if name.startswith("forward")])
def test_initcheck_finds_nothing(name):
    """Of the forward alone: to initcheck, what the copy engine has stored was never written, an output say."""
    expect_no_errors(run(name, "initcheck"))
