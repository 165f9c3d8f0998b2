"""The CUDA kernels, compiled for sm_90a by NVRTC: no GPU is needed to see spills, serialised products or a wrong pool.

Each specialisation takes more than a second of one core, so a part is compiled: every tile of every kind of call, every
head dimension, every combination of options. FLASHBACKEND_ALL_CASES=1 compiles all.
"""

from __future__ import annotations

import itertools
import re

import pytest

from torch_flashbackend import nvrtc
from torch_flashbackend.kernels.cuda import forward, tiles

import machine_code
from sampling import cover

pytestmark = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"no compiler: {nvrtc.unavailable()}")

HEAD_DIMS = [(size, size) for size in range(16, 257, 16)] + [(192, 128)]
# Dense calls alone have tiles whose values are padded to multiples of 8: head_dim 72.
DENSE_HEAD_DIMS = [*HEAD_DIMS, (80, 72)]
SHARED_MEMORY = 227 << 10


def every_specialisation():
    options = list(itertools.product((True, False), (True, False)))  # bfloat16 or float16, with logsumexp or without
    found = []
    for is_causal, (head_dim, head_dim_v), chosen in itertools.product((False, True), DENSE_HEAD_DIMS, options):
        for tile in tiles.variants(head_dim, head_dim_v, is_causal):
            columns = tile.value_columns(head_dim_v)
            found.append(forward.Specialisation(head_dim, columns, is_causal, *chosen, tile))
    for dims, (is_bf16, write_lse) in itertools.product(HEAD_DIMS, options):
        chosen = is_bf16, write_lse
        for tile in tiles.masked_variants(*dims):
            found.append(forward.Specialisation(*dims, False, *chosen, tile, is_masked=True))
        for tile, size, per_key in tiles.biased_variants(*dims):
            found.append(forward.Specialisation(*dims, False, *chosen, tile, True, size, per_key))
        for is_causal in (False, True):
            for tile in tiles.packed_variants(*dims, is_causal):  # always with the logsumexp
                found.append(forward.Specialisation(*dims, is_causal, is_bf16, True, tile, is_packed=True))
            if dims[0] <= tiles.MAX_DROPOUT_HEAD_DIM:
                tile = tiles.choose_dropout(*dims)
                found.append(forward.Specialisation(*dims, is_causal, *chosen, tile, has_dropout=True))
    return list(dict.fromkeys(found))


def kind_of(spec):
    """All that is not a size, a choice of every kind of call, or the tile."""
    return spec._replace(head_dim=0, head_dim_v=0, is_causal=False, is_bf16=False, write_lse=False, tile=None)


def specialisations():
    """The largest head dimension of each tile, since it has the most in registers."""
    return cover(
        sorted(every_specialisation(), key=lambda spec: -spec.head_dim - spec.head_dim_v),
        lambda spec: (spec.head_dim, spec.head_dim_v, spec.is_causal),
        lambda spec: (kind_of(spec), spec.tile),
        lambda spec: (kind_of(spec), spec.is_causal, spec.is_bf16, spec.write_lse),
    )


def name_of(spec):
    size = f"{spec.head_dim}" if spec.head_dim == spec.head_dim_v else f"{spec.head_dim}-{spec.head_dim_v}"
    mask = "masked" if spec.is_masked else "causal" if spec.is_causal else "full"
    form = "packed" if spec.is_packed else ""
    mask += f"-float{8 * spec.bias_bytes}" if spec.bias_bytes else ""
    mask += "-per-key" * spec.bias_per_key + "-dropout" * spec.has_dropout
    mask += "-rotated" * spec.tile.rotate
    kind = (form, mask, "bf16" if spec.is_bf16 else "f16", "lse" if spec.write_lse else "")
    return "-".join([size, *filter(None, kind), f"{spec.tile.block_m}x{spec.tile.block_n}"])


def problems(log):
    """What ptxas and the front end have to say against a kernel."""
    found = re.findall(r".*(?:\(C75\d\d\)|Potential Performance Loss|warning|setmaxnreg).*", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    assert spills, f"the log says nothing of spills:\n{log}"
    return found + [f"spills {number} bytes" for number in spills if int(number)]


@pytest.mark.parametrize("spec", specialisations(), ids=name_of)
def test_specialisation_has_no_spills_and_no_serialised_products(spec):
    binary = nvrtc.compile(spec.source)
    assert problems(binary.log) == []
    assert spec.shared_bytes <= SHARED_MEMORY
    # Of the attention kernel; those that list masks or write random keys have fewer.
    registers = max(int(count) for count in re.findall(r"Used (\d+) registers", binary.log))
    warpgroups = spec.tile.num_threads // 128
    # 64K registers for all threads of the one block that a multiprocessor holds.
    assert registers * spec.tile.num_threads <= 65536
    code = machine_code.read(binary.cubin)
    assert code.operations >= {"HGMMA", "UTMALDG"}
    if "USETMAXREG" not in code.operations:
        return
    # More than the pool hangs; what is left of it is wasted. Consumers share one instruction or have one each.
    consumers = code.claimed * (warpgroups - 1) if len(code.claimed) == 1 else code.claimed
    assert len(code.released) == 1 and len(consumers) == warpgroups - 1, code
    pool, taken = registers * warpgroups, code.released[0] + sum(consumers)
    assert pool - 8 * warpgroups < taken <= pool, f"{code} of {pool}"


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
