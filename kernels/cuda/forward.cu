// Forward attention on Hopper (compute capability 9.0): out = softmax(scale * query key^T) value, and its logsumexp.
//
//   for each tile of BLOCK_M query rows that this block owns (persistent grid, longest tiles first):
//     loading warp:    query tile, then key and value tiles of BLOCK_N rows, by TMA into rings of STAGES buffers
//     each consumer warpgroup, 64 query rows:
//       for j = 1 ...:  issue S = query key[j]^T;  issue out += P value[j - 1]
//                       P' = softmax(S) while the second product runs;  P = P'
//       issue S = query' key'[0]^T of the next tile;  issue out += P value[last]
//       P = softmax(S) while the second product runs;  out /= row sums, into the buffer of the query
//     storing warp:    finished outputs from the query buffers to global memory, by TMA
//
// So the matrix unit has work across tiles. Key tiles are visited from the last one that the rows may see to the first:
// masks come first. S, P and out stay in registers. Dao et al., FlashAttention-2 (2023) and Shah et al.,
// FlashAttention-3 (2024) describe the method; softmax.cuh says why there is no maximum in the loop.
//
// With a bool mask (MASKED) the key tiles to visit are those of a list (mask.cuh), which the loading warp reads ahead:
// first those that all rows see whole, so that the first one gives every row a maximum, then the mixed ones, each with
// the mask and its own maximum. The number of a key tile travels in shared memory beside it.
// With a float mask (BIAS_BYTES) mixed tiles have their part of it in shared memory too (bias.cuh), and take no maximum
// either where their rows have a shift that may serve: then mask and shift are joined while the products run.
//
// With DROPOUT the row sums are those of all probabilities, and what is dropped is left out of the second product
// alone. The random keys of a key tile (dropout.cuh) come with it; the bits are mixed while the first product runs.
//
// Packed sequences (PACKED): rows of all sequences follow each other in one tensor, and a list made on the GPU names
// the query tiles with their sequences (varlen_schedule.py). A key tile that reaches past its sequence brings rows of
// the next: their scores are hidden as those past the end are, and their values, which may be infinite or NaN, are
// overwritten with zeros. A query tile that reaches past its sequence goes from registers to global memory.
//
// Shared memory: Q_STAGES query tiles, STAGES key and STAGES value tiles, each a row of boxes of 64 columns (tma.cuh).
// With a single query buffer (head_dim above 192) outputs go from registers to global memory.
// Registers: BLOCK_N / 2 + BLOCK_N / 4 + HEAD_DIM_V / 2 for S, P and out, of 232 with two consumers, 160 with three and
// 112 with four.
//
// Defined by the host (forward.py): HEAD_DIM (a multiple of 16), HEAD_DIM_V (one of 8), BLOCK_M, BLOCK_N, STAGES,
// Q_STAGES, ROTATE (warpgroups exchange their rows with every query tile), IS_CAUSAL, MASKED, PACKED, BIAS_BYTES (of an
// element of a float mask, or 0), BIAS_PER_KEY (it has one row for all queries), BIAS_STAGES (tiles of it in flight),
// DROPOUT, IS_BF16, WRITE_LSE, PING_PONG (warpgroups take turns at the matrix unit).
#include "barrier.cuh"
#include "dropout.cuh"
#include "mask.cuh"
#if MASKED
#include "mask_lists.cuh"
#endif
#include "softmax.cuh"
#if BIAS_BYTES
#include "bias.cuh"
#endif
#include "wgmma.cuh"
#include "wgmma_instructions.cuh"

// Mirrored by forward.py.
struct ForwardParams {
  void* out;  // [batch, num_heads, seqlen_q, head_dim_v], last stride 1
  float*
      logsumexp;  // [batch, num_heads, seqlen_q] contiguous; with a float mask twice, the second what rounding cut off
  int* counters;  // if COUNTED: tiles handed out after each block's first, blocks done; both zero between launches
  int64_t out_stride_batch, out_stride_head, out_stride_row;  // elements
  int batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim_v;
  int num_tiles, q_tiles, heads_per_group;
  float softmax_scale_log2, softmax_scale;
  int batch_first;        // of tiles next to each other: those of all batches of a head, which share its mask
  DropoutParams dropout;  // if DROPOUT
  MaskParams mask;        // if MASKED
  const int4* entries;    // if PACKED: two for each of q_tiles tiles, see varlen_schedule.py
};

constexpr int CONSUMERS = BLOCK_M / 64;
constexpr int THREADS = 128 * (CONSUMERS + 1);
// A warpgroup passes over key tiles of the next query tile while it still holds the last value stage of this one.
static_assert(!IS_CAUSAL || ceil_div(BLOCK_M - 64, BLOCK_N) < STAGES);
// So the diagonal of a warpgroup's 64 rows lies within one key tile.
static_assert(!IS_CAUSAL || BLOCK_N % 64 == 0);
static_assert(!(IS_CAUSAL && MASKED));
static_assert(!(PACKED && MASKED));
static_assert(!ROTATE || !(MASKED || PACKED || DROPOUT));
static_assert(MASKED || !BIAS_BYTES);
// In the pieces that lists are made of, and as many keys as one word has bits for.
static_assert(!MASKED || (BLOCK_N % 16 == 0 && BLOCK_N <= 128));
// Query tiles differ in length, so that a counter hands them out.
constexpr bool COUNTED = IS_CAUSAL || MASKED || PACKED;
// Where tiles of a mask are loaded too, the loading thread has more to remember.
constexpr bool LARGE_PRODUCER = BIAS_BYTES > 0 && HEAD_DIM_V <= 192;
constexpr int PRODUCER_REGISTERS = CONSUMERS >= 3 ? 32 : LARGE_PRODUCER ? 56 : 40;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 4 ? 112 : CONSUMERS == 3 ? 160 : LARGE_PRODUCER ? 224 : 232;
// With two query buffers the output leaves through its query's; a single one is needed for the next query before.
constexpr bool STAGE_OUT = Q_STAGES > 1;
constexpr int Q_BYTES = BLOCK_M * round_up(HEAD_DIM, BOX_COLUMNS) * 2;
constexpr int K_BYTES = BLOCK_N * round_up(HEAD_DIM, BOX_COLUMNS) * 2;
constexpr int V_BYTES = BLOCK_N * round_up(HEAD_DIM_V, BOX_COLUMNS) * 2;
#if BIAS_BYTES
// Are a mixed tile's elements of a float mask read before its scores are there? Where there are registers for both.
constexpr bool BIAS_EARLY = BLOCK_N + BLOCK_N / 4 + HEAD_DIM_V / 2 <= 160;
#else
constexpr int BIAS_TILE_BYTES = 0;
#endif

// The random keys of a key tile. So that no tile reaches past their table:
constexpr int COLUMN_KEYS_BYTES = DROPOUT ? BLOCK_N * 4 : 0;
static_assert(!DROPOUT || DROPOUT_PITCH % BLOCK_N == 0);

// What the producer tells the consumers about a tile. key_tiles: how many to visit; with a mask KeyList::counts().
struct Tile {
  int first_row, head, batch, key_tiles;
#if PACKED
  int row_end, first_key, seqlen_k, unused;  // the sequence's: last row + 1 and first key in the tensors, length
#endif
};

// Byte addresses in shared memory.
struct Shared {
  uint32_t query, key, value, bias, column_keys, tiles, barriers;
  __device__ explicit Shared(uint32_t base)
      : query(base),
        key(query + Q_STAGES * Q_BYTES),
        value(key + STAGES * K_BYTES),
        bias(value + STAGES * V_BYTES),
        column_keys(bias + BIAS_STAGES * BIAS_TILE_BYTES),
        tiles(column_keys + STAGES * COLUMN_KEYS_BYTES),
        barriers(tiles + Q_STAGES * sizeof(Tile)) {}
  __device__ uint32_t barrier(int index) const { return barriers + 8 * index; }
  __device__ uint32_t q_full(int stage) const { return barrier(stage); }
  __device__ uint32_t q_empty(int stage) const { return barrier(Q_STAGES + stage); }
  __device__ uint32_t out_full(int stage) const { return barrier(2 * Q_STAGES + 4 * STAGES + stage); }
  __device__ uint32_t k_full(int stage) const { return barrier(2 * Q_STAGES + stage); }
  __device__ uint32_t k_empty(int stage) const { return barrier(2 * Q_STAGES + STAGES + stage); }
  __device__ uint32_t v_full(int stage) const { return barrier(2 * Q_STAGES + 2 * STAGES + stage); }
  __device__ uint32_t v_empty(int stage) const { return barrier(2 * Q_STAGES + 3 * STAGES + stage); }
  __device__ uint32_t bias_full(int stage) const { return barrier(3 * Q_STAGES + 4 * STAGES + stage); }
  __device__ uint32_t bias_empty(int stage) const { return bias_full(BIAS_STAGES + stage); }
  // The number of the key tile in this stage, with a mask.
  __device__ uint32_t number(int stage) const { return bias_full(2 * BIAS_STAGES) + 4 * stage; }
};

// Hands tiles to blocks: the first by block number; then, where all tiles are equal, every gridDim-th, and otherwise
// the next that nobody has taken, which is asked for one tile ahead since the answer takes about 500 cycles.
struct Scheduler {
  int index, next;

  __device__ explicit Scheduler(const ForwardParams& params) : index(blockIdx.x), next(ask(params)) {}
  __device__ __forceinline__ int ask(const ForwardParams& params) {
    return COUNTED ? gridDim.x + atomicAdd(params.counters, 1) : index + gridDim.x;
  }
  __device__ __forceinline__ void advance(const ForwardParams& params) {
    index = next;
    if (index < params.num_tiles) next = ask(params);
  }
  // The last block leaves the counters as it found them.
  __device__ __forceinline__ void finish(const ForwardParams& params) {
    if (COUNTED && atomicAdd(params.counters + 1, 1) == gridDim.x - 1) {
      params.counters[0] = 0;
      params.counters[1] = 0;
    }
  }
};

// Causal: heads come in groups whose keys and values stay in L2 together, and within a group the longest tiles of all
// heads come first; nobody knows which are the longest with a mask, but most masks are causal. Full: the tiles of one
// head follow each other.
__device__ __forceinline__ Tile tile_at(int index, const ForwardParams& params) {
  int head, q_tile;
  if (COUNTED) {
    // With packed sequences the list has the longest first.
    const int group_tiles = params.heads_per_group * params.q_tiles;
    const int group = index / group_tiles, within = index % group_tiles;
    const int first = group * params.heads_per_group;
    const int heads = min(params.heads_per_group, params.batch * params.num_heads - first);
    head = first + within % heads;
    q_tile = PACKED ? within / heads : params.q_tiles - 1 - within / heads;
  } else {
    head = index / params.q_tiles;
    q_tile = index % params.q_tiles;
  }
  Tile tile;
#if PACKED
  // Number of the tile in its sequence, then the first query, how many there are, and likewise of keys.
  const int4 entry = params.entries[2 * q_tile];
  const int first_row = entry.x * BLOCK_M, seqlen_k = params.entries[2 * q_tile + 1].x;
  const int seen = IS_CAUSAL ? min(seqlen_k, first_row + BLOCK_M) : seqlen_k;
  // A query tile without keys visits one, all of it hidden; without queries it is none.
  const int key_tiles = entry.z == 0 ? 0 : ceil_div(max(seen, 1), BLOCK_N);
  return {entry.y + first_row, head, 0, key_tiles, entry.y + entry.z, entry.w, seqlen_k, 0};
#endif
  tile.first_row = q_tile * BLOCK_M;
  const bool batch_first = BIAS_BYTES && params.batch_first;
  tile.batch = batch_first ? head % params.batch : head / params.num_heads;
  tile.head = batch_first ? head / params.batch : head % params.num_heads;
  const int visible = IS_CAUSAL ? min(params.seqlen_k, tile.first_row + BLOCK_M) : params.seqlen_k;
  tile.key_tiles = ceil_div(visible, BLOCK_N);
  return tile;
}

__device__ __forceinline__ void write_tile(uint32_t address, const Tile& tile) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(tile.first_row), "r"(tile.head),
               "r"(tile.batch), "r"(tile.key_tiles)
               : "memory");
#if PACKED
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address + 16), "r"(tile.row_end), "r"(tile.first_key),
               "r"(tile.seqlen_k), "r"(0)
               : "memory");
#endif
}
// By one thread.
__device__ __forceinline__ Tile read_tile(uint32_t address) {
  Tile tile;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(tile.first_row), "=r"(tile.head), "=r"(tile.batch), "=r"(tile.key_tiles)
               : "r"(address)
               : "memory");
#if PACKED
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(tile.row_end), "=r"(tile.first_key), "=r"(tile.seqlen_k), "=r"(tile.unused)
               : "r"(address + 16)
               : "memory");
#endif
  return tile;
}
// By a whole warp. Lane 0 reads, since it also tells the producer that the description may be overwritten.
__device__ __forceinline__ Tile warp_read_tile(uint32_t address) {
  Tile tile = {};
  if (threadIdx.x % 32 == 0) tile = read_tile(address);
  return {uniform(tile.first_row),
          uniform(tile.head),
          uniform(tile.batch),
          uniform(tile.key_tiles),
#if PACKED
          uniform(tile.row_end),
          uniform(tile.first_key),
          uniform(tile.seqlen_k),
          0
#endif
  };
}

// The end of the rows that are the tile's own: its sequence's, or else `limit`.
__device__ __forceinline__ int row_limit(const Tile& tile, int limit) {
#if PACKED
  return min(tile.row_end, limit);
#else
  return limit;
#endif
}

__device__ __forceinline__ void produce(const TensorMap& query_map, const TensorMap& key_map,
                                        const TensorMap& value_map, const TensorMap& bias_map,
                                        const ForwardParams& params, const Shared& shared) {
  Ring<Q_STAGES> q;
#if BIAS_BYTES
  Ring<BIAS_STAGES> bias;
#endif
  Ring<STAGES> k, v;
  const int queries_per_kv = params.num_heads / params.num_kv_heads;
  Scheduler scheduler(params);
  for (; scheduler.index < params.num_tiles; scheduler.advance(params)) {
    Tile tile = tile_at(scheduler.index, params);
    if (PACKED && tile.key_tiles == 0) continue;
#if PACKED
    const int first_key = tile.first_key;
#else
    constexpr int first_key = 0;
#endif
    const int kv_head = tile.head / queries_per_kv;
    const uint32_t* const column_keys = dropout_columns(
        params.dropout, (int64_t)tile.batch * params.num_heads + tile.head, params.seqlen_q, params.seqlen_k);

    const auto load_query = [&] {
      barrier_wait(shared.q_empty(q.stage), q.phase ^ 1);
      write_tile(shared.tiles + q.stage * sizeof(Tile), tile);
      load_rows<BLOCK_M, HEAD_DIM>(query_map, shared.query + q.stage * Q_BYTES, shared.q_full(q.stage), tile.first_row,
                                   tile.head, tile.batch);
      q.advance();
    };
    const auto load_key = [&](int j) {
      barrier_wait(shared.k_empty(k.stage), k.phase ^ 1);
      if (MASKED) write_word(shared.number(k.stage), j);
      load_rows<BLOCK_N, HEAD_DIM>(key_map, shared.key + k.stage * K_BYTES, shared.k_full(k.stage),
                                   first_key + j * BLOCK_N, kv_head, tile.batch);
      if constexpr (DROPOUT)
        load_bytes<COLUMN_KEYS_BYTES>(column_keys + j * BLOCK_N, shared.column_keys + k.stage * COLUMN_KEYS_BYTES,
                                      shared.k_full(k.stage));
      k.advance();
    };
    const auto load_value = [&](int j) {
      barrier_wait(shared.v_empty(v.stage), v.phase ^ 1);
      load_rows<BLOCK_N, HEAD_DIM_V>(value_map, shared.value + v.stage * V_BYTES, shared.v_full(v.stage),
                                     first_key + j * BLOCK_N, kv_head, tile.batch);
      v.advance();
    };
    const auto load_mask = [&](int j) {
#if BIAS_BYTES
      barrier_wait(shared.bias_empty(bias.stage), bias.phase ^ 1);
      load_bias(bias_map, shared.bias + bias.stage * BIAS_TILE_BYTES, shared.bias_full(bias.stage), j * BLOCK_N,
                BIAS_PER_KEY ? 0 : tile.first_row, params.mask.stride_head ? tile.head : 0,
                params.mask.stride_batch ? tile.batch : 0);
      bias.advance();
#endif
    };

    // The order in which the consumers need them; a single query buffer is free later than the first key buffer.
    if constexpr (MASKED) {
      const KeyList list(params.mask, tile.batch, tile.head, tile.first_row / BLOCK_M);
      tile.key_tiles = list.counts();
      // Numbers are read one ahead.
      int j = list[0], next = list[1];
      if (Q_STAGES > 1) load_query();
      load_key(j);
      if (list.full == 0) load_mask(j);
      if (Q_STAGES == 1) load_query();
#pragma unroll 1
      for (int position = 1; position < list.visited; ++position) {
        const int before = j;
        j = next;
        next = list[position + 1];
        load_key(j);
        if (position >= list.full) load_mask(j);
        load_value(before);
      }
      load_value(j);
    } else {
      if (Q_STAGES > 1) load_query();
      load_key(tile.key_tiles - 1);
      if (Q_STAGES == 1) load_query();
#pragma unroll 1
      for (int j = tile.key_tiles - 2; j >= 0; --j) {
        load_key(j);
        load_value(j + 1);
      }
      load_value(0);
    }
  }
  scheduler.finish(params);
  // A tile without keys ends the consumers.
  barrier_wait(shared.q_empty(q.stage), q.phase ^ 1);
  write_tile(shared.tiles + q.stage * sizeof(Tile), Tile{});
  barrier_arrive(shared.q_full(q.stage));
}

// The storing warp: sends finished tiles from the query buffers to global memory, and frees the buffers.
__device__ __forceinline__ void store_tiles(const TensorMap& out_map, const Shared& shared) {
  for (Ring<Q_STAGES> q;; q.advance()) {
    barrier_wait(shared.q_full(q.stage), q.phase);
    const Tile tile = read_tile(shared.tiles + q.stage * sizeof(Tile));
    if (tile.key_tiles == 0) return;
    barrier_wait(shared.out_full(q.stage), q.phase);
    if (row_limit(tile, tile.first_row + BLOCK_M) == tile.first_row + BLOCK_M) {
      store_rows<BLOCK_M, HEAD_DIM_V>(out_map, shared.query + q.stage * Q_BYTES, tile.first_row, tile.head, tile.batch);
      store_wait();
    }
    barrier_arrive(shared.q_empty(q.stage));
  }
}

// One warpgroup's share of the products.
__device__ __forceinline__ void scores_product(float (&scores)[BLOCK_N / 2], uint32_t query, uint32_t key) {
#pragma unroll
  for (int k = 0; k < HEAD_DIM / 16; ++k)
    Wgmma<BLOCK_N>::ss(scores, moved(query, column_group<BLOCK_M>(k)), moved(key, column_group<BLOCK_N>(k)), k > 0);
}
__device__ __forceinline__ void out_product(float (&out)[HEAD_DIM_V / 2], const uint32_t (&probabilities)[BLOCK_N / 4],
                                            uint32_t value, bool accumulate) {
#pragma unroll
  for (int k = 0; k < BLOCK_N / 16; ++k)
    Wgmma<HEAD_DIM_V>::rs(out, probabilities + 4 * k, moved(value, k * 16 * BOX_ROW_BYTES), k > 0 || accumulate);
}

// This warp's scores once more, without the rest of its warpgroup: the rare case may be slow.
__device__ __forceinline__ void warp_scores(float (&scores)[BLOCK_N / 2], uint32_t query, int first_row, uint32_t key) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2; ++i) scores[i] = 0.0f;
#pragma unroll 1
  for (int k = 0; k < HEAD_DIM / 16; ++k) {
    uint32_t a[4], b[2];
    load_matrices(a, chunk_address<BLOCK_M>(query, first_row + lane % 16, 2 * k + lane / 16));
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n) {
      load_matrices(b, chunk_address<BLOCK_N>(key, 8 * n + lane % 8, 2 * k + lane / 8 % 2));
      warp_product(scores + 4 * n, a, b);
    }
  }
}

using RowSoftmax = Softmax<(BIAS_BYTES > 0)>;

// The factors that turn `out` into averages, and the logsumexp of the two rows.
__device__ __forceinline__ void finish(const RowSoftmax& softmax, const Tile& tile, int row, float (&inverse)[2],
                                       const ForwardParams& params) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(softmax.sum[half]);
    inverse[half] = sum == 0.0f ? 0.0f : (DROPOUT ? params.dropout.scale : 1.0f) / sum;
    const int this_row = row + 8 * half;
    if (WRITE_LSE && this_row < row_limit(tile, params.seqlen_q) && threadIdx.x % 4 == 0) {
      const int64_t head = (int64_t)tile.batch * params.num_heads + tile.head;
      float* const logsumexp = params.logsumexp + head * params.seqlen_q + this_row;
      if constexpr (BIAS_BYTES > 0) {
        const float shift = softmax.shift[half], log_sum = __log2f(sum) * 0.6931471805599453f, high = shift + log_sum;
        logsumexp[0] = high;
        logsumexp[(int64_t)params.batch * params.num_heads * params.seqlen_q] =
            high == -INFINITY_F ? 0.0f : (shift - high) + log_sum;
      } else {
        // log2(sum) + shift is in base 2.
        logsumexp[0] = (__log2f(sum) + softmax.shift[half]) * 0.6931471805599453f;
      }
    }
  }
}

// Writes this warp's 16 rows into the place of its query rows, from where `store_tiles` sends them on.
__device__ __forceinline__ void stage_out(const float (&out)[HEAD_DIM_V / 2], const float (&inverse)[2],
                                          uint32_t address, int first_row) {
  const int lane = threadIdx.x % 32;
  const int row = first_row + lane % 16;  // matrices: rows 0 to 7 and 8 to 15, of two groups of 8 columns
#pragma unroll
  for (int group = 0; group < HEAD_DIM_V / 8; group += 2) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * (group + i / 2) + 2 * (i % 2);
      words[i] = at < HEAD_DIM_V / 2 ? pack(out[at] * inverse[i % 2], out[at + 1] * inverse[i % 2]) : 0;
    }
    store_matrices(chunk_address<BLOCK_M>(address, row, group + lane / 16), words);
  }
  store_fence();
}

// Writes the rows to global memory, 16 bytes per lane: a quad's four lanes exchange groups of 8 columns.
__device__ __forceinline__ void store_out(const float (&out)[HEAD_DIM_V / 2], const float (&inverse)[2],
                                          const Tile& tile, int row, const ForwardParams& params) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int this_row = row + 8 * half;
    uint8_t* base = (uint8_t*)params.out + 2 * (tile.batch * params.out_stride_batch +
                                                tile.head * params.out_stride_head + this_row * params.out_stride_row);
#pragma unroll
    for (int group = 0; group < HEAD_DIM_V / 8; group += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (group + i) + 2 * half;
        words[i] = group + i < HEAD_DIM_V / 8 ? pack(out[at] * inverse[half], out[at + 1] * inverse[half]) : 0;
      }
      quad_transpose(words, lane);
      const int column = 8 * (group + lane % 4);
      if (this_row < row_limit(tile, params.seqlen_q) && column < params.head_dim_v)
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(base + 2 * column), "r"(words[0]), "r"(words[1]),
                     "r"(words[2]), "r"(words[3])
                     : "memory");
    }
  }
}

// The first of this warp's 16 rows within the tile, and of the two that this thread holds. `share`: which 64 rows its
// warpgroup has, where that is not always the one of its own number.
__device__ __forceinline__ int row_of_warp(int share) {
  return ROTATE ? 64 * share + threadIdx.x % 128 / 32 * 16 : 16 * (threadIdx.x / 32 - 4);
}
__device__ __forceinline__ int row_of_thread(int share) {
  return row_of_warp(share) + threadIdx.x % 32 / 4;
}

__device__ __forceinline__ void consume(const ForwardParams& params, const Shared& shared, int warpgroup) {
  const float scale_log2 = params.softmax_scale_log2;
  Ring<Q_STAGES> q;
  Ring<STAGES> k;
#if BIAS_BYTES
  Ring<BIAS_STAGES> bias_ring;
#endif

  // Named barriers: of the turns at the matrix unit, which are passed around; of each warpgroup alone.
  constexpr int FIRST_TURN = 1, CLEARED = FIRST_TURN + CONSUMERS;
  const auto take_turn = [&] {
    if (PING_PONG) named_sync(FIRST_TURN + warpgroup, 256);
  };
  const auto pass_turn = [&] {
    if (PING_PONG) named_arrive(FIRST_TURN + (warpgroup + 1) % CONSUMERS, 256);
  };
  if (PING_PONG && warpgroup == CONSUMERS - 1) pass_turn();  // the first turn is warpgroup 0's

  float out[HEAD_DIM_V / 2] = {};
  float scores[BLOCK_N / 2];
  uint32_t probabilities[BLOCK_N / 4];
  RowSoftmax softmax;
  softmax.reset();
  uint32_t query;            // descriptor of this warpgroup's rows
  int j;                     // the current key tile; with a mask, how many full ones are left to visit
  int mixed_left;            // how many mixed ones are left, with a mask
  bool first_mixed;          // does the query tile begin with a mixed one?
  const uint8_t* mask_rows;  // the mask of the tile's batch and head
  int tile_row;              // first row of the tile, counted as its keys are
  bool accumulate = false;   // true once `out` holds a product of this query tile
  int share = warpgroup;     // which 64 rows of the tile are this warpgroup's
  uint32_t row_key = 0;      // dropout's, of both rows of this thread
  uint32_t
      bits[DROPOUT ? BLOCK_N / 4 : 1];  // likewise, of the current key tile: [2 g + e] of column 8 g + 2 (lane % 4) + e
#if PACKED
  int tile_keys = 0;  // how many keys the tile's sequence has
  const auto seqlen_k = [&] { return tile_keys; };
#else
  const auto seqlen_k = [&] { return params.seqlen_k; };
#endif

  // Reads the next query tile, and passes over key tiles that none of the warpgroup's rows sees.
  const auto begin_tile = [&] {
    barrier_wait(shared.q_full(q.stage), q.phase);
    const Tile tile = warp_read_tile(shared.tiles + q.stage * sizeof(Tile));
    if (MASKED) {
      if (tile.key_tiles == 0) return false;
      j = tile.key_tiles >> 16;
      mixed_left = (tile.key_tiles & 0xFFFF) - j;
      first_mixed = j == 0;
      if (first_mixed) --mixed_left;
      mask_rows = params.mask.mask + tile.batch * params.mask.stride_batch + tile.head * params.mask.stride_head;
    } else {
      j = tile.key_tiles - 1;
      if (j < 0) return false;
    }
#if PACKED
    tile_row = tile.first_row - tile.first_key;
    tile_keys = tile.seqlen_k;
#else
    tile_row = tile.first_row;
#endif
    // The lower rows of a causal tile see more keys: no warpgroup should have them always.
    if (ROTATE) share = share + 1 == CONSUMERS ? 0 : share + 1;
    if constexpr (DROPOUT) {
      // Rows past the end are not written.
      const int64_t head = (int64_t)tile.batch * params.num_heads + tile.head;
      const uint32_t* const row_keys = dropout_rows(params.dropout, head, params.seqlen_q, params.seqlen_k);
      row_key = __ldg(row_keys + min(tile_row + row_of_thread(share), params.seqlen_q - 1));
    }
    const int first_row = tile_row + 64 * share;
    query = descriptor(shared.query + q.stage * Q_BYTES + share * 64 * BOX_ROW_BYTES, 0);
    if (IS_CAUSAL) {
      for (; j >= ceil_div(min(seqlen_k(), first_row + 64), BLOCK_N) && !(PACKED && j == 0); --j) {
        barrier_wait(shared.k_full(k.stage), k.phase);
        warp_arrive(shared.k_empty(k.stage));
        barrier_wait(shared.v_full(k.stage), k.phase);
        warp_arrive(shared.v_empty(k.stage));
        k.advance();
        take_turn();
        pass_turn();
      }
    }
    return true;
  };
  const auto issue_scores = [&] {
    wgmma_fence();
    scores_product(scores, query, descriptor(shared.key + k.stage * K_BYTES, 0));
    wgmma_commit();
  };
  const auto issue_out = [&](int stage) {
    wgmma_fence();
    out_product(out, probabilities, descriptor(shared.value + stage * V_BYTES, BLOCK_N * BOX_ROW_BYTES), accumulate);
    wgmma_commit();
  };
  // The random bits of the key tile in the current stage, before that is released.
  const auto mix_bits = [&] {
    if constexpr (DROPOUT) {
      const uint32_t keys = shared.column_keys + k.stage * COLUMN_KEYS_BYTES + threadIdx.x % 4 * 8;
#pragma unroll
      for (int group = 0; group < BLOCK_N / 8; ++group) {
        const uint2 pair = read_two_words(keys + 32 * group);
        bits[2 * group] = dropout_bits(row_key, pair.x);
        bits[2 * group + 1] = dropout_bits(row_key, pair.y);
      }
    }
  };
  const auto pack_probabilities = [&] {
    if constexpr (DROPOUT) {
#pragma unroll
      for (int i = 0; i < BLOCK_N / 2; ++i) {
        const uint32_t word = bits[i / 4 * 2 + i % 2], threshold = params.dropout.threshold;
        const bool keeps = i / 2 % 2 ? keeps_second(word, threshold) : keeps_first(word, threshold);
        scores[i] = keeps ? scores[i] : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; ++i) probabilities[i] = pack(scores[2 * i], scores[2 * i + 1]);
  };
  const auto mask_scores = [&] {
    const int last = seqlen_k() - 1, row = tile_row + row_of_thread(share), first_key = j * BLOCK_N;
    mask(scores, (IS_CAUSAL ? min(last, row) : last) - first_key, (IS_CAUSAL ? min(last, row + 8) : last) - first_key,
         threadIdx.x % 4);
  };

  // The first key of the tile in the current stage.
  const auto first_key_of_stage = [&] { return uniform(read_word(shared.number(k.stage))) * BLOCK_N; };
  // What these rows see of the mixed key tile in the current stage. Begins the loads: best before a wait for products.
  const auto read_mask = [&] {
    const int first_key = first_key_of_stage();
    return Seen<BLOCK_N>(params.mask, mask_rows, tile_row + row_of_thread(share), first_key, params.seqlen_q,
                         params.seqlen_k);
  };

  // `Softmax::restart` of the scores of a tile without a mask.
  const auto restart = [&](float (&rescale)[2]) {
    if constexpr (BIAS_BYTES > 0) {
#pragma unroll
      for (int i = 0; i < BLOCK_N / 2; ++i) scores[i] *= params.softmax_scale;
      softmax.restart_natural(scores, rescale);
    } else {
      softmax.restart(scores, scale_log2, rescale);
    }
  };
  const auto rescale_out = [&](const float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM_V / 2; ++i) out[i] *= rescale[i / 2 % 2];
  };

  // One key tile that is not its query tile's first.
  const auto step = [&] {
    barrier_wait(shared.k_full(k.stage), k.phase);
    take_turn();
    issue_scores();
    const Ring<STAGES> v = k.previous();
    barrier_wait(shared.v_full(v.stage), v.phase);
    issue_out(v.stage);
    pass_turn();
    accumulate = true;
    mix_bits();
    wgmma_wait<1>();
    const float sum[2] = {softmax.sum[0], softmax.sum[1]};
    const bool serves = softmax.update(scores, scale_log2);
    wgmma_wait<0>();
    warp_arrive(shared.v_empty(v.stage));
    // With dropout that is much, and done once.
    if (!DROPOUT) pack_probabilities();
    if (__any_sync(0xFFFFFFFF, !serves)) {
      warp_scores(scores, shared.query + q.stage * Q_BYTES, row_of_warp(share), shared.key + k.stage * K_BYTES);
      float rescale[2];
      softmax.sum[0] = sum[0];
      softmax.sum[1] = sum[1];
      restart(rescale);
      rescale_out(rescale);
      if (!DROPOUT) pack_probabilities();
      __syncwarp();  // all lanes have read the keys
    }
    if (DROPOUT) pack_probabilities();
    warp_arrive(shared.k_empty(k.stage));
    k.advance();
  };
#if BIAS_BYTES
  const auto bias_tile = [&] { return shared.bias + bias_ring.stage * BIAS_TILE_BYTES; };
  const auto release_bias = [&] {
    warp_arrive(shared.bias_empty(bias_ring.stage));
    bias_ring.advance();
  };
  // The same for a mixed one with a float mask. Rows whose shifts may serve join them with the mask while the first
  // product runs; whether they do serve the sums tell, as in `step`. That includes a NaN: the mask may hide the key
  // that it comes from.
  const auto biased_step = [&] {
    barrier_wait(shared.k_full(k.stage), k.phase);
    take_turn();
    issue_scores();
    const Ring<STAGES> v = k.previous();
    barrier_wait(shared.v_full(v.stage), v.phase);
    issue_out(v.stage);
    pass_turn();
    accumulate = true;
    const int last_key = params.seqlen_k - 1 - first_key_of_stage();
    const bool ordinary = __all_sync(0xFFFFFFFF, softmax.ordinary());
    mix_bits();
    barrier_wait(shared.bias_full(bias_ring.stage), bias_ring.phase);
    const float subtract[2] = {softmax.shift[0] * LOG2E, softmax.shift[1] * LOG2E};
    float addends[BIAS_EARLY ? BLOCK_N / 2 : 1];
    if constexpr (BIAS_EARLY) {
      read_bias(bias_tile(), row_of_warp(share),
                [&](int i, float bias) { addends[i] = fmaf(bias, LOG2E, -subtract[i / 2 % 2]); });
    }
    wgmma_wait<1>();
    const float sum[2] = {softmax.sum[0], softmax.sum[1]};
    bool serves = false;
    if (ordinary) {
      if constexpr (BIAS_EARLY) {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) scores[i] = fmaf(scores[i], scale_log2, addends[i]);
      } else {
        read_bias(bias_tile(), row_of_warp(share), [&](int i, float bias) {
          scores[i] = fmaf(scores[i], scale_log2, fmaf(bias, LOG2E, -subtract[i / 2 % 2]));
        });
      }
      hide_past(scores, last_key);
      serves = softmax.update_shifted(scores);
    }
    wgmma_wait<0>();
    warp_arrive(shared.v_empty(v.stage));
    if (__any_sync(0xFFFFFFFF, !serves)) {
      if (ordinary)
        warp_scores(scores, shared.query + q.stage * Q_BYTES, row_of_warp(share), shared.key + k.stage * K_BYTES);
      float rescale[2];
      softmax.sum[0] = sum[0];
      softmax.sum[1] = sum[1];
      add_bias(scores, params.softmax_scale, bias_tile(), row_of_warp(share), last_key);
      softmax.restart_natural(scores, rescale);
      rescale_out(rescale);
    }
    pack_probabilities();
    warp_arrive_together(shared.k_empty(k.stage));  // all lanes have read keys and mask
    release_bias();
    k.advance();
  };
#else
  // The same for a mixed one with a bool mask. Rows may have seen no key before, or see none here, so that the maximum
  // is taken.
  const auto mixed_step = [&] {
    barrier_wait(shared.k_full(k.stage), k.phase);
    take_turn();
    issue_scores();
    const Ring<STAGES> v = k.previous();
    barrier_wait(shared.v_full(v.stage), v.phase);
    issue_out(v.stage);
    pass_turn();
    accumulate = true;
    const auto seen = read_mask();
    mix_bits();
    wgmma_wait<1>();
    warp_arrive(shared.k_empty(k.stage));
    k.advance();
    seen.hide(scores);
    float rescale[2];
    softmax.restart(scores, scale_log2, rescale);
    wgmma_wait<0>();
    warp_arrive(shared.v_empty(v.stage));
    if (__any_sync(0xFFFFFFFF, rescale[0] != 1.0f || rescale[1] != 1.0f)) rescale_out(rescale);
    pack_probabilities();
  };
#endif
  // Softmax of a query tile's first key tile, which `wait` waits for.
  const auto first_softmax = [&](auto wait) {
    mix_bits();
    if constexpr (BIAS_BYTES > 0) {
#if BIAS_BYTES
      float rescale[2];
      softmax.reset();
      if (first_mixed) {
        const int last_key = params.seqlen_k - 1 - first_key_of_stage();
        barrier_wait(shared.bias_full(bias_ring.stage), bias_ring.phase);
        wait();
        add_bias(scores, params.softmax_scale, bias_tile(), row_of_warp(share), last_key);
        softmax.restart_natural(scores, rescale);
        __syncwarp();
        release_bias();
      } else {
        wait();
        restart(rescale);
        --j;
      }
      warp_arrive(shared.k_empty(k.stage));
      k.advance();
      return;
#endif
    } else if constexpr (MASKED) {
      if (first_mixed) {
        const auto seen = read_mask();
        wait();
        seen.hide(scores);
      } else {
        wait();
        --j;
      }
      warp_arrive(shared.k_empty(k.stage));
      k.advance();
    } else {
      wait();
      warp_arrive(shared.k_empty(k.stage));
      k.advance();
      // Only this tile can hold keys that some rows see and others do not, or the end of the keys.
      if (IS_CAUSAL || (j + 1) * BLOCK_N > seqlen_k()) mask_scores();
    }
    float rescale[2];
    softmax.reset();
    softmax.restart(scores, scale_log2, rescale);
    if (PACKED && (j + 1) * BLOCK_N > seqlen_k()) {
      const Ring<STAGES> v = k.previous();
      barrier_wait(shared.v_full(v.stage), v.phase);
      clear_rows<BLOCK_N, HEAD_DIM_V>(shared.value + v.stage * V_BYTES, seqlen_k() - j * BLOCK_N, CLEARED + warpgroup);
    }
  };

  const auto send = [&](const float (&inverse)[2], int q_stage, const Tile& tile, int share) {
    // A row that sees no key is zeros, whatever the values in the tiles that other rows see.
    if ((MASKED || PACKED) && __any_sync(0xFFFFFFFF, inverse[0] == 0.0f || inverse[1] == 0.0f)) {
#pragma unroll
      for (int i = 0; i < HEAD_DIM_V / 2; ++i) out[i] = inverse[i / 2 % 2] == 0.0f ? 0.0f : out[i];
    }
    if constexpr (STAGE_OUT) {
      if (row_limit(tile, tile.first_row + BLOCK_M) == tile.first_row + BLOCK_M)
        stage_out(out, inverse, shared.query + q_stage * Q_BYTES, row_of_warp(share));
      else
        store_out(out, inverse, tile, tile.first_row + row_of_thread(share), params);
      warp_arrive_together(shared.out_full(q_stage));
      warp_arrive(shared.q_empty(q_stage));
    } else {
      store_out(out, inverse, tile, tile.first_row + row_of_thread(share), params);
    }
  };

  if (!begin_tile()) return;
  barrier_wait(shared.k_full(k.stage), k.phase);
  issue_scores();
  first_softmax([] { wgmma_wait<0>(); });
  pack_probabilities();
  for (;;) {
    if constexpr (MASKED) {
      for (; j > 0; --j) step();
#if BIAS_BYTES
      for (; mixed_left > 0; --mixed_left) biased_step();
#else
      for (; mixed_left > 0; --mixed_left) mixed_step();
#endif
    } else {
      for (--j; j >= 0; --j) step();
    }

    // The last product of this query tile runs beside the first one of the next.
    const Tile tile = warp_read_tile(shared.tiles + q.stage * sizeof(Tile));
    float inverse[2];
    finish(softmax, tile, tile.first_row + row_of_thread(share), inverse, params);
    const Ring<STAGES> v = k.previous();
    const int q_stage = q.stage, finished_share = share;
    if (!STAGE_OUT) warp_arrive(shared.q_empty(q.stage));
    q.advance();
    const bool more = begin_tile();
    if (!more) {
      barrier_wait(shared.v_full(v.stage), v.phase);
      issue_out(v.stage);
      wgmma_wait<0>();
      send(inverse, q_stage, tile, finished_share);
      return;
    }
    barrier_wait(shared.k_full(k.stage), k.phase);
    issue_scores();
    barrier_wait(shared.v_full(v.stage), v.phase);
    issue_out(v.stage);
    accumulate = false;
    first_softmax([] { wgmma_wait<1>(); });
    wgmma_wait<0>();
    warp_arrive(shared.v_empty(v.stage));
    send(inverse, q_stage, tile, finished_share);
    pack_probabilities();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_forward(const __grid_constant__ TensorMap query_map,
                                                                       const __grid_constant__ TensorMap key_map,
                                                                       const __grid_constant__ TensorMap value_map,
                                                                       const __grid_constant__ TensorMap out_map,
#if BIAS_BYTES
                                                                       const __grid_constant__ TensorMap bias_map,
#endif
                                                                       const __grid_constant__ ForwardParams params) {
#if !BIAS_BYTES
  const TensorMap& bias_map = query_map;  // unused
#endif
  const Shared shared(tile_memory());
  if (threadIdx.x == 0) {
    prefetch_maps(query_map, key_map, value_map, out_map);
    // Stages are filled by one arrival and the copy's bytes, and emptied by one arrival of each consumer warp.
    for (int stage = 0; stage < Q_STAGES; ++stage) {
      barrier_init(shared.q_full(stage), 1);
      barrier_init(shared.q_empty(stage), 4 * CONSUMERS * WARP_ARRIVALS + STAGE_OUT);  // and one of the storing warp
      barrier_init(shared.out_full(stage), 4 * CONSUMERS * WARP_ARRIVALS);
    }
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(shared.k_full(stage), DROPOUT ? 2 : 1);
      barrier_init(shared.k_empty(stage), 4 * CONSUMERS * WARP_ARRIVALS);
      barrier_init(shared.v_full(stage), 1);
      barrier_init(shared.v_empty(stage), 4 * CONSUMERS * WARP_ARRIVALS);
    }
    for (int stage = 0; BIAS_BYTES && stage < BIAS_STAGES; ++stage) {
      barrier_init(shared.bias_full(stage), 1);
      barrier_init(shared.bias_empty(stage), 4 * CONSUMERS * WARP_ARRIVALS);
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    registers_release<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) produce(query_map, key_map, value_map, bias_map, params, shared);
    if (STAGE_OUT && threadIdx.x == 32) store_tiles(out_map, shared);
  } else {
    registers_claim<CONSUMER_REGISTERS>();
    consume(params, shared, uniform(threadIdx.x / 128) - 1);
  }
}

#if DROPOUT
extern "C" __global__ void
    __launch_bounds__(DROPOUT_PITCH) flash_dropout_keys(const __grid_constant__ DropoutKeysParams params) {
  write_dropout_keys(params);
}
#endif
