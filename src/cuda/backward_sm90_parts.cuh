// What the Hopper kernels of the backward share: rings, loads that read padding as zero, products
// and tensor maps. Tiles in shared memory are 64-column chunks of `rows` x 128 bytes in the
// 128-byte swizzle.
#ifndef FLASHATTN_CUDA_BACKWARD_SM90_PARTS_CUH_
#define FLASHATTN_CUDA_BACKWARD_SM90_PARTS_CUH_

#include "device.h"
#include "params.h"
#include "ptx_sm90.cuh"
#include "score.cuh"

namespace flashattn {

// Stage of a ring and the parity of its current round.
template <int Stages>
struct RingPosition {
  uint32_t stage = 0, phase = 0;

  __device__ __forceinline__ void advance() {
    static_assert(Stages == 1 || Stages == 2, "a round is counted as one bit");
    phase ^= Stages == 1 ? 1 : stage;
    if constexpr (Stages == 2) stage ^= 1;
  }
};

// Loads a tile by TMA. Rows outside `valid` read as zero whatever memory holds there (NaN in
// padding must not meet a zero probability in a product): where the tile has such rows, they are
// cleared before the barrier that the consumers wait for completes. `stats_bytes` more arrive on
// it.
template <int HeadDim>
struct BackwardLoader {
  uint32_t repair;  // a barrier of this warp alone
  int lane;
  uint32_t repair_phase = 0;

  template <int Rows>
  __device__ __forceinline__ void load(uint32_t tile, const CUtensorMap* map, uint32_t full,
                                       int row, int head, int b, const Range& valid, int capacity,
                                       uint32_t stats_bytes) {
    constexpr int kTileBytes = Rows * HeadDim * 2;
    const bool whole = row >= valid.begin && min(row + Rows, capacity) <= valid.end;
    if (whole) {
      if (lane == 0) {
        mbarrier_expect_tx(full, kTileBytes + stats_bytes);
        load_chunks<Rows>(tile, map, full, row, head, b);
      }
      return;
    }
    if (lane == 0) {
      mbarrier_expect_tx(repair, kTileBytes);
      load_chunks<Rows>(tile, map, repair, row, head, b);
    }
    mbarrier_wait(repair, repair_phase);
    repair_phase ^= 1;
    clear_rows<Rows>(tile, valid.begin - row, valid.end - row);
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) mbarrier_expect_tx(full, stats_bytes);
  }

  template <int Rows>
  __device__ __forceinline__ void load_chunks(uint32_t tile, const CUtensorMap* map,
                                              uint32_t barrier, int row, int head, int b) {
#pragma unroll
    for (int chunk = 0; chunk < HeadDim / 64; ++chunk)
      tma_load_4d(tile + chunk * Rows * 128, map, barrier, chunk * 64, row, head, b);
  }

  template <int Rows>
  __device__ __forceinline__ void clear_rows(uint32_t tile, int begin, int end) {
#pragma unroll 1
    for (int i = lane; i < Rows * HeadDim / 8; i += 32) {
      const int row = i / 8 % Rows;
      if (row < begin || row >= end) shared_store_f32x4(tile + i * 16, 0.f, 0.f, 0.f, 0.f);
    }
  }
};

// ---- products. Operands are low descriptor words, made opaque at the use (see opaque()).

// d (64 x N) = a b^T over the head dim; both lie row by row, in chunks AChunk and BChunk bytes
// apart.
template <class T, int HeadDim, int N, int AChunk, int BChunk>
__device__ __forceinline__ void issue_over_head_dim(float (&d)[N / 2], uint32_t a, uint32_t b) {
#pragma unroll
  for (int k = 0; k < HeadDim / 16; ++k)
    Wgmma<T, N>::template ss<false, false>(d, descriptor(a + k / 4 * (AChunk / 16) + k % 4 * 2),
                                           descriptor(b + k / 4 * (BChunk / 16) + k % 4 * 2),
                                           k > 0);
}

// d (64 keys x HeadDim) (+)= a b over the query rows; a in registers, b row by row.
template <class T, int HeadDim, int Rows>
__device__ __forceinline__ void issue_over_rows(float (&d)[HeadDim / 2],
                                                const uint32_t (&a)[Rows / 4], uint32_t b,
                                                bool accumulate) {
#pragma unroll
  for (int k = 0; k < Rows / 16; ++k)
    Wgmma<T, HeadDim>::template rs<true>(d, a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3],
                                         descriptor(b + k * 128), accumulate || k > 0);
}

// d (64 of the head dim x N rows) = k^T ds over the keys.
template <class T, int N, int Keys, int DsChunk>
__device__ __forceinline__ void issue_over_keys(float (&d)[N / 2], uint32_t k_smem, uint32_t ds) {
#pragma unroll
  for (int k = 0; k < Keys / 16; ++k)
    Wgmma<T, N>::template ss<true, false>(d, descriptor(k_smem + k * 128),
                                          descriptor(ds + k / 4 * (DsChunk / 16) + k % 4 * 2),
                                          k > 0);
}

// ---- fragments: thread t of a warpgroup holds rows 16 (t / 32) + t % 32 / 4 and 8 further,
// columns 8 j + 2 (t % 4) + {0, 1}, four floats a j.

// S^T to P^T, a key a row. lse2 lies in shared memory, a float a query, at the thread's first
// column; queries before `first` (`first_8` in the second row) do not see the key. They are chosen
// away after the exponential, so that neither an extreme lse nor a scale of 0 matters.
template <int Rows, bool Masked>
__device__ __forceinline__ void probabilities(float (&s)[Rows / 2], uint32_t lse2, float scale_log2,
                                              int first, int first_8) {
#pragma unroll
  for (int j = 0; j < Rows / 8; ++j) {
    const float2 l = shared_load_f32x2(lse2 + 32 * j);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& x = s[4 * j + i];
      x = exp2_approx(fmaf(x, scale_log2, -(i & 1 ? l.y : l.x)));
      if (Masked && 8 * j + (i & 1) < (i < 2 ? first : first_8)) x = 0.f;
    }
  }
}

// The ends of what the window leaves to a row of the fragment and to the one 8 further: columns
// from `end` on, and columns before `first`, are hidden from it.
template <int Columns>
__device__ __forceinline__ void hide_from(float (&x)[Columns / 2], int end, int end_8,
                                          float hidden = 0.f) {
#pragma unroll
  for (int j = 0; j < Columns / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (8 * j + (i & 1) >= (i < 2 ? end : end_8)) x[4 * j + i] = hidden;
}
template <int Columns>
__device__ __forceinline__ void hide_before(float (&x)[Columns / 2], int first, int first_8,
                                            float hidden = 0.f) {
#pragma unroll
  for (int j = 0; j < Columns / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (8 * j + (i & 1) < (i < 2 ? first : first_8)) x[4 * j + i] = hidden;
}

template <class T, int Words>
__device__ __forceinline__ void pack_pairs(uint32_t (&packed)[Words], const float (&x)[2 * Words]) {
#pragma unroll
  for (int j = 0; j < Words; ++j) packed[j] = pack<T>(x[2 * j], x[2 * j + 1]);
}

template <class T, int Words>
__device__ __forceinline__ float2 pair(const float (&x)[Words], int j) {
  return {x[2 * j], x[2 * j + 1]};
}
template <class T, int Words>
__device__ __forceinline__ float2 pair(const uint32_t (&x)[Words], int j) {
  return unpack<T>(x[j]);
}

// p (dp - delta). Where p may be 0 by a mask, dp may be a NaN that the row must not see.
template <bool Masked>
__device__ __forceinline__ float score_gradient(float p, float dp, float delta) {
  const float ds = p * (dp - delta);
  return Masked && p == 0.f ? 0.f : ds;
}

// dS^T = P^T (dP^T - delta); P in fp32, or rounded where it was handed over. delta lies as lse2
// does.
template <class T, int Rows, bool Masked, class P, int Words>
__device__ __forceinline__ void score_gradients(uint32_t (&ds)[Rows / 4], const P (&p)[Words],
                                                const float (&dp)[Rows / 2], uint32_t delta) {
#pragma unroll
  for (int j = 0; j < Rows / 8; ++j) {
    const float2 d = shared_load_f32x2(delta + 32 * j);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 x = pair<T>(p, 2 * j + i), dx = pair<T>(dp, 2 * j + i);
      ds[2 * j + i] =
          pack<T>(score_gradient<Masked>(x.x, dx.x, d.x), score_gradient<Masked>(x.y, dx.y, d.y));
    }
  }
}

// factor * x (64 rows) to a tile in shared memory; rows that do not exist become zeros.
template <class T, int Columns>
__device__ __forceinline__ void fragments_to_shared(const float (&x)[Columns / 2], uint32_t tile,
                                                    int chunk_bytes, float factor, bool exists,
                                                    bool exists_8) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
  const uint32_t row = tile + (16 * warp + (lane & 15)) * 128;
  const auto packed = [&](int i, bool row_exists) {
    return row_exists ? pack<T>(x[i] * factor, x[i + 1] * factor) : 0u;
  };
#pragma unroll
  for (int k = 0; k < Columns / 16; ++k)
    stmatrix_x4(row + k / 4 * chunk_bytes + (((k % 4 * 2 + (lane >> 4)) ^ (lane & 7)) << 4),
                packed(8 * k, exists), packed(8 * k + 2, exists_8), packed(8 * k + 4, exists),
                packed(8 * k + 6, exists_8));
}

// Zeros for 64 rows of each of `chunks` chunks, by one warpgroup.
__device__ __forceinline__ void clear_chunks(uint32_t tile, int chunks, int chunk_bytes) {
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk)
#pragma unroll 1
    for (int i = (threadIdx.x & 127) * 16; i < 64 * 128; i += 128 * 16)
      shared_store_f32x4(tile + chunk * chunk_bytes + i, 0.f, 0.f, 0.f, 0.f);
}

inline Status encode_backward_map(CUtensorMap* map, const Strided& x, int dim,
                                  const Problem& problem, int rows, int heads, int box_rows) {
  TensorMapShape shape{};
  shape.data = x.data;
  shape.bf16 = problem.dtype == DType::kBF16;
  shape.head_dim = dim;
  shape.rows = rows;
  shape.heads = heads;
  shape.batches = x.batches;
  shape.row_stride = x.seq;
  shape.head_stride = x.head;
  shape.batch_stride = x.batch;
  shape.box_rows = box_rows;
  shape.box_chunks = 1;
  return encode_tensor_map_4d(map, shape);
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_BACKWARD_SM90_PARTS_CUH_
