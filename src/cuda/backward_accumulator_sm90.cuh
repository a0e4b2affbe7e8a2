// The fp32 accumulator of dQ, from zeros to the call's dtype. The keys kernel adds to it. Before
// and behind that it does, with three warps that would be idle, what would cost passes over memory
// of their own: while a head is worked on, a later head's accumulator is set to zero and an earlier
// head's, which is complete and still in L2, is converted. The passes in backward_passes.cuh do so
// only for the first and the last heads (BackwardLead). In deterministic calls one of the warps
// adds, block after block, instead of zeroing.
#ifndef FLASHATTN_CUDA_BACKWARD_ACCUMULATOR_SM90_CUH_
#define FLASHATTN_CUDA_BACKWARD_ACCUMULATOR_SM90_CUH_

#include "backward_plan.h"
#include "backward_sm90_parts.cuh"
#include "params.h"
#include "ptx.cuh"
#include "ptx_sm90.cuh"

namespace flashattn {

// ---- layout. As the fragments of dQ^T, a float4 a thread, so that a warpgroup adds contiguous
// memory: x lies at row 2 (lane % 4), column lane / 4 of 8 rows by 16 columns; y is one row
// further, z eight columns, w both. A step's rows of H 128 are those of both warpgroups, 64 columns
// each; H 64 splits the rows.
template <int HeadDim>
struct DqFragment {
  static constexpr int kRows = backward_tile_sm90(HeadDim).rows;
  static constexpr int kColumns = HeadDim == 128 ? kRows : kRows / 2;  // of a warpgroup's dQ^T
  static constexpr int kFloats = 64 * kColumns;
  static_assert(kFloats == kBackwardUnit * 64, "a unit is contiguous, 64 columns after 64 columns");
};

// dq = scale * accumulator for eight query rows, by one warp, 16 columns a float4 from 16 `first`
// on. `dq` is this lane's float4 of the eight rows' first 16 columns, `out` row lane / 4 at column
// 2 (lane % 4); `columns` exist.
template <int N>
__device__ __forceinline__ void load_row_group(float4 (&x)[N], const float4* dq, int first) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    x[i] = __ldcg(dq + (first + i) / 4 * (kBackwardUnit * 16) + (first + i) % 4 * 32);
}

template <class T, int N>
__device__ __forceinline__ void store_row_group(const float4 (&x)[N], int first, T* out,
                                                int columns, bool contributes, float scale) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int column = 16 * (first + i);
    const uint32_t low = movmatrix_trans(pack<T>(x[i].x * scale, x[i].y * scale));
    const uint32_t high = movmatrix_trans(pack<T>(x[i].z * scale, x[i].w * scale));
    if (column < columns) *reinterpret_cast<uint32_t*>(out + column) = contributes ? low : 0u;
    if (column + 8 < columns)
      *reinterpret_cast<uint32_t*>(out + column + 8) = contributes ? high : 0u;
  }
}

template <class T, int HeadDim, int AtOnce>
__device__ __forceinline__ void convert_row_group(const float4* dq, T* out, int columns,
                                                  bool contributes, float scale) {
#pragma unroll
  for (int first = 0; first < HeadDim / 16; first += AtOnce) {
    float4 x[AtOnce];
    load_row_group(x, dq, first);
    store_row_group<T>(x, first, out, columns, contributes, scale);
  }
}

// ---- the idle warps of a keys block. The blocks of a key/value head share its accumulator's
// units in proportion to their steps; counters in global memory say how many have zeroed theirs
// and how many warpgroups have added all.
struct AccumulatorShare {
  int begin, end;  // units, counted through the query heads of the group

  // `block` of `blocks` key blocks.
  __device__ AccumulatorShare(int units, int block, int blocks, bool triangular) {
    const float steps = static_cast<float>(triangular ? blocks * blocks : blocks);
    const auto before = [&](int n) {
      if (n == blocks) return units;
      const float part = static_cast<float>(triangular ? n * (2 * blocks - n) : n) / steps;
      return static_cast<int>(static_cast<float>(units) * part);
    };
    begin = before(block);
    end = before(block + 1);
  }
};

// Waits until a counter has come so far, and with it what those who added to it had written.
__device__ __forceinline__ void wait_for_count(const float* counter, int target,
                                               unsigned pause_ns = 100) {
  while (load_acquire_f32(counter) < static_cast<float>(target)) __nanosleep(pause_ns);
  fence_async_proxy_global();
}

// One warp zeroes `units` units of an accumulator.
__device__ __forceinline__ void zero_units(float* dq, int units, int head_dim, float* counter,
                                           int lane) {
  float4* at = reinterpret_cast<float4*>(dq) + lane;
#pragma unroll 4
  for (int i = units * (kBackwardUnit * head_dim / 128); i > 0; --i, at += 32) *at = float4{};
  fence_async_proxy_global();
  __syncwarp();
  if (lane == 0) add_release_f32(counter, 1.f);
}

// What the converting warps do not keep in registers, of which they have few.
template <class T>
struct ConvertTask {
  const float4* dq;  // of the key/value head
  T* out;            // of the first query head of its group
  int begin, end;    // row groups of eight rows, counted through the query heads
  int head_groups;   // row groups of a query head
  Range valid;
};

// Two warps convert.
template <class T, int HeadDim>
__device__ __forceinline__ void convert_row_groups(const BackwardParams& params,
                                                   const volatile ConvertTask<T>& task, float scale,
                                                   int warp, int lane) {
#pragma unroll 1
  for (int i = task.begin + warp; i < task.end; i += 2) {
    const float4* dq = task.dq + i / 8 * (kBackwardUnit * HeadDim / 4) + i % 8 * 128 + lane;
    const int head = i / task.head_groups, t = i % task.head_groups * 8 + lane / 4;
    T* out = task.out + head * params.dq.head + t * params.dq.seq + 2 * (lane % 4);
    convert_row_group<T, HeadDim, 2>(
        dq, out, t < params.forward.problem.q_len ? params.forward.problem.head_dim : 0,
        t >= task.valid.begin && t < task.valid.end, scale);
  }
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_BACKWARD_ACCUMULATOR_SM90_CUH_
