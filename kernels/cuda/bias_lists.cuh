// What mask_lists.cuh asks of a float mask: what pieces of 16 bytes hold, and which rows have more than the lowest
// finite number.
//
// A tile of that number matters only to a row that has nothing larger: there probabilities are uniform, elsewhere they
// are exp(lowest - larger) = 0. "Larger" is a bit test, certain of an element whose sign or whose exponent's highest
// bit is 0: one above -2. (In float16, where the lowest number is -65504, this takes scores to differ by less than
// 65,000 within a row.)
#pragma once
#include "registers.cuh"

// Words full of one element, and the two bits of each that a larger number does not have both.
constexpr uint32_t SIGNS = BIAS_BYTES == 2 ? 0x80008000 : 0x80000000;
constexpr uint32_t HIGH_BITS = BIAS_BYTES == 2 ? 0xC000C000 : 0xC0000000;
constexpr uint32_t HIDDEN_WORD = BIAS_BYTES == 4 ? 0xFF800000 : IS_BF16 ? 0xFF80FF80 : 0xFC00FC00;
constexpr uint32_t LOWEST_WORD = BIAS_BYTES == 4 ? 0xFF7FFFFF : IS_BF16 ? 0xFF7FFF7F : 0xFBFFFBFF;

// 16 bytes of a row, of which `count` elements, at least one, are the mask's; the first stands for those that are not.
__device__ __forceinline__ uint4 load_piece(const uint8_t* address, int count) {
  if (count >= PIECE) return load_eight(address);
  uint32_t words[4];
  const uint32_t first =
      BIAS_BYTES == 4 ? __ldg((const uint32_t*)address) : (uint32_t)__ldg((const unsigned short*)address) * 0x10001;
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = first;
#pragma unroll
  for (int i = 1; i < PIECE; ++i) {
    if (i >= count) continue;
    if constexpr (BIAS_BYTES == 4) {
      words[i] = __ldg((const uint32_t*)address + i);
    } else {
      const uint32_t x = __ldg((const unsigned short*)address + i);
      words[i / 2] = i % 2 ? (words[i / 2] & 0xFFFF) | x << 16 : (words[i / 2] & 0xFFFF0000) | x;
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

// What elements hold whose words' or and and these are: of one kind only where all are equal.
__device__ __forceinline__ int content_of_words(uint32_t any, uint32_t all) {
  if ((any & ~SIGNS) == 0) return SOME_SEEN;  // 0 and -0
  if (any != all) return SOME_OTHER;
  return any == HIDDEN_WORD ? SOME_HIDDEN : any == LOWEST_WORD ? SOME_LOWEST : SOME_OTHER;
}

// Writes what all pieces of some rows hold. Returns whether this thread has met the lowest number.
__device__ __forceinline__ bool look_at_pieces(uint8_t* pieces, const uint8_t* mask, int64_t row_bytes, int rows,
                                               int seqlen_k) {
  const int num_pieces = ceil_div(seqlen_k, PIECE), lane = threadIdx.x % 32;
  bool any_lowest = false;
  for (int first = threadIdx.x - lane; first < num_pieces; first += LIST_THREADS) {
    // A lane past the end looks at the last piece with its neighbour.
    const int piece = min(first + lane, num_pieces - 1), count = seqlen_k - piece * PIECE;
    uint32_t any = 0, all = 0xFFFFFFFF;
#pragma unroll 1
    for (int row = 0; row < rows; row += ROWS_AT_ONCE) {
      uint4 x[ROWS_AT_ONCE];
#pragma unroll
      for (int i = 0; i < ROWS_AT_ONCE; ++i)
        x[i] = load_piece(mask + min(row + i, rows - 1) * row_bytes + 16 * piece, count);
#pragma unroll
      for (int i = 0; i < ROWS_AT_ONCE; ++i) {
        any |= x[i].x | x[i].y | x[i].z | x[i].w;
        all &= x[i].x & x[i].y & x[i].z & x[i].w;
      }
      // Further rows do not change that.
      if (__all_sync(0xFFFFFFFF, content_of_words(any, all) == SOME_OTHER)) break;
    }
    const int content = content_of_words(any, all);
    any_lowest |= content == SOME_LOWEST;
    // A tile that ends past the last key is not full: those are visited without a look at where keys end.
    pieces[piece] = count < PIECE ? content | SOME_HIDDEN : content;
  }
  return any_lowest;
}

// Has each of the rows that this warp looks at, every 16th, a number that is certain to be larger than the lowest one?
__device__ __forceinline__ bool rows_have_larger(const uint8_t* mask, int64_t row_bytes, int rows, int seqlen_k) {
  constexpr int WARPS = LIST_THREADS / 32, ROWS = ceil_div(BLOCK_M, WARPS);
  const int num_pieces = ceil_div(seqlen_k, PIECE), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t found = 0;
#pragma unroll 1
  for (int first = 0; first < num_pieces && found != (1u << ROWS) - 1; first += 32) {
    const int piece = min(first + lane, num_pieces - 1), count = seqlen_k - piece * PIECE;
    uint4 x[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
      x[i] = load_piece(mask + min(warp + WARPS * i, rows - 1) * row_bytes + 16 * piece, count);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const uint32_t words[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
      bool larger = false;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t lacking = ~words[j] & HIGH_BITS;
        larger |= lacking != 0;
      }
      if (__any_sync(0xFFFFFFFF, larger)) found |= 1u << i;
    }
  }
  return found == (1u << ROWS) - 1;
}
