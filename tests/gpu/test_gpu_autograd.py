"""Autograd around our kernels: second derivatives, torch.func, checkpoints, saved tensors, inputs changed in place."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from test_autograd import TRANSFORMS
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from common import check, deterministic_mode, expect, gradient_for, simple_call

sdpa = F.scaled_dot_product_attention


def tensors(device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 24, 16, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)]


def in_float64(function, inputs):
    with sdpa_kernel(SDPBackend.MATH):
        return function(*(t.detach().double().requires_grad_() for t in inputs))


@pytest.mark.cuda_only
def test_first_and_second_derivatives(plugin, launched, device, take_everything):
    def derivatives(*inputs):
        out = sdpa(*inputs, is_causal=True)
        first = torch.autograd.grad(out.sin().sum(), inputs, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), inputs)]

    inputs = tensors(device)
    with launched():
        results = derivatives(*inputs)
    for ours, expected in zip(results, in_float64(derivatives, inputs)):
        torch.testing.assert_close(ours.double(), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.cuda_only
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(plugin, device, take_everything, name):
    query, key, value = (t.detach() for t in tensors(device))
    query, key, value = query[:, :, :5, :8], key[:, :, :6, :8], value[:, :, :6, :8]
    with sdpa_kernel(SDPBackend.MATH):
        wide = TRANSFORMS[name](lambda q: sdpa(q, key.double(), value.double()), query.double())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators without a batching rule
        result = TRANSFORMS[name](lambda q: sdpa(q, key, value), query)
    torch.testing.assert_close(result.double(), wide, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_checkpoint(plugin, launched, device, take_everything, reentrant, dropout_p):
    def run(recompute):
        torch.manual_seed(3)
        inputs = tensors(device, torch.bfloat16)
        block = lambda *t: sdpa(*t, dropout_p=dropout_p).relu()  # noqa: E731
        out = checkpoint(block, *inputs, use_reentrant=reentrant) if recompute else block(*inputs)
        out.square().sum().backward()
        return [out, *(t.grad for t in inputs)]

    with launched(), deterministic_mode():
        for a, b in zip(run(True), run(False)):
            assert torch.equal(a, b)


def test_saving_on_the_cpu(plugin, launched, note, device, take_everything):
    call = simple_call(2, 4, 200, head_dim=64, device=device, is_causal=True).leaves()
    grad_out = gradient_for(call)
    inputs = call.differentiable()
    with launched(), torch.autograd.graph.save_on_cpu():
        out = call.run()
        grads = torch.autograd.grad(out, list(inputs.values()), grad_out)
    note(check({"out": out.detach(), **dict(zip(inputs, grads))}, expect(call, grad_out), None, "saved on the CPU"))


@pytest.mark.parametrize("index", range(3))
def test_changing_an_input_before_backward_raises(plugin, launched, device, take_everything, index):
    changed = [t * 1.0 for t in tensors(device)]
    with launched():
        out = sdpa(*changed)
        changed[index].mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_batched_gradients(plugin, launched, device, take_everything):
    inputs = tensors(device)
    with launched():
        out = sdpa(*inputs)
        batch = torch.randn(3, *out.shape, device=device)
        grads = torch.autograd.grad(out, inputs, batch, is_grads_batched=True, retain_graph=True)
        for index in range(3):
            one = torch.autograd.grad(out, inputs, batch[index], retain_graph=True)
            torch.testing.assert_close([g[index] for g in grads], list(one), atol=1e-5, rtol=1e-4)
