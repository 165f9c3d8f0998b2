"""Calls of variable-length attention, and the one tolerance rule applied to them, a sequence at a time.

Shared by tests/, tests/interpreter/ and tests/gpu/. Imports nothing of torch_flashbackend.
"""

from __future__ import annotations

import dataclasses
import math
import random

import torch
from torch import Tensor

from common import Call, Expected, Verdict, check, expect, expect_logsumexp, stock_results


@dataclasses.dataclass
class VarlenCall:
    """query [total_q, H, D], key [total_k, Hkv, D], value [total_k, Hkv, Dv], cut into sequences of these lengths.

    used_k: how many keys of each sequence count. window: keys before and after the query's position, -1 for all.
    bottom_right: the last query stands at the last key, otherwise the first at the first. alibi [H] or [sequences, H].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    used_k: tuple[int, ...] | None = None
    window: tuple[int, int] = (-1, -1)
    bottom_right: bool = True
    scale: float | None = None
    softcap: float = 0.0
    alibi: Tensor | None = None
    sinks: Tensor | None = None
    note: str = ""

    @property
    def softmax_scale(self) -> float:
        return self.query.size(-1) ** -0.5 if self.scale is None else self.scale

    def cu_seqlens(self, dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor]:
        """Where the sequences of queries and of keys begin and end: one tensor where their lengths are the same."""
        device = self.query.device

        def sums(lengths: tuple[int, ...]) -> Tensor:
            return torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)], dtype=dtype, device=device)

        of_queries = sums(self.lengths_q)
        return of_queries, of_queries if self.lengths_q == self.lengths_k else sums(self.lengths_k)

    def seqused_k(self, dtype: torch.dtype = torch.int32) -> Tensor | None:
        return None if self.used_k is None else torch.tensor(self.used_k, dtype=dtype, device=self.query.device)

    def inputs(self) -> dict[str, Tensor]:
        """What has a gradient, by name."""
        inputs = {"query": self.query, "key": self.key, "value": self.value}
        return inputs if self.sinks is None else inputs | {"sinks": self.sinks}

    def leaves(self) -> VarlenCall:
        """The same call on leaves that require gradients."""
        return dataclasses.replace(self, **{n: t.detach().requires_grad_() for n, t in self.inputs().items()})

    def sequence(self, number: int) -> tuple[Call, slice, slice]:
        """One sequence as a call of rank 4, its mask a float mask, a sink one more key; its queries and its keys."""
        starts = [sum(lengths[:number]) for lengths in (self.lengths_q, self.lengths_k)]
        rows = slice(starts[0], starts[0] + self.lengths_q[number])
        used = self.lengths_k[number] if self.used_k is None else self.used_k[number]
        keys = slice(starts[1], starts[1] + used)
        query, key, value = (t[s].transpose(0, 1).unsqueeze(0) for t, s in
                             ((self.query, rows), (self.key, keys), (self.value, keys)))  # fmt: skip
        heads, seqlen_q, device = query.size(1), query.size(2), query.device
        position = torch.arange(seqlen_q, device=device)[:, None] + (used - seqlen_q if self.bottom_right else 0)
        distance = position - torch.arange(used, device=device)[None, :]
        left, right = self.window
        mask = torch.zeros((1, heads, seqlen_q, used), device=device, dtype=torch.float64)
        if self.alibi is not None:
            slopes = self.alibi if self.alibi.dim() == 1 else self.alibi[number]
            mask = mask - slopes.double()[None, :, None, None] * distance.abs()
        if left >= 0:
            mask = mask.masked_fill(distance > left, -math.inf)
        if right >= 0:
            mask = mask.masked_fill(-distance > right, -math.inf)
        if self.sinks is not None:
            column = self.sinks.double().view(1, heads, 1, 1).expand(1, heads, seqlen_q, 1)
            mask = torch.cat((mask, column), -1)
            key, value = (torch.cat((t, torch.zeros_like(t[:, :, :1])), 2) if used else
                          t.new_zeros(*t.shape[:2], 1, t.size(3)) for t in (key, value))  # fmt: skip
        call = Call(query, key, value, mask, scale=self.softmax_scale, enable_gqa=key.size(1) != heads,
                    mask_grad=self.sinks is not None, softcap=self.softcap)  # fmt: skip
        return call, rows, keys

    def describe(self) -> str:
        shapes = [list(t.shape) for t in (self.query, self.key, self.value)]
        return (
            f"{self.note} {shapes} {self.query.dtype} lengths {self.lengths_q} {self.lengths_k} used {self.used_k} "
            f"window {self.window} bottom_right {self.bottom_right} scale {self.scale} softcap {self.softcap} "
            f"alibi {None if self.alibi is None else list(self.alibi.shape)} sinks {self.sinks is not None}"
        )


def expected_of(call: VarlenCall, grad_out: Tensor | None = None) -> Expected:
    """Float64 "out", "logsumexp" [H, total_q] and, with grad_out, gradients, packed as the call, and their rounding."""
    heads, total_q = call.query.size(1), call.query.size(0)
    shapes = {"out": (total_q, heads, call.value.size(2)), "logsumexp": (heads, total_q)}
    if grad_out is not None:
        shapes |= {name: tuple(tensor.shape) for name, tensor in call.inputs().items()}
    device = call.query.device
    values = {name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in shapes.items()}
    values["logsumexp"].fill_(-math.inf)
    squares = {name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in shapes.items()}
    for number, length in enumerate(call.lengths_q):
        part, rows, keys = call.sequence(number)
        if length == 0 or part.key.size(2) == 0:
            continue
        grad = None if grad_out is None else grad_out[rows].transpose(0, 1).unsqueeze(0)
        found, sums = expect(part, grad), expect_logsumexp(part)
        count = keys.stop - keys.start
        for results, target, square in ((found.values, values, False), (found.deviations, squares, True)):
            target["out"][rows] = _packed(results["out"].square() if square else results["out"])
            if grad_out is None:
                continue
            for name, where in (("query", rows), ("key", keys), ("value", keys)):
                tensor = results[name].square() if square else results[name]
                target[name][where] = _packed(tensor if name == "query" else tensor[:, :, :count])
            if call.sinks is not None:
                column = results["attn_mask"][..., count]
                target["sinks"] += (column.square() if square else column).sum((0, 2))
        values["logsumexp"][:, rows] = sums.values["logsumexp"][0]
        squares["logsumexp"][:, rows] = sums.deviations["logsumexp"][0].square()
    deviations = {name: square.sqrt() for name, square in squares.items()}
    if grad_out is not None and call.sinks is not None:  # stored once, in the sinks' dtype
        stored = torch.finfo(call.sinks.dtype).eps / 2 * values["sinks"].abs()
        deviations["sinks"] = (deviations["sinks"].square() + stored.square()).sqrt()
    return Expected(values, deviations)


def _packed(tensor: Tensor) -> Tensor:
    return tensor.squeeze(0).transpose(0, 1)


def judge_varlen(
    call: VarlenCall, results: dict[str, Tensor], grad_out: Tensor | None = None, stock: dict | None = None
) -> list[Verdict]:
    """Raises AssertionError for a result outside the tolerance. stock: results of PyTorch's kernels, as in `check`."""
    expected = expected_of(call, grad_out)
    if "logsumexp" in results:
        unseen = expected.values["logsumexp"] == -math.inf
        assert torch.equal(results["logsumexp"] == -math.inf, unseen), f"rows without a key: {call.describe()}"
        for tensors in (results, expected.values):
            tensors["logsumexp"] = tensors["logsumexp"].masked_fill(unseen, 0.0)
    return check(results, expected, stock, call.describe())


def varlen_call(
    lengths_q: tuple[int, ...],
    lengths_k: tuple[int, ...] | None = None,
    heads: int = 2,
    kv_heads: int | None = None,
    head_dim: int = 16,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    seed: int = 0,
    alibi: str | None = None,
    sinks: bool = False,
    layout: str = "packed",
    **options,
) -> VarlenCall:
    """alibi: "heads" or "sequences". layout: "packed", "qkv" (parts of one tensor), "unaligned", "heads first"."""
    lengths_k = lengths_q if lengths_k is None else lengths_k
    kv_heads = heads if kv_heads is None else kv_heads
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    generator = torch.Generator().manual_seed(seed)

    def normal(total: int, count: int, width: int) -> Tensor:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        if layout == "qkv":
            return random(total, 3, count, width)[:, seed % 3]
        if layout == "unaligned":
            return random(total * count * width + 1)[1:].view(total, count, width)
        if layout == "heads first":
            return random(count, total, width).transpose(0, 1)
        return random(total, count, width)

    slopes = None
    if alibi is not None:
        shape = (heads,) if alibi == "heads" else (len(lengths_q), heads)
        slopes = torch.rand(shape, generator=generator).to(device) * 0.3
    sink = torch.tensor([0.5, -3.0, 20.0, -torch.inf]).repeat(heads)[:heads].to(device, dtype) if sinks else None
    return VarlenCall(
        normal(sum(lengths_q), heads, head_dim), normal(sum(lengths_k), kv_heads, head_dim),
        normal(sum(lengths_k), kv_heads, head_dim_v), tuple(lengths_q), tuple(lengths_k), alibi=slopes, sinks=sink,
        **options,
    )  # fmt: skip


def gradient_for_varlen(call: VarlenCall, seed: int = 9) -> Tensor:
    """A random grad_out [total_q, H, Dv] in the call's dtype."""
    shape = (call.query.size(0), call.query.size(1), call.value.size(2))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(call.query.device, call.query.dtype)


def random_varlen_call(seed: int, device: str, dtype: torch.dtype | None = None, largest: int = 400) -> VarlenCall:
    """A call drawn from a fixed seed: any mixture of lengths, options in any combination."""
    rng = random.Random(seed)

    def length() -> int:
        return rng.choice([0, 1, 64, 128]) if rng.random() < 0.3 else rng.randint(1, largest)

    count = rng.choice([1, 2, 3, 5, 8])
    lengths_q = tuple(length() for _ in range(count))
    lengths_k = lengths_q if rng.random() < 0.5 else tuple(length() for _ in range(count))
    kv_heads, group = rng.choice([1, 2]), rng.choice([1, 1, 2, 4])
    head_dim = rng.choice([64, 64, 64, 128, 128, 80, 33, 256])
    window = rng.choice([(-1, -1), (-1, 0), (-1, 0), (-1, 0), (70, 0), (30, 40), (-1, 7), (100, -1)])
    used = tuple(rng.randint(0, n) for n in lengths_k) if rng.random() < 0.15 else None
    return varlen_call(
        lengths_q, lengths_k, kv_heads * group, kv_heads, head_dim, head_dim if rng.random() < 0.85 else 64,
        dtype or rng.choice([torch.float16, torch.bfloat16, torch.bfloat16, torch.float32]), device, seed,
        rng.choice([None, None, None, "heads", "sequences"]), rng.random() < 0.2,
        rng.choice(["packed", "packed", "qkv", "unaligned", "heads first"]), used_k=used, window=window,
        bottom_right=rng.random() < 0.7, scale=rng.choice([None, None, 0.3, -0.2, 0.0]),
        softcap=rng.choice([0.0, 0.0, 0.0, 5.0]), note=f"random variable-length call {seed}",
    )  # fmt: skip


def stock_results_varlen(call: VarlenCall, grad_out: Tensor | None) -> dict[str, dict[str, Tensor]]:
    """What PyTorch's kernels answer, a sequence at a time, packed as the call; {} where it has more than a window."""
    if call.softcap or call.alibi is not None or call.sinks is not None:
        return {}
    parts: dict[str, list] = {}
    numbers = [n for n, length in enumerate(call.lengths_q) if length and call.sequence(n)[0].key.size(2)]
    for number in numbers:
        part, rows, keys = call.sequence(number)
        seen = None if call.window == (-1, -1) else part.attn_mask == 0.0
        plain = dataclasses.replace(part, attn_mask=seen)
        grad = None if grad_out is None else grad_out[rows].transpose(0, 1).unsqueeze(0)
        for kernel, results in stock_results(plain, grad).items():
            parts.setdefault(kernel, []).append((rows, keys, results))
    packed = {}
    for kernel, found in parts.items():
        if len(found) < len(numbers):
            continue
        heads = call.query.size(1)
        shapes = {"out": call.query.new_zeros(call.query.size(0), heads, call.value.size(2))}
        if grad_out is not None:
            shapes |= {name: torch.zeros_like(tensor) for name, tensor in call.inputs().items()}
        for rows, keys, results in found:
            for name, where in (("out", rows), ("query", rows), ("key", keys), ("value", keys)):
                if name in shapes:
                    shapes[name][where] = _packed(results[name])
        packed[kernel] = shapes
    return packed
