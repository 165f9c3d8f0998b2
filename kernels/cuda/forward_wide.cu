// Forward attention on Hopper (compute capability 9.0) for a head_dim above 256, up to 512, without mask and dropout.
//
// The output of 64 query rows is 64 x 512 float32 numbers, the registers of two warpgroups, so that a block has 64 rows
// and each warpgroup half of the columns: of the output and value, and of the query and key. A warpgroup's half of the
// query stays in registers; else products of 64 rows would read more shared memory than there is time for.
//
//   two loading threads, one for each warpgroup's half of the columns, with a ring of stages each:
//     query, key[0], key[1], value[0], key[2], value[1], ..., value[last], 64 rows at a time
//   warpgroup w, for j = 1 ...:
//     issue S = query[:, half w] key[j][:, half w]^T: first the 32 keys of the other warpgroup, then its own
//     issue out[:, half w] += P[j - 1] value[j - 1][:, half w]
//     hand its sums for the other's keys over in shared memory, add the other's to those of its own keys
//     softmax of 64 rows x 32 keys, into P[j]; both wait for both halves of P[j]
//
// So exponentials run beside the second product, and each score is computed once in all.
//
// The shift of a row (softmax.cuh) is the same in both warpgroups. The first tile gives it, with the maximum over both
// halves; where it does not serve any more in either of them, both do the step again with new maxima (`restart`), from
// scores that are still in registers. Keys are visited in ascending order: blocks of a head that begin together read
// the same tiles at the same time, and the masked tiles of causal calls come last.
//
// Who waits for whom. A loading thread waits for stages of its own ring, a warpgroup for its own ring and for the other
// warpgroup at the same step, whose loads do not depend on this one's. A warpgroup holds two stages at most while it
// waits for a third: keys j, values j - 1, of STAGES >= 3. All know the number of steps from the block's number.
//   Named barrier 1 + w: the other's sums for w are written. Again only after barrier 3, which w reaches after reading.
//   Named barrier 3: P[j] is written, and both have done product j - 1. So P needs two buffers: P[j + 1] goes where
//   P[j - 1] was, after barrier 3 of step j.
//
// Defined by the host (forward_wide.py): HALF_DIM (columns of a warpgroup, a multiple of 16 up to 256), STAGES,
// IS_CAUSAL, IS_BF16, WRITE_LSE.
#include "barrier.cuh"
#include "softmax.cuh"
#include "wgmma.cuh"
#include "wgmma_instructions.cuh"

// Mirrored by forward_wide.py.
struct WideParams {
  void* out;                                                  // [batch, num_heads, seqlen_q, head_dim], last stride 1
  float* logsumexp;                                           // [batch, num_heads, seqlen_q], contiguous
  int64_t out_stride_batch, out_stride_head, out_stride_row;  // elements
  int batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim;
  int q_tiles, heads_per_group;
  float softmax_scale_log2;
};

constexpr int BLOCK_M = 64;
constexpr int BLOCK_N = 64;
constexpr int OWN_KEYS = BLOCK_N / 2;  // whose softmax a warpgroup does
constexpr int THREADS = 3 * 128;
constexpr int PRODUCER_REGISTERS = 24;
constexpr int CONSUMER_REGISTERS = 240;
constexpr int BOX_BYTES = BLOCK_N * BOX_ROW_BYTES;
constexpr int STAGE_BYTES = ceil_div(HALF_DIM, BOX_COLUMNS) * BOX_BYTES;
constexpr int EXCHANGE_BYTES = BLOCK_M * OWN_KEYS * 4;
constexpr int PROBABILITIES_BYTES = BLOCK_M * BLOCK_N * 2;
static_assert(BLOCK_M == BLOCK_N);  // query tiles are loaded into stages of keys
static_assert(BLOCK_N == BOX_COLUMNS);
static_assert(STAGES >= 3);

// Byte addresses in shared memory.
struct Shared {
  uint32_t stages, exchange, probabilities, row_values, barriers;
  __device__ explicit Shared(uint32_t base)
      : stages(base),
        exchange(stages + 2 * STAGES * STAGE_BYTES),
        probabilities(exchange + 2 * EXCHANGE_BYTES),
        row_values(probabilities + 2 * PROBABILITIES_BYTES),
        barriers(row_values + 2 * BLOCK_M * 4) {}
  __device__ uint32_t stage(int warpgroup, int index) const {
    return stages + (warpgroup * STAGES + index) * STAGE_BYTES;
  }
  __device__ uint32_t full(int warpgroup, int index) const { return barriers + 8 * (warpgroup * STAGES + index); }
  __device__ uint32_t empty(int warpgroup, int index) const { return full(2 + warpgroup, index); }
};

struct Tile {
  int first_row, head, batch, key_tiles;
};

// The block's tile. Rows past the last query are computed and not written. Causal: heads come in groups, and within a
// group the longest tiles of all its heads come first.
__device__ __forceinline__ Tile tile_of_block(const WideParams& params) {
  // Whoever needs it computes it, rather than keep it in registers.
  const int block = opaque(blockIdx.x), q_tiles = params.q_tiles;
  int head, q_tile;
  if (IS_CAUSAL) {
    const int group_tiles = params.heads_per_group * q_tiles;
    const int first = block / group_tiles * params.heads_per_group, within = block % group_tiles;
    const int heads = min(params.heads_per_group, params.batch * params.num_heads - first);
    head = first + within % heads;
    q_tile = q_tiles - 1 - within / heads;
  } else {
    head = block / q_tiles;
    q_tile = block % q_tiles;
  }
  const int first_row = q_tile * BLOCK_M;
  const int visible = IS_CAUSAL ? min(params.seqlen_k, first_row + BLOCK_M) : params.seqlen_k;
  return {first_row, head % params.num_heads, head / params.num_heads, ceil_div(visible, BLOCK_N)};
}

__device__ __forceinline__ void produce(const TensorMap& query_map, const TensorMap& key_map,
                                        const TensorMap& value_map, const WideParams& params, const Shared& shared,
                                        int warpgroup) {
  const Tile tile = tile_of_block(params);
  const int kv_head = tile.head / (params.num_heads / params.num_kv_heads);
  const int first_column = warpgroup * HALF_DIM;
  Ring<STAGES> ring;
  // Columns past the tensor's last arrive as zeros.
  const auto load = [&](const TensorMap& map, int row) {
    barrier_wait(shared.empty(warpgroup, ring.stage), ring.phase ^ 1);
    load_rows<BLOCK_N, HALF_DIM>(map, shared.stage(warpgroup, ring.stage), shared.full(warpgroup, ring.stage), row,
                                 kv_head, tile.batch, first_column);
    ring.advance();
  };
  load_rows<BLOCK_M, HALF_DIM>(query_map, shared.stage(warpgroup, 0), shared.full(warpgroup, 0), tile.first_row,
                               tile.head, tile.batch, first_column);
  ring.advance();
  load(key_map, 0);
#pragma unroll 1
  for (int row = BLOCK_N; row < tile.key_tiles * BLOCK_N; row += BLOCK_N) {
    load(key_map, row);
    load(value_map, row - BLOCK_N);
  }
  load(value_map, (tile.key_tiles - 1) * BLOCK_N);
}

// Writes a warp's 16 rows to global memory, 16 bytes per lane: a quad's four lanes exchange groups of 8 columns.
// row: of this thread, as an accumulator has it; the other one is 8 further.
__device__ __forceinline__ void store_out(const float (&out)[HALF_DIM / 2], const float (&inverse)[2], const Tile& tile,
                                          int row, int first_column, const WideParams& params) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int this_row = row + 8 * half;
    uint8_t* base = (uint8_t*)params.out + 2 * (tile.batch * params.out_stride_batch +
                                                tile.head * params.out_stride_head + this_row * params.out_stride_row);
#pragma unroll
    for (int group = 0; group < HALF_DIM / 8; group += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (group + i) + 2 * half;
        words[i] = group + i < HALF_DIM / 8 ? pack(out[at] * inverse[half], out[at + 1] * inverse[half]) : 0;
      }
      quad_transpose(words, lane);
      const int in_half = 8 * (group + lane % 4), column = first_column + in_half;
      if (this_row < params.seqlen_q && in_half < HALF_DIM && column < params.head_dim)
        store_eight(base + 2 * column, words);
    }
  }
}

__device__ __forceinline__ void consume(const WideParams& params, const Shared& shared, int warpgroup) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int row_in_tile = 16 * warp + lane / 4;
  const float scale_log2 = params.softmax_scale_log2;
  const int other = 1 - warpgroup;
  const int key_tiles = tile_of_block(params).key_tiles;

  uint32_t query[HALF_DIM / 16][4];  // the first product's left operand, 16 columns at a time
  float out[HALF_DIM / 2] = {};
  float scores[OWN_KEYS / 2];  // sums of its columns for the other's keys, then scores of its own keys
  Softmax<false> softmax;
  softmax.reset();

  const auto release = [&](int stage) { warp_arrive(shared.empty(warpgroup, stage), lane); };
  // Of the keys in `stage` those that `owner` does the softmax of.
  const auto issue_scores = [&](int owner, int stage) {
    const uint32_t keys = descriptor(shared.stage(warpgroup, stage) + owner * OWN_KEYS * BOX_ROW_BYTES, 0);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < HALF_DIM / 16; ++k)
      Wgmma<OWN_KEYS>::rs_rows(scores, query[k], moved(keys, column_group<BLOCK_N>(k)), k > 0);
    wgmma_commit();
  };
  // Of product j, whose values are in `stage`: groups of 16 keys from `first` to `end`.
  const auto issue_out = [&](int first, int end, int j, int stage) {
    const uint32_t probabilities = descriptor(shared.probabilities + j % 2 * PROBABILITIES_BYTES, 0);
    const uint32_t values = descriptor(shared.stage(warpgroup, stage), BLOCK_N * BOX_ROW_BYTES);
    wgmma_fence();
#pragma unroll
    for (int k = first; k < end; ++k)
      Wgmma<HALF_DIM>::ss_columns(out, moved(probabilities, 32 * k), moved(values, k * 16 * BOX_ROW_BYTES),
                                  k > 0 || j > 0);
    wgmma_commit();
  };
  // Both warpgroups' threads of a number hold the same rows and, of the keys that one of them owns, the same columns.
  const uint32_t place = 16 * (threadIdx.x % 128);
  const auto send_scores = [&] {
#pragma unroll
    for (int i = 0; i < OWN_KEYS / 8; ++i)
      store_four(shared.exchange + other * EXCHANGE_BYTES + i * 2048 + place, scores + 4 * i);
    named_arrive(1 + other, 256);
  };
  const auto receive_scores = [&](int j) {
    named_sync(1 + warpgroup, 256);
#pragma unroll
    for (int i = 0; i < OWN_KEYS / 8; ++i) {
      const float4 x = read_four(shared.exchange + warpgroup * EXCHANGE_BYTES + i * 2048 + place);
      scores[4 * i] += x.x;
      scores[4 * i + 1] += x.y;
      scores[4 * i + 2] += x.z;
      scores[4 * i + 3] += x.w;
    }
    // Only the last tile can hold keys that some rows see and others do not, or the end of the keys.
    if (j == key_tiles - 1) {
      const Tile tile = tile_of_block(params);
      const int last = params.seqlen_k - 1, row = tile.first_row + row_in_tile;
      const int first_key = j * BLOCK_N + warpgroup * OWN_KEYS;
      mask(scores, (IS_CAUSAL ? min(last, row) : last) - first_key, (IS_CAUSAL ? min(last, row + 8) : last) - first_key,
           lane % 4);
    }
  };
  const auto write_probabilities = [&](int j, const uint32_t (&words)[OWN_KEYS / 4]) {
    const uint32_t tile_address = shared.probabilities + j % 2 * PROBABILITIES_BYTES;
#pragma unroll
    for (int group = 0; group < OWN_KEYS / 8; group += 2) {
      const uint32_t four[4] = {words[2 * group], words[2 * group + 1], words[2 * group + 2], words[2 * group + 3]};
      store_matrices(
          chunk_address<BLOCK_M>(tile_address, 16 * warp + lane % 16, warpgroup * (OWN_KEYS / 8) + group + lane / 16),
          four);
    }
  };
  // `Softmax::update` that leaves the scores as they are, for `restart`, and the sums to be added.
  const auto probabilities = [&](uint32_t (&words)[OWN_KEYS / 4], float (&added)[2]) {
    added[0] = added[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < OWN_KEYS / 4; ++i) {
      const float x = exp2_approx(fmaf(scores[2 * i], scale_log2, -softmax.shift[i % 2]));
      const float y = exp2_approx(fmaf(scores[2 * i + 1], scale_log2, -softmax.shift[i % 2]));
      added[i % 2] += x;
      added[i % 2] += y;
      words[i] = pack(x, y);
    }
  };
  // A row's value in both warpgroups, whose threads all meet.
  const auto exchange_rows = [&](const float (&mine)[2], float (&others)[2]) {
    const uint32_t rows = shared.row_values + 4 * row_in_tile;
    if (lane % 4 == 0) {
      write_word(rows + 4 * BLOCK_M * warpgroup, __float_as_int(mine[0]));
      write_word(rows + 4 * BLOCK_M * warpgroup + 32, __float_as_int(mine[1]));
    }
    named_sync(3, 256);
    others[0] = __int_as_float(read_word(rows + 4 * BLOCK_M * other));
    others[1] = __int_as_float(read_word(rows + 4 * BLOCK_M * other + 32));
  };
  // Softmax of the scores with new maxima of their rows, into P[j]. No product is in flight.
  const auto restart = [&](int j) {
    float largest[2], others[2], rescale[2];
    softmax.row_maxima(scores, largest);
    exchange_rows(largest, others);
    largest[0] = fmaxf(largest[0], others[0]);
    largest[1] = fmaxf(largest[1], others[1]);
    softmax.restart_from(scores, largest, scale_log2, rescale);
    if (j > 0) {
#pragma unroll
      for (int i = 0; i < HALF_DIM / 2; ++i) out[i] *= rescale[i / 2 % 2];
    }
    uint32_t words[OWN_KEYS / 4];
#pragma unroll
    for (int i = 0; i < OWN_KEYS / 4; ++i) words[i] = pack(scores[2 * i], scores[2 * i + 1]);
    write_probabilities(j, words);
    store_fence();
    named_sync(3, 256);
  };

  // The query, from a stage to registers.
  barrier_wait(shared.full(warpgroup, 0), 0);
#pragma unroll
  for (int k = 0; k < HALF_DIM / 16; ++k)
    load_matrices(query[k],
                  chunk_address<BLOCK_M>(shared.stage(warpgroup, 0), 16 * warp + lane % 16, 2 * k + lane / 16));

  barrier_wait(shared.full(warpgroup, 1), 0);
  issue_scores(other, 1);
  release(0);  // the product has the query in registers
  wgmma_wait<0>();
  send_scores();
  issue_scores(warpgroup, 1);
  wgmma_wait<0>();
  release(1);
  receive_scores(0);
  restart(0);

#pragma unroll 1
  for (int j = 1; j < key_tiles; ++j) {
    // As the loading thread counts: keys j come after the query, j tiles of keys and j - 1 of values.
    const Ring<STAGES> keys = Ring<STAGES>::at(2 * j), values = Ring<STAGES>::at(2 * j + 1);
    barrier_wait(shared.full(warpgroup, keys.stage), keys.phase);
    issue_scores(other, keys.stage);
    // The second product's beginning fills the time in which the first one's sums are sent.
    barrier_wait(shared.full(warpgroup, values.stage), values.phase);
    issue_out(0, 1, j - 1, values.stage);
    wgmma_wait<1>();
    send_scores();
    issue_scores(warpgroup, keys.stage);
    issue_out(1, BLOCK_N / 16, j - 1, values.stage);
    wgmma_wait<1>();
    release(keys.stage);
    receive_scores(j);
    uint32_t words[OWN_KEYS / 4];
    float added[2];
    probabilities(words, added);
    write_probabilities(j, words);
    store_fence();
    wgmma_wait_after<0>(words[OWN_KEYS / 4 - 1]);
    wgmma_wait<0>();
    release(values.stage);
    // Written so that NaN and infinity fail.
    const bool serves = added[0] <= LARGEST_SUM && added[1] <= LARGEST_SUM;
    if (named_any(3, 256, !serves)) {
      restart(j);
    } else {
      softmax.sum[0] += added[0];
      softmax.sum[1] += added[1];
    }
  }
  const Ring<STAGES> values = Ring<STAGES>::at(2 * key_tiles);
  barrier_wait(shared.full(warpgroup, values.stage), values.phase);
  issue_out(0, BLOCK_N / 16, key_tiles - 1, values.stage);
  const Tile tile = tile_of_block(params);
  float sums[2] = {quad_sum(softmax.sum[0]), quad_sum(softmax.sum[1])}, others[2], inverse[2];
  exchange_rows(sums, others);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Both warpgroups add in the same order.
    const float sum = sums[half] + others[half];
    inverse[half] = sum == 0.0f ? 0.0f : 1.0f / sum;
    const int row = tile.first_row + row_in_tile + 8 * half;
    if (WRITE_LSE && warpgroup == 0 && row < params.seqlen_q && lane % 4 == 0) {
      const int64_t head = (int64_t)tile.batch * params.num_heads + tile.head;
      params.logsumexp[head * params.seqlen_q + row] = (__log2f(sum) + softmax.shift[half]) * 0.6931471805599453f;
    }
  }
  wgmma_wait<0>();
  store_out(out, inverse, tile, tile.first_row + row_in_tile, warpgroup * HALF_DIM, params);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_forward_wide(const __grid_constant__ TensorMap query_map,
                                                                            const __grid_constant__ TensorMap key_map,
                                                                            const __grid_constant__ TensorMap value_map,
                                                                            const __grid_constant__ WideParams params) {
  const Shared shared(tile_memory());
  if (threadIdx.x == 0) {
    prefetch_maps(query_map, key_map, value_map);
    // Stages are filled by one arrival and the copies' bytes, and emptied by one arrival of each warp of the warpgroup
    // that reads them.
    for (int index = 0; index < 2 * STAGES; ++index) {
      barrier_init(shared.full(0, index), 1);
      barrier_init(shared.empty(0, index), 4 * WARP_ARRIVALS);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 2) {
    registers_release<PRODUCER_REGISTERS>();
    const int warp = threadIdx.x % 128 / 32;
    if (warp < 2 && threadIdx.x % 32 == 0) produce(query_map, key_map, value_map, params, shared, warp);
  } else {
    registers_claim<CONSUMER_REGISTERS>();
    consume(params, shared, warpgroup);
  }
}
