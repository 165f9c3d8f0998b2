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
mask is read as integers, and a tile whose least and greatest agree holds one value everywhere. Where the first numbers
of its rows show a tile to be mixed, as with a dense bias, most of it is not read at all.

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
def _load_words(rows, columns, stride_mk, words_k, EMPTY_WORD: tl.constexpr, UNIT_STRIDE: tl.constexpr,
                BOUND: tl.constexpr):
    """[rows, columns] of the mask; rows are pointers."""
    pointers = rows + (columns if UNIT_STRIDE else columns * stride_mk)[None, :]
    if BOUND:
        return tl.load(pointers, mask=(columns < words_k)[None, :], other=EMPTY_WORD)
    else:
        return tl.load(pointers)


@triton.jit
def _rows_with_larger(words, row_bits, HIGH_BITS: tl.constexpr):
    """A bit for each row of words that has a number which is certain to be larger than the lowest one."""
    found = tl.max(((words & HIGH_BITS) != HIGH_BITS).to(tl.int32), 1)
    return tl.sum(tl.where(found > 0, row_bits, 0), 0)


@triton.jit
def classify_mask(
    mask, tiles,
    stride_mb, stride_mh, stride_mq, stride_mk,
    mask_heads, mask_q, words_k, strips_q, strips_k, tiles_each, larger_offset,
    ROWS: tl.constexpr, WORDS: tl.constexpr, WORD_BITS: tl.constexpr, ELEMENTS: tl.constexpr,
    UNIT_STRIDE: tl.constexpr, BOUND: tl.constexpr, EMPTY_WORD: tl.constexpr, FULL_WORD: tl.constexpr,
    LOWEST_WORD: tl.constexpr, HIGH_BITS: tl.constexpr, HUGE_BITS: tl.constexpr, HAS_LOWEST: tl.constexpr,
):
    """Fill tiles [mask batches * heads, strips_q, strips_k] with classes; for a float mask also which rows have more.

    A program walks tiles_each tiles of a strip; it is one warp, without barriers, where vectors of 16 bytes make a tile
    small enough for its registers. The mask is read as words of WORD_BITS bits, ELEMENTS elements in each; WORDS of
    them are a row of a tile, and strides and words_k count them. ROWS is 64, or 1 for a mask with one row for all
    queries. *_WORD are words full of one element. larger_offset leads to a plane like tiles with one bit for each row
    of a tile.
    """
    groups = tl.cdiv(strips_k, tiles_each)
    program = tl.program_id(0)
    group = program % groups
    strip = program // groups % strips_q
    plane = program // (groups * strips_q)
    base = mask.to(tl.pointer_type(tl.core.get_int_dtype(WORD_BITS, True)), bitcast=True)
    base += (plane // mask_heads).to(tl.int64) * stride_mb + (plane % mask_heads).to(tl.int64) * stride_mh
    base += strip.to(tl.int64) * ROWS * stride_mq
    tiles += (plane.to(tl.int64) * strips_q + strip) * strips_k

    # Rows past the end repeat the last one, which changes no tile's class; keys past the end are not seen.
    rows = base + tl.minimum(tl.arange(0, ROWS), mask_q - 1 - strip * ROWS)[:, None] * stride_mq
    row_bits = tl.full([1], 1, tl.int64) << tl.arange(0, ROWS).to(tl.int64)
    few = tl.arange(0, 128 // WORD_BITS)
    for position in range(group * tiles_each, tl.minimum((group + 1) * tiles_each, strips_k)):
        tile_class = MIXED
        larger = tl.zeros([], tl.int64)
        undecided = True
        if HAS_LOWEST and ROWS > 1:
            # The first 16 bytes of each row. A number that is neither zero nor huge and negative shows the tile to be
            # mixed, as in all of a dense bias; and as many numbers tell of most rows that they have larger ones.
            sample = _load_words(rows, position * WORDS + few, stride_mk, words_k, EMPTY_WORD, UNIT_STRIDE, BOUND)
            larger = _rows_with_larger(sample, row_bits, HIGH_BITS)
            lacking = ~sample & HUGE_BITS
            if ELEMENTS == 2:
                ordinary = ((lacking << 16) != 0) & ((lacking >> 16) != 0)
            else:
                ordinary = lacking != 0
            ordinary = tl.min(tl.reshape(ordinary.to(tl.int32), [ROWS * (128 // WORD_BITS)]), 0)
            other = tl.max(tl.reshape((sample != FULL_WORD).to(tl.int32), [ROWS * (128 // WORD_BITS)]), 0)
            undecided = (ordinary == 0) | (other == 0)
        if undecided:
            words = _load_words(rows, position * WORDS + tl.arange(0, WORDS), stride_mk, words_k, EMPTY_WORD,
                                UNIT_STRIDE, BOUND)
            least = tl.min(tl.reshape(words, [ROWS * WORDS]), 0)
            greatest = tl.max(tl.reshape(words, [ROWS * WORDS]), 0)
            tile_class = tl.where(least == EMPTY_WORD, EMPTY, tl.where(least == FULL_WORD, FULL, MIXED))
            if HAS_LOWEST:
                tile_class = tl.where(least == LOWEST_WORD, LOWEST, tile_class)
            tile_class = tl.where(least == greatest, tile_class, MIXED)
            if HAS_LOWEST:
                larger = tl.where(tile_class == FULL, tl.full([], -1 if ROWS == 64 else 1, tl.int64), 0)
                if tile_class == MIXED:
                    larger = _rows_with_larger(words, row_bits, HIGH_BITS)
        tl.store(tiles + position, tl.cast(tile_class, tl.int64))
        if HAS_LOWEST:
            tl.store(tiles + larger_offset + position, larger)


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
