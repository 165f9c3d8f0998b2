"""The host side of the Hopper backward kernels: what to compile for a call, and how to launch it.

May import torch, ``nvrtc.py``, ``driver.py`` and this folder. Imported by ``torch_flashbackend.ops`` and the warm-up.

As ``forward.py``: a ``Specialisation``, a ``Plan`` for tensors of these shapes and strides, and the launches, which
patch pointers in. Three kernels in one binary: they prepare, compute, and finish the query's gradient. The second is
``backward.cu`` or, for a head_dim above 128, ``backward_wide.cu``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
from pathlib import Path
from typing import NamedTuple

import torch

from ... import driver, nvrtc
from .. import KernelUnavailable, launch_counts
from . import dropout, forward, masks, tiles
from .tiles import BackwardTile

FOLDER = Path(__file__).parent
PREPARE, MAIN, FINISH = ENTRIES = ("flash_backward_prepare", "flash_backward", "flash_backward_finish")
MAX_HEAD_DIM = 256
MAX_EXTRAS_HEAD_DIM = 128  # with a mask or dropout
# wgmma cuts off what it adds up instead of rounding it; Triton's kernels add up longer sums in parts.
MAX_SUM_ROWS = forward.MAX_SEQLEN_K

for _entry in ENTRIES:
    launch_counts.setdefault(_entry, 0)

_LOG2E = math.log2(math.e)
_PREPARE_THREADS = 256
# Queries, their gradients and their float32 sums of the heads in work at one time should fit the L2 cache (50 MB).
_L2_BYTES = 32 << 20
_MAX_BLOCKS = 2**31 - 1


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
        ("softmax_scale", ctypes.c_float),  # what the gradients of query and key are multiplied by at last
        ("softmax_scale_log2", ctypes.c_float),
        ("mask", QueryMask),  # zeros without a mask
        ("dropout", dropout.DropoutParams),  # zeros without dropout
        ("kept", ctypes.c_float),  # 1 - dropout_p
        ("unused", ctypes.c_int32),
    ]


class Specialisation(NamedTuple):
    """What the compiler knows of a call. head_dim and head_dim_v: multiples of 16, at most 256.

    is_masked: there is a mask, of floats where is_float_mask. The binary then holds the kernels that read it too, and with has_dropout the one
    that writes random keys.
    """

    head_dim: int
    head_dim_v: int
    is_causal: bool
    is_bf16: bool
    deterministic: bool
    tile: BackwardTile
    is_masked: bool = False
    has_dropout: bool = False
    is_float_mask: bool = False

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
            "FIRST_STORES": int(tile.first_stores),
            "IS_CAUSAL": int(self.is_causal),
            "MASKED": int(self.is_masked),
            "FLOAT_MASK": int(self.is_float_mask),
            "DROPOUT": int(self.has_dropout),
            "IS_BF16": int(self.is_bf16),
            "DETERMINISTIC": int(self.deterministic),
        }

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block of the main kernel: the tiles, statistics, and 1 KB for barriers."""
        tile, padded, padded_v = self.tile, _round_up(self.head_dim, 64), _round_up(self.head_dim_v, 64)
        keys = tile.block_n * (padded + padded_v) * 2
        queries = tile.block_m * (tile.q_stages * (padded * 2 + 8) + tile.do_stages * padded_v * 2)
        if self.is_masked:
            queries += tile.q_stages * tile.block_m * tile.block_n // 8
        if self.is_float_mask:
            queries += tile.q_stages * tile.block_m * 8 + tile.step_m * tile.block_n * 2
        if self.has_dropout:
            queries += tile.q_stages * tile.block_m * 4 + tile.block_n * 8
        grads = tile.block_m * tile.ds_stages * tile.block_n * 2
        # P on its way to the other warpgroup, or the query's gradient on its way to global memory; both are float32.
        handed = tile.block_m * (tile.block_n if self.is_wide else self.head_dim) * 4
        if tile.persistent and keys > grads:  # the key's gradient leaves from there
            handed = max(handed, tile.block_n * padded * 2)
        return keys + queries + grads + handed + 1024

    @property
    def is_wide(self) -> bool:
        """Whether the sums of the keys' and values' gradients need a warpgroup each."""
        return max(self.head_dim, self.head_dim_v) > 128

    @property
    def in_order(self) -> bool:
        """Whether blocks wait for one another."""
        return self.deterministic or self.tile.first_stores

    @property
    def num_threads(self) -> int:
        """Threads of a block of the main kernel."""
        return 512 if self.is_wide else self.tile.num_threads

    @property
    def source(self) -> nvrtc.Source:
        """What to compile."""
        from . import instructions

        tile = self.tile
        columns = {tile.step_m}
        for size in (self.head_dim, self.head_dim_v):  # at most 128 at a time
            columns |= {min(size, 128), size % 128}
        if self.is_wide:
            columns |= {64}
        elif tile.block_m == tile.block_n:  # a warpgroup computes 64 rows of the query's gradient
            columns |= {self.head_dim}
        else:  # or whole boxes of 64 columns
            columns |= {_round_up(self.head_dim, 64) // tile.num_warpgroups}
        dtype = "bf16" if self.is_bf16 else "f16"
        generated = {instructions.HEADER_NAME: instructions.header(columns - {0}, dtype)}
        text = (FOLDER / ("backward_wide.cu" if self.is_wide else "backward.cu")).read_text()
        return nvrtc.Source(MAIN, text, forward._headers(FOLDER) | generated, self.defines, forward.ARCHITECTURE)

    @property
    def entries(self) -> tuple[str, ...]:
        """The kernels in the binary."""
        return (*masks.BIT_ENTRIES * self.is_masked, *(dropout.ENTRY,) * self.has_dropout, *ENTRIES)

    def compile(self) -> nvrtc.Binary:
        """The binary. Needs NVRTC and no GPU; raises KernelUnavailable."""
        try:
            return nvrtc.compile(self.source)
        except (nvrtc.CompileError, OSError) as error:
            raise KernelUnavailable(str(error)) from error


def specialise(
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
    is_causal: bool,
    deterministic: bool,
    query_rows: int,
    is_masked: bool = False,
    has_dropout: bool = False,
    is_float_mask: bool = False,
) -> Specialisation:
    """The specialisation that runs a call of these sizes, head dimensions in multiples of 8 up to 256.

    query_rows: how many queries a key head has, those of all its query heads together. is_masked: with a bool mask,
    has_dropout: with dropout, both for head dimensions up to 128.
    """
    padded, padded_v = _round_up(head_dim, 16), _round_up(head_dim_v, 16)
    if padded_v > 64:
        padded = max(padded, 80)  # of wide tiles each warpgroup computes a box of the query's gradient; there are two
    tile = tiles.choose_backward(padded, padded_v, is_causal or is_masked, query_rows, deterministic)
    if has_dropout:
        # dP is dropped before delta is subtracted; persistent blocks have no registers for what stays.
        tile = dataclasses.replace(tile, delta_first=False, persistent=False)
    if is_float_mask:
        # The mask's numbers take the place of a query tile.
        tile = dataclasses.replace(tile, q_stages=2, persistent=False)
    is_bf16 = dtype == torch.bfloat16
    return Specialisation(
        padded, padded_v, is_causal, is_bf16, deterministic, tile, is_masked, has_dropout, is_float_mask
    )


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def sums_fit(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Are there few enough query rows for each key that adding them up in one accumulator is accurate?"""
    return query.size(2) * (query.size(1) // key.size(1)) <= MAX_SUM_ROWS


def extras_fit(query, value, mask, dropout_p: float, deterministic: bool) -> bool:
    """Is there a kernel for the call's mask and dropout, if it has any?"""
    if mask is None and dropout_p == 0.0:
        return True
    # Mask, dropout and the order of blocks together are more than the registers of head_dim 128 hold.
    all_three = mask is not None and dropout_p > 0.0 and deterministic
    return max(query.size(3), value.size(3)) <= MAX_EXTRAS_HEAD_DIM and not all_three


def _refusal(
    query, key, value, out, logsumexp, grad_out, mask, dropout_p: float, is_causal: bool, softmax_scale: float,
    deterministic: bool,
) -> str:  # fmt: skip
    """Why the kernels cannot run this call, whatever routing has said: a compiled graph may get other tensors."""
    refusal = forward._refusal(query, key, value, mask, is_causal, softmax_scale)
    if refusal:
        return refusal
    if query.size(3) > MAX_HEAD_DIM or value.size(3) > MAX_HEAD_DIM:
        return f"the Hopper backward has no head_dim {query.size(3)} with value head_dim {value.size(3)}"
    if not extras_fit(query, value, mask, dropout_p, deterministic):
        return f"the Hopper backward takes masks and dropout up to a head_dim of {MAX_EXTRAS_HEAD_DIM}, not all at once"
    if not suits(query, key, value, out, grad_out):
        return "the copy engine cannot walk tensors with such strides"
    if logsumexp.dtype != torch.float32 or not logsumexp.is_contiguous():
        return "the Hopper backward needs a contiguous float32 logsumexp"
    return ""


# ----------------------------------------------------------------------------------------------------------------- plan


class _Frame:
    """One set of launch arguments, in use by one thread at a time: only stream and pointers change."""

    __slots__ = ("configs", "main", "params", "pointers", "single")

    def __init__(self, configs: list[driver.LaunchConfig], params: BackwardParams) -> None:
        self.configs = [driver.LaunchConfig.from_buffer_copy(config) for config in configs]
        self.params = BackwardParams.from_buffer_copy(params)
        self.pointers = (ctypes.c_void_p * 7)()
        self.pointers[6] = ctypes.addressof(self.params)
        start = ctypes.addressof(self.pointers)
        self.main = ctypes.c_void_p(start)
        # The other kernels' only argument.
        self.single = ctypes.c_void_p(start + 6 * ctypes.sizeof(ctypes.c_void_p))


class Plan:
    """The backward of all calls with these shapes, strides, dtype and scale on one device; only pointers are free.

    Raises KernelUnavailable when it is made, before anything is launched; torch.OutOfMemoryError where the GPU has no
    room for the kernels' code.
    """

    __slots__ = (
        "_configs",
        "_device_index",
        "_dropout",
        "_frames",
        "_functions",
        "_maps",
        "_mask",
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
        spec = specialise(
            head_dim, head_dim_v, query.dtype, is_causal, deterministic, query_rows, is_masked, has_dropout
        )
        if tile is not None:
            spec = spec._replace(tile=tile)
        self.specialisation = spec
        tile = spec.tile
        q_tiles, k_tiles = math.ceil(seqlen_q / tile.block_m), math.ceil(seqlen_k / tile.block_n)
        all_q_tiles, blocks = q_tiles * batch * heads, k_tiles * batch * kv_heads
        if max(all_q_tiles, blocks) > _MAX_BLOCKS:
            raise KernelUnavailable(f"{max(all_q_tiles, blocks)} tiles are more than 32 bits count")
        # One allocation: statistics, sums, semaphores, each at a multiple of 16 bytes. The query's gradient, which the
        # last kernel writes when nobody needs the statistics any more, holds them where it is large enough.
        statistics = all_q_tiles * (2 + has_dropout) * tile.block_m
        self._statistics_in_gradient = grad_query is not None and 4 * statistics <= _dense_bytes(grad_query)
        self._sums_at = 0 if self._statistics_in_gradient else _round_up(statistics, 4)
        self._semaphores_at = self._sums_at + all_q_tiles * tile.block_m * spec.head_dim
        self._workspace_floats = self._semaphores_at + (all_q_tiles * tile.num_warpgroups if spec.in_order else 0)
        try:
            binary = spec.compile()
            self._functions = [
                ctypes.c_void_p(driver.load_function(binary, entry, index, spec.shared_bytes if entry == MAIN else 0))
                for entry in ENTRIES
            ]
            scores_shape = batch, heads, seqlen_q, seqlen_k
            self._mask = self._dropout = None
            if mask is not None:
                makers = [ctypes.c_void_p(driver.load_function(binary, entry, index, 0)) for entry in masks.BIT_ENTRIES]
                self._mask = masks.QueryLists(makers, mask, scores_shape, tile)
            if has_dropout:
                maker = ctypes.c_void_p(driver.load_function(binary, dropout.ENTRY, index, 0))
                self._dropout = dropout.Keys(maker, batch * heads, seqlen_q, seqlen_k, query.device)
            rows = (tile.block_m, tile.block_n, tile.block_n, tile.block_m, tile.block_n, tile.block_n)
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
        _, num_sms = forward._device(index)
        head_bytes = query_rows * (head_dim * 6 + head_dim_v * 2)
        # Enough for a wave of blocks, however large.
        heads_per_group = max(_L2_BYTES // head_bytes, math.ceil(num_sms / k_tiles))
        if deterministic and is_causal:
            # Blocks of later keys are shorter, so they catch up with those that they wait for; few run at one time.
            heads_per_group = max(heads_per_group, math.ceil(num_sms / 3))
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
            heads_per_group=min(heads_per_group, batch * kv_heads),
            softmax_scale=softmax_scale * of_dropout.scale if has_dropout else softmax_scale,
            softmax_scale_log2=softmax_scale * _LOG2E,
            mask=QueryMask() if self._mask is None else QueryMask(**self._mask.numbers),
            dropout=of_dropout,
            kept=1.0 - dropout_p,
        )
        grid = min(blocks, num_sms) if tile.persistent else blocks
        self._configs = [
            driver.LaunchConfig((all_q_tiles, 1, 1), (_PREPARE_THREADS, 1, 1), 0, None, None, 0),
            driver.LaunchConfig((grid, 1, 1), (spec.num_threads, 1, 1), spec.shared_bytes, None, None, 0),
            driver.LaunchConfig((all_q_tiles, 1, 1), (128 * tile.num_warpgroups, 1, 1), 0, None, None, 0),
        ]
        self._frames: list[_Frame] = []

    def __call__(
        self, query, key, value, out, logsumexp, grad_out, grad_query, grad_key, grad_value, mask=None, seed=None
    ) -> None:
        """Launch on the current stream of the tensors' device."""
        index = self._device_index
        if driver.current_device() != index:
            with torch.cuda.device(index):
                return self(query, key, value, out, logsumexp, grad_out, grad_query, grad_key, grad_value, mask, seed)
        workspace = torch.empty(self._workspace_floats, dtype=torch.float32, device=query.device)
        # These stay referenced until the driver has copied them.
        maps = [
            tensor_map.get(tensor.data_ptr())
            for tensor_map, tensor in zip(self._maps, (query, key, value, grad_out, grad_key, grad_value), strict=True)
        ]
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = _Frame(self._configs, self._params)
        pointers, params = frame.pointers, frame.params
        for position, (address, _) in enumerate(maps):
            pointers[position] = address
        start = workspace.data_ptr()
        params.out = out.data_ptr()
        params.grad_out = grad_out.data_ptr()
        params.logsumexp = logsumexp.data_ptr()
        params.grad_query = None if grad_query is None else grad_query.data_ptr()
        params.statistics = params.grad_query if self._statistics_in_gradient else start
        params.sums = start + 4 * self._sums_at
        params.semaphores = start + 4 * self._semaphores_at
        stream = driver.current_stream(index)
        if self.specialisation.in_order or self.specialisation.tile.persistent:
            params.counters = driver.counters(index, stream)
        if self._mask is not None:
            lists = self._mask.make(mask, index, stream)
            params.mask.bits, params.mask.lists = lists.bits, lists.lists
        if self._dropout is not None:
            table = self._dropout.make(seed, index, stream)
            params.dropout.keys = table.data_ptr()
        count = 2 if grad_query is None else 3
        launches = zip(ENTRIES, self._functions, frame.configs, (frame.single, frame.main, frame.single), strict=True)
        for entry, function, config, arguments in list(launches)[:count]:
            launch_counts[entry] += 1
            try:
                driver.launch(config, function, arguments, index, stream)
            except driver.DriverError as error:
                if error.is_refusal and entry == PREPARE:
                    raise KernelUnavailable(f"{entry}: {error}") from error
                raise
        self._frames.append(frame)


def _dense_bytes(tensor: torch.Tensor) -> int:
    """The size of a tensor's memory if it has no gaps, else 0."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() * tensor.element_size() if span == tensor.numel() else 0


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
    deterministic, mask=None, dropout_p=0.0, dropout_seed=None,
) -> None:  # fmt: skip
    """Fill grad_query (unless None), grad_key and grad_value, of their tensors' shapes, the last dimension dense.

    query [B, H, seqlen_q, D], key [B, Hkv, seqlen_k, D], value [B, Hkv, seqlen_k, Dv], out and grad_out
    [B, H, seqlen_q, Dv], ``aligned`` and ``walkable``; float16 or bfloat16, all sizes positive, D and Dv multiples of 8
    up to 256, softmax_scale finite and positive. logsumexp float32 [B, H, at least seqlen_q], contiguous, natural
    logarithm, -inf for a row that sees no key. deterministic: bit by bit the same result for the same call. mask bool
    [B or 1, H or 1, seqlen_q or 1, seqlen_k or 1] with any strides, not together with is_causal.
    dropout_seed int64 [1] where dropout_p is positive; out is that of the same dropout. Both
    where ``extras_fit``. Raises KernelUnavailable before any launch of the three kernels.
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
    found(*tensors, mask, dropout_seed)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_plans.clear)
