"""The Hopper decoding kernel without a GPU: what is compiled and launched for a call, and how keys are split."""

from __future__ import annotations

import ctypes
import math
import re
from types import SimpleNamespace

import pytest
import torch
from test_cuda_kernels_compile import SHARED_MEMORY, problems
from test_cuda_launch import OnDevice
from test_nvrtc import FakeDriver, install_fake_driver

from torch_flashbackend import driver, nvrtc
from torch_flashbackend.kernels import KernelUnavailable
from torch_flashbackend.kernels.cuda import decode, decode_tiles, forward

ROWS = (1, 16, 17, 32)
HEAD_DIMS = [(16, 16), (64, 64), (80, 80), (128, 128), (192, 128), (192, 192), (256, 256)]
# Of a multiprocessor; each block takes 1 KB beside what it asks for.
ALL_SHARED_MEMORY = 228 << 10


@pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"no compiler: {nvrtc.unavailable()}")
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_specialisation_has_no_spills(head_dims, rows, is_masked):
    tile = decode_tiles.tile_for(*head_dims, rows)
    spec = decode.DecodeSpecialisation(*head_dims, (rows + head_dims[0]) // 16 % 2 == 0, tile, is_masked)
    log = nvrtc.compile(spec.source).log
    assert problems(log) == []
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    assert -(-registers // 8) * 8 * tile.num_threads * tile.blocks <= 65536


@pytest.mark.parametrize("size", range(16, 257, 16))
def test_shared_memory_has_room_for_as_many_blocks_as_are_meant_to_share_it(size):
    for rows in ROWS:
        tile = decode_tiles.tile_for(size, size, rows)
        shared = tile.shared_bytes(size, size)
        assert shared <= SHARED_MEMORY and tile.blocks * (shared + 1024) <= ALL_SHARED_MEMORY
        # What a block's warps leave for each other lies where the key and value tiles were.
        partials = 4 * tile.key_warps * 16 * tile.row_tiles * (size + 8)
        assert partials <= tile.ring_bytes(size, size)
        assert tile.block_n % (16 * tile.key_warps) == 0
        assert 16 * tile.row_tiles >= rows


def test_splits_make_blocks_enough_and_none_without_keys():
    units = (1, 8, 9, 16, 17, 32, 33, 64, 65, 10_000)
    found = {number: decode_tiles.splits_for(number, 1000) for number in units}
    assert found == {1: 8, 8: 8, 9: 8, 16: 4, 17: 4, 32: 2, 33: 2, 64: 2, 65: 1, 10_000: 1}
    assert [decode_tiles.splits_for(8, tiles) for tiles in (1, 2, 3, 4, 7, 8)] == [1, 2, 2, 4, 4, 8]


def test_python_mirrors_the_parameters():
    text = decode.SOURCE.read_text()
    body = re.search(r"struct DecodeParams \{(.*?)\n\};", text, re.DOTALL)[1]
    sizes = {"const uint8_t*": 8, "uint8_t*": 8, "float*": 8, "int*": 8, "int64_t": 8, "int": 4, "float": 4}
    found = []
    for line in body.splitlines():
        declaration = line.split("//")[0].strip().rstrip(";")
        if declaration:
            kind = next(kind for kind in sizes if declaration.startswith(f"{kind} "))
            found += [(name.strip(), sizes[kind]) for name in declaration.removeprefix(kind).split(",")]
    assert found == [(name, ctypes.sizeof(kind)) for name, kind in decode.DecodeParams._fields_]


# --------------------------------------------------------------------------------------------------------------- launch


class Driver(FakeDriver):
    """One that has room for clusters of up to `largest` blocks, one or two of a kind on each multiprocessor."""

    largest = 8
    multiprocessors = 132

    def do_cuOccupancyMaxActiveClusters(self, found, function, config):
        attributes = (driver._Attribute * 2).from_address(config._obj.attributes)
        self.size = next(a.value[0] for a in attributes if a.id == driver._CLUSTER_DIMENSION)
        room = self.multiprocessors * (1 if config._obj.shared_bytes > ALL_SHARED_MEMORY // 2 - 1024 else 2)
        found._obj.value = room // self.size if self.size <= self.largest else 0
        return 0


@pytest.fixture
def cuda(monkeypatch):
    fake = Driver()
    fake.compiled = []
    install_fake_driver(monkeypatch, fake)
    monkeypatch.setattr(forward, "_device", lambda index: ((9, 0), 132))
    monkeypatch.setattr(forward, "_plans", {})

    def compile(source, **_):
        fake.compiled.append(source)
        return nvrtc.Binary(source.key("13.0"), b"\x7fELF", "")

    monkeypatch.setattr(nvrtc, "compile", compile)
    return fake


def call(batch=4, heads=8, kv_heads=2, seqlen_q=1, seqlen_k=1000, head_dim=128, lse=True, is_causal=False,
         address=1 << 20, scale=0.25, mask=None):  # fmt: skip
    make = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device="meta")  # noqa: E731
    shapes = [(batch, heads, seqlen_q, head_dim), *[(batch, kv_heads, seqlen_k, head_dim)] * 2,
              (batch, heads, seqlen_q, head_dim)]  # fmt: skip
    query, key, value, out = (OnDevice(make(*shape), address + (i << 12)) for i, shape in enumerate(shapes))
    logsumexp = OnDevice(torch.empty(shapes[0][:3], device="meta"), address + (9 << 12)) if lse else None
    if mask is not None:
        mask = OnDevice(mask, address + (10 << 12))
    forward.forward(query, key, value, is_causal, scale, out, logsumexp, mask)
    return SimpleNamespace(query=query, key=key, value=value, out=out, logsumexp=logsumexp, mask=mask)


def launched(cuda):
    """(addresses that the two tensor maps hold, parameters, {attribute: its first number}) of the last launch."""
    pointers = (ctypes.c_uint64 * 3).from_address(cuda.arguments)
    maps = [ctypes.c_uint64.from_address(pointers[i]).value for i in range(2)]
    params = decode.DecodeParams.from_buffer_copy(ctypes.string_at(pointers[2], ctypes.sizeof(decode.DecodeParams)))
    attributes = (driver._Attribute * cuda.config.num_attributes).from_address(cuda.config.attributes)
    return maps, params, {attribute.id: list(attribute.value[:3]) for attribute in attributes}


def test_parameters_of_a_launch(cuda):
    tensors = call()
    maps, params, attributes = launched(cuda)
    chosen = decode.specialise(128, 128, torch.bfloat16, units=8, rows=4, seqlen_k=1000)
    tile = chosen.specialisation.tile
    assert maps == [tensors.key.data_ptr(), tensors.value.data_ptr()]
    assert (params.query, params.out) == (tensors.query.data_ptr(), tensors.out.data_ptr())
    assert params.logsumexp == tensors.logsumexp.data_ptr()
    assert (params.query_stride_batch, params.query_stride_head, params.query_stride_row) == tensors.query.stride()[:3]
    assert (params.num_kv_heads, params.group_size, params.seqlen_q, params.seqlen_k) == (2, 4, 1, 1000)
    assert params.softmax_scale_log2 == pytest.approx(0.25 * math.log2(math.e), rel=1e-6)
    assert params.splits == chosen.splits == 8
    assert params.tiles_each * 8 + params.more == -(-1000 // tile.block_n)
    assert list(cuda.config.grid) == [8, 2, 4]
    assert cuda.config.block[0] == tile.num_threads
    assert cuda.config.shared_bytes == chosen.specialisation.shared_bytes_alone
    assert attributes == {
        driver._CLUSTER_DIMENSION: [chosen.splits, 1, 1], driver._PROGRAMMATIC_STREAM_SERIALIZATION: [1, 0, 0]
    }  # fmt: skip
    assert ctypes.sizeof(driver._Attribute) == 72


@pytest.mark.parametrize(
    ("kv_heads", "size", "strides", "batch_and_head"),
    [(2, (4, 1, 1, 1000), None, (1000, 0)), (2, (1, 1, 1, 1000), None, (0, 0)),
     (8, (4, 8, 1, 1000), None, (8000, 1000)), (2, (4, 8, 1, 1000), (1007, 0, 0, 1), (1007, 0)),
     (8, (1, 8, 1, 1000), None, (0, 1000))],
)  # fmt: skip
def test_parameters_of_a_mask(cuda, kv_heads, size, strides, batch_and_head):
    mask = torch.empty_strided(size, strides or torch.empty(size).stride(), dtype=torch.bool, device="meta")
    tensors = call(kv_heads=kv_heads, mask=mask)
    assert cuda.compiled[-1].name == "flash_decode" and "-DMASKED=1" in cuda.compiled[-1].flags
    _, params, _ = launched(cuda)
    assert params.mask == tensors.mask.data_ptr()
    found = params.mask_stride_batch if size[0] > 1 else 0, params.mask_stride_kv_head
    assert found == batch_and_head
    call(kv_heads=kv_heads, mask=mask, address=1 << 30)
    assert launched(cuda)[1].mask == (1 << 30) + (10 << 12)


def test_which_masks_are_its():
    """Bools, with one row in one piece for all queries of a key head."""

    def is_its(*size, strides=None, dtype=torch.bool, kv_heads=2, queries=1, keys=1000):
        mask = torch.empty_strided(size, strides or torch.empty(size).stride(), dtype=dtype, device="meta")
        query = torch.empty(4, 8, queries, 64, device="meta")
        key = torch.empty(4, kv_heads, keys, 64, device="meta")
        return decode.suits(query, key, key, False, mask)

    assert is_its(4, 1, 1, 1000) and is_its(4, 1, 3, 1000, strides=(1000, 0, 0, 1), queries=3)
    assert is_its(4, 8, 1, 1000, kv_heads=8) and is_its(4, 1, 1, 1, keys=1)
    assert not is_its(4, 8, 1, 1000) and not is_its(4, 1, 3, 1000, queries=3)
    assert not is_its(4, 1, 1, 1) and not is_its(4, 1, 1, 1000, strides=(2000, 2000, 2000, 2))
    assert not is_its(4, 1, 1, 1000, dtype=torch.bfloat16)


def test_next_call_patches_pointers_alone(cuda):
    call()
    before = len(cuda.calls)
    tensors = call(address=1 << 30)
    maps, params, _ = launched(cuda)
    assert maps == [tensors.key.data_ptr(), tensors.value.data_ptr()] and params.query == tensors.query.data_ptr()
    assert cuda.calls[before:] == ["cuTensorMapReplaceAddress"] * 2 + ["cuLaunchKernelEx"]
    call(address=1 << 30, lse=False)
    assert launched(cuda)[1].logsumexp is None
    assert len(cuda.compiled) == 1  # of both plans


@pytest.mark.parametrize(("batch", "multiprocessors"), [(4, 132), (32, 132), (66, 132), (67, 132), (4, 63), (4, 64)])
def test_blocks_that_can_have_a_multiprocessor_of_their_own_do(cuda, batch, multiprocessors):
    cuda.multiprocessors = multiprocessors
    call(batch=batch)
    spec = decode.specialise(128, 128, torch.bfloat16, units=2 * batch, rows=4, seqlen_k=1000).specialisation
    room = batch * 2 * launched(cuda)[1].splits <= multiprocessors
    assert cuda.config.shared_bytes == (spec.shared_bytes_alone if room else spec.shared_bytes)
    assert 2 * (spec.shared_bytes_alone + 1024) > ALL_SHARED_MEMORY >= 2 * (spec.shared_bytes + 1024)
    assert room == (batch < 67 and multiprocessors > 63)


@pytest.mark.parametrize(("batch", "seqlen_k", "begins_early"), [(4, 1000, True), (4, 24_575, True), (4, 24_576, False),
                                                                 (66, 1500, False), (67, 1500, True)])  # fmt: skip
def test_long_launches_of_few_blocks_wait_until_the_gpu_is_empty(cuda, batch, seqlen_k, begins_early):
    call(batch=batch, seqlen_k=seqlen_k)
    assert (driver._PROGRAMMATIC_STREAM_SERIALIZATION in launched(cuda)[2]) == begins_early
    mask = torch.empty(batch, 1, 1, seqlen_k, dtype=torch.bool, device="meta")  # of which all but little may be hidden
    call(batch=batch, seqlen_k=seqlen_k, mask=mask)
    assert driver._PROGRAMMATIC_STREAM_SERIALIZATION in launched(cuda)[2]


def test_smaller_clusters_where_the_device_has_no_room_for_large_ones(cuda):
    cuda.largest = 2
    call()
    _, params, attributes = launched(cuda)
    assert params.splits == 2 and attributes[driver._CLUSTER_DIMENSION] == [2, 1, 1]
    assert cuda.config.grid[0] == 2
    assert params.tiles_each == 8 and params.more == 0


def test_a_driver_that_cannot_say_what_there_is_room_for_is_asked_again(cuda):
    cuda.failures["cuOccupancyMaxActiveClusters"] = [2] * 8  # out of memory
    call()
    assert launched(cuda)[1].splits == 1
    cuda.failures.clear()
    call(seqlen_k=1024)  # another plan, the same function
    assert launched(cuda)[1].splits == 8


def test_which_calls_are_its(cuda):
    def kernel(**options):
        call(**options)
        return cuda.compiled[-1].name

    assert kernel(heads=16, kv_heads=2, seqlen_q=4) == "flash_decode"
    assert kernel(heads=2, kv_heads=2, seqlen_q=16) == "flash_decode"
    assert kernel(heads=16, kv_heads=2, seqlen_q=5) == "flash_forward"  # 40 rows
    assert kernel(heads=2, kv_heads=2, seqlen_q=17) == "flash_forward"
    assert kernel(is_causal=True) == "flash_forward"


@pytest.mark.parametrize(
    ("batch", "seqlen_k", "name"),
    [(1, 2048, "decode"), (1, 2049, "forward"), (2, 8192, "decode"), (2, 8193, "forward"), (4, 100_000, "decode"),
     (5, 1000, "decode"), (128, 100_000, "decode")],
)  # fmt: skip
def test_only_calls_that_gain_by_it_are_its(cuda, batch, seqlen_k, name):
    call(batch=batch, seqlen_k=seqlen_k)
    assert cuda.compiled[-1].name == f"flash_{name}"


def test_no_grid_is_larger_than_the_driver_takes(monkeypatch):
    monkeypatch.setattr(decode_tiles, "pays", lambda *_: True)
    assert decode.takes(65_535, 1, 1, 100, 1, False) and not decode.takes(65_536, 1, 1, 100, 1, False)


def test_refuses_what_the_hopper_kernels_refuse(cuda):
    with pytest.raises(KernelUnavailable, match="positive scale"):
        call(scale=0.0)
    with pytest.raises(KernelUnavailable, match="keys at most"):
        call(seqlen_k=2**18 + 1)
