"""Variable-length attention backward: ``backward.py``'s two passes for sequences packed one after the other.

    varlen_backward_query      BLOCK_M rows of dQ of one head and sequence; leaves row statistics for the other
    varlen_backward_key_value  BLOCK_N rows of dK and dV of one kv head and sequence, over its group's heads

No atomics: every run gives the same bits. With softcap, dS = P * (dP - delta) * (1 - tanh^2). A sink is in logsumexp
already; its own gradient comes from the statistics (``varlen.py``). Rows of the next sequence that the copy engine
brings are cleared if they did harm, as in ``varlen_forward.py``.

May import triton, ``common.py`` and ``varlen_common.py`` only. Launched by ``varlen.py``.
"""

import triton
import triton.language as tl

from .common import LOG2E, as_operand, load_tile, store_tile, stream_tile
from .varlen_common import any_nan, in_window, key_ranges, load_entry, transform_scores

# As in ``backward.py``: how many rows tensor cores, which cut off instead of rounding, add up at a time.
SUM_ROWS = tl.constexpr(2**16)


@triton.jit
def _gradient_tile(scores, grad_probabilities, high, delta, position, key_index, inside, scale, cap, slope,
                   MASKED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, PRECISE: tl.constexpr):
    """(probabilities, gradient of the scores) for one tile, in either orientation; the arguments broadcast.

    MASKED: outside of `inside` both are zero.
    """
    if SOFTCAP or ALIBI:
        scores, tangent = transform_scores(scores, position, key_index, scale, cap, slope, SOFTCAP, ALIBI, PRECISE)
        probabilities = tl.exp2(scores - high)
    else:
        probabilities = tl.exp2(scores * scale - high)
    if MASKED:
        probabilities = tl.where(inside, probabilities, 0.0)
    grad_scores = probabilities * (grad_probabilities - delta)
    if SOFTCAP:
        grad_scores = grad_scores * (1.0 - tangent * tangent)
    return probabilities, grad_scores


@triton.jit
def _visit_keys(grad_query_tile, query_tile, grad_out_tile, high, delta, begin, end, first, left_span, full_end,
                position, slope, key, value, key_origin, kv_head, stride_kn, stride_kd, stride_vn, stride_vd, k_len,
                window_left, window_right, scale, cap, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
                BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, PARTIAL: tl.constexpr,
                CLEAR: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
                ALIBI: tl.constexpr, UNIT_STRIDE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr):
    """The loop of varlen_backward_query over the keys begin..end (see the forward's)."""
    keys = tl.arange(0, BLOCK_N)
    PRECISE: tl.constexpr = query_tile.dtype == tl.float32
    for counter in tl.range(begin, end, BLOCK_N):
        start = counter
        if PARTIAL and not CLEAR:
            start += tl.where(counter < left_span, first, full_end - left_span) if HAS_LEFT else full_end
        key_index = start + keys
        key_tile = stream_tile(key, 0, kv_head, key_origin + start, keys, stride_kn, stride_kd, k_len, BLOCK_N, BLOCK_D,
                               HEAD_DIM, UNIT_STRIDE, PARTIAL, TMA)
        value_tile = stream_tile(value, 0, kv_head, key_origin + start, keys, stride_vn, stride_vd, k_len, BLOCK_N,
                                 BLOCK_DV, HEAD_DIM_V, UNIT_STRIDE, PARTIAL, TMA)
        if CLEAR:
            key_tile = tl.where((key_index < k_len)[:, None], key_tile, 0.0)
            value_tile = tl.where((key_index < k_len)[:, None], value_tile, 0.0)
        scores = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)
        grad_probabilities = tl.dot(grad_out_tile, tl.trans(value_tile), input_precision=PRECISION)
        inside = True
        if PARTIAL:
            inside = (key_index < k_len)[None, :]
            if HAS_LEFT or HAS_RIGHT:
                inside = inside & in_window(position[:, None], key_index[None, :], window_left, window_right, HAS_LEFT,
                                            HAS_RIGHT)
        _, grad_scores = _gradient_tile(
            scores, grad_probabilities, high[:, None], delta[:, None], position[:, None], key_index[None, :], inside,
            scale, cap, slope, PARTIAL, SOFTCAP, ALIBI, PRECISE)
        grad_query_tile = tl.dot(as_operand(grad_scores, key_tile.dtype, PRECISION), key_tile, grad_query_tile,
                                 input_precision=PRECISION)
    return grad_query_tile


@triton.jit
def varlen_backward_query(
    query, key, value, entries, alibi_slopes, out, logsumexp, grad_out, statistics, grad_query,
    stride_qh, stride_qm, stride_qd, stride_kh, stride_kn, stride_kd, stride_vh, stride_vn, stride_vd,
    stride_oh, stride_om, stride_od, stride_gh, stride_gm, stride_gd, stride_dqh, stride_dqm, stride_dqd,
    slopes_pitch, logsumexp_pitch, pitch, plane, slots, group_size, window_left, window_right, scale, cap, out_scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, ONLY_DELTA: tl.constexpr,
    UNIT_STRIDE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):
    """grad_query like query, and the row statistics. ONLY_DELTA: the query needs no gradient.

    statistics is float32, two planes of [H, pitch]: logsumexp times log2(e), with +inf for rows that see no key and
    those past the last, and delta = rowsum(grad_out * out); a sequence's rows begin at its statistics_start. Arguments
    as the forward's; scale has its sign here, out_scale is the softmax scale.
    """
    program = tl.program_id(0)
    head = program // slots
    kv_head = head // group_size
    tile, q_start, q_len, k_start, k_len, _, sequence, statistics_start = load_entry(entries, program % slots)
    offset = k_len - q_len if BOTTOM_RIGHT else 0
    wide_start = tl.cast(q_start, tl.int64)
    out += wide_start * stride_om + head * stride_oh
    grad_out += wide_start * stride_gm + head * stride_gh

    first_query = tile * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    inside = first_query + rows < q_len
    grad_out_tile = load_tile(grad_out, first_query, rows, stride_gm, stride_gd, q_len, BLOCK_DV, HEAD_DIM_V,
                              UNIT_STRIDE, True)
    out_tile = load_tile(out, first_query, rows, stride_om, stride_od, q_len, BLOCK_DV, HEAD_DIM_V, UNIT_STRIDE, True)
    delta = tl.sum(out_tile.to(tl.float32) * grad_out_tile.to(tl.float32), 1)
    high = tl.load(logsumexp + (head * logsumexp_pitch + q_start + first_query + rows), mask=inside, other=float("inf"))
    high = tl.where(high == float("-inf"), float("inf"), high) * LOG2E
    row = statistics_start + first_query + rows
    # The whole tile; of an entry that means nothing, nothing.
    written = (q_len > 0) & (rows >= 0)
    tl.store(statistics + (head * pitch + row), high, mask=written)
    tl.store(statistics + (plane + head * pitch + row), delta, mask=written)

    if not ONLY_DELTA:
        query += wide_start * stride_qm + head * stride_qh
        grad_query += wide_start * stride_dqm + head * stride_dqh
        key_origin = 0
        if TMA:
            key_origin = k_start
        else:
            key += tl.cast(k_start, tl.int64) * stride_kn + kv_head * stride_kh
            value += tl.cast(k_start, tl.int64) * stride_vn + kv_head * stride_vh
        query_tile = load_tile(query, first_query, rows, stride_qm, stride_qd, q_len, BLOCK_D, HEAD_DIM, UNIT_STRIDE,
                               True)
        query_tile = as_operand(query_tile, query.dtype.element_ty, PRECISION)
        grad_out_tile = as_operand(grad_out_tile, grad_out.dtype.element_ty, PRECISION)
        position = first_query + rows + offset
        slope = 0.0
        if ALIBI:
            slope = tl.load(alibi_slopes + sequence * slopes_pitch + head) * LOG2E
        grad_query_tile = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        first, left_span, full_begin, full_end, partial_span = key_ranges(
            first_query, q_len, k_len, offset, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
        grad_query_tile = _visit_keys(
            grad_query_tile, query_tile, grad_out_tile, high, delta, full_begin, full_end, first, left_span, full_end,
            position, slope, key, value, key_origin, kv_head, stride_kn, stride_kd, stride_vn, stride_vd, k_len,
            window_left, window_right, scale, cap, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, False, False,
            HAS_LEFT, HAS_RIGHT, SOFTCAP, ALIBI, UNIT_STRIDE, TMA, PRECISION)
        if partial_span > 0:
            grad_query_tile = _visit_keys(
                grad_query_tile, query_tile, grad_out_tile, high, delta, 0, partial_span, first, left_span, full_end,
                position, slope, key, value, key_origin, kv_head, stride_kn, stride_kd, stride_vn, stride_vd, k_len,
                window_left, window_right, scale, cap, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, True, False,
                HAS_LEFT, HAS_RIGHT, SOFTCAP, ALIBI, UNIT_STRIDE, TMA, PRECISION)
        if TMA:
            if full_end + (partial_span - left_span) > k_len or full_begin > k_len:
                if any_nan(grad_query_tile):
                    grad_query_tile = _visit_keys(
                        tl.zeros([BLOCK_M, BLOCK_D], tl.float32), query_tile, grad_out_tile, high, delta, first,
                        full_end + (partial_span - left_span), first, left_span, full_end, position, slope, key, value,
                        key_origin, kv_head, stride_kn, stride_kd, stride_vn, stride_vd, k_len, window_left,
                        window_right, scale, cap, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, True, True,
                        HAS_LEFT, HAS_RIGHT, SOFTCAP, ALIBI, UNIT_STRIDE, TMA, PRECISION)
        store_tile(grad_query, grad_query_tile * out_scale, first_query, rows, stride_dqm, stride_dqd, q_len, BLOCK_D,
                   HEAD_DIM, UNIT_STRIDE)


@triton.jit
def _load_statistics(statistics, plane, pitch, head, row, BLOCK_M: tl.constexpr, TMA: tl.constexpr):
    """(logsumexp, delta) [1, BLOCK_M] of the rows from `row` on, as varlen_backward_query left them.

    TMA: statistics is a tensor map [1, 2, H, pitch].
    """
    if TMA:
        high = statistics.load([0, 0, head, row]).reshape([1, BLOCK_M])
        delta = statistics.load([0, 1, head, row]).reshape([1, BLOCK_M])
    else:
        # Broadcast to rank 2 first: the loads then have the layout of the scores.
        pointers = statistics + (head * pitch + (row + tl.arange(0, BLOCK_M))[None, :])
        high = tl.load(pointers)
        delta = tl.load(pointers + plane)
    return high, delta


@triton.jit
def _visit_queries(grad_key_tile, grad_value_tile, key_tile, value_tile, begin, end, first_key, offset, slope, query,
                   grad_out, statistics, plane, pitch, q_start, statistics_start, head, stride_qm, stride_qd, stride_gm,
                   stride_gd, q_len, window_left, window_right, scale, cap, HEAD_DIM: tl.constexpr,
                   HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, CLEAR: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
                   SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, UNIT_STRIDE: tl.constexpr, TMA: tl.constexpr,
                   PRECISION: tl.constexpr):
    """The loop of varlen_backward_key_value over the queries begin..end of one head.

    Rows past the last query have probability 0, by their statistics. CLEAR: and are cleared.
    """
    rows = tl.arange(0, BLOCK_M)
    key_index = (first_key + tl.arange(0, BLOCK_N))[:, None]
    PRECISE: tl.constexpr = key_tile.dtype == tl.float32
    WINDOW: tl.constexpr = HAS_LEFT or HAS_RIGHT
    for start in tl.range(begin, end, BLOCK_M):
        # The copy engine counts rows from the start of the packed tensors.
        row = q_start + start if TMA else start
        query_tile = stream_tile(query, 0, head, row, rows, stride_qm, stride_qd, q_len, BLOCK_M, BLOCK_D, HEAD_DIM,
                                 UNIT_STRIDE, True, TMA)
        grad_out_tile = stream_tile(grad_out, 0, head, row, rows, stride_gm, stride_gd, q_len, BLOCK_M, BLOCK_DV,
                                    HEAD_DIM_V, UNIT_STRIDE, True, TMA)
        high, delta = _load_statistics(statistics, plane, pitch, head, statistics_start + start, BLOCK_M, TMA)
        query_index = start + rows
        if CLEAR:
            query_tile = tl.where((query_index < q_len)[:, None], query_tile, 0.0)
            grad_out_tile = tl.where((query_index < q_len)[:, None], grad_out_tile, 0.0)
        scores = tl.dot(key_tile, tl.trans(query_tile), input_precision=PRECISION)
        grad_probabilities = tl.dot(value_tile, tl.trans(grad_out_tile), input_precision=PRECISION)
        position = (query_index + offset)[None, :]
        inside = True
        if WINDOW:
            inside = in_window(position, key_index, window_left, window_right, HAS_LEFT, HAS_RIGHT)
        probabilities, grad_scores = _gradient_tile(
            scores, grad_probabilities, high, delta, position, key_index, inside, scale, cap, slope, WINDOW, SOFTCAP,
            ALIBI, PRECISE)
        grad_value_tile = tl.dot(as_operand(probabilities, grad_out_tile.dtype, PRECISION), grad_out_tile,
                                 grad_value_tile, input_precision=PRECISION)
        grad_key_tile = tl.dot(as_operand(grad_scores, query_tile.dtype, PRECISION), query_tile, grad_key_tile,
                               input_precision=PRECISION)
    return grad_key_tile, grad_value_tile


@triton.jit
def _key_value_tile(query, key, value, entries, alibi_slopes, statistics, grad_out, stride_qh, stride_qm, stride_qd,
                    stride_kh, stride_kn, stride_kd, stride_vh, stride_vn, stride_vd, stride_gh, stride_gm, stride_gd,
                    slopes_pitch, pitch, plane, slot, kv_head, group_size, window_left, window_right, scale, cap,
                    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CLEAR: tl.constexpr, HAS_LEFT: tl.constexpr,
                    HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
                    LONG_SUM: tl.constexpr, UNIT_STRIDE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr):
    """(dK without its factor, dV) of a tile of keys. CLEAR: see _visit_queries; the second time, from the beginning."""
    entry = load_entry(entries, slot, CLEAR)
    tile, q_start, q_len, k_start, k_len, _, sequence, statistics_start = entry
    offset = k_len - q_len if BOTTOM_RIGHT else 0
    key += tl.cast(k_start, tl.int64) * stride_kn + kv_head * stride_kh
    value += tl.cast(k_start, tl.int64) * stride_vn + kv_head * stride_vh
    first_key = tile * BLOCK_N
    keys = tl.arange(0, BLOCK_N)
    key_tile = load_tile(key, first_key, keys, stride_kn, stride_kd, k_len, BLOCK_D, HEAD_DIM, UNIT_STRIDE, True)
    value_tile = load_tile(value, first_key, keys, stride_vn, stride_vd, k_len, BLOCK_DV, HEAD_DIM_V, UNIT_STRIDE, True)
    key_tile = as_operand(key_tile, key.dtype.element_ty, PRECISION)
    value_tile = as_operand(value_tile, value.dtype.element_ty, PRECISION)
    grad_key_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    grad_value_tile = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    first = 0
    last = tl.where(first_key < k_len, q_len, 0)
    if HAS_RIGHT:
        # A tile of queries starts at a multiple of its size, for the statistics' sake.
        first = tl.maximum(first_key - offset - window_right, 0) // BLOCK_M * BLOCK_M
    if HAS_LEFT:
        last_key = tl.minimum(first_key + BLOCK_N, k_len) - 1
        last = tl.minimum(last, last_key - offset + window_left + 1)
    num_parts = tl.cdiv(tl.maximum(last - first, 1), SUM_ROWS) if LONG_SUM else 1
    for item in range(group_size * num_parts):
        head = kv_head * group_size + item // num_parts
        grad_key_part, grad_value_part = grad_key_tile, grad_value_tile
        begin = first
        end = last
        if LONG_SUM:
            grad_key_part = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
            grad_value_part = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
            begin = first + item % num_parts * SUM_ROWS
            end = tl.minimum(begin + SUM_ROWS, last)
        head_query = query
        head_grad_out = grad_out
        if not TMA:
            head_query += tl.cast(q_start, tl.int64) * stride_qm + head * stride_qh
            head_grad_out += tl.cast(q_start, tl.int64) * stride_gm + head * stride_gh
        slope = 0.0
        if ALIBI:
            slope = tl.load(alibi_slopes + sequence * slopes_pitch + head) * LOG2E
        grad_key_part, grad_value_part = _visit_queries(
            grad_key_part, grad_value_part, key_tile, value_tile, begin, end, first_key, offset, slope, head_query,
            head_grad_out, statistics, plane, pitch, q_start, statistics_start, head, stride_qm, stride_qd, stride_gm,
            stride_gd, q_len, window_left, window_right, scale, cap, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M,
            BLOCK_N, CLEAR, HAS_LEFT, HAS_RIGHT, SOFTCAP, ALIBI, UNIT_STRIDE, TMA, PRECISION)
        if LONG_SUM:
            grad_key_part += grad_key_tile
            grad_value_part += grad_value_tile
        grad_key_tile, grad_value_tile = grad_key_part, grad_value_part
    return grad_key_tile, grad_value_tile


@triton.jit
def varlen_backward_key_value(
    query, key, value, entries, alibi_slopes, statistics, grad_out, grad_key, grad_value,
    stride_qh, stride_qm, stride_qd, stride_kh, stride_kn, stride_kd, stride_vh, stride_vn, stride_vd,
    stride_gh, stride_gm, stride_gd, stride_dkh, stride_dkn, stride_dkd, stride_dvh, stride_dvn, stride_dvd,
    slopes_pitch, pitch, plane, slots, first_slot, group_size, window_left, window_right, scale, cap, out_scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, LONG_SUM: tl.constexpr,
    UNIT_STRIDE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):
    """grad_key and grad_value like key and value, summed over the query heads of each kv head; needs statistics.

    Keys that lie in memory and are seen by nobody get zeros. LONG_SUM: no more than SUM_ROWS rows are added up in the
    tensor cores at a time.
    """
    program = tl.program_id(0)
    kv_head = program // slots
    slot = first_slot + program % slots
    grad_key_tile, grad_value_tile = _key_value_tile(
        query, key, value, entries, alibi_slopes, statistics, grad_out, stride_qh, stride_qm, stride_qd, stride_kh,
        stride_kn, stride_kd, stride_vh, stride_vn, stride_vd, stride_gh, stride_gm, stride_gd, slopes_pitch, pitch,
        plane, slot, kv_head, group_size, window_left, window_right, scale, cap, HEAD_DIM, HEAD_DIM_V, BLOCK_D,
        BLOCK_DV, BLOCK_M, BLOCK_N, False, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, SOFTCAP, ALIBI, LONG_SUM, UNIT_STRIDE,
        TMA, PRECISION)
    if TMA:
        if any_nan(grad_key_tile) or any_nan(grad_value_tile):
            grad_key_tile, grad_value_tile = _key_value_tile(
                query, key, value, entries, alibi_slopes, statistics, grad_out, stride_qh, stride_qm, stride_qd,
                stride_kh, stride_kn, stride_kd, stride_vh, stride_vn, stride_vd, stride_gh, stride_gm, stride_gd,
                slopes_pitch, pitch, plane, slot, kv_head, group_size, window_left, window_right, scale, cap, HEAD_DIM,
                HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, True, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, SOFTCAP,
                ALIBI, LONG_SUM, UNIT_STRIDE, TMA, PRECISION)

    tile, _, _, k_start, k_len, k_rows, _, _ = load_entry(entries, slot, True)
    wide_start = tl.cast(k_start, tl.int64)
    grad_key += wide_start * stride_dkn + kv_head * stride_dkh
    grad_value += wide_start * stride_dvn + kv_head * stride_dvh
    first_key = tile * BLOCK_N
    keys = tl.arange(0, BLOCK_N)
    seen = (first_key + keys < k_len)[:, None]
    grad_key_tile = tl.where(seen, grad_key_tile * out_scale, 0.0)
    grad_value_tile = tl.where(seen, grad_value_tile, 0.0)
    store_tile(grad_key, grad_key_tile, first_key, keys, stride_dkn, stride_dkd, k_rows, BLOCK_D, HEAD_DIM, UNIT_STRIDE)
    store_tile(grad_value, grad_value_tile, first_key, keys, stride_dvn, stride_dvd, k_rows, BLOCK_DV, HEAD_DIM_V,
               UNIT_STRIDE)
