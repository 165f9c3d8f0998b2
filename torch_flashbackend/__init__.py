"""The public names of torch_flashbackend, each loaded when it is first used (PEP 562).

Importing this package costs next to nothing: `import torch` itself imports it, through the entry point in autoload.py,
while torch is still half imported. So nothing may be imported here, torch included; with one exception, at the end.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batch_invariance import is_batch_invariant, set_batch_invariant
    from .direct import attention
    from .explain import explain
    from .override import disable, enable, is_enabled
    from .precompile import warmup
    from .selection import sdpa_backend
    from .stats import stats
    from .varlen import attention_varlen
    from .verify import verify

__version__ = "0.1.0"
__all__ = [
    "attention", "attention_varlen", "disable", "enable", "explain", "is_batch_invariant", "is_enabled", "sdpa_backend",
    "set_batch_invariant", "stats", "verify", "warmup",
]  # fmt: skip

_HOME = {
    "attention": "direct",
    "attention_varlen": "varlen",
    "disable": "override",
    "enable": "override",
    "explain": "explain",
    "is_batch_invariant": "batch_invariance",
    "is_enabled": "override",
    "sdpa_backend": "selection",
    "set_batch_invariant": "batch_invariance",
    "stats": "stats",
    "verify": "verify",
    "warmup": "precompile",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    # Importing the submodule `attention` has just bound that name to the module; this puts the function there.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _activate() -> Any:
    from . import override

    return override.activate()


def _offer_to_torch() -> None:
    """Make torch.nn.attention.activate_flash_attention_impl("flashbackend") known: one entry in a dictionary."""
    attention = sys.modules.get("torch.nn.attention")
    register = getattr(attention, "register_flash_attention_impl", None)
    if register is not None:
        register("flashbackend", register_fn=_activate)


_offer_to_torch()

# A program that imports a module of ours before torch: that module would import torch, torch the entry point, and this
# the same modules again, half imported as they are by then. So torch goes first where the variable asks for the plugin.
if "torch" not in sys.modules and os.environ.get("TORCH_FLASHBACKEND"):
    importlib.import_module("torch")
