// Tiles of the generic (sm_80 and later) prefill kernel, by compiled head dim. Host code reads them
// too.
#ifndef FLASHATTN_CUDA_TILES_SM80_H_
#define FLASHATTN_CUDA_TILES_SM80_H_

namespace flashattn {

struct PrefillTileSm80 {
  int block_q;          // query rows of a block
  int warps;            // each owns block_q / warps rows, 16 or 32
  bool q_in_registers;  // else Q is read from shared memory again for every key tile
  int blocks_per_sm;    // what the register limit is set for
  int buffers;          // that K and V tiles share: 3, or 4 for two pairs
};

// Keys of a tile. With 64 the scores of 32 rows take 64 registers a thread, which leaves room for
// the output of head dim 128, and a tile's mask is one 64-bit word a row.
constexpr int kPrefillBlockKv = 64;

// Head dims above this run in pieces: the columns of Q, K and V pass through shared memory
// kWidePieceColumns at a time, and a block writes kWideValueColumns columns of the output at most,
// which of 16 rows take half of a thread's registers. Blocks of the same rows and other columns
// make the same scores again.
constexpr int kWholeHeadDim = 256;
constexpr int kWidePieceColumns = 64;
constexpr int kWideValueColumns = 256;

constexpr bool is_wide(int head_dim) { return head_dim > kWholeHeadDim; }
constexpr int pieces_of(int columns) {
  return (columns + kWidePieceColumns - 1) / kWidePieceColumns;
}
constexpr int value_groups_of(int value_dim) {
  return (value_dim + kWideValueColumns - 1) / kWideValueColumns;
}

// mma.sync re-reads K and V from shared memory for every 16 or 32 rows. On A100 and H100 that
// bandwidth is exhausted at 16 rows a warp, so 32 wherever the output fits in registers. Each SM
// scheduler needs two warps or more: one's products hide another's softmax.
constexpr PrefillTileSm80 prefill_tile_sm80(int head_dim) {
  switch (head_dim) {
    case 64:
      return {128, 4, false, 3, 4};  // O 64 + S 64 of 168 registers
    case 96:
      return {128, 4, false, 2, 3};  // O 96 + S 64; Q would take 48 more
    case 128:
      return {128, 4, false, 2, 3};  // O 128 + S 64: no room for Q's 64
    case 192:
      return {128, 8, true, 1, 3};  // 16 rows: O 96 + S 32 + Q 48
    case 256:
      return {128, 8, true, 1, 3};  // 16 rows: O 128 + S 32 + Q 64
    default:
      return {128, 8, false, 1, 3};  // in pieces, 16 rows: 256 columns of O 128 + S 32
  }
}

// Q has a place of its own only if it is read again; else it passes through two of the buffers. At
// most 96 KB, which GeForce GPUs (99 KB a block) have too.
constexpr int prefill_shared_memory_sm80(int head_dim) {
  const PrefillTileSm80 tile = prefill_tile_sm80(head_dim);
  const int rows = tile.buffers * kPrefillBlockKv + (tile.q_in_registers ? 0 : tile.block_q);
  return rows * head_dim * 2;
}

// In pieces: three buffers again, for pieces of K and V, and Q whole or as three pieces that come
// with K's. The second way takes 72 KB, which every GPU has, but fetches Q again for every key
// tile; the first is taken where it fits.
constexpr int prefill_wide_shared_memory_sm80(int head_dim, bool query_stays) {
  const int query_pieces = query_stays ? pieces_of(head_dim) : 3;
  const int rows = 3 * kPrefillBlockKv + query_pieces * prefill_tile_sm80(head_dim).block_q;
  return rows * kWidePieceColumns * 2;
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_TILES_SM80_H_
