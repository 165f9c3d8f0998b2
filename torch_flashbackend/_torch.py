"""Every private name of torch that the plugin's rules use, one function each, with what breaks if it goes.

May import torch only. Imported by batch_invariance, problem, stock, routing, verify and the hooks.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend


def transforms_active() -> bool:
    """Is a functorch transform (grad, vmap, jvp ...) or a forward-mode AD level active in this thread? 25 to 50 ns.

    If these names go: torch.func.jvp and forward AD would lose tangents silently, so the plugin must not start.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def nested_derivatives() -> bool:
    """Are two or more derivatives of torch.func active, one within the other? Asked only where `functorch_active`.

    If the names go: False, and second derivatives of torch.func raise as they do in stock.
    """
    functorch = torch._C._functorch
    try:
        kinds = [interpreter.key() for interpreter in functorch.get_interpreter_stack() or ()]
        return sum(kind in (functorch.TransformType.Grad, functorch.TransformType.Jvp) for kind in kinds) > 1
    except AttributeError:
        return False


def sdp_priority_order() -> tuple[int, ...]:
    """The order in which stock tries its backends, as values of SDPBackend.

    If the name goes: sdpa_kernel(..., set_priority=True) is not seen, and the order is taken to be the default.
    """
    try:
        return tuple(torch._C._get_sdp_priority_order())
    except AttributeError:
        return ()


def fused_sdp_choice(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> SDPBackend | None:
    """Which backend stock would run for this call, by its own rules; None where it does not say. Some microseconds.

    If the name goes, or refuses: `stock.estimate` answers, which has the rules of the supported versions.
    """
    try:
        choice = torch._fused_sdp_choice(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return SDPBackend(choice)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError, IndexError):
        return None


def surely(condition: Any) -> bool:
    """Is a condition on sizes true, as far as can be said without adding a guard to the graph being traced?

    If the name goes: conditions on symbolic sizes count as unknown, so False.
    """
    if isinstance(condition, bool):
        return condition
    try:
        from torch.fx.experimental.symbolic_shapes import statically_known_true
    except ImportError:
        return False
    return statically_known_true(condition)


def guarded(condition: Any) -> bool:
    """Is a condition on sizes true? Adds a guard for a symbolic one; False for one that depends on data.

    If the name goes: `bool` does the same, and raises for sizes that depend on data.
    """
    if isinstance(condition, bool):
        return condition
    try:
        from torch.fx.experimental.symbolic_shapes import guard_or_false
    except ImportError:
        return bool(condition)
    return guard_or_false(condition)


# What follows belongs to the hooks. Names bound at import instead of functions are called on the path of every
# attention call, where a wrapper would cost more than what it wraps.

functorch_active = torch._C._are_functorch_transforms_active
"""Half of `transforms_active`, 25 ns; forward_ad._current_level is the other half. Breaks as said there."""

function_modes = torch._C._len_torch_function_stack
"""How many TorchFunctionModes are active. If it goes: replace it by `lambda: 1`, which is right and slower."""

any_autocast = torch._C._is_any_autocast_enabled
"""Is autocast on for some type of device? If it goes: likewise."""

profiler_enabled = torch.autograd._profiler_enabled
"""Is the profiler on in this thread? If it goes: `lambda: True`, and calls left to stock cost some µs more."""

ANY_KEYSET = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeImplicitAutograd)
"""What a boxed kernel is given that does not look at its keyset."""

is_functional_tensor = torch._is_functional_tensor
"""Is this a tensor wrapped by functionalization? If it goes: only FunctionalTensor, told by its type, holds such."""

flash_enabled = torch._C._get_flash_sdp_enabled
efficient_enabled = torch._C._get_mem_efficient_sdp_enabled
math_enabled = torch._C._get_math_sdp_enabled
cudnn_enabled = torch._C._get_cudnn_sdp_enabled
deterministic_enabled = torch._C._get_deterministic_algorithms
"""What torch.backends.cuda.*_sdp_enabled and torch.are_deterministic_algorithms_enabled return, 15 ns each. If one
goes: use those."""


priority_order = torch._C._get_sdp_priority_order
"""`sdp_priority_order`, as a list. If it goes: as said there."""


def keyset_bits(*keys: str) -> int:
    """The dispatch key set of these keys as an integer, as DispatchKeySet.raw_repr() of a call gives it.

    If raw_repr goes: the hooks cannot tell plain tensors from traced ones cheaply and must not start.
    """
    bits = 0
    for key in keys:
        bits |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)).raw_repr()
    return bits


@functools.cache
def backend_bits() -> int:
    """`keyset_bits` of the backends, and of the kinds of tensor whose kernels differ: dense, sparse, nested, quantized.

    All that decides, below BackendSelect, which kernel runs.
    """
    backends = ("CPU", "CUDA", "HIP", "XLA", "MPS", "IPU", "XPU", "HPU", "VE", "Lazy", "MTIA", "MAIA", "Meta",
                "PrivateUse1", "PrivateUse2", "PrivateUse3")  # fmt: skip
    kinds = ("", "Sparse", "SparseCsr", "Quantized", "NestedTensor")
    names = [kind + backend for kind in kinds for backend in backends]
    return keyset_bits(*(name for name in names if hasattr(torch._C.DispatchKey, name)))


def keyset(*keys: str) -> Any:
    """The dispatch key set of these keys. If it goes: nothing here works."""
    result = torch._C.DispatchKeySet(dispatch_key(keys[0]))
    for key in keys[1:]:
        result = result | torch._C.DispatchKeySet(dispatch_key(key))
    return result


def keys_after(key: str) -> Any:
    """The dispatch key set of what comes after this key. If the name goes: the kernel hook must use the backend's key,
    and calls with gradients that are left to stock cost 5 µs more.
    """
    return torch._C._dispatch_keyset_full_after(dispatch_key(key))


def drop_compiled_code() -> None:
    """Have what torch.compile has made in this process made again, if it has made anything."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and hasattr(dynamo, "reset"):
        dynamo.reset()


def built_for(key: str) -> bool:
    """Can there be tensors of this dispatch key? PyTorch for AMD GPUs calls its own CUDA too."""
    return key != "CUDA" or torch.version.cuda is not None or torch.version.hip is not None


def dispatch_key(name: str) -> Any:
    """torch._C.DispatchKey.<name>. If it goes: nothing here works."""
    return getattr(torch._C.DispatchKey, name)


def python_kernel_registered(op: str, key: str) -> bool:
    """Has another Python library already put a kernel on aten::<op> at this dispatch key?

    If torch.library._impls goes: registering raises (torch 2.11) or warns (later) by itself, in torch's words.
    """
    return f"aten/{op}/{key}" in getattr(torch.library, "_impls", ())


def kernel_handle(op: str, key: str) -> Any:
    """Stock's kernel of aten::<op> at this dispatch key, with `call_boxed(keyset, *args, **kwargs)`; None if there is
    none (a build without CUDA). The function is public, the class that it returns is not.
    """
    try:
        return torch.library.get_kernel(f"aten::{op}", key)
    except RuntimeError:
        return None


def clear_dispatch_cache(op: str) -> None:
    """Make AOT tracing look up the kernels of aten::<op> again: it remembers them per op, and nothing else clears that.

    If `_dispatch_cache` goes: test_compile.py's test of compiling before enabling fails.
    """
    for overload in getattr(torch.ops.aten, op).overloads():
        getattr(getattr(torch.ops.aten, op), overload)._dispatch_cache.clear()


def destroy_library(library: torch.library.Library) -> None:
    """Unregister everything that a Library has registered, now and not when Python collects it.

    If `_destroy` goes: dropping the last reference does the same.
    """
    library._destroy()


def exclude_keys(*keys: str) -> Any:
    """Context manager: these dispatch keys are skipped in this thread. If it goes: `torch.autocast(enabled=False)`."""
    return torch._C._ExcludeDispatchKeyGuard(keyset(*keys))


def allows_tf32() -> bool:
    """May float32 matrix products on CUDA use TF32? 0.2 us.

    Reads the setting where both of torch's interfaces (allow_tf32 and fp32_precision) arrive; the public getter of the
    older one raises once the newer was used. If the name goes: TF32 counts as not allowed, slower and never wrong.
    """
    try:
        return torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"
    except AttributeError:
        return False


dispatch_modes = torch._C._len_torch_dispatch_stack
# Is a tensor of the ordinary type a batch of tensors or a transform's? If the names go, the plugin must not start:
# batched gradients would raise.
legacy_batched = torch._C._functorch.is_legacy_batchedtensor
functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
"""How many TorchDispatchModes are active (fake tensors, tracing). If it goes: `lambda: 1`, right and slower."""


def packaging() -> bool:
    """Is AOTInductor compiling a program, to be run by a process that may not have this package? For traced calls.

    If the name goes: such packages hold our operators, and cannot be loaded without us.
    """
    virtualized = sys.modules.get("torch._inductor.virtualized")
    return virtualized is not None and getattr(virtualized.V, "aot_compilation", False) is True


def sharding_depends_on(op: Any, first: int) -> None:
    """Let DTensor, which remembers how an operator is sharded, tell calls apart by all arguments from `first` on.

    `register_sharding` looks at integers only. If the names go: an operator called with other flags gets outputs that
    are described wrongly, which test_distributed.py notices.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.op_to_schema_info[op] = RuntimeSchemaInfo(first, needs_pytree=True)


def selective_checkpoint() -> bool:
    """Is selective activation checkpointing, with a policy of the user's, recording or replaying in this thread?

    For traced calls. If the names go: policies that name stock's attention operators do not know ours, and attention
    is recomputed.
    """
    checkpoint = sys.modules.get("torch.utils.checkpoint")
    if checkpoint is None:
        return False
    kinds = (
        getattr(checkpoint, "_CachingTorchDispatchMode", None),
        getattr(checkpoint, "_CachedTorchDispatchMode", None),
    )
    # A compiled checkpoint without a policy has this one, which asks for no names.
    wrap = sys.modules.get("torch._higher_order_ops.wrap")
    no_policy = getattr(wrap, "_always_prefer_recompute", None)
    stack = getattr(torch.utils._python_dispatch, "_get_current_dispatch_mode_stack", tuple)
    return any(
        type(mode) in kinds and (no_policy is None or getattr(mode, "policy_fn", None) is not no_policy)
        for mode in stack()
    )


is_wrapper = torch.utils._python_dispatch.is_traceable_wrapper_subclass
"""Is this a tensor subclass around other tensors, with rules of its own for operators (DTensor)? 70 ns. If it goes:
`lambda tensor: False`, and ring attention then runs stock's kernels."""


def jagged(tensor: Tensor) -> tuple[Tensor, Tensor, int, int] | None:
    """(rows [total, H, D], offsets [B + 1], shortest, longest) of a nested tensor [B, H, S of each, D], jagged layout.

    None for any other tensor. If the names go: `explain` does not see into nested tensors.
    """
    if not tensor.is_nested or tensor.layout is not torch.jagged or tensor.dim() != 4:
        return None
    if getattr(tensor, "_ragged_idx", None) != 2 or tensor.lengths() is not None:
        return None
    return tensor.transpose(1, 2).values(), tensor.offsets(), *jagged_extremes(tensor)


def jagged_extremes(tensor: Any) -> tuple[int, int]:
    """The shortest and the longest length. Kept by the nested tensor once known; until then this waits for the GPU."""
    return tensor._get_min_seqlen(), tensor._get_max_seqlen()


# What nested.py needs. If one of these names goes, `nested_sdpa` is None or `jagged_known` False, and nested tensors
# are PyTorch's to unwrap, as they were without that file: slowly, and the kernel hook sees what they end in.

NESTED_OPS = "torch.nested._internal.ops"
"""The module that has the rules of nested tensors of jagged layout. Imported by the first of them."""
_NESTED_SDPA = "jagged_scaled_dot_product_attention"

no_torch_function = torch._C.DisableTorchFunctionSubclass
"""Context manager: attributes of tensor subclasses are read without their __torch_function__, 10 µs each otherwise."""

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def nested_sdpa() -> Callable[..., Tensor] | None:
    """What F.scaled_dot_product_attention comes to for nested tensors of jagged layout."""
    return getattr(sys.modules.get(NESTED_OPS), _NESTED_SDPA, None)


def set_nested_sdpa(function: Callable[..., Tensor]) -> None:
    """Put another in its place."""
    setattr(sys.modules[NESTED_OPS], _NESTED_SDPA, function)


@functools.cache
def jagged_class() -> type | None:
    """The type of nested tensors of jagged layout."""
    try:
        return importlib.import_module("torch.nested._internal.nested_tensor").NestedTensor
    except (ImportError, AttributeError):
        return None


def jagged_rows(tensor: Any) -> tuple[Tensor, Tensor] | None:
    """(rows [total, H, D], offsets [B + 1]) of a nested tensor [B, H, S of each, D], not through the dispatcher: 2 µs.

    None for any other tensor. rows is outside of autograd's graph, and does not share the tensor's version counter.
    """
    kind: Any = jagged_class()
    if type(tensor) is not kind or tensor._ragged_idx != 2 or tensor._lengths is not None:
        return None
    values = tensor._values
    if type(values) not in _PLAIN_TYPES or values.dim() != 3:
        return None
    return (values.detach() if values.requires_grad else values).transpose(0, 1), tensor._offsets


def jagged_rows_with_version(tensor: Any) -> Tensor:
    """The rows [total, H, D] once more, now with the nested tensor's version counter, and without a reference to it.

    Through the dispatcher, 50 µs. autograd notices by them that the nested tensor was changed in place.
    """
    return torch._nested_get_values(tensor).detach().transpose(0, 1)  # type: ignore[attr-defined]


def saved_tensor_hooks_active() -> bool:
    """Do torch.autograd.graph.saved_tensors_hooks see what is saved for a backward in this thread? 0.2 µs.

    If the name goes: True, and changes in place to a nested tensor between forward and backward are not noticed.
    """
    try:
        return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    except AttributeError:
        return True


class JaggedStructure(NamedTuple):
    """All that nested tensors [B, H, S of each, D] with the same sequences have in common, and none of their data."""

    offsets: Tensor
    attributes: dict[str, Any]
    marks: dict[str, Any]


def jagged_structure(tensor: Any) -> JaggedStructure:
    """Of a tensor that `jagged_rows` takes."""
    attributes, marks = _how_jagged_are_made()
    own, inner = tensor.__dict__, tensor._values.__dict__
    return JaggedStructure(
        tensor._offsets, {name: own[name] for name in attributes if name in own},
        {name: inner[name] for name in marks if name in inner},
    )  # fmt: skip


def jagged_tensor(rows: Tensor, structure: JaggedStructure) -> Tensor:
    """rows [total, H, D] as a nested tensor of this structure, outside of autograd's graph.

    The constructor's `__new__` without its `__init__`, which takes 0.3 ms in torch 2.11, most of it marking sizes as
    dynamic for torch.compile: what `__init__` has set before is the same here.
    """
    kind: Any = jagged_class()
    values = rows.transpose(0, 1)
    tensor = kind.__new__(kind, values, structure.offsets, _ragged_idx=2)
    for target, attributes in ((tensor.__dict__, structure.attributes), (values.__dict__, structure.marks)):
        for name, value in attributes.items():
            target[name] = set(value) if type(value) is set else value
    tensor._values = values
    return tensor


@functools.cache
def jagged_known() -> bool:
    """Are nested tensors made as `jagged_tensor` makes them?"""
    try:
        return bool(_how_jagged_are_made())
    except Exception:  # whatever another version raises there
        return False


@functools.cache
def _how_jagged_are_made() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of what `__init__` sets on a nested tensor beside its values, and of what it sets on these."""
    kind: Any = jagged_class()
    offsets = torch.zeros(2, dtype=torch.int64, device="cpu")
    kept = {name: torch.zeros(1, 0, device="cpu") for name in ("min_seqlen", "max_seqlen")}

    def values() -> Tensor:
        return torch.zeros(1, 1, 1, device="cpu")

    made = kind(values(), offsets, _ragged_idx=2, _metadata_cache=kept)
    bare = kind.__new__(kind, values(), offsets, _ragged_idx=2)
    for name in ("_values", "_offsets", "_lengths", "_ragged_idx", "_get_min_seqlen", "_get_max_seqlen"):
        getattr(made, name)
    if made._metadata_cache is not kept:
        raise AttributeError("nested tensors do not share what they know about their lengths")
    attributes = [name for name in made.__dict__ if name not in bare.__dict__ and name != "_values"]
    return tuple(attributes), tuple(made._values.__dict__)


class _ThreadMark(threading.local):
    stock = False


thread_mark = _ThreadMark()
"""`stock` is True in a thread while a call that has been left to stock runs: the kernel hook must not judge it."""


def as_stock(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call it, marked: what it ends in is not judged again."""
    before, thread_mark.stock = thread_mark.stock, True
    try:
        return function(*args, **kwargs)
    finally:
        thread_mark.stock = before


@functools.cache
def composite_sdpa() -> Any:
    """Stock's scaled_dot_product_attention itself, whatever is registered on top of it: one C++ function, the same for
    every device. It takes a keyset, as every kernel does, and does not look at it.
    """
    return kernel_handle("scaled_dot_product_attention", "CPU")


def function_mode_stack() -> tuple[Any, ...]:
    """The TorchFunctionModes that are active in this thread, innermost last.

    If the name goes: `explain` does not see sdpa_backend blocks, and says what would run outside of them.
    """
    stack = getattr(torch.overrides, "_get_current_function_mode_stack", None)
    return tuple(stack()) if stack is not None else ()


def tensor_guard(tensors: tuple[Tensor, ...]) -> Any:
    """A function that says, of as many tensors, whether they are like these: type, dispatch keys (with the modes that
    are active), dtype, device, sizes, strides, and whether they require grad in the present grad mode. One call into
    C++, 0.3 µs for three tensors, where reading the same from Python costs 2.5 µs. It keeps no tensor alive.

    None if the class goes (Dynamo has others of its kind): look-ups then take the long way, 3 µs more.
    """
    try:
        # The arguments say which sizes must match; None in place of a number would let any pass.
        guards = torch._C._dynamo.guards.TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
        )
        return guards.check if guards.check(*tensors) else None
    except (AttributeError, RuntimeError, TypeError, SystemError):
        return None


_empty_strided_cuda = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None) if torch.version.cuda else None
_current_device = getattr(torch._C, "_cuda_getDevice", lambda: -1)


def allocator(like: Tensor) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """A function (shape, strides, dtype) -> uninitialised tensor on the device of `like`, for calls at this moment.

    shape and strides: plain tuples, no torch.Size.

    No dispatch mode sees what it makes: see `unobserved`. The allocation that Inductor's generated code makes, without
    the dispatcher: 1 µs, where torch.empty with a dtype and a device takes 4, and without the NaNs that torch.empty
    writes in deterministic mode: kernels write all of it. If the name goes, torch.empty_strided does it; so too on
    another device than the current one.
    """
    if _empty_strided_cuda is not None and like.is_cuda and _current_device() == like.get_device():
        return _empty_strided_cuda
    device = like.device
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def empty_here(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`allocator` for memory of one dimension on the current device, which `device` is."""
    if _empty_strided_cuda is not None and device.type == "cuda":
        return _empty_strided_cuda((size,), (1,), dtype)
    return torch.empty((size,), dtype=dtype, device=device)


def empty_float32(like: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Uninitialised float32 memory, by `allocator`."""
    return allocator(like)(shape, strides, torch.float32)


def set_backward(function: Any, backward: Callable[..., Any]) -> None:
    """Have autograd's engine call `backward(ctx, *grads)` for a torch.autograd.Function, where it would ask the class.

    Who traces a backward (compiled autograd) finds the class's own. If the name goes: the engine does so too, and a
    backward on small tensors costs some µs more.
    """
    node = getattr(function, "_backward_cls", None)
    if node is not None:
        node.apply = backward


def unobserved(tensor: Tensor) -> bool:
    """Is this an ordinary tensor, with no dispatch mode active and no profiler running? 0.2 us.

    A batch of gradients (``is_grads_batched``) reaches a backward as a tensor of the ordinary type without storage.
    """
    plain = type(tensor) in (Tensor, torch.nn.Parameter)
    wrapped = legacy_batched(tensor) or functorch_wrapped(tensor)
    return plain and not wrapped and dispatch_modes() == 0 and not profiler_enabled()
