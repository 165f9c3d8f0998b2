"""Which backend takes a call: a table of backends, each with its constraints, and the walk along it.

May import torch, problem.py, policy.py, `_torch.py` and, for a step of decoding, what ``kernels/cuda/decode.py`` takes.
Imported by the two hooks, by direct.py, explain.py and verify.py. Pure Python on a `Problem`: no tensor, no kernel that
is compiled and no GPU, so that every rule is tested on a CPU.

A constraint is data: a name, a predicate, and a message with the caller's words and numbers. The constraints of a
backend are asked in order and the first that fails is the reason. Calls that stock would reject are never taken: the
error is then stock's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import policy
from ._torch import guarded
from .policy import Verdict
from .problem import HOPPER, MaskInfo, Problem, describe_shape

__all__ = [
    "AUTO", "BACKENDS", "Backend", "Constraint", "Decision", "KERNELS", "PYTORCHS_BUSINESS", "Rule", "STOCK_FAILS",
    "decide", "first_failure",
]  # fmt: skip

MAX_HEAD_DIM = 512
# More keys than the "cuda" backend adds up in one sum, which its matrix units cut off instead of rounding.
HOPPER_MAX_SEQLEN_K = 2**18
HOPPER_MAX_HEAD_DIM = 512
# Above, the "cuda" backend takes neither masks nor dropout, and its gradients are Triton's.
HOPPER_MAX_MASK_HEAD_DIM = 256
# Above, a float32 mask or dropout leaves the "cuda" backend no registers.
HOPPER_MAX_BIAS_HEAD_DIM = 192
HOPPER_MAX_DROPOUT_HEAD_DIM = 192
# Beside a bool mask dropout is its backward's alone, which has masks up to this.
HOPPER_MAX_MASKED_DROPOUT_HEAD_DIM = 128
# Of its kernel that splits the keys of a few queries.
HOPPER_MAX_DECODE_HEAD_DIM = 256
# Of the kernels for packed sequences (varlen.py).
MAX_PACKED_HEAD_DIM = 256
HALF_TYPES = (torch.float16, torch.bfloat16)
# Where nobody has chosen: our kernels where they are worth it, else stock. Our math path is for those who ask for it.
AUTO = ("cuda", "triton", "stock")
# Backends that are kernels of ours.
KERNELS = ("cuda", "triton")
# The memory order that each of stock's backends gives its output; "query" follows the query, as empty_like does.
LAYOUTS = {"flash": "query", "cudnn": "query", "efficient": "bshd", "math": "bhsd"}
# Kernels inside stock that only see tensors of rank 4; it runs everything else in its math path.
FUSED = ("flash", "efficient", "cudnn")


class Constraint(NamedTuple):
    """What a backend asks of a call. `message` is asked only where `holds` is False."""

    name: str
    holds: Callable[[Problem], bool]
    message: Callable[[Problem], str]


class Backend(NamedTuple):
    """A way to compute attention, and what it asks of a call."""

    name: str
    constraints: tuple[Constraint, ...]


class Rule(NamedTuple):
    """A kind of call that stock answers wrongly or not at all, so that it is taken whatever the clock says."""

    reason: str
    applies: Callable[[Problem], bool]
    message: Callable[[Problem], str]


@dataclass(slots=True, eq=False)
class Decision:
    """What is to happen with all calls that look like one Problem.

    backend: "cuda", "triton", "math" or "stock". reason: why, short and the same for all calls of a kind, to count by.
    layout: memory order of the output that stock would have given: "query", "bshd" or "bhsd".
    rejected: (backend, constraint, message) for each backend that was asked before and did not take the call.
    calls: how many calls followed it, counted by the hook that keeps it.
    """

    backend: str
    reason: str
    layout: str
    rejected: tuple[tuple[str, str, str], ...] = ()
    calls: int = 0


def decide(problem: Problem, allowed: Iterable[str] | None = None) -> Decision:
    """Choose the backend for a call.

    allowed: backends to try, in order, as `sdpa_backend` gives them: then speed is not asked. None chooses by itself
    among "cuda", "triton" and "stock", and takes a call only where that is measured to be faster or stock fails.
    Raises RuntimeError, with the failed condition of each backend, if none of them takes the call, and ValueError for
    a backend that does not exist.
    """
    automatic = allowed is None
    names = AUTO if allowed is None else tuple(allowed)
    rejected: list[tuple[str, str, str]] = []
    for name in names:
        failed = first_failure(problem, name, automatic)
        if failed is None:
            return Decision(name, _reason(problem, name, rejected, automatic), _layout(problem), tuple(rejected))
        rejected.append((name, failed.name, failed.message(problem)))
    conditions = "\n".join(f"  {name}: {message}" for name, _, message in rejected)
    raise RuntimeError(
        f"no backend among {', '.join(names) or '(none)'} takes this call ({problem}):\n{conditions}\n"
        'With "stock" among them, PyTorch would run what the others do not take.'
    )


def first_failure(problem: Problem, backend: str, automatic: bool) -> Constraint | None:
    """The first constraint of a backend that a call does not meet; None if the backend can take it.

    automatic: ask also whether it is worth it, as where the caller has not chosen the backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"there is no backend {backend!r}; choose among {', '.join(BACKENDS)}")
    for constraint in BACKENDS[backend].constraints:
        if constraint.name == POLICY and not automatic:
            continue
        if not constraint.holds(problem):
            return constraint
    return None


# The problem and backend judged last, with the policies it was by: a decision asks for the verdict, then for its words.
_judged: tuple[Problem, str, Any, Verdict] | None = None


def worth(problem: Problem, backend: str) -> Verdict:
    """Is a call that a kernel could take worth taking? Yes if stock fails at it or if it is measured to be faster.

    Whatever the batch size must not change is ours, since stock's kernels choose by it.
    """
    global _judged
    last, policies = _judged, policy.policies()
    if last is not None and last[0] is problem and last[1] == backend and last[2] is policies:
        return last[3]
    verdict = _judge(problem, backend)
    _judged = problem, backend, policies, verdict
    return verdict


def _judge(problem: Problem, backend: str) -> Verdict:
    if backend == "cuda" and _is_step(problem) and not _has_decoding_kernel(problem):
        message = (
            f"so few queries ({problem.seqlen_q}), of this batch and heads, would run on the cuda backend's kernel of "
            "many queries; the triton backend has one that splits the keys"
        )
        return Verdict(False, "no decoding kernel", message)
    if problem.batch_invariant:
        problem = problem.of_one_batch()
    for rule in STOCK_FAILS:
        if rule.applies(problem):
            # A call with a mask is ours then, and a matter among our kernels.
            slower = policy.not_the_fastest_of_ours(problem, backend) if problem.mask is not None else None
            return Verdict(True, rule.reason, rule.message(problem)) if slower is None else slower
    if _empty(problem):
        return Verdict(False, "nothing to compute", f"query {describe_shape(problem.query_shape)} is empty")
    if problem.batch_invariant:
        slower = policy.not_the_fastest_of_ours(problem, backend)
        message = "set_batch_invariant(True): no choice may depend on the batch size, and PyTorch's do"
        return Verdict(True, "batch-invariant", message) if slower is None else slower
    return policy.judge(problem, backend)


def _is_step(problem: Problem) -> bool:
    """Few queries that need no gradient: decoding, where reading the keys is all of the work."""
    few = isinstance(problem.seqlen_q, int) and 0 < problem.seqlen_q <= policy.DECODE_SEQLEN
    return few and not problem.requires_grad and not problem.packed


def _has_decoding_kernel(problem: Problem) -> bool:
    """Of the cuda backend; as ``kernels/cuda/forward.py`` asks. With a symbolic size nobody knows: no."""
    if problem.dropout_p or problem.symbolic or problem.rank != 4:
        return False
    if max(problem.head_dim, problem.head_dim_v) > HOPPER_MAX_DECODE_HEAD_DIM:
        return False
    from .kernels.cuda import decode  # no kernel is compiled, and no GPU asked

    batch, heads = problem.query_shape[:2]
    expanded = problem.key_stride[1] == 0 and problem.value_stride[1] == 0
    kv_heads = 1 if expanded else problem.key_shape[1]
    mask = None
    if problem.mask is not None:
        missing = 4 - len(problem.mask.shape)
        shape, strides = (1,) * missing + problem.mask.shape, (0,) * missing + problem.mask.stride
        mask = decode.MaskLayout(problem.mask.dtype, shape, strides)
    return decode.takes(
        batch, kv_heads, problem.seqlen_q, problem.seqlen_k, heads // max(kv_heads, 1), problem.is_causal, mask
    )


def _reason(problem: Problem, name: str, rejected: list[tuple[str, str, str]], automatic: bool) -> str:
    if not automatic:
        return "asked for"
    if name != "stock":
        return worth(problem, name).reason
    # The last one asked has the fewest conditions, so its reason says most about the call.
    backend, constraint, _ = rejected[-1]
    return worth(problem, backend).reason if constraint == POLICY else constraint


def _layout(problem: Problem) -> str:
    return LAYOUTS.get(problem.stock_backend or "", "query")


# Validity: what stock rejects, or leaves to PyTorch's own rules. Asked by every backend of ours.


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _broadcast(*shapes: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The shape that shapes of one rank broadcast to, or None. Equal sizes are compared first: no guard for these."""
    result = []
    for sizes in zip(*shapes):
        size = sizes[0]
        for other in sizes[1:]:
            if guarded(other == size) or guarded(other == 1):
                continue
            if not guarded(size == 1):
                return None
            size = other
        result.append(size)
    return tuple(result)


def _batch_shapes(problem: Problem) -> tuple[tuple[Any, ...], ...]:
    """Batch and head dimensions of query, key and value, with the key and value heads of GQA as the query sees them."""
    shapes = [shape[:-2] for shape in (problem.query_shape, problem.key_shape, problem.value_shape)]
    if problem.enable_gqa and problem.rank > 2:
        shapes[1:] = [(*shape[:-1], shapes[0][-1]) for shape in shapes[1:]]
    return tuple(shapes)


def _sizes_match(problem: Problem) -> bool:
    return guarded(problem.head_dim == problem.key_shape[-1]) and guarded(problem.seqlen_k == problem.value_shape[-2])


def _heads_match(problem: Problem) -> bool:
    if not problem.enable_gqa:
        return True
    if problem.rank < 3:
        return False
    heads, kv_heads = problem.num_heads, problem.num_kv_heads
    same = guarded(kv_heads == problem.value_shape[-3])
    return same and not guarded(kv_heads == 0) and (guarded(heads == kv_heads) or guarded(heads % kv_heads == 0))


def _mask_fits(problem: Problem) -> bool:
    """Does the mask broadcast to the scores, [*batch, heads, Sq, Sk] of query and key, without enlarging them?"""
    mask = problem.mask
    if mask is None:
        return True
    if not 2 <= len(mask.shape) <= problem.rank:
        return False
    query, key, _ = _batch_shapes(problem)
    batch = _broadcast(query, key)
    scores = (*(batch or ()), problem.seqlen_q, problem.seqlen_k)[-len(mask.shape) :]
    return all(guarded(size == full) or guarded(size == 1) for size, full in zip(mask.shape, scores))


def _mask(problem: Problem) -> MaskInfo:
    assert problem.mask is not None
    return problem.mask


def _scale_ok(problem: Problem) -> bool:
    # A symbolic scale comes from a symbolic head_dim and is finite.
    return not isinstance(problem.scale, (int, float)) or math.isfinite(problem.scale)


VALID = (
    Constraint(
        "tensor type",
        lambda p: not p.tensor_types,
        lambda p: f"{', '.join(p.tensor_types)}: only plain tensors are taken, so that the type's own rules apply",
    ),
    Constraint(
        "devices",
        lambda p: len(p.devices) == 1,
        lambda p: f"query, key, value and attn_mask are on several devices: {', '.join(p.devices)}",
    ),
    Constraint(
        "dtypes",
        lambda p: p.query_dtype == p.key_dtype == p.value_dtype,
        lambda p: (
            "query, key and value have several dtypes: "
            f"{_name(p.query_dtype)}, {_name(p.key_dtype)}, {_name(p.value_dtype)}"
        ),
    ),
    Constraint(
        "rank",
        lambda p: p.rank >= 2 and p.rank == len(p.key_shape) == len(p.value_shape),
        lambda p: (
            "query, key and value need one rank, 2 or more; got "
            f"{p.rank}, {len(p.key_shape)} and {len(p.value_shape)} dimensions"
        ),
    ),
    Constraint(
        "shapes",
        _sizes_match,
        lambda p: (
            f"query {describe_shape(p.query_shape)}, key {describe_shape(p.key_shape)} and value "
            f"{describe_shape(p.value_shape)} do not fit: key needs the query's head_dim, value the key's length"
        ),
    ),
    Constraint(
        "kv heads",
        _heads_match,
        lambda p: (
            f"enable_gqa with {p.num_heads} query heads, {p.num_kv_heads} key heads and "
            f"{p.value_shape[-3] if p.rank > 2 else 1} value heads: "
            "key and value need one number that divides the query's"
        ),
    ),
    Constraint(
        "batch",
        lambda p: _broadcast(*_batch_shapes(p)) is not None,
        lambda p: (
            f"batch and heads of query {describe_shape(p.query_shape[:-2])}, key {describe_shape(p.key_shape[:-2])} "
            f"and value {describe_shape(p.value_shape[:-2])} do not broadcast"
            + ("" if p.enable_gqa else " (enable_gqa=True shares key and value heads)")
        ),
    ),
    Constraint(
        "mask and is_causal",
        lambda p: p.mask is None or not p.is_causal,
        lambda p: "attn_mask is given together with is_causal=True, which is stock's to judge",
    ),
    Constraint(
        "mask dtype",
        lambda p: p.mask is None or p.mask.dtype in (torch.bool, torch.float32, p.query_dtype),
        lambda p: (
            f"attn_mask is {_name(_mask(p).dtype)}; allowed: "
            + ", ".join(dict.fromkeys(("bool", "float32", _name(p.query_dtype))))
        ),
    ),
    Constraint(
        "mask shape",
        _mask_fits,
        lambda p: (
            f"attn_mask {describe_shape(_mask(p).shape)} does not broadcast to the scores of query "
            f"{describe_shape(p.query_shape)} and key {describe_shape(p.key_shape)}"
        ),
    ),
    Constraint(
        "dropout_p",
        lambda p: 0.0 <= p.dropout_p <= 1.0,
        lambda p: f"dropout_p {p.dropout_p} is not between 0 and 1",
    ),
    Constraint(
        "scale",
        _scale_ok,
        lambda p: f"scale {p.scale} is not a finite number",
    ),
)


# Constraints that a call fails where PyTorch, too, refuses it or has rules of its own.
PYTORCHS_BUSINESS = frozenset(
    {"devices", "dtypes", "rank", "shapes", "kv heads", "batch", "mask dtype", "mask shape", "dropout_p"}
)

# What the kernels' constraints ask.


def _architecture_ok(problem: Problem) -> bool:
    name = problem.architecture
    if name == "unknown":  # fake tensors on a machine without a GPU: the code may run on any
        return True
    return name.startswith("gfx") or (name.startswith("sm_") and int(name[3:]) >= 80)


def _gpu(problem: Problem) -> str:
    """Its name, where it has one beside its architecture's."""
    return "the GPU" if problem.gpu_name in ("", problem.architecture) else problem.gpu_name


def _head_dim_ok(size: Any) -> bool:
    return guarded(size >= 1) and guarded(size <= MAX_HEAD_DIM)


def _sdpa_kernel_message(problem: Problem) -> str:
    allowed = ", ".join(sorted(problem.sdp_backends)) or "nothing"
    return (
        f"torch.nn.attention.sdpa_kernel (or torch.backends.cuda) allows {allowed} here; "
        "torch_flashbackend counts as FLASH_ATTENTION, which is not among these"
    )


POLICY = "policy"


def _worth(backend: str) -> Constraint:
    """A kernel's constraint on speed, its last one. sdpa_backend(...) does without it."""
    return Constraint(POLICY, lambda p: worth(p, backend).take, lambda p: worth(p, backend).message)


# Our autograd function would drop tangents silently there. Below autograd (the kernel hook) none are left.
TRANSFORM = Constraint(
    "transform",
    lambda p: p.entry not in ("sdpa", "direct") or not p.transforms,
    lambda p: "a torch.func transform or forward-mode AD is active, which works on stock's operations",
)
ALLOWED = Constraint("sdpa_kernel", lambda p: "flash" in p.sdp_backends, _sdpa_kernel_message)

# The Hopper kernels.


def _hopper_head_dims_ok(problem: Problem) -> bool:
    head_dim, head_dim_v = problem.head_dim, problem.head_dim_v
    if guarded(head_dim == 192) and guarded(head_dim_v == 128):
        return True
    return guarded(head_dim == head_dim_v) and guarded(head_dim >= 8) and guarded(head_dim <= HOPPER_MAX_HEAD_DIM)


def _hopper_wide_ok(problem: Problem) -> bool:
    plain = problem.mask is None and problem.dropout_p == 0.0
    return plain or guarded(problem.head_dim <= HOPPER_MAX_MASK_HEAD_DIM)


def _hopper_dropout_ok(problem: Problem) -> bool:
    """Beside a mask it is the backward that has a kernel for dropout; the forward is the portable one's then."""
    if problem.dropout_p == 0.0 or problem.mask is None:
        return True
    trains_bool = problem.requires_grad and problem.mask.dtype == torch.bool
    return trains_bool and guarded(problem.head_dim <= HOPPER_MAX_MASKED_DROPOUT_HEAD_DIM)


def _hopper_seqlen_k_ok(problem: Problem) -> bool:
    """A symbolic length counts as short, without a guard; the kernel refuses what is too long when it runs."""
    return not isinstance(problem.seqlen_k, int) or problem.seqlen_k <= HOPPER_MAX_SEQLEN_K


def _hopper_heads_ok(problem: Problem) -> bool:
    """One batch size, and heads of key and value that agree: anything else is expanded, which no tensor map describes.

    Keys and values with one head are the exception, however many heads the query has.
    """
    query, key, value = (shape[:-2] for shape in (problem.query_shape, problem.key_shape, problem.value_shape))
    batches = all(guarded(q == k) and guarded(q == v) for q, k, v in zip(query[:-1], key[:-1], value[:-1]))
    if not query:
        return True
    same = guarded(key[-1] == value[-1])
    return batches and same and (problem.enable_gqa or guarded(key[-1] == query[-1]) or guarded(key[-1] == 1))


def _expanded(problem: Problem) -> tuple[str, int] | None:
    """(name, dimension) of a tensor with a stride of zero that a tensor map cannot describe."""
    tensors = {
        "query": (problem.query_shape, problem.query_stride),
        "key": (problem.key_shape, problem.key_stride),
        "value": (problem.value_shape, problem.value_stride),
    }
    heads = problem.rank - 3
    # Heads that key and value both expand are one head to the kernel.
    one_head = heads >= 0 and _is_zero(problem.key_stride[heads]) and _is_zero(problem.value_stride[heads])
    for name, (shape, stride) in tensors.items():
        for dim, (size, step) in enumerate(zip(shape[:-1], stride)):
            as_one_head = one_head and dim == heads and name != "query"
            if _is_zero(step) and not as_one_head and not (isinstance(size, int) and size == 1):
                return name, dim
    return None


def _is_zero(stride: Any) -> bool:
    """Symbolic strides count as positive, without a look: a look would be a guard."""
    return isinstance(stride, int) and stride == 0


def _walkable_mask(mask: MaskInfo) -> bool:
    """As ``kernels/cuda/masks.py`` asks of a float mask. What is symbolic counts as good, without a guard: where it is
    not, the call runs on the triton backend in its place.
    """
    *sizes, keys = mask.shape
    *strides, step = mask.stride
    if _is_int(keys, 1) or (isinstance(step, int) and step != 1):
        return False
    rows = (stride * mask.dtype.itemsize for size, stride in zip(sizes, strides) if not _is_int(size, 1))
    return all(not isinstance(stride, int) or stride % 16 == 0 for stride in rows)


def _is_int(size: Any, number: int) -> bool:
    return isinstance(size, int) and size == number


def _expanded_message(problem: Problem) -> str:
    found = _expanded(problem)
    name, dim = found or ("query", 0)
    return f"dimension {dim} of {name} is expanded (its stride is 0), which the cuda backend's copies cannot walk"


CUDA = Backend(
    "cuda",
    (
        Constraint(
            "device",
            lambda p: p.device_type == "cuda",
            lambda p: f"the tensors are on {p.device_type}; the cuda backend runs on NVIDIA GPUs",
        ),
        Constraint(
            "architecture",
            lambda p: p.architecture == HOPPER,
            lambda p: (
                f"{_gpu(p)} is {p.architecture}; "
                "the cuda backend needs compute capability 9.0 (sm_90: H100, H200, H20, GH200)"
            ),
        ),
        Constraint(
            "compiler",
            lambda p: not p.no_compiler,
            lambda p: f"the cuda backend's kernels cannot be compiled here: {p.no_compiler}",
        ),
        *VALID,
        TRANSFORM,
        Constraint(
            "dtype",
            lambda p: p.query_dtype in HALF_TYPES,
            lambda p: f"{_name(p.query_dtype)} is not supported by the cuda backend (float16, bfloat16)",
        ),
        Constraint(
            "attn_mask",
            lambda p: p.mask is None or p.mask.dtype == torch.bool or _walkable_mask(p.mask),
            lambda p: (
                f"attn_mask {describe_shape(_mask(p).shape)} of {_name(_mask(p).dtype)} has strides "
                f"{describe_shape(_mask(p).stride)}; the cuda backend takes float masks whose last dimension is that "
                "of the keys and dense, with all other strides multiples of 16 bytes, and all bool masks"
            ),
        ),
        Constraint(
            "float32 attn_mask",
            lambda p: (
                p.mask is None or p.mask.dtype != torch.float32 or guarded(p.head_dim <= HOPPER_MAX_BIAS_HEAD_DIM)
            ),
            lambda p: (
                f"attn_mask is float32 with head_dim {p.head_dim}, which the cuda backend takes up to "
                f"{HOPPER_MAX_BIAS_HEAD_DIM}"
            ),
        ),
        Constraint(
            "packed",
            lambda p: not p.packed,
            # One operator serves both (varlen.py), which chooses between its kernels by what a Problem does not hold.
            lambda p: (
                "packed sequences are counted as triton's, which on Hopper GPUs hands plain ones to cuda's kernels"
            ),
        ),
        Constraint(
            "dropout",
            _hopper_dropout_ok,
            lambda p: (
                f"dropout_p {p.dropout_p:g} with attn_mask is supported by the cuda backend in training alone, with "
                f"bool masks and up to a head_dim of {HOPPER_MAX_MASKED_DROPOUT_HEAD_DIM}"
            ),
        ),
        Constraint(
            "dropout head_dim",
            lambda p: p.dropout_p == 0.0 or guarded(p.head_dim <= HOPPER_MAX_DROPOUT_HEAD_DIM),
            lambda p: (
                f"dropout_p {p.dropout_p:g} with head_dim {p.head_dim}, which the cuda backend takes up to "
                f"{HOPPER_MAX_DROPOUT_HEAD_DIM}"
            ),
        ),
        Constraint(
            "positive scale",
            lambda p: not isinstance(p.scale, (int, float)) or p.scale > 0.0,
            lambda p: f"scale {p.scale} is not supported by the cuda backend (a positive number)",
        ),
        Constraint(
            "head_dim",
            _hopper_head_dims_ok,
            lambda p: (
                f"head_dim {p.head_dim} with value head_dim {p.head_dim_v} is not supported by the cuda backend "
                f"(equal, 8 to {HOPPER_MAX_HEAD_DIM}; or 192 with 128)"
            ),
        ),
        Constraint(
            "wide head_dim",
            _hopper_wide_ok,
            lambda p: (
                f"attn_mask or dropout_p with head_dim {p.head_dim}, which the cuda backend takes up to "
                f"{HOPPER_MAX_MASK_HEAD_DIM}"
            ),
        ),
        Constraint(
            "head_dim multiple",
            lambda p: guarded(p.head_dim % 8 == 0),
            lambda p: f"head_dim {p.head_dim} is no multiple of 8, as the cuda backend needs",
        ),
        Constraint(
            "seqlen_k",
            _hopper_seqlen_k_ok,
            lambda p: (
                f"{p.seqlen_k} keys are more than the cuda backend adds up accurately (largest: {HOPPER_MAX_SEQLEN_K})"
            ),
        ),
        Constraint(
            "alignment",
            lambda p: p.aligned,
            lambda p: (
                "the cuda backend needs pointers and strides of query, key and value that are multiples of 16 bytes, "
                "and a dense last dimension"
            ),
        ),
        Constraint(
            "batch and heads",
            _hopper_heads_ok,
            lambda p: (
                f"batch and heads of query {describe_shape(p.query_shape[:-2])}, key "
                f"{describe_shape(p.key_shape[:-2])} and value {describe_shape(p.value_shape[:-2])} broadcast, which "
                "the cuda backend does not do"
            ),
        ),
        Constraint("expanded", lambda p: _expanded(p) is None, _expanded_message),
        ALLOWED,
        _worth("cuda"),
    ),
)

# The Triton kernels.
TRITON = Backend(
    "triton",
    (
        Constraint(
            "device",
            lambda p: p.device_type == "cuda",
            lambda p: f"the tensors are on {p.device_type}; the triton backend runs on NVIDIA and AMD GPUs",
        ),
        Constraint(
            "architecture",
            _architecture_ok,
            lambda p: (
                f"{_gpu(p)} is {p.architecture}; "
                "the triton backend needs compute capability 8.0 (sm_80) or later, or an AMD GPU"
            ),
        ),
        *VALID,
        TRANSFORM,
        Constraint(
            "dtype",
            lambda p: p.query_dtype in (*HALF_TYPES, torch.float32),
            lambda p: f"{_name(p.query_dtype)} is not supported by the triton backend (float16, bfloat16, float32)",
        ),
        Constraint(
            "head_dim",
            lambda p: _head_dim_ok(p.head_dim),
            lambda p: (
                f"head_dim {p.head_dim} is not supported by the triton backend (largest: {MAX_HEAD_DIM})"
                if p.head_dim
                else "head_dim 0 is not supported by the triton backend (smallest: 1)"
            ),
        ),
        Constraint(
            "value head_dim",
            lambda p: _head_dim_ok(p.head_dim_v),
            lambda p: (
                f"value head_dim {p.head_dim_v} is not supported by the triton backend (largest: {MAX_HEAD_DIM})"
                if p.head_dim_v
                else "value head_dim 0 is not supported by the triton backend (smallest: 1)"
            ),
        ),
        Constraint(
            "packed head_dim",
            lambda p: not p.packed or max(p.head_dim, p.head_dim_v) <= MAX_PACKED_HEAD_DIM,
            lambda p: (
                f"head_dim {p.head_dim} with value head_dim {p.head_dim_v} is not supported by the triton backend for "
                f"packed sequences (largest: {MAX_PACKED_HEAD_DIM})"
            ),
        ),
        ALLOWED,
        _worth("triton"),
    ),
)

# The math path in plain PyTorch (reference.py): for those who ask for it by name.
MATH = Backend(
    "math",
    (
        *VALID,
        Constraint(
            "dtype",
            lambda p: p.query_dtype in (*HALF_TYPES, torch.float32, torch.float64),
            lambda p: (
                f"{_name(p.query_dtype)} is not supported by the math backend (float16, bfloat16, float32, float64)"
            ),
        ),
        Constraint("sdpa_kernel", lambda p: bool(p.sdp_backends & {"flash", "math"}), _sdpa_kernel_message),
    ),
)

STOCK = Backend("stock", ())

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (CUDA, TRITON, MATH, STOCK)}


# Calls that stock's own choice gets wrong or refuses (torch 2.11 to 2.14).


def _empty(problem: Problem) -> bool:
    """Is there no query at all? A symbolic size is never 0, and asking would be a guard."""
    return any(isinstance(n, int) and n == 0 for n in problem.query_shape[:-1])


def _too_many(problem: Problem) -> bool:
    limited = {"flash": problem.query_shape[:-2], "efficient": problem.query_shape[-3:-2]}
    return any(isinstance(n, int) and n > 65535 for n in limited.get(problem.stock_backend or "", ()))


def _unaligned(problem: Problem) -> bool:
    # Flash pads a head_dim that is no multiple of 8, and the copy is aligned.
    padded = problem.stock_backend == "flash" and isinstance(problem.head_dim, int) and problem.head_dim % 8 != 0
    return not problem.aligned and problem.stock_backend in FUSED and not padded


def _negative(scale: Any) -> bool:
    return isinstance(scale, (int, float)) and scale < 0


STOCK_FAILS = (
    Rule(
        "stock is wrong: empty batch in cuDNN",
        lambda p: p.stock_backend == "cudnn" and _empty(p),
        lambda p: f"stock would run cuDNN, which returns no tensor for the empty query {describe_shape(p.query_shape)}",
    ),
    Rule(
        "stock is wrong: mask in cuDNN",
        lambda p: p.stock_backend == "cudnn" and p.mask is not None,
        lambda p: "stock would run cuDNN, which answers a fully masked row with the mean of value instead of zeros",
    ),
    Rule(
        "stock is wrong: negative scale in cuDNN",
        lambda p: p.stock_backend == "cudnn" and _negative(p.scale),
        lambda p: f"stock would run cuDNN, which can give infinities for a negative scale ({p.scale})",
    ),
    Rule(
        "stock is wrong: alignment",
        _unaligned,
        lambda p: (
            f"stock would run {p.stock_backend}, which "
            + ("reads wrong data" if p.stock_backend == "cudnn" else "fails")
            + " where pointers or strides are no multiples of 16 bytes"
        ),
    ),
    Rule(
        "stock refuses: over 65535 batches or heads",
        _too_many,
        lambda p: (
            f"stock would run {p.stock_backend}, which cannot launch for query {describe_shape(p.query_shape)} "
            "(more than 65535 batches or heads)"
        ),
    ),
    Rule(
        "stock refuses",
        lambda p: p.stock_backend == "error",
        lambda p: f"stock has no kernel for this call among {', '.join(sorted(p.sdp_backends))} and would raise",
    ),
    Rule(
        "stock falls back to math",
        lambda p: p.stock_backend == "math" and not _empty(p),
        lambda p: "none of stock's fused kernels takes the call; its math path would store all scores in memory",
    ),
)
