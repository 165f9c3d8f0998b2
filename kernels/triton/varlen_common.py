"""Device functions of the variable-length kernels: who sees whom, scores before the softmax, entries of the schedule.

May import triton and ``common.py`` only. Imported by ``varlen_forward.py`` and ``varlen_backward.py``.

Sequences lie one after the other in packed tensors [total, heads, head_dim]. Query i of a sequence stands at position
i + offset among its keys: offset is seqlen_k - seqlen_q where the last query is aligned with the last key, 0 where the
first ones are. It sees the keys from position - window_left to position + window_right; a causal mask is
window_right 0.
"""

import triton
import triton.language as tl

from .common import LOG2E

# One line of the schedule (``varlen_schedule.py``): what a program needs to know about its tile, 32 bytes.
ENTRY = tl.constexpr(8)

# Row statistics of each sequence begin at a multiple of this, a multiple of every BLOCK_M, and so have room for whole
# tiles.
STATISTICS_ALIGNMENT = tl.constexpr(128)


@triton.jit
def load_entry(entries, slot, AGAIN: tl.constexpr = False):
    """(tile, q_start, q_len, k_start, k_len, k_rows, sequence, statistics_start); zeros where nothing is to be done.

    AGAIN: from memory, even if the program has loaded it before: registers that nobody needs in between are free.
    """
    entry = entries + slot * ENTRY
    tile = tl.load(entry, volatile=AGAIN)
    q_start = tl.load(entry + 1, volatile=AGAIN)
    q_len = tl.load(entry + 2, volatile=AGAIN)
    k_start = tl.load(entry + 3, volatile=AGAIN)
    k_len = tl.load(entry + 4, volatile=AGAIN)
    k_rows = tl.load(entry + 5, volatile=AGAIN)
    sequence = tl.load(entry + 6, volatile=AGAIN)
    statistics_start = tl.load(entry + 7, volatile=AGAIN)
    return tile, q_start, q_len, k_start, k_len, k_rows, sequence, statistics_start


@triton.jit
def key_ranges(first_query, q_len, k_len, offset, window_left, window_right, BLOCK_M: tl.constexpr,
               BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """(first, left_span, full_begin, full_end, partial_span): the keys that a tile of queries visits.

    Whole tiles, which every row sees, are full_begin..full_end. The others: left_span keys from first on, then
    partial_span - left_span from full_end on. All spans are multiples of BLOCK_N, and a tile may start at any key.
    """
    last_query = tl.minimum(first_query + BLOCK_M, q_len) - 1
    first = 0
    last = k_len
    seen_by_all = k_len
    if HAS_RIGHT:
        last = tl.maximum(tl.minimum(k_len, last_query + offset + window_right + 1), 0)
        seen_by_all = tl.minimum(k_len, first_query + offset + window_right + 1)
    left_span = 0
    if HAS_LEFT:
        first = tl.minimum(tl.maximum(first_query + offset - window_left, 0), last)
        full = tl.minimum(tl.maximum(last_query + offset - window_left, first), last)
        left_span = tl.cdiv(full - first, BLOCK_N) * BLOCK_N
    full_begin = first + left_span
    full_end = full_begin + tl.maximum(seen_by_all - full_begin, 0) // BLOCK_N * BLOCK_N
    partial_span = left_span + tl.cdiv(tl.maximum(last - full_end, 0), BLOCK_N) * BLOCK_N
    return first, left_span, full_begin, full_end, partial_span


@triton.jit
def in_window(position, key_index, window_left, window_right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Which keys are in the windows of queries at these positions; two index tensors that broadcast."""
    if HAS_LEFT and HAS_RIGHT:
        # One comparison: before the window's beginning the difference is a large unsigned number.
        width = (window_left + window_right).to(tl.uint32)
        return (key_index - (position - window_left)).to(tl.uint32, bitcast=True) <= width
    elif HAS_RIGHT:
        return key_index <= position + window_right
    else:
        return key_index >= position - window_left


@triton.jit
def any_nan(tile):
    """Is there a NaN in a tile? For all threads of the program."""
    return tl.max(tl.max((tile != tile).to(tl.int32), 1), 0) > 0


@triton.jit
def hyperbolic_tangent(x, PRECISE: tl.constexpr):
    """tanh(x) to some units of float32's last place of 1; PRECISE: of the result, by its series where x is small."""
    folded = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    result = (1.0 - folded) / (1.0 + folded)
    result = tl.where(x < 0.0, -result, result)
    if PRECISE:
        square = x * x
        series = 2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0))
        result = tl.where(square < 0.09, x + x * square * (-1.0 / 3.0 + square * series), result)
    # tanh(NaN) is NaN: both the comparison and the quotient see to that.
    return result


@triton.jit
def transform_scores(scores, position, key_index, scale, cap, slope, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
                     PRECISE: tl.constexpr):
    """(scores with softcap and ALiBi in units of log2, tanh or 0) of query @ key^T.

    SOFTCAP: cap * tanh(scale * scores), cap carrying log2(e); otherwise scale carries it, as slope does.
    """
    tangent = 0.0
    if SOFTCAP:
        tangent = hyperbolic_tangent(scores * scale, PRECISE)
        scores = tangent * cap
    else:
        scores = scores * scale
    if ALIBI:
        scores = scores - slope * tl.abs(position - key_index).to(tl.float32)
    return scores, tangent
