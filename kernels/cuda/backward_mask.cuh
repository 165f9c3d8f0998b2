// A mask in the backward: which query tiles a tile of keys visits, and what its threads see of a mixed one.
//
// Two kernels read the mask once, for its own batches and heads ("planes"), before the others run:
//   flash_mask_bits, one block for each tile of BLOCK_M queries and BLOCK_N keys: nothing seen, all seen ("full"), or
//     some ("mixed"); of a mixed tile a bit for each element, in the order in which the threads of the main kernel hold
//     their scores: a word of 32 for each thread and part of the tile, so that the mask of a tile costs a copy of 1 or
//     2 KB beside the tile's queries, and a thread one word and two selects a score
//   flash_mask_query_lists, one warp for each tile of keys: its query tiles from the last to the first, without those
//     that see nothing:  [count, entries ..., LIST_END]
// An entry says the query tile, its kind, and how many tiles of earlier keys visit the same query tile, for whom the
// deterministic mode waits. A mask with one row for all queries has the bits of one query tile.
//
// FLOAT_MASK (backward_mask_float.cuh): where it only hides, by -infinity or, in a row that has a larger number, by the
// lowest finite one, it is as a bool mask. Tiles of other numbers have a kind of their own.
#pragma once
#include "mask.cuh"

// Of the two kernels; mirrored by masks.py.
struct BitsParams {
  MaskParams mask;            // `lists`: [planes, k_tiles, 2 + q_tiles]
  uint32_t* bits;             // [planes, k_tiles, mask_q_tiles, MASK_WORDS], written for mixed tiles
  uint32_t* larger;           // FLOAT_MASK: [planes, k_tiles, mask_q_tiles, BLOCK_M / 32], a bit for each row
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
// What a tile holds. Of a float mask: zeros; -infinity and what is past the last key; the lowest number; others.
enum Content { SOME_SEEN = 1, SOME_HIDDEN = 2, MIXED = SOME_SEEN | SOME_HIDDEN, SOME_LOWEST = 4, SOME_OTHER = 8 };
// How a tile is visited: with its scores as they are; with numbers of a float mask added to them; with some of them
// hidden, by bits.
enum TileKind { FULL = 0, VALUES = 1, BITS = 2 };

__device__ __forceinline__ int entry_of(int tile, int kind, int rank) {
  return tile | rank << 16 | kind << 30;
}
__device__ __forceinline__ int entry_tile(int entry) {
  return entry & 0xFFFF;
}
__device__ __forceinline__ int entry_rank(int entry) {
  return entry >> 16 & 0x7FFF;
}
__device__ __forceinline__ int entry_kind(int entry) {
  if (FLOAT_MASK) return (uint32_t)entry >> 30;  // there are no ranks
  return entry < 0 ? BITS : FULL;
}

// Bits of 16 keys each of a tile's rows.
using RowBits = unsigned short[BLOCK_M][8];

// Writes the bits of a tile in the order in which the main kernel's threads hold its scores.
__device__ __forceinline__ void write_bits(uint32_t* bits, const RowBits& rows) {
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

#if FLOAT_MASK
#include "backward_mask_float.cuh"
#else
// How a tile is visited, or -1 where it is not.
__device__ __forceinline__ int kind_of(int content) {
  return content == MIXED ? BITS : content == SOME_SEEN ? FULL : -1;
}

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
  __shared__ RowBits rows;
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
#endif

extern "C" __global__ void
    __launch_bounds__(32 * LIST_WARPS) flash_mask_query_lists(const __grid_constant__ BitsParams params) {
  const int lane = threadIdx.x % 32, number = blockIdx.x * LIST_WARPS + threadIdx.x / 32;
  if (number >= params.num_lists) return;
  const int k_tile = number % params.k_tiles;
  const uint8_t* contents = params.contents + (int64_t)number * params.mask_q_tiles;
  int* list = params.mask.lists + (int64_t)number * (2 + params.q_tiles);
  int count = 0;
#pragma unroll 1
  for (int first = params.q_tiles - 1; first >= 0; first -= 32) {
    const int tile = first - lane, at = params.mask_q_tiles == 1 ? 0 : tile;
    const int content = tile >= 0 ? contents[at] : SOME_HIDDEN;
#if FLOAT_MASK
    const bool lowest_hides = content & SOME_LOWEST && rows_have_larger(params, number / params.k_tiles, at);
    const int kind = kind_of(content, lowest_hides);
#else
    const int kind = kind_of(content);
#endif
    int rank = 0;
    if (DETERMINISTIC && kind >= 0) {
#pragma unroll 8
      for (int earlier = 1; earlier <= k_tile; ++earlier)
        rank += contents[at - (int64_t)earlier * params.mask_q_tiles] & SOME_SEEN;
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
