"""Masks whose tiles are listed: random patterns of blocks, the usual patterns, captured graphs, peak memory.

FLASHBACKEND_RANDOM_MASKS sets how many random patterns are drawn (default 300; 1,000 before a release).
"""

from __future__ import annotations

import os

import pytest
import torch
from hopper_calls import pattern
from torch import Tensor

from common import block_pattern, forget_plans, gradient_for, simple_call

RANDOM_MASKS = int(os.environ.get("FLASHBACKEND_RANDOM_MASKS", "300"))
CHUNK = 10
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
LENGTHS = (64, 65, 127, 128, 192, 200, 256, 320, 384, 511, 512, 640)


@pytest.fixture
def _listed(monkeypatch):
    """Every mask with more than one column is listed, however small the call."""
    attention = pytest.importorskip("torch_flashbackend.kernels.triton.attention")

    monkeypatch.setattr(attention, "worth_listing", lambda query, keys, mask, causal: mask[3] > 1)
    forget_plans()
    yield
    forget_plans()


def random_mask_call(seed: int, device):
    """Shapes from a short list, so that few kernels are compiled; masks of blocks of any class, broadcast at random."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    batch, kv_heads, group = pick(1, 2), pick(1, 2), pick(1, 1, 2)
    heads = kv_heads * group
    seqlen_q, seqlen_k = pick(*LENGTHS), pick(*LENGTHS)
    dtype = pick(HALF, BFLOAT, BFLOAT)
    mask_dtype = pick(torch.bool, torch.bool, dtype, SINGLE)
    shape = (pick(1, batch), pick(1, heads), pick(1, seqlen_q, seqlen_q), seqlen_k)
    mask = block_pattern(shape, mask_dtype, seed, block=pick(16, 64, 64, 128), device=device)
    return simple_call(
        batch, heads, seqlen_q, seqlen_k, pick(64, 64, 128), kv_heads=kv_heads, dtype=dtype, device=device, seed=seed,
        attn_mask=mask, scale=pick(None, None, -0.3, 0.0), layout=pick("bhsd", "bshd"),
        mask_grad=mask.is_floating_point() and pick(False, True), note=f"random mask {seed}",
    )  # fmt: skip


@pytest.mark.usefixtures("_listed")
@pytest.mark.parametrize("first", range(0, RANDOM_MASKS, CHUNK))
def test_random_mask_patterns(check_call, device, first):
    for seed in range(first, min(first + CHUNK, RANDOM_MASKS)):
        check_call(random_mask_call(seed, device))


@pytest.mark.usefixtures("_listed")
@pytest.mark.parametrize("kind", ["bool", "-inf", "finfo.min"])
@pytest.mark.parametrize("name", ["causal", "window", "documents", "prefix", "padding", "dead columns"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_patterns(check_call, device, name, kind, head_dim):
    seen = pattern(name, 1000, 1000, device=device)
    mask = seen.contiguous()
    if kind != "bool":
        hidden = -torch.inf if kind == "-inf" else torch.finfo(BFLOAT).min
        mask = torch.zeros(seen.shape, device=device, dtype=BFLOAT).masked_fill(~seen, hidden)
    check_call(simple_call(2, 2, 1000, head_dim=head_dim, device=device, attn_mask=mask, mask_grad=kind == "-inf"))


@pytest.mark.cuda_only
@pytest.mark.usefixtures("_listed")
def test_tiles_that_nobody_sees_are_not_visited(device):
    from torch_flashbackend import ops

    seen = pattern("documents", 1024, 1024, device=device).clone()
    seen[..., 256:384] = False
    query, key, value = (torch.randn(1, 2, 1024, 64, device=device, dtype=BFLOAT) for _ in range(3))
    call = simple_call(1, 2, 1024, head_dim=64, device=device, attn_mask=seen)

    def run(key: Tensor, value: Tensor) -> Tensor:
        return torch.ops.flashbackend.attention(query, key, value, seen, None, 0.0, False, call.softmax_scale, "query")

    ops.reset_launch_counts()
    clean = run(key, value)
    assert ops.launch_counts()["classify_mask"] == 1
    key[:, :, 256:384] = value[:, :, 256:384] = torch.nan
    assert torch.equal(run(key, value), clean)


@pytest.mark.cuda_only
@pytest.mark.usefixtures("_listed", "plugin")
def test_a_captured_graph_lists_the_mask_of_each_replay(device):
    call = simple_call(1, 2, 512, head_dim=64, device=device, attn_mask=pattern("causal", 512, 512, device=device))
    grad_out = gradient_for(call)
    forward, backward = torch.ops.flashbackend.attention_forward, torch.ops.flashbackend.attention_backward
    options = None, 0.0, False, call.softmax_scale

    def run() -> list[Tensor]:
        inputs = call.query, call.key, call.value, call.attn_mask
        out, logsumexp = forward(*inputs, *options, "query")
        return [out, *backward(grad_out, *inputs, out, logsumexp, *options, [True, True, True, False])[:3]]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for name in ("window", "prefix", "causal"):
        call.attn_mask.copy_(pattern(name, 512, 512, device=device))
        expected = run()
        graph.replay()
        for tensor, other in zip(captured, expected):
            assert torch.equal(tensor, other), name


@pytest.mark.cuda_only
@pytest.mark.parametrize("name", ["causal", "padding"])
def test_lists_take_little_memory(device, name):
    """Less than a hundredth of the mask."""
    mask = pattern(name, 4096, 4096, device=device)
    query, key, value = (torch.randn(2, 16, 4096, 64, device=device, dtype=BFLOAT) for _ in range(3))

    def peak(mask: Tensor | None) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.ops.flashbackend.attention(query, key, value, mask, None, 0.0, False, 0.125, "query")
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    peak(mask)
    assert peak(mask) - peak(None) <= mask.numel() // 100
