// Division of indices by numbers that the host knows.
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
constexpr int divide(int n, const FastDivisor& by) {
  const uint32_t high =
      static_cast<uint32_t>(uint64_t{by.multiplier} * static_cast<uint32_t>(n) >> 32);
  return static_cast<int>((high + static_cast<uint32_t>(n)) >> by.shift);
}
constexpr int remainder(int n, const FastDivisor& by) {
  return n - divide(n, by) * static_cast<int>(by.divisor);
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_FAST_DIVISOR_H_
