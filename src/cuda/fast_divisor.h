// Division of indices by numbers that the host knows; fast_divisor.cuh divides.
#ifndef FLASHATTN_CUDA_FAST_DIVISOR_H_
#define FLASHATTN_CUDA_FAST_DIVISOR_H_

#include <cstdint>

namespace flashattn {

// n / divisor for 0 <= n < 2^31 by one high multiplication.
struct FastDivisor {
  uint32_t divisor = 1, multiplier = 1, shift = 0;

  constexpr FastDivisor() = default;
  constexpr explicit FastDivisor(int d) : divisor(d) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    multiplier = static_cast<uint32_t>((((uint64_t{1} << shift) - divisor) << 32) / divisor + 1);
  }
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_FAST_DIVISOR_H_
