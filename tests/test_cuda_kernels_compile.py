"""The CUDA kernels, compiled for sm_90a by NVRTC: no GPU is needed to see spills, serialised products or a wrong pool.

Each specialisation takes about two seconds of one core, so of the four combinations of dtype and logsumexp each head
dimension gets one, in turn; FLASHBACKEND_ALL_SPECIALISATIONS=1 compiles all.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest

from torch_flashbackend import nvrtc
from torch_flashbackend.kernels.cuda import forward, tiles

pytestmark = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"no compiler: {nvrtc.unavailable()}")

ALL = bool(os.environ.get("FLASHBACKEND_ALL_SPECIALISATIONS"))
HEAD_DIMS = [(size, size) for size in range(16, 257, 16)] + [(192, 128)]
# Dense calls alone have tiles whose values are padded to multiples of 8: head_dim 72.
DENSE_HEAD_DIMS = [*HEAD_DIMS, (80, 72)]
SHARED_MEMORY = 227 << 10


def specialisations():
    options = list(itertools.product((True, False), (True, False)))  # bfloat16 or float16, with logsumexp or without
    found = []
    for is_causal in (False, True):
        for number, (head_dim, head_dim_v) in enumerate(DENSE_HEAD_DIMS):
            for tile in tiles.variants(head_dim, head_dim_v, is_causal):
                for chosen in options if ALL else [options[(number + is_causal) % 4]]:
                    columns = tile.value_columns(head_dim_v)
                    found.append(forward.Specialisation(head_dim, columns, is_causal, *chosen, tile))
    # With a mask: every other head dimension, since all that matters is the accumulator's size.
    for number, (head_dim, head_dim_v) in enumerate(HEAD_DIMS):
        if ALL or head_dim % 32 == 0:
            for tile in tiles.masked_variants(head_dim, head_dim_v):
                for chosen in options if ALL else [options[(number + 2) % 4]]:
                    found.append(forward.Specialisation(head_dim, head_dim_v, False, *chosen, tile, is_masked=True))
    # Packed sequences: the tiles of a causal and of a full call.
    for number, (head_dim, head_dim_v) in enumerate(HEAD_DIMS):
        if ALL or head_dim in (64, 128, 256):
            for is_causal in (False, True):
                for tile in tiles.packed_variants(head_dim, head_dim_v, is_causal):
                    is_bf16 = bool((number + is_causal) % 2)
                    found.append(
                        forward.Specialisation(head_dim, head_dim_v, is_causal, is_bf16, True, tile, is_packed=True)
                    )
    # With a float mask: every kind of it at the common head dimensions, one in turn at the others.
    for number, dims in enumerate(HEAD_DIMS):
        for kind, (tile, size, per_key) in enumerate(tiles.biased_variants(*dims)):
            if ALL or dims in ((64, 64), (128, 128)) or (dims[0] % 64 == 0 and kind == number // 4 % 4):
                for chosen in options if ALL else [options[(number + kind) % 4]]:
                    found.append(forward.Specialisation(*dims, False, *chosen, tile, True, size, per_key))
    # With dropout, likewise.
    for number, dims in enumerate(HEAD_DIMS):
        if dims[0] > tiles.MAX_DROPOUT_HEAD_DIM:
            continue
        tile = tiles.choose_dropout(*dims)
        if ALL or dims[0] % 32 == 0:
            for chosen in options if ALL else [options[number % 4]]:
                is_causal = number % 2 == 0
                found.append(forward.Specialisation(*dims, is_causal, *chosen, tile, has_dropout=True))
    return list(dict.fromkeys(found))


def name_of(spec):
    size = f"{spec.head_dim}" if spec.head_dim == spec.head_dim_v else f"{spec.head_dim}-{spec.head_dim_v}"
    mask = "masked" if spec.is_masked else "causal" if spec.is_causal else "full"
    form = "packed" if spec.is_packed else ""
    mask += f"-float{8 * spec.bias_bytes}" if spec.bias_bytes else ""
    mask += "-per-key" * spec.bias_per_key + "-dropout" * spec.has_dropout
    mask += "-rotated" * spec.tile.rotate
    kind = (form, mask, "bf16" if spec.is_bf16 else "f16", "lse" if spec.write_lse else "")
    return "-".join([size, *filter(None, kind), f"{spec.tile.block_m}x{spec.tile.block_n}"])


@functools.cache
def disassembler() -> Path | None:
    """nvdisasm, as Triton brings it."""
    spec = importlib.util.find_spec("triton")
    path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm" if spec and spec.origin else None
    return path if path is not None and path.exists() else None


def problems(log):
    """What ptxas and the front end have to say against a kernel."""
    found = re.findall(r".*(?:\(C75\d\d\)|Potential Performance Loss|warning|setmaxnreg).*", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    assert spills, f"the log says nothing of spills:\n{log}"
    return found + [f"spills {number} bytes" for number in spills if int(number)]


@pytest.mark.parametrize("spec", specialisations(), ids=name_of)
def test_specialisation_has_no_spills_and_no_serialised_products(spec, tmp_path):
    binary = nvrtc.compile(spec.source)
    assert problems(binary.log) == []
    assert spec.shared_bytes <= SHARED_MEMORY
    # Of the attention kernel; those that list masks or write random keys have fewer.
    registers = max(int(count) for count in re.findall(r"Used (\d+) registers", binary.log))
    warpgroups = spec.tile.num_threads // 128
    # 64K registers for all threads of the one block that a multiprocessor holds.
    assert registers * spec.tile.num_threads <= 65536
    if disassembler() is None:
        return
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(binary.cubin)
    text = subprocess.run([disassembler(), str(cubin)], capture_output=True, text=True, check=True).stdout
    assert "HGMMA" in text and "UTMALDG" in text
    changes = re.findall(r"USETMAXREG\.(DEALLOC|TRY_ALLOC)\S* (?:UP\d+, )?(0x[0-9a-f]+)", text)
    released = [int(count, 16) for kind, count in changes if kind == "DEALLOC"]
    claimed = [int(count, 16) for kind, count in changes if kind == "TRY_ALLOC"]
    if not changes:
        return
    # More than the pool hangs; what is left of it is wasted. Consumers share one instruction or have one each.
    consumers = claimed * (warpgroups - 1) if len(claimed) == 1 else claimed
    assert len(released) == 1 and len(consumers) == warpgroups - 1, changes
    pool, taken = registers * warpgroups, released[0] + sum(consumers)
    assert pool - 8 * warpgroups < taken <= pool, f"{released} and {consumers} of {pool}"


def test_the_sample_has_every_dtype_and_output():
    chosen = specialisations()
    plain = {(s.is_causal, s.is_bf16, s.write_lse) for s in chosen if not s.is_masked}
    assert plain == set(itertools.product((True, False), repeat=3))
    masked = {(s.is_bf16, s.write_lse) for s in chosen if s.is_masked}
    assert masked == set(itertools.product((True, False), repeat=2))
    assert {(s.head_dim, s.head_dim_v, s.is_causal) for s in chosen} == {
        (*dims, causal) for dims in DENSE_HEAD_DIMS for causal in (True, False)
    }


SERIALISED = """
extern "C" __global__ void __launch_bounds__(128, 1) control(float* p, unsigned long long a, unsigned long long b) {
  float d[4] = {p[0], p[1], p[2], p[3]};
  asm volatile("wgmma.fence.sync.aligned;");
  for (int i = 0; i < 4; ++i) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
    d[0] += p[i];  // touched between issue and wait
  }
  asm volatile("wgmma.commit_group.sync.aligned;\\nwgmma.wait_group.sync.aligned 0;");
  p[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 1) control(float* p) {
  float a[120];
#pragma unroll
  for (int i = 0; i < 120; ++i) a[i] = p[i * 7];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 120; ++i) p[i + threadIdx.x] = a[i] * a[(i * 7) % 120];
}
"""
CLEAN = 'extern "C" __global__ void control(float* p) { p[threadIdx.x] += 1.0f; }'


@pytest.mark.parametrize(
    ("text", "found"), [(SERIALISED, "Potential Performance Loss"), (SPILLING, "spills"), (CLEAN, None)]
)
def test_the_checks_see_what_they_look_for(text, found):
    seen = problems(nvrtc.compile(nvrtc.Source("control", text)).log)
    assert any(found in line for line in seen) if found else not seen
