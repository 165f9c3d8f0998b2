// Warpgroup matrix products (wgmma): m64nNk16, 16-bit operands, float32 accumulators.
//
// The instructions themselves, one struct per N, are generated (instructions.py) into wgmma_instructions.cuh:
//   Wgmma<N>::ss(d, a, b, accumulate)   d[64, N] (+)= a[64, 16] b[N, 16]^T   both from shared memory, 16 contiguous
//   Wgmma<N>::ss_columns(d, a, b, accumulate)
//                                       d[64, N] (+)= a[64, 16] b[16, N]     both from shared memory, b with N
//                                       contiguous
//   Wgmma<N>::rs(d, a, b, accumulate)   d[64, N] (+)= a[64, 16] b[16, N]     a in registers, b with N contiguous
//   Wgmma<N>::rs_rows(d, a, b, accumulate)
//                                       d[64, N] (+)= a[64, 16] b[N, 16]^T   a in registers, b with 16 contiguous
#pragma once
#include "tma.cuh"

// Orders earlier register accesses before the following products.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most PENDING of the committed groups are unfinished.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// The same, but not before `x`, which is never all ones, has been computed: the compiler moves a plain wait up, over
// arithmetic that was to run beside the products. A plain wait must follow.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait_after(uint32_t x) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0xFFFFFFFF;\n@p wgmma.wait_group.sync.aligned %1;\n}" ::"r"(x),
               "n"(PENDING)
               : "memory");
}

// The lower half of a matrix descriptor for boxes with 128-byte swizzle (the upper half is the same for all). `leading`
// is the distance in bytes between boxes where the operand is wider than one along its contiguous dimension, unused for
// a K-major operand.
__device__ __forceinline__ uint32_t descriptor(uint32_t address, uint32_t leading) {
  return (address >> 4 & 0x3FFF) | (leading >> 4 & 0x3FFF) << 16;
}
// The same descriptor `bytes` further on.
__device__ __forceinline__ uint32_t moved(uint32_t descriptor, int bytes) {
  return descriptor + (bytes >> 4);
}

// Byte offset of the k-th group of 16 columns in a tile of ROWS rows.
template <int ROWS>
constexpr __device__ int column_group(int k) {
  return k / 4 * ROWS * BOX_ROW_BYTES + k % 4 * 32;
}

// Address of 8 columns (16 bytes) of a row in a tile of ROWS rows: where the swizzle has put them.
template <int ROWS>
__device__ __forceinline__ uint32_t chunk_address(uint32_t tile, int row, int chunk) {
  return tile + chunk / 8 * ROWS * BOX_ROW_BYTES + row * BOX_ROW_BYTES + ((chunk ^ row) % 8 << 4);
}
