// Attention of a few query rows over many keys on Hopper (compute capability 9.0), one launch: the keys of a (batch,
// key head) are split among the blocks of a cluster, which merge their results through distributed shared memory.
//
// The rows of a key head, query by query and the query heads of each together, are packed: 16 for each row tile.
//
//   two loading warps:   the block's stretch of key tiles and of value tiles, BLOCK_N rows each, by TMA into two rings
//   each consumer warp:  16 rows, and its own BLOCK_N / KEY_WARPS keys of every tile:
//                          S = query key^T;  P = exp2(S - shift);  out += P value       (mma.sync, all in registers)
//   the block's warps:   their results, weighted, into one: each of these numbers is sent to the block that owns it
//   each block:          adds up what it owns when all of it has arrived, divides by the row's sum and writes it
//
// A mask of bools, one row for all queries of a key head: each loading warp looks at 2048 keys of it at a time, and
// loads the tiles of which any is shown; blocks take turns at tiles, so that all have as much to do where a cache is
// filled in part. Which keys of a tile are shown the consumers find beside it, as bits.
//
// So nothing but queries, keys, values and outputs touches memory, each once, and the order of all sums is fixed. Dao
// et al., "Flash-Decoding" (2023); rows that share keys share a tile as in Ainslie et al., "GQA" (2023).
//
// Shared memory: K_STAGES key and V_STAGES value tiles, each a row of boxes of 64 columns (tma.cuh); 100 KB on their
// way keep the memory busy. The rings then serve for the merge within the block; what other blocks send has its own
// place, since they may be done while this one still loads.
// Registers: HEAD_DIM / 4 for the query, HEAD_DIM_V / 2 for the output, KEYS / 2 for the scores.
//
// Defined by the host (decode.py): HEAD_DIM, HEAD_DIM_V (multiples of 16), ROW_TILES, KEY_WARPS, BLOCK_N, K_STAGES,
// V_STAGES, BLOCKS (that share a multiprocessor), MASKED, IS_BF16.
#include "barrier.cuh"
#include "cluster.cuh"
#include "mask.cuh"
#include "registers.cuh"
#include "tma.cuh"

// Mirrored by decode.py. Strides in elements.
struct DecodeParams {
  const uint8_t* query;  // [batch, heads, seqlen_q, head_dim], last stride 1, other strides multiples of 8
  uint8_t* out;          // [batch, heads, seqlen_q, head_dim_v], likewise
  float* logsumexp;      // [batch, heads, seqlen_q] contiguous, or null
  int64_t query_stride_batch, query_stride_head, query_stride_row;
  int64_t out_stride_batch, out_stride_head, out_stride_row;
  int num_kv_heads, group_size, seqlen_q, seqlen_k;
  int head_dim, head_dim_v;  // the tensors' own, of which HEAD_DIM and HEAD_DIM_V are the next multiples of 16
  int splits;                // blocks of a cluster, which share the keys of a batch's key head
  int tiles_each, more;      // key tiles of each block, and how many, the first ones, have one more
  float softmax_scale_log2;  // positive
  const uint8_t* mask;       // with MASKED: bytes, 0 hides; a row of seqlen_k that follow each other
  int64_t mask_stride_batch, mask_stride_kv_head;
};

constexpr int ROWS = 16 * ROW_TILES;
constexpr int CONSUMERS = ROW_TILES * KEY_WARPS;
constexpr int CONSUMER_THREADS = 32 * CONSUMERS;
constexpr int THREADS = CONSUMER_THREADS + 64;
constexpr int KEYS = BLOCK_N / KEY_WARPS;  // of a warp in a tile
constexpr int MOST_SPLITS = 8;
constexpr int K_BYTES = BLOCK_N * round_up(HEAD_DIM, BOX_COLUMNS) * 2;
constexpr int V_BYTES = BLOCK_N * round_up(HEAD_DIM_V, BOX_COLUMNS) * 2;
constexpr int BOX_BYTES = BLOCK_N * BOX_ROW_BYTES;
// A warp's result in shared memory, float32: the 8 more than a row's columns spread rows over the banks.
constexpr int PARTIAL_PITCH = 4 * (HEAD_DIM_V + 8);
constexpr int PARTIAL_BYTES = ROWS * PARTIAL_PITCH;
constexpr int FOURS = HEAD_DIM_V / 4;                 // of a row's output: the pieces that are merged
constexpr int BITS_BYTES = MASKED ? BLOCK_N / 8 : 0;  // of a tile
constexpr int NAMED_BARRIER = 1;
// A shift rises only with a score that is so far above it, in base 2: probabilities stay exact in float16, and the
// output is seldom rescaled.
constexpr float LARGEST_RISE = 8.0f;
static_assert(KEYS == 16 || KEYS == 32);
static_assert(KEY_WARPS * PARTIAL_BYTES <= K_STAGES * K_BYTES + V_STAGES * V_BYTES);

// Byte addresses in shared memory. Statistics are pairs of float32: a row's shift and its sum.
struct Shared {
  uint32_t key, value, received, received_statistics, warp_statistics, bits, barriers;
  __device__ explicit Shared(uint32_t base)
      : key(base),
        value(key + K_STAGES * K_BYTES),
        received(value + V_STAGES * V_BYTES),
        received_statistics(received + (ROWS * FOURS + MOST_SPLITS) * 16),
        warp_statistics(received_statistics + MOST_SPLITS * ROWS * 8),
        bits(warp_statistics + KEY_WARPS * ROWS * 8),
        barriers(bits + K_STAGES * BITS_BYTES) {}
  __device__ uint32_t k_full(int stage) const { return barriers + 8 * stage; }
  __device__ uint32_t k_empty(int stage) const { return barriers + 8 * (K_STAGES + stage); }
  __device__ uint32_t v_full(int stage) const { return barriers + 8 * (2 * K_STAGES + stage); }
  __device__ uint32_t v_empty(int stage) const { return barriers + 8 * (2 * K_STAGES + V_STAGES + stage); }
  // Counts what the cluster's blocks send.
  __device__ uint32_t all_received() const { return barriers + 8 * (2 * K_STAGES + 2 * V_STAGES); }
};

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// What to subtract in exponents: the shift, 0 where no key has been seen.
__device__ __forceinline__ float finite(float shift) {
  return shift == -INFINITY_F ? 0.0f : shift;
}
// Volatile: not to be moved above the wait for earlier launches, which may have written there.
__device__ __forceinline__ uint32_t load_word(const uint32_t* address) {
  uint32_t word;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(word) : "l"(address));
  return word;
}
// Where the 16 bytes number `chunk` of row `row` of a tile lie.
__device__ __forceinline__ uint32_t chunk_address(uint32_t tile, int row, int chunk) {
  return tile + chunk / 8 * BOX_BYTES + row * BOX_ROW_BYTES + ((chunk % 8) ^ (row % 8)) * 16;
}

// By one thread: tiles first to last - 1 of keys or values.
template <int COLUMNS, int STAGES, typename Full, typename Empty>
__device__ __forceinline__ void produce(const TensorMap& map, uint32_t tiles, Full full, Empty empty, int first,
                                        int last, int kv_head, int batch) {
  constexpr int BYTES = BLOCK_N * round_up(COLUMNS, BOX_COLUMNS) * 2;
  Ring<STAGES> ring;
#pragma unroll 1
  for (int tile = first; tile < last; ++tile) {
    barrier_wait(empty(ring.stage), ring.phase ^ 1);
    load_rows<BLOCK_N, COLUMNS>(map, tiles + ring.stage * BYTES, full(ring.stage), tile * BLOCK_N, kv_head, batch);
    ring.advance();
  }
}

// Which part of the work a consumer warp has: 16 rows from `first_row` on, KEYS keys of each tile from `first_key` on.
struct Part {
  int first_row, key_warp, first_key, lane;
  __device__ explicit Part(int warp)
      : first_row(16 * (warp % ROW_TILES)),
        key_warp(warp / ROW_TILES),
        first_key(warp / ROW_TILES * KEYS),
        lane(threadIdx.x % 32) {}
  // The thread's rows are this one and the one 8 below.
  __device__ int row() const { return first_row + lane / 4; }
  __device__ int column() const { return 2 * (lane % 4); }
};

#if MASKED
constexpr int PIECE = 16;                // keys of the mask that a lane reads at once, and bytes
constexpr int PIECES = BLOCK_N / PIECE;  // of a tile

// A row of the mask. Its address may be any; pieces are read from multiples of 16 bytes, two where it is none.
struct MaskRow {
  const uint8_t* row;
  int seqlen_k;
  int past;  // how far the row begins past such a multiple

  __device__ MaskRow(const DecodeParams& params, int kv_head, int batch)
      : row(params.mask + batch * params.mask_stride_batch + kv_head * params.mask_stride_kv_head),
        seqlen_k(params.seqlen_k),
        past((int)((uint64_t)row % PIECE)) {}

  // What has been read of 16 keys: they begin `past` bytes into `low`, and go on in `high`.
  struct Read {
    uint4 low, high;
    int past;
  };
  // The keys from `key` on, a multiple of 16; zeros behind the last. Behind the row, which may be the memory's last,
  // nothing is read; what lies before its begin belongs to the same piece of memory.
  __device__ __forceinline__ Read read(int key) const {
    Read found = {};
    if (key >= seqlen_k) return found;
    if (key + (past ? 2 * PIECE - past : PIECE) <= seqlen_k) {
      found.low = load_piece(row + key - past);
      if (past) found.high = load_piece(row + key - past + PIECE);
      found.past = past;
      return found;
    }
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < PIECE; ++i)
      if (key + i < seqlen_k) words[i / 4] |= load_byte(row + key + i) << 8 * (i % 4);
    found.low = {words[0], words[1], words[2], words[3]};
    return found;
  }
  static __device__ __forceinline__ uint32_t load_byte(const uint8_t* address) {
    uint32_t byte;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(byte) : "l"(address));
    return byte;
  }
  static __device__ __forceinline__ uint4 load_piece(const uint8_t* address) {
    uint4 piece;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
                 : "l"(address));
    return piece;
  }

  static __device__ __forceinline__ void write_bits(uint32_t address, uint32_t bits) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"((unsigned short)bits) : "memory");
  }

  // Which bytes are not 0, as bits.
  static __device__ __forceinline__ uint32_t bits_of(uint32_t word) {
    return (nonzero_bytes(word) >> 7) * 0x10204080 >> 28;
  }
  static __device__ __forceinline__ uint32_t bits_of(const uint4& piece) {
    return bits_of(piece.x) | bits_of(piece.y) << 4 | bits_of(piece.z) << 8 | bits_of(piece.w) << 12;
  }
  static __device__ __forceinline__ uint32_t bits_of(const Read& read) {
    return (bits_of(read.low) | bits_of(read.high) << PIECE) >> read.past & 0xFFFF;
  }
};

// By a warp: of tiles first, first + step and so on up to last - 1 those that the mask does not hide. With `bits`,
// where those of each stage lie, the keys of a tile that it shows go with it; a tile of which it shows none is the end.
template <int COLUMNS, int STAGES, typename Full, typename Empty>
__device__ __forceinline__ void produce_shown(const TensorMap& map, uint32_t tiles, Full full, Empty empty,
                                              const MaskRow& mask, uint32_t bits, int first, int step, int last,
                                              int kv_head, int batch) {
  constexpr int BYTES = BLOCK_N * round_up(COLUMNS, BOX_COLUMNS) * 2;
  constexpr int GROUPS = 4, GROUP_TILES = 32 / PIECES;  // a look is at so many groups, of one piece for each lane
  const int lane = threadIdx.x % 32, own_tile = lane / PIECES;
  Ring<STAGES> ring;
  const auto hand_over = [&](uint32_t shown, bool own) {
    barrier_wait(empty(ring.stage), ring.phase ^ 1);
    if (!bits) return;
    if (own) MaskRow::write_bits(bits + ring.stage * BITS_BYTES + lane % PIECES * 2, shown);
    __syncwarp();
    if (EVERY_LANE_ARRIVES && lane > 0) barrier_arrive(full(ring.stage));
  };
#pragma unroll 1
  for (int tile = first; tile < last; tile += GROUPS * GROUP_TILES * step) {
    MaskRow::Read read[GROUPS];
#pragma unroll
    for (int group = 0; group < GROUPS; ++group)
      read[group] = mask.read((tile + (group * GROUP_TILES + own_tile) * step) * BLOCK_N + lane % PIECES * PIECE);
    uint32_t shown[GROUPS];
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) shown[group] = MaskRow::bits_of(read[group]);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      uint32_t seen = __ballot_sync(0xFFFFFFFF, shown[group] != 0);
#pragma unroll 1
      while (seen) {
        const int number = (__ffs(seen) - 1) / PIECES;
        seen &= ~(((1u << PIECES) - 1) << number * PIECES);
        hand_over(shown[group], own_tile == number);
        if (lane == 0)
          load_rows<BLOCK_N, COLUMNS>(map, tiles + ring.stage * BYTES, full(ring.stage),
                                      (tile + (group * GROUP_TILES + number) * step) * BLOCK_N, kv_head, batch);
        ring.advance();
      }
    }
  }
  if (!bits) return;
  hand_over(0, lane < PIECES);
  if (lane == 0) barrier_arrive(full(ring.stage));
}

// Which of a tile's keys a warp may see, of its own: a bit for each. `any`: is there one that some warp may?
struct Shown {
  uint32_t own;
  bool any;
  __device__ __forceinline__ Shown(uint32_t bits, const Part& part) {
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 32; ++i) {
      const uint32_t word = read_word(bits + 4 * i);
      all |= word;
      if (part.first_key / 32 == i) own = KEYS == 32 ? word : word >> part.first_key % 32 & 0xFFFF;
    }
    any = all;
  }
  __device__ __forceinline__ void hide(float (&scores)[KEYS / 2], const Part& part) const {
    if (own == 0xFFFFFFFF >> (32 - KEYS)) return;
    const uint32_t of_thread = own >> part.column();
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i)
      if (!(of_thread >> (i / 4 * 8 + i % 2) & 1)) scores[i] = -INFINITY_F;
  }
};
#endif

// One row's (shift, sum) of `count` partial results, of which statistics(i) gives each, and their weights. All are
// loaded before any is used, since each load takes a while: those that are not there as the first, and then ignored.
template <int MOST, typename Statistics>
__device__ __forceinline__ float2 combine(float (&weights)[MOST], Statistics statistics, int count) {
  float2 parts[MOST], total = {-INFINITY_F, 0.0f};
#pragma unroll
  for (int i = 0; i < MOST; ++i) parts[i] = statistics(i < count ? i : 0);
#pragma unroll
  for (int i = 0; i < MOST; ++i) total.x = fmaxf(total.x, parts[i].x);
#pragma unroll
  for (int i = 0; i < MOST; ++i) {
    weights[i] = exp2_approx(parts[i].x - finite(total.x));
    total.y += i < count ? parts[i].y * weights[i] : 0.0f;
  }
  return total;
}
// Four numbers of `count` partial results, of which part(i) gives each, weighted.
template <int MOST, typename Part>
__device__ __forceinline__ float4 add_up(const float (&weights)[MOST], Part part, int count) {
  float4 parts[MOST], total = {};
#pragma unroll
  for (int i = 0; i < MOST; ++i) parts[i] = part(i < count ? i : 0);
#pragma unroll
  for (int i = 0; i < MOST; ++i) {
    if (i >= count) continue;
    total.x += weights[i] * parts[i].x;
    total.y += weights[i] * parts[i].y;
    total.z += weights[i] * parts[i].z;
    total.w += weights[i] * parts[i].w;
  }
  return total;
}

// The block's rows, as the tensors number them.
struct Rows {
  const DecodeParams& params;
  int batch, kv_head;
  __device__ int head(int row) const { return kv_head * params.group_size + row % params.group_size; }
  __device__ int query(int row) const { return row / params.group_size; }
  __device__ int count() const { return params.seqlen_q * params.group_size; }
  __device__ const uint8_t* query_address(int row) const {
    return params.query + 2 * (batch * params.query_stride_batch + head(row) * params.query_stride_head +
                               query(row) * params.query_stride_row);
  }
  // Writes four of a row's outputs.
  __device__ void write(int row, int column, const float4& x, float sum) const {
    if (column >= params.head_dim_v) return;
    const float inverse = MASKED && sum == 0.0f ? 0.0f : 1.0f / sum;
    uint8_t* address = params.out + 2 * (batch * params.out_stride_batch + head(row) * params.out_stride_head +
                                         query(row) * params.out_stride_row + column);
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(pack(x.x * inverse, x.y * inverse)),
                 "r"(pack(x.z * inverse, x.w * inverse))
                 : "memory");
  }
  __device__ void write_logsumexp(int row, const float2& statistics) const {
    if (!params.logsumexp) return;
    const int64_t heads = (int64_t)params.num_kv_heads * params.group_size;
    params.logsumexp[(batch * heads + head(row)) * params.seqlen_q + query(row)] =
        0.6931471805599453f * (finite(statistics.x) + log2f(statistics.y));
  }
};

// The query as the left operand of mma, 16 columns for each of the first index; rows and columns not there are zeros.
__device__ __forceinline__ void load_query(uint32_t (&query)[HEAD_DIM / 16][4], const Rows& rows, const Part& part) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = part.row() + 8 * half;
    const bool present = row < rows.count();
    const uint32_t* words = (const uint32_t*)rows.query_address(present ? row : 0) + part.lane % 4;
    const bool last = present && rows.params.head_dim == HEAD_DIM;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; ++i) {
      query[i][half] = present ? load_word(words + 8 * i) : 0;
      query[i][2 + half] = (i + 1 < HEAD_DIM / 16 ? present : last) ? load_word(words + 8 * i + 4) : 0;
    }
  }
}

// S[16, KEYS] = query key^T. In [4 * i + e] a thread has column 8 * i + 2 * (lane % 4) + e % 2 of row e / 2.
__device__ __forceinline__ void multiply_keys(float (&scores)[KEYS / 2], const uint32_t (&query)[HEAD_DIM / 16][4],
                                              uint32_t tile, const Part& part) {
  // A product waits for the one before that adds to the same sums: few keys need more sums than one each.
  constexpr int CHAINS = KEYS == 16 && HEAD_DIM >= 64 ? 2 : 1;
  float sums[CHAINS][KEYS / 2] = {};
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 16; ++i) {
#pragma unroll
    for (int pair = 0; pair < KEYS / 16; ++pair) {
      uint32_t keys[4];
      const int row = part.first_key + 16 * pair + part.lane / 16 * 8 + part.lane % 8;
      load_matrices(keys, chunk_address(tile, row, 2 * i + part.lane / 8 % 2));
      const uint32_t low[2] = {keys[0], keys[1]}, high[2] = {keys[2], keys[3]};
      warp_product(sums[i % CHAINS] + 8 * pair, query[i], low);
      warp_product(sums[i % CHAINS] + 8 * pair + 4, query[i], high);
    }
  }
#pragma unroll
  for (int i = 0; i < KEYS / 2; ++i) scores[i] = CHAINS == 2 ? sums[0][i] + sums[CHAINS - 1][i] : sums[0][i];
}

// out[16, HEAD_DIM_V] += P value.
__device__ __forceinline__ void multiply_values(float (&out)[HEAD_DIM_V / 2], const float (&probabilities)[KEYS / 2],
                                                uint32_t tile, const Part& part) {
#pragma unroll
  for (int pair = 0; pair < KEYS / 16; ++pair) {
    const float* p = probabilities + 8 * pair;
    const uint32_t left[4] = {pack(p[0], p[1]), pack(p[2], p[3]), pack(p[4], p[5]), pack(p[6], p[7])};
    const int row = part.first_key + 16 * pair + part.lane % 16;
#pragma unroll
    for (int i = 0; i < HEAD_DIM_V / 16; ++i) {
      uint32_t values[4];
      load_matrices_transposed(values, chunk_address(tile, row, 2 * i + part.lane / 16));
      const uint32_t low[2] = {values[0], values[1]}, high[2] = {values[2], values[3]};
      warp_product(out + 8 * i, left, low);
      warp_product(out + 8 * i + 4, left, high);
    }
  }
}

// Online softmax of 16 rows (Milakov and Gimelshein, 2018), the shift a maximum of some while ago.
struct Softmax {
  float shift[2] = {-INFINITY_F, -INFINITY_F};  // in base 2
  float sum[2] = {};                            // this thread's part

  // Turns scores into probabilities in place, and rescales what was added to `out` before where a shift has to rise.
  __device__ __forceinline__ void update(float (&scores)[KEYS / 2], float (&out)[HEAD_DIM_V / 2], float scale_log2) {
    float largest[2] = {scores[0], scores[2]};
#pragma unroll
    for (int i = 0; i < KEYS / 2; i += 4) {
      largest[0] = fmaxf(largest[0], fmaxf(scores[i], scores[i + 1]));
      largest[1] = fmaxf(largest[1], fmaxf(scores[i + 2], scores[i + 3]));
    }
    largest[0] = quad_max(largest[0]) * scale_log2;
    largest[1] = quad_max(largest[1]) * scale_log2;
    if (__any_sync(0xFFFFFFFF, largest[0] > shift[0] + LARGEST_RISE || largest[1] > shift[1] + LARGEST_RISE)) {
      float rescale[2];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float raised = fmaxf(shift[row], largest[row]);
        rescale[row] = exp2_approx(shift[row] - finite(raised));
        shift[row] = raised;
        sum[row] *= rescale[row];
      }
#pragma unroll
      for (int i = 0; i < HEAD_DIM_V / 2; ++i) out[i] *= rescale[i / 2 % 2];
    }
    const float subtract[2] = {finite(shift[0]), finite(shift[1])};
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
      scores[i] = exp2_approx(fmaf(scores[i], scale_log2, -subtract[i / 2 % 2]));
      sum[i / 2 % 2] += scores[i];
    }
  }
};

// The loop of one consumer warp over tiles first to last - 1, with MASKED over those that are handed over; leaves its
// result where the rings were.
__device__ __forceinline__ void consume(const Rows& rows, const Shared& shared, const Part& part, int first, int last) {
  const DecodeParams& params = rows.params;
  uint32_t query[HEAD_DIM / 16][4];
  load_query(query, rows, part);
  float out[HEAD_DIM_V / 2] = {};
  Softmax softmax;
  Ring<K_STAGES> k;
  Ring<V_STAGES> v;
#pragma unroll 1
  for (int tile = first; MASKED || tile < last; ++tile) {
    float scores[KEYS / 2];
    barrier_wait(shared.k_full(k.stage), k.phase);
#if MASKED
    const Shown shown(shared.bits + k.stage * BITS_BYTES, part);
    if (!shown.any) break;
#endif
    multiply_keys(scores, query, shared.key + k.stage * K_BYTES, part);
    warp_arrive_together(shared.k_empty(k.stage));
    k.advance();
#if MASKED
    shown.hide(scores, part);
#else
    if ((tile + 1) * BLOCK_N > params.seqlen_k) {
      const int left = params.seqlen_k - tile * BLOCK_N - part.first_key - part.column();
#pragma unroll
      for (int i = 0; i < KEYS / 2; ++i)
        if (i / 4 * 8 + i % 2 >= left) scores[i] = -INFINITY_F;
    }
#endif
    softmax.update(scores, out, params.softmax_scale_log2);
    barrier_wait(shared.v_full(v.stage), v.phase);
    multiply_values(out, scores, shared.value + v.stage * V_BYTES, part);
    warp_arrive_together(shared.v_empty(v.stage));
    v.advance();
  }

  // All loads have arrived, since every warp has waited for each, and after this barrier nobody reads them any more.
  named_sync(NAMED_BARRIER, CONSUMER_THREADS);
  const uint32_t partial = shared.key + part.key_warp * PARTIAL_BYTES;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = part.row() + 8 * half;
    const float sum = quad_sum(softmax.sum[half]);
    if (row >= rows.count()) continue;
    if (part.lane % 4 == 0)
      write_two(shared.warp_statistics + (part.key_warp * ROWS + row) * 8, softmax.shift[half], sum);
#pragma unroll
    for (int i = 0; i < HEAD_DIM_V / 8; ++i)
      write_two(partial + row * PARTIAL_PITCH + 4 * (8 * i + part.column()), out[4 * i + 2 * half],
                out[4 * i + 2 * half + 1]);
  }
  named_sync(NAMED_BARRIER, CONSUMER_THREADS);
}

// What a block owns of its rows' outputs, in pieces of four numbers.
struct Share {
  const Rows& rows;
  int rank;
  int items, size, first;  // of all blocks of the cluster; of each; of this one: the first

  __device__ Share(const Rows& rows, int rank)
      : rows(rows),
        rank(rank),
        items(rows.count() * FOURS),
        size(ceil_div(items, rows.params.splits)),
        first(rank * size) {}
  __device__ int count() const { return min(size, items - first); }
};

// Adds up the results of the block's warps, and sends each block of the cluster its share.
__device__ __forceinline__ void merge_warps(const Share& share, const Shared& shared) {
  const Rows& rows = share.rows;
  const int splits = rows.params.splits;
  const auto of_warps = [&](int row) {
    return [&shared, row](int i) { return read_two(shared.warp_statistics + (i * ROWS + row) * 8); };
  };
  for (int item = threadIdx.x; item < share.items; item += CONSUMER_THREADS) {
    const int row = item / FOURS, column = item % FOURS * 4;
    float weights[KEY_WARPS];
    const float2 of_row = combine(weights, of_warps(row), KEY_WARPS);
    const auto part = [&](int i) {
      return read_four(shared.key + i * PARTIAL_BYTES + row * PARTIAL_PITCH + 4 * column);
    };
    const float4 total = add_up(weights, part, KEY_WARPS);
    if (splits == 1) {
      rows.write(row, column, total, of_row.y);
    } else {
      const int owner = item / share.size, index = share.rank * share.size + item - owner * share.size;
      send_four(map_to_rank(shared.received + index * 16, owner), map_to_rank(shared.all_received(), owner), total);
    }
  }
  for (int i = threadIdx.x; i < rows.count() * splits; i += CONSUMER_THREADS) {
    const int peer = i / rows.count(), row = i - peer * rows.count();
    float weights[KEY_WARPS];
    const float2 of_row = combine(weights, of_warps(row), KEY_WARPS);
    if (splits == 1)
      rows.write_logsumexp(row, of_row);
    else
      send_two(map_to_rank(shared.received_statistics + (share.rank * ROWS + row) * 8, peer),
               map_to_rank(shared.all_received(), peer), of_row);
  }
}

// Adds up the share of this block that all blocks of the cluster have sent.
__device__ __forceinline__ void merge_blocks(const Share& share, const Shared& shared) {
  const Rows& rows = share.rows;
  const int splits = rows.params.splits;
  wait_for_others(shared.all_received());
  const auto of_blocks = [&](int row) {
    return [&shared, row](int i) { return read_two(shared.received_statistics + (i * ROWS + row) * 8); };
  };
  float weights[MOST_SPLITS];
  for (int i = threadIdx.x; i < share.count(); i += CONSUMER_THREADS) {
    const int row = (share.first + i) / FOURS, column = (share.first + i) % FOURS * 4;
    const float2 of_row = combine(weights, of_blocks(row), splits);
    const auto part = [&](int j) { return read_four(shared.received + (j * share.size + i) * 16); };
    rows.write(row, column, add_up(weights, part, splits), of_row.y);
  }
  if (share.rank > 0 || !rows.params.logsumexp) return;
  for (int row = threadIdx.x; row < rows.count(); row += CONSUMER_THREADS)
    rows.write_logsumexp(row, combine(weights, of_blocks(row), splits));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) flash_decode(
    const __grid_constant__ TensorMap key_map, const __grid_constant__ TensorMap value_map,
    const __grid_constant__ DecodeParams params) {
  const Shared shared(tile_memory());
  // The grid: (one cluster of splits; key heads; batches).
  const int splits = params.splits, rank = cluster_rank();
  const Rows rows{params, (int)blockIdx.z, (int)blockIdx.y};
  const int first = rank * params.tiles_each + min(rank, params.more);
  const int last = first + params.tiles_each + (rank < params.more);
  [[maybe_unused]] const int key_tiles = splits * params.tiles_each + params.more;
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;

  if (threadIdx.x == CONSUMER_THREADS) {
    prefetch_map(key_map);
    // Stages are filled by one arrival and the copy's bytes, and emptied by one arrival of each consumer warp.
    for (int stage = 0; stage < K_STAGES; ++stage) {
      barrier_init(shared.k_full(stage), MASKED ? WARP_ARRIVALS : 1);
      barrier_init(shared.k_empty(stage), CONSUMERS * WARP_ARRIVALS);
    }
    for (int stage = 0; stage < V_STAGES; ++stage) {
      barrier_init(shared.v_full(stage), 1);
      barrier_init(shared.v_empty(stage), CONSUMERS * WARP_ARRIVALS);
    }
    barrier_init(shared.all_received(), 1);
    barrier_init_fence();
  }
  if (threadIdx.x == CONSUMER_THREADS + 32) prefetch_map(value_map);
  __syncthreads();
  if (splits > 1) cluster_arrive();
  wait_for_earlier_launches();

  const auto k_full = [&](int stage) { return shared.k_full(stage); };
  const auto k_empty = [&](int stage) { return shared.k_empty(stage); };
  const auto v_full = [&](int stage) { return shared.v_full(stage); };
  const auto v_empty = [&](int stage) { return shared.v_empty(stage); };
  if (warp == CONSUMERS) {
#if MASKED
    produce_shown<HEAD_DIM, K_STAGES>(key_map, shared.key, k_full, k_empty, MaskRow(params, rows.kv_head, rows.batch),
                                      shared.bits, rank, splits, key_tiles, rows.kv_head, rows.batch);
#else
    if (lane == 0)
      produce<HEAD_DIM, K_STAGES>(key_map, shared.key, k_full, k_empty, first, last, rows.kv_head, rows.batch);
#endif
  } else if (warp == CONSUMERS + 1) {
#if MASKED
    produce_shown<HEAD_DIM_V, V_STAGES>(value_map, shared.value, v_full, v_empty,
                                        MaskRow(params, rows.kv_head, rows.batch), 0, rank, splits, key_tiles,
                                        rows.kv_head, rows.batch);
#else
    if (lane == 0)
      produce<HEAD_DIM_V, V_STAGES>(value_map, shared.value, v_full, v_empty, first, last, rows.kv_head, rows.batch);
#endif
    if (lane == 0) let_the_next_begin();
  } else {
    consume(rows, shared, Part(warp), first, last);
  }
  __syncwarp();
  const Share share(rows, rank);
  if (splits > 1) {
    if (threadIdx.x == 0)
      barrier_arrive_expect(shared.all_received(), splits * (max(share.count(), 0) * 16 + rows.count() * 8));
    __syncwarp();
    cluster_wait();  // others' shared memory may be written once they have begun
  }
  if (warp >= CONSUMERS) return;
  merge_warps(share, shared);
  if (splits > 1) merge_blocks(share, shared);
}
