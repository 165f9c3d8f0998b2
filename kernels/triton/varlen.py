"""From packed tensors to launches: variable-length attention, forward and backward, on Triton kernels.

May import torch and this folder. Imported by ``torch_flashbackend.varlen``. Tensors are [total, heads, head_dim], of
any strides; how the rows are cut into sequences stays on the GPU, in tensors that the host never reads, so that nothing
waits and a captured CUDA graph sees the lengths of each replay.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from ... import _torch
from . import varlen_backward as backward_kernels
from . import varlen_forward as forward_kernels
from . import varlen_schedule as schedule_kernels
from .attention import _Call
from .launch import Launch, device_target
from .tiles import Tile, choose
from .varlen_common import ENTRY as _ENTRY
from .varlen_common import STATISTICS_ALIGNMENT as _ALIGNMENT

_LOG2E = math.log2(math.e)
_MAX_PLANS = 4096
_NO_WINDOW = 2**30
# Up to here the longest tiles go first; finding the order takes time quadratic in the number of sequences.
_MOST_SORTED = 4096
# From here on a sequence's sums over queries are split (``varlen_backward.py``).
LONG_SUM_ROWS = 4 * backward_kernels.SUM_ROWS.value
_SCHEDULE = Tile(0, 0, 4, 1)
_CHUNK = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What a call is beside its tensors.

    window_left, window_right: how many keys before and after its own position a query sees, -1 for all. bottom_right:
    the last query's position is the last key's; otherwise the first's the first's. softcap 0.0: none. max_seqlen_q and
    max_seqlen_k: how long all sequences are where there is no cu_seqlens_q or cu_seqlens_k, otherwise a bound or 0.
    """

    scale: float
    window_left: int = -1
    window_right: int = -1
    bottom_right: bool = True
    softcap: float = 0.0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    allow_tf32: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Extras:
    """The small tensors of a call, each of which may be missing.

    cu_seqlens_q, cu_seqlens_k int32 or int64 [sequences + 1]: where the sequences begin and end; without, they are
    max_seqlen_q or max_seqlen_k long each. seqused_k int32 or int64 [sequences]: how many keys of each count.
    alibi_slopes float32 [heads] or [sequences, heads], last dimension dense. sinks [heads], dense.
    """

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None

    def signature(self) -> tuple:
        """What a plan depends on."""
        tensors = self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_k, self.alibi_slopes, self.sinks
        return tuple(None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors)

    def num_sequences(self, total_q: int, options: Options) -> int:
        """As the tensors' sizes say it."""
        for cu_seqlens in (self.cu_seqlens_q, self.cu_seqlens_k):
            if cu_seqlens is not None:
                return cu_seqlens.size(0) - 1
        return total_q // max(options.max_seqlen_q, 1)


class _PackedCall(_Call):
    """`_Call` for packed tensors: one batch, whose rows are all sequences' rows."""

    def __init__(self, query, key, value, options: Options, extras: Extras, tensors, target=None):
        views = [_as_rank_4(tensor) for tensor in tensors]
        super().__init__(_as_rank_4(query), _as_rank_4(key), _as_rank_4(value), None, 0.0, options.window_right >= 0,
                         options.scale, views, options.allow_tf32, target)
        self.total_q, self.total_k = query.size(0), key.size(0)
        self.num_sequences = extras.num_sequences(self.total_q, options)
        transformed = options.softcap > 0.0 or extras.alibi_slopes is not None
        self.transformed = transformed
        # transform_scores' units: see there.
        self.scores_scale = options.scale / options.softcap if options.softcap > 0.0 else options.scale * _LOG2E
        slopes = extras.alibi_slopes
        self.window = {
            "window_left": ("i32", min(options.window_left, _NO_WINDOW)),
            "window_right": ("i32", min(options.window_right, _NO_WINDOW)),
            "cap": ("fp32", options.softcap * _LOG2E),
            "slopes_pitch": ("i32", slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0),
            "group_size": ("i32", self.heads // self.kv_heads),
        }
        self.constants |= {
            "HAS_LEFT": options.window_left >= 0,
            "HAS_RIGHT": options.window_right >= 0,
            "BOTTOM_RIGHT": options.bottom_right,
            "SOFTCAP": options.softcap > 0.0,
            "ALIBI": slopes is not None,
        }

    def blocks_may_differ(self, tensors) -> bool:
        """As of dense calls, and none narrower than 64 columns: some tiles come by pointers here, maps or not."""
        return min(self.block_d, self.block_dv) >= 64 and super().blocks_may_differ(tensors)

    def facts(self, device, target) -> tuple[str, int, bool]:
        """As of dense calls, without tensor maps on sm_100: a third copy of the loop does not fit its memory."""
        family, multiprocessors, has_tma = super().facts(device, target)
        on_gpu = has_tma and (target is not None or device.type == "cuda")
        self.is_sm_100 = on_gpu and 100 <= (target or device_target(device)).arch < 110
        return family, multiprocessors, has_tma and not self.is_sm_100

    def strides(self, names: str, tensor: Tensor, prefix: str = "stride_") -> dict:
        """{stride_xh, stride_xm, stride_xd} of a packed tensor."""
        return dict(list(super().strides(f"{names.split()[0]}b {names}", _as_rank_4(tensor), prefix).items())[1:])

    def divisors(self, pointers: dict, strides: dict, mask_strides: dict) -> dict:
        found = super().divisors(pointers, strides, mask_strides)
        return {name: divisor for name, divisor in found.items() if name not in ("alibi_slopes", "sinks")}

    def tile(self, kernel: str) -> Tile:
        """As of dense calls; softcap and ALiBi want registers as masks do, where they bind."""
        if self.transformed and kernel == "backward_query":
            return choose(kernel, self.family, self.dtype.itemsize, self.head_dim_padded, "masked")
        tile = super().tile(kernel)
        if self.is_sm_100 and kernel == "backward_key_value" and self.head_dim_padded > 128:
            return dataclasses.replace(tile, num_stages=1)  # two do not fit without tensor maps
        return tile

    def slots(self, total: int, block: int) -> int:
        """How many tiles the schedule has room for (``varlen_schedule.py``)."""
        return total // block + self.num_sequences + 1

    def schedule(self, options: Options, extras: Extras, block_m: int, block_n: int | None) -> _Schedule:
        return _Schedule(self, options, extras, block_m, block_n)


class _Schedule:
    """The launch that writes the schedule: of tiles of block_m queries and, unless it is None, of block_n keys."""

    def __init__(self, call: _PackedCall, options: Options, extras: Extras, block_m: int, block_n: int | None):
        self.query_slots = call.slots(call.total_q, block_m)
        self.key_slots = 0 if block_n is None else call.slots(call.total_k, block_n)
        self._shape = (self.query_slots + self.key_slots, _ENTRY.value)
        self.entries = torch.empty(0, dtype=torch.int32, device=call.device)  # for the type's sake
        pointers = {"cu_seqlens_q": extras.cu_seqlens_q, "cu_seqlens_k": extras.cu_seqlens_k,
                    "seqused_k": extras.seqused_k, "entries": self.entries}
        counts = {"num_sequences": call.num_sequences, "seqlen_q": options.max_seqlen_q,
                  "seqlen_k": options.max_seqlen_k, "total_q": call.total_q, "total_k": call.total_k,
                  "query_slots": self.query_slots, "key_slots": self.key_slots}
        constants = {
            "BLOCK_M": block_m, "BLOCK_N": block_n or 1, "REVERSED": options.window_right >= 0,
            "SORTED": call.num_sequences <= _MOST_SORTED, "REGULAR_Q": extras.cu_seqlens_q is None,
            "REGULAR_K": extras.cu_seqlens_k is None, "SEQUSED": extras.seqused_k is not None, "CHUNK": _CHUNK,
        }
        programs = (call.num_sequences + 1) * (1 if block_n is None else 2)
        launch = Launch(schedule_kernels.varlen_schedule, programs, pointers,
                        {name: ("i32", count) for name, count in counts.items()}, constants, {"entries": 16}, _SCHEDULE,
                        {})
        self.launch = launch if call.target is not None else launch.load(call.device)

    def make(self, extras: Extras) -> Tensor:
        entries = torch.empty(self._shape, dtype=torch.int32, device=self.entries.device)
        self.launch(extras.cu_seqlens_q, extras.cu_seqlens_k, extras.seqused_k, entries)
        return entries


class _ForwardPlan:
    """The launches of one forward: the schedule, then the attention."""

    def __init__(self, query, key, value, options: Options, extras: Extras, out, logsumexp, target=None):
        call = _PackedCall(query, key, value, options, extras, (query, key, value, out), target)
        tile = call.tile("forward")
        self.schedule = call.schedule(options, extras, tile.block_m, None)
        # The kernel takes the maximum before it scales, so the sign goes into the query; a zero scale likewise.
        factor, scale = 1, call.scores_scale
        if not call.transformed:
            factor = (scale > 0) - (scale < 0)
            scale = abs(scale) if factor else 1.0
        pointers = {"query": query, "key": key, "value": value, "entries": self.schedule.entries,
                    "alibi_slopes": extras.alibi_slopes, "sinks": extras.sinks, "out": out,
                    "logsumexp": logsumexp}
        strides = (call.strides("qh qm qd", query) | call.strides("kh kn kd", key) | call.strides("vh vn vd", value)
                   | call.strides("oh om od", out))
        scalars = call.window | {"slots": ("i32", self.schedule.query_slots), "scale": ("fp32", scale),
                                 "logsumexp_pitch": ("i64", logsumexp.stride(0))}
        names = {"SINKS": extras.sinks is not None, "QUERY_FACTOR": factor}
        self.attention = _launch(
            call, forward_kernels.varlen_forward, self.schedule.query_slots * call.heads, tile, pointers, strides,
            scalars, names, {"key": (tile.block_n, call.block_d), "value": (tile.block_n, call.block_dv)},
        )

    @property
    def launches(self) -> list[Launch]:
        """In the order in which they run."""
        return [self.schedule.launch, self.attention]


class _BackwardPlan:
    """The launches of one backward: the schedule, dQ (always, it leaves the row statistics), then dK and dV."""

    def __init__(self, query, key, value, options: Options, extras: Extras, out, logsumexp, grad_out, grad_query,
                 grad_key, grad_value, target=None):
        tensors = [t for t in (query, key, value, out, grad_out, grad_query, grad_key, grad_value) if t is not None]
        call = _PackedCall(query, key, value, options, extras, tensors, target)
        query_tile = call.tile("backward_query")
        key_tile = None if grad_key is None else call.tile("backward_key_value")
        # Tiles of queries leave statistics for whole tiles of the other kernel.
        assert key_tile is None or query_tile.block_m % key_tile.block_m == 0
        assert _ALIGNMENT.value % query_tile.block_m == 0
        self.schedule = call.schedule(
            options, extras, query_tile.block_m, None if key_tile is None else key_tile.block_n
        )
        self.pitch = (call.total_q // _ALIGNMENT.value + call.num_sequences + 1) * _ALIGNMENT.value
        self.heads = call.heads
        plane = call.heads * self.pitch
        statistics = torch.empty(0, dtype=torch.float32, device=call.device)  # for the type's sake
        slopes = extras.alibi_slopes
        inputs = {"query": query, "key": key, "value": value, "entries": self.schedule.entries, "alibi_slopes": slopes}
        strides = (call.strides("qh qm qd", query) | call.strides("kh kn kd", key) | call.strides("vh vn vd", value)
                   | call.strides("gh gm gd", grad_out))
        scalars = call.window | {"pitch": ("i64", self.pitch), "plane": ("i64", plane)}
        scalars |= {"scale": ("fp32", call.scores_scale), "out_scale": ("fp32", options.scale)}
        pointers = inputs | {"out": out, "logsumexp": logsumexp, "grad_out": grad_out, "statistics": statistics,
                             "grad_query": grad_query}
        query_strides = strides | call.strides("oh om od", out)
        query_strides |= call.strides("dqh dqm dqd", query if grad_query is None else grad_query)
        slots = self.schedule.query_slots
        self.query = _launch(
            call, backward_kernels.varlen_backward_query, slots * call.heads, query_tile, pointers, query_strides,
            scalars | {"slots": ("i32", slots), "logsumexp_pitch": ("i64", logsumexp.stride(0))},
            {"ONLY_DELTA": grad_query is None},
            {"key": (query_tile.block_n, call.block_d), "value": (query_tile.block_n, call.block_dv)},
        )
        self.key_value = None
        if key_tile is not None:
            pointers = inputs | {"statistics": statistics, "grad_out": grad_out, "grad_key": grad_key,
                                 "grad_value": grad_value}
            key_strides = strides | call.strides("dkh dkn dkd", grad_key) | call.strides("dvh dvn dvd", grad_value)
            key_slots = self.schedule.key_slots
            rows = min(options.max_seqlen_q or call.total_q, call.total_q) * (call.heads // call.kv_heads)
            self.key_value = _launch(
                call, backward_kernels.varlen_backward_key_value, key_slots * call.kv_heads, key_tile, pointers,
                key_strides, scalars | {"slots": ("i32", key_slots), "first_slot": ("i32", slots)},
                {"LONG_SUM": rows > LONG_SUM_ROWS},
                {"query": (key_tile.block_m, call.block_d), "grad_out": (key_tile.block_m, call.block_dv)},
                torch.empty((1, 2, call.heads, self.pitch), device="meta"),
            )

    @property
    def launches(self) -> list[Launch]:
        """In the order in which they run."""
        launches = [self.schedule.launch, self.query, self.key_value]
        return [launch for launch in launches if launch is not None]


def _launch(call: _PackedCall, kernel, programs, tile, pointers, strides, scalars, names, streamed,
            rows_of_statistics=None) -> Launch:
    """`_Call.launch` for packed tensors: those that the kernel's loop walks are described by tensor maps of rank 4."""
    ranked = {name: _as_rank_4(t) if name in streamed else t for name, t in pointers.items()}
    used = {name: stride for name, stride in strides.items() if name in kernel.arg_names}
    return call.launch(kernel, programs, tile, ranked, used, {}, scalars, names, streamed, rows_of_statistics)


def _as_rank_4(tensor: Tensor) -> Tensor:
    """[total, heads, head_dim] as [1, heads, total, head_dim]."""
    return tensor if tensor.dim() == 4 else tensor.transpose(0, 1).unsqueeze(0)


_plans: dict[tuple, _ForwardPlan | _BackwardPlan] = {}


def _find(tensors: tuple, rest: tuple, make):
    key = (*((t.shape, t.stride(), t.dtype, t.data_ptr() & 15) for t in tensors), *rest, tensors[0].device)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = make()
    return plan


def forward(query: Tensor, key: Tensor, value: Tensor, options: Options, extras: Extras, out: Tensor,
            logsumexp: Tensor) -> None:
    """Fill out [total_q, H, Dv] (any strides) and logsumexp float32 [H, total_q] (rows dense, -inf: no key seen).

    query [total_q, H, D], key [total_k, Hkv, D], value [total_k, Hkv, Dv] of one dtype (float16, bfloat16, float32).
    Rows behind the last sequence get zeros. Raises KernelUnavailable before anything is launched.
    """
    rest = (options, extras.signature(), logsumexp.stride(0))
    plan = _find((query, key, value, out), rest, lambda: _ForwardPlan(
        query, key, value, options, extras, out, logsumexp))
    entries = plan.schedule.make(extras)
    plan.attention(query, key, value, entries, extras.alibi_slopes, extras.sinks, out, logsumexp)


def backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, options: Options, extras: Extras, out: Tensor,
             logsumexp: Tensor, grad_query: Tensor | None, grad_key: Tensor | None,
             grad_value: Tensor | None) -> Tensor | None:
    """Fill grad_query, grad_key, grad_value (None: not needed; key and value together); the sinks' gradient, if any.

    Arguments as in ``forward``; logsumexp may mark rows that see no key by +inf as well. The sinks' gradient is float32
    [H].
    """
    tensors = [query, key, value, out, grad_out]
    tensors += [grad for grad in (grad_query, grad_key, grad_value) if grad is not None]
    rest = (options, extras.signature(), logsumexp.stride(0), grad_query is None, grad_key is None)
    plan = _find(tuple(tensors), rest, lambda: _BackwardPlan(
        query, key, value, options, extras, out, logsumexp, grad_out, grad_query, grad_key, grad_value))
    shape = (2, plan.heads, plan.pitch)
    if extras.sinks is None:
        statistics = _torch.empty_float32(query, shape, (plan.heads * plan.pitch, plan.pitch, 1))
    else:
        statistics = torch.zeros(shape, dtype=torch.float32, device=query.device)  # summed up below, gaps included
    entries = plan.schedule.make(extras)
    plan.query(query, key, value, entries, extras.alibi_slopes, out, logsumexp, grad_out, statistics, grad_query)
    if plan.key_value is not None:
        plan.key_value(
            query, key, value, entries, extras.alibi_slopes, statistics, grad_out, grad_key, grad_value
        )
    if extras.sinks is None:
        return None
    # A sink's probability in each row times what its value (0) falls short of the row's.
    high, delta = statistics
    return -(torch.exp2(extras.sinks.float().unsqueeze(1) * _LOG2E - high) * delta).sum(1)


def compile_for(target, query, key, value, *, options: Options | None = None, extras: Extras | None = None,
                backward=True, only=None) -> dict:
    """Compile what a call would launch on a target, without such a GPU: {name: kernel}, like ``attention``'s."""
    options = options or Options(scale=1.0)
    extras = extras or Extras(*(torch.zeros(3, dtype=torch.int32) for _ in range(2)))
    out = torch.empty((*query.shape[:2], value.size(2)), dtype=query.dtype)
    logsumexp = torch.empty((query.size(1), query.size(0)))
    launches = _ForwardPlan(query, key, value, options, extras, out, logsumexp, target).launches
    if backward:
        grads = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
        plan = _BackwardPlan(query, key, value, options, extras, out, logsumexp, torch.empty_like(out), *grads, target)
        launches += plan.launches
    return {launch.name: launch.compile(target) for launch in launches if only in (None, launch.name)}
