"""The Hopper forward for head dimensions above 256: what is compiled, what is launched, and which calls are its."""

from __future__ import annotations

import ctypes
import itertools
import math
import re
import subprocess
from types import SimpleNamespace

import pytest
import torch
from test_cuda_kernels_compile import ALL, SHARED_MEMORY, disassembler, problems
from test_cuda_launch import NUM_SMS, OnDevice, cuda  # noqa: F401

import torch_flashbackend
from torch_flashbackend import nvrtc, precompile, routing
from torch_flashbackend.kernels import KernelUnavailable
from torch_flashbackend.kernels.cuda import backward, forward, forward_wide
from torch_flashbackend.kernels.cuda.forward_wide import WideSpecialisation

HEAD_DIMS = range(272, 513, 16)
HALVES = sorted({math.ceil(head_dim / 32) * 16 for head_dim in HEAD_DIMS})


def specialisations():
    """Every half of the columns, cluster and mask; of the dtypes and outputs each gets one in turn."""
    options = list(itertools.product((True, False), (True, False)))  # bfloat16 or float16, with logsumexp or without
    found = []
    for number, half in enumerate(HALVES):
        for cluster, is_causal in itertools.product((1, 2), (False, True)):
            for chosen in options if ALL else [options[(number + cluster + 2 * is_causal) % 4]]:
                found.append(WideSpecialisation(half, cluster, is_causal, *chosen))
    return found


def name_of(spec):
    kind = ("causal" if spec.is_causal else "full", "bf16" if spec.is_bf16 else "f16", "lse" if spec.write_lse else "")
    return "-".join([str(2 * spec.half_dim), f"cluster{spec.cluster}", *filter(None, kind)])


@pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"no compiler: {nvrtc.unavailable()}")
@pytest.mark.parametrize("spec", specialisations(), ids=name_of)
def test_specialisation_has_no_spills_and_no_serialised_products(spec, tmp_path):
    binary = nvrtc.compile(spec.source)
    assert problems(binary.log) == []
    (registers,) = {int(count) for count in re.findall(r"Used (\d+) registers", binary.log)}
    if disassembler() is None:
        return
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(binary.cubin)
    text = subprocess.run([disassembler(), str(cubin)], capture_output=True, text=True, check=True).stdout
    assert ("UTMALDG.4D.MULTICAST" in text) == (spec.cluster > 1)
    changes = re.findall(r"USETMAXREG\.(DEALLOC|TRY_ALLOC)\S* (?:UP\d+, )?(0x[0-9a-f]+)", text)
    # One warpgroup loads, two compute; more than the pool hangs.
    (released,) = {int(count, 16) for kind, count in changes if kind == "DEALLOC"}
    (claimed,) = {int(count, 16) for kind, count in changes if kind == "TRY_ALLOC"}
    assert registers * 3 - 24 < released + 2 * claimed <= registers * 3


@pytest.mark.parametrize("half", HALVES)
def test_shared_memory(half):
    spec = WideSpecialisation(half, 2, True, True, True)
    assert spec.stages >= 3 and spec.shared_bytes <= SHARED_MEMORY
    assert spec.stage_bytes >= 64 * half * 2 and spec.stage_bytes % 1024 == 0
    exchanged = 2 * (64 * 32 * 4 + 64 * 64 * 2 + 64 * 4)  # sums, probabilities, and a number for each row
    assert exchanged <= forward_wide._EXCHANGED_BYTES
    assert 4 * spec.stages * 8 <= forward_wide._BARRIERS_BYTES


def test_halves_of_the_columns():
    for head_dim in range(264, 513, 8):
        half = forward_wide.specialise(head_dim, torch.float16, False, False, seqlen_q=64).half_dim
        assert half % 16 == 0 and half < head_dim <= 2 * half and half <= 256


def call(batch=2, heads=4, kv_heads=2, seqlen_q=300, seqlen_k=500, head_dim=512, is_causal=True, lse=True, mask=None,
         address=1 << 20):  # fmt: skip
    make = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device="meta")  # noqa: E731
    shapes = [(batch, heads, seqlen_q, head_dim), *[(batch, kv_heads, seqlen_k, head_dim)] * 2,
              (batch, heads, seqlen_q, head_dim)]  # fmt: skip
    query, key, value, out = (OnDevice(make(*shape), address + (i << 12)) for i, shape in enumerate(shapes))
    logsumexp = OnDevice(torch.empty(shapes[0][:3], device="meta"), address + (9 << 12)) if lse else None
    forward.forward(query, key, value, is_causal, 0.25, out, logsumexp, mask)
    return SimpleNamespace(query=query, key=key, value=value, out=out, logsumexp=logsumexp)


def launched(cuda):  # noqa: F811
    """(addresses that the three tensor maps hold, parameters) of the last launch."""
    pointers = (ctypes.c_uint64 * 4).from_address(cuda.arguments)
    maps = [ctypes.c_uint64.from_address(pointers[i]).value for i in range(3)]
    size = ctypes.sizeof(forward_wide.WideParams)
    return maps, forward_wide.WideParams.from_buffer_copy(ctypes.string_at(pointers[3], size))


def test_parameters_of_a_launch(cuda):  # noqa: F811
    tensors = call()
    maps, params = launched(cuda)
    assert maps == [tensors.query.data_ptr(), tensors.key.data_ptr(), tensors.value.data_ptr()]
    assert (params.out, params.logsumexp) == (tensors.out.data_ptr(), tensors.logsumexp.data_ptr())
    assert (params.out_stride_batch, params.out_stride_head, params.out_stride_row) == tensors.out.stride()[:3]
    assert (params.batch, params.num_heads, params.num_kv_heads) == (2, 4, 2)
    assert (params.seqlen_q, params.seqlen_k, params.head_dim, params.q_tiles) == (300, 500, 512, 5)
    assert params.softmax_scale_log2 == pytest.approx(0.25 * math.log2(math.e), rel=1e-6)
    assert cuda.compiled[-1].defines == {
        "HALF_DIM": 256, "STAGES": 3, "CLUSTER": 2, "IS_CAUSAL": 1, "IS_BF16": 1, "WRITE_LSE": 1
    }  # fmt: skip
    assert list(cuda.config.grid) == [6 * 8, 1, 1]  # five tiles of a head make three pairs
    assert list(cuda.config.block) == [384, 1, 1] and cuda.config.num_attributes == 0
    # Boxes of 64 columns and 64 rows of all tensors.
    assert [encoding[5][:2] for encoding in cuda.encodings] == [[64, 64]] * 3


def test_next_call_patches_pointers_alone(cuda):  # noqa: F811
    call()
    before = len(cuda.calls)
    tensors = call(address=1 << 30)
    maps, params = launched(cuda)
    assert maps == [tensors.query.data_ptr(), tensors.key.data_ptr(), tensors.value.data_ptr()]
    assert params.out == tensors.out.data_ptr()
    assert cuda.calls[before:] == ["cuTensorMapReplaceAddress"] * 3 + ["cuLaunchKernelEx"]
    call(lse=False)
    assert launched(cuda)[1].logsumexp is None and cuda.compiled[-1].defines["WRITE_LSE"] == 0


def test_one_query_tile_has_no_other_to_share_keys_with(cuda):  # noqa: F811
    call(seqlen_q=64)
    assert cuda.compiled[-1].defines["CLUSTER"] == 1 and cuda.config.grid[0] == 8
    call(seqlen_q=65)
    assert cuda.compiled[-1].defines["CLUSTER"] == 2 and cuda.config.grid[0] == 16


@pytest.mark.parametrize(
    ("seqlen", "queries_per_kv", "expected"),
    [
        (4096, 1, 4),  # 8 MB of keys and values each
        (4096, 4, 16),
        (512, 1, 32),
        (16384, 1, 1),
        (100_000, 1, 1),
    ],
)
def test_heads_whose_tiles_stand_in_one_list(seqlen, queries_per_kv, expected):
    q_tiles = math.ceil(seqlen / 64)
    assert forward_wide.heads_per_group(64, queries_per_kv, seqlen, 512, q_tiles, 132) == expected
    # Enough of them for all multiprocessors, and not more than there are.
    assert forward_wide.heads_per_group(200, 1, 4096, 512, 1, 132) == 132
    assert forward_wide.heads_per_group(3, 1, 64, 512, 1, 132) == 3


def test_which_calls_are_its(cuda):  # noqa: F811
    def kernel(**options):
        call(**options)
        return cuda.compiled[-1].name

    assert kernel(head_dim=264) == kernel(head_dim=512) == "flash_forward_wide"
    assert kernel(head_dim=256) == "flash_forward"
    # Few queries for many keys too, which the decoding kernel takes up to 256.
    sizes = {"batch": 4, "heads": 8, "seqlen_q": 1, "seqlen_k": 1000, "is_causal": False}
    assert kernel(**sizes, head_dim=512) == "flash_forward_wide"
    assert kernel(**sizes, head_dim=128) == "flash_decode"


def test_what_it_refuses(cuda):  # noqa: F811
    for head_dim in (268, 520):
        with pytest.raises(KernelUnavailable, match=f"no head_dim {head_dim}"):
            call(head_dim=head_dim)
    mask = OnDevice(torch.empty(2, 1, 300, 500, dtype=torch.bool, device="meta"), 1 << 25)
    with pytest.raises(KernelUnavailable, match="masks up to a head_dim of 256"):
        call(is_causal=False, mask=mask)
    assert routing.HOPPER_MAX_HEAD_DIM == forward_wide.MAX_HEAD_DIM
    assert routing.HOPPER_MAX_MASK_HEAD_DIM == forward.MAX_HEAD_DIM == backward.MAX_HEAD_DIM


def test_gradients_are_tritons():
    for head_dim, taken in ((256, True), (264, False), (512, False)):
        query = torch.empty(1, 1, 64, head_dim, device="meta")
        assert backward.extras_fit(query, query, None, 0.0, False) is taken


def test_warmup(monkeypatch):
    monkeypatch.setattr(precompile, "_compile_cuda", lambda specialisation: specialisation.entries)
    monkeypatch.setattr(precompile, "_compile_triton", lambda problem, only: (only,))
    inference, training = torch_flashbackend.warmup(
        [(2, 16, 4096, 512)], gpu="NVIDIA H200", backends=["cuda"], causal=[True]
    )
    assert inference.kernels == ("flash_forward_wide",)
    assert training.kernels == ("flash_forward_wide", *precompile.BACKWARD)
