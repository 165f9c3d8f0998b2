"""The CUDA backward kernels, compiled for sm_90a: spills, serialised products, the pool of registers, shared memory.

A part is compiled: every tile of every kind of call, every head dimension with and without a fixed order, every
combination of options. FLASHBACKEND_ALL_CASES=1 compiles all.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from test_cuda_kernels_compile import SHARED_MEMORY, problems

from torch_flashbackend import nvrtc
from torch_flashbackend.kernels.cuda import backward, tiles

import machine_code
from sampling import cover

pytestmark = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"no compiler: {nvrtc.unavailable()}")

HEAD_DIMS = [*((size, size) for size in range(16, 257, 16)), (192, 128), (64, 128), (128, 64), (240, 16)]
SHORT, LONG = 256, 1 << 20  # queries of a key head
ROWS = (SHORT, 2048, 4096, LONG)  # with these, the table gives all of its tiles


def every_specialisation():
    kinds = list(itertools.product((True, False), repeat=2))  # causal, bfloat16 or float16
    found = []
    for dims, deterministic in itertools.product(HEAD_DIMS, (False, True)):
        for is_causal, is_bf16 in kinds:
            dtype = torch.bfloat16 if is_bf16 else torch.float16
            for query_rows, can_fuse in itertools.product(ROWS, (False, True)):
                found.append(backward.specialise(*dims, dtype, is_causal, deterministic, query_rows, can_fuse=can_fuse))
        if max(dims) <= backward.MAX_EXTRAS_HEAD_DIM:
            for dtype in (torch.bfloat16, torch.float16):
                for query_rows in (SHORT, LONG):
                    found.append(backward.specialise(*dims, dtype, False, deterministic, query_rows, is_masked=True))
                for is_causal in (False, True):
                    found.append(backward.specialise(*dims, dtype, is_causal, deterministic, LONG, has_dropout=True))
                found.append(backward.specialise(*dims, dtype, False, deterministic, LONG, True, True))
                if not deterministic:
                    for per_key in (False, True):
                        found.append(
                            backward.specialise(
                                *dims, dtype, False, False, LONG, True, is_float_mask=True, mask_per_key=per_key
                            )
                        )
    for number, size in enumerate((64, 72, 128)):
        spec = backward.specialise(size, size, torch.bfloat16, bool(number % 2), False, LONG, is_packed=True)
        found += [spec._replace(is_causal=is_causal) for is_causal in (False, True)]
    return list(dict.fromkeys(found))


def specialisations():
    """The largest head dimension of each tile, since it has the most in registers."""

    def kind_of(spec):
        return spec._replace(head_dim=0, head_dim_v=0, is_causal=False, is_bf16=False, tile=None), spec.is_wide

    return cover(
        sorted(every_specialisation(), key=lambda spec: -spec.head_dim - spec.head_dim_v),
        lambda spec: (spec.head_dim, spec.head_dim_v, spec.deterministic),
        lambda spec: (kind_of(spec), spec.tile),
        lambda spec: (kind_of(spec), spec.is_causal, spec.is_bf16),
    )


def name_of(spec):
    kind = ("masked" if spec.is_masked else "causal" if spec.is_causal else "full", "bf16" if spec.is_bf16 else "f16")
    flags = (
        ["floats"] * spec.is_float_mask
        + ["per_key"] * spec.mask_per_key
        + ["dropout"] * spec.has_dropout
        + ["deterministic"] * spec.deterministic
        + [flag for flag in ("persistent", "unstaged", "fused", "paired", "direct") if getattr(spec.tile, flag)]
        + ["packed"] * spec.is_packed
    )
    return "-".join([f"{spec.head_dim}-{spec.head_dim_v}", *kind, *flags])


@pytest.mark.parametrize("spec", specialisations(), ids=name_of)
def test_specialisation_has_no_spills_and_no_serialised_products(spec):
    binary = nvrtc.compile(spec.source)
    assert problems(binary.log) == []
    assert spec.shared_bytes <= SHARED_MEMORY
    code = machine_code.read(binary.cubin)
    assert code.operations >= {"HGMMA", "UTMALDG"}
    # Consumers share one instruction; with roles each of the three has its own.
    held = code.released + code.claimed * (1 if spec.is_wide else spec.tile.num_warpgroups)
    assert len(held) == spec.num_threads // 128, code
    pool = 65536 // spec.num_threads // 8 * 8 * len(held)
    assert pool - 8 * len(held) < sum(held) <= pool, f"{held} of {pool}"


EVERY_ROWS = [rows for power in range(4, 18) for rows in (2**power - 1, 2**power, 3 * 2 ** (power - 1))]


def test_the_sample_has_every_combination_of_options():
    chosen = specialisations()
    assert len({(s.is_causal, s.is_bf16, s.deterministic) for s in chosen}) == 8
    assert len({(s.is_masked, s.is_causal, s.has_dropout, s.deterministic) for s in chosen}) == 8 + 4  # without, with
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
