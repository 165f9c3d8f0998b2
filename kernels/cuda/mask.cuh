// A bool mask [batch, head, query, key], one byte an element, and the lists that say which key tiles it leaves to
// visit.
//
// Of the key tiles of a query tile those that no row sees are in no list, those that every row sees whole come first,
// and those of which some rows see some keys, "mixed", come last. kernels/triton/mask_tiles.py makes the lists:
//   [number of full tiles, number of mixed tiles, full tiles from the front ..., ... mixed tiles from the back]
#pragma once
#include "registers.cuh"

// Mirrored by forward.py. Strides in elements, 0 where the mask is broadcast.
struct MaskParams {
  const uint8_t* mask;
  const int64_t* lists;
  int64_t stride_batch, stride_head, stride_row, stride_key;
  int64_t list_stride_batch, list_stride_head, list_stride_tile;
  int list_length;  // key tiles that a list has room for
  int vectors;      // 16 keys of a row can be loaded at once: aligned, dense, and never past the row's end
};

// The key tiles that one query tile visits, in their order. There is always one: where no row sees a key it is the
// first, of which the mask then hides everything, so that nobody has to know a query tile without keys.
struct KeyList {
  const int64_t* entries;
  int full, visited, length;

  __device__ __forceinline__ KeyList(const MaskParams& params, int batch, int head, int tile) {
    const int64_t* list = params.lists + batch * params.list_stride_batch + head * params.list_stride_head +
                          tile * params.list_stride_tile;
    entries = list + 2;
    length = params.list_length;
    full = (int)list[0];
    visited = full + (int)list[1];
  }
  // Both numbers in one word; never 0.
  __device__ __forceinline__ int counts() const { return full << 16 | max(visited, 1); }
  __device__ __forceinline__ int operator[](int position) const {
    if (position >= visited) return 0;
    return (int)entries[position < full ? position : length - 1 - (position - full)];
  }
};

// What this thread's two rows see of a tile of N keys, 64 or 128: a bit for each of its scores, bit 8 (2 (g % 2) + e) +
// g / 2 of bits[half] for column 8 g + 2 (lane % 4) + e of row `half`.
template <int N>
struct Seen {
  uint32_t bits[2];

  // `mask` is that of the batch and head; `row` the first of the two, 8 apart. By whole warps.
  __device__ __forceinline__ Seen(const MaskParams& params, const uint8_t* mask, int row, int first_key, int seqlen_q,
                                  int seqlen_k)
      : bits{0, 0} {
    const int quad_lane = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Rows past the end are not written; they see what the last one sees.
      const uint8_t* keys = mask + min(row + 8 * half, seqlen_q - 1) * params.stride_row;
      if (params.vectors) {
#pragma unroll
        for (int part = 0; part < N / 64; ++part) {
          // 16 keys, two groups of 8, of which each lane of the quad needs two keys a group.
          const int key = first_key + 64 * part + 16 * quad_lane;
          uint4 x = {0, 0, 0, 0};
          if (key < seqlen_k) x = load_eight(keys + key);
          uint32_t pairs[4] = {__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632),
                               __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632)};
          quad_transpose(pairs, quad_lane);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            // The highest bit of each byte that is not 0.
            const uint32_t high = (((pairs[i] & 0x7F7F7F7F) + 0x7F7F7F7F) | pairs[i]) & 0x80808080;
            bits[half] |= high >> (7 - (4 * part + i));
          }
        }
      } else {
        const uint8_t* first = keys + (first_key + 2 * quad_lane) * params.stride_key;
        const int left = seqlen_k - first_key - 2 * quad_lane;
#pragma unroll
        for (int i = 0; i < N / 4; ++i) {
          const int group = i / 2, e = i % 2, key = 8 * group + e;
          if (key < left && first[key * params.stride_key]) bits[half] |= 1u << (8 * (2 * (group % 2) + e) + group / 2);
        }
      }
    }
  }

  __device__ __forceinline__ void hide(float (&scores)[N / 2]) const {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const int group = i / 4;
      const uint32_t bit = 1u << (8 * (2 * (group % 2) + i % 2) + group / 2);
      scores[i] = bits[i / 2 % 2] & bit ? scores[i] : -INFINITY_F;
    }
  }
};
