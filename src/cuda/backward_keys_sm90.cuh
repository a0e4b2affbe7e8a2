// Gradients on Hopper. A block owns 128 keys of one key/value head, keeps K and V in shared memory
// and dK and dV in registers, and walks over the query rows that see them, head after head of its
// group:
//
//   S^T = K Q^T   dP^T = V dO^T   P = exp2(scale log2e S - lse2)   dS = P (dP - delta)
//   dV += P^T dO  dK += dS^T Q    dQ^T = K^T dS, added to an fp32 accumulator in global memory
//
// In order: blocks add in the order in which they start, so that dQ has the same bits on every run.
//
// Everything is transposed, keys along M: then P and dS are A operands of dV and dK as they lie in
// registers, and only dS goes through shared memory, for dQ. Each of the two consumer warpgroups
// takes 64 keys; dQ needs all 128, so there the warpgroups split the head dim (H 128) or the rows
// (H 64). docs/kernels/backward.md has the data movement, the barriers and the measurements.
#ifndef FLASHATTN_CUDA_BACKWARD_KEYS_SM90_CUH_
#define FLASHATTN_CUDA_BACKWARD_KEYS_SM90_CUH_

#include "backward_passes.cuh"
#include "backward_plan.h"
#include "backward_producer_sm90.cuh"
#include "backward_sm90_parts.cuh"
#include "device.h"
#include "params.h"
#include "ptx_sm90.cuh"

namespace flashattn {

// ---- layout of shared memory, in bytes from a 1024-byte boundary. Tiles are 64-column chunks of
// `rows` x 128 bytes in the 128-byte swizzle.
template <int HeadDim, BackwardSum Sum>
struct BackwardLayout {
  static constexpr bool kWithDq = Sum != BackwardSum::kNone;
  static constexpr bool kOrdered = Sum == BackwardSum::kInOrder;
  static constexpr bool kZeroesAhead = Sum == BackwardSum::kAnyOrder;
  static constexpr BackwardTile kTile = kWithDq ? backward_tile_sm90(HeadDim) : kBackwardDkvTile;
  static constexpr int kRows = kTile.rows, kKeys = 128;
  static constexpr int kStages = 2;  // of Q, of dO and of dS
  // A block that waits for its turn gets a step further where another buffer fits.
  static constexpr int kDqStages = kOrdered && HeadDim == 128 ? 2 : 1;
  static constexpr bool kLooksAhead = false;
  static constexpr int kChunks = HeadDim / 64;
  static constexpr int kDqColumns = DqFragment<HeadDim>::kColumns;

  static constexpr int kKeyBytes = kKeys * HeadDim * 2, kQueryBytes = kRows * HeadDim * 2;
  static constexpr int kKeyChunk = kKeys * 128, kQueryChunk = kRows * 128;
  static constexpr int kHalf = 64 * 128;  // a warpgroup's keys in a chunk of K or V
  static constexpr int kDsBytes = kWithDq ? kRows * kKeys * 2 : 0, kDsChunk = kRows * 128;
  static constexpr int kDqBytes = kWithDq ? DqFragment<HeadDim>::kFloats * 4 : 0;  // a warpgroup's
  static constexpr int kStatBytes = kRows * 4;

  static constexpr int kK = 0, kV = kKeyBytes, kQ = 2 * kKeyBytes;
  static constexpr int kDout = kQ + kStages * kQueryBytes;
  static constexpr int kDs = kDout + kStages * kQueryBytes;
  static constexpr int kDq = kDs + kStages * kDsBytes;
  static constexpr int kLse = kDq + kDqStages * 2 * kDqBytes, kDelta = kLse + kStages * kStatBytes;
  static constexpr int kBarriers = kDelta + kStages * kStatBytes;
  static constexpr int kBytes = kBarriers + 128 + 1024;
};

// Named barriers: both warpgroups, each warpgroup (two), the warps that convert.
constexpr int kDsBarrier = 1, kWarpgroupBarrier = 2, kConvertBarrier = 4;

// ---- one consumer warpgroup: 64 of the block's keys
template <class T, int HeadDim, BackwardSum Sum, bool Featured>
class BackwardConsumer {
 public:
  using L = BackwardLayout<HeadDim, Sum>;
  using Task = BackwardTaskOf<L::kOrdered>;
  static constexpr int kRows = L::kRows;
  using Steps = BackwardSteps<kRows, Featured>;

  __device__ __forceinline__ BackwardConsumer(const BackwardMaps& maps,
                                              const BackwardParams& params,
                                              const BackwardGrid& grid, const Task& task,
                                              const Steps& steps, const BackwardBarriers& barriers,
                                              uint32_t smem, int warpgroup)
      : maps_(maps),
        params_(params),
        grid_(grid),
        task_(task),
        steps_(steps),
        barriers_(barriers),
        smem_(smem),
        warpgroup_(warpgroup),
        thread_(threadIdx.x & 127) {
    stats_ = stats_place(thread_);
    ds_store_ = ds_place(thread_);
    dq_store_ = smem + L::kDq + warpgroup * L::kDqBytes + thread_ * 16;
  }

  __device__ __forceinline__ void run() {
    if (task_.steps() == 0) {
      store_zeros();
      return;
    }
    begin_walk(0);
    mbarrier_wait(barriers_.k_full, 0);
    first_step();
    if constexpr (Featured)
      walk_found();
    else
      walk();
    if constexpr (kDqNextStep) last_dq();
    grid_dependency_trigger();  // not before: what starts sooner has nothing to do but to wait
    store_gradients();
  }

 private:
  __device__ __forceinline__ uint32_t stats_place(int thread) const {
    return smem_ + (thread & 3) * 8;
  }
  // stmatrix.trans: lane l writes query row 8 (l / 16) + l % 8, keys 16 warp + 8 (l / 8 % 2) +
  // 0..7.
  __device__ __forceinline__ uint32_t ds_place(int thread) const {
    const int lane = thread & 31, warp = thread >> 5;
    return smem_ + L::kDs + warpgroup_ * L::kDsChunk + (8 * (lane >> 4) + (lane & 7)) * 128 +
           (((2 * warp + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
  }
  // Features leave too few registers to keep such places: they are worked out again, from the
  // thread as the hardware has it.
  __device__ __forceinline__ int thread_again() const { return opaque_thread() & 127; }
  __device__ __forceinline__ uint32_t stats() const {
    return Featured ? stats_place(thread_again()) : stats_;
  }
  __device__ __forceinline__ uint32_t ds_store() const {
    return Featured ? ds_place(thread_again()) : ds_store_;
  }

  // All steps but the first.
  __device__ __forceinline__ void walk() {
    // for_each_tile_in_order() says why the heads of a group come inside.
    const int inside = kOrdered ? grid_.group : 1, walks = kOrdered ? 1 : grid_.group;
    // Every loop edge below is a full wait: accumulators in flight from one loop, or from the
    // peeled first step, into another would make ptxas serialise all products (C7512).
    int masked = task_.masked_first() * inside - 1;
    int left = task_.other_edge() * inside - 1;
#pragma unroll 1
    for (int walk = 0;;) {
      left -= max(masked, 0);
#pragma unroll 1
      for (; masked > 0; --masked) {
        step<true>();
        wgmma_wait<0>();
      }
#pragma unroll 1
      for (; left % L::kTile.unroll != 0; --left) {
        step<false>();
        wgmma_wait<0>();
      }
#pragma unroll 1
      for (; left > 0; left -= L::kTile.unroll) {
#pragma unroll
        for (int i = 0; i < L::kTile.unroll; ++i) step<false>();
        wgmma_wait<0>();
      }
      masked = left =
          (task_.stop_step() - step_) * task_.stride() * inside;  // what the other edge cuts
      if (masked > 0) continue;
      if (++walk == walks) break;
      begin_walk(walk);
      masked = task_.masked_first();
      left = task_.other_edge();
    }
  }

  // With features any step may need a mask: there is one loop.
  __device__ __forceinline__ void walk_found() {
#pragma unroll 1
    while (!is_last_) {
      step<true>();
      wgmma_wait<0>();
    }
  }

  // The first of this thread's two keys; the other is 8 further.
  __device__ __forceinline__ int first_key() const {
    return task_.first_key + 64 * warpgroup_ + 16 * (thread_ >> 5) + (thread_ & 31) / 4;
  }

  // Through one head of the group or, where they come inside, through all.
  __device__ __forceinline__ void begin_walk(int g) {
    if constexpr (!kOrdered) {
      const int64_t head =
          int64_t{task_.b * params_.forward.problem.kv_heads + task_.kv_head} * grid_.group + g;
      dq_head_ = grid_.workspace.dq + head * grid_.workspace.padded_rows * HeadDim +
                 warpgroup_ * (L::kDqBytes / 4);
    }
    step_ = task_.start_step();
  }

  static constexpr bool kWithDq = L::kWithDq, kOrdered = L::kOrdered;
  static constexpr bool kTogether = L::kTile.order == BackwardOrder::kTogether;
  static constexpr bool kDqNextStep = kWithDq && L::kTile.dq == BackwardDq::kNextStep;
  static constexpr bool kDqBeforeDk = kWithDq && L::kTile.dq == BackwardDq::kBeforeDk;
  static_assert(!kTogether || !kDqBeforeDk, "dV and dK start together, with nothing between them");

  // ---- the pieces of a step
  __device__ __forceinline__ uint32_t q_tile() const {
    return smem_ + L::kQ + ring_.stage * L::kQueryBytes;
  }
  __device__ __forceinline__ uint32_t dout_tile() const {
    return smem_ + L::kDout + ring_.stage * L::kQueryBytes;
  }

  __device__ __forceinline__ uint32_t delta() const {
    return stats() + L::kDelta + ring_.stage * L::kStatBytes;
  }

  __device__ __forceinline__ void issue_scores() {
    uint32_t k = descriptor_low_k_major(smem_ + L::kK + warpgroup_ * L::kHalf);
    uint32_t q = descriptor_low_k_major(q_tile());
    opaque(k);
    opaque(q);
    mbarrier_wait(barriers_.q_full + 8 * ring_.stage, ring_.phase);
    wgmma_fence();
    issue_over_head_dim<T, HeadDim, kRows, L::kKeyChunk, L::kQueryChunk>(s_, k, q);
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_dp() {
    uint32_t v = descriptor_low_k_major(smem_ + L::kV + warpgroup_ * L::kHalf);
    uint32_t dout = descriptor_low_k_major(dout_tile());
    opaque(v);
    opaque(dout);
    wgmma_fence();
    issue_over_head_dim<T, HeadDim, kRows, L::kKeyChunk, L::kQueryChunk>(dp_, v, dout);
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_dv(bool accumulate) {
    uint32_t dout = descriptor_low_mn_major(dout_tile(), kRows);
    opaque(dout);
    issue_over_rows<T, HeadDim, kRows>(dv_, p_, dout, accumulate);
  }
  __device__ __forceinline__ void issue_dk(bool accumulate) {
    uint32_t q = descriptor_low_mn_major(q_tile(), kRows);
    opaque(q);
    issue_over_rows<T, HeadDim, kRows>(dk_, ds_, q, accumulate);
  }

  template <bool Masked>
  __device__ __forceinline__ void exponentials() {
    const uint32_t lse2 = stats() + L::kLse + ring_.stage * L::kStatBytes;
    if constexpr (Featured) {
      is_last_ = steps_.note_of(ring_.stage).last();
      const int thread = thread_again();
      featured_probabilities<T, kRows>(
          s_, lse2, grid_, task_, steps_, ring_.stage,
          task_.first_key + 64 * warpgroup_ + thread / 32 * 16 + thread % 32 / 4);
      return;
    }
    const int first_row = step_ * kRows + 2 * (thread_ & 3);
    const int first = Masked ? task_.first_row(first_key()) - first_row : 0;
    const int first_8 = Masked ? task_.first_row(first_key() + 8) - first_row : 0;
    probabilities<kRows, Masked>(s_, lse2, grid_.scale_log2, first, first_8);
    if (Masked && step_ >= task_.far_step)
      hide_from<kRows>(s_, task_.end_row(first_key()) - first_row,
                       task_.end_row(first_key() + 8) - first_row);
  }

  __device__ __forceinline__ void pack_p() {
    if constexpr (Featured)
      pack_probabilities<T>(p_, s_, grid_.cap);
    else
      pack_pairs<T>(p_, s_);
  }

  template <bool Masked>
  __device__ __forceinline__ void form_ds() {
    if constexpr (Featured) {
      if (task_.hides(steps_.note_of(ring_.stage))) steps_.check(dp_);
      if (grid_.cap.is_given())
        return capped_gradients<T>(
            ds_, s_, dp_, [&](int j) { return OfColumns{shared_load_f32x2(delta() + 32 * j)}; });
    }
    score_gradients<T, kRows, Masked>(ds_, s_, dp_, delta());
  }

  // This warpgroup's half of dS, transposed to rows of queries. kDsBarrier, before issue_dq(),
  // publishes it, and with it that the previous dQ has left its buffer, if this warpgroup adds it.
  __device__ __forceinline__ void store_ds() {
    const uint32_t base = ds_store() + ring_.stage * L::kDsBytes;
#pragma unroll
    for (int j = 0; j < kRows / 16; ++j)
      stmatrix_x4_trans(base + j * 2048, ds_[4 * j], ds_[4 * j + 1], ds_[4 * j + 2],
                        ds_[4 * j + 3]);
    fence_async_proxy();
    if constexpr (kOrdered) return;
    bulk_wait_read<0>();
    if constexpr (Featured)
      dq_target_ = steps_.dq_of(ring_.stage) + warpgroup_ * (L::kDqBytes / 4);
    else
      dq_target_ = dq_head_ + static_cast<int64_t>(step_) * (kRows * HeadDim);
  }

  __device__ __forceinline__ void next_block() {
    if constexpr (!kOrdered) {
      ++step_;
    } else if (++group_head_ == grid_.group) {
      group_head_ = 0;
      step_ += task_.stride();
    }
    ring_.advance();
  }

  // dQ^T of the block whose dS lies in `stage`.
  __device__ __forceinline__ void issue_dq(uint32_t stage) {
    uint32_t k = descriptor_low_mn_major(
        smem_ + L::kK + (HeadDim == 128 ? warpgroup_ * L::kKeyChunk : 0), L::kKeys);
    uint32_t ds = descriptor_low_k_major(smem_ + L::kDs + stage * L::kDsBytes +
                                         (HeadDim == 128 ? 0 : warpgroup_ * (L::kDsChunk / 2)));
    opaque(k);
    opaque(ds);
    wgmma_fence();
    issue_over_keys<T, L::kDqColumns, L::kKeys, L::kDsChunk>(dq(), k, ds);
    wgmma_commit();
  }

  __device__ __forceinline__ void store_dq() {
    float (&x)[L::kDqColumns / 2] = dq();
    const uint32_t to = dq_store_ + dq_ring_.stage * (2 * L::kDqBytes);
    if constexpr (kOrdered)
      mbarrier_wait(barriers_.dq_empty + 8 * dq_ring_.stage, dq_ring_.phase ^ 1);
#pragma unroll
    for (int j = 0; j < L::kDqColumns / 8; ++j)
      shared_store_f32x4(to + j * 2048, x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
    fence_async_proxy();
    if constexpr (kOrdered) {
      __syncwarp();
      mbarrier_arrive_if(thread_ % 32 == 0, barriers_.dq_full + 8 * dq_ring_.stage);
      dq_ring_.advance();
    } else {
      named_barrier_sync(kWarpgroupBarrier + warpgroup_, 128);
      bulk_reduce_add_f32_if(thread_ == 0, dq_target_, smem_ + L::kDq + warpgroup_ * L::kDqBytes,
                             L::kDqBytes);
    }
  }

  __device__ __forceinline__ void release_q(uint32_t stage) {
    mbarrier_arrive_if(thread_ == 0, barriers_.q_empty + 8 * stage);
  }
  __device__ __forceinline__ void release_dout(uint32_t stage) {
    mbarrier_arrive_if(thread_ == 0, barriers_.dout_empty + 8 * stage);
  }
  __device__ __forceinline__ void release_previous() {
    release_q(ring_.stage ^ 1);
    release_dout(ring_.stage ^ 1);
  }

  // ---- the steps, in the order that BackwardOrder names.
  __device__ __forceinline__ void first_step() {
    issue_scores();
    mbarrier_wait(barriers_.v_full, 0);
    scores_to_ds<true>(false);
    wgmma_wait<0>();
  }

  template <bool Masked>
  __device__ __forceinline__ void step() {
    if constexpr (kDqNextStep) issue_previous_dq();
    issue_scores();
    if constexpr (!kDqBeforeDk) wgmma_wait<1>();
    if constexpr (kDqNextStep) store_dq();
    if constexpr (!kWithDq) release_previous();
    scores_to_ds<Masked>(true);
  }

  __device__ __forceinline__ void last_dq() {
    issue_previous_dq();
    wgmma_wait<0>();
    store_dq();
  }

  // dV and dK are the only products in flight over a loop's edge: an accumulator that is read in
  // the next turn would serialise everything (C7514). So a step begins with dQ of the block before
  // it.
  __device__ __forceinline__ void issue_previous_dq() {
    named_barrier_sync(kDsBarrier, 256);
    if constexpr (kTogether) wgmma_wait<0>();
    issue_dq(ring_.stage ^ 1);
    if constexpr (!kTogether) wgmma_wait<1>();
    release_previous();
  }

  // From S in flight to dV and dK in flight and dS in shared memory.
  template <bool Masked>
  __device__ __forceinline__ void scores_to_ds(bool accumulate) {
    const uint32_t dout_full = barriers_.dout_full + 8 * ring_.stage;
    mbarrier_wait(dout_full, ring_.phase);
    issue_dp();
    wgmma_wait<1>();
    if (kDqBeforeDk && accumulate)
      release_q(ring_.stage ^ 1);  // dK of the block before is complete
    exponentials<Masked>();
    if constexpr (kTogether) {
      // Passes at once; its branch keeps the exponentials ahead of the wait for dP. Features have
      // branches enough.
      if constexpr (!Featured) mbarrier_wait(dout_full, ring_.phase);
      wgmma_wait<0>();
      form_ds<Masked>();
      pack_p();
      wgmma_fence();
      issue_dv(accumulate);
      issue_dk(accumulate);
      wgmma_commit();
    } else {
      pack_p();
      wgmma_fence();
      issue_dv(accumulate);
      wgmma_commit();
      wgmma_wait<1>();
      form_ds<Masked>();
      if constexpr (!kDqBeforeDk) {
        wgmma_fence();
        issue_dk(accumulate);
        wgmma_commit();
      }
    }
    if constexpr (kWithDq) store_ds();
    if constexpr (kDqBeforeDk) dq_before_dk(accumulate);
    next_block();
  }

  // From dV in flight to dK in flight. The fence of issue_dq() serves dK as well.
  __device__ __forceinline__ void dq_before_dk(bool accumulate) {
    named_barrier_sync(kDsBarrier, 256);
    issue_dq(ring_.stage);
    issue_dk(accumulate);
    wgmma_commit();
    wgmma_wait<1>();
    release_dout(ring_.stage);
    store_dq();
  }

  // ---- the end: dV into V's place in shared memory, dK into K's once both warpgroups are done
  // with K
  __device__ __forceinline__ void store_gradients() {
    to_shared(dv_, smem_ + L::kV, 1.f);
    named_barrier_sync(kDsBarrier, 256);
    to_shared(dk_, smem_ + L::kK, grid_.scale);
    store_shared();
  }

  __device__ __forceinline__ void to_shared(float (&x)[HeadDim / 2], uint32_t tile, float factor) {
    fragments_to_shared<T, HeadDim>(x, tile + warpgroup_ * L::kHalf, L::kKeyChunk, factor,
                                    task_.keys.has(first_key()), task_.keys.has(first_key() + 8));
  }

  __device__ __forceinline__ void store_zeros() {
    // Both tiles, which lie one behind the other, chunk by chunk.
    clear_chunks(smem_ + L::kK + warpgroup_ * L::kHalf, 2 * L::kChunks, L::kKeyChunk);
    store_shared();
  }

  __device__ __forceinline__ void store_shared() {
    fence_async_proxy();
    named_barrier_sync(kWarpgroupBarrier + warpgroup_, 128);
    if (thread_ == 0) {
      const int first_key = task_.first_key + 64 * warpgroup_;
#pragma unroll
      for (int chunk = 0; chunk < L::kChunks; ++chunk) {
        const uint32_t from = smem_ + chunk * L::kKeyChunk + warpgroup_ * L::kHalf;
        tma_store_4d(&maps_.dv, from + L::kV, chunk * 64, first_key, task_.kv_head, task_.b);
        tma_store_4d(&maps_.dk, from + L::kK, chunk * 64, first_key, task_.kv_head, task_.b);
      }
      bulk_commit();
      if constexpr (Sum == BackwardSum::kAnyOrder) report_added();
      bulk_wait_read<0>();
    }
  }

  // All that this warpgroup adds to dQ has been added: all but the stores just committed.
  __device__ __forceinline__ void report_added() {
    bulk_wait<1>();
    fence_async_proxy_global();
    grid_dependency_wait();  // the counter's zero; a block without steps has not waited for it
    add_release_f32(
        grid_.workspace.added + task_.b * params_.forward.problem.kv_heads + task_.kv_head, 1.f);
  }

  // dQ takes the registers of dP, which is consumed before dQ starts, where they are as many;
  // sharing a part of them would serialise the products (C7511).
  static constexpr bool kOwnDq = kWithDq && L::kDqColumns != kRows;

  __device__ __forceinline__ float (&dq()) [L::kDqColumns / 2] {
    if constexpr (kOwnDq)
      return own_dq_;
    else
      return dp_;
  }

  const BackwardMaps& maps_;
  const BackwardParams& params_;
  const BackwardGrid& grid_;
  const Task& task_;
  const Steps& steps_;
  const BackwardBarriers& barriers_;
  const uint32_t smem_;
  const int warpgroup_, thread_;

  float s_[kRows / 2], dp_[kRows / 2], dk_[HeadDim / 2], dv_[HeadDim / 2];
  float own_dq_[L::kDqColumns / 2];  // kOwnDq only
  uint32_t p_[kRows / 4], ds_[kRows / 4];
  uint32_t stats_, ds_store_, dq_store_;
  int step_ = 0, group_head_ = 0;                    // group_head_: kOrdered only
  bool is_last_ = false;                             // Featured only: this step
  RingPosition<L::kStages> ring_;                    // of Q, lse2, dO, delta and dS
  RingPosition<L::kDqStages> dq_ring_;               // kOrdered only
  float *dq_head_ = nullptr, *dq_target_ = nullptr;  // otherwise
};

// What warps 1 to 3 of the loading warpgroup do: warp 1 zeroes a share of a later head's
// accumulator or adds in order, the others convert a share of an earlier head's.
template <int HeadDim>
__device__ __forceinline__ void zero_ahead(const BackwardGrid& grid, int head,
                                           const AccumulatorShare& share, int lane) {
  head += grid.lead.zero;
  if (head >= grid.heads) return;
  const int64_t rows =
      head * grid.group * grid.workspace.padded_rows + int64_t{share.begin} * kBackwardUnit;
  zero_units(grid.workspace.dq + rows * HeadDim, share.end - share.begin, HeadDim,
             grid.workspace.zeroed + head, lane);
}

// One thread adds each tile of dQ when the blocks before this one have; the first to reach it
// stores it, so that nothing need have been zeroed. All it waits for is what blocks of smaller
// index add, which started earlier and wait for nothing later: the wait ends.
template <class L, int HeadDim>
__device__ __forceinline__ void add_in_order(const BackwardParams& params, const BackwardGrid& grid,
                                             const BackwardOrderedTask& task,
                                             const BackwardBarriers& barriers, uint32_t smem) {
  constexpr uint32_t kBytes = 2 * L::kDqBytes;
  static_assert(kBytes == L::kRows * HeadDim * 4, "both warpgroups' parts are one piece");
  const int kv_head_index = task.b * params.forward.problem.kv_heads + task.kv_head;
  const int head_tiles = static_cast<int>(grid.workspace.padded_rows / L::kRows);
  const int64_t part = task.first_key / L::kKeys % grid.parts.count * grid.parts.floats;
  float *const dq = grid.workspace.dq + part, *const turns = grid.parts.turns + part;
  RingPosition<L::kDqStages> ring;
  for_each_tile_in_order(task, grid.group, [&](int g, int step) {
    const int tile = (kv_head_index * grid.group + g) * head_tiles + step;
    const int before = task.adders_before(step, L::kRows, L::kKeys, grid.parts.count);
    if (before > 0) wait_for_count(turns + tile, before, 20);
    mbarrier_wait(barriers.dq_full + 8 * ring.stage, ring.phase);
    float* to = dq + int64_t{tile} * (L::kRows * HeadDim);
    const uint32_t from = smem + L::kDq + ring.stage * kBytes;
    if (before > 0)
      bulk_reduce_add_f32_if(true, to, from, kBytes);
    else
      bulk_store(to, from, kBytes);
    bulk_wait_read<0>();
    mbarrier_arrive(barriers.dq_empty + 8 * ring.stage);
    bulk_wait<0>();
    fence_async_proxy_global();
    add_release_f32(turns + tile, 1.f);
    ring.advance();
  });
  add_release_f32(grid.workspace.added + kv_head_index, 2.f);  // for both warpgroups
}

template <class T, int HeadDim>
__device__ __forceinline__ void convert_behind(const BackwardParams& params,
                                               const BackwardGrid& grid, int head,
                                               const AccumulatorShare& share, ConvertTask<T>& task,
                                               int warp, int lane) {
  head -= grid.lead.convert;
  if (head < 0) return;
  if (warp == 0 && lane == 0) {
    const int kv_heads = params.forward.problem.kv_heads, b = head / kv_heads;
    const int64_t rows = head * grid.group * grid.workspace.padded_rows;
    task.dq = reinterpret_cast<const float4*>(grid.workspace.dq + rows * HeadDim);
    task.out =
        static_cast<T*>(params.dq.data) + params.dq.offset(b, 0, head % kv_heads * grid.group);
    task.begin = share.begin * (kBackwardUnit / 8);
    task.end = share.end * (kBackwardUnit / 8);
    task.head_groups = static_cast<int>(grid.workspace.padded_rows / 8);
    task.valid = rows_with_keys(Sequence(params.forward, b));
  }
  named_barrier_sync(kConvertBarrier, 64);
  wait_for_count(grid.workspace.added + head, 2 * grid.key_blocks);
  convert_row_groups<T, HeadDim>(params, task, grid.scale, warp, lane);
}

template <class T, int HeadDim, BackwardSum Sum, bool Featured>
__global__ void __launch_bounds__(384, 1)
    backward_keys_sm90_kernel(const __grid_constant__ BackwardMaps maps,
                              const __grid_constant__ BackwardParams params,
                              const __grid_constant__ BackwardGrid grid) {
  using L = BackwardLayout<HeadDim, Sum>;
  extern __shared__ char raw_smem[];
  const uint32_t smem = (shared_address(raw_smem) + 1023) & ~1023u;
  const BackwardBarriers barriers(smem + L::kBarriers);
  __shared__ BackwardTaskOf<L::kOrdered> task;
  __shared__ ConvertTask<T> convert;
  __shared__ BackwardSteps<L::kRows, Featured> steps;
  if (threadIdx.x == 0) barriers.init<L::kOrdered>();
  if (threadIdx.x == 32) task = find_task<L::kOrdered>(params.forward, grid, L::kRows, L::kKeys);
  __syncthreads();
  if constexpr (Featured) count_steps<L>(steps, task, params, grid);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    registers_release<24>();
    if (threadIdx.x >= 32) {
      if constexpr (L::kWithDq) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int head = task.b * params.forward.problem.kv_heads + task.kv_head;
        const AccumulatorShare share(
            static_cast<int>(grid.workspace.padded_rows / kBackwardUnit) * grid.group,
            task.first_key / L::kKeys, grid.key_blocks, grid.triangular);
        grid_dependency_wait();
        if (warp != 1) {
          convert_behind<T, HeadDim>(params, grid, head, share, convert, warp - 2, lane);
        } else if constexpr (L::kOrdered) {
          if (lane == 0) add_in_order<L, HeadDim>(params, grid, task, barriers, smem);
        } else {
          zero_ahead<HeadDim>(grid, head, share, lane);
        }
      }
      return;
    }
    if (task.steps() == 0)
      grid_dependency_wait();  // the pass after this kernel relies on every block having waited
    else
      produce<L, HeadDim>(maps, params, grid, task, steps, barriers, smem, threadIdx.x);
  } else {
    registers_claim<240>();
    BackwardConsumer<T, HeadDim, Sum, Featured>(maps, params, grid, task, steps, barriers, smem,
                                                warpgroup - 1)
        .run();
  }
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_BACKWARD_KEYS_SM90_CUH_
