// dK and dV on Hopper for head dims over 128, whose gradients of 128 keys do not fit in the
// registers of two warpgroups. A block owns 64 keys; the warpgroups share every score and split the
// head dim:
//
// - scores: S^T = K Q^T and P^T, which it hands over
// - gradients: dP^T = V dO^T and dS^T, which it hands over
// - each: dV[:, mine] += P^T dO, dK[:, mine] += dS^T Q
//
// What is handed over goes through shared memory fragment by fragment, 16 bytes a thread: the
// receiver holds the A operand of its products without a shuffle, a swizzle or the async proxy. dQ
// comes from backward_dq_sm90.cuh: its accumulator would be more than L2 can add.
#ifndef FLASHATTN_CUDA_BACKWARD_WIDE_SM90_CUH_
#define FLASHATTN_CUDA_BACKWARD_WIDE_SM90_CUH_

#include "backward_passes.cuh"
#include "backward_plan.h"
#include "backward_producer_sm90.cuh"
#include "backward_sm90_parts.cuh"
#include "device.h"
#include "params.h"
#include "ptx_sm90.cuh"

namespace flashattn {

template <int HeadDim, bool Featured>
struct BackwardWideLayout {
  static constexpr int kRows = 64, kKeys = 64;
  static constexpr int kStages = 2;  // of Q and of dO
  static constexpr bool kLooksAhead = true, kOrdered = false, kZeroesAhead = false;
  static constexpr int kChunks = HeadDim / 64;
  // The warpgroup of the scores has the exponentials, so where the chunks do not split evenly it
  // takes fewer columns.
  static constexpr int kScoresColumns = kChunks / 2 * 64;

  static constexpr int kKeyBytes = kKeys * HeadDim * 2, kQueryBytes = kRows * HeadDim * 2;
  static constexpr int kKeyChunk = kKeys * 128, kQueryChunk = kRows * 128;
  static constexpr int kStatBytes = kRows * 4;
  static constexpr int kExchangeBytes = kRows * kKeys * 2;

  static constexpr int kK = 0, kV = kKeyBytes, kQ = 2 * kKeyBytes;
  static constexpr int kDout = kQ + kStages * kQueryBytes;
  static constexpr int kP = kDout + kStages * kQueryBytes, kDs = kP + kExchangeBytes;
  static constexpr int kLse = kDs + kExchangeBytes, kDelta = kLse + kStages * kStatBytes;
  static constexpr int kBarriers = kDelta + kStages * kStatBytes;
  static constexpr int kDerivatives = kBarriers + 128;  // of a soft cap, handed over beside P
  static constexpr int kBytes = kDerivatives + (Featured ? kExchangeBytes : 0) + 1024;
};

// What both warpgroups have: Columns of dK and dV from column FirstColumn on.
template <class T, int HeadDim, int FirstColumn, int Columns, bool Featured>
class BackwardWideHalf {
 public:
  using L = BackwardWideLayout<HeadDim, Featured>;
  static constexpr int kRows = L::kRows;
  using Steps = BackwardSteps<kRows, Featured>;

  __device__ __forceinline__ BackwardWideHalf(const BackwardMaps& maps, const BackwardGrid& grid,
                                              const BackwardTask& task, const Steps& steps,
                                              const BackwardBarriers& barriers, uint32_t smem)
      : maps_(maps),
        grid_(grid),
        task_(task),
        steps_(steps),
        barriers_(barriers),
        smem_(smem),
        thread_(threadIdx.x & 127),
        stats_(smem + (threadIdx.x & 3) * 8) {}

 protected:
  static constexpr int kPReady = 1, kDsReady = 2, kStored = 3;

  __device__ __forceinline__ void clear_gradients() {
#pragma unroll
    for (int i = 0; i < Columns / 2; ++i) dk_[i] = dv_[i] = 0.f;
  }

  // The steps with features, any of which may need a mask.
  template <class Step>
  __device__ __forceinline__ void for_each_found_step(const Step& step) const {
#pragma unroll 1
    for (int left = steps_.count(); left > 0; --left) step();
  }

  // d (64 keys x kRows) = own tile (K or V) times a tile of rows, transposed.
  __device__ __forceinline__ void issue_products(float (&d)[kRows / 2], uint32_t keys_tile,
                                                 uint32_t rows_tile) {
    uint32_t a = descriptor_low_k_major(keys_tile), b = descriptor_low_k_major(rows_tile);
    opaque(a);
    opaque(b);
    wgmma_fence();
    issue_over_head_dim<T, HeadDim, kRows, L::kKeyChunk, L::kQueryChunk>(d, a, b);
    wgmma_commit();
  }

  // d += a times my columns of a tile of rows.
  __device__ __forceinline__ void issue_gradient(float (&d)[Columns / 2],
                                                 const uint32_t (&a)[kRows / 4],
                                                 uint32_t rows_tile) {
    uint32_t b = descriptor_low_mn_major(rows_tile + FirstColumn / 64 * L::kQueryChunk, kRows);
    opaque(b);
    wgmma_fence();
    issue_over_rows<T, Columns, kRows>(d, a, b, true);
    wgmma_commit();
  }

  __device__ __forceinline__ uint32_t q_tile() const {
    return smem_ + L::kQ + ring_.stage * L::kQueryBytes;
  }
  __device__ __forceinline__ uint32_t dout_tile() const {
    return smem_ + L::kDout + ring_.stage * L::kQueryBytes;
  }

  __device__ __forceinline__ void hand_over(int buffer, const uint32_t (&x)[kRows / 4]) {
#pragma unroll
    for (int j = 0; j < kRows / 16; ++j)
      store_shared_16(smem_ + buffer + j * 2048 + thread_ * 16,
                      {x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]});
  }
  __device__ __forceinline__ void take_over(int buffer, uint32_t (&x)[kRows / 4]) {
#pragma unroll
    for (int j = 0; j < kRows / 16; ++j) {
      const uint4 words = load_shared_16(smem_ + buffer + j * 2048 + thread_ * 16);
      x[4 * j] = words.x;
      x[4 * j + 1] = words.y;
      x[4 * j + 2] = words.z;
      x[4 * j + 3] = words.w;
    }
  }

  // The first of this thread's two keys; the other is 8 further.
  __device__ __forceinline__ int first_key() const {
    return task_.first_key + 16 * (thread_ >> 5) + (thread_ & 31) / 4;
  }

  // dV and dK into the places of V and K, once the other warpgroup has read them for the last time.
  __device__ __forceinline__ void store_gradients() {
    named_barrier_sync(kPReady, 256);
    const bool exists = task_.keys.has(first_key()), exists_8 = task_.keys.has(first_key() + 8);
    const uint32_t first_chunk = smem_ + FirstColumn / 64 * L::kKeyChunk;
    fragments_to_shared<T, Columns>(dv_, first_chunk + L::kV, L::kKeyChunk, 1.f, exists, exists_8);
    fragments_to_shared<T, Columns>(dk_, first_chunk + L::kK, L::kKeyChunk, grid_.scale, exists,
                                    exists_8);
    store_shared();
  }

  __device__ __forceinline__ void store_zeros() {
    const uint32_t first_chunk = smem_ + FirstColumn / 64 * L::kKeyChunk;
    clear_chunks(first_chunk + L::kV, Columns / 64, L::kKeyChunk);
    clear_chunks(first_chunk + L::kK, Columns / 64, L::kKeyChunk);
    store_shared();
  }

  __device__ __forceinline__ void store_shared() {
    fence_async_proxy();
    named_barrier_sync(FirstColumn == 0 ? kStored : kStored + 1, 128);
    if (thread_ == 0) {
#pragma unroll
      for (int chunk = FirstColumn / 64; chunk < (FirstColumn + Columns) / 64; ++chunk) {
        const uint32_t from = smem_ + chunk * L::kKeyChunk;
        tma_store_4d(&maps_.dv, from + L::kV, chunk * 64, task_.first_key, task_.kv_head, task_.b);
        tma_store_4d(&maps_.dk, from + L::kK, chunk * 64, task_.first_key, task_.kv_head, task_.b);
      }
      bulk_commit();
      bulk_wait_read<0>();
    }
  }

  const BackwardMaps& maps_;
  const BackwardGrid& grid_;
  const BackwardTask& task_;
  const Steps& steps_;
  const BackwardBarriers& barriers_;
  const uint32_t smem_;
  const int thread_;
  const uint32_t stats_;

  float dk_[Columns / 2], dv_[Columns / 2];
  uint32_t p_[kRows / 4], ds_[kRows / 4];
  RingPosition<2> ring_;  // of Q, lse2, dO and delta
};

// ---- the warpgroup of S and P
template <class T, int HeadDim, bool Featured>
class BackwardWideScores
    : BackwardWideHalf<T, HeadDim, 0, BackwardWideLayout<HeadDim, Featured>::kScoresColumns,
                       Featured> {
  using Half = BackwardWideHalf<T, HeadDim, 0,
                                BackwardWideLayout<HeadDim, Featured>::kScoresColumns, Featured>;
  using Half::kRows, Half::task_, Half::steps_, Half::grid_, Half::barriers_, Half::smem_,
      Half::thread_, Half::ring_, Half::p_, Half::ds_;
  using typename Half::L;

 public:
  using Half::Half;

  __device__ __forceinline__ void run() {
    if (task_.steps() == 0) {
      Half::store_zeros();
      return;
    }
    mbarrier_wait(barriers_.k_full, 0);
    issue_scores();
    wgmma_wait<0>();
    Half::clear_gradients();
    if constexpr (Featured)
      Half::for_each_found_step([&] {
        step<true>();
        wgmma_wait<0>();
      });
    else
      walk();
    Half::store_gradients();
  }

 private:
  __device__ __forceinline__ void walk() {
    // Loop edges are full waits, as in backward_keys_sm90.cuh.
#pragma unroll 1
    for (int g = 0; g < grid_.group; ++g) {
      step_ = task_.first_step;
      int masked_end = task_.plain_begin;
#pragma unroll 1
      for (;;) {
#pragma unroll 1
        while (step_ < masked_end) {
          step<true>();
          wgmma_wait<0>();
        }
        int plain = max(0, task_.plain_end - step_);
        if (plain % 2 != 0) {
          step<false>();
          wgmma_wait<0>();
        }
#pragma unroll 1
        for (; plain > 1; plain -= 2) {
          step<false>();
          step<false>();
          wgmma_wait<0>();
        }
        masked_end = task_.end_step;  // what the far edge of a window cuts
        if (step_ == masked_end) break;
      }
    }
  }

  __device__ __forceinline__ void issue_scores() {
    mbarrier_wait(barriers_.q_full + 8 * ring_.stage, ring_.phase);
    Half::issue_products(s_, smem_ + L::kK, Half::q_tile());
  }

  template <bool Masked>
  __device__ __forceinline__ void exponentials() {
    const uint32_t lse2 = Half::stats_ + L::kLse + ring_.stage * L::kStatBytes;
    if constexpr (Featured) {
      featured_probabilities<T, kRows>(s_, lse2, grid_, task_, steps_, ring_.stage,
                                       Half::first_key());
      return;
    }
    const int first_row = step_ * kRows + 2 * (thread_ & 3);
    probabilities<kRows, Masked>(s_, lse2, grid_.scale_log2,
                                 Masked ? task_.first_row(Half::first_key()) - first_row : 0,
                                 Masked ? task_.first_row(Half::first_key() + 8) - first_row : 0);
    if (Masked && step_ >= task_.far_step)
      hide_from<kRows>(s_, task_.end_row(Half::first_key()) - first_row,
                       task_.end_row(Half::first_key() + 8) - first_row);
  }

  // On entry S of this block is there and dV of the one before it may still run; the exponentials
  // run under it and under what the other warpgroup has in flight.
  template <bool Masked>
  __device__ __forceinline__ void step() {
    exponentials<Masked>();
    // The stage's Q is there since S was issued: it passes at once, and its branch keeps the
    // exponentials ahead of the wait for dV.
    mbarrier_wait(barriers_.q_full + 8 * ring_.stage, ring_.phase);
    wgmma_wait<0>();
    mbarrier_arrive_if(thread_ == 0 && started_, barriers_.dout_empty + 8 * (ring_.stage ^ 1));
    if constexpr (Featured)
      hand_over_capped();
    else
      pack_pairs<T>(p_, s_);
    Half::hand_over(L::kP, p_);
    named_barrier_arrive(Half::kPReady, 256);
    started_ = true;
    ++step_;

    const uint32_t q = Half::q_tile(), dout = Half::dout_tile(), stage = ring_.stage;
    mbarrier_wait(barriers_.dout_full + 8 * stage, ring_.phase);
    ring_.advance();
    named_barrier_sync(Half::kDsReady, 256);
    Half::take_over(L::kDs, ds_);
    Half::issue_gradient(Half::dk_, ds_, q);
    issue_scores();  // of the next block; after the last one of nothing, and nobody reads it
    Half::issue_gradient(Half::dv_, p_, dout);
    wgmma_wait<1>();
    mbarrier_arrive_if(thread_ == 0, barriers_.q_empty + 8 * stage);
  }

  // P to p_, and the derivatives of a cap to the other warpgroup.
  __device__ __forceinline__ void hand_over_capped() {
    pack_probabilities<T>(p_, s_, grid_.cap);
    if (!grid_.cap.is_given()) return;
    uint32_t derivatives[kRows / 4];
#pragma unroll
    for (int w = 0; w < kRows / 4; ++w) derivatives[w] = capped_derivative(s_, w);
    Half::hand_over(L::kDerivatives, derivatives);
  }

  float s_[kRows / 2];
  int step_ = 0;
  bool started_ = false;
};

// ---- the warpgroup of dP and dS
template <class T, int HeadDim, bool Featured>
class BackwardWideGradients
    : BackwardWideHalf<T, HeadDim, BackwardWideLayout<HeadDim, Featured>::kScoresColumns,
                       HeadDim - BackwardWideLayout<HeadDim, Featured>::kScoresColumns, Featured> {
  using Half =
      BackwardWideHalf<T, HeadDim, BackwardWideLayout<HeadDim, Featured>::kScoresColumns,
                       HeadDim - BackwardWideLayout<HeadDim, Featured>::kScoresColumns, Featured>;
  using Half::kRows, Half::task_, Half::steps_, Half::grid_, Half::barriers_, Half::smem_,
      Half::thread_, Half::ring_, Half::p_, Half::ds_;
  using typename Half::L;

 public:
  using Half::Half;

  __device__ __forceinline__ void run() {
    if (task_.steps() == 0) {
      Half::store_zeros();
      return;
    }
    mbarrier_wait(barriers_.v_full, 0);
    issue_dp();
    wgmma_wait<0>();
    Half::clear_gradients();
    if constexpr (Featured)
      Half::for_each_found_step([&] { step<true>(); });
    else
      walk();
    Half::store_gradients();
  }

 private:
  __device__ __forceinline__ void walk() {
#pragma unroll 1
    for (int g = 0; g < grid_.group; ++g) {
      int i = task_.first_step, masked_end = task_.plain_begin;
#pragma unroll 1
      for (;;) {
#pragma unroll 1
        for (; i < masked_end; ++i) step<true>();
#pragma unroll 1
        for (; i < task_.plain_end; ++i) step<false>();
        masked_end = task_.end_step;
        if (i == masked_end) break;
      }
    }
  }

  __device__ __forceinline__ void issue_dp() {
    mbarrier_wait(barriers_.dout_full + 8 * ring_.stage, ring_.phase);
    Half::issue_products(dp_, smem_ + L::kV, Half::dout_tile());
  }

  // On entry dP of this block is there. dS is formed under dV.
  template <bool Masked>
  __device__ __forceinline__ void step() {
    const uint32_t q = Half::q_tile(), stage = ring_.stage, phase = ring_.phase;
    named_barrier_sync(Half::kPReady, 256);
    Half::take_over(L::kP, p_);
    Half::issue_gradient(Half::dv_, p_, Half::dout_tile());
    if constexpr (Featured)
      if (task_.hides(steps_.note_of(stage))) steps_.check(dp_);
    score_gradients<T, kRows, Masked>(ds_, p_, dp_,
                                      Half::stats_ + L::kDelta + stage * L::kStatBytes);
    if constexpr (Featured)
      if (grid_.cap.is_given()) apply_derivatives();
    Half::hand_over(L::kDs, ds_);
    named_barrier_arrive(Half::kDsReady, 256);
    ring_.advance();
    mbarrier_wait(barriers_.q_full + 8 * stage, phase);
    Half::issue_gradient(Half::dk_, ds_, q);
    issue_dp();  // of the next block; after the last one of nothing, and nobody reads it
    wgmma_wait<0>();
    mbarrier_arrive_if(thread_ == 0, barriers_.q_empty + 8 * stage);
    mbarrier_arrive_if(thread_ == 0, barriers_.dout_empty + 8 * stage);
  }

  __device__ __forceinline__ void apply_derivatives() {
    uint32_t derivatives[kRows / 4];
    Half::take_over(L::kDerivatives, derivatives);
#pragma unroll
    for (int w = 0; w < kRows / 4; ++w) {
      const float2 ds = unpack<T>(ds_[w]), derivative = unpack<__half>(derivatives[w]);
      ds_[w] = pack<T>(ds.x * derivative.x, ds.y * derivative.y);
    }
  }

  float dp_[kRows / 2];
};

template <class T, int HeadDim, bool Featured>
__global__ void __launch_bounds__(384, 1)
    backward_wide_sm90_kernel(const __grid_constant__ BackwardMaps maps,
                              const __grid_constant__ BackwardParams params,
                              const __grid_constant__ BackwardGrid grid) {
  using L = BackwardWideLayout<HeadDim, Featured>;
  extern __shared__ char raw_smem[];
  __shared__ BackwardTask task;
  __shared__ BackwardSteps<L::kRows, Featured> steps;
  const uint32_t smem = (shared_address(raw_smem) + 1023) & ~1023u;
  const BackwardBarriers barriers(smem + L::kBarriers);
  if (threadIdx.x == 0) barriers.init<L::kOrdered>();
  if (threadIdx.x == 32) task = find_task<L::kOrdered>(params.forward, grid, L::kRows, L::kKeys);
  __syncthreads();
  if constexpr (Featured) count_steps<L>(steps, task, params, grid);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    registers_release<24>();
    if (threadIdx.x < 32 && task.steps() > 0)
      produce<L, HeadDim>(maps, params, grid, task, steps, barriers, smem, threadIdx.x);
  } else {
    registers_claim<240>();
    if (warpgroup == 1)
      BackwardWideScores<T, HeadDim, Featured>(maps, grid, task, steps, barriers, smem).run();
    else
      BackwardWideGradients<T, HeadDim, Featured>(maps, grid, task, steps, barriers, smem).run();
  }
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_BACKWARD_WIDE_SM90_CUH_
