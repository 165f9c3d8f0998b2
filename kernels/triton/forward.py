"""Attention forward: out = softmax(scale * query @ key^T + mask) @ value, one pass over keys with an online softmax.

Method: Dao, "FlashAttention-2" (arXiv 2307.08691); online softmax of Milakov and Gimelshein (arXiv 1805.02867).
One program computes BLOCK_M query rows of one head:

    load the query tile
    for each key tile up to the last one that any of the rows may see:
        scores = query @ key^T;  mask;  new row maximum;  probabilities = exp(scores - maximum)
        rescale the accumulator by exp(old maximum - maximum);  accumulator += probabilities @ value
    out = accumulator / row sum;  logsumexp = maximum + log(row sum)

The loop runs in two parts: key tiles that every row of the tile sees whole, then those that need bounds, the causal
diagonal or the mask. With LISTED, both parts go through a list that ``mask_tiles.py`` made, and tiles that no row sees
are in neither; without, a mask is applied everywhere. On-chip budget: the query tile, num_stages key and value tiles;
accumulator and scores in registers (``tiles.py``).

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
    split_product,
    split_rows,
    store_tile,
    stream_tile,
)


@triton.jit
def _visit_keys(accumulator, row_max, row_sum, query_tile, query_low, first, last, entries, first_query, query_rows,
                key, value, mask, mask_batch, mask_head, batch, kv_head, row_keys, column_table, first_column,
                stride_kn, stride_kd, stride_vn, stride_vd, stride_mq, stride_mk, seqlen_q, seqlen_k, scale,
                dropout_threshold, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
                BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTIAL: tl.constexpr,
                CAUSAL: tl.constexpr, MASK: tl.constexpr, NATURAL: tl.constexpr, MASK_PER_KEY: tl.constexpr,
                MASK_UNIT_STRIDE: tl.constexpr, MASK_TMA: tl.constexpr, STEP: tl.constexpr, DROPOUT: tl.constexpr,
                UNIT_STRIDE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr):
    """The loop over the keys first..last; PARTIAL: some may lie outside of the sequence or above the diagonal.

    STEP 1 or -1: first..last counts entries of a list of key blocks instead, read upwards or downwards. NATURAL: scores
    and row_max are in natural units (there is a float mask, whether it matters here or not), otherwise unscaled.
    """
    keys = tl.arange(0, BLOCK_N)
    query_index = first_query + query_rows
    SPLIT: tl.constexpr = PRECISION == "fp16x3"
    score_scale = scale[:, None] if SPLIT else scale
    if STEP != 0:
        upcoming = tl.load(entries + first * STEP)
    for position in tl.range(first, last, 1 if STEP != 0 else BLOCK_N):
        if STEP != 0:
            start = upcoming.to(tl.int32) * BLOCK_N
            # One entry ahead, so that a tile's copy need not wait for its number. What follows the last is not used.
            upcoming = tl.load(entries + (position + 1) * STEP)
        else:
            start = position
        key_tile = stream_tile(key, batch, kv_head, start, keys, stride_kn, stride_kd, seqlen_k, BLOCK_N, BLOCK_D,
                               HEAD_DIM, UNIT_STRIDE, PARTIAL, TMA)
        if SPLIT:
            key_high, key_low, key_factor = split_rows(key_tile, True)
            scores = split_product(query_tile, query_low, tl.trans(key_high), tl.trans(key_low)) * key_factor[None, :]
        else:
            scores = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)
        key_index = start + keys
        if MASK == MASK_FLOAT:
            # Natural units: finfo.min times log2(e) would be -inf, and such a row is not masked (it gives the mean).
            bias = load_mask(mask, mask_batch, mask_head, first_query, start, query_index[:, None], key_index[None, :],
                             stride_mq, stride_mk, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N, MASK, MASK_PER_KEY,
                             MASK_UNIT_STRIDE, PARTIAL, False, MASK_TMA)
            scores = tl.where(bias == float("-inf"), float("-inf"), scores * score_scale + bias)
        elif MASK == MASK_BOOL:
            seen = load_mask(mask, mask_batch, mask_head, first_query, start, query_index[:, None], key_index[None, :],
                             stride_mq, stride_mk, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N, MASK, MASK_PER_KEY,
                             MASK_UNIT_STRIDE, PARTIAL, False, MASK_TMA)
            scores = tl.where(seen, scores, float("-inf"))
        elif PARTIAL:
            if CAUSAL:
                inside = (query_index[:, None] >= key_index[None, :]) & (key_index < seqlen_k)[None, :]
                scores = tl.where(inside, scores, float("-inf"))
            else:
                scores = tl.where((key_index < seqlen_k)[None, :], scores, float("-inf"))

        # The host made the scale positive, so the maximum commutes with it.
        new_max = tl.max(scores, 1) * scale if NATURAL and MASK == MASK_NONE else tl.max(scores, 1)
        new_max = tl.maximum(row_max, new_max)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        if NATURAL:
            if MASK == MASK_FLOAT:
                probabilities = tl.exp2((scores - shift[:, None]) * LOG2E)
            else:
                probabilities = tl.exp2(scores * (score_scale * LOG2E) - (shift * LOG2E)[:, None])
            rescale = tl.exp2((row_max - shift) * LOG2E)
        else:
            # One multiply-add for each score.
            probabilities = tl.exp2(scores * score_scale - (shift * scale)[:, None])
            rescale = tl.exp2(row_max * scale - shift * scale)
        row_sum = row_sum * rescale + tl.sum(probabilities, 1)
        accumulator = accumulator * rescale[:, None]
        if DROPOUT:
            column_keys = dropout_column_keys(column_table, start, BLOCK_N)
            keep = dropout_keep(row_keys, column_keys, first_query, dropout_threshold, BLOCK_M, BLOCK_N, False)
            probabilities = tl.where(keep, probabilities, 0.0)
        value_tile = stream_tile(value, batch, kv_head, start, keys, stride_vn, stride_vd, seqlen_k, BLOCK_N, BLOCK_DV,
                                 HEAD_DIM_V, UNIT_STRIDE, PARTIAL, TMA, first_column)
        if SPLIT:
            value_high, value_low, value_factor = split_rows(value_tile, True)
            weight, weight_low, weight_factor = split_rows(probabilities * value_factor[None, :], False)
            # Added outside of the tensor cores, which would cut off what they add to a long sum.
            accumulator += split_product(weight, weight_low, value_high, value_low) * (
                weight_factor * (1 / SPLIT_SQUARED))[:, None]
        else:
            accumulator = tl.dot(as_operand(probabilities, value_tile.dtype, PRECISION), value_tile, accumulator,
                                 input_precision=PRECISION)
        row_max = new_max
    return accumulator, row_max, row_sum


@triton.jit
def attention_forward(
    query, key, value, mask, mask_tiles, dropout_keys, out, logsumexp, logsumexp_low,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_mb, stride_mh, stride_mq, stride_mk,
    stride_ob, stride_oh, stride_om, stride_od,
    mask_batch_step, mask_head_step, stride_lb, stride_lh, stride_lt, lists_offset,
    num_heads, group_size, seqlen_q, seqlen_k, scale, dropout_threshold, dropout_scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    MASK_PER_KEY: tl.constexpr, MASK_UNIT_STRIDE: tl.constexpr, MASK_TMA: tl.constexpr, LISTED: tl.constexpr,
    BOUND_KEYS: tl.constexpr, DROPOUT: tl.constexpr, STORE_LOGSUMEXP: tl.constexpr, QUERY_FACTOR: tl.constexpr,
    SUM_ROWS: tl.constexpr, VALUE_PARTS: tl.constexpr, UNIT_STRIDE: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out [B, H, seqlen_q, HEAD_DIM_V] and logsumexp [B, H, seqlen_q] (natural logarithm, float32, contiguous).

    scale is positive and, without a float mask, carries log2(e); QUERY_FACTOR (1, -1 or 0) carries the sign. LISTED:
    the key blocks to visit are lists in mask_tiles, stride_l* apart from batch to batch, head to head and block to
    block. logsumexp_low, with float masks only, is what rounding cut off logsumexp: a row whose scores are all -1e9 or
    finfo.min would otherwise lose log(row sum) and with it its normalisation in the backward.

    SUM_ROWS: no more keys than that, unless 0, are added up in the tensor cores at a time (``attention.py`` says why).
    The row maximum goes on from part to part; what was there before a part is rescaled once, after it.

    VALUE_PARTS: as many programs, neighbours, share the columns of a tile of out, BLOCK_DV each; all compute the
    scores. More than one only with tensor maps.
    """
    num_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    program = tl.program_id(0) // VALUE_PARTS
    first_column = tl.program_id(0) % VALUE_PARTS * BLOCK_DV
    OUT_COLUMNS: tl.constexpr = HEAD_DIM_V if VALUE_PARTS == 1 else BLOCK_DV
    head_index = program // num_tiles
    tile = program % num_tiles
    if CAUSAL or LISTED:
        tile = num_tiles - 1 - tile  # longest first, or so it is where the mask is causal
    batch = head_index // num_heads
    head = head_index % num_heads
    kv_head = head // group_size
    # The strides of batches and heads are 64 bits wide, so these offsets are too.
    query += batch * stride_qb + head * stride_qh
    out += batch * stride_ob + head * stride_oh
    if not TMA:
        key += batch * stride_kb + kv_head * stride_kh
        value += batch * stride_vb + kv_head * stride_vh
    mask_batch = batch * mask_batch_step
    mask_head = head * mask_head_step
    if MASK != MASK_NONE and not MASK_TMA:
        mask += batch * stride_mb + head * stride_mh

    first_query = tile * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    row_keys = 0
    column_table = 0
    if DROPOUT:
        row_table, column_table = dropout_tables(dropout_keys, head_index, seqlen_q, seqlen_k)
        row_keys = dropout_row_keys(row_table, first_query, BLOCK_M)
    query_tile = load_tile(query, first_query, rows, stride_qm, stride_qd, seqlen_q, BLOCK_D, HEAD_DIM, UNIT_STRIDE,
                           True)
    if QUERY_FACTOR != 1:
        query_tile = query_tile * QUERY_FACTOR
    query_low = 0
    row_scale = scale
    if PRECISION == "fp16x3":
        query_tile, query_low, query_factor = split_rows(query_tile, True)
        row_scale = query_factor * (scale / SPLIT_SQUARED)
    else:
        query_tile = as_operand(query_tile, query.dtype.element_ty, PRECISION)

    accumulator = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    NATURAL: tl.constexpr = MASK == MASK_FLOAT
    if LISTED:
        lists = mask_tiles + lists_offset + batch * stride_lb + head * stride_lh + tile * stride_lt
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
        total, max_before = accumulator, row_max
        if SUM_ROWS:
            accumulator = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
            full_first, full_last, partial_first, partial_last = part_of_keys(
                part, num_parts, full_end, partial_begin, partial_end, BLOCK_N, LISTED, SUM_ROWS)
        accumulator, row_max, row_sum = _visit_keys(
            accumulator, row_max, row_sum, query_tile, query_low, full_first, full_last, full_entries, first_query,
            rows, key, value, mask, mask_batch, mask_head, batch, kv_head, row_keys, column_table, first_column,
            stride_kn, stride_kd, stride_vn, stride_vd, stride_mq, stride_mk, seqlen_q, seqlen_k, row_scale,
            dropout_threshold, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, False, CAUSAL,
            MASK_NONE if LISTED else MASK, NATURAL, MASK_PER_KEY, MASK_UNIT_STRIDE, MASK_TMA, 1 if LISTED else 0,
            DROPOUT, UNIT_STRIDE, TMA, PRECISION)
        if partial_first < partial_last:
            accumulator, row_max, row_sum = _visit_keys(
                accumulator, row_max, row_sum, query_tile, query_low, partial_first, partial_last, partial_entries,
                first_query, rows, key, value, mask, mask_batch, mask_head, batch, kv_head, row_keys, column_table,
                first_column, stride_kn, stride_kd, stride_vn, stride_vd, stride_mq, stride_mk, seqlen_q, seqlen_k,
                row_scale, dropout_threshold, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
                BOUND_KEYS or not LISTED, CAUSAL, MASK, NATURAL, MASK_PER_KEY, MASK_UNIT_STRIDE, MASK_TMA,
                -1 if LISTED else 0, DROPOUT, UNIT_STRIDE, TMA, PRECISION)
        if SUM_ROWS:
            shift = tl.where(row_max == float("-inf"), 0.0, row_max)
            to_exponent = LOG2E if NATURAL else row_scale
            accumulator += total * tl.exp2((max_before - shift) * to_exponent)[:, None]

    # A row that sees no key has sum 0 and an accumulator of zeros: zeros it gives. NaN stays NaN.
    factor = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
    if DROPOUT:
        factor *= dropout_scale
    accumulator = accumulator * factor[:, None]
    store_tile(out + first_column, accumulator, first_query, rows, stride_om, stride_od, seqlen_q, BLOCK_DV,
               OUT_COLUMNS, UNIT_STRIDE)
    if STORE_LOGSUMEXP:
        position = head_index.to(tl.int64) * seqlen_q + first_query + rows
        inside = first_query + rows < seqlen_q
        log_sum = tl.log(row_sum)  # -inf for a row that sees no key
        if MASK == MASK_FLOAT:
            high = row_max + log_sum
            low = tl.where(high == float("-inf"), 0.0, (row_max - high) + log_sum)
            tl.store(logsumexp_low + position, low, mask=inside)
        else:
            high = tl.where(row_sum == 0.0, float("-inf"), row_max * (row_scale / LOG2E) + log_sum)
        tl.store(logsumexp + position, high, mask=inside)
