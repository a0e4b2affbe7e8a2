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

// A key that a row must not see has p = 0 there; but 0 times NaN is NaN. So in blocks with keys
// that not every row sees, these otherwise idle warps look at V before the consumers do. Keys
// beyond the sequence's length become zeros. Other values that are not finite become zeros as well,
// and a flag: the consumers add them to just the rows that see them when the tile ends
// (see_not_finite).
template <class T, class Tile>
class PrefillInspector {
 public:
  static constexpr int kWarps = 3, kThreads = 32 * kWarps;

  __device__ PrefillInspector(PrefillSmem<Tile> smem, PrefillShared<Tile>& shared)
      : smem_(smem), shared_(shared) {}

  __device__ __forceinline__ void run() {
    int q_stage = 0;
    uint32_t q_parity = 0, block = 0;  // K/V blocks so far, through all tiles
    while (true) {
      mbarrier_wait(shared_address(&shared_.barriers.q_full[q_stage][0]), q_parity);
      const volatile TileWork& work = shared_.work[q_stage];
      if (work.position < 0) return;
      const uint32_t next_tile = block + work.blocks;
#pragma unroll 1
      for (int n = work.blocks - 1; n >= work.first_inspected; --n)
        inspect(ring_stage(block++), work.kv_len - n * Tile::kBlockKv,
                &shared_.v_not_finite[q_stage]);
      block = next_tile;
      if (thread() == 0) mbarrier_arrive(shared_address(&shared_.barriers.q_empty[q_stage]));
      if (++q_stage == Tile::kQStages) {
        q_stage = 0;
        q_parity ^= 1;
      }
    }
  }

 private:
  __device__ int thread() const { return threadIdx.x - 32; }

  __device__ __forceinline__ void inspect(uint32_t stage, int rows, bool* v_not_finite) {
    mbarrier_wait(shared_address(&shared_.barriers.v_raw[stage]), raw_parity_ >> stage & 1);
    raw_parity_ ^= 1u << stage;
    const uint32_t v_smem = smem_.v(stage);
#pragma unroll 2
    for (int byte = thread() * 16; byte < Tile::kKvBytes; byte += kThreads * 16) {
      const uint4 v = load_shared_16(v_smem + byte);
      const bool beyond = byte % Tile::kKvChunkBytes >= rows * 128;
      if (beyond) {
        store_shared_16(v_smem + byte, uint4{});
      } else if (any_not_finite<T>(v)) {
        *v_not_finite = true;
        store_shared_16(v_smem + byte, {finite_or_zero<T>(v.x), finite_or_zero<T>(v.y),
                                        finite_or_zero<T>(v.z), finite_or_zero<T>(v.w)});
      }
    }
    fence_async_proxy();
    __syncwarp();
    named_barrier_sync(kInspectors, kThreads);
    if (thread() == 0) mbarrier_arrive(shared_address(&shared_.barriers.v_full[stage]));
  }

  const PrefillSmem<Tile> smem_;
  PrefillShared<Tile>& shared_;
  uint32_t raw_parity_ = 0;  // of the next wait for v_raw, a bit a stage
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_PREFILL_INSPECTOR_SM90_CUH_
