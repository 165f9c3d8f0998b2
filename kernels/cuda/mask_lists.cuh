// Which key tiles a mask leaves to visit: a kernel that reads the mask once and writes the lists of mask.cuh.
//
//   for each query tile of the mask's own batches and heads, one block:
//     each warp: 32 pieces of 16 bytes, all rows: the words' or and and, until every piece is known to be mixed
//     the first warp: key tiles from their pieces, into the list, full ones first, mixed ones from the last backwards
//
// A mask with one row for all queries has one list for each batch and head. bias_lists.cuh: what is different where the
// mask is of floats.
//
// Shared memory: a byte for each piece.
#pragma once
#include "mask.cuh"

// Mirrored by masks.py.
struct ListParams {
  MaskParams mask;
  int mask_heads, mask_rows;  // the mask's own, 1 where it is broadcast
  int seqlen_k, q_tiles;
};

constexpr int LIST_THREADS = 512;
constexpr int ROWS_AT_ONCE = 8;
constexpr int PIECE = 16 / (BIAS_BYTES ? BIAS_BYTES : 1);  // keys
// Of a piece, and of a key tile: elements that are True or 0; False or -infinity; the lowest finite number; others.
enum Content { SOME_SEEN = 1, SOME_HIDDEN = 2, SOME_LOWEST = 4, SOME_OTHER = 8 };

// What a key tile of BLOCK_N keys holds; nothing is seen of what lies past the end. The lowest number hides a key where
// all rows have a larger one somewhere.
__device__ __forceinline__ int content_of_tile(const uint8_t* pieces, int tile, int num_pieces, bool lowest_hides) {
  constexpr int PIECES = BLOCK_N / PIECE;
  int content = 0;
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const int piece = tile * PIECES + i;
    content |= piece < num_pieces ? pieces[piece] : SOME_HIDDEN;
  }
  if (lowest_hides && content & SOME_LOWEST) content = (content & ~SOME_LOWEST) | SOME_HIDDEN;
  return content;
}
__device__ __forceinline__ bool is_mixed(int content) {
  return content != 0 && content != SOME_SEEN && content != SOME_HIDDEN;
}

#if BIAS_BYTES
#include "bias_lists.cuh"
#else
// Writes what all pieces of some rows hold.
template <Access ACCESS>
__device__ __forceinline__ void look_at_pieces(uint8_t* pieces, const MaskParams& params, const uint8_t* mask, int rows,
                                               int seqlen_k) {
  const int num_pieces = ceil_div(seqlen_k, 16), lane = threadIdx.x % 32;
  for (int first = threadIdx.x - lane; first < num_pieces; first += LIST_THREADS) {
    const int piece = first + lane;
    uint32_t any = 0, all = 0xFFFFFFFF;
#pragma unroll 1
    for (int row = 0; row < rows; row += ROWS_AT_ONCE) {
      uint4 x[ROWS_AT_ONCE];
#pragma unroll
      for (int i = 0; i < ROWS_AT_ONCE; ++i)
        x[i] = load_keys<ACCESS>(params, mask + min(row + i, rows - 1) * params.stride_row, 16 * piece, seqlen_k);
#pragma unroll
      for (int i = 0; i < ROWS_AT_ONCE; ++i) {
        any |= x[i].x | x[i].y | x[i].z | x[i].w;
        all &= x[i].x & x[i].y & x[i].z & x[i].w;
      }
      // Bytes that differ without being 0 look hidden, and the tile mixed, which is never wrong.
      const bool mixed = any != 0 && nonzero_bytes(all) != 0x80808080;
      if (__all_sync(0xFFFFFFFF, mixed || piece >= num_pieces)) break;
    }
    if (piece < num_pieces)
      pieces[piece] = (any != 0 ? SOME_SEEN : 0) | (nonzero_bytes(all) != 0x80808080 ? SOME_HIDDEN : 0);
  }
}

#endif

extern "C" __global__ void __launch_bounds__(LIST_THREADS) flash_mask_lists(const __grid_constant__ ListParams params) {
  extern __shared__ uint8_t pieces[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int q_tile = blockIdx.x % params.q_tiles, plane = blockIdx.x / params.q_tiles;
  const int num_pieces = ceil_div(params.seqlen_k, PIECE);
  const int first_row = q_tile * BLOCK_M, rows = min(BLOCK_M, params.mask_rows - first_row);
  const int64_t offset = plane / params.mask_heads * params.mask.stride_batch +
                         plane % params.mask_heads * params.mask.stride_head + first_row * params.mask.stride_row;
#if BIAS_BYTES
  const uint8_t* mask = params.mask.mask + offset * BIAS_BYTES;
  const int64_t row_bytes = params.mask.stride_row * BIAS_BYTES;
  const bool any_lowest = look_at_pieces(pieces, mask, row_bytes, rows, params.seqlen_k);
  bool lowest_hides = false;
  if (__syncthreads_or(any_lowest))
    lowest_hides = !__syncthreads_or(!rows_have_larger(mask, row_bytes, rows, params.seqlen_k));
#else
  const uint8_t* mask = params.mask.mask + offset;
  constexpr bool lowest_hides = false;
  if (params.mask.access == ALIGNED)
    look_at_pieces<ALIGNED>(pieces, params.mask, mask, rows, params.seqlen_k);
  else if (params.mask.access == DENSE)
    look_at_pieces<DENSE>(pieces, params.mask, mask, rows, params.seqlen_k);
  else
    look_at_pieces<STRIDED>(pieces, params.mask, mask, rows, params.seqlen_k);
  __syncthreads();
#endif
  if (warp > 0) return;

  const int key_tiles = ceil_div(params.seqlen_k, BLOCK_N);
  int* list = params.mask.lists + (int64_t)blockIdx.x * (key_tiles + 2);
  int full = 0, visited = 0;
  for (int first = 0; first < key_tiles; first += 32) {
    const int tile = first + lane;
    const int content = tile < key_tiles ? content_of_tile(pieces, tile, num_pieces, lowest_hides) : 0;
    full += __popc(__ballot_sync(0xFFFFFFFF, content == SOME_SEEN));
    visited += __popc(__ballot_sync(0xFFFFFFFF, content == SOME_SEEN || is_mixed(content)));
  }
  int at_full = 0, at_mixed = visited - 1;
  const uint32_t lanes_before = (1u << lane) - 1;
  for (int first = 0; first < key_tiles; first += 32) {
    const int tile = first + lane;
    const int content = tile < key_tiles ? content_of_tile(pieces, tile, num_pieces, lowest_hides) : 0;
    const uint32_t fulls = __ballot_sync(0xFFFFFFFF, content == SOME_SEEN);
    const uint32_t mixeds = __ballot_sync(0xFFFFFFFF, is_mixed(content));
    if (content == SOME_SEEN) list[2 + at_full + __popc(fulls & lanes_before)] = tile;
    if (is_mixed(content)) list[2 + at_mixed - __popc(mixeds & lanes_before)] = tile;
    at_full += __popc(fulls);
    at_mixed -= __popc(mixeds);
  }
  if (lane == 0) {
    if (visited == 0) list[2] = 0;
    list[0] = full;
    list[1] = max(visited, 1);
  }
}
