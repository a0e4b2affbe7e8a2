// What the decode kernels are given, and which part of a call a block computes.
#ifndef FLASHATTN_CUDA_DECODE_BLOCK_CUH_
#define FLASHATTN_CUDA_DECODE_BLOCK_CUH_

#include <algorithm>

#include "decode_plan.h"
#include "fast_divisor.cuh"
#include "ptx.cuh"

namespace flashattn {

// K or V. Strides are in bytes.
struct DecodeCache {
  const char* data;
  int64_t page, token, head;  // contiguous: a page for each of `batches` sequences
  FastDivisor batches;
  int row_chunks;  // of 16 bytes
};

// What decode_kernel and decode_combine.cuh read, in about the order in which they do: a short call
// meets its parameters cold.
struct DecodeArgs {
  FastDivisor splits, row_blocks;
  int extra_blocks;
  int query_rows;  // of a kv head
  const int32_t* lengths;
  FastDivisor length_batches;
  int capacity;

  FastDivisor group;
  int last_token;  // of the new ones, which count from 0
  int head_dim;
  FastDivisor query_batches;
  const char* query;
  int64_t query_sequence, query_token, query_head;  // in bytes

  int window;  // keys that a row sees in front of its own, at most the capacity
  int warps, stages, cluster;
  DecodeSmem smem;
  DecodeCache keys, values;
  const int32_t* page_table;  // null: contiguous
  FastDivisor table_batches, page_size;
  int table_width;
  int num_pages;  // contiguous: 1

  float scale_log2;         // scale * log2(e), at least kSmallestScale
  float softcap;            // 0: none
  const float* key_scales;  // null: a 16-bit cache
  const float* value_scales;
  int key_scale_page, value_scale_page;  // from page to page; 0: all pages share them

  int batch, kv_heads, value_dim;
  FastDivisor sink_batches;
  const float* sinks;  // null: none
  int64_t sinks_width;
  void* out;
  int64_t out_sequence, out_token, out_head;
  float* lse;  // null: not wanted
  int64_t lse_sequence, lse_token, lse_head;
  float* partial_outs;
  float4* partial_stats;
};

// Operands that vmap does not map have fewer batches than the call and are read again.
__device__ __forceinline__ int batch_entry(int b, const FastDivisor& batches) {
  return remainder(b, batches);
}

// A scale of 0 would turn the -inf of a masked score into NaN; this one gives the same weights.
constexpr float kSmallestScale = 1e-37f;
// The running maximum before any score. Finite, so that the merge has no infinities to subtract.
constexpr float kNoScore = -1e30f;
// The maximum may lag behind by this much: weights grow to 2^8, and most tiles need no rescaling.
constexpr float kMaxLag = 8.0f;

// One query row, and where its results go. Query rows of a kv head are ordered by token, then by
// head of the group.
struct DecodeRow {
  int batch, token, head;

  __device__ DecodeRow(const DecodeArgs& args, int b, int kv_head, int row)
      : batch(b), token(divide(row, args.group)), head(0) {
    const int group = static_cast<int>(args.group.divisor);
    head = kv_head * group + row - token * group;
  }
};

// The part of the call that one block computes.
struct DecodeBlock {
  int batch, kv_head;
  int split, splits;    // this block's share of the keys: tiles split, split + splits, ...
  int place;            // along x, apart from splits and row blocks
  int first_row, rows;  // of the query rows of the kv head
  int length;
  KeyRange keys;      // that any row of the block sees
  KeyRange interior;  // that every row sees

  // The same as visible_keys() of the row's token.
  __device__ KeyRange keys_of(int row, const DecodeArgs& args) const {
    const int end = length - args.last_token + divide(row, args.group);
    return {max(0, end - 1 - args.window), end};
  }
  // Columns of the last block behind the rows repeat the last row; they are never stored.
  __device__ int row_of_column(int column) const { return first_row + min(column, rows - 1); }

  // Where its partial output goes when there are several splits. Those of extra blocks come behind
  // all others.
  __device__ int64_t partial_slot(const DecodeArgs& args) const {
    if (place < args.extra_blocks)
      return int64_t{args.batch} * args.kv_heads + int64_t{kv_head} * args.extra_blocks + place;
    const int64_t pair = int64_t{batch} * args.kv_heads + kv_head;
    return pair * static_cast<int>(args.splits.divisor) + split;
  }

  __device__ void find_keys(const DecodeArgs& args, int found_length) {
    length = clamp_length(found_length, args.capacity);
    const KeyRange first = keys_of(first_row, args);
    const KeyRange last = keys_of(first_row + rows - 1, args);
    keys = {first.begin, last.end};
    interior = {last.begin, first.end};
  }
};

// ---- Host

inline DecodeCache decode_cache(const Strided& cache, int width, int dims) {
  return {static_cast<const char*>(cache.data),
          cache.batch * width,
          cache.seq * width,
          cache.head * width,
          FastDivisor(std::max(1, cache.batches)),
          dims * width / 16};
}

inline DecodeArgs decode_args(const DecodeParams& params, const DecodePlan& plan) {
  const Problem& problem = params.problem;
  const int width = byte_width(params.cache_dtype);
  const auto from_page_to_page = [&](const Table<const float>& scales) {
    return scales.batches > 1 ? static_cast<int>(scales.width) : 0;
  };
  DecodeArgs args = {};
  args.splits = FastDivisor(plan.splits);
  args.row_blocks = FastDivisor(plan.row_blocks);
  args.extra_blocks = plan.extra_blocks;
  args.query_rows = problem.q_len * problem.group();
  args.lengths = params.seq_lens.data;
  args.length_batches = FastDivisor(params.seq_lens.batches);
  args.capacity = problem.kv_len;
  args.group = FastDivisor(problem.group());
  args.last_token = problem.q_len - 1;
  args.head_dim = problem.head_dim;
  args.query_batches = FastDivisor(params.q.batches);
  args.query = static_cast<const char*>(params.q.data);
  args.query_sequence = params.q.batch * byte_width(problem.dtype);
  args.query_token = params.q.seq * byte_width(problem.dtype);
  args.query_head = params.q.head * byte_width(problem.dtype);
  args.window = std::min(params.scores.window_left, problem.kv_len);
  args.warps = plan.warps;
  args.stages = plan.stages;
  args.cluster = plan.cluster;
  args.smem = plan.smem;
  args.keys = decode_cache(params.k, width, problem.head_dim);
  args.values = decode_cache(params.v, width, problem.value_dim);
  args.page_table = params.page_table.data;
  args.table_batches = FastDivisor(params.page_table.batches);
  args.page_size = FastDivisor(std::max(1, params.page_size));
  args.table_width = static_cast<int>(params.page_table.width);
  args.num_pages = params.page_table ? params.num_pages : 1;
  args.scale_log2 = std::max(static_cast<float>(params.scores.scale * kLog2e), kSmallestScale);
  args.softcap = static_cast<float>(params.scores.softcap);
  args.key_scales = width == 1 ? params.key_scale.data : nullptr;
  args.value_scales = params.value_scale.data;
  args.key_scale_page = from_page_to_page(params.key_scale);
  args.value_scale_page = from_page_to_page(params.value_scale);
  args.batch = problem.batch;
  args.kv_heads = problem.kv_heads;
  args.value_dim = problem.value_dim;
  args.sink_batches = FastDivisor(params.sinks.batches);
  args.sinks = params.sinks.data;
  args.sinks_width = params.sinks.width;
  args.out = params.o.data;
  args.out_sequence = params.o.batch;
  args.out_token = params.o.seq;
  args.out_head = params.o.head;
  args.lse = static_cast<float*>(params.lse.data);
  args.lse_sequence = params.lse.batch;
  args.lse_token = params.lse.seq;
  args.lse_head = params.lse.head;
  if (plan.combines()) {
    const int64_t outs =
        plan.partial_slots(problem) * args.query_rows * decode_partial_width(problem.value_dim);
    args.partial_outs = params.workspace;
    args.partial_stats = reinterpret_cast<float4*>(params.workspace + outs);
  }
  return args;
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_DECODE_BLOCK_CUH_
