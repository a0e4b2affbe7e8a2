// The two memory-bound passes around the key-block kernel of the backward: before it, what every
// key block needs of a query row; after it, the fp32 accumulator of dq to the call's dtype.
#ifndef FLASHATTN_CUDA_BACKWARD_PASSES_CUH_
#define FLASHATTN_CUDA_BACKWARD_PASSES_CUH_

#include "backward_accumulator_sm90.cuh"
#include "backward_plan.h"
#include "backward_sinks.cuh"
#include "backward_sm90_parts.cuh"
#include "params.h"
#include "ptx_sm90.cuh"

namespace flashattn {

// The query rows of a sequence that see at least one key. The others contribute nothing but to
// their sink, and nothing of theirs is read: it may hold NaN.
__device__ __forceinline__ Range rows_with_keys(const Sequence& sequence) {
  if (sequence.kv_len == 0) return {0, 0};
  return sequence.queries_seeing(0, sequence.kv_len - 1);
}

// The keys of a sequence that some query row sees. The others get zeros, and nothing of theirs is
// used: it may hold NaN.
__device__ __forceinline__ Range keys_seen(const Sequence& sequence) {
  if (sequence.q_len == 0) return {0, 0};
  return sequence.keys_seen_by(0, sequence.q_len - 1);
}

// The key blocks that some of these rows sees, of which one sees a key at least: neighbours, since
// a band of diagonals has no holes.
__device__ __forceinline__ Range blocks_seen_by(int first_row, int rows, int low, int high,
                                                int keys_end, int block_keys) {
  return {max(0, first_row + low) / block_keys,
          min(keys_end - 1, first_row + rows - 1 + high) / block_keys + 1};
}

// One unit of one query head: blockIdx.x counts units, then heads from `first_head` on, then
// batches.
struct QueryBlock {
  int64_t head_index;  // b * q_heads + head
  int b, head, first_row;

  __device__ QueryBlock(const Problem& problem, int64_t padded_rows, int64_t first_head = 0) {
    const unsigned units = static_cast<unsigned>(padded_rows / kBackwardUnit);
    head_index = first_head + blockIdx.x / units;
    b = static_cast<int>(head_index / problem.q_heads);
    head = static_cast<int>(head_index % problem.q_heads);
    first_row = static_cast<int>(blockIdx.x % units) * kBackwardUnit;
  }
};

constexpr int kPassThreads = 256;

// sum of eight products
template <class T>
__device__ __forceinline__ float dot8(const uint4& a, const uint4& b) {
  const uint32_t a_words[4] = {a.x, a.y, a.z, a.w}, b_words[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = unpack<T>(a_words[i]), y = unpack<T>(b_words[i]);
    sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
  }
  return sum;
}

// lse2 = lse * log2(e), delta = rowsum(dO * O) - dlse for every head; where dQ is accumulated,
// zeros in the first `lead` key/value heads' accumulators and in all counters. A row that
// contributes nothing gets lse2 = +inf, which makes its every probability exactly zero; an lse of
// +inf, which a logit of +inf leaves, must not pass for that. A row without keys can have an lse,
// its sink.
template <class T, int HeadDim, BackwardSum Sum>
__global__ void __launch_bounds__(kPassThreads)
    backward_prepare_kernel(const __grid_constant__ BackwardParams params, int lead,
                            const __grid_constant__ BackwardParts parts) {
  // Threads of a row, 16 bytes each; a power of two, for the sum across them.
  constexpr int kLanes = HeadDim <= 64 ? 8 : HeadDim <= 128 ? 16 : 32;
  constexpr int kRows = kBackwardUnit, kRowsAtOnce = kPassThreads / kLanes;
  constexpr bool kAccumulates = Sum != BackwardSum::kNone;
  const PrefillParams& forward = params.forward;
  const BackwardWorkspace workspace(params);
  const QueryBlock block(forward.problem, workspace.padded_rows);
  const int64_t first_padded = block.head_index * workspace.padded_rows + block.first_row;

  const int group = forward.problem.group();
  if (kAccumulates && threadIdx.x == 0 && block.first_row == 0 && block.head % group == 0)
    workspace.zeroed[block.head_index / group] = workspace.added[block.head_index / group] = 0.f;
  if constexpr (Sum == BackwardSum::kInOrder) {
    if (static_cast<int>(threadIdx.x) < parts.count)
      parts.turns[threadIdx.x * parts.floats + first_padded / backward_tile_sm90(HeadDim).rows] =
          0.f;
  }
  if (Sum == BackwardSum::kAnyOrder && block.head_index < int64_t{lead} * group) {
    float4* dq = reinterpret_cast<float4*>(workspace.dq + first_padded * HeadDim);
#pragma unroll
    for (int i = 0; i < kRows * HeadDim / 4 / kPassThreads; ++i)
      dq[i * kPassThreads + threadIdx.x] = float4{};
  }

  const Sequence sequence(forward, block.b);
  const Range valid = rows_with_keys(sequence);
  const int lane = threadIdx.x % kLanes;
  const bool has_columns = lane * 8 < forward.problem.value_dim;
  const T* out = static_cast<const T*>(forward.o.data);
  const T* dout = static_cast<const T*>(params.dout.data);
#pragma unroll
  for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
    const int row = i * kRowsAtOnce + threadIdx.x / kLanes, t = block.first_row + row;
    float lse = -INFINITY, delta = 0.f;
    if (t < sequence.q_len) {
      lse = static_cast<const float*>(forward.lse.data)[forward.lse.offset(block.b, t, block.head)];
      if (has_columns && valid.has(t) && lse != -INFINITY)
        delta = dot8<T>(*reinterpret_cast<const uint4*>(
                            out + forward.o.offset(block.b, t, block.head) + lane * 8),
                        *reinterpret_cast<const uint4*>(
                            dout + params.dout.offset(block.b, t, block.head) + lane * 8));
    }
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) delta += __shfl_xor_sync(~0u, delta, mask);
    if (lane == 0) {
      if (params.dlse.data && lse != -INFINITY)
        delta -=
            static_cast<const float*>(params.dlse.data)[params.dlse.offset(block.b, t, block.head)];
      workspace.lse2[first_padded + row] = lse == -INFINITY  ? INFINITY
                                           : lse == INFINITY ? NAN
                                                             : lse * kLog2e;
      workspace.delta[first_padded + row] = delta;
    }
  }
  grid_dependency_trigger();
}

// The sum of what key blocks have added to several accumulators, in the order of the first that
// did: which have been added to depends on the step of the rows.
template <class T, int HeadDim>
__device__ __forceinline__ void convert_sum(const BackwardParts& parts, const Sequence& sequence,
                                            int first_row, const float4* dq, T* out, int columns,
                                            bool contributes, float scale) {
  constexpr int kStepRows = backward_tile_sm90(HeadDim).rows, kAtOnce = 4;
  Range adders{0, 1};
  if (parts.count > 1)
    adders = blocks_seen_by(first_row / kStepRows * kStepRows, kStepRows, sequence.low,
                            min(sequence.high, 1 << 30), keys_seen(sequence).end, 128);
  const auto part_of = [&](int block) { return dq + block % parts.count * (parts.floats / 4); };
#pragma unroll 1
  for (int first = 0; first < HeadDim / 16; first += kAtOnce) {
    float4 x[kAtOnce];
    load_row_group(x, part_of(adders.begin), first);
#pragma unroll 1
    for (int i = 1; i < min(parts.count, adders.end - adders.begin); ++i) {
      float4 more[kAtOnce];
      load_row_group(more, part_of(adders.begin + i), first);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        x[k] = {x[k].x + more[k].x, x[k].y + more[k].y, x[k].z + more[k].z, x[k].w + more[k].w};
    }
    store_row_group<T>(x, first, out, columns, contributes, scale);
  }
}

// dq = scale * accumulator of the last `lead` key/value heads.
template <class T, int HeadDim, BackwardSum Sum>
__global__ void __launch_bounds__(kPassThreads)
    backward_finish_kernel(const __grid_constant__ BackwardParams params, int lead,
                           const __grid_constant__ BackwardParts parts) {
  const PrefillParams& forward = params.forward;
  const Problem& problem = forward.problem;
  const BackwardWorkspace workspace(params);
  const int64_t heads = int64_t{problem.batch} * problem.kv_heads;
  const QueryBlock block(problem, workspace.padded_rows, (heads - lead) * problem.group());
  const Sequence sequence(forward, block.b);
  const Range valid = rows_with_keys(sequence);
  const int group = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int t = block.first_row + 8 * group + lane / 4;
  const float* dq =
      workspace.dq + (block.head_index * workspace.padded_rows + block.first_row) * HeadDim;
  grid_dependency_wait();
  const float4* from = reinterpret_cast<const float4*>(dq) + group * 128 + lane;
  T* out =
      static_cast<T*>(params.dq.data) + params.dq.offset(block.b, t, block.head) + 2 * (lane % 4);
  const int columns = t < problem.q_len ? problem.head_dim : 0;
  const float scale = static_cast<float>(forward.scores.scale);
  if constexpr (Sum == BackwardSum::kInOrder)
    convert_sum<T, HeadDim>(parts, sequence, block.first_row, from, out, columns, valid.has(t),
                            scale);
  else
    convert_row_group<T, HeadDim, HeadDim / 16>(from, out, columns, valid.has(t), scale);
}

__global__ static void __launch_bounds__(kSinkThreads)
    backward_sinks_kernel(const __grid_constant__ BackwardParams params) {
  const BackwardWorkspace workspace(params);
  const int64_t first = int64_t{blockIdx.x} * workspace.padded_rows;
  store_sink_gradient(params, [&](int t) {
    return RowStatistics{workspace.lse2[first + t], workspace.delta[first + t]};
  });
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_BACKWARD_PASSES_CUH_
