"""What compute-sanitizer watches: small calls that reach every kernel. `python sanitized.py NAME TOOL` runs one.

The lengths are of a few tiles with a partial last one, of one tile and a row more, and of many tiles of queries on one
of keys, so that rings of stages wrap and blocks begin again.

For racecheck, which takes an arrival on a barrier for that of its lane alone, kernels are compiled so that every lane
of a warp arrives where else one does for all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from backward_forms import FORMS, use_form
from torch import Tensor

import torch_flashbackend as plugin
from torch_flashbackend import kv_cache, ops
from torch_flashbackend.kernels.cuda import decode_tiles, sources, tiles

from common import deterministic_mode

LENGTHS = ((200, 333), (65, 64), (700, 64))


class Program(NamedTuple):
    """kernels: the names of those that it must launch."""

    run: Callable[[], None]
    kernels: tuple[str, ...]


PROGRAMS: dict[str, Program] = {}
# To initcheck, what other kernels write and what the copy engine stores is never initialised: nothing may read it.
CHECKED = True


def program(name: str, *kernels: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(run: Callable[[], None]) -> Callable[[], None]:
        PROGRAMS[name] = Program(run, kernels)
        return run

    return add


def check(*tensors: Tensor) -> None:
    if CHECKED:
        assert all(tensor.isfinite().all() for tensor in tensors)


def attend(
    lengths: tuple[int, int],
    head_dim: int,
    head_dim_v: int | None = None,
    mask: Tensor | None = None,
    *,
    backend: str = "cuda",
    trains: bool = True,
    **options: object,
) -> None:
    """Two query heads share a key head. Gradients of a float mask too, if it asks for them."""
    seqlen_q, seqlen_k = lengths
    query = torch.randn(2, 2, seqlen_q, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=trains)
    key, value = (
        torch.randn(2, 1, seqlen_k, size, device="cuda", dtype=torch.bfloat16, requires_grad=trains)
        for size in (head_dim, head_dim_v or head_dim)
    )
    with plugin.sdpa_backend(backend):
        out = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True, **options)
        check(out)
        if trains:
            inputs = [query, key, value, *([mask] if mask is not None and mask.requires_grad else [])]
            check(*torch.autograd.grad(out, inputs, torch.randn_like(out)))


def attend_all(head_dim: int, head_dim_v: int | None = None, *, trains: bool = True) -> None:
    """Plain calls of all lengths, causal and not."""
    for lengths in LENGTHS:
        for is_causal in (False, True):
            attend(lengths, head_dim, head_dim_v, trains=trains, is_causal=is_causal)


def bool_masks(seqlen_q: int, seqlen_k: int) -> Iterator[Tensor]:
    """Some of a tile's keys; a tail of keys, for all queries. Every query sees the first key."""
    for shape in ((2, 1, seqlen_q, seqlen_k), (2, 1, 1, seqlen_k)):
        mask = torch.rand(shape, device="cuda") < 0.5
        mask[..., seqlen_k // 2 :] = False
        mask[..., 0] = True
        yield mask


def biases(seqlen_q: int, seqlen_k: int) -> Iterator[Tensor]:
    """Of rows that begin at multiples of 16 bytes, as the copy engine wants, with nothing behind the last one."""
    pitch = tiles.round_up(seqlen_k, 8)
    for batch, heads, rows in ((1, 2, seqlen_q), (2, 1, 1)):
        shape, strides = (batch, heads, rows, seqlen_k), (heads * rows * pitch, rows * pitch, pitch, 1)
        yield torch.empty_strided(shape, strides, device="cuda", dtype=torch.bfloat16).normal_()


def add_dense(head_dim: int, head_dim_v: int | None = None) -> None:
    name = f"{head_dim}" if head_dim_v is None else f"{head_dim}/{head_dim_v}"

    @program(f"forward {name}", "flash_forward_wide" if head_dim > 256 else "flash_forward")
    def _() -> None:
        attend_all(head_dim, head_dim_v, trains=False)

    if head_dim > 256:
        return

    @program(f"backward {name}", "flash_backward")
    def _() -> None:
        attend_all(head_dim, head_dim_v)

    @program(f"deterministic backward {name}", "flash_backward")
    def _() -> None:
        with deterministic_mode():
            attend_all(head_dim, head_dim_v)


for sizes in ((64,), (128,), (160,), (192, 128), (192,), (256,), (512,)):
    add_dense(*sizes)


def add_form(form: str, head_dim: int) -> None:
    @program(f"backward {head_dim} {form}", "flash_backward")
    def _() -> None:
        use_form(SimpleNamespace(setattr=setattr), **FORMS[form])
        attend_all(head_dim)


for form in FORMS:
    for size in (64, 128, 256):
        add_form(form, size)


def add_masked(head_dim: int) -> None:
    @program(f"bool masks {head_dim}", "flash_forward", "flash_backward", "flash_mask_lists")
    def _() -> None:
        for lengths in LENGTHS:
            for mask in bool_masks(*lengths):
                attend(lengths, head_dim, mask=mask)

    @program(f"biases {head_dim}", "flash_forward", "flash_backward")
    def _() -> None:
        for lengths in LENGTHS:
            for mask in biases(*lengths):
                attend(lengths, head_dim, mask=mask)

    @program(f"dropout {head_dim}", "flash_forward", "flash_backward")
    def _() -> None:
        for lengths in LENGTHS:
            attend(lengths, head_dim, dropout_p=0.1, is_causal=True)

    @program(f"gradient of a bias {head_dim}", "flash_bias_gradient")
    def _() -> None:
        attend((256, 384), head_dim, mask=next(biases(256, 384)).requires_grad_())

    @program(f"packed sequences {head_dim}", "flash_forward", "flash_backward")
    def _() -> None:
        ends = torch.tensor([0, 100, 333, 400], device="cuda", dtype=torch.int32)
        query, key, value = (
            torch.randn(400, heads, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for heads in (2, 1, 1)
        )
        for is_causal in (False, True):
            out = plugin.attention_varlen(query, key, value, ends, ends, 233, 233, is_causal=is_causal)
            check(out, *torch.autograd.grad(out, (query, key, value), torch.randn_like(out)))


for size in (64, 128):
    add_masked(size)


@program("decoding", "flash_decode")
def _() -> None:
    decode_tiles.pays = lambda units, seqlen_k: True
    for seqlen_k in (64, 1000, 5000):
        attend((1, seqlen_k), 128, trains=False)
        attend((4, seqlen_k), 64, trains=False)


@program("decoding under a mask", "flash_decode")
def _() -> None:
    """Rows that end, and begin, anywhere: the last may be the memory's last."""
    decode_tiles.pays = lambda units, seqlen_k: True
    for seqlen_k in (64, 1001, 5000):
        for mask in (torch.rand(seqlen_k, device="cuda") < 0.9, torch.arange(seqlen_k, device="cuda") < 200):
            attend((1, seqlen_k), 128, mask=mask[None], trains=False)
            attend((4, seqlen_k - 1), 64, mask=mask[None, 1:], trains=False)


@program("paged decoding", "attention_decode")
def _() -> None:
    pages = torch.randperm(40, device="cuda", dtype=torch.int32).view(2, 20)
    key, value = (torch.randn(40, 64, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    query = torch.randn(2, 1, 4, 128, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([100, 1200], device="cuda", dtype=torch.int32)
    check(kv_cache.attend(query, key, value, cache_seqlens=lengths, block_table=pages))


@program("triton", "attention_forward", "attention_backward_key_value")
def _() -> None:
    for lengths in LENGTHS:
        attend(lengths, 64, backend="triton", is_causal=True)
        attend(lengths, 40, backend="triton", dropout_p=0.1)
        for mask in (*bool_masks(*lengths), *biases(*lengths)):
            attend(lengths, 64, mask=mask.requires_grad_(mask.is_floating_point()), backend="triton")


@program("triton decoding", "attention_decode")
def _() -> None:
    for seqlen_k in (64, 1000, 5000):
        attend((1, seqlen_k), 128, backend="triton", trains=False)


def let_every_lane_arrive() -> None:
    source = sources.source
    sources.source = lambda entry, file, defines, *rest: source(entry, file, defines | {"EVERY_LANE_ARRIVES": 1}, *rest)


def main(name: str, tool: str) -> None:
    global CHECKED
    CHECKED = tool != "initcheck"
    if tool == "racecheck":
        let_every_lane_arrive()
    torch.manual_seed(0)
    ops.reset_launch_counts()
    PROGRAMS[name].run()
    torch.cuda.synchronize()
    counts = ops.launch_counts()
    assert all(counts.get(kernel) for kernel in PROGRAMS[name].kernels), counts
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
