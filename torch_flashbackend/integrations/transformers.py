"""`attn_implementation="flashbackend"` for Hugging Face transformers (5.x).

    import torch_flashbackend
    torch_flashbackend.enable()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flashbackend")

Nothing of this is needed for the plugin to run a model's "sdpa" attention. It adds what F.scaled_dot_product_attention
cannot say: attention sinks, soft-capped scores, and key and value heads that are never repeated in memory.

Imports transformers only where it is loaded already. `enable()` calls `register_when_loaded`; `register()` is for those
who use it without `enable()`.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from . import on_import

__all__ = ["ALIAS", "NAME", "attention_forward", "register", "register_when_loaded"]

NAME = "flashbackend"
ALIAS = "torch_fb"
"""The name under which a model's config holds our choice. transformers takes every name with "flash" in it for a
version of the flash-attn package, and would give it packed sequences and no masks."""

MODELS = "transformers.modeling_utils"
MASKS = "transformers.masking_utils"


def register() -> None:
    """Make the name known to transformers, which is imported if it is not yet. Twice is the same as once.

    Stays after `disable()`: a model that was made with it runs on, on `torch_flashbackend.attention`.
    Raises ImportError where transformers is missing, or has no such interface.
    """
    import importlib

    models, masks = importlib.import_module(MODELS), importlib.import_module(MASKS)
    for name in (NAME, ALIAS):
        models.AttentionInterface.register(name, attention_forward)
        masks.AttentionMaskInterface.register(name, masks.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    _accept_name(models.PreTrainedModel)


def register_when_loaded() -> None:
    """`register()` if transformers is loaded, else as soon as it is. A failure is a warning."""
    on_import.when_imported(MODELS, _register_or_warn)


def forget() -> None:
    """Wait no longer."""
    on_import.cancel(_register_or_warn)


def _register_or_warn() -> None:
    try:
        register()
    except Exception as error:
        version = getattr(sys.modules.get("transformers"), "__version__", "?")
        warnings.warn(
            f'torch_flashbackend: attn_implementation="{NAME}" is not available with transformers {version} '
            f'({type(error).__name__}: {error}); "sdpa" is not affected',
            RuntimeWarning,
            stacklevel=2,
        )


def _accept_name(model_class: Any) -> None:
    """Let the check that every model's constructor and `set_attn_implementation` make turn NAME into ALIAS."""
    check = model_class._check_and_adjust_attn_implementation
    if getattr(check, "_flashbackend", False):
        return

    @functools.wraps(check)
    def accepting(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if attn_implementation not in (NAME, ALIAS):
            return check(self, attn_implementation, *args, **kwargs)
        if not self._can_set_attn_implementation():
            raise ValueError(
                f"{type(self).__name__} does not use transformers' attention interface, so "
                f'attn_implementation="{NAME}" cannot be chosen. '
                'With attn_implementation="sdpa" the enabled plugin runs it all the same.'
            )
        return ALIAS

    accepting._flashbackend = True  # type: ignore[attr-defined]
    model_class._check_and_adjust_attn_implementation = accepting


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What a model of transformers calls. query [B, H, Sq, D], key and value [B, Hkv, Sk, D or Dv].

    attention_mask: as transformers makes it for "sdpa": None (causal if is_causal, or else the module, says so), bool,
        or float, broadcastable to [B, H, Sq, Sk].
    softcap: scores become softcap * tanh(scores / softcap); no kernel of ours does that, so PyTorch's operations do.
    s_aux: sinks [H]. sliding_window: a query sees this many keys, itself the last; read where no mask says so already.
    position_bias: added to the scores, broadcastable to [B, H, Sq, Sk]; may require grad.

    Returns ([B, Sq, H, Dv], None): weights are never returned. Raises NotImplementedError for the sparse selections
    (`indices`, `block_indices`) of some models, which would be wrong to leave out.
    """
    for name in ("indices", "block_indices"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f'attn_implementation="{NAME}" does not take `{name}`: use "eager" for this model'
            )
    if kwargs.get("output_attentions"):
        _warn_once(
            f'attn_implementation="{NAME}" returns no attention weights (output_attentions): use "eager" for them'
        )
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # In this order: with symbolic sizes the first condition is one, and must not be what is passed on.
    causal = bool(seqlen_q > 1 and attention_mask is None and is_causal)
    if causal and seqlen_k > seqlen_q:
        # The first tokens of a cache with room for more: no query may see what is behind them.
        key, value, seqlen_k = key[:, :, :seqlen_q], value[:, :, :seqlen_q], seqlen_q
        if position_bias is not None:
            position_bias = position_bias[..., :seqlen_q]
    if sliding_window is not None and attention_mask is None and seqlen_k > sliding_window:
        if seqlen_q == 1:
            key, value = key[:, :, -sliding_window:], value[:, :, -sliding_window:]
            if position_bias is not None:
                position_bias = position_bias[..., -sliding_window:]
        else:
            attention_mask, causal = _window(query, seqlen_k, sliding_window, causal), False
    if position_bias is not None:
        attention_mask, causal = _biased(position_bias, attention_mask, causal, query, key.shape[2]), False
    gqa = query.shape[1] != key.shape[1]
    if softcap is not None:
        out = _softcapped(query, key, value, attention_mask, dropout, scaling, causal, softcap, s_aux)
    elif s_aux is not None:
        from ..sinks import attention_with_sinks

        out = attention_with_sinks(query, key, value, s_aux, attention_mask, dropout, causal, scaling, gqa)
    else:
        if gqa and attention_mask is not None and not query.is_cuda:
            # PyTorch's fused kernels take no mask together with shared heads, and on a CPU ours are not there to.
            key, value, gqa = _repeated(key, query.shape[1]), _repeated(value, query.shape[1]), False
        out = _function()(query, key, value, attention_mask, dropout, causal, scale=scaling, enable_gqa=gqa)
    return out.transpose(1, 2).contiguous(), None


def _function() -> Callable[..., Any]:
    """PyTorch's function where our hook stands behind it: sdpa_backend, verify and stats then see the call."""
    from .. import direct, override

    return F.scaled_dot_product_attention if override.is_enabled() else direct.attention


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[1], 1) if tensor.shape[1] != heads else tensor


def _window(query: Tensor, seqlen_k: int, window: int, causal: bool) -> Tensor:
    """A bool mask [Sq, Sk]; on both sides where it is not causal. The last query is at the last key."""
    seqlen_q = query.shape[2]
    position_k = torch.arange(seqlen_k, device=query.device)
    distance = torch.arange(seqlen_k - seqlen_q, seqlen_k, device=query.device)[:, None] - position_k
    return (distance >= 0) & (distance < window) if causal else distance.abs() < window


def _biased(bias: Tensor, mask: Tensor | None, causal: bool, query: Tensor, seqlen_k: int) -> Tensor:
    """The bias and the mask as one float mask, in query's dtype; its smallest number where nothing is to be seen."""
    bias = bias.to(query.dtype)
    if mask is None and causal:
        mask = torch.ones(query.shape[2], seqlen_k, dtype=torch.bool, device=query.device).tril()
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(query.dtype).min)
    return bias + mask


def _softcapped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """The models' own "eager" attention, in which the cap comes between the scale and the mask."""
    _warn_once(
        f'attn_implementation="{NAME}": attention with softcap runs in plain PyTorch operations, as "eager" does; '
        '"sdpa" would leave the cap out'
    )
    key, value = _repeated(key, query.shape[1]), _repeated(value, query.shape[1])
    scale = reference.default_scale(query.shape[-1]) if scaling is None else scaling
    scores = torch.tanh(query @ key.transpose(2, 3) * (scale / softcap)) * softcap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    weights = torch.softmax(scores, -1, dtype=torch.promote_types(torch.float32, scores.dtype)).to(query.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return F.dropout(weights, dropout) @ value


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned and not torch.compiler.is_compiling():
        _warned.add(message)
        warnings.warn(f"torch_flashbackend: {message}", RuntimeWarning, stacklevel=3)
