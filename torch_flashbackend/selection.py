"""sdpa_backend(...): choose by hand, per thread and per block of code, what runs F.scaled_dot_product_attention.

May import `_torch.py`, decisions.py, direct.py, which defines the operator flashbackend::sdpa, and kernel_hook.py, for
names. Imported by the package's `__init__`.

A TorchFunctionMode and not a thread-local or a context variable: Dynamo guards on the stack of these modes and on their
attributes, so that one function compiled outside and called inside, or compiled with the block in its middle, always
runs what the block says. The mode turns the call into an operator that carries the names as an argument, so that they
are part of the graph and of the keys of every cache.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode

from . import _torch, decisions, direct, kernel_hook

__all__ = ["sdpa_backend"]

P = ParamSpec("P")
R = TypeVar("R")

KNOWN = ("cuda", "triton", "math", "stock")
_F_SDPA = torch.nn.functional.scaled_dot_product_attention
_ATEN_SDPA = torch.ops.aten.scaled_dot_product_attention
_ATEN_SDPA_DEFAULT = torch.ops.aten.scaled_dot_product_attention.default
_SDPA = torch.ops.flashbackend.sdpa.default
_PLAIN_TYPES = decisions.PLAIN_TYPES
_is_compiling = torch.compiler.is_compiling
# Sizes are tensors then, and what Python does with them would not be in the traced program.
_is_tracing = torch.jit.is_tracing
_HOOKED = frozenset(
    operator
    for name in (*kernel_hook.FORWARDS, *kernel_hook.BACKWARDS.values())
    for operator in (getattr(torch.ops.aten, name), getattr(torch.ops.aten, name).default)
)


class sdpa_backend(TorchFunctionMode):
    """Run F.scaled_dot_product_attention on the first of these backends that takes the call. No measurement is asked.

    backends: in order of preference. "cuda": our kernels for Hopper GPUs (compute capability 9.0). "triton": our
        portable kernels, on NVIDIA (compute capability 8.0 or later) and AMD GPUs.
        "math": plain PyTorch operations with the same semantics, on any device. "stock": what PyTorch would run.

        with sdpa_backend("triton", "stock"):
            y = model(x)

        @sdpa_backend("math")
        def check(x): ...

    It holds for this thread and nests, the innermost block winning; it ends with the block, also by an exception; it
    works whether or not the plugin is enabled, and around and inside functions compiled by torch.compile, fullgraph
    included. torch.nn.attention.sdpa_kernel is honoured: "cuda" and "triton" count as FLASH_ATTENTION.
    It covers backward passes, which run what the forward has chosen. Non-reentrant activation checkpointing recomputes
    outside the block: pass `context_fn=lambda: (sdpa_backend(...), sdpa_backend(...))` to torch.utils.checkpoint.
    It does not cover calls that skip F.scaled_dot_product_attention, such as torch.ops.aten._flash_attention_forward;
    and a program compiled with "stock" holds stock's operators, which an enabled plugin may run faster where no such
    block is open, and in backward passes.

    Each call inside raises RuntimeError, with the condition that failed for each backend, when none takes it.
    Raises ValueError for a name that does not exist, or no name.
    """

    def __init__(self, *backends: str) -> None:
        super().__init__()
        for name in backends:
            if name not in KNOWN:
                raise ValueError(f"there is no backend {name!r}; choose among {', '.join(KNOWN)}")
        if not backends:
            raise ValueError(f"name at least one backend, in order of preference: {', '.join(KNOWN)}")
        self.backends = ",".join(backends)
        self.without_ours = not {"cuda", "triton"} & set(backends)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is _F_SDPA or func is _ATEN_SDPA or func is _ATEN_SDPA_DEFAULT:
            if types and any(issubclass(kind, CausalBias) for kind in types):
                # It stands for a mask or is_causal and says itself which, by calling the function once more.
                with self:
                    return CausalBias.__torch_function__(func, types, args, kwargs)
            return _rewritten(self.backends, func, *args, **kwargs)
        if self.without_ours and not torch.compiler.is_compiling() and func in _HOOKED:
            # From code that was compiled in such a block: the kernel hook must not judge it.
            return _torch.as_stock(func, *args, **kwargs)
        return func(*args, **kwargs)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate: the choice holds while `function` runs.

        Raises TypeError for generator and coroutine functions, whose bodies run after the call has returned.
        """
        later = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(is_later(function) for is_later in later):
            raise TypeError(f"sdpa_backend cannot decorate {function!r}, which runs after its call: use it inside")
        backends = self.backends.split(",")

        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            with sdpa_backend(*backends):
                return function(*args, **kwargs)

        return wrapped

    def __repr__(self) -> str:
        return f"sdpa_backend({', '.join(repr(name) for name in self.backends.split(','))})"


@functools.cache
def _names(backends: str) -> tuple[str, ...]:
    return tuple(backends.split(","))


def _rewritten(
    backends: str,
    func: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if query.is_nested or key.is_nested or value.is_nested:
        # Nested tensors have rules of their own for this function and none for ours.
        names = backends.split(",")
        if "stock" not in names:
            raise RuntimeError(f'{backends}: nested tensors are not supported; add "stock" to sdpa_backend(...)')
        if "triton" not in names[: names.index("stock")] and not torch.compiler.is_compiling():
            func = functools.partial(_torch.as_stock, func)
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    arguments = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    # Where nobody could notice, past the dispatcher: what the operator does costs 5 us less without it.
    if (
        type(query) in _PLAIN_TYPES
        and type(key) in _PLAIN_TYPES
        and type(value) in _PLAIN_TYPES
        and not _is_compiling()
        and not _is_tracing()
        and not _torch.dispatch_modes()
        and not _torch.function_modes()
        and not _torch.functorch_active()
        and not _torch.any_autocast()
        and not _torch.profiler_enabled()
    ):
        return direct.call(*arguments, _names(backends), False)
    return _SDPA(*arguments, backends)
