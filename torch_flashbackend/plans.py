"""What a call needs beside its pointers, worked out once and found again by the next call like it.

May import torch and `_torch.py`. Imported by the launchers in ``kernels/``. Two look-ups: `Recent`, some calls of late,
each compared with in one step; and `Plans`, all of them by what they depend on. Neither keeps a tensor alive, and both
are bounded. Several threads may look up at once: at worst two make the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import _torch

__all__ = ["MAX_PLANS", "MAX_RECENT", "Plans", "Recent"]

MAX_PLANS = 4096
MAX_RECENT = 16


class Recent:
    """Plans used last, for calls whose tensors are all aligned to 16 bytes.

    One look at all tensors of a backward from C++ costs 0.5 us, their signatures cost 8.
    """

    __slots__ = ("_recent",)

    def __init__(self) -> None:
        self._recent: tuple[tuple[Any, ...], ...] = ()

    def find(self, rest: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> Any:
        """The plan of a recent call like this one, or None. rest: what a plan depends on beside the tensors."""
        plan = self.find_but_for_alignment(rest, tensors)
        if plan is not None:
            addresses = 0
            for tensor in tensors:
                addresses |= tensor.data_ptr()
            if addresses & 15:
                return None
        return plan

    def find_but_for_alignment(self, rest: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> Any:
        """The same, for a plan that looks at the addresses itself."""
        for known, is_like, plan in self._recent:
            if known == rest and is_like(*tensors):
                return plan
        return None

    def remember(self, rest: tuple[Any, ...], tensors: Sequence[torch.Tensor], plan: Any) -> None:
        """Let `find` find this plan. That costs 20 us."""
        if any(tensor.data_ptr() & 15 for tensor in tensors):
            return
        is_like = _torch.tensor_guard(tuple(tensors))
        if is_like is not None:
            self._recent = ((rest, is_like, plan), *self._recent[: MAX_RECENT - 1])

    def clear(self) -> None:
        """Forget them."""
        self._recent = ()


class Plans(dict):  # type: ignore[type-arg]
    """Plans by all that they depend on, and before them those used last."""

    def __init__(self) -> None:
        super().__init__()
        self._recent = Recent()
        self._times: dict[tuple[Any, ...], int] = {}
        self.find = self._recent.find

    def look_up(self, rest: tuple[Any, ...], tensors: Sequence[torch.Tensor], make: Callable[[], Any]) -> Any:
        """The plan of any call, made where there is none; it becomes a recent one.

        Of a plan made before only every eighth time: more calls may take turns than are recent.
        """
        key = (*map(_signature, tensors), *rest, tensors[0].device)
        plan = self.get(key)
        if plan is None:
            if len(self) >= MAX_PLANS:
                self.clear()
            plan = self[key] = make()
        self._times[key] = times = self._times.get(key, -1) + 1
        if times % 8 == 0:
            self._recent.remember(rest, tensors, plan)
        return plan

    def clear(self) -> None:
        """Forget all."""
        super().clear()
        self._recent.clear()
        self._times.clear()


def _signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a plan depends on: sizes, strides, type and whether the pointer is aligned to 16 bytes."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() & 15
