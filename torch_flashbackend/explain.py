"""explain(): which kernel a call runs on and, for each one that it does not, the one condition that failed.

May import torch, callable_module.py, nested.py, packed.py, problem.py, routing.py and, when asked, override.py and
selection.py for what is switched on. Imported by the package's `__init__` and by the command line.
"""

from __future__ import annotations

import contextlib
import numbers
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _torch, nested, packed, routing
from .callable_module import CallableModule
from .problem import Problem
from .routing import Decision

__all__ = ["Explanation", "explain", "explain_problem", "other_implementations", "plugin_enabled"]

HEADINGS = ("backend", "takes it", "why")


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a call runs where it runs. `print` it, or read the fields.

    backend: "cuda", "triton", "math", "stock", or "error" if the backends chosen by sdpa_backend all refuse the call.
    decision: routing's Decision, None for "error". rows: (backend, "yes" or "no", why) for each backend.
    stock_backend: what PyTorch itself would run, None if that is not known. enabled: is the plugin switched on?
    allowed: the backends that sdpa_backend allows here, None where nobody has chosen. notes: whatever else matters.
    """

    backend: str
    decision: Decision | None
    rows: tuple[tuple[str, str, str], ...]
    problem: Problem
    stock_backend: str | None
    enabled: bool
    allowed: tuple[str, ...] | None
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "call": str(self.problem),
            "backend": self.backend,
            "reason": self.decision.reason if self.decision else "error",
            "layout": self.decision.layout if self.decision else None,
            "rows": [dict(zip(("backend", "takes_it", "why"), row)) for row in self.rows],
            "stock_backend": self.stock_backend,
            "enabled": self.enabled,
            "allowed": self.allowed,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        table = [HEADINGS, *self.rows]
        widths = [max(len(row[column]) for row in table) for column in range(2)]
        lines = [str(self.problem), ""]
        for number, row in enumerate(table):
            lines.append(f"{row[0]:<{widths[0]}} | {row[1]:<{widths[1]}} | {row[2]}")
            if number == 0:
                lines.append(f"{'-' * widths[0]}-+-{'-' * widths[1]}-+-{'-' * 40}")
        reason = f" ({self.decision.reason})" if self.decision else ""
        refused = "nothing: every backend that is allowed refuses it, which is a RuntimeError"
        lines += ["", f"runs on: {refused if self.decision is None else self.backend}{reason}"]
        if self.stock_backend:
            lines.append(f"PyTorch itself would run: {self.stock_backend}")
        lines += self.notes
        return "\n".join(lines)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Explanation:
    """Explain F.scaled_dot_product_attention(query, key, value, ...) as it would run here and now. Computes nothing.

    Arguments are those of the call: query [..., H, Sq, D], key [..., Hkv, Sk, D], value [..., Hkv, Sk, Dv], attn_mask
    bool or float; or nested tensors of jagged layout, whose calls are calls on packed sequences. The call may be
    invalid: the table then says what is wrong with it. Under autocast, give the tensors in the dtype that autocast
    would cast them to. Raises TypeError for what PyTorch would not take for a tensor, a number or a bool.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(tensor, Tensor) and not (tensor is None and name == "attn_mask"):
            raise _wrong_type(name, "Tensor", tensor)
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise _wrong_type(name, "bool", flag)
    dropout_p = _number("dropout_p", dropout_p)
    scale = None if scale is None else _number("scale", scale)
    problem = _packed_problem(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if problem is None:
        problem = Problem.from_tensors(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return explain_problem(problem)


def _number(name: str, given: Any) -> Any:
    """What PyTorch takes for a number: one, or a tensor that holds one."""
    if isinstance(given, Tensor) and given.dim() == 0:
        return given.item()
    if not isinstance(given, (numbers.Real, torch.SymInt, torch.SymFloat)):
        raise _wrong_type(name, "float", given)
    return given


def _wrong_type(name: str, wanted: str, given: Any) -> TypeError:
    return TypeError(f"explain(): argument '{name}' must be {wanted}, not {type(given).__name__}")


def _packed_problem(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None,
) -> Problem | None:  # fmt: skip
    """The Problem of nested tensors of jagged layout as nested.py sees it; None for other calls."""
    parts = [_torch.jagged(tensor) for tensor in (query, key, value)]
    if attn_mask is not None or dropout_p or any(part is None for part in parts):
        return None
    (query, offsets_q, min_q, max_q), (key, offsets_k, min_k, max_k), (value, *_) = parts  # type: ignore[misc]
    if min_q == 0 or min_k == 0 or query.size(1) != key.size(1):
        return None  # stock's fused kernels do not see such calls, so ours do not either
    right = 0 if is_causal else -1
    call = packed.Call(query, key, value, offsets_q, offsets_k, max_q, max_k, -1, right, scale)
    training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    stock_backend = "flash" if packed.flash_fits(call) else "efficient"
    return packed.describe(call, nested.ENTRY, stock_backend, training)


def explain_problem(problem: Problem, *, here: bool = True) -> Explanation:
    """Explain a Problem. here: False for a question about programs that use the plugin, not about this process."""
    enabled = plugin_enabled() if here else True
    allowed = _selected() if here else None
    decision: Decision | None = None
    with contextlib.suppress(RuntimeError):
        decision = routing.decide(problem, allowed)
    backend = decision.backend if decision else "error"
    rows = tuple(_row(problem, name, backend, allowed) for name in routing.BACKENDS)
    notes = _notes(problem, enabled, allowed, backend, here) + (other_implementations() if here else ())
    if here and not enabled and allowed is None and backend != "stock":
        notes = ("The plugin is off: PyTorch runs this call. torch_flashbackend.enable() switches it on.", *notes)
    stock_backend = problem.stock_backend
    if decision is not None and decision.reason in routing.PYTORCHS_BUSINESS:
        stock_backend = None
        notes = ("What PyTorch makes of such arguments, an error most likely, is its own to say.", *notes)
    return Explanation(backend, decision, rows, problem, stock_backend, enabled, allowed, notes)


def plugin_enabled() -> bool:
    """Is the plugin switched on in this process?"""
    override = sys.modules.get(f"{__package__}.override")
    return override is not None and override.is_enabled()


def other_implementations() -> tuple[str, ...]:
    """What else has changed scaled_dot_product_attention in this process, one sentence each."""
    found = []
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    if current not in (None, "flashbackend"):
        found.append(
            f"torch.nn.attention.activate_flash_attention_impl({current!r}) is in force: where PyTorch chooses flash "
            f"attention, {current} runs."
        )
    function = torch.nn.functional.scaled_dot_product_attention
    original = torch._C._nn.scaled_dot_product_attention
    if function is not original:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        module = getattr(function, "__module__", None) or type(function).__module__
        found.append(
            f"F.scaled_dot_product_attention has been replaced by {module}.{name}: calls reach torch_flashbackend only "
            "where that function passes them on."
        )
    return tuple(found)


def _row(problem: Problem, name: str, chosen: str, allowed: tuple[str, ...] | None) -> tuple[str, str, str]:
    automatic = allowed is None
    if name == chosen and name == "stock":
        return name, "yes", "takes every call"
    failed = routing.first_failure(problem, name, automatic)
    if failed is not None:
        return name, "no", failed.message(problem)
    if name == chosen:
        why = routing.worth(problem, name).message if automatic else "asked for, and every condition holds"
        return name, "yes", why
    asked = routing.AUTO if allowed is None else allowed
    if name in asked:
        return name, "could", f"{chosen} comes first"
    return name, "could", f'not asked: torch_flashbackend.sdpa_backend("{name}") does'


def _notes(
    problem: Problem, enabled: bool, allowed: tuple[str, ...] | None, backend: str, here: bool
) -> tuple[str, ...]:
    notes = []
    if problem.device_type != "cuda" and allowed is None:
        notes.append(f"These tensors are on {problem.device_type}: torch_flashbackend changes nothing for them.")
    elif enabled and not here:
        notes.append("This is with the plugin on.")
    elif enabled and backend == "stock":
        notes.append("The plugin is on, and leaves this call to PyTorch.")
    elif enabled:
        notes.append("The plugin is on.")
    if allowed is not None:
        notes.append(f"sdpa_backend allows here, in order: {', '.join(allowed)}.")
    return tuple(notes)


def _selected() -> tuple[str, ...] | None:
    """Backends that sdpa_backend allows in this thread, None where nobody has chosen."""
    selection = sys.modules.get(f"{__package__}.selection")
    for mode in reversed(_torch.function_mode_stack()):
        if selection is not None and isinstance(mode, selection.sdpa_backend):
            return tuple(mode.backends.split(","))
    return None


class _CallableModule(CallableModule):
    """`torch_flashbackend.explain` may be this module or its function, of the same name: both can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Explanation:
        """The same as the function `explain` of this module."""
        return explain(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
