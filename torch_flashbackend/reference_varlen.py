"""Variable-length attention in plain PyTorch, a sequence at a time, differentiable: it states what the kernels compute.

May import torch only. Imported by ``varlen.py`` (CPU and MPS, double backward). It reads the lengths on the host;
memory is quadratic in the longest sequence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int,
    window_right: int,
    bottom_right: bool,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """(out [total_q, H, Dv], logsumexp float32 [H, total_q]); arguments as those of the operator (``varlen.py``).

    Rows behind the last sequence are zeros, their logsumexp -inf.
    """
    heads, total_q = query.size(1), query.size(0)
    outs, sums = [], []
    end = 0
    for number, rows, keys in _sequences(query, key, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k):
        scores, wide_value, _ = _scores(
            query[rows], key[keys], value[keys], _slopes(alibi_slopes, number), scale, window_left, window_right,
            bottom_right, softcap,
        )  # fmt: skip
        unseen = (scores == -math.inf).all(-1, keepdim=True)
        joined = scores
        if sinks is not None:
            joined = torch.cat((scores, sinks.to(scores.dtype).view(-1, 1, 1).expand(heads, scores.size(1), 1)), -1)
        nothing = (joined == -math.inf).all(-1, keepdim=True)
        joined = joined.masked_fill(nothing, 0.0)
        weights = torch.softmax(joined, -1)[..., : scores.size(-1)].masked_fill(unseen, 0.0)
        outs.append((weights @ wide_value).transpose(0, 1).to(query.dtype))
        sums.append(torch.logsumexp(joined, -1).masked_fill(nothing.squeeze(-1), -math.inf).float())
        end = rows.stop
    outs.append(query.new_zeros(total_q - end, heads, value.size(2)))
    sums.append(torch.full((heads, total_q - end), -math.inf, device=query.device))
    return torch.cat(outs), torch.cat(sums, 1)


def attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and sinks by the kernels' formulas, from this out and logsumexp.

    arguments: those of ``attention`` after value. A logsumexp of +inf marks a row without a key as -inf does.
    """
    (cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sinks, max_seqlen_q, max_seqlen_k, scale, window_left,
     window_right, bottom_right, softcap) = arguments  # fmt: skip
    dtype = torch.promote_types(query.dtype, torch.float32)
    grads = [torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (query, key, value)]
    delta = (grad_out.to(dtype) * out.to(dtype)).sum(-1)  # [total_q, H]
    logsumexp = logsumexp.to(dtype).masked_fill(logsumexp == -math.inf, math.inf)
    group = query.size(1) // key.size(1)
    for number, rows, keys in _sequences(query, key, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k):
        scores, wide_value, derivative = _scores(
            query[rows], key[keys], value[keys], _slopes(alibi_slopes, number), scale, window_left, window_right,
            bottom_right, softcap,
        )  # fmt: skip
        weights = torch.exp(scores - logsumexp[:, rows].unsqueeze(-1))
        grad = grad_out[rows].to(dtype).transpose(0, 1)
        grad_scores = weights * (grad @ wide_value.mT - delta[rows].T.unsqueeze(-1)) * derivative
        wide_key = _wide(key[keys], query.size(1))
        grads[0][rows] = scale * (grad_scores @ wide_key).transpose(0, 1)
        grad_key = scale * (grad_scores.mT @ query[rows].to(dtype).transpose(0, 1))
        grads[1][keys] = grad_key.unflatten(0, (-1, group)).sum(1).transpose(0, 1)
        grads[2][keys] = (weights.mT @ grad).unflatten(0, (-1, group)).sum(1).transpose(0, 1)
    grad_sinks = None
    if sinks is not None:
        grad_sinks = -(torch.exp(sinks.to(dtype).unsqueeze(1) - logsumexp) * delta.T).sum(1).to(sinks.dtype)
    return grads[0].to(query.dtype), grads[1].to(key.dtype), grads[2].to(value.dtype), grad_sinks


def _sequences(
    query: Tensor, key: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, seqused_k: Tensor | None,
    max_seqlen_q: int, max_seqlen_k: int,
) -> Iterator[tuple[int, slice, slice]]:  # fmt: skip
    """(number, rows of its queries, rows of the keys that count) of each sequence."""
    ends_q = None if cu_seqlens_q is None else cu_seqlens_q.tolist()
    ends_k = None if cu_seqlens_k is None else cu_seqlens_k.tolist()
    for name, ends in (("cu_seqlens_q", ends_q), ("cu_seqlens_k", ends_k)):
        wrong = next((pair for pair in itertools.pairwise([0, *(ends or ())]) if pair[0] > pair[1]), None)
        if wrong or (ends and ends[0] != 0):
            found = f"{wrong[1]} behind {wrong[0]}" if wrong else f"{ends and ends[0]} first"
            raise ValueError(f"{name} begins with 0 and does not decrease; it has {found}")
    used = None if seqused_k is None else seqused_k.tolist()
    known = ends_q or ends_k
    count = len(known) - 1 if known else query.size(0) // max(max_seqlen_q, 1)
    for number in range(count):
        rows = _slice(ends_q, number, max_seqlen_q, query.size(0))
        keys = _slice(ends_k, number, max_seqlen_k, key.size(0))
        if used is not None:
            keys = slice(keys.start, min(keys.stop, keys.start + max(used[number], 0)))
        yield number, rows, keys


def _slice(ends: list[int] | None, number: int, length: int, total: int) -> slice:
    start, stop = (ends[number], ends[number + 1]) if ends is not None else (number * length, (number + 1) * length)
    start = min(max(start, 0), total)
    return slice(start, min(max(stop, start), total))


def _slopes(alibi_slopes: Tensor | None, number: int) -> Tensor | None:
    return alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[number]


def _wide(tensor: Tensor, heads: int) -> Tensor:
    """[rows, Hkv, D] as [heads, rows, D] in at least float32."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32)).transpose(0, 1)
    return wide if wide.size(0) == heads else wide.repeat_interleave(heads // wide.size(0), 0)


def _scores(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None, scale: float, window_left: int, window_right: int,
    bottom_right: bool, softcap: float,
) -> tuple[Tensor, Tensor, Tensor | float]:  # fmt: skip
    """(masked scores [H, rows, keys], value [H, keys, Dv], derivative of the cap) of one sequence."""
    heads = query.size(1)
    # Half of the scale on each side, as PyTorch's math path does, keeps float32 products in range.
    root = math.sqrt(abs(scale))
    scores = (_wide(query, heads) * math.copysign(root, scale)) @ (_wide(key, heads) * root).mT
    derivative: Tensor | float = 1.0
    if softcap > 0.0:
        tangent = torch.tanh(scores / softcap)
        scores, derivative = tangent * softcap, 1.0 - tangent.square()
    rows, keys = scores.shape[1:]
    position = torch.arange(rows, device=query.device)[:, None] + (keys - rows if bottom_right else 0)
    distance = position - torch.arange(keys, device=query.device)[None, :]
    if slopes is not None:
        scores = scores - slopes.to(scores.dtype).view(-1, 1, 1) * distance.abs()
    # Select, do not add: a NaN at a masked position stays there.
    if window_left >= 0:
        scores = scores.masked_fill(distance > window_left, -math.inf)
    if window_right >= 0:
        scores = scores.masked_fill(-distance > window_right, -math.inf)
    return scores, _wide(value, heads), derivative
