"""Calls of the Hopper kernels that were prepared once launch what their plans launch; a stub stands for the driver."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import threading

import pytest
import torch
from test_cuda_backward_launch import tensors
from test_cuda_launch import OnDevice
from test_nvrtc import FakeDriver, install_fake_driver

from torch_flashbackend import _torch, driver, nvrtc
from torch_flashbackend.kernels import KernelUnavailable, launch_counts
from torch_flashbackend.kernels.cuda import backward, forward, tiles
from torch_flashbackend.plans import Repeat

from common import deterministic_mode

REFUSED, NO_CONTEXT, BROKEN = 1, 201, 700  # CUresults: invalid value, invalid context, illegal address


class Driver(FakeDriver):
    """Keeps all that a launch was given, read as a driver would read it."""

    def __init__(self):
        super().__init__()
        self.launched, self.names = [], {}
        self.maps = {backward.MAIN: 6, forward.ENTRY: 4}  # the other kernels have the params alone

    def do_cuModuleGetFunction(self, function, module, name):
        super().do_cuModuleGetFunction(function, module, name)
        self.names[function._obj.value] = name.decode()
        return 0

    def do_cuLaunchKernelEx(self, config, function, arguments, extra):
        config, name = config._obj, self.names[function.value]
        pointers = (ctypes.c_void_p * (self.maps.get(name, 0) + 1)).from_address(arguments.value)
        maps = [ctypes.c_uint64.from_address(address).value for address in pointers[:-1]]
        kind = forward.ForwardParams if name == forward.ENTRY else backward.BackwardParams
        params = kind.from_buffer_copy(ctypes.string_at(pointers[-1], ctypes.sizeof(kind)))
        shape = list(config.grid), list(config.block), config.shared_bytes, config.stream
        self.launched.append((shape, function.value, maps, params, extra))
        return 0


def fields(params):
    """Values of a ctypes structure, those within it too."""
    return [
        fields(value) if isinstance(value, ctypes.Structure) else value
        for value in (getattr(params, name) for name, _ in params._fields_)
    ]


def as_values(launched):
    return [(*rest, fields(params), extra) for *rest, params, extra in launched]


@pytest.fixture
def cuda(monkeypatch):
    fake = Driver()
    install_fake_driver(monkeypatch, fake)
    monkeypatch.setattr(forward, "_device", lambda index: ((9, 0), 10))
    monkeypatch.setattr(forward, "_plans", {})
    monkeypatch.setattr(nvrtc, "compile", lambda source, **_: nvrtc.Binary(source.key("13.0"), b"\x7fELF", ""))
    monkeypatch.setattr(tiles, "choose_backward", tiles.choose_backward_usual)
    fake.made = []
    addresses = itertools.count(40)

    def empty(shape, strides, dtype):
        made = OnDevice(torch.empty_strided(shape, strides, dtype=dtype, device="meta"), next(addresses) << 20)
        fake.made.append(made)
        return made

    monkeypatch.setattr(_torch, "allocator", lambda like: empty)
    return fake


def prepare_backward(listed, is_causal=True, deterministic=False, wanted=(True, True, True)):
    """(the plan, the prepared call) for tensors in the order of the plan's arguments."""
    plan = backward.Plan(*listed, is_causal, 0.25, deterministic)
    return plan, Repeat(plan, listed[6:], (*wanted, False)).prepared(listed[0])


def repeat(prepared, listed):
    query, key, value, out, lse, grad_out = listed[:6]
    return prepared(grad_out, query, key, value, out, lse)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("form", "sizes"),
    [
        ({}, {}),
        ({}, {"seqlen_q": 9000}),
        ({}, {"batch": 1, "heads": 1, "kv_heads": 1, "seqlen_q": 60}),
        ({"direct": True}, {"head_dim": 64, "seqlen_q": 700}),
        ({"fused": True, "persistent": False}, {"head_dim": 128, "batch": 8, "seqlen_q": 700}),
        ({"fused": True, "persistent": False}, {"head_dim": 128, "batch": 1, "heads": 16, "kv_heads": 16}),
        ({}, {"heads": 2, "seqlen_q": 1, "head_dim": 64}),  # statistics have no room in the gradient
    ],
)
def test_a_prepared_backward_launches_what_its_plan_launches(cuda, monkeypatch, form, sizes, deterministic):
    usual = tiles.choose_backward_usual
    monkeypatch.setattr(tiles, "choose_backward", lambda *a: dataclasses.replace(usual(*a), **form))
    listed = tensors(**sizes)
    plan, prepared = prepare_backward(listed, deterministic=deterministic)
    for move in (0, 1 << 12):
        moved = [OnDevice(tensor._tensor, tensor.data_ptr() + move) for tensor in listed]
        cuda.launched.clear()
        cuda.made.clear()
        before = dict(launch_counts)
        grads = repeat(prepared, moved)
        ours, made = list(cuda.launched), list(cuda.made)
        counted = {name: count - before[name] for name, count in launch_counts.items() if count != before[name]}
        assert counted == {entry: 1 for entry, _ in plan._launched}
        assert list(grads) == [*made[:3], None]
        for grad, like in zip(grads, listed[6:]):
            assert (grad.shape, grad.stride(), grad.dtype) == (like.shape, like.stride(), like.dtype)
        # The same call by the plan, with its workspace where the prepared one has had its own.
        lane = next(iter(driver._lanes.values()), [0])[-1]
        small = 4 * plan._workspace_floats <= driver.LANE_BYTES - driver.LANE_COUNTERS_BYTES
        assert (len(made) == 3 and lane != 0) if small else (made[3].shape == (plan._workspace_floats,))
        start = lane + driver.LANE_COUNTERS_BYTES if small else made[3].data_ptr()
        monkeypatch.setattr(backward, "_allocate", lambda *_, start=start: OnDevice(torch.empty(0), start))
        cuda.launched.clear()
        with monkeypatch.context() as patch:
            if small:
                patch.setattr(driver, "counters", lambda *_, lane=lane: lane)
            plan(*moved[:6], *grads[:3])
        if small and not plan._counter_bytes:  # where nobody counts, an address is of no interest
            for *_, params, _ in ours:
                params.counters = None
        assert as_values(ours) == as_values(cuda.launched) and len(ours) == len(plan._launched)
        assert all(launch[0][3] == 77 for launch in ours)


@pytest.mark.parametrize("wanted", [(False, True, True), (True, True, False), (True, False, True)])
def test_gradients_that_nobody_asks_for(cuda, wanted):
    listed = tensors()
    if not wanted[0]:
        listed[6] = None
    _, prepared = prepare_backward(listed, wanted=wanted)
    cuda.launched.clear()
    grads = repeat(prepared, listed)
    assert [grad is not None for grad in grads] == [*wanted, False]
    assert len(cuda.launched) == 2 + wanted[0]
    assert bool(cuda.launched[0][3].grad_query) == wanted[0]


@pytest.mark.parametrize("index", [0, 1, 2, 3, 5])
def test_addresses_that_the_copy_engine_cannot_walk_are_refused_before_anything(cuda, index):
    listed = tensors()
    _, prepared = prepare_backward(listed)
    listed[index] = OnDevice(listed[index]._tensor, listed[index].data_ptr() + 8)
    with pytest.raises(KernelUnavailable, match="multiples of 16"):
        repeat(prepared, listed)
    assert not cuda.launched and not cuda.made


def test_masks_and_dropout_are_not_prepared(cuda, monkeypatch):
    listed = tensors(head_dim=64)
    plan = backward.Plan(*listed, False, 0.25, False, dropout_p=0.5)
    dropped = Repeat(plan, listed[6:], (True, True, True, False))
    assert dropped.prepared(listed[0]) is dropped


@pytest.mark.parametrize("failed", [0, 1])
def test_launches_that_fail(cuda, failed):
    listed = tensors()
    _, prepared = prepare_backward(listed)
    good = [0] * failed
    cuda.failures["cuLaunchKernelEx"] = [*good, NO_CONTEXT, NO_CONTEXT]
    repeat(prepared, listed)  # the thread has a context now
    assert len(cuda.launched) == 3 - failed
    cuda.failures["cuLaunchKernelEx"] = [*good, REFUSED, REFUSED]
    with pytest.raises(KernelUnavailable if failed == 0 else driver.DriverError):
        repeat(prepared, listed)
    cuda.failures["cuLaunchKernelEx"] = [*good, BROKEN, BROKEN]
    with pytest.raises(driver.DriverError, match=str(BROKEN)):
        repeat(prepared, listed)
    cuda.failures.clear()
    assert len(repeat(prepared, listed)) == 4


def test_a_lane_is_of_one_call_at_a_time(cuda, monkeypatch):
    """Another thread may launch on the same stream between the launches of a call."""
    listed = tensors()
    _, prepared = prepare_backward(listed)
    repeat(prepared, listed)  # leaves a lane for the next
    cuda.launched.clear()
    launch = cuda.do_cuLaunchKernelEx

    def interrupted(*arguments):
        code = launch(*arguments)
        if len(cuda.launched) == 2:
            other = threading.Thread(target=lambda: repeat(prepared, listed))
            other.start()
            other.join()
        return code

    cuda.do_cuLaunchKernelEx = interrupted
    repeat(prepared, listed)
    assert len(cuda.launched) == 6
    sums = [params.sums for *_, params, _ in cuda.launched]
    assert sums[0] == sums[1] == sums[5] != sums[2] == sums[3] == sums[4]
    (spare,) = driver._lanes.values()
    assert len(spare) == len(set(spare)) == 2


def test_who_has_no_lane(cuda, monkeypatch):
    """What is captured may run beside anything, and a stream may be as many streams as there are threads."""
    listed = tensors()
    plan, prepared = prepare_backward(listed)

    def has_workspace_of_its_own():
        cuda.made.clear()
        repeat(prepared, listed)
        return len(cuda.made) == 4 and cuda.launched[-1][3].sums == cuda.made[3].data_ptr()

    assert 4 * plan._workspace_floats <= driver.LANE_BYTES - driver.LANE_COUNTERS_BYTES
    assert not has_workspace_of_its_own()
    monkeypatch.setattr(driver, "_is_capturing", lambda: True)
    assert has_workspace_of_its_own()
    monkeypatch.setattr(driver, "_is_capturing", lambda: False)
    assert driver.lanes(0, 2) is None and driver.lanes(0, 78) == [] and driver.lanes(0, 78) is driver.lanes(0, 78)
    assert len(driver.lanes(0, 77)) == 1
    # Nor has a call where there is no room, or enough of them.
    driver.lanes(0, 77).clear()
    cuda.failures["cuMemAlloc_v2"] = [2]  # out of memory
    assert has_workspace_of_its_own() and driver._num_lanes == {0: 1}
    driver._num_lanes[0] = driver.MAX_LANES
    assert has_workspace_of_its_own() and driver.lanes(0, 77) == []
    assert driver.new_lane(0) == 0 != driver.new_lane(1)


def test_another_stream_or_device_becomes_the_launches(cuda, monkeypatch):
    listed = tensors()
    for stream in (77, 78, 77, 0):
        monkeypatch.setattr(driver, "current_stream", lambda index, stream=stream: stream)
        _, other = prepare_backward(listed)
        for call in (other, other):
            cuda.launched.clear()
            repeat(call, listed)
            assert [launch[0][3] for launch in cuda.launched] == [stream or None] * 3
    streams = iter((5, 6, 6))
    monkeypatch.setattr(driver, "current_stream", lambda index: next(streams))
    _, other = prepare_backward(listed)
    cuda.launched.clear()
    for _ in range(3):
        repeat(other, listed)
    assert [launch[0][3] for launch in cuda.launched] == [5] * 3 + [6] * 6
    current = [1]

    @contextlib.contextmanager
    def device(index):
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(driver, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(driver, "current_stream", lambda index: 90 + current[0])
    _, other = prepare_backward(listed)
    cuda.launched.clear()
    repeat(other, listed)
    assert [launch[0][3] for launch in cuda.launched] == [90] * 3 and current == [1]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_prepared_forward_launches_what_its_plan_launches(cuda, monkeypatch, is_causal, needs_grad):
    query, key, value, out, lse = tensors(batch=1, seqlen_q=64, seqlen_k=64)[:5]
    plan = forward.plan(query, key, value, out, needs_grad, is_causal, 0.25)
    of = lambda tensor: ((*tensor.shape,), tensor.stride(), tensor.dtype)  # noqa: E731
    long_way = []
    prepared = plan.prepared(of(out), of(lse) if needs_grad else None, query, lambda *qkv: long_way.append(qkv))
    for move in (0, 1 << 12):
        moved = [OnDevice(tensor._tensor, tensor.data_ptr() + move) for tensor in (query, key, value)]
        cuda.launched.clear()
        before = launch_counts[forward.ENTRY]
        made, rows = prepared(*moved)
        assert launch_counts[forward.ENTRY] == before + 1
        assert (rows is not None) == needs_grad and of(made) == of(out)
        assert rows is None or of(rows) == of(lse)
        plan(*moved, made, rows)
        ours, theirs = as_values(cuda.launched)
        assert ours == theirs and bool(cuda.launched[0][3].counters) == is_causal
    assert not long_way
    cuda.failures["cuLaunchKernelEx"] = [REFUSED, REFUSED]
    with pytest.raises(KernelUnavailable):
        prepared(query, key, value)
    monkeypatch.setattr(driver, "current_device", lambda: 1)
    plan.prepared(of(out), None, query, lambda *qkv: long_way.append(qkv))(query, key, value)
    assert long_way == [(query, key, value)]


def test_a_prepared_forward_serves_deterministic_mode_too(cuda):
    query, key, value, out, _ = tensors(batch=1, seqlen_q=64, seqlen_k=64)[:5]
    plan, long_way = forward.plan(query, key, value, out, False, False, 0.25), []
    of_out = (*out.shape,), out.stride(), out.dtype
    prepared = plan.prepared(of_out, None, query, lambda *qkv: long_way.append(qkv))
    with deterministic_mode():
        prepared(query, key, value)
    assert not long_way and len(cuda.made) == 1
