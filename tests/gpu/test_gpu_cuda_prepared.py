"""Small calls of the Hopper kernels, whose launches were prepared: forward and backward from threads and streams."""

from __future__ import annotations

import pytest
import torch
from hopper_calls import HOPPER_ONLY
from repeated_calls import check_threads

from common import check, expect, gradient_for, simple_call

pytestmark = HOPPER_ONLY


@pytest.mark.parametrize("is_causal", [False, True])
def test_small_calls_of_threads_on_one_stream_and_on_their_own(plugin, note, is_causal):
    """Workspaces are of a stream, and of one call at a time: calls of several sizes, so that each would notice."""
    sizes = ((64, 64), (128, 64), (320, 128), (200, 64))
    calls = [
        simple_call(1, 4, seqlen, head_dim=head_dim, is_causal=is_causal, seed=index)
        for index, (seqlen, head_dim) in enumerate(sizes)
    ]
    check_threads(plugin, note, "cuda", calls, threads=6, on_one_stream=3, turns=24)


def test_a_graph_beside_eager_calls_on_its_stream(plugin):
    """What is captured has a workspace of its own, wherever it is replayed."""
    call = simple_call(1, 4, 200, head_dim=64, is_causal=True)
    grad_out = gradient_for(call)
    leaves = call.leaves(grad=True)
    inputs = list(leaves.differentiable().values())
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    with plugin.sdpa_backend("cuda"):
        expected = expect(call, grad_out)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(3):
                torch.autograd.grad(leaves.run(), inputs, grad_out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = torch.autograd.grad(leaves.run(), inputs, grad_out)
        eager = []
        for _ in range(30):
            with torch.cuda.stream(other):
                graph.replay()
            with torch.cuda.stream(stream):
                eager.append(torch.autograd.grad(leaves.run(), inputs, grad_out))
        torch.cuda.synchronize()
    names = list(leaves.differentiable())
    for grads in (*eager, captured):
        check(dict(zip(names, grads)), expected, None, "training")
