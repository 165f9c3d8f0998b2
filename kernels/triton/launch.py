"""Compile a Triton kernel for given arguments and launch the result directly.

May import torch and triton. Imported by ``attention.py``. ``@triton.jit``'s own launcher inspects every argument on every
call (19 us on an H200 host); a ``Launch`` has done that once, and a call only packs pointers (5 us).

Private interfaces, all in this file: ``triton.compile`` with ``ASTSource`` and ``GPUTarget`` (ahead-of-time compilation, as
triton's own tools use it) and the calling convention of ``CompiledKernel.run``, equal in Triton 3.6 to 3.8. If they go,
``Launch.__call__`` can fall back to ``kernel[grid](...)``. ``torch._C._cuda_getCurrentRawStream`` is what Inductor's generated
code calls; ``torch.cuda.current_stream(device).cuda_stream`` is its slow equivalent.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from .tiles import Tile


class KernelUnavailable(RuntimeError):
    """A kernel could not be compiled or loaded; nothing was launched, so the caller may compute the result otherwise."""


_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.bool: "*i1",
    torch.int64: "*i64",
}

launch_counts: dict[str, int] = {}


class TensorMap:
    """How a [B, H, rows, columns] tensor is cut into boxes of [1, 1, block_rows, block_columns] for the copy engine."""

    __slots__ = ("_fields", "type")

    def __init__(self, tensor: torch.Tensor, block_rows: int, block_columns: int):
        block = [1, 1, block_rows, block_columns]
        self.type = f"tensordesc<{_TYPES[tensor.dtype][1:]}{block}>"
        # A dimension of size 1 may have any stride in PyTorch; a tensor map wants a multiple of 16 bytes.
        strides = [stride if size > 1 else 16 for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]
        self._fields = {"shape": list(tensor.shape), "strides": [*strides, 1], "block_shape": block, "padding": "zero",
                        "round_f32_to_tf32": False}  # fmt: skip

    @staticmethod
    def accepts(tensor: torch.Tensor) -> bool:
        """Is the tensor's memory one that the copy engine can walk? 16-byte alignment, dense last dimension."""
        per_vector = 16 // tensor.element_size()
        sizes, strides = tensor.shape[:3], tensor.stride()[:3]
        return (
            tensor.stride(3) == 1
            and tensor.data_ptr() % 16 == 0
            and all(size == 1 or (stride > 0 and stride % per_vector == 0) for size, stride in zip(sizes, strides, strict=True))
        )

    def bind(self, tensor: torch.Tensor) -> TensorDescriptor:
        """The descriptor that Triton's launcher encodes; made without its constructor, whose checks cost 5 us."""
        descriptor = TensorDescriptor.__new__(TensorDescriptor)
        descriptor.__dict__ = {"base": tensor, **self._fields}
        return descriptor


def device_target(device: torch.device) -> GPUTarget:
    """The target of one of this machine's GPUs."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return GPUTarget("hip", properties.gcnArchName.split(":")[0], properties.warp_size)
    return GPUTarget("cuda", properties.major * 10 + properties.minor, 32)


def compile_kernel(kernel, types: dict[str, str], constants: dict[str, Any], divisors: dict[str, int], tile: Tile,
                   target: GPUTarget):  # fmt: skip
    """Compile for a target, with or without such a GPU in the machine.

    types: argument name to "*bf16", "i32", ... or "constexpr"; constants: the values of the latter; divisors: what a pointer
    or an integer is known to be a multiple of.
    """
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", divisor]] for name, divisor in divisors.items()}
    source = ASTSource(kernel, types, constants, attributes)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return triton.compile(source, target=target, options=options)


class Launch:
    """One kernel with every argument but its pointers already in place.

    Made in two steps: the description (no compiler, no GPU), then ``load`` for a device. After that, calling it with its
    tensors launches on the current stream of their device; no other work is done.
    """

    __slots__ = ("_description", "_device_index", "_fixed", "_function", "_grid", "_interpreted", "_maps", "_metadata",
                 "_run", "compiled", "name")  # fmt: skip

    def __init__(self, kernel, grid: int, pointers: dict[str, torch.Tensor | None], scalars: dict[str, tuple[str, Any]],
                 constants: dict[str, Any], divisors: dict[str, int], tile: Tile, maps: dict[str, TensorMap]):  # fmt: skip
        """pointers, scalars (type and value) and constants are in the order of the kernel's arguments.

        The tensors named in maps arrive in the kernel as tensor maps instead of pointers.
        """
        self._grid = grid
        self.name = kernel.__name__
        self._interpreted = kernel if isinstance(kernel, InterpretedFunction) else None
        values = [value for _, value in scalars.values()]
        self._fixed = (*values, *constants.values()) if self._interpreted is not None else (*values, *(None for _ in constants))
        types = {name: "constexpr" if tensor is None else _TYPES[tensor.dtype] for name, tensor in pointers.items()}
        types |= {name: tensor_map.type for name, tensor_map in maps.items()}
        self._maps = [(kernel.arg_names.index(name), tensor_map) for name, tensor_map in maps.items()]
        types |= {name: kind for name, (kind, _) in scalars.items()} | dict.fromkeys(constants, "constexpr")
        absent = {name: None for name, tensor in pointers.items() if tensor is None}
        self._description = kernel, types, absent | constants, divisors, tile
        launch_counts.setdefault(self.name, 0)

    def compile(self, target: GPUTarget):
        """The kernel compiled for a target, with or without such a GPU in the machine."""
        return compile_kernel(*self._description, target)

    def load(self, device: torch.device) -> Launch:
        """Compile for this device and load; raises KernelUnavailable."""
        if self._interpreted is not None:
            return self
        self._device_index = device.index
        try:
            # Loading binds the kernel to the device that is current, so each device has Launches of its own.
            with torch.cuda.device(device):
                self.compiled = self.compile(device_target(device))
                self._run = self.compiled.run
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise KernelUnavailable(f"Triton could not compile {self.name}: {error}") from error
        self._function = self.compiled.function
        self._metadata = self.compiled.packed_metadata
        return self

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        launch_counts[self.name] += 1
        if self._interpreted is not None:
            pointers = list(tensors)
        else:
            pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        for index, tensor_map in self._maps:
            pointers[index] = tensor_map.bind(tensors[index])
        if self._interpreted is not None:
            self._interpreted[(self._grid,)](*pointers, *self._fixed)
            return
        index = self._device_index
        if torch._C._cuda_getDevice() == index:
            self._launch(torch._C._cuda_getCurrentRawStream(index), pointers)
        else:
            with torch.cuda.device(index):
                self._launch(torch._C._cuda_getCurrentRawStream(index), pointers)

    def _launch(self, stream: int, pointers) -> None:
        if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:  # a profiler is listening
            self.compiled[(self._grid, 1, 1)](*pointers, *self._fixed, stream=stream)
        else:
            self._run(self._grid, 1, 1, stream, self._function, self._metadata, None, None, None, *pointers, *self._fixed)
