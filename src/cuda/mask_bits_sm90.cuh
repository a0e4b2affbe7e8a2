// Packs a boolean mask for the Hopper forward (mask_bits.h).
#ifndef FLASHATTN_CUDA_MASK_BITS_SM90_CUH_
#define FLASHATTN_CUDA_MASK_BITS_SM90_CUH_

#include "device.h"
#include "mask_bits.h"
#include "params.h"
#include "ptx_sm90.cuh"

namespace flashattn {

constexpr int kPackThreads = 256;

struct PackTask {
  Broadcast mask;
  PackedMask packed;
  int q_len, kv_len;
  int tile_rows, block_kv;
};

// Bytes of keys [key, key + 16) of a row, each 0 or 1; the last key stands for those beyond.
__device__ __forceinline__ uint4 load_mask(const uint8_t* row, int64_t col, int key, int last) {
  const uint8_t* at = row + key * col;
  if (col == 1 && key + 15 <= last && reinterpret_cast<uintptr_t>(at) % 16 == 0)
    return __ldg(reinterpret_cast<const uint4*>(at));
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i)
    words[i / 4] |= static_cast<uint32_t>(__ldg(row + min(key + i, last) * col)) << (8 * (i % 4));
  return {words[0], words[1], words[2], words[3]};
}

// Four bits for each lane of a quad, in the bytes' lower halves: of quad lanes 0, 2, 1, 3.
__device__ __forceinline__ uint32_t quad_nibbles(uint4 bytes) {
  const auto pairs = [](uint32_t x) { return (x | x >> 7) & 0x00030003; };  // keys 2 q, 2 q + 1
  return pairs(bytes.x) | pairs(bytes.z) << 2 | (pairs(bytes.y) | pairs(bytes.w) << 2) << 8;
}

// One block a tile of rows and block of keys. A warp takes four rows at a time, eight lanes each of
// 16 keys: two of the accumulators' groups of 8 columns.
static __global__ void __launch_bounds__(kPackThreads)
    pack_mask_kernel(const __grid_constant__ PackTask task) {
  grid_dependency_trigger();  // the forward waits where it wants the first mask
  constexpr int kRowsAtOnce = 4, kRows = 16, kWarps = kPackThreads / 32;
  const PackedMask& packed = task.packed;
  const int block = blockIdx.x % packed.blocks, tile = blockIdx.x / packed.blocks % packed.tiles;
  const int plane = blockIdx.x / packed.blocks / packed.tiles;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 8;
  const int first_lane = lane - lane % 8, quad_lane = lane % 4;
  const int own_byte = 8 * (quad_lane / 2 + quad_lane % 2 * 2);  // as quad_nibbles() has them
  const uint8_t* const mask = static_cast<const uint8_t*>(task.mask.data) +
                              plane / packed.heads * task.mask.batch +
                              plane % packed.heads * task.mask.head;
  const int rows = packed.rows == 1 ? 1 : task.tile_rows, first_row = tile * rows;
  const int key = block * task.block_kv + min(16 * (lane % 8), task.block_kv - 16);
  uint32_t* const words =
      packed.words + ((int64_t{plane} * packed.blocks + block) * packed.rows + first_row) * 4;

  constexpr uint32_t kAllSeen = 0x01010101;
  uint32_t any = 0, all = kAllSeen;
  for (int first = warp * kRows; first < rows; first += kWarps * kRows) {
    uint4 bytes[kRows / kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
      const int own_row = min(first_row + first + i * kRowsAtOnce + row, task.q_len - 1);
      bytes[i] = load_mask(mask + own_row * task.mask.row, task.mask.col, key, task.kv_len - 1);
    }
#pragma unroll
    for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
      any |= bytes[i].x | bytes[i].y | bytes[i].z | bytes[i].w;
      all &= bytes[i].x & bytes[i].y & bytes[i].z & bytes[i].w;
      const uint32_t nibbles = quad_nibbles(bytes[i]);
      uint32_t word = 0;
#pragma unroll
      for (int l = 0; l < 8; ++l)
        word |= (__shfl_sync(~0u, nibbles, first_lane + l) >> own_byte & 0xf) << (4 * l);
      const int own_row = first + i * kRowsAtOnce + row;
      if (own_row < rows && lane % 8 < 4) words[own_row * 4 + quad_lane] = word;
    }
  }
  const bool some = __syncthreads_or(any != 0), whole = __syncthreads_and(all == kAllSeen);
  if (threadIdx.x == 0)
    packed.seen[blockIdx.x] = (some ? PackedMask::kAny : 0) | (whole ? PackedMask::kAll : 0);
}

inline Status launch_pack_mask(const TileSm90& tile, const PrefillParams& params,
                               const PackedMask& packed, const Device& device,
                               cudaStream_t stream) {
  PackTask task{params.features.mask,  packed,         params.problem.q_len,
                params.problem.kv_len, tile.block_q(), tile.block_kv};
  void* args[] = {&task};
  const int64_t blocks = packed.planes() * packed.tiles * packed.blocks;
  return launch({"pack_mask", reinterpret_cast<const void*>(&pack_mask_kernel),
                 dim3(static_cast<unsigned>(blocks)), kPackThreads, 0},
                args, device, stream);
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_MASK_BITS_SM90_CUH_
