"""Attention backward in two or three kernels, without atomics, so that every run gives the same bits.

Method: Dao, "FlashAttention-2" (arXiv 2307.08691), section 3.1, split by what is accumulated. With P the probabilities
and delta = rowsum(grad_out * out):

    dV = P^T dO     dP = dO V^T     dS = P * (dP - delta)     dQ = scale * dS K     dK = scale * dS^T Q     dMask = dS

    attention_backward_query      BLOCK_M rows of dQ of one head, loops over keys; leaves row statistics for the others
    attention_backward_key_value  BLOCK_N rows of dK and dV of one kv head, loops over the queries of its group's heads
    attention_backward_mask       a tile of the float mask's gradient, loops over whatever the mask was broadcast over

P is computed again in each from scores and logsumexp: seven products instead of five, in exchange for no fp32 workspace
the size of Q and no order of additions left to chance. Scores are held transposed where keys are the rows of the
result, so that P^T and dS^T are the left operands of the products that follow.

May import triton and ``common.py`` only. Launched by ``attention.py``.
"""

import triton
import triton.language as tl

from .common import (
    LOG2E,
    MASK_BOOL,
    MASK_FLOAT,
    MASK_NONE,
    SPLIT_SQUARED,
    as_operand,
    count_parts_of_keys,
    dropout_column_keys,
    dropout_keep,
    dropout_row_keys,
    dropout_tables,
    load_mask,
    load_tile,
    part_of_keys,
    part_of_list,
    split_product,
    split_rows,
    store_tile,
    stream_tile,
)


@triton.jit
def _load_statistics(statistics, plane, position, HAS_LOW: tl.constexpr):
    """(high, low, delta) of some rows, as attention_backward_query left them: three planes of [B, H, padded seqlen_q].

    The planes reach past the end of the sequence and hold nothing that needs a bound or a special case there.
    """
    high = tl.load(statistics + position)
    delta = tl.load(statistics + plane + position)
    if HAS_LOW:
        low = tl.load(statistics + 2 * plane + position)
    else:
        low = 0.0
    return high, low, delta


@triton.jit
def _stream_statistics(statistics, head_index, first_query, BLOCK_M: tl.constexpr, HAS_LOW: tl.constexpr):
    """_load_statistics by the copy engine, each [1, BLOCK_M]; statistics is a tensor map [1, planes, B * H, padded].

    The copies that it replaces, sixteen of four bytes for each thread and tile, took the registers that spilled.
    """
    high = statistics.load([0, 0, head_index, first_query]).reshape([1, BLOCK_M])
    delta = statistics.load([0, 1, head_index, first_query]).reshape([1, BLOCK_M])
    if HAS_LOW:
        low = statistics.load([0, 2, head_index, first_query]).reshape([1, BLOCK_M])
    else:
        low = 0.0
    return high, low, delta


@triton.jit
def _gradient_tile(scores, grad_probabilities, high, low, delta, query_index, key_index, keep, mask_tile, seqlen_k,
                   scale, dropout_scale, BOUND_KEYS: tl.constexpr, DIAGONAL: tl.constexpr,
                   MASK: tl.constexpr, NATURAL: tl.constexpr, SELECT: tl.constexpr, DROPOUT: tl.constexpr):
    """(probabilities after dropout, gradient of the scores) for one tile, in either orientation.

    high, low, delta and query_index broadcast along the keys, key_index along the queries. keep is what dropout_keep
    gave, mask_tile what load_mask gave. NATURAL: high and scale are in natural units (there is a float mask, whether it
    matters here or not). Without SELECT the caller clears what a bias of -inf hides, where it may be NaN.
    """
    if MASK == MASK_FLOAT:
        # In this order: scores that a bias of finfo.min absorbed in the forward must be absorbed here.
        probabilities = tl.exp2(((scores * scale + mask_tile) - high) * LOG2E - low * LOG2E)
        if SELECT:
            probabilities = tl.where(mask_tile == float("-inf"), 0.0, probabilities)
    elif NATURAL:
        probabilities = tl.exp2(scores * (scale * LOG2E) - (high * LOG2E + low * LOG2E))
    else:
        probabilities = tl.exp2(scores * scale - high)
        if MASK == MASK_BOOL:
            probabilities = tl.where(mask_tile, probabilities, 0.0)
    if DIAGONAL:
        probabilities = tl.where(query_index >= key_index, probabilities, 0.0)
    if BOUND_KEYS and MASK == MASK_NONE:  # the masks above have done it
        probabilities = tl.where(key_index < seqlen_k, probabilities, 0.0)
    if DROPOUT:
        kept = tl.where(keep, probabilities * dropout_scale, 0.0)
        grad_probabilities = tl.where(keep, grad_probabilities * dropout_scale, 0.0)
    else:
        kept = probabilities
    return kept, probabilities * (grad_probabilities - delta)


@triton.jit
def _visit_keys(grad_query_tile, query_tile, query_low, grad_out_tile, grad_out_low, high, low, delta, first, last,
                entries, first_query, query_index, row_keys, key, value, mask, mask_batch, mask_head, batch, kv_head,
                column_table, stride_kn, stride_kd, stride_vn, stride_vd, stride_mq, stride_mk, seqlen_q, seqlen_k,
                scale, dropout_threshold, dropout_scale, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
                BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                PARTIAL: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, NATURAL: tl.constexpr,
                MASK_PER_KEY: tl.constexpr, MASK_UNIT_STRIDE: tl.constexpr, MASK_TMA: tl.constexpr, STEP: tl.constexpr,
                DROPOUT: tl.constexpr, UNIT_STRIDE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr):
    """The loop of attention_backward_query over the keys first..last, or a list of blocks (see the forward's).

    Of split tiles, delta and the result are in units of the rows of grad_out.
    """
    keys = tl.arange(0, BLOCK_N)
    SPLIT: tl.constexpr = PRECISION == "fp16x3"
    score_scale = scale[:, None] if SPLIT else scale
    if STEP != 0:
        upcoming = tl.load(entries + first * STEP)
    for counter in tl.range(first, last, 1 if STEP != 0 else BLOCK_N):
        if STEP != 0:
            start = upcoming.to(tl.int32) * BLOCK_N
            upcoming = tl.load(entries + (counter + 1) * STEP)
        else:
            start = counter
        key_index = start + keys
        key_tile = stream_tile(key, batch, kv_head, start, keys, stride_kn, stride_kd, seqlen_k, BLOCK_N, BLOCK_D,
                               HEAD_DIM, UNIT_STRIDE, PARTIAL, TMA)
        if SPLIT:
            # One tile after the other: both at once need more registers than there are.
            key_high, key_low, key_factor = split_rows(key_tile, True)
            scores = split_product(query_tile, query_low, tl.trans(key_high), tl.trans(key_low)) * key_factor[None, :]
        value_tile = stream_tile(value, batch, kv_head, start, keys, stride_vn, stride_vd, seqlen_k, BLOCK_N, BLOCK_DV,
                                 HEAD_DIM_V, UNIT_STRIDE, PARTIAL, TMA)
        if SPLIT:
            value_high, value_low, value_factor = split_rows(value_tile, True)
            grad_probabilities = split_product(grad_out_tile, grad_out_low, tl.trans(value_high), tl.trans(value_low))
            grad_probabilities *= (value_factor * (1 / SPLIT_SQUARED))[None, :]
        else:
            scores = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)
            grad_probabilities = tl.dot(grad_out_tile, tl.trans(value_tile), input_precision=PRECISION)
        keep = 0
        if DROPOUT:
            column_keys = dropout_column_keys(column_table, start, BLOCK_N)
            keep = dropout_keep(row_keys, column_keys, first_query, dropout_threshold, BLOCK_M, BLOCK_N, False)
        mask_tile = load_mask(mask, mask_batch, mask_head, first_query, start, query_index[:, None], key_index[None, :],
                              stride_mq, stride_mk, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N, MASK, MASK_PER_KEY,
                              MASK_UNIT_STRIDE, PARTIAL, False, MASK_TMA)
        _, grad_scores = _gradient_tile(
            scores, grad_probabilities, high[:, None], low[:, None], delta[:, None], query_index[:, None],
            key_index[None, :], keep, mask_tile, seqlen_k, score_scale, dropout_scale, PARTIAL, PARTIAL and CAUSAL,
            MASK, NATURAL, True, DROPOUT)
        if SPLIT:
            weight, weight_low, weight_factor = split_rows(grad_scores * key_factor[None, :], False)
            grad_query_tile += split_product(weight, weight_low, key_high, key_low) * (
                weight_factor * (1 / SPLIT_SQUARED))[:, None]
        else:
            grad_query_tile = tl.dot(as_operand(grad_scores, key_tile.dtype, PRECISION), key_tile, grad_query_tile,
                                     input_precision=PRECISION)
    return grad_query_tile


@triton.jit
def attention_backward_query(
    query, key, value, mask, mask_tiles, dropout_keys, out, logsumexp, logsumexp_low, grad_out, statistics, grad_query,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_mb, stride_mh, stride_mq, stride_mk,
    stride_ob, stride_oh, stride_om, stride_od,
    stride_gb, stride_gh, stride_gm, stride_gd,
    stride_dqb, stride_dqh, stride_dqm, stride_dqd,
    mask_batch_step, mask_head_step, stride_lb, stride_lh, stride_lt, lists_offset,
    logsumexp_pitch, padded_q, plane, num_heads, group_size, seqlen_q, seqlen_k, scale, out_scale, dropout_threshold,
    dropout_scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    MASK_PER_KEY: tl.constexpr, MASK_UNIT_STRIDE: tl.constexpr, MASK_TMA: tl.constexpr, LISTED: tl.constexpr,
    BOUND_KEYS: tl.constexpr, HAS_LOW: tl.constexpr, DROPOUT: tl.constexpr, ONLY_DELTA: tl.constexpr,
    SUM_ROWS: tl.constexpr, UNIT_STRIDE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):
    """grad_query like query, and the row statistics for the other kernels. ONLY_DELTA: the query needs no gradient.

    scale multiplies the scores (with log2(e) unless there is a float mask), out_scale the result. statistics is
    float32, planes of [B, H, padded_q]: logsumexp in the units of the scores, delta and, if HAS_LOW, logsumexp_low.
    Rows that see no key and rows past the end get +inf, so that their probabilities come out as zeros: our forward
    writes -inf for the former, some of PyTorch's +inf. LISTED: the key blocks to visit are lists in mask_tiles.
    SUM_ROWS: no more keys than that, unless 0, are added up at a time, as in the forward.
    """
    num_tiles = padded_q // BLOCK_M
    program = tl.program_id(0)
    head_index = program // num_tiles
    tile = program % num_tiles
    if CAUSAL or LISTED:
        tile = num_tiles - 1 - tile  # longest first, or so it is where the mask is causal
    batch = head_index // num_heads
    head = head_index % num_heads
    kv_head = head // group_size
    out += batch * stride_ob + head * stride_oh
    grad_out += batch * stride_gb + head * stride_gh

    first_query = tile * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    query_index = first_query + rows
    inside = query_index < seqlen_q
    grad_out_tile = load_tile(grad_out, first_query, rows, stride_gm, stride_gd, seqlen_q, BLOCK_DV, HEAD_DIM_V,
                              UNIT_STRIDE, True)
    out_tile = load_tile(out, first_query, rows, stride_om, stride_od, seqlen_q, BLOCK_DV, HEAD_DIM_V, UNIT_STRIDE,
                         True)
    delta = tl.sum(out_tile.to(tl.float32) * grad_out_tile.to(tl.float32), 1)
    position = head_index.to(tl.int64) * logsumexp_pitch + query_index
    high = tl.load(logsumexp + position, mask=inside, other=float("inf"))
    high = tl.where(high == float("-inf"), float("inf"), high)
    if MASK != MASK_FLOAT:
        high = high * LOG2E
    position_padded = head_index.to(tl.int64) * padded_q + query_index
    tl.store(statistics + position_padded, high)
    tl.store(statistics + plane + position_padded, delta)
    if HAS_LOW:
        low = tl.load(logsumexp_low + position, mask=inside, other=0.0)
        tl.store(statistics + 2 * plane + position_padded, low)
    else:
        low = tl.zeros_like(high)

    if not ONLY_DELTA:
        query += batch * stride_qb + head * stride_qh
        if not TMA:
            key += batch * stride_kb + kv_head * stride_kh
            value += batch * stride_vb + kv_head * stride_vh
        grad_query += batch * stride_dqb + head * stride_dqh
        mask_batch = batch * mask_batch_step
        mask_head = head * mask_head_step
        if MASK != MASK_NONE and not MASK_TMA:
            mask += batch * stride_mb + head * stride_mh
        row_keys = 0
        column_table = 0
        if DROPOUT:
            row_table, column_table = dropout_tables(dropout_keys, head_index, seqlen_q, seqlen_k)
            row_keys = dropout_row_keys(row_table, first_query, BLOCK_M)
        query_tile = load_tile(query, first_query, rows, stride_qm, stride_qd, seqlen_q, BLOCK_D, HEAD_DIM,
                               UNIT_STRIDE, True)
        query_low = 0
        grad_out_low = 0
        row_scale = scale
        if PRECISION == "fp16x3":
            query_tile, query_low, query_factor = split_rows(query_tile, True)
            grad_out_tile, grad_out_low, grad_out_factor = split_rows(grad_out_tile, True)
            row_scale = query_factor * (scale / SPLIT_SQUARED)
            delta = delta / grad_out_factor
        else:
            query_tile = as_operand(query_tile, query.dtype.element_ty, PRECISION)
            grad_out_tile = as_operand(grad_out_tile, grad_out.dtype.element_ty, PRECISION)
        grad_query_tile = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        NATURAL: tl.constexpr = MASK == MASK_FLOAT
        if LISTED:
            # Tiles past the end only have statistics to leave; whatever they visit comes to nothing.
            block = tl.minimum(tile, tl.cdiv(seqlen_q, BLOCK_M) - 1)
            lists = mask_tiles + lists_offset + batch * stride_lb + head * stride_lh + block * stride_lt
            full_end = tl.load(lists).to(tl.int32)
            partial_end = tl.load(lists + 1).to(tl.int32)
            partial_begin = 0
            full_entries = lists + 2
            partial_entries = lists + (1 + tl.cdiv(seqlen_k, BLOCK_N))
        else:
            full_end = (tl.minimum(seqlen_k, first_query + 1) if CAUSAL else seqlen_k) // BLOCK_N * BLOCK_N
            partial_end = tl.minimum(seqlen_k, first_query + BLOCK_M) if CAUSAL else seqlen_k
            partial_begin = full_end
            full_entries = mask_tiles
            partial_entries = mask_tiles
        num_parts = count_parts_of_keys(full_end, partial_end, BLOCK_N, LISTED, SUM_ROWS) if SUM_ROWS else 1
        for part in range(num_parts):
            full_first, full_last, partial_first, partial_last = 0, full_end, partial_begin, partial_end
            total = grad_query_tile
            if SUM_ROWS:
                grad_query_tile = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                full_first, full_last, partial_first, partial_last = part_of_keys(
                    part, num_parts, full_end, partial_begin, partial_end, BLOCK_N, LISTED, SUM_ROWS)
            grad_query_tile = _visit_keys(
                grad_query_tile, query_tile, query_low, grad_out_tile, grad_out_low, high, low, delta, full_first,
                full_last, full_entries, first_query, query_index, row_keys, key, value, mask, mask_batch, mask_head,
                batch, kv_head, column_table, stride_kn, stride_kd, stride_vn, stride_vd, stride_mq, stride_mk,
                seqlen_q, seqlen_k, row_scale, dropout_threshold, dropout_scale, HEAD_DIM, HEAD_DIM_V, BLOCK_D,
                BLOCK_DV, BLOCK_M, BLOCK_N, False, CAUSAL, MASK_NONE if LISTED else MASK, NATURAL, MASK_PER_KEY,
                MASK_UNIT_STRIDE, MASK_TMA, 1 if LISTED else 0, DROPOUT, UNIT_STRIDE, TMA, PRECISION)
            if partial_first < partial_last:
                grad_query_tile = _visit_keys(
                    grad_query_tile, query_tile, query_low, grad_out_tile, grad_out_low, high, low, delta,
                    partial_first, partial_last, partial_entries, first_query, query_index, row_keys, key, value, mask,
                    mask_batch, mask_head, batch, kv_head, column_table, stride_kn, stride_kd, stride_vn, stride_vd,
                    stride_mq, stride_mk, seqlen_q, seqlen_k, row_scale, dropout_threshold, dropout_scale, HEAD_DIM,
                    HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, BOUND_KEYS or not LISTED, CAUSAL, MASK, NATURAL,
                    MASK_PER_KEY, MASK_UNIT_STRIDE, MASK_TMA, -1 if LISTED else 0, DROPOUT, UNIT_STRIDE, TMA, PRECISION)
            if SUM_ROWS:
                grad_query_tile += total
        if PRECISION == "fp16x3":
            grad_query_tile *= grad_out_factor[:, None]
        store_tile(grad_query, grad_query_tile * out_scale, first_query, rows, stride_dqm, stride_dqd, seqlen_q,
                   BLOCK_D, HEAD_DIM, UNIT_STRIDE)


@triton.jit
def _visit_queries(grad_key_tile, grad_value_tile, key_sums, key_tile, key_low, value_tile, value_low, value_factor,
                   first, last, entries, first_key, key_index, column_keys, query, mask, mask_batch, mask_head, batch,
                   head, row_table, statistics, plane, grad_out, head_index, stride_qm, stride_qd, stride_gm, stride_gd,
                   stride_mq, stride_mk, seqlen_q, seqlen_k, scale, dropout_threshold, dropout_scale,
                   HEAD_DIM: tl.constexpr,
                   HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, BOUND_QUERIES: tl.constexpr, BOUND_KEYS: tl.constexpr,
                   DIAGONAL: tl.constexpr, MASK: tl.constexpr, NATURAL: tl.constexpr, MASK_PER_KEY: tl.constexpr,
                   MASK_UNIT_STRIDE: tl.constexpr, MASK_TMA: tl.constexpr, STEP: tl.constexpr, HAS_LOW: tl.constexpr,
                   DROPOUT: tl.constexpr, KEY_SUMS: tl.constexpr, UNIT_STRIDE: tl.constexpr, TMA: tl.constexpr,
                   PRECISION: tl.constexpr):
    """The loop of attention_backward_key_value over the queries first..last of one head, or a list of blocks.

    STEP as in the forward's. KEY_SUMS: dS is added up over the queries, too.
    """
    rows = tl.arange(0, BLOCK_M)
    SPLIT: tl.constexpr = PRECISION == "fp16x3"
    score_scale = scale[:, None] if SPLIT else scale
    if STEP != 0:
        upcoming = tl.load(entries + first * STEP)
    for counter in tl.range(first, last, 1 if STEP != 0 else BLOCK_M):
        if STEP != 0:
            start = upcoming.to(tl.int32) * BLOCK_M
            upcoming = tl.load(entries + (counter + 1) * STEP)
        else:
            start = counter
        query_index = start + rows
        if SPLIT:
            # One tile after the other: both at once need more registers than there are.
            query_tile = stream_tile(query, batch, head, start, rows, stride_qm, stride_qd, seqlen_q, BLOCK_M, BLOCK_D,
                                     HEAD_DIM, UNIT_STRIDE, BOUND_QUERIES, TMA)
            query_high, query_low, query_factor = split_rows(query_tile, True)
            scores = split_product(key_tile, key_low, tl.trans(query_high), tl.trans(query_low))
            scores *= query_factor[None, :]
            grad_out_tile = stream_tile(grad_out, batch, head, start, rows, stride_gm, stride_gd, seqlen_q, BLOCK_M,
                                        BLOCK_DV, HEAD_DIM_V, UNIT_STRIDE, BOUND_QUERIES, TMA)
            grad_high, grad_low, grad_factor = split_rows(grad_out_tile, True)
            # In units of the rows of grad_out, as is delta, until P and dS are multiplied by them.
            grad_probabilities = split_product(value_tile, value_low, tl.trans(grad_high), tl.trans(grad_low))
            grad_probabilities *= (value_factor * (1 / SPLIT_SQUARED))[:, None]
        else:
            query_tile = stream_tile(query, batch, head, start, rows, stride_qm, stride_qd, seqlen_q, BLOCK_M, BLOCK_D,
                                     HEAD_DIM, UNIT_STRIDE, BOUND_QUERIES, TMA)
            grad_out_tile = stream_tile(grad_out, batch, head, start, rows, stride_gm, stride_gd, seqlen_q, BLOCK_M,
                                        BLOCK_DV, HEAD_DIM_V, UNIT_STRIDE, BOUND_QUERIES, TMA)
        if TMA:
            high, low, delta = _stream_statistics(statistics, head_index, start, BLOCK_M, HAS_LOW)
        else:
            # Broadcast to rank 2 first: the loads then have the layout of the scores.
            high, low, delta = _load_statistics(statistics, plane, query_index[None, :], HAS_LOW)
        if SPLIT:
            delta = delta / grad_factor[None, :]
        else:
            scores = tl.dot(key_tile, tl.trans(query_tile), input_precision=PRECISION)
            grad_probabilities = tl.dot(value_tile, tl.trans(grad_out_tile), input_precision=PRECISION)
        keep = 0
        if DROPOUT:
            row_keys = dropout_row_keys(row_table, start, BLOCK_M)
            keep = dropout_keep(row_keys, column_keys, start, dropout_threshold, BLOCK_M, BLOCK_N, True)
        # Keys past the end are not stored: only loads of the mask need bounds there.
        mask_tile = load_mask(mask, mask_batch, mask_head, start, first_key, query_index[None, :], key_index[:, None],
                              stride_mq, stride_mk, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N, MASK, MASK_PER_KEY,
                              MASK_UNIT_STRIDE, BOUND_KEYS, True, MASK_TMA)
        kept, grad_scores = _gradient_tile(
            scores, grad_probabilities, high, low, delta, query_index[None, :], key_index[:, None], keep, mask_tile,
            seqlen_k, score_scale, dropout_scale, False, DIAGONAL, MASK, NATURAL, True, DROPOUT)
        if SPLIT:
            weight, weight_low, weight_factor = split_rows(kept * grad_factor[None, :], False)
            grad_value_tile += split_product(weight, weight_low, grad_high, grad_low) * (
                weight_factor * (1 / SPLIT_SQUARED))[:, None]
            grad_scores = grad_scores * grad_factor[None, :]
            weight, weight_low, weight_factor = split_rows(grad_scores * query_factor[None, :], False)
            grad_key_tile += split_product(weight, weight_low, query_high, query_low) * (
                weight_factor * (1 / SPLIT_SQUARED))[:, None]
        else:
            grad_value_tile = tl.dot(as_operand(kept, grad_out_tile.dtype, PRECISION), grad_out_tile, grad_value_tile,
                                     input_precision=PRECISION)
            grad_key_tile = tl.dot(as_operand(grad_scores, query_tile.dtype, PRECISION), query_tile, grad_key_tile,
                                   input_precision=PRECISION)
        if KEY_SUMS:
            key_sums += tl.sum(grad_scores, 1)
    return grad_key_tile, grad_value_tile, key_sums


@triton.jit
def attention_backward_key_value(
    query, key, value, mask, mask_tiles, dropout_keys, statistics, grad_out, grad_key, grad_value,
    key_sums_out,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_mb, stride_mh, stride_mq, stride_mk,
    stride_gb, stride_gh, stride_gm, stride_gd,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd,
    stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    mask_batch_step, mask_head_step, stride_lb, stride_lh, stride_lt, lists_offset,
    padded_q, plane, num_heads, group_size, seqlen_q, seqlen_k, scale, out_scale, dropout_threshold, dropout_scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BOUND_QUERIES: tl.constexpr, BOUND_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, MASK_PER_KEY: tl.constexpr, MASK_UNIT_STRIDE: tl.constexpr,
    MASK_TMA: tl.constexpr, MASK_AT_END: tl.constexpr, LISTED: tl.constexpr,
    HAS_LOW: tl.constexpr, DROPOUT: tl.constexpr, SUM_ROWS: tl.constexpr, KEY_SUMS: tl.constexpr,
    UNIT_STRIDE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):
    """grad_key and grad_value like key and value, summed over the query heads of each kv head; needs statistics.

    LISTED: the query blocks to visit are lists in mask_tiles. MASK_AT_END: a bool mask with one row for all queries of
    these heads needs no comparisons in the loop, its keys' gradients are set to zero at the end. KEY_SUMS: key_sums_out
    [B, H, seqlen_k], float32, gets dS summed over the queries of each head: the gradient of a bias with one row.

    SUM_ROWS: no more rows than that, unless 0, are added up in the tensor cores at a time. They cut off instead of
    rounding, which after eight million rows would be 1% of the result. Lists are cut likewise, after as many blocks,
    since a list may name every block; parts past its end are empty and cost two loads.
    """
    num_tiles = tl.cdiv(seqlen_k, BLOCK_N)
    program = tl.program_id(0)
    kv_index = program // num_tiles
    tile = program % num_tiles  # causal: the first tile is seen by the most queries, so this is longest first
    num_kv_heads = num_heads // group_size
    batch = kv_index // num_kv_heads
    kv_head = kv_index % num_kv_heads
    key += batch * stride_kb + kv_head * stride_kh
    value += batch * stride_vb + kv_head * stride_vh
    grad_key += batch * stride_dkb + kv_head * stride_dkh
    grad_value += batch * stride_dvb + kv_head * stride_dvh

    first_key = tile * BLOCK_N
    keys = tl.arange(0, BLOCK_N)
    key_index = first_key + keys
    key_tile = load_tile(key, first_key, keys, stride_kn, stride_kd, seqlen_k, BLOCK_D, HEAD_DIM, UNIT_STRIDE, True)
    value_tile = load_tile(value, first_key, keys, stride_vn, stride_vd, seqlen_k, BLOCK_DV, HEAD_DIM_V, UNIT_STRIDE,
                           True)
    key_low = 0
    value_low = 0
    value_factor = 0
    row_scale = scale
    if PRECISION == "fp16x3":
        key_tile, key_low, key_factor = split_rows(key_tile, True)
        value_tile, value_low, value_factor = split_rows(value_tile, True)
        row_scale = key_factor * (scale / SPLIT_SQUARED)
    else:
        key_tile = as_operand(key_tile, key.dtype.element_ty, PRECISION)
        value_tile = as_operand(value_tile, value.dtype.element_ty, PRECISION)
    grad_key_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    grad_value_tile = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    key_sums = tl.zeros([BLOCK_N], tl.float32)
    # Causal: one loop that compares everywhere beats a loop for the diagonal and one for the rest (11% at head_dim
    # 128), which share their registers badly.
    first = first_key // BLOCK_M * BLOCK_M if CAUSAL else 0
    last = seqlen_q
    NATURAL: tl.constexpr = MASK == MASK_FLOAT
    LIST_STEP: tl.constexpr = 0 if not LISTED or MASK_PER_KEY else -1
    if MASK_AT_END:
        keys_mask = mask + (batch * stride_mb + kv_head * group_size * stride_mh)
        seen = load_mask(keys_mask, 0, 0, 0, 0, 0, key_index, stride_mq, stride_mk, seqlen_q, seqlen_k, BLOCK_M,
                         BLOCK_N, MASK, True, MASK_UNIT_STRIDE, True, False, False)
        last = tl.where(tl.max(seen.to(tl.int32), 0) > 0, seqlen_q, 0)
    num_parts = tl.cdiv(seqlen_q - first, SUM_ROWS) if SUM_ROWS else 1
    for item in range(group_size * num_parts):
        member = item // num_parts
        grad_key_part, grad_value_part = grad_key_tile, grad_value_tile
        if SUM_ROWS:
            grad_key_part = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
            grad_value_part = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        head_index = kv_index * group_size + member
        head = kv_head * group_size + member
        head_query = query if TMA else query + (batch * stride_qb + head * stride_qh)
        head_grad_out = grad_out if TMA else grad_out + (batch * stride_gb + head * stride_gh)
        mask_batch = batch * mask_batch_step
        mask_head = head * mask_head_step
        head_mask = mask
        if MASK != MASK_NONE and not MASK_TMA:
            head_mask += batch * stride_mb + head * stride_mh
        head_statistics = statistics if TMA else statistics + head_index.to(tl.int64) * padded_q
        row_table = 0
        column_keys = 0
        if DROPOUT:
            row_table, column_table = dropout_tables(dropout_keys, head_index, seqlen_q, seqlen_k)
            column_keys = dropout_column_keys(column_table, first_key, BLOCK_N)
        begin = first
        end = last
        if SUM_ROWS:
            begin = first + item % num_parts * SUM_ROWS
            end = tl.minimum(begin + SUM_ROWS, last)
        entries = mask_tiles
        if LISTED:
            lists = mask_tiles + lists_offset + batch * stride_lb + head * stride_lh + tile * stride_lt
            full_end = tl.load(lists).to(tl.int32)
            mixed_end = tl.load(lists + 1).to(tl.int32)
            if MASK_PER_KEY:
                end = tl.where(full_end + mixed_end > 0, end, 0)
            else:
                begin = 0
                end = mixed_end
                entries = lists + (1 + tl.cdiv(seqlen_q, BLOCK_M))
                full_begin = 0
                if SUM_ROWS:
                    # Counted on from the full ones, so that both together make one part.
                    begin, end = part_of_list(item % num_parts, full_end, mixed_end, SUM_ROWS // BLOCK_M)
                    full_begin, full_end = part_of_list(item % num_parts, 0, full_end, SUM_ROWS // BLOCK_M)
                grad_key_part, grad_value_part, key_sums = _visit_queries(
                    grad_key_part, grad_value_part, key_sums, key_tile, key_low, value_tile, value_low, value_factor,
                    full_begin, full_end, lists + 2, first_key, key_index, column_keys, head_query, head_mask,
                    mask_batch, mask_head, batch, head, row_table, head_statistics, plane, head_grad_out, head_index,
                    stride_qm, stride_qd, stride_gm, stride_gd, stride_mq, stride_mk, seqlen_q, seqlen_k, row_scale,
                    dropout_threshold, dropout_scale, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
                    BOUND_QUERIES, BOUND_KEYS, False, MASK_NONE, NATURAL, MASK_PER_KEY, MASK_UNIT_STRIDE, MASK_TMA, 1,
                    HAS_LOW, DROPOUT, KEY_SUMS, UNIT_STRIDE, TMA, PRECISION)
        grad_key_part, grad_value_part, key_sums = _visit_queries(
            grad_key_part, grad_value_part, key_sums, key_tile, key_low, value_tile, value_low, value_factor, begin,
            end, entries, first_key, key_index, column_keys, head_query, head_mask, mask_batch, mask_head, batch, head,
            row_table,
            head_statistics, plane, head_grad_out, head_index, stride_qm, stride_qd, stride_gm, stride_gd, stride_mq,
            stride_mk, seqlen_q, seqlen_k, row_scale, dropout_threshold, dropout_scale, HEAD_DIM, HEAD_DIM_V, BLOCK_D,
            BLOCK_DV, BLOCK_M, BLOCK_N, BOUND_QUERIES, BOUND_KEYS, CAUSAL, MASK_NONE if MASK_AT_END else MASK, NATURAL,
            MASK_PER_KEY, MASK_UNIT_STRIDE, MASK_TMA, LIST_STEP, HAS_LOW, DROPOUT, KEY_SUMS, UNIT_STRIDE, TMA,
            PRECISION)
        if KEY_SUMS:
            # Of all parts of this head so far.
            pointers = key_sums_out + head_index.to(tl.int64) * seqlen_k + key_index
            tl.store(pointers, key_sums, mask=key_index < seqlen_k)
            key_sums = tl.where(item % num_parts == num_parts - 1, 0.0, key_sums)
        if SUM_ROWS:
            grad_key_part += grad_key_tile
            grad_value_part += grad_value_tile
        grad_key_tile, grad_value_tile = grad_key_part, grad_value_part
    if MASK_AT_END:
        grad_key_tile = tl.where(seen[:, None], grad_key_tile, 0.0)
        grad_value_tile = tl.where(seen[:, None], grad_value_tile, 0.0)
    store_tile(grad_key, grad_key_tile * out_scale, first_key, keys, stride_dkn, stride_dkd, seqlen_k, BLOCK_D,
               HEAD_DIM, UNIT_STRIDE)
    store_tile(grad_value, grad_value_tile, first_key, keys, stride_dvn, stride_dvd, seqlen_k, BLOCK_DV, HEAD_DIM_V,
               UNIT_STRIDE)


@triton.jit
def attention_backward_mask(
    query, key, value, mask, dropout_keys, statistics, grad_out, grad_mask,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_mb, stride_mh, stride_mq, stride_mk, mask_batch_step, mask_head_step,
    stride_gb, stride_gh, stride_gm, stride_gd,
    stride_ds, stride_db, stride_dh, stride_dq, stride_dk,
    padded_q, plane, num_batches, num_heads, group_size, seqlen_q, seqlen_k, mask_batches, mask_heads, mask_tiles_q,
    mask_tiles_k, num_splits, scale, dropout_threshold, dropout_scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, MASK_PER_KEY: tl.constexpr,
    MASK_PER_QUERY: tl.constexpr, MASK_UNIT_STRIDE: tl.constexpr, MASK_TMA: tl.constexpr, HAS_LOW: tl.constexpr,
    DROPOUT: tl.constexpr, UNIT_STRIDE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):
    """grad_mask [num_splits, mask_batches, mask_heads, 1 or seqlen_q, 1 or seqlen_k], to be summed over its splits.

    A program owns one tile of the mask and sums dS over the batches, heads, query tiles and key tiles that share it
    (mask_batches is 1 or num_batches, and so on; MASK_PER_KEY: one row for all queries, MASK_PER_QUERY: one column for
    all keys). A tile that no query sees has no work. Where that leaves too few programs, num_splits of them share it.
    """
    program = tl.program_id(0)
    split = program % num_splits
    owned = program // num_splits
    owned_k = owned % mask_tiles_k
    owned_q = owned // mask_tiles_k % mask_tiles_q
    owned_head = owned // (mask_tiles_k * mask_tiles_q) % mask_heads
    owned_batch = owned // (mask_tiles_k * mask_tiles_q * mask_heads)
    repeat_k = tl.cdiv(seqlen_k, BLOCK_N) if MASK_PER_QUERY else 1
    repeat_q = tl.cdiv(seqlen_q, BLOCK_M) if MASK_PER_KEY else 1
    repeat_head = num_heads // mask_heads
    repeat_batch = num_batches // mask_batches

    rows = tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    count = repeat_k * repeat_q * repeat_head * repeat_batch
    ONE_TILE: tl.constexpr = not MASK_PER_KEY and not MASK_PER_QUERY
    if ONE_TILE:
        # The same tile of the mask for every item.
        first_row = owned_q * BLOCK_M
        first_column = owned_k * BLOCK_N
        head_mask = mask
        if not MASK_TMA:
            head_mask += owned_batch.to(tl.int64) * stride_mb + owned_head.to(tl.int64) * stride_mh
        mask_tile = load_mask(head_mask, owned_batch * mask_batch_step, owned_head * mask_head_step, first_row,
                              first_column, (first_row + rows)[:, None], (first_column + keys)[None, :], stride_mq,
                              stride_mk, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N, MASK, False, MASK_UNIT_STRIDE, True,
                              False, MASK_TMA)
        seen = mask_tile != float("-inf")
        hidden = 1 - tl.max(tl.max(seen.to(tl.int32), 1), 0)
        count = tl.where(hidden > 0, 0, count)
    for item in tl.range(split, count, num_splits):
        # At most one of the two terms of each sum is not zero.
        first_key = (owned_k + item % repeat_k) * BLOCK_N
        first_query = (owned_q + item // repeat_k % repeat_q) * BLOCK_M
        outer = item // (repeat_k * repeat_q)
        head = owned_head + outer % repeat_head
        batch = owned_batch + outer // repeat_head
        head_index = batch * num_heads + head
        kv_head = head // group_size if TMA else (head // group_size).to(tl.int64)
        if not TMA:
            batch = batch.to(tl.int64)
            head = head.to(tl.int64)
        query_index = first_query + rows
        key_index = first_key + keys
        query_tile = stream_tile(query if TMA else query + (batch * stride_qb + head * stride_qh), batch, head,
                                 first_query, rows, stride_qm, stride_qd, seqlen_q, BLOCK_M, BLOCK_D, HEAD_DIM,
                                 UNIT_STRIDE, True, TMA)
        key_tile = stream_tile(key if TMA else key + (batch * stride_kb + kv_head * stride_kh), batch, kv_head,
                               first_key, keys, stride_kn, stride_kd, seqlen_k, BLOCK_N, BLOCK_D, HEAD_DIM, UNIT_STRIDE,
                               True, TMA)
        query_tile = as_operand(query_tile, key_tile.dtype, PRECISION)
        scores = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)
        value_tile = stream_tile(value if TMA else value + (batch * stride_vb + kv_head * stride_vh), batch, kv_head,
                                 first_key, keys, stride_vn, stride_vd, seqlen_k, BLOCK_N, BLOCK_DV, HEAD_DIM_V,
                                 UNIT_STRIDE, True, TMA)
        grad_out_tile = stream_tile(grad_out if TMA else grad_out + (batch * stride_gb + head * stride_gh), batch, head,
                                    first_query, rows, stride_gm, stride_gd, seqlen_q, BLOCK_M, BLOCK_DV, HEAD_DIM_V,
                                    UNIT_STRIDE, True, TMA)
        grad_out_tile = as_operand(grad_out_tile, value_tile.dtype, PRECISION)
        grad_probabilities = tl.dot(grad_out_tile, tl.trans(value_tile), input_precision=PRECISION)
        if TMA:
            high, low, delta = _stream_statistics(statistics, head_index, first_query, BLOCK_M, HAS_LOW)
            high, delta = high.reshape([BLOCK_M, 1]), delta.reshape([BLOCK_M, 1])
            low = low.reshape([BLOCK_M, 1]) if HAS_LOW else low
        else:
            position = head_index.to(tl.int64) * padded_q + query_index
            high, low, delta = _load_statistics(statistics, plane, position[:, None], HAS_LOW)
        keep = 0
        if DROPOUT:
            row_table, column_table = dropout_tables(dropout_keys, head_index, seqlen_q, seqlen_k)
            row_keys = dropout_row_keys(row_table, first_query, BLOCK_M)
            column_keys = dropout_column_keys(column_table, first_key, BLOCK_N)
            keep = dropout_keep(row_keys, column_keys, first_query, dropout_threshold, BLOCK_M, BLOCK_N, False)
        if not ONE_TILE:
            mask_tile = load_mask(mask + (batch * stride_mb + head * stride_mh), 0, 0, first_query, first_key,
                                  query_index[:, None], key_index[None, :], stride_mq, stride_mk, seqlen_q, seqlen_k,
                                  BLOCK_M, BLOCK_N, MASK, MASK_PER_KEY, MASK_UNIT_STRIDE, True, False, False)
        _, grad_scores = _gradient_tile(
            scores, grad_probabilities, high, low, delta, query_index[:, None], key_index[None, :], keep, mask_tile,
            seqlen_k, scale, dropout_scale, True, False, MASK, True, not ONE_TILE, DROPOUT)
        total += grad_scores
    if ONE_TILE:
        total = tl.where(seen, total, 0.0)

    grad_mask += split * stride_ds + owned_batch.to(tl.int64) * stride_db + owned_head.to(tl.int64) * stride_dh
    grad_mask += owned_q.to(tl.int64) * BLOCK_M * stride_dq + owned_k.to(tl.int64) * BLOCK_N * stride_dk
    inside_q = owned_q * BLOCK_M + rows < seqlen_q
    inside_k = owned_k * BLOCK_N + keys < seqlen_k
    if MASK_PER_KEY:
        column_sums = tl.sum(total, 0)
        if MASK_PER_QUERY:
            tl.store(grad_mask, tl.sum(column_sums, 0).to(grad_mask.dtype.element_ty))
        else:
            tl.store(grad_mask + keys * stride_dk, column_sums.to(grad_mask.dtype.element_ty), mask=inside_k)
    elif MASK_PER_QUERY:
        tl.store(grad_mask + rows * stride_dq, tl.sum(total, 1).to(grad_mask.dtype.element_ty), mask=inside_q)
    else:
        pointers = grad_mask + rows[:, None] * stride_dq + keys[None, :] * stride_dk
        tl.store(pointers, total.to(grad_mask.dtype.element_ty), mask=inside_q[:, None] & inside_k[None, :])
