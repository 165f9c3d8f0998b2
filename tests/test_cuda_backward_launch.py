"""The host side of the Hopper backward: what is launched for a call, with a stub for the driver; and who calls it."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import heapq
import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from hooked import sample
from test_cuda_launch import OnDevice
from test_nvrtc import FakeDriver, install_fake_driver

from torch_flashbackend import driver, nvrtc, ops, precompile, reference, routing
from torch_flashbackend.batch_invariance import set_batch_invariant
from torch_flashbackend.kernels import KernelUnavailable
from torch_flashbackend.kernels.cuda import backward, backward_parts, dropout, forward, masks, tiles
from torch_flashbackend.plans import Recent, Repeat
from torch_flashbackend.problem import Problem

MEMORY = 1 << 30
LISTS, TABLE = 1 << 29, 1 << 28  # of a mask, of dropout
TABLE_OF_DENSE_CALLS = tiles.choose_backward


@pytest.fixture
def cuda(monkeypatch):
    """A driver and a compiler that answer without doing anything; `launches`: what each launch was given."""
    fake = FakeDriver()
    fake.compiled, fake.launches, fake.counted = [], [], []
    install_fake_driver(monkeypatch, fake)
    monkeypatch.setattr(forward, "_device", lambda index: ((9, 0), 10))
    monkeypatch.setattr(backward, "_plans", {})

    def compile(source, **_):
        fake.compiled.append(source)
        return nvrtc.Binary(source.key("13.0"), b"\x7fELF", "")

    def launch(config, function, arguments, index, stream):
        fake.launches.append((list(config.grid), list(config.block), config.shared_bytes, arguments.value))

    monkeypatch.setattr(nvrtc, "compile", compile)
    monkeypatch.setattr(driver, "launch", launch)
    monkeypatch.setattr(driver, "counters", lambda index, stream, size: fake.counted.append(size) or 4096)

    def allocate(like, floats):
        """The workspace: at a known address, its size kept."""
        fake.workspace = floats
        return SimpleNamespace(data_ptr=lambda: MEMORY)

    monkeypatch.setattr(backward, "_allocate", allocate)
    # Whatever the table says of other forms, which tests ask for by a tile of their own.
    monkeypatch.setattr(tiles, "choose_backward", tiles.choose_backward_usual)
    return fake


def tensors(
    batch=2, heads=4, kv_heads=2, seqlen_q=300, seqlen_k=500, head_dim=72, head_dim_v=None, dtype=torch.bfloat16
):
    """In the order of Plan's arguments, at addresses of their own."""
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    query, key = (batch, heads, seqlen_q, head_dim), (batch, kv_heads, seqlen_k, head_dim)
    value, out = (batch, kv_heads, seqlen_k, head_dim_v), (batch, heads, seqlen_q, head_dim_v)
    made = [torch.zeros(1, dtype=dtype, device="meta").expand(shape).contiguous() for shape in (query, key, value, out)]
    lse = torch.zeros(query[:3], device="meta")
    listed = [*made, lse, made[3], *made[:3]]
    on_device = [OnDevice(tensor, (index + 1) << 20) for index, tensor in enumerate(listed)]
    on_device[4].is_contiguous = lambda: True
    return on_device


def run(
    listed, is_causal=True, scale=0.25, deterministic=False, mask=None, dropout_p=0.0, seed=None, delta=None, made=None
):  # fmt: skip
    query, key, value, out, lse, grad_out, grad_query, grad_key, grad_value = listed
    backward.backward(
        grad_out, query, key, value, out, lse, is_causal, scale, grad_query, grad_key, grad_value, deterministic, mask,
        dropout_p, seed, delta, made,
    )  # fmt: skip


def params_of(cuda, launch, num_maps=6):
    """(the addresses in the tensor maps of the main kernel, the parameters) of a launch."""
    *maps, params = (ctypes.c_void_p * (num_maps + 1)).from_address(cuda.launches[launch][3])
    addresses = [ctypes.c_uint64.from_address(address).value for address in maps]
    size = ctypes.sizeof(backward.BackwardParams)
    return addresses, backward.BackwardParams.from_buffer_copy(ctypes.string_at(params, size))


@pytest.mark.parametrize("head_dim", [72, 256])
@pytest.mark.parametrize(("seqlen_q", "deterministic"), [(300, False), (300, True), (9000, False)])
def test_parameters_of_the_launches(cuda, head_dim, seqlen_q, deterministic):
    listed = tensors(head_dim=head_dim, seqlen_q=seqlen_q)
    query, key, value, out, lse, grad_out, grad_query, grad_key, grad_value = listed
    run(listed, deterministic=deterministic)
    padded = 80 if head_dim == 72 else 256
    # Two query heads share a key head. Short calls: a block for each of the 10 multiprocessors.
    tile = tiles.choose_backward(padded, padded, True, 2 * seqlen_q, deterministic)
    assert tile.persistent == (head_dim == 72 and seqlen_q == 300)
    q_tiles, k_tiles = math.ceil(seqlen_q / tile.block_m), math.ceil(500 / tile.block_n)
    threads = 512 if head_dim > 128 else 128 * (tile.block_n // 64 + 1)
    grids, blocks = [launch[0] for launch in cuda.launches], [launch[1] for launch in cuda.launches]
    assert grids == [[q_tiles * 8, 1, 1], [10 if tile.persistent else k_tiles * 4, 1, 1], [q_tiles * 8, 1, 1]]
    assert blocks == [[256, 1, 1], [threads, 1, 1], [128 * tile.block_n // 64, 1, 1]]
    addresses, params = params_of(cuda, 1)
    walked = (query, key, value, grad_out, grad_key, grad_value)
    assert addresses == [tensor.data_ptr() for tensor in walked]
    assert (params.out, params.grad_out) == (out.data_ptr(), grad_out.data_ptr())
    assert (params.logsumexp, params.grad_query) == (lse.data_ptr(), grad_query.data_ptr())
    assert (params.logsumexp_pitch, params.q_tiles, params.k_tiles) == (seqlen_q, q_tiles, k_tiles)
    assert (params.head_dim, params.head_dim_v, params.num_kv_heads) == (head_dim, head_dim, 2)
    assert params.softmax_scale_log2 == pytest.approx(0.25 * math.log2(math.e), rel=1e-6)
    # The statistics wait where the gradient will be; sums and semaphores are the workspace.
    sums = 8 * q_tiles * tile.block_m * padded
    assert params.statistics == grad_query.data_ptr()
    assert params.sums == MEMORY
    assert params.semaphores == params.sums + 4 * sums
    assert cuda.workspace == sums + (8 * q_tiles * tile.num_warpgroups if deterministic else 0)
    assert params.counters == (4096 if deterministic or tile.persistent else None)
    defines = cuda.compiled[-1].defines
    assert (defines["HEAD_DIM"], defines["DETERMINISTIC"]) == (padded, deterministic)
    # The other kernels have the same parameters as their only argument.
    for launch in (0, 2):
        (address,) = (ctypes.c_void_p * 1).from_address(cuda.launches[launch][3])
        assert ctypes.string_at(address, 8) == out.data_ptr().to_bytes(8, "little")


@pytest.mark.parametrize(
    ("head_dim", "persistent", "paired"),
    [(64, False, False), (64, True, False), (128, False, False), (256, False, True)],
)
def test_one_kernel_that_does_all(cuda, monkeypatch, head_dim, persistent, paired):
    chosen = tiles.choose_backward(head_dim, head_dim, True, 1400, False)
    tile = dataclasses.replace(chosen, fused=True, paired=paired, persistent=persistent, direct=False)
    plain = tiles.choose_backward_usual(head_dim, head_dim, True, 1400, False)
    monkeypatch.setattr(tiles, "choose_backward", lambda *_: tile)
    listed = tensors(batch=8, head_dim=head_dim, seqlen_q=700)
    run(listed)
    (launch,) = cuda.launches
    _, params = params_of(cuda, 0)
    cluster = 2 if paired else 1
    q_tiles, k_tiles = math.ceil(700 / tile.block_m), math.ceil(500 / (tile.block_n * cluster))
    assert params.chunk_tiles * tile.block_m == 512
    assert params.chunks == math.ceil(2 * q_tiles / params.chunk_tiles)
    items = 16 * (2 * params.chunks + k_tiles) * cluster
    assert launch[0] == [min(items, 10) if persistent else items, 1, 1]
    assert params.heads_per_group == max(1, 10 // (k_tiles * cluster))
    # Statistics and sums are the workspace, the sums of four groups of heads, or of as many as leave room for the
    # statistics: no more than the sums of all.
    assert params.slots == (4 * params.heads_per_group if head_dim == 256 else 15)
    assert params.statistics == MEMORY
    assert params.sums == MEMORY + 4 * 32 * q_tiles * tile.block_m * 2
    assert cuda.workspace == (params.sums - MEMORY) // 4 + 2 * params.slots * q_tiles * tile.block_m * head_dim
    assert cuda.workspace <= 32 * q_tiles * tile.block_m * head_dim
    # What is counted lies behind the counters: a number for each key head, and one for each of its chunks.
    assert (params.counters, params.semaphores) == (4096, 4096 + 128)
    assert cuda.counted == [128 + 4 * 16 * (1 + params.chunks)]
    # Where nobody needs the query's gradient there is nothing to finish.
    listed[6] = None
    run(listed)
    assert [launch[0][0] for launch in cuda.launches[1:]] == [
        32 * math.ceil(700 / plain.block_m),
        10 if plain.persistent else 16 * math.ceil(500 / plain.block_n),
    ]


def test_addresses_that_the_copy_engine_cannot_walk_are_refused_before_any_launch(cuda):
    """A backward found again is compared with tensors of other addresses."""
    listed = tensors()
    run(listed)
    plan = next(iter(backward._plans.values()))
    repeat = Repeat(plan, listed[6:], (True, True, True, False))
    query, key, value, out, lse, grad_out = listed[:6]
    cuda.launches.clear()
    for index in (0, 1, 2, 3, 5):
        moved = [OnDevice(t._tensor, t.data_ptr() + 8 * (index == n)) for n, t in enumerate(listed[:6])]
        with pytest.raises(KernelUnavailable, match="multiples of 16"):
            plan(*moved, *listed[6:])
    with pytest.raises(KernelUnavailable):
        repeat(grad_out, query, key, value, out, lse, torch.zeros(33, dtype=torch.bool)[1:])
    assert not cuda.launches


@pytest.mark.parametrize(("head_dim", "persistent"), [(64, True), (128, True), (256, False)])
def test_first_queries_without_sums(cuda, monkeypatch, head_dim, persistent):
    """Statistics and sums begin at one address: those of a head's first queries leave room."""
    chosen = tiles.choose_backward(head_dim, head_dim, True, 700, False)
    tile = dataclasses.replace(chosen, persistent=persistent, direct=True)
    monkeypatch.setattr(tiles, "choose_backward", lambda *_: tile)
    run(tensors(head_dim=head_dim, seqlen_q=700))
    assert len(cuda.launches) == 3 and cuda.compiled[-1].defines["DIRECT"]
    params = params_of(cuda, 1)[1]
    head_floats = params.q_tiles * tile.block_m * head_dim
    assert (params.statistics, params.sums, cuda.workspace) == (MEMORY, MEMORY, 8 * head_floats)
    # The longest queries whose statistics find room.
    for seqlen_q, launches in ((head_dim // 2 * tile.block_n, 3), (head_dim // 2 * tile.block_n + 1, 0)):
        cuda.launches.clear()
        with contextlib.nullcontext() if launches else pytest.raises(KernelUnavailable, match="room"):
            run(tensors(head_dim=head_dim, seqlen_q=seqlen_q))
        assert len(cuda.launches) == launches
        assert 2 * seqlen_q * 4 <= tile.block_n * head_dim * 4 or not launches
    # Without the query's gradient there is another kernel.
    listed = tensors(head_dim=head_dim, seqlen_q=700)
    listed[6] = None
    run(listed)
    assert not cuda.compiled[-1].defines["DIRECT"]


def test_few_heads_have_three_kernels(cuda, monkeypatch):
    """Where the fused kernel's statistics would come on top of sums for all heads."""
    tile = dataclasses.replace(tiles.choose_backward(128, 128, False, 4096, False), fused=True)
    monkeypatch.setattr(tiles, "choose_backward", lambda *_: tile)
    # Groups of two heads, of which three must have sums.
    for batch, launches in ((3, 3), (4, 1)):
        cuda.launches.clear()
        run(tensors(batch=batch, head_dim=128, seqlen_q=4096), is_causal=False)
        assert len(cuda.launches) == launches


def test_the_table_of_dense_calls():
    def flags(head_dim, is_causal, rows, deterministic=False, head_dim_v=None):
        tile = tiles.choose_backward(head_dim, head_dim_v or head_dim, is_causal, rows, deterministic)
        return {name for name in ("persistent", "fused", "unstaged", "paired", "direct") if getattr(tile, name)}

    assert flags(256, False, 1024) == flags(256, True, 4096) == {"fused", "paired"}
    assert flags(256, False, 1023) == flags(240, False, 1 << 20) == flags(256, True, 4095) == set()
    assert flags(256, True, 1024) == {"direct"} and flags(128, True, 1024) == {"persistent", "direct"}
    assert flags(128, True, 1025) == flags(128, True, 8191) == {"persistent"} and flags(128, True, 8192) == {"unstaged"}
    assert flags(128, False, 3072) == {"fused"} and flags(128, False, 3071) == {"persistent"}
    assert flags(64, True, 512) == {"persistent", "direct"}
    assert (
        flags(64, True, 513)
        == flags(64, True, 2048)
        == flags(64, False, 3072)
        == flags(64, False, 8191)
        == {"persistent", "fused"}
    )
    assert flags(64, True, 2049) == flags(64, True, 8191) == flags(64, False, 1536) == {"persistent"}
    assert flags(64, True, 8192) == flags(64, False, 8192) == flags(64, False, 3071) == set()
    for dims in ((192, 128), (144, 144), (160, 160)):
        assert tiles.choose_backward(*dims, True, 1 << 12, False).block_n == 128
    for dims in ((176, 176), (192, 192), (144, 128), (192, 144)):
        assert tiles.choose_backward(*dims, True, 1 << 12, False).block_n == 64
    for is_causal in (False, True):
        for head_dim in (64, 128, 256):
            assert flags(head_dim, is_causal, 1 << 12, head_dim_v=32) == set()
        for rows in (1 << 8, 1 << 16):
            for head_dim in (64, 128):
                assert flags(head_dim, is_causal, rows, deterministic=True) == {"persistent"}
            for head_dim in (176, 192, 256):
                assert flags(head_dim, is_causal, rows, deterministic=True) == {"paired"}
            assert flags(192, is_causal, rows, deterministic=True, head_dim_v=64) == set()
            assert tiles.choose_backward(160, 160, is_causal, rows, True) == tiles.IN_HALVES


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (136, 136), (160, 160)])
def test_query_tiles_that_arrive_in_halves(cuda, monkeypatch, head_dim, head_dim_v):
    """128 keys a block of a head_dim above 128; boxes of queries and of their gradients have half of a tile's rows."""
    boxes = []
    maps = driver.TensorMaps

    def tensor_maps(dtype, shape, strides, rows, *others):
        boxes.append(rows)
        return maps(dtype, shape, strides, rows, *others)

    monkeypatch.setattr(driver, "TensorMaps", tensor_maps)
    monkeypatch.setattr(tiles, "choose_backward", TABLE_OF_DENSE_CALLS)
    run(tensors(seqlen_q=300, seqlen_k=500, head_dim=head_dim, head_dim_v=head_dim_v))
    assert "HALVES" in cuda.compiled[-1].text
    grids, blocks = [launch[0][0] for launch in cuda.launches], [launch[1][0] for launch in cuda.launches]
    assert (grids, blocks) == ([3 * 8, 4 * 4, 3 * 8], [256, 384, 256])
    assert boxes == [64, 128, 128, 64, 128, 128]
    assert cuda.launches[1][2] <= 227 << 10
    params = params_of(cuda, 1)[1]
    assert (params.q_tiles, params.k_tiles, params.head_dim, params.head_dim_v) == (3, 4, head_dim, head_dim_v)
    assert cuda.workspace == 8 * 3 * 128 * (math.ceil(head_dim / 16) * 16)


def test_without_a_gradient_of_the_query_the_kernel_with_roles_runs(cuda, monkeypatch):
    monkeypatch.setattr(tiles, "choose_backward", TABLE_OF_DENSE_CALLS)
    listed = tensors(head_dim=192, head_dim_v=128)
    listed[6] = None
    run(listed)
    assert cuda.compiled[-1].defines["BLOCK_N"] == 64 and cuda.launches[1][1] == [512, 1, 1]


@pytest.mark.parametrize(("head_dim", "padded"), [(168, 208), (192, 208), (216, 224)])
def test_a_fixed_order_at_large_head_dimensions_is_that_of_pairs_of_blocks(cuda, monkeypatch, head_dim, padded):
    monkeypatch.setattr(tiles, "choose_backward", TABLE_OF_DENSE_CALLS)
    run(tensors(head_dim=head_dim, seqlen_q=300), deterministic=True)
    defines, params = cuda.compiled[-1].defines, params_of(cuda, 1)[1]
    assert (defines["PAIRED"], defines["HEAD_DIM"], defines["HEAD_DIM_V"]) == (1, padded, padded)
    assert (params.head_dim, params.head_dim_v) == (head_dim, head_dim)
    assert cuda.workspace == 8 * 5 * (64 * padded + 2)  # sums of 5 query tiles of 8 heads, and two semaphores of each


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_persistent_grid_has_no_more_blocks_than_work(cuda, head_dim):
    run(tensors(batch=1, heads=3, kv_heads=3, seqlen_q=100, seqlen_k=100, head_dim=head_dim))
    assert cuda.compiled[-1].defines["PERSISTENT"]
    assert cuda.launches[1][0] == [3, 1, 1]


def test_a_narrow_head_dim_beside_wide_values_is_padded(cuda):
    run(tensors(head_dim=24, head_dim_v=128))
    assert (cuda.compiled[-1].defines["HEAD_DIM"], params_of(cuda, 1)[1].head_dim) == (80, 24)


@pytest.mark.parametrize("seqlen_q", [300, 9000])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_warm_up_compiles_what_a_call_runs(cuda, monkeypatch, seqlen_q, deterministic):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    problem = Problem.from_shapes(
        (2, 4, seqlen_q, 72), dtype=torch.bfloat16, kv_heads=2, seqlen_k=500, is_causal=True, training=True,
        gpu="NVIDIA H200",
    )  # fmt: skip
    *_, specialisation = precompile._specialisations(problem)
    run(tensors(seqlen_q=seqlen_q), deterministic=deterministic)
    assert cuda.compiled[-1].defines == specialisation.defines


@pytest.mark.parametrize(("is_causal", "deterministic", "heads"), [(True, False, 1), (False, True, 1), (True, True, 2)])
def test_causal_blocks_that_wait_for_one_another_are_of_many_heads(cuda, is_causal, deterministic, heads):
    """The gradients of a head of this length fill L2 for themselves; there are 10 multiprocessors."""
    run(tensors(heads=4, kv_heads=4, seqlen_q=1 << 17, seqlen_k=1 << 17), is_causal, deterministic=deterministic)
    assert params_of(cuda, 1)[1].heads_per_group == heads


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("seqlen", [512, 1024, 2048, 8192, 16384])
def test_causal_lists_leave_little_idle_at_their_end(seqlen, group):
    """132 multiprocessors take the tiles of keys in the list's order, each a block whose time is that of its steps."""
    k_tiles, shares = seqlen // 128, []
    for key_heads in range(math.ceil(3 * 132 / k_tiles), 160):
        head_bytes = seqlen * group * 1024
        heads_per_group = backward._heads_per_group(key_heads, head_bytes, k_tiles, True, False, 132)
        assert 0 < heads_per_group <= key_heads
        free = [0] * 132
        for first in range(0, key_heads, heads_per_group):
            heads = min(heads_per_group, key_heads - first)
            for k_tile in range(k_tiles):
                for _ in range(heads):
                    heapq.heapreplace(free, free[0] + 2 * (k_tiles - k_tile) * group)
        shares.append(sum(free) / 132 / max(free))
    assert min(shares) > 0.75 and statistics.mean(shares) > 0.9


@pytest.mark.parametrize(
    ("key_heads", "head_bytes", "blocks", "expected"),
    [
        (512, 1 << 19, 4, 64),  # 32 MB of queries, as L2 holds
        (256, 1 << 21, 4, 33),  # a wave of blocks
        (64, 1 << 23, 8, 17),
        (16, 1 << 25, 64, 4),  # not 3, of which the last group would be one
        (64, 1 << 23, 16, 16),  # not 9
        (10, 1 << 23, 4, 10),
    ],
)
def test_heads_that_take_turns(key_heads, head_bytes, blocks, expected):
    assert backward._heads_per_group(key_heads, head_bytes, blocks, True, False, 132) == expected


def test_no_gradient_of_the_query_no_last_kernel(cuda):
    listed = tensors()
    listed[6] = None
    run(listed)
    assert len(cuda.launches) == 2
    assert params_of(cuda, 1)[1].grad_query is None


@pytest.mark.parametrize("why", ["no gradient", "gaps", "few rows"])
def test_statistics_that_the_gradient_of_the_query_has_no_room_for(cuda, why):
    listed = tensors(seqlen_q=1 if why == "few rows" else 300, head_dim=64)
    if why == "no gradient":
        listed[6] = None
    if why == "gaps":
        listed[6] = OnDevice(torch.empty(2, 4, 300, 80, dtype=torch.bfloat16, device="meta")[..., :64], 7 << 20)
    run(listed)
    params = params_of(cuda, 1)[1]
    tile = tiles.choose_backward(64, 64, True, 2, False)
    assert params.statistics == MEMORY
    assert params.sums == MEMORY + 4 * 8 * params.q_tiles * 2 * tile.block_m


def test_calls_without_a_kernel(cuda):
    for listed, message in ((tensors(head_dim=264), "head_dim"), (tensors(dtype=torch.float32), "float32")):
        for _ in range(2):
            with pytest.raises(KernelUnavailable, match=message):
                run(listed)
    assert not cuda.launches and not cuda.compiled


@pytest.mark.parametrize("own", [(True, True, True), (False, True, True), (True, False, True), (False, False, False)])
@pytest.mark.parametrize(("head_dim", "deterministic"), [(72, False), (64, False), (128, False), (128, True)])
def test_parameters_of_a_call_with_a_mask(cuda, monkeypatch, head_dim, deterministic, own):
    """The mask's own dimensions decide how much is listed: `own` of batch, head and query."""
    monkeypatch.setattr(masks, "_empty", lambda size, _: SimpleNamespace(data_ptr=lambda: LISTS, size=size))
    shape = [size if is_own else 1 for size, is_own in zip((2, 4, 300), own)]
    mask = OnDevice(torch.empty(*shape, 500, dtype=torch.bool, device="meta"), 9 << 20)
    run(tensors(head_dim=head_dim), is_causal=False, deterministic=deterministic, mask=mask)
    defines = cuda.compiled[-1].defines
    assert (defines["MASKED"], defines["IS_CAUSAL"], defines["DETERMINISTIC"]) == (1, 0, deterministic)
    block_m, planes = defines["BLOCK_M"], shape[0] * shape[1]
    q_tiles, own_q_tiles = math.ceil(300 / block_m), math.ceil(shape[2] / block_m)
    assert [launch[0][0] for launch in cuda.launches[:2]] == [planes * 4 * own_q_tiles, math.ceil(planes * 4 / 4)]
    assert [launch[1][0] for launch in cuda.launches[:2]] == [256, 128]
    (address,) = (ctypes.c_void_p * 1).from_address(cuda.launches[0][3])
    bits = masks.BitsParams.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(masks.BitsParams)))
    assert (bits.mask.mask, bits.bits) == (9 << 20, LISTS)
    assert bits.mask.lists == LISTS + planes * 4 * own_q_tiles * block_m * 128 // 8
    assert bits.contents == bits.mask.lists + 4 * planes * 4 * (2 + q_tiles)
    assert (bits.mask_heads, bits.mask_rows) == tuple(shape[1:])
    assert (bits.k_tiles, bits.q_tiles, bits.mask_q_tiles, bits.num_lists) == (4, q_tiles, own_q_tiles, planes * 4)
    _, params = params_of(cuda, 3)
    assert (params.mask.bits, params.mask.lists, params.mask.q_tiles) == (LISTS, bits.mask.lists, own_q_tiles)
    assert params.mask.plane_stride_batch == (shape[1] if own[0] else 0)
    assert params.mask.plane_stride_head == (1 if own[1] else 0)


def test_calls_that_share_a_mask_share_its_lists(cuda, monkeypatch):
    monkeypatch.setattr(masks, "_empty", lambda size, _: SimpleNamespace(data_ptr=lambda: LISTS, size=size))
    mask = OnDevice(torch.empty(1, 1, 300, 500, dtype=torch.bool, device="meta"), 9 << 20)
    made = []
    for batch in (2, 1):
        run(tensors(batch=batch), is_causal=False, mask=mask, made=made)
    # Two kernels make them, three compute.
    assert len(cuda.launches) == 5 + 3 and len(made) == 1
    first, second = (params_of(cuda, launch)[1] for launch in (3, 6))
    assert (first.mask.bits, first.mask.lists) == (second.mask.bits, second.mask.lists)
    assert second.mask.bits == LISTS


class Logsumexp(OnDevice):
    """In two parts, each contiguous, of some batches of more."""

    def __getitem__(self, index):
        part = OnDevice(self._tensor[index], self._pointer)
        part.is_contiguous = self._tensor[index].is_contiguous
        return part


@pytest.mark.parametrize("own", [(True, True, True), (False, True, True), (True, False, False), (False, False, False)])
@pytest.mark.parametrize("head_dim", [72, 64, 128])
def test_parameters_of_a_call_with_a_float_mask(cuda, monkeypatch, head_dim, own):
    monkeypatch.setattr(masks, "_empty", lambda size, _: SimpleNamespace(data_ptr=lambda: LISTS, size=size))
    made = []
    of_maps = driver.TensorMaps
    monkeypatch.setattr(driver, "TensorMaps", lambda *given: made.append(given) or of_maps(*given))
    shape = [size if is_own else 1 for size, is_own in zip((2, 4, 300), own)]
    mask = OnDevice(torch.empty(*shape, 504, dtype=torch.bfloat16, device="meta").expand(2, 4, 300, 504), 9 << 20)
    listed = tensors(head_dim=head_dim, seqlen_k=504)
    listed[4] = Logsumexp(torch.empty(2, 5, 4, 300, device="meta")[:, 1:3], 5 << 20)
    delta = OnDevice(torch.empty(2, 4, 300, device="meta"), 11 << 20)
    run(listed, is_causal=False, mask=mask, delta=delta)
    defines = cuda.compiled[-1].defines
    assert (defines["MASKED"], defines["FLOAT_MASK"], defines["PERSISTENT"]) == (1, 1, 0)
    assert defines["MASK_PER_KEY"] == (not own[2])
    block_m, planes = defines["BLOCK_M"], shape[0] * shape[1]
    q_tiles, own_q_tiles = math.ceil(300 / block_m), math.ceil(shape[2] / block_m)
    (address,) = (ctypes.c_void_p * 1).from_address(cuda.launches[0][3])
    bits = masks.BitsParams.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(masks.BitsParams)))
    # A block for each tile, and one for each query tile, which has a byte of its own.
    assert cuda.launches[0][0][0] == planes * (4 + 1) * own_q_tiles
    assert bits.lowest_hides == bits.mask.lists + 4 * planes * 4 * (2 + q_tiles)
    assert bits.contents == bits.lowest_hides + 4 * math.ceil(planes * own_q_tiles / 4)
    addresses, params = params_of(cuda, 3, 7)
    assert addresses[6] == 9 << 20
    # Of the mask's own rows and heads, as many as a tile has, or the one for all queries.
    assert tuple(made[-7][1]) == (*shape, 504)
    assert made[-7][3] == (defines["STEP_M"] if own[2] else 1)
    assert (params.logsumexp, params.logsumexp_low) == (5 << 20, (5 << 20) + 4 * 5 * 4 * 300)
    assert (params.delta, params.logsumexp_pitch) == (11 << 20, 300)
    # Four statistics of a query.
    assert params.sums == MEMORY and params.statistics == listed[6].data_ptr()
    listed[6] = None
    run(listed, is_causal=False, mask=mask)
    _, params = params_of(cuda, len(cuda.launches) - 1, 7)
    assert params.delta is None
    assert params.sums == MEMORY + 4 * 8 * q_tiles * 4 * block_m


@pytest.mark.parametrize("dropout_p", [0.25, 1.0])
def test_parameters_of_a_call_with_dropout(cuda, monkeypatch, dropout_p):
    monkeypatch.setattr(dropout, "_empty", lambda size, _: SimpleNamespace(data_ptr=lambda: TABLE, size=size))
    listed = tensors(head_dim=64)
    run(listed, dropout_p=dropout_p, seed=OnDevice(torch.empty(1, dtype=torch.int64, device="meta"), 9 << 20))
    assert cuda.compiled[-1].defines["DROPOUT"] and not cuda.compiled[-1].defines["MASKED"]
    # 512 keys of queries and 512 of keys for each of 8 heads.
    assert [launch[0][0] for launch in cuda.launches[:2]] == [8 * 1024 // 256, 8 * 3]
    (address,) = (ctypes.c_void_p * 1).from_address(cuda.launches[0][3])
    keys = dropout.DropoutKeysParams.from_buffer_copy(
        ctypes.string_at(address, ctypes.sizeof(dropout.DropoutKeysParams))
    )
    assert (keys.seed, keys.keys, keys.rows, keys.columns) == (9 << 20, TABLE, 512, 512)
    _, params = params_of(cuda, 2)
    assert (params.dropout.keys, params.kept) == (TABLE, 1.0 - dropout_p)
    assert params.dropout.threshold == (1 << 30 if dropout_p == 0.25 else 0xFFFF << 16)
    scale = 4 / 3 if dropout_p == 0.25 else 0.0
    assert params.dropout.scale == pytest.approx(scale)
    # Scores are not scaled by it, the gradients of query and key are.
    assert params.softmax_scale == pytest.approx(0.25 * scale)
    assert params.softmax_scale_log2 == pytest.approx(0.25 * math.log2(math.e), rel=1e-6)
    # Three statistics of a query, beside the query's gradient, in which there is room for 32.
    assert params.statistics == listed[6].data_ptr()


def test_float_masks_without_a_kernel(cuda):
    bias = torch.empty(1, 1, 300, 504, dtype=torch.bfloat16, device="meta")
    options = {"is_causal": False}
    for mask, changed in (
        (bias.float(), {}),  # not of query's type
        (bias, {"deterministic": True}),
        (bias, {"dropout_p": 0.5}),
        (bias[..., :1], {}),
        (bias.expand(1, 1, 300, 504)[..., :500].contiguous()[..., 1:], {}),
        (bias, {"is_causal": True}),
    ):
        listed = tensors(head_dim=64, seqlen_k=mask.size(3) if mask.size(3) > 1 else 504)
        listed[4] = Logsumexp(torch.empty(2, 2, 4, 300, device="meta"), 5 << 20)
        with pytest.raises(KernelUnavailable):
            run(listed, mask=OnDevice(mask, 9 << 20), **(options | changed))
    listed = tensors(head_dim=64, seqlen_k=504)
    with pytest.raises(KernelUnavailable, match="two parts"):
        run(listed, mask=OnDevice(bias, 9 << 20), is_causal=False)
    assert not cuda.launches and not cuda.compiled


@pytest.mark.parametrize(("head_dim", "is_causal"), [(136, False), (64, True)])
def test_masks_without_a_kernel(cuda, head_dim, is_causal):
    mask = OnDevice(torch.empty(1, 1, 300, 500, dtype=torch.bool, device="meta"), 9 << 20)
    with pytest.raises(KernelUnavailable, match="mask"):
        run(tensors(head_dim=head_dim), is_causal=is_causal, mask=mask)
    assert not cuda.launches and not cuda.compiled


def test_strides_that_the_copy_engine_cannot_walk():
    tensor = torch.empty(2, 4, 10, 16)
    assert backward.walkable(tensor, tensor.transpose(1, 2), tensor[:1, :, ::2])
    assert not backward.walkable(tensor.mT)
    assert not backward.walkable(tensor[..., :1, :].expand(2, 4, 10, 16))
    assert not backward.walkable(torch.empty(2, 4, 10, 20)[..., :16])


@pytest.mark.parametrize(
    ("backend", "options", "ran"),
    [
        ("cuda", {}, "cuda"),
        ("triton", {}, "triton"),
        ("cuda", {"attn_mask": torch.ones(1, 1, 5, 5, dtype=torch.bool)}, "cuda"),
        ("cuda", {"attn_mask": torch.ones(5, 5, dtype=torch.bool)}, "cuda"),
        ("cuda", {"attn_mask": torch.ones(1, 1, 5, 8)[..., :5]}, "cuda"),
        ("cuda", {"attn_mask": torch.ones(5, 8)[:, :5]}, "cuda"),
        ("cuda", {"attn_mask": torch.ones(1, 1, 5, 5)}, "triton"),  # rows do not begin at multiples of 16 bytes
        ("cuda", {"attn_mask": torch.ones(1, 1, 5, 8, dtype=torch.float16)[..., :5]}, "triton"),
        ("cuda", {"attn_mask": torch.ones(1, 1, 5, 8)[..., :5], "is_causal": True}, "triton"),
        ("cuda", {"attn_mask": torch.ones(1, 1, 5, 5, dtype=torch.bool), "is_causal": True}, "triton"),
        ("cuda", {"attn_mask": torch.ones(1, 1, 5, 5, dtype=torch.bool), "max_extras_head_dim": 8}, "triton"),
        ("cuda", {"dropout_p": 0.5}, "cuda"),
        ("cuda", {"dropout_p": 0.5, "max_extras_head_dim": 8}, "triton"),
        ("cuda", {"max_rows": 4}, "triton"),
    ],
)
def test_which_backward_runs(monkeypatch, backend, options, ran):
    called = []

    def fake(grad_out, query, key, value, out, lse, is_causal, scale, *grads_and_mode):
        called.append("cuda")
        assert grads_and_mode[5:] == (options.get("dropout_p", 0.0), None)
        assert grads_and_mode[4] is None or grads_and_mode[4].shape == (1, 1, 5, 5)
        assert grad_out.stride() == out.contiguous().stride()  # it was expanded: copied
        for grad in grads_and_mode[:3]:
            grad.fill_(3.0)

    hopper = SimpleNamespace(backward=fake, suits=backward.suits, extras_fit=backward.extras_fit)
    monkeypatch.setattr(ops, "_backwards", Recent())

    def triton(*_):
        called.append("triton")

    monkeypatch.setattr(backward_parts, "batches_at_a_time", lambda query, *_: query.size(0))
    monkeypatch.setattr(backward, "MAX_EXTRAS_HEAD_DIM", options.get("max_extras_head_dim", 128))
    monkeypatch.setattr(backward, "MAX_SUM_ROWS", options.get("max_rows", 5))
    monkeypatch.setattr(ops, "_hopper_backward", lambda: hopper)
    monkeypatch.setattr(ops, "_kernels", lambda: SimpleNamespace(plan_of_backward=lambda *_: triton))
    query, key, value = (sample(1, 2, 5, 16, seed=i).detach() for i in range(3))
    grad_out = torch.ones(()).expand_as(query)
    attn_mask, dropout_p = options.get("attn_mask"), options.get("dropout_p", 0.0)
    is_causal = options.get("is_causal", attn_mask is None)
    is_float_mask = attn_mask is not None and attn_mask.dtype != torch.bool
    logsumexp = torch.zeros(2, 1, 2, 5) if is_float_mask else torch.zeros(1, 2, 5)
    grads = ops._gradients_cuda(
        grad_out, query, key, value, attn_mask, query.clone(), logsumexp, None, dropout_p, is_causal, 0.25,
        (True, False, True, False), backend,
    )  # fmt: skip
    assert called == [ran]
    assert grads[1] is None and grads[3] is None
    assert grads[0] is not None and grads[2] is not None
    if ran == "cuda":
        assert (grads[0] == 3.0).all() and (grads[2] == 3.0).all()


@pytest.mark.parametrize(
    ("shape", "kv_heads", "mask_shape", "dropout_p", "expected"),
    [
        ((4, 16, 4096, 128), 16, (4, 1, 4096, 4096), 0.0, 4),
        ((4, 16, 4096, 128), 16, (4, 1, 1, 4096), 0.0, 4),  # what stock needs for delta is room for the lists
        ((4, 16, 4096, 128), 16, (4, 1, 1, 4096), 0.1, 2),  # random keys: three would fit, two and two are as many
        ((4, 16, 1000, 64), 16, (4, 1, 1, 1000), 0.0, 2),  # sums are of whole tiles
        ((1, 16, 4096, 128), 16, (1, 1, 1, 4096), 0.0, 1),
        ((1, 16, 1000, 128), 16, (1, 1, 1, 1000), 0.0, 0),
        ((2, 32, 4096, 128), 8, (2, 1, 4096, 4096), 0.0, 2),
        ((16, 16, 64, 64), 16, (16, 1, 1, 64), 0.0, 0),  # a tile is twice as long: seven parts would be small ones
        ((1, 16, 16384, 128), 16, (1, 1, 16384, 16384), 0.0, 1),
    ],
    ids=str,
)
def test_batches_at_a_time_take_no_more_memory_than_pytorchs(shape, kv_heads, mask_shape, dropout_p, expected):
    query = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    key = torch.empty((shape[0], kv_heads, *shape[2:]), dtype=torch.bfloat16, device="meta")
    mask = torch.empty(mask_shape, dtype=torch.bool, device="meta")
    found = backward_parts.batches_at_a_time(query, key, key, mask, dropout_p)
    assert found == expected
    batch, heads, length, head_dim = shape
    stock = 4 * batch * heads * length * (head_dim + 1) + 2 * mask.numel()
    stock += 4 * batch * heads * length * head_dim * (heads != kv_heads)
    ours = 4 * found * heads * length * head_dim + mask.numel() // 8
    ours += 8 * found * heads * length * (dropout_p > 0.0)
    assert ours <= stock
    # What is expanded is one in memory.
    expanded = mask[:1].expand(mask_shape)
    assert backward_parts.batches_at_a_time(query, key, key, expanded, dropout_p) <= expected


@pytest.mark.parametrize(
    ("shape", "mask_shape", "expected"),
    [
        ((4, 16, 4096, 128), (4, 1, 4096, 4096), 2),  # three, but two and two are as many launches
        ((4, 16, 4096, 128), (1, 16, 4096, 4096), 2),
        ((4, 16, 4096, 128), (1, 1, 1, 4096), 4),
        ((1, 16, 4096, 128), (1, 1, 4096, 4096), 0),
        ((32, 1, 4096, 128), (1, 1, 4096, 4096), 16),
        ((4, 16, 4096, 16), (4, 16, 4096, 4096), 0),  # its bits alone
        ((4, 16, 256, 64), (1, 16, 256, 256), 0),  # parts too small to pay
    ],
    ids=str,
)
def test_batches_with_a_float_mask_leave_room_for_its_bits(shape, mask_shape, expected):
    query = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    mask = torch.empty(mask_shape, dtype=torch.bfloat16, device="meta")
    assert backward_parts.batches_at_a_time(query, query, query, mask, 0.0) == expected
    sums = 4 * math.prod(shape[1:])
    bits = math.prod(mask_shape) // 8
    assert expected == 0 or expected * sums + bits <= shape[0] * (sums + 4 * math.prod(shape[1:3]))


def test_heads_of_a_single_batch_are_its_parts_where_it_does_not_fit_whole():
    def parts(kv_heads, mask_shape, dtype):
        query = torch.empty(1, 16, 4096, 128, dtype=torch.bfloat16, device="meta")
        mask = torch.empty(mask_shape, dtype=dtype, device="meta")
        return backward_parts.parts_of(query, query[:, :kv_heads], query[:, :kv_heads], mask, 0.0)

    assert parts(16, (1, 1, 4096, 4096), torch.bool) == (1, 1, "batches")
    assert parts(16, (1, 1, 4096, 4096), torch.bfloat16) == (16, 8, "key heads")
    assert parts(16, (1, 16, 4096, 4096), torch.bfloat16) == (16, 8, "key heads")
    assert parts(4, (1, 1, 4096, 4096), torch.bfloat16) == (1, 1, "batches")  # stock repeats keys and values
    assert parts(1, (1, 16, 4096, 4096), torch.bfloat16) is None


@pytest.mark.parametrize("length", [129, 300, 513, 1024])
def test_whether_the_kernels_run_does_not_depend_on_the_batch_where_bits_must_not(length):
    def found(batch):
        query = torch.empty(batch, 8, length, 128, dtype=torch.bfloat16, device="meta")
        mask = torch.empty(batch, 1, 1, length, dtype=torch.bool, device="meta")
        return backward_parts.parts_of(query, query, query, mask, 0.0)

    batches = 1, 2, 16, 64
    usual = {found(batch) is None for batch in batches}
    set_batch_invariant(True)
    try:
        assert len({found(batch) is None for batch in batches}) == 1
        assert all(parts is None or (parts.number, parts.of) == (batch, "batches")
                   for batch in batches[1:] for parts in [found(batch)])  # fmt: skip
    finally:
        set_batch_invariant(False)
    assert usual == ({False} if length == 1024 else {True, False})


@pytest.mark.parametrize("head_dim", range(16, 129, 16))
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
@pytest.mark.parametrize("mask_shape", [(3, 1, 700, 900), (1, 2, 1, 900), (3, 2, 64, 64), (1, 1, 1, 8)], ids=str)
def test_lists_take_no_more_than_they_are_counted_for(mask_shape, dtype, head_dim):
    mask = torch.empty(mask_shape, dtype=dtype, device="meta")
    scores = 3, 2, 700 if mask_shape[2] == 1 else mask_shape[2], mask_shape[3]
    tile = tiles.choose_backward_usual(head_dim, head_dim, False, scores[2], False)
    made = masks.QueryLists([], mask, scores, tile)
    counted = masks.most_query_list_bytes(mask, *scores[2:])
    assert 4 * made._size <= counted <= 4 * (2 * made._size + 4096)


def test_a_backward_in_parts_fills_all_of_the_gradients(monkeypatch):
    parts = []

    def fake(grad_out, query, key, value, out, lse, is_causal, scale, *grads_and_mode):
        parts.append((query.size(0), grads_and_mode[4].shape))
        for grad in grads_and_mode[:3]:
            grad.fill_(len(parts))

    monkeypatch.setattr(backward, "backward", fake)
    monkeypatch.setattr(backward_parts, "batches_at_a_time", lambda *_: 2)
    monkeypatch.setattr(ops, "_hopper_backward", lambda: backward)
    query, key, value = (sample(3, 2, 5, 16, seed=i).detach() for i in range(3))
    mask = torch.ones(3, 1, 5, 5, dtype=torch.bool)
    grads = ops._gradients_cuda(
        torch.randn_like(query), query, key, value, mask, query.clone(), torch.zeros(3, 2, 5), None, 0.0, False, 0.25,
        (True, True, True, False), "cuda",
    )  # fmt: skip
    assert parts == [(2, (2, 1, 5, 5)), (1, (1, 1, 5, 5))]
    for grad in grads[:3]:
        assert (grad[:2] == 1.0).all() and (grad[2:] == 2.0).all()


@pytest.mark.parametrize("needs_query", [True, False])
def test_long_groups_are_added_up_head_by_head(monkeypatch, needs_query):
    """In one accumulator as many rows as are accurate; the parts' sums are rounded once more, as PyTorch's are."""
    shapes = []

    def fake(grad_out, query, key, value, out, lse, is_causal, scale, *grads_and_mode):
        shapes.append(tuple(query.shape))
        assert lse.is_contiguous() and lse.shape == query.shape[:3]
        found = reference.attention_backward(grad_out, query, key, value, None, 0.0, is_causal, scale, None, out, lse)
        for grad, like in zip(grads_and_mode[:3], found):
            if grad is not None:
                grad.copy_(like)

    monkeypatch.setattr(backward, "backward", fake)
    monkeypatch.setattr(backward, "MAX_SUM_ROWS", 20)
    monkeypatch.setattr(ops, "_hopper_backward", lambda: backward)
    query, key, value = (sample(2, heads, 8, 16, seed=heads).detach().float() for heads in (6, 2, 2))
    out, logsumexp = ops._attention_forward_math(query, key, value, None, None, 0.0, True, 0.25, "query")
    arguments = torch.randn_like(query), query, key, value, None, out, logsumexp, None, 0.0, True, 0.25
    grads = ops._gradients_cuda(*arguments, (needs_query, True, True, False), "cuda")
    assert shapes == [(2, 2, 8, 16)] * 3
    wanted = reference.attention_backward(*arguments[:5], 0.0, True, 0.25, None, out, logsumexp)
    assert (grads[0] is None) != needs_query
    for grad, like in zip(grads[not needs_query : 3], wanted[not needs_query :]):
        torch.testing.assert_close(grad, like)


def test_routing_knows_the_largest_head_dim_of_dropout_beside_a_mask():
    assert routing.HOPPER_MAX_MASKED_DROPOUT_HEAD_DIM == backward.MAX_EXTRAS_HEAD_DIM


def test_what_is_too_long_for_parts_is_tritons(monkeypatch):
    monkeypatch.setattr(backward, "MAX_SUM_ROWS", 20)
    query, mask = torch.empty(1, 4, 8, 16), torch.empty(1, 1, 1, 8, dtype=torch.bool)
    long = torch.empty(1, 4, 21, 16)
    assert backward_parts.parts_of(query, query[:, :1], query[:, :1], None, 0.0) == (4, 1, "group")
    assert backward_parts.parts_of(query, query[:, :1], query[:, :1], None, 0.1) is None
    assert backward_parts.parts_of(query, query[:, :1], query[:, :1], mask, 0.0) is None
    assert backward_parts.parts_of(long, query, query, None, 0.0) is None
    assert backward_parts.parts_of(query, query, query, None, 0.1) == (1, 1, "batches")


@pytest.mark.parametrize("batch", [3, 1])
def test_dropout_counts_heads_from_the_first_of_the_call(monkeypatch, batch):
    counted = []

    def fake(grad_out, query, *_, first_head=0, **options):
        counted.append((first_head, query.size(0) * query.size(1)))

    monkeypatch.setattr(backward_parts, "batches_at_a_time", lambda query, *_: 2 if query.size(0) > 1 else 0)
    query, key = sample(batch, 6, 5, 16), sample(batch, 3, 5, 16)
    mask, seed = torch.ones(batch, 1, 5, 5, dtype=torch.bool), torch.tensor([7])
    parts = backward_parts.parts_of(query, key, key, mask, 0.5)
    backward_parts.backward_in_parts(
        fake, parts, query, query, key, key, query, torch.zeros(batch, 6, 5), False, 0.25, query, key, key, False, mask,
        0.5, seed,
    )  # fmt: skip
    assert counted == ([(0, 12), (12, 6)] if batch == 3 else [(0, 4), (4, 2)])


@pytest.mark.parametrize("own_heads", [False, True])
@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 3), (1, 6), (3, 2)])
def test_a_float_mask_in_parts_gives_what_it_gives_at_once(monkeypatch, batch, kv_heads, own_heads):
    """Of a single batch some heads; delta for the mask's gradient is filled by parts too."""
    sizes, lists = [], []

    def fake(
        grad_out, query, key, value, out, lse, is_causal, scale, grad_query, grad_key, grad_value, deterministic, mask,
        dropout_p, seed, delta, made=None,
    ):  # fmt: skip
        sizes.append(query.shape[:2])
        lists.append(made)
        found = reference.attention_backward(
            grad_out, query, key, value, mask, 0.0, is_causal, scale, None, out, lse
        )  # fmt: skip
        for grad, like in zip((grad_query, grad_key, grad_value), found):
            grad.copy_(like)
        delta.copy_((grad_out * out).sum(-1))

    monkeypatch.setattr(backward, "backward", fake)
    monkeypatch.setattr(backward_parts, "batches_at_a_time", lambda query, *_: 2 if query.size(0) > 1 else 0)
    monkeypatch.setattr(ops, "_hopper_backward", lambda: backward)
    deltas = []

    def gradient_of_bias(*tensors):
        *_, delta = tensors
        deltas.append(delta)
        return torch.zeros_like(mask)

    monkeypatch.setattr(ops, "_bias_gradient", lambda *_: gradient_of_bias)
    query, key, value = (sample(batch, heads, 8, 16, seed=heads).detach() for heads in (6, kv_heads, kv_heads))
    query, key, value = (tensor.bfloat16() for tensor in (query, key, value))
    mask = torch.randn(1, 6 if own_heads else 1, 8, 8).bfloat16()
    out, logsumexp = ops._attention_forward_math(query, key, value, mask, None, 0.0, False, 0.25, "query")
    grad_out = torch.randn_like(query)
    arguments = grad_out, query, key, value, mask, out, logsumexp, None, 0.0, False, 0.25
    *grads, _ = ops._gradients_cuda(*arguments, (True, True, True, True), "cuda")
    assert sum(size[0] for size in sizes) == (batch if batch > 1 else kv_heads)
    assert all(size[1] == (6 if batch > 1 else 6 // kv_heads) for size in sizes)
    # Parts that have the same mask share its lists.
    assert all((made is lists[0]) and (made is not None) for made in lists) == (batch > 1 or not own_heads)
    whole = reference.attention_backward(grad_out, query, key, value, mask, 0.0, False, 0.25, None, out, logsumexp)
    for grad, wanted in zip(grads, whole):
        torch.testing.assert_close(grad, wanted)
    torch.testing.assert_close(deltas, [(grad_out * out).sum(-1).float()])
