"""The kernel hook's answers for packed sequences, sliding windows and causal masks aligned at the bottom right.

May import `_torch.py`, decisions.py and reference.py at the top, and problem, routing and varlen.py when the first call
arrives. Imported by kernel_hook.py, by nested.py and by explain.py.

What ends here: torch.nn.attention.varlen, torch.nn.attention.bias.causal_lower_right, and
F.scaled_dot_product_attention on nested tensors of jagged layout where nested.py has not taken it. PyTorch's flash
operators align a causal mask at the bottom right; the efficient ones are told which corner. The logsumexp of packed
flash is [H, total_q], as ours; that of packed efficient is [sequences, H, longest, padded to 32].
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from . import _torch, decisions, reference

__all__ = [
    "Call", "describe", "efficient_backward", "efficient_forward", "entry_for", "fits", "flash_backward", "flash_fits",
    "flash_forward", "of_equal_lengths",
]  # fmt: skip

# The efficient kernel pads each row of its logsumexp to this many entries.
LOGSUMEXP_ALIGNMENT = 32
HALF_TYPES = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call on packed tensors: query [total_q, H, D], key [total_k, Hkv, D], value [total_k, Hkv, Dv].

    cu_seqlens_q, cu_seqlens_k int32 [sequences + 1], or None: all sequences are max_q and max_k long. left and right:
    the window, -1 without an end.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_q: int
    max_k: int
    left: int
    right: int
    scale: float | None
    bottom_right: bool = True
    seqused_k: Tensor | None = None

    @property
    def sequences(self) -> int:
        """How many there are."""
        if self.cu_seqlens_q is not None:
            return self.cu_seqlens_q.size(0) - 1
        return self.query.size(0) // max(self.max_q, 1)

    @property
    def softmax_scale(self) -> float:
        """`scale`, or the usual one."""
        return reference.default_scale(self.query.size(2)) if self.scale is None else self.scale

    def arguments(self) -> tuple[Any, ...]:
        """Those of the operators after value."""
        return (
            self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_k, None, None, self.max_q, self.max_k,
            self.softmax_scale, self.left, self.right, self.bottom_right, 0.0,
        )  # fmt: skip


def describe(call: Call, entry: str, stock_backend: str, training: bool) -> Any:
    """The Problem of a call, with the shapes that padding to the longest sequence would give."""
    from .problem import Problem

    query, key, value = (t.transpose(0, 1).unsqueeze(0) for t in (call.query, call.key, call.value))
    problem = Problem.from_tensors(
        query, key, value, None, 0.0, call.right == 0, call.scale, query.size(1) != key.size(1), entry=entry
    )
    return dataclasses.replace(
        problem,
        query_shape=(call.sequences, query.size(1), call.max_q, query.size(3)),
        key_shape=(call.sequences, key.size(1), call.max_k, key.size(3)),
        value_shape=(call.sequences, value.size(1), call.max_k, value.size(3)),
        requires_grad=training,
        packed=True,
        stock_backend=stock_backend,
    )


def entry_for(call: Call, op: str, stock_backend: str, training: bool) -> decisions.Entry:
    """The decision on a call, which is `taken` by our kernels or not, and counted.

    Calls whose sizes differ by less than a factor of two share an answer.
    """
    query, key, value = call.query, call.key, call.value
    alignment = (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15
    sizes = (call.sequences, call.max_q, call.max_k, query.size(0), key.size(0))
    keep_as = (
        "packed", op, *query.shape[1:], *key.shape[1:], value.size(2), query.stride()[1:], key.stride()[1:],
        value.stride()[1:], alignment, query.dtype, key.dtype, value.dtype, query.get_device(), key.get_device(),
        value.get_device(), tuple(size.bit_length() for size in sizes),
        decisions.settings(0.0, call.right == 0, call.scale, False, (call.left >= 0, call.bottom_right)), training,
        tuple(_torch.priority_order()), query.dtype is torch.float32 and _torch.allows_tf32(),
    )  # fmt: skip
    entry = decisions.cache.get(keep_as)
    if entry is None:
        from . import routing, varlen  # noqa: F401  the operators

        decision = routing.decide(describe(call, op, stock_backend, training))
        entry = decisions.keep(decisions.Entry(decision, not training, None), keep_as)
        entry.taken = decision.backend == "triton"
    entry.decision.calls += 1
    return entry


def _taken(call: Call, op: str, stock_backend: str, backward: bool) -> bool:
    """Do our kernels take a call of the kernel hook's?"""
    query, key, value = call.query, call.key, call.value
    training = backward or (
        torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    )
    return entry_for(call, op, stock_backend, training).taken


def fits(call: Call) -> bool:
    """Shapes that stock's kernels accept; others it rejects in its own words."""
    query, key, value = call.query, call.key, call.value
    return (
        query.dim() == key.dim() == value.dim() == 3
        and key.shape[:2] == value.shape[:2]
        and query.size(2) == key.size(2)
        and key.size(1) > 0
        and query.size(1) % key.size(1) == 0
        and query.numel() > 0
        and key.numel() > 0
    )


def flash_fits(call: Call) -> bool:
    """What the flash kernels accept."""
    head_dim = call.query.size(2)
    return (
        fits(call)
        and head_dim == call.value.size(2)
        and head_dim % 8 == 0
        and head_dim <= 256
        and call.query.dtype in HALF_TYPES
    )


def _rows_in_a_line(tensor: Tensor) -> Tensor | None:
    """[B, S, H, D] as [B * S, H, D] if that is a view, otherwise None."""
    batch, seqlen = tensor.shape[:2]
    if batch == 1 or seqlen == 1 or tensor.stride(0) == seqlen * tensor.stride(1):
        return tensor.view(batch * seqlen, *tensor.shape[2:]) if tensor.numel() else None
    return None


def of_equal_lengths(
    query: Tensor, key: Tensor, value: Tensor, left: int, right: int, scale: float | None, bottom_right: bool = True
) -> Call | None:
    """Dense tensors [B, S, H, D] as a call; None if they would have to be copied."""
    queries, keys, values = (_rows_in_a_line(tensor) for tensor in (query, key, value))
    if queries is None or keys is None or values is None:
        return None
    return Call(queries, keys, values, None, None, query.size(1), key.size(1), left, right, scale, bottom_right)


def flash_forward(op: str, call: Call | None) -> tuple[Tensor, Tensor] | None:
    """(out [total_q, H, D], logsumexp [H, total_q]) as stock's flash kernel gives them, None for a call of stock's."""
    if call is None or not flash_fits(call) or not _taken(call, op, "flash", False):
        return None
    return torch.ops.flashbackend.varlen_attention.default(call.query, call.key, call.value, *call.arguments())


def flash_backward(
    op: str, call: Call | None, grad_out: Tensor | None, out: Tensor | None, logsumexp: Tensor
) -> tuple[Tensor, ...] | None:
    """Gradients of query, key and value, each in the memory order of its input; None for a call of stock's."""
    if call is None or grad_out is None or out is None or not flash_fits(call):
        return None
    if not _taken(call, op, "flash", True):
        return None
    return _backward(call, grad_out, out, logsumexp)


def _backward(call: Call, grad_out: Tensor, out: Tensor, logsumexp: Tensor) -> tuple[Tensor, ...]:
    return torch.ops.flashbackend.varlen_attention_backward.default(
        grad_out, call.query, call.key, call.value, out, logsumexp, *call.arguments(), [True, True, True, False]
    )[:3]


def efficient_forward(op: str, call: Call | None, compute_log_sumexp: bool) -> tuple[Tensor, Tensor] | None:
    """(out [total_q, H, Dv], logsumexp [sequences, H, padded]) as stock's efficient kernel gives them."""
    if call is None or not fits(call) or call.query.size(1) != call.key.size(1):
        return None
    if not _taken(call, op, "efficient", False):
        return None
    out, logsumexp = torch.ops.flashbackend.varlen_attention.default(
        call.query, call.key, call.value, *call.arguments()
    )  # fmt: skip
    # Contiguous, whatever the query's memory order is.
    return out.contiguous(), _unpacked(call, logsumexp, compute_log_sumexp)


def efficient_backward(
    op: str, call: Call | None, grad_out: Tensor | None, out: Tensor | None, logsumexp: Tensor
) -> tuple[Tensor, ...] | None:
    """Gradients of query, key and value, each in the memory order of its input."""
    if call is None or grad_out is None or out is None or not fits(call) or call.query.size(1) != call.key.size(1):
        return None
    if logsumexp.size(-1) < call.max_q or not _taken(call, op, "efficient", True):
        return None
    return _backward(call, grad_out, out, _packed(call, logsumexp))


def _unpacked(call: Call, logsumexp: Tensor, wanted: bool) -> Tensor:
    """[H, total_q] as [sequences, H, longest, padded], with +inf where there is no query or no key for it."""
    heads = logsumexp.size(0)
    if not wanted:
        return logsumexp.new_empty((call.sequences, heads, 0))
    width = math.ceil(call.max_q / LOGSUMEXP_ALIGNMENT) * LOGSUMEXP_ALIGNMENT
    column = torch.arange(width, device=logsumexp.device)
    if call.cu_seqlens_q is None:
        starts = torch.arange(call.sequences, device=logsumexp.device)[:, None] * call.max_q
        ends = starts + call.max_q
    else:
        starts, ends = call.cu_seqlens_q[:-1, None], call.cu_seqlens_q[1:, None]
    row = starts + column
    found = logsumexp[:, row.clamp(max=logsumexp.size(1) - 1)].transpose(0, 1)
    unseen = (row >= ends).unsqueeze(1) | (found == -math.inf)
    return found.masked_fill(unseen, math.inf).contiguous()


def _packed(call: Call, logsumexp: Tensor) -> Tensor:
    """The other way round."""
    row = torch.arange(call.query.size(0), device=logsumexp.device)
    if call.cu_seqlens_q is None:
        sequence = row // call.max_q
        column = row % call.max_q
    else:
        sequence = torch.searchsorted(call.cu_seqlens_q[1:].contiguous(), row, right=True)
        sequence = sequence.clamp(max=call.sequences - 1)
        # Rows behind the last sequence belong to nobody; whatever is read for them is not used.
        column = (row - call.cu_seqlens_q[sequence]).clamp(max=logsumexp.size(2) - 1)
    return logsumexp[sequence, :, column].T.contiguous()
