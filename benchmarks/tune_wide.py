"""Measure tiles of float32 without TF32, and of head_dim 512, on this GPU beside PyTorch's default.

    python -m benchmarks.tune_wide --out benchmarks/results/tune_wide.json [--only float32] [--budget 60]

float32: products of float16 halves (``common.split_rows``) beside three TF32 ones, and the relative errors against
float64 beside the default's. head_dim 512: the kernels of which two programs share the columns of a tile ("wide"),
those that keep probabilities in memory ("stored", each over all heads of a call), and the whole backward by how many
programs for each multiprocessor a launch of the latter is to have, which decides on the memory. As ``tune_triton``,
which times one kernel after the other.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks import tune_triton, tuning
from benchmarks.harness import compile_all, say
from benchmarks.tune_triton import kernels, tiles
from torch_flashbackend.kernels.triton import stored_plan
from torch_flashbackend.kernels.triton.launch import device_target
from torch_flashbackend.kernels.triton.tiles import Tile


class Variant(NamedTuple):
    """A tile and, of float32, how products are made; of a whole backward ``stored_plan.PROGRAMS`` (0: none stored)."""

    tile: Tile | None
    precision: str = ""
    programs: int = 0


def variants(precision: str, *numbers: tuple[int, int, int, int]) -> list[Variant]:
    return [Variant(Tile(*four), precision) for four in numbers]


# {(head_dim, kernel): variants}, each kernel's present choice first.
CANDIDATES = {
    (64, "forward"): variants("fp16x3", (128, 64, 8, 2), (64, 64, 4, 2), (128, 64, 4, 2), (256, 64, 8, 2))
    + variants("tf32x3", (128, 32, 4, 3)),
    (128, "forward"): variants("fp16x3", (128, 64, 8, 2), (64, 64, 4, 1)) + variants("tf32x3", (64, 32, 4, 2)),
    (64, "backward_query"): variants("fp16x3", (128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 4, 2))
    + variants("tf32x3", (64, 32, 4, 2)),
    (128, "backward_query"): variants("fp16x3", (128, 32, 8, 2), (64, 32, 4, 1)) + variants("tf32x3", (32, 32, 8, 1)),
    (64, "backward_key_value"): variants("fp16x3", (32, 128, 8, 2), (64, 64, 4, 2), (64, 128, 8, 1))
    + variants("tf32x3", (32, 64, 4, 2)),
    (128, "backward_key_value"): variants("fp16x3", (32, 128, 8, 2), (32, 64, 4, 1), (16, 128, 8, 2))
    + variants("tf32x3", (32, 32, 8, 1)),
    (512, "wide_forward"): variants("", (128, 64, 8, 1), (128, 32, 8, 2)),
    (512, "wide_key"): variants("", (16, 64, 4, 2), (32, 64, 4, 1)),
    (512, "wide_value"): variants("", (64, 64, 4, 1), (32, 128, 8, 2)),
    (512, "backward_query"): variants("", (64, 32, 8, 1)),
    (512, "stored_scores"): variants("", (128, 128, 8, 3), (128, 128, 8, 2)),
    (512, "stored_key"): variants("", (64, 128, 8, 3), (64, 128, 8, 4)),
    (512, "stored_query"): variants("", (128, 64, 8, 4), (128, 64, 8, 3)),
    (512, "backward"): [Variant(None, programs=programs) for programs in (8, 4, 0)],
}
STORED = ("backward", "stored_scores", "stored_key", "stored_query")


SPLIT_PRODUCTS = kernels._Call.split_products
USUAL = stored_plan.PROGRAMS, stored_plan.SHARE_OF_QUERY


class choices:
    """While active, the kernel under test has this variant; the others have the table's."""

    def __init__(self, kernel: str, variant: Variant):
        self.kernel, self.variant = kernel, variant

    def __enter__(self):
        tile, precision, programs = self.variant
        if self.kernel == "backward":
            stored_plan.PROGRAMS = programs
        if self.kernel not in STORED or (self.kernel == "backward" and programs == 0):
            stored_plan.SHARE_OF_QUERY = 0
        kernels.choose = lambda name, *rest: tile if name == self.kernel else tiles.choose(name, *rest)
        if precision:
            kernels._Call.split_products = lambda call: call.constants.update(PRECISION=precision)

    def __exit__(self, *_):
        kernels.choose = tiles.choose
        stored_plan.PROGRAMS, stored_plan.SHARE_OF_QUERY = USUAL
        kernels._Call.split_products = SPLIT_PRODUCTS


class Problem(tune_triton.Problem):
    """One kernel at one size."""

    def __init__(self, kernel, head_dim, dtype, causal, seqlen):
        super().__init__(kernel, head_dim, seqlen, dtype, causal, "none")

    @property
    def batch(self):
        return max(1, (16384 if self.head_dim == 512 else 8192) // self.seqlen)

    def candidates(self):
        return CANDIDATES[self.head_dim, self.kernel]

    def compile(self, variant, target):
        with choices(self.kernel, variant):
            shape = (self.batch, 16, self.seqlen) if self.kernel in STORED else (1, 2, 512)
            query = torch.empty(*shape, self.head_dim, dtype=self.dtype, device="meta")
            forward = self.kernel.endswith("forward")
            name = "attention_forward" if forward else f"attention_{self.kernel}"
            name = None if self.kernel == "backward" else name
            kernels.compile_for(target, query, query, query, is_causal=self.causal, backward=not forward, only=name)

    def allocate(self):
        query, key, value = (
            torch.randn(self.batch, 16, self.seqlen, self.head_dim, device="cuda", dtype=self.dtype) for _ in range(3)
        )
        out, lse, scale = torch.empty_like(query), torch.empty(query.shape[:3], device="cuda"), self.head_dim**-0.5
        kernels._plans.clear()
        kernels.forward(query, key, value, None, None, 0.0, self.causal, scale, out, lse, False)
        grads = tuple(torch.empty_like(query) for _ in range(3))
        self.tensors = query, key, value, None, out, lse, torch.randn_like(out), grads, scale

    def launcher(self, variant):
        query, key, value, _, out, lse, grad_out, grads, scale = self.tensors
        before = query, key, value, None, None, 0.0, self.causal, scale, out, lse
        kernels._plans.clear()
        with choices(self.kernel, variant):
            if self.kernel.endswith("forward"):
                plan = kernels._ForwardPlan(*before, False)
                return lambda: plan.attention(query, key, value, None, None, None, out, lse, None)
            plan = kernels._BackwardPlan(*before, grad_out, *grads, False, lse.size(-1), False)
        statistics = plan.allocate(query).zero_()
        of_query = query, key, value, None, None, None, out, lse, None, grad_out, statistics
        if self.kernel == "backward":
            return lambda: run_whole(plan, of_query, grads)
        if self.kernel in STORED:
            return stored_kernel(self.kernel, plan.stored, of_query, grads)
        if self.kernel == "backward_query":
            return lambda: plan.query(*of_query, grads[0])
        if self.kernel == "backward_key_value":
            before = query, key, value, None, None, None, statistics, grad_out
            return lambda: plan.key_value(*before, *grads[1:], None)
        wide_key, wide_value = plan.wide
        if self.kernel == "wide_key":
            return lambda: wide_key(query, key, value, statistics, grad_out, grads[1])
        return lambda: wide_value(query, key, statistics, grad_out, grads[2])

    @property
    def flops(self):
        """Two products for a forward, five for a whole backward, whichever way they are made."""
        query = self.tensors[0]
        products = 2 if self.kernel.endswith("forward") else 5
        size = 2 * query.size(0) * query.size(1) * self.seqlen**2 * self.head_dim * products
        return size / 2 if self.causal else size


def run_whole(plan, of_query, grads):
    """All launches of a backward; of_query: the arguments of its kernel for queries but the last."""
    query, key, value, *_, grad_out, statistics = of_query
    plan.query(*of_query, None if plan.stored else grads[0])
    if plan.stored:
        plan.stored(query, key, value, grad_out, statistics, *grads)
    else:
        wide_key, wide_value = plan.wide
        wide_key(query, key, value, statistics, grad_out, grads[1])
        wide_value(query, key, statistics, grad_out, grads[2])


def stored_kernel(name, stored, of_query, grads):
    """A function that runs one kernel of ``backward_stored.py``, on all heads of a call."""
    query, key, value, *_, grad_out, statistics = of_query
    probabilities, grad_scores = stored.allocate(query).normal_().chunk(2, 2)
    number, tensors = {
        "stored_scores": (1, (query, key, value, grad_out, statistics, probabilities, grad_scores)),
        "stored_key": (2, (grad_scores, query, grads[1])),
        "stored_query": (4, (grad_scores, key, grads[0])),
    }[name]

    def run():
        for part in stored.parts:
            part[number](*tensors)

    return run


@dataclass
class Default:
    """PyTorch's default, forward or whole backward, for the same tensors."""

    problem: Problem

    def times(self, rounds, flush):
        """(forward, backward) in ms, the best of some rounds."""
        shape = self.problem.batch, 16, self.problem.seqlen, self.problem.head_dim
        leaves = [torch.randn(shape, device="cuda", dtype=self.problem.dtype, requires_grad=True) for _ in range(3)]
        grad = torch.randn(shape, device="cuda", dtype=self.problem.dtype)
        best = [float("inf")] * 2
        for _ in range(rounds):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            flush.zero_()
            events[0].record()
            out = F.scaled_dot_product_attention(*leaves, is_causal=self.problem.causal)
            events[1].record()
            torch.autograd.grad(out, leaves, grad)
            events[2].record()
            torch.cuda.synchronize()
            best = [min(best[i], events[i].elapsed_time(events[i + 1])) for i in range(2)]
        return best


class Errors(NamedTuple):
    """Those of float32 without TF32, of scores that are `factor` times as large."""

    head_dim: int
    factor: int

    @property
    def name(self):
        return f"errors D={self.head_dim} factor={self.factor}"


def errors(head_dim, factor):
    """{way: relative root mean square errors of out, dQ, dK and dV}, of scores that are `factor` times as large.

    "exact logsumexp": of a backward that was given the logsumexp of float64, rounded once.
    """
    shape, scale = (1, 4, 2048, head_dim), head_dim**-0.5
    query, key, value, grad = (torch.randn(shape, device="cuda") for _ in range(4))
    query *= factor
    wide = [t.double().requires_grad_() for t in (query, key, value)]
    scores = wide[0] @ wide[1].mT * scale
    exact_out = scores.softmax(-1) @ wide[2]
    exact = [exact_out.detach(), *torch.autograd.grad(exact_out, wide, grad.double())]
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    out = F.scaled_dot_product_attention(*leaves)
    found = {"default": [out.detach(), *torch.autograd.grad(out, leaves, grad)]}
    out, lse = torch.empty_like(query), torch.empty(shape[:3], device="cuda")
    arguments = None, 0.0, False, scale
    kernels.forward(query, key, value, None, *arguments, out, lse, False)
    for way, statistics in (("fp16x3", lse), ("exact logsumexp", scores.detach().logsumexp(-1).float())):
        grads = [torch.empty_like(query) for _ in range(3)]
        kernels.backward(grad, query, key, value, None, out, statistics, *arguments, *grads, False, False)
        found[way] = [out, *grads]
    return {
        way: [((a.double() - b).norm() / b.norm()).item() for a, b in zip(results, exact, strict=True)]
        for way, results in found.items()
    }


def problems(only):
    """What is measured, most important first."""
    half, single = torch.bfloat16, torch.float32
    listed = []
    if only in ("float32", "all"):
        order = (128, "backward_key_value"), (64, "backward_key_value"), (64, "forward"), (64, "backward_query")
        order += (128, "forward"), (128, "backward_query")
        listed += [Problem(kernel, head_dim, single, False, 2048) for head_dim, kernel in order]
    if only in ("wide", "all"):
        names = ("wide_forward", "wide_key", "wide_value", "backward_query")
        listed += [Problem(kernel, 512, half, True, 4096) for kernel in names]
    if only in ("stored", "wide", "all"):
        listed += [Problem(kernel, 512, half, True, 4096) for kernel in STORED]
        # Of the longest one a head's probabilities are too much memory: strips.
        sizes = (True, 512), (False, 4096), (True, 16384)
        listed += [Problem("backward", 512, half, causal, length) for causal, length in sizes]
    if only in ("float32", "all"):
        listed += [Errors(head_dim, factor) for head_dim, factor in ((64, 1), (64, 30), (128, 30))]
    return listed


def main():
    groups = ("float32", "wide", "stored", "all")
    parser = tuning.parser(__doc__, rounds=3, budget_s=120.0, only=f"one of {', '.join(groups)}")
    parser.set_defaults(only="all")
    options = parser.parse_args()
    if options.only not in groups:
        parser.error(f"--only is {options.only!r}; allowed: {', '.join(groups)}")
    began = time.monotonic()
    listed = problems(options.only)
    target = device_target(torch.device("cuda", 0))
    timed = [problem for problem in listed if isinstance(problem, Problem)]
    compile_all(tune_triton.compile_one, [(p, variant, target) for p in timed for variant in p.candidates()])
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    defaults: dict[Any, Any] = {}

    def row_of(problem):
        if isinstance(problem, Errors):
            found = errors(*problem)
            shown = "  ".join(f"{way} {[f'{v:.2e}' for v in values]}" for way, values in found.items())
            return {"problem": problem.name, "errors": found}, shown
        size = problem.head_dim, problem.causal, problem.seqlen
        if size not in defaults:
            defaults[size] = Default(problem).times(options.rounds, flush)
            say(f"default D={size[0]} causal={size[1]} S={size[2]}: forward, backward {defaults[size]} ms")
        times, failed, flops = tune_triton.time_candidates(problem, options.rounds, flush)
        ranked = sorted(times.items(), key=lambda item: item[1])
        candidates = [{"variant": str(v), "ms": ms, "tflops": flops / ms / 1e9} for v, ms in ranked]
        failures = {str(variant): message for variant, message in failed.items()}
        row = {
            "problem": problem.name,
            "candidates": candidates,
            "failed": failures,
            "default_ms": defaults[size],
        }
        shown = {f"{v.precision} {v.tile or v.programs}".strip(): ms for v, ms in ranked}
        return row, tuning.fastest_first(shown, failures)

    tuning.measure_rows("tune_wide", options, began, listed, lambda problem: problem.name, row_of)


if __name__ == "__main__":
    main()
