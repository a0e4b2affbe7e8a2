// Tiles of rows in shared memory for mma.sync: copied in asynchronously, multiplied, copied out.
//
// A row is 2 * Dim bytes in 16-byte chunks. Chunks are permuted inside segments of 128 bytes (64
// when the row is not a multiple of 128, as at 96) so that the 8 rows which ldmatrix reads at once
// lie in different banks.
#ifndef FLASHATTN_CUDA_BACKWARD_TILE_CUH_
#define FLASHATTN_CUDA_BACKWARD_TILE_CUH_

#include <cstdint>

#include "params.h"
#include "ptx.cuh"
#include "score.cuh"

namespace flashattn {

template <int Dim>
struct RowTile {
  static_assert(Dim % 32 == 0, "the permutation works on segments of 64 or 128 bytes");
  static constexpr int kRowBytes = 2 * Dim;
  static constexpr int kChunks = Dim / 8;
  static constexpr int kSegmentBytes = kRowBytes % 128 == 0 ? 128 : 64;

  static __device__ int offset(int row, int chunk) {
    const int permutation = kSegmentBytes == 128 ? row & 7 : (row >> 1) & 3;
    return row * kRowBytes + ((chunk ^ permutation) << 4);
  }
  // From the address of a chunk below 2 to the address `steps` pairs of chunks further in its row.
  static __device__ uint32_t advance(uint32_t address, int steps) {
    const int bytes = 32 * steps;
    return (address ^ (bytes % kSegmentBytes)) + bytes / kSegmentBytes * kSegmentBytes;
  }

  // What lane l gives ldmatrix.x4 for 16 rows and a pair of chunks. Rows-first order makes the A
  // operand of an mma, and transposed the B operand whose k runs over rows; chunks-first order
  // makes the B operand of two n8 tiles whose k runs along the row.
  static __device__ uint32_t rows_first(uint32_t tile, int lane) {
    return tile + offset(lane & 15, lane >> 4);
  }
  static __device__ uint32_t chunks_first(uint32_t tile, int lane) {
    return tile + offset((lane & 7) + 8 * (lane >> 4), (lane >> 3) & 1);
  }
};

// One head of a sequence in global memory.
template <class T>
struct HeadView {
  T* data;
  int64_t stride;
  int columns;

  __device__ HeadView(const Strided& tensor, int b, int n, int width)
      : data(static_cast<T*>(tensor.data) + tensor.offset(b, 0, n)),
        stride(tensor.seq),
        columns(width) {}
};

// Rows [first, first + rows) to shared memory by the block's threads, eight to a row. Rows outside
// `present` and columns beyond the tensor's arrive as zeros and are not read.
template <int Dim, class T>
__device__ __forceinline__ void copy_rows_async(uint32_t tile, const HeadView<T>& from, int first,
                                                int rows, Range present, int threads) {
  using Tile = RowTile<Dim>;
  const int chunk = threadIdx.x % 8;
  for (int row = threadIdx.x / 8; row < rows; row += threads / 8) {
    const int t = first + row;
    const bool read = t >= present.begin && t < present.end;
    const T* source = from.data + (read ? t * from.stride + 8 * chunk : 0);
    const uint32_t destination = tile + Tile::offset(row, chunk);
#pragma unroll
    for (int column = 0; column < Dim; column += 64) {
      // 64 columns on, a chunk lies 128 bytes on: the permutation stays inside that.
      if (column + 64 > Dim && chunk >= (Dim - column) / 8) break;
      const bool in_tensor = read && column + 8 * chunk < from.columns;
      cp_async_16_zfill(destination + 2 * column, in_tensor ? source + column : from.data,
                        in_tensor ? 16 : 0);
    }
  }
}

// sums (16 RowTiles x 16 Groups) += x (16 RowTiles rows) . y^T (16 Groups rows), both over Dim.
template <class T, int Dim, int RowTiles, int Groups>
__device__ __forceinline__ void multiply_rows(float (&sums)[RowTiles][Groups][8], uint32_t x_tile,
                                              uint32_t y_tile, int lane) {
  using Tile = RowTile<Dim>;
  const uint32_t x_lane = Tile::rows_first(x_tile, lane);
  const uint32_t y_lane = Tile::chunks_first(y_tile, lane);
#pragma unroll
  for (int k = 0; k < Dim / 16; ++k) {
    uint32_t x[RowTiles][4], y[Groups][4];
#pragma unroll
    for (int r = 0; r < RowTiles; ++r) {
      ldmatrix_x4(x[r], Tile::advance(x_lane, k) + r * 16 * Tile::kRowBytes);
    }
#pragma unroll
    for (int g = 0; g < Groups; ++g) {
      ldmatrix_x4(y[g], Tile::advance(y_lane, k) + g * 16 * Tile::kRowBytes);
    }
#pragma unroll
    for (int r = 0; r < RowTiles; ++r) {
#pragma unroll
      for (int g = 0; g < Groups; ++g) {
        mma_m16n8k16<T>(sums[r][g], x[r], y[g][0], y[g][1]);
        mma_m16n8k16<T>(sums[r][g] + 4, x[r], y[g][2], y[g][3]);
      }
    }
  }
}

// A group's accumulators of two n8 tiles are, rounded, the A operand of one k16 step.
template <class T, int RowTiles, int Groups>
__device__ __forceinline__ void pack_rows(uint32_t (&packed)[RowTiles][Groups][4],
                                          const float (&values)[RowTiles][Groups][8]) {
#pragma unroll
  for (int r = 0; r < RowTiles; ++r) {
#pragma unroll
    for (int i = 0; i < 4 * Groups; ++i) {
      const float* pair = values[r][i / 4] + 2 * (i % 4);
      packed[r][i / 4][i % 4] = pack<T>(pair[0], pair[1]);
    }
  }
}

// For the rows that this lane holds in a B operand over k (rows 2 (l % 4) + {0, 1}, then those +
// 8): all ones where a row's bit is set in `rows`, zero elsewhere.
template <int Groups>
__device__ __forceinline__ void lane_row_masks(uint32_t (&masks)[Groups][2], uint32_t rows,
                                               int lane) {
#pragma unroll
  for (int i = 0; i < 2 * Groups; ++i) {
    const uint32_t bits = rows >> (8 * i + 2 * (lane % 4));
    masks[i / 2][i % 2] = (bits & 1 ? 0x0000ffffu : 0u) | (bits & 2 ? 0xffff0000u : 0u);
  }
}

// sums (16 RowTiles x Dim) += weights (16 RowTiles x 16 Groups) . y (16 Groups rows x Dim). With
// Masked, y's rows are taken as zero where row_masks is zero: a weight of zero does not silence a
// NaN.
template <class T, int Dim, bool Masked, int RowTiles, int Groups>
__device__ __forceinline__ void accumulate_rows(float (&sums)[RowTiles][Dim / 8][4],
                                                const uint32_t (&weights)[RowTiles][Groups][4],
                                                uint32_t y_tile,
                                                const uint32_t (&row_masks)[Groups][2], int lane) {
  using Tile = RowTile<Dim>;
  const uint32_t y_lane = Tile::rows_first(y_tile, lane);
#pragma unroll
  for (int g = 0; g < Groups; ++g) {
#pragma unroll
    for (int n = 0; n < Dim / 16; ++n) {
      uint32_t y[4];
      ldmatrix_x4_trans(y, Tile::advance(y_lane, n) + g * 16 * Tile::kRowBytes);
      if constexpr (Masked) {
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] &= row_masks[g][i % 2];
      }
#pragma unroll
      for (int r = 0; r < RowTiles; ++r) {
        mma_m16n8k16<T>(sums[r][2 * n], weights[r][g], y[0], y[1]);
        mma_m16n8k16<T>(sums[r][2 * n + 1], weights[r][g], y[2], y[3]);
      }
    }
  }
}

// A warp's accumulators, times `factor` and rounded, into its rows of a tile.
template <class T, int Dim, int RowTiles>
__device__ __forceinline__ void stage_rows(unsigned char* tile, int first_row,
                                           const float (&sums)[RowTiles][Dim / 8][4], float factor,
                                           int lane) {
#pragma unroll
  for (int r = 0; r < RowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < Dim / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + 16 * r + 8 * half + lane / 4;
        const uint32_t packed =
            pack<T>(factor * sums[r][n][2 * half], factor * sums[r][n][2 * half + 1]);
        *reinterpret_cast<uint32_t*>(tile + RowTile<Dim>::offset(row, n) + 4 * (lane % 4)) = packed;
      }
    }
  }
}

// A tile to rows [first, first + rows) below `capacity`, by all threads; rows from `length` on are
// zeros whatever the tile holds.
template <int Dim, class T>
__device__ __forceinline__ void store_rows(const HeadView<T>& to, const unsigned char* tile,
                                           int first, int rows, int length, int capacity) {
  using Tile = RowTile<Dim>;
  for (int i = threadIdx.x; i < rows * Tile::kChunks; i += blockDim.x) {
    const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
    const int64_t t = int64_t{first} + row;
    if (t >= capacity || 8 * chunk >= to.columns) continue;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (t < length) value = *reinterpret_cast<const uint4*>(tile + Tile::offset(row, chunk));
    *reinterpret_cast<uint4*>(to.data + t * to.stride + 8 * chunk) = value;
  }
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_BACKWARD_TILE_CUH_
