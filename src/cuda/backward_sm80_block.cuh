// One block of the generic backward; backward_sm80.cuh has the algorithm.
#ifndef FLASHATTN_CUDA_BACKWARD_SM80_BLOCK_CUH_
#define FLASHATTN_CUDA_BACKWARD_SM80_BLOCK_CUH_

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

template <class T_, int HeadDim_, int ValueDim_, Owned Side_, bool Featured_>
struct BackwardSm80Config {
  using T = T_;
  static constexpr int kHeadDim = HeadDim_, kValueDim = ValueDim_;
  static constexpr bool kOwnsKeys = Side_ == Owned::kKeys;
  static constexpr bool kFeatured = Featured_;
  static constexpr bool kSplitsSums = kOwnsKeys && kHeadDim > 128;
  // 32 rows a warp read half as much shared memory a product as 16, where registers allow.
  static constexpr int kRowTiles = kHeadDim <= 64 ? 2 : 1;
  static constexpr int kMaxWarps = kHeadDim <= 64 ? 4 : 8;
  // What the launcher fits to the GPU's shared memory, apart from what fits all of them. Blocks of
  // queries count their warps at run time at every head dim: unrolled copies made them spill.
  static constexpr bool kFixedStages = kHeadDim <= 128;
  static constexpr bool kFixedWarps = kOwnsKeys;
  static constexpr int kMinBlocks = kHeadDim <= 64 ? 2 : 1;
  static constexpr int kStepBytes =
      kStreamedRows * (2 * kHeadDim + 2 * kValueDim + static_cast<int>(sizeof(RowStatistics)));

  static constexpr int owned_rows(int warps) {
    return warps / (kSplitsSums ? 2 : 1) * 16 * kRowTiles;
  }
  static constexpr int shared_memory(int warps, int stages) {
    return owned_rows(warps) * (2 * kHeadDim + 2 * kValueDim) + stages * kStepBytes;
  }
  static constexpr int kMinWarps = kFixedWarps || kFixedStages ? kMaxWarps : kMaxWarps / 2;
  static_assert(shared_memory(kMinWarps, kFixedStages ? 2 : 1) <= 99 * 1024,
                "fits the shared memory of sm_86, sm_89 and sm_120");
};

// Where the block's shared memory lies. One stage: the next step's rows are fetched when this step
// is done with the buffer; two: while it is computed.
template <class Config>
struct BackwardSm80Buffers {
  int x1_offset, steps_offset;
  int stages;

  __device__ BackwardSm80Buffers(int rows, int stage_count)
      : x1_offset(rows * 2 * Config::kHeadDim),
        steps_offset(x1_offset + rows * 2 * Config::kValueDim),
        stages(Config::kFixedStages ? 2 : stage_count) {}

  __device__ int y0(int step) const {
    return steps_offset + (stages == 2 && step % 2 ? Config::kStepBytes : 0);
  }
  __device__ int y1(int step) const { return y0(step) + kStreamedRows * 2 * Config::kHeadDim; }
  __device__ int statistics(int step) const {
    return y1(step) + kStreamedRows * 2 * Config::kValueDim;
  }
};

// A step of the walk: the first streamed row, and the query head it is done for.
struct StreamPosition {
  int q_head, first;
};

template <class Config>
class BackwardSm80Block {
  using T = typename Config::T;
  static constexpr bool kOwnsKeys = Config::kOwnsKeys;
  static constexpr bool kWritesDbias = Config::kFeatured && !kOwnsKeys;
  static constexpr int kRowTiles = Config::kRowTiles;
  static constexpr int kHeadDim = Config::kHeadDim, kValueDim = Config::kValueDim;

 public:
  __device__ BackwardSm80Block(const BackwardParams& params, int stages, unsigned char* memory,
                               int index)
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
        buffers_(rows_, stages),
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

  // Sums of the owned rows, into shared memory.
  __device__ void run() {
    const int b = sequence_.batch, kv_head = kOwnsKeys ? head_ : head_ / problem_.group();
    if constexpr (Config::kFeatured) {
      if (forward_.features.query_segments) narrow_to_segments();
    }
    if constexpr (kOwnsKeys) {
      copy_owned(HeadView<T>(forward_.k, b, kv_head, problem_.head_dim),
                 HeadView<T>(forward_.v, b, kv_head, problem_.value_dim));
    } else {
      copy_owned(HeadView<T>(forward_.q, b, head_, problem_.head_dim),
                 HeadView<T>(params_.dout, b, head_, problem_.value_dim));
      if constexpr (kWritesDbias) zero_unvisited_dbias();
    }
    if constexpr (Config::kSplitsSums) {
      if (warp_ < warps() / 2) {
        accumulate<Sums::kScores>();
      } else {
        accumulate<Sums::kValues>();
      }
    } else {
      accumulate<kOwnsKeys ? Sums::kBoth : Sums::kScores>();
    }
  }

  __device__ void store() const {
    const int b = sequence_.batch;
    if constexpr (kOwnsKeys) {
      store_rows<kHeadDim>(HeadView<T>(params_.dk, b, head_, problem_.head_dim), memory_,
                           first_row_, rows_, length(), capacity_);
      store_rows<kValueDim>(HeadView<T>(params_.dv, b, head_, problem_.value_dim),
                            memory_ + buffers_.x1_offset, first_row_, rows_, length(), capacity_);
    } else {
      store_rows<kHeadDim>(HeadView<T>(params_.dq, b, head_, problem_.head_dim), memory_,
                           first_row_, rows_, length(), capacity_);
    }
  }

 private:
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

  __device__ void copy_owned(const HeadView<T>& x0, const HeadView<T>& x1) const {
    const Range present = {0, length()};
    copy_rows_async<kHeadDim>(shared_, x0, first_row_, rows_, present, threads());
    copy_rows_async<kValueDim>(shared_ + buffers_.x1_offset, x1, first_row_, rows_, present,
                               threads());
    cp_async_commit();  // without a step there is no other, and results would meet the late copies
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

  __device__ void prefetch(int step, const StreamPosition& at) const {
    HeadView<T> y0 = y0_, y1 = y1_;
    if constexpr (kOwnsKeys) {
      y0.data += at.q_head * forward_.q.head;
      y1.data += at.q_head * params_.dout.head;
    }
    copy_rows_async<kHeadDim>(shared_ + buffers_.y0(step), y0, at.first, kStreamedRows, streamed_,
                              threads());
    copy_rows_async<kValueDim>(shared_ + buffers_.y1(step), y1, at.first, kStreamedRows, streamed_,
                               threads());
    if constexpr (kOwnsKeys) {
      // Owned queries read theirs once, into registers.
      constexpr int kRowsAChunk = 16 / sizeof(RowStatistics);
      if (threadIdx.x < kStreamedRows / kRowsAChunk) {
        cp_async_16(shared_ + buffers_.statistics(step) + 16 * threadIdx.x,
                    head_statistics(params_, sequence_.batch, at.q_head) + at.first +
                        kRowsAChunk * threadIdx.x);
      }
    }
    cp_async_commit();
  }

  // The main loop, and the sums into the block's own tiles. Each warp may run an instance of its
  // own, so barriers are named: they count warps wherever these are in the code.
  template <Sums Wanted>
  __device__ void accumulate() {
    float dx0[kRowTiles][kHeadDim / 8][4] = {}, dx1[kRowTiles][kValueDim / 8][4] = {};
    if constexpr (!kOwnsKeys) load_statistics();

    const int steps = step_count();
    StreamPosition at = first_position(), ahead = at;
    if (steps > 0) prefetch(0, ahead);
    for (int step = 0; step < steps; ++step) {
      cp_async_wait<0>();
      sync();  // this step's rows are here, and nobody reads the previous step's any more
      ahead = next(ahead);
      const bool more = step + 1 < steps;
      if (more && buffers_.stages == 2) prefetch(step + 1, ahead);
      visit<Wanted>(step, at, dx0, dx1);
      if (more && buffers_.stages == 1) {
        sync();
        prefetch(step + 1, ahead);
      }
      at = ahead;
    }

    cp_async_wait<0>();
    sync();  // the owned rows have been read for the last time; the results take their place
    const float scale = static_cast<float>(forward_.scores.scale);
    if constexpr (!kOwnsKeys) zero_rows_without_keys(dx0);
    if constexpr (Wanted != Sums::kValues) {
      stage_rows<T, kHeadDim>(memory_, warp_row(), dx0, scale, lane_);
    }
    if constexpr (Wanted != Sums::kScores) {
      stage_rows<T, kValueDim>(memory_ + buffers_.x1_offset, warp_row(), dx1, 1.0f, lane_);
    }
  }

  __device__ void sync() const { named_barrier_sync(1, threads()); }

  // Steps of which the warp's rows see nothing are skipped, unless dbias wants its zeros; those
  // they see entirely go without a mask. Features make every step a masked one.
  template <Sums Wanted, class Dx0, class Dx1>
  __device__ void visit(int step, const StreamPosition& at, Dx0& dx0, Dx1& dx1) const {
    const int row = first_row_ + warp_row(), last_row = row + 16 * kRowTiles - 1;
    const int column = at.first, last_column = column + kStreamedRows - 1;
    const int i = kOwnsKeys ? column : row, i_last = kOwnsKeys ? last_column : last_row;
    const int j = kOwnsKeys ? row : column, j_last = kOwnsKeys ? last_row : last_column;
    if constexpr (Config::kFeatured) {
      if (writes_dbias() || sequence_.any_seen(i, i_last, j, j_last)) {
        compute<Wanted, true>(step, at, dx0, dx1);
      }
    } else if (sequence_.all_seen(i, i_last, j, j_last)) {
      compute<Wanted, false>(step, at, dx0, dx1);
    } else if (sequence_.any_seen(i, i_last, j, j_last)) {
      compute<Wanted, true>(step, at, dx0, dx1);
    }
  }

  template <Sums Wanted, bool Masked, class Dx0, class Dx1>
  __device__ void compute(int step, const StreamPosition& at, Dx0& dx0, Dx1& dx1) const {
    // Streamed rows in groups of 16; two row tiles with both sums leave registers for one of them.
    constexpr int kGroups = kRowTiles == 2 && Wanted == Sums::kBoth ? 1 : 2;
    const uint32_t x0 = shared_ + warp_row() * 2 * kHeadDim;
    const uint32_t x1 = shared_ + buffers_.x1_offset + warp_row() * 2 * kValueDim;
#pragma unroll 1
    for (int row = 0; row < kStreamedRows; row += 16 * kGroups) {
      uint32_t visible = ~0u;
      if constexpr (Masked) {
        visible = visible_elements<kGroups>(at, row);
        if (!__any_sync(~0u, visible) && !writes_dbias()) continue;
      }
      const uint32_t y0 = shared_ + buffers_.y0(step) + row * 2 * kHeadDim;
      const uint32_t y1 = shared_ + buffers_.y1(step) + row * 2 * kValueDim;
      float p[kRowTiles][kGroups][8] = {}, ds[kRowTiles][kGroups][8] = {};
      multiply_rows<T, kHeadDim>(p, x0, y0, lane_);
      if constexpr (Wanted != Sums::kValues) multiply_rows<T, kValueDim>(ds, x1, y1, lane_);

      weigh<Masked>(step, at, row, visible, p, ds);
      uint32_t row_masks[kGroups][2];
      if constexpr (Masked) {
        const uint32_t seen = __reduce_or_sync(~0u, visible_columns<kGroups>(visible));
        lane_row_masks(row_masks, seen, lane_);
      }

      uint32_t weights[kRowTiles][kGroups][4];
      if constexpr (Wanted != Sums::kScores) {
        pack_rows<T>(weights, p);
        accumulate_rows<T, kValueDim, Masked>(dx1, weights, y1, row_masks, lane_);
      }
      if constexpr (Wanted != Sums::kValues) {
        pack_rows<T>(weights, ds);
        accumulate_rows<T, kHeadDim, Masked>(dx0, weights, y0, row_masks, lane_);
      }
    }
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
  template <bool Masked, int Groups>
  __device__ __forceinline__ void weigh(int step, const StreamPosition& at, int first,
                                        uint32_t visible, float (&p)[kRowTiles][Groups][8],
                                        float (&ds)[kRowTiles][Groups][8]) const {
    const ScoreMap<Config::kFeatured> map(forward_, sequence_, at.q_head);
#pragma unroll
    for (int tile = 0; tile < 2 * Groups; ++tile) {
      float4 rows;  // owned keys: statistics of the tile's two columns
      if constexpr (kOwnsKeys) {
        rows = reinterpret_cast<const float4*>(
            memory_ + buffers_.statistics(step))[first / 2 + 4 * tile + lane_ % 4];
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
          weight = exp2_approx(logit.value - lse2);
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
  template <class Dx0>
  __device__ void zero_rows_without_keys(Dx0& dx0) const {
#pragma unroll
    for (int i = 0; i < kRowTiles * (kHeadDim / 8) * 4; ++i) {
      const int r = i / (kHeadDim / 2), half = i % 4 / 2;
      float& sum = dx0[r][i / 4 % (kHeadDim / 8)][i % 4];
      if (statistics_[r][half].lse2 == INFINITY) sum = 0.0f;
    }
  }

  __device__ bool writes_dbias() const { return kWritesDbias && params_.dbias; }
  __device__ float* dbias_row(int i) const {
    const int64_t head = int64_t{sequence_.batch} * problem_.q_heads + head_;
    return params_.dbias + (head * problem_.q_len + i) * problem_.kv_len;
  }
  __device__ void store_dbias(const Pair& pair, float gradient) const {
    if (params_.dbias && pair.i < problem_.q_len && pair.j < problem_.kv_len) {
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
  const BackwardSm80Buffers<Config> buffers_;
  unsigned char* const memory_;
  const uint32_t shared_;
  const HeadView<T> y0_, y1_;  // owned keys: of head 0, since the steps walk through heads
  Range streamed_;             // the rows of the other side that any owned row may see
  RowStatistics statistics_[kRowTiles][2];
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_BACKWARD_SM80_BLOCK_CUH_
