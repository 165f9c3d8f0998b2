// What the backward kernels for small and large head dimensions share: parameters, the order of the work, pieces of its
// steps, and the small kernels that run before and after (backward.cu describes them all).
#pragma once
#include "barrier.cuh"
#include "cluster.cuh"
#include "dropout.cuh"
#include "softmax.cuh"
#include "wgmma.cuh"
#include "wgmma_instructions.cuh"

// Where the lists of a mask lie (backward_mask.cuh): of each plane of the mask and tile of keys, which query tiles to
// visit, and the bits of mixed ones.
struct QueryMask {
  const uint32_t* bits;
  const int* lists;
  int plane_stride_batch, plane_stride_head;  // in planes, 0 where the mask is broadcast
  int q_tiles;                                // that have bits of their own: all, or one for all
  int unused;
};

// Mirrored by backward.py.
struct BackwardParams {
  const void* out;         // [batch, num_heads, seqlen_q, head_dim_v], last stride 1
  const void* grad_out;    // the same shape
  const float* logsumexp;  // [batch, num_heads, logsumexp_pitch], natural logarithm
  void* grad_query;        // [batch, num_heads, seqlen_q, head_dim], last stride 1
  float* statistics;       // [batch * num_heads * q_tiles, STATISTICS, BLOCK_M], but see `statistics_of`
  float* sums;             // [slots, query tiles of a key head, BLOCK_M * HEAD_DIM], in the order of `Piece`
  int* semaphores;         // IN_ORDER: [batch * num_heads * q_tiles, SEMAPHORES], who has added so far
  int* counters;           // IN_ORDER, PERSISTENT or FUSED: items begun, blocks done; all zero between launches
  int64_t out_stride_batch, out_stride_head, out_stride_row;  // elements
  int64_t grad_out_stride_batch, grad_out_stride_head, grad_out_stride_row;
  int64_t grad_query_stride_batch, grad_query_stride_head, grad_query_stride_row;
  int batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v, logsumexp_pitch;
  int q_tiles, k_tiles, heads_per_group;
  int chunks, chunk_tiles;  // FUSED: parts of a key head's query tiles, and how many tiles one has
  int slots;                // FUSED: key heads that have sums at a time; else there are sums for all
  float softmax_scale, softmax_scale_log2;
  QueryMask mask;         // MASKED
  DropoutParams dropout;  // DROPOUT; softmax_scale, by which gradients are multiplied at last, has its scale in it
  float kept;             // 1 - dropout_p
  int unused;
  const float* logsumexp_low;  // FLOAT_MASK: what rounding cut off `logsumexp`
  float* delta;                // FLOAT_MASK: as `logsumexp`, written for the mask's gradient; null where nobody asks
  // Of packed sequences (PACKED), one batch: the list of query tiles (q_slots) and then of tiles of keys (k_tiles), two
  // int4 for each (varlen_schedule.py); q_tiles is how many query tiles of a head the workspace has room for.
  const int4* entries;
  void* grad_key;    // [num_kv_heads, total keys, head_dim], last stride 1
  void* grad_value;  // [num_kv_heads, total keys, head_dim_v]
  int64_t grad_key_stride_head, grad_key_stride_row, grad_value_stride_head, grad_value_stride_row;
  int q_slots;
};

constexpr int CONSUMERS = BLOCK_N / 64;
constexpr int BLOCKS_OF_CLUSTER = PAIRED ? 2 : 1;
// Whether blocks wait for one another: those waited for have lower numbers, which must have begun.
constexpr bool IN_ORDER = DETERMINISTIC;
constexpr int SEMAPHORES = CONSUMERS * BLOCKS_OF_CLUSTER;  // of a query tile
static_assert(!FUSED || (!IN_ORDER && !MASKED && !DROPOUT && !PACKED));
static_assert(!PAIRED || (!MASKED && !DROPOUT && !PACKED));
constexpr int PREPARE_THREADS = 256;
// DIRECT: of a causal call, the first query tiles of a head see the first tile of keys alone. Its block writes their
// gradients itself: they have no sums, which nobody has to clear, add to and finish.
constexpr int DIRECT_TILES = DIRECT ? BLOCK_N / BLOCK_M : 0;
static_assert(!DIRECT || (IS_CAUSAL && !IN_ORDER && !FUSED && !MASKED && !DROPOUT && !PACKED));

// A consumer does a query tile in parts, which bounds its registers.
constexpr int PARTS = BLOCK_M / STEP_M;
static_assert(BLOCK_M % STEP_M == 0 && STEP_M % 16 == 0);
#if MASKED
#include "backward_mask.cuh"
#endif
static_assert(!FLOAT_MASK || (MASKED && !DROPOUT && !PERSISTENT && !DETERMINISTIC));
#if DROPOUT
static_assert(!DELTA_FIRST, "dP is dropped before delta is subtracted");
static_assert(STEP_M == 64, "a word says which of a thread's scores stay");
#endif

constexpr int BOXES = ceil_div(HEAD_DIM, BOX_COLUMNS);
constexpr int Q_BYTES = BLOCK_M * round_up(HEAD_DIM, BOX_COLUMNS) * 2;
constexpr int DO_BYTES = BLOCK_M * round_up(HEAD_DIM_V, BOX_COLUMNS) * 2;
constexpr int K_BYTES = BLOCK_N * round_up(HEAD_DIM, BOX_COLUMNS) * 2;
constexpr int V_BYTES = BLOCK_N * round_up(HEAD_DIM_V, BOX_COLUMNS) * 2;
constexpr int DS_BYTES = BLOCK_M * BLOCK_N * 2;
// Logsumexp in base 2 and -delta of each query; with DROPOUT its random key; with FLOAT_MASK the logsumexp once more,
// in natural units, and what that lacks, in base 2.
constexpr int STATISTICS = 2 + DROPOUT + 2 * FLOAT_MASK;
constexpr int STATISTICS_BYTES = STATISTICS * BLOCK_M * 4;

// How the warpgroups share a tile of grad_query: 64 rows each where there are so many, else whole boxes of columns.
constexpr bool SPLIT_ROWS = BLOCK_M == 64 * CONSUMERS;
constexpr int PIECE_COLUMNS = SPLIT_ROWS ? HEAD_DIM : BOXES / CONSUMERS * BOX_COLUMNS;
static_assert(SPLIT_ROWS || (BLOCK_M == 64 && BOXES % CONSUMERS == 0), "grad_query cannot be shared out");

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

// What a block does: one tile of keys, and the query tiles from the last down to the first that sees any of them.
struct Work {
  int k_tile, kv_head, batch, first_q_tile;
  int sums_shift;  // a query tile's number in the workspace less that of its sums
#if PACKED
  // The sequence's first row of queries and of keys, how many there are, and its first query tile in the workspace.
  int first_row, seqlen_q, first_key, seqlen_k, workspace_tile;
  __device__ __forceinline__ int q_tiles(const BackwardParams& params) const { return ceil_div(seqlen_q, BLOCK_M); }
  __device__ __forceinline__ int queries(const BackwardParams& params) const { return seqlen_q; }
  __device__ __forceinline__ int keys(const BackwardParams& params) const { return seqlen_k; }
  __device__ __forceinline__ int query_row() const { return first_row; }
  __device__ __forceinline__ int key_row() const { return first_key; }
  __device__ __forceinline__ int first_tile() const { return workspace_tile; }
#else
  __device__ __forceinline__ int q_tiles(const BackwardParams& params) const { return params.q_tiles; }
  __device__ __forceinline__ int queries(const BackwardParams& params) const { return params.seqlen_q; }
  __device__ __forceinline__ int keys(const BackwardParams& params) const { return params.seqlen_k; }
  __device__ __forceinline__ int query_row() const { return 0; }
  __device__ __forceinline__ int key_row() const { return 0; }
  __device__ __forceinline__ int first_tile() const { return 0; }
#endif
  __device__ __forceinline__ int tiles(const BackwardParams& params) const {
    return max(q_tiles(params) - first_q_tile, 0);
  }
};

// What there is to do: tiles of keys and, FUSED, what comes before and after them (backward_items.cuh).
enum Kind { PREPARE, COMPUTE, FINISH };
struct Item {
  int kind, head, index;  // head: key heads counted over the batch; index: a tile of keys, or a chunk of query tiles
};

// The sums of a key head lie in slot `head` % slots.
__device__ __forceinline__ int sums_shift(int head, const BackwardParams& params) {
  return head / params.slots * params.slots * (params.num_heads / params.num_kv_heads * params.q_tiles);
}

// This block's number of the two that are PAIRED.
__device__ __forceinline__ int rank_in_pair() {
  return PAIRED ? cluster_rank() : 0;
}

__device__ __forceinline__ Work work_of(const Item& item, const BackwardParams& params) {
  Work work;
  work.k_tile = item.index * BLOCKS_OF_CLUSTER + rank_in_pair();
  work.batch = item.head / params.num_kv_heads;
  work.kv_head = item.head % params.num_kv_heads;
  work.sums_shift = FUSED ? sums_shift(item.head, params) : 0;
#if PACKED
  const int4 first = params.entries[2 * (params.q_slots + work.k_tile)];
  const int4 second = params.entries[2 * (params.q_slots + work.k_tile) + 1];
  work.k_tile = first.x;
  work.first_row = first.y;
  work.seqlen_q = first.z;
  work.first_key = first.w;
  work.seqlen_k = second.y;  // in memory: nobody sees those past the last sequence, but their gradients are zeros
  work.workspace_tile = second.w / BLOCK_M;
  work.first_q_tile = IS_CAUSAL ? work.k_tile * BLOCK_N / BLOCK_M : 0;
#else
  // The blocks of a cluster visit the same tiles.
  work.first_q_tile = IS_CAUSAL ? item.index * BLOCKS_OF_CLUSTER * BLOCK_N / BLOCK_M : 0;
#endif
  return work;
}

#include "backward_items.cuh"

// A query tile of one head: its rows in the tensors, of which the first `seqlen_q - first_row` are its own, and its
// number in the workspace.
struct QueryTile {
  int64_t number;
  int batch, head, origin, first_row, seqlen_q;  // row i of the tile is origin + first_row + i in the tensors
  bool sees_keys;                                // if not, it has no place in the workspace
};
// One for each block of the kernels that prepare and finish; of packed sequences some have no rows.
__device__ __forceinline__ QueryTile query_tile_at(int block, const BackwardParams& params) {
  QueryTile tile;
#if PACKED
  const int slot = block % params.q_slots;
  const int4 first = params.entries[2 * slot], second = params.entries[2 * slot + 1];
  tile.batch = 0;
  tile.head = block / params.q_slots;
  tile.origin = first.y;
  tile.first_row = first.x * BLOCK_M;
  tile.seqlen_q = first.z;
  tile.number = (int64_t)tile.head * params.q_tiles + second.w / BLOCK_M + first.x;
  tile.sees_keys = second.x > 0;
#else
  tile.number = block;
  tile.batch = block / params.q_tiles / params.num_heads;
  tile.head = block / params.q_tiles % params.num_heads;
  tile.origin = 0;
  tile.first_row = block % params.q_tiles * BLOCK_M;
  tile.seqlen_q = params.seqlen_q;
  tile.sees_keys = true;
#endif
  return tile;
}

// The statistics of a query tile, `tile` of its head and `number` in the workspace. DIRECT: those of a head lie where
// the sums of its first tiles would, since the query's gradient, where the host would put them, is written meanwhile.
__device__ __forceinline__ float* statistics_of(int64_t number, int tile, const BackwardParams& params) {
  if (DIRECT) return params.statistics + (number - tile) * (BLOCK_M * HEAD_DIM) + tile * (STATISTICS * BLOCK_M);
  return params.statistics + number * (STATISTICS * BLOCK_M);
}

// Causal: the first keys, which most queries see, come first, of a group of heads whose queries stay in L2 together.
// Masked: the same, since masks of models are causal more often than not.
// Deterministic: the same, since blocks of one head wait for one another: so those that begin together are of many.
__device__ __forceinline__ Item item_at(int number, const BackwardParams& params) {
  if (FUSED) return fused_item_at(number, params);
  if (IS_CAUSAL || DETERMINISTIC || MASKED || PACKED) {
    const int group_items = params.heads_per_group * params.k_tiles;
    const int first = number / group_items * params.heads_per_group, within = number % group_items;
    const int heads = min(params.heads_per_group, params.batch * params.num_kv_heads - first);
    return {COMPUTE, first + within % heads, within / heads};
  }
  return {COMPUTE, number / params.k_tiles, number % params.k_tiles};
}

// Which number a block has: its own, or the next that nobody has taken, so that all lower ones have begun. Thread 0
// takes it into shared memory; after a barrier, all ask for it.
constexpr bool TICKETS = IN_ORDER || FUSED;
__device__ __forceinline__ void take_ticket(uint32_t ticket, const BackwardParams& params) {
  if (TICKETS && rank_in_pair() == 0) write_word(ticket, atomicAdd(params.counters, 1));
}
__device__ __forceinline__ int block_number(uint32_t ticket, const BackwardParams& params) {
  if (!TICKETS) return blockIdx.x / BLOCKS_OF_CLUSTER;
  // The last block to get here leaves the counters as it found them: all have taken their numbers.
  if (threadIdx.x == 0 && atomicAdd(params.counters + 1, 1) == gridDim.x - 1) {
    params.counters[0] = 0;
    params.counters[1] = 0;
  }
  return uniform(PAIRED ? read_word_remote(map_to_rank(ticket, 0)) : read_word(ticket));
}

#if MASKED
// Of one query head and the block's keys: which list of the mask, and the list.
__device__ __forceinline__ int list_number(const Work& work, int head, const BackwardParams& params) {
  const int plane = work.batch * params.mask.plane_stride_batch + head * params.mask.plane_stride_head;
  return plane * params.k_tiles + work.k_tile;
}
__device__ __forceinline__ const int* query_list(const Work& work, int head, const BackwardParams& params) {
  return params.mask.lists + (int64_t)list_number(work, head, params) * (2 + params.q_tiles);
}
#endif

// Calls `visit(query head, query tile, the tile's number in the workspace, its entry in a mask's list or 0)` for all
// that a block works on, in order.
template <class Visit>
__device__ __forceinline__ void for_each_tile(const Work& work, const BackwardParams& params, const Visit& visit) {
  const int group = params.num_heads / params.num_kv_heads;
#pragma unroll 1
  for (int head = work.kv_head * group; head < (work.kv_head + 1) * group; ++head) {
    const int first = (work.batch * params.num_heads + head) * params.q_tiles + work.first_tile();
#if MASKED
    const int* list = query_list(work, head, params) + 1;
#pragma unroll 1
    for (int entry; (entry = *list) != LIST_END; ++list)
      visit(head, entry_tile(entry), first + entry_tile(entry), entry);
#else
#pragma unroll 1
    for (int number = first + work.q_tiles(params) - 1; number >= first + work.first_q_tile; --number)
      visit(head, number - first, number, 0);
#endif
  }
}

// How many tiles a block works on, those of all query heads of the group together.
__device__ __forceinline__ int count_tiles(const Work& work, const BackwardParams& params) {
  const int group = params.num_heads / params.num_kv_heads;
#if MASKED
  int count = 0;
#pragma unroll 1
  for (int head = work.kv_head * group; head < (work.kv_head + 1) * group; ++head)
    count += *query_list(work, head, params);
  return count;
#else
  return work.tiles(params) * group;
#endif
}

#if MASKED
// The loading thread: of which kind a query tile is, and its bits if it has some, on their way to the consumers beside
// the queries of the same stage, before which it must be called.
template <class Shared>
__device__ __forceinline__ void load_mask(const Work& work, int head, int entry, int stage,
                                          const BackwardParams& params, const Shared& shared) {
  write_word(shared.kind(stage), entry_kind(entry));
  if (entry_kind(entry) == BITS) {
    const int tile = params.mask.q_tiles == 1 ? 0 : entry_tile(entry);
    const int64_t number = (int64_t)list_number(work, head, params) * params.mask.q_tiles + tile;
    load_bytes<MASK_BYTES>(params.mask.bits + number * MASK_WORDS, shared.mask_bits + stage * MASK_BYTES,
                           shared.q_full(stage));
  } else {
    barrier_arrive(shared.q_full(stage));
  }
}
#endif

// Two statistics of neighbouring queries.
__device__ __forceinline__ float2 read_pair(uint32_t address) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address));
  return pair;
}

#if DROPOUT
// The random keys of this thread's two keys, `key` and `key` + 8, for a query head counted over the batch.
__device__ __forceinline__ uint2 column_keys(int head, int key, const BackwardParams& params) {
  const uint32_t* keys = dropout_columns(params.dropout, head, params.seqlen_q, params.seqlen_k) + key;
  return make_uint2(__ldg(keys), __ldg(keys + 8));
}

// A bit for each of this thread's scores of a part: those that stay. `rows`: where the random keys of the part's
// queries begin in shared memory.
__device__ __forceinline__ uint32_t kept_scores(uint32_t rows, const uint2& of_keys, uint32_t threshold,
                                                int quad_lane) {
  const uint32_t columns[2] = {of_keys.x, of_keys.y};
  uint32_t kept = 0;
#pragma unroll
  for (int pair = 0; pair < STEP_M / 16; ++pair) {
    // Queries 16 pair + 2 quad_lane + e, whose scores are those of group 2 pair, and 8 further on, of the next one.
    const float2 of_queries = read_pair(rows + (16 * pair + 2 * quad_lane) * 4);
    const uint32_t row_keys[2] = {__float_as_uint(of_queries.x), __float_as_uint(of_queries.y)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t bits = dropout_bits(row_keys[i % 2], columns[i / 2]);
      if (keeps_first(bits, threshold)) kept |= 1u << (8 * pair + i);
      if (keeps_second(bits, threshold)) kept |= 1u << (8 * pair + 4 + i);
    }
  }
  return kept;
}
#endif

#if FLOAT_MASK
#include "backward_bias.cuh"
#endif

// The loading warp. Shared: where the kernel keeps its tiles and barriers.
template <class Shared>
__device__ __forceinline__ void produce(const TensorMap& query_map, const TensorMap& key_map,
                                        const TensorMap& value_map, const TensorMap& grad_out_map, const Work& work,
                                        const BackwardParams& params, const Shared& shared) {
  Ring<Q_STAGES> q;
  Ring<DO_STAGES> d;
  bool first = true;
  for_each_tile(work, params, [&](int head, int tile, int number, [[maybe_unused]] int entry) {
    // In the order in which the consumers need them.
    if (first)
      load_rows<BLOCK_N, HEAD_DIM>(key_map, shared.key, shared.k_full(), work.key_row() + work.k_tile * BLOCK_N,
                                   work.kv_head, work.batch);
    if (FUSED && first) wait_until_prepared(work, params);
    barrier_wait(shared.q_empty(q.stage), q.phase ^ 1);
#if MASKED
    load_mask(work, head, entry, q.stage, params, shared);
#endif
#if DROPOUT
    write_word(shared.head(q.stage), work.batch * params.num_heads + head);
#endif
    load_rows<BLOCK_M, HEAD_DIM>(query_map, shared.query + q.stage * Q_BYTES, shared.q_full(q.stage),
                                 work.query_row() + tile * BLOCK_M, head, work.batch);
    load_bytes<STATISTICS_BYTES>(statistics_of(number, tile, params), shared.statistics + q.stage * STATISTICS_BYTES,
                                 shared.q_full(q.stage));
    q.advance();
    if (first)
      load_rows<BLOCK_N, HEAD_DIM_V>(value_map, shared.value, shared.v_full(), work.key_row() + work.k_tile * BLOCK_N,
                                     work.kv_head, work.batch);
    first = false;
    barrier_wait(shared.do_empty(d.stage), d.phase ^ 1);
    load_rows<BLOCK_M, HEAD_DIM_V>(grad_out_map, shared.grad_out + d.stage * DO_BYTES, shared.do_full(d.stage),
                                   work.query_row() + tile * BLOCK_M, head, work.batch);
    d.advance();
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
  __device__ __forceinline__ void multiply(float (&result)[STEP_M / 2], uint32_t rows, bool accumulate = false) const {
    multiply_part<0, COLUMNS>(result, rows, accumulate);
  }
  // The same of columns FIRST to END, the first of which `rows` begins with; adds unless FIRST is 0.
  template <int FIRST, int END>
  __device__ __forceinline__ void multiply_part(float (&result)[STEP_M / 2], uint32_t rows,
                                                bool accumulate = false) const {
#pragma unroll
    for (int k = FIRST / 16; k < END / 16; ++k) {
      const uint32_t right = moved(rows, column_group<BLOCK_M>(k - FIRST / 16));
      if constexpr (KEYS_IN_REGISTERS)
        Wgmma<STEP_M>::rs_rows(result, words + 4 * k, right, accumulate || k > 0);
      else
        Wgmma<STEP_M>::ss(result, moved(tile, column_group<BLOCK_N>(k)), right, accumulate || k > 0);
    }
  }
};
// sums[64 keys, COLUMNS] += packed[64 keys, STEP_M queries] rows[STEP_M, COLUMNS], the rows in a tile of BLOCK_M, at
// most 128 columns at a time: a block of 512 threads has no registers for the operands of a wider instruction.
template <int COLUMNS>
__device__ __forceinline__ void accumulate_product(float (&sums)[COLUMNS / 2], const uint32_t (&packed)[STEP_M / 4],
                                                   uint32_t rows) {
  constexpr int NOW = COLUMNS < 128 ? COLUMNS : 128;
  float (&first)[NOW / 2] = *reinterpret_cast<float (*)[NOW / 2]>(sums);
  const uint32_t address = descriptor(rows, BLOCK_M * BOX_ROW_BYTES);
#pragma unroll
  for (int k = 0; k < STEP_M / 16; ++k)
    Wgmma<NOW>::rs(first, packed + 4 * k, moved(address, k * 16 * BOX_ROW_BYTES), true);
  if constexpr (COLUMNS > NOW) {
    float (&others)[(COLUMNS - NOW) / 2] = *reinterpret_cast<float (*)[(COLUMNS - NOW) / 2]>(sums + NOW / 2);
    accumulate_product<COLUMNS - NOW>(others, packed, rows + NOW / BOX_COLUMNS * BLOCK_M * BOX_ROW_BYTES);
  }
}
__device__ __forceinline__ void pack_all(uint32_t (&packed)[STEP_M / 4], const float (&x)[STEP_M / 2]) {
#pragma unroll
  for (int i = 0; i < STEP_M / 4; ++i) packed[i] = pack(x[2 * i], x[2 * i + 1]);
}
// Of those whose bit in `kept` is set, 0 in the place of the others.
__device__ __forceinline__ void pack_some(uint32_t (&packed)[STEP_M / 4], const float (&x)[STEP_M / 2], uint32_t kept) {
#pragma unroll
  for (int i = 0; i < STEP_M / 4; ++i)
    packed[i] = pack(kept & 1u << 2 * i ? x[2 * i] : 0.0f, kept & 2u << 2 * i ? x[2 * i + 1] : 0.0f);
}
// Leaves those whose bit in `kept` is set; the others become `other`, whatever they are.
__device__ __forceinline__ void keep_some(float (&x)[STEP_M / 2], uint32_t kept, float other) {
#pragma unroll
  for (int i = 0; i < STEP_M / 2; ++i) x[i] = kept & 1u << i ? x[i] : other;
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

// Copies the first rows of a tile of grad_key or grad_value to global memory, by all consumers.
template <int COLUMNS>
__device__ __forceinline__ void store_some_rows(uint8_t* destination, int64_t stride_row, uint32_t tile, int rows,
                                                int columns) {
  constexpr int CHUNKS = COLUMNS / 8;
  for (int i = threadIdx.x - 128; i < rows * CHUNKS; i += 128 * CONSUMERS) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    if (8 * chunk >= columns) continue;
    const float4 x = read_four(chunk_address<BLOCK_N>(tile, row, chunk));
    *(float4*)(destination + 2 * (row * stride_row + 8 * chunk)) = x;
  }
}

// Hides keys from queries, in scores of STEP_M queries from `first_row` on: later ones of a causal call, and those past
// the end, which would only add zeros, but exp2 of their scores may be infinite. This thread's keys are `key`, `key`
// + 8.
__device__ __forceinline__ void mask_keys(float (&scores)[STEP_M / 2], int key, int first_row, int seqlen_k) {
  const int hidden = STEP_M + 1;
  const int first_0 = IS_CAUSAL ? key - first_row : 0, first_1 = IS_CAUSAL ? first_0 + 8 : 0;
  mask_columns(scores, key < seqlen_k ? first_0 : hidden, key + 8 < seqlen_k ? first_1 : hidden, threadIdx.x % 4);
}

template <bool VALUE>
struct Flag {
  static constexpr bool value = VALUE;
};

#if DROPOUT
extern "C" __global__ void
    __launch_bounds__(DROPOUT_PITCH) flash_dropout_keys(const __grid_constant__ DropoutKeysParams params) {
  write_dropout_keys(params);
}
#endif

// The statistics of a query tile, and zeros for its sums, by THREADS threads of which this is `thread`. Eight lanes
// share a row.
template <int THREADS>
__device__ __forceinline__ void prepare_tile(const QueryTile& tile, int sums_shift, int thread,
                                             const BackwardParams& params) {
  const auto [number, batch, head, origin, first_row, seqlen_q, sees_keys] = tile;
  const uint8_t* out =
      (const uint8_t*)params.out +
      2 * (batch * params.out_stride_batch + head * params.out_stride_head + origin * params.out_stride_row);
  const uint8_t* grad_out =
      (const uint8_t*)params.grad_out + 2 * (batch * params.grad_out_stride_batch + head * params.grad_out_stride_head +
                                             origin * params.grad_out_stride_row);
  const float* logsumexp =
      params.logsumexp + ((int64_t)batch * params.num_heads + head) * params.logsumexp_pitch + origin;
  float* statistics = statistics_of(number, first_row / BLOCK_M, params);
  const int lane = thread % 8;
  // Of this thread. Some rows at a time are loaded before any is summed up, as many as there are registers for.
  constexpr int ROWS = BLOCK_M / (THREADS / 8), COLUMNS = ceil_div(HEAD_DIM_V, 64);
  constexpr int MOST = COLUMNS == 1 ? 8 : COLUMNS == 2 ? 4 : 2, AT_ONCE = ROWS < MOST ? ROWS : MOST;
  static_assert(ROWS % AT_ONCE == 0);
#pragma unroll
  for (int begin = 0; begin < ROWS; begin += AT_ONCE) {
    uint4 left[AT_ONCE][COLUMNS], right[AT_ONCE][COLUMNS];
    float base_e[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int64_t row = first_row + (begin + i) * (THREADS / 8) + thread / 8;
      const bool inside = row < seqlen_q;
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        const int column = 8 * lane + 64 * j;
        const bool wanted = inside && column < params.head_dim_v;
        left[i][j] = load_eight_if(wanted, out + 2 * (row * params.out_stride_row + column));
        right[i][j] = load_eight_if(wanted, grad_out + 2 * (row * params.grad_out_stride_row + column));
      }
      // Rows past the end have probability zero everywhere.
      base_e[i] = load_float_if(inside && lane == 0, logsumexp + row, INFINITY_F);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      float delta = 0.0f;
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) delta += dot(left[i][j], right[i][j]);
      delta += __shfl_xor_sync(0xFFFFFFFF, delta, 4);
      delta = quad_sum(delta);
      if (lane == 0) {
        const int row = (begin + i) * (THREADS / 8) + thread / 8;
        float high = base_e[i] * 1.4426950408889634f;
        if (MASKED && high == -INFINITY_F) high = INFINITY_F;  // so have those that see no key
#if FLOAT_MASK
        const int64_t at = logsumexp - params.logsumexp + first_row + row;
        const float natural = base_e[i] == -INFINITY_F ? INFINITY_F : base_e[i];
        const float low = natural == INFINITY_F ? 0.0f : params.logsumexp_low[at] * LOG2E;
        // Where it is of the lowest number, which is -infinity in base 2, only keys that numbers are added to are seen.
        high = fmaf(natural, LOG2E, low);
        if (high < -3e38f) high = -3e38f;
        statistics[2 * BLOCK_M + row] = natural;
        statistics[3 * BLOCK_M + row] = low;
        if (params.delta != nullptr && first_row + row < seqlen_q) params.delta[at] = delta;
#endif
        statistics[row] = high;
#if DROPOUT
        // Of dP without the scale of what stays, by which dS is multiplied at last.
        delta *= params.kept;
#endif
        statistics[BLOCK_M + row] = -delta;
#if DROPOUT
        // The table has as many rows as all tiles together.
        const uint32_t* keys =
            dropout_rows(params.dropout, batch * params.num_heads + head, params.seqlen_q, params.seqlen_k);
        statistics[2 * BLOCK_M + row] = __uint_as_float(keys[first_row + row]);
#endif
      }
    }
  }
  if (DIRECT && first_row < DIRECT_TILES * BLOCK_M) return;
  float4* sums = (float4*)(params.sums + (number - sums_shift) * (BLOCK_M * HEAD_DIM));
#pragma unroll
  for (int i = 0; i < BLOCK_M * HEAD_DIM / 4 / THREADS; ++i)
    sums[i * THREADS + thread] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// The query's gradient is finished in parts: 8 groups of columns of a piece. They are numbered over all query tiles.
constexpr int PARTS_OF_PIECE = ceil_div(PIECE_COLUMNS, 64);
constexpr int PARTS_OF_TILE = CONSUMERS * PARTS_OF_PIECE;

// A part of the sums; threads of a warpgroup hold what they held in the main kernel.
struct FinishedPart {
  float4 x[8];

  static __device__ __forceinline__ Piece piece_of(int part) { return Piece(part % PARTS_OF_TILE / PARTS_OF_PIECE); }
  static __device__ __forceinline__ int first_group(int part) { return part % PARTS_OF_PIECE * 8; }

  __device__ __forceinline__ void load(int part, int sums_shift, int thread, const BackwardParams& params) {
    const Piece piece = piece_of(part);
    const QueryTile tile = query_tile_at(part / PARTS_OF_TILE, params);
    const float* sums = params.sums + (tile.number - sums_shift) * (BLOCK_M * HEAD_DIM) + piece.offset +
                        first_group(part) * 128 * 4 + thread * 4;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (PACKED && !tile.sees_keys)
        x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      else if (first_group(part) + i < piece.groups)
        x[i] = load_four(sums + i * 128 * 4);
  }
  __device__ __forceinline__ void store(int part, int thread, const BackwardParams& params) const {
    store(query_tile_at(part / PARTS_OF_TILE, params), piece_of(part), first_group(part), thread, params);
  }
  // Scaled and rounded, into grad_query.
  __device__ __forceinline__ void store(const QueryTile& tile, const Piece& piece, int first_group, int thread,
                                        const BackwardParams& params) const {
    const int lane = thread % 32;
    const int first_row = tile.first_row + piece.first_row + thread / 32 * 16 + lane / 4;
    uint8_t* grad_query = (uint8_t*)params.grad_query +
                          2 * (tile.batch * params.grad_query_stride_batch + tile.head * params.grad_query_stride_head +
                               tile.origin * params.grad_query_stride_row);
#pragma unroll
    for (int four = 0; four < 8; four += 4) {
      uint32_t words[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[0][i] = pack(x[four + i].x * params.softmax_scale, x[four + i].y * params.softmax_scale);
        words[1][i] = pack(x[four + i].z * params.softmax_scale, x[four + i].w * params.softmax_scale);
      }
      // Now lane i of a quad gets all 8 columns of group i.
      const int group = first_group + four + lane % 4, column = piece.first_column + 8 * group;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        quad_transpose(words[half], lane);
        const int64_t row = first_row + 8 * half;
        if (row < tile.seqlen_q && group < piece.groups && column < params.head_dim)
          store_eight(grad_query + 2 * (row * params.grad_query_stride_row + column), words[half]);
      }
    }
  }
};

// Of the parts from `first` to `end`, every `step`th, AT_ONCE at a time: at the end perhaps one that another warpgroup
// stores as well.
template <int AT_ONCE>
__device__ __forceinline__ void finish_parts(int first, int end, int step, int sums_shift,
                                             const BackwardParams& params) {
#pragma unroll 1
  for (int part = first; part < end; part += AT_ONCE * step) {
    const int thread = opaque(threadIdx.x % 128);
    FinishedPart parts[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) parts[i].load(min(part + i * step, end - 1), sums_shift, thread, params);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) parts[i].store(min(part + i * step, end - 1), thread, params);
  }
}

#include "backward_fused.cuh"

#if !FUSED
// One block for each query tile of each head. The last heads come first, both times: L2 still holds what was written
// last, and the main kernel begins with the first heads and ends with the last ones.
__device__ __forceinline__ int tile_from_the_end() {
  return gridDim.x - 1 - blockIdx.x;
}
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS) flash_backward_prepare(
    const __grid_constant__ BackwardParams params) {
  const QueryTile tile = query_tile_at(tile_from_the_end(), params);
  if (PACKED && (tile.seqlen_q == 0 || !tile.sees_keys)) return;
  prepare_tile<PREPARE_THREADS>(tile, 0, threadIdx.x, params);
  if (IN_ORDER && threadIdx.x < SEMAPHORES) params.semaphores[tile.number * SEMAPHORES + threadIdx.x] = 0;
}
extern "C" __global__ void __launch_bounds__(128 * CONSUMERS) flash_backward_finish(
    const __grid_constant__ BackwardParams params) {
  const int tile = tile_from_the_end();
  if (PACKED && query_tile_at(tile, params).seqlen_q == 0) return;
  if (DIRECT && query_tile_at(tile, params).first_row < DIRECT_TILES * BLOCK_M) return;
  const int first = tile * PARTS_OF_TILE;
  finish_parts<1>(first + threadIdx.x / 128, first + PARTS_OF_TILE, CONSUMERS, 0, params);
}
#endif
