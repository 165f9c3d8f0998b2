"""Attention with sinks on the Triton kernels, run by Triton's interpreter: the backward kernel is the ordinary one."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter needs TRITON_INTERPRET=1 in the environment", allow_module_level=True)

from sink_cases import MASKS, judge_sinks, sink_call

from torch_flashbackend import ops, sinks

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_values_and_gradients_are_those_of_one_more_key(monkeypatch, mask, dtype):
    monkeypatch.setattr(ops, "_attention_forward", ops._attention_forward_cuda)
    monkeypatch.setattr(ops, "_attention_backward", ops._attention_backward_cuda)
    call = sink_call(mask, dtype)
    tensors = (call.query, call.key, call.value, call.attn_mask, call.sinks)
    grad_out = torch.randn(call.query.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    names = ("query", "key", "value", "attn_mask", "sinks")
    wanted = [name in call.inputs() for name in names[:4]]
    options = (0.0, call.is_causal, 0.25)
    out, logsumexp = sinks._forward(*tensors, None, *options, "query", "triton")
    grads = sinks._backward(grad_out, *tensors, out, logsumexp, None, *options, wanted, "triton")
    results = {name: grad for name, grad in zip(names, grads) if name in call.inputs()}
    judge_sinks(call, {"out": out, **results}, grad_out)
