"""The CUDA backward kernels, compiled for sm_90a: spills, serialised products, the pool of registers, shared memory.

Each head dimension gets one of the combinations of mask and dtype in each mode, in turn (those whose tiles depend on
the mask get two), and all tiles that are chosen for it; FLASHBACKEND_ALL_SPECIALISATIONS=1 compiles all.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess

import pytest
import torch
from test_cuda_kernels_compile import ALL, SHARED_MEMORY, disassembler, problems

from torch_flashbackend import nvrtc
from torch_flashbackend.kernels.cuda import backward, tiles

pytestmark = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"no compiler: {nvrtc.unavailable()}")

HEAD_DIMS = [*((size, size) for size in range(16, 257, 16)), (192, 128), (64, 128), (128, 64), (240, 16)]
SHORT, LONG = 256, 1 << 20  # queries of a key head
ROWS = (SHORT, 2048, 4096, LONG)  # with these, the table gives all of its tiles


def specialisations():
    kinds = list(itertools.product((True, False), repeat=2))  # causal, bfloat16 or float16
    found = []
    for (number, dims), deterministic in itertools.product(enumerate(HEAD_DIMS), (False, True)):
        turn = (number + deterministic) % 4
        own_tiles = not deterministic and dims in ((64, 64), (128, 128), (256, 256))  # for causal calls and others
        turns = kinds if ALL else [kinds[turn], *[kinds[(turn + 2) % 4]] * own_tiles]
        for is_causal, is_bf16 in turns:
            dtype = torch.bfloat16 if is_bf16 else torch.float16
            for query_rows, can_fuse in itertools.product(ROWS, (False, True)):
                found.append(backward.specialise(*dims, dtype, is_causal, deterministic, query_rows, can_fuse=can_fuse))
        if max(dims) <= backward.MAX_EXTRAS_HEAD_DIM:
            for dtype in (torch.bfloat16, torch.float16) if ALL else [(torch.bfloat16, torch.float16)[number % 2]]:
                ordered = not deterministic or max(dims) <= backward.MAX_ORDERED_MASK_HEAD_DIM
                for query_rows in (SHORT, LONG) if ordered else ():
                    found.append(backward.specialise(*dims, dtype, False, deterministic, query_rows, is_masked=True))
                for is_causal in (False, True) if ALL else [number // 2 % 2 == 0]:
                    found.append(backward.specialise(*dims, dtype, is_causal, deterministic, LONG, has_dropout=True))
                if not deterministic:
                    found.append(backward.specialise(*dims, dtype, False, False, LONG, True, True))
                    for per_key in (False, True) if ALL or dims in ((64, 64), (128, 128)) else [number % 4 < 2]:
                        found.append(
                            backward.specialise(
                                *dims, dtype, False, False, LONG, True, is_float_mask=True, mask_per_key=per_key
                            )
                        )
    for number, size in enumerate((64, 72, 128)):
        spec = backward.specialise(size, size, torch.bfloat16, bool(number % 2), False, LONG, is_packed=True)
        found += [spec._replace(is_causal=is_causal) for is_causal in (False, True)]
    return list(dict.fromkeys(found))


def name_of(spec):
    kind = ("masked" if spec.is_masked else "causal" if spec.is_causal else "full", "bf16" if spec.is_bf16 else "f16")
    flags = (
        ["floats"] * spec.is_float_mask
        + ["per_key"] * spec.mask_per_key
        + ["dropout"] * spec.has_dropout
        + ["deterministic"] * spec.deterministic
        + [flag.name for flag in dataclasses.fields(spec.tile) if getattr(spec.tile, flag.name) is True]
        + ["packed"] * spec.is_packed
    )
    return "-".join([f"{spec.head_dim}-{spec.head_dim_v}", *kind, *flags])


@pytest.mark.parametrize("spec", specialisations(), ids=name_of)
def test_specialisation_has_no_spills_and_no_serialised_products(spec, tmp_path):
    binary = nvrtc.compile(spec.source)
    assert problems(binary.log) == []
    assert spec.shared_bytes <= SHARED_MEMORY
    if disassembler() is None:
        return
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(binary.cubin)
    text = subprocess.run([disassembler(), str(cubin)], capture_output=True, text=True, check=True).stdout
    assert "HGMMA" in text and "UTMALDG" in text
    changes = re.findall(r"USETMAXREG\.(DEALLOC|TRY_ALLOC)\S* (?:UP\d+, )?(0x[0-9a-f]+)", text)
    released = [int(count, 16) for kind, count in changes if kind == "DEALLOC"]
    claimed = [int(count, 16) for kind, count in changes if kind == "TRY_ALLOC"]
    # Consumers share one instruction; with roles each of the three has its own.
    held = released + claimed * (1 if spec.is_wide else spec.tile.num_warpgroups)
    assert len(held) == spec.num_threads // 128, changes
    pool = 65536 // spec.num_threads // 8 * 8 * len(held)
    assert pool - 8 * len(held) < sum(held) <= pool, f"{held} of {pool}"


EVERY_ROWS = [rows for power in range(4, 18) for rows in (2**power - 1, 2**power, 3 * 2 ** (power - 1))]


def test_the_sample_has_every_combination_of_options():
    chosen = specialisations()
    assert len({(s.is_causal, s.is_bf16, s.deterministic) for s in chosen}) == 8
    assert len({(s.is_masked, s.is_causal, s.has_dropout, s.deterministic) for s in chosen}) == 4 + 2 + 4 + 1
    assert len({(s.mask_per_key, s.is_bf16) for s in chosen if s.is_float_mask}) == 4
    plain = [s for s in chosen if not (s.is_masked or s.has_dropout)]
    assert {s.tile for s in plain} == {
        choose(*dims, is_causal, query_rows, deterministic)
        for dims in HEAD_DIMS
        for choose in (tiles.choose_backward, tiles.choose_backward_usual)
        for is_causal, query_rows, deterministic in itertools.product((False, True), EVERY_ROWS, (False, True))
    }


@pytest.mark.parametrize("head_dim", [(8, 128), (64, 72), (56, 64)])
def test_head_dimensions_that_are_padded(head_dim):
    """Both warpgroups need columns of the query's gradient, or rows where the tile has 128."""
    spec = backward.specialise(*head_dim, torch.float16, False, False, LONG)
    assert spec.tile.block_m == 128 or spec.head_dim > 64
    assert spec.head_dim >= head_dim[0] and spec.head_dim_v >= head_dim[1]
