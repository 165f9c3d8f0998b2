"""Compile a Triton kernel for given arguments and launch the result directly.

May import torch and triton. Imported by ``attention.py``. ``@triton.jit``'s own launcher inspects every argument on
every call (19 us on an H200 host); a ``Launch`` has done that once, and a call only packs pointers (5 us).

Private interfaces, all in this file: ``triton.compile`` with ``ASTSource`` and ``GPUTarget`` (ahead-of-time
compilation, as triton's own tools use it), the NVIDIA backend's launcher class, whose C function ``launch`` has one
argument order in Triton 3.6 and another in 3.7 and 3.8, and its encoder of tensor maps. If they go, ``Launch.__call__``
can fall back to what ``_launch_described`` does. ``torch._C._cuda_getCurrentRawStream`` is what Inductor's generated
code calls; ``torch.cuda.current_stream(device).cuda_stream`` is its slow equivalent.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import KernelUnavailable, launch_counts
from .tiles import Tile

try:
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
except ImportError:  # a Triton without the NVIDIA backend: no tensor maps there
    TMA_DTYPE_DEVICE_TO_HOST = {}


_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.bool: "*i1",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class TensorMap:
    """How a [B, H, rows, columns] tensor is cut into boxes of [1, 1, block_rows, block_columns] for the copy engine."""

    __slots__ = ("_block", "_bytes", "_encode", "_encoded", "_shape", "_strides", "type")

    def __init__(self, tensor: torch.Tensor, block_rows: int, block_columns: int):
        self._block = [1, 1, block_rows, block_columns]
        self._bytes = tensor.dtype == torch.bool  # the copy engine has no type of one bit
        self.type = f"tensordesc<{'i8' if self._bytes else _TYPES[tensor.dtype][1:]}{self._block}>"
        self._shape = list(tensor.shape)
        # A dimension of size 1 may have any stride in PyTorch; a tensor map wants a multiple of 16 bytes.
        outer = zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
        strides = [stride if size > 1 else 16 for size, stride in outer]
        self._strides = [*strides, 1]
        self._encoded: dict[int, tuple] = {}

    @staticmethod
    def accepts(tensor: torch.Tensor) -> bool:
        """Is the tensor's memory one that the copy engine can walk? 16-byte alignment, dense last dimension."""
        per_vector = 16 // tensor.element_size()
        outer = zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
        return (
            tensor.stride(3) == 1
            and tensor.data_ptr() % 16 == 0
            and all(size == 1 or (stride > 0 and stride % per_vector == 0) for size, stride in outer)
        )

    @property
    def expanded_types(self) -> list[str]:
        """What one descriptor argument is on the driver's side: the map, then sizes and strides."""
        return ["nvTmaDesc", *["i32"] * 4, *["i64"] * 4]

    def describe(self, tensor: torch.Tensor) -> TensorDescriptor:
        """The object that ``kernel[grid](...)`` takes: for the interpreter and for profilers."""
        tensor = tensor.view(torch.uint8) if self._bytes else tensor
        return TensorDescriptor(tensor, self._shape, self._strides, self._block)

    def prepare(self, layout: dict) -> None:
        """Learn from the compiled kernel how its boxes lie in shared memory."""
        utils = driver.active.utils
        fill = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor
        kind = TMA_DTYPE_DEVICE_TO_HOST[layout["elem_type"]]
        before = layout["swizzle"], layout["elem_size"], kind, layout["block_size"], self._shape, self._strides, 0
        self._encode = lambda pointer: fill(pointer, *before)

    def arguments(self, pointer: int, device_index: int) -> tuple:
        """The nine launch arguments for a tensor at this address; those of recent addresses are kept (1.5 us each)."""
        arguments = self._encoded.get(pointer)
        if arguments is None:
            if len(self._encoded) >= 64:
                self._encoded.clear()
            _bind_context(device_index)
            arguments = self._encoded[pointer] = (self._encode(pointer), *self._shape, *self._strides)
        return arguments


_map_launchers: dict[Any, Any] = {}  # by kernel
_current_device = getattr(torch._C, "_cuda_getDevice", None)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_thread = threading.local()


def _bind_context(device_index: int) -> None:
    """Make the device's primary context current in this thread: encoding a tensor map needs it, launching does not.

    Autograd's own threads may have none yet: PyTorch sets none where device 0 is wanted and its cache has the memory.
    """
    bound = _thread.__dict__.setdefault("bound", set())
    if device_index not in bound:
        cuda = ctypes.CDLL("libcuda.so.1")
        current, context = ctypes.c_void_p(), ctypes.c_void_p()
        if cuda.cuCtxGetCurrent(ctypes.byref(current)) == 0 and not current:
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device_index)
            cuda.cuCtxSetCurrent(context)
        bound.add(device_index)


def device_target(device: torch.device) -> GPUTarget:
    """The target of one of this machine's GPUs."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return GPUTarget("hip", properties.gcnArchName.split(":")[0], properties.warp_size)
    return GPUTarget("cuda", properties.major * 10 + properties.minor, 32)


def compile_kernel(kernel, types: dict[str, str], constants: dict[str, Any], divisors: dict[str, int], tile: Tile,
                   target: GPUTarget, dependent: bool = False):
    """Compile for a target, with or without such a GPU in the machine.

    types: argument name to "*bf16", "i32", ... or "constexpr"; constants: the values of the latter; divisors: what a
    pointer or an integer is known to be a multiple of; dependent: as of Launch.
    """
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", divisor]] for name, divisor in divisors.items()}
    source = ASTSource(kernel, types, constants, attributes)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if dependent:
        options["launch_pdl"] = True
    return triton.compile(source, target=target, options=options)


# Kernels on their devices: a call of another size is often the same kernel with other numbers, and asking Triton's
# cache on disk takes milliseconds where a growing sequence brings a new size with each token.
_loaded: dict[tuple, Any] = {}


def is_watched() -> bool:
    """Do Triton's launch hooks, a profiler's, want to see launches?"""
    hooks = knobs.runtime
    return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)


@functools.cache
def _code(expression: str):
    """Compiled Python: 60 us, and few expressions for many launches."""
    return compile(expression, "<arguments of a launch>", "eval")


class Launch:
    """One kernel with every argument but its pointers already in place.

    Made in two steps: the description (no compiler, no GPU), then ``load`` for a device. After that, calling it with
    its tensors launches on the current stream of their device; no other work is done.
    """

    __slots__ = ("_absent", "_arguments", "_dependent", "_description", "_fixed", "_grid", "_interpreted", "_maps",
                 "_num_tensors", "_run", "compiled", "device_index", "name")

    def __init__(self, kernel, grid: int, pointers: dict[str, torch.Tensor | None], scalars: dict[str, tuple[str, Any]],
                 constants: dict[str, Any], divisors: dict[str, int], tile: Tile, maps: dict[str, TensorMap],
                 dependent: bool = False):
        """pointers, scalars (type and value) and constants are in the order of the kernel's arguments.

        The tensors named in maps arrive in the kernel as tensor maps instead of pointers. dependent: the kernel itself
        waits for the launches before it (programmatic dependent launch), and may begin before they have ended.
        """
        self._grid = grid
        self.name = kernel.__name__
        self._interpreted = kernel if isinstance(kernel, InterpretedFunction) else None
        values = [value for _, value in scalars.values()]
        self._fixed = (*values, *(constants.values() if self._interpreted is not None else [None] * len(constants)))
        types = {name: "constexpr" if tensor is None else _TYPES[tensor.dtype] for name, tensor in pointers.items()}
        types |= {name: tensor_map.type for name, tensor_map in maps.items()}
        self._maps = sorted((kernel.arg_names.index(name), tensor_map) for name, tensor_map in maps.items())
        self._num_tensors = len(pointers)
        self._absent = {number for number, tensor in enumerate(pointers.values()) if tensor is None}
        types |= {name: kind for name, (kind, _) in scalars.items()} | dict.fromkeys(constants, "constexpr")
        absent = {name: None for name, tensor in pointers.items() if tensor is None}
        self._description = kernel, types, absent | constants, divisors, tile
        self._dependent = dependent
        launch_counts.setdefault(self.name, 0)

    def compile(self, target: GPUTarget):
        """The kernel compiled for a target, with or without such a GPU in the machine."""
        return compile_kernel(*self._description, target, self._dependent)

    def load(self, device: torch.device) -> Launch:
        """Compile for this device and load; raises KernelUnavailable."""
        if self._interpreted is not None:
            return self
        self.device_index = device.index
        try:
            # Loading binds the kernel to the device that is current, so each device has Launches of its own.
            with torch.cuda.device(device):
                self.compiled = self._compiled_for(device)
                self._run = self._direct_launcher()
            self._arguments = self._packer()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise KernelUnavailable(f"Triton could not compile {self.name}: {error}") from error
        return self

    def _compiled_for(self, device: torch.device):
        """The kernel, loaded on this device; the same one for all launches that differ in sizes alone.

        Looking it up in Triton's cache on disk takes milliseconds, which calls of ever new lengths would pay each time.
        """
        kernel, types, constants, divisors, tile = self._description
        kind = tile, self._dependent, device.index
        key = (kernel.__name__, *types.items(), None, *constants.items(), None, *divisors.items(), *kind)
        compiled = _loaded.get(key)
        if compiled is None:
            compiled = self.compile(device_target(device))
            compiled.run  # noqa: B018  loads the binary; raises where it does not fit the device
            _loaded[key] = compiled
        return compiled

    def _direct_launcher(self):
        """A function (stream, arguments) that calls Triton's C launcher with nothing in between."""
        compiled, grid = self.compiled, self._grid
        function, metadata = compiled.function, compiled.packed_metadata
        run = compiled.run
        if compiled.metadata.target.backend != "cuda":
            return lambda stream, arguments: run(grid, 1, 1, stream, function, metadata, None, None, None, *arguments)
        if compiled.metadata.global_scratch_size or compiled.metadata.profile_scratch_size:
            raise RuntimeError("the kernel wants scratch memory, which this launcher does not allocate")
        if self._maps:
            # Triton's wrapper encodes tensor maps on every call (8 us); this launcher takes encoded ones.
            for (_, tensor_map), layout in zip(self._maps, compiled.metadata.tensordesc_meta, strict=True):
                tensor_map.prepare(layout)
            run = _map_launchers.get(compiled)
            if run is None:
                maps = dict(self._maps)
                types = []
                for index, kind in enumerate(self._description[1].values()):
                    types += maps[index].expanded_types if index in maps else [kind]
                source = SimpleNamespace(fn=self._description[0], constants={}, signature=dict(enumerate(types)))
                run = driver.active.launcher_cls(source, compiled.metadata._replace(tensordesc_meta=None))
                _map_launchers[compiled] = run
        launch, cooperative, dependent = run.launch, run.launch_cooperative_grid, run.launch_pdl
        if hasattr(run, "kernel_signature"):  # Triton 3.7 and later
            signature = run.arg_annotations, run.kernel_signature
            return lambda stream, arguments: launch(
                grid, 1, 1, stream, function, cooperative, dependent, metadata, None, None, None, None, None,
                *signature, tuple(arguments)
            )
        return lambda stream, arguments: launch(
            grid, 1, 1, stream, function, cooperative, dependent, None, None, metadata, None, None, None, *arguments
        )

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launch; the tensors are in the order of the kernel's arguments."""
        launch_counts[self.name] += 1
        if self._interpreted is not None or is_watched():
            self._launch_described(tensors)
            return
        index = self.device_index
        arguments = self._arguments(*tensors)
        if _current_device() == index:
            self._run(_current_stream(index), arguments)
        else:
            with torch.cuda.device(index):
                self._run(_current_stream(index), arguments)

    @property
    def is_interpreted(self) -> bool:
        """Does Triton's interpreter run the kernel?"""
        return self._interpreted is not None

    def by_addresses(self):
        """A function (stream, address of each tensor, None for none) that launches, like a call with the tensors.

        For one who knows that the device is the current one and that no launch ``is_watched``.
        """
        name, run, arguments = self.name, self._run, self._packer("{}")

        def launch(stream: int, *addresses: int | None) -> None:
            launch_counts[name] += 1
            run(stream, arguments(*addresses))

        return launch

    def _packer(self, address: str = "{}.data_ptr()"):
        """A function of the tensors that returns all launch arguments; made for this launch, no loop (1 us less).

        address: how one is had of what the function is given.
        """
        maps = dict(self._maps)
        names = [f"tensor_{number}" for number in range(self._num_tensors)]
        values = []
        for number, name in enumerate(names):
            value = "None" if number in self._absent else address.format(name)
            if number in maps:  # the look-up of `TensorMap.arguments`, without the call
                value = f"*(known_{number}.get({value}) or map_{number}({value}, index))"
            values.append(value)
        scope = {f"map_{number}": tensor_map.arguments for number, tensor_map in maps.items()}
        scope |= {f"known_{number}": tensor_map._encoded for number, tensor_map in maps.items()}
        scope |= {"index": self.device_index, "fixed": self._fixed}
        return eval(_code(f"lambda {', '.join(names)}: ({', '.join(values)}, *fixed)"), scope)

    def _launch_described(self, tensors) -> None:
        """The slow way, which the interpreter and profilers (Triton's launch hooks) understand."""
        arguments = list(tensors)
        for position, tensor_map in self._maps:
            arguments[position] = tensor_map.describe(tensors[position])
        if self._interpreted is not None:
            self._interpreted[(self._grid,)](*arguments, *self._fixed)
        else:
            with torch.cuda.device(self.device_index):
                stream = torch._C._cuda_getCurrentRawStream(self.device_index)
                self.compiled[(self._grid, 1, 1)](*arguments, *self._fixed, stream=stream)
