"""Gradients of keys and values for head dimensions above 256: two kernels, each with half of the columns of one.

The method and the statistics are those of ``backward.py``, whose kernel for queries runs first. Accumulators of dK and
dV with 512 columns leave room for 32 keys and 32 queries at a time. Here one warpgroup owns 64 rows by BLOCK_C columns
of either, and neighbouring programs own the parts of a row and share its tiles in L2:

    attention_wide_key      BLOCK_N rows of a part of dK, loops over queries (scores, dP, dK)
    attention_wide_value    BLOCK_N rows of a part of dV, loops over queries (scores, dV)

With two parts these are as many operations as 8 products where 4 would do, at several times the rate. Tiles of 512
columns come in two pieces of BLOCK_C: a program's part of a tile is one more piece, from L2.

For calls without mask and dropout whose tensors the copy engine can walk, equal head dimensions. May import triton and
``backward.py``. Launched by ``attention.py``.
"""

import triton
import triton.language as tl

from .backward import _stream_statistics


@triton.jit
def _load_half(base, first_row, rows, first_column, stride_row, num_rows, BLOCK_C: tl.constexpr,
               HEAD_DIM: tl.constexpr):
    """[rows, BLOCK_C] from first_column on of a matrix [num_rows, HEAD_DIM] of unit stride, zeros outside of it."""
    columns = first_column + tl.arange(0, BLOCK_C)
    pointers = base + tl.cast(first_row, tl.int64) * stride_row + (rows[:, None] * stride_row + columns[None, :])
    return tl.load(pointers, mask=(first_row + rows < num_rows)[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _store_half(base, tile, first_row, rows, first_column, stride_row, num_rows, BLOCK_C: tl.constexpr,
                HEAD_DIM: tl.constexpr):
    columns = first_column + tl.arange(0, BLOCK_C)
    pointers = base + tl.cast(first_row, tl.int64) * stride_row + (rows[:, None] * stride_row + columns[None, :])
    tl.store(pointers, tile.to(base.dtype.element_ty),
             mask=(first_row + rows < num_rows)[:, None] & (columns < HEAD_DIM)[None, :])


@triton.jit
def _piece(source, batch, head, first_row, first_column, BLOCK_ROWS: tl.constexpr, BLOCK_C: tl.constexpr):
    return source.load([batch, head, first_row, first_column]).reshape([BLOCK_ROWS, BLOCK_C])


@triton.jit
def attention_wide_key(
    query, key, value, statistics, grad_out, grad_key,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_dkb, stride_dkh, stride_dkn,
    num_heads, group_size, seqlen_q, seqlen_k, scale, out_scale,
    HEAD_DIM: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):
    """BLOCK_C columns of grad_key from each of two programs, summed over the query heads of each kv head."""
    num_tiles = tl.cdiv(seqlen_k, BLOCK_N)
    program = tl.program_id(0) // 2
    first_column = tl.program_id(0) % 2 * BLOCK_C
    kv_index = program // num_tiles
    tile = program % num_tiles  # causal: the first tile is seen by the most queries, so this is longest first
    num_kv_heads = num_heads // group_size
    batch = kv_index // num_kv_heads
    kv_head = kv_index % num_kv_heads
    key += batch * stride_kb + kv_head * stride_kh
    value += batch * stride_vb + kv_head * stride_vh
    grad_key += batch * stride_dkb + kv_head * stride_dkh
    first_key = tile * BLOCK_N
    keys = tl.arange(0, BLOCK_N)
    key_index = first_key + keys
    key_0 = _load_half(key, first_key, keys, 0, stride_kn, seqlen_k, BLOCK_C, HEAD_DIM)
    key_1 = _load_half(key, first_key, keys, BLOCK_C, stride_kn, seqlen_k, BLOCK_C, HEAD_DIM)
    value_0 = _load_half(value, first_key, keys, 0, stride_vn, seqlen_k, BLOCK_C, HEAD_DIM)
    value_1 = _load_half(value, first_key, keys, BLOCK_C, stride_vn, seqlen_k, BLOCK_C, HEAD_DIM)
    total = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    first = first_key // BLOCK_M * BLOCK_M if CAUSAL else 0
    for member in range(group_size):
        head = kv_head * group_size + member
        head_index = kv_index * group_size + member
        for start in tl.range(first, seqlen_q, BLOCK_M):
            scores = tl.dot(key_0, tl.trans(_piece(query, batch, head, start, 0, BLOCK_M, BLOCK_C)))
            scores = tl.dot(key_1, tl.trans(_piece(query, batch, head, start, BLOCK_C, BLOCK_M, BLOCK_C)), scores)
            grad = tl.dot(value_0, tl.trans(_piece(grad_out, batch, head, start, 0, BLOCK_M, BLOCK_C)))
            grad = tl.dot(value_1, tl.trans(_piece(grad_out, batch, head, start, BLOCK_C, BLOCK_M, BLOCK_C)), grad)
            high, _, delta = _stream_statistics(statistics, head_index, start, BLOCK_M, False)
            probabilities = tl.exp2(scores * scale - high)
            if CAUSAL:
                query_index = start + tl.arange(0, BLOCK_M)
                probabilities = tl.where(query_index[None, :] >= key_index[:, None], probabilities, 0.0)
            grad_scores = probabilities * (grad - delta)
            query_part = _piece(query, batch, head, start, first_column, BLOCK_M, BLOCK_C)
            total = tl.dot(grad_scores.to(query_part.dtype), query_part, total)
    _store_half(grad_key, total * out_scale, first_key, keys, first_column, stride_dkn, seqlen_k, BLOCK_C, HEAD_DIM)


@triton.jit
def attention_wide_value(
    query, key, statistics, grad_out, grad_value,
    stride_kb, stride_kh, stride_kn, stride_dvb, stride_dvh, stride_dvn,
    num_heads, group_size, seqlen_q, seqlen_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):
    """BLOCK_C columns of grad_value from each of two programs, summed over the query heads of each kv head."""
    num_tiles = tl.cdiv(seqlen_k, BLOCK_N)
    program = tl.program_id(0) // 2
    first_column = tl.program_id(0) % 2 * BLOCK_C
    kv_index = program // num_tiles
    tile = program % num_tiles
    num_kv_heads = num_heads // group_size
    batch = kv_index // num_kv_heads
    kv_head = kv_index % num_kv_heads
    key += batch * stride_kb + kv_head * stride_kh
    grad_value += batch * stride_dvb + kv_head * stride_dvh
    first_key = tile * BLOCK_N
    keys = tl.arange(0, BLOCK_N)
    key_index = first_key + keys
    key_0 = _load_half(key, first_key, keys, 0, stride_kn, seqlen_k, BLOCK_C, HEAD_DIM)
    key_1 = _load_half(key, first_key, keys, BLOCK_C, stride_kn, seqlen_k, BLOCK_C, HEAD_DIM)
    total = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    first = first_key // BLOCK_M * BLOCK_M if CAUSAL else 0
    for member in range(group_size):
        head = kv_head * group_size + member
        head_index = kv_index * group_size + member
        for start in tl.range(first, seqlen_q, BLOCK_M):
            scores = tl.dot(key_0, tl.trans(_piece(query, batch, head, start, 0, BLOCK_M, BLOCK_C)))
            scores = tl.dot(key_1, tl.trans(_piece(query, batch, head, start, BLOCK_C, BLOCK_M, BLOCK_C)), scores)
            high = statistics.load([0, 0, head_index, start]).reshape([1, BLOCK_M])
            probabilities = tl.exp2(scores * scale - high)
            if CAUSAL:
                query_index = start + tl.arange(0, BLOCK_M)
                probabilities = tl.where(query_index[None, :] >= key_index[:, None], probabilities, 0.0)
            grad_part = _piece(grad_out, batch, head, start, first_column, BLOCK_M, BLOCK_C)
            total = tl.dot(probabilities.to(grad_part.dtype), grad_part, total)
    _store_half(grad_value, total, first_key, keys, first_column, stride_dvn, seqlen_k, BLOCK_C, HEAD_DIM)
