"""Packed sequences of different lengths on the Hopper kernels, ``forward.cu`` and ``backward.cu``.

May import torch, ``driver.py``, ``batch_invariance.py``, this folder, and the schedule of ``kernels/triton/varlen.py``:
a list of tiles that a small kernel writes on the GPU, where the lengths are. Imported by ``torch_flashbackend.varlen``.
What these do not take (see ``takes`` and ``takes_backward``) is Triton's.
"""

from __future__ import annotations

import ctypes
import math
import os

import torch
from torch import Tensor

from ... import driver
from ...batch_invariance import on_change, planned_length
from .. import KernelUnavailable, launch_counts
from ..triton.varlen import Extras, Options, _as_rank_4, _PackedCall
from ..triton.varlen_common import STATISTICS_ALIGNMENT
from . import backward as dense_backward
from . import tiles
from .backward import MAIN, PREPARE, BackwardParams
from .forward import (
    _LOG2E,
    ENTRY,
    MAX_HEAD_DIM,
    MAX_SEQLEN_K,
    ForwardParams,
    Specialisation,
    _device,
    _heads_per_group,
    walkable,
)

_MAX_PLANS = 4096


def takes(
    query: Tensor, key: Tensor, value: Tensor, options: Options, extras: Extras, longest_k: int | None = None
) -> bool:
    """Does the Hopper kernel compute this call? Routing for packed sequences, by shapes and types alone.

    longest_k: keys of the longest sequence, where they are known.

    query [total_q, H, D], key [total_k, Hkv, D], value [total_k, Hkv, Dv]. Full attention, or causal where queries and
    keys are cut at the same places, which the same tensor for both says: then the diagonal lies as in dense calls.
    """
    if (
        options.window_left >= 0
        or options.window_right > 0
        or options.softcap != 0.0
        or not 0.0 < options.scale < math.inf
        or query.dtype not in (torch.float16, torch.bfloat16)
        or extras.seqused_k is not None
        or extras.alibi_slopes is not None
        or extras.sinks is not None
        or (longest_k or key.size(0)) > MAX_SEQLEN_K
    ):
        return False
    if options.window_right == 0 and not _same_lengths(options, extras):
        return False
    head_dim, head_dim_v = query.size(2), value.size(2)
    return (
        query.is_cuda
        and _device(query.get_device())[0] == (9, 0)
        and not (head_dim | head_dim_v) % 8
        and max(head_dim, head_dim_v) <= MAX_HEAD_DIM
        and not (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15
        and torch.version.hip is None
    )


def _same_lengths(options: Options, extras: Extras) -> bool:
    cu_seqlens_q, cu_seqlens_k = extras.cu_seqlens_q, extras.cu_seqlens_k
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return cu_seqlens_q is cu_seqlens_k and options.max_seqlen_q == options.max_seqlen_k
    return cu_seqlens_q is cu_seqlens_k or (
        cu_seqlens_q.data_ptr() == cu_seqlens_k.data_ptr() and cu_seqlens_q.dtype == cu_seqlens_k.dtype
    )


def specialise(
    head_dim: int, head_dim_v: int, dtype: torch.dtype, is_causal: bool, *, keys: int, sequences: int
) -> Specialisation:
    """The specialisation for packed tensors of so many keys and sequences: tiles as for their mean length."""
    padded, padded_v = tiles.round_up(head_dim, 16), tiles.round_up(head_dim_v, 16)
    tile = tiles.choose_packed(padded, padded_v, is_causal, planned_length(max(keys // max(sequences, 1), 1)))
    return Specialisation(padded, padded_v, is_causal, dtype == torch.bfloat16, True, tile, is_packed=True)


class Plan:
    """The forward of all packed calls with these shapes, strides, dtype and scale on one device.

    Raises KernelUnavailable when it is made, before anything is launched.
    """

    __slots__ = ("_config", "_device_index", "_frames", "_function", "_maps", "_params", "_schedule", "specialisation")

    def __init__(self, query, key, value, options: Options, extras: Extras, out, logsumexp):
        call = _PackedCall(query, key, value, options, extras, (query, key, value, out))
        query, key, value, out = (_as_rank_4(t) for t in (query, key, value, out))
        if not walkable(query, key, value) or not walkable(out, out, out):
            raise KernelUnavailable("the copy engine cannot walk tensors with such strides")
        index = self._device_index = query.device.index
        _, heads, total_q, head_dim = query.shape
        kv_heads, total_k, head_dim_v = key.size(1), *value.shape[2:]
        # As dense calls do: heads that are expanded are one.
        if key.stride(1) == 0 and value.stride(1) == 0:
            key, value = key[:, :1], value[:, :1]
            kv_heads = 1
        _, num_sms = _device(index)
        spec = self.specialisation = specialise(
            head_dim, head_dim_v, query.dtype, options.window_right == 0, keys=total_k, sequences=call.num_sequences
        )
        tile = spec.tile
        self._schedule = call.schedule(options, extras, tile.block_m, None)
        slots = self._schedule.query_slots
        num_tiles = slots * heads
        if num_tiles > tiles.MAX_BLOCKS:
            raise KernelUnavailable(f"{num_tiles} tiles are more than 32 bits count")
        try:
            self._function = ctypes.c_void_p(driver.load_function(spec.compile(), ENTRY, index, spec.shared_bytes))
            self._maps = [
                driver.TensorMaps(t.dtype, t.shape, t.stride(), rows, t.data_ptr(), index)
                for t, rows in ((query, tile.block_m), (key, tile.block_n), (value, tile.block_n), (out, tile.block_m))
            ]
        except (driver.DriverError, OSError) as error:
            raise KernelUnavailable(f"{ENTRY}: {error}") from error
        self._params = ForwardParams(
            out_stride_batch=0,
            out_stride_head=out.stride(1),
            out_stride_row=out.stride(2),
            batch=1,
            num_heads=heads,
            num_kv_heads=kv_heads,
            seqlen_q=total_q,
            seqlen_k=total_k,
            head_dim_v=head_dim_v,
            num_tiles=num_tiles,
            q_tiles=slots,
            heads_per_group=_heads_per_group(heads, heads // kv_heads, total_k, head_dim + head_dim_v),
            softmax_scale_log2=options.scale * _LOG2E,
        )
        self._config = driver.LaunchConfig(
            (min(num_sms, num_tiles), 1, 1), (tile.num_threads, 1, 1), spec.shared_bytes, None, None, 0
        )
        self._frames: list[driver.Frame] = []

    def __call__(self, query, key, value, extras: Extras, out, logsumexp) -> None:
        """Launch on the current stream of the tensors' device."""
        index = self._device_index
        if driver.current_device() != index:
            with torch.cuda.device(index):
                return self(query, key, value, extras, out, logsumexp)
        entries = self._schedule.make(extras)
        # These stay referenced until the driver has copied them.
        maps = [maps.get(t.data_ptr()) for maps, t in zip(self._maps, (query, key, value, out))]
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = driver.Frame([self._config], self._params, 4)
        for place, (address, _) in enumerate(maps):
            frame.pointers[place] = address
        params = frame.params
        params.out, params.logsumexp, params.entries = out.data_ptr(), logsumexp.data_ptr(), entries.data_ptr()
        stream = driver.current_stream(index)
        try:
            params.counters = driver.counters(index, stream)
            launch_counts[ENTRY] += 1
            driver.launch(frame.configs[0], self._function, frame.arguments, index, stream)
        except driver.DriverError as error:
            if error.is_refusal:
                raise KernelUnavailable(f"{ENTRY}: {error}") from error
            raise
        self._frames.append(frame)
        return None


def takes_backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, options: Options, extras: Extras,
                   logsumexp: Tensor, longest_q: int | None = None, longest_k: int | None = None) -> bool:  # fmt: skip
    """Does the Hopper kernel compute this backward? Not with a head_dim above 128, nor where the bits must repeat."""
    return (
        max(query.size(2), value.size(2)) <= 128
        and (longest_q or query.size(0)) * (query.size(1) // key.size(1)) <= dense_backward.MAX_SUM_ROWS
        and not torch.are_deterministic_algorithms_enabled()
        and logsumexp.stride(1) == 1
        and not grad_out.data_ptr() & 15
        and takes(query, key, value, options, extras, longest_k)
    )


class BackwardPlan:
    """The backward of all packed calls with these shapes, strides, dtype and scale on one device.

    Its workspace has room for whole tiles of every sequence, so that no two add to one place; and the schedule says
    where each begins. Raises KernelUnavailable when it is made, before anything is launched.
    """

    __slots__ = (
        "_configs", "_device_index", "_frames", "_functions", "_maps", "_params", "_schedule", "_statistics_floats",
        "_workspace_floats", "specialisation",
    )  # fmt: skip

    def __init__(self, grad_out, query, key, value, options, extras, out, logsumexp, grad_query, grad_key, grad_value):
        call = _PackedCall(query, key, value, options, extras, (query, key, value, out))
        query, key, value, out, grad_out, grad_key, grad_value = (
            _as_rank_4(t) for t in (query, key, value, out, grad_out, grad_key, grad_value)
        )
        if not dense_backward.suits(query, key, value, out, grad_out, grad_key, grad_value):
            raise KernelUnavailable("the copy engine cannot walk tensors with such strides")
        index = self._device_index = query.device.index
        _, heads, total_q, head_dim = query.shape
        kv_heads, total_k, head_dim_v = value.shape[1:]
        group = heads // kv_heads
        mean_rows = total_q // max(call.num_sequences, 1) * group
        spec = dense_backward.specialise(
            head_dim, head_dim_v, query.dtype, options.window_right == 0, False, mean_rows, is_packed=True
        )
        self.specialisation, tile = spec, spec.tile
        self._schedule = call.schedule(options, extras, tile.block_m, tile.block_n)
        q_slots, k_slots = self._schedule.query_slots, self._schedule.key_slots
        blocks, q_blocks = k_slots * kv_heads, q_slots * heads
        # How many query tiles of a head there may be: sequences begin at multiples of the alignment. Rows that see no
        # key, and with them those behind the last sequence, have no place.
        alignment = STATISTICS_ALIGNMENT.value
        assert alignment % tile.block_m == 0
        q_tiles = (total_q // alignment + call.num_sequences) * (alignment // tile.block_m)
        if max(heads * q_tiles, blocks) > tiles.MAX_BLOCKS:
            raise KernelUnavailable(f"{max(heads * q_tiles, blocks)} tiles are more than 32 bits count")
        # As in dense calls, the statistics lie where the query's gradient is written last.
        statistics = heads * q_tiles * 2 * tile.block_m
        fits = grad_query is not None and dense_backward.has_room(grad_query, statistics)
        self._statistics_floats = 0 if fits else statistics
        self._workspace_floats = self._statistics_floats + heads * q_tiles * tile.block_m * spec.head_dim
        try:
            binary = spec.compile()
            self._functions = [
                ctypes.c_void_p(driver.load_function(binary, entry, index, spec.shared_bytes if entry == MAIN else 0))
                for entry in dense_backward.ENTRIES
            ]
            rows = (tile.block_m, tile.block_n, tile.block_n, tile.block_m, tile.block_n, tile.block_n)
            self._maps = [
                driver.TensorMaps(t.dtype, t.shape, t.stride(), n, t.data_ptr(), index)
                for t, n in zip((query, key, value, grad_out, grad_key, grad_value), rows, strict=True)
            ]
        except (driver.DriverError, OSError) as error:
            raise KernelUnavailable(f"{MAIN}: {error}") from error
        strides = {}
        for name, tensor in (("out", out), ("grad_out", grad_out), ("grad_key", grad_key), ("grad_value", grad_value)):
            strides |= {f"{name}_stride_head": tensor.stride(1), f"{name}_stride_row": tensor.stride(2)}
        if grad_query is not None:
            strides |= {"grad_query_stride_head": grad_query.stride(1), "grad_query_stride_row": grad_query.stride(0)}
        _, num_sms = _device(index)
        head_bytes = total_q * group * (head_dim * 6 + head_dim_v * 2)
        self._params = BackwardParams(
            **strides,
            batch=1,
            num_heads=heads,
            num_kv_heads=kv_heads,
            seqlen_q=total_q,
            seqlen_k=total_k,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            logsumexp_pitch=logsumexp.stride(0),
            q_tiles=q_tiles,
            k_tiles=k_slots,
            heads_per_group=min(max(tiles.L2_BYTES // head_bytes, math.ceil(num_sms / k_slots)), kv_heads),
            softmax_scale=options.scale,
            softmax_scale_log2=options.scale * _LOG2E,
            q_slots=q_slots,
        )
        self._configs = [
            driver.LaunchConfig((q_blocks, 1, 1), (dense_backward._PREPARE_THREADS, 1, 1), 0, None, None, 0),
            driver.LaunchConfig((blocks, 1, 1), (spec.num_threads, 1, 1), spec.shared_bytes, None, None, 0),
            driver.LaunchConfig((q_blocks, 1, 1), (128 * tile.num_warpgroups, 1, 1), 0, None, None, 0),
        ]
        self._frames: list[driver.Frame] = []

    def __call__(self, grad_out, query, key, value, extras, out, logsumexp, grad_query, grad_key, grad_value) -> None:
        """Launch on the current stream of the tensors' device."""
        index = self._device_index
        if driver.current_device() != index:
            with torch.cuda.device(index):
                return self(grad_out, query, key, value, extras, out, logsumexp, grad_query, grad_key, grad_value)
        entries = self._schedule.make(extras)
        workspace = torch.empty(self._workspace_floats, dtype=torch.float32, device=query.device)
        # These stay referenced until the driver has copied them.
        tensors = query, key, value, grad_out, grad_key, grad_value
        maps = [maps.get(t.data_ptr()) for maps, t in zip(self._maps, tensors, strict=True)]
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = driver.Frame(self._configs, self._params, 6)
        for place, (address, _) in enumerate(maps):
            frame.pointers[place] = address
        params = frame.params
        params.out, params.grad_out, params.logsumexp = out.data_ptr(), grad_out.data_ptr(), logsumexp.data_ptr()
        params.grad_query = None if grad_query is None else grad_query.data_ptr()
        params.grad_key, params.grad_value = grad_key.data_ptr(), grad_value.data_ptr()
        params.entries = entries.data_ptr()
        params.statistics = workspace.data_ptr() if self._statistics_floats else params.grad_query
        params.sums = workspace.data_ptr() + 4 * self._statistics_floats
        stream = driver.current_stream(index)
        launches = zip(dense_backward.ENTRIES, self._functions, frame.configs,
                       (frame.only_params, frame.arguments, frame.only_params), strict=True)  # fmt: skip
        for entry, function, config, arguments in list(launches)[: 2 if grad_query is None else 3]:
            launch_counts[entry] += 1
            try:
                driver.launch(config, function, arguments, index, stream)
            except driver.DriverError as error:
                if error.is_refusal and entry == PREPARE:
                    raise KernelUnavailable(f"{entry}: {error}") from error
                raise
        self._frames.append(frame)
        return None


# A plan that cannot be made stays so: compiling is not tried again with every call.
_plans: dict[tuple, Plan | BackwardPlan | KernelUnavailable] = {}


def _find(key: tuple, make):
    plan = _plans.get(key)
    if plan is None:
        try:
            plan = make()
        except KernelUnavailable as error:
            plan = error
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    if isinstance(plan, KernelUnavailable):
        raise KernelUnavailable(str(plan))
    return plan


def forward(query: Tensor, key: Tensor, value: Tensor, options: Options, extras: Extras, out: Tensor,
            logsumexp: Tensor) -> None:  # fmt: skip
    """As ``kernels.triton.varlen.forward``, for calls that ``takes`` takes. logsumexp: contiguous.

    Raises KernelUnavailable before anything of out or logsumexp is written.
    """
    key_of_plan = (
        query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(), out.stride(), query.dtype,
        options, extras.signature(), query.get_device(),
    )  # fmt: skip
    plan = _find(key_of_plan, lambda: Plan(query, key, value, options, extras, out, logsumexp))
    plan(query, key, value, extras, out, logsumexp)


def backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, options: Options, extras: Extras, out: Tensor,
             logsumexp: Tensor, grad_query: Tensor | None, grad_key: Tensor, grad_value: Tensor) -> None:  # fmt: skip
    """As ``kernels.triton.varlen.backward``, for calls that ``takes_backward`` takes.

    Raises KernelUnavailable before anything is written.
    """
    tensors = grad_out, query, key, value, out, logsumexp, grad_query, grad_key, grad_value
    key_of_plan = (
        *((t.shape, t.stride(), t.data_ptr() & 15) if t is not None else None for t in tensors), query.dtype, options,
        extras.signature(), query.get_device(),
    )  # fmt: skip
    plan = _find(key_of_plan, lambda: BackwardPlan(grad_out, query, key, value, options, extras, *tensors[4:]))
    plan(grad_out, query, key, value, extras, *tensors[4:])


on_change(_plans.clear)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_plans.clear)
