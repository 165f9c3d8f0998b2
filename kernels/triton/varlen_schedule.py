"""The schedule of variable-length attention: which program computes which tile of which sequence.

The lengths are on the GPU alone, so the host launches as many programs as any lengths could need, and this small kernel
writes a line for each: sum(ceil(length / BLOCK)) is at most total // BLOCK + number of sequences. The longest work
comes first, so that the GPU does not end on one long tile: tiles are ordered by the length of what they loop over. Rows
behind the last sequence are one more sequence, of queries that see no key and keys that no query sees: they get zeros.

One program a sequence; it counts the tiles that go before its own (a look at all lengths, so quadratic in their
number), or, not SORTED, leaves gaps: its first line is start // BLOCK + its number.

May import triton and ``varlen_common.py`` only. Launched by ``varlen.py``.
"""

import triton
import triton.language as tl

from .varlen_common import ENTRY, STATISTICS_ALIGNMENT


@triton.jit
def _bounds(cu_seqlens, index, num_sequences, seqlen, total, inside, REGULAR: tl.constexpr):
    """(start, length) of sequences; of number num_sequences: the rows behind the last. REGULAR: all are seqlen long."""
    if REGULAR:
        start = index * seqlen
        end = start + seqlen
    else:
        start = tl.load(cu_seqlens + index, mask=inside, other=0).to(tl.int32)
        end = tl.load(cu_seqlens + tl.minimum(index + 1, num_sequences), mask=inside, other=0).to(tl.int32)
    # Whatever the tensor says, nothing outside of the packed ones is read or written.
    start = tl.minimum(tl.maximum(start, 0), total)
    end = tl.where(index == num_sequences, total, tl.minimum(tl.maximum(end, start), total))
    return start, tl.where(inside, end - start, 0)


@triton.jit
def _lengths(cu_seqlens_q, cu_seqlens_k, seqused_k, index, num_sequences, seqlen_q, seqlen_k, total_q, total_k,
             REGULAR_Q: tl.constexpr, REGULAR_K: tl.constexpr, SEQUSED: tl.constexpr):
    """(q_start, q_len, k_start, k_len, k_rows): k_rows lie in memory, of which k_len are seen."""
    inside = index <= num_sequences
    q_start, q_len = _bounds(cu_seqlens_q, index, num_sequences, seqlen_q, total_q, inside, REGULAR_Q)
    k_start, k_rows = _bounds(cu_seqlens_k, index, num_sequences, seqlen_k, total_k, inside, REGULAR_K)
    k_len = k_rows
    if SEQUSED:
        used = tl.load(seqused_k + index, mask=index < num_sequences, other=0).to(tl.int32)
        k_len = tl.minimum(tl.maximum(used, 0), k_rows)
    return q_start, q_len, k_start, tl.where(index < num_sequences, k_len, 0), k_rows


@triton.jit
def varlen_schedule(
    cu_seqlens_q, cu_seqlens_k, seqused_k, entries,
    num_sequences, seqlen_q, seqlen_k, total_q, total_k, query_slots, key_slots,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REVERSED: tl.constexpr, SORTED: tl.constexpr,
    REGULAR_Q: tl.constexpr, REGULAR_K: tl.constexpr, SEQUSED: tl.constexpr, CHUNK: tl.constexpr,
):
    """entries int32 [query_slots + key_slots, ENTRY]: tiles of BLOCK_M queries, then tiles of BLOCK_N keys.

    num_sequences + 1 programs for the queries and, where key_slots > 0, as many for the keys. REVERSED: tiles of
    queries from the last to the first, since a causal mask makes the last the longest.
    """
    program = tl.program_id(0)
    of_keys = program > num_sequences
    index = tl.where(of_keys, program - (num_sequences + 1), program)
    block = tl.where(of_keys, BLOCK_N, BLOCK_M)
    first_slot = tl.where(of_keys, query_slots, 0)
    slots = tl.where(of_keys, key_slots, query_slots)

    q_start, q_len, k_start, k_len, k_rows = _lengths(
        cu_seqlens_q, cu_seqlens_k, seqused_k, index, num_sequences, seqlen_q, seqlen_k, total_q, total_k, REGULAR_Q,
        REGULAR_K, SEQUSED)
    tiles = (tl.where(of_keys, k_rows, q_len) + block - 1) // block
    is_rest = index == num_sequences
    # Behind the last sequence nobody sees anything.
    work = tl.where(is_rest, -1, tl.where(of_keys, q_len, k_len))
    if SORTED:
        position = 0
        before = 0
        for start in range(0, num_sequences + 1, CHUNK):
            other = start + tl.arange(0, CHUNK)
            _, other_q, _, other_k, other_rows = _lengths(
                cu_seqlens_q, cu_seqlens_k, seqused_k, other, num_sequences, seqlen_q, seqlen_k, total_q, total_k,
                REGULAR_Q, REGULAR_K, SEQUSED)
            other_tiles = (tl.where(of_keys, other_rows, other_q) + block - 1) // block
            other_work = tl.where(other == num_sequences, -1, tl.where(of_keys, other_q, other_k))
            earlier = (other_work > work) | ((other_work == work) & (other < index))
            earlier = earlier & (other <= num_sequences)
            position += tl.sum(tl.where(earlier, other_tiles, 0), 0)
            before += tl.sum(earlier.to(tl.int32), 0)
        end = tl.where(before == num_sequences, slots, position + tiles)
    else:
        start = tl.where(of_keys, k_start, q_start)
        length = tl.where(of_keys, k_rows, q_len)
        position = start // block + index
        end = tl.where(is_rest, slots, (start + length) // block + index + 1)

    statistics_start = (q_start // STATISTICS_ALIGNMENT + index) * STATISTICS_ALIGNMENT
    # No query sees a key past the last one, and there is none for the keys past it.
    q_start = tl.where(of_keys & is_rest, 0, q_start)
    q_len = tl.where(of_keys & is_rest, 0, q_len)
    for start in range(position, end, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        number = slot - position
        used = number < tiles
        tile = number
        if REVERSED:
            tile = tl.where(of_keys, number, tiles - 1 - number)
        inside = (slot < end) & (slot < slots)  # lengths that overlap would make more tiles than there is room for
        entry = entries + (first_slot + slot) * ENTRY
        tl.store(entry, tl.where(used, tile, 0), mask=inside)
        tl.store(entry + 1, tl.where(used, q_start, 0), mask=inside)
        tl.store(entry + 2, tl.where(used, q_len, 0), mask=inside)
        tl.store(entry + 3, tl.where(used, k_start, 0), mask=inside)
        tl.store(entry + 4, tl.where(used, k_len, 0), mask=inside)
        tl.store(entry + 5, tl.where(used, k_rows, 0), mask=inside)
        tl.store(entry + 6, tl.where(used & (index < num_sequences), index, 0), mask=inside)
        tl.store(entry + 7, tl.where(used, statistics_start, 0), mask=inside)
