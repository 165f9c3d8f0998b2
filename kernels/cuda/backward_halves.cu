// Backward attention on Hopper (compute capability 9.0) for a head_dim of 144 to 192, up to 320 together with the
// value's: the kernel of backward.cu, with twice as many keys in a block as that of backward_wide.cu, so that half as
// much is loaded and added to grad_query's sums for each key. That is what binds there (NOTES.md).
//
//   loading warp:    keys and values once; then query and grad_out tiles of 128 rows in halves of 64, each of which
//                    comes to the same rows as the one before as soon as both warpgroups have used that
//   each consumer warpgroup, 64 keys, for STEP_M queries at a time, which bounds its registers:
//     LATE:          P^T = exp2(S^T), of which it keeps what is rounded alone;  issue dP^T = value grad_out^T
//     else:          issue dP^T;  P^T = exp2(S^T) meanwhile
//     then:          issue grad_value += P^T grad_out;  dS^T meanwhile, into shared memory for the other one;
//                    issue grad_key += dS^T query;  some boxes of its 64 rows of grad_query = dS key, each added from
//                    registers to its sums;  issue the next S^T = key query'^T
//
// The rows of grad_query that a warpgroup computes are those of the tile before, whose dS both have written by now;
// with one stage of dS, whose halves then serve in turn, those of the first half follow at once.
// TURNS, DELTA_FIRST: as there.
//
// Shared memory: one key and one value tile, one of query and of grad_out, one or two of dS.
// Registers: (HEAD_DIM + HEAD_DIM_V) / 2 for the sums; STEP_M / 2 for S and dP each, or LATE for one of them at a time;
// half of that for P and dS rounded; 32 for a box of grad_query, when there is no dP.
//
// Defined by the host (backward.py): as for backward.cu, with BLOCK_M and BLOCK_N 128, one stage of query and grad_out,
// STEP_M 32, or 64 for LATE, DS_STAGES 1 or 2.
#include "backward.cuh"

static_assert(BLOCK_M == 128 && BLOCK_N == 128 && CONSUMERS == 2 && SPLIT_ROWS && UNSTAGED && !KEYS_IN_REGISTERS);
static_assert(Q_STAGES == 1 && DO_STAGES == 1 && (DS_STAGES == 1 || DS_STAGES == 2));
static_assert(!PERSISTENT && !FUSED && !PAIRED && !DIRECT && !MASKED && !DROPOUT && !PACKED);
static_assert(!DETERMINISTIC);
constexpr int THREADS = 384;
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;

constexpr int HALVES = 2, HALF_ROWS = BLOCK_M / HALVES;
constexpr int HALF_BOX_BYTES = HALF_ROWS * BOX_ROW_BYTES;
static_assert(HALF_ROWS % STEP_M == 0);
constexpr bool LATE = STEP_M == 64;
// With one stage of dS its halves are the places that are filled and emptied, each by the warpgroup that computes
// grad_query of its rows, in the parts that follow it. With two a tile is, during all of the next one.
constexpr bool DS_IN_HALVES = DS_STAGES == 1;
constexpr int DS_PLACES = 2, PARTS_WITH_BOXES = DS_IN_HALVES ? PARTS / HALVES : PARTS;

// Named barriers: of all consumers, and of the turns, one for each warpgroup.
constexpr int ALL_CONSUMERS = 1, FIRST_TURN = 2;

// Byte addresses in shared memory.
struct Shared {
  uint32_t key, value, query, grad_out, grad_scores, statistics, barriers;
  __device__ explicit Shared(uint32_t base)
      : key(base),
        value(key + K_BYTES),
        query(value + V_BYTES),
        grad_out(query + Q_BYTES),
        grad_scores(grad_out + DO_BYTES),
        statistics(grad_scores + DS_STAGES * DS_BYTES),
        barriers(statistics + STATISTICS_BYTES) {}
  __device__ uint32_t barrier(int index) const { return barriers + 8 * index; }
  __device__ uint32_t k_full() const { return barrier(0); }
  __device__ uint32_t v_full() const { return barrier(1); }
  __device__ uint32_t q_full(int half) const { return barrier(2 + half); }
  __device__ uint32_t q_empty(int half) const { return barrier(2 + HALVES + half); }
  __device__ uint32_t do_full(int half) const { return barrier(2 + 2 * HALVES + half); }
  __device__ uint32_t do_empty(int half) const { return barrier(2 + 3 * HALVES + half); }
  __device__ uint32_t ds_full(int place) const { return barrier(2 + 4 * HALVES + place); }
  __device__ uint32_t ds_empty(int place) const { return ds_full(DS_PLACES + place); }
};

__device__ __forceinline__ void release(uint32_t barrier) {
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

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
  const int thread_key = work.k_tile * BLOCK_N + warp_row + lane / 4;  // and thread_key + 8
  const bool ends = first_key + 64 > params.seqlen_k;
  const int last_row = (params.q_tiles - 1) * BLOCK_M, end_row = work.first_q_tile * BLOCK_M;

  uint32_t phase = 0;  // of the halves of a query tile
  Ring<DS_STAGES> s;
  float grad_key[HEAD_DIM / 2] = {}, grad_value[HEAD_DIM_V / 2] = {};
  float scores[STEP_M / 2], grads[STEP_M / 2];
  LeftOperand<HEAD_DIM> key;
  LeftOperand<HEAD_DIM_V> value;

  // S^T of the part of a query tile whose rows begin at byte `rows` of a box.
  const auto issue_scores = [&](int rows) {
    wgmma_fence();
    key.multiply(scores, descriptor(shared.query + rows, 0));
    wgmma_commit();
  };
  // DELTA_FIRST: dP's accumulators begin with -delta, which spares an addition each.
  const auto begin_grads = [&](int part) {
    if (!DELTA_FIRST) return;
    const uint32_t address = shared.statistics + (BLOCK_M + part * STEP_M) * 4 + quad_lane * 8;
#pragma unroll
    for (int i = 0; i < STEP_M / 2; i += 2) {
      const float2 negative = read_pair(address + 8 * (i / 4 * 4));
      grads[i] = negative.x;
      grads[i + 1] = negative.y;
    }
  };
  // A box of this warpgroup's rows of grad_query, from the dS in `stage`.
  const auto issue_box = [&](float (&columns)[BOX_COLUMNS / 2], int box, int stage) {
    grad_query_product(columns, shared.grad_scores + stage * DS_BYTES + 64 * warpgroup * BOX_ROW_BYTES,
                       shared.key + box * BLOCK_N * BOX_ROW_BYTES);
  };
  // Adds it to the sums of query tile `number`.
  const auto add_box = [&](const float (&columns)[BOX_COLUMNS / 2], int box, int number) {
    float* sums = params.sums + (int64_t)number * (BLOCK_M * HEAD_DIM) + Piece(warpgroup).offset +
                  (box * (BOX_COLUMNS / 8) * 128 + threadIdx.x % 128) * 4;
#pragma unroll
    for (int group = 0; group < BOX_COLUMNS / 8; ++group)
      if (HEAD_DIM % BOX_COLUMNS == 0 || box * BOX_COLUMNS + 8 * group < HEAD_DIM)
        reduce_four(sums + group * 128 * 4, columns + 4 * group);
  };

  int left = work.tiles(params) * (params.num_heads / params.num_kv_heads) * PARTS;
  if (left > 0) {
    if (TURNS && warpgroup == 1) named_arrive(FIRST_TURN, 128 * CONSUMERS);  // the first turn is the other's
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
    int first_row = last_row, part = 0;
    // A loop over parts, not unrolled: what is at a fixed place would be worked out before it and kept in registers.
#pragma unroll 1
    for (; left > 0; --left) {
      const int half = part * STEP_M / HALF_ROWS, rows = part * STEP_M * BOX_ROW_BYTES;
      const bool ends_half = (part + 1) * STEP_M % HALF_ROWS == 0, last_part = part == PARTS - 1;
      const uint32_t grad_out = shared.grad_out + rows;
      const uint32_t statistics = shared.statistics + part * STEP_M * 4 + quad_lane * 8;
      const auto issue_grads = [&] {
        barrier_wait(shared.do_full(half), phase);
        begin_grads(part);
        wgmma_fence();
        value.multiply(grads, descriptor(grad_out, 0), DELTA_FIRST);
        wgmma_commit();
      };
      if (!LATE) issue_grads();
      if (ends || (IS_CAUSAL && first_row + part * STEP_M < first_key + 63))
        mask_keys(scores, thread_key, first_row + part * STEP_M, params.seqlen_k);
      if (TURNS) named_sync(FIRST_TURN + warpgroup, 128 * CONSUMERS);
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
      uint32_t all = 0;
#pragma unroll
      for (int i = 0; i < STEP_M / 4; ++i) all |= probabilities[i];
      // Nobody waits for the turn that would follow the last one.
      if (TURNS && (left > 1 || warpgroup == 0)) named_arrive_after(FIRST_TURN + 1 - warpgroup, 128 * CONSUMERS, all);
      if (LATE) {
        issue_grads();
      } else {
        wgmma_wait_after<0>(all);
        wgmma_wait<0>();
      }
      wgmma_fence();
      accumulate_product<HEAD_DIM_V>(grad_value, probabilities, grad_out);
      wgmma_commit();
      if (LATE) wgmma_wait<1>();

#pragma unroll
      for (int i = 0; i < STEP_M / 2; i += 4) {
        const float2 negative = DELTA_FIRST ? float2{} : read_pair(statistics + BLOCK_M * 4 + 8 * i);
        const float2 low = LATE ? unpack(probabilities[i / 2]) : make_float2(scores[i], scores[i + 1]);
        const float2 high = LATE ? unpack(probabilities[i / 2 + 1]) : make_float2(scores[i + 2], scores[i + 3]);
        grads[i] = low.x * (grads[i] + negative.x);
        grads[i + 1] = low.y * (grads[i + 1] + negative.y);
        grads[i + 2] = high.x * (grads[i + 2] + negative.x);
        grads[i + 3] = high.y * (grads[i + 3] + negative.y);
      }
      uint32_t grad_scores[STEP_M / 4];
      pack_all(grad_scores, grads);
      const int place = DS_IN_HALVES ? half : s.stage;
      if (DS_IN_HALVES ? part % PARTS_WITH_BOXES == 0 : part == 0) barrier_wait(shared.ds_empty(place), s.phase ^ 1);
      write_grad_scores(shared.grad_scores + s.stage * DS_BYTES + rows, grad_scores, warp_row);
      if (DS_IN_HALVES ? ends_half : last_part) {
        store_fence();
        __syncwarp();
        release(shared.ds_full(place));
      }
      wgmma_fence();
      accumulate_product<HEAD_DIM>(grad_key, grad_scores, shared.query + rows);
      wgmma_commit();

      const int next_part = last_part ? 0 : part + 1;
      const auto issue_next = [&] {
        if (ends_half && left > 1) barrier_wait(shared.q_full(next_part * STEP_M / HALF_ROWS), phase ^ last_part);
        issue_scores(next_part * STEP_M * BOX_ROW_BYTES);  // after the last part of all, for nothing
      };
      // Boxes of grad_query, spread over the parts: of the tile before, or of this one's first half.
      const bool of_this = DS_IN_HALVES && warpgroup == 0;
      const int nth = of_this ? part - (PARTS - PARTS_WITH_BOXES) : part, number_of = of_this ? number : number_before;
      int box = ceil_div(nth * BOXES, PARTS_WITH_BOXES);
      const int end = min(ceil_div((nth + 1) * BOXES, PARTS_WITH_BOXES), BOXES);
      const bool has_boxes = nth >= 0 && number_of >= 0 && box < end;
      const Ring<DS_STAGES> source = of_this ? s : s.previous();
      const int source_place = DS_IN_HALVES ? warpgroup : source.stage;
      if (has_boxes && nth == 0) barrier_wait(shared.ds_full(source_place), source.phase);
      wgmma_wait<0>();  // what follows takes the registers of dS
      if (LATE || DS_IN_HALVES || !has_boxes) {
        if (has_boxes) {
#pragma unroll 1
          for (; box < end; ++box) {
            float columns[BOX_COLUMNS / 2];
            issue_box(columns, box, source.stage);
            wgmma_wait<0>();
            if (box == BOXES - 1) release(shared.ds_empty(source_place));
            add_box(columns, box, number_of);
          }
        }
        issue_next();
      } else {
        float columns[BOX_COLUMNS / 2];
        issue_box(columns, box, source.stage);
        issue_next();
        wgmma_wait<1>();
        if (end == BOXES) release(shared.ds_empty(source_place));
        add_box(columns, box, number_of);
      }
      wgmma_wait<0>();
      if (ends_half) {
        release(shared.do_empty(half));
        release(shared.q_empty(half));
      }
      part = next_part;
      if (last_part) {
        s.advance();
        phase ^= 1;
        number_before = number;
        // A query head's first tile is followed by the next one's last.
        const bool ends_head = first_row == end_row;
        number += ends_head ? 2 * params.q_tiles - 1 - work.first_q_tile : -1;
        first_row = ends_head ? last_row : first_row - BLOCK_M;
      }
    }
    if (!DS_IN_HALVES || warpgroup == 1) {
      const Ring<DS_STAGES> source = s.previous();
      barrier_wait(shared.ds_full(DS_IN_HALVES ? warpgroup : source.stage), source.phase);
#pragma unroll 1
      for (int box = 0; box < BOXES; ++box) {
        float columns[BOX_COLUMNS / 2];
        issue_box(columns, box, source.stage);
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
  // The swizzle counts from multiples of 1024 bytes.
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared shared((uint32_t)__cvta_generic_to_shared(memory));
  if (shared.key % 1024) __trap();
  if (threadIdx.x == 0) {
    prefetch_map(query_map);
    prefetch_map(key_map);
    prefetch_map(value_map);
    prefetch_map(grad_out_map);
    barrier_init(shared.k_full(), 1);
    barrier_init(shared.v_full(), 1);
    // Halves are filled by an arrival for each copy and the copies' bytes, and emptied by one of each consumer warp.
    for (int half = 0; half < HALVES; ++half) {
      barrier_init(shared.q_full(half), 1 + STATISTICS);
      barrier_init(shared.q_empty(half), 4 * CONSUMERS);
      barrier_init(shared.do_full(half), 1);
      barrier_init(shared.do_empty(half), 4 * CONSUMERS);
    }
    for (int place = 0; place < DS_PLACES; ++place) {
      barrier_init(shared.ds_full(place), 4 * CONSUMERS);
      barrier_init(shared.ds_empty(place), DS_IN_HALVES ? 4 : 4 * CONSUMERS);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const Work work = work_of(item_at(blockIdx.x, params), params);
  if (threadIdx.x < 128) {
    registers_release<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) load_tiles(query_map, key_map, value_map, grad_out_map, work, params, shared);
  } else {
    registers_claim<CONSUMER_REGISTERS>();
    consume(grad_key_map, grad_value_map, work, params, shared, uniform(threadIdx.x / 128) - 1);
  }
}
