"""The variable-length kernels, run by Triton's interpreter on CPU tensors and judged against float64."""

from __future__ import annotations

import math
import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter needs TRITON_INTERPRET=1 in the environment", allow_module_level=True)

import triton.language as tl
from varlen_cases import VarlenCall, gradient_for_varlen, judge_varlen, varlen_call

from torch_flashbackend.kernels.triton import attention, varlen
from torch_flashbackend.kernels.triton.tiles import Tile

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
HALF, SINGLE = torch.float16, torch.float32
LENGTHS, OTHERS = (20, 0, 1, 33), (18, 5, 0, 33)
OPTIONS = {
    "plain": {},
    "causal": {"window": (-1, 0)},
    "causal, top left": {"window": (-1, 0), "bottom_right": False},
    "window": {"window": (9, 5)},
    "causal window": {"window": (7, 0), "bottom_right": False},
    "only left": {"window": (4, -1)},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": "heads"},
    "alibi of sequences": {"alibi": "sequences", "window": (-1, 0)},
    "sinks": {"sinks": True, "window": (-1, 0)},
    "seqused": {"used_k": (3, 2, 0, 20)},
    "negative scale": {"scale": -0.4},
    "no scale": {"scale": 0.0},
}
# Options of several kinds together.
PAIRS = [
    {"softcap": 2.0, "window": (9, 5), "alibi": "heads"},
    {"sinks": True, "softcap": 2.0, "scale": -0.4},
    {"alibi": "sequences", "sinks": True, "window": (12, -1), "used_k": (3, 2, 0, 20)},
]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Small blocks, so that small tensors have many of them."""
    for module in (attention, varlen):
        monkeypatch.setattr(module, "choose", lambda *_: Tile(16, 16, 4, 2))
    varlen._plans.clear()
    yield
    varlen._plans.clear()


def run(call: VarlenCall, grad_out=None, cu_dtype=torch.int32) -> dict:
    """Forward and, with grad_out, backward, into tensors full of NaN."""

    def new(shape, dtype):
        return torch.full(shape, math.nan, dtype=dtype)

    query, key, value = call.query, call.key, call.value
    options = varlen.Options(call.softmax_scale, *call.window, call.bottom_right, call.softcap,
                             max(call.lengths_q), max(call.lengths_k))  # fmt: skip
    extras = varlen.Extras(*call.cu_seqlens(cu_dtype), call.seqused_k(cu_dtype), call.alibi, call.sinks)
    out = new((*query.shape[:2], value.size(2)), query.dtype)
    logsumexp = new((query.size(1), query.size(0)), SINGLE)
    varlen.forward(query, key, value, options, extras, out, logsumexp)
    results = {"out": out, "logsumexp": logsumexp}
    if grad_out is not None:
        grads = [new(t.shape, t.dtype) for t in (query, key, value)]
        grad_sinks = varlen.backward(grad_out, query, key, value, options, extras, out, logsumexp, *grads)
        results |= dict(zip(("query", "key", "value"), grads))
        if call.sinks is not None:
            results["sinks"] = grad_sinks.to(call.sinks.dtype)
    return results


def run_and_check(call: VarlenCall, **options) -> dict:
    grad_out = gradient_for_varlen(call)
    results = run(call, grad_out, **options)
    judge_varlen(call, dict(results), grad_out)
    return results


@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(name):
    """In aligned float16, which goes through tensor maps."""
    run_and_check(varlen_call(LENGTHS, OTHERS, heads=2, kv_heads=1, dtype=HALF, **OPTIONS[name]))


@pytest.mark.parametrize("name", ["window", "softcap"])
def test_values_and_gradients_through_pointers(name):
    run_and_check(varlen_call(LENGTHS, OTHERS, heads=1, dtype=SINGLE, **OPTIONS[name]))


@pytest.mark.parametrize("options", PAIRS, ids=str)
def test_options_together(options):
    run_and_check(varlen_call(LENGTHS, OTHERS, heads=1, dtype=HALF, **options))


@pytest.mark.parametrize("head_dim,head_dim_v", [(1, 1), (20, 40), (40, 8)])
def test_head_dims(head_dim, head_dim_v):
    run_and_check(varlen_call((17, 3), None, 1, None, head_dim, head_dim_v, HALF, window=(-1, 0)))


@pytest.mark.parametrize("layout", ["qkv", "unaligned", "heads first"])
def test_layouts(layout):
    run_and_check(varlen_call((17, 3), heads=2, dtype=HALF, layout=layout, window=(-1, 0)))


@pytest.mark.parametrize("most_sorted", [0, 4096])
def test_every_schedule_covers_every_row(monkeypatch, most_sorted):
    """Sorted or with gaps, lengths of any type: what is not written stays NaN and is found."""
    monkeypatch.setattr(varlen, "_MOST_SORTED", most_sorted)
    lengths = (16, 1, 0, 40, 15, 17, 0)
    run_and_check(varlen_call(lengths, heads=1, dtype=HALF, window=(-1, 0)), cu_dtype=torch.int64)


def test_sequences_of_one_length_need_no_cu_seqlens():
    call = varlen_call((20, 20), (12, 12), heads=1, window=(-1, 0))
    options = varlen.Options(call.softmax_scale, -1, 0, True, 0.0, 20, 12)
    out = torch.full(call.query.shape, math.nan, dtype=HALF)
    logsumexp = torch.full((1, 40), math.nan)
    varlen.forward(call.query, call.key, call.value, options, varlen.Extras(), out, logsumexp)
    judge_varlen(call, {"out": out, "logsumexp": logsumexp})


def test_rows_behind_the_last_sequence_get_zeros():
    call = varlen_call((20, 14), heads=1)
    whole = run(call, gradient_for_varlen(call))
    call.lengths_q = call.lengths_k = (20,)
    results = run(call, gradient_for_varlen(call))
    for name in ("out", "query", "key", "value"):
        assert torch.equal(results[name][:20], whole[name][:20]) and (results[name][20:] == 0).all()
    assert (results["logsumexp"][:, 20:] == -math.inf).all()


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
def test_nothing_leaks_from_the_next_sequence(window):
    """Tiles of the copy engine reach into it; 0 times NaN would be NaN."""
    call = varlen_call((20, 7), heads=1, window=window)
    grad_out = gradient_for_varlen(call)
    clean = run(call, grad_out)
    for tensor in (call.query, call.key, call.value, grad_out):
        tensor[20:] = math.nan
    results = run(call, grad_out)
    for name in ("out", "query", "key", "value"):
        assert torch.equal(results[name][:20], clean[name][:20])
        assert results[name][20:].isnan().all()


def test_long_sums_are_split(monkeypatch):
    """As many rows for each key as would show what tensor cores cut off: here 32 instead of 65,536."""
    from torch_flashbackend.kernels.triton import varlen_backward

    monkeypatch.setattr(varlen_backward, "SUM_ROWS", tl.constexpr(32))
    monkeypatch.setattr(varlen, "LONG_SUM_ROWS", 0)
    run_and_check(varlen_call((75, 40), (20, 33), heads=2, kv_heads=1, window=(-1, 0), bottom_right=False))


@pytest.mark.parametrize("masked", [math.inf, -math.inf])
def test_a_row_without_a_key_has_either_logsumexp(masked):
    """Stock's kernels mark such rows by +inf, ours by -inf."""
    call = varlen_call((20,), (6,), heads=1, window=(-1, 0))
    grad_out = gradient_for_varlen(call)
    results = run(call, grad_out)
    logsumexp = results["logsumexp"].masked_fill(results["logsumexp"] == -math.inf, masked)
    options = varlen.Options(call.softmax_scale, -1, 0)
    grads = [torch.full_like(t, math.nan) for t in (call.query, call.key, call.value)]
    varlen.backward(grad_out, call.query, call.key, call.value, options, varlen.Extras(*call.cu_seqlens()),
                    results["out"], logsumexp, *grads)  # fmt: skip
    assert all(torch.equal(grad, results[name]) for grad, name in zip(grads, ("query", "key", "value")))
