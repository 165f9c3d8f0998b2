"""What adding to a cache must give, in float64: shared by tests/, tests/interpreter/ and tests/gpu/.

Imports nothing of torch_flashbackend.
"""

from __future__ import annotations

import dataclasses
import random

import torch
from torch import Tensor


@dataclasses.dataclass
class Append:
    """Arguments of ``attend``, in its layout, and what the caches and the query must be afterwards, in float64."""

    arguments: dict
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor


def misplaced(case: Append) -> tuple[dict, list[Tensor]]:
    """(arguments, everything around the caches): lengths before the first row and behind the last one of the caches.

    The caches are a part of larger tensors, of which nothing may change.
    """
    arguments = dict(case.arguments)
    capacity = arguments["k_cache"].size(1)
    lengths = [-capacity - 1, capacity, 3 * capacity]
    arguments["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device=arguments["k_cache"].device)
    whole = []
    for name in ("k_cache", "v_cache"):
        cache = arguments[name]
        whole.append(torch.cat((cache, cache.flip(0), cache)))
        arguments[name] = whole[-1][len(cache) : 2 * len(cache)]
    return arguments, whole


def append_call(
    seed: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    rotary: str = "interleaved",
    where: str = "plain",
    leftpad: bool = False,
    causal: bool = True,
    queries: int = 3,
    new: int = 3,
    head_dim: int = 32,
    heads: tuple[int, int] = (4, 2),
) -> Append:
    """rotary: "interleaved", "halves" or ""; where: "plain", "batch_index" or "pages"."""
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    batch, capacity, page = 3, 48, 16

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    query, key = normal(batch, queries, heads[0], head_dim), normal(batch, new, heads[1], head_dim)
    value = normal(batch, new, heads[1], head_dim)
    lengths = torch.tensor([rng.randint(1, capacity - new) for _ in range(batch)])
    pads = torch.tensor([rng.randint(0, int(length)) for length in lengths]) if leftpad else torch.zeros_like(lengths)
    arguments: dict = {"cache_seqlens": lengths.int(), "causal": causal}
    if leftpad:
        arguments["cache_leftpad"] = pads.int()
    index = torch.arange(batch)
    if where == "pages":
        table = torch.randperm(batch * 3 + 2, generator=generator)[: batch * 3].view(batch, 3)
        arguments["block_table"] = table.int()
        key_cache, value_cache = (normal(batch * 3 + 2, page, heads[1], head_dim) for _ in range(2))
    else:
        key_cache, value_cache = (normal(batch + 2, capacity, heads[1], head_dim) for _ in range(2))
        if where == "batch_index":
            index = torch.randperm(batch + 2, generator=generator)[:batch]
            arguments["cache_batch_idx"] = index.int()
        else:
            key_cache, value_cache = key_cache[:batch], value_cache[:batch]
    turned_query, turned_key = query.double(), key.double()
    if rotary:
        half = rng.choice([head_dim // 2, head_dim // 4])
        angles = torch.rand(capacity + 3, half, generator=generator) * 6
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        arguments |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": rotary == "interleaved"}
        steps = torch.arange(max(queries, new))
        begin = (lengths - pads)[:, None]
        turned_key = turned(turned_key, cos, sin, begin + steps[:new], rotary == "interleaved")
        turned_query = turned(turned_query, cos, sin, begin + steps[:queries] * causal, rotary == "interleaved")
    expected_key, expected_value = key_cache.double(), value_cache.double()
    for number in range(batch):
        for step in range(new):
            row = int(lengths[number]) + step
            place = (table[number, row // page], row % page) if where == "pages" else (index[number], row)
            expected_key[place], expected_value[place] = turned_key[number, step], value[number, step].double()
    arguments |= {"q": query, "k": key, "v": value, "k_cache": key_cache, "v_cache": value_cache}
    there = {n: t.to(device).clone() if isinstance(t, Tensor) else t for n, t in arguments.items()}
    return Append(there, turned_query.to(device), expected_key.to(device), expected_value.to(device))


def turned(tensor: Tensor, cos: Tensor, sin: Tensor, position: Tensor, interleaved: bool) -> Tensor:
    """[B, S, H, D] as complex numbers, times those of the angles."""
    half = cos.size(1)
    part = tensor[..., : 2 * half]
    pairs = part.unflatten(-1, (half, 2)) if interleaved else part.unflatten(-1, (2, half)).mT
    factor = torch.complex(cos.double(), sin.double())[position][:, :, None]
    result = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * factor)
    result = result.flatten(-2) if interleaved else result.mT.flatten(-2)
    return torch.cat([result, tensor[..., 2 * half :]], -1)
