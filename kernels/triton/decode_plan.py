"""The launch of attention of a few queries over many keys: how the keys are split, what the kernel is compiled for.

May import torch, this folder's kernels and launcher and the plugin's ``_torch.py``. Imported by ``attention.py``, which
knows when it is this kernel's turn, and by ``kv_cache.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from triton.runtime.interpreter import InterpretedFunction

from ... import _torch
from . import launch as launches
from .common import MASK_FLOAT
from .counters import counters
from .decode import MERGE_BY_LAST, MERGE_BY_LAUNCH, MERGE_NONE, attention_decode, merge_splits
from .launch import Launch
from .tiles import DecodeTile, Tile, choose_decode

MAX_QUERIES = 16
"""With more queries than these a call is no longer bound by reading keys and values."""
MAX_HEAD_DIM = 256
MAX_BLOCK_M = 64
_MAX_SPLITS = 1024
# For measurements (benchmarks/tune_decode.py): copy the query tile with every tile of keys, where that costs little.
STREAM_QUERY = True
DEPENDENT = True
_LOG2E = math.log2(math.e)


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


def fan_in(block_r: int, block_dv: int) -> int:
    """How many partial results one program merges: few where they are large, so that many programs share the work."""
    return 64 if block_r * block_dv <= 1024 else 16


def at_once(number: int, rows: int, block_dv: int, num_warps: int) -> int:
    """How many of `number` partial results to load at once: as many as registers hold, 64 of each thread."""
    return max(1, min(_power_of_two(number), 2048 * num_warps // (rows * block_dv)))


@functools.lru_cache(maxsize=4096)
def choose_splits(units: int, key_tiles: int, slots: int, tile_bytes: int, block_r: int, block_dv: int) -> int:
    """Into how many parts to cut key_tiles tiles of keys, for each of `units` sets of rows that share keys.

    slots: programs that run at once. The estimate is in times of one tile of tile_bytes: a program takes two more than
    it has tiles for its start and its end; merging is what the last program reads by itself, at six times the rate that
    it has while all run, and one more for each round of counting.
    """
    width = fan_in(block_r, block_dv)
    best, least = 1, math.inf
    tiles_each = 0
    for splits in range(1, min(key_tiles, _MAX_SPLITS, width * width) + 1):
        if -(-key_tiles // splits) == tiles_each:
            continue  # as many tiles for the longest, and more programs
        tiles_each = -(-key_tiles // splits)
        cost = -(-units * splits // slots) * (tiles_each + 2.0)
        if splits > 1:
            rounds = 1 if splits <= width else 2
            merged = min(splits, width) + (-(-splits // width) if rounds == 2 else 0)
            cost += rounds + merged * block_r * block_dv * 4 / tile_bytes / 6
        if cost < least:
            best, least = splits, cost
    return best


def merges_by_launch(splits: int, block_r: int, block_dv: int) -> bool:
    """Are partial results so many or so large that one program would read them for longer than a launch takes?"""
    return splits * block_r * block_dv > 32768


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
        block_m = min(MAX_BLOCK_M, max(16, _power_of_two(rows)))
        block_d = call.head_dim_padded  # equal blocks: see attention.py on unequal ones without tensor maps
        block_r = min(block_m, _power_of_two(rows))
        row_tiles = -(-rows // block_m)
        # Keys that the causal mask or a window hides from all rows need no programs.
        visible = seqlen_k
        right = 0 if call.is_causal else options.window_right
        left = options.window_left
        if right is not None and not options.bottom_right:
            visible = max(1, min(visible, call.seqlen_q + options.offset + right))
        if left is not None and right is not None:
            visible = max(1, min(visible, call.seqlen_q + left + right))
        tile: DecodeTile = choose_decode(call.family, call.dtype.itemsize, block_d, block_m)
        key_tiles = -(-visible // tile.block_n)
        units = call.batch * call.kv_heads * row_tiles
        tile_bytes = tile.block_n * 2 * block_d * call.dtype.itemsize
        slots = tile.programs * call.multiprocessors
        width = fan_in(block_r, block_d)
        splits = options.num_splits or choose_splits(units, key_tiles, slots, tile_bytes, block_r, block_d)
        splits = max(1, min(splits, key_tiles, width * width))
        self.splits = splits
        merge = MERGE_NONE.value
        if splits > 1:
            by_launch = merges_by_launch(splits, block_r, block_d)
            merge = MERGE_BY_LAUNCH.value if by_launch else MERGE_BY_LAST.value
        groups = -(-splits // width) if merge == MERGE_BY_LAST.value else 0
        results = units * (splits + groups)
        self.counters = units * (1 + groups) if groups else 0
        self.partials = results * block_r * (block_d + 2) if splits > 1 else 0
        interpreted = isinstance(attention_decode, InterpretedFunction)
        dependent = DEPENDENT and call.family == "sm_90" and not interpreted

        factor = (scale > 0) - (scale < 0)
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
            "FAN_IN": width,
            "AT_ONCE": at_once(width, block_r, block_d, tile.num_warps),
            "CHUNK": min(32, 2048 // tile.block_n),
            "MASK": call.mask_kind,
            "MASK_PER_KEY": call.mask_strides[2] == 0 and (call.mask_strides[1] == 0 or group == 1),
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
            "STREAM_QUERY": STREAM_QUERY and block_m == 16 and factor == 1 and call.dtype.itemsize == 2,
            "DEPENDENT": dependent,
            "PRECISION": call.constants["PRECISION"],
        }
        divisors = call.divisors({"query": query, "key": key, "value": value, "out": out}, strides, mask_strides)
        if mask is not None and call.mask_divisor > 1:
            divisors["mask"] = 16
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

    def __call__(self, query, key, value, mask, out, logsumexp=None, options: DecodeOptions = PLAIN) -> None:
        """Fill out and logsumexp; all tensors like those that the plan was made for."""
        device = self.device
        if device.type == "cuda" and launches._current_device() != device.index:
            with torch.cuda.device(device.index):
                return self(query, key, value, mask, out, logsumexp, options)
        partials = count = None
        if self.partials:
            partials = _torch.empty_float32(query, (self.partials,), (1,))
            if self.counters:
                count = counters(device, self.counters)
        self.launch(query, key, value, mask, *options.tensors, out, logsumexp, partials, count)
        if self.merge is not None:
            self.merge(options.sinks, options.seqused_k, options.leftpad_k, out, logsumexp, partials)
