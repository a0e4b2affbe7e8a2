// The Hopper backward: which kernels a call needs, one after the other on its stream.
#ifndef FLASHATTN_CUDA_BACKWARD_SM90_CUH_
#define FLASHATTN_CUDA_BACKWARD_SM90_CUH_

#include "backward_dq_sm90.cuh"
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
  return backward_lead_sm90(params.forward, params.deterministic);
}

template <class T, int HeadDim, bool Ordered>
Status launch_backward_prepare(const BackwardParams& params, const Device& device,
                               cudaStream_t stream) {
  const void* kernel = reinterpret_cast<const void*>(&backward_prepare_kernel<T, HeadDim, Ordered>);
  const Problem& problem = params.forward.problem;
  return launch_backward_pass("backward_prepare", kernel, params,
                              int64_t{problem.batch} * problem.q_heads,
                              backward_lead_of(params).zero, false, device, stream);
}

template <class T, int HeadDim, bool Ordered>
Status launch_backward_finish(const BackwardParams& params, const Device& device,
                              cudaStream_t stream) {
  const void* kernel = reinterpret_cast<const void*>(&backward_finish_kernel<T, HeadDim, Ordered>);
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
                    sections.last,
                    sections.short_first,
                    BackwardParts(params)};
  BackwardParams mutable_params = params;
  void* args[] = {&maps, &mutable_params, &grid};
  const unsigned blocks = static_cast<unsigned>(grid.heads) * grid.key_blocks;
  return launch({name, kernel, dim3(blocks), 384, L::kBytes, 1, true}, args, device, stream);
}

template <class T, int HeadDim, bool Ordered>
Status launch_backward_keys_sm90(const BackwardParams& params, const Device& device,
                                 cudaStream_t stream) {
  const void* kernel =
      reinterpret_cast<const void*>(&backward_keys_sm90_kernel<T, HeadDim, Ordered>);
  return launch_backward_keys<BackwardLayout<HeadDim, Ordered>, HeadDim>(
      "backward_keys_sm90", kernel, params, device, stream);
}

template <class T, int HeadDim>
Status launch_backward_wide_sm90(const BackwardParams& params, const Device& device,
                                 cudaStream_t stream) {
  const void* kernel = reinterpret_cast<const void*>(&backward_wide_sm90_kernel<T, HeadDim>);
  return launch_backward_keys<BackwardWideLayout<HeadDim>, HeadDim>("backward_wide_sm90", kernel,
                                                                    params, device, stream);
}

// Prepare, the kernel that owns keys and adds up dQ, and the pass that converts dQ.
template <class T, int HeadDim, bool Ordered>
Status launch_backward_accumulating(const BackwardParams& params, const Device& device,
                                    cudaStream_t stream) {
  if (Status s = launch_backward_prepare<T, HeadDim, Ordered>(params, device, stream); !s.ok())
    return s;
  if (Status s = launch_backward_keys_sm90<T, HeadDim, Ordered>(params, device, stream); !s.ok())
    return s;
  return launch_backward_finish<T, HeadDim, Ordered>(params, device, stream);
}

// Prepare, dK and dV, dQ: nothing is added up across blocks.
template <class T, int HeadDim>
Status launch_backward_split(const BackwardParams& params, const Device& device,
                             cudaStream_t stream) {
  if (Status s = launch_backward_prepare<T, HeadDim, false>(params, device, stream); !s.ok())
    return s;
  if (Status s = launch_backward_wide_sm90<T, HeadDim>(params, device, stream); !s.ok()) return s;
  return launch_backward_dq_sm90<T, HeadDim>(params, device, stream);
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

template <class T, int HeadDim>
Status launch_backward_products(const BackwardParams& params, const Device& device,
                                cudaStream_t stream) {
  if constexpr (backward_accumulates_dq(HeadDim))
    return params.deterministic
               ? launch_backward_accumulating<T, HeadDim, true>(params, device, stream)
               : launch_backward_accumulating<T, HeadDim, false>(params, device, stream);
  else
    return launch_backward_split<T, HeadDim>(params, device, stream);
}

template <class T, int HeadDim>
Status launch_backward_sm90(const BackwardParams& params, const Device& device,
                            cudaStream_t stream) {
  if (Status s = launch_backward_products<T, HeadDim>(params, device, stream); !s.ok()) return s;
  return launch_backward_sinks(params, device, stream);
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_BACKWARD_SM90_CUH_
