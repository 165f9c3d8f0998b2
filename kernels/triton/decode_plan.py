"""The launch of attention of a few queries over many keys: how the keys are split, what the kernel is compiled for.

May import torch, this folder's kernels and launcher and the plugin's ``_torch.py`` and ``batch_invariance.py``.
Imported by ``attention.py``, which knows when it is this kernel's turn, and by ``kv_cache.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from triton.runtime.interpreter import InterpretedFunction

from ... import _torch
from ...batch_invariance import planned_batch
from . import launch as launches
from .common import MASK_FLOAT
from .counters import counters
from .decode import MERGE_BY_LAST, MERGE_BY_LAUNCH, MERGE_NONE, attention_decode, merge_splits
from .launch import Launch
from .tiles import DecodeTile, Tile, decode_tiles

MAX_QUERIES = 16
"""With more queries than these a call is no longer bound by reading keys and values."""
MAX_HEAD_DIM = 256
_MAX_SPLITS = 1024
_LOG2E = math.log2(math.e)
_LONG = 96 << 20
"""Bytes of keys and values: 25 us on an H200."""


@dataclasses.dataclass(frozen=True)
class DecodeOptions:
    """What a call has beyond scaled_dot_product_attention's arguments; the kernel's docstring says what each means."""

    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    leftpad_k: torch.Tensor | None = None
    batch_index: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    offset: int = 0
    bottom_right: bool = False
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    num_splits: int = 0
    seqused_more: int = 0

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """In the kernel's order."""
        return (self.sinks, self.alibi_slopes, self.seqused_k, self.leftpad_k, self.batch_index, self.block_table)

    @property
    def rest(self) -> tuple:
        """What a plan depends on beside tensors."""
        absent = tuple(tensor is None for tensor in self.tensors)
        return (absent, self.offset, self.bottom_right, self.window_left, self.window_right, self.softcap,
                self.num_splits, self.seqused_more)


PLAIN = DecodeOptions()


def suits(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Is a forward that keeps nothing for a backward this kernel's? query, value [B, H, S, D]."""
    return query.size(2) <= MAX_QUERIES and max(query.size(3), value.size(3)) <= MAX_HEAD_DIM


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def at_once(number: int, rows: int, block_dv: int, num_warps: int) -> int:
    """How many of `number` partial results to load at once: as many as registers hold, 64 of each thread."""
    return max(1, min(_power_of_two(number), 2048 * num_warps // (rows * block_dv)))


def merges_by_launch(units: int, splits: int, block_r: int, block_dv: int, multiprocessors: int) -> bool:
    """Is a launch of its own worth its CPU time (3 to 4 us of an eager call): does it save a microsecond on the GPU?

    It does from 4,096 numbers for each unit on, which its last program would read by itself. Of many units the last
    programs merge side by side, beside others that still compute, and few splits then want no launch.
    """
    return splits * block_r * block_dv >= 4096 and (3 * units < multiprocessors or splits > 4)


# What choose weighs, in microseconds, fitted to 111 calls of benchmarks/tune_decode.py on an H200; NOTES.md says how
# well it chooses. Other GPUs have other rates, but choices depend on their ratios alone.
_RATE = 32.5 * 1024
"""Bytes per microsecond of one multiprocessor's share of the memory."""
_ON_THEIR_WAY = 65 * 1024
"""Bytes that a multiprocessor must have asked for to get that rate."""
_START, _START_OF_MORE_ROWS = 0.95, 0.67
_TILE = 0.012
"""Of each tile of each program that a multiprocessor runs."""
_FIRST_TILE = 0.43
"""Which part of the first tile's time nothing hides."""
_LATER_START = 0.46
"""Which part of a start is left when other programs run beside it."""
_READ_AGAIN = 0.64
"""What a tile costs of which other programs read the same keys, from the L2 cache."""
_MORE_ROWS = 1.1
"""How much longer a program with more than 16 rows computes on a tile before it asks for the next."""
_LAST_MERGE, _LAST_MERGE_OF_1024 = 2.3, 0.62
"""By the last program, and for 1,024 numbers of a unit."""
_LAUNCH_MERGE, _LAUNCH_MERGE_OF_SPLIT, _LAUNCH_MERGE_OF_1024_ROWS = 3.3, 0.03, 2.3


def estimate(tile: DecodeTile, pairs: int, rows: int, key_tiles: int, splits: int, row_bytes: int, block_dv: int,
             multiprocessors: int) -> float:
    """Microseconds of a call beside what is the same for all choices; arguments as of ``choose``.

    Waves of programs, one after the other. Each starts, waits for its first tile and then takes its share of the
    memory's rate, or less where its own copies on their way do not allow for that.
    """
    row_tiles = -(-rows // tile.block_m)
    units = pairs * row_tiles
    tile_bytes = tile.block_n * row_bytes
    large = tile.block_m > 16
    own = _ON_THEIR_WAY / max(1, (tile.num_stages - 1) * tile_bytes) * (_MORE_ROWS if large else 1.0)
    share = 1.0 if row_tiles == 1 else _READ_AGAIN
    tiles_each = -(-key_tiles // splits)
    tile_time = tile_bytes / _RATE
    start = _START + _FIRST_TILE * tile_time + (_START_OF_MORE_ROWS if large else 0.0)

    def walk(programs: int) -> float:
        return tiles_each * (tile_time * max(programs * share, own) + _TILE * programs)

    waves, rest = divmod(units * splits, tile.programs * multiprocessors)
    time = waves * (_LATER_START * start + walk(tile.programs))
    if rest:
        time += start + walk(-(-rest // multiprocessors))
    if splits > 1:
        block_r = min(tile.block_m, _power_of_two(rows))
        if merges_by_launch(units, splits, block_r, block_dv, multiprocessors):
            time += _LAUNCH_MERGE + _LAUNCH_MERGE_OF_SPLIT * splits
            time += _LAUNCH_MERGE_OF_1024_ROWS * units * block_r / 1024
        else:
            time += _LAST_MERGE + _LAST_MERGE_OF_1024 * splits * block_r * block_dv / 1024
    return time


@functools.lru_cache(maxsize=4096)
def choose(tiles: tuple[DecodeTile, ...], pairs: int, rows: int, keys: int, row_bytes: int, block_dv: int,
           multiprocessors: int) -> tuple[DecodeTile, int]:
    """(tile, number of splits) of the least estimate.

    pairs: batches times key heads; rows: of each that share keys; keys: that they see; row_bytes: of a key and a value.
    """
    best, least = (tiles[0], 1), math.inf
    for tile in tiles:
        key_tiles = -(-keys // tile.block_n)
        most = min(key_tiles, _MAX_SPLITS, 3 * multiprocessors // (pairs * -(-rows // tile.block_m)))
        tiles_each = 0
        for splits in range(1, max(1, most) + 1):
            if -(-key_tiles // splits) == tiles_each:
                continue  # as many tiles for the longest, and more programs
            tiles_each = -(-key_tiles // splits)
            time = estimate(tile, pairs, rows, key_tiles, splits, row_bytes, block_dv, multiprocessors)
            if time < least:
                best, least = (tile, splits), time
    return best


def _chunk(keys: int, splits: int, block_n: int, mask_per_key: bool) -> int:
    """Of how many tiles a program finds out at once which it must visit: of all it has, where registers allow.

    The loads of keys wait for that, and all end before the next such look. A mask of several rows takes twice the
    registers.
    """
    most = min(128, 8192 // block_n) if mask_per_key else min(32, 2048 // block_n)
    tiles_each = -(-keys // (splits * block_n))
    return next((size for size in (8, 32, 64) if tiles_each <= size < most), most)


class DecodePlan:
    """``attention_decode``, and ``merge_splits`` where that has a launch of its own, ready but for their pointers."""

    def __init__(self, call, query, key, value, mask, scale, out, logsumexp, options: DecodeOptions = PLAIN):
        """call: attention.py's _Call of these tensors. With a block table, key [pages, Hkv, page, D], value alike."""
        self.device = query.device
        paged = options.block_table is not None
        page = key.size(2) if paged else 0
        seqlen_k = options.block_table.size(1) * page if paged else key.size(2)
        group = call.heads // call.kv_heads
        rows = group * call.seqlen_q
        block_d = call.head_dim_padded  # equal blocks: see attention.py on unequal ones without tensor maps
        # Keys that the causal mask or a window hides from all rows need no programs.
        visible = seqlen_k
        right = 0 if call.is_causal else options.window_right
        left = options.window_left
        if right is not None and not options.bottom_right:
            visible = max(1, min(visible, call.seqlen_q + options.offset + right))
        if left is not None and right is not None:
            visible = max(1, min(visible, call.seqlen_q + left + right))
        factor = (scale > 0) - (scale < 0)
        pairs = call.batch * call.kv_heads
        planned_pairs = planned_batch(call.batch) * call.kv_heads
        same_for_queries = call.mask_strides[2] == 0 or call.seqlen_q == 1
        mask_per_key = same_for_queries and (call.mask_strides[1] == 0 or group == 1)
        wide_mask = call.mask_kind == MASK_FLOAT.value and not mask_per_key
        tiles = decode_tiles(call.family, call.dtype.itemsize, block_d, rows, wide_mask)
        # Whether a tile lies in one page or in several does not matter: 64 keys of pages of 64 were slower (0.84 of the
        # contiguous speed in a batch of 64) than 128 of pages of 16 (0.92), each row with a page number of its own.
        # In steps of 16, so that a growing cache asks anew for every sixteenth length only.
        tile, splits = choose(tiles, planned_pairs, rows, -(-visible // 16) * 16, 2 * block_d * call.dtype.itemsize,
                              block_d, call.multiprocessors)
        splits = max(1, min(options.num_splits or splits, -(-visible // tile.block_n), _MAX_SPLITS))
        self.splits = splits
        block_m = tile.block_m
        block_r = min(block_m, _power_of_two(rows))
        units = pairs * -(-rows // block_m)
        merge = MERGE_NONE.value
        if splits > 1:
            planned_units = planned_pairs * -(-rows // block_m)
            by_launch = merges_by_launch(planned_units, splits, block_r, block_d, call.multiprocessors)
            merge = MERGE_BY_LAUNCH.value if by_launch else MERGE_BY_LAST.value
        results = units * splits
        self.counters = units if merge == MERGE_BY_LAST.value else 0
        self.partials = results * block_r * (block_d + 2) if splits > 1 else 0
        interpreted = isinstance(attention_decode, InterpretedFunction)
        # Programs that begin while an earlier launch ends take what is free, several a multiprocessor, and leave others
        # idle; of long launches that would fill no more than three quarters it costs more than waiting.
        crowds = 4 * splits * units <= 3 * tile.programs * call.multiprocessors
        is_long = pairs * visible * 2 * block_d * call.dtype.itemsize >= _LONG
        dependent = call.family == "sm_90" and not interpreted and not (crowds and is_long)
        # The query tile comes with every tile of keys, where that is cheap; with 256 columns to be merged it is not.
        stream = block_m == 16 and factor == 1 and call.dtype.itemsize == 2
        stream = stream and not (merge == MERGE_BY_LAST.value and block_d > 128)

        natural = call.mask_kind == MASK_FLOAT.value or options.softcap > 0 or options.alibi_slopes is not None
        kernel_scale = abs(scale) * (1.0 if natural else _LOG2E) if factor else 1.0
        bound = (seqlen_k % tile.block_n != 0 or right is not None or left is not None
                 or options.seqused_k is not None or options.leftpad_k is not None)
        scratch = torch.empty(0, dtype=torch.float32, device=self.device) if splits > 1 else None
        pointers = {"query": query, "key": key, "value": value, "mask": mask}
        names = ("sinks", "alibi_slopes", "seqused_k", "leftpad_k", "batch_index", "block_table")
        pointers |= dict(zip(names, options.tensors, strict=True))
        pointers |= {"out": out, "logsumexp": logsumexp, "partials": scratch,
                     "counters": torch.empty(0, dtype=torch.int32, device=self.device) if self.counters else None}
        strides = call.strides("qb qh qm qd", query) | call.strides("ob oh om od", out)
        strides = {name: ("i64", stride) for name, (_, stride) in strides.items()}  # there may be many queries
        strides |= call.strides("kb kh kn kd", key) | call.strides("vb vh vn vd", value)
        mask_strides = {name: kind for name, kind in call.strides_of_mask().items() if name.startswith("stride")}
        slopes = options.alibi_slopes
        scalars = {
            "stride_sb": ("i64", slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0),
            "stride_tb": ("i64", options.block_table.stride(0) if paged else 0),
            "num_kv_heads": ("i32", call.kv_heads),
            "group_size": ("i32", group),
            "seqlen_q": ("i32", call.seqlen_q),
            "seqlen_k": ("i32", seqlen_k),
            "seqused_more": ("i32", options.seqused_more),
            "num_splits": ("i32", splits),
            "statistics_offset": ("i64", results * block_r * block_d),
            "offset": ("i32", options.offset),
            "window_left": ("i32", left or 0),
            "window_right": ("i32", right or 0),
            "query_step": ("i32", 0),
            "scale": ("fp32", kernel_scale),
            "softcap": ("fp32", options.softcap),
        }
        constants = {
            "HEAD_DIM": query.size(3),
            "HEAD_DIM_V": value.size(3),
            "BLOCK_D": block_d,
            "BLOCK_DV": block_d,
            "BLOCK_M": block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_R": block_r,
            "MERGE": merge,
            "AT_ONCE": at_once(64, block_r, block_d, tile.num_warps),
            "CHUNK": _chunk(visible, splits, tile.block_n, mask_per_key) if mask is not None else 8,
            "MASK": call.mask_kind,
            "MASK_PER_KEY": mask_per_key,
            "MASK_PER_HEAD": call.mask_strides[1] != 0,
            "MASK_UNIT_STRIDE": call.mask_strides[3] == 1,
            "LEFT": left is not None,
            "RIGHT": right is not None,
            "BOTTOM_RIGHT": options.bottom_right,
            "SOFTCAP": options.softcap > 0,
            "BOUND_KEYS": bound,
            "PAGE": page,
            "QUERY_FACTOR": factor,
            "UNIT_STRIDE": call.unit_stride,
            "STREAM_QUERY": stream,
            "DEPENDENT": dependent,
            "PRECISION": call.constants["PRECISION"],
        }
        divisors = call.divisors({"query": query, "key": key, "value": value, "out": out}, strides, mask_strides)
        if mask is not None and call.mask_divisor > 1:
            divisors["mask"] = 16
            if seqlen_k % 16 == 0:  # which bounds the mask's loads
                divisors["seqlen_k"] = 16
        if scratch is not None:
            divisors |= {"partials": 16, "statistics_offset": 16 if results * block_r * block_d % 16 == 0 else 1}
        every_scalar = strides | mask_strides | scalars
        order = attention_decode.arg_names
        self.launch = Launch(
            attention_decode,
            splits * units,
            pointers,
            {name: every_scalar[name] for name in order if name in every_scalar},
            {name: constants[name] for name in order if name in constants},
            divisors,
            tile,
            {},
            dependent,
        )
        self.merge = None
        if merge == MERGE_BY_LAUNCH.value:
            names = ("sinks", "seqused_k", "leftpad_k", "out", "logsumexp", "partials")
            constants |= {"ROWS": 1, "AT_ONCE": at_once(64, 1, block_d, 4), "NATURAL": natural}
            order = merge_splits.arg_names
            self.merge = Launch(
                merge_splits,
                units * block_r,
                {name: pointers[name] for name in names},
                {name: every_scalar[name] for name in order if name in every_scalar},
                {name: constants[name] for name in order if name in constants},
                {name: divisor for name, divisor in divisors.items() if name in order},
                Tile(1, block_d, 4, 1),
                {},
                dependent,
            )
        if call.target is None:
            for launch in self.launches:
                launch.load(self.device)

    @property
    def launches(self) -> list[Launch]:
        """As of the other plans."""
        return [self.launch] if self.merge is None else [self.launch, self.merge]

    def __call__(self, query, key, value, out, logsumexp, mask=None, options: DecodeOptions = PLAIN) -> None:
        """Fill out and logsumexp; all tensors like those that the plan was made for."""
        device = self.device
        if device.type == "cuda" and launches._current_device() != device.index:
            with torch.cuda.device(device.index):
                return self(query, key, value, out, logsumexp, mask, options)
        partials = count = None
        if self.partials:
            partials = _torch.empty_float32(query, (self.partials,), (1,))
            if self.counters:
                count = counters(device, self.counters)
        self.launch(query, key, value, mask, *options.tensors, out, logsumexp, partials, count)
        if self.merge is not None:
            self.merge(options.sinks, options.seqused_k, options.leftpad_k, out, logsumexp, partials)
