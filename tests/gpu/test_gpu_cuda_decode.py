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
    error_of,
    expect,
    expect_logsumexp,
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
            seqlen_k=call.key.size(2),
        )  # fmt: skip
        chosen = usual._replace(splits=splits)
    return decode.DecodePlan(call.query, call.key, call.value, out, call.softmax_scale, chosen)


def run_plan(call: Call, splits: int | None = None):
    """(out, logsumexp) of a call, all of them written over NaN."""
    shape = (*call.query.shape[:3], call.value.size(3))
    out = torch.full(shape, math.nan, dtype=call.query.dtype, device=call.query.device)
    logsumexp = torch.full(shape[:3], math.nan, dtype=SINGLE, device=call.query.device)
    plan_of(call, out, splits)(call.query, call.key, call.value, out, logsumexp)
    return out, logsumexp


def check_plan(call: Call, splits: int) -> None:
    out, logsumexp = run_plan(call, splits)
    what = f"{call.describe()} {splits} splits"
    check({"out": out}, expect(call), None, what)
    check({"logsumexp": logsumexp}, expect_logsumexp(call), None, what)


def decode_call(seed: int) -> Call:
    """Any layout, dtype, length and group of query heads, without a mask."""
    rng = random.Random(seed)
    dtype = rng.choice([HALF, BFLOAT])
    batch, kv_heads = rng.choice([1, 1, 2, 3, 17]), rng.choice([1, 2, 8])
    group, queries = rng.choice([(1, 1), (4, 1), (4, 1), (8, 2), (16, 1), (3, 5), (1, 16), (5, 6), (16, 2), (4, 8)])
    keys = rng.choice([1, 15, 64, 65, 100, 1000, 1024, 4096, 5000, rng.randint(1, 3000)])
    head_dim, head_dim_v = rng.choice(HEAD_DIMS)
    sizes = [(kv_heads * group, queries, head_dim), (kv_heads, keys, head_dim), (kv_heads, keys, head_dim_v)]
    tensors = [
        tensor_in_layout((batch, *size), rng.choice(LAYOUTS), dtype, "cuda", 4 * seed + index)
        for index, size in enumerate(sizes)
    ]
    return Call(*tensors, scale=rng.choice([None, None, 0.3, 1.0, 0.01]), enable_gqa=group > 1,
                note=f"decode call {seed}")  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("first", range(0, RANDOM_CALLS, CHUNK))
def test_random_calls(check_call, decoded, first):
    for seed in range(first, min(first + CHUNK, RANDOM_CALLS)):
        check_call(decode_call(seed), grad=False, backend="cuda", kernels=("flash", "math"))
        assert decoded() == 1  # check_call counts anew


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


@pytest.mark.parametrize("head_dim", [64, 128])
def test_logsumexp_and_gradients(check_call, plugin, decoded, head_dim):
    call = simple_call(2, 8, 4, 700, head_dim, kv_heads=2)
    with plugin.sdpa_backend("cuda"):
        out, logsumexp = plugin.attention(call.query, call.key, call.value, enable_gqa=True, return_lse=True)
        assert torch.equal(out, call.run())
    assert decoded() == 2
    check({"logsumexp": logsumexp}, expect_logsumexp(call), None, call.describe())
    grad_out = gradient_for(call)
    with plugin.sdpa_backend("cuda"):
        check(results_of(call, grad_out), expect(call, grad_out), None, call.describe())


def test_causal_calls_and_masks_are_not_its(check_call, decoded):
    check_call(simple_call(1, 4, 1, 300, 64, kv_heads=1, is_causal=True), grad=False, backend="cuda")
    mask = torch.rand(300, device="cuda").expand(1, 1, 1, 300) < 0.5
    check_call(simple_call(1, 4, 1, 300, 64, kv_heads=1, attn_mask=mask), grad=False, backend="cuda")
    assert decoded() == 0


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


def test_equal_bits_every_time_while_the_gpu_is_busy():
    """A race between the blocks of a launch, or of two, would show as another result now and then."""
    call = simple_call(3, 16, 1, 8000, 128, kv_heads=4)
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
                plan(call.query, call.key, call.value, out, None)
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
