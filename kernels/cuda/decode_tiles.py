"""How the Hopper decoding kernel cuts its work: its tiles, and among how many blocks the keys are split.

May import nothing but the standard library. Imported by ``decode.py``. ``NOTES.md`` has what was measured.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

MAX_ROWS = 32
"""Query rows of a key head: so many are packed into one block."""
SPLITS = (8, 4, 2, 1)
"""Blocks of a cluster, of which CUDA guarantees 8."""
BLOCKS = 64
"""Of a launch, at least. Each reads 65 GB/s at most, so that fewer leave memory idle; more cost more to merge."""
SHARED_MEMORY = 227 << 10
_MOST_STAGES = 24
_MOST_OF_TWO, _MOST_OF_ONE = 110 << 10, 216 << 10
"""Shared memory of a block where two share a multiprocessor, and of one alone."""
ALONE = 116 << 10
"""With so much shared memory a block is alone on its multiprocessor."""
LONG = 96 << 20
"""Bytes of keys and values from which on a launch of blocks that are alone waits until earlier ones have left."""


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
        """Dynamic shared memory of a block: the tiles, what other blocks send, statistics, bits and barriers."""
        rows = 16 * self.row_tiles
        received = (rows * head_dim_v // 4 + SPLITS[0]) * 16
        statistics = (SPLITS[0] + self.key_warps) * rows * 8
        barriers = 16 * (self.k_stages + self.v_stages) + 8
        bits = self.k_stages * self.block_n // 8  # of a mask
        return self.ring_bytes(head_dim, head_dim_v) + received + statistics + bits + barriers


def _boxes(head_dim: int) -> int:
    return -(-head_dim // 64) * 64


@functools.cache
def tile_for(head_dim: int, head_dim_v: int, rows: int) -> DecodeTile:
    """The tile for a number of rows, at most MAX_ROWS; head dimensions in multiples of 16.

    Two blocks of a multiprocessor hide each other's start and end. Where registers (head_dim_v / 2 of each thread for
    the output) allow for one only, it has twice the bytes on their way.
    """
    row_tiles = 1 if rows <= 16 else 2
    widest = max(head_dim, head_dim_v)
    blocks, most = (1, _MOST_OF_ONE) if widest > 128 or row_tiles > 1 else (2, _MOST_OF_TWO)
    key_warps = 2 if widest > 128 and row_tiles > 1 else 4
    block_n = 128 if widest <= 64 and row_tiles == 1 else 64
    tiles = [DecodeTile(row_tiles, key_warps, block_n, stages, stages, blocks) for stages in range(1, _MOST_STAGES)]
    return [tile for tile in tiles if tile.shared_bytes(head_dim, head_dim_v) <= most][-1]


def splits_for(units: int, key_tiles: int) -> int:
    """Blocks among which each unit's keys are split, each with a tile of keys: as few as make BLOCKS of a launch.

    units: batches times key heads. More than BLOCKS of them stay whole; so many alone are slower than twice as many.
    """
    if units > BLOCKS:
        return 1
    wanted = next((splits for splits in (2, 4) if units * splits >= BLOCKS), 8)
    return next(splits for splits in SPLITS if splits <= min(wanted, key_tiles))


def pays(units: int, seqlen_k: int) -> bool:
    """Is the kernel faster than Triton's? Measured; NOTES.md has the figures.

    Fewer than 8 units make fewer than BLOCKS blocks, which is as good where starting and merging take longest.
    """
    return units >= 8 or seqlen_k <= 512 * units**2
