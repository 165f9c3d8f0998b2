"""The host side of the Hopper kernels: what is compiled for a call and what is launched, with a stub for the driver."""

from __future__ import annotations

import ctypes
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from test_nvrtc import FakeDriver, install_fake_driver

from torch_flashbackend import driver, nvrtc, routing
from torch_flashbackend.kernels import KernelUnavailable
from torch_flashbackend.kernels.cuda import forward, tiles
from torch_flashbackend.kernels.triton import attention, mask_plan

NUM_SMS = 10


class OnDevice:
    """What the launcher reads of a CUDA tensor, at an address of our choice."""

    def __init__(self, tensor, pointer):
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.device = SimpleNamespace(index=0)
        self._tensor, self._pointer = tensor, pointer

    def data_ptr(self):
        return self._pointer

    def get_device(self):
        return 0

    def size(self, dim):
        return self._tensor.size(dim)

    def numel(self):
        return self._tensor.numel()

    def element_size(self):
        return self._tensor.element_size()

    def stride(self, dim=None):
        return self._tensor.stride() if dim is None else self._tensor.stride(dim)

    def __getitem__(self, index):
        return OnDevice(self._tensor[index], self._pointer)


@pytest.fixture
def cuda(monkeypatch, tmp_path):
    """A driver and a compiler that answer without doing anything, and a kernel of one line."""
    fake = FakeDriver()
    fake.compiled = []
    install_fake_driver(monkeypatch, fake)
    monkeypatch.setattr(forward, "_device", lambda index: ((9, 0), NUM_SMS))
    monkeypatch.setattr(forward, "_plans", {})
    (tmp_path / "forward.cu").write_text("stub")
    monkeypatch.setattr(forward, "SOURCE", tmp_path / "forward.cu")
    instructions = ModuleType("instructions")
    instructions.HEADER_NAME = "generated.cuh"
    instructions.header = lambda columns, dtype: f"// {columns} {dtype}"
    monkeypatch.setitem(sys.modules, "torch_flashbackend.kernels.cuda.instructions", instructions)
    monkeypatch.setattr(sys.modules["torch_flashbackend.kernels.cuda"], "instructions", instructions, raising=False)

    def compile(source, **_):
        fake.compiled.append(source)
        return nvrtc.Binary(source.key("13.0"), b"\x7fELF", "")

    monkeypatch.setattr(nvrtc, "compile", compile)
    return fake


def call(batch=2, heads=4, kv_heads=2, seqlen_q=300, seqlen_k=500, head_dim=72, head_dim_v=None, dtype=torch.bfloat16,
         address=1 << 20, lse=True, is_causal=True, scale=0.25, mask=None):  # fmt: skip
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    make = lambda *shape: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    shapes = [(batch, heads, seqlen_q, head_dim), (batch, kv_heads, seqlen_k, head_dim),
              (batch, kv_heads, seqlen_k, head_dim_v), (batch, heads, seqlen_q, head_dim_v)]  # fmt: skip
    query, key, value, out = (OnDevice(make(*shape), address + (i << 12)) for i, shape in enumerate(shapes))
    logsumexp = OnDevice(torch.empty(shapes[0][:3], device="meta"), address + (9 << 12)) if lse else None
    forward.forward(query, key, value, is_causal and mask is None, scale, out, logsumexp, mask)
    return query, key, value, out, logsumexp


def launched(cuda):
    """(addresses that the four tensor maps hold, the parameters) of the last launch."""
    pointers = (ctypes.c_uint64 * 5).from_address(cuda.arguments)
    maps = [ctypes.c_uint64.from_address(pointers[i]).value for i in range(4)]
    return maps, forward.ForwardParams.from_buffer_copy(
        ctypes.string_at(pointers[4], ctypes.sizeof(forward.ForwardParams))
    )


class FakeLists:
    """Stands for MaskTiles: says what it was made for and where its lists are."""

    address, offset = 7 << 20, 40

    def __init__(self, call, mask, tile):
        self.call, self.mask, self.tile, self.made = call, mask, tile, []

    def strides(self, of_queries):
        assert not of_queries
        return 1000, 100, 10, self.offset

    def make(self, mask):
        self.made.append(mask)
        return OnDevice(torch.empty(1, device="meta"), self.address)


@pytest.fixture
def lists(monkeypatch):
    """The FakeLists of all masked plans, in order."""
    made = []

    def make(*arguments):
        made.append(FakeLists(*arguments))
        return made[-1]

    fake = SimpleNamespace(
        MaskTiles=make, MaskedCall=mask_plan.MaskedCall, broadcast_strides=mask_plan.broadcast_strides,
        common_divisor=mask_plan.common_divisor,
    )  # fmt: skip
    monkeypatch.setattr(forward, "_mask_plan", lambda: fake)
    return made


def bool_mask(*shape, address=3 << 20):
    return OnDevice(torch.empty(shape, dtype=torch.bool, device="meta"), address)


def test_parameters_of_a_launch(cuda):
    query, key, value, out, logsumexp = call()
    maps, params = launched(cuda)
    assert maps == [query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()]
    assert (params.out, params.logsumexp) == (out.data_ptr(), logsumexp.data_ptr())
    assert (params.out_stride_batch, params.out_stride_head, params.out_stride_row) == out.stride()[:3]
    assert (params.batch, params.num_heads, params.num_kv_heads) == (2, 4, 2)
    assert (params.seqlen_q, params.seqlen_k) == (300, 500)
    tile = tiles.choose(80, 80, True, 300, 500, 8, NUM_SMS)
    assert params.q_tiles == math.ceil(300 / tile.block_m)
    assert params.num_tiles == params.q_tiles * 8
    assert params.heads_per_group == 8
    assert params.softmax_scale_log2 == pytest.approx(0.25 * math.log2(math.e), rel=1e-6)
    assert list(cuda.config.grid) == [min(NUM_SMS, params.num_tiles), 1, 1]
    assert list(cuda.config.block) == [tile.block_m * 2 + 128, 1, 1]
    assert cuda.config.stream == 77


def test_next_call_patches_pointers_alone(cuda):
    call()
    before = len(cuda.calls)
    query, key, value, out, _ = call(address=1 << 30)
    maps, params = launched(cuda)
    assert maps == [query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()]
    assert params.out == out.data_ptr()
    assert cuda.calls[before:] == ["cuTensorMapReplaceAddress"] * 4 + ["cuLaunchKernelEx"]
    before = len(cuda.calls)
    call(address=1 << 20)
    assert cuda.calls[before:] == ["cuLaunchKernelEx"]
    assert launched(cuda)[0][0] == 1 << 20


def test_without_logsumexp_another_kernel_gets_a_null_pointer(cuda):
    call(lse=False)
    assert launched(cuda)[1].logsumexp is None
    assert cuda.compiled[-1].defines["WRITE_LSE"] == 0
    call()
    assert cuda.compiled[-1].defines["WRITE_LSE"] == 1
    assert len(cuda.compiled) == 2


def test_specialisation_pads_to_the_next_step_of_16(cuda):
    call(head_dim=72, is_causal=False, dtype=torch.float16)
    defines = cuda.compiled[-1].defines
    assert (defines["HEAD_DIM"], defines["HEAD_DIM_V"], defines["IS_CAUSAL"], defines["IS_BF16"]) == (80, 80, 0, 0)
    call(head_dim=192, head_dim_v=128)
    defines = cuda.compiled[-1].defines
    assert (defines["HEAD_DIM"], defines["HEAD_DIM_V"], defines["IS_CAUSAL"], defines["IS_BF16"]) == (192, 128, 1, 1)
    # The map has the tensor's own 72 columns, so that those from 72 to 79 arrive as zeros.
    call(head_dim=72, is_causal=False)
    assert {tensor_map[3][0] for tensor_map in cuda.encodings[-4:]} == {72}


def test_expanded_kv_heads_become_one_head(cuda):
    make = lambda *shape: torch.empty(shape, dtype=torch.float16, device="meta")  # noqa: E731
    query, out = OnDevice(make(2, 8, 64, 64), 1 << 20), OnDevice(make(2, 8, 64, 64), 2 << 20)
    key, value = (OnDevice(make(2, 1, 64, 64).expand(2, 8, 64, 64), p << 20) for p in (3, 4))
    assert forward.walkable(query, key, value)
    forward.forward(query, key, value, False, 1.0, out, None)
    assert launched(cuda)[1].num_kv_heads == 1
    assert [tensor_map[3] for tensor_map in cuda.encodings] == [[64, 64, heads, 2] for heads in (8, 1, 1, 8)]


@pytest.mark.parametrize(
    "change, accepted",
    [
        (lambda q: q, True),
        (lambda q: q.transpose(1, 2).contiguous().transpose(1, 2), True),
        (lambda q: q[:1].expand(2, -1, -1, -1), False),
        (lambda q: q[:, :, ::2], True),
        (lambda q: torch.empty(2, 4, 64, 65, dtype=q.dtype, device="meta")[..., :64], False),
        (lambda q: torch.empty(2, 4, 64, 128, dtype=q.dtype, device="meta")[..., ::2], False),
        (lambda q: torch.empty(2, 4, 64, 72, dtype=q.dtype, device="meta")[..., :64], True),
        (lambda q: torch.empty_strided((1, 4, 64, 64), (3, 4096, 64, 1), dtype=q.dtype, device="meta"), True),
    ],
)
def test_what_the_copy_engine_can_walk(change, accepted):
    plain = torch.empty(2, 4, 64, 64, dtype=torch.float16, device="meta")
    changed = change(plain)
    others = [OnDevice(plain[: changed.size(0)], 1 << 20)] * 2
    for position in range(3):
        tensors = list(others)
        tensors.insert(position, OnDevice(changed, 2 << 20))
        assert forward.walkable(*tensors) is accepted
        assert forward.aligned(*tensors)
        tensors[position] = OnDevice(changed, (2 << 20) + 8)
        assert not forward.aligned(*tensors)


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_fit_the_multiprocessor(head_dim, is_causal):
    for tile in tiles.variants(head_dim, head_dim, is_causal):
        spec = forward.Specialisation(head_dim, head_dim, is_causal, True, True, tile)
        assert spec.shared_bytes <= 227 << 10
        assert tile.block_m % 64 == 0 and tile.block_n % 8 == 0
        assert tile.num_threads <= 512


@pytest.mark.parametrize(
    ("seqlen_k", "expected"),
    [
        (2048, 64),  # keys and values of one head, 2,048 x 128 in bfloat16, are 1 MB; two query heads share them
        (8000, 16),  # 8 fit, but all multiprocessors would be at the longest tiles of few heads
        (8192, 80),  # all
        (64, 80),
    ],
)
def test_heads_whose_tiles_stand_in_one_list(cuda, seqlen_k, expected):
    call(batch=10, heads=8, kv_heads=4, seqlen_k=seqlen_k, head_dim=128)
    assert launched(cuda)[1].heads_per_group == expected


def test_more_keys_than_add_up_accurately_are_refused(cuda):
    """As in routing, which does not know the length where a compiled graph keeps it open."""
    assert forward.MAX_SEQLEN_K == routing.HOPPER_MAX_SEQLEN_K == 4 * attention.SUM_ROWS
    call(heads=1, kv_heads=1, seqlen_q=16, seqlen_k=2**18)
    with pytest.raises(KernelUnavailable, match="262144 keys at most, not 262145"):
        call(heads=1, kv_heads=1, seqlen_q=16, seqlen_k=2**18 + 1)


def test_what_fails_once_is_not_tried_again(cuda, monkeypatch):
    attempts = []

    def fail(source, **_):
        attempts.append(source)
        raise nvrtc.CompileError("no such instruction")

    monkeypatch.setattr(nvrtc, "compile", fail)
    for _ in range(3):
        with pytest.raises(KernelUnavailable, match="no such instruction"):
            call()
    assert len(attempts) == 1
    assert not cuda.calls


def test_driver_that_refuses_is_a_kernel_unavailable(cuda):
    cuda.failures["cuModuleLoadData"] = [209]
    with pytest.raises(KernelUnavailable, match="cuModuleLoadData"):
        call()
    assert "cuLaunchKernelEx" not in cuda.calls


def test_threads_use_launch_arguments_of_their_own(cuda):
    """While one thread is inside the driver, another launches the same plan with other pointers."""
    call()
    seen = []

    def nested(config, function, arguments, extra):
        FakeDriver.do_cuLaunchKernelEx(cuda, config, function, arguments, extra)
        first = launched(cuda)[0][0]
        if len(seen) == 0:
            seen.append(None)
            call(address=5 << 20)
            cuda.arguments = arguments.value
            seen.append((first, launched(cuda)[0][0]))
        return 0

    cuda.do_cuLaunchKernelEx = nested
    call(address=3 << 20)
    assert seen[1] == (3 << 20, 3 << 20)


@pytest.mark.parametrize("code", [1, 701])
def test_launch_that_is_refused_is_a_kernel_unavailable(cuda, code):
    cuda.failures["cuLaunchKernelEx"] = [code]
    with pytest.raises(KernelUnavailable, match="cuLaunchKernelEx"):
        call()


def test_error_of_earlier_work_is_the_callers_to_see(cuda):
    cuda.failures["cuLaunchKernelEx"] = [700]
    with pytest.raises(driver.DriverError, match="CUresult 700"):
        call()


def test_only_causal_kernels_count_tiles(cuda):
    call(is_causal=False)
    assert launched(cuda)[1].counters is None
    call(is_causal=True)
    assert launched(cuda)[1].counters % 32 == 0 and launched(cuda)[1].counters > 0


# ---------------------------------------------------------------------------------------------------------------- masks


def test_parameters_of_a_launch_with_a_mask(cuda, lists):
    mask = bool_mask(2, 1, 304, 512)
    call(seqlen_q=304, seqlen_k=512, head_dim=128, mask=mask)
    _, params = launched(cuda)
    tile = tiles.choose_masked(128, 128, False)
    assert params.mask.mask == mask.data_ptr()
    assert params.mask.lists == FakeLists.address + 8 * FakeLists.offset
    strides = [getattr(params.mask, f"stride_{name}") for name in ("batch", "head", "row", "key")]
    assert strides == [304 * 512, 0, 512, 1]
    assert [getattr(params.mask, f"list_stride_{name}") for name in ("batch", "head", "tile")] == [1000, 100, 10]
    assert (params.mask.list_length, params.mask.vectors) == (512 // tile.block_n, 1)
    assert params.counters > 0 and params.q_tiles == math.ceil(304 / tile.block_m)
    defines = cuda.compiled[-1].defines
    assert (defines["MASKED"], defines["IS_CAUSAL"], defines["BLOCK_M"]) == (1, 0, tile.block_m)
    assert lists[0].tile == tile and lists[0].made == [mask]
    assert (lists[0].call.seqlen_q, lists[0].call.seqlen_k) == (304, 512)


def test_a_launch_without_a_mask_knows_nothing_of_one(cuda, lists):
    call()
    _, params = launched(cuda)
    assert params.mask.mask is None and params.mask.lists is None
    assert cuda.compiled[-1].defines["MASKED"] == 0
    assert not lists


@pytest.mark.parametrize(
    ("seqlen_k", "change", "address", "vectors"),
    [
        (512, lambda m: m, 0, 1),
        (500, lambda m: m, 0, 0),  # the last 16 keys would reach past a row
        (512, lambda m: m, 1, 0),
        (512, lambda m: m, 16, 1),
        (512, lambda m: m.expand(2, 4, 300, 512), 0, 1),
        (512, lambda m: torch.empty(2, 1, 300, 528, dtype=torch.bool, device="meta")[..., :512], 0, 1),
        (512, lambda m: torch.empty(2, 1, 300, 520, dtype=torch.bool, device="meta")[..., :512], 0, 0),
        (512, lambda m: torch.empty(2, 1, 512, 300, dtype=torch.bool, device="meta").mT, 0, 0),
        (512, lambda m: m[..., :1], 0, 0),  # one element for all keys
    ],
)
def test_when_sixteen_keys_are_read_at_once(cuda, lists, seqlen_k, change, address, vectors):
    mask = change(torch.empty(2, 1, 300, seqlen_k, dtype=torch.bool, device="meta"))
    call(seqlen_k=seqlen_k, mask=OnDevice(mask, (3 << 20) + address))
    _, params = launched(cuda)
    assert params.mask.vectors == vectors
    assert params.mask.stride_key == (0 if mask.size(3) == 1 else mask.stride(3))


def test_masks_with_one_row_for_all_queries_have_tiles_of_their_own(cuda, lists):
    row = torch.empty(2, 1, 1, 500, dtype=torch.bool, device="meta")
    for mask in (row, row.expand(2, 4, 300, 500)):
        call(head_dim=128, mask=OnDevice(mask, 3 << 20))
        assert lists[-1].tile == tiles.choose_masked(128, 128, True)
        assert launched(cuda)[1].mask.stride_row == 0


def test_the_next_mask_patches_pointers_alone_unless_its_alignment_differs(cuda, lists):
    call(mask=bool_mask(2, 1, 300, 500))
    call(mask=bool_mask(2, 1, 300, 500, address=5 << 20))
    assert len(lists) == 1 and len(lists[0].made) == 2
    assert launched(cuda)[1].mask.mask == 5 << 20
    call(mask=bool_mask(2, 1, 300, 500, address=(5 << 20) + 4))
    call(mask=bool_mask(1, 1, 300, 500))
    call(mask=bool_mask(2, 4, 300, 500))
    assert len(lists) == 4


def test_masks_that_the_kernel_does_not_take(cuda, lists, monkeypatch):
    tensors = [OnDevice(torch.empty(1, 1, 64, 64, dtype=torch.float16, device="meta"), i << 20) for i in range(1, 5)]
    query, key, value, out = tensors
    with pytest.raises(KernelUnavailable, match="bool masks alone, without is_causal"):
        forward.forward(query, key, value, True, 1.0, out, None, bool_mask(1, 1, 64, 64))
    numbers = OnDevice(torch.empty(1, 1, 64, 64, dtype=torch.float16, device="meta"), 5 << 20)
    with pytest.raises(KernelUnavailable, match="bool masks alone"):
        forward.forward(query, key, value, False, 1.0, out, None, numbers)
    assert not lists and "cuLaunchKernelEx" not in cuda.calls


def test_without_triton_there_are_no_lists(cuda, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_flashbackend.kernels.triton.mask_plan", None)
    monkeypatch.delattr(sys.modules["torch_flashbackend.kernels.triton"], "mask_plan")
    with pytest.raises(KernelUnavailable, match="Triton, which lists the tiles of a mask, is not installed"):
        call(mask=bool_mask(2, 1, 300, 500))
    call()  # which needs none


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_masked_tiles_are_what_lists_can_count_in(head_dim):
    for tile in tiles.masked_variants(head_dim, head_dim):
        spec = forward.Specialisation(head_dim, head_dim, False, True, True, tile, is_masked=True)
        assert spec.shared_bytes <= 227 << 10
        # Powers of two times 64, and bits enough for the keys of two rows in the kernel.
        assert tile.block_m in (64, 128) and tile.block_n in (64, 128)
