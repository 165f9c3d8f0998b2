"""The one table of tile sizes of the Hopper kernels, and the limits that all of their launches have.

May import nothing of ours. Imported by whatever of this folder makes launches. H100, H200, H20, GH200 and slices of
them are all sm_90: their numbers of SMs only decide whether the forward's larger tiles are enough for all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

# Of the L2 cache (50 MB), what the heads in work at one time should fit: keys and values of a forward, beside what is
# written; queries, their gradients and their float32 sums of a backward.
L2_BYTES = 32 << 20
# Of one launch, in its first dimension.
MAX_BLOCKS = 2**31 - 1


def round_up(number: int, step: int) -> int:
    """To the next multiple of step."""
    return -(-number // step) * step


@dataclass(frozen=True)
class Tile:
    """How one specialisation of the forward kernel cuts its work.

    block_m: query rows of a tile, 64 for each consumer warpgroup. block_n: keys of a step. stages: key and value tiles
    in flight. q_stages: query tiles in flight; with two, outputs leave through the query buffers. ping_pong: warpgroups
    take turns at the matrix unit. mask_stages: tiles of a float mask in flight. rotate: warpgroups exchange their rows
    with every query tile. exact_value: the value's head_dim is padded to a multiple of 8, not of 16. short_lists: where
    each head has its own keys, only few heads have their causal tiles in one list (``forward.py``).
    """

    block_m: int
    block_n: int
    stages: int
    q_stages: int
    ping_pong: bool = True
    mask_stages: int = 1
    rotate: bool = False
    exact_value: bool = False
    short_lists: bool = False

    def value_columns(self, head_dim_v: int) -> int:
        """The value's head_dim with its padding."""
        step = 8 if self.exact_value else 16
        return math.ceil(head_dim_v / step) * step

    @property
    def num_warpgroups(self) -> int:
        """Consumer warpgroups; one more loads."""
        return self.block_m // 64

    @property
    def num_threads(self) -> int:
        """Threads of a block, the producer's included."""
        return (self.num_warpgroups + 1) * 128


class LargerTile(NamedTuple):
    """Another tile for dense calls. gain: its rate over the usual tile's, a little less than measured."""

    tile: Tile
    gain: float


def choose(
    head_dim: int, head_dim_v: int, is_causal: bool, seqlen_q: int, seqlen_k: int, batch_heads: int, num_sms: int
) -> Tile:
    """The tile for a dense call; head_dim is a multiple of 16, head_dim_v one of 8, both at most 256.

    The larger one, unless it leaves so many multiprocessors or rows idle that its gain is lost.
    """
    usual = choose_usual(head_dim, math.ceil(head_dim_v / 16) * 16, is_causal, seqlen_k)
    larger = _larger(head_dim, head_dim_v, is_causal, seqlen_k)

    def rows_in_turn(tile: Tile) -> int:
        """Query rows that the busiest multiprocessor does."""
        return math.ceil(math.ceil(seqlen_q / tile.block_m) * batch_heads / num_sms) * tile.block_m

    return larger.tile if larger and rows_in_turn(larger.tile) <= larger.gain * rows_in_turn(usual) else usual


# What warpgroups exchange their rows in. The second is as large as the usual one.
_ROTATED = Tile(256, 64, stages=8, q_stages=3, ping_pong=False, rotate=True)
_SHORT_LISTS = Tile(128, 64, stages=5, q_stages=2, ping_pong=False, rotate=True, short_lists=True)


def _larger(head_dim: int, head_dim_v: int, is_causal: bool, seqlen_k: int) -> LargerTile | None:
    """What does better than the usual tile where there are query tiles enough, at the lengths that were measured.

    Four warpgroups of 112 registers hide each other's latencies better than two, and load each key for 256 queries; in
    causal tiles they exchange their rows, since the last ones see the most keys. A head_dim of 72 needs this most: the
    copy engine is slow at rows that begin at odd multiples of 16 bytes.
    """
    largest = max(head_dim, math.ceil(head_dim_v / 16) * 16)
    if seqlen_k <= 256:
        return _one_tile(head_dim, head_dim_v, is_causal, seqlen_k)
    if head_dim == head_dim_v == 128 and is_causal and seqlen_k <= 1024:
        return LargerTile(_SHORT_LISTS, 1.0)
    if seqlen_k < 512:
        return None
    if largest == 64:
        if is_causal:
            return LargerTile(_ROTATED, 1.15)
        return LargerTile(Tile(256, 64, stages=8, q_stages=2), 1.04) if seqlen_k <= 8192 else None
    if largest == 80 and head_dim_v <= 72:
        tile = Tile(256, 64, stages=4, q_stages=1, ping_pong=False, rotate=is_causal, exact_value=True)
        return LargerTile(tile, 1.25)
    if largest == 80 and seqlen_k >= 2048:
        tile = Tile(192, 64 if is_causal else 96, stages=3 if is_causal else 2, q_stages=2, ping_pong=False)
        return LargerTile(tile, 1.05)
    return None


def _one_tile(head_dim: int, head_dim_v: int, is_causal: bool, seqlen_k: int) -> LargerTile | None:
    """The same where all queries of a head may be one tile: images' patches, short texts."""
    if max(head_dim, head_dim_v) == 64 and seqlen_k > 128:
        return LargerTile(_ROTATED if is_causal else Tile(256, 64, stages=8, q_stages=3), 1.0)
    if head_dim == head_dim_v == 128 and is_causal:
        one = Tile(128, 64, stages=4, q_stages=3, ping_pong=False)
        return LargerTile(_SHORT_LISTS if seqlen_k > 128 else one, 1.0)
    return None


def choose_usual(head_dim: int, head_dim_v: int, is_causal: bool, seqlen_k: int) -> Tile:
    """The tile of calls that are short or few; head dimensions are multiples of 16.

    Measured on an H200 over batch * seqlen = 16,384; ``NOTES.md`` has the variants. Up to a head_dim of 64 softmax
    binds and three warpgroups share it best; above, two with more registers. Fewer keys a step waste less of the
    masked half of diagonal tiles and of a last tile that is not full; more keys a step cost fewer instructions.
    """
    largest = max(head_dim, head_dim_v)
    if largest <= 64:
        if seqlen_k <= (768 if is_causal else 256):
            return Tile(128, 64, stages=8, q_stages=2)
        if is_causal and seqlen_k <= 1536:
            return Tile(128, 128, stages=4, q_stages=2)
        return Tile(192, 128, stages=3, q_stages=2)
    if largest <= 128:
        if is_causal or seqlen_k <= 768:
            return Tile(128, 64, stages=5, q_stages=2, ping_pong=False)
        if 80 < largest <= 96:
            return Tile(128, 128, stages=2, q_stages=2, ping_pong=False)
        return Tile(128, 96, stages=3, q_stages=2, ping_pong=False)
    if largest <= 192:
        if head_dim_v <= 128:
            return Tile(128, 64, stages=3, q_stages=2, ping_pong=False)
        if largest <= 160:
            return Tile(128, 64, stages=3, q_stages=1, ping_pong=False)
        return Tile(128, 64, stages=2, q_stages=2, ping_pong=False)
    return Tile(128, 64, stages=2, q_stages=1, ping_pong=False)


def choose_packed(head_dim: int, head_dim_v: int, is_causal: bool, seqlen_k: int) -> Tile:
    """The tile for packed sequences of this mean length. At 64, four warpgroups gain more than rows past ends cost."""
    if max(head_dim, head_dim_v) == 64 and seqlen_k > 128:
        return Tile(256, 64, stages=8, q_stages=3, ping_pong=not is_causal)
    return choose_usual(head_dim, head_dim_v, is_causal, seqlen_k)


def choose_masked(head_dim: int, head_dim_v: int, per_key: bool) -> Tile:
    """The tile for a call with a bool mask; block_n is a multiple of 16 and at most 128.

    per_key: the mask is the same for all queries, so that few tiles are mixed and larger ones waste nothing.
    """
    largest = max(head_dim, head_dim_v)
    if largest <= 64:
        return Tile(128, 128, stages=4, q_stages=2)
    if largest <= 128 and per_key:
        return Tile(128, 128, stages=2, q_stages=2, ping_pong=False)
    return choose_usual(head_dim, head_dim_v, True, 4096)


def masked_variants(head_dim: int, head_dim_v: int) -> tuple[Tile, ...]:
    """Every tile that ``choose_masked`` can give for these head dimensions."""
    return tuple(dict.fromkeys(choose_masked(head_dim, head_dim_v, per_key) for per_key in (False, True)))


# Above, a float32 mask leaves no registers, and dropout none either.
MAX_FLOAT32_BIAS_HEAD_DIM = 192
MAX_DROPOUT_HEAD_DIM = 192
# Of a block, less 2 KB for what is not tiles.
_SHARED_MEMORY = (227 << 10) - 2048


def bias_tile_bytes(tile: Tile, bias_bytes: int, per_key: bool) -> int:
    """Shared memory of a tile of a float mask of `bias_bytes` an element; per_key: that has one row for all queries."""
    return math.ceil(tile.block_n * bias_bytes / 128) * (1024 if per_key else tile.block_m * 128)


def choose_biased(head_dim: int, head_dim_v: int, bias_bytes: int, per_key: bool) -> Tile:
    """The tile for a call with a float mask; block_n is a multiple of the columns in 128 bytes.

    As many stages as there is room for; keys and mask in turn are given up first.
    """
    if max(head_dim, head_dim_v) <= 64 and bias_bytes == 2:
        return Tile(128, 128, stages=3, q_stages=2, mask_stages=2)
    padded = math.ceil(head_dim / 64) * 64
    padded_v = math.ceil(head_dim_v / 64) * 64
    q_stages = 2 if max(head_dim, head_dim_v) <= 128 or head_dim_v <= 128 else 1
    room = _SHARED_MEMORY - q_stages * 128 * padded * 2
    for stages, mask_stages in ((4, 3), (4, 2), (3, 2), (2, 2), (2, 1)):
        tile = Tile(128, 64, stages, q_stages, ping_pong=max(head_dim, head_dim_v) <= 128, mask_stages=mask_stages)
        used = stages * 64 * (padded + padded_v) * 2 + mask_stages * bias_tile_bytes(tile, bias_bytes, per_key)
        if used <= room:
            return tile
    raise ValueError(f"no tile for head_dim {head_dim} with value head_dim {head_dim_v}")


def biased_variants(head_dim: int, head_dim_v: int) -> tuple[tuple[Tile, int, bool], ...]:
    """(tile, bias_bytes, per_key) of every kernel with a float mask for these head dimensions."""
    sizes = (2, 4) if max(head_dim, head_dim_v) <= MAX_FLOAT32_BIAS_HEAD_DIM else (2,)
    return tuple(
        (choose_biased(head_dim, head_dim_v, size, per_key), size, per_key)
        for size in sizes
        for per_key in (False, True)
    )


def choose_dropout(head_dim: int, head_dim_v: int) -> Tile:
    """The tile for a call with dropout; block_n divides the padding of the table of random keys, 256."""
    largest = max(head_dim, head_dim_v)
    if largest <= 64:
        return Tile(128, 128, stages=4, q_stages=2)
    if largest <= 128:
        return Tile(128, 64, stages=4, q_stages=2, ping_pong=False)
    tile = choose_usual(head_dim, head_dim_v, True, 4096)
    return tile if tile.stages < 3 or tile.q_stages == 1 else replace(tile, stages=tile.stages - 1)


_LENGTHS = (128, 256, 512, 1024, 4096, 16384)


def variants(head_dim: int, head_dim_v: int, is_causal: bool) -> tuple[Tile, ...]:
    """Every tile that ``choose`` can give for these head dimensions: what the build tests compile."""
    return tuple(
        dict.fromkeys(
            choose(head_dim, head_dim_v, is_causal, n, n, batch_heads, 132)
            for batch_heads in (1, 1056)
            for n in _LENGTHS
        )
    )


def packed_variants(head_dim: int, head_dim_v: int, is_causal: bool) -> tuple[Tile, ...]:
    """The same of packed sequences."""
    return tuple(dict.fromkeys(choose_packed(head_dim, head_dim_v, is_causal, n) for n in _LENGTHS))


@dataclass(frozen=True)
class BackwardTile:
    """How one specialisation of the backward kernel cuts its work.

    block_n: keys of a block, 64 for each consumer warpgroup. block_m: query rows of a step, which is done in parts of
    step_m rows. q_stages, do_stages: tiles of query and grad_out in flight; ds_stages: buffers for dS.

    Of the kernel for head_dim up to 128 alone: keys_in_registers: the keys and values of the block are kept there.
    turns: warpgroups take turns at the exponentials. delta_first: dP's accumulators begin with -delta. persistent: a
    block for each multiprocessor, which does one tile of keys after the other. unstaged: consumers add their shares of
    the query's gradient from registers.

    direct: the block of a causal call's first keys writes the gradients of the queries that see no others.

    fused: one kernel prepares, computes and finishes, part by part.

    Of the kernel for larger ones: paired: two blocks share the query's gradient of the keys of both, and load query and
    grad_out tiles once for both; do_stages does not count. A head_dim is padded to more than 192 for it.

    With a block_n of 128 and a head_dim above 128 another kernel is meant, in which the one stage of query and grad_out
    arrives in halves (``IN_HALVES``).
    """

    block_m: int
    block_n: int
    step_m: int
    q_stages: int = 2
    do_stages: int = 2
    ds_stages: int = 2
    keys_in_registers: bool = False
    turns: bool = False
    delta_first: bool = False
    persistent: bool = False
    fused: bool = False
    unstaged: bool = False
    paired: bool = False
    direct: bool = False

    @property
    def num_warpgroups(self) -> int:
        """Consumer warpgroups; one more loads and stores."""
        return self.block_n // 64

    @property
    def num_threads(self) -> int:
        """Threads of a block, those that load and store included."""
        return (self.num_warpgroups + 1) * 128


def choose_backward(
    head_dim: int, head_dim_v: int, is_causal: bool, query_rows: int, deterministic: bool
) -> BackwardTile:
    """The tile of the backward for a call without mask and dropout that has heads enough to fuse its kernels.

    head_dim and head_dim_v: multiples of 16, at most 256. query_rows: how many queries a key head has, those of all its
    query heads together. Measured on an H200 at S = 512 to 16,384 of 16,384 tokens; ``NOTES.md`` has the table.
    """
    usual = choose_backward_usual(head_dim, head_dim_v, is_causal, query_rows, deterministic)
    if fits_in_halves(head_dim, head_dim_v):
        return IN_HALVES
    if deterministic:  # two blocks add half as much each, and half as many take turns
        return replace(usual, ds_stages=1, paired=True) if min(head_dim, head_dim_v) > 128 else usual
    if head_dim != head_dim_v:
        return usual
    if head_dim == 256 and query_rows >= (4096 if is_causal else 1024):
        return replace(usual, ds_stages=1, fused=True, paired=True)
    if head_dim == 256:
        return replace(usual, direct=is_causal and query_rows <= 1024)
    if head_dim == 128 and is_causal:
        is_short = query_rows < 8192
        return replace(usual, persistent=is_short, direct=query_rows <= 1024, unstaged=not is_short)
    if head_dim == 128:
        is_short = query_rows < 3072
        return replace(usual, persistent=is_short, fused=not is_short)
    if head_dim == 64 and is_causal and query_rows <= 512:
        return replace(usual, direct=True)
    if head_dim == 64 and query_rows < 8192:
        fused = query_rows <= 2048 if is_causal else query_rows >= 3072
        return replace(usual, fused=fused, persistent=usual.persistent or fused or is_causal)
    return usual


def fits_in_halves(head_dim: int, head_dim_v: int) -> bool:
    """Whether the kernel whose query tiles arrive in halves takes these: its sums leave registers for all else."""
    return (head_dim, head_dim_v) == (192, 128) or (head_dim == head_dim_v and 128 < head_dim <= 160)


# The tile of that kernel.
IN_HALVES = BackwardTile(128, 128, 64, q_stages=1, do_stages=1, ds_stages=1, unstaged=True)


def choose_backward_usual(
    head_dim: int, head_dim_v: int, is_causal: bool, query_rows: int, deterministic: bool
) -> BackwardTile:
    """The tile of calls with a mask or dropout, of packed sequences, and where ``choose_backward`` has no better one.

    Where blocks are short, a block that goes on to its next keys at once saves a good part of its time; deterministic
    ones, whose end others wait for, always.
    """
    if max(head_dim, head_dim_v) > 128:
        return BackwardTile(64, 64, 64)  # the kernel in which warpgroups have roles
    persistent = deterministic or query_rows <= (3072 if is_causal else 1536)
    if max(head_dim, head_dim_v) <= 64:
        return BackwardTile(128, 128, 64, q_stages=3, keys_in_registers=True, persistent=persistent)
    return BackwardTile(64, 128, 64, q_stages=3, turns=True, delta_first=True, persistent=persistent)


def with_float_mask(tile: BackwardTile) -> BackwardTile:
    """The same with room for a float mask: its tile takes the place of one of query's."""
    return replace(tile, q_stages=2, persistent=False)


@dataclass(frozen=True)
class BiasTile:
    """How one specialisation of the bias's gradient cuts its work.

    block_n: keys of a tile of the bias, whole boxes of the copy engine; its queries are 128, 64 for each of two
    warpgroups. stages: pairs of operands in flight.
    """

    block_n: int
    stages: int

    block_m = 128
    num_threads = 384


def choose_bias(head_dim: int, head_dim_v: int, bias_itemsize: int) -> BiasTile:
    """The tile of the bias's gradient for a call; head_dim and head_dim_v are multiples of 16, at most 256."""
    largest = max(head_dim, head_dim_v)
    if largest > 128:
        return BiasTile(64, stages=2)
    if bias_itemsize == 4:
        return BiasTile(96, stages=3 if largest > 64 else 5)
    return BiasTile(128, stages=3 if largest > 64 else 6)
