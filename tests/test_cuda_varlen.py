"""The host side of packed sequences on the Hopper forward kernel, with stubs for the driver and the schedule."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from test_cuda_launch import NUM_SMS, cuda, launched  # noqa: F401 (a fixture)

from torch_flashbackend.kernels import KernelUnavailable
from torch_flashbackend.kernels.cuda import varlen
from torch_flashbackend.kernels.cuda.backward import BackwardParams
from torch_flashbackend.kernels.triton.varlen import Extras, Options

from common import deterministic_mode

ENTRIES = 0x5000


class OnDevice(torch.Tensor):
    """A meta tensor that says it is on a GPU, at an address of our choice."""

    @staticmethod
    def make(*shape, dtype=torch.bfloat16, address=1 << 20):
        tensor = torch.empty(shape, dtype=dtype, device="meta").as_subclass(OnDevice)
        tensor.address = address
        return tensor

    is_cuda = True
    address = 1 << 20

    def data_ptr(self):
        return self.address

    def get_device(self):
        return 0

    @property
    def device(self):
        return torch.device("cuda", 0)


class Schedule:
    """Stands for the launch that writes the list of tiles."""

    def __init__(self, call, block_m, block_n):
        self.query_slots = call.slots(call.total_q, block_m)
        self.key_slots = 0 if block_n is None else call.slots(call.total_k, block_n)

    def make(self, extras):
        return SimpleNamespace(data_ptr=lambda: ENTRIES)


@pytest.fixture
def packed(cuda, monkeypatch):  # noqa: F811
    monkeypatch.setattr(varlen, "_device", lambda index: ((9, 0), NUM_SMS))
    monkeypatch.setattr(varlen, "_plans", {})
    monkeypatch.setattr(
        varlen._PackedCall, "schedule", lambda call, options, extras, block_m, block_n: Schedule(call, block_m, block_n)
    )
    monkeypatch.setattr(varlen._PackedCall, "facts", lambda *_: ("sm_90", NUM_SMS, True))
    return cuda


def lengths(count=4):
    return torch.empty(count + 1, dtype=torch.int32, device="meta")


def tensors(total=1000, heads=4, kv_heads=2, head_dim=128, **options):
    shapes = [
        (total, heads, head_dim),
        (total, kv_heads, head_dim),
        (total, kv_heads, head_dim),
        (total, heads, head_dim),
    ]
    return [OnDevice.make(*shape, **options) for shape in shapes]


CAUSAL = Options(scale=0.125, window_right=0)


def test_parameters_of_a_launch(packed):
    query, key, value, out = tensors()
    cu_seqlens = lengths()
    extras = Extras(cu_seqlens, cu_seqlens)
    logsumexp = OnDevice.make(4, 1000, dtype=torch.float32, address=0x7000)
    assert varlen.takes(query, key, value, CAUSAL, extras)
    varlen.forward(query, key, value, CAUSAL, extras, out, logsumexp)
    _, params = launched(packed)
    block_m = 128
    slots = 1000 // block_m + 4 + 1
    assert (params.q_tiles, params.num_tiles) == (slots, 4 * slots)
    assert (params.batch, params.num_heads, params.num_kv_heads) == (1, 4, 2)
    assert (params.seqlen_q, params.seqlen_k) == (1000, 1000)
    assert (params.out_stride_head, params.out_stride_row) == (128, 4 * 128)
    assert (params.entries, params.logsumexp) == (ENTRIES, 0x7000)
    assert params.softmax_scale_log2 == pytest.approx(0.125 * math.log2(math.e), rel=1e-6)
    defines = packed.compiled[-1].defines
    assert (defines["PACKED"], defines["IS_CAUSAL"], defines["MASKED"], defines["WRITE_LSE"]) == (1, 1, 0, 1)


def test_parameters_of_a_backward(packed, monkeypatch):
    query, key, value, out = tensors()
    grads = [OnDevice.make(*t.shape, address=(20 + n) << 20) for n, t in enumerate((query, key, value))]
    grad_out, cu_seqlens = OnDevice.make(*out.shape, address=9 << 20), lengths()
    extras = Extras(cu_seqlens, cu_seqlens)
    logsumexp = OnDevice.make(4, 1000, dtype=torch.float32, address=0x7000)
    launches = []
    monkeypatch.setattr(varlen.driver, "launch", lambda config, function, arguments, *_: launches.append(
        (next(iter(config.grid)), ctypes.c_uint64.from_address(arguments.value).value)))  # fmt: skip
    monkeypatch.setattr(torch, "empty", lambda *_, **__: SimpleNamespace(data_ptr=lambda: 0x8000))
    assert varlen.takes_backward(grad_out, query, key, value, CAUSAL, extras, logsumexp)
    varlen.backward(grad_out, query, key, value, CAUSAL, extras, out, logsumexp, *grads)
    (prepared, address), (blocks, _), (finished, _) = launches
    params = BackwardParams.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(BackwardParams)))
    block_m, block_n = 64, 128
    q_slots, k_slots = 1000 // block_m + 5, 1000 // block_n + 5
    assert (prepared, blocks, finished) == (4 * q_slots, 2 * k_slots, 4 * q_slots)
    assert (params.q_slots, params.k_tiles, params.entries) == (q_slots, k_slots, ENTRIES)
    assert params.q_tiles == (1000 // 128 + 4) * 2
    assert (params.grad_key, params.grad_value, params.grad_query) == (21 << 20, 22 << 20, 20 << 20)
    assert (params.statistics, params.sums) == (params.grad_query, 0x8000)
    assert (params.grad_query_stride_row, params.grad_key_stride_row) == (4 * 128, 2 * 128)
    assert packed.compiled[-1].defines["PACKED"] == 1 and packed.compiled[-1].defines["PERSISTENT"] == 0


def test_backwards_that_are_tritons(packed):
    cu_seqlens = lengths()
    extras = Extras(cu_seqlens, cu_seqlens)
    logsumexp = OnDevice.make(4, 1000, dtype=torch.float32)
    query, key, value, out = tensors()
    assert varlen.takes_backward(out, query, key, value, CAUSAL, extras, logsumexp)
    with deterministic_mode():
        assert not varlen.takes_backward(out, query, key, value, CAUSAL, extras, logsumexp)
    wide = tensors(head_dim=192)
    assert not varlen.takes_backward(wide[3], *wide[:3], CAUSAL, extras, logsumexp)


@pytest.mark.parametrize(
    "change",
    [{"window_left": 5}, {"window_right": 3}, {"softcap": 2.0}, {"scale": 0.0}, {"scale": -1.0}, {"scale": math.nan}],
    ids=str,
)
def test_options_that_are_tritons(packed, change):
    query, key, value, _ = tensors()
    cu_seqlens = lengths()
    options = dataclasses.replace(CAUSAL, **change)
    assert not varlen.takes(query, key, value, options, Extras(cu_seqlens, cu_seqlens))


def test_causal_calls_need_the_same_lengths_for_queries_and_keys(packed):
    query, key, value, _ = tensors()
    cu_seqlens, other = lengths(), OnDevice.make(5, dtype=torch.int32, address=0x9000)
    full = Options(scale=0.125)
    assert varlen.takes(query, key, value, CAUSAL, Extras(cu_seqlens, cu_seqlens))
    assert not varlen.takes(query, key, value, CAUSAL, Extras(other, OnDevice.make(5, dtype=torch.int32)))
    assert varlen.takes(query, key, value, full, Extras(other, OnDevice.make(5, dtype=torch.int32)))
    assert not varlen.takes(query, key, value, CAUSAL, Extras(None, cu_seqlens))
    regular = dataclasses.replace(CAUSAL, max_seqlen_q=250, max_seqlen_k=250)
    assert varlen.takes(query, key, value, regular, Extras())
    assert not varlen.takes(query, key, value, dataclasses.replace(regular, max_seqlen_k=300), Extras())


@pytest.mark.parametrize(
    "extras",
    [{"seqused_k": lengths(3)}, {"alibi_slopes": torch.empty(4)}, {"sinks": torch.empty(4)}],
    ids=lambda extras: next(iter(extras)),
)
def test_small_tensors_that_are_tritons(packed, extras):
    query, key, value, _ = tensors()
    cu_seqlens = lengths()
    assert not varlen.takes(query, key, value, CAUSAL, Extras(cu_seqlens, cu_seqlens, **extras))


def test_tensors_that_are_tritons(packed, monkeypatch):
    cu_seqlens = lengths()
    extras = Extras(cu_seqlens, cu_seqlens)
    for made in (tensors(dtype=torch.float32), tensors(head_dim=68), tensors(head_dim=264), tensors(address=8)):
        assert not varlen.takes(*made[:3], CAUSAL, extras)
    monkeypatch.setattr(varlen, "_device", lambda index: ((8, 0), NUM_SMS))
    assert not varlen.takes(*tensors()[:3], CAUSAL, extras)


def test_strides_that_the_copy_engine_cannot_walk_raise_before_a_launch(packed):
    _, key, value, out = tensors()
    odd = torch.empty((1000, 4, 129), dtype=torch.bfloat16, device="meta")[..., :128].as_subclass(OnDevice)
    cu_seqlens = lengths()
    logsumexp = OnDevice.make(4, 1000, dtype=torch.float32)
    for _ in range(2):
        with pytest.raises(KernelUnavailable, match="strides"):
            varlen.forward(odd, key, value, CAUSAL, Extras(cu_seqlens, cu_seqlens), out, logsumexp)
    assert not packed.compiled
