// Online softmax over the score fragments of mma.sync.
//
// Scores of a warp: s[m][n][e], 16-row block m, 8-column block n; element e of lane l is row
// 16 m + 8 (e / 2) + l / 4 and column 8 n + 2 (l % 4) + e % 2. Row r = 2 m + e / 2 of a thread is
// shared by the four lanes of a quad.
//
// p = 2^(scale s - scale reference). The reference need not be the row's maximum: any finite number
// gives the same softmax while nothing overflows. So once a row has met a key the reference stays,
// and neither maximum nor rescaling of the output is computed; the row sums, needed anyway, tell
// when some p grew too large, and the tile is then done again the exact way. Only tiles with a
// visible key reach this code, and what it decides depends on the visible scores of the warp's rows
// alone: whether a hidden key was masked or never visited does not change a bit.
#ifndef FLASHATTN_CUDA_SOFTMAX_CUH_
#define FLASHATTN_CUDA_SOFTMAX_CUH_

#include <cmath>
#include <cstdint>

#include "ptx.cuh"

namespace flashattn {

__device__ __forceinline__ float max_of_quad(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// What a thread's share of a tile's row sum must stay below: P is rounded to T, and the output and
// the sums gather many tiles of it.
template <class T>
constexpr float kTileSumLimit = 0x1p40f;
template <>
constexpr float kTileSumLimit<__half> = 0x1p14f;

// Adds up over a quad; lane i gets the sum of row i % Rows.
template <int Rows>
__device__ __forceinline__ float scatter_sums(const float (&of_row)[Rows], int lane) {
  static_assert(Rows == 2 || Rows == 4, "a quad has four lanes");
  const bool odd = lane & 1, upper = lane & 2;
  float pair_sum[Rows / 2];
#pragma unroll
  for (int i = 0; i < Rows / 2; ++i) {
    const float kept = odd ? of_row[2 * i + 1] : of_row[2 * i];
    const float sent = odd ? of_row[2 * i] : of_row[2 * i + 1];
    pair_sum[i] = kept + __shfl_xor_sync(~0u, sent, 1);
  }
  const float kept = upper ? pair_sum[Rows / 2 - 1] : pair_sum[0];
  const float sent = upper ? pair_sum[0] : pair_sum[Rows / 2 - 1];
  return kept + __shfl_xor_sync(~0u, sent, 2);
}

// of_row[lane % Rows]; an index would send the array to local memory.
template <int Rows>
__device__ __forceinline__ float pick_row(const float (&of_row)[Rows], int lane) {
  const float low = lane & 1 ? of_row[1] : of_row[0];
  const float high = lane & 1 ? of_row[Rows - 1] : of_row[Rows - 2];
  return lane & 2 ? high : low;
}

struct RowResult {
  float output_scale;  // 0: the output is 0 whatever was accumulated
  float lse;
};

template <class T, int RowBlocks>
class OnlineSoftmax {
 public:
  static constexpr int kRows = 2 * RowBlocks;
  // The exact way adopts a new maximum only if it exceeds the reference by 2^8.
  static constexpr float kLazyBits = 8.0f;
  // Data that outgrew the reference once is likely to again: so many tiles go the exact way then.
  static constexpr int kCaution = 8;

  // scale > 0; so that it also holds for a scale of 0, callers pass at least FLT_MIN.
  __device__ explicit OnlineSoftmax(float scale) : scale_(scale), exact_tiles_(1) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) reference_[r] = -INFINITY;
  }

  // Whether the next tile has to call raise() before weigh(). The same in all lanes.
  __device__ bool exact() const { return exact_tiles_ > 0; }

  // Moves references to the maxima of these scores where that is due, and the sums with them. If
  // any row of the warp moved, the output has to be multiplied by `factor`.
  template <int N>
  __device__ __forceinline__ bool raise(const float (&s)[RowBlocks][N][4], float (&factor)[kRows]) {
    bool moved = false, all_met_a_key = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float maximum = -INFINITY;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        maximum = fmaxf(maximum, fmaxf(s[r / 2][n][r % 2 * 2], s[r / 2][n][r % 2 * 2 + 1]));
      }
      maximum = max_of_quad(maximum);
      // Both -inf: NaN > kLazyBits is false, and nothing moves.
      const bool moves = (maximum - reference_[r]) * scale_ > kLazyBits;
      factor[r] = moves ? exp2_approx((reference_[r] - maximum) * scale_) : 1.0f;
      if (moves) reference_[r] = maximum;
      moved |= moves;
      all_met_a_key &= reference_[r] > -INFINITY;
    }
    sum_ *= pick_row(factor, opaque_thread() % 32);
    const int rest = max(exact_tiles_ - 1, 0);
    exact_tiles_ = __all_sync(~0u, all_met_a_key) ? rest : max(rest, 1);
    return __any_sync(~0u, moved);
  }

  // Scores to probabilities, as A operands of k16 blocks. False, in all lanes, if the references
  // are too low for these scores: nothing was added up then, and the scores must be made anew.
  template <int N>
  __device__ __forceinline__ bool weigh(const float (&s)[RowBlocks][N][4],
                                        uint32_t (&p_regs)[RowBlocks][N / 2][4], bool exact) {
    float tile_sum[kRows];
    bool fits = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float offset = reference_[r] == -INFINITY ? 0.0f : reference_[r] * scale_;
      tile_sum[r] = 0.0f;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float* pair = &s[r / 2][n][r % 2 * 2];
        const float p0 = exp2_approx(fmaf(pair[0], scale_, -offset));
        const float p1 = exp2_approx(fmaf(pair[1], scale_, -offset));
        tile_sum[r] += p0;
        tile_sum[r] += p1;
        p_regs[r / 2][n / 2][n % 2 * 2 + r % 2] = pack<T>(p0, p1);
      }
      fits &= tile_sum[r] < kTileSumLimit<T>;  // false for NaN
    }
    if (!exact && !__all_sync(~0u, fits)) {
      exact_tiles_ = kCaution;
      return false;
    }
    sum_ += scatter_sums(tile_sum, opaque_thread() % 32);
    return true;
  }

  // `sink` is one more logit without a value, in log2 units; -inf: none.
  __device__ RowResult finish(int r, float sink) const {
    const float sum = __shfl_sync(~0u, sum_, r, 4);
    const float reference = reference_[r] * scale_;
    const float top = fmaxf(reference, sink);
    if (top == -INFINITY && sum == 0.0f) return {0.0f, -INFINITY};
    const float weight = exp2_approx(reference - top);
    const float total = sum * weight + exp2_approx(sink - top);
    return {weight / total, (top + log2f(total)) * kLn2};
  }

 private:
  float scale_;
  int exact_tiles_;
  float reference_[kRows];  // in units of the scores; -inf: no key met yet
  float sum_ = 0.0f;        // of p over the row that this lane keeps, lane % kRows
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_SOFTMAX_CUH_
