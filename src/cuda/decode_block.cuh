// Which part of a decode call a block computes.
#ifndef FLASHATTN_CUDA_DECODE_BLOCK_CUH_
#define FLASHATTN_CUDA_DECODE_BLOCK_CUH_

#include "decode_plan.h"
#include "fast_divisor.cuh"
#include "ptx.cuh"

namespace flashattn {

// Entry b of an operand with fewer batches: b % batches, whose division is hardly ever needed.
__device__ __forceinline__ int batch_entry(int b, int batches) {
  return b < batches ? b : b % batches;
}

// What the kernels take beside the parameters; the same for every block.
struct DecodeArgs {
  DecodeParams params;
  DecodePlan plan;
  float scale_log2;  // scale * log2(e), at least kSmallestScale
  float softcap;     // 0: none
  FastDivisor group, row_blocks, splits, page_size;
};

// A scale of 0 would turn the -inf of a masked score into NaN; this one gives the same weights.
constexpr float kSmallestScale = 1e-37f;
// The running maximum before any score. Finite, so that the merge has no infinities to subtract.
constexpr float kNoScore = -1e30f;
// The maximum may lag behind by this much: weights grow to 2^8, and most tiles need no rescaling.
constexpr float kMaxLag = 8.0f;

// Query rows of a kv head are ordered by token, then by head of the group.
__device__ __forceinline__ int token_of_row(int row, const DecodeArgs& args) {
  return args.params.problem.q_len == 1 ? 0 : divide(row, args.group);
}

// One query row, and where its results go.
struct DecodeRow {
  int batch, token, head;

  __device__ DecodeRow(const DecodeArgs& args, int b, int kv_head, int row)
      : batch(b), token(token_of_row(row, args)), head(0) {
    const int group = args.params.problem.group();
    head = kv_head * group + row - token * group;
  }
};

// The part of the call that one block computes.
struct DecodeBlock {
  int batch, kv_head;
  int split, splits;     // this block's share of the keys: tiles split, split + splits, ...
  int64_t partial_slot;  // when there are several
  int first_row, rows;   // of the q_len * group query rows of the kv head; row = i * group + head
  int length;
  KeyRange keys;      // that any row of the block sees
  KeyRange interior;  // that every row sees

  __device__ KeyRange keys_of(int row, const DecodeArgs& args) const {
    return visible_keys(args.params.scores, token_of_row(row, args), args.params.problem.q_len,
                        length);
  }
  // Columns of the last block behind the rows repeat the last row; they are never stored.
  __device__ int row_of_column(int column) const { return first_row + min(column, rows - 1); }
};

__device__ __forceinline__ void find_keys(DecodeBlock& block, const DecodeArgs& args, int length) {
  block.length = clamp_length(length, args.params.problem.kv_len);
  const KeyRange first = block.keys_of(block.first_row, args);
  const KeyRange last = block.keys_of(block.first_row + block.rows - 1, args);
  block.keys = {first.begin, last.end};
  block.interior = {last.begin, first.end};
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_DECODE_BLOCK_CUH_
