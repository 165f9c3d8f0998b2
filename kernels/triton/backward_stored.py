"""Gradients for head dimensions above 256 with probabilities kept in memory: five products, none computed twice.

An accumulator of 512 columns fills the registers of two warpgroups, so kernels that keep P and dS to themselves compute
them again for every few columns of a result: 11 products, on tiles too small for the tensor cores. Here one kernel
computes both once, rounded as every other kernel rounds them before their products, and three ordinary matrix products
follow, whose tiles are as large as the tensor cores like:

    attention_stored_scores   a tile of P and of dS:  S = Q K^T   dP = dO V^T   P = exp(S - lse)   dS = P (dP - delta)
    attention_stored_query    rows by columns of dQ:  dQ = scale dS K
    attention_stored_key      rows by columns of dK:  dK = scale dS^T Q;   launched again for dV:  dV = P^T dO

Memory: the tiles of a few heads at a time, STORED x STORED numbers without gaps each. They are in the order of heads,
then queries, then keys; of a causal call those that nobody sees are left out. No atomics, so every run gives the same
bits. Where one head has too many, a region of them at a time (``stored_plan.Region``): some keys with all queries for
dK and dV, then some queries with all keys for dQ, without P.

For calls without mask and dropout whose tensors the copy engine can walk, equal head dimensions. May import triton and
``backward_wide.py``. Launched by ``stored_plan.py``, after ``backward.py``'s kernel has left the row statistics.
"""

import triton
import triton.language as tl

from .backward_wide import _piece, _store_half

# Columns of the head dimension that the scores' loop takes at a time.
DEPTH = tl.constexpr(64)


@triton.jit
def _tiles_before(row, tiles_k, CAUSAL: tl.constexpr):
    """How many tiles of a head lie before those of this row of tiles."""
    if CAUSAL:
        triangle = tl.minimum(row, tiles_k)
        return triangle * (triangle + 1) // 2 + (row - triangle) * tiles_k
    else:
        return row * tiles_k


@triton.jit
def _row_of_tile(tile, tiles_k, CAUSAL: tl.constexpr):
    """The row of tiles that a head's tile of this number lies in."""
    if CAUSAL:
        row = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
        row = tl.where(row * (row + 1) // 2 > tile, row - 1, row)
        row = tl.where((row + 1) * (row + 2) // 2 <= tile, row + 1, row)
        whole = tiles_k * (tiles_k + 1) // 2
        return tl.where(tile < whole, row, tiles_k + (tile - whole) // tiles_k)
    else:
        return tile // tiles_k


@triton.jit
def attention_stored_scores(
    query, key, value, grad_out, statistics, probabilities_out, grad_scores_out,
    padded_q, plane, num_heads, group_size, seqlen_q, seqlen_k, scale, first_head, first_tile, num_tiles, before, count,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    BOUND_KEYS: tl.constexpr, STORE_BOTH: tl.constexpr,
):
    """One tile of P (STORE_BOTH) and of dS, both of the inputs' dtype, of the heads from first_head on.

    num_tiles of keys from first_tile on; `count` tiles of each head, their numbers beginning with `before`.
    """
    program = tl.program_id(0)
    head_index = first_head + program // count
    tile = before + program % count
    row = _row_of_tile(tile, num_tiles, CAUSAL)
    first_key = (first_tile + tile - _tiles_before(row, num_tiles, CAUSAL)) * BLOCK_N
    if CAUSAL:
        row += first_tile  # rows are counted from the first that sees any of these keys
    first_query = row * BLOCK_M
    batch = head_index // num_heads
    head = head_index % num_heads
    kv_head = head // group_size
    rows = tl.arange(0, BLOCK_M)
    # Rows past the end have a logsumexp of +infinity, hence zeros. Loaded before the loop, which hides the wait.
    position = head_index.to(tl.int64) * padded_q + first_query + rows
    high = tl.load(statistics + position)
    delta = tl.load(statistics + plane + position)
    scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    grad = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for column in tl.range(0, HEAD_DIM, DEPTH):
        query_part = _piece(query, batch, head, first_query, column, BLOCK_M, DEPTH)
        key_part = _piece(key, batch, kv_head, first_key, column, BLOCK_N, DEPTH)
        scores = tl.dot(query_part, tl.trans(key_part), scores)
        grad_part = _piece(grad_out, batch, head, first_query, column, BLOCK_M, DEPTH)
        value_part = _piece(value, batch, kv_head, first_key, column, BLOCK_N, DEPTH)
        grad = tl.dot(grad_part, tl.trans(value_part), grad)
    columns = tl.arange(0, BLOCK_N)
    probabilities = tl.exp2(scores * scale - high[:, None])
    grad_scores = probabilities * (grad - delta[:, None])
    if CAUSAL or BOUND_KEYS:
        key_index = (first_key + columns)[None, :]
        seen = key_index < seqlen_k
        if CAUSAL:
            seen = seen & ((first_query + rows)[:, None] >= key_index)
        probabilities = tl.where(seen, probabilities, 0.0)
        grad_scores = tl.where(seen, grad_scores, 0.0)
    origin = program.to(tl.int64) * (BLOCK_M * BLOCK_N)
    offsets = rows[:, None] * BLOCK_N + columns[None, :]
    dtype = grad_scores_out.dtype.element_ty
    if STORE_BOTH:
        tl.store(probabilities_out + origin + offsets, probabilities.to(dtype))
    tl.store(grad_scores_out + origin + offsets, grad_scores.to(dtype))


@triton.jit
def attention_stored_query(
    grad_scores, key, grad_query,
    stride_b, stride_h, stride_m,
    num_heads, group_size, seqlen_q, seqlen_k, out_scale, first_head, first_row, num_rows, before, count,
    HEAD_DIM: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):
    """BLOCK_M = STORED rows by BLOCK_C columns of grad_query, of the heads from first_head on; BLOCK_N keys at a time.

    num_rows of tiles from first_row on; `count` and `before` as above, of all keys.
    """
    STORED: tl.constexpr = BLOCK_M
    PARTS: tl.constexpr = (HEAD_DIM + BLOCK_C - 1) // BLOCK_C
    tiles_k = tl.cdiv(seqlen_k, STORED)
    program = tl.program_id(0)
    first_column = program % PARTS * BLOCK_C
    local_head = program // PARTS // num_rows
    row = program // PARTS % num_rows
    if CAUSAL:
        row = num_rows - 1 - row  # longest first
    row += first_row
    head_index = first_head + local_head
    batch = head_index // num_heads
    head = head_index % num_heads
    kv_head = head // group_size
    first_query = row * BLOCK_M
    stored_row = (local_head * count + _tiles_before(row, tiles_k, CAUSAL) - before) * STORED
    STEPS: tl.constexpr = STORED // BLOCK_N
    last = tl.minimum(seqlen_k, first_query + BLOCK_M) if CAUSAL else seqlen_k
    total = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for step in tl.range(0, tl.cdiv(last, BLOCK_N)):
        left = _piece(grad_scores, 0, 0, stored_row + step // STEPS * STORED, step % STEPS * BLOCK_N, BLOCK_M, BLOCK_N)
        total = tl.dot(left, _piece(key, batch, kv_head, step * BLOCK_N, first_column, BLOCK_N, BLOCK_C), total)
    grad_query += batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    _store_half(grad_query, total * out_scale, first_query, tl.arange(0, BLOCK_M), first_column, stride_m, seqlen_q,
                BLOCK_C, HEAD_DIM)


@triton.jit
def attention_stored_key(
    stored, right, gradient,
    stride_b, stride_h, stride_n,
    num_heads, group_size, seqlen_q, seqlen_k, out_scale, first_head, first_tile, num_tiles, count,
    HEAD_DIM: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):
    """BLOCK_N = STORED rows by BLOCK_C columns of the gradient of keys or values, BLOCK_M queries at a time.

    gradient = out_scale * stored^T right, summed over the query heads of each kv head: dS and query, or P and grad_out.
    num_tiles of keys from first_tile on; `count` as above, of all queries that see them.
    """
    STORED: tl.constexpr = BLOCK_N
    PARTS: tl.constexpr = (HEAD_DIM + BLOCK_C - 1) // BLOCK_C
    program = tl.program_id(0)
    first_column = program % PARTS * BLOCK_C
    local_head = program // PARTS // num_tiles * group_size
    column = program // PARTS % num_tiles  # causal: the first tile is seen by the most queries, so it is longest first
    tile = first_tile + column
    head_index = first_head + local_head
    batch = head_index // num_heads
    first_of_group = head_index % num_heads
    kv_head = first_of_group // group_size
    STEPS: tl.constexpr = STORED // BLOCK_M
    first_row = first_tile if CAUSAL else 0
    first = tile * STEPS if CAUSAL else 0
    total = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for member in range(group_size):
        head = first_of_group + member
        before = (local_head + member) * count + column
        for step in tl.range(first, tl.cdiv(seqlen_q, BLOCK_M)):
            row = step // STEPS - first_row
            stored_row = (before + _tiles_before(row, num_tiles, CAUSAL)) * STORED + step % STEPS * BLOCK_M
            left = _piece(stored, 0, 0, stored_row, 0, BLOCK_M, BLOCK_N)
            right_part = _piece(right, batch, head, step * BLOCK_M, first_column, BLOCK_M, BLOCK_C)
            total = tl.dot(tl.trans(left), right_part, total)
    gradient += batch.to(tl.int64) * stride_b + kv_head.to(tl.int64) * stride_h
    _store_half(gradient, total * out_scale, tile * BLOCK_N, tl.arange(0, BLOCK_N), first_column, stride_n, seqlen_k,
                BLOCK_C, HEAD_DIM)
