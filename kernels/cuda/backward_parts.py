"""A backward in parts, where all of it at once would take more memory than PyTorch's own kernel, or add up too much.

With a mask, a part is some of the batches, or some of the key heads of a single batch. Where the query heads that share
a key head have more rows together than one accumulator may add up, it is one of these query heads of each key head. May
import torch, ``batch_invariance.py`` and this folder. Imported by ``torch_flashbackend/ops.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...batch_invariance import planned_batch
from . import backward as whole
from . import dropout, masks, tiles
from .backward import Plan, is_dense

# Of a part: one that leaves much of the GPU idle costs more than Triton's kernels, which need no parts.
_LEAST_BLOCKS = 256
# The most that a tile of the kernels for masks has.
_TILE_ROWS = _TILE_KEYS = 128
_MOST_STATISTICS = 4  # float32 numbers of a query row: with a float mask


class Parts(NamedTuple):
    """How a call is cut. number: of what it is cut into; at_a_time: how many of them are a part.

    of: what they are: "batches", "key heads" of a single batch, or query heads of each "group" that shares a key head.
    """

    number: int
    at_a_time: int
    of: str = "batches"

    @property
    def is_whole(self) -> bool:
        """Is there but one part, and that the call as it is?"""
        return self.at_a_time == self.number and self.of == "batches"


def parts_of(query, key, value, mask, dropout_p: float) -> Parts | None:
    """The parts of a call, mask [B or 1, H or 1, seqlen_q or 1, seqlen_k or 1] or None; None: for Triton's kernels."""
    batch, kv_heads = query.size(0), key.size(1)
    group = query.size(1) // kv_heads
    if query.size(2) * group > whole.MAX_SUM_ROWS:
        is_plain = mask is None and dropout_p == 0.0
        return Parts(group, 1, "group") if is_plain and query.size(2) <= whole.MAX_SUM_ROWS else None
    at_a_time = batch if mask is None else batches_at_a_time(query, key, value, mask, dropout_p)
    if mask is not None and planned_batch(batch) < batch:  # whether these kernels run must not depend on the batch
        alone = parts_of(query[:1], key[:1], value[:1], mask[:1], dropout_p)
        return None if alone is None else Parts(batch, at_a_time or 1)
    if at_a_time:
        return Parts(batch, at_a_time)
    if batch == 1 and kv_heads > 1:
        heads = (_heads_as_batches(tensor, kv_heads) for tensor in (query, key, value, mask))
        at_a_time = batches_at_a_time(*heads, dropout_p)
    return Parts(kv_heads, at_a_time, "key heads") if at_a_time else None


def batches_at_a_time(query, key, value, mask, dropout_p: float) -> int:
    """How many batches may be computed at a time, so that it takes no more memory than PyTorch's kernel for masks.

    That one has (measured, beside inputs, outputs and logsumexp) float32 sums of the query's gradient and delta, a bool
    mask as one of 16 bits, and keys and values repeated for the query heads that share them. 0 where a single batch
    takes more, or parts are so small that others are faster.
    """
    batch, heads, seqlen_q, head_dim = query.shape
    seqlen_k = key.size(2)
    theirs = 4 * batch * heads * seqlen_q * (head_dim + 1)
    if mask.dtype == torch.bool:
        theirs += 2 * math.prod(size for size, stride in zip(mask.shape, mask.stride(), strict=True) if stride)
    if heads != key.size(1):
        theirs += 2 * batch * heads * seqlen_k * (head_dim + value.size(3))
    rows = tiles.round_up(seqlen_q, _TILE_ROWS)
    ours = 4 * heads * rows * tiles.round_up(head_dim, 16)
    if not is_dense(query[:1]):  # nor will its gradient be, which else has room for the rows' statistics
        ours += 4 * heads * rows * _MOST_STATISTICS
    if dropout_p > 0.0:
        ours += dropout.table_bytes(heads, seqlen_q, seqlen_k)
    lists = masks.most_query_list_bytes(mask, seqlen_q, seqlen_k)
    if mask.size(0) == 1 or mask.stride(0) == 0:
        theirs -= lists
    else:
        ours += lists // batch
    most = min(theirs // ours, batch)
    if most <= 0:
        return 0
    even = math.ceil(batch / math.ceil(batch / most))
    blocks = even * key.size(1) * math.ceil(seqlen_k / _TILE_KEYS)
    return even if even == batch or blocks >= _LEAST_BLOCKS else 0


def backward_in_parts(
    backward: Callable[..., Plan], parts: Parts, grad_out, query, key, value, out, logsumexp, is_causal, softmax_scale,
    grad_query, grad_key, grad_value, deterministic, mask, dropout_p, dropout_seed, delta=None,
) -> Plan:  # fmt: skip
    """``backward`` of backward.py for each part, its arguments and delta as there; the plan of the last part."""
    number, at_a_time, of = parts
    if of == "group":
        return _backward_of_groups(
            backward, number, grad_out, query, key, value, out, logsumexp, is_causal, softmax_scale, grad_query,
            grad_key, grad_value, deterministic,
        )  # fmt: skip
    tensors = grad_out, query, key, value, out, grad_query, grad_key, grad_value, mask, delta
    heads = query.size(1)
    if of == "key heads":
        heads //= number
        tensors = tuple(_heads_as_batches(tensor, number) for tensor in tensors)
        logsumexp = logsumexp.unflatten(-2, (number, heads)).squeeze(-4)
    of_batches = logsumexp.dim() - 3
    # A mask that all parts share is looked at once.
    shared = at_a_time < number and mask is not None and tensors[-2].size(0) == 1
    options: dict[str, Any] = {"made": []} if shared else {}
    for first in range(0, number, at_a_time):
        count = min(at_a_time, number - first)
        *inputs, of_query, of_key, of_value, of_mask, of_delta = (
            tensor if tensor is None or tensor.size(0) == 1 else tensor.narrow(0, first, count) for tensor in tensors
        )
        if of_delta is not None:
            options["delta"] = of_delta
        if first and dropout_p > 0.0:
            options["first_head"] = first * heads
        plan = backward(
            *inputs, logsumexp.narrow(of_batches, first, count), is_causal, softmax_scale, of_query, of_key, of_value,
            deterministic, of_mask, dropout_p, dropout_seed, **options,
        )  # fmt: skip
    return plan


def _backward_of_groups(
    backward: Callable[..., Plan], group: int, grad_out, query, key, value, out, logsumexp, is_causal, softmax_scale,
    grad_query, grad_key, grad_value, deterministic,
) -> Plan:  # fmt: skip
    """One query head of each key head at a time; what they say of keys and values is added up in float32."""
    members = [
        None if tensor is None else tensor.unflatten(1, (-1, group))
        for tensor in (grad_out, query, out, grad_query, logsumexp)
    ]
    sums = [torch.zeros_like(grad, dtype=torch.float32) for grad in (grad_key, grad_value)]
    for member in range(group):
        of_out, of_query, output, grad, rows = (
            tensor if tensor is None else tensor.select(2, member) for tensor in members
        )
        plan = backward(
            of_out, of_query, key, value, output, rows.contiguous(), is_causal, softmax_scale, grad, grad_key,
            grad_value, deterministic, None, 0.0, None,
        )  # fmt: skip
        for total, part in zip(sums, (grad_key, grad_value), strict=True):
            total += part
    grad_key.copy_(sums[0])
    grad_value.copy_(sums[1])
    return plan


def _heads_as_batches(tensor: torch.Tensor | None, kv_heads: int) -> torch.Tensor | None:
    """Of one batch: [1, H, ...] as [Hkv, H / Hkv, ...], unless it has one head for all."""
    if tensor is None or tensor.size(1) == 1:
        return tensor
    return tensor[0].unflatten(0, (kv_heads, -1))
