// The backward for every GPU from sm_80 on: mma.sync and cp.async, deterministic, without atomics
// and without memory that grows with T * S. docs/kernels/backward_sm80.md is its page.
//
// Two kernels, mirror images of each other and one template. A block owns a tile of rows of one
// side (keys, or queries) and streams the rows of the other side past it, 32 at a time. With x the
// owned and y the streamed rows, a step is
//     s  = x0 . y0^T      owned keys: K . Q^T        owned queries: Q . K^T
//     dp = x1 . y1^T                  V . dO^T                      dO . V^T
//     p  = 2^(logit - lse2),  ds = p (dp - delta) slope
//     dx1 += p . y1                   dV                            -
//     dx0 += ds . y0                  dK                            dQ
// The accumulators of s and dp are, rounded, the A operands of the last two products, so p and ds
// never leave the registers of their warp, which owns 16 or 32 rows. Blocks of keys walk through
// all query heads of their group.
#ifndef FLASHATTN_CUDA_BACKWARD_SM80_CUH_
#define FLASHATTN_CUDA_BACKWARD_SM80_CUH_

#include <cstdint>
#include <string>

#include "backward_sm80_block.cuh"
#include "backward_sm80_plan.h"
#include "backward_sm80_rows.cuh"
#include "backward_wide_sm80.cuh"
#include "device.h"
#include "params.h"
#include "tiles_sm80.h"

namespace flashattn {

// blockIdx.x, read again: what the store derives from it need not stay in registers, which the sums
// have filled.
__device__ __forceinline__ int block_index_again() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

template <class Config>
__global__ __launch_bounds__(32 * Config::kMaxWarps, Config::kMinBlocks) void backward_sm80_kernel(
    const __grid_constant__ BackwardParams params, int stages) {
  extern __shared__ __align__(128) unsigned char memory[];
  using Block = BackwardSm80Block<Config>;
  if (is_not_wanted(params)) return;
  Block(params, stages, memory, blockIdx.x).run();
  __syncthreads();
  Block(params, stages, memory, block_index_again()).store();
}

template <class Config>
__global__
__launch_bounds__(32 * Config::kMaxWarps, Config::kMinBlocks) void backward_wide_sm80_kernel(
    const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(128) unsigned char memory[];
  using Block = BackwardWideSm80Block<Config>;
  if (is_not_wanted(params)) return;
  Block(params, memory, blockIdx.x).run();
  __syncthreads();
  Block(params, memory, block_index_again()).store();
}

// Names a side in errors and profiles.
constexpr const char* backward_side_name(bool owns_keys) {
  return owns_keys ? "backward_sm80 (dk, dv)" : "backward_sm80 (dq)";
}

// As many warps as fit, since they share the streamed rows; then two stages if those fit too.
template <class Config>
Status launch_backward_side(const BackwardParams& params, const Device& device,
                            cudaStream_t stream) {
  const Problem& problem = params.forward.problem;
  const int length = Config::kOwnsKeys ? problem.kv_len : problem.q_len;
  const int heads = Config::kOwnsKeys ? problem.kv_heads : problem.q_heads;
  const auto fits = [&](int warps, int stages) {
    return Config::shared_memory(warps, stages) <= device.shared_memory_per_block;
  };
  const int warps = fits(Config::kMaxWarps, 1) ? Config::kMaxWarps : Config::kMinWarps;
  int stages = fits(warps, 2) ? 2 : 1;
  const int rows = Config::owned_rows(warps);
  const int64_t blocks = (int64_t{length} + rows - 1) / rows * heads * problem.batch;
  if (blocks == 0) return {};

  const Launch what = {backward_side_name(Config::kOwnsKeys),
                       reinterpret_cast<const void*>(&backward_sm80_kernel<Config>),
                       dim3(static_cast<unsigned>(blocks)), 32 * warps,
                       Config::shared_memory(warps, stages)};
  void* args[] = {const_cast<BackwardParams*>(&params), &stages};
  return launch(what, args, device, stream);
}

// As many rows as fit, since they share the streamed ones.
template <class Config>
Status launch_backward_wide_side(const BackwardParams& params, const Device& device,
                                 cudaStream_t stream) {
  const Problem& problem = params.forward.problem;
  const int length = Config::kOwnsKeys ? problem.kv_len : problem.q_len;
  const int heads = Config::kOwnsKeys ? problem.kv_heads : problem.q_heads;
  int warps = Config::kMaxWarps;
  while (warps > 1 && Config::shared_memory(problem, warps) > device.shared_memory_per_block) {
    --warps;
  }
  const int rows = Config::owned_rows(warps);
  const int64_t blocks =
      (int64_t{length} + rows - 1) / rows * heads * problem.batch * Config::parts(problem);
  if (blocks == 0) return {};
  const Launch what = {backward_side_name(Config::kOwnsKeys),
                       reinterpret_cast<const void*>(&backward_wide_sm80_kernel<Config>),
                       dim3(static_cast<unsigned>(blocks)), 32 * warps,
                       Config::shared_memory(problem, warps)};
  void* args[] = {const_cast<BackwardParams*>(&params)};
  return launch(what, args, device, stream);
}

template <class T, int HeadDim, int ValueDim, bool Featured>
Status launch_backward_sides(const BackwardParams& params, const Device& device,
                             cudaStream_t stream) {
  if constexpr (is_wide(HeadDim)) {
    using Keys = BackwardWideSm80Config<T, Owned::kKeys, Featured>;
    using Queries = BackwardWideSm80Config<T, Owned::kQueries, Featured>;
    if (Status status = launch_backward_wide_side<Keys>(params, device, stream); !status.ok()) {
      return status;
    }
    return launch_backward_wide_side<Queries>(params, device, stream);
  } else {
    using Keys = BackwardSm80Config<T, HeadDim, ValueDim, Owned::kKeys, Featured>;
    using Queries = BackwardSm80Config<T, HeadDim, ValueDim, Owned::kQueries, Featured>;
    if (Status status = launch_backward_side<Keys>(params, device, stream); !status.ok()) {
      return status;
    }
    return launch_backward_side<Queries>(params, device, stream);
  }
}

template <class T, int HeadDim, int ValueDim>
Status launch_backward_tiles(const BackwardParams& params, const Device& device,
                             cudaStream_t stream) {
  const bool featured =
      params.forward.features.any_mask_or_bias() || params.forward.scores.softcap > 0.0;
  return featured ? launch_backward_sides<T, HeadDim, ValueDim, true>(params, device, stream)
                  : launch_backward_sides<T, HeadDim, ValueDim, false>(params, device, stream);
}

template <class T, int HeadDim>
Status launch_backward_sm80(const BackwardParams& params, const Device& device,
                            cudaStream_t stream) {
  const Problem& problem = params.forward.problem;
  if (params.workspace_size <
      backward_sm80_workspace(problem.batch, problem.q_len, problem.q_heads)) {
    return {"backward_sm80: workspace is too small, got " + std::to_string(params.workspace_size) +
            " floats"};
  }
  if (Status status = launch_backward_rows<T, HeadDim>(params, device, stream); !status.ok()) {
    return status;
  }
  // Values of 128 columns beside keys of 192 are common enough for tiles of their own.
  if constexpr (HeadDim == 192) {
    if (problem.value_dim <= 128) {
      return launch_backward_tiles<T, 192, 128>(params, device, stream);
    }
  }
  return launch_backward_tiles<T, HeadDim, HeadDim>(params, device, stream);
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_BACKWARD_SM80_CUH_
