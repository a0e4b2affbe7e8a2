// The two memory-bound passes around the key-block kernel of the backward: before it, what every
// key block needs of a query row; after it, the fp32 accumulator of dq to the call's dtype.
#ifndef FLASHATTN_CUDA_BACKWARD_PASSES_CUH_
#define FLASHATTN_CUDA_BACKWARD_PASSES_CUH_

#include "backward_plan.h"
#include "backward_sm90_parts.cuh"
#include "params.h"
#include "ptx_sm90.cuh"

namespace flashattn {

// Query rows [begin, end) of a sequence that see at least one key. The others contribute nothing,
// and nothing of theirs is read: it may hold NaN.
__device__ __forceinline__ RowRange rows_with_keys(const PrefillParams& forward, int b) {
  const int q_len = forward.q_length(b), kv_len = forward.kv_length(b);
  if (kv_len == 0) return {0, 0};
  const bool causal = forward.scores.window_right == 0;
  return {causal && forward.scores.bottom_right ? max(0, q_len - kv_len) : 0, q_len};
}

// Keys [0, end) of a sequence that some query row sees. The others get zeros, and nothing of theirs
// is used: it may hold NaN.
__device__ __forceinline__ int keys_seen(const PrefillParams& forward, int b) {
  const int q_len = forward.q_length(b);
  if (q_len == 0) return 0;
  return visible_keys(forward.scores, q_len - 1, q_len, forward.kv_length(b)).end;
}

// How a step's rows lie in the accumulator of dq: as the fragments of dQ^T, a float4 a thread, so
// that a warpgroup adds contiguous memory. This is the place of float4 number `i`.
template <int HeadDim>
struct DqFragment {
  static constexpr int kRows = backward_tile_sm90(HeadDim).rows;
  // A warpgroup's dQ^T: 64 columns of the head dim by kColumns query rows. H 128 splits the head
  // dim between the two warpgroups, H 64 the rows.
  static constexpr int kColumns = HeadDim == 128 ? kRows : kRows / 2;
  static constexpr int kFloats = 64 * kColumns;

  int row, column;  // of x; y is one row further, z eight columns, w both

  __device__ explicit DqFragment(int i) {
    const int warpgroup = i / (kFloats / 4), group = i % (kFloats / 4) / 128;
    const int warp = i / 32 % 4, lane = i % 32;
    column = (HeadDim == 128 ? 64 * warpgroup : 0) + 16 * warp + lane / 4;
    row = (HeadDim == 128 ? 0 : kColumns * warpgroup) + 8 * group + 2 * (lane % 4);
  }
};

// One step's rows of one query head: blockIdx.x counts steps, then heads, then batches.
struct QueryBlock {
  int64_t head_index;  // b * q_heads + head
  int b, head, first_row;

  __device__ QueryBlock(const Problem& problem, int rows) {
    const int steps = (problem.q_len + rows - 1) / rows;
    head_index = blockIdx.x / steps;
    b = static_cast<int>(head_index / problem.q_heads);
    head = static_cast<int>(head_index % problem.q_heads);
    first_row = static_cast<int>(blockIdx.x % steps) * rows;
  }
};

constexpr int kPassThreads = 256;

template <int HeadDim>
struct PassShape {
  // Where there is an accumulator: of whole steps, since its fragments do not end with a row.
  static constexpr int kRows = HeadDim <= 128 ? backward_tile_sm90(HeadDim).rows : 64;
  // Threads of a row, 16 bytes each; a power of two, for the sum across them.
  static constexpr int kLanes = HeadDim <= 64 ? 8 : HeadDim <= 128 ? 16 : 32;
};

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

// lse2 = lse * log2(e), delta = rowsum(dO * O) - dlse for every head, and zeros in the accumulator.
// A row that contributes nothing gets lse2 = +inf, which makes its every probability exactly zero;
// an lse of +inf, which a logit of +inf leaves, must not pass for that.
template <class T, int HeadDim, bool ZeroDq>
__global__ void __launch_bounds__(kPassThreads)
    backward_prepare_kernel(const __grid_constant__ BackwardParams params) {
  constexpr int kRows = PassShape<HeadDim>::kRows, kLanes = PassShape<HeadDim>::kLanes;
  constexpr int kRowsAtOnce = kPassThreads / kLanes;
  const PrefillParams& forward = params.forward;
  const BackwardWorkspace workspace(params);
  const QueryBlock block(forward.problem, kRows);
  const int64_t first_padded = block.head_index * workspace.padded_rows + block.first_row;

  if constexpr (ZeroDq) {
    float4* dq = reinterpret_cast<float4*>(workspace.dq + first_padded * HeadDim);
#pragma unroll
    for (int i = 0; i < kRows * HeadDim / 4 / kPassThreads; ++i)
      dq[i * kPassThreads + threadIdx.x] = float4{};
  }

  const RowRange valid = rows_with_keys(forward, block.b);
  const int lane = threadIdx.x % kLanes;
  const bool has_columns = lane * 8 < forward.problem.head_dim;
  const T* out = static_cast<const T*>(forward.o.data);
  const T* dout = static_cast<const T*>(params.dout.data);
#pragma unroll
  for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
    const int row = i * kRowsAtOnce + threadIdx.x / kLanes, t = block.first_row + row;
    float lse = -INFINITY, delta = 0.f;
    if (t >= valid.begin && t < valid.end) {
      lse = static_cast<const float*>(forward.lse.data)[forward.lse.offset(block.b, t, block.head)];
      if (has_columns && lse != -INFINITY)
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

// dq = scale * accumulator, through shared memory since the fragments run along columns.
template <class T, int HeadDim>
__global__ void __launch_bounds__(kPassThreads)
    backward_finish_kernel(const __grid_constant__ BackwardParams params) {
  constexpr int kRows = PassShape<HeadDim>::kRows, kLanes = PassShape<HeadDim>::kLanes;
  __shared__ alignas(16) T tile[kRows][HeadDim + 8];
  const PrefillParams& forward = params.forward;
  const BackwardWorkspace workspace(params);
  const QueryBlock block(forward.problem, kRows);
  const float scale = static_cast<float>(forward.scores.scale);
  grid_dependency_wait();

  const float4* dq = reinterpret_cast<const float4*>(
      workspace.dq + (block.head_index * workspace.padded_rows + block.first_row) * HeadDim);
#pragma unroll
  for (int j = 0; j < kRows * HeadDim / 4 / kPassThreads; ++j) {
    const int i = j * kPassThreads + threadIdx.x;
    const DqFragment<HeadDim> at(i);
    const float4 x = dq[i];
    tile[at.row][at.column] = T(x.x * scale);
    tile[at.row + 1][at.column] = T(x.y * scale);
    tile[at.row][at.column + 8] = T(x.z * scale);
    tile[at.row + 1][at.column + 8] = T(x.w * scale);
  }
  __syncthreads();

  const RowRange valid = rows_with_keys(forward, block.b);
  T* out = static_cast<T*>(params.dq.data);
#pragma unroll
  for (int j = 0; j < kRows * kLanes / kPassThreads; ++j) {
    const int i = j * kPassThreads + threadIdx.x, row = i / kLanes, lane = i % kLanes;
    const int t = block.first_row + row;
    if (t >= forward.problem.q_len || lane * 8 >= forward.problem.head_dim) continue;
    const bool contributes = t >= valid.begin && t < valid.end;
    *reinterpret_cast<uint4*>(out + params.dq.offset(block.b, t, block.head) + lane * 8) =
        contributes ? *reinterpret_cast<const uint4*>(&tile[row][lane * 8]) : uint4{};
  }
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_BACKWARD_PASSES_CUH_
