"""Float masks on the Hopper forward kernel, forced: values for every kind of mask, lists, and what must not leak.

FLASHBACKEND_RANDOM_CALLS sets how many random calls are drawn (default 300 here).
"""

from __future__ import annotations

import dataclasses
import math
import os
import random

import pytest
import torch
import torch.nn.functional as F
from hopper_calls import checker, draw, pattern
from test_gpu_cuda_masks import hopper_ran, pytestmark
from torch import Tensor

from common import (
    Call,
    block_pattern,
    check,
    check_logsumexp,
    expect,
    simple_call,
)

__all__ = ["hopper_ran", "pytestmark"]  # a fixture and the marks of this file too

RANDOM_CALLS = int(os.environ.get("FLASHBACKEND_RANDOM_CALLS", "300"))
CHUNK = 20
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
HEAD_DIMS = [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)]


@pytest.fixture
def check_cuda(check_call):
    return checker(check_call, ("math",))


def in_rows_of_16_bytes(mask: Tensor) -> Tensor:
    """The same mask with rows that begin at multiples of 16 bytes; what is between them is NaN."""
    pitch = -(-mask.size(3) * mask.element_size() // 16) * 16 // mask.element_size()
    room = torch.full((*mask.shape[:3], pitch), torch.nan, dtype=mask.dtype, device=mask.device)
    view = room[..., : mask.size(3)]
    return view.copy_(mask)


PATTERNS = ("causal", "window", "documents", "prefix", "padding", "random", "nothing", "upper", "dead rows")


KINDS = ("-inf", "lowest", "bias", "bias and lowest", "-10000")


def float_mask(seen: Tensor, kind: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What a model makes of it."""
    generator = torch.Generator("cuda").manual_seed(seed)
    mask = torch.zeros(seen.shape, device="cuda", dtype=dtype)
    if kind.startswith("bias"):
        mask = torch.randn(seen.shape, generator=generator, device="cuda").to(dtype)
    hidden = {"-inf": -math.inf, "bias": -math.inf, "-10000": -10000.0}.get(kind, torch.finfo(dtype).min)
    return in_rows_of_16_bytes(mask.masked_fill(~seen, hidden))


# ---------------------------------------------------------------------------------------------------------------- lists


def expected_lists(mask: Tensor, block_m: int, block_n: int) -> list[list[int]]:
    """[full, visited, full tiles ..., mixed tiles from the last ...] of each query tile of a mask [rows, keys].

    Columns of 16 bytes are hidden where they hold -inf alone or, where that hides, the lowest number alone; a column of
    both is visited.
    """
    lowest, piece = torch.finfo(mask.dtype).min, 16 // mask.element_size()
    found = []
    for rows in mask.split(block_m):
        padded = F.pad(rows, (0, -rows.size(1) % block_n), value=-math.inf)
        # What is past the end is hidden like that which is before it in the same column.
        inside = torch.arange(padded.size(1)) < rows.size(1)
        hidden = (padded == -math.inf).unflatten(1, (-1, piece)).all(2).all(0)
        if bool((rows > -2.0).any(1).all()):  # each row has a number that is certainly larger than the lowest one
            hidden |= ((padded == lowest) | ~inside).unflatten(1, (-1, piece)).all(2).all(0)
        full = (padded == 0.0).unflatten(1, (-1, block_n)).all(2).all(0)
        empty = hidden.unflatten(0, (-1, block_n // piece)).all(1)
        listed = [*full.nonzero()[:, 0].tolist(), *(~full & ~empty).nonzero()[:, 0].flip(0).tolist()]
        found.append([int(full.sum()), max(len(listed), 1), *(listed or [0])])
    return found


@pytest.mark.parametrize("dtype", [BFLOAT, HALF, SINGLE])
def test_lists_are_what_the_mask_says(dtype):
    from torch_flashbackend import driver
    from torch_flashbackend.kernels.cuda import forward

    index = torch.cuda.current_device()
    query_dtype = BFLOAT if dtype == SINGLE else dtype
    for seqlen_q, seqlen_k, block in (
        (300, 1000, 64), (129, 1053, 128), (64, 17, 4), (1, 700, 64), (500, 9000, 256), (200, 767, 256)
    ):  # fmt: skip
        call = simple_call(2, 3, seqlen_q, seqlen_k, 64, dtype=query_dtype)
        for shape in ((2, 3, seqlen_q), (1, 3, seqlen_q), (2, 1, 1), (1, 1, 1)):
            mask = block_pattern((*shape, seqlen_k), dtype, seqlen_k, block=block, device="cuda")
            mask = in_rows_of_16_bytes(mask)
            plan = forward.plan(call.query, call.key, call.value, torch.empty_like(call.query), False, False, 0.1, mask)
            lists = plan._lists.make(mask, index, driver.current_stream(index)).tolist()
            tile, params = plan.specialisation.tile, plan._lists.params
            for batch in range(shape[0]):
                for head in range(shape[1]):
                    for number, wanted in enumerate(
                        expected_lists(mask[batch, head].cpu(), tile.block_m, tile.block_n)
                    ):
                        first = batch * params.list_stride_batch + head * params.list_stride_head
                        first += number * params.list_stride_tile
                        assert lists[first : first + len(wanted)] == wanted, (shape, batch, head, number)


# --------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("lengths", [(333, 500), (512, 512), (200, 1031)])
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_patterns(check_cuda, head_dims, lengths):
    for number, name in enumerate(PATTERNS):
        for kind in KINDS:
            head_dim, head_dim_v = head_dims
            mask = float_mask(pattern(name, *lengths), kind, BFLOAT, number)
            check_cuda(simple_call(2, 2, *lengths, head_dim, head_dim_v=head_dim_v, seed=number, attn_mask=mask,
                                   note=f"{name} {kind}"))  # fmt: skip


@pytest.mark.parametrize("dtypes", [(HALF, HALF), (BFLOAT, SINGLE), (HALF, SINGLE)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_dtypes(check_cuda, head_dim, dtypes):
    dtype, mask_dtype = dtypes
    for number, name in enumerate(PATTERNS):
        for kind in KINDS[:4]:
            mask = float_mask(pattern(name, 333, 397), kind, mask_dtype, number)
            check_cuda(simple_call(1, 2, 333, 397, head_dim, dtype=dtype, seed=number, attn_mask=mask, note=kind))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(check_cuda, kind, head_dim):
    """The backward is Triton's: the logsumexp must mean to it what its own forward's does."""
    for name in ("causal", "documents", "random", "nothing", "dead rows"):
        for length, needs_mask in ((256, False), (500, True)):
            mask = float_mask(pattern(name, length, length), kind, BFLOAT)
            check_cuda(simple_call(2, 4, length, head_dim=head_dim, kv_heads=2, attn_mask=mask, mask_grad=needs_mask),
                       grad=True)  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths_around_tiles(check_cuda, head_dim):
    for seqlen_q in (1, 2, 63, 65, 127, 129, 193, 257):
        for seqlen_k in (2, 7, 8, 63, 64, 65, 127, 129, 192, 257):
            for kind in ("bias", "lowest"):
                mask = float_mask(pattern("causal", seqlen_q, seqlen_k), kind, BFLOAT, seqlen_k)
                check_cuda(simple_call(1, 2, seqlen_q, seqlen_k, head_dim, attn_mask=mask, seed=seqlen_k))


@pytest.mark.parametrize("dtype", [HALF, BFLOAT, SINGLE], ids=str)
@pytest.mark.parametrize("rows", [1, 200])
def test_zeros_up_to_the_last_key(check_cuda, rows, dtype):
    """The last tile adds nothing, but lacks less than 16 bytes of keys: what is past the end is hidden all the same."""
    query_dtype = BFLOAT if dtype == SINGLE else dtype
    for head_dim in (64, 128):
        for seqlen_k in (61, 63, 127, 190, 255):
            mask = in_rows_of_16_bytes(torch.zeros(1, 1, rows, seqlen_k, device="cuda", dtype=dtype))
            check_cuda(simple_call(1, 2, 200, seqlen_k, head_dim, dtype=query_dtype, attn_mask=mask, scale=0.01))


OWN = [(b, h, q) for b in (True, False) for h in (True, False) for q in (True, False)]


@pytest.mark.parametrize("shape", OWN, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (32, 8), (6, 1)])
def test_broadcast_masks_and_grouped_queries(check_cuda, heads, kv_heads, shape):
    """Which of batch, head and query the mask has of its own; broadcast by size and by expand."""
    for dtype in (BFLOAT, SINGLE):
        for lengths in ((200, 304), (256, 333)):
            sizes = [size if own else 1 for size, own in zip((3, heads, lengths[0]), shape)]
            mask = block_pattern((*sizes, lengths[1]), dtype, sum(sizes), block=32, device="cuda")
            mask = in_rows_of_16_bytes(mask)
            check_cuda(simple_call(3, heads, *lengths, 128, kv_heads=kv_heads, attn_mask=mask))
            expanded = mask.expand(3, heads, *lengths)
            check_cuda(simple_call(3, heads, *lengths, 128, kv_heads=kv_heads, attn_mask=expanded))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["causal", "random"])
@pytest.mark.parametrize("descending", [False, True])
def test_maximum_that_moves_through_the_keys(check_cuda, descending, name, head_dim):
    """Every rescaling of the output counts: the scores, and then the mask, grow or shrink along the keys."""
    call = simple_call(1, 2, 608, head_dim=head_dim, attn_mask=float_mask(pattern(name, 608, 608), "bias", BFLOAT))
    growth = torch.linspace(6.0, 30.0, 608, device="cuda")
    growth = growth.flip(0) if descending else growth
    check_cuda(dataclasses.replace(call, key=(call.key.float() * growth[:, None]).to(BFLOAT)))
    for factor in (1.0, 50.0, -400.0):
        steep = call.attn_mask + (growth * factor).to(BFLOAT)
        check_cuda(dataclasses.replace(call, attn_mask=steep))
        check_cuda(dataclasses.replace(call, attn_mask=(growth * factor).to(BFLOAT)[None, None, None]))


@pytest.mark.parametrize("dtype", [BFLOAT, SINGLE])
def test_numbers_near_the_lowest(check_cuda, dtype):
    """Natural units: times log2(e) they would be -inf."""
    lowest = torch.finfo(dtype).min
    values = torch.tensor([lowest, lowest * 0.99, lowest / 2, -1e30, -3e5, -1e4, 0.0, 3.0], device="cuda").to(dtype)
    generator = torch.Generator("cuda").manual_seed(3)
    for count in range(1, len(values) + 1):
        chosen = torch.randint(count, (1, 1, 300, 456), generator=generator, device="cuda")
        for mask in (values[chosen], values[chosen[:, :, :1]]):
            check_cuda(simple_call(1, 2, 300, 456, 64, attn_mask=mask), grad=True)


def head_dims_with_a_float_mask(rng: random.Random) -> tuple[int, int]:
    return (rng.choice([64, 64, 128, 128, 256]),) * 2


def random_masked_call(seed: int) -> Call:
    """Any lengths, GQA, layouts, broadcasts and patterns of blocks that the Hopper kernel takes."""
    rng = random.Random(seed)
    # A mask with one column is Triton's.
    lengths = {"special": 0.4, "shortest": 2, "shortest_k": 2}
    drawn = draw(rng, seed, head_dims_with_a_float_mask, dtypes=(BFLOAT, BFLOAT, HALF), **lengths)
    shape, (query, *_) = drawn.mask_shape(rng), drawn.tensors
    mask_dtype = rng.choice((query.dtype, query.dtype, SINGLE)) if query.size(3) <= 192 else query.dtype
    mask = block_pattern(shape, mask_dtype, seed, block=rng.choice([1, 16, 64, 64, 128, 256]), device="cuda")
    note = f"random masked call {seed} ({', '.join(drawn.layouts)})"
    return drawn.call(rng, [None, None, 0.5, 1.0, 0.01], note, attn_mask=in_rows_of_16_bytes(mask))


@pytest.mark.parametrize("first", range(0, RANDOM_CALLS, CHUNK))
def test_random_calls(check_cuda, first):
    for seed in range(first, min(first + CHUNK, RANDOM_CALLS)):
        check_cuda(random_masked_call(seed), grad=seed % 4 == 0)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_logsumexp(plugin, hopper_ran, note, head_dim):
    for name in ("causal", "random", "dead rows", "nothing"):
        for kind in ("-inf", "lowest", "bias"):
            lengths = 333, 336
            mask = float_mask(pattern(name, *lengths), kind, BFLOAT)
            call = simple_call(2, 4, *lengths, head_dim, kv_heads=2, attn_mask=mask)
            arguments = call.query, call.key, call.value, call.attn_mask
            with hopper_ran():
                out, logsumexp = plugin.attention(*arguments, enable_gqa=True, return_lse=True)
            note(check({"out": out}, expect(call), None, call.describe()))
            note(check_logsumexp(logsumexp, call, call.describe()))
            with hopper_ran():  # another kernel, without the logsumexp: the same output, bit by bit
                assert torch.equal(F.scaled_dot_product_attention(*arguments, enable_gqa=True), out)


# ------------------------------------------------------------------------------------ what is not seen and not written


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kind", ["-inf", "bias"])
def test_nan_in_keys_that_the_mask_hides_does_not_leak(hopper_ran, note, head_dim, kind):
    """In mixed tiles: columns that nobody sees beside others."""
    for length in (320, 333):
        seen = pattern("random", length, length)
        seen[..., 5::7] = False
        call = simple_call(1, 2, length, head_dim=head_dim, attn_mask=float_mask(seen, kind, BFLOAT))
        key = call.key.clone()
        key[:, :, 5::14] = torch.nan
        key[:, :, 12::14] = torch.inf
        with hopper_ran():
            out = dataclasses.replace(call, key=key).run()
        note(check({"out": out}, expect(call), None, "NaN in hidden keys"))


def test_nan_in_query_or_mask_makes_its_row_nan_and_no_other(hopper_ran):
    call = simple_call(1, 2, 300, 304, head_dim=64, attn_mask=float_mask(pattern("causal", 300, 304), "bias", BFLOAT))
    query, mask = call.query.clone(), call.attn_mask.clone()
    query[:, :, 77] = torch.nan
    mask[:, :, 78, 3] = torch.nan
    with hopper_ran():
        clean, out = call.run(), dataclasses.replace(call, query=query, attn_mask=mask).run()
    assert out[:, :, 77:79].isnan().all()
    rest = torch.tensor([row for row in range(300) if row not in (77, 78)], device="cuda")
    assert out[:, :, rest].isfinite().all()
    assert (out[:, :, rest] - clean[:, :, rest]).abs().max() < 0.05


@pytest.mark.parametrize("kind", ["-inf", "lowest"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_that_nobody_sees_are_not_visited(hopper_ran, head_dim, kind):
    seen = pattern("documents", 1024, 1024)
    seen[..., 256:384] = False
    seen[..., 0] = True  # every row has a key
    call = simple_call(1, 2, 1024, head_dim=head_dim, attn_mask=float_mask(seen, kind, BFLOAT))
    with hopper_ran():
        clean = call.run()
        call.key[:, :, 256:384] = call.value[:, :, 256:384] = torch.nan
        assert torch.equal(call.run(), clean)


@pytest.mark.parametrize("name", ["causal", "random"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_results_repeat_bit_by_bit_under_load(hopper_ran, head_dim, name):
    """The check for races that racecheck does not see: copies into a stage that something still reads."""
    mask = float_mask(pattern(name, 1000, 1336), "bias", BFLOAT)
    call = simple_call(4, 16, 1000, 1336, head_dim, attn_mask=mask)
    other = torch.randn(4096, 4096, device="cuda", dtype=BFLOAT)
    stream = torch.cuda.Stream()
    with hopper_ran():
        first = call.run()
        torch.cuda.synchronize()
        for turn in range(40):
            if turn % 3 == 0:
                with torch.cuda.stream(stream):
                    other @ other
            assert torch.equal(call.run(), first), turn
    torch.cuda.synchronize()


def test_a_captured_graph_lists_the_mask_of_each_replay(hopper_ran, note):
    call = simple_call(2, 4, 512, head_dim=128, attn_mask=float_mask(pattern("causal", 512, 512), "lowest", BFLOAT))
    with hopper_ran():
        call.run()
    graph = torch.cuda.CUDAGraph()
    with hopper_ran(), torch.cuda.graph(graph):
        out = call.run()
    for name, kind in (("window", "-inf"), ("nothing", "lowest"), ("random", "bias"), ("causal", "lowest")):
        call.attn_mask.copy_(float_mask(pattern(name, 512, 512), kind, BFLOAT))
        out.fill_(torch.nan)
        graph.replay()
        note(check({"out": out}, expect(call), None, f"replay with {name}"))


@pytest.mark.parametrize("change", ["one byte on", "odd rows", "one column", "transposed"])
def test_masks_that_the_copy_engine_cannot_walk_run_on_triton(check_call, change):
    from torch_flashbackend import ops

    mask = torch.randn(1, 1, 200, 304, device="cuda", dtype=BFLOAT)
    if change == "one byte on":
        room = torch.empty(mask.numel() + 1, device="cuda", dtype=BFLOAT)[1:].view(mask.shape)
        mask = room.copy_(mask)
    elif change == "odd rows":
        mask = torch.randn(1, 1, 200, 307, device="cuda", dtype=BFLOAT)[..., :304]
    elif change == "one column":
        mask = mask[..., :1]
    else:
        mask = mask.mT.contiguous().mT
    call = simple_call(1, 2, 200, 304, 64)
    ops.reset_launch_counts()
    with torch.no_grad():
        out = torch.ops.flashbackend.attention(
            call.query, call.key, call.value, mask, None, 0.0, False, 0.125, "query", "cuda"
        )  # fmt: skip
    assert "flash_forward" not in ops.launch_counts()
    check({"out": out}, expect(dataclasses.replace(call, attn_mask=mask)), None, change)
