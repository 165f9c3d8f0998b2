"""The Hopper forward for head dimensions above 256: what is compiled, what is launched, and which calls are its."""

from __future__ import annotations

import ctypes
import itertools
import math
import re
from types import SimpleNamespace

import pytest
import torch
from test_cuda_kernels_compile import SHARED_MEMORY, problems
from test_cuda_launch import NUM_SMS, OnDevice, cuda  # noqa: F401

import torch_flashbackend
from torch_flashbackend import nvrtc, precompile, routing
from torch_flashbackend.kernels import KernelUnavailable
from torch_flashbackend.kernels.cuda import backward, forward, forward_wide
from torch_flashbackend.kernels.cuda.forward_wide import WideSpecialisation

import machine_code
from sampling import cover

HEAD_DIMS = range(272, 513, 16)
HALVES = sorted({math.ceil(head_dim / 32) * 16 for head_dim in HEAD_DIMS})


def specialisations():
    """A part: every half of the columns, and every combination of options."""
    options = itertools.product(HALVES, (False, True), (True, False), (True, False))
    return cover(
        [WideSpecialisation(*chosen) for chosen in options],
        lambda spec: spec.half_dim,
        lambda spec: (spec.is_causal, spec.is_bf16, spec.write_lse),
    )


def name_of(spec):
    kind = ("causal" if spec.is_causal else "full", "bf16" if spec.is_bf16 else "f16", "lse" if spec.write_lse else "")
    return "-".join([str(2 * spec.half_dim), *filter(None, kind)])


@pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"no compiler: {nvrtc.unavailable()}")
@pytest.mark.parametrize("spec", specialisations(), ids=name_of)
def test_specialisation_has_no_spills_and_no_serialised_products(spec):
    binary = nvrtc.compile(spec.source)
    assert problems(binary.log) == []
    (registers,) = {int(count) for count in re.findall(r"Used (\d+) registers", binary.log)}
    code = machine_code.read(binary.cubin)
    # One warpgroup loads, two compute; more than the pool hangs.
    (released,), (claimed,) = set(code.released), set(code.claimed)
    assert registers * 3 - 24 < released + 2 * claimed <= registers * 3


@pytest.mark.parametrize("half", HALVES)
def test_shared_memory(half):
    spec = WideSpecialisation(half, True, True, True)
    assert spec.stages >= 3 and spec.shared_bytes <= SHARED_MEMORY
    assert spec.stage_bytes >= 64 * half * 2 and spec.stage_bytes % 1024 == 0
    exchanged = 2 * (64 * 32 * 4 + 64 * 64 * 2 + 64 * 4)  # sums, probabilities, and a number for each row
    assert exchanged <= forward_wide._EXCHANGED_BYTES
    assert 4 * spec.stages * 8 <= forward_wide._BARRIERS_BYTES


def test_halves_of_the_columns():
    for head_dim in range(264, 513, 8):
        half = forward_wide.specialise(head_dim, torch.float16, False, False).half_dim
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
        "HALF_DIM": 256, "STAGES": 3, "IS_CAUSAL": 1, "IS_BF16": 1, "WRITE_LSE": 1
    }  # fmt: skip
    assert list(cuda.config.grid) == [5 * 8, 1, 1]
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


@pytest.mark.parametrize(
    ("seqlen", "queries_per_kv", "expected"),
    [
        (4096, 1, 4),  # 8 MB of keys and values each
        (4096, 4, 16),
        (512, 1, 8),  # 32 would fit the cache
        (512, 2, 16),
        (16384, 1, 2),  # one alone would
        (100_000, 1, 2),
    ],
)
def test_heads_whose_tiles_stand_in_one_list(cuda, seqlen, queries_per_kv, expected):  # noqa: F811
    assert forward_wide.heads_per_group(64, queries_per_kv, seqlen, 512) == expected
    assert forward_wide.heads_per_group(3, queries_per_kv, 512, 512) == 3  # not more than there are
    call(batch=4, heads=16, kv_heads=16 // queries_per_kv, seqlen_q=seqlen, seqlen_k=seqlen)
    assert launched(cuda)[1].heads_per_group == expected


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
