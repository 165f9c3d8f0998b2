"""Measure the Hopper forward for head dimensions above 256 on this GPU, beside PyTorch's default and Triton's kernels.

    python -m benchmarks.tune_cuda_wide --out benchmarks/results/tune_cuda_wide.json [--only 512] [--budget 20]

Compared: one block or two that share keys and values, and how many heads have their causal tiles in one list. Timed in
turn, on random data, medians. "*": what a call is given; "!": not like PyTorch's.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness import Meter, Results, Run, environment
from torch_flashbackend import ops
from torch_flashbackend.kernels.cuda import forward_wide
from torch_flashbackend.kernels.cuda.forward_wide import WidePlan, WideSpecialisation

NUM_SMS = 132
# Of the largest element of the output.
LARGEST_DIFFERENCE = 0.01


class Variant(NamedTuple):
    """heads: query heads whose causal tiles are in one list; no matter in full calls."""

    cluster: int
    heads: int

    @property
    def name(self) -> str:
        """Short: cluster 2, heads 4."""
        return f"cluster {self.cluster}, heads {self.heads}"


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
    def taken(self) -> Variant:
        """What a call is given."""
        heads = self.batch * self.heads
        in_one_list = forward_wide.heads_per_group(
            heads, self.heads // self.kv_heads, self.seqlen, self.head_dim, math.ceil(self.seqlen / 64), NUM_SMS
        )
        return Variant(self.specialisation(None).cluster, in_one_list if self.is_causal else heads)

    @property
    def candidates(self) -> Iterable[Variant]:
        """What is compared."""
        heads = self.batch * self.heads
        counts = (self.taken.heads, *(count for count in (2, 8, 16) if self.is_causal), heads)
        return dict.fromkeys(Variant(cluster, min(count, heads)) for cluster in (2, 1) for count in counts)

    def specialisation(self, cluster: int | None) -> WideSpecialisation:
        """In bfloat16, with logsumexps; None: as a call is given."""
        spec = forward_wide.specialise(self.head_dim, torch.bfloat16, self.is_causal, True, seqlen_q=self.seqlen)
        return spec if cluster is None else spec._replace(cluster=cluster)


PROBLEMS = [
    Problem(4, 16, 16, 4096, 512, True),
    Problem(4, 16, 16, 4096, 512, False),
    Problem(32, 16, 16, 512, 512, True),
    Problem(1, 16, 16, 16384, 512, True),
    Problem(4, 16, 4, 4096, 512, True),
    Problem(4, 16, 16, 4096, 384, True),
    Problem(4, 16, 16, 4096, 320, True),
]


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
    for variant in problem.candidates:
        out = torch.full_like(query, torch.nan)
        with mock.patch.object(forward_wide, "heads_per_group", lambda *_, heads=variant.heads: heads):
            plan = WidePlan(
                query, key, value, out, True, problem.is_causal, problem.head_dim**-0.5, NUM_SMS,
                problem.specialisation(variant.cluster),
            )  # fmt: skip
        run = functools.partial(plan, query, key, value, out, logsumexp)
        run()
        differences[variant.name] = ((out.float() - expected).abs().max() / expected.abs().max()).item()
        runs[variant.name] = Run(run)
    times = meter.gpu_times(runs)
    flops = 4 * problem.batch * problem.heads * problem.seqlen**2 * problem.head_dim / (2 if problem.is_causal else 1)
    return {
        "problem": problem.name,
        "taken": problem.taken.name,
        "ms": times,
        "tflops": {name: flops / ms / 1e9 for name, ms in times.items()},
        "differences": differences,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="512,384,320", help="head dimensions")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds after which no further problem is begun")
    options = parser.parse_args()
    began = time.monotonic()
    head_dims = {int(text) for text in options.only.split(",")}
    problems = [problem for problem in PROBLEMS if problem.head_dim in head_dims]
    specialisations = dict.fromkeys(p.specialisation(variant.cluster) for p in problems for variant in p.candidates)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(WideSpecialisation.compile, specialisations))
    print(f"compiled {len(specialisations)} in {time.monotonic() - began:.0f} s", flush=True)
    results = Results(Path(options.out), "tune_cuda_wide", environment("cuda"), vars(options))
    meter = Meter("cuda", options.rounds)
    not_measured = []
    for problem in problems:
        if time.monotonic() - began > options.budget:
            not_measured.append(problem.name)
            continue
        row = time_problem(problem, meter)
        print(f"{row['problem']}:", flush=True)
        for name, rate in sorted(row["tflops"].items(), key=lambda item: -item[1]):
            difference = row["differences"].get(name, 0.0)
            marks = ("*" if name == row["taken"] else " ") + (" " if difference < LARGEST_DIFFERENCE else "!")
            print(f"{marks} {rate:6.1f} {name} [{difference:.0e}]", flush=True)
        results.add(row)
    if not_measured:
        print(f"not measured: {', '.join(not_measured)}", flush=True)
    results.finish(not_measured)


if __name__ == "__main__":
    main()
