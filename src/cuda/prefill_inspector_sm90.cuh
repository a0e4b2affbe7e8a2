// The warps that keep keys out of rows that do not see them, where V is not finite.
#ifndef FLASHATTN_CUDA_PREFILL_INSPECTOR_SM90_CUH_
#define FLASHATTN_CUDA_PREFILL_INSPECTOR_SM90_CUH_

#include <type_traits>

#include "prefill_layout_sm90.cuh"

namespace flashattn {

// The sign bit of each half of v that is infinite or NaN: an exponent of all ones and one more
// overflow into it.
template <class T>
__device__ __forceinline__ uint32_t not_finite_halves(uint32_t v) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  constexpr uint32_t kExponent = kHalf ? 0x7c007c00 : 0x7f807f80;
  constexpr uint32_t kOne = kHalf ? 0x04000400 : 0x00800080;
  return ((v & kExponent) + kOne) & 0x80008000;
}
template <class T>
__device__ __forceinline__ bool any_not_finite(uint4 v) {
  return (not_finite_halves<T>(v.x) | not_finite_halves<T>(v.y) | not_finite_halves<T>(v.z) |
          not_finite_halves<T>(v.w)) != 0;
}
template <class T>
__device__ __forceinline__ uint32_t finite_or_zero(uint32_t v) {
  return v & ~((not_finite_halves<T>(v) >> 15) * 0xffffu);
}

// 0 v + sum for both halves: NaN, and stays so, once a v was not finite.
template <class T>
__device__ __forceinline__ uint32_t zero_times_plus(uint32_t v, uint32_t sum) {
  uint32_t result;
  if constexpr (std::is_same_v<T, __half>)
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(v), "r"(0), "r"(sum));
  else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(v), "r"(0), "r"(sum));
  return result;
}

// A key that a row must not see has p = 0 there; but 0 times NaN is NaN. So in blocks with keys
// that not every row sees, these otherwise idle warps look at V before the consumers do. Keys
// beyond the sequence's length become zeros. Other values that are not finite become zeros as well,
// and a flag: the consumers add them to just the rows that see them when the tile ends
// (see_not_finite).
template <class T, class Tile>
class PrefillInspector {
 public:
  static constexpr int kThreads = 32 * kInspectorWarps;

  __device__ PrefillInspector(PrefillSmem<Tile> smem, PrefillShared<Tile>& shared)
      : smem_(smem), shared_(shared) {}

  __device__ __forceinline__ void run() {
    TileCount<Tile> tile;
    uint32_t block = 0;  // K/V blocks so far, through all tiles
    while (true) {
      mbarrier_wait(shared_address(&shared_.barriers.q_full[tile.q_stage][0]), tile.q_parity);
      const int own_work = tile.work();
      const uint32_t q_empty = shared_address(&shared_.barriers.q_empty[tile.q_stage][0]);
      const TileWalk walk = load_part<TileWalk>(shared_.work[own_work]);
      if (walk.position < 0) return;
      // At once, for Q is not read here; but by each warp, which so says that it has left the tile
      // before.
      if constexpr (Tile::kDirectO) {
        __syncwarp();
        if (thread() % 32 == 0) mbarrier_arrive(q_empty);
      }
      if constexpr (Tile::kAnyMask) {
        if (walk.blocks > 0) follow_tile(block, walk.kv_len, own_work);
        named_barrier_sync(kInspectors, kThreads);  // for all to have read `walk`
      } else {
        const int first_inspected = shared_.work[own_work].first_inspected;
        const uint32_t next_tile = block + walk.blocks;
#pragma unroll 1
        for (int n = walk.blocks - 1; n >= first_inspected; --n)
          inspect(ring_stage<Tile>(block++), walk.kv_len - n * Tile::kBlockKv,
                  &shared_.v_not_finite[own_work]);
        block = next_tile;
      }
      if (!Tile::kDirectO && thread() == 0) mbarrier_arrive(q_empty);
      tile.next();
    }
  }

 private:
  static constexpr int kPieces = Tile::kVBytes / 16, kRounds = kPieces / kThreads;
  // Loads in flight: as many as there are registers for, if that divides the rounds.
  static constexpr int batch_of_rounds() {
    int batch = Tile::kTile.producer_registers() >= 40 ? 7 : 4;
    while (kRounds % batch != 0) --batch;
    return batch;
  }
  static constexpr int kBatch = batch_of_rounds();

  __device__ int thread() const { return threadIdx.x - 32; }

  // Through all blocks of a tile, since only with each comes whether it is masked.
  __device__ __forceinline__ void follow_tile(uint32_t& block, int kv_len, int own_work) {
    FoundBlock found;
    do {
      const uint32_t stage = ring_stage<Tile>(block++);
      wait_raw(stage);
      found = shared_.v_block[stage];
      if (found.masked()) {
        bool not_finite = false;
        clean(smem_.v(stage), kv_len - found.block() * Tile::kBlockKv, &not_finite);
        if (not_finite) {
          shared_.v_not_finite[own_work] = true;
          atomicMin(&shared_.first_not_finite[own_work], found.block());
          atomicMax(&shared_.end_not_finite[own_work], found.block() + 1);
        }
      }
      pass_on(stage);
    } while (!found.last());
  }

  __device__ __forceinline__ void inspect(uint32_t stage, int rows, bool* v_not_finite) {
    wait_raw(stage);
    clean(smem_.v(stage), rows, v_not_finite);
    pass_on(stage);
  }
  __device__ __forceinline__ void wait_raw(uint32_t stage) {
    mbarrier_wait(shared_address(&shared_.barriers.v_raw[stage]), raw_parity_ >> stage & 1);
    raw_parity_ ^= 1u << stage;
  }
  // `rows` of the block are keys of the sequence.
  __device__ __forceinline__ void clean(uint32_t v_smem, int rows, bool* v_not_finite) {
    if (rows < Tile::kBlockKv) {
      clear_rows_from(v_smem, rows);
      fence_async_proxy();
    }
    if (own_share_has_not_finite(v_smem)) {
      *v_not_finite = true;
      clear_not_finite(v_smem);
      fence_async_proxy();
    }
  }
  __device__ __forceinline__ void pass_on(uint32_t stage) {
    __syncwarp();
    named_barrier_sync(kInspectors, kThreads);
    if (thread() == 0) mbarrier_arrive(shared_address(&shared_.barriers.v_full[stage]));
  }

  // Each thread works on its own 16-byte pieces throughout.
  __device__ __forceinline__ void clear_rows_from(uint32_t v_smem, int rows) {
#pragma unroll 1
    for (int piece = thread(); piece < kPieces; piece += kThreads)
      if (piece * 16 % Tile::kKvChunkBytes >= rows * 128)
        store_shared_16(v_smem + piece * 16, uint4{});
  }
  __device__ __forceinline__ bool own_share_has_not_finite(uint32_t v_smem) {
    uint32_t address = v_smem + thread() * 16;
    uint32_t sums[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int round = 0; round < kRounds; round += kBatch) add_pieces<kBatch>(address, sums);
    if (thread() < kPieces - kRounds * kThreads) add_pieces<1>(address, sums);
    return any_not_finite<T>({sums[0], sums[1], sums[2], sums[3]});
  }
  // All loads first: one after the other, each would be waited for.
  template <int N>
  __device__ __forceinline__ void add_pieces(uint32_t& address, uint32_t (&sums)[4]) {
    uint4 v[N];
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = load_shared_16(address + i * kThreads * 16);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      sums[0] = zero_times_plus<T>(v[i].x, sums[0]);
      sums[1] = zero_times_plus<T>(v[i].y, sums[1]);
      sums[2] = zero_times_plus<T>(v[i].z, sums[2]);
      sums[3] = zero_times_plus<T>(v[i].w, sums[3]);
    }
    address += N * kThreads * 16;
  }
  __device__ __forceinline__ void clear_not_finite(uint32_t v_smem) {
#pragma unroll 1
    for (int piece = thread(); piece < kPieces; piece += kThreads) {
      const uint4 v = load_shared_16(v_smem + piece * 16);
      if (any_not_finite<T>(v))
        store_shared_16(v_smem + piece * 16, {finite_or_zero<T>(v.x), finite_or_zero<T>(v.y),
                                              finite_or_zero<T>(v.z), finite_or_zero<T>(v.w)});
    }
  }

  const PrefillSmem<Tile> smem_;
  PrefillShared<Tile>& shared_;
  uint32_t raw_parity_ = 0;  // of the next wait for v_raw, a bit a stage
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_PREFILL_INSPECTOR_SM90_CUH_
