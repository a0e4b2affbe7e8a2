// Rows of numbers of any dtype, converted to and from the type that the kernels compute in.
//
// The conversions are integer arithmetic without branches, which the compiler vectorises, and touch
// no subnormal float: XLA runs its threads with those flushed to zero, where float16 has them as
// values.
#ifndef FLASHATTN_CPU_CONVERT_H_
#define FLASHATTN_CPU_CONVERT_H_

#include <cstdint>

#include "cpu/vector.h"
#include "dtype.h"

namespace flashattn::cpu {

template <class V>
struct Convert {
  using Real = typename V::Real;

  // Sixteen or eight bits: a sign, ExponentBits with the usual bias and MantissaBits. Magnitudes
  // from FirstSpecial on are no numbers: infinity and NaNs, or the one NaN of formats without
  // infinity.
  template <int ExponentBits, int MantissaBits, uint32_t FirstSpecial>
  static float from_small_float(uint32_t bits) {
    constexpr int kShift = 23 - MantissaBits;
    constexpr uint32_t kBias = (1u << (ExponentBits - 1)) - 1;
    constexpr uint32_t kLargestExponent = (1u << ExponentBits) - 1;
    constexpr bool kHasInfinity = FirstSpecial == kLargestExponent << MantissaBits;
    const uint32_t magnitude = bits & ((1u << (ExponentBits + MantissaBits)) - 1);
    const uint32_t sign = (bits >> (ExponentBits + MantissaBits)) << 31;
    const uint32_t normal = (magnitude << kShift) + ((127 - kBias) << 23);
    // A subnormal is the distance of a normal number with the same mantissa from its power of two.
    const float power = float_of((128 - kBias) << 23);
    const uint32_t subnormal = bits_of(float_of(normal + (1u << 23)) - power);
    const uint32_t special =
        kHasInfinity ? normal + ((255 - kLargestExponent - (127 - kBias)) << 23) : 0x7fc00000u;
    const uint32_t finite = magnitude < (1u << MantissaBits) ? subnormal : normal;
    return float_of(sign | (magnitude >= FirstSpecial ? special : finite));
  }

  static float from_half(uint16_t bits) { return from_small_float<5, 10, 0x7c00>(bits); }
  static float from_float8(uint8_t bits) { return from_small_float<4, 3, 0x7f>(bits); }
  static float from_bfloat16(uint16_t bits) { return float_of(uint32_t{bits} << 16); }

  // Rounds to nearest, ties to even.
  static uint16_t to_half(float x) {
    const uint32_t sign = (bits_of(x) >> 16) & 0x8000;
    const uint32_t magnitude = bits_of(x) & 0x7fffffff;
    const uint32_t normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
    // The spacing of floats at 0.5 is that of half's subnormals.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
    const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    return static_cast<uint16_t>(sign | (magnitude >= 0x477ff000 ? special : finite));
  }

  static uint16_t to_bfloat16(float x) {
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40;
    return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded);
  }

  // Reads `count` numbers that start `offset` elements into an array of that dtype.
  static void load_row(Real* to, const void* from, DType dtype, int64_t offset, int count) {
    switch (dtype) {
      case DType::kF64:
        return convert_row<identity<double>>(to, static_cast<const double*>(from) + offset, count);
      case DType::kF32:
        return convert_row<identity<float>>(to, static_cast<const float*>(from) + offset, count);
      case DType::kF16:
        return convert_row<from_half>(to, static_cast<const uint16_t*>(from) + offset, count);
      case DType::kBF16:
        return convert_row<from_bfloat16>(to, static_cast<const uint16_t*>(from) + offset, count);
      case DType::kF8E4M3:
        return convert_row<from_float8>(to, static_cast<const uint8_t*>(from) + offset, count);
      case DType::kS8:
        return convert_row<identity<int8_t>>(to, static_cast<const int8_t*>(from) + offset, count);
      default:
        return;  // integers and booleans are no operands of the arithmetic
    }
  }

  static void store_row(void* to, const Real* from, DType dtype, int64_t offset, int count) {
    switch (dtype) {
      case DType::kF64:
        return convert_row<identity<Real>>(static_cast<double*>(to) + offset, from, count);
      case DType::kF32:
        return convert_row<identity<Real>>(static_cast<float*>(to) + offset, from, count);
      case DType::kF16:
        return convert_row<to_half>(static_cast<uint16_t*>(to) + offset, from, count);
      case DType::kBF16:
        return convert_row<to_bfloat16>(static_cast<uint16_t*>(to) + offset, from, count);
      default:
        return;
    }
  }

 private:
  static float float_of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
  }
  static uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
  }

  template <class T>
  static T identity(T x) {
    return x;
  }

  template <auto Function, class To, class From>
  static void convert_row(To* to, const From* from, int count) {
    for (int i = 0; i < count; ++i) to[i] = static_cast<To>(Function(from[i]));
  }
};

}  // namespace flashattn::cpu

#endif  // FLASHATTN_CPU_CONVERT_H_
