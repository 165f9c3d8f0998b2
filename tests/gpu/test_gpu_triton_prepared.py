"""Repeated calls of Triton's kernels, whose launches were prepared: each reads and fills its own tensors."""

from __future__ import annotations

import pytest
import torch
from repeated_calls import TURNS, check_repeats, check_threads

from torch_flashbackend import ops

from common import forget_plans, simple_call

MASKS = {
    "none": None,
    "bool": lambda: torch.rand(150, 170, device="cuda") < 0.5,
    "bool for each key": lambda: torch.rand(2, 1, 1, 170, device="cuda") < 0.9,
    "float": lambda: torch.randn(2, 1, 150, 170, device="cuda", dtype=torch.bfloat16),
    "row with a gradient": lambda: torch.randn(1, 3, 1, 170, device="cuda", dtype=torch.bfloat16).requires_grad_(),
}


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize(("mask", "is_causal"), [("none", True), *((name, False) for name in MASKS)])
def test_repeated_calls_read_their_own_tensors(monkeypatch, mask, is_causal, lists):
    """lists: of the mask's tiles, as in longer calls."""
    from torch_flashbackend.kernels.triton import attention

    monkeypatch.setattr(attention, "worth_listing", lambda *_: lists)
    forget_plans()
    check_repeats("triton", MASKS[mask], is_causal)
    forget_plans()
    entries = "attention_forward", "attention_backward_query", "attention_backward_key_value"
    assert [ops.launch_counts().get(entry) for entry in entries] == [TURNS] * 3


def test_small_calls_of_threads_on_one_stream_and_on_their_own(plugin, note):
    calls = [simple_call(1, 4, seqlen, head_dim=64, is_causal=True, seed=seqlen) for seqlen in (64, 128, 200)]
    check_threads(plugin, note, "triton", calls, threads=4, on_one_stream=2, turns=12)


def test_a_graph_replays_repeated_calls(plugin):
    query, key, value, grad_out = (torch.randn(1, 4, 200, 64, device="cuda", dtype=torch.float16) for _ in range(4))
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]

    def step():
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out, *torch.autograd.grad(out, inputs, grad_out)

    with plugin.sdpa_backend("triton"):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results = step()
        with torch.no_grad():
            query.copy_(torch.randn_like(query))
        graph.replay()
        torch.testing.assert_close(results, step(), rtol=0.0, atol=0.0)
