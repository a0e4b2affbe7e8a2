// The Hopper backward: which kernels a call needs, one after the other on its stream.
#ifndef FLASHATTN_CUDA_BACKWARD_SM90_CUH_
#define FLASHATTN_CUDA_BACKWARD_SM90_CUH_

#include "backward_dq_sm90.cuh"
#include "backward_features_sm90.cuh"
#include "backward_keys_sm90.cuh"
#include "backward_passes.cuh"
#include "backward_plan.h"
#include "backward_wide_sm90.cuh"
#include "device.h"
#include "params.h"

namespace flashattn {

// One block of a pass for every unit of `heads` query heads; `lead` is the kernel's.
inline Status launch_backward_pass(const char* name, const void* kernel,
                                   const BackwardParams& params, int64_t heads, int lead,
                                   bool programmatic, const Device& device, cudaStream_t stream) {
  const int64_t units = backward_padded_rows(params.forward.problem.q_len) / kBackwardUnit;
  BackwardParams mutable_params = params;
  BackwardParts parts(params);
  void* args[] = {&mutable_params, &lead, &parts};
  return launch(
      {name, kernel, dim3(static_cast<unsigned>(units * heads)), kPassThreads, 0, 1, programmatic},
      args, device, stream);
}

inline BackwardLead backward_lead_of(const BackwardParams& params) {
  return backward_lead_sm90(params.forward, backward_sum(params) == BackwardSum::kInOrder);
}

template <class T, int HeadDim, BackwardSum Sum>
Status launch_backward_prepare(const BackwardParams& params, const Device& device,
                               cudaStream_t stream) {
  const void* kernel = reinterpret_cast<const void*>(&backward_prepare_kernel<T, HeadDim, Sum>);
  const Problem& problem = params.forward.problem;
  return launch_backward_pass("backward_prepare", kernel, params,
                              int64_t{problem.batch} * problem.q_heads,
                              backward_lead_of(params).zero, false, device, stream);
}

template <class T, int HeadDim, BackwardSum Sum>
Status launch_backward_finish(const BackwardParams& params, const Device& device,
                              cudaStream_t stream) {
  const void* kernel = reinterpret_cast<const void*>(&backward_finish_kernel<T, HeadDim, Sum>);
  const int lead = backward_lead_of(params).convert;
  return launch_backward_pass("backward_finish", kernel, params,
                              int64_t{lead} * params.forward.problem.group(), lead, true, device,
                              stream);
}

// A kernel that owns keys, programmatically behind the prepare pass. L is its layout.
template <class L, int HeadDim>
Status launch_backward_keys(const char* name, const void* kernel, const BackwardParams& params,
                            const Device& device, cudaStream_t stream) {
  static_assert(L::kBytes <= 232448, "shared memory of a Hopper block");
  const PrefillParams& forward = params.forward;
  const Problem& problem = forward.problem;
  BackwardMaps maps;
  const auto queries = [&](CUtensorMap* map, const Strided& x, int dim) {
    return encode_backward_map(map, x, dim, problem, problem.q_len, problem.q_heads, L::kRows);
  };
  const auto keys = [&](CUtensorMap* map, const Strided& x, int dim, int box_rows) {
    return encode_backward_map(map, x, dim, problem, problem.kv_len, problem.kv_heads, box_rows);
  };
  if (Status s = queries(&maps.q, forward.q, problem.head_dim); !s.ok()) return s;
  if (Status s = queries(&maps.dout, params.dout, problem.value_dim); !s.ok()) return s;
  if (Status s = keys(&maps.k, forward.k, problem.head_dim, L::kKeys); !s.ok()) return s;
  if (Status s = keys(&maps.v, forward.v, problem.value_dim, L::kKeys); !s.ok()) return s;
  if (Status s = keys(&maps.dk, params.dk, problem.head_dim, 64); !s.ok())
    return s;  // stored 64 keys at a time
  if (Status s = keys(&maps.dv, params.dv, problem.value_dim, 64); !s.ok()) return s;

  const float scale = static_cast<float>(forward.scores.scale);
  const bool triangular = backward_is_triangular(forward);
  const BackwardSections sections = backward_sections_sm90(forward, L::kOrdered);
  BackwardGrid grid{(problem.kv_len + L::kKeys - 1) / L::kKeys,
                    sections.heads,
                    problem.batch * problem.kv_heads,
                    problem.group(),
                    triangular,
                    backward_lead_of(params),
                    scale,
                    scale * kLog2e,
                    BackwardWorkspace(params),
                    BackwardCap(forward.scores),
                    backward_mask(params, true),
                    sections.last,
                    sections.short_first,
                    BackwardParts(params)};
  BackwardParams mutable_params = params;
  void* args[] = {&maps, &mutable_params, &grid};
  const unsigned blocks = static_cast<unsigned>(grid.heads) * grid.key_blocks;
  return launch({name, kernel, dim3(blocks), 384, L::kBytes, 1, true}, args, device, stream);
}

template <class T, int HeadDim, BackwardSum Sum, bool Featured>
Status launch_backward_keys_sm90(const BackwardParams& params, const Device& device,
                                 cudaStream_t stream) {
  const void* kernel =
      reinterpret_cast<const void*>(&backward_keys_sm90_kernel<T, HeadDim, Sum, Featured>);
  return launch_backward_keys<BackwardLayout<HeadDim, Sum>, HeadDim>("backward_keys_sm90", kernel,
                                                                     params, device, stream);
}

template <class T, int HeadDim, bool Featured>
Status launch_backward_wide_sm90(const BackwardParams& params, const Device& device,
                                 cudaStream_t stream) {
  const void* kernel =
      reinterpret_cast<const void*>(&backward_wide_sm90_kernel<T, HeadDim, Featured>);
  return launch_backward_keys<BackwardWideLayout<HeadDim, Featured>, HeadDim>(
      "backward_wide_sm90", kernel, params, device, stream);
}

// Prepare, the kernel that owns keys and adds up dQ, and the pass that converts dQ.
template <class T, int HeadDim, BackwardSum Sum, bool Featured>
Status launch_backward_accumulating(const BackwardParams& params, const Device& device,
                                    cudaStream_t stream) {
  if (Status s = launch_backward_prepare<T, HeadDim, Sum>(params, device, stream); !s.ok())
    return s;
  if (Status s = launch_backward_keys_sm90<T, HeadDim, Sum, Featured>(params, device, stream);
      !s.ok())
    return s;
  return launch_backward_finish<T, HeadDim, Sum>(params, device, stream);
}

template <class T, int HeadDim, bool Featured>
Status launch_backward_dkv(const BackwardParams& params, const Device& device,
                           cudaStream_t stream) {
  if constexpr (HeadDim <= 128)
    return launch_backward_keys_sm90<T, HeadDim, BackwardSum::kNone, Featured>(params, device,
                                                                               stream);
  else
    return launch_backward_wide_sm90<T, HeadDim, Featured>(params, device, stream);
}

// Prepare, dK and dV, dQ: nothing is added up across blocks.
template <class T, int HeadDim, bool Featured>
Status launch_backward_split(const BackwardParams& params, const Device& device,
                             cudaStream_t stream) {
  if (Status s = launch_backward_prepare<T, HeadDim, BackwardSum::kNone>(params, device, stream);
      !s.ok())
    return s;
  if (Status s = launch_backward_dkv<T, HeadDim, Featured>(params, device, stream); !s.ok())
    return s;
  return launch_backward_dq_sm90<T, HeadDim, Featured>(params, device, stream);
}

// First: every later kernel may rely on it from its first instruction on.
inline Status launch_backward_segments(const BackwardParams& params, BackwardUnits units,
                                       float* ranges, const Device& device, cudaStream_t stream) {
  const Problem& problem = params.forward.problem;
  const int64_t warps = problem.batch * (units.query_units(problem) + units.key_units(problem));
  constexpr int kWarps = kSegmentThreads / 32;
  void* args[] = {const_cast<BackwardParams*>(&params), &units, &ranges};
  return launch({"backward_segments", reinterpret_cast<const void*>(&backward_segments_kernel),
                 dim3(static_cast<unsigned>((warps + kWarps - 1) / kWarps)), kSegmentThreads, 0},
                args, device, stream);
}

inline Status launch_backward_mask(const PrefillParams& forward, const BackwardMask& packed,
                                   BackwardUnits units, bool owns_keys, const Device& device,
                                   cudaStream_t stream) {
  const Broadcast& mask = forward.features.mask;
  if (mask.data == nullptr) return {};
  const int last_query = forward.problem.q_len - 1, last_key = forward.problem.kv_len - 1;
  PackMaskTask task{mask,
                    packed,
                    owns_keys ? mask.col : mask.row,
                    owns_keys ? mask.row : mask.col,
                    owns_keys ? last_key : last_query,
                    owns_keys ? last_query : last_key,
                    owns_keys ? units.queries : units.keys};
  void* args[] = {&task};
  const int64_t blocks = packed.planes() * packed.blocks * packed.units;
  return launch({"backward_mask", reinterpret_cast<const void*>(&backward_mask_kernel),
                 dim3(static_cast<unsigned>(blocks)), owns_keys ? units.keys : units.queries, 0},
                args, device, stream);
}

// What hides pairs, as the kernels read it.
template <int HeadDim>
Status launch_backward_hiding(const BackwardParams& params, const Device& device,
                              cudaStream_t stream) {
  if (!backward_may_be_done_again(params.forward)) return {};
  const BackwardWorkspace workspace(params);
  const bool accumulates = backward_sum(params) != BackwardSum::kNone;
  const auto prepare = [&](BackwardUnits units, float* ranges, bool owns_keys) {
    if (Status s = launch_backward_segments(params, units, ranges, device, stream); !s.ok())
      return s;
    return launch_backward_mask(params.forward, backward_mask(params, owns_keys), units, owns_keys,
                                device, stream);
  };
  const Status status =
      prepare(backward_keys_units(HeadDim, accumulates), workspace.keys_segments, true);
  if (!status.ok() || accumulates) return status;
  return prepare(backward_dq_units(HeadDim), workspace.dq_segments, false);
}

// Last, so that nothing waits for it.
inline Status launch_backward_sinks(const BackwardParams& params, const Device& device,
                                    cudaStream_t stream) {
  if (!params.dsinks) return {};
  const Problem& problem = params.forward.problem;
  const unsigned heads = static_cast<unsigned>(problem.batch) * problem.q_heads;
  void* args[] = {const_cast<BackwardParams*>(&params)};
  return launch({"backward_sinks", reinterpret_cast<const void*>(&backward_sinks_kernel),
                 dim3(heads), kSinkThreads, 0},
                args, device, stream);
}

template <class T, int HeadDim, bool Featured>
Status launch_backward_products(const BackwardParams& params, const Device& device,
                                cudaStream_t stream) {
  if constexpr (HeadDim <= 128) {
    if (!params.deterministic)
      return launch_backward_accumulating<T, HeadDim, BackwardSum::kAnyOrder, Featured>(
          params, device, stream);
    if constexpr (!Featured)
      return launch_backward_accumulating<T, HeadDim, BackwardSum::kInOrder, false>(params, device,
                                                                                    stream);
  }
  if constexpr (HeadDim > 128 || Featured)
    return launch_backward_split<T, HeadDim, Featured>(params, device, stream);
}

template <class T, int HeadDim>
Status launch_backward_sm90(const BackwardParams& params, const Device& device,
                            cudaStream_t stream) {
  const Broadcast& mask = params.forward.features.mask;
  const int64_t needed = backward_workspace(params.forward.problem, backward_sum(params),
                                            mask.data == nullptr ? nullptr : &mask);
  if (params.workspace_size < needed)
    return {"backward_sm90: workspace is too small, got " + std::to_string(params.workspace_size) +
            " of " + std::to_string(needed) + " floats"};
  if (Status s = launch_backward_hiding<HeadDim>(params, device, stream); !s.ok()) return s;
  if (Status s = backward_is_featured(params.forward)
                     ? launch_backward_products<T, HeadDim, true>(params, device, stream)
                     : launch_backward_products<T, HeadDim, false>(params, device, stream);
      !s.ok())
    return s;
  return launch_backward_sinks(params, device, stream);
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_BACKWARD_SM90_CUH_
