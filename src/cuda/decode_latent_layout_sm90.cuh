// What the roles of the latent decode kernel share: tiles and barriers in shared memory.
#ifndef FLASHATTN_CUDA_DECODE_LATENT_LAYOUT_SM90_CUH_
#define FLASHATTN_CUDA_DECODE_LATENT_LAYOUT_SM90_CUH_

#include "decode_latent_plan.h"
#include "decode_locate.cuh"
#include "ptx_sm90.cuh"

namespace flashattn {

// The parts of a tile in the order in which they are needed, and no longer needed. The scorer
// multiplies the weights with one half of its values between the products of the next scores and
// with the other behind them; each part is loaded again while the others are in use.
enum LatentPart { kRight, kLeftFirst, kLeftLast, kLatentParts };
constexpr int latent_first_chunk(int part) {
  return part == kRight ? 4 : part == kLeftFirst ? 0 : 2;
}
constexpr int latent_chunks(int part) { return part == kRight ? kLatentChunks - 4 : 2; }

// full: the part has arrived; empty: its last reader is done. weights_full: the scorer has written
// the weights of a tile; weights_empty: the other warpgroup has them in registers.
struct LatentShared {
  uint64_t full[kLatentStages][kLatentParts], empty[kLatentStages][kLatentParts];
  uint64_t weights_full, weights_empty;
  uint32_t present[kLatentStages];  // a bit for every 8 keys of a tile: they lie on a page
};

static_assert(sizeof(LatentShared) <= 256, "what kLatentSharedMemory has for it");

constexpr int kLatentWarps = 4;  // of a warpgroup
// Named barriers; 0 is __syncthreads.
constexpr int kLatentQueryStored = 1, kLatentLeftCleared = 2, kLatentRightCleared = 3;

__device__ __forceinline__ int latent_stage(int n) { return n % kLatentStages; }
__device__ __forceinline__ uint32_t latent_parity(int n) { return n / kLatentStages % 2; }

// Shared-memory addresses.
struct LatentSmem {
  uint32_t base;
  __device__ uint32_t query() const { return base + kLatentQuery; }
  __device__ uint32_t tile(int n) const {
    return base + kLatentTiles + latent_stage(n) * kLatentTileBytes;
  }
  // This thread's weights are 4 pieces of 16 bytes, 2048 bytes apart.
  __device__ uint32_t weights(int thread) const { return base + kLatentWeights + thread * 16; }
  __device__ uint32_t factors(int thread) const { return base + kLatentFactors + thread * 8; }
};

// 16 bytes of the query or of a tile: row, and column in units of 16 bytes.
__device__ __forceinline__ uint32_t latent_address(uint32_t tile, int row, int column) {
  return tile + column / 8 * kLatentChunkBytes + row * 128 + ((column ^ row) % 8) * 16;
}

// For locate_block.
struct LatentShape {
  static constexpr int kRows = kLatentRows;
};

// The tiles of a block: neighbours, so that only the last of a sequence is ragged.
struct LatentTiles {
  int first, count;

  __device__ explicit LatentTiles(const DecodeBlock& block) {
    const int tiles =
        block.keys.begin < block.keys.end ? divide_up(block.keys.end, kLatentTile) : 0;
    const int share = divide_up(tiles, block.splits);
    first = block.split * share;
    count = max(0, min(share, tiles - first));
  }
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_DECODE_LATENT_LAYOUT_SM90_CUH_
