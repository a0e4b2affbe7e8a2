// Which tile a persistent block works on next, and what a tile is.
//
// Within a section of `heads_per_section` heads (so that their K and V stay in L2) query blocks go
// longest first, heads fastest. Tiles of unequal length are handed out by a counter in global
// memory.
#ifndef FLASHATTN_CUDA_TILE_SCHEDULER_CUH_
#define FLASHATTN_CUDA_TILE_SCHEDULER_CUH_

#include <cstdint>

#include "params.h"

namespace flashattn {

// The tiles of a launch; filled on the host.
struct TileGrid {
  int tiles, q_blocks;
  uint32_t heads;  // query heads, or groups of them when a group is packed into rows
  uint32_t heads_per_kv_head;
  uint32_t heads_per_section;
  int packed_heads;         // query heads that share a tile, 1 or a whole group
  bool inspect;             // V may hold keys that not every row of a tile sees
  int warpgroup_positions;  // query positions of a warpgroup's rows
  int block_positions;      // and of a tile
  uint64_t* counter;        // null: tile + gridDim.x follows tile
  uint64_t counter_tag;     // 40 bits, this launch's own
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

// After claim_counter by a thread of this block.
__device__ inline int fetch_tile(const TileGrid& grid) {
  auto* word = reinterpret_cast<unsigned long long*>(grid.counter);
  const int count = static_cast<int>(atomicAdd(word, 1ull) & ((1u << kCounterBits) - 1));
  if (count == grid.tiles - 1) atomicExch(word, 0ull);
  return static_cast<int>(gridDim.x) + count;
}

// What the consumers need to know of a tile. The kernels that serve any mask learn of blocks one by
// one (BlockFinder): there `blocks` says where the walk begins, and the two counts after it
// nothing.
struct TileWork {
  int position;         // first query position; negative: no more tiles
  int blocks;           // key blocks [0, blocks), taken from last to first; 0: no row sees a key
  int unmasked_blocks;  // every row sees all of blocks [0, unmasked_blocks), and met a key before
  int first_inspected;  // blocks [first_inspected, blocks) of V go through the inspector
  int batch, head;      // of the call; head counts groups when heads are packed
  int kv_head, q_batch, k_batch, v_batch;  // where the operands lie
  int q_len, kv_len;                       // of the sequence
  int shift;                               // row i sees keys up to i + shift (causal)
};

// An operand with fewer batches than the call is read again. The branch saves a division.
__device__ __forceinline__ int operand_batch(const Strided& x, uint32_t batch) {
  const uint32_t batches = x.batches;
  return batch < batches ? batch : batch % batches;
}

// All of a tile but its blocks. `last_first`: the longest tiles of a head are its last.
__device__ __forceinline__ TileWork place_tile(const PrefillParams& params, const TileGrid& grid,
                                               uint32_t tile, bool last_first) {
  const uint32_t per_section = grid.q_blocks * grid.heads_per_section;
  const uint32_t section = tile / per_section, in_section = tile % per_section;
  const uint32_t first_head = section * grid.heads_per_section;
  const uint32_t section_heads =
      min(grid.heads_per_section, params.problem.batch * grid.heads - first_head);
  const int rank = in_section / section_heads;
  const uint32_t batch_head = first_head + in_section % section_heads;

  TileWork work;
  work.batch = batch_head / grid.heads;
  work.head = batch_head % grid.heads;
  work.kv_head = batch_head % grid.heads / grid.heads_per_kv_head;
  work.q_batch = operand_batch(params.q, work.batch);
  work.k_batch = operand_batch(params.k, work.batch);
  work.v_batch = operand_batch(params.v, work.batch);
  work.position = (last_first ? grid.q_blocks - 1 - rank : rank) * grid.block_positions;
  work.q_len = params.q_length(work.batch);
  work.kv_len = params.kv_length(work.batch);
  work.shift = params.scores.bottom_right ? work.kv_len - work.q_len : 0;
  return work;
}

template <bool Causal>
__device__ __forceinline__ TileWork decode_tile(const PrefillParams& params, const TileGrid& grid,
                                                uint32_t tile, int block_kv) {
  TileWork work = place_tile(params, grid, tile, Causal);
  const int end = min(work.position + grid.block_positions, work.q_len);
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
