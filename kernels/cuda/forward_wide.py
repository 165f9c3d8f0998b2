"""The host side of ``forward_wide.cu``, the Hopper forward for head dimensions above 256, without mask and dropout.

May import torch, ``nvrtc.py``, ``driver.py`` and this folder. ``forward.plan`` makes these plans, beside its own.
"""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import torch

from ... import driver, nvrtc
from .. import KernelUnavailable, launch_counts
from . import sources, tiles

SOURCE = sources.FOLDER / "forward_wide.cu"
ENTRY = "flash_forward_wide"
MIN_HEAD_DIM, MAX_HEAD_DIM = 264, 512

launch_counts.setdefault(ENTRY, 0)

_LOG2E = math.log2(math.e)
# Query rows of a block, and keys of a step.
BLOCK = 64
_NUM_THREADS = 384
# Shared memory for the stages of both warpgroups; scores and probabilities that they exchange take 33 KB.
_STAGES_BYTES = 192 << 10
_EXCHANGED_BYTES = 33 << 10
_BARRIERS_BYTES = 512


class WideParams(ctypes.Structure):
    """The kernel's last parameter, by value: THE layout, which ``struct WideParams`` in the source repeats."""

    _fields_ = [
        ("out", ctypes.c_void_p),
        ("logsumexp", ctypes.c_void_p),  # float32 [B, H, Sq], or null
        ("out_stride_batch", ctypes.c_int64),  # in elements, as all strides
        ("out_stride_head", ctypes.c_int64),
        ("out_stride_row", ctypes.c_int64),
        ("batch", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("seqlen_q", ctypes.c_int32),
        ("seqlen_k", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("q_tiles", ctypes.c_int32),  # query tiles of a head
        ("heads_per_group", ctypes.c_int32),  # query heads, counted over the batch, whose causal tiles are in one list
        ("softmax_scale_log2", ctypes.c_float),
    ]


class WideSpecialisation(NamedTuple):
    """What the compiler knows of a call.

    half_dim: columns of a warpgroup, a multiple of 16.
    """

    half_dim: int
    is_causal: bool
    is_bf16: bool
    write_lse: bool

    @property
    def stage_bytes(self) -> int:
        """Shared memory of 64 rows of a warpgroup's columns, in boxes of 64."""
        return math.ceil(self.half_dim / 64) * BLOCK * 128

    @property
    def stages(self) -> int:
        """Tiles of a warpgroup's columns in flight."""
        return _STAGES_BYTES // 2 // self.stage_bytes

    @property
    def defines(self) -> dict[str, int]:
        """The macros that ``forward_wide.cu`` is compiled with."""
        return {
            "HALF_DIM": self.half_dim,
            "STAGES": self.stages,
            "IS_CAUSAL": int(self.is_causal),
            "IS_BF16": int(self.is_bf16),
            "WRITE_LSE": int(self.write_lse),
        }

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return 2 * self.stages * self.stage_bytes + _EXCHANGED_BYTES + _BARRIERS_BYTES

    @property
    def source(self) -> nvrtc.Source:
        """What to compile."""
        return sources.source(ENTRY, SOURCE.name, self.defines, (BLOCK // 2, self.half_dim), self.is_bf16)

    @property
    def entries(self) -> tuple[str, ...]:
        """The kernels in the binary."""
        return (ENTRY,)

    def compile(self) -> nvrtc.Binary:
        """The binary. Needs NVRTC and no GPU; raises KernelUnavailable."""
        return sources.compiled(self)


def takes(head_dim: int, head_dim_v: int) -> bool:
    """Are these head dimensions, of a call without mask and dropout, this kernel's?"""
    return head_dim == head_dim_v and head_dim % 8 == 0 and MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM


def specialise(head_dim: int, dtype: torch.dtype, is_causal: bool, write_lse: bool) -> WideSpecialisation:
    """The specialisation that runs a call."""
    return WideSpecialisation(math.ceil(head_dim / 32) * 16, is_causal, dtype == torch.bfloat16, write_lse)


def heads_per_group(batch_heads: int, queries_per_kv: int, seqlen_k: int, head_dim: int) -> int:
    """How many query heads have their causal tiles in one list, longest first.

    As many as have keys and values in L2 together, but no more than 8: blocks at the longest tiles of many heads, which
    share nothing, would run together, then blocks at short ones. At least two, whose lists end at different times.
    """
    in_cache = tiles.L2_BYTES // (seqlen_k * head_dim * 4)
    return min(max(2, min(in_cache, 8)) * queries_per_kv, batch_heads)


class WidePlan:
    """The forward of all calls with these shapes, strides, dtype and scale on one device; only pointers are free.

    Raises KernelUnavailable when it is made; torch.OutOfMemoryError where the GPU has no room for the kernel's code.
    """

    __slots__ = ("_config", "_device_index", "_frames", "_function", "_maps", "_params", "specialisation")

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        write_lse: bool,
        is_causal: bool,
        softmax_scale: float,
    ) -> None:
        """As of ``forward.plan``, which has seen to it that the copy engine can walk the tensors."""
        batch, heads, seqlen_q, head_dim = query.shape
        index = self._device_index = query.device.index
        # Keys and values that are expanded over their heads are one head; the copy engine takes no stride of zero.
        if key.stride(1) == 0 and value.stride(1) == 0:
            key, value = key[:, :1], value[:, :1]
        kv_heads, seqlen_k = key.shape[1:3]
        spec = self.specialisation = specialise(head_dim, query.dtype, is_causal, write_lse)
        q_tiles = math.ceil(seqlen_q / BLOCK)
        blocks = q_tiles * batch * heads
        if blocks > tiles.MAX_BLOCKS:
            raise KernelUnavailable(f"{blocks} tiles are more than a grid has blocks")
        try:
            self._function = ctypes.c_void_p(driver.load_function(spec.compile(), ENTRY, index, spec.shared_bytes))
            self._maps = [
                driver.TensorMaps(t.dtype, t.shape, t.stride(), BLOCK, t.data_ptr(), index) for t in (query, key, value)
            ]
        except (driver.DriverError, OSError) as error:
            raise KernelUnavailable(f"{ENTRY}: {error}") from error
        self._params = WideParams(
            out_stride_batch=out.stride(0),
            out_stride_head=out.stride(1),
            out_stride_row=out.stride(2),
            batch=batch,
            num_heads=heads,
            num_kv_heads=kv_heads,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=head_dim,
            q_tiles=q_tiles,
            heads_per_group=heads_per_group(batch * heads, heads // kv_heads, seqlen_k, head_dim),
            softmax_scale_log2=softmax_scale * _LOG2E,
        )  # fmt: skip
        self._config = driver.LaunchConfig(
            (blocks, 1, 1), (_NUM_THREADS, 1, 1), spec.shared_bytes, None, None, 0
        )  # fmt: skip
        self._frames: list[driver.Frame] = []

    def __call__(self, query, key, value, out, logsumexp, mask=None, dropout_seed=None) -> None:
        """Launch on the current stream of the tensors' device. mask, dropout_seed: None, as of forward.py's plans."""
        index = self._device_index
        if driver.current_device() != index:
            with torch.cuda.device(index):
                return self(query, key, value, out, logsumexp)
        maps_query, maps_key, maps_value = self._maps
        # These stay referenced until the driver has copied them.
        query_map = maps_query.get(query.data_ptr())
        key_map = maps_key.get(key.data_ptr())
        value_map = maps_value.get(value.data_ptr())
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = driver.Frame([self._config], self._params, 3)
        pointers, params = frame.pointers, frame.params
        pointers[0], pointers[1], pointers[2] = query_map[0], key_map[0], value_map[0]
        params.out = out.data_ptr()
        params.logsumexp = None if logsumexp is None else logsumexp.data_ptr()
        launch_counts[ENTRY] += 1
        try:
            driver.launch(frame.configs[0], self._function, frame.arguments, index, driver.current_stream(index))
        except driver.DriverError as error:
            if error.is_refusal:
                raise KernelUnavailable(f"{ENTRY}: {error}") from error
            raise
        self._frames.append(frame)
