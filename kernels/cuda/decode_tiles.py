"""How the Hopper decoding kernel cuts its work: its tiles, and among how many blocks the keys are split.

May import nothing but the standard library. Imported by ``decode.py``. ``NOTES.md`` has what was measured.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

MAX_ROWS = 64
"""Query rows of a key head: so many are packed into one block."""
SPLITS = (1, 2, 4, 8, 16)
"""Blocks of a cluster; 16 is the most that Hopper has."""
GROUPS = (1, 2, 4, 8, 16)
"""Clusters that share the keys of a batch's key head."""
SHARED_MEMORY = 227 << 10
_MOST_STAGES = 24
_MOST_OF_TWO, _MOST_OF_ONE = 110 << 10, 216 << 10
"""Shared memory of a block where two share a multiprocessor, and of one alone."""


@dataclass(frozen=True)
class DecodeTile:
    """One specialisation's cut. row_tiles: 16 query rows each; key_warps: how many warps share a tile's keys.

    block_n: keys of a tile, 16 or a multiple for each of key_warps. k_stages, v_stages: tiles on their way. blocks: how
    many are to share a multiprocessor.
    """

    row_tiles: int
    key_warps: int
    block_n: int
    k_stages: int
    v_stages: int
    blocks: int

    @property
    def num_threads(self) -> int:
        """Threads of a block, those of the two loading warps included."""
        return 32 * (self.row_tiles * self.key_warps + 2)

    def ring_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """Of the key and value tiles."""
        return 2 * self.block_n * (self.k_stages * _boxes(head_dim) + self.v_stages * _boxes(head_dim_v))

    def shared_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """Dynamic shared memory of a block: the tiles, what other blocks send, statistics and barriers."""
        rows = 16 * self.row_tiles
        received = (rows * head_dim_v // 4 + SPLITS[-1]) * 16
        statistics = (SPLITS[-1] + self.key_warps) * rows * 8
        barriers = 16 * (self.k_stages + self.v_stages) + 8
        return self.ring_bytes(head_dim, head_dim_v) + received + statistics + barriers


def _stages(tile: DecodeTile) -> int:
    return tile.k_stages


def _boxes(head_dim: int) -> int:
    return -(-head_dim // 64) * 64


def variants(head_dim: int, head_dim_v: int, rows: int) -> tuple[DecodeTile, ...]:
    """The tiles for a number of rows, head dimensions in multiples of 16: two blocks a multiprocessor first, then one.

    Two blocks hide each other's start and end; one has twice the bytes on their way, so that fewer blocks read as fast.
    """
    row_tiles = 1 if rows <= 16 else 2 if rows <= 32 else 4
    widest = max(head_dim, head_dim_v)
    found = []
    for blocks, most in ((2, _MOST_OF_TWO), (1, _MOST_OF_ONE)):
        # The output's registers, head_dim_v / 2 of each thread, allow for so many consumer warps.
        if blocks == 2 and (widest > 128 or row_tiles > 1):
            continue
        key_warps = (4 if widest > 128 or row_tiles == 1 else 8) // row_tiles
        block_n = 128 if widest <= 64 and row_tiles == 1 else 32 if widest > 128 and row_tiles == 4 else 64
        tiles = [DecodeTile(row_tiles, key_warps, block_n, stages, stages, blocks) for stages in range(1, _MOST_STAGES)]
        found.append(max(filter(lambda tile: tile.shared_bytes(head_dim, head_dim_v) <= most, tiles), key=_stages))
    return tuple(found)


# What `choose` weighs, in microseconds and bytes; an H200's, but choices depend on their ratios alone.
_RATE = 32.5 * 1024
"""Bytes per microsecond of one multiprocessor's share of the memory."""
_FASTEST = 56 * 1024
"""The same of what one multiprocessor can take alone."""
_LATENCY = 1.0
"""Until bytes that were asked for are there, while all ask."""
_START = 1.1
_LATER_START = 0.5
"""Which part of it is left where other blocks run beside it."""
_MERGE, _MERGE_OF_GROUPS = 0.6, 1.5
"""Within a cluster; of several clusters, by the last."""
_ACTIVE = {1: 132, 2: 66, 4: 30, 8: 15, 16: 7}
"""Clusters of so many blocks that 132 multiprocessors, in groups of 16 or 18, run at a time, one block each."""


def estimate(
    tile: DecodeTile, splits: int, groups: int, units: int, key_tiles: int, head_dim: int, head_dim_v: int, num_sms: int
) -> float:
    """Microseconds of a call beside what is the same for all choices; arguments as of ``choose``.

    Waves of clusters. In each, a block takes its share of the memory's rate, or what its own bytes on their way or its
    multiprocessor allow.
    """
    alone = max(1, _ACTIVE[splits] * num_sms // 132)  # clusters that share no multiprocessor
    active = alone * tile.blocks
    own = 2 * tile.block_n * (head_dim + head_dim_v) * -(-key_tiles // (splits * groups))  # of the longest block
    ring = tile.ring_bytes(head_dim, head_dim_v)

    def wave(clusters: int) -> float:
        blocks = clusters * splits
        together = math.ceil(clusters / alone)
        return own / min(_RATE * num_sms / blocks, ring / _LATENCY, _FASTEST / together)

    waves, rest = divmod(units * groups, active)
    time = _START + (waves + (rest > 0) - 1) * _LATER_START / tile.blocks
    time += waves * wave(active) + (wave(rest) if rest else 0.0)
    return time + (_MERGE if splits > 1 else 0.0) + (_MERGE_OF_GROUPS if groups > 1 else 0.0)


@functools.lru_cache(maxsize=4096)
def choose(
    head_dim: int, head_dim_v: int, units: int, rows: int, seqlen_k: int, num_sms: int
) -> tuple[DecodeTile, int, int]:
    """(tile, splits, groups) of the least estimate; head dimensions in multiples of 16.

    units: batches times key heads; rows: query rows of each, at most MAX_ROWS.
    """
    best, least = None, math.inf
    for tile in variants(head_dim, head_dim_v, rows):
        key_tiles = -(-seqlen_k // tile.block_n)
        for splits in SPLITS:
            for groups in GROUPS:
                if splits * groups > key_tiles or (groups > 1 and units * splits * groups > 2 * num_sms):
                    continue
                time = estimate(tile, splits, groups, units, key_tiles, head_dim, head_dim_v, num_sms)
                if time < least:
                    best, least = (tile, splits, groups), time
    assert best is not None
    return best
