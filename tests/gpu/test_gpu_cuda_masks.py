"""Bool masks on the Hopper forward kernel, forced: values for every kind of mask, and what must not be read or written.

FLASHBACKEND_RANDOM_CALLS sets how many random calls are drawn (default 400 here).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random

import pytest
import torch
import torch.nn.functional as F
from hopper_calls import DTYPES, HOPPER_ONLY, checker, draw, pattern, usual_head_dims
from torch import Tensor

from common import (
    Call,
    block_pattern,
    check,
    check_logsumexp,
    expect,
    gradient_for,
    results_of,
    simple_call,
    some_rows,
)

pytestmark = HOPPER_ONLY
RANDOM_CALLS = int(os.environ.get("FLASHBACKEND_RANDOM_CALLS", "400"))
CHUNK = 20
HEAD_DIMS = [(64, 64), (80, 80), (128, 128), (192, 192), (192, 128), (256, 256)]


@pytest.fixture
def hopper_ran(plugin):
    """A context manager: the block must launch the Hopper kernel, on the forced backend, and Triton's forward not."""
    from torch_flashbackend import ops

    @contextlib.contextmanager
    def forced():
        ops.reset_launch_counts()
        with plugin.sdpa_backend("cuda"):
            yield
        counts = ops.launch_counts()
        assert counts.get("flash_forward") and counts.get("flash_mask_lists"), counts
        assert "attention_forward" not in counts and "attention_decode" not in counts, counts

    return forced


@pytest.fixture
def check_cuda(check_call):
    return checker(check_call, ("efficient", "math"))


PATTERNS = (
    "causal", "window", "documents", "prefix", "padding", "dead columns", "random", "sparse", "diagonal", "all",
    "checkerboard", "nothing", "one row", "one column", "upper", "dead rows",
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- lists


def expected_lists(seen: Tensor, block_m: int, block_n: int) -> list[list[int]]:
    """[full, visited, full tiles ..., mixed tiles from the last ...] of each query tile of seen [rows, keys]."""
    found = []
    for rows in seen.split(block_m):
        padded = F.pad(rows, (0, -rows.size(1) % block_n))
        tiles = padded.unflatten(1, (-1, block_n))
        some, every = tiles.any(2).any(0), tiles.all(2).all(0)
        full, mixed = every.nonzero()[:, 0].tolist(), (some & ~every).nonzero()[:, 0].tolist()
        listed = [*full, *mixed[::-1]] or [0]
        found.append([len(full), len(listed), *listed])
    return found


@pytest.mark.parametrize("layout", ["contiguous", "padded rows", "odd rows", "one byte on", "transposed"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lists_are_what_the_mask_says(head_dim, layout):
    from torch_flashbackend import driver
    from torch_flashbackend.kernels.cuda import forward

    index = torch.cuda.current_device()
    for seqlen_q, seqlen_k, block in ((300, 1000, 64), (129, 1056, 128), (64, 17, 4), (1, 700, 64), (500, 9000, 256)):
        call = simple_call(2, 3, seqlen_q, seqlen_k, head_dim)
        for shape in ((2, 3, seqlen_q), (1, 3, seqlen_q), (2, 1, 1), (1, 1, 1)):
            seen = block_pattern((*shape, seqlen_k), torch.bool, seqlen_k, block=block, device="cuda")
            mask = mask_in_layout(seen, layout)
            out = torch.empty_like(call.query)
            plan = forward.plan(call.query, call.key, call.value, out, False, False, 0.1, mask)
            lists = plan._lists.make(mask, index, driver.current_stream(index))
            tile, params = plan.specialisation.tile, plan._lists.params
            lists, seen = lists.tolist(), seen.cpu()
            for batch in range(shape[0]):
                for head in range(shape[1]):
                    expected = expected_lists(seen[batch, head], tile.block_m, tile.block_n)
                    for number, wanted in enumerate(expected):
                        first = batch * params.list_stride_batch + head * params.list_stride_head
                        first += number * params.list_stride_tile
                        assert lists[first : first + len(wanted)] == wanted, (shape, batch, head, number)


# --------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("lengths", [(333, 500), (512, 512), (1000, 1008), (1024, 129)])
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_patterns(check_cuda, head_dims, lengths):
    """Of all lengths but 500 and 129 a mask's row can be read 16 keys at a time."""
    for number, name in enumerate(PATTERNS):
        head_dim, head_dim_v = head_dims
        call = simple_call(
            2, 2, *lengths, head_dim, head_dim_v=head_dim_v, dtype=DTYPES[number % 2], seed=number, note=name,
            attn_mask=pattern(name, *lengths),
        )  # fmt: skip
        check_cuda(call)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["causal", "documents", "random", "sparse", "dead rows", "nothing"])
def test_gradients(check_cuda, name, head_dim):
    """The backward is Triton's: the logsumexp must mean to it what its own forward's does."""
    for length in (256, 500):
        check_cuda(simple_call(2, 4, length, head_dim=head_dim, kv_heads=2, attn_mask=pattern(name, length, length)),
                   grad=True)  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen_q", [1, 2, 63, 64, 65, 127, 128, 129, 191, 193, 255, 257])
def test_lengths_around_tiles(check_cuda, seqlen_q, head_dim):
    for seqlen_k in (1, 2, 15, 16, 17, 63, 64, 65, 80, 127, 128, 129, 192, 255, 256, 257, 513):
        for name in ("causal", "dead rows"):
            mask = pattern(name, seqlen_q, seqlen_k, seed=seqlen_k)
            check_cuda(simple_call(1, 2, seqlen_q, seqlen_k, head_dim, attn_mask=mask, seed=seqlen_k))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("shape", [(1, 1, 4096, 4096), (2, 4, 2048, 2048), (1, 2, 1000, 5000), (1, 2, 5000, 1000)])
def test_long_sequences(check_cuda, shape, head_dim):
    for name in ("causal", "padding", "window", "checkerboard", "random"):
        check_cuda(simple_call(*shape, head_dim, attn_mask=pattern(name, *shape[2:]), note=name))


MASK_SHAPES = [
    (True, True, True, True), (True, False, True, True), (False, True, True, True), (True, False, False, True),
    (False, False, True, True), (False, False, False, True), (True, True, True, False), (True, True, False, False),
    (False, True, False, True),
]  # fmt: skip


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (32, 8), (6, 1)])
def test_broadcast_masks_and_grouped_queries(check_cuda, heads, kv_heads, shape):
    """Which dimensions the mask has of its own: batch, head, query, key."""
    for lengths in ((200, 304), (256, 333)):
        sizes = [size if own else 1 for size, own in zip((3, heads, *lengths), shape)]
        mask = torch.rand(sizes, generator=torch.Generator("cuda").manual_seed(sum(sizes)), device="cuda") < 0.6
        check_cuda(simple_call(3, heads, *lengths, 128, kv_heads=kv_heads, attn_mask=mask))


@pytest.mark.parametrize("rank", [2, 3])
def test_masks_of_lower_rank(check_cuda, rank):
    mask = pattern("causal", 300, 300)[0, 0].expand(*(2,) * (rank - 2), -1, -1)
    check_cuda(simple_call(2, 2, 300, head_dim=64, attn_mask=mask))


def mask_in_layout(seen: Tensor, layout: str) -> Tensor:
    """The same mask [B, H, Sq, Sk] elsewhere in memory."""
    batch, heads, seqlen_q, seqlen_k = seen.shape

    def room(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.bool, device=seen.device)  # what is not the mask's is True

    if layout == "contiguous":
        return seen.contiguous()
    if layout == "padded rows":  # as the mask of a cache that is longer than the sequence
        view = room(batch, heads, seqlen_q, seqlen_k + 48)[..., :seqlen_k]
    elif layout == "odd rows":
        view = room(batch, heads, seqlen_q, seqlen_k + 3)[..., 2 : seqlen_k + 2]
    elif layout == "one byte on":
        view = room(batch * heads * seqlen_q * seqlen_k + 1)[1:].view(seen.shape)
    elif layout == "transposed":
        view = room(batch, heads, seqlen_k, seqlen_q).transpose(2, 3)
    elif layout == "every other key":
        view = room(batch, heads, seqlen_q, 2 * seqlen_k)[..., ::2]
    elif layout == "heads last":
        view = room(batch, seqlen_q, seqlen_k, heads).permute(0, 3, 1, 2)
    else:
        raise ValueError(layout)
    return view.copy_(seen)


MASK_LAYOUTS = ("contiguous", "padded rows", "odd rows", "one byte on", "transposed", "every other key", "heads last")


@pytest.mark.parametrize("layout", MASK_LAYOUTS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_layouts_of_the_mask(check_cuda, head_dim, layout):
    for lengths in ((200, 304), (256, 190)):
        seen = block_pattern((2, 3, *lengths), torch.bool, 5, block=48, device="cuda")
        check_cuda(simple_call(2, 3, *lengths, head_dim, attn_mask=mask_in_layout(seen, layout)))


@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_expanded_masks(check_cuda, dimension):
    """As models make them, by expand(): with strides of zero."""
    shape = [2, 4, 256, 320]
    small = list(shape)
    small[dimension] = 1
    mask = (torch.rand(small, generator=torch.Generator("cuda").manual_seed(3), device="cuda") < 0.5).expand(shape)
    check_cuda(simple_call(2, 4, 256, 320, 128, attn_mask=mask))


@pytest.mark.parametrize("scale", [1e-3, 0.5, 1.0, 5.0])
def test_scales(check_cuda, scale):
    for name in ("causal", "random", "sparse"):
        check_cuda(simple_call(2, 2, 300, head_dim=64, scale=scale, attn_mask=pattern(name, 300, 300)))


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("name", ["prefix", "random", "checkerboard", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_maximum_that_moves_through_the_keys(check_cuda, descending, name, head_dim):
    """Every rescaling of the output counts: the scores grow from 6 to 30 times the usual, or shrink."""
    call = simple_call(1, 2, 608, head_dim=head_dim, attn_mask=pattern(name, 608, 608))
    growth = torch.linspace(6.0, 30.0, 608, device="cuda")[:, None]
    growth = growth.flip(0) if descending else growth
    check_cuda(dataclasses.replace(call, key=(call.key.float() * growth).to(torch.bfloat16)))


def random_masked_call(seed: int) -> Call:
    """Any lengths, GQA, layouts, broadcasts and patterns of blocks that the Hopper kernel takes."""
    rng = random.Random(seed)
    drawn = draw(rng, seed, usual_head_dims, special=0.4)
    shape = drawn.mask_shape(rng)
    seen = block_pattern(shape, torch.bool, seed, block=rng.choice([1, 16, 64, 64, 128, 256]), device="cuda")
    layout = rng.choice(MASK_LAYOUTS)
    note = f"random masked call {seed} ({', '.join(drawn.layouts)}; mask {layout})"
    return drawn.call(rng, [None, None, 0.5, 1.0, 0.01], note, attn_mask=mask_in_layout(seen, layout))


@pytest.mark.parametrize("first", range(0, RANDOM_CALLS, CHUNK))
def test_random_calls(check_cuda, first):
    for seed in range(first, min(first + CHUNK, RANDOM_CALLS)):
        check_cuda(random_masked_call(seed))


# ------------------------------------------------------------------------------------------------------------ logsumexp


@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("name", ["causal", "random", "dead rows", "nothing", "upper"])
def test_logsumexp(plugin, hopper_ran, note, name, head_dim):
    for lengths in ((64, 300), (300, 64), (333, 336)):
        call = simple_call(2, 4, *lengths, head_dim, kv_heads=2, attn_mask=pattern(name, *lengths))
        arguments = call.query, call.key, call.value, call.attn_mask
        with hopper_ran():
            out, logsumexp = plugin.attention(*arguments, enable_gqa=True, return_lse=True)
        note(check({"out": out}, expect(call), None, call.describe()))
        note(check_logsumexp(logsumexp, call, call.describe()))
        with hopper_ran():  # another kernel, without the logsumexp: the same output, bit by bit
            assert torch.equal(F.scaled_dot_product_attention(*arguments, enable_gqa=True), out)


# ------------------------------------------------------------------------------------ what is not seen and not written


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["dead rows", "upper", "nothing", "one row", "sparse"])
def test_rows_without_a_key_are_zeros_whatever_the_values(hopper_ran, plugin, name, head_dim):
    """Infinities and NaN in value make no difference to them, not even in a tile that other rows see."""
    call = simple_call(1, 2, 300, 320, head_dim, attn_mask=pattern(name, 300, 320))
    dead = ~call.attn_mask.any(-1)[0, 0]
    assert dead.any()
    value = call.value.clone()
    value[..., ::2, :] = torch.nan
    value[..., 1::4, :] = torch.inf
    for tensor in (call.value, value):
        with hopper_ran():
            out, logsumexp = plugin.attention(call.query, call.key, tensor, call.attn_mask, return_lse=True)
        assert not out[:, :, dead].any()
        assert (logsumexp[:, :, dead] == -torch.inf).all() and logsumexp[:, :, ~dead].isfinite().all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_nan_in_keys_that_the_mask_hides_does_not_leak(hopper_ran, note, head_dim):
    """In mixed tiles: columns that nobody sees beside others. What keys hold there makes no difference."""
    for length in (320, 333):
        seen = pattern("random", length, length)
        seen[..., 5::7] = False
        call = simple_call(1, 2, length, head_dim=head_dim, attn_mask=seen)
        key = call.key.clone()
        key[:, :, 5::14] = torch.nan
        key[:, :, 12::14] = torch.inf
        with hopper_ran():
            out, clean = dataclasses.replace(call, key=key).run(), call.run()
        assert torch.equal(out, clean)
        note(check({"out": out}, expect(call), None, "NaN in hidden keys"))


def test_nan_in_query_makes_its_row_nan_and_no_other(hopper_ran, note):
    call = simple_call(1, 2, 300, head_dim=64, attn_mask=pattern("causal", 300, 300))
    query = call.query.clone()
    query[:, :, 77] = torch.nan
    with hopper_ran():
        out = dataclasses.replace(call, query=query).run()
    assert out[:, :, 77].isnan().all()
    rest = torch.tensor([row for row in range(300) if row != 77], device="cuda")
    note(check({"out": out[:, :, rest]}, expect(some_rows(call, rest)), None, "NaN in query"))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_that_nobody_sees_are_not_visited(hopper_ran, head_dim):
    seen = pattern("documents", 1024, 1024)
    seen[..., 256:384] = False
    call = simple_call(1, 2, 1024, head_dim=head_dim, attn_mask=seen)
    with hopper_ran():
        clean = call.run()
        call.key[:, :, 256:384] = call.value[:, :, 256:384] = torch.nan
        assert torch.equal(call.run(), clean)


@pytest.mark.parametrize("head_dim", [24, 64, 128, 200, 256])
@pytest.mark.parametrize("name", ["causal", "nothing", "one row", "dead rows"])
def test_every_element_is_written(hopper_ran, plugin, poison_free_memory, head_dim, name):
    call = simple_call(3, 5, 333, 190, head_dim, attn_mask=pattern(name, 333, 190))
    with hopper_ran():
        clean = call.run()
        poison_free_memory()
        again, logsumexp = plugin.attention(call.query, call.key, call.value, call.attn_mask, return_lse=True)
    assert torch.equal(clean, again)
    assert not logsumexp.isnan().any()


def test_windows_of_larger_tensors(hopper_ran):
    """Neither what lies around the mask nor what lies around the other tensors makes a difference."""
    storage = [torch.full((2, 3, 500, 128), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    windows = [tensor[:, 1:2, 100:333, 32:96] for tensor in storage]
    call = simple_call(2, 1, 233, head_dim=64)
    for window, source in zip(windows, (call.query, call.key, call.value)):
        window.copy_(source)
    for offset in (32, 33):
        seen = pattern("random", 233, 233)
        around = torch.ones(1, 1, 300, 400, dtype=torch.bool, device="cuda")
        mask = around[:, :, 20:253, offset : offset + 233]
        mask.copy_(seen)
        with hopper_ran():
            inside = F.scaled_dot_product_attention(*windows, attn_mask=mask)
            apart = F.scaled_dot_product_attention(call.query, call.key, call.value, attn_mask=seen)
        assert torch.equal(inside, apart)


def test_a_full_mask_gives_what_no_mask_gives(hopper_ran, note):
    call = simple_call(2, 4, 777, 640, 128, attn_mask=torch.ones(777, 640, dtype=torch.bool, device="cuda"))
    with hopper_ran():
        out = call.run()
    note(check({"out": out}, expect(dataclasses.replace(call, attn_mask=None)), None, "full mask"))


def test_more_than_65535_heads_in_all(check_cuda):
    mask = pattern("causal", 24, 24).expand(70_000, -1, -1, -1)
    check_cuda(simple_call(70_000, 1, 24, head_dim=16, attn_mask=mask), kernels=("math",))


@pytest.mark.parametrize("name", ["window", "documents"])
def test_sixteen_thousand_positions(hopper_ran, note, name):
    call = simple_call(1, 2, 16384, head_dim=128, attn_mask=pattern(name, 16384, 16384))
    rows = torch.arange(0, 16384, 131, device="cuda")
    with hopper_ran():
        out = call.run()
    note(check({"out": out[:, :, rows]}, expect(some_rows(call, rows)), None, call.describe()))


# ------------------------------------------------------------------------------------------ repetition, streams, graphs


@pytest.mark.parametrize("name", ["causal", "random", "documents"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_results_repeat_bit_by_bit_under_load(hopper_ran, head_dim, name):
    """The check for races that racecheck does not see: copies into a stage that a product still reads."""
    call = simple_call(4, 16, 1000, 1333, head_dim, attn_mask=pattern(name, 1000, 1333))
    other = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with hopper_ran():
        first = call.run()
        torch.cuda.synchronize()
        for turn in range(60):
            if turn % 3 == 0:
                with torch.cuda.stream(stream):
                    other @ other
            assert torch.equal(call.run(), first), turn
    torch.cuda.synchronize()


def test_streams_at_once(hopper_ran):
    """Launches of one plan on several streams share neither what they count tiles with nor the lists."""
    masks = [pattern(name, 1111, 1111) for name in ("causal", "window", "random")]
    calls = [simple_call(2, 8, 1111, head_dim=64, attn_mask=mask) for mask in masks]
    streams = [torch.cuda.Stream() for _ in range(6)]
    with hopper_ran():
        expected = [call.run() for call in calls]
        torch.cuda.synchronize()
        results = []
        for turn in range(20):
            for index, stream in enumerate(streams):
                number = (turn + index) % len(calls)
                with torch.cuda.stream(stream):
                    results.append((number, calls[number].run()))
        torch.cuda.synchronize()
    assert all(torch.equal(result, expected[number]) for number, result in results)


def test_a_captured_graph_lists_the_mask_of_each_replay(hopper_ran, plugin, note):
    call = simple_call(2, 4, 512, head_dim=128, attn_mask=pattern("causal", 512, 512))
    with hopper_ran():
        call.run()
    graph = torch.cuda.CUDAGraph()
    with hopper_ran(), torch.cuda.graph(graph):
        out = call.run()
    for name in ("window", "nothing", "random", "all", "causal"):
        call.attn_mask.copy_(pattern(name, 512, 512))
        out.fill_(torch.nan)
        graph.replay()
        note(check({"out": out}, expect(call), None, f"replay with {name}"))


def test_compiled_training_step(plugin, note):
    from torch_flashbackend import ops

    call = simple_call(2, 4, 256, head_dim=64, attn_mask=pattern("documents", 256, 256))
    grad_out = gradient_for(call)

    def attend(query, key, value, mask):
        with plugin.sdpa_backend("cuda"):
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    compiled = torch.compile(attend, fullgraph=True)
    ops.reset_launch_counts()
    results = results_of(call, grad_out, lambda *args, **options: compiled(*args, options["attn_mask"]))
    assert ops.launch_counts()["flash_forward"] == 1
    note(check(results, expect(call, grad_out), None, "compiled"))


@pytest.mark.parametrize("name", ["causal", "padding"])
def test_lists_take_little_memory(hopper_ran, name):
    """Less than a hundredth of the mask."""
    mask = pattern(name, 4096, 4096)
    query, key, value = (torch.randn(2, 16, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def peak(mask: Tensor | None) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    with hopper_ran():
        peak(mask)
        assert peak(mask) - peak(None) <= mask.numel() // 100
