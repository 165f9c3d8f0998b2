// Backward attention on Hopper (compute capability 9.0) for a head_dim of 144 or 160, the value's the same, and of 192
// with values of 128: the kernel of backward.cu, with twice as many keys in a block as that of backward_wide.cu, so
// that half as much is loaded and added to grad_query's sums for each key. That is what binds there (NOTES.md).
//
//   loading warp:    keys and values once; then query and grad_out tiles of 128 rows in halves of 64, each of which
//                    comes to the same rows as the one before as soon as both warpgroups have used that
//   each consumer warpgroup, 64 keys, for half a tile of queries at a time:
//     P^T = exp2(S^T), of which it keeps 16 or 24 bits (`Kept`), so that dP can have the registers of S;
//     issue dP^T = value grad_out^T;  issue grad_value += P^T grad_out;
//     dS^T meanwhile, into shared memory for the other one;  issue grad_key += dS^T query;
//     grad_query = dS key of its 64 rows, a box of columns at a time, each added from registers to its sums;
//     issue the next S^T = key query'^T
//
// Both must have written the dS of grad_query's rows: the first one computes its rows, those of a tile's first half,
// beside the second half; the other one its own beside the first half of the next tile. So the halves of one tile of dS
// serve in turn.
//
// DETERMINISTIC: blocks add to a query tile in the order of their keys, which a warp for each consumer keeps.
//
// Shared memory: one key and one value tile, one of query, of grad_out and of dS.
// Registers: (HEAD_DIM + HEAD_DIM_V) / 2 for the sums; 32 for S or dP; 16 each for P and dS, rounded; 8 for the next
// bits of P; 32 for a box of grad_query, when there is no dP.
//
// Defined by the host (backward.py): as for backward.cu, with BLOCK_M and BLOCK_N 128, STEP_M 64, one stage of all.
#include "backward.cuh"

static_assert(BLOCK_M == 128 && BLOCK_N == 128 && CONSUMERS == 2 && SPLIT_ROWS && UNSTAGED && !KEYS_IN_REGISTERS);
static_assert(Q_STAGES == 1 && DO_STAGES == 1 && DS_STAGES == 1);
static_assert(!PERSISTENT && !FUSED && !PAIRED && !DIRECT && !MASKED && !DROPOUT && !PACKED);
static_assert(!TURNS && !DELTA_FIRST);
constexpr int THREADS = 384;
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;

constexpr int HALVES = 2, HALF_ROWS = BLOCK_M / HALVES;
constexpr int HALF_BOX_BYTES = HALF_ROWS * BOX_ROW_BYTES;
static_assert(STEP_M == HALF_ROWS, "a step is half of a tile");
static_assert(CONSUMERS == HALVES, "each warpgroup computes grad_query of one half's rows");

// The named barrier of all consumers.
constexpr int ALL_CONSUMERS = 1;

// Byte addresses in shared memory.
struct Shared {
  uint32_t key, value, query, grad_out, grad_scores, statistics, ticket, barriers;
  __device__ explicit Shared(uint32_t base)
      : key(base),
        value(key + K_BYTES),
        query(value + V_BYTES),
        grad_out(query + Q_BYTES),
        grad_scores(grad_out + DO_BYTES),
        statistics(grad_scores + DS_BYTES),
        ticket(statistics + STATISTICS_BYTES),
        barriers(ticket + 16) {}
  __device__ uint32_t barrier(int index) const { return barriers + 8 * index; }
  __device__ uint32_t k_full() const { return barrier(0); }
  __device__ uint32_t v_full() const { return barrier(1); }
  __device__ uint32_t q_full(int half) const { return barrier(2 + half); }
  __device__ uint32_t q_empty(int half) const { return barrier(2 + HALVES + half); }
  __device__ uint32_t do_full(int half) const { return barrier(2 + 2 * HALVES + half); }
  __device__ uint32_t do_empty(int half) const { return barrier(2 + 3 * HALVES + half); }
  __device__ uint32_t ds_full(int half) const { return barrier(2 + 4 * HALVES + half); }
  __device__ uint32_t ds_empty(int half) const { return barrier(2 + 5 * HALVES + half); }
  // DETERMINISTIC: a warpgroup's turn has come; it has added its share.
  __device__ uint32_t turn_came(int warpgroup) const { return barrier(2 + 6 * HALVES + warpgroup); }
  __device__ uint32_t added(int warpgroup) const { return barrier(2 + 6 * HALVES + CONSUMERS + warpgroup); }
};

// Half of the rows of a query or grad_out tile; `row`: the half's first in the tensor.
template <int COLUMNS>
__device__ __forceinline__ void load_half(const TensorMap& map, uint32_t tile, int half, uint32_t barrier, int row,
                                          int head, int batch) {
  constexpr int BOXES_OF_ROW = ceil_div(COLUMNS, BOX_COLUMNS);
  barrier_arrive_expect(barrier, BOXES_OF_ROW * HALF_BOX_BYTES);
#pragma unroll
  for (int box = 0; box < BOXES_OF_ROW; ++box)
    load_box(map, tile + box * BLOCK_M * BOX_ROW_BYTES + half * HALF_BOX_BYTES, barrier, box * BOX_COLUMNS, row, head,
             batch);
}

// The loading thread.
__device__ __forceinline__ void load_tiles(const TensorMap& query_map, const TensorMap& key_map,
                                           const TensorMap& value_map, const TensorMap& grad_out_map, const Work& work,
                                           const BackwardParams& params, const Shared& shared) {
  uint32_t loaded = 0;  // query tiles
  for_each_tile(work, params, [&](int head, int tile, int number, int) {
    const uint32_t phase = loaded % 2;
    // In the order in which the consumers need them.
    if (loaded == 0)
      load_rows<BLOCK_N, HEAD_DIM>(key_map, shared.key, shared.k_full(), work.k_tile * BLOCK_N, work.kv_head,
                                   work.batch);
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      const int first = half * HALF_ROWS;
      barrier_wait(shared.q_empty(half), phase ^ 1);
      load_half<HEAD_DIM>(query_map, shared.query, half, shared.q_full(half), tile * BLOCK_M + first, head, work.batch);
#pragma unroll
      for (int i = 0; i < STATISTICS; ++i)
        load_bytes<HALF_ROWS * 4>(statistics_of(number, tile, params) + i * BLOCK_M + first,
                                  shared.statistics + (i * BLOCK_M + first) * 4, shared.q_full(half));
      if (loaded == 0 && half == 0)
        load_rows<BLOCK_N, HEAD_DIM_V>(value_map, shared.value, shared.v_full(), work.k_tile * BLOCK_N, work.kv_head,
                                       work.batch);
      barrier_wait(shared.do_empty(half), phase ^ 1);
      load_half<HEAD_DIM_V>(grad_out_map, shared.grad_out, half, shared.do_full(half), tile * BLOCK_M + first, head,
                            work.batch);
    }
    ++loaded;
  });
}

// DETERMINISTIC: a thread beside a consumer. It hands on the turn at the query tile before and looks whether that at
// the next one has come, beside the consumer's products for that one.
__device__ __forceinline__ void keep_order(const Work& work, const BackwardParams& params, const Shared& shared,
                                           int warpgroup) {
  int* before = nullptr;
  uint32_t phase = 0;
  for_each_tile(work, params, [&](int, int, int number, int) {
    int* const turn = params.semaphores + (int64_t)number * SEMAPHORES + warpgroup;
    semaphore_hand_on(before, turn, work.k_tile);
    barrier_arrive(shared.turn_came(warpgroup));
    barrier_wait(shared.added(warpgroup), phase);
    phase ^= 1;
    before = turn;
  });
  if (before) semaphore_add(before);
}

// What stays of a step's probabilities: the operand of grad_value's product and, of bfloat16, the next 8 bits, without
// which the factors of dS = P (dP - delta) would be rounded to 8 bits before dS is. (The bits after those of a float16
// are not at a fixed place where it is subnormal.)
struct Kept {
  uint32_t rounded[STEP_M / 4];             // two in a word, as `pack` leaves them
  uint32_t next[IS_BF16 ? STEP_M / 8 : 1];  // of four in a word

  // Of numbers that are not negative; NaN stays NaN.
  __device__ __forceinline__ explicit Kept(const float (&x)[STEP_M / 2]) {
    if constexpr (IS_BF16) {
#pragma unroll
      for (int i = 0; i < STEP_M / 2; i += 4) {
        uint32_t bits[4];  // and half of the last bit that stays, so that cutting off rounds
#pragma unroll
        for (int j = 0; j < 4; ++j) bits[j] = __float_as_uint(x[i + j]) + HALF;
        rounded[i / 2] = smaller_halves(permute(bits[0], bits[1], 0x7632), 0x7FFF7FFF);
        rounded[i / 2 + 1] = smaller_halves(permute(bits[2], bits[3], 0x7632), 0x7FFF7FFF);
        next[i / 4] = permute(permute(bits[0], bits[1], 0x0051), permute(bits[2], bits[3], 0x0051), 0x5410);
      }
    } else {
      pack_all(rounded, x);
    }
  }

  // Number 2 i and the one after it.
  __device__ __forceinline__ float2 pair(int i) const {
    if constexpr (!IS_BF16) return unpack(rounded[i]);
    const uint32_t low = i % 2 ? 0x1069 : 0x1049, high = i % 2 ? 0x3279 : 0x3259;  // 9: eight zeros
    return {__uint_as_float(permute(rounded[i], next[i / 2], low) - HALF),
            __uint_as_float(permute(rounded[i], next[i / 2], high) - HALF)};
  }

 private:
  static constexpr uint32_t HALF = 0x8000;
};

// columns[64, a box] = grad_scores[64 queries, BLOCK_N] key[BLOCK_N, a box]; columns past HEAD_DIM are zeros
__device__ __forceinline__ void grad_query_product(float (&columns)[BOX_COLUMNS / 2], uint32_t grad_scores,
                                                   uint32_t box) {
  const uint32_t left = descriptor(grad_scores, 0), right = descriptor(box, 0);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < BLOCK_N / 16; ++k)
    Wgmma<BOX_COLUMNS>::ss_columns(columns, moved(left, column_group<BLOCK_M>(k)), moved(right, k * 16 * BOX_ROW_BYTES),
                                   k > 0);
  wgmma_commit();
}

__device__ __forceinline__ void consume(const TensorMap& grad_key_map, const TensorMap& grad_value_map,
                                        const Work& work, const BackwardParams& params, const Shared& shared,
                                        int warpgroup) {
  const float scale_log2 = params.softmax_scale_log2;
  const int lane = threadIdx.x % 32, quad_lane = lane % 4;
  const int warp_row = 64 * warpgroup + threadIdx.x % 128 / 32 * 16;  // first of this warp's keys within the tile
  const int first_key = work.k_tile * BLOCK_N + 64 * warpgroup;
  const bool ends = first_key + 64 > params.seqlen_k;
  const int last_row = (params.q_tiles - 1) * BLOCK_M, end_row = work.first_q_tile * BLOCK_M;

  uint32_t phase = 0;  // of the halves of a query tile
  float grad_key[HEAD_DIM / 2] = {}, grad_value[HEAD_DIM_V / 2] = {};
  float scores[STEP_M / 2], grads[STEP_M / 2];
  LeftOperand<HEAD_DIM> key;
  LeftOperand<HEAD_DIM_V> value;

  // S^T of the half of a query tile whose rows begin at byte `rows` of a box.
  const auto issue_scores = [&](int rows) {
    wgmma_fence();
    key.multiply(scores, descriptor(shared.query + rows, 0));
    wgmma_commit();
  };
  // A box of this warpgroup's rows of grad_query.
  const auto issue_box = [&](float (&columns)[BOX_COLUMNS / 2], int box) {
    grad_query_product(columns, shared.grad_scores + 64 * warpgroup * BOX_ROW_BYTES,
                       shared.key + box * BLOCK_N * BOX_ROW_BYTES);
  };
  // Adds it to the sums of query tile `number`.
  const auto add_box = [&](const float (&columns)[BOX_COLUMNS / 2], int box, int number) {
    // The second warpgroup is a tile behind.
    if (DETERMINISTIC && box == 0) barrier_wait(shared.turn_came(warpgroup), phase ^ warpgroup);
    float* sums = params.sums + (int64_t)number * (BLOCK_M * HEAD_DIM) + Piece(warpgroup).offset +
                  (box * (BOX_COLUMNS / 8) * 128 + threadIdx.x % 128) * 4;
#pragma unroll
    for (int group = 0; group < BOX_COLUMNS / 8; ++group)
      if (HEAD_DIM % BOX_COLUMNS == 0 || box * BOX_COLUMNS + 8 * group < HEAD_DIM)
        reduce_four(sums + group * 128 * 4, columns + 4 * group);
    if (DETERMINISTIC && box == BOXES - 1) warp_arrive_together(shared.added(warpgroup), lane);
  };

  int left = work.tiles(params) * (params.num_heads / params.num_kv_heads) * HALVES;
  if (left > 0) {
    barrier_wait(shared.k_full(), 0);
    key.load(shared.key, 64 * warpgroup);
    barrier_wait(shared.q_full(0), 0);
    issue_scores(0);
    wgmma_wait<0>();
    barrier_wait(shared.v_full(), 0);
    value.load(shared.value, 64 * warpgroup);
    const int first_head = work.batch * params.num_heads + work.kv_head * (params.num_heads / params.num_kv_heads);
    // Of the sums of the query tile, and of that before; the first tile has none before it.
    int number = (first_head + 1) * params.q_tiles - 1 - work.sums_shift, number_before = -1;
    int first_row = last_row, half = 0;
    // A loop over halves, not unrolled: what is at a fixed place would be worked out before it and kept in registers.
#pragma unroll 1
    for (; left > 0; --left) {
      const int rows = half * HALF_BOX_BYTES;
      const bool last_half = half == HALVES - 1;
      const uint32_t grad_out = shared.grad_out + rows;
      const uint32_t statistics = shared.statistics + half * HALF_ROWS * 4 + quad_lane * 8;
      const auto issue_grads = [&] {
        barrier_wait(shared.do_full(half), phase);
        wgmma_fence();
        value.multiply(grads, descriptor(grad_out, 0));
        wgmma_commit();
      };
      if (ends || (IS_CAUSAL && first_row + half * HALF_ROWS < first_key + 63)) {
        // This thread's first key, the other one is 8 further: worked out where it is needed, to keep no register.
        const int thread_key = opaque(first_key) + threadIdx.x % 128 / 32 * 16 + lane / 4;
        mask_keys(scores, thread_key, first_row + half * HALF_ROWS, params.seqlen_k);
      }
#pragma unroll
      for (int i = 0; i < STEP_M / 2; i += 4) {
        const float2 logsumexp = read_pair(statistics + 8 * i);
        scores[i] = exp2_approx(fmaf(scores[i], scale_log2, -logsumexp.x));
        scores[i + 1] = exp2_approx(fmaf(scores[i + 1], scale_log2, -logsumexp.y));
        scores[i + 2] = exp2_approx(fmaf(scores[i + 2], scale_log2, -logsumexp.x));
        scores[i + 3] = exp2_approx(fmaf(scores[i + 3], scale_log2, -logsumexp.y));
      }
      const Kept probabilities(scores);
      issue_grads();
      wgmma_fence();
      accumulate_product<HEAD_DIM_V>(grad_value, probabilities.rounded, grad_out);
      wgmma_commit();
      wgmma_wait<1>();

#pragma unroll
      for (int i = 0; i < STEP_M / 2; i += 4) {
        const float2 negative = read_pair(statistics + BLOCK_M * 4 + 8 * i);  // -delta
        const float2 low = probabilities.pair(i / 2), high = probabilities.pair(i / 2 + 1);
        grads[i] = low.x * (grads[i] + negative.x);
        grads[i + 1] = low.y * (grads[i + 1] + negative.y);
        grads[i + 2] = high.x * (grads[i + 2] + negative.x);
        grads[i + 3] = high.y * (grads[i + 3] + negative.y);
      }
      uint32_t grad_scores[STEP_M / 4];
      pack_all(grad_scores, grads);
      barrier_wait(shared.ds_empty(half), phase ^ 1);
      write_grad_scores(shared.grad_scores + rows, grad_scores, warp_row);
      store_fence();
      warp_arrive_together(shared.ds_full(half));
      wgmma_fence();
      accumulate_product<HEAD_DIM>(grad_key, grad_scores, shared.query + rows);
      wgmma_commit();

      const int next_half = last_half ? 0 : half + 1;
      const auto issue_next = [&] {
        if (left > 1) barrier_wait(shared.q_full(next_half), phase ^ last_half);
        issue_scores(next_half * HALF_BOX_BYTES);  // after the last half of all, for nothing
      };
      // This warpgroup's rows of grad_query, once in a tile: the first one's of this tile, beside its last half, the
      // other one's of the tile before, beside the first half. `nth`: 0 then. Simpler conditions make ptxas choose
      // another order of instructions than the one that was measured.
      const bool of_this = warpgroup == 0;
      const int nth = of_this ? half - 1 : half, number_of = of_this ? number : number_before;
      int box = nth * BOXES;
      const int end = min(box + BOXES, BOXES);
      const bool has_boxes = nth >= 0 && number_of >= 0 && box < end;
      if (has_boxes && nth == 0) barrier_wait(shared.ds_full(warpgroup), phase ^ warpgroup);
      wgmma_wait<0>();  // what follows takes the registers of dS
      if (has_boxes) {
#pragma unroll 1
        for (; box < end; ++box) {
          float columns[BOX_COLUMNS / 2];
          issue_box(columns, box);
          wgmma_wait<0>();
          if (box == BOXES - 1) warp_arrive(shared.ds_empty(warpgroup));
          add_box(columns, box, number_of);
        }
      }
      issue_next();
      wgmma_wait<0>();
      warp_arrive(shared.do_empty(half));
      warp_arrive(shared.q_empty(half));
      half = next_half;
      if (last_half) {
        phase ^= 1;
        number_before = number;
        // A query head's first tile is followed by the next one's last.
        const bool ends_head = first_row == end_row;
        number += ends_head ? 2 * params.q_tiles - 1 - work.first_q_tile : -1;
        first_row = ends_head ? last_row : first_row - BLOCK_M;
      }
    }
    if (warpgroup == 1) {
      barrier_wait(shared.ds_full(warpgroup), phase ^ 1);
#pragma unroll 1
      for (int box = 0; box < BOXES; ++box) {
        float columns[BOX_COLUMNS / 2];
        issue_box(columns, box);
        wgmma_wait<0>();
        add_box(columns, box, number_before);
      }
    }
  }
  // The gradients leave through the places of the keys and values, which all have read.
  named_sync(ALL_CONSUMERS, 128 * CONSUMERS);
  stage_rows<HEAD_DIM_V>(grad_value, 1.0f, shared.value, warp_row);
  stage_rows<HEAD_DIM>(grad_key, params.softmax_scale, shared.key, warp_row);
  store_fence();
  named_sync(ALL_CONSUMERS, 128 * CONSUMERS);
  if (threadIdx.x == 128) {
    const int row = work.k_tile * BLOCK_N;
    store_rows<BLOCK_N, HEAD_DIM_V>(grad_value_map, shared.value, row, work.kv_head, work.batch);
    store_rows<BLOCK_N, HEAD_DIM>(grad_key_map, shared.key, row, work.kv_head, work.batch);
    store_wait();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_backward(
    const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
    const __grid_constant__ TensorMap value_map, const __grid_constant__ TensorMap grad_out_map,
    const __grid_constant__ TensorMap grad_key_map, const __grid_constant__ TensorMap grad_value_map,
    const __grid_constant__ BackwardParams params) {
  const Shared shared(uniform(tile_memory()));  // whose addresses then take no registers of a thread
  if (threadIdx.x == 0) {
    prefetch_maps(query_map, key_map, value_map, grad_out_map);
    take_ticket(shared.ticket, params);
    barrier_init(shared.k_full(), 1);
    barrier_init(shared.v_full(), 1);
    // Halves are filled by an arrival for each copy and the copies' bytes, and emptied by one of each consumer warp.
    for (int half = 0; half < HALVES; ++half) {
      barrier_init(shared.q_full(half), 1 + STATISTICS);
      barrier_init(shared.q_empty(half), 4 * CONSUMERS * WARP_ARRIVALS);
      barrier_init(shared.do_full(half), 1);
      barrier_init(shared.do_empty(half), 4 * CONSUMERS * WARP_ARRIVALS);
    }
    for (int half = 0; half < HALVES; ++half) {
      barrier_init(shared.ds_full(half), 4 * CONSUMERS * WARP_ARRIVALS);
      barrier_init(shared.ds_empty(half), 4 * WARP_ARRIVALS);
    }
    for (int warpgroup = 0; warpgroup < CONSUMERS; ++warpgroup) {
      barrier_init(shared.turn_came(warpgroup), 1);
      barrier_init(shared.added(warpgroup), 4 * WARP_ARRIVALS);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const Work work = work_of(item_at(block_number(shared.ticket, params), params), params);
  if (threadIdx.x < 128) {
    registers_release<PRODUCER_REGISTERS>();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) load_tiles(query_map, key_map, value_map, grad_out_map, work, params, shared);
    if (DETERMINISTIC && threadIdx.x % 32 == 0 && 1 <= warp && warp <= CONSUMERS)
      keep_order(work, params, shared, warp - 1);
  } else {
    registers_claim<CONSUMER_REGISTERS>();
    consume(grad_key_map, grad_value_map, work, params, shared, uniform(threadIdx.x / 128) - 1);
  }
}
