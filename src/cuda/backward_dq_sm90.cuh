// dQ on Hopper without a sum over blocks: what deterministic calls, and head dims whose accumulator
// would overload L2, get. A block owns 128 query rows of one head, keeps Q and dO in shared memory
// and dQ in registers, and walks over the keys that they see:
//
//   S = Q K^T   dP = dO V^T   dS = exp2(scale log2e S - lse2) (dP - delta)   dQ += dS K
//
// Each consumer warpgroup takes 64 rows; dS is the A operand of dQ as it lies in registers, so that
// nothing is exchanged and the warpgroups drift apart: one computes exponentials under the other's
// products.
#ifndef FLASHATTN_CUDA_BACKWARD_DQ_SM90_CUH_
#define FLASHATTN_CUDA_BACKWARD_DQ_SM90_CUH_

#include "backward_features_sm90.cuh"
#include "backward_passes.cuh"
#include "backward_plan.h"
#include "backward_sm90_parts.cuh"
#include "device.h"
#include "params.h"
#include "ptx_sm90.cuh"

namespace flashattn {

template <int HeadDim>
struct BackwardDqLayout {
  static constexpr BackwardDqTile kTile = backward_dq_tile_sm90(HeadDim);
  static constexpr int kRows = 128, kKeys = kTile.keys;
  static constexpr int kKStages = 2, kVStages = kTile.v_stages;
  static constexpr int kChunks = HeadDim / 64;
  static constexpr int kQueryBytes = kRows * HeadDim * 2, kKeyBytes = kKeys * HeadDim * 2;
  static constexpr int kQueryChunk = kRows * 128, kKeyChunk = kKeys * 128;
  static constexpr int kHalf = 64 * 128;  // a warpgroup's rows in a chunk of Q or dO

  static constexpr int kQ = 0, kDout = kQueryBytes, kK = 2 * kQueryBytes;
  static constexpr int kV = kK + kKStages * kKeyBytes;
  static constexpr int kBarriers = kV + kVStages * kKeyBytes;
  static constexpr int kBytes = kBarriers + 128 + 1024;
};

struct BackwardDqBarriers {
  uint32_t q_full, repair, k_full, k_empty, v_full,
      v_empty;  // of stage 0, the next 8 bytes further

  __device__ explicit BackwardDqBarriers(uint32_t base)
      : q_full(base),
        repair(base + 8),
        k_full(base + 16),
        k_empty(base + 32),
        v_full(base + 48),
        v_empty(base + 64) {}

  __device__ void init() const {
    mbarrier_init(q_full, 1);
    mbarrier_init(repair, 1);
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(k_full + 8 * i, 1);
      mbarrier_init(v_full + 8 * i, 1);
      mbarrier_init(k_empty + 8 * i, 2);  // one arrival a warpgroup
      mbarrier_init(v_empty + 8 * i, 2);
    }
    mbarrier_init_fence();
  }
};

struct BackwardDqMaps {
  CUtensorMap q, dout, k, v, dq;
};

struct BackwardDqGrid {
  int query_blocks, section;  // section: query heads whose blocks are interleaved
  float scale, scale_log2;
  BackwardWorkspace workspace;
  BackwardCap cap;
  BackwardMask mask;
};

// ---- which rows a block owns and which keys they see; in shared memory, as BackwardTask
struct BackwardDqTask {
  int b, head, first_row;
  int low, high;      // row i sees key j iff low <= j - i <= high
  Range keys, valid;  // of the sequence: keys that some row sees, rows that see some key
  // Walked from the last to the first; the plain ones need no mask, those before far_end meet the
  // far edge, that of a window's left side. The first block is not plain.
  Range blocks, plain;
  int far_end;

  // The keys that a row sees.
  __device__ __forceinline__ int first_key(int row) const { return row + low; }
  __device__ __forceinline__ int end_key(int row) const { return min(keys.end, row + high + 1); }
};

__device__ inline BackwardDqTask find_dq_task(const PrefillParams& forward,
                                              const BackwardDqGrid& grid, int rows, int keys) {
  const Problem& problem = forward.problem;
  // Heads run fastest and rows downwards: under a causal mask the longest blocks first.
  const int heads = problem.batch * problem.q_heads;
  const int per_section = grid.query_blocks * grid.section;
  const int section = blockIdx.x / per_section, inside = blockIdx.x % per_section;
  const int section_heads = min(grid.section, heads - section * grid.section);
  const int head = section * grid.section + inside % section_heads;
  BackwardDqTask task;
  task.b = head / problem.q_heads;
  task.head = head % problem.q_heads;
  task.first_row = (grid.query_blocks - 1 - inside / section_heads) * rows;
  const Sequence sequence(forward, task.b);
  task.low = sequence.low;
  task.high = min(sequence.high, 1 << 30);  // so that no sum with a row overflows
  task.keys = keys_seen(sequence);
  task.valid = rows_with_keys(sequence);

  const int begin_row = max(task.first_row, task.valid.begin);
  const int end_row = min(task.first_row + rows, task.valid.end);
  task.blocks = task.plain = {0, 0};
  task.far_end = 0;
  if (begin_row >= end_row) return task;

  const Range seen = sequence.keys_seen_by(begin_row, end_row - 1);
  task.blocks = {seen.begin / keys, (seen.end + keys - 1) / keys};
  task.far_end = (max(0, task.first_key(end_row - 1)) + keys - 1) / keys;
  task.plain = {max(task.blocks.begin + 1, task.far_end),
                min(task.blocks.end, max(0, task.end_key(task.first_row)) / keys)};
  if (task.plain.begin >= task.plain.end) task.plain.begin = task.plain.end = task.blocks.begin + 1;
  return task;
}

// A featured block's steps, by the whole block, once it knows its task. L is its layout.
template <class L>
__device__ void count_blocks(FoundSteps<L::kKeys>& steps, BackwardDqTask& task,
                             const BackwardParams& params, const BackwardDqGrid& grid) {
  if (threadIdx.x == 0) {
    const Features& features = params.forward.features;
    const UnitRanges ranges(grid.workspace.dq_segments, {L::kRows, L::kKeys},
                            params.forward.problem, task.b);
    const int block = task.first_row / L::kRows;
    steps.fill(params.forward, features.query_segments, ranges.queries + block,
               features.key_segments, ranges.keys, grid.mask, task.b, block, 0, grid.workspace);
  }
  __syncthreads();
  steps.count(task.blocks.begin, task.blocks.end, task.head, 1);
  if (threadIdx.x == 0 && steps.count() == 0) task.blocks = {0, 0};
  __syncthreads();
}

template <class L, int HeadDim, class Steps>
__device__ __forceinline__ void produce_dq(const BackwardDqMaps& maps, const BackwardParams& params,
                                           const BackwardDqTask& task, Steps& steps,
                                           const BackwardDqBarriers& barriers, uint32_t smem,
                                           int lane) {
  const PrefillParams& forward = params.forward;
  BackwardLoader<HeadDim> loader{barriers.repair, lane};
  if (lane == 0) {
    // A row that does not exist spoils no other here, and its own result is not stored.
    mbarrier_expect_tx(barriers.q_full, 2 * L::kQueryBytes);
    loader.template load_chunks<L::kRows>(smem + L::kQ, &maps.q, barriers.q_full, task.first_row,
                                          task.head, task.b % forward.q.batches);
    loader.template load_chunks<L::kRows>(smem + L::kDout, &maps.dout, barriers.q_full,
                                          task.first_row, task.head, task.b);
  }
  const int kv_head = task.head / forward.problem.group();
  RingPosition<L::kKStages> k_ring;
  RingPosition<L::kVStages> v_ring;
#pragma unroll 1
  for (int block = steps.back_from(task.blocks.end - 1, task.blocks.begin);
       block >= task.blocks.begin; block = steps.back_from(block - 1, task.blocks.begin)) {
    mbarrier_wait(barriers.k_empty + 8 * k_ring.stage, k_ring.phase ^ 1);
    steps.note(k_ring.stage, block);
    loader.template load<L::kKeys>(smem + L::kK + k_ring.stage * L::kKeyBytes, &maps.k,
                                   barriers.k_full + 8 * k_ring.stage, block * L::kKeys, kv_head,
                                   task.b % forward.k.batches, task.keys, forward.problem.kv_len,
                                   0);
    k_ring.advance();
    mbarrier_wait(barriers.v_empty + 8 * v_ring.stage, v_ring.phase ^ 1);
    loader.template load<L::kKeys>(smem + L::kV + v_ring.stage * L::kKeyBytes, &maps.v,
                                   barriers.v_full + 8 * v_ring.stage, block * L::kKeys, kv_head,
                                   task.b % forward.v.batches, task.keys, forward.problem.kv_len,
                                   0);
    v_ring.advance();
  }
}

// ---- one consumer warpgroup: 64 of the block's rows
template <class T, int HeadDim, bool Featured>
class BackwardDqConsumer {
 public:
  using L = BackwardDqLayout<HeadDim>;
  static constexpr int kKeys = L::kKeys;
  using Steps = BackwardSteps<kKeys, Featured>;

  __device__ __forceinline__ BackwardDqConsumer(const BackwardDqMaps& maps,
                                                const BackwardDqGrid& grid,
                                                const BackwardDqTask& task, const Steps& steps,
                                                const BackwardDqBarriers& barriers, uint32_t smem,
                                                int q_heads, int warpgroup)
      : maps_(maps),
        grid_(grid),
        task_(task),
        steps_(steps),
        barriers_(barriers),
        smem_(smem),
        warpgroup_(warpgroup),
        thread_(threadIdx.x & 127) {
    grid_dependency_wait();
    const int64_t row =
        (int64_t{task.b} * q_heads + task.head) * grid.workspace.padded_rows + first_row();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      lse2_[i] = grid.workspace.lse2[row + 8 * i];
      delta_[i] = grid.workspace.delta[row + 8 * i];
    }
  }

  __device__ __forceinline__ void run() {
    if (task_.blocks.end == 0) {
      store_zeros();
      return;
    }
    block_ = task_.blocks.end - 1;
    mbarrier_wait(barriers_.q_full, 0);
    issue_scores();
    wgmma_wait<0>();
    // As in backward_keys_sm90.cuh, every loop edge is a full wait. The last block ends the
    // pipeline and is masked whether it needs it or not: one copy of a step less.
    clear_dq();
    if constexpr (Featured)
      walk_found();
    else
      walk();
    step<true, false>();
    wgmma_wait<0>();
    store_dq();
  }

 private:
  // All blocks but the last; with features any of them may need a mask.
  __device__ __forceinline__ void walk_found() {
#pragma unroll 1
    for (int left = steps_.count() - 1; left > 0; --left) {
      step<true, true>();
      wgmma_wait<0>();
    }
  }

  __device__ __forceinline__ void walk() {
    int masked = task_.blocks.end - task_.plain.end, plain = task_.plain.end - task_.plain.begin;
#pragma unroll 1
    for (; masked > 0; --masked) {
      step<true, true>();
      wgmma_wait<0>();
    }
    if (plain & 1) {
      step<false, true>();
      wgmma_wait<0>();
    }
#pragma unroll 1
    for (plain &= ~1; plain > 0; plain -= 2) {
      step<false, true>();
      step<false, true>();
      wgmma_wait<0>();
    }
    // What the far edge of a window cuts.
#pragma unroll 1
    while (block_ > task_.blocks.begin) {
      step<true, true>();
      wgmma_wait<0>();
    }
  }

  // The first of this thread's two rows; the other is 8 further.
  __device__ __forceinline__ int first_row() const {
    return task_.first_row + 64 * warpgroup_ + 16 * (thread_ >> 5) + (thread_ & 31) / 4;
  }

  __device__ __forceinline__ void clear_dq() {
#pragma unroll
    for (int i = 0; i < HeadDim / 2; ++i) dq_[i] = 0.f;
  }

  __device__ __forceinline__ void issue_scores() {
    uint32_t q = descriptor_low_k_major(smem_ + L::kQ + warpgroup_ * L::kHalf);
    uint32_t k = descriptor_low_k_major(smem_ + L::kK + k_ring_.stage * L::kKeyBytes);
    opaque(q);
    opaque(k);
    mbarrier_wait(barriers_.k_full + 8 * k_ring_.stage, k_ring_.phase);
    wgmma_fence();
    issue_over_head_dim<T, HeadDim, kKeys, L::kQueryChunk, L::kKeyChunk>(s_, q, k);
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_dp() {
    uint32_t dout = descriptor_low_k_major(smem_ + L::kDout + warpgroup_ * L::kHalf);
    uint32_t v = descriptor_low_k_major(smem_ + L::kV + v_ring_.stage * L::kKeyBytes);
    opaque(dout);
    opaque(v);
    mbarrier_wait(barriers_.v_full + 8 * v_ring_.stage, v_ring_.phase);
    wgmma_fence();
    issue_over_head_dim<T, HeadDim, kKeys, L::kQueryChunk, L::kKeyChunk>(dp_, dout, v);
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_dq(uint32_t k_stage) {
    uint32_t k = descriptor_low_mn_major(smem_ + L::kK + k_stage * L::kKeyBytes, kKeys);
    opaque(k);
    wgmma_fence();
    issue_over_rows<T, HeadDim, kKeys>(dq_, ds_, k, true);
    wgmma_commit();
  }

  // In flight on entry: S of this block and dQ of the one before it; on exit the same one block
  // further.
  template <bool Masked, bool HasNext>
  __device__ __forceinline__ void step() {
    issue_dp();
    wgmma_wait<1>();
    mbarrier_arrive_if(thread_ == 0 && block_ != task_.blocks.end - 1,
                       barriers_.k_empty + 8 * (k_ring_.stage ^ 1));
    exponentials<Masked>();
    // Passes at once; its branch keeps the exponentials ahead of the wait for dP.
    mbarrier_wait(barriers_.v_full + 8 * v_ring_.stage, v_ring_.phase);
    wgmma_wait<0>();
    mbarrier_arrive_if(thread_ == 0, barriers_.v_empty + 8 * v_ring_.stage);
    v_ring_.advance();
    check(dp_);
    form_ds<Masked>();
    const uint32_t k_stage = k_ring_.stage;
    k_ring_.advance();
    if constexpr (HasNext) issue_scores();
    issue_dq(k_stage);
    --block_;
  }

  template <bool Masked>
  __device__ __forceinline__ void exponentials() {
    if constexpr (Featured) return featured_exponentials();
    const int first_key = block_ * kKeys + 2 * (thread_ & 3);
    const int limit = Masked ? task_.end_key(first_row()) - first_key : 0;
    const int limit_8 = Masked ? task_.end_key(first_row() + 8) - first_key : 0;
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = s_[4 * j + i];
        x = exp2_approx(fmaf(x, grid_.scale_log2, -lse2_[i / 2]));
        if (Masked && 8 * j + (i & 1) >= (i < 2 ? limit : limit_8)) x = 0.f;
      }
    if (Masked && block_ < task_.far_end)
      hide_before<kKeys>(s_, task_.first_key(first_row()) - first_key,
                         task_.first_key(first_row() + 8) - first_key);
  }

  __device__ __forceinline__ void featured_exponentials() {
    const StepNote note = steps_.note_of(k_ring_.stage);
    block_ = note.step();
    const bool is_cut = !task_.plain.has(block_);
    hides_ = is_cut || note.mixed() || note.masked();
    check(s_);
    const int stage = k_ring_.stage, first_key = block_ * kKeys + 2 * (thread_ & 3);
    // The other way round, since here the columns are keys.
    const float distance = -steps_.distance(first_row(), first_key);
    const auto lse2_of = [&](int) { return OfRows{{lse2_[0], lse2_[1]}}; };
    begin_probabilities(s_, grid_.cap, grid_.scale_log2, steps_, stage, distance, lse2_of);
    const float hidden = grid_.cap.is_given() ? kHiddenTanh : 0.f;
    if (is_cut) {
      hide_from<kKeys>(s_, task_.end_key(first_row()) - first_key,
                       task_.end_key(first_row() + 8) - first_key, hidden);
      if (block_ < task_.far_end)
        hide_before<kKeys>(s_, task_.first_key(first_row()) - first_key,
                           task_.first_key(first_row() + 8) - first_key, hidden);
    }
    if (note.mixed()) hide_other_segments<kKeys>(s_, steps_, stage, first_row(), hidden);
    if (note.masked()) hide_by_mask<kKeys>(s_, steps_, stage, first_row(), hidden);
    if (grid_.cap.is_given()) {
      if (steps_.has_alibi())
        finish_capped<T, true>(s_, grid_.cap, steps_.log2_slope(stage), distance, lse2_of);
      else
        finish_capped<T, false>(s_, grid_.cap, 0.f, distance, lse2_of);
    }
  }

  // A row spoils no other here. One that contributes nothing tells nothing of the keys either.
  __device__ __forceinline__ void check(const float (&products)[kKeys / 2]) const {
    if constexpr (Featured) {
      if (!hides_ || !contributes(0) && !contributes(1)) return;
      steps_.check_columns(products, contributes(0) ? 0 : 1);
    }
  }
  __device__ __forceinline__ bool contributes(int row) const { return lse2_[row] != INFINITY; }

  template <bool Masked>
  __device__ __forceinline__ void form_ds() {
    if constexpr (Featured) {
      if (grid_.cap.is_given())
        return capped_gradients<T>(ds_, s_, dp_,
                                   [&](int) { return OfRows{{delta_[0], delta_[1]}}; });
    }
#pragma unroll
    for (int j = 0; j < kKeys / 4; ++j) {
      const float d = delta_[j % 2];
      ds_[j] = pack<T>(score_gradient<Masked>(s_[2 * j], dp_[2 * j], d),
                       score_gradient<Masked>(s_[2 * j + 1], dp_[2 * j + 1], d));
    }
  }

  // ---- the end: dQ into Q's place in shared memory, which is this warpgroup's own
  __device__ __forceinline__ void store_dq() {
    bool exists = task_.valid.has(first_row()), exists_8 = task_.valid.has(first_row() + 8);
    if constexpr (Featured) exists &= contributes(0), exists_8 &= contributes(1);
    fragments_to_shared<T, HeadDim>(dq_, smem_ + L::kQ + warpgroup_ * L::kHalf, L::kQueryChunk,
                                    grid_.scale, exists, exists_8);
    store_shared();
  }

  __device__ __forceinline__ void store_zeros() {
    clear_chunks(smem_ + L::kQ + warpgroup_ * L::kHalf, L::kChunks, L::kQueryChunk);
    store_shared();
  }

  __device__ __forceinline__ void store_shared() {
    fence_async_proxy();
    named_barrier_sync(1 + warpgroup_, 128);
    if (thread_ == 0) {
#pragma unroll
      for (int chunk = 0; chunk < L::kChunks; ++chunk)
        tma_store_4d(&maps_.dq, smem_ + L::kQ + chunk * L::kQueryChunk + warpgroup_ * L::kHalf,
                     chunk * 64, task_.first_row + 64 * warpgroup_, task_.head, task_.b);
      bulk_commit();
      bulk_wait_read<0>();
    }
  }

  const BackwardDqMaps& maps_;
  const BackwardDqGrid& grid_;
  const BackwardDqTask& task_;
  const Steps& steps_;
  const BackwardDqBarriers& barriers_;
  const uint32_t smem_;
  const int warpgroup_, thread_;

  float s_[kKeys / 2], dp_[kKeys / 2], dq_[HeadDim / 2];
  uint32_t ds_[kKeys / 4];
  float lse2_[2], delta_[2];
  int block_ = 0;
  bool hides_ = false;  // Featured only: this block has hidden pairs
  RingPosition<L::kKStages> k_ring_;
  RingPosition<L::kVStages> v_ring_;
};

template <class T, int HeadDim, bool Featured>
__global__ void __launch_bounds__(384, 1)
    backward_dq_sm90_kernel(const __grid_constant__ BackwardDqMaps maps,
                            const __grid_constant__ BackwardParams params,
                            const __grid_constant__ BackwardDqGrid grid) {
  using L = BackwardDqLayout<HeadDim>;
  extern __shared__ char raw_smem[];
  __shared__ BackwardDqTask task;
  __shared__ BackwardSteps<L::kKeys, Featured> steps;
  const uint32_t smem = (shared_address(raw_smem) + 1023) & ~1023u;
  const BackwardDqBarriers barriers(smem + L::kBarriers);
  if (threadIdx.x == 0) barriers.init();
  if (threadIdx.x == 32) task = find_dq_task(params.forward, grid, L::kRows, L::kKeys);
  __syncthreads();
  if constexpr (Featured) count_blocks<L>(steps, task, params, grid);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    registers_release<24>();
    if (threadIdx.x < 32 && task.blocks.end > 0)
      produce_dq<L, HeadDim>(maps, params, task, steps, barriers, smem, threadIdx.x);
  } else {
    registers_claim<240>();
    BackwardDqConsumer<T, HeadDim, Featured>(maps, grid, task, steps, barriers, smem,
                                             params.forward.problem.q_heads, warpgroup - 1)
        .run();
  }
}

template <class T, int HeadDim, bool Featured>
Status launch_backward_dq_sm90(const BackwardParams& params, const Device& device,
                               cudaStream_t stream) {
  using L = BackwardDqLayout<HeadDim>;
  static_assert(L::kBytes <= 232448, "shared memory of a Hopper block");
  const PrefillParams& forward = params.forward;
  const Problem& problem = forward.problem;
  BackwardDqMaps maps;
  const auto queries = [&](CUtensorMap* map, const Strided& x, int dim, int box_rows) {
    return encode_backward_map(map, x, dim, problem, problem.q_len, problem.q_heads, box_rows);
  };
  const auto keys = [&](CUtensorMap* map, const Strided& x, int dim) {
    return encode_backward_map(map, x, dim, problem, problem.kv_len, problem.kv_heads, L::kKeys);
  };
  if (Status s = queries(&maps.q, forward.q, problem.head_dim, L::kRows); !s.ok()) return s;
  if (Status s = queries(&maps.dout, params.dout, problem.value_dim, L::kRows); !s.ok()) return s;
  if (Status s = queries(&maps.dq, params.dq, problem.head_dim, 64); !s.ok())
    return s;  // a warpgroup stores its half
  if (Status s = keys(&maps.k, forward.k, problem.head_dim); !s.ok()) return s;
  if (Status s = keys(&maps.v, forward.v, problem.value_dim); !s.ok()) return s;

  const float scale = static_cast<float>(forward.scores.scale);
  BackwardDqGrid grid{(problem.q_len + L::kRows - 1) / L::kRows,
                      backward_section_sm90(backward_is_triangular(forward), HeadDim),
                      scale,
                      scale * kLog2e,
                      BackwardWorkspace(params),
                      BackwardCap(forward.scores),
                      backward_mask(params, false)};
  BackwardParams mutable_params = params;
  void* args[] = {&maps, &mutable_params, &grid};
  const unsigned blocks =
      static_cast<unsigned>(problem.batch) * problem.q_heads * grid.query_blocks;
  const void* kernel =
      reinterpret_cast<const void*>(&backward_dq_sm90_kernel<T, HeadDim, Featured>);
  return launch({"backward_dq_sm90", kernel, dim3(blocks), 384, L::kBytes}, args, device, stream);
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_BACKWARD_DQ_SM90_CUH_
