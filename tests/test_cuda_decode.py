"""The Hopper decoding kernel without a GPU: what is compiled and launched for a call, and how keys are split."""

from __future__ import annotations

import ctypes
import itertools
import math
import re
from types import SimpleNamespace

import pytest
import torch
from test_cuda_kernels_compile import SHARED_MEMORY, problems
from test_cuda_launch import OnDevice
from test_nvrtc import FakeDriver, install_fake_driver

from torch_flashbackend import _torch, driver, nvrtc
from torch_flashbackend.kernels import KernelUnavailable
from torch_flashbackend.kernels.cuda import decode, decode_tiles, forward

NUM_SMS = 132
ROWS = (1, 16, 17, 32, 33, 64)
HEAD_DIMS = [(16, 16), (64, 64), (80, 80), (128, 128), (192, 128), (192, 192), (256, 256)]
# Of a multiprocessor; each block takes 1 KB beside what it asks for.
ALL_SHARED_MEMORY = 228 << 10


def tiles_of(head_dims, rows):
    return [(dims, tile) for dims in head_dims for of_rows in rows for tile in decode_tiles.variants(*dims, of_rows)]


@pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"no compiler: {nvrtc.unavailable()}")
@pytest.mark.parametrize(("head_dims", "tile"), tiles_of(HEAD_DIMS, (16, 32, 64)), ids=str)
def test_specialisation_has_no_spills(head_dims, tile):
    is_bf16 = (tile.block_n + tile.row_tiles + head_dims[0] // 16) % 2 == 0
    spec = decode.DecodeSpecialisation(*head_dims, is_bf16, tile)
    log = nvrtc.compile(spec.source).log
    assert problems(log) == []
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    assert -(-registers // 8) * 8 * tile.num_threads * tile.blocks <= 65536


@pytest.mark.parametrize("size", range(16, 257, 16))
def test_shared_memory_has_room_for_as_many_blocks_as_are_meant_to_share_it(size):
    for _, tile in tiles_of([(size, size)], ROWS):
        shared = tile.shared_bytes(size, size)
        assert shared <= SHARED_MEMORY and tile.blocks * (shared + 1024) <= ALL_SHARED_MEMORY
        # What a block's warps leave for each other lies where the key and value tiles were.
        partials = 4 * tile.key_warps * 16 * tile.row_tiles * (size + 8)
        assert partials <= tile.ring_bytes(size, size)
        assert tile.block_n % (16 * tile.key_warps) == 0
        assert 16 * tile.row_tiles >= 16


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_block_has_keys(head_dim):
    for units, rows, keys in itertools.product((1, 2, 8, 64, 512, 100_000), ROWS, (1, 16, 100, 1024, 8192, 2**18)):
        tile, splits, groups = decode_tiles.choose(head_dim, head_dim, units, rows, keys, NUM_SMS)
        assert splits * groups <= -(-keys // tile.block_n)
        assert 16 * tile.row_tiles >= rows
        assert splits in decode_tiles.SPLITS and groups in decode_tiles.GROUPS


def test_few_units_with_many_keys_use_most_of_the_gpu_and_many_units_are_not_split():
    _, splits, groups = decode_tiles.choose(128, 128, 8, 4, 131072, NUM_SMS)
    assert 8 * splits * groups >= NUM_SMS // 2
    assert decode_tiles.choose(128, 128, 4096, 4, 1024, NUM_SMS)[1:] == (1, 1)
    assert decode_tiles.choose(128, 128, 8, 4, 64, NUM_SMS)[1:] == (1, 1)


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
    """One that has room for clusters of up to `largest` blocks."""

    largest = 16

    def do_cuOccupancyMaxActiveClusters(self, found, function, config):
        attributes = (driver._Attribute * 2).from_address(config._obj.attributes)
        self.size = next(a.value[0] for a in attributes if a.id == driver._CLUSTER_DIMENSION)
        found._obj.value = int(self.size <= self.largest)
        return 0


@pytest.fixture
def cuda(monkeypatch):
    fake = Driver()
    fake.compiled = []
    install_fake_driver(monkeypatch, fake)
    monkeypatch.setattr(forward, "_device", lambda index: ((9, 0), NUM_SMS))
    monkeypatch.setattr(forward, "_plans", {})
    monkeypatch.setattr(_torch, "empty_float32", lambda like, shape, stride: OnDevice(torch.empty(shape), 1 << 50))

    def compile(source, **_):
        fake.compiled.append(source)
        return nvrtc.Binary(source.key("13.0"), b"\x7fELF", "")

    monkeypatch.setattr(nvrtc, "compile", compile)
    return fake


def call(batch=2, heads=8, kv_heads=2, seqlen_q=1, seqlen_k=1000, head_dim=128, lse=True, is_causal=False,
         address=1 << 20, scale=0.25):  # fmt: skip
    make = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device="meta")  # noqa: E731
    shapes = [(batch, heads, seqlen_q, head_dim), *[(batch, kv_heads, seqlen_k, head_dim)] * 2,
              (batch, heads, seqlen_q, head_dim)]  # fmt: skip
    query, key, value, out = (OnDevice(make(*shape), address + (i << 12)) for i, shape in enumerate(shapes))
    logsumexp = OnDevice(torch.empty(shapes[0][:3], device="meta"), address + (9 << 12)) if lse else None
    forward.forward(query, key, value, is_causal, scale, out, logsumexp)
    return SimpleNamespace(query=query, key=key, value=value, out=out, logsumexp=logsumexp)


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
    chosen = decode.specialise(128, 128, torch.bfloat16, units=4, rows=4, seqlen_k=1000, num_sms=NUM_SMS)
    tile = chosen.specialisation.tile
    assert maps == [tensors.key.data_ptr(), tensors.value.data_ptr()]
    assert (params.query, params.out) == (tensors.query.data_ptr(), tensors.out.data_ptr())
    assert params.logsumexp == tensors.logsumexp.data_ptr()
    assert (params.query_stride_batch, params.query_stride_head, params.query_stride_row) == tensors.query.stride()[:3]
    assert (params.num_kv_heads, params.group_size, params.seqlen_q, params.seqlen_k) == (2, 4, 1, 1000)
    assert params.softmax_scale_log2 == pytest.approx(0.25 * math.log2(math.e), rel=1e-6)
    blocks = chosen.splits * chosen.groups
    assert params.tiles_each * blocks + params.more == -(-1000 // tile.block_n)
    assert list(cuda.config.grid) == [blocks, 2, 2]
    assert cuda.config.block[0] == tile.num_threads and cuda.config.shared_bytes == chosen.specialisation.shared_bytes
    assert attributes == {
        driver._CLUSTER_DIMENSION: [chosen.splits, 1, 1], driver._PROGRAMMATIC_STREAM_SERIALIZATION: [1, 0, 0]
    }  # fmt: skip
    assert ctypes.sizeof(driver._Attribute) == 72


def test_next_call_patches_pointers_alone(cuda):
    call()
    before = len(cuda.calls)
    tensors = call(address=1 << 30)
    maps, params, _ = launched(cuda)
    assert maps == [tensors.key.data_ptr(), tensors.value.data_ptr()] and params.query == tensors.query.data_ptr()
    assert cuda.calls[before:] == ["cuTensorMapReplaceAddress"] * 2 + ["cuLaunchKernelEx"]
    call(address=1 << 30, lse=False)
    assert launched(cuda)[1].logsumexp is None
    assert len(cuda.compiled) == 2 and cuda.compiled[0] == cuda.compiled[1]  # for each plan, which is one binary


def test_workspace_of_clusters_that_share_keys(cuda, monkeypatch):
    monkeypatch.setattr(decode_tiles, "choose", lambda *_: (decode_tiles.variants(128, 128, 4)[0], 2, 4))
    sizes = []
    empty = _torch.empty_float32
    monkeypatch.setattr(
        _torch, "empty_float32", lambda like, shape, stride: sizes.append(shape) or empty(like, shape, 1)
    )
    call()
    _, params, _ = launched(cuda)
    # 4 units, 2 blocks of a cluster, 4 clusters: half of 4 rows of 128 each, and 16 rows of statistics.
    assert sizes == [(4 * 2 * 4 * (4 * 128 // 2 + 2 * 16),)]
    assert params.workspace == 1 << 50 and params.counters % 128 == 0 and params.counters
    assert (params.splits, params.groups) == (2, 4)


def test_smaller_clusters_where_the_device_has_no_room_for_large_ones(cuda, monkeypatch):
    monkeypatch.setattr(decode_tiles, "choose", lambda *_: (decode_tiles.variants(128, 128, 4)[0], 16, 1))
    cuda.largest = 4
    call()
    _, params, attributes = launched(cuda)
    assert params.splits == 4 and attributes[driver._CLUSTER_DIMENSION] == [4, 1, 1]
    assert cuda.config.grid[0] == 4
    assert params.tiles_each == 4 and params.more == 0


def test_which_calls_are_its(cuda):
    def kernel(**options):
        call(**options)
        return cuda.compiled[-1].name

    assert kernel(heads=32, kv_heads=2, seqlen_q=4) == "flash_decode"
    assert kernel(heads=2, kv_heads=2, seqlen_q=16) == "flash_decode"
    assert kernel(heads=32, kv_heads=2, seqlen_q=5) == "flash_forward"  # 80 rows
    assert kernel(heads=2, kv_heads=2, seqlen_q=17) == "flash_forward"
    assert kernel(is_causal=True) == "flash_forward"
    assert kernel(batch=65_536, seqlen_k=16, head_dim=64) == "flash_forward"


def test_refuses_what_the_hopper_kernels_refuse(cuda):
    with pytest.raises(KernelUnavailable, match="positive scale"):
        call(scale=0.0)
    with pytest.raises(KernelUnavailable, match="keys at most"):
        call(batch=1, seqlen_k=2**18 + 1)
