// A bool mask [batch, head, query, key], one byte an element, and the lists that say which key tiles it leaves to
// visit.
//
// Of the key tiles of a query tile those that no row sees are in no list, those that every row sees whole come first,
// and those of which some rows see some keys, "mixed", come last. mask_lists.cuh makes the lists:
//   [number of full tiles, number of all tiles, the full tiles ascending, the mixed tiles descending]
// Descending, because biases that favour near keys (ALiBi) mostly grow towards the last key that is seen: the maximum
// then comes first, and no later tile raises it.
// None is empty: where no row sees a key the list holds tile 0, of which the mask then hides everything, so that nobody
// has to know a query tile without keys.
#pragma once
#include "registers.cuh"

// Mirrored by masks.py. Strides in elements, 0 where the mask is broadcast.
struct MaskParams {
  const uint8_t* mask;
  int* lists;
  int64_t stride_batch, stride_head, stride_row, stride_key;
  int64_t list_stride_batch, list_stride_head, list_stride_tile;
  int access;  // how 16 keys of a row are read, one of the following
  int unused;
};
enum Access {
  STRIDED = 0,
  DENSE = 1,
  ALIGNED = 2
};  // key by key; as words of 4 bytes; as 16 bytes at an address of 16

// The key tiles that one query tile visits, in their order.
struct KeyList {
  const int* entries;
  int full, visited;

  __device__ __forceinline__ KeyList(const MaskParams& params, int batch, int head, int tile) {
    const int* list = params.lists + batch * params.list_stride_batch + head * params.list_stride_head +
                      tile * params.list_stride_tile;
    full = list[0];
    visited = list[1];
    entries = list + 2;
  }
  // Both numbers in one word, which is not 0.
  __device__ __forceinline__ int counts() const { return full << 16 | visited; }
  // What follows the last is not used.
  __device__ __forceinline__ int operator[](int position) const { return position < visited ? entries[position] : 0; }
};

// The 16 keys of a row from `key` on, a byte each, 0 for those past the end. What lies behind the row's end is not
// read: it may be behind the mask's.
template <Access ACCESS>
__device__ __forceinline__ uint4 load_keys(const MaskParams& params, const uint8_t* row, int key, int seqlen_k) {
  const int count = seqlen_k - key;
  if constexpr (ACCESS == ALIGNED) {
    uint4 x = {0, 0, 0, 0};
    if (count > 0) x = load_eight(row + key);
    return x;
  }
  uint32_t words[5] = {0, 0, 0, 0, 0};
  if constexpr (ACCESS == DENSE) {
    const uint64_t address = (uint64_t)(row + key);
    const int before = address % 4;  // bytes of the first word that belong to earlier keys
    const uint32_t* first = (const uint32_t*)(address - before);
    const int bytes = before + count;  // from there to the row's end
    uint32_t last = 0;                 // the word that the end cuts
    if (count > 0 && bytes < 20) {
      const uint8_t* rest = (const uint8_t*)(first + bytes / 4);
#pragma unroll
      for (int i = 0; i < 3; ++i)
        if (i < bytes % 4) last |= (uint32_t)__ldg(rest + i) << 8 * i;
    }
#pragma unroll
    for (int i = 0; i < 5; ++i)
      if (count > 0 && 4 * i < min(bytes, before + 16)) words[i] = 4 * i + 4 <= bytes ? __ldg(first + i) : last;
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], 8 * before);
  } else {
    const uint8_t* first = row + key * params.stride_key;
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (i < count) words[i / 4] |= (uint32_t)__ldg(first + i * params.stride_key) << 8 * (i % 4);
  }
  return {words[0], words[1], words[2], words[3]};
}

// The highest bit of each byte that is not 0.
__device__ __forceinline__ uint32_t nonzero_bytes(uint32_t x) {
  return (((x & 0x7F7F7F7F) + 0x7F7F7F7F) | x) & 0x80808080;
}

// What this thread's two rows see of a tile of N keys, up to 128: a bit for each of its scores, bit 8 (2 (g % 2) + e) +
// g / 2 of bits[half] for column 8 g + 2 (lane % 4) + e of row `half`.
template <int N>
struct Seen {
  uint32_t bits[2];

  // `mask` is that of the batch and head; `row` the first of the two, 8 apart. By whole warps.
  __device__ __forceinline__ Seen(const MaskParams& params, const uint8_t* mask, int row, int first_key, int seqlen_q,
                                  int seqlen_k)
      : bits{0, 0} {
    // A lane reads 16 of 64 keys: two groups of 8, of which each lane of the quad needs two keys a group.
    constexpr int PARTS = ceil_div(N, 64);
    const int quad_lane = threadIdx.x % 4, key = first_key + 16 * quad_lane;
    uint4 x[2][PARTS];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Rows past the end are not written; they see what the last one sees.
      const uint8_t* keys = mask + min(row + 8 * half, seqlen_q - 1) * params.stride_row;
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        if (params.access == ALIGNED)
          x[half][part] = load_keys<ALIGNED>(params, keys, key + 64 * part, seqlen_k);
        else if (params.access == DENSE)
          x[half][part] = load_keys<DENSE>(params, keys, key + 64 * part, seqlen_k);
        else
          x[half][part] = load_keys<STRIDED>(params, keys, key + 64 * part, seqlen_k);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const uint4& y = x[half][part];
        uint32_t pairs[4] = {__byte_perm(y.x, y.z, 0x5410), __byte_perm(y.x, y.z, 0x7632),
                             __byte_perm(y.y, y.w, 0x5410), __byte_perm(y.y, y.w, 0x7632)};
        quad_transpose(pairs, quad_lane);
#pragma unroll
        for (int i = 0; i < 4; ++i) bits[half] |= nonzero_bytes(pairs[i]) >> (7 - (4 * part + i));
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
