// How a decode call is cut into blocks, and what it needs of shared memory and workspace. Host
// code: no CUDA header. docs/kernels/decode.md has the measurements behind the choices.
#ifndef FLASHATTN_CUDA_DECODE_PLAN_H_
#define FLASHATTN_CUDA_DECODE_PLAN_H_

#include <cstdint>

#include "fast_divisor.h"
#include "params.h"

namespace flashattn {

// ---- Geometry

constexpr int kDecodeColumns = 8;  // query rows of a column block: the n of mma.m16n8k16
constexpr int kDecodeMaxWarps = 8;
constexpr int kDecodeFewWarps = 4;
constexpr int kDecodeMaxStages = 4;
constexpr int kDecodeMaxCluster = 8;

constexpr int divide_up(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// Column blocks that fit the registers beside their accumulators. Tiles of bytes have more tokens.
constexpr int decode_max_column_blocks(int head_dim, int cache_width) {
  return head_dim <= 64 * cache_width ? 4 : head_dim <= 256 ? 2 : 1;
}
// Tokens of a tile: the unit of the rings, one step of a warp. 4 KB and more keep a warp's step
// long enough to pay for its vote and its shuffles.
constexpr int decode_tile_tokens(int row_bytes) { return row_bytes <= 128 ? 32 : 16; }
constexpr int decode_tile_bytes(int row_bytes) { return decode_tile_tokens(row_bytes) * row_bytes; }

// Query fragments stay in registers as long as these are few, else all warps share them.
constexpr bool decode_query_in_registers(int head_dim, int column_blocks) {
  return head_dim * column_blocks <= 256;
}

// Large tiles leave no room for the rings of many warps.
constexpr int decode_most_warps(int tile_bytes) {
  return tile_bytes >= 8192 ? kDecodeFewWarps : kDecodeMaxWarps;
}

// Whether two blocks of a cluster launch fit an SM; they have few warps then.
constexpr bool decode_clusters_share_sm(int row_bytes) { return row_bytes <= 128; }

// Tiles of keys, and of values, in a warp's ring. At head dim 64, one was the fastest on every
// shape. A third one of a cluster's blocks is no gain (1 sequence of 8192, 8 heads of 128: 10.3 us
// with two, 10.7 with three).
constexpr int decode_most_stages(int row_bytes, int cache_width, int cluster) {
  return row_bytes == 128 && cache_width == 2 ? 1 : cluster > 1 ? 2 : kDecodeMaxStages;
}

// Where there is a lean kernel. It keeps its query in registers.
constexpr bool decode_has_lean(int head_dim, int column_blocks) {
  return column_blocks <= 2 && decode_query_in_registers(head_dim, column_blocks);
}

// A warp's accumulators on their way to the merge: head_dim / 8 floats for each of 8 accumulator
// rows of each of 8 columns. The paddings make the 16-byte stores of a warp, and the loads of 8
// consecutive rows, meet every bank once.
constexpr int decode_staged_row(int head_dim) {
  return head_dim / 8 + (head_dim / 8 % 8 == 4 ? 0 : 4);
}
constexpr int decode_staged_column(int head_dim) { return 8 * decode_staged_row(head_dim) + 4; }

// Floats of a partial output: whole groups of 32 dims.
constexpr int decode_partial_width(int value_dim) { return divide_up(value_dim, 32) * 32; }

// What a merge knows of a row beside its accumulators: (max, sum, exact sum), padded to 16 bytes.
constexpr int kDecodeStatsBytes = 16;
constexpr int kDecodeStatsFloats = kDecodeStatsBytes / 4;

// Offsets into the dynamic shared memory of a block, in bytes; at 0 lies the barrier. Those up to
// the rings do not depend on warps and stages.
struct DecodeSmem {
  int stats;           // of each warp and column of one column block
  int received_stats;  // cluster: of each block and query row
  int received;        // cluster: this block's share of the accumulators of each block
  int query;           // lean: its rows; else fragments, when not in registers
  int query_scales;    // 8-bit caches: a float for each query row
  int rings;           // one for each warp, later its staged accumulators
  int warp_region;     // the distance between them
  int scales;          // 8-bit caches: of the tokens of the tiles in a warp's ring: TokenScales
  int total;
};

// The scales of a tile's tokens: keys', then values'.
constexpr int decode_scale_bytes(int row_bytes, int cache_width) {
  return cache_width == 1 ? 2 * 4 * decode_tile_tokens(row_bytes) : 0;
}

// The ring of a warp, later its staged accumulators, in bytes.
constexpr int decode_warp_region(int head_dim, int cache_width, int stages) {
  const int ring = stages * 2 * decode_tile_bytes(head_dim * cache_width);
  const int staged = kDecodeColumns * decode_staged_column(head_dim) * 4;
  return divide_up(max_int(ring, staged), 128) * 128;
}

constexpr DecodeSmem decode_smem(int head_dim, int cache_width, int column_blocks, int warps,
                                 int stages, int cluster) {
  const int rows = column_blocks * kDecodeColumns;
  const int row_bytes = head_dim * cache_width;
  DecodeSmem smem = {};
  smem.stats = 16;
  smem.received_stats = smem.stats + kDecodeMaxWarps * kDecodeColumns * kDecodeStatsBytes;
  smem.received = smem.received_stats + (cluster > 1 ? cluster * rows * kDecodeStatsBytes : 0);
  smem.query = divide_up(smem.received + (cluster > 1 ? rows * head_dim * 4 : 0), 128) * 128;
  smem.query_scales = smem.query + rows * head_dim * 2;
  smem.rings = divide_up(smem.query_scales + (cache_width == 1 ? rows * 4 : 0), 128) * 128;
  smem.warp_region = decode_warp_region(head_dim, cache_width, stages);
  smem.scales = smem.rings + warps * smem.warp_region;
  smem.total = smem.scales + warps * stages * decode_scale_bytes(row_bytes, cache_width);
  return smem;
}

// ---- Plan

// The facts of a GPU that the plan depends on.
struct DecodeDevice {
  int sm_count, major, shared_memory_per_block;

  // The code for 9.0 alone has the cluster merge.
  constexpr bool merges_in_clusters() const { return major == 9; }
};

struct DecodePlan {
  int column_blocks = 1;  // of 8 query rows: what a block holds
  int row_blocks = 1;     // blocks for the query rows of one kv head
  int splits = 1;         // blocks for the keys of each of them
  int cluster = 1;        // splits when they merge inside a cluster, else 1
  int warps = kDecodeMaxWarps;
  int stages = 1;         // tiles of keys, and of values, in a warp's ring
  int extra_blocks = 0;   // ragged: blocks of a kv head and row block beside one for each sequence
  bool lean = false;      // the small kernel of decode_lean.cuh
  bool featured = false;  // the lean kernel with a window or a soft cap
  int eager = 0;          // its tiles of a warp that are fetched before the length is known: 0 or 1
  DecodeSmem smem = {};
  const char* reason = "";

  constexpr bool combines() const { return extra_blocks > 0 || (splits > 1 && cluster == 1); }
  // Places for the partial outputs of a (sequence, kv head), or of an extra block.
  constexpr int64_t partial_slots(const Problem& problem) const {
    return int64_t{problem.kv_heads} * (int64_t{problem.batch} * splits + extra_blocks);
  }
};

// More splits than this never paid, and the workspace has to be known without the device.
constexpr int decode_max_splits(int batch, int kv_heads) {
  constexpr int kMaxBlocks = 512, kMaxSplits = 128;
  const int64_t pairs = max_int(1, int64_t{batch} * kv_heads);
  return max_int(kDecodeMaxCluster, min_int(kMaxBlocks / pairs, kMaxSplits));
}

// Floats of workspace that any plan for such a call may use, on whatever device.
constexpr int64_t decode_workspace(int batch, int q_len, int q_heads, int kv_heads, int value_dim,
                                   int num_splits) {
  const int64_t rows = int64_t{batch} * q_len * q_heads;
  const int splits = num_splits > 0 ? num_splits : decode_max_splits(batch, kv_heads);
  return splits == 1 ? 0 : rows * splits * (decode_partial_width(value_dim) + kDecodeStatsFloats);
}

namespace decode_plan_internal {

constexpr int power_of_two_below(int64_t n) {
  int power = 1;
  while (2 * power <= n) power *= 2;
  return power;
}

// What the choice of splits looks at.
struct Work {
  int64_t pairs;  // (sequence, kv head, row block)
  int rows;       // query rows of a pair
  int row_bytes;  // of a token of a kv head, in the K cache
  int tiles;      // that a sequence can have at most
};

struct Cut {
  int splits, cluster;
  const char* reason;
  int extra_blocks = 0;
};

// Microseconds on an H200, fitted to measured points: one block draws 0.115 TB/s; 64 blocks
// drew 4.23 of a long cache, 128 draw 4.5.
constexpr double stream_time(const Work& work, double blocks) {
  const double megabytes =
      2e-6 * work.pairs * work.tiles * static_cast<double>(decode_tile_bytes(work.row_bytes));
  const double rate = 0.115 * blocks;
  const double most = blocks >= 128 ? 4.5 : 4.0 + 0.5 * blocks / 128;
  return megabytes / (rate < most ? rate : most);
}
constexpr double combine_time(const Work& work, int splits) {
  return 1.2 + 0.0018 * static_cast<double>(work.pairs * work.rows) + 0.014 * splits;
}

constexpr Cut cut_for_clusters(const Work& work, int sm_count, int max_splits) {
  const int64_t slots = decode_clusters_share_sm(work.row_bytes) ? 2 * sm_count : sm_count;
  const int by_tiles = power_of_two_below(divide_up(work.tiles, kDecodeMaxWarps));
  const int cluster =
      min_int(min_int(kDecodeMaxCluster, by_tiles), power_of_two_below(slots / work.pairs));
  // A cluster of 8 feeds 8 SMs. Few pairs with long caches want more, if that pays for a second
  // kernel.
  const int splits = min_int(sm_count / work.pairs, min_int(max_splits, by_tiles));
  if (splits > kDecodeMaxCluster &&
      stream_time(work, static_cast<double>(work.pairs * splits)) + combine_time(work, splits) <
          stream_time(work, static_cast<double>(work.pairs * cluster)))
    return {splits, 1, "few kv heads and a long cache: partials and a combine kernel"};
  if (cluster == 1) return {1, 1, "a short cache: one block per kv head"};
  return {cluster, cluster, "splits merge inside a cluster"};
}

constexpr Cut cut_for_partials(const Work& work, int sm_count, int max_splits) {
  const int64_t slots = 2 * int64_t{sm_count};
  const int by_tiles = divide_up(work.tiles, kDecodeMaxWarps);
  const int splits = max_int(1, min_int(slots / work.pairs, min_int(max_splits, by_tiles)));
  if (splits == 1) return {1, 1, "a short cache: one block per kv head"};
  return {splits, 1, "partials and a combine kernel"};
}

// One block for each pair. Where lengths may differ, and the call and its longest possible sequence
// are long enough to pay for a second kernel that mostly finds nothing to do, sequences much longer
// than the others are cut on the device.
constexpr Cut cut_none(const DecodeParams& params, const Work& work, const DecodeDevice& device) {
  constexpr double kWorthwhile = 45, kLongSequence = 60;  // microseconds
  const Problem& problem = params.problem;
  const int64_t lists = work.pairs / problem.batch;  // kv heads times row blocks
  const int most = decode_max_splits(problem.batch, problem.kv_heads) - 1;
  const int extra = min_int(4 * device.sm_count / lists, int64_t{problem.batch} * most);
  Work sequence = work;
  sequence.pairs = 1;
  if (problem.batch == 1 || extra < 2 || stream_time(work, device.sm_count) < kWorthwhile ||
      stream_time(sequence, 1) < kLongSequence)
    return {1, 1, "the kv heads fill the GPU: one block each"};
  return {1, 1, "the kv heads fill the GPU: one block each, more for sequences of unusual length",
          extra};
}

constexpr Cut choose_cut(const DecodeParams& params, const Work& work, const DecodeDevice& device) {
  const auto in_cluster = [&](int splits) {
    const bool fits = device.merges_in_clusters() && splits <= kDecodeMaxCluster &&
                      power_of_two_below(splits) == splits;
    return fits ? splits : 1;
  };
  if (params.num_splits > 0)
    return {params.num_splits, in_cluster(params.num_splits), "num_splits was given"};
  if (params.batch_invariant)
    return {kDecodeMaxCluster, in_cluster(kDecodeMaxCluster),
            "batch_invariant: 8 splits, whatever the batch and the capacity"};
  // From about three quarters of the SMs on, splitting costs more than idle SMs do.
  if (100 * work.pairs > 72 * int64_t{device.sm_count}) return cut_none(params, work, device);
  const int max_splits = decode_max_splits(params.problem.batch, params.problem.kv_heads);
  return device.merges_in_clusters() ? cut_for_clusters(work, device.sm_count, max_splits)
                                     : cut_for_partials(work, device.sm_count, max_splits);
}

// Warps and stages: 128 to 192 KB of requests in flight on each SM, spread over the blocks it
// holds. Blocks that share an SM have one stage: four of them keep memory busier than three with
// two stages while others begin and end (64 sequences of 4096, 8 heads of 128: 240.6 us against
// 250.9).
constexpr void choose_rings(const DecodeParams& params, const Work& work,
                            const DecodeDevice& device, int head_dim, DecodePlan* plan) {
  const int width = byte_width(params.cache_dtype);
  const int tile_bytes = decode_tile_bytes(work.row_bytes);
  const bool shares_sm = work.pairs * plan->splits > device.sm_count;
  // The number of warps is part of the order of summation, so batch_invariant fixes it.
  plan->warps =
      shares_sm && !params.batch_invariant ? kDecodeFewWarps : decode_most_warps(tile_bytes);
  const int budget = tile_bytes >= 8192 || plan->cluster > 1 ? 128 << 10 : 192 << 10;
  const int most = shares_sm ? 1 : decode_most_stages(work.row_bytes, width, plan->cluster);
  const int wanted = divide_up(work.tiles, int64_t{plan->splits} * plan->warps);
  plan->stages =
      max_int(1, min_int(min_int(wanted, most), budget / (plan->warps * 2 * tile_bytes)));
  const auto fits = [&] {
    plan->smem =
        decode_smem(head_dim, width, plan->column_blocks, plan->warps, plan->stages, plan->cluster);
    return plan->smem.total <= device.shared_memory_per_block;
  };
  while (!fits() && plan->stages > 1) --plan->stages;
  while (!fits() && plan->warps > 1) plan->warps /= 2;
}

// Whether the lean kernel needs its featured variant, which only Hopper has.
constexpr bool is_featured(const DecodeParams& params, int row_bytes) {
  return params.scores.softcap != 0.0 || params.scores.window_left < params.problem.kv_len ||
         (params.page_table && params.page_size % decode_tile_tokens(row_bytes) != 0);
}

// Whether the lean kernel computes this call; decode_lean.cuh says what it leaves out.
constexpr bool is_lean(const DecodeParams& params, const DecodePlan& plan, int head_dim,
                       const DecodeDevice& device) {
  const Problem& problem = params.problem;
  const int row_bytes = head_dim * byte_width(params.cache_dtype);
  const bool whole = problem.head_dim == head_dim && problem.value_dim == head_dim &&
                     byte_width(params.cache_dtype) == 2;
  const int most_warps = decode_most_warps(decode_tile_bytes(row_bytes));
  const bool few =
      plan.warps == kDecodeFewWarps && (plan.cluster == 1 || decode_clusters_share_sm(row_bytes));
  const bool compiled =
      decode_has_lean(head_dim, plan.column_blocks) &&
      (plan.column_blocks == 1 ? problem.q_len == 1 && (plan.warps == most_warps || few)
                               : plan.warps == most_warps);
  const bool one_block = plan.row_blocks == 1 && plan.extra_blocks == 0;
  // Operands have an entry for each sequence, or one for all.
  const auto indexed = [&](int batches) { return batches == 1 || batches >= problem.batch; };
  const bool direct = indexed(params.q.batches) && indexed(params.seq_lens.batches) &&
                      indexed(params.sinks.batches) &&
                      (params.page_table ? indexed(params.page_table.batches)
                                         : indexed(params.k.batches) && indexed(params.v.batches));
  bool small = true;  // strides fit 32 bits
  for (const int64_t stride :
       {params.q.head, params.q.seq, params.o.seq, params.lse.seq, params.k.seq, params.k.head,
        params.v.seq, params.v.head, params.o.head, params.lse.head, params.page_table.width})
    small = small && stride >= 0 && stride < (1 << 30);
  return compiled && whole && one_block && direct && small &&
         (device.merges_in_clusters() || !is_featured(params, row_bytes));
}

}  // namespace decode_plan_internal

// head_dim is the compiled one: at least the call's head dim and value dim.
constexpr DecodePlan plan_decode(const DecodeParams& params, int head_dim,
                                 const DecodeDevice& device) {
  namespace internal = decode_plan_internal;
  const Problem& problem = params.problem;
  const int64_t rows = int64_t{problem.q_len} * problem.group();
  DecodePlan plan;
  const int most_columns = decode_max_column_blocks(head_dim, byte_width(params.cache_dtype));
  while (plan.column_blocks * kDecodeColumns < rows && plan.column_blocks < most_columns)
    plan.column_blocks *= 2;
  plan.row_blocks = divide_up(rows, plan.column_blocks * kDecodeColumns);

  const int row_bytes = head_dim * byte_width(params.cache_dtype);
  const int window = params.scores.window_left;
  const int64_t seen = window == kUnlimited
                           ? problem.kv_len
                           : min_int(problem.kv_len, int64_t{window} + problem.q_len);
  const internal::Work work = {int64_t{problem.batch} * problem.kv_heads * plan.row_blocks,
                               min_int(rows, plan.column_blocks * kDecodeColumns), row_bytes,
                               max_int(1, divide_up(seen, decode_tile_tokens(row_bytes)))};
  const internal::Cut cut = internal::choose_cut(params, work, device);
  plan.splits = cut.splits;
  plan.cluster = cut.cluster;
  plan.extra_blocks = cut.extra_blocks;
  plan.reason = cut.reason;
  internal::choose_rings(params, work, device, head_dim, &plan);
  plan.lean = internal::is_lean(params, plan, head_dim, device);
  plan.featured = plan.lean && internal::is_featured(params, row_bytes);
  // Worth it where a warp has few tiles, and wasted on a sequence that is short.
  plan.eager =
      !params.page_table && !plan.featured && work.tiles <= 16 * int64_t{plan.splits} * plan.warps;
  return plan;
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_DECODE_PLAN_H_
