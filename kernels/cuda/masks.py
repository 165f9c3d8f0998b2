"""Bool masks of the Hopper forward kernel: its parameters for them, and the lists of key tiles that it goes by.

May import torch, ``driver.py`` and this folder. Imported by ``forward.py``. Everything is decided by shapes: the host
never looks at the mask's values, so nothing waits and a captured CUDA graph sees the values of each replay.
"""

from __future__ import annotations

import ctypes
import math

import torch

from ... import driver
from .. import launch_counts
from ..mask_strides import strides_of
from .tiles import Tile

ENTRY = "flash_mask_lists"
# As in mask.cuh and mask_lists.cuh.
THREADS = 512
PIECE = 16
STRIDED, DENSE, ALIGNED = 0, 1, 2

launch_counts.setdefault(ENTRY, 0)


class MaskParams(ctypes.Structure):
    """Repeated by ``struct MaskParams`` in ``mask.cuh``. Strides in elements, 0 where the mask is broadcast."""

    _fields_ = [
        ("mask", ctypes.c_void_p),  # bool
        ("lists", ctypes.c_void_p),  # int32
        ("stride_batch", ctypes.c_int64),
        ("stride_head", ctypes.c_int64),
        ("stride_row", ctypes.c_int64),
        ("stride_key", ctypes.c_int64),
        ("list_stride_batch", ctypes.c_int64),
        ("list_stride_head", ctypes.c_int64),
        ("list_stride_tile", ctypes.c_int64),
        ("access", ctypes.c_int32),  # how 16 keys of a row are read
        ("unused", ctypes.c_int32),
    ]


class ListParams(ctypes.Structure):
    """The only parameter of the kernel that makes the lists, by value; repeated in ``mask_lists.cuh``."""

    _fields_ = [
        ("mask", MaskParams),
        ("mask_heads", ctypes.c_int32),  # the mask's own, 1 where it is broadcast
        ("mask_rows", ctypes.c_int32),  # likewise
        ("seqlen_k", ctypes.c_int32),
        ("q_tiles", ctypes.c_int32),  # lists of each batch and head
    ]


def access_of(mask: torch.Tensor, strides: tuple[int, ...], seqlen_k: int) -> int:
    """How 16 keys of a row can be read: at once, as words of four bytes, or one by one."""
    if strides[3] != 1 and seqlen_k > 1:
        return STRIDED
    aligned = mask.data_ptr() % PIECE == 0 and all(stride % PIECE == 0 for stride in strides[:3])
    # Not where the last 16 would reach past the row: the row may be the memory's last.
    return ALIGNED if aligned and seqlen_k % PIECE == 0 else DENSE


def list_bytes(seqlen_k: int) -> int:
    """Dynamic shared memory of a block of the kernel that makes the lists."""
    return math.ceil(seqlen_k / PIECE)


def _empty(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty((size,), dtype=torch.int32, device=device)


class KeyLists:
    """The lists of one call's mask, for the query tiles of one tile: of the mask's own batches and heads only.

    function: a CUfunction of the kernel that makes them, compiled for this tile.
    """

    __slots__ = ("_config", "_device", "_frames", "_function", "_params", "_size", "params")

    def __init__(
        self, function: ctypes.c_void_p, mask: torch.Tensor, scores_shape: tuple[int, int, int, int], tile: Tile
    ) -> None:
        """mask [B or 1, H or 1, seqlen_q or 1, seqlen_k or 1], scores_shape (B, H, seqlen_q, seqlen_k)."""
        strides = strides_of(mask, scores_shape)
        seqlen_q, seqlen_k = scores_shape[2:]
        batches, heads = (size if stride else 1 for size, stride in zip(mask.shape[:2], strides))
        rows = seqlen_q if strides[2] else 1
        q_tiles = math.ceil(rows / tile.block_m)
        length = 2 + math.ceil(seqlen_k / tile.block_n)
        self._device = mask.device
        self._function = function
        self._size = batches * heads * q_tiles * length
        # Of the attention kernel, but for the addresses.
        self.params = MaskParams(
            stride_batch=strides[0],
            stride_head=strides[1],
            stride_row=strides[2],
            stride_key=strides[3],
            list_stride_batch=heads * q_tiles * length if batches > 1 else 0,
            list_stride_head=q_tiles * length if heads > 1 else 0,
            list_stride_tile=length if rows > 1 else 0,
            access=access_of(mask, strides, seqlen_k),
        )
        self._params = ListParams(
            mask=self.params, mask_heads=heads, mask_rows=rows, seqlen_k=seqlen_k, q_tiles=q_tiles
        )
        grid = (batches * heads * q_tiles, 1, 1)
        self._config = driver.LaunchConfig(grid, (THREADS, 1, 1), list_bytes(seqlen_k), None, None, 0)
        self._frames: list[driver.Frame] = []

    def make(self, mask: torch.Tensor, device_index: int, stream: int) -> torch.Tensor:
        """New lists, int32, filled by a launch on this stream, the current one of the current device.

        Raises driver.DriverError.
        """
        lists = _empty(self._size, self._device)
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = driver.Frame([self._config], self._params)
        frame.params.mask.mask, frame.params.mask.lists = mask.data_ptr(), lists.data_ptr()
        launch_counts[ENTRY] += 1
        driver.launch(frame.configs[0], self._function, frame.arguments, device_index, stream)
        self._frames.append(frame)
        return lists
