"""The operators ``torch.ops.flashbackend.*``: schemas, implementations, fake tensors, autograd, FLOP formulas.

May import torch, ``reference``, ``plans``, ``batch_invariance`` and the kernels (these only when a GPU call first needs
them). Imported by the call and kernel hooks, ``selection`` and ``attention``. All operators are rank 4: query [B, H,
Sq, D], key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv], Hkv a divisor of H, one dtype; attn_mask bool, float32 or query's
dtype, which broadcasts to [B, H, Sq, Sk].

    attention           -> out [B, H, Sq, Dv]                inference: nothing is kept
    attention_forward   -> out, logsumexp float32 [B, H, Sq], natural logarithm, -inf for a row that sees no key; with a
                           float mask [2, B, H, Sq], the second half being what rounding cut off the first
    attention_backward  -> gradients of query, key, value and attn_mask, an empty tensor for each not asked for

``layout`` is the memory order of out: "query" (that of the query), "bshd" or "bhsd". ``dropout_seed`` int64 [1] goes
with a positive dropout_p. ``backend`` says whose kernels run on CUDA: "triton", or "cuda", the Hopper kernels, in whose
place Triton's run where a call is not theirs: an address that is no multiple of 16 bytes (a compiled graph is not
traced again for it), another GPU than the one that the graph was made for, the backward of a call with a mask or
dropout and a head_dim above 128, or with a float32 mask. On CPU and MPS the math path runs.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from . import _torch, reference
from .batch_invariance import on_change
from .kernels import KernelUnavailable
from .kernels import launch_counts as counts
from .plans import Recent, Repeat

_library = torch.library.Library("flashbackend", "DEF")
_COMMON = (
    "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? dropout_seed, float dropout_p, bool is_causal, "
    'float scale, str layout, str backend="triton"'
)
_library.define(f"attention({_COMMON}) -> Tensor")
_library.define(f"attention_forward({_COMMON}) -> (Tensor, Tensor)")
_library.define(
    "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor out, "
    "Tensor logsumexp, Tensor? dropout_seed, float dropout_p, bool is_causal, float scale, bool[4] output_mask, "
    'str backend="triton") -> (Tensor, Tensor, Tensor, Tensor)'
)
_dispatch_modes = _torch.dispatch_modes
_profiler_enabled = _torch.profiler_enabled
_deterministic_enabled = _torch.deterministic_enabled
_attention = torch.ops.flashbackend.attention.default
_attention_forward = torch.ops.flashbackend.attention_forward.default
_attention_backward = torch.ops.flashbackend.attention_backward.default


@functools.cache
def _kernels():
    """The Triton kernels, imported when the first GPU call needs them."""
    from .kernels.triton import attention as kernels

    return kernels


@functools.cache
def _hopper():
    """The forward of the Hopper kernels, imported when the first call wants them."""
    from .kernels.cuda import forward

    return forward


@functools.cache
def _hopper_backward():
    """The backward of the Hopper kernels, likewise."""
    from .kernels.cuda import backward

    return backward


@functools.cache
def _hopper_parts():
    """How a backward with a mask is cut, likewise."""
    from .kernels.cuda import backward_parts

    return backward_parts


@functools.cache
def _hopper_bias():
    """The gradient of an additive bias of the Hopper kernels, likewise."""
    from .kernels.cuda import bias_gradient

    return bias_gradient


def launch_counts() -> dict[str, int]:
    """How often each kernel was launched in this process since ``reset_launch_counts``, compiled graphs included."""
    return {name: count for name, count in counts.items() if count}


def reset_launch_counts() -> None:
    """Set all of ``launch_counts`` to zero."""
    for name in counts:
        counts[name] = 0


# -------------------------------------------------------------------------------------------------------------- outputs


def _empty_out(query: Tensor, head_dim_v: int, layout: str) -> Tensor:
    """An uninitialised out [B, H, Sq, Dv] in the memory order that ``layout`` names."""
    batch, heads, seqlen_q, head_dim = query.shape
    if layout == "bshd":
        return query.new_empty((batch, seqlen_q, heads, head_dim_v)).transpose(1, 2)
    if layout == "bhsd":
        return query.new_empty((batch, heads, seqlen_q, head_dim_v))
    if head_dim == head_dim_v:
        return torch.empty_like(query)
    order = sorted(range(3), key=lambda dim: -query.stride(dim))
    sizes = [query.size(dim) for dim in order]
    return query.new_empty((*sizes, head_dim_v)).permute(*(order.index(dim) for dim in range(3)), 3)


def _logsumexp_shape(query: Tensor, attn_mask: Tensor | None) -> tuple[int, ...]:
    shape = tuple(query.shape[:3])
    return shape if attn_mask is None or attn_mask.dtype == torch.bool else (2, *shape)


def _logsumexp_like(query: Tensor, attn_mask: Tensor | None) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Shape, strides and dtype, as an allocator takes them."""
    batch, heads, seqlen_q, _ = query.shape
    pitch = seqlen_q or 1  # as of an empty tensor in PyTorch
    plane = (heads or 1) * pitch
    shape, strides = (batch, heads, seqlen_q), (plane, pitch, 1)
    if attn_mask is None or attn_mask.dtype == torch.bool:
        return shape, strides, torch.float32
    return (2, *shape), ((batch or 1) * plane, *strides), torch.float32


def _mask_as_rank_4(attn_mask: Tensor | None) -> Tensor | None:
    if attn_mask is None or attn_mask.dim() == 4:
        return attn_mask
    return attn_mask[(None,) * (4 - attn_mask.dim())]


# ----------------------------------------------------------------------------------------------------------------- CUDA


def _forward_cuda(query, key, value, attn_mask, dropout_seed, dropout_p, is_causal, scale, layout, backend, logsumexp):
    out = _empty_out(query, value.size(3), layout)
    if out.numel() == 0 or key.size(2) == 0:
        # No rows to compute, or no keys to see.
        if logsumexp is not None:
            logsumexp.fill_(-float("inf"))
        return out.zero_()
    mask = _mask_as_rank_4(attn_mask)
    if (
        backend == "cuda"
        and (mask is None or (not is_causal and dropout_p == 0.0 and _hopper().takes_mask(query, mask)))
        and _hopper().aligned(query, key, value)
    ):
        _hopper().forward(query, key, value, is_causal, scale, out, logsumexp, mask, dropout_seed, dropout_p)
        return out
    _kernels().forward(
        query, key, value, mask, dropout_seed, dropout_p, is_causal, scale, out, logsumexp, _allow_tf32(query)
    )  # fmt: skip
    return out


def _allow_tf32(query: Tensor) -> bool:
    """May Triton's kernels multiply these in TF32?"""
    return query.dtype is torch.float32 and _torch.allows_tf32()


def _attention_cuda(query, key, value, attn_mask, dropout_seed, dropout_p, is_causal, scale, layout, backend="triton"):
    return _forward_cuda(query, key, value, attn_mask, dropout_seed, dropout_p, is_causal, scale, layout, backend, None)


def _attention_forward_cuda(query, key, value, attn_mask, dropout_seed, dropout_p, is_causal, scale, layout,
                            backend="triton"):  # fmt: skip
    logsumexp = _torch.allocator(query)(*_logsumexp_like(query, attn_mask))
    out = _forward_cuda(
        query, key, value, attn_mask, dropout_seed, dropout_p, is_causal, scale, layout, backend, logsumexp
    )  # fmt: skip
    return out, logsumexp


def _gradients_cuda(grad_out, query, key, value, attn_mask, out, logsumexp, dropout_seed, dropout_p, is_causal, scale,
                    output_mask, backend="triton"):  # fmt: skip
    """What the operator returns, with None for each gradient not asked for."""
    needs_query, needs_key, needs_value, needs_mask = output_mask
    tensors = (grad_out, query, key, value, out, logsumexp, *(() if attn_mask is None else (attn_mask,)))
    kind = _kind_of_backward(tensors, dropout_p, is_causal, scale, output_mask, backend)
    repeat = _backwards.find(kind, tensors)
    if repeat is not None:
        return repeat(*tensors, seed=dropout_seed)
    if query.numel() == 0 or key.numel() == 0 or out.numel() == 0:
        likes = (query, key, value, attn_mask)
        return tuple(
            _empty_gradient(like, index).zero_() if wanted else None
            for index, (like, wanted) in enumerate(zip(likes, output_mask, strict=True))
        )
    grad_query = torch.empty_like(query) if needs_query else None
    both = needs_key or needs_value
    grad_key, grad_value = (torch.empty_like(key), torch.empty_like(value)) if both else (None, None)
    if grad_out.stride(3) != 1:  # the gradient of a sum is expanded, say: no vector loads without a copy
        grad_out = grad_out.contiguous()
    mask = _mask_as_rank_4(attn_mask)
    bias_gradient = None
    if needs_mask and not is_causal and dropout_p == 0.0 and query.dtype != torch.float32:
        bias_gradient = _bias_gradient(grad_out, query, key, value, mask, logsumexp, scale)
    # The Hopper backward gives no mask's gradient, but delta for the kernel that does.
    if backend == "cuda" and (mask is None or not is_causal) and (bias_gradient is not None or not needs_mask):
        hopper, deterministic = _hopper_backward(), _torch.deterministic_enabled()
        fits = hopper.extras_fit(query, value, mask, dropout_p, deterministic)
        parts = _hopper_parts().parts_of(query, key, value, mask, dropout_p) if fits else None
        if parts is not None and not hopper.suits(grad_out):
            grad_out = grad_out.clone(memory_format=torch.contiguous_format)
        if parts is not None and hopper.suits(query, key, value, out):
            if grad_key is None or grad_value is None:
                grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
            delta = None if bias_gradient is None else torch.empty_like(logsumexp[0])
            plan = _hopper_parts().backward_in_parts(
                hopper.backward, parts, grad_out, query, key, value, out, logsumexp, is_causal, scale, grad_query,
                grad_key, grad_value, deterministic, mask, dropout_p, dropout_seed, delta,
            )  # fmt: skip
            grads = grad_query, grad_key if needs_key else None, grad_value if needs_value else None
            if bias_gradient is not None:
                grad_mask = bias_gradient(grad_out, query, key, value, mask, logsumexp, delta)
                return (*grads, grad_mask.view(attn_mask.shape))
            if parts.is_whole and grad_out is tensors[0]:
                _backwards.remember(kind, tensors, Repeat(plan, (grad_query, grad_key, grad_value), output_mask))
            return (*grads, None)
    filled = grad_query, grad_key, grad_value
    plan = _kernels().plan_of_backward(
        grad_out, query, key, value, mask, out, logsumexp, dropout_seed, dropout_p, is_causal, scale, *filled,
        needs_mask and bias_gradient is None, _allow_tf32(query),
    )  # fmt: skip
    if bias_gradient is not None:
        plan = functools.partial(plan, bias_gradient=bias_gradient)
    grad_mask = plan(query, key, value, out, logsumexp, grad_out, *filled, mask, dropout_seed)
    if grad_out is tensors[0]:
        _backwards.remember(kind, tensors, Repeat(plan, filled, output_mask))
    return (
        grad_query,
        grad_key if needs_key else None,
        grad_value if needs_value else None,
        grad_mask.view(attn_mask.shape) if needs_mask else None,
    )


# Backwards of late, by what they depend on beside the tensors: grad_out, query, key, value, out, logsumexp, and a mask
# if there is one.
_backwards = Recent()
on_change(_backwards.clear)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_backwards.clear)


def _kind_of_backward(tensors, dropout_p, is_causal, scale, output_mask, backend):
    """What `_backwards` finds a call by."""
    modes = _torch.deterministic_enabled(), _allow_tf32(tensors[0])
    return is_causal, scale, dropout_p, len(tensors), (*output_mask,), backend, modes


def _bias_gradient(grad_out, query, key, value, mask, logsumexp, scale):
    """A function of such tensors and of delta that computes the mask's gradient, by a Hopper kernel.

    As the plan of ``kernels.triton.attention`` takes it. None where there is no such kernel for the call.
    """
    hopper = _hopper_bias()
    if not hopper.aligned(grad_out, query, key, value, mask):
        return None
    try:
        plan = hopper.plan(grad_out, query, key, value, mask, logsumexp, scale)
    except KernelUnavailable:
        return None

    def compute(grad_out, query, key, value, mask, logsumexp, delta):
        grad_mask = torch.empty(mask.shape, dtype=mask.dtype, device=mask.device)
        plan(grad_out, query, key, value, mask, logsumexp, delta, grad_mask)
        return grad_mask

    return compute


def _with_triton_to_fall_back_on(implementation):
    """As the dispatcher calls an operator: from a compiled graph, say, which knows of no other way to compute it."""

    @functools.wraps(implementation)
    def call(*arguments):
        try:
            return implementation(*arguments)
        except KernelUnavailable as error:
            if arguments[-1] != "cuda":  # the last argument, which is left out where it is "triton"
                raise
            warnings.warn(f"torch_flashbackend: {error}; Triton's kernels run instead", stacklevel=2)
        return implementation(*arguments[:-1])

    return call


def _attention_backward_cuda(grad_out, query, *arguments):
    grads = _gradients_cuda(grad_out, query, *arguments)
    return tuple(query.new_empty(0) if grad is None else grad for grad in grads)


# ---------------------------------------------------------------------------------------------------------- CPU and MPS


def _attention_math(query, key, value, attn_mask, dropout_seed, dropout_p, is_causal, scale, layout, backend="triton"):
    out = _empty_out(query, value.size(3), layout)
    return out.copy_(reference.attention(query, key, value, attn_mask, dropout_p, is_causal, scale, dropout_seed))


def _attention_forward_math(query, key, value, attn_mask, dropout_seed, dropout_p, is_causal, scale, layout,
                            backend="triton"):  # fmt: skip
    out = _empty_out(query, value.size(3), layout)
    result, logsumexp = reference.attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, dropout_seed, return_lse=True
    )
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        logsumexp = torch.stack((logsumexp, torch.zeros_like(logsumexp)))
    return out.copy_(result), logsumexp


def _attention_backward_math(grad_out, query, key, value, attn_mask, out, logsumexp, dropout_seed, dropout_p, is_causal,
                             scale, output_mask, backend="triton"):  # fmt: skip
    grads = reference.attention_backward(
        grad_out, query, key, value, attn_mask, dropout_p, is_causal, scale, dropout_seed, out, logsumexp
    )
    likes = (query, key, value, attn_mask)
    # Copies into the memory order that the fake implementation promises.
    return tuple(
        _empty_gradient(like, index).copy_(grad) if wanted else query.new_empty(0)
        for index, (grad, like, wanted) in enumerate(zip(grads, likes, output_mask, strict=True))
    )


# ----------------------------------------------------------------------------------------------------------------- fake


def _empty_gradient(like: Tensor, index: int) -> Tensor:
    """An uninitialised gradient: the mask's (index 3) is contiguous, the others follow their input's memory order."""
    return like.new_empty(like.shape) if index == 3 else torch.empty_like(like)


@torch.library.register_fake("flashbackend::attention", lib=_library)
def _(query, key, value, attn_mask, dropout_seed, dropout_p, is_causal, scale, layout, backend="triton"):
    return _empty_out(query, value.size(3), layout)


@torch.library.register_fake("flashbackend::attention_forward", lib=_library)
def _(query, key, value, attn_mask, dropout_seed, dropout_p, is_causal, scale, layout, backend="triton"):
    logsumexp = query.new_empty(_logsumexp_shape(query, attn_mask), dtype=torch.float32)
    return _empty_out(query, value.size(3), layout), logsumexp


@torch.library.register_fake("flashbackend::attention_backward", lib=_library)
def _(grad_out, query, key, value, attn_mask, out, logsumexp, dropout_seed, dropout_p, is_causal, scale, output_mask,
      backend="triton"):  # fmt: skip
    likes = (query, key, value, attn_mask)
    return tuple(
        _empty_gradient(like, index) if wanted else query.new_empty(0)
        for index, (like, wanted) in enumerate(zip(likes, output_mask, strict=True))
    )


for _name, _cuda, _math in (
    ("attention", _attention_cuda, _attention_math),
    ("attention_forward", _attention_forward_cuda, _attention_forward_math),
    ("attention_backward", _attention_backward_cuda, _attention_backward_math),
):
    _library.impl(_name, _with_triton_to_fall_back_on(_cuda), "CUDA")
    _library.impl(_name, _math, "CPU")
    _library.impl(_name, _math, "MPS")


# ------------------------------------------------------------------------------------------------------------- autograd


check_gradients: Callable[..., None] | None = None
"""What verify mode wants to be called with after each backward; None: nobody listens."""


def _gradients(saved, grad_out, options, needed):
    """(grad_query, grad_key, grad_value, grad_mask), None where not needed; differentiable under create_graph=True."""
    query, key, value, attn_mask, out, logsumexp, dropout_seed = saved
    dropout_p, is_causal, scale, backend = options
    if torch.is_grad_enabled():
        # create_graph: the backward itself will be differentiated, so it is made of operations that can be.
        inputs = [t for t, wanted in zip((query, key, value, attn_mask), needed, strict=True) if wanted]
        result = reference.attention(query, key, value, attn_mask, dropout_p, is_causal, scale, dropout_seed)
        grads = iter(torch.autograd.grad(result, inputs, grad_out, create_graph=True))
        return tuple(next(grads) if wanted else None for wanted in needed)
    arguments = (
        grad_out, query, key, value, attn_mask, out, logsumexp, dropout_seed, dropout_p, is_causal, scale, needed,
    )  # fmt: skip
    try:
        if torch.compiler.is_compiling():
            # Compiled autograd has Dynamo trace this; no gradient is recorded there.
            grads = _attention_backward(*arguments, backend)
        else:
            grads = _below_autograd(_attention_backward, _gradients_cuda, *arguments, backend)
    except KernelUnavailable as error:
        warnings.warn(f"torch_flashbackend: {error}; the math path computes this backward", stacklevel=2)
        grads = reference.attention_backward(
            grad_out, query, key, value, attn_mask, dropout_p, is_causal, scale, dropout_seed, out, logsumexp
        )
    if check_gradients is not None:
        wanted_three = tuple(grad if wanted else None for grad, wanted in zip(grads[:3], needed[:3], strict=True))
        enable_gqa = query.size(1) != key.size(1)
        check_gradients(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, grad_out, wanted_three
        )  # fmt: skip
    return tuple([grad if wanted else None for grad, wanted in zip(grads, needed, strict=True)])


def _below_autograd(operator, implementation, tensor, *arguments):
    """Run an operator on its arguments; the first, query or its gradient's, stands for all tensors.

    Where nobody could notice, its CUDA implementation is called directly: the way through the dispatcher costs 5 us.
    """
    if tensor.is_cuda and _torch.unobserved(tensor):
        return implementation(tensor, *arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(tensor, *arguments)


class _Attention(torch.autograd.Function):
    """The two operators as one differentiable function: the boundary that an eager call crosses.

    options: (dropout_p, is_causal, scale, layout, backend). Each argument of a Function costs 0.2 us, and as much again
    in the backward.
    """

    @staticmethod
    def forward(ctx, query, key, value, attn_mask, dropout_seed, options):
        out, logsumexp = _below_autograd(
            _attention_forward, _attention_forward_cuda, query, key, value, attn_mask, dropout_seed, *options
        )
        ctx.save_for_backward(query, key, value, attn_mask, out, logsumexp, dropout_seed)
        dropout_p, is_causal, scale, _, backend = options
        ctx.options = dropout_p, is_causal, scale, backend
        return out

    @staticmethod
    def backward(ctx, grad_out):
        grads = _gradients(ctx.saved_tensors, grad_out, ctx.options, ctx.needs_input_grad[:4])
        return *grads, None, None


class _AttentionWithLogsumexp(_Attention):
    """The same, with the logsumexp [B, H, Sq] as a second output that has no gradient."""

    @staticmethod
    def forward(ctx, query, key, value, attn_mask, dropout_seed, options):
        out = _Attention.forward(ctx, query, key, value, attn_mask, dropout_seed, options)
        logsumexp = ctx.to_save[5]
        logsumexp = logsumexp[0] if logsumexp.dim() == 4 else logsumexp.detach()
        ctx.mark_non_differentiable(logsumexp)
        return out, logsumexp

    @staticmethod
    def backward(ctx, grad_out, _=None):
        return _Attention.backward(ctx, grad_out)


# apply() of the base class, bound once, skips a check for functorch transforms that the call hook has made (3 us).
_apply = super(torch.autograd.Function, _Attention).apply
_apply_with_logsumexp = super(torch.autograd.Function, _AttentionWithLogsumexp).apply


def _setup_context(ctx, inputs, output):
    query, key, value, attn_mask, dropout_seed, dropout_p, is_causal, scale, _, backend = inputs
    ctx.save_for_backward(query, key, value, attn_mask, *output, dropout_seed)
    ctx.mark_non_differentiable(output[1])
    ctx.options = dropout_p, is_causal, scale, backend


def _operator_backward(ctx, grad_out, _):
    grads = _gradients(ctx.saved_tensors, grad_out, ctx.options, ctx.needs_input_grad[:4])
    return *grads, None, None, None, None, None, None


torch.library.register_autograd(
    "flashbackend::attention_forward", _operator_backward, setup_context=_setup_context, lib=_library
)


def _inference_setup_context(ctx, inputs, output):
    query, key, value, attn_mask, dropout_seed, dropout_p, is_causal, scale, _, backend = inputs
    ctx.save_for_backward(query, key, value, attn_mask, dropout_seed)
    ctx.options = dropout_p, is_causal, scale, backend


def _inference_backward(ctx, grad_out):
    """``attention`` keeps no logsumexp, so its gradient runs the forward once more."""
    query, key, value, attn_mask, dropout_seed = ctx.saved_tensors
    with torch.no_grad():
        *options, backend = ctx.options
        out, logsumexp = _attention_forward(query, key, value, attn_mask, dropout_seed, *options, "query", backend)
    saved = query, key, value, attn_mask, out, logsumexp, dropout_seed
    grads = _gradients(saved, grad_out, ctx.options, ctx.needs_input_grad[:4])
    return *grads, None, None, None, None, None, None


torch.library.register_autograd(
    "flashbackend::attention", _inference_backward, setup_context=_inference_setup_context, lib=_library
)


# ---------------------------------------------------------------------------------------------------------------- flops


def _with_all_heads(query_shape, shape):
    """A key or value shape as if each query head had its own: grouped-query attention saves bytes, not operations."""
    return (*query_shape[:1], query_shape[1], *shape[2:])


@register_flop_formula([torch.ops.flashbackend.attention, torch.ops.flashbackend.attention_forward])
def _attention_flops(query_shape, key_shape, value_shape, *args, out_shape=None, **kwargs) -> int:
    """As torch counts scaled_dot_product_attention: two products, a causal mask not deducted."""
    return sdpa_flop_count(
        query_shape, _with_all_heads(query_shape, key_shape), _with_all_heads(query_shape, value_shape)
    )


@register_flop_formula(torch.ops.flashbackend.attention_backward)
def _attention_backward_flops(grad_out_shape, query_shape, key_shape, value_shape, *args, **kwargs) -> int:
    """As torch counts its backward: five products."""
    return sdpa_backward_flop_count(
        grad_out_shape, query_shape, _with_all_heads(query_shape, key_shape), _with_all_heads(query_shape, value_shape)
    )


# ------------------------------------------------------------------------------------------------------------------ run


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    layout: str = "query",
    backend: str = "triton",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention on our operators, differentiable; draws the dropout seed from torch's generator of the device.

    Shapes, types and backends as the module says. Call it with no functorch transform and no forward-mode level active:
    those need PyTorch's own rules. Raises ``KernelUnavailable`` before anything ran when a kernel can not be compiled.
    """
    if scale is None:
        scale = reference.default_scale(query.size(-1))
    seed = reference.draw_dropout_seed(query, dropout_p)
    if torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (attn_mask is not None and attn_mask.requires_grad)
    ):
        apply = _apply_with_logsumexp if return_lse else _apply
        return apply(query, key, value, attn_mask, seed, (dropout_p, is_causal, scale, layout, backend))
    arguments = query, key, value, attn_mask, seed, dropout_p, is_causal, scale, layout, backend
    if not return_lse:
        return _below_autograd(_attention, _attention_cuda, *arguments)
    out, logsumexp = _below_autograd(_attention_forward, _attention_forward_cuda, *arguments)
    return out, logsumexp[0] if logsumexp.dim() == 4 else logsumexp


@dataclasses.dataclass(slots=True, eq=False)
class _Ready:
    """A forward on one backend's kernels but for its addresses: the plan, and the outputs that it fills."""

    scale: float | None  # as it was given
    options: tuple[Any, ...]  # those of `_gradients`
    plan: Any
    out: tuple[Any, ...]  # shape, strides, dtype
    logsumexp: tuple[Any, ...] | None  # likewise; None: not asked for
    run: Callable[..., Any] = dataclasses.field(init=False)  # this object, or a shorter way
    backwards: list[tuple[Any, ...]] = dataclasses.field(init=False)  # of late, as `_repeat_backward` reads them

    def __post_init__(self) -> None:
        self.run, self.backwards = self, []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *mask: Tensor) -> tuple[Tensor, Tensor | None]:
        """mask: one or none, like that of the plan."""
        empty = _torch.allocator(query)
        out = empty(*self.out)
        logsumexp = None if self.logsumexp is None else empty(*self.logsumexp)
        self.plan(query, key, value, out, logsumexp, *mask)
        return out, logsumexp


class ReadyRun:
    """`run` on one backend's kernels for calls that differ in nothing but addresses and scale, all aligned to 16 bytes.

    It keeps what the last call has worked out, which saves looking it up: 2 us of some 12. A mask may be among the
    tensors. Calls with dropout go through `run`, and on the "cuda" backend those with other masks than bool ones:
    their plans depend on more.
    """

    __slots__ = ("_backend", "_needs_grad", "_ready")

    def __init__(self, backend: str, needs_grad: bool) -> None:
        """needs_grad: all of them need a gradient, or none of them does."""
        self._backend = backend
        self._needs_grad = needs_grad
        self._ready: _Ready | None = None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        *,
        layout: str = "query",
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As `run`."""
        if return_lse or not _torch.unobserved(query):
            return run(
                query, key, value, attn_mask, dropout_p, is_causal, scale, layout=layout, backend=self._backend,
                return_lse=return_lse,
            )  # fmt: skip
        return self.unobserved(query, key, value, attn_mask, dropout_p, is_causal, scale, layout)

    def unobserved(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        layout: str,
    ) -> Tensor:
        """The same without `return_lse`, for a caller who knows the tensors to be `_torch.unobserved`."""
        ready = self._ready
        if (
            dropout_p != 0.0
            or (attn_mask is not None and not self._takes_mask(attn_mask, is_causal))
            or (ready is None and (query.numel() == 0 or key.numel() == 0))
        ):
            result = run(
                query, key, value, attn_mask, dropout_p, is_causal, scale, layout=layout, backend=self._backend
            )  # fmt: skip
            return cast(Tensor, result)
        if ready is None or ready.scale != scale:
            ready = self._ready = self._prepare(query, key, value, attn_mask, is_causal, scale, layout)
        mask = () if attn_mask is None else (attn_mask,)
        if self._needs_grad:
            return _apply_ready(query, key, value, ready, *mask)
        return ready.run(query, key, value, *mask)[0]

    def _takes_mask(self, attn_mask: Tensor, is_causal: bool) -> bool:
        if attn_mask.data_ptr() & 15:  # how it is read depends on that
            return False
        return self._backend == "triton" or (attn_mask.dtype is torch.bool and not is_causal)

    def _prepare(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
        layout: str,
    ) -> _Ready:
        softmax_scale = reference.default_scale(query.size(-1)) if scale is None else scale
        out = _empty_out(query, value.size(3), layout)
        logsumexp = _logsumexp_like(query, attn_mask) if self._needs_grad else None
        mask = _mask_as_rank_4(attn_mask)
        if self._backend == "triton":
            plan = _kernels().plan_of_forward(
                query, key, value, mask, None, 0.0, is_causal, softmax_scale, out,
                None if logsumexp is None else _torch.allocator(query)(*logsumexp), _allow_tf32(query),
            )  # fmt: skip
        else:
            masks = () if mask is None else (mask,)
            plan = _hopper().plan(query, key, value, out, self._needs_grad, is_causal, softmax_scale, *masks)
        options = 0.0, is_causal, softmax_scale, self._backend
        ready = _Ready(scale, options, plan, ((*out.shape,), out.stride(), out.dtype), logsumexp)
        prepare = getattr(plan, "prepared", None)
        if prepare is not None:
            ready.run = prepare(ready.out, logsumexp, query, ready) or ready
        return ready


# Of one forward: its gradient may come in several layouts.
_MAX_BACKWARDS = 4


class _ReadyAttention(torch.autograd.Function):
    """`_Attention` of what has been worked out before; mask: one or none."""

    @staticmethod
    def forward(ctx, query, key, value, ready, *mask):
        out, logsumexp = ready.run(query, key, value, *mask)
        ctx.to_save = query, key, value, out, logsumexp, *mask  # all that save_for_backward does
        ctx.ready = ready
        return out

    @staticmethod
    def backward(ctx, grad_out):
        return _ready_gradients(ctx.ready, ctx.needs_input_grad, (grad_out, *ctx.saved_tensors))


def _ready_gradients(ready, needed, tensors):
    """`_gradients`, as `_ReadyAttention` returns them; needed: of its arguments."""
    grad_out, query, key, value, out, logsumexp, *mask = tensors
    saved = query, key, value, mask[0] if mask else None, out, logsumexp, None
    return _of_arguments(_gradients(saved, grad_out, ready.options, _wanted(needed)), tensors)


def _wanted(needed):
    """Of query, key, value and mask. Without a mask it is what is needed of `ready` that stands there: nothing."""
    return needed if len(needed) == 4 else (*needed[:3], needed[4])


def _of_arguments(grads, tensors):
    """Gradients of query, key, value and mask in the order of `_ReadyAttention`'s arguments."""
    return grads if len(tensors) == 6 else (*grads[:3], None, grads[3])


def _repeat_backward(ctx, grad_out):
    """`_ReadyAttention.backward`, the long way where it does not find the call among the forward's backwards of late.

    A backward is found by one look at all tensors: they may have been changed, or moved by who saved them, since.
    """
    ready, needed = ctx.ready, ctx.needs_input_grad
    tensors = grad_out, *ctx.saved_tensors
    watched = check_gradients is not None or torch.is_grad_enabled() or _dispatch_modes() or _profiler_enabled()
    if not watched:
        mode = needed, _deterministic_enabled(), _allow_tf32(grad_out)
        for known, is_like, repeat in ready.backwards:
            if known == mode and is_like(*tensors):
                try:
                    return _of_arguments(repeat(*tensors), tensors)
                except KernelUnavailable:
                    break  # Nothing has run; the long way says why, or finds another kernel.
    grads = _ready_gradients(ready, needed, tensors)
    if not watched:
        _keep_backward(ready, mode, tensors)
    return grads


def _keep_backward(ready, mode, tensors):
    """Let `_repeat_backward` find a backward that has been computed, if it is one that can be repeated."""
    needed, *_ = mode
    dropout_p, is_causal, scale, backend = ready.options
    kind = _kind_of_backward(tensors, dropout_p, is_causal, scale, _wanted(needed), backend)
    repeat = _backwards.find(kind, tensors)
    is_like = None if repeat is None else _torch.tensor_guard(tensors)
    if is_like is not None:
        ready.backwards.insert(0, (mode, is_like, repeat.prepared(tensors[1])))
        del ready.backwards[_MAX_BACKWARDS:]


_torch.set_backward(_ReadyAttention, _repeat_backward)
for _function in (_Attention, _AttentionWithLogsumexp):
    _torch.set_backward(_function, _function.backward)
_apply_ready = super(torch.autograd.Function, _ReadyAttention).apply
