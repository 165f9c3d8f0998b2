// The gradient of an additive bias on Hopper (sm_90a): dS summed over the batches and heads that share the bias.
//
//   S = scale Q K^T + bias    P = exp(S - logsumexp)    dP = dO V^T    dBias = sum of P (dP - delta)
//
// A block owns a tile of the bias, [BLOCK_M queries, BLOCK_N keys], and walks all items (a batch and a head each) that
// share it, so that the sum stays in float32 registers, is rounded once, and always has the same order. No gradient of
// the size of the scores exists. Two products an item, against five of a whole backward.
//
// One warpgroup loads and stores: a thread of warp 0 fills a ring of stages, each with the two operands of one product
// (Q and K, then dO and V), a thread of warp 1 + w brings warpgroup w its 64 rows of the bias and takes the result away
// from the same place. CONSUMERS warpgroups compute 64 rows each: both products are issued at once, and the
// exponentials of S run beside dP. Blocks stay, and go from tile to tile: stages of the next one are on their way while
// the last one's result leaves.
//
// Budget, BLOCK_N = 128 at head_dim 128: registers for S, dP and the sum 3 x 64, of 240; shared memory 3 stages of 64
// KB and 2 x 16 KB of bias, of 227 KB. An item takes 2,048 cycles of the matrix unit, in which shared memory is read 96
// bytes a cycle by the products and written 64 by the copy engine, of 128 in all: 2,560 cycles, and it binds.
#include "barrier.cuh"
#include "softmax.cuh"
#include "wgmma.cuh"
#include "wgmma_instructions.cuh"

// Mirrored by bias_gradient.py.
struct BiasParams {
  const float* logsumexp;      // [batch * num_heads, logsumexp_pitch], natural logarithm; +-infinity: sees no key
  const float* logsumexp_low;  // the same shape: what rounding cut off logsumexp; HAS_LOW
  const float* delta;          // [batch * num_heads, delta_pitch], rowsum(dO O)
  int logsumexp_pitch, delta_pitch;
  int num_heads, group_size, seqlen_q;
  int bias_heads;             // of the gradient
  int batch_step, head_step;  // 0 where the bias itself is expanded over the gradient's batches or heads
  int items, item_step;       // heads (of all batches) that share a tile, and how far they are apart
  int q_tiles, k_tiles, num_tiles;
  int q_tiles_per_group;  // blocks that run at one time share few tiles of queries and few of keys
  float softmax_scale;
};

constexpr int CONSUMERS = BLOCK_M / 64;
constexpr int THREADS = 128 * (CONSUMERS + 1);
static_assert(CONSUMERS == 2 && BLOCK_N % 16 == 0 && STAGES >= 2);
constexpr int PRODUCER_REGISTERS = BLOCK_N > 96 ? 24 : 40;
constexpr int CONSUMER_REGISTERS = BLOCK_N > 96 ? 240 : 232;

constexpr int STAGE_COLUMNS = round_up(HEAD_DIM < HEAD_DIM_V ? HEAD_DIM_V : HEAD_DIM, BOX_COLUMNS);
constexpr int LEFT_BYTES = BLOCK_M * STAGE_COLUMNS * 2;
constexpr int STAGE_BYTES = LEFT_BYTES + BLOCK_N * STAGE_COLUMNS * 2;

// Of a bias the copy engine sees 16-bit columns, two for a float32.
constexpr int BIAS_COLUMNS = BLOCK_N * (BIAS_F32 ? 2 : 1);
constexpr int BIAS_BOXES = ceil_div(BIAS_COLUMNS, BOX_COLUMNS);
constexpr int BIAS_BYTES = BIAS_BOXES * 64 * BOX_ROW_BYTES;  // a warpgroup's
// The last box is written whole, so it may not reach into the next tile.
static_assert(BIAS_COLUMNS % BOX_COLUMNS == 0);

struct Shared {
  uint32_t stages, bias, barriers;
  __device__ explicit Shared(uint32_t base)
      : stages(base), bias(stages + STAGES * STAGE_BYTES), barriers(bias + CONSUMERS * BIAS_BYTES) {}
  __device__ uint32_t left(int stage) const { return stages + stage * STAGE_BYTES; }
  __device__ uint32_t right(int stage) const { return left(stage) + LEFT_BYTES; }
  __device__ uint32_t bias_of(int warpgroup) const { return bias + warpgroup * BIAS_BYTES; }
  __device__ uint32_t description(int warpgroup) const { return barriers + 64 * warpgroup; }
  __device__ uint32_t full(int stage) const { return barriers + 64 * CONSUMERS + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return full(STAGES + stage); }
  __device__ uint32_t bias_full(int warpgroup) const { return full(2 * STAGES + warpgroup); }
  __device__ uint32_t staged(int warpgroup) const { return bias_full(CONSUMERS + warpgroup); }
};

// A tile of the gradient, the first head (of all batches) whose scores add to it, and where its bias is.
struct Tile {
  int row, k_tile, first_head, bias_head, bias_batch;
};
__device__ __forceinline__ Tile tile_at(int index, const BiasParams& params) {
  const int of_a_head = params.q_tiles * params.k_tiles, bias_index = index / of_a_head;
  const int within = index - bias_index * of_a_head;
  const int group = within / (params.q_tiles_per_group * params.k_tiles), first = group * params.q_tiles_per_group;
  const int rows = min(params.q_tiles_per_group, params.q_tiles - first), rest = within - first * params.k_tiles;
  const int k_tile = rest / rows, batch = bias_index / params.bias_heads, head = bias_index - batch * params.bias_heads;
  return {(first + rest - k_tile * rows) * BLOCK_M, k_tile, batch * params.num_heads + head, head, batch};
}

// The loading thread.
__device__ __forceinline__ void produce(const TensorMap& query_map, const TensorMap& key_map,
                                        const TensorMap& value_map, const TensorMap& grad_out_map,
                                        const BiasParams& params, const Shared& shared) {
  Ring<STAGES> ring;
#pragma unroll 1
  for (int index = blockIdx.x; index < params.num_tiles; index += gridDim.x) {
    const Tile tile = tile_at(index, params);
    const int key = tile.k_tile * BLOCK_N, last = tile.first_head + params.items * params.item_step;
#pragma unroll 1
    for (int item = tile.first_head; item < last; item += params.item_step) {
      const int batch = item / params.num_heads, head = item - batch * params.num_heads;
      const int kv_head = head / params.group_size;
      barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
      load_rows<BLOCK_M, HEAD_DIM>(query_map, shared.left(ring.stage), shared.full(ring.stage), tile.row, head, batch);
      load_rows<BLOCK_N, HEAD_DIM>(key_map, shared.right(ring.stage), shared.full(ring.stage), key, kv_head, batch);
      ring.advance();
      barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
      load_rows<BLOCK_M, HEAD_DIM_V>(grad_out_map, shared.left(ring.stage), shared.full(ring.stage), tile.row, head,
                                     batch);
      load_rows<BLOCK_N, HEAD_DIM_V>(value_map, shared.right(ring.stage), shared.full(ring.stage), key, kv_head, batch);
      ring.advance();
    }
  }
}

// A tile for one warpgroup, in shared memory: written before its bias arrives. Its exchanging thread, which has few
// registers, keeps there what it needs again.
struct Description {
  uint32_t address;
  __device__ uint32_t first_head() const { return address; }  // -1: there are no more tiles
  __device__ uint32_t is_last() const { return address + 4; }
  __device__ uint32_t row() const { return address + 8; }      // the warpgroup's first
  __device__ uint32_t column() const { return address + 12; }  // as the copy engine counts
  __device__ uint32_t bias_head() const { return address + 16; }
  __device__ uint32_t bias_batch() const { return address + 20; }

  __device__ __forceinline__ void write(int index, int warpgroup, const BiasParams& params) const {
    const Tile tile = tile_at(index, params);
    write_word(first_head(), tile.first_head);
    write_word(is_last(), index + gridDim.x >= params.num_tiles);
    write_word(row(), tile.row + 64 * warpgroup);
    write_word(column(), tile.k_tile * BIAS_COLUMNS);
    write_word(bias_head(), tile.bias_head);
    write_word(bias_batch(), tile.bias_batch);
  }
  __device__ __forceinline__ void copy(const Description& other) const {
#pragma unroll
    for (int i = 0; i < 24; i += 4) write_word(address + i, read_word(other.address + i));
  }
};

// The thread that brings a warpgroup its part of the bias, and takes its part of the gradient from the same place.
__device__ __forceinline__ void exchange(const TensorMap& bias_map, const TensorMap& grad_map, const BiasParams& params,
                                         const Shared& shared, int warpgroup) {
  const uint32_t place = shared.bias_of(warpgroup), full = shared.bias_full(warpgroup);
  const Description now{shared.description(warpgroup)}, next{now.address + 32};
  next.write(blockIdx.x, warpgroup, params);
#pragma unroll 1
  for (int count = 1;; ++count) {
    now.copy(next);
    barrier_arrive_expect(full, BIAS_BYTES);
#pragma unroll 1
    for (int box = 0; box < BIAS_BOXES; ++box)
      load_box(bias_map, place + box * 64 * BOX_ROW_BYTES, full, read_word(now.column()) + box * BOX_COLUMNS,
               read_word(now.row()), read_word(now.bias_head()) * params.head_step,
               read_word(now.bias_batch()) * params.batch_step);
    if (!read_word(now.is_last())) {
      // The place is not free yet, but the next tile's bias can come from memory to L2.
      next.write(blockIdx.x + count * gridDim.x, warpgroup, params);
#pragma unroll 1
      for (int box = 0; box < BIAS_BOXES; ++box)
        prefetch_box(bias_map, read_word(next.column()) + box * BOX_COLUMNS, read_word(next.row()),
                     read_word(next.bias_head()) * params.head_step, read_word(next.bias_batch()) * params.batch_step);
    }
    barrier_wait(shared.staged(warpgroup), count % 2 ^ 1);
#pragma unroll 1
    for (int box = 0; box < BIAS_BOXES; ++box)
      store_box(grad_map, place + box * 64 * BOX_ROW_BYTES, read_word(now.column()) + box * BOX_COLUMNS,
                read_word(now.row()), read_word(now.bias_head()), read_word(now.bias_batch()));
    store_commit();
    store_wait();
    if (read_word(now.is_last())) break;
  }
  write_word(now.first_head(), -1);
  barrier_arrive(full);
}

// result[64, BLOCK_N] = left[64, COLUMNS] right[BLOCK_N, COLUMNS]^T
template <int COLUMNS>
__device__ __forceinline__ void issue_product(float (&result)[BLOCK_N / 2], uint32_t left, uint32_t right) {
  const uint32_t a = descriptor(left, 0), b = descriptor(right, 0);
#pragma unroll
  for (int k = 0; k < COLUMNS / 16; ++k)
    Wgmma<BLOCK_N>::ss(result, moved(a, column_group<BLOCK_M>(k)), moved(b, column_group<BLOCK_N>(k)), k > 0);
  wgmma_commit();
}

// This warp's 16 rows of the bias, later of its gradient, in the accumulators' layout: by 16 columns, eight numbers a
// thread. Where these lie differs from group to group by exclusive or alone, so one register is enough for all.
struct Bias {
  // 16 bits: 8 columns of a row of the four 8x8 matrices that are 16 columns of the warp's rows. float32: a pair of
  // columns of the first of this thread's rows; the second row's is 8 on.
  uint32_t place;

  __device__ __forceinline__ explicit Bias(uint32_t tile) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + (BIAS_F32 ? lane / 4 : lane % 16);
    const int chunk = BIAS_F32 ? lane % 4 / 2 : lane / 16;
    place = tile + row * BOX_ROW_BYTES + ((chunk ^ row) % 8 << 4) + (BIAS_F32 ? lane % 2 * 8 : 0);
  }
  // Volatile, or all addresses would be computed once and kept.
  __device__ __forceinline__ uint32_t chunks_on(int chunk) const {
    uint32_t address;
    asm volatile("xor.b32 %0, %1, %2;" : "=r"(address) : "r"(place), "r"(chunk % 8 * 16));
    return address + chunk / 8 * 64 * BOX_ROW_BYTES;
  }
  // Those of accumulators 8 `group` to 8 `group` + 7.
  __device__ __forceinline__ void read(float (&x)[8], int group) const {
    if constexpr (BIAS_F32) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = read_two(chunks_on(4 * group + i / 2 * 2) + i % 2 * 8 * BOX_ROW_BYTES);
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
      }
    } else {
      uint32_t words[4];
      load_matrices(words, chunks_on(2 * group));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack(words[i]);
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
      }
    }
  }
  // Writes the gradient of the same eight where they were.
  __device__ __forceinline__ void write(const float (&x)[8], int group) const {
    if constexpr (BIAS_F32) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        write_two(chunks_on(4 * group + i / 2 * 2) + i % 2 * 8 * BOX_ROW_BYTES, x[2 * i], x[2 * i + 1]);
    } else {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = pack(x[2 * i], x[2 * i + 1]);
      store_matrices(chunks_on(2 * group), words);
    }
  }
};

// Volatile, or the compiler would load where the number is used.
__device__ __forceinline__ float load_early(const float* address) {
  float x;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(address) : "memory");
  return x;
}

// What a thread must know of its two rows. The loads are in flight until `arrive`, which uses what they bring.
struct Rows {
  float high[2], low[2], delta[2];
  __device__ __forceinline__ void load(const BiasParams& params, int index, int row) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Rows past the end are not stored; any numbers will do.
      const int at = min(row + 8 * i, params.seqlen_q - 1);
      const uint32_t place = index * params.logsumexp_pitch + at;
      high[i] = load_early(params.logsumexp + place);
      low[i] = HAS_LOW ? load_early(params.logsumexp_low + place) : 0.0f;
      delta[i] = load_early(params.delta + (uint32_t)(index * params.delta_pitch + at));
    }
  }
  __device__ __forceinline__ void arrive() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      high[i] = high[i] == -INFINITY_F ? INFINITY_F : high[i];
      low[i] *= LOG2E;
    }
  }
};

__device__ __forceinline__ void consume(const BiasParams& params, const Shared& shared, int warpgroup) {
  const uint32_t rows = warpgroup * 64 * BOX_ROW_BYTES;
  const Bias bias(shared.bias_of(warpgroup));
  const Description description{shared.description(warpgroup)};
  Ring<STAGES> ring;
  uint32_t bias_phase = 0;
  float scores[BLOCK_N / 2], grads[BLOCK_N / 2], sum[BLOCK_N / 2];
#pragma unroll 1
  for (;;) {
    barrier_wait(shared.bias_full(warpgroup), bias_phase);
    bias_phase ^= 1;
    int item = read_word(description.first_head()), left = params.items;
    if (item < 0) break;
    const int row = read_word(description.row()) + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;  // and row + 8
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) sum[i] = 0.0f;
#pragma unroll 1
    do {
      Rows statistics;
      statistics.load(params, item, row);
      const int first = ring.stage;
      barrier_wait(shared.full(first), ring.phase);
      wgmma_fence();
      issue_product<HEAD_DIM>(scores, shared.left(first) + rows, shared.right(first));
      ring.advance();
      barrier_wait(shared.full(ring.stage), ring.phase);
      wgmma_fence();
      issue_product<HEAD_DIM_V>(grads, shared.left(ring.stage) + rows, shared.right(ring.stage));
      wgmma_wait<1>();
      warp_arrive(shared.empty(first));
      statistics.arrive();

      uint32_t all = 0;
#pragma unroll
      for (int group = 0; group < BLOCK_N / 16; ++group) {
        float added[8];
        bias.read(added, group);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int i = 8 * group + j, second = j / 2 % 2;
          // In this order: scores that a bias of finfo.min absorbed in the forward must be absorbed here.
          const float above = fmaf(scores[i], params.softmax_scale, added[j]) - statistics.high[second];
          scores[i] = exp2_approx(fmaf(above, LOG2E, -statistics.low[second]));
          all |= __float_as_uint(scores[i]);
        }
      }
      wgmma_wait_after<0>(all);
      wgmma_wait<0>();
      warp_arrive(shared.empty(ring.stage));
      ring.advance();
#pragma unroll
      for (int i = 0; i < BLOCK_N / 2; ++i) sum[i] = fmaf(scores[i], grads[i] - statistics.delta[i / 2 % 2], sum[i]);
      item += params.item_step;
    } while (--left > 0);
    // What a bias of -infinity hides has no gradient, whatever is in its key and value.
#pragma unroll
    for (int group = 0; group < BLOCK_N / 16; ++group) {
      float added[8], result[8];
      bias.read(added, group);
#pragma unroll
      for (int j = 0; j < 8; ++j) result[j] = added[j] == -INFINITY_F ? 0.0f : sum[8 * group + j];
      bias.write(result, group);
    }
    store_fence();
    warp_arrive_together(shared.staged(warpgroup));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_bias_gradient(
    const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
    const __grid_constant__ TensorMap value_map, const __grid_constant__ TensorMap grad_out_map,
    const __grid_constant__ TensorMap bias_map, const __grid_constant__ TensorMap grad_map,
    const __grid_constant__ BiasParams params) {
  const Shared shared(tile_memory());
  if (threadIdx.x == 0) {
    prefetch_maps(query_map, key_map, value_map, grad_out_map, bias_map);
    // Stages are filled by an arrival for each of two copies and their bytes, and emptied by one of each consumer warp.
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(shared.full(stage), 2);
      barrier_init(shared.empty(stage), 4 * CONSUMERS * WARP_ARRIVALS);
    }
    for (int warpgroup = 0; warpgroup < CONSUMERS; ++warpgroup) {
      barrier_init(shared.bias_full(warpgroup), 1);
      barrier_init(shared.staged(warpgroup), 4 * WARP_ARRIVALS);
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    registers_release<PRODUCER_REGISTERS>();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) produce(query_map, key_map, value_map, grad_out_map, params, shared);
    if (threadIdx.x % 32 == 0 && 1 <= warp && warp <= CONSUMERS) exchange(bias_map, grad_map, params, shared, warp - 1);
  } else {
    registers_claim<CONSUMER_REGISTERS>();
    consume(params, shared, uniform(threadIdx.x / 128) - 1);
  }
}
