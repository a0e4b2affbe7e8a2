// The same choices that a launch makes, in words, for given shapes and a given device.
#ifndef FLASHATTN_CUDA_EXPLAIN_H_
#define FLASHATTN_CUDA_EXPLAIN_H_

#include <string>

#include "../params.h"
#include "device.h"

namespace flashattn {

struct Explained {
  std::string kernel;   // "sm90", "sm80", "" where there is none
  std::string reason;   // why there is none, or why it is not the fastest path
  std::string details;  // kernels, tiles, splits
};

Explained explain_prefill(const PrefillParams& params, const Device& device);
Explained explain_backward(const BackwardParams& params, const Device& device);
Explained explain_decode(const DecodeParams& params, const Device& device);

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_EXPLAIN_H_
