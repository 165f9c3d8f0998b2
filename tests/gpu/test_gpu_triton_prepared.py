"""Repeated calls of Triton's kernels, whose launches were prepared: each reads and fills its own tensors."""

from __future__ import annotations

import threading

import pytest
import torch

from torch_flashbackend import ops, reference

from common import check, expect, forget_plans, gradient_for, results_of, simple_call

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
    run, eps = ops.ReadyRun("triton", needs_grad=True), torch.finfo(torch.bfloat16).eps
    ops.reset_launch_counts()
    kept = []  # so that each turn has addresses of its own
    for turn in range(4):
        torch.manual_seed(turn)
        tensors = [torch.randn(2, 3, rows, 64, device="cuda", dtype=torch.bfloat16) for rows in (150, 170, 170, 150)]
        inputs, grad_out = [tensor.requires_grad_() for tensor in tensors[:3]], tensors[3]
        attn_mask = None if MASKS[mask] is None else MASKS[mask]()
        out = run(*inputs, attn_mask, is_causal=is_causal)
        grads = torch.autograd.grad(out, inputs, grad_out)
        kept.append((inputs, attn_mask, out, grads))
        twins = [tensor.detach().double().requires_grad_() for tensor in inputs]
        expected = reference.attention(*twins, attn_mask, 0.0, is_causal, 0.125)
        wanted = torch.autograd.grad(expected, twins, grad_out.double())
        for name, got, want in zip(("out", "query", "key", "value"), (out, *grads), (expected, *wanted)):
            error = (got.double() - want).abs().max() / want.abs().max()
            assert error < 4 * eps, f"turn {turn}, {name}: {error:.2e} of the largest"
    forget_plans()
    entries = "attention_forward", "attention_backward_query", "attention_backward_key_value"
    assert [ops.launch_counts().get(entry) for entry in entries] == [4] * 3


def test_small_calls_of_threads_on_one_stream_and_on_their_own(plugin, note):
    calls = [simple_call(1, 4, seqlen, head_dim=64, is_causal=True, seed=seqlen) for seqlen in (64, 128, 200)]
    gradients = [gradient_for(call) for call in calls]
    expected = [expect(call, grad_out) for call, grad_out in zip(calls, gradients)]
    shared, results, failures = torch.cuda.Stream(), [], []
    torch.cuda.synchronize()

    def work(thread):
        try:
            stream = shared if thread < 2 else torch.cuda.Stream()
            with plugin.sdpa_backend("triton"), torch.cuda.stream(stream):
                for turn in range(12):
                    number = (thread + turn) % len(calls)
                    results.append((number, results_of(calls[number], gradients[number])))
                torch.cuda.current_stream().synchronize()
        except BaseException as error:  # reported by the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert len(results) == 4 * 12
    for number, found in results:
        note(check(found, expected[number], None, "training"))


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
