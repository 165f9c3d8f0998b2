// A bool mask in the backward: which query tiles a tile of keys visits, and what its threads see of a mixed one.
//
// Two kernels read the mask once, for its own batches and heads ("planes"), before the others run:
//   flash_mask_bits, one block for each tile of BLOCK_M queries and BLOCK_N keys: nothing seen, all seen ("full"), or
//     some ("mixed"); of a mixed tile a bit for each element, in the order in which the threads of the main kernel hold
//     their scores: a word of 32 for each thread and part of the tile, so that the mask of a tile costs a copy of 1 or
//     2 KB beside the tile's queries, and a thread one word and two selects a score
//   flash_mask_query_lists, one warp for each tile of keys: its query tiles from the last to the first, without those
//     that see nothing:  [count, entries ..., LIST_END]
// An entry says the query tile, whether it is mixed, and how many tiles of earlier keys visit the same query tile, for
// whom the deterministic mode waits. A mask with one row for all queries has the bits of one query tile.
#pragma once
#include "mask.cuh"

// Of the two kernels; mirrored by masks.py.
struct BitsParams {
  MaskParams mask;            // `lists`: [planes, k_tiles, 2 + q_tiles]
  uint32_t* bits;             // [planes, k_tiles, mask_q_tiles, MASK_WORDS], written for mixed tiles
  uint32_t* larger;  // FLOAT_MASK: [planes, k_tiles, mask_q_tiles, BLOCK_M / 32], a bit for each row
  uint8_t* contents;          // [planes, k_tiles, mask_q_tiles]
  int mask_heads, mask_rows;  // the mask's own, 1 where it is broadcast
  int seqlen_k, k_tiles;
  int q_tiles, mask_q_tiles;  // of the call, and those that have bits of their own
  int num_lists, unused;
};

constexpr int MASK_WORDS = BLOCK_M * BLOCK_N / 32;
constexpr int MASK_BYTES = 4 * MASK_WORDS;
constexpr int BITS_THREADS = 2 * BLOCK_N;  // those of the consumers: a word each for each 64 queries
constexpr int LIST_WARPS = 4;
static_assert(STEP_M == 64, "a word holds a thread's scores");
static_assert(BLOCK_N == 128, "eight threads read a row of keys");

constexpr int LIST_END = -1;  // no entry: it would be of query tile 65,535
#if FLOAT_MASK
// Any of: zeros; minus infinities and keys past the end; the lowest finite number; other numbers.
enum Content { ZEROS = 1, HIDDEN = 2, LOWEST = 4, OTHERS = 8 };
#else
enum Content { SOME_SEEN = 1, SOME_HIDDEN = 2, MIXED = SOME_SEEN | SOME_HIDDEN };
#endif
// How a tile is visited: every score as it is; some hidden, by bits; with numbers added, by the copy engine.
enum Kind { FULL = 0, VALUES = 1, BITS = 2 };

__device__ __forceinline__ int entry_of(int tile, int kind, int rank) {
  return tile | rank << 16 | kind << 30;
}
__device__ __forceinline__ int entry_tile(int entry) {
  return entry & 0xFFFF;
}
__device__ __forceinline__ int entry_rank(int entry) {
  return entry >> 16 & 0x3FFF;
}
__device__ __forceinline__ int entry_kind(int entry) {
  return (uint32_t)entry >> 30;
}

using Rows = unsigned short[BLOCK_M][8];  // bits of 16 keys each

// Writes the bits of a tile in the order in which the main kernel's threads hold its scores.
__device__ __forceinline__ void write_bits(uint32_t* bits, const Rows& rows) {
  // This thread's keys are in the piece of its warp, and 8 apart.
  const int lane = threadIdx.x % 32, key_piece = threadIdx.x / 32;
#pragma unroll
  for (int part = 0; part < BLOCK_M / 64; ++part) {
    uint32_t word = 0;
#pragma unroll
    for (int group = 0; group < 8; ++group) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint32_t seen = rows[64 * part + 8 * group + 2 * (lane % 4) + e][key_piece] >> lane / 4;
        word |= (seen & 1) << (4 * group + e) | (seen >> 8 & 1) << (4 * group + 2 + e);
      }
    }
    bits[part * BITS_THREADS + threadIdx.x] = word;
  }
}

#if !FLOAT_MASK
// The lowest bit of each byte that is not 0, gathered: bit i for byte i.
__device__ __forceinline__ uint32_t four_bits(uint32_t x) {
  return (nonzero_bytes(x) >> 7) * 0x10204080u >> 28;
}

template <Access ACCESS>
__device__ __forceinline__ uint32_t sixteen_bits(const MaskParams& params, const uint8_t* row, int key, int seqlen_k) {
  const uint4 x = load_keys<ACCESS>(params, row, key, seqlen_k);
  return four_bits(x.x) | four_bits(x.y) << 4 | four_bits(x.z) << 8 | four_bits(x.w) << 12;
}

extern "C" __global__ void __launch_bounds__(BITS_THREADS) flash_mask_bits(const __grid_constant__ BitsParams params) {
  constexpr int ROWS_AT_ONCE = BITS_THREADS / 8, TURNS_OF_ROWS = BLOCK_M / ROWS_AT_ONCE;
  __shared__ Rows rows;
  const int k_tile = blockIdx.x % params.k_tiles, q_tile = blockIdx.x / params.k_tiles % params.mask_q_tiles;
  const int plane = blockIdx.x / params.k_tiles / params.mask_q_tiles;
  const uint8_t* mask = params.mask.mask + plane / params.mask_heads * params.mask.stride_batch +
                        plane % params.mask_heads * params.mask.stride_head;
  const int piece = threadIdx.x % 8, key = k_tile * BLOCK_N + 16 * piece;
  uint32_t x[TURNS_OF_ROWS];
#pragma unroll
  for (int i = 0; i < TURNS_OF_ROWS; ++i) {
    // Rows past the end, whose probabilities are zero anyway, see what the last one sees.
    const int row = min(q_tile * BLOCK_M + i * ROWS_AT_ONCE + (int)threadIdx.x / 8, params.mask_rows - 1);
    const uint8_t* keys = mask + row * params.mask.stride_row;
    if (params.mask.access == ALIGNED)
      x[i] = sixteen_bits<ALIGNED>(params.mask, keys, key, params.seqlen_k);
    else if (params.mask.access == DENSE)
      x[i] = sixteen_bits<DENSE>(params.mask, keys, key, params.seqlen_k);
    else
      x[i] = sixteen_bits<STRIDED>(params.mask, keys, key, params.seqlen_k);
  }
  uint32_t any = 0, all = 0xFFFF;
#pragma unroll
  for (int i = 0; i < TURNS_OF_ROWS; ++i) {
    any |= x[i];
    all &= x[i];
    rows[i * ROWS_AT_ONCE + threadIdx.x / 8][piece] = x[i];
  }
  // Nothing is seen of what lies past the last key.
  const int content =
      (__syncthreads_or(any != 0) ? SOME_SEEN : 0) | (__syncthreads_or(all != 0xFFFF) ? SOME_HIDDEN : 0);
  const int64_t tile = ((int64_t)plane * params.k_tiles + k_tile) * params.mask_q_tiles + q_tile;
  if (threadIdx.x == 0) params.contents[tile] = content;
  if (content == MIXED) write_bits(params.bits + tile * MASK_WORDS, rows);
}
#else
// The kind of a number of 16 bits, as a Content.
__device__ __forceinline__ int content_of(uint32_t x) {
  constexpr uint32_t INFINITE = IS_BF16 ? 0xFF80 : 0xFC00, FINITE = IS_BF16 ? 0xFF7F : 0xFBFF;
  return (x & 0x7FFF) == 0 ? ZEROS : x == INFINITE ? HIDDEN : x == FINITE ? LOWEST : OTHERS;
}

extern "C" __global__ void __launch_bounds__(BITS_THREADS) flash_mask_bits(const __grid_constant__ BitsParams params) {
  constexpr int ROWS_AT_ONCE = BITS_THREADS / 8, TURNS_OF_ROWS = BLOCK_M / ROWS_AT_ONCE;
  static_assert(ROWS_AT_ONCE == 32, "a word for the rows of a turn");
  __shared__ Rows rows;
  __shared__ uint32_t found, larger[TURNS_OF_ROWS];
  const int k_tile = blockIdx.x % params.k_tiles, q_tile = blockIdx.x / params.k_tiles % params.mask_q_tiles;
  const int plane = blockIdx.x / params.k_tiles / params.mask_q_tiles;
  const uint8_t* mask = params.mask.mask + 2 * (plane / params.mask_heads * params.mask.stride_batch +
                                                plane % params.mask_heads * params.mask.stride_head);
  const int piece = threadIdx.x % 8, key = k_tile * BLOCK_N + 16 * piece;
  if (threadIdx.x == 0) found = 0;
  if (threadIdx.x < TURNS_OF_ROWS) larger[threadIdx.x] = 0;
  __syncthreads();
  uint4 x[TURNS_OF_ROWS][2];
#pragma unroll
  for (int i = 0; i < TURNS_OF_ROWS; ++i) {
    // Rows past the end, whose probabilities are zero anyway, see what the last one sees.
    const int row = min(q_tile * BLOCK_M + i * ROWS_AT_ONCE + (int)threadIdx.x / 8, params.mask_rows - 1);
    const uint8_t* keys = mask + 2 * (row * params.mask.stride_row + key);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      x[i][half] = {0, 0, 0, 0};
      if (key + 8 * half < params.seqlen_k) x[i][half] = load_eight(keys + 16 * half);
    }
  }
  uint32_t contents = 0;
#pragma unroll
  for (int i = 0; i < TURNS_OF_ROWS; ++i) {
    const uint32_t words[8] = {x[i][0].x, x[i][0].y, x[i][0].z, x[i][0].w, x[i][1].x, x[i][1].y, x[i][1].z, x[i][1].w};
    uint32_t zeros = 0;
    bool has_larger = false;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const uint32_t number = words[j / 2] >> 16 * (j % 2) & 0xFFFF;
      const bool inside = key + j < params.seqlen_k;
      const int content = inside ? content_of(number) : HIDDEN;
      contents |= content;
      zeros |= (content == ZEROS ? 1u : 0u) << j;
      // Certain to be larger than the lowest: above -2.
      has_larger |= inside && (number & 0xC000) != 0xC000;
    }
    rows[i * ROWS_AT_ONCE + threadIdx.x / 8][piece] = zeros;
    const uint32_t lanes = __ballot_sync(0xFFFFFFFF, has_larger) >> threadIdx.x % 32 / 8 * 8 & 0xFF;
    if (piece == 0 && lanes) atomicOr(larger + i, 1u << threadIdx.x / 8);
  }
  contents = __reduce_or_sync(0xFFFFFFFF, contents);
  if (threadIdx.x % 32 == 0) atomicOr(&found, contents);
  __syncthreads();
  const int64_t tile = ((int64_t)plane * params.k_tiles + k_tile) * params.mask_q_tiles + q_tile;
  if (threadIdx.x == 0) params.contents[tile] = found;
  if (threadIdx.x < TURNS_OF_ROWS) params.larger[tile * TURNS_OF_ROWS + threadIdx.x] = larger[threadIdx.x];
  if ((found & ZEROS) && (found & (HIDDEN | LOWEST)) && !(found & OTHERS))
    write_bits(params.bits + tile * MASK_WORDS, rows);
}

// Does every row of a query tile hold a number that is larger than the lowest one, so that the lowest hides?
// `larger`: of the tile of its first keys.
__device__ __forceinline__ bool rows_have_larger(const uint32_t* larger, const BitsParams& params) {
  uint32_t all = 0xFFFFFFFF;
  for (int word = 0; word < BLOCK_M / 32; ++word) {
    uint32_t found = 0;
    for (int k_tile = 0; k_tile < params.k_tiles && found != 0xFFFFFFFF; ++k_tile)
      found |= larger[(int64_t)k_tile * params.mask_q_tiles * (BLOCK_M / 32) + word];
    all &= found;
  }
  return all == 0xFFFFFFFF;
}
#endif

// How a tile is visited, or -1.
__device__ __forceinline__ int kind_of(int content, [[maybe_unused]] bool lowest_hides) {
#if FLOAT_MASK
  if ((content & OTHERS) || ((content & LOWEST) && !lowest_hides)) return VALUES;
  return content == ZEROS ? FULL : content & ZEROS ? BITS : -1;
#else
  return content == SOME_SEEN ? FULL : content == MIXED ? BITS : -1;
#endif
}

extern "C" __global__ void __launch_bounds__(32 * LIST_WARPS) flash_mask_query_lists(
    const __grid_constant__ BitsParams params) {
  const int lane = threadIdx.x % 32, number = blockIdx.x * LIST_WARPS + threadIdx.x / 32;
  if (number >= params.num_lists) return;
  const int k_tile = number % params.k_tiles;
  const uint8_t* contents = params.contents + (int64_t)number * params.mask_q_tiles;
  int* list = params.mask.lists + (int64_t)number * (2 + params.q_tiles);
  int count = 0;
#pragma unroll 1
  for (int first = params.q_tiles - 1; first >= 0; first -= 32) {
    const int tile = first - lane, at = params.mask_q_tiles == 1 ? 0 : tile;
    int kind = -1, rank = 0;
    if (tile >= 0) {
      bool lowest_hides = false;
#if FLOAT_MASK
      const int64_t first_keys = (int64_t)(number - k_tile) * params.mask_q_tiles + at;
      if (DETERMINISTIC || (contents[at] & LOWEST))
        lowest_hides = rows_have_larger(params.larger + first_keys * (BLOCK_M / 32), params);
#endif
      kind = kind_of(contents[at], lowest_hides);
      if (DETERMINISTIC && kind >= 0) {
#pragma unroll 8
        for (int earlier = 1; earlier <= k_tile; ++earlier)
          rank += kind_of(contents[at - (int64_t)earlier * params.mask_q_tiles], lowest_hides) >= 0;
      }
    }
    const uint32_t visited = __ballot_sync(0xFFFFFFFF, kind >= 0);
    if (kind >= 0) list[1 + count + __popc(visited & ((1u << lane) - 1))] = entry_of(tile, kind, rank);
    count += __popc(visited);
  }
  if (lane == 0) {
    list[0] = count;
    list[1 + count] = LIST_END;
  }
}
