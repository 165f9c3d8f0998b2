"""Packed sequences, mixed and equal lengths: nested tensors with the plugin on and off, and attention_varlen by itself.

    python -m benchmarks.varlen                       # about 4 minutes on an H200, writes benchmarks/results/
    python -m benchmarks.varlen --only mixed
    python -m benchmarks.varlen --device cpu --smoke --out /tmp/varlen.json

Contenders: "triton", F.scaled_dot_product_attention on nested tensors of jagged layout with the plugin on; "default",
the same with it off; "varlen", torch_flashbackend.attention_varlen on the packed tensors, without the nested tensors'
own work, and "packed_triton" the same without the Hopper kernels; and at equal lengths "dense", our dense kernel of the
"cuda" backend ("dense_triton": of the other) on the same numbers. "nested_us" is the wall clock of
F.scaled_dot_product_attention alone, from nested tensors to nested tensors, with the plugin ("triton") and without
("default"): the longer of what the CPU and what the GPU needs, as users see it. TFLOP/s count each sequence's own
square (half when causal; a window by its keys), so padding is nobody's work. See harness.py for how numbers come about.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_flashbackend
from benchmarks import contenders, harness, measure
from benchmarks.contenders import Prepared
from benchmarks.harness import Budget, ClockLog, Meter, Results, Run, say, significant
from torch_flashbackend.kernels.cuda import varlen as cuda_varlen

NAMES = ("triton", "varlen", "packed_triton", "default", "dense", "dense_triton")
DENSE = {"dense": "cuda", "dense_triton": "triton"}
EAGER = ("triton", "varlen", "default")
BACKWARD_FLOPS = 2.5


@dataclasses.dataclass(frozen=True)
class VarlenCase:
    """Sequences of these lengths, each attending to itself; window: keys before the query's own, -1 for all."""

    group: str
    lengths: tuple[int, ...]
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    causal: bool = True
    window: int = -1
    dtype: str = "bfloat16"

    @property
    def label(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        form = f"{self.group} {len(self.lengths)}x<={max(self.lengths)} H{heads} D{self.head_dim}"
        causal = " causal" if self.causal else ""
        return f"{form}{causal}" + (f" window {self.window}" if self.window >= 0 else "")

    @property
    def scores(self) -> float:
        """Pairs of a query and a key that it sees, of one head."""
        if self.window >= 0:
            return float(sum(sum(min(i, self.window) + 1 for i in range(length)) for length in self.lengths))
        return sum(length * length for length in self.lengths) * (0.5 if self.causal else 1.0)

    @property
    def flops(self) -> float:
        return 4.0 * self.heads * self.head_dim * self.scores

    def smaller(self) -> VarlenCase:
        """The same at a size for checking the script."""
        lengths = tuple(min(length, 8 + n) for n, length in enumerate(self.lengths[:3]))
        equal = len(set(self.lengths)) == 1
        lengths = (8,) * len(lengths) if equal else lengths
        return dataclasses.replace(self, lengths=lengths, heads=2, kv_heads=2, head_dim=16, window=min(self.window, 4),
                                   dtype="float32")  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """What the policy and the report look at; lengths in full."""
        longest = max(self.lengths)
        return {
            "group": self.group, "lengths": list(self.lengths), "batch": len(self.lengths), "heads": self.heads,
            "kv_heads": self.kv_heads, "seqlen_q": longest, "seqlen_k": longest, "head_dim": self.head_dim,
            "head_dim_v": self.head_dim, "causal": self.causal, "window": self.window, "dtype": self.dtype,
        }  # fmt: skip


def random_lengths(count: int, longest: int, total: int, seed: int) -> tuple[int, ...]:
    """Lengths drawn evenly up to `longest` until they make `total`."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) < total and len(lengths) < count:
        lengths.append(min(int(torch.randint(1, longest + 1, (1,), generator=generator)), total - sum(lengths)))
    return tuple(lengths)


HALVES = (8192, 4096, 2048, 1024, 512, 256, 128, 128)


# 16,384 tokens as well, the longest sequence six times the shortest.
SIXTHS = (6144, 4096, 3072, 2048, 1024)


def cases() -> list[VarlenCase]:
    """Mixed lengths first: what packed sequences are for."""
    found = [VarlenCase("mixed", lengths, causal=causal) for lengths in (HALVES, SIXTHS) for causal in (True, False)]
    for head_dim in (64, 128):
        found.append(VarlenCase("mixed", random_lengths(99, 4096, 16384, 1), 2048 // head_dim, 2048 // head_dim,
                                head_dim))  # fmt: skip
        found.append(VarlenCase("mixed short", random_lengths(999, 512, 16384, 2), 2048 // head_dim, 2048 // head_dim,
                                head_dim))  # fmt: skip
    found.append(VarlenCase("mixed", random_lengths(99, 4096, 16384, 3), 32, 8))
    for length in (512, 2048, 8192):
        for head_dim in (64, 128):
            found += [VarlenCase("equal", (length,) * (16384 // length), 2048 // head_dim, 2048 // head_dim, head_dim,
                                 causal) for causal in (True, False)]  # fmt: skip
    found.append(VarlenCase("equal", (4096,) * 4, 8, 8, 256))
    found.append(VarlenCase("small", random_lengths(8, 128, 512, 4), 12, 12, 64))
    found.append(VarlenCase("window", (8192, 8192), window=1024))
    return found


@dataclasses.dataclass
class Inputs:
    """Packed tensors of one case, with where its sequences begin and end."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    offsets: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


def make_inputs(case: VarlenCase, device: torch.device, training: bool) -> Inputs:
    """Random data; leaves require gradients for training."""
    total, dtype = sum(case.lengths), getattr(torch, case.dtype)

    def random(heads: int, grad: bool) -> Tensor:
        return torch.randn(total, heads, case.head_dim, device=device, dtype=dtype, requires_grad=grad)

    offsets = torch.tensor([0, *case.lengths], device=device).cumsum(0)
    tensors = (random(heads, training) for heads in (case.heads, case.kv_heads, case.kv_heads))
    return Inputs(*tensors, random(case.heads, False), offsets)


def nested_tensors(case: VarlenCase, inputs: Inputs) -> list[Tensor]:
    """query, key and value as nested tensors [B, H, S of each, D] of jagged layout."""
    if case.window >= 0 or case.heads != case.kv_heads:
        raise RuntimeError("scaled_dot_product_attention on nested tensors knows no windows and no grouped heads")
    bounds = {"min_seqlen": min(case.lengths), "max_seqlen": max(case.lengths)}
    return [torch.nested.nested_tensor_from_jagged(t, inputs.offsets, **bounds).transpose(1, 2)
            for t in inputs.leaves]  # fmt: skip


def nested_call(case: VarlenCase, inputs: Inputs) -> Callable[[], Tensor]:
    """F.scaled_dot_product_attention on nested tensors made beforehand; the packed output."""
    nested = nested_tensors(case, inputs)
    return lambda: F.scaled_dot_product_attention(*nested, is_causal=case.causal).transpose(1, 2).values()


def varlen_call(case: VarlenCase, inputs: Inputs) -> Callable[[], Tensor]:
    """attention_varlen on the packed tensors."""
    cu_seqlens, longest = inputs.offsets.int(), max(case.lengths)
    return lambda: torch_flashbackend.attention_varlen(
        *inputs.leaves, cu_seqlens, cu_seqlens, longest, longest, is_causal=case.causal, window_size=(case.window, -1)
    )  # fmt: skip


@contextlib.contextmanager
def without_hopper() -> Iterator[None]:
    """Packed sequences on Triton's kernels alone."""
    takes, cuda_varlen.takes = cuda_varlen.takes, lambda *_: False
    try:
        yield
    finally:
        cuda_varlen.takes = takes


def dense_call(case: VarlenCase, inputs: Inputs) -> Callable[[], Tensor]:
    """Our dense kernels on the same numbers."""
    if len(set(case.lengths)) > 1 or case.window >= 0:
        raise RuntimeError("the dense kernel takes equal lengths without a window")
    dense = [t.unflatten(0, (len(case.lengths), -1)).transpose(1, 2) for t in inputs.leaves]
    gqa = case.heads != case.kv_heads
    return lambda: (
        F.scaled_dot_product_attention(*dense, is_causal=case.causal, enable_gqa=gqa).transpose(1, 2).flatten(0, 1)
    )


def prepare(name: str, case: VarlenCase, device: torch.device) -> Prepared:
    """The calls of one contender. Raises RuntimeError where it does not take the case."""
    make = {"triton": nested_call, "default": nested_call, "varlen": varlen_call, "packed_triton": varlen_call,
            "dense": dense_call, "dense_triton": dense_call}[name]  # fmt: skip
    if name == "triton" and device.type != "cuda":
        raise RuntimeError("the plugin takes CUDA tensors")
    context = contenders.stock() if name == "default" else contenders.plugin_on("triton")
    if name == "packed_triton":
        context = without_hopper
    if name in DENSE:
        backend = DENSE[name] if device.type == "cuda" else "math"
        context = lambda: torch_flashbackend.sdpa_backend(backend)  # noqa: E731
    inference, training = make_inputs(case, device, False), make_inputs(case, device, True)
    with context():
        forward, step = make(case, inference), make(case, training)
        forward()
        out = step()
        gradients = (training.leaves, training.grad_out)
        torch.autograd.grad(out, *gradients, retain_graph=True)
    return Prepared(
        Run(forward, context),
        Run(lambda: torch.autograd.grad(out, *gradients, retain_graph=True), context),
        Run(lambda: torch.autograd.grad(step(), *gradients), context),
    )


def prepare_nested(name: str, case: VarlenCase, device: torch.device) -> Prepared:
    """F.scaled_dot_product_attention and no more: nested tensors in and out, those that go in leaves of the graph."""
    context = contenders.stock() if name == "default" else contenders.plugin_on("triton")
    plain = nested_tensors(case, make_inputs(case, device, False))
    leaves = [tensor.detach().requires_grad_() for tensor in plain]

    def attention(tensors: list[Tensor]) -> Tensor:
        return F.scaled_dot_product_attention(*tensors, is_causal=case.causal)

    with context():
        out = attention(leaves)
        grad_out = torch.randn_like(out.detach())
        torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    return Prepared(
        Run(lambda: attention(plain), context),
        Run(lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True), context),
        Run(lambda: torch.autograd.grad(attention(leaves), leaves, grad_out), context),
    )


def measure_nested(
    case: VarlenCase, meter: Meter, names: list[str], refused: dict[str, str]
) -> dict[str, dict[str, float]]:
    """{pass: {contender: microseconds}} of the call alone. Adds to `refused` what raises."""
    prepared: dict[str, Prepared] = {}
    for name in names:
        try:
            prepared[name] = prepare_nested(name, case, meter.device)
        except RuntimeError as error:
            if meter.cuda and "CUDA error" in str(error):
                raise
            refused[f"{name}, nested leaves"] = f"{type(error).__name__}: {str(error)[:200]}"
    found = {}
    for name in ("forward", "backward", "training"):
        times = meter.eager_times({key: getattr(one, name) for key, one in prepared.items()}) if prepared else {}
        found[name] = {key: significant(t) for key, t in times.items()}
    return found


def measure_case(case: VarlenCase, meter: Meter, clocks: ClockLog) -> dict[str, Any]:
    """A row of the results file, in the form that measure.py's rows have."""
    start = time.monotonic()
    prepared: dict[str, Prepared] = {}
    refused: dict[str, str] = {}
    for name in NAMES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.manual_seed(0)  # the same numbers for each contender
                candidate = prepare(name, case, meter.device)
                ran = contenders.kernels_launched(candidate.forward)
                if meter.cuda and bool(ran) != (name != "default"):
                    raise RuntimeError(f"kernels of ours launched: {ran}")
                prepared[name] = candidate
        except Exception as error:  # whatever a contender raises, the others are measured
            if meter.cuda and "CUDA error" in str(error):
                raise
            refused[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    row: dict[str, Any] = {"label": case.label, "case": case.to_json(), "policy_case": "packed", "refused": refused}
    row["ms"], row["tflops"], row["aa"], row["eager_us"], row["memory_bytes"] = {}, {}, {}, {}, {}
    for name, flops in (("forward", case.flops), ("backward", BACKWARD_FLOPS * case.flops)):
        runs = {key: getattr(one, name) for key, one in prepared.items()}
        if not runs:
            continue
        times, row["aa"][name] = measure.times_and_aa(runs, meter)
        row["ms"][name] = {key: significant(t) for key, t in times.items()}
        row["tflops"][name] = {key: significant(flops / t * 1e-9, 4) for key, t in times.items()}
    for name in ("forward", "training"):
        runs = {key: getattr(one, name) for key, one in prepared.items() if key in EAGER}
        row["eager_us"][name] = {key: significant(t) for key, t in meter.eager_times(runs).items()} if runs else {}
        row["memory_bytes"][name] = {key: meter.peak_memory(run) for key, run in runs.items()}
    row["nested_us"] = measure_nested(
        case, meter, [name for name in ("triton", "default") if name in prepared], refused
    )
    others = [name for name in prepared if name != "default"]
    row["our_kernels"] = {name: contenders.kernels_launched(prepared[name].training) for name in others}
    if "default" in prepared:
        row["difference"] = {
            name: significant(contenders.difference(prepared[name].training, prepared["default"].training), 3)
            for name in others
        }
    row["gpu_state"] = clocks.since(start)
    row["seconds"] = round(time.monotonic() - start, 2)
    return row


def run(arguments: argparse.Namespace) -> int:
    """Measures the cases within the budget and writes the results file after each."""
    budget = Budget(arguments.budget)
    chosen = harness.chosen(arguments, cases())
    contenders.take_everything()
    facts = harness.environment(arguments.device)
    meter = harness.meter_of(arguments)
    path = harness.results_path(arguments, facts, "varlen")
    results = Results(path, "varlen", facts, {**vars(arguments), "contenders": list(NAMES)})
    clocks = ClockLog(meter.device)
    left_out: list[str] = []
    say(f"{len(chosen)} cases, budget {arguments.budget:.0f} s, writing {path}")
    try:
        for index, case in enumerate(chosen):
            if budget.exhausted:
                left_out = [c.label for c in chosen[index:]]
                say(f"budget used: {len(left_out)} cases not measured")
                break
            row = measure_case(case, meter, clocks)
            results.add(row)
            say(f"[{index + 1}/{len(chosen)} {budget.used:.0f} s] {measure.summary(row)}")
            if meter.cuda:
                torch.cuda.empty_cache()
    finally:
        clocks.close()
        results.finish(left_out)
    measure.print_tables(results.data["rows"], list(NAMES))
    return 0


def main(argv: list[str] | None = None) -> int:
    options = harness.parser(__doc__.splitlines()[0], budget_s=300)
    return run(options.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
