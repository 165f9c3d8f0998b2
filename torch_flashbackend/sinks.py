"""Attention with a learned sink per head: one more column of scores, which takes probability and gives nothing.

    weights = softmax([scale * query @ key^T + mask, sinks]), without its last column, @ value

May import `_torch.py`, decisions.py, direct.py, ops.py and reference.py (the last two when a call arrives). Imported by
integrations/transformers.py, whose models call the sinks `s_aux` (gpt-oss and others).

No kernel knows of sinks, and none has to. With logsumexp' = log(exp(logsumexp) + exp(sink)), the output is that without
the sink times exp(logsumexp - logsumexp'); and the gradients of query, key, value and mask are those that the ordinary
backward gives for the new output and logsumexp', because each probability is exp(score - logsumexp') and the sink's own
term in the row's sum of `grad_out * out` is zero. The sink's gradient is minus that sum times its probability.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import _torch, decisions, direct

__all__ = ["attention_with_sinks"]

# Stock knows no sinks. Like any call with logsumexp, which is all that they ask of a kernel.
OURS = direct.WITH_LOGSUMEXP

_COMMON = (
    "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor sinks, Tensor? dropout_seed, float dropout_p, "
    "bool is_causal, float scale, str layout, str backend"
)
_library = torch.library.Library("flashbackend", "FRAGMENT")
_library.define(f"sinks_forward({_COMMON}) -> (Tensor, Tensor)")
_library.define(
    "sinks_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor sinks, "
    "Tensor out, Tensor logsumexp, Tensor? dropout_seed, float dropout_p, bool is_causal, float scale, "
    "bool[4] output_mask, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "sdpa_with_sinks(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor sinks, float dropout_p=0.0, "
    "bool is_causal=False, float? scale=None, bool enable_gqa=False) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_forward_op = torch.ops.flashbackend.sinks_forward.default
_backward_op = torch.ops.flashbackend.sinks_backward.default
_sdpa_op = torch.ops.flashbackend.sdpa_with_sinks.default


def attention_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As `torch_flashbackend.attention`, rank 4 only, with sinks [num_heads], any floating dtype, in units of scores.

    A sink of -inf is none. Returns [B, H, Sq, Dv]; a row with every key masked is zeros. Differentiable, sinks
    included. Runs on our kernels, and in plain PyTorch operations where these do not take the call (a CPU, a head_dim
    over 512, torch.func transforms). Raises RuntimeError, with the failed conditions, for arguments that do not fit.
    """
    if sinks.shape != query.shape[1:2]:
        raise RuntimeError(f"sinks need one number for each head of query: {list(sinks.shape)} for {query.shape[1]}")
    return _sdpa_op(query, key, value, attn_mask, sinks, dropout_p, is_causal, scale, enable_gqa)


def _sdpa_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    entry = None
    keep_as = None
    if not _torch.transforms_active() and decisions.is_plain(query, key, value, attn_mask):
        keep_as = decisions.signature(*arguments, grad_mode=torch.is_grad_enabled(), entry=("direct", OURS))
        entry = decisions.cache.get(keep_as)
    if entry is None:
        entry = decisions.decide(*arguments, entry="direct", allowed=OURS, keep_as=keep_as)
    decision = entry.decision
    decision.calls += 1
    from . import reference

    scale = reference.default_scale(query.size(-1)) if scale is None else scale
    seed = reference.draw_dropout_seed(query, dropout_p)
    if decision.backend == "math":
        return _reference(query, key, value, attn_mask, sinks, seed, dropout_p, is_causal, scale)
    return _forward_op(
        query, key, value, attn_mask, sinks, seed, dropout_p, is_causal, scale, decision.layout, decision.backend
    )[0]  # fmt: skip


def _reference(query, key, value, attn_mask, sinks, dropout_seed, dropout_p, is_causal, scale) -> Tensor:
    """The definition itself."""
    from . import reference

    key, value, mask = _one_more_key(query, key, value, attn_mask, sinks, is_causal)
    return reference.attention(query, key, value, mask, dropout_p, False, scale, dropout_seed)


def _one_more_key(query, key, value, attn_mask, sinks, is_causal) -> tuple[Tensor, Tensor, Tensor]:
    """key, value and mask with a key and a value of zeros at the end; the sinks are that key's column of the mask."""
    batch, heads, seqlen_q, _ = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    if is_causal:
        attn_mask = torch.ones(seqlen_q, key.size(2), dtype=torch.bool, device=query.device).tril()
    scores = torch.zeros((), dtype=dtype, device=query.device)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = attn_mask.to(dtype)
    column = sinks.to(dtype).view(1, heads, 1, 1).expand(batch, heads, seqlen_q, 1)
    mask = torch.cat((scores.expand(batch, heads, seqlen_q, key.size(2)), column), -1)
    key, value = (torch.cat((t, t.new_zeros(*t.shape[:2], 1, t.size(3))), 2) for t in (key, value))
    return key, value, mask


def _with_sink(logsumexp: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(what the output is to be multiplied by [B, H, Sq], the logsumexp with the sink in it, in the same form)."""
    whole = logsumexp[0] if logsumexp.dim() == 4 else logsumexp
    sink = sinks.to(whole.dtype).view(1, -1, 1)
    total = torch.logaddexp(whole, sink)
    factor = torch.exp(whole - total).masked_fill(whole == -math.inf, 0.0)
    if logsumexp.dim() == 3:
        return factor, total
    # The second half is what rounding cuts off the first, which matters beside a mask's large numbers.
    added = torch.nn.functional.softplus(sink - whole)
    rest = (logsumexp[1] + (added - (total - whole))).masked_fill((whole == -math.inf) | (sink > whole + 20.0), 0.0)
    return factor, torch.stack((total, rest))


def _forward(query, key, value, attn_mask, sinks, dropout_seed, dropout_p, is_causal, scale, layout, backend):
    from . import ops

    out, logsumexp = ops._attention_forward(
        query, key, value, attn_mask, dropout_seed, dropout_p, is_causal, scale, layout, backend
    )
    factor, logsumexp = _with_sink(logsumexp, sinks)
    return out.mul_(factor.unsqueeze(-1)), logsumexp


def _backward(grad_out, query, key, value, attn_mask, sinks, out, logsumexp, dropout_seed, dropout_p, is_causal, scale,
              output_mask, backend):  # fmt: skip
    from . import ops

    grads = ops._attention_backward(
        grad_out, query, key, value, attn_mask, out, logsumexp, dropout_seed, dropout_p, is_causal, scale, output_mask,
        backend,
    )  # fmt: skip
    whole = logsumexp[0] if logsumexp.dim() == 4 else logsumexp
    row_sums = (grad_out.to(whole.dtype) * out.to(whole.dtype)).sum(-1)
    probability = torch.exp(sinks.to(whole.dtype).view(1, -1, 1) - whole).masked_fill(whole == -math.inf, 0.0)
    return *grads, -(probability * row_sums).sum((0, 2)).to(sinks.dtype)


@torch.library.register_fake("flashbackend::sinks_forward", lib=_library)
def _(query, key, value, attn_mask, sinks, dropout_seed, dropout_p, is_causal, scale, layout, backend):
    from . import ops

    return ops._attention_forward(
        query, key, value, attn_mask, dropout_seed, dropout_p, is_causal, scale, layout, backend
    )


@torch.library.register_fake("flashbackend::sinks_backward", lib=_library)
def _(grad_out, query, key, value, attn_mask, sinks, out, logsumexp, dropout_seed, dropout_p, is_causal, scale,
      output_mask, backend):  # fmt: skip
    grads = torch.ops.flashbackend.attention_backward.default(
        grad_out, query, key, value, attn_mask, out, logsumexp, dropout_seed, dropout_p, is_causal, scale, output_mask,
        backend,
    )  # fmt: skip
    return *grads, torch.empty_like(sinks)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, attn_mask, sinks, dropout_seed, dropout_p, is_causal, scale, _, backend = inputs
    ctx.save_for_backward(query, key, value, attn_mask, sinks, *output, dropout_seed)
    ctx.mark_non_differentiable(output[1])
    ctx.options = dropout_p, is_causal, scale, backend


def _operator_backward(ctx: Any, grad_out: Tensor, _: Any) -> tuple[Any, ...]:
    query, key, value, attn_mask, sinks, out, logsumexp, dropout_seed = ctx.saved_tensors
    dropout_p, is_causal, scale, backend = ctx.options
    needed = list(ctx.needs_input_grad[:5])
    if torch.is_grad_enabled():
        # create_graph: as in ops.py, the backward is made of operations that can be differentiated again.
        inputs = [t for t, wanted in zip((query, key, value, attn_mask, sinks), needed) if wanted]
        result = _reference(query, key, value, attn_mask, sinks, dropout_seed, dropout_p, is_causal, scale)
        found = iter(torch.autograd.grad(result, inputs, grad_out, create_graph=True))
        grads = tuple(next(found) if wanted else None for wanted in needed)
    else:
        results = _backward_op(
            grad_out, query, key, value, attn_mask, sinks, out, logsumexp, dropout_seed, dropout_p, is_causal, scale,
            needed[:4], backend,
        )  # fmt: skip
        grads = tuple(grad if wanted else None for grad, wanted in zip(results, needed))
    return *grads, None, None, None, None, None, None


_library.impl("sdpa_with_sinks", _sdpa_with_sinks, "CompositeImplicitAutograd")
_library.impl("sinks_forward", _forward, "CompositeExplicitAutograd")
_library.impl("sinks_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_autograd(
    "flashbackend::sinks_forward", _operator_backward, setup_context=_setup_context, lib=_library
)
for _device_type, _autocast_key in direct.AUTOCAST_DEVICES.items():
    _library.impl("sdpa_with_sinks", direct.under_autocast(_sdpa_op, _device_type, _autocast_key), _autocast_key)
