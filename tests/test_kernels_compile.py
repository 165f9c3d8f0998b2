"""Every Triton kernel compiled ahead of time for every kind of GPU, with none in the machine, and the table of tiles.

FLASHBACKEND_ALL_CASES=1 compiles every row of the table and more combinations of calls and GPUs; `make test` a part.
A warm Triton cache (TRITON_CACHE_DIR, ~/.triton) makes this a matter of seconds.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget

from torch_flashbackend.kernels.triton import attention, stored_plan, tiles

from sampling import cover

TARGETS = {f"sm_{capability}": GPUTarget("cuda", capability, 32) for capability in (80, 86, 89, 90, 100, 120)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)
HEAD_DIMS = (64, 128, 256, 512)
KINDS = ("full", "causal", "masked")
TENSOR_CORES = re.compile(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync|v_mfma")


def family_of(target: GPUTarget) -> str:
    return tiles.family(target.backend, target.arch)


def compiled(
    target: GPUTarget, kernel: str, *, dtype=torch.bfloat16, head_dim=64, head_dim_v=None, mask=None, pad=0, **options
):
    """One kernel for a call of two heads and 256 queries and keys. mask: dtype; pad: elements after each row."""

    def tensor(columns: int) -> Tensor:
        return torch.empty(1, 2, 256, columns + pad, dtype=dtype)[..., :columns]

    attn_mask = None if mask is None else torch.empty(1, 2, 256, 256, dtype=mask)
    name = f"attention_{kernel}"
    kernels = attention.compile_for(
        target, tensor(head_dim), tensor(head_dim), tensor(head_dim_v or head_dim), attn_mask, only=name,
        backward=kernel != "forward", mask_gradient=kernel == "backward_mask", **options,
    )  # fmt: skip
    assert list(kernels) == [name]
    return kernels[name]


def assembly(kernel: Any) -> str:
    return kernel.asm.get("ptx") or kernel.asm["amdgcn"]


def check(kernel: Any, target: GPUTarget) -> None:
    assert kernel.metadata.shared <= tiles.SHARED_MEMORY[family_of(target)]
    assert getattr(kernel.metadata, "tmem_size", 0) <= 512  # columns of sm_100's tensor memory
    # The launcher for CUDA passes none: a kernel that asks for it would be KernelUnavailable.
    assert target.backend != "cuda" or kernel.metadata.global_scratch_size == 0


# ---------------------------------------------------------------------------------------------------- rows of the table


def every_row() -> list[Any]:
    """(target, kernel, bytes, head_dim): each row of a family, and each target with every kernel, head_dim and size."""
    found = []
    for itemsize in (2, 4):
        for number, head_dim in enumerate(HEAD_DIMS):
            for position, kernel in enumerate(tiles.KERNELS):
                turn = number + position
                names = ["sm_80", "sm_90", "gfx942", ("sm_86", "sm_89", "sm_120")[turn % 3]]
                if turn % 4 == 0:
                    names.append("sm_100")
                found += [(name, kernel, itemsize, head_dim) for name in names]
    return found


def some_rows() -> list[Any]:
    """Each tile of a family, at the largest head_dim that uses it; each target with every kernel."""

    def tile_of(row):
        family = family_of(TARGETS[row[0]])
        return family, tiles.choose(row[1], family, *row[2:], "masked")

    return cover(
        sorted(every_row(), key=lambda row: -row[3]),
        tile_of,
        lambda row: row[:2],
        lambda row: (family_of(TARGETS[row[0]]), *row[2:]),
    )


def dtypes_of(itemsize: int, number: int) -> torch.dtype:
    return torch.float32 if itemsize == 4 else (torch.bfloat16, torch.float16)[number % 2]


@pytest.mark.parametrize(("name", "kernel", "itemsize", "head_dim"), some_rows())
def test_tiles_fit_shared_memory(name, kernel, itemsize, head_dim):
    """With a float32 mask, which is the call that needs the most of it."""
    dtype = dtypes_of(itemsize, tiles.KERNELS.index(kernel))
    result = compiled(TARGETS[name], kernel, dtype=dtype, head_dim=head_dim, mask=torch.float32)
    check(result, TARGETS[name])
    # Tensor cores cut off what they add up, so that float32 sums over more than 256 terms are none of theirs.
    exact = itemsize == 4 and head_dim > 256 and name != "gfx942"
    assert bool(TENSOR_CORES.search(assembly(result))) != exact


def rows_of_other_kinds() -> list[Any]:
    """(family, kernel, kind, bytes, head_dim): rows for calls without a mask where those with one have their own."""
    found = []
    for name, sizes in tiles._TABLE.items():
        for itemsize, rows in sizes.items():
            for kernel in tiles.KERNELS:
                kinds = [kind for kind in ("full", "causal") if f"{kernel} {kind}" in rows]
                kinds += ["full"] if f"{kernel} masked" in rows else []
                for kind in dict.fromkeys(kinds):
                    used = rows.get(f"{kernel} {kind}", rows[kernel])
                    found += [(name, kernel, kind, itemsize, head_dim) for head_dim in used]
    # Each kind of row, at its largest head_dim.
    return cover(sorted(found, key=lambda row: -row[4]), lambda row: row[:4])


@pytest.mark.parametrize(("name", "kernel", "kind", "itemsize", "head_dim"), rows_of_other_kinds())
def test_tiles_of_calls_without_a_mask_fit_shared_memory(name, kernel, kind, itemsize, head_dim):
    dtype = dtypes_of(itemsize, 0)
    result = compiled(TARGETS[name], kernel, dtype=dtype, head_dim=head_dim, is_causal=kind == "causal", dropout_p=0.1)
    check(result, TARGETS[name])
    assert TENSOR_CORES.search(assembly(result))


@pytest.mark.parametrize("name", ["sm_90", "sm_100"])
@pytest.mark.parametrize("kernel", ["forward", "wide_key", "wide_value"])
def test_halves_of_wide_heads_fit_shared_memory(monkeypatch, name, kernel):
    """Above a head_dim of 256 two programs share the columns of a tile, where no mask and no dropout is."""
    monkeypatch.setattr(stored_plan, "SHARE_OF_QUERY", 0)
    result = compiled(TARGETS[name], kernel, head_dim=512, is_causal=kernel == "forward")
    check(result, TARGETS[name])
    assert TENSOR_CORES.search(assembly(result))


@pytest.mark.parametrize("name", ["sm_90", "sm_100"])
@pytest.mark.parametrize("kernel", ["stored_scores", "stored_query", "stored_key"])
@pytest.mark.parametrize("heads", [2, 64])
def test_products_of_stored_probabilities_fit_shared_memory(name, kernel, heads):
    """Above a head_dim of 256, where the probabilities of a few heads may be in memory; larger tiles of many heads."""
    query = torch.empty(1, heads, 600, 512, dtype=torch.bfloat16, device="meta")
    found = attention.compile_for(TARGETS[name], query, query, query, is_causal=heads == 2, only=f"attention_{kernel}")
    result = found[f"attention_{kernel}"]
    check(result, TARGETS[name])
    assert TENSOR_CORES.search(assembly(result))
    if name == "sm_90":
        columns = 128 if heads == 2 or kernel == "stored_scores" else 256
        assert f"wgmma.mma_async.sync.aligned.m64n{columns}k16" in assembly(result)


# --------------------------------------------------------------------------------------------------- kinds of arguments

VARIANTS = {
    "dense": {},
    "causal": {"is_causal": True, "dtype": torch.float16},
    "bool mask": {"mask": torch.bool},
    "mask of the query's dtype": {"mask": torch.float16, "dtype": torch.float16},
    "dropout": {"dropout_p": 0.1, "is_causal": True},
    "dropout, mask": {"dropout_p": 0.1, "mask": torch.float32},
    "unaligned": {"pad": 1},
    "odd head_dim": {"head_dim": 33, "dtype": torch.float16},
    "value of another head_dim": {"head_dim": 64, "head_dim_v": 128},
    "TF32": {"dtype": torch.float32, "allow_tf32": True},
}
WITHOUT_MASK = [name for name, options in VARIANTS.items() if "mask" not in options]


def some_variants() -> list[Any]:
    """Every variant with every family of GPUs and with every kernel, every target with every kernel."""
    return cover(
        itertools.product(TARGETS, tiles.KERNELS, VARIANTS),
        lambda case: (family_of(TARGETS[case[0]]), case[2]),
        lambda case: case[1:],
        lambda case: case[:2],
    )


@pytest.mark.parametrize(("name", "kernel", "variant"), some_variants())
def test_every_kind_of_call_compiles(name, kernel, variant):
    options = dict(VARIANTS[variant])
    if kernel == "backward_mask":  # it has no causal calls, and always a float mask
        options.pop("is_causal", None)
        if not getattr(options.get("mask"), "is_floating_point", False):
            options["mask"] = options.get("dtype", torch.bfloat16)
    result = compiled(TARGETS[name], kernel, **options)
    check(result, TARGETS[name])
    assert TENSOR_CORES.search(assembly(result))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kernel", ["forward", "backward_query", "backward_key_value"])
@pytest.mark.parametrize("causal", [False, True])
def test_hopper_streams_through_tensor_maps_and_multiplies_asynchronously(head_dim, kernel, causal):
    ptx = assembly(compiled(TARGETS["sm_90"], kernel, head_dim=head_dim, is_causal=causal))
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert not re.search(r"cp\.async\.c[ag]\.", ptx), "something comes by ordinary asynchronous copies"


@pytest.mark.parametrize("name", ["sm_80", "gfx942"])
def test_others_load_by_pointers(name):
    kernel = compiled(TARGETS[name], "forward", head_dim=128)
    assert "bulk.tensor" not in assembly(kernel)


LISTING = ("classify_mask", "list_key_tiles", "list_query_tiles")


@pytest.fixture
def _listed(monkeypatch):
    monkeypatch.setattr(attention, "worth_listing", lambda *_: True)


@pytest.mark.usefixtures("_listed")
@pytest.mark.parametrize("name", TARGETS)
def test_kernels_that_list_mask_tiles_compile(name):
    """For masks in aligned and in unaligned memory, with one row and with many."""
    query = torch.empty(1, 2, 256, 64, dtype=torch.bfloat16)
    masks = [torch.empty(1, 1, 256, 256, dtype=dtype) for dtype in (torch.bool, torch.bfloat16, torch.float32)]
    masks += [torch.empty(1, 1, 256, 255, dtype=torch.bool), torch.empty(1, 1, 1, 256, dtype=torch.bfloat16)]
    for mask in masks if name == "sm_90" else masks[:2]:
        key = query[:, :, : mask.size(3)]
        for kernel in LISTING:
            (result,) = attention.compile_for(TARGETS[name], query, key, key, mask, only=kernel).values()
            assert result.metadata.shared <= tiles.SHARED_MEMORY[family_of(TARGETS[name])]
            assert TARGETS[name].backend != "cuda" or result.metadata.global_scratch_size == 0
    if TARGETS[name].backend == "cuda":  # the bool mask, read as words: vectors of 16 bytes
        (result,) = attention.compile_for(TARGETS[name], query, query, query, masks[0], only=LISTING[0]).values()
        assert "ld.global.v4" in assembly(result)


@pytest.mark.usefixtures("_listed")
@pytest.mark.parametrize(
    ("name", "kernel", "mask"),
    [
        (name, kernel, (torch.bool, torch.bfloat16, torch.float32)[(number + position) % 3])
        for number, name in enumerate(("sm_90", "sm_80", "sm_86", "sm_100", "gfx942"))
        for position, kernel in enumerate(("forward", "backward_query", "backward_key_value"))
    ],
)
def test_attention_by_lists_compiles(name, kernel, mask):
    result = compiled(TARGETS[name], kernel, mask=mask, head_dim=128)
    check(result, TARGETS[name])
    assert TENSOR_CORES.search(assembly(result))


@pytest.mark.usefixtures("_listed")
@pytest.mark.parametrize("kind", ["no mask", "lists"])
def test_sums_over_long_sequences_compile(kind):
    """The gradients of key and value in parts, by lists of queries and without."""
    query = torch.empty(1, 1, 2**18 + 128, 128, dtype=torch.bfloat16)
    mask = None if kind == "no mask" else torch.empty(1, 1, query.size(2), 128, dtype=torch.bool)
    name = "attention_backward_key_value"
    (result,) = attention.compile_for(TARGETS["sm_90"], query, query[:, :, :128], query[:, :, :128], mask,
                                      only=name).values()  # fmt: skip
    check(result, TARGETS["sm_90"])
    assert TENSOR_CORES.search(assembly(result))


@pytest.mark.usefixtures("_listed")
@pytest.mark.parametrize("kernel", ["forward", "backward_query"])
@pytest.mark.parametrize("mask", [None, torch.bool], ids=["no mask", "lists"])
def test_sums_over_many_keys_compile(kernel, mask):
    """In parts, through tensor maps, as for any other length."""
    query = torch.empty(1, 1, 128, 128, dtype=torch.bfloat16)
    key = torch.empty(1, 1, 2**18 + 128, 128, dtype=torch.bfloat16)
    attn_mask = None if mask is None else torch.empty(1, 1, 128, key.size(2), dtype=mask)
    name = f"attention_{kernel}"
    (result,) = attention.compile_for(TARGETS["sm_90"], query, key, key, attn_mask, only=name).values()
    check(result, TARGETS["sm_90"])
    ptx = assembly(result)
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx


@pytest.mark.parametrize("kernel", ["forward", "backward_query", "backward_key_value", "backward_mask"])
def test_hopper_streams_masks_and_statistics_through_tensor_maps(kernel):
    mask = torch.bool if kernel == "forward" else torch.bfloat16
    ptx = assembly(compiled(TARGETS["sm_90"], kernel, mask=mask, head_dim=128))
    assert "cp.async.bulk.tensor" in ptx
    assert not re.search(r"cp\.async\.c[ag]\.", ptx), "something comes by ordinary asynchronous copies"


def test_all_kernels_of_a_call_compile_together():
    query = torch.empty(1, 2, 128, 64, dtype=torch.bfloat16)
    mask = torch.empty(1, 1, 128, 128)
    kernels = attention.compile_for(TARGETS["sm_90"], query, query, query, mask, mask_gradient=True)
    assert list(kernels) == [f"attention_{name}" for name in tiles.KERNELS]
    forward = attention.compile_for(TARGETS["sm_90"], query, query, query, logsumexp=False, backward=False)
    assert list(forward) == ["attention_forward"]


# ----------------------------------------------------------------------------------------------------- the table itself


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def all_tiles() -> list[Any]:
    return [
        pytest.param(tile, id=f"{name}-{itemsize}-{kernel}-{head_dim}")
        for name, sizes in tiles._TABLE.items()
        for itemsize, rows in sizes.items()
        for kernel, row in rows.items()
        for head_dim, tile in row.items()
    ]


@pytest.mark.parametrize("tile", all_tiles())
def test_tiles_are_valid(tile):
    assert is_power_of_two(tile.block_m) and is_power_of_two(tile.block_n)
    assert tile.num_warps in (1, 2, 4, 8) and 1 <= tile.num_stages <= 5
    # Tensor maps have boxes of at most 256 rows; a product needs 16 of what it sums over.
    assert min(tile.block_m, tile.block_n) >= 8 and max(tile.block_m, tile.block_n) <= 256


def test_a_product_sums_over_at_least_16():
    for sizes in tiles._TABLE.values():
        for rows in sizes.values():
            for kernel, row in rows.items():
                for tile in row.values():
                    if kernel.startswith(("forward", "backward_query")):
                        assert tile.block_n >= 16
                    if kernel.startswith("backward_key_value"):
                        assert tile.block_m >= 16


# Kernels of the largest head_dim alone, where a family has them.
WIDE = ("wide_forward", "wide_key", "wide_value", "stored_scores", "stored_query", "stored_key")


def test_every_family_has_every_row():
    assert tiles._TABLE.keys() == tiles.SHARED_MEMORY.keys()
    for sizes in tiles._TABLE.values():
        assert sizes.keys() == {2, 4}
        for rows in sizes.values():
            for kernel in tiles.KERNELS:
                assert tuple(rows[kernel]) == HEAD_DIMS
            for name, row in rows.items():
                kernel, _, kind = name.partition(" ")
                assert kernel in (*tiles.KERNELS, *WIDE) and kind in ("", *KINDS, "split")
                assert list(row) == sorted(row) and set(row) <= set(HEAD_DIMS)


def test_every_row_can_be_chosen():
    chosen = set()
    for name, sizes in tiles._TABLE.items():
        for itemsize in sizes:
            for kernel in tiles.KERNELS:
                for padded in (16, 32, *HEAD_DIMS):
                    chosen |= {id(tiles.choose(kernel, name, itemsize, padded, kind)) for kind in (*KINDS, "split")}
            for kernel in WIDE:
                if kernel in sizes[itemsize]:
                    chosen.add(id(tiles.choose(kernel, name, itemsize, max(HEAD_DIMS))))
    assert {id(parameter.values[0]) for parameter in all_tiles()} <= chosen


@pytest.mark.parametrize("kernel", tiles.KERNELS)
def test_a_head_dim_that_is_too_large_is_refused(kernel):
    with pytest.raises(ValueError, match="1024"):
        tiles.choose(kernel, "sm_90", 2, 1024)


def test_families():
    expected = {"sm_80": (80, 87), "sm_86": (86, 89, 120, 121), "sm_90": (90, 100, 103)}
    for name, capabilities in expected.items():
        assert {tiles.family("cuda", capability) for capability in capabilities} == {name}
    assert tiles.family("hip", "gfx942") == "gfx942"


# ------------------------------------------------------------------------------------------------------------- decoding


def decoding(target: GPUTarget, *, batch=1, heads=32, kv_heads=8, queries=1, keys=8192, head_dim=128, head_dim_v=None,
             dtype=torch.bfloat16, mask=None, page=0, pad=0, **options):  # fmt: skip
    """The decoding kernel for one call; mask: shape and dtype; page: keys in a page, 0 without pages."""
    from torch_flashbackend.kernels.triton import kv_cache

    def tensor(outer: int, rows: int, columns: int, first: int = batch) -> Tensor:
        return torch.empty(first, outer, rows, columns + pad, dtype=dtype, device="meta")[..., :columns]

    shape = (kv_heads, page or keys)
    key = tensor(*shape, head_dim, keys // page if page else batch)
    value = tensor(*shape, head_dim_v or head_dim, key.size(0))
    if page:
        options["block_table"] = torch.empty(batch, keys // page, dtype=torch.int32, device="meta")
    query, out = (tensor(heads, queries, size) for size in (head_dim, head_dim_v or head_dim))
    attn_mask = None if mask is None else torch.empty(mask[0], dtype=mask[1], device="meta")
    causal = options.pop("causal", False)
    plan = kv_cache.plan_of(query, key, value, out, None, 0.1, kv_cache.DecodeOptions(**options), attn_mask, causal,
                            target=target)  # fmt: skip
    return [launch.compile(target) for launch in plan.launches]


def integers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


DECODING = {
    "plain": {},
    "one key head": {"kv_heads": 1, "queries": 2},
    "unsplit": {"batch": 256},
    "64 columns": {"head_dim": 64, "dtype": torch.float16},
    "256 columns": {"head_dim": 256},
    "80 columns": {"head_dim": 80, "head_dim_v": 64},
    "unaligned": {"pad": 1, "keys": 1000},
    "float32": {"dtype": torch.float32},
    "bool mask": {"mask": ((1, 1, 1, 8192), torch.bool)},
    "float mask": {"mask": ((1, 32, 4, 8192), torch.bfloat16), "queries": 4},
    "float32 mask, many rows": {
        "mask": ((1, 32, 16, 8192), torch.float32),
        "queries": 16,
        "kv_heads": 4,
        "head_dim": 80,
    },
    "float32, many rows": {
        "mask": ((1, 1, 16, 8192), torch.bool),
        "queries": 16,
        "kv_heads": 4,
        "head_dim": 256,
        "dtype": torch.float32,
    },
    "lengths": {
        "seqused_k": integers(1),
        "leftpad_k": integers(1),
        "bottom_right": True,
        "causal": True,
        "num_splits": 2,
    },
    "large pages": {"page": 256, "seqused_k": integers(1)},
    "small pages": {"page": 16, "seqused_k": integers(1), "bottom_right": True, "window_left": 100},
    "natural units": {"softcap": 30.0, "alibi_slopes": torch.empty(32, device="meta")},
    "sinks": {"num_splits": 2, "sinks": torch.empty(32, device="meta")},
}


MERGED_BY_LAST = {"lengths", "sinks"}  # the other split ones: by a launch of its own


def some_decoding() -> list[Any]:
    """Every kind for sm_90, each other target with some, with every head_dim and size and what needs most memory."""
    found = [("sm_90", name) for name in DECODING]
    for number, target in enumerate(name for name in TARGETS if name != "sm_90"):
        found += [(target, name) for index, name in enumerate(DECODING) if (index + number) % 8 == 0 or
                  name == ("256 columns", "float32")[number % 2] or "many rows" in name]  # fmt: skip
    return found


@pytest.mark.parametrize(("name", "kind"), some_decoding())
def test_decoding_compiles(name, kind):
    result, *merge = decoding(TARGETS[name], **DECODING[kind])
    check(result, TARGETS[name])
    text = assembly(result)
    assert TENSOR_CORES.search(text)
    assert len(merge) == (kind not in MERGED_BY_LAST | {"unsplit"})
    if merge:
        check(merge[0], TARGETS[name])
    if TARGETS[name].backend == "cuda":
        # What one program leaves the others see: released and acquired by the same atomic, or by the end of a launch.
        assert ("atom.global.gpu.acq_rel" in text) == (kind in MERGED_BY_LAST)
        dependent = 90 <= TARGETS[name].arch < 110
        assert all(("griddepcontrol.wait" in assembly(item)) == dependent for item in (result, *merge))
        if kind != "unaligned":  # keys and values come by asynchronous copies of 16 bytes
            assert "cp.async.cg.shared.global" in text
            assert re.search(r"local_depot|\.local ", text) is None


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("family_name", tiles.SHARED_MEMORY)
def test_tiles_of_decoding_are_valid(family_name, itemsize):
    for head_dim, rows in itertools.product((16, 64, 128, 256), (1, 16, 17, 33, 64, 512)):
        for tile in tiles.decode_tiles(family_name, itemsize, head_dim, rows):
            assert is_power_of_two(tile.block_n) and tile.block_n >= 16 and tile.programs >= 1
            assert is_power_of_two(tile.num_warps) and tile.num_stages >= 1
            assert tile.block_m in (16, 32, 64) and tile.block_m < 2 * max(rows, 16)
            assert 2 * tile.num_stages * tile.block_n * head_dim * itemsize <= tiles.SHARED_MEMORY[family_name]
    with pytest.raises(ValueError):
        tiles.decode_tiles(family_name, itemsize, 512, 16)
