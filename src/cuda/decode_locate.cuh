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
    for (int b = lane; b < args.params.problem.batch; b += 32) units += units_of(b);
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) units += __shfl_xor_sync(~0u, units, lanes);
    parts_per_unit_ =
        static_cast<float>(args.plan.extra_blocks) / static_cast<float>(max(1, units));
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
    const int batch = args_.params.problem.batch;
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
    const DecodeParams& params = args_.params;
    const int length = clamp_length(params.seq_lens.data[batch_entry(b, params.seq_lens.batches)],
                                    params.problem.kv_len);
    const int window = params.scores.window_left;
    const int seen =
        window == kUnlimited ? length : min_int(length, int64_t{window} + params.problem.q_len);
    return divide_up(seen, kUnit);
  }

  const DecodeArgs& args_;
  int lane_;
  float parts_per_unit_;
};

// Blocks along x: split fastest, so that they form clusters, then row blocks, which share tokens,
// then sequences, behind the extra blocks of a ragged batch. Along y: kv heads. False: nothing to
// do.
template <class Shape>
__device__ __forceinline__ bool locate_block(DecodeBlock& block, const DecodeArgs& args, int lane) {
  const Problem& problem = args.params.problem;
  const int sequence_rows = divide(blockIdx.x, args.splits);
  const int sequence = divide(sequence_rows, args.row_blocks);
  block.kv_head = blockIdx.y;
  block.first_row = (sequence_rows - sequence * args.plan.row_blocks) * Shape::kRows;
  block.rows = min(Shape::kRows, problem.q_len * problem.group() - block.first_row);

  const int extra_blocks = args.plan.extra_blocks;
  if (extra_blocks == 0) {
    block.batch = sequence;
    block.splits = args.plan.splits;
    block.split = blockIdx.x - sequence_rows * block.splits;
    const int64_t pair = int64_t{sequence} * problem.kv_heads + block.kv_head;
    block.partial_slot = pair * block.splits + block.split;
    return true;
  }
  const RaggedCut cut(args, lane);
  if (sequence >= extra_blocks) {
    block.batch = sequence - extra_blocks;
    block.split = 0;
    block.partial_slot = int64_t{block.batch} * problem.kv_heads + block.kv_head;
  } else {
    const RaggedCut::Part part = cut.extra_block(sequence);
    if (part.batch < 0) return false;
    block.batch = part.batch;
    block.split = part.split;
    block.partial_slot = int64_t{problem.batch} * problem.kv_heads +
                         int64_t{block.kv_head} * extra_blocks + sequence;
  }
  block.splits = cut.splits_of(block.batch);
  return true;
}

// Where the parts of a (sequence, kv head) have left their partial outputs.
struct PartialSlots {
  int splits;
  int64_t first, second;  // of part 0; of part 1, which the others follow

  __device__ PartialSlots(const DecodeArgs& args, int b, int kv_head, int lane) {
    const Problem& problem = args.params.problem;
    const int64_t pair = int64_t{b} * problem.kv_heads + kv_head;
    splits = args.plan.splits;
    first = pair * splits;
    second = first + 1;
    if (args.plan.extra_blocks == 0) return;
    const RaggedCut cut(args, lane);
    splits = cut.splits_of(b);
    if (splits > 1)
      second = int64_t{problem.batch} * problem.kv_heads +
               int64_t{kv_head} * args.plan.extra_blocks + cut.extras_before(b);
  }
  __device__ int64_t of_part(int part) const { return part == 0 ? first : second + part - 1; }
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_DECODE_LOCATE_CUH_
