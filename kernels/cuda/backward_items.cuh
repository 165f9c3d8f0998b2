// FUSED: one kernel does all of the backward. Its work is a list of items of three kinds, which blocks take in order
// from a counter:
//
//   PREPARE: statistics of some query tiles of a key head's queries, and zeros for their sums
//   COMPUTE: a tile of keys, as without FUSED
//   FINISH:  the sums of some query tiles, scaled and rounded, become grad_query
//
// Key heads, in groups that fill the multiprocessors: while a group computes, the next is prepared and the one before
// finished, so that the sums are still in L2, and grad_out already, and the memory-bound items run beside the others.
//
// A number for each key head counts what has been done of it, in this order: `chunks` items prepared, k_tiles *
// CONSUMERS shares of the tiles of keys added, `chunks` items finished. COMPUTE waits for the first, FINISH for the
// second; both are of lower numbers in the list, so that some block has begun them, and they wait in turn for lower
// ones only: the lowest unfinished item never waits, and nothing can hang. The last item of a head leaves its number at
// zero. The sums of a head take the slot of those of an earlier one, whose parts have been finished by then: a second
// number for each head and chunk counts the blocks that have finished it, and then those that have seen so. Part of
// backward.cuh; backward_fused.cuh does what is not COMPUTE.
#pragma once

// By the list: row 0 prepares groups 0 and 1 and computes group 0; row r prepares group r + 1, computes group r and
// finishes group r - 1. The last row only finishes.
__device__ __forceinline__ Item fused_item_at(int number, const BackwardParams& params) {
  const int heads = params.batch * params.num_kv_heads, group = params.heads_per_group, chunks = params.chunks;
  // The heads before a group, and the items before a row.
  const auto first_head = [&](int of_group) { return min(max(of_group, 0) * group, heads); };
  const auto first_item = [&](int row) {
    return row == 0 ? 0 : (first_head(row + 1) + first_head(row - 1)) * chunks + first_head(row) * params.k_tiles;
  };
  int row = number / (group * (2 * chunks + params.k_tiles));
  while (first_item(row + 1) <= number) ++row;  // rows are shorter where groups are missing
  number -= first_item(row);

  int first = row == 0 ? 0 : first_head(row + 1), count = first_head(row + 2) - first;
  if (number < count * chunks) return {PREPARE, first + number / chunks, number % chunks};
  number -= count * chunks;
  first = first_head(row);
  count = first_head(row + 1) - first;
  if (number < count * params.k_tiles) {
    // Causal: the first keys, which most queries see, come first.
    if (IS_CAUSAL) return {COMPUTE, first + number % count, number / count};
    return {COMPUTE, first + number / params.k_tiles, number % params.k_tiles};
  }
  number -= count * params.k_tiles;
  return {FINISH, first_head(row - 1) + number / chunks, number % chunks};
}

// What must have been done of a head before an item of this kind.
__device__ __forceinline__ int done_before(Kind kind, const BackwardParams& params) {
  return BLOCKS_OF_CLUSTER * (params.chunks + (kind == FINISH ? params.k_tiles * CONSUMERS : 0));
}
__device__ __forceinline__ int* done_of(const Work& work, const BackwardParams& params) {
  return params.semaphores + (work.batch * params.num_kv_heads + work.kv_head);
}
// By the thread that loads the statistics.
__device__ __forceinline__ void wait_until_prepared(const Work& work, const BackwardParams& params) {
  semaphore_wait_least(done_of(work, params), done_before(COMPUTE, params));
}
// By one thread, once `count` shares of a tile of keys have been added. A tile that no query sees must
// not be counted before the preparations.
__device__ __forceinline__ void count_added(const Work& work, int count, const BackwardParams& params) {
  if (work.tiles(params) == 0) wait_until_prepared(work, params);
  semaphore_add(done_of(work, params), count);
}
