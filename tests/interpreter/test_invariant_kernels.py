"""Batch invariance in Triton's interpreter: a sequence in a batch has the bits that it has alone."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter needs TRITON_INTERPRET=1 in the environment", allow_module_level=True)

from test_decode_kernel import small_tile

import torch_flashbackend
from torch_flashbackend.kernels.triton import decode_plan, kv_cache
from torch_flashbackend.kernels.triton.decode_plan import PLAIN

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def decode(query, key, value):
    out = torch.empty_like(query)
    kv_cache.decode(query, key, value, out, None, 0.125, PLAIN)
    return out


@pytest.mark.parametrize("invariant", [True, False])
def test_decoding_has_the_bits_of_a_batch_of_one(monkeypatch, invariant):
    """One with many splits, which in a batch of many there are none of otherwise."""
    monkeypatch.setattr(decode_plan, "decode_tiles", small_tile())
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(4, 2, length, 16, generator=generator).half() for length in (1, 96, 96)
    )  # fmt: skip
    torch_flashbackend.set_batch_invariant(invariant)
    try:
        together = decode(query, key, value)
        alone = torch.cat([decode(*(tensor[row : row + 1] for tensor in (query, key, value))) for row in range(4)])
    finally:
        torch_flashbackend.set_batch_invariant(False)
    assert torch.equal(together, alone) is invariant
