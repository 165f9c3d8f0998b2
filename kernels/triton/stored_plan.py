"""Which backward calls keep probabilities in memory, how many heads at a time, and their launches.

May import torch and this folder's device code. Used by ``attention.py``; the kernels are ``backward_stored.py``'s.
"""

from __future__ import annotations

import bisect
import math
from typing import NamedTuple

import torch

from . import backward_stored as kernels

# Bytes of P and dS over those of the query. PyTorch's default takes three times the query's bytes beside its results
# (head_dim 512, H200), which may not be exceeded.
SHARE_OF_QUERY = 2
# So many programs for each multiprocessor that they end together; more heads at a time would only take memory.
PROGRAMS = 8
# Strips of a head, where it is too large as a whole, occupy at least this share of the multiprocessors.
SHARE_OF_GPU = 0.5


class Region(NamedTuple):
    """A rectangle of a head's tiles, of causal calls without those that no query sees. All counted in tiles."""

    first_row: int
    num_rows: int
    first_tile: int  # of keys
    num_tiles: int
    before: int  # what the kernels' numbers of tiles begin with
    count: int


class Part(NamedTuple):
    """What lies in memory together: a region of some kv heads, of all batches, and which gradients come from it."""

    first_kv_head: int
    kv_heads: int
    region: Region
    of_keys: bool
    of_queries: bool


class _Tiles:
    """The stored tiles of a head of a call (``attention._Call``), `size` queries by as many keys each."""

    def __init__(self, call):
        self.size = call.tile("stored_scores").block_m
        self.rows, self.columns = (math.ceil(length / self.size) for length in (call.seqlen_q, call.seqlen_k))
        self.is_causal = call.is_causal

    def before(self, row: int, width: int) -> int:
        """Tiles in the rows of tiles before this one: ``backward_stored._tiles_before``."""
        if not self.is_causal:
            return row * width
        triangle = min(row, width)
        return triangle * (triangle + 1) // 2 + (row - triangle) * width

    def of_keys(self, first: int, width: int) -> Region:
        """Every query that sees these keys."""
        first_row = min(first, self.rows) if self.is_causal else 0
        num_rows = self.rows - first_row
        return Region(first_row, num_rows, first, width, 0, self.before(num_rows, width))

    def of_queries(self, first: int, rows: int) -> Region:
        """Every key that these queries see."""
        before = self.before(first, self.columns)
        count = self.before(first + rows, self.columns) - before
        return Region(first, rows, 0, self.columns, before, count)

    def strips(self, region_of, length: int, most: int) -> list[Region]:
        """The fewest regions of at most so many tiles, of `length` rows or columns together; [] if one has more."""
        found, first = [], 0
        while first < length:
            sizes = range(1, length - first + 1)
            taken = bisect.bisect_right(sizes, most, key=lambda size: region_of(first, size).count)
            if taken == 0:
                return []
            found.append(region_of(first, taken))
            first += taken
        return found


def columns_of_a_program(head_dim: int, tiles: int, multiprocessors: int) -> int:
    """Columns of a gradient's tile where a launch has so many tiles of keys: 256, or 128 where that leaves less padding
    or fewer multiprocessors without work.
    """
    return 256 if head_dim > 384 and tiles * math.ceil(head_dim / 256) >= multiprocessors else 128


def parts_of(call) -> list[Part]:
    """What is kept in memory, one part after the other; nothing where it would be too much, or too little at a time.

    As many heads as may be. Where not even one may be as a whole: strips of keys, then strips of queries without P,
    which makes seven products of five.
    """
    tiles, head_dim = _Tiles(call), call.constants["HEAD_DIM"]
    group, every = call.heads // call.kv_heads, call.batch * call.kv_heads
    most = SHARE_OF_QUERY * call.batch * call.heads * call.seqlen_q * head_dim // (2 * group * tiles.size**2)
    whole = tiles.of_keys(0, tiles.columns)
    allowed = most // whole.count
    if allowed > 0:
        useful = math.ceil(PROGRAMS * call.multiprocessors / (tiles.columns * math.ceil(head_dim / 256)))
        at_a_time = math.ceil(every / math.ceil(every / min(allowed, useful)))
        return [Part(first, min(at_a_time, every - first), whole, True, True) for first in range(0, every, at_a_time)]
    occupied = SHARE_OF_GPU * call.multiprocessors
    of_keys = tiles.strips(tiles.of_keys, tiles.columns, most)
    of_queries = tiles.strips(tiles.of_queries, tiles.rows, 2 * most)
    if not of_keys or not of_queries or of_keys[0].num_tiles * math.ceil(head_dim / 128) < occupied:
        return []
    return [
        Part(kv_head, 1, region, keys, not keys)
        for kv_head in range(every)
        for keys, regions in ((True, of_keys), (False, of_queries))
        for region in regions
    ]


class StoredPlan:
    """The launches that fill grad_query (unless it is None), grad_key and grad_value."""

    def __init__(self, call, query, key, value, grad_out, statistics, grad_query, grad_key, grad_value, scalars):
        """call: ``attention._Call``; scalars: the kernels' arguments that are neither pointers nor strides."""
        self._call, self._scalars = call, scalars
        self._group, self._head_dim = call.heads // call.kv_heads, call.constants["HEAD_DIM"]
        self._tiles = [call.tile(f"stored_{name}") for name in ("scores", "query", "key")]
        scores, rows, keys = self._tiles
        size = scores.block_m
        assert size == scores.block_n == rows.block_m == keys.block_n, "all tiles are as long as the stored ones"
        parts = [part for part in parts_of(call) if part.of_keys or grad_query is not None]
        self._rows = size * max(
            math.ceil(part.kv_heads * self._group * part.region.count / (1 if part.of_keys else 2)) for part in parts
        )
        # Their types and sizes are what matters of these.
        both = torch.empty((1, 1, 2 * self._rows, size), dtype=call.dtype, device="meta")
        one = both[:, :, : self._rows]
        inputs = {"query": query, "key": key, "value": value, "grad_out": grad_out}
        self.parts = []
        for part in parts:
            stored = one if part.of_keys else both
            planes = {"statistics": statistics, "probabilities_out": one if part.of_keys else None}
            launches = [None] * 4
            if part.region.count:
                launches[0] = self._of_scores(part, inputs | planes | {"grad_scores_out": stored})
            if part.of_keys:
                launches[1] = self._of_keys(part, stored, query, grad_key, call.scale)
                launches[2] = self._of_keys(part, stored, grad_out, grad_value, 1.0)
            if part.of_queries and grad_query is not None:
                launches[3] = self._of_queries(part, stored, key, grad_query)
            self.parts.append((part, *launches))

    def _of_scores(self, part, pointers):
        tile = self._tiles[0]
        programs = part.kv_heads * self._group * part.region.count
        streamed = dict.fromkeys(("query", "key", "value", "grad_out"), (tile.block_m, kernels.DEPTH.value))
        names = {"BOUND_KEYS": self._call.seqlen_k % tile.block_n != 0, "STORE_BOTH": part.of_keys}
        return self._launch(kernels.attention_stored_scores, programs, part, tile, pointers, {}, streamed, names)

    def _of_keys(self, part, stored, right, gradient, out_scale):
        tile, tiles = self._tiles[2], part.kv_heads * part.region.num_tiles
        columns = columns_of_a_program(self._head_dim, tiles, self._call.multiprocessors)
        return self._launch(
            kernels.attention_stored_key, tiles * math.ceil(self._head_dim / columns), part, tile,
            {"stored": stored, "right": right, "gradient": gradient}, self._call.strides("b h n d", gradient),
            {"stored": (tile.block_m, tile.block_n), "right": (tile.block_m, columns)}, {"BLOCK_C": columns},
            {"out_scale": ("fp32", out_scale)},
        )

    def _of_queries(self, part, stored, key, gradient):
        tile, tiles = self._tiles[1], part.kv_heads * self._group * part.region.num_rows
        columns = columns_of_a_program(self._head_dim, tiles, self._call.multiprocessors)
        return self._launch(
            kernels.attention_stored_query, tiles * math.ceil(self._head_dim / columns), part, tile,
            {"grad_scores": stored, "key": key, "grad_query": gradient}, self._call.strides("b h m d", gradient),
            {"grad_scores": (tile.block_m, tile.block_n), "key": (tile.block_n, columns)}, {"BLOCK_C": columns},
        )

    def _launch(self, kernel, programs, part, tile, pointers, strides, streamed, names, scalars=None):
        numbers = part.region._asdict() | {"first_head": part.first_kv_head * self._group}
        numbers = {name: ("i32", number) for name, number in numbers.items()}
        strides = {name: stride for name, stride in strides.items() if name in kernel.arg_names}
        scalars = self._scalars | numbers | (scalars or {})
        return self._call.launch(kernel, programs, tile, pointers, strides, {}, scalars, names, streamed)

    @property
    def launches(self) -> list:
        """Those of one part of each kind, in the order in which they run."""
        kinds = {part.of_keys: launches for part, *launches in reversed(self.parts)}
        return [launch for launches in kinds.values() for launch in launches if launch is not None]

    def allocate(self, query: torch.Tensor) -> torch.Tensor:
        """Room for P and dS of a part, or for dS alone."""
        size = self._tiles[0].block_m
        return torch.empty((1, 1, 2 * self._rows, size), dtype=self._call.dtype, device=query.device)

    def __call__(self, query, key, value, grad_out, statistics, grad_query, grad_key, grad_value) -> None:
        """Arguments as in ``attention.backward``; statistics: what its kernel for queries has left."""
        both = self.allocate(query)
        probabilities, grad_scores = both[:, :, : self._rows], both[:, :, self._rows :]
        for part, of_scores, of_keys, of_values, of_queries in self.parts:
            left = grad_scores if part.of_keys else both
            if of_scores is not None:
                of_scores(query, key, value, grad_out, statistics, probabilities if part.of_keys else None, left)
            if part.of_keys:
                of_keys(left, query, grad_key)
                of_values(probabilities, grad_out, grad_value)
            if of_queries is not None:
                of_queries(left, key, grad_query)
