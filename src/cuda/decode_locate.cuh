// From the index of a block to its sequence, kv head, query rows and share of the keys; and the cut
// of ragged batches, which depends on the lengths and so is found on the device.
#ifndef FLASHATTN_CUDA_DECODE_LOCATE_CUH_
#define FLASHATTN_CUDA_DECODE_LOCATE_CUH_

#include "decode_block.cuh"

namespace flashattn {

// Every sequence has one block for each kv head. Only sequences much longer than a block's fair
// share of the batch are cut, into parts of half that share, and the parts beyond the first go to
// extra blocks. Every warp that asks works the cut out for itself: it is a sum over the lengths.
class RaggedCut {
 public:
  __device__ RaggedCut(const DecodeArgs& args, int lane) : args_(args), lane_(lane) {
    int units = 0;
    for (int b = lane; b < args.batch; b += 32) units += units_of(b);
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) units += __shfl_xor_sync(~0u, units, lanes);
    parts_per_unit_ = static_cast<float>(args.extra_blocks) / static_cast<float>(max(1, units));
  }

  __device__ int splits_of(int b) const {
    const int units = units_of(b);
    const float parts = static_cast<float>(units) * parts_per_unit_;
    if (parts <= kUncutParts) return 1;
    return max(1, min(static_cast<int>(ceilf(parts)), units / kLeastUnits));
  }

  // Extra blocks of the sequences before b. There are fewer than plan.extra_blocks in all, since
  // the parts of a batch add up to that number and each sequence leaves one to its own block.
  __device__ int extras_before(int b) const {
    int extras = 0;
    for (int i = lane_; i < b; i += 32) extras += splits_of(i) - 1;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) extras += __shfl_xor_sync(~0u, extras, lanes);
    return extras;
  }

  struct Part {
    int batch, split;  // batch -1: there is no such extra block
  };
  __device__ Part extra_block(int extra) const {
    const int batch = args_.batch;
    for (int first = 0; first < batch; first += 32) {
      const int b = first + lane_;
      const int own = b < batch ? splits_of(b) - 1 : 0;
      int through = own;  // inclusive prefix sum
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int before = __shfl_up_sync(~0u, through, lanes);
        if (lane_ >= lanes) through += before;
      }
      const uint32_t reached = __ballot_sync(~0u, through > extra);
      if (reached != 0) {
        const int found = __ffs(reached) - 1;
        return {first + found, __shfl_sync(~0u, extra - (through - own) + 1, found)};
      }
      extra -= __shfl_sync(~0u, through, 31);
    }
    return {-1, 0};
  }

 private:
  static constexpr int kUnit = 16;  // tokens
  static constexpr int kLeastUnits = 8;
  // There are two parts to a fair share; a sequence up to a quarter longer than that stays whole.
  static constexpr float kUncutParts = 2.5f;

  __device__ int units_of(int b) const {
    const int length =
        clamp_length(args_.lengths[batch_entry(b, args_.length_batches)], args_.capacity);
    return divide_up(min_int(length, int64_t{args_.window} + args_.last_token + 1), kUnit);
  }

  const DecodeArgs& args_;
  int lane_;
  float parts_per_unit_;
};

// The sequence, and the part of it, that the index-th place along x stands for.
struct RaggedPart {
  int batch, split, splits;  // splits 0: there is no such place
};
// Not inlined, so that other batches do not have to fetch past it.
static __device__ __noinline__ RaggedPart locate_part(const DecodeArgs& args, int index, int lane) {
  const RaggedCut cut(args, lane);
  if (index < args.extra_blocks) {
    const RaggedCut::Part part = cut.extra_block(index);
    return {part.batch, part.split, part.batch < 0 ? 0 : cut.splits_of(part.batch)};
  }
  const int batch = index - args.extra_blocks;
  return {batch, 0, cut.splits_of(batch)};
}

// Blocks along x: split fastest, so that they form clusters, then row blocks, which share tokens,
// then sequences, behind the extra blocks of a ragged batch. Along y: kv heads. False: nothing to
// do.
template <class Shape>
__device__ __forceinline__ bool locate_block(DecodeBlock& block, const DecodeArgs& args, int lane) {
  const int sequence_rows = divide(blockIdx.x, args.splits);
  const int sequence = divide(sequence_rows, args.row_blocks);
  block.kv_head = blockIdx.y;
  block.first_row =
      (sequence_rows - sequence * static_cast<int>(args.row_blocks.divisor)) * Shape::kRows;
  block.rows = min(Shape::kRows, args.query_rows - block.first_row);

  block.place = block.batch = sequence;
  block.splits = static_cast<int>(args.splits.divisor);
  block.split = blockIdx.x - sequence_rows * block.splits;
  if (args.extra_blocks > 0) {
    const RaggedPart part = locate_part(args, sequence, lane);
    if (part.splits == 0) return false;
    block.batch = part.batch;
    block.split = part.split;
    block.splits = part.splits;
  }
  return true;
}

// Where the parts of a (sequence, kv head) have left their partial outputs.
struct PartialSlots {
  int splits;
  int64_t first, second;  // of part 0; of part 1, which the others follow

  __device__ PartialSlots(const DecodeArgs& args, int b, int kv_head, int lane) {
    const int64_t pair = int64_t{b} * args.kv_heads + kv_head;
    splits = static_cast<int>(args.splits.divisor);
    first = pair * splits;
    second = first + 1;
    if (args.extra_blocks == 0) return;
    const RaggedCut cut(args, lane);
    splits = cut.splits_of(b);
    if (splits > 1)
      second = int64_t{args.batch} * args.kv_heads + int64_t{kv_head} * args.extra_blocks +
               cut.extras_before(b);
  }
  __device__ int64_t of_part(int part) const { return part == 0 ? first : second + part - 1; }
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_DECODE_LOCATE_CUH_
