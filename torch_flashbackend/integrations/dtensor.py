"""DTensor: how our operators are sharded, and which calls on DTensors they may take.

Attention of one batch entry and one head needs nothing of another, so batch and heads may be sharded, of all tensors
alike, without any communication. A call whose DTensors are so, or replicated, is judged by what one rank computes of
it. Every other call on DTensors is stock's: among them PyTorch's context parallel, which shards the sequence and has
its own rules for stock's operators; our kernels run inside of it through the kernel hook.

May import `_torch.py`, ops.py and torch.distributed.tensor, the latter two when a call on DTensors arrives. Imported by
decisions.py.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import _torch

__all__ = ["local_arguments", "present"]

# Positions of the dimensions in rank 4.
BATCH, HEADS = 0, 1


def present(*tensors: Tensor | None) -> bool:
    """Is one of them a DTensor? Told by the name of the type: torch.distributed.tensor is not imported for it."""
    return any(type(tensor).__name__ == "DTensor" for tensor in tensors if tensor is not None)


def local_arguments(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
    """What one rank computes of the call, the same shapes on each rank; None where the call must stay stock's.

    Registers the sharding rules of our operators, once.
    """
    from torch.distributed.tensor import DTensor

    tensors = [query, key, value] if attn_mask is None else [query, key, value, attn_mask]
    # A seed would have to be one for all ranks and another for each of them, as DTensor's random state has it.
    if dropout_p > 0.0 or any(type(tensor) is not DTensor for tensor in tensors):
        return None
    mesh, placements = query.device_mesh, query.placements  # type: ignore[attr-defined]
    if any(tensor.dim() != 4 or tensor.device_mesh != mesh for tensor in tensors):  # type: ignore[attr-defined]
        return None
    if any(tensor.placements != placements for tensor in (key, value)):  # type: ignore[attr-defined]
        return None
    for index, placement in enumerate(placements):
        shards = mesh.size(index)
        if placement.is_replicate():
            continue
        if not placement.is_shard() or placement.dim not in (BATCH, HEADS):
            return None
        if any(tensor.shape[placement.dim] % shards for tensor in (query, key, value)):
            return None
    if attn_mask is not None and attn_mask.placements != tuple(  # type: ignore[attr-defined]
        _of_mask(placement, attn_mask) for placement in placements
    ):
        return None
    _register()
    query, key, value = (tensor._local_tensor for tensor in (query, key, value))  # type: ignore[attr-defined]
    return query, key, value, None if attn_mask is None else attn_mask._local_tensor  # type: ignore[attr-defined]


def _of_mask(placement: Any, attn_mask: Any) -> Any:
    """The placement of a mask beside a query that is placed so: sharded where it has that dimension."""
    from torch.distributed.tensor import Replicate

    if placement.is_shard() and attn_mask.ndim == 4 and attn_mask.shape[placement.dim] != 1:
        return placement
    return Replicate()


@functools.cache
def _register() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    from .. import ops  # noqa: F401  (defines the operators)

    namespace = torch.ops.flashbackend
    forward, inference = namespace.attention_forward.default, namespace.attention.default
    backward = namespace.attention_backward.default

    def choices(query: Any, key: Any) -> list[Any]:
        """On one dimension of the mesh. Heads of key and value must go with those of the query that share them."""
        sizes = query.mesh.shape
        found = [Replicate()]
        for dim in (BATCH, HEADS):
            if all(tensor.shape[dim] % size == 0 for tensor in (query, key) for size in sizes):
                found.append(Shard(dim))
        return found

    def given(placement: Any, attn_mask: Any, dropout_seed: Any) -> tuple[Any, Any]:
        return (
            None if attn_mask is None else _of_mask(placement, attn_mask),
            None if dropout_seed is None else Replicate(),
        )

    def of_logsumexp(placement: Any, attn_mask: Any, float_mask: bool) -> Any:
        return Shard(placement.dim + 1) if float_mask and placement.is_shard() else placement

    def has_float_mask(attn_mask: Any) -> bool:
        return attn_mask is not None and attn_mask.tensor_meta.dtype != torch.bool

    @register_sharding(inference)
    def _(query, key, value, attn_mask, dropout_seed, *options):
        return [
            ([p], [p, p, p, *given(p, attn_mask, dropout_seed), *(None for _ in options)]) for p in choices(query, key)
        ]

    @register_sharding(forward)
    def _(query, key, value, attn_mask, dropout_seed, *options):
        return [
            (
                [p, of_logsumexp(p, attn_mask, has_float_mask(attn_mask))],
                [p, p, p, *given(p, attn_mask, dropout_seed), *(None for _ in options)],
            )
            for p in choices(query, key)
        ]

    @register_sharding(backward)
    def _(grad_out, query, key, value, attn_mask, out, logsumexp, dropout_seed, *options):
        wanted = options[3]  # behind it comes the backend, where that is not the default
        rules = []
        for p in choices(query, key):
            mask, seed = given(p, attn_mask, dropout_seed)
            grad_mask = mask
            if wanted[3] and p.is_shard() and mask.is_replicate():
                grad_mask = Partial()  # the sum over the batches or heads of one rank
            outputs = [p if want else Replicate() for want in wanted[:3]] + [grad_mask if wanted[3] else Replicate()]
            saved = of_logsumexp(p, attn_mask, has_float_mask(attn_mask))
            rules.append((outputs, [p, p, p, p, mask, p, saved, seed, *(None for _ in options)]))
        return rules

    # Behind the tensors, everything counts: `layout` and `output_mask` decide what the outputs look like.
    _torch.sharding_depends_on(inference, 5)
    _torch.sharding_depends_on(forward, 5)
    _torch.sharding_depends_on(backward, 8)
