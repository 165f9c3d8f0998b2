"""flash-attn 2's functions, with its names, arguments and meaning, on this package's kernels.

    from torch_flashbackend.flash_attn import flash_attn_func, flash_attn_varlen_func

They run wherever PyTorch does: on the kernels where these take the call, in PyTorch operations elsewhere (a CPU). A
causal mask is aligned at the bottom right: the last query sees all keys. Written from flash-attn's documentation
(https://github.com/Dao-AILab/flash-attention, version 2); no code of it is used.

What is the same in all functions: q [batch, seqlen_q, heads, head_dim], k and v [batch, seqlen_k, kv_heads, head_dim],
kv_heads a divisor of heads; the varlen functions take [total, heads, head_dim] and int32 cu_seqlens [batch + 1].
softmax_scale: 1/sqrt(head_dim) if None. window_size (left, right): keys before and after a query's position that it
sees, -1 for all. softcap: 0.0 for none. alibi_slopes: float32 [heads] or [batch, heads]. deterministic: always so here.
return_attn_probs: return (out, logsumexp, None), the logsumexp float32 [batch, heads, seqlen_q], or [heads, total_q] of
varlen functions; flash-attn's third result, a debugging aid of dropout, is not there.

May import torch, `_torch.py`, direct.py, varlen.py and, when called, kv_cache.py. Imported by users.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from . import direct, varlen

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of dense tensors: out [batch, seqlen_q, heads, head_dim], differentiable.

    Raises NotImplementedError for dropout_p together with a window, softcap, alibi_slopes, return_attn_probs or a
    causal mask over queries and keys of different number; ValueError for shapes that do not fit.
    """
    varlen.check_types(q=q, k=k, v=v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} is [batch, seqlen, heads, head_dim], not {list(tensor.shape)}")
    if k.shape[0] != q.shape[0] or k.shape[:3] != v.shape[:3] or k.shape[3] != q.shape[3]:
        raise ValueError(f"q, k and v do not fit: {list(q.shape)}, {list(k.shape)}, {list(v.shape)}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"the heads of k, {k.shape[2]}, must divide those of q, {q.shape[2]}")
    varlen.check_softcap(softcap)
    left, right = _window(window_size, causal, k.size(1))
    # With as many keys as queries both corners of the mask are the same.
    plain_causal = (left, right) == (-1, 0) and q.size(1) == k.size(1)
    if softcap == 0.0 and alibi_slopes is None and ((left, right) == (-1, -1) or plain_causal):
        if dropout_p > 0.0 and return_attn_probs:
            raise NotImplementedError("return_attn_probs is not supported together with dropout_p")
        result = direct.attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, dropout_p, plain_causal, softmax_scale,
            q.size(2) != k.size(2), return_lse=return_attn_probs,
        )  # fmt: skip
        if return_attn_probs:
            return result[0].transpose(1, 2), result[1], None
        return result.transpose(1, 2)  # type: ignore[union-attr]
    _no_dropout(dropout_p, "a window, softcap, alibi_slopes or a causal mask over another number of keys than queries")
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k = k.size(1)
    q, k, v = (tensor.flatten(0, 1) for tensor in varlen.under_autocast(q, k, v))
    out, logsumexp = _packed(
        q, k, v, None, None, seqlen_q, seqlen_k, softmax_scale, left, right, softcap, alibi_slopes, batch
    )
    out = out.unflatten(0, (batch, seqlen_q))
    if return_attn_probs:
        return out, logsumexp.view(heads, batch, seqlen_q).transpose(0, 1), None
    return out


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with kv [batch, seqlen_k, 2, kv_heads, head_dim]."""
    k, v = _unpacked("kv", kv, ("batch", "seqlen", "2", "kv_heads", "head_dim"))
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           deterministic, return_attn_probs)  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with qkv [batch, seqlen, 3, heads, head_dim]."""
    q, k, v = _unpacked("qkv", qkv, ("batch", "seqlen", "3", "heads", "head_dim"))
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           deterministic, return_attn_probs)  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention of packed sequences: out [total_q, heads, head_dim], differentiable.

    Raises NotImplementedError for dropout_p and block_table, ValueError for shapes that do not fit.
    """
    _no_dropout(dropout_p, "packed sequences")
    if block_table is not None:
        raise NotImplementedError("block_table is not supported here; flash_attn_with_kvcache reads paged caches")
    varlen.check_types(q=q, k=k, v=v)
    varlen.check_softcap(softcap)
    max_seqlen_q = q.size(0) if max_seqlen_q is None else max_seqlen_q
    max_seqlen_k = k.size(0) if max_seqlen_k is None else max_seqlen_k
    varlen.check_longest(max_seqlen_q, max_seqlen_k)
    left, right = _window(window_size, causal, max_seqlen_k)
    q, k, v = varlen.under_autocast(q, k, v)
    out, logsumexp = _packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, left,
                             right, softcap, alibi_slopes, None)  # fmt: skip
    return (out, logsumexp, None) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with kv [total_k, 2, kv_heads, head_dim]."""
    k, v = _unpacked("kv", kv, ("total_k", "2", "kv_heads", "head_dim"))
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                                  return_attn_probs)  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with qkv [total, 3, heads, head_dim]."""
    q, k, v = _unpacked("qkv", qkv, ("total", "3", "heads", "head_dim"))
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p,
                                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                                  return_attn_probs)  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention over a cache of keys and values, to which k and v are added first; see `kv_cache.attend`."""
    kv_cache = importlib.import_module(f"{__package__}.kv_cache")
    return kv_cache.attend(
        q, k_cache, v_cache, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, block_table=block_table,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        rotary_interleaved=rotary_interleaved, alibi_slopes=alibi_slopes, num_splits=num_splits,
        return_softmax_lse=return_softmax_lse,
    )  # fmt: skip


def _unpacked(name: str, tensor: Tensor, shape: tuple[str, ...]) -> tuple[Tensor, ...]:
    """What is packed in the dimension of `shape` that is a number. Raises ValueError for another shape."""
    varlen.check_types(**{name: tensor})
    dim = next(position for position, size in enumerate(shape) if size.isdigit())
    if tensor.dim() != len(shape) or tensor.size(dim) != int(shape[dim]):
        raise ValueError(f"{name} is [{', '.join(shape)}], not {list(tensor.shape)}")
    return tensor.unbind(dim)


def _window(window_size: tuple[int, int], causal: bool, seqlen_k: int) -> tuple[int, int]:
    """(left, right) with a causal mask in it, and -1 for what reaches over all keys."""
    left, right = varlen.window(window_size)
    left = -1 if left >= seqlen_k else left
    return left, 0 if causal else -1 if right >= seqlen_k else right


def _no_dropout(dropout_p: float, what: str) -> None:
    if dropout_p > 0.0:
        raise NotImplementedError(f"dropout_p {dropout_p:g} is not supported together with {what}; 0.0 is")


def _packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, left, right, softcap,
            alibi_slopes, sequences) -> tuple[Tensor, Tensor]:  # fmt: skip
    varlen.check(q, k, v, cu_seqlens_q, cu_seqlens_k, None, alibi_slopes, None, sequences)
    scale = q.size(2) ** -0.5 if softmax_scale is None else softmax_scale
    return varlen.run(q, k, v, cu_seqlens_q, cu_seqlens_k, None, alibi_slopes, None, max_seqlen_q, max_seqlen_k, scale,
                      left, right, True, softcap)  # fmt: skip
