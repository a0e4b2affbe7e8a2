// Latent attention on Hopper: which calls the kernel of decode_latent_sm90.cuh takes, its shared
// memory, and how a call is cut into blocks. Host code: no CUDA header.
#ifndef FLASHATTN_CUDA_DECODE_LATENT_PLAN_H_
#define FLASHATTN_CUDA_DECODE_LATENT_PLAN_H_

#include "decode_plan.h"

namespace flashattn {

constexpr int kLatentHeadDim = 576, kLatentValueDim = 512;
constexpr int kLatentRows = 64;  // query rows of a block: the m of wgmma
constexpr int kLatentTile = 64;  // keys of a step
constexpr int kLatentStages = 2;
constexpr int kLatentThreads = 384;    // a producer and two multiplying warpgroups
constexpr int kLatentSmallestBox = 8;  // tokens: what the 128-byte swizzle repeats after

// Query and tiles are stored chunk after chunk of 64 columns, 64 rows of 128 bytes each.
constexpr int kLatentChunks = kLatentHeadDim / 64;
constexpr int kLatentChunkBytes = 64 * 128;
constexpr int kLatentTileBytes = kLatentChunks * kLatentChunkBytes;
static_assert(kLatentRows == 64 && kLatentTile == 64, "query and tiles have the same layout");

// Offsets into the dynamic shared memory of a block, behind its first multiple of 1024 bytes.
constexpr int kLatentQuery = 0;
constexpr int kLatentTiles = kLatentTileBytes;
constexpr int kLatentWeights = kLatentTiles + kLatentStages * kLatentTileBytes;
constexpr int kLatentFactors = kLatentWeights + kLatentRows * kLatentTile * 2;
constexpr int kLatentBarriers = kLatentFactors + 128 * 8;
constexpr int kLatentSharedMemory = kLatentBarriers + 256 + 1024;

// Tokens that one TMA box holds: all of a tile, or as many as lie on one page.
constexpr int latent_box_tokens(const DecodeParams& params) {
  return params.page_table ? min_int(params.page_size, kLatentTile) : kLatentTile;
}

// Why the kernel does not take a call, as a clause for `explain`; null: it does.
constexpr const char* latent_refusal(const DecodeParams& params) {
  const Problem& problem = params.problem;
  if (problem.head_dim != kLatentHeadDim || problem.value_dim != kLatentValueDim)
    return "the head dims are not 576 and 512";
  if (!params.values_in_keys) return "the values have a cache of their own";
  if (params.cache_dtype != problem.dtype) return "the cache is an 8-bit one";
  if (params.scores.softcap != 0.0) return "there is a soft cap";
  if (params.scores.window_left < problem.kv_len) return "there is a sliding window";
  const int box = latent_box_tokens(params);
  if (box < kLatentSmallestBox || kLatentTile % box != 0 ||
      (params.page_table && params.page_size % box != 0))
    return "the page size is not 8, 16, 32 or a multiple of 64";
  return nullptr;
}

namespace decode_plan_internal {

// Microseconds on an H200: of a tile, of a block's start and end, and of the second kernel, which
// reads what the first wrote.
constexpr double kLatentTileTime = 2.0, kLatentBlockTime = 4.0;
constexpr double latent_combine_time(int64_t partial_rows, int splits) {
  constexpr double kMegabytesPerRow = 2e-6 * 4 * (kLatentValueDim + kDecodeStatsFloats);
  return splits == 1 ? 0.0 : 1.5 + 0.1 * splits + partial_rows * kMegabytesPerRow / 3.0;
}

// A block fills an SM, so that blocks run in waves.
constexpr double latent_time(const Work& work, int splits, int sm_count) {
  const double waves = divide_up(work.pairs * splits, sm_count);
  return waves * (kLatentBlockTime + kLatentTileTime * divide_up(work.tiles, splits)) +
         latent_combine_time(work.pairs * work.rows * splits, splits);
}

// Blocks beside one for each sequence, for sequences of unusual length; as cut_none() has them, but
// fewer, since one that finds nothing to do still takes an SM for a moment.
constexpr int latent_extra_blocks(const DecodeParams& params, const Work& work, int sm_count) {
  constexpr double kWorthwhile = 100, kLongSequence = 60;
  const int batch = params.problem.batch;
  const int most = decode_max_splits(batch, params.problem.kv_heads) - 1;
  const int64_t lists = work.pairs / batch;
  const int extra = min_int(2 * sm_count / lists, int64_t{batch} * most);
  const bool pays = batch > 1 && extra >= 2 && latent_time(work, 1, sm_count) >= kWorthwhile &&
                    kLatentTileTime * work.tiles >= kLongSequence;
  return pays ? extra : 0;
}

constexpr Cut latent_cut(const DecodeParams& params, const Work& work, int sm_count) {
  if (params.num_splits > 0) return {params.num_splits, 1, "num_splits was given"};
  if (params.batch_invariant)
    return {kDecodeMaxCluster, 1, "batch_invariant: 8 splits, whatever the batch and the capacity"};
  const int most =
      min_int(decode_max_splits(params.problem.batch, params.problem.kv_heads), work.tiles);
  int best = 1;
  for (int splits = 2; splits <= most; ++splits)
    if (latent_time(work, splits, sm_count) < latent_time(work, best, sm_count)) best = splits;
  if (best > 1) return {best, 1, "the splits that fill the SMs best"};
  const int extra = latent_extra_blocks(params, work, sm_count);
  return {
      1, 1,
      extra > 0 ? "one block each, more for sequences of unusual length" : "one block for all keys",
      extra};
}

}  // namespace decode_plan_internal

constexpr DecodePlan plan_latent(const DecodeParams& params, const DecodeDevice& device) {
  namespace internal = decode_plan_internal;
  const Problem& problem = params.problem;
  const int64_t rows = int64_t{problem.q_len} * problem.group();
  DecodePlan plan;
  plan.row_blocks = divide_up(rows, kLatentRows);
  const internal::Work work = {int64_t{problem.batch} * problem.kv_heads * plan.row_blocks,
                               min_int(rows, kLatentRows), kLatentHeadDim * 2,
                               max_int(1, divide_up(problem.kv_len, kLatentTile))};
  const internal::Cut cut = internal::latent_cut(params, work, device.sm_count);
  plan.splits = cut.splits;
  plan.extra_blocks = cut.extra_blocks;
  plan.reason = cut.reason;
  plan.warps = kLatentThreads / 32;
  plan.stages = kLatentStages;
  plan.smem.total = kLatentSharedMemory;
  return plan;
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_DECODE_LATENT_PLAN_H_
