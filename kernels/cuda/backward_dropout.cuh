// Dropout in the backward: a word of each consumer thread and part of a query tile says which of its scores stay, made
// of the random keys of its queries, which lie beside them in shared memory, and of its own keys (dropout.cuh).
//
// HASHED_APART: the consumers' arithmetic is what their products wait for, so warps beside the loading one, which have
// nothing else to do, make the words of a query tile as soon as its statistics are there, up to Q_STAGES tiles ahead.
// Their 24 registers hold one word's work. Part of backward.cuh.
#pragma once

static_assert(!DELTA_FIRST, "dP is dropped before delta is subtracted");
static_assert(STEP_M == 64, "a word says which of a thread's scores stay");
static_assert(!HASHED_APART || UNSTAGED, "the warps that hash have no time to store");

// The random keys of this thread's two keys, `key` and `key` + 8, for a query head counted over the batch.
__device__ __forceinline__ uint2 column_keys(int head, int key, const BackwardParams& params) {
  const uint32_t* keys = dropout_columns(params.dropout, head, params.seqlen_q, params.seqlen_k) + key;
  return make_uint2(__ldg(keys), __ldg(keys + 8));
}

// 2 word + (x >= threshold), in two instructions: the comparison is a subtraction's carry.
__device__ __forceinline__ void append_if_not_less(uint32_t& word, uint32_t x, uint32_t threshold) {
  asm("{\n.reg .u32 unused;\nsub.cc.u32 unused, %1, %2;\nsubc.u32 %0, %0, %3;\n}"
      : "+r"(word)
      : "r"(x), "r"(threshold), "r"(~word));
}

// A bit for each of this thread's scores of a part: those that stay. `rows`: where the random keys of the part's
// queries begin in shared memory.
__device__ __forceinline__ uint32_t kept_scores(uint32_t rows, const uint2& of_keys, uint32_t threshold,
                                                int quad_lane) {
  const uint32_t columns[2] = {of_keys.x, of_keys.y};
  uint32_t kept = 0;
#pragma unroll
  for (int pair = STEP_M / 16 - 1; pair >= 0; --pair) {
    // Queries 16 pair + 2 quad_lane + e, whose scores are those of group 2 pair, and 8 further on, of the next one.
    const float2 of_queries = read_pair(rows + (16 * pair + 2 * quad_lane) * 4);
    const uint32_t row_keys[2] = {__float_as_uint(of_queries.x), __float_as_uint(of_queries.y)};
    uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = dropout_bits(row_keys[i % 2], columns[i / 2]);
#pragma unroll
    for (int i = 3; i >= 0; --i) append_if_not_less(kept, bits[i], threshold);
#pragma unroll
    for (int i = 3; i >= 0; --i) append_if_not_less(kept, bits[i] << 16 ^ bits[i], threshold);
  }
  return kept;
}

// x[i] = P (x[i] - delta) of scores that stay, -P delta of the others, whatever x[i] is: a product, and a predicated
// multiply-add in the place of a select, an addition and a product. `negative`: where -delta of this thread's queries
// lies in shared memory.
__device__ __forceinline__ void multiply_some(float (&x)[STEP_M / 2], const float (&probabilities)[STEP_M / 2],
                                              uint32_t kept, uint32_t negative) {
#pragma unroll
  for (int i = 0; i < STEP_M / 2; i += 4) {
    const float2 deltas = read_pair(negative + 8 * i);
#pragma unroll
    for (int j = i; j < i + 4; ++j) {
      float result = probabilities[j] * (j % 2 ? deltas.y : deltas.x);
      asm("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p fma.rn.f32 %0, %1, %2, %0;\n}"
          : "+f"(result)
          : "f"(probabilities[j]), "f"(x[j]), "r"(kept & 1u << j));
      x[j] = result;
    }
  }
}

#if HASHED_APART
// Warps of the loading warpgroup that hash; PERSISTENT, the last one has the keys to load.
constexpr int HASHING_WARPS = PERSISTENT ? 2 : 3;
// The words of one consumer warp and part.
constexpr int HASH_UNITS = 4 * CONSUMERS * PARTS;

// A hashing warp. `hashed`: how many tiles it has done before; `unit`: the first of its units of the next one, such
// that the warps do equally many in the long run. The random keys of the block's keys, too, come with each query tile:
// where they lie in memory would take registers.
template <class Shared>
__device__ __forceinline__ void hash_tiles(const Work& work, const BackwardParams& params, const Shared& shared,
                                           uint32_t& hashed, int& unit) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int left = count_tiles(work, params); left > 0; --left, ++hashed) {
    const auto q = Ring<Q_STAGES>::at(hashed);
    // The stage's words may be written then, too: the consumers have emptied all of it.
    barrier_wait(shared.q_full(q.stage), q.phase);
#pragma unroll 1
    for (; unit < HASH_UNITS; unit += HASHING_WARPS) {
      const uint32_t columns = shared.random_columns(q.stage) + (unit % (4 * CONSUMERS) * 16 + lane / 4) * 4;
      const uint32_t rows =
          shared.statistics + q.stage * STATISTICS_BYTES + (2 * BLOCK_M + unit / (4 * CONSUMERS) * STEP_M) * 4;
      const uint2 of_keys = make_uint2(read_word(columns), read_word(columns + 8 * 4));
      write_word(shared.kept_word(q.stage, unit * 32 + lane),
                 kept_scores(rows, of_keys, params.dropout.threshold, lane % 4));
    }
    unit -= HASH_UNITS;
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.kept_full(q.stage));
  }
}
#endif

// The loading thread, before it loads the queries of the same stage: whose they are, or the random keys of its keys.
template <class Shared>
__device__ __forceinline__ void load_random(const Work& work, int head, int stage, const BackwardParams& params,
                                            const Shared& shared) {
  const int of_batch = work.batch * params.num_heads + head;
#if HASHED_APART
  load_bytes<BLOCK_N * 4>(
      dropout_columns(params.dropout, of_batch, params.seqlen_q, params.seqlen_k) + work.k_tile * BLOCK_N,
      shared.random_columns(stage), shared.q_full(stage));
#else
  write_word(shared.head(stage), of_batch);
#endif
}
