"""Measure tiles of the dense Hopper forward on this GPU: all that the table can give, and some that it might.

    python -m benchmarks.tune_cuda_forward --out benchmarks/results/tune_cuda_forward.json [--only D72] [--budget 25]

Timed beside PyTorch's default, in turn, on random data, medians. "*": what the table takes; "!": not like PyTorch's.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import tuning
from benchmarks.harness import Meter, Run
from torch_flashbackend.kernels.cuda import forward, tiles
from torch_flashbackend.kernels.cuda.tiles import Tile

NUM_SMS = 132
# Of the largest element of the output.
LARGEST_DIFFERENCE = 0.01


class Problem(NamedTuple):
    """Shapes of one row of results."""

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    is_causal: bool

    @property
    def name(self) -> str:
        """Short: B4 H16 S4096 D72 causal."""
        return f"B{self.batch} H{self.heads} S{self.seqlen} D{self.head_dim} {'causal' if self.is_causal else 'full'}"

    @property
    def taken(self) -> Tile:
        """The table's tile."""
        sizes = (self.seqlen, self.seqlen, self.batch * self.heads)
        return tiles.choose(-(-self.head_dim // 16) * 16, self.head_dim, self.is_causal, *sizes, NUM_SMS)

    @property
    def candidates(self) -> Iterable[tuple[Tile, int]]:
        """What is compared: tiles, and bytes that L2 fetches at a time, where rows begin at odd multiples of 16."""
        usual = tiles.variants(-(-self.head_dim // 16) * 16, self.head_dim, self.is_causal)
        found = dict.fromkeys((self.taken, *usual, *MORE.get((self.head_dim, self.is_causal), ())))
        return [(tile, fetched) for tile in found for fetched in ((128, 256) if self.head_dim % 16 else (256,))]

    def specialisation(self, tile: Tile) -> forward.Specialisation:
        """With this tile, in bfloat16, with logsumexps."""
        padded = -(-self.head_dim // 16) * 16
        return forward.Specialisation(padded, tile.value_columns(self.head_dim), self.is_causal, True, True, tile)


PROBLEMS = [
    *(Problem(4, 16, 4096, head_dim, True) for head_dim in (72, 88, 104, 120)),
    Problem(1, 32, 16384, 64, False),
    Problem(1, 32, 16384, 64, True),
    Problem(32, 32, 512, 64, False),
    Problem(4, 16, 4096, 72, False),
    Problem(32, 16, 512, 72, True),
    *(Problem(4, 16, 4096, head_dim, False) for head_dim in (88, 104, 120)),
    *(Problem(4, 32, 4096, 32, is_causal) for is_causal in (True, False)),
    Problem(32, 32, 512, 64, True),
    Problem(16, 32, 1024, 64, True),
    Problem(32, 16, 512, 128, True),
    Problem(16, 16, 1024, 128, True),
    Problem(4, 32, 4096, 64, True),
    Problem(4, 32, 4096, 64, False),
    Problem(4, 16, 4096, 80, True),
    Problem(4, 16, 4096, 80, False),
    Problem(32, 16, 512, 72, False),
    Problem(1, 16, 16384, 72, True),
    Problem(2, 16, 512, 64, True),
    Problem(2, 16, 1024, 64, False),
    # A whole sequence is a tile or two: encoders, image patches, prompts.
    *(Problem(32, 12, seqlen, 64, False) for seqlen in (128, 197, 256, 384)),
    *(Problem(32, 12, seqlen, 64, True) for seqlen in (128, 256)),
    *(Problem(32, 12, seqlen, 128, is_causal) for seqlen in (128, 256) for is_causal in (False, True)),
    *(Problem(1, 32, seqlen, 128, True) for seqlen in (512, 1024)),
]

# Beside the table's, by head_dim and whether the call is causal.
MORE: dict[tuple[int, bool], tuple[Tile, ...]] = {
    (64, False): (Tile(256, 64, 8, 3), Tile(128, 64, 8, 2), Tile(128, 128, 4, 2)),
    (64, True): (Tile(128, 64, 8, 2, False),),
    (128, True): (Tile(128, 64, 4, 3, False),),
    (32, False): (Tile(256, 64, 8, 2),),
    (32, True): (Tile(256, 64, 8, 3, False, rotate=True),),
    **{(head_dim, True): (Tile(192, 64, 3, 2, False, exact_value=True),) for head_dim in (88, 104, 120)},
    **{(head_dim, False): (Tile(192, 80, 2, 2, False, exact_value=True),) for head_dim in (88, 104, 120)},
}


def name_of(tile: Tile, fetched: int) -> str:
    """Short: 256x64 s8 q3 rotate fetch 256."""
    flags = [name for name in ("ping_pong", "rotate", "exact_value", "short_lists") if getattr(tile, name)]
    return " ".join([f"{tile.block_m}x{tile.block_n} s{tile.stages} q{tile.q_stages}", *flags, f"fetch {fetched}"])


def time_problem(problem: Problem, meter: Meter) -> dict[str, Any]:
    """Rates in TFLOP/s by tile, and by how much each one's output differs from PyTorch's."""
    shape = (problem.batch, problem.heads, problem.seqlen, problem.head_dim)
    query, key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    logsumexp = torch.empty(shape[:3], device="cuda")
    stock = functools.partial(scaled_dot_product_attention, query, key, value, is_causal=problem.is_causal)
    expected = stock().float()
    runs, differences = {"default": Run(stock)}, {}
    for tile, fetched in problem.candidates:
        out = torch.full_like(query, torch.nan)
        chosen = problem.specialisation(tile)
        with (
            mock.patch.object(forward, "specialise", lambda *_, chosen=chosen, **__: chosen),
            mock.patch.object(forward, "_fetched", lambda _, fetched=fetched: fetched),
        ):
            plan = forward.Plan(query, key, value, out, True, problem.is_causal, problem.head_dim**-0.5)
        run = functools.partial(plan, query, key, value, out, logsumexp)
        run()
        differences[name_of(tile, fetched)] = ((out.float() - expected).abs().max() / expected.abs().max()).item()
        runs[name_of(tile, fetched)] = Run(run)
    times = meter.gpu_times(runs)
    flops = 4 * problem.batch * problem.heads * problem.seqlen**2 * problem.head_dim / (2 if problem.is_causal else 1)
    return {
        "problem": problem.name,
        "taken": name_of(problem.taken, forward._fetched(query)),
        "ms": times,
        "tflops": {name: flops / ms / 1e9 for name, ms in times.items()},
        "differences": differences,
    }


def ranking(row: dict[str, Any]) -> str:
    """A line for each candidate, the fastest first, below the problem's name."""
    lines = [""]
    for name, rate in sorted(row["tflops"].items(), key=lambda item: -item[1]):
        difference = row["differences"].get(name, 0.0)
        marks = ("*" if name == row["taken"] else " ") + (" " if difference < LARGEST_DIFFERENCE else "!")
        lines.append(f"{marks} {rate:6.1f} {name} [{difference:.0e}]")
    return "\n".join(lines)


def main() -> None:
    parser = tuning.parser(__doc__, rounds=4, budget_s=25.0, only="texts that names contain, separated by commas")
    options = parser.parse_args()
    began = time.monotonic()
    problems = [problem for problem in PROBLEMS if any(text in f"{problem.name} " for text in options.only.split(","))]
    tuning.compile_in_threads(p.specialisation(tile) for p in problems for tile, _ in p.candidates)
    meter = Meter("cuda", options.rounds)

    def row_of(problem: Problem) -> tuple[dict[str, Any], str]:
        row = time_problem(problem, meter)
        return row, ranking(row)

    tuning.measure_rows("tune_cuda_forward", options, began, problems, lambda problem: problem.name, row_of)


if __name__ == "__main__":
    main()
