"""F.scaled_dot_product_attention on nested tensors of jagged layout, taken where PyTorch begins to unwrap them.

May import `_torch.py`, decisions.py, packed.py, batch_invariance.py and on_import.py at the top, ops.py and varlen.py
when the first call is taken. Imported by override.py, and by explain.py for a name.

PyTorch computes such a call in Python: NestedTensor.__torch_function__ -> jagged_scaled_dot_product_attention, which
makes views and nested tensors one operator at a time, and ends in an operator that the kernel hook takes. All of it
takes 2 to 5 ms, several times as long as the kernels. So that function itself is replaced: a call that our kernels for
packed sequences take is unwrapped, computed and wrapped again in one step, 0.1 ms, with one node in autograd's graph.
What else there is stays PyTorch's, calls that are being traced, compiled or transformed included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _torch, decisions, packed
from .batch_invariance import is_batch_invariant
from .integrations import on_import

__all__ = ["ENTRY", "NestedHook"]

ENTRY = "nested"
"""Under this name routing and the cache of decisions know the calls of nested tensors."""

MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: query, key or "
    "value of scaled_dot_product_attention on nested tensors"
)
_mark = _torch.thread_mark
_flash_enabled = _torch.flash_enabled
_dispatch_modes = _torch.dispatch_modes
_is_compiling = torch.compiler.is_compiling


class NestedHook:
    """Our function in the place of PyTorch's, for tensors on one type of device."""

    def __init__(self, key: str | None) -> None:
        """key: the dispatch key of the kernels that are hooked, "CUDA" or, in tests, "CPU"; None replaces nothing."""
        self._device_type = None if key is None else key.lower()
        self._stock: Callable[..., Tensor] | None = None
        self._ours: Callable[..., Tensor] | None = None

    def register(self) -> None:
        """Put our function there now, or as soon as the first nested tensor needs it."""
        if self._device_type is not None:
            on_import.when_imported(_torch.NESTED_OPS, self._put)

    def unregister(self) -> None:
        """Put PyTorch's back, unless somebody else has replaced ours meanwhile. Does nothing the second time."""
        on_import.cancel(self._put)
        ours, self._ours = self._ours, None
        if self._stock is not None and ours is not None and _torch.nested_sdpa() is ours:
            _torch.set_nested_sdpa(self._stock)

    def _put(self) -> None:
        assert self._device_type is not None
        self._stock = _torch.nested_sdpa()
        if self._stock is not None:
            self._ours = _replacement(self._stock, self._device_type)
            _torch.set_nested_sdpa(self._ours)


def _replacement(stock: Callable[..., Tensor], device_type: str) -> Callable[..., Tensor]:
    @functools.wraps(stock)
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        # First, so that Dynamo sees nothing but stock.
        if not (_is_compiling() or _mark.stock or _dispatch_modes()):
            if attn_mask is None and dropout_p == 0.0 and _flash_enabled() and not _torch.transforms_active():
                with _torch.no_torch_function():
                    out = _attend(query, key, value, is_causal, scale, device_type)
                if out is not None:
                    return out
        return stock(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    return attention


def _call_of(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> packed.Call | None:
    """The call on packed sequences that a call on nested tensors [B, H, S of each, D] is; None for one of stock's.

    The rows of the call are outside of autograd's graph. Stock's fused kernels take no sequence of length 0 and no
    grouped heads: its math path or its error answers such a call. Keys and values share their offsets, queries too
    under a causal mask, which has a corner otherwise.
    """
    of_query, of_key, of_value = _torch.jagged_rows(query), _torch.jagged_rows(key), _torch.jagged_rows(value)
    if of_query is None or of_key is None or of_value is None:
        return None
    (q, offsets_q), (k, offsets_k), (v, offsets_v) = of_query, of_key, of_value
    if (
        offsets_k is not offsets_v
        or (offsets_q is not offsets_k and (is_causal or offsets_q.size(0) != offsets_k.size(0)))
        or q.size(1) != k.size(1)
        or not q.stride(2) == k.stride(2) == v.stride(2) == 1
    ):
        return None
    shortest_q, max_q = shortest_k, max_k = _torch.jagged_extremes(query)
    if offsets_q is not offsets_k:
        shortest_k, max_k = _torch.jagged_extremes(key)
    if shortest_q == 0 or shortest_k == 0:
        return None
    call = packed.Call(q, k, v, offsets_q, offsets_k, max_q, max_k, -1, 0 if is_causal else -1, scale)
    return call if packed.fits(call) else None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None, device_type: str
) -> Tensor | None:
    """The answer to a call that our kernels take, otherwise None."""
    if query.device.type != device_type or not _torch.jagged_known():
        return None
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        query, key, value = (_autocast(tensor, dtype) for tensor in (query, key, value))
    call = _call_of(query, key, value, is_causal, scale)
    if call is None:
        return None
    training = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    flash = packed.flash_fits(call)
    entry = packed.entry_for(call, ENTRY, "flash" if flash else "efficient", training)
    if not entry.taken:
        return None
    rows = call.query, call.key, call.value
    if not (flash and call.sequences == 1):  # stock's flash kernel takes a single sequence in any order
        rows = _in_order(call.query), _in_order(call.key), _in_order(call.value)
    operators = _Dense.of(call) if _are_as_long(call, query, key) else _Packed(call.arguments())
    try:
        if training:
            return _apply_nested(query, key, value, *rows, operators)
        return _torch.jagged_tensor(operators.forward(*rows)[0], _torch.jagged_structure(query))
    except decisions.kernel_failures() as error:
        decisions.after_failure(entry, error)
        return None


def _are_as_long(call: packed.Call, query: Tensor, key: Tensor) -> bool:
    """Are all sequences as long as the longest, and are there no rows behind them?

    Not asked for where one sequence's result must not depend on the others.
    """
    return (
        call.query.size(0) == call.sequences * call.max_q
        and call.key.size(0) == call.sequences * call.max_k
        and _torch.jagged_extremes(query) == (call.max_q, call.max_q)
        and _torch.jagged_extremes(key) == (call.max_k, call.max_k)
        and not is_batch_invariant()
    )


def _autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """What stock's function does by itself: no operator that autocast has a rule for is called."""
    if tensor.dtype is dtype or tensor.dtype is torch.float64 or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)


def _in_order(rows: Tensor) -> Tensor:
    """rows [total, H, D] in this memory order. Stock makes the same copy; the output has the strides that follow."""
    pitch, head_pitch, step = rows.stride()
    return rows if pitch > head_pitch > step or rows.is_contiguous() else rows.contiguous()


class _Packed(NamedTuple):
    """The operators for packed sequences. arguments: theirs after value."""

    arguments: tuple[Any, ...]

    def forward(self, *rows: Tensor) -> tuple[Tensor, Tensor]:
        """(out [total_q, H, Dv], logsumexp) of query [total_q, H, D], key and value, for `gradients` to have back."""
        from . import ops, varlen

        return ops._below_autograd(varlen._forward_op, varlen._forward_cuda, *rows, *self.arguments)

    def gradients(self, saved: tuple[Tensor, ...], grad_out: Tensor, wanted: tuple[bool, ...]) -> Sequence[Any]:
        """Of query, key and value, and one more entry; saved: these three, out and logsumexp."""
        from . import varlen

        return varlen._gradients((*saved, *self.arguments[:5]), self.arguments[5:], grad_out, [*wanted, False])


class _Dense(NamedTuple):
    """The dense operators, for sequences of one length: they need no list of tiles, and have more forms."""

    sequences: int
    is_causal: bool
    scale: float
    backend: str

    @classmethod
    def of(cls, call: packed.Call) -> _Dense:
        """For a call whose sequences are as long as its longest, of queries and of keys."""
        from . import varlen

        backend = varlen.backend_for(call.query, call.key, call.value, *call.arguments())
        return cls(call.sequences, call.right == 0, call.softmax_scale, backend)

    def _as_rank_4(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, (self.sequences, -1)).transpose(1, 2)

    def forward(self, *rows: Tensor) -> tuple[Tensor, Tensor]:
        """As of `_Packed`."""
        from . import ops

        query, _, value = rows
        layout = "query" if query.size(2) == value.size(2) else "bshd"  # as of the packed operators
        out, logsumexp = ops._below_autograd(
            ops._attention_forward, ops._attention_forward_cuda, *map(self._as_rank_4, rows), None, None, 0.0,
            self.is_causal, self.scale, layout, self.backend,
        )  # fmt: skip
        return _as_rows(out), logsumexp

    def gradients(self, saved: tuple[Tensor, ...], grad_out: Tensor, wanted: tuple[bool, ...]) -> Sequence[Any]:
        """As of `_Packed`."""
        from . import ops

        *rows, logsumexp = saved
        query, key, value, out = map(self._as_rank_4, rows)
        grads = ops._gradients(
            (query, key, value, None, out, logsumexp, None), self._as_rank_4(grad_out),
            (0.0, self.is_causal, self.scale, self.backend), (*wanted, False),
        )  # fmt: skip
        return [None if grad is None else _as_rows(grad) for grad in grads]


def _as_rows(tensor: Tensor) -> Tensor:
    """[B, H, S, D] as rows [B S, H, D], which is a view where the memory is in that order."""
    return tensor.transpose(1, 2).flatten(0, 1)


class _Nested(torch.autograd.Function):
    """Attention of nested tensors as one differentiable function of these."""

    @staticmethod
    def forward(ctx, query, key, value, rows_query, rows_key, rows_value, operators):
        rows = (rows_query, rows_key, rows_value)
        out, logsumexp = operators.forward(*rows)
        structure = _torch.jagged_structure(query)
        nested_out = _torch.jagged_tensor(out, structure)
        # Plain tensors, as stock saves: hooks on saved tensors (checkpointing, offloading) find what they know. It is
        # by the nested tensors that autograd notices changes in place, which it does not look for under hooks. The
        # output itself cannot be kept: it would be freed by the garbage collector alone, or be copied.
        watched: tuple[Tensor, ...] = ()
        if not _torch.saved_tensor_hooks_active():
            watched, out = _uncopied((query, key, value), rows), _torch.jagged_rows_with_version(nested_out)
        ctx.save_for_backward(*rows, out, logsumexp, *watched)
        ctx.set_materialize_grads(False)  # 40 µs of asking the output for its sizes
        ctx.operators = operators
        same = query._offsets is key._offsets
        ctx.structures = (structure, structure if same else _torch.jagged_structure(key))
        return nested_out

    @staticmethod
    def backward(ctx, grad_out):
        if grad_out is None:
            return (None,) * 7
        try:
            saved = ctx.saved_tensors
        except NotImplementedError:  # autograd's own message would ask a nested tensor for its sizes
            raise RuntimeError(MODIFIED) from None
        compute = functools.partial(_gradients, saved[:5], ctx.operators, ctx.needs_input_grad[:3], ctx.structures)
        if not torch.is_grad_enabled():
            return (*compute(grad_out), None, None, None, None)
        # The last for gradients that require grad where nothing else does: none of the tensors is kept under hooks.
        grads = _Gradients.apply(compute, grad_out, *saved[5:], torch.zeros((), requires_grad=True))
        return (*grads, None, None, None, None)


class _Gradients(torch.autograd.Function):
    """The gradients under create_graph: an error where they are differentiated in turn, as in stock, and not before."""

    @staticmethod
    def forward(ctx, compute, grad_out, *watched):
        return compute(grad_out)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("scaled_dot_product_attention on nested tensors has no second derivative")


def _gradients(
    saved: tuple[Tensor, ...],
    operators: _Packed | _Dense,
    wanted: tuple[bool, ...],
    structures: tuple[_torch.JaggedStructure, _torch.JaggedStructure],
    grad_out: Tensor,
) -> tuple[Tensor | None, ...]:
    """Of query, key and value, None for each not wanted."""
    found = _torch.jagged_rows(grad_out)
    rows = grad_out.transpose(1, 2).values() if found is None else found[0]
    grads = operators.gradients(saved, rows, wanted)
    of_query, of_key = structures
    return tuple(
        None if grad is None else _torch.jagged_tensor(grad, structure)
        for grad, structure in zip(grads, (of_query, of_key, of_key))
    )


def _uncopied(tensors: tuple[Tensor, ...], rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Those of the nested tensors that share their rows' memory: a copy does not change with them."""
    return tuple(tensor for tensor, own in zip(tensors, rows) if own._is_view())


# Without the check for functorch's transforms, which has been made.
_apply_nested = super(torch.autograd.Function, _Nested).apply
