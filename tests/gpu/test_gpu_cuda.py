"""The Hopper kernels, forced: values, logsumexp and gradients, streams, graphs, and what they must not touch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hopper_calls import ALIGNED_LAYOUTS, DTYPES, HOPPER_ONLY, draw, usual_head_dims

from common import (
    Call,
    check,
    check_logsumexp,
    expect,
    gradient_for,
    in_threads,
    results_of,
    simple_call,
    some_rows,
    tensor_in_layout,
)

ROOT = Path(__file__).resolve().parents[2]
pytestmark = HOPPER_ONLY
RANDOM_CALLS = int(os.environ.get("FLASHBACKEND_RANDOM_CALLS", "1000"))
CHUNK = 20


def forwards(ops):
    """How often one of the kernels of the forward was launched."""
    return sum(ops.launch_counts().get(name, 0) for name in ("flash_forward", "flash_forward_wide", "flash_decode"))


@pytest.fixture
def hopper_ran(plugin):
    """A context manager: the block must launch the Hopper kernel, on the forced backend."""
    from torch_flashbackend import ops

    @contextlib.contextmanager
    def forced(wanted: bool = True):
        ops.reset_launch_counts()
        with plugin.sdpa_backend("cuda"):
            yield
        assert bool(forwards(ops)) == wanted, ops.launch_counts()

    return forced


@pytest.fixture
def check_cuda(check_call):
    """check_call on the forced cuda backend, whose kernel must have run."""
    from torch_flashbackend import ops

    def run(call, **options):
        ops.reset_launch_counts()
        results = check_call(call, backend="cuda", **options)
        assert forwards(ops) == 1
        return results

    return run


# --------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_head_dim(check_cuda, head_dim):
    """Gradients at a few of them: the backward's kernels have a suite of their own, and take long to compile."""
    grad = head_dim in (8, 64, 72, 128, 256)
    dtype = DTYPES[head_dim // 8 % 2]
    for is_causal in (False, True):
        check_cuda(simple_call(2, 3, 333, 400, head_dim, dtype=dtype, is_causal=is_causal), grad=grad)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_value_head_dim_128_with_192(check_cuda, dtype, is_causal):
    check_cuda(simple_call(2, 3, 333, 257, 192, head_dim_v=128, dtype=dtype, is_causal=is_causal))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen_q", [1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 257, 385])
def test_lengths_around_tiles(check_cuda, seqlen_q, head_dim):
    for seqlen_k in (1, 2, 31, 63, 64, 65, 79, 80, 81, 96, 127, 128, 129, 176, 177, 255, 257, 513):
        for is_causal in (False, True):
            check_cuda(
                simple_call(1, 2, seqlen_q, seqlen_k, head_dim, is_causal=is_causal, seed=seqlen_k), grad=False,
                kernels=("flash", "math"),
            )  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 4096, 4096), (2, 4, 2048, 2048), (1, 2, 1000, 5000), (1, 2, 5000, 1000)])
def test_long_sequences(check_cuda, shape, is_causal, head_dim):
    check_cuda(simple_call(*shape, head_dim, is_causal=is_causal), grad=head_dim == 128, kernels=("flash", "cudnn"))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (8, 2), (8, 1), (32, 8), (6, 2), (12, 3)])
def test_grouped_queries(check_cuda, heads, kv_heads, is_causal):
    check_cuda(simple_call(2, heads, 200, 300, 128, kv_heads=kv_heads, is_causal=is_causal))


@pytest.mark.parametrize("layouts", [(a, b, c) for a in ALIGNED_LAYOUTS for b in ALIGNED_LAYOUTS for c in ("bhsd", b)])
def test_layouts(check_cuda, layouts):
    tensors = [
        tensor_in_layout((2, 4, 150, 64), layout, torch.bfloat16, "cuda", 3 * seed)
        for seed, layout in enumerate(layouts)
    ]
    results = check_cuda(Call(*tensors, is_causal=True, note=str(layouts)), grad=layouts[1] == layouts[2])
    # Stock's flash kernel and cuDNN give the query's memory order.
    assert results["out"].stride() == torch.empty_like(tensors[0]).stride()


def test_keys_and_values_that_are_expanded_over_heads(check_cuda):
    tensors = [tensor_in_layout((2, 4, 150, 64), layout, torch.float16, "cuda", seed)
               for seed, layout in enumerate(("bhsd", "expanded_heads", "expanded_heads"))]  # fmt: skip
    check_cuda(Call(*tensors, is_causal=True), grad=False)


@pytest.mark.parametrize("scale", [1e-3, 0.5, 1.0, 5.0])
def test_scales(check_cuda, scale):
    for is_causal in (False, True):
        check_cuda(simple_call(2, 2, 200, head_dim=64, scale=scale, is_causal=is_causal))


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_ranks(check_cuda, rank):
    shape = (2, 3, 2, 100, 64)[-rank:]
    query, key, value = (torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(3))
    check_cuda(Call(query, key, value, is_causal=True), kernels=("math",))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("descending", [False, True])
def test_maximum_that_moves_through_the_keys(check_cuda, descending, is_causal):
    """Every rescaling of the output counts: the scores grow from 6 to 30 times the usual, or shrink."""
    call = simple_call(1, 2, 600, head_dim=64)
    growth = torch.linspace(6.0, 30.0, 600, device="cuda")[:, None]
    growth = growth.flip(0) if descending else growth
    key = (call.key.float() * growth).to(torch.bfloat16)
    check_cuda(dataclasses.replace(call, key=key, is_causal=is_causal))


def random_hopper_call(seed):
    """A call that the Hopper kernels take: any lengths, GQA, layouts and scales."""
    rng = random.Random(seed)
    drawn = draw(rng, seed, usual_head_dims)
    is_causal = rng.random() < 0.5
    note = f"random call {seed} ({', '.join(drawn.layouts)})"
    return drawn.call(rng, [None, None, 0.5, 1.0, 0.01], note, is_causal=is_causal)


@pytest.mark.parametrize("first", range(0, RANDOM_CALLS, CHUNK))
def test_random_calls(check_cuda, first):
    for seed in range(first, min(first + CHUNK, RANDOM_CALLS)):
        call = random_hopper_call(seed)
        grad = call.query.size(-1) in (64, 128) and seed % 10 == 0
        check_cuda(call, grad=grad, kernels=("flash", "cudnn", "math"))


# ------------------------------------------------------------------------------------------------------------ logsumexp


@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (64, 300), (300, 64), (333, 333), (2000, 2000)])
def test_logsumexp(plugin, hopper_ran, note, lengths, is_causal, head_dim):
    call = simple_call(2, 4, *lengths, head_dim, kv_heads=2, is_causal=is_causal)
    with hopper_ran():
        out, logsumexp = plugin.attention(
            call.query, call.key, call.value, is_causal=is_causal, enable_gqa=True, return_lse=True
        )
    note(check({"out": out}, expect(call), None, call.describe()))
    note(check_logsumexp(logsumexp, call, call.describe()))
    with hopper_ran():  # another kernel, without the logsumexp: the same output, bit by bit
        assert torch.equal(out, call.run())


# ------------------------------------------------------------------------------------------- what lies next to the data


def test_rows_past_the_end_and_neighbours_are_neither_read_nor_written(hopper_ran):
    """The tensors are windows of larger ones, full of NaN around them."""
    storage = [torch.full((2, 3, 500, 128), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    windows = [tensor[:, 1:2, 100:333, 32:96] for tensor in storage]
    call = simple_call(2, 1, 233, head_dim=64)
    for window, source in zip(windows, (call.query, call.key, call.value)):
        window.copy_(source)
    for is_causal in (False, True):
        with hopper_ran():
            inside = F.scaled_dot_product_attention(*windows, is_causal=is_causal)
            apart = F.scaled_dot_product_attention(call.query, call.key, call.value, is_causal=is_causal)
        assert torch.equal(inside, apart)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [24, 64, 128, 200, 256])
def test_every_element_is_written(hopper_ran, plugin, poison_free_memory, head_dim, is_causal):
    call = simple_call(3, 5, 333, 190, head_dim, is_causal=is_causal)
    with hopper_ran():
        clean = call.run()
        poison_free_memory()
        again, logsumexp = plugin.attention(call.query, call.key, call.value, is_causal=is_causal, return_lse=True)
    assert torch.equal(clean, again)
    assert logsumexp.isfinite().all()


def test_nan_stays_where_it_belongs(hopper_ran, note):
    call = simple_call(1, 2, 300, head_dim=64, is_causal=True)
    query = call.query.clone()
    query[:, :, 77] = torch.nan
    with hopper_ran():
        out = dataclasses.replace(call, query=query).run()
    assert out[:, :, 77].isnan().all()
    rest = torch.tensor([row for row in range(300) if row != 77], device="cuda")
    note(check({"out": out[:, :, rest]}, expect(some_rows(call, rest)), None, "NaN in query"))
    key = call.key.clone()
    key[:, :, 200] = torch.nan  # rows before 200 do not see it
    with hopper_ran():
        out = dataclasses.replace(call, key=key).run()
    before = torch.arange(200, device="cuda")
    note(check({"out": out[:, :, before]}, expect(some_rows(call, before)), None, "NaN in key"))
    assert out[:, :, 200:].isnan().all()


def test_infinite_and_huge_scores_give_numbers(hopper_ran):
    """One key takes all the weight: the result is its value."""
    call = simple_call(1, 1, 200, head_dim=64, dtype=torch.bfloat16)
    query, key = torch.ones_like(call.query), torch.zeros_like(call.key)
    key[:, :, 150] = 1e4
    with hopper_ran():
        out = dataclasses.replace(call, query=query, key=key).run()
    assert torch.equal(out, call.value[:, :, 150:151].expand_as(out))


# ---------------------------------------------------------------------------------------------------------- other calls


def unaligned(tensor):
    moved = torch.empty(tensor.numel() + 1, device=tensor.device, dtype=tensor.dtype)[1:].view(tensor.shape)
    return moved.copy_(tensor)


@pytest.mark.parametrize("position", range(3))
def test_misaligned_views(plugin, launched, note, position):
    call = simple_call(2, 2, 200, head_dim=64, is_causal=True)
    tensors = [call.query, call.key, call.value]
    tensors[position] = unaligned(tensors[position])
    moved = Call(*tensors, is_causal=True)
    with plugin.sdpa_backend("cuda"), pytest.raises(RuntimeError, match="multiples of 16 bytes"):
        moved.run()
    with plugin.sdpa_backend("cuda", "triton"), launched():
        results = results_of(moved, None)
    note(check(results, expect(call), None, "misaligned"))


def test_compiled_for_aligned_tensors_and_called_with_others(plugin, note):
    from torch_flashbackend import ops

    @torch.compile(fullgraph=True)
    def attend(query, key, value):
        with plugin.sdpa_backend("cuda"):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    call = simple_call(2, 2, 200, head_dim=64, is_causal=True)
    expected = expect(call)
    for tensors, kernel in (
        ((call.query, call.key, call.value), "flash_forward"),
        ((call.query, unaligned(call.key), call.value), "attention_forward"),
        ((unaligned(call.query), call.key, unaligned(call.value)), "attention_forward"),
    ):
        ops.reset_launch_counts()
        out = attend(*tensors)
        note(check({"out": out}, expected, None, kernel))
        # Inductor copies misaligned inputs in some versions: then the Hopper kernel is right to run.
        assert set(ops.launch_counts()) <= {kernel, "flash_forward"}


def test_compiled_training_step(plugin, note):
    call = simple_call(2, 4, 256, head_dim=64, is_causal=True)
    grad_out = gradient_for(call)

    def attend(query, key, value, **options):
        with plugin.sdpa_backend("cuda"):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    compiled = torch.compile(attend, fullgraph=True)
    results = results_of(call, grad_out, lambda *args, **options: compiled(*args))
    note(check(results, expect(call, grad_out), None, "compiled"))


def test_stock_raises_what_stock_raises(plugin):
    query = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.float16)
    with plugin.sdpa_backend("cuda", "stock"), pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(query, query[..., :32], query)


@pytest.mark.parametrize(("batch", "heads"), [(70_000, 1), (1, 70_000), (300, 300)])
def test_more_than_65535_heads_in_all(check_cuda, batch, heads):
    check_cuda(simple_call(batch, heads, 24, head_dim=16, is_causal=True), grad=False, kernels=("math",))


def test_more_than_2_to_the_17_positions(hopper_ran, note):
    call = simple_call(1, 1, 140_000, head_dim=128, is_causal=True)
    rows = torch.tensor([0, 1, 70_001, 131_072, 139_999], device="cuda")
    with hopper_ran():
        out = call.run()
    note(check({"out": out[:, :, rows]}, expect(some_rows(call, rows)), None, call.describe()))


# ------------------------------------------------------------------------------------- repetition, streams, threads


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_results_repeat_bit_by_bit_under_load(hopper_ran, head_dim, is_causal):
    """The check for races that racecheck does not see: copies into a stage that a product still reads."""
    call = simple_call(4, 16, 1000, 1333, head_dim, is_causal=is_causal)
    other = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with hopper_ran():
        first = call.run()
        torch.cuda.synchronize()
        for turn in range(60):
            if turn % 3 == 0:
                with torch.cuda.stream(stream):
                    other @ other
            assert torch.equal(call.run(), first), turn
    torch.cuda.synchronize()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_bits_of_a_sequence_do_not_depend_on_the_rest_of_the_batch(hopper_ran, head_dim, is_causal):
    """Wherever the tile is the same: no sum crosses sequences, heads or tiles of queries."""
    from torch_flashbackend.kernels.cuda import tiles

    call = simple_call(8, 4, 700, 900, head_dim, is_causal=is_causal)
    with hopper_ran():
        together = call.run()
        compared = 0
        for size in (1, 2, 5):
            shapes = [(head_dim, head_dim, is_causal, 700, 900, batch * 4, 132) for batch in (8, size)]
            if tiles.choose(*shapes[0]) == tiles.choose(*shapes[1]):
                alone = Call(call.query[:size], call.key[:size], call.value[:size], is_causal=is_causal).run()
                assert torch.equal(alone, together[:size])
                compared += 1
    if not compared:
        pytest.skip("here the tile depends on the batch")


def test_streams_at_once(hopper_ran):
    """Launches of one plan on several streams do not share what they count tiles with."""
    call = simple_call(2, 8, 1111, head_dim=64, is_causal=True)
    streams = [torch.cuda.Stream() for _ in range(6)]
    with hopper_ran():
        expected = call.run()
        torch.cuda.synchronize()
        results = []
        for _ in range(20):
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(call.run())
        torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


def test_threads_with_streams_of_their_own(plugin):
    calls = [simple_call(1, 4, 300 + 50 * index, head_dim=64, is_causal=True, seed=index) for index in range(8)]
    with plugin.sdpa_backend("cuda"):
        expected = [call.run() for call in calls]
    torch.cuda.synchronize()

    def work(index):
        with plugin.sdpa_backend("cuda"), torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(50):
                number = (index + turn) % len(calls)
                assert torch.equal(calls[number].run(), expected[number]), (index, turn)

    in_threads(work, 8)


def test_thread_whose_first_cuda_call_is_a_launch(plugin):
    """PyTorch gives such a thread no context where it finds memory in its cache; new addresses need new tensor maps."""
    calls = [simple_call(1, 4, 300, head_dim=64, is_causal=causal, seed=8) for causal in (False, True)]
    moved = [simple_call(1, 4, 300, head_dim=64, is_causal=causal, seed=8) for causal in (False, True)]
    with plugin.sdpa_backend("cuda"):
        expected = [call.run() for call in calls]
    torch.cuda.synchronize()
    results = []

    def work():
        with plugin.sdpa_backend("cuda"):
            results.extend(call.run() for call in moved)

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    torch.cuda.synchronize()
    assert len(results) == 6
    assert all(torch.equal(result, expected[index % 2]) for index, result in enumerate(results))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one(hopper_ran, note):
    call = simple_call(2, 4, 256, head_dim=64, is_causal=True, device="cuda:1")
    with hopper_ran(), torch.cuda.device(0):
        for _ in range(2):
            results = results_of(call, None)
        assert torch.cuda.current_device() == 0
    note(check(results, expect(call), None, "cuda:1 while cuda:0 is current"))


# --------------------------------------------------------------------------------------------------------------- graphs


def captured(call, plugin):
    """(graph, its query, its output)."""
    query = call.query.clone()
    graph = torch.cuda.CUDAGraph()
    with plugin.sdpa_backend("cuda"), torch.cuda.graph(graph):
        out = F.scaled_dot_product_attention(query, call.key, call.value, is_causal=call.is_causal)
    return graph, query, out


@pytest.mark.parametrize("is_causal", [False, True])
def test_cuda_graph(plugin, note, is_causal):
    call = simple_call(2, 4, 500, head_dim=128, is_causal=is_causal)
    with plugin.sdpa_backend("cuda"):
        call.run()
    graph, query, out = captured(call, plugin)
    for seed in range(3):
        other = simple_call(2, 4, 500, head_dim=128, is_causal=is_causal, seed=10 * seed)
        query.copy_(other.query)
        graph.replay()
        note(check({"out": out}, expect(dataclasses.replace(call, query=query)), None, f"replay {seed}"))


def test_cuda_graph_whose_capture_is_the_first_call(plugin):
    """Compiles, loads and allocates while the stream captures."""
    call = simple_call(1, 3, 77, head_dim=152, dtype=torch.float16, is_causal=True)
    graph, _, out = captured(call, plugin)
    graph.replay()
    torch.cuda.synchronize()
    captured_out = out.clone()
    with plugin.sdpa_backend("cuda"):
        assert torch.equal(call.run(), captured_out)


def test_graphs_at_once_beside_eager_calls(plugin):
    call = simple_call(2, 8, 900, head_dim=64, is_causal=True)
    with plugin.sdpa_backend("cuda"):
        expected = call.run()
        graphs = [captured(call, plugin) for _ in range(4)]
        streams = [torch.cuda.Stream() for _ in range(4)]
        for _ in range(30):
            for (graph, _, _), stream in zip(graphs, streams):
                with torch.cuda.stream(stream):
                    graph.replay()
            eager = call.run()
            torch.cuda.synchronize()
            assert torch.equal(eager, expected)
            assert all(torch.equal(out, expected) for _, _, out in graphs)
            for _, _, out in graphs:
                out.fill_(torch.nan)
            torch.cuda.synchronize()  # the graphs' streams do not wait for this one


# ---------------------------------------------------------------------------------------------------------------- hooks


def test_automatic_route_takes_it_where_it_is_faster(plugin, take_everything, note):
    from torch_flashbackend import ops

    call = simple_call(2, 4, 300, head_dim=64, is_causal=True)
    grad_out = gradient_for(call)
    expected = expect(call, grad_out)
    ops.reset_launch_counts()
    for _ in range(3):
        note(check(results_of(call, None), expect(call), None, "inference"))
    assert ops.launch_counts() == {"flash_forward": 3}
    for _ in range(2):
        note(check(results_of(call, grad_out), expected, None, "training"))
    assert ops.launch_counts()["flash_forward"] == 5
    ops.reset_launch_counts()
    with torch.inference_mode():  # past autograd's key
        inputs = [t.clone() for t in (call.query, call.key, call.value)]
        out = F.scaled_dot_product_attention(*inputs, is_causal=True)
    note(check({"out": out.clone()}, expect(call), None, "inference mode"))
    assert ops.launch_counts() == {"flash_forward": 1}


def test_plans_of_one_entry_follow_the_scale(plugin, take_everything, note):
    """Calls that differ in their scale alone share a cached decision, not a plan."""
    call = simple_call(2, 4, 300, head_dim=64)
    for scale in (0.1, 0.7, 0.1, None):
        scaled = dataclasses.replace(call, scale=scale)
        note(check(results_of(scaled, None), expect(scaled), None, f"scale {scale}"))
