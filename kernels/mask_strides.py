"""How a mask of attention is walked in memory. May import torch. Imported by the launchers of both kinds of kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def broadcast_strides(shape: Sequence[int], strides: Sequence[int], scores_shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a mask of this shape, 0 where it is broadcast to scores [B, H, Sq, Sk], by its size or by expand()."""
    return tuple(
        0 if size == 1 and wanted != 1 else stride
        for size, wanted, stride in zip(shape, scores_shape, strides, strict=True)
    )


def strides_of(mask: torch.Tensor, scores_shape: tuple[int, int, int, int]) -> tuple[int, ...]:
    """The same of a mask of rank 4."""
    return broadcast_strides(mask.shape, mask.stride(), scores_shape)
