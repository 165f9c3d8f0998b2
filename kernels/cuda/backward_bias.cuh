// FLOAT_MASK: the mask of query tiles whose scores it changes otherwise than by hiding some, in the backward. Part of
// backward.cuh.
//
// A tile of STEP_M queries and BLOCK_N keys comes by the copy engine, in boxes of 64 keys, as soon as all have read the
// one before. A warp of its own walks the list for it: the one for queries has no registers for more, nor should it
// wait for a place for the mask. Scores have keys as rows, so that each warp of a consumer reads its 16 keys
// transposed, eight queries a matrix. MASK_PER_KEY: the mask has one row for all queries; a tile is that row, its boxes
// where the swizzle changes nothing, and a thread reads its two keys.
#pragma once

constexpr int MASK_BOX_BYTES = MASK_PER_KEY ? 1024 : STEP_M * BOX_ROW_BYTES;
constexpr int VALUES_BYTES = BLOCK_N / BOX_COLUMNS * MASK_BOX_BYTES;

// One thread: the mask of all query tiles of this kind, by `mask_map`, which has the dimensions that the mask does not
// repeat.
template <class Shared>
__device__ __forceinline__ void load_values(const TensorMap& mask_map, const Work& work, const BackwardParams& params,
                                            const Shared& shared) {
  uint32_t phase = 1;  // the place is free at first
  prefetch_map(mask_map);
  for_each_tile(work, params, [&](int head, int tile, int, int entry) {
    if (entry_kind(entry) != VALUES) return;
    const int mask_head = params.mask.plane_stride_head ? head : 0;
    const int mask_batch = params.mask.plane_stride_batch ? work.batch : 0;
#pragma unroll 1
    for (int part = 0; part < PARTS; ++part) {
      const int row = MASK_PER_KEY ? 0 : tile * BLOCK_M + part * STEP_M;
      barrier_wait(shared.values_empty(), phase);
      phase ^= 1;
      barrier_arrive_expect(shared.values_full(), BLOCK_N / BOX_COLUMNS * (MASK_PER_KEY ? 1 : STEP_M) * BOX_ROW_BYTES);
#pragma unroll
      for (int box = 0; box < BLOCK_N / BOX_COLUMNS; ++box)
        load_box(mask_map, shared.values + box * MASK_BOX_BYTES, shared.values_full(),
                 work.k_tile * BLOCK_N + box * BOX_COLUMNS, row, mask_head, mask_batch);
    }
  });
}

// The exponent of 2 of a score with a number of the mask added in natural units, in the forward's order: a score that a
// large number absorbed there is absorbed here. -infinity hides a score whatever it is.
__device__ __forceinline__ float exponent(float score, float added, float softmax_scale, float high, float low) {
  const float natural = fmaf(score, softmax_scale, added);
  return added == -INFINITY_F ? -INFINITY_F : fmaf(natural - high, LOG2E, -low);
}

// The same of this thread's scores of queries 16 i to 16 i + 15 of a part. `pairs`: matrices as
// load_matrices_transposed gives them. `statistics`: of the part's and this thread's queries.
__device__ __forceinline__ void add_pairs(float (&scores)[STEP_M / 2], int i, const uint32_t (&pairs)[4],
                                          uint32_t statistics, float softmax_scale) {
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    const uint32_t of_group = statistics + 32 * (2 * i + group);
    const float2 high = read_pair(of_group + 2 * BLOCK_M * 4), low = read_pair(of_group + 3 * BLOCK_M * 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 added = unpack(pairs[2 * group + half]);
      const int at = 4 * (2 * i + group) + 2 * half;
      scores[at] = exponent(scores[at], added.x, softmax_scale, high.x, low.x);
      scores[at + 1] = exponent(scores[at + 1], added.y, softmax_scale, high.y, low.y);
    }
  }
}

// Queries past the last one see nothing. The numbers that came for them are zeros, with which a key that the mask hides
// from all others and that is NaN would not be hidden. Their logsumexp is infinite, and they follow all others.
__device__ __forceinline__ void hide_queries_past(float (&scores)[STEP_M / 2], uint32_t statistics) {
  const uint32_t logsumexp = statistics + 2 * BLOCK_M * 4;
  // The part's last one, which decides for whole warps.
  if (read_pair(logsumexp + 32 * (STEP_M / 8 - 1) + 8 * (3 - threadIdx.x % 4)).y != INFINITY_F) return;
#pragma unroll
  for (int i = 0; i < STEP_M / 2; i += 4) {
    const float2 high = read_pair(logsumexp + 8 * i);
#pragma unroll
    for (int j = i; j < i + 4; ++j) scores[j] = (j % 2 ? high.y : high.x) == INFINITY_F ? -INFINITY_F : scores[j];
  }
}

// A part's scores become exponents of 2. `first_key`: of the warp's 16 keys within the tile. By whole warps.
template <class Shared>
__device__ __forceinline__ void add_values(float (&scores)[STEP_M / 2], const Shared& shared, uint32_t& phase,
                                           int first_key, uint32_t statistics, float softmax_scale) {
  const int lane = threadIdx.x % 32;
  barrier_wait(shared.values_full(), phase);
  phase ^= 1;
#pragma unroll
  for (int i = 0; i < STEP_M / 16; ++i) {
    uint32_t pairs[4];
    if constexpr (MASK_PER_KEY) {
      const uint32_t row =
          shared.values + first_key / BOX_COLUMNS * MASK_BOX_BYTES + (first_key % BOX_COLUMNS + lane / 4) * 2;
      pairs[0] = pairs[2] = read_half(row) * 0x10001;
      pairs[1] = pairs[3] = read_half(row + 16) * 0x10001;
    } else {
      // As in write_grad_scores.
      load_matrices_transposed(
          pairs, chunk_address<STEP_M>(shared.values, lane / 16 * 8 + lane % 8, first_key / 8 + lane / 8 % 2) +
                     i * 16 * BOX_ROW_BYTES);
    }
    add_pairs(scores, i, pairs, statistics, softmax_scale);
  }
  warp_arrive_together(shared.values_empty(), lane);
  if (!MASK_PER_KEY) hide_queries_past(scores, statistics);
}
