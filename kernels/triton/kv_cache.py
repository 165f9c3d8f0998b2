"""Attention over a cache of keys and values with all that such calls may ask for, and adding to the cache.

May import torch and this folder. Imported by ``torch_flashbackend.kv_cache``.
"""

from __future__ import annotations

from .append import append_to_cache
from .attention import _Call, _plans
from .decode_plan import MAX_HEAD_DIM, DecodeOptions, DecodePlan
from .launch import Launch
from .tiles import Tile

__all__ = ["MAX_HEAD_DIM", "DecodeOptions", "append", "decode"]


def decode(query, key, value, out, logsumexp, scale: float, options: DecodeOptions, mask=None, is_causal=False,
           allow_tf32=False) -> None:
    """Fill out [B, H, seqlen_q, Dv] and, unless it is None, logsumexp float32 [B, H, seqlen_q], contiguous.

    query [B, H, seqlen_q, D], any number of queries; key [batches, Hkv, S, D] and value [batches, Hkv, S, Dv], or pages
    [pages, Hkv, page, D] where options has a block table; one dtype, any strides; mask as in ``attention.forward``, not
    with pages. is_causal is aligned at the top left unless options says otherwise. Raises KernelUnavailable before
    anything is launched.
    """
    tensors = [query, key, value, out]
    tensors += [tensor for tensor in (mask, *options.tensors) if tensor is not None]
    rest = ("decode", mask is None, is_causal, scale, logsumexp is None, allow_tf32, *options.rest)
    plan = _plans.find(rest, tensors)
    if plan is None:
        plan = _plans.look_up(rest, tensors, lambda: plan_of(query, key, value, out, logsumexp, scale, options, mask,
                                                             is_causal, allow_tf32))
    plan(query, key, value, out, logsumexp, mask, options)


def plan_of(query, key, value, out, logsumexp, scale, options, mask=None, is_causal=False, allow_tf32=False,
            target=None) -> DecodePlan:
    """The launch of such a call; target: compile for it, with no such GPU (``GPUTarget("cuda", 90, 32)``)."""
    call = _Call(query, key, value, mask, 0.0, is_causal, scale, (query, key, value, out), allow_tf32, target)
    return DecodePlan(call, query, key, value, mask, scale, out, logsumexp, options)


def append(query, key, value, rotated, key_cache, value_cache, cos, sin, seqlens, leftpad, batch_index, block_table,
           interleaved: bool, queries_move: bool) -> None:
    """Write key, value [B, Hkv, seqlen_new, D] into the caches and, with cos and sin, the turned query into rotated.

    Caches [batches, Hkv, S, D], or [pages, Hkv, page, D] with a block table; seqlens, leftpad, batch_index, block_table
    int32; cos and sin [positions, rotary_dim / 2], both or None, and rotated None without them. The last dimensions of
    all are dense. What each means is in the kernel's docstring.
    """
    optional = (rotated, cos, sin, leftpad, batch_index, block_table)
    tensors = [query, key, value, key_cache, value_cache, seqlens, *(t for t in optional if t is not None)]
    rest = ("append", *(tensor is None for tensor in optional), interleaved, queries_move)
    launch = _plans.find(rest, tensors)
    if launch is None:
        launch = _plans.look_up(rest, tensors, lambda: append_launch(
            query, key, value, rotated, key_cache, value_cache, cos, sin, seqlens, leftpad, batch_index, block_table,
            interleaved, queries_move).load(query.device))
    launch(query, key, value, rotated, key_cache, value_cache, cos, sin, seqlens, leftpad, batch_index, block_table)


def append_launch(query, key, value, rotated, key_cache, value_cache, cos, sin, seqlens, leftpad, batch_index,
                  block_table, interleaved: bool, queries_move: bool) -> Launch:
    """Not yet loaded."""
    batch, heads, seqlen_q, head_dim = query.shape
    kv_heads, seqlen_new, head_dim_v = key.size(1), key.size(2), value.size(3)
    page = key_cache.size(2) if block_table is not None else 0
    longest = seqlen_new if cos is None else max(seqlen_q, seqlen_new)
    block_d = max(16, 1 << (max(head_dim, head_dim_v) - 1).bit_length())
    block_t = min(16, 1 << (longest - 1).bit_length())
    pointers = {"query": query, "key": key, "value": value, "rotated": rotated, "key_cache": key_cache,
                "value_cache": value_cache, "cos": cos, "sin": sin, "seqlens": seqlens, "leftpad": leftpad,
                "batch_index": batch_index, "block_table": block_table}
    walked = {"qb qh qm": query, "rb rh rm": rotated, "nb nh nn": key, "wb wh wn": value, "kb kh kn": key_cache,
              "vb vh vn": value_cache}
    scalars = {
        f"stride_{name}": ("i64", 0 if tensor is None else tensor.stride(dim))
        for names, tensor in walked.items()
        for dim, name in enumerate(names.split())
    }
    scalars |= {
        "stride_cos": ("i64", 0 if cos is None else cos.stride(0)),
        "stride_sin": ("i64", 0 if sin is None else sin.stride(0)),
        "stride_tb": ("i64", 0 if block_table is None else block_table.stride(0)),
        "seqlen_q": ("i32", seqlen_q),
        "seqlen_new": ("i32", seqlen_new),
        "capacity": ("i32", block_table.size(1) * page if page else key_cache.size(2)),
        "num_heads": ("i32", heads),
        "num_kv_heads": ("i32", kv_heads),
        "num_angles": ("i32", 0 if cos is None else cos.size(0)),
    }
    constants = {"HEAD_DIM": head_dim, "HEAD_DIM_V": head_dim_v, "BLOCK_D": block_d, "BLOCK_T": block_t,
                 "ROTARY_DIM": 0 if cos is None else 2 * cos.size(1), "INTERLEAVED": interleaved,
                 "QUERIES_MOVE": queries_move, "PAGE": page}
    moved = (key, value, key_cache, value_cache)
    strides = [stride for tensor in moved for stride in tensor.stride()[:3]]
    divisors = {}
    if all(tensor.data_ptr() % 16 == 0 for tensor in moved) and all(s * key.element_size() % 16 == 0 for s in strides):
        divisors = dict.fromkeys(("key", "value", "key_cache", "value_cache"), 16)
        names = [f"stride_{letter}{kind}" for letter, kind in zip("nnnwwwkkkvvv", "bhnbhnbhnbhn")]
        divisors |= dict.fromkeys(names, 16 // key.element_size())
    programs = -(-longest // block_t) * (2 * kv_heads + (0 if cos is None else heads)) * batch
    order = append_to_cache.arg_names
    return Launch(append_to_cache, programs, pointers, {name: scalars[name] for name in order if name in scalars},
                  constants, divisors, Tile(block_t, block_d, 1 if block_t * block_d <= 512 else 4, 1), {})
