// FUSED: how blocks do the items that are not COMPUTE (backward_items.cuh). Part of backward.cuh.
#pragma once

// An item that is not COMPUTE, by WARPGROUPS warpgroups of the cluster of which this is `warpgroup`. `meet` waits for
// all of their threads in this block, for which one of them speaks, the `leader`.
template <int WARPGROUPS, class Meet>
__device__ __forceinline__ void do_item(const Item& item, int warpgroup, bool leader, const BackwardParams& params,
                                        const Meet& meet) {
  int* done = params.semaphores + item.head;
  const int tiles = params.num_heads / params.num_kv_heads * params.q_tiles;  // of the key head's queries
  const int first = item.index * params.chunk_tiles, count = min(params.chunk_tiles, tiles - first);
  const int number = item.head * tiles + first;  // of the first one in the workspace
  const int shift = sums_shift(item.head, params);
  // Whether the sums have been finished that were where those of this head and chunk are.
  const int heads = params.batch * params.num_kv_heads;
  int* finished = params.semaphores + heads + item.index;
  if (item.kind == PREPARE) {
    if (item.head >= params.slots) {
      finished += (item.head - params.slots) * params.chunks;
      if (leader) {
        semaphore_wait_least(finished, BLOCKS_OF_CLUSTER);
        if (atomicAdd(finished, 1) == 2 * BLOCKS_OF_CLUSTER - 1) *finished = 0;
      }
      meet();
    }
#pragma unroll 1
    for (int tile = warpgroup; tile < count; tile += WARPGROUPS)
      prepare_tile<128>(query_tile_at(number + tile, params), shift, opaque(threadIdx.x % 128), params);
    published();
    meet();
    if (leader) semaphore_add(done);
  } else {
    if (leader) semaphore_wait_least(done, done_before(FINISH, params));
    meet();
    finish_parts<2>(number * PARTS_OF_TILE + warpgroup, (number + count) * PARTS_OF_TILE, WARPGROUPS, shift, params);
    if (item.head + params.slots < heads) {
      published();
      meet();
      if (leader) semaphore_add(finished + item.head * params.chunks);
    }
    // Whoever is the last has nobody left who looks at the number.
    if (leader && atomicAdd(done, 1) == done_before(FINISH, params) + BLOCKS_OF_CLUSTER * params.chunks - 1) *done = 0;
  }
}
