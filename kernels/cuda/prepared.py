"""The plain Hopper backward once more, for a call that differs from one before in addresses alone.

May import torch, ``driver.py``, ``_torch.py`` and ``KernelUnavailable``. Imported by ``backward.py``, whose ``Plan`` does
the same for any call. What does not change is bound here once, in a closure: on small calls the CPU is what takes the
time, and the three launches, four allocations and ten addresses are most of what is left of it. Figures in NOTES.md.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ... import _torch, driver
from .. import KernelUnavailable, launch_counts

Gradients = tuple[torch.Tensor | None, ...]


class Constants(NamedTuple):
    """What a ``Plan`` has worked out. Offsets in bytes."""

    device_index: int
    kernels: tuple[tuple[str, ctypes.c_void_p, driver.LaunchConfig, bool], ...]
    """Of each launch: the kernel's name, its CUfunction, its launch, whether it is given the tensor maps."""
    params: ctypes.Structure
    maps: Sequence[driver.TensorMaps]
    """Of query, key, value, grad_out and the gradients of key and value."""
    workspace_floats: int
    statistics_in_gradient: bool
    sums_at: int  # in the workspace
    semaphores_at: int  # in the workspace, or, where they are counters, behind those
    semaphores_are_counters: bool
    counter_bytes: int


_ADDRESSES = struct.Struct("@15P")  # six tensor maps, the params, and the first eight fields of these


class _Frame:
    """Launch arguments in use by one thread at a time: as ``driver.Frame``, all that changes in one piece of memory."""

    __slots__ = ("_kept", "configs", "launches", "memory", "params_at", "stream")

    def __init__(self, constants: Constants) -> None:
        pointer = ctypes.sizeof(ctypes.c_void_p)
        params_offset = (len(constants.maps) + 1) * pointer
        memory = (ctypes.c_char * (params_offset + ctypes.sizeof(constants.params)))()
        start = ctypes.addressof(memory)
        self.params_at = start + params_offset
        ctypes.memmove(self.params_at, ctypes.byref(constants.params), ctypes.sizeof(constants.params))
        self.memory = memoryview(memory)
        self.configs = [driver.LaunchConfig.from_buffer_copy(config) for _, _, config, _ in constants.kernels]
        with_maps, only_params = ctypes.c_void_p(start), ctypes.c_void_p(self.params_at - pointer)
        # Tuples, which ctypes takes as they are: a call costs 0.5 us, and as much again where its arguments are made.
        self.launches = [
            (name, (ctypes.byref(config), function, with_maps if has_maps else only_params, None))
            for config, (name, function, _, has_maps) in zip(self.configs, constants.kernels)
        ]
        self.stream = 0  # as a LaunchConfig has it


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


def prepare(
    constants: Constants, grads: Sequence[tuple[Any, ...] | None], wanted: Sequence[bool], query: torch.Tensor
) -> Callable[..., Gradients]:
    """A function (grad_out, query, key, value, out, logsumexp) -> gradients of query, key, value, and None for a mask.

    grads: shape, strides and dtype of the gradients of query (or None), key and value that are to be made; wanted:
    which of them are to be returned. Its tensors must be like those that the plan was made for: `query` is one of them.
    It raises KernelUnavailable before any launch where an address is no multiple of 16 bytes.
    """
    index = constants.device_index
    query_map, key_map, value_map, grad_out_map, grad_key_map, grad_value_map = (m.get for m in constants.maps)
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
    pack = _ADDRESSES.pack_into
    frames: list[_Frame] = []
    current_device, current_stream = driver.current_device, driver.current_stream

    def repeat(grad_out, query, key, value, out, logsumexp) -> Gradients:
        if current_device() != index:
            with torch.cuda.device(index):
                return repeat(grad_out, query, key, value, out, logsumexp)
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
        try:
            frame = frames.pop()
        except IndexError:
            frame = _Frame(constants)
        if frame.stream != stream:
            frame.stream = stream
            for config in frame.configs:
                config.stream = stream
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
