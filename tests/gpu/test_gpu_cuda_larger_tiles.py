"""The larger tiles of the Hopper forward, forced upon small calls, which would be given the usual ones."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_gpu_cuda import DTYPES, check_cuda, hopper_ran, pytestmark  # noqa: F401

from torch_flashbackend import decisions
from torch_flashbackend.kernels.cuda import forward, tiles

from common import simple_call

# Queries around tiles of 192 and 256 rows and their warpgroups; keys of less than one step and of more than all stages.
LENGTHS = [(256, 512), (65, 1), (192, 700), (300, 190), (513, 513), (769, 64), (1000, 1023)]
HEAD_DIMS = [(64, 64), (72, 72), (80, 80), (128, 128)]


@pytest.fixture
def larger(monkeypatch):
    """larger(head_dim): from now on calls of any size get the larger tile of a length that has one, where one has."""

    def use(head_dim):
        length = 1024 if head_dim == 128 else 4096

        def choose(head_dim, head_dim_v, is_causal, *_):
            found = tiles._larger(head_dim, head_dim_v, is_causal, length)
            assert found or (head_dim == 128 and not is_causal)
            return found.tile if found else tiles.choose_usual(head_dim, head_dim_v, is_causal, length)

        monkeypatch.setattr(tiles, "choose", choose)
        monkeypatch.setattr(forward, "_plans", {})
        decisions.forget()

    return use


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_values(check_cuda, larger, head_dims, is_causal):  # noqa: F811
    """Against float64; the first has more tiles than there are multiprocessors, others share heads of keys."""
    larger(head_dims[0])
    dtype = DTYPES[(HEAD_DIMS.index(head_dims) + is_causal) % 2]
    for number, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        batch, heads = (8, 60) if number == 0 else (2, 6)
        call = simple_call(
            batch, heads, seqlen_q, seqlen_k, head_dims[0], head_dim_v=head_dims[1], is_causal=is_causal, seed=number,
            dtype=dtype, kv_heads=heads // (1 + number % 3), layout=("bhsd", "bshd")[number % 2],
        )  # fmt: skip
        check_cuda(call, grad=False, kernels=("flash", "math"))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("descending", [False, True])
def test_maximum_that_moves_through_the_keys(check_cuda, larger, descending, head_dim, is_causal):  # noqa: F811
    """Each warp then computes scores of its own rows again, which change from tile to tile."""
    larger(head_dim)
    call = simple_call(1, 150, 600, head_dim=head_dim)
    growth = torch.linspace(6.0, 30.0, 600, device="cuda")[:, None]
    growth = growth.flip(0) if descending else growth
    key = (call.key.float() * growth).to(torch.bfloat16)
    check_cuda(dataclasses.replace(call, key=key, is_causal=is_causal), grad=False, kernels=("flash", "math"))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 128])
def test_the_same_bits_each_time(hopper_ran, larger, head_dim, is_causal):  # noqa: F811
    """Whichever block and warpgroup has which rows."""
    larger(head_dim)
    call = simple_call(4, 60, 700, 900, head_dim, is_causal=is_causal)
    with hopper_ran():
        first = call.run()
        for _ in range(30):
            assert torch.equal(call.run(), first)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72])
def test_nothing_beside_the_output_is_written(larger, head_dim, is_causal):
    """A tile that reaches past the last query, in an output whose rows and heads have others between them."""
    larger(head_dim)
    shape = (2, 3, 333, head_dim)
    query, key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    whole = torch.full((2, 3, 400, head_dim + 16), 7.0, device="cuda", dtype=torch.bfloat16)
    out = whole[:, :, :333, :head_dim]
    logsumexp = torch.empty(shape[:3], device="cuda")
    forward.forward(query, key, value, is_causal, 0.1, out, logsumexp)
    scores = query.double() @ key.double().mT * 0.1
    if is_causal:
        scores += torch.full_like(scores[0, 0], -torch.inf).triu(1)
    expected = scores.softmax(-1) @ value.double()
    assert (out.double() - expected).abs().max() <= 2**-7 * expected.abs().max()
    assert (logsumexp.double() - scores.logsumexp(-1)).abs().max() <= 1e-4
    out.fill_(7.0)
    assert (whole == 7.0).all()
