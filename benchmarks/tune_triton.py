"""Measure candidate tiles of the Triton kernels on this GPU and print the best, for ``kernels/triton/tiles.py``.

    python -m benchmarks.tune_triton --out benchmarks/results/tune.json [--only half] [--budget 240]

Candidates are compiled in parallel first (Triton's disk cache hands them over), then timed in rounds that visit every
candidate in turn, on random data, medians; a candidate that does not fit or spills its way to slowness simply loses.
"""

from __future__ import annotations

import itertools
import statistics
import time

import torch

from benchmarks import tuning
from benchmarks.harness import compile_all
from torch_flashbackend.kernels.triton import attention as kernels
from torch_flashbackend.kernels.triton import tiles
from torch_flashbackend.kernels.triton.launch import device_target
from torch_flashbackend.kernels.triton.tiles import Tile

TOKENS, WIDTH = 16384, 2048

# What is tried, per (bytes per element, kernel, padded head_dim).
CANDIDATES = {
    (2, "forward"): {
        64: [(64, 128, 4, 2), (64, 128, 4, 3), (128, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 3)],
        128: [(64, 64, 4, 3), (128, 64, 4, 2), (128, 128, 8, 3), (128, 64, 8, 3), (64, 128, 4, 1)],
        256: [(128, 64, 8, 2), (64, 32, 4, 2), (64, 64, 4, 2), (128, 32, 8, 3)],
        512: [(64, 64, 8, 1), (64, 32, 8, 2)],
    },
    (2, "backward_query"): {
        64: [(64, 128, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 4, 3), (128, 64, 8, 3)],
        128: [(64, 64, 4, 2), (128, 64, 8, 3), (64, 32, 4, 3), (128, 64, 8, 2), (128, 128, 8, 2)],
        256: [(128, 64, 8, 1), (128, 32, 8, 2), (64, 32, 4, 1)],
        512: [(64, 32, 8, 1), (64, 16, 8, 2)],
    },
    (2, "backward_key_value"): {
        64: [(64, 128, 8, 2), (128, 64, 4, 2), (32, 128, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2)],
        128: [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 2), (64, 128, 8, 3), (32, 64, 4, 3)],
        256: [(64, 64, 8, 2), (32, 64, 8, 3), (32, 64, 8, 2), (64, 64, 8, 1)],
        512: [(32, 32, 8, 1), (16, 16, 4, 1), (32, 32, 8, 2)],
    },
    (2, "backward_mask"): {
        64: [(128, 64, 8, 2), (64, 64, 4, 2), (128, 128, 8, 2)],
        128: [(128, 64, 8, 2), (64, 64, 4, 2), (128, 128, 8, 1), (64, 64, 4, 1)],
        256: [(64, 64, 8, 1), (64, 64, 4, 1), (128, 64, 8, 1)],
        512: [(32, 32, 8, 1), (64, 32, 8, 1)],
    },
    (4, "forward"): {
        64: [(128, 32, 4, 3), (64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 2), (128, 32, 8, 2)],
        128: [(64, 32, 4, 2), (128, 32, 8, 2), (64, 64, 8, 2), (32, 64, 4, 2), (64, 32, 8, 2)],
        256: [(32, 32, 4, 2), (64, 32, 8, 1), (64, 32, 8, 2), (64, 16, 4, 2)],
        512: [(16, 16, 4, 2), (32, 16, 4, 1), (64, 16, 8, 1), (32, 32, 8, 1)],
    },
    (4, "backward_query"): {
        64: [(64, 32, 4, 2), (64, 64, 8, 1), (64, 32, 8, 2), (128, 32, 8, 1)],
        128: [(64, 32, 8, 1), (64, 32, 4, 1), (32, 32, 4, 1), (64, 16, 4, 1)],
        256: [(32, 16, 4, 1), (32, 32, 8, 1), (64, 16, 8, 1)],
        512: [(16, 16, 4, 1), (32, 16, 8, 1)],
    },
    (4, "backward_key_value"): {
        64: [(32, 64, 4, 2), (64, 64, 8, 1), (32, 64, 8, 2), (32, 128, 8, 1)],
        128: [(32, 64, 8, 1), (32, 64, 4, 1), (16, 64, 4, 1), (32, 32, 4, 1)],
        256: [(16, 32, 4, 1), (16, 64, 8, 1), (32, 32, 8, 1)],
        512: [(16, 16, 4, 1), (16, 32, 8, 1)],
    },
}  # fmt: skip


def inputs(head_dim, seqlen, dtype, device, mask_kind):
    """Random tensors of one problem of 16,384 tokens and width 2,048, and its mask."""
    heads = max(1, WIDTH // head_dim)
    batch = max(1, TOKENS // seqlen)
    query, key, value = (torch.randn(batch, heads, seqlen, head_dim, device=device, dtype=dtype) for _ in range(3))
    mask = None
    if mask_kind == "bool":
        mask = torch.rand(batch, 1, seqlen, seqlen, device=device) > 0.2
    elif mask_kind == "float":
        mask = torch.randn(1, heads, seqlen, seqlen, device=device, dtype=dtype)
    return query, key, value, mask


class Problem:
    """One kernel at one size: compiles and runs it with a tile of the caller's choice."""

    def __init__(self, kernel, head_dim, seqlen, dtype, causal, mask_kind, tf32=False):
        self.kernel, self.head_dim, self.seqlen, self.dtype = kernel, head_dim, seqlen, dtype
        self.causal, self.mask_kind, self.tf32 = causal, mask_kind, tf32
        self.tensors = None

    @property
    def name(self):
        dtype = str(self.dtype).removeprefix("torch.") + ("_tf32" if self.tf32 else "")
        return f"{self.kernel} {dtype} D={self.head_dim} S={self.seqlen} causal={self.causal} mask={self.mask_kind}"

    def candidates(self):
        padded = max(64, 1 << (self.head_dim - 1).bit_length())
        return [Tile(*numbers) for numbers in CANDIDATES[self.dtype.itemsize, self.kernel][padded]]

    def compile(self, tile, target):
        """In a worker process, on the CPU: fills Triton's disk cache."""
        query = torch.empty(1, 2, 512, self.head_dim, dtype=self.dtype)
        mask = {"none": None, "bool": torch.ones(1, 1, 512, 512, dtype=torch.bool),
                "float": torch.zeros(1, 1, 512, 512, dtype=self.dtype)}[self.mask_kind]  # fmt: skip
        with only_tile(self.kernel, tile):
            kernels.compile_for(
                target, query, query, query, mask, is_causal=self.causal, backward=self.kernel != "forward",
                mask_gradient=self.kernel == "backward_mask", allow_tf32=self.tf32, only="attention_" + self.kernel,
            )  # fmt: skip

    def allocate(self):
        query, key, value, mask = inputs(self.head_dim, self.seqlen, self.dtype, "cuda", self.mask_kind)
        out = torch.empty_like(query)
        lse_shape = (2, *query.shape[:3]) if self.mask_kind == "float" else query.shape[:3]
        lse = torch.empty(lse_shape, device="cuda")
        scale = self.head_dim**-0.5
        kernels._plans.clear()
        kernels.forward(query, key, value, mask, None, 0.0, self.causal, scale, out, lse, self.tf32)
        grads = tuple(torch.empty_like(t) for t in (query, key, value))
        self.tensors = query, key, value, mask, out, lse, torch.randn_like(out), grads, scale

    def launcher(self, tile):
        """A function that runs only this kernel."""
        query, key, value, mask, out, lse, grad_out, grads, scale = self.tensors
        kernels._plans.clear()
        with only_tile(self.kernel, tile):
            if self.kernel == "forward":
                run = kernels._ForwardPlan(query, key, value, mask, None, 0.0, self.causal, scale, out, lse, self.tf32)
                lists = None if run.mask_tiles is None else run.mask_tiles.make(mask)
                low = kernels._low_part(lse)
                return lambda: run.attention(query, key, value, mask, lists, None, out, lse, low)
            plan = kernels._BackwardPlan(query, key, value, mask, None, 0.0, self.causal, scale, out, lse, grad_out,
                                         *grads, self.kernel == "backward_mask", lse.size(-1), self.tf32)  # fmt: skip
        low = kernels._low_part(lse)
        lists = None if plan.mask_tiles is None else plan.mask_tiles.make(mask)
        statistics = plan.allocate(query).zero_()
        if self.kernel == "backward_query":
            return lambda: plan.query(
                query, key, value, mask, lists, None, out, lse, low, grad_out, statistics, grads[0]
            )
        if self.kernel == "backward_key_value":
            return lambda: plan.key_value(query, key, value, mask, lists, None, statistics, grad_out, *grads[1:], None)
        buffer = torch.empty((plan.splits, *mask.shape), dtype=plan.mask_dtype, device="cuda")
        return lambda: plan.mask(query, key, value, mask, None, statistics, grad_out, buffer)

    @property
    def flops(self):
        """Of one product's pair, as the peers' tables count: forward 4, the share of each backward kernel 4 or 6."""
        query = self.tensors[0]
        products = {"forward": 2, "backward_query": 3, "backward_key_value": 4, "backward_mask": 2}[self.kernel]
        size = 2 * products * query.size(0) * query.size(1) * self.seqlen**2 * self.head_dim
        return size / 2 if self.causal else size


class only_tile:
    """While active, ``choose`` gives this tile for the kernel under test and the table's for the others."""

    def __init__(self, kernel, tile):
        self.kernel, self.tile = kernel, tile

    def __enter__(self):
        kernels.choose = lambda kernel, *rest: self.tile if kernel == self.kernel else tiles.choose(kernel, *rest)

    def __exit__(self, *_):
        kernels.choose = tiles.choose


def compile_one(arguments):
    """Worker: (problem, tile, target)."""
    problem, tile, target = arguments
    try:
        problem.compile(tile, target)
        return None
    except Exception as error:
        return f"{problem.name} {tile}: {type(error).__name__} {str(error)[:200]}"


def time_candidates(problem, rounds, flush):
    """{tile: median ms}, the candidates visited in turn each round."""
    problem.allocate()
    runs, failed = {}, {}
    for tile in problem.candidates():
        try:
            runs[tile] = problem.launcher(tile)
            runs[tile]()
        except Exception as error:
            failed[tile] = str(error)[:160]
            runs.pop(tile, None)
    torch.cuda.synchronize()
    events = {tile: [] for tile in runs}
    for offset in range(rounds):
        order = list(runs)
        for tile in order[offset % len(order) :] + order[: offset % len(order)]:
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            runs[tile]()
            end.record()
            events[tile].append((begin, end))
    torch.cuda.synchronize()
    times = {tile: statistics.median(b.elapsed_time(e) for b, e in pairs) for tile, pairs in events.items()}
    flops = problem.flops
    problem.tensors = None
    return times, failed, flops


def problems(only):
    """What is measured, most important first."""
    half = torch.bfloat16
    kinds = ("forward", "backward_key_value", "backward_query")
    listed = []
    if only in ("half", "all"):
        listed += [Problem(k, d, 4096, half, c, "none")
                   for d, c, k in itertools.product((128, 64, 256), (False, True), kinds)]  # fmt: skip
        listed += [Problem(k, 512, 4096, half, True, "none") for k in kinds]
    if only in ("sizes", "all"):
        listed += [Problem("forward", d, s, half, c, "none")
                   for d, s, c in itertools.product((128, 64), (1024, 16384), (False, True))]  # fmt: skip
    if only in ("mask", "all"):
        listed += [Problem(k, d, 4096, half, False, m)
                   for m, d, k in itertools.product(("bool", "float"), (128, 64), kinds)]  # fmt: skip
        listed += [Problem("backward_mask", d, 4096, half, False, "float") for d in (128, 64)]
    if only in ("single", "all"):
        listed += [Problem(k, d, 2048, torch.float32, True, "none", t)
                   for d, t, k in itertools.product((64, 128), (False, True), kinds)]  # fmt: skip
    return listed


def main():
    groups = ("half", "sizes", "mask", "single", "all")
    parser = tuning.parser(__doc__, rounds=9, budget_s=300.0, only=f"one of {', '.join(groups)}")
    parser.set_defaults(only="half")
    options = parser.parse_args()
    if options.only not in groups:
        parser.error(f"--only is {options.only!r}; allowed: {', '.join(groups)}")
    began = time.monotonic()
    listed = problems(options.only)
    target = device_target(torch.device("cuda", 0))
    work = [(problem, tile, target) for problem in listed for tile in problem.candidates()]
    compile_all(compile_one, work)
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")

    def row_of(problem):
        times, failed, flops = time_candidates(problem, options.rounds, flush)
        ranked = sorted(times.items(), key=lambda item: item[1])
        candidates = [
            {"tile": [t.block_m, t.block_n, t.num_warps, t.num_stages], "ms": ms, "tflops": flops / ms / 1e9}
            for t, ms in ranked
        ]
        failures = {str(tile): message for tile, message in failed.items()}
        shown = "  ".join(f"{c['tile']} {c['tflops']:.0f}" for c in candidates[:5])
        row = {"problem": problem.name, "candidates": candidates, "failed": failures}
        return row, shown + (f"  failed: {len(failed)}" if failed else "")

    tuning.measure_rows("tune_triton", options, began, listed, lambda problem: problem.name, row_of)


if __name__ == "__main__":
    main()
