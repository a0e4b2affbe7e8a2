// A call's boolean mask as the Hopper forward reads it: a bit a key, in the order of the
// accumulators' columns, and for each block of keys whether a tile sees any or all of it. A kernel
// ahead of the forward packs it (mask_bits_sm90.cuh), once for all heads that share it: 64 rows by
// 128 keys would take every warpgroup as many bytes and ten times the instructions.
#ifndef FLASHATTN_CUDA_MASK_BITS_H_
#define FLASHATTN_CUDA_MASK_BITS_H_

#include <cstdint>

#include "mask_planes.h"
#include "params.h"
#include "tiles_sm90.h"

namespace flashattn {

// words: (plane, block of keys, row, lane of a quad); bit 2 j + e is for key 8 j + 2 lane + e of
// the block. Rows fill whole tiles; those beyond the last repeat it, as do keys.
//
// seen: (plane, tile of rows, block of keys).
struct PackedMask : MaskPlanes {
  int blocks = 1, tiles = 1, rows = 1;

  PackedMask() = default;
  constexpr PackedMask(const TileSm90& tile, const Problem& problem, const Broadcast& mask)
      : MaskPlanes(problem, mask),
        blocks(mask.col == 0 ? 1 : (problem.kv_len - 1) / tile.block_kv + 1),
        tiles(mask.row == 0 ? 1 : (problem.q_len - 1) / tile.block_q() + 1),
        rows(mask.row == 0 ? 1 : tiles * tile.block_q()) {}

  constexpr int64_t words_bytes() const { return planes() * blocks * rows * 16; }
  constexpr int64_t bytes() const { return words_bytes() + planes() * tiles * blocks; }

  // The row of `words` of a tile's first row and first block.
  constexpr int64_t first_row(int64_t plane, int position) const {
    return plane * blocks * rows + (rows == 1 ? 0 : position);
  }
};

// Bytes of workspace of a prefill: the tile counter, and the packed mask if there is a mask.
constexpr int64_t kTileCounterBytes = 16;
constexpr int64_t prefill_workspace(const Problem& problem, const Broadcast* mask) {
  int64_t largest = 0;
  for (const TileSm90& tile : kPrefillTilesSm90) {
    if (mask == nullptr || !tile.finds_blocks()) continue;
    if (tile.head_dim != compiled_head_dim_sm90(problem.widest_dim())) continue;
    const int64_t bytes = PackedMask(tile, problem, *mask).bytes();
    if (bytes > largest) largest = bytes;
  }
  return kTileCounterBytes + largest;
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_MASK_BITS_H_
