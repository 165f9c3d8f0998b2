// Dropout: the random bits of the Triton kernels (kernels/triton/dropout.py, common.py), bit for bit, so that either
// side's backward drops what either side's forward has dropped. torch_flashbackend/reference.py says the same.
//
// Philox gives each query and each key of a head a random word, which a small kernel writes to memory; MurmurHash3's
// 32-bit finaliser (Appleby, 2011) mixes the word of a query and that of a key. Queries q and q + 8 have one word and
// share its bits: the lower half decides about q, the upper half about q + 8. An element is kept where its half is not
// less than the threshold. Both are in one thread in the layout of an accumulator, whichever way the tile lies.
//
// The finaliser begins with x ^ x >> 16, and x is the exclusive or of two words: so the table holds words of which that
// has been done already ("keys"). Its last step leaves the upper half as it is, and is done for the lower half alone.
#pragma once
#include "registers.cuh"

// Rows and columns of the table are padded to this, so that no tile needs bounds in it.
constexpr int DROPOUT_PITCH = 256;

// Mirrored by dropout.py.
struct DropoutParams {
  const uint32_t* keys;  // [batch * num_heads, rows + columns]: one for each query, then one for each key, both padded
  uint32_t threshold;    // a multiple of 2^16: an element is dropped with probability threshold / 2^32
  float scale;           // of what is kept: 1 / (1 - dropout_p), or 0
};

// Where the keys of a head's queries begin, and of its keys.
__device__ __forceinline__ const uint32_t* dropout_rows(const DropoutParams& params, int64_t head, int seqlen_q,
                                                        int seqlen_k) {
  return params.keys + head * (round_up(seqlen_q, DROPOUT_PITCH) + round_up(seqlen_k, DROPOUT_PITCH));
}
__device__ __forceinline__ const uint32_t* dropout_columns(const DropoutParams& params, int64_t head, int seqlen_q,
                                                           int seqlen_k) {
  return dropout_rows(params, head, seqlen_q, seqlen_k) + round_up(seqlen_q, DROPOUT_PITCH);
}

// The bits that two queries, 8 apart, share at one key.
__device__ __forceinline__ uint32_t dropout_bits(uint32_t row_key, uint32_t column_key) {
  uint32_t x = row_key ^ column_key;
  x *= 0x85EBCA6B;
  x ^= x >> 13;
  return x * 0xC2B2AE35;
}
// Is the probability of the first query kept, q where q / 8 is even, and that of q + 8? What stands behind the half
// that decides does not reach the threshold's last bit. (Comparing two halves by one `max.u16x2` with predicates takes
// more instructions: ptxas extracts a half beside each.)
__device__ __forceinline__ bool keeps_first(uint32_t bits, uint32_t threshold) {
  return (bits << 16 ^ bits) >= threshold;
}
__device__ __forceinline__ bool keeps_second(uint32_t bits, uint32_t threshold) {
  return bits >= threshold;
}

// Philox 4x32-10 (Salmon et al., 2011): the first word of counter (c0, c1, c2, 0).
__device__ __forceinline__ uint32_t philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2) {
  uint32_t c3 = 0, k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = (uint64_t)0xD2511F53 * c0, b = (uint64_t)0xCD9E8D57 * c2;
    c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
    c1 = (uint32_t)b;
    c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
    c3 = (uint32_t)a;
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return c0;
}

// Writes the table: a thread for each key, DROPOUT_PITCH threads in a block.
struct DropoutKeysParams {
  uint32_t* keys;
  const uint64_t* seed;
  int rows, columns;  // padded
  int first_head, unused;
};
__device__ __forceinline__ void write_dropout_keys(const DropoutKeysParams& params) {
  const int blocks = (params.rows + params.columns) / DROPOUT_PITCH;
  const int head = blockIdx.x / blocks, position = blockIdx.x % blocks * DROPOUT_PITCH + threadIdx.x;
  const bool of_keys = position >= params.rows;
  // Queries q and q + 8 have one word.
  const int index = of_keys ? position - params.rows : position & ~8;
  const uint32_t word = philox(*params.seed, index, params.first_head + head, of_keys);
  params.keys[(int64_t)head * (params.rows + params.columns) + position] = word ^ word >> 16;
}
