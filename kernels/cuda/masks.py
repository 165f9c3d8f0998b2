"""Masks of the Hopper kernels: their parameters for them, and the lists of tiles that they go by.

The forward's are of key tiles, for each query tile, the backward's of query tiles, for each key tile. May import torch,
``driver.py`` and this folder. Imported by ``forward.py`` and ``backward.py``. Everything is decided by shapes: the host
never looks at the mask's values, so nothing waits and a captured CUDA graph sees the values of each replay.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ... import _torch, driver
from .. import KernelUnavailable, launch_counts
from ..mask_strides import strides_of
from .tiles import MAX_BLOCKS, BackwardTile, Tile, round_up

ENTRY = "flash_mask_lists"
BIT_ENTRIES = ("flash_mask_bits", "flash_mask_query_lists")
# As in mask.cuh and mask_lists.cuh.
THREADS = 512
PIECE = 16
STRIDED, DENSE, ALIGNED = 0, 1, 2

# As in backward_mask.cuh.
_LIST_WARPS = 4

for _entry in (ENTRY, *BIT_ENTRIES):
    launch_counts.setdefault(_entry, 0)


class MaskParams(ctypes.Structure):
    """Repeated by ``struct MaskParams`` in ``mask.cuh``. Strides in elements, 0 where the mask is broadcast."""

    _fields_ = [
        ("mask", ctypes.c_void_p),
        ("lists", ctypes.c_void_p),  # int32
        ("stride_batch", ctypes.c_int64),
        ("stride_head", ctypes.c_int64),
        ("stride_row", ctypes.c_int64),
        ("stride_key", ctypes.c_int64),
        ("list_stride_batch", ctypes.c_int64),
        ("list_stride_head", ctypes.c_int64),
        ("list_stride_tile", ctypes.c_int64),
        ("access", ctypes.c_int32),  # how 16 keys of a row of a bool mask are read
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


class BitsParams(ctypes.Structure):
    """The only parameter of the backward's two kernels that read the mask; repeated in ``backward_mask.cuh``."""

    _fields_ = [
        ("mask", MaskParams),
        ("bits", ctypes.c_void_p),
        ("lowest_hides", ctypes.c_void_p),  # of float masks
        ("contents", ctypes.c_void_p),
        ("mask_heads", ctypes.c_int32),  # the mask's own, 1 where it is broadcast
        ("mask_rows", ctypes.c_int32),  # likewise
        ("seqlen_k", ctypes.c_int32),
        ("k_tiles", ctypes.c_int32),
        ("q_tiles", ctypes.c_int32),
        ("mask_q_tiles", ctypes.c_int32),  # query tiles that have bits of their own: all, or one for all
        ("num_lists", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


def unexpanded(strides: tuple[int, ...]) -> tuple[slice, ...]:
    """The index of what is in memory of a mask with these strides."""
    return tuple(slice(None if stride else 1) for stride in strides)


def walkable(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Can the copy engine walk a float mask with these sizes and strides? A dimension of stride 0 is broadcast."""
    if shape[-1] == 1 or strides[-1] != 1:
        return False
    rest = zip(shape[:-1], strides[:-1])
    return all(size == 1 or (stride >= 0 and stride * itemsize % 16 == 0) for size, stride in rest)


def piece_of(dtype: torch.dtype) -> int:
    """How many elements of a mask its lists are made by: 16 bytes."""
    return PIECE // dtype.itemsize


def access_of(mask: torch.Tensor, strides: tuple[int, ...], seqlen_k: int) -> int:
    """How 16 keys of a row can be read: at once, as words of four bytes, or one by one."""
    if strides[3] != 1 and seqlen_k > 1:
        return STRIDED
    aligned = mask.data_ptr() % PIECE == 0 and all(stride % PIECE == 0 for stride in strides[:3])
    # Not where the last 16 would reach past the row: the row may be the memory's last.
    return ALIGNED if aligned and seqlen_k % PIECE == 0 else DENSE


def list_bytes(seqlen_k: int, piece: int) -> int:
    """Dynamic shared memory of a block of the kernel that makes the lists, by so many keys at a time."""
    return math.ceil(seqlen_k / piece)


def _empty(size: int, device: torch.device) -> torch.Tensor:
    return _torch.empty_here(size, torch.int32, device)


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
        shared_bytes = list_bytes(seqlen_k, piece_of(mask.dtype))
        self._config = driver.LaunchConfig(grid, (THREADS, 1, 1), shared_bytes, None, None, 0)
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


def most_query_list_bytes(mask: torch.Tensor, seqlen_q: int, seqlen_k: int) -> int:
    """What ``QueryLists`` of a mask, as of ``KeyLists``, take at most, whatever their tile."""
    planes = math.prod(size if stride else 1 for size, stride in zip(mask.shape[:2], mask.stride()[:2]))
    rows = mask.size(2) if mask.stride(2) else 1
    bits = round_up(rows, 128) * round_up(seqlen_k, 128) // 8
    mask_q_tiles, q_tiles, k_tiles = (math.ceil(length / 64) for length in (rows, seqlen_q, seqlen_k))
    # Numbers of query tiles, contents, and whether the lowest number hides.
    return planes * (bits + 4 * k_tiles * (2 + q_tiles) + mask_q_tiles * (k_tiles + 1)) + 16


class QueryLists:
    """The lists of one call's mask for the backward, and its bits where tiles are mixed: of the mask's own planes only.

    numbers: what the main kernel must know of them beside their addresses, by the names of ``QueryMask``.
    """

    __slots__ = ("_configs", "_contents_at", "_device", "_frames", "_functions", "_lists_at",
                 "_lowest_hides_at", "_params", "_size", "numbers")  # fmt: skip

    def __init__(
        self,
        functions: list[ctypes.c_void_p],
        mask: torch.Tensor,
        scores_shape: tuple[int, int, int, int],
        tile: BackwardTile,
    ) -> None:
        """functions: CUfunctions of BIT_ENTRIES, compiled for this tile. mask as of ``KeyLists``.

        Raises KernelUnavailable where there are more tiles than 32 bits count.
        """
        strides = strides_of(mask, scores_shape)
        seqlen_q, seqlen_k = scores_shape[2:]
        batches, heads = (size if stride else 1 for size, stride in zip(mask.shape[:2], strides))
        rows = seqlen_q if strides[2] else 1
        q_tiles, k_tiles = math.ceil(seqlen_q / tile.block_m), math.ceil(seqlen_k / tile.block_n)
        mask_q_tiles = math.ceil(rows / tile.block_m)
        lists = batches * heads * k_tiles
        tiles = lists * mask_q_tiles
        # Of a float mask all rows of a query tile are looked at as well.
        query_tiles = batches * heads * mask_q_tiles if mask.dtype != torch.bool else 0
        if tiles + query_tiles > MAX_BLOCKS:
            raise KernelUnavailable(f"{tiles + query_tiles} tiles are more than 32 bits count")
        self._device = mask.device
        self._functions = functions
        # One allocation of words: bits at its begin, which the copy engine reads by 16 bytes, lists, whether the lowest
        # number hides, contents; the last two of bytes.
        self._lists_at = tiles * (tile.block_m * tile.block_n // 32)
        self._lowest_hides_at = self._lists_at + lists * (2 + q_tiles)
        self._contents_at = self._lowest_hides_at + math.ceil(query_tiles / 4)
        self._size = self._contents_at + math.ceil(tiles / 4)
        self.numbers = {
            "plane_stride_batch": heads if batches > 1 else 0,
            "plane_stride_head": 1 if heads > 1 else 0,
            "q_tiles": mask_q_tiles,
        }
        params = MaskParams(
            stride_batch=strides[0],
            stride_head=strides[1],
            stride_row=strides[2],
            stride_key=strides[3],
            access=access_of(mask, strides, seqlen_k),
        )
        self._params = BitsParams(
            mask=params, mask_heads=heads, mask_rows=rows, seqlen_k=seqlen_k, k_tiles=k_tiles, q_tiles=q_tiles,
            mask_q_tiles=mask_q_tiles, num_lists=lists,
        )  # fmt: skip
        blocks = (tiles + query_tiles, math.ceil(lists / _LIST_WARPS))
        self._configs = [
            driver.LaunchConfig((count, 1, 1), (threads, 1, 1), 0, None, None, 0)
            for count, threads in zip(blocks, (2 * tile.block_n, 32 * _LIST_WARPS), strict=True)
        ]
        self._frames: list[driver.Frame] = []

    def make(self, mask: torch.Tensor, device_index: int, stream: int) -> QueryListsMade:
        """New lists and bits, filled by launches on this stream, the current one of the current device.

        Raises driver.DriverError.
        """
        memory = _empty(self._size, self._device)
        start = memory.data_ptr()
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = driver.Frame(self._configs, self._params)
        params = frame.params
        params.mask.mask, params.mask.lists = mask.data_ptr(), start + 4 * self._lists_at
        params.bits, params.lowest_hides = start, start + 4 * self._lowest_hides_at
        params.contents = start + 4 * self._contents_at
        for entry, function, config in zip(BIT_ENTRIES, self._functions, frame.configs, strict=True):
            launch_counts[entry] += 1
            driver.launch(config, function, frame.arguments, device_index, stream)
        self._frames.append(frame)
        return QueryListsMade(memory, start, start + 4 * self._lists_at)


class QueryListsMade(NamedTuple):
    """Where they lie; `memory` must live as long as somebody launches kernels that read them."""

    memory: torch.Tensor
    bits: int
    lists: int
