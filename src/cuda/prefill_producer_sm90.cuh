// The thread that loads: Q, K and V of one tile after the other.
#ifndef FLASHATTN_CUDA_PREFILL_PRODUCER_SM90_CUH_
#define FLASHATTN_CUDA_PREFILL_PRODUCER_SM90_CUH_

#include "prefill_layout_sm90.cuh"

namespace flashattn {

template <class Tile>
class PrefillProducer {
 public:
  __device__ PrefillProducer(const PrefillMaps& maps, const PrefillParams& params,
                             const TileGrid& grid, PrefillSmem<Tile> smem,
                             PrefillShared<Tile>& shared)
      : maps_(maps), params_(params), grid_(grid), smem_(smem), shared_(shared) {}

  __device__ __forceinline__ void run() {
    int tile = blockIdx.x;
    TileWork work = work_of(tile);
    while (work.position >= 0) {
      // The first K goes ahead of the wait for the Q buffer, which may still be on its way out as
      // O.
      if (work.blocks > 0) load_k(work, block_, work.blocks - 1);
      publish(work);
      work = load_tile(shared_.work[q_stage_], tile);
      next_q_buffer();
    }
    publish(work);
#pragma unroll
    for (int w = 0; w < Tile::kWarpgroups; ++w) mbarrier_arrive(q_full(w));
  }

 private:
  __device__ uint32_t q_full(int warpgroup) const {
    return shared_address(&shared_.barriers.q_full[q_stage_][warpgroup]);
  }

  // The arrival on q_full, which follows, makes it visible.
  __device__ __forceinline__ void publish(const TileWork& work) {
    mbarrier_wait(shared_address(&shared_.barriers.q_empty[q_stage_]), q_parity_ ^ 1);
    shared_.work[q_stage_] = work;
    shared_.v_not_finite[q_stage_] = false;
  }

  __device__ __forceinline__ void next_q_buffer() {
    if (++q_stage_ == Tile::kQStages) {
      q_stage_ = 0;
      q_parity_ ^= 1;
    }
  }

  __device__ __forceinline__ TileWork work_of(int tile) const {
    if (tile < grid_.tiles) return decode_tile<Tile::kCausal>(params_, grid_, tile, Tile::kBlockKv);
    TileWork stop = {};
    stop.position = -1;
    return stop;
  }

  // Loads all of a tile but its first K, and returns the work that follows. V runs one block behind
  // K, as the products do. `work` is read again from shared memory for each load: this thread has
  // few registers.
  __device__ __forceinline__ TileWork load_tile(const TileWork& work, int& tile) {
    int n = work.blocks - 1;
    if (n >= 0) {
#pragma unroll 1
      for (int w = 0; w < Tile::kWarpgroups; ++w) load_q(work, w);
#pragma unroll 1
      for (; n > 0; --n, ++block_) {
        load_k(work, block_ + 1, n - 1);
        load_v(work, block_, n);
      }
    } else {
#pragma unroll
      for (int w = 0; w < Tile::kWarpgroups; ++w) mbarrier_arrive(q_full(w));
    }
    // What comes next is worked out while the last V waits for its buffer: its divisions take as
    // long as the softmax of half a block, and nobody waits for them here.
    tile = next_tile(tile);
    const TileWork next = work_of(tile);
    if (n >= 0) load_v(work, block_++, 0);
    return next;
  }

  __device__ __forceinline__ int next_tile(int tile) {
    if (grid_.counter == nullptr) return tile + static_cast<int>(gridDim.x);
    mbarrier_wait(shared_address(&shared_.barriers.counter_claimed), 0);
    return fetch_tile(grid_);
  }

  __device__ __forceinline__ void load_q(const TileWork& work, int warpgroup) {
    const int positions = grid_.warpgroup_positions;
    const uint32_t barrier = q_full(warpgroup), q_smem = smem_.q(q_stage_, warpgroup);
    mbarrier_expect_tx(barrier, positions * grid_.packed_heads * 128 * Tile::kChunks);
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk)
      tma_load_packed(q_smem + chunk * Tile::kQChunkBytes, &maps_.q, barrier, chunk * 64,
                      work.position + warpgroup * positions, work.head, work.q_batch);
  }
  __device__ __forceinline__ void load_k(const TileWork& work, uint32_t i, int block) {
    const uint32_t stage = ring_stage(i);
    mbarrier_wait(shared_address(&shared_.barriers.k_empty[stage]), ring_parity(i) ^ 1);
    load_block(&maps_.k, shared_address(&shared_.barriers.k_full[stage]), smem_.k(stage), block,
               work.kv_head, work.k_batch);
  }
  __device__ __forceinline__ void load_v(const TileWork& work, uint32_t i, int block) {
    const uint32_t stage = ring_stage(i);
    const bool inspected = block >= work.first_inspected;
    mbarrier_wait(shared_address(&shared_.barriers.v_empty[stage]), ring_parity(i) ^ 1);
    load_block(&maps_.v,
               shared_address(inspected ? &shared_.barriers.v_raw[stage]
                                        : &shared_.barriers.v_full[stage]),
               smem_.v(stage), block, work.kv_head, work.v_batch);
  }
  __device__ __forceinline__ void load_block(const CUtensorMap* map, uint32_t barrier,
                                             uint32_t tile_smem, int block, int head, int batch) {
    mbarrier_expect_tx(barrier, Tile::kKvBytes);
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk)
      tma_load_4d(tile_smem + chunk * Tile::kKvChunkBytes, map, barrier, chunk * 64,
                  block * Tile::kBlockKv, head, batch);
  }

  const PrefillMaps& maps_;
  const PrefillParams& params_;
  const TileGrid& grid_;
  const PrefillSmem<Tile> smem_;
  PrefillShared<Tile>& shared_;
  int q_stage_ = 0;
  uint32_t q_parity_ = 0;
  uint32_t block_ = 0;  // K/V blocks so far, through all tiles
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_PREFILL_PRODUCER_SM90_CUH_
