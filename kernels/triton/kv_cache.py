"""Attention over a cache of keys and values with all that such calls may ask for, by the decoding kernel.

May import torch and this folder. Imported by ``torch_flashbackend.kv_cache``.
"""

from __future__ import annotations

from .attention import _Call, _plans
from .decode_plan import MAX_HEAD_DIM, DecodeOptions, DecodePlan

__all__ = ["MAX_HEAD_DIM", "DecodeOptions", "decode"]


def decode(query, key, value, out, logsumexp, scale: float, options: DecodeOptions, mask=None, is_causal=False,
           allow_tf32=False) -> None:
    """Fill out [B, H, seqlen_q, Dv] and, unless it is None, logsumexp float32 [B, H, seqlen_q], contiguous.

    query [B, H, seqlen_q, D], any number of queries; key [batches, Hkv, S, D] and value [batches, Hkv, S, Dv], of pages
    [pages, Hkv, page, D] where options has a block table; one dtype, any strides; mask as in ``attention.forward``, not
    with pages. is_causal is aligned at the top left. Raises KernelUnavailable before anything is launched.
    """
    tensors = [query, key, value, out]
    tensors += [tensor for tensor in (mask, *options.tensors) if tensor is not None]
    rest = ("decode", mask is None, is_causal, scale, logsumexp is None, allow_tf32, *options.rest)
    plan = _plans.find(rest, tensors)
    if plan is None:
        plan = _plans.look_up(rest, tensors, lambda: plan_of(query, key, value, out, logsumexp, scale, options, mask,
                                                             is_causal, allow_tf32))
    plan(query, key, value, mask, out, logsumexp, options)


def plan_of(query, key, value, out, logsumexp, scale, options, mask=None, is_causal=False, allow_tf32=False,
            target=None) -> DecodePlan:
    """The launch of such a call; target: compile for it, with no such GPU (``GPUTarget("cuda", 90, 32)``)."""
    call = _Call(query, key, value, mask, 0.0, is_causal, scale, (query, key, value, out), allow_tf32, target)
    return DecodePlan(call, query, key, value, mask, scale, out, logsumexp, options)
