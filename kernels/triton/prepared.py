"""Attention once more, for plain calls that differ from one before in addresses alone.

May import torch, ``_torch.py``, ``KernelUnavailable`` and ``launch.py``. Imported by ``attention.py``, whose plans do
the same for any call. As ``prepared.py`` of the Hopper kernels: what does not change is bound here once, in a closure,
and each address is read once, for all launches that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import _torch
from .. import KernelUnavailable
from . import launch as launches
from .launch import Launch

Outputs = tuple[torch.Tensor, torch.Tensor | None]
Gradients = tuple[torch.Tensor | None, ...]


def _allocator(device_index: int, query: torch.Tensor):
    """What allocates while this device is the current one."""
    with torch.cuda.device(device_index):
        return _torch.allocator(query)


def forward(
    attention: Launch,
    lists_of: Callable[[torch.Tensor], torch.Tensor] | None,
    of_out: tuple[Any, ...],
    of_logsumexp: tuple[Any, ...] | None,
    query: torch.Tensor,
    otherwise: Callable[..., Outputs],
) -> Callable[..., Outputs]:
    """A function (query, key, value and, where there is one, a mask) -> (out, logsumexp or None), without dropout.

    lists_of: makes the lists of a mask's tiles; of_out, of_logsumexp: shape, strides and dtype of what is to be made;
    query: one that it will be called with; otherwise: the same function the long way, for another current device and
    for profilers.
    """
    index = attention.device_index
    empty = _allocator(index, query)
    launch = attention.by_addresses()
    low_offset = None
    if of_logsumexp is not None and len(of_logsumexp[0]) == 4:
        low_offset = 4 * of_logsumexp[1][0]

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: torch.Tensor) -> Outputs:
        if launches._current_device() != index or launches.is_watched():
            return otherwise(query, key, value, *mask)
        out = empty(*of_out)
        logsumexp = logsumexp_at = low_at = mask_at = lists_at = None
        # Whatever is allocated stays referenced until the launch.
        if of_logsumexp is not None:
            logsumexp = empty(*of_logsumexp)
            logsumexp_at = logsumexp.data_ptr()
            if low_offset is not None:
                low_at = logsumexp_at + low_offset
        if mask:
            mask_at = mask[0].data_ptr()
            if lists_of is not None:
                lists = lists_of(mask[0])
                lists_at = lists.data_ptr()
        launch(
            launches._current_stream(index), query.data_ptr(), key.data_ptr(), value.data_ptr(), mask_at, lists_at,
            None, out.data_ptr(), logsumexp_at, low_at,
        )  # fmt: skip
        return out, logsumexp

    return call


def backward(
    of_queries: Launch,
    of_keys: Launch | None,
    lists_of: Callable[[torch.Tensor], torch.Tensor] | None,
    statistics: int,
    low_offset: int | None,
    grads: Sequence[tuple[Any, ...] | None],
    wanted: Sequence[bool],
    query: torch.Tensor,
    otherwise: Callable[..., Gradients],
) -> Callable[..., Gradients]:
    """A function (grad_out, query, key, value, out, logsumexp and, where there is one, a mask) -> gradients of query,
    key and value, and None for the mask; without dropout.

    of_keys: None where no gradient of key and value is asked for; statistics: their number; low_offset: bytes from a
    logsumexp to what rounding cut off it, None without; grads: shape, strides and dtype of the gradients that are to be
    made; wanted: which of them are to be returned; the rest as in ``forward``. Its tensors must be like those that the
    launches were made for. It raises KernelUnavailable before any launch where an address is no multiple of 16 bytes.
    """
    index = of_queries.device_index
    empty = _allocator(index, query)
    launch_queries = of_queries.by_addresses()
    launch_keys = None if of_keys is None else of_keys.by_addresses()
    of_statistics = (statistics,), (1,), torch.float32
    of_query, of_key, of_value = grads
    _, key_wanted, value_wanted, _ = wanted

    def repeat(grad_out, query, key, value, out, logsumexp, *mask) -> Gradients:
        if launches._current_device() != index or launches.is_watched():
            return otherwise(grad_out, query, key, value, out, logsumexp, *mask)
        query_at, key_at, value_at, out_at = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
        grad_out_at, logsumexp_at = grad_out.data_ptr(), logsumexp.data_ptr()
        mask_at = mask[0].data_ptr() if mask else None
        if (query_at | key_at | value_at | out_at | grad_out_at | (mask_at or 0)) & 15:
            raise KernelUnavailable("this call was prepared for addresses that are multiples of 16 bytes")
        grad_query = grad_query_at = grad_key = grad_value = None
        if of_query is not None:
            grad_query = empty(*of_query)
            grad_query_at = grad_query.data_ptr()
        if launch_keys is not None:
            grad_key, grad_value = empty(*of_key), empty(*of_value)
        # These stay referenced until the launches.
        rows = empty(*of_statistics)
        lists = None if lists_of is None else lists_of(mask[0])
        statistics_at = rows.data_ptr()
        lists_at = None if lists is None else lists.data_ptr()
        low_at = None if low_offset is None else logsumexp_at + low_offset
        stream = launches._current_stream(index)
        launch_queries(
            stream, query_at, key_at, value_at, mask_at, lists_at, None, out_at, logsumexp_at, low_at, grad_out_at,
            statistics_at, grad_query_at,
        )  # fmt: skip
        if launch_keys is not None:
            launch_keys(
                stream, query_at, key_at, value_at, mask_at, lists_at, None, statistics_at, grad_out_at,
                grad_key.data_ptr(), grad_value.data_ptr(), None,
            )  # fmt: skip
        return grad_query, grad_key if key_wanted else None, grad_value if value_wanted else None, None

    return repeat
