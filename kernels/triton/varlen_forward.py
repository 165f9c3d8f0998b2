"""Variable-length attention forward: ``forward.py``'s method for sequences packed one after the other.

One program computes BLOCK_M query rows of one head of one sequence; which, the schedule says (``varlen_schedule.py``).
Key tiles outside of the causal or sliding window are not visited. The copy engine brings tiles as they lie in memory:
one that reaches past the end of its sequence has rows of the next. Their probabilities are 0, and 0 times anything is 0
but for NaN and infinity: a program that has seen such rows and ends with a NaN computes once more, clearing them. That
costs a look at the accumulator; clearing them always costs a third of such a tile's instructions.

    scores = softcap(scale * query @ key^T) - slope * |position - key|, -inf outside of the window
    out = softmax([scores, sink])[:-1] @ value, zeros for a query that sees no key

On-chip budget as ``forward.py``. May import triton, ``common.py`` and ``varlen_common.py`` only. Launched by
``varlen.py``.
"""

import triton
import triton.language as tl

from .common import LOG2E, as_operand, load_tile, store_tile, stream_tile
from .varlen_common import any_nan, in_window, key_ranges, load_entry, transform_scores


@triton.jit
def _visit_keys(accumulator, row_max, row_sum, query_tile, begin, end, first, left_span, full_end, position, slope, key,
                value, key_origin, kv_head, stride_kn, stride_kd, stride_vn, stride_vd, k_len, window_left,
                window_right, scale, cap, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
                BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, PARTIAL: tl.constexpr, CLEAR: tl.constexpr,
                HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
                UNIT_STRIDE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr):
    """The loop over the keys begin..end; PARTIAL: over spans of keys that some of the rows see (see key_ranges).

    CLEAR: over the keys begin..end, with nothing left of rows past the last key.
    """
    keys = tl.arange(0, BLOCK_N)
    TRANSFORMED: tl.constexpr = SOFTCAP or ALIBI
    PRECISE: tl.constexpr = query_tile.dtype == tl.float32
    for counter in tl.range(begin, end, BLOCK_N):
        start = counter
        if PARTIAL and not CLEAR:
            start += tl.where(counter < left_span, first, full_end - left_span) if HAS_LEFT else full_end
        key_tile = stream_tile(key, 0, kv_head, key_origin + start, keys, stride_kn, stride_kd, k_len, BLOCK_N, BLOCK_D,
                               HEAD_DIM, UNIT_STRIDE, PARTIAL, TMA)
        scores = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)
        key_index = start + keys
        if TRANSFORMED:
            scores, _ = transform_scores(scores, position[:, None], key_index[None, :], scale, cap, slope, SOFTCAP,
                                         ALIBI, PRECISE)
        if PARTIAL:
            inside = (key_index < k_len)[None, :]
            if HAS_LEFT or HAS_RIGHT:
                inside = inside & in_window(position[:, None], key_index[None, :], window_left, window_right, HAS_LEFT,
                                            HAS_RIGHT)
            scores = tl.where(inside, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        if TRANSFORMED:
            probabilities = tl.exp2(scores - shift[:, None])
            rescale = tl.exp2(row_max - shift)
        else:
            # The host made the scale positive, so the maximum commutes with it; one multiply-add for each score.
            probabilities = tl.exp2(scores * scale - (shift * scale)[:, None])
            rescale = tl.exp2(row_max * scale - shift * scale)
        row_sum = row_sum * rescale + tl.sum(probabilities, 1)
        accumulator = accumulator * rescale[:, None]
        value_tile = stream_tile(value, 0, kv_head, key_origin + start, keys, stride_vn, stride_vd, k_len, BLOCK_N,
                                 BLOCK_DV, HEAD_DIM_V, UNIT_STRIDE, PARTIAL, TMA)
        if CLEAR:
            value_tile = tl.where((key_index < k_len)[:, None], value_tile, 0.0)
        accumulator = tl.dot(as_operand(probabilities, value_tile.dtype, PRECISION), value_tile, accumulator,
                             input_precision=PRECISION)
        row_max = new_max
    return accumulator, row_max, row_sum


@triton.jit
def varlen_forward(
    query, key, value, entries, alibi_slopes, sinks, out, logsumexp,
    stride_qh, stride_qm, stride_qd, stride_kh, stride_kn, stride_kd, stride_vh, stride_vn, stride_vd,
    stride_oh, stride_om, stride_od, slopes_pitch, logsumexp_pitch,
    slots, group_size, window_left, window_right, scale, cap,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    QUERY_FACTOR: tl.constexpr, UNIT_STRIDE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):
    """out [total_q, H, HEAD_DIM_V] and logsumexp [H, total_q] (natural logarithm, float32, rows logsumexp_pitch apart).

    scale and cap are in the units that transform_scores wants; without softcap and ALiBi scale is positive, and
    QUERY_FACTOR (1, -1 or 0) carries its sign. alibi_slopes float32 [H] or, slopes_pitch apart, [sequences, H]; sinks
    [H]. window_left and window_right count where HAS_LEFT and HAS_RIGHT.
    """
    program = tl.program_id(0)
    head = program // slots
    kv_head = head // group_size
    tile, q_start, q_len, k_start, k_len, _, sequence, _ = load_entry(entries, program % slots)
    offset = k_len - q_len if BOTTOM_RIGHT else 0
    query += tl.cast(q_start, tl.int64) * stride_qm + head * stride_qh
    out += tl.cast(q_start, tl.int64) * stride_om + head * stride_oh
    key_origin = 0
    if TMA:
        key_origin = k_start
    else:
        key += tl.cast(k_start, tl.int64) * stride_kn + kv_head * stride_kh
        value += tl.cast(k_start, tl.int64) * stride_vn + kv_head * stride_vh

    first_query = tile * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    query_tile = load_tile(query, first_query, rows, stride_qm, stride_qd, q_len, BLOCK_D, HEAD_DIM, UNIT_STRIDE, True)
    if QUERY_FACTOR != 1:
        query_tile = query_tile * QUERY_FACTOR
    query_tile = as_operand(query_tile, query.dtype.element_ty, PRECISION)
    position = first_query + rows + offset
    slope = 0.0
    if ALIBI:
        slope = tl.load(alibi_slopes + sequence * slopes_pitch + head) * LOG2E

    accumulator = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    first, left_span, full_begin, full_end, partial_span = key_ranges(
        first_query, q_len, k_len, offset, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    accumulator, row_max, row_sum = _visit_keys(
        accumulator, row_max, row_sum, query_tile, full_begin, full_end, first, left_span, full_end, position, slope,
        key, value, key_origin, kv_head, stride_kn, stride_kd, stride_vn, stride_vd, k_len, window_left, window_right,
        scale, cap, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, False, False, HAS_LEFT, HAS_RIGHT, SOFTCAP,
        ALIBI, UNIT_STRIDE, TMA, PRECISION)
    if partial_span > 0:
        accumulator, row_max, row_sum = _visit_keys(
            accumulator, row_max, row_sum, query_tile, 0, partial_span, first, left_span, full_end, position, slope,
            key, value, key_origin, kv_head, stride_kn, stride_kd, stride_vn, stride_vd, k_len, window_left,
            window_right, scale, cap, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, True, False, HAS_LEFT,
            HAS_RIGHT, SOFTCAP, ALIBI, UNIT_STRIDE, TMA, PRECISION)
    if TMA:
        if full_end + (partial_span - left_span) > k_len or full_begin > k_len:
            if any_nan(accumulator):
                accumulator, row_max, row_sum = _visit_keys(
                    tl.zeros([BLOCK_M, BLOCK_DV], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32),
                    tl.zeros([BLOCK_M], tl.float32), query_tile, first, full_end + (partial_span - left_span), first,
                    left_span, full_end, position, slope, key, value, key_origin, kv_head, stride_kn, stride_kd,
                    stride_vn, stride_vd, k_len, window_left, window_right, scale, cap, HEAD_DIM, HEAD_DIM_V, BLOCK_D,
                    BLOCK_DV, BLOCK_N, True, True, HAS_LEFT, HAS_RIGHT, SOFTCAP, ALIBI, UNIT_STRIDE, TMA, PRECISION)

    top = row_max if SOFTCAP or ALIBI else row_max * scale
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        total = tl.maximum(top, sink)
        shift = tl.where(total == float("-inf"), 0.0, total)
        rescale = tl.exp2(top - shift)
        row_sum = row_sum * rescale + tl.exp2(sink - shift)
        accumulator = accumulator * rescale[:, None]
        top = total
    # A row that sees no key has an accumulator of zeros: zeros it gives. NaN stays NaN.
    accumulator = accumulator * (1.0 / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
    store_tile(out, accumulator, first_query, rows, stride_om, stride_od, q_len, BLOCK_DV, HEAD_DIM_V, UNIT_STRIDE)
    row = first_query + rows
    result = tl.where(row_sum == 0.0, float("-inf"), top * (1.0 / LOG2E) + tl.log(row_sum))
    tl.store(logsumexp + (head * logsumexp_pitch + q_start + row), result, mask=row < q_len)
