"""Attention over a cache of keys and values: paged or not, filled in part, added to by the same call. Inference only.

``attend`` is the function, in flash-attn's layout [batch, seqlen, heads, head_dim] and with the arguments and meaning
of its ``flash_attn_with_kvcache`` (https://github.com/Dao-AILab/flash-attention). Two operators carry it, in PyTorch's
layout [batch, heads, seqlen, head_dim], so that compiled programs hold them:

    decode  -> out, logsumexp      reads the cache; any number of queries
    append  -> the turned queries  writes into the cache; a rotary embedding turns keys and queries

On CUDA the kernels of ``kernels/triton`` run; elsewhere plain PyTorch, which states what they compute. May import
torch, `_torch.py`, reference.py, varlen.py and the kernels (these when a GPU call first needs them).
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from . import _torch, reference, varlen

__all__ = ["attend"]

_library = torch.library.Library("flashbackend", "FRAGMENT")
_library.define(
    "decode(Tensor query, Tensor key_cache, Tensor value_cache, Tensor? attn_mask, Tensor? sinks, "
    "Tensor? alibi_slopes, Tensor? seqused_k, Tensor? leftpad_k, Tensor? batch_index, Tensor? block_table, "
    "float scale, bool is_causal, bool bottom_right, int offset, int window_left, int window_right, float softcap, "
    "int num_splits, int seqused_more, bool return_lse) -> (Tensor, Tensor)"
)
_library.define(
    "append(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor seqlens, Tensor? leftpad_k, Tensor? batch_index, Tensor? block_table, "
    "bool interleaved, bool queries_move) -> Tensor"
)
_decode = torch.ops.flashbackend.decode.default
_append = torch.ops.flashbackend.append.default


def attend(
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
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q over the cache, to which k and v are added first.

    q [batch, seqlen_q, heads, head_dim]; k_cache [batches, capacity, kv_heads, head_dim], v_cache [batches, capacity,
    kv_heads, head_dim_v], or with block_table int32 [batch, pages of one sequence] pages of any size: [pages,
    page_size, kv_heads, head_dim]. float16, bfloat16 or float32, head_dim 1 to 256, heads a multiple of kv_heads.

    k, v [batch, seqlen_new, kv_heads, head_dim]: written to rows cache_seqlens.. of the cache, in place.
    rotary_cos, rotary_sin [positions, for every key in use; rotary_dim / 2], with k only: turn k by the angles of its
        positions, which count from cache_leftpad on, and q by those of the same positions where causal or a window is
        asked for, by the one of position cache_seqlens otherwise. rotary_interleaved: pairs are columns (0, 1),
        (2, 3) ..., else the first half and the second.
    cache_seqlens int32 [batch] or one number: keys in use before k is added; None: the whole capacity.
    cache_batch_idx int32 [batch]: the batch of the cache that each sequence has; cache_leftpad int32 [batch]: its
        first key.
    causal, window_size (left, right; -1: no bound) and alibi_slopes float32 [heads] or [batch, heads] count positions
        from the end: the last query stands at the last key in use.
    softcap: scores become softcap * tanh(scores / softcap). sinks [heads]: logits of one more key without a value.
    num_splits: into how many parts the keys are cut, 0: as many as the GPU wants.

    Returns out [batch, seqlen_q, heads, head_dim_v] and, with return_softmax_lse, the natural logsumexp of the scores,
    float32 [batch, heads, seqlen_q]. A query that sees no key gives zeros and a logsumexp of -inf. Not differentiable:
    no result requires grad, and neither does the cache that requires none, whatever k and v do.
    Raises ValueError for arguments that do not go together, TypeError for what is no tensor. The numbers in
    cache_seqlens, cache_batch_idx, cache_leftpad and block_table stay on the GPU and are not checked.
    """
    _check(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
           block_table, alibi_slopes, sinks)  # fmt: skip
    if torch.is_grad_enabled():
        # Autograd would write the history of k and v, step after step, into a cache that lives on.
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, alibi_slopes, sinks = (
            tensor if tensor is None or not tensor.requires_grad else tensor.detach()
            for tensor in (q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, alibi_slopes, sinks)
        )
    query, key_cache, value_cache = q.transpose(1, 2), k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    batch = q.size(0)
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    varlen.check_softcap(softcap)
    left, right = varlen.window(window_size)
    right = 0 if causal else right
    more = 0
    if k is not None:
        assert v is not None and isinstance(cache_seqlens, Tensor)
        more = k.size(1)
        turned = _append(
            query, _dense(k.transpose(1, 2)), _dense(v.transpose(1, 2)), key_cache, value_cache,
            _contiguous(rotary_cos), _contiguous(rotary_sin), cache_seqlens, cache_leftpad, cache_batch_idx,
            block_table, rotary_interleaved, left >= 0 or right >= 0,
        )  # fmt: skip
        query = query if rotary_cos is None else turned
    scale = reference.default_scale(q.size(-1)) if softmax_scale is None else float(softmax_scale)
    out, logsumexp = _decode(
        query, key_cache, value_cache, None, sinks, alibi_slopes, cache_seqlens, cache_leftpad, cache_batch_idx,
        block_table, scale, False, True, 0, left, right,
        float(softcap), num_splits, more, return_softmax_lse,
    )  # fmt: skip
    out = out.transpose(1, 2)
    return (out, logsumexp) if return_softmax_lse else out


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _dense(tensor)


def _check(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
           block_table, alibi_slopes, sinks) -> None:  # fmt: skip
    """Raises ValueError, or TypeError for what is no tensor, in the caller's words."""
    if not (isinstance(q, Tensor) and isinstance(k_cache, Tensor) and isinstance(v_cache, Tensor)):
        varlen.check_types(q=q, k_cache=k_cache, v_cache=v_cache)
    dtype, device = q.dtype, q.device
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be [batch, seqlen, heads, head_dim]; got {list(tensor.shape)}")
        if tensor.dtype != dtype or tensor.device != device:
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, q is {dtype} on {device}")
    if not dtype.is_floating_point:
        raise ValueError(f"q, k_cache and v_cache are float16, bfloat16 or float32; got {dtype}")
    batch, _, heads, head_dim = q.shape
    if k_cache.shape[:3] != v_cache.shape[:3] or k_cache.size(3) != head_dim:
        raise ValueError(
            f"k_cache {list(k_cache.shape)} and v_cache {list(v_cache.shape)} do not go with q {list(q.shape)}"
        )
    if k_cache.size(2) == 0 or heads % k_cache.size(2):
        raise ValueError(f"{heads} query heads are no multiple of the cache's {k_cache.size(2)} heads")
    for name, tensor in (
        ("k", k), ("v", v), ("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin), ("alibi_slopes", alibi_slopes),
        ("sinks", sinks), ("cache_seqlens", cache_seqlens), ("cache_batch_idx", cache_batch_idx),
        ("cache_leftpad", cache_leftpad), ("block_table", block_table),
    ):  # fmt: skip
        if tensor is None or (tensor is cache_seqlens and isinstance(tensor, int)):
            continue
        if not isinstance(tensor, Tensor):
            varlen.check_types(**{name: tensor})
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, q on {device}")
    if block_table is not None and (
        cache_batch_idx is not None or block_table.dim() != 2 or block_table.size(0) != batch
    ):
        raise ValueError("block_table must be [batch, pages] and does not go with cache_batch_idx")
    if block_table is None and cache_batch_idx is None and k_cache.size(0) != batch:
        raise ValueError(f"the cache has {k_cache.size(0)} batches, q {batch}: cache_batch_idx says which is whose")
    for name, tensor in (("cache_seqlens", cache_seqlens), ("cache_batch_idx", cache_batch_idx),
                         ("cache_leftpad", cache_leftpad), ("block_table", block_table)):  # fmt: skip
        if tensor is None or isinstance(tensor, int):
            continue
        if tensor.dtype != torch.int32 or tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be int32 and dense; got {tensor.dtype}, strides {tensor.stride()}")
        if tensor is not block_table and tensor.shape != (batch,):
            raise ValueError(f"{name} must be one number or [batch] = [{batch}]; got {list(tensor.shape)}")
    if isinstance(cache_seqlens, int) and cache_seqlens < 0:
        raise ValueError(f"cache_seqlens {cache_seqlens} is negative")
    if alibi_slopes is not None and alibi_slopes.shape not in ((heads,), (batch, heads)):
        raise ValueError(f"alibi_slopes are [{heads}] or [{batch}, {heads}], not {list(alibi_slopes.shape)}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks are [{heads}], not {list(sinks.shape)}")
    if (k is None) != (v is None):
        raise ValueError("k and v go together")
    if k is not None and cache_seqlens is None:
        raise ValueError("k and v are added at cache_seqlens, which is missing")
    if (rotary_cos is None) != (rotary_sin is None) or (rotary_cos is not None and k is None):
        raise ValueError("rotary_cos and rotary_sin go together, and with k")
    if rotary_cos is not None and (
        rotary_cos.dim() != 2 or rotary_cos.shape != rotary_sin.shape or 2 * rotary_cos.size(1) > head_dim
    ):
        raise ValueError(
            f"rotary_cos {list(rotary_cos.shape)} and rotary_sin {list(rotary_sin.shape)} must be "
            f"[positions, at most {head_dim // 2}]"
        )
    if k is not None and not (
        k.shape == (q.size(0), k.size(1), k_cache.size(2), head_dim)
        and v.shape == (q.size(0), k.size(1), k_cache.size(2), v_cache.size(3))
        and k.dtype == v.dtype == q.dtype
    ):
        raise ValueError(f"k {list(k.shape)} {k.dtype} and v {list(v.shape)} {v.dtype} do not go with the cache and q")


# -------------------------------------------------------------------------------------------------------- plain PyTorch


def _rows_of_cache(cache: Tensor, batch_index: Tensor | None, block_table: Tensor | None) -> Tensor:
    """[B, Hkv, capacity, D] of what the cache holds for each sequence, gathered."""
    if block_table is not None:
        pages = cache[block_table.long()]  # [B, pages, Hkv, page, D]
        return pages.transpose(1, 2).flatten(2, 3)
    return cache if batch_index is None else cache[batch_index.long()]


def _decode_math(query, key_cache, value_cache, attn_mask, sinks, alibi_slopes, seqused_k, leftpad_k, batch_index,
                 block_table, scale, is_causal, bottom_right, offset, window_left, window_right, softcap, num_splits,
                 seqused_more, return_lse):  # fmt: skip
    batch, heads, seqlen_q, _ = query.shape
    key = _rows_of_cache(key_cache, batch_index, block_table)
    value = _rows_of_cache(value_cache, batch_index, block_table)
    kv_heads, seqlen_k = key.shape[1:3]
    device = query.device
    dtype = torch.promote_types(query.dtype, torch.float32)
    key_index = torch.arange(seqlen_k, device=device)
    used = torch.full((batch,), seqlen_k, device=device)
    if seqused_k is not None:
        used = (seqused_k.long() + seqused_more).clamp(max=seqlen_k)
    first = torch.zeros_like(used) if leftpad_k is None else leftpad_k.long()
    in_use = (key_index < used[:, None]) & (key_index >= first[:, None])  # [B, S]
    shift = used - seqlen_q if bottom_right else torch.full_like(used, offset)
    position = torch.arange(seqlen_q, device=device) + shift[:, None]  # [B, Sq]
    distance = key_index - position[..., None]  # [B, Sq, S]
    seen = in_use[:, None, :].expand_as(distance)
    right = 0 if is_causal else window_right
    if right >= 0:
        seen = seen & (distance <= right)
    if window_left >= 0:
        seen = seen & (distance >= -window_left)
    # What is not in use may hold anything, NaN included.
    key = key.to(dtype).masked_fill(~in_use[:, None, :, None], 0.0).repeat_interleave(heads // kv_heads, 1)
    value = value.to(dtype).masked_fill(~in_use[:, None, :, None], 0.0).repeat_interleave(heads // kv_heads, 1)
    scores = query.to(dtype) @ key.mT * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.expand(batch, heads)[:, :, None, None] * distance.abs()[:, None]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        else:
            scores = torch.where(attn_mask == -math.inf, -math.inf, scores + attn_mask)
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    if sinks is not None:
        column = sinks.to(dtype)[None, :, None, None].expand(batch, heads, seqlen_q, 1)
        scores = torch.cat([scores, column], -1)
        value = torch.cat([value, torch.zeros_like(value[:, :, :1])], 2)
    unseen = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(unseen, 0.0), -1).masked_fill(unseen, 0.0)
    out = _empty_out(query, value.size(3)).copy_(weights @ value)
    if not return_lse:
        return out, query.new_empty(0, dtype=torch.float32)
    logsumexp = torch.logsumexp(scores.masked_fill(unseen, 0.0), -1).masked_fill(unseen.squeeze(-1), -math.inf)
    return out, logsumexp.float()


def _rotate(tensor: Tensor, cos: Tensor, sin: Tensor, position: Tensor, interleaved: bool) -> Tensor:
    """[B, H, S, D] turned by the angles of position [B, S]."""
    half = cos.size(1)
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    turned, rest = wide[..., : 2 * half], wide[..., 2 * half :]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    position = position.clamp(0, cos.size(0) - 1)
    cosine, sine = (angle[position][:, None].to(wide.dtype) for angle in (cos, sin))
    pair = first * cosine - second * sine, first * sine + second * cosine
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned, rest], -1).to(tensor.dtype)


def _append_math(query, key, value, key_cache, value_cache, rotary_cos, rotary_sin, seqlens, leftpad_k, batch_index,
                 block_table, interleaved, queries_move):  # fmt: skip
    batch, _, new, _ = key.shape
    rows = seqlens.long()[:, None] + torch.arange(new, device=key.device)  # [B, new]
    turned = query.new_empty(0)
    if rotary_cos is not None:
        first = seqlens.long() if leftpad_k is None else seqlens.long() - leftpad_k.long()
        key = _rotate(key, rotary_cos, rotary_sin, first[:, None] + torch.arange(new, device=key.device), interleaved)
        steps = torch.arange(query.size(2), device=key.device) * queries_move
        turned = _empty_out(query, query.size(3)).copy_(
            _rotate(query, rotary_cos, rotary_sin, first[:, None] + steps, interleaved)
        )
    if block_table is not None:
        page = key_cache.size(2)
        inside = (rows >= 0) & (rows < block_table.size(1) * page)
        outer = block_table.long().gather(1, torch.where(inside, rows, 0) // page)
        rows = rows % page
    else:
        inside = (rows >= 0) & (rows < key_cache.size(2))
        index = torch.arange(batch, device=key.device) if batch_index is None else batch_index.long()
        outer = index[:, None].expand_as(rows)
    for cache, tensor in ((key_cache, key), (value_cache, value)):
        cache[outer[inside], :, rows[inside]] = tensor.transpose(1, 2)[inside]
    return turned


# ----------------------------------------------------------------------------------------------------- CUDA and fake


def _empty_out(query: Tensor, head_dim_v: int) -> Tensor:
    """An uninitialised out [B, H, Sq, Dv], in memory [B, Sq, H, Dv]."""
    batch, heads, seqlen_q, _ = query.shape
    return query.new_empty((batch, seqlen_q, heads, head_dim_v)).transpose(1, 2)


@functools.cache
def _kernels():
    from .kernels.triton import kv_cache as kernels

    return kernels


def _bound(window: int) -> int | None:
    return window if window >= 0 else None


def _decode_cuda(query, key_cache, value_cache, attn_mask, sinks, alibi_slopes, seqused_k, leftpad_k, batch_index,
                 block_table, scale, is_causal, bottom_right, offset, window_left, window_right, softcap, num_splits,
                 seqused_more, return_lse):  # fmt: skip
    kernels = _kernels()
    if max(query.size(3), value_cache.size(3)) > kernels.MAX_HEAD_DIM or query.dtype == torch.float64:
        return _decode_math(
            query, key_cache, value_cache, attn_mask, sinks, alibi_slopes, seqused_k, leftpad_k, batch_index,
            block_table, scale, is_causal, bottom_right, offset, window_left, window_right, softcap, num_splits,
            seqused_more, return_lse,
        )  # fmt: skip
    out = _empty_out(query, value_cache.size(3))
    size = query.shape[:3] if return_lse else (0,)
    logsumexp = query.new_empty(size, dtype=torch.float32)
    if out.numel() == 0 or key_cache.numel() == 0:
        return out.zero_(), logsumexp.fill_(-math.inf)
    if sinks is not None:
        sinks = sinks.float()
    options = kernels.DecodeOptions(
        sinks, alibi_slopes, seqused_k, leftpad_k, batch_index, block_table, offset, bottom_right, _bound(window_left),
        _bound(window_right), softcap, num_splits, seqused_more,
    )  # fmt: skip
    allow_tf32 = query.dtype == torch.float32 and _torch.allows_tf32()
    kernels.decode(
        query, key_cache, value_cache, out, logsumexp if return_lse else None, scale, options, attn_mask, is_causal,
        allow_tf32,
    )  # fmt: skip
    return out, logsumexp


def _append_cuda(query, key, value, key_cache, value_cache, rotary_cos, rotary_sin, seqlens, leftpad_k, batch_index,
                 block_table, interleaved, queries_move):  # fmt: skip
    arguments = (
        query, key, value, key_cache, value_cache, rotary_cos, rotary_sin, seqlens, leftpad_k, batch_index, block_table,
        interleaved, queries_move,
    )  # fmt: skip
    if query.dtype == torch.float64 or any(tensor.stride(3) != 1 for tensor in arguments[:5]):
        return _append_math(*arguments)
    turned = query.new_empty(0) if rotary_cos is None else _empty_out(query, query.size(3))
    if key.numel() == 0 and turned.numel() == 0:
        return turned
    _kernels().append(
        query, key, value, None if rotary_cos is None else turned, key_cache, value_cache, rotary_cos, rotary_sin,
        seqlens, leftpad_k, batch_index, block_table, interleaved, queries_move,
    )  # fmt: skip
    return turned


@torch.library.register_fake("flashbackend::decode", lib=_library)
def _(query, key_cache, value_cache, *arguments):
    size = query.shape[:3] if arguments[-1] else (0,)
    return _empty_out(query, value_cache.size(3)), query.new_empty(size, dtype=torch.float32)


@torch.library.register_fake("flashbackend::append", lib=_library)
def _(query, key, value, key_cache, value_cache, rotary_cos, *arguments):
    return query.new_empty(0) if rotary_cos is None else _empty_out(query, query.size(3))


for _name, _cuda, _math in (("decode", _decode_cuda, _decode_math), ("append", _append_cuda, _append_math)):
    _library.impl(_name, _cuda, "CUDA")
    _library.impl(_name, _math, "CPU")
    _library.impl(_name, _math, "MPS")
