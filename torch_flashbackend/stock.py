"""What PyTorch itself would run for a call: asked of torch where that is possible, else estimated by its rules.

May import torch and `_torch.py`. Imported by problem.py only, which stores the answer as `Problem.stock_backend`;
functions here take a Problem but read nothing of that field.

The answer decides two things: the memory layout of the output, which the caller's next `view` may rely on, and
whether the call is one that stock gets wrong (routing.py). The rules follow aten/src/ATen/native/transformers/cuda/
sdp_utils.cpp of torch 2.11 to 2.14. They never guard on a symbolic size: one that cannot be known counts as usual.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from . import _torch

if TYPE_CHECKING:
    from .problem import Problem

__all__ = ["backend", "estimate", "priority_order"]

NAMES = {
    SDPBackend.MATH: "math",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.ERROR: "error",
}
DEFAULT_ORDER = ("flash", "efficient", "math", "cudnn")
CUDNN_FIRST = ("cudnn", "flash", "efficient", "math")
# Architectures on which PyTorch prefers cuDNN to its own kernels, and cuDNN takes head dimensions above 128.
CUDNN_PREFERRED = ("sm_90", "sm_100", "sm_103")
CUDNN_PREFERRED_VERSION = 91500
HALF_TYPES = (torch.float16, torch.bfloat16)
# Later versions let the efficient kernel share key and value heads, and keep from cuDNN dropout rates that it would
# round and sizes that it did not take before.
LATER_RULES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


def backend(
    problem: Problem,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
) -> str | None:
    """Name of the backend that stock would run: "flash", "efficient", "cudnn", "math", "error", or None for unknown.

    With tensors, real ones on a GPU, torch is asked. Without, or for fake tensors, the answer is an estimate.
    """
    for name in ("flash", "efficient", "cudnn"):
        if name in problem.entry:
            return name  # the kernel hook: stock has chosen already
    if problem.device_type != "cuda" or problem.tensor_types or len(problem.devices) > 1:
        return None
    # Without math a call that no kernel takes makes torch warn four times and raise; the estimate is silent.
    askable = query is not None and _is_real(query, key, value, attn_mask) and "math" in problem.sdp_backends
    if askable and not problem.transforms:
        choice = _torch.fused_sdp_choice(
            query, key, value, attn_mask, problem.dropout_p, problem.is_causal, problem.scale, problem.enable_gqa
        )
        if choice is not None:
            return NAMES.get(choice)
    return estimate(problem)


def estimate(problem: Problem) -> str | None:
    """The backend that stock would choose on a GPU, by the rules of torch 2.11 to 2.14. None for an invalid rank."""
    if min(len(problem.query_shape), len(problem.key_shape), len(problem.value_shape)) < 2:
        return None
    takes = {"flash": _flash_takes, "efficient": _efficient_takes, "cudnn": _cudnn_takes, "math": lambda _: True}
    order = _order_on(problem.architecture)
    for name in order:
        if name in problem.sdp_backends and takes[name](problem):
            return name
    return "error"


def priority_order() -> tuple[str, ...]:
    """Stock's order of preference as it is set now: names of backends, first choice first."""
    values = {int(member.value): name for member, name in NAMES.items()}
    order = tuple(values[number] for number in _torch.sdp_priority_order() if number in values)
    return order or DEFAULT_ORDER


def _order_on(architecture: str) -> tuple[str, ...]:
    order = priority_order()
    # torch puts cuDNN first at its first call on a GPU that prefers it; before that, and on other machines, the
    # default order is still there.
    if order == DEFAULT_ORDER and architecture in CUDNN_PREFERRED and _cudnn_preferred():
        return CUDNN_FIRST
    return order


def _cudnn_preferred() -> bool:
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED", "0").lower() in ("1", "true", "yes", "y", "on"):
        return False
    version = torch.backends.cudnn.version()
    return version is None or version > CUDNN_PREFERRED_VERSION


def _is_real(*tensors: Tensor | None) -> bool:
    return not any(type(tensor).__module__.startswith("torch._subclasses") for tensor in tensors)


def _flash_takes(problem: Problem) -> bool:
    head_dim, amd = problem.head_dim, problem.architecture.startswith("gfx")
    training_limit = 192 if problem.architecture in ("sm_86", "sm_89", "sm_120", "sm_121") else 256
    return (
        _fused_takes(problem)
        and problem.query_dtype in HALF_TYPES
        and problem.mask is None
        and _may(head_dim == problem.head_dim_v)
        and _may(head_dim <= (512 if amd else 256))
        and (not problem.is_causal or _may(problem.seqlen_q == problem.seqlen_k))
        and (
            not problem.requires_grad
            or _may(head_dim <= training_limit)
            or (not problem.dropout_p and _may(head_dim > 224))
        )
        and (_unit_last_stride(problem) or _torch.surely(head_dim == 1))
    )


def _efficient_takes(problem: Problem) -> bool:
    half = problem.query_dtype in HALF_TYPES
    step = 8 if half else 4
    amd = problem.architecture.startswith("gfx")
    return (
        _fused_takes(problem)
        and (half or problem.query_dtype is torch.float32)
        and _may(problem.head_dim % step == 0)
        and _may(problem.head_dim_v % step == 0)
        and not (problem.enable_gqa and (amd or not LATER_RULES) and not _same_heads(problem))
        and not (amd and _torch.surely(problem.head_dim > 512))
        and _unit_last_stride(problem)
    )


def _cudnn_takes(problem: Problem) -> bool:
    if problem.architecture.startswith("gfx") or not _fused_takes(problem):
        return False
    largest = 256 if problem.architecture in CUDNN_PREFERRED else 128
    mask = problem.mask
    mask_ok = mask is None or (not mask.requires_grad and len(mask.shape) in (2, 4))
    return (
        problem.query_dtype in HALF_TYPES
        and mask_ok
        and not problem.deterministic
        and (not LATER_RULES or float(problem.dropout_p * 16).is_integer())
        and all(_may(n % 8 == 0) and _may(n <= largest) for n in (problem.head_dim, problem.head_dim_v))
        and not _torch.surely(problem.seqlen_k == 1)
        and not (problem.dropout_p and _torch.surely(problem.seqlen_q == 1))
        and not (LATER_RULES and any(_torch.surely(n > 65535) for n in problem.query_shape[:2]))
        and _unit_last_stride(problem)
    )


def _fused_takes(problem: Problem) -> bool:
    """What the three fused kernels ask alike: rank 4, one batch size, matching heads, some queries and some keys."""
    shapes = (problem.query_shape, problem.key_shape, problem.value_shape)
    if any(len(shape) != 4 for shape in shapes) or problem.architecture in ("sm_60", "sm_70", "sm_75"):
        return False
    query, key, value = shapes
    same_batch = _may(query[0] == key[0]) and _may(query[0] == value[0])
    if problem.enable_gqa:
        # Not a remainder: a kv head count of zero is the caller's error, and stock's to report.
        same_heads = _may(key[1] == value[1]) and not _torch.surely(key[1] == 0) and _may(query[1] % key[1] == 0)
    else:
        same_heads = _may(query[1] == key[1]) and _may(query[1] == value[1])
    return same_batch and same_heads and not any(_torch.surely(n == 0) for n in (query[2], key[2]))


def _same_heads(problem: Problem) -> bool:
    return _may(problem.num_heads == problem.num_kv_heads)


def _unit_last_stride(problem: Problem) -> bool:
    strides = [problem.query_stride, problem.key_stride, problem.value_stride]
    if problem.mask is not None:
        strides.append(problem.mask.stride)
    return all(_may(stride[-1] == 1) for stride in strides if stride)


def _may(condition: Any) -> bool:
    """True unless the condition is surely false; never a guard."""
    if isinstance(condition, bool):
        return condition
    return not _torch.surely(torch.sym_not(condition))
