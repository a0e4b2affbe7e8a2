// The tiles of the Hopper backward and why, what it takes, and what a call costs in workspace. Host
// code: no CUDA.
#ifndef FLASHATTN_CUDA_BACKWARD_PLAN_H_
#define FLASHATTN_CUDA_BACKWARD_PLAN_H_

#include <cstdint>
#include <initializer_list>

#include "params.h"

namespace flashattn {

// Two ways. Up to H 128 one kernel owns keys and adds dQ to an fp32 accumulator, which a last pass
// converts. Deterministic calls and larger head dims (whose accumulator L2 could not add fast
// enough) compute dK, dV and dQ in two kernels and have no accumulator: 7 products instead of 5, no
// passes over it.
constexpr bool backward_accumulates_dq(int head_dim, bool deterministic) {
  return head_dim <= 128 && !deterministic;
}

// The compiled head dim that runs this one; the columns between are zero in shared memory. 0: none.
constexpr int backward_head_dim_sm90(int head_dim) {
  return head_dim <= 64    ? 64
         : head_dim <= 128 ? 128
         : head_dim <= 192 ? 192
         : head_dim <= 256 ? 256
                           : 0;
}

// The order of a step of the kernel that owns keys (backward_keys_sm90.cuh).
enum class BackwardOrder {
  kValueFirst,  // dV starts before dS is formed
  kTogether,    // dV and dK start together: fewer registers
};

// When dQ of a step is computed and stored.
enum class BackwardDq {
  kNextStep,  // as the next step starts; stored under its S and dP
  kBeforeDk,  // between dV and dK; stored under dK. S, dP and dQ read both operands from shared
              // memory and take all of its bandwidth, dV and dK read one and leave half.
};

struct BackwardTile {
  int rows;  // query rows of a step
  BackwardOrder order;
  BackwardDq dq;
  int unroll;  // unmasked steps between two full waits
};

// With dQ. H 128: 64 rows leave registers for dV to start before dS is formed (80 rows were 2 %
// faster without a mask and slower with one). H 64: 128 rows, since dK and dV take half the
// registers.
constexpr BackwardTile backward_tile_sm90(int compiled_head_dim) {
  return compiled_head_dim == 128
             ? BackwardTile{64, BackwardOrder::kValueFirst, BackwardDq::kBeforeDk, 1}
             : BackwardTile{128, BackwardOrder::kTogether, BackwardDq::kNextStep, 2};
}

// Without dQ.
constexpr BackwardTile kBackwardDkvTile{64, BackwardOrder::kValueFirst, BackwardDq::kNextStep, 2};

// The kernel of dQ alone, 128 query rows a block: as many keys a step as registers (S, dP, dS, dQ:
// up to 208 of 240) and shared memory hold.
struct BackwardDqTile {
  int keys;
  int v_stages;  // buffers of V; K has two
};
constexpr BackwardDqTile backward_dq_tile_sm90(int compiled_head_dim) {
  switch (compiled_head_dim) {
    case 64:
      return {128, 2};
    case 128:
      return {112, 2};
    case 192:
      return {80, 2};
    default:
      return {64, 1};
  }
}

// Whether the first keys and the last queries have most to do, as under a causal mask. A left side
// of a window takes as much from them as the right one from the others.
constexpr bool backward_is_triangular(const PrefillParams& forward) {
  const int kv_len = forward.problem.kv_len;
  return forward.scores.window_right < kv_len && forward.scores.window_left >= kv_len;
}

// Heads whose blocks are interleaved. Under a causal mask the long blocks of several heads start
// first and the short ones fill the end; without one, a head at a time keeps L2 warm.
constexpr int backward_section_sm90(bool triangular, int compiled_head_dim) {
  return !triangular ? 1 : compiled_head_dim == 64 ? 8 : 16;
}

// Query rows of a head by which its accumulator is zeroed and converted.
constexpr int kBackwardUnit = 64;

// Key/value heads by which the accumulator of dQ is zeroed ahead of the products and converted
// behind them; the passes before and after do it for as many heads. Ahead: what the blocks in
// flight need has been asked for a section before. Behind: the blocks in flight, at least, are not
// waited for. A call with no more heads leaves it all to the passes.
struct BackwardLead {
  int zero, convert;
};
constexpr BackwardLead backward_lead_sm90(const Problem& problem, bool triangular) {
  const int blocks = (problem.kv_len + 127) / 128, in_flight = 150;
  const int section =
      backward_section_sm90(triangular, backward_head_dim_sm90(problem.widest_dim()));
  const int64_t heads = int64_t{problem.batch} * problem.kv_heads;
  const int wave = (in_flight + blocks - 1) / blocks;
  return {min_int(heads, max_int(2 * section, 2 * wave)), min_int(heads, max_int(section, wave))};
}

// Query rows of a head in the workspace: whole steps of every tile.
constexpr int64_t backward_padded_rows(int q_len) { return (int64_t{q_len} + 127) / 128 * 128; }

// Whether the featured kernels run, which look at more than the band of the window.
constexpr bool backward_is_featured(const PrefillParams& forward) {
  return forward.features.query_segments.data != nullptr || forward.features.mask.data != nullptr ||
         forward.features.alibi_slopes.data != nullptr || forward.scores.softcap > 0.0;
}

// Whether anything but the band hides pairs. What nobody sees may then lie anywhere, NaN and all. A
// kernel that meets a product that is not finite where pairs are hidden says so in the workspace,
// and the generic kernels, launched behind these, do the call again.
constexpr bool backward_may_be_done_again(const PrefillParams& forward) {
  return forward.features.query_segments.data != nullptr || forward.features.mask.data != nullptr;
}

// Query rows and keys that a kernel owns and walks over at a time. With segments, the least and the
// greatest of each so many entries are found first.
struct BackwardUnits {
  int queries, keys;

  constexpr int64_t query_units(const Problem& problem) const {
    return (int64_t{problem.q_len} + queries - 1) / queries;
  }
  constexpr int64_t key_units(const Problem& problem) const {
    return (int64_t{problem.kv_len} + keys - 1) / keys;
  }
};

// Of the kernel that owns keys, and of the one that owns query rows, where there is one.
constexpr BackwardUnits backward_keys_units(int compiled_head_dim, bool accumulates) {
  return accumulates                ? BackwardUnits{backward_tile_sm90(compiled_head_dim).rows, 128}
         : compiled_head_dim <= 128 ? BackwardUnits{kBackwardDkvTile.rows, 128}
                                    : BackwardUnits{64, 64};
}
constexpr BackwardUnits backward_dq_units(int compiled_head_dim) {
  return {128, backward_dq_tile_sm90(compiled_head_dim).keys};
}

// At least as many ranges as a sequence has units of either kernel.
constexpr int64_t backward_segment_ranges(const Problem& problem) {
  constexpr BackwardUnits kLeast{64, 64};
  return problem.batch * (kLeast.query_units(problem) + kLeast.key_units(problem));
}

// The boolean mask as one of the kernels reads it, packed ahead of it: a word for an entry that it
// owns, a unit that it walks over and a lane of a quad; bit 2 j + e is for entry 8 j + 2 lane + e
// of the unit. What the mask does not vary with has one entry.
struct BackwardMask {
  uint32_t* words = nullptr;  // (batch, head, unit, lane, owned)
  uint8_t* seen = nullptr;    // (batch, head, block, unit): kAny, kAll
  int batches = 1, heads = 1, units = 1, blocks = 1, owned = 1;

  static constexpr int kAny = 1, kAll = 2;  // some pair sees each other; all do

  BackwardMask() = default;
  constexpr BackwardMask(const Problem& problem, const Broadcast& mask, const BackwardUnits& of,
                         bool owns_keys)
      : batches(mask.batches), heads(mask.head == 0 ? 1 : problem.q_heads) {
    const int64_t owned_stride = owns_keys ? mask.col : mask.row;
    const int64_t walked_stride = owns_keys ? mask.row : mask.col;
    if (walked_stride != 0)
      units = static_cast<int>(owns_keys ? of.query_units(problem) : of.key_units(problem));
    if (owned_stride == 0) return;
    blocks = static_cast<int>(owns_keys ? of.key_units(problem) : of.query_units(problem));
    owned = blocks * (owns_keys ? of.keys : of.queries);
  }

  constexpr int64_t planes() const { return int64_t{batches} * heads; }
  constexpr int64_t plane(int b, int head) const {
    return int64_t{b % batches} * heads + (heads == 1 ? 0 : head);
  }
  constexpr int64_t words_count() const { return planes() * units * 4 * owned; }
  constexpr int64_t floats() const { return words_count() + (planes() * blocks * units + 3) / 4; }
};

// Floats of workspace: lse in log2 units and delta for every row, the accumulator of dQ and its two
// counters a key/value head, the range of segments of each unit of either kernel, whether the call
// is to be done again, and the packed mask, if there is one.
constexpr int64_t backward_workspace(const Problem& problem, bool deterministic,
                                     const Broadcast* mask) {
  const int head_dim = backward_head_dim_sm90(problem.widest_dim());
  const int64_t rows =
      int64_t{problem.batch} * problem.q_heads * backward_padded_rows(problem.q_len);
  const bool accumulates = backward_accumulates_dq(problem.widest_dim(), deterministic);
  int64_t floats = rows * 2 + 2 * 2 * backward_segment_ranges(problem) + 1;
  if (accumulates) floats += rows * head_dim + 2 * int64_t{problem.batch} * problem.kv_heads;
  if (mask && head_dim != 0) {
    const BackwardUnits units = backward_keys_units(head_dim, accumulates);
    floats += BackwardMask(problem, *mask, units, true).floats();
    if (!accumulates)
      floats += BackwardMask(problem, *mask, backward_dq_units(head_dim), false).floats();
  }
  return floats;
}

struct BackwardWorkspace {
  float *lse2, *delta;    // (B, N, padded rows)
  float* dq;              // (B, N, padded rows, compiled head dim) in the order of DqFragment
  float *zeroed, *added;  // (B, K): blocks that have zeroed their share, warpgroups done adding
  int64_t padded_rows;
  // SegmentRanges of the units of the two kernels: (B, query units), then (B, key units).
  float *keys_segments, *dq_segments;
  float* again;  // not 0: the call is to be done again
  float* masks;  // packed, behind all else

  constexpr explicit BackwardWorkspace(const BackwardParams& params)
      : lse2(params.workspace),
        delta(nullptr),
        dq(nullptr),
        zeroed(nullptr),
        added(nullptr),
        padded_rows(0),
        keys_segments(nullptr),
        dq_segments(nullptr),
        again(nullptr),
        masks(nullptr) {
    const Problem& problem = params.forward.problem;
    padded_rows = backward_padded_rows(problem.q_len);
    const int64_t rows = int64_t{problem.batch} * problem.q_heads * padded_rows;
    delta = lse2 + rows;
    dq = delta + rows;
    zeroed = dq + rows * backward_head_dim_sm90(problem.widest_dim());
    added = zeroed + int64_t{problem.batch} * problem.kv_heads;
    keys_segments = backward_accumulates_dq(problem.widest_dim(), params.deterministic)
                        ? added + int64_t{problem.batch} * problem.kv_heads
                        : dq;
    dq_segments = keys_segments + 2 * backward_segment_ranges(problem);
    again = dq_segments + 2 * backward_segment_ranges(problem);
    masks = again + 1;
  }
};

// The packed masks of a call, in its workspace; without words if it has no mask.
inline BackwardMask backward_mask(const BackwardParams& params, bool owns_keys) {
  const Problem& problem = params.forward.problem;
  const Broadcast& mask = params.forward.features.mask;
  if (mask.data == nullptr) return {};
  const int head_dim = backward_head_dim_sm90(problem.widest_dim());
  const BackwardUnits units = backward_keys_units(
      head_dim, backward_accumulates_dq(problem.widest_dim(), params.deterministic));
  BackwardMask packed(problem, mask, units, true);
  float* at = BackwardWorkspace(params).masks;
  if (!owns_keys) {
    at += packed.floats();
    packed = BackwardMask(problem, mask, backward_dq_units(head_dim), false);
  }
  packed.words = reinterpret_cast<uint32_t*>(at);
  packed.seen = reinterpret_cast<uint8_t*>(packed.words + packed.words_count());
  return packed;
}

// Whether the Hopper kernels take a call, else why not.
inline bool backward_sm90_supports(const BackwardParams& params, const char** reason) {
  const PrefillParams& forward = params.forward;
  const Problem& problem = forward.problem;
  const auto refuse = [&](const char* why) {
    *reason = why;
    return false;
  };
  const auto readable = [](const Strided& x) {
    return x.batch % 8 == 0 && x.seq % 8 == 0 && x.head % 8 == 0 &&
           reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  };
  if (problem.dtype != DType::kF16 && problem.dtype != DType::kBF16)
    return refuse("the Hopper backward takes float16 and bfloat16");
  if (problem.batch == 0 || problem.q_len == 0 || problem.kv_len == 0)
    return refuse("the Hopper backward takes at least one query and one key");
  if (problem.head_dim % 8 != 0 || problem.value_dim % 8 != 0 ||
      backward_head_dim_sm90(problem.widest_dim()) == 0)
    return refuse("the Hopper backward takes head dims that are multiples of 8 up to 256");
  if (forward.features.bias.data) return refuse("the Hopper backward has no bias");
  for (const Strided* x : {&forward.q, &forward.k, &forward.v, &forward.o, &params.dout, &params.dq,
                           &params.dk, &params.dv})
    if (!readable(*x)) return refuse("the Hopper backward takes operands aligned to 16 bytes");
  return true;
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_BACKWARD_PLAN_H_
