"""`attention`, our own function beside F.scaled_dot_product_attention, and `run`, which carries out a Decision.

May import decisions.py, ops.py and reference.py (all but the first when a call arrives) and `_torch.py`. `run` is
imported by override.py and selection.py; nothing else here is. Registers two composite ops, so that torch.compile sees
one node where our functions are called:

    flashbackend::sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, backends) -> output
    flashbackend::sdpa_with_logsumexp(the same) -> (output, logsumexp)

`backends` is a comma-separated list in order of preference; "" lets routing choose. The file is not called attention.py
because `torch_flashbackend.attention` is the function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _torch, decisions

__all__ = ["attention", "call", "run", "run_stock"]

ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, "
    'float? scale=None, bool enable_gqa=False, str backends=""'
)
AUTOCAST_DEVICES = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}
_dispatch_modes = _torch.dispatch_modes
_profiler_enabled = _torch.profiler_enabled
# Where the logsumexp is asked for, stock cannot answer.
WITH_LOGSUMEXP = ("cuda", "triton", "math")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention as F.scaled_dot_product_attention defines it, whether or not the plugin is enabled.

    query: [*batch, num_heads, seqlen_q, head_dim]. key: [*batch, num_kv_heads, seqlen_k, head_dim].
    value: [*batch, num_kv_heads, seqlen_k, head_dim_v]. Rank 2 and up; rank 2 has no heads. Batch dimensions broadcast.
        Any device; float16, bfloat16, float32 or float64, one for all three (autocast applies as it does to stock's).
    attn_mask: broadcastable to [*batch, num_heads, seqlen_q, seqlen_k]; bool (True: may attend), or float32 or query's
        dtype, added to the scaled scores; may require grad. Not together with is_causal.
    dropout_p: probability of dropping a weight, in [0, 1].
    is_causal: query i sees keys 0 to i (top-left aligned when the lengths differ).
    scale: factor of the scores, any finite number; 1/sqrt(head_dim) if None.
    enable_gqa: num_kv_heads may divide num_heads; nothing is repeated in memory.
    return_lse: return also the logsumexp of each row of scores: float32, in natural units, shape
        [*batch, num_heads, seqlen_q], -inf for a row without a key. It is not differentiable. PyTorch's own
        kernels do not return it, so the call then runs on ours or, where these cannot, on the math path.

    Returns [*batch, num_heads, seqlen_q, head_dim_v], in the memory order that stock would have given. A row with every
    key masked is zeros.
    Raises what F.scaled_dot_product_attention raises for arguments that do not fit; with return_lse RuntimeError, with
    the failed conditions, where no backend of ours takes the call.
    """
    try:
        device_type = query.device.type
        if (
            torch.compiler.is_compiling()
            or torch.jit.is_tracing()
            or (device_type != "meta" and torch.is_autocast_enabled(device_type))
        ):
            if return_lse:
                return _op_with_logsumexp(
                    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, ",".join(WITH_LOGSUMEXP)
                )
            return _op(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, "")
        return call(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
            WITH_LOGSUMEXP if return_lse else None, return_lse,
        )  # fmt: skip
    except (AttributeError, TypeError):
        # Looked at where it has failed, and so for nothing by the calls that are right.
        _refuse_other_types(query=query, key=key, value=value, attn_mask=attn_mask, scale=scale)
        raise


def _refuse_other_types(*, scale: Any, **tensors: Any) -> None:
    """Raise TypeError in PyTorch's words for what is no tensor, or a scale that is no number."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) and not (tensor is None and name == "attn_mask"):
            raise TypeError(f"attention(): argument '{name}' must be Tensor, not {type(tensor).__name__}")
    if isinstance(scale, str | bytes | list | tuple):
        raise TypeError(f"attention(): argument 'scale' must be float, not {type(scale).__name__}")


def run(
    decision: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Any:
    """Carry out a decision of routing for tensors of any rank: output, or (output, logsumexp) if return_lse.

    Ranks other than 4 and batch or head dimensions that broadcast become rank 4 by differentiable views: nothing is
    copied, except that with a rank above 4 a broadcast batch dimension may have to be.
    """
    if decision.backend == "stock":
        return run_stock(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    batch, query, key, value, attn_mask = _to_rank_4(query, key, value, attn_mask, enable_gqa)
    if decision.backend == "math":
        from . import reference

        seed = reference.draw_dropout_seed(query, dropout_p)
        result = reference.attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, seed, return_lse=return_lse
        )
        if return_lse:
            result = (result[0], result[1].detach())
    else:
        from . import ops

        result = ops.run(
            query, key, value, attn_mask, dropout_p, is_causal, scale, layout=decision.layout,
            backend=decision.backend, return_lse=return_lse,
        )  # fmt: skip
    if batch is None:
        return result
    if return_lse:
        return _restore(batch, result[0]), _restore(batch, result[1])
    return _restore(batch, result)


def run_stock(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's own scaled_dot_product_attention, past both of our hooks, with gradients and while traced as well."""
    return _torch.as_stock(
        _torch.composite_sdpa().call_boxed, _torch.ANY_KEYSET, query, key, value, attn_mask, dropout_p, is_causal,
        scale=scale, enable_gqa=enable_gqa,
    )  # fmt: skip


def call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    allowed: tuple[str, ...] | None,
    return_lse: bool,
) -> Any:
    """Decide, from the cache where the call is an eager one on plain tensors, and run."""
    arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    among = decisions.recent if attn_mask is None else decisions.recent_with_mask
    who = ("direct", allowed)
    rest = decisions.settings(dropout_p, is_causal, scale, enable_gqa, who)
    entry = decisions.find(among, rest, *tensors)
    known = entry is not None and forward_ad._current_level < 0
    if entry is None or not known:
        if _torch.transforms_active() or not decisions.is_plain(*tensors):
            entry = decisions.decide(*arguments, entry="direct", allowed=allowed)
        else:
            keep_as = decisions.signature(*arguments, grad_mode=torch.is_grad_enabled(), entry=who)
            entry = decisions.cache.get(keep_as)
            if entry is None:
                entry = decisions.decide(*arguments, entry="direct", allowed=allowed, keep_as=keep_as)
            decisions.remember(among, rest, entry, *tensors)
    decision = entry.decision
    decision.calls += 1
    if not entry.taken:
        return run_stock(*arguments)
    try:
        if known and entry.unobserved is not None and not (return_lse or _dispatch_modes() or _profiler_enabled()):
            result = entry.unobserved(query, key, value, attn_mask, dropout_p, is_causal, scale, decision.layout)
        elif entry.run is not None:
            result = entry.run(
                query, key, value, attn_mask, dropout_p, is_causal, scale, layout=decision.layout, return_lse=return_lse
            )
        else:
            result = run(decision, *arguments, return_lse)
    except decisions.kernel_failures() as error:
        others = ("stock",) if allowed is None else allowed[allowed.index(decision.backend) + 1 :]
        if not others or torch.compiler.is_compiling():
            raise
        decisions.warn_once(
            f"{decision.backend} kernel not available, {others[0]} runs the call instead: {decisions.first_line(error)}"
        )
    else:
        if decisions.verify.share and decision.backend != "math":
            decisions.verify.maybe_check(*arguments, result[0] if return_lse else result)
        return result
    return call(*arguments, others, return_lse)


def _to_rank_4(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> tuple[tuple[Any, ...] | None, Tensor, Tensor, Tensor, Tensor | None]:
    """Views of rank 4 with one batch size. The first result is what `_restore` needs, None if nothing changed."""
    rank = max(query.dim(), key.dim(), value.dim())
    if rank < 4:
        batch: tuple[Any, ...] | None = ("leading", 4 - rank)
        query, key, value = (_leading(t, 4) for t in (query, key, value))
    else:
        query, key, value = (_leading(t, rank) for t in (query, key, value))
        batch = None
    if attn_mask is not None:
        attn_mask = _leading(attn_mask, max(rank, 4))
    query, key, value = _broadcast_heads(query, key, value, enable_gqa)
    sizes = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    if rank <= 4:
        if not query.shape[0] == key.shape[0] == value.shape[0]:
            query, key, value = (t.expand(*sizes, *t.shape[-3:]) for t in (query, key, value))
        return batch, query, key, value, attn_mask
    query, key, value = (t.expand(*sizes, *t.shape[-3:]).reshape(-1, *t.shape[-3:]) for t in (query, key, value))
    if attn_mask is not None:
        if any(n != 1 for n in attn_mask.shape[:-3]):
            # Only the batch dimensions are expanded: heads, queries and keys keep their size 1.
            attn_mask = attn_mask.expand(*sizes, *attn_mask.shape[-3:])
        attn_mask = attn_mask.reshape(-1, *attn_mask.shape[-3:])
    return ("batch", sizes), query, key, value, attn_mask


def _leading(tensor: Tensor, rank: int) -> Tensor:
    return tensor[(None,) * (rank - tensor.dim())] if tensor.dim() < rank else tensor


def _broadcast_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """One number of heads for key and value, which divides the query's."""
    heads, key_heads, value_heads = query.shape[-3], key.shape[-3], value.shape[-3]
    if key_heads == value_heads and (enable_gqa or key_heads in (heads, 1)):
        return query, key, value
    if enable_gqa:
        # The math path lets key and value differ. Rare, and the only case where something is repeated in memory.
        return query, _repeat(key, heads // key_heads), _repeat(value, heads // value_heads)
    (heads,) = torch.broadcast_shapes((heads,), (key_heads,), (value_heads,))
    expanded = (t.expand(*t.shape[:-3], heads, *t.shape[-2:]) for t in (query, key, value))
    return tuple(expanded)  # type: ignore[return-value]


def _repeat(tensor: Tensor, times: int) -> Tensor:
    return tensor if times == 1 else tensor.repeat_interleave(times, -3)


def _restore(batch: tuple[Any, ...], result: Tensor) -> Tensor:
    kind, detail = batch
    if kind == "leading":
        for _ in range(detail):
            result = result.squeeze(0)
        return result
    return result.reshape(*detail, *result.shape[1:])


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    backends: str = "",
) -> Tensor:
    allowed = tuple(backends.split(",")) if backends else None
    return call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, allowed, False)


def _sdpa_with_logsumexp(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    backends: str = "",
) -> tuple[Tensor, Tensor]:
    allowed = tuple(backends.split(",")) if backends else WITH_LOGSUMEXP
    return call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, allowed, True)


def under_autocast(op: Any, device_type: str, autocast_key: str) -> Any:
    """What autocast does to stock's op: every floating tensor but float64 in autocast's dtype, inner ops without it."""

    def cast_and_call(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)

        def cast(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or not tensor.is_floating_point() or tensor.dtype is torch.float64:
                return tensor
            return tensor.to(dtype) if tensor.device.type == device_type else tensor

        arguments = (cast(query), cast(key), cast(value), cast(attn_mask), *rest)
        with _torch.exclude_keys(autocast_key):
            return op(*arguments)

    return cast_and_call


_library = torch.library.Library("flashbackend", "FRAGMENT")
_library.define(f"sdpa({ARGUMENTS}) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_library.define(f"sdpa_with_logsumexp({ARGUMENTS}) -> (Tensor, Tensor)", tags=(torch.Tag.nondeterministic_seeded,))
_library.impl("sdpa", _sdpa, "CompositeImplicitAutograd")
_library.impl("sdpa_with_logsumexp", _sdpa_with_logsumexp, "CompositeImplicitAutograd")
_op = torch.ops.flashbackend.sdpa.default
_op_with_logsumexp = torch.ops.flashbackend.sdpa_with_logsumexp.default
for _device_type, _autocast_key in AUTOCAST_DEVICES.items():
    _library.impl("sdpa", under_autocast(_op, _device_type, _autocast_key), _autocast_key)
    _library.impl("sdpa_with_logsumexp", under_autocast(_op_with_logsumexp, _device_type, _autocast_key), _autocast_key)
