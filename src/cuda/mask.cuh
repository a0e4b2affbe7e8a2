// Windows, masks, segments and score features, applied to the score fragments of mma.sync (layout:
// softmax.cuh) and, where whole tiles are hidden, to the choice of tiles.
#ifndef FLASHATTN_CUDA_MASK_CUH_
#define FLASHATTN_CUDA_MASK_CUH_

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "params.h"
#include "ptx.cuh"
#include "score.cuh"
#include "tiles_sm80.h"

namespace flashattn {

// Where a thread's part of a warp's score fragment lies; columns are keys. Rows beyond last_row
// repeat it: their results are not used, and so they decide nothing either.
struct FragmentPlace {
  int first_row, last_row;  // of this lane; of the warp
  int first_key;            // of the tile
  int lane;

  __device__ FragmentPlace(int warp_first_row, int warp_last_row, int tile_first_key, int lane)
      : first_row(warp_first_row + lane / 4),
        last_row(warp_last_row),
        first_key(tile_first_key),
        lane(lane) {}

  __device__ int row(int r) const { return min(first_row + 8 * r, last_row); }
  __device__ int key() const { return first_key + 2 * (lane % 4); }
};

// The window and the lengths: a band of diagonals, the same for all rows but for the end of the
// keys. One unsigned comparison a score, of its distance from the lowest diagonal. All in 32 bits:
// unlimited sides are kUnlimited away, and differences of unsigned numbers do not overflow.
template <int RowBlocks, int N>
__device__ __forceinline__ void mask_window(float (&s)[RowBlocks][N][4], const Sequence& sequence,
                                            const FragmentPlace& place) {
  const uint32_t low = sequence.low;
#pragma unroll
  for (int r = 0; r < 2 * RowBlocks; ++r) {
    const int row = place.row(r);
    const int high = min(sequence.high, sequence.kv_len - 1 - row);
    const uint32_t count = high >= sequence.low ? high - low + 1 : 0;
    const uint32_t distance = place.key() - row - low;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (distance + 8 * n + e >= count) s[r / 2][n][r % 2 * 2 + e] = -INFINITY;
      }
    }
  }
}

// Scores enter the softmax as 2^(exponent * s). Without a feature that changes scores s is the raw
// product and exponent holds the scale; with one, s is made a logit in log2 units first.
struct ScoreScale {
  float exponent;
  float product;  // multiplies the raw product first; with a cap, gives the power of two tanh needs
  float cap;      // in log2 units; 0: none
  float minus_two_caps;
};

inline ScoreScale make_score_scale(const Scores& scores, const Features& features) {
  const double log2_scale = scores.scale * kLog2e;
  if (scores.softcap > 0.0) {
    const float cap = static_cast<float>(scores.softcap * kLog2e);
    return {1.0f, static_cast<float>(2.0 * log2_scale / scores.softcap), cap, -2.0f * cap};
  }
  if (features.alibi_slopes || features.bias.data) {
    return {1.0f, static_cast<float>(log2_scale), 0.0f, 0.0f};
  }
  // A scale of 0 would make NaN of hidden keys, 0 * -inf; the least positive one gives the same
  // result.
  const float exponent = static_cast<float>(log2_scale);
  return {exponent > FLT_MIN ? exponent : FLT_MIN, 1.0f, 0.0f, 0.0f};
}

// The features of one head of one sequence. Kept in shared memory, since registers are scarce.
struct HeadFeatures {
  const uint8_t* mask;            // (T, S)
  const void* bias;               // (T, S)
  const int32_t* query_segments;  // (T)
  const int32_t* key_segments;    // (S)
  float alibi_slope;

  __device__ void fill(const Features& features, int b, int n) {
    const Broadcast& m = features.mask;
    mask = m.data ? static_cast<const uint8_t*>(m.data) + m.offset(b, n, 0, 0) : nullptr;
    const Broadcast& add = features.bias;
    bias = add.data
               ? static_cast<const char*>(add.data) + add.offset(b, n, 0, 0) * byte_width(add.dtype)
               : nullptr;
    query_segments = features.query_segments ? features.query_segments.row(b) : nullptr;
    key_segments = features.key_segments ? features.key_segments.row(b) : nullptr;
    alibi_slope = features.alibi_slopes ? features.alibi_slopes.row(b)[n] : 0.0f;
  }
};

// cap * tanh(x / cap) from the accurate form of tanh_by_exp2(), with the factors folded.
template <int RowBlocks, int N>
__device__ __forceinline__ void cap_scores(float (&s)[RowBlocks][N][4], const ScoreScale& scale) {
#pragma unroll
  for (int i = 0; i < RowBlocks * N * 4; ++i) {
    float& score = s[i / 4 / N][i / 4 % N][i % 4];
    score = fmaf(scale.minus_two_caps, rcp_approx(1.0f + exp2_approx(score * scale.product)),
                 scale.cap);
  }
}

template <int RowBlocks, int N>
__device__ __forceinline__ void scale_scores(float (&s)[RowBlocks][N][4], float factor) {
#pragma unroll
  for (int i = 0; i < RowBlocks * N * 4; ++i) s[i / 4 / N][i / 4 % N][i % 4] *= factor;
}

template <int RowBlocks, int N>
__device__ __forceinline__ void add_alibi(float (&s)[RowBlocks][N][4], float slope, int shift,
                                          const FragmentPlace& place) {
  const float log2_slope = slope * kLog2e;
#pragma unroll
  for (int r = 0; r < 2 * RowBlocks; ++r) {
    const float distance = static_cast<float>(place.row(r) + shift - place.key());
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = s[r / 2][n][r % 2 * 2 + e];
        score = fmaf(-log2_slope, fabsf(distance - (8.0f * n + e)), score);
      }
    }
  }
}

// `keys` is the operand's width: it has nothing for later keys, which are masked anyway.
template <class B, int RowBlocks, int N>
__device__ __forceinline__ void add_bias(float (&s)[RowBlocks][N][4], const B* bias,
                                         int64_t row_stride, int64_t col_stride, int keys,
                                         const FragmentPlace& place) {
  const B* at[2 * RowBlocks];
#pragma unroll
  for (int r = 0; r < 2 * RowBlocks; ++r) {
    at[r] = bias + place.row(r) * row_stride + place.key() * col_stride;
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    // Always true but in the last tile. The branch keeps the compiler from loading everything at
    // once, for which there are no registers.
    if (place.first_key + 8 * n >= keys) break;
#pragma unroll
    for (int r = 0; r < 2 * RowBlocks; ++r) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = s[r / 2][n][r % 2 * 2 + e];
        if (place.key() + 8 * n + e < keys) {
          const float addend = static_cast<float>(__ldg(at[r] + e * col_stride));
          score = fmaf(bounded_bias(addend), kLog2e, score);
        }
      }
      at[r] += 8 * col_stride;
    }
  }
}

// Everything that changes the value of visible scores.
template <int RowBlocks, int N>
__device__ __forceinline__ void shape_scores(float (&s)[RowBlocks][N][4],
                                             const PrefillParams& params, const ScoreScale& scale,
                                             const HeadFeatures& head, int shift,
                                             const FragmentPlace& place) {
  const Broadcast& bias = params.features.bias;
  if (scale.cap > 0.0f) {
    cap_scores(s, scale);
  } else if (scale.product != 1.0f) {
    scale_scores(s, scale.product);
  }
  if (params.features.alibi_slopes) add_alibi(s, head.alibi_slope, shift, place);
  if (bias.data == nullptr) return;
  const int keys = params.problem.kv_len;
  switch (bias.dtype) {
    case DType::kF32:
      return add_bias(s, static_cast<const float*>(head.bias), bias.row, bias.col, keys, place);
    case DType::kF16:
      return add_bias(s, static_cast<const __half*>(head.bias), bias.row, bias.col, keys, place);
    default:
      return add_bias(s, static_cast<const __nv_bfloat16*>(head.bias), bias.row, bias.col, keys,
                      place);
  }
}

struct Extent {
  int least, most;

  __device__ bool overlaps(const Extent& other) const {
    return least <= other.most && other.least <= most;
  }
  __device__ bool is_only(const Extent& other) const {
    return least == most && other.least == least && other.most == least;
  }
};

// The least and the greatest segment of entries [first, last], by a whole warp.
template <int Count>
__device__ __forceinline__ Extent segment_extent(const int32_t* segments, int first, int last,
                                                 int lane) {
  int least = INT32_MAX, most = INT32_MIN;
#pragma unroll
  for (int i = 0; i < Count; i += 32) {
    const int segment = __ldg(segments + min(first + i + lane, last));
    least = min(least, segment);
    most = max(most, segment);
  }
  return {__reduce_min_sync(~0u, least), __reduce_max_sync(~0u, most)};
}

// The keys of a tile that one lane takes care of while a quad gathers the bits of its rows
// together: 16 of the 64, so that a full mask is read in 16-byte pieces. Bit i of quarter[r] is key
// i for row r.
template <int Rows>
struct QuarterBits {
  static_assert(kPrefillBlockKv == 64, "four lanes with 16 keys each");
  uint32_t quarter[Rows];

  __device__ __forceinline__ QuarterBits() {
#pragma unroll
    for (int r = 0; r < Rows; ++r) quarter[r] = 0xffffu;
  }

  __device__ __forceinline__ void intersect_mask(const uint8_t* mask, const Broadcast& operand,
                                                 int keys, const FragmentPlace& place) {
    const int key = place.first_key + 16 * (place.lane % 4);
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      const uint8_t* row = mask + place.row(r) * operand.row + key * operand.col;
      const bool in_one_piece =
          operand.col == 1 && key + 16 <= keys && reinterpret_cast<uintptr_t>(row) % 16 == 0;
      quarter[r] &= in_one_piece ? bits_of_bytes(__ldg(reinterpret_cast<const uint4*>(row)))
                                 : bits_one_by_one(row, operand.col, keys - key);
    }
  }

  __device__ __forceinline__ void intersect_segments(const HeadFeatures& head, int keys,
                                                     const FragmentPlace& place) {
    const int key = place.first_key + 16 * (place.lane % 4);
    int32_t row_segments[Rows];
    uint32_t same[Rows] = {};
#pragma unroll
    for (int r = 0; r < Rows; ++r) row_segments[r] = __ldg(head.query_segments + place.row(r));
#pragma unroll 4
    for (int i = 0; i < 16; ++i) {
      const int32_t segment = __ldg(head.key_segments + min(key + i, keys - 1));
#pragma unroll
      for (int r = 0; r < Rows; ++r) same[r] |= (row_segments[r] == segment ? 1u : 0u) << i;
    }
#pragma unroll
    for (int r = 0; r < Rows; ++r) quarter[r] &= same[r];
  }

 private:
  static __device__ __forceinline__ uint32_t bits_of_bytes(const uint4& bytes) {
    const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    uint32_t bits = 0;
    // Bytes are 0 or 1; the product carries byte i to bit 28 + i.
#pragma unroll
    for (int i = 0; i < 4; ++i) bits |= words[i] * 0x10204080u >> 28 << (4 * i);
    return bits;
  }
  static __device__ __forceinline__ uint32_t bits_one_by_one(const uint8_t* row, int64_t stride,
                                                             int count) {
    uint32_t bits = 0;
#pragma unroll 4
    for (int i = 0; i < 16; ++i) {
      if (i < count) bits |= (__ldg(row + i * stride) ? 1u : 0u) << i;
    }
    return bits;
  }
};

// Which of a thread's scores are visible: 16 bits a row, one register for two rows.
template <int RowBlocks>
struct ScoreBits {
  uint32_t of_block[RowBlocks];

  __device__ __forceinline__ void see_all() {
#pragma unroll
    for (int m = 0; m < RowBlocks; ++m) of_block[m] = ~0u;
  }

  __device__ __forceinline__ void see_nothing() {
#pragma unroll
    for (int m = 0; m < RowBlocks; ++m) of_block[m] = 0;
  }

  // Whether any row of the warp sees a key.
  __device__ __forceinline__ bool any() const {
    uint32_t any = 0;
#pragma unroll
    for (int m = 0; m < RowBlocks; ++m) any |= of_block[m];
    return __any_sync(~0u, any != 0);
  }

  // Exchanges the quarters within the quads.
  __device__ __forceinline__ void gather(const QuarterBits<2 * RowBlocks>& quarters, int lane) {
    const int place_in_quad = lane % 4;
#pragma unroll
    for (int r = 0; r < 2 * RowBlocks; ++r) {
      uint32_t own = quarters.quarter[r] << (16 * (place_in_quad & 1));
      own |= __shfl_xor_sync(~0u, own, 1);
      const uint32_t other = __shfl_xor_sync(~0u, own, 2);
      // Keys 0 to 31 and 32 to 63; of each, this lane's scores are two bits of every byte.
      const uint32_t low = (place_in_quad < 2 ? own : other) >> (2 * place_in_quad);
      const uint32_t high = (place_in_quad < 2 ? other : own) >> (2 * place_in_quad);
      const uint32_t bits = (low & 0x03030303u) | (high & 0x03030303u) << 2;
      of_block[r / 2] = r % 2 == 0 ? bits : of_block[r / 2] | bits << 4;
    }
  }

  // Whether this lane's row r sees key i of the tile. By the whole warp: the lanes of a quad hold
  // different keys.
  __device__ __forceinline__ bool sees(int r, int i) const {
    const uint32_t bits = __shfl_sync(~0u, of_block[r / 2], i % 8 / 2, 4);
    return bits >> bit(i / 8, 2 * (r % 2) + i % 2) & 1;
  }

  template <int N>
  __device__ __forceinline__ void apply(float (&s)[RowBlocks][N][4]) const {
    bool hides = false;
#pragma unroll
    for (int m = 0; m < RowBlocks; ++m) hides |= of_block[m] != ~0u;
    if (!__any_sync(~0u, hides)) return;
#pragma unroll
    for (int m = 0; m < RowBlocks; ++m) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (!(of_block[m] & (1u << bit(n, e)))) s[m][n][e] = -INFINITY;
        }
      }
    }
  }

 private:
  // Of element e of the 8 columns n of a 16-row block.
  static __device__ __forceinline__ int bit(int n, int e) {
    return 8 * (n % 4) + 4 * (e / 2) + 2 * (n / 4) + e % 2;
  }
};

// Looks at the mask and the segments before anything is computed: most tiles of packed documents or
// of a block mask are seen wholly or not at all.
template <int RowBlocks>
__device__ __forceinline__ void look_at_tile(ScoreBits<RowBlocks>& bits,
                                             const PrefillParams& params, const HeadFeatures& head,
                                             const Extent& row_segments,
                                             const FragmentPlace& place) {
  const int keys = params.problem.kv_len;
  bits.see_all();
  bool same_segment = true;
  if (head.key_segments) {
    const Extent tile_segments =
        segment_extent<kPrefillBlockKv>(head.key_segments, place.first_key, keys - 1, place.lane);
    if (!tile_segments.overlaps(row_segments)) return bits.see_nothing();
    same_segment = row_segments.is_only(tile_segments);
  }
  if (same_segment && !head.mask) return;
  QuarterBits<2 * RowBlocks> quarters;
  if (head.mask) quarters.intersect_mask(head.mask, params.features.mask, keys, place);
  if (!same_segment) quarters.intersect_segments(head, keys, place);
  bits.gather(quarters, place.lane);
}

// The tiles that a block visits, in order: those whose segments, or whose keys in a mask that is
// the same for all rows, leave something to see. It looks at 32 tiles at a time, every warp at some
// of them. Lies in shared memory.
class TileFinder {
 public:
  Extent block_segments;    // of the block's query rows
  Extent warp_segments[8];  // of each warp's

  // By one thread, before a barrier.
  __device__ void start(int end) {
    end_ = end;
    known_ = 0;
    known_end_ = 0;
  }

  __device__ int end() const { return end_; }

  // The first tile to visit from `tile` on, or the end. Called by the whole block.
  __device__ int from(int tile, const PrefillParams& params, const HeadFeatures& head) {
    if (!head.key_segments && !same_mask_for_all_rows(params)) return tile;
    while (tile < end_) {
      if (tile >= known_end_) look(tile, params, head);
      const uint32_t rest = known_ >> (32 - (known_end_ - tile));
      if (rest != 0) return tile + __ffs(rest) - 1;
      tile = known_end_;
    }
    return end_;
  }

 private:
  static __device__ bool same_mask_for_all_rows(const PrefillParams& params) {
    return params.features.mask.data && params.features.mask.row == 0;
  }

  __device__ void look(int first, const PrefillParams& params, const HeadFeatures& head) {
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
    uint32_t found = 0;
    for (int i = warp; i < min(32, end_ - first); i += warps) {
      if (has_visible_key((first + i) * kPrefillBlockKv, params, head, lane)) found |= 1u << i;
    }
    if (lane == 0) findings_[warp] = found;
    __syncthreads();  // also: all threads have seen that there is nothing known of `first`
    if (threadIdx.x == 0) {
      for (int i = 0; i < warps; ++i) found |= findings_[i];
      known_ = found;
      known_end_ = first + 32;
    }
    __syncthreads();
  }

  __device__ bool has_visible_key(int first_key, const PrefillParams& params,
                                  const HeadFeatures& head, int lane) const {
    const int last_key = params.problem.kv_len - 1;
    bool visible = true;
    if (head.key_segments) {
      visible = segment_extent<kPrefillBlockKv>(head.key_segments, first_key, last_key, lane)
                    .overlaps(block_segments);
    }
    if (same_mask_for_all_rows(params) && visible) {
      bool any = false;
#pragma unroll
      for (int i = 0; i < kPrefillBlockKv; i += 32) {
        const int64_t key = min(first_key + i + lane, last_key);
        any |= __ldg(head.mask + key * params.features.mask.col) != 0;
      }
      visible = __any_sync(~0u, any);
    }
    return visible;
  }

  int end_;
  int known_end_;         // known_ tells of the 32 tiles before this one
  uint32_t known_;        // bit i: tile known_end_ - 32 + i is to be visited
  uint32_t findings_[8];  // of each warp
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_MASK_CUH_
