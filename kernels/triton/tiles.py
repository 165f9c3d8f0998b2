"""The one table of tile sizes, per kernel, GPU family, element size and head dimension.

May import nothing of the project. Used by ``attention.py``; ``benchmarks/tune_triton.py`` measures the candidates from
which the sm_90 rows were picked. Families that nobody has measured have tiles that fit their shared memory.
"""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Tile:
    """BLOCK_M query rows by BLOCK_N keys, with the launch options that Triton takes."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class DecodeTile(Tile):
    """A tile of the decoding kernel; programs: how many a multiprocessor runs at once."""

    programs: int


KERNELS = ("forward", "backward_query", "backward_key_value", "backward_mask")

# Shared memory of one program in bytes: what each family's tiles must fit (CUDA programming guide, "Technical
# Specifications per Compute Capability"; LDS of CDNA3).
SHARED_MEMORY = {"sm_90": 232448, "sm_80": 166912, "sm_86": 101376, "gfx942": 65536}

# Compute capabilities that share a row: what decides is the shared memory of a block.
_FAMILY_OF_CAPABILITY = {80: "sm_80", 86: "sm_86", 87: "sm_80", 88: "sm_86", 89: "sm_86", 90: "sm_90"}


def family(backend: str, architecture: int | str) -> str:
    """The row of the table for a Triton target: ("cuda", 90) or ("hip", "gfx942")."""
    if backend == "hip":
        return "gfx942"
    capability = int(architecture)
    if capability in _FAMILY_OF_CAPABILITY:
        return _FAMILY_OF_CAPABILITY[capability]
    # 100 and 103 have what 90 has and more; 110, 120 and 121 have 99 KB as 86 has.
    return "sm_90" if 100 <= capability < 110 else "sm_86"


# float32 on GPUs that nobody has measured, sm_80 and sm_86 alike: registers bind there, not shared memory. The three
# products need their operands twice, and ptxas gives up on larger tiles and spills nearly everything.
_UNMEASURED_FLOAT32 = {
    "forward": {
        64: Tile(64, 32, 8, 2),
        128: Tile(32, 32, 8, 2),
        256: Tile(16, 32, 8, 1),
        512: Tile(8, 16, 4, 1),
    },
    "backward_query": {
        64: Tile(32, 32, 4, 2),
        128: Tile(32, 32, 8, 1),
        256: Tile(16, 16, 8, 1),
        512: Tile(8, 16, 8, 1),
    },
    "backward_key_value": {
        64: Tile(32, 32, 4, 2),
        128: Tile(16, 32, 8, 1),
        256: Tile(16, 16, 8, 1),
        512: Tile(16, 8, 8, 1),
    },
    "backward_mask": {
        64: Tile(32, 32, 4, 1),
        128: Tile(16, 32, 4, 1),
        256: Tile(8, 16, 4, 1),
        512: Tile(8, 16, 8, 1),
    },
}

# {family: {bytes per element: {kernel: {largest head_dim, padded to a power of two: tile}}}}. A row named after a
# kernel and a kind of call ("forward masked") goes before the kernel's own.
_TABLE = {
    "sm_90": {
        2: {
            "forward": {
                64: Tile(64, 128, 4, 2),
                128: Tile(64, 128, 4, 1),
                256: Tile(128, 64, 8, 2),
                512: Tile(64, 64, 8, 1),
            },
            "forward causal": {
                64: Tile(64, 128, 4, 2),
                128: Tile(64, 64, 4, 3),
            },
            "forward masked": {
                64: Tile(64, 64, 4, 3),
                128: Tile(128, 64, 8, 3),
                256: Tile(128, 32, 8, 2),
            },
            "backward_query": {
                64: Tile(128, 64, 4, 3),
                128: Tile(128, 64, 8, 3),
                256: Tile(128, 64, 8, 1),
                512: Tile(64, 32, 8, 1),
            },
            "backward_key_value": {
                64: Tile(64, 64, 4, 3),
                128: Tile(64, 64, 4, 2),
                256: Tile(64, 64, 8, 2),
                512: Tile(32, 32, 8, 1),
            },
            # Two programs for each tile, of half of the columns each.
            "wide_forward": {512: Tile(128, 64, 8, 1)},
            "wide_key": {512: Tile(16, 64, 4, 2)},
            "wide_value": {512: Tile(64, 64, 4, 1)},
            # All as long as the stored tiles, in queries or keys or both.
            "stored_scores": {512: Tile(128, 128, 8, 3)},
            "stored_query": {512: Tile(128, 64, 8, 4)},
            "stored_key": {512: Tile(64, 128, 8, 3)},
            "backward_query masked": {
                64: Tile(64, 64, 4, 3),
            },
            "backward_key_value masked": {
                64: Tile(64, 64, 4, 2),
                128: Tile(64, 64, 4, 2),
                256: Tile(32, 64, 8, 2),
            },
            "backward_mask": {
                64: Tile(64, 64, 4, 2),
                128: Tile(64, 64, 4, 1),
                256: Tile(64, 64, 8, 1),
                512: Tile(32, 32, 8, 1),
            },
        },
        4: {
            "forward": {
                64: Tile(128, 32, 4, 3),
                128: Tile(64, 32, 4, 2),
                256: Tile(16, 32, 8, 1),
                512: Tile(16, 16, 4, 2),
            },
            # Products of float16 halves; one warpgroup for each 64 rows, or two would compute the same.
            "forward split": {
                64: Tile(128, 64, 8, 2),
                128: Tile(128, 64, 8, 2),
            },
            "backward_query split": {
                64: Tile(128, 64, 8, 2),
                128: Tile(128, 32, 8, 2),
            },
            "backward_key_value split": {
                64: Tile(32, 128, 8, 2),
                128: Tile(32, 128, 8, 2),
            },
            "backward_query": {
                64: Tile(64, 32, 4, 2),
                128: Tile(32, 32, 8, 1),
                256: Tile(16, 16, 8, 1),
                512: Tile(8, 16, 8, 1),
            },
            "backward_key_value": {
                64: Tile(32, 64, 4, 2),
                128: Tile(32, 32, 8, 1),
                256: Tile(16, 16, 8, 1),
                512: Tile(16, 16, 8, 1),
            },
            "backward_mask": {
                64: Tile(64, 32, 4, 2),
                128: Tile(64, 32, 8, 1),
                256: Tile(32, 16, 4, 1),
                512: Tile(16, 16, 8, 1),
            },
        },
    },
    # Not measured: the largest tiles that fit and of which ptxas (AMD: LLVM) keeps all but a little in registers.
    "sm_80": {
        2: {
            "forward": {
                64: Tile(128, 64, 4, 3),
                128: Tile(128, 64, 8, 3),
                256: Tile(64, 64, 8, 2),
                512: Tile(64, 16, 8, 2),
            },
            "forward masked": {
                64: Tile(128, 64, 8, 3),
                128: Tile(128, 32, 8, 2),
            },
            "backward_query": {
                64: Tile(64, 64, 4, 3),
                128: Tile(64, 64, 4, 2),
                256: Tile(64, 32, 8, 2),
                512: Tile(32, 16, 4, 2),
            },
            "backward_key_value": {
                64: Tile(32, 64, 4, 3),
                128: Tile(64, 64, 8, 2),
                256: Tile(32, 64, 8, 2),
                512: Tile(16, 16, 4, 2),
            },
            "backward_mask": {
                64: Tile(64, 32, 4, 2),
                128: Tile(128, 32, 8, 2),
                256: Tile(64, 32, 8, 2),
                512: Tile(32, 16, 4, 1),
            },
        },
        4: _UNMEASURED_FLOAT32,
    },
    "sm_86": {
        2: {
            "forward": {
                64: Tile(128, 64, 4, 3),
                128: Tile(128, 32, 8, 2),
                256: Tile(64, 32, 8, 2),
                512: Tile(32, 16, 4, 2),
            },
            "forward masked": {
                64: Tile(128, 64, 8, 2),
            },
            "backward_query": {
                64: Tile(64, 64, 4, 3),
                128: Tile(64, 64, 4, 2),
                256: Tile(64, 16, 4, 2),
                512: Tile(16, 16, 4, 1),
            },
            "backward_key_value": {
                64: Tile(32, 64, 4, 3),
                128: Tile(64, 64, 8, 2),
                256: Tile(16, 64, 8, 2),
                512: Tile(16, 16, 4, 2),
            },
            "backward_mask": {
                64: Tile(64, 32, 4, 2),
                128: Tile(128, 32, 8, 2),
                256: Tile(32, 32, 4, 1),
                512: Tile(32, 16, 4, 1),
            },
        },
        4: _UNMEASURED_FLOAT32,
    },
    "gfx942": {
        2: {
            "forward": {
                64: Tile(128, 64, 4, 1),
                128: Tile(128, 64, 4, 1),
                256: Tile(64, 32, 4, 1),
                512: Tile(32, 16, 4, 1),
            },
            "backward_query": {
                64: Tile(128, 64, 4, 1),
                128: Tile(64, 64, 4, 1),
                256: Tile(64, 32, 4, 1),
                512: Tile(32, 16, 4, 1),
            },
            "backward_key_value": {
                64: Tile(64, 64, 4, 1),
                128: Tile(32, 64, 4, 1),
                256: Tile(16, 64, 4, 1),
                512: Tile(16, 32, 4, 1),
            },
            "backward_mask": {
                64: Tile(64, 64, 4, 1),
                128: Tile(64, 64, 4, 1),
                256: Tile(64, 32, 4, 1),
                512: Tile(32, 16, 4, 1),
            },
        },
        4: {
            "forward": {
                64: Tile(128, 32, 4, 1),
                128: Tile(64, 32, 4, 1),
                256: Tile(32, 16, 4, 1),
                512: Tile(16, 16, 4, 1),
            },
            "backward_query": {
                64: Tile(64, 32, 4, 1),
                128: Tile(32, 32, 4, 1),
                256: Tile(32, 16, 4, 1),
                512: Tile(16, 16, 4, 1),
            },
            "backward_key_value": {
                64: Tile(32, 64, 4, 1),
                128: Tile(32, 32, 4, 1),
                256: Tile(16, 32, 4, 1),
                512: Tile(16, 16, 4, 1),
            },
            "backward_mask": {
                64: Tile(64, 64, 4, 1),
                128: Tile(64, 32, 4, 1),
                256: Tile(32, 16, 4, 1),
                512: Tile(16, 16, 4, 1),
            },
        },
    },
}


def choose(kernel: str, family_name: str, itemsize: int, head_dim_padded: int, kind: str = "full") -> Tile:
    """The tile of a kernel for the larger of head_dim and head_dim_v, padded to a power of two (16 to 512).

    kind: "full", "causal", "masked" (there is an attn_mask) or "split" (float32 products of float16 halves).
    """
    rows = _TABLE[family_name][itemsize]
    for row in (rows.get(f"{kernel} {kind}", {}), rows[kernel]):
        for largest, tile in row.items():
            if head_dim_padded <= largest:
                return tile
    raise ValueError(f"no tile for {kernel} at head_dim {head_dim_padded} (largest: 512)")


_ANY = 1 << 30

# {largest head_dim, padded: {most rows: the tiles that are best somewhere}}, sm_90, 2 bytes per element; measured on an
# H200 except those of 64 rows. Of tiles that cost the same by decode_plan's estimate the first is taken.
_DECODE_SM_90 = {
    64: {
        1: (DecodeTile(16, 128, 4, 3, 3), DecodeTile(16, 128, 4, 4, 2), DecodeTile(16, 256, 4, 3, 1)),
        4: (DecodeTile(16, 128, 4, 3, 3), DecodeTile(16, 128, 4, 4, 2), DecodeTile(16, 256, 4, 3, 1),
            DecodeTile(16, 64, 4, 4, 4)),
        16: (DecodeTile(16, 128, 4, 3, 3), DecodeTile(16, 128, 4, 4, 2)),
        32: (DecodeTile(16, 128, 4, 4, 2), DecodeTile(32, 128, 4, 3, 2)),
        _ANY: (DecodeTile(64, 128, 8, 3, 2),),
    },
    128: {
        4: (DecodeTile(16, 64, 4, 4, 2), DecodeTile(16, 128, 4, 3, 1), DecodeTile(16, 64, 4, 2, 4)),
        16: (DecodeTile(16, 64, 4, 4, 2), DecodeTile(16, 128, 4, 3, 1)),
        32: (DecodeTile(16, 64, 4, 4, 2), DecodeTile(32, 64, 4, 4, 2), DecodeTile(32, 128, 8, 3, 1),
             DecodeTile(16, 128, 4, 3, 1)),
        64: (DecodeTile(16, 64, 4, 4, 2), DecodeTile(32, 128, 8, 3, 1)),
        _ANY: (DecodeTile(64, 128, 8, 3, 1),),
    },
    256: {
        4: (DecodeTile(16, 64, 8, 3, 1), DecodeTile(16, 32, 4, 3, 2)),
        16: (DecodeTile(16, 32, 4, 3, 2), DecodeTile(16, 32, 4, 4, 1)),
        32: (DecodeTile(16, 64, 8, 3, 1), DecodeTile(32, 64, 8, 3, 1), DecodeTile(32, 32, 4, 3, 2)),
        _ANY: (DecodeTile(64, 32, 8, 3, 2),),
    },
}

# {family: {bytes per element: {largest head_dim, padded: (keys, warps, stages, programs for each multiprocessor, most
# rows)}}}, of the decoding kernel on GPUs that nobody has measured, and of float32. What decides is how many bytes are
# on their way: (stages - 1) tiles of keys and values for each program. Rows of float32 take much shared memory.
_DECODE: dict[str, dict[int, dict[int, Any]]] = {
    "sm_90": {
        2: _DECODE_SM_90,
        4: {64: (64, 4, 3, 2, 64), 128: (32, 4, 3, 2, 64), 256: (32, 4, 2, 1, 32)},
    },
    "sm_80": {
        2: {64: (64, 4, 3, 2, 64), 128: (64, 4, 2, 2, 64), 256: (32, 4, 2, 2, 64)},
        4: {64: (32, 4, 3, 2, 64), 128: (32, 4, 2, 2, 64), 256: (16, 4, 2, 2, 32)},
    },
    "sm_86": {
        2: {64: (64, 4, 3, 1, 64), 128: (32, 4, 3, 1, 64), 256: (32, 4, 2, 1, 64)},
        4: {64: (32, 4, 3, 1, 64), 128: (32, 4, 2, 1, 32), 256: (16, 4, 2, 1, 16)},
    },
    "gfx942": {
        2: {64: (64, 4, 2, 2, 64), 128: (32, 4, 2, 2, 64), 256: (32, 4, 1, 1, 64)},
        4: {64: (32, 4, 2, 2, 64), 128: (16, 4, 2, 2, 64), 256: (16, 4, 1, 1, 64)},
    },
}

def _beside_wide_mask(tile: DecodeTile) -> DecodeTile:
    """With half of the keys, where tiles of float32 masks, 32 KB each, would leave too little shared memory."""
    return replace(tile, block_n=tile.block_n // 2) if tile.block_m * tile.block_n > 4096 else tile


def decode_tiles(
    family_name: str, itemsize: int, head_dim_padded: int, rows: int, wide_mask: bool = False
) -> tuple[DecodeTile, ...]:
    """Tiles of the decoding kernel among which to choose, for so many rows that share keys (query heads times queries).

    head_dim_padded: the larger of head_dim and head_dim_v, padded to a power of two. wide_mask: with a float mask that
    differs from row to row, which is copied beside keys and values.
    """
    for largest, entry in _DECODE[family_name][itemsize].items():
        if head_dim_padded <= largest:
            if isinstance(entry, dict):
                found = next(tiles for most, tiles in entry.items() if rows <= most)
                return tuple(_beside_wide_mask(tile) for tile in found) if wide_mask else found
            block_n, num_warps, num_stages, programs, most_rows = entry
            block_m = min(most_rows, 16 if rows <= 16 else 32 if rows <= 32 else 64)
            num_warps *= 2 if block_m == 64 else 1  # four have no registers for as many rows
            return (DecodeTile(block_m, block_n, num_warps, num_stages, programs),)
    raise ValueError(f"no tile for decoding at head_dim {head_dim_padded} (largest: 256)")
