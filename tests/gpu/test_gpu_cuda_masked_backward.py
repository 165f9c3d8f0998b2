"""The Hopper backward of calls with a bool mask, forced: lists and bits, gradients against float64, what must not leak.

FLASHBACKEND_RANDOM_CALLS sets how many random calls are drawn (default 200 here).
"""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import random

import pytest
import torch
from backward_forms import use_form
from hopper_calls import DTYPES, MANY, draw, gradient_checker, pattern
from repeated_calls import TURNS, check_repeats
from test_gpu_cuda_backward import hopper
from test_gpu_cuda_masks import (
    MASK_LAYOUTS,
    MASK_SHAPES,
    PATTERNS,
    mask_in_layout,
    pytestmark,
)
from torch import Tensor

from torch_flashbackend import ops, reference
from torch_flashbackend.kernels.cuda import backward_parts

from common import (
    Call,
    block_pattern,
    check,
    deterministic_mode,
    expect,
    gradient_for,
    results_of,
    simple_call,
)

__all__ = ["hopper", "pytestmark"]  # a fixture and the marks of this file too

RANDOM_CALLS = int(os.environ.get("FLASHBACKEND_RANDOM_CALLS", "200"))
CHUNK = 20
BATCHES_AT_A_TIME = backward_parts.batches_at_a_time


@pytest.fixture(autouse=True)
def all_batches_at_once(monkeypatch):
    """Here whatever memory it takes, so that small calls reach the kernel too."""
    monkeypatch.setattr(backward_parts, "batches_at_a_time", lambda query, *_: query.size(0))


@pytest.fixture
def check_gradients(plugin, hopper, note):
    return gradient_checker(plugin, hopper, note, ("efficient", "math"))


# ------------------------------------------------------------------------------------------------------- lists and bits


@pytest.mark.parametrize("layout", ["contiguous", "odd rows", "transposed"])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lists_and_bits_are_what_the_mask_says(head_dim, in_order, layout):
    from torch_flashbackend import driver
    from torch_flashbackend.kernels.cuda import backward

    index = torch.cuda.current_device()
    thread, score = torch.arange(256)[:, None], torch.arange(32)
    key = thread // 32 * 16 + thread % 32 // 4 + 8 * (score // 2 % 2)
    row = 8 * (score // 4) + 2 * (thread % 4) + score % 2
    for seqlen_q, seqlen_k, block in ((300, 1000, 64), (129, 1056, 128), (64, 17, 4), (1, 700, 64)):
        call = simple_call(2, 3, seqlen_q, seqlen_k, head_dim)
        lse = torch.empty(call.query.shape[:3], device="cuda")
        for shape in ((2, 3, seqlen_q), (2, 1, 1)):
            seen = block_pattern((*shape, seqlen_k), torch.bool, seqlen_k, block=block, device="cuda")
            mask = mask_in_layout(seen, layout)
            plan = backward.Plan(
                call.query, call.key, call.value, call.query, lse, call.query, call.query, call.key, call.value,
                False, 0.1, in_order, mask=mask,
            )  # fmt: skip
            lists, block_m = plan._mask, plan.specialisation.tile.block_m
            memory = lists.make(mask, index, driver.current_stream(index)).memory.cpu()
            numbers, words = lists.numbers, block_m * 4
            q_tiles, k_tiles = math.ceil(seqlen_q / block_m), math.ceil(seqlen_k / 128)
            for batch, head in ((0, 0), (1, 2), (0, 1)):
                rows = seen.expand(2, 3, seqlen_q, -1)[batch, head].cpu()
                # Rows past the end see what the last one sees, of keys past the end nothing is seen.
                rows = torch.cat((rows, rows[-1:].expand(q_tiles * block_m - seqlen_q, -1)))
                tiles = torch.zeros(q_tiles * block_m, k_tiles * 128, dtype=torch.bool)
                tiles[:, :seqlen_k] = rows
                tiles = tiles.view(q_tiles, block_m, k_tiles, 128)
                some, every = tiles.any(3).any(1), tiles.all(3).all(1)
                plane = batch * numbers["plane_stride_batch"] + head * numbers["plane_stride_head"]
                for k_tile in range(k_tiles):
                    number = plane * k_tiles + k_tile
                    listed = memory[lists._lists_at + number * (2 + q_tiles) :].tolist()
                    entries = listed[1 : 1 + listed[0]]
                    assert [entry & 0xFFFF for entry in entries] == some[:, k_tile].nonzero()[:, 0].flip(0).tolist()
                    assert listed[1 + listed[0]] == -1
                    for entry in entries:
                        q_tile = entry & 0xFFFF
                        assert entry >> 16 & 0x7FFF == (some[q_tile, :k_tile].sum() if in_order else 0)
                        assert (entry < 0) == (not every[q_tile, k_tile])
                        if entry < 0:
                            at = number * numbers["q_tiles"] + (q_tile if numbers["q_tiles"] > 1 else 0)
                            bits = memory[at * words : (at + 1) * words].view(-1, 256, 1) >> score & 1
                            expected = tiles[q_tile, :, k_tile].view(-1, 64, 128)[:, row, key]
                            assert torch.equal(bits.bool(), expected)


# --------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("head_dims", [(64, 64), (80, 80), (128, 128), (40, 40), (96, 96), (112, 112)], ids=str)
def test_patterns(check_gradients, monkeypatch, head_dims, persistent):
    use_form(monkeypatch, persistent)
    for number, name in enumerate(PATTERNS):
        lengths = ((333, 500), (512, 512), (1000, 1008), (700, 129))[number % 4]
        check_gradients(
            simple_call(
                2, 2, *lengths, head_dims[0], head_dim_v=head_dims[1], dtype=DTYPES[number % 2], seed=number,
                attn_mask=pattern(name, *lengths), note=name,
            )
        )  # fmt: skip


@pytest.mark.parametrize("head_dim", range(8, 129, 8))
def test_head_dim(check_gradients, head_dim):
    check_gradients(simple_call(2, 3, 333, 400, head_dim, attn_mask=pattern("dead rows", 333, 400)))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seqlen_q", [1, 63, 64, 65, 127, 128, 129, 257])
def test_lengths_around_tiles(check_gradients, monkeypatch, seqlen_q, head_dim, persistent):
    use_form(monkeypatch, persistent)
    for seqlen_k in (1, 17, 127, 128, 129, 257):
        mask = pattern("causal" if seqlen_k % 2 else "dead rows", seqlen_q, seqlen_k, seed=seqlen_k)
        check_gradients(simple_call(1, 2, seqlen_q, seqlen_k, head_dim, attn_mask=mask, seed=seqlen_k))


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (6, 1)])
def test_broadcast_masks_and_grouped_queries(check_gradients, heads, kv_heads, shape):
    """Which dimensions the mask has of its own: batch, head, query, key."""
    for head_dim in (64, 128):
        lengths = (200, 304)
        sizes = [size if own else 1 for size, own in zip((3, heads, *lengths), shape)]
        mask = torch.rand(sizes, generator=torch.Generator("cuda").manual_seed(sum(sizes)), device="cuda") < 0.6
        check_gradients(simple_call(3, heads, *lengths, head_dim, kv_heads=kv_heads, attn_mask=mask))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("shape", [(1, 1, 2048, 2048), (1, 2, 600, 3000), (1, 2, 3000, 600)])
def test_long_sequences(check_gradients, shape, head_dim):
    for name in ("causal", "window", "checkerboard", "random"):
        check_gradients(simple_call(*shape, head_dim, attn_mask=pattern(name, *shape[2:]), note=name))


@pytest.mark.parametrize("layout", MASK_LAYOUTS)
def test_layouts_of_the_mask(check_gradients, layout):
    seen = block_pattern((2, 3, 200, 190), torch.bool, 5, block=48, device="cuda")
    for head_dim in (64, 128):
        check_gradients(simple_call(2, 3, 200, 190, head_dim, attn_mask=mask_in_layout(seen, layout)))


@pytest.mark.parametrize("shift", [-200.0, 200.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_far_from_zero(check_gradients, head_dim, shift):
    """Hidden scores, and those of keys past the end, must not count however large they are."""
    call = simple_call(1, 2, 190, 190, head_dim, attn_mask=pattern("dead rows", 190, 190))
    query, key = call.query.clone(), call.key.clone()
    query[..., 0], key[..., 0] = shift, 8.0
    check_gradients(dataclasses.replace(call, query=query, key=key, scale=1.0))


def head_dims_of_masked_backward(rng: random.Random) -> tuple[int, int]:
    return (rng.choice([64, 128, 8 * rng.randint(1, 16)]),) * 2


def random_masked_call(seed: int) -> tuple[Call, Tensor]:
    """Any lengths, GQA, layouts, broadcasts and patterns of blocks that the Hopper backward takes, and grad_out."""
    rng = random.Random(seed)
    lengths = {"special_lengths": (1, 64, 127, 128, 192), "longest": {MANY: 200}}
    drawn = draw(rng, seed, head_dims_of_masked_backward, batches=(1, 2, 3, MANY), grad_out=True, **lengths)
    shape = drawn.mask_shape(rng)
    seen = block_pattern(shape, torch.bool, seed, block=rng.choice([1, 16, 64, 128, 256]), device="cuda")
    layout = rng.choice(MASK_LAYOUTS)
    note = f"random masked call {seed} ({', '.join(drawn.layouts)}; mask {layout})"
    call = drawn.call(rng, [None, None, 0.5, 0.01], note, attn_mask=mask_in_layout(seen, layout))
    return call, drawn.tensors[3]


@pytest.mark.parametrize("first", range(0, RANDOM_CALLS, CHUNK))
def test_random_calls(check_gradients, monkeypatch, first):
    """The two forms of the main kernel in turn."""
    for seed in range(first, min(first + CHUNK, RANDOM_CALLS)):
        use_form(monkeypatch, persistent=seed % 2 == 0)
        check_gradients(*random_masked_call(seed))


# ------------------------------------------------------------------------------------ what is not seen and not written


def gradients_of(call: Call, out: Tensor, logsumexp: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
    from torch_flashbackend import ops

    return ops._gradients_cuda(
        grad_out, call.query, call.key, call.value, call.attn_mask, out, logsumexp, None, 0.0, False,
        call.softmax_scale, (True, True, True, False), "cuda",
    )[:3]  # fmt: skip


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """Bit by bit."""
    return all(torch.equal(*pair) for pair in zip(found, expected))


@pytest.mark.parametrize("head_dim", [64, 112, 128])
def test_nan_in_hidden_keys_and_values_does_not_leak(plugin, hopper, head_dim):
    """Columns that nobody sees, in mixed tiles: only the query's gradient may be NaN, by 0 times a key."""
    for length in (320, 333):
        seen = pattern("random", length, length)
        seen[..., 5::7] = False
        call = simple_call(1, 2, length, head_dim=head_dim, attn_mask=seen)
        grad_out = gradient_for(call)
        with hopper(), deterministic_mode():
            out, logsumexp = plugin.attention(call.query, call.key, call.value, seen, return_lse=True)
            clean = gradients_of(call, out, logsumexp, grad_out)
            key, value = call.key.clone(), call.value.clone()
            value[:, :, 5::14], value[:, :, 12::14] = torch.nan, torch.inf
            dirty = gradients_of(dataclasses.replace(call, value=value), out, logsumexp, grad_out)
            assert same(dirty, clean)
            key[:, :, 5::14], key[:, :, 12::14] = torch.nan, -torch.inf
            dirty = gradients_of(dataclasses.replace(call, key=key, value=value), out, logsumexp, grad_out)
            assert same(dirty[1:], clean[1:])
        assert not clean[1][:, :, 5::7].any() and not clean[2][:, :, 5::7].any()


@pytest.mark.parametrize("head_dim", [64, 112, 128])
def test_tiles_that_nobody_sees_are_not_visited(hopper, head_dim):
    seen = pattern("documents", 1024, 1024)
    seen[..., 256:384] = False
    call = simple_call(1, 2, 1024, head_dim=head_dim, attn_mask=seen)
    grad_out = gradient_for(call)
    names = ("query", "key", "value")
    with hopper(), deterministic_mode():
        clean = results_of(call, grad_out)
        call.key[:, :, 256:384] = call.value[:, :, 256:384] = torch.nan
        dirty = results_of(call, grad_out)
    assert torch.equal(dirty["out"], clean["out"])
    assert same(tuple(dirty[n] for n in names), tuple(clean[n] for n in names))


@pytest.mark.parametrize("head_dim", [64, 112, 128])
@pytest.mark.parametrize("name", ["dead rows", "upper", "nothing", "one row", "one column", "sparse"])
def test_rows_and_columns_that_see_nothing_have_gradients_of_zero(hopper, poison_free_memory, name, head_dim):
    """And every element is written: new memory is full of NaN."""
    call = simple_call(2, 2, 300, 333, head_dim, attn_mask=pattern(name, 300, 333))
    rows, columns = call.attn_mask.any(-1)[0, 0], call.attn_mask.any(-2)[0, 0]
    for mode in (False, True):
        poison_free_memory()
        with hopper(), deterministic_mode(mode):
            results = results_of(call, gradient_for(call))
        assert all(result.isfinite().all() for result in results.values())
        assert not results["query"][:, :, ~rows].any()
        assert not results["key"][:, :, ~columns].any() and not results["value"][:, :, ~columns].any()


# ------------------------------------------------------------------------------------------------ repetition and graphs


@pytest.mark.parametrize("name", ["causal", "random", "window", "checkerboard"])
@pytest.mark.parametrize("head_dim", [64, 96, 112, 128])
def test_deterministic_mode_repeats_bit_by_bit(hopper, note, head_dim, name):
    call = simple_call(2, 8, 700, 1000, head_dim, kv_heads=4, attn_mask=pattern(name, 700, 1000))
    grad_out = gradient_for(call)
    with hopper(), deterministic_mode():
        first = results_of(call, grad_out)
        for _ in range(10):
            again = results_of(call, grad_out)
            assert all(torch.equal(again[name], first[name]) for name in first)
    note(check(first, expect(call, grad_out), None, call.describe()))


def test_a_captured_graph_lists_the_mask_of_each_replay(hopper, note):
    call = simple_call(2, 4, 512, head_dim=128, attn_mask=pattern("causal", 512, 512))
    grad_out = gradient_for(call)
    with hopper():
        results_of(call, grad_out)
    graph = torch.cuda.CUDAGraph()
    leaves = call.leaves()
    with hopper(), torch.cuda.graph(graph):
        inputs = leaves.differentiable()
        grads = torch.autograd.grad(leaves.run(), list(inputs.values()), grad_out)
    for name in ("window", "nothing", "random", "causal"):
        call.attn_mask.copy_(pattern(name, 512, 512))
        leaves.attn_mask.copy_(call.attn_mask)
        for grad in grads:
            grad.fill_(torch.nan)
        graph.replay()
        note(check(dict(zip(inputs, grads)), expect(call, grad_out), None, f"replay with {name}"))


@pytest.mark.parametrize("rows", [1, 4096])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("length", [4096, 1000])
@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(4, 16, 16), (2, 32, 8), (2, 32, 32), (1, 16, 16)])
def test_memory_is_at_most_stocks(plugin, monkeypatch, rows, batch, heads, kv_heads, length, dropout_p):
    """Some batches or heads at a time, or on Triton's kernels."""
    monkeypatch.setattr(backward_parts, "batches_at_a_time", BATCHES_AT_A_TIME)
    mask = pattern("padding", length, length)[:, :, :rows].expand(batch, 1, -1, -1).contiguous()
    shapes = [(batch, number, length, 128) for number in (heads, kv_heads, kv_heads)]
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    grad_out = torch.randn_like(leaves[0])

    def peak() -> int:
        gc.collect()  # of tests that failed before
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = torch.nn.functional.scaled_dot_product_attention(
            *leaves, attn_mask=mask, dropout_p=dropout_p, enable_gqa=heads != kv_heads
        )  # fmt: skip
        torch.autograd.grad(out, leaves, grad_out)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    plugin.disable()
    peak()
    stock = peak()
    plugin.enable()
    with plugin.sdpa_backend("cuda"):
        peak()
        assert peak() <= stock


@pytest.fixture
def in_parts(monkeypatch):
    """Three batches or key heads at a time."""
    monkeypatch.setattr(backward_parts, "batches_at_a_time", lambda query, *_: 3 if query.size(0) > 1 else 0)


@pytest.mark.parametrize("batch", [4, 1])
@pytest.mark.parametrize("own", [(True, False), (False, False), (True, True)], ids=str)
def test_some_batches_or_heads_at_a_time(check_gradients, in_parts, batch, own):
    shape = batch if own[0] else 1, 8 if own[1] else 1, 512, 512
    mask = pattern("random", 512, 512).expand(shape).contiguous()
    check_gradients(simple_call(batch, 8, 512, head_dim=128, kv_heads=4, attn_mask=mask))
    assert ops.launch_counts()["flash_backward"] == 2


# -------------------------------------------------------------------------------------------------------------- dropout


def errors(grads: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> list[float]:
    """Of each gradient: the norm of the error over that of what is right."""
    return [
        (torch.linalg.vector_norm(grad.double() - right) / torch.linalg.vector_norm(right)).item()
        for grad, right in zip(grads, expected, strict=True)
    ]


def dropout_gradients(call: Call, dropout_p: float, seed: int) -> dict[str, tuple[Tensor, ...]]:
    """By backend, with the same dropout."""
    from torch_flashbackend import ops

    grad_out, dropout_seed = gradient_for(call), torch.tensor([seed << 40 | seed], device="cuda")
    scale, wanted = call.softmax_scale, (True, True, True, False)
    options = call.attn_mask, dropout_seed, dropout_p, call.is_causal, scale
    out, logsumexp = ops._attention_forward_cuda(call.query, call.key, call.value, *options, "query", "triton")
    saved = grad_out, call.query, call.key, call.value, call.attn_mask, out, logsumexp, dropout_seed
    return {
        backend: ops._gradients_cuda(*saved, dropout_p, call.is_causal, scale, wanted, backend)[:3]
        for backend in ("triton", "cuda")
    }


def judge_dropout(call: Call, dropout_p: float, seed: int, found: dict[str, tuple[Tensor, ...]]) -> None:
    """No further from float64's than twice Triton's own."""
    dropout_seed = torch.tensor([seed << 40 | seed], device="cuda")
    leaves = [tensor.detach().double().requires_grad_() for tensor in (call.query, call.key, call.value)]
    right = reference.attention(
        *leaves, call.attn_mask, dropout_p, call.is_causal, call.softmax_scale, dropout_seed
    )  # fmt: skip
    expected = torch.autograd.grad(right, leaves, gradient_for(call).double())
    for error, of_triton in zip(errors(found["cuda"], expected), errors(found["triton"], expected), strict=True):
        assert error <= 2.0 * of_triton + 1e-3, (call.describe(), error, of_triton)


def check_dropout(call: Call, dropout_p: float, seed: int = 5) -> None:
    judge_dropout(call, dropout_p, seed, dropout_gradients(call, dropout_p, seed))


@pytest.fixture
def hopper_backward_ran(plugin):
    """What the test calls must be the Hopper backward."""
    from torch_flashbackend import ops

    ops.reset_launch_counts()
    yield
    counts = ops.launch_counts()
    assert counts.get("flash_backward") and counts.get("flash_dropout_keys"), counts


@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 96, 40, 72])
def test_dropout(hopper_backward_ran, head_dim, is_causal, dropout_p):
    for number, lengths in enumerate(((128, 128), (333, 500), (1000, 260), (513, 1024))):
        call = simple_call(2, 4, *lengths, head_dim, kv_heads=2 if number % 2 else 4, dtype=DTYPES[number % 2],
                           is_causal=is_causal, seed=number)  # fmt: skip
        check_dropout(call, dropout_p, seed=number + 1)


@pytest.mark.parametrize("name", ["causal", "random", "window", "dead rows"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_dropout_beside_a_mask(hopper_backward_ran, head_dim, name):
    call = simple_call(2, 4, 333, 500, head_dim, kv_heads=2, attn_mask=pattern(name, 333, 500))
    check_dropout(call, 0.2)


@pytest.mark.parametrize("batch", [4, 1])
def test_dropout_beside_a_mask_in_parts(hopper_backward_ran, in_parts, batch):
    mask = pattern("padding", 333, 500)
    check_dropout(simple_call(batch, 8, 333, 500, 64, kv_heads=4, attn_mask=mask), 0.2)


@pytest.mark.parametrize("name", [None, "causal", "random"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_deterministic_dropout_repeats_bit_by_bit(hopper_backward_ran, head_dim, name):
    mask = None if name is None else pattern(name, 700, 1000)
    call = simple_call(2, 8, 700, 1000, head_dim, is_causal=name is None, attn_mask=mask)
    with deterministic_mode():
        first = dropout_gradients(call, 0.1, 5)
        for _ in range(5):
            again = dropout_gradients(call, 0.1, 5)["cuda"]
            assert all(torch.equal(*pair) for pair in zip(again, first["cuda"]))
    judge_dropout(call, 0.1, 5, first)


def test_dropping_everything_leaves_no_gradient(hopper_backward_ran):
    from torch_flashbackend import ops

    call = simple_call(1, 2, 200, head_dim=128)
    seed = torch.tensor([3], device="cuda")
    arguments = call.query, call.key, call.value, None
    out, logsumexp = ops._attention_forward_cuda(*arguments, seed, 1.0, False, 0.1, "query", "triton")
    grads = ops._gradients_cuda(
        gradient_for(call), *arguments, out, logsumexp, seed, 1.0, False, 0.1, (True, True, True, False), "cuda"
    )
    assert not any(grad.any() for grad in grads[:3])


@pytest.mark.parametrize("shape", [(150, 170), (2, 1, 150, 170), (2, 1, 1, 170)])
def test_repeated_calls_read_their_own_mask(shape):
    """What is kept of a call serves the next one, whose tensors lie elsewhere and whose mask differs in its values."""

    def make_mask():
        mask = torch.rand(shape, device="cuda") < 0.5
        mask[..., 0] = True
        return mask

    check_repeats("cuda", make_mask)
    entries = "flash_forward", "flash_mask_lists", "flash_mask_bits", "flash_backward", "flash_backward_finish"
    assert [ops.launch_counts().get(entry) for entry in entries] == [TURNS] * 5
