"""The one table of tile sizes of the Hopper kernels.

May import nothing. Imported by ``forward.py``. No entry depends on a number of multiprocessors: H100, H200, H20, GH200
and slices of them are all sm_90.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tile:
    """How one specialisation of the forward kernel cuts its work.

    block_m: query rows of a tile, 64 for each consumer warpgroup. block_n: keys of a step. stages: key and value tiles
    in flight. q_stages: query tiles in flight. ping_pong: warpgroups take turns at the matrix unit. wait_late: softmax
    is kept from sinking below the wait for the second product. flags: further macros for the kernel.
    """

    block_m: int
    block_n: int
    stages: int = 2
    q_stages: int = 1
    ping_pong: bool = True
    wait_late: bool = False
    flags: tuple[tuple[str, int], ...] = field(default=())

    @property
    def num_warpgroups(self) -> int:
        """Consumer warpgroups; one more loads."""
        return self.block_m // 64

    @property
    def num_threads(self) -> int:
        """Threads of a block, the producer's included."""
        return (self.num_warpgroups + 1) * 128


# By the largest head_dim: the first row that is at least the call's.
_FORWARD = {
    64: Tile(192, 128),
    96: Tile(128, 128),
    128: Tile(128, 128),
    192: Tile(128, 96, ping_pong=False, wait_late=True),
    256: Tile(128, 64, ping_pong=False, wait_late=True),
}


def choose(
    head_dim: int, head_dim_v: int, is_causal: bool, seqlen_q: int, seqlen_k: int, batch_heads: int, num_sms: int
) -> Tile:
    """The tile for a call; head_dim and head_dim_v are multiples of 16, at most 256."""
    largest = max(head_dim, head_dim_v)
    return next(tile for bound, tile in _FORWARD.items() if largest <= bound)


def variants(head_dim: int, head_dim_v: int, is_causal: bool) -> tuple[Tile, ...]:
    """Every tile that ``choose`` can give for these head dimensions: what the build tests compile."""
    return (choose(head_dim, head_dim_v, is_causal, 4096, 4096, 64, 132),)
