// What the roles of the Hopper forward share: tiles and barriers in shared memory, tensor maps.
#ifndef FLASHATTN_CUDA_PREFILL_LAYOUT_SM90_CUH_
#define FLASHATTN_CUDA_PREFILL_LAYOUT_SM90_CUH_

#include <cstring>

#include "block_finder_sm90.cuh"
#include "ptx_sm90.cuh"
#include "tile_scheduler.cuh"
#include "tiles_sm90.h"

namespace flashattn {

// What a row of the tile table means for a kernel. Tiles are stored chunk after chunk of 64
// columns, each chunk rows x 128 bytes in the 128-byte swizzle.
template <int TileIndex>
struct PrefillTile {
  static constexpr TileSm90 kTile = kPrefillTilesSm90[TileIndex];
  static constexpr bool kCausal = kTile.kind == ScoreKind::kCausal;
  static constexpr bool kShaped = kTile.kind == ScoreKind::kShaped;
  static constexpr bool kAnyMask = kTile.finds_blocks();
  static constexpr int kHeadDim = kTile.head_dim, kValueDim = kTile.value_dim;
  static constexpr int kBlockKv = kTile.block_kv;
  static constexpr int kWarpgroups = kTile.warpgroups, kQStages = kTile.q_stages;
  static constexpr int kKvStages = kTile.kv_stages();
  static constexpr bool kSplitsLong = kTile.splits_long;
  // How Q is given back: each warpgroup's rows once their last scores are there, or a whole buffer
  // once O has left it.
  static constexpr bool kDirectO = kTile.direct_o;
  static constexpr int kQReleases = kDirectO ? kWarpgroups : 1;
  // Tiles whose TileWork is kept. With direct O it outlives Q: see PrefillProducer::publish.
  static constexpr int kTileWorks = kDirectO ? 3 : kQStages;
  static constexpr int kChunks = kTile.chunks(), kValueChunks = kTile.value_chunks();
  static constexpr int kQChunkBytes = kWarpgroupRows * 128, kKvChunkBytes = kBlockKv * 128;
  static constexpr int kQBytes = kTile.q_bytes();
  static constexpr int kKBytes = kTile.k_bytes(), kVBytes = kTile.v_bytes();
  static constexpr int kBiasChunks = kTile.bias_chunks(), kBiasBytes = kTile.bias_bytes();
  static_assert(kHeadDim % 16 == 0 && kBlockKv % 16 == 0, "wgmma multiplies 16 deep");
  static_assert(kDirectO || kValueDim <= kHeadDim, "O is staged in Q's place");
  static_assert(!kDirectO || kValueDim % 32 == 0, "a quad of lanes stores 32 columns of O");
  static_assert(!kSplitsLong || (kWarpgroups == 2 && kCausal && !kDirectO),
                "nothing else is prepared for it");
  static_assert(kWarpgroups >= 2 && kWarpgroups <= 4, "register shares exist for these");
};

// Shared-memory address of 16 bytes of a tile: row, and column in units of 16 bytes.
__device__ __forceinline__ uint32_t tile_address(uint32_t tile, int tile_rows, int row,
                                                 int column) {
  return tile + column / 8 * (tile_rows * 128) + row * 128 + ((column ^ row) % 8) * 16;
}

// full: the tile has arrived; empty: its readers are done. Each starts in phase 0; the n-th wait
// for full takes parity n % 2, that for empty the other one, which passes at once on a fresh
// barrier.
template <class Tile>
struct PrefillBarriers {
  uint64_t q_full[Tile::kQStages][Tile::kWarpgroups], q_empty[Tile::kQStages][Tile::kQReleases];
  uint64_t k_full[Tile::kKvStages], k_empty[Tile::kKvStages];
  uint64_t v_full[Tile::kKvStages], v_empty[Tile::kKvStages];
  uint64_t v_raw[Tile::kKvStages];  // a V that the inspector has to see before it is full
  uint64_t counter_claimed;
};

// Kernels that serve any mask say with each block which one it is.
template <class Tile, bool AnyMask = Tile::kAnyMask>
struct PrefillBlocksShared {};
template <class Tile>
struct PrefillBlocksShared<Tile, true> {
  TileWork next_work;     // the producer's, as is
  int64_t next_mask_row;  // of PackedMask::words, the tile's first row in its plane's first block
  int64_t mask_row[Tile::kTileWorks];                 // goes with `work`
  FoundBlock k_block[kKvStages], v_block[kKvStages];  // published with the tile, freed with it
  // The blocks, from the first to the last, from which the inspector took something.
  int first_not_finite[Tile::kTileWorks], end_not_finite[Tile::kTileWorks];
};

// Kernels that add a bias. Every warpgroup has its own buffer, refilled as soon as it has read it.
template <class Tile, bool Shaped = Tile::kShaped>
struct PrefillBiasShared {};
template <class Tile>
struct PrefillBiasShared<Tile, true> {
  uint64_t bias_full[Tile::kWarpgroups], bias_empty[Tile::kWarpgroups];
};

template <class Tile>
struct PrefillShared : PrefillBlocksShared<Tile>, PrefillBiasShared<Tile> {
  PrefillBarriers<Tile> barriers;
  // Published by q_full, freed by q_empty: of the same tile or, with direct O, of the next one.
  TileWork work[Tile::kTileWorks];
  bool v_not_finite[Tile::kTileWorks];  // the inspector took something out of a V of this tile
};

// Counts tiles through the Q buffers and through what is known of them.
template <class Tile>
struct TileCount {
  int q_stage = 0;
  uint32_t q_parity = 0;
  int own_work = 0;

  __device__ int work() const { return Tile::kDirectO ? own_work : q_stage; }
  __device__ __forceinline__ void next() {
    if (++q_stage == Tile::kQStages) {
      q_stage = 0;
      q_parity ^= 1;
    }
    if (++own_work == Tile::kTileWorks) own_work = 0;
  }
};

// One part of a TileWork in shared memory.
template <class Part>
__device__ __forceinline__ Part load_part(const TileWork& work) {
  static_assert(sizeof(Part) == sizeof(uint4), "one load");
  const uint4 words = load_shared_16(shared_address(static_cast<const Part*>(&work)));
  Part part;
  memcpy(&part, &words, sizeof part);
  return part;
}

// Shared-memory addresses of the tiles.
template <class Tile>
struct PrefillSmem {
  uint32_t base;

  __device__ uint32_t q(int stage, int warpgroup) const {
    return base + (stage * Tile::kWarpgroups + warpgroup) * Tile::kQBytes;
  }
  __device__ uint32_t k(uint32_t stage) const {
    return q(Tile::kQStages, 0) + stage * Tile::kKBytes;
  }
  __device__ uint32_t v(uint32_t stage) const { return k(Tile::kKvStages) + stage * Tile::kVBytes; }
  __device__ uint32_t bias(int warpgroup) const {  // there in calls with a bias only
    return v(Tile::kKvStages) + warpgroup * Tile::kBiasBytes;
  }
  __device__ uint32_t part() const { return v(Tile::kKvStages); }  // where tiles are split only
};

// Counts blocks through a ring of buffers.
template <class Tile>
__device__ __forceinline__ uint32_t ring_stage(uint32_t i) {
  return i % Tile::kKvStages;
}
template <class Tile>
__device__ __forceinline__ uint32_t ring_parity(uint32_t i) {
  return i / Tile::kKvStages % 2;
}

// Whether the warpgroups share the rows of the tile that begins there.
template <class Tile>
__device__ __forceinline__ bool is_split(const TileGrid& grid, int position) {
  return Tile::kSplitsLong && position >= grid.split_from;
}

// Named barriers; 0 is __syncthreads. The first two count on from here by warpgroup.
constexpr int kTurn = 1, kOwnThreads = 5, kInspectors = 9, kPartRead = 10, kPartWritten = 11;
constexpr int kInspectorWarps = 3;

struct PrefillMaps {
  CUtensorMap q, k, v;
  CUtensorMap o;     // where O is staged in Q's place
  CUtensorMap bias;  // in calls with a bias only
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_PREFILL_LAYOUT_SM90_CUH_
