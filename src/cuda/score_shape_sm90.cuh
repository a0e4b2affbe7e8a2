// Soft cap, ALiBi and a bias on the accumulators of wgmma (layout: softmax_sm90.cuh).
#ifndef FLASHATTN_CUDA_SCORE_SHAPE_SM90_CUH_
#define FLASHATTN_CUDA_SCORE_SHAPE_SM90_CUH_

#include <cmath>
#include <cstdint>

#include "params.h"
#include "ptx.cuh"
#include "score.cuh"
#include "softmax_sm90.cuh"
#include "tile_scheduler.cuh"

namespace flashattn {

constexpr int kSoftCap = 1, kAlibi = 2, kBias = 4;

// Makes raw products logits in log2 units; filled on the host.
struct ShapeScale {
  float product;  // multiplies a product; with a cap, gives the power of two that tanh needs
  float natural;  // the same in natural units, without a cap
  int features;   // kSoftCap, kAlibi, kBias
  int bias_step;  // rows of the bias from a row to the next: 0 where it is the same for all
  float cap;      // in log2 units
  float minus_two_caps;
  // cap tanh(x) = s (odd[0] + odd[1] s^2 + ...) for x^2 <= kSeriesLimit, where s is the product and
  // x what tanh is taken of.
  float series[5], short_series[3];
  float series_limit, short_series_limit;  // in units of s^2; 0: they are not to be used
};

// Five terms, their relative error 3e-7 up to this x^2: minimax, by Lawson's algorithm. Three,
// 4e-7.
constexpr double kTanhSeriesLimit = 0.5, kTanhShortSeriesLimit = 0.0625;
constexpr double kTanhSeries[5] = {0.9999996423721313, -0.33329981565475464, 0.13278315961360931,
                                   -0.050731346011161804, 0.013653111644089222};
constexpr double kTanhShortSeries[3] = {0.9999996043445013, -0.333219082250449, 0.1284161343104726};

inline ShapeScale make_shape_scale(const PrefillParams& params) {
  const Scores& scores = params.scores;
  const double log2_scale = scores.scale * kLog2e;
  ShapeScale shape = {};
  if (params.features.alibi_slopes) shape.features |= kAlibi;
  if (params.features.bias.data) shape.features |= kBias;
  shape.bias_step = params.features.bias.row == 0 ? 0 : 1;
  shape.product = static_cast<float>(log2_scale);
  shape.natural = static_cast<float>(scores.scale);
  if (scores.softcap == 0.0) return shape;
  shape.features |= kSoftCap;
  const double cap = scores.softcap * kLog2e, ratio = scores.scale / scores.softcap;
  shape.product = static_cast<float>(2.0 * log2_scale / scores.softcap);
  shape.cap = static_cast<float>(cap);
  shape.minus_two_caps = -2.0f * shape.cap;
  shape.series_limit = static_cast<float>(kTanhSeriesLimit / (ratio * ratio));
  shape.short_series_limit = static_cast<float>(kTanhShortSeriesLimit / (ratio * ratio));
  double power = cap * ratio;
  for (int i = 0; i < 5; ++i, power *= ratio * ratio) {
    shape.series[i] = static_cast<float>(kTanhSeries[i] * power);
    if (i < 3) shape.short_series[i] = static_cast<float>(kTanhShortSeries[i] * power);
    if (!std::isfinite(shape.series[i])) shape.series_limit = shape.short_series_limit = 0.0f;
  }
  return shape;
}

template <int Terms>
__device__ __forceinline__ float series_at(const float (&series)[Terms], float x) {
  float sum = series[Terms - 1];
#pragma unroll
  for (int k = Terms - 2; k >= 0; --k) sum = fmaf(sum, x, series[k]);
  return sum;
}

// Of the whole warp's scores; the sums of a few squares tell. False for NaN.
template <int N>
__device__ __forceinline__ bool all_squares_below(const float (&s)[N], float limit) {
  constexpr int kSums = 4;
  float squares[kSums];
#pragma unroll
  for (int i = 0; i < N; ++i)
    squares[i % kSums] = i < kSums ? s[i] * s[i] : fmaf(s[i], s[i], squares[i % kSums]);
  bool below = true;
#pragma unroll
  for (int i = 0; i < kSums; ++i) below &= squares[i] < limit;
  return __all_sync(kWholeWarp, below);
}

// The soft cap. Scores are small beside it as a rule: then a few terms of tanh's series cost less
// than the two steps through the exponentials' unit that an accurate tanh takes.
template <int N>
__device__ __forceinline__ void cap_scores(float (&s)[N], const ShapeScale& shape) {
  if (all_squares_below(s, shape.series_limit)) {
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] *= series_at(shape.series, s[i] * s[i]);
  } else {
    // As tanh_by_exp2(), with the factors folded.
#pragma unroll
    for (int i = 0; i < N; ++i)
      s[i] = fmaf(shape.minus_two_caps, rcp_approx(1.0f + exp2_approx(s[i] * shape.product)),
                  shape.cap);
  }
}

// What changes the scores of the two rows of a thread, in a tile. They are eight apart: heads with
// slopes of their own are not packed into rows.
class ScoreShape {
 public:
  ScoreShape() = default;
  // Of rows at this query position, and eight on.
  __device__ __forceinline__ ScoreShape(const PrefillParams& params, const TileWork& work,
                                        int position) {
    if (!params.features.alibi_slopes) return;
    slope_ = __ldg(params.features.alibi_slopes.row(work.batch) + work.head) * kLog2e;
    const int column = 2 * static_cast<int>(threadIdx.x % 4);
    distance_ = static_cast<float>(position + work.shift - column);
  }

  // The scores of the block that begins with this key, from raw products. `for_each_bias(f)` calls
  // f(i, bias of s[i]).
  template <int N, class ForEachBias>
  __device__ __forceinline__ void apply(float (&s)[N], const ShapeScale& scale, int first_key,
                                        ForEachBias for_each_bias) const {
    const int features = features_of(scale);
    if (features & kSoftCap) cap_scores(s, scale);
    const float factor = features & kSoftCap ? 1.0f : scale.product;
    if (features & kAlibi) {
      const float distance = distance_ - static_cast<float>(first_key);
#pragma unroll
      for (int i = 0; i < N; ++i)
        s[i] = fmaf(-slope_, fabsf(distance + row(i) - column(i)), s[i] * factor);
    }
    if (features & kBias) {
      const float left = features == kBias ? factor : 1.0f;
      for_each_bias(
          [&](int i, float bias) { s[i] = fmaf(bounded_bias(bias), kLog2e, s[i] * left); });
    }
  }

  // Their exponentials, beside the references of the rows. Where all keys lie before their queries,
  // which is most blocks of causal attention, ALiBi's distance is linear: no absolute value, and
  // the rows' part of it joins the reference. The soft cap's last factor joins it too. A bias alone
  // is added in natural units, one FFMA a score. That is exact enough since no reference is far
  // from 0 here (kFar); a huge bias need not be bounded, for below it counts nothing, and above the
  // exponentials are infinite and apply() is next.
  template <int N, class ForEachBias>
  __device__ __forceinline__ float2 exponentials(float (&s)[N], const ShapeScale& scale,
                                                 int first_key, ForEachBias for_each_bias,
                                                 float ref0, float ref1) const {
    const int features = features_of(scale);
    if (features == kBias) {
      for_each_bias([&](int i, float bias) { s[i] = fmaf(s[i], scale.natural, bias); });
      return flashattn::exponentials<false>(s, ref0, ref1, kLog2e);
    } else if (features == kAlibi) {
      const float distance = distance_ - static_cast<float>(first_key);
      if (__all_sync(kWholeWarp, distance >= column(N - 1))) {
        const float of_row[2] = {fmaf(-slope_, distance, -ref0),
                                 fmaf(-slope_, distance + 8.f, -ref1)};
        return exponentials_of(s, [&](int i) {
          return fmaf(s[i], scale.product, fmaf(slope_, column(i), of_row[i / 2 % 2]));
        });
      }
    } else if (features == kSoftCap && all_squares_below(s, scale.short_series_limit)) {
      return exponentials_of(s, [&](int i) {
        const float factor = series_at(scale.short_series, s[i] * s[i]);
        return fmaf(s[i], factor, i / 2 % 2 == 0 ? -ref0 : -ref1);
      });
    }
    apply(s, scale, first_key, for_each_bias);
    return flashattn::exponentials<false>(s, ref0, ref1, 1.f);
  }

 private:
  static __device__ constexpr float row(int i) { return static_cast<float>(8 * (i / 2 % 2)); }
  static __device__ constexpr float column(int i) {
    return static_cast<float>(8 * (i / 4) + i % 2);
  }
  static __device__ __forceinline__ int features_of(const ShapeScale& scale) {
    int features = scale.features;
    opaque(features);  // else what is known of it occupies predicates throughout the main loop
    return features;
  }

  float slope_ = 0.f;     // in log2 units
  float distance_ = 0.f;  // of the first row from this thread's first column of a block at key 0
};

// Those of the block that begins with a key, as PlainScores. `for_each_bias(again, f)`: as above; a
// block's bias is to be had once, and again at a price.
template <class ForEachBias>
struct ShapedScores {
  const ScoreShape& shape;
  const ShapeScale& scale;
  int first_key;
  ForEachBias for_each_bias;

  template <int N>
  __device__ __forceinline__ float2 exponentials(float (&s)[N], float ref0, float ref1) const {
    return shape.exponentials(
        s, scale, first_key, [&](auto f) { for_each_bias(false, f); }, ref0, ref1);
  }
  template <int N>
  __device__ __forceinline__ void apply(float (&s)[N], bool again = false) const {
    shape.apply(s, scale, first_key, [&](auto f) { for_each_bias(again, f); });
  }
};
template <class ForEachBias>
ShapedScores(const ScoreShape&, const ShapeScale&, int, ForEachBias) -> ShapedScores<ForEachBias>;

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_SCORE_SHAPE_SM90_CUH_
