"""Random keys of every query and key of a call with dropout, written to memory once for each forward and backward.

What decides about an element is mixed from its row's and its column's key (``common.py``, ``dropout_keep``). In the
layout of a tensor core's tile each thread holds a quarter of all columns, so computing their keys in the attention
kernels would cost each thread several times what the elements cost.

May import triton and ``common.py`` only. Launched by ``attention.py``; read by the attention kernels.
"""

import triton
import triton.language as tl

from .common import DROPOUT_PITCH


@triton.jit
def dropout_keys(dropout_seed, keys, seqlen_q, seqlen_k, BLOCK: tl.constexpr):
    """keys int32 [B * H, rows + columns]: one for each query, then one for each key, each padded to DROPOUT_PITCH.

    Philox 4x32-10 (Salmon et al., 2011) of the position, the head and 0 for queries or 1 for keys; its first word.
    """
    rows = tl.cdiv(seqlen_q, DROPOUT_PITCH) * DROPOUT_PITCH
    columns = tl.cdiv(seqlen_k, DROPOUT_PITCH) * DROPOUT_PITCH
    blocks = (rows + columns) // BLOCK
    head = tl.program_id(0) // blocks
    position = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    of_keys = (position >= rows).to(tl.int32)
    index = position - of_keys * rows
    zero = index * 0
    word, _, _, _ = tl.philox(tl.load(dropout_seed), index, zero + head, of_keys, zero)
    tl.store(keys + head.to(tl.int64) * (rows + columns) + position, word.to(tl.int32, bitcast=True))
