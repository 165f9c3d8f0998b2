"""What ends in stock's packed kernels, taken by the kernel hook at CPU's key: nested tensors, varlen_attn, CausalBias.

A CPU build has no such kernels, so what these tests call can only have been answered by ours, in the math path.
"""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from hooked import counting, hooked, sample
from test_kernel_hook import assert_as_meta, hooked_backwards
from torch.nested._internal import sdpa as nested_sdpa
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from varlen_cases import VarlenCall, gradient_for_varlen, judge_varlen, varlen_call

from torch_flashbackend import nested as nested_tensors
from torch_flashbackend import policy, routing
from torch_flashbackend.explain import explain
from torch_flashbackend.packed import Call, describe

aten = torch.ops.aten
HALF, SINGLE = torch.float16, torch.float32
LENGTHS, OTHERS = (20, 1, 33), (7, 40, 33)
WINDOWS = {"full": (-1, -1), "causal": (-1, 0), "window": (5, 0)}


def packed_call(lengths_k=LENGTHS, **options) -> VarlenCall:
    return varlen_call(LENGTHS, lengths_k, heads=2, **options)


def flash_arguments(call: VarlenCall, cu_dtype=torch.int32):
    causal = call.window == (-1, 0)
    cu_seqlens = call.cu_seqlens(cu_dtype)
    args = (call.query, call.key, call.value, *cu_seqlens, max(call.lengths_q), max(call.lengths_k), 0.0, causal, False)
    kwargs = {"scale": call.softmax_scale}
    if not causal and call.window != (-1, -1):
        kwargs |= {"window_size_left": call.window[0], "window_size_right": call.window[1]}
    return args, kwargs


@pytest.mark.parametrize("layout", ["packed", "qkv", "heads first"])
@pytest.mark.parametrize("lengths_k", [LENGTHS, OTHERS], ids=["same", "others"])
@pytest.mark.parametrize("window", WINDOWS)
def test_packed_flash(window, lengths_k, layout):
    call = packed_call(lengths_k, window=WINDOWS[window], layout=layout)
    args, kwargs = flash_arguments(call)
    with hooked(kernel_key="CPU"):
        result = aten._flash_attention_forward(*args, **kwargs)
    assert_as_meta(result, aten._flash_attention_forward, *args, **kwargs)
    judge_varlen(call, {"out": result[0], "logsumexp": result[1]})


@pytest.mark.parametrize("lengths_k", [LENGTHS, OTHERS], ids=["same", "others"])
@pytest.mark.parametrize("window", WINDOWS)
def test_packed_flash_backward(window, lengths_k):
    call = packed_call(lengths_k, window=WINDOWS[window], layout="qkv")
    args, kwargs = flash_arguments(call)
    grad_out = gradient_for_varlen(call)
    none = torch.empty(0)
    with hooked_backwards():
        out, logsumexp, *_ = aten._flash_attention_forward(*args, **kwargs)
        backward_args = (grad_out, *args[:3], out, logsumexp, *args[3:9], none, none)
        grads = aten._flash_attention_backward(*backward_args, **kwargs)
    assert_as_meta(grads, aten._flash_attention_backward, *backward_args, **kwargs)
    judge_varlen(call, dict(zip(("query", "key", "value"), grads)), grad_out)


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("mask_type", [0, 1, 2])
@pytest.mark.parametrize("lengths_k", [LENGTHS, OTHERS], ids=["same", "others"])
def test_packed_efficient_with_its_padded_logsumexp(lengths_k, mask_type, dtype):
    window = (-1, -1) if mask_type == 0 else (-1, 0)
    call = packed_call(lengths_k, head_dim_v=24, dtype=dtype, window=window, bottom_right=mask_type == 2)
    cu_seqlens = call.cu_seqlens()
    rows = [tensor.unsqueeze(0) for tensor in (call.query, call.key, call.value)]
    longest = (max(LENGTHS), max(lengths_k))
    args = (*rows, None, *cu_seqlens, *longest, 0.0, mask_type, True)
    grad_out = gradient_for_varlen(call)
    seed = torch.zeros((), dtype=torch.int64)
    with hooked_backwards():
        result = aten._efficient_attention_forward(*args)
        backward_args = (
            grad_out.unsqueeze(0), *rows, None, result[0], *cu_seqlens, *longest, result[1], 0.0, seed, seed, mask_type,
            False,
        )  # fmt: skip
        grads = aten._efficient_attention_backward(*backward_args)
    assert_as_meta(result, aten._efficient_attention_forward, *args)
    assert_as_meta(grads, aten._efficient_attention_backward, *backward_args)
    judge_varlen(call, {"out": result[0][0], **{n: g[0] for n, g in zip(("query", "key", "value"), grads)}}, grad_out)
    logsumexp = torch.cat([result[1][n, :, :length] for n, length in enumerate(LENGTHS)], 1)
    judge_varlen(call, {"logsumexp": logsumexp.masked_fill(logsumexp == math.inf, -math.inf)})
    assert all((result[1][n, :, length:] == math.inf).all() for n, length in enumerate(LENGTHS))


def nested(tensor: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """[total, H, D] as a nested tensor [B, H, S of each, D]."""
    longest = int(offsets.diff().max())
    return torch.nested.nested_tensor_from_jagged(tensor, offsets, max_seqlen=longest, min_seqlen=1).transpose(1, 2)


@contextlib.contextmanager
def nested_hooks(monkeypatch, backend: SDPBackend):
    """The hooks with autograd's own kernels around them; nested tensors choose their backend as on a GPU.

    They come by PyTorch's own Python, as where nested.py does not take them (test_nested.py).
    """
    monkeypatch.setattr(nested_tensors.NestedHook, "register", lambda self: None)
    monkeypatch.setattr(nested_sdpa, "_select_sdp_backend", lambda *_: backend)
    with hooked_backwards():
        yield


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], ids=str)
def test_nested_tensors_forward_and_backward(monkeypatch, backend, is_causal):
    dtype = HALF if backend is SDPBackend.FLASH_ATTENTION else SINGLE
    call = packed_call(dtype=dtype, window=(-1, 0) if is_causal else (-1, -1)).leaves()
    offsets, _ = call.cu_seqlens(torch.int64)
    grad_out = gradient_for_varlen(call)
    with nested_hooks(monkeypatch, backend), counting() as count:
        out = F.scaled_dot_product_attention(
            *(nested(t, offsets) for t in (call.query, call.key, call.value)), is_causal=is_causal
        )
        values = out.transpose(1, 2).values()
        grads = torch.autograd.grad(values, (call.query, call.key, call.value), grad_out)
        assert count("triton") == 2
    judge_varlen(call, {"out": values.detach(), **dict(zip(("query", "key", "value"), grads))}, grad_out)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (6, 0), (3, 2)])
def test_varlen_attn_forward_and_backward(window):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    call = packed_call(OTHERS, window=window).leaves()
    grad_out = gradient_for_varlen(call)
    with hooked_backwards(), counting() as count:
        out = varlen.varlen_attn(
            call.query, call.key, call.value, *call.cu_seqlens(), max(LENGTHS), max(OTHERS),
            **({"is_causal": window == (-1, 0)} if "is_causal" in varlen.varlen_attn.__annotations__ else
               {"window_size": window}),
        )  # fmt: skip
        grads = torch.autograd.grad(out, (call.query, call.key, call.value), grad_out)
        assert count("triton") == 2
    judge_varlen(call, {"out": out.detach(), **dict(zip(("query", "key", "value"), grads))}, grad_out)


@pytest.mark.parametrize("lengths", [(12, 30), (30, 12)])
def test_causal_lower_right_forward_and_backward(monkeypatch, lengths):
    from torch.nn.attention import bias

    monkeypatch.setattr(bias, "can_use_flash_attention", lambda params: True)
    seqlen_q, seqlen_k = lengths
    tensors = [sample(2, n, 2, 16, seed=i).half() for i, n in enumerate((seqlen_q, seqlen_k, seqlen_k))]
    leaves = [tensor.transpose(1, 2).requires_grad_() for tensor in tensors]
    grad_out = sample(2, 2, seqlen_q, 16, seed=5).half()
    with hooked_backwards(), counting() as count:
        out = F.scaled_dot_product_attention(*leaves, attn_mask=causal_lower_right(seqlen_q, seqlen_k))
        grads = torch.autograd.grad(out, leaves, grad_out)
        assert count("triton") == 2
    rows = [tensor.flatten(0, 1) for tensor in tensors]
    call = VarlenCall(*rows, (seqlen_q,) * 2, (seqlen_k,) * 2, window=(-1, 0))
    results = dict(zip(("out", "query", "key", "value"), (out.detach(), *grads)))
    assert out.transpose(1, 2).is_contiguous()
    results = {name: tensor.transpose(1, 2).flatten(0, 1) for name, tensor in results.items()}
    judge_varlen(call, results, grad_out.transpose(1, 2).flatten(0, 1))


@pytest.mark.parametrize("window", [(5, 2), (-1, 3), (4, -1)])
def test_a_window_over_dense_tensors(window):
    query, key, value = (sample(2, n, 2, 16, seed=i).half() for i, n in enumerate((12, 30, 30)))
    args = (query, key, value, None, None, 12, 30, 0.0, False, False)
    kwargs = {"window_size_left": window[0], "window_size_right": window[1]}
    grad_out = sample(2, 12, 2, 16, seed=6).half()
    none = torch.empty(0)
    with hooked_backwards():
        result = aten._flash_attention_forward(*args, **kwargs)
        backward_args = (grad_out, query, key, value, *result[:2], none, none, 12, 30, 0.0, False, none, none)
        backward_args = (*backward_args[:6], None, None, *backward_args[8:])
        grads = aten._flash_attention_backward(*backward_args, **kwargs)
    assert_as_meta(result, aten._flash_attention_forward, *args, **kwargs)
    assert_as_meta(grads, aten._flash_attention_backward, *backward_args, **kwargs)
    rows = [tensor.flatten(0, 1) for tensor in (query, key, value)]
    call = VarlenCall(*rows, (12, 12), (30, 30), window=window)
    results = dict(zip(("out", "query", "key", "value"), (result[0], *grads)))
    results = {name: tensor.flatten(0, 1) for name, tensor in results.items()}
    results["logsumexp"] = result[1].transpose(0, 1).flatten(1)
    judge_varlen(call, results, grad_out.flatten(0, 1))


@pytest.mark.parametrize("mask_type", [0, 1, 2])
def test_efficient_over_dense_tensors_is_taken_with_a_mask_at_the_bottom_right_alone(mask_type):
    """The others come from scaled_dot_product_attention, judged before by its own name."""
    tensors = [sample(2, n, 2, 16, seed=i) for i, n in enumerate((12, 30, 30))]
    with hooked(kernel_key="CPU"), counting() as count:
        if mask_type != 2:
            with pytest.raises((NotImplementedError, RuntimeError, AttributeError)):
                aten._efficient_attention_forward(*tensors, None, None, None, None, None, 0.0, mask_type, True)
            assert count("triton") == 0
            return
        result = aten._efficient_attention_forward(*tensors, None, None, None, None, None, 0.0, mask_type, True)
    call = VarlenCall(*(tensor.flatten(0, 1) for tensor in tensors), (12, 12), (30, 30), window=(-1, 0))
    logsumexp = result[1][:, :, :12].transpose(0, 1).flatten(1)
    judge_varlen(call, {"out": result[0].flatten(0, 1), "logsumexp": logsumexp})


def test_an_explicit_choice_of_another_backend_is_honoured():
    args, kwargs = flash_arguments(packed_call())
    with hooked(kernel_key="CPU"), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), counting() as count:
        with pytest.raises((NotImplementedError, RuntimeError, AttributeError)):
            aten._flash_attention_forward(*args, **kwargs)
        assert count("triton") == 0


# Routing.


def problem(gpu: str, lengths=(2000, 100, 4096), training=True):
    """A packed call on a GPU that is not here."""
    from dataclasses import replace

    total = sum(lengths)
    tensor = torch.empty((total, 16, 128), dtype=torch.bfloat16, device="meta")
    cu_seqlens = torch.empty(len(lengths) + 1, dtype=torch.int32, device="meta")
    call = Call(tensor, tensor, tensor, cu_seqlens, cu_seqlens, max(lengths), max(lengths), -1, 0, None)
    described = describe(call, "_flash_attention_forward", "flash", training)
    return replace(described, device_type="cuda", devices=("cuda:0",), gpu_name=gpu,
                   architecture={"NVIDIA H200": "sm_90", "NVIDIA A100": "sm_80"}[gpu])  # fmt: skip


def test_packed_calls_that_nobody_measured_go_to_triton_where_stocks_kernel_is_old(monkeypatch):
    monkeypatch.setattr(policy, "policies", dict)
    decision = routing.decide(problem("NVIDIA H200"))
    assert decision.backend == "triton"
    assert decision.rejected[0][:2] == ("cuda", "packed")
    assert routing.decide(problem("NVIDIA A100")).backend == "stock"


def test_a_small_packed_call_is_left_to_stock(monkeypatch):
    monkeypatch.setattr(policy, "policies", dict)
    assert routing.decide(problem("NVIDIA H200", (20, 30))).backend == "stock"


def test_packed_calls_are_compared_with_packed_measurements_alone(monkeypatch):
    """The dense rows of a policy say nothing about stock's packed kernel."""
    call = problem("NVIDIA H200")
    assert policy.cases(call) == ("packed",)
    row = policy.Row("packed", True, "bfloat16", 128, 128, 3, 16, 16, 4096, 4096, 0.5, 0.5)
    slow = policy.Policy("NVIDIA H200", None, "test", (row,))
    monkeypatch.setattr(policy, "policies", lambda: {"NVIDIA H200": slow})
    assert routing.decide(call).reason == "measured slower"


def test_explain_describes_nested_tensors():
    tensor = torch.randn(54, 2, 16, dtype=HALF)
    offsets = torch.tensor([0, 20, 21, 54])
    found = explain(*(nested(tensor, offsets) for _ in range(3)), is_causal=True)
    assert found.problem.packed and found.problem.query_shape == (3, 2, 33, 16)
    assert "packed sequences" in str(found)
    assert found.backend == "stock"  # on a CPU
