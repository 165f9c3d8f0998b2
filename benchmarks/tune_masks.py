"""Measure how masked calls are best computed on this GPU: with lists of tiles or without, which tile sizes.

    python -m benchmarks.tune_masks --out benchmarks/results/nvidia_h200_tune_mask_tiles.json     # 150 s on an H200
    TRITON_INTERPRET=1 python -m benchmarks.tune_masks --device cpu --out /tmp/tune.json          # checks the script

One row for each case and kernel: the milliseconds of every variant, and of making the lists alone (`lists` and, for the
backward's two kinds, `lists backward`). Variants are compiled in parallel first, then timed in turns, medians, on
random data; what does not compile or fails is named in `failed`. The most important rows come first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time

import torch

from benchmarks import cases, tuning
from benchmarks.harness import Meter, Run, compile_all
from torch_flashbackend.kernels.triton import attention as kernels
from torch_flashbackend.kernels.triton import tiles
from torch_flashbackend.kernels.triton.launch import device_target
from torch_flashbackend.kernels.triton.tiles import Tile


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to compute one kernel: its tile (None: the table's) and whether it goes by lists."""

    tile: tuple[int, int, int, int] | None = None
    listed: bool = True

    @property
    def name(self) -> str:
        parts = ["table" if self.tile is None else "x".join(map(str, self.tile))]
        parts += [] if self.listed else ["no lists"]
        return " ".join(parts)

    @contextlib.contextmanager
    def active(self, kernel: str):
        """``attention`` plans this variant of one kernel; the others go by the table."""
        before = kernels.choose, kernels.worth_listing
        chosen = None if self.tile is None else Tile(*self.tile)

        def choose(name, *rest):
            return chosen if chosen is not None and name == kernel else tiles.choose(name, *rest)

        kernels.choose, kernels.worth_listing = choose, lambda *_: self.listed
        kernels._plans.clear()
        try:
            yield
        finally:
            kernels.choose, kernels.worth_listing = before
            kernels._plans.clear()


FORWARD = [
    Variant(), Variant(listed=False), Variant((64, 128, 4, 1)), Variant((64, 64, 4, 3)), Variant((128, 128, 8, 2)),
]  # fmt: skip
QUERY = [Variant(), Variant(listed=False), Variant((64, 64, 4, 2))]
KEY_VALUE = [
    Variant(), Variant(listed=False), Variant((32, 64, 4, 3)), Variant((32, 64, 4, 2)), Variant((64, 128, 8, 2)),
]  # fmt: skip
MASK = [
    Variant(), Variant((128, 64, 8, 2)), Variant((64, 64, 4, 2)), Variant((128, 64, 8, 1)), Variant((64, 128, 4, 1)),
]  # fmt: skip
PLAIN = [Variant(), Variant(listed=False)]
SOME_KEY_VALUE = [KEY_VALUE[0], KEY_VALUE[2]]


def plan_of_work() -> list[tuple[cases.Case, str, list[Variant]]]:
    """(case, kernel, variants), most important first; equal variants of equal masks are compiled once."""
    by_mask = {case.mask: case for case in cases.special() if case.group == "mask"}
    causal, bias, lowest = by_mask["causal_mask"], by_mask["bias"], by_mask["lowest_causal"]
    work = [(causal, "forward", FORWARD), (causal, "backward_key_value", KEY_VALUE), (causal, "backward_query", QUERY)]
    work += [(bias, "backward_key_value", KEY_VALUE), (bias, "backward_mask", MASK), (bias, "forward", FORWARD)]
    work += [(bias, "backward_query", QUERY)]
    work += [(lowest, "forward", PLAIN), (lowest, "backward_key_value", SOME_KEY_VALUE),
             (lowest, "backward_query", PLAIN)]  # fmt: skip
    for mask in ("padding", "window", "documents"):
        case = by_mask[mask]
        work += [(case, "forward", FORWARD if mask == "window" else [*PLAIN, FORWARD[3]]),
                 (case, "backward_key_value", PLAIN if mask == "padding" else SOME_KEY_VALUE),
                 (case, "backward_query", PLAIN)]  # fmt: skip
    return work


def compile_one(arguments) -> str | None:
    """In a worker process, without the GPU: fills Triton's disk cache."""
    case, kernel, variant, target = arguments
    torch.set_num_threads(1)
    query = torch.empty(1, 2, 512, case.head_dim, dtype=cases.DTYPES[case.dtype])
    mask = cases.make_inputs(dataclasses.replace(case, batch=1, heads=2, kv_heads=2, seqlen_q=512, seqlen_k=512), "cpu",
                             training=False).attn_mask  # fmt: skip
    try:
        with variant.active(kernel):
            kernels.compile_for(target, query, query, query, mask, backward=kernel != "forward",
                                mask_gradient=kernel == "backward_mask", only="attention_" + kernel)  # fmt: skip
        return None
    except Exception as error:
        return f"{case.label} {kernel} {variant.name}: {type(error).__name__} {str(error)[:200]}"


class Tensors:
    """Inputs, results and statistics of one case."""

    def __init__(self, case: cases.Case, device: str) -> None:
        inputs = cases.make_inputs(case, device, training=False)
        self.query, self.key, self.value, self.mask = inputs.query, inputs.key, inputs.value, inputs.attn_mask
        self.grad_out, self.scale = inputs.grad_out, case.head_dim**-0.5
        self.out = torch.empty_like(self.query)
        statistics = (2, *self.query.shape[:3]) if self.mask.is_floating_point() else self.query.shape[:3]
        self.logsumexp = torch.empty(statistics, device=device)
        self.grads = [torch.empty_like(tensor) for tensor in (self.query, self.key, self.value)]
        kernels.forward(self.query, self.key, self.value, self.mask, None, 0.0, False, self.scale, self.out,
                        self.logsumexp, False)  # fmt: skip

    def launcher(self, kernel: str, variant: Variant):
        """Functions that run only this kernel and only what makes its lists (None without lists)."""
        inputs = self.query, self.key, self.value, self.mask
        options = None, 0.0, False, self.scale, self.out, self.logsumexp
        low = kernels._low_part(self.logsumexp)
        with variant.active(kernel):
            if kernel == "forward":
                plan = kernels._ForwardPlan(*inputs, *options, False)
            else:
                plan = kernels._BackwardPlan(*inputs, *options, self.grad_out, *self.grads, kernel == "backward_mask",
                                             self.logsumexp.size(-1), False)  # fmt: skip
        lists = None if plan.mask_tiles is None else plan.mask_tiles.make(self.mask)
        make = None if lists is None else lambda: plan.mask_tiles.make(self.mask)
        if kernel == "forward":
            return lambda: plan.attention(*inputs, lists, None, self.out, self.logsumexp, low), make
        statistics = plan.allocate(self.query)

        def query_kernel():
            plan.query(*inputs, lists, None, self.out, self.logsumexp, low, self.grad_out, statistics, self.grads[0])

        query_kernel()  # leaves the statistics
        if kernel == "backward_query":
            return query_kernel, make
        if kernel == "backward_key_value":
            return lambda: plan.key_value(*inputs, lists, None, statistics, self.grad_out, *self.grads[1:], None), make
        buffer = torch.empty((plan.splits, *self.mask.shape), dtype=plan.mask_dtype, device=self.query.device)
        return lambda: plan.mask(*inputs, None, statistics, self.grad_out, buffer), make


def measure(meter: Meter, tensors: Tensors, kernel: str, variants: list[Variant]) -> tuple[dict, dict]:
    """(milliseconds by variant, what failed by variant)."""
    runs, failed = {}, {}
    for variant in variants:
        try:
            run, make = tensors.launcher(kernel, variant)
            run()
            runs[variant.name] = Run(run)
            if make is not None and kernel != "backward_query":
                runs.setdefault("lists" if kernel == "forward" else "lists backward", Run(make))
        except Exception as error:
            failed[variant.name] = f"{type(error).__name__} {str(error)[:160]}"
    return meter.gpu_times(runs) if runs else {}, failed


def main(argv: list[str] | None = None) -> int:
    parser = tuning.parser(__doc__, rounds=5, budget_s=150.0, only="cases whose mask has this in its name")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args(argv)
    began = time.monotonic()
    on_gpu = options.device == "cuda"
    work = [item for item in plan_of_work() if options.only in item[0].mask]
    if on_gpu:
        target = device_target(torch.device("cuda", 0))
        jobs = [(case, kernel, variant, target) for case, kernel, variants in work for variant in variants]
        compile_all(compile_one, jobs)
    meter = Meter(options.device, options.rounds if on_gpu else 1, round_ms=4.0)

    @functools.lru_cache(maxsize=1)  # rows of one case follow each other
    def tensors_of(case: cases.Case) -> Tensors:
        small = dataclasses.replace(case.smaller(), seqlen_q=80, seqlen_k=80, head_dim=16, head_dim_v=16,
                                    dtype="float16")  # fmt: skip
        return Tensors(case if on_gpu else small, options.device)

    def row_of(item: tuple[cases.Case, str, list[Variant]]) -> tuple[dict, str]:
        case, kernel, variants = item
        times, failed = measure(meter, tensors_of(case), kernel, variants)
        row = {"case": case.to_json(), "label": case.label, "kernel": kernel, "ms": times, "failed": failed}
        return row, tuning.fastest_first(times, failed)

    tuning.measure_rows("tune_masks", options, began, work, lambda item: f"{item[0].label} {item[1]}", row_of)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
