// The walk of one block of the generic backward: which rows it owns and which it streams, who sees
// whom among them, and the way from products to p and ds. backward_sm80.cuh has the algorithm.
#ifndef FLASHATTN_CUDA_BACKWARD_SM80_WALK_CUH_
#define FLASHATTN_CUDA_BACKWARD_SM80_WALK_CUH_

#include <cstdint>

#include "backward_sm80_rows.cuh"
#include "backward_tile.cuh"
#include "params.h"
#include "ptx.cuh"
#include "score.cuh"

namespace flashattn {

constexpr int kStreamedRows = 32;  // one bit each in a word

enum class Owned { kKeys, kQueries };

// What a warp accumulates: dx0, dx1 or both. dK and dV together do not fit the registers above 128
// columns; there half of the warps sum one and half the other, both forming s and p.
enum class Sums { kScores, kValues, kBoth };

// A step of the walk: the first streamed row, and the query head it is done for.
struct StreamPosition {
  int q_head, first;
};

template <class Config>
class BackwardSm80Walk {
 protected:
  using T = typename Config::T;
  static constexpr bool kOwnsKeys = Config::kOwnsKeys;
  static constexpr bool kWritesDbias = Config::kFeatured && !kOwnsKeys;
  static constexpr int kRowTiles = Config::kRowTiles;

  // `part`: of the blocks that own the same rows and differ in the columns they sum up.
  __device__ BackwardSm80Walk(const BackwardParams& params, unsigned char* memory, int index,
                              int part)
      : params_(params),
        forward_(params.forward),
        problem_(params.forward.problem),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32),
        rows_(Config::owned_rows(warps())),
        capacity_(kOwnsKeys ? problem_.kv_len : problem_.q_len),
        tile_(index % tiles()),
        head_(index / tiles() % heads()),
        sequence_(params.forward, index / tiles() / heads()),
        // Under a causal mask the first keys and the last queries have most to do; they go first.
        first_row_((kOwnsKeys ? tile_ : tiles() - 1 - tile_) * rows_),
        part_(part),
        memory_(memory),
        shared_(shared_address(memory)),
        y0_(kOwnsKeys ? forward_.q : forward_.k, sequence_.batch, streamed_head(),
            problem_.head_dim),
        y1_(kOwnsKeys ? params_.dout : forward_.v, sequence_.batch, streamed_head(),
            problem_.value_dim) {
    const int last_row = first_row_ + rows_ - 1;
    streamed_ = kOwnsKeys ? sequence_.queries_seeing(first_row_, last_row)
                          : sequence_.keys_seen_by(first_row_, last_row);
    if (first_row_ >= length()) streamed_.end = streamed_.begin;
  }

  static __device__ int warps() {
    return Config::kFixedWarps ? Config::kMaxWarps : static_cast<int>(blockDim.x) / 32;
  }
  static __device__ int threads() { return 32 * warps(); }
  __device__ int tiles() const { return (capacity_ + rows_ - 1) / rows_; }
  __device__ int heads() const { return kOwnsKeys ? problem_.kv_heads : problem_.q_heads; }
  __device__ int length() const { return kOwnsKeys ? sequence_.kv_len : sequence_.q_len; }

  __device__ int streamed_head() const { return kOwnsKeys ? 0 : head_ / problem_.group(); }

  // The warp's first row within the block's tile.
  __device__ int warp_row() const {
    const int index = Config::kSplitsSums ? warp_ % (warps() / 2) : warp_;
    return index * 16 * kRowTiles;
  }

  // A step's statistics are fetched 16 bytes at a time, so steps are aligned.
  __device__ int first_step() const { return streamed_.begin / kStreamedRows * kStreamedRows; }

  // With segments, streamed rows before the first and after the last one whose segment is in the
  // range of the owned rows' segments meet none of them: sorted segments cost what their rows cost.
  __device__ void narrow_to_segments() {
    if (streamed_.begin >= streamed_.end) return;
    const int32_t* queries = forward_.features.query_segments.row(sequence_.batch);
    const int32_t* keys = forward_.features.key_segments.row(sequence_.batch);
    const int32_t* owned = kOwnsKeys ? keys : queries;
    const int32_t* streamed = kOwnsKeys ? queries : keys;
    int low = kUnlimited, high = -kUnlimited;
    for (int row = first_row_ + lane_; row < min(first_row_ + rows_, length()); row += 32) {
      low = min(low, owned[row]);
      high = max(high, owned[row]);
    }
    low = __reduce_min_sync(~0u, low);
    high = __reduce_max_sync(~0u, high);

    Range range = {streamed_.end, streamed_.begin};
    for (int row = streamed_.begin + threadIdx.x; row < streamed_.end; row += threads()) {
      if (streamed[row] < low || streamed[row] > high) continue;
      range.begin = min(range.begin, row);
      range.end = max(range.end, row + 1);
    }
    Range* ranges = reinterpret_cast<Range*>(memory_);  // before any row is in it
    range = {__reduce_min_sync(~0u, range.begin), __reduce_max_sync(~0u, range.end)};
    if (lane_ == 0) ranges[warp_] = range;
    __syncthreads();
    for (int w = 0; w < warps(); ++w) {
      range = {min(range.begin, ranges[w].begin), max(range.end, ranges[w].end)};
    }
    __syncthreads();
    streamed_ = range;
  }

  __device__ StreamPosition first_position() const {
    return {kOwnsKeys ? head_ * problem_.group() : head_, first_step()};
  }
  __device__ StreamPosition next(StreamPosition at) const {
    at.first += kStreamedRows;
    if (kOwnsKeys && at.first >= streamed_.end) at = {at.q_head + 1, first_step()};
    return at;
  }

  __device__ int step_count() const {
    if (streamed_.begin >= streamed_.end) return 0;
    const int steps = (streamed_.end - first_step() + kStreamedRows - 1) / kStreamedRows;
    return kOwnsKeys ? steps * problem_.group() : steps;
  }

  // A lane's elements of the warp's owned rows by streamed rows, the first of these being at.first
  // + first: n8 tiles outermost, then as in an accumulator. Columns 8 tile + 2 (lane % 4) + {0, 1}.
  static constexpr int kTileElements = 4 * kRowTiles;

  struct Pair {
    int i, j;
  };
  __device__ Pair pair_at(const StreamPosition& at, int first, int tile, int element) const {
    const int owned = first_row_ + warp_row() + 8 * (element / 2) + lane_ / 4;
    const int streamed = at.first + first + 8 * tile + 2 * (lane_ % 4) + element % 2;
    return kOwnsKeys ? Pair{streamed, owned} : Pair{owned, streamed};
  }

  // A bit an element.
  template <int Groups>
  __device__ __forceinline__ uint32_t visible_elements(const StreamPosition& at, int first) const {
    static_assert(2 * Groups * kTileElements <= 32, "bits of a word");
    const ScoreMap<Config::kFeatured> map(forward_, sequence_, at.q_head);
    uint32_t visible = 0;
#pragma unroll
    for (int bit = 0; bit < 2 * Groups * kTileElements; ++bit) {
      const Pair pair = pair_at(at, first, bit / kTileElements, bit % kTileElements);
      if (sequence_.sees(pair.i, pair.j) && !map.hides(pair.i, pair.j)) visible |= 1u << bit;
    }
    return visible;
  }

  // A bit for each streamed row that one of the lane's owned rows sees.
  template <int Groups>
  __device__ __forceinline__ uint32_t visible_columns(uint32_t visible) const {
    uint32_t columns = 0;
#pragma unroll
    for (int bit = 0; bit < 2 * Groups * kTileElements; ++bit) {
      columns |= (visible >> bit & 1) << (bit / kTileElements * 8 + bit % 2);
    }
    return columns << 2 * (lane_ % 4);
  }

  // Products to p, and dp to ds.
  // Owned keys find the statistics of the step's rows at `statistics`, two rows a float4.
  template <bool Masked, int Groups>
  __device__ __forceinline__ void weigh(const float4* statistics, const StreamPosition& at,
                                        int first, uint32_t visible,
                                        float (&p)[kRowTiles][Groups][8],
                                        float (&ds)[kRowTiles][Groups][8]) const {
    const ScoreMap<Config::kFeatured> map(forward_, sequence_, at.q_head);
#pragma unroll
    for (int tile = 0; tile < 2 * Groups; ++tile) {
      float4 rows;  // owned keys: statistics of the tile's two columns
      if constexpr (kOwnsKeys) {
        rows = statistics[first / 2 + 4 * tile + lane_ % 4];
      }
#pragma unroll
      for (int element = 0; element < kTileElements; ++element) {
        const int r = element / 4, half = element % 4 / 2, odd = element % 2;
        const Pair pair = pair_at(at, first, tile, element);
        const float lse2 = kOwnsKeys ? (odd ? rows.z : rows.x) : statistics_[r][half].lse2;
        const float delta = kOwnsKeys ? (odd ? rows.w : rows.y) : statistics_[r][half].delta;
        float& weight = p[r][tile / 2][4 * (tile % 2) + element % 4];
        float& gradient = ds[r][tile / 2][4 * (tile % 2) + element % 4];
        if (!Masked || visible >> (tile * kTileElements + element) & 1) {
          const Logit logit = map.logit(weight, pair.i, pair.j);
          const float exponent = logit.value - lse2;
          // Large biases leave an lse too coarse to tell which way it was rounded; 2^128 is no
          // weight.
          weight = exp2_approx(Config::kFeatured ? min_or_nan(exponent, 0.0f) : exponent);
          gradient = weight * (gradient - delta);
          if constexpr (kWritesDbias) store_dbias(pair, gradient);
          gradient *= logit.slope;
        } else {
          if constexpr (kWritesDbias) store_dbias(pair, 0.0f);
          weight = gradient = 0.0f;
        }
      }
    }
  }

  // Owned queries: of the lane's rows.
  __device__ void load_statistics() {
    const RowStatistics* rows = head_statistics(params_, sequence_.batch, head_) + first_row_;
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      statistics_[i / 2][i % 2] = rows[warp_row() + 8 * i + lane_ / 4];
    }
  }

  // Such a row shares its warp with others, and a NaN key of theirs times its zero weight is NaN.
  template <int Blocks>
  __device__ void zero_rows_without_keys(float (&dx0)[kRowTiles][Blocks][4]) const {
#pragma unroll
    for (int i = 0; i < kRowTiles * Blocks * 4; ++i) {
      const int r = i / (4 * Blocks), half = i % 4 / 2;
      float& sum = dx0[r][i / 4 % Blocks][i % 4];
      if (statistics_[r][half].lse2 == INFINITY) sum = 0.0f;
    }
  }

  __device__ bool writes_dbias() const { return kWritesDbias && part_ == 0 && params_.dbias; }
  __device__ float* dbias_row(int i) const {
    const int64_t head = int64_t{sequence_.batch} * problem_.q_heads + head_;
    return params_.dbias + (head * problem_.q_len + i) * problem_.kv_len;
  }
  __device__ void store_dbias(const Pair& pair, float gradient) const {
    if (writes_dbias() && pair.i < problem_.q_len && pair.j < problem_.kv_len) {
      dbias_row(pair.i)[pair.j] = gradient;
    }
  }
  // The columns that no step visits.
  __device__ void zero_unvisited_dbias() const {
    if (!writes_dbias()) return;
    const int steps = step_count();
    const int begin = steps ? first_step() : 0, end = begin + steps * kStreamedRows;
    for (int i = first_row_ + warp_; i < min(first_row_ + rows_, problem_.q_len); i += warps()) {
      float* row = dbias_row(i);
      for (int j = lane_; j < begin; j += 32) row[j] = 0.0f;
      for (int j = end + lane_; j < problem_.kv_len; j += 32) row[j] = 0.0f;
    }
  }

  const BackwardParams& params_;
  const PrefillParams& forward_;
  const Problem& problem_;
  const int lane_, warp_;
  const int rows_, capacity_;
  const int tile_, head_;
  const Sequence sequence_;
  const int first_row_;
  const int part_;
  unsigned char* const memory_;
  const uint32_t shared_;
  const HeadView<T> y0_, y1_;  // owned keys: of head 0, since the steps walk through heads
  Range streamed_;             // the rows of the other side that any owned row may see
  RowStatistics statistics_[kRowTiles][2];
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_BACKWARD_SM80_WALK_CUH_
