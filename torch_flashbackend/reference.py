"""The math path: attention in plain PyTorch, differentiable, on any device. It states what every kernel here computes.

May import torch only. Imported by ``ops`` (CPU and MPS, double backward) and by the tests. Half types are computed in
float32; memory is quadratic in the sequence length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_UINT32 = 0xFFFFFFFF


def default_scale(head_dim: int) -> float:
    """1 / sqrt(head_dim); of a head_dim of 0, whose scores are all 0, any number."""
    return 1.0 if isinstance(head_dim, int) and head_dim == 0 else head_dim**-0.5


def draw_dropout_seed(like: Tensor, dropout_p: float) -> Tensor | None:
    """int64 [1] from torch's generator of a tensor's device; None without dropout.

    Drawn on the device: no synchronisation, and CUDA graphs advance it from replay to replay.
    """
    if dropout_p <= 0.0:
        return None
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=like.device)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * query @ key^T + mask) @ value, with zeros where a query sees no key.

    query [B, H, Sq, D], key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv], Hkv a divisor of H; attn_mask bool (True: may see)
    or float (added after scaling), broadcastable to [B, H, Sq, Sk]; is_causal is aligned at the top left. Returns out
    [B, H, Sq, Dv] and, with return_lse, the natural logsumexp of the scores [B, H, Sq] (-inf where no key is seen).
    dropout_seed int64 [1] picks the same dropout as the kernels'.
    """
    scores, value = _scores_and_value(query, key, value, attn_mask, is_causal, scale)
    unseen = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(unseen, 0.0), -1).masked_fill(unseen, 0.0)
    if dropout_p > 0.0:
        keep = dropout_keep(dropout_seed, weights.shape, dropout_p)
        weights = weights * keep / (1.0 - dropout_p) if dropout_p < 1.0 else weights * 0.0
    out = (weights @ value).to(query.dtype)
    if not return_lse:
        return out
    logsumexp = torch.logsumexp(scores.masked_fill(unseen, 0.0), -1).masked_fill(unseen.squeeze(-1), -math.inf)
    return out, logsumexp.float()


def _scores_and_value(query, key, value, attn_mask, is_causal, scale) -> tuple[Tensor, Tensor]:
    """Masked scores [B, H, Sq, Sk] and value with a head for each query head, both in at least float32."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if key.size(-3) != query.size(-3):
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scale = default_scale(query.size(-1)) if scale is None else scale
    # Half of the scale on each side, as PyTorch's math path does, keeps float32 products in range.
    root = math.sqrt(abs(scale))
    scores = (query * (math.copysign(root, scale))) @ (key * root).transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        # Select, do not add: a NaN at a masked position stays there.
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        else:
            scores = torch.where(attn_mask == -math.inf, -math.inf, scores + attn_mask)
    return scores, value


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    dropout_seed: Tensor | None,
    out: Tensor | None = None,
    logsumexp: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of ``attention`` for query, key, value and a float mask, by its formulas, without autograd.

    out, logsumexp: as the kernels take them, the logsumexp [B, H, Sq] or, for a float mask, [2, B, H, Sq]. They count
    where they are not those of this call: where its keys are a part of all keys (ring attention, attention sinks).
    """
    scores, wide_value = _scores_and_value(query, key, value, attn_mask, is_causal, scale)
    dtype = scores.dtype
    scale = default_scale(query.size(-1)) if scale is None else scale
    unseen = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(unseen, 0.0), -1).masked_fill(unseen, 0.0)
    grad_out = grad_out.to(dtype)
    grad_weights = grad_out @ wide_value.transpose(-2, -1)
    share = None if logsumexp is None else _share_of_all_keys(scores, unseen, logsumexp)
    if share is not None:
        weights = weights * share
    kept = weights
    if dropout_p > 0.0:
        factor = dropout_keep(dropout_seed, weights.shape, dropout_p).to(dtype)
        factor = factor / (1.0 - dropout_p) if dropout_p < 1.0 else factor * 0.0
        kept, grad_weights = weights * factor, grad_weights * factor
    delta = (weights * grad_weights).sum(-1, keepdim=True)
    if share is not None and out is not None:
        delta = torch.where(share == 1.0, delta, (grad_out * out.to(dtype)).sum(-1, keepdim=True))
    grad_scores = weights * (grad_weights - delta)
    group = query.size(-3) // key.size(-3)
    wide_key = key.to(dtype).repeat_interleave(group, -3)
    grad_query = scale * (grad_scores @ wide_key)
    grad_key = scale * (grad_scores.transpose(-2, -1) @ query.to(dtype))
    grad_value = kept.transpose(-2, -1) @ grad_out
    if group > 1:
        grad_key = grad_key.unflatten(-3, (-1, group)).sum(-3)
        grad_value = grad_value.unflatten(-3, (-1, group)).sum(-3)
    grad_mask = None
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        grad_mask = grad_scores.sum_to_size(attn_mask.shape).to(attn_mask.dtype)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_mask


def _share_of_all_keys(scores: Tensor, unseen: Tensor, logsumexp: Tensor) -> Tensor:
    """What these keys have of each row's probability [B, H, Sq, 1]: exactly 1 where there are no others."""
    own = torch.logsumexp(scores.masked_fill(unseen, 0.0), -1, keepdim=True).float()
    total, rest = (logsumexp[0], logsumexp[1]) if logsumexp.dim() == 4 else (logsumexp, torch.zeros_like(logsumexp))
    share = torch.exp((own - total.unsqueeze(-1)) - rest.unsqueeze(-1))
    return share.masked_fill(unseen, 1.0).to(scores.dtype)


def dropout_keep(seed: Tensor, shape: tuple[int, ...], dropout_p: float) -> Tensor:
    """Which probabilities [B, H, Sq, Sk] the kernels' generator keeps, bit for bit (``kernels/triton/common.py``)."""
    batch, heads, seqlen_q, seqlen_k = shape
    head = torch.arange(batch * heads, device=seed.device)
    queries = torch.arange(seqlen_q, device=seed.device)
    rows = _random_keys(seed, head[:, None], (queries & ~8)[None, :], 0)
    columns = _random_keys(seed, head[:, None], torch.arange(seqlen_k, device=seed.device)[None, :], 1)
    bits = rows[:, :, None] ^ columns[:, None, :]
    bits = bits ^ (bits >> 16)
    bits = (bits * 0x85EBCA6B) & _UINT32
    bits = bits ^ (bits >> 13)
    bits = (bits * 0xC2B2AE35) & _UINT32
    bits = bits ^ (bits >> 16)
    half = torch.where((queries & 8 > 0)[:, None], bits >> 16, bits & 0xFFFF)
    threshold = min(round(dropout_p * 2**16), 2**16 - 1)
    return (half >= threshold).view(batch, heads, seqlen_q, seqlen_k)


def _random_keys(seed: Tensor, head: Tensor, index: Tensor, stream: int) -> Tensor:
    """Philox 4x32-10 with counter (index, head, stream, 0): its first word, as int64 in 0..2**32-1."""
    index, head = torch.broadcast_tensors(index, head)
    c0, c1, c2, c3 = index, head, torch.full_like(index, stream), torch.zeros_like(index)
    k0, k1 = seed & _UINT32, (seed >> 32) & _UINT32
    for _ in range(10):
        high_b, low_b = _multiply(0xCD9E8D57, c2)
        high_a, low_a = _multiply(0xD2511F53, c0)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0 = (k0 + 0x9E3779B9) & _UINT32
        k1 = (k1 + 0xBB67AE85) & _UINT32
    return c0


def _multiply(constant: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """(high, low) 32 bits of the product of two 32-bit numbers, in int64 arithmetic that never overflows."""
    low_product = constant * (word & 0xFFFF)
    high_product = constant * (word >> 16) + (low_product >> 16)
    return high_product >> 16, ((high_product & 0xFFFF) << 16) | (low_product & 0xFFFF)
