// The compile-time facts of a decode kernel, and the elements of 8-bit caches.
//
// Tokens lie on the 16 rows of mma.m16n8k16 and query rows (the heads of a group, times the new
// tokens) on its 8 columns: S^T = K Q^T, O^T = V^T P^T. With heads on the rows, 16 of them would be
// padded for a group of 4, at twice the accumulators and instructions.
#ifndef FLASHATTN_CUDA_DECODE_SHAPE_CUH_
#define FLASHATTN_CUDA_DECODE_SHAPE_CUH_

#include <type_traits>

#include "decode_plan.h"
#include "ptx.cuh"

namespace flashattn {

enum class CacheFormat { k16Bit, kE4M3, kInt8 };

// T is the type of queries and outputs, and of 16-bit caches. HeadDim is the compiled one.
template <class T, CacheFormat Format, int HeadDim, int ColumnBlocks>
struct DecodeShape {
  using Element = T;
  static constexpr CacheFormat kFormat = Format;
  static constexpr bool kByteCache = Format != CacheFormat::k16Bit;
  // What the tensor cores multiply. fp16 holds every e4m3 and int8 value exactly.
  using Product = std::conditional_t<kByteCache, __half, T>;

  static constexpr int kHeadDim = HeadDim;
  static constexpr int kColumnBlocks = ColumnBlocks;
  static constexpr int kRows = ColumnBlocks * kDecodeColumns;
  static constexpr int kWidth = kByteCache ? 1 : 2;
  static constexpr int kRowBytes = HeadDim * kWidth;
  static constexpr int kRowChunks = kRowBytes / 16;
  static constexpr int kTileTokens = decode_tile_tokens(kRowBytes);
  static constexpr int kTileBytes = decode_tile_bytes(kRowBytes);
  static constexpr int kTokenBlocks = kTileTokens / 16;
  static constexpr uint32_t kAllTokens = ~0u >> (32 - kTileTokens);  // a bit for each of a tile
  static constexpr int kDimBlocks = HeadDim / 16;
  // One ldmatrix.x4 covers two 16-byte chunks of 16 tokens: one k-step of 16 dims, two of bytes.
  static constexpr int kStepsPerLoad = kByteCache ? 2 : 1;
  static constexpr int kLoads = kDimBlocks / kStepsPerLoad;
  static constexpr bool kQueryInRegisters = decode_query_in_registers(HeadDim, ColumnBlocks);

  // Copies from global memory: lanes side by side on the chunks of a row, the rest of the warp on
  // the next rows.
  static constexpr int kPowerOfTwo = kRowChunks & -kRowChunks;
  static constexpr int kLanesPerRow = kPowerOfTwo < 32 ? kPowerOfTwo : 32;
  static constexpr int kPieces = kRowChunks / kLanesPerRow;
  static constexpr int kRowsPerCopy = 32 / kLanesPerRow;
  static constexpr int kCopies = kTileTokens / kRowsPerCopy;

  // Rows of a tile lie one after another, the chunks of a row permuted by exclusive or with a few
  // bits of the row, so that the same chunk of 8 consecutive rows meets every bank once.
  static constexpr int kSwizzleSpan = kRowBytes % 128 == 0 ? 8 : kRowBytes % 64 == 0 ? 4 : 2;
  static constexpr int swizzle(int row) {
    return (kSwizzleSpan == 8 ? row : kSwizzleSpan == 4 ? row >> 1 : row >> 2) & (kSwizzleSpan - 1);
  }
  // Where `chunk` of `row` is in a tile. The swizzle of a sum of rows with disjoint bits is the
  // exclusive or of their swizzles; both functions below rest on that.
  static __device__ __forceinline__ uint32_t place(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ swizzle(row)) << 4);
  }
  // From place(row, chunk) to place(row + rows, chunk + chunks). `rows` and `row`, and the low bits
  // of `chunks` and `chunk`, share no bit.
  static __device__ __forceinline__ uint32_t move(uint32_t place, int rows, int chunks) {
    const int flip = swizzle(rows) ^ (chunks & (kSwizzleSpan - 1));
    return (place ^ (flip << 4)) + rows * kRowBytes + ((chunks & -kSwizzleSpan) << 4);
  }

  static_assert(HeadDim % 32 == 0, "staging, partials and byte fragments take 32 dims at a time");
  static_assert(kRowChunks % kLanesPerRow == 0 && kTileTokens % kRowsPerCopy == 0, "whole copies");
};

__device__ __forceinline__ uint32_t as_bits(__half2 x) { return *reinterpret_cast<uint32_t*>(&x); }
__device__ __forceinline__ __half2 as_half2(uint32_t x) { return *reinterpret_cast<__half2*>(&x); }

// Four cache bytes to fp16: `low` holds bytes 0 and 1, `high` 2 and 3.
template <CacheFormat Format>
__device__ __forceinline__ void widen(uint32_t bytes, uint32_t& low, uint32_t& high);

template <>
__device__ __forceinline__ void widen<CacheFormat::kInt8>(uint32_t bytes, uint32_t& low,
                                                          uint32_t& high) {
  // 0x6400 + u is the fp16 number 1024 + u for a byte u; u is the value plus 128.
  const uint32_t biased = bytes ^ 0x80808080u;
  const __half2 bias = as_half2(0x64806480u);
  low = as_bits(__hsub2(as_half2(__byte_perm(biased, 0x64646464u, 0x4140)), bias));
  high = as_bits(__hsub2(as_half2(__byte_perm(biased, 0x64646464u, 0x4342)), bias));
}

#if __CUDA_ARCH__ >= 890
template <>
__device__ __forceinline__ void widen<CacheFormat::kE4M3>(uint32_t bytes, uint32_t& low,
                                                          uint32_t& high) {
  asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;}"
      : "=r"(low), "=r"(high)
      : "r"(bytes));
}
#else
// Two e4m3 numbers, each in the upper byte of a half: moved to the exponent and mantissa of an fp16
// number they are 2^-8 of their value, subnormals included. 0x7f, which is NaN, becomes 480.
__device__ __forceinline__ uint32_t widen_e4m3_pair(uint32_t pair) {
  const uint32_t scaled = (pair & 0x80008000u) | ((pair >> 1) & 0x3f803f80u);
  const __half2 value = __hmul2(as_half2(scaled), __float2half2_rn(256.0f));
  return as_bits(value) | (__heq2_mask(__habs2(value), __float2half2_rn(480.0f)) & 0x7fff7fffu);
}
template <>
__device__ __forceinline__ void widen<CacheFormat::kE4M3>(uint32_t bytes, uint32_t& low,
                                                          uint32_t& high) {
  low = widen_e4m3_pair(__byte_perm(bytes, 0, 0x1404));
  high = widen_e4m3_pair(__byte_perm(bytes, 0, 0x3424));
}
#endif

// A fragments of 16 tokens (rows) x 16 dims, for the k-steps of one load. Bytes come four
// consecutive dims to a lane; the query fragments take their dims in the same order, so none has to
// move.
template <class Shape>
__device__ __forceinline__ void load_key_fragments(uint32_t (&a)[Shape::kStepsPerLoad][4],
                                                   uint32_t address) {
  if constexpr (Shape::kByteCache) {
    uint32_t raw[4];
    ldmatrix_x4(raw, address);
#pragma unroll
    for (int i = 0; i < 4; ++i) widen<Shape::kFormat>(raw[i], a[i / 2][i % 2], a[i / 2][i % 2 + 2]);
  } else {
    ldmatrix_x4(a[0], address);
  }
}

// A fragments of V^T: 16 dims (rows) x 16 tokens. The transpose moves pairs of bytes: a lane gets
// dims 2r and 2r + 1 of two tokens. Row r then stands for dim 2r and row r + 8 for dim 2r + 1.
template <class Shape>
__device__ __forceinline__ void load_value_fragments(uint32_t (&a)[Shape::kStepsPerLoad][4],
                                                     uint32_t address) {
  if constexpr (Shape::kByteCache) {
    uint32_t raw[4];
    ldmatrix_x4_trans(raw, address);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t by_dim = __byte_perm(raw[i], 0, 0x3120);
      widen<Shape::kFormat>(by_dim, a[i % 2][i / 2 * 2], a[i % 2][i / 2 * 2 + 1]);
    }
  } else {
    ldmatrix_x4_trans(a[0], address);
  }
}

// The dims of the four accumulators that a lane stages together (row r of dim blocks 2x and 2x + 1,
// then row r + 8 of each): dim(x, r) + step(i).
template <bool ByteCache>
struct StagedDims {
  static __device__ __forceinline__ int first(int x, int r) {
    return 32 * x + (ByteCache ? 2 : 1) * r;
  }
  static __device__ __forceinline__ int step(int i) {
    return ByteCache ? 16 * (i / 2) + i % 2 : 8 * i;
  }
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_DECODE_SHAPE_CUH_
