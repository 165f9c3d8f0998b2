// Backward attention on Hopper (compute capability 9.0) for head_dim from 128 to 256: the kernel of backward.cu, whose
// sums of grad_key and grad_value no longer fit one warpgroup's registers. So warpgroups have roles, for 64 keys:
//
//   loading warp:  as there
//   scores:        S^T = key query^T;  P^T = exp2(S^T), handed over in float32;  grad_value += P^T grad_out
//   gradients:     dP^T = value grad_out^T;  dS^T = P^T (dP^T - delta), handed over rounded;  grad_key += dS^T query
//   queries:       grad_query = dS key, box by box, added from registers to the float32 sums
//
// The first two issue the next tile's first product right behind this tile's second one, so that the matrix unit always
// has work from one of them. P and dS go from thread to thread: S^T and dP^T have the same layout. Adding from
// registers spares the staging of a tile of grad_query, 64 KB at a head_dim of 256; the sums' order in memory is the
// accumulators' own, so a warp adds 512 bytes that lie together.
//
// PAIRED: a cluster of two blocks has two tiles of keys that follow each other, and each block computes half of the
// columns of grad_query for the keys of both, so that only half as much is added in global memory, which binds
// otherwise. For that, each sends its dS to the other, by a thread of the loading warpgroup, and has the other's keys
// in the columns of its half. There is room for it because grad_out comes in halves of its columns, three of which are
// there at a time. Both visit the same query tiles: in a causal call the second block sees nothing of the last one.
// They run in step: dS of a tile is overwritten once both blocks have used it, of which the arrivals on `ds_empty`
// tell. Each loads half of the query and grad_out tiles for both, once both have emptied the stage.
//
// DIRECT: as there.
//
// DETERMINISTIC: blocks add to a query tile in the order of their keys. A warp of the loading warpgroup looks whether
// the block's turn has come; another one hands it on once what was added is visible, which takes as long as a tile. The
// queries' warpgroup may be two tiles ahead of that.
//
// Shared memory: one key and one value tile, Q_STAGES + DO_STAGES tiles of 64 rows, P (float32), DS_STAGES of dS.
// Registers: HEAD_DIM / 2 for a sum, 32 for S or dP, 16 for either rounded, of 208; 32 for a box of grad_query, of 72.
//
// Defined by the host (backward.py): as for backward.cu, with BLOCK_M, STEP_M and BLOCK_N 64 and KEYS_IN_REGISTERS 0.
#include "backward.cuh"

static_assert(BLOCK_M == 64 && STEP_M == 64 && BLOCK_N == 64 && CONSUMERS == 1 && SPLIT_ROWS && !KEYS_IN_REGISTERS);
static_assert(!PACKED);
// The gradients' warpgroup asks for the next grad_out tile, which is loaded after the next query tile, before it is
// done with this query tile.
static_assert(Q_STAGES > 1);
constexpr int THREADS = 512;
// Named barriers: nobody reads the key tile, or the value tile, any more, so that sums may leave from its place; and
// those of one warpgroup each.
constexpr int KEYS_READ = 1, VALUES_READ = 2, SCORES = 3, GRADIENTS = 4, QUERIES = 5;
constexpr int PRODUCER_REGISTERS = PAIRED ? 32 : 24, SUM_REGISTERS = 208, QUERY_REGISTERS = PAIRED ? 64 : 72;
constexpr int P_BYTES = BLOCK_M * BLOCK_N * 4;
// grad_out arrives in portions of its columns, into a ring of slots.
constexpr int DO_PORTIONS = PAIRED ? 2 : 1, DO_SLOTS = PAIRED ? 3 : DO_STAGES;
constexpr int PORTION_COLUMNS = PAIRED ? 128 : HEAD_DIM_V, PORTION_BYTES = DO_BYTES / DO_PORTIONS;
static_assert(!PAIRED || (HEAD_DIM > 192 && HEAD_DIM_V > 192));
// PAIRED: the other block's keys in this one's columns of grad_query, and its dS.
constexpr int HALF_BOXES = 2, OTHER_KEY_BYTES = PAIRED ? HALF_BOXES * BLOCK_N * BOX_ROW_BYTES : 0;
constexpr int OTHER_DS_BYTES = PAIRED ? DS_STAGES * DS_BYTES : 0;

// Byte addresses in shared memory.
struct Shared {
  uint32_t key, value, other_key, query, grad_out, grad_scores, other_grad_scores, probabilities, statistics, ticket;
  uint32_t barriers;
  __device__ explicit Shared(uint32_t base)
      : key(base),
        value(key + K_BYTES),
        other_key(value + V_BYTES),
        query(other_key + OTHER_KEY_BYTES),
        grad_out(query + Q_STAGES * Q_BYTES),
        grad_scores(grad_out + DO_SLOTS * PORTION_BYTES),
        other_grad_scores(grad_scores + DS_STAGES * DS_BYTES),
        probabilities(other_grad_scores + OTHER_DS_BYTES),
        statistics(probabilities + P_BYTES),
        ticket(statistics + Q_STAGES * STATISTICS_BYTES),
        barriers(ticket + 16) {}
  __device__ uint32_t barrier(int index) const { return barriers + 8 * index; }
  __device__ uint32_t k_full() const { return barrier(0); }
  __device__ uint32_t v_full() const { return barrier(1); }
  __device__ uint32_t p_full() const { return barrier(2); }
  __device__ uint32_t p_empty() const { return barrier(3); }
  __device__ uint32_t q_full(int stage) const { return barrier(4 + stage); }
  __device__ uint32_t q_empty(int stage) const { return barrier(4 + Q_STAGES + stage); }
  __device__ uint32_t do_full(int slot) const { return barrier(4 + 2 * Q_STAGES + slot); }
  __device__ uint32_t do_empty(int slot) const { return do_full(DO_SLOTS + slot); }
  __device__ uint32_t ds_full(int stage) const { return do_full(2 * DO_SLOTS + stage); }
  __device__ uint32_t ds_empty(int stage) const { return ds_full(DS_STAGES + stage); }
  __device__ uint32_t other_ds_full(int stage) const { return ds_full(2 * DS_STAGES + stage); }
  __device__ uint32_t other_k_full() const { return ds_full(3 * DS_STAGES); }
  // DETERMINISTIC, each for even and for odd tiles: the turn has come; this block's share has been added; the turn has
  // been handed on.
  __device__ uint32_t turn_came(int odd) const { return ds_full(3 * DS_STAGES + 1 + odd); }
  __device__ uint32_t added(int odd) const { return turn_came(2 + odd); }
  __device__ uint32_t handed_on(int odd) const { return turn_came(4 + odd); }
};

__device__ __forceinline__ void warp_arrive_remote(uint32_t barrier) {
  if (EVERY_LANE_ARRIVES || threadIdx.x % 32 == 0) barrier_arrive_remote(map_to_rank(barrier, rank_in_pair() ^ 1));
}
// A stage of query or grad_out tiles.
__device__ __forceinline__ void release_stage(uint32_t barrier) {
  warp_arrive(barrier);
  if (PAIRED) warp_arrive_remote(barrier);
}
// Loads BOXES boxes of a query or grad_out tile, from `first_column` on.
template <int BOXES>
__device__ __forceinline__ void load_stage(const TensorMap& map, uint32_t destination, uint32_t barrier, int row,
                                           int head, int batch, int first_column) {
  if constexpr (PAIRED) {
    constexpr int BYTES = BLOCK_M * BOX_ROW_BYTES;
    barrier_arrive_expect(barrier, BOXES * BYTES);  // from both
#pragma unroll
    for (int i = 0; i < BOXES / 2; ++i) {
      const int box = rank_in_pair() * (BOXES / 2) + i;
      load_box_for_both(map, destination + box * BYTES, barrier, first_column + box * BOX_COLUMNS, row, head, batch);
    }
  } else {
    load_rows<BLOCK_M, BOXES * BOX_COLUMNS>(map, destination, barrier, row, head, batch, first_column);
  }
}
// Where a thread puts its group of four probabilities, or finds that of its partner in the other warpgroup.
__device__ __forceinline__ uint32_t handed_over(const Shared& shared, int group) {
  return shared.probabilities + group * 128 * 16 + threadIdx.x % 128 * 16;
}

// The loading thread.
__device__ __forceinline__ void load_tiles(const TensorMap& query_map, const TensorMap& key_map,
                                           const TensorMap& value_map, const TensorMap& grad_out_map, const Work& work,
                                           const BackwardParams& params, const Shared& shared) {
  uint32_t loaded = 0;  // query tiles
  for_each_tile(work, params, [&](int head, int tile, int number, int) {
    const auto q = Ring<Q_STAGES>::at(loaded);
    const bool first = loaded == 0;
    // In the order in which the consumers need them.
    if (first) {
      load_rows<BLOCK_N, HEAD_DIM>(key_map, shared.key, shared.k_full(), work.k_tile * BLOCK_N, work.kv_head,
                                   work.batch);
      if (FUSED) wait_until_prepared(work, params);
    }
    barrier_wait(shared.q_empty(q.stage), q.phase ^ 1);
    load_stage<ceil_div(HEAD_DIM, BOX_COLUMNS)>(query_map, shared.query + q.stage * Q_BYTES, shared.q_full(q.stage),
                                                tile * BLOCK_M, head, work.batch, 0);
    load_bytes<STATISTICS_BYTES>(statistics_of(number, tile, params), shared.statistics + q.stage * STATISTICS_BYTES,
                                 shared.q_full(q.stage));
    if (first)
      load_rows<BLOCK_N, HEAD_DIM_V>(value_map, shared.value, shared.v_full(), work.k_tile * BLOCK_N, work.kv_head,
                                     work.batch);
#pragma unroll
    for (int portion = 0; portion < DO_PORTIONS; ++portion) {
      const auto d = Ring<DO_SLOTS>::at(DO_PORTIONS * loaded + portion);
      barrier_wait(shared.do_empty(d.stage), d.phase ^ 1);
      load_stage<ceil_div(PORTION_COLUMNS, BOX_COLUMNS)>(grad_out_map, shared.grad_out + d.stage * PORTION_BYTES,
                                                         shared.do_full(d.stage), tile * BLOCK_M, head, work.batch,
                                                         portion * PORTION_COLUMNS);
    }
    if (PAIRED && first)
      load_rows<BLOCK_N, HALF_BOXES * BOX_COLUMNS>(key_map, shared.other_key, shared.other_k_full(),
                                                   (work.k_tile ^ 1) * BLOCK_N, work.kv_head, work.batch,
                                                   rank_in_pair() * HALF_BOXES * BOX_COLUMNS);
    ++loaded;
  });
}

// PAIRED: a thread that sends each dS to the other block. That one's place for it is free once ds_empty has let the
// gradients' warpgroup write this one.
__device__ __forceinline__ void send_grad_scores(int tiles, const Shared& shared) {
  Ring<DS_STAGES> s;
  const int other = rank_in_pair() ^ 1;
#pragma unroll 1
  for (; tiles > 0; --tiles) {
    barrier_wait(shared.ds_full(s.stage), s.phase);
    // For what the other one sends, perhaps has sent; what it sent into this stage before has been used.
    barrier_arrive_expect(shared.other_ds_full(s.stage), DS_BYTES);
    send_bytes<DS_BYTES>(shared.grad_scores + s.stage * DS_BYTES,
                         map_to_rank(shared.other_grad_scores + s.stage * DS_BYTES, other),
                         map_to_rank(shared.other_ds_full(s.stage), other));
    s.advance();
  }
}

// The warpgroup of S and grad_value.
__device__ __forceinline__ void consume_scores(const TensorMap& grad_value_map, const Work& work, int tiles,
                                               const BackwardParams& params, const Shared& shared) {
  const float scale_log2 = params.softmax_scale_log2;
  const int lane = threadIdx.x % 32, quad_lane = lane % 4, warp_row = threadIdx.x % 128 / 32 * 16;
  const int first_key = work.k_tile * BLOCK_N, thread_key = first_key + warp_row + lane / 4;
  const int last_row = (params.q_tiles - 1) * BLOCK_M, end_row = work.first_q_tile * BLOCK_M;
  const bool ends = first_key + BLOCK_N > params.seqlen_k;
  Ring<Q_STAGES> q;
  Ring<DO_SLOTS> d;
  uint32_t p_phase = 1;  // the place of the probabilities is free at first
  float grad_value[HEAD_DIM_V / 2] = {};
  float scores[BLOCK_M / 2];
  LeftOperand<HEAD_DIM> key;

  const auto issue_scores = [&] {
    barrier_wait(shared.q_full(q.stage), q.phase);
    wgmma_fence();
    key.multiply(scores, descriptor(shared.query + q.stage * Q_BYTES, 0));
    wgmma_commit();
  };
  const auto step = [&](int first_row, auto more) {
    const uint32_t statistics = shared.statistics + q.stage * STATISTICS_BYTES + quad_lane * 8;
    if (ends || (IS_CAUSAL && first_row < first_key + BLOCK_N - 1))
      mask_keys(scores, thread_key, first_row, params.seqlen_k);
#pragma unroll
    for (int i = 0; i < BLOCK_M / 2; i += 4) {
      const float2 logsumexp = read_pair(statistics + 8 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        scores[i + j] = exp2_approx(fmaf(scores[i + j], scale_log2, -(j % 2 ? logsumexp.y : logsumexp.x)));
    }
    __syncwarp();
    release_stage(shared.q_empty(q.stage));
    q.advance();
    barrier_wait(shared.p_empty(), p_phase);
    p_phase ^= 1;
#pragma unroll
    for (int group = 0; group < BLOCK_M / 8; ++group) store_four(handed_over(shared, group), scores + 4 * group);
    warp_arrive_together(shared.p_full());
    uint32_t probabilities[BLOCK_M / 4];
    pack_all(probabilities, scores);
    const auto before = d;
    barrier_wait(shared.do_full(d.stage), d.phase);
    wgmma_fence();
    const uint32_t grad_out = shared.grad_out + d.stage * PORTION_BYTES;
    d.advance();
    if constexpr (PAIRED) {
      constexpr int NOW = PORTION_COLUMNS / 2, REST = PAIRED ? HEAD_DIM_V / 2 - NOW : NOW;
      accumulate_product<2 * NOW>(*reinterpret_cast<float (*)[NOW]>(grad_value), probabilities, grad_out);
      wgmma_commit();
      barrier_wait(shared.do_full(d.stage), d.phase);
      wgmma_fence();
      accumulate_product<2 * REST>(*reinterpret_cast<float (*)[REST]>(grad_value + NOW), probabilities,
                                   shared.grad_out + d.stage * PORTION_BYTES);
      d.advance();
    } else {
      accumulate_product<HEAD_DIM_V>(grad_value, probabilities, grad_out);
    }
    wgmma_commit();
    if constexpr (decltype(more)::value) issue_scores();
    constexpr int LATER = decltype(more)::value;
    if constexpr (PAIRED) {
      wgmma_wait<LATER + 1>();
      release_stage(shared.do_empty(before.stage));
    }
    wgmma_wait<LATER>();
    release_stage(shared.do_empty(d.previous().stage));
    wgmma_wait<0>();
  };

  if (tiles > 0) {
    barrier_wait(shared.k_full(), 0);
    key.load(shared.key, 0);
    issue_scores();
    wgmma_wait<0>();
    int first_row = last_row;
#pragma unroll 1
    for (; tiles > 1; --tiles) {
      step(first_row, Flag<true>());
      first_row = first_row == end_row ? last_row : first_row - BLOCK_M;
    }
    step(first_row, Flag<false>());
  }
  named_arrive(KEYS_READ, 384);
  named_sync(VALUES_READ, 256);
  stage_rows<HEAD_DIM_V>(grad_value, 1.0f, shared.value, warp_row);
  store_fence();
  named_sync(SCORES, 128);
  if (threadIdx.x == 128) {
    store_rows<BLOCK_N, HEAD_DIM_V>(grad_value_map, shared.value, work.k_tile * BLOCK_N, work.kv_head, work.batch);
    store_wait();
  }
}

// The warpgroup of dP, dS and grad_key.
__device__ __forceinline__ void consume_gradients(const TensorMap& grad_key_map, const Work& work, int tiles,
                                                  const BackwardParams& params, const Shared& shared) {
  const int quad_lane = threadIdx.x % 4, warp_row = threadIdx.x % 128 / 32 * 16;
  Ring<Q_STAGES> q;
  Ring<DO_SLOTS> d;
  Ring<DS_STAGES> s;
  uint32_t p_phase = 0;
  float grad_key[HEAD_DIM / 2] = {};
  float grads[BLOCK_M / 2];
  LeftOperand<HEAD_DIM_V> value;

  const auto issue_grads = [&] {
    auto at = d;
    barrier_wait(shared.do_full(at.stage), at.phase);
    wgmma_fence();
    value.template multiply_part<0, PORTION_COLUMNS>(grads, descriptor(shared.grad_out + at.stage * PORTION_BYTES, 0));
    if constexpr (PAIRED) {
      at.advance();
      barrier_wait(shared.do_full(at.stage), at.phase);
      wgmma_fence();
      value.template multiply_part<PORTION_COLUMNS, HEAD_DIM_V>(
          grads, descriptor(shared.grad_out + at.stage * PORTION_BYTES, 0));
    }
    wgmma_commit();
  };
  const auto release_grad_out = [&] {
#pragma unroll
    for (int portion = 0; portion < DO_PORTIONS; ++portion) {
      release_stage(shared.do_empty(d.stage));
      d.advance();
    }
  };
  const auto step = [&](auto more) {
    const uint32_t statistics = shared.statistics + q.stage * STATISTICS_BYTES + BLOCK_M * 4 + quad_lane * 8;
    barrier_wait(shared.q_full(q.stage), q.phase);
    barrier_wait(shared.p_full(), p_phase);
    p_phase ^= 1;
#pragma unroll
    for (int i = 0; i < BLOCK_M / 2; i += 4) {
      const float2 negative = read_pair(statistics + 8 * i);
      const float4 p = read_four(handed_over(shared, i / 4));
      grads[i] = p.x * (grads[i] + negative.x);
      grads[i + 1] = p.y * (grads[i + 1] + negative.y);
      grads[i + 2] = p.z * (grads[i + 2] + negative.x);
      grads[i + 3] = p.w * (grads[i + 3] + negative.y);
    }
    uint32_t grad_scores[BLOCK_M / 4];
    pack_all(grad_scores, grads);
    warp_arrive_together(shared.p_empty());
    barrier_wait(shared.ds_empty(s.stage), s.phase ^ 1);
    write_grad_scores(shared.grad_scores + s.stage * DS_BYTES, grad_scores, warp_row);
    store_fence();
    warp_arrive_together(shared.ds_full(s.stage));
    s.advance();
    wgmma_fence();
    accumulate_product<HEAD_DIM>(grad_key, grad_scores, shared.query + q.stage * Q_BYTES);
    wgmma_commit();
    if constexpr (decltype(more)::value) {
      issue_grads();
      wgmma_wait<1>();
      release_stage(shared.q_empty(q.stage));
      wgmma_wait<0>();
      release_grad_out();
    } else {
      wgmma_wait<0>();
      release_stage(shared.q_empty(q.stage));
    }
    q.advance();
  };

  if (tiles > 0) {
    barrier_wait(shared.v_full(), 0);
    value.load(shared.value, 0);
    issue_grads();
    wgmma_wait<0>();
    release_grad_out();
#pragma unroll 1
    for (; tiles > 1; --tiles) step(Flag<true>());
    step(Flag<false>());
  }
  named_arrive(VALUES_READ, 256);
  named_sync(KEYS_READ, 384);
  stage_rows<HEAD_DIM>(grad_key, params.softmax_scale, shared.key, warp_row);
  store_fence();
  named_sync(GRADIENTS, 128);
  if (threadIdx.x == 256) {
    store_rows<BLOCK_N, HEAD_DIM>(grad_key_map, shared.key, work.k_tile * BLOCK_N, work.kv_head, work.batch);
    store_wait();
  }
}

// DETERMINISTIC: who has added to a query tile so far, by shares of the blocks of a cluster.
__device__ __forceinline__ int* semaphore_of(int number, const BackwardParams& params) {
  return params.semaphores + (int64_t)number * SEMAPHORES + rank_in_pair();
}
// A thread that waits for the block's turns, at most two tiles ahead of those that are handed on.
__device__ __forceinline__ void await_turns(const Work& work, const BackwardParams& params, const Shared& shared) {
  Ring<2> turn;
  for_each_tile(work, params, [&](int, int, int number, int) {
    semaphore_wait(semaphore_of(number, params), work.k_tile / BLOCKS_OF_CLUSTER);
    barrier_wait(shared.handed_on(turn.stage), turn.phase ^ 1);
    barrier_arrive(shared.turn_came(turn.stage));
    turn.advance();
  });
}
// A thread that hands them on.
__device__ __forceinline__ void hand_on_turns(const Work& work, const BackwardParams& params, const Shared& shared) {
  Ring<2> turn;
  for_each_tile(work, params, [&](int, int, int number, int) {
    barrier_wait(shared.added(turn.stage), turn.phase);
    semaphore_add(semaphore_of(number, params));
    barrier_arrive(shared.handed_on(turn.stage));
    turn.advance();
  });
}

// columns[64, a box] = grad_scores[64 queries, BLOCK_N] key[BLOCK_N, a box from `first_column` on]
__device__ __forceinline__ void grad_query_product(float (&columns)[BOX_COLUMNS / 2], uint32_t grad_scores,
                                                   uint32_t key, int first_column) {
  const uint32_t right = descriptor(key + first_column / BOX_COLUMNS * BLOCK_N * BOX_ROW_BYTES, 0);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < BLOCK_N / 16; ++k)
    Wgmma<BOX_COLUMNS>::ss_columns(columns, moved(grad_scores, column_group<BLOCK_M>(k)),
                                   moved(right, k * 16 * BOX_ROW_BYTES), k > 0);
  wgmma_commit();
  wgmma_wait<0>();
}

// COLUMNS of a tile of grad_query from `first_column` on, added to its sums, the first ones once `ready` returns.
// Products are as wide as a box, whose columns past HEAD_DIM are zeros.
template <int COLUMNS, class Ready>
__device__ __forceinline__ void add_columns(float* sums, uint32_t grad_scores, uint32_t key, int first_column,
                                            const Ready& ready) {
  float columns[BOX_COLUMNS / 2];
  grad_query_product(columns, grad_scores, key, first_column);
  if (first_column == 0) ready();
  float* to = sums + (first_column / 8 * 128 + threadIdx.x % 128) * 4;
#pragma unroll
  for (int group = 0; group < COLUMNS / 8; ++group) reduce_four(to + group * 128 * 4, columns + 4 * group);
}

// DIRECT: a box of a tile of grad_query from `first_column` on, written to its place.
__device__ __forceinline__ void store_columns(const QueryTile& tile, uint32_t grad_scores, uint32_t key,
                                              int first_column, const BackwardParams& params) {
  float columns[BOX_COLUMNS / 2];
  grad_query_product(columns, grad_scores, key, first_column);
  FinishedPart part;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    part.x[i] = make_float4(columns[4 * i], columns[4 * i + 1], columns[4 * i + 2], columns[4 * i + 3]);
  part.store(tile, Piece(0), first_column / 8, threadIdx.x % 128, params);
}

// PAIRED: a box of this block's half of grad_query, from the keys of both blocks.
template <class Ready>
__device__ __forceinline__ void add_box_of_pair(float* sums, uint32_t grad_scores, uint32_t other_grad_scores, int box,
                                                const Shared& shared, const Ready& ready) {
  constexpr int BOX_BYTES = BLOCK_N * BOX_ROW_BYTES;
  const int column_box = rank_in_pair() * HALF_BOXES + box;
  const uint32_t key = descriptor(shared.key + column_box * BOX_BYTES, 0);
  const uint32_t other_key = descriptor(shared.other_key + box * BOX_BYTES, 0);
  float columns[BOX_COLUMNS / 2];
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < BLOCK_N / 16; ++k)
    Wgmma<BOX_COLUMNS>::ss_columns(columns, moved(grad_scores, column_group<BLOCK_M>(k)),
                                   moved(key, k * 16 * BOX_ROW_BYTES), k > 0);
#pragma unroll
  for (int k = 0; k < BLOCK_N / 16; ++k)
    Wgmma<BOX_COLUMNS>::ss_columns(columns, moved(other_grad_scores, column_group<BLOCK_M>(k)),
                                   moved(other_key, k * 16 * BOX_ROW_BYTES), true);
  wgmma_commit();
  wgmma_wait<0>();
  if (box == 0) ready();
  float* to = sums + (column_box * (BOX_COLUMNS / 8) * 128 + threadIdx.x % 128) * 4;
#pragma unroll
  for (int group = 0; group < BOX_COLUMNS / 8; ++group)
    if (HEAD_DIM % BOX_COLUMNS == 0 || column_box * BOX_COLUMNS + 8 * group < HEAD_DIM)
      reduce_four(to + group * 128 * 4, columns + 4 * group);
}

// The warpgroup of grad_query.
__device__ __forceinline__ void consume_queries(const Work& work, const BackwardParams& params, const Shared& shared) {
  Ring<DS_STAGES> s;
  Ring<2> turn;
  const auto turn_came = [&] {
    if (DETERMINISTIC) barrier_wait(shared.turn_came(turn.stage), turn.phase);
  };
  if (work.tiles(params) > 0) {
    barrier_wait(shared.k_full(), 0);
    if (PAIRED) barrier_wait(shared.other_k_full(), 0);
  }
  for_each_tile(work, params, [&]([[maybe_unused]] int head, [[maybe_unused]] int tile, int number, int) {
    float* sums = params.sums + (int64_t)(number - work.sums_shift) * (BLOCK_M * HEAD_DIM);
    const uint32_t grad_scores = descriptor(shared.grad_scores + s.stage * DS_BYTES, 0);
    barrier_wait(shared.ds_full(s.stage), s.phase);
    if constexpr (PAIRED) {
      barrier_wait(shared.other_ds_full(s.stage), s.phase);
      const uint32_t other = descriptor(shared.other_grad_scores + s.stage * DS_BYTES, 0);
#pragma unroll
      for (int box = 0; box < HALF_BOXES; ++box) add_box_of_pair(sums, grad_scores, other, box, shared, turn_came);
      warp_arrive_remote(shared.ds_empty(s.stage));
    } else if (DIRECT && tile < DIRECT_TILES) {
      const QueryTile query_tile{0, work.batch, head, 0, tile * BLOCK_M, params.seqlen_q, true};
#pragma unroll
      for (int column = 0; column < HEAD_DIM; column += BOX_COLUMNS)
        store_columns(query_tile, grad_scores, shared.key, column, params);
    } else {
#pragma unroll
      for (int column = 0; column + BOX_COLUMNS <= HEAD_DIM; column += BOX_COLUMNS)
        add_columns<BOX_COLUMNS>(sums, grad_scores, shared.key, column, turn_came);
      constexpr int REST = HEAD_DIM % BOX_COLUMNS;
      if constexpr (REST > 0) add_columns<REST>(sums, grad_scores, shared.key, HEAD_DIM - REST, turn_came);
    }
    warp_arrive(shared.ds_empty(s.stage));
    s.advance();
    if (DETERMINISTIC) {
      warp_arrive_together(shared.added(turn.stage));
      turn.advance();
    }
  });
  if (FUSED) {
    published();
    named_sync(QUERIES, 128);
    if (threadIdx.x == 384) count_added(work, CONSUMERS, params);
  }
  named_arrive(KEYS_READ, 384);
}

#if PAIRED
#define CLUSTER_OF_BLOCKS __cluster_dims__(2, 1, 1)
#else
#define CLUSTER_OF_BLOCKS
#endif
extern "C" __global__ void CLUSTER_OF_BLOCKS __launch_bounds__(THREADS, 1) flash_backward(
    const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
    const __grid_constant__ TensorMap value_map, const __grid_constant__ TensorMap grad_out_map,
    const __grid_constant__ TensorMap grad_key_map, const __grid_constant__ TensorMap grad_value_map,
    const __grid_constant__ BackwardParams params) {
  const Shared shared(tile_memory());
  if (threadIdx.x == 0) {
    prefetch_maps(query_map, key_map, value_map, grad_out_map);
    take_ticket(shared.ticket, params);
    barrier_init(shared.k_full(), 1);
    barrier_init(shared.v_full(), 1);
    barrier_init(shared.p_full(), 4 * WARP_ARRIVALS);
    barrier_init(shared.p_empty(), 4 * WARP_ARRIVALS);
    // Stages are filled by an arrival for each copy and the copies' bytes, and emptied by one of each warp that reads.
    for (int stage = 0; stage < Q_STAGES; ++stage) {
      barrier_init(shared.q_full(stage), 2);
      barrier_init(shared.q_empty(stage), 8 * WARP_ARRIVALS * BLOCKS_OF_CLUSTER);
    }
    for (int slot = 0; slot < DO_SLOTS; ++slot) {
      barrier_init(shared.do_full(slot), 1);
      barrier_init(shared.do_empty(slot), 8 * WARP_ARRIVALS * BLOCKS_OF_CLUSTER);
    }
    for (int stage = 0; stage < DS_STAGES; ++stage) {
      barrier_init(shared.ds_full(stage), 4 * WARP_ARRIVALS);
      barrier_init(shared.ds_empty(stage), 4 * WARP_ARRIVALS * BLOCKS_OF_CLUSTER);
      barrier_init(shared.other_ds_full(stage), 1);
    }
    barrier_init(shared.other_k_full(), 1);
    for (int odd = 0; odd < 2; ++odd) {
      barrier_init(shared.turn_came(odd), 1);
      barrier_init(shared.added(odd), 4 * WARP_ARRIVALS);
      barrier_init(shared.handed_on(odd), 1);
    }
    barrier_init_fence();
  }
  const auto meet = [] {
    if (PAIRED)
      cluster_sync();
    else
      __syncthreads();
  };
  meet();
  const Item item = item_at(block_number(shared.ticket, params), params);
  const int warpgroup = uniform(threadIdx.x / 128);
  if (FUSED && item.kind != COMPUTE) {
    do_item<BLOCKS_OF_CLUSTER * THREADS / 128>(item, warpgroup + rank_in_pair() * (THREADS / 128), threadIdx.x == 0,
                                               params, [] { __syncthreads(); });
    if (PAIRED) cluster_sync();  // the other block has read the ticket
    return;
  }
  const Work work = work_of(item, params);
  const int tiles = work.tiles(params) * (params.num_heads / params.num_kv_heads);

  if (warpgroup == 0) {
    registers_release<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) load_tiles(query_map, key_map, value_map, grad_out_map, work, params, shared);
    if (PAIRED && threadIdx.x == 32) send_grad_scores(tiles, shared);
    if (DETERMINISTIC && threadIdx.x == 64) await_turns(work, params, shared);
    if (DETERMINISTIC && threadIdx.x == 96) hand_on_turns(work, params, shared);
  } else if (warpgroup == 1) {
    registers_claim<SUM_REGISTERS>();
    consume_scores(grad_value_map, work, tiles, params, shared);
  } else if (warpgroup == 2) {
    registers_claim<SUM_REGISTERS>();
    consume_gradients(grad_key_map, work, tiles, params, shared);
  } else {
    registers_release<QUERY_REGISTERS>();
    consume_queries(work, params, shared);
  }
  // Nobody leaves while the other block may still arrive on barriers here.
  if (PAIRED) cluster_sync();
}
