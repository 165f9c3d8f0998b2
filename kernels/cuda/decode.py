"""The host side of the Hopper decoding kernel, ``decode.cu``: which calls are its, what to compile, how to launch it.

May import torch, ``nvrtc.py``, ``driver.py``, ``batch_invariance.py`` and this folder. Imported by ``forward.py``,
whose plans are of two kinds, and by the warm-up.
"""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import torch

from ... import driver, nvrtc
from ...batch_invariance import planned_batch
from .. import KernelUnavailable, launch_counts
from ..mask_strides import broadcast_strides, strides_of
from . import decode_tiles, sources
from .decode_tiles import DecodeTile

SOURCE = sources.FOLDER / "decode.cu"
ENTRY = "flash_decode"
MAX_QUERIES = 16
"""With more queries than these a call is no longer bound by reading keys and values."""

launch_counts.setdefault(ENTRY, 0)

_LOG2E = math.log2(math.e)
_MAX_GRID_YZ = 65535
_FETCHED = 128
"""Bytes that L2 fetches at a time: 256, as of the other kernels, take 8% longer where memory binds (NOTES.md)."""


class DecodeParams(ctypes.Structure):
    """The kernel's last parameter, by value: THE layout, which ``struct DecodeParams`` in ``decode.cu`` repeats."""

    _fields_ = [
        ("query", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("logsumexp", ctypes.c_void_p),  # float32 [B, H, Sq], or null
        ("query_stride_batch", ctypes.c_int64),  # in elements, as all strides
        ("query_stride_head", ctypes.c_int64),
        ("query_stride_row", ctypes.c_int64),
        ("out_stride_batch", ctypes.c_int64),
        ("out_stride_head", ctypes.c_int64),
        ("out_stride_row", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int32),
        ("group_size", ctypes.c_int32),
        ("seqlen_q", ctypes.c_int32),
        ("seqlen_k", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),  # the tensors' own, where HEAD_DIM is the next multiple of 16
        ("head_dim_v", ctypes.c_int32),
        ("splits", ctypes.c_int32),
        ("tiles_each", ctypes.c_int32),  # key tiles of each block of a cluster; the first `more` have one more
        ("more", ctypes.c_int32),
        ("softmax_scale_log2", ctypes.c_float),
        ("mask", ctypes.c_void_p),  # or null
        ("mask_stride_batch", ctypes.c_int64),
        ("mask_stride_kv_head", ctypes.c_int64),
    ]


class DecodeSpecialisation(NamedTuple):
    """What the compiler knows of a call. head_dim, head_dim_v: multiples of 16, at most 256."""

    head_dim: int
    head_dim_v: int
    is_bf16: bool
    tile: DecodeTile
    is_masked: bool = False

    @property
    def defines(self) -> dict[str, int]:
        """The macros that ``decode.cu`` is compiled with."""
        tile = self.tile
        return {
            "HEAD_DIM": self.head_dim,
            "HEAD_DIM_V": self.head_dim_v,
            "ROW_TILES": tile.row_tiles,
            "KEY_WARPS": tile.key_warps,
            "BLOCK_N": tile.block_n,
            "K_STAGES": tile.k_stages,
            "V_STAGES": tile.v_stages,
            "BLOCKS": tile.blocks,
            "MASKED": int(self.is_masked),
            "IS_BF16": int(self.is_bf16),
        }

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.tile.shared_bytes(self.head_dim, self.head_dim_v)

    @property
    def shared_bytes_alone(self) -> int:
        """What keeps other blocks away from its multiprocessor."""
        return max(self.shared_bytes, decode_tiles.ALONE)

    @property
    def source(self) -> nvrtc.Source:
        """What to compile."""
        return sources.source(ENTRY, SOURCE.name, self.defines)

    @property
    def entries(self) -> tuple[str, ...]:
        """The kernels in the binary."""
        return (ENTRY,)

    def compile(self) -> nvrtc.Binary:
        """The binary. Needs NVRTC and no GPU; raises KernelUnavailable."""
        return sources.compiled(self)


class MaskLayout(NamedTuple):
    """A mask [B or 1, H or 1, Sq or 1, Sk or 1] in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def takes(
    batch: int, kv_heads: int, seqlen_q: int, seqlen_k: int, queries_per_kv: int, is_causal: bool,
    mask: MaskLayout | None = None,
) -> bool:  # fmt: skip
    """Is a call this kernel's, where the copy engine can walk its tensors?

    A causal call is not: its mask is top-left aligned, so that so few queries see next to nothing. A mask is one of
    bools, with one row, in one piece, for all queries of a key head.
    """
    few = seqlen_q <= MAX_QUERIES and seqlen_q * queries_per_kv <= decode_tiles.MAX_ROWS
    if not few or is_causal or max(batch, kv_heads) > _MAX_GRID_YZ:
        return False
    if mask is not None:
        scores_shape = batch, kv_heads * queries_per_kv, seqlen_q, seqlen_k
        _, of_head, of_query, of_key = broadcast_strides(mask.shape, mask.strides, scores_shape)
        shared = (of_head == 0 or queries_per_kv == 1) and (of_query == 0 or seqlen_q == 1)
        if mask.dtype != torch.bool or not shared or (of_key != 1 and seqlen_k > 1):
            return False
    return decode_tiles.pays(planned_batch(batch) * kv_heads, seqlen_k)


def suits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, mask=None) -> bool:
    """The same of tensors."""
    kv_heads = 1 if key.stride(1) == 0 and value.stride(1) == 0 else key.size(1)
    layout = None if mask is None else MaskLayout(mask.dtype, mask.shape, mask.stride())
    return takes(
        query.size(0), kv_heads, query.size(2), key.size(2), query.size(1) // kv_heads, is_causal, layout
    )  # fmt: skip


class Chosen(NamedTuple):
    """How a call is run: what to compile, and how many blocks a cluster has."""

    specialisation: DecodeSpecialisation
    splits: int


def specialise(
    head_dim: int, head_dim_v: int, dtype: torch.dtype, *, units: int, rows: int, seqlen_k: int, is_masked: bool = False
) -> Chosen:
    """How a call of these sizes is run. units: batches times key heads; rows: query rows of each, at most MAX_ROWS."""
    padded, padded_v = (-(-size // 16) * 16 for size in (head_dim, head_dim_v))
    tile = decode_tiles.tile_for(padded, padded_v, rows)
    splits = decode_tiles.splits_for(units, -(-seqlen_k // tile.block_n))
    return Chosen(DecodeSpecialisation(padded, padded_v, dtype == torch.bfloat16, tile, is_masked), splits)


class DecodePlan:
    """The forward of all calls with these shapes, strides, dtype and scale on one device; only pointers are free.

    chosen: what to do instead of what ``specialise`` says, for those who compare. Raises KernelUnavailable when it is
    made; torch.OutOfMemoryError where the GPU has no room for the kernel's code.
    """

    __slots__ = ("_attributes", "_config", "_device_index", "_frames", "_function", "_maps", "_params", "chosen")

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        softmax_scale: float,
        mask: torch.Tensor | None = None,
        chosen: Chosen | None = None,
    ) -> None:
        """As of ``forward.plan``, which has seen to it that the copy engine can walk the tensors."""
        batch, heads, seqlen_q, head_dim = query.shape
        seqlen_k, head_dim_v = value.shape[2:]
        index = self._device_index = query.device.index
        # Keys and values that are expanded over their heads are one head; the copy engine takes no stride of zero.
        if key.stride(1) == 0 and value.stride(1) == 0:
            key, value = key[:, :1], value[:, :1]
        kv_heads = key.size(1)
        group = heads // kv_heads
        chosen = chosen or specialise(
            head_dim, head_dim_v, query.dtype, units=planned_batch(batch) * kv_heads, rows=seqlen_q * group,
            seqlen_k=seqlen_k, is_masked=mask is not None,
        )  # fmt: skip
        spec = chosen.specialisation
        try:
            function = driver.load_function(spec.compile(), ENTRY, index, spec.shared_bytes_alone)
            self._function = ctypes.c_void_p(function)
            block_n = spec.tile.block_n
            self._maps = [
                driver.TensorMaps(t.dtype, t.shape, t.stride(), block_n, t.data_ptr(), index, _FETCHED)
                for t in (key, value)
            ]
            keys_and_values = batch * kv_heads * seqlen_k * (head_dim + head_dim_v) * query.element_size()
            is_long = mask is None and keys_and_values >= decode_tiles.LONG  # who knows how much a mask hides
            with torch.cuda.device(index):
                self._configure(kv_heads, batch, chosen, is_long)
        except (driver.DriverError, OSError) as error:
            raise KernelUnavailable(f"{ENTRY}: {error}") from error
        mask_stride_batch = mask_stride_head = 0
        if mask is not None:
            mask_stride_batch, mask_stride_head, _, _ = strides_of(mask, (batch, heads, seqlen_q, seqlen_k))
        tiles_each, more = divmod(-(-seqlen_k // block_n), self.chosen.splits)
        self._params = DecodeParams(
            query_stride_batch=query.stride(0),
            query_stride_head=query.stride(1),
            query_stride_row=query.stride(2),
            out_stride_batch=out.stride(0),
            out_stride_head=out.stride(1),
            out_stride_row=out.stride(2),
            num_kv_heads=kv_heads,
            group_size=group,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            splits=self.chosen.splits,
            tiles_each=tiles_each,
            more=more,
            softmax_scale_log2=softmax_scale * _LOG2E,
            mask_stride_batch=mask_stride_batch,
            mask_stride_kv_head=mask_stride_head * group,
        )
        self._frames: list[driver.Frame] = []

    def _configure(self, kv_heads: int, batch: int, chosen: Chosen, is_long: bool) -> None:
        """The launch, in clusters that the device, which may be a slice of a GPU, has room for.

        Where all blocks can have a multiprocessor of their own they do: some are placed while an earlier launch still
        ends, two where it has ended, and others then stay idle. Clusters would crowd so too, which costs a long launch
        more than to wait until the GPU is empty.
        """
        spec, splits = chosen
        while True:
            self._attributes = driver.cluster_attributes(splits)
            self.chosen = Chosen(spec, splits)
            for alone, clusters in ((True, batch * kv_heads), (False, 1)):
                # The second attribute lets the launch begin before earlier ones have ended.
                self._config = driver.LaunchConfig(
                    (splits, kv_heads, batch), (spec.tile.num_threads, 1, 1),
                    spec.shared_bytes_alone if alone else spec.shared_bytes, None,
                    ctypes.addressof(self._attributes), 1 if alone and is_long else 2,
                )  # fmt: skip
                if driver.max_active_clusters(self._function, self._config, splits) >= clusters:
                    return
            if splits == 1:
                return
            splits //= 2

    def __call__(self, query, key, value, out, logsumexp, mask=None, dropout_seed=None) -> None:
        """Launch on the current stream of the tensors' device. dropout_seed: None, as of forward.py's plans."""
        index = self._device_index
        if driver.current_device() != index:
            with torch.cuda.device(index):
                return self(query, key, value, out, logsumexp, mask)
        maps_key, maps_value = self._maps
        # These two stay referenced until the driver has copied them.
        key_map = maps_key.get(key.data_ptr())
        value_map = maps_value.get(value.data_ptr())
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = driver.Frame([self._config], self._params, 2)
        pointers, params = frame.pointers, frame.params
        pointers[0], pointers[1] = key_map[0], value_map[0]
        params.query, params.out = query.data_ptr(), out.data_ptr()
        params.logsumexp = None if logsumexp is None else logsumexp.data_ptr()
        params.mask = None if mask is None else mask.data_ptr()
        launch_counts[ENTRY] += 1
        try:
            driver.launch(
                frame.configs[0], self._function, frame.arguments, index, driver.current_stream(index)
            )
        except driver.DriverError as error:
            if error.is_refusal:
                raise KernelUnavailable(f"{ENTRY}: {error}") from error
            raise
        self._frames.append(frame)
