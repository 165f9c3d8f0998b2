"""The CUDA driver, as far as our own kernels need it: load a binary, encode tensor maps, launch.

May import torch. Imported by the launchers in ``kernels/cuda``. It calls libcuda by ctypes: with every argument but the
stream and the pointers prepared, a launch costs 0.3 µs of Python, where cuda.bindings packs and unpacks for 2 to 6 µs.
Private names of torch: ``torch._C._cuda_getCurrentRawStream`` and ``_cuda_getDevice``, which Inductor's generated code
calls too, and ``_cuda_isCurrentStreamCapturing``; ``torch.cuda.current_stream(device).cuda_stream``,
``current_device()`` and ``is_current_stream_capturing()`` are their slow equivalents.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .nvrtc import Binary

__all__ = [
    "DriverError",
    "Frame",
    "LaunchConfig",
    "TensorMaps",
    "bind_context",
    "cluster_attributes",
    "counters",
    "current_device",
    "current_stream",
    "launch",
    "load_function",
    "max_active_clusters",
]

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_CLUSTER_DIMENSION = 4
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_CAPTURE_MODE_RELAXED = 2
_STREAM_NON_BLOCKING = 1
_INVALID_CONTEXT = (3, 201)  # CUDA_ERROR_NOT_INITIALIZED: no context in this thread; CUDA_ERROR_INVALID_CONTEXT
_OUT_OF_MEMORY = 2
_REFUSALS = (1, 701)  # CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
_STREAM_PER_THREAD = 2
_MAP_DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_*
_SWIZZLE_128B = 3
_L2_PROMOTION = {128: 2, 256: 3}  # CU_TENSOR_MAP_L2_PROMOTION_*

_Pointer = ctypes.c_void_p
# Absent on builds without CUDA, where nothing is launched.
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


class DriverError(RuntimeError):
    """A call to the driver, `what`, failed. `code` is its CUresult."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what} failed: {_error_name(code)}")
        self.what = what
        self.code = code

    def __reduce__(self) -> Any:
        # Else a copy, in another process say, would be made from the message alone.
        return type(self), (self.what, self.code)

    @property
    def is_refusal(self) -> bool:
        """Did a launch fail for what it asked, and not for an error of earlier work that comes to light here?"""
        return self.code in _REFUSALS


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", _Pointer),
        ("attributes", _Pointer),
        ("num_attributes", ctypes.c_uint),
    ]


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _error_name(code: int) -> str:
    text = ctypes.c_char_p()
    with contextlib.suppress(OSError, AttributeError):
        _library().cuGetErrorName(code, ctypes.byref(text))
    return text.value.decode() if text.value else f"CUresult {code}"


def _check(what: str, code: int) -> None:
    if code == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{what}: out of memory")
    if code:
        raise DriverError(what, code)


# ------------------------------------------------------------------------------------------------------------- contexts


def bind_context(device_index: int) -> None:
    """Make the device's primary context current in this thread if it has none.

    Autograd's own threads may have none: PyTorch sets none where device 0 is wanted and its cache has the memory.
    """
    cuda = _library()
    current, context = _Pointer(), _Pointer()
    _check("cuInit", cuda.cuInit(0))
    if cuda.cuCtxGetCurrent(ctypes.byref(current)) or not current:
        _check("cuDevicePrimaryCtxRetain", cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device_index))
        _check("cuCtxSetCurrent", cuda.cuCtxSetCurrent(context))


@contextlib.contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Loading a module allocates, which is forbidden while this thread captures a graph, unless it says so."""
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    exchange = _library().cuThreadExchangeStreamCaptureMode
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


# -------------------------------------------------------------------------------------------------------------- modules

_functions: dict[tuple[str, str, int], int] = {}
_lock = threading.Lock()


def load_function(binary: Binary, name: str, device_index: int, shared_bytes: int) -> int:
    """The handle of a kernel (CUfunction) on a device, which may ask for up to `shared_bytes` of dynamic shared memory.

    Loaded once per device and kept until the process ends. Raises DriverError and torch.OutOfMemoryError.
    """
    found = _functions.get((binary.key, name, device_index))
    if found is not None:
        return found
    with _lock, torch.cuda.device(device_index):
        found = _functions.get((binary.key, name, device_index))
        if found is None:
            bind_context(device_index)
            cuda = _library()
            module, function = _Pointer(), _Pointer()
            with _relaxed_capture():
                _check("cuModuleLoadData", cuda.cuModuleLoadData(ctypes.byref(module), binary.cubin))
                _check("cuModuleGetFunction", cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
                _check(
                    f"{shared_bytes} bytes of shared memory for {name}",
                    cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
                )
                # With lazy loading the code is copied to the GPU by the first launch, if not here.
                getattr(cuda, "cuFuncLoad", lambda _: 0)(function)
            found = _functions[binary.key, name, device_index] = function.value or 0
    return found


def _after_fork() -> None:
    """Nothing of the parent's driver is of any use in a child, and its locks may be held by threads that are gone."""
    global _lock, _unused_lock
    _lock, _unused_lock = threading.Lock(), threading.Lock()
    _functions.clear()
    _of_stream.clear()
    _unused.clear()
    _lanes.clear()
    _num_lanes.clear()
    _clusters.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# ---------------------------------------------------------------------------------------------------------- tensor maps


class _MadeWhenMissing(dict):  # type: ignore[type-arg]
    """A dictionary that asks `make` for what it does not hold; which keeps it there, or not."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[int], tuple[int, Any]]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, pointer: int) -> tuple[int, Any]:
        return self._make(pointer)


class TensorMaps:
    """Tensor maps (CUtensorMap) for [B, H, S, D] tensors that differ in nothing but their address.

    The copy engine then takes boxes of `rows` rows and 128 bytes of columns of one head at coordinates (column, row,
    head, batch), and writes them to shared memory in the 128-byte swizzle. What lies outside of the tensor is zeros.
    """

    __slots__ = ("_device_index", "_maps", "_template", "get")

    CAPACITY = 256

    def __init__(
        self,
        dtype: torch.dtype,
        shape: Sequence[int],
        stride: Sequence[int],
        rows: int,
        pointer: int,
        device_index: int,
        fetched: int = 256,
    ) -> None:
        """shape and stride in elements, of rank 4; pointer: some valid address, a multiple of 16.

        fetched: bytes that L2 fetches from memory at a time, 128 or 256.

        Raises DriverError for what the copy engine cannot walk.
        """
        self._device_index = device_index
        self._maps = _MadeWhenMissing(self._make)
        # No Python function of its own: the backward asks six times.
        self.get: Callable[[int], tuple[int, Any]] = self._maps.__getitem__
        """Where in host memory the map of the tensor at an address lies, and what must live as long as that is used."""
        self._template = _encode(dtype, shape, stride, rows, pointer, device_index, fetched)

    def _make(self, pointer: int) -> tuple[int, Any]:
        address, memory = _aligned(self._template)
        replace = _library().cuTensorMapReplaceAddress
        code = replace(_Pointer(address), _Pointer(pointer))
        if code in _INVALID_CONTEXT:
            bind_context(self._device_index)
            code = replace(_Pointer(address), _Pointer(pointer))
        _check("cuTensorMapReplaceAddress", code)
        maps = self._maps
        if len(maps) >= self.CAPACITY:
            # The oldest. Another thread may do the same at the same time, so that it is gone already.
            with contextlib.suppress(KeyError, RuntimeError, StopIteration):
                del maps[next(iter(maps))]
        found = maps[pointer] = address, memory
        return found


def _aligned(data: bytes) -> tuple[int, Any]:
    memory = ctypes.create_string_buffer(len(data) + 63)
    address = (ctypes.addressof(memory) + 63) & ~63
    ctypes.memmove(address, data, len(data))
    return address, memory


def _encode(
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int],
    rows: int,
    pointer: int,
    device_index: int,
    fetched: int,
) -> bytes:
    size = dtype.itemsize
    batch, heads, seqlen, head_dim = shape
    # A dimension of size one may have any stride in PyTorch; the copy engine wants a multiple of 16 bytes below 2^40.
    steps = [16 if n == 1 else step * size for n, step in ((seqlen, stride[2]), (heads, stride[1]), (batch, stride[0]))]
    address, memory = _aligned(bytes(128))
    arguments = (
        _Pointer(address),
        ctypes.c_int(_MAP_DTYPES[dtype]),
        ctypes.c_uint(4),
        _Pointer(pointer),
        (ctypes.c_uint64 * 4)(head_dim, seqlen, heads, batch),
        (ctypes.c_uint64 * 3)(*steps),
        (ctypes.c_uint32 * 4)(128 // size, rows, 1, 1),
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),
        ctypes.c_int(0),  # not interleaved
        ctypes.c_int(_SWIZZLE_128B),
        ctypes.c_int(_L2_PROMOTION[fetched]),
        ctypes.c_int(0),  # what lies outside is zero
    )
    bind_context(device_index)
    _check(f"cuTensorMapEncodeTiled for {list(shape)}", _library().cuTensorMapEncodeTiled(*arguments))
    data = ctypes.string_at(address, 128)
    del memory
    return data


# ------------------------------------------------------------------------------------------------------------- counters

_of_stream: dict[tuple[int, int], tuple[int, int]] = {}  # (address, size)
_unused: dict[int, tuple[int, int]] = {}  # likewise, what is left of a device's newest block
_unused_lock = threading.Lock()


def counters(device_index: int, stream: int, size: int = 32) -> int:
    """The address of `size` bytes on the device, zero, for a kernel that leaves them so and is launched on this stream.

    The current stream of the current device. Launches on one stream follow each other and share theirs; one that is
    captured into a graph has its own, since the graph may be replayed beside anything.
    """
    if _is_capturing():
        return _new_counters(device_index, size)
    if stream == _STREAM_PER_THREAD:  # one handle for as many streams as threads
        stream = -threading.get_ident()
    found = _of_stream.get((device_index, stream))
    if found is None or found[1] < size:
        # The smaller one is not freed: launches on their way may still count in it.
        size = max(2048, 1 << (size - 1).bit_length())
        found = _of_stream[device_index, stream] = _new_counters(device_index, size), size
    return found[0]


def _new_counters(device_index: int, size: int) -> int:
    """The next bytes of a block of zeros, at a multiple of 128."""
    size = -(-size // 128) * 128
    with _unused_lock:
        address, left = _unused.get(device_index, (0, 0))
        if left < size:
            left = max(size, 2**18)
            address = _allocate_zeros(device_index, left)
        _unused[device_index] = address + size, left - size
    return address


# As much as the driver gives out at a time. Calls that need more take longer on the GPU than on the CPU.
LANE_BYTES = 2 << 20
LANE_COUNTERS_BYTES = 2048
MAX_LANES = 16
_lanes: dict[tuple[int, int], list[int]] = {}
_num_lanes: dict[int, int] = {}  # by device; they are kept until the process ends


def lanes(device_index: int, stream: int) -> list[int] | None:
    """Memory for one call's launches on this stream, LANE_BYTES at each address; None where a call has to allocate.

    The current stream of the current device. First LANE_COUNTERS_BYTES of counters, as `counters` has them, then memory
    with anything in it. A call pops an address, or asks `new_lane` for one where there is none, and appends it when its
    last launch is on the stream: what other calls launch later runs later.
    """
    if stream == _STREAM_PER_THREAD or _is_capturing():
        return None
    found = _lanes.get((device_index, stream))
    return _lanes.setdefault((device_index, stream), []) if found is None else found


def new_lane(device_index: int) -> int:
    """Another address for `lanes`, or 0 where the device has no room or enough of them."""
    number = _num_lanes.get(device_index, 0)
    if number >= MAX_LANES:
        return 0
    try:
        address = _allocate_zeros(device_index, LANE_BYTES)
    except torch.OutOfMemoryError:
        return 0
    _num_lanes[device_index] = number + 1
    return address


def _allocate_zeros(device_index: int, size: int) -> int:
    """A new block of zeros, which is never freed. A stream of its own, so that no capture sees it."""
    cuda = _library()
    bind_context(device_index)
    memory, stream = ctypes.c_uint64(), _Pointer()
    with _relaxed_capture():
        _check("cuMemAlloc", cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(size)))
        _check("cuStreamCreate", cuda.cuStreamCreate(ctypes.byref(stream), _STREAM_NON_BLOCKING))
        code = cuda.cuMemsetD8Async(memory, ctypes.c_ubyte(0), ctypes.c_size_t(size), stream)
        _check("cuMemsetD8Async", code or cuda.cuStreamSynchronize(stream))
        cuda.cuStreamDestroy_v2(stream)
    return memory.value


# ------------------------------------------------------------------------------------------------------------- clusters


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_uint), ("padding", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


def cluster_attributes(size: int) -> Any:
    """A LaunchConfig's attributes (an array, to be kept as long as the config): clusters of `size` blocks along x.

    The launch may begin before what was launched before it has ended: the kernel waits for that by itself.
    """
    attributes = (_Attribute * 2)()
    attributes[0].id = _CLUSTER_DIMENSION
    attributes[0].value[0:3] = [size, 1, 1]
    attributes[1].id, attributes[1].value[0] = _PROGRAMMATIC_STREAM_SERIALIZATION, 1
    return attributes


# By function, shared memory and number of blocks in a cluster: the driver takes its time for the answer.
_clusters: dict[tuple[int, int, int], int] = {}


def max_active_clusters(function: Any, config: LaunchConfig, blocks: int) -> int:
    """How many clusters of such a launch the current device runs at a time; 0 where it has no room for one.

    config: with the cluster_attributes of so many blocks, of which only the first is of interest here. Blocks of a
    function differ in their shared memory alone.
    """
    key = function.value, config.shared_bytes, blocks
    known = _clusters.get(key)
    if known is not None:
        return known
    found = ctypes.c_int(0)
    config = LaunchConfig.from_buffer_copy(config)
    config.num_attributes = 1
    code = _library().cuOccupancyMaxActiveClusters(ctypes.byref(found), function, ctypes.byref(config))
    if code:
        return 0  # for now: what is wrong may be something else
    _clusters[key] = found.value
    return found.value


# --------------------------------------------------------------------------------------------------------------- launch


class Frame:
    """Launch arguments of kernels that share their last parameter, in use by one thread at a time.

    Only streams, `pointers` and fields of `params` change from call to call. pointers: first the addresses of as many
    tensor maps as the kernels have, then that of params. arguments: what `launch` takes for a kernel with all of these;
    only_params: for one with the last alone.
    """

    __slots__ = ("arguments", "configs", "only_params", "params", "pointers")

    def __init__(self, configs: Sequence[LaunchConfig], params: ctypes.Structure, num_maps: int = 0) -> None:
        """Copies configs and params."""
        self.configs = [LaunchConfig.from_buffer_copy(config) for config in configs]
        self.params: Any = type(params).from_buffer_copy(params)
        self.pointers = (_Pointer * (num_maps + 1))()
        self.pointers[num_maps] = ctypes.addressof(self.params)
        start = ctypes.addressof(self.pointers)
        self.arguments = _Pointer(start)
        self.only_params = _Pointer(start + num_maps * ctypes.sizeof(_Pointer))


def launch(config: Any, function: Any, arguments: Any, device_index: int, stream: int) -> None:
    """Launch on a stream of a device, which must be the current one. Any thread.

    config: a LaunchConfig, whose stream is set here; function: c_void_p of a CUfunction; arguments: c_void_p of an
    array of pointers to the kernel's parameters. The driver has copied all of these when this returns.
    Raises DriverError.
    """
    config.stream = stream
    launcher = _launcher or _find_launcher()
    code = launcher(ctypes.byref(config), function, arguments, None)
    if code:
        if code in _INVALID_CONTEXT:
            bind_context(device_index)
            code = launcher(ctypes.byref(config), function, arguments, None)
        _check("cuLaunchKernelEx", code)


_launcher: Any = None


def launcher() -> Any:
    """cuLaunchKernelEx itself, for who has its arguments ready. What fails is to be given to `launch`.

    It lets other threads of Python run meanwhile, as it must where a full queue makes it wait: what is first in the
    queue may itself wait for another thread.
    """
    return _launcher or _find_launcher()


def _find_launcher() -> Any:
    global _launcher
    _launcher = _library().cuLaunchKernelEx
    return _launcher
