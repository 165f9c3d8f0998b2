"""The host side of the Hopper backward kernels: what to compile for a call, and how to launch it.

May import torch, ``nvrtc.py``, ``driver.py``, ``plans.py``, ``batch_invariance.py``, ``_torch.py`` and this folder.
Imported by ``torch_flashbackend.ops`` and the warm-up.

As ``forward.py``: a ``Specialisation``, a ``Plan`` for tensors of these shapes and strides, and the launches, which
patch pointers in. Three kernels in one binary: they prepare, compute, and finish the query's gradient. The second is
``backward.cu`` or, for a head_dim above 128, ``backward_halves.cu`` where its sums fit, else ``backward_wide.cu``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
import struct
from collections.abc import Callable
from typing import NamedTuple

import torch

from ... import _torch, driver, nvrtc
from .. import KernelUnavailable, launch_counts
from . import dropout, forward, masks, prepared, sources, tiles
from .tiles import BackwardTile

PREPARE, MAIN, FINISH = ENTRIES = ("flash_backward_prepare", "flash_backward", "flash_backward_finish")
MAX_HEAD_DIM = 256
MAX_EXTRAS_HEAD_DIM = 128  # with a mask or dropout
MAX_PERSISTENT_MASK_HEAD_DIM = 112
# Query rows that one sum for a key may be of: wgmma cuts off what it adds up instead of rounding it.
MAX_SUM_ROWS = forward.MAX_SEQLEN_K

for _entry in ENTRIES:
    launch_counts.setdefault(_entry, 0)

_LOG2E = math.log2(math.e)
_PREPARE_THREADS = 256
_COUNTERS_BYTES = 128  # of the fused kernel: those of its items; a number for each key head follows
_MAX_FUSED_CHUNKS = 1 << 17  # of all query heads; what counts them stays allocated
_CHUNK_ROWS = 512  # queries that one item of the fused kernel prepares or finishes


class QueryMask(ctypes.Structure):
    """Repeated by ``struct QueryMask`` in ``backward.cuh``."""

    _fields_ = [
        ("bits", ctypes.c_void_p),
        ("lists", ctypes.c_void_p),
        ("plane_stride_batch", ctypes.c_int32),  # in planes of the mask, 0 where it is broadcast
        ("plane_stride_head", ctypes.c_int32),
        ("q_tiles", ctypes.c_int32),  # that have bits of their own
        ("unused", ctypes.c_int32),
    ]


class BackwardParams(ctypes.Structure):
    """The kernels' last parameter, by value: THE layout, which ``struct BackwardParams`` in ``backward.cu`` repeats."""

    _fields_ = [
        ("out", ctypes.c_void_p),
        ("grad_out", ctypes.c_void_p),
        ("logsumexp", ctypes.c_void_p),
        ("grad_query", ctypes.c_void_p),
        ("statistics", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("semaphores", ctypes.c_void_p),  # where blocks wait for one another
        # Two int32 of such kernels and of persistent ones, zero between launches, of nobody else's while this one runs.
        ("counters", ctypes.c_void_p),
        ("out_stride_batch", ctypes.c_int64),  # in elements, as all strides
        ("out_stride_head", ctypes.c_int64),
        ("out_stride_row", ctypes.c_int64),
        ("grad_out_stride_batch", ctypes.c_int64),
        ("grad_out_stride_head", ctypes.c_int64),
        ("grad_out_stride_row", ctypes.c_int64),
        ("grad_query_stride_batch", ctypes.c_int64),
        ("grad_query_stride_head", ctypes.c_int64),
        ("grad_query_stride_row", ctypes.c_int64),
        ("batch", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("seqlen_q", ctypes.c_int32),
        ("seqlen_k", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),  # the tensors' own, where HEAD_DIM is the next multiple of 16
        ("head_dim_v", ctypes.c_int32),
        ("logsumexp_pitch", ctypes.c_int32),
        ("q_tiles", ctypes.c_int32),  # query tiles of a head
        ("k_tiles", ctypes.c_int32),
        ("heads_per_group", ctypes.c_int32),  # key heads, counted over the batch, whose queries share L2
        ("chunks", ctypes.c_int32),  # fused: parts of a key head's query tiles, and how many tiles one has
        ("chunk_tiles", ctypes.c_int32),
        ("slots", ctypes.c_int32),  # fused: key heads that have sums at a time
        ("softmax_scale", ctypes.c_float),  # what the gradients of query and key are multiplied by at last
        ("softmax_scale_log2", ctypes.c_float),
        ("mask", QueryMask),  # zeros without a mask
        ("dropout", dropout.DropoutParams),  # zeros without dropout
        ("kept", ctypes.c_float),  # 1 - dropout_p
        ("unused", ctypes.c_int32),
        ("logsumexp_low", ctypes.c_void_p),  # of float masks: what rounding cut off logsumexp
        ("delta", ctypes.c_void_p),  # likewise: to be written for the mask's gradient, or null
        # Of packed sequences alone (``varlen.py``).
        ("entries", ctypes.c_void_p),  # int32 [q_slots + k_tiles, 8], the tiles of queries and of keys
        ("grad_key", ctypes.c_void_p),
        ("grad_value", ctypes.c_void_p),
        ("grad_key_stride_head", ctypes.c_int64),
        ("grad_key_stride_row", ctypes.c_int64),
        ("grad_value_stride_head", ctypes.c_int64),
        ("grad_value_stride_row", ctypes.c_int64),
        ("q_slots", ctypes.c_int32),
    ]


# Written at once, which is faster than field by field: tensor maps, and the first fields of BackwardParams.
_MAP_ADDRESSES = struct.Struct("@6P")
_FLOAT_MASK_MAP_ADDRESSES = struct.Struct("@7P")
_ADDRESSES = struct.Struct("@8P")


class Specialisation(NamedTuple):
    """What the compiler knows of a call. head_dim and head_dim_v: multiples of 16, at most 256.

    is_masked: there is a mask, is_float_mask: of query's dtype, not of bools, mask_per_key: the same for all queries.
    The binary then holds the kernels that read it too, and with has_dropout the one that writes random keys. is_packed:
    sequences follow each other in one tensor (``varlen.py``).
    """

    head_dim: int
    head_dim_v: int
    is_causal: bool
    is_bf16: bool
    deterministic: bool
    tile: BackwardTile
    is_masked: bool = False
    has_dropout: bool = False
    is_packed: bool = False
    is_float_mask: bool = False
    mask_per_key: bool = False

    @property
    def defines(self) -> dict[str, int]:
        """The macros that the kernels are compiled with."""
        tile = self.tile
        return {
            "HEAD_DIM": self.head_dim,
            "HEAD_DIM_V": self.head_dim_v,
            "BLOCK_M": tile.block_m,
            "STEP_M": tile.step_m,
            "BLOCK_N": tile.block_n,
            "Q_STAGES": tile.q_stages,
            "DO_STAGES": tile.do_stages,
            "DS_STAGES": tile.ds_stages,
            "KEYS_IN_REGISTERS": int(tile.keys_in_registers),
            "TURNS": int(tile.turns),
            "DELTA_FIRST": int(tile.delta_first),
            "PERSISTENT": int(tile.persistent),
            "FUSED": int(tile.fused),
            "UNSTAGED": int(tile.unstaged),
            "PAIRED": int(tile.paired),
            "DIRECT": int(tile.direct),
            "IS_CAUSAL": int(self.is_causal),
            "MASKED": int(self.is_masked),
            "FLOAT_MASK": int(self.is_float_mask),
            "MASK_PER_KEY": int(self.mask_per_key),
            "DROPOUT": int(self.has_dropout),
            "IS_BF16": int(self.is_bf16),
            "DETERMINISTIC": int(self.deterministic),
            "PACKED": int(self.is_packed),
        }

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block of the main kernel: the tiles, statistics, and 1 KB for barriers."""
        tile, padded, padded_v = self.tile, tiles.round_up(self.head_dim, 64), tiles.round_up(self.head_dim_v, 64)
        keys = tile.block_n * (padded + padded_v) * 2
        queries = tile.block_m * (tile.q_stages * (padded * 2 + 8) + tile.do_stages * padded_v * 2)
        if self.is_masked:
            queries += tile.q_stages * tile.block_m * tile.block_n // 8
        if self.is_float_mask:
            queries += tile.q_stages * tile.block_m * 8
            rows = 8 if self.mask_per_key else tile.step_m  # one, where the swizzle begins anew
            queries += rows * tile.block_n * 2
        if self.has_dropout:
            queries += tile.q_stages * tile.block_m * 4 + tile.block_n * 8
        grads = tile.block_m * tile.ds_stages * tile.block_n * 2
        # P on its way to the other warpgroup, or the query's gradient on its way to global memory; both are float32.
        if tile.paired:  # halves of grad_out, and the other block's keys and dS
            queries = tile.block_m * (tile.q_stages * (padded * 2 + 8) + 3 * padded_v)
            keys += tile.block_n * padded
            grads *= 2
        handed = tile.block_m * (tile.block_n if self.is_wide else 0 if tile.unstaged else self.head_dim) * 4
        if tile.persistent and keys > grads:  # the key's gradient leaves from there
            handed = max(handed, tile.block_n * padded * 2)
        return keys + queries + grads + handed + 1024

    @property
    def is_wide(self) -> bool:
        """Whether the sums of the keys' and values' gradients have a warpgroup each (``backward_wide.cu``)."""
        return max(self.head_dim, self.head_dim_v) > 128 and self.tile.block_n == 64

    @property
    def in_halves(self) -> bool:
        """Whether query tiles arrive in halves (``backward_halves.cu``)."""
        return max(self.head_dim, self.head_dim_v) > 128 and self.tile.block_n == 128

    @property
    def blocks_of_cluster(self) -> int:
        """Blocks whose tiles of keys count as one."""
        return 2 if self.tile.paired else 1

    @property
    def num_threads(self) -> int:
        """Threads of a block of the main kernel."""
        return 512 if self.is_wide else self.tile.num_threads

    @property
    def source(self) -> nvrtc.Source:
        """What to compile."""
        tile = self.tile
        columns = {tile.step_m}
        for size in (self.head_dim, self.head_dim_v):  # at most 128 at a time
            columns |= {min(size, 128), size % 128}
        if self.is_wide:
            columns |= {64}
        elif self.in_halves:
            columns |= {64, self.head_dim % 64}
        elif tile.block_m == tile.block_n:  # a warpgroup computes 64 rows of the query's gradient
            columns |= {self.head_dim}
        else:  # or whole boxes of 64 columns
            columns |= {tiles.round_up(self.head_dim, 64) // tile.num_warpgroups}
        file = "backward_wide.cu" if self.is_wide else "backward_halves.cu" if self.in_halves else "backward.cu"
        return sources.source(MAIN, file, self.defines, columns - {0}, self.is_bf16)

    @property
    def launched(self) -> tuple[str, ...]:
        """The kernels that compute gradients, in the order of their launches."""
        return (MAIN,) if self.tile.fused else ENTRIES

    @property
    def entries(self) -> tuple[str, ...]:
        """The kernels in the binary."""
        return (*masks.BIT_ENTRIES * self.is_masked, *(dropout.ENTRY,) * self.has_dropout, *self.launched)

    def compile(self) -> nvrtc.Binary:
        """The binary. Needs NVRTC and no GPU; raises KernelUnavailable."""
        return sources.compiled(self)


def specialise(
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
    is_causal: bool,
    deterministic: bool,
    query_rows: int,
    is_masked: bool = False,
    has_dropout: bool = False,
    is_packed: bool = False,
    can_fuse: bool = True,
    is_float_mask: bool = False,
    mask_per_key: bool = False,
) -> Specialisation:
    """The specialisation that runs a call of these sizes, head dimensions in multiples of 8 up to 256.

    query_rows: how many queries a key head has, those of all its query heads together. is_masked: with a mask (of
    query's dtype where is_float_mask, the same for all queries where mask_per_key), has_dropout: with dropout,
    is_packed: of packed sequences, all for head dimensions up to 128. can_fuse: one kernel may do all.
    """
    padded, padded_v = tiles.round_up(head_dim, 16), tiles.round_up(head_dim_v, 16)
    if padded_v > 64:
        padded = max(padded, 80)  # of wide tiles each warpgroup computes a box of the query's gradient; there are two
    is_plain = can_fuse and not (is_masked or has_dropout or is_packed)
    choose = tiles.choose_backward if is_plain else tiles.choose_backward_usual
    tile = choose(padded, padded_v, is_causal or is_masked, query_rows, deterministic)
    if tile.paired:
        padded, padded_v = max(padded, 208), max(padded_v, 208)  # columns of zeros, where two blocks share four boxes
    if is_masked and (deterministic or max(padded, padded_v) > MAX_PERSISTENT_MASK_HEAD_DIM):
        tile = dataclasses.replace(tile, persistent=False)  # registers again
    if has_dropout:
        # dP is dropped before delta is subtracted; persistent blocks have no registers for what stays.
        tile = dataclasses.replace(tile, delta_first=False, persistent=False)
    if is_packed:
        tile = dataclasses.replace(tile, persistent=False)
    if is_float_mask:
        tile = tiles.with_float_mask(tile)
    is_bf16 = dtype == torch.bfloat16
    return Specialisation(
        padded, padded_v, is_causal, is_bf16, deterministic, tile, is_masked, has_dropout, is_packed, is_float_mask,
        mask_per_key,
    )  # fmt: skip


def specialise_dense(
    head_dim: int, head_dim_v: int, dtype: torch.dtype, is_causal: bool, deterministic: bool,
    batch: int, heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int, num_sms: int,
) -> Specialisation:  # fmt: skip
    """The specialisation that runs a call without mask and dropout, on a GPU with so many multiprocessors."""
    sizes = head_dim, head_dim_v, dtype, is_causal, deterministic, seqlen_q * (heads // kv_heads)
    spec = specialise(*sizes)
    few_chunks = batch * heads * (1 + seqlen_q // _CHUNK_ROWS) <= _MAX_FUSED_CHUNKS
    if spec.tile.fused and not (few_chunks and _saves_sums(spec, batch * kv_heads, seqlen_k, num_sms)):
        return specialise(*sizes, can_fuse=False)
    return spec


def _heads_per_group(
    key_heads: int, head_bytes: int, blocks: int, is_causal: bool, deterministic: bool, num_sms: int
) -> int:
    """How many key heads, of `key_heads` counted over the batch, take turns in the list of tiles of keys.

    head_bytes: of the queries of one, with all that is read and added beside them; blocks: that one has. As many as L2
    holds, but enough for a wave of blocks. A last group of less than half as many runs almost alone, the longest block
    of a causal call above all: then up to twice as many, where that leaves fewer out of the last one.
    """
    most = max(tiles.L2_BYTES // head_bytes, math.ceil(num_sms / blocks))
    if deterministic and is_causal:
        # Blocks of later keys are shorter, so they catch up with those that they wait for; few run at one time.
        most = max(most, math.ceil(num_sms / 8))
    if key_heads <= most:
        return key_heads
    if not is_causal or 2 * (-key_heads % most) <= most:
        return most
    return min(range(most, min(2 * most, key_heads) + 1), key=lambda size: -key_heads % size / size)


def _heads_in_work(spec: Specialisation, key_heads: int, seqlen_k: int, num_sms: int) -> int:
    """Key heads of a group of the fused kernel, of `key_heads` in all: the sums of three groups are to stay in L2."""
    blocks = math.ceil(seqlen_k / (spec.tile.block_n * spec.blocks_of_cluster)) * spec.blocks_of_cluster
    return min(max(1, num_sms // blocks), key_heads)


def _most_slots(spec: Specialisation, key_heads: int) -> int:
    """Key heads that may have sums at a time in the fused kernel, so that it takes no more memory than three kernels.

    These have sums for all heads, but their statistics lie in the query's gradient.
    """
    return key_heads - math.ceil(key_heads * 2 / spec.head_dim)


def _saves_sums(spec: Specialisation, key_heads: int, seqlen_k: int, num_sms: int) -> bool:
    """Whether some heads of the fused kernel can take over the sums of others.

    A head is prepared in the list's row before its group computes, which is that in which the third group before it is
    finished: a head may take the sums of one that is three groups earlier, or more.
    """
    return _most_slots(spec, key_heads) >= 3 * _heads_in_work(spec, key_heads, seqlen_k, num_sms)


def extras_fit(query, value, mask, dropout_p: float, deterministic: bool) -> bool:
    """Is there a kernel for the call's head dimensions, with its mask and dropout if it has any?

    The forward has one for larger head dimensions.
    """
    largest = max(query.size(3), value.size(3))
    if mask is None and dropout_p == 0.0:
        return largest <= MAX_HEAD_DIM
    if mask is not None and mask.dtype != torch.bool:
        fits = mask.dtype == query.dtype and forward.takes_mask(query, mask)
        return fits and largest <= MAX_EXTRAS_HEAD_DIM and dropout_p == 0.0 and not deterministic
    return largest <= MAX_EXTRAS_HEAD_DIM


def _refusal(
    query, key, value, out, logsumexp, grad_out, mask, dropout_p: float, is_causal: bool, softmax_scale: float,
    deterministic: bool,
) -> str:  # fmt: skip
    """Why the kernels cannot run this call, whatever routing has said: a compiled graph may get other tensors."""
    # Masks together with dropout are no obstacle here; the forward was another kernel's.
    refusal = forward._refusal(query, key, value, mask, is_causal, softmax_scale, 0.0)
    if refusal:
        return refusal
    if query.size(3) > MAX_HEAD_DIM or value.size(3) > MAX_HEAD_DIM:
        return f"the Hopper backward has no head_dim {query.size(3)} with value head_dim {value.size(3)}"
    if not extras_fit(query, value, mask, dropout_p, deterministic):
        return f"the Hopper backward does not take this mask or dropout with a head_dim of {query.size(3)}"
    if not suits(query, key, value, out, grad_out):
        return "the copy engine cannot walk tensors with such strides"
    in_parts = mask is not None and mask.dtype != torch.bool
    if len(logsumexp.shape) != 3 + in_parts:
        return "the Hopper backward needs a logsumexp in two parts with a float mask, in one without"
    if logsumexp.dtype != torch.float32 or not (logsumexp[0] if in_parts else logsumexp).is_contiguous():
        return "the Hopper backward needs a contiguous float32 logsumexp"
    return ""


# ----------------------------------------------------------------------------------------------------------------- plan


class Plan:
    """The backward of all calls with these shapes, strides, dtype and scale on one device; only pointers are free.

    Raises KernelUnavailable when it is made, before anything is launched; torch.OutOfMemoryError where the GPU has no
    room for the kernels' code.
    """

    __slots__ = (
        "_configs",
        "_counter_bytes",
        "_device_index",
        "_dropout",
        "_frames",
        "_is_fused",
        "_launched",
        "_maps",
        "_mask",
        "_mask_map",
        "_params",
        "_semaphores_at",
        "_statistics_in_gradient",
        "_sums_at",
        "_workspace_floats",
        "specialisation",
    )

    def __init__(
        self, query, key, value, out, logsumexp, grad_out, grad_query, grad_key, grad_value,
        is_causal: bool, softmax_scale: float, deterministic: bool, tile: BackwardTile | None = None,
        mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    ) -> None:  # fmt: skip
        refusal = _refusal(
            query, key, value, out, logsumexp, grad_out, mask, dropout_p, is_causal, softmax_scale, deterministic
        )
        if refusal:
            raise KernelUnavailable(refusal)
        batch, heads, seqlen_q, head_dim = query.shape
        kv_heads, seqlen_k, head_dim_v = value.shape[1:]
        index = self._device_index = query.device.index
        query_rows = seqlen_q * (heads // kv_heads)
        is_masked, has_dropout = mask is not None, dropout_p > 0.0
        scores_shape = batch, heads, seqlen_q, seqlen_k
        is_float_mask = mask is not None and mask.dtype != torch.bool
        mask_per_key = is_float_mask and masks.strides_of(mask, scores_shape)[2] == 0
        _, num_sms = forward._device(index)
        if is_masked or has_dropout or grad_query is None:
            spec = specialise(
                head_dim, head_dim_v, query.dtype, is_causal, deterministic, query_rows, is_masked, has_dropout,
                can_fuse=False, is_float_mask=is_float_mask, mask_per_key=mask_per_key,
            )  # fmt: skip
        else:
            spec = specialise_dense(
                head_dim, head_dim_v, query.dtype, is_causal, deterministic, batch, heads, kv_heads, seqlen_q, seqlen_k,
                num_sms,
            )  # fmt: skip
        if tile is not None:
            spec = spec._replace(tile=tile)
        self.specialisation = spec
        tile = spec.tile
        cluster = spec.blocks_of_cluster
        q_tiles, k_tiles = math.ceil(seqlen_q / tile.block_m), math.ceil(seqlen_k / (tile.block_n * cluster))
        all_q_tiles, blocks = q_tiles * batch * heads, k_tiles * batch * kv_heads
        if tile.direct and q_tiles > tile.block_n // tile.block_m * spec.head_dim // 2:
            raise KernelUnavailable(f"the first queries have no room for the statistics of {seqlen_q}")
        chunk_tiles = max(1, _CHUNK_ROWS // tile.block_m)
        chunks = math.ceil(q_tiles * (heads // kv_heads) / chunk_tiles)
        if tile.fused:
            blocks += 2 * chunks * batch * kv_heads
        blocks *= cluster
        if max(all_q_tiles, blocks) > tiles.MAX_BLOCKS:
            raise KernelUnavailable(f"{max(all_q_tiles, blocks)} tiles are more than 32 bits count")
        # One allocation: statistics, sums, semaphores, each at a multiple of 16 bytes. The query's gradient, which the
        # last kernel writes when nobody needs the statistics any more, holds them where it is large enough.
        # `direct` writes that gradient meanwhile; there, the first queries leave room among the sums.
        statistics = 0 if tile.direct else all_q_tiles * (2 + has_dropout + 2 * is_float_mask) * tile.block_m
        self._statistics_in_gradient = (
            grad_query is not None
            and not (tile.fused or tile.direct)
            and has_room(grad_query, statistics)
        )
        try:
            binary = spec.compile()
            self._launched = []
            for entry in spec.launched:
                shared_bytes = spec.shared_bytes if entry == MAIN else 0
                function = ctypes.c_void_p(driver.load_function(binary, entry, index, shared_bytes))
                self._launched.append((entry, function))
            self._mask = self._mask_map = self._dropout = None
            if mask is not None:
                makers = [ctypes.c_void_p(driver.load_function(binary, entry, index, 0)) for entry in masks.BIT_ENTRIES]
                self._mask = masks.QueryLists(makers, mask, scores_shape, tile)
            if is_float_mask:
                own = mask[masks.unexpanded(masks.strides_of(mask, scores_shape))]
                rows_at_once = 1 if mask_per_key else tile.step_m
                self._mask_map = driver.TensorMaps(
                    own.dtype, own.shape, own.stride(), rows_at_once, own.data_ptr(), index
                )  # fmt: skip
            if has_dropout:
                maker = ctypes.c_void_p(driver.load_function(binary, dropout.ENTRY, index, 0))
                self._dropout = dropout.Keys(maker, batch * heads, seqlen_q, seqlen_k, query.device)
            loaded = tile.block_m // 2 if spec.in_halves else tile.block_m
            rows = (loaded, tile.block_n, tile.block_n, loaded, tile.block_n, tile.block_n)
            self._maps = [
                driver.TensorMaps(t.dtype, t.shape, t.stride(), n, t.data_ptr(), index)
                for t, n in zip((query, key, value, grad_out, grad_key, grad_value), rows, strict=True)
            ]
        except (driver.DriverError, OSError) as error:
            raise KernelUnavailable(f"{MAIN}: {error}") from error
        strides = {}
        for name, tensor in (("out", out), ("grad_out", grad_out), ("grad_query", grad_query)):
            if tensor is not None:
                for dim, what in enumerate(("batch", "head", "row")):
                    strides[f"{name}_stride_{what}"] = tensor.stride(dim)
        head_bytes = query_rows * (head_dim * 6 + head_dim_v * 2)
        heads_per_group = _heads_per_group(
            batch * kv_heads, head_bytes, k_tiles * cluster, is_causal, deterministic, num_sms
        )
        slots = batch * kv_heads
        if tile.fused:
            heads_per_group = _heads_in_work(spec, batch * kv_heads, seqlen_k, num_sms)
            most = _most_slots(spec, batch * kv_heads)
            if most >= 3 * heads_per_group:  # with fewer, heads would wait for themselves
                slots = most
            if tile.paired:  # four groups: one prepares, one computes, one finishes, one has finished
                slots = min(slots, 4 * heads_per_group)
        sums_at = 0 if self._statistics_in_gradient else tiles.round_up(statistics, 32)
        semaphores_at = sums_at + slots * heads // kv_heads * q_tiles * tile.block_m * spec.head_dim
        self._workspace_floats = semaphores_at + (all_q_tiles * tile.num_warpgroups * cluster if deterministic else 0)
        self._sums_at, self._semaphores_at = 4 * sums_at, 4 * semaphores_at
        self._is_fused = tile.fused
        of_dropout = dropout.params_of(dropout_p) if has_dropout else dropout.DropoutParams()
        self._params = BackwardParams(
            **strides,
            batch=batch,
            num_heads=heads,
            num_kv_heads=kv_heads,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            logsumexp_pitch=logsumexp.size(-1),
            q_tiles=q_tiles,
            k_tiles=k_tiles,
            heads_per_group=heads_per_group,
            chunks=chunks,
            chunk_tiles=chunk_tiles,
            slots=slots,
            softmax_scale=softmax_scale * of_dropout.scale if has_dropout else softmax_scale,
            softmax_scale_log2=softmax_scale * _LOG2E,
            mask=QueryMask() if self._mask is None else QueryMask(**self._mask.numbers),
            dropout=of_dropout,
            kept=1.0 - dropout_p,
        )
        grid = min(blocks, num_sms) if tile.persistent else blocks
        configs = {
            PREPARE: driver.LaunchConfig((all_q_tiles, 1, 1), (_PREPARE_THREADS, 1, 1), 0, None, None, 0),
            MAIN: driver.LaunchConfig((grid, 1, 1), (spec.num_threads, 1, 1), spec.shared_bytes, None, None, 0),
            FINISH: driver.LaunchConfig((all_q_tiles, 1, 1), (128 * tile.num_warpgroups, 1, 1), 0, None, None, 0),
        }
        self._configs = [configs[entry] for entry in spec.launched]
        self._counter_bytes = 0
        if tile.fused:
            self._counter_bytes = _COUNTERS_BYTES + 4 * batch * kv_heads * (1 + chunks)
        elif deterministic or tile.persistent:
            self._counter_bytes = _COUNTERS_BYTES
        self._frames: list[driver.Frame] = []

    def __call__(
        self, query, key, value, out, logsumexp, grad_out, grad_query, grad_key, grad_value, mask=None, seed=None,
        delta=None, made: list[masks.QueryListsMade] | None = None, first_head: int = 0,
    ) -> None:  # fmt: skip
        """Launch on the current stream of the tensors' device. made, first_head: see `backward`.

        Raises KernelUnavailable, and launches nothing, where an address is no multiple of 16 bytes.
        """
        index = self._device_index
        if driver.current_device() != index:
            with torch.cuda.device(index):
                return self(
                    query, key, value, out, logsumexp, grad_out, grad_query, grad_key, grad_value, mask, seed, delta,
                    made, first_head,
                )  # fmt: skip
        query_at, key_at, value_at, out_at = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
        logsumexp_at, grad_out_at = logsumexp.data_ptr(), grad_out.data_ptr()
        grad_query_at = 0 if grad_query is None else grad_query.data_ptr()
        if (query_at | key_at | value_at | out_at | grad_out_at) & 15:
            raise KernelUnavailable("the Hopper kernels need addresses that are multiples of 16 bytes")
        workspace = _allocate(query, self._workspace_floats)
        start = workspace.data_ptr()
        query_map, key_map, value_map, grad_out_map, grad_key_map, grad_value_map = self._maps
        # These stay referenced until the driver has copied them.
        maps = (
            query_map.get(query_at),
            key_map.get(key_at),
            value_map.get(value_at),
            grad_out_map.get(grad_out_at),
            grad_key_map.get(grad_key.data_ptr()),
            grad_value_map.get(grad_value.data_ptr()),
        )
        addresses = _MAP_ADDRESSES
        if self._mask_map is not None:
            maps += (self._mask_map.get(mask.data_ptr()),)
            addresses = _FLOAT_MASK_MAP_ADDRESSES
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = driver.Frame(self._configs, self._params, len(maps))
        params = frame.params
        addresses.pack_into(frame.pointers, 0, *[address for address, _ in maps])
        stream = driver.current_stream(index)
        counters = driver.counters(index, stream, self._counter_bytes) if self._counter_bytes else 0
        _ADDRESSES.pack_into(
            params, 0, out_at, grad_out_at, logsumexp_at, grad_query_at,
            grad_query_at if self._statistics_in_gradient else start, start + self._sums_at,
            counters + _COUNTERS_BYTES if self._is_fused else start + self._semaphores_at, counters,
        )  # fmt: skip
        if self._mask is not None:
            lists = made[0] if made else self._mask.make(mask, index, stream)
            if made is not None and not made:
                made.append(lists)
            params.mask.bits, params.mask.lists = lists.bits, lists.lists
        if self._mask_map is not None:
            params.logsumexp_low = logsumexp_at + 4 * logsumexp.stride(0)
            params.delta = None if delta is None else delta.data_ptr()
        if self._dropout is not None:
            table = self._dropout.make(seed, index, stream, first_head)
            params.dropout.keys = table.data_ptr()
        arguments, only_params = frame.arguments, frame.only_params
        first = True
        for (entry, function), config in zip(self._launched, frame.configs, strict=False):
            if entry == FINISH and grad_query is None:
                break
            launch_counts[entry] += 1
            try:
                driver.launch(config, function, arguments if entry == MAIN else only_params, index, stream)
            except driver.DriverError as error:
                if error.is_refusal and first:
                    raise KernelUnavailable(f"{entry}: {error}") from error
                raise
            first = False
        self._frames.append(frame)

    def prepared(self, grads, wanted, query, otherwise) -> Callable[..., tuple[torch.Tensor | None, ...]] | None:
        """The same in less time: see ``prepared.backward``; None of a call with a mask or dropout."""
        if self._mask is not None or self._dropout is not None:
            return None
        kernels = tuple(
            (entry, function, config, entry == MAIN)
            for (entry, function), config in zip(self._launched, self._configs, strict=True)
            if entry != FINISH or grads[0] is not None
        )
        constants = prepared.Backward(
            launches=prepared.Launches(self._device_index, kernels, self._params, self._maps),
            workspace_floats=self._workspace_floats,
            statistics_in_gradient=self._statistics_in_gradient,
            sums_at=self._sums_at,
            semaphores_at=_COUNTERS_BYTES if self._is_fused else self._semaphores_at,
            semaphores_are_counters=self._is_fused,
            counter_bytes=self._counter_bytes,
        )
        return prepared.backward(constants, grads, wanted, query, otherwise)


def _allocate(like: torch.Tensor, floats: int) -> torch.Tensor:
    return _torch.empty_float32(like, (floats,), (1,))


def is_dense(tensor: torch.Tensor) -> bool:
    """Has the tensor's memory no gaps?"""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() == span


def has_room(tensor: torch.Tensor, floats: int) -> bool:
    """Can so many float32 numbers lie in the tensor's memory for a while?"""
    return is_dense(tensor) and 4 * floats <= tensor.numel() * tensor.element_size()


def aligned(*tensors: torch.Tensor) -> bool:
    """Are the addresses multiples of 16 bytes?"""
    return not any(tensor.data_ptr() & 15 for tensor in tensors)


def walkable(*tensors: torch.Tensor) -> bool:
    """Can the copy engine walk [B, H, S, D] tensors with these strides, none of them expanded?"""
    for tensor in tensors:
        if tensor.stride(3) != 1:
            return False
        for dim in range(3):
            stride = tensor.stride(dim)
            if tensor.size(dim) != 1 and (stride <= 0 or stride % 8):
                return False
    return True


def suits(*tensors: torch.Tensor) -> bool:
    """Can ``backward`` read these? If not, Triton's kernels do."""
    return walkable(*tensors) and aligned(*tensors)


_MAX_PLANS = 4096
# A plan that cannot be made stays so: compiling is not tried again with every call.
_plans: dict[tuple, Plan | KernelUnavailable] = {}


def backward(
    grad_out, query, key, value, out, logsumexp, is_causal, softmax_scale, grad_query, grad_key, grad_value,
    deterministic, mask=None, dropout_p=0.0, dropout_seed=None, delta=None,
    made: list[masks.QueryListsMade] | None = None, first_head: int = 0,
) -> Plan:  # fmt: skip
    """Fill grad_query (unless None), grad_key and grad_value, of their tensors' shapes, the last dimension dense.

    query [B, H, seqlen_q, D], key [B, Hkv, seqlen_k, D], value [B, Hkv, seqlen_k, Dv], out and grad_out
    [B, H, seqlen_q, Dv], ``aligned`` and ``walkable``; float16 or bfloat16, all sizes positive, D and Dv multiples of 8
    up to 256, softmax_scale finite and positive. logsumexp float32 [B, H, at least seqlen_q], contiguous, natural
    logarithm, -inf for a row that sees no key; with a float mask [2, B, H, as many], value and what rounding cut off
    it. deterministic: bit by bit the same result for the same call. mask bool [B or 1, H or 1, seqlen_q or 1, seqlen_k
    or 1] with any strides or of query's dtype and ``forward.takes_mask``, not together with is_causal. dropout_seed
    int64 [1] where dropout_p is positive; out is that of the same dropout. Both where ``extras_fit``. delta, float32 of
    logsumexp's shape in one part: to be filled with rowsum(grad_out * out), with a float mask alone. made: a list,
    empty in the first of some calls with the same mask and sizes but for the batch, which keeps the mask's lists for
    the others. first_head: where dropout begins to count heads, of those of all batches in a row. Raises
    KernelUnavailable before any launch of the three kernels.
    """
    tensors = query, key, value, out, logsumexp, grad_out, grad_query, grad_key, grad_value
    key_of_plan = (
        *((t.shape, t.stride()) if t is not None else None for t in tensors),
        query.dtype, is_causal, softmax_scale, deterministic, query.get_device(), dropout_p,
    )  # fmt: skip
    if mask is not None:
        key_of_plan += mask.shape, mask.stride(), mask.dtype, mask.data_ptr() & 15
    found = _plans.get(key_of_plan)
    if found is None:
        try:
            found = Plan(*tensors, is_causal, softmax_scale, deterministic, mask=mask, dropout_p=dropout_p)
        except KernelUnavailable as error:
            found = error
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key_of_plan] = found
    if isinstance(found, KernelUnavailable):
        raise KernelUnavailable(str(found))
    found(*tensors, mask, dropout_seed, delta, made, first_head)
    return found


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_plans.clear)
