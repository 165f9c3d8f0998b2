"""The Hopper backward kernels, forced: gradients against float64, repetition, graphs, streams, neighbouring memory."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from backward_forms import FORMS, use_form
from hopper_calls import ALIGNED_LAYOUTS, DTYPES, HOPPER_ONLY, MANY, draw, gradient_checker

from common import Call, check, deterministic_mode, expect, gradient_for, results_of, simple_call, tensor_in_layout

ROOT = Path(__file__).resolve().parents[2]
pytestmark = HOPPER_ONLY
RANDOM_CALLS = int(os.environ.get("FLASHBACKEND_RANDOM_CALLS", "1000"))
CHUNK = 10
COPIED_LAYOUTS = ("expanded_heads", "unaligned", "odd_strides", "strided_last")  # of grad_out
KERNELS = ("flash", "cudnn", "math")


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def form(request, monkeypatch):
    """Whatever the length, the test runs with all forms of the main kernel."""
    use_form(monkeypatch, **request.param)


@pytest.fixture
def hopper(plugin):
    """A context manager: the block runs on the forced backend, whose own backward must run (or, False, must not)."""
    from torch_flashbackend import ops

    @contextlib.contextmanager
    def forced(wanted: bool = True):
        ops.reset_launch_counts()
        with plugin.sdpa_backend("cuda"):
            yield
        assert bool(ops.launch_counts().get("flash_backward")) == wanted, ops.launch_counts()

    return forced


@pytest.fixture
def check_gradients(plugin, hopper, note):
    return gradient_checker(plugin, hopper, note, KERNELS)


# --------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_tile_and_many(check_gradients, head_dim, dtype, is_causal):
    for shape in ((1, 1, 128, 128), (1, 1, 256, 256), (2, 3, 512, 512), (1, 2, 1024, 1024)):
        check_gradients(simple_call(*shape, head_dim, dtype=dtype, is_causal=is_causal))


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_head_dim(check_gradients, form, head_dim):
    dtype = DTYPES[head_dim // 8 % 2]
    for is_causal in (False, True):
        check_gradients(simple_call(2, 3, 333, 400, head_dim, dtype=dtype, is_causal=is_causal))


def test_value_head_dim_of_its_own(check_gradients, form):
    for is_causal in (False, True):
        check_gradients(simple_call(2, 2, 200, 300, 192, head_dim_v=128, is_causal=is_causal))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_heads(check_gradients, form, head_dim):
    """More tiles of keys than multiprocessors; with the first shape, some that no query sees."""
    for is_causal in (False, True):
        check_gradients(simple_call(160, 8, 130, 260, head_dim, is_causal=is_causal), kernels=("flash", "math"))
        check_gradients(simple_call(5, 64, 700, 500, head_dim, is_causal=is_causal), kernels=("flash", "math"))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen_q", [1, 2, 63, 64, 65, 127, 128, 129, 191, 193, 255, 257, 385])
def test_lengths_around_tiles(check_gradients, form, seqlen_q, head_dim):
    for seqlen_k in (1, 2, 63, 64, 65, 127, 128, 129, 255, 257, 513):
        for is_causal in (False, True):
            call = simple_call(1, 2, seqlen_q, seqlen_k, head_dim, is_causal=is_causal, seed=seqlen_k)
            check_gradients(call, kernels=("flash", "math"))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 4096, 4096), (2, 4, 2048, 2048), (1, 2, 1000, 5000), (1, 2, 5000, 1000)])
def test_long_sequences(check_gradients, form, shape, is_causal, head_dim):
    check_gradients(simple_call(*shape, head_dim, is_causal=is_causal), kernels=("flash", "cudnn"))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (8, 2), (8, 1), (32, 8), (6, 2), (12, 3)])
def test_grouped_queries(check_gradients, form, heads, kv_heads, is_causal, head_dim):
    check_gradients(simple_call(2, heads, 200, 300, head_dim, kv_heads=kv_heads, is_causal=is_causal))


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "packed"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_groups_too_long_for_one_sum(check_gradients, monkeypatch, head_dim, is_causal, layout):
    """One query head of each group at a time."""
    from torch_flashbackend import ops
    from torch_flashbackend.kernels.cuda import backward

    monkeypatch.setattr(backward, "MAX_SUM_ROWS", 1000)
    call = simple_call(2, 6, 500, 700, head_dim, kv_heads=2, is_causal=is_causal)
    call.query = tensor_in_layout(call.query.shape, layout, call.query.dtype, "cuda", 3)
    check_gradients(call)
    assert ops.launch_counts()["flash_backward"] == 3


@pytest.mark.parametrize("layout", ALIGNED_LAYOUTS)
@pytest.mark.parametrize("grad_layout", [*ALIGNED_LAYOUTS, *COPIED_LAYOUTS])
def test_layouts(check_gradients, layout, grad_layout):
    shape = (2, 4, 150, 64)
    tensors = [tensor_in_layout(shape, layout, torch.bfloat16, "cuda", seed) for seed in range(3)]
    call = Call(*tensors, is_causal=True, note=f"{layout}, gradient {grad_layout}")
    results = check_gradients(call, tensor_in_layout(shape, grad_layout, torch.bfloat16, "cuda", 7))
    for name in ("query", "key", "value"):
        assert results[name].stride() == torch.empty_like(getattr(call, name)).stride()


def test_gradient_of_a_sum(check_gradients):
    call = simple_call(2, 2, 200, head_dim=64, is_causal=True)
    check_gradients(call, torch.ones((), device="cuda", dtype=torch.bfloat16).expand(2, 2, 200, 64))


@pytest.mark.parametrize("scale", [1e-3, 0.5, 1.0, 5.0])
def test_scales(check_gradients, scale):
    for is_causal in (False, True):
        check_gradients(simple_call(2, 2, 200, head_dim=64, scale=scale, is_causal=is_causal))


@pytest.mark.parametrize("shift", [-200.0, 200.0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_scores_far_from_zero(check_gradients, form, head_dim, shift):
    """Scores all very negative, or very large: keys past the end, whose scores are zero, must not count."""
    call = simple_call(1, 2, 190, 190, head_dim)
    query = call.query.clone()
    query[..., 0] = shift
    key = call.key.clone()
    key[..., 0] = 8.0
    for is_causal in (False, True):
        check_gradients(dataclasses.replace(call, query=query, key=key, scale=1.0, is_causal=is_causal))


def head_dims_of_backward(rng):
    """Some values of 128 columns beside keys of 192."""
    head_dim = rng.choice([64, 64, 128, 128, 256, 8 * rng.randint(1, 32)])
    return (192, 128) if rng.random() < 0.1 else (head_dim, head_dim)


def random_hopper_call(seed):
    """A call whose backward the Hopper kernels take, and grad_out: any lengths, GQA, layouts and scales."""
    rng = random.Random(seed)
    drawn = draw(rng, seed, head_dims_of_backward, batches=(1, 2, 3, MANY), longest={MANY: 300}, grad_out=True)
    is_causal = rng.random() < 0.5
    note = f"random call {seed} ({', '.join(drawn.layouts)})"
    return drawn.call(rng, [None, None, 0.5, 1.0, 0.01], note, is_causal=is_causal), drawn.tensors[3]


@pytest.mark.parametrize("first", range(0, RANDOM_CALLS, CHUNK))
def test_random_calls(check_gradients, monkeypatch, first):
    """The forms of the main kernel in turn, and the deterministic ones."""
    modes = [*FORMS.values(), None]
    for seed in range(first, min(first + CHUNK, RANDOM_CALLS)):
        form = modes[seed % len(modes)]
        if form:
            use_form(monkeypatch, **form)
        with deterministic_mode(form is None):
            check_gradients(*random_hopper_call(seed))


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_one_gradient_alone(hopper, wanted):
    call = simple_call(2, 2, 200, 300, head_dim=64, is_causal=True)
    grad_out = gradient_for(call)
    with hopper():
        everything = results_of(call, grad_out)
        leaves = [t.detach().requires_grad_(w) for t, w in zip((call.query, call.key, call.value), wanted)]
        out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        (grad,) = torch.autograd.grad(out, [t for t in leaves if t.requires_grad], grad_out)
    name = ("query", "key", "value")[wanted.index(True)]
    if name == "query":  # its sums are added up in any order
        torch.testing.assert_close(grad, everything[name], rtol=0.02, atol=0.02)
    else:
        assert torch.equal(grad, everything[name])


def test_keys_that_are_expanded_over_heads_run_tritons(hopper, note):
    tensors = [tensor_in_layout((2, 4, 150, 64), layout, torch.float16, "cuda", seed)
               for seed, layout in enumerate(("bhsd", "expanded_heads", "expanded_heads"))]  # fmt: skip
    call = Call(*tensors, is_causal=True)
    grad_out = gradient_for(call)
    with hopper(False):
        note(check(results_of(call, grad_out), expect(call, grad_out), None, call.describe()))


# ------------------------------------------------------------------------------------------- what lies next to the data


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 160, 192, 256])
def test_neighbours_are_neither_read_nor_written(hopper, poison_free_memory, head_dim, is_causal):
    """The tensors are windows of larger ones, full of NaN around them; the gradients are views of NaN in no place."""
    shape = (2, 3, 500, head_dim + 64)
    storage = [torch.full(shape, torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    windows = [tensor[:, 1:2, 100:333, 32 : 32 + head_dim] for tensor in storage]
    call = simple_call(2, 1, 233, head_dim=head_dim)
    grad_out = gradient_for(call)
    for window, source in zip(windows, (call.query, call.key, call.value, grad_out)):
        window.copy_(source)
    poison_free_memory()
    with hopper(), deterministic_mode():
        apart = results_of(dataclasses.replace(call, is_causal=is_causal), grad_out)
        inside = results_of(Call(*windows[:3], is_causal=is_causal), windows[3])
    for name, grad in apart.items():
        assert grad.isfinite().all(), name
        assert torch.equal(inside[name], grad), name


def test_nan_in_grad_out_shows(hopper):
    call = simple_call(1, 1, 200, head_dim=64)
    grad_out = gradient_for(call)
    grad_out[:, :, 77] = torch.nan
    with hopper():
        results = results_of(call, grad_out)
    assert results["query"][:, :, 77].isnan().all()
    assert results["query"][:, :, :64].isfinite().all()
    assert results["key"].isnan().all() and results["value"].isnan().all()


# --------------------------------------------------------------------------------------------------- repetition, graphs


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_key_and_value_gradients_repeat_bit_by_bit_under_load(hopper, form, head_dim, is_causal):
    """The check for races that racecheck does not see: these two sums have one order in every mode."""
    call = simple_call(4, 16, 1000, 1333, head_dim, kv_heads=8, is_causal=is_causal)
    grad_out = gradient_for(call)
    other = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with hopper():
        first = results_of(call, grad_out)
        torch.cuda.synchronize()
        for turn in range(30):
            if turn % 3 == 0:
                with torch.cuda.stream(stream):
                    other @ other
            again = results_of(call, grad_out)
            for name in ("key", "value"):
                assert torch.equal(again[name], first[name]), (turn, name)
            torch.testing.assert_close(again["query"], first["query"], rtol=0.02, atol=0.02)
    torch.cuda.synchronize()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("shape", [(4, 16, 1000, 1333), (1, 2, 4096, 4096), (40, 8, 130, 260)])
def test_deterministic_mode_repeats_bit_by_bit(hopper, note, shape, head_dims, is_causal):
    head_dim, head_dim_v = head_dims
    call = simple_call(*shape, head_dim, kv_heads=shape[1] // 2, is_causal=is_causal, head_dim_v=head_dim_v)
    grad_out = gradient_for(call)
    with hopper(), deterministic_mode():
        first = results_of(call, grad_out)
        for turn in range(20):
            again = results_of(call, grad_out)
            for name, grad in first.items():
                assert torch.equal(again[name], grad), (turn, name)
    if shape[0] * shape[1] * shape[2] * shape[3] < 10**8:
        note(check(first, expect(call, grad_out), None, call.describe()))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_backwards_that_follow_at_once(hopper, note, form, head_dim):
    """One call's statistics and sums must not be the next one's, whatever is still running."""
    calls = [simple_call(8, 8, 500, head_dim=head_dim, is_causal=True, seed=10 * n) for n in range(3)]
    graphs = []
    with hopper():
        for call in calls:
            leaves = call.leaves()
            inputs = leaves.query, leaves.key, leaves.value
            graphs.append((F.scaled_dot_product_attention(*inputs, is_causal=True), inputs, gradient_for(call)))
        turns = [[torch.autograd.grad(*graph, retain_graph=True) for graph in graphs] for _ in range(10)]
    for call, (_, _, grad_out), *results in zip(calls, graphs, *turns):
        note(check(dict(zip(("query", "key", "value"), results[0])), expect(call, grad_out), None, call.describe()))
        for grads in results[1:]:
            for grad, first in zip(grads[1:], results[0][1:]):
                assert torch.equal(grad, first)
            torch.testing.assert_close(grads[0], results[0][0], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, deterministic_mode], ids=["default", "deterministic"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_launches_on_streams_at_once(hopper, form, head_dim, mode):
    """They do not share what they count blocks with."""
    call = simple_call(8, 8, 777, head_dim=head_dim, is_causal=True)
    grad_out = gradient_for(call)
    streams = [torch.cuda.Stream() for _ in range(4)]
    with hopper(), mode():
        expected = results_of(call, grad_out)
        torch.cuda.synchronize()
        results = []
        for _ in range(10):
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(results_of(call, grad_out))
        torch.cuda.synchronize()
    for result in results:
        for name, grad in expected.items():
            if name == "query" and mode is contextlib.nullcontext:  # its sums are added up in any order
                torch.testing.assert_close(result[name], grad, rtol=0.02, atol=0.02)
            else:
                assert torch.equal(result[name], grad), name


@pytest.mark.parametrize("mode", [contextlib.nullcontext, deterministic_mode], ids=["default", "deterministic"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_cuda_graph_of_forward_and_backward(hopper, note, form, is_causal, mode):
    call = simple_call(2, 4, 500, head_dim=128, kv_heads=2, is_causal=is_causal)
    grad_out = gradient_for(call)
    leaves = call.leaves()
    static = [t.detach().clone().requires_grad_() for t in (leaves.query, leaves.key, leaves.value)]

    def both():
        out = F.scaled_dot_product_attention(*static, is_causal=is_causal, enable_gqa=True)
        return out, *torch.autograd.grad(out, static, grad_out)

    with hopper(), mode():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            both()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = both()
    for seed in range(3):
        other = simple_call(2, 4, 500, head_dim=128, kv_heads=2, is_causal=is_causal, seed=10 * seed)
        with torch.no_grad():
            for tensor, source in zip(static, (other.query, other.key, other.value)):
                tensor.copy_(source)
        graph.replay()
        named = dict(zip(("out", "query", "key", "value"), results))
        note(check(named, expect(other, grad_out), None, f"replay {seed}"))


def test_compiled_training_step(plugin, hopper, note):
    call = simple_call(2, 4, 256, head_dim=64, is_causal=True)
    grad_out = gradient_for(call)

    def attend(query, key, value):
        with plugin.sdpa_backend("cuda"):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    compiled = torch.compile(attend, fullgraph=True)
    with hopper():
        results = results_of(call, grad_out, lambda *args, **options: compiled(*args))
    note(check(results, expect(call, grad_out), None, "compiled"))


def test_peak_memory_is_at_most_that_of_stocks_flash(plugin, hopper):
    """Workspaces included; head_dim 128, where neither pads."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    call = simple_call(2, 16, 4096, head_dim=128, is_causal=True).leaves()
    grad_out = gradient_for(call)

    def peak(context):
        with context:
            for _ in range(2):
                gc.collect()  # of tests that failed before
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                torch.autograd.grad(call.run(), (call.query, call.key, call.value), grad_out)
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - before

    with hopper():
        ours = peak(contextlib.nullcontext())
    plugin.disable()
    stock = peak(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
    assert ours <= stock * 1.01, (ours, stock)
