"""How a mask of attention is walked in memory. May import torch. Imported by the launchers of both kinds of kernels."""

from __future__ import annotations

import torch


def strides_of(mask: torch.Tensor, scores_shape: tuple[int, int, int, int]) -> tuple[int, ...]:
    """The strides of a mask of rank 4, 0 where it is broadcast to scores [B, H, Sq, Sk], by its size or by expand()."""
    return tuple(
        0 if size == 1 and wanted != 1 else stride
        for size, wanted, stride in zip(mask.shape, scores_shape, mask.stride(), strict=True)
    )
