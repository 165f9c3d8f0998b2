"""Packed sequences of different lengths on the Hopper forward kernel, ``forward.cu``.

May import torch, ``driver.py``, this folder, and the schedule of ``kernels/triton/varlen.py``: a list of query tiles
that a small kernel writes on the GPU, where the lengths are. Imported by ``torch_flashbackend.varlen``. What it does
not take (see ``takes``) is Triton's.
"""

from __future__ import annotations

import ctypes
import math
import os

import torch
from torch import Tensor

from ... import driver
from .. import KernelUnavailable, launch_counts
from ..triton.varlen import Extras, Options, _as_rank_4, _PackedCall
from . import tiles
from .forward import (
    _LOG2E,
    _MAX_TILES,
    ENTRY,
    MAX_HEAD_DIM,
    MAX_SEQLEN_K,
    ForwardParams,
    Specialisation,
    _device,
    _Frame,
    _heads_per_group,
    _round_up,
    walkable,
)

_MAX_PLANS = 4096


def takes(query: Tensor, key: Tensor, value: Tensor, options: Options, extras: Extras) -> bool:
    """Does the Hopper kernel compute this call? Routing for packed sequences, by shapes and types alone.

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
        or key.size(0) > MAX_SEQLEN_K
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
    head_dim: int, head_dim_v: int, dtype: torch.dtype, is_causal: bool, *, rows: int, keys: int, sequences: int,
    heads: int, num_sms: int,
) -> Specialisation:  # fmt: skip
    """The specialisation for packed tensors of so many rows, keys and sequences: tiles as for their mean length."""
    padded, padded_v = _round_up(head_dim, 16), _round_up(head_dim_v, 16)
    mean_q, mean_k = max(rows // max(sequences, 1), 1), max(keys // max(sequences, 1), 1)
    tile = tiles.choose(padded, padded_v, is_causal, mean_q, mean_k, sequences * heads, num_sms)
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
            head_dim, head_dim_v, query.dtype, options.window_right == 0, rows=total_q, keys=total_k,
            sequences=call.num_sequences, heads=heads, num_sms=num_sms,
        )  # fmt: skip
        tile = spec.tile
        self._schedule = call.schedule(options, extras, tile.block_m, None)
        slots = self._schedule.query_slots
        num_tiles = slots * heads
        if num_tiles > _MAX_TILES:
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
        self._frames: list[_Frame] = []

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
            frame = _Frame(self._config, self._params)
        for place, (address, _) in enumerate(maps):
            frame.pointers[place] = address
        params = frame.params
        params.out, params.logsumexp, params.entries = out.data_ptr(), logsumexp.data_ptr(), entries.data_ptr()
        stream = driver.current_stream(index)
        try:
            params.counters = driver.counters(index, stream)
            launch_counts[ENTRY] += 1
            driver.launch(frame.config, self._function, frame.arguments, index, stream)
        except driver.DriverError as error:
            if error.is_refusal:
                raise KernelUnavailable(f"{ENTRY}: {error}") from error
            raise
        self._frames.append(frame)
        return None


_plans: dict[tuple, Plan | KernelUnavailable] = {}


def forward(query: Tensor, key: Tensor, value: Tensor, options: Options, extras: Extras, out: Tensor,
            logsumexp: Tensor) -> None:  # fmt: skip
    """As ``kernels.triton.varlen.forward``, for calls that ``takes`` takes. logsumexp: contiguous.

    Raises KernelUnavailable before anything of out or logsumexp is written.
    """
    key_of_plan = (
        query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(), out.stride(), query.dtype,
        options, extras.signature(), query.get_device(),
    )  # fmt: skip
    plan = _plans.get(key_of_plan)
    if plan is None:
        try:
            plan = Plan(query, key, value, options, extras, out, logsumexp)
        except KernelUnavailable as error:
            plan = error
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key_of_plan] = plan
    if isinstance(plan, KernelUnavailable):
        raise KernelUnavailable(str(plan))
    plan(query, key, value, extras, out, logsumexp)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_plans.clear)
