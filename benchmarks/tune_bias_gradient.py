"""Check and measure the ways to compute an additive bias's gradient on this GPU, for ``kernels/cuda/tiles.py``.

    python -m benchmarks.tune_bias_gradient --out benchmarks/results/tune_bias_gradient.json [--only D128] [--budget 60]

One row for each call: milliseconds of every candidate of the Hopper kernel alone, of Triton's kernel alone, and of
whole backwards: PyTorch's own choice, ours, ours with Triton's kernel, ours without the bias's gradient. Timed in
turns, medians, random data. A candidate whose result is not Triton's within rounding, or which does not compile, is
named in `failed`. `tflops` counts two products.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import tuning
from benchmarks.harness import Meter, Run, compile_all
from torch_flashbackend import ops
from torch_flashbackend.kernels.cuda import bias_gradient, tiles
from torch_flashbackend.kernels.cuda.tiles import BiasTile
from torch_flashbackend.kernels.triton import attention
from torch_flashbackend.kernels.triton.launch import device_target

# Two bfloat16 results of the same numbers differ by this part of their norm at most.
LARGEST_DIFFERENCE = 0.01


@dataclasses.dataclass(frozen=True)
class Shape:
    """batch, heads, seqlen, head_dim of a call, and what the bias has of the first two, and in the others' place."""

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    bias_batch: int = 1
    bias_heads: int = 0  # 0: as many as the call
    bias_dtype: torch.dtype = torch.bfloat16

    @property
    def bias(self) -> tuple[int, int, int, int]:
        return self.bias_batch, self.bias_heads or self.heads, self.seqlen, self.seqlen

    @property
    def label(self) -> str:
        sizes = f"B{self.batch} H{self.heads} S{self.seqlen} D{self.head_dim}"
        return f"{sizes} bias {self.bias[0]}x{self.bias[1]} {str(self.bias_dtype).removeprefix('torch.')}"


def work() -> list[Shape]:
    """Most important first."""
    large = [Shape(4, 16, 4096, 128), Shape(4, 16, 4096, 64), Shape(4, 16, 4096, 128, bias_dtype=torch.float32)]
    shared = [Shape(4, 16, 2048, 128, bias_heads=1), Shape(4, 16, 2048, 128, bias_batch=4), Shape(4, 16, 2048, 128)]
    return [*large, *shared, Shape(8, 16, 1024, 64), Shape(4, 16, 256, 128), Shape(4, 8, 2048, 256)]


def candidates(shape: Shape) -> list[BiasTile]:
    """The table's tile, and others."""
    tile = tiles.choose_bias(shape.head_dim, shape.head_dim, shape.bias_dtype.itemsize)
    changes: list[dict[str, Any]] = [{}]
    if shape.head_dim == 128:
        changes.append({"stages": 2})
        if shape.bias_dtype == torch.bfloat16:
            changes.append({"block_n": 64, "stages": 4})
    return [dataclasses.replace(tile, **change) for change in changes]


def name_of(tile: BiasTile) -> str:
    """Short: 128x128 s3."""
    return f"{tile.block_m}x{tile.block_n} s{tile.stages}"


class Tensors:
    """Inputs, results and statistics of one call."""

    def __init__(self, shape: Shape) -> None:
        generator = torch.Generator(device="cuda").manual_seed(0)

        def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(size, generator=generator, device="cuda").to(dtype)

        size = shape.batch, shape.heads, shape.seqlen, shape.head_dim
        self.query, self.key, self.value, self.grad_out = (normal(*size) for _ in range(4))
        self.bias = normal(*shape.bias, dtype=shape.bias_dtype)
        self.scale = shape.head_dim**-0.5
        inputs = self.query, self.key, self.value, self.bias, None, 0.0, False, self.scale
        self.out, self.logsumexp = ops._attention_forward_cuda(*inputs, "query", "triton")
        self.triton = attention._BackwardPlan(
            *inputs[:4], None, 0.0, False, self.scale, self.out, self.logsumexp, self.grad_out,
            torch.empty_like(self.query), torch.empty_like(self.key), torch.empty_like(self.value), True,
            self.logsumexp.size(-1), False,
        )  # fmt: skip
        self.statistics = self.triton.allocate(self.query)
        lists = None if self.triton.mask_tiles is None else self.triton.mask_tiles.make(self.bias)
        self.triton.query(
            *inputs[:4], lists, None, self.out, self.logsumexp, self.logsumexp[1], self.grad_out, self.statistics,
            torch.empty_like(self.query),
        )  # fmt: skip
        self.buffer = torch.empty((self.triton.splits, *self.bias.shape), dtype=self.triton.mask_dtype, device="cuda")
        self.grad = torch.empty_like(self.bias)

    def run_triton(self) -> torch.Tensor:
        """Its kernel alone."""
        self.triton.mask(
            self.query, self.key, self.value, self.bias, None, self.statistics, self.grad_out, self.buffer
        )  # fmt: skip
        return self.buffer[0] if self.triton.splits == 1 else self.buffer.sum(0)

    def run_hopper(self, plan: bias_gradient.Plan) -> None:
        inputs = self.grad_out, self.query, self.key, self.value, self.bias, self.logsumexp
        plan(*inputs, self.triton.delta(self.statistics), self.grad)

    def plan(self, tile: BiasTile | None) -> bias_gradient.Plan:
        inputs = self.grad_out, self.query, self.key, self.value, self.bias, self.logsumexp
        return bias_gradient.Plan(*inputs, self.scale, tile)

    def backward(self, needs_bias: bool = True, hopper: bool = True) -> Any:
        """Ours, whole."""
        before = ops._bias_gradient
        if not hopper:
            ops._bias_gradient = lambda *_: None
        try:
            return ops._gradients_cuda(
                self.grad_out, self.query, self.key, self.value, self.bias, self.out, self.logsumexp, None, 0.0, False,
                self.scale, [True, True, True, needs_bias],
            )  # fmt: skip
        finally:
            ops._bias_gradient = before

    def stock(self) -> Run:
        """PyTorch's own choice, whole."""
        leaves = [t.detach().requires_grad_() for t in (self.query, self.key, self.value, self.bias)]
        out = scaled_dot_product_attention(*leaves[:3], attn_mask=leaves[3])
        return Run(lambda: torch.autograd.grad(out, leaves, self.grad_out, retain_graph=True))


def measure(shape: Shape, meter: Meter) -> tuple[dict[str, float], dict[str, str]]:
    """(milliseconds by name, what failed by name)."""
    tensors = Tensors(shape)
    right = tensors.run_triton().float()
    runs, failed = {"triton": Run(tensors.run_triton)}, {}
    for tile in candidates(shape):
        name = name_of(tile)
        try:
            plan = tensors.plan(tile)
        except Exception as error:
            failed[name] = f"{type(error).__name__} {str(error)[:200]}"
            continue
        tensors.grad.fill_(torch.nan)
        tensors.run_hopper(plan)
        distance = (torch.linalg.vector_norm(tensors.grad - right) / torch.linalg.vector_norm(right)).item()
        if distance < LARGEST_DIFFERENCE:
            runs[name] = Run(functools.partial(tensors.run_hopper, plan))
        else:
            failed[name] = f"differs from Triton's result by {distance:.3g} of its norm"
    del right
    torch.cuda.empty_cache()
    runs["backward"] = Run(tensors.backward)
    runs["backward with triton's"] = Run(functools.partial(tensors.backward, hopper=False))
    runs["backward without"] = Run(functools.partial(tensors.backward, needs_bias=False))
    try:
        runs["backward stock"] = tensors.stock()
    except Exception as error:
        failed["backward stock"] = f"{type(error).__name__} {str(error)[:200]}"
    return meter.gpu_times(runs), failed


def compile_candidates(chosen: list[Shape]) -> None:
    """Fills the cache of binaries, several at a time; what does not compile shows later."""
    specs = {
        bias_gradient.specialise(
            shape.head_dim, shape.head_dim, torch.bfloat16, shape.bias_dtype, True
        )._replace(tile=tile)
        for shape in chosen
        for tile in candidates(shape)
    }  # fmt: skip

    tuning.compile_in_threads(specs, lambda spec: name_of(spec.tile))


def compile_triton(arguments: tuple[Shape, Any]) -> str | None:
    """In a worker process, without the GPU: fills Triton's disk cache."""
    shape, target = arguments
    torch.set_num_threads(1)
    size = shape.batch, shape.heads, shape.seqlen, shape.head_dim
    query = torch.empty(size, dtype=torch.bfloat16, device="meta")
    mask = torch.empty(shape.bias, dtype=shape.bias_dtype, device="meta")
    try:
        attention.compile_for(target, query, query, query, mask, mask_gradient=True)
        return None
    except Exception as error:
        return f"{shape.label}: {type(error).__name__} {str(error)[:200]}"


def main(argv: list[str] | None = None) -> int:
    parser = tuning.parser(__doc__, rounds=5, budget_s=60.0, only="calls that have this in their label")
    options = parser.parse_args(argv)
    began = time.monotonic()
    chosen = [shape for shape in work() if options.only in shape.label]
    compile_candidates(chosen)
    target = device_target(torch.device("cuda", 0))
    compile_all(compile_triton, [(shape, target) for shape in chosen])
    meter = Meter("cuda", options.rounds, round_ms=4.0)

    def row_of(shape: Shape) -> tuple[dict[str, Any], str]:
        times, failed = measure(shape, meter)
        flops = 4 * shape.batch * shape.heads * shape.seqlen**2 * shape.head_dim
        tflops = {name: flops / ms * 1e-9 for name, ms in times.items() if not name.startswith("backward")}
        row = {"label": shape.label, "ms": times, "tflops": tflops, "failed": failed}
        return row, tuning.fastest_first(times, failed)

    tuning.measure_rows("tune_bias_gradient", options, began, chosen, lambda shape: shape.label, row_of)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
