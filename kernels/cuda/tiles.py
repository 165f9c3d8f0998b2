"""The one table of tile sizes of the Hopper kernels.

May import nothing. Imported by ``forward.py`` and ``backward.py``. No entry depends on a number of multiprocessors:
H100, H200, H20, GH200 and slices of them are all sm_90.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """How one specialisation of the forward kernel cuts its work.

    block_m: query rows of a tile, 64 for each consumer warpgroup. block_n: keys of a step. stages: key and value tiles
    in flight. q_stages: query tiles in flight; with two, outputs leave through the query buffers. ping_pong: warpgroups
    take turns at the matrix unit. rotate: they exchange their rows with every tile. lane_loads: threads load keys and
    values, 2, all, or, 1, the columns after the last multiple of 64; for a head_dim that is an odd multiple of 8.
    """

    block_m: int
    block_n: int
    stages: int
    q_stages: int
    ping_pong: bool = True
    rotate: bool = False
    lane_loads: int = 0

    @property
    def num_warpgroups(self) -> int:
        """Consumer warpgroups; one more loads."""
        return self.block_m // 64

    @property
    def num_threads(self) -> int:
        """Threads of a block, the producer's included."""
        return (self.num_warpgroups + 1) * 128


def choose(
    head_dim: int, head_dim_v: int, is_causal: bool, seqlen_q: int, seqlen_k: int, batch_heads: int, num_sms: int
) -> Tile:
    """The tile for a call; head_dim and head_dim_v are multiples of 16, at most 256.

    Measured on an H200 over batch * seqlen = 16,384; ``NOTES.md`` has the variants. Up to a head_dim of 64 softmax
    binds and three warpgroups share it best; above, two with more registers. Fewer keys a step waste less of the
    masked half of diagonal tiles and of a last tile that is not full; more keys a step cost fewer instructions.
    """
    largest = max(head_dim, head_dim_v)
    if largest <= 64:
        if is_causal and seqlen_k <= 768:
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


def choose_masked(head_dim: int, head_dim_v: int, per_key: bool) -> Tile:
    """The tile for a call with a bool mask; block_n is a multiple of 16 and at most 128.

    per_key: the mask is the same for all queries, so that few tiles are mixed and larger ones waste nothing.
    """
    largest = max(head_dim, head_dim_v)
    if largest <= 64:
        return Tile(128, 128, stages=4, q_stages=2)
    if largest <= 128 and per_key:
        return Tile(128, 128, stages=2, q_stages=2, ping_pong=False)
    return choose(head_dim, head_dim_v, True, 4096, 4096, 64, 132)


def masked_variants(head_dim: int, head_dim_v: int) -> tuple[Tile, ...]:
    """Every tile that ``choose_masked`` can give for these head dimensions."""
    return tuple(dict.fromkeys(choose_masked(head_dim, head_dim_v, per_key) for per_key in (False, True)))


def variants(head_dim: int, head_dim_v: int, is_causal: bool) -> tuple[Tile, ...]:
    """Every tile that ``choose`` can give for these head dimensions: what the build tests compile."""
    lengths = (512, 1024, 4096)
    return tuple(dict.fromkeys(choose(head_dim, head_dim_v, is_causal, n, n, 64, 132) for n in lengths))


@dataclass(frozen=True)
class BackwardTile:
    """How one specialisation of the backward kernel cuts its work.

    block_n: keys of a block, 64 for each consumer warpgroup. block_m: query rows of a step, which is done in parts of
    step_m rows. q_stages, do_stages: tiles of query and grad_out in flight; ds_stages: buffers for dS.

    Of the kernel for head_dim up to 128 alone: keys_in_registers: the keys and values of the block are kept there.
    turns: warpgroups take turns at the exponentials. delta_first: dP's accumulators begin with -delta. persistent: a
    block for each multiprocessor, which does one tile of keys after the other. first_stores: the query's gradient needs
    no zeros before, since the block of a head's first keys stores its share, for which the others wait.
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
    first_stores: bool = False

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
    """The tile of the backward for a call; head_dim and head_dim_v are multiples of 16, at most 256.

    query_rows: how many queries a key head has, those of all its query heads together. ``NOTES.md`` has the variants.
    Where blocks are short, a block that goes on to its next keys at once saves a good part of its time. Deterministic
    ones wait for one another, and should not hold keys that they have not begun.
    """
    if max(head_dim, head_dim_v) > 128:
        return BackwardTile(64, 64, 64)  # the kernel in which warpgroups have roles
    persistent = not deterministic and query_rows <= (3072 if is_causal else 1536)
    if max(head_dim, head_dim_v) <= 64:
        return BackwardTile(128, 128, 64, q_stages=3, keys_in_registers=True, persistent=persistent)
    return BackwardTile(64, 128, 64, q_stages=3, turns=True, delta_first=True, persistent=persistent)
