"""The Hopper forward for head dimensions above 256, forced: values, logsumexp, new maxima, what it must not touch."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os

import pytest
import torch
from test_gpu_cuda import DTYPES, check_cuda, hopper_ran, pytestmark  # noqa: F401

from torch_flashbackend.kernels.cuda import forward, forward_wide

from common import simple_call

# Head dimensions of which the second half of the columns ends inside the tensor, past it, and wholly past a box.
HEAD_DIMS = [264, 272, 320, 384, 456, 512]
# Queries and keys around tiles of 64: an odd number of query tiles, less than a tile, more tiles than all stages.
LENGTHS = [(64, 64), (65, 1), (1, 700), (300, 190), (513, 513), (130, 1000), (1000, 64)]


def dtype_of(head_dim, is_causal):
    """Each head dimension's values are tested in one dtype causal, in the other full."""
    return DTYPES[(HEAD_DIMS.index(head_dim) + is_causal) % 2]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """The kernels of this file, at once."""
    calls = [(size, dtype_of(size, is_causal), is_causal, True) for size in HEAD_DIMS for is_causal in (False, True)]
    calls += [(512, torch.bfloat16, is_causal, lse) for is_causal in (False, True) for lse in (False, True)]
    calls += [(320, torch.bfloat16, is_causal, True) for is_causal in (False, True)]
    calls += [(272, torch.bfloat16, True, True)]
    wanted = dict.fromkeys(
        forward_wide.specialise(*call, seqlen_q=64)._replace(cluster=cluster) for call in calls for cluster in (1, 2)
    )
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(forward_wide.WideSpecialisation.compile, wanted))


@pytest.fixture(params=[1, 2], ids=["alone", "paired"])
def cluster(request, monkeypatch):
    """How many blocks share keys and values, in calls of any size."""
    usual = forward_wide.specialise
    monkeypatch.setattr(
        forward_wide, "specialise", lambda *args, **sizes: usual(*args, **sizes)._replace(cluster=request.param)
    )
    monkeypatch.setattr(forward, "_plans", {})
    return request.param


def exact(query, key, value, is_causal, scale):
    """Output and logsumexp in float64, of query [B, H, Sq, D] and key and value [B, Hkv, Sk, D]."""
    key, value = (t.double().repeat_interleave(query.size(1) // key.size(1), 1) for t in (key, value))
    scores = query.double() @ key.mT * scale
    if is_causal:
        scores += torch.full_like(scores[0, 0], -torch.inf).triu(1)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_values_and_logsumexp(cluster, head_dim, is_causal):
    """Probabilities and outputs are rounded to 16 bits, so that each adds its half unit to what sums of them have."""
    dtype = dtype_of(head_dim, is_causal)
    for number, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        call = simple_call(
            2, 6, seqlen_q, seqlen_k, head_dim, is_causal=is_causal, seed=number, dtype=dtype,
            kv_heads=(6, 3, 2, 1)[number % 4], layout=("bhsd", "bshd")[number % 2],
        )  # fmt: skip
        out = torch.empty_like(call.query)
        logsumexp = torch.empty(call.query.shape[:3], device="cuda")
        forward.forward(call.query, call.key, call.value, is_causal, 0.07, out, logsumexp)
        expected, expected_lse = exact(call.query, call.key, call.value, is_causal, 0.07)
        unit = torch.finfo(dtype).eps
        error = (out.double() - expected).abs()
        where = f"{seqlen_q} queries, {seqlen_k} keys"
        assert (error <= 2 * unit * expected.abs().amax(-1, keepdim=True) + 1e-6).all(), f"{where}: {error.max()}"
        assert error.norm() <= unit * expected.norm(), where
        assert (logsumexp.double() - expected_lse).abs().max() <= 1e-4, where


@pytest.mark.parametrize("is_causal", [False, True])
def test_through_the_plugin(check_cuda, cluster, is_causal):  # noqa: F811
    """Against float64 and PyTorch's kernels, with more tiles than multiprocessors."""
    check_cuda(simple_call(2, 20, 500, 700, 512, is_causal=is_causal), grad=False, kernels=("math",))


def test_gradients(check_cuda):  # noqa: F811
    """They are Triton's, from this kernel's output and logsumexp."""
    check_cuda(simple_call(1, 4, 200, 300, 320, kv_heads=2), kernels=("math",))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("descending", [False, True])
def test_maximum_that_moves_through_the_keys(check_cuda, cluster, descending, is_causal):  # noqa: F811
    """Steps are then done again by both warpgroups: in turn one or the other has the larger score, or both."""
    call = simple_call(1, 70, 600, head_dim=512)
    growth = torch.linspace(6.0, 30.0, 600, device="cuda")[:, None]
    growth = growth.flip(0) if descending else growth
    key = (call.key.float() * growth).to(torch.bfloat16)
    check_cuda(dataclasses.replace(call, key=key, is_causal=is_causal), grad=False, kernels=("math",))


def test_one_large_score(cluster):
    """A key that outweighs all before it, of one warpgroup's or of the other's, in every step."""
    query, key, value = (torch.randn(1, 1, 320, 512, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for position in range(10, 320, 32):
        large = key.clone()
        large[:, :, position] = 40 * query[:, :, 7]
        out, logsumexp = torch.empty_like(query), torch.empty(1, 1, 320, device="cuda")
        forward.forward(query, large, value, False, 512**-0.5, out, logsumexp)
        expected, expected_lse = exact(query, large, value, False, 512**-0.5)
        assert (out.double() - expected).abs().max() <= 2**-7 * expected.abs().max(), position
        assert ((logsumexp.double() - expected_lse).abs() <= 1e-4 + 2**-17 * expected_lse.abs()).all(), position


def test_nan_stays_where_it_is_seen(cluster):
    query, key, value = (torch.randn(1, 2, 300, 512, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    key[0, 0, 100] = torch.nan
    out = torch.empty_like(query)
    forward.forward(query, key, value, True, 0.05, out, None)
    assert out[0, 0, 100:].isnan().all()
    assert not out[0, 0, :100].isnan().any() and not out[0, 1].isnan().any()


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_same_bits_each_time(hopper_ran, cluster, is_causal):  # noqa: F811
    call = simple_call(2, 30, 700, 900, 512, is_causal=is_causal)
    with hopper_ran():
        first = call.run()
        for _ in range(30):
            assert torch.equal(call.run(), first)


@pytest.mark.parametrize("head_dim", [272, 512])
def test_nothing_beside_the_output_is_written(cluster, head_dim):
    """A tile that reaches past the last query, in an output whose rows and heads have others between them."""
    shape = (2, 3, 333, head_dim)
    query, key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    whole = torch.full((2, 3, 400, head_dim + 16), 7.0, device="cuda", dtype=torch.bfloat16)
    out = whole[:, :, :333, :head_dim]
    lse = torch.full((2 * 3 * 333 + 64,), 7.0, device="cuda")
    forward.forward(query, key, value, True, 0.1, out, lse[: 2 * 3 * 333].view(shape[:3]))
    expected, expected_lse = exact(query, key, value, True, 0.1)
    assert (out.double() - expected).abs().max() <= 2**-7 * expected.abs().max()
    assert (lse[: 2 * 3 * 333].view(shape[:3]).double() - expected_lse).abs().max() <= 1e-4
    out.fill_(7.0)
    lse[: 2 * 3 * 333] = 7.0
    assert (whole == 7.0).all() and (lse == 7.0).all()


def test_keys_expanded_over_heads(cluster):
    query = torch.randn(2, 6, 100, 512, device="cuda", dtype=torch.bfloat16)
    key, value = (torch.randn(2, 1, 200, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(query)
    forward.forward(query, key.expand(2, 6, 200, 512), value.expand(2, 6, 200, 512), False, 0.05, out, None)
    expected, _ = exact(query, key, value, False, 0.05)
    assert (out.double() - expected).abs().max() <= 2**-7 * expected.abs().max()
