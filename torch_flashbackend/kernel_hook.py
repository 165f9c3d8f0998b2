"""The kernel hook: stock's fused attention kernels, and their backwards, replaced below autograd where ours are faster.

May import `_torch.py`, decisions.py, packed.py and reference.py at the top, ops.py when a call is taken. Imported by
override.py.

Calls that do not pass F.scaled_dot_product_attention, or pass it as something else than ordinary tensors, arrive here:
nested tensors, vmap, context parallel, programs compiled while the plugin was off, and who calls
torch.ops.aten._scaled_dot_product_flash_attention by name. PyTorch's autograd, fake tensors, DTensor and functorch keep
working around the operators, so each one must be answered exactly as its schema and its meta function say
(torch/_meta_registrations.py): shapes, strides, dtypes, padding, and the outputs that are no tensor.

A forward of ours may meet stock's backward and the other way round, so both sides write and read stock's logsumexp.
For a row with every key masked that is +inf in efficient's and flash's, -inf in ours: written as stock's, read as
either.

What costs a call that is not taken least: a hook is a Python call around a kernel of C++, 5 µs. So
- a call that the call hook has left to stock is marked, and only passed on here; and the most common kind of it,
  without a mask, does not come here at all (`KernelHook.kernels`);
- the three operators that F.scaled_dot_product_attention ends in are hooked at BackendSelect, a key between autograd
  and the backend that every call passes: autograd's kernel, which calls the operator once more for the keys that it
  was given, then finds stock's kernel still in place at the backend's own key;
- no backward is hooked until a forward of the same kind has been taken: a program of which nothing is taken never pays.
Dropout is stock's here: its seed and offset come out of the operators in stock's own generator's terms.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _torch, decisions, packed, reference

__all__ = ["BACKEND_SELECT", "BACKWARDS", "FORWARDS", "KernelHook", "of_plain_tensors"]

FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
CUDNN = "_scaled_dot_product_cudnn_attention"
FLASH_FORWARD = "_flash_attention_forward"
EFFICIENT_FORWARD = "_efficient_attention_forward"
FORWARDS = (FLASH, EFFICIENT, CUDNN, FLASH_FORWARD, EFFICIENT_FORWARD)
AT_BACKEND_SELECT = (FLASH, EFFICIENT, CUDNN)
BACKEND_SELECT = "BackendSelect"
# By the forward that makes hooking them worth while.
BACKWARDS = {
    FLASH: "_scaled_dot_product_flash_attention_backward",
    EFFICIENT: "_scaled_dot_product_efficient_attention_backward",
    CUDNN: "_scaled_dot_product_cudnn_attention_backward",
    FLASH_FORWARD: "_flash_attention_backward",
    EFFICIENT_FORWARD: "_efficient_attention_backward",
}
# The efficient kernel pads each row of its logsumexp to this many entries, and its bias gradient's rows to that many.
LOGSUMEXP_ALIGNMENT = 32
BIAS_ALIGNMENT = 16

_TRAINING = frozenset(BACKWARDS.values())
_mark = _torch.thread_mark
# Stock's kernels do not look at the key set that they are given.
_any_keyset = _torch.ANY_KEYSET
_flash_enabled = _torch.flash_enabled


class KernelHook:
    """The hooks on stock's kernels at one dispatch key: CUDA, which ROCm builds use as well."""

    def __init__(self, key: str | None) -> None:
        """key: None hooks nothing."""
        self.key = key
        self._library: torch.library.Library | None = None
        self._lock = threading.Lock()
        self._hooked: list[str] = []
        self.kernels: dict[tuple[str, bool], Callable[..., Tensor]] = {}
        """Stock's forward kernels with autograd's around them, by backend and by whether a gradient is needed, as
        `kernel(query, key, value, is_causal, scale) -> output` without mask or dropout. The call hook calls them for
        calls that stay stock's: past the composite function, which would call them through the dispatcher and so
        through the hooks here, once more into Python. Autograd's for calls without gradients too: what the kernel
        itself calls then skips autograd, which saves more than it costs."""

    @property
    def ops(self) -> tuple[str, ...]:
        """Names of the aten ops that this may override, now or later."""
        return (*FORWARDS, *BACKWARDS.values()) if self.key is not None else ()

    def register(self, refuse_if_taken: Callable[[str, str], None]) -> None:
        """Hook the forwards. refuse_if_taken(op, key) raises where another library has a kernel."""
        if self.key is None:
            return
        for op in self.ops:
            refuse_if_taken(op, self.key)
            refuse_if_taken(op, self._key_of(op))
        with self._lock:
            self._library = torch.library.Library("aten", "IMPL")
            for op in FORWARDS:
                self._hook(op)

    def unregister(self) -> None:
        """Put stock's kernels back. Does nothing the second time."""
        with self._lock:
            library, self._library = self._library, None
            self._hooked.clear()
            if library is not None:
                _torch.destroy_library(library)

    def _key_of(self, op: str) -> str:
        assert self.key is not None
        return BACKEND_SELECT if op in AT_BACKEND_SELECT else self.key

    def _hook(self, op: str) -> None:
        assert self.key is not None and self._library is not None
        stock = _torch.kernel_handle(op, self.key)
        if stock is None and self.key == "CUDA":
            return  # A build without CUDA: nobody can call it.
        self._hooked.append(op)
        hook = _MAKERS[op](self, stock)
        if self._key_of(op) == BACKEND_SELECT:
            if stock is not None:
                self._keep_straight_way(op)
            self._library.impl(op, of_plain_tensors(op, hook, self.key), BACKEND_SELECT, with_keyset=True)
            return
        with warnings.catch_warnings():
            # torch says so when a kernel of C++ is overridden, which is what we are here for.
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
            self._library.impl(op, hook, self.key)

    def _keep_straight_way(self, op: str) -> None:
        assert self.key is not None
        backend, straight = _STRAIGHT[op]
        autograd_key = f"Autograd{self.key}"
        kernel = _torch.kernel_handle(op, autograd_key)
        if kernel is not None:
            # Autograd's kernel redispatches to these keys, which BackendSelect is not among.
            keyset = _torch.keyset(autograd_key, self.key)
            for needs_grad in (False, True):
                way = straight(kernel.call_boxed, keyset, needs_grad)
                self.kernels[backend, needs_grad] = way if op == CUDNN else _marked(way)

    def forward_taken(self, op: str) -> None:
        """Hook the backward of `op`, if that has not been done yet."""
        backward = BACKWARDS[op]
        if backward in self._hooked:
            return
        with self._lock:
            if self._library is not None and backward not in self._hooked:
                self._hook(backward)


def of_plain_tensors(op: str, hook: Callable[..., Any], key: str) -> Callable[..., Any]:
    """What stands at BackendSelect: `hook` for dense tensors of the backend `key`, PyTorch's next kernel for others.

    Fake, meta, nested and sparse tensors pass BackendSelect too.
    """
    redispatch = getattr(torch.ops.aten, op).default.redispatch
    below, plain = _torch.backend_bits(), _torch.keyset_bits(key)
    after = _torch.keys_after(BACKEND_SELECT)

    def at_backend_select(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if keyset.raw_repr() & below != plain:
            return redispatch(keyset & after, *args, **kwargs)
        return hook(*args, **kwargs)

    return at_backend_select


def _marked(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """For the kernels that call another of the hooked operators in turn: cuDNN's does not."""

    def call(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Tensor:
        _mark.stock = True
        try:
            return kernel(query, key, value, is_causal, scale)
        finally:
            _mark.stock = False

    return call


def _straight_flash(call_boxed: Any, keyset: Any, needs_grad: bool) -> Callable[..., Tensor]:
    def kernel(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Tensor:
        # Each argument that is left to its default saves 0.15 us, one by name 0.4.
        if scale is not None:
            return call_boxed(keyset, query, key, value, 0.0, is_causal, scale=scale)[0]
        if is_causal:
            return call_boxed(keyset, query, key, value, 0.0, True)[0]
        return call_boxed(keyset, query, key, value)[0]

    return kernel


def _straight_biased(call_boxed: Any, keyset: Any, needs_grad: bool) -> Callable[..., Tensor]:
    """Of the kernels that take a bias, here None, and want to know whether they shall keep the logsumexp."""

    def kernel(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Tensor:
        if scale is not None:
            return call_boxed(keyset, query, key, value, None, needs_grad, 0.0, is_causal, scale=scale)[0]
        if is_causal:
            return call_boxed(keyset, query, key, value, None, needs_grad, 0.0, True)[0]
        return call_boxed(keyset, query, key, value, None, needs_grad)[0]

    return kernel


_STRAIGHT = {
    FLASH: ("flash", _straight_flash),
    EFFICIENT: ("efficient", _straight_biased),
    CUDNN: ("cudnn", _straight_biased),
}


def _backend_for(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> str | None:
    """Which of our kernels take a dense call, all tensors [B, H, S, D]; None if none do.

    A backward counts as a call that needs gradients.
    """
    gqa = key.shape[1] != query.shape[1]
    grad_mode = op in _TRAINING or torch.is_grad_enabled()
    tensors = (query, key, value) if attn_bias is None else (query, key, value, attn_bias)
    among = decisions.recent if attn_bias is None else decisions.recent_with_mask
    rest = decisions.settings(0.0, is_causal, scale, gqa, op)
    entry = decisions.find(among, rest, *tensors)
    if entry is None:
        with torch.set_grad_enabled(grad_mode):
            arguments = (query, key, value, attn_bias, 0.0, is_causal, scale, gqa)
            keep_as = decisions.signature(*arguments, grad_mode=grad_mode, entry=op)
            entry = decisions.cache.get(keep_as)
            if entry is None:
                entry = decisions.decide(*arguments, entry=op, keep_as=keep_as)
                entry.taken = entry.decision.backend in ("cuda", "triton")
        decisions.remember(among, rest, entry, *tensors)
    entry.decision.calls += 1
    return entry.decision.backend if entry.taken else None


def _dense(query: Tensor, key: Tensor, value: Tensor, heads: int) -> bool:
    """Shapes that stock's kernels accept; others it rejects in its own words. heads: the dimension of heads."""
    return (
        query.dim() == key.dim() == value.dim() == 4
        and query.shape[0] == key.shape[0] == value.shape[0]
        and key.shape[:3] == value.shape[:3]
        and query.shape[3] == key.shape[3]
        and key.shape[heads] > 0
        and query.shape[heads] % key.shape[heads] == 0
    )


def _flash_takes(query: Tensor, value: Tensor) -> bool:
    """What the flash kernels accept beyond that."""
    return (
        query.shape[3] == value.shape[3]
        and query.shape[3] % 8 == 0
        and query.shape[3] <= 256
        and query.dtype in (torch.float16, torch.bfloat16)
    )


def _forward(
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    layout: str,
) -> tuple[Tensor, Tensor]:
    scale = reference.default_scale(query.shape[-1]) if scale is None else scale
    out, logsumexp = torch.ops.flashbackend.attention_forward.default(
        query, key, value, mask, None, 0.0, is_causal, scale, layout, backend
    )
    # With a float mask, [2, B, H, S]: the second half is what rounding cut off, which stock has no place for.
    return out, logsumexp[0] if logsumexp.dim() == 4 else logsumexp


def _backward(
    backend: str,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients in the memory order of their inputs, as torch.empty_like gives it: what flash and cuDNN promise too."""
    scale = reference.default_scale(query.shape[-1]) if scale is None else scale
    logsumexp = logsumexp.contiguous()
    if mask is not None:
        logsumexp = torch.stack((logsumexp, torch.zeros_like(logsumexp)))
    return torch.ops.flashbackend.attention_backward.default(
        grad_out, query, key, value, mask, out, logsumexp, None, 0.0, is_causal, scale, wanted, backend
    )


def _random_state(query: Tensor) -> tuple[Tensor, Tensor]:
    """Flash's rng_state and its unused companion. Without dropout nobody reads them."""
    if torch.version.hip is not None:
        return (
            torch.empty((), dtype=torch.int64, device=query.device),
            torch.empty((), dtype=torch.int64, device=query.device),
        )
    return (
        torch.empty(2, dtype=torch.uint64, device=query.device),
        torch.empty((), dtype=torch.uint64, device=query.device),
    )


def _seed_and_offset(query: Tensor) -> tuple[Tensor, Tensor]:
    """Of the efficient and cuDNN kernels."""
    return (
        torch.empty((), dtype=torch.int64, device=query.device),
        torch.empty((), dtype=torch.int64, device=query.device),
    )


def _without_minus_infinity(logsumexp: Tensor) -> Tensor:
    """Rows without a key as stock's kernels mark them, so that their backward gives zeros and not NaN."""
    return logsumexp.masked_fill_(logsumexp == -float("inf"), float("inf"))


def _make(op: str, forward: bool, answer: Callable[..., Any]) -> Callable[[KernelHook, Any], Callable[..., Any]]:
    """A hook: `answer(*args, **kwargs)` returns None for a call that stays stock's."""

    def make(owner: KernelHook, stock: Any) -> Callable[..., Any]:
        call_boxed: Any = stock.call_boxed if stock is not None else None

        def hook(*args: Any, **kwargs: Any) -> Any:
            if _mark.stock:
                return call_boxed(_any_keyset, *args, **kwargs)
            # An explicit sdpa_kernel(CUDNN_ATTENTION) stays cuDNN's.
            if _flash_enabled():
                try:
                    result = answer(*args, **kwargs)
                except decisions.kernel_failures() as error:
                    decisions.warn_once(f"PyTorch runs {op} instead of ours: {decisions.first_line(error)}")
                    result = None
                if result is not None:
                    if forward:
                        owner.forward_taken(op)
                    return result
            # Marked: some of stock's kernels call another of the hooked operators in turn.
            return _torch.as_stock(stock.call_boxed, _any_keyset, *args, **kwargs)

        return hook

    return make


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    if dropout_p > 0.0 or return_debug_mask or not _dense(query, key, value, 1):
        return None
    if not _flash_takes(query, value):
        return None
    if is_causal and query.shape[2] != key.shape[2]:
        # Flash aligns its causal mask at the bottom right, our dense kernels at the top left.
        rows = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        found = _equal_lengths_forward(FLASH, *rows, -1, 0, scale)
        if found is None:
            return None
        out, logsumexp = found[0].transpose(1, 2), found[1]
        empty_mask = torch.empty(0, dtype=query.dtype, device=query.device)
        return (out, logsumexp, None, None, query.shape[2], key.shape[2], *_random_state(query), empty_mask)
    backend = _backend_for(FLASH, query, key, value, None, is_causal, scale)
    if backend is None:
        return None
    out, logsumexp = _forward(backend, query, key, value, None, is_causal, scale, "query")
    empty_mask = torch.empty(0, dtype=query.dtype, device=query.device)
    return (out, logsumexp, None, None, query.shape[2], key.shape[2], *_random_state(query), empty_mask)


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """Dense tensors [B, S, H, D], or packed ones [total, H, D] where cum_seq_q and cum_seq_k are given."""
    # Stock's backward is not told of slopes, so their gradients are stock's affair.
    if dropout_p > 0.0 or return_debug_mask or alibi_slopes is not None or block_table is not None:
        return None
    left = -1 if window_size_left is None else window_size_left
    right = 0 if is_causal else -1 if window_size_right is None else window_size_right
    empty_mask = torch.empty(0, dtype=query.dtype, device=query.device)
    if cum_seq_q is not None and cum_seq_k is not None:
        call = packed.Call(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, left, right, scale, True, seqused_k)
        found = packed.flash_forward(FLASH_FORWARD, call)
        return None if found is None else (*found, *_random_state(query), empty_mask)
    special = (cum_seq_q, cum_seq_k, seqused_k, num_splits)
    if any(argument is not None for argument in special) or not _dense(query, key, value, 2):
        return None
    if not _flash_takes(query, value):
        return None
    if left >= 0 or (right >= 0 and not is_causal) or (is_causal and query.shape[1] != key.shape[1]):
        found = _equal_lengths_forward(FLASH_FORWARD, query, key, value, left, right, scale)
        return None if found is None else (*found, *_random_state(query), empty_mask)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    backend = _backend_for(FLASH_FORWARD, query, key, value, None, is_causal, scale)
    if backend is None:
        return None
    out, logsumexp = _forward(backend, query, key, value, None, is_causal, scale, "query")
    return (out.transpose(1, 2), logsumexp, *_random_state(query), empty_mask)


def _equal_lengths_forward(
    op: str, query: Tensor, key: Tensor, value: Tensor, left: int, right: int, scale: float | None
) -> tuple[Tensor, Tensor] | None:
    """(out [B, S, H, D], logsumexp [B, H, S]) of dense tensors [B, S, H, D] with a window."""
    found = packed.flash_forward(op, packed.of_equal_lengths(query, key, value, left, right, scale))
    if found is None:
        return None
    batch, seqlen, heads, _ = query.shape
    logsumexp = found[1].view(heads, batch, seqlen).transpose(0, 1).contiguous()
    return found[0].view(batch, seqlen, *found[0].shape[1:]), logsumexp


def _equal_lengths_backward(
    op: str,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    left: int,
    right: int,
    scale: float | None,
) -> tuple[Tensor, ...] | None:
    """Gradients of query, key and value for dense tensors [B, S, H, D] with a window."""
    call = packed.of_equal_lengths(query, key, value, left, right, scale)
    if call is None:
        return None
    batch, seqlen, heads, head_dim = out.shape
    rows = logsumexp.transpose(0, 1).reshape(heads, batch * seqlen)
    flat = [tensor.reshape(batch * seqlen, heads, head_dim) for tensor in (grad_out, out)]
    grads = packed.flash_backward(op, call, flat[0], flat[1], rows)
    if grads is None:
        return None
    return tuple(grad.view(tensor.shape) for grad, tensor in zip(grads, (query, key, value)))


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    if dropout_p > 0.0 or not _dense(query, key, value, 1) or query.shape[1] != key.shape[1]:
        return None
    if attn_bias is not None and (is_causal or not _bias_fits(attn_bias, query, key)):
        return None
    backend = _backend_for(EFFICIENT, query, key, value, attn_bias, is_causal, scale)
    if backend is None:
        return None
    if not compute_log_sumexp:
        scale = reference.default_scale(query.shape[-1]) if scale is None else scale
        out = torch.ops.flashbackend.attention.default(
            query, key, value, attn_bias, None, 0.0, is_causal, scale, "bshd", backend
        )
        logsumexp = torch.empty((*query.shape[:2], 0), dtype=torch.float32, device=query.device)
        return (out, logsumexp, *_seed_and_offset(query))
    out, logsumexp = _forward(backend, query, key, value, attn_bias, is_causal, scale, "bshd")
    padding = 0 if torch.version.hip is not None else -query.shape[2] % LOGSUMEXP_ALIGNMENT
    if padding:
        logsumexp = torch.nn.functional.pad(logsumexp, (0, padding), value=float("inf"))
    if attn_bias is not None or key.shape[2] == 0:
        logsumexp = _without_minus_infinity(logsumexp)
    return (out, logsumexp.contiguous(), *_seed_and_offset(query))


def _cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    if dropout_p > 0.0 or return_debug_mask or not _dense(query, key, value, 1):
        return None
    if query.dtype not in (torch.float16, torch.bfloat16) or (is_causal and query.shape[2] != key.shape[2]):
        return None
    if attn_bias is not None and (is_causal or not _bias_fits(attn_bias, query, key)):
        return None
    backend = _backend_for(CUDNN, query, key, value, attn_bias, is_causal, scale)
    if backend is None:
        return None
    out, logsumexp = _forward(backend, query, key, value, attn_bias, is_causal, scale, "query")
    if attn_bias is not None and compute_log_sumexp:
        logsumexp = _without_minus_infinity(logsumexp)
    logsumexp = logsumexp.contiguous().unsqueeze(-1)
    return (out, logsumexp, None, None, query.shape[2], key.shape[2], *_seed_and_offset(query), None)


def _bias_fits(bias: Tensor, query: Tensor, key: Tensor) -> bool:
    """The whole [B, H, Sq, Sk], as stock's preparation leaves it: broadcast dimensions have stride 0."""
    return bias.shape == (*query.shape[:3], key.shape[2]) and bias.dtype in (torch.float32, query.dtype)


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    *,
    scale: float | None = None,
) -> Any:
    if cum_seq_q is not None or dropout_p > 0.0 or grad_out is None or not _dense(query, key, value, 1):
        return None
    if not _flash_takes(query, value):
        return None
    if is_causal and query.shape[2] != key.shape[2]:
        grad_rows, *rows, out_rows = (tensor.transpose(1, 2) for tensor in (grad_out, query, key, value, out))
        grads = _equal_lengths_backward(
            BACKWARDS[FLASH], grad_rows, rows[0], rows[1], rows[2], out_rows, logsumexp, -1, 0, scale
        )
        return None if grads is None else tuple(grad.transpose(1, 2) for grad in grads)
    backend = _backend_for(BACKWARDS[FLASH], query, key, value, None, is_causal, scale)
    if backend is None:
        return None
    wanted = [True, True, True, False]
    return _backward(backend, grad_out, query, key, value, None, out, logsumexp, is_causal, scale, wanted)[:3]


def _flash_forward_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor | None,
    unused: Tensor | None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Any:
    if dropout_p > 0.0 or grad_out is None:
        return None
    left = -1 if window_size_left is None else window_size_left
    right = 0 if is_causal else -1 if window_size_right is None else window_size_right
    op = BACKWARDS[FLASH_FORWARD]
    if cum_seq_q is not None and cum_seq_k is not None and cum_seq_q.numel() and query.dim() == 3:
        call = packed.Call(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, left, right, scale)
        return packed.flash_backward(op, call, grad_out, out, logsumexp)
    if cum_seq_q is not None or not _dense(query, key, value, 2) or not _flash_takes(query, value):
        return None
    if left >= 0 or (right >= 0 and not is_causal) or (is_causal and query.shape[1] != key.shape[1]):
        return _equal_lengths_backward(op, grad_out, query, key, value, out, logsumexp, left, right, scale)
    grad_out, query, key, value, out = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
    backend = _backend_for(BACKWARDS[FLASH_FORWARD], query, key, value, None, is_causal, scale)
    if backend is None:
        return None
    wanted = [True, True, True, False]
    grads = _backward(backend, grad_out, query, key, value, None, out, logsumexp, is_causal, scale, wanted)
    return tuple(grad.transpose(1, 2) for grad in grads[:3])


def _efficient_backward(
    grad_out: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    if dropout_p > 0.0 or grad_out is None or not _dense(query, key, value, 1) or query.shape[1] != key.shape[1]:
        return None
    if attn_bias is not None and (is_causal or not _bias_fits(attn_bias, query, key)):
        return None
    backend = _backend_for(BACKWARDS[EFFICIENT], query, key, value, attn_bias, is_causal, scale)
    if backend is None:
        return None
    wanted = [True, True, True, attn_bias is not None and grad_input_mask[3]]
    if logsumexp.shape[-1] < query.shape[2]:
        # Under torch.func.grad of vmap the forward is told that nobody needs it; stock's backward then raises.
        out, logsumexp = _forward(backend, query, key, value, attn_bias, is_causal, scale, "query")
    logsumexp = logsumexp[..., : query.shape[2]]
    grads = _backward(backend, grad_out, query, key, value, attn_bias, out, logsumexp, is_causal, scale, wanted)
    grad_bias = _padded_rows(grads[3]) if wanted[3] else None
    return (*(_as_bshd(grad) for grad in grads[:3]), grad_bias)


def _packed_efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    custom_mask_type: int,
    scale: float | None,
    unusual: bool,
) -> packed.Call | None:
    """The call of _efficient_attention_forward: packed [1, total, H, D], or dense [B, S, H, D]."""
    if bias is not None or unusual or custom_mask_type not in (0, 1, 2) or not query.dim() == key.dim() == 4:
        return None
    right, bottom_right = -1 if custom_mask_type == 0 else 0, custom_mask_type == 2
    if cu_seqlens_q is None and cu_seqlens_k is None:
        # The other masks are those of stock's scaled_dot_product_attention, which has been judged by its own name.
        if not bottom_right or not _dense(query, key, value, 2):
            return None
        return packed.of_equal_lengths(query, key, value, -1, right, scale, bottom_right)
    if cu_seqlens_q is None or cu_seqlens_k is None or max_seqlen_q is None or query.shape[0] != 1:
        return None
    longest = key.shape[1] if max_seqlen_k is None else max_seqlen_k
    rows = (query.squeeze(0), key.squeeze(0), value.squeeze(0))
    return packed.Call(*rows, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, longest, -1, right, scale, bottom_right)


def _efficient_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float,
    custom_mask_type: int,
    compute_log_sumexp: bool = False,
    *,
    scale: float | None = None,
    seqlen_k: Tensor | None = None,
    window_size: int | None = None,
) -> Any:
    unusual = dropout_p > 0.0 or seqlen_k is not None or window_size is not None
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    call = _packed_efficient(query, key, value, bias, *lengths, custom_mask_type, scale, unusual)
    found = packed.efficient_forward(EFFICIENT_FORWARD, call, compute_log_sumexp)
    if found is None or call is None:
        return None
    out = found[0].view(*query.shape[:3], value.shape[3])
    return (out, found[1], *_seed_and_offset(query), call.max_q, call.max_k)


def _efficient_forward_backward(
    grad_out: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    logsumexp: Tensor,
    dropout_p: float,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    custom_mask_type: int,
    bias_requires_grad: bool,
    *,
    scale: float | None = None,
    num_splits_key: int | None = None,
    window_size: int | None = None,
    shared_storage_dqdkdv: bool = False,
) -> Any:
    if grad_out is None:
        return None
    unusual = dropout_p > 0.0 or window_size is not None or shared_storage_dqdkdv
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    call = _packed_efficient(query, key, value, bias, *lengths, custom_mask_type, scale, unusual)
    flat = [tensor.reshape(-1, *tensor.shape[2:]) for tensor in (grad_out, out)]
    grads = packed.efficient_backward(BACKWARDS[EFFICIENT_FORWARD], call, flat[0], flat[1], logsumexp)
    if grads is None:
        return None
    no_bias = torch.empty((), device=query.device)
    return (*(grad.view(tensor.shape) for grad, tensor in zip(grads, (query, key, value))), no_bias)


def _cudnn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor | None,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> Any:
    if cum_seq_q is not None or dropout_p > 0.0 or grad_out is None or not _dense(query, key, value, 1):
        return None
    if query.dtype not in (torch.float16, torch.bfloat16) or (is_causal and query.shape[2] != key.shape[2]):
        return None
    if attn_bias is not None and (is_causal or not _bias_fits(attn_bias, query, key)):
        return None
    backend = _backend_for(BACKWARDS[CUDNN], query, key, value, attn_bias, is_causal, scale)
    if backend is None:
        return None
    wanted = [True, True, True, False]
    if logsumexp is None or logsumexp.numel() == 0:  # as in the efficient kernel's backward
        out, logsumexp = _forward(backend, query, key, value, attn_bias, is_causal, scale, "query")
    else:
        logsumexp = logsumexp.squeeze(-1)
    return _backward(backend, grad_out, query, key, value, attn_bias, out, logsumexp, is_causal, scale, wanted)[:3]


def _as_bshd(grad: Tensor) -> Tensor:
    rows = grad.transpose(1, 2)
    return grad if rows.is_contiguous() else rows.contiguous().transpose(1, 2)


def _padded_rows(grad_bias: Tensor) -> Tensor:
    seqlen_k = grad_bias.shape[-1]
    padding = -seqlen_k % BIAS_ALIGNMENT
    if not padding:
        return grad_bias.contiguous()
    return torch.nn.functional.pad(grad_bias, (0, padding))[..., :seqlen_k]


_MAKERS = {
    FLASH: _make(FLASH, True, _flash),
    EFFICIENT: _make(EFFICIENT, True, _efficient),
    CUDNN: _make(CUDNN, True, _cudnn),
    FLASH_FORWARD: _make(FLASH_FORWARD, True, _flash_forward),
    EFFICIENT_FORWARD: _make(EFFICIENT_FORWARD, True, _efficient_forward),
    BACKWARDS[FLASH]: _make(BACKWARDS[FLASH], False, _flash_backward),
    BACKWARDS[EFFICIENT]: _make(BACKWARDS[EFFICIENT], False, _efficient_backward),
    BACKWARDS[CUDNN]: _make(BACKWARDS[CUDNN], False, _cudnn_backward),
    BACKWARDS[FLASH_FORWARD]: _make(BACKWARDS[FLASH_FORWARD], False, _flash_forward_backward),
    BACKWARDS[EFFICIENT_FORWARD]: _make(BACKWARDS[EFFICIENT_FORWARD], False, _efficient_forward_backward),
}
