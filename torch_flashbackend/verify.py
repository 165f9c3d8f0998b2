"""Verify mode: on a random share of the calls that we take, compute the answer again in float64 and compare.

May import torch, callable_module.py, problem.py, `_torch.py`, reference.py, and ops.py to be called back after a
backward. Imported by decisions.py, for override.py and direct.py, which test `verify.share` (0.0: off) on every call,
by stats.py and the command line. Switched on by TORCH_FLASHBACKEND_VERIFY=0.01 (a share of the calls, 0 to 1) or
`set_verify(0.01)`; the module is that function: `torch_flashbackend.verify(0.01)`. Eager calls of
F.scaled_dot_product_attention, in `sdpa_backend` blocks too, and of `attention` are checked, not what compiled programs
hold, nor packed sequences and caches of keys and values.

A difference is measured against a bound on rounding, element by element: with probabilities p, values v and the
rounding units e of the products and the result, an output may be off by f·Σ p|v|, where the factor f adds what the
result's dtype rounds, what the products q·k round, and what adding a mask rounds. Gradients likewise, through the
terms of their own sums. A ratio above 1 is more than rounding. A check costs what the math path costs, and a
synchronisation; it leaves torch's random numbers alone (its choices come from a generator of its own).
"""

from __future__ import annotations

import math
import os
import random
import sys
import threading
import warnings
from typing import Any

import torch
from torch import Tensor

from . import _torch, reference
from .callable_module import CallableModule
from .problem import Problem

__all__ = ["check_backward", "maybe_check", "reset", "results", "set_verify", "share", "verify"]

VARIABLE = "TORCH_FLASHBACKEND_VERIFY"
# Memory that one check may take, in bytes; a call whose keys and values alone need more is skipped.
MEMORY = 256 * 2**20
# float64 copies of one block of scores that are alive at once.
COPIES = 8
# Operations that one check may take. Beyond, some heads of a call are checked, chosen at random.
WORK = 10**12
TF32_UNIT = 2.0**-10
# Products of float32 matrices, in float32 or in three TF32 products, and sums over a few hundred terms.
FLOAT32_UNIT = 2.0**-21

share: float = 0.0
"""Share of taken calls that are checked. 0.0: verify mode is off."""

_random = random.Random()
_lock = threading.Lock()
_warned = False
_results: dict[str, Any] = {}


def set_verify(value: float) -> None:
    """Check this share of the taken calls, 0.0 (none) to 1.0 (all). Raises ValueError for anything else."""
    global share
    if not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
        raise ValueError(f"the share of calls to verify is a number between 0 and 1, got {value!r}")
    share = float(value)
    if share or "torch_flashbackend.ops" in sys.modules:
        from . import ops

        ops.check_gradients = _maybe_check_backward if share else None


def _maybe_check_backward(*arguments: Any) -> None:
    """`check_backward`, if chance chooses this call."""
    if share >= 1.0 or _random.random() < share:
        check_backward(*arguments)


def results() -> dict[str, Any]:
    """What was found since the last `reset`.

    checked, failed, skipped: numbers of calls; worst: the largest difference as a multiple of the tolerance, and
    worst_call: the call that had it.
    """
    with _lock:
        return dict(_results)


def reset() -> None:
    """Forget what was found, and that a warning was given."""
    global _warned
    with _lock:
        _warned = False
        _results.update(checked=0, failed=0, skipped=0, worst=0.0, worst_call="")


def maybe_check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    out: Tensor,
) -> None:
    """Check `out`, the answer to this call, if chance chooses it; warn once if it differs by more than rounding.

    Skips calls that cannot be checked: under CUDA graph capture, while tracing, under a function transform or a
    dispatch mode, with dropout. Never raises for what it finds, and runs out of memory silently (the call counts as
    skipped).
    """
    if share < 1.0 and _random.random() >= share:
        return
    _check(_worst_output, (query, key, value, attn_mask), dropout_p, is_causal, scale, enable_gqa, out)


def check_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    grad_out: Tensor,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """Check the gradients of query, key and value (None: not asked for) of a call of rank 4. Always, not by chance.

    Skips what `maybe_check` skips, calls whose batch is broadcast, and calls of more than `WORK` operations.
    """
    tensors = (query, key, value, attn_mask)
    _check(_worst_gradient, tensors, dropout_p, is_causal, scale, enable_gqa, grad_out, gradients)


def _check(
    worst: Any, tensors: Any, dropout_p: float, is_causal: bool, scale: Any, enable_gqa: bool, *rest: Any
) -> None:
    query, key, value, attn_mask = tensors
    ratio = None
    if not dropout_p and not _hidden(*tensors):
        try:
            with torch.no_grad():
                ratio = worst(*tensors, is_causal, scale, enable_gqa, *rest)
        except torch.OutOfMemoryError:
            pass
    if ratio is None:
        with _lock:
            _results["skipped"] += 1
        return
    problem = Problem.from_tensors(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    _record(ratio, str(problem), "gradients" if worst is _worst_gradient else "numbers")


def _record(ratio: float, call: str, what: str) -> None:
    global _warned
    with _lock:
        _results["checked"] += 1
        _results["failed"] += ratio > 1.0
        if ratio > _results["worst"]:
            _results.update(worst=ratio, worst_call=call)
        warn = ratio > 1.0 and not _warned
        _warned = _warned or warn
    if warn:
        warnings.warn(
            f"torch_flashbackend verify: the {what} of a call differ from float64 by {ratio:.3g} times what "
            f"rounding allows, for {call}. Please report it; torch_flashbackend.disable() avoids it. "
            "Warned once; stats() counts.",
            RuntimeWarning,
            stacklevel=4,
        )


def _hidden(*tensors: Tensor | None) -> bool:
    """Can these tensors not be computed with here and now?"""
    # A mode traces, counts or keeps all that is computed under it, this too.
    if _torch.transforms_active() or _torch.dispatch_modes() or torch.compiler.is_compiling():
        return True
    for tensor in tensors:
        if tensor is not None and type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
            return True
    device = tensors[0].device if tensors[0] is not None else None
    return device is not None and (
        device.type == "mps" or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )


def _worst_output(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    out: Tensor,
) -> float | None:
    """Largest difference from float64 as a multiple of its bound; None if the call does not fit."""
    batch, (seqlen_q, seqlen_k) = out.shape[:-2], (query.size(-2), key.size(-2))
    head_dims = query.size(-1) + value.size(-1)
    if out.numel() == 0 or seqlen_k * head_dims * 8 > MEMORY:
        return 0.0 if out.numel() == 0 else None
    heads = query.size(-3) if enable_gqa else None
    at = {
        "query": _index(query.shape[:-2], batch, None, query.device),
        "key": _index(key.shape[:-2], batch, heads, query.device),
        "value": _index(value.shape[:-2], batch, heads, query.device),
        "mask": None if attn_mask is None else _index(attn_mask.shape[:-2], batch, None, query.device),
        "out": _index(batch, batch, None, query.device),
    }
    number = max(math.prod(batch), 1)
    slices = list(range(number))
    per_slice = 3 * seqlen_q * max(seqlen_k, 1) * head_dims
    if number * per_slice > WORK:
        slices = sorted(_random.sample(slices, max(1, WORK // per_slice)))
    rows = max(1, MEMORY // (COPIES * 8 * max(seqlen_k, head_dims)))
    together = max(1, min(rows // max(seqlen_q, 1), MEMORY // (8 * max(seqlen_k, 1) * head_dims)))
    scale = reference.default_scale(query.size(-1)) if scale is None else scale
    worst = torch.zeros((), dtype=torch.float64, device=query.device)
    for start in range(0, len(slices), together):
        chosen = torch.tensor(slices[start : start + together], device=query.device)
        k, v = _take(key, at["key"], chosen).double(), _take(value, at["value"], chosen).double()
        mask = None if attn_mask is None else _take(attn_mask, at["mask"], chosen)
        for first in range(0, seqlen_q, rows):
            some = slice(first, min(first + rows, seqlen_q))
            q = _take(query, at["query"], chosen)[:, some].double()
            weights, factor = _weights(q, k, _rows(mask, some), is_causal, scale, first, query.dtype)
            expected = weights @ v
            bound = factor * (weights @ v.abs())
            worst = torch.maximum(worst, _ratio(_take(out, at["out"], chosen)[:, some], expected, bound))
    return worst.item()


def _worst_gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    grad_out: Tensor,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> float | None:
    """The same for gradients, one key head at a time with all query heads that share it."""
    same = query.dim() == 4 and query.size(0) == key.size(0) == value.size(0) and key.size(1) == value.size(1)
    if not same or key.size(1) == 0 or query.size(1) % key.size(1):
        return None
    batch, heads, seqlen_q, head_dim = query.shape
    seqlen_k, head_dim_v = value.shape[-2:]
    work = 10 * batch * heads * seqlen_q * seqlen_k * (head_dim + head_dim_v)
    if work > WORK or 6 * seqlen_k * (head_dim + head_dim_v) * 8 > MEMORY:
        return None
    group = heads // key.size(1)
    scale = reference.default_scale(head_dim) if scale is None else scale
    if attn_mask is not None:
        attn_mask = attn_mask.expand(batch, heads, *attn_mask.shape[-2:])
    rows = max(1, MEMORY // (COPIES * 8 * max(seqlen_k, head_dim + head_dim_v)))
    worst = torch.zeros((), dtype=torch.float64, device=query.device)
    for b in range(batch):
        for kv_head in range(key.size(1)):
            k, v = key[b, kv_head].double()[None], value[b, kv_head].double()[None]
            # Gradients of this key head, and the bounds on their rounding.
            dk, dk_bound, dv, dv_bound = (torch.zeros_like(like) for like in (k, k, v, v))
            for head in range(kv_head * group, (kv_head + 1) * group):
                mask = None if attn_mask is None else attn_mask[b, head][None]
                for first in range(0, seqlen_q, rows):
                    some = slice(first, min(first + rows, seqlen_q))
                    q, do = query[b, head, some].double()[None], grad_out[b, head, some].double()[None]
                    p, factor = _weights(q, k, _rows(mask, some), is_causal, scale, first, query.dtype)
                    out = p @ v
                    ds = p * (do @ v.mT - (do * out).sum(-1, keepdim=True))
                    # What rounds: every term of do·v and of do·out, in proportion to its size.
                    ds_bound = factor * p * (do.abs() @ v.abs().mT + (do * out).abs().sum(-1, keepdim=True))
                    dk += scale * (ds.mT @ q)
                    dk_bound += abs(scale) * (ds_bound.mT @ q.abs())
                    dv += p.mT @ do
                    dv_bound += (factor * p).mT @ do.abs()
                    if gradients[0] is not None:
                        expected, bound = scale * (ds @ k), abs(scale) * (ds_bound @ k.abs())
                        worst = torch.maximum(worst, _ratio(gradients[0][b, head, some][None], expected, 2 * bound))
            if gradients[1] is not None:
                worst = torch.maximum(worst, _ratio(gradients[1][b, kv_head][None], dk, 2 * dk_bound))
            if gradients[2] is not None:
                worst = torch.maximum(worst, _ratio(gradients[2][b, kv_head][None], dv, 2 * dv_bound))
    return worst.item()


def _weights(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float, first: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Probabilities [N, rows, Sk] in float64, and for each row the relative rounding that is allowed, [N, rows, 1]."""
    scores = (query @ key.mT) * scale
    if is_causal:
        position = torch.arange(first, first + query.size(-2), device=query.device)[:, None]
        hidden = torch.arange(key.size(-2), device=query.device) > position
        scores = scores.masked_fill(hidden, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask.double()
    unseen = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(unseen, 0.0), -1).masked_fill(unseen, 0.0)
    product_unit, result_unit = _units(dtype)
    # |q·k| is at most the product of the norms. The size of a score after masking counts where it has weight.
    norms = query.norm(dim=-1, keepdim=True) * key.norm(dim=-1).amax(-1)[:, None, None] if key.size(-2) else 0.0
    size = (weights * scores.abs().masked_fill(weights == 0, 0.0)).sum(-1, keepdim=True)
    factor = 4 * result_unit + 8 * product_unit * abs(scale) * norms + 8 * 2.0**-23 * size
    return weights, factor


def _units(dtype: torch.dtype) -> tuple[float, float]:
    """Rounding units of the products q·k (of which half types are exact, so their sums' in float32) and of results."""
    if dtype is torch.float64:
        return 2.0**-45, 2.0**-48
    if dtype is not torch.float32:
        return FLOAT32_UNIT, torch.finfo(dtype).eps
    return (TF32_UNIT, TF32_UNIT) if _torch.allows_tf32() else (FLOAT32_UNIT, FLOAT32_UNIT)


def _ratio(actual: Tensor, expected: Tensor, bound: Tensor) -> Tensor:
    """Largest difference in multiples of the bound. Where float64 itself gives no number, nothing is compared."""
    smallest = torch.finfo(actual.dtype).tiny
    ratio = (actual.double() - expected).abs() / (bound + smallest)
    ratio = torch.where(expected.isfinite(), ratio.nan_to_num(math.inf, math.inf), 0.0)
    return ratio.amax() if ratio.numel() else ratio.new_zeros(())


def _index(own: torch.Size, batch: torch.Size, heads: int | None, device: torch.device) -> Tensor:
    """For each element of the output's batch and head dimensions, the element of a tensor's own that it uses."""
    index = torch.arange(math.prod(own), device=device).view(own)
    if heads is not None and own and own[-1] != heads:
        index = index.repeat_interleave(heads // own[-1], -1)
    return index.expand(batch).reshape(-1)


def _take(tensor: Tensor, index: Tensor | None, chosen: Tensor) -> Tensor:
    """Slices [N, rows, columns] of a tensor, without a copy of the whole."""
    if index is None or tensor.dim() == 2:
        return tensor.expand(chosen.numel(), *tensor.shape)
    return tensor[torch.unravel_index(index[chosen], tensor.shape[:-2])]


def _rows(mask: Tensor | None, some: slice) -> Tensor | None:
    return mask if mask is None or mask.size(-2) == 1 else mask[:, some]


def _read_variable() -> None:
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return
    try:
        set_verify(float(text))
    except ValueError:
        warnings.warn(
            f"torch_flashbackend: {VARIABLE}={text!r} is not a share between 0 and 1, so nothing is verified",
            RuntimeWarning,
            stacklevel=2,
        )


class _CallableModule(CallableModule):
    """`verify(0.01)` and `verify.share` belong to one object, whichever way it was imported."""

    def __call__(self, value: float) -> None:
        """The same as `set_verify`."""
        set_verify(value)


verify = sys.modules[__name__]
verify.__class__ = _CallableModule
reset()
_read_variable()
