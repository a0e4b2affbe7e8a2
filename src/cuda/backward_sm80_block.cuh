// One block of the generic backward up to head dim 256, whose rows lie whole in shared memory;
// backward_sm80.cuh has the algorithm.
#ifndef FLASHATTN_CUDA_BACKWARD_SM80_BLOCK_CUH_
#define FLASHATTN_CUDA_BACKWARD_SM80_BLOCK_CUH_

#include <cstdint>

#include "backward_sm80_rows.cuh"
#include "backward_sm80_walk.cuh"
#include "backward_tile.cuh"
#include "params.h"
#include "ptx.cuh"

namespace flashattn {

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

template <class Config>
class BackwardSm80Block : BackwardSm80Walk<Config> {
  using Walk = BackwardSm80Walk<Config>;
  using typename Walk::T;
  using Walk::capacity_, Walk::first_row_, Walk::forward_, Walk::head_, Walk::lane_, Walk::memory_,
      Walk::params_, Walk::problem_, Walk::rows_, Walk::sequence_, Walk::shared_, Walk::streamed_,
      Walk::warp_, Walk::y0_, Walk::y1_;
  using Walk::first_position, Walk::length, Walk::load_statistics, Walk::narrow_to_segments,
      Walk::next, Walk::step_count, Walk::threads, Walk::warp_row, Walk::warps, Walk::writes_dbias,
      Walk::zero_rows_without_keys, Walk::zero_unvisited_dbias;
  using Walk::kOwnsKeys, Walk::kRowTiles, Walk::kWritesDbias;
  static constexpr int kHeadDim = Config::kHeadDim, kValueDim = Config::kValueDim;

 public:
  __device__ BackwardSm80Block(const BackwardParams& params, int stages, unsigned char* memory,
                               int index)
      : Walk(params, memory, index, 0), buffers_(rows_, stages) {}

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
  __device__ void copy_owned(const HeadView<T>& x0, const HeadView<T>& x1) const {
    const Range present = {0, length()};
    copy_rows_async<kHeadDim>(shared_, x0, first_row_, rows_, present, threads());
    copy_rows_async<kValueDim>(shared_ + buffers_.x1_offset, x1, first_row_, rows_, present,
                               threads());
    cp_async_commit();  // without a step there is no other, and results would meet the late copies
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
        visible = this->template visible_elements<kGroups>(at, row);
        if (!__any_sync(~0u, visible) && !writes_dbias()) continue;
      }
      const uint32_t y0 = shared_ + buffers_.y0(step) + row * 2 * kHeadDim;
      const uint32_t y1 = shared_ + buffers_.y1(step) + row * 2 * kValueDim;
      float p[kRowTiles][kGroups][8] = {}, ds[kRowTiles][kGroups][8] = {};
      multiply_rows<T, kHeadDim>(p, x0, y0, lane_);
      if constexpr (Wanted != Sums::kValues) multiply_rows<T, kValueDim>(ds, x1, y1, lane_);

      const auto* statistics = reinterpret_cast<const float4*>(memory_ + buffers_.statistics(step));
      this->template weigh<Masked>(statistics, at, row, visible, p, ds);
      uint32_t row_masks[kGroups][2];
      if constexpr (Masked) {
        const uint32_t seen =
            __reduce_or_sync(~0u, this->template visible_columns<kGroups>(visible));
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

  const BackwardSm80Buffers<Config> buffers_;
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_BACKWARD_SM80_BLOCK_CUH_
