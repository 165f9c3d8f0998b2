// Online softmax of one warpgroup's tile: 64 query rows, of which a thread holds two, 8 rows apart.
//
// An accumulator of N columns is float[N / 2] in a thread: [4 i + e] is column 8 i + 2 (lane % 4) + e % 2 of row e / 2.
// Scores are kept unscaled. A row's `shift` is a running maximum times scale * log2(e): a probability is
// exp2(score * scale_log2 - shift), and dividing by the row's sum in the end cancels whatever shift was used (Milakov
// and Gimelshein, "Online normalizer calculation for softmax", 2018). So the maximum need not be exact, and after the
// first tile it is not even computed: `update` keeps the shift and adds up the probabilities, as it must do anyway.
// Where a sum exceeds LARGEST_SUM, some score rose far above the shift, and the tile is done again by `restart`, with
// its maximum. That is rare, and it spares a quarter of softmax's instructions, which is what binds this kernel.
//
// With a float mask (NATURAL) a shift is in natural units instead, since the lowest finite number times log2(e) is
// -infinity and a row that has nothing else is not masked. In base 2 its product with log2(e) is subtracted where the
// shift is `ordinary`; otherwise differences are taken first.
#pragma once
#include "registers.cuh"

// A score that is above the shift by more than this in base 2 raises it. float16 ends at 2^16; bfloat16 has float32's
// range, of which 2^67 are left to values and to the number of keys. (Scores of a standard deviation of 16, in natural
// units, reach 2^50; raising the shift for them took up to 2.3 times as long.)
constexpr float LARGEST_SUM = IS_BF16 ? 0x1p60f : 0x1p14f;

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float LOG2E = 1.4426950408889634f;
// Up to here a shift times log2(e) is rounded by less than a score of that size is in float32.
constexpr float ORDINARY = 4096.0f;

template <bool NATURAL>
struct Softmax {
  float shift[2];  // scaled maximum of each row, -infinity before the first tile
  float sum[2];    // this thread's part of each row's sum

  __device__ __forceinline__ void reset() {
    shift[0] = shift[1] = -INFINITY_F;
    sum[0] = sum[1] = 0.0f;
  }

  // Turns scores into probabilities in place. Returns whether the shifts still serve; if so the sums include them.
  template <int N>
  __device__ __forceinline__ bool update(float (&scores)[N], float scale_log2) {
    float added[2] = {0.0f, 0.0f};
    const float subtract[2] = {NATURAL ? shift[0] * LOG2E : shift[0], NATURAL ? shift[1] * LOG2E : shift[1]};
    exponentials(scores, scale_log2, subtract, added);
    return add(added);
  }

  // The same of scores from which the shifts have been subtracted in base 2.
  template <int N>
  __device__ __forceinline__ bool update_shifted(float (&scores)[N]) {
    float added[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      scores[i] = exp2_approx(scores[i]);
      added[i / 2 % 2] += scores[i];
    }
    return add(added);
  }

  // Are both shifts such that their products with log2(e) may be subtracted? Not of rows that have seen no key.
  __device__ __forceinline__ bool ordinary() const {
    return fabsf(shift[0]) <= ORDINARY && fabsf(shift[1]) <= ORDINARY;
  }

  // `update` with new shifts: the larger of the old one and the scores' maximum. Writes by what the rows' earlier
  // results are to be multiplied. The sums must not include these scores yet.
  template <int N>
  __device__ __forceinline__ void restart(float (&scores)[N], float scale_log2, float (&rescale)[2]) {
    float largest[2];
    row_maxima(scores, largest);
    restart_from(scores, largest, scale_log2, rescale);
  }

  // Each row's largest score in its quad, which has all N columns.
  template <int N>
  static __device__ __forceinline__ void row_maxima(const float (&scores)[N], float (&largest)[2]) {
    maxima(scores, largest);
    largest[0] = quad_max(largest[0]);
    largest[1] = quad_max(largest[1]);
  }

  // `restart` where each row's largest score is known.
  template <int N>
  __device__ __forceinline__ void restart_from(float (&scores)[N], const float (&largest)[2], float scale_log2,
                                               float (&rescale)[2]) {
    float subtract[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float raised = fmaxf(shift[row], largest[row] * scale_log2);
      // A row that has seen no key yet keeps -infinity, and has nothing to rescale.
      subtract[row] = raised == -INFINITY_F ? 0.0f : raised;
      rescale[row] = exp2_approx(shift[row] - subtract[row]);
      shift[row] = raised;
      sum[row] *= rescale[row];
    }
    exponentials(scores, scale_log2, subtract, sum);
  }

  // The same of scores in natural units, whatever their size.
  template <int N>
  __device__ __forceinline__ void restart_natural(float (&scores)[N], float (&rescale)[2]) {
    float largest[2], subtract[2];
    maxima(scores, largest);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float raised = fmaxf(shift[row], quad_max(largest[row]));
      subtract[row] = raised == -INFINITY_F ? 0.0f : raised;
      rescale[row] = exp2_approx((shift[row] - subtract[row]) * LOG2E);
      shift[row] = raised;
      sum[row] *= rescale[row];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      scores[i] = exp2_approx((scores[i] - subtract[i / 2 % 2]) * LOG2E);
      sum[i / 2 % 2] += scores[i];
    }
  }

 private:
  // Adds a tile's sums. Written so that NaN and infinity fail, and with them a row that has seen no key yet.
  __device__ __forceinline__ bool add(const float (&added)[2]) {
    sum[0] += added[0];
    sum[1] += added[1];
    return added[0] <= LARGEST_SUM && added[1] <= LARGEST_SUM;
  }
  template <int N>
  static __device__ __forceinline__ void maxima(const float (&scores)[N], float (&largest)[2]) {
    largest[0] = scores[0];
    largest[1] = scores[2];
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      largest[0] = fmaxf(largest[0], fmaxf(scores[i], scores[i + 1]));
      largest[1] = fmaxf(largest[1], fmaxf(scores[i + 2], scores[i + 3]));
    }
  }
  template <int N>
  static __device__ __forceinline__ void exponentials(float (&scores)[N], float scale_log2, const float (&subtract)[2],
                                                      float (&sum)[2]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      scores[i] = exp2_approx(fmaf(scores[i], scale_log2, -subtract[i / 2 % 2]));
      sum[i / 2 % 2] += scores[i];
    }
  }
};

// Hides keys from rows: column c stays where c <= last[row], columns counted from the tile's first.
template <int N>
__device__ __forceinline__ void mask(float (&scores)[N], int last_0, int last_1, int quad_lane) {
  last_0 -= 2 * quad_lane;
  last_1 -= 2 * quad_lane;
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    scores[i] = 2 * i <= last_0 ? scores[i] : -INFINITY_F;
    scores[i + 1] = 2 * i + 1 <= last_0 ? scores[i + 1] : -INFINITY_F;
    scores[i + 2] = 2 * i <= last_1 ? scores[i + 2] : -INFINITY_F;
    scores[i + 3] = 2 * i + 1 <= last_1 ? scores[i + 3] : -INFINITY_F;
  }
}
