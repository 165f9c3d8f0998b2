"""Attention of a few queries over many keys: the keys are split among programs, the last or a second launch combines.

Method: Dao et al., "Flash-Decoding" (2023); the rows of a key head's query heads share a tile, as in Ainslie et al.,
"GQA" (arXiv 2305.13245). One program has the rows of BLOCK_M (query, query head) pairs of one key head and every
num_splits-th tile of keys, so that keys in use that lie together (a cache filled in part, a window) are shared by all:

    load the query tile
    for each of the program's key tiles (with a mask: of those that any row sees, found before):
        scores = query @ key^T;  bias, bounds, mask;  online softmax;  accumulator += probabilities @ value
    one split:   out = accumulator / row sum
    many splits: leave maximum, sum and accumulator in `partials`
        few and small: add 1 to a counter; who finds all others there merges the partial results in their order
        otherwise:     the second launch, ``merge_splits``, does so, one program for each row

Whoever arrives last sets the counter back to zero, so that launches that follow each other need nothing in between, and
the order of every sum is fixed: equal inputs give equal bits. On-chip budget: num_stages tiles of keys and values in
shared memory, which is what hides the memory's latency (40 KB for each multiprocessor); the query tile, the accumulator
and the scores, BLOCK_M = 16 rows mostly, in registers.

May import triton and ``common.py`` only. Launched by ``decode_plan.py``.
"""

import triton
import triton.language as tl

from .common import LN2, LOG2E, MASK_BOOL, MASK_FLOAT, MASK_NONE, as_operand

# Who adds up the partial results: nobody, there is one; the last program to arrive; a launch of its own.
MERGE_NONE = tl.constexpr(0)
MERGE_BY_LAST = tl.constexpr(1)
MERGE_BY_LAUNCH = tl.constexpr(2)


@triton.jit
def _exp(x, NATURAL: tl.constexpr):
    """exp of natural units, exp2 of the others."""
    return tl.exp2(x * LOG2E) if NATURAL else tl.exp2(x)


@triton.jit
def _finite(row_max):
    """What to subtract in exponents: the maximum, 0 for rows that see nothing."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def _load_rows(base, start, keys, pages, page_stride, stride_row, stride_column, first, last, BLOCK_D: tl.constexpr,
               HEAD_DIM: tl.constexpr, UNIT_STRIDE: tl.constexpr, BOUND: tl.constexpr, BLOCK_N: tl.constexpr,
               PAGE: tl.constexpr):
    """[BLOCK_N, BLOCK_D] of keys or values from row `start` on; zeros outside of first..last and of HEAD_DIM columns.

    PAGE: rows lie in pages of so many, `pages` names the tile's, as one number or as one for each row. 0: no pages.
    """
    columns = tl.arange(0, BLOCK_D)
    if PAGE == 0:
        rows = base + tl.cast(start, tl.int64) * stride_row + keys[:, None] * stride_row
    elif PAGE % BLOCK_N == 0:
        rows = base + pages.to(tl.int64) * page_stride + (start % PAGE) * stride_row + keys[:, None] * stride_row
    else:
        rows = base + (pages.to(tl.int64) * page_stride + (start + keys) % PAGE * stride_row)[:, None]
    pointers = rows + (columns if UNIT_STRIDE else columns * stride_column)[None, :]
    if BOUND:
        inside = ((start + keys >= first) & (start + keys < last))[:, None]
        if BLOCK_D != HEAD_DIM:
            inside = inside & (columns < HEAD_DIM)[None, :]
        return tl.load(pointers, mask=inside, other=0.0)
    elif BLOCK_D != HEAD_DIM:
        return tl.load(pointers, mask=(columns < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _load_pages(block_table, start, keys, last, BLOCK_N: tl.constexpr, PAGE: tl.constexpr):
    """The numbers of the pages where a tile's rows lie: one where a page holds the tile, one for each row otherwise."""
    if PAGE % BLOCK_N == 0:
        return tl.load(block_table + start // PAGE, mask=start < last, other=0)
    else:
        return tl.load(block_table + (start + keys) // PAGE, mask=start + keys < last, other=0)


@triton.jit
def _visit(accumulator, row_max, row_sum, query_tile, query_pointers, query_step, present, start, keys, pages, key,
           value, mask_rows, slopes, position, stride_kp, stride_kn, stride_kd, stride_vp, stride_vn, stride_vd,
           stride_mk, first_key, last_key, window_left, window_right, scale, softcap, HEAD_DIM: tl.constexpr,
           HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
           MASK: tl.constexpr, MASK_PER_KEY: tl.constexpr, MASK_UNIT_STRIDE: tl.constexpr, LEFT: tl.constexpr,
           RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BOUND_KEYS: tl.constexpr,
           NATURAL: tl.constexpr, UNIT_STRIDE: tl.constexpr, PAGE: tl.constexpr, STREAM_QUERY: tl.constexpr,
           PRECISION: tl.constexpr):
    """One tile of keys. position: the key with which each row is aligned; mask_rows: the mask's rows, as pointers."""
    key_index = start + keys
    if STREAM_QUERY:
        query_tile = tl.load(query_pointers + start * query_step, mask=present, other=0.0)
    key_tile = _load_rows(key, start, keys, pages, stride_kp, stride_kn, stride_kd, first_key, last_key, BLOCK_D,
                          HEAD_DIM, UNIT_STRIDE, BOUND_KEYS, BLOCK_N, PAGE)
    if MASK != MASK_NONE:
        mask_columns = key_index if MASK_UNIT_STRIDE else key_index * stride_mk
        pointers = mask_rows + (mask_columns if MASK_PER_KEY else mask_columns[None, :])
        if BOUND_KEYS:
            inside = key_index < last_key if MASK_PER_KEY else (key_index < last_key)[None, :]
            bias = tl.load(pointers, mask=inside, other=0)
        else:
            bias = tl.load(pointers)
        if MASK_PER_KEY:
            bias = bias[None, :]
    scores = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)
    if NATURAL:
        scores = scores * scale
        if SOFTCAP:
            # tanh; exp2 overflows to infinity and gives 1.
            scores = softcap - 2.0 * softcap / (tl.exp2(scores * (2.0 * LOG2E / softcap)) + 1.0)
        if ALIBI:
            scores = scores - slopes[:, None] * tl.abs(position[:, None] - key_index[None, :]).to(tl.float32)
    if MASK == MASK_FLOAT:
        bias = bias.to(tl.float32)
        scores = tl.where(bias == float("-inf"), float("-inf"), scores + bias)
    elif MASK == MASK_BOOL:
        scores = tl.where(bias, scores, float("-inf"))
    if BOUND_KEYS:
        inside = ((key_index >= first_key) & (key_index < last_key))[None, :]
        if RIGHT:
            inside = inside & (key_index[None, :] <= position[:, None] + window_right)
        if LEFT:
            inside = inside & (key_index[None, :] >= position[:, None] - window_left)
        scores = tl.where(inside, scores, float("-inf"))

    new_max = tl.maximum(row_max, tl.max(scores, 1))
    shift = _finite(new_max)
    if NATURAL:
        # Differences first: finfo.min times log2(e) would be -inf.
        probabilities = tl.exp2((scores - shift[:, None]) * LOG2E)
        rescale = tl.exp2((row_max - shift) * LOG2E)
    else:
        # The host made the scale positive, so the maximum commutes with it; one multiply-add for each score.
        probabilities = tl.exp2(scores * scale - (shift * scale)[:, None])
        rescale = tl.exp2(row_max * scale - shift * scale)
    row_sum = row_sum * rescale + tl.sum(probabilities, 1)
    accumulator = accumulator * rescale[:, None]
    value_tile = _load_rows(value, start, keys, pages, stride_vp, stride_vn, stride_vd, first_key, last_key, BLOCK_DV,
                            HEAD_DIM_V, UNIT_STRIDE, BOUND_KEYS, BLOCK_N, PAGE)
    accumulator = tl.dot(as_operand(probabilities, value_tile.dtype, PRECISION), value_tile, accumulator,
                         input_precision=PRECISION)
    return accumulator, new_max, row_sum


@triton.jit
def _add(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4


@triton.jit
def _shown(pointers, inside, MASK: tl.constexpr):
    """Which keys a row of the mask shows, and which of these without a bias, as ones and zeros."""
    if MASK == MASK_BOOL:
        found = (tl.load(pointers, mask=inside, other=0) != 0).to(tl.int32)
        return found, found
    else:
        bias = tl.load(pointers, mask=inside, other=float("-inf"))
        return (bias != float("-inf")).to(tl.int32), (bias == 0.0).to(tl.int32)


@triton.jit
def _seen_tiles(mask, tile, num_splits, first_row, num_rows, group_size, last_key, stride_mh, stride_mq, stride_mk,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, MASK: tl.constexpr,
                MASK_PER_KEY: tl.constexpr, MASK_PER_HEAD: tl.constexpr, MASK_UNIT_STRIDE: tl.constexpr):
    """Of CHUNK tiles (at most 128), num_splits apart: full ones, whose BLOCK_N keys all rows see, with a bias of 0, and
    mixed ones, of which some row sees something. Four words, of 32 tiles each: a bit for each full tile, and 32 bits
    higher one for each mixed one; and how many tiles are full, and 256 times how many are mixed.
    """
    chunk = tl.arange(0, CHUNK)
    key_index = (tile + chunk * num_splits)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    pointers = mask + (key_index if MASK_UNIT_STRIDE else key_index * stride_mk)
    inside = key_index < last_key
    if MASK_PER_KEY:
        found, plain = _shown(pointers, inside, MASK)
    else:
        found = tl.zeros([CHUNK, BLOCK_N], tl.int32)
        plain = tl.full([CHUNK, BLOCK_N], 1, tl.int32)
        last_row = tl.minimum(first_row + BLOCK_M, num_rows)
        rows = last_row - first_row if MASK_PER_HEAD else tl.cdiv(last_row, group_size) - first_row // group_size
        for row in tl.range(0, rows):
            if MASK_PER_HEAD:
                index = first_row + row
                offset = (index // group_size).to(tl.int64) * stride_mq + index % group_size * stride_mh
            else:
                offset = (first_row // group_size + row).to(tl.int64) * stride_mq
            found_here, plain_here = _shown(pointers + offset, inside, MASK)
            found = found | found_here
            plain = plain & plain_here
    # Of each tile how many keys somebody and how many all see, in one sum; so too what there is of either kind: a sum
    # over threads takes as long as a key's way from memory.
    seen = tl.sum(found * 65536 + plain, 1)
    full = (seen & 65535) == BLOCK_N
    mixed = (seen > 65535) & ~full
    kinds = (full.to(tl.int64) | mixed.to(tl.int64) << 32) << (chunk % 32).to(tl.int64)
    counts = full.to(tl.int32) + mixed.to(tl.int32) * 256
    none = tl.zeros([CHUNK], tl.int64)
    if CHUNK <= 32:
        return tl.reduce((kinds, none, none, none, counts), 0, _add)
    else:
        word = chunk // 32
        return tl.reduce((tl.where(word == 0, kinds, 0), tl.where(word == 1, kinds, 0), tl.where(word == 2, kinds, 0),
                          tl.where(word == 3, kinds, 0), counts), 0, _add)


@triton.jit
def _take_tile(first, second, third, fourth, CHUNK: tl.constexpr):
    """The number of the lowest bit of the words, which have 32 each, and the words without it."""
    if CHUNK <= 32:
        lowest = first & -first
        base = 0
        first ^= lowest
    else:
        seen = tl.where(first != 0, first, tl.where(second != 0, second, tl.where(third != 0, third, fourth)))
        base = tl.where(first != 0, 0, tl.where(second != 0, 32, tl.where(third != 0, 64, 96)))
        lowest = seen & -seen
        first ^= tl.where(base == 0, lowest, 0)
        second ^= tl.where(base == 32, lowest, 0)
        third ^= tl.where(base == 64, lowest, 0)
        fourth ^= tl.where(base == 96, lowest, 0)
    number = base + (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # its exponent
    return number, first, second, third, fourth


@triton.jit
def _leave(partials, statistics, index, accumulator, row_max, row_sum, num_rows, BLOCK_M: tl.constexpr,
           BLOCK_R: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Write partial result number `index`: rows up to BLOCK_R, maxima and sums beside each other."""
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_DV)
    inside = rows < num_rows
    origin = tl.cast(index, tl.int64) * BLOCK_R
    tl.store(partials + origin * BLOCK_DV + rows[:, None] * BLOCK_DV + columns[None, :], accumulator,
             mask=inside[:, None])
    tl.store(statistics + origin * 2 + rows, row_max, mask=inside)
    tl.store(statistics + origin * 2 + BLOCK_R + rows, row_sum, mask=inside)


@triton.jit
def _arrive(counter, expected):
    """Is this program the last of `expected` to come here? What the others wrote before is then to be seen."""
    tl.debug_barrier()  # all threads have written; the atomic of one of them then releases all that
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _merge(partials, statistics, count, first_row, num_rows, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
           BLOCK_R: tl.constexpr, BLOCK_DV: tl.constexpr, NATURAL: tl.constexpr):
    """(accumulator, maximum, sum) of `count` partial results, of ROWS of their rows, added up in their order."""
    rows = first_row + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_DV)
    present = rows < num_rows
    accumulator = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    for start in tl.range(0, count, AT_ONCE):
        # All loads before anything that needs one of them: what a barrier follows waits for the memory each time.
        numbers = start + tl.arange(0, AT_ONCE)
        inside = (numbers < count)[:, None] & present[None, :]
        origin = numbers.to(tl.int64) * BLOCK_R
        pointers = statistics + 2 * origin[:, None] + rows[None, :]
        maxima = tl.load(pointers, mask=inside, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(pointers + BLOCK_R, mask=inside, other=0.0, cache_modifier=".cg")
        pointers = partials + (origin[:, None] + rows[None, :])[:, :, None] * BLOCK_DV + columns[None, None, :]
        parts = tl.load(pointers, mask=inside[:, :, None], other=0.0, cache_modifier=".cg")
        new_max = tl.maximum(row_max, tl.max(maxima, 0))
        shift = _finite(new_max)
        weights = _exp(maxima - shift[None, :], NATURAL)
        rescale = _exp(row_max - shift, NATURAL)
        row_sum = row_sum * rescale + tl.sum(sums * weights, 0)
        accumulator = accumulator * rescale[:, None] + tl.sum(parts * weights[:, :, None], 0)
        row_max = new_max
    return accumulator, row_max, row_sum


@triton.jit
def _finish(accumulator, row_max, row_sum, out, logsumexp, sinks, batch, kv_head, first_row, num_rows, num_kv_heads,
            group_size, seqlen_q, stride_oh, stride_om, stride_od, BLOCK_ROWS: tl.constexpr, BLOCK_DV: tl.constexpr,
            HEAD_DIM_V: tl.constexpr, NATURAL: tl.constexpr, UNIT_STRIDE: tl.constexpr):
    """Write out, and logsumexp where there is one, of rows first_row..first_row + BLOCK_ROWS."""
    row = first_row + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_DV)
    head = kv_head * group_size + row % group_size
    inside = row < num_rows
    if sinks is not None:
        sink = tl.load(sinks + head, mask=inside, other=float("-inf")).to(tl.float32)
        if not NATURAL:
            sink = sink * LOG2E
        new_max = tl.maximum(row_max, sink)
        shift = _finite(new_max)
        rescale = _exp(row_max - shift, NATURAL)
        row_sum = row_sum * rescale + _exp(sink - shift, NATURAL)
        accumulator = accumulator * rescale[:, None]
        row_max = new_max
    # A row that sees no key has sum 0 and an accumulator of zeros: zeros it gives. NaN stays NaN.
    accumulator = accumulator * (1.0 / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
    rows = out + (head * stride_oh + row // group_size * stride_om)[:, None]
    pointers = rows + (columns if UNIT_STRIDE else columns * stride_od)[None, :]
    stored = inside[:, None]
    if BLOCK_DV != HEAD_DIM_V:
        stored = stored & (columns < HEAD_DIM_V)[None, :]
    tl.store(pointers, accumulator.to(out.dtype.element_ty), mask=stored)
    if logsumexp is not None:
        natural_max = row_max if NATURAL else row_max * LN2
        position = (batch * (num_kv_heads * group_size) + head).to(tl.int64) * seqlen_q + row // group_size
        tl.store(logsumexp + position, tl.where(row_sum == 0.0, float("-inf"), natural_max + tl.log(row_sum)),
                 mask=inside)


@triton.jit
def _wait_for_earlier_launches():
    """A dependent launch begins before what was launched before it has ended; from here on that is complete."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _let_the_next_begin():
    """Once all programs have said so, a dependent launch may take its place and wait there."""
    tl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False,
                              pack=1)


@triton.jit
def _visible_keys(seqused_k, leftpad_k, batch, first_row, num_rows, group_size, seqlen_q, seqlen_k, seqused_more,
                  offset, window_left, window_right, num_splits, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                  LEFT: tl.constexpr, RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr):
    """Which keys the rows of a tile may see: (first key, last key, offset, first tile, last tile, splits at work)."""
    first_query = first_row // group_size
    last_query = (tl.minimum(first_row + BLOCK_M, num_rows) - 1) // group_size
    last_key = seqlen_k
    if seqused_k is not None:
        last_key = tl.minimum(tl.load(seqused_k + batch) + seqused_more, seqlen_k)
    if BOTTOM_RIGHT:
        offset = last_key - seqlen_q
    first_key = 0
    if leftpad_k is not None:
        first_key = tl.load(leftpad_k + batch)
    if RIGHT:
        last_key = tl.minimum(last_key, last_query + offset + window_right + 1)
    if LEFT:
        first_key = tl.maximum(first_key, first_query + offset - window_left)
    first_tile = first_key // BLOCK_N
    last_tile = tl.cdiv(tl.maximum(last_key, 0), BLOCK_N)
    live_splits = tl.maximum(tl.minimum(num_splits, last_tile - first_tile), 1)
    return first_key, last_key, offset, first_tile, last_tile, live_splits


@triton.jit
def attention_decode(
    query, key, value, mask, sinks, alibi_slopes, seqused_k, leftpad_k, batch_index, block_table, out, logsumexp,
    partials, counters,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_mb, stride_mh, stride_mq, stride_mk,
    stride_ob, stride_oh, stride_om, stride_od,
    stride_sb, stride_tb, num_kv_heads, group_size, seqlen_q, seqlen_k, seqused_more, num_splits, statistics_offset,
    offset, window_left, window_right, query_step, scale, softcap,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, MERGE: tl.constexpr,
    AT_ONCE: tl.constexpr, CHUNK: tl.constexpr, MASK: tl.constexpr, MASK_PER_KEY: tl.constexpr,
    MASK_PER_HEAD: tl.constexpr, MASK_UNIT_STRIDE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, BOUND_KEYS: tl.constexpr, PAGE: tl.constexpr,
    QUERY_FACTOR: tl.constexpr, UNIT_STRIDE: tl.constexpr, STREAM_QUERY: tl.constexpr, DEPENDENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out [B, H, seqlen_q, HEAD_DIM_V] and, where there is one, logsumexp float32 [B, H, seqlen_q].

    Rows are numbered query by query, the group_size heads of each together. scale is positive and, unless scores are
    kept in natural units (a float mask, ALiBi, softcap), carries log2(e); QUERY_FACTOR (1, -1 or 0) has the sign.
    Row i of the queries stands at key i + offset, BOTTOM_RIGHT: at i + keys in use - seqlen_q; LEFT and RIGHT bound
    what it sees to window_left and window_right keys from there. Optional, None where absent: sinks [H], natural units;
    alibi_slopes float32, stride_sb from batch to batch; int32 [B] each: seqused_k (seqused_more are added to it),
    leftpad_k, batch_index (which batch of key and value to read); block_table int32, stride_tb from batch to batch: key
    [pages, Hkv, PAGE, D], value alike, and seqlen_k then is what all pages of a batch hold. partials, float32: partial
    results, from statistics_offset on their maxima and sums; counters, int32: zeros, left as zeros. STREAM_QUERY: the
    query tile comes with each tile of keys again, by the same asynchronous copies, so that the first keys need not wait
    until it has arrived; query_step is 0, which the compiler must not know, or it would load the tile before the loop.
    DEPENDENT: a programmatic dependent launch, which waits by itself for what was launched before.
    """
    NATURAL: tl.constexpr = MASK == MASK_FLOAT or SOFTCAP or alibi_slopes is not None
    # Is there a bound that a tile may cross whose keys the mask shows to all rows?
    MAY_CUT_FULL: tl.constexpr = LEFT or RIGHT or leftpad_k is not None
    num_rows = seqlen_q * group_size
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    program = tl.program_id(0)
    row_tile = program % num_row_tiles
    program = program // num_row_tiles
    split = program % num_splits
    head_index = program // num_splits
    batch = head_index // num_kv_heads
    kv_head = head_index % num_kv_heads
    unit = head_index * num_row_tiles + row_tile  # what one set of partial results belongs to

    first_row = row_tile * BLOCK_M
    row = tl.minimum(first_row + tl.arange(0, BLOCK_M), num_rows - 1)
    query_index = row // group_size
    head = kv_head * group_size + row % group_size
    columns = tl.arange(0, BLOCK_D)
    pointers = query + batch * stride_qb + (head * stride_qh + query_index * stride_qm)[:, None]
    pointers += (columns if UNIT_STRIDE else columns * stride_qd)[None, :]
    present = (first_row + tl.arange(0, BLOCK_M) < num_rows)[:, None]
    if BLOCK_D != HEAD_DIM:
        present = present & (columns < HEAD_DIM)[None, :]
    if DEPENDENT:  # nothing of what is in memory has been read so far
        _wait_for_earlier_launches()
        if MERGE == MERGE_BY_LAUNCH:
            _let_the_next_begin()
    first_key, last_key, offset, first_tile, last_tile, live_splits = _visible_keys(
        seqused_k, leftpad_k, batch, first_row, num_rows, group_size, seqlen_q, seqlen_k, seqused_more, offset,
        window_left, window_right, num_splits, BLOCK_M, BLOCK_N, LEFT, RIGHT, BOTTOM_RIGHT)

    if split < live_splits:
        keys = tl.arange(0, BLOCK_N)
        position = query_index + offset
        if batch_index is not None:
            key_batch = tl.load(batch_index + batch)
        else:
            key_batch = batch
        key += kv_head * stride_kh
        value += kv_head * stride_vh
        if PAGE == 0:
            key += key_batch * stride_kb
            value += key_batch * stride_vb
        if STREAM_QUERY:
            query_tile = 0
        else:
            query_tile = tl.load(pointers, mask=present, other=0.0)
            if QUERY_FACTOR != 1:
                query_tile = query_tile * QUERY_FACTOR
            query_tile = as_operand(query_tile, query.dtype.element_ty, PRECISION)
        slopes = 0.0
        if alibi_slopes is not None:
            slopes = tl.load(alibi_slopes + batch * stride_sb + head)
        mask_rows = mask
        if MASK != MASK_NONE:
            mask += batch * stride_mb + kv_head * group_size * stride_mh
            mask_rows = mask
            if not MASK_PER_KEY:
                mask_rows = mask + (row % group_size * stride_mh + query_index * stride_mq)[:, None]
        if PAGE != 0:
            block_table += batch * stride_tb

        accumulator = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        if MASK != MASK_NONE:
            # Tiles that nobody sees are found first: a branch in the loop would keep its loads from running ahead. So
            # would the mask's, which are too narrow for asynchronous copies, so that full tiles come without it.
            for tile in tl.range(first_tile + split, last_tile, num_splits * CHUNK, num_stages=1):
                words_0, words_1, words_2, words_3, counts = _seen_tiles(
                    mask, tile, num_splits, first_row, num_rows, group_size, last_key, stride_mh, stride_mq, stride_mk,
                    BLOCK_M, BLOCK_N, CHUNK, MASK, MASK_PER_KEY, MASK_PER_HEAD, MASK_UNIT_STRIDE)
                for kind in tl.static_range(2):
                    seen_0, seen_1 = words_0 >> 32 * kind & 0xFFFFFFFF, words_1 >> 32 * kind & 0xFFFFFFFF
                    seen_2, seen_3 = words_2 >> 32 * kind & 0xFFFFFFFF, words_3 >> 32 * kind & 0xFFFFFFFF
                    for _ in tl.range(0, counts >> 8 * kind & 255):
                        number, seen_0, seen_1, seen_2, seen_3 = _take_tile(seen_0, seen_1, seen_2, seen_3, CHUNK)
                        start = (tile + number * num_splits) * BLOCK_N
                        pages = _load_pages(block_table, start, keys, last_key, BLOCK_N, PAGE) if PAGE != 0 else 0
                        accumulator, row_max, row_sum = _visit(
                            accumulator, row_max, row_sum, query_tile, pointers, query_step, present, start, keys,
                            pages, key, value, mask_rows, slopes, position, stride_kb, stride_kn, stride_kd, stride_vb,
                            stride_vn, stride_vd, stride_mk, first_key, last_key, window_left, window_right, scale,
                            softcap, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N,
                            MASK_NONE if kind == 0 else MASK, MASK_PER_KEY, MASK_UNIT_STRIDE, LEFT, RIGHT, SOFTCAP,
                            alibi_slopes is not None, BOUND_KEYS and (kind == 1 or MAY_CUT_FULL), NATURAL,
                            UNIT_STRIDE, PAGE, STREAM_QUERY, PRECISION)
        else:
            if PAGE != 0:
                # As far as the table goes, not the keys in use, whose number has just been asked for.
                upcoming = _load_pages(block_table, (first_tile + split) * BLOCK_N, keys, seqlen_k, BLOCK_N, PAGE)
            else:
                upcoming = 0
            for tile in tl.range(first_tile + split, last_tile, num_splits):
                start = tile * BLOCK_N
                pages = upcoming
                if PAGE != 0:
                    # One tile ahead, so that copies need not wait for the number of their page.
                    upcoming = _load_pages(block_table, start + num_splits * BLOCK_N, keys, seqlen_k, BLOCK_N, PAGE)
                accumulator, row_max, row_sum = _visit(
                    accumulator, row_max, row_sum, query_tile, pointers, query_step, present, start, keys, pages, key,
                    value, mask_rows, slopes, position, stride_kb, stride_kn, stride_kd, stride_vb, stride_vn,
                    stride_vd, stride_mk, first_key, last_key, window_left, window_right, scale, softcap, HEAD_DIM,
                    HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, MASK, MASK_PER_KEY, MASK_UNIT_STRIDE, LEFT, RIGHT, SOFTCAP,
                    alibi_slopes is not None, BOUND_KEYS, NATURAL, UNIT_STRIDE, PAGE, STREAM_QUERY, PRECISION)
        if not NATURAL:
            row_max = row_max * scale

        rows = num_rows - first_row
        if MERGE == MERGE_NONE:
            _finish(accumulator, row_max, row_sum, out + batch * stride_ob, logsumexp, sinks, batch, kv_head, first_row,
                    num_rows, num_kv_heads, group_size, seqlen_q, stride_oh, stride_om, stride_od, BLOCK_M, BLOCK_DV,
                    HEAD_DIM_V, NATURAL, UNIT_STRIDE)
        else:
            statistics = partials + statistics_offset + tl.cast(unit, tl.int64) * num_splits * (2 * BLOCK_R)
            partials += tl.cast(unit, tl.int64) * num_splits * (BLOCK_R * BLOCK_DV)
            _leave(partials, statistics, split, accumulator, row_max, row_sum, rows, BLOCK_M, BLOCK_R, BLOCK_DV)
            if MERGE == MERGE_BY_LAST:
                if _arrive(counters + unit, live_splits):
                    total, total_max, total_sum = _merge(partials, statistics, live_splits, 0, rows, BLOCK_R, AT_ONCE,
                                                         BLOCK_R, BLOCK_DV, NATURAL)
                    _finish(total, total_max, total_sum, out + batch * stride_ob, logsumexp, sinks, batch, kv_head,
                            first_row, num_rows, num_kv_heads, group_size, seqlen_q, stride_oh, stride_om, stride_od,
                            BLOCK_R, BLOCK_DV, HEAD_DIM_V, NATURAL, UNIT_STRIDE)


@triton.jit
def merge_splits(
    sinks, seqused_k, leftpad_k, out, logsumexp, partials,
    stride_ob, stride_oh, stride_om, stride_od,
    num_kv_heads, group_size, seqlen_q, seqlen_k, seqused_more, num_splits, statistics_offset, offset, window_left,
    window_right,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, NATURAL: tl.constexpr, UNIT_STRIDE: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """out and logsumexp of what ``attention_decode`` with MERGE_BY_LAUNCH left in partials, ROWS rows each program.

    Arguments as there. A launch of its own where one program would have much to read: here many share it.
    """
    num_rows = seqlen_q * group_size
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    program = tl.program_id(0)
    slices: tl.constexpr = BLOCK_R // ROWS
    row_in_tile = program % slices * ROWS
    unit = program // slices
    first_row = unit % num_row_tiles * BLOCK_M
    head_index = unit // num_row_tiles
    batch = head_index // num_kv_heads
    rows = num_rows - first_row
    if DEPENDENT:
        _wait_for_earlier_launches()
    if row_in_tile < rows:
        _, _, _, _, _, live_splits = _visible_keys(
            seqused_k, leftpad_k, batch, first_row, num_rows, group_size, seqlen_q, seqlen_k, seqused_more, offset,
            window_left, window_right, num_splits, BLOCK_M, BLOCK_N, LEFT, RIGHT, BOTTOM_RIGHT)
        statistics = partials + statistics_offset + tl.cast(unit, tl.int64) * num_splits * (2 * BLOCK_R)
        partials += tl.cast(unit, tl.int64) * num_splits * (BLOCK_R * BLOCK_DV)
        total, total_max, total_sum = _merge(partials, statistics, live_splits, row_in_tile, rows, ROWS, AT_ONCE,
                                             BLOCK_R, BLOCK_DV, NATURAL)
        _finish(total, total_max, total_sum, out + batch * stride_ob, logsumexp, sinks, batch,
                head_index % num_kv_heads, first_row + row_in_tile, num_rows, num_kv_heads, group_size, seqlen_q,
                stride_oh, stride_om, stride_od, ROWS, BLOCK_DV, HEAD_DIM_V, NATURAL, UNIT_STRIDE)
