// What the blocks of the sm_80 prefill kernels have in common, whether a tile comes whole or in
// pieces: which rows and keys they work on, and what happens between and after the products.
#ifndef FLASHATTN_CUDA_PREFILL_SM80_BLOCK_CUH_
#define FLASHATTN_CUDA_PREFILL_SM80_BLOCK_CUH_

#include <climits>
#include <cstdint>

#include "fast_divisor.cuh"
#include "mask.cuh"
#include "params.h"
#include "prefill_sm80_tile.cuh"
#include "ptx.cuh"
#include "softmax.cuh"
#include "tiles_sm80.h"

namespace flashattn {

// The blocks of so many heads come together, so that the L2 cache holds their K and V.
constexpr int kHeadsOfSection = 8;

struct PrefillArgsSm80 {
  PrefillParams params;
  ScoreScale scale;
  int q_tiles;
  FastDivisor section_tiles, q_heads, group;
  // Of wide head dims:
  int value_groups;  // blocks that share a tile of rows, each with value columns of its own
  bool query_stays;  // in shared memory, else it comes again with each key tile
};

// Tiles of keys, as some rows see them.
struct SeenTiles {
  Range any;  // some row sees some key
  Range all;  // every row sees every key
};

// What a block works on. It lies in shared memory: the main loop has no
// registers to spare.
template <class T>
struct PrefillBlockSm80 {
  Sequence sequence;
  int head;
  int first_row;
  Range keys;  // that any of its rows sees
  const T *k, *v;
  HeadFeatures features;
  TileFinder finder;
  SeenTiles seen_by_warp[8];  // apart from masks and segments
  Range seen_by_block;        // tiles of which all rows see every key
  Range removed;              // from the first to the last tile that remove_not_finite() changed
  int tile[8], next_tile[8];  // a copy for each warp, so that none waits for another to read it

  // Tiles in order of their index: within a section the last query rows of
  // all its heads first, since with a causal mask they take longest. By one lane of each
  // warp: they share the work, which all wait for.
  template <bool Featured>
  __device__ void fill(const PrefillArgsSm80& args, int block_q, int tile_index) {
    const PrefillParams& params = args.params;
    const int section = divide(tile_index, args.section_tiles);
    const unsigned first_head = section * kHeadsOfSection;
    const unsigned all_heads = params.problem.batch * params.problem.q_heads;
    const unsigned heads = min(unsigned{kHeadsOfSection}, all_heads - first_head);
    const unsigned index = tile_index - first_head * args.q_tiles;
    // Most sections are whole, and need no division.
    const unsigned q_tile = heads == kHeadsOfSection ? index / kHeadsOfSection : index / heads;
    const int batch_head = first_head + index - q_tile * heads;
    const int batch = divide(batch_head, args.q_heads);
    const int q_head = batch_head - batch * params.problem.q_heads;
    switch (threadIdx.x / 32) {
      case 0:
        head = q_head;
        first_row = (args.q_tiles - 1 - q_tile) * block_q;
        sequence = Sequence(params, batch);
        removed = {INT_MAX, 0};
        keys = {0, 0};
        if (first_row < sequence.q_len) {
          keys = sequence.keys_seen_by(first_row, min(first_row + block_q, sequence.q_len) - 1);
        }
        finder.start((keys.end + kPrefillBlockKv - 1) / kPrefillBlockKv);
        break;
      case 1:
        k = static_cast<const T*>(params.k.data) +
            params.k.offset(batch, 0, divide(q_head, args.group));
        break;
      case 2:
        v = static_cast<const T*>(params.v.data) +
            params.v.offset(batch, 0, divide(q_head, args.group));
        break;
      case 3:
        if constexpr (Featured) features.fill(params.features, batch, q_head);
        break;
    }
  }

  __device__ void note_removed(int tile) {
    atomicMin(&removed.begin, tile);
    atomicMax(&removed.end, tile + 1);
  }

  // The window is a band of diagonals, so each is one range of tiles.
  __device__ SeenTiles tiles_seen(int first, int last) const {
    SeenTiles seen = {};
    const Range any = sequence.keys_seen_by(first, last);
    if (first <= last && any.begin < any.end) {
      seen.any = {any.begin / kPrefillBlockKv, (any.end + kPrefillBlockKv - 1) / kPrefillBlockKv};
    }
    const Range all = sequence.keys_seen_by_all(first, last);
    const int begin = (all.begin + kPrefillBlockKv - 1) / kPrefillBlockKv;
    seen.all = {begin, max(begin, all.end / kPrefillBlockKv)};
    return seen;
  }

  // By all warps, after fill() and before a barrier.
  template <int BlockQ, int WarpRows>
  __device__ void find_tiles() {
    const int rows_end = min(first_row + BlockQ, sequence.q_len);
    if (threadIdx.x % 32 == 0) {
      const int warp = threadIdx.x / 32, first = first_row + warp * WarpRows;
      seen_by_warp[warp] = tiles_seen(first, min(first + WarpRows, rows_end) - 1);
    }
    if (threadIdx.x == 0) seen_by_block = tiles_seen(first_row, rows_end - 1).all;
  }

  // By all warps, after fill().
  template <int BlockQ, int WarpRows>
  __device__ void find_segments() {
    if (features.query_segments == nullptr || first_row >= sequence.q_len) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, last_row = sequence.q_len - 1;
    const Extent of_block =
        segment_extent<BlockQ>(features.query_segments, first_row, last_row, lane);
    const int warp_first = first_row + warp * WarpRows;
    const Extent of_warp = segment_extent<32>(features.query_segments, min(warp_first, last_row),
                                              min(warp_first + WarpRows - 1, last_row), lane);
    if (lane == 0) finder.warp_segments[warp] = of_warp;
    if (threadIdx.x == 0) finder.block_segments = of_block;
    __syncthreads();
  }
};

// The rows of a warp, up to the last of the sequence; none if that lies before
// the first.
struct WarpRows {
  int first, last;

  __device__ bool any() const { return first <= last; }
};

template <class Kernel>
__device__ __forceinline__ WarpRows rows_of_warp(const PrefillBlockSm80<typename Kernel::T>& block,
                                                 int thread) {
  const int first = block.first_row + thread / 32 * Kernel::kWarpRows;
  return {first, min(first + Kernel::kWarpRows, block.sequence.q_len) - 1};
}

// Whether some row of the block does not see some key of the tile, as far as can be told without a
// look at masks and segments.
template <bool Featured, class T>
__device__ __forceinline__ bool may_hide_keys(const PrefillBlockSm80<T>& block, int tile) {
  if (Featured && (block.features.mask || block.features.key_segments)) return true;
  return !block.seen_by_block.has(tile);
}

// Adds what remove_not_finite() took out to just the rows that see it. Rare, so from memory. A tile
// in between from which nothing was taken adds once more what its product brought already.
// `first_column` is that of the values which belong to o.
template <class Kernel, bool Featured>
__device__ __forceinline__ void add_not_finite(typename Kernel::Output& o,
                                               const PrefillBlockSm80<typename Kernel::T>& block,
                                               const PrefillParams& params, int first_column = 0) {
  constexpr int kRows = 2 * Kernel::kRowBlocks, kBlockKv = Kernel::kBlockKv;
  const int lane = threadIdx.x % 32;
  const WarpRows rows = rows_of_warp<Kernel>(block, threadIdx.x);
  if (!rows.any()) return;
#pragma unroll 1
  for (int tile = block.removed.begin; tile < block.removed.end; ++tile) {
    const FragmentPlace place(rows.first, rows.last, tile * kBlockKv, lane);
    ScoreBits<Kernel::kRowBlocks> bits;
    bits.see_all();
    if constexpr (Featured) {
      look_at_tile(bits, params, block.features, block.finder.warp_segments[threadIdx.x / 32],
                   place);
    }
#pragma unroll 1
    for (int i = 0; i < kBlockKv; ++i) {
      const int key = place.first_key + i;
      bool sees[kRows], any_sees = false;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sees[r] = bits.sees(r, i) & block.sequence.sees(place.row(r), key);
        any_sees |= sees[r];
      }
      if (!__any_sync(~0u, any_sees)) continue;
      const auto* v = block.v + key * params.v.seq + first_column + 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < Kernel::kDimBlocks; ++n) {
        if (first_column + 8 * n >= params.problem.value_dim) break;
        const float2 pair =
            unpack<typename Kernel::T>(__ldg(reinterpret_cast<const uint32_t*>(v + 8 * n)));
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float* at = &o[r / 2][n][r % 2 * 2];
          if (sees[r] && !isfinite(pair.x)) at[0] += pair.x;
          if (sees[r] && !isfinite(pair.y)) at[1] += pair.y;
        }
      }
    }
  }
}

// Raw products to the scores that the softmax takes; hidden ones become -inf.
template <class Kernel, bool Featured>
__device__ __forceinline__ void finish_scores(typename Kernel::Scores& s,
                                              const PrefillBlockSm80<typename Kernel::T>& block,
                                              const PrefillArgsSm80& args,
                                              const ScoreBits<Kernel::kRowBlocks>& bits, int tile) {
  const auto place = [&] {
    const int thread = opaque_thread();
    const WarpRows rows = rows_of_warp<Kernel>(block, thread);
    int first_key = tile * Kernel::kBlockKv;
    opaque(first_key);  // else sums with it are kept in registers
    return FragmentPlace(rows.first, rows.last, first_key, thread % 32);
  };
  if constexpr (Featured) {
    shape_scores(s, args.params, args.scale, block.features, block.sequence.shift, place());
    bits.apply(s);
  }
  if (!block.seen_by_warp[opaque_thread() / 32].all.has(tile)) {
    mask_window(s, block.sequence, place());
  }
}

// Ends the softmax of a lane's rows, and writes their lse.
template <class Kernel>
__device__ __forceinline__ void finish_rows(
    RowResult (&results)[2 * Kernel::kRowBlocks],
    const OnlineSoftmax<typename Kernel::T, Kernel::kRowBlocks>& softmax,
    const PrefillBlockSm80<typename Kernel::T>& block, const PrefillParams& params) {
  const int lane = threadIdx.x % 32;
  const int first_row = block.first_row + threadIdx.x / 32 * Kernel::kWarpRows;
  const int batch = block.sequence.batch;
  const Table<const float>& sinks = params.features.sinks;
  const float sink = sinks ? sinks.row(batch)[block.head] * kLog2e : -INFINITY;
  float* lse = static_cast<float*>(params.lse.data);
#pragma unroll
  for (int r = 0; r < 2 * Kernel::kRowBlocks; ++r) {
    const int row = first_row + 8 * r + lane / 4;
    results[r] = softmax.finish(r, sink);
    if (row >= block.sequence.q_len) results[r] = {0.0f, -INFINITY};
    if (lse != nullptr && lane % 4 == 0 && row < params.problem.q_len) {
      lse[params.lse.offset(batch, row, block.head)] = results[r].lse;
    }
  }
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_PREFILL_SM80_BLOCK_CUH_
