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
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xFFFFFFFF, x, 0); }

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

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFF, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFF, x, 2);
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
