// What the generic backward needs of each query row before its tiles: lse and delta, in the
// workspace.
#ifndef FLASHATTN_CUDA_BACKWARD_SM80_ROWS_CUH_
#define FLASHATTN_CUDA_BACKWARD_SM80_ROWS_CUH_

#include <cstdint>

#include "backward_sinks.cuh"
#include "backward_sm80_plan.h"
#include "device.h"
#include "params.h"
#include "ptx.cuh"
#include "score.cuh"

namespace flashattn {

// Heads outermost and rows padded, so that every tile of rows is contiguous and aligned.
__device__ __forceinline__ RowStatistics* head_statistics(const BackwardParams& params, int b,
                                                          int n) {
  const Problem& problem = params.forward.problem;
  return reinterpret_cast<RowStatistics*>(params.workspace) +
         (int64_t{b} * problem.q_heads + n) * backward_sm80_rows(problem.q_len);
}

template <class T>
__device__ __forceinline__ float dot_chunks(const T* a, const T* b) {
  alignas(16) T a_regs[8], b_regs[8];
  *reinterpret_cast<uint4*>(a_regs) = *reinterpret_cast<const uint4*>(a);
  *reinterpret_cast<uint4*>(b_regs) = *reinterpret_cast<const uint4*>(b);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sum += static_cast<float>(a_regs[i]) * static_cast<float>(b_regs[i]);
  }
  return sum;
}

// Whether a launch has nothing to do: what it would do again is right.
__device__ __forceinline__ bool is_not_wanted(const BackwardParams& params) {
  return params.only_if && *params.only_if == 0.0f;
}

constexpr int kRowThreads = 256;

// Lanes that share a row, 16 bytes each.
constexpr int lanes_per_row(int head_dim) {
  return head_dim <= 64 ? 8 : (head_dim <= 128 ? 16 : 32);
}

template <class T, int HeadDim>
__global__ __launch_bounds__(kRowThreads) void backward_sm80_rows_kernel(
    const __grid_constant__ BackwardParams params) {
  constexpr int kLanes = lanes_per_row(HeadDim);
  constexpr int kRows = kRowThreads / kLanes;
  static_assert(kBackwardRowPadding % kRows == 0, "a block stays inside one head");
  if (is_not_wanted(params)) return;
  const PrefillParams& forward = params.forward;

  const int64_t padded = backward_sm80_rows(forward.problem.q_len);
  const int64_t index = int64_t{blockIdx.x} * kRows + threadIdx.x / kLanes;
  const int t = static_cast<int>(index % padded);
  const int64_t head_index = index / padded;
  const int n = static_cast<int>(head_index % forward.problem.q_heads);
  const int b = static_cast<int>(head_index / forward.problem.q_heads);
  const int lane = threadIdx.x % kLanes;

  const Sequence sequence(forward, b);
  float lse = -INFINITY;
  if (t < sequence.q_len) {
    lse = static_cast<const float*>(forward.lse.data)[forward.lse.offset(b, t, n)];
  }
  const bool contributes = lse != -INFINITY;

  // A row without keys can have an lse, its sink; its dO is not read, for it may hold anything.
  const Range keys = sequence.keys_seen_by(t, t);
  float delta = 0.0f;
  if (contributes && keys.begin < keys.end) {
    const T* o = static_cast<const T*>(forward.o.data) + forward.o.offset(b, t, n);
    const T* dout = static_cast<const T*>(params.dout.data) + params.dout.offset(b, t, n);
#pragma unroll
    for (int i = 0; i < HeadDim; i += 8 * kLanes) {
      const int column = i + 8 * lane;
      if (column < forward.problem.value_dim) delta += dot_chunks(o + column, dout + column);
    }
  }
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    delta += __shfl_xor_sync(~0u, delta, distance);
  }
  if (lane != 0) return;
  if (contributes && params.dlse.data) {
    delta -= static_cast<const float*>(params.dlse.data)[params.dlse.offset(b, t, n)];
  }
  // An lse of +inf comes from a logit of +inf. It must not pass for a row that contributes nothing.
  const float lse2 = !contributes ? INFINITY : (lse == INFINITY ? NAN : lse * kLog2e);
  head_statistics(params, b, n)[t] = {lse2, delta};
}

__global__ static __launch_bounds__(kSinkThreads) void backward_sm80_sinks_kernel(
    const __grid_constant__ BackwardParams params) {
  if (is_not_wanted(params)) return;
  const int q_heads = params.forward.problem.q_heads;
  const RowStatistics* rows = head_statistics(params, blockIdx.x / q_heads, blockIdx.x % q_heads);
  store_sink_gradient(params, [&](int t) { return rows[t]; });
}

template <class T, int HeadDim>
Status launch_backward_rows(const BackwardParams& params, const Device& device,
                            cudaStream_t stream) {
  const Problem& problem = params.forward.problem;
  const int64_t heads = int64_t{problem.batch} * problem.q_heads;
  void* args[] = {const_cast<BackwardParams*>(&params)};
  if (heads == 0) return {};
  if (problem.q_len > 0) {
    constexpr int kRows = kRowThreads / lanes_per_row(HeadDim);
    const int64_t blocks = heads * backward_sm80_rows(problem.q_len) / kRows;
    const Launch rows = {"backward_sm80_rows",
                         reinterpret_cast<const void*>(&backward_sm80_rows_kernel<T, HeadDim>),
                         dim3(static_cast<unsigned>(blocks)), kRowThreads, 0};
    if (Status status = launch(rows, args, device, stream); !status.ok()) return status;
  }
  if (!params.dsinks) return {};
  const Launch sinks = {"backward_sm80_sinks",
                        reinterpret_cast<const void*>(&backward_sm80_sinks_kernel),
                        dim3(static_cast<unsigned>(heads)), kSinkThreads, 0};
  return launch(sinks, args, device, stream);
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_BACKWARD_SM80_ROWS_CUH_
