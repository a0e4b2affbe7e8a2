// The thread that loads: Q, K and V of one tile after the other. Where any mask may apply, its warp
// helps it to find the blocks of keys.
#ifndef FLASHATTN_CUDA_PREFILL_PRODUCER_SM90_CUH_
#define FLASHATTN_CUDA_PREFILL_PRODUCER_SM90_CUH_

#include <climits>
#include <type_traits>

#include "prefill_layout_sm90.cuh"

namespace flashattn {

struct NoFinder {};

template <class Tile>
class PrefillProducer {
 public:
  // The first threads of the block, which all call run().
  static constexpr int kThreads = Tile::kAnyMask ? 32 : 1;

  __device__ PrefillProducer(const PrefillMaps& maps, const PrefillParams& params,
                             const TileGrid& grid, PrefillSmem<Tile> smem,
                             PrefillShared<Tile>& shared)
      : maps_(maps),
        params_(params),
        grid_(grid),
        smem_(smem),
        shared_(shared),
        finder_(make_finder(params, grid)) {}

  // By the thread that loads, while others still prepare shared memory.
  __device__ __forceinline__ void prepare() {
    for (const CUtensorMap* map : {&maps_.k, &maps_.q, &maps_.v}) tma_prefetch_descriptor(map);
    if (!Tile::kDirectO) tma_prefetch_descriptor(&maps_.o);
    if (Tile::kShaped && params_.features.bias.data) tma_prefetch_descriptor(&maps_.bias);
    if constexpr (!Tile::kAnyMask) first_work_ = work_of(blockIdx.x);
  }

  __device__ __forceinline__ void run() {
    if constexpr (Tile::kAnyMask)
      load_found_blocks();
    else
      load_ranges();
  }

 private:
  using Finder = std::conditional_t<Tile::kAnyMask, BlockFinder<Tile::kBlockKv>, NoFinder>;

  static __device__ Finder make_finder(const PrefillParams& params, const TileGrid& grid) {
    if constexpr (Tile::kAnyMask)
      return {params, grid.mask};
    else
      return {};
  }
  __device__ static bool is_loader() { return kThreads == 1 || opaque_thread() == 0; }

  __device__ uint32_t q_full(int warpgroup) const {
    return shared_address(&shared_.barriers.q_full[tile_.q_stage][warpgroup]);
  }
  __device__ __forceinline__ void wait_for_q_buffer(int release) const {
    mbarrier_wait(shared_address(&shared_.barriers.q_empty[tile_.q_stage][release]),
                  tile_.q_parity ^ 1);
  }
  __device__ TileWork& published_work() const { return shared_.work[tile_.work()]; }

  __device__ __forceinline__ void load_ranges() {
    int tile = blockIdx.x;
    TileWork work = first_work_;
    while (work.position >= 0) {
      // The first K goes ahead of the wait for the Q buffer, which may still be on its way out as
      // O. A single buffer through which O goes always is, but for a block's first tile: meanwhile
      // the rings are filled.
      if (work.blocks > 0) load_k(work, block_, work.blocks - 1);
      const bool ahead = Tile::kQStages == 1 && !Tile::kDirectO && block_ > 0 && work.blocks > 1;
      if (ahead) {
        load_k(work, block_ + 1, work.blocks - 2);
        load_v(work, block_++, work.blocks - 1);
      }
      publish(work);
      work = load_tile(published_work(), ahead, tile);
      tile_.next();
    }
    publish(work);
    publish_without_q();
  }

  // The same where blocks are found one by one: a single loop over all blocks of all tiles, so that
  // the search is in the code only once. It runs one block ahead, for each block is published with
  // whether it is the tile's last. The work of the tile to come waits in shared memory.
  __device__ __forceinline__ void load_found_blocks() {
    grid_dependency_wait();  // for the packed mask
    int tile = blockIdx.x;
    bool begins = true;
    FoundBlock waiting = FoundBlock::none(), block = FoundBlock::none();  // for V; for K
    // One before the first.
    tile_ = {Tile::kQStages - 1, 1, Tile::kTileWorks - 1};
    while (true) {
      if (begins) begin_tile(tile);
      const FoundBlock found = finder_.next();
      // Answered while the tile's last K and the V before wait for their buffers.
      unsigned long long answer = 0;
      if (!found.exists() && tile < grid_.tiles) answer = ask_for_next_tile();
      if (begins) {
        if (waiting.exists()) load_v(published_work(), block_ - 1, waiting);
        tile_.next();
        if (tile >= grid_.tiles) break;
        if (is_loader()) shared_.next_work.blocks = found.block() + 1;
        waiting = FoundBlock::none();
        if (!found.exists()) {
          publish(shared_.next_work);
          publish_without_q();
        }
      } else {
        load_k(shared_.next_work, block_++, block.as_last(!found.exists()));
        if (waiting.exists()) {
          load_v(published_work(), block_ - 2, waiting);
        } else {
          publish(shared_.next_work);
#pragma unroll 1
          for (int w = 0; w < Tile::kWarpgroups; ++w) load_q(published_work(), w);
        }
        if constexpr (Tile::kShaped) load_bias(shared_.next_work, block_ - 1, block);
        waiting = block.as_last(!found.exists());
      }
      block = found;
      begins = !found.exists();
      if (begins) tile = next_tile(tile, answer);
    }
    publish(shared_.next_work);
    publish_without_q();
  }

  // The arrival on q_full, which follows, makes it visible. With direct O nothing need be waited
  // for: the Q of the tile before went into rows that all readers had given back, so they have left
  // the third tile before this one, whose place it takes.
  __device__ __forceinline__ void publish(const TileWork& work) {
    if (!is_loader()) return;
    if constexpr (!Tile::kDirectO) wait_for_q_buffer(0);
    published_work() = work;
    shared_.v_not_finite[tile_.work()] = false;
    if constexpr (Tile::kAnyMask) {
      shared_.first_not_finite[tile_.work()] = INT_MAX;
      shared_.end_not_finite[tile_.work()] = 0;
      shared_.mask_row[tile_.work()] = shared_.next_mask_row;
    }
  }
  __device__ __forceinline__ void publish_without_q() {
    if (!is_loader()) return;
#pragma unroll
    for (int w = 0; w < Tile::kWarpgroups; ++w) {
      if constexpr (Tile::kDirectO) wait_for_q_buffer(w);
      mbarrier_arrive(q_full(w));
    }
  }

  __device__ __forceinline__ TileWork work_of(int tile) const {
    if (tile < grid_.tiles)
      return decode_tile<Tile::kCausal, Tile::kSplitsLong>(params_, grid_, tile, Tile::kBlockKv);
    TileWork stop = {};
    stop.position = -1;
    return stop;
  }
  __device__ __forceinline__ void begin_tile(int tile) {
    if (tile >= grid_.tiles) {
      if (is_loader()) shared_.next_work.position = -1;
      return finder_.stop();
    }
    // A window without an end leaves the most keys to the first rows, any other to the last.
    int left = params_.scores.window_left, right = params_.scores.window_right;
    opaque(left);  // else what is known of them is kept, and spills
    opaque(right);
    const bool last_first = left == kUnlimited || right != kUnlimited;
    const TileWork work = place_tile(params_, grid_, tile, last_first);
    if (is_loader()) {
      shared_.next_work = work;
      shared_.next_mask_row =
          grid_.mask.first_row(grid_.mask.plane(work.batch, work.head), work.position);
    }
    finder_.start(work, grid_.block_positions);
  }

  // Loads all of a tile but its first K or, if `ahead`, its first two K and first V, and returns
  // the work that follows. V runs one block behind K, as the products do. `work` is read again from
  // shared memory for each load: this thread has few registers.
  __device__ __forceinline__ TileWork load_tile(const TileWork& work, bool ahead, int& tile) {
    int n = work.blocks - 1 - ahead;
    if (n >= 0) {
#pragma unroll 1
      for (int w = 0; w < Tile::kWarpgroups; ++w) load_q(work, w);
#pragma unroll 1
      for (; n > 0; --n, ++block_) {
        load_k(work, block_ + 1, n - 1);
        load_v(work, block_, n);
      }
    } else {
      publish_without_q();
    }
    // What comes next is worked out while the last V waits for its buffer: its divisions take as
    // long as the softmax of half a block, and nobody waits for them here. Where the rings are
    // longer V does not wait.
    if (Tile::kSplitsLong && n >= 0) load_v(work, block_++, 0);
    tile = next_tile(tile, ask_for_next_tile());
    const TileWork next = work_of(tile);
    if (!Tile::kSplitsLong && n >= 0) load_v(work, block_++, 0);
    return next;
  }
  __device__ __forceinline__ unsigned long long ask_for_next_tile() const {
    if (grid_.counter == nullptr || !is_loader()) return 0;
    mbarrier_wait(shared_address(&shared_.barriers.counter_claimed), 0);
    return ask_for_tile(grid_);
  }
  __device__ __forceinline__ int next_tile(int tile, unsigned long long answer) const {
    if (grid_.counter == nullptr) return tile_after(tile);
    if constexpr (kThreads == 1) return answered_tile(grid_, answer);
    return __shfl_sync(~0u, is_loader() ? answered_tile(grid_, answer) : 0, 0);
  }
  // Without the counter. Where there are one or two tiles a block, whoever has the longest of the
  // first ones gets the shortest of the others.
  __device__ __forceinline__ int tile_after(int tile) const {
    const int blocks = static_cast<int>(gridDim.x);
    if (!Tile::kSplitsLong) return tile + blocks;
    return tile < blocks ? 2 * blocks - 1 - tile : grid_.tiles;
  }

  __device__ __forceinline__ void load_q(const TileWork& work, int warpgroup) {
    if (!is_loader()) return;
    const int positions = grid_.warpgroup_positions;
    // Of a split tile's rows each has a copy.
    const int row_group = is_split<Tile>(grid_, work.position) ? 0 : warpgroup;
    const uint32_t barrier = q_full(warpgroup), q_smem = smem_.q(tile_.q_stage, warpgroup);
    if constexpr (Tile::kDirectO) wait_for_q_buffer(warpgroup);
    mbarrier_expect_tx(barrier, positions * grid_.packed_heads * 128 * Tile::kChunks);
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk)
      tma_load_packed(q_smem + chunk * Tile::kQChunkBytes, &maps_.q, barrier, chunk * 64,
                      work.position + row_group * positions, work.head, work.q_batch);
  }
  __device__ __forceinline__ void load_k(const TileWork& work, uint32_t i, int block) {
    const uint32_t stage = ring_stage<Tile>(i);
    mbarrier_wait(shared_address(&shared_.barriers.k_empty[stage]), ring_parity<Tile>(i) ^ 1);
    load_block<Tile::kChunks>(&maps_.k, shared_address(&shared_.barriers.k_full[stage]),
                              smem_.k(stage), block, work.kv_head, work.k_batch);
  }
  __device__ __forceinline__ void load_v(const TileWork& work, uint32_t i, int block) {
    const uint32_t stage = ring_stage<Tile>(i);
    const bool inspected = block >= work.first_inspected;
    mbarrier_wait(shared_address(&shared_.barriers.v_empty[stage]), ring_parity<Tile>(i) ^ 1);
    load_block<Tile::kValueChunks>(&maps_.v,
                                   shared_address(inspected ? &shared_.barriers.v_raw[stage]
                                                            : &shared_.barriers.v_full[stage]),
                                   smem_.v(stage), block, work.kv_head, work.v_batch);
  }
  // With what the others have to know of the block. The inspector follows the blocks that are found
  // one by one, and lets pass what it need not see.
  __device__ __forceinline__ void load_k(const TileWork& work, uint32_t i, FoundBlock block) {
    if (!is_loader()) return;
    const uint32_t stage = ring_stage<Tile>(i);
    mbarrier_wait(shared_address(&shared_.barriers.k_empty[stage]), ring_parity<Tile>(i) ^ 1);
    shared_.k_block[stage] = block;
    load_block<Tile::kChunks>(&maps_.k, shared_address(&shared_.barriers.k_full[stage]),
                              smem_.k(stage), block.block(), work.kv_head, work.k_batch);
  }
  __device__ __forceinline__ void load_v(const TileWork& work, uint32_t i, FoundBlock block) {
    if (!is_loader()) return;
    const uint32_t stage = ring_stage<Tile>(i);
    mbarrier_wait(shared_address(&shared_.barriers.v_empty[stage]), ring_parity<Tile>(i) ^ 1);
    shared_.v_block[stage] = block;
    load_block<Tile::kValueChunks>(&maps_.v, shared_address(&shared_.barriers.v_raw[stage]),
                                   smem_.v(stage), block.block(), work.kv_head, work.v_batch);
  }
  // After K and V of the step, for which the warpgroups wait first.
  __device__ __forceinline__ void load_bias(const TileWork& work, uint32_t i, FoundBlock block) {
    const Broadcast& bias = params_.features.bias;
    if (!is_loader() || !is_given(bias.data)) return;
    const int rows = bias.row == 0 ? 1 : kWarpgroupRows;
#pragma unroll 1
    for (int w = 0; w < Tile::kWarpgroups; ++w) {
      const uint32_t barrier = shared_address(&shared_.bias_full[w]);
      mbarrier_wait(shared_address(&shared_.bias_empty[w]), i % 2 ^ 1);
      mbarrier_expect_tx(barrier, Tile::kBiasChunks * rows * 128);
#pragma unroll
      for (int chunk = 0; chunk < Tile::kBiasChunks; ++chunk)
        tma_load_4d(smem_.bias(w) + chunk * Tile::kQChunkBytes, &maps_.bias, barrier,
                    block.block() * Tile::kBlockKv + chunk * 64,
                    bias.row == 0 ? 0 : work.position + w * kWarpgroupRows,
                    bias.head == 0 ? 0 : work.head, remainder(work.batch, grid_.bias_batches));
    }
  }
  template <int Chunks>
  __device__ __forceinline__ void load_block(const CUtensorMap* map, uint32_t barrier,
                                             uint32_t tile_smem, int block, int head, int batch) {
    mbarrier_expect_tx(barrier, Chunks * Tile::kKvChunkBytes);
#pragma unroll
    for (int chunk = 0; chunk < Chunks; ++chunk)
      tma_load_4d(tile_smem + chunk * Tile::kKvChunkBytes, map, barrier, chunk * 64,
                  block * Tile::kBlockKv, head, batch);
  }

  const PrefillMaps& maps_;
  const PrefillParams& params_;
  const TileGrid& grid_;
  const PrefillSmem<Tile> smem_;
  PrefillShared<Tile>& shared_;
  TileCount<Tile> tile_;
  uint32_t block_ = 0;  // K/V blocks so far, through all tiles
  TileWork first_work_;
  Finder finder_;
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_PREFILL_PRODUCER_SM90_CUH_
