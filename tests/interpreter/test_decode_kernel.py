"""The decoding kernel in Triton's interpreter, judged against float64: splits, masks, pages and what a cache has."""

from __future__ import annotations

import itertools
import math
import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter needs TRITON_INTERPRET=1 in the environment", allow_module_level=True)

from torch_flashbackend import kv_cache as kv_cache_module
from torch_flashbackend.kernels.triton import attention, counters, decode_plan, kv_cache
from torch_flashbackend.kernels.triton.decode_plan import DecodeOptions
from torch_flashbackend.kernels.triton.tiles import DecodeTile

from append_cases import append_call, misplaced
from common import check, error_of, expect, simple_call
from decode_cases import FEATURES, CacheCall, cache_call, random_cache_call
from sampling import ALL

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
HALF, SINGLE = torch.float16, torch.float32


def small_tile(most_rows: int = 64):
    """In place of ``decode_tiles``: 16 keys, so that few keys are many tiles."""
    return lambda *of_call: (DecodeTile(max(16, min(most_rows, decode_plan._power_of_two(of_call[3]))), 16, 4, 2, 2),)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Whatever ran, the counters are zero again."""
    monkeypatch.setattr(decode_plan, "decode_tiles", small_tile())
    attention._plans.clear()
    yield
    attention._plans.clear()
    assert all(not bool(tensor.any()) for tensor in counters._tensors.values())


def run_and_check(call: CacheCall) -> torch.Tensor:
    batch, heads, queries, _ = call.query.shape
    out = torch.full((batch, heads, queries, call.value.size(3)), math.nan, dtype=call.query.dtype)
    logsumexp = torch.full((batch, heads, queries), math.nan) if call.logsumexp else None
    kv_cache.decode(call.query, call.key, call.value, out, logsumexp, call.scale, DecodeOptions(**call.options),
                    call.mask, call.is_causal)  # fmt: skip
    check({"out": out}, call.expected(), None, call.note)
    if logsumexp is not None:
        expected = call.expected_logsumexp()
        assert torch.equal(expected.isinf(), logsumexp.isinf()), call.note
        torch.testing.assert_close(logsumexp.double(), expected, atol=1e-4, rtol=1e-5, msg=call.note)
    return out


@pytest.mark.parametrize("features", [(name,) for name in FEATURES], ids=str)
@pytest.mark.parametrize("num_splits", [1, 5])
def test_each_feature(monkeypatch, features, num_splits):
    features = (*features, "used") if features == ("pages",) else features
    for seed in range(2):
        monkeypatch.setattr(decode_plan, "merges_by_launch", lambda *_, seed=seed: seed == 1)
        attention._plans.clear()
        dtype = (HALF, SINGLE)[seed % 2]
        run_and_check(cache_call(seed, features, queries=3, keys=70, kv_heads=1, num_splits=num_splits, dtype=dtype))


ALL_PAIRS = [pair for pair in itertools.combinations(FEATURES, 2) if not {"pages", "batch_index"} <= set(pair)
         and not {"pages", "mask"} <= set(pair)]  # fmt: skip


# A third where nobody asks for all of them: FLASHBACKEND_ALL_CASES=1.
PAIRS = ALL_PAIRS if ALL else ALL_PAIRS[1::3]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_pairs_of_features(monkeypatch, pair):
    seed = ALL_PAIRS.index(pair)
    monkeypatch.setattr(decode_plan, "merges_by_launch", lambda *_: seed % 2 == 1)
    pair = (*pair, "used") if "pages" in pair and "used" not in pair else pair
    run_and_check(cache_call(seed, pair, queries=2, num_splits=3, keys=50, kv_heads=1, batch=1 + seed % 2))


# Of the first ones those that are of few programs, and of most features.
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, 7, 13, 20])
def test_random_calls(seed):
    run_and_check(random_cache_call(seed, "cpu", (HALF, SINGLE), longest=120))


def test_masks_of_more_tiles_than_are_looked_at_at_once():
    for seed in range(4):
        run_and_check(cache_call(seed, ("mask",), batch=1, kv_heads=1, keys=1100, num_splits=1 + seed % 2))


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("tiles", [7, 32, 33, 65, 128, 141])
def test_tiles_full_mixed_and_hidden_in_every_word(tiles, kind):
    """A mask of one row for all queries is looked at in 8, 32, 64 or 128 tiles at once; no hidden tile is read."""
    generator = torch.Generator().manual_seed(tiles)
    seen = torch.rand(tiles, 16, generator=generator) < torch.randint(0, 3, (tiles, 1), generator=generator) / 2
    seen[-1, 11:] = False  # the last tile has 11 keys
    hidden = ~seen.any(1, keepdim=True).expand(-1, 16).flatten()[:-5]
    mask = seen.flatten()[:-5]
    attn_mask = mask if kind == "bool" else torch.zeros(len(mask)).masked_fill(~mask, -math.inf)
    call = simple_call(1, 1, 1, len(mask), 16, dtype=HALF, device="cpu", attn_mask=attn_mask[None, None, None])
    key, value = (tensor.masked_fill(hidden[:, None], math.nan) for tensor in (call.key, call.value))
    for num_splits in (1, 2):
        out = torch.full_like(call.query, math.nan)
        kv_cache.decode(call.query, key, value, out, None, call.softmax_scale, DecodeOptions(num_splits=num_splits),
                        call.attn_mask)  # fmt: skip
        check({"out": out}, expect(call), None, f"{tiles} tiles, {num_splits} splits")


@pytest.mark.parametrize("by_launch", [False, True])
@pytest.mark.parametrize(("num_splits", "group"), [(2, 1), (40, 1), (65, 1), (2, 16), (17, 16)])
def test_numbers_of_splits(monkeypatch, num_splits, group, by_launch):
    """The last program loads 64 results of one row of 128 columns at a time, or 4 of 16 rows; a launch 64 of a row."""
    monkeypatch.setattr(decode_plan, "merges_by_launch", lambda *_: by_launch)
    run_and_check(cache_call(1, head_dim=128, group=group, kv_heads=1, keys=65 * 16, num_splits=num_splits, batch=1))


@pytest.mark.parametrize(
    "head_dims", [(1, 1), (40, 40), (64, 64), (80, 80), (128, 128), (256, 256), (64, 128), (80, 40)]
)
def test_head_dims(head_dims):
    head_dim, head_dim_v = head_dims
    run_and_check(cache_call(2, head_dim=head_dim, head_dim_v=head_dim_v, keys=100, queries=2, num_splits=3))


@pytest.mark.parametrize(("group", "queries"), [(1, 1), (3, 5), (8, 2), (32, 1), (32, 2), (5, 16)])
def test_rows_in_one_and_several_tiles(monkeypatch, group, queries):
    monkeypatch.setattr(decode_plan, "decode_tiles", small_tile(32))
    for features in ((), ("causal", "logsumexp"), ("mask",)):
        run_and_check(cache_call(queries, features, group=group, queries=queries, keys=60, kv_heads=1, batch=1,
                                 num_splits=3))  # fmt: skip


@pytest.mark.parametrize("page", [1, 7, 16, 64])
def test_page_sizes(page):
    for seed in range(2):
        run_and_check(cache_call(seed, ("pages", "used", "causal"), page=page, keys=140, num_splits=1 + 2 * seed))


@pytest.mark.parametrize(
    "layout", ["bhsd", "bshd", "packed", "expanded_batch", "unaligned", "odd_strides", "strided_last"]
)
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float"])
def test_through_the_way_of_every_forward(layout, kind):
    """attention.forward without logsumexp, in any memory."""
    mask = None
    if kind == "bool":
        mask = (torch.rand(2, 1, 3, 200) < 0.5).mul(torch.arange(200) < 90).bool()
    elif kind == "float":
        mask = torch.randn(1, 4, 1, 200).masked_fill(torch.arange(200) > 90, -math.inf)
    call = simple_call(2, 4, 3, 200, 64, kv_heads=2, dtype=HALF, device="cpu", layout=layout, attn_mask=mask,
                       is_causal=kind == "causal")  # fmt: skip
    out = torch.full(call.query.shape, math.nan, dtype=HALF)
    attention.forward(call.query, call.key, call.value, mask, None, 0.0, call.is_causal, call.softmax_scale, out, None,
                      False)  # fmt: skip
    assert [type(plan) for plan in attention._plans.values()] == [decode_plan.DecodePlan]
    check({"out": out}, expect(call), None, f"{layout} {kind}")


def test_tiles_that_nobody_sees_are_not_read():
    call = cache_call(5, queries=2, keys=320)
    mask = torch.zeros(2, 320, dtype=torch.bool)
    mask[0, 37], mask[1, 250:260] = True, True
    unread = torch.ones(320, dtype=torch.bool)
    unread[32:48] = unread[240:272] = False
    for attn_mask in (mask[None, None], torch.zeros(2, 320).masked_fill(~mask, -math.inf)[None, None]):
        out = []
        for number in (0.0, math.nan):
            key, value = (t.clone().masked_fill(unread[:, None], number) for t in (call.key, call.value))
            out.append(torch.empty_like(call.query))
            kv_cache.decode(call.query, key, value, out[-1], None, 0.125, DecodeOptions(num_splits=3), attn_mask)
        assert torch.equal(*out) and not bool(out[0].isnan().any())


def test_a_row_of_lowest_masks_gives_the_mean_and_two_of_them_zeros():
    call = cache_call(6, keys=100, dtype=SINGLE)
    lowest = torch.finfo(SINGLE).min
    for number, expected in ((lowest, call.value.double().mean(2)), (-math.inf, torch.zeros(2, 2, 64))):
        out = torch.full_like(call.query, math.nan)
        mask = torch.full((1, 1, 1, 100), number)
        kv_cache.decode(call.query, call.key, call.value, out, None, 0.125, DecodeOptions(num_splits=4), mask)
        torch.testing.assert_close(
            out[:, :, 0].double(), expected.repeat_interleave(2, 1).double(), atol=1e-6, rtol=1e-5
        )


def test_nan_stays_where_it_is():
    """In a query: in its row alone, though rows share a tile. In a hidden key: nowhere."""
    call = cache_call(7, queries=2, keys=100, num_splits=3)
    call.query[0, 1, 1, 5] = math.nan
    mask = torch.ones(1, 1, 1, 100, dtype=torch.bool)
    mask[..., 50] = False
    call.key[:, :, 50] = math.nan
    out = torch.empty_like(call.query)
    kv_cache.decode(call.query, call.key, call.value, out, None, 0.125, DecodeOptions(num_splits=3), mask)
    nan = torch.zeros(2, 4, 2, dtype=torch.bool)
    nan[0, 1, 1] = True
    assert torch.equal(out.isnan().all(-1), nan) and torch.equal(out.isnan().any(-1), nan)


@pytest.mark.parametrize("rotary", ["", "interleaved"])
def test_nothing_is_written_outside_of_the_cache(rotary):
    given, whole = misplaced(append_call(0, rotary=rotary))
    before = [tensor.clone() for tensor in whole]
    query, key, value, key_cache, value_cache = (
        given[name].transpose(1, 2) for name in ("q", "k", "v", "k_cache", "v_cache")
    )
    kv_cache_module._append_cuda(
        query, key, value, key_cache, value_cache, given.get("rotary_cos"), given.get("rotary_sin"),
        given["cache_seqlens"], None, None, None, True, True,
    )  # fmt: skip
    for tensor, was in zip(whole, before):
        assert torch.equal(tensor, was)


@pytest.mark.parametrize("where", ["plain", "batch_index", "pages"])
@pytest.mark.parametrize("rotary", ["", "interleaved", "halves"])
def test_adding_to_the_cache(where, rotary):
    """The kernels of attend, which on CPU tensors runs plain PyTorch."""
    for seed, causal in enumerate((False, True)):
        for queries, new in ((1, 1), (3, 20)):
            options = {"where": where, "rotary": rotary, "causal": causal, "queries": queries, "new": new}
            case = append_call(seed, leftpad=seed == 1, **options)
            given = case.arguments
            query, key, value, key_cache, value_cache = (
                given[name].transpose(1, 2) for name in ("q", "k", "v", "k_cache", "v_cache")
            )
            turned = kv_cache_module._append_cuda(
                query, key, value, key_cache, value_cache, given.get("rotary_cos"), given.get("rotary_sin"),
                given["cache_seqlens"], given.get("cache_leftpad"), given.get("cache_batch_idx"),
                given.get("block_table"), given.get("rotary_interleaved", True), causal,
            )  # fmt: skip
            assert error_of(given["k_cache"], case.key_cache).maximum < 1e-5
            assert error_of(given["v_cache"], case.value_cache).maximum == 0.0
            if rotary:
                assert error_of(turned.transpose(1, 2), case.query).maximum < 1e-5
