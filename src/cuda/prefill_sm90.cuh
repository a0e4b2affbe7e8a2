// Attention forward on Hopper: TMA, mbarrier rings, warp specialisation, wgmma.
//
// Persistent blocks. Warpgroup 0 gives its registers away; one of its threads loads. Each consumer
// warpgroup owns 64 query rows and walks the key blocks from last to first: it issues S = Q K(n)^T
// and O += P V(n+1) back to back, then does the softmax of block n while the second product still
// runs. docs/kernels/prefill_sm90.md tells the whole story.
#ifndef FLASHATTN_CUDA_PREFILL_SM90_CUH_
#define FLASHATTN_CUDA_PREFILL_SM90_CUH_

#include <algorithm>
#include <atomic>
#include <cfloat>

#include "device.h"
#include "mask_bits_sm90.cuh"
#include "params.h"
#include "prefill_consumer_sm90.cuh"
#include "prefill_inspector_sm90.cuh"
#include "prefill_producer_sm90.cuh"

namespace flashattn {

// Arrivals that give Q back: with direct O of each warp, for it may read its rows until then, else
// of whole warpgroups. Those who inspect wait for the first warpgroup's Q.
template <class Tile>
__device__ __forceinline__ int q_releases(int warpgroup, bool inspector) {
  if constexpr (Tile::kDirectO)
    return 4 + (inspector && warpgroup == 0 ? kInspectorWarps : 0);
  else
    return Tile::kWarpgroups + inspector;
}

template <class Tile>
__device__ __forceinline__ void init_prefill_barriers(PrefillShared<Tile>& shared, bool inspector) {
  PrefillBarriers<Tile>& barriers = shared.barriers;
  constexpr int kWarps = 4 * Tile::kWarpgroups;
  for (int stage = 0; stage < Tile::kQStages; ++stage) {
    for (uint64_t& full : barriers.q_full[stage]) mbarrier_init(shared_address(&full), 1);
    for (int w = 0; w < Tile::kQReleases; ++w)
      mbarrier_init(shared_address(&barriers.q_empty[stage][w]), q_releases<Tile>(w, inspector));
  }
  for (int stage = 0; stage < Tile::kKvStages; ++stage) {
    mbarrier_init(shared_address(&barriers.k_full[stage]), 1);
    mbarrier_init(shared_address(&barriers.k_empty[stage]), kWarps);
    mbarrier_init(shared_address(&barriers.v_full[stage]), 1);
    mbarrier_init(shared_address(&barriers.v_empty[stage]), Tile::kWarpgroups);
    mbarrier_init(shared_address(&barriers.v_raw[stage]), 1);
  }
  if constexpr (Tile::kShaped) {
    for (uint64_t& full : shared.bias_full) mbarrier_init(shared_address(&full), 1);
    for (uint64_t& empty : shared.bias_empty) mbarrier_init(shared_address(&empty), 4);
  }
  mbarrier_init(shared_address(&barriers.counter_claimed), 1);
  mbarrier_init_fence();
}

// Rows of Q that no load fills must not depend on what a block did before: their scores take part
// in a warp's decisions. They start as zeros, and whoever stages O there leaves zeros.
template <class Tile>
__device__ __forceinline__ void clear_left_over_rows(const TileGrid& grid, PrefillSmem<Tile> smem) {
  const int filled = grid.warpgroup_positions * grid.packed_heads;
  if (filled == kWarpgroupRows) return;
#pragma unroll 1
  for (int i = 0; i < Tile::kQStages * Tile::kWarpgroups * Tile::kChunks; ++i)
#pragma unroll 1
    for (int byte = filled * 128 + threadIdx.x * 16; byte < Tile::kQChunkBytes;
         byte += Tile::kTile.threads() * 16)
      store_shared_16(smem.base + i * Tile::kQChunkBytes + byte, uint4{});
  fence_async_proxy();
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kTile.threads(), 1)
    prefill_sm90_kernel(const __grid_constant__ PrefillMaps maps,
                        const __grid_constant__ PrefillParams params,
                        const __grid_constant__ TileGrid grid,
                        const __grid_constant__ PrefillScale<Tile> scale) {
  extern __shared__ __align__(1024) char tiles[];
  __shared__ PrefillShared<Tile> shared;
  const PrefillSmem<Tile> smem{(shared_address(tiles) + 1023) & ~1023u};
  PrefillProducer<Tile> producer(maps, params, grid, smem, shared);
  // Side by side: nothing of this is worth waiting for.
  if (threadIdx.x == 0) producer.prepare();
  if (threadIdx.x == 32) init_prefill_barriers<Tile>(shared, grid.inspect);
  clear_left_over_rows(grid, smem);
  __syncthreads();

  const int warpgroup = __shfl_sync(kWholeWarp, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    registers_release<Tile::kTile.producer_registers()>();
    if (threadIdx.x < PrefillProducer<Tile>::kThreads) producer.run();
    if (threadIdx.x == 32 && grid.counter != nullptr) {
      claim_counter(grid);
      mbarrier_arrive(shared_address(&shared.barriers.counter_claimed));
    }
    __syncwarp();
    if (threadIdx.x >= 32 && grid.inspect) PrefillInspector<T, Tile>(smem, shared).run();
  } else {
    registers_claim<Tile::kTile.consumer_registers()>();
    PrefillConsumer<T, Tile>(maps, params, grid, scale, smem, shared, warpgroup - 1).run();
  }
}

// ---- which tiles are split. With a tile or two a block the launch takes as long as the longest
// tile, or pair of them.

// The tile's time in steps of the main loop. What it takes beside them was measured at head dim 64.
inline float steps_of_tile(const TileSm90& tile, const TileGrid& grid, int index) {
  constexpr float kSetUp = 1.4f, kHandingOver = 0.25f;
  int position = index * grid.block_positions;
  const bool split = position >= grid.split_from;
  const int end = std::min(place_split_tile(grid, position) + position, grid.q_len);
  const int shift = grid.bottom_right ? grid.kv_len - grid.q_len : 0;
  const int keys = std::clamp(end + shift, 0, grid.kv_len);
  const int keys_a_step = split ? 2 * tile.block_kv : tile.block_kv;
  const int steps = (keys + keys_a_step - 1) / keys_a_step;
  return static_cast<float>(steps) + kSetUp + (split ? kHandingOver : 0.f);
}
// Tiles go last to first, heads fastest; a block's second tile is the producer's tile_after.
inline float steps_of_launch(const TileSm90& tile, const TileGrid& grid, int heads, int blocks) {
  const auto steps = [&](int number) {
    return steps_of_tile(tile, grid, grid.q_blocks - 1 - number / heads);
  };
  float most = 0.f;
  for (int rank = 0; rank < grid.q_blocks; ++rank) {
    const int first = rank * heads, last = first + heads - 1;
    most = std::max(most, steps(first));
    if (last < blocks) continue;
    for (int second : {std::max(first, blocks), last})
      most = std::max(most, steps(second) + steps(2 * blocks - 1 - second));
  }
  return most;
}
inline void choose_split_tiles(const TileSm90& tile, int heads, int blocks, TileGrid* grid) {
  grid->split_from = kUnlimited;
  const int most_tiles = 2 * blocks;
  if (!tile.splits_long || grid->q_blocks * heads > most_tiles) return;
  TileGrid best = *grid, tried = *grid;
  float least = steps_of_launch(tile, best, heads, blocks);
  for (int whole = grid->q_blocks - 1; whole >= 0; --whole) {
    tried.split_from = whole * grid->block_positions;
    tried.q_blocks = whole + (2 * (grid->q_len - tried.split_from) - 1) / grid->block_positions + 1;
    if (tried.q_blocks * heads > most_tiles) break;
    const float steps = steps_of_launch(tile, tried, heads, blocks);
    if (steps >= least) continue;
    least = steps;
    best = tried;
  }
  *grid = best;
}

// ---- the launch
inline TileGrid prefill_grid(const TileSm90& tile, const PrefillParams& params, int blocks) {
  const Problem& problem = params.problem;
  const bool ragged = params.query_lengths || params.key_lengths;
  // Equal tiles need no counter and no order; K and V of 16 heads fit L2 while causal tiles shrink.
  const bool equal_tiles = tile.kind == ScoreKind::kFull && !ragged;
  TileGrid grid = {};
  grid.packed_heads = packed_heads_sm90(tile, params);
  grid.by_packed_heads = FastDivisor(grid.packed_heads);
  grid.warpgroup_positions = kWarpgroupRows / grid.packed_heads;
  grid.block_positions = tile.warpgroups * grid.warpgroup_positions;
  grid.q_blocks = (problem.q_len - 1) / grid.block_positions + 1;
  const int heads = problem.q_heads / grid.packed_heads, all_heads = problem.batch * heads;
  grid.q_len = problem.q_len;
  grid.kv_len = problem.kv_len;
  grid.ragged = ragged;
  grid.bottom_right = params.scores.bottom_right;
  choose_split_tiles(tile, all_heads, blocks, &grid);
  const int section_heads = equal_tiles        ? 1
                            : tile.splits_long ? all_heads
                                               : std::min(16, all_heads);
  grid.tiles = grid.q_blocks * all_heads;
  grid.last_section = (all_heads - 1) / section_heads;
  grid.section_tiles = FastDivisor(grid.q_blocks * section_heads);
  grid.section_heads = FastDivisor(section_heads);
  grid.last_section_heads = FastDivisor(all_heads - grid.last_section * section_heads);
  grid.heads = FastDivisor(heads);
  grid.heads_per_kv_head = FastDivisor(problem.group() / grid.packed_heads);
  grid.q_batches = FastDivisor(params.q.batches);
  grid.k_batches = FastDivisor(params.k.batches);
  grid.v_batches = FastDivisor(params.v.batches);
  grid.bias_batches = FastDivisor(params.features.bias.batches);
  grid.inspect = tile.kind != ScoreKind::kFull || params.key_lengths;
  const int uncounted = (tile.splits_long ? 2 : 1) * blocks;
  if (!equal_tiles && grid.tiles > uncounted && grid.tiles < 1 << kCounterBits) {
    // Tags look like NaN to whoever used the workspace before; 2^24 launches pass until one
    // returns.
    static std::atomic<uint64_t> launches{0};
    constexpr uint64_t kTagBase = 0xfff7000000;
    grid.counter = static_cast<uint64_t*>(params.workspace);
    grid.counter_tag = kTagBase | (launches.fetch_add(1, std::memory_order_relaxed) & 0xffffff);
  }
  return grid;
}

inline TensorMapShape prefill_map_shape(const Strided& x, int dim, const Problem& problem,
                                        int64_t rows, int heads, int box_rows) {
  return {x.data,  problem.dtype == DType::kBF16,
          dim,     rows,
          heads,   x.batches,
          x.seq,   x.head,
          x.batch, box_rows,
          1};
}

// Keys are its columns; what it does not vary along is an axis of one entry.
inline TensorMapShape bias_map_shape(const Broadcast& bias, const Problem& problem) {
  return {bias.data,
          bias.dtype == DType::kBF16,
          problem.kv_len,
          bias.row == 0 ? 1 : problem.q_len,
          bias.head == 0 ? 1 : problem.q_heads,
          bias.batches,
          bias.row,
          bias.head,
          bias.batch,
          bias.row == 0 ? 1 : kWarpgroupRows,
          1};
}

inline Status encode_prefill_maps(PrefillMaps* maps, const PrefillParams& params,
                                  const TileGrid& grid, const TileSm90& tile) {
  const Problem& problem = params.problem;
  const auto rows = [&](const Strided& x, int dim) {
    return prefill_map_shape(x, dim, problem, problem.q_len, problem.q_heads,
                             grid.warpgroup_positions);
  };
  const auto keys = [&](const Strided& x, int dim) {
    return prefill_map_shape(x, dim, problem, problem.kv_len, problem.kv_heads, tile.block_kv);
  };
  if (Status q =
          encode_tensor_map_packed(&maps->q, rows(params.q, problem.head_dim), grid.packed_heads);
      !q.ok())
    return q;
  if (Status k = encode_tensor_map_4d(&maps->k, keys(params.k, problem.head_dim)); !k.ok())
    return k;
  if (Status v = encode_tensor_map_4d(&maps->v, keys(params.v, problem.value_dim)); !v.ok())
    return v;
  if (const Broadcast& bias = params.features.bias; bias.data != nullptr) {
    const TensorMapShape shape = bias_map_shape(bias, problem);
    if (Status status = encode_tensor_map_4d(&maps->bias, shape); !status.ok()) return status;
  }
  if (tile.direct_o) return {};
  return encode_tensor_map_packed(&maps->o, rows(params.o, problem.value_dim), grid.packed_heads);
}

template <class Tile>
PrefillScale<Tile> prefill_scale(const PrefillParams& params) {
  if constexpr (Tile::kShaped)
    return make_shape_scale(params);
  else  // A scale of 0 would turn the -inf of masked scores into NaN; FLT_MIN gives the same
        // softmax.
    return std::max(static_cast<float>(params.scores.scale) * kLog2e, FLT_MIN);
}

// In the workspace, behind the tile counter.
inline Status pack_mask(const TileSm90& tile, const PrefillParams& params, PackedMask* packed,
                        const Device& device, cudaStream_t stream) {
  if (params.features.mask.data == nullptr) return {};
  *packed = PackedMask(tile, params.problem, params.features.mask);
  if (params.workspace_size < kTileCounterBytes + packed->bytes())
    return {"prefill_sm90: the workspace is too small for the mask"};
  char* const memory = static_cast<char*>(params.workspace) + kTileCounterBytes;
  packed->words = reinterpret_cast<uint32_t*>(memory);
  packed->seen = reinterpret_cast<uint8_t*>(memory + packed->words_bytes());
  return launch_pack_mask(tile, params, *packed, device, stream);
}

template <class T, int TileIndex>
Status launch_prefill_tile_sm90(const PrefillParams& params, const Device& device,
                                cudaStream_t stream) {
  using Tile = PrefillTile<TileIndex>;
  if (params.workspace_size < kTileCounterBytes)
    return {"prefill_sm90: the workspace is smaller than the tile counter"};
  TileGrid grid = prefill_grid(Tile::kTile, params, device.sm_count);
  PrefillMaps maps = {};
  if (Status status = encode_prefill_maps(&maps, params, grid, Tile::kTile); !status.ok())
    return {"prefill_sm90: " + status.message};
  if constexpr (Tile::kAnyMask) {
    if (Status s = pack_mask(Tile::kTile, params, &grid.mask, device, stream); !s.ok()) return s;
  }
  PrefillScale<Tile> scale = prefill_scale<Tile>(params);
  PrefillParams kernel_params = params;
  void* args[] = {&maps, &kernel_params, &grid, &scale};
  const Launch what = {"prefill_sm90",
                       reinterpret_cast<const void*>(&prefill_sm90_kernel<T, Tile>),
                       dim3(std::min(grid.tiles, device.sm_count)),
                       Tile::kTile.threads(),
                       Tile::kTile.shared_memory(params.features.bias.data != nullptr),
                       1,
                       grid.mask.words != nullptr};
  return launch(what, args, device, stream);
}

template <class T, int HeadDim, int TileIndex = 0>
Status launch_prefill_chosen_sm90(int chosen, const PrefillParams& params, const Device& device,
                                  cudaStream_t stream) {
  if constexpr (TileIndex == kNumPrefillTilesSm90) {
    return {"prefill_sm90: no tile for this call"};
  } else {
    if constexpr (kPrefillTilesSm90[TileIndex].head_dim == HeadDim)
      if (chosen == TileIndex)
        return launch_prefill_tile_sm90<T, TileIndex>(params, device, stream);
    return launch_prefill_chosen_sm90<T, HeadDim, TileIndex + 1>(chosen, params, device, stream);
  }
}

// HeadDim is compiled; the call must be one that prefill_sm90_supports, its wider dim at most
// HeadDim.
template <class T, int HeadDim>
Status launch_prefill_sm90(const PrefillParams& params, const Device& device, cudaStream_t stream) {
  return launch_prefill_chosen_sm90<T, HeadDim>(prefill_tile_index_sm90(params), params, device,
                                                stream);
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_PREFILL_SM90_CUH_
