"""stats(): what the plugin has done in this process, by backend and reason.

May import callable_module.py and, when asked for numbers, what is already loaded of ops.py and verify.py. Imported
by decisions.py, which keeps the cache of the hooks: it calls `register` when a Decision enters that cache and `retire`
when one leaves it, and adds one to `Decision.calls` for every call that follows it. Nothing here is on that hot path.

The module is the function: `torch_flashbackend.stats()`.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .callable_module import CallableModule

if TYPE_CHECKING:
    from .routing import Decision

__all__ = ["Stats", "register", "reset_stats", "retire", "stats"]

_lock = threading.Lock()
_live: dict[int, Decision] = {}
_folded: Counter[tuple[bool, str, str]] = Counter()


class Stats(Mapping[str, Any]):
    """A snapshot of the counts; prints as a table.

    ["calls"]: {backend: {reason: eager calls}}. ["traced"]: the same for calls decided while a graph was traced: one
    per trace, not per run of the graph. ["launches"]: {kernel: launches}. ["verify"]: what verify mode found.
    """

    def __init__(self, counts: dict[str, Any]) -> None:
        self._counts = counts

    def __getitem__(self, name: str) -> Any:
        return self._counts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)

    def total(self, backend: str, kind: str = "calls") -> int:
        """Calls that went to a backend; kind "traced" for those decided while tracing."""
        return sum(self[kind].get(backend, {}).values())

    def __str__(self) -> str:
        rows = [("backend", "calls", "traced", "reason")]
        for backend in sorted({*self["calls"], *self["traced"]}):
            eager, traced = self["calls"].get(backend, {}), self["traced"].get(backend, {})
            for reason in sorted({*eager, *traced}, key=lambda name: (-eager.get(name, 0), name)):
                rows.append((backend, str(eager.get(reason, 0)), str(traced.get(reason, 0)), reason))
        if len(rows) == 1:
            text = "no calls yet"
        else:
            widths = [max(len(row[column]) for row in rows) for column in range(3)]
            text = "\n".join(
                f"{backend:<{widths[0]}}  {calls:>{widths[1]}}  {traced:>{widths[2]}}  {reason}"
                for backend, calls, traced, reason in rows
            )
        if self["launches"]:
            text += "\nkernel launches: " + ", ".join(f"{name} {n}" for name, n in sorted(self["launches"].items()))
        checks = self["verify"]
        if checks.get("checked") or checks.get("skipped"):
            text += (
                f"\nverify: {checks['checked']} checked, {checks['failed']} above tolerance, "
                f"{checks['skipped']} skipped, worst {checks['worst']:.3g} of the tolerance"
            )
        return text

    __repr__ = __str__


def register(decision: Decision, traced: bool = False) -> None:
    """Count the calls of this decision from now on. traced: decided while a graph was traced, which is one call."""
    with _lock:
        if traced:
            # Nobody keeps it, so nobody would add to it.
            _folded[True, decision.backend, decision.reason] += 1
        else:
            _live[id(decision)] = decision


def retire(decision: Decision) -> None:
    """Keep the counts of a decision that the hooks forget."""
    with _lock:
        if _live.pop(id(decision), None) is not None:
            _folded[False, decision.backend, decision.reason] += decision.calls


def reset_stats() -> None:
    """Set every count to zero: calls, launches and what verify mode found."""
    with _lock:
        _folded.clear()
        for decision in _live.values():
            decision.calls = 0
    if _loaded("ops") is not None:
        _loaded("ops").reset_launch_counts()
    verify = _loaded("verify")
    if verify is not None:
        verify.reset()


def _stats() -> Stats:
    with _lock:
        counts = Counter(_folded)
        for decision in _live.values():
            counts[False, decision.backend, decision.reason] += decision.calls
    result: dict[str, Any] = {"calls": {}, "traced": {}, "launches": {}, "verify": {}}
    for (traced, backend, reason), number in counts.items():
        if number:
            result["traced" if traced else "calls"].setdefault(backend, {})[reason] = number
    if _loaded("ops") is not None:
        result["launches"] = {name: n for name, n in _loaded("ops").launch_counts().items() if n}
    verify = _loaded("verify")
    if verify is not None:
        result["verify"] = verify.results()
    return Stats(result)


def _loaded(name: str) -> Any:
    """A module of ours if something has imported it. Counting must not import the kernels."""
    return sys.modules.get(f"{__package__}.{name}")


class _CallableModule(CallableModule):
    """`from . import stats` and `torch_flashbackend.stats()` mean the same object, whichever came first."""

    def __call__(self) -> Stats:
        """What the plugin has done in this process so far: a Stats, which prints as a table."""
        return _stats()


stats = sys.modules[__name__]
stats.__class__ = _CallableModule
