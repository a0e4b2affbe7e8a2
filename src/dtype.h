// The element types that cross the boundary between XLA and the kernels.
#ifndef FLASHATTN_DTYPE_H_
#define FLASHATTN_DTYPE_H_

#include <cstdint>

namespace flashattn {

enum class DType : int32_t { kF64, kF32, kF16, kBF16, kF8E4M3, kS8, kS32, kPred };

constexpr int byte_width(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 8;
    case DType::kF32:
    case DType::kS32:
      return 4;
    case DType::kF16:
    case DType::kBF16:
      return 2;
    default:
      return 1;
  }
}

constexpr const char* name(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return "float64";
    case DType::kF32:
      return "float32";
    case DType::kF16:
      return "float16";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF8E4M3:
      return "float8_e4m3fn";
    case DType::kS8:
      return "int8";
    case DType::kS32:
      return "int32";
    default:
      return "bool";
  }
}

}  // namespace flashattn

#endif  // FLASHATTN_DTYPE_H_
