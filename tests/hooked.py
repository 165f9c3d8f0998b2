"""Help for the tests of the hooks: the same hooks at CPU's dispatch keys, and a routing that takes every valid call.

On a CPU the operators of ops.py run the math path, so values and gradients can be compared with stock's.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from torch_flashbackend import decisions, override, routing, stats

ROOT = Path(__file__).resolve().parent.parent
# What tests must do otherwise, or leave out, on an older PyTorch, each with its reason.
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
NO_VIEWS_IN_INFERENCE_MODE = TORCH < (2, 12)
"""AOTAutograd of torch 2.11 raises `RuntimeError: <weakref ...>` for any view made in a compiled inference_mode region,
F.softmax(q @ k.transpose(-2, -1)) without any plugin included."""


def forget_kernels_from_python(library: torch.library.Library) -> None:
    """Let others register at the same keys: torch 2.11 refuses a second kernel that comes from Python."""
    torch.library._impls.difference_update(library._op_impls)


_decide = routing.decide


def take_valid(problem: Any, allowed: Any = None) -> Any:
    """Every call that our math path can take goes to ops.run, as if this were a GPU; explicit choices are real ones."""
    if allowed is not None:
        return _decide(problem, allowed)
    if problem.transforms or routing.first_failure(problem, "math", False) is not None:
        return routing.Decision("stock", "not valid", "query")
    return routing.Decision("triton", "taken for the test", "query")


def leave_all(problem: Any, allowed: Any = None) -> Any:
    """Every call is stock's."""
    return _decide(problem, allowed) if allowed is not None else routing.Decision("stock", "left for the test", "query")


@contextlib.contextmanager
def hooked(decide: Any = take_valid, kernel_key: str | None = None) -> Iterator[None]:
    """The plugin, enabled for CPU tensors."""
    decisions.forget()
    with mock.patch.object(routing, "decide", decide):
        override._install("AutogradCPU", kernel_key)
        try:
            yield
        finally:
            override._uninstall()


@contextlib.contextmanager
def counting() -> Iterator[Any]:
    """Yields a function: how many eager and traced calls each backend has had since."""
    stats.reset_stats()

    def count(backend: str) -> int:
        counts = stats()
        return counts.total(backend) + counts.total(backend, "traced")

    yield count


def run_python(code: str, timeout: float = 240, **environment: str) -> str:
    """Run code in a process of its own; its standard output. Fails with its standard error."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", **environment}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=timeout, env=env
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def sample(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False, seed: int = 0) -> torch.Tensor:
    """Normal random numbers, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(grad)
