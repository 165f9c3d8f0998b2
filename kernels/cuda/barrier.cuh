// Barriers: mbarriers in shared memory, which copies and threads arrive on, and named barriers between warps.
#pragma once
#include "types.cuh"

// A ring of stages that one side fills and the other empties: the index of the current stage and its phase parity.
template <int SIZE>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  // After `count` stages: for a thread that has one register for it rather than two.
  static __device__ __forceinline__ Ring at(uint32_t count) { return {(int)(count % SIZE), count / SIZE % 2}; }
  __device__ __forceinline__ Ring previous() const {
    const bool wraps = stage == 0;
    return {wraps ? SIZE - 1 : stage - 1, phase ^ (uint32_t)wraps};
  }
  __device__ __forceinline__ void advance() {
    if (++stage == SIZE) {
      stage = 0;
      phase ^= 1;
    }
  }
};

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival, and `bytes` more to come from the copy engine before the phase completes.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// One arrival for all lanes of a warp, which have met since they did what the barrier stands for. To racecheck, a tool
// of compute-sanitizer, an arrival says nothing of other lanes: with EVERY_LANE_ARRIVES it can follow.
#ifndef EVERY_LANE_ARRIVES
#define EVERY_LANE_ARRIVES 0
#endif
constexpr int WARP_ARRIVALS = EVERY_LANE_ARRIVES ? 32 : 1;
__device__ __forceinline__ void warp_arrive(uint32_t barrier, int lane = threadIdx.x % 32) {
  if (EVERY_LANE_ARRIVES || lane == 0) barrier_arrive(barrier);
}
// The same of lanes that have yet to meet.
__device__ __forceinline__ void warp_arrive_together(uint32_t barrier, int lane = threadIdx.x % 32) {
  __syncwarp();
  warp_arrive(barrier, lane);
}

// Waits until the phase with this parity has completed.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Named barriers order warps: `sync` waits for `threads` arrivals in all, `arrive` does not wait.
__device__ __forceinline__ void named_sync(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
// `sync` that tells all threads whether `x` is true in any of them.
__device__ __forceinline__ bool named_any(int name, int threads, bool x) {
  uint32_t any;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %3, 0;\nbar.red.or.pred q, %1, %2, p;\nselp.u32 %0, 1, 0, q;\n}"
               : "=r"(any)
               : "r"(name), "r"(threads), "r"((uint32_t)x)
               : "memory");
  return any;
}
// Arrives once `x`, which is never all ones, has been computed.
__device__ __forceinline__ void named_arrive_after(int name, int threads, uint32_t x) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0xFFFFFFFF;\n@p bar.arrive %0, %1;\n}" ::"r"(name), "r"(threads),
               "r"(x)
               : "memory");
}

// Before a barrier behind which one thread says so with a semaphore: what this thread has written in global memory is
// visible to others, and to their copy engines.
__device__ __forceinline__ void published() {
  asm volatile("fence.acq_rel.gpu;\nfence.proxy.async;" ::: "memory");
}

// Semaphores in global memory, by one thread: waits until it has reached `count`, or is at least that; adds one once
// all that this thread has written, bulk reductions that it has waited for included, is visible to others.
__device__ __forceinline__ void semaphore_wait(const int* semaphore, int count) {
  int found;
  do {
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(found) : "l"(semaphore) : "memory");
  } while (found != count);
  asm volatile("fence.proxy.async;" ::: "memory");
}
__device__ __forceinline__ void semaphore_wait_least(const int* semaphore, int count) {
  int found;
  do {
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(found) : "l"(semaphore) : "memory");
  } while (found < count);
  asm volatile("fence.proxy.async;" ::: "memory");
}
__device__ __forceinline__ void semaphore_add(int* semaphore, int count = 1) {
  asm volatile("fence.proxy.async;" ::: "memory");
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(semaphore), "r"(count) : "memory");
}
// Adds one to `done`, unless it is null, and waits until `next` has reached `count`: less time than one after the
// other, since the look at `next` and this thread's bulk reductions are in flight together, and one fence serves both.
__device__ __forceinline__ void semaphore_hand_on(int* done, const int* next, int count) {
  int found;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(found) : "l"(next) : "memory");
  if (done) asm volatile("cp.async.bulk.wait_group 0;\nfence.proxy.async;" ::: "memory");
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  if (done) asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(done) : "memory");
  while (found != count) asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(found) : "l"(next) : "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive_remote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
