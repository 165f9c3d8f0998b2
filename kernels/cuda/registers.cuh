// Registers: how many a warpgroup may hold, 16-bit pairs, and exchanges within a quad of lanes.
#pragma once
#include "types.cuh"

template <int COUNT>
__device__ __forceinline__ void registers_release() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void registers_claim() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// The same value in all lanes of a warp, and the compiler knows it: it can live in uniform registers.
__device__ __forceinline__ int uniform(int x) {
  return __shfl_sync(0xFFFFFFFF, x, 0);
}

// The same value, but what depends on it stays where it is: the compiler computes it anew rather than before a loop,
// where it would take registers all the time.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("mov.b32 %0, %0;" : "+r"(x));
  return x;
}

// Two float32 rounded to 16 bits, `low` in the lower half.
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t pair;
#if IS_BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}

// A word of four bytes that the digits of `order` name, the lowest first: 0 to 3 of `low`, 4 to 7 of `high`, and with 8
// added that byte's sign eight times.
__device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high, uint32_t order) {
  uint32_t word;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(low), "r"(high), "r"(order));
  return word;
}

// The smaller ones of two pairs of 16-bit numbers without sign.
__device__ __forceinline__ uint32_t smaller_halves(uint32_t x, uint32_t y) {
  uint32_t pair;
  asm("min.u16x2 %0, %1, %2;" : "=r"(pair) : "r"(x), "r"(y));
  return pair;
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFF, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFF, x, 2);
}

// Words and vectors in shared and global memory.
__device__ __forceinline__ void write_word(uint32_t address, int word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}
__device__ __forceinline__ int read_word(uint32_t address) {
  int word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}
// Of any block of the cluster.
__device__ __forceinline__ int read_word_remote(uint32_t address) {
  int word;
  asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}
// 16 bits, as the lower half of a word.
__device__ __forceinline__ uint32_t read_half(uint32_t address) {
  unsigned short half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(address) : "memory");
  return half;
}
__device__ __forceinline__ void store_four(uint32_t address, const float* x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}
__device__ __forceinline__ float4 read_four(uint32_t address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address));
  return x;
}
__device__ __forceinline__ float2 read_two(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ uint2 read_two_words(uint32_t address) {
  uint2 x;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address));
  return x;
}
__device__ __forceinline__ void write_two(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}
// Adds to global memory.
__device__ __forceinline__ void reduce_four(float* address, const float* x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}
// From L2: what other multiprocessors have written in this launch, too.
__device__ __forceinline__ float4 load_four(const float* address) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(address)
               : "memory");
  return x;
}
// What the launch only reads.
__device__ __forceinline__ uint4 load_eight(const uint8_t* address) {
  uint4 x;
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(address));
  return x;
}
// The same, or zeros without looking: predicated loads, not branches, so that many are in flight.
__device__ __forceinline__ uint4 load_eight_if(bool wanted, const uint8_t* address) {
  uint4 x;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
      : "l"(address), "r"((uint32_t)wanted));
  return x;
}
__device__ __forceinline__ float load_float_if(bool wanted, const float* address, float otherwise) {
  float x;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\nmov.f32 %0, %2;\n@p ld.global.nc.f32 %0, [%1];\n}"
               : "=&f"(x)
               : "l"(address), "f"(otherwise), "r"((uint32_t)wanted));
  return x;
}
__device__ __forceinline__ void store_eight(uint8_t* address, const uint32_t (&x)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// The two float32 of a 16-bit pair.
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  float2 x;
#if IS_BF16
  x.x = __uint_as_float(pair << 16);
  x.y = __uint_as_float(pair & 0xFFFF0000);
#else
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
      : "=f"(x.x), "=f"(x.y)
      : "r"(pair));
#endif
  return x;
}
// The sum of the products of eight 16-bit numbers each.
__device__ __forceinline__ float dot(const uint4& a, const uint4& b) {
  const uint32_t left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = unpack(left[i]), y = unpack(right[i]);
    sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
  }
  return sum;
}

// Transposes a 4x4 matrix of words held by a quad, lane i holding row i: afterwards x[j] is what lane j had in x[i].
__device__ __forceinline__ void quad_transpose(uint32_t (&x)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = lane & bit;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int low = bit == 1 ? 2 * pair : pair;
      const uint32_t first = x[low], second = x[low + bit];
      const uint32_t received = __shfl_xor_sync(0xFFFFFFFF, upper ? first : second, bit);
      x[low] = upper ? received : first;
      x[low + bit] = upper ? second : received;
    }
  }
}

// Writes four 8x8 matrices of 16-bit elements held in the accumulator layout; lane l gives the address of row l % 8 of
// matrix l / 8.
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void store_matrices_transposed(uint32_t address, uint32_t x0, uint32_t x1, uint32_t x2,
                                                          uint32_t x3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x0),
               "r"(x1), "r"(x2), "r"(x3)
               : "memory");
}

// The reverse: loads 8x8 matrices, row l % 8 of matrix l / 8 from the address that lane l gives.
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}
// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrices(uint32_t (&x)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(x[0]), "=r"(x[1])
               : "r"(address)
               : "memory");
}

// One warp's product: d[16, 8] += a[16, 16] b[8, 16]^T, in the layouts of wgmma's accumulators and of load_matrices.
__device__ __forceinline__ void warp_product(float* d, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
#if IS_BF16
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
