"""Device functions that the forward and the backward kernels share: tiles, masks, dropout.

May import triton only. Imported by ``forward.py`` and ``backward.py``.

Every kernel masks with a select, never by adding: a NaN in a masked position must not reach the output.
Row indices are clamped instead of predicated where the row is not stored afterwards.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# What the product of two tiles of split_rows is too large by.
SPLIT_SQUARED = tl.constexpr(2.0**28)

# Kinds of attn_mask, a compile-time argument of every kernel.
MASK_NONE = tl.constexpr(0)
MASK_BOOL = tl.constexpr(1)
MASK_FLOAT = tl.constexpr(2)

# Rows and columns of the table of dropout's random keys are padded to this, so that no tile needs bounds in it.
DROPOUT_PITCH = tl.constexpr(256)


@triton.jit
def part_of_list(part, skipped, length, SUM_BLOCKS: tl.constexpr):
    """(first, last): which entries of a list are in a part of SUM_BLOCKS blocks, where `skipped` ones come before them.

    For a part without any both are 0 or both `length`, so that what is read ahead lies in the list.
    """
    first = part * SUM_BLOCKS - skipped
    last = first + SUM_BLOCKS
    return tl.minimum(tl.maximum(first, 0), length), tl.minimum(tl.maximum(last, 0), length)


@triton.jit
def count_parts_of_keys(full_end, partial_end, BLOCK_N: tl.constexpr, LISTED: tl.constexpr,
                        SUM_ROWS: tl.constexpr):
    """How many parts of SUM_ROWS keys a block of queries has; arguments as in ``part_of_keys``."""
    if LISTED:
        return tl.cdiv(full_end + partial_end, SUM_ROWS // BLOCK_N)
    else:
        return tl.maximum(tl.cdiv(full_end, SUM_ROWS), 1)


@triton.jit
def part_of_keys(part, num_parts, full_end, partial_begin, partial_end, BLOCK_N: tl.constexpr, LISTED: tl.constexpr,
                 SUM_ROWS: tl.constexpr):
    """(first, last) of the two loops over keys, full tiles and partial ones, in one of num_parts parts.

    The loops' whole ranges are 0..full_end and partial_begin..partial_end: entries of lists, full and mixed blocks
    counted together, or keys, where the few beyond the full tiles belong to the last part.
    """
    if LISTED:
        full_first, full_last = part_of_list(part, 0, full_end, SUM_ROWS // BLOCK_N)
        partial_first, partial_last = part_of_list(part, full_end, partial_end, SUM_ROWS // BLOCK_N)
    else:
        full_first = part * SUM_ROWS
        full_last = tl.minimum(full_first + SUM_ROWS, full_end)
        partial_first = partial_begin
        partial_last = tl.where(part == num_parts - 1, partial_end, partial_begin)
    return full_first, full_last, partial_first, partial_last


@triton.jit
def load_tile(base, first_row, rows, stride_row, stride_column, num_rows, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr,
              UNIT_STRIDE: tl.constexpr, BOUND_ROWS: tl.constexpr):
    """[rows, BLOCK_D] of a matrix [num_rows, HEAD_DIM], zeros outside of it; rows are offsets from first_row.

    The 64-bit part of the address is a scalar, so that the tile's offsets stay 32 bits wide.
    """
    columns = tl.arange(0, BLOCK_D)
    origin = base + tl.cast(first_row, tl.int64) * stride_row
    if UNIT_STRIDE:
        pointers = origin + rows[:, None] * stride_row + columns[None, :]
    else:
        pointers = origin + rows[:, None] * stride_row + columns[None, :] * stride_column
    if BOUND_ROWS:
        if BLOCK_D == HEAD_DIM:
            return tl.load(pointers, mask=(first_row + rows < num_rows)[:, None], other=0.0)
        else:
            return tl.load(
                pointers, mask=(first_row + rows < num_rows)[:, None] & (columns < HEAD_DIM)[None, :], other=0.0
            )
    elif BLOCK_D == HEAD_DIM:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(columns < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def stream_tile(source, batch, head, first_row, rows, stride_row, stride_column, num_rows, BLOCK_ROWS: tl.constexpr,
                BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr, UNIT_STRIDE: tl.constexpr, BOUND_ROWS: tl.constexpr,
                TMA: tl.constexpr, first_column=0):
    """load_tile for the tiles of a loop. TMA: source is a tensor map [B, H, rows, HEAD_DIM]; hardware checks bounds.

    Otherwise source points at the matrix of this batch and head already, and first_column has to be 0.
    """
    if TMA:
        return source.load([batch, head, first_row, first_column]).reshape([BLOCK_ROWS, BLOCK_D])
    else:
        return load_tile(source, first_row, rows, stride_row, stride_column, num_rows, BLOCK_D, HEAD_DIM, UNIT_STRIDE,
                         BOUND_ROWS)


@triton.jit
def store_tile(base, tile, first_row, rows, stride_row, stride_column, num_rows, BLOCK_D: tl.constexpr,
               HEAD_DIM: tl.constexpr, UNIT_STRIDE: tl.constexpr):
    """Write the part of [rows, BLOCK_D] that lies inside a matrix [num_rows, HEAD_DIM]."""
    columns = tl.arange(0, BLOCK_D)
    origin = base + tl.cast(first_row, tl.int64) * stride_row
    if UNIT_STRIDE:
        pointers = origin + rows[:, None] * stride_row + columns[None, :]
    else:
        pointers = origin + rows[:, None] * stride_row + columns[None, :] * stride_column
    inside = (first_row + rows < num_rows)[:, None]
    if BLOCK_D != HEAD_DIM:
        inside = inside & (columns < HEAD_DIM)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def as_operand(tile, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """The tile in the type of a product's other operand, for tiles that lie in registers.

    Tensor cores drop the bits of a float32 operand that TF32 has no room for. Where one operand of a product is rounded
    to nearest first (ties away from zero, as PTX's cvt.rna does), half of that bias is gone, and the error stays below
    twice that of rounding both.
    """
    tile = tile.to(dtype)
    if dtype == tl.float32 and PRECISION == "tf32":
        bits = tile.to(tl.int32, bitcast=True)
        # A NaN keeps its bits: all ones and a carry would be -0.
        bits = tl.where(tile == tile, bits + 0x1000, bits) & -0x2000
        tile = bits.to(tl.float32, bitcast=True)
    return tile


@triton.jit
def split_rows(tile, LOADED: tl.constexpr):
    """(high, low, factor): two float16 tiles whose sum is the float32 tile / factor * 2**14; factors [rows] are powers
    of two.

    Their 22 bits are what two TF32 numbers have, at twice the rate of tensor cores. The largest of a row comes to lie
    in 2**14..2**15, so that nothing overflows, and what is less than 2**-16 of it loses bits, down to 2**-39 of it.
    A row of its own factor keeps what is large or not a number, in keys that a mask hides, from the other rows.
    LOADED: a tile from memory, of which a thread holds four neighbours; otherwise it lies as tensor cores leave it.
    """
    if LOADED:
        # As integers from four on: a warp has one instruction for the maximum of those.
        largest = tl.max(tl.reshape(tl.abs(tile), [tile.shape[0], tile.shape[1] // 4, 4]), 2)
        exponent = tl.max(largest.to(tl.int32, bitcast=True), 1) >> 23
    else:
        exponent = tl.max(tl.abs(tile), 1).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 14), 254)
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    tile = tile * ((268 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    high = tile.to(tl.float16)
    low = (tile - high.to(tl.float32)).to(tl.float16)
    return high, low, factor


@triton.jit
def split_product(left_high, left_low, right_high, right_low):
    """The product of two split tiles, SPLIT_SQUARED times too large; the smallest of its three parts come first."""
    total = tl.dot(left_low, right_high)
    total = tl.dot(left_high, right_low, total)
    return tl.dot(left_high, right_high, total)


@triton.jit
def load_mask(mask, batch, head, first_query, first_key, query_index, key_index, stride_query, stride_key, seqlen_q,
              seqlen_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, PER_KEY: tl.constexpr,
              UNIT_STRIDE: tl.constexpr, BOUND_KEYS: tl.constexpr, TRANSPOSED: tl.constexpr, TMA: tl.constexpr):
    """attn_mask at query_index x key_index, two index tensors that broadcast; keys outside are masked, rows arbitrary.

    Bool or float32, [BLOCK_M, BLOCK_N] or, TRANSPOSED, [BLOCK_N, BLOCK_M]. PER_KEY: the mask does not depend on the
    query, so one vector is loaded instead of a tile. TMA: mask is a tensor map, batch and head are coordinates in it;
    otherwise it points at the mask of this batch and head. 0 if there is no mask.
    """
    if MASK == MASK_NONE:
        return 0
    elif TMA:
        tile = mask.load([batch, head, first_query, first_key]).reshape([BLOCK_M, BLOCK_N])
        if TRANSPOSED:
            tile = tl.trans(tile)
        if MASK == MASK_BOOL:
            return tile != 0  # the copy engine fills what lies outside with zeros
        elif BOUND_KEYS:
            return tl.where(key_index < seqlen_k, tile.to(tl.float32), float("-inf"))
        else:
            return tile.to(tl.float32)
    else:
        keys = key_index if UNIT_STRIDE else key_index * stride_key
        # Rows past the end are not stored, so any row of the mask will do for them.
        pointers = mask + keys if PER_KEY else mask + tl.minimum(query_index, seqlen_q - 1) * stride_query + keys
        if BOUND_KEYS:
            if MASK == MASK_BOOL:
                return tl.load(pointers, mask=key_index < seqlen_k, other=0)
            else:
                return tl.load(pointers, mask=key_index < seqlen_k, other=float("-inf")).to(tl.float32)
        elif MASK == MASK_BOOL:
            return tl.load(pointers)
        else:
            return tl.load(pointers).to(tl.float32)


@triton.jit
def dropout_tables(keys, head, seqlen_q, seqlen_k):
    """(row_table, column_table): where the random keys of a head's queries begin, and of its keys (``dropout.py``)."""
    rows = tl.cdiv(seqlen_q, DROPOUT_PITCH) * DROPOUT_PITCH
    columns = tl.cdiv(seqlen_k, DROPOUT_PITCH) * DROPOUT_PITCH
    row_table = keys + head.to(tl.int64) * (rows + columns)
    return row_table, row_table + rows


@triton.jit
def dropout_row_keys(row_table, first_query, BLOCK_M: tl.constexpr):
    """Those of a tile's queries: [groups of 16, 8], since q and q + 8 of a group have one key; of 8 queries [1, 8]."""
    groups = tl.arange(0, max(1, BLOCK_M // 16))[:, None] * 16
    first = first_query if BLOCK_M >= 16 else first_query & ~8
    return tl.load(row_table + first + groups + tl.arange(0, 8)[None, :]).to(tl.uint32, bitcast=True)


@triton.jit
def dropout_column_keys(column_table, first_key, BLOCK_N: tl.constexpr):
    """Those of a tile's keys: [BLOCK_N]."""
    return tl.load(column_table + first_key + tl.arange(0, BLOCK_N)).to(tl.uint32, bitcast=True)


@triton.jit
def _mixed(bits):
    """MurmurHash3's 32-bit finaliser (Appleby, 2011)."""
    bits = bits ^ (bits >> 16)
    bits = bits * 0x85EBCA6B
    bits = bits ^ (bits >> 13)
    bits = bits * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def dropout_keep(row_keys, column_keys, first_query, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 TRANSPOSED: tl.constexpr):
    """Which probabilities of a tile stay, [BLOCK_M, BLOCK_N] or, transposed, [BLOCK_N, BLOCK_M]: each with probability
    1 - threshold / 2**32. The threshold is a multiple of 2**16.

    A counter-based generator that needs no state and no order: Philox gives each row and each column of a head a random
    key (``dropout.py`` writes them to memory, since a tile's threads would each compute most of them), and a hash mixes
    the two. Queries q and q + 8 share the bits, half for each: tensor cores leave both in one thread, whichever way the
    tile lies, which computes them once. Eight integer instructions for two elements and two for each, where Philox for
    each takes sixty. ``reference.dropout_keep`` computes the same.
    """
    # The half that decides comes first: what stands behind it does not reach the threshold's last bit.
    if BLOCK_M >= 16:
        HALVES: tl.constexpr = 2
        shift = 16 - 16 * tl.arange(0, 2)
    else:
        HALVES: tl.constexpr = 1
        shift = 16 - 2 * (first_query & 8) + tl.arange(0, 1)
    shift = shift.to(tl.uint32)
    GROUPS: tl.constexpr = BLOCK_M // (8 * HALVES)
    if TRANSPOSED:
        bits = _mixed(row_keys[None, :, None, :] ^ column_keys[:, None, None, None])
        bits = tl.broadcast_to(bits, [BLOCK_N, GROUPS, HALVES, 8])
        return tl.reshape((bits << shift[None, None, :, None]) >= threshold, [BLOCK_N, BLOCK_M])
    else:
        bits = _mixed(row_keys[:, None, :, None] ^ column_keys[None, None, None, :])
        bits = tl.broadcast_to(bits, [GROUPS, HALVES, 8, BLOCK_N])
        return tl.reshape((bits << shift[None, :, None, None]) >= threshold, [BLOCK_M, BLOCK_N])
