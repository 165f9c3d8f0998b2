"""Fixtures of the GPU suite, and its JSON summary.

    python -m pytest tests/gpu -n 16                         # compiling dominates: as many workers as cores
    FLASHBACKEND_RESULTS=gpu_tests.json python -m pytest ... # summary, rewritten while the tests run
    FLASHBACKEND_TEST_DEVICE=cpu python -m pytest tests/gpu  # the math backend: checks the tests, not the kernels
    FLASHBACKEND_COMPILE_FOR=90 python -m pytest tests/gpu   # without a GPU: see compiling.py

Without CUDA and without FLASHBACKEND_TEST_DEVICE every test is skipped. Tests marked `cuda_only` have no CPU form, or
need the automatic route, which is PyTorch's own on a CPU.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

# Each worker compiles by itself: a pool of compile processes in each of 16 workers would only be in the way.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
ROOT = Path(__file__).parents[2]
for folder in (str(ROOT), str(ROOT / "tests")):
    if folder not in sys.path:
        sys.path.insert(0, folder)

import torch  # noqa: E402
from compiling import COMPILE_FOR, compile_call  # noqa: E402
from torch import Tensor  # noqa: E402

from common import STOCK_KERNELS, Call, Verdict, check, expect, gradient_for, results_of, stock_results  # noqa: E402

DEVICE = "cpu" if COMPILE_FOR else os.environ.get("FLASHBACKEND_TEST_DEVICE", "cuda")
BACKEND = "triton" if DEVICE == "cuda" else "math"
HERE = Path(__file__).parent
# Of which the results file has the text; all are counted.
MOST_FAILURES = 100


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda_only: has no form on a CPU")
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line(
        "markers", "memory: takes tens of gigabytes of GPU memory (fixture `gigabytes`); runs first"
    )
    if os.environ.get("FLASHBACKEND_RESULTS") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Summary(Path(os.environ["FLASHBACKEND_RESULTS"])), "flashbackend-summary")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    available = torch.cuda.is_available()
    for item in items:
        if HERE not in Path(item.path).parents:
            continue
        item.add_marker("gpu")
        if DEVICE == "cuda" and not available:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif DEVICE != "cuda" and item.get_closest_marker("cuda_only"):
            item.add_marker(pytest.mark.skip(reason="has no form on a CPU"))
    # First and side by side, so that one worker gets them all, while the others hold little memory and have much to do.
    items.sort(key=lambda item: item.get_closest_marker("memory") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    if COMPILE_FOR is None or HERE not in Path(item.path).parents:
        return (yield)
    with contextlib.suppress(Exception):  # it has no results to judge
        yield
    pytest.skip("compiled")


class Summary:
    """Counts outcomes and error ratios, and rewrites one JSON file as it goes: a run cut short leaves its results."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.started = time.monotonic()
        self.written = 0.0
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.passed: dict[str, int] = {}  # how many cases of each test
        self.failed: list[dict[str, str]] = []
        self.skipped: dict[str, int] = {}
        self.durations: dict[str, float] = {}
        self.judged = 0
        self.worst = {"ratio": 0.0, "test": None, "tensor": None}
        self.worst_to_best = {"ratio": 0.0, "test": None, "tensor": None}
        self.facts: dict = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
            self.counts[report.outcome] += 1
        elif report.outcome == "failed":
            self.counts["failed"] += 1
        if report.outcome == "failed":
            self.failed.append({"test": report.nodeid, "error": str(report.longrepr)[-1500:]})
        if report.outcome == "skipped":
            reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
            self.skipped[reason] = self.skipped.get(reason, 0) + 1
        if report.when == "call":
            if report.outcome == "passed":
                test = report.nodeid.split("[")[0].removeprefix("tests/gpu/")
                self.passed[test] = self.passed.get(test, 0) + 1
            self.durations[report.nodeid] = round(report.duration, 1)
            for name, value in report.user_properties:
                if name == "verdict":
                    self._count(report.nodeid, value)
        if time.monotonic() - self.written > 3.0:
            self.write(complete=False)

    def _count(self, test: str, value: list) -> None:
        tensor, ratio, to_best = value
        self.judged += 1
        if ratio > self.worst["ratio"]:
            self.worst = {"ratio": round(ratio, 3), "test": test, "tensor": tensor}
        if to_best is not None and to_best > self.worst_to_best["ratio"]:
            self.worst_to_best = {"ratio": round(to_best, 3), "test": test, "tensor": tensor}

    def pytest_sessionfinish(self) -> None:
        self.write(complete=True)

    def write(self, complete: bool) -> None:
        self.facts = self.facts or facts()
        slowest = sorted(self.durations, key=lambda test: -self.durations[test])
        data = {
            "kind": "gpu_tests",
            "environment": self.facts,
            "complete": complete,
            "seconds": round(time.monotonic() - self.started, 1),
            "tests": sum(self.counts.values()),
            **self.counts,
            "skip_reasons": self.skipped,
            "tensors_judged": self.judged,
            "worst_error_over_larger_of_best_and_model": self.worst,
            "worst_error_over_best_alone": self.worst_to_best,
            "slowest_seconds": {test: self.durations[test] for test in slowest[:20]},
            "cases_passed": dict(sorted(self.passed.items())),
            "failures": self.failed[:MOST_FAILURES],
        }
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(data, indent=1) + "\n")
        os.replace(temporary, self.path)
        self.written = time.monotonic()


def facts() -> dict:
    commit = os.environ.get("FLASHBACKEND_COMMIT")
    if not commit:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
            commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    found = {
        "torch": torch.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
        "commit": commit,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found.update(gpu=properties.name, sm_count=properties.multi_processor_count, gpus=torch.cuda.device_count())
        found.update(cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version())
    return {**found, "date": time.strftime("%Y-%m-%d", time.gmtime())}


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture
def backend() -> str:
    """The backend whose kernels are tested: "triton", or "math" where the tests themselves are tried on a CPU."""
    return BACKEND


def _choice_of_stock() -> tuple:
    """The process's settings that PyTorch chooses its own kernel by."""
    sdp = torch.backends.cuda
    enabled = sdp.flash_sdp_enabled(), sdp.mem_efficient_sdp_enabled(), sdp.cudnn_sdp_enabled(), sdp.math_sdp_enabled()
    order = tuple(map(int, torch._C._get_sdp_priority_order()))
    return *enabled, order, torch.are_deterministic_algorithms_enabled(), sdp.matmul.allow_tf32


@functools.cache
def _first_choice_of_stock() -> None:
    """PyTorch orders its kernels by the GPU when it first chooses one."""
    if DEVICE == "cuda" and torch.cuda.is_available():
        torch._fused_sdp_choice(*torch.empty(3, 1, 1, 8, 8, dtype=torch.float16, device=DEVICE))


@pytest.fixture(autouse=True)
def plugin():
    """The plugin on during each test, and off after it, whatever the test did, which must leave settings alone."""
    import torch_flashbackend

    _first_choice_of_stock()
    before = _choice_of_stock()
    torch_flashbackend.enable()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not used because.*")
        warnings.filterwarnings("ignore", message=".*attention.*reason.*")
        yield torch_flashbackend
    torch_flashbackend.disable()
    assert _choice_of_stock() == before


@pytest.fixture(autouse=True)
def _cached_memory():
    """Workers share one GPU: what a test has left in this one's cache is given back where it is much."""
    yield
    if DEVICE == "cuda" and torch.cuda.is_available() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


@pytest.fixture
def gigabytes(tmp_path_factory):
    """A function that waits until so much GPU memory is free; one test of all workers' at a time may have it."""
    with contextlib.ExitStack() as stack:

        def wait(number: float, seconds: float = 120.0) -> None:
            total = torch.cuda.mem_get_info()[1] / 1e9
            if total < number:
                pytest.skip(f"needs {number:.0f} GB of GPU memory, this GPU has {total:.0f}")
            shared = tmp_path_factory.getbasetemp()
            shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
            lock = stack.enter_context(open(shared / "gpu-memory.lock", "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
            stack.callback(torch.cuda.empty_cache)
            deadline = time.monotonic() + seconds
            torch.cuda.empty_cache()
            while (free := torch.cuda.mem_get_info()[0] / 1e9) < number:
                if time.monotonic() > deadline:
                    pytest.skip(f"needs {number:.0f} GB of free GPU memory, {free:.0f} are there")
                time.sleep(0.5)

        yield wait


@pytest.fixture
def take_everything(monkeypatch):
    """The automatic route takes whatever our kernels can take: speed is not asked, as if every call were faster."""
    from torch_flashbackend import decisions, policy

    verdict = policy.Verdict(True, "test", "taken for a test")
    monkeypatch.setattr(policy, "judge", lambda problem, backend: verdict)
    decisions.forget()
    yield
    monkeypatch.undo()
    decisions.forget()


@pytest.fixture
def never_waits():
    """`never_waits(step)`: a second call of step raises nothing where any wait of the host for the GPU is an error."""

    def check_step(step: Callable[[], object]) -> None:
        step()  # Compiles.
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return check_step


@pytest.fixture
def launched():
    """A context manager factory: the block must launch kernels of ours (`launched()`) or none (`launched(False)`)."""
    from torch_flashbackend import ops

    @contextlib.contextmanager
    def expect_launches(wanted: bool = True):
        ops.reset_launch_counts()
        yield
        counts = ops.launch_counts()
        if DEVICE == "cuda":
            assert bool(counts) == wanted, (
                f"kernels of ours launched: {counts}, expected {'some' if wanted else 'none'}"
            )

    return expect_launches


def _computes(call: Call) -> bool:
    return call.query.numel() > 0 and call.key.numel() > 0 and call.value.numel() > 0


@pytest.fixture
def note(record_property) -> Callable[[list[Verdict]], None]:
    """Hands verdicts to the summary."""

    def record(verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            record_property("verdict", [verdict.name, verdict.ratio, verdict.ratio_to_best])

    return record


@pytest.fixture
def check_call(plugin, launched, note) -> Callable[..., dict[str, Tensor]]:
    """Runs a call on our kernels and judges output and gradients against float64 and PyTorch's own kernels."""
    if COMPILE_FOR:
        return compile_call

    def run(
        call: Call, *, grad: bool = True, automatic: bool = False, tf32: bool = False, kernels=tuple(STOCK_KERNELS),
        backend: str = BACKEND,
    ) -> dict[str, Tensor]:  # fmt: skip
        grad_out = gradient_for(call) if grad else None
        plugin.disable()
        stock = stock_results(call, grad_out, kernels)
        expected = expect(call, grad_out, tf32=tf32)
        plugin.enable()
        choice = contextlib.nullcontext() if automatic else plugin.sdpa_backend(backend)
        asked = contextlib.nullcontext() if automatic else launched(_computes(call))
        with choice, asked:
            actual = results_of(call, grad_out)
        note(check(actual, expected, stock, call.describe()))
        return actual

    return run


@pytest.fixture
def poison_free_memory() -> Callable[[], None]:
    """Makes all that the allocator has to give NaN: what lies between tensors, and enough new memory."""

    def fill() -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        blocks, reserved = [], torch.cuda.memory_reserved()
        for power in range(26, 6, -1):  # of two, float32 numbers
            while True:
                block = torch.full((2**power,), torch.nan, device="cuda")
                if torch.cuda.memory_reserved() > reserved:  # there was no such gap
                    del block
                    torch.cuda.empty_cache()
                    break
                blocks.append(block)
        blocks += [torch.full((2**28,), torch.nan, device="cuda")]  # which large tensors are cut from
        blocks += [torch.full((2**18,), torch.nan, device="cuda") for _ in range(64)]  # and which small ones are

    def poison() -> None:
        fills = torch.utils.deterministic.fill_uninitialized_memory  # in deterministic mode torch.empty is NaN anyway
        torch.utils.deterministic.fill_uninitialized_memory = False
        try:
            fill()
            # All before any is looked at, which leaves other numbers in memory.
            probes = [torch.empty(size, device="cuda") for size in (1, 2**10, 2**17, 2**20, 2**26)]
            assert all(probe.isnan().all() for probe in probes)
            del probes
            fill()
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = fills

    return poison
