// Which calls the Hopper forward takes and with which tiles: plain constexpr data, no CUDA header,
// so that the launcher, the kernels and `explain` read the same lines.
#ifndef FLASHATTN_CUDA_TILES_SM90_H_
#define FLASHATTN_CUDA_TILES_SM90_H_

#include <cstdint>

#include "params.h"

namespace flashattn {

constexpr int kWarpgroupRows = 64;  // query rows of one consumer warpgroup, the M of wgmma
constexpr int kKvStages = 2;        // K and V blocks in flight; a third is never faster
constexpr int kSharedMemorySm90 = 226 * 1024;  // an SM has 227 KB, of which 1 KB holds barriers

// What a kernel can do to scores; whoever needs less is faster.
enum class ScoreKind {
  kFull,    // every query sees all keys of its sequence
  kCausal,  // up to its own position
  kMasked,  // any window, segments, a boolean mask, sinks
  kShaped,  // and a soft cap, ALiBi slopes, a bias
};

// One kernel. `why` is what measurement said against the alternatives (bf16, H200, TFLOP/s).
struct TileSm90 {
  int head_dim;   // compiled; smaller ones are zero-filled by the loads
  int value_dim;  // likewise, at most head_dim
  ScoreKind kind;
  int max_q_len;   // the row serves queries up to this length
  int max_tiles;   // and calls of up to so many tiles
  int warpgroups;  // consumers
  int block_kv;    // keys a step
  int q_stages;    // Q buffers
  bool double_p;   // two register copies of P: its conversion hides under the exponentials
  bool max_free;   // unmasked blocks go without a row maximum as long as nothing overflows
  bool ping_pong;  // warpgroups take turns at issuing products
  // O goes to memory from registers, else through the tile's own Q buffer. That takes fewer
  // instructions, but then a single Q buffer is free only when the tile has left.
  bool direct_o;
  // For calls of few tiles. The longest of them have half the rows, and both warpgroups work on
  // those, each on every other block of keys.
  bool splits_long;
  const char* why;

  constexpr int block_q() const { return warpgroups * kWarpgroupRows; }
  // Where tiles are split two for each warpgroup, as far as they fit.
  constexpr int kv_stages() const {
    int stages = splits_long ? 2 * kKvStages : kKvStages;
    while (stages > kKvStages && staged_memory(stages) > kSharedMemorySm90) --stages;
    return stages;
  }
  constexpr int threads() const { return 128 * (warpgroups + 1); }
  constexpr int chunks() const { return (head_dim + 63) / 64; }  // of 64 columns, 128 bytes
  constexpr int value_chunks() const { return (value_dim + 63) / 64; }
  constexpr int q_bytes() const { return kWarpgroupRows * chunks() * 128; }  // of one warpgroup
  constexpr int k_bytes() const { return block_kv * chunks() * 128; }        // of one block
  constexpr int v_bytes() const { return block_kv * value_chunks() * 128; }
  // The entry registers of the block (168, 128 or 96 a thread) are dealt anew.
  constexpr int producer_registers() const {
    return finds_blocks() ? 56 : warpgroups == 2 ? 40 : 32;
  }
  constexpr int consumer_registers() const {
    if (finds_blocks()) return warpgroups == 2 ? 224 : 152;
    return warpgroups == 2 ? 232 : warpgroups == 3 ? 160 : 112;
  }
  // Whether the producer has to find out which blocks of keys to load.
  constexpr bool finds_blocks() const {
    return kind == ScoreKind::kMasked || kind == ScoreKind::kShaped;
  }
  constexpr int bias_chunks() const { return (block_kv + 63) / 64; }  // of 64 keys
  constexpr int bias_bytes() const {                                  // of one warpgroup
    return kWarpgroupRows * bias_chunks() * 128;
  }
  // What a warpgroup hands over at the end of a split tile: O and its rows' sums and references.
  constexpr int part_bytes() const { return splits_long ? 128 * 4 * (value_dim / 2 + 4) : 0; }
  // Tiles, and room to align them to the 1024 bytes that the swizzle repeats after.
  constexpr int shared_memory(bool bias) const {
    return staged_memory(kv_stages()) + (bias ? warpgroups * bias_bytes() : 0);
  }
  constexpr int staged_memory(int stages) const {
    return q_stages * warpgroups * q_bytes() + stages * (k_bytes() + v_bytes()) + part_bytes() +
           1024;
  }
};

// The first row that fits a call is taken.
constexpr TileSm90 kPrefillTilesSm90[] = {
    {64, 64, ScoreKind::kCausal, 2048, 198, 2, 128, 2, false, true, true, false, true,
     "few tiles, of which the longest bound the launch: those have 64 rows, and each warpgroup "
     "takes every other block of keys (T 1024, 14 heads: 10.5 us against 12.2); with more than one "
     "and a half a multiprocessor they even out"},
    {64, 64, ScoreKind::kCausal, 2048, kUnlimited, 2, 128, 2, false, true, true, false, false,
     "short causal: 128 rows waste less of the diagonal than 192, and with few blocks a tile a "
     "second copy of P costs more than it hides (T 512: 256 against 245)"},
    {64, 64, ScoreKind::kCausal, kUnlimited, kUnlimited, 3, 128, 2, false, true, true, false, false,
     "three softmaxes share the SM (T 16384: 613 against 505 with two warpgroups)"},
    {64, 64, ScoreKind::kFull, 128, kUnlimited, 2, 128, 2, true, true, true, false, false,
     "one tile holds the queries"},
    {64, 64, ScoreKind::kFull, 2048, 132, 2, 128, 2, false, true, true, false, true,
     "few tiles: 128 rows keep more multiprocessors busy than 192 or 256 do, and if it helps 64, "
     "where each warpgroup takes every other block of keys (T 1024, 8 heads: 0.61 of the time; "
     "with more tiles than multiprocessors 0.70 to 1.22)"},
    {64, 64, ScoreKind::kFull, 512, kUnlimited, 4, 64, 2, false, true, true, false, false,
     "256 rows divide T 512 and 192 do not (416 against 408)"},
    {64, 64, ScoreKind::kFull, kUnlimited, kUnlimited, 3, 128, 2, false, true, true, false, false,
     "as causal (T 16384: 621 against 512 with two warpgroups, 572 with four)"},
    {96, 96, ScoreKind::kCausal, kUnlimited, kUnlimited, 3, 96, 2, false, true, true, false, false,
     "three warpgroups as at 64; 96 keys are what 160 registers hold"},
    {96, 96, ScoreKind::kFull, kUnlimited, kUnlimited, 3, 96, 2, false, true, true, false, false,
     "as causal"},
    {128, 128, ScoreKind::kCausal, 2048, 66, 2, 128, 1, false, true, true, false, true,
     "few tiles, split as at 64: each warpgroup takes every other block of keys (T 1024, 8 heads: "
     "0.87 of the time); there is room for one Q buffer only, and with tiles for more than half of "
     "the multiprocessors that costs more (T 1024, 16 heads: 1.08)"},
    {128, 128, ScoreKind::kCausal, 2048, kUnlimited, 2, 128, 2, false, true, true, false, false,
     "few blocks a tile: a second copy of P costs more than it hides (T 512: 346 against 331)"},
    {128, 128, ScoreKind::kCausal, kUnlimited, kUnlimited, 2, 128, 2, true, true, true, false,
     false, "95 % of the tensor rate; narrower blocks or 64-row tiles lose 15 to 30 % at T 512"},
    {128, 128, ScoreKind::kFull, kUnlimited, kUnlimited, 2, 128, 2, true, true, true, false, false,
     "as causal; 160 to 192 keys are no faster at T 16384 and 15 to 20 % slower at T 512"},
    {192, 128, ScoreKind::kCausal, kUnlimited, kUnlimited, 2, 128, 1, true, true, true, false,
     false,
     "values of their own width leave room for 128 keys (T 16384: 680 against 568 by zero fill); "
     "no register is free, and direct O is 3 % slower"},
    {192, 128, ScoreKind::kFull, kUnlimited, kUnlimited, 2, 128, 1, true, true, true, false, false,
     "as causal (T 16384: 755 against 620 by zero fill)"},
    {192, 192, ScoreKind::kCausal, kUnlimited, kUnlimited, 2, 96, 1, false, true, true, true, false,
     "96 keys leave less of the diagonal unused than 112; direct O is 4 % faster at T 2048"},
    {192, 192, ScoreKind::kFull, kUnlimited, kUnlimited, 2, 112, 1, false, true, true, true, false,
     "the most keys that shared memory holds"},
    {256, 256, ScoreKind::kCausal, kUnlimited, kUnlimited, 2, 64, 1, false, true, true, true, false,
     "80 keys are equal at T 16384 and 1 to 6 % slower below; direct O is 4 % faster at T 512"},
    {256, 256, ScoreKind::kFull, 4096, kUnlimited, 2, 64, 1, false, true, true, true, false,
     "80 keys waste more of a short sequence (T 512: 561 against 531; T 4096: 797 against 785); "
     "direct O is 7 % faster at T 512"},
    {256, 256, ScoreKind::kFull, kUnlimited, kUnlimited, 2, 80, 1, false, true, true, true, false,
     "the most keys that shared memory holds"},
    {64, 64, ScoreKind::kMasked, kUnlimited, kUnlimited, 3, 96, 2, false, true, true, false, false,
     "three warpgroups as for causal masks; 96 keys are what 152 registers hold"},
    {96, 96, ScoreKind::kMasked, kUnlimited, kUnlimited, 2, 128, 2, false, true, true, false, false,
     "the masked step beside it does not fit the registers of three warpgroups"},
    {128, 128, ScoreKind::kMasked, kUnlimited, kUnlimited, 2, 128, 2, false, true, true, false,
     false, "as causal, but a second copy of P does not fit beside the masked step"},
    {192, 192, ScoreKind::kMasked, kUnlimited, kUnlimited, 2, 96, 1, false, true, true, true, false,
     "as causal"},
    {256, 256, ScoreKind::kMasked, kUnlimited, kUnlimited, 2, 64, 1, false, true, true, true, false,
     "as causal"},
    {64, 64, ScoreKind::kShaped, kUnlimited, kUnlimited, 2, 128, 2, false, true, true, false, false,
     "the arithmetic on scores wants more registers than three warpgroups have"},
    {96, 96, ScoreKind::kShaped, kUnlimited, kUnlimited, 2, 128, 2, false, true, true, false, false,
     "as masked"},
    {128, 128, ScoreKind::kShaped, kUnlimited, kUnlimited, 2, 128, 2, false, true, true, false,
     false, "as masked"},
    {192, 192, ScoreKind::kShaped, kUnlimited, kUnlimited, 2, 96, 1, false, true, true, true, false,
     "as causal"},
    {256, 256, ScoreKind::kShaped, kUnlimited, kUnlimited, 2, 64, 1, false, true, true, true, false,
     "as causal"},
};
constexpr int kNumPrefillTilesSm90 = sizeof(kPrefillTilesSm90) / sizeof(kPrefillTilesSm90[0]);

constexpr bool tiles_fit() {
  for (const TileSm90& tile : kPrefillTilesSm90)
    if (tile.shared_memory(tile.kind == ScoreKind::kShaped) > kSharedMemorySm90) return false;
  return true;
}
static_assert(tiles_fit(), "shared memory");

// The compiled head dim that serves one in memory; 0: none.
constexpr int compiled_head_dim_sm90(int head_dim) {
  for (int compiled : {64, 96, 128, 192, 256})
    if (head_dim <= compiled) return compiled;
  return 0;
}

constexpr ScoreKind score_kind_sm90(const PrefillParams& params) {
  const Scores& scores = params.scores;
  const Features& features = params.features;
  if (scores.softcap != 0.0 || features.alibi_slopes || features.bias.data)
    return ScoreKind::kShaped;
  const bool bounded_right = scores.window_right != kUnlimited;
  if (scores.window_left != kUnlimited || (bounded_right && scores.window_right != 0) ||
      features.mask.data || features.query_segments || features.sinks)
    return ScoreKind::kMasked;
  return bounded_right ? ScoreKind::kCausal : ScoreKind::kFull;
}

// Index into the table; -1: none.
constexpr int prefill_tile_index_sm90(const PrefillParams& params) {
  const Problem& problem = params.problem;
  const int compiled = compiled_head_dim_sm90(problem.widest_dim());
  const ScoreKind kind = score_kind_sm90(params);
  for (int i = 0; i < kNumPrefillTilesSm90; ++i) {
    const TileSm90& tile = kPrefillTilesSm90[i];
    if (tile.head_dim == compiled && problem.value_dim <= tile.value_dim && tile.kind == kind &&
        problem.q_len <= tile.max_q_len &&
        int64_t{problem.batch} * problem.q_heads * ((problem.q_len - 1) / tile.block_q() + 1) <=
            tile.max_tiles)
      return i;
  }
  return -1;
}
constexpr TileSm90 prefill_tile_sm90(const PrefillParams& params) {
  return kPrefillTilesSm90[prefill_tile_index_sm90(params)];
}

// Query heads that share a tile's rows. Packing the heads of a group costs nothing on the device
// (the tensor map does it), so it is used wherever it saves a tenth of the tiles: short queries.
// Not where the heads differ in more than their sinks.
constexpr int packed_heads_sm90(const TileSm90& tile, const PrefillParams& params) {
  const Features& features = params.features;
  const int q_len = params.problem.q_len, group = params.problem.group();
  if (group == 1 || group > kWarpgroupRows) return 1;
  if (features.alibi_slopes || features.bias.data || features.mask.data) return 1;
  const int packed_block = tile.warpgroups * (kWarpgroupRows / group);  // in query positions
  const int64_t packed_tiles = (q_len - 1) / packed_block + 1;
  const int64_t plain_tiles = int64_t{group} * ((q_len - 1) / tile.block_q() + 1);
  return 10 * packed_tiles < 9 * plain_tiles ? group : 1;
}

// TMA wants 16-byte strides on every axis that is walked. `length` and `heads` are the axes' sizes.
constexpr bool tma_can_walk(const Strided& x, int64_t length, int heads) {
  const bool seq = length == 1 || (x.seq > 0 && x.seq % 8 == 0);
  const bool head = heads == 1 || (x.head > 0 && x.head % 8 == 0);
  const bool batch = x.batches == 1 || (x.batch > 0 && x.batch % 8 == 0);
  return seq && head && batch;
}
inline bool tma_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }
inline bool tma_aligned(const Strided& x) { return tma_aligned(x.data); }

// The same of a bias, which comes by TMA too.
inline const char* bias_refusal_sm90(const Broadcast& bias, DType dtype) {
  if (bias.data == nullptr) return nullptr;
  if (bias.dtype != dtype) return "the bias has another dtype than the query";
  if (bias.col != 1) return "the bias is the same for all keys";
  if (!tma_aligned(bias.data)) return "the bias does not start at a multiple of 16 bytes";
  if (bias.row % 8 != 0 || bias.head % 8 != 0 || (bias.batches > 1 && bias.batch % 8 != 0))
    return "the rows of the bias are not a multiple of 16 bytes apart";
  return nullptr;
}

// Why the Hopper forward does not take a call, as a clause for `explain`; null: it does.
inline const char* prefill_sm90_refusal(const PrefillParams& params) {
  const Problem& problem = params.problem;
  if (problem.dtype != DType::kF16 && problem.dtype != DType::kBF16)
    return "the dtype is neither float16 nor bfloat16";
  if (problem.widest_dim() > 256) return "the head dim is above 256";
  if (problem.head_dim % 8 != 0 || problem.value_dim % 8 != 0)
    return "the head dim is not a multiple of 8";
  if (const char* refusal = bias_refusal_sm90(params.features.bias, problem.dtype)) return refusal;
  if (!tma_aligned(params.q) || !tma_aligned(params.k) || !tma_aligned(params.v) ||
      !tma_aligned(params.o))
    return "an operand does not start at a multiple of 16 bytes";
  if (!tma_can_walk(params.q, problem.q_len, problem.q_heads) ||
      !tma_can_walk(params.k, problem.kv_len, problem.kv_heads) ||
      !tma_can_walk(params.v, problem.kv_len, problem.kv_heads) ||
      !tma_can_walk(params.o, problem.q_len, problem.q_heads))
    return "a stride is not a positive multiple of 16 bytes";
  const int64_t rows = int64_t{problem.batch} * problem.q_heads * ((problem.q_len + 127) / 128);
  if (rows > kUnlimited) return "there are more than 2^31 tiles";
  return nullptr;
}
inline bool prefill_sm90_supports(const PrefillParams& params, const char** reason) {
  *reason = prefill_sm90_refusal(params);
  return *reason == nullptr;
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_TILES_SM90_H_
