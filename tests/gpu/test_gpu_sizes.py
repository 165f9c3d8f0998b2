"""Head dimensions from 1 to 512, odd ones included, and sizes beyond what 16, 17 and 31 bits count."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from common import Call, Expected, check, expect, gradient_for, results_of, simple_call

# Above 256 each takes half a minute to compile.
HEAD_DIMS = (1, 2, 3, 7, 8, 15, 16, 17, 24, 31, 33, 40, 48, 63, 72, 80, 96, 104, 120, 127, 129, 144, 160, 192, 200, 224,
             255, 256, 257, 384, 511, 512)  # fmt: skip


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dim(check_call, device, head_dim):
    dtype = (torch.bfloat16, torch.float16)[head_dim % 2]
    check_call(simple_call(1, 2, 150, head_dim=head_dim, dtype=dtype, device=device, is_causal=head_dim % 3 == 0))


@pytest.mark.parametrize("head_dim", [5, 64, 100, 128, 256, 300, 512])
def test_head_dim_in_float32(check_call, device, head_dim):
    check_call(simple_call(1, 2, 150, head_dim=head_dim, dtype=torch.float32, device=device))


@pytest.mark.parametrize("kind", ["dense", "causal", "grouped", "odd", "fewer keys"])
def test_halves_of_wide_heads(check_call, device, kind):
    """Above head_dim 256 programs share the columns of a tile, with and without parts that are not full."""
    check_call(simple_call(
        1, 4, 300, 170 if kind == "fewer keys" else 300, head_dim=328 if kind == "odd" else 512, device=device,
        kv_heads=2 if kind == "grouped" else 4, is_causal=kind in ("causal", "odd"),
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [
        (64, 128),
        (128, 64),
        (192, 128),
        (128, 192),
        (40, 64),
        (64, 1),
        (1, 64),
        (33, 77),
        (256, 512),
        (512, 64),
        (576 - 64, 16),
    ],
)
def test_value_head_dim_differs(check_call, device, head_dim, head_dim_v):
    check_call(simple_call(1, 2, 130, head_dim=head_dim, head_dim_v=head_dim_v, device=device, is_causal=True))


@pytest.mark.parametrize("seqlen_q", [1, 2, 15, 16, 17, 63, 65, 127, 129, 255, 257])
@pytest.mark.parametrize("seqlen_k", [1, 16, 33, 128, 257])
def test_lengths_around_tiles(check_call, device, seqlen_q, seqlen_k):
    check_call(simple_call(1, 2, seqlen_q, seqlen_k, 64, device=device))


@pytest.mark.cuda_only
@pytest.mark.parametrize(("batch", "heads"), [(70_000, 1), (1, 70_000), (300, 300)])
@pytest.mark.parametrize("kind", ["causal", "bool"])
def test_more_than_65535_heads_in_all(check_call, batch, heads, kind):
    mask = torch.rand(1, 1, 24, 24, device="cuda") < 0.7 if kind == "bool" else None
    call = simple_call(batch, heads, 24, head_dim=16, is_causal=kind == "causal", attn_mask=mask)
    check_call(call, kernels=("math",))


def check_in_slices(call: Call, grad_out: Tensor, results: dict[str, Tensor], rows: int, note) -> None:
    """The tolerance rule for calls too large to judge at once: `rows` query rows at a time, the sums over them last."""
    names = ("key", "value")
    values = {name: torch.zeros_like(results[name], dtype=torch.float64) for name in names}
    squares = {name: torch.zeros_like(values[name]) for name in names}
    for start in range(0, call.query.size(2), rows):
        slice_ = slice(start, min(start + rows, call.query.size(2)))
        part = dataclasses.replace(call, query=call.query[:, :, slice_])
        if call.is_causal:
            index = torch.arange(slice_.start, slice_.stop, device=call.query.device)
            seen = index[:, None] >= torch.arange(call.key.size(2), device=call.query.device)
            part = dataclasses.replace(part, is_causal=False, attn_mask=seen)
        expected = expect(part, grad_out[:, :, slice_])
        actual = {name: results[name][:, :, slice_] for name in ("out", "query")}
        note(check(actual, expected, None, f"rows from {start} of {call.describe()}"))
        for name in names:
            values[name] += expected.values[name]
            squares[name] += expected.deviations[name].square()
    deviations = {name: square.sqrt() for name, square in squares.items()}
    note(check({name: results[name] for name in names}, Expected(values, deviations), None, call.describe()))


@pytest.mark.memory
@pytest.mark.cuda_only
def test_more_than_2_to_the_31_elements_in_query(plugin, launched, backend, note, gigabytes):
    """float16, which shows best whether long sums in the tensor cores keep their accuracy."""
    gigabytes(40)
    call = simple_call(1, 2, 8_500_000, 64, 128, dtype=torch.float16)
    assert call.query.numel() > 2**31
    grad_out = gradient_for(call)
    with plugin.sdpa_backend(backend), launched():
        results = results_of(call, grad_out)
    check_in_slices(call, grad_out, results, 2**18, note)


@pytest.mark.memory
@pytest.mark.cuda_only
def test_more_than_2_to_the_31_elements_in_key(plugin, launched, backend, note, gigabytes):
    """Two heads side by side in memory, so that the last rows of each are that far from its first."""
    gigabytes(50)
    call = simple_call(1, 2, 16, 8_500_000, 128, scale=0.5, layout="bshd")
    assert call.key.numel() > 2**31
    with plugin.sdpa_backend(backend), launched():
        out = results_of(call, None)["out"]
    for head, columns in itertools.product(range(2), torch.arange(128).split(32)):
        of_head = {name: getattr(call, name)[:, head : head + 1] for name in ("query", "key", "value")}
        part = dataclasses.replace(call, **of_head | {"value": of_head["value"][..., columns]})
        note(check({"out": out[:, head : head + 1, :, columns]}, expect(part), None, call.describe()))


@pytest.mark.memory
@pytest.mark.cuda_only
@pytest.mark.parametrize("causal", [False, True])
def test_sequences_longer_than_2_to_the_17(plugin, launched, backend, note, gigabytes, causal):
    gigabytes(25)
    call = simple_call(1, 1, 2**17 + 100, head_dim=32, is_causal=causal)
    grad_out = gradient_for(call)
    with plugin.sdpa_backend(backend), launched():
        results = results_of(call, grad_out)
    check_in_slices(call, grad_out, results, 512, note)


@pytest.mark.cuda_only
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_queries_with_long_sums(plugin, launched, backend, note, causal):
    """More than 2**18 query rows for each key."""
    call = simple_call(1, 8, 40_000, 150, 64, kv_heads=1, dtype=torch.float16, is_causal=causal)
    grad_out = gradient_for(call)
    with plugin.sdpa_backend(backend), launched():
        results = results_of(call, grad_out)
    check_in_slices(call, grad_out, results, 8_000, note)


@pytest.mark.cuda_only
def test_a_long_mask_row(check_call):
    length = 2**17 + 64
    mask = torch.rand(1, 1, 1, length, device="cuda") < 0.5
    check_call(simple_call(1, 2, 48, length, 64, attn_mask=mask), kernels=("math",))


@pytest.mark.cuda_only
@pytest.mark.parametrize("kind", ["dense", "bool", "float", "padding"])
def test_more_keys_than_are_added_up_at_a_time(check_call, kind):
    """More than 2**18 keys: sums in parts, over all tiles and over lists of a mask's, gradients included."""
    seqlen_q, length = 64, 2**18 + 1000
    mask = None
    if kind == "padding":
        mask = (torch.arange(length, device="cuda") < 200_000)[None, None, None]
    elif kind != "dense":
        mask = torch.rand(1, 1, seqlen_q, length // 1000 + 1, device="cuda") < 0.5
        mask = mask.repeat_interleave(1000, -1)[..., :length].contiguous()
        mask = mask if kind == "bool" else torch.zeros(mask.shape, device="cuda").masked_fill(~mask, -torch.inf)
    check_call(simple_call(1, 2, seqlen_q, length, 128, attn_mask=mask), kernels=("math",))
