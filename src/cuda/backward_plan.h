// The tiles of the Hopper backward and why, what it takes, and what a call costs in workspace. Host
// code: no CUDA.
#ifndef FLASHATTN_CUDA_BACKWARD_PLAN_H_
#define FLASHATTN_CUDA_BACKWARD_PLAN_H_

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "mask_planes.h"
#include "params.h"

namespace flashattn {

// Whether the featured kernels run, which look at more than the band of the window.
constexpr bool backward_is_featured(const PrefillParams& forward) {
  return forward.features.query_segments.data != nullptr || forward.features.mask.data != nullptr ||
         forward.features.alibi_slopes.data != nullptr || forward.scores.softcap > 0.0;
}

// Up to H 128 one kernel owns keys and adds dQ to an fp32 accumulator, which a last pass converts;
// deterministic calls add in a fixed order. Larger head dims (whose accumulator L2 could not add
// fast enough) and deterministic calls with features (whose blocks skip steps, so that none knows
// who adds before it) compute dK, dV and dQ in two kernels and have no accumulator: 7 products
// instead of 5, no passes over it.
enum class BackwardSum { kNone, kAnyOrder, kInOrder };
constexpr BackwardSum backward_sum(const BackwardParams& params) {
  if (params.forward.problem.widest_dim() > 128) return BackwardSum::kNone;
  if (!params.deterministic) return BackwardSum::kAnyOrder;
  return backward_is_featured(params.forward) ? BackwardSum::kNone : BackwardSum::kInOrder;
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

// The order in which key blocks start: section after section, inside one heads fastest and keys
// upwards or, where the short blocks are to come first, downwards.
struct BackwardSections {
  int heads;         // key/value heads of a section
  int last;          // the first head of the last section, which has all heads from there on
  bool short_first;  // all sections but the last; the long blocks of that one fill no end
};

// Where dQ is added in a fixed order, that of the blocks, a block follows the one before it in its
// head, and may fall behind where few heads are interleaved: eight, if the queries, dO and dQ that
// their blocks walk over stay in L2, else four. Under a causal mask the short blocks come first, if
// so, and walk upwards from the diagonal: each step is then met by one block after the other by
// itself, but the blocks in flight soon spread over all of the queries. Otherwise the long ones
// come first, of more heads, whose blocks keep close together; as at the end of every grid.
constexpr int64_t kOrderedBytes = int64_t{36} << 20;
constexpr int backward_ordered_section_sm90(const Problem& problem, int64_t walk) {
  const int64_t rows = int64_t{8} * problem.group() * min_int(walk, problem.q_len);
  return rows * backward_head_dim_sm90(problem.widest_dim()) * 8 <= kOrderedBytes ? 8 : 4;
}

constexpr BackwardSections backward_sections_sm90(const PrefillParams& forward, bool ordered) {
  const Problem& problem = forward.problem;
  const int heads = problem.batch * problem.kv_heads;
  const bool triangular = backward_is_triangular(forward);
  int section = backward_section_sm90(triangular, backward_head_dim_sm90(problem.widest_dim()));
  int last = 1;
  bool short_first = false;
  if (ordered) {
    section = backward_ordered_section_sm90(
        problem, int64_t{forward.scores.window_left} + forward.scores.window_right);
    short_first = triangular && section == 8;
    last = triangular ? 16 : section;
    if (triangular && !short_first) section = 16;
  }
  return {section, max_int(0, heads - last) / section * section, short_first};
}

// Query rows of a head by which its accumulator is zeroed and converted.
constexpr int kBackwardUnit = 64;

// Key/value heads by which the accumulator of dQ is zeroed ahead of the products and converted
// behind them; the passes before and after do it for as many heads. Ahead: what the blocks in
// flight need has been asked for a section before. Behind: the blocks in flight, at least, are not
// waited for. A call with no more heads leaves it all to the passes.
//
// In a fixed order the first block to reach a step of dQ stores instead of adding, and nothing is
// zeroed. Where short blocks come first, those of a section end late, one behind the other, so that
// two sections do not wait for them.
struct BackwardLead {
  int zero, convert;
};
constexpr BackwardLead backward_lead_sm90(const PrefillParams& forward, bool ordered) {
  const Problem& problem = forward.problem;
  const int blocks = (problem.kv_len + 127) / 128, in_flight = 150;
  const BackwardSections sections = backward_sections_sm90(forward, ordered);
  const int64_t heads = int64_t{problem.batch} * problem.kv_heads;
  const int wave = (in_flight + blocks - 1) / blocks;
  if (ordered) {
    const bool ends_late = sections.heads * blocks < 4 * in_flight;
    const int behind = ends_late && sections.short_first ? 3 : 1;
    const int64_t last_section = heads - sections.last;
    return {0, min_int(heads, max_int(behind * sections.heads, max_int(last_section, wave)))};
  }
  return {min_int(heads, max_int(2 * sections.heads, 2 * wave)),
          min_int(heads, max_int(sections.heads, wave))};
}

// Query rows of a head in the workspace: whole steps of every tile.
constexpr int64_t backward_padded_rows(int q_len) { return (int64_t{q_len} + 127) / 128 * 128; }

// Accumulators of dQ. In a fixed order, where all heads are one section, its blocks follow each
// other through the whole call, about 2 us each. They then add to several accumulators by turns,
// which shortens the chains; the finish pass adds these up, and reads kHopBytes in the meantime.
constexpr int64_t kHopBytes = int64_t{6} << 20, kPartsBytes = int64_t{64} << 20;
constexpr int backward_parts_sm90(const Problem& problem) {
  const int heads = problem.batch * problem.kv_heads, blocks = (problem.kv_len + 127) / 128;
  const int section = backward_ordered_section_sm90(problem, problem.q_len);
  if (heads == 0 || heads >= 2 * section) return 1;
  const int64_t chain = max_int(1, min_int(blocks, 132 / heads));
  const int64_t bytes = int64_t{problem.batch} * problem.q_heads *
                        backward_padded_rows(problem.q_len) *
                        backward_head_dim_sm90(problem.widest_dim()) * 4;
  int parts = 1;
  while (parts < chain && (parts + 1) * (parts + 1) * bytes <= chain * kHopBytes &&
         (parts + 1) * bytes <= kPartsBytes)
    ++parts;
  return parts;
}

// Floats of an accumulator of dQ and its two counters a key/value head, in a fixed order also of a
// counter a step; then up to what keeps the next one aligned.
constexpr int64_t backward_part_floats(const Problem& problem, bool ordered) {
  const int64_t rows =
      int64_t{problem.batch} * problem.q_heads * backward_padded_rows(problem.q_len);
  const int64_t floats = rows * backward_head_dim_sm90(problem.widest_dim()) +
                         2 * int64_t{problem.batch} * problem.kv_heads;
  return ordered ? (floats + rows / kBackwardUnit + 31) / 32 * 32 : floats;
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
// of the unit.
//
// words: (plane, unit, lane, owned); seen: (plane, block, unit).
struct BackwardMask : MaskPlanes {
  int units = 1, blocks = 1, owned = 1;

  BackwardMask() = default;
  constexpr BackwardMask(const Problem& problem, const Broadcast& mask, const BackwardUnits& of,
                         bool owns_keys)
      : MaskPlanes(problem, mask) {
    const int64_t owned_stride = owns_keys ? mask.col : mask.row;
    const int64_t walked_stride = owns_keys ? mask.row : mask.col;
    if (walked_stride != 0)
      units = static_cast<int>(owns_keys ? of.query_units(problem) : of.key_units(problem));
    if (owned_stride == 0) return;
    blocks = static_cast<int>(owns_keys ? of.key_units(problem) : of.query_units(problem));
    owned = blocks * (owns_keys ? of.keys : of.queries);
  }

  constexpr int64_t words_count() const { return planes() * units * 4 * owned; }
  constexpr int64_t floats() const { return words_count() + (planes() * blocks * units + 3) / 4; }
};

// Floats of workspace: lse in log2 units and delta for every row, the accumulators of dQ, the range
// of segments of each unit of either kernel, whether the call is to be done again, and the packed
// mask, if there is one.
constexpr int64_t backward_workspace(const Problem& problem, BackwardSum sum,
                                     const Broadcast* mask) {
  const int head_dim = backward_head_dim_sm90(problem.widest_dim());
  const int64_t rows =
      int64_t{problem.batch} * problem.q_heads * backward_padded_rows(problem.q_len);
  const bool accumulates = sum != BackwardSum::kNone, ordered = sum == BackwardSum::kInOrder;
  int64_t floats = rows * 2 + 2 * 2 * backward_segment_ranges(problem) + 1;
  if (accumulates)
    floats += (ordered ? backward_parts_sm90(problem) : 1) * backward_part_floats(problem, ordered);
  if (mask && head_dim != 0) {
    const BackwardUnits units = backward_keys_units(head_dim, accumulates);
    floats += BackwardMask(problem, *mask, units, true).floats();
    if (!accumulates)
      floats += BackwardMask(problem, *mask, backward_dq_units(head_dim), false).floats();
  }
  return floats;
}

// The same for whatever a call of these lengths needs.
constexpr int64_t backward_workspace(const Problem& problem, bool deterministic,
                                     const Broadcast* mask) {
  const int64_t apart = backward_workspace(problem, BackwardSum::kNone, mask);
  if (problem.widest_dim() > 128) return apart;
  const BackwardSum sum = deterministic ? BackwardSum::kInOrder : BackwardSum::kAnyOrder;
  return std::max(apart, backward_workspace(problem, sum, mask));  // may be above 2^31
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
    keys_segments = backward_sum(params) == BackwardSum::kNone
                        ? dq
                        : added + int64_t{problem.batch} * problem.kv_heads;
    dq_segments = keys_segments + 2 * backward_segment_ranges(problem);
    again = dq_segments + 2 * backward_segment_ranges(problem);
    masks = again + 1;
  }
};

// What a fixed order needs of the workspace besides.
struct BackwardParts {
  float* turns;    // (B, N, steps of a head): blocks that have added
  int64_t floats;  // from an accumulator to the next, and from their turns to the next
  int count;

  constexpr explicit BackwardParts(const BackwardParams& params)
      : turns(BackwardWorkspace(params).added +
              int64_t{params.forward.problem.batch} * params.forward.problem.kv_heads),
        floats(backward_part_floats(params.forward.problem, true)),
        count(backward_parts_sm90(params.forward.problem)) {}
};

// The packed masks of a call, in its workspace; without words if it has no mask.
inline BackwardMask backward_mask(const BackwardParams& params, bool owns_keys) {
  const Problem& problem = params.forward.problem;
  const Broadcast& mask = params.forward.features.mask;
  if (mask.data == nullptr) return {};
  const int head_dim = backward_head_dim_sm90(problem.widest_dim());
  const BackwardUnits units =
      backward_keys_units(head_dim, backward_sum(params) != BackwardSum::kNone);
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
