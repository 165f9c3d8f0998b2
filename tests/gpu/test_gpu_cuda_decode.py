"""The Hopper decoding kernel: values against float64, every way to split keys, graphs, streams, repeatability."""

from __future__ import annotations

import dataclasses
import math
import os
import random

import pytest
import torch
import torch.nn.functional as F

from common import (
    Call,
    check,
    check_logsumexp,
    error_of,
    expect,
    forget_plans,
    gradient_for,
    results_of,
    simple_call,
    tensor_in_layout,
)

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.cuda_only,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (compute capability 9.0)"),
]
RANDOM_CALLS = int(os.environ.get("FLASHBACKEND_RANDOM_CALLS", "200"))
CHUNK = 10
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
SPLITS = (1, 2, 4, 8)
LAYOUTS = ("bhsd", "bshd", "sbhd", "packed")
# Few, since each is compiled for 16 and 32 rows.
KINDS = ("few", "half", "most", "prefix", "left", "window", "one")
HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (80, 80), (192, 128), (40, 40))


@pytest.fixture
def decoded(plugin, monkeypatch):
    """How often the kernel was launched since the test began; all calls that it can compute are its."""
    from torch_flashbackend import ops
    from torch_flashbackend.kernels.cuda import decode_tiles

    monkeypatch.setattr(decode_tiles, "pays", lambda units, seqlen_k: True)
    forget_plans()
    ops.reset_launch_counts()
    yield lambda: ops.launch_counts().get("flash_decode", 0)
    forget_plans()


def plan_of(call: Call, out, splits: int | None = None):
    """The call's plan, or one with so many splits."""
    from torch_flashbackend.kernels.cuda import decode

    chosen = None
    if splits is not None:
        kv_heads, rows = call.key.size(1), call.query.size(2) * call.query.size(1) // call.key.size(1)
        usual = decode.specialise(
            call.query.size(3), call.value.size(3), call.query.dtype, units=call.query.size(0) * kv_heads, rows=rows,
            seqlen_k=call.key.size(2), is_masked=call.attn_mask is not None,
        )  # fmt: skip
        chosen = usual._replace(splits=splits)
    return decode.DecodePlan(call.query, call.key, call.value, out, call.softmax_scale, call.attn_mask, chosen)


def run_plan(call: Call, splits: int | None = None):
    """(out, logsumexp) of a call, all of them written over NaN."""
    shape = (*call.query.shape[:3], call.value.size(3))
    out = torch.full(shape, math.nan, dtype=call.query.dtype, device=call.query.device)
    logsumexp = torch.full(shape[:3], math.nan, dtype=SINGLE, device=call.query.device)
    plan_of(call, out, splits)(call.query, call.key, call.value, out, logsumexp, call.attn_mask)
    return out, logsumexp


def check_plan(call: Call, splits: int) -> None:
    out, logsumexp = run_plan(call, splits)
    what = f"{call.describe()} {splits} splits"
    check({"out": out}, expect(call), None, what)
    check_logsumexp(logsumexp, call, what)


def decode_call(seed: int) -> Call:
    """Any layout, dtype, length and group of query heads, without a mask."""
    rng = random.Random(seed)
    dtype = rng.choice([HALF, BFLOAT])
    batch, kv_heads = rng.choice([1, 1, 2, 3, 17]), rng.choice([1, 2, 8])
    group, queries = rng.choice([(1, 1), (4, 1), (4, 1), (8, 2), (16, 1), (3, 5), (1, 16), (5, 6), (16, 2), (4, 8)])
    keys = rng.choice([1, 15, 64, 65, 100, 1000, 1024, 4096, 5000, rng.randint(1, 3000)])
    keys = min(keys, 2**20 // (batch * kv_heads * group))  # the oracle has a float64 key for each query head
    head_dim, head_dim_v = rng.choice(HEAD_DIMS)
    sizes = [(kv_heads * group, queries, head_dim), (kv_heads, keys, head_dim), (kv_heads, keys, head_dim_v)]
    tensors = [
        tensor_in_layout((batch, *size), rng.choice(LAYOUTS), dtype, "cuda", 4 * seed + index)
        for index, size in enumerate(sizes)
    ]
    return Call(*tensors, scale=rng.choice([None, None, 0.3, 1.0, 0.01]), enable_gqa=group > 1,
                note=f"decode call {seed}")  # fmt: skip


def row_mask(size: tuple[int, ...], seed: int, kind: str = "", offset: int = 0) -> torch.Tensor:
    """A bool mask of this size, one kind of row in all of it, `offset` bytes behind a multiple of 16."""
    rng = random.Random(seed)
    generator = torch.Generator(device="cuda").manual_seed(seed)
    keys = size[-1]
    kind = kind or rng.choice(KINDS)
    index = torch.arange(keys, device="cuda")
    if kind in ("few", "half", "most"):
        part = {"few": 0.01, "half": 0.5, "most": 0.99}[kind]
        mask = torch.rand(size, generator=generator, device="cuda") < part
    else:
        lengths = torch.randint(1, keys + 1, (*size[:-1], 1), generator=generator, device="cuda")
        starts = lengths * rng.choice([0, 1, 3]) // 4 if kind == "window" else 0
        mask = (index >= starts) & (index < lengths)
        if kind == "left":
            mask = mask.flip(-1)
    if kind == "one":
        mask = index == lengths - 1
    if rng.random() < 0.3 and mask.size(0) > 1:
        mask[rng.randrange(mask.size(0))] = False
    storage = torch.zeros(mask.numel() + 16, dtype=torch.bool, device="cuda")
    return storage[offset : offset + mask.numel()].view(size).copy_(mask)


def masked_call(seed: int) -> Call:
    """The same with a mask: one row for all, a batch or a key head, at any address."""
    call, rng = decode_call(seed), random.Random(-1 - seed)
    batch, heads, queries, keys = *call.query.shape[:3], call.key.size(2)
    of_head = heads if heads == call.key.size(1) and rng.random() < 0.5 else 1
    shape = (rng.choice([1, batch]), of_head, 1, keys)
    mask = row_mask(shape, seed, offset=rng.choice([0, 0, 1, 4, 8, 15]))
    if rng.random() < 0.5:
        mask = mask.expand(-1, -1, queries, -1) if of_head > 1 else mask.expand(-1, heads, queries, -1)
    elif mask.shape[:2] == (1, 1) and rng.random() < 0.5:
        mask = mask[0, 0]
    return dataclasses.replace(call, attn_mask=mask, note=f"masked decode call {seed}")


# --------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("first", range(0, RANDOM_CALLS, CHUNK))
def test_random_calls(check_call, decoded, first):
    for seed in range(first, min(first + CHUNK, RANDOM_CALLS)):
        check_call(decode_call(seed), grad=False, backend="cuda", kernels=("flash", "math"))
        assert decoded() == 1  # check_call counts anew


@pytest.mark.parametrize("first", range(0, RANDOM_CALLS, CHUNK))
def test_random_masks(check_call, decoded, first):
    for seed in range(first, min(first + CHUNK, RANDOM_CALLS)):
        check_call(masked_call(seed), grad=False, backend="cuda", kernels=("math",))
        assert decoded() == 1


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_masks(kind, splits, head_dim):
    """Rows that begin anywhere, end anywhere and are longer than a look; one batch may see nothing."""
    for seed, keys in enumerate((1, 63, 64, 1000, 1024, 4159)):
        mask = row_mask((3, 1, 1, keys), 7 * seed, kind, offset=seed % 4)
        check_plan(simple_call(3, 12, 1, keys, head_dim, kv_heads=3, seed=keys, attn_mask=mask), splits)
    mask = row_mask((1, 1, 1, 40_000), 3, kind)
    check_plan(simple_call(1, 4, 1, 40_000, head_dim, kv_heads=1, attn_mask=mask), splits)


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("rows", [(1, 4), (2, 4), (1, 32), (2, 16)], ids=str)
def test_masks_of_other_tiles(head_dims, rows):
    queries, group = rows
    call = simple_call(2, 2 * group, queries, 1100, head_dims[0], head_dim_v=head_dims[1], kv_heads=2, dtype=HALF)
    for kind in ("half", "prefix"):
        check_plan(dataclasses.replace(call, attn_mask=row_mask((2, 1, 1, 1100), 5, kind)), 4)


def test_a_mask_for_each_head():
    call = simple_call(2, 3, 1, 700, 64, attn_mask=row_mask((2, 3, 1, 700), 1, "half", offset=3))
    for splits in SPLITS:
        check_plan(call, splits)


def test_whatever_is_not_zero_is_true():
    numbers = torch.randint(0, 3, (2, 1, 1, 901), device="cuda", dtype=torch.uint8)
    numbers[numbers == 2] = 128
    call = simple_call(2, 8, 1, 901, 64, kv_heads=2, attn_mask=numbers.bool())
    as_they_are = dataclasses.replace(call, attn_mask=numbers.view(torch.bool))
    assert torch.equal(run_plan(as_they_are)[0], run_plan(call)[0])
    check_plan(call, 2)


@pytest.mark.parametrize("keys", [8192, 8111])
def test_reads_no_tile_that_the_mask_hides(keys):
    """A static cache, filled in part and, here, NaN where it is not."""
    call = simple_call(
        2, 8, 1, keys, 128, kv_heads=2, attn_mask=torch.arange(keys, device="cuda").expand(2, 1, 1, -1) < 1000
    )
    call = dataclasses.replace(call, attn_mask=call.attn_mask.contiguous())
    poisoned = dataclasses.replace(call, key=call.key.clone(), value=call.value.clone())
    poisoned.key[:, :, 1024:] = poisoned.value[:, :, 1024:] = math.nan
    for splits in SPLITS:
        check_plan(call, splits)
        assert torch.equal(run_plan(poisoned, splits)[0], run_plan(call, splits)[0])


def test_a_captured_graph_sees_each_new_mask():
    call = simple_call(
        2, 8, 1, 2000, 128, kv_heads=2, attn_mask=torch.zeros(2, 1, 1, 2000, device="cuda", dtype=torch.bool)
    )
    out, mask = torch.empty_like(call.query), call.attn_mask
    plan = plan_of(call, out)
    plan(call.query, call.key, call.value, out, None, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask.logical_not_()
        plan(call.query, call.key, call.value, out, None, mask)
    for seed in range(7):
        mask.copy_(row_mask((2, 1, 1, 2000), seed))
        graph.replay()
        check({"out": out}, expect(call), None, f"mask {seed}")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("splits", SPLITS)
def test_splits(splits, head_dim):
    """More splits than tiles too: blocks without a key."""
    for keys in (1, 17, 64, 1000, 2500):
        check_plan(simple_call(2, 12, 1, keys, head_dim, kv_heads=3, seed=keys), splits)


@pytest.mark.parametrize("rows", [(16, 1), (8, 4), (4, 8), (3, 7)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows(head_dim, rows):
    group, queries = rows
    call = simple_call(2, 2 * group, queries, 1234, head_dim, kv_heads=2, dtype=HALF)
    for splits in SPLITS:
        check_plan(call, splits)


@pytest.mark.parametrize("group", range(1, 17))
def test_groups_of_query_heads(check_call, decoded, group):
    check_call(simple_call(2, 2 * group, 1, 300, 128, kv_heads=2), grad=False, backend="cuda", kernels=("math",))
    assert decoded() == 1


@pytest.mark.parametrize("batch", [(32, 8), (32, 32), (8, 1)], ids=str)
def test_usual_sizes(check_call, decoded, batch):
    for keys in (1024, 8192):
        for size in (1, 8):
            call = simple_call(size, batch[0], 1, keys, 128, kv_heads=batch[1])
            check_call(call, grad=False, backend="cuda", kernels=("flash", "cudnn"))


@pytest.mark.parametrize("splits", [1, 8])
def test_many_keys(splits):
    """As many as the kernel adds up."""
    check_plan(simple_call(1, 4, 1, 2**18, 64, kv_heads=1), splits)


@pytest.mark.parametrize("growth", [(6.0, 30.0), (30.0, 6.0)])
def test_a_maximum_that_moves_through_the_keys(growth):
    """Every rescaling of the output counts, and every weight of a merge."""
    call = simple_call(1, 4, 1, 2000, 64, kv_heads=1)
    factors = torch.linspace(*growth, 2000, device="cuda")[:, None]
    call = dataclasses.replace(call, key=(call.key.float() * factors).to(BFLOAT))
    for splits in SPLITS:
        check_plan(call, splits)


def test_huge_scores_give_one_key_all_the_weight():
    call = simple_call(1, 4, 1, 1000, 64, kv_heads=1)
    query, key = torch.ones_like(call.query), torch.zeros_like(call.key)
    key[:, :, 640] = 1e4
    call = dataclasses.replace(call, query=query, key=key)
    for splits in SPLITS:
        out, _ = run_plan(call, splits)
        assert torch.equal(out, call.value[:, :, 640:641].expand_as(out))
    out, _ = run_plan(dataclasses.replace(call, key=-key), 8)
    assert error_of(out, expect(dataclasses.replace(call, key=-key)).values["out"]).finite


def test_nan_and_infinity_count_where_they_are_seen_and_nowhere_else():
    """A cache filled in part: what lies behind the keys in use is NaN."""
    storage = [torch.full((2, 2, 500, 192), math.nan, device="cuda", dtype=BFLOAT) for _ in range(2)]
    source = simple_call(2, 8, 1, 333, 128, kv_heads=2)
    key, value = (tensor[:, :, 100:433, 32:160] for tensor in storage)
    key.copy_(source.key)
    value.copy_(source.value)
    call = dataclasses.replace(source, key=key, value=value)
    for splits in SPLITS:
        assert torch.equal(run_plan(call, splits)[0], run_plan(source, splits)[0])
    value[0, 0, 200, 5] = math.inf
    key[1, 1, 10] = math.nan
    out, logsumexp = run_plan(call, 4)
    assert out[0, :4, 0, 5].isinf().all() and out[0, :4, 0, :5].isfinite().all() and out[0, 4:].isfinite().all()
    assert out[1, 4:].isnan().all() and out[1, :4].isfinite().all()
    assert logsumexp[1, 4:].isnan().all() and logsumexp[:1].isfinite().all()


# ------------------------------------------------------------------------------------------------------ whole operators


@pytest.mark.parametrize("masked", [None, "masked"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_logsumexp_and_gradients(check_call, plugin, decoded, head_dim, masked):
    call = simple_call(2, 8, 4, 700, head_dim, kv_heads=2, attn_mask=masked and row_mask((2, 1, 1, 700), 4, "half"))
    with plugin.sdpa_backend("cuda"):
        out, logsumexp = plugin.attention(
            call.query, call.key, call.value, call.attn_mask, enable_gqa=True, return_lse=True
        )  # fmt: skip
        assert torch.equal(out, call.run())
    assert decoded() == 2
    check_logsumexp(logsumexp, call, call.describe())
    grad_out = gradient_for(call)
    with plugin.sdpa_backend("cuda"):
        check(results_of(call, grad_out), expect(call, grad_out), None, call.describe())


def test_causal_calls_and_most_masks_are_not_its(check_call, decoded):
    """Of several rows, one for each of some query heads, of floats, or with keys that do not follow each other."""
    row = torch.rand(300, device="cuda") < 0.5
    rows = (torch.rand(1, 1, 4, 300, device="cuda") < 0.5, torch.rand(1, 4, 1, 300, device="cuda") < 0.5,
            torch.zeros(1, 1, 1, 300, device="cuda", dtype=BFLOAT), row.repeat_interleave(2)[None, ::2])  # fmt: skip
    for mask in rows:
        call = simple_call(1, 4, 4 if mask.dim() == 4 and mask.size(2) == 4 else 1, 300, 64, kv_heads=1, attn_mask=mask)
        check_call(call, grad=False, backend="cuda")
    check_call(simple_call(1, 4, 1, 300, 64, kv_heads=1, is_causal=True), grad=False, backend="cuda")
    assert decoded() == 0
    check_call(simple_call(1, 4, 1, 300, 64, kv_heads=1, attn_mask=row[None]), grad=False, backend="cuda")
    assert decoded() == 1


def test_keys_and_values_that_are_expanded_over_heads(check_call, decoded):
    tensors = [tensor_in_layout((2, 8, length, 64), layout, HALF, "cuda", seed)
               for seed, (layout, length) in enumerate((("bhsd", 1), ("expanded_heads", 150), ("expanded_heads", 150)))
               ]  # fmt: skip
    check_call(Call(*tensors), grad=False, backend="cuda")
    assert decoded() == 1


def test_many_batches(check_call, decoded):
    check_call(simple_call(65_535, 2, 1, 20, 16, kv_heads=1), grad=False, backend="cuda", kernels=("math",))
    assert decoded() == 1


# ----------------------------------------------------------------------------------------------- graphs, streams, order


@pytest.mark.parametrize("masked", [None, "masked"])
def test_equal_bits_every_time_while_the_gpu_is_busy(masked):
    """A race between the blocks of a launch, or of two, would show as another result now and then."""
    call = simple_call(3, 16, 1, 8000, 128, kv_heads=4, attn_mask=masked and row_mask((3, 1, 1, 8000), 2, "most"))
    other = torch.randn(2048, 2048, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(4)]
    for splits in SPLITS:
        first, _ = run_plan(call, splits)
        outs = [torch.full_like(first, math.nan) for _ in range(200)]
        plan = plan_of(call, first, splits)
        torch.cuda.synchronize()
        for turn, out in enumerate(outs):
            with torch.cuda.stream(streams[turn % 4]):
                if turn % 3 == 0:
                    other @ other
                plan(call.query, call.key, call.value, out, None, call.attn_mask)
        torch.cuda.synchronize()
        assert all(torch.equal(first, out) for out in outs), splits


@pytest.mark.parametrize("splits", SPLITS)
def test_a_captured_graph_decodes_new_data(splits):
    """Each launch begins before the one that makes its query has ended; several graphs at once."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    call = simple_call(2, 8, 1, 4096, 128, kv_heads=2)
    query, key, value = call.query, call.key, call.value
    plan = plan_of(call, torch.empty_like(query), splits)

    def step():
        first, second = torch.empty_like(query), torch.empty_like(query)
        plan(query, key, value, first, None)
        plan(first, key, value, second, None)
        plan(second, key, value, first, None)
        return first, second

    step()
    graphs, captured = [], []
    for _ in range(3):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            captured.append(step())
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(4):
        query.normal_(generator=generator)
        key.normal_(generator=generator)
        expected = [query]
        for _ in range(3):
            expected.append(torch.empty_like(query))
            plan(expected[-2], key, value, expected[-1], None)
            torch.cuda.synchronize()
        for _ in range(20):
            for graph, stream in zip(graphs, streams):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for first, second in captured:
            assert torch.equal(first, expected[3]) and torch.equal(second, expected[2])


@pytest.mark.parametrize("before", ["fill", "copy", "kernels", "two streams"])
def test_a_launch_waits_for_what_is_before_it(plugin, decoded, before):
    """In a graph and in a stream: it begins before that has ended, be it a kernel, a copy or another stream's work."""
    call = simple_call(1, 4, 1, 4000, 128, kv_heads=1)
    source = torch.randn_like(call.query)
    large = torch.randn(4096, 4096, device="cuda", dtype=BFLOAT)
    side = torch.cuda.Stream()

    def make_query(target):
        if before == "fill":
            target.fill_(0.25)
        elif before == "copy":
            target.copy_(source)
        elif before == "kernels":
            torch.mm(large, large)
            torch.add(source, 1.0, out=target)
        else:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.mm(large, large)
                target.copy_(source)
            torch.cuda.current_stream().wait_stream(side)

    def step(query):
        make_query(query)
        with plugin.sdpa_backend("cuda"):
            return F.scaled_dot_product_attention(query, call.key, call.value, enable_gqa=True)

    query = torch.empty_like(call.query)
    make_query(query)
    torch.cuda.synchronize()
    expected = expect(dataclasses.replace(call, query=query.clone()))
    for _ in range(30):
        query.fill_(math.nan)
        check({"out": step(query)}, expected, None, before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        query.fill_(math.nan)
        out = step(query)
    for _ in range(30):
        graph.replay()
    check({"out": out}, expected, None, f"{before} in a graph")
    assert decoded() == 31


@pytest.mark.parametrize(("batch", "kv_heads", "keys"), [(1, 8, 8192), (2, 8, 500), (1, 32, 100), (8, 8, 2048)])
def test_calls_that_gain_by_it_are_its(plugin, batch, kv_heads, keys):
    from torch_flashbackend import ops

    ops.reset_launch_counts()
    call = simple_call(batch, 32, 1, keys, 128, kv_heads=kv_heads)
    with plugin.sdpa_backend("cuda"):
        out = call.run()
    assert ops.launch_counts().get("flash_decode", 0) == 1
    check({"out": out}, expect(call), None, call.describe())


def test_a_call_never_waits_for_the_gpu(never_waits):
    call = simple_call(1, 32, 1, 8192, 128, kv_heads=8)
    out = torch.empty_like(call.query)
    plan = plan_of(call, out)
    never_waits(lambda: plan(call.query, call.key, call.value, out, None))
