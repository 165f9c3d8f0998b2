"""What of a backward's probabilities is in memory together: every tile once, no more than allowed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from torch_flashbackend.kernels.triton import stored_plan
from torch_flashbackend.kernels.triton.tiles import Tile

SIZE = 128
SHAPES = {  # batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim
    "many heads": (4, 16, 16, 4096, 4096, 512),
    "grouped": (4, 32, 8, 4096, 4096, 512),
    "uneven": (3, 35, 7, 650, 650, 320),
    "long": (1, 16, 16, 16384, 16384, 512),
    "longer": (2, 16, 4, 32768, 32768, 384),
    "fewer keys": (1, 16, 16, 16384, 3000, 512),
    "more keys": (1, 16, 16, 3000, 16384, 512),
    "short": (1, 8, 8, 100, 100, 512),
}


def call_of(shape, is_causal):
    batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim = shape
    return SimpleNamespace(
        batch=batch, heads=heads, kv_heads=kv_heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k, is_causal=is_causal,
        multiprocessors=132, constants={"HEAD_DIM": head_dim}, tile=lambda name: Tile(SIZE, SIZE, 8, 3),
    )  # fmt: skip


def tiles_of(region, is_causal):
    """(row, column) of a region's tiles, in their order in memory."""
    columns = range(region.first_tile, region.first_tile + region.num_tiles)
    rows = range(region.first_row, region.first_row + region.num_rows)
    return [(row, column) for row in rows for column in columns if column <= row or not is_causal]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_every_tile_counts_once_for_each_gradient(name, is_causal):
    call = call_of(SHAPES[name], is_causal)
    group, query = call.heads // call.kv_heads, call.batch * call.heads * call.seqlen_q * call.constants["HEAD_DIM"]
    parts = stored_plan.parts_of(call)
    rows, columns = (-(-length // SIZE) for length in (call.seqlen_q, call.seqlen_k))
    every = [(row, column) for row in range(rows) for column in range(columns) if column <= row or not is_causal]
    for of in ("of_keys", "of_queries"):
        found = {}
        for part in parts:
            assert part.region.count == len(tiles_of(part.region, is_causal))
            planes = 2 if part.of_keys else 1
            numbers = planes * part.kv_heads * group * part.region.count * SIZE**2
            assert numbers <= stored_plan.SHARE_OF_QUERY * query
            if getattr(part, of):
                for kv_head in range(part.first_kv_head, part.first_kv_head + part.kv_heads):
                    found.setdefault(kv_head, []).extend(tiles_of(part.region, is_causal))
        assert sorted(found) == list(range(call.batch * call.kv_heads))
        assert all(sorted(tiles) == every for tiles in found.values())
    # Each row of a gradient is written by one part, those without tiles included.
    assert sum(part.region.num_tiles * part.kv_heads for part in parts if part.of_keys) == columns * len(found)
    assert sum(part.region.num_rows * part.kv_heads for part in parts if part.of_queries) == rows * len(found)


@pytest.mark.parametrize("shape", [(1, 1, 1, 4096, 4096, 512), (1, 2, 2, 65536, 65536, 512), (1, 8, 8, 1, 65536, 512)])
def test_where_memory_is_too_little_nothing_is_stored(shape):
    assert stored_plan.parts_of(call_of(shape, False)) == []


def test_more_heads_than_fill_the_gpu_are_not_in_memory_together():
    whole = stored_plan.parts_of(call_of((64, 16, 16, 1024, 1024, 512), False))
    assert len(whole) > 4 and {part.region.count for part in whole} == {64}
    programs = whole[0].kv_heads * 8 * 2
    assert 0.9 * stored_plan.PROGRAMS * 132 <= programs <= 1.1 * stored_plan.PROGRAMS * 132
