"""Dropout in the Hopper kernels: their parameters for it, and the table of random keys, written by a kernel.

May import torch, ``driver.py`` and this folder. Imported by ``forward.py``. ``dropout.cuh`` says what the keys are.
"""

from __future__ import annotations

import ctypes

import torch

from ... import _torch, driver
from .. import launch_counts
from . import tiles

ENTRY = "flash_dropout_keys"
PITCH = 256  # as in dropout.cuh

launch_counts.setdefault(ENTRY, 0)


class DropoutParams(ctypes.Structure):
    """Repeated by ``struct DropoutParams`` in ``dropout.cuh``."""

    _fields_ = [
        ("keys", ctypes.c_void_p),  # uint32 [B * H, rows + columns]
        ("threshold", ctypes.c_uint32),  # a multiple of 2**16
        ("scale", ctypes.c_float),
    ]


class DropoutKeysParams(ctypes.Structure):
    """The only parameter of the kernel that writes the table, by value; repeated in ``dropout.cuh``."""

    _fields_ = [
        ("keys", ctypes.c_void_p),
        ("seed", ctypes.c_void_p),  # int64
        ("rows", ctypes.c_int32),  # padded, as the columns
        ("columns", ctypes.c_int32),
        ("first_head", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


def params_of(dropout_p: float) -> DropoutParams:
    """Those of a probability; the address of the table is the call's."""
    threshold = min(round(dropout_p * 2**16), 2**16 - 1) << 16
    return DropoutParams(threshold=threshold, scale=1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0)


def table_bytes(batch_heads: int, seqlen_q: int, seqlen_k: int) -> int:
    """Of the table of calls of one shape."""
    return 4 * batch_heads * sum(_padded(seqlen_q, seqlen_k))


def _padded(*lengths: int) -> list[int]:
    return [tiles.round_up(length, PITCH) for length in lengths]


def _empty(size: int, device: torch.device) -> torch.Tensor:
    return _torch.empty_here(size, torch.int32, device)


class Keys:
    """The tables of calls of one shape: int32, [batch * heads, rows + columns] in one dimension.

    function: a CUfunction of the kernel that writes them.
    """

    __slots__ = ("_config", "_device", "_frames", "_function", "_params", "_size")

    def __init__(
        self, function: ctypes.c_void_p, batch_heads: int, seqlen_q: int, seqlen_k: int, device: torch.device
    ) -> None:
        rows, columns = _padded(seqlen_q, seqlen_k)
        self._function = function
        self._device = device
        self._size = batch_heads * (rows + columns)
        self._params = DropoutKeysParams(rows=rows, columns=columns)
        self._config = driver.LaunchConfig((self._size // PITCH, 1, 1), (PITCH, 1, 1), 0, None, None, 0)
        self._frames: list[driver.Frame] = []

    def make(self, seed: torch.Tensor, device_index: int, stream: int, first_head: int = 0) -> torch.Tensor:
        """A new table for a seed, int64 [1], by a launch on this stream, the current one of the current device.

        first_head: the number of its first head among those of a larger call. Raises driver.DriverError.
        """
        keys = _empty(self._size, self._device)
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = driver.Frame([self._config], self._params)
        frame.params.keys, frame.params.seed = keys.data_ptr(), seed.data_ptr()
        frame.params.first_head = first_head
        launch_counts[ENTRY] += 1
        driver.launch(frame.configs[0], self._function, frame.arguments, device_index, stream)
        self._frames.append(frame)
        return keys
