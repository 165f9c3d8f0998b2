"""What a call needs beside its pointers, worked out once and found again by the next call like it.

May import torch, `_torch.py` and ``KernelUnavailable``. Imported by the launchers in ``kernels/`` and by ``ops``. Two
look-ups: `Recent`, some calls of late, each compared with in one step; and `Plans`, all of them by what they depend on.
Neither keeps a tensor alive, and both are bounded. Several threads may look up at once: at worst two make the same
plan. `Repeat` is what is kept of a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import _torch
from .kernels import KernelUnavailable

__all__ = ["MAX_PLANS", "MAX_RECENT", "Plans", "Recent", "Repeat"]

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
        for known, is_like, plan in self._recent:
            if known == rest and is_like(*tensors):
                return plan if _aligned(tensors) else None
        return None

    def remember(self, rest: tuple[Any, ...], tensors: Sequence[torch.Tensor], plan: Any) -> None:
        """Let `find` find this plan. That costs 20 us."""
        if not _aligned(tensors):
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


class Repeat:
    """A backward and the gradients that it fills, once more for tensors that differ in their addresses alone."""

    __slots__ = ("_grads", "_plan", "_wanted")

    def __init__(
        self, plan: Callable[..., Any], grads: tuple[torch.Tensor | None, ...], wanted: Sequence[bool]
    ) -> None:
        """plan: fills gradients, and returns the mask's where it computes one; see `__call__` for its arguments.

        grads: of query, key and value, None where the plan takes none; wanted: those of query, key, value and mask
        asked for.
        """
        self._plan = plan
        self._wanted = wanted
        self._grads = [None if grad is None else ((*grad.shape,), grad.stride(), grad.dtype) for grad in grads]

    def prepared(self, query: torch.Tensor) -> Callable[..., tuple[torch.Tensor | None, ...]]:
        """The same in less time, where the plan knows how. query: any that it will be called with."""
        prepare = getattr(self._plan, "prepared", None)
        prepared = None if prepare is None else prepare(self._grads, self._wanted, query, self)
        return self if prepared is None else prepared

    def __call__(
        self, grad_out, query, key, value, out, logsumexp, mask=None, seed=None
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of query, key, value and mask, None for those not asked for.

        mask and seed where the first call had them. Raises KernelUnavailable before any launch where an address is no
        multiple of 16 bytes.
        """
        vectors = (grad_out, query, key, value, out) if mask is None else (grad_out, query, key, value, out, mask)
        if not _aligned(vectors):
            raise KernelUnavailable("this call was prepared for addresses that are multiples of 16 bytes")
        empty = _torch.allocator(query)
        grad_query, grad_key, grad_value = [None if of is None else empty(*of) for of in self._grads]
        grad_mask = self._plan(
            query, key, value, out, logsumexp, grad_out, grad_query, grad_key, grad_value, mask, seed
        )  # fmt: skip
        _, key_wanted, value_wanted, mask_wanted = self._wanted
        return (
            grad_query,
            grad_key if key_wanted else None,
            grad_value if value_wanted else None,
            grad_mask.view(mask.shape) if mask_wanted else None,
        )


def _aligned(tensors: Sequence[torch.Tensor]) -> bool:
    """Are the addresses multiples of 16 bytes?"""
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    return not addresses & 15


def _signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a plan depends on: sizes, strides, type and whether the pointer is aligned to 16 bytes."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() & 15
