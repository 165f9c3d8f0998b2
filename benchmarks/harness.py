"""Timing, memory and bookkeeping shared by the benchmarks. Imports torch and the standard library; rich for tables.

Imported by attention.py, special.py and overhead.py. How a number comes about:

* Contenders take turns. Each round runs every contender once, in another place and after another one than in the rounds
  before (`turns`), so that heat, power and clocks, which drift by several per cent within a run and follow what ran
  just before, hit all of them alike. A contender's time is the median over all of its calls in all rounds (at least
  five rounds).
* GPU time: CUDA events around each call. Before each call a buffer larger than the L2 cache is written, outside of
  the events, so that no call finds its inputs cached. A short spin kernel goes first and lets the CPU run ahead: the
  events then see the GPU's time alone, also where launching takes longer than computing.
* Eager time: what a program waits for. Wall clock over a batch of calls that ends in a synchronisation, divided by
  their number: the larger of CPU and GPU time.
* A/A: one contender is measured a second time under another name. The ratio of the two is the noise of the row; a
  difference below it is nothing. Where it leaves 1 +- AA_LIMIT, as many rounds more are taken, for all contenders, to
  MOST_SETS times as many in all; it is flagged where that is not enough. Medians are those of all rounds.
* Data are random (zeros run faster), calls are warmed up, SM clock and power are sampled while a row is measured.
* A GPU at its power limit takes a while to find the clock of what it runs: a turn of calls of SETTLED_MS or more begins
  with SETTLE_MS of calls that do not count.
* Results are written after every row, so that a run that is cut short loses nothing.

With `--device cpu --smoke` the same code runs at tiny sizes with wall-clock timers: for checking the scripts only.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import gc
import itertools
import json
import math
import multiprocessing
import operator
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

Measured = TypeVar("Measured")
AA_LIMIT, MOST_SETS = 0.01, 4
FLUSH_BYTES = 128 * 2**20  # an H200's L2 is 50 MB, a B200's 126 MB
SETTLED_MS, SETTLE_MS = 1.0, 30.0
SPIN_CLOCK_HZ = 2.0e9  # an upper bound of SM clocks: the spin must not be shorter than asked
RESULTS_FORMAT = 1
ROOT = Path(__file__).parents[1]
RESULTS_DIRECTORY = ROOT / "benchmarks" / "results"

# Contenders that are kernels of ours.
OURS = ("cuda", "triton")

Context = Callable[[], contextlib.AbstractContextManager]


@dataclasses.dataclass
class Run:
    """Something to time: `call` does one call, inside `context`, which is entered once per batch of calls."""

    call: Callable[[], Any]
    context: Context = contextlib.nullcontext


class Budget:
    """Wall-clock seconds that a script may take, counted from its start."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.start = time.monotonic()

    @property
    def used(self) -> float:
        return time.monotonic() - self.start

    @property
    def exhausted(self) -> bool:
        return self.used >= self.seconds


class Meter:
    """Measures runs on one device. `rounds` is the number of times that each contender has its turn.

    rounds_taken: how many it was in the last call of `gpu_times`.
    """

    def __init__(self, device: str, rounds: int = 5, round_ms: float = 8.0) -> None:
        self.device = torch.device(device)
        self.rounds = rounds
        self.rounds_taken = 0
        self.round_ms = round_ms
        self.cuda = self.device.type == "cuda"
        self._flush = torch.empty(FLUSH_BYTES if self.cuda else 1, dtype=torch.int8, device=self.device)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def gpu_times(self, runs: dict[str, Run], alike: tuple[str, str] | None = None) -> dict[str, float]:
        """Median milliseconds of GPU time per call, L2 cold, by contender.

        alike: two names of one contender, whose times are to agree within AA_LIMIT.
        """
        plans = {name: self._plan(run) for name, run in runs.items()}
        samples: dict[str, list[float]] = {name: [] for name in runs}
        sets = 1 if alike is None else MOST_SETS
        for taken, order in enumerate(turns(list(runs), sets * self.rounds)):
            if taken and taken % self.rounds == 0:
                medians = {name: statistics.median(times) for name, times in samples.items()}
                if alike is None or aa_report(medians, *alike)["within_limit"]:
                    break
            self.rounds_taken = taken + 1
            for name in order:
                calls, settling, spin_s = plans[name]
                with runs[name].context():
                    for _ in range(settling):  # after a switch of context the first call fills caches
                        runs[name].call()
                    samples[name] += self._timed_calls(runs[name].call, calls, spin_s)
        return {name: statistics.median(times) for name, times in samples.items()}

    def eager_times(self, runs: dict[str, Run]) -> dict[str, float]:
        """Median microseconds of wall clock per call over synchronised batches, by contender."""
        batches: dict[str, int] = {}
        for name, run in runs.items():
            with run.context():
                self._wall(run.call, 3)
                batches[name] = max(3, min(300, int(1.25 * self.round_ms * 1e-3 / self._wall(run.call, 3))))
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for order in turns(list(runs), self.rounds):
            for name in order:
                with runs[name].context(), collection_off():
                    self._wall(runs[name].call, 2)
                    samples[name].append(1e6 * self._wall(runs[name].call, batches[name]))
        return {name: statistics.median(times) for name, times in samples.items()}

    def peak_memory(self, run: Run) -> int | None:
        """Bytes allocated at the peak of one call beyond those allocated before it; None on a CPU."""
        with run.context():
            run.call()
            if not self.cuda:
                return None
            self.synchronize()
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            result = run.call()
            self.synchronize()
            peak = torch.cuda.max_memory_allocated(self.device)
            del result
        return peak - before

    def _plan(self, run: Run) -> tuple[int, int, float]:
        """Calls per round, those before them, and the seconds of spinning in which the CPU can enqueue all."""
        with run.context():
            for _ in range(2):
                run.call()
            self.synchronize()
            start = time.perf_counter()
            for _ in range(2):
                run.call()
            enqueue_s = (time.perf_counter() - start) / 2
            self.synchronize()
            total_s = (time.perf_counter() - start) / 2
        calls = max(3, min(10, int(self.round_ms * 1e-3 / max(total_s, 1e-9))))
        settling = math.ceil(SETTLE_MS / (1e3 * total_s)) if self.cuda and 1e3 * total_s >= SETTLED_MS else 1
        return calls, settling, min(0.02, 1.5 * calls * (enqueue_s + 40e-6))

    def _timed_calls(self, call: Callable[[], Any], calls: int, spin_s: float) -> list[float]:
        if not self.cuda:
            times = []
            for _ in range(calls):
                start = time.perf_counter()
                call()
                times.append(1e3 * (time.perf_counter() - start))
            return times
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(calls)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(calls)]
        with collection_off():
            torch.cuda._sleep(int(spin_s * SPIN_CLOCK_HZ))
            for start, end in zip(starts, ends, strict=True):
                self._flush.zero_()
                start.record()
                call()
                end.record()
            self.synchronize()
        return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]

    def _wall(self, call: Callable[[], Any], calls: int) -> float:
        self.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        self.synchronize()
        return (time.perf_counter() - start) / calls


def turns(names: list[str], rounds: int) -> Iterator[list[str]]:
    """The orders in which contenders take their turns, one per round.

    Steps through the contenders by one, then by two, and so on, around a circle of a prime number of places, of which
    the last may be empty. With a prime number of contenders, each follows every other one once in that many rounds
    less one. A turn shows what ran before it: on a GPU at its power limit a call after a hungry one gets a lower
    clock, 4% of the time of long calls when the order was merely rotated.
    """
    places = next(n for n in itertools.count(max(len(names), 2)) if all(n % divisor for divisor in range(2, n)))
    for turn in range(rounds):
        step = 1 + turn % (places - 1)
        circle = [(turn + step * place) % places for place in range(places)]
        yield [names[place] for place in circle if place < len(names)]


@contextlib.contextmanager
def collection_off() -> Iterator[None]:
    """No garbage collection: it would land on whichever contender is running."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def aa_report(times: dict[str, float], first: str, again: str) -> dict[str, Any]:
    """The A/A ratio of two measurements of one contender, and whether it stays within AA_LIMIT of one."""
    ratio = times[again] / times[first]
    return {"contender": first, "ratio": round(ratio, 4), "within_limit": abs(ratio - 1.0) <= AA_LIMIT}


# ---------------------------------------------------------------------------------------------------------- environment


class ClockLog:
    """SM clock (MHz), power (W) and temperature (C) of the GPU while it is open, from one `nvidia-smi` process."""

    QUERY = "clocks.sm,power.draw,temperature.gpu"

    def __init__(self, device: torch.device, interval_ms: int = 200) -> None:
        self._samples: list[tuple[float, float, float, float]] = []
        self._process: subprocess.Popen | None = None
        if device.type != "cuda":
            return
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        select = [] if uuid is None else ["-i", f"GPU-{uuid}"]
        command = ["nvidia-smi", *select, f"--query-gpu={self.QUERY}", "--format=csv,noheader,nounits"]
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [*command, "-lms", str(interval_ms)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                clock, power, temperature = (float(field) for field in line.split(","))
                self._samples.append((time.monotonic(), clock, power, temperature))

    def since(self, start: float) -> dict[str, float] | None:
        """Medians of the samples taken since time.monotonic() was `start`; None where there are none."""
        samples = [s for s in self._samples if s[0] >= start]
        if not samples:
            return None
        clock, power, temperature = (statistics.median(s[i] for s in samples) for i in (1, 2, 3))
        return {"sm_clock_mhz": clock, "power_w": power, "temperature_c": temperature, "samples": len(samples)}

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None


def need_gpu(device: str | torch.device) -> None:
    """End the program where there is no such device."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no GPU here that torch can use (--device cpu, where there is one, only shows that it runs)")


def environment(device: str) -> dict[str, Any]:
    """Versions, GPU and commit, as they stand in every results file. Ends the program where there is no such GPU."""
    need_gpu(device)
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "triton": _version_of("triton"),
        "torch_flashbackend": _version_of("torch_flashbackend"),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cpu": platform.machine(),
        "gpu": "cpu",
    }
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        major, minor = torch.cuda.get_device_capability(device)
        facts.update(
            gpu=torch.cuda.get_device_name(device),
            architecture=f"sm_{major}{minor}",
            sm_count=properties.multi_processor_count,
            memory_gib=round(properties.total_memory / 2**30, 1),
            cuda=torch.version.cuda,
            cudnn=torch.backends.cudnn.version(),
            driver=_first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        )
    return facts


def commit() -> str | None:
    """The commit measured: FLASHBACKEND_COMMIT where it is set (a copy without .git), else git's HEAD."""
    given = os.environ.get("FLASHBACKEND_COMMIT")
    return given or _first_line(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"])


def _first_line(command: list[str]) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return output.strip().splitlines()[0] if output.strip() else None
    return None


def _version_of(module: str) -> str | None:
    with contextlib.suppress(Exception):
        return getattr(__import__(module), "__version__", None)
    return None


# -------------------------------------------------------------------------------------------------------------- results


def slug(gpu: str) -> str:
    """A file name for a GPU: "NVIDIA H200" becomes "nvidia_h200"."""
    return "".join(c if c.isalnum() else "_" for c in gpu.lower()).strip("_")


class Results:
    """A results file that is complete and valid JSON after every row."""

    def __init__(self, path: Path, kind: str, facts: dict[str, Any], arguments: dict[str, Any]) -> None:
        self.path = path
        self.data: dict[str, Any] = {
            "format": RESULTS_FORMAT,
            "kind": kind,
            "environment": facts,
            "arguments": {k: Path(v).name if k == "out" and v else v for k, v in arguments.items()},
            "complete": False,
            "not_measured": [],
            "rows": [],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.write()

    def add(self, row: dict[str, Any]) -> None:
        self.data["rows"].append(row)
        self.write()

    def each(
        self, cases: Iterable[Measured], budget: Budget, label: Callable[[Measured], str] = operator.attrgetter("label")
    ) -> Iterator[Measured]:
        """The cases, while there is time for another; behind the last one the file is finished."""
        left_out = []
        for case in cases:
            if budget.exhausted:
                left_out.append(label(case))
            else:
                yield case
        self.finish(left_out)

    def finish(self, not_measured: Iterable[str] = ()) -> None:
        self.data["not_measured"] = list(not_measured)
        if not self.data["rows"] and not self.data["not_measured"]:
            say("nothing was measured: no label contains what --only asks for")
        self.data["complete"] = not self.data["not_measured"]
        self.write()

    def write(self) -> None:
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(self.data, indent=1, allow_nan=False) + "\n")
        os.replace(temporary, self.path)


def by_backend(row: dict[str, Any]) -> dict[str, Any]:
    """A row in which each backend of ours has its name: files from before there were two call the Triton one "ours"."""

    def renamed(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        stock_ran = row.get("our_kernels") == {}
        return {
            ("triton" if name == "ours" else name): renamed(inner)
            for name, inner in value.items()
            if not (name == "ours" and stock_ran)
        }

    return {name: renamed(value) if name != "case" else value for name, value in row.items()}


def significant(number: float | None, digits: int = 5) -> float | None:
    """A number as it is written to a file: five significant digits are more than any timer gives."""
    return None if number is None else float(f"{number:.{digits}g}")


# --------------------------------------------------------------------------------------------------------- command line


def parser(description: str, budget_s: int) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    options.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu with --smoke")
    options.add_argument("--smoke", action="store_true", help="tiny shapes and few rounds: checks the script itself")
    options.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    options.add_argument("--round-ms", type=float, default=8.0, help="about how long one turn lasts")
    options.add_argument("--budget", type=float, default=budget_s, help="seconds; rows that do not fit are left out")
    options.add_argument(
        "--out", type=Path, default=None, help="results file (default: benchmarks/results/<gpu>_*.json)"
    )
    options.add_argument(
        "--only", default="", help="measure only cases whose label contains one of these texts, separated by commas"
    )
    return options


def asked_for(arguments: argparse.Namespace, label: str) -> bool:
    """Is this to be measured: does its label contain one of the texts of --only?"""
    return any(text in label for text in arguments.only.split(","))


def chosen(arguments: argparse.Namespace, cases: Iterable[Any]) -> list[Any]:
    """Those cases, with `label` and `smaller()`, that are to be measured: with --smoke smaller ones, each once."""
    wanted = [case for case in cases if asked_for(arguments, case.label)]
    return list({case.smaller(): None for case in wanted}) if arguments.smoke else wanted


def meter_of(arguments: argparse.Namespace) -> Meter:
    """With --smoke one that hardly measures."""
    rounds, round_ms = (2, 0.2) if arguments.smoke else (arguments.rounds, arguments.round_ms)
    return Meter(arguments.device, rounds, round_ms)


def results_path(arguments: argparse.Namespace, facts: dict[str, Any], kind: str) -> Path:
    """Where results go. Some of the cases get a file of their own: they must not take the place of all of them."""
    parts = [slug(facts["gpu"]), kind, slug(arguments.only)]
    parts += ["inference"] if getattr(arguments, "forward_only", False) else []
    return arguments.out or RESULTS_DIRECTORY / f"{'_'.join(part for part in parts if part)}.json"


def precompile(module: str, workers: int, budget_s: float, extra: list[str]) -> None:
    """Compiles every kernel that `module` will time in `workers` processes at once, into Triton's cache on disk."""
    start = time.monotonic()
    say(f"compiling in {workers} processes")
    command = [sys.executable, "-m", module, "--compile-only"]
    jobs = []
    for index in range(workers):
        errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - closed below, after its process
        shard_of = ["--shard", f"{index}/{workers}"]
        jobs.append((errors, subprocess.Popen([*command, *shard_of, *extra], cwd=ROOT, stdout=errors, stderr=errors)))
    for index, (errors, job) in enumerate(jobs):
        try:
            job.wait(timeout=max(1.0, budget_s - (time.monotonic() - start)))
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
            say(f"compile process {index} stopped at its {budget_s:.0f} s")
        if job.returncode:
            errors.seek(0)
            say(f"compile process {index} ended with {job.returncode}:\n{errors.read()[-2000:]}")
        errors.close()
    say(f"compiled in {time.monotonic() - start:.0f} s")


def compile_all(compile_one: Callable[[Any], str | None], jobs: list) -> None:
    """Runs `compile_one` on every job, in a process for each core; prints what it returns of those that failed."""
    start = time.monotonic()
    workers = min(len(jobs), os.cpu_count() or 1)
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for message in filter(None, pool.map(compile_one, jobs)):
            say(message)
    say(f"compiled {len(jobs)} variants in {time.monotonic() - start:.0f} s")


def shard(items: list, text: str | None) -> list:
    """Every n-th item from the i-th on, for text "i/n"; all for None."""
    if text is None:
        return items
    index, count = (int(part) for part in text.split("/"))
    return items[index::count]


def say(text: str) -> None:
    print(text, flush=True)


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Prints a table with rich, or as tab-separated text where rich is missing."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        say("\n".join([title, "\t".join(columns), *("\t".join(row) for row in rows)]))
        return
    grid = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        grid.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
    for row in rows:
        grid.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(grid)
