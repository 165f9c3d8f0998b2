"""Problem: a frozen description of one call of scaled_dot_product_attention, with no tensors in it.

May import torch, `_torch.py`, `batch_invariance.py`, `nvrtc.py` and `stock.py`. Imported by routing, policy, explain,
verify and by the two hooks. Everything that a routing rule may look at is a field here, so that every rule runs without
a GPU: a test writes `Problem.from_shapes(..., gpu="NVIDIA H200")` and asks.

Sizes may be `torch.SymInt` while a graph is traced. Nothing here turns them into numbers or hashes them, and nothing
compares them unless the answer is the call's validity: a comparison is a guard, and a guard may be a recompile.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _torch, nvrtc, stock
from .batch_invariance import is_batch_invariant

__all__ = ["MaskInfo", "Problem", "describe_shape", "is_aligned", "known_architecture"]

# Tensor types that behave as a plain tensor below the dispatcher; by name, so that none of them is imported for it.
PLAIN_TYPES = frozenset(
    {
        "torch.Tensor",
        "torch.nn.parameter.Parameter",
        "torch.nn.parameter.Buffer",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.functional_tensor.FunctionalTensor",
    }
)
# GPU names (a part of what torch.cuda.get_device_name says) and their architecture, for questions about another
# machine. Whole names: "L4" is not "L40", but "L40" is "L40S" too.
ARCHITECTURES = (
    ("RTX PRO 6000", "sm_120"),
    ("RTX 5090", "sm_120"),
    ("RTX 5080", "sm_120"),
    ("B300", "sm_103"),
    ("B200", "sm_100"),
    ("GH200", "sm_90"),
    ("H200", "sm_90"),
    ("H100", "sm_90"),
    ("H20", "sm_90"),
    ("RTX 6000 Ada", "sm_89"),
    ("RTX 4090", "sm_89"),
    ("RTX 4080", "sm_89"),
    ("L40", "sm_89"),
    ("L4", "sm_89"),
    ("RTX A6000", "sm_86"),
    ("RTX 3090", "sm_86"),
    ("A40", "sm_86"),
    ("A100", "sm_80"),  # before A10, which is a part of it
    ("A10", "sm_86"),
    ("A30", "sm_80"),
    ("T4", "sm_75"),
    ("V100", "sm_70"),
    ("MI355X", "gfx950"),
    ("MI325X", "gfx942"),
    ("MI300X", "gfx942"),
    ("MI250X", "gfx90a"),
)
HOPPER = "sm_90"
# What a call meets where nobody has asked for anything else.
ALL_SDP_BACKENDS = frozenset({"flash", "efficient", "math", "cudnn"})


@dataclass(frozen=True, slots=True)
class MaskInfo:
    """The attention mask of a call: [..., Sq or 1, Sk or 1]."""

    dtype: torch.dtype
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    requires_grad: bool
    device_type: str


@dataclass(frozen=True, slots=True)
class Problem:
    """One call, described. Shapes are [*batch, heads, seqlen, head_dim], as the caller gave them, of any rank."""

    entry: str
    """Who asks: "sdpa" (the call hook), "direct" (our own functions), or the aten op's name (the kernel hook)."""
    device_type: str
    device_index: int | None
    devices: tuple[str, ...]
    """The distinct devices of query, key, value and mask: one, or the call is invalid."""
    architecture: str
    """"sm_90", "gfx942", "cpu", "mps"; "unknown" for fake CUDA tensors on a machine without a GPU."""
    gpu_name: str
    sm_count: int | None
    query_dtype: torch.dtype
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    query_shape: tuple[Any, ...]
    key_shape: tuple[Any, ...]
    value_shape: tuple[Any, ...]
    query_stride: tuple[Any, ...]
    key_stride: tuple[Any, ...]
    value_stride: tuple[Any, ...]
    aligned: bool
    """Pointers and strides of query, key and value are multiples of 16 bytes; True where they cannot be known."""
    mask: MaskInfo | None
    is_causal: bool
    dropout_p: float
    scale: Any
    enable_gqa: bool
    requires_grad: bool
    """Grad mode is on and query, key, value or the mask requires grad."""
    deterministic: bool
    tf32: bool
    """float32 inputs may be multiplied in TF32. Always False for other dtypes."""
    transforms: bool
    """A functorch transform or forward-mode AD is active."""
    tensor_types: tuple[str, ...]
    """Types of the arguments that are not plain tensors: subclasses, sparse or nested layouts."""
    sdp_backends: frozenset[str]
    """What torch.nn.attention.sdpa_kernel and torch.backends.cuda leave enabled: "flash", "efficient", "math",
    "cudnn". One that the caller has put behind "math" is left out: math takes every call, so it would never run."""
    stock_backend: str | None
    """What PyTorch would run: "flash", "efficient", "cudnn", "math", "error", or None where nobody can say."""
    packed: bool = False
    """Sequences of different lengths, packed one after the other; the shapes are those of padding to the longest."""
    batch_invariant: bool = False
    """The result must not depend on the rest of the batch (`set_batch_invariant`)."""
    no_compiler: str = ""
    """Why CUDA C++ cannot be compiled on this machine; empty where it can, or where the kernels in it are not for this
    GPU, or the question is about another machine."""

    @classmethod
    def from_tensors(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        entry: str = "sdpa",
    ) -> Problem:
        """Describe the call F.scaled_dot_product_attention(query, key, value, ...) in the state torch is in now.

        Never raises for tensors, of whatever type and shape: what cannot be described is named in `tensor_types`.
        Costs some tens of microseconds (PyTorch is asked what it would run), so the hooks cache what comes of it.
        """
        inputs = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
        device = query.device
        architecture, gpu_name, sm_count = _this_machine(device.type, device.index)
        transforms = _torch.transforms_active()
        tensor_types = _unknown_types(inputs)
        mask = None
        if attn_mask is not None:
            mask = MaskInfo(
                attn_mask.dtype, _shape(attn_mask), _stride(attn_mask), attn_mask.requires_grad, attn_mask.device.type
            )
        problem = cls(
            entry=entry,
            device_type=device.type,
            device_index=device.index,
            devices=tuple(dict.fromkeys(str(tensor.device) for tensor in inputs)),
            architecture=architecture,
            gpu_name=gpu_name,
            sm_count=sm_count,
            query_dtype=query.dtype,
            key_dtype=key.dtype,
            value_dtype=value.dtype,
            query_shape=_shape(query),
            key_shape=_shape(key),
            value_shape=_shape(value),
            query_stride=_stride(query),
            key_stride=_stride(key),
            value_stride=_stride(value),
            aligned=bool(tensor_types) or all(is_aligned(tensor) for tensor in (query, key, value)),
            mask=mask,
            is_causal=bool(is_causal),
            dropout_p=dropout_p,
            scale=scale,
            enable_gqa=bool(enable_gqa),
            requires_grad=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            tf32=query.dtype is torch.float32 and _torch.allows_tf32(),
            transforms=transforms,
            tensor_types=tensor_types,
            sdp_backends=_enabled_backends(),
            stock_backend=None,
            batch_invariant=is_batch_invariant(),
            no_compiler=_no_compiler(architecture),
        )
        return dataclasses.replace(problem, stock_backend=stock.backend(problem, query, key, value, attn_mask))

    @classmethod
    def from_shapes(
        cls,
        query_shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.bfloat16,
        kv_heads: int | None = None,
        seqlen_k: int | None = None,
        head_dim_v: int | None = None,
        mask: str | None = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        scale: float | None = None,
        training: bool = False,
        gpu: str | None = None,
        architecture: str | None = None,
        tf32: bool = False,
        entry: str = "sdpa",
    ) -> Problem:
        """Describe a call by its numbers alone: contiguous tensors, default settings, no GPU needed.

        query_shape: [*batch, heads, seqlen_q, head_dim]. kv_heads, seqlen_k and head_dim_v default to the query's.
        mask: None, "bool", "float" or "float_grad" (a bias that is trained), of shape [*batch, 1, Sq, Sk].
        gpu: a GPU's name as torch.cuda.get_device_name gives it, "cpu" or "mps"; None is this machine.
        architecture: for a GPU whose name is not known here, e.g. "sm_90"; without gpu, for any GPU of that kind.
        Raises ValueError for a mask, GPU or architecture that it does not know, an architecture that the GPU does not
        have, a query of rank below 2, kv_heads for a query without heads, or a size that is no whole number.
        """
        shape = tuple(query_shape)
        if len(shape) < 2:
            raise ValueError(f"query needs two dimensions or more, [..., seqlen, head_dim]: {describe_shape(shape)}")
        sizes = (("kv_heads", kv_heads), ("seqlen_k", seqlen_k), ("head_dim_v", head_dim_v))
        for name, size in (*(("query", size) for size in shape), *sizes):
            if size is not None and (not isinstance(size, int) or size < 0):
                got = f"[{', '.join(repr(n) for n in shape)}]" if name == "query" else repr(size)
                raise ValueError(f"{name} needs whole numbers, 0 or more, as sizes; got {got}")
        if kv_heads is not None and len(shape) < 3:
            raise ValueError(f"kv_heads is for queries with heads, [..., heads, seqlen, head_dim], not {list(shape)}")
        if mask not in (None, "bool", "float", "float_grad"):
            raise ValueError(f'unknown mask {mask!r}: give "bool", "float" or "float_grad"')
        if architecture is not None and not re.fullmatch(r"sm_\d{2,3}|gfx[0-9a-f]{3,4}", architecture):
            raise ValueError(f'unknown architecture {architecture!r}: give one like "sm_90" or "gfx942"')
        device_type, index, sm_count, no_compiler = "cuda", 0, None, ""
        gpu = architecture if gpu is None else gpu
        if gpu is None:
            device_type = "cuda" if torch.cuda.is_available() else "cpu"
            architecture, gpu, sm_count = _this_machine(device_type, None)
            no_compiler = _no_compiler(architecture)
        elif gpu in ("cpu", "mps"):
            if architecture is not None:
                raise ValueError(f"gpu {gpu!r} is no GPU with the architecture {architecture!r}: give one of the two")
            device_type = architecture = gpu
            gpu = ""
        elif architecture is None:
            architecture = known_architecture(gpu)
        elif gpu != architecture:
            _refuse_another_architecture(gpu, architecture)
        batch, heads = shape[:-3], shape[-3:-2]
        seqlen_k = shape[-2] if seqlen_k is None else seqlen_k
        kv_heads_shape = heads if kv_heads is None or not heads else (kv_heads,)
        key_shape = (*batch, *kv_heads_shape, seqlen_k, shape[-1])
        value_shape = (*key_shape[:-1], shape[-1] if head_dim_v is None else head_dim_v)
        mask_info = None
        if mask is not None:
            mask_shape = (*batch, *(1 for _ in heads), shape[-2], seqlen_k)
            mask_dtype = torch.bool if mask == "bool" else dtype
            mask_info = MaskInfo(
                mask_dtype, mask_shape, _contiguous(mask_shape), training and mask == "float_grad", device_type
            )
        size = dtype.itemsize
        problem = cls(
            entry=entry,
            device_type=device_type,
            device_index=index if device_type == "cuda" else None,
            devices=(f"cuda:{index}" if device_type == "cuda" else device_type,),
            architecture=architecture,
            gpu_name=gpu,
            sm_count=sm_count,
            query_dtype=dtype,
            key_dtype=dtype,
            value_dtype=dtype,
            query_shape=shape,
            key_shape=key_shape,
            value_shape=value_shape,
            query_stride=_contiguous(shape),
            key_stride=_contiguous(key_shape),
            value_stride=_contiguous(value_shape),
            aligned=all(_strides_aligned(s, _contiguous(s), size) for s in (shape, key_shape, value_shape)),
            mask=mask_info,
            is_causal=is_causal,
            dropout_p=dropout_p,
            scale=scale,
            enable_gqa=kv_heads_shape != heads,
            requires_grad=training,
            deterministic=False,
            tf32=tf32 and dtype is torch.float32,
            transforms=False,
            tensor_types=(),
            sdp_backends=ALL_SDP_BACKENDS,
            stock_backend=None,
            batch_invariant=is_batch_invariant(),
            no_compiler=no_compiler,
        )
        return dataclasses.replace(problem, stock_backend=stock.backend(problem))

    def of_one_batch(self) -> Problem:
        """The same call with every batch dimension that is not empty of size one."""

        def one(shape: tuple[Any, ...]) -> tuple[Any, ...]:
            return (*(0 if isinstance(n, int) and n == 0 else 1 for n in shape[:-3]), *shape[-3:])

        return dataclasses.replace(
            self, query_shape=one(self.query_shape), key_shape=one(self.key_shape), value_shape=one(self.value_shape)
        )

    @property
    def rank(self) -> int:
        """Number of dimensions of the query."""
        return len(self.query_shape)

    @property
    def num_heads(self) -> Any:
        """Heads of the query; 1 for rank 2."""
        return self.query_shape[-3] if len(self.query_shape) > 2 else 1

    @property
    def num_kv_heads(self) -> Any:
        """Heads of the key; 1 for rank 2."""
        return self.key_shape[-3] if len(self.key_shape) > 2 else 1

    @property
    def seqlen_q(self) -> Any:
        """Query positions."""
        return self.query_shape[-2]

    @property
    def seqlen_k(self) -> Any:
        """Key positions."""
        return self.key_shape[-2]

    @property
    def head_dim(self) -> Any:
        """Last dimension of query and key."""
        return self.query_shape[-1]

    @property
    def head_dim_v(self) -> Any:
        """Last dimension of value and of the output."""
        return self.value_shape[-1]

    @property
    def symbolic(self) -> bool:
        """Is any size a torch.SymInt?"""
        return not all(isinstance(n, int) for n in (*self.query_shape, *self.key_shape, *self.value_shape))

    def __str__(self) -> str:
        parts = [f"query {describe_shape(self.query_shape)} {_name(self.query_dtype)}"]
        if self.key_shape != self.query_shape or self.key_dtype is not self.query_dtype:
            parts.append(f"key {describe_shape(self.key_shape)} {_name(self.key_dtype)}")
        if self.value_shape != self.key_shape or self.value_dtype is not self.key_dtype:
            parts.append(f"value {describe_shape(self.value_shape)} {_name(self.value_dtype)}")
        if self.mask is not None:
            gradient = " with gradient" if self.mask.requires_grad else ""
            parts.append(f"attn_mask {describe_shape(self.mask.shape)} {_name(self.mask.dtype)}{gradient}")
        parts += ["packed sequences"] * self.packed
        parts += ["is_causal"] * self.is_causal
        if self.dropout_p:
            parts.append(f"dropout_p {self.dropout_p:g}")
        if self.scale is not None:
            parts.append(f"scale {self.scale}")
        parts += ["enable_gqa"] * self.enable_gqa
        parts += ["gradients"] * self.requires_grad
        parts += ["unaligned"] * (not self.aligned)
        parts += ["batch-invariant"] * self.batch_invariant
        return f"{', '.join(parts)} on {self.gpu_name or '/'.join(self.devices)}"


def is_aligned(tensor: Tensor) -> bool:
    """Are the data pointer and all strides multiples of 16 bytes, the last stride being 1? Unknown counts as yes.

    Strides of dimensions of size one are never used and do not count.
    """
    try:
        if not _strides_aligned(tensor.shape, tensor.stride(), tensor.element_size()):
            return False
        # A fake tensor has no pointer, and asking for it warns; functorch's wrappers raise.
        return type(tensor).__module__.startswith("torch._subclasses") or tensor.data_ptr() % 16 == 0
    except (RuntimeError, NotImplementedError):
        return True


def describe_shape(shape: Iterable[Any]) -> str:
    """[2, 16, 4096, 128], as torch prints a shape; symbols by their names."""
    return f"[{', '.join(str(n) for n in shape)}]"


def known_architecture(gpu: str) -> str:
    """The architecture of a GPU by its name, e.g. "NVIDIA H200" -> "sm_90". Raises ValueError if it is not listed."""
    for part, architecture in ARCHITECTURES:
        # Not inside of another name: an A100 is no A1000. "L40S" is an L40.
        if re.search(rf"(?<![a-z0-9]){re.escape(part)}(?![0-9])", gpu, re.IGNORECASE):
            return architecture
    known = ", ".join(part for part, _ in ARCHITECTURES)
    raise ValueError(f"unknown GPU {gpu!r} (known: {known}); give its architecture, for example sm_90 or gfx942")


def _refuse_another_architecture(gpu: str, architecture: str) -> None:
    """Raise ValueError if the GPU is known, and as something else."""
    try:
        known = known_architecture(gpu)
    except ValueError:
        return
    if known != architecture:
        raise ValueError(f"gpu {gpu!r} is {known}, not {architecture}: give one of the two")


def _strides_aligned(shape: Sequence[Any], stride: Sequence[Any], itemsize: int) -> bool:
    """Symbolic strides count as aligned, without a look: a look would be a guard."""
    if not stride:
        return True
    last_ok = not isinstance(stride[-1], int) or stride[-1] == 1 or shape[-1] == 1
    return last_ok and all(
        not (isinstance(step, int) and isinstance(n, int)) or n == 1 or step * itemsize % 16 == 0
        for n, step in zip(shape[:-1], stride[:-1])
    )


def _unknown_types(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for tensor in tensors:
        kind = type(tensor)
        if kind is not Tensor and f"{kind.__module__}.{kind.__qualname__}" not in PLAIN_TYPES:
            names[kind.__qualname__] = None
        elif tensor.is_nested:
            names["nested tensor"] = None
        elif tensor.layout is not torch.strided:
            names[f"{str(tensor.layout).removeprefix('torch.')} tensor"] = None
        elif tensor.is_neg() or tensor.is_conj():
            # The negation is pending: the storage holds other numbers than the tensor.
            names["negated view"] = None
    return tuple(names)


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    # A strided nested tensor has no shape to give.
    return () if tensor.is_nested and tensor.layout is torch.strided else tuple(tensor.shape)


def _stride(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return ()
    return tuple(tensor.stride())


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    stride = [1]
    for n in reversed(shape[1:]):
        stride.append(stride[-1] * max(n, 1))
    return tuple(reversed(stride))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _this_machine(device_type: str, index: int | None) -> tuple[str, str, int | None]:
    """Architecture, GPU name and number of multiprocessors of a device here (index None: the current one)."""
    if device_type != "cuda":
        return device_type, "", None
    if not torch.cuda.is_available():
        return "unknown", "", None
    return _gpu(torch.cuda.current_device() if index is None else index)


def _no_compiler(architecture: str) -> str:
    """Why this machine cannot compile what its GPU would run; empty where it can."""
    return (nvrtc.unavailable() or "") if architecture == HOPPER else ""


@functools.cache
def _gpu(index: int) -> tuple[str, str, int | None]:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        architecture = properties.gcnArchName.split(":")[0]
    else:
        architecture = f"sm_{properties.major}{properties.minor}"
    return architecture, properties.name, properties.multi_processor_count


def _enabled_backends() -> frozenset[str]:
    cuda = torch.backends.cuda
    enabled = {
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
    }
    if enabled["math"]:
        order = stock.priority_order()
        for name in order[order.index("math") + 1 :] if "math" in order else ():
            # cuDNN stands last in the order of every machine that does not prefer it: no choice of the user.
            if name != "cudnn":
                enabled[name] = False
    return frozenset(name for name, on in enabled.items() if on)
