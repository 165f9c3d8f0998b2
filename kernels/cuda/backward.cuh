// What the backward kernels for small and large head dimensions share: parameters, the order of the work, pieces of its
// steps, and the small kernels that run before and after (backward.cu describes them all).
#pragma once
#include "barrier.cuh"
#include "dropout.cuh"
#include "softmax.cuh"
#include "wgmma.cuh"
#include "wgmma_instructions.cuh"

// Where the lists of a bool mask lie (backward_mask.cuh): of each plane of the mask and tile of keys, which query tiles
// to visit, and the bits of mixed ones.
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
  float* statistics;       // [batch * num_heads * q_tiles, STATISTICS, BLOCK_M]
  float* sums;             // [batch * num_heads * q_tiles, BLOCK_M * HEAD_DIM], in the order of `Piece`
  int* semaphores;         // IN_ORDER: [batch * num_heads * q_tiles, CONSUMERS], who has added so far
  int* counters;           // IN_ORDER or PERSISTENT: tiles of keys begun, blocks done; both zero between launches
  int64_t out_stride_batch, out_stride_head, out_stride_row;  // elements
  int64_t grad_out_stride_batch, grad_out_stride_head, grad_out_stride_row;
  int64_t grad_query_stride_batch, grad_query_stride_head, grad_query_stride_row;
  int batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v, logsumexp_pitch;
  int q_tiles, k_tiles, heads_per_group;
  float softmax_scale, softmax_scale_log2;
  QueryMask mask;         // MASKED
  DropoutParams dropout;  // DROPOUT; softmax_scale, by which gradients are multiplied at last, has its scale in it
  float kept;             // 1 - dropout_p
  int unused;
};

constexpr int CONSUMERS = BLOCK_N / 64;
// Whether blocks wait for one another: those waited for have lower numbers, which must have begun.
constexpr bool IN_ORDER = DETERMINISTIC || FIRST_STORES;
constexpr int PREPARE_THREADS = 256;

// A consumer does a query tile in parts, which bounds its registers.
constexpr int PARTS = BLOCK_M / STEP_M;
static_assert(BLOCK_M % STEP_M == 0 && STEP_M % 16 == 0);
#if MASKED
#include "backward_mask.cuh"
static_assert(!FIRST_STORES, "the first keys do not meet every query tile");
#endif
#if FLOAT_MASK
static_assert(MASKED && !DROPOUT && !PERSISTENT && BLOCK_N == 128, "what has been thought of");
constexpr int VALUES_BYTES = STEP_M * BLOCK_N * 2;  // of a part of a tile
#endif
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
// Logsumexp in base 2 and -delta of each query; with DROPOUT its random key; with FLOAT_MASK the logsumexp in two parts,
// the first in natural units, the second in base 2.
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
#if MASKED
  int index;  // which all others follow from
#endif
  __device__ __forceinline__ int tiles(const BackwardParams& params) const {
    return max(params.q_tiles - first_q_tile, 0);
  }
};

// Causal: the first keys, which most queries see, come first, of a group of heads whose queries stay in L2 together.
// Masked: the same, since masks of models are causal more often than not.
// Deterministic: the same, since blocks of one head wait for one another: so those that begin together are of many.
__device__ __forceinline__ Work work_at(int index, const BackwardParams& params) {
  int head;
  Work work;
  if (IS_CAUSAL || DETERMINISTIC || MASKED) {
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
#if MASKED
  work.index = index;
#endif
  return work;
}

// Which number a block has: its own, or the next that nobody has taken, so that all lower ones have begun. Thread 0
// takes it into shared memory; after a barrier, all ask for it.
__device__ __forceinline__ void take_ticket(uint32_t ticket, const BackwardParams& params) {
  if (IN_ORDER) write_word(ticket, atomicAdd(params.counters, 1));
}
__device__ __forceinline__ int block_number(uint32_t ticket, const BackwardParams& params) {
  if (!IN_ORDER) return blockIdx.x;
  // The last block to get here leaves the counters as it found them: all have taken their numbers.
  if (threadIdx.x == 0 && atomicAdd(params.counters + 1, 1) == gridDim.x - 1) {
    params.counters[0] = 0;
    params.counters[1] = 0;
  }
  return uniform(read_word(ticket));
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
// By its number among those of all lists, which has 32 bits where an address has 64.
__device__ __forceinline__ int read_entry(const BackwardParams& params, int number) {
  int entry;
  asm volatile(
      "{\n.reg .b64 address;\nmad.wide.s32 address, %1, 4, %2;\nld.global.nc.b32 %0, [address];\n}"
      : "=r"(entry)
      : "r"(number), "l"(params.mask.lists));
  return entry;
}
#endif

// Calls `visit(query head, query tile, the tile's number in the workspace, its entry in a mask's list or 0)` for all
// that a block works on, in order.
template <class Visit>
__device__ __forceinline__ void for_each_tile(const Work& work, const BackwardParams& params, const Visit& visit) {
  const int group = params.num_heads / params.num_kv_heads;
#if MASKED
#pragma unroll 1
  for (int of_group = 0; of_group < group; ++of_group) {
    // Computed again for each head, for want of registers to keep it in.
    int index;
    asm volatile("mov.b32 %0, %1;" : "=r"(index) : "r"(work.index));
    const Work here = work_at(index, params);
    const int head = here.kv_head * group + of_group;
    const int first = (here.batch * params.num_heads + head) * params.q_tiles;
    const int list = list_number(here, head, params) * (2 + params.q_tiles);
#pragma unroll 1
    for (int entry, at = list + 1; (entry = read_entry(params, at)) != LIST_END; ++at)
      visit(head, entry_tile(entry), first + entry_tile(entry), entry);
  }
#else
#pragma unroll 1
  for (int head = work.kv_head * group; head < (work.kv_head + 1) * group; ++head) {
    const int first = (work.batch * params.num_heads + head) * params.q_tiles;
#pragma unroll 1
    for (int number = first + params.q_tiles - 1; number >= first + work.first_q_tile; --number)
      visit(head, number - first, number, 0);
  }
#endif
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
// The loading thread: of which kind a query tile is, and its bits if it has some, on their way to the consumers beside the
// queries of the same stage, before which it must be called.
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
// The loading thread: the numbers of a tile's parts, one after the other into one place. By `mask_map`, whose
// dimensions are those that the mask has of its own.
template <class Shared>
__device__ __forceinline__ void load_values(const TensorMap& mask_map, const Work& work, int head, int tile,
                                            const BackwardParams& params, const Shared& shared, uint32_t& phase) {
  const int mask_head = params.mask.plane_stride_head ? head : 0;
  const int mask_batch = params.mask.plane_stride_batch ? work.batch : 0;
#pragma unroll 1
  for (int part = 0; part < PARTS; ++part) {
    barrier_wait(shared.values_empty(), phase ^ 1);
    phase ^= 1;
    barrier_arrive_expect(shared.values_full(), VALUES_BYTES);
#pragma unroll
    for (int box = 0; box < BLOCK_N / BOX_COLUMNS; ++box)
      load_box(mask_map, shared.values + box * STEP_M * BOX_ROW_BYTES, shared.values_full(),
               work.k_tile * BLOCK_N + box * BOX_COLUMNS, tile * BLOCK_M + part * STEP_M, mask_head, mask_batch);
  }
}

// Scores become exponents of 2, with the mask's numbers added in natural units, in the forward's order: a score that a
// large number absorbed there is absorbed here. -infinity hides a score whatever it is. `first_key`: of the warp's 16
// keys within the tile. `statistics`: of the part's and this thread's queries.
__device__ __forceinline__ void add_values(float (&scores)[STEP_M / 2], uint32_t values, int first_key,
                                           uint32_t statistics, float softmax_scale) {
  const int lane = threadIdx.x % 32;
  // As in write_grad_scores.
  const uint32_t address = chunk_address<STEP_M>(values, lane / 16 * 8 + lane % 8, first_key / 8 + lane / 8 % 2);
#pragma unroll
  for (int i = 0; i < STEP_M / 16; ++i) {
    uint32_t pairs[4];
    load_matrices_transposed(pairs, address + i * 16 * BOX_ROW_BYTES);
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const uint32_t of_group = statistics + 32 * (2 * i + group);
      const float2 high = read_pair(of_group + 2 * BLOCK_M * 4), low = read_pair(of_group + 3 * BLOCK_M * 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 added = unpack(pairs[2 * group + half]);
        const int at = 4 * (2 * i + group) + 2 * half;
        const float first = fmaf(scores[at], softmax_scale, added.x);
        const float second = fmaf(scores[at + 1], softmax_scale, added.y);
        scores[at] = added.x == -INFINITY_F ? -INFINITY_F : fmaf(first - high.x, 1.4426950408889634f, -low.x);
        scores[at + 1] = added.y == -INFINITY_F ? -INFINITY_F : fmaf(second - high.y, 1.4426950408889634f, -low.y);
      }
    }
  }
}
#endif

// The loading warp. Shared: where the kernel keeps its tiles and barriers.
template <class Shared>
__device__ __forceinline__ void produce(const TensorMap& query_map, const TensorMap& key_map,
                                        const TensorMap& value_map, const TensorMap& grad_out_map, const Work& work,
                                        const BackwardParams& params, const Shared& shared,
                                        [[maybe_unused]] const TensorMap* mask_map = nullptr) {
  Ring<Q_STAGES> q;
  Ring<DO_STAGES> d;
  bool first = true;
  [[maybe_unused]] uint32_t values_phase = 0;
  for_each_tile(work, params, [&](int head, int tile, int number, [[maybe_unused]] int entry) {
    // In the order in which the consumers need them.
    if (first)
      load_rows<BLOCK_N, HEAD_DIM>(key_map, shared.key, shared.k_full(), work.k_tile * BLOCK_N, work.kv_head,
                                   work.batch);
    barrier_wait(shared.q_empty(q.stage), q.phase ^ 1);
#if MASKED
    load_mask(work, head, entry, q.stage, params, shared);
#endif
#if DROPOUT
    write_word(shared.head(q.stage), work.batch * params.num_heads + head);
#endif
    load_rows<BLOCK_M, HEAD_DIM>(query_map, shared.query + q.stage * Q_BYTES, shared.q_full(q.stage), tile * BLOCK_M,
                                 head, work.batch);
    load_bytes<STATISTICS_BYTES>(params.statistics + (int64_t)number * (STATISTICS * BLOCK_M),
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
#if FLOAT_MASK
    if (entry_kind(entry) == VALUES) load_values(*mask_map, work, head, tile, params, shared, values_phase);
#endif
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

// Hides keys from queries, in scores of STEP_M queries from `first_row` on: later ones of a causal call, and those past
// the end, which would only add zeros, but exp2 of their scores may be infinite. This thread's keys are `key`, `key`
// + 8.
__device__ __forceinline__ void mask_keys(float (&scores)[STEP_M / 2], int key, int first_row,
                                          const BackwardParams& params) {
  const int hidden = STEP_M + 1;
  const int first_0 = IS_CAUSAL ? key - first_row : 0, first_1 = IS_CAUSAL ? first_0 + 8 : 0;
  mask_columns(scores, key < params.seqlen_k ? first_0 : hidden, key + 8 < params.seqlen_k ? first_1 : hidden,
               threadIdx.x % 4);
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
  float* statistics = params.statistics + number * (STATISTICS * BLOCK_M);
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
      // Rows past the end, and those that see no key, have probability zero everywhere.
#if FLOAT_MASK
      const bool inside = this_row < params.seqlen_q;
      const int64_t plane = (int64_t)params.batch * params.num_heads * params.logsumexp_pitch;
      float natural = inside ? logsumexp[this_row] : INFINITY_F;
      if (natural == -INFINITY_F) natural = INFINITY_F;
      const float low = inside && natural != INFINITY_F ? logsumexp[plane + this_row] * 1.4426950408889634f : 0.0f;
      // The lowest number is -infinity in base 2; no score is seen then but those that numbers are added to.
      statistics[row] = fmaxf(fmaf(natural, 1.4426950408889634f, low), -3e38f);
      statistics[2 * BLOCK_M + row] = natural;
      statistics[3 * BLOCK_M + row] = low;
#else
      float high = this_row < params.seqlen_q ? logsumexp[this_row] * 1.4426950408889634f : INFINITY_F;
      if (MASKED && high == -INFINITY_F) high = INFINITY_F;
      statistics[row] = high;
#endif
#if DROPOUT
      // Of dP without the scale of what stays, by which dS is multiplied at last.
      delta *= params.kept;
#endif
      statistics[BLOCK_M + row] = -delta;
#if DROPOUT
      // The table has as many rows as all tiles together.
      const uint32_t* keys =
          dropout_rows(params.dropout, blockIdx.x / params.q_tiles, params.seqlen_q, params.seqlen_k);
      statistics[2 * BLOCK_M + row] = __uint_as_float(keys[this_row]);
#endif
    }
  }
  if (!FIRST_STORES) {
    float4* sums = (float4*)(params.sums + number * (BLOCK_M * HEAD_DIM));
#pragma unroll
    for (int i = threadIdx.x; i < BLOCK_M * HEAD_DIM / 4; i += PREPARE_THREADS)
      sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  if (IN_ORDER && threadIdx.x < CONSUMERS) params.semaphores[number * CONSUMERS + threadIdx.x] = 0;
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
