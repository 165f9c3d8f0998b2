"""What is measured: a frozen description of each call, and the tensors that it needs.

Imports torch and the standard library. Imported by attention.py, special.py, overhead.py and make_policy.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float32_tf32": torch.float32,
}
# Masks by name: what a row of the table calls them, the policy's case that they belong to.
MASKS = {
    "padding": "bool_mask",  # [B, 1, 1, Sk], the last quarter of the keys or less is padding
    "causal_mask": "bool_mask",  # [B, 1, Sq, Sk], causal given as a mask
    "padding_causal": "bool_mask",  # [B, 1, Sq, Sk], both
    "prefix": "bool_mask",  # [B, 1, Sq, Sk], causal but for the first quarter of the keys, which all see
    "window": "bool_mask",  # [1, 1, Sq, Sk], the 256 keys up to the query's own
    "documents": "bool_mask",  # [1, 1, Sq, Sk], eight documents of equal length
    "static_cache": "bool_mask",  # [B, 1, Sq, Sk], the last queries of the first 1,000 keys in 8,192
    "full_cache": "bool_mask",  # the same of all keys but the last 29
    "lowest_causal": "float_mask",  # [B, 1, Sq, Sk], causal as zeros and the lowest finite number, as models make it
    "bias": "float_mask",  # [1, H, Sq, Sk], a position bias in query's dtype
    "batch_bias": "float_mask",  # [B, 1, Sq, Sk]
    "key_bias": "float_mask",  # [1, H, 1, Sk], a slope along the keys for each head, as ALiBi has
    "lowest_padding": "float_mask",  # [B, 1, 1, Sk], padding as zeros and the lowest finite number
    "bias_grad": "mask_grad",  # [1, H, Sq, Sk], with its gradient
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. `group` is its heading in tables; every other field says what the call is."""

    group: str
    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int = 0
    kv_heads: int = 0
    causal: bool = False
    dtype: str = "bfloat16"
    mask: str | None = None
    dropout: float = 0.0
    training: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.head_dim)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)

    @property
    def policy_case(self) -> str:
        """The case of policy.py that this call's route depends on; a mask outweighs dropout, that outweighs GQA."""
        if self.mask is not None:
            return MASKS[self.mask]
        if self.dropout:
            return "dropout"
        return "gqa" if self.kv_heads != self.heads else "dense"

    @property
    def flops(self) -> float:
        """Floating-point operations of the forward: two products over the whole square, half of it when causal."""
        square = self.batch * self.heads * self.seqlen_q * self.seqlen_k
        return 2.0 * square * (self.head_dim + self.head_dim_v) * (0.5 if self.causal else 1.0)

    @property
    def bytes(self) -> float:
        """The least that a forward moves: query, key, value, output once each (no mask)."""
        size = torch.empty((), dtype=DTYPES[self.dtype]).element_size()
        queries = self.batch * self.heads * self.seqlen_q * (self.head_dim + self.head_dim_v)
        keys = self.batch * self.kv_heads * self.seqlen_k * (self.head_dim + self.head_dim_v)
        return float(size * (queries + keys))

    @property
    def label(self) -> str:
        parts = [f"B{self.batch} H{self.heads}" + (f"/{self.kv_heads}" if self.kv_heads != self.heads else "")]
        parts.append(f"S{self.seqlen_q}" + (f"x{self.seqlen_k}" if self.seqlen_k != self.seqlen_q else ""))
        parts.append(f"D{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else ""))
        parts += ["causal"] if self.causal else []
        parts += [self.mask] if self.mask else []
        parts += [f"dropout {self.dropout}"] if self.dropout else []
        parts += [self.dtype] if self.dtype != "bfloat16" else []
        return f"{self.group}: " + " ".join(parts)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def smaller(self) -> Case:
        """The same kind of call at a size that a CPU does at once."""
        kv_heads = 1 if self.kv_heads != self.heads else 2
        dtype = "float32" if self.dtype == "float32_tf32" else self.dtype
        return dataclasses.replace(
            self,
            batch=min(self.batch, 2),
            heads=2,
            kv_heads=kv_heads,
            dtype=dtype,
            seqlen_q=min(self.seqlen_q, 32),
            seqlen_k=min(self.seqlen_k, 32 if self.seqlen_q == self.seqlen_k else 64),
        )


@dataclasses.dataclass
class Inputs:
    """The tensors of a case. query, key, value and a mask with a gradient require it when made for training."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    grad_out: Tensor

    @property
    def differentiable(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.query, self.key, self.value, self.attn_mask) if t is not None and t.requires_grad)


def make_inputs(
    case: Case, device: torch.device | str, *, training: bool, layout: str = "bhsd", seed: int = 0
) -> Inputs:
    """Random normal tensors [B, H, S, D]; layout "bshd" makes them transposed views of [B, S, H, D]."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = DTYPES[case.dtype]

    def normal(heads: int, length: int, head_dim: int) -> Tensor:
        size = (case.batch, heads, length, head_dim)
        if layout == "bshd":
            size = (case.batch, length, heads, head_dim)
        tensor = torch.randn(size, generator=generator, device=device, dtype=dtype)
        return tensor.transpose(1, 2) if layout == "bshd" else tensor

    query = normal(case.heads, case.seqlen_q, case.head_dim)
    key = normal(case.kv_heads, case.seqlen_k, case.head_dim)
    value = normal(case.kv_heads, case.seqlen_k, case.head_dim_v)
    grad_out = normal(case.heads, case.seqlen_q, case.head_dim_v)
    mask = make_mask(case, device, generator)
    for tensor in (query, key, value):
        tensor.requires_grad_(training)
    if mask is not None and case.mask == "bias_grad":
        mask.requires_grad_(training)
    return Inputs(query, key, value, mask, grad_out)


def make_mask(case: Case, device: torch.device | str, generator: torch.Generator) -> Tensor | None:
    """The case's mask, if it has one."""
    if case.mask is None:
        return None
    rows = torch.arange(case.seqlen_q, device=device)[:, None]
    columns = torch.arange(case.seqlen_k, device=device)[None, :]
    low = math.ceil(0.75 * case.seqlen_k)
    lengths = torch.randint(low, case.seqlen_k + 1, (case.batch, 1, 1, 1), generator=generator, device=device)
    if case.mask == "padding":
        return (columns < lengths).contiguous()
    causal = (columns <= rows).expand(case.batch, 1, -1, -1)
    if case.mask == "causal_mask":
        return causal.contiguous()
    if case.mask == "padding_causal":
        return (causal & (columns < lengths)).contiguous()
    if case.mask == "prefix":
        return (causal | (columns < case.seqlen_k // 4)).contiguous()
    if case.mask == "window":
        return ((columns <= rows) & (columns > rows - 256))[None, None]
    if case.mask == "documents":
        return (rows * 8 // case.seqlen_q == columns * 8 // case.seqlen_k)[None, None]
    if case.mask in ("static_cache", "full_cache"):
        used = case.seqlen_k * 1000 // 8192 if case.mask == "static_cache" else case.seqlen_k - 29
        used = max(case.seqlen_q, used)
        return (columns <= rows + (used - case.seqlen_q)).expand(case.batch, 1, -1, -1).contiguous()
    if case.mask == "lowest_causal":
        dtype = DTYPES[case.dtype]
        return torch.zeros(causal.shape, dtype=dtype, device=device).masked_fill(~causal, torch.finfo(dtype).min)
    if case.mask == "lowest_padding":
        dtype = DTYPES[case.dtype]
        hidden = columns >= lengths
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill(hidden, torch.finfo(dtype).min)
    if case.mask == "key_bias":
        slopes = 2.0 ** -torch.linspace(1.0, 8.0, case.heads, device=device)[None, :, None, None]
        return (slopes * (columns - case.seqlen_k)).to(DTYPES[case.dtype])
    shape = (case.batch, 1) if case.mask == "batch_bias" else (1, case.heads)
    return torch.randn(
        (*shape, case.seqlen_q, case.seqlen_k), generator=generator, device=device, dtype=DTYPES[case.dtype]
    )


@contextlib.contextmanager
def matmul_precision(case: Case):
    """float32_tf32 allows TF32 in matrix products, everything else forbids it, as PyTorch does by default."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = case.dtype == "float32_tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def grid() -> list[Case]:
    """Head dims 64, 128, 256, lengths 512 to 16384, full and causal, at 16,384 tokens and a model width of 2,048."""
    tokens, width = 16384, 2048
    return [
        Case("grid", tokens // length, width // head_dim, length, length, head_dim, causal=causal)
        for length in (512, 1024, 2048, 4096, 8192, 16384)
        for head_dim in (64, 128, 256)
        for causal in (False, True)
    ]


def beyond_grid() -> list[Case]:
    """What the grid has not: 32 query heads on 8 of keys and values, and queries and keys of different length."""
    grouped = [
        Case("grid gqa", 16384 // length, 32, length, length, head_dim, kv_heads=8, causal=causal)
        for head_dim, length in ((64, 2048), (128, 512), (128, 2048), (128, 8192))
        for causal in (False, True)
    ]
    rectangular = [
        Case("grid rectangular", 4, 16, seqlen_q, seqlen_k, 128, causal=causal)
        for seqlen_q, seqlen_k in ((1024, 8192), (8192, 1024), (1000, 3000))
        for causal in (False, True)
    ]
    rectangular += [
        Case("grid rectangular", 8, 32, 512, 4096, 64),
        Case("grid rectangular", 4, 8, 2048, 8192, 256),
    ]
    return grouped + rectangular


def special() -> list[Case]:
    """Everything that is not a large dense call in bfloat16, the sizes that a policy needs included."""
    cases = [
        Case("mask", 4, 16, 4096, 4096, 128, mask=mask)
        for mask in (
            "padding", "causal_mask", "padding_causal", "prefix", "lowest_causal", "bias", "batch_bias", "bias_grad"
        )
    ]  # fmt: skip
    cases += [Case("mask", 1, 16, 16384, 16384, 128, mask=mask) for mask in ("window", "documents")]
    cases += [
        Case("gqa", batch, 32, length, length, 128, kv_heads=8, causal=causal)
        for batch, length in ((1, 128), (4, 1024), (2, 8192))
        for causal in (False, True)
    ]
    cases += [
        Case("gqa", 1, 32, 128, 128, 64, kv_heads=4, causal=True),
        Case("gqa", 4, 32, 2048, 2048, 64, kv_heads=4, causal=True),
        Case("gqa", 2, 32, 4096, 4096, 128, kv_heads=8, mask="causal_mask"),
    ]
    cases += [
        Case("head_dim", 4, 16, 4096, 4096, head_dim, causal=causal)
        for head_dim in (32, 40, 72, 80, 96, 160, 192, 512)
        for causal in (True, False)
    ]
    cases += [
        Case("head_dim", 2, 16, 128, 128, head_dim, causal=causal)
        for head_dim in (32, 40, 72, 80, 96, 160, 192, 256, 512)
        for causal in (True, False)
    ]
    # A policy has to know where a head_dim begins to pay.
    cases += [
        Case("head_dim", 8, 16, 512, 512, head_dim, causal=causal)
        for head_dim in (32, 40, 72, 80, 96, 160, 192)
        for causal in (True, False)
    ]
    cases += [
        Case("head_dim", batch, 16, length, length, head_dim, causal=True)
        for head_dim, batch, length in ((512, 8, 512), (512, 4, 1024), (320, 4, 1024), (320, 4, 4096))
    ]
    cases += [
        Case("head_dim", 4, 16, 4096, 4096, 192, head_dim_v=128, causal=True),
        Case("head_dim", 8, 16, 512, 512, 192, head_dim_v=128, causal=True),
        Case("head_dim", 2, 16, 128, 128, 192, head_dim_v=128, causal=True),
        Case("head_dim", 4, 16, 1024, 1024, 33, causal=True),
    ]
    cases += [
        Case("dropout", batch, 16, length, length, head_dim, causal=causal, dropout=0.1)
        for head_dim in (128, 64)
        for batch, length in ((1, 128), (8, 512), (4, 4096))
        for causal in (True, False)
    ]
    cases += [
        Case("float32", batch, 16, length, length, head_dim, causal=causal, dtype=dtype)
        for dtype in ("float32", "float32_tf32")
        for head_dim in (128, 64)
        for batch, length in ((2, 128), (4, 2048))
        for causal in (True, False)
    ]
    cases += [
        Case("float16", 4, 16, 4096, 4096, 128, causal=True, dtype="float16"),
        Case("float16", 4, 16, 4096, 4096, 64, dtype="float16"),
        Case("rectangular", 4, 16, 1024, 8192, 128),
        Case("rectangular", 4, 16, 4096, 77, 64),
        Case("rectangular", 4, 16, 256, 4096, 128, mask="padding"),
    ]
    cases += [
        Case("short", batch, 12, length, length, head_dim, causal=causal)
        for batch, length in ((1, 128), (32, 128), (32, 256), (128, 64))
        for head_dim in (64, 128)
        for causal in (False, True)
    ]
    cases += [Case("short", 32, 12, 197, 197, 64)]  # 14 x 14 patches of an image, and one token
    cases += [
        Case("prompt", 1, 32, length, length, 128, kv_heads=kv_heads, causal=True)
        for kv_heads in (32, 8)
        for length in (512, 1024, 2048)
    ]
    # The same masks at sizes from launch bound to large, so that a policy can find where each starts to pay.
    cases += [
        Case("mask_sizes", batch, 16, length, length, head_dim, mask=mask)
        for head_dim in (64, 128)
        for batch, length in ((1, 64), (4, 256), (8, 1024), (4, 2048))
        for mask in ("padding", "padding_causal", "bias", "bias_grad")
    ]
    return cases + decode()


def decode() -> list[Case]:
    """Few queries over long keys and values, 32 query heads: what generating text runs, bound by reading the cache."""

    def case(batch: int, length: int, head_dim: int = 128, kv_heads: int = 8, rows: int = 1, mask: str | None = None):
        return Case("decode", batch, 32, rows, length, head_dim, kv_heads=kv_heads, mask=mask, training=False)

    cases = [case(batch, length) for batch in (1, 8, 64) for length in (1024, 8192, 32768)]
    cases += [case(1, 131072), case(8, 131072)]
    cases += [case(batch, length, kv_heads=kv_heads) for kv_heads in (32, 1) for batch, length in
              ((1, 1024), (1, 8192), (1, 131072), (8, 8192), (64, 1024))]  # fmt: skip
    cases += [case(batch, length, head_dim) for head_dim in (64, 256) for batch, length in
              ((1, 1024), (1, 8192), (1, 131072), (8, 8192), (64, 1024))]  # fmt: skip
    cases += [case(batch, length, rows=rows) for rows in (2, 4, 8) for batch, length in
              ((1, 1024), (1, 8192), (8, 8192), (64, 1024))]  # fmt: skip
    cases += [case(batch, 8192, rows=rows, mask="static_cache") for batch, rows in ((1, 1), (8, 1), (64, 1), (8, 4))]
    cases += [case(8, 8192, mask="padding"), case(8, 4096, 64, 16, mask="padding")]
    # As `generate` makes it for a prompt of 4,096 tokens: no length of a cache is a multiple of anything.
    cases += [case(batch, 4159, kv_heads=kv_heads, mask="full_cache") for batch, kv_heads in ((1, 32), (8, 32), (8, 8))]
    return cases
