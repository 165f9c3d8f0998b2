"""Check and measure candidates of the Hopper forward on this GPU: short causal rows, head_dim 72.

    python -m benchmarks.tune_cuda_forward --out benchmarks/results/tune_cuda_forward.json [--only 72,64] [--budget 60]

As ``tune_cuda``: every candidate is compiled, in parallel; checked against float64 in a process of its own; and those
that passed are timed beside PyTorch's default, in turn, on random data, medians. "*": what the table names. What a
candidate changes beside the tile is named after it: "v8": the value's head_dim is not padded to 16 columns; "group":
query heads whose tiles stand in one list; "promotion": bytes that L2 fetches for the copy engine.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import tune_cuda
from benchmarks.harness import Meter, Results, Run, environment
from torch_flashbackend import driver
from torch_flashbackend.kernels.cuda import forward, tiles
from torch_flashbackend.kernels.cuda.tiles import Tile

# batch, query heads, key heads, seqlen_q, seqlen_k of what is checked.
CHECKED = (
    (1, 1, 1, 128, 128), (2, 4, 2, 333, 400), (1, 2, 1, 513, 190), (1, 3, 3, 65, 1), (2, 64, 32, 333, 500),
    (4, 16, 16, 512, 512),
)  # fmt: skip
# Errors of bfloat16 outputs relative to their largest element are 0.002 to 0.005.
LARGEST_ERROR = 0.01


class Problem(NamedTuple):
    """Shapes of one row of results."""

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    is_causal: bool

    @property
    def name(self) -> str:
        return f"B{self.batch} H{self.heads} S{self.seqlen} D{self.head_dim} {'causal' if self.is_causal else 'full'}"


PROBLEMS = (
    Problem(4, 16, 4096, 72, True),
    Problem(4, 16, 4096, 72, False),
    Problem(32, 32, 512, 64, True),
    Problem(32, 16, 512, 128, True),
    Problem(16, 32, 1024, 64, True),
    Problem(32, 8, 512, 256, True),
    Problem(16, 16, 1024, 128, True),
    Problem(4, 32, 4096, 64, True),
    Problem(32, 32, 512, 64, False),
    Problem(4, 16, 4096, 80, True),
    Problem(4, 16, 4096, 80, False),
    Problem(16, 8, 1024, 256, True),
    Problem(4, 32, 4096, 64, False),
    Problem(2, 16, 128, 72, True),
)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run calls of a head_dim. None: what the launcher chooses."""

    head_dim: int
    is_causal: bool
    tile: Tile
    exact_value: bool = False
    heads_per_group: int | None = None
    promotion: int | None = None

    @property
    def name(self) -> str:
        """Short: D=64 causal 256x64 s8 q2 rotate."""
        tile = self.tile
        parts = [f"D={self.head_dim}", "causal" if self.is_causal else "full"]
        parts.append(f"{tile.block_m}x{tile.block_n} s{tile.stages} q{tile.q_stages}")
        parts += [field.name for field in dataclasses.fields(tile) if getattr(tile, field.name) is True]
        parts += [f"lanes {tile.lane_loads}"] * (tile.lane_loads > 0)
        parts += ["v8"] * self.exact_value
        parts += [f"group {self.heads_per_group}"] * (self.heads_per_group is not None)
        parts += [f"promotion {(0, 64, 128, 256)[self.promotion]}"] if self.promotion is not None else []
        return " ".join(parts)

    @property
    def specialisation(self) -> forward.Specialisation:
        padded = -(-self.head_dim // 16) * 16
        return forward.Specialisation(
            padded, self.head_dim if self.exact_value else padded, self.is_causal, True, True, self.tile
        )

    def compile(self) -> str | None:
        """What is wrong with it, if anything."""
        try:
            if self.specialisation.shared_bytes > 227 << 10:
                return f"{self.specialisation.shared_bytes} bytes of shared memory"
            log = self.specialisation.compile().log
        except Exception as error:
            return str(error)[:300]
        lines = [line for line in log.splitlines() if "C75" in line or "warning" in line]
        return lines[0] if lines else None

    @contextlib.contextmanager
    def chosen(self) -> Iterator[None]:
        """While this lasts, plans are this candidate's."""
        with contextlib.ExitStack() as stack:
            replace = lambda *what: stack.enter_context(mock.patch.object(*what))  # noqa: E731
            replace(forward, "specialise", lambda *_, **__: self.specialisation)
            if self.heads_per_group is not None:
                replace(forward, "_heads_per_group", lambda heads, *_: min(heads, self.heads_per_group or 1))
            if self.promotion is not None:
                replace(driver, "_L2_PROMOTION_256B", self.promotion)
            yield


def candidates(head_dim: int, is_causal: bool) -> list[Candidate]:
    """What is tried, the table's first."""
    padded = -(-head_dim // 16) * 16
    named = tiles.variants(padded, padded, is_causal)
    change = dataclasses.replace
    found: list[Tile] = list(named)
    make = functools.partial(Candidate, head_dim, is_causal)
    more: list[Candidate] = []
    if head_dim in (72, 80):
        found += (
            [Tile(192, 64, 3, 2, False)] if is_causal else [Tile(192, 96, 2, 2, False), Tile(192, 112, 2, 2, False)]
        )
        found += [Tile(192, 64, 3, 2, False, rotate=True)] if is_causal else [Tile(192, 96, 2, 2)]
    if head_dim == 72:
        lanes = [change(named[-1], lane_loads=which) for which in (1, 2)]
        more += [make(tile, exact_value=True) for tile in (named[-1], *lanes, found[-2], found[-1])]
        if not is_causal:
            more += [make(Tile(192, 128, 2, 2, False), exact_value=True)]
        more += [make(Tile(256, 64, 4, 1, False, rotate=is_causal), exact_value=True)]
        more += [make(named[-1], promotion=promotion) for promotion in (0, 2)]
    elif is_causal and head_dim == 64:
        four = Tile(256, 64, 8, 2, False, rotate=True)
        found += [change(tile, rotate=True) for tile in named[:2]]
        found += [four, change(four, ping_pong=True), change(four, rotate=False), change(four, q_stages=3)]
        found += [Tile(192, 64, 6, 2, False, rotate=True), Tile(128, 64, 8, 3, rotate=True)]
        more += [make(four, heads_per_group=heads) for heads in (33, 66, 128)]
        more += [make(named[0], heads_per_group=66)]
    elif head_dim == 64:
        found += [Tile(256, 64, 8, 2, False), Tile(256, 64, 8, 2)]
    elif is_causal and head_dim == 128:
        found += [change(named[0], rotate=True), Tile(128, 64, 4, 3, False, rotate=True)]
        found += [Tile(192, 64, 4, 2, False, rotate=True), Tile(192, 64, 4, 2, True, rotate=True)]
        more += [make(change(named[0], rotate=True), heads_per_group=heads) for heads in (17, 33, 66)]
    elif is_causal and head_dim == 256:
        found += [change(named[0], rotate=True)]
        more += [make(change(named[0], rotate=True), heads_per_group=heads) for heads in (17, 33, 66)]
    return list(dict.fromkeys([*map(make, found), *more]))


# ---------------------------------------------------------------------------------------------------------------- check


def tensors_of(shape: tuple[int, ...], head_dim: int, by_row: bool = False) -> list[torch.Tensor]:
    """query, key, value, out, random; by_row: rows of all heads side by side."""
    batch, heads, kv_heads, seqlen_q, seqlen_k = shape
    found = []
    for count, rows in ((heads, seqlen_q), (kv_heads, seqlen_k), (kv_heads, seqlen_k), (heads, seqlen_q)):
        size = (batch, rows, count, head_dim) if by_row else (batch, count, rows, head_dim)
        tensor = torch.randn(size, device="cuda", dtype=torch.bfloat16)
        found.append(tensor.transpose(1, 2) if by_row else tensor)
    return found


def launcher(candidate: Candidate, tensors: list[torch.Tensor], logsumexp: torch.Tensor) -> Callable[[], None]:
    """A function that runs the candidate."""
    query, key, value, out = tensors
    with candidate.chosen():
        plan = forward.Plan(query, key, value, out, True, candidate.is_causal, query.size(3) ** -0.5)
    return functools.partial(plan, query, key, value, out, logsumexp)


def check(candidate: Candidate) -> dict[str, Any]:
    """Its largest relative error of outputs and absolute one of logsumexps, and whether it repeats bit by bit."""
    worst, worst_lse, repeats = 0.0, 0.0, True
    for number, shape in enumerate(CHECKED):
        torch.manual_seed(number)
        tensors = tensors_of(shape, candidate.head_dim, by_row=number % 2 == 1)
        query, key, value, out = tensors
        logsumexp = torch.full(query.shape[:3], torch.nan, device="cuda")
        out.fill_(torch.nan)
        run = launcher(candidate, tensors, logsumexp)
        run()
        first = out.clone()
        for _ in range(10):
            out.fill_(torch.nan)
            run()
            repeats = repeats and torch.equal(out, first)
        group = shape[1] // shape[2]
        wide = [t.double().repeat_interleave(group, 1) for t in (key, value)]
        scores = query.double() @ wide[0].mT * query.size(3) ** -0.5
        if candidate.is_causal:
            hidden = torch.ones(scores.shape[-2:], device="cuda", dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        right = scores.softmax(-1) @ wide[1]
        error = ((first.double() - right).abs().max() / right.abs().max()).item()
        error_lse = (logsumexp.double() - scores.logsumexp(-1)).abs().max().item()
        worst = max(worst, error if error == error else 1e9)
        worst_lse = max(worst_lse, error_lse if error_lse == error_lse else 1e9)
    right_one = repeats and worst < LARGEST_ERROR and worst_lse < 1e-3
    return {"errors": {"out": worst, "logsumexp": worst_lse}, "repeats": repeats, "right": right_one}


def check_here(numbers: list[int], listed: list[Candidate]) -> None:
    """In the child: one line of JSON for each candidate."""
    for number in numbers:
        try:
            result = check(listed[number])
        except Exception as error:
            result = {"right": False, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
        print("CHECKED " + json.dumps({"number": number, **result}), flush=True)
        if "CUDA error" in result.get("failed", "") or "CUDA_ERROR" in result.get("failed", ""):
            return  # the context is lost


# ----------------------------------------------------------------------------------------------------------------- time


def time_problem(problem: Problem, right: list[Candidate], meter: Meter) -> dict[str, Any]:
    """Rates in TFLOP/s by candidate; the results of all of them at full size, and whether they repeat."""
    shape = (problem.batch, problem.heads, problem.heads, problem.seqlen, problem.seqlen)
    tensors = tensors_of(shape, problem.head_dim)
    query, key, value, out = tensors
    logsumexp = torch.empty(query.shape[:3], device="cuda")
    expected = scaled_dot_product_attention(query, key, value, is_causal=problem.is_causal).float()
    runs = {
        "default": Run(functools.partial(scaled_dot_product_attention, query, key, value, is_causal=problem.is_causal))
    }
    differ: dict[str, float] = {}
    for candidate in right:
        run = launcher(candidate, tensors, logsumexp)
        out.fill_(torch.nan)
        run()
        first = out.clone()
        repeats = True
        for _ in range(5):
            run()
            repeats = repeats and torch.equal(out, first)
        differ[candidate.name] = ((first.float() - expected).abs().max() / expected.abs().max()).item()
        if not repeats:
            differ[candidate.name] = float("inf")
        runs[candidate.name] = Run(run)
    times = meter.gpu_times(runs)
    flops = 4 * problem.batch * problem.heads * problem.seqlen**2 * problem.head_dim / (2 if problem.is_causal else 1)
    padded = -(-problem.head_dim // 16) * 16
    named = tiles.choose(
        padded, padded, problem.is_causal, problem.seqlen, problem.seqlen, problem.batch * problem.heads, 132
    )
    return {
        "problem": problem.name,
        "ms": times,
        "tflops": {name: flops / ms / 1e9 for name, ms in times.items()},
        "differences": differ,
        "named": Candidate(problem.head_dim, problem.is_causal, named).name,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="72,64,128,256,80", help="head dimensions")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--budget", type=float, default=55.0, help="seconds after which no further problem is begun")
    parser.add_argument("--compile-only", action="store_true", help="needs no GPU")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    options = parser.parse_args()
    began = time.monotonic()
    head_dims = [int(text) for text in options.only.split(",")]
    problems = [problem for problem in PROBLEMS if problem.head_dim in head_dims]
    kinds = dict.fromkeys((problem.head_dim, problem.is_causal) for problem in problems)
    listed = [candidate for kind in kinds for candidate in candidates(*kind)]
    if options.check:
        check_here([int(number) for number in options.check.split(",")], listed)
        return
    usable = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for number, problem in enumerate(pool.map(Candidate.compile, listed)):
            if problem:
                print(f"{listed[number].name}: {problem}", flush=True)
            else:
                usable.append(number)
    print(f"compiled {len(usable)} of {len(listed)} candidates in {time.monotonic() - began:.0f} s", flush=True)
    if options.compile_only:
        return
    results = Results(Path(options.out), "tune_cuda_forward", environment("cuda"), vars(options))
    checked = tune_cuda.check_apart(usable, options, "benchmarks.tune_cuda_forward")
    for number, result in sorted(checked.items()):
        errors = " ".join(f"{name} {error:.4f}" for name, error in result.get("errors", {}).items())
        verdict = "right" if result["right"] else "WRONG"
        repeats = "" if result.get("repeats", True) else "DOES NOT REPEAT "
        print(f"{verdict} {listed[number].name}: {repeats}{errors} {result.get('failed', '')}", flush=True)
    results.add({"checked": [{"candidate": listed[n].name, **result} for n, result in sorted(checked.items())]})
    right = [listed[number] for number in usable if checked[number]["right"]]
    print(f"checked in {time.monotonic() - began:.0f} s: {len(right)} of {len(usable)} right", flush=True)

    meter = Meter("cuda", options.rounds)
    not_measured = []
    for problem in problems:
        if time.monotonic() - began > options.budget:
            not_measured.append(problem.name)
            continue
        those = [c for c in right if (c.head_dim, c.is_causal) == (problem.head_dim, problem.is_causal)]
        row = time_problem(problem, those, meter)
        print(f"{row['problem']}:", flush=True)
        for name, rate in sorted(row["tflops"].items(), key=lambda item: -item[1]):
            star = "*" if name == row["named"] else " "
            print(f"{star} {rate:6.1f} {name} [{row['differences'].get(name, 0.0):.0e}]", flush=True)
        results.add(row)
        torch.cuda.empty_cache()
    if not_measured:
        print(f"not measured: {', '.join(not_measured)}", flush=True)
    results.finish(not_measured)


if __name__ == "__main__":
    main()
