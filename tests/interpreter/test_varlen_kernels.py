"""The variable-length kernels, run by Triton's interpreter on CPU tensors and judged against float64."""

from __future__ import annotations

import math
import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter needs TRITON_INTERPRET=1 in the environment", allow_module_level=True)

from torch_flashbackend.kernels.triton import attention, varlen
from torch_flashbackend.kernels.triton.tiles import Tile

from varlen_cases import VarlenCall, gradient_for_varlen, judge_varlen, varlen_call

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
HALF, SINGLE = torch.float16, torch.float32
MIXED = (20, 0, 1, 37)
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


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Small blocks, so that small tensors have many of them."""
    monkeypatch.setattr(attention, "choose", lambda *_: Tile(16, 16, 4, 2))
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


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(name, dtype):
    run_and_check(varlen_call(MIXED, (33, 5, 0, 37), heads=2, kv_heads=1, dtype=dtype, **OPTIONS[name]))
