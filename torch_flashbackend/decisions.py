"""The cache between a call and its Decision: routing costs tens of microseconds, a look-up here about two.

Two levels: `recent`, the last few calls, each compared with in one step; and `cache`, a dictionary of all.

May import `_torch.py` and batch_invariance.py at the top, and policy, problem, routing and ops when the first call
arrives, so that enabling the plugin loads none of them. Imported by override, kernel_hook and selection.

The dictionary's key holds everything that a routing rule may look at (problem.py lists it): a rule that reads something
new needs that in `signature` and `settings`, or it will be answered for another call.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _torch
from .batch_invariance import on_change
from .integrations import dtensor

__all__ = [
    "CAPACITY",
    "Entry",
    "after_failure",
    "decide",
    "first_line",
    "find",
    "forget",
    "is_plain",
    "keep",
    "kernel_failures",
    "remember",
    "settings",
    "signature",
    "warn_once",
]

# A training run meets a few dozen keys, a server with free lengths a few thousand. At about 1 kB each.
CAPACITY = 8192
RECENT = 4
# Steps of decoding whose keys are as many but for this are decided as one: a cache that grows has new sizes every step.
GROWTH = 64
PLAIN_TYPES = (Tensor, torch.nn.Parameter)

_float32 = torch.float32
_flash_enabled = _torch.flash_enabled
_efficient_enabled = _torch.efficient_enabled
_math_enabled = _torch.math_enabled
_cudnn_enabled = _torch.cudnn_enabled
_deterministic = _torch.deterministic_enabled
_priority_order = _torch.priority_order
_allows_tf32 = _torch.allows_tf32

cache: dict[tuple[Any, ...], Entry]
# Decisions by `_steps_like`, and whether a gradient is needed.
_steps: dict[tuple[Any, ...] | None, tuple[Any, bool]] = {}
# The module verify.py, from the first decision on: no call is taken before.
verify: Any = None
_lock = threading.Lock()
_warned: set[str] = set()


class Entry:
    """What the hooks need to know about one key.

    decision: routing's answer. taken: it is not stock. run: what to call for a taken call that needs no change of rank
    or batch, else None. unobserved: a shorter way for calls that no dispatch mode or profiler watches, where run has
    one. simple: no gradient is needed. ends_in: for a call that stays stock's, "flash", "cudnn" or
    "efficient" if PyTorch passes the arguments to that kernel as they are, else None. kernel: that kernel, or that of
    autograd around it, which the call hook puts there.
    """

    __slots__ = ("decision", "ends_in", "kernel", "run", "simple", "taken", "unobserved")

    def __init__(self, decision: Any, simple: bool, run: Callable[..., Any] | None, ends_in: str | None = None) -> None:
        self.decision = decision
        self.taken = decision.backend != "stock"
        self.run = run
        self.unobserved: Callable[..., Any] | None = getattr(run, "unobserved", None)
        self.simple = simple
        self.ends_in = ends_in
        self.kernel: Callable[..., Any] | None = None


cache = {}


class Recent:
    """A call of late, in a form that the next one is compared with faster than it is looked up.

    check: are these tensors like those (`_torch.tensor_guard`)? alignment: the last bits of their addresses.
    rest: everything else that counts, as `settings` gives it.
    """

    __slots__ = ("alignment", "check", "entry", "order", "rest", "tf32")

    def __init__(
        self, check: Callable[..., bool], alignment: int, rest: tuple[Any, ...], tf32: Any, entry: Entry
    ) -> None:
        self.check = check
        self.alignment = alignment
        self.rest = rest
        self.order = _priority_order()
        self.tf32 = tf32
        self.entry = entry


# Of calls without and with a mask. A model's layers all make the same call, or two in turn.
recent: list[Recent] = []
recent_with_mask: list[Recent] = []


def settings(dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool, entry: Any) -> tuple[Any, ...]:
    """What counts for a decision beside the tensors. A scale counts by its sign and by whether it is finite."""
    return (
        dropout_p,
        is_causal,
        scale if scale is None else (scale > 0.0, scale - scale == 0.0),
        enable_gqa,
        entry,
        torch.is_grad_enabled(),
        _flash_enabled(),
        _efficient_enabled(),
        _math_enabled(),
        _cudnn_enabled(),
        _deterministic(),
    )


def _alignment(query: Tensor, key: Tensor, value: Tensor) -> int:
    return (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15


def find(among: list[Recent], rest: tuple[Any, ...], *tensors: Tensor) -> Entry | None:
    """The decision of a recent call like this one. override.py has the same lines, without the call."""
    for one in among:
        if (
            one.rest == rest
            and one.check(*tensors)
            and one.alignment == _alignment(*tensors[:3])
            and one.order == _priority_order()
            and (one.tf32 is None or one.tf32 == _allows_tf32())
        ):
            return one.entry
    return None


def remember(among: list[Recent], rest: tuple[Any, ...], entry: Entry, *tensors: Tensor) -> None:
    """Let `find` find this call."""
    check = _torch.tensor_guard(tensors)
    if check is not None:
        tf32 = _allows_tf32() if tensors[0].dtype is _float32 else None
        with _lock:
            among.insert(0, Recent(check, _alignment(*tensors[:3]), rest, tf32, entry))
            del among[RECENT:]


def is_plain(*tensors: Tensor | None) -> bool:
    """Are these torch's own kind of tensor, with numbers for sizes and an address, and is nothing tracing them?"""
    if _torch.dispatch_modes():
        return False
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) not in PLAIN_TYPES
            or tensor.layout is not torch.strided
            or tensor.is_nested
            or _torch.is_functional_tensor(tensor)
            or tensor.is_neg()
            or tensor.is_conj()
            or tensor._is_zerotensor()
        ):
            return False
    return True


def signature(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    *,
    grad_mode: bool,
    entry: Any,
) -> tuple[Any, ...]:
    """The cache's key for a call on tensors with plain, known sizes. About 1.3 µs.

    entry: what tells apart callers whose decisions differ: an op's name, or the names of the allowed backends.
    A scale counts by its sign and by whether it is finite, and pointers by whether they are multiples of 16 bytes.
    """
    dtype = query.dtype
    if attn_mask is None:
        mask = None
        requires_grad = grad_mode and (query.requires_grad or key.requires_grad or value.requires_grad)
    else:
        mask_grad = attn_mask.requires_grad
        mask = (
            attn_mask.shape,
            attn_mask.stride(),
            attn_mask.dtype,
            attn_mask.device,
            mask_grad,
        )
        requires_grad = grad_mode and (query.requires_grad or key.requires_grad or value.requires_grad or mask_grad)
    return (
        query.shape,
        key.shape,
        value.shape,
        query.stride(),
        key.stride(),
        value.stride(),
        dtype,
        key.dtype,
        value.dtype,
        _alignment(query, key, value),
        query.get_device(),
        key.get_device(),
        value.get_device(),
        mask,
        dropout_p,
        is_causal,
        scale if scale is None else (scale > 0.0, scale - scale == 0.0),
        enable_gqa,
        requires_grad,
        _flash_enabled(),
        _efficient_enabled(),
        _math_enabled(),
        _cudnn_enabled(),
        _deterministic(),
        tuple(_priority_order()),
        _allows_tf32() if dtype is _float32 else None,
        entry,
    )


def decide(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    *,
    entry: str,
    allowed: tuple[str, ...] | None = None,
    keep_as: tuple[Any, ...] | None = None,
) -> Entry:
    """Ask routing. keep_as: the key under which to remember the answer; None for a call that is being traced.

    Raises RuntimeError when `allowed` is given and none of these backends takes the call.
    """
    global verify
    from . import policy, routing, stats
    from . import verify as verify_module
    from .problem import Problem

    verify = verify_module
    like = None
    # A traced call is unlike the next; dropout brings a seed; on a CPU the operators run the math path; and a key does
    # not say which of the addresses are no multiples of 16 bytes.
    keeps = keep_as is not None and dropout_p == 0.0 and query.is_cuda and not _alignment(query, key, value)
    if keep_as is not None and attn_mask is None and query.dim() == 4 and query.shape[2] <= policy.DECODE_SEQLEN:
        like = _steps_like(query, key, value, keep_as)
        earlier = _steps.get(like)  # nothing is there for None
        if earlier is not None:
            decision, requires_grad = earlier
            decision = dataclasses.replace(decision, calls=0)  # each key's calls are counted by one of its own
            return keep(Entry(decision, not requires_grad, _runner(decision.backend, requires_grad, keeps)), keep_as)
    described = (query, key, value, attn_mask)
    if dtensor.present(*described):
        # One rank's share of the call, where our operators may run on it; else the DTensors, which nothing here takes.
        described = dtensor.local_arguments(query, key, value, attn_mask, dropout_p) or described
    problem = Problem.from_tensors(*described, dropout_p, is_causal, scale, enable_gqa, entry=entry)
    if described[0] is not query and torch.is_grad_enabled():
        requires_grad = any(tensor is not None and tensor.requires_grad for tensor in (query, key, value, attn_mask))
        problem = dataclasses.replace(problem, requires_grad=requires_grad)
    decision = routing.decide(problem, allowed)
    run = None
    if (
        decision.backend in routing.KERNELS
        and query.dim() == key.dim() == value.dim() == 4
        and _same_layout(query, key, value)
    ):
        # What is being traced, and has no key, comes with other tensors each time.
        if (attn_mask is None or attn_mask.dim() <= 4) and (keep_as is not None or decision.backend == "triton"):
            run = _runner(decision.backend, problem.requires_grad, keeps)
    simple = not problem.requires_grad
    ends_in = _passed_on_to(problem) if decision.backend == "stock" and keep_as is not None else None
    result = Entry(decision, simple, run, ends_in)
    if keep_as is None:
        stats.register(decision, traced=True)
        return result
    if like is not None and run is not None:
        _steps[like] = decision, problem.requires_grad
    return keep(result, keep_as)


def _steps_like(query: Tensor, key: Tensor, value: Tensor, keep_as: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What calls have in common that are decided as one, for a step of decoding over keys without gaps; else None.

    What our kernels take is the same for all of them, and what PyTorch would have run. (Of one key it may not be; nor
    of rows that are no multiple of 16 bytes, where the number of keys decides how heads are aligned.)
    """
    shape = key.shape
    if (
        key.dim() != 4
        or shape[:3] != value.shape[:3]
        or shape[2] <= GROWTH
        or not (key.is_contiguous() and value.is_contiguous())
        or (shape[3] * key.element_size() | value.shape[3] * value.element_size()) & 15
    ):
        return None
    # All of the signature but what says how many keys there are.
    _, _, _, query_stride, _, _, *rest = keep_as
    return (query.shape, query_stride, shape[:2], -(-shape[2] // GROWTH), shape[3], value.shape[3], *rest)


def keep(entry: Entry, keep_as: tuple[Any, ...]) -> Entry:
    """Remember an answer, and count its calls from now on."""
    from . import stats

    with _lock:
        if len(cache) >= CAPACITY:
            _clear()
        cache[keep_as] = entry
        stats.register(entry.decision)
    return entry


def _runner(backend: str, requires_grad: bool, keeps: bool) -> Callable[..., Any]:
    """keeps: may what one call has worked out be kept for the next?"""
    from . import ops

    return ops.ReadyRun(backend, requires_grad) if keeps else functools.partial(ops.run, backend=backend)


def _passed_on_to(problem: Any) -> str | None:
    """The fused kernel of stock's that gets query, key and value unchanged, in all versions supported.

    Not where stock prepares a mask, pads head_dim (flash, to a multiple of 8) or has rules for grouped heads.
    """
    query, key, value = problem.query_shape, problem.key_shape, problem.value_shape
    if (
        problem.mask is None
        and problem.dropout_p == 0.0
        and not problem.enable_gqa
        and problem.aligned
        and len(query) == len(key) == len(value) == 4
        and query[:2] == key[:2] == value[:2]
        and key[2] == value[2]
        and query[3] == key[3] == value[3]
        and query[3] % 8 == 0
        and 0 not in (*query, *key)
        and problem.stock_backend in ("flash", "cudnn", "efficient")
    ):
        return problem.stock_backend
    return None


def _same_layout(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Do the kernels take these rank-4 tensors as they are: one batch size, and heads of key and value that agree?"""
    return bool(
        query.shape[0] == key.shape[0] == value.shape[0]
        and key.shape[1] == value.shape[1]
        and key.shape[1] <= query.shape[1]
    )


def after_failure(entry: Entry, error: BaseException) -> Entry:
    """The same call, left to stock because a kernel could not be had: for good, or, out of memory, this once.

    Warns once per reason.
    """
    backend, reason = entry.decision.backend, first_line(error)
    decision = dataclasses.replace(
        entry.decision, backend="stock", reason=f"{backend} kernel failed: {reason}", calls=1
    )
    result = Entry(decision, entry.simple, None)
    if isinstance(error, torch.OutOfMemoryError):
        warn_once(f"no memory for the workspace of the {backend} kernel, PyTorch runs such calls instead")
        return result
    warn_once(f"the {backend} kernel is not available, PyTorch runs the call instead: {reason}")
    from . import stats

    with _lock:
        # A short walk, once per kernel that fails. A call that is being traced has no key.
        for keep_as in [key for key, kept in cache.items() if kept is entry]:
            stats.retire(entry.decision)
            cache[keep_as] = result
            stats.register(decision)
        recent.clear()
        recent_with_mask.clear()
    return result


def kernel_failures() -> tuple[type[BaseException], ...]:
    """What ops raises where a kernel cannot be had and nothing has run: for `except`, which asks only when it must."""
    from .kernels import KernelUnavailable

    return (KernelUnavailable, torch.OutOfMemoryError)


def first_line(error: BaseException) -> str:
    """An exception's message without its traceback of C++ frames."""
    return (str(error) or type(error).__name__).splitlines()[0]


def forget() -> None:
    """Empty the cache: settings outside the key have changed. Counts go to stats."""
    with _lock:
        _clear()


on_change(forget)


def warn_once(message: str) -> None:
    """One RuntimeWarning per text and process."""
    import warnings

    if message not in _warned:
        _warned.add(message)
        warnings.warn(f"torch_flashbackend: {message}", RuntimeWarning, stacklevel=3)


def _clear() -> None:
    if not cache:
        return
    from . import stats

    for entry in list(cache.values()):
        stats.retire(entry.decision)
    cache.clear()
    _steps.clear()
    recent.clear()
    recent_with_mask.clear()
