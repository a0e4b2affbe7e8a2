// Division of indices by numbers that the host knows, on the device.
#ifndef FLASHATTN_CUDA_FAST_DIVISOR_CUH_
#define FLASHATTN_CUDA_FAST_DIVISOR_CUH_

#include "fast_divisor.h"

namespace flashattn {

__device__ __forceinline__ int divide(int n, const FastDivisor& by) {
  return static_cast<int>((__umulhi(n, by.multiplier) + static_cast<uint32_t>(n)) >> by.shift);
}
__device__ __forceinline__ int remainder(int n, const FastDivisor& by) {
  return n - divide(n, by) * static_cast<int>(by.divisor);
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_FAST_DIVISOR_CUH_
