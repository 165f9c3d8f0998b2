"""Counters for kernels whose programs count each other: int32 on the device, zero, left as zero by every launch.

May import torch, ``launch.py`` and the plugin's ``driver.py``. Imported by ``decode_plan.py``.
"""

from __future__ import annotations

import torch

from ... import driver
from . import launch


class Address:
    """Device memory that no tensor owns, for a launch that asks its arguments for ``data_ptr``."""

    __slots__ = ("_address",)

    def __init__(self, address: int):
        self._address = address

    def data_ptr(self) -> int:
        """As of a tensor."""
        return self._address


_addresses: dict[int, Address] = {}
_tensors: dict[tuple, torch.Tensor] = {}


def counters(device: torch.device, count: int):
    """`count` zeros for a launch on the current stream of the device, which must be the current one.

    Launches on one stream follow each other and share theirs. A launch that is captured into a graph has its own.
    """
    if device.type == "cuda" and torch.version.hip is None:
        address = driver.counters(device.index, launch._current_stream(device.index), 4 * count)
        found = _addresses.get(address)
        if found is None:
            found = _addresses[address] = Address(address)
        return found
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)  # each replay fills it anew
    key = device, launch._current_stream(device.index) if device.type == "cuda" else 0
    tensor = _tensors.get(key)
    if tensor is None or tensor.numel() < count:
        tensor = _tensors[key] = torch.zeros(max(count, 1024), dtype=torch.int32, device=device)
    return tensor
