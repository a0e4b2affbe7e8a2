// Soft cap and ALiBi on the accumulators of wgmma (layout: softmax_sm90.cuh).
#ifndef FLASHATTN_CUDA_SCORE_SHAPE_SM90_CUH_
#define FLASHATTN_CUDA_SCORE_SHAPE_SM90_CUH_

#include <cmath>
#include <cstdint>

#include "params.h"
#include "ptx.cuh"
#include "softmax_sm90.cuh"
#include "tile_scheduler.cuh"

namespace flashattn {

constexpr int kSoftCap = 1, kAlibi = 2;

// Makes raw products logits in log2 units; filled on the host.
struct ShapeScale {
  float product;  // multiplies a product; with a cap, gives the power of two that tanh needs
  int features;   // kSoftCap, kAlibi
  float cap;      // in log2 units
  float minus_two_caps;
  // cap tanh(x) = s (odd[0] + odd[1] s^2 + ...) for x^2 <= kSeriesLimit, where s is the product and
  // x what tanh is taken of.
  float series[5];
  float series_limit;  // in units of s^2; 0: the series is not to be used
};

// Five terms, their relative error 3e-7 up to this x^2: minimax, by Lawson's algorithm.
constexpr double kTanhSeriesLimit = 0.5;
constexpr double kTanhSeries[5] = {0.9999996423721313, -0.33329981565475464, 0.13278315961360931,
                                   -0.050731346011161804, 0.013653111644089222};

inline ShapeScale make_shape_scale(const PrefillParams& params) {
  const Scores& scores = params.scores;
  const double log2_scale = scores.scale * kLog2e;
  ShapeScale shape = {};
  if (params.features.alibi_slopes) shape.features |= kAlibi;
  shape.product = static_cast<float>(log2_scale);
  if (scores.softcap == 0.0) return shape;
  shape.features |= kSoftCap;
  const double cap = scores.softcap * kLog2e, ratio = scores.scale / scores.softcap;
  shape.product = static_cast<float>(2.0 * log2_scale / scores.softcap);
  shape.cap = static_cast<float>(cap);
  shape.minus_two_caps = -2.0f * shape.cap;
  shape.series_limit = static_cast<float>(kTanhSeriesLimit / (ratio * ratio));
  double power = cap * ratio;
  for (int i = 0; i < 5; ++i, power *= ratio * ratio) {
    shape.series[i] = static_cast<float>(kTanhSeries[i] * power);
    if (!std::isfinite(shape.series[i])) shape.series_limit = 0.0f;
  }
  return shape;
}

// The soft cap. Scores are small beside it as a rule: then a few terms of tanh's series cost less
// than the two steps through the exponentials' unit that an accurate tanh takes. The sums of a few
// squares tell.
template <int N>
__device__ __forceinline__ void cap_scores(float (&s)[N], const ShapeScale& shape) {
  constexpr int kSums = 4;
  float squares[kSums];
#pragma unroll
  for (int i = 0; i < N; ++i)
    squares[i % kSums] = i < kSums ? s[i] * s[i] : fmaf(s[i], s[i], squares[i % kSums]);
  bool small = true;
#pragma unroll
  for (int i = 0; i < kSums; ++i) small &= squares[i] < shape.series_limit;  // false for NaN
  if (__all_sync(kWholeWarp, small)) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float square = s[i] * s[i];
      float sum = shape.series[4];
#pragma unroll
      for (int k = 3; k >= 0; --k) sum = fmaf(sum, square, shape.series[k]);
      s[i] *= sum;
    }
  } else {
    // As tanh_by_exp2(), with the factors folded.
#pragma unroll
    for (int i = 0; i < N; ++i)
      s[i] = fmaf(shape.minus_two_caps, rcp_approx(1.0f + exp2_approx(s[i] * shape.product)),
                  shape.cap);
  }
}

// What changes the scores of the two rows of a thread.
class ScoreShape {
 public:
  // Of rows at these query positions.
  __device__ __forceinline__ ScoreShape(const PrefillParams& params, const ShapeScale& scale,
                                        const volatile TileWork& work, int position0, int position1)
      : params_(params), scale_(scale), work_(work), position_{position0, position1} {}

  // The scores of the block that begins with this key, from raw products.
  template <int N>
  __device__ __forceinline__ void apply(float (&s)[N], int first_key) const {
    int features = scale_.features;
    opaque(features);  // else what is known of it occupies predicates throughout the main loop
    if (features & kSoftCap) cap_scores(s, scale_);
    const float factor = features & kSoftCap ? 1.0f : scale_.product;
    if (features & kAlibi)
      scale_and_add_alibi(s, factor, first_key);
    else if (!(features & kSoftCap))
#pragma unroll
      for (int i = 0; i < N; ++i) s[i] *= factor;
  }

 private:
  // Where all keys lie before their queries, which is most blocks of causal attention, the distance
  // is linear: no absolute value, and the rows' part of it joins the factor.
  template <int N>
  __device__ __forceinline__ void scale_and_add_alibi(float (&s)[N], float factor,
                                                      int first_key) const {
    const int key = first_key + 2 * static_cast<int>(threadIdx.x % 4) - work_.shift;
    const int last = work_.q_len - 1;
    const float distance[2] = {static_cast<float>(min(position_[0], last) - key),
                               static_cast<float>(min(position_[1], last) - key)};
    const float slope = __ldg(params_.features.alibi_slopes.row(work_.batch) + work_.head) * kLog2e;
    const auto column = [](int i) { return static_cast<float>(8 * (i / 4) + i % 2); };
    if (__all_sync(kWholeWarp, fminf(distance[0], distance[1]) >= column(N - 1))) {
      const float of_row[2] = {-slope * distance[0], -slope * distance[1]};
#pragma unroll
      for (int i = 0; i < N; ++i)
        s[i] = fmaf(slope, column(i), fmaf(s[i], factor, of_row[i / 2 % 2]));
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i)
        s[i] = fmaf(-slope, fabsf(distance[i / 2 % 2] - column(i)), s[i] * factor);
    }
  }

  const PrefillParams& params_;
  const ShapeScale& scale_;
  const volatile TileWork& work_;
  const int position_[2];
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_SCORE_SHAPE_SM90_CUH_
