"""The Hopper backward of calls with a float mask, forced: lists, gradients against float64, what must not leak.

FLASHBACKEND_RANDOM_CALLS sets how many random calls are drawn (default 100 here).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import math
import os

import pytest
import torch
from hopper_calls import gradient_checker
from test_gpu_cuda_backward import hopper
from test_gpu_cuda_float_masks import (
    BFLOAT,
    HALF,
    KINDS,
    OWN,
    PATTERNS,
    SINGLE,
    float_mask,
    in_rows_of_16_bytes,
    pattern,
    random_masked_call,
)
from test_gpu_cuda_masked_backward import BATCHES_AT_A_TIME, all_batches_at_once
from test_gpu_cuda_masks import pytestmark
from torch import Tensor

from torch_flashbackend import ops
from torch_flashbackend.kernels.cuda import backward, backward_parts, forward

from common import Call, block_pattern, check, deterministic_mode, expect, gradient_for, results_of, simple_call

__all__ = ["all_batches_at_once", "hopper", "pytestmark"]  # fixtures and the marks of this file too

RANDOM_CALLS = int(os.environ.get("FLASHBACKEND_RANDOM_CALLS", "100"))
CHUNK = 10
NAMES = ("query", "key", "value")


@pytest.fixture(scope="module", autouse=True)
def compiled_side_by_side():
    """What most tests launch, compiled several at a time."""
    jobs = []
    for dtype in (BFLOAT, HALF):
        for head_dim in (64, 128):
            for per_key in (False, True):
                options = {"is_float_mask": True, "mask_per_key": per_key}
                jobs.append(
                    backward.specialise(head_dim, head_dim, dtype, False, False, 1 << 20, True, **options)
                )  # fmt: skip
                jobs.append(forward.specialise_masked(head_dim, head_dim, dtype, per_key, True, dtype))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(lambda spec: spec.compile(), jobs))


@pytest.fixture
def check_gradients(plugin, hopper, note):
    """As of the other backwards, and Triton's computes nothing."""
    checked = gradient_checker(plugin, hopper, note, ("efficient", "math"))

    def run(call: Call, grad_out: Tensor | None = None) -> dict[str, Tensor]:
        results = checked(call, grad_out)
        counts = ops.launch_counts()
        assert not any(name.startswith("attention_backward") for name in counts), counts
        return results

    return run


# ---------------------------------------------------------------------------------------------------------------- lists

FULL, VALUES, BITS = 0, 1, 2


def expected_kinds(mask: Tensor, block_m: int) -> Tensor:
    """The kind of each tile [query tiles, tiles of keys] of a mask [rows, keys], -1 where it is not visited."""
    lowest, rows, keys = torch.finfo(mask.dtype).min, *mask.shape
    q_tiles, k_tiles = math.ceil(rows / block_m), math.ceil(keys / 128)
    has_larger = (mask > -2.0).any(1)
    # Rows past the end are as the last one.
    mask = torch.cat((mask, mask[-1:].expand(q_tiles * block_m - rows, -1)))
    has_larger = torch.cat((has_larger, has_larger[-1:].expand(q_tiles * block_m - rows)))
    lowest_hides = has_larger.view(q_tiles, block_m).all(1)[:, None]
    padded = torch.nn.functional.pad(mask, (0, k_tiles * 128 - keys), value=-math.inf)

    def any_is(found: Tensor) -> Tensor:
        return found.view(q_tiles, block_m, k_tiles, 128).any(3).any(1)

    zeros, hidden, low = any_is(padded == 0.0), any_is(padded == -math.inf), any_is(padded == lowest)
    others = any_is((padded != 0.0) & (padded != -math.inf) & (padded != lowest))
    kinds = torch.where(zeros, torch.where(hidden | low, BITS, FULL), -1)
    return torch.where(others | (low & ~lowest_hides), VALUES, kinds)


def late_numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Lowest numbers, and what decides about them far into rows and tiles: a larger one at a row's end, or in none."""
    mask = torch.full(shape, torch.finfo(dtype).min, device="cuda", dtype=dtype)
    mask[..., -1] = 0.0
    mask[:, :, 20] = torch.finfo(dtype).min
    mask[:, :, 105:, :3] = 0.5
    return mask


@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lists_and_bits_are_what_the_mask_says(head_dim, dtype):
    from torch_flashbackend import driver

    index = torch.cuda.current_device()
    thread, score = torch.arange(256)[:, None], torch.arange(32)
    key = thread // 32 * 16 + thread % 32 // 4 + 8 * (score // 2 % 2)
    row = 8 * (score // 4) + 2 * (thread % 4) + score % 2
    met = set()
    for seqlen_q, seqlen_k, block in ((300, 1000, 64), (129, 1053, 128), (64, 17, 4), (500, 2000, 256)):
        call = simple_call(2, 3, seqlen_q, seqlen_k, head_dim, dtype=dtype)
        lse = torch.empty(2, *call.query.shape[:3], device="cuda")
        patterns = [
            block_pattern((*shape, seqlen_k), dtype, seqlen_k, block=block, device="cuda")
            for shape in ((2, 3, seqlen_q), (2, 1, 1))
        ]
        for mask in map(in_rows_of_16_bytes, [*patterns, late_numbers((2, 3, seqlen_q, seqlen_k), dtype)]):
            plan = backward.Plan(
                call.query, call.key, call.value, call.query, lse, call.query, call.query, call.key, call.value,
                False, 0.1, False, mask=mask,
            )  # fmt: skip
            lists, block_m = plan._mask, plan.specialisation.tile.block_m
            memory = lists.make(mask, index, driver.current_stream(index)).memory.cpu()
            numbers, words = lists.numbers, block_m * 4
            q_tiles, k_tiles = math.ceil(seqlen_q / block_m), math.ceil(seqlen_k / 128)
            for batch, head in ((0, 0), (1, 2), (0, 1)):
                rows = mask.expand(2, 3, seqlen_q, -1)[batch, head].cpu()
                kinds = expected_kinds(rows, block_m)
                seen = torch.cat((rows, rows[-1:].expand(q_tiles * block_m - seqlen_q, -1))) == 0.0
                seen = torch.nn.functional.pad(seen, (0, k_tiles * 128 - seqlen_k))
                tiles = seen.view(q_tiles, block_m, k_tiles, 128)
                plane = batch * numbers["plane_stride_batch"] + head * numbers["plane_stride_head"]
                for k_tile in range(k_tiles):
                    number = plane * k_tiles + k_tile
                    listed = memory[lists._lists_at + number * (2 + q_tiles) :].tolist()
                    entries = listed[1 : 1 + listed[0]]
                    visited = (kinds[:, k_tile] >= 0).nonzero()[:, 0].flip(0)
                    assert [entry & 0xFFFF for entry in entries] == visited.tolist()
                    assert listed[1 + listed[0]] == -1
                    assert [entry >> 30 & 3 for entry in entries] == kinds[visited, k_tile].tolist()
                    met |= set(kinds[visited, k_tile].tolist())
                    for entry in entries:
                        q_tile = entry & 0xFFFF
                        if entry >> 30 & 3 == BITS:
                            at = number * numbers["q_tiles"] + (q_tile if numbers["q_tiles"] > 1 else 0)
                            bits = memory[at * words : (at + 1) * words].view(-1, 256, 1) >> score & 1
                            expected = tiles[q_tile, :, k_tile].view(-1, 64, 128)[:, row, key]
                            assert torch.equal(bits.bool(), expected)
    assert met == {FULL, VALUES, BITS}


# --------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_patterns(check_gradients, head_dim, kind):
    for number, name in enumerate(PATTERNS):
        lengths = ((333, 500), (512, 512), (700, 129))[number % 3]
        mask = float_mask(pattern(name, *lengths), kind, BFLOAT, number)
        check_gradients(
            simple_call(2, 2, *lengths, head_dim, seed=number, attn_mask=mask, note=f"{name} {kind}")
        )  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 128])
def test_float16(check_gradients, head_dim):
    for number, kind in enumerate(KINDS):
        for name in ("causal", "dead rows", "padding"):
            mask = float_mask(pattern(name, 333, 397), kind, HALF, number)
            check_gradients(simple_call(1, 2, 333, 397, head_dim, dtype=HALF, seed=number, attn_mask=mask, note=kind))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths_around_tiles(check_gradients, head_dim):
    for seqlen_q in (1, 63, 65, 128, 129, 257):
        for seqlen_k in (2, 17, 127, 129, 257):
            for kind in ("bias", "lowest"):
                mask = float_mask(pattern("causal", seqlen_q, seqlen_k), kind, BFLOAT, seqlen_k)
                check_gradients(simple_call(1, 2, seqlen_q, seqlen_k, head_dim, attn_mask=mask, seed=seqlen_k))


@pytest.mark.parametrize("shape", OWN, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_broadcast_masks_and_grouped_queries(check_gradients, heads, kv_heads, shape):
    """Which of batch, head and query the mask has of its own; broadcast by size and by expand."""
    for head_dim in (64, 128):
        sizes = [size if own else 1 for size, own in zip((3, heads, 200), shape)]
        mask = block_pattern((*sizes, 333), BFLOAT, sum(sizes), block=32, device="cuda")
        mask = in_rows_of_16_bytes(mask)
        check_gradients(simple_call(3, heads, 200, 333, head_dim, kv_heads=kv_heads, attn_mask=mask))
        expanded = mask.expand(3, heads, 200, 333)
        check_gradients(simple_call(3, heads, 200, 333, head_dim, kv_heads=kv_heads, attn_mask=expanded))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_sequences(check_gradients, head_dim):
    """Rings that go round many times; tiles of all kinds take turns."""
    for name, kind in (("causal", "lowest"), ("causal", "bias"), ("random", "bias and lowest"), ("documents", "bias")):
        mask = float_mask(pattern(name, 1500, 1800), kind, BFLOAT)
        check_gradients(simple_call(1, 2, 1500, 1800, head_dim, attn_mask=mask, note=f"{name} {kind}"))
    blocks = in_rows_of_16_bytes(block_pattern((1, 2, 1500, 1800), BFLOAT, 3, block=128, device="cuda"))
    check_gradients(simple_call(1, 2, 1500, 1800, head_dim, attn_mask=blocks))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_numbers_of_any_size(check_gradients, head_dim):
    """Natural units: times log2(e) the lowest number would be -infinity; large ones absorb scores as in the forward."""
    lowest = torch.finfo(BFLOAT).min
    values = torch.tensor([lowest, lowest * 0.99, lowest / 2, -1e30, -3e5, -1e4, 0.0, 3.0], device="cuda").to(BFLOAT)
    generator = torch.Generator("cuda").manual_seed(3)
    for count in range(1, len(values) + 1):
        chosen = torch.randint(count, (1, 1, 300, 456), generator=generator, device="cuda")
        for mask in (values[chosen], values[chosen[:, :, :1]]):
            check_gradients(simple_call(1, 2, 300, 456, head_dim, attn_mask=mask))
    growth = torch.linspace(6.0, 30.0, 456, device="cuda")
    for factor in (1.0, 50.0, -400.0):
        steep = float_mask(pattern("causal", 300, 456), "bias", BFLOAT) + (growth * factor).to(BFLOAT)
        for mask in (steep, (growth * factor).to(BFLOAT)[None, None, None]):
            check_gradients(simple_call(1, 2, 300, 456, head_dim, attn_mask=mask))


@pytest.mark.parametrize("head_dim", [8, 40, 72, 80, 96, 112, 120])
def test_head_dim(check_gradients, head_dim):
    for kind in ("bias", "lowest"):
        mask = float_mask(pattern("dead rows", 333, 400), kind, BFLOAT)
        check_gradients(simple_call(2, 3, 333, 400, head_dim, attn_mask=mask))


@pytest.mark.parametrize("first", range(0, RANDOM_CALLS, CHUNK))
def test_random_calls(check_gradients, first):
    for seed in range(first, min(first + CHUNK, RANDOM_CALLS)):
        call = random_masked_call(seed)
        if call.query.size(3) <= backward.MAX_EXTRAS_HEAD_DIM and call.attn_mask.dtype == call.query.dtype:
            check_gradients(call)


@pytest.mark.parametrize("shape", [(1, 4), (2, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_with_the_gradient_of_the_mask(check_gradients, head_dim, shape):
    """By a kernel of its own, which takes delta from this one's first."""
    mask = float_mask(pattern("causal", 512, 512).expand(*shape, -1, -1), "bias", BFLOAT)
    call = simple_call(2, 4, 512, head_dim=head_dim, attn_mask=mask, mask_grad=True)
    check_gradients(call)
    counts = ops.launch_counts()
    assert (counts["flash_backward"], counts["flash_bias_gradient"]) == (1, 1), counts


# ------------------------------------------------------------------------------------ what is not seen and not written


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", ["-inf", "bias"])
def test_nan_in_hidden_keys_and_values_does_not_leak(plugin, hopper, head_dim, kind):
    """Columns that nobody sees beside others: only the query's gradient may be NaN, by 0 times a key.

    Also where the last query tile is not full, and the numbers of the queries that it lacks would hide nothing.
    """
    for length in (320, 333):
        seen = pattern("random", length, length)
        seen[..., 5::7] = False
        call = simple_call(1, 2, length, head_dim=head_dim, attn_mask=float_mask(seen, kind, BFLOAT))
        grad_out = gradient_for(call)
        with hopper():
            clean = results_of(call, grad_out)
            key, value = call.key.clone(), call.value.clone()
            value[:, :, 5::14], value[:, :, 12::14] = torch.nan, torch.inf
            key[:, :, 5::14], key[:, :, 12::14] = torch.nan, -torch.inf
            out, logsumexp = ops._attention_forward_cuda(
                call.query, call.key, call.value, call.attn_mask, None, 0.0, False, call.softmax_scale, "query", "cuda"
            )
            dirty = ops._gradients_cuda(
                grad_out, call.query, key, value, call.attn_mask, out, logsumexp, None, 0.0, False, call.softmax_scale,
                (True, True, True, False), "cuda",
            )  # fmt: skip
        assert torch.equal(dirty[1], clean["key"]) and torch.equal(dirty[2], clean["value"])
        assert not clean["key"][:, :, 5::7].any() and not clean["value"][:, :, 5::7].any()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", ["lowest", "-inf"])
def test_tiles_that_nobody_sees_are_not_visited(hopper, head_dim, kind):
    seen = pattern("documents", 1024, 1024)
    seen[..., 256:384] = False
    call = simple_call(1, 2, 1024, head_dim=head_dim, attn_mask=float_mask(seen, kind, BFLOAT))
    grad_out = gradient_for(call)
    with hopper():
        clean = results_of(call, grad_out)
        call.key[:, :, 256:384] = call.value[:, :, 256:384] = torch.nan
        dirty = results_of(call, grad_out)
    for name in NAMES[1:]:
        assert torch.equal(dirty[name], clean[name])
    assert torch.allclose(dirty["query"].float(), clean["query"].float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", ["-inf", "bias"])
@pytest.mark.parametrize("name", ["dead rows", "upper", "nothing"])
def test_rows_and_columns_that_see_nothing_have_gradients_of_zero(hopper, name, kind, head_dim):
    seen = pattern(name, 300, 333)
    call = simple_call(2, 2, 300, 333, head_dim, attn_mask=float_mask(seen, kind, BFLOAT))
    rows, columns = seen.any(-1)[0, 0], seen.any(-2)[0, 0]
    with hopper():
        results = results_of(call, gradient_for(call))
    assert all(result.isfinite().all() for result in results.values())
    assert not results["query"][:, :, ~rows].any()
    assert not results["key"][:, :, ~columns].any() and not results["value"][:, :, ~columns].any()


# ------------------------------------------------------------------------------------------- parts, graphs and refusals


@pytest.mark.parametrize("sizes", [(4, 8, 4), (1, 8, 4), (1, 8, 8)], ids=str)
@pytest.mark.parametrize(("own_heads", "mask_grad"), [(False, False), (True, False), (True, True)])
def test_some_batches_or_heads_at_a_time(check_gradients, monkeypatch, sizes, own_heads, mask_grad):
    """Of a single batch some heads. The last part is smaller than the others."""
    monkeypatch.setattr(backward_parts, "batches_at_a_time", lambda query, *_: 3 if query.size(0) > 1 else 0)
    batch, heads, kv_heads = sizes
    shape = batch, heads if own_heads else 1, 512, 512
    mask = float_mask(pattern("random", 512, 512).expand(shape), "bias", BFLOAT)
    check_gradients(
        simple_call(batch, heads, 512, head_dim=128, kv_heads=kv_heads, attn_mask=mask, mask_grad=mask_grad)
    )
    assert ops.launch_counts()["flash_backward"] == math.ceil((batch if batch > 1 else kv_heads) / 3)


@pytest.mark.parametrize("kind", ["bias", "lowest"])
@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(4, 16, 16), (2, 32, 8), (1, 32, 32)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_memory_is_at_most_stocks(plugin, hopper, monkeypatch, head_dim, batch, heads, kv_heads, kind):
    monkeypatch.setattr(backward_parts, "batches_at_a_time", BATCHES_AT_A_TIME)
    mask = float_mask(pattern("causal", 2048, 2048).expand(batch, 1, -1, -1), kind, BFLOAT)
    shapes = [(batch, number, 2048, head_dim) for number in (heads, kv_heads, kv_heads)]
    leaves = [torch.randn(shape, device="cuda", dtype=BFLOAT, requires_grad=True) for shape in shapes]
    grad_out = torch.randn_like(leaves[0])

    def peak() -> int:
        gc.collect()  # of tests that failed before
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = torch.nn.functional.scaled_dot_product_attention(
            *leaves, attn_mask=mask, enable_gqa=heads != kv_heads
        )  # fmt: skip
        torch.autograd.grad(out, leaves, grad_out)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    plugin.disable()
    peak()
    stock = peak()
    plugin.enable()
    with hopper():
        peak()
        assert peak() <= stock


def test_replays_see_the_masks_values(plugin, hopper):
    call = simple_call(2, 2, 300, 400, 128, attn_mask=float_mask(pattern("causal", 300, 400), "lowest", BFLOAT))
    grad_out = gradient_for(call)
    with hopper():
        results_of(call, grad_out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = results_of(call, grad_out)
    for kind in ("bias", "-inf"):
        call.attn_mask.copy_(float_mask(pattern("random", 300, 400), kind, BFLOAT))
        graph.replay()
        check(captured, expect(call, grad_out), None, f"replay with {kind}")


@pytest.mark.parametrize("why", ["float32", "deterministic", "head_dim", "column"])
def test_calls_that_are_tritons(plugin, hopper, note, why):
    dtype = SINGLE if why == "float32" else BFLOAT
    mask = float_mask(pattern("causal", 256, 256), "bias", dtype)
    mask = mask[..., :1].contiguous() if why == "column" else mask
    call = simple_call(1, 2, 256, head_dim=192 if why == "head_dim" else 128, attn_mask=mask)
    grad_out = gradient_for(call)
    with hopper(False):
        if why == "deterministic":
            with deterministic_mode():
                results = results_of(call, grad_out)
        elif why == "column":
            out, logsumexp = ops._attention_forward_cuda(
                call.query, call.key, call.value, mask, None, 0.0, False, call.softmax_scale, "query", "triton"
            )
            grads = ops._gradients_cuda(
                grad_out, call.query, call.key, call.value, mask, out, logsumexp, None, 0.0, False, call.softmax_scale,
                (True, True, True, False), "cuda",
            )[:3]  # fmt: skip
            results = {"out": out, **dict(zip(NAMES, grads, strict=True))}
        else:
            results = results_of(call, grad_out)
    note(check(results, expect(dataclasses.replace(call, mask_grad=False), grad_out), None, call.describe()))
