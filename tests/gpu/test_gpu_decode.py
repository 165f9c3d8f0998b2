"""Decoding: a few queries over many keys. Values against float64 and PyTorch's kernels, graphs, streams, repeatability.

FLASHBACKEND_RANDOM_CALLS sets how many random calls are drawn of each kind (default 500; 1,000 before a release).
"""

from __future__ import annotations

import math
import os
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from append_cases import append_call, misplaced
from common import Call, check, error_of, random_call, simple_call
from decode_cases import CacheCall, cache_call, random_cache_call

RANDOM_CALLS = int(os.environ.get("FLASHBACKEND_RANDOM_CALLS", "500"))
CHUNK = 10
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32


def decode_call(seed: int, device) -> Call:
    """A call without gradients: 1 to 16 queries, any mask, any group of query heads, keys short and long."""
    rng = random.Random(seed)
    if rng.random() < 0.3:  # every layout, kind of mask and scale
        call = random_call(seed, device, largest=16 if rng.random() < 0.5 else 640)
        if call.query.size(2) <= 16:
            call.mask_grad = False
            return call
    batch, kv_heads, group = rng.choice([1, 2, 3, 17]), rng.choice([1, 2, 8]), rng.choice([1, 4, 4, 5, 8])
    queries, keys = rng.choice([1, 1, 1, 2, 4, 7, 16]), rng.choice([1, 64, 100, 1000, 1024, 4096, 5000])
    head_dim = rng.choice([64, 64, 128, 128, 128, 256, 80, 96, 33])
    head_dim_v = rng.choice([64, 128, 40]) if rng.random() < 0.1 else head_dim
    dtype = rng.choice([HALF, BFLOAT, BFLOAT, BFLOAT, SINGLE])
    kind = rng.choice(["none", "none", "causal", "static", "bool", "float", "-inf"])
    shape = (rng.choice([1, batch]), rng.choice([1, 1, kv_heads * group]), rng.choice([1, queries]), keys)
    generator = torch.Generator(device=device).manual_seed(seed)
    mask = None
    if kind == "static":
        used = rng.randint(0, keys)
        mask = (torch.arange(keys, device=device) < used).expand(shape).contiguous()
    elif kind == "bool":
        mask = torch.rand(shape, device=device, generator=generator) < 0.4
    elif kind in ("float", "-inf"):
        mask = torch.randn(shape, device=device, generator=generator, dtype=SINGLE)
        if kind == "-inf":
            mask[..., rng.randint(0, keys) :] = -math.inf
        mask = mask.to(rng.choice([SINGLE, dtype]))
    return simple_call(
        batch, kv_heads * group, queries, keys, head_dim, head_dim_v=head_dim_v, kv_heads=kv_heads, dtype=dtype,
        device=device, layout=rng.choice(["bhsd", "bshd"]), seed=seed, attn_mask=mask, is_causal=kind == "causal",
        scale=rng.choice([None, None, None, -0.2]), note=f"decode call {seed} {kind}",
    )  # fmt: skip


@pytest.fixture
def decoded(device):
    """How often the decoding kernel was launched since the test began."""
    from torch_flashbackend import ops

    ops.reset_launch_counts()
    return lambda: ops.launch_counts().get("attention_decode", 0) if device == "cuda" else 1


@pytest.mark.parametrize("first", range(0, RANDOM_CALLS, CHUNK))
def test_random_calls(check_call, device, decoded, first):
    for seed in range(first, min(first + CHUNK, RANDOM_CALLS)):
        call = decode_call(seed, device)
        check_call(call, grad=False)
        assert decoded() or max(call.query.size(3), call.value.size(3)) > 256, call.describe()


@pytest.mark.cuda_only
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("heads", [(32, 8), (32, 32), (32, 1)], ids=str)
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_usual_sizes(check_call, device, batch, heads, queries, head_dim):
    for keys in (1024, 8192):
        check_call(simple_call(batch, heads[0], queries, keys, head_dim, kv_heads=heads[1], device=device), grad=False)


def run_cache(call: CacheCall, num_splits: int | None = None) -> tuple[Tensor, Tensor | None]:
    from torch_flashbackend.kernels.triton import kv_cache

    batch, heads, queries, _ = call.query.shape
    options = call.options if num_splits is None else call.options | {"num_splits": num_splits}
    out = torch.full((batch, heads, queries, call.value.size(3)), math.nan, dtype=call.query.dtype,
                     device=call.query.device)  # fmt: skip
    logsumexp = out.new_full((batch, heads, queries), math.nan, dtype=SINGLE) if call.logsumexp else None
    kv_cache.decode(call.query, call.key, call.value, out, logsumexp, call.scale, kv_cache.DecodeOptions(**options),
                    call.mask, call.is_causal)  # fmt: skip
    return out, logsumexp


@pytest.mark.cuda_only
@pytest.mark.parametrize("first", range(0, RANDOM_CALLS, CHUNK))
def test_random_caches(device, note, first):
    """Lengths in use, pages, windows, ALiBi, sinks, softcap, and all of these together."""
    for seed in range(first, min(first + CHUNK, RANDOM_CALLS)):
        call = random_cache_call(seed, device)
        out, logsumexp = run_cache(call)
        note(check({"out": out}, call.expected(), None, call.note))
        if logsumexp is not None:
            torch.testing.assert_close(
                logsumexp.double(), call.expected_logsumexp(), atol=2e-3, rtol=1e-4, msg=call.note
            )


@pytest.mark.cuda_only
@pytest.mark.parametrize("group", [1, 4, 32])
@pytest.mark.parametrize("num_splits", [1, 2, 15, 16, 17, 64, 65, 200])
def test_numbers_of_splits(device, group, num_splits):
    call = cache_call(3, ("causal", "used"), dtype=BFLOAT, device=device, group=group, queries=2, keys=20000,
                      head_dim=128, kv_heads=1, num_splits=num_splits)  # fmt: skip
    check({"out": run_cache(call)[0]}, call.expected(), None, call.note)


@pytest.mark.cuda_only
def test_equal_bits_every_time_while_the_gpu_is_busy(device):
    """A race between the programs of one launch would show as another result now and then."""
    call = cache_call(4, dtype=BFLOAT, device=device, batch=3, kv_heads=4, group=4, keys=8000, head_dim=128)
    other = torch.randn(2048, 2048, device=device)
    streams = [torch.cuda.Stream() for _ in range(4)]
    for num_splits in (0, 2, 33, 100):
        first = run_cache(call, num_splits)[0]
        results = []
        torch.cuda.synchronize()
        for turn in range(300):
            with torch.cuda.stream(streams[turn % 4]):
                if turn % 3 == 0:
                    other @ other
                results.append(run_cache(call, num_splits)[0])
        torch.cuda.synchronize()
        assert all(torch.equal(first, result) for result in results), num_splits


@pytest.mark.cuda_only
def test_a_captured_graph_decodes_new_data(device, plugin, decoded):
    """Masks, lengths and caches change between replays; several calls in a graph, several graphs at once."""
    generator = torch.Generator(device=device).manual_seed(0)
    query = torch.randn(2, 8, 1, 128, device=device, dtype=BFLOAT, generator=generator)
    key, value = (torch.randn(2, 2, 4096, 128, device=device, dtype=BFLOAT, generator=generator) for _ in range(2))
    mask = torch.zeros(2, 1, 1, 4096, device=device, dtype=torch.bool)

    def step() -> list[Tensor]:
        with plugin.sdpa_backend("triton"):
            first = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
            return [first, F.scaled_dot_product_attention(first, key, value, enable_gqa=True)]

    step()
    graphs, captured = [], []
    for _ in range(3):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            captured.append(step())
    streams = [torch.cuda.Stream() for _ in graphs]
    for used in (1, 63, 64, 1000, 4096, 5):
        mask.zero_()
        mask[0, ..., :used] = True
        mask[1, ..., used // 2 : used] = True
        query.normal_(generator=generator)
        key.normal_(generator=generator)
        expected = [tensor.clone() for tensor in step()]
        torch.cuda.synchronize()
        for _ in range(20):
            for graph, stream in zip(graphs, streams):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for results in captured:
            assert all(torch.equal(a, b) for a, b in zip(results, expected)), used
    assert decoded()


@pytest.mark.cuda_only
@pytest.mark.parametrize("group", [4, 32])
@pytest.mark.parametrize("before", ["nothing", "fill", "copy", "kernels", "two streams"])
def test_a_dependent_launch_waits_for_what_is_before_it(device, before, group):
    """In a graph and in a stream: it begins before that has ended, be it a kernel, a copy or another stream's work."""
    generator = torch.Generator(device=device).manual_seed(0)
    call = cache_call(6, dtype=BFLOAT, device=device, group=group, kv_heads=1, keys=4000, head_dim=128)
    source = [torch.randn(call.query.shape, device=device, generator=generator).to(BFLOAT) for _ in range(2)]
    large = torch.randn(4096, 4096, device=device, dtype=BFLOAT, generator=generator)
    sides = [torch.cuda.Stream() for _ in range(2)]

    def make_query(target: Tensor, number: Tensor) -> None:
        if before == "fill":
            target.fill_(0.0)
        elif before == "copy":
            target.copy_(number)
        elif before == "kernels":
            torch.mm(large, large)
            torch.add(number, 1.0, out=target)
        elif before == "two streams":
            current = torch.cuda.current_stream()
            for index, side in enumerate(sides):
                side.wait_stream(current)
                with torch.cuda.stream(side):
                    torch.mm(large, large)
                    torch.add(number[:, index::2], 1.0, out=target[:, index::2])
            for side in sides:
                current.wait_stream(side)

    def step(number: Tensor) -> list[Tensor]:
        """Twice, the second time over the query that the first has read."""
        outs = []
        for _ in range(2):
            make_query(call.query, number)
            outs.append(run_cache(call)[0])
            call.query.mul_(0.5)
            outs.append(run_cache(call)[0])
        return outs

    def expected(number: Tensor) -> list[Tensor]:
        outs = []
        for _ in range(2):
            make_query(call.query, number)
            torch.cuda.synchronize()
            outs.append(run_cache(call)[0])
            torch.cuda.synchronize()
            call.query.mul_(0.5)
            torch.cuda.synchronize()
            outs.append(run_cache(call)[0])
            torch.cuda.synchronize()
        return outs

    start = call.query.clone()
    number = source[0].clone()
    step(number)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(number)
    for turn in range(10):
        number.copy_(source[turn % 2])
        call.query.copy_(start)
        wanted = expected(number)
        for run in (graph.replay, lambda: captured_into(captured, step(number))):
            for tensor in captured:
                tensor.fill_(math.nan)
            call.query.copy_(start)
            run()
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(captured, wanted)), (before, turn)


def captured_into(outs: list[Tensor], results: list[Tensor]) -> None:
    for out, result in zip(outs, results):
        out.copy_(result)


@pytest.mark.cuda_only
def test_the_first_call_of_a_stream_may_be_captured(device, plugin):
    """Counters of a size that nobody has asked for yet are made while a graph is captured."""
    query = torch.randn(300, 8, 1, 64, device=device, dtype=HALF)
    key = torch.randn(300, 8, 2048, 64, device=device, dtype=HALF)
    from torch_flashbackend import driver
    from torch_flashbackend.kernels.triton import kv_cache

    options = kv_cache.DecodeOptions(num_splits=8)
    outs = [torch.empty_like(query) for _ in range(2)]
    kv_cache.decode(query, key, key, outs[0], None, 0.125, options)
    torch.cuda.synchronize()
    driver._unused.clear()  # as if nothing were left
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kv_cache.decode(query, key, key, outs[1], None, 0.125, options)
    for _ in range(3):
        outs[1].fill_(math.nan)
        graph.replay()
        assert torch.equal(*outs)


@pytest.mark.cuda_only
@pytest.mark.parametrize("kind", [torch.bool, BFLOAT], ids=str)
def test_unused_tiles_of_a_static_cache_are_not_read(device, plugin, kind):
    query = torch.randn(2, 8, 1, 128, device=device, dtype=BFLOAT)
    key, value = (torch.randn(2, 2, 8192, 128, device=device, dtype=BFLOAT) for _ in range(2))
    mask = (torch.arange(8192, device=device) < 1000).expand(2, 1, 1, -1).contiguous()
    if kind != torch.bool:
        mask = torch.zeros(mask.shape, device=device, dtype=kind).masked_fill(~mask, -math.inf)
    results = []
    for number in (0.0, math.nan):
        key[:, :, 1024:] = value[:, :, 1024:] = number
        with plugin.sdpa_backend("triton"):
            results.append(F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True))
    assert torch.equal(*results) and not bool(results[0].isnan().any())


@pytest.mark.cuda_only
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(device, plugin, decoded, mode):
    query = torch.randn(1, 32, 1, 128, device=device, dtype=BFLOAT)

    def step(query, key, value):
        with plugin.sdpa_backend("triton"):
            return F.scaled_dot_product_attention(query, key, value, enable_gqa=True) * 2

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, mode=None if mode == "default" else mode)
    with torch.no_grad():
        for length in (1000, 1001, 1500, 4096, 1002):
            key, value = (torch.randn(1, 8, length, 128, device=device, dtype=BFLOAT) for _ in range(2))
            assert torch.equal(compiled(query, key, value).clone(), step(query, key, value)), length
    assert decoded()


@pytest.mark.cuda_only
def test_a_growing_cache_compiles_few_kernels_more(device, plugin):
    """Two, for lengths that end with a tile and others, and as many that merge."""
    from torch_flashbackend.kernels.triton import launch

    query = torch.randn(1, 8, 1, 64, device=device, dtype=HALF)
    cache = torch.randn(1, 2, 4096, 64, device=device, dtype=HALF)
    before = len(launch._loaded)
    with plugin.sdpa_backend("triton"):
        for length in range(3000, 3300):
            F.scaled_dot_product_attention(query, cache[:, :, :length], cache[:, :, :length], enable_gqa=True)
    assert len(launch._loaded) - before <= 4


@pytest.mark.cuda_only
@pytest.mark.memory
def test_caches_of_more_than_two_billion_elements(device, plugin, gigabytes):
    gigabytes(16)
    generator = torch.Generator(device=device).manual_seed(0)
    query = torch.randn(1, 2, 1, 128, device=device, dtype=BFLOAT, generator=generator)
    cache = torch.randn(1, 1, 2**24 + 1000, 128, device=device, dtype=BFLOAT, generator=generator)
    with plugin.sdpa_backend("triton"):
        out = F.scaled_dot_product_attention(query, cache, cache, enable_gqa=True, scale=1.0)
    parts = []
    for start in range(0, cache.size(2), 2**21):
        part = cache[0, 0, start : start + 2**21].double()
        scores = query[0, :, 0].double() @ part.mT
        top = scores.amax(-1, keepdim=True)
        weights = (scores - top).exp()
        parts.append((top, weights.sum(-1, keepdim=True), weights @ part))
    top = torch.stack([part[0] for part in parts]).amax(0)
    total = sum((part[0] - top).exp() * part[1] for part in parts)
    expected = sum((part[0] - top).exp() * part[2] for part in parts) / total
    assert (out[0, :, 0].double() - expected).abs().max() <= 2 * 2**-8 * expected.abs().max()


@pytest.mark.cuda_only
def test_more_programs_than_a_grid_dimension_has(device, check_call):
    # Of PyTorch's kernels some are launched with more blocks than a grid has there: "invalid argument".
    check_call(simple_call(70_000, 2, 1, 40, 64, kv_heads=1, device=device), grad=False, kernels=("math",))


@pytest.mark.cuda_only
def test_another_device_than_the_current(plugin):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    query, key = (torch.randn(1, 4, length, 64, device="cuda:1", dtype=HALF) for length in (1, 3000))
    with torch.cuda.device(1), plugin.sdpa_backend("triton"):
        expected = F.scaled_dot_product_attention(query, key, key)
    with torch.cuda.device(0), plugin.sdpa_backend("triton"):
        assert torch.equal(F.scaled_dot_product_attention(query, key, key), expected)


# ------------------------------------------------------------------------------------------------- kv_cache.attend


def test_nothing_is_written_outside_of_the_cache(device):
    """Lengths before its first row and behind its last one, as a wrong count in a serving loop would give."""
    from torch_flashbackend import kv_cache

    arguments, whole = misplaced(append_call(0, device=device))
    before = [tensor.clone() for tensor in whole]
    out = kv_cache.attend(**arguments)
    for tensor, was in zip(whole, before):
        assert torch.equal(tensor, was)
    assert not out[0].any()  # no key is in use


@pytest.mark.parametrize("where", ["plain", "batch_index", "pages"])
@pytest.mark.parametrize("rotary", ["", "interleaved", "halves"])
@pytest.mark.parametrize("causal", [False, True])
def test_adding_to_the_cache(device, where, rotary, causal):
    from torch_flashbackend import kv_cache

    for seed, (queries, new, head_dim) in enumerate([(1, 1, 128), (3, 20, 64), (17, 17, 80), (1, 2, 40)]):
        case = append_call(
            seed, device=device, where=where, rotary=rotary, causal=causal, leftpad=seed % 2 == 1, queries=queries,
            new=new, head_dim=head_dim,
        )  # fmt: skip
        arguments = case.arguments
        out = kv_cache.attend(**arguments)
        assert error_of(arguments["k_cache"], case.key_cache).maximum < 1e-5
        assert error_of(arguments["v_cache"], case.value_cache).maximum == 0.0
        names = ("cache_batch_idx", "block_table", "cache_leftpad", "causal")
        rest = {name: arguments[name].cpu() if isinstance(arguments[name], Tensor) else arguments[name]
                for name in names if name in arguments}  # fmt: skip
        lengths = arguments["cache_seqlens"].cpu() + new
        caches = case.query.cpu(), case.key_cache.cpu(), case.value_cache.cpu()
        expected = kv_cache.attend(*caches, cache_seqlens=lengths, **rest)
        assert error_of(out.cpu(), expected).maximum < 2e-5


@pytest.mark.cuda_only
@pytest.mark.parametrize("page", [0, 16, 256])
def test_generating_step_by_step_in_a_graph(device, page):
    """One graph of a step, replayed: the cache grows, the lengths with it, as in a server."""
    from torch_flashbackend import kv_cache

    generator = torch.Generator(device=device).manual_seed(0)
    batch, capacity, steps = 3, 1024, 30
    shape = (batch * capacity // page + 1, page, 2, 128) if page else (batch, capacity, 2, 128)
    caches = [torch.randn(shape, device=device, dtype=BFLOAT, generator=generator) for _ in range(2)]
    copies = [cache.clone() for cache in caches]
    table = None
    if page:
        pages = batch * capacity // page
        table = torch.randperm(pages, device=device, generator=generator).int().view(batch, -1)
    query, key, value = (torch.randn(batch, 1, heads, 128, device=device, dtype=BFLOAT) for heads in (8, 2, 2))
    cos, sin = (torch.randn(capacity, 64, device=device, dtype=BFLOAT, generator=generator) for _ in range(2))
    lengths = torch.tensor([100, 7, 513], dtype=torch.int32, device=device)

    def step(caches: list[Tensor], lengths: Tensor) -> Tensor:
        return kv_cache.attend(
            query, *caches, key, value, cos, sin, cache_seqlens=lengths, block_table=table, causal=True
        )

    step([cache.clone() for cache in caches], lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(caches, lengths)
        lengths += 1
    own = torch.tensor([100, 7, 513], dtype=torch.int32, device=device)
    lengths.copy_(own)
    for _ in range(steps):
        for tensor in (query, key, value):
            tensor.normal_(generator=generator)
        expected = step(copies, own)
        own += 1
        graph.replay()
        assert torch.equal(captured, expected)
    assert all(torch.equal(cache, copy) for cache, copy in zip(caches, copies)) and torch.equal(lengths, own)


@pytest.mark.cuda_only
def test_a_long_prompt_over_pages(device):
    """Many queries: several tiles of rows, the causal mask at the end of the keys."""
    for features in (("used", "causal", "pages"), ("used", "causal", "leftpad"), ("used", "window", "pages")):
        for queries in (100, 700):
            sizes = {"queries": queries, "keys": 1500, "head_dim": 128, "page": 64}
            call = cache_call(5, features, dtype=BFLOAT, device=device, **sizes)
            check({"out": run_cache(call)[0]}, call.expected(), None, call.note)


@pytest.mark.cuda_only
def test_attend_compiled(device):
    from torch_flashbackend import kv_cache

    torch._dynamo.reset()
    compiled = torch.compile(kv_cache.attend, fullgraph=True)
    for seed in range(3):
        case, other = (append_call(seed, device=device, dtype=BFLOAT, where="pages") for _ in range(2))
        assert torch.equal(compiled(**case.arguments), kv_cache.attend(**other.arguments))
        assert torch.equal(case.arguments["k_cache"], other.arguments["k_cache"])
