"""`attention_varlen`: attention over sequences of different lengths that lie packed one after the other.

May import `_torch.py`, ops.py, reference_varlen.py and the kernels (these when the first GPU call needs them). Imported
by packed.py, flash_attn.py, kv_cache.py and `torch_flashbackend.__init__`. Two operators, differentiable, with fake
tensors and FLOP formulas:

    varlen_attention           -> out [total_q, H, Dv], logsumexp float32 [H, total_q]: natural logarithm, sinks
                                  included, -inf for a row without a key
    varlen_attention_backward  -> gradients of query, key, value and sinks, an empty tensor for each not asked for

query [total_q, H, D], key [total_k, Hkv, D], value [total_k, Hkv, Dv], Hkv a divisor of H, one dtype. cu_seqlens_q and
cu_seqlens_k int32 or int64 [sequences + 1], on the tensors' device, say where sequences begin and end; without one, all
sequences are max_seqlen_q or max_seqlen_k long. Query i of a sequence stands at key i, or, bottom_right, at key
i + seqlen_k - seqlen_q, and sees the keys from window_left before to window_right after that (-1: all). No lengths are
read by the host on CUDA: nothing waits, and a captured CUDA graph sees the lengths of each replay.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import _torch, ops, reference, reference_varlen
from .kernels import KernelUnavailable

__all__ = ["attention_varlen", "check", "check_softcap", "check_types", "run", "takes", "under_autocast", "window"]

LARGEST_HEAD_DIM = 256

_library = torch.library.Library("flashbackend", "FRAGMENT")
_REST = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? alibi_slopes, Tensor? sinks, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, int window_left, int window_right, bool bottom_right, "
    "float softcap"
)
_library.define(f"varlen_attention(Tensor query, Tensor key, Tensor value, {_REST}) -> (Tensor, Tensor)")
_library.define(
    "varlen_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
    f"{_REST}, bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)"
)
_forward_op = torch.ops.flashbackend.varlen_attention.default
_backward_op = torch.ops.flashbackend.varlen_attention_backward.default


@functools.cache
def _kernels():
    """The Triton kernels, imported when the first GPU call needs them."""
    from .kernels.triton import varlen as kernels

    return kernels


@functools.cache
def _hopper():
    """The Hopper kernels' side of it, likewise."""
    from .kernels.cuda import varlen as kernels

    return kernels


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    causal_alignment: str = "bottom_right",
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each packed sequence of queries to its own sequence of keys, whether or not the plugin is enabled.

    query: [total_q, num_heads, head_dim]. key: [total_k, num_kv_heads, head_dim]. value: [total_k, num_kv_heads,
        head_dim_v]. float16, bfloat16, float32 or float64, one for all three (autocast applies). num_kv_heads divides
        num_heads; nothing is repeated in memory.
    cu_seqlens_q, cu_seqlens_k: int32 or int64 [sequences + 1], from 0, not decreasing: sequence i has the rows
        cu_seqlens[i] to cu_seqlens[i + 1]. Rows behind the last sequence give zeros. Not read by the host on CUDA.
    max_seqlen_q, max_seqlen_k: at least the longest length; only an upper bound is needed, and None takes the total.
    is_causal: a query sees the keys up to its own position.
    window_size: (left, right), how many keys before and after its own position a query sees; -1 for all.
    causal_alignment: where the queries stand where a sequence has more or fewer keys than queries: "bottom_right", the
        last query at the last key, as flash-attn has it; or "top_left", the first at the first, as
        F.scaled_dot_product_attention has it.
    scale: factor of the scores; 1/sqrt(head_dim) if None.
    softcap: scores become softcap * tanh(score / softcap) after scaling; 0.0 for none.
    alibi_slopes: float [num_heads] or [sequences, num_heads]; slope * |position - key| is subtracted from the scores.
        No gradient.
    sinks: [num_heads], a score of one more key that has no value; differentiable.
    seqused_k: int32 or int64 [sequences]: only the first seqused_k[i] keys of sequence i count.
    return_lse: return also the logsumexp of the scores, float32 [num_heads, total_q], -inf for a query without a key.
        It is not differentiable.

    Returns [total_q, num_heads, head_dim_v]; a query that sees no key gives zeros. The forward's bits repeat, the
    backward's under torch.use_deterministic_algorithms(True).
    Raises ValueError for arguments that do not fit. Method: Dao, "FlashAttention-2" (arXiv 2307.08691); ALiBi: Press et
    al. (arXiv 2108.12409); sinks: Xiao et al. (arXiv 2309.17453).
    """
    if causal_alignment not in ("bottom_right", "top_left"):
        raise ValueError(f'causal_alignment is "bottom_right" or "top_left", not {causal_alignment!r}')
    check_softcap(softcap)
    left, right = window(window_size)
    if is_causal:
        right = 0
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        check_types(query=query, key=key, value=value)
    max_seqlen_q = query.size(0) if max_seqlen_q is None else max_seqlen_q
    max_seqlen_k = key.size(0) if max_seqlen_k is None else max_seqlen_k
    check_longest(max_seqlen_q, max_seqlen_k)
    query, key, value = under_autocast(query, key, value)
    check(query, key, value, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sinks)
    scale = reference.default_scale(query.size(2)) if scale is None else scale
    out, logsumexp = run(
        query, key, value, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sinks, max_seqlen_q, max_seqlen_k,
        scale, left, right, causal_alignment == "bottom_right", softcap,
    )  # fmt: skip
    return (out, logsumexp) if return_lse else out


def under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype, where it is on: what it does to scaled_dot_product_attention."""
    device_type = tensors[0].device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(t if t.dtype is torch.float64 or not t.is_floating_point() else t.to(dtype) for t in tensors)


def window(window_size: tuple[int, int]) -> tuple[int, int]:
    """(left, right). Raises ValueError for what is no pair of numbers."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size is (keys before, keys after), -1 for all of them; got {window_size!r}")
    return window_size[0], window_size[1]


def check_softcap(softcap: float) -> None:
    """Raise ValueError for what is neither 0 nor a positive number: it would silently be no cap."""
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap is 0.0 for none, or a positive number; got {softcap}")


def check_longest(max_seqlen_q: int, max_seqlen_k: int) -> None:
    """Raise ValueError for negative lengths. Whether a sequence is longer is the GPU's to know."""
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if isinstance(length, int) and length < 0:
            raise ValueError(f"{name} is at least the longest length, got {length}")


def check_types(**tensors: Any) -> None:
    """Raise TypeError for what is no tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")


def check(query, key, value, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sinks, num_sequences=None) -> None:
    """Raise ValueError for shapes and types that do not fit; lengths are the GPU's and not looked at.

    num_sequences: how many there must be, None where cu_seqlens_q says so. TypeError for what is no tensor.
    """
    for name, tensor in (
        ("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k), ("seqused_k", seqused_k),
        ("alibi_slopes", alibi_slopes), ("sinks", sinks),
    ):  # fmt: skip
        if tensor is not None and not isinstance(tensor, Tensor):
            check_types(**{name: tensor})
    shapes = [list(t.shape) for t in (query, key, value)]
    if not (query.dim() == key.dim() == value.dim() == 3):
        raise ValueError(f"query, key and value are [total, heads, head_dim], not {shapes}")
    if key.shape[:2] != value.shape[:2] or query.size(2) != key.size(2):
        raise ValueError(f"key and value need the same rows and heads, query and key the same head_dim: {shapes}")
    if key.size(1) == 0 or query.size(1) % key.size(1):
        raise ValueError(f"the heads of key, {key.size(1)}, must divide those of query, {query.size(1)}")
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        raise ValueError(f"one floating dtype for query, key and value: {query.dtype}, {key.dtype}, {value.dtype}")
    for name, tensor, extra in (
        ("cu_seqlens_q", cu_seqlens_q, 1), ("cu_seqlens_k", cu_seqlens_k, 1), ("seqused_k", seqused_k, 0),
    ):  # fmt: skip
        if tensor is None:
            continue
        if tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() != 1 or tensor.size(0) < extra:
            raise ValueError(f"{name} is an int32 or int64 vector, not {tensor.dtype} {list(tensor.shape)}")
        if num_sequences is not None and tensor.size(0) - extra != num_sequences:
            raise ValueError(f"{name} has {tensor.size(0) - extra} sequences, not {num_sequences}")
        num_sequences = tensor.size(0) - extra
    heads = query.size(1)
    if alibi_slopes is not None and alibi_slopes.shape not in ((heads,), (num_sequences, heads)):
        raise ValueError(f"alibi_slopes are [{heads}] or [{num_sequences}, {heads}], not {list(alibi_slopes.shape)}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks are [{heads}], not {list(sinks.shape)}")
    others = (key, value, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sinks)
    if any(t is not None and t.device != query.device for t in others):
        raise ValueError(f"all tensors must be on the query's device, {query.device}")


def takes(query: Tensor, value: Tensor) -> bool:
    """Do the kernels compute with such tensors? Others run in PyTorch operations."""
    return (
        query.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and 0 < query.size(2) <= LARGEST_HEAD_DIM
        and 0 < value.size(2) <= LARGEST_HEAD_DIM
    )


def run(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """(out, logsumexp) of the operator's arguments, differentiable, by the shortest way that is open."""
    if torch.compiler.is_compiling():
        return _forward_op(query, key, value, *arguments)
    if _torch.transforms_active():
        return reference_varlen.attention(query, key, value, *arguments)
    sinks = arguments[4]
    try:
        if torch.is_grad_enabled() and (
            query.requires_grad
            or key.requires_grad
            or value.requires_grad
            or (sinks is not None and sinks.requires_grad)
        ):
            return _apply(query, key, value, *arguments)
        return ops._below_autograd(_forward_op, _forward_cuda, query, key, value, *arguments)
    except KernelUnavailable as error:
        _warn(error)
    return reference_varlen.attention(query, key, value, *arguments)


def _warn(error: Exception) -> None:
    warnings.warn(f"torch_flashbackend: {error}; PyTorch operations compute this call", stacklevel=4)


# -------------------------------------------------------------------------------------------------------------- outputs


def _empty_out(query: Tensor, head_dim_v: int) -> Tensor:
    """An uninitialised out: in the query's memory order if it has the query's shape, contiguous otherwise."""
    if query.size(2) == head_dim_v:
        return torch.empty_like(query)
    return query.new_empty((query.size(0), query.size(1), head_dim_v))


def _empty_logsumexp(query: Tensor) -> Tensor:
    return query.new_empty((query.size(1), query.size(0)), dtype=torch.float32)


# ----------------------------------------------------------------------------------------------------------------- CUDA


def _split(query: Tensor, key: Tensor, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """What the launcher wants of an operator's arguments after value."""
    (cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sinks, max_seqlen_q, max_seqlen_k, scale, window_left,
     window_right, bottom_right, softcap) = arguments  # fmt: skip
    kernels = _kernels()
    if cu_seqlens_k is not None:
        max_seqlen_k = 0
    # Only very many rows matter to the launcher, and plans that do not depend on it serve more calls.
    if cu_seqlens_q is not None and query.size(0) * query.size(1) <= kernels.LONG_SUM_ROWS * key.size(1):
        max_seqlen_q = 0
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.float().contiguous()
    sinks = sinks.contiguous() if sinks is not None else None
    allow_tf32 = query.dtype == torch.float32 and _torch.allows_tf32()
    options = kernels.Options(
        scale, window_left, window_right, bottom_right, softcap, max_seqlen_q, max_seqlen_k, allow_tf32
    )
    return options, kernels.Extras(cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sinks)


def backend_for(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> str:
    """Whose kernels compute a call of `_forward_op` on a GPU: "cuda", the Hopper ones, or "triton"."""
    options, extras = _split(query, key, arguments)
    return "cuda" if _hopper().takes(query, key, value, options, extras, arguments[6]) else "triton"


def _forward_cuda(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    out, logsumexp = _empty_out(query, value.size(2)), _empty_logsumexp(query)
    if out.numel() == 0 or key.numel() == 0:  # no rows to compute, or no keys to see
        sinks = arguments[4]
        logsumexp.fill_(-math.inf) if sinks is None else logsumexp.copy_(sinks.unsqueeze(1).expand_as(logsumexp))
        return out.zero_(), logsumexp
    if not takes(query, value):
        return _forward_math(query, key, value, *arguments)
    options, extras = _split(query, key, arguments)
    longest_k = arguments[6]
    if _hopper().takes(query, key, value, options, extras, longest_k):
        # What its plan finds out, strides that the copy engine cannot walk say, is Triton's.
        with contextlib.suppress(KernelUnavailable):
            _hopper().forward(query, key, value, options, extras, out, logsumexp)
            return out, logsumexp
    _kernels().forward(query, key, value, options, extras, out, logsumexp)
    return out, logsumexp


def _backward_cuda(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
                   *arguments: Any) -> tuple[Tensor, ...]:  # fmt: skip
    *rest, output_mask = arguments
    needs_query, needs_key, needs_value, needs_sinks = output_mask
    both = needs_key or needs_value
    sinks = rest[4]
    if query.numel() == 0 or key.numel() == 0 or out.numel() == 0:
        return tuple(
            torch.zeros_like(like) if wanted else query.new_empty(0)
            for like, wanted in zip((query, key, value, sinks), output_mask, strict=True)
        )
    if not takes(query, value):
        return _backward_math(grad_out, query, key, value, out, logsumexp, *arguments)
    grad_query = torch.empty_like(query) if needs_query else None
    grad_key, grad_value = (torch.empty_like(key), torch.empty_like(value)) if both else (None, None)
    if grad_out.stride(2) != 1:  # the gradient of a sum is expanded, say: no vector loads without a copy
        grad_out = grad_out.contiguous()
    if logsumexp.stride(1) != 1:
        logsumexp = logsumexp.contiguous()
    nothing = query.new_empty(0)
    options, extras = _split(query, key, tuple(rest))
    longest_q, longest_k = arguments[5:7]
    if both and _hopper().takes_backward(grad_out, query, key, value, options, extras, logsumexp, longest_q, longest_k):
        with contextlib.suppress(KernelUnavailable):
            _hopper().backward(
                grad_out, query, key, value, options, extras, out, logsumexp, grad_query, grad_key, grad_value
            )
            return (
                nothing if grad_query is None else grad_query,
                grad_key if needs_key else nothing,
                grad_value if needs_value else nothing,
                nothing,
            )
    grad_sinks = _kernels().backward(
        grad_out, query, key, value, options, extras, out, logsumexp, grad_query, grad_key, grad_value
    )
    return (
        nothing if grad_query is None else grad_query,
        grad_key if needs_key else nothing,
        grad_value if needs_value else nothing,
        grad_sinks.to(sinks.dtype) if needs_sinks else nothing,
    )


# ---------------------------------------------------------------------------------------------------------- CPU and MPS


def _forward_math(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    out, logsumexp = reference_varlen.attention(query, key, value, *arguments)
    return _empty_out(query, value.size(2)).copy_(out), _empty_logsumexp(query).copy_(logsumexp)


def _backward_math(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
                   *arguments: Any) -> tuple[Tensor, ...]:  # fmt: skip
    *rest, output_mask = arguments
    grads = reference_varlen.attention_backward(grad_out, query, key, value, out, logsumexp, *rest)
    likes = (query, key, value, rest[4])
    # Copies into the memory order that the fake implementation promises.
    return tuple(
        torch.empty_like(like).copy_(grad) if wanted else query.new_empty(0)
        for grad, like, wanted in zip(grads, likes, output_mask, strict=True)
    )


for _name, _cuda, _math in (
    ("varlen_attention", _forward_cuda, _forward_math),
    ("varlen_attention_backward", _backward_cuda, _backward_math),
):
    _library.impl(_name, _cuda, "CUDA")
    _library.impl(_name, _math, "CPU")
    _library.impl(_name, _math, "MPS")


# ----------------------------------------------------------------------------------------------------------------- fake


@torch.library.register_fake("flashbackend::varlen_attention", lib=_library)
def _(query, key, value, *arguments):
    return _empty_out(query, value.size(2)), _empty_logsumexp(query)


@torch.library.register_fake("flashbackend::varlen_attention_backward", lib=_library)
def _(grad_out, query, key, value, out, logsumexp, *arguments):
    *rest, output_mask = arguments
    return tuple(
        torch.empty_like(like) if wanted else query.new_empty(0)
        for like, wanted in zip((query, key, value, rest[4]), output_mask, strict=True)
    )


# ------------------------------------------------------------------------------------------------------------- autograd


def _gradients(saved: tuple[Any, ...], options: tuple[Any, ...], grad_out: Tensor, needed: list[bool]) -> list[Any]:
    """Gradients of query, key, value and sinks, None where not needed; differentiable under create_graph=True."""
    query, key, value, out, logsumexp, *small = saved
    sinks = small[4]
    if torch.is_grad_enabled():
        inputs = [t for t, wanted in zip((query, key, value, sinks), needed, strict=True) if wanted]
        result, _ = reference_varlen.attention(query, key, value, *small, *options)
        grads = iter(torch.autograd.grad(result, inputs, grad_out, create_graph=True))
        return [next(grads) if wanted else None for wanted in needed]
    arguments = (grad_out, query, key, value, out, logsumexp, *small, *options, needed)
    try:
        if torch.compiler.is_compiling():
            found = _backward_op(*arguments)
        else:
            found = ops._below_autograd(_backward_op, _backward_cuda, *arguments)
    except KernelUnavailable as error:
        _warn(error)
        found = _backward_math(*arguments)
    return [grad if wanted else None for grad, wanted in zip(found, needed, strict=True)]


class _Varlen(torch.autograd.Function):
    """The two operators as one differentiable function: the boundary that an eager call crosses."""

    @staticmethod
    def forward(ctx, *inputs):
        out, logsumexp = ops._below_autograd(_forward_op, _forward_cuda, *inputs)
        _setup_context(ctx, inputs, (out, logsumexp))
        return out, logsumexp

    @staticmethod
    def backward(ctx, grad_out, _):
        return _operator_backward(ctx, grad_out, _)


_apply = super(torch.autograd.Function, _Varlen).apply


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    # query, key, value; then the five small tensors; then numbers.
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:8])
    ctx.mark_non_differentiable(output[1])
    ctx.options = inputs[8:]


def _operator_backward(ctx: Any, grad_out: Tensor, _: Any) -> tuple[Any, ...]:
    wanted = ctx.needs_input_grad
    grads = _gradients(ctx.saved_tensors, ctx.options, grad_out, [*wanted[:3], wanted[7]])
    return (*grads[:3], None, None, None, None, grads[3], *[None] * 7)


torch.library.register_autograd(
    "flashbackend::varlen_attention", _operator_backward, setup_context=_setup_context, lib=_library
)


# ---------------------------------------------------------------------------------------------------------------- flops


def _products(query: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int,
              max_seqlen_k: int) -> int:  # fmt: skip
    """How many scores each head has, a causal mask not deducted, as torch counts scaled_dot_product_attention."""

    def lengths(cu_seqlens: Tensor | None, longest: int, count: int) -> list[int]:
        if cu_seqlens is None or cu_seqlens.device.type == "meta":
            return [longest] * count
        return cu_seqlens.diff().tolist()

    known = cu_seqlens_q if cu_seqlens_q is not None else cu_seqlens_k
    count = query.shape[0] // max(max_seqlen_q, 1) if known is None else known.shape[0] - 1
    pairs = zip(lengths(cu_seqlens_q, max_seqlen_q, count), lengths(cu_seqlens_k, max_seqlen_k, count), strict=True)
    return sum(rows * keys for rows, keys in pairs)


@register_flop_formula(torch.ops.flashbackend.varlen_attention, get_raw=True)
def _forward_flops(query, key, value, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sinks, max_seqlen_q,
                   max_seqlen_k, *args, out_val=None, **kwargs) -> int:  # fmt: skip
    """Two products."""
    scores = query.shape[1] * _products(query, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return 2 * scores * (query.shape[2] + value.shape[2])


@register_flop_formula(torch.ops.flashbackend.varlen_attention_backward, get_raw=True)
def _backward_flops(grad_out, query, key, value, out, logsumexp, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes,
                    sinks, max_seqlen_q, max_seqlen_k, *args, out_val=None, **kwargs) -> int:  # fmt: skip
    """Five products."""
    scores = query.shape[1] * _products(query, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return 2 * scores * (3 * query.shape[2] + 2 * value.shape[2])
