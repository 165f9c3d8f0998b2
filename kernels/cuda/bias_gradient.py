"""The host side of ``bias_gradient.cu``, the gradient of an additive bias: what to compile for a call and the launch.

May import torch, ``nvrtc.py``, ``driver.py`` and this folder. Imported by ``torch_flashbackend.ops`` and the warm-up.

As ``backward.py``: a ``Specialisation``, a ``Plan`` for tensors of these shapes and strides, and the launch, which
patches pointers in. What this kernel does not take, ``attention_backward_mask`` of ``kernels/triton`` does.
"""

from __future__ import annotations

import ctypes
import math
import os
from typing import NamedTuple

import torch

from ... import driver, nvrtc
from .. import KernelUnavailable, launch_counts
from . import backward, forward, sources, tiles
from .tiles import BiasTile

ENTRY = "flash_bias_gradient"
MAX_HEAD_DIM = 256
_MAX_INDEX = 2**31 - 1

launch_counts.setdefault(ENTRY, 0)


class BiasParams(ctypes.Structure):
    """The kernel's last parameter, by value: THE layout, which ``struct BiasParams`` in the kernel's file repeats."""

    _fields_ = [
        ("logsumexp", ctypes.c_void_p),
        ("logsumexp_low", ctypes.c_void_p),
        ("delta", ctypes.c_void_p),
        ("logsumexp_pitch", ctypes.c_int32),
        ("delta_pitch", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("group_size", ctypes.c_int32),  # query heads of each key head
        ("seqlen_q", ctypes.c_int32),
        ("bias_heads", ctypes.c_int32),  # of the gradient
        ("batch_step", ctypes.c_int32),  # 0 where the bias is expanded over the gradient's batches
        ("head_step", ctypes.c_int32),  # likewise
        ("items", ctypes.c_int32),  # heads, of all batches, that share a tile of the bias
        ("item_step", ctypes.c_int32),  # how far they are apart
        ("q_tiles", ctypes.c_int32),
        ("k_tiles", ctypes.c_int32),
        ("num_tiles", ctypes.c_int32),
        ("q_tiles_per_group", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
    ]


class Specialisation(NamedTuple):
    """What the compiler knows of a call. head_dim and head_dim_v: multiples of 16, at most 256.

    bias_is_float32: it may be, else it has the query's type. has_low: logsumexp is in two parts.
    """

    head_dim: int
    head_dim_v: int
    is_bf16: bool
    bias_is_float32: bool
    has_low: bool
    tile: BiasTile

    @property
    def defines(self) -> dict[str, int]:
        """The macros that the kernel is compiled with."""
        tile = self.tile
        return {
            "HEAD_DIM": self.head_dim,
            "HEAD_DIM_V": self.head_dim_v,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "STAGES": tile.stages,
            "IS_BF16": int(self.is_bf16),
            "BIAS_F32": int(self.bias_is_float32),
            "HAS_LOW": int(self.has_low),
        }

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: stages, the bias, and 1 KB for barriers and descriptions of tiles."""
        tile, columns = self.tile, tiles.round_up(max(self.head_dim, self.head_dim_v), 64)
        stages = tile.stages * (tile.block_m + tile.block_n) * columns * 2
        return stages + tile.block_m * tile.block_n * (4 if self.bias_is_float32 else 2) + 1024

    @property
    def source(self) -> nvrtc.Source:
        """What to compile."""
        return sources.source(ENTRY, "bias_gradient.cu", self.defines, (self.tile.block_n,), self.is_bf16)

    @property
    def entries(self) -> tuple[str, ...]:
        """The kernels in the binary."""
        return (ENTRY,)

    def compile(self) -> nvrtc.Binary:
        """The binary. Needs NVRTC and no GPU; raises KernelUnavailable."""
        return sources.compiled(self)


def specialise(
    head_dim: int, head_dim_v: int, dtype: torch.dtype, bias_dtype: torch.dtype, has_low: bool
) -> Specialisation:
    """The specialisation that runs a call of these sizes, head dimensions in multiples of 8 up to 256."""
    padded, padded_v = tiles.round_up(head_dim, 16), tiles.round_up(head_dim_v, 16)
    tile = tiles.choose_bias(padded, padded_v, bias_dtype.itemsize)
    return Specialisation(padded, padded_v, dtype == torch.bfloat16, bias_dtype == torch.float32, has_low, tile)


def _shared_heads(query: torch.Tensor, bias: torch.Tensor) -> tuple[int, int]:
    """(heads of all batches that share an element of the bias, how far these are apart)."""
    batch, heads = query.shape[:2]
    items = (batch // bias.size(0)) * (heads // bias.size(1))
    return items, 1 if bias.size(1) == 1 else heads


def _num_tiles(bias: torch.Tensor, tile: BiasTile) -> int:
    """Into how many tiles the bias's gradient is cut."""
    q_tiles, k_tiles = math.ceil(bias.size(2) / tile.block_m), math.ceil(bias.size(3) / tile.block_n)
    return bias.size(0) * bias.size(1) * q_tiles * k_tiles


def _refusal(grad_out, query, key, value, bias, logsumexp, softmax_scale: float) -> str:
    """Why the kernel cannot run this call."""
    head_dim, head_dim_v = query.size(3), value.size(3)
    capability, num_sms = forward._device(query.device.index)
    if capability != (9, 0) or torch.version.hip is not None:
        return "the Hopper kernels need compute capability 9.0"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"the Hopper kernels compute in float16 and bfloat16, not in {query.dtype}"
    if head_dim % 8 or head_dim_v % 8 or not 8 <= head_dim <= MAX_HEAD_DIM or not 8 <= head_dim_v <= MAX_HEAD_DIM:
        return f"the Hopper kernels have no head_dim {head_dim} with value head_dim {head_dim_v}"
    if bias.dtype not in (torch.float32, query.dtype):
        return f"the gradient of a bias of {bias.dtype} beside {query.dtype} is not the Hopper kernels'"
    if bias.size(2) == 1 or bias.size(3) == 1 or bias.shape[2:] != (query.size(2), key.size(2)):
        return "the Hopper kernel sums gradients over batches and heads alone"
    if not math.isfinite(softmax_scale):
        return f"the Hopper kernels need a finite scale, not {softmax_scale}"
    per_row = bias.size(3) * bias.dtype.itemsize
    strides = bias.stride()
    if strides[3] != 1 or strides[2] <= 0 or per_row % 16:
        return "the copy engine cannot walk the bias or its gradient"
    for size, stride in zip(bias.shape[:3], strides, strict=False):
        if size != 1 and (stride < 0 or stride * bias.dtype.itemsize % 16):
            return "the copy engine cannot walk the bias"
    if not backward.walkable(query, key, value, grad_out):
        return "the copy engine cannot walk tensors with such strides"
    if logsumexp.dtype != torch.float32 or not logsumexp.is_contiguous():
        return "the Hopper kernels need a contiguous float32 logsumexp"
    rows, tiles_of_bias = query.size(0) * query.size(1), _num_tiles(bias, tiles.choose_bias(head_dim, head_dim_v, 2))
    if tiles.round_up(logsumexp.size(-1), 256) * rows > _MAX_INDEX or tiles_of_bias + num_sms > _MAX_INDEX:
        return "such sizes are more than 32 bits count"
    items, _ = _shared_heads(query, bias)
    # A tile is one block's, however many share it; Triton's kernel divides them.
    if items > 4 and tiles_of_bias < num_sms // 2:
        return "a small bias that many heads share leaves most of the GPU without work"
    return ""


def aligned(*tensors: torch.Tensor) -> bool:
    """Are these on a GPU, at multiples of 16 bytes? What a plan does not know of a call."""
    return all(tensor.is_cuda and not tensor.data_ptr() & 15 for tensor in tensors)


# ----------------------------------------------------------------------------------------------------------------- plan


class Plan:
    """The bias's gradient of all calls with these shapes, strides, dtypes and scale on one device.

    Raises KernelUnavailable when it is made, before anything is launched; torch.OutOfMemoryError where the GPU has no
    room for the kernel's code.
    """

    __slots__ = ("_config", "_device_index", "_frames", "_function", "_maps", "_params", "specialisation")

    def __init__(
        self, grad_out, query, key, value, bias, logsumexp, softmax_scale: float, tile: BiasTile | None = None
    ) -> None:
        refusal = _refusal(grad_out, query, key, value, bias, logsumexp, softmax_scale)
        if refusal:
            raise KernelUnavailable(refusal)
        heads, seqlen_q, head_dim = query.shape[1:]
        index = self._device_index = query.device.index
        spec = specialise(head_dim, value.size(3), query.dtype, bias.dtype, logsumexp.dim() == 4)
        if tile is not None:
            spec = spec._replace(tile=tile)
        self.specialisation = spec
        tile = spec.tile
        q_tiles, k_tiles = math.ceil(seqlen_q / tile.block_m), math.ceil(bias.size(3) / tile.block_n)
        count = _num_tiles(bias, tile)
        try:
            function = driver.load_function(spec.compile(), ENTRY, index, spec.shared_bytes)
            self._function = ctypes.c_void_p(function)
            rows = ((query, tile.block_m), (key, tile.block_n), (value, tile.block_n), (grad_out, tile.block_m))
            self._maps = [
                driver.TensorMaps(t.dtype, t.shape, t.stride(), n, t.data_ptr(), index) for t, n in rows
            ]
            self._maps += [
                driver.TensorMaps(query.dtype, shape, strides, 64, bias.data_ptr(), index)
                for shape, strides in (_as_16_bits(bias.shape, bias.stride(), bias.dtype.itemsize),
                                       _as_16_bits(bias.shape, _dense_strides(bias.shape), bias.dtype.itemsize))
            ]  # fmt: skip
        except (driver.DriverError, OSError) as error:
            raise KernelUnavailable(f"{ENTRY}: {error}") from error
        items, item_step = _shared_heads(query, bias)
        _, num_sms = forward._device(index)
        self._params = BiasParams(
            logsumexp_pitch=logsumexp.size(-1),
            num_heads=heads,
            group_size=heads // key.size(1),
            seqlen_q=seqlen_q,
            bias_heads=bias.size(1),
            batch_step=int(bias.stride(0) != 0),
            head_step=int(bias.stride(1) != 0),
            items=items,
            item_step=item_step,
            q_tiles=q_tiles,
            k_tiles=k_tiles,
            num_tiles=count,
            # Blocks that run at one time own a square, and load few different tiles of queries and keys.
            q_tiles_per_group=max(1, min(q_tiles, round(math.sqrt(num_sms)))),
            softmax_scale=softmax_scale,
        )
        self._config = driver.LaunchConfig(
            (min(num_sms, count), 1, 1), (tile.num_threads, 1, 1), spec.shared_bytes, None, None, 0
        )
        self._frames: list[driver.Frame] = []

    def __call__(self, grad_out, query, key, value, bias, logsumexp, delta, grad_bias) -> None:
        """Launch on the current stream of the tensors' device."""
        index = self._device_index
        if driver.current_device() != index:
            with torch.cuda.device(index):
                return self(grad_out, query, key, value, bias, logsumexp, delta, grad_bias)
        # These stay referenced until the driver has copied them.
        maps = [
            tensor_map.get(tensor.data_ptr())
            for tensor_map, tensor in zip(self._maps, (query, key, value, grad_out, bias, grad_bias), strict=True)
        ]
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = driver.Frame([self._config], self._params, 6)
        for position, (address, _) in enumerate(maps):
            frame.pointers[position] = address
        params, start = frame.params, logsumexp.data_ptr()
        params.logsumexp, params.delta, params.delta_pitch = start, delta.data_ptr(), delta.size(-1)
        if self.specialisation.has_low:
            params.logsumexp_low = start + 4 * logsumexp.stride(0)
        launch_counts[ENTRY] += 1
        driver.launch(frame.configs[0], self._function, frame.arguments, index, driver.current_stream(index))
        self._frames.append(frame)


def _dense_strides(shape) -> tuple[int, ...]:
    return shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1


def _as_16_bits(shape, strides, itemsize: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a bias as the copy engine is to walk it: 16-bit columns, nothing expanded."""
    times = itemsize // 2
    sizes = tuple(size if stride else 1 for size, stride in zip(shape[:2], strides[:2], strict=True))
    return (*sizes, shape[2], shape[3] * times), (*(stride * times for stride in strides[:3]), 1)


_MAX_PLANS = 4096
# A plan that cannot be made stays so: compiling is not tried again with every call.
_plans: dict[tuple, Plan | KernelUnavailable] = {}


def plan(grad_out, query, key, value, bias, logsumexp, softmax_scale: float) -> Plan:
    """The plan of a call, kept for the next one like it.

    query [B, H, seqlen_q, D], key [B, Hkv, seqlen_k, D], value [B, Hkv, seqlen_k, Dv], grad_out [B, H, seqlen_q, Dv];
    bias [B or 1, H or 1, seqlen_q, seqlen_k], float32 or query's type. logsumexp float32 [2, B, H, seqlen_q] (value and
    what rounding cut off it) or [B, H, at least seqlen_q], natural logarithm, contiguous. A plan takes these, delta,
    rowsum(grad_out * out), float32 [B, H, at least seqlen_q], contiguous, and grad_bias to fill, contiguous, of the
    bias's shape and type; the 16-bit tensors and the bias ``aligned``. Raises KernelUnavailable before any launch.
    """
    tensors = grad_out, query, key, value, bias, logsumexp
    key_of_plan = (
        *((t.shape, t.stride()) for t in tensors), query.dtype, bias.dtype, softmax_scale, query.get_device()
    )  # fmt: skip
    found = _plans.get(key_of_plan)
    if found is None:
        try:
            found = Plan(*tensors, softmax_scale)
        except KernelUnavailable as error:
            found = error
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key_of_plan] = found
    if isinstance(found, KernelUnavailable):
        raise KernelUnavailable(str(found))
    return found


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_plans.clear)
