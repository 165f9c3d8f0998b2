"""aten's attention kernels called by name: a forward of ours with a backward of stock's, and the other way round."""

from __future__ import annotations

import itertools

import pytest
import torch

from common import Expected, check, expect, gradient_for, simple_call

pytestmark = pytest.mark.cuda_only
aten = torch.ops.aten


def flash_forward(call):
    out = aten._scaled_dot_product_flash_attention(
        call.query, call.key, call.value, 0.0, call.is_causal, False, scale=call.scale
    )
    return out[0], out


def flash_backward(call, grad_out, saved):
    out, logsumexp, cum_q, cum_k, max_q, max_k, rng_state, unused, _ = saved
    return aten._scaled_dot_product_flash_attention_backward(
        grad_out, call.query, call.key, call.value, out, logsumexp, cum_q, cum_k, max_q, max_k, 0.0, call.is_causal,
        rng_state, unused, scale=call.scale,
    )  # fmt: skip


def efficient_forward(call):
    out = aten._scaled_dot_product_efficient_attention(
        call.query, call.key, call.value, call.attn_mask, True, 0.0, call.is_causal, scale=call.scale
    )
    return out[0], out


def efficient_backward(call, grad_out, saved):
    out, logsumexp, seed, offset = saved
    wanted = [True, True, True, call.mask_grad]
    return aten._scaled_dot_product_efficient_attention_backward(
        grad_out, call.query, call.key, call.value, call.attn_mask, out, logsumexp, seed, offset, 0.0, wanted,
        call.is_causal, scale=call.scale,
    )  # fmt: skip


def cudnn_forward(call):
    out = aten._scaled_dot_product_cudnn_attention(
        call.query, call.key, call.value, call.attn_mask, True, 0.0, call.is_causal, False, scale=call.scale
    )
    return out[0], out


def cudnn_backward(call, grad_out, saved):
    out, logsumexp, cum_q, cum_k, max_q, max_k, seed, offset, _ = saved
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad_out, call.query, call.key, call.value, out, logsumexp, seed, offset, call.attn_mask, cum_q, cum_k, max_q,
        max_k, 0.0, call.is_causal, scale=call.scale,
    )  # fmt: skip


def flash_packed_forward(call):
    q, k, v = (t.transpose(1, 2) for t in (call.query, call.key, call.value))
    out = aten._flash_attention_forward(
        q, k, v, None, None, q.size(1), k.size(1), 0.0, call.is_causal, False, scale=call.scale
    )
    return out[0].transpose(1, 2), out


def flash_packed_backward(call, grad_out, saved):
    out, logsumexp, rng_state, unused, _ = saved
    q, k, v, g = (t.transpose(1, 2) for t in (call.query, call.key, call.value, grad_out))
    gradients = aten._flash_attention_backward(
        g, q, k, v, out, logsumexp, None, None, q.size(1), k.size(1), 0.0, call.is_causal, rng_state, unused,
        scale=call.scale,
    )  # fmt: skip
    return [t.transpose(1, 2) for t in gradients]


OPERATORS = {
    "flash": (flash_forward, flash_backward),
    "efficient": (efficient_forward, efficient_backward),
    "cudnn": (cudnn_forward, cudnn_backward),
    "flash_packed": (flash_packed_forward, flash_packed_backward),
}
# Masks are the efficient kernel's alone: cuDNN's follow other semantics for rows without a key.
CASES = [(name, kind) for name in OPERATORS for kind in ("dense", "causal", "odd length")]
CASES += [("efficient", "bias"), ("efficient", "bias_grad"), ("efficient", "dead rows"), ("cudnn", "bias")]


def make_call(kind):
    length = 203 if kind == "odd length" else 256
    mask = None
    if kind in ("bias", "bias_grad", "dead rows"):
        mask = torch.randn(2, 4, length, length, device="cuda", dtype=torch.bfloat16)
        if kind == "dead rows":
            mask[:, :, 5] = -torch.inf
    return simple_call(
        2, 4, length, head_dim=64, is_causal=kind == "causal", attn_mask=mask, mask_grad=kind == "bias_grad"
    )


@pytest.mark.parametrize("sides", list(itertools.product(["ours", "stock"], repeat=2)), ids="->".join)
@pytest.mark.parametrize(("name", "kind"), CASES, ids=lambda value: value)
def test_forward_and_backward_of_either_side(plugin, launched, note, take_everything, name, kind, sides):
    forward, backward = OPERATORS[name]
    call = make_call(kind)
    grad_out = gradient_for(call)
    if sides[1] == "stock":
        saved = run_side(plugin, launched, sides[0], lambda: forward(call))
        gradients = run_side(plugin, launched, "stock", lambda: backward(call, grad_out, saved[1]))
    else:
        saved = run_side(plugin, launched, sides[0], lambda: forward(call))
        plugin.enable()
        forward(call)  # a backward is hooked once a forward has been taken
        gradients = run_side(plugin, launched, "ours", lambda: backward(call, grad_out, saved[1]))
    results = {"out": saved[0]}
    inputs = ["query", "key", "value"] + (["attn_mask"] if call.mask_grad else [])
    results.update(zip(inputs, gradients))
    expected = expect(call, grad_out)
    if sides != ("ours", "ours"):
        # Stock's half makes stock's error, so stock's own two halves are the measure.
        own = run_side(plugin, launched, "stock", lambda: forward(call))
        own_gradients = run_side(plugin, launched, "stock", lambda: backward(call, grad_out, own[1]))
        stock = {name: {"out": own[0], **dict(zip(inputs, own_gradients))}}
    else:
        stock = None
    if kind == "dead rows" and sides[0] == "stock":
        results.pop("out")  # stock's answer, not ours to judge
        expected = Expected(expected.values, expected.deviations)
    note(check(results, expected, stock, f"{name} {kind} {sides}"))


def run_side(plugin, launched, side, function):
    (plugin.enable if side == "ours" else plugin.disable)()
    with launched(side == "ours"):
        result = function()
        torch.cuda.synchronize()
    return result


@pytest.mark.parametrize(("name", "kind"), CASES, ids=lambda value: value)
def test_outputs_have_stocks_shapes_strides_and_types(plugin, launched, take_everything, name, kind):
    forward, backward = OPERATORS[name]
    call = make_call(kind)
    grad_out = gradient_for(call)

    def describe(side):
        saved = run_side(plugin, launched, side, lambda: forward(call))[1]
        gradients = run_side(plugin, launched, side, lambda: backward(call, grad_out, saved))
        return [
            (tuple(v.shape), v.stride(), v.dtype) if isinstance(v, torch.Tensor) and v.numel() else type(v).__name__
            for v in (*saved, *gradients)
        ]

    plugin.enable()
    with launched():
        forward(call)
    for index, (ours, stock) in enumerate(zip(describe("ours"), describe("stock"))):
        assert ours == stock, f"result {index}"


def test_a_graph_made_with_the_plugin_on_ends_well_with_it_off(plugin, launched, note, take_everything):
    call = simple_call(2, 4, 256, head_dim=64, is_causal=True).leaves()
    grad_out = gradient_for(call)
    with launched():
        out = call.run()
    plugin.disable()
    inputs = call.differentiable()
    results = {"out": out, **dict(zip(inputs, torch.autograd.grad(out, list(inputs.values()), grad_out)))}
    note(check(results, expect(call, grad_out), None, "disabled between forward and backward"))
