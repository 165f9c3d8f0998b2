// Thread-block clusters: blocks that run at the same time and write to each other's shared memory. And launches that
// begin before those that they depend on have ended.
#pragma once
#include "types.cuh"

// Every thread of the cluster arrives, then waits: what each wrote to shared memory, its own or another block's, before
// it arrived is visible to all that have waited.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// The same without any order of writes: only tells that this thread has begun.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address, in the cluster's window, of what lies at `address` in this block's shared memory in block `rank`'s.
__device__ __forceinline__ uint32_t map_to_rank(uint32_t address, int rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
__device__ __forceinline__ void store_four_remote(uint32_t address, const float4& x) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
}
__device__ __forceinline__ void store_two_remote(uint32_t address, const float2& x) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x.x), "f"(x.y) : "memory");
}

// Programmatic dependent launch: waits until the launches before this one have ended and their writes are visible.
__device__ __forceinline__ void wait_for_earlier_launches() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// Once all blocks have said so, or ended, the next launch may take its place on the GPU and wait there.
__device__ __forceinline__ void let_the_next_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
