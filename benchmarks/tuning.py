"""What the tuners share: their options, compiling ahead in threads, and row after row until the time is over."""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from benchmarks.harness import Results, environment, say

Row = TypeVar("Row")


class Specialisation(Protocol):
    """Of any CUDA kernel."""

    def compile(self) -> Any: ...


def parser(description: str | None, *, rounds: int, budget_s: float, only: str) -> argparse.ArgumentParser:
    """--out, --rounds, --only and --budget. only: what its text selects."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True, help="results file")
    options.add_argument("--rounds", type=int, default=rounds, help="turns of each candidate")
    options.add_argument("--only", default="", help=only)
    options.add_argument("--budget", type=float, default=budget_s, help="seconds after which no further row is begun")
    return options


def compile_in_threads(specialisations: Iterable[Specialisation], describe: Callable[[Any], str] = str) -> None:
    """Fills the cache of binaries; says what does not compile, which its measurement will meet again."""

    def compile_one(specialisation: Specialisation) -> None:
        try:
            specialisation.compile()
        except Exception as error:
            say(f"{describe(specialisation)}: {str(error)[:200]}")

    began = time.monotonic()
    wanted = list(dict.fromkeys(specialisations))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(compile_one, wanted))
    say(f"compiled {len(wanted)} binaries in {time.monotonic() - began:.0f} s")


def begin(kind: str, options: argparse.Namespace) -> Results:
    """The results file."""
    return Results(options.out, kind, environment(getattr(options, "device", "cuda")), vars(options))


def measure_rows(
    kind: str,
    options: argparse.Namespace,
    began: float,
    rows: Iterable[Row],
    label: Callable[[Row], str],
    measure: Callable[[Row], tuple[dict[str, Any], str]],
    results: Results | None = None,
) -> None:
    """Writes a results file of this kind, complete after each row, and prints a line for each.

    began: by ``time.monotonic``, when the budget began. measure: gives a row's results, and what to print of them.
    results: the file, where something has been written to it already.
    """
    results = results or begin(kind, options)
    not_measured = []
    for row in rows:
        if time.monotonic() - began > options.budget:
            not_measured.append(label(row))
            continue
        found, shown = measure(row)
        results.add(found)
        say(f"{label(row)}: {shown}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if not_measured:
        say(f"not measured: {', '.join(not_measured)}")
    results.finish(not_measured)


def fastest_first(times: dict[str, float], failed: dict[str, str]) -> str:
    """One line: milliseconds by name, and what failed."""
    shown = "  ".join(f"{name} {ms:.3f}" for name, ms in sorted(times.items(), key=lambda item: item[1]))
    return shown + (f"  failed: {failed}" if failed else "")
