// FLOAT_MASK: what tiles of a mask of 16-bit numbers hold, in the backward. Part of backward_mask.cuh.
//
// The lowest finite number hides a score only in a row that has a larger number somewhere (elsewhere probabilities are
// uniform); as in bias_lists.cuh, "larger" is certain of a number above -2. Blocks of flash_mask_bits that come before
// those of tiles look for one in each row of a query tile, mostly among its first keys.
//
// A tile of a dense bias is known by FEW_ROWS of its rows, and others are not read.
#pragma once

constexpr uint32_t HIDDEN_NUMBER = IS_BF16 ? 0xFF80 : 0xFC00, LOWEST_NUMBER = IS_BF16 ? 0xFF7F : 0xFBFF;

// What one thread has found of 16 keys of a row.
struct Found {
  int content;
  uint32_t zeros;  // a bit for each key
};

// Eight keys of a row, of which `count` are the mask's, -infinity in the place of others.
__device__ __forceinline__ uint4 load_numbers(const uint8_t* address, int count) {
  if (count >= 8) return load_eight(address);
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = HIDDEN_NUMBER * 0x10001;
    if (2 * i < count) words[i] = HIDDEN_NUMBER << 16 | __ldg((const unsigned short*)address + 2 * i);
    if (2 * i + 1 < count)
      words[i] = (words[i] & 0xFFFF) | (uint32_t)__ldg((const unsigned short*)address + 2 * i + 1) << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}

__device__ __forceinline__ Found look_at(const uint4& first, const uint4& second) {
  const uint32_t words[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
  uint32_t any = 0, all = 0xFFFFFFFF;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    any |= words[i];
    all &= words[i];
  }
  // Mostly all are the same; 0 and -0 are.
  if ((any & 0x7FFF7FFF) == 0) return {SOME_SEEN, 0xFFFF};
  if (any == all && any == HIDDEN_NUMBER * 0x10001) return {SOME_HIDDEN, 0};
  if (any == all && any == LOWEST_NUMBER * 0x10001) return {SOME_LOWEST, 0};
  Found found{0, 0};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const uint32_t x = words[i / 2] >> 16 * (i % 2) & 0xFFFF;
    const bool is_zero = (x & 0x7FFF) == 0;
    found.content |= is_zero              ? SOME_SEEN
                     : x == HIDDEN_NUMBER ? SOME_HIDDEN
                     : x == LOWEST_NUMBER ? SOME_LOWEST
                                          : SOME_OTHER;
    found.zeros |= (uint32_t)is_zero << i;
  }
  return found;
}

constexpr int ROWS_AT_ONCE = BITS_THREADS / 8, TURNS_OF_ROWS = BLOCK_M / ROWS_AT_ONCE;  // eight threads share a row
constexpr int FEW_ROWS = 8;
static_assert(FEW_ROWS <= ROWS_AT_ONCE && BLOCK_M % ROWS_AT_ONCE == 0);

__device__ __forceinline__ const uint8_t* mask_of(int plane, const BitsParams& params) {
  return params.mask.mask + 2 * (plane / params.mask_heads * params.mask.stride_batch +
                                 plane % params.mask_heads * params.mask.stride_head);
}

// Of a query tile: 16 keys from `key` on of this thread's row of turn `turn`. `mask`: of the plane. Rows past the end,
// whose probabilities are zero anyway, see what the last one sees.
__device__ __forceinline__ void load_turn(uint4 (&x)[2], const uint8_t* mask, int q_tile, int turn, int key,
                                          const BitsParams& params) {
  const int row = min(q_tile * BLOCK_M + turn * ROWS_AT_ONCE + (int)threadIdx.x / 8, params.mask_rows - 1);
  const uint8_t* keys = mask + 2 * (row * params.mask.stride_row + key);
  x[0] = load_numbers(keys, params.seqlen_k - key);
  x[1] = load_numbers(keys + 16, params.seqlen_k - key - 8);
}

// Is one of 16 numbers certain to be larger than the lowest one?
__device__ __forceinline__ bool has_larger(const uint4 (&x)[2]) {
  const uint32_t all = x[0].x & x[0].y & x[0].z & x[0].w & x[1].x & x[1].y & x[1].z & x[1].w;
  return (~all & 0xC000C000) != 0;
}

// Says whether each row of a query tile of a plane has a number that is certain to be larger than the lowest one. By a
// block, of which each warp looks at four rows at a time. Inlined, it would take registers of blocks of tiles.
__device__ __noinline__ void look_for_larger(const BitsParams& params, int plane, int q_tile) {
  const uint8_t* mask = mask_of(plane, params);
  bool in_all = true;
#pragma unroll 1
  for (int turn = 0; turn < TURNS_OF_ROWS; ++turn) {
    bool found = false;
#pragma unroll 1
    for (int k_tile = 0; k_tile < params.k_tiles && !__all_sync(0xFFFFFFFF, found); ++k_tile) {
      uint4 x[2];
      load_turn(x, mask, q_tile, turn, k_tile * BLOCK_N + threadIdx.x % 8 * 16, params);
      const uint32_t lanes = __ballot_sync(0xFFFFFFFF, has_larger(x));
      found |= (lanes >> threadIdx.x % 32 / 8 * 8 & 0xFF) != 0;
    }
    in_all &= found;
  }
  in_all = __syncthreads_and(in_all);
  if (threadIdx.x == 0) params.lowest_hides[(int64_t)plane * params.mask_q_tiles + q_tile] = in_all;
}

extern "C" __global__ void __launch_bounds__(BITS_THREADS) flash_mask_bits(const __grid_constant__ BitsParams params) {
  __shared__ RowBits rows;
  __shared__ uint32_t content;
  const int query_tiles = params.num_lists / params.k_tiles * params.mask_q_tiles;  // of all planes
  const int number = (int)blockIdx.x - query_tiles;
  if (number < 0) return look_for_larger(params, blockIdx.x / params.mask_q_tiles, blockIdx.x % params.mask_q_tiles);
  const int k_tile = number % params.k_tiles, q_tile = number / params.k_tiles % params.mask_q_tiles;
  const int plane = number / params.k_tiles / params.mask_q_tiles;
  const int64_t tile = ((int64_t)plane * params.k_tiles + k_tile) * params.mask_q_tiles + q_tile;
  const uint8_t* mask = mask_of(plane, params);
  const int piece = threadIdx.x % 8, key = k_tile * BLOCK_N + 16 * piece;
  const bool is_first = threadIdx.x < 8 * FEW_ROWS;
  uint4 x[TURNS_OF_ROWS][2];
  bool has_other = false;
  if (is_first) {
    load_turn(x[0], mask, q_tile, 0, key, params);
    has_other = look_at(x[0][0], x[0][1]).content & SOME_OTHER;
  }
  if (threadIdx.x == 0) content = 0;
  if (__syncthreads_or(has_other)) {  // further rows do not change that
    if (threadIdx.x == 0) params.contents[tile] = SOME_OTHER;
    return;
  }
  if (!is_first) load_turn(x[0], mask, q_tile, 0, key, params);
#pragma unroll
  for (int i = 1; i < TURNS_OF_ROWS; ++i) load_turn(x[i], mask, q_tile, i, key, params);
  int contents = 0;
#pragma unroll
  for (int i = 0; i < TURNS_OF_ROWS; ++i) {
    const Found found = look_at(x[i][0], x[i][1]);
    contents |= found.content;
    rows[i * ROWS_AT_ONCE + threadIdx.x / 8][piece] = found.zeros;
  }
  contents = __reduce_or_sync(0xFFFFFFFF, contents);
  if (threadIdx.x % 32 == 0) atomicOr(&content, contents);
  __syncthreads();
  if (threadIdx.x == 0) params.contents[tile] = content;
  if (content & SOME_SEEN && content & (SOME_HIDDEN | SOME_LOWEST) && !(content & SOME_OTHER))
    write_bits(params.bits + tile * MASK_WORDS, rows);
}

// How a tile is visited, or -1 where it is not.
__device__ __forceinline__ int kind_of(int content, bool lowest_hides) {
  if (content & SOME_OTHER || (content & SOME_LOWEST && !lowest_hides)) return VALUES;
  return content == SOME_SEEN ? FULL : content & SOME_SEEN ? BITS : -1;
}
