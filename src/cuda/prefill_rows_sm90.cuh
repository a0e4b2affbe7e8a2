// The rows of a warpgroup that multiplies: which ones it and each thread has, which key blocks of a
// split tile are its own, and what happens to their scores ahead of the softmax: masks, and what
// shapes them.
#ifndef FLASHATTN_CUDA_PREFILL_ROWS_SM90_CUH_
#define FLASHATTN_CUDA_PREFILL_ROWS_SM90_CUH_

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

template <class T, class Tile>
class PrefillRows {
 protected:
  __device__ PrefillRows(const PrefillParams& params, const TileGrid& grid,
                         const PrefillScale<Tile>& scale, PrefillSmem<Tile> smem,
                         PrefillShared<Tile>& shared, int warpgroup)
      : params_(params),
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

  __device__ int thread() const { return threadIdx.x % 128; }
  __device__ int warp() const { return thread() / 32; }
  __device__ int lane() const { return threadIdx.x % 32; }

  // ---- rows
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

  // This lane's 16 bytes of the 16x16 fragment k of this warp's rows of a Q tile, for ldmatrix and
  // stmatrix.
  __device__ uint32_t fragment_address(uint32_t q_smem, int k) const {
    return tile_address(q_smem, kWarpgroupRows, warp() * 16 + lane() % 16, 2 * k + lane() / 16);
  }

  // ---- split tiles. Both warpgroups have the same rows, and take turns at the key blocks.
  __device__ int block_stride() const { return Tile::kSplitsLong ? 1 + split_ : 1; }
  __device__ int first_own_block() const { return Tile::kSplitsLong && split_ ? warpgroup_ : 0; }
  // Which of the tile's groups of 64 rows is this warpgroup's.
  __device__ int row_group() const { return Tile::kSplitsLong && split_ ? 0 : warpgroup_; }
  // This warpgroup's, whose K goes with V of block_.
  __device__ uint32_t next_block() const { return block_ + block_stride(); }
  // Where in the tile this warpgroup's n-th block is.
  __device__ int tile_block(int n) const {
    if constexpr (!Tile::kSplitsLong) return n;
    return (n << split_) + last_block_;
  }

  // ---- masks
  // Made anew for each use: what few steps need is not to occupy registers in all of them.
  __device__ __forceinline__ RowMasks row_masks() const {
    const volatile TileWork& work = shared_.work[tile_.work()];
    const int first = first_position(work.position);
    return {params_, work, first + row_position(0), first + row_position(1)};
  }
  // Scores of block n that these rows do not see become -inf.
  template <int N>
  __device__ __forceinline__ void hide_keys(float (&s)[N], int n) const {
    if constexpr (Tile::kAnyMask) {
      if (next_.masked_by_mask()) hide_by_mask(s, mask_bits_);
      if (next_.masked_by_edge() || next_.masked_by_segments())
        row_masks().hide(s, next_, n * Tile::kBlockKv);
    } else {
      mask_columns<false>(s, visible_columns(tile_block(n)));
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

  // ---- what shapes scores
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

  const PrefillParams& params_;
  const TileGrid& grid_;
  const float scale_log2_;  // of the softmax's exponent
  const PrefillScale<Tile>& scale_;
  std::conditional_t<Tile::kShaped, ScoreShape, std::monostate> shape_;
  const PrefillSmem<Tile> smem_;
  PrefillShared<Tile>& shared_;
  const int warpgroup_;
  int split_;            // 1 in a split tile, else 0; where there are any
  int last_block_;       // this warpgroup's last one in the tile: 0 or, of a split one, 1
  int row_position_[2];  // of each of this thread's rows, from the warpgroup's first position
  int last_key_[2];      // that each row sees, where that is all there is to know
  FoundBlock next_;      // of the step to come; any mask only
  uint2 mask_bits_;      // of its block, see PackedMask
  uint32_t block_ = 0;   // K/V blocks so far, through all tiles
  TileCount<Tile> tile_;

 private:
  static __device__ float exponent_scale(float scale_log2) { return scale_log2; }
  static __device__ float exponent_scale(const ShapeScale&) { return 1.f; }
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_PREFILL_ROWS_SM90_CUH_
