"""The Hopper kernels once more, for plain calls that differ from one before in addresses alone.

May import torch, ``driver.py``, ``_torch.py`` and ``KernelUnavailable``. Imported by ``forward.py`` and
``backward.py``, whose ``Plan`` does the same for any call. What does not change is bound here once, in a closure: small
calls take as long as the CPU does, and allocations, addresses and launches are most of what is left of that. Figures
in NOTES.md.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ... import _torch, driver
from .. import KernelUnavailable, launch_counts

Outputs = tuple[torch.Tensor, torch.Tensor | None]
Gradients = tuple[torch.Tensor | None, ...]


class Launches(NamedTuple):
    """What a ``Plan`` has worked out.

    kernels: of each launch the kernel's name, its CUfunction, grid and blocks, and whether it is given the tensor maps
    before the params, which all have.
    """

    device_index: int
    kernels: tuple[tuple[str, ctypes.c_void_p, driver.LaunchConfig, bool], ...]
    params: ctypes.Structure
    maps: Sequence[driver.TensorMaps]


class Backward(NamedTuple):
    """Of the backward. Its tensor maps are those of query, key, value, grad_out and of key's and value's gradients."""

    launches: Launches
    workspace_floats: int
    statistics_in_gradient: bool
    sums_at: int  # in bytes, in the workspace
    semaphores_at: int  # in the workspace, or, where they are counters, behind those
    semaphores_are_counters: bool
    counter_bytes: int


# Tensor maps, the params, and the first fields of these.
_FORWARD_ADDRESSES = struct.Struct("@8P")
_BACKWARD_ADDRESSES = struct.Struct("@15P")


class _Frame:
    """Launch arguments in use by one thread at a time: as ``driver.Frame``, all that changes in one piece of memory."""

    __slots__ = ("configs", "launches", "memory", "params_at", "stream")

    def __init__(self, launches: Launches) -> None:
        pointer = ctypes.sizeof(ctypes.c_void_p)
        params_offset = (len(launches.maps) + 1) * pointer
        memory = (ctypes.c_char * (params_offset + ctypes.sizeof(launches.params)))()
        start = ctypes.addressof(memory)
        self.params_at = start + params_offset
        ctypes.memmove(self.params_at, ctypes.byref(launches.params), ctypes.sizeof(launches.params))
        self.memory = memoryview(memory)
        self.configs = [driver.LaunchConfig.from_buffer_copy(config) for _, _, config, _ in launches.kernels]
        with_maps, only_params = ctypes.c_void_p(start), ctypes.c_void_p(self.params_at - pointer)
        # Tuples, which ctypes takes as they are: a call costs 0.5 us, and as much again where its arguments are made.
        self.launches = [
            (name, (ctypes.byref(config), function, with_maps if has_maps else only_params, None))
            for config, (name, function, _, has_maps) in zip(self.configs, launches.kernels)
        ]
        self.stream = 0  # as a LaunchConfig has it

    def set_stream(self, stream: int) -> None:
        """Launch on this one."""
        self.stream = stream
        for config in self.configs:
            config.stream = stream


def _frame_for(stream: int, frames: list[_Frame], launches: Launches) -> _Frame:
    """One of those that are not in use, or a new one."""
    try:
        frame = frames.pop()
    except IndexError:
        frame = _Frame(launches)
    if frame.stream != stream:
        frame.set_stream(stream)
    return frame


def _launch_again(frame: _Frame, name: str, device_index: int) -> None:
    """What has failed, now with a context and an error's words where that is what it takes."""
    number = [launched for launched, _ in frame.launches].index(name)
    _, function, pointers, _ = frame.launches[number][1]
    try:
        driver.launch(frame.configs[number], function, pointers, device_index, frame.stream)
    except driver.DriverError as error:
        if error.is_refusal and number == 0:
            raise KernelUnavailable(f"{name}: {error}") from error
        raise


def forward(
    launches: Launches,
    has_counters: bool,
    of_out: tuple[Any, ...],
    of_logsumexp: tuple[Any, ...] | None,
    query: torch.Tensor,
    otherwise: Callable[..., Outputs],
) -> Callable[..., Outputs]:
    """A function (query, key, value) -> (out, logsumexp or None) of aligned tensors like those that the plan is for.

    launches: of one kernel, with maps of query, key, value and out; has_counters: it counts; of_out, of_logsumexp:
    shape, strides and dtype of what is to be made; query: one that it will be called with; otherwise: the same function
    the long way, for another current device.
    """
    index = launches.device_index
    query_map, key_map, value_map, out_map = (maps.get for maps in launches.maps)
    with torch.cuda.device(index):
        empty = _torch.allocator(query)
    pack = _FORWARD_ADDRESSES.pack_into
    frames: list[_Frame] = []
    current_device, current_stream = driver.current_device, driver.current_stream

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Outputs:
        if current_device() != index:
            return otherwise(query, key, value)
        out = empty(*of_out)
        out_at = out.data_ptr()
        logsumexp, logsumexp_at = None, 0
        if of_logsumexp is not None:
            logsumexp = empty(*of_logsumexp)
            logsumexp_at = logsumexp.data_ptr()
        # These stay referenced until the driver has copied them.
        map_1, map_2 = query_map(query.data_ptr()), key_map(key.data_ptr())
        map_3, map_4 = value_map(value.data_ptr()), out_map(out_at)
        stream = current_stream(index)
        counters = driver.counters(index, stream) if has_counters else 0
        frame = _frame_for(stream, frames, launches)
        pack(
            frame.memory, 0, map_1[0], map_2[0], map_3[0], map_4[0], frame.params_at, out_at, logsumexp_at, counters
        )  # fmt: skip
        name, arguments = frame.launches[0]
        launch_counts[name] += 1
        if driver.launcher()(*arguments):
            _launch_again(frame, name, index)
        frames.append(frame)
        return out, logsumexp

    return call


def backward(
    constants: Backward,
    grads: Sequence[tuple[Any, ...] | None],
    wanted: Sequence[bool],
    query: torch.Tensor,
    otherwise: Callable[..., Gradients],
) -> Callable[..., Gradients]:
    """A function (grad_out, query, key, value, out, logsumexp) -> gradients of query, key, value, and None for a mask.

    grads: shape, strides and dtype of the gradients of query (or None), key and value that are to be made; wanted:
    which of them are to be returned; otherwise: the same function the long way, for another current device. Its tensors
    must be like those that the plan was made for: `query` is one of them.
    It raises KernelUnavailable before any launch where an address is no multiple of 16 bytes.
    """
    launches = constants.launches
    index = launches.device_index
    query_map, key_map, value_map, grad_out_map, grad_key_map, grad_value_map = (maps.get for maps in launches.maps)
    workspace = (constants.workspace_floats,), (1,), torch.float32
    of_query, of_key, of_value = grads
    statistics_in_gradient, counter_bytes = constants.statistics_in_gradient, constants.counter_bytes
    sums_at, semaphores_at = constants.sums_at, constants.semaphores_at
    semaphores_are_counters = constants.semaphores_are_counters
    key_wanted, value_wanted = wanted[1:3]
    all_wanted = key_wanted and value_wanted
    with torch.cuda.device(index):
        empty = _torch.allocator(query)
    fits_lane = (
        counter_bytes <= driver.LANE_COUNTERS_BYTES
        and 4 * constants.workspace_floats <= driver.LANE_BYTES - driver.LANE_COUNTERS_BYTES
    )
    lanes_of = driver.lanes
    pack = _BACKWARD_ADDRESSES.pack_into
    frames: list[_Frame] = []
    current_device, current_stream = driver.current_device, driver.current_stream

    def repeat(grad_out, query, key, value, out, logsumexp) -> Gradients:
        if current_device() != index:
            return otherwise(grad_out, query, key, value, out, logsumexp)
        query_at, key_at, value_at, out_at = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
        grad_out_at = grad_out.data_ptr()
        if (query_at | key_at | value_at | out_at | grad_out_at) & 15:
            raise KernelUnavailable("the Hopper kernels need addresses that are multiples of 16 bytes")
        if of_query is None:
            grad_query, grad_query_at = None, 0
        else:
            grad_query = empty(*of_query)
            grad_query_at = grad_query.data_ptr()
        grad_key, grad_value = empty(*of_key), empty(*of_value)
        stream = current_stream(index)
        lanes = lanes_of(index, stream) if fits_lane else None
        counters = 0
        if lanes is not None:
            try:
                counters = lanes.pop()
            except IndexError:
                counters = driver.new_lane(index)
        if counters:
            start = counters + driver.LANE_COUNTERS_BYTES
        else:
            lanes = None
            sums = empty(*workspace)
            start = sums.data_ptr()
            if counter_bytes:
                counters = driver.counters(index, stream, counter_bytes)
        # These stay referenced until the driver has copied them.
        map_1, map_2, map_3 = query_map(query_at), key_map(key_at), value_map(value_at)
        map_4 = grad_out_map(grad_out_at)
        map_5, map_6 = grad_key_map(grad_key.data_ptr()), grad_value_map(grad_value.data_ptr())
        frame = _frame_for(stream, frames, launches)
        pack(
            frame.memory, 0, map_1[0], map_2[0], map_3[0], map_4[0], map_5[0], map_6[0], frame.params_at, out_at,
            grad_out_at, logsumexp.data_ptr(), grad_query_at, grad_query_at if statistics_in_gradient else start,
            start + sums_at, (counters if semaphores_are_counters else start) + semaphores_at, counters,
        )  # fmt: skip
        launch = driver.launcher()
        for name, arguments in frame.launches:
            launch_counts[name] += 1
            if launch(*arguments):
                _launch_again(frame, name, index)
        frames.append(frame)
        if lanes is not None:
            lanes.append(counters)
        if all_wanted:
            return grad_query, grad_key, grad_value, None
        return grad_query, grad_key if key_wanted else None, grad_value if value_wanted else None, None

    return repeat
