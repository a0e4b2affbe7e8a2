// The warpgroups that multiply: 64 query rows each, through all key blocks of a tile.
#ifndef FLASHATTN_CUDA_PREFILL_CONSUMER_SM90_CUH_
#define FLASHATTN_CUDA_PREFILL_CONSUMER_SM90_CUH_

#include <type_traits>

#include "prefill_epilogue_sm90.cuh"
#include "prefill_layout_sm90.cuh"
#include "prefill_rows_sm90.cuh"
#include "softmax_sm90.cuh"

namespace flashattn {

template <class T, class Tile>
class PrefillConsumer : PrefillEpilogue<T, Tile> {
  using Base = PrefillEpilogue<T, Tile>;
  // From PrefillRows: which rows and blocks, and their scores.
  using Base::scale_log2_, Base::smem_, Base::shared_, Base::warpgroup_, Base::split_,
      Base::last_block_, Base::next_, Base::block_, Base::tile_;
  using Base::thread, Base::lane, Base::fragment_address, Base::block_stride, Base::first_own_block,
      Base::next_block, Base::tile_block, Base::hide_keys, Base::load_mask_bits,
      Base::set_row_limits, Base::visible_columns, Base::set_shape, Base::scores_of_block;
  // From PrefillEpilogue: O and the row sums, and where they go.
  using Base::begin_split_tile, Base::hand_over, Base::finish_tile, Base::release_read_q,
      Base::release_previous_q, Base::o_regs_, Base::rows_;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    if (warpgroup_ == Tile::kWarpgroups - 1) pass_turn();
    while (true) {
      mbarrier_wait(shared_address(&shared_.barriers.q_full[tile_.q_stage][warpgroup_]),
                    tile_.q_parity);
      const TileWork& work = shared_.work[tile_.work()];
      const TileWalk walk = load_part<TileWalk>(work);
      if (walk.position < 0) break;
      if constexpr (Tile::kSplitsLong) begin_split_tile(walk);
      const uint32_t next_tiles_block = block_ + walk.blocks;
      if (walk.blocks > first_own_block())
        attend(walk);
      else
        attend_to_nothing();
      if constexpr (Tile::kSplitsLong) block_ = next_tiles_block;
      if (first_own_block() == 0)
        finish_tile(work);
      else
        finish_part(walk);
      tile_.next();
    }
    if constexpr (!Tile::kDirectO) bulk_wait<0>();
  }

 private:
  static constexpr int kSRegs = Tile::kBlockKv / 2, kPRegs = Tile::kBlockKv / 4;
  static constexpr bool kDoubleP = Tile::kTile.double_p;
  // A step ahead they arrive in time; but what shapes scores wants the registers.
  static constexpr bool kMaskBitsAhead = !Tile::kShaped;
  using PRegs = uint32_t[kPRegs];

  // ---- a tile
  __device__ __forceinline__ void attend(const TileWalk& walk) {
    if constexpr (Tile::kAnyMask)
      attend_to_found_blocks(walk);
    else
      attend_to_range(walk);
  }

  __device__ __forceinline__ void attend_to_range(const TileWalk& walk) {
    int unmasked = walk.unmasked_blocks, n = walk.blocks - 1;
    if constexpr (Tile::kSplitsLong) {  // then both count this warpgroup's own blocks
      block_ += first_own_block();
      n -= first_own_block();
      last_block_ = n & split_;
      n >>= split_;
      // One block more is masked: rows may have met their first key in the other's block above it.
      unmasked = (unmasked - last_block_) >> split_;
    }
    first_block(walk, n);
    --n;
    bool p_is_in_b = false;
    // Two steps at a time where P has two copies: moving one to the other would serialise the
    // products. A mask on a block that needs none is harmless.
    if constexpr (Tile::kCausal && kDoubleP) {
#pragma unroll 1
      for (; n >= unmasked && n >= 0; --n) {
        step<true>(n, p_a_regs_, p_b_regs_);
        p_is_in_b = --n < 0;
        if (p_is_in_b) break;
        step<true>(n, p_b_regs_, p_a_regs_);
      }
    } else if constexpr (Tile::kCausal) {
#pragma unroll 1
      for (; n >= unmasked && n >= 0; --n) step<true>(n, p_a_regs_, p_a_regs_);
    }
    if constexpr (kDoubleP) {
#pragma unroll 1
      for (; n >= 0; --n) {
        step<false>(n, p_a_regs_, p_b_regs_);
        p_is_in_b = --n < 0;
        if (p_is_in_b) break;
        step<false>(n, p_b_regs_, p_a_regs_);
      }
    } else {
#pragma unroll 1
      for (; n >= 0; --n) step<false>(n, p_a_regs_, p_a_regs_);
    }
    if (kDoubleP && p_is_in_b)
      last_product(p_b_regs_);
    else
      last_product(p_a_regs_);
  }

  // The blocks come with what is to be done to them. Each step is closed before it is decided which
  // one follows. Plain steps follow each other in a loop of their own: a jump across the masked
  // step in each of them costs half a per cent.
  __device__ __forceinline__ void attend_to_found_blocks(const TileWalk& walk) {
    static_assert(!kDoubleP, "steps of two kinds take turns");
    first_block(walk, 0);
#pragma unroll 1
    while (!was_last_) {
      if (next_.masked()) {
        step<true>(next_.block(), p_a_regs_, p_a_regs_);
        continue;
      }
#pragma unroll 1
      do step<false>(next_.block(), p_a_regs_, p_a_regs_);
      while (!was_last_ && !next_.masked());
    }
    last_product(p_a_regs_);
  }

  __device__ __forceinline__ void attend_to_nothing() {
    release_previous_q();
    release_read_q();
    clear_o();
    rows_.sum[0] = rows_.sum[1] = 0.f;
    if constexpr (Tile::kAnyMask || Tile::kSplitsLong) rows_.ref[0] = rows_.ref[1] = -INFINITY;
  }
  __device__ __forceinline__ void clear_o() {
#pragma unroll
    for (float& o : o_regs_) o = 0.f;
  }

  __device__ __forceinline__ void first_block(const TileWalk& walk, int n) {
    q_low_ = descriptor_low_k_major(smem_.q(tile_.q_stage, warpgroup_));
    if constexpr (Tile::kShaped) set_shape();
    wait_k(block_);
    if constexpr (Tile::kAnyMask) {
      next_ = shared_.k_block[ring_stage<Tile>(block_)];
      n = next_.block();
      load_mask_bits();
    }
    uint32_t k_low = k_descriptor(block_);
    opaque(k_low);
    opaque(q_low_);
    wgmma_fence();
    multiply_qk(q_low_, k_low);
    wgmma_commit();
    if constexpr (!Tile::kAnyMask) set_row_limits(walk);
    clear_o();
    wgmma_wait<0>();
    release_k(block_);
    release_previous_q();
    if constexpr (Tile::kAnyMask) {
      scores_of_block(n, block_).apply(s_regs_);
      if (next_.masked()) hide_keys(s_regs_, n);
      softmax_first<false>(s_regs_, rows_, scale_log2_, {});
      note_rows_without_key(rows_);
    } else {
      const int block = tile_block(n);
      const VisibleColumns visible = visible_columns(block);
      if (block >= walk.unmasked_blocks) mask_columns<Tile::kCausal>(s_regs_, visible);
      softmax_first<Tile::kCausal>(s_regs_, rows_, scale_log2_, visible);
    }
    wait_next_k(n, next_block());
    convert_p<T>(s_regs_, p_a_regs_);
  }

  // Block n's scores and softmax, and the product of the block before, whose P is p_in.
  template <bool Masked>
  __device__ __forceinline__ void step(int n, PRegs& p_in, PRegs& p_out) {
    // What hides keys from some rows hides products; what shapes scores would bring them back.
    constexpr bool kMaxFree =
        Tile::kTile.max_free && (!Masked || Tile::kTile.kind == ScoreKind::kMasked);
    uint32_t k_low = k_descriptor(next_block()), v_low = v_descriptor(block_), q_low = q_low_;
    opaque(k_low);
    opaque(v_low);
    opaque(q_low);
    take_turn();
    wgmma_fence();
    multiply_qk(q_low, k_low);
    wgmma_commit();
    rescale_o();
    wait_v(block_);
    wgmma_fence();
    multiply_pv(p_in, v_low);
    wgmma_commit();
    pass_turn();
    if constexpr (Masked && Tile::kAnyMask && !kMaskBitsAhead) load_mask_bits();
    wgmma_wait<1>();
    if constexpr (kMaxFree) {
      const auto scores = scores_of_block(n, next_block());
      const auto hide = [&] {
        if constexpr (Masked) hide_keys(s_regs_, n);
      };
      const bool by_maximum = Masked && !next_.masked_by_mask();
      softmax_max_free<T, kDoubleP, Tile::kAnyMask>(
          s_regs_, rows_, scale_log2_, p_out, by_maximum, HiddenScores{scores, hide},
          [&](float (&s)[kSRegs]) { recompute_s(s, next_block()); });
      release_k(next_block());
    } else {
      release_k(next_block());
      scores_of_block(n, next_block()).apply(s_regs_);
      if constexpr (Masked) hide_keys(s_regs_, n);
      softmax_with_maximum<Masked>(s_regs_, rows_, scale_log2_);
      if constexpr (Tile::kAnyMask) note_rows_without_key(rows_);
      if constexpr (kDoubleP) convert_p<T>(s_regs_, p_out);
    }
    // The next step needs this wait anyway. Here its branch keeps the exponentials ahead of the
    // wait for the second product, which ptxas would otherwise hoist above them.
    wait_next_k(n, next_block() + block_stride());
    wgmma_wait<0>();
    release_v(block_);
    if constexpr (!kDoubleP) convert_p<T>(s_regs_, p_out);
    block_ = next_block();
  }

  __device__ __forceinline__ void last_product(PRegs& p_in) {
    release_read_q();
    uint32_t v_low = v_descriptor(block_);
    opaque(v_low);
    rescale_o();
    wait_v(block_);
    wgmma_fence();
    multiply_pv(p_in, v_low);
    wgmma_commit();
    wgmma_wait<0>();
    release_v(block_);
    ++block_;
  }

  // The second warpgroup's end of a split tile.
  __device__ __forceinline__ void finish_part(const TileWalk& walk) {
    hand_over();
    // Turns go round: with a block less than the first, this warpgroup lets one pass.
    if (walk.blocks > 1 && walk.blocks % 2 == 1) {
      take_turn();
      pass_turn();
    }
  }

  // ---- the products
  __device__ uint32_t k_descriptor(uint32_t i) const {
    return descriptor_low_k_major(smem_.k(ring_stage<Tile>(i)));
  }
  __device__ uint32_t v_descriptor(uint32_t i) const {
    return descriptor_low_mn_major(smem_.v(ring_stage<Tile>(i)), Tile::kBlockKv);
  }
  // Descriptors count in 16 bytes: 2 is one step of 16 columns, 8 a row of a chunk.
  __device__ __forceinline__ void multiply_qk(uint32_t q_low, uint32_t k_low) {
#pragma unroll
    for (int k = 0; k < Tile::kHeadDim / 16; ++k) {
      const int chunk = k / 4, column = k % 4 * 2;
      Wgmma<T, Tile::kBlockKv>::template ss<false, false>(
          s_regs_, descriptor(q_low + chunk * (kWarpgroupRows * 8) + column),
          descriptor(k_low + chunk * (Tile::kBlockKv * 8) + column), k > 0);
    }
  }
  __device__ __forceinline__ void multiply_pv(PRegs& p, uint32_t v_low) {
#pragma unroll
    for (int k = 0; k < Tile::kBlockKv / 16; ++k)
      Wgmma<T, Tile::kValueDim>::template rs<true>(o_regs_, p[4 * k], p[4 * k + 1], p[4 * k + 2],
                                                   p[4 * k + 3], descriptor(v_low + k * 128), 1);
  }
  __device__ __forceinline__ void rescale_o() {
    if (!rows_.o_is_behind) return;
#pragma unroll
    for (int i = 0; i < Tile::kValueDim / 2; ++i) o_regs_[i] *= rows_.factor[i / 2 % 2];
  }

  // This warp's 16 rows of S again, by mma.sync from Q and K in shared memory: rare.
  __device__ __forceinline__ void recompute_s(float (&s)[kSRegs], uint32_t i) {
    const uint32_t q_smem = smem_.q(tile_.q_stage, warpgroup_),
                   k_smem = smem_.k(ring_stage<Tile>(i));
    const int key = lane() % 8 + lane() / 16 * 8, half = lane() / 8 % 2;
#pragma unroll
    for (float& x : s) x = 0.f;
#pragma unroll 1  // unrolled, it would spill
    for (int k = 0; k < Tile::kHeadDim / 16; ++k) {
      uint32_t a[4], b[4];
      ldmatrix_x4(a, fragment_address(q_smem, k));
      const uint32_t keys = tile_address(k_smem, Tile::kBlockKv, key, 2 * k + half);
#pragma unroll
      for (int j = 0; j < Tile::kBlockKv / 16; ++j) {
        ldmatrix_x4(b, keys + j * 16 * 128);
        mma_m16n8k16<T>(s + 8 * j, a, b[0], b[1]);
        mma_m16n8k16<T>(s + 8 * j + 4, a, b[2], b[3]);
      }
    }
  }

  // ---- barriers
  __device__ __forceinline__ void wait_k(uint32_t i) {
    mbarrier_wait(shared_address(&shared_.barriers.k_full[ring_stage<Tile>(i)]),
                  ring_parity<Tile>(i));
  }
  __device__ __forceinline__ void wait_v(uint32_t i) {
    mbarrier_wait(shared_address(&shared_.barriers.v_full[ring_stage<Tile>(i)]),
                  ring_parity<Tile>(i));
  }
  // Ahead of the step that needs it; with a block to come, after block n.
  __device__ __forceinline__ void wait_next_k(int n, uint32_t i) {
    if constexpr (Tile::kAnyMask) {
      was_last_ = next_.last();
      if (was_last_) return;
      wait_k(i);
      next_ = shared_.k_block[ring_stage<Tile>(i)];
      if constexpr (kMaskBitsAhead) load_mask_bits();
    } else {
      if (n > 0) wait_k(i);
    }
  }
  // K by every warp, since a warp may read it again (recompute_s); V by the warpgroup.
  __device__ __forceinline__ void release_k(uint32_t i) {
    if (lane() == 0) release(shared_.barriers.k_empty[ring_stage<Tile>(i)]);
  }
  __device__ __forceinline__ void release_v(uint32_t i) {
    if (thread() == 0) release(shared_.barriers.v_empty[ring_stage<Tile>(i)]);
  }
  // Of a split tile also for the other warpgroup, which does not read this block.
  __device__ __forceinline__ void release(uint64_t& empty) {
    if constexpr (Tile::kSplitsLong)
      mbarrier_arrive(shared_address(&empty), block_stride());
    else
      mbarrier_arrive(shared_address(&empty));
  }
  __device__ __forceinline__ void take_turn() {
    if constexpr (Tile::kTile.ping_pong) named_barrier_sync(kTurn + warpgroup_, 256);
  }
  __device__ __forceinline__ void pass_turn() {
    if constexpr (Tile::kTile.ping_pong)
      named_barrier_arrive(kTurn + (warpgroup_ == Tile::kWarpgroups - 1 ? 0 : warpgroup_ + 1), 256);
  }

  float s_regs_[kSRegs];
  uint32_t p_a_regs_[kPRegs], p_b_regs_[kPRegs];
  bool was_last_;  // whether the step before that of next_ was the tile's last; any mask only
  uint32_t q_low_ = 0;
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_PREFILL_CONSUMER_SM90_CUH_
