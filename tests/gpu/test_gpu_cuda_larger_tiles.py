"""The larger tiles of the Hopper forward, forced upon small calls, which would be given the usual ones."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from common import simple_call
from test_gpu_cuda import check_cuda, hopper_ran, pytestmark  # noqa: F401
from torch_flashbackend.kernels.cuda import forward, tiles

# Queries around tiles of 192 and 256 rows and their warpgroups; keys of less than one step and of more than all stages.
LENGTHS = [(256, 512), (65, 1), (192, 700), (300, 190), (513, 513), (769, 64), (1000, 1023)]
HEAD_DIMS = [(8, 8), (64, 64), (48, 24), (72, 72), (72, 64), (64, 72), (80, 80), (128, 128)]


@pytest.fixture
def larger(monkeypatch):
    """While the test runs, calls get the larger tile of this length."""
    used = set()

    def choose(head_dim, head_dim_v, is_causal, *_):
        found = tiles._larger(head_dim, head_dim_v, is_causal, used_length[0])
        usual = tiles.choose_usual(head_dim, -(-head_dim_v // 16) * 16, is_causal, used_length[0])
        used.add(found.tile if found else usual)
        return found.tile if found else usual

    used_length = [4096]
    monkeypatch.setattr(tiles, "choose", choose)
    monkeypatch.setattr(forward, "_plans", {})

    def use(seqlen_k):
        used_length[0] = seqlen_k
        return used

    return use


def length_of(head_dim):
    """One at which the head_dim has a larger tile."""
    return 1024 if head_dim == 128 else 4096


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_values(check_cuda, larger, head_dims, is_causal):  # noqa: F811
    """Against float64, with several query heads for a key head in turn, and more tiles than multiprocessors once."""
    used = larger(length_of(head_dims[0]))
    for number, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        batch, heads = (8, 60) if number == 0 else (1, 3)
        call = simple_call(
            batch, heads, seqlen_q, seqlen_k, head_dims[0], head_dim_v=head_dims[1], is_causal=is_causal, seed=number,
            dtype=(torch.bfloat16, torch.float16)[number % 2],
        )  # fmt: skip
        check_cuda(call, grad=False, kernels=("flash", "math"))
    assert head_dims[0] == 128 or {tile.block_m for tile in used} <= {192, 256}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("descending", [False, True])
def test_maximum_that_moves_through_the_keys(check_cuda, larger, descending, head_dim, is_causal):  # noqa: F811
    """Each warp then computes scores of its own rows again, which change from tile to tile."""
    larger(length_of(head_dim))
    call = simple_call(1, 150, 600, head_dim=head_dim)
    growth = torch.linspace(6.0, 30.0, 600, device="cuda")[:, None]
    growth = growth.flip(0) if descending else growth
    key = (call.key.float() * growth).to(torch.bfloat16)
    check_cuda(dataclasses.replace(call, key=key, is_causal=is_causal), grad=False, kernels=("flash", "math"))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 128])
def test_the_same_bits_each_time(hopper_ran, larger, head_dim, is_causal):  # noqa: F811
    """Whichever block and warpgroup has which rows."""
    larger(length_of(head_dim))
    call = simple_call(4, 60, 700, 900, head_dim, is_causal=is_causal)
    with hopper_ran():
        first = call.run()
        for _ in range(30):
            assert torch.equal(call.run(), first)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72])
def test_nothing_beside_the_output_is_written(larger, head_dim, is_causal):
    """A tile that reaches past the last query, in an output whose rows and heads have others between them."""
    larger(4096)
    shape = (2, 3, 333, head_dim)
    query, key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    whole = torch.full((2, 3, 400, head_dim + 16), 7.0, device="cuda", dtype=torch.bfloat16)
    out = whole[:, :, :333, :head_dim]
    logsumexp = torch.empty(shape[:3], device="cuda")
    forward.forward(query, key, value, is_causal, 0.1, out, logsumexp)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=0.1)
    assert (out.float() - expected.float()).abs().max() <= 0.02 * expected.abs().max()
    out.fill_(7.0)
    assert (whole == 7.0).all()
