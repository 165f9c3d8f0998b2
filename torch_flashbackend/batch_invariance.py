"""One switch: the bits of a sequence's attention do not depend on the rest of its batch.

May import autoload.py and `_torch.py`. Imported by whatever chooses by the size of a batch: problem.py, and the
launchers in ``kernels/``, which ask `planned_batch` how many batches to choose for. Each row of a result is computed by
itself; what a batch changes are choices: who runs the call, the tile, and among how many blocks keys are split, which
is the order in which a row's sums are added up. With the switch on all of them are made as for a batch of one, so that
a sequence has the bits that it has alone, at the cost of choices that suit a batch of one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

from . import _torch, autoload

__all__ = ["is_batch_invariant", "on_change", "planned_batch", "planned_length", "set_batch_invariant"]

VARIABLE = "TORCH_FLASHBACKEND_BATCH_INVARIANT"
# What the tiles of packed sequences are chosen for, in place of their mean length.
PACKED_LENGTH = 4096


def _from_environment() -> bool:
    setting = os.environ.get(VARIABLE, "").strip()
    if setting.lower() not in autoload.ON | autoload.OFF:
        message = f"{VARIABLE}={setting!r} is not understood and is taken as off (known: 1, true, on; 0, false, off)"
        warnings.warn(f"torch_flashbackend: {message}", RuntimeWarning, stacklevel=2)
    return setting.lower() in autoload.ON


_enabled = _from_environment()
_forget: list[Callable[[], None]] = []


def set_batch_invariant(enabled: bool = True) -> None:
    """Should the bits of a sequence's attention be independent of the rest of its batch, in all threads?

    Holds for the forward of every call that our kernels can run, which then run it whether or not they are faster:
    query [B, H, Sq, D] of any batch size B at the same Sq and Sk, packed sequences beside any others, and caches of
    keys and values. Gradients as well, under `torch.use_deterministic_algorithms(True)`. A padded length is part of a
    shape, not of the batch: where a batch is padded to its longest sequence, packed sequences have the guarantee.
    What torch.compile has compiled is dropped; a CUDA graph replays what it has recorded.
    """
    global _enabled
    if enabled is not True and enabled is not False:
        raise TypeError(f"set_batch_invariant takes True or False, got {enabled!r}")
    if enabled == _enabled:
        return
    _enabled = enabled
    for forget in _forget:
        forget()
    _torch.drop_compiled_code()


def is_batch_invariant() -> bool:
    """Has `set_batch_invariant`, or the environment variable, switched it on?"""
    return _enabled


def planned_batch(batch: int) -> int:
    """How many batches to make a choice for: as many as there are, or one."""
    return 1 if _enabled else batch


def planned_length(mean: int) -> int:
    """Which length of packed sequences to make a choice for: their mean, or the same for all."""
    return PACKED_LENGTH if _enabled else mean


def on_change(forget: Callable[[], None]) -> None:
    """Call this whenever the switch is turned: choices that were kept are no longer right."""
    _forget.append(forget)
