"""Calls that are found again, on Triton's kernels: the results of a repeat are those of its own tensors."""

from __future__ import annotations

import pytest
import torch
from hooked import sample

from torch_flashbackend import _torch, ops, plans, reference
from torch_flashbackend.kernels.triton import attention


@pytest.fixture
def plans_made(monkeypatch):
    """CPU tensors run the kernels, as if they were on a GPU; this is a function that says how many plans there are."""

    def below(operator, implementation, tensor, *arguments):
        return implementation(tensor, *arguments)

    monkeypatch.setattr(ops, "_below_autograd", below)
    monkeypatch.setattr(ops, "_backwards", plans.Recent())
    monkeypatch.setattr(_torch, "allocator", lambda like: torch._C._dynamo.guards._empty_strided_cpu)
    attention._plans.clear()
    yield lambda: len(attention._plans)
    attention._plans.clear()


MASKS = {
    "none": None,
    "bool": lambda seed: sample(20, 24, seed=seed) > -0.5,
    "a row": lambda seed: sample(2, 1, 1, 24, seed=seed).requires_grad_(),
    "float": lambda seed: sample(1, 2, 20, 24, seed=seed).requires_grad_(),
}


def call(seed, mask, is_causal=False, layout=lambda t: t):
    """Query, key and value that need gradients, what is passed on beside them, and the output's gradient."""
    query, key, value, grad_out = (
        layout(sample(2, heads, length, 16, seed=seed + i)).requires_grad_(i < 3)
        for i, (heads, length) in enumerate(((2, 20), (1, 24), (1, 24), (2, 20)))
    )
    made = None if MASKS[mask] is None else MASKS[mask](seed)
    return (query, key, value), (made, 0.0, is_causal, 0.3), grad_out


def check(run, inputs, options, grad_out):
    mask, *rest = options
    leaves = [*inputs, mask] if mask is not None and mask.requires_grad else [*inputs]
    out = run(*inputs, *options)
    expected = reference.attention(*inputs, mask, *rest)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    grads = torch.autograd.grad(out, leaves, grad_out)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, leaves, grad_out), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("mask", "is_causal"), [("none", False), ("none", True), ("bool", False), ("a row", False),
                                                 ("float", False)])  # fmt: skip
def test_repeats_compute_with_their_own_tensors(plans_made, mask, is_causal):
    run = ops.ReadyRun("triton", needs_grad=True)
    for turn in range(3):
        check(run, *call(10 * turn, mask, is_causal))
    assert plans_made() == 2


def test_another_layout_scale_or_mask_is_another_plan(plans_made):
    """Runs of calls with several keys, as the hooks keep them, take turns."""
    strided = {"layout": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)}
    kinds = [("none", {}), ("none", {"is_causal": True}), ("none", strided), ("bool", {}), ("float", {})]
    runs = [ops.ReadyRun("triton", needs_grad=True) for _ in kinds]
    for turn in range(2):
        for run, (mask, options) in zip(runs, kinds, strict=True):
            check(run, *call(10 * turn, mask, **options))
        assert plans_made() == 2 * len(kinds)
    inputs, (mask, dropout_p, is_causal, _), grad_out = call(0, "none")
    check(runs[0], inputs, (mask, dropout_p, is_causal, -0.2), grad_out)
    assert plans_made() == 2 * len(kinds) + 2
