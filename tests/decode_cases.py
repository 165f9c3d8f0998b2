"""Calls of a few queries over a cache of keys and values, and the dense call in float64 that each amounts to.

Shared by tests/interpreter/ and tests/gpu/. Imports nothing of torch_flashbackend. What a call must not read (unused
keys, pages of nobody, other batches of the cache) is NaN.
"""

from __future__ import annotations

import dataclasses
import math
import random

import torch
from torch import Tensor

from common import Call, Expected, expect

NAN = math.nan
FEATURES = ("mask", "used", "leftpad", "batch_index", "pages", "window", "causal", "softcap", "alibi", "sinks",
            "logsumexp", "scale")  # fmt: skip


@dataclasses.dataclass
class CacheCall:
    """query [B, H, Sq, D]; key, value as the kernel takes them; `dense`: the same as one call of plain attention.

    options: by the names of DecodeOptions. sinks count as one more key in `dense`, softcap is part of its mask.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    options: dict
    dense: Call
    logsumexp: bool
    note: str

    def expected(self) -> Expected:
        return expect(self.dense)

    def expected_logsumexp(self) -> Tensor:
        query, key = self.dense.query.double(), self.dense.key.double()
        key = key.repeat_interleave(query.size(1) // key.size(1), 1)
        return (query @ key.mT * self.scale + self.dense.attn_mask).logsumexp(-1)


def cache_call(
    seed: int,
    features: tuple[str, ...] = (),
    *,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
    batch: int = 2,
    kv_heads: int = 2,
    group: int = 2,
    queries: int = 1,
    keys: int = 300,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    page: int = 16,
    num_splits: int = 0,
) -> CacheCall:
    """A random call with the given FEATURES."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    head_dim_v = head_dim_v or head_dim
    heads = kv_heads * group

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    query, key, value = normal(batch, heads, queries, head_dim), normal(batch, kv_heads, keys, head_dim), normal(
        batch, kv_heads, keys, head_dim_v)  # fmt: skip
    options: dict = {"num_splits": num_splits}
    scale = rng.choice([0.0, -0.3, 1.0]) if "scale" in features else head_dim**-0.5
    key_index = torch.arange(keys)
    unread = torch.zeros(batch, keys, dtype=torch.bool)
    end = torch.full((batch,), keys)
    if "used" in features:
        end = torch.tensor([rng.choice([0, 1, keys, rng.randint(1, keys), rng.randint(1, keys)]) for _ in range(batch)])
        options["seqused_k"] = end.int()
        unread |= key_index >= end[:, None]
    if "leftpad" in features:
        begin = torch.tensor([rng.randint(0, max(0, int(last) - 1)) for last in end])
        options["leftpad_k"] = begin.int()
        unread |= key_index < begin[:, None]
    bias = torch.zeros(batch, heads, queries, keys, dtype=torch.float64)
    bias = bias.masked_fill(unread[:, None, None], -math.inf)
    bottom_right = "used" in features or rng.random() < 0.5
    offset = torch.zeros(batch, dtype=torch.long)
    is_causal = False
    if {"causal", "window", "alibi"} & set(features):
        options["bottom_right"] = bottom_right
        if bottom_right:
            offset = end - queries
        else:
            options["offset"] = rng.choice([0, 5, keys - queries])
            offset += options["offset"]
    position = torch.arange(queries)[None, :, None] + offset[:, None, None]  # [B, Sq, 1]
    if "window" in features:
        left, right = rng.choice([(0, None), (40, 0), (100, 30), (None, 3), (7, None)])
        options |= {"window_left": left, "window_right": right}
        hidden = torch.zeros(batch, queries, keys, dtype=torch.bool)
        if left is not None:
            hidden |= key_index < position - left
        if right is not None:
            hidden |= key_index > position + right
        bias = bias.masked_fill(hidden[:, None], -math.inf)
    if "causal" in features:
        is_causal = True
        bias = bias.masked_fill((key_index > position)[:, None], -math.inf)
    if "softcap" in features:
        options["softcap"] = rng.choice([1.0, 20.0])
        wide = key.double().repeat_interleave(group, 1)
        scores = query.double() @ wide.mT * scale
        bias = bias + options["softcap"] * torch.tanh(scores / options["softcap"]) - scores
    if "alibi" in features:
        slopes = torch.rand(batch, heads, generator=generator) if rng.random() < 0.5 else torch.rand(
            heads, generator=generator)  # fmt: skip
        options["alibi_slopes"] = slopes
        distance = (position - key_index).abs().double()
        bias = bias - slopes.double().expand(batch, heads)[:, :, None, None] * distance[:, None]
    mask = None
    if "mask" in features:
        shape = (rng.choice([1, batch]), rng.choice([1, heads]), rng.choice([1, queries]), keys)
        seen = torch.rand(shape, generator=generator) < 0.6
        pattern = rng.choice(["random", "prefix", "holes", "nothing for one batch"])
        if pattern == "prefix":
            seen = seen & (key_index < keys // 4)
        elif pattern == "holes":
            seen = seen & (key_index // 70 % 2 == 1)
        elif pattern == "nothing for one batch":
            seen[0] = False
        mask = seen
        if rng.random() < 0.6:
            mask = torch.randn(shape, generator=generator).masked_fill(~seen, -math.inf)
            mask = mask.to(rng.choice([torch.float32, dtype]))
            bias = bias + mask.double()
        else:
            bias = bias.masked_fill(~seen, -math.inf)
    dense_key, dense_value = key, value
    if "sinks" in features:
        sinks = torch.tensor([-3.0, 0.5, 8.0, -math.inf]).repeat(heads)[:heads].contiguous()
        options["sinks"] = sinks
        dense_key = torch.cat([key, torch.zeros_like(key[:, :, :1])], 2)
        dense_value = torch.cat([value, torch.zeros_like(value[:, :, :1])], 2)
        bias = torch.cat([bias, sinks.double()[None, :, None, None].expand(batch, heads, queries, 1)], 3)
    dense = Call(query, dense_key, dense_value, attn_mask=bias, scale=scale, enable_gqa=group > 1)

    hidden = unread[:, None, :, None]
    key, value = key.masked_fill(hidden, NAN), value.masked_fill(hidden, NAN)
    if "pages" in features:
        key, value, options["block_table"] = in_pages(key, value, page, generator)
    elif "batch_index" in features:
        index = torch.randperm(batch + 3, generator=generator)[:batch]
        options["batch_index"] = index.int()
        key, value = (
            torch.full((batch + 3, *tensor.shape[1:]), NAN, dtype=dtype).index_copy(0, index, tensor)
            for tensor in (key, value)
        )

    def there(thing):
        return thing.to(device) if isinstance(thing, Tensor) else thing

    def layout(tensor: Tensor) -> Tensor:
        """Half of the time as a view of [B, S, H, D]."""
        if rng.random() < 0.5:
            return tensor.transpose(1, 2).contiguous().to(device).transpose(1, 2)
        return tensor.contiguous().to(device)

    dense = dataclasses.replace(dense, **{name: there(getattr(dense, name)) for name in
                                          ("query", "key", "value", "attn_mask")})  # fmt: skip
    return CacheCall(
        layout(query), layout(key), layout(value), there(mask), is_causal, scale,
        {name: there(option) for name, option in options.items()}, dense, "logsumexp" in features,
        f"seed {seed} {features} {dtype} B{batch} H{heads}/{kv_heads} Sq{queries} Sk{keys} D{head_dim}/{head_dim_v} "
        f"page {page} splits {num_splits}",
    )  # fmt: skip


def in_pages(key: Tensor, value: Tensor, page: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Caches [B, Hkv, S, D] cut into pages [pages, Hkv, page, D] in random order, and the block table."""
    batch, _, keys, _ = key.shape
    each = -(-keys // page)
    table = torch.randperm(batch * each + 2, generator=generator)[: batch * each].view(batch, each)

    def cut(tensor: Tensor) -> Tensor:
        pages = torch.full((batch * each + 2, tensor.size(1), page, tensor.size(3)), NAN, dtype=tensor.dtype)
        for number in range(batch):
            for index in range(each):
                rows = tensor[number, :, index * page : (index + 1) * page]
                pages[table[number, index], :, : rows.size(1)] = rows
        return pages

    return cut(key), cut(value), table.int()


def random_features(rng: random.Random) -> tuple[str, ...]:
    """None, one, or several of FEATURES, of those that go together."""
    chosen = set(rng.sample(FEATURES, rng.choice([0, 1, 1, 2, 2, 3, 4])))
    if "pages" in chosen:
        chosen -= {"batch_index", "mask"}
        chosen.add("used")  # pages that are not full have to say so
    return tuple(name for name in FEATURES if name in chosen)


def random_cache_call(
    seed: int, device: torch.device | str, dtypes=(torch.float16, torch.bfloat16), longest: int = 2500
) -> CacheCall:
    """Sizes from short lists, so that few kernels are compiled."""
    rng = random.Random(seed)
    head_dim = rng.choice([64, 64, 128, 128, 128, 256, 80, 40, 1])
    head_dim_v = rng.choice([64, 128, 80]) if rng.random() < 0.15 else head_dim
    keys = min(longest, rng.choice([1, 50, 64, 300, 1000, 1024, 2048, 2500]))
    return cache_call(
        seed, random_features(rng), dtype=rng.choice(dtypes), device=device, batch=rng.choice([1, 2, 3]),
        kv_heads=rng.choice([1, 2, 4]), group=rng.choice([1, 2, 4, 8]), queries=rng.choice([1, 1, 1, 2, 3, 8, 16]),
        keys=keys, head_dim=head_dim, head_dim_v=head_dim_v,
        page=rng.choice([16, 64, 256]), num_splits=rng.choice([0, 0, 0, 1, 2, 7, 30, 100]),
    )  # fmt: skip
