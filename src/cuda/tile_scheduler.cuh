// Which tile a persistent block works on next, and what a tile is.
//
// Within a section of `heads_per_section` heads (so that their K and V stay in L2) query blocks go
// longest first, heads fastest. Tiles of unequal length are handed out by a counter in global
// memory. Where they are few, the longest are split: docs/kernels/prefill_sm90.md, "Few tiles".
#ifndef FLASHATTN_CUDA_TILE_SCHEDULER_CUH_
#define FLASHATTN_CUDA_TILE_SCHEDULER_CUH_

#include <cstdint>

#include "fast_divisor.cuh"
#include "mask_bits.h"
#include "params.h"

namespace flashattn {

// The tiles of a launch; filled on the host. All that says what a tile is lies here together: the
// first look at each line of the kernel's parameters is a miss.
struct TileGrid {
  int tiles, q_blocks;
  FastDivisor section_tiles;  // of a section
  // Heads of all sections but the last, and of that one. As everywhere here, query heads of all
  // batches, or groups of them when a group is packed into rows.
  FastDivisor section_heads, last_section_heads;
  int last_section;
  FastDivisor heads, heads_per_kv_head;         // of one batch
  FastDivisor q_batches, k_batches, v_batches;  // an operand with fewer than the call is read again
  int block_positions;                          // query positions of a tile
  int q_len, kv_len;                            // where the sequences are of equal length
  bool ragged, bottom_right;
  bool inspect;             // V may hold keys that not every row of a tile sees
  int packed_heads;         // query heads that share a tile, 1 or a whole group
  int warpgroup_positions;  // query positions of a warpgroup's rows
  uint64_t* counter;        // null: tile + gridDim.x follows tile
  uint64_t counter_tag;     // 40 bits, this launch's own
  FastDivisor by_packed_heads;
  FastDivisor bias_batches;
  PackedMask mask;  // without words if the call has none
  int split_from;   // tiles from this position on are split: they have half the positions
};

// The block counter lies in memory that nobody initialised. A word counts for this launch once its
// upper 40 bits are the launch's tag; whoever finds another tag installs its own with a count of 0.
// Every block fetches until it is told "no more": as many fetches as there are tiles, since the
// first gridDim.x tiles are not fetched. So the block that gets the last number knows that no other
// will come, and clears the word: a CUDA graph may replay the launch, tag and all.
constexpr int kCounterBits = 24;

__device__ inline void claim_counter(const TileGrid& grid) {
  auto* word = reinterpret_cast<unsigned long long*>(grid.counter);
  const unsigned long long fresh = grid.counter_tag << kCounterBits;
  unsigned long long seen = *reinterpret_cast<volatile unsigned long long*>(word);
  while (seen >> kCounterBits != grid.counter_tag) {
    const unsigned long long previous = atomicCAS(word, seen, fresh);
    if (previous == seen) return;
    seen = previous;
  }
}

// After claim_counter by a thread of this block. The answer is under way for as long as a third of
// a step: ask early.
__device__ inline unsigned long long ask_for_tile(const TileGrid& grid) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(grid.counter), 1ull);
}
// The tile that the answer means.
__device__ inline int answered_tile(const TileGrid& grid, unsigned long long answer) {
  const int count = static_cast<int>(answer & ((1u << kCounterBits) - 1));
  if (count == grid.tiles - 1)
    atomicExch(reinterpret_cast<unsigned long long*>(grid.counter), 0ull);
  return static_cast<int>(gridDim.x) + count;
}

// What the others need to know of a tile, in parts that one load fetches each. The kernels that
// serve any mask learn of blocks one by one (BlockFinder): there `blocks` says where the walk
// begins, and `unmasked_blocks` and `first_inspected` nothing.
struct alignas(16) TileWalk {
  int position;         // first query position; negative: no more tiles
  int blocks;           // key blocks [0, blocks), taken from last to first; 0: no row sees a key
  int unmasked_blocks;  // every row sees all of blocks [0, unmasked_blocks), and met a key before
  int kv_len;           // of the sequence
};
struct alignas(16) TilePlace {
  int batch, head;  // of the call; head counts groups when heads are packed
  int q_len;        // of the sequence
  int shift;        // row i sees keys up to i + shift (causal)
};
struct TileWork : TileWalk, TilePlace {
  int first_inspected;  // blocks [first_inspected, blocks) of V go through the inspector
  int kv_head, q_batch, k_batch, v_batch;  // where the operands lie
};

// The tile that would begin at `position` if none before it were split: moves `position` to where
// it does, and returns how many positions it has.
__host__ __device__ __forceinline__ int place_split_tile(const TileGrid& grid, int& position) {
  if (position < grid.split_from) return grid.block_positions;
  position = (position + grid.split_from) / 2;
  return grid.block_positions / 2;
}

// All of a tile but its blocks. `last_first`: the longest tiles of a head are its last.
__device__ __forceinline__ TileWork place_tile(const PrefillParams& params, const TileGrid& grid,
                                               int tile, bool last_first) {
  const int section = divide(tile, grid.section_tiles);
  const int in_section = tile - section * static_cast<int>(grid.section_tiles.divisor);
  const FastDivisor& section_heads =
      section == grid.last_section ? grid.last_section_heads : grid.section_heads;
  const int rank = divide(in_section, section_heads);
  const int batch_head = section * static_cast<int>(grid.section_heads.divisor) + in_section -
                         rank * static_cast<int>(section_heads.divisor);

  TileWork work;
  work.batch = divide(batch_head, grid.heads);
  work.head = batch_head - work.batch * static_cast<int>(grid.heads.divisor);
  work.kv_head = divide(work.head, grid.heads_per_kv_head);
  work.q_batch = remainder(work.batch, grid.q_batches);
  work.k_batch = remainder(work.batch, grid.k_batches);
  work.v_batch = remainder(work.batch, grid.v_batches);
  work.position = (last_first ? grid.q_blocks - 1 - rank : rank) * grid.block_positions;
  work.q_len = grid.q_len;
  work.kv_len = grid.kv_len;
  if (grid.ragged) {
    work.q_len = params.q_length(work.batch);
    work.kv_len = params.kv_length(work.batch);
  }
  work.shift = grid.bottom_right ? work.kv_len - work.q_len : 0;
  return work;
}

template <bool Causal, bool SplitsLong>
__device__ __forceinline__ TileWork decode_tile(const PrefillParams& params, const TileGrid& grid,
                                                int tile, int block_kv) {
  TileWork work = place_tile(params, grid, tile, Causal);
  const int positions = SplitsLong ? place_split_tile(grid, work.position) : grid.block_positions;
  const int end = min(work.position + positions, work.q_len);
  const int key_end = Causal ? min(work.kv_len, end + work.shift) : work.kv_len;
  work.blocks = work.position < end && key_end > 0 ? (key_end + block_kv - 1) / block_kv : 0;
  // With `position + shift`, and not one more, the tile's first row sees a key beyond these blocks.
  // So each row meets a key in a masked block, or in the first one, before it comes to an unmasked
  // one.
  const int unmasked_end = Causal ? min(work.kv_len, work.position + work.shift) : work.kv_len;
  work.unmasked_blocks = max(unmasked_end, 0) / block_kv;
  work.first_inspected = grid.inspect ? work.unmasked_blocks : work.blocks;
  return work;
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_TILE_SCHEDULER_CUH_
