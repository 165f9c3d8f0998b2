"""What the tests of the Hopper kernels share: where they run, the calls that they draw, the masks that they look at."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from common import Call, check, expect, gradient_for, results_of, stock_results, tensor_in_layout

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
HOPPER_ONLY = [
    pytest.mark.cuda_only,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (compute capability 9.0)"),
]
DTYPES = (torch.bfloat16, torch.float16)
ALIGNED_LAYOUTS = ("bhsd", "bshd", "sbhd", "packed")
# Batches: more tiles of keys than multiprocessors, so that persistent blocks of a backward do several.
MANY = 40


# --------------------------------------------------------------------------------------------------------- random calls


class Drawn(NamedTuple):
    """tensors: query, key, value and, if wanted, grad_out, each in a layout of its own. heads: of the query."""

    tensors: list[Tensor]
    layouts: list[str]
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int

    def mask_shape(self, rng: random.Random) -> tuple[int, int, int, int]:
        """Of a mask that broadcasts over any of batches, heads and, more rarely, queries."""
        choices = [1, self.batch], [1, self.heads], [1, self.seqlen_q, self.seqlen_q]
        batch, heads, rows = (rng.choice(sizes) for sizes in choices)
        return batch, heads, rows, self.seqlen_k

    def call(self, rng: random.Random, scales: Sequence[float | None], note: str, **options: Any) -> Call:
        """The first three tensors with one of the scales; None is the usual one, and named twice more usual."""
        scale = rng.choice(scales)
        return Call(*self.tensors[:3], scale=scale, enable_gqa=self.heads > self.kv_heads, note=note, **options)


def draw(
    rng: random.Random,
    seed: int,
    head_dims: Callable[[random.Random], tuple[int, int]],
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    batches: Sequence[int] = (1, 2, 3),
    special_lengths: Sequence[int] = (1, 64, 127, 128, 192, 256, 512),
    special: float = 0.3,
    shortest: int = 1,
    longest: Mapping[int, int] = {},
    shortest_k: int = 1,
    grad_out: bool = False,
) -> Drawn:
    """Tensors of a call that the Hopper kernels take: any lengths, grouped queries, layouts.

    head_dims: draws the query's head_dim and the value's. special: how often a length is one of special_lengths.
    longest: the longest of the others by batch, 900 where it is not named.
    """
    dtype = rng.choice(dtypes)
    batch, kv_heads, group = rng.choice(batches), rng.choice([1, 2, 4]), rng.choice([1, 1, 2, 4])

    def length() -> int:
        if rng.random() < special:
            return rng.choice(special_lengths)
        return rng.randint(shortest, longest.get(batch, 900))

    seqlen_q = length()
    seqlen_k = max(shortest_k, seqlen_q if rng.random() < 0.4 else length())
    head_dim, head_dim_v = head_dims(rng)
    heads = kv_heads * group
    sizes = [(heads, seqlen_q, head_dim), (kv_heads, seqlen_k, head_dim), (kv_heads, seqlen_k, head_dim_v)]
    sizes += [(heads, seqlen_q, head_dim_v)] * grad_out
    layouts = [rng.choice(ALIGNED_LAYOUTS) for _ in sizes]
    tensors = [
        tensor_in_layout((batch, *size), layout, dtype, "cuda", 4 * seed + index)
        for index, (size, layout) in enumerate(zip(sizes, layouts))
    ]
    return Drawn(tensors, layouts, batch, heads, kv_heads, seqlen_q, seqlen_k)


def usual_head_dims(rng: random.Random) -> tuple[int, int]:
    """Often 64 and 128, else any multiple of 8; values of 128 columns for half of those with 192."""
    head_dim = rng.choice([64, 64, 128, 128, 128, 8 * rng.randint(1, 32)])
    return head_dim, 128 if head_dim == 192 and rng.random() < 0.5 else head_dim


# ---------------------------------------------------------------------------------------------------------------- masks


def pattern(name: str, seqlen_q: int, seqlen_k: int, seed: int = 0, device: torch.device | str = "cuda") -> Tensor:
    """What is seen: bool [1, 1, seqlen_q, seqlen_k]."""
    rows, keys = torch.arange(seqlen_q, device=device)[:, None], torch.arange(seqlen_k, device=device)[None, :]
    chance = torch.rand((seqlen_q, seqlen_k), generator=torch.Generator(device).manual_seed(seed), device=device)
    seen = {
        "causal": keys <= rows,
        "window": (keys <= rows) & (keys > rows - 100),
        "documents": rows // 200 == keys // 200,
        "prefix": (keys <= rows) | (keys < seqlen_k // 3),
        "padding": (keys < seqlen_k - seqlen_k // 4).expand(seqlen_q, -1),
        "dead columns": (keys <= rows) & (keys % 200 < 130),
        "random": chance < 0.5,
        "sparse": chance < 2.0 / seqlen_k,
        "diagonal": keys == rows,
        "checkerboard": (keys // 64 + rows // 64) % 2 == 0,
        "all": chance < 2.0,
        "nothing": chance > 2.0,
        "one row": (rows == seqlen_q // 2).expand(-1, seqlen_k),
        "one column": (keys == seqlen_k - 1).expand(seqlen_q, -1),
        "upper": keys > rows + 30,  # the last rows see no key
        "dead rows": (chance < 0.7) & (rows % 3 > 0),
    }[name]
    return seen[None, None].contiguous()


# --------------------------------------------------------------------------------------------------------------- checks


def checker(check_call: Callable[..., dict[str, Tensor]], peers: Sequence[str]) -> Callable[..., dict[str, Tensor]]:
    """check_call on the forced cuda backend, whose attention forward must have run once, and Triton's not.

    peers: PyTorch's kernels whose errors are looked at too, unless a test names others.
    """
    from torch_flashbackend import ops

    def run(call: Call, *, grad: bool = False, kernels: Sequence[str] = tuple(peers)) -> dict[str, Tensor]:
        ops.reset_launch_counts()
        results = check_call(call, backend="cuda", grad=grad, kernels=kernels)
        counts = ops.launch_counts()
        assert counts["flash_forward"] == 1 and "attention_forward" not in counts, counts
        return results

    return run


def gradient_checker(
    plugin: Any, hopper: Callable[[], Any], note: Callable[..., None], peers: Sequence[str]
) -> Callable[..., dict[str, Tensor]]:
    """Judges a call's gradients on the forced cuda backend; grad_out may be given, else it is random and contiguous.

    hopper: the context in which its own backward must run. peers: as of `checker`.
    """

    def run(call: Call, grad_out: Tensor | None = None, kernels: Sequence[str] = tuple(peers)) -> dict[str, Tensor]:
        grad_out = gradient_for(call) if grad_out is None else grad_out
        plugin.disable()
        # A copy: PyTorch's kernels fault on addresses that are not aligned.
        stock = stock_results(call, grad_out.clone(memory_format=torch.contiguous_format), kernels)
        expected = expect(call, grad_out)
        plugin.enable()
        with hopper():
            results = results_of(call, grad_out)
        note(check(results, expected, stock, call.describe()))
        return results

    return run
