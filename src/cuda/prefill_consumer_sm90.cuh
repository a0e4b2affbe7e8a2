// The warpgroups that multiply: 64 query rows each, through all key blocks of a tile.
#ifndef FLASHATTN_CUDA_PREFILL_CONSUMER_SM90_CUH_
#define FLASHATTN_CUDA_PREFILL_CONSUMER_SM90_CUH_

#include <type_traits>
#include <variant>

#include "prefill_layout_sm90.cuh"
#include "score_mask_sm90.cuh"
#include "score_shape_sm90.cuh"
#include "softmax_sm90.cuh"

namespace flashattn {

// How raw products become logits: a factor in the softmax's exponent, or all that shapes scores.
template <class Tile>
using PrefillScale = std::conditional_t<Tile::kShaped, ShapeScale, float>;

// Word i of lane l of each quad for word l of lane i.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&x)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      uint32_t &low = x[i], &high = x[i + bit];
      const uint32_t other = __shfl_xor_sync(kWholeWarp, upper ? low : high, bit);
      (upper ? low : high) = other;
    }
  }
}

template <class T, class Tile>
class PrefillConsumer {
 public:
  __device__ PrefillConsumer(const PrefillMaps& maps, const PrefillParams& params,
                             const TileGrid& grid, const PrefillScale<Tile>& scale,
                             PrefillSmem<Tile> smem, PrefillShared<Tile>& shared, int warpgroup)
      : maps_(maps),
        params_(params),
        grid_(grid),
        scale_log2_(exponent_scale(scale)),
        scale_(scale),
        smem_(smem),
        shared_(shared),
        warpgroup_(warpgroup) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if constexpr (!Tile::kAnyMask) row_position_[half] = row(half) / grid.packed_heads;
  }

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
        hand_over(walk);
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

  __device__ int thread() const { return threadIdx.x % 128; }
  __device__ int warp() const { return thread() / 32; }
  __device__ int lane() const { return threadIdx.x % 32; }

  static __device__ float exponent_scale(float scale_log2) { return scale_log2; }
  static __device__ float exponent_scale(const ShapeScale&) { return 1.f; }

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
      if (next_.masked()) hide_keys(n);
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

  // This warpgroup's, whose K goes with V of block_.
  __device__ uint32_t next_block() const { return block_ + block_stride(); }
  // Where in the tile this warpgroup's n-th block is.
  __device__ int tile_block(int n) const {
    if constexpr (!Tile::kSplitsLong) return n;
    return (n << split_) + last_block_;
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
        if constexpr (Masked) hide_keys(n);
      };
      const bool by_maximum = Masked && !next_.masked_by_mask();
      softmax_max_free<T, kDoubleP, Tile::kAnyMask>(
          s_regs_, rows_, scale_log2_, p_out, by_maximum, HiddenScores{scores, hide},
          [&](float (&s)[kSRegs]) { recompute_s(s, next_block()); });
      release_k(next_block());
    } else {
      release_k(next_block());
      scores_of_block(n, next_block()).apply(s_regs_);
      if constexpr (Masked) hide_keys(n);
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

  // This lane's 16 bytes of the 16x16 fragment k of this warp's rows of a Q tile, for ldmatrix and
  // stmatrix.
  __device__ uint32_t fragment_address(uint32_t q_smem, int k) const {
    return tile_address(q_smem, kWarpgroupRows, warp() * 16 + lane() % 16, 2 * k + lane() / 16);
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

  // ---- rows and masks
  // This thread's two rows of the warpgroup's 64. Packed heads are the faster index of a row.
  __device__ int row(int half) const { return warp() * 16 + lane() / 4 + half * 8; }
  // Worked out anew where the registers are for other things.
  __device__ __forceinline__ int row_position(int half) const {
    if constexpr (!Tile::kAnyMask) return row_position_[half];
    int own_row = row(half);
    opaque(own_row);
    return divide(own_row, grid_.by_packed_heads);
  }
  __device__ int packed_head(int half) const {
    return row(half) - row_position(half) * grid_.packed_heads;
  }
  __device__ int query_head(int head, int half) const {
    return head * grid_.packed_heads + packed_head(half);
  }
  // False for the rows that are left over where the packed heads do not divide 64.
  __device__ bool is_row(int half) const { return row_position(half) < grid_.warpgroup_positions; }
  // Of the warpgroup, of the tile's.
  __device__ int first_position(int position) const {
    return position + row_group() * grid_.warpgroup_positions;
  }
  __device__ int position() const {
    const volatile TileWork& work = shared_.work[tile_.work()];
    return work.position;
  }
  __device__ int shift() const {
    const volatile TileWork& work = shared_.work[tile_.work()];
    return work.shift;
  }

  // Made anew for each use: what few steps need is not to occupy registers in all of them.
  __device__ __forceinline__ RowMasks row_masks() const {
    const volatile TileWork& work = shared_.work[tile_.work()];
    const int first = first_position(work.position);
    return {params_, work, first + row_position(0), first + row_position(1)};
  }
  __device__ __forceinline__ void set_shape() {
    const TileWork& work = shared_.work[tile_.work()];
    shape_ = ScoreShape(params_, work, first_position(work.position) + row(0));
  }
  // Of block n, the i-th through all tiles.
  __device__ __forceinline__ auto scores_of_block(int n, uint32_t i) const {
    if constexpr (Tile::kShaped)
      return ShapedScores{shape_, scale_, n * Tile::kBlockKv, [=](bool again, auto f) {
                            if (again)
                              for_each_bias_in_memory(n * Tile::kBlockKv, f);
                            else
                              for_each_bias(i, f);
                          }};
    else
      return PlainScores{scale_log2_};
  }

  // ---- the bias. Its buffer is given back at once, to be full again when the next step wants it.
  template <class F>
  __device__ __forceinline__ void for_each_bias(uint32_t i, F f) const {
    int row = (warp() * 16 + lane() % 16) * scale_.bias_step;
    opaque(row);
    const uint32_t bias_smem = smem_.bias(warpgroup_);
    mbarrier_wait(shared_address(&shared_.bias_full[warpgroup_]), i % 2);
#pragma unroll
    for (int k = 0; k < Tile::kBlockKv / 16; ++k) {
      uint32_t pairs[4];
      ldmatrix_x4(pairs, tile_address(bias_smem, kWarpgroupRows, row, 2 * k + lane() / 16));
      for_each_of(pairs, 8 * k, f);
    }
    __syncwarp();
    if (lane() == 0) mbarrier_arrive(shared_address(&shared_.bias_empty[warpgroup_]));
  }
  // The same for scores that were made again, when the buffer may hold the next block's. Every row
  // sees all of such a block.
  template <class F>
  __device__ __forceinline__ void for_each_bias_in_memory(int first_key, F f) const {
    const volatile TileWork& work = shared_.work[tile_.work()];
    const Broadcast& bias = params_.features.bias;
    const T* rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = first_position(work.position) + row(half);
      rows[half] = static_cast<const T*>(bias.data) + lane() % 4 * 2 +
                   bias.offset(work.batch, work.head, min(position, grid_.q_len - 1), first_key);
    }
#pragma unroll
    for (int k = 0; k < Tile::kBlockKv / 16; ++k) {
      // Never true. The branch keeps the compiler from loading everything at once, for which there
      // are no registers.
      if (first_key + 16 * k >= grid_.kv_len) break;
      uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        pairs[j] = __ldg(reinterpret_cast<const uint32_t*>(rows[j % 2] + 16 * k + j / 2 * 8));
      for_each_of(pairs, 8 * k, f);
    }
  }
  // Of 16 columns, beginning with the score of index `first`.
  template <class F>
  static __device__ __forceinline__ void for_each_of(const uint32_t (&pairs)[4], int first, F f) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 bias = unpack<T>(pairs[j]);
      f(first + 2 * j, bias.x);
      f(first + 2 * j + 1, bias.y);
    }
  }

  __device__ __forceinline__ void hide_keys(int n) {
    if constexpr (Tile::kAnyMask) {
      if (next_.masked_by_mask()) hide_by_mask(s_regs_, mask_bits_);
      if (next_.masked_by_edge() || next_.masked_by_segments())
        row_masks().hide(s_regs_, next_, n * Tile::kBlockKv);
    } else {
      mask_columns<false>(s_regs_, visible_columns(tile_block(n)));
    }
  }
  // Of the step to come, if the mask hides some of its block.
  __device__ __forceinline__ void load_mask_bits() {
    if (!next_.masked_by_mask()) return;
    const PackedMask& mask = grid_.mask;
    const bool same = mask.rows == 1;
    const int block = mask.blocks == 1 ? 0 : next_.block();
    const int own_row = same ? 0 : kWarpgroupRows * warpgroup_ + row(0);
    const int64_t at = shared_.mask_row[tile_.work()] + int64_t{block} * mask.rows + own_row;
    const uint32_t* words = mask.words + at * 4 + lane() % 4;
    mask_bits_.x = load_now_b32(words);
    mask_bits_.y = load_now_b32(same ? words : words + 8 * 4);
  }
  __device__ __forceinline__ void set_row_limits(const TileWalk& walk) {
    const int last_key = walk.kv_len - 1;
    const int diagonal = Tile::kCausal ? first_position(walk.position) + shift() : 0;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      last_key_[half] = Tile::kCausal ? min(diagonal + row_position(half), last_key) : last_key;
  }
  __device__ __forceinline__ VisibleColumns visible_columns(int n) const {
    const int first = n * Tile::kBlockKv, own_column = lane() % 4 * 2;
    return {{last_key_[0] - first - own_column, last_key_[1] - first - own_column},
            __shfl_sync(kWholeWarp, last_key_[0], 0) - first,    // of the warp's first row
            __shfl_sync(kWholeWarp, last_key_[1], 31) - first};  // and of its last
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

  // ---- split tiles. Both warpgroups have the same rows, and take turns at the key blocks. At the
  // end the second one hands its O, sums and references over, 16 bytes a thread and piece.
  __device__ int block_stride() const { return Tile::kSplitsLong ? 1 + split_ : 1; }
  __device__ int first_own_block() const { return Tile::kSplitsLong && split_ ? warpgroup_ : 0; }
  // Which of the tile's groups of 64 rows is this warpgroup's.
  __device__ int row_group() const { return Tile::kSplitsLong && split_ ? 0 : warpgroup_; }

  __device__ __forceinline__ void begin_split_tile(const TileWalk& walk) {
    split_ = is_split<Tile>(grid_, walk.position);
    // What was handed over in the tile before has been read.
    if (split_ && warpgroup_ == 0) named_barrier_arrive(kPartRead, 256);
  }
  __device__ uint32_t piece_of_part(int i) const {
    return smem_.part() + (i * 128 + thread()) * 16;
  }
  __device__ __forceinline__ void hand_over(const TileWalk& walk) {
    named_barrier_sync(kPartRead, 256);
    const auto store = [&](int i, const float (&x)[4]) {
      uint4 words;
      memcpy(&words, x, sizeof words);
      store_shared_16(piece_of_part(i), words);
    };
    store(0, {rows_.ref[0], rows_.ref[1], rows_.sum[0], rows_.sum[1]});
    float one = 1.f;  // accumulators stored as they are make ptxas serialise the products (C7514)
    opaque(one);
#pragma unroll
    for (int i = 0; i < Tile::kValueDim / 8; ++i) {
      const float* o = o_regs_ + 4 * i;
      store(i + 1, {o[0] * one, o[1] * one, o[2] * one, o[3] * one});
    }
    named_barrier_arrive(kPartWritten, 256);
    give_back_q();
    // Turns go round: with a block less than the first, this warpgroup lets one pass.
    if (walk.blocks > 1 && walk.blocks % 2 == 1) {
      take_turn();
      pass_turn();
    }
  }
  // Under the greater of the two references. A row may have met no key here, or there.
  __device__ __forceinline__ void take_over() {
    named_barrier_sync(kPartWritten, 256);
    const auto load = [&](int i, float (&x)[4]) {
      const uint4 words = load_shared_16(piece_of_part(i));
      memcpy(x, &words, sizeof x);
    };
    float other[4], own_weight[2], weight[2];
    load(0, other);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float top = fmaxf(rows_.ref[half], other[half]);
      const float ref = top == -INFINITY ? 0.f : top;
      own_weight[half] = exp2_approx(rows_.ref[half] - ref);
      weight[half] = exp2_approx(other[half] - ref);
      rows_.sum[half] = rows_.sum[half] * own_weight[half] + other[2 + half] * weight[half];
      rows_.ref[half] = top;
    }
#pragma unroll
    for (int i = 0; i < Tile::kValueDim / 8; ++i) {
      float x[4];
      load(i + 1, x);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& o = o_regs_[4 * i + j];
        o = o * own_weight[j / 2] + x[j] * weight[j / 2];
      }
    }
  }

  // ---- the end of a tile: O / sum to memory
  __device__ __forceinline__ void finish_tile(const TileWork& work) {
    if constexpr (Tile::kSplitsLong)
      if (split_) take_over();
    const TilePlace place = load_part<TilePlace>(work);
    const int first = first_position(position());
    const bool v_not_finite = shared_.v_not_finite[tile_.work()];
    // Early where it is the longer way: less is in registers then.
    if (Tile::kAnyMask && v_not_finite) see_not_finite(work);
    float weight[2] = {1.f, 1.f};
    if constexpr (Tile::kAnyMask) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        weight[half] = add_sink(half, place.batch, query_head(place.head, half));
    }
    quad_sums(rows_.sum);
    float inverse[2];
    bool empty[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      empty[half] =
          first + row_position(half) >= place.q_len || rows_.sum[half] == 0.f || !is_row(half);
      inverse[half] = empty[half] ? 0.f : weight[half] * rcp_approx(rows_.sum[half]);
    }
    const bool rare = empty[0] || empty[1] || (!Tile::kAnyMask && v_not_finite);
    if (__any_sync(kWholeWarp, rare)) {
      if (!Tile::kAnyMask && v_not_finite) see_not_finite(work);
#pragma unroll
      for (int i = 0; i < Tile::kValueDim / 2; ++i)  // multiplied, they may be NaN
        if (empty[i / 2 % 2]) o_regs_[i] = 0.f;
    }
    if (params_.lse.data != nullptr) store_lse(place, first, empty);
    if constexpr (Tile::kDirectO)
      store_o(place, first, inverse);
    else
      stage_o(place, first, inverse);
  }

  // From registers: so Q is free long before, and the next tile's is there when this one ends.
  __device__ __forceinline__ void store_o(const TilePlace& place, int first,
                                          const float (&factor)[2]) {
    const Strided& o = params_.o;
    const int own_column = lane() % 4 * 8;
    int value_dim = params_.problem.value_dim;
    opaque(value_dim);  // else predicates are kept for all columns
    T* rows[2];
    bool stored[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      stored[half] = first + row_position(half) < grid_.q_len && is_row(half);
      rows[half] = static_cast<T*>(o.data) + static_cast<uint32_t>(place.batch) * o.batch +
                   static_cast<uint32_t>(first + row_position(half)) * o.seq +
                   static_cast<uint32_t>(query_head(place.head, half)) * o.head + own_column;
    }
#pragma unroll
    for (int column = 0; column < Tile::kValueDim; column += 32) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* own = o_regs_ + column / 2 + 4 * i + 2 * half;
          pairs[i] = pack<T>(own[0] * factor[half], own[1] * factor[half]);
        }
        transpose_in_quad(pairs);
        if (stored[half] && column + own_column < value_dim)
          store_global_16(rows[half] + column, pairs);
      }
    }
  }

  // Through this warpgroup's own Q rows.
  __device__ __forceinline__ void stage_o(const TilePlace& place, int first,
                                          const float (&factor)[2]) {
    const uint32_t q_smem = smem_.q(tile_.q_stage, warpgroup_);
#pragma unroll
    for (int i = 0; i < Tile::kValueDim / 2; ++i) o_regs_[i] *= factor[i / 2 % 2];
#pragma unroll
    for (int k = 0; k < Tile::kValueDim / 16; ++k) {
      const float* o = o_regs_ + 8 * k;
      stmatrix_x4(fragment_address(q_smem, k), pack<T>(o[0], o[1]), pack<T>(o[2], o[3]),
                  pack<T>(o[4], o[5]), pack<T>(o[6], o[7]));
    }
    fence_async_proxy();
    named_barrier_sync(kOwnThreads + warpgroup_, 128);
    if (thread() == 0) {
#pragma unroll
      for (int chunk = 0; chunk < Tile::kValueChunks; ++chunk)
        tma_store_packed(&maps_.o, q_smem + chunk * Tile::kQChunkBytes, chunk * 64, first,
                         place.head, place.batch);
      bulk_commit();
    }
    give_back_q();
  }
  // Once O has left it.
  __device__ __forceinline__ void give_back_q() {
    unreleased_q_ = shared_address(&shared_.barriers.q_empty[tile_.q_stage][0]);
    if constexpr (Tile::kQStages == 1) release_previous_q();
  }

  // A sink is one more logit, without a value. It joins the row's sum, under the greater reference
  // of the two; returns what O has to be multiplied with to follow.
  __device__ __forceinline__ float add_sink(int half, int batch, int query_head) {
    const Table<const float>& sinks = params_.features.sinks;
    if (!sinks || !is_row(half)) return 1.f;
    const float sink = __ldg(sinks.row(batch) + query_head) * kLog2e;
    const float top = fmaxf(rows_.ref[half], sink);
    if (top == -INFINITY) return 1.f;
    const float weight = exp2_approx(rows_.ref[half] - top);
    const float own_share = lane() % 4 == 0 ? exp2_approx(sink - top) : 0.f;
    rows_.sum[half] = fmaf(rows_.sum[half], weight, own_share);
    rows_.ref[half] = top;
    return weight;
  }

  // Adds the values that the inspector took out to the rows that see them. Rare, so from memory.
  // Values of other blocks in the range are in the product already, and add nothing new.
  __device__ __forceinline__ void see_not_finite(const TileWork& work) {
    const T* v = static_cast<const T*>(params_.v.data) +
                 params_.v.offset(work.v_batch, 0, work.kv_head) + lane() % 4 * 2;
    const KeyRange keys = inspected_keys(work);
#pragma unroll 1
    for (int key = keys.begin; key <= keys.end - 1; ++key) {
      if constexpr (Tile::kAnyMask) {
        const RowMasks masks = row_masks();
        see_value(v + key * params_.v.seq, masks.sees(0, key), masks.sees(1, key));
      } else {
        see_value(v + key * params_.v.seq, key <= last_key_[0], key <= last_key_[1]);
      }
    }
  }
  __device__ __forceinline__ void see_value(const T* v, bool seen0, bool seen1) {
    if (!__any_sync(kWholeWarp, seen0 || seen1)) return;
    int value_dim = params_.problem.value_dim;
    opaque(value_dim);  // else predicates are kept for all columns
#pragma unroll
    for (int i = 0; i < Tile::kValueDim / 2; ++i) {
      const int column = i / 4 * 8 + i % 2;
      // A branch, without which the compiler loads everything at once and spills for it.
      if (i % 16 == 0 && column >= value_dim) break;
      if (column + lane() % 4 * 2 >= value_dim) continue;
      const float value = static_cast<float>(v[column]);
      if (!isfinite(value) && (i / 2 % 2 == 0 ? seen0 : seen1)) o_regs_[i] += value;
    }
  }
  __device__ __forceinline__ KeyRange inspected_keys(const TileWork& work) const {
    if constexpr (Tile::kAnyMask) {
      return {shared_.first_not_finite[tile_.work()] * Tile::kBlockKv,
              min(shared_.end_not_finite[tile_.work()] * Tile::kBlockKv, work.kv_len)};
    } else {
      return {work.first_inspected * Tile::kBlockKv,
              __shfl_sync(kWholeWarp, last_key_[1], 31) + 1};  // of the warp's last row
    }
  }

  __device__ __forceinline__ void store_lse(const TilePlace& place, int first,
                                            const bool (&empty)[2]) {
    const Rows& rows = params_.lse;
    // Of numbers that are not negative: half the instructions of a product with its sign.
    const auto offset = [&](uint32_t position, uint32_t head) {
      return position * rows.seq + head * rows.head;
    };
    float* const lse = static_cast<float*>(rows.data) +
                       static_cast<uint32_t>(place.batch) * rows.batch +
                       offset(first, place.head * grid_.packed_heads);
    if (lane() % 4 != 0) return;
    float value[2];
    int64_t of_row[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      value[half] =
          empty[half] ? -INFINITY : (rows_.ref[half] + log2_approx(rows_.sum[half])) * kLn2;
      of_row[half] = offset(row_position(half), packed_head(half));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (first + row_position(half) < grid_.q_len && is_row(half)) lse[of_row[half]] = value[half];
  }

  // This warpgroup's rows of Q once the tile's last scores are there. By every warp, since a warp
  // may read them again (recompute_s). Also says that it has left the tile before.
  __device__ __forceinline__ void release_read_q() {
    if constexpr (Tile::kDirectO)
      if (lane() == 0)
        mbarrier_arrive(shared_address(&shared_.barriers.q_empty[tile_.q_stage][warpgroup_]));
  }
  // The Q buffer of the tile before, once its O has left it: late, so that nobody waits for the
  // store.
  __device__ __forceinline__ void release_previous_q() {
    if (Tile::kDirectO || unreleased_q_ == 0) return;
    if (thread() == 0) {
      bulk_wait_read<0>();
      mbarrier_arrive(unreleased_q_);
    }
    unreleased_q_ = 0;
  }

  const PrefillMaps& maps_;
  const PrefillParams& params_;
  const TileGrid& grid_;
  const float scale_log2_;  // of the softmax's exponent
  const PrefillScale<Tile>& scale_;
  std::conditional_t<Tile::kShaped, ScoreShape, std::monostate> shape_;
  const PrefillSmem<Tile> smem_;
  PrefillShared<Tile>& shared_;
  const int warpgroup_;
  int split_;       // 1 in a split tile, else 0; where there are any
  int last_block_;  // this warpgroup's last one in the tile: 0 or, of a split one, 1

  float s_regs_[kSRegs], o_regs_[Tile::kValueDim / 2];
  uint32_t p_a_regs_[kPRegs], p_b_regs_[kPRegs];
  OnlineRows rows_;
  int row_position_[2];  // of each of this thread's rows, from the warpgroup's first position
  int last_key_[2];      // that each row sees, where that is all there is to know
  FoundBlock next_;      // of the step to come, and whether the one before was the tile's last; any
  bool was_last_;        // mask only
  uint2 mask_bits_;      // of its block, see PackedMask
  uint32_t q_low_ = 0;
  uint32_t block_ = 0;  // K/V blocks so far, through all tiles
  TileCount<Tile> tile_;
  uint32_t unreleased_q_ = 0;
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_PREFILL_CONSUMER_SM90_CUH_
