"""Head dimensions from 1 to 512, odd ones included, and sizes beyond what 16, 17 and 31 bits count."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from common import attention_float64, attention_rows_float64, gradient_for, simple_call

HEAD_DIMS = (1, 2, 3, 7, 8, 15, 16, 17, 24, 31, 33, 40, 48, 63, 72, 80, 96, 104, 120, 127, 129, 144, 160, 192, 200, 224,
             255, 256, 257, 320, 384, 448, 511, 512)  # fmt: skip


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dim(check_call, device, head_dim):
    dtype = (torch.bfloat16, torch.float16)[head_dim % 2]
    check_call(simple_call(1, 2, 150, head_dim=head_dim, dtype=dtype, device=device, is_causal=head_dim % 3 == 0))


@pytest.mark.parametrize("head_dim", [5, 64, 100, 128, 256, 300, 512])
def test_head_dim_in_float32(check_call, device, head_dim):
    check_call(simple_call(1, 2, 150, head_dim=head_dim, dtype=torch.float32, device=device))


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [
        (64, 128),
        (128, 64),
        (192, 128),
        (128, 192),
        (40, 64),
        (64, 1),
        (1, 64),
        (33, 77),
        (256, 512),
        (512, 64),
        (576 - 64, 16),
    ],
)
def test_value_head_dim_differs(check_call, device, head_dim, head_dim_v):
    check_call(simple_call(1, 2, 130, head_dim=head_dim, head_dim_v=head_dim_v, device=device, is_causal=True))


@pytest.mark.parametrize("seqlen_q", [1, 2, 15, 16, 17, 63, 65, 127, 129, 255, 257])
@pytest.mark.parametrize("seqlen_k", [1, 16, 33, 128, 257])
def test_lengths_around_tiles(check_call, device, seqlen_q, seqlen_k):
    check_call(simple_call(1, 2, seqlen_q, seqlen_k, 64, device=device))


@pytest.mark.cuda_only
@pytest.mark.parametrize(("batch", "heads"), [(70_000, 1), (1, 70_000), (300, 300)])
@pytest.mark.parametrize("kind", ["causal", "bool"])
def test_more_than_65535_heads_in_all(check_call, batch, heads, kind):
    mask = torch.rand(1, 1, 24, 24, device="cuda") < 0.7 if kind == "bool" else None
    call = simple_call(batch, heads, 24, head_dim=16, is_causal=kind == "causal", attn_mask=mask)
    check_call(call, kernels=("math",))


def needs_gigabytes(number: float) -> None:
    free = torch.cuda.mem_get_info()[0] / 1e9
    if free < number:
        pytest.skip(f"needs {number:.0f} GB of free GPU memory, {free:.0f} are there")


def relative(actual, expected):
    return (torch.linalg.vector_norm(actual.double() - expected) / torch.linalg.vector_norm(expected)).item()


@pytest.mark.cuda_only
def test_more_than_2_to_the_31_elements_in_query(plugin, launched, backend):
    needs_gigabytes(40)
    call = simple_call(1, 2, 8_500_000, 64, 128).leaves()
    assert call.query.numel() > 2**31
    grad_out = gradient_for(call)
    with plugin.sdpa_backend(backend), launched():
        out = call.run()
        gradients = torch.autograd.grad(out, (call.query, call.key, call.value), grad_out)
    out = out.detach()
    grad_key, grad_value = (torch.zeros(t.shape, dtype=torch.float64, device="cuda") for t in (call.key, call.value))
    worst = 0.0
    for start in range(0, call.query.size(2), 2**19):
        rows = slice(start, start + 2**19)
        query = call.query.detach()[:, :, rows].double().requires_grad_()
        key, value = (t.detach().double().requires_grad_() for t in (call.key, call.value))
        part = dataclasses.replace(call, query=query, key=key, value=value)
        expected = attention_float64(part)
        parts = torch.autograd.grad(expected, (query, key, value), grad_out[:, :, rows].double())
        worst = max(worst, relative(out[:, :, rows], expected), relative(gradients[0][:, :, rows], parts[0]))
        grad_key += parts[1]
        grad_value += parts[2]
    assert worst < 0.01
    assert relative(gradients[1], grad_key) < 0.01 and relative(gradients[2], grad_value) < 0.01


@pytest.mark.cuda_only
def test_more_than_2_to_the_31_elements_in_key(plugin, launched, backend):
    needs_gigabytes(40)
    call = simple_call(1, 2, 40, 8_500_000, 128, scale=0.5)
    with plugin.sdpa_backend(backend), launched():
        out = call.run()
    for head in range(2):
        part = dataclasses.replace(
            call,
            query=call.query[:, head : head + 1],
            key=call.key[:, head : head + 1],
            value=call.value[:, head : head + 1],
        )
        assert relative(out[:, head : head + 1], attention_float64(part)) < 0.01


@pytest.mark.cuda_only
@pytest.mark.parametrize("causal", [False, True])
def test_sequences_longer_than_2_to_the_17(plugin, launched, backend, causal):
    needs_gigabytes(20)
    length = 2**17 + 100
    call = simple_call(1, 1, length, head_dim=32, is_causal=causal).leaves()
    grad_out = gradient_for(call)
    with plugin.sdpa_backend(backend), launched():
        out = call.run()
        gradients = torch.autograd.grad(out, (call.query, call.key, call.value), grad_out)
    # All rows in float64, a slice at a time.
    expected = [torch.empty(call.query.shape, dtype=torch.float64, device="cuda") for _ in range(2)]
    sums = [torch.zeros(t.shape, dtype=torch.float64, device="cuda") for t in (call.key, call.value)]
    for start in range(0, length, 1024):
        rows = torch.arange(start, min(start + 1024, length), device="cuda")
        inputs = [t.detach().double().requires_grad_() for t in (call.query, call.key, call.value)]
        part = dataclasses.replace(call, query=inputs[0], key=inputs[1], value=inputs[2])
        result = attention_rows_float64(part, rows)
        parts = torch.autograd.grad(result, inputs, grad_out[:, :, rows].double())
        expected[0][:, :, rows] = result.detach()
        expected[1][:, :, rows] = parts[0][:, :, rows]
        sums[0] += parts[1]
        sums[1] += parts[2]
    for actual, wanted in zip((out.detach(), *gradients), (*expected, *sums)):
        assert relative(actual, wanted) < 0.02


@pytest.mark.cuda_only
def test_a_long_mask_row(plugin, launched, backend):
    length = 2**17 + 64
    mask = torch.rand(1, 1, 1, length, device="cuda") < 0.5
    call = simple_call(1, 2, 48, length, 64, attn_mask=mask)
    with plugin.sdpa_backend(backend), launched():
        out = call.run()
    assert relative(out, attention_float64(call)) < 0.01
