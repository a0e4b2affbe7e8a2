// Which blocks of keys a tile visits where any mask may apply, and which of them need no mask.
//
// The window leaves a range of blocks, of which those at its edges are masked. Segments and what is
// known of a mask are looked at for 32 blocks at a time: blocks without a visible key are not even
// loaded, and those that all rows see as a whole go the way of an unmasked block.
#ifndef FLASHATTN_CUDA_BLOCK_FINDER_SM90_CUH_
#define FLASHATTN_CUDA_BLOCK_FINDER_SM90_CUH_

#include <climits>
#include <cstdint>

#include "mask_bits.h"
#include "params.h"
#include "score.cuh"
#include "tile_scheduler.cuh"

namespace flashattn {

// A block of keys to visit, and what hides some of it, in one word.
class FoundBlock {
 public:
  static constexpr int kLast = 1, kEdge = 2, kMask = 4, kSegments = 8, kShift = 4;

  FoundBlock() = default;  // so that it can lie in shared memory
  __device__ FoundBlock(int block, int flags) : code_((block << kShift) + flags) {}

  static __device__ FoundBlock none() { return {-1, 0}; }
  __device__ FoundBlock as_last(bool last) const {
    return {block(), code_ & ~(~0 << kShift) | last};
  }

  __device__ bool exists() const { return code_ >= 0; }
  __device__ int block() const { return code_ >> kShift; }
  __device__ bool last() const { return code_ & kLast; }                          // of the tile
  __device__ bool masked() const { return code_ & (kEdge | kMask | kSegments); }  // by any of:
  __device__ bool masked_by_edge() const { return code_ & kEdge; }                // the window's
  __device__ bool masked_by_mask() const { return code_ & kMask; }
  __device__ bool masked_by_segments() const { return code_ & kSegments; }

 private:
  int code_;
};

// All calls are a whole warp's.
template <int BlockKv>
class BlockFinder {
 public:
  __device__ BlockFinder(const PrefillParams& params, const PackedMask& mask)
      : params_(params), mask_(mask), looks_at_(0) {
    if (params.features.key_segments) looks_at_ |= FoundBlock::kSegments;
    if (mask.words) looks_at_ |= FoundBlock::kMask;
  }

  // Begins with a tile of so many query positions.
  __device__ __forceinline__ void start(const TileWork& work, int positions) {
    const Sequence sequence(params_, work.batch);
    const int first_row = work.position, last_row = min(first_row + positions, work.q_len) - 1;
    const Range keys = sequence.keys_seen_by(first_row, last_row);
    if (first_row > last_row || keys.begin >= keys.end) return stop();
    batch_ = work.batch;
    kv_len_ = work.kv_len;
    first_block_ = keys.begin / BlockKv;
    block_ = (keys.end + BlockKv - 1) / BlockKv;
    // From the first key that the last row sees to the last one that the first row does.
    const int whole_begin = max_int(0, int64_t{last_row} + sequence.low);
    const int whole_end = min_int(kv_len_, int64_t{first_row} + sequence.high + 1);
    first_whole_ = (whole_begin + BlockKv - 1) / BlockKv;
    end_whole_ = max(whole_end, 0) / BlockKv;
    known_from_ = INT_MAX;
    if (looks_at_ & FoundBlock::kSegments) find_row_segments(first_row, last_row);
    if (looks_at_ & FoundBlock::kMask) {
      const int tile = mask_.tiles == 1 ? 0 : first_row / positions;
      mask_seen_ =
          mask_.seen + (mask_.plane(work.batch, work.head) * mask_.tiles + tile) * mask_.blocks;
    }
  }
  __device__ __forceinline__ void stop() { first_block_ = block_ = 0; }

  // The tile's blocks from the last to the first, then none.
  __device__ __forceinline__ FoundBlock next() {
    --block_;
    int looks_at = looks_at_;
    opaque(looks_at);  // else what is known of it occupies predicates, and those spill
    if (looks_at) skip_hidden(looks_at);
    if (block_ < first_block_) return FoundBlock::none();
    int flags = block_ < first_whole_ || block_ >= end_whole_ ? FoundBlock::kEdge : 0;
    if (looks_at && !(whole_ >> (block_ - known_from_) & 1)) flags |= looks_at;
    return {block_, flags};
  }

 private:
  __device__ __forceinline__ void skip_hidden(int looks_at) {
    for (; block_ >= first_block_; block_ = known_from_ - 1) {
      if (block_ < known_from_) look(looks_at);
      const uint32_t left = visible_ & ~0u >> (31 - (block_ - known_from_));
      if (left == 0) continue;
      block_ = known_from_ + 31 - __clz(left);
      return;
    }
  }

  __device__ __forceinline__ void find_row_segments(int first_row, int last_row) {
    const int32_t* segments = params_.features.query_segments.row(batch_);
    row_segments_ = {};
#pragma unroll 1
    for (int i = first_row + static_cast<int>(threadIdx.x % 32); i <= last_row; i += 32)
      row_segments_.include(__ldg(segments + i));
    row_segments_.gather();
  }

  // At the block and the 31 before it.
  __device__ __forceinline__ void look(int looks_at) {
    known_from_ = block_ - 31;
    const int first = max(known_from_, first_block_);
    visible_ = whole_ = ~0u << (first - known_from_);
    if (looks_at & FoundBlock::kSegments) look_at_segments(first);
    if (looks_at & FoundBlock::kMask) look_at_mask(first);
  }

  // Unrolled, so that several blocks' loads are under way at once.
  __device__ __forceinline__ void look_at_segments(int first) {
    const int32_t* segments = params_.features.key_segments.row(batch_);
#pragma unroll 2
    for (int n = first; n <= block_; ++n) {
      SegmentRange block;
      for_own_keys(n, [&](int key) { block.include(__ldg(segments + key)); });
      block.gather();
      note(n, block.overlaps(row_segments_), row_segments_.is_only(block));
    }
  }
  // A block a lane.
  __device__ __forceinline__ void look_at_mask(int first) {
    const int n = max(known_from_ + static_cast<int>(threadIdx.x % 32), first);
    const int seen = __ldg(mask_seen_ + (mask_.blocks == 1 ? 0 : n));
    visible_ &= __ballot_sync(~0u, (seen & PackedMask::kAny) != 0);
    whole_ &= __ballot_sync(~0u, (seen & PackedMask::kAll) != 0);
  }
  // This lane's keys of a block; the sequence's last stands for those beyond.
  template <class F>
  __device__ __forceinline__ void for_own_keys(int n, F&& f) const {
    const int last = min(n * BlockKv + BlockKv, kv_len_) - 1;
#pragma unroll
    for (int i = 0; i < BlockKv; i += 32)
      f(min(n * BlockKv + i + static_cast<int>(threadIdx.x % 32), last));
  }
  __device__ void note(int n, bool visible, bool whole) {
    if (!visible) visible_ &= ~(1u << (n - known_from_));
    if (!whole) whole_ &= ~(1u << (n - known_from_));
  }

  const PrefillParams& params_;
  const PackedMask& mask_;
  int looks_at_;  // beside a window, in the bits of FoundBlock
  int batch_, kv_len_;
  int block_, first_block_;      // the last one found; the first that the window leaves
  int first_whole_, end_whole_;  // the blocks of which it hides nothing
  SegmentRange row_segments_;
  const uint8_t* mask_seen_;  // of the tile's rows, a byte a block
  int known_from_;            // visible_ and whole_ tell of 32 blocks from here on:
  uint32_t visible_, whole_;  // some row sees a key; all rows see all keys but for the window
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_BLOCK_FINDER_SM90_CUH_
