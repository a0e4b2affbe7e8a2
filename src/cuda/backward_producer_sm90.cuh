// The first half of the Hopper kernels that own keys and walk over query rows: which keys and which
// rows, the barriers, and the warp that loads the tiles.
#ifndef FLASHATTN_CUDA_BACKWARD_PRODUCER_SM90_CUH_
#define FLASHATTN_CUDA_BACKWARD_PRODUCER_SM90_CUH_

#include <type_traits>

#include "backward_accumulator_sm90.cuh"
#include "backward_features_sm90.cuh"
#include "backward_passes.cuh"
#include "backward_plan.h"
#include "backward_sm90_parts.cuh"
#include "device.h"
#include "params.h"
#include "ptx_sm90.cuh"

namespace flashattn {

struct BackwardBarriers {
  uint32_t k_full, v_full, repair;
  uint32_t q_full, q_empty, dout_full, dout_empty;  // of stage 0, the next 8 bytes further
  uint32_t dq_full, dq_empty;                       // likewise

  __device__ explicit BackwardBarriers(uint32_t base)
      : k_full(base),
        v_full(base + 8),
        repair(base + 16),
        q_full(base + 24),
        q_empty(base + 40),
        dout_full(base + 56),
        dout_empty(base + 72),
        dq_full(base + 88),
        dq_empty(base + 104) {}

  template <bool Ordered>
  __device__ void init() const {
    for (uint32_t barrier : {k_full, v_full, repair}) mbarrier_init(barrier, 1);
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(q_full + 8 * i, 1);
      mbarrier_init(dout_full + 8 * i, 1);
      mbarrier_init(q_empty + 8 * i, 2);  // one arrival a warpgroup
      mbarrier_init(dout_empty + 8 * i, 2);
      if constexpr (Ordered) {
        mbarrier_init(dq_full + 8 * i, 8);  // one arrival a warp
        mbarrier_init(dq_empty + 8 * i, 1);
      }
    }
    mbarrier_init_fence();
  }
};

struct BackwardMaps {
  CUtensorMap q, dout, k, v, dk, dv;
};

// What follows from the parameters, computed by the host so that it costs no registers.
struct BackwardGrid {
  int key_blocks, section;  // section: key/value heads whose key blocks are interleaved
  int heads;                // key/value heads, counted through the batches
  int group;                // query heads of a key/value head
  bool triangular;          // backward_is_triangular()
  BackwardLead lead;
  float scale, scale_log2;  // of the scores; in log2 units
  BackwardWorkspace workspace;
  BackwardCap cap;
  BackwardMask mask;
  // Read where additions are ordered.
  int last_section;  // its first head
  bool short_first;  // BackwardSections
  BackwardParts parts;
};

// ---- which keys a block owns and which query rows it walks over. Lives in shared memory: what a
// step does not need must not cost registers.
//
// Two edges cut what a key is seen by. The near one hides rows before the first that sees the key
// (a causal mask), the far one rows from some row on (the left side of a window). The steps between
// them need no mask.
struct BackwardTask {
  int b, kv_head, first_key;
  int q_batch, k_batch, v_batch;  // of the operands, which may have fewer (Strided)
  Range keys, valid;  // of the sequence: keys that some row sees, rows that see some key
  int low, high;      // row i sees key j iff low <= j - i <= high
  // Steps before plain_begin and from plain_end on need the mask; those from far_step on meet the
  // far edge. Without a step between, the walk ends before it comes to the plain ones.
  int first_step, plain_begin, plain_end, far_step, end_step;

  __device__ __forceinline__ int steps() const { return end_step - first_step; }
  // Whether the band hides some of a step.
  __device__ __forceinline__ bool is_cut(int step) const {
    return step < plain_begin || step >= plain_end;
  }
  __device__ __forceinline__ bool hides(StepNote note) const {
    return note.mixed() || note.masked() || is_cut(note.step());
  }

  // First query row that sees this key, and the first after it that no longer does.
  __device__ __forceinline__ int first_row(int key) const {
    return key < keys.end ? key - high : 1 << 30;
  }
  __device__ __forceinline__ int end_row(int key) const { return key - low + 1; }

  // The walk, from start_step by stride to before stop_step: masked_first steps with a mask, plain
  // ones, and the others after `other_edge` steps.
  static constexpr int stride() { return 1; }
  __device__ __forceinline__ int start_step() const { return first_step; }
  __device__ __forceinline__ int stop_step() const { return end_step; }
  __device__ __forceinline__ int masked_first() const { return plain_begin - first_step; }
  __device__ __forceinline__ int other_edge() const { return plain_end - first_step; }
};

// Where additions are ordered: steps go downwards where blocks start with keys upwards, and the
// reverse.
struct BackwardOrderedTask : BackwardTask {
  bool downwards;  // the steps

  __device__ __forceinline__ int stride() const { return downwards ? -1 : 1; }
  __device__ __forceinline__ int start_step() const {
    return downwards ? end_step - 1 : first_step;
  }
  __device__ __forceinline__ int stop_step() const { return downwards ? first_step - 1 : end_step; }
  __device__ __forceinline__ int masked_first() const {
    return downwards ? end_step - plain_end : plain_begin - first_step;
  }
  __device__ __forceinline__ int other_edge() const {
    return downwards ? end_step - plain_begin : plain_end - first_step;
  }

  // How many blocks add to this step before this one, to the same accumulator.
  __device__ __forceinline__ int adders_before(int step, int rows, int block_keys,
                                               int parts) const {
    const Range adders = blocks_seen_by(step * rows, rows, low, high, keys.end, block_keys);
    const int block = first_key / block_keys;
    return (downwards ? block - adders.begin : adders.end - 1 - block) / parts;
  }
};

template <bool Ordered>
using BackwardTaskOf = std::conditional_t<Ordered, BackwardOrderedTask, BackwardTask>;

template <bool Ordered>
__device__ inline BackwardTaskOf<Ordered> find_task(const PrefillParams& forward,
                                                    const BackwardGrid& grid, int rows, int keys) {
  const Problem& problem = forward.problem;
  BackwardTaskOf<Ordered> task;
  int head, key_block;
  if constexpr (Ordered) {
    const int block = static_cast<int>(blockIdx.x);
    const int section = block / (grid.key_blocks * grid.section) * grid.section;
    const int first_head = min(section, grid.last_section);
    const bool is_last = first_head == grid.last_section;
    const int section_heads = is_last ? grid.heads - first_head : grid.section;
    const int inside = block - first_head * grid.key_blocks;
    head = first_head + inside % section_heads;
    key_block = inside / section_heads;
    task.downwards = is_last || !grid.short_first;
    if (!task.downwards) key_block = grid.key_blocks - 1 - key_block;
  } else {
    // Inside a section heads run fastest and keys upwards: under a causal mask the longest blocks
    // first.
    const int per_section = grid.key_blocks * grid.section;
    const int section = blockIdx.x / per_section, inside = blockIdx.x % per_section;
    const int section_heads = min(grid.section, grid.heads - section * grid.section);
    head = section * grid.section + inside % section_heads;
    key_block = inside / section_heads;
  }
  task.b = head / problem.kv_heads;
  task.kv_head = head % problem.kv_heads;
  task.q_batch = task.b % forward.q.batches;
  task.k_batch = task.b % forward.k.batches;
  task.v_batch = task.b % forward.v.batches;
  task.first_key = key_block * keys;
  const Sequence sequence(forward, task.b);
  task.low = sequence.low;
  task.high = min(sequence.high, 1 << 30);  // so that no difference of rows overflows
  task.keys = keys_seen(sequence);
  task.valid = rows_with_keys(sequence);

  const int last_key = task.first_key + keys - 1;
  const int first_seen = max(task.first_key, task.keys.begin);
  const int last_seen = min(last_key, task.keys.end - 1);
  task.first_step = task.plain_begin = task.plain_end = task.far_step = task.end_step = 0;
  if (first_seen > last_seen) return task;

  const Range seeing = sequence.queries_seeing(first_seen, last_seen);
  task.first_step = seeing.begin / rows;
  task.end_step = (seeing.end + rows - 1) / rows;
  // Rows beyond the last have no probabilities, and so need no mask.
  const Range seeing_first = sequence.queries_seeing(task.first_key, task.first_key);
  task.far_step = seeing_first.end < task.valid.end ? max(0, seeing_first.end) / rows : 1 << 30;
  task.plain_end = min(task.far_step, task.end_step);
  task.plain_begin = (max(0, task.first_row(last_key)) + rows - 1) / rows;
  task.plain_begin = max(task.plain_begin, task.first_step);
  if (task.plain_begin >= task.plain_end)
    task.plain_begin = task.plain_end = task.stride() > 0 ? task.end_step : task.first_step;
  return task;
}

// visit(head of the group, step) for every tile of queries where additions are ordered. The heads
// of a step come together: head after head, the short blocks of a causal mask would come to the
// second one long before the block they have to wait for.
template <class Visit>
__device__ __forceinline__ void for_each_tile_in_order(const BackwardOrderedTask& task, int group,
                                                       Visit&& visit) {
#pragma unroll 1
  for (int step = task.start_step(); step != task.stop_step(); step += task.stride())
#pragma unroll 1
    for (int g = 0; g < group; ++g) visit(g, step);
}

// ---- the producer warp
template <class L, int HeadDim, class Steps>
__device__ __forceinline__ void produce(const BackwardMaps& maps, const BackwardParams& params,
                                        const BackwardGrid& grid,
                                        const BackwardTaskOf<L::kOrdered>& task, Steps& steps,
                                        const BackwardBarriers& barriers, uint32_t smem, int lane) {
  const PrefillParams& forward = params.forward;
  const Problem& problem = forward.problem;
  BackwardLoader<HeadDim> loader{barriers.repair, lane};
  RingPosition<2> ring;  // of Q and of dO

  loader.template load<L::kKeys>(smem + L::kK, &maps.k, barriers.k_full, task.first_key,
                                 task.kv_head, task.k_batch, task.keys, problem.kv_len, 0);
  grid_dependency_wait();  // lse2 and delta; the tiles do not depend on the pass before
  if constexpr (L::kZeroesAhead) {
    const int kv_head_index = task.b * problem.kv_heads + task.kv_head;
    if (kv_head_index >= grid.lead.zero)
      wait_for_count(grid.workspace.zeroed + kv_head_index, grid.key_blocks);
  }
  const auto first_row_of = [&](int head) {
    return (int64_t{task.b} * problem.q_heads + head) * grid.workspace.padded_rows;
  };
  const auto load_tiles = [&](int g, int head_of_g, int step) {
    const int row = step * L::kRows;
    const uint32_t q_full = barriers.q_full + 8 * ring.stage;
    mbarrier_wait(barriers.q_empty + 8 * ring.stage, ring.phase ^ 1);
    steps.note(ring.stage, step);
    loader.template load<L::kRows>(smem + L::kQ + ring.stage * L::kQueryBytes, &maps.q, q_full, row,
                                   steps.head(head_of_g), task.q_batch, task.valid, problem.q_len,
                                   L::kStatBytes);
    if (lane == 0)
      bulk_load(smem + L::kLse + ring.stage * L::kStatBytes,
                grid.workspace.lse2 + first_row_of(steps.head(head_of_g)) + row, L::kStatBytes,
                q_full);

    if (steps.is_first(g == 0 && step == task.start_step(), steps.head(head_of_g), step))
      loader.template load<L::kKeys>(smem + L::kV, &maps.v, barriers.v_full, task.first_key,
                                     task.kv_head, task.v_batch, task.keys, problem.kv_len, 0);

    const uint32_t dout_full = barriers.dout_full + 8 * ring.stage;
    mbarrier_wait(barriers.dout_empty + 8 * ring.stage, ring.phase ^ 1);
    loader.template load<L::kRows>(smem + L::kDout + ring.stage * L::kQueryBytes, &maps.dout,
                                   dout_full, row, steps.head(head_of_g), task.b, task.valid,
                                   problem.q_len, L::kStatBytes);
    if (lane == 0)
      bulk_load(smem + L::kDelta + ring.stage * L::kStatBytes,
                grid.workspace.delta + first_row_of(steps.head(head_of_g)) + row, L::kStatBytes,
                dout_full);
    ring.advance();
  };
  if constexpr (L::kOrdered) {
    for_each_tile_in_order(task, grid.group, [&](int g, int step) {
      load_tiles(g, task.kv_head * grid.group + g, step);
    });
  } else {
#pragma unroll 1
    for (int g = 0; g < grid.group; ++g) {
      const int head_of_g = task.kv_head * grid.group + g;
      steps.begin_head(head_of_g, first_row_of(head_of_g));
#pragma unroll 1
      for (int step = steps.from(task.first_step, task.end_step); step < task.end_step;
           step = steps.from(step + 1, task.end_step))
        load_tiles(g, head_of_g, step);
    }
  }
  // Consumers that look one tile ahead find one more, and do not use what they make of it.
  if constexpr (L::kLooksAhead) {
    mbarrier_wait(barriers.q_empty + 8 * ring.stage, ring.phase ^ 1);
    if (lane == 0) mbarrier_arrive(barriers.q_full + 8 * ring.stage);
    mbarrier_wait(barriers.dout_empty + 8 * ring.stage, ring.phase ^ 1);
    if (lane == 0) mbarrier_arrive(barriers.dout_full + 8 * ring.stage);
  }
}

// A featured block's steps, by the whole block, once it knows its task. L is its layout.
template <class L>
__device__ void count_steps(FoundSteps<L::kRows>& steps, BackwardTask& task,
                            const BackwardParams& params, const BackwardGrid& grid) {
  if (threadIdx.x == 0) {
    const Features& features = params.forward.features;
    const UnitRanges ranges(grid.workspace.keys_segments, {L::kRows, L::kKeys},
                            params.forward.problem, task.b);
    const int block = task.first_key / L::kKeys;
    steps.fill(params.forward, features.key_segments, ranges.keys + block, features.query_segments,
               ranges.queries, grid.mask, task.b, block, L::kQueryBytes / 2, grid.workspace);
  }
  __syncthreads();
  steps.count(task.first_step, task.end_step, task.kv_head * grid.group, grid.group);
  if (threadIdx.x == 0 && steps.count() == 0) task.end_step = task.first_step;
  __syncthreads();
}

// S^T of a step to P^T, under a cap as finish_capped() leaves it.
template <class T, int Rows>
__device__ __forceinline__ void featured_probabilities(float (&s)[Rows / 2], uint32_t lse2,
                                                       const BackwardGrid& grid,
                                                       const BackwardTask& task,
                                                       const FoundSteps<Rows>& steps, int stage,
                                                       int first_key) {
  const StepNote note = steps.note_of(stage);
  if (task.hides(note)) steps.check(s);
  const int first_row = note.step() * Rows + 2 * (threadIdx.x & 3);
  const float distance = steps.distance(first_row, first_key);
  const auto lse2_of = [&](int j) { return OfColumns{shared_load_f32x2(lse2 + 32 * j)}; };
  begin_probabilities(s, grid.cap, grid.scale_log2, steps, stage, distance, lse2_of);
  const float hidden = grid.cap.is_given() ? kHiddenTanh : 0.f;
  if (task.is_cut(note.step())) {
    hide_before<Rows>(s, task.first_row(first_key) - first_row,
                      task.first_row(first_key + 8) - first_row, hidden);
    if (note.step() >= task.far_step)
      hide_from<Rows>(s, task.end_row(first_key) - first_row,
                      task.end_row(first_key + 8) - first_row, hidden);
  }
  if (note.mixed()) hide_other_segments<Rows>(s, steps, stage, first_key, hidden);
  if (note.masked()) hide_by_mask<Rows>(s, steps, stage, first_key, hidden);
  if (grid.cap.is_given()) {
    if (steps.has_alibi())
      finish_capped<T, true>(s, grid.cap, steps.log2_slope(stage), distance, lse2_of);
    else
      finish_capped<T, false>(s, grid.cap, 0.f, distance, lse2_of);
  }
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_BACKWARD_PRODUCER_SM90_CUH_
