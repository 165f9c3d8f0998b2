"""set_batch_invariant on the GPU: a sequence's result has the bits that it has alone, whatever is beside it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from varlen_cases import varlen_call

from torch_flashbackend import kv_cache

from common import Call, deterministic_mode, gradient_for, results_of, simple_call

pytestmark = pytest.mark.cuda_only
BATCH = 37


@pytest.fixture
def invariant(plugin):
    plugin.set_batch_invariant(True)
    yield
    plugin.set_batch_invariant(False)


@pytest.fixture
def deterministic():
    with deterministic_mode():
        yield


def rows_of(call: Call, first: int, last: int) -> Call:
    """Some batches of a call."""
    mask = call.attn_mask
    if mask is not None and mask.size(0) > 1:
        mask = mask[first:last]
    tensors = {name: getattr(call, name)[first:last] for name in ("query", "key", "value")}
    return dataclasses.replace(call, **tensors, attn_mask=mask)


def made(kind: str, head_dim: int) -> Call:
    sizes, options = (128, 128), {}
    if kind == "decode":
        sizes = (1, 3000)
    if kind == "few queries":
        sizes = (7, 2048)
    if kind == "causal":
        sizes, options = (700, 700), {"is_causal": True}
    if kind == "full":
        sizes = (520, 777)
    if kind == "padding":
        lengths = torch.randint(100, 512, (BATCH, 1, 1, 1), device="cuda", generator=generator())
        sizes, options = (512, 512), {"attn_mask": torch.arange(512, device="cuda") < lengths}
    if kind == "padding of 300":  # short rows of tiles, which a backward of few batches leaves to other kernels
        lengths = torch.randint(100, 300, (BATCH, 1, 1, 1), device="cuda", generator=generator())
        sizes, options = (300, 300), {"attn_mask": torch.arange(300, device="cuda") < lengths}
    if kind == "bias":
        bias = torch.randn(1, 8, 256, 256, device="cuda", generator=generator()).bfloat16()
        sizes, options = (256, 256), {"attn_mask": bias}
    if kind == "float32":
        options = {"dtype": torch.float32}
    if kind == "static cache":
        sizes = (1, 2048)
        options = {"attn_mask": (torch.arange(2048, device="cuda") < 300).view(1, 1, 1, 2048)}
    return simple_call(BATCH, 8, *sizes, head_dim, kv_heads=2, **options)


def generator() -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(5)


KINDS = ("decode", "few queries", "causal", "full", "padding", "bias", "float32", "static cache")


def attend(call: Call) -> torch.Tensor:
    with torch.no_grad():
        return F.scaled_dot_product_attention(
            call.query, call.key, call.value, call.attn_mask, is_causal=call.is_causal, enable_gqa=True
        )


@pytest.mark.parametrize("head_dim", [64, 128, 72, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_forward(plugin, invariant, launched, kind, head_dim):
    call = made(kind, head_dim)
    with launched():
        together = attend(call)
    for rows in (1, 2, 9):
        for row in range(0, BATCH - rows, 11):
            with launched():
                assert torch.equal(attend(rows_of(call, row, row + rows)), together[row : row + rows]), (rows, row)


def test_without_the_switch_decoding_follows_the_batch(plugin):
    """Or the tests above could not fail: keys are split among more blocks where fewer sequences want them."""
    call = made("decode", 128)
    with plugin.sdpa_backend("triton"):
        together = attend(call)
        assert any(not torch.equal(attend(rows_of(call, row, row + 1)), together[row : row + 1]) for row in range(8))


@pytest.mark.parametrize(
    ("kind", "head_dim"),
    [(kind, 64) for kind in ("causal", "full", "padding", "padding of 300", "bias", "float32")]
    + [("padding of 300", 128), ("causal", 320), ("full", 320), ("causal", 512)],
)
def test_gradients_in_deterministic_mode(plugin, invariant, deterministic, launched, kind, head_dim):
    """Of head_dim 320, all batches together have room for the probabilities of a "full" one, which one alone has not;
    of 512, all together have larger tiles.
    """
    call = made(kind, head_dim)
    grad_out = gradient_for(call)
    with launched():
        together = results_of(call, grad_out)
    for row in (0, 17, BATCH - 1):
        found = results_of(rows_of(call, row, row + 1), grad_out[row : row + 1])
        for name, tensor in found.items():
            assert torch.equal(tensor, together[name][row : row + 1]), (name, row)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_sequences(plugin, invariant, causal, head_dim):
    lengths = (300, 1, 64, 2000, 129, 517, 16)
    call = varlen_call(lengths, head_dim=head_dim, heads=8, kv_heads=2, device="cuda")
    together = _packed(plugin, call.query, call.key, call.value, lengths, causal)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        found = _packed(plugin, call.query[part], call.key[part], call.value[part], (length,), causal)
        assert torch.equal(found, together[part]), length
        start += length


def _packed(plugin, query, key, value, lengths, causal):
    sums = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    cu_seqlens = torch.tensor(sums, dtype=torch.int32, device="cuda")
    return plugin.attention_varlen(
        query, key, value, cu_seqlens, cu_seqlens, max(lengths), max(lengths), window_size=(-1, 0 if causal else -1)
    )


def test_a_cache_of_keys_and_values(plugin, invariant):
    call = simple_call(BATCH, 8, 1, 4096, 128, kv_heads=2)
    query, key, value = (tensor.transpose(1, 2) for tensor in (call.query, call.key, call.value))
    used = torch.randint(1, 4096, (BATCH,), device="cuda", dtype=torch.int32, generator=generator())
    together = kv_cache.attend(query, key, value, cache_seqlens=used, causal=True)
    for row in (0, 3, 20):
        one = slice(row, row + 1)
        found = kv_cache.attend(query[one], key[one], value[one], cache_seqlens=used[one], causal=True)
        assert torch.equal(found, together[one])
