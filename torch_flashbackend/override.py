"""enable() and disable(): the call hook on F.scaled_dot_product_attention, and everything that goes with switching it.

May import `_torch.py`, batch_invariance.py, cache_tag.py, decisions.py, kernel_hook.py, nested.py and integrations/ at
the top; routing, ops and the kernels are imported by the first call that gets that far. Imported by the package's
`__init__` and by autoload.py, possibly while torch itself is still being imported.

A call's way: F.scaled_dot_product_attention -> dispatcher (autocast has run) -> `hook` below, at the key AutogradCUDA,
or at BackendSelect where autograd's is not passed (inference mode) -> a Decision from the cache, or from routing ->
ops.run, or stock as if nothing were there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _torch, cache_tag, decisions, kernel_hook, nested
from .batch_invariance import on_change
from .integrations import transformers

__all__ = ["activate", "disable", "enable", "is_enabled"]

OP = "scaled_dot_product_attention"
NAME = "flashbackend"

_lock = threading.RLock()
_installed: _Installation | None = None


def enable() -> None:
    """Let torch_flashbackend run the calls of F.scaled_dot_product_attention that it runs faster; all threads, at once.

    Twice is the same as once. Takes the slot of torch.nn.attention.activate_flash_attention_impl: FA3 or FA4, if one
    of them is active there, stops being so. What torch.compile has compiled so far is dropped, and compiled again at
    its next call; its caches on disk are kept apart from those of a process without the plugin.

    Raises RuntimeError, and changes nothing, where another Python library has registered a kernel on one of the
    operators that have to be overridden.
    """
    with _lock:
        if _installed is not None:
            return
        import torch.nn.attention as attention

        before = attention.current_flash_attention_impl()
        attention.register_flash_attention_impl(NAME, register_fn=activate)
        try:
            attention.activate_flash_attention_impl(NAME)
        except BaseException:
            if before is not None:
                attention.activate_flash_attention_impl(before)
            raise


def disable() -> None:
    """Undo `enable`: every later call is PyTorch's own, in all threads. Without `enable` before, nothing happens.

    Calls that are running, and backward passes of outputs that exist already, end as they began.
    """
    with _lock:
        if _installed is None:
            return
        if torch.nn.attention.current_flash_attention_impl() == NAME:
            torch.nn.attention.restore_flash_attention_impl()
        _uninstall()


def is_enabled() -> bool:
    """Is the plugin switched on in this process?"""
    return _installed is not None


def activate() -> _Handle:
    """What torch.nn.attention.activate_flash_attention_impl("flashbackend") calls."""
    with _lock:
        _install("AutogradCUDA", "CUDA")
        assert _installed is not None
        transformers.register_when_loaded()
        return _Handle(_installed)


class _Handle:
    """torch's registry calls `remove` when another implementation is activated there, or the default restored."""

    def __init__(self, installation: _Installation) -> None:
        self._installation = installation

    def remove(self) -> None:
        with _lock:
            if _installed is self._installation:
                _uninstall()


class _Installation:
    """All that one `enable` has put in place."""

    def __init__(
        self,
        library: torch.library.Library,
        kernels: kernel_hook.KernelHook,
        nested_tensors: nested.NestedHook,
        ops: tuple[str, ...],
    ) -> None:
        self.library = library
        self.kernels = kernels
        self.nested_tensors = nested_tensors
        self.ops = ops
        self.cache_tag = cache_tag.CacheTag()


def _install(call_key: str, kernel_key: str | None) -> None:
    """Register the hooks at these dispatch keys (tests use AutogradCPU and CPU); all of it, or nothing."""
    global _installed
    if _installed is not None:
        return
    _refuse_if_taken(OP, call_key)
    _refuse_if_taken(OP, kernel_hook.BACKEND_SELECT)
    stock = _torch.kernel_handle(OP, call_key)
    library = torch.library.Library("aten", "IMPL")
    kernels = kernel_hook.KernelHook(kernel_key)
    nested_tensors = nested.NestedHook(kernel_key)
    try:
        kernels.register(_refuse_if_taken)
        hook = make_call_hook(call_key, stock, kernels.kernels)
        library.impl(OP, hook, call_key)
        if kernel_key is not None and _torch.built_for(kernel_key):
            library.impl(OP, _below_autograd(hook, stock, kernel_key), kernel_hook.BACKEND_SELECT, with_keyset=True)
        nested_tensors.register()
        installation = _Installation(library, kernels, nested_tensors, (OP, *kernels.ops))
        _forget_compiled(installation.ops)
        installation.cache_tag.set()
    except BaseException:
        nested_tensors.unregister()
        kernels.unregister()
        _torch.destroy_library(library)
        raise
    _installed = installation


def _uninstall() -> None:
    global _installed
    installation = _installed
    if installation is None:
        return
    # From here on the plugin counts as off, whatever happens below.
    _installed = None
    try:
        _torch.destroy_library(installation.library)
    finally:
        installation.nested_tensors.unregister()
        installation.kernels.unregister()
        installation.cache_tag.restore()
        transformers.forget()
        _forget_compiled(installation.ops)


def _below_autograd(hook: Callable[..., Tensor], stock: Any, key: str) -> Callable[..., Tensor]:
    """What stands at BackendSelect, for calls that pass no key of autograd: in inference mode, or in operators.

    Without it they would be the kernel hook's, after PyTorch has chosen and prepared a kernel. At the backend's own key
    it would change what torch.export makes of the function. Calls on a CPU pass it too, 5 us each in inference mode, so
    that it is not there where PyTorch has been built without the backend.
    """
    is_grad_enabled = torch.is_grad_enabled
    set_grad_enabled = torch._C._set_grad_enabled
    mark = _torch.thread_mark

    def decide(*args: Any, **kwargs: Any) -> Tensor:
        if mark.stock:
            return stock.call_boxed(_torch.ANY_KEYSET, *args, **kwargs)
        if not is_grad_enabled():
            return hook(*args, **kwargs)
        # Nobody records here, whatever the tensors require; our autograd function would.
        set_grad_enabled(False)
        try:
            return hook(*args, **kwargs)
        finally:
            set_grad_enabled(True)

    return kernel_hook.of_plain_tensors(OP, decide, key)


def _refuse_if_taken(op: str, key: str) -> None:
    if _torch.python_kernel_registered(op, key):
        raise RuntimeError(
            f"torch_flashbackend cannot be enabled: another Python library has registered a kernel for aten::{op} at "
            f"dispatch key {key} already (torch.library.Library), and only one can be there. Switch that one off first."
        )


def _forget_compiled(ops: tuple[str, ...]) -> None:
    """Drop what was compiled or looked up in the other state. decisions.py's cache goes too, and so do its counts."""
    for op in ops:
        _torch.clear_dispatch_cache(op)
    _torch.drop_compiled_code()
    decisions.forget()


def _renew_tag() -> None:
    if _installed is not None:
        _installed.cache_tag.restore()
        _installed.cache_tag.set()


on_change(_renew_tag)


def make_call_hook(
    call_key: str, stock: Any, kernels: dict[tuple[str, bool], Callable[..., Tensor]]
) -> Callable[..., Tensor]:
    """The kernel that stands in for aten::scaled_dot_product_attention at `call_key`.

    stock: the kernel that was there; kernels: those that it ends in (KernelHook.kernels). Everything that a call needs
    is bound here, once. A call that is left to stock runs the kernel itself where PyTorch would pass it the arguments
    as they are.
    """
    mark = _torch.thread_mark
    functorch_active = _torch.functorch_active
    dispatch_modes = _torch.dispatch_modes
    is_wrapper = _torch.is_wrapper
    profiler_enabled = _torch.profiler_enabled
    is_grad_enabled = torch.is_grad_enabled
    stock_boxed = stock.call_boxed
    # Stock's function is one for all keys, and does not look at them.
    ANY_KEYSET = _torch.ANY_KEYSET
    flash_enabled = _torch.flash_enabled
    efficient_enabled = _torch.efficient_enabled
    math_enabled = _torch.math_enabled
    cudnn_enabled = _torch.cudnn_enabled
    deterministic = _torch.deterministic_enabled
    priority_order = _torch.priority_order
    allows_tf32 = _torch.allows_tf32
    recent = decisions.recent
    recent_with_mask = decisions.recent_with_mask

    def look_up(*arguments: Any) -> decisions.Entry:
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = arguments
        if not decisions.is_plain(query, key, value, attn_mask):
            return decisions.decide(*arguments, entry="sdpa")
        keep_as = decisions.signature(*arguments, grad_mode=torch.is_grad_enabled(), entry=None)
        entry = decisions.cache.get(keep_as)
        if entry is None:
            entry = decisions.decide(*arguments, entry="sdpa", keep_as=keep_as)
            entry.kernel = kernels.get((entry.ends_in or "", not entry.simple))
        rest = decisions.settings(dropout_p, is_causal, scale, enable_gqa, None)
        if attn_mask is None:
            decisions.remember(recent, rest, entry, query, key, value)
        else:
            decisions.remember(recent_with_mask, rest, entry, query, key, value, attn_mask)
        return entry

    def hook(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        # This is decisions.settings and decisions.find, spelled out: two calls of Python functions are 0.3 µs.
        rest = (
            dropout_p, is_causal, scale if scale is None else (scale > 0.0, scale - scale == 0.0), enable_gqa, None,
            is_grad_enabled(), flash_enabled(), efficient_enabled(), math_enabled(), cudnn_enabled(), deterministic(),
        )  # fmt: skip
        for one in recent if attn_mask is None else recent_with_mask:
            if (
                one.rest == rest
                # Fails too where a functorch transform or inference mode is active, by the dispatch keys; for modes it
                # does not always (Dynamo's guards overlook those that say `ignore_compile_internals`).
                and (one.check(query, key, value) if attn_mask is None else one.check(query, key, value, attn_mask))
                and (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15 == one.alignment
                and one.order == priority_order()
                and (one.tf32 is None or one.tf32 == allows_tf32())
                and forward_ad._current_level < 0
                and not dispatch_modes()
            ):
                entry = one.entry
                known = True
                break
        else:
            if functorch_active() or forward_ad._current_level >= 0:
                # Our autograd function would lose tangents there, without a word.
                try:
                    if not _torch.nested_derivatives():
                        return stock_boxed(
                            ANY_KEYSET, query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                            enable_gqa=enable_gqa,
                        )  # fmt: skip
                except NotImplementedError:
                    pass
                # Forward-mode AD and second derivatives, which stock's fused kernels have no formulas for; the math
                # path is made of operations that do.
                decision = decisions.decide(
                    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, entry="sdpa",
                    allowed=("math", "stock"),
                ).decision  # fmt: skip
                return _run(decision, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            if dispatch_modes() and _by_stocks_name(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            ):
                # Not marked as left to stock: what it ends in is for the kernel hook to judge, where there is one.
                return stock_boxed(
                    ANY_KEYSET, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
            known = False
            entry = look_up(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        entry.decision.calls += 1
        if entry.taken:
            try:
                if known and entry.unobserved is not None and not profiler_enabled():
                    out = entry.unobserved(
                        query, key, value, attn_mask, dropout_p, is_causal, scale, entry.decision.layout
                    )
                elif entry.run is not None:
                    out = entry.run(
                        query, key, value, attn_mask, dropout_p, is_causal, scale, layout=entry.decision.layout
                    )
                else:
                    out = _run(entry.decision, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            except decisions.kernel_failures() as error:
                # Nothing has run yet where these are raised. Whatever else goes wrong is the caller's to see.
                entry = decisions.after_failure(entry, error)
            else:
                if decisions.verify.share:
                    decisions.verify.maybe_check(
                        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, out
                    )
                return out
        if not known and (is_wrapper(query) or is_wrapper(key) or is_wrapper(value)):
            # The type's own rules come first, and what they end in is the kernel hook's to judge: ring attention, say.
            return stock_boxed(
                ANY_KEYSET, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        # A profiler wants to see all of stock's operators.
        if known and entry.kernel is not None and not profiler_enabled():
            return entry.kernel(query, key, value, is_causal, scale)
        mark.stock = True
        try:
            return stock_boxed(
                ANY_KEYSET, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        finally:
            mark.stock = False

    return hook


def _by_stocks_name(*arguments: Any) -> bool:
    """Must this call appear under the name of stock's operators, whoever runs them?

    Where a program is packaged for processes that may not have us; and under selective activation checkpointing, whose
    policies know attention by these names.
    """
    if _torch.packaging():
        return True
    if not _torch.selective_checkpoint():
        return False
    from .problem import Problem

    # The math path is many operators, and none that such a policy would name.
    return Problem.from_tensors(*arguments).stock_backend not in ("math", "error")


def _run(decision: Any, *arguments: Any) -> Tensor:
    from . import direct

    return direct.run(decision, *arguments)
