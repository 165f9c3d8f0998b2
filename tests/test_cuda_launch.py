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
from torch_flashbackend.kernels.cuda import dropout, forward, masks, tiles
from torch_flashbackend.kernels.triton import attention

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


def launched(cuda, num_maps=4):
    """(addresses that the four tensor maps hold, the parameters) of the last launch."""
    pointers = (ctypes.c_uint64 * (num_maps + 1)).from_address(cuda.arguments)
    maps = [ctypes.c_uint64.from_address(pointers[i]).value for i in range(4)]
    return maps, forward.ForwardParams.from_buffer_copy(
        ctypes.string_at(pointers[num_maps], ctypes.sizeof(forward.ForwardParams))
    )


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


@pytest.mark.parametrize(("head_dim", "expected"), [(72, 2), (120, 2), (80, 3), (128, 3)])
def test_what_l2_fetches_for_rows_at_odd_multiples_of_16_bytes(cuda, head_dim, expected):
    call(head_dim=head_dim)
    assert {tensor_map[9] for tensor_map in cuda.encodings} == {expected}


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
        assert tile.num_threads <= 640


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "seqlen", "batch_heads", "block_m"),
    [
        (64, 4096, 64, 256),
        (64, 4096, 8, 256),  # one tile of 256 rows for each multiprocessor, all but four
        (64, 512, 32, None),  # 64 tiles of 256 rows would leave half of them idle
        (64, 520, 1000, None),  # rows of a third tile that are not there
        (64, 300, 1000, None),
        (64, 256, 1000, 256),
        (64, 197, 384, 256),
        (64, 197, 12, None),
        (64, 256, 12, None),  # twice as many blocks of 128 rows
        (64, 128, 1000, None),
        (32, 4096, 64, None),
        (72, 4096, 64, 256),
        (72, 512, 512, 256),
        (72, 300, 2, None),
        (80, 4096, 64, 192),
        (80, 1024, 64, None),
        (88, 4096, 64, None),
        (128, 4096, 64, None),
    ],
)
def test_when_tiles_are_larger(head_dim, seqlen, batch_heads, block_m, is_causal):
    padded = -(-head_dim // 16) * 16
    tile = tiles.choose(padded, head_dim, is_causal, seqlen, seqlen, batch_heads, 132)
    usual = tiles.choose_usual(padded, padded, is_causal, seqlen)
    assert tile == usual if block_m is None else tile.block_m == block_m
    assert tile.exact_value == (head_dim == 72 and block_m == 256)
    assert tile.rotate == (is_causal and block_m == 256)


def test_short_causal_calls_of_head_dim_128(cuda):
    """Few heads in one list, where each head has keys of its own, and warpgroups that exchange their rows."""
    call(batch=20, heads=8, kv_heads=8, seqlen_q=512, seqlen_k=512, head_dim=128)
    assert launched(cuda)[1].heads_per_group == math.ceil(NUM_SMS / 4)
    assert cuda.compiled[-1].defines["ROTATE"] == 1
    call(batch=20, heads=8, kv_heads=4, seqlen_q=512, seqlen_k=512, head_dim=128)
    assert launched(cuda)[1].heads_per_group == 160
    call(batch=20, heads=8, kv_heads=8, seqlen_q=512, seqlen_k=512, head_dim=128, is_causal=False)
    assert cuda.compiled[-1].defines["ROTATE"] == 0


def test_value_of_head_dim_72_in_large_tiles(cuda):
    call(batch=8, heads=32, kv_heads=32, seqlen_q=512, seqlen_k=512, head_dim=72)
    defines = cuda.compiled[-1].defines
    assert (defines["HEAD_DIM"], defines["HEAD_DIM_V"], defines["BLOCK_M"]) == (80, 72, 256)
    assert launched(cuda)[1].head_dim_v == 72


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


def test_a_machine_without_a_driver_is_a_kernel_unavailable(cuda, monkeypatch):
    """PyTorch's CUDA builds are installed on such machines, too. It is looked for once per plan."""
    looked = []

    def absent():
        looked.append(1)
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(driver, "_library", absent)
    for _ in range(2):
        with pytest.raises(KernelUnavailable, match="libcuda"):
            call()
    assert len(looked) == 1


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

LISTS = 7 << 20  # where the lists lie


@pytest.fixture
def masked(cuda, monkeypatch):
    """`cuda`, which also notes (config, ListParams) of each launch that makes lists, and the sizes of these."""
    cuda.lists, cuda.sizes = [], []

    def empty(size, device):
        cuda.sizes.append(size)
        return OnDevice(torch.empty(size, device="meta"), LISTS)

    def launch(config, function, arguments, extra):
        if config._obj.block[0] == masks.THREADS:
            (params,) = (ctypes.c_uint64 * 1).from_address(arguments.value)
            copied = masks.ListParams.from_buffer_copy(ctypes.string_at(params, ctypes.sizeof(masks.ListParams)))
            cuda.lists.append((driver.LaunchConfig.from_buffer_copy(config._obj), copied))
            return 0
        return FakeDriver.do_cuLaunchKernelEx(cuda, config, function, arguments, extra)

    monkeypatch.setattr(masks, "_empty", empty)
    cuda.do_cuLaunchKernelEx = launch
    return cuda


def bool_mask(*shape, address=3 << 20):
    return OnDevice(torch.empty(shape, dtype=torch.bool, device="meta"), address)


def mask_strides(params):
    return [getattr(params, f"stride_{name}") for name in ("batch", "head", "row", "key")]


def list_strides(params):
    return [getattr(params, f"list_stride_{name}") for name in ("batch", "head", "tile")]


def test_parameters_of_a_launch_with_a_mask(masked):
    mask = bool_mask(2, 1, 304, 512)
    call(seqlen_q=304, seqlen_k=512, head_dim=128, mask=mask)
    _, params = launched(masked)
    tile = tiles.choose_masked(128, 128, False)
    q_tiles, length = math.ceil(304 / tile.block_m), 2 + 512 // tile.block_n
    ((config, lists),) = masked.lists
    for found in (params.mask, lists.mask):
        assert (found.mask, found.lists) == (mask.data_ptr(), LISTS)
        assert mask_strides(found) == [304 * 512, 0, 512, 1]
        assert list_strides(found) == [q_tiles * length, 0, length]
        assert found.access == masks.ALIGNED
    assert params.counters > 0 and params.q_tiles == q_tiles
    assert (lists.mask_heads, lists.mask_rows, lists.seqlen_k, lists.q_tiles) == (1, 304, 512, q_tiles)
    # One block for each list, a byte of shared memory for every 16 keys, and room for all lists.
    assert list(config.grid) == [2 * q_tiles, 1, 1] and config.shared_bytes == 32 and config.stream == 77
    assert masked.sizes == [2 * q_tiles * length]
    defines = masked.compiled[-1].defines
    assert (defines["MASKED"], defines["IS_CAUSAL"], defines["BLOCK_M"]) == (1, 0, tile.block_m)


def test_a_launch_without_a_mask_knows_nothing_of_one(masked):
    call()
    _, params = launched(masked)
    assert params.mask.mask is None and params.mask.lists is None
    assert masked.compiled[-1].defines["MASKED"] == 0
    assert not masked.lists


@pytest.mark.parametrize(
    ("seqlen_k", "change", "address", "access"),
    [
        (512, lambda m: m, 0, masks.ALIGNED),
        (500, lambda m: m, 0, masks.DENSE),  # the last 16 keys would reach past a row
        (512, lambda m: m, 1, masks.DENSE),
        (512, lambda m: m, 16, masks.ALIGNED),
        (512, lambda m: m.expand(2, 4, 300, 512), 0, masks.ALIGNED),
        (512, lambda m: torch.empty(2, 1, 300, 528, dtype=m.dtype, device="meta")[..., :512], 0, masks.ALIGNED),
        (512, lambda m: torch.empty(2, 1, 300, 520, dtype=m.dtype, device="meta")[..., :512], 0, masks.DENSE),
        (512, lambda m: torch.empty(2, 1, 512, 300, dtype=m.dtype, device="meta").mT, 0, masks.STRIDED),
        (512, lambda m: torch.empty(2, 1, 300, 1024, dtype=m.dtype, device="meta")[..., ::2], 0, masks.STRIDED),
        (512, lambda m: m[..., :1], 0, masks.STRIDED),  # one element for all keys
    ],
)
def test_how_a_row_of_the_mask_is_read(masked, seqlen_k, change, address, access):
    mask = change(torch.empty(2, 1, 300, seqlen_k, dtype=torch.bool, device="meta"))
    call(seqlen_k=seqlen_k, mask=OnDevice(mask, (3 << 20) + address))
    _, params = launched(masked)
    assert params.mask.access == access
    assert params.mask.stride_key == (0 if mask.size(3) == 1 else mask.stride(3))


@pytest.mark.parametrize(
    ("shape", "expand", "lists"),
    [
        ((2, 4, 300, 500), None, 2 * 4 * 3),
        ((1, 1, 300, 500), None, 3),
        ((1, 4, 300, 500), None, 4 * 3),
        ((2, 1, 1, 500), None, 2),
        ((1, 1, 1, 1), None, 1),
        ((2, 1, 300, 500), (2, 4, 300, 500), 2 * 3),
        ((1, 1, 1, 500), (2, 4, 300, 500), 1),
    ],
)
def test_lists_are_made_for_what_the_mask_does_not_share(masked, shape, expand, lists):
    mask = torch.empty(shape, dtype=torch.bool, device="meta")
    call(head_dim=128, mask=OnDevice(mask if expand is None else mask.expand(expand), 3 << 20))
    params = launched(masked)[1].mask
    tile = tiles.choose_masked(128, 128, shape[2] == 1)
    assert masked.compiled[-1].defines["BLOCK_N"] == tile.block_n
    length = 2 + math.ceil(500 / tile.block_n)
    assert masked.sizes == [lists * length]
    config, made = masked.lists[0]
    assert config.grid[0] == lists
    assert made.q_tiles * made.mask_heads * (2 if shape[0] == 2 else 1) == lists
    rows = [3 if size == 300 else size for size in shape[:3]]
    steps = [rows[1] * rows[2] * length, rows[2] * length, length]
    assert list_strides(params) == [step if size > 1 else 0 for step, size in zip(steps, shape)]


def test_the_next_mask_patches_pointers_alone_unless_its_alignment_differs(masked):
    call(mask=bool_mask(2, 1, 300, 500))
    before = len(masked.calls)
    call(mask=bool_mask(2, 1, 300, 500, address=5 << 20))
    assert masked.calls[before:] == ["cuLaunchKernelEx"] * 2
    assert launched(masked)[1].mask.mask == masked.lists[-1][1].mask.mask == 5 << 20
    assert len(forward._plans) == 1
    call(mask=bool_mask(2, 1, 300, 500, address=(5 << 20) + 4))
    call(mask=bool_mask(1, 1, 300, 500))
    call(mask=bool_mask(2, 4, 300, 500))
    call()
    assert len(forward._plans) == 5


def test_masks_that_the_kernel_does_not_take(masked):
    tensors = [OnDevice(torch.empty(1, 1, 64, 64, dtype=torch.float16, device="meta"), i << 20) for i in range(1, 5)]
    query, key, value, out = tensors
    with pytest.raises(KernelUnavailable, match="no mask together with is_causal"):
        forward.forward(query, key, value, True, 1.0, out, None, bool_mask(1, 1, 64, 64))
    with pytest.raises(KernelUnavailable, match="no mask together with dropout"):
        forward.forward(query, key, value, False, 1.0, out, None, bool_mask(1, 1, 64, 64), None, 0.5)
    numbers = OnDevice(torch.empty(1, 1, 64, 68, dtype=torch.float16, device="meta")[..., :64], 5 << 20)
    with pytest.raises(KernelUnavailable, match="cannot walk a float mask"):
        forward.forward(query, key, value, False, 1.0, out, None, numbers)
    assert "cuLaunchKernelEx" not in masked.calls


def test_lists_that_cannot_be_launched_are_a_kernel_unavailable(masked):
    masked.failures["cuLaunchKernelEx"] = [701]
    with pytest.raises(KernelUnavailable, match="cuLaunchKernelEx"):
        call(mask=bool_mask(2, 1, 300, 500))
    call(mask=bool_mask(2, 1, 300, 500))


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_masked_tiles_are_made_of_whole_pieces(head_dim):
    for tile in tiles.masked_variants(head_dim, head_dim):
        spec = forward.Specialisation(head_dim, head_dim, False, True, True, tile, is_masked=True)
        assert spec.shared_bytes <= 227 << 10
        # Bits enough, too, for the keys of a row in one word of the kernel's.
        assert tile.block_n % masks.PIECE == 0 and tile.block_n <= 128


# ---------------------------------------------------------------------------------------------------------- float masks


def float_mask(*shape, dtype=torch.bfloat16, address=3 << 20, pitch=None):
    shape = (*shape[:3], shape[3] if pitch is None else pitch)
    return OnDevice(torch.empty(shape, dtype=dtype, device="meta"), address)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 4, 304, 512), torch.bfloat16),
        ((1, 4, 304, 512), torch.bfloat16),
        ((2, 1, 304, 512), torch.float32),
        ((2, 1, 1, 512), torch.bfloat16),
        ((1, 1, 1, 512), torch.float32),
    ],
)
def test_parameters_of_a_launch_with_a_float_mask(masked, shape, dtype):
    mask = float_mask(*shape, dtype=dtype)
    call(seqlen_q=304, seqlen_k=512, head_dim=128, mask=mask)
    size, per_key = dtype.itemsize, shape[2] == 1
    tile = tiles.choose_biased(128, 128, size, per_key)
    defines = masked.compiled[-1].defines
    expected = {"MASKED": 1, "BIAS_BYTES": size, "BIAS_PER_KEY": int(per_key), "BIAS_STAGES": tile.mask_stages}
    assert expected.items() <= defines.items()
    # The mask's own map: what it has in memory, in boxes of 128 bytes a row.
    pointers = (ctypes.c_uint64 * 6).from_address(masked.arguments)
    assert ctypes.c_uint64.from_address(pointers[4]).value == mask.data_ptr()
    encoded = masked.encodings[-5]
    assert list(encoded[3]) == [512, shape[2], shape[1], shape[0]]
    assert list(encoded[5]) == [128 // size, 1 if per_key else tile.block_m, 1, 1]
    _, params = launched(masked, 5)
    assert params.softmax_scale == pytest.approx(0.25)
    # Tiles of all batches of a head come next to each other where they share its mask.
    assert params.batch_first == (shape[0] == 1)
    ((config, lists),) = masked.lists
    assert config.shared_bytes == 512 * size // 16 and lists.mask_rows == shape[2]


@pytest.mark.parametrize(
    ("change", "address", "taken"),
    [
        (lambda m: m, 0, True),
        (lambda m: m.expand(2, 4, 300, 512), 0, True),
        (lambda m: torch.empty(2, 1, 300, 520, dtype=m.dtype, device="meta")[..., :512], 0, True),
        (lambda m: torch.empty(2, 1, 300, 515, dtype=m.dtype, device="meta")[..., :512], 0, False),
        (lambda m: torch.empty(2, 1, 512, 300, dtype=m.dtype, device="meta").mT, 0, False),
        (lambda m: m[..., :1], 0, False),
        (lambda m: m, 2, False),
        (lambda m: m.half(), 0, False),
        (lambda m: m.float(), 0, True),
        (lambda m: m.bool(), 2, True),
    ],
)
def test_float_masks_that_the_kernel_reads(change, address, taken):
    query = torch.empty(2, 4, 300, 64, dtype=torch.bfloat16, device="meta")
    mask = change(torch.empty(2, 1, 300, 512, dtype=torch.bfloat16, device="meta"))
    assert forward.takes_mask(query, OnDevice(mask, (3 << 20) + address)) is taken


def test_float32_masks_leave_no_registers_above_a_head_dim():
    assert tiles.MAX_FLOAT32_BIAS_HEAD_DIM == routing.HOPPER_MAX_BIAS_HEAD_DIM
    assert tiles.MAX_DROPOUT_HEAD_DIM == routing.HOPPER_MAX_DROPOUT_HEAD_DIM
    for head_dim, taken in ((192, True), (200, False)):
        query = torch.empty(1, 1, 64, head_dim, dtype=torch.bfloat16, device="meta")
        assert forward.takes_mask(query, float_mask(1, 1, 64, 64, dtype=torch.float32)) is taken


@pytest.mark.parametrize("head_dims", [*((size, size) for size in range(16, 257, 16)), (192, 128)])
def test_tiles_with_a_float_mask_fit_the_multiprocessor(head_dims):
    for tile, size, per_key in tiles.biased_variants(*head_dims):
        spec = forward.Specialisation(*head_dims, False, True, True, tile, True, size, per_key)
        assert spec.shared_bytes <= 227 << 10
        assert tile.block_n % (128 // size) == 0 and tile.block_n % (16 // size) == 0


# -------------------------------------------------------------------------------------------------------------- dropout

KEYS = 6 << 20  # where the table of random keys lies


def test_parameters_of_a_launch_with_dropout(cuda, monkeypatch):
    sizes = []

    def empty(size, device):
        sizes.append(size)
        return OnDevice(torch.empty(size, device="meta"), KEYS)

    monkeypatch.setattr(dropout, "_empty", empty)
    before = len(cuda.calls)
    query, key, value, out = (
        OnDevice(torch.empty(2, heads, length, 128, dtype=torch.float16, device="meta"), address << 20)
        for heads, length, address in ((4, 300, 1), (2, 500, 2), (2, 500, 3), (4, 300, 4))
    )
    seed = OnDevice(torch.empty(1, dtype=torch.int64, device="meta"), 9 << 20)
    forward.forward(query, key, value, True, 1.0, out, None, None, seed, 0.25)
    assert cuda.calls[before:].count("cuLaunchKernelEx") == 2
    assert sizes == [8 * (512 + 512)]  # queries and keys of each head, padded to 256
    _, params = launched(cuda)
    assert (params.dropout.keys, params.dropout.threshold) == (KEYS, 2**14 << 16)
    assert params.dropout.scale == pytest.approx(4 / 3)
    assert cuda.compiled[-1].defines["DROPOUT"] == 1
    forward.forward(query, key, value, True, 1.0, out, None)
    assert cuda.compiled[-1].defines["DROPOUT"] == 0
    assert dropout.params_of(1.0).scale == 0.0 and dropout.params_of(1.0).threshold == 0xFFFF0000


@pytest.mark.parametrize("head_dim", range(16, 193, 16))
def test_tiles_with_dropout_fit_the_multiprocessor_and_the_table(head_dim):
    tile = tiles.choose_dropout(head_dim, head_dim)
    spec = forward.Specialisation(head_dim, head_dim, True, True, True, tile, has_dropout=True)
    assert spec.shared_bytes <= 227 << 10 and dropout.PITCH % tile.block_n == 0
