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
//       once all have written dS:  issue its share of grad_query = dS key;  issue the next tile's S^T = key query'^T
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
// Shared memory: one key and one value tile, Q_STAGES + DO_STAGES tiles of BLOCK_M rows, DS_STAGES of dS, all in boxes
// of 64 columns (tma.cuh); BLOCK_M x HEAD_DIM float32 of staging, in the accumulators' own order.
// Registers: (HEAD_DIM + HEAD_DIM_V) / 2 for the sums; STEP_M / 2 each for S and dP, half of that for P and dS rounded;
// (HEAD_DIM + HEAD_DIM_V) / 4 for keys and values where they are kept there.
//
// Defined by the host (backward.py): HEAD_DIM, HEAD_DIM_V (multiples of 16), BLOCK_M, STEP_M (queries of a part of a
// tile), BLOCK_N, Q_STAGES, DO_STAGES, DS_STAGES, EARLY_SCORES (the next S^T is issued before this part is done),
// KEYS_IN_REGISTERS, DELTA_FIRST (dP's accumulators begin with -delta, which saves an addition each), IS_CAUSAL,
// IS_BF16, DETERMINISTIC.
#include "barrier.cuh"
#include "softmax.cuh"
#include "wgmma.cuh"
#include "wgmma_instructions.cuh"

// Mirrored by backward.py.
struct BackwardParams {
  const void* out;         // [batch, num_heads, seqlen_q, head_dim_v], last stride 1
  const void* grad_out;    // the same shape
  const float* logsumexp;  // [batch, num_heads, logsumexp_pitch], natural logarithm
  void* grad_query;        // [batch, num_heads, seqlen_q, head_dim], last stride 1
  float* statistics;       // [batch * num_heads * q_tiles, 2, BLOCK_M]: logsumexp in base 2, -delta
  float* sums;             // [batch * num_heads * q_tiles, BLOCK_M * HEAD_DIM], in the order of `Piece`
  int* semaphores;         // deterministic only: [batch * num_heads * q_tiles, CONSUMERS]
  int* counters;           // deterministic only: blocks begun, blocks done; both zero between launches
  int64_t out_stride_batch, out_stride_head, out_stride_row;  // elements
  int64_t grad_out_stride_batch, grad_out_stride_head, grad_out_stride_row;
  int64_t grad_query_stride_batch, grad_query_stride_head, grad_query_stride_row;
  int batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v, logsumexp_pitch;
  int q_tiles, k_tiles, heads_per_group;
  float softmax_scale, softmax_scale_log2;
};

constexpr int CONSUMERS = BLOCK_N / 64;
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 24;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 240;
constexpr int PREPARE_THREADS = 256;

// A consumer does a query tile in parts, which bounds its registers.
constexpr int PARTS = BLOCK_M / STEP_M;
static_assert(BLOCK_M % STEP_M == 0 && STEP_M % 16 == 0);

constexpr int BOXES = ceil_div(HEAD_DIM, BOX_COLUMNS);
constexpr int Q_BYTES = BLOCK_M * round_up(HEAD_DIM, BOX_COLUMNS) * 2;
constexpr int DO_BYTES = BLOCK_M * round_up(HEAD_DIM_V, BOX_COLUMNS) * 2;
constexpr int K_BYTES = BLOCK_N * round_up(HEAD_DIM, BOX_COLUMNS) * 2;
constexpr int V_BYTES = BLOCK_N * round_up(HEAD_DIM_V, BOX_COLUMNS) * 2;
constexpr int DS_BYTES = BLOCK_M * BLOCK_N * 2;
constexpr int STATISTICS_BYTES = 2 * BLOCK_M * 4;

// How the warpgroups share a tile of grad_query: 64 rows each where there are so many, else whole boxes of columns.
constexpr bool SPLIT_ROWS = BLOCK_M == 64 * CONSUMERS;
constexpr int PIECE_COLUMNS = SPLIT_ROWS ? HEAD_DIM : BOXES / CONSUMERS * BOX_COLUMNS;
static_assert(SPLIT_ROWS || (BLOCK_M == 64 && BOXES % CONSUMERS == 0), "grad_query cannot be shared out");
static_assert(BLOCK_N % BOX_COLUMNS == 0 && HEAD_DIM <= 128 && HEAD_DIM_V <= 128);

// One warpgroup's part of a tile of grad_query, and where it lies in the tile's sums: groups of 8 columns one after
// the other, each with 4 values for each of the 128 threads, as the accumulators have them (softmax.cuh).
struct Piece {
  int first_row, first_column, groups, offset;  // offset in floats
  __device__ explicit Piece(int warpgroup)
      : first_row(SPLIT_ROWS ? 64 * warpgroup : 0),
        first_column(SPLIT_ROWS ? 0 : PIECE_COLUMNS * warpgroup),
        // Columns of the last box past HEAD_DIM are computed, as zeros, but not kept.
        groups(HEAD_DIM % PIECE_COLUMNS ? min(PIECE_COLUMNS, HEAD_DIM - first_column) / 8 : PIECE_COLUMNS / 8),
        offset(SPLIT_ROWS ? 64 * HEAD_DIM * warpgroup : 64 * first_column) {}
};

// Byte addresses in shared memory.
struct Shared {
  uint32_t key, value, query, grad_out, grad_scores, staging, statistics, ticket, barriers;
  __device__ explicit Shared(uint32_t base)
      : key(base),
        value(key + K_BYTES),
        query(value + V_BYTES),
        grad_out(query + Q_STAGES * Q_BYTES),
        grad_scores(grad_out + DO_STAGES * DO_BYTES),
        staging(grad_scores + DS_STAGES * DS_BYTES),
        statistics(staging + BLOCK_M * HEAD_DIM * 4),
        ticket(statistics + Q_STAGES * STATISTICS_BYTES),
        barriers(ticket + 16) {}
  __device__ uint32_t barrier(int index) const { return barriers + 8 * index; }
  __device__ uint32_t k_full() const { return barrier(0); }
  __device__ uint32_t v_full() const { return barrier(1); }
  __device__ uint32_t q_full(int stage) const { return barrier(2 + stage); }
  __device__ uint32_t q_empty(int stage) const { return barrier(2 + Q_STAGES + stage); }
  __device__ uint32_t do_full(int stage) const { return barrier(2 + 2 * Q_STAGES + stage); }
  __device__ uint32_t do_empty(int stage) const { return barrier(2 + 2 * Q_STAGES + DO_STAGES + stage); }
  __device__ uint32_t staged(int warpgroup) const { return barrier(2 + 2 * Q_STAGES + 2 * DO_STAGES + warpgroup); }
  __device__ uint32_t sent(int warpgroup) const { return staged(CONSUMERS + warpgroup); }
};

// What a block does: one tile of keys, and the query tiles from the last down to the first that sees any of them.
struct Work {
  int k_tile, kv_head, batch, first_q_tile;
  __device__ __forceinline__ int tiles(const BackwardParams& params) const {
    return max(params.q_tiles - first_q_tile, 0);
  }
};

// Causal: the first keys, which most queries see, come first, of a group of heads whose queries stay in L2 together.
__device__ __forceinline__ Work work_at(int index, const BackwardParams& params) {
  int head;
  Work work;
  if (IS_CAUSAL) {
    const int group_tiles = params.heads_per_group * params.k_tiles;
    const int first = index / group_tiles * params.heads_per_group, within = index % group_tiles;
    const int heads = min(params.heads_per_group, params.batch * params.num_kv_heads - first);
    head = first + within % heads;
    work.k_tile = within / heads;
  } else {
    head = index / params.k_tiles;
    work.k_tile = index % params.k_tiles;
  }
  work.batch = head / params.num_kv_heads;
  work.kv_head = head % params.num_kv_heads;
  work.first_q_tile = IS_CAUSAL ? work.k_tile * BLOCK_N / BLOCK_M : 0;
  return work;
}

// Calls `visit(query head, query tile, the tile's number in the workspace)` for all that a block works on, in order.
template <class Visit>
__device__ __forceinline__ void for_each_tile(const Work& work, const BackwardParams& params, const Visit& visit) {
  const int group = params.num_heads / params.num_kv_heads;
#pragma unroll 1
  for (int head = work.kv_head * group; head < (work.kv_head + 1) * group; ++head) {
    const int64_t first = ((int64_t)work.batch * params.num_heads + head) * params.q_tiles;
#pragma unroll 1
    for (int tile = params.q_tiles - 1; tile >= work.first_q_tile; --tile) visit(head, tile, first + tile);
  }
}

__device__ __forceinline__ void produce(const TensorMap& query_map, const TensorMap& key_map,
                                        const TensorMap& value_map, const TensorMap& grad_out_map, const Work& work,
                                        const BackwardParams& params, const Shared& shared) {
  Ring<Q_STAGES> q;
  Ring<DO_STAGES> d;
  bool first = true;
  for_each_tile(work, params, [&](int head, int tile, int64_t number) {
    // In the order in which the consumers need them.
    if (first)
      load_rows<BLOCK_N, HEAD_DIM>(key_map, shared.key, shared.k_full(), work.k_tile * BLOCK_N, work.kv_head,
                                   work.batch);
    barrier_wait(shared.q_empty(q.stage), q.phase ^ 1);
    load_rows<BLOCK_M, HEAD_DIM>(query_map, shared.query + q.stage * Q_BYTES, shared.q_full(q.stage), tile * BLOCK_M,
                                 head, work.batch);
    load_bytes<STATISTICS_BYTES>(params.statistics + number * (2 * BLOCK_M),
                                 shared.statistics + q.stage * STATISTICS_BYTES, shared.q_full(q.stage));
    q.advance();
    if (first)
      load_rows<BLOCK_N, HEAD_DIM_V>(value_map, shared.value, shared.v_full(), work.k_tile * BLOCK_N, work.kv_head,
                                     work.batch);
    first = false;
    barrier_wait(shared.do_empty(d.stage), d.phase ^ 1);
    load_rows<BLOCK_M, HEAD_DIM_V>(grad_out_map, shared.grad_out + d.stage * DO_BYTES, shared.do_full(d.stage),
                                   tile * BLOCK_M, head, work.batch);
    d.advance();
  });
}

// A storing warp, one for each consumer warpgroup: adds its pieces of grad_query to the sums.
__device__ __forceinline__ void store_pieces(const Work& work, const BackwardParams& params, const Shared& shared,
                                             int warpgroup) {
  const Piece piece(warpgroup);
  uint32_t phase = 0;
  for_each_tile(work, params, [&](int, int, int64_t number) {
    barrier_wait(shared.staged(warpgroup), phase);
    int* semaphore = params.semaphores + number * CONSUMERS + warpgroup;
    if (DETERMINISTIC) semaphore_wait(semaphore, work.k_tile);
    reduce_bytes(params.sums + number * (BLOCK_M * HEAD_DIM) + piece.offset, shared.staging + 4 * piece.offset,
                 piece.groups * 128 * 16);
    store_wait();
    barrier_arrive(shared.sent(warpgroup));
    if (DETERMINISTIC) {
      store_wait_written();
      semaphore_add(semaphore);
    }
    phase ^= 1;
  });
}

// A left operand of 64 rows and COLUMNS columns: a descriptor of it in a tile of keys, or its elements.
template <int COLUMNS>
struct LeftOperand {
  uint32_t tile;
  uint32_t words[KEYS_IN_REGISTERS ? COLUMNS / 4 : 1];

  // By a warpgroup, whose rows begin at `first_row`; the tile must have arrived if its elements are to be read.
  __device__ __forceinline__ void load(uint32_t address, int first_row) {
    tile = descriptor(address + first_row * BOX_ROW_BYTES, 0);
    if constexpr (KEYS_IN_REGISTERS) {
      const int row = first_row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16, half = threadIdx.x % 32 / 16;
#pragma unroll
      for (int k = 0; k < COLUMNS / 16; ++k) {
        uint32_t a[4];
        load_matrices(a, chunk_address<BLOCK_N>(address, row, 2 * k + half));
#pragma unroll
        for (int i = 0; i < 4; ++i) words[4 * k + i] = a[i];
      }
    }
  }
  // result[64 keys, STEP_M queries] (+)= this rows^T, rows [STEP_M, COLUMNS] in a tile of BLOCK_M
  __device__ __forceinline__ void multiply(float (&result)[STEP_M / 2], uint32_t rows, bool accumulate) const {
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; ++k) {
      const uint32_t right = moved(rows, column_group<BLOCK_M>(k));
      if constexpr (KEYS_IN_REGISTERS)
        Wgmma<STEP_M>::rs_rows(result, words + 4 * k, right, accumulate || k > 0);
      else
        Wgmma<STEP_M>::ss(result, moved(tile, column_group<BLOCK_N>(k)), right, accumulate || k > 0);
    }
  }
};
// sums[64 keys, COLUMNS] += packed[64 keys, STEP_M queries] rows[STEP_M, COLUMNS]
template <int COLUMNS>
__device__ __forceinline__ void accumulate_product(float (&sums)[COLUMNS / 2], const uint32_t (&packed)[STEP_M / 4],
                                                   uint32_t rows) {
#pragma unroll
  for (int k = 0; k < STEP_M / 16; ++k)
    Wgmma<COLUMNS>::rs(sums, packed + 4 * k, moved(rows, k * 16 * BOX_ROW_BYTES), true);
}
// piece[64, PIECE_COLUMNS] = grad_scores[64 queries, BLOCK_N] key[BLOCK_N, PIECE_COLUMNS]
__device__ __forceinline__ void grad_query_product(float (&piece)[PIECE_COLUMNS / 2], uint32_t grad_scores,
                                                   uint32_t key) {
#pragma unroll
  for (int k = 0; k < BLOCK_N / 16; ++k)
    Wgmma<PIECE_COLUMNS>::ss_columns(piece, moved(grad_scores, column_group<BLOCK_M>(k)),
                                     moved(key, k * 16 * BOX_ROW_BYTES), k > 0);
}

__device__ __forceinline__ void pack_all(uint32_t (&packed)[STEP_M / 4], const float (&x)[STEP_M / 2]) {
#pragma unroll
  for (int i = 0; i < STEP_M / 4; ++i) packed[i] = pack(x[2 * i], x[2 * i + 1]);
}

// Two statistics of neighbouring queries.
__device__ __forceinline__ float2 read_pair(uint32_t address) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address));
  return pair;
}

// Hides keys from queries: of this thread's two keys, the first sees columns from `first_0` on, the second `first_1`.
__device__ __forceinline__ void mask_columns(float (&scores)[STEP_M / 2], int first_0, int first_1, int quad_lane) {
  first_0 -= 2 * quad_lane;
  first_1 -= 2 * quad_lane;
#pragma unroll
  for (int i = 0; i < STEP_M / 2; i += 4) {
    scores[i] = 2 * i >= first_0 ? scores[i] : -INFINITY_F;
    scores[i + 1] = 2 * i + 1 >= first_0 ? scores[i + 1] : -INFINITY_F;
    scores[i + 2] = 2 * i >= first_1 ? scores[i + 2] : -INFINITY_F;
    scores[i + 3] = 2 * i + 1 >= first_1 ? scores[i + 3] : -INFINITY_F;
  }
}

// Writes dS^T, of this warp's 16 keys, as rows of queries: the matrices are transposed on their way. `first_key` counts
// within the tile.
__device__ __forceinline__ void write_grad_scores(uint32_t tile, const uint32_t (&packed)[STEP_M / 4], int first_key) {
  const int lane = threadIdx.x % 32;
  // Word 4 i + m is the 8x8 matrix of keys 8 (m % 2) + 0..7 and queries 16 i + 8 (m / 2) + 0..7.
  const int query = lane / 16 * 8 + lane % 8, chunk = first_key / 8 + lane / 8 % 2;
  const uint32_t address = chunk_address<BLOCK_M>(tile, query, chunk);
#pragma unroll
  for (int i = 0; i < STEP_M / 16; ++i)
    // 16 rows further on the swizzle is the same.
    store_matrices_transposed(address + i * 16 * BOX_ROW_BYTES, packed[4 * i], packed[4 * i + 1], packed[4 * i + 2],
                              packed[4 * i + 3]);
}

// Rounds this warp's 16 rows of grad_key or grad_value into a tile in shared memory.
template <int COLUMNS>
__device__ __forceinline__ void stage_rows(const float (&sums)[COLUMNS / 2], float scale, uint32_t tile,
                                           int first_row) {
  const int lane = threadIdx.x % 32;
  const int row = first_row + lane % 16;  // matrices: rows 0 to 7 and 8 to 15, of two groups of 8 columns
#pragma unroll
  for (int group = 0; group < COLUMNS / 8; group += 2) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * (group + i / 2) + 2 * (i % 2);
      words[i] = pack(sums[at] * scale, sums[at + 1] * scale);
    }
    store_matrices(chunk_address<BLOCK_N>(tile, row, group + lane / 16), words);
  }
}

template <bool VALUE>
struct Flag {
  static constexpr bool value = VALUE;
};

__device__ __forceinline__ void consume(const TensorMap& grad_key_map, const TensorMap& grad_value_map,
                                        const Work& work, const BackwardParams& params, const Shared& shared,
                                        int warpgroup) {
  const float scale_log2 = params.softmax_scale_log2;
  const int lane = threadIdx.x % 32, quad_lane = lane % 4;
  const int warp_row = 64 * warpgroup + threadIdx.x % 128 / 32 * 16;  // first of this warp's keys within the tile
  const Piece piece(warpgroup);
  const uint32_t key_columns =
      descriptor(shared.key + piece.first_column / BOX_COLUMNS * BLOCK_N * BOX_ROW_BYTES, BLOCK_N * BOX_ROW_BYTES);
  const int first_key = work.k_tile * BLOCK_N + 64 * warpgroup;
  const int thread_key = work.k_tile * BLOCK_N + warp_row + lane / 4;  // and thread_key + 8
  const bool ends = first_key + 64 > params.seqlen_k;

  Ring<Q_STAGES> q;
  Ring<DO_STAGES> d;
  Ring<DS_STAGES> s;
  uint32_t sent_phase = 1;  // the staging buffer is free at first
  float grad_key[HEAD_DIM / 2] = {}, grad_value[HEAD_DIM_V / 2] = {};
  float scores[STEP_M / 2];
  LeftOperand<HEAD_DIM> key;
  LeftOperand<HEAD_DIM_V> value;

  const auto release = [&](uint32_t barrier) {
    if (lane == 0) barrier_arrive(barrier);
  };
  const auto issue_scores = [&](int part) {
    wgmma_fence();
    key.multiply(scores, descriptor(shared.query + q.stage * Q_BYTES + part * STEP_M * BOX_ROW_BYTES, 0), false);
    wgmma_commit();
  };
  // Keys past the end would only add zeros, but exp2 of their scores may be infinite.
  const auto mask_scores = [&](int first_row) {
    const int hidden = STEP_M + 1;
    const int first_0 = IS_CAUSAL ? thread_key - first_row : 0, first_1 = IS_CAUSAL ? first_0 + 8 : 0;
    mask_columns(scores, thread_key < params.seqlen_k ? first_0 : hidden,
                 thread_key + 8 < params.seqlen_k ? first_1 : hidden, quad_lane);
  };

  // One query tile, whose first row is `first_row`. `more`: it is not the last one.
  const auto step = [&](int first_row, auto more) {
    constexpr bool MORE = decltype(more)::value;
    const uint32_t grad_scores_tile = shared.grad_scores + s.stage * DS_BYTES;
    float columns[PIECE_COLUMNS / 2];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const bool last_part = part == PARTS - 1;
      const uint32_t rows = part * STEP_M * BOX_ROW_BYTES;
      const uint32_t query = shared.query + q.stage * Q_BYTES + rows;
      const uint32_t grad_out = shared.grad_out + d.stage * DO_BYTES + rows;
      const uint32_t statistics = shared.statistics + q.stage * STATISTICS_BYTES + part * STEP_M * 4 + quad_lane * 8;
      if (!EARLY_SCORES) {
        if (part == 0) barrier_wait(shared.q_full(q.stage), q.phase);
        issue_scores(part);
      }
      if (part == 0) barrier_wait(shared.do_full(d.stage), d.phase);
      float grads[STEP_M / 2];
      if constexpr (DELTA_FIRST) {
#pragma unroll
        for (int i = 0; i < STEP_M / 2; i += 2) {
          const float2 negative = read_pair(statistics + BLOCK_M * 4 + 8 * (i & ~3));
          grads[i] = negative.x;
          grads[i + 1] = negative.y;
        }
      }
      wgmma_fence();
      value.multiply(grads, descriptor(grad_out, 0), DELTA_FIRST);
      wgmma_commit();
      if (!EARLY_SCORES) wgmma_wait<1>();

      if (ends || (IS_CAUSAL && first_row + part * STEP_M < first_key + 63)) mask_scores(first_row + part * STEP_M);
#pragma unroll
      for (int i = 0; i < STEP_M / 2; i += 4) {
        const float2 logsumexp = read_pair(statistics + 8 * i);
        scores[i] = exp2_approx(fmaf(scores[i], scale_log2, -logsumexp.x));
        scores[i + 1] = exp2_approx(fmaf(scores[i + 1], scale_log2, -logsumexp.y));
        scores[i + 2] = exp2_approx(fmaf(scores[i + 2], scale_log2, -logsumexp.x));
        scores[i + 3] = exp2_approx(fmaf(scores[i + 3], scale_log2, -logsumexp.y));
      }
      uint32_t probabilities[STEP_M / 4];
      pack_all(probabilities, scores);
      wgmma_wait<0>();
      wgmma_fence();
      accumulate_product<HEAD_DIM_V>(grad_value, probabilities, descriptor(grad_out, BLOCK_M * BOX_ROW_BYTES));
      wgmma_commit();

#pragma unroll
      for (int i = 0; i < STEP_M / 2; i += 4) {
        if constexpr (!DELTA_FIRST) {
          const float2 negative = read_pair(statistics + BLOCK_M * 4 + 8 * i);
          grads[i] += negative.x;
          grads[i + 1] += negative.y;
          grads[i + 2] += negative.x;
          grads[i + 3] += negative.y;
        }
#pragma unroll
        for (int j = i; j < i + 4; ++j) grads[j] *= scores[j];
      }
      uint32_t grad_scores[STEP_M / 4];
      pack_all(grad_scores, grads);
      // With two buffers, who writes one has passed the barrier below after all have read it: a step ago.
      if (DS_STAGES == 1 && part == 0) named_sync(2, 128 * CONSUMERS);
      write_grad_scores(grad_scores_tile + rows, grad_scores, warp_row);
      if (last_part) store_fence();
      wgmma_fence();
      accumulate_product<HEAD_DIM>(grad_key, grad_scores, descriptor(query, BLOCK_M * BOX_ROW_BYTES));
      wgmma_commit();
      if (!last_part) {
        if (EARLY_SCORES) issue_scores(part + 1);
        wgmma_wait<0>();
      }
    }
    named_sync(1, 128 * CONSUMERS);
    wgmma_fence();
    grad_query_product(columns, descriptor(grad_scores_tile + piece.first_row * BOX_ROW_BYTES, 0), key_columns);
    wgmma_commit();
    s.advance();
    wgmma_wait<1>();  // the sums of keys and values
    release(shared.do_empty(d.stage));
    release(shared.q_empty(q.stage));
    d.advance();
    q.advance();
    const auto stage_columns = [&] {
      barrier_wait(shared.sent(warpgroup), sent_phase);
      sent_phase ^= 1;
      const uint32_t address = shared.staging + 4 * piece.offset + threadIdx.x % 128 * 16;
#pragma unroll
      for (int group = 0; group < PIECE_COLUMNS / 8; ++group)
        if (group < piece.groups) store_four(address + group * 128 * 16, columns + 4 * group);
      store_fence();
      __syncwarp();
      release(shared.staged(warpgroup));
    };
    if constexpr (EARLY_SCORES && MORE) {
      barrier_wait(shared.q_full(q.stage), q.phase);
      issue_scores(0);
      wgmma_wait<1>();
      stage_columns();
      wgmma_wait<0>();
    } else {
      wgmma_wait<0>();
      stage_columns();
    }
  };

  const int last_row = (params.q_tiles - 1) * BLOCK_M, end_row = work.first_q_tile * BLOCK_M;
  int left = work.tiles(params) * (params.num_heads / params.num_kv_heads);
  if (left > 0) {
    barrier_wait(shared.k_full(), 0);
    key.load(shared.key, 64 * warpgroup);
    if (EARLY_SCORES) {
      barrier_wait(shared.q_full(q.stage), q.phase);
      issue_scores(0);
      wgmma_wait<0>();
    }
    barrier_wait(shared.v_full(), 0);
    value.load(shared.value, 64 * warpgroup);
    int first_row = last_row;
#pragma unroll 1
    for (; left > 1; --left) {
      step(first_row, Flag<true>());
      first_row = first_row == end_row ? last_row : first_row - BLOCK_M;
    }
    step(first_row, Flag<false>());
  }

  // The gradients leave through the places of the keys and values, which all have read.
  named_sync(1, 128 * CONSUMERS);
  stage_rows<HEAD_DIM_V>(grad_value, 1.0f, shared.value, warp_row);
  stage_rows<HEAD_DIM>(grad_key, params.softmax_scale, shared.key, warp_row);
  store_fence();
  named_sync(1, 128 * CONSUMERS);
  if (threadIdx.x == 128) {
    store_rows<BLOCK_N, HEAD_DIM_V>(grad_value_map, shared.value, work.k_tile * BLOCK_N, work.kv_head, work.batch);
    store_rows<BLOCK_N, HEAD_DIM>(grad_key_map, shared.key, work.k_tile * BLOCK_N, work.kv_head, work.batch);
    store_wait();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_backward(
    const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
    const __grid_constant__ TensorMap value_map, const __grid_constant__ TensorMap grad_out_map,
    const __grid_constant__ TensorMap grad_key_map, const __grid_constant__ TensorMap grad_value_map,
    const __grid_constant__ BackwardParams params) {
  // The swizzle counts from multiples of 1024 bytes.
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared shared((uint32_t)__cvta_generic_to_shared(memory));
  if (shared.key % 1024) __trap();
  int index = blockIdx.x;
  if (threadIdx.x == 0) {
    prefetch_map(query_map);
    prefetch_map(key_map);
    prefetch_map(value_map);
    prefetch_map(grad_out_map);
    if (DETERMINISTIC) write_word(shared.ticket, atomicAdd(params.counters, 1));
    barrier_init(shared.k_full(), 1);
    barrier_init(shared.v_full(), 1);
    // Stages are filled by an arrival for each copy and the copies' bytes, and emptied by one of each consumer warp.
    for (int stage = 0; stage < Q_STAGES; ++stage) {
      barrier_init(shared.q_full(stage), 2);
      barrier_init(shared.q_empty(stage), 4 * CONSUMERS);
    }
    for (int stage = 0; stage < DO_STAGES; ++stage) {
      barrier_init(shared.do_full(stage), 1);
      barrier_init(shared.do_empty(stage), 4 * CONSUMERS);
    }
    for (int warpgroup = 0; warpgroup < CONSUMERS; ++warpgroup) {
      barrier_init(shared.staged(warpgroup), 4);
      barrier_init(shared.sent(warpgroup), 1);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (DETERMINISTIC) {
    index = read_word(shared.ticket);
    // The last block leaves the counters as it found them: all have taken their numbers.
    if (threadIdx.x == 0 && atomicAdd(params.counters + 1, 1) == gridDim.x - 1) {
      params.counters[0] = 0;
      params.counters[1] = 0;
    }
  }
  const Work work = work_at(uniform(index), params);

  if (threadIdx.x < 128) {
    registers_release<PRODUCER_REGISTERS>();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) produce(query_map, key_map, value_map, grad_out_map, work, params, shared);
    if (threadIdx.x % 32 == 0 && 1 <= warp && warp <= CONSUMERS) store_pieces(work, params, shared, warp - 1);
  } else {
    registers_claim<CONSUMER_REGISTERS>();
    consume(grad_key_map, grad_value_map, work, params, shared, uniform(threadIdx.x / 128) - 1);
  }
}

// One block for each query tile of each head. Eight lanes share a row.
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS) flash_backward_prepare(
    const __grid_constant__ BackwardParams params) {
  const int64_t number = blockIdx.x;
  const int q_tile = blockIdx.x % params.q_tiles, head = blockIdx.x / params.q_tiles % params.num_heads;
  const int batch = blockIdx.x / params.q_tiles / params.num_heads;
  const uint8_t* out =
      (const uint8_t*)params.out + 2 * (batch * params.out_stride_batch + head * params.out_stride_head);
  const uint8_t* grad_out =
      (const uint8_t*)params.grad_out + 2 * (batch * params.grad_out_stride_batch + head * params.grad_out_stride_head);
  const float* logsumexp = params.logsumexp + ((int64_t)batch * params.num_heads + head) * params.logsumexp_pitch;
  float* statistics = params.statistics + number * (2 * BLOCK_M);
  const int lane = threadIdx.x % 8;
#pragma unroll
  for (int row = threadIdx.x / 8; row < BLOCK_M; row += PREPARE_THREADS / 8) {
    const int64_t this_row = q_tile * BLOCK_M + row;
    float delta = 0.0f;
    if (this_row < params.seqlen_q) {
#pragma unroll
      for (int column = 8 * lane; column < HEAD_DIM_V; column += 64)
        if (column < params.head_dim_v)
          delta += dot(load_eight(out + 2 * (this_row * params.out_stride_row + column)),
                       load_eight(grad_out + 2 * (this_row * params.grad_out_stride_row + column)));
    }
    delta += __shfl_xor_sync(0xFFFFFFFF, delta, 4);
    delta = quad_sum(delta);
    if (lane == 0) {
      // Rows past the end have probability zero everywhere.
      statistics[row] = this_row < params.seqlen_q ? logsumexp[this_row] * 1.4426950408889634f : INFINITY_F;
      statistics[BLOCK_M + row] = -delta;
    }
  }
  float4* sums = (float4*)(params.sums + number * (BLOCK_M * HEAD_DIM));
#pragma unroll
  for (int i = threadIdx.x; i < BLOCK_M * HEAD_DIM / 4; i += PREPARE_THREADS)
    sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (DETERMINISTIC && threadIdx.x < CONSUMERS) params.semaphores[number * CONSUMERS + threadIdx.x] = 0;
}

// One block for each query tile of each head; threads hold what they held in the main kernel.
extern "C" __global__ void __launch_bounds__(128 * CONSUMERS) flash_backward_finish(
    const __grid_constant__ BackwardParams params) {
  const int64_t number = blockIdx.x;
  const int q_tile = blockIdx.x % params.q_tiles, head = blockIdx.x / params.q_tiles % params.num_heads;
  const int batch = blockIdx.x / params.q_tiles / params.num_heads;
  const Piece piece(threadIdx.x / 128);
  const int lane = threadIdx.x % 32;
  const float4* sums = (const float4*)(params.sums + number * (BLOCK_M * HEAD_DIM) + piece.offset) + threadIdx.x % 128;
  const int first_row = q_tile * BLOCK_M + piece.first_row + threadIdx.x % 128 / 32 * 16 + lane / 4;
  uint8_t* grad_query =
      (uint8_t*)params.grad_query + 2 * (batch * params.grad_query_stride_batch + head * params.grad_query_stride_head);
#pragma unroll
  for (int group = 0; group < PIECE_COLUMNS / 8; group += 4) {
    uint32_t words[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (group + i < piece.groups) x = sums[(group + i) * 128];
      words[0][i] = pack(x.x * params.softmax_scale, x.y * params.softmax_scale);
      words[1][i] = pack(x.z * params.softmax_scale, x.w * params.softmax_scale);
    }
    // Now lane i of a quad gets all 8 columns of group i.
    const int column = piece.first_column + 8 * (group + lane % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      quad_transpose(words[half], lane);
      const int64_t row = first_row + 8 * half;
      if (row < params.seqlen_q && group + lane % 4 < piece.groups && column < params.head_dim)
        store_eight(grad_query + 2 * (row * params.grad_query_stride_row + column), words[half]);
    }
  }
}
