// One-tile kernels that try what the Hopper kernels are built of, each against arithmetic that a
// test can do itself: TMA and its swizzle, every descriptor mode of wgmma, the fragment maps, the
// barrier ring.
#ifndef FLASHATTN_CUDA_SELFTEST_SM90_CUH_
#define FLASHATTN_CUDA_SELFTEST_SM90_CUH_

#include <type_traits>

#include "device.h"
#include "prefill_layout_sm90.cuh"

namespace flashattn {

constexpr int kSelftestM = 64, kSelftestK = 128;

// Where the operands of D (64 x N) = A (64 x 128) B (128 x N) lie, and how they are stored in
// memory: K-major A is (64, 128), MN-major A is (128, 64); K-major B is (N, 128), MN-major B is
// (128, N).
enum class WgmmaMode {
  kShared,          // A K-major, B K-major: Q K^T
  kSharedAMnMajor,  // dS^T Q and its like
  kSharedBMnMajor,
  kSharedBothMnMajor,
  kRegisters,          // A K-major, through ldmatrix into registers
  kRegistersBMnMajor,  // P V
};
constexpr bool a_mn_major(WgmmaMode mode) {
  return mode == WgmmaMode::kSharedAMnMajor || mode == WgmmaMode::kSharedBothMnMajor;
}
constexpr bool b_mn_major(WgmmaMode mode) {
  return mode == WgmmaMode::kSharedBMnMajor || mode == WgmmaMode::kSharedBothMnMajor ||
         mode == WgmmaMode::kRegistersBMnMajor;
}
constexpr bool a_in_registers(WgmmaMode mode) {
  return mode == WgmmaMode::kRegisters || mode == WgmmaMode::kRegistersBMnMajor;
}

// A row-major matrix as a tensor map over one batch and head.
template <class T>
Status encode_matrix(CUtensorMap* map, const T* data, int rows, int columns, int box_rows) {
  const bool bf16 = std::is_same_v<T, __nv_bfloat16>;
  return encode_tensor_map_4d(map, {data, bf16, columns, rows, 1, 1, columns, 0, 0, box_rows, 1});
}

__device__ __forceinline__ void load_matrix(uint32_t smem, const CUtensorMap* map, uint32_t barrier,
                                            int first_row, int rows, int columns) {
  for (int chunk = 0; chunk < (columns + 63) / 64; ++chunk)
    tma_load_4d(smem + chunk * rows * 128, map, barrier, chunk * 64, first_row, 0, 0);
}

template <class T, WgmmaMode Mode, int N>
__device__ __forceinline__ void selftest_product(float (&d_regs)[N / 2], uint32_t a_smem,
                                                 uint32_t b_smem) {
  constexpr bool kAMn = a_mn_major(Mode), kBMn = b_mn_major(Mode);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSelftestK / 16; ++k) {
    // 16 deep: 16 rows of an MN-major tile, 32 bytes of a K-major one.
    const uint32_t b_low = kBMn ? descriptor_low_mn_major(b_smem, kSelftestK) + k * 128
                                : descriptor_low_k_major(b_smem) + k / 4 * (N * 8) + k % 4 * 2;
    if constexpr (a_in_registers(Mode)) {
      uint32_t a[4];
      ldmatrix_x4(a, tile_address(a_smem, kSelftestM, warp * 16 + lane % 16, 2 * k + lane / 16));
      wgmma_fence();
      Wgmma<T, N>::template rs<kBMn>(d_regs, a[0], a[1], a[2], a[3], descriptor(b_low), k > 0);
      wgmma_commit();
      wgmma_wait<0>();
    } else {
      const uint32_t a_low =
          kAMn ? descriptor_low_mn_major(a_smem, kSelftestK) + k * 128
               : descriptor_low_k_major(a_smem) + k / 4 * (kSelftestM * 8) + k % 4 * 2;
      Wgmma<T, N>::template ss<kAMn, kBMn>(d_regs, descriptor(a_low), descriptor(b_low), k > 0);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
}

// D is written twice: fp32 by the accumulator's fragment map, and rounded to T by stmatrix and a
// TMA store.
template <class T, WgmmaMode Mode, int N>
__global__ void __launch_bounds__(128, 1)
    selftest_wgmma_kernel(const __grid_constant__ CUtensorMap a_map,
                          const __grid_constant__ CUtensorMap b_map,
                          const __grid_constant__ CUtensorMap rounded_map, float* d) {
  constexpr int kABytes = kSelftestM * kSelftestK * 2;
  constexpr int kBRows = b_mn_major(Mode) ? kSelftestK : N;
  constexpr int kBColumns = b_mn_major(Mode) ? N : kSelftestK;
  constexpr int kBBytes = (kBColumns + 63) / 64 * kBRows * 128;
  extern __shared__ __align__(1024) char tiles[];
  __shared__ uint64_t full;
  const uint32_t a_smem = (shared_address(tiles) + 1023) & ~1023u;
  const uint32_t b_smem = a_smem + kABytes, d_smem = b_smem + kBBytes;
  const uint32_t barrier = shared_address(&full);
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
    mbarrier_expect_tx(barrier, kABytes + kBBytes);
    if (a_mn_major(Mode))
      load_matrix(a_smem, &a_map, barrier, 0, kSelftestK, kSelftestM);
    else
      load_matrix(a_smem, &a_map, barrier, 0, kSelftestM, kSelftestK);
    load_matrix(b_smem, &b_map, barrier, 0, kBRows, kBColumns);
  }
  __syncthreads();
  mbarrier_wait(barrier, 0);

  float d_regs[N / 2];
  selftest_product<T, Mode, N>(d_regs, a_smem, b_smem);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const int row = warp * 16 + lane / 4 + i / 2 % 2 * 8;
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    d[row * N + column] = d_regs[i];
  }
#pragma unroll
  for (int k = 0; k < N / 16; ++k) {
    const float* x = d_regs + 8 * k;
    stmatrix_x4(tile_address(d_smem, kSelftestM, warp * 16 + lane % 16, 2 * k + lane / 16),
                pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
  }
  fence_async_proxy();
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int chunk = 0; chunk < (N + 63) / 64; ++chunk)
      tma_store_4d(&rounded_map, d_smem + chunk * kSelftestM * 128, chunk * 64, 0, 0, 0);
    bulk_commit();
    bulk_wait<0>();
  }
}

// d (64, N) and rounded (64, N) = a b; a and b as the mode says.
template <class T, WgmmaMode Mode, int N>
Status selftest_wgmma(const T* a, const T* b, float* d, T* rounded, const Device& device,
                      cudaStream_t stream) {
  constexpr int kARows = a_mn_major(Mode) ? kSelftestK : kSelftestM;
  constexpr int kAColumns = a_mn_major(Mode) ? kSelftestM : kSelftestK;
  constexpr int kBRows = b_mn_major(Mode) ? kSelftestK : N;
  constexpr int kBColumns = b_mn_major(Mode) ? N : kSelftestK;
  CUtensorMap a_map, b_map, rounded_map;
  if (Status s = encode_matrix(&a_map, a, kARows, kAColumns, kARows); !s.ok()) return s;
  if (Status s = encode_matrix(&b_map, b, kBRows, kBColumns, kBRows); !s.ok()) return s;
  if (Status s = encode_matrix(&rounded_map, rounded, kSelftestM, N, kSelftestM); !s.ok()) return s;
  void* args[] = {&a_map, &b_map, &rounded_map, &d};
  constexpr int kBytes = kSelftestM * kSelftestK * 2 + (kBColumns + 63) / 64 * kBRows * 128 +
                         (N + 63) / 64 * kSelftestM * 128 + 1024;
  const Launch what = {"selftest_wgmma",
                       reinterpret_cast<const void*>(&selftest_wgmma_kernel<T, Mode, N>), dim3(1),
                       128, kBytes};
  return launch(what, args, device, stream);
}

// What a packed load leaves in shared memory, byte for byte: `raw` is (chunks, 64, 64) of T. x is
// (positions, heads, head dim) in memory; head group `group_index` of `group` heads, from
// `position` on.
template <class T>
__global__ void __launch_bounds__(128, 1)
    selftest_tma_kernel(const __grid_constant__ CUtensorMap map, T* raw, int chunks, int rows,
                        int position, int group_index) {
  extern __shared__ __align__(1024) char tiles[];
  __shared__ uint64_t full;
  const uint32_t smem = (shared_address(tiles) + 1023) & ~1023u;
  const uint32_t barrier = shared_address(&full);
  const int bytes = chunks * kWarpgroupRows * 128;
  for (int byte = threadIdx.x * 16; byte < bytes; byte += 128 * 16)
    store_shared_16(smem + byte, uint4{});
  fence_async_proxy();
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_expect_tx(barrier, chunks * rows * 128);
    for (int chunk = 0; chunk < chunks; ++chunk)
      tma_load_packed(smem + chunk * kWarpgroupRows * 128, &map, barrier, chunk * 64, position,
                      group_index, 0);
  }
  mbarrier_wait(barrier, 0);
  for (int byte = threadIdx.x * 16; byte < bytes; byte += 128 * 16)
    *reinterpret_cast<uint4*>(reinterpret_cast<char*>(raw) + byte) = load_shared_16(smem + byte);
}

template <class T>
Status selftest_tma(const T* x, T* raw, int positions, int heads, int head_dim, int group,
                    int position, int group_index, const Device& device, cudaStream_t stream) {
  int chunks = (head_dim + 63) / 64, box = kWarpgroupRows / group, rows = box * group;
  CUtensorMap map;
  const TensorMapShape shape = {x, std::is_same_v<T, __nv_bfloat16>, head_dim, positions, heads,
                                1, int64_t{heads} * head_dim,        head_dim, 0,         box,
                                1};
  if (Status s = encode_tensor_map_packed(&map, shape, group); !s.ok()) return s;
  void* args[] = {&map, &raw, &chunks, &rows, &position, &group_index};
  const Launch what = {"selftest_tma", reinterpret_cast<const void*>(&selftest_tma_kernel<T>),
                       dim3(1), 128, chunks * kWarpgroupRows * 128 + 1024};
  return launch(what, args, device, stream);
}

// A ring of kKvStages 64 x 64 tiles, one loading thread and one warpgroup: `sum` (64, 64) is the
// sum of the tiles of x (64 tiles, 64).
template <class T>
__global__ void __launch_bounds__(256, 1)
    selftest_ring_kernel(const __grid_constant__ CUtensorMap map, float* sum, int tiles) {
  constexpr int kBytes = 64 * 128;
  extern __shared__ __align__(1024) char ring[];
  __shared__ uint64_t full[kKvStages], empty[kKvStages];
  const uint32_t smem = (shared_address(ring) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kKvStages; ++stage) {
      mbarrier_init(shared_address(&full[stage]), 1);
      mbarrier_init(shared_address(&empty[stage]), 1);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= 128) {
    for (uint32_t i = 0; threadIdx.x == 128 && i < tiles; ++i) {
      const uint32_t stage = i % kKvStages, barrier = shared_address(&full[stage]);
      mbarrier_wait(shared_address(&empty[stage]), (i / kKvStages % 2) ^ 1);
      mbarrier_expect_tx(barrier, kBytes);
      load_matrix(smem + stage * kBytes, &map, barrier, i * 64, 64, 64);
    }
    return;
  }
  float total[32] = {};  // this thread's half of one row
  const int row = threadIdx.x / 2, half = threadIdx.x % 2;
  for (uint32_t i = 0; i < tiles; ++i) {
    const uint32_t stage = i % kKvStages;
    mbarrier_wait(shared_address(&full[stage]), i / kKvStages % 2);
    for (int j = 0; j < 4; ++j) {
      const uint4 x = load_shared_16(tile_address(smem + stage * kBytes, 64, row, half * 4 + j));
      const T* elements = reinterpret_cast<const T*>(&x);
      for (int e = 0; e < 8; ++e) total[8 * j + e] += static_cast<float>(elements[e]);
    }
    named_barrier_sync(1, 128);
    if (threadIdx.x == 0) mbarrier_arrive(shared_address(&empty[stage]));
  }
  for (int e = 0; e < 32; ++e) sum[row * 64 + half * 32 + e] = total[e];
}

template <class T>
Status selftest_ring(const T* x, float* sum, int tiles, const Device& device, cudaStream_t stream) {
  CUtensorMap map;
  if (Status s = encode_matrix(&map, x, 64 * tiles, 64, 64); !s.ok()) return s;
  void* args[] = {&map, &sum, &tiles};
  const Launch what = {"selftest_ring", reinterpret_cast<const void*>(&selftest_ring_kernel<T>),
                       dim3(1), 256, kKvStages * 64 * 128 + 1024};
  return launch(what, args, device, stream);
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_SELFTEST_SM90_CUH_
