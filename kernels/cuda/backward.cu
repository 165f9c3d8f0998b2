// Backward attention on Hopper (compute capability 9.0): gradients of query, key and value, for head_dim up to 128.
//
// With S = query key^T, P = exp2(scale_log2 S - logsumexp), dP = grad_out value^T, delta = rowsum(grad_out out) and
// dS = P (dP - delta):  grad_value = P^T grad_out,  grad_key = scale dS^T query,  grad_query = scale dS key.
//
//   flash_backward_prepare: delta and logsumexp * log2(e) of each query tile, side by side; zeros for grad_query's sums
//   flash_backward, for each tile of BLOCK_N keys (one block; a key head's tiles one after the other):
//     loading warp:    keys and values once; then query and grad_out tiles of BLOCK_M rows, of all query heads of the
//                      group, each with its statistics, by TMA into rings of Q_STAGES and DO_STAGES buffers
//     each consumer warpgroup, 64 keys:
//       issue dP^T = value grad_out^T;  P^T = exp2(S^T) meanwhile;  issue grad_value += P^T grad_out
//       dS^T meanwhile, into shared memory for the others;  issue grad_key += dS^T query
//       issue its share of grad_query = dS key of the tile before, whose dS all have written by now, so that the
//       warpgroups need not be at the same place;  issue the next tile's S^T = key query'^T
//       its share of grad_query into a staging buffer meanwhile
//     storing warps:   add the staged grad_query to float32 sums in global memory, by bulk reduction
//   flash_backward_finish: the sums, scaled and rounded, become grad_query
//
// S^T and dP^T have keys as rows, so that P^T and dS^T are already where a product takes its left operand in registers
// (Shah et al., FlashAttention-3, 2024, describe the method). Query tiles are visited from the last to the first that
// sees the keys: blocks of a head are at the same tile at the same time, which serves L2, and in a fixed order, which
// serves DETERMINISTIC: there, a block adds to a tile once those of all earlier keys have. Blocks then take their
// numbers from a counter, so that the one waited for has always begun.
//
// TURNS: the warpgroups take turns at the exponentials, so that one computes them while the other's products run.
// PERSISTENT: a block for each multiprocessor, which takes one tile of keys after the other from a counter. The next
// tile's loads run beside the last steps and the epilogue, and gradients leave by a warp of their own meanwhile.
//
// MASKED: there is a mask. A block visits the query tiles of a list (backward_mask.cuh); which of the scores of a mixed
// one count comes as bits beside its queries. FLOAT_MASK: it is of numbers of 16 bits, which come by the copy engine
// where bits do not say it all (backward_bias.cuh).
//
// DROPOUT: a word of each thread says which of its scores stay (dropout.cuh). P^T without the others goes into
// grad_value, dP^T without them into dS^T, both without the scale of what stays, which the sums are multiplied by at
// last.
//
// FUSED: the first and the last kernel are items of the main one's list (backward_items.cuh).
// UNSTAGED: consumers add their shares of grad_query from registers, without staging buffers.
// DIRECT: they write those of the first queries, which see the first keys alone, to their place (backward.cuh).
//
// Shared memory: one key and one value tile, Q_STAGES + DO_STAGES tiles of BLOCK_M rows, two of dS, all in boxes of 64
// columns (tma.cuh); BLOCK_M x HEAD_DIM float32 of staging, in the accumulators' own order.
// Registers: (HEAD_DIM + HEAD_DIM_V) / 2 for the sums; STEP_M / 2 each for S and dP, half of that for P and dS rounded;
// (HEAD_DIM + HEAD_DIM_V) / 4 for keys and values where they are kept there.
//
// Defined by the host (backward.py): HEAD_DIM, HEAD_DIM_V (multiples of 16), BLOCK_M, STEP_M (queries of a part of a
// tile), BLOCK_N, Q_STAGES, DO_STAGES, DS_STAGES (2), KEYS_IN_REGISTERS, TURNS, DELTA_FIRST, PERSISTENT, FUSED,
// UNSTAGED, DIRECT, IS_CAUSAL, MASKED, FLOAT_MASK, MASK_PER_KEY, DROPOUT, IS_BF16, DETERMINISTIC.
#include "backward.cuh"

constexpr int THREADS = 128 * (CONSUMERS + 1);
// Who takes tiles from a counter and stores pieces of unequal width has more to remember; the sums of fewer than 128
// columns leave registers for it. So has who walks lists by number; the consumers then know of no diagonal.
constexpr bool MORE_FOR_PRODUCERS = PERSISTENT && (HEAD_DIM % PIECE_COLUMNS != 0 || MASKED);
constexpr int PRODUCER_REGISTERS = MORE_FOR_PRODUCERS ? 40 : 24;
constexpr int CONSUMER_REGISTERS = MORE_FOR_PRODUCERS ? 232 : 240;
static_assert(BLOCK_N % BOX_COLUMNS == 0 && HEAD_DIM <= 128 && HEAD_DIM_V <= 128);
static_assert(!PACKED || (!PERSISTENT && !IN_ORDER));
static_assert(CONSUMERS == 2, "registers, and who takes turns");
static_assert(DS_STAGES == 2, "one is read while the other is written");

// Where the gradients of keys and values leave from. PERSISTENT: not from the places of the keys and values, which the
// next tile's come into meanwhile, but from those of dS and, if these are too small, of the staging buffer.
constexpr bool GRADS_IN_DS = V_BYTES + K_BYTES <= DS_STAGES * DS_BYTES;
constexpr int PIECES_BYTES = UNSTAGED ? 0 : BLOCK_M * HEAD_DIM * 4;
constexpr int STAGING_BYTES = PERSISTENT && !GRADS_IN_DS && PIECES_BYTES < K_BYTES ? K_BYTES : PIECES_BYTES;
static_assert(!PERSISTENT || V_BYTES <= DS_STAGES * DS_BYTES);
static_assert(!UNSTAGED || (!FUSED && !IN_ORDER && !MASKED && !PACKED));

// Named barriers: of all consumers; of the turns, one for each warpgroup; and of each warpgroup alone.
constexpr int ALL_CONSUMERS = 1, FIRST_TURN = 2, CLEARED = FIRST_TURN + CONSUMERS;

// Of a query tile's stage.
#if MASKED
constexpr int STAGE_MASK_BYTES = MASK_BYTES;
#else
constexpr int STAGE_MASK_BYTES = 0;
#endif
#if FLOAT_MASK
constexpr int ALL_VALUES_BYTES = VALUES_BYTES;
#else
constexpr int ALL_VALUES_BYTES = 0;
#endif

static_assert(Q_STAGES <= 4, "four words say of each stage what it holds");

// Byte addresses in shared memory.
struct Shared {
  uint32_t key, value, query, grad_out, grad_scores, staging, values, statistics, mask_bits, kept, ticket, barriers;
  __device__ explicit Shared(uint32_t base)
      : key(base),
        value(key + K_BYTES),
        query(value + V_BYTES),
        grad_out(query + Q_STAGES * Q_BYTES),
        grad_scores(grad_out + DO_STAGES * DO_BYTES),
        staging(grad_scores + DS_STAGES * DS_BYTES),
        values(staging + STAGING_BYTES),
        statistics(values + ALL_VALUES_BYTES),
        mask_bits(statistics + Q_STAGES * STATISTICS_BYTES),
        kept(mask_bits + Q_STAGES * STAGE_MASK_BYTES),
        ticket(kept + (DROPOUT ? 128 * CONSUMERS * 4 : 0)),
        barriers(ticket + 16 + (MASKED + DROPOUT) * 16) {}
  // Of a query tile: its kind, and its head, counted over the batch.
  __device__ uint32_t kind(int stage) const { return ticket + 16 + 4 * stage; }
  __device__ uint32_t head(int stage) const { return ticket + 16 + MASKED * 16 + 4 * stage; }
  __device__ uint32_t barrier(int index) const { return barriers + 8 * index; }
  __device__ uint32_t k_full() const { return barrier(0); }
  __device__ uint32_t v_full() const { return barrier(1); }
  __device__ uint32_t q_full(int stage) const { return barrier(2 + stage); }
  __device__ uint32_t q_empty(int stage) const { return barrier(2 + Q_STAGES + stage); }
  __device__ uint32_t do_full(int stage) const { return barrier(2 + 2 * Q_STAGES + stage); }
  __device__ uint32_t do_empty(int stage) const { return barrier(2 + 2 * Q_STAGES + DO_STAGES + stage); }
  __device__ uint32_t staged(int warpgroup) const { return barrier(2 + 2 * Q_STAGES + 2 * DO_STAGES + warpgroup); }
  __device__ uint32_t sent(int warpgroup) const { return staged(CONSUMERS + warpgroup); }
  __device__ uint32_t ds_full(int stage) const { return staged(2 * CONSUMERS + stage); }
  __device__ uint32_t ds_empty(int stage) const { return ds_full(DS_STAGES + stage); }
  __device__ uint32_t kv_empty() const { return ds_full(2 * DS_STAGES); }
  __device__ uint32_t grads_staged() const { return ds_full(2 * DS_STAGES + 1); }
  __device__ uint32_t grads_sent() const { return ds_full(2 * DS_STAGES + 2); }
  __device__ uint32_t work_full(int stage) const { return ds_full(2 * DS_STAGES + 3 + stage); }
  __device__ uint32_t work_empty(int stage) const { return work_full(2 + stage); }
  __device__ uint32_t values_full() const { return work_empty(2); }
  __device__ uint32_t values_empty() const { return work_empty(3); }
  __device__ uint32_t grad_value() const { return PERSISTENT ? grad_scores : value; }
  __device__ uint32_t grad_key() const { return !PERSISTENT ? key : GRADS_IN_DS ? grad_scores + V_BYTES : staging; }
};

// PERSISTENT: who hears which tiles of keys the block is given: each consumer warp, the storing warps, and who
// exchanges keys.
constexpr int CONSUMER_ARRIVALS = 4 * CONSUMERS * WARP_ARRIVALS, LISTENERS = CONSUMER_ARRIVALS + CONSUMERS + 1;
// An item's kind and index share a word; the host sees to it that indices are small enough.
constexpr int KIND_SHIFT = 28;

// The items of a block: number `number` or, PERSISTENT, those that its loading thread has taken. By whole warps or
// single threads. Calls visit(Work) for tiles of keys, other(Item) for the rest.
template <class Visit, class Other>
__device__ __forceinline__ void for_each_item(int number, const BackwardParams& params, const Shared& shared,
                                              const Visit& visit, const Other& other) {
  if constexpr (!PERSISTENT) {
    visit(work_of(item_at(number, params), params));
  } else {
    const bool alone = threadIdx.x < 128;
#pragma unroll 1
    for (uint32_t given = 0;; ++given) {
      const auto place = Ring<2>::at(given);
      barrier_wait(shared.work_full(place.stage), place.phase);
      int what = read_word(shared.ticket + 8 * place.stage), head = read_word(shared.ticket + 8 * place.stage + 4);
      if (alone) {
        barrier_arrive(shared.work_empty(place.stage));
      } else {
        warp_arrive_together(shared.work_empty(place.stage));
      }
      if (what < 0) return;
      if (!alone) {
        what = uniform(what);
        head = uniform(head);
      }
      const Item given_item{what >> KIND_SHIFT, head, what & (1 << KIND_SHIFT) - 1};
      if (!FUSED || given_item.kind == COMPUTE)
        visit(work_of(given_item, params));
      else
        other(given_item);
    }
  }
}

// The loading thread: takes the next item that no block has, until there are none, and says so to all others. The last
// block to see the end leaves the counters as it found them.
template <class Visit>
__device__ __forceinline__ void give_work(const BackwardParams& params, const Shared& shared, const Visit& visit) {
#pragma unroll 1
  for (uint32_t given = 0;; ++given) {
    const auto place = Ring<2>::at(given);
    const int number = atomicAdd(params.counters, 1);
    // Counted anew each time, for want of a register.
    const int heads = opaque(params.batch) * params.num_kv_heads;
    const bool none = number >= heads * (params.k_tiles + (FUSED ? 2 * params.chunks : 0));
    Item item{};
    if (!none) item = item_at(number, params);
    barrier_wait(shared.work_empty(place.stage), place.phase ^ 1);
    write_word(shared.ticket + 8 * place.stage, none ? -1 : item.kind << KIND_SHIFT | item.index);
    write_word(shared.ticket + 8 * place.stage + 4, item.head);
    barrier_arrive(shared.work_full(place.stage));
    if (none) break;
    if (!FUSED || item.kind == COMPUTE) visit(work_of(item, params));
  }
  if (atomicAdd(params.counters + 1, 1) == gridDim.x - 1) {
    params.counters[0] = 0;
    params.counters[1] = 0;
  }
}

// The loading thread: query and grad_out tiles. `loaded`: how many of either it has loaded before.
__device__ __forceinline__ void load_queries(const TensorMap& query_map, const TensorMap& grad_out_map,
                                             const Work& work, const BackwardParams& params, const Shared& shared,
                                             uint32_t& loaded) {
  if (FUSED) wait_until_prepared(work, params);
  for_each_tile(work, params, [&](int head, int tile, int number, [[maybe_unused]] int entry) {
    const auto q = Ring<Q_STAGES>::at(loaded);
    barrier_wait(shared.q_empty(q.stage), q.phase ^ 1);
#if MASKED
    load_mask(work, head, entry, q.stage, params, shared);
#endif
#if DROPOUT
    write_word(shared.head(q.stage), work.batch * params.num_heads + head);
#endif
    load_rows<BLOCK_M, HEAD_DIM>(query_map, shared.query + q.stage * Q_BYTES, shared.q_full(q.stage), tile * BLOCK_M,
                                 head, work.batch);
    load_bytes<STATISTICS_BYTES>(statistics_of(number, tile, params), shared.statistics + q.stage * STATISTICS_BYTES,
                                 shared.q_full(q.stage));
    const auto d = Ring<DO_STAGES>::at(loaded);
    barrier_wait(shared.do_empty(d.stage), d.phase ^ 1);
    load_rows<BLOCK_M, HEAD_DIM_V>(grad_out_map, shared.grad_out + d.stage * DO_BYTES, shared.do_full(d.stage),
                                   tile * BLOCK_M, head, work.batch);
    ++loaded;
  });
}

// The warp for keys and values: loads a tile of them as soon as the last one has been used, stores that one's
// gradients then.
__device__ __forceinline__ void exchange_keys(const TensorMap& key_map, const TensorMap& value_map,
                                              const TensorMap& grad_key_map, const TensorMap& grad_value_map,
                                              const BackwardParams& params, const Shared& shared) {
  uint32_t kv_phase = 1, grads_phase = 0;  // the places of keys and values are free at first
  Work before;
  before.k_tile = -1;
  const auto store = [&] {
    barrier_wait(shared.grads_staged(), grads_phase);
    grads_phase ^= 1;
    const int row = before.k_tile * BLOCK_N;
    store_rows<BLOCK_N, HEAD_DIM_V>(grad_value_map, shared.grad_value(), row, before.kv_head, before.batch);
    store_rows<BLOCK_N, HEAD_DIM>(grad_key_map, shared.grad_key(), row, before.kv_head, before.batch);
    store_wait();
    barrier_arrive(shared.grads_sent());
  };
  const auto visit = [&](const Work& work) {
    if (MASKED ? count_tiles(work, params) > 0 : work.tiles(params) > 0) {
      barrier_wait(shared.kv_empty(), kv_phase);
      kv_phase ^= 1;
      const int row = work.k_tile * BLOCK_N;
      load_rows<BLOCK_N, HEAD_DIM>(key_map, shared.key, shared.k_full(), row, work.kv_head, work.batch);
      load_rows<BLOCK_N, HEAD_DIM_V>(value_map, shared.value, shared.v_full(), row, work.kv_head, work.batch);
    }
    if (before.k_tile >= 0) store();
    before = work;
  };
  for_each_item(0, params, shared, visit, [](const Item&) {});
  if (before.k_tile >= 0) store();  // else other blocks have been faster
}

// A storing warp, one for each consumer warpgroup: adds its pieces of grad_query to the sums. DETERMINISTIC: says of
// each tile that it has, while it looks whether the next one's turn has come.
__device__ __forceinline__ void store_pieces(const Work& work, const BackwardParams& params, const Shared& shared,
                                             int warpgroup, uint32_t& phase) {
  const Piece piece(warpgroup);
  // 32-bit numbers, as blocks are counted, for want of registers.
  const auto semaphore = [&](int number) { return params.semaphores + ((uint32_t)number * CONSUMERS + warpgroup); };
  int before = -1;
  if (UNSTAGED) return;  // the consumers do it
  for_each_tile(work, params, [&](int, int tile, int number, [[maybe_unused]] int entry) {
    if (DIRECT && tile < DIRECT_TILES) return;  // the consumers do it
    if (DETERMINISTIC) {
#if MASKED
      const int earlier = entry_rank(entry);
#else
      const int earlier = work.k_tile;
#endif
      semaphore_hand_on(before < 0 ? nullptr : semaphore(before), semaphore(number), earlier);
      before = number;
    }
    barrier_wait(shared.staged(warpgroup), phase);
    phase ^= 1;
    float* sums = params.sums + (int64_t)(number - work.sums_shift) * (BLOCK_M * HEAD_DIM) + piece.offset;
    reduce_bytes(sums, shared.staging + 4 * piece.offset, piece.groups * 128 * 16);
    store_wait();
    barrier_arrive(shared.sent(warpgroup));
  });
  if (DETERMINISTIC && before >= 0) {
    store_wait_written();
    semaphore_add(semaphore(before));
  }
  if (FUSED) {
    store_wait_written();
    count_added(work, 1, params);
  }
}

// piece[64, PIECE_COLUMNS] = grad_scores[64 queries, BLOCK_N] key[BLOCK_N, PIECE_COLUMNS]
__device__ __forceinline__ void grad_query_product(float (&piece)[PIECE_COLUMNS / 2], uint32_t grad_scores,
                                                   uint32_t key) {
#pragma unroll
  for (int k = 0; k < BLOCK_N / 16; ++k)
    Wgmma<PIECE_COLUMNS>::ss_columns(piece, moved(grad_scores, column_group<BLOCK_M>(k)),
                                     moved(key, k * 16 * BOX_ROW_BYTES), k > 0);
}

// A consumer's progress.
struct Progress {
  Ring<Q_STAGES> q;
  Ring<DO_STAGES> d;
  Ring<DS_STAGES> s;
  uint32_t sent_phase = 1;   // the staging buffer is free at first
  uint32_t grads_phase = 1;  // and the places that gradients leave from
  uint32_t kv_phase = 0;
  uint32_t values_phase = 0;
};

__device__ __forceinline__ void consume(const TensorMap& grad_key_map, const TensorMap& grad_value_map,
                                        const Work& work, const BackwardParams& params, const Shared& shared,
                                        int warpgroup, Progress& progress) {
  const float scale_log2 = params.softmax_scale_log2;
  const int lane = threadIdx.x % 32, quad_lane = lane % 4;
  const int warp_row = 64 * warpgroup + threadIdx.x % 128 / 32 * 16;  // first of this warp's keys within the tile
  const Piece piece(warpgroup);
  const uint32_t key_columns =
      descriptor(shared.key + piece.first_column / BOX_COLUMNS * BLOCK_N * BOX_ROW_BYTES, BLOCK_N * BOX_ROW_BYTES);
#if !MASKED || DROPOUT || FLOAT_MASK
  const int thread_key = work.k_tile * BLOCK_N + warp_row + lane / 4;  // and thread_key + 8
#endif
#if !MASKED || FLOAT_MASK
  const int first_key = work.k_tile * BLOCK_N + 64 * warpgroup;
  const bool ends = first_key + 64 > work.keys(params);
#endif

  Ring<Q_STAGES>& q = progress.q;
  Ring<DO_STAGES>& d = progress.d;
  Ring<DS_STAGES>& s = progress.s;
  uint32_t& sent_phase = progress.sent_phase;
  const int last_row = (work.q_tiles(params) - 1) * BLOCK_M, end_row = work.first_q_tile * BLOCK_M;
  int number_before = 0;  // UNSTAGED: of the sums of the query tile before
  float grad_key[HEAD_DIM / 2] = {}, grad_value[HEAD_DIM_V / 2] = {};
  float scores[STEP_M / 2], grads[STEP_M / 2];
  LeftOperand<HEAD_DIM> key;
  LeftOperand<HEAD_DIM_V> value;

  // S^T of a part of the query tile in `stage`.
  const auto issue_scores = [&](int stage, int part) {
    wgmma_fence();
    key.multiply(scores, descriptor(shared.query + stage * Q_BYTES + part * STEP_M * BOX_ROW_BYTES, 0));
    wgmma_commit();
  };
  // dP's accumulators begin with -delta, which spares an addition each.
  const auto begin_grads = [&](int stage, int part) {
    if (!DELTA_FIRST) return;
    const uint32_t address =
        shared.statistics + stage * STATISTICS_BYTES + (BLOCK_M + part * STEP_M) * 4 + quad_lane * 8;
#pragma unroll
    for (int i = 0; i < STEP_M / 2; i += 2) {
      const float2 negative = read_pair(address + 8 * (i / 4 * 4));
      grads[i] = negative.x;
      grads[i + 1] = negative.y;
    }
  };
  // This warpgroup's share of grad_query, from the dS in `stage`.
  const auto issue_grad_query = [&](float (&columns)[PIECE_COLUMNS / 2], int stage) {
    wgmma_fence();
    grad_query_product(columns, descriptor(shared.grad_scores + stage * DS_BYTES + piece.first_row * BOX_ROW_BYTES, 0),
                       key_columns);
    wgmma_commit();
  };
  // Hands a share of grad_query to the storing warp.
  const auto stage_columns = [&](const float (&columns)[PIECE_COLUMNS / 2]) {
    barrier_wait(shared.sent(warpgroup), sent_phase);
    sent_phase ^= 1;
    const uint32_t address = shared.staging + 4 * piece.offset + threadIdx.x % 128 * 16;
#pragma unroll
    for (int i = 0; i < PIECE_COLUMNS / 8; ++i)
      if (i < piece.groups) store_four(address + i * 128 * 16, columns + 4 * i);
    store_fence();
    warp_arrive_together(shared.staged(warpgroup), lane);
  };
  // DIRECT: the query head of the tile before.
  [[maybe_unused]] int head_before = work.kv_head * (params.num_heads / params.num_kv_heads);
  // Brings a share of grad_query of the tile before to its sums; the tile after that one begins at `first_row`.
  const auto send_columns = [&](const float (&columns)[PIECE_COLUMNS / 2], int first_row) {
#if DIRECT
    // A query head's first tile is followed by the next one's last.
    const bool ends_head = first_row == last_row;
    const int row_before = ends_head ? end_row : first_row + BLOCK_M;
    if (row_before < DIRECT_TILES * BLOCK_M) {
      static_assert(PIECE_COLUMNS <= 64);
      FinishedPart part;
#pragma unroll
      for (int i = 0; i < PIECE_COLUMNS / 8; ++i)
        part.x[i] = make_float4(columns[4 * i], columns[4 * i + 1], columns[4 * i + 2], columns[4 * i + 3]);
      const QueryTile tile{0, work.batch, head_before, 0, row_before, params.seqlen_q, true};
      part.store(tile, piece, 0, threadIdx.x % 128, params);
      head_before += ends_head;
      return;
    }
    head_before += ends_head;
#endif
    if (!UNSTAGED) return stage_columns(columns);
    float* sums = params.sums + (int64_t)number_before * (BLOCK_M * HEAD_DIM) + piece.offset + threadIdx.x % 128 * 4;
#pragma unroll
    for (int i = 0; i < PIECE_COLUMNS / 8; ++i)
      if (i < piece.groups) reduce_four(sums + i * 128 * 4, columns + 4 * i);
    // A query head's first tile is followed by the next one's last.
    number_before += first_row == last_row ? 2 * params.q_tiles - 1 - work.first_q_tile : -1;
  };
  // Of packed sequences: how many rows of the last query tile are not the next sequence's, which may be infinite or
  // NaN.
  const int own_rows = PACKED ? work.queries(params) - last_row : BLOCK_M;
  const auto clear_query = [&](int stage) {
    if (own_rows < BLOCK_M)
      clear_rows<BLOCK_M, HEAD_DIM>(shared.query + stage * Q_BYTES, own_rows, CLEARED + warpgroup);
  };
  // One query tile, whose first row is `first_row`. `before`: it is not the first one. `more`: it is not the last one.
  const auto step = [&](int first_row, auto before, auto more) {
    constexpr bool BEFORE = decltype(before)::value, MORE = decltype(more)::value;
    const uint32_t grad_scores_tile = shared.grad_scores + s.stage * DS_BYTES;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const bool last_part = part == PARTS - 1;
      const uint32_t rows = part * STEP_M * BOX_ROW_BYTES;
      const uint32_t query = shared.query + q.stage * Q_BYTES + rows;
      const uint32_t grad_out = shared.grad_out + d.stage * DO_BYTES + rows;
      const uint32_t statistics = shared.statistics + q.stage * STATISTICS_BYTES + part * STEP_M * 4 + quad_lane * 8;
#if MASKED
      const int kind = read_word(shared.kind(q.stage));
      const uint32_t mask_word =
          shared.mask_bits + q.stage * MASK_BYTES + (part * 128 * CONSUMERS + threadIdx.x - 128) * 4;
#endif
#if DROPOUT
      const uint2 keys_random = column_keys(read_word(shared.head(q.stage)), thread_key, params);
#endif
      if (part == 0) {
        barrier_wait(shared.do_full(d.stage), d.phase);
        if (PACKED && first_row == last_row && own_rows < BLOCK_M)
          clear_rows<BLOCK_M, HEAD_DIM_V>(grad_out, own_rows, CLEARED + warpgroup);
      }
      wgmma_fence();
      value.multiply(grads, descriptor(grad_out, 0), DELTA_FIRST);
      wgmma_commit();

#if DROPOUT
      // Through shared memory, since no register is left for it.
      const uint32_t kept = shared.kept + (threadIdx.x - 128) * 4;
      write_word(kept, kept_scores(shared.statistics + q.stage * STATISTICS_BYTES + (2 * BLOCK_M + part * STEP_M) * 4,
                                   keys_random, params.dropout.threshold, quad_lane));
#endif
#if MASKED
      if (kind == BITS) keep_some(scores, read_word(mask_word), -INFINITY_F);
#if FLOAT_MASK
      if (kind == VALUES) {
        add_values(scores, shared, progress.values_phase, warp_row, statistics, params.softmax_scale);
        if (ends) mask_keys(scores, thread_key, 0, params.seqlen_k);
      }
#endif
#else
      if (ends || (IS_CAUSAL && first_row + part * STEP_M < first_key + 63))
        mask_keys(scores, thread_key, first_row + part * STEP_M, work.keys(params));
#endif
      if (TURNS) named_sync(FIRST_TURN + warpgroup, 128 * CONSUMERS);
#if FLOAT_MASK
      if (kind == VALUES) {
#pragma unroll
        for (int i = 0; i < STEP_M / 2; ++i) scores[i] = exp2_approx(scores[i]);
      } else
#endif
#pragma unroll
        for (int i = 0; i < STEP_M / 2; i += 4) {
          const float2 logsumexp = read_pair(statistics + 8 * i);
          scores[i] = exp2_approx(fmaf(scores[i], scale_log2, -logsumexp.x));
          scores[i + 1] = exp2_approx(fmaf(scores[i + 1], scale_log2, -logsumexp.y));
          scores[i + 2] = exp2_approx(fmaf(scores[i + 2], scale_log2, -logsumexp.x));
          scores[i + 3] = exp2_approx(fmaf(scores[i + 3], scale_log2, -logsumexp.y));
        }
      uint32_t probabilities[STEP_M / 4];
#if DROPOUT
      pack_some(probabilities, scores, read_word(kept));
#else
      pack_all(probabilities, scores);
#endif
      uint32_t all = 0;
#pragma unroll
      for (int i = 0; i < STEP_M / 4; ++i) all |= probabilities[i];
      // Nobody waits for the turn that would follow the last one.
      if (TURNS && (MORE || !last_part || warpgroup == 0))
        named_arrive_after(FIRST_TURN + 1 - warpgroup, 128 * CONSUMERS, all);
      wgmma_wait_after<0>(all);
      wgmma_wait<0>();
      wgmma_fence();
      accumulate_product<HEAD_DIM_V>(grad_value, probabilities, grad_out);
      wgmma_commit();

#if DROPOUT
      keep_some(grads, read_word(kept), 0.0f);
#endif
#pragma unroll
      for (int i = 0; i < STEP_M / 2; i += 4) {
        if (!DELTA_FIRST) {
          const float2 negative = read_pair(statistics + BLOCK_M * 4 + 8 * i);
          grads[i] += negative.x;
          grads[i + 1] += negative.y;
          grads[i + 2] += negative.x;
          grads[i + 3] += negative.y;
        }
#pragma unroll
        for (int j = i; j < i + 4; ++j) grads[j] *= scores[j];
      }
#if MASKED
      // Not by the probability: dP may be infinite or NaN there.
      if (kind == BITS) keep_some(grads, read_word(mask_word), 0.0f);
#if FLOAT_MASK
      if (kind == VALUES) {
#pragma unroll
        for (int i = 0; i < STEP_M / 2; ++i) grads[i] = scores[i] == 0.0f ? 0.0f : grads[i];
      }
#endif
#endif
      uint32_t grad_scores[STEP_M / 4];
      pack_all(grad_scores, grads);
      if (part == 0) {
        barrier_wait(shared.ds_empty(s.stage), s.phase ^ 1);
        if (PERSISTENT && !BEFORE) barrier_wait(shared.grads_sent(), progress.grads_phase);
      }
      write_grad_scores(grad_scores_tile + rows, grad_scores, warp_row);
      if (last_part) {
        store_fence();
        warp_arrive_together(shared.ds_full(s.stage), lane);
      } else {
        begin_grads(q.stage, part + 1);
      }
      wgmma_fence();
      accumulate_product<HEAD_DIM>(grad_key, grad_scores, query);
      wgmma_commit();
      if (!last_part) {
        issue_scores(q.stage, part + 1);
        wgmma_wait<0>();
      }
    }
    const Ring<DS_STAGES> source = s.previous();
    float columns[PIECE_COLUMNS / 2];
    if (BEFORE) {
      barrier_wait(shared.ds_full(source.stage), source.phase);
      issue_grad_query(columns, source.stage);
      wgmma_wait<1>();  // the sums of keys and values
    } else {
      wgmma_wait<0>();
    }
    s.advance();
    warp_arrive(shared.do_empty(d.stage), lane);
    warp_arrive(shared.q_empty(q.stage), lane);
    d.advance();
    q.advance();
    if constexpr (MORE) {
      barrier_wait(shared.q_full(q.stage), q.phase);
      if (PACKED && first_row == end_row) clear_query(q.stage);
      if (PARTS > 1) begin_grads(q.stage, 0);
      issue_scores(q.stage, 0);
      if (BEFORE) {
        wgmma_wait<1>();
        warp_arrive(shared.ds_empty(source.stage), lane);
        send_columns(columns, first_row);
      }
      wgmma_wait<0>();
      if (PARTS == 1) begin_grads(q.stage, 0);  // no registers before
    } else if (BEFORE) {
      wgmma_wait<0>();
      warp_arrive(shared.ds_empty(source.stage), lane);
      send_columns(columns, first_row);
    }
  };

  int left = count_tiles(work, params);
  if (left > 0) {
    if (TURNS && warpgroup == 1) named_arrive(FIRST_TURN, 128 * CONSUMERS);  // the first turn is the other's
    barrier_wait(shared.k_full(), progress.kv_phase);
    const int own_keys = PACKED ? work.keys(params) - work.k_tile * BLOCK_N : BLOCK_N;
    if (own_keys < BLOCK_N) clear_rows<BLOCK_N, HEAD_DIM>(shared.key, own_keys, CLEARED + warpgroup);
    key.load(shared.key, 64 * warpgroup);
    barrier_wait(shared.q_full(q.stage), q.phase);
    clear_query(q.stage);
    begin_grads(q.stage, 0);
    issue_scores(q.stage, 0);
    wgmma_wait<0>();
    barrier_wait(shared.v_full(), progress.kv_phase);
    if (own_keys < BLOCK_N) clear_rows<BLOCK_N, HEAD_DIM_V>(shared.value, own_keys, CLEARED + warpgroup);
    value.load(shared.value, 64 * warpgroup);
    const int first_head = work.batch * params.num_heads + work.kv_head * (params.num_heads / params.num_kv_heads);
    number_before = (first_head + 1) * params.q_tiles - 1 - work.sums_shift;
    int first_row = last_row;
    const auto advance = [&] {
      --left;
      first_row = first_row == end_row ? last_row : first_row - BLOCK_M;
    };
    if (left == 1) {
      step(first_row, Flag<false>(), Flag<false>());
    } else {
      step(first_row, Flag<false>(), Flag<true>());
      advance();
#pragma unroll 1
      for (; left > 1; advance()) step(first_row, Flag<true>(), Flag<true>());
      step(first_row, Flag<true>(), Flag<false>());
    }
    const Ring<DS_STAGES> source = s.previous();
    float columns[PIECE_COLUMNS / 2];
    barrier_wait(shared.ds_full(source.stage), source.phase);
    issue_grad_query(columns, source.stage);
    wgmma_wait<0>();
    warp_arrive(shared.ds_empty(source.stage), lane);
    if (PERSISTENT) warp_arrive(shared.kv_empty(), lane);
    progress.kv_phase ^= 1;
    send_columns(columns, last_row);
  }
  if (PERSISTENT) {
    barrier_wait(shared.grads_sent(), progress.grads_phase);  // where there was no step
    progress.grads_phase ^= 1;
    named_sync(ALL_CONSUMERS, 128 * CONSUMERS);  // all have read dS
    stage_rows<HEAD_DIM_V>(grad_value, DROPOUT ? params.dropout.scale : 1.0f, shared.grad_value(), warp_row);
    if (!GRADS_IN_DS && !UNSTAGED) {
      barrier_wait(shared.sent(warpgroup), sent_phase);
      named_sync(ALL_CONSUMERS, 128 * CONSUMERS);
    }
    stage_rows<HEAD_DIM>(grad_key, params.softmax_scale, shared.grad_key(), warp_row);
    store_fence();
    warp_arrive_together(shared.grads_staged(), lane);
    return;
  }
  // The gradients leave through the places of the keys and values, which all have read.
  named_sync(ALL_CONSUMERS, 128 * CONSUMERS);
  stage_rows<HEAD_DIM_V>(grad_value, DROPOUT ? params.dropout.scale : 1.0f, shared.grad_value(), warp_row);
  stage_rows<HEAD_DIM>(grad_key, params.softmax_scale, shared.grad_key(), warp_row);
  store_fence();
  named_sync(ALL_CONSUMERS, 128 * CONSUMERS);
#if PACKED
  if (const int rows = work.keys(params) - work.k_tile * BLOCK_N; rows < BLOCK_N) {
    const int64_t row = work.key_row() + work.k_tile * BLOCK_N;
    store_some_rows<HEAD_DIM_V>((uint8_t*)params.grad_value + 2 * (work.kv_head * params.grad_value_stride_head +
                                                                   row * params.grad_value_stride_row),
                                params.grad_value_stride_row, shared.grad_value(), rows, params.head_dim_v);
    store_some_rows<HEAD_DIM>(
        (uint8_t*)params.grad_key + 2 * (work.kv_head * params.grad_key_stride_head + row * params.grad_key_stride_row),
        params.grad_key_stride_row, shared.grad_key(), rows, params.head_dim);
    return;
  }
#endif
  if (threadIdx.x == 128) {
    const int row = work.key_row() + work.k_tile * BLOCK_N;
    store_rows<BLOCK_N, HEAD_DIM_V>(grad_value_map, shared.grad_value(), row, work.kv_head, work.batch);
    store_rows<BLOCK_N, HEAD_DIM>(grad_key_map, shared.grad_key(), row, work.kv_head, work.batch);
    store_wait();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_backward(
    const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
    const __grid_constant__ TensorMap value_map, const __grid_constant__ TensorMap grad_out_map,
    const __grid_constant__ TensorMap grad_key_map, const __grid_constant__ TensorMap grad_value_map,
#if FLOAT_MASK
    const __grid_constant__ TensorMap mask_map,
#endif
    const __grid_constant__ BackwardParams params) {
  const Shared shared(tile_memory());
  if (threadIdx.x == 0) {
    prefetch_maps(query_map, key_map, value_map, grad_out_map);
    if (!PERSISTENT) take_ticket(shared.ticket, params);
    barrier_init(shared.k_full(), 1);
    barrier_init(shared.v_full(), 1);
    // Stages are filled by an arrival for each copy and the copies' bytes, and emptied by one of each consumer warp.
    for (int stage = 0; stage < Q_STAGES; ++stage) {
      barrier_init(shared.q_full(stage), 2 + MASKED);
      barrier_init(shared.q_empty(stage), CONSUMER_ARRIVALS);
    }
    for (int stage = 0; stage < DO_STAGES; ++stage) {
      barrier_init(shared.do_full(stage), 1);
      barrier_init(shared.do_empty(stage), CONSUMER_ARRIVALS);
    }
    for (int warpgroup = 0; warpgroup < CONSUMERS; ++warpgroup) {
      barrier_init(shared.staged(warpgroup), 4 * WARP_ARRIVALS);
      barrier_init(shared.sent(warpgroup), 1);
    }
    barrier_init(shared.values_full(), 1);
    barrier_init(shared.values_empty(), CONSUMER_ARRIVALS);
    barrier_init(shared.kv_empty(), CONSUMER_ARRIVALS);
    barrier_init(shared.grads_staged(), CONSUMER_ARRIVALS);
    barrier_init(shared.grads_sent(), 1);
    for (int stage = 0; stage < 2; ++stage) {
      barrier_init(shared.work_full(stage), 1);
      barrier_init(shared.work_empty(stage), LISTENERS);
    }
    for (int stage = 0; stage < DS_STAGES; ++stage) {
      barrier_init(shared.ds_full(stage), CONSUMER_ARRIVALS);
      barrier_init(shared.ds_empty(stage), CONSUMER_ARRIVALS);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int number = PERSISTENT ? 0 : block_number(shared.ticket, params);
  if (FUSED && !PERSISTENT) {
    const Item item = item_at(number, params);
    if (item.kind != COMPUTE)
      return do_item<CONSUMERS + 1>(item, uniform(threadIdx.x / 128), threadIdx.x == 0, params,
                                    [] { __syncthreads(); });
  }
  // The list of packed sequences has room for other lengths.
  if (PACKED && work_of(item_at(number, params), params).keys(params) == 0) return;

  if (threadIdx.x < 128) {
    registers_release<PRODUCER_REGISTERS>();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
      uint32_t loaded = 0;
      if (PERSISTENT)
        give_work(params, shared,
                  [&](const Work& work) { load_queries(query_map, grad_out_map, work, params, shared, loaded); });
      else
        produce(query_map, key_map, value_map, grad_out_map, work_of(item_at(number, params), params), params, shared);
    }
    if (threadIdx.x % 32 == 0 && 1 <= warp && warp <= CONSUMERS) {
      uint32_t phase = 0;
      for_each_item(
          number, params, shared, [&](const Work& work) { store_pieces(work, params, shared, warp - 1, phase); },
          [](const Item&) {});
    }
    if (PERSISTENT && threadIdx.x == 96)
      exchange_keys(key_map, value_map, grad_key_map, grad_value_map, params, shared);
#if FLOAT_MASK
    if (threadIdx.x == 96) load_values(mask_map, work_of(item_at(number, params), params), params, shared);
#endif
  } else {
    registers_claim<CONSUMER_REGISTERS>();
    Progress progress;
    const int warpgroup = uniform(threadIdx.x / 128) - 1;
    for_each_item(
        number, params, shared,
        [&](const Work& work) { consume(grad_key_map, grad_value_map, work, params, shared, warpgroup, progress); },
        [&](const Item& other) {
          do_item<CONSUMERS>(other, warpgroup, threadIdx.x == 128, params,
                             [] { named_sync(ALL_CONSUMERS, 128 * CONSUMERS); });
        });
  }
}
