// One tile of one warp: scores, online softmax, and the weighted values.
#ifndef FLASHATTN_CUDA_DECODE_TILE_CUH_
#define FLASHATTN_CUDA_DECODE_TILE_CUH_

#include "decode_cache.cuh"
#include "decode_query.cuh"
#include "score.cuh"

namespace flashattn {

// The scores of a tile: lane l has tokens l / 4 and l / 4 + 8 of each block of 16 and, of each
// column block, columns 2 (l % 4) + {0, 1}, in the order of an accumulator.
template <class Shape>
using TileScores = float[Shape::kColumnBlocks][Shape::kTokenBlocks][4];

template <class Shape, class Query>
__device__ __forceinline__ void score_tile(TileScores<Shape>& scores, uint32_t keys,
                                           const Query& query, int lane) {
  using Product = typename Shape::Product;
  // Two chains of products where one column block would leave the tensor cores waiting for each
  // other.
  constexpr int kChains = Shape::kColumnBlocks == 1 ? 2 : 1;
  float chains[kChains][Shape::kColumnBlocks][Shape::kTokenBlocks][4] = {};
  const uint32_t lane_keys = keys + Shape::place(lane & 15, lane >> 4);
#pragma unroll
  for (int load = 0; load < Shape::kLoads; ++load)
#pragma unroll
    for (int n = 0; n < Shape::kTokenBlocks; ++n) {
      uint32_t a[Shape::kStepsPerLoad][4];
      load_key_fragments<Shape>(a, Shape::move(lane_keys, 16 * n, 2 * load));
#pragma unroll
      for (int step = 0; step < Shape::kStepsPerLoad; ++step) {
        const int j = load * Shape::kStepsPerLoad + step;
#pragma unroll
        for (int c = 0; c < Shape::kColumnBlocks; ++c) {
          const uint2 b = query.get(c, j, lane);
          mma_m16n8k16<Product>(chains[j % kChains][c][n], a[step], b.x, b.y);
        }
      }
    }
#pragma unroll
  for (int c = 0; c < Shape::kColumnBlocks; ++c)
#pragma unroll
    for (int n = 0; n < Shape::kTokenBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        scores[c][n][i] =
            kChains == 1 ? chains[0][c][n][i] : chains[0][c][n][i] + chains[kChains - 1][c][n][i];
}

// Caps scores, of which `to_log2` makes log2 units; the results are in those units.
template <class Shape>
__device__ __forceinline__ void cap_scores(TileScores<Shape>& scores, float cap, float to_log2) {
  const float inner = to_log2 * kLn2 / cap, outer = cap * kLog2e;
#pragma unroll
  for (int c = 0; c < Shape::kColumnBlocks; ++c)
#pragma unroll
    for (int n = 0; n < Shape::kTokenBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[c][n][i] = outer * tanh_by_exp2(scores[c][n][i] * inner);
}

// Hides what a row does not see: tokens that are not `present`, and those behind its own or in
// front of its window. Tiles wholly inside every row's keys have none.
template <class Shape>
__device__ __forceinline__ void hide_scores(TileScores<Shape>& scores, const DecodeArgs& args,
                                            const DecodeBlock& block, int tile, uint32_t present,
                                            int lane) {
  const int first = tile * Shape::kTileTokens;
  const bool inside =
      first >= block.interior.begin && first + Shape::kTileTokens <= block.interior.end;
  if (inside && present == Shape::kAllTokens) return;
#pragma unroll
  for (int c = 0; c < Shape::kColumnBlocks; ++c)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t visible = present;
      if (args.last_token > 0) {
        const int row = block.row_of_column(c * kDecodeColumns + 2 * (lane % 4) + h);
        visible &= tokens_among(block.keys_of(row, args), first);
      }
#pragma unroll
      for (int n = 0; n < Shape::kTokenBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if ((visible >> lane / 4 >> (16 * n + 8 * i) & 1) == 0)
            scores[c][n][2 * i + h] = -INFINITY;
    }
}

// The largest, and the sum, of a value over the lanes with the same columns.
__device__ __forceinline__ float max_over_tokens(float x) {
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
  return x;
}
__device__ __forceinline__ float sum_over_tokens(float x) {
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}

// The unnormalised output of one warp, transposed: lane l has dims l / 4 and l / 4 + 8 of each dim
// block (see load_value_fragments for 8-bit caches) of columns 2 (l % 4) + {0, 1}.
template <class Shape>
struct WarpState {
  float out[Shape::kColumnBlocks][Shape::kDimBlocks][4] = {};
  float sum[Shape::kColumnBlocks][4] = {};  // of rounded weights, by a product: rows all alike
  float exact_sum[Shape::kColumnBlocks][2] = {};  // of this lane's tokens, before rounding
  float max[Shape::kColumnBlocks][2];
  float value_scale = 0.0f;  // 8-bit caches: out is in units of it

  __device__ WarpState() {
#pragma unroll
    for (int c = 0; c < Shape::kColumnBlocks; ++c) max[c][0] = max[c][1] = kNoScore;
  }
};

// Raises the maxima to those of the tile and scales the past accordingly. The vote makes the branch
// uniform and rare.
template <class Shape>
__device__ __forceinline__ void raise_maxima(WarpState<Shape>& state,
                                             const TileScores<Shape>& scores, float to_log2) {
  float tile_max[Shape::kColumnBlocks][2];
  bool above = false;
#pragma unroll
  for (int c = 0; c < Shape::kColumnBlocks; ++c)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = -INFINITY;
#pragma unroll
      for (int n = 0; n < Shape::kTokenBlocks; ++n)
        x = fmaxf(x, fmaxf(scores[c][n][h], scores[c][n][2 + h]));
      tile_max[c][h] = x * to_log2;
      above |= tile_max[c][h] > state.max[c][h] + kMaxLag;
    }
  if (!__any_sync(~0u, above)) return;
#pragma unroll
  for (int c = 0; c < Shape::kColumnBlocks; ++c) {
    float scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float max = fmaxf(max_over_tokens(tile_max[c][h]), state.max[c][h]);
      scale[h] = exp2_approx(state.max[c][h] - max);
      state.max[c][h] = max;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) state.sum[c][i] *= scale[i % 2];
#pragma unroll
    for (int h = 0; h < 2; ++h) state.exact_sum[c][h] *= scale[h];
#pragma unroll
    for (int j = 0; j < Shape::kDimBlocks; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) state.out[c][j][i] *= scale[i % 2];
  }
}

// The weights of a tile as B fragments, 16 tokens x 8 columns each.
template <class Shape>
using TileWeights = uint32_t[Shape::kColumnBlocks][Shape::kTokenBlocks][2];

// Scores become weights exp2(score - max), still in the order of the accumulators.
template <class Shape>
__device__ __forceinline__ void exponentiate(TileScores<Shape>& scores,
                                             const WarpState<Shape>& state, float to_log2) {
#pragma unroll
  for (int c = 0; c < Shape::kColumnBlocks; ++c)
#pragma unroll
    for (int n = 0; n < Shape::kTokenBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        scores[c][n][i] = exp2_approx(fmaf(scores[c][n][i], to_log2, -state.max[c][i % 2]));
}

template <class Shape>
__device__ __forceinline__ void pack_weights(TileWeights<Shape>& packed,
                                             const TileScores<Shape>& weights) {
#pragma unroll
  for (int c = 0; c < Shape::kColumnBlocks; ++c)
#pragma unroll
    for (int n = 0; n < Shape::kTokenBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        packed[c][n][i] = movmatrix_trans(
            pack<typename Shape::Product>(weights[c][n][2 * i], weights[c][n][2 * i + 1]));
}

// The rounded weights, the ones that multiply V, are what the output is divided by, so that a
// constant V comes out exactly. The lse wants the exact ones.
template <class Shape>
__device__ __forceinline__ void sum_weights(WarpState<Shape>& state,
                                            const TileWeights<Shape>& packed,
                                            const TileScores<Shape>& exact) {
  using Product = typename Shape::Product;
  const uint32_t one = pack<Product>(1.0f, 1.0f);
  const uint32_t ones[4] = {one, one, one, one};
#pragma unroll
  for (int c = 0; c < Shape::kColumnBlocks; ++c)
#pragma unroll
    for (int n = 0; n < Shape::kTokenBlocks; ++n) {
      mma_m16n8k16<Product>(state.sum[c], ones, packed[c][n][0], packed[c][n][1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) state.exact_sum[c][i % 2] += exact[c][n][i];
    }
}

// From scores, of which `to_log2` makes log2 units, to weights: as fragments, and exact in
// `scores`.
template <class Shape>
__device__ __forceinline__ void weigh_tile(WarpState<Shape>& state, TileScores<Shape>& scores,
                                           TileWeights<Shape>& weights, float to_log2) {
  raise_maxima<Shape>(state, scores, to_log2);
  exponentiate<Shape>(scores, state, to_log2);
  pack_weights<Shape>(weights, scores);
  sum_weights<Shape>(state, weights, scores);
}

// Scales by page: weights take the scale of their token, in units of the largest seen so far.
template <class Shape>
__device__ __forceinline__ void scale_weights(TileScores<Shape>& weights, WarpState<Shape>& state,
                                              const float* value_scales, int lane) {
  float scale[Shape::kTokenBlocks][2];
  float largest = 0.0f;
#pragma unroll
  for (int n = 0; n < Shape::kTokenBlocks; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale[n][i] = value_scales[16 * n + 8 * i + lane / 4];
      largest = fmaxf(largest, fabsf(scale[n][i]));
    }
  largest = max_over_tokens(largest);
  if (largest > state.value_scale) {
    const float down = state.value_scale / largest;
    state.value_scale = largest;
#pragma unroll
    for (int c = 0; c < Shape::kColumnBlocks; ++c)
#pragma unroll
      for (int j = 0; j < Shape::kDimBlocks; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) state.out[c][j][i] *= down;
  }
  const float unit = state.value_scale > 0.0f ? 1.0f / state.value_scale : 0.0f;
#pragma unroll
  for (int c = 0; c < Shape::kColumnBlocks; ++c)
#pragma unroll
    for (int n = 0; n < Shape::kTokenBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[c][n][i] *= scale[n][i / 2] * unit;
}

template <class Shape>
__device__ __forceinline__ void accumulate_values(WarpState<Shape>& state, uint32_t values,
                                                  const TileWeights<Shape>& packed, int lane) {
  using Product = typename Shape::Product;
  const uint32_t lane_values = values + Shape::place((lane & 7) + 8 * (lane >> 4), (lane >> 3) & 1);
#pragma unroll
  for (int n = 0; n < Shape::kTokenBlocks; ++n)
#pragma unroll
    for (int load = 0; load < Shape::kLoads; ++load) {
      uint32_t a[Shape::kStepsPerLoad][4];
      load_value_fragments<Shape>(a, Shape::move(lane_values, 16 * n, 2 * load));
#pragma unroll
      for (int step = 0; step < Shape::kStepsPerLoad; ++step)
#pragma unroll
        for (int c = 0; c < Shape::kColumnBlocks; ++c)
          mma_m16n8k16<Product>(state.out[c][load * Shape::kStepsPerLoad + step], a[step],
                                packed[c][n][0], packed[c][n][1]);
    }
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_DECODE_TILE_CUH_
