"""Attention with sinks: the definition in float64, the operators (on a CPU: the math path), their derivatives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hooked import sample
from sink_cases import MASKS, judge_sinks, sink_call

from torch_flashbackend import ops, routing
from torch_flashbackend import sinks as module
from torch_flashbackend.problem import Problem
from torch_flashbackend.sinks import attention_with_sinks


def tensors(mask, grad=True):
    """query, key, value, attn_mask, sinks of a small call."""
    call = sink_call(mask, torch.float32, sizes=(2, 4, 2, 6, 9, 8))
    call = call.leaves() if grad else call
    return [call.query, call.key, call.value, call.attn_mask, call.sinks]


def by_operator(query, key, value, attn_mask, sinks, is_causal=False):
    """The operators; the kernels for a GPU under them are tested in tests/interpreter."""
    return module._forward_op(
        query, key, value, attn_mask, sinks, None, 0.0, is_causal, query.shape[-1] ** -0.5, "query", "triton"
    )[0]


def by_function(query, key, value, attn_mask, sinks, is_causal=False):
    return attention_with_sinks(query, key, value, sinks, attn_mask, 0.0, is_causal, enable_gqa=True)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", [by_operator, by_function])
def test_values_and_gradients_are_those_of_one_more_key(way, dtype, mask):
    call = sink_call(mask, dtype).leaves()
    out = way(call.query, call.key, call.value, call.attn_mask, call.sinks, call.is_causal)
    grad_out = sample(*out.shape, seed=9).to(dtype)
    inputs = call.inputs()
    grads = torch.autograd.grad(out, list(inputs.values()), grad_out)
    assert [g.dtype for g in grads] == [t.dtype for t in inputs.values()]
    judge_sinks(call, {"out": out.detach(), **dict(zip(inputs, grads))}, grad_out)


def test_the_definition_is_what_the_models_write():
    """One more column of scores, dropped after the softmax."""
    query, key, value, attn_mask, sinks = (t.double() for t in tensors("float", grad=False))
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    attn_mask, sinks = attn_mask.nan_to_num(neginf=0.0), sinks.clamp(min=-5.0)
    scores = query @ key.mT * query.shape[-1] ** -0.5 + attn_mask
    scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    torch.testing.assert_close(
        by_function(query, key, value, attn_mask, sinks), torch.softmax(scores, -1)[..., :-1] @ value
    )


def test_first_and_second_derivatives_by_finite_differences():
    made = [t.double() if t is not None else t for t in tensors("float", grad=False)]
    made[3] = made[3].nan_to_num(neginf=0.0)
    made[4] = made[4].clamp(-1.0, 1.0)
    query, key, value, attn_mask, sinks = (t[..., :3, :].clone() if t.dim() == 4 else t for t in made)
    attn_mask = attn_mask[..., :3].clone()
    inputs = [t.requires_grad_() for t in (query, key, value, attn_mask, sinks)]
    assert torch.autograd.gradcheck(by_function, inputs)
    assert torch.autograd.gradgradcheck(by_function, inputs)


def test_second_derivatives_by_the_operator_are_those_of_the_definition():
    def second(function, made):
        inputs = [made[0], made[1], made[4]]
        first = torch.autograd.grad(function(*made).square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    made = tensors("none")
    made[4] = made[4].detach().clamp(-3.0, 3.0).requires_grad_()
    wide = [t.detach().double().requires_grad_() if t is not None else t for t in made]
    for ours, expected in zip(second(by_operator, made), second(by_function, wide)):
        torch.testing.assert_close(ours.double(), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("wanted", range(5))
def test_one_input_alone_needs_a_gradient(wanted):
    made = tensors("float", grad=False)
    made[wanted].requires_grad_()
    (grad,) = torch.autograd.grad(by_operator(*made).sum(), made[wanted])
    every = tensors("float")
    torch.testing.assert_close(grad, torch.autograd.grad(by_operator(*every).sum(), every[wanted])[0])


def test_dropout_drops_the_same_in_backward_and_follows_the_seed():
    query, key, value, _, sinks = tensors("none")
    seed = torch.tensor([7])

    def run(function, *inputs):
        out = function(*inputs)
        return [out, *torch.autograd.grad(out.square().sum(), [query, key, value, sinks])]

    options = (seed, 0.4, False, query.shape[-1] ** -0.5)
    ours = run(lambda: module._forward_op(query, key, value, None, sinks, *options, "query", "triton")[0])
    expected = run(lambda: module._reference(query, key, value, None, sinks, *options))
    torch.testing.assert_close(ours, expected)
    outs = []
    for _ in range(2):
        torch.manual_seed(5)
        outs.append(attention_with_sinks(query, key, value, sinks, dropout_p=0.4, enable_gqa=True))
    assert torch.equal(*outs)
    assert not torch.equal(outs[0], attention_with_sinks(query, key, value, sinks, dropout_p=0.4, enable_gqa=True))


def test_the_kernels_decided_on_run_forward_and_backward(monkeypatch):
    """Sinks ask for logsumexp alone, so any backend of ours will do, the Hopper kernels first."""
    problem = Problem.from_shapes((2, 16, 4096, 128), gpu="NVIDIA H200", training=True)
    assert routing.decide(problem, module.OURS).backend == "cuda"
    asked = []
    for name in ("_attention_forward", "_attention_backward"):
        run = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *given, run=run: asked.append(given[-1]) or run(*given))
    query, key, value, _, sinks = tensors("none")
    decided = SimpleNamespace(decision=routing.Decision("cuda", "asked for", "query"))
    monkeypatch.setattr(module.decisions, "decide", lambda *_, **__: decided)
    monkeypatch.setattr(module.decisions, "cache", {})
    out = by_function(query, key, value, None, sinks)
    torch.autograd.grad(out.sum(), [query, sinks])
    assert asked == ["cuda", "cuda"]


@pytest.mark.parametrize("mask", ["none", "float"])
def test_opcheck(mask):
    query, key, value, attn_mask, sinks = tensors(mask)
    arguments = (query, key, value, attn_mask, sinks, None, 0.0, False, 0.3, "query", "triton")
    torch.library.opcheck(module._forward_op, arguments)


def test_compiled_in_one_graph():
    made = tensors("float")
    expected = by_function(*made)
    expected_grads = torch.autograd.grad(expected.sum(), [made[0], made[4]])
    out = torch.compile(by_function, backend="aot_eager", fullgraph=True)(*made)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), [made[0], made[4]]), expected_grads)


def test_function_transforms_and_autocast():
    query, key, value, _, sinks = tensors("none", grad=False)
    f = lambda s: by_function(query, key, value, None, s).square().sum()  # noqa: E731
    expected = torch.autograd.grad(f(sinks.requires_grad_()), sinks)[0]
    torch.testing.assert_close(torch.func.grad(f)(sinks.detach()), expected)
    with torch.autocast("cpu", torch.bfloat16):
        out = by_function(query, key, value, None, sinks.detach())
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), by_function(query, key, value, None, sinks.detach()), atol=3e-2, rtol=3e-2)


def test_sinks_that_do_not_fit_are_refused():
    query, key, value, _, _ = tensors("none", grad=False)
    with pytest.raises(RuntimeError, match="one number for each head"):
        attention_with_sinks(query, key, value, torch.zeros(3), enable_gqa=True)
    with pytest.raises(RuntimeError, match="no backend"):
        attention_with_sinks(query, key[..., :4], value, torch.zeros(4), enable_gqa=True)
