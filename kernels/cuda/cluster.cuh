// Thread-block clusters: blocks that run at the same time and write to each other's shared memory. And launches that
// begin before those that they depend on have ended.
#pragma once
#include "types.cuh"

// Every thread of the cluster arrives, then waits: all blocks have begun, and have initialised their mbarriers if they
// arrive after a fence for that. Nothing else is ordered by it.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// All threads, and what they have written before is seen.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// This block's number in its cluster.
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The address, in the cluster's window, of what lies at `address` in this block's shared memory in block `rank`'s.
__device__ __forceinline__ uint32_t map_to_rank(uint32_t address, int rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
// Writes to a block of the cluster, and counts the bytes on an mbarrier of the same block.
__device__ __forceinline__ void send_four(uint32_t address, uint32_t barrier, const float4& x) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(address),
      "r"(barrier), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
      : "memory");
}
__device__ __forceinline__ void send_two(uint32_t address, uint32_t barrier, const float2& x) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%2, %3}, [%1];" ::"r"(address),
               "r"(barrier), "f"(x.x), "f"(x.y)
               : "memory");
}
// Waits until all that others send here has arrived; of the first phase.
__device__ __forceinline__ void wait_for_others(uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier)
      : "memory");
}

// Programmatic dependent launch: waits until the launches before this one have ended and their writes are visible.
__device__ __forceinline__ void wait_for_earlier_launches() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// Once all blocks have said so, or ended, the next launch may take its place on the GPU and wait there.
__device__ __forceinline__ void let_the_next_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
