// FLOAT_MASK: what tiles of a mask of 16-bit numbers hold, in the backward. Part of backward_mask.cuh.
//
// The lowest finite number hides a score only in a row that has a larger number somewhere (elsewhere probabilities are
// uniform); as in bias_lists.cuh, "larger" is certain of a number above -2. A bit for each row of a tile says whether
// it has one.
#pragma once

constexpr uint32_t HIDDEN_NUMBER = IS_BF16 ? 0xFF80 : 0xFC00, LOWEST_NUMBER = IS_BF16 ? 0xFF7F : 0xFBFF;

// What one thread has found of 16 keys of a row.
struct Found {
  int content;
  uint32_t zeros;  // a bit for each key
  bool larger;
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
  if ((any & 0x7FFF7FFF) == 0) return {SOME_SEEN, 0xFFFF, true};
  if (any == all && any == HIDDEN_NUMBER * 0x10001) return {SOME_HIDDEN, 0, false};
  if (any == all && any == LOWEST_NUMBER * 0x10001) return {SOME_LOWEST, 0, false};
  Found found{0, 0, false};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const uint32_t x = words[i / 2] >> 16 * (i % 2) & 0xFFFF;
    const bool is_zero = (x & 0x7FFF) == 0;
    found.content |= is_zero              ? SOME_SEEN
                     : x == HIDDEN_NUMBER ? SOME_HIDDEN
                     : x == LOWEST_NUMBER ? SOME_LOWEST
                                          : SOME_OTHER;
    found.zeros |= (uint32_t)is_zero << i;
    found.larger |= (x & 0xC000) != 0xC000;
  }
  return found;
}

extern "C" __global__ void __launch_bounds__(BITS_THREADS) flash_mask_bits(const __grid_constant__ BitsParams params) {
  constexpr int ROWS_AT_ONCE = BITS_THREADS / 8, TURNS_OF_ROWS = BLOCK_M / ROWS_AT_ONCE;
  static_assert(ROWS_AT_ONCE == 32, "a word for the rows of a turn");
  __shared__ RowBits rows;
  __shared__ uint32_t content, larger[TURNS_OF_ROWS];
  const int k_tile = blockIdx.x % params.k_tiles, q_tile = blockIdx.x / params.k_tiles % params.mask_q_tiles;
  const int plane = blockIdx.x / params.k_tiles / params.mask_q_tiles;
  const uint8_t* mask = params.mask.mask + 2 * (plane / params.mask_heads * params.mask.stride_batch +
                                                plane % params.mask_heads * params.mask.stride_head);
  const int piece = threadIdx.x % 8, key = k_tile * BLOCK_N + 16 * piece, left = params.seqlen_k - key;
  uint4 x[TURNS_OF_ROWS][2];
#pragma unroll
  for (int i = 0; i < TURNS_OF_ROWS; ++i) {
    // Rows past the end, whose probabilities are zero anyway, see what the last one sees.
    const int row = min(q_tile * BLOCK_M + i * ROWS_AT_ONCE + (int)threadIdx.x / 8, params.mask_rows - 1);
    const uint8_t* keys = mask + 2 * (row * params.mask.stride_row + key);
    x[i][0] = load_numbers(keys, left);
    x[i][1] = load_numbers(keys + 16, left - 8);
  }
  if (threadIdx.x == 0) content = 0;
  if (threadIdx.x < TURNS_OF_ROWS) larger[threadIdx.x] = 0;
  __syncthreads();
  int contents = 0;
#pragma unroll
  for (int i = 0; i < TURNS_OF_ROWS; ++i) {
    const Found found = look_at(x[i][0], x[i][1]);
    contents |= found.content;
    rows[i * ROWS_AT_ONCE + threadIdx.x / 8][piece] = found.zeros;
    // Eight lanes share a row.
    const uint32_t lanes = __ballot_sync(0xFFFFFFFF, found.larger) >> threadIdx.x % 32 / 8 * 8 & 0xFF;
    if (piece == 0 && lanes != 0) atomicOr(&larger[i], 1u << threadIdx.x / 8);
  }
  contents = __reduce_or_sync(0xFFFFFFFF, contents);
  if (threadIdx.x % 32 == 0) atomicOr(&content, contents);
  __syncthreads();
  const int64_t tile = ((int64_t)plane * params.k_tiles + k_tile) * params.mask_q_tiles + q_tile;
  if (threadIdx.x == 0) params.contents[tile] = content;
  if (threadIdx.x < TURNS_OF_ROWS) params.larger[tile * TURNS_OF_ROWS + threadIdx.x] = larger[threadIdx.x];
  if (content & SOME_SEEN && content & (SOME_HIDDEN | SOME_LOWEST) && !(content & SOME_OTHER))
    write_bits(params.bits + tile * MASK_WORDS, rows);
}

// Has each row of a query tile of a plane a number that is certain to be larger than the lowest one?
__device__ __forceinline__ bool rows_have_larger(const BitsParams& params, int plane, int q_tile) {
  constexpr int WORDS = BLOCK_M / 32;
  const uint32_t* larger = params.larger + ((int64_t)plane * params.k_tiles * params.mask_q_tiles + q_tile) * WORDS;
  uint32_t all = 0xFFFFFFFF;
#pragma unroll
  for (int word = 0; word < WORDS; ++word) {
    uint32_t found = 0;
#pragma unroll 4
    for (int k_tile = 0; k_tile < params.k_tiles && found != 0xFFFFFFFF; ++k_tile)
      found |= larger[(int64_t)k_tile * params.mask_q_tiles * WORDS + word];
    all &= found;
  }
  return all == 0xFFFFFFFF;
}

// How a tile is visited, or -1 where it is not.
__device__ __forceinline__ int kind_of(int content, bool lowest_hides) {
  if (content & SOME_OTHER || (content & SOME_LOWEST && !lowest_hides)) return VALUES;
  return content == SOME_SEEN ? FULL : content & SOME_SEEN ? BITS : -1;
}
