"""The kernels that list the tiles of a mask, and the attention kernels that go by the lists, in Triton's interpreter.

The lists are compared with what plain PyTorch says of the mask's values; the attention with float64, every mask being
listed, however small.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import types

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter needs TRITON_INTERPRET=1 in the environment", allow_module_level=True)


from torch_flashbackend.kernels.triton import attention, launch, mask_plan
from torch_flashbackend.kernels.triton.tiles import Tile

from common import block_pattern, check, expect, gradient_for, simple_call
from test_kernels import check_that_parts_lose_less, run, run_and_check

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
HALF, SINGLE, BFLOAT = torch.float16, torch.float32, torch.bfloat16
INF, NAN = math.inf, math.nan
KINDS = pytest.mark.parametrize("kind", ["bool", "-inf", "finfo.min"])
TILE = mask_plan.TILE


@pytest.fixture(autouse=True)
def _listing(monkeypatch):
    """Every mask with more than one column is listed, by tiles of 64 x 64 unless a test wants others."""
    monkeypatch.setattr(attention, "worth_listing", lambda query, keys, mask, causal: mask[3] > 1)
    monkeypatch.setattr(mask_plan, "_CHUNK", 8)  # several to a list, and the interpreter takes its time for each entry
    use_tiles(monkeypatch, 64, 64)
    yield
    attention._plans.clear()


def use_tiles(monkeypatch, block_m: int, block_n: int) -> None:
    monkeypatch.setattr(attention, "choose", lambda *_: Tile(block_m, block_n, 4, 2))
    attention._plans.clear()


def as_mask(seen: Tensor, kind: str, dtype: torch.dtype = SINGLE) -> Tensor:
    """A mask of a kind that hides what `seen` has False."""
    if kind == "bool":
        return seen.contiguous()
    hidden = -INF if kind == "-inf" else torch.finfo(dtype).min
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, hidden)


def sample(mask: Tensor, seqlen_q: int, seqlen_k: int, *, batch=1, heads=1, dtype=HALF, **options):
    return simple_call(
        batch, heads, seqlen_q, seqlen_k, 16, dtype=dtype, device="cpu", attn_mask=mask,
        mask_grad=mask.is_floating_point(), **options,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- lists


def seen_blocks(mask: Tensor, block_m: int, block_n: int, seqlen_q: int) -> tuple[Tensor, Tensor]:
    """(occupied, full) for each block, bool [batches * heads, blocks_q, blocks_k], by looking at every element."""
    mask = mask.flatten(0, 1)
    per_key = mask.size(1) == 1
    height = 1 if per_key else TILE
    rows = torch.arange(math.ceil(mask.size(1) / height) * height).clamp(max=mask.size(1) - 1)
    columns = math.ceil(mask.size(2) / TILE) * TILE
    hidden = False if mask.dtype == torch.bool else -INF
    padded = torch.full((mask.size(0), len(rows), columns), hidden, dtype=mask.dtype)
    padded[:, :, : mask.size(2)] = mask[:, rows]
    tiles = padded.unflatten(2, (-1, TILE)).unflatten(1, (-1, height)).transpose(2, 3)  # strips, strips, rows, keys
    if mask.dtype == torch.bool:
        empty, full = ~tiles.any((3, 4)), tiles.all(4).all(3)
    else:
        lowest = (tiles == torch.finfo(mask.dtype).min).all(4).all(3)
        # A row is settled by a value that is certain to be larger: positive, or above -2.
        larger = ((tiles > -2) | ~tiles.signbit()).any(4).any(2)
        empty = (tiles == -INF).all(4).all(3) | (lowest & larger.all(2)[:, :, None])
        full = (tiles == 0).all(4).all(3)
    q_of = torch.arange(1 if per_key else math.ceil(seqlen_q / block_m))
    k_of = torch.arange(math.ceil(mask.size(2) / block_n))

    def strips(blocks: Tensor, block: int, count: int, tile: int) -> list[Tensor]:
        size = max(1, block // tile)
        return [(blocks * block // tile + part).clamp(max=count - 1) for part in range(size)]

    occupied = torch.zeros(mask.size(0), len(q_of), len(k_of), dtype=torch.bool)
    whole = torch.ones_like(occupied)
    for rows_part in strips(q_of, 1 if per_key else block_m, empty.size(1), height):
        for keys_part in strips(k_of, block_n, empty.size(2), TILE):
            occupied |= ~empty[:, rows_part][:, :, keys_part]
            whole &= full[:, rows_part][:, :, keys_part]
    # A block of keys that reaches past the last tile is not whole.
    whole &= (k_of * block_n + block_n <= empty.size(2) * TILE)[None, None]
    return occupied, whole & occupied


def lists_of(buffer: Tensor, strides, shape, count: int) -> list[list[list[int]]]:
    """[full, mixed] of each list; shape (batches, heads, lists); the lists hold up to `count` blocks."""
    batch_stride, head_stride, block_stride, offset = strides
    found = []
    for batch, head, block in itertools.product(*map(range, shape)):
        first = offset + batch * batch_stride + head * head_stride + block * block_stride
        entries = buffer[first : first + 2 + count].tolist()
        full, mixed = entries[0], entries[1]
        found.append([entries[2 : 2 + full], entries[2 + count - mixed :][::-1]])  # ascending, both of them
    return found


def check_lists(mask: Tensor, seqlen_q: int, query_tile: Tile, key_tile: Tile) -> tuple[Tensor, list]:
    """Makes the lists of a mask and compares them; returns the buffer and the lists of the blocks of queries."""
    heads, batch = mask.size(1), mask.size(0)
    seqlen_k = mask.size(3)
    query = torch.empty(batch, heads, seqlen_q, 16, dtype=HALF)
    key = torch.empty(batch, heads, seqlen_k, 16, dtype=HALF)
    call = attention._Call(query, key, key, mask, 0.0, False, 1.0, (query, key), False)
    plan = mask_plan.MaskTiles(call, mask, query_tile, key_tile)
    buffer = plan.make(mask)
    sizes = [size if stride else 1 for size, stride in zip(mask.shape, call.mask_strides)]
    stored = mask[: sizes[0], : sizes[1]]
    lists = []
    for of_queries, tile in enumerate((query_tile, key_tile)):
        occupied, full = seen_blocks(stored, tile.block_m, tile.block_n, seqlen_q)
        if of_queries:
            occupied, full = occupied.mT, full.mT
        expected = [
            [row_full.nonzero()[:, 0].tolist(), (row & ~row_full).nonzero()[:, 0].tolist()]
            for row, row_full in zip(occupied.flatten(0, 1), full.flatten(0, 1))
        ]
        found = lists_of(buffer, plan.strides(bool(of_queries)), (*sizes[:2], occupied.size(1)), occupied.size(2))
        assert found == expected
        lists.append(found)
    return buffer, lists[0]


BLOCKS = [(64, 64), (128, 64), (64, 128), (128, 128), (32, 16), (16, 32), (256, 32)]


@pytest.mark.parametrize("dtype", [torch.bool, HALF, BFLOAT, SINGLE], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(256, 512), (150, 200), (64, 1100), (1, 130), (321, 65)])
def test_lists_are_what_the_mask_says(dtype, seqlen_q, seqlen_k):
    for seed in range(2):
        query_blocks, key_blocks = BLOCKS[(seqlen_q + 3 * seed) % 6], BLOCKS[(seqlen_k + seed) % 6]
        mask = block_pattern((2, 1, seqlen_q, seqlen_k), dtype, seed)
        check_lists(mask, seqlen_q, Tile(*query_blocks, 4, 1), Tile(*key_blocks, 4, 1))


@pytest.mark.parametrize("dtype", [torch.bool, HALF, SINGLE], ids=str)
def test_lists_of_a_mask_with_one_row(dtype):
    mask = block_pattern((2, 2, 1, 300), dtype, 1)
    check_lists(mask, 100, Tile(64, 64, 4, 1), Tile(64, 64, 4, 1))
    check_lists(mask, 100, Tile(16, 128, 4, 1), Tile(32, 32, 4, 1))


@pytest.mark.parametrize("dtype", [torch.bool, HALF, SINGLE], ids=str)
@pytest.mark.parametrize("layout", ["transposed", "strided", "unaligned", "odd rows", "expanded"])
def test_lists_of_a_mask_in_any_memory_layout(dtype, layout):
    if layout == "transposed":
        mask = block_pattern((2, 1, 256, 192), dtype, 2).mT
    elif layout == "strided":
        mask = block_pattern((2, 1, 192, 512), dtype, 2)[..., ::2]
    elif layout == "unaligned":
        mask = block_pattern((1, 1, 1, 2 * 192 * 256 + 1), dtype, 2).flatten()[1:].view(2, 1, 192, 256)
    elif layout == "odd rows":
        mask = block_pattern((2, 1, 192, 261), dtype, 2)[..., :256]
    else:
        mask = block_pattern((1, 1, 192, 256), dtype, 2).expand(2, 3, 192, 256)
    buffer, _ = check_lists(mask, mask.size(2), Tile(64, 64, 4, 1), Tile(64, 64, 4, 1))
    assert layout != "expanded" or buffer.numel() < 100  # one mask's worth, not six


@pytest.mark.parametrize("dtype", [HALF, BFLOAT, SINGLE], ids=str)
def test_lowest_tiles_are_skipped_only_where_every_row_has_a_larger_value(dtype):
    lowest = torch.finfo(dtype).min
    tiles = Tile(64, 64, 4, 1), Tile(64, 64, 4, 1)

    def lists(mask: Tensor) -> list:
        return check_lists(mask, 128, *tiles)[1]

    mask = torch.full((1, 1, 128, 192), lowest, dtype=dtype)
    mask[..., :64] = 0.0
    assert lists(mask) == [[[0], []], [[0], []]]
    mask[..., 77, :64] = lowest  # a row without anything larger: the second strip is visited whole
    assert lists(mask) == [[[0], []], [[], [0, 1, 2]]]
    mask[..., 77, :64] = -INF
    assert lists(mask) == [[[0], []], [[], [0, 1, 2]]]
    mask[..., 77, 130] = -1.5
    assert lists(mask) == [[[0], []], [[], [0, 2]]]
    mask[..., 77, 130] = lowest / 2  # not certain to be larger: visited
    assert lists(mask) == [[[0], []], [[], [0, 1, 2]]]
    assert lists(torch.full_like(mask, lowest)) == [[[], [0, 1, 2]]] * 2
    assert lists(torch.full_like(mask, -INF)) == [[[], []]] * 2
    assert lists(torch.full_like(mask, NAN)) == [[[], [0, 1, 2]]] * 2


def test_lists_stay_inside_of_their_buffer(monkeypatch):
    """And every entry that is read was written: the rest of the buffer holds a number that is no block."""
    made = []

    def empty(size, *, dtype, device):
        storage = torch.full((size[0] + 64,), -12345, dtype=dtype, device=device)
        made.append(storage)
        return storage[32:-32]

    for dtype in (torch.bool, HALF):
        mask = block_pattern((2, 2, 150, 200), dtype, 5)
        with monkeypatch.context() as patch:
            patch.setattr(mask_plan, "torch", types.SimpleNamespace(**vars(torch) | {"empty": lambda size, **options: (
                torch.empty(size, **options) if size == 0 else empty(size, **options))}))  # fmt: skip
            check_lists(mask, 150, Tile(64, 64, 4, 1), Tile(32, 64, 4, 1))
    assert len(made) == 2
    for storage in made:
        assert (storage[:32] == -12345).all() and (storage[-32:] == -12345).all()


@pytest.mark.parametrize("causal", [False, True])
def test_which_masks_are_listed(causal):
    def listed(query, keys, mask):
        return mask_plan.worth_listing(query, keys, mask, causal)

    assert listed((4, 16, 4096, 128), 4096, (4, 1, 4096, 4096)) is not causal
    assert listed((4, 16, 4096, 128), 4096, (4, 1, 1, 4096)) is not causal
    assert listed((1, 16, 16384, 128), 16384, (1, 1, 16384, 16384)) is not causal
    assert listed((4, 16, 4096, 128), 4096, (1, 16, 4096, 4096)) is not causal
    assert not listed((4, 16, 4096, 128), 4096, (4, 1, 4096, 1))  # nothing to skip but rows
    assert not listed((1, 2, 256, 64), 256, (1, 1, 256, 256))  # too short to win back the kernels
    assert not listed((4, 16, 4096, 64), 4096, (4, 16, 4096, 4096))  # reading costs as much as computing
    assert not listed((64, 16, 8192, 128), 64, (64, 1, 8192, 64))  # a single tile of keys


# ------------------------------------------------------------------------------------------------------------ attention


def pattern(name: str, seqlen_q: int, seqlen_k: int) -> Tensor:
    """bool [1, 1, seqlen_q, seqlen_k]."""
    rows, keys = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None, :]
    seen = {
        "causal": keys <= rows,
        "window": (rows - keys).abs() <= 30,
        "documents": rows // 70 == keys // 70,
        "prefix": (keys <= rows) | (keys < 90),
        "padding": (keys < seqlen_k * 3 // 5).expand(seqlen_q, -1),
        "left padding": (keys >= seqlen_k // 3).expand(seqlen_q, -1),
        "columns": (keys % 128 < 64).expand(seqlen_q, -1),
        "dead rows": ((rows < 64) | (rows % 3 > 0)) & (keys < 130),
        "nothing": torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool),
        "everything": torch.ones(seqlen_q, seqlen_k, dtype=torch.bool),
    }[name]
    return seen[None, None]


PATTERNS = [
    "causal", "window", "documents", "prefix", "padding", "left padding", "columns", "dead rows", "nothing",
    "everything",
]  # fmt: skip


@pytest.mark.parametrize("float_mask", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name, float_mask):
    number = PATTERNS.index(name)
    kind = "bool" if not float_mask else ("-inf", "finfo.min")[number % 2]
    seqlen_q, seqlen_k = [(128, 192), (100, 150), (150, 129)][number % 3]
    dtype = (HALF, SINGLE)[number % 2]
    mask = as_mask(pattern(name, seqlen_q, seqlen_k), kind, dtype if number % 4 < 2 else SINGLE)
    results = run_and_check(sample(mask, seqlen_q, seqlen_k, dtype=dtype))
    if kind != "finfo.min":
        seen = pattern(name, seqlen_q, seqlen_k)[0, 0]
        assert results["out"][0, 0, ~seen.any(1)].count_nonzero() == 0
        assert results["query"][0, 0, ~seen.any(1)].count_nonzero() == 0
        assert results["key"][0, 0, ~seen.any(0)].count_nonzero() == 0
        assert results["value"][0, 0, ~seen.any(0)].count_nonzero() == 0


@pytest.mark.parametrize(("block_m", "block_n"), [(128, 32), (32, 128), (64, 32)])
def test_blocks_of_any_size(monkeypatch, block_m, block_n):
    use_tiles(monkeypatch, block_m, block_n)
    run_and_check(sample(as_mask(pattern("documents", 100, 130), "bool"), 100, 130))
    run_and_check(sample(as_mask(pattern("dead rows", 100, 130), "finfo.min"), 100, 130, dtype=SINGLE))


@pytest.mark.parametrize("which", list(itertools.product([False, True], repeat=3)), ids=str)
def test_masks_broadcast_over_batches_heads_and_queries(which):
    shape = [1 if one else size for one, size in zip(which, (2, 2, 70))]
    for number, kind in enumerate(("bool", "finfo.min")):
        mask = as_mask(block_pattern((*shape, 130), torch.bool, sum(which) + number), kind, HALF)
        run_and_check(sample(mask, 70, 130, batch=2, heads=2))


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("per_key", [False, True])
def test_grouped_queries_with_a_mask_for_each_head(per_key, per_head, expanded):
    mask = block_pattern((1, 4 if per_head else 1, 1 if per_key else 70, 140), torch.bool, 3)
    if expanded:
        mask = mask.expand(2, 4, 70, 140)
    run_and_check(sample(mask, 70, 140, batch=2, heads=4, kv_heads=2))


@pytest.mark.parametrize("seed", range(6))
def test_random_patterns(monkeypatch, seed):
    """Blocks of every class side by side, biases among them, in shapes that tiles do not divide."""
    generator = torch.Generator().manual_seed(seed)
    seqlen_q, seqlen_k = (int(n) for n in torch.randint(50, 160, (2,), generator=generator))
    use_tiles(monkeypatch, *[(64, 64), (128, 32), (32, 64), (64, 128)][seed % 4])
    dtype = (HALF, SINGLE)[seed % 2]
    mask = block_pattern((1, 1, seqlen_q, seqlen_k), (torch.bool, dtype, SINGLE)[seed % 3], seed, block=32)
    run_and_check(sample(mask, seqlen_q, seqlen_k, dtype=dtype, scale=(None, -0.5, 0.0, 2.0)[seed % 4]))


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_row_of_finfo_min_beside_rows_that_have_more(dtype):
    """Its query tile visits every tile, and it alone gives the mean of all values."""
    seen = pattern("causal", 192, 192).clone()
    seen[..., 100, :] = False
    mask = as_mask(seen, "finfo.min")
    call = sample(mask, 192, 192, dtype=dtype)
    out = run_and_check(call)["out"]
    torch.testing.assert_close(out[:, :, 100].double(), call.value.double().mean(-2), atol=1e-3, rtol=0)


def test_dropout_with_lists():
    """Positions, not visits, decide what is dropped: the result is that of the same mask without lists."""
    mask = as_mask(pattern("window", 150, 150), "bool")
    call = sample(mask, 150, 150, dtype=SINGLE)
    grad_out = gradient_for(call)
    listed = run(call, grad_out, dropout_p=0.3).results
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "worth_listing", lambda *_: False)
        attention._plans.clear()
        plain = run(call, grad_out, dropout_p=0.3).results
    for name, tensor in listed.items():
        torch.testing.assert_close(tensor, plain[name], atol=2e-6, rtol=2e-5)


# ----------------------------------------------------------------------------------------------------------- long sums


@pytest.mark.parametrize("kind", ["bool", "finfo.min", "padding", "grouped"])
def test_long_sums_in_parts(monkeypatch, kind):
    """Lists cut after every second block: inside of the full ones, of the mixed ones, past the end."""
    monkeypatch.setattr(attention, "SUM_ROWS", 32)
    use_tiles(monkeypatch, 16, 32)
    seqlen_q, heads, kv_heads = (120, 2, 1) if kind == "grouped" else (210, 1, 1)
    if kind == "padding":
        mask = pattern("padding", 1, 140)
    else:
        seen = block_pattern((1, heads, seqlen_q, 140), torch.bool, 7, block=32)
        mask = as_mask(seen, "finfo.min" if kind == "finfo.min" else "bool", HALF)
    run_and_check(sample(mask, seqlen_q, 140, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("kind", ["bool", "finfo.min", "padding", "grouped"])
def test_long_sums_over_keys_in_parts(monkeypatch, kind):
    """As above, for lists of keys: parts of full blocks, of both kinds, of mixed ones, and rows that see nothing."""
    monkeypatch.setattr(attention, "SUM_ROWS", 32)
    use_tiles(monkeypatch, 32, 16)
    heads, kv_heads = (2, 1) if kind == "grouped" else (1, 1)
    if kind == "padding":
        mask = pattern("padding", 1, 210)
    else:
        seen = block_pattern((1, heads, 70, 210), torch.bool, 11, block=32)
        mask = as_mask(seen, "finfo.min" if kind == "finfo.min" else "bool", HALF)
    run_and_check(sample(mask, 70, 210, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("kind", ["half of it mixed", "padding"])
def test_long_sums_in_parts_lose_less_where_sums_are_cut_off(monkeypatch, kind):
    use_tiles(monkeypatch, 16, 64)
    mask = pattern("everything", 1 if kind == "padding" else 512, 64).clone()
    if kind == "half of it mixed":
        mask[:, :, ::128, 5] = False
    check_that_parts_lose_less(monkeypatch, sample(mask, 512, 64), 32)


# ------------------------------------------------------------------------------------------------------ what is visited


@KINDS
def test_tiles_that_nobody_sees_are_not_visited(kind):
    """NaN in key and value of a tile without a reader reaches nothing, although 0 * NaN in a visited tile would."""
    seen = pattern("causal", 192, 192).clone()
    seen[..., 64:128] = False
    call = sample(as_mask(seen, kind), 192, 192)
    clean = run(call, gradient_for(call)).results
    poisoned = dataclasses.replace(call, key=call.key.clone(), value=call.value.clone())
    poisoned.key[:, :, 64:128] = NAN
    poisoned.value[:, :, 64:128] = NAN
    results = run(poisoned, gradient_for(call)).results
    for name in ("out", "query", "key", "value"):
        assert torch.equal(results[name], clean[name]), name


@pytest.mark.parametrize("kind", ["bool", "-inf"])
def test_nan_in_key_at_a_hidden_position_of_a_visited_tile_does_not_leak(kind):
    seen = pattern("everything", 100, 100).clone()
    seen[..., 40] = False
    call = sample(as_mask(seen, kind), 100, 100)
    clean = run(call).results["out"]
    call.key[:, :, 40] = NAN
    assert torch.equal(run(call).results["out"], clean)


def test_nan_in_a_mask_makes_its_row_nan():
    mask = as_mask(pattern("causal", 150, 150), "-inf")
    mask[..., 100, 3] = NAN
    out = run(sample(mask, 150, 150)).results["out"]
    assert out[0, 0, 100].isnan().all() and out.isnan().sum() == out.size(-1)


def test_every_run_gives_the_same_bits():
    call = sample(block_pattern((1, 1, 150, 200), HALF, 4), 150, 200, batch=2)
    first, second = (run(call, gradient_for(call)).results for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_a_recent_plan_lists_the_mask_of_each_call(monkeypatch):
    """And it serves masks of its own sizes, strides, type and alignment alone."""
    looked_up = []
    look_up = attention._plans.look_up
    monkeypatch.setattr(
        attention._plans, "look_up", lambda *given: looked_up.append(1) or look_up(*given), raising=False
    )

    def misses(mask: Tensor, scale: float | None = None) -> int:
        looked_up.clear()
        call = sample(mask, 96, 128, batch=2, scale=scale)
        grad_out = gradient_for(call)
        check(run(call, grad_out).results, expect(call, grad_out), None, call.describe())
        return len(looked_up)

    masks = [pattern(name, 96, 128).contiguous() for name in ("causal", "window", "nothing", "documents")]
    assert [misses(mask) for mask in masks] == [2, 0, 0, 0]
    assert misses(masks[0], 0.3) == 2
    assert misses(masks[1].mT.contiguous().mT) == 2
    assert misses(masks[1].expand(2, 1, 96, 128)) == 2
    assert misses(masks[1].repeat(2, 1, 1, 1)) == 2
    assert misses(masks[1][:, :, :1]) == 2
    floats = [as_mask(masks[number], "-inf", HALF) for number in (1, 3)]
    assert [misses(mask) for mask in floats] == [2, 0]
    assert misses(floats[0].float()) == 2
    unaligned = masks[3].new_empty(96 * 128 + 1)[1:].view(1, 1, 96, 128).copy_(masks[3])
    assert misses(unaligned) == 2
    assert misses(masks[3]) == 0


def test_kernels_of_a_call():
    """A forward makes one kind of list, a backward two; without listing there is none."""

    def launched(*arguments) -> dict[str, int]:
        before = dict(launch.launch_counts)
        run(*arguments)
        return {name: count - before.get(name, 0) for name, count in launch.launch_counts.items()}

    call = sample(as_mask(pattern("causal", 100, 100), "bool"), 100, 100)
    counts = launched(call)
    assert (counts["classify_mask"], counts["list_key_tiles"], counts.get("list_query_tiles", 0)) == (1, 1, 0)
    counts = launched(call, gradient_for(call))
    assert (counts["classify_mask"], counts["list_key_tiles"], counts["list_query_tiles"]) == (2, 2, 1)
    counts = launched(dataclasses.replace(call, attn_mask=None))
    assert (counts["classify_mask"], counts["attention_forward"]) == (0, 1)
