"""Which tiles of an attn_mask matter: kernels that read the mask once and list, for each block, the tiles to visit.

    classify_mask    one class for each tile of TILE x TILE elements: empty, full, mixed or lowest
    list_key_tiles   for each block of queries, the blocks of keys that it must visit (forward, backward_query)
    list_query_tiles for each block of keys, the blocks of queries that it must visit (backward_key_value)

A tile is empty where no key is seen (False, -inf), full where every key is seen and nothing is added (True, 0), mixed
otherwise. "lowest" tiles hold the lowest finite number of the mask's type everywhere: empty for a row that has more in
another tile, since exp(lowest - larger) is 0, but not for a row that has nothing else, whose probabilities are then
uniform. So such a tile counts as empty only where every row of its strip holds something larger. (In float16, where the
lowest number is -65504, this takes scores to differ by less than 65,000 within a row.)

"Larger" is a bit test: it is certain of an element whose sign or whose exponent's highest bit is 0, one above -2. The
mask is read as integers, and a tile whose least and greatest agree holds one value everywhere: two instructions for
four bytes. Where a few of its rows show a tile to be mixed, as with a dense bias, most of it is not read at all.

All results lie in one int64 buffer, sized by the mask's own shape (never expanded over the batches and heads that share
it), one entry for each tile and two for each block more. Nothing here waits for the host.

May import triton only. Launched by ``attention.py``; read by the attention kernels.
"""

import triton
import triton.language as tl

TILE = tl.constexpr(64)

EMPTY = tl.constexpr(0)
FULL = tl.constexpr(1)
MIXED = tl.constexpr(2)
LOWEST = tl.constexpr(3)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _bits_of_tiles(pointers, inside, EMPTY_WORD: tl.constexpr, BOUND: tl.constexpr, SPAN: tl.constexpr,
                   WORDS: tl.constexpr):
    """(words, least and greatest word of each of the SPAN tiles side by side); pointers [rows, SPAN * WORDS]."""
    if BOUND:
        words = tl.load(pointers, mask=inside[None, :], other=EMPTY_WORD)
    else:
        words = tl.load(pointers)
    # Down the columns first: those lie in one thread, or meet once.
    least = tl.min(tl.reshape(tl.min(words, 0), [SPAN, WORDS]), 1)
    greatest = tl.max(tl.reshape(tl.max(words, 0), [SPAN, WORDS]), 1)
    return words, least, greatest


@triton.jit
def classify_mask(
    mask, tiles,
    stride_mb, stride_mh, stride_mq, stride_mk,
    mask_heads, mask_q, words_k, strips_q, strips_k, larger_offset,
    ROWS: tl.constexpr, WORDS: tl.constexpr, SPAN: tl.constexpr, WORD_BITS: tl.constexpr, UNIT_STRIDE: tl.constexpr,
    BOUND: tl.constexpr, EMPTY_WORD: tl.constexpr, FULL_WORD: tl.constexpr, LOWEST_WORD: tl.constexpr,
    HIGH_BITS: tl.constexpr, HAS_LOWEST: tl.constexpr,
):
    """Fill tiles [mask batches * heads, strips_q, strips_k] with classes; for a float mask also which rows have more.

    The mask is read as words of WORD_BITS bits, which may hold several elements; WORDS of them are a row of a tile, and
    strides and words_k count them. ROWS is 64, or 1 for a mask with one row for all queries. *_WORD are words full of
    one element. larger_offset leads to a plane like tiles with one bit for each row of the tile.
    """
    chunks = tl.cdiv(strips_k, SPAN)
    program = tl.program_id(0)
    chunk = program % chunks
    strip = program // chunks % strips_q
    plane = program // (chunks * strips_q)
    base = mask.to(tl.pointer_type(tl.core.get_int_dtype(WORD_BITS, True)), bitcast=True)
    base += (plane // mask_heads).to(tl.int64) * stride_mb + (plane % mask_heads).to(tl.int64) * stride_mh
    base += strip.to(tl.int64) * ROWS * stride_mq

    # Rows past the end repeat the last one, which changes no tile's class; keys past the end are not seen.
    last_row = mask_q - 1 - strip * ROWS
    columns = chunk * (SPAN * WORDS) + tl.arange(0, SPAN * WORDS)
    inside = columns < words_k
    offsets = columns if UNIT_STRIDE else columns * stride_mk
    rows = tl.minimum(tl.arange(0, ROWS), last_row)
    larger = tl.zeros([SPAN], tl.int64)
    row_bits = tl.full([1], 1, tl.int64) << tl.arange(0, ROWS).to(tl.int64)

    undecided = True
    if ROWS > 8:
        few = tl.minimum(tl.arange(0, 8) * (ROWS // 8), last_row)
        _, least, greatest = _bits_of_tiles(base + few[:, None] * stride_mq + offsets[None, :], inside, EMPTY_WORD,
                                           BOUND, SPAN, WORDS)
        there = chunk * SPAN + tl.arange(0, SPAN) < strips_k
        undecided = tl.max(((least == greatest) & there).to(tl.int32), 0) > 0
    if undecided:
        words, least, greatest = _bits_of_tiles(base + rows[:, None] * stride_mq + offsets[None, :], inside, EMPTY_WORD,
                                               BOUND, SPAN, WORDS)
        classes = tl.where(least == EMPTY_WORD, EMPTY, tl.where(least == FULL_WORD, FULL, MIXED))
        if HAS_LOWEST:
            classes = tl.where(least == LOWEST_WORD, LOWEST, classes)
            flags = tl.max(tl.reshape(((words & HIGH_BITS) != HIGH_BITS).to(tl.int32), [ROWS, SPAN, WORDS]), 2)
            larger = tl.sum(tl.where(flags > 0, row_bits[:, None], 0), 0)
        classes = tl.where(least == greatest, classes, MIXED)
    else:
        classes = tl.full([SPAN], MIXED, tl.int32)
        if HAS_LOWEST:
            # All tiles are mixed, and a few elements of each row will tell that it has larger ones. Nothing else may
            # be concluded if they do not, and nothing is: its tiles are then visited.
            some = chunk * (SPAN * WORDS) + tl.arange(0, 8)
            steps = some if UNIT_STRIDE else some * stride_mk
            sample = tl.load(base + rows[:, None] * stride_mq + steps[None, :], mask=(some < words_k)[None, :],
                             other=EMPTY_WORD)
            found = tl.max(((sample & HIGH_BITS) != HIGH_BITS).to(tl.int32), 1)
            larger += tl.sum(tl.where(found > 0, row_bits, 0), 0)

    positions = chunk * SPAN + tl.arange(0, SPAN)
    tiles += (plane.to(tl.int64) * strips_q + strip) * strips_k
    tl.store(tiles + positions, classes.to(tl.int64), mask=positions < strips_k)
    if HAS_LOWEST:
        tl.store(tiles + larger_offset + positions, larger, mask=positions < strips_k)


@triton.jit
def _append(entries, blocks, num_blocks, occupied, full, count_full, count_mixed):
    """Write the full ones of some blocks behind the full ones so far, the mixed ones from the list's end backwards."""
    occupied = occupied & (blocks < num_blocks)
    full = occupied & full
    mixed = occupied & (full == 0)
    number = blocks.to(tl.int64)
    tl.store(entries + (count_full + tl.cumsum(full.to(tl.int32), 0) - 1), number, mask=full)
    tl.store(entries + (num_blocks - count_mixed - tl.cumsum(mixed.to(tl.int32), 0)), number, mask=mixed)
    return count_full + tl.sum(full.to(tl.int32), 0), count_mixed + tl.sum(mixed.to(tl.int32), 0)


@triton.jit
def list_key_tiles(
    tiles,
    strips_q, strips_k, larger_offset, settled_offset, lists_offset, blocks_q, blocks_k,
    ROWS: tl.constexpr, HAS_LOWEST: tl.constexpr, STRIPS_M: tl.constexpr, BLOCKS_M: tl.constexpr,
    STRIPS_N: tl.constexpr, BLOCKS_N: tl.constexpr, CHUNK: tl.constexpr,
):
    """At lists_offset, [mask batches * heads, blocks_q, 2 + blocks_k]: numbers of full and mixed blocks, the blocks.

    A block of queries is STRIPS_M strips high, or one of BLOCKS_M in a strip; likewise for keys. Full blocks come first
    in ascending order; mixed ones stand at the end in descending order. For a float mask, leaves at settled_offset
    whether each strip's lowest tiles are empty (1) or mixed (0).
    """
    program = tl.program_id(0)
    plane = (program // blocks_q).to(tl.int64)
    block = program % blocks_q
    strips = tl.minimum(block * STRIPS_M // BLOCKS_M + tl.arange(0, STRIPS_M), strips_q - 1)
    first_of_strip = (plane * strips_q + strips) * strips_k
    settled = tl.zeros([STRIPS_M], tl.int1)
    if HAS_LOWEST:
        bits = tl.zeros([STRIPS_M, CHUNK], tl.int64)
        for start in range(0, strips_k, CHUNK):
            columns = start + tl.arange(0, CHUNK)
            bits |= tl.load(tiles + larger_offset + first_of_strip[:, None] + columns[None, :],
                            mask=(columns < strips_k)[None, :], other=0)
        larger = tl.reduce(bits, 1, _either)
        settled = larger == (-1 if ROWS == 64 else 1)
        tl.store(tiles + settled_offset + plane * strips_q + strips, settled.to(tl.int64))

    lists = tiles + lists_offset + program.to(tl.int64) * (blocks_k + 2)
    count_full = 0
    count_mixed = 0
    for start in range(0, blocks_k, CHUNK):
        blocks = start + tl.arange(0, CHUNK)
        occupied = tl.zeros([CHUNK], tl.int32)
        full = tl.full([CHUNK], 1, tl.int32)
        for part in tl.static_range(STRIPS_N):
            columns = blocks * STRIPS_N // BLOCKS_N + part
            classes = tl.load(tiles + first_of_strip[:, None] + columns[None, :], mask=(columns < strips_k)[None, :],
                              other=EMPTY)
            classes = tl.where(classes == LOWEST, tl.where(settled, EMPTY, MIXED)[:, None], classes)
            occupied = occupied | tl.max((classes != EMPTY).to(tl.int32), 0)
            full = full & tl.min((classes == FULL).to(tl.int32), 0)
        count_full, count_mixed = _append(lists + 2, blocks, blocks_k, occupied > 0, full > 0, count_full, count_mixed)
    tl.store(lists, count_full.to(tl.int64))
    tl.store(lists + 1, count_mixed.to(tl.int64))


@triton.jit
def list_query_tiles(
    tiles,
    strips_q, strips_k, settled_offset, lists_offset, blocks_q, blocks_k,
    HAS_LOWEST: tl.constexpr, STRIPS_M: tl.constexpr, BLOCKS_M: tl.constexpr, STRIPS_N: tl.constexpr,
    BLOCKS_N: tl.constexpr, CHUNK: tl.constexpr,
):
    """As list_key_tiles, [mask batches * heads, blocks_k, 2 + blocks_q] of query blocks; needs what that one left."""
    program = tl.program_id(0)
    plane = (program // blocks_k).to(tl.int64)
    block = program % blocks_k
    columns = block * STRIPS_N // BLOCKS_N + tl.arange(0, STRIPS_N)
    lists = tiles + lists_offset + program.to(tl.int64) * (blocks_q + 2)
    count_full = 0
    count_mixed = 0
    for start in range(0, blocks_q, CHUNK):
        blocks = start + tl.arange(0, CHUNK)
        occupied = tl.zeros([CHUNK], tl.int32)
        full = tl.full([CHUNK], 1, tl.int32)
        for part in tl.static_range(STRIPS_M):
            strips = plane * strips_q + tl.minimum(blocks * STRIPS_M // BLOCKS_M + part, strips_q - 1)
            classes = tl.load(tiles + strips[None, :] * strips_k + columns[:, None],
                              mask=(columns < strips_k)[:, None], other=EMPTY)
            if HAS_LOWEST:
                settled = tl.load(tiles + settled_offset + strips) > 0
                classes = tl.where(classes == LOWEST, tl.where(settled, EMPTY, MIXED)[None, :], classes)
            occupied = occupied | tl.max((classes != EMPTY).to(tl.int32), 0)
            full = full & tl.min((classes == FULL).to(tl.int32), 0)
        count_full, count_mixed = _append(lists + 2, blocks, blocks_q, occupied > 0, full > 0, count_full, count_mixed)
    tl.store(lists, count_full.to(tl.int64))
    tl.store(lists + 1, count_mixed.to(tl.int64))
