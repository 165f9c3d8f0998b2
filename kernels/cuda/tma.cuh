// The copy engine (TMA): boxes of rank-4 tensors, whose dimensions are (column, row, head, batch), into shared memory.
#pragma once
#include "barrier.cuh"

// A box is 64 16-bit columns wide: 128 bytes, which the 128-byte swizzle spreads over the banks.
constexpr int BOX_COLUMNS = 64;
constexpr int BOX_ROW_BYTES = 128;

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

template <class... Maps>
__device__ __forceinline__ void prefetch_maps(const Maps&... maps) {
  (prefetch_map(maps), ...);
}

// Where a block's dynamic shared memory begins, with its tiles: their swizzle counts from multiples of 1024 bytes.
__device__ __forceinline__ uint32_t tile_memory() {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t start = (uint32_t)__cvta_generic_to_shared(memory);
  if (start % 1024) __trap();
  return start;
}

__device__ __forceinline__ void load_box(const TensorMap& map, uint32_t destination, uint32_t barrier, int column,
                                         int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(destination),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// To the same place in both blocks of a cluster, and counts on the barrier at the same place in both.
__device__ __forceinline__ void load_box_for_both(const TensorMap& map, uint32_t destination, uint32_t barrier,
                                                  int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(destination),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch), "h"((unsigned short)3)
      : "memory");
}

// Brings a box from memory into the L2 cache.
__device__ __forceinline__ void prefetch_box(const TensorMap& map, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(column), "r"(row),
               "r"(head), "r"(batch)
               : "memory");
}

// Loads ROWS rows of COLUMNS columns, box by box: box b lies ROWS * 128 bytes after box b - 1. Counts on `barrier`.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void load_rows(const TensorMap& map, uint32_t destination, uint32_t barrier, int row,
                                          int head, int batch, int first_column = 0) {
  constexpr int BOXES = ceil_div(COLUMNS, BOX_COLUMNS);
  barrier_arrive_expect(barrier, BOXES * ROWS * BOX_ROW_BYTES);
#pragma unroll
  for (int box = 0; box < BOXES; ++box)
    load_box(map, destination + box * ROWS * BOX_ROW_BYTES, barrier, first_column + box * BOX_COLUMNS, row, head,
             batch);
}

// Stores a box; rows and columns outside the tensor are left out. `store_commit` makes a group of them to wait for.
__device__ __forceinline__ void store_box(const TensorMap& map, uint32_t source, int column, int row, int head,
                                          int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(source), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}
__device__ __forceinline__ void store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Stores ROWS rows of all columns, laid out as by load_rows; rows and columns outside the tensor are left out.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void store_rows(const TensorMap& map, uint32_t source, int row, int head, int batch) {
#pragma unroll
  for (int box = 0; box < ceil_div(COLUMNS, BOX_COLUMNS); ++box)
    store_box(map, source + box * ROWS * BOX_ROW_BYTES, box * BOX_COLUMNS, row, head, batch);
  store_commit();
}
// Plain bytes, without a tensor map: a multiple of 16, at addresses that are. Counts on `barrier`.
template <int BYTES>
__device__ __forceinline__ void load_bytes(const void* source, uint32_t destination, uint32_t barrier) {
  barrier_arrive_expect(barrier, BYTES);
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
      "l"(source), "n"(BYTES), "r"(barrier)
      : "memory");
}

// To another block of the cluster; counts on that one's `barrier`.
template <int BYTES>
__device__ __forceinline__ void send_bytes(uint32_t source, uint32_t destination, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
      "r"(source), "n"(BYTES), "r"(barrier)
      : "memory");
}

// Adds float32 numbers to global memory: a multiple of 16 bytes, at addresses that are.
__device__ __forceinline__ void reduce_bytes(float* destination, uint32_t source, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination),
               "r"(source), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until this thread's stores have read shared memory.
__device__ __forceinline__ void store_wait() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Waits until they have arrived.
__device__ __forceinline__ void store_wait_written() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Makes this thread's writes to shared memory visible to the copy engine, once a barrier has ordered them.
__device__ __forceinline__ void store_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Overwrites the rows from `first` on of a tile of ROWS rows with zeros, by one warpgroup, which meets at the named
// barrier: then its products read them. Other warpgroups may do so at the same time.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void clear_rows(uint32_t tile, int first, int name) {
#pragma unroll
  for (int box = 0; box < ceil_div(COLUMNS, BOX_COLUMNS); ++box) {
    for (int byte = first * BOX_ROW_BYTES + 16 * (threadIdx.x % 128); byte < ROWS * BOX_ROW_BYTES; byte += 16 * 128)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + box * ROWS * BOX_ROW_BYTES + byte), "r"(0)
                   : "memory");
  }
  store_fence();
  named_sync(name, 128);
}
