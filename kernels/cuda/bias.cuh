// A float mask [batch, head, query, key] in the tiles of which it is not all zeros: the copy engine brings it to shared
// memory beside the keys, and each thread reads it in the layout of its scores.
//
// In shared memory a tile is a row of boxes of 128 bytes a row, swizzled as all tiles are (tma.cuh). A mask with one
// row for all queries (BIAS_PER_KEY) is one row in each box, which begins where the swizzle changes nothing. Of 16 bits
// (of the query's type) or 32 (float32).
#pragma once
#include "wgmma.cuh"

constexpr int BIAS_ROWS = BIAS_PER_KEY ? 1 : BLOCK_M;
constexpr int BIAS_COLUMNS = 128 / BIAS_BYTES;  // of a box
constexpr int BIAS_BOXES = ceil_div(BLOCK_N, BIAS_COLUMNS);
constexpr int BIAS_BOX_BYTES = BIAS_PER_KEY ? 1024 : BLOCK_M * BOX_ROW_BYTES;
constexpr int BIAS_TILE_BYTES = BIAS_BOXES * BIAS_BOX_BYTES;
static_assert(BLOCK_N % BIAS_COLUMNS == 0);

// By one thread. Counts on `barrier`. What lies outside of the mask arrives as zeros.
__device__ __forceinline__ void load_bias(const TensorMap& map, uint32_t destination, uint32_t barrier, int first_key,
                                          int row, int head, int batch) {
  barrier_arrive_expect(barrier, BIAS_BOXES * BIAS_ROWS * BOX_ROW_BYTES);
#pragma unroll
  for (int box = 0; box < BIAS_BOXES; ++box)
    load_box(map, destination + box * BIAS_BOX_BYTES, barrier, first_key + box * BIAS_COLUMNS, row, head, batch);
}

// Calls use(i, x) for this thread's elements of a tile, x in natural units for score i; `first_row`: of the warp's 16
// rows within the tile. By whole warps. What lies past the last key is 0.
template <class Use>
__device__ __forceinline__ void read_bias(uint32_t tile, int first_row, const Use& use) {
  const int lane = threadIdx.x % 32;
  if constexpr (BIAS_BYTES == 2) {
    // Four 8x8 matrices at a time, which arrive in the layout of an accumulator: rows 0 to 7 and 8 to 15 of two groups
    // of 8 columns, or, with one row for all queries, that row of four groups.
#pragma unroll
    for (int group = 0; group < BLOCK_N / 8; group += BIAS_PER_KEY ? 4 : 2) {
      uint32_t pairs[4];
      load_matrices(pairs, BIAS_PER_KEY ? tile + group / 8 * BIAS_BOX_BYTES + (group % 8 + lane / 8) * 16
                                        : chunk_address<BLOCK_M>(tile, first_row + lane % 16, group + lane / 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = unpack(pairs[i]);
        const int at = 4 * (group + (BIAS_PER_KEY ? i : i / 2)) + (BIAS_PER_KEY ? 0 : 2 * (i % 2));
        use(at, x.x);
        use(at + 1, x.y);
        if (BIAS_PER_KEY) use(at + 2, x.x);
        if (BIAS_PER_KEY) use(at + 3, x.y);
      }
    }
  } else {
#pragma unroll
    for (int group = 0; group < BLOCK_N / 8; ++group) {
      // Two neighbours: half of a chunk of 16 bytes.
      const int chunk = group % 4 * 2 + lane % 4 / 2, within = lane % 2 * 8;
#pragma unroll
      for (int half = 0; half < (BIAS_PER_KEY ? 1 : 2); ++half) {
        const int row = BIAS_PER_KEY ? 0 : first_row + lane / 4 + 8 * half;
        const float2 x =
            read_two(tile + group / 4 * BIAS_BOX_BYTES + row * BOX_ROW_BYTES + ((chunk ^ row) % 8 << 4) + within);
        const int at = 4 * group + 2 * half;
        use(at, x.x);
        use(at + 1, x.y);
        if (BIAS_PER_KEY) use(at + 2, x.x);
        if (BIAS_PER_KEY) use(at + 3, x.y);
      }
    }
  }
}

// Hides what lies past the last key, `last_key` counted from the tile's first.
__device__ __forceinline__ void hide_past(float (&scores)[BLOCK_N / 2], int last_key) {
  if (last_key < BLOCK_N - 1) mask(scores, last_key, last_key, threadIdx.x % 4);
}

// Scores become natural, with the mask added. What it hides is hidden whatever the score, which may be NaN.
__device__ __forceinline__ void add_bias(float (&scores)[BLOCK_N / 2], float softmax_scale, uint32_t tile,
                                         int first_row, int last_key) {
  read_bias(tile, first_row, [&](int i, float bias) {
    scores[i] = bias == -INFINITY_F ? -INFINITY_F : fmaf(scores[i], softmax_scale, bias);
  });
  hide_past(scores, last_key);
}
