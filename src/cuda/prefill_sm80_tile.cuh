// What a warp of the sm_80 prefill kernel does with its tiles: copies, products, the output's way
// out.
#ifndef FLASHATTN_CUDA_PREFILL_SM80_TILE_CUH_
#define FLASHATTN_CUDA_PREFILL_SM80_TILE_CUH_

#include <cstdint>

#include "backward_tile.cuh"
#include "ptx.cuh"
#include "score.cuh"
#include "softmax.cuh"
#include "tiles_sm80.h"

namespace flashattn {

// Of a wide head dim (tiles_sm80.h) these are the tiles of one piece.
template <class T_, int HeadDim>
struct PrefillSm80 {
  using T = T_;
  static constexpr int kColumns = is_wide(HeadDim) ? kWidePieceColumns : HeadDim;
  using Rows = RowTile<kColumns>;
  static constexpr PrefillTileSm80 kTile = prefill_tile_sm80(HeadDim);
  static constexpr int kBlockQ = kTile.block_q, kBlockKv = kPrefillBlockKv;
  static constexpr int kThreads = 32 * kTile.warps;
  static constexpr int kWarpRows = kBlockQ / kTile.warps;
  static constexpr int kRowBlocks = kWarpRows / 16;  // m16 blocks of a warp
  static constexpr int kKeyBlocks = kBlockKv / 8;    // n8 blocks of the scores
  static constexpr int kDimBlocks = kColumns / 8;    // n8 blocks of the output
  static constexpr int kBufferBytes = kBlockKv * Rows::kRowBytes;
  static constexpr int kQueryBytes = kBlockQ * Rows::kRowBytes;
  static_assert(!kTile.q_in_registers || kQueryBytes <= 2 * kBufferBytes,
                "Q passes through the two buffers that the first K tile does not take");

  using Scores = float[kRowBlocks][kKeyBlocks][4];
  using Probabilities = uint32_t[kRowBlocks][kKeyBlocks / 2][4];
  using Output = float[kRowBlocks][kDimBlocks][4];
};

// How the block's threads share a tile of rows: a thread has the same chunks of every
// kRowsAtOnce-th row.
template <class Kernel>
struct CopyShare {
  using Rows = typename Kernel::Rows;
  static constexpr int kChunksAtOnce = Rows::kSegmentBytes / 16;
  static constexpr int kRowsAtOnce = Kernel::kThreads / kChunksAtOnce;
  static constexpr int kStepBytes = kRowsAtOnce * Rows::kRowBytes;
  static_assert(kRowsAtOnce % 8 == 0, "the swizzle must not change");
  int row, chunk;  // the first

  __device__ explicit CopyShare(int thread)
      : row(thread / kChunksAtOnce), chunk(thread % kChunksAtOnce) {}
  __device__ uint32_t first(uint32_t tile_smem) const {
    return tile_smem + Rows::offset(row, chunk);
  }
};

// The chunks of `share` of rows [first, first + Count) to shared memory; `source` is the first of
// them. Rows outside `present` and columns that the tensor lacks arrive as zeros and are not read.
// Returns where the rows behind these begin.
template <class Kernel, int Count>
__device__ __forceinline__ const typename Kernel::T* load_share(const CopyShare<Kernel>& share,
                                                                uint32_t tile_smem,
                                                                const typename Kernel::T* source,
                                                                int64_t stride, int columns,
                                                                int first, Range present) {
  using Share = CopyShare<Kernel>;
  static_assert(Count % Share::kRowsAtOnce == 0, "no step is partial");
  const uint32_t target = share.first(tile_smem);
  const uint32_t distance = first + share.row - present.begin;
  const uint32_t count = present.end - present.begin;
#pragma unroll
  for (int i = 0; i < Count / Share::kRowsAtOnce; ++i) {
    const bool is_present = distance + i * Share::kRowsAtOnce < count;
#pragma unroll
    for (int c = 0; c < Kernel::Rows::kChunks; c += Share::kChunksAtOnce) {
      const bool read = is_present && 8 * (share.chunk + c) < columns;
      cp_async_16_zfill(target + i * Share::kStepBytes + 16 * c, source + 8 * c, read ? 16 : 0);
    }
    source += Share::kRowsAtOnce * stride;
  }
  return source;
}

// Rows [first, first + Count) of a head.
template <class Kernel, int Count>
__device__ __forceinline__ void load_rows(uint32_t tile_smem, const typename Kernel::T* head,
                                          int64_t stride, int columns, int first, Range present) {
  opaque(stride);
  const CopyShare<Kernel> share(opaque_thread());
  const auto* source = head + (int64_t{first} + share.row) * stride + 8 * share.chunk;
  load_share<Kernel, Count>(share, tile_smem, source, stride, columns, first, present);
}

// The tiles of a head's keys or values in order. Where they are Consecutive, a tile begins where
// the one before ended: making 64-bit addresses anew took a tenth of the main loop's instructions.
template <class Kernel, bool Consecutive>
class TileCursor {
 public:
  using T = typename Kernel::T;

  __device__ TileCursor(const T* head, int64_t stride, int tile) {
    const CopyShare<Kernel> share(threadIdx.x);
    source_ = head + (int64_t{tile} * Kernel::kBlockKv + share.row) * stride + 8 * share.chunk;
  }

  __device__ __forceinline__ void load(uint32_t tile_smem, const T* head, int64_t stride,
                                       int columns, int tile, Range present) {
    const int first = tile * Kernel::kBlockKv;
    if constexpr (Consecutive) {
      const CopyShare<Kernel> share(opaque_thread());
      source_ = load_share<Kernel, Kernel::kBlockKv>(share, tile_smem, source_, stride, columns,
                                                     first, present);
    } else {
      load_rows<Kernel, Kernel::kBlockKv>(tile_smem, head, stride, columns, first, present);
    }
  }

 private:
  const T* source_;  // this thread's first chunk of the next tile
};

template <class T>
__device__ __forceinline__ uint32_t finite_or_zero(uint32_t pair) {
  const float2 v = unpack<T>(pair);
  return pack<T>(isfinite(v.x) ? v.x : 0.0f, isfinite(v.y) ? v.y : 0.0f);
}

// A key that a row must not see has p = 0 there, but 0 times NaN is NaN. So NaN and Inf are taken
// out of the part of a V tile that this thread copied, before the barrier that shows it to the
// others; add_not_finite() brings them to the rows that see them. True if there was any.
template <class Kernel>
__device__ __forceinline__ bool remove_not_finite(uint32_t v_smem) {
  using T = typename Kernel::T;
  using Share = CopyShare<Kernel>;
  constexpr int kSteps = Kernel::kBlockKv / Share::kRowsAtOnce;
  constexpr int kChunkSteps = Kernel::Rows::kChunks / Share::kChunksAtOnce;
  const uint32_t own = Share(opaque_thread()).first(v_smem);
  uint32_t zeros[4] = {};  // NaN once a factor was not finite
#pragma unroll 2           // more loads at once would spill
  for (int i = 0; i < kSteps * kChunkSteps; ++i) {
    const uint4 v = load_shared_16(own + i / kChunkSteps * Share::kStepBytes +
                                   i % kChunkSteps * Kernel::Rows::kSegmentBytes);
    zeros[0] = fma_packed<T>(v.x, 0, zeros[0]);
    zeros[1] = fma_packed<T>(v.y, 0, zeros[1]);
    zeros[2] = fma_packed<T>(v.z, 0, zeros[2]);
    zeros[3] = fma_packed<T>(v.w, 0, zeros[3]);
  }
  if ((zeros[0] | zeros[1] | zeros[2] | zeros[3]) == 0) return false;
#pragma unroll 1
  for (int i = 0; i < kSteps * kChunkSteps; ++i) {
    const uint32_t address =
        own + i / kChunkSteps * Share::kStepBytes + i % kChunkSteps * Kernel::Rows::kSegmentBytes;
    const uint4 v = load_shared_16(address);
    store_shared_16(address, {finite_or_zero<T>(v.x), finite_or_zero<T>(v.y),
                              finite_or_zero<T>(v.z), finite_or_zero<T>(v.w)});
  }
  return true;
}

// The three buffers of a block rotate backwards: V lies behind K, and what is
// free behind V. All are offsets from the first.
template <class Kernel>
class BufferRing {
 public:
  __device__ int k() const { return k_; }
  __device__ int v() const { return k_ == kLast ? 0 : k_ + kSize; }
  __device__ int free() const { return k_ == 0 ? kLast : k_ - kSize; }
  __device__ int next_k() const { return free(); }
  __device__ int next_v() const { return k_; }
  // K goes to the free buffer, V to K's.
  __device__ void rotate() { k_ = free(); }
  // In pieces, which follow each other alone: K, V and free are the piece in use, the next, and the
  // one after it.
  __device__ void advance() { k_ = v(); }

 private:
  static constexpr int kSize = Kernel::kBufferBytes, kLast = 2 * kSize;
  int k_ = kLast;
};

// Four buffers: K and V are multiplied while the next pair arrives. Which pair's turn it is follows
// from a count of tiles; where that is the tile's own index, it costs no register.
template <class Kernel>
class BufferPairs {
 public:
  __device__ explicit BufferPairs(int first_tile) : turn_(first_tile) {}
  __device__ int k() const { return (turn_ & 1) * 2 * kSize; }
  __device__ int v() const { return k() + kSize; }
  __device__ int next_k() const { return 2 * kSize - k(); }
  __device__ int next_v() const { return next_k() + kSize; }
  __device__ void rotate() { ++turn_; }

 private:
  static constexpr int kSize = Kernel::kBufferBytes;
  int turn_;
};

// The A operands of a warp's query rows: kept in registers, or read again at
// every use.
template <class Kernel, bool InRegisters = Kernel::kTile.q_in_registers>
class QueryOperand {
 public:
  __device__ explicit QueryOperand(uint32_t q_smem) : q_smem_(q_smem) {}

  __device__ __forceinline__ void get(uint32_t (&a)[4], int m, int k, int thread) const {
    using Rows = typename Kernel::Rows;
    const uint32_t warp_rows = q_smem_ + thread / 32 * Kernel::kWarpRows * Rows::kRowBytes;
    ldmatrix_x4(
        a, Rows::advance(Rows::rows_first(warp_rows, thread % 32), k) + 16 * m * Rows::kRowBytes);
  }

 private:
  uint32_t q_smem_;
};

template <class Kernel>
class QueryOperand<Kernel, true> {
 public:
  __device__ explicit QueryOperand(uint32_t q_smem) {
    const QueryOperand<Kernel, false> in_smem(q_smem);
#pragma unroll
    for (int m = 0; m < Kernel::kRowBlocks; ++m) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) in_smem.get(q_regs_[m][k], m, k, threadIdx.x);
    }
  }

  __device__ __forceinline__ void get(uint32_t (&a)[4], int m, int k, int) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = q_regs_[m][k][i];
  }

 private:
  static constexpr int kSteps = Kernel::kDimBlocks / 2;
  uint32_t q_regs_[Kernel::kRowBlocks][kSteps][4];
};

// s += q k^T.
template <class Kernel>
__device__ __forceinline__ void multiply_keys(typename Kernel::Scores& s,
                                              const QueryOperand<Kernel>& query, uint32_t k_smem,
                                              int thread) {
  using Rows = typename Kernel::Rows;
  const uint32_t k_lane = Rows::chunks_first(k_smem, thread % 32);
#pragma unroll
  for (int k = 0; k < Kernel::kDimBlocks / 2; ++k) {
    uint32_t q_regs[Kernel::kRowBlocks][4];
#pragma unroll
    for (int m = 0; m < Kernel::kRowBlocks; ++m) query.get(q_regs[m], m, k, thread);
#pragma unroll
    for (int n = 0; n < Kernel::kKeyBlocks; n += 2) {
      uint32_t k_regs[4];
      ldmatrix_x4(k_regs, Rows::advance(k_lane, k) + n * 8 * Rows::kRowBytes);
#pragma unroll
      for (int m = 0; m < Kernel::kRowBlocks; ++m) {
        mma_m16n8k16<typename Kernel::T>(s[m][n], q_regs[m], k_regs[0], k_regs[1]);
        mma_m16n8k16<typename Kernel::T>(s[m][n + 1], q_regs[m], k_regs[2], k_regs[3]);
      }
    }
  }
}

// o += p v, in parts of 64 columns; those beyond the value's are left out.
template <class Kernel>
__device__ __forceinline__ void accumulate_values(typename Kernel::Output& o,
                                                  const typename Kernel::Probabilities& p_regs,
                                                  uint32_t v_smem, int columns, int lane) {
  using Rows = typename Kernel::Rows;
  constexpr int kPart = Kernel::kDimBlocks % 8 == 0 ? 8 : Kernel::kDimBlocks;
  const uint32_t v_lane = Rows::rows_first(v_smem, lane);
#pragma unroll
  for (int part = 0; part < Kernel::kDimBlocks; part += kPart) {
    if (part > 0 && 8 * part >= columns) continue;
#pragma unroll
    for (int k = 0; k < Kernel::kKeyBlocks / 2; ++k) {
#pragma unroll
      for (int n = part; n < part + kPart; n += 2) {
        uint32_t v_regs[4];
        ldmatrix_x4_trans(v_regs, Rows::advance(v_lane, n / 2) + k * 16 * Rows::kRowBytes);
#pragma unroll
        for (int m = 0; m < Kernel::kRowBlocks; ++m) {
          mma_m16n8k16<typename Kernel::T>(o[m][n], p_regs[m][k], v_regs[0], v_regs[1]);
          mma_m16n8k16<typename Kernel::T>(o[m][n + 1], p_regs[m][k], v_regs[2], v_regs[3]);
        }
      }
    }
  }
}

template <class Kernel>
__device__ __forceinline__ void scale_rows(typename Kernel::Output& o,
                                           const float (&factor)[2 * Kernel::kRowBlocks]) {
#pragma unroll
  for (int m = 0; m < Kernel::kRowBlocks; ++m) {
#pragma unroll
    for (int n = 0; n < Kernel::kDimBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[m][n][e] *= factor[2 * m + e / 2];
    }
  }
}

// The rows of a warp to global memory, through its rows of the staging tile so
// that 16-byte stores fill whole sectors.
template <class Kernel>
__device__ __forceinline__ void store_output(unsigned char* stage,
                                             const HeadView<typename Kernel::T>& to,
                                             const typename Kernel::Output& o,
                                             const RowResult (&results)[2 * Kernel::kRowBlocks],
                                             int warp_row, int first_row, int capacity, int lane) {
  using Rows = typename Kernel::Rows;
#pragma unroll
  for (int r = 0; r < 2 * Kernel::kRowBlocks; ++r) {
    const float scale = results[r].output_scale;
#pragma unroll
    for (int n = 0; n < Kernel::kDimBlocks; ++n) {
      const float* pair = &o[r / 2][n][r % 2 * 2];
      const uint32_t packed =
          scale == 0.0f ? 0u : pack<typename Kernel::T>(pair[0] * scale, pair[1] * scale);
      const int offset = Rows::offset(warp_row + 8 * r + lane / 4, n) + 4 * (lane % 4);
      *reinterpret_cast<uint32_t*>(stage + offset) = packed;
    }
  }
  __syncwarp();
  constexpr int kChunksAtOnce = Rows::kSegmentBytes / 16;
  constexpr int kRowsAtOnce = 32 / kChunksAtOnce;
  const int chunk = lane % kChunksAtOnce;
#pragma unroll
  for (int i = lane / kChunksAtOnce; i < Kernel::kWarpRows; i += kRowsAtOnce) {
    const int64_t row = int64_t{first_row} + i;
    if (row >= capacity) break;
#pragma unroll
    for (int c = chunk; c < Rows::kChunks; c += kChunksAtOnce) {
      if (8 * c >= to.columns) break;
      *reinterpret_cast<uint4*>(to.data + row * to.stride + 8 * c) =
          *reinterpret_cast<const uint4*>(stage + Rows::offset(warp_row + i, c));
    }
  }
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_PREFILL_SM80_TILE_CUH_
