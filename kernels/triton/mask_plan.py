"""When an attn_mask's tiles are listed, how much room the lists take, and the launches that make them.

May import torch, the plugin's ``batch_invariance.py`` and this folder. Imported by ``attention.py``. Everything is
decided by shapes: the host never looks at the mask's values, so nothing waits and a captured CUDA graph sees the values
of each replay.
"""

from __future__ import annotations

import math
import threading

import torch

from ...batch_invariance import planned_batch
from . import mask_tiles as kernels
from .launch import Launch, _current_stream
from .tiles import Tile

TILE = kernels.TILE.value
# Tiles that one program of classify_mask walks: as many as leave 32 programs to a multiprocessor, and so many at most.
MOST_TILES = 8
_CHUNK = 128
_CLASSIFY = {True: Tile(TILE, TILE, 1, 1), False: Tile(TILE, TILE, 4, 1)}  # by: several elements to a word?
_LIST = Tile(TILE, TILE, 4, 1)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
# Sign and exponent but for its last bit: all set in the lowest number and in -inf.
_HUGE = {torch.float16: 0xF800, torch.bfloat16: 0xFF00, torch.float32: 0xFF000000}

# Listing costs two small kernels and, unless the mask is dense, one reading of it. Below this many operations the
# attention is not long enough to win them back (at 500 TFLOP/s: 40 microseconds)...
LEAST_OPERATIONS = 2e10
# ... nor where each element of the mask stands for less than these many products, as in a mask for each head at a small
# head_dim: reading an element (2 bytes at 4 TB/s) then takes as long as computing with it.
LEAST_PRODUCTS = 256


def worth_listing(query_shape, seqlen_k: int, mask_shape, is_causal: bool = False) -> bool:
    """Are the tiles of a mask of this shape to be listed? query_shape [B, H, Sq, D], mask_shape of rank 4.

    Expects 1 in mask_shape where the mask is broadcast. Of a mask with one column for all keys only rows could be
    skipped.
    """
    batch, heads, seqlen_q, head_dim = query_shape
    mask_batch, *mask_rest = mask_shape
    batch, mask_batch = planned_batch(batch), planned_batch(mask_batch)
    if is_causal or mask_shape[3] == 1 or seqlen_k <= TILE:
        return False
    positions = batch * heads * seqlen_q * seqlen_k
    products = positions / (mask_batch * math.prod(mask_rest)) * head_dim
    return 4 * positions * head_dim >= LEAST_OPERATIONS and products >= LEAST_PRODUCTS


def _word(dtype: torch.dtype, value, count: int) -> int:
    """The bits of `count` elements of one value side by side, as a signed integer."""
    size = dtype.itemsize
    bits = int(torch.tensor([value], dtype=dtype).view(_INTEGERS[size]).item()) & ((1 << 8 * size) - 1)
    return _repeated(bits, 8 * size, count)


def _repeated(bits: int, width: int, count: int) -> int:
    joined = sum(bits << width * place for place in range(count))
    return joined - (1 << width * count) if joined >> (width * count - 1) else joined


# The largest buffer, in entries, that a thread keeps for a stream: with it, a call takes no more memory than PyTorch's.
_KEPT = 2**17
_thread = threading.local()


def _buffer(size: int, device: torch.device) -> torch.Tensor:
    """Room for the lists of one call. What runs on a stream runs in order, so a thread's calls there can share it."""
    if device.type != "cuda" or size > _KEPT or torch.cuda.is_current_stream_capturing():
        return torch.empty((size,), dtype=torch.int64, device=device)
    kept = _thread.__dict__.setdefault("buffers", {})
    key = device, _current_stream(device.index)
    buffer = kept.get(key)
    if buffer is None or buffer.numel() < size:
        buffer = kept[key] = torch.empty((max(size, 2**13),), dtype=torch.int64, device=device)
    return buffer


class MaskTiles:
    """The lists of one call's mask: for the blocks of queries of query_tile, and for those of keys of key_tile, if any.

    The buffer that ``make`` fills: classes [planes, strips_q, strips_k]; for a float mask as many entries of rows with
    larger values, and [planes, strips_q] of what they decided; the lists; one entry that is read and not used.
    """

    def __init__(self, call, mask: torch.Tensor, query_tile: Tile, key_tile: Tile | None = None):
        itemsize = mask.element_size()
        rows = mask.size(2) if call.mask_strides[2] != 0 else 1
        per_key = rows == 1
        sizes = [size if stride else 1 for size, stride in zip(mask.shape[:2], call.mask_strides)]
        mask_batches, mask_heads = sizes
        planes = mask_batches * mask_heads
        height = 1 if per_key else TILE
        strips_q, strips_k = math.ceil(rows / height), math.ceil(call.seqlen_k / TILE)
        has_lowest = mask.dtype != torch.bool
        self._device = mask.device
        self.buffer = torch.empty(0, dtype=torch.int64, device=mask.device)  # for the type's sake
        classes = planes * strips_q * strips_k
        settled = planes * strips_q
        self._size = classes * (1 + has_lowest) + settled * has_lowest + 1
        common = {"strips_q": ("i32", strips_q), "strips_k": ("i32", strips_k)}
        larger_offset = {"larger_offset": ("i64", classes)}
        settled_offset = {"settled_offset": ("i64", 2 * classes)}
        flags = {"HAS_LOWEST": has_lowest}

        # Several elements to a word wherever words and vectors of 16 bytes are aligned.
        count = 4 // itemsize
        unit = call.mask_strides[3] == 1
        if not (unit and call.mask_divisor == 16 and call.seqlen_k % 16 == 0):
            count = 1
        strides = [stride // count for stride in call.mask_strides[:3]] + [call.mask_strides[3]]
        wide = dict(zip(("stride_mb", "stride_mh", "stride_mq", "stride_mk"), (("i64", stride) for stride in strides)))
        constants = {
            "ROWS": height, "WORDS": TILE // count, "WORD_BITS": 8 * itemsize * count, "ELEMENTS": count,
            "UNIT_STRIDE": unit, "BOUND": call.seqlen_k % TILE != 0,
            "EMPTY_WORD": _word(mask.dtype, -math.inf if has_lowest else False, count),
            "FULL_WORD": _word(mask.dtype, 0.0 if has_lowest else True, count),
            "LOWEST_WORD": _word(mask.dtype, torch.finfo(mask.dtype).min, count) if has_lowest else 0,
            "HIGH_BITS": _repeated(0b11 << 8 * itemsize - 2, 8 * itemsize, count) if has_lowest else 0,
            "HUGE_BITS": _repeated(_HUGE[mask.dtype], 8 * itemsize, count) if has_lowest else 0,
        }  # fmt: skip
        divisors = {}
        if count > 1:
            divisors = dict.fromkeys(("stride_mb", "stride_mh", "stride_mq", "words_k"), 16 // count)
            divisors |= {"mask": 16}
        each = max(1, min(MOST_TILES, classes // (32 * call.multiprocessors)))
        counts = {"mask_heads": ("i32", mask_heads), "mask_q": ("i32", rows),
                  "words_k": ("i32", call.seqlen_k // count), "tiles_each": ("i32", each)}
        pointers = {"mask": mask, "tiles": self.buffer}
        programs = classes // strips_k * math.ceil(strips_k / each)
        classify = self._launch(call, kernels.classify_mask, programs, pointers, wide | counts | common | larger_offset,
                                constants | flags, divisors, _CLASSIFY[count > 1])

        self._strides = []
        self._launches = [(classify, True)]
        for of_queries, tile in enumerate((query_tile, key_tile)):
            if tile is None:
                continue
            blocks_q = 1 if per_key else math.ceil(call.seqlen_q / tile.block_m)
            blocks_k = math.ceil(call.seqlen_k / tile.block_n)
            block_m = 1 if per_key else tile.block_m
            constants = {"STRIPS_M": max(1, block_m // height), "BLOCKS_M": max(1, height // block_m),
                         "STRIPS_N": max(1, tile.block_n // TILE), "BLOCKS_N": max(1, TILE // tile.block_n),
                         "CHUNK": _CHUNK}
            constants |= flags | {"ROWS": height}
            scalars = common | larger_offset | settled_offset | {"lists_offset": ("i64", self._size - 1)}
            scalars |= {"blocks_q": ("i32", blocks_q), "blocks_k": ("i32", blocks_k)}
            lists, length = (blocks_k, blocks_q + 2) if of_queries else (blocks_q, blocks_k + 2)
            kernel = kernels.list_query_tiles if of_queries else kernels.list_key_tiles
            launch = self._launch(call, kernel, planes * lists, {"tiles": self.buffer}, scalars, constants, {}, _LIST)
            self._launches.append((launch, False))
            # Strides with which an attention kernel finds the list of its batch, head and block, and the way there.
            block_stride = length if of_queries or not per_key else 0
            self._strides.append((
                lists * length * mask_heads if mask_batches > 1 else 0, lists * length if mask_heads > 1 else 0,
                block_stride, self._size - 1,
            ))  # fmt: skip
            self._size += planes * lists * length

    @staticmethod
    def _launch(call, kernel, programs, pointers, scalars, constants, divisors, tile) -> Launch:
        order = kernel.arg_names
        launch = Launch(
            kernel, programs, pointers, {name: scalars[name] for name in order if name in scalars},
            {name: constants[name] for name in order if name in constants}, divisors, tile, {},
        )  # fmt: skip
        return launch if call.target is not None else launch.load(call.device)

    @property
    def launches(self) -> list[Launch]:
        """In the order in which they run."""
        return [launch for launch, _ in self._launches]

    def strides(self, of_queries: bool) -> tuple[int, int, int, int]:
        """Entries from batch to batch, head to head and block to block of the lists, and where they begin."""
        return self._strides[of_queries]

    def make(self, mask: torch.Tensor) -> torch.Tensor:
        """Fill a buffer for this mask, on the current stream: int64, one dimension. The next call's may be the same."""
        buffer = _buffer(self._size, self._device)
        for launch, reads_mask in self._launches:
            if reads_mask:
                launch(mask, buffer)
            else:
                launch(buffer)
        return buffer
