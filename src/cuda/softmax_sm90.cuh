// Online softmax over wgmma accumulators.
//
// A thread holds two rows, r and r + 8, of each group of 8 columns: element 4 j + 2 row + e is
// column 8 j + 2 (lane % 4) + e; the four lanes of a quad share the rows. Exponents are base 2: p =
// 2^(s c - ref), c = scale log2(e). The reference of a row need not be its maximum: any number
// gives the same softmax as long as nothing overflows and the largest p of the row does not
// underflow.
#ifndef FLASHATTN_CUDA_SOFTMAX_SM90_CUH_
#define FLASHATTN_CUDA_SOFTMAX_SM90_CUH_

#include <climits>
#include <cmath>
#include <cstdint>

#include "params.h"
#include "ptx.cuh"

namespace flashattn {

constexpr unsigned kWholeWarp = 0xffffffffu;
// A row whose best score so far is this far from 0 (log2 units) has met, as a rule, only keys that
// a large negative bias hides, so that the next one may be anywhere above.
constexpr float kFar = 1e4f;

struct OnlineRows {
  float ref[2];       // log2 units
  float sum[2];       // this thread's share of the sum of p
  float factor[2];    // what O has to be multiplied with before the next product is added
  int o_is_behind;    // 0: all factors of the warp are 1; 1: not; 1 + n: not, after raises in n
                      // blocks on end
  bool use_maximum;   // the warp takes the row maximum for the rest of the tile
  bool wait_for_key;  // so it does as long as some of its rows has met no key to speak of; any
                      // mask only
};

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kWholeWarp, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kWholeWarp, x, 1);
  return x + __shfl_xor_sync(kWholeWarp, x, 2);
}

// Both rows side by side: one shuffle's latency hides the other's.
__device__ __forceinline__ void quad_sums(float (&x)[2]) {
#pragma unroll
  for (int lanes = 1; lanes <= 2; lanes *= 2) {
    const float other[2] = {__shfl_xor_sync(kWholeWarp, x[0], lanes),
                            __shfl_xor_sync(kWholeWarp, x[1], lanes)};
    x[0] += other[0];
    x[1] += other[1];
  }
}

// The columns of a block that rows see: up to a last one.
struct VisibleColumns {
  int last[2];    // of this thread's rows, counted from this thread's first column
  int every_row;  // up to here all 16 rows of the warp see
  int any_row;    // and beyond here none
};
// Registers in a group of 32 columns: what a warp decides upon at a time, so that of a diagonal
// block only the groups on the diagonal are masked, and those beyond it cost nothing.
constexpr int kGroupRegs = 16;
constexpr int group_first_column(int i) { return i * 2; }

template <bool ByGroup, int N>
__device__ __forceinline__ void mask_columns(float (&s)[N], const VisibleColumns& visible) {
#pragma unroll
  for (int group = 0; group < N; group += kGroupRegs) {
    const bool all_seen = visible.every_row >= group_first_column(group + kGroupRegs) - 1;
    const bool skipped = group > 0 && visible.any_row < group_first_column(group);
    if (ByGroup && (all_seen || skipped)) continue;
#pragma unroll
    for (int i = group; i < group + kGroupRegs && i < N; ++i)
      if (8 * (i / 4) + i % 2 > visible.last[i / 2 % 2]) s[i] = -INFINITY;
  }
}

template <class T, int N>
__device__ __forceinline__ void convert_p(const float (&p)[N], uint32_t (&p_regs)[N / 2]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) p_regs[i] = pack<T>(p[2 * i], p[2 * i + 1]);
}

// s becomes p; returns this thread's share of the block's row sums.
template <bool ByGroup, int N>
__device__ __forceinline__ float2 exponentials(float (&s)[N], float ref0, float ref1, float c,
                                               int any_row = kUnlimited) {
  float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int group = 0; group < N; group += kGroupRegs) {
    const bool seen = !ByGroup || any_row >= group_first_column(group);
#pragma unroll
    for (int i = group; i < group + kGroupRegs && i < N; ++i) {
      s[i] = seen ? exp2_approx(fmaf(s[i], c, i / 2 % 2 == 0 ? -ref0 : -ref1)) : 0.f;
      if (seen) sum[i % 4] += s[i];
    }
  }
  return {sum[0] + sum[1], sum[2] + sum[3]};
}

// The same where the exponents come from `exponent(i)`, of s[i].
template <int N, class Exponent>
__device__ __forceinline__ float2 exponentials_of(float (&s)[N], Exponent exponent) {
  float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    s[i] = exp2_approx(exponent(i));
    sum[i % 4] += s[i];
  }
  return {sum[0] + sum[1], sum[2] + sum[3]};
}

// Scores that are products times c.
struct PlainScores {
  float c;

  template <int N>
  __device__ __forceinline__ float2 exponentials(float (&s)[N], float ref0, float ref1) const {
    return flashattn::exponentials<false>(s, ref0, ref1, c);
  }
  template <int N>
  __device__ __forceinline__ void apply(float (&)[N], bool = false) const {}
};

// Scores of which `hide()` makes those that a row does not see -inf.
template <class Scores, class Hide>
struct HiddenScores {
  const Scores& scores;
  const Hide& hide;

  template <int N>
  __device__ __forceinline__ float2 exponentials(float (&s)[N], float ref0, float ref1) const {
    hide();
    return scores.exponentials(s, ref0, ref1);
  }
  template <int N>
  __device__ __forceinline__ void apply(float (&s)[N], bool again) const {
    scores.apply(s, again);
    hide();
  }
};
template <class Scores, class Hide>
HiddenScores(const Scores&, const Hide&) -> HiddenScores<Scores, Hide>;

// This thread's share of the row maxima.
template <bool ByGroup, int N>
__device__ __forceinline__ float2 partial_maximum(const float (&s)[N], int any_row = kUnlimited) {
  float best[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
  for (int group = 0; group < N; group += kGroupRegs) {
    if (ByGroup && any_row < group_first_column(group)) continue;
#pragma unroll
    for (int i = max(group, 4); i < group + kGroupRegs && i < N; ++i)
      best[i % 4] = fmaxf(best[i % 4], s[i]);
  }
  return {fmaxf(best[0], best[1]), fmaxf(best[2], best[3])};
}

// The greatest of three by their bits, which have the order of the numbers unless all are negative:
// one instruction, for which there is none on floats. Volatile keeps it behind the wait for the
// scores.
__device__ __forceinline__ void raise_to(int& best, float a, float b) {
  asm volatile(
      "{\n.reg .b32 a, b, larger;\nmov.b32 a, %1;\nmov.b32 b, %2;\nmax.s32 larger, a, b;\n"
      "max.s32 %0, %0, larger;\n}"
      : "+r"(best)
      : "f"(a), "f"(b));
}

// The same in half of the instructions if all threads have a score above 0 in each row, as a rule.
template <int N>
__device__ __forceinline__ float2 partial_maximum_by_bits(const float (&s)[N]) {
  int best[2] = {INT_MIN, INT_MIN};
#pragma unroll
  for (int i = 0; i < N; i += 2) raise_to(best[i / 2 % 2], s[i], s[i + 1]);
  if (__any_sync(kWholeWarp, (best[0] | best[1]) < 0)) return partial_maximum<false>(s);
  return {__int_as_float(best[0]), __int_as_float(best[1])};
}

// The first block of a tile: the row maximum is the reference. A row may have no key here.
template <bool ByGroup, int N>
__device__ __forceinline__ void softmax_first(float (&s)[N], OnlineRows& rows, float c,
                                              const VisibleColumns& visible) {
  // The next blocks may exceed this one's maximum by about as much as the maxima of this block's
  // columns differ among themselves. Where that comes near the 2^126 that p can hold, the row
  // maximum is the cheaper way from the start. Columns that a bias hides say nothing.
  constexpr float kWideSpread = 80.f;
  const float2 partial = partial_maximum<ByGroup>(s, visible.any_row);
  const float maximum[2] = {quad_max(partial.x), quad_max(partial.y)};
  const float spread = fmaxf((maximum[0] - partial.x) * c, (maximum[1] - partial.y) * c);
  rows.use_maximum = __any_sync(kWholeWarp, spread > kWideSpread && spread < kFar);
  rows.o_is_behind = 0;
  float ref[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    rows.ref[row] = maximum[row] * c;
    rows.factor[row] = 1.f;
    ref[row] = rows.ref[row] == -INFINITY ? 0.f : rows.ref[row];
  }
  const float2 sum = exponentials<ByGroup>(s, ref[0], ref[1], c, visible.any_row);
  rows.sum[0] = sum.x;
  rows.sum[1] = sum.y;
}

// Any later block. The reference follows the maximum only when it is 2^8 behind, which saves most
// of the multiplications of O. Masked: a row may have met no key yet, and a thread may see none.
template <bool Masked, int N>
__device__ __forceinline__ void softmax_with_maximum(float (&s)[N], OnlineRows& rows, float c) {
  constexpr float kLazy = 8.f;
  const float2 partial = Masked ? partial_maximum<false>(s) : partial_maximum_by_bits(s);
  const float maximum[2] = {quad_max(partial.x) * c, quad_max(partial.y) * c};
  float ref[2];
  bool moved = false;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    // -inf - -inf is NaN and keeps the old reference, as does a NaN maximum.
    const float next = maximum[row] - rows.ref[row] > kLazy ? maximum[row] : rows.ref[row];
    ref[row] = Masked && next == -INFINITY ? 0.f : next;
    moved |= next != rows.ref[row];
    rows.factor[row] = exp2_approx(rows.ref[row] - ref[row]);
    rows.sum[row] *= rows.factor[row];
    rows.ref[row] = next;
  }
  rows.o_is_behind = __any_sync(kWholeWarp, moved) ? 1 : 0;
  const float2 sum = exponentials<false>(s, ref[0], ref[1], c);
  rows.sum[0] += sum.x;
  rows.sum[1] += sum.y;
}

__device__ __forceinline__ void note_rows_without_key(OnlineRows& rows) {
  rows.wait_for_key =
      __any_sync(kWholeWarp, fabsf(rows.ref[0]) > kFar || fabsf(rows.ref[1]) > kFar);
}

// Up to here a thread's share of a block's row sums leaves P and all that is made of it in range.
template <class T>
constexpr float kLargeSum = 0x1p40f;
template <>
constexpr float kLargeSum<__half> = 0x1p14f;  // P itself is fp16

// The block was done with a reference that is too low, and no p overflowed: multiplying by a power
// of two is exact, and makes it what a higher reference would have given.
template <int N>
__device__ __forceinline__ void raise_reference(float (&p)[N], OnlineRows& rows, float2 sum) {
  constexpr int kExponentShift = 23, kExponentBias = 127, kLazy = 8;
  const float partial[2] = {sum.x, sum.y};
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int exponent = (__float_as_int(quad_sum(partial[row])) >> kExponentShift) - kExponentBias;
    const int raise = exponent > kLazy ? exponent : 0;
    rows.factor[row] = __int_as_float((kExponentBias - raise) << kExponentShift);
    rows.ref[row] += static_cast<float>(raise);
    rows.sum[row] = (rows.sum[row] + partial[row]) * rows.factor[row];
  }
#pragma unroll
  for (int i = 0; i < N; ++i) p[i] *= rows.factor[i / 2 % 2];
  // Where blocks keep exceeding the reference by that much, the maximum is cheaper.
  constexpr int kMostRaises = 3;
  const int raises = max(rows.o_is_behind, 1);
  rows.use_maximum = raises >= kMostRaises;
  rows.o_is_behind = raises + 1;
}

// A block in which every row sees every key, and has seen one before: no maximum, no shuffles, no
// factor. The row sums, needed anyway, tell whether the old reference still serves. If not, the
// exponentials are put right by a power of two; if some overflowed, `recompute_s(s)` brings the
// scores back and the warp takes the row maximum from here on: data that jumps like this once will
// again, and recomputing is dear. Each outcome is the softmax with some finite reference. The
// choice depends on the tile's own data alone, so results repeat bit by bit. A NaN needs no
// detection: it is in the sum. by_maximum: take it anyway. MayWait: rows may have met no key
// before. `scores` makes scores, or their exponentials, of the products in s, for the first time or
// again; c is what the scores are multiplied by then.
template <class T, bool Convert, bool MayWait, int N, class Scores, class RecomputeS>
__device__ __forceinline__ void softmax_max_free(float (&s)[N], OnlineRows& rows, float c,
                                                 uint32_t (&p_regs)[N / 2], bool by_maximum,
                                                 const Scores& scores, RecomputeS recompute_s) {
  constexpr float kSafeToSum = 0x1p120f;
  bool again = false;
  if (!rows.use_maximum && !(MayWait && rows.wait_for_key) && !by_maximum) {
    const float2 sum = scores.exponentials(s, rows.ref[0], rows.ref[1]);
    if constexpr (Convert) convert_p<T>(s, p_regs);
    const float larger = fmaxf(sum.x, sum.y);
    if (!__any_sync(kWholeWarp, !(larger < kLargeSum<T>))) {
      rows.sum[0] += sum.x;
      rows.sum[1] += sum.y;
      rows.o_is_behind = 0;
      return;
    }
    if (!__any_sync(kWholeWarp, !(larger < kSafeToSum))) {
      raise_reference(s, rows, sum);
      if constexpr (Convert) convert_p<T>(s, p_regs);
      return;
    }
    recompute_s(s);
    again = rows.use_maximum = true;
  }
  scores.apply(s, again);
  softmax_with_maximum<MayWait>(s, rows, c);
  if constexpr (MayWait) note_rows_without_key(rows);
  if constexpr (Convert) convert_p<T>(s, p_regs);
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_SOFTMAX_SM90_CUH_
