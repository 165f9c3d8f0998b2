// Loads by the lanes of a warp, 16 bytes each, in the layout of load_rows (tma.cuh): for rows that begin at odd
// multiples of 16 bytes, which the copy engine loads slowly.
//
// These copies write as threads do, not as the copy engine does: who reads them by wgmma needs a fence (store_fence)
// after the wait for their barrier.
#pragma once
#include "wgmma.cuh"

// A tensor [batch, heads, rows, columns], strides in bytes. Mirrored by forward.py.
struct LaneTensor {
  const uint8_t* data;
  int64_t stride_batch, stride_head;
  uint32_t stride_row, unused;
  __device__ __forceinline__ const uint8_t* rows(int batch, int head) const {
    return data + batch * stride_batch + head * stride_head;
  }
};
struct LaneLoads {
  LaneTensor key, value;
};

// Copies 16 bytes, or writes zeros.
__device__ __forceinline__ void load_chunk(uint32_t destination, const uint8_t* source, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(present ? 16 : 0)
               : "memory");
}
// One arrival once all of this lane's copies so far have arrived.
__device__ __forceinline__ void barrier_arrive_after_chunks(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Waits until all of this lane's copies have arrived.
__device__ __forceinline__ void lane_loads_wait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
__device__ __forceinline__ void store_zeros(uint32_t address) {
  asm volatile("st.shared.v4.b32 [%0], {0, 0, 0, 0};" ::"r"(address) : "memory");
}

// The first `chunks` chunks, up to LANES, of ROWS rows into one box, the rest of LANES as zeros. LANES lanes have a
// row.
template <int ROWS, int LANES>
__device__ __forceinline__ void load_box_by_lanes(const uint8_t* source, uint32_t stride_row, uint32_t destination,
                                                  int chunks, int present_rows) {
  constexpr int STEP = 32 / LANES;  // rows at a time
  const int row = threadIdx.x % 32 / LANES, chunk = threadIdx.x % LANES;
  const uint32_t address = chunk_address<ROWS>(destination, row, chunk);
  source += (uint64_t)row * stride_row + 16 * chunk;
  const int left = chunk < chunks ? present_rows - row : 0;
#pragma unroll
  for (int i = 0; i < ceil_div(ROWS, STEP); ++i) {
    // Four rows further on the swizzle puts a chunk into the other half of its row.
    const uint32_t half = STEP == 4 && i % 2 ? 64 : 0;
    if (ROWS % STEP == 0 || row + STEP * i < ROWS)
      load_chunk((address ^ half) + STEP * i * BOX_ROW_BYTES, source + (uint64_t)(STEP * i) * stride_row,
                 STEP * i < left);
  }
}

// Loads ROWS rows, those from `present_rows` on as zeros, of the columns from box FIRST_BOX on; 32 arrivals on
// `barrier`. By a whole warp.
template <int ROWS, int COLUMNS, int FIRST_BOX>
__device__ __forceinline__ void load_rows_by_lanes(const uint8_t* source, uint32_t stride_row, uint32_t destination,
                                                   uint32_t barrier, int present_rows) {
  constexpr int BOXES = COLUMNS / BOX_COLUMNS, REST = COLUMNS % BOX_COLUMNS / 8;
  constexpr int WIDE_BOXES = BOXES + (REST > 4);  // of eight lanes a row
#pragma unroll 1
  for (int box = FIRST_BOX; box < WIDE_BOXES; ++box)
    load_box_by_lanes<ROWS, 8>(source + box * BOX_ROW_BYTES, stride_row, destination + box * ROWS * BOX_ROW_BYTES,
                               box < BOXES ? 8 : REST, present_rows);
  if constexpr (REST > 0 && REST <= 4)
    load_box_by_lanes<ROWS, REST == 3 ? 4 : REST>(source + BOXES * BOX_ROW_BYTES, stride_row,
                                                  destination + BOXES * ROWS * BOX_ROW_BYTES, REST, present_rows);
  barrier_arrive_after_chunks(barrier);
}
