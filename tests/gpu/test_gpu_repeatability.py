"""Bitwise repeatable results, outputs written in full, streams, devices, and the memory that calls take."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
import torch.nn.functional as F

from torch_flashbackend import _torch

from common import (
    attention_float64,
    check,
    deterministic_mode,
    expect,
    gradient_for,
    in_threads,
    results_of,
    simple_call,
)

KINDS = ("dense", "causal", "bool", "bias_grad", "broadcast_bias_grad", "gqa", "float32", "value_dim", "dropout")


def make_call(kind, device, length=333):
    mask = None
    generator = torch.Generator(device=device).manual_seed(1)
    if kind == "bool":
        mask = torch.rand(2, 1, length, length, generator=generator, device=device) < 0.6
    if kind == "bias_grad":
        mask = torch.randn(2, 4, length, length, generator=generator, device=device)
    if kind == "broadcast_bias_grad":
        mask = torch.randn(1, 4, 1, length, generator=generator, device=device)
    return simple_call(
        2, 4, length, head_dim=64, device=device, attn_mask=mask, mask_grad="grad" in kind, is_causal=kind == "causal",
        kv_heads=2 if kind == "gqa" else None, dtype=torch.float32 if kind == "float32" else torch.bfloat16,
        head_dim_v=96 if kind == "value_dim" else None,
    )  # fmt: skip


def run(call, grad_out, kind):
    if kind != "dropout":
        return results_of(call, grad_out)
    torch.manual_seed(3)
    leaves = call.leaves()
    out = F.scaled_dot_product_attention(leaves.query, leaves.key, leaves.value, dropout_p=0.2)
    inputs = leaves.differentiable()
    gradients = torch.autograd.grad(out, list(inputs.values()), grad_out)
    return {"out": out.detach(), **dict(zip(inputs, gradients))}


@pytest.fixture
def deterministic():
    with deterministic_mode():
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_results_repeat_bit_by_bit(plugin, launched, backend, device, deterministic, kind):
    call = make_call(kind, device)
    grad_out = gradient_for(call)
    with plugin.sdpa_backend(backend), launched():
        first = run(call, grad_out, kind)
        for _ in range(4):
            again = run(call, grad_out, kind)
            assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.cuda_only
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_element_is_written(plugin, launched, note, backend, poison_free_memory, kind, in_order):
    """New memory is full of NaN here: what is left unwritten, or read before it is written, shows."""
    call = make_call(kind, "cuda")
    grad_out = gradient_for(call)
    with plugin.sdpa_backend(backend), launched(), deterministic_mode(in_order):
        clean = run(call, grad_out, kind)
        poison_free_memory()
        poisoned = run(call, grad_out, kind)
    for name in clean:
        assert poisoned[name].isfinite().all(), name
    if kind != "dropout":
        note(check(poisoned, expect(call, grad_out), None, kind))


@pytest.mark.cuda_only
def test_memory_without_the_dispatcher_is_like_torch_empty():
    like, shape, strides = torch.empty(1, device="cuda"), (2, 3, 4), (12, 4, 1)
    made = _torch.empty_float32(like, shape, strides)
    assert (made.shape, made.stride(), made.dtype, made.device) == (shape, strides, torch.float32, like.device)
    assert _torch._empty_strided_cuda is not None or torch.version.hip is not None


# -------------------------------------------------------------------------------------------------- streams and devices


@pytest.mark.cuda_only
def test_a_stream_that_is_not_the_default(plugin, launched, note, backend):
    call = simple_call(2, 4, 512, head_dim=64, is_causal=True)
    grad_out = gradient_for(call)
    stream = torch.cuda.Stream()
    query = torch.zeros_like(call.query)
    with plugin.sdpa_backend(backend), launched():
        results_of(call, grad_out)  # compiles
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            query.copy_(call.query)  # late: a launch on another stream would see zeros
            leaves = dataclasses.replace(call, query=query)
            results = results_of(leaves, grad_out)
        stream.synchronize()
    note(check(results, expect(call, grad_out), None, "side stream"))


@pytest.mark.cuda_only
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one(plugin, launched, note, backend):
    call = simple_call(2, 4, 256, head_dim=64, is_causal=True, device="cuda:1")
    grad_out = gradient_for(call)
    with plugin.sdpa_backend(backend), launched(), torch.cuda.device(0):
        results = results_of(call, grad_out)
        assert torch.cuda.current_device() == 0
    note(check(results, expect(call, grad_out), None, "cuda:1 while cuda:0 is current"))


def test_many_threads_at_once(plugin, backend, device):
    call = simple_call(1, 2, 128, head_dim=64, device=device)
    expected = attention_float64(call)

    def work(_):
        with plugin.sdpa_backend(backend):
            mine = dataclasses.replace(call, scale=None)
            for _ in range(20):
                assert (mine.run().double() - expected).abs().max() < 0.03

    in_threads(work, 8)


# --------------------------------------------------------------------------------------------------------------- memory

MEMORY_CASES = {
    "dense": {},
    "causal": {"is_causal": True},
    "padding": {"attn_mask": (4, 1, 1, 1024)},
    "bool mask": {"attn_mask": (4, 1, 1024, 1024)},
    "bias": {"attn_mask": (1, 16, 1024, 1024), "bias": True},
    "batch bias": {"attn_mask": (4, 1, 1024, 1024), "bias": True},
    "bias with gradient": {"attn_mask": (1, 16, 1024, 1024), "bias": True, "mask_grad": True},
    "narrow bias with gradient": {"attn_mask": (1, 16, 1, 1024), "bias": True, "mask_grad": True},
    "gqa": {"kv_heads": 4, "is_causal": True},
    "gqa and mask": {"kv_heads": 4, "attn_mask": (4, 1, 1024, 1024)},
    "head_dim 64": {"head_dim": 64},
    "head_dim 96": {"head_dim": 96, "is_causal": True},
    "head_dim 256": {"head_dim": 256, "is_causal": True},
    "head_dim 512": {"head_dim": 512},
    "value head_dim": {"head_dim": 192, "head_dim_v": 128, "is_causal": True},
    "float32": {"dtype": torch.float32},
    "transposed": {"layout": "bshd", "is_causal": True},
    "packed": {"layout": "packed", "is_causal": True},
    "short": {"seqlen_q": 64},
    "one query": {"seqlen_q": 1, "seqlen_k": 1024, "kv_heads": 4},
}


@pytest.mark.cuda_only
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("name", MEMORY_CASES)
def test_peak_memory_is_at_most_stocks(plugin, launched, take_everything, name, training):
    options = dict(MEMORY_CASES[name])
    shape, bias = options.pop("attn_mask", None), options.pop("bias", False)
    if shape is not None:
        options["attn_mask"] = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            if bias
            else (torch.rand(shape, device="cuda") < 0.8)
        )
    sizes = {"seqlen_q": 1024, "head_dim": 128}
    call = simple_call(4, 16, **{**sizes, **options}).leaves(training)
    grad_out = gradient_for(call)

    def one_call():
        out = call.run()
        return torch.autograd.grad(out, list(call.differentiable().values()), grad_out) if training else out

    def peak():
        for _ in range(2):
            one_call()
        torch.cuda.synchronize()
        gc.collect()  # what earlier tests left in cycles must not be freed, and so counted, in between
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = one_call()
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before

    with launched():
        ours = peak()
    plugin.disable()
    stock = peak()
    assert ours <= stock, f"{name}: ours {ours:,} bytes, stock {stock:,} ({ours / stock:.3f} times)"
