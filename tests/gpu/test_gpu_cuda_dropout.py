"""Dropout in the Hopper forward kernel, forced: the very entries that reference.dropout_keep names, in both passes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common import Call, attention_float64, gradient_for, simple_call

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.cuda_only,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (compute capability 9.0)"),
]
HALF, BFLOAT = torch.float16, torch.bfloat16


def run(call: Call, seed: Tensor, p: float, backend: str = "cuda") -> tuple[Tensor, Tensor]:
    """(out, logsumexp) of the operator, which must have run the Hopper kernel."""
    from torch_flashbackend import ops

    ops.reset_launch_counts()
    out, logsumexp = torch.ops.flashbackend.attention_forward(
        call.query, call.key, call.value, None, seed, p, call.is_causal, call.softmax_scale, "query", backend
    )  # fmt: skip
    counts = ops.launch_counts()
    assert counts.get("flash_forward", 0) == (backend == "cuda"), counts
    assert counts.get("flash_dropout_keys", 0) == (backend == "cuda"), counts
    return out, logsumexp


def kept(call: Call, seed: Tensor, p: float) -> Tensor:
    from torch_flashbackend import reference

    shape = (*call.query.shape[:3], call.key.size(2))
    return reference.dropout_keep(seed, shape, p)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_entries_kept_are_those_of_the_reference_one_by_one(head_dim, is_causal):
    """Values that are rows of an identity show each probability by itself, as many keys at a time as fit."""
    p, lengths = 0.4, (300, 333)
    call = simple_call(2, 3, *lengths, head_dim, is_causal=is_causal)
    seed = torch.tensor([0x123456789ABCDEF], device="cuda")
    expected = kept(call, seed, p)
    if is_causal:
        expected = expected & torch.ones(lengths, dtype=torch.bool, device="cuda").tril()
    for first in range(0, lengths[1], head_dim):
        columns = min(head_dim, lengths[1] - first)
        call.value.zero_()
        call.value[:, :, first : first + columns, :columns] = torch.eye(columns, device="cuda", dtype=BFLOAT)
        call.key.mul_(0.1)  # no probability rounds to zero
        out, _ = run(call, seed, p)
        assert torch.equal(out[..., :columns] != 0, expected[..., first : first + columns]), first


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 128, 192])
def test_values_and_logsumexp(head_dim, p):
    for number, lengths in enumerate(((333, 500), (512, 512), (1, 700), (700, 1), (129, 127), (64, 65), (1000, 260))):
        for is_causal in (False, True):
            dtype = (BFLOAT, HALF)[number % 2]
            call = simple_call(2, 4, *lengths, head_dim, kv_heads=2, dtype=dtype, is_causal=is_causal, seed=number)
            seed = torch.tensor([number * 2**33 + 7], device="cuda")
            out, logsumexp = run(call, seed, p)
            expected = attention_float64(call, kept(call, seed, p), p)
            other, other_lse = run(call, seed, p, "triton")
            error, others = ((x.double() - expected).norm() for x in (out, other))
            assert error <= 2 * others + 1e-6 * expected.norm(), (lengths, is_causal, error, others)
            # Row sums are those of all probabilities.
            assert (logsumexp - other_lse).abs().max() < 1e-4
            plain = torch.ops.flashbackend.attention(
                call.query, call.key, call.value, None, seed, p, is_causal, call.softmax_scale, "query", "cuda"
            )  # fmt: skip
            assert torch.equal(plain, out)


def test_dropout_of_everything_gives_zeros():
    call = simple_call(1, 2, 200, head_dim=64)
    out, logsumexp = run(call, torch.tensor([5], device="cuda"), 1.0)
    assert not out.any() and logsumexp.isfinite().all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_drop_what_the_forward_dropped(plugin, head_dim, is_causal):
    """Through whichever backward goes with the forward."""
    from torch_flashbackend import ops, reference

    p = 0.3
    call = simple_call(2, 4, 333, 300, head_dim, kv_heads=2, is_causal=is_causal)
    leaves = call.leaves()
    grad_out = gradient_for(call)
    torch.manual_seed(11)
    seed = reference.draw_dropout_seed(call.query, p)
    torch.manual_seed(11)
    ops.reset_launch_counts()
    with plugin.sdpa_backend("cuda"):
        out = F.scaled_dot_product_attention(
            leaves.query, leaves.key, leaves.value, dropout_p=p, is_causal=is_causal, enable_gqa=True
        )  # fmt: skip
    assert ops.launch_counts()["flash_forward"] == 1
    grads = torch.autograd.grad(out, (leaves.query, leaves.key, leaves.value), grad_out)
    wide = Call(*(t.detach().double().requires_grad_() for t in (call.query, call.key, call.value)),
                is_causal=is_causal, enable_gqa=True)  # fmt: skip
    expected = attention_float64(wide, kept(call, seed, p), p)
    wanted = torch.autograd.grad(expected, (wide.query, wide.key, wide.value), grad_out.double())
    for got, right in zip((out, *grads), (expected, *wanted)):
        assert (got.double() - right).norm() < 0.01 * right.norm()


def test_dropout_follows_manual_seed_and_differs_from_call_to_call(plugin):
    call = simple_call(1, 2, 300, head_dim=128)

    def attend():
        with plugin.sdpa_backend("cuda"):
            return F.scaled_dot_product_attention(call.query, call.key, call.value, dropout_p=0.5)

    torch.manual_seed(3)
    first, second = attend(), attend()
    torch.manual_seed(3)
    assert torch.equal(attend(), first) and torch.equal(attend(), second)
    assert not torch.equal(first, second)


def test_a_captured_graph_drops_others_at_each_replay(plugin):
    call = simple_call(1, 2, 300, head_dim=64)

    def attend():
        with plugin.sdpa_backend("cuda"):
            return F.scaled_dot_product_attention(call.query, call.key, call.value, dropout_p=0.5)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    found = []
    for _ in range(3):
        graph.replay()
        found.append(out.clone())
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
    assert all(result.isfinite().all() for result in found)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_results_repeat_bit_by_bit_under_load(head_dim):
    call = simple_call(4, 16, 1000, 1333, head_dim)
    seed = torch.tensor([77], device="cuda")
    other = torch.randn(4096, 4096, device="cuda", dtype=BFLOAT)
    stream = torch.cuda.Stream()
    first, _ = run(call, seed, 0.1)
    torch.cuda.synchronize()
    for turn in range(40):
        if turn % 3 == 0:
            with torch.cuda.stream(stream):
                other @ other
        assert torch.equal(run(call, seed, 0.1)[0], first), turn
    torch.cuda.synchronize()
