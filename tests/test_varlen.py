"""attention_varlen and its operators on a CPU, where plain PyTorch computes them: values, compiled programs, errors."""

from __future__ import annotations

import math

import pytest
import torch
from hooked import run_python
from torch.utils.flop_counter import FlopCounterMode
from varlen_cases import gradient_for_varlen, judge_varlen, random_varlen_call, varlen_call

import torch_flashbackend
from torch_flashbackend import varlen

MIXED = (7, 0, 1, 12)


def attend(call, **options):
    return torch_flashbackend.attention_varlen(
        call.query, call.key, call.value, *call.cu_seqlens(), max(call.lengths_q), max(call.lengths_k),
        window_size=call.window, causal_alignment="bottom_right" if call.bottom_right else "top_left",
        scale=call.scale, softcap=call.softcap, alibi_slopes=call.alibi, sinks=call.sinks, seqused_k=call.seqused_k(),
        return_lse=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_calls(first):
    for seed in range(first, first + 10):
        call = random_varlen_call(seed, "cpu", largest=40).leaves()
        grad_out = gradient_for_varlen(call)
        out, logsumexp = attend(call)
        grads = torch.autograd.grad(out, list(call.inputs().values()), grad_out)
        judge_varlen(call, {"out": out.detach(), "logsumexp": logsumexp, **dict(zip(call.inputs(), grads))}, grad_out)


def everything(dtype=torch.float32):
    return varlen_call(MIXED, (9, 3, 0, 12), 4, 2, 8, 16, dtype, window=(6, 2), softcap=3.0, alibi="sequences",
                       sinks=True, used_k=(9, 2, 0, 8)).leaves()  # fmt: skip


def test_second_derivatives():
    call = varlen_call((2, 0, 1), (1, 1, 2), 1, 1, 2, dtype=torch.float64).leaves()
    sinks = torch.randn(1, dtype=torch.float64, requires_grad=True)
    cu_seqlens = call.cu_seqlens()

    def function(query, key, value, sinks):
        return torch_flashbackend.attention_varlen(query, key, value, *cu_seqlens, window_size=(2, 0), softcap=2.0,
                                                   sinks=sinks)  # fmt: skip

    inputs = (call.query, call.key, call.value, sinks)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_is_causal_and_its_two_alignments():
    call = varlen_call((4, 6), (7, 3), dtype=torch.float32)
    arguments = (call.query, call.key, call.value, *call.cu_seqlens())
    for alignment in ("bottom_right", "top_left"):
        expected = torch_flashbackend.attention_varlen(*arguments, window_size=(-1, 0), causal_alignment=alignment)
        out = torch_flashbackend.attention_varlen(*arguments, is_causal=True, causal_alignment=alignment)
        assert torch.equal(out, expected)
    # Bottom right, the first queries of the second sequence stand before its first key.
    out = torch_flashbackend.attention_varlen(*arguments, is_causal=True)
    assert (out[4:7] == 0).all() and (out[7:] != 0).any(-1).all()


def test_autocast():
    call = varlen_call(MIXED, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(call)[0].dtype == torch.bfloat16


def operator_arguments(call):
    """Those of torch.ops.flashbackend.varlen_attention for a call with everything."""
    return (
        call.query, call.key, call.value, *call.cu_seqlens(), call.seqused_k(), call.alibi, call.sinks, 12, 12,
        call.softmax_scale, *call.window, call.bottom_right, call.softcap,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["everything", "plain", "equal lengths", "heads first"])
def test_opcheck(kind):
    if kind == "everything":
        arguments = operator_arguments(everything())
    else:
        layout = "heads first" if kind == "heads first" else "packed"
        call = varlen_call((6, 6), heads=2, dtype=torch.float32, layout=layout).leaves()
        lengths = (None, None) if kind == "equal lengths" else call.cu_seqlens()
        arguments = (call.query, call.key, call.value, *lengths, None, None, None, 6, 6, 0.3, -1, -1, True, 0.0)
    torch.library.opcheck(varlen._forward_op, arguments)
    detached = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments)
    out, logsumexp = varlen._forward_op(*detached)
    backward = (torch.randn_like(out), *detached[:3], out, logsumexp, *detached[3:])
    torch.library.opcheck(varlen._backward_op, (*backward, [True, True, True, kind == "everything"]))
    torch.library.opcheck(varlen._backward_op, (*backward, [False, True, False, False]))


def test_a_compiled_call_serves_all_lengths():
    counter = torch._dynamo.testing.CompileCounter()

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def function(query, key, value, cu_seqlens, longest):
        return torch_flashbackend.attention_varlen(query, key, value, cu_seqlens, cu_seqlens, longest, longest,
                                                   is_causal=True)  # fmt: skip

    for lengths in ((5, 9), (12, 3), (8, 20)):
        call = varlen_call(lengths, dtype=torch.float32, window=(-1, 0))
        out = function(call.query, call.key, call.value, call.cu_seqlens()[0], max(lengths))
        judge_varlen(call, {"out": out})
    assert counter.frame_count == 1


def test_a_compiled_training_step():
    call = everything()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(query, key, value, sinks, alibi):
        return torch_flashbackend.attention_varlen(
            query, key, value, *cu_seqlens, 12, 12, window_size=call.window, softcap=3.0, alibi_slopes=alibi,
            sinks=sinks, seqused_k=used,
        )  # fmt: skip

    cu_seqlens, used = call.cu_seqlens(), call.seqused_k()
    out = function(call.query, call.key, call.value, call.sinks, call.alibi)
    grad_out = gradient_for_varlen(call)
    grads = torch.autograd.grad(out, list(call.inputs().values()), grad_out)
    judge_varlen(call, {"out": out.detach(), **dict(zip(call.inputs(), grads))}, grad_out)


def test_operations_are_counted_by_the_true_lengths():
    call = varlen_call((5, 9), (7, 2), 4, 2, 16, 32, torch.float32).leaves()
    with FlopCounterMode(display=False) as counter:
        out, _ = attend(call)
        forward = counter.get_total_flops()
        out.sum().backward()
    scores = 4 * (5 * 7 + 9 * 2)
    assert forward == 2 * scores * (16 + 32)
    assert counter.get_total_flops() - forward == 2 * scores * (3 * 16 + 2 * 32)


def test_func_transforms_go_to_the_reference():
    call = varlen_call((4, 6), dtype=torch.float64)
    cu_seqlens = call.cu_seqlens()

    def loss(query):
        return torch_flashbackend.attention_varlen(query, call.key, call.value, *cu_seqlens).square().sum()

    leaf = call.query.clone().requires_grad_()
    expected = torch.autograd.grad(loss(leaf), leaf)[0]
    torch.testing.assert_close(torch.func.grad(loss)(call.query), expected)


NAMED_ERRORS = {
    "rank": (lambda a: a | {"query": a["query"].unsqueeze(0)}, "total, heads, head_dim"),
    "rows": (lambda a: a | {"value": a["value"][:-1]}, "same rows"),
    "heads": (lambda a: a | {"query": a["query"][:, :3]}, "must divide"),
    "dtype": (lambda a: a | {"key": a["key"].double()}, "one floating dtype"),
    "type of lengths": (lambda a: a | {"cu_seqlens_k": a["cu_seqlens_k"].float()}, "cu_seqlens_k"),
    "number of lengths": (lambda a: a | {"cu_seqlens_k": a["cu_seqlens_k"][:-1]}, "cu_seqlens_k has 1 sequences"),
    "seqused": (lambda a: a | {"seqused_k": torch.zeros(5, dtype=torch.int32)}, "seqused_k has 5 sequences"),
    "slopes": (lambda a: a | {"alibi_slopes": torch.ones(3)}, "alibi_slopes"),
    "sinks": (lambda a: a | {"sinks": torch.ones(3)}, "sinks are"),
    "alignment": (lambda a: a | {"causal_alignment": "left"}, "bottom_right"),
    "device": (lambda a: a | {"cu_seqlens_q": a["cu_seqlens_q"].to("meta")}, "device"),
    "softcap": (lambda a: a | {"softcap": math.nan}, "softcap is 0.0 for none.* got nan"),
    "window": (lambda a: a | {"window_size": 3}, "window_size is"),
    "longest queries": (lambda a: a | {"max_seqlen_q": -1}, "max_seqlen_q is at least the longest length, got -1"),
    "longest keys": (lambda a: a | {"max_seqlen_k": -1}, "max_seqlen_k is at least the longest length, got -1"),
    "first of lengths": (lambda a: a | {"cu_seqlens_q": a["cu_seqlens_q"] + 2}, "cu_seqlens_q begins with 0.* 2 first"),
    "order of lengths": (lambda a: a | {"cu_seqlens_k": torch.tensor([0, 10, 4])}, "cu_seqlens_k.* 4 behind 10"),
}


@pytest.mark.parametrize("name", NAMED_ERRORS)
def test_errors_say_what_does_not_fit(name):
    call = varlen_call((4, 6), heads=4, kv_heads=2, dtype=torch.float32)
    cu_seqlens_q, cu_seqlens_k = call.cu_seqlens()
    arguments = {"query": call.query, "key": call.key, "value": call.value, "cu_seqlens_q": cu_seqlens_q,
                 "cu_seqlens_k": cu_seqlens_k}  # fmt: skip
    change, message = NAMED_ERRORS[name]
    with pytest.raises(ValueError, match=message):
        torch_flashbackend.attention_varlen(**change(arguments))


@pytest.mark.parametrize("name", ["query", "value", "cu_seqlens_q", "alibi_slopes"])
def test_what_is_no_tensor_is_named(name):
    call = varlen_call((4, 6), dtype=torch.float32)
    arguments = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), call.cu_seqlens()))
    arguments |= {"query": call.query, "key": call.key, "value": call.value, name: [0, 4, 10]}
    with pytest.raises(TypeError, match=f"{name} must be a tensor, not list"):
        torch_flashbackend.attention_varlen(**arguments)


def test_meta_tensors_give_shapes():
    call = varlen_call((4, 6), dtype=torch.float16)
    tensors = [tensor.to("meta") for tensor in (call.query, call.key, call.value, *call.cu_seqlens())]
    out = torch_flashbackend.attention_varlen(*tensors, is_causal=True)
    assert out.device.type == "meta" and out.shape == call.query.shape and out.dtype == torch.float16


def test_a_kernel_that_cannot_be_had_is_replaced_by_pytorch_operations(monkeypatch):
    from torch_flashbackend import ops
    from torch_flashbackend.kernels import KernelUnavailable

    def fail(*_):
        raise KernelUnavailable("no PTX")

    monkeypatch.setattr(ops, "_below_autograd", fail)
    call = varlen_call(MIXED, dtype=torch.float32).leaves()
    with pytest.warns(UserWarning, match="no PTX"):
        out, _ = attend(call)
    grad_out = gradient_for_varlen(call)
    grads = torch.autograd.grad(out, list(call.inputs().values()), grad_out)
    judge_varlen(call, {"out": out.detach(), **dict(zip(call.inputs(), grads))}, grad_out)


def test_no_sequences_and_no_keys():
    for lengths_q, lengths_k in (((0, 0), (3, 0)), ((3, 2), (0, 0))):
        call = varlen_call(lengths_q, lengths_k, dtype=torch.float32, sinks=True).leaves()
        out, logsumexp = attend(call)
        assert (out == 0).all() and out.shape == call.query.shape
        assert torch.equal(logsumexp, call.sinks.detach()[:, None].expand_as(logsumexp))
        out.sum().backward()
        assert all((tensor.grad == 0).all() for tensor in call.inputs().values())


def test_importing_the_package_does_not_import_it():
    code = "import sys, torch_flashbackend; print('torch_flashbackend.varlen' in sys.modules)"
    assert run_python(code).strip() == "False"


def test_rows_behind_the_last_sequence_are_zeros():
    call = varlen_call((5, 4), dtype=torch.float32)
    cu_seqlens = torch.tensor([0, 5], dtype=torch.int32)
    out, logsumexp = torch_flashbackend.attention_varlen(
        call.query, call.key, call.value, cu_seqlens, cu_seqlens, return_lse=True
    )
    assert (out[5:] == 0).all() and (logsumexp[:, 5:] == -math.inf).all()
