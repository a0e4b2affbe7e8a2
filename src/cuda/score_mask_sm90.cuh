// Windows, segments and boolean masks on the accumulators of wgmma (layout: softmax_sm90.cuh).
#ifndef FLASHATTN_CUDA_SCORE_MASK_SM90_CUH_
#define FLASHATTN_CUDA_SCORE_MASK_SM90_CUH_

#include <cmath>
#include <cstdint>

#include "block_finder_sm90.cuh"
#include "params.h"
#include "softmax_sm90.cuh"
#include "tile_scheduler.cuh"

namespace flashattn {

// What the boolean mask shows of a block to the two rows of a thread (PackedMask).
template <int N>
__device__ __forceinline__ void hide_by_mask(float (&s)[N], uint2 seen) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (!((i / 2 % 2 == 0 ? seen.x : seen.y) >> (2 * (i / 4) + i % 2) & 1)) s[i] = -INFINITY;
}

// What the two rows of a thread see. Rows beyond the last of the sequence see what that sees: their
// results are not used, and so they decide nothing either. Every mask fetches what it needs itself:
// registers are scarce.
class RowMasks {
 public:
  // Of rows at these query positions.
  __device__ __forceinline__ RowMasks(const PrefillParams& params, const volatile TileWork& work,
                                      int position0, int position1)
      : params_(params), work_(work) {
    const int last = work.q_len - 1;
    position_[0] = min(position0, last);
    position_[1] = min(position1, last);
  }

  // Scores of the block that these rows do not see for its window or segments become -inf,
  // whatever they were.
  template <int N>
  __device__ __forceinline__ void hide(float (&s)[N], FoundBlock block, int first_key) const {
    if (block.masked_by_edge()) hide_outside_window(s, first_key);
    if (block.masked_by_segments()) hide_other_segments(s, first_key);
  }

  __device__ __forceinline__ bool sees(int row, int key) const {
    const KeyRange keys = window(row);
    if (key < keys.begin || key >= keys.end) return false;
    const Features& features = params_.features;
    if (features.key_segments && __ldg(key_segments() + key) != segment(row)) return false;
    return features.mask.data == nullptr || __ldg(mask(row) + key * features.mask.col) != 0;
  }

 private:
  __device__ static int quad_lane() { return threadIdx.x % 4; }

  __device__ KeyRange window(int row) const {
    Scores scores = params_.scores;
    opaque(scores.window_left);
    opaque(scores.window_right);
    return visible_keys(scores, position_[row], work_.q_len, work_.kv_len);
  }
  __device__ int32_t segment(int row) const {
    return __ldg(params_.features.query_segments.row(work_.batch) + position_[row]);
  }
  __device__ const int32_t* key_segments() const {
    return params_.features.key_segments.row(work_.batch);
  }
  __device__ const uint8_t* mask(int row) const {
    const Broadcast& operand = params_.features.mask;
    return static_cast<const uint8_t*>(operand.data) +
           operand.offset(work_.batch, work_.head, position_[row], 0);
  }

  // One unsigned comparison a score.
  template <int N>
  __device__ __forceinline__ void hide_outside_window(float (&s)[N], int first_key) const {
    uint32_t distance[2], keys[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const KeyRange seen = window(row);
      distance[row] = first_key + 2 * quad_lane() - seen.begin;
      keys[row] = max(seen.end - seen.begin, 0);
    }
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (distance[i / 2 % 2] + (8 * (i / 4) + i % 2) >= keys[i / 2 % 2]) s[i] = -INFINITY;
  }

  // Keys beyond the last are hidden already.
  template <int N>
  __device__ __forceinline__ void hide_other_segments(float (&s)[N], int first_key) const {
    const int32_t row_segments[2] = {segment(0), segment(1)};
    auto address = reinterpret_cast<int64_t>(key_segments());
    opaque(address);  // else it is worked out anew for each
    const auto* segments = reinterpret_cast<const int32_t*>(address);
    const int key = first_key + 2 * quad_lane(), last_key = work_.kv_len - 1;
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
      // Rarely true. The branch keeps the compiler from loading everything at once, for which there
      // are no registers.
      if (j % 2 == 0 && first_key + 8 * j > last_key) break;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int32_t segment = __ldg(segments + min(key + 8 * j + e, last_key));
#pragma unroll
        for (int row = 0; row < 2; ++row)
          if (segment != row_segments[row]) s[4 * j + 2 * row + e] = -INFINITY;
      }
    }
  }

  const PrefillParams& params_;
  const volatile TileWork& work_;
  int position_[2];
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_SCORE_MASK_SM90_CUH_
