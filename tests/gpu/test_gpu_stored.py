"""Backward above head_dim 256: probabilities of a few heads in memory, or computed again where that is too much."""

from __future__ import annotations

import gc

import pytest
import torch

from torch_flashbackend import ops

from common import forget_plans, gradient_for, results_of, simple_call

pytestmark = pytest.mark.cuda_only
STORED = {"attention_stored_scores", "attention_stored_query", "attention_stored_key"}


@pytest.fixture
def stored_plan():
    """The module whose rules a test may change."""
    from torch_flashbackend.kernels.triton import stored_plan

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("kernels for GPUs with a tensor copy engine")
    forget_plans()
    yield stored_plan
    forget_plans()


def long_call(kind: str):
    """Several tiles of 128 rows with parts that are not full, strided rows, groups of heads."""
    lengths = {"fewer keys": (700, 300), "more keys": (300, 700)}.get(kind, (650, 650))
    return simple_call(
        2, 4, *lengths, head_dim={"odd": 328, "narrow": 264}.get(kind, 512), kv_heads=2 if kind == "grouped" else 4,
        is_causal=kind != "dense", dtype=torch.float16 if kind == "odd" else torch.bfloat16,
        layout="bshd" if kind == "dense" else "bhsd",
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["dense", "causal", "grouped", "odd", "narrow", "fewer keys", "more keys"])
def test_stored_probabilities(check_call, stored_plan, monkeypatch, kind):
    """One kv head at a time, so that the same memory is used for one after the other."""
    monkeypatch.setattr(stored_plan, "PROGRAMS", 0.01)
    check_call(long_call(kind))
    assert ops.launch_counts().keys() >= STORED


@pytest.mark.parametrize("kind", ["dense", "causal", "grouped", "odd", "fewer keys", "more keys"])
def test_stored_probabilities_of_a_part_of_a_head(check_call, stored_plan, monkeypatch, kind):
    """Strips of keys, then of queries, where the tiles of one head would take too much memory."""
    monkeypatch.setattr(stored_plan, "SHARE_OF_QUERY", 0.15)
    monkeypatch.setattr(stored_plan, "SHARE_OF_GPU", 0)
    check_call(long_call(kind))
    counts = ops.launch_counts()
    assert counts["attention_stored_key"] > 2 * 2 * (2 if kind == "grouped" else 4)


@pytest.mark.parametrize("causal", [False, True])
def test_stored_probabilities_of_many_heads(check_call, stored_plan, causal):
    """Enough tiles for the larger ones of the products, in several launches of which the last has fewer heads."""
    call = simple_call(3, 35, 650, head_dim=512, is_causal=causal)
    check_call(call)
    counts = ops.launch_counts()
    assert counts["attention_stored_query"] == 2 and counts["attention_stored_key"] == 4


@pytest.mark.parametrize("kind", ["dense", "causal", "grouped", "odd"])
def test_probabilities_that_may_not_be_stored(check_call, stored_plan, monkeypatch, kind):
    monkeypatch.setattr(stored_plan, "SHARE_OF_QUERY", 0)
    check_call(long_call(kind))
    assert not ops.launch_counts().keys() & STORED


def test_stored_probabilities_give_the_same_bits_each_time(plugin, backend, stored_plan):
    call = simple_call(4, 8, 1024, head_dim=512, is_causal=True)
    grad_out = gradient_for(call)
    with plugin.sdpa_backend(backend):
        first = results_of(call, grad_out)
        for _ in range(20):
            for name, tensor in results_of(call, grad_out).items():
                assert torch.equal(tensor, first[name]), name


@pytest.mark.parametrize(("batch", "heads", "length"), [(1, 2, 2048), (2, 8, 4096)])
def test_peak_memory_is_at_most_the_defaults(plugin, backend, stored_plan, batch, heads, length):
    call = simple_call(batch, heads, length, head_dim=512, is_causal=True).leaves()
    grad_out = gradient_for(call)

    def peak():
        for _ in range(2):
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(call.run(), (call.query, call.key, call.value), grad_out)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    with plugin.sdpa_backend(backend):
        ours = peak()
    plugin.disable()
    stock = peak()
    assert ours <= stock * 1.01, (ours, stock)
