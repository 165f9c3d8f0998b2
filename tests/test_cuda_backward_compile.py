"""The CUDA backward kernels, compiled for sm_90a: spills, serialised products, the pool of registers, shared memory.

Each head dimension gets one of the combinations of mask, dtype and mode, in turn;
FLASHBACKEND_ALL_SPECIALISATIONS=1 compiles all.
"""

from __future__ import annotations

import itertools
import re
import subprocess

import pytest
from test_cuda_kernels_compile import ALL, SHARED_MEMORY, disassembler, problems

from torch_flashbackend import nvrtc
from torch_flashbackend.kernels.cuda import backward, tiles

pytestmark = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"no compiler: {nvrtc.unavailable()}")

HEAD_DIMS = [*((size, size) for size in range(16, 257, 16)), (192, 128), (64, 128), (240, 16)]


def specialisations():
    options = list(itertools.product((True, False), repeat=3))  # causal, bfloat16 or float16, deterministic
    for number, (head_dim, head_dim_v) in enumerate(HEAD_DIMS):
        for is_causal, is_bf16, deterministic in options if ALL else [options[number * 3 % 8]]:
            tile = tiles.choose_backward(head_dim, head_dim_v, is_causal)
            yield backward.Specialisation(head_dim, head_dim_v, is_causal, is_bf16, deterministic, tile)


def name_of(spec):
    kind = ("causal" if spec.is_causal else "full", "bf16" if spec.is_bf16 else "f16")
    return "-".join([f"{spec.head_dim}-{spec.head_dim_v}", *kind, *["deterministic"] * spec.deterministic])


@pytest.mark.parametrize("spec", list(specialisations()), ids=name_of)
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


def test_the_sample_has_every_combination_of_options():
    assert len({(s.is_causal, s.is_bf16, s.deterministic) for s in specialisations()}) == 8
