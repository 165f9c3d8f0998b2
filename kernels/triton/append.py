"""New keys and values into a cache, with rotary position embeddings (Su et al., arXiv 2104.09864) on keys and queries.

One program moves BLOCK_T tokens of one head: of a key head (rotated, into the cache), of a value head (into the cache)
or, with a rotary embedding, of a query head (rotated, into a new tensor). All in registers; bound by memory.

May import triton only. Launched by ``kv_cache.py``.
"""

import triton
import triton.language as tl


@triton.jit
def _rotated(source, rows, stride_row, columns, tokens, inside, cos, sin, stride_cos, stride_sin,
             ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Rows of a head, pairs among their first ROTARY_DIM columns rotated by the angles of `tokens`; float32 inside."""
    pointers = source + rows[:, None] * stride_row
    present = inside[:, None] & (columns < HEAD_DIM)[None, :]
    tile = tl.load(pointers + columns[None, :], mask=present, other=0.0)
    HALF: tl.constexpr = ROTARY_DIM // 2
    if INTERLEAVED:
        partner = columns ^ 1
        angle = columns // 2
        first = columns % 2 == 0
    else:
        first = columns < HALF
        partner = tl.where(first, columns + HALF, columns - HALF)
        angle = tl.where(first, columns, columns - HALF)
    turned = columns < ROTARY_DIM
    wanted = inside[:, None] & turned[None, :]
    other = tl.load(pointers + partner[None, :], mask=wanted, other=0.0).to(tl.float32)
    cosine = tl.load(cos + tokens[:, None] * stride_cos + angle[None, :], mask=wanted, other=1.0).to(tl.float32)
    sine = tl.load(sin + tokens[:, None] * stride_sin + angle[None, :], mask=wanted, other=0.0).to(tl.float32)
    sine = tl.where(first[None, :], -sine, sine)
    return (tile.to(tl.float32) * cosine + other * sine).to(tile.dtype)


@triton.jit
def append_to_cache(
    query, key, value, rotated, key_cache, value_cache, cos, sin, seqlens, leftpad, batch_index, block_table,
    stride_qb, stride_qh, stride_qm, stride_rb, stride_rh, stride_rm,
    stride_nb, stride_nh, stride_nn, stride_wb, stride_wh, stride_wn,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_cos, stride_sin, stride_tb, seqlen_q, seqlen_new, capacity, num_heads, num_kv_heads, num_angles,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, QUERIES_MOVE: tl.constexpr, PAGE: tl.constexpr,
):
    """key, value [B, Hkv, seqlen_new, D] to rows seqlens[b].. of caches [B, Hkv, capacity, D], or of pages.

    All with a dense last dimension. Rows beyond the capacity are dropped. With ROTARY_DIM: cos, sin [num_angles,
    ROTARY_DIM / 2]; token i of the keys is turned by angle seqlens[b] - leftpad[b] + i, query i by the same or, unless
    QUERIES_MOVE, by that of i = 0. leftpad, batch_index, block_table (PAGE > 0): as in ``decode.py``, or None.
    """
    num_tiles = tl.cdiv(tl.maximum(seqlen_q, seqlen_new) if ROTARY_DIM else seqlen_new, BLOCK_T)
    heads = 2 * num_kv_heads + (num_heads if ROTARY_DIM else 0)
    program = tl.program_id(0)
    tile = program % num_tiles
    head = program // num_tiles % heads
    batch = (program // num_tiles // heads).to(tl.int64)
    rows = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_D)
    used = tl.load(seqlens + batch)
    first_angle = used
    if leftpad is not None:
        first_angle = used - tl.load(leftpad + batch)
    wide_rows = rows.to(tl.int64)
    if head < 2 * num_kv_heads:
        if batch_index is not None:
            cache_batch = tl.load(batch_index + batch).to(tl.int64)
        else:
            cache_batch = batch
        token = used + rows
        inside = (rows < seqlen_new) & (token >= 0) & (token < capacity)
        if PAGE > 0:
            pages = tl.load(block_table + batch * stride_tb + token // PAGE, mask=inside, other=0).to(tl.int64)
            cache_row = (token % PAGE).to(tl.int64)
        else:
            pages = cache_batch + tl.zeros([BLOCK_T], tl.int64)
            cache_row = token.to(tl.int64)
        if head < num_kv_heads:
            source = key + batch * stride_nb + head * stride_nh
            present = inside[:, None] & (columns < HEAD_DIM)[None, :]
            if ROTARY_DIM:
                turns = inside & (first_angle + rows >= 0) & (first_angle + rows < num_angles)
                moved = _rotated(source, wide_rows, stride_nn, columns, (first_angle + rows).to(tl.int64), turns, cos,
                                 sin, stride_cos, stride_sin, ROTARY_DIM, INTERLEAVED, HEAD_DIM)
            else:
                moved = tl.load(source + wide_rows[:, None] * stride_nn + columns[None, :], mask=present, other=0.0)
            place = key_cache + head * stride_kh + (pages * stride_kb + cache_row * stride_kn)[:, None]
            tl.store(place + columns[None, :], moved, mask=present)
        else:
            head -= num_kv_heads
            present = inside[:, None] & (columns < HEAD_DIM_V)[None, :]
            source = value + batch * stride_wb + head * stride_wh
            moved = tl.load(source + wide_rows[:, None] * stride_wn + columns[None, :], mask=present, other=0.0)
            place = value_cache + head * stride_vh + (pages * stride_vb + cache_row * stride_vn)[:, None]
            tl.store(place + columns[None, :], moved, mask=present)
    elif ROTARY_DIM:
        head -= 2 * num_kv_heads
        source = query + batch * stride_qb + head * stride_qh
        angle = first_angle + (rows if QUERIES_MOVE else rows * 0)
        inside = (rows < seqlen_q) & (angle >= 0) & (angle < num_angles)
        moved = _rotated(source, wide_rows, stride_qm, columns, angle.to(tl.int64), inside, cos, sin, stride_cos,
                         stride_sin, ROTARY_DIM, INTERLEAVED, HEAD_DIM)
        place = rotated + batch * stride_rb + head * stride_rh + wide_rows[:, None] * stride_rm
        tl.store(place + columns[None, :], moved, mask=(rows < seqlen_q)[:, None] & (columns < HEAD_DIM)[None, :])
