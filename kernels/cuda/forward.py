"""The host side of the Hopper forward kernel, ``forward.cu``: what to compile for a call, and how to launch it.

May import torch, ``nvrtc.py``, ``driver.py``, ``batch_invariance.py`` and this folder. Imported by
``torch_flashbackend.ops`` and the warm-up.

Three steps, each of which is done once and kept: a ``Specialisation`` (what the compiler must know), a ``Plan`` (all
that a call on tensors of these shapes and strides needs but its pointers), and the launch, which patches pointers in.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ... import driver, nvrtc
from ...batch_invariance import on_change, planned_batch
from .. import KernelUnavailable, launch_counts
from ..mask_strides import strides_of
from . import decode, dropout, forward_wide, masks, prepared, sources, tiles
from .dropout import DropoutParams
from .masks import MaskParams
from .tiles import Tile

SOURCE = sources.FOLDER / "forward.cu"
ENTRY = "flash_forward"
MAX_HEAD_DIM = 256
# One accumulator for all keys, which wgmma cuts off instead of rounding: 0.8% of the result at 8.5 million.
MAX_SEQLEN_K = 2**18

launch_counts.setdefault(ENTRY, 0)

_LOG2E = math.log2(math.e)


class ForwardParams(ctypes.Structure):
    """The kernel's last parameter, by value: THE layout, which ``struct ForwardParams`` in ``forward.cu`` repeats."""

    _fields_ = [
        ("out", ctypes.c_void_p),
        ("logsumexp", ctypes.c_void_p),  # float32 [B, H, Sq], or null; with a float mask [2, B, H, Sq]
        ("counters", ctypes.c_void_p),  # two int32, zero between launches, of nobody else's while this one runs
        ("out_stride_batch", ctypes.c_int64),  # in elements, as all strides
        ("out_stride_head", ctypes.c_int64),
        ("out_stride_row", ctypes.c_int64),
        ("batch", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("seqlen_q", ctypes.c_int32),
        ("seqlen_k", ctypes.c_int32),
        ("head_dim_v", ctypes.c_int32),  # the tensor's own, where HEAD_DIM_V is padded
        ("num_tiles", ctypes.c_int32),
        ("q_tiles", ctypes.c_int32),  # query tiles of a head
        ("heads_per_group", ctypes.c_int32),  # query heads, counted over the batch, whose keys and values share L2
        ("softmax_scale_log2", ctypes.c_float),
        ("softmax_scale", ctypes.c_float),
        ("batch_first", ctypes.c_int32),  # do the batches of a head, which share its mask, come next to each other?
        ("dropout", DropoutParams),  # zeros without dropout
        ("mask", MaskParams),  # zeros without a mask
        ("entries", ctypes.c_void_p),  # int32 [q_tiles, 8], the tiles of packed sequences, or null
    ]


class Specialisation(NamedTuple):
    """What the compiler knows of a call. head_dim: a multiple of 16, head_dim_v: one of 8; at most 256.

    is_masked: there is a mask. The binary then holds the kernel that makes its lists too. bias_bytes: the size of an
    element where it is of floats, otherwise 0; bias_per_key: then, whether all queries share one row of it.
    has_dropout: the binary then holds the kernel that writes the table of random keys. is_packed:
    sequences follow each other in one tensor (``varlen.py``).
    """

    head_dim: int
    head_dim_v: int
    is_causal: bool
    is_bf16: bool
    write_lse: bool
    tile: Tile
    is_masked: bool = False
    bias_bytes: int = 0
    bias_per_key: bool = False
    has_dropout: bool = False
    is_packed: bool = False

    @property
    def defines(self) -> dict[str, int]:
        """The macros that ``forward.cu`` is compiled with."""
        tile = self.tile
        return {
            "HEAD_DIM": self.head_dim,
            "HEAD_DIM_V": self.head_dim_v,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "STAGES": tile.stages,
            "Q_STAGES": tile.q_stages,
            "PING_PONG": int(tile.ping_pong),
            "ROTATE": int(tile.rotate),
            "IS_CAUSAL": int(self.is_causal),
            "MASKED": int(self.is_masked),
            "PACKED": int(self.is_packed),
            "BIAS_BYTES": self.bias_bytes,
            "BIAS_PER_KEY": int(self.bias_per_key),
            "BIAS_STAGES": tile.mask_stages,
            "DROPOUT": int(self.has_dropout),
            "IS_BF16": int(self.is_bf16),
            "WRITE_LSE": int(self.write_lse),
        }

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the tiles, 1 KB to align them and 1 KB for barriers."""
        tile, padded, padded_v = self.tile, tiles.round_up(self.head_dim, 64), tiles.round_up(self.head_dim_v, 64)
        query = tile.q_stages * tile.block_m * padded * 2
        bias = tile.mask_stages * tiles.bias_tile_bytes(tile, self.bias_bytes, self.bias_per_key)
        column_keys = tile.stages * tile.block_n * 4 if self.has_dropout else 0
        return query + tile.stages * tile.block_n * (padded + padded_v) * 2 + bias + column_keys + 2048

    @property
    def source(self) -> nvrtc.Source:
        """What to compile."""
        columns = self.tile.block_n, self.head_dim_v
        return sources.source(ENTRY, SOURCE.name, self.defines, columns, self.is_bf16)

    @property
    def entries(self) -> tuple[str, ...]:
        """The kernels in the binary."""
        lists, keys = (masks.ENTRY,) * self.is_masked, (dropout.ENTRY,) * self.has_dropout
        return (*lists, *keys, ENTRY)

    def compile(self) -> nvrtc.Binary:
        """The binary. Needs NVRTC and no GPU; raises KernelUnavailable."""
        return sources.compiled(self)


def specialise(
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
    is_causal: bool,
    write_lse: bool,
    *,
    seqlen_q: int,
    seqlen_k: int,
    batch_heads: int,
    num_sms: int,
    has_dropout: bool = False,
) -> Specialisation:
    """The specialisation that runs a call of these sizes, head dimensions in multiples of 8 up to 256."""
    padded, is_bf16 = tiles.round_up(head_dim, 16), dtype == torch.bfloat16
    if has_dropout:
        padded_v = tiles.round_up(head_dim_v, 16)
        tile = tiles.choose_dropout(padded, padded_v)
        return Specialisation(padded, padded_v, is_causal, is_bf16, write_lse, tile, has_dropout=True)
    tile = tiles.choose(padded, head_dim_v, is_causal, seqlen_q, seqlen_k, batch_heads, num_sms)
    return Specialisation(padded, tile.value_columns(head_dim_v), is_causal, is_bf16, write_lse, tile)


def specialise_masked(
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
    per_key: bool,
    write_lse: bool,
    mask_dtype: torch.dtype = torch.bool,
) -> Specialisation:
    """The same of a call with a mask; per_key: one that all queries share."""
    padded, padded_v = tiles.round_up(head_dim, 16), tiles.round_up(head_dim_v, 16)
    is_bf16 = dtype == torch.bfloat16
    if mask_dtype == torch.bool:
        tile = tiles.choose_masked(padded, padded_v, per_key)
        return Specialisation(padded, padded_v, False, is_bf16, write_lse, tile, is_masked=True)
    size = mask_dtype.itemsize
    tile = tiles.choose_biased(padded, padded_v, size, per_key)
    return Specialisation(padded, padded_v, False, is_bf16, write_lse, tile, True, size, per_key)


def _fetched(tensor: torch.Tensor) -> int:
    """Bytes that L2 fetches at a time: fewer where rows begin at odd multiples of 16 bytes (measured, NOTES.md)."""
    return 128 if tensor.stride(2) * tensor.element_size() % 32 else 256


@functools.cache
def _device(device_index: int) -> tuple[tuple[int, int], int]:
    """(compute capability, number of multiprocessors)."""
    properties = torch.cuda.get_device_properties(device_index)
    return (properties.major, properties.minor), properties.multi_processor_count


def _refusal(query, key, value, mask, is_causal: bool, softmax_scale: float, dropout_p: float) -> str:
    """Why the kernel cannot run this call, whatever routing has said: a compiled graph may get other tensors."""
    head_dim, head_dim_v = query.size(3), value.size(3)
    if _device(query.device.index)[0] != (9, 0) or torch.version.hip is not None:
        return "the Hopper kernels need compute capability 9.0"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"the Hopper kernels compute in float16 and bfloat16, not in {query.dtype}"
    is_wide = forward_wide.takes(head_dim, head_dim_v)
    in_range = 8 <= head_dim <= MAX_HEAD_DIM and 8 <= head_dim_v <= MAX_HEAD_DIM
    if head_dim % 8 or head_dim_v % 8 or not (in_range or is_wide):
        return f"the Hopper kernels have no head_dim {head_dim} with value head_dim {head_dim_v}"
    if is_wide and mask is not None:
        return f"the Hopper kernels take masks up to a head_dim of {MAX_HEAD_DIM}"
    if key.size(2) > MAX_SEQLEN_K:
        return f"the Hopper kernels add up {MAX_SEQLEN_K} keys at most, not {key.size(2)}"
    if not 0.0 < softmax_scale < math.inf:
        return f"the Hopper kernels need a positive scale, not {softmax_scale}"
    if mask is not None and dropout_p > 0.0:
        return "the Hopper kernels take no mask together with dropout"
    if dropout_p > 0.0 and max(head_dim, head_dim_v) > tiles.MAX_DROPOUT_HEAD_DIM:
        return f"the Hopper kernels take dropout up to a head_dim of {tiles.MAX_DROPOUT_HEAD_DIM}"
    if mask is not None and is_causal:
        return "the Hopper kernels take no mask together with is_causal"
    if mask is not None and not takes_mask(query, mask):
        return "the copy engine cannot walk a float mask with such strides, or float32 leaves no registers"
    if not walkable(query, key, value):
        return "the copy engine cannot walk tensors with such strides"
    return ""


# ----------------------------------------------------------------------------------------------------------------- plan


class Plan:
    """The forward of all calls with these shapes, strides, dtype and scale on one device; only pointers are free.

    mask [B or 1, H or 1, seqlen_q or 1, seqlen_k or 1]: its address known up to multiples of 16.

    Raises KernelUnavailable when it is made, before anything is launched; torch.OutOfMemoryError where the GPU has no
    room for the kernel's code.
    """

    __slots__ = (
        "_bias_maps", "_config", "_counted", "_device_index", "_dropout_keys", "_frames", "_function", "_lists",
        "_maps", "_params", "specialisation",
    )  # fmt: skip

    def __init__(
        self, query, key, value, out, write_lse: bool, is_causal: bool, softmax_scale: float, mask=None,
        dropout_p: float = 0.0,
    ):  # fmt: skip
        refusal = _refusal(query, key, value, mask, is_causal, softmax_scale, dropout_p)
        if refusal:
            raise KernelUnavailable(refusal)
        batch, heads, seqlen_q, head_dim = query.shape
        seqlen_k, head_dim_v = value.shape[2:]
        index = self._device_index = query.device.index
        # Keys and values that are expanded over their heads are one head; the copy engine takes no stride of zero.
        if key.stride(1) == 0 and value.stride(1) == 0:
            key, value = key[:, :1], value[:, :1]
        kv_heads = key.size(1)
        _, num_sms = _device(index)
        scores_shape = batch, heads, seqlen_q, seqlen_k
        if mask is None:
            spec = specialise(
                head_dim, head_dim_v, query.dtype, is_causal, write_lse,
                seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch_heads=planned_batch(batch) * heads, num_sms=num_sms,
                has_dropout=dropout_p > 0.0,
            )  # fmt: skip
        else:
            per_key = strides_of(mask, scores_shape)[2] == 0
            spec = specialise_masked(head_dim, head_dim_v, query.dtype, per_key, write_lse, mask.dtype)
        self.specialisation = spec
        self._counted = is_causal or mask is not None
        tile = spec.tile
        q_tiles = math.ceil(seqlen_q / tile.block_m)
        num_tiles = q_tiles * batch * heads
        if num_tiles > tiles.MAX_BLOCKS:
            raise KernelUnavailable(f"{num_tiles} tiles are more than 32 bits count")
        try:
            binary = spec.compile()
            self._function = ctypes.c_void_p(driver.load_function(binary, ENTRY, index, spec.shared_bytes))
            self._lists = self._bias_maps = self._dropout_keys = None
            if spec.has_dropout:
                function = driver.load_function(binary, dropout.ENTRY, index, 0)
                self._dropout_keys = dropout.Keys(
                    ctypes.c_void_p(function), batch * heads, seqlen_q, seqlen_k, query.device
                )  # fmt: skip
            if mask is not None:
                piece = masks.piece_of(mask.dtype)
                function = driver.load_function(binary, masks.ENTRY, index, masks.list_bytes(MAX_SEQLEN_K, piece))
                self._lists = masks.KeyLists(ctypes.c_void_p(function), mask, scores_shape, tile)
                if spec.bias_bytes:
                    own = mask[masks.unexpanded(masks.strides_of(mask, scores_shape))]
                    rows = 1 if spec.bias_per_key else tile.block_m
                    self._bias_maps = driver.TensorMaps(
                        own.dtype, own.shape, own.stride(), rows, own.data_ptr(), index
                    )  # fmt: skip
            self._maps = [
                driver.TensorMaps(t.dtype, t.shape, t.stride(), rows, t.data_ptr(), index, _fetched(t))
                for t, rows in ((query, tile.block_m), (key, tile.block_n), (value, tile.block_n), (out, tile.block_m))
            ]
        except (driver.DriverError, OSError) as error:
            raise KernelUnavailable(f"{ENTRY}: {error}") from error
        stride_batch, stride_head, stride_row, _ = out.stride()
        self._params = ForwardParams(
            out_stride_batch=stride_batch,
            out_stride_head=stride_head,
            out_stride_row=stride_row,
            batch=batch,
            num_heads=heads,
            num_kv_heads=kv_heads,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim_v=head_dim_v,
            num_tiles=num_tiles,
            q_tiles=q_tiles,
            heads_per_group=(
                min(math.ceil(num_sms / 4), batch * heads)
                if tile.short_lists and heads == kv_heads
                else _heads_per_group(batch * heads, heads // kv_heads, seqlen_k, head_dim + head_dim_v)
            ),
            softmax_scale_log2=softmax_scale * _LOG2E,
            softmax_scale=softmax_scale,
            batch_first=int(mask is not None and masks.strides_of(mask, scores_shape)[0] == 0),
            dropout=dropout.params_of(dropout_p) if spec.has_dropout else DropoutParams(),
            mask=MaskParams() if self._lists is None else self._lists.params,
        )
        self._config = driver.LaunchConfig(
            (min(num_sms, num_tiles), 1, 1), (tile.num_threads, 1, 1), spec.shared_bytes, None, None, 0
        )
        self._frames: list[driver.Frame] = []

    def __call__(self, query, key, value, out, logsumexp, mask=None, dropout_seed=None) -> None:
        """Launch on the current stream of the tensors' device."""
        index = self._device_index
        if driver.current_device() != index:
            with torch.cuda.device(index):
                return self(query, key, value, out, logsumexp, mask, dropout_seed)
        maps_query, maps_key, maps_value, maps_out = self._maps
        out_pointer = out.data_ptr()
        # These stay referenced until the driver has copied them.
        query_map = maps_query.get(query.data_ptr())
        key_map = maps_key.get(key.data_ptr())
        value_map = maps_value.get(value.data_ptr())
        out_map = maps_out.get(out_pointer)
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = driver.Frame([self._config], self._params, 4 if self._bias_maps is None else 5)
        pointers, params = frame.pointers, frame.params
        pointers[0], pointers[1], pointers[2], pointers[3] = query_map[0], key_map[0], value_map[0], out_map[0]
        if self._bias_maps is not None:
            bias_map = self._bias_maps.get(mask.data_ptr())
            pointers[4] = bias_map[0]
        params.out = out_pointer
        params.logsumexp = None if logsumexp is None else logsumexp.data_ptr()
        stream = driver.current_stream(index)
        if self._counted:
            params.counters = driver.counters(index, stream)
        try:
            if self._lists is not None:
                lists = self._lists.make(mask, index, stream)
                params.mask.mask, params.mask.lists = mask.data_ptr(), lists.data_ptr()
            if self._dropout_keys is not None:
                keys = self._dropout_keys.make(dropout_seed, index, stream)
                params.dropout.keys = keys.data_ptr()
            launch_counts[ENTRY] += 1
            driver.launch(frame.configs[0], self._function, frame.arguments, index, stream)
        except driver.DriverError as error:
            if error.is_refusal:
                raise KernelUnavailable(f"{ENTRY}: {error}") from error
            raise
        self._frames.append(frame)

    def prepared(
        self,
        of_out: tuple[Any, ...],
        of_logsumexp: tuple[Any, ...] | None,
        query: torch.Tensor,
        otherwise: Callable[..., prepared.Outputs],
    ) -> Callable[..., prepared.Outputs] | None:
        """`prepared.forward`; None of a call with a mask or dropout."""
        if self._bias_maps is not None or self._lists is not None or self._dropout_keys is not None:
            return None
        kernels = ((ENTRY, self._function, self._config, True),)
        launches = prepared.Launches(self._device_index, kernels, self._params, self._maps)
        return prepared.forward(launches, self._counted, of_out, of_logsumexp, query, otherwise)


def _heads_per_group(batch_heads: int, queries_per_kv: int, seqlen_k: int, columns: int) -> int:
    """How many query heads have their causal tiles in one list, longest first: measured, see NOTES.md.

    As many as have their keys and values in L2 together, so that these are read once; but not so few that all
    multiprocessors are at one head's longest tiles. Where a tile reads thousands of keys, memory does not bind, and one
    list of all heads is the most even.
    """
    if seqlen_k >= 8192:
        return batch_heads
    in_cache = tiles.L2_BYTES // (seqlen_k * columns * 2) * queries_per_kv
    return min(max(in_cache, 16), batch_heads)


def aligned(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Are the addresses multiples of 16 bytes? The one thing about a call that its plan does not know."""
    return not (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15


def takes_mask(query: torch.Tensor, mask: torch.Tensor) -> bool:
    """Can the kernels read this mask of rank 4? Routing asks the same, but for the address.

    Bool masks all. Float masks of query's dtype or, up to a head_dim of 192, float32 come by the copy engine: the last
    dimension is that of the keys, not broadcast, and dense, and where rows, heads and batches begin are multiples of 16
    bytes.
    """
    if mask.dtype == torch.bool:
        return True
    if mask.dtype not in (query.dtype, torch.float32) or mask.data_ptr() & 15:
        return False
    if mask.dtype == torch.float32 and query.size(3) > tiles.MAX_FLOAT32_BIAS_HEAD_DIM:
        return False
    return masks.walkable(mask.shape, mask.stride(), mask.dtype.itemsize)


def walkable(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Can the copy engine walk tensors with these strides? Routing asks the same.

    Strides are multiples of 16 bytes, the last dimension is dense, and no dimension is expanded but the heads of key
    and value together.
    """
    one_head = key.stride(1) == 0 and value.stride(1) == 0
    for tensor in (query, key, value):
        if tensor.stride(3) != 1:
            return False
        for dim in range(3):
            stride = tensor.stride(dim)
            expanded_heads = dim == 1 and one_head and tensor is not query
            if tensor.size(dim) != 1 and (stride <= 0 or stride % 8) and not expanded_heads:
                return False
    return True


AnyPlan = Plan | decode.DecodePlan | forward_wide.WidePlan

_MAX_PLANS = 4096
# A plan that cannot be made stays so: compiling is not tried again with every call.
_plans: dict[tuple, AnyPlan | KernelUnavailable] = {}


def _make_plan(query, key, value, out, write_lse, is_causal, softmax_scale, mask, dropout_p) -> AnyPlan:
    is_wide = forward_wide.takes(query.size(3), value.size(3))
    plain = mask is None and dropout_p == 0.0
    decodes = not is_wide and dropout_p == 0.0 and decode.suits(query, key, value, is_causal, mask)
    if not decodes and not (is_wide and plain):
        return Plan(query, key, value, out, write_lse, is_causal, softmax_scale, mask, dropout_p)
    refusal = _refusal(query, key, value, mask, is_causal, softmax_scale, 0.0)
    if refusal:
        raise KernelUnavailable(refusal)
    if is_wide:
        return forward_wide.WidePlan(query, key, value, out, write_lse, is_causal, softmax_scale)
    return decode.DecodePlan(query, key, value, out, softmax_scale, mask)


def plan(
    query, key, value, out, write_lse: bool, is_causal: bool, softmax_scale: float, mask=None, dropout_p: float = 0.0
) -> AnyPlan:
    """The plan of a call, kept for the next one like it: of few queries perhaps the decoding kernel's.

    Raises what making it raises.
    """
    key_of_plan = (
        query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(), out.stride(), query.dtype,
        write_lse, is_causal, softmax_scale, query.get_device(), dropout_p,
    )  # fmt: skip
    if mask is not None:
        key_of_plan += mask.shape, mask.stride(), mask.dtype, mask.data_ptr() & 15
    found = _plans.get(key_of_plan)
    if found is None:
        try:
            found = _make_plan(query, key, value, out, write_lse, is_causal, softmax_scale, mask, dropout_p)
        except KernelUnavailable as error:
            found = error
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key_of_plan] = found
    if isinstance(found, KernelUnavailable):
        raise KernelUnavailable(str(found))
    return found


def forward(
    query, key, value, is_causal, softmax_scale, out, logsumexp, mask=None, dropout_seed=None, dropout_p=0.0
) -> None:
    """Fill out [B, H, seqlen_q, Dv] (last dimension dense, other strides multiples of 8) and logsumexp unless None.

    query [B, H, seqlen_q, D], key [B, Hkv, seqlen_k, D], value [B, Hkv, seqlen_k, Dv], ``aligned`` and ``walkable``;
    float16 or bfloat16, all sizes positive, D and Dv multiples of 8 up to 256 (D = Dv up to 512 without mask and
    dropout), softmax_scale finite and positive.
    logsumexp float32 [B, H, seqlen_q], contiguous, natural logarithm, -inf for a row that sees no key; with a float
    mask [2, B, H, seqlen_q], the second half being what rounding cut off the first. mask [B or 1, H or 1, seqlen_q or
    1, seqlen_k or 1], as ``takes_mask`` asks, not together with is_causal. dropout_seed int64 [1] where dropout_p > 0,
    which does not go with a mask. Raises KernelUnavailable before anything of out or logsumexp is written;
    torch.OutOfMemoryError where there is no room for the lists of a mask or the keys of dropout.
    """
    found = plan(query, key, value, out, logsumexp is not None, is_causal, softmax_scale, mask, dropout_p)
    found(query, key, value, out, logsumexp, mask, dropout_seed)


on_change(_plans.clear)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_plans.clear)
