"""Measure the Hopper forward for head dimensions above 256 on this GPU, beside PyTorch's default and Triton's kernels.

    python -m benchmarks.tune_cuda_wide --out benchmarks/results/tune_cuda_wide.json [--only 512] [--budget 20]

Compared: how many heads have their causal tiles in one list. Timed in turn, on random data, medians. "*": what a call
is given; "!": not like PyTorch's.
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
from torch_flashbackend import ops
from torch_flashbackend.kernels.cuda import forward_wide
from torch_flashbackend.kernels.cuda.forward_wide import WidePlan, WideSpecialisation

# Of the largest element of the output.
LARGEST_DIFFERENCE = 0.01


class Problem(NamedTuple):
    """Shapes of one row of results."""

    batch: int
    heads: int
    kv_heads: int
    seqlen: int
    head_dim: int
    is_causal: bool

    @property
    def name(self) -> str:
        """Short: B4 H16 S4096 D512 causal."""
        heads = f"H{self.heads}" if self.heads == self.kv_heads else f"H{self.heads}/{self.kv_heads}"
        kind = "causal" if self.is_causal else "full"
        return f"B{self.batch} {heads} S{self.seqlen} D{self.head_dim} {kind}"

    @property
    def taken(self) -> int:
        """How many query heads a call has in one list; no matter in full calls."""
        heads = self.batch * self.heads
        if not self.is_causal:
            return heads
        return forward_wide.heads_per_group(heads, self.heads // self.kv_heads, self.seqlen, self.head_dim)

    @property
    def candidates(self) -> Iterable[int]:
        """What is compared."""
        heads = self.batch * self.heads
        counts = (self.taken, *(count for count in (2, 8, 16, 32) if self.is_causal), heads)
        return dict.fromkeys(min(count, heads) for count in counts)

    @property
    def specialisation(self) -> WideSpecialisation:
        """In bfloat16, with logsumexps."""
        return forward_wide.specialise(self.head_dim, torch.bfloat16, self.is_causal, True)


PROBLEMS = [
    Problem(4, 16, 16, 4096, 512, True),
    Problem(4, 16, 16, 4096, 512, False),
    Problem(32, 16, 16, 512, 512, True),
    Problem(1, 16, 16, 16384, 512, True),
    Problem(4, 16, 4, 4096, 512, True),
    Problem(32, 16, 4, 512, 512, True),
    Problem(4, 16, 16, 4096, 384, True),
    Problem(4, 16, 16, 4096, 320, True),
]


def name_of(heads: int) -> str:
    """Of a variant: so many heads in one list."""
    return f"heads {heads}"


def time_problem(problem: Problem, meter: Meter) -> dict[str, Any]:
    """Rates in TFLOP/s by variant, and by how much each one's output differs from PyTorch's."""
    shape = (problem.batch, problem.heads, problem.seqlen, problem.head_dim)
    kv_shape = (problem.batch, problem.kv_heads, problem.seqlen, problem.head_dim)
    query, key, value = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in (shape, kv_shape, kv_shape))
    logsumexp = torch.empty(shape[:3], device="cuda")
    options = {"is_causal": problem.is_causal, "enable_gqa": problem.heads != problem.kv_heads}
    stock = functools.partial(scaled_dot_product_attention, query, key, value, **options)
    triton = functools.partial(
        ops.run, query, key, value, None, 0.0, problem.is_causal, backend="triton", return_lse=True
    )
    expected = stock().float()
    triton()
    runs, differences = {"default": Run(stock), "triton": Run(triton)}, {}
    for heads in problem.candidates:
        out = torch.full_like(query, torch.nan)
        with mock.patch.object(forward_wide, "heads_per_group", lambda *_, heads=heads: heads):
            plan = WidePlan(query, key, value, out, True, problem.is_causal, problem.head_dim**-0.5)
        run = functools.partial(plan, query, key, value, out, logsumexp)
        run()
        differences[name_of(heads)] = ((out.float() - expected).abs().max() / expected.abs().max()).item()
        runs[name_of(heads)] = Run(run)
    times = meter.gpu_times(runs)
    flops = 4 * problem.batch * problem.heads * problem.seqlen**2 * problem.head_dim / (2 if problem.is_causal else 1)
    return {
        "problem": problem.name,
        "taken": name_of(problem.taken),
        "ms": times,
        "tflops": {name: flops / ms / 1e9 for name, ms in times.items()},
        "differences": differences,
    }


def main() -> None:
    parser = tuning.parser(__doc__, rounds=4, budget_s=20.0, only="head dimensions, separated by commas")
    parser.set_defaults(only="512,384,320")
    options = parser.parse_args()
    began = time.monotonic()
    head_dims = {int(text) for text in options.only.split(",")}
    problems = [problem for problem in PROBLEMS if problem.head_dim in head_dims]
    tuning.compile_in_threads(problem.specialisation for problem in problems)
    meter = Meter("cuda", options.rounds)

    def row_of(problem: Problem) -> tuple[dict[str, Any], str]:
        row = time_problem(problem, meter)
        lines = [""]
        for name, rate in sorted(row["tflops"].items(), key=lambda item: -item[1]):
            difference = row["differences"].get(name, 0.0)
            marks = ("*" if name == row["taken"] else " ") + (" " if difference < LARGEST_DIFFERENCE else "!")
            lines.append(f"{marks} {rate:6.1f} {name} [{difference:.0e}]")
        return row, "\n".join(lines)

    tuning.measure_rows("tune_cuda_wide", options, began, problems, lambda problem: problem.name, row_of)


if __name__ == "__main__":
    main()
