"""From tensors to launches: the forward and the backward of attention on Triton kernels.

May import torch, this folder and the plugin's ``_torch.py``, ``plans.py`` and ``batch_invariance.py``. Imported by
``torch_flashbackend.ops``. Everything here is rank 4, [B, H, S, D], with all sizes positive; masks are [B or 1, H or 1,
seqlen_q or 1, seqlen_k or 1], never expanded in memory.

What a call needs beside its pointers is worked out once and kept in a plan, keyed by everything that it depends on.
"""

from __future__ import annotations

import functools
import math

import torch

from ... import _torch
from ...batch_invariance import on_change
from ...plans import Plans
from ..mask_strides import strides_of
from . import backward as backward_kernels
from . import backward_wide as wide_kernels
from . import dropout as dropout_kernels
from . import forward as forward_kernels
from . import prepared
from .common import DROPOUT_PITCH
from .common import MASK_BOOL as _BOOL
from .common import MASK_FLOAT as _FLOAT
from .common import MASK_NONE as _NONE
from .decode_plan import DecodePlan, suits
from .launch import Launch, TensorMap, device_target
from .mask_plan import MaskTiles, worth_listing
from .stored_plan import StoredPlan, fits
from .tiles import Tile, choose, family

MASK_NONE, MASK_BOOL, MASK_FLOAT = _NONE.value, _BOOL.value, _FLOAT.value
_LOG2E = math.log2(math.e)
# Tensor cores cut off what they add up instead of rounding it. After as many rows that error is a tenth of bfloat16's
# rounding, so longer sums are added up in parts; sums of up to four parts stay whole. A multiple of every tile.
SUM_ROWS = 2**16


_plans = Plans()
on_change(_plans.clear)


@functools.cache
def _device_facts(device: torch.device) -> tuple[str, int, bool]:
    """(tile family, number of multiprocessors, has a tensor copy engine)."""
    if device.type != "cuda":
        return "sm_90", 4, True  # the interpreter
    family_name, _, has_tma = _target_facts(device_target(device))
    return family_name, torch.cuda.get_device_properties(device).multi_processor_count, has_tma


def _target_facts(target) -> tuple[str, int, bool]:
    return family(target.backend, target.arch), 132, target.backend == "cuda" and target.arch >= 90


def _rows_of_a_sum(rows: int) -> int:
    """How many of so many keys or queries are added up at a time; 0: all of them."""
    return SUM_ROWS if rows > 4 * SUM_ROWS else 0


def _padded(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


class _Call:
    """The launch arguments that all kernels of one call share: shapes, strides, mask, dropout, scale."""

    def __init__(self, query, key, value, mask, dropout_p, is_causal, scale, tensors, allow_tf32, target=None):
        batch, heads, seqlen_q, head_dim = query.shape
        head_dim_v = value.size(3)
        self.device = query.device
        self.target = target
        self.family, self.multiprocessors, self.has_tma = self.facts(query.device, target)
        self.dtype = query.dtype
        self.batch, self.heads, self.seqlen_q, self.seqlen_k = batch, heads, seqlen_q, key.size(2)
        self.kv_heads = key.size(1)
        self.is_causal = is_causal
        self.block_d, self.block_dv = _padded(head_dim), _padded(head_dim_v)
        self.head_dim_padded = max(self.block_d, self.block_dv)
        if not self.blocks_may_differ(tensors):
            self.block_d = self.block_dv = self.head_dim_padded
        self.mask_kind = MASK_NONE if mask is None else MASK_BOOL if mask.dtype == torch.bool else MASK_FLOAT
        self.scale = scale
        # The kernels that need only probabilities fold log2(e) into the scale; a float mask needs natural units.
        self.kernel_scale = scale if self.mask_kind == MASK_FLOAT else scale * _LOG2E
        itemsize = query.element_size()
        per_vector = 16 // itemsize
        self.unit_stride = all(tensor.stride(3) == 1 for tensor in tensors)
        strides = [stride for tensor in tensors for stride in tensor.stride()[:3]]
        aligned = self.unit_stride and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        self.divisor = next((d for d in (16, per_vector) if aligned and all(s % d == 0 for s in strides)), 1)
        # A tile's offsets are 32 bits wide where they fit: at most 512 rows and 512 columns from its origin.
        self.offset_type = "i32" if all(s < 2**21 for tensor in tensors for s in tensor.stride()[2:]) else "i64"

        self.mask_strides, self.mask_divisor, self.mask_offset_type = (0, 0, 0, 0), 1, "i32"
        if mask is not None:
            self.mask_strides = strides_of(mask, (batch, heads, seqlen_q, self.seqlen_k))
            if mask.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in self.mask_strides[:3]):
                self.mask_divisor = 16
            # Rows and keys of the mask are counted from the start of the sequence, so the whole extent must fit.
            extent = self.mask_strides[2] * (seqlen_q - 1) + self.mask_strides[3] * (self.seqlen_k - 1)
            self.mask_offset_type = "i32" if extent < 2**31 else "i64"

        self.listed = mask is not None and self.worth_listing(query, mask)
        # Tiles of the mask come by tensor maps too, with the sizes that it has in memory; a row for all queries or a
        # column for all keys does not.
        self.mask_can_be_mapped = False
        if mask is not None and self.mask_strides[2] != 0 and self.mask_strides[3] != 0:
            self.unexpanded_mask = mask[tuple(slice(None if stride else 1) for stride in self.mask_strides[:2])]
            self.mask_can_be_mapped = TensorMap.accepts(self.unexpanded_mask)
        self.constants = {
            "HEAD_DIM": head_dim,
            "HEAD_DIM_V": head_dim_v,
            "BLOCK_D": self.block_d,
            "BLOCK_DV": self.block_dv,
            "MASK": self.mask_kind,
            "MASK_PER_KEY": self.mask_strides[2] == 0,
            "MASK_UNIT_STRIDE": self.mask_strides[3] == 1,
            "LISTED": self.listed,
            "DROPOUT": dropout_p > 0.0,
            "UNIT_STRIDE": self.unit_stride,
            "PRECISION": self.precision(allow_tf32),
            "CAUSAL": is_causal,
        }
        self.dropout = {
            "dropout_threshold": ("u32", min(round(dropout_p * 2**16), 2**16 - 1) << 16),
            "dropout_scale": ("fp32", 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0),
        }
        self.sizes = {
            "num_heads": ("i32", heads),
            "group_size": ("i32", heads // self.kv_heads),
            "seqlen_q": ("i32", seqlen_q),
            "seqlen_k": ("i32", self.seqlen_k),
        }

    def facts(self, device, target) -> tuple[str, int, bool]:
        """(tile family, number of multiprocessors, may tensor maps be used) of a device, or of a target."""
        return _device_facts(device) if target is None else _target_facts(target)

    def blocks_may_differ(self, tensors) -> bool:
        """May the blocks of head_dim and of the value's head_dim have different sizes?

        Triton 3.6 on sm_90, loading by pointers, gives wrong results and illegal addresses for a value block of 32
        columns beside a key block of 64; equal blocks are right for every size.
        """
        return self.has_tma and self.dtype.itemsize == 2 and all(TensorMap.accepts(tensor) for tensor in tensors)

    def worth_listing(self, query, mask) -> bool:
        shape = [size if stride else 1 for size, stride in zip(mask.shape, self.mask_strides)]
        return worth_listing(query.shape, self.seqlen_k, shape, self.is_causal)

    def precision(self, allow_tf32: bool) -> str:
        """How the products of float32 tensors are computed; half types have one way only."""
        if self.family == "gfx942":
            return "ieee"  # Triton knows TF32 on one of AMD's GPUs only, and no three-product form
        if self.dtype.itemsize == 2 or allow_tf32:
            return "tf32"
        # Three TF32 products give float32's accuracy, but tensor cores cut off what they add up instead of rounding it,
        # and that error grows with the length of the sum: above 256 it would show.
        return "ieee" if self.head_dim_padded > 256 else "tf32x3"

    def split_products(self) -> None:
        """Let float32 tensors' products be of float16 halves where that is faster; only some kernels can do that.

        Measured on sm_90 alone, where float16 has twice the rate of TF32. ``common.split_rows`` says how.
        """
        if self.family == "sm_90" and self.head_dim_padded <= 128 and self.constants["PRECISION"] == "tf32x3":
            self.constants["PRECISION"] = "fp16x3"

    def strides(self, names: str, tensor: torch.Tensor, prefix: str = "stride_") -> dict:
        """{stride_xb: ..., ...} of a rank-4 tensor; batch and head strides are always 64 bits wide."""
        b, h, row, column = (f"{prefix}{name}" for name in names.split())
        values = tensor.stride()
        wide, narrow = "i64", self.offset_type
        return {b: (wide, values[0]), h: (wide, values[1]), row: (narrow, values[2]), column: (narrow, values[3])}

    def strides_of_mask(self) -> dict:
        b, h, q, k = self.mask_strides
        narrow = self.mask_offset_type
        steps = {"mask_batch_step": ("i32", int(b != 0)), "mask_head_step": ("i32", int(h != 0))}
        strides = {"stride_mb": ("i64", b), "stride_mh": ("i64", h), "stride_mq": (narrow, q), "stride_mk": (narrow, k)}
        return strides | steps

    def list_strides(self, mask_tiles, of_queries: bool = False) -> dict:
        """How far lists of blocks are apart; with none, any numbers will do."""
        values = (0, 0, 0, 0) if mask_tiles is None else mask_tiles.strides(of_queries)
        names = ("stride_lb", "stride_lh", "stride_lt", "lists_offset")
        return {name: ("i64", value) for name, value in zip(names, values, strict=True)}

    def divisors(self, pointers: dict, strides: dict, mask_strides: dict) -> dict:
        """What the compiler may assume; all strides of a group share one divisor, so that few variants are compiled."""
        found = {}
        if self.divisor > 1:
            rows = [name for name in strides if not name.endswith("d")]
            found |= dict.fromkeys(rows, self.divisor)
            others = ("mask", "mask_tiles", "grad_mask", "logsumexp", "logsumexp_low")
            found |= {name: 16 for name in pointers if name not in others}
        if self.mask_divisor > 1:
            found |= dict.fromkeys(("stride_mb", "stride_mh", "stride_mq"), 16)
            found |= {"mask": 16} if "mask" in pointers else {}
        absent = {name for name, tensor in pointers.items() if tensor is None}
        return {name: value for name, value in found.items() if name not in absent}

    def tile(self, kernel: str):
        """The tile of one kernel for this call."""
        if self.constants["PRECISION"] == "fp16x3":
            return choose(kernel, self.family, self.dtype.itemsize, self.head_dim_padded, "split")
        kind = "masked" if self.mask_kind != MASK_NONE else "causal" if self.is_causal else "full"
        return choose(kernel, self.family, self.dtype.itemsize, self.head_dim_padded, kind)

    def launch(self, kernel, programs, tile, pointers, strides, mask_strides, scalars, names, streamed=None,
               rows_of_statistics=None, whole_mask=True):
        """streamed: {name: (rows, columns) of its tiles} for the tensors that the kernel's loop walks."""
        order = kernel.arg_names
        every_scalar = strides | mask_strides | scalars
        maps = {}
        precision = names.get("PRECISION", self.constants["PRECISION"])
        can_map = streamed and self.has_tma and (self.dtype.itemsize == 2 or precision == "fp16x3")
        if can_map and all(TensorMap.accepts(pointers[name]) for name in streamed):
            maps = {name: TensorMap(pointers[name], *block) for name, block in streamed.items()}
        constants = self.constants | {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "TMA": bool(maps)} | names
        constants["MASK_TMA"] = bool(maps) and self.mask_can_be_mapped and whole_mask
        if maps and rows_of_statistics is not None:
            maps["statistics"] = TensorMap(rows_of_statistics, 1, tile.block_m)
        if constants["MASK_TMA"]:
            maps["mask"] = TensorMap(self.unexpanded_mask, tile.block_m, tile.block_n)
        launch = Launch(
            kernel,
            programs,
            pointers,
            {name: every_scalar[name] for name in order if name in every_scalar},
            {name: constants[name] for name in order if name in constants},
            self.divisors({name: t for name, t in pointers.items() if name not in maps}, strides, mask_strides),
            tile,
            maps,
        )
        return launch if self.target is not None else launch.load(self.device)


class _DropoutKeys:
    """The table of random keys that the kernels of one forward or backward read, and the launch that fills it."""

    def __init__(self, call: _Call, query, seed):
        pitch, block = DROPOUT_PITCH.value, 256
        width = sum(math.ceil(length / pitch) * pitch for length in (call.seqlen_q, call.seqlen_k))
        self._shape = (call.batch * call.heads, width)
        # Its type is all that matters of a buffer here; each call brings its own.
        self.table = torch.empty(0, dtype=torch.int32, device=query.device)
        sizes = {name: call.sizes[name] for name in ("seqlen_q", "seqlen_k")}
        self.launch = Launch(
            dropout_kernels.dropout_keys, self._shape[0] * width // block, {"dropout_seed": seed, "keys": self.table},
            sizes, {"BLOCK": block}, {"keys": 16}, Tile(1, block, 4, 1), {},
        )  # fmt: skip
        if call.target is None:
            self.launch.load(call.device)

    def make(self, seed) -> torch.Tensor:
        """The keys of this seed: int32 [B * H, rows + columns]."""
        table = torch.empty(self._shape, dtype=torch.int32, device=seed.device)
        self.launch(seed, table)
        return table


def keys_are_wide(call: _Call, tensors) -> bool:
    """Do the kernels of backward_wide.py or backward_stored.py compute the gradients of keys and values?"""
    return (
        call.family == "sm_90" and call.block_d == 512 and call.constants["HEAD_DIM"] == call.constants["HEAD_DIM_V"]
        and call.mask_kind == MASK_NONE and not call.constants["DROPOUT"] and call.dtype.itemsize == 2 and call.has_tma
        and all(TensorMap.accepts(tensor) for tensor in tensors)
        and _rows_of_a_sum(call.seqlen_q * (call.heads // call.kv_heads)) == 0
    )  # fmt: skip


def scores_are_stored(call: _Call) -> bool:
    """Of the calls whose keys are wide, those whose probabilities the kernels of backward_stored.py keep in memory."""
    return _rows_of_a_sum(call.seqlen_k) == 0 and fits(call)


def value_parts_of(call: _Call, tensors) -> int:
    """How many programs share the columns of a tile of out: an accumulator of 512 columns takes two warpgroups, of
    which Triton has both compute all scores of 64 rows, and leaves no room for two programs on a multiprocessor.
    """
    mapped = call.has_tma and call.dtype.itemsize == 2 and all(TensorMap.accepts(tensor) for tensor in tensors)
    wide = call.family == "sm_90" and call.constants["HEAD_DIM_V"] == 512 and call.mask_kind == MASK_NONE
    return 2 if mapped and wide else 1


class _ForwardPlan:
    """The launches of one forward: where the mask's tiles are listed, the kernels that do so, then the attention."""

    def __init__(self, query, key, value, mask, seed, dropout_p, is_causal, scale, out, logsumexp, allow_tf32,
                 target=None):
        tensors = query, key, value, out
        call = _Call(query, key, value, mask, dropout_p, is_causal, scale, tensors, allow_tf32, target)
        call.split_products()
        value_parts = value_parts_of(call, tensors)
        tile = call.tile("forward" if value_parts == 1 else "wide_forward")
        # The kernel takes the maximum before it scales, so the sign goes into the query; a zero scale likewise.
        factor = (scale > 0) - (scale < 0)
        kernel_scale = abs(call.kernel_scale) if factor else 1.0
        low = logsumexp if logsumexp is not None and call.mask_kind == MASK_FLOAT else None
        self.mask_tiles = MaskTiles(call, mask, tile) if call.listed else None
        lists = self.mask_tiles.buffer if call.listed else None
        self.dropout_keys = _DropoutKeys(call, query, seed) if dropout_p > 0.0 else None
        keys = self.dropout_keys.table if dropout_p > 0.0 else None
        pointers = {"query": query, "key": key, "value": value, "mask": mask, "mask_tiles": lists, "dropout_keys": keys,
                    "out": out, "logsumexp": logsumexp, "logsumexp_low": low}
        strides = (call.strides("qb qh qm qd", query) | call.strides("kb kh kn kd", key)
                   | call.strides("vb vh vn vd", value) | call.strides("ob oh om od", out))
        scalars = call.sizes | {"scale": ("fp32", kernel_scale)} | call.dropout | call.list_strides(self.mask_tiles)
        names = {"STORE_LOGSUMEXP": logsumexp is not None, "QUERY_FACTOR": factor}
        names["BOUND_KEYS"] = call.seqlen_k % tile.block_n != 0
        names["SUM_ROWS"] = _rows_of_a_sum(call.seqlen_k)
        block_dv = call.block_dv // value_parts
        names |= {"VALUE_PARTS": value_parts, "BLOCK_DV": block_dv}
        programs = math.ceil(call.seqlen_q / tile.block_m) * call.batch * call.heads * value_parts
        self.attention = call.launch(
            forward_kernels.attention_forward, programs, tile, pointers, strides, call.strides_of_mask(), scalars,
            names, {"key": (tile.block_n, call.block_d), "value": (tile.block_n, block_dv)},
        )

    @property
    def launches(self) -> list[Launch]:
        """In the order in which they run."""
        return [*_launches_before(self), self.attention]

    def __call__(self, query, key, value, out, logsumexp, mask=None, seed=None) -> None:
        """Fill out and logsumexp; all tensors like those that the plan was made for."""
        lists = None if self.mask_tiles is None else self.mask_tiles.make(mask)
        keys = None if self.dropout_keys is None else self.dropout_keys.make(seed)
        self.attention(query, key, value, mask, lists, keys, out, logsumexp, _low_part(logsumexp))

    def prepared(self, of_out, of_logsumexp, query, otherwise):
        """``prepared.forward`` of a call without dropout; None of one that is interpreted."""
        if self.attention.is_interpreted or self.dropout_keys is not None:
            return None
        lists_of = None if self.mask_tiles is None else self.mask_tiles.make
        return prepared.forward(self.attention, lists_of, of_out, of_logsumexp, query, otherwise)


def forward(query, key, value, mask, dropout_seed, dropout_p, is_causal, scale, out, logsumexp, allow_tf32) -> None:
    """Fill out [B, H, seqlen_q, Dv] (any strides) and, unless it is None, logsumexp.

    query [B, H, seqlen_q, D], key [B, Hkv, seqlen_k, D], value [B, Hkv, seqlen_k, Dv] of one dtype (float16, bfloat16,
    float32) with any strides; mask None, bool, float32 or query's dtype; dropout_seed int64 [1] where dropout_p > 0;
    logsumexp float32, contiguous, [B, H, seqlen_q], or [2, B, H, seqlen_q] with a float mask (value and what rounding
    cut off it). Raises KernelUnavailable before anything is launched.
    """
    plan = plan_of_forward(
        query, key, value, mask, dropout_seed, dropout_p, is_causal, scale, out, logsumexp, allow_tf32
    )  # fmt: skip
    if type(plan) is DecodePlan:
        plan(query, key, value, out, logsumexp, mask)
    else:
        plan(query, key, value, out, logsumexp, mask, dropout_seed)


def plan_of_forward(query, key, value, mask, dropout_seed, dropout_p, is_causal, scale, out, logsumexp, allow_tf32):
    """What ``forward`` runs: a function of query, key, value, out, logsumexp and, where there are any, mask and seed.

    Raises KernelUnavailable.
    """
    tensors = (query, key, value, out) if mask is None else (query, key, value, out, mask)
    rest = (mask is None, dropout_p, is_causal, scale, logsumexp is None, allow_tf32)
    plan = _plans.find(rest, tensors)
    if plan is None:
        plan = _plans.look_up(rest, tensors, lambda: _make_plan_of_forward(
            query, key, value, mask, dropout_seed, dropout_p, is_causal, scale, out, logsumexp, allow_tf32))
    return plan


def _make_plan_of_forward(query, key, value, mask, seed, dropout_p, is_causal, scale, out, logsumexp, allow_tf32,
                          target=None):
    """Of a few queries that nobody differentiates, the kernel that splits the keys; otherwise the one of all sizes."""
    if logsumexp is None and dropout_p == 0.0 and suits(query, value):
        call = _Call(query, key, value, mask, 0.0, is_causal, scale, (query, key, value, out), allow_tf32, target)
        return DecodePlan(call, query, key, value, mask, scale, out, None)
    return _ForwardPlan(query, key, value, mask, seed, dropout_p, is_causal, scale, out, logsumexp, allow_tf32, target)


def _low_part(logsumexp: torch.Tensor | None) -> torch.Tensor | None:
    """The second half of a [2, B, H, seqlen_q] logsumexp."""
    return logsumexp[1] if logsumexp is not None and logsumexp.dim() == 4 else None


def _launches_before(plan) -> list[Launch]:
    """What fills the tables that a plan's attention kernels read."""
    launches = [] if plan.mask_tiles is None else list(plan.mask_tiles.launches)
    return launches if plan.dropout_keys is None else [*launches, plan.dropout_keys.launch]


class _BackwardPlan:
    """The launches of one backward: dQ (always, it leaves the row statistics), then dK and dV, then the mask's."""

    def __init__(self, query, key, value, mask, seed, dropout_p, is_causal, scale, out, logsumexp, grad_out,
                 grad_query, grad_key, grad_value, needs_mask, logsumexp_pitch, allow_tf32, target=None):
        tensors = [t for t in (query, key, value, out, grad_out, grad_query, grad_key, grad_value) if t is not None]
        call = _Call(query, key, value, mask, dropout_p, is_causal, scale, tensors, allow_tf32, target)
        call.split_products()
        low = logsumexp if logsumexp.dim() == 4 else None
        self._low_offset = None if low is None else low.stride(0) * low.element_size()
        self.mask_tiles = None
        if call.listed:
            key_tile = None if grad_key is None else call.tile("backward_key_value")
            self.mask_tiles = MaskTiles(call, mask, call.tile("backward_query"), key_tile)
        lists = self.mask_tiles.buffer if call.listed else None
        self.dropout_keys = _DropoutKeys(call, query, seed) if dropout_p > 0.0 else None
        keys = self.dropout_keys.table if dropout_p > 0.0 else None
        inputs = {"query": query, "key": key, "value": value, "mask": mask, "mask_tiles": lists, "dropout_keys": keys}
        # Rows of statistics reach to the end of the last tile of every kernel, so that nobody needs bounds there.
        wide = grad_key is not None and keys_are_wide(call, tensors)
        stored = wide and scores_are_stored(call)
        of_keys = ("wide_key", "wide_value") if wide else ("backward_key_value", "backward_mask")
        kernels = ("backward_query", "stored_scores") if stored else ("backward_query", *of_keys)
        longest = max(call.tile(kernel).block_m for kernel in kernels)
        self.padded_q = math.ceil(call.seqlen_q / longest) * longest
        plane = call.batch * call.heads * self.padded_q
        planes = 2 if low is None else 3
        self.statistics = planes * plane
        self._delta_shape = call.batch, call.heads, self.padded_q
        # Its type is all that matters of a buffer here; each call brings its own.
        statistics = {"statistics": torch.empty(0, dtype=torch.float32, device=query.device)}
        rows_of_statistics = torch.empty((1, planes, call.batch * call.heads, self.padded_q), device="meta")
        strides = (call.strides("qb qh qm qd", query) | call.strides("kb kh kn kd", key)
                   | call.strides("vb vh vn vd", value) | call.strides("gb gh gm gd", grad_out))
        scalars = call.sizes | call.dropout
        scalars |= {"padded_q": ("i32", self.padded_q), "plane": ("i64", plane)}
        scalars |= {"scale": ("fp32", call.kernel_scale), "out_scale": ("fp32", scale)}
        names = {"HAS_LOW": low is not None}

        tile = call.tile("backward_query")
        grad_query_here = None if stored else grad_query  # of stored probabilities a product like the others
        pointers = inputs | {"out": out, "logsumexp": logsumexp, "logsumexp_low": low, "grad_out": grad_out}
        pointers |= statistics | {"grad_query": grad_query_here}
        query_strides = strides | call.strides("ob oh om od", out)
        query_strides |= call.strides("dqb dqh dqm dqd", query if grad_query is None else grad_query)
        self.query = call.launch(
            backward_kernels.attention_backward_query, self.padded_q // tile.block_m * call.batch * call.heads, tile,
            pointers, query_strides, call.strides_of_mask(),
            scalars | {"logsumexp_pitch": ("i64", logsumexp_pitch)} | call.list_strides(self.mask_tiles),
            names | {"ONLY_DELTA": grad_query_here is None, "BOUND_KEYS": call.seqlen_k % tile.block_n != 0,
                     "SUM_ROWS": _rows_of_a_sum(call.seqlen_k)},
            {"key": (tile.block_n, call.block_d), "value": (tile.block_n, call.block_dv)},
        )

        # A bias with one row: its gradient falls off on the way to those of keys and values.
        self.key_sums = None
        if needs_mask and grad_key is not None and mask.size(2) == 1 and mask.size(3) > 1:
            self.key_sums = call.batch, call.heads, 1, call.seqlen_k
            self._shared_dims = [dim for dim in range(2) if mask.size(dim) != self.key_sums[dim]]

        self.key_value = None
        self.wide: tuple[Launch, ...] = ()
        self.stored = None
        if stored:
            self.stored = StoredPlan(call, query, key, value, grad_out, statistics["statistics"], grad_query, grad_key,
                                     grad_value, scalars)
        elif wide:
            key_strides = call.strides("dkb dkh dkn dkd", grad_key)
            value_strides = call.strides("dvb dvh dvn dvd", grad_value)
            pointers = {"query": query, "key": key, "value": value, "grad_out": grad_out, **statistics}
            self.wide = tuple(
                self._wide_launch(call, kernel, pointers | {name: gradient}, strides | row_strides, scalars,
                                  rows_of_statistics)
                for kernel, name, gradient, row_strides in (
                    (wide_kernels.attention_wide_key, "grad_key", grad_key, key_strides),
                    (wide_kernels.attention_wide_value, "grad_value", grad_value, value_strides),
                )
            )
        elif grad_key is not None:
            tile = call.tile("backward_key_value")
            pointers = inputs | statistics | {"grad_out": grad_out, "grad_key": grad_key, "grad_value": grad_value}
            pointers |= {"key_sums_out": None if self.key_sums is None else statistics["statistics"]}
            key_strides = strides | call.strides("dkb dkh dkn dkd", grad_key)
            key_strides |= call.strides("dvb dvh dvn dvd", grad_value)
            bounds = {"BOUND_QUERIES": call.seqlen_q % tile.block_m != 0}
            bounds |= {"BOUND_KEYS": call.seqlen_k % tile.block_n != 0}
            one_mask = call.mask_strides[1] == 0 or call.heads == call.kv_heads
            bounds |= {"MASK_AT_END": call.mask_kind == MASK_BOOL and call.mask_strides[2] == 0 and one_mask}
            # By the number of all rows, with a mask too: how many of them a list names is known on the GPU alone.
            rows = call.seqlen_q * (call.heads // call.kv_heads)
            bounds |= {"SUM_ROWS": _rows_of_a_sum(rows), "KEY_SUMS": self.key_sums is not None}
            self.key_value = call.launch(
                backward_kernels.attention_backward_key_value,
                math.ceil(call.seqlen_k / tile.block_n) * call.batch * call.kv_heads, tile, pointers, key_strides,
                call.strides_of_mask(), scalars | call.list_strides(self.mask_tiles, of_queries=True), names | bounds,
                {"query": (tile.block_m, call.block_d), "grad_out": (tile.block_m, call.block_dv)},
                rows_of_statistics,
            )

        self.mask = None
        if needs_mask and self.key_sums is None:
            tile = call.tile("backward_mask")
            mask_batches, mask_heads, mask_q, mask_k = mask.shape
            tiles_q = math.ceil(mask_q / tile.block_m)
            tiles_k = math.ceil(mask_k / tile.block_n)
            owned = mask_batches * mask_heads * tiles_q * tiles_k
            shared = (call.batch // mask_batches) * (call.heads // mask_heads)
            shared *= math.ceil(call.seqlen_q / tile.block_m) if mask_q == 1 else 1
            shared *= math.ceil(call.seqlen_k / tile.block_n) if mask_k == 1 else 1
            # Two programs for each multiprocessor, as far as there is work to share.
            self.splits = max(1, min(shared, 2 * call.multiprocessors // owned))
            numel = mask.numel()
            mask_strides = {"stride_ds": ("i64", numel), "stride_db": ("i64", numel // mask_batches),
                            "stride_dh": ("i64", mask_q * mask_k), "stride_dq": ("i64", mask_k),
                            "stride_dk": ("i64", 1)}
            counts = {"num_batches": call.batch, "mask_batches": mask_batches, "mask_heads": mask_heads,
                      "mask_tiles_q": tiles_q, "mask_tiles_k": tiles_k, "num_splits": self.splits}
            scalars |= {name: ("i32", count) for name, count in counts.items()}
            self.mask_dtype = mask.dtype if self.splits == 1 else torch.float32
            grad_mask = torch.empty(0, dtype=self.mask_dtype, device=query.device)
            pointers = inputs | statistics | {"grad_out": grad_out, "grad_mask": grad_mask}
            del pointers["mask_tiles"]
            self.mask = call.launch(
                backward_kernels.attention_backward_mask, owned * self.splits, tile, pointers, strides,
                call.strides_of_mask() | mask_strides, scalars,
                names | {"MASK_PER_KEY": mask_q == 1, "MASK_PER_QUERY": mask_k == 1,
                         "PRECISION": call.precision(allow_tf32)},
                {"query": (tile.block_m, call.block_d), "grad_out": (tile.block_m, call.block_dv),
                 "key": (tile.block_n, call.block_d), "value": (tile.block_n, call.block_dv)},
                rows_of_statistics, whole_mask=mask_q > 1 and mask_k > 1,
            )

    @staticmethod
    def _wide_launch(call, kernel, pointers, strides, scalars, rows_of_statistics) -> Launch:
        """The launch of a kernel of backward_wide.py, two programs for each tile of keys."""
        tile = call.tile(kernel.__name__.removeprefix("attention_"))
        columns = call.block_d // 2
        return call.launch(
            kernel, 2 * math.ceil(call.seqlen_k / tile.block_n) * call.batch * call.kv_heads, tile,
            {name: tensor for name, tensor in pointers.items() if name in kernel.arg_names},
            {name: stride for name, stride in strides.items() if name in kernel.arg_names}, {}, scalars,
            {"BLOCK_C": columns}, {"query": (tile.block_m, columns), "grad_out": (tile.block_m, columns)},
            rows_of_statistics,
        )  # fmt: skip

    @property
    def launches(self) -> list[Launch]:
        """In the order in which they run; of stored probabilities one of each kernel."""
        stored = [] if self.stored is None else self.stored.launches
        attention = [self.query, *stored, self.key_value, *self.wide, self.mask]
        attention = [launch for launch in attention if launch is not None]
        return [*_launches_before(self), *attention]

    def allocate(self, query) -> torch.Tensor:
        """Room for the row statistics: float32, planes times [B, H, padded_q]."""
        return _torch.empty_float32(query, (self.statistics,), (1,))

    def sum_of_heads(self, key_sums: torch.Tensor) -> torch.Tensor:
        """A bias's gradient, of its shape, in float32: what all heads of all batches that share it have added."""
        return key_sums.sum(self._shared_dims, keepdim=True) if self._shared_dims else key_sums

    def delta(self, statistics: torch.Tensor) -> torch.Tensor:
        """The plane of them that holds rowsum(grad_out * out): [B, H, padded_q]."""
        plane = math.prod(self._delta_shape)
        return statistics[plane : 2 * plane].view(self._delta_shape)

    def __call__(self, query, key, value, out, logsumexp, grad_out, grad_query, grad_key, grad_value, mask=None,
                 seed=None, bias_gradient=None) -> torch.Tensor | None:
        """Fill the gradients and return the mask's; all tensors like those that the plan was made for.

        bias_gradient: computes the mask's in the stead of these kernels, of which it is then not asked for, from
        grad_out, query, key, value, mask, logsumexp and delta [B, H, seqlen_q or more], float32.
        """
        statistics = self.allocate(query)
        lists = None if self.mask_tiles is None else self.mask_tiles.make(mask)
        keys = None if self.dropout_keys is None else self.dropout_keys.make(seed)
        self.query(query, key, value, mask, lists, keys, out, logsumexp, _low_part(logsumexp), grad_out, statistics,
                   None if self.stored is not None else grad_query)
        if self.stored is not None:
            self.stored(query, key, value, grad_out, statistics, grad_query, grad_key, grad_value)
            return None
        if self.wide:
            wide_key, wide_value = self.wide
            wide_key(query, key, value, statistics, grad_out, grad_key)
            wide_value(query, key, statistics, grad_out, grad_value)
            return None
        key_sums = None
        if self.key_sums is not None:
            key_sums = torch.empty(self.key_sums, dtype=torch.float32, device=query.device)
        if self.key_value is not None:
            self.key_value(query, key, value, mask, lists, keys, statistics, grad_out, grad_key, grad_value, key_sums)
        if key_sums is not None:
            return self.sum_of_heads(key_sums).to(mask.dtype)
        if bias_gradient is not None:
            return bias_gradient(grad_out, query, key, value, mask, logsumexp, self.delta(statistics))
        if self.mask is None:
            return None
        buffer = torch.empty((self.splits, *mask.shape), dtype=self.mask_dtype, device=query.device)
        self.mask(query, key, value, mask, keys, statistics, grad_out, buffer)
        return buffer[0] if self.splits == 1 else buffer.sum(0).to(mask.dtype)

    def prepared(self, grads, wanted, query, otherwise):
        """``prepared.backward`` of a call of two kernels at most beside those that list a mask's tiles; else None."""
        others = self.dropout_keys, self.stored, self.key_sums, self.mask
        if self.query.is_interpreted or self.wide or any(other is not None for other in others):
            return None
        lists_of = None if self.mask_tiles is None else self.mask_tiles.make
        return prepared.backward(self.query, self.key_value, lists_of, self.statistics, self._low_offset, grads,
                                 wanted, query, otherwise)


def backward(grad_out, query, key, value, mask, out, logsumexp, dropout_seed, dropout_p, is_causal, scale, grad_query,
             grad_key, grad_value, needs_mask, allow_tf32) -> torch.Tensor | None:
    """Fill grad_query, grad_key, grad_value (None: not needed; key and value together) and return the mask's gradient.

    Arguments as in ``forward``. logsumexp [B, H, seqlen_q or more] or [2, B, H, seqlen_q], float32, contiguous: this
    forward's or PyTorch's (whose efficient kernel pads its rows, and whose masked rows are +inf instead of -inf). The
    mask's gradient has the mask's shape and dtype and is contiguous.
    """
    plan = plan_of_backward(
        grad_out, query, key, value, mask, out, logsumexp, dropout_seed, dropout_p, is_causal, scale, grad_query,
        grad_key, grad_value, needs_mask, allow_tf32,
    )  # fmt: skip
    return plan(query, key, value, out, logsumexp, grad_out, grad_query, grad_key, grad_value, mask, dropout_seed)


def plan_of_backward(grad_out, query, key, value, mask, out, logsumexp, dropout_seed, dropout_p, is_causal, scale,
                     grad_query, grad_key, grad_value, needs_mask, allow_tf32) -> _BackwardPlan:
    """What ``backward`` runs. Raises KernelUnavailable."""
    tensors = [query, key, value, out, grad_out]
    if mask is not None:
        tensors.append(mask)
    if grad_query is not None:
        tensors.append(grad_query)
    if grad_key is not None:
        tensors += (grad_key, grad_value)
    rest = (mask is None, grad_query is None, grad_key is None, logsumexp.shape, dropout_p, is_causal, scale,
            needs_mask, allow_tf32)
    plan = _plans.find(rest, tensors)
    if plan is None:
        plan = _plans.look_up(rest, tensors, lambda: _BackwardPlan(
            query, key, value, mask, dropout_seed, dropout_p, is_causal, scale, out, logsumexp, grad_out, grad_query,
            grad_key, grad_value, needs_mask, logsumexp.size(-1), allow_tf32))
    return plan


def compile_for(target, query, key, value, mask=None, *, dropout_p=0.0, is_causal=False, scale=1.0, logsumexp=True,
                backward=True, mask_gradient=False, allow_tf32=False, only=None) -> dict:
    """Compile what a call would launch on a target (``GPUTarget("cuda", 90, 32)``), without such a GPU: {name: kernel}.

    The tensors may lie on the CPU or be "meta"; their sizes decide head dimensions, which bounds are checked and, of
    decoding, whether keys are split. ``only`` names one kernel: "attention_forward" is any forward's.
    """
    out = torch.empty((*query.shape[:3], value.size(3)), dtype=query.dtype, device=query.device)
    statistics = (2, *query.shape[:3]) if mask is not None and mask.dtype != torch.bool else query.shape[:3]
    lse = torch.empty(statistics) if logsumexp else None
    seed = torch.zeros(1, dtype=torch.int64) if dropout_p else None
    plan = _make_plan_of_forward(
        query, key, value, mask, seed, dropout_p, is_causal, scale, out, lse, allow_tf32, target
    )  # fmt: skip
    launches = plan.launches
    if backward:
        grads = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
        grad_out = torch.empty_like(out)
        plan = _BackwardPlan(query, key, value, mask, seed, dropout_p, is_causal, scale, out, lse, grad_out, *grads,
                              mask_gradient, query.size(2), allow_tf32, target)
        launches += plan.launches
    names = {None: None, "attention_forward": ("attention_forward", "attention_decode")}.get(only, (only,))
    return {launch.name: launch.compile(target) for launch in launches if names is None or launch.name in names}
