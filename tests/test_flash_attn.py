"""flash-attn's functions: its signatures, what each argument does against float64, errors that name the argument."""

from __future__ import annotations

import inspect
import sys
import types

import pytest
import torch
from hooked import sample
from varlen_cases import VarlenCall, judge_varlen, varlen_call

from torch_flashbackend import flash_attn

HALF = torch.float16
BATCH, SEQLEN_Q, SEQLEN_K, HEADS = 2, 10, 24, 4
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])

COMMON = "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 alibi_slopes=None"
TAIL = "deterministic=False return_attn_probs=False"
SIGNATURES = {
    "flash_attn_func": f"q k v {COMMON} {TAIL}",
    "flash_attn_kvpacked_func": f"q kv {COMMON} {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv {COMMON} {TAIL}",
    "flash_attn_varlen_func": (
        f"q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {COMMON} {TAIL} block_table=None"
    ),
    "flash_attn_varlen_kvpacked_func": f"q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {COMMON} {TAIL}",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {COMMON} {TAIL}",
    "flash_attn_with_kvcache": (
        "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None "
        "cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 "
        "rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False"
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_flash_attns(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    found = " ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters)
    assert found == SIGNATURES[name]


def dense(seqlen_k=SEQLEN_K, kv_heads=HEADS):
    shapes = ((BATCH, SEQLEN_Q, HEADS, 16), *((BATCH, seqlen_k, kv_heads, 16),) * 2)
    return [sample(*shape, seed=i).half().requires_grad_() for i, shape in enumerate(shapes)]


def as_call(tensors, **options) -> VarlenCall:
    q, k, _ = tensors
    rows = [tensor.detach().flatten(0, 1) for tensor in tensors]
    return VarlenCall(*rows, (q.size(1),) * BATCH, (k.size(1),) * BATCH, **options)


DENSE = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"window": (-1, 0)}),
    "scale": ({"softmax_scale": 0.5}, {"scale": 0.5}),
    "window": ({"window_size": (4, 3)}, {"window": (4, 3)}),
    "causal window": ({"causal": True, "window_size": (4, 3)}, {"window": (4, 0)}),
    "a window over everything": ({"window_size": (1000, 1000)}, {}),
    "softcap": ({"softcap": 2.0, "causal": True}, {"softcap": 2.0, "window": (-1, 0)}),
    "alibi": ({"alibi_slopes": SLOPES}, {"alibi": SLOPES}),
    "alibi of sequences": ({"alibi_slopes": torch.stack((SLOPES, 2 * SLOPES))},
                           {"alibi": torch.stack((SLOPES, 2 * SLOPES))}),
}  # fmt: skip


@pytest.mark.parametrize("seqlen_k,kv_heads", [(SEQLEN_Q, HEADS), (SEQLEN_K, HEADS), (6, 2)])
@pytest.mark.parametrize("name", DENSE)
def test_dense(name, seqlen_k, kv_heads):
    arguments, options = DENSE[name]
    tensors = dense(seqlen_k, kv_heads)
    out = flash_attn.flash_attn_func(*tensors, **arguments)
    assert out.shape == tensors[0].shape and out.is_contiguous()
    grad_out = sample(*out.shape, seed=7).half()
    grads = torch.autograd.grad(out, tensors, grad_out)
    results = dict(zip(("out", "query", "key", "value"), (out.detach(), *grads)))
    judge_varlen(
        as_call(tensors, **options), {n: t.flatten(0, 1) for n, t in results.items()}, grad_out.flatten(0, 1)
    )  # fmt: skip


@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"softcap": 2.0}])
def test_the_logsumexp_comes_second(arguments):
    tensors = dense()
    out, logsumexp, nothing = flash_attn.flash_attn_func(*tensors, **arguments, return_attn_probs=True)
    assert nothing is None and logsumexp.shape == (BATCH, HEADS, SEQLEN_Q) and logsumexp.dtype == torch.float32
    options = {"softcap": arguments.get("softcap", 0.0), "window": (-1, 0 if arguments.get("causal") else -1)}
    results = {"out": out.detach().flatten(0, 1), "logsumexp": logsumexp.transpose(0, 1).flatten(1)}
    judge_varlen(as_call(tensors, **options), results)


def test_packed_tensors_of_the_dense_functions():
    qkv = torch.stack(dense(SEQLEN_Q), 2).detach()
    expected = flash_attn.flash_attn_func(*qkv.unbind(2), causal=True)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv, causal=True), expected)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], causal=True), expected)


def test_varlen_functions():
    call = varlen_call((12, 1, 7), None, heads=4, window=(5, 0))
    cu_seqlens, _ = call.cu_seqlens()
    arguments = {"causal": True, "window_size": (5, -1), "return_attn_probs": True}
    out, logsumexp, nothing = flash_attn.flash_attn_varlen_func(
        call.query, call.key, call.value, cu_seqlens, cu_seqlens, 12, 12, **arguments
    )
    assert nothing is None
    judge_varlen(call, {"out": out, "logsumexp": logsumexp.clone()})
    qkv = torch.stack((call.query, call.key, call.value), 1)
    for other in (
        flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 12, **arguments),
        flash_attn.flash_attn_varlen_kvpacked_func(qkv[:, 0], qkv[:, 1:], cu_seqlens, cu_seqlens, 12, 12, **arguments),
    ):
        assert torch.equal(other[0], out) and torch.equal(other[1], logsumexp)


def test_dropout_drops_in_the_dense_form():
    torch.manual_seed(0)
    query = torch.zeros(1, 64, 2, 8)
    out = flash_attn.flash_attn_func(query, query, torch.ones(1, 64, 2, 8), dropout_p=0.5)
    assert 0.8 < out.mean() < 1.2 and out.std() > 0.02


@pytest.mark.parametrize(
    "arguments", [{"window_size": (3, 3)}, {"softcap": 1.0}, {"alibi_slopes": SLOPES}, {"causal": True},
                  {"return_attn_probs": True}],
)  # fmt: skip
def test_dropout_with_something_else_is_refused_by_name(arguments):
    with pytest.raises(NotImplementedError, match="dropout_p"):
        flash_attn.flash_attn_func(*dense(), dropout_p=0.1, **arguments)


def test_other_refusals_name_their_argument():
    call = varlen_call((12, 7))
    cu_seqlens, _ = call.cu_seqlens()
    tensors = (call.query, call.key, call.value, cu_seqlens, cu_seqlens, 12, 12)
    with pytest.raises(NotImplementedError, match="dropout_p"):
        flash_attn.flash_attn_varlen_func(*tensors, dropout_p=0.1)
    with pytest.raises(NotImplementedError, match="block_table"):
        flash_attn.flash_attn_varlen_func(*tensors, block_table=cu_seqlens)
    with pytest.raises(ValueError, match="alibi_slopes"):
        flash_attn.flash_attn_varlen_func(*tensors, alibi_slopes=torch.ones(3))
    with pytest.raises(ValueError, match="alibi_slopes"):
        flash_attn.flash_attn_func(*dense(), alibi_slopes=torch.ones(3, HEADS))
    with pytest.raises(ValueError, match="head_dim"):
        flash_attn.flash_attn_func(*(tensor[0] for tensor in dense()))
    q, k, v = dense()
    for causal in (False, True):
        with pytest.raises(ValueError, match="do not fit"):
            flash_attn.flash_attn_func(q, k[..., :8], v, causal=causal)
    with pytest.raises(ValueError, match="must divide"):
        flash_attn.flash_attn_func(q, torch.cat((k, k, k), 2), torch.cat((v, v, v), 2))
    with pytest.raises(ValueError, match="softcap"):
        flash_attn.flash_attn_func(q, k, v, softcap=-2.0)
    with pytest.raises(ValueError, match="softcap"):
        flash_attn.flash_attn_varlen_func(*tensors, softcap=-2.0)
    with pytest.raises(ValueError, match="max_seqlen_k is at least"):
        flash_attn.flash_attn_varlen_func(*tensors[:-1], -12)
    with pytest.raises(ValueError, match="window_size"):
        flash_attn.flash_attn_func(q, k, v, window_size=3)
    with pytest.raises(TypeError, match="k must be a tensor, not list"):
        flash_attn.flash_attn_func(q, [k], v)


@pytest.mark.parametrize(
    ("function", "shape", "message"),
    [
        ("flash_attn_qkvpacked_func", (2, 8, 2, 4, 16), r"qkv is \[batch, seqlen, 3, heads, head_dim\]"),
        ("flash_attn_qkvpacked_func", (2, 8, 4, 16), "qkv is"),
        ("flash_attn_varlen_qkvpacked_func", (8, 2, 4, 16), r"qkv is \[total, 3"),
    ],
)
def test_packed_tensors_of_another_shape_are_named(function, shape, message):
    more = (torch.tensor([0, 8]), 8) if "varlen" in function else ()
    with pytest.raises(ValueError, match=message):
        getattr(flash_attn, function)(torch.zeros(shape), *more)


def test_longest_lengths_may_be_left_out():
    call = varlen_call((12, 7))
    tensors = (call.query, call.key, call.value, *call.cu_seqlens())
    torch.testing.assert_close(
        flash_attn.flash_attn_varlen_func(*tensors, None, None, causal=True),
        flash_attn.flash_attn_varlen_func(*tensors, 12, 12, causal=True),
    )


def test_the_cache_function_passes_everything_on(monkeypatch):
    seen = {}
    module = types.ModuleType("torch_flashbackend.kv_cache")
    module.attend = lambda *args, **kwargs: seen.update(args=args, **kwargs) or "result"
    monkeypatch.setitem(sys.modules, "torch_flashbackend.kv_cache", module)
    names = SIGNATURES["flash_attn_with_kvcache"].replace("(-1, -1)", "").split()
    names = [name.split("=")[0] for name in names]
    assert flash_attn.flash_attn_with_kvcache(*names) == "result"
    assert seen.pop("args") == ("q", "k_cache", "v_cache")
    assert seen == {name: name for name in names[3:]}
