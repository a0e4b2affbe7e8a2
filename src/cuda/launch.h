// From parameters to a kernel on a device: the launchers that exist, and the one place that
// chooses.
#ifndef FLASHATTN_CUDA_LAUNCH_H_
#define FLASHATTN_CUDA_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <string>

#include "../params.h"
#include "device.h"

namespace flashattn {

// One per kernel file and (element type, head dim); HeadDim is the compiled head dim, at least the
// call's. Defined in the kernel's .cuh, instantiated by the build.
template <class T, int HeadDim>
Status launch_prefill_sm80(const PrefillParams& params, const Device& device, cudaStream_t stream);
template <class T, int HeadDim>
Status launch_prefill_sm90(const PrefillParams& params, const Device& device, cudaStream_t stream);
template <class T, int HeadDim>
Status launch_backward_sm80(const BackwardParams& params, const Device& device,
                            cudaStream_t stream);
template <class T, int HeadDim>
Status launch_backward_sm90(const BackwardParams& params, const Device& device,
                            cudaStream_t stream);
template <class T, int HeadDim>
Status launch_decode(const DecodeParams& params, const Device& device, cudaStream_t stream);
template <class T, int HeadDim>
Status launch_decode_latent_sm90(const DecodeParams& params, const Device& device,
                                 cudaStream_t stream);

// Which kernel a call gets, and why not a faster one.
struct Choice {
  enum Path { kNone, kSm80, kSm90 } path = kNone;
  std::string reason;  // kNone: what is missing; kSm80 on a Hopper GPU: why; else empty
};
Choice choose_prefill(const PrefillParams& params, const Device& device);
Choice choose_backward(const BackwardParams& params, const Device& device);
Choice choose_decode(const DecodeParams& params, const Device& device);

Status launch_prefill(const PrefillParams& params, const Device& device, cudaStream_t stream);
Status launch_backward(const BackwardParams& params, const Device& device, cudaStream_t stream);
Status launch_decode(const DecodeParams& params, const Device& device, cudaStream_t stream);

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_LAUNCH_H_
