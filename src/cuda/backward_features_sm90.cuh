// What the featured Hopper kernels of the backward add to the plain ones: segments hide pairs, and
// with them whole steps; a soft cap and ALiBi change scores.
//
// A first kernel finds the least and the greatest segment of every few entries. From these a block
// knows which steps have any of the segments it owns; the loading warp passes over the others, and
// tells the consumers of each step which one it is.
#ifndef FLASHATTN_CUDA_BACKWARD_FEATURES_SM90_CUH_
#define FLASHATTN_CUDA_BACKWARD_FEATURES_SM90_CUH_

#include <cstdint>
#include <type_traits>

#include "backward_plan.h"
#include "backward_sm90_parts.cuh"
#include "mask_bits_sm90.cuh"
#include "params.h"
#include "score.cuh"

namespace flashattn {

constexpr int kSegmentThreads = 256;

// One warp a unit: those of the queries, then those of the keys. Entries beyond a sequence's length
// have no segment.
__global__ static void __launch_bounds__(kSegmentThreads)
    backward_segments_kernel(const __grid_constant__ BackwardParams params, BackwardUnits units,
                             float* ranges) {
  const PrefillParams& forward = params.forward;
  const Problem& problem = forward.problem;
  if (blockIdx.x == 0 && threadIdx.x == 0) *BackwardWorkspace(params).again = 0.f;
  if (!forward.features.query_segments) return;
  const int query_units = static_cast<int>(units.query_units(problem));
  const int key_units = static_cast<int>(units.key_units(problem));
  const int place = (blockIdx.x * kSegmentThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
  const bool of_keys = place >= problem.batch * query_units;
  const int index = of_keys ? place - problem.batch * query_units : place;
  const int b = index / (of_keys ? key_units : query_units);
  if (b >= problem.batch) return;
  const int unit = index % (of_keys ? key_units : query_units);
  const Features& features = forward.features;
  const int32_t* ids = of_keys ? features.key_segments.row(b) : features.query_segments.row(b);
  const int entries = of_keys ? units.keys : units.queries;
  const int end = min((unit + 1) * entries, of_keys ? forward.kv_length(b) : forward.q_length(b));
  SegmentRange range;
  for (int i = unit * entries + lane; i < end; i += 32) range.include(__ldg(ids + i));
  range.gather();
  if (lane == 0) reinterpret_cast<SegmentRange*>(ranges)[place] = range;
}

// The ranges of one kernel's units, of a sequence.
struct UnitRanges {
  const SegmentRange *queries, *keys;

  __device__ UnitRanges(const float* ranges, const BackwardUnits& units, const Problem& problem,
                        int b)
      : queries(reinterpret_cast<const SegmentRange*>(ranges) + b * units.query_units(problem)),
        keys(reinterpret_cast<const SegmentRange*>(ranges) +
             problem.batch * units.query_units(problem) + b * units.key_units(problem)) {}
};

struct PackMaskTask {
  Broadcast mask;
  BackwardMask packed;
  int64_t owned_stride, walked_stride;
  int last_owned, last_walked;
  int entries;  // of a unit, a multiple of 16
};

// A block of threads packs what a block owns, a thread an entry, for one unit that it walks over.
// The last entries stand for those beyond.
__global__ static void __launch_bounds__(128)
    backward_mask_kernel(const __grid_constant__ PackMaskTask task) {
  const BackwardMask& packed = task.packed;
  const int unit = blockIdx.x % packed.units, block = blockIdx.x / packed.units % packed.blocks;
  const int plane = blockIdx.x / packed.units / packed.blocks;
  const int entry = block * blockDim.x + threadIdx.x;
  const uint8_t* const mask =
      static_cast<const uint8_t*>(task.mask.data) + plane / packed.heads * task.mask.batch +
      plane % packed.heads * task.mask.head + min(entry, task.last_owned) * task.owned_stride;
  constexpr uint32_t kAllSeen = 0x01010101;
  uint32_t any = 0, all = kAllSeen, words[4] = {};
#pragma unroll 2
  for (int i = 0; i < task.entries / 16; ++i) {
    const uint4 bytes =
        load_mask(mask, task.walked_stride, unit * task.entries + 16 * i, task.last_walked);
    any |= bytes.x | bytes.y | bytes.z | bytes.w;
    all &= bytes.x & bytes.y & bytes.z & bytes.w;
    const uint32_t nibbles = quad_nibbles(bytes);
#pragma unroll
    for (int lane = 0; lane < 4; ++lane)
      words[lane] |= (nibbles >> 8 * (lane / 2 + lane % 2 * 2) & 0xf) << 4 * i;
  }
  if (entry < packed.owned) {
#pragma unroll
    for (int lane = 0; lane < 4; ++lane)
      packed.words[((int64_t{plane} * packed.units + unit) * 4 + lane) * packed.owned + entry] =
          words[lane];
  }
  const bool some = __syncthreads_or(any != 0), whole = __syncthreads_and(all == kAllSeen);
  if (threadIdx.x == 0)
    packed.seen[(int64_t{plane} * packed.blocks + block) * packed.units + unit] =
        (some ? BackwardMask::kAny : 0) | (whole ? BackwardMask::kAll : 0);
}

// A step, whether it is the block's last, whether segments hide any of it, and whether the mask
// does, in one word.
class StepNote {
 public:
  StepNote() = default;  // so that it can lie in shared memory
  __device__ StepNote(int step, bool last, bool mixed, bool masked)
      : code_(8 * step + 4 * last + 2 * masked + mixed) {}
  __device__ int step() const { return code_ >> 3; }
  __device__ bool last() const { return code_ & 4; }
  __device__ bool mixed() const { return code_ & 1; }
  __device__ bool masked() const { return code_ & 2; }

 private:
  int code_;
};

// The soft cap of a call. A product becomes cap_log2 * tanh in log2 units, and tanh takes one power
// of two, of exponent times the product.
struct BackwardCap {
  float exponent = 0.f, cap_log2 = 0.f;  // 0: no cap

  explicit BackwardCap(const Scores& scores) {
    if (scores.softcap <= 0.0) return;
    exponent = static_cast<float>(2.0 * kLog2e * scores.scale / scores.softcap);
    cap_log2 = static_cast<float>(scores.softcap * kLog2e);
  }
  // Opaque: else what is known of it is kept throughout the main loop, or splits that in two.
  __device__ __forceinline__ bool is_given() const {
    int bits = __float_as_int(cap_log2);
    opaque(bits);
    return bits != 0;
  }
};

// The steps of the plain kernels: every one.
struct EveryStep {
  __device__ __forceinline__ void begin_head(int, int64_t) {}
  __device__ __forceinline__ int head(int head) const { return head; }
  __device__ __forceinline__ int from(int step, int) const { return step; }
  __device__ __forceinline__ int back_from(int step, int) const { return step; }
  __device__ __forceinline__ bool is_first(bool of_all, int, int) const { return of_all; }
  __device__ __forceinline__ void note(int, int) {}
};

// A BackwardMask that can lie in shared memory.
struct BackwardMaskTask {
  const uint32_t* words;
  const uint8_t* seen;
  int heads, units, blocks, owned;

  __device__ void operator=(const BackwardMask& mask) {
    words = mask.words;
    seen = mask.seen;
    heads = mask.heads;
    units = mask.units;
    blocks = mask.blocks;
    owned = mask.owned;
  }
};

// Those of the featured ones. Entries: of the side that is walked over, a step. Lies in shared
// memory.
template <int Entries>
class FoundSteps {
 public:
  // By one thread, before a barrier. `owned` and `walked` are segment ids, or null; the block owns
  // block `block` of entries.
  __device__ void fill(const PrefillParams& forward, const Table<const int32_t>& owned,
                       const SegmentRange* own, const Table<const int32_t>& walked,
                       const SegmentRange* walked_ranges, const BackwardMask& mask, int b,
                       int block, int step_floats, const BackwardWorkspace& workspace) {
    const Table<const float>& slopes = forward.features.alibi_slopes;
    slopes_ = slopes ? slopes.row(b) : nullptr;
    shift_ = Sequence(forward, b).shift;
    again_ = workspace.again;
    all_dq_ = workspace.dq;
    step_floats_ = step_floats;
    mask_ = mask;
    plane_ = static_cast<int>(mask.plane(b, 0));
    block_ = mask.blocks == 1 ? 0 : block;
    walked_ = nullptr;
    if (!walked) return;
    owned_ = owned.row(b);
    walked_ = walked.row(b);
    last_owned_ = static_cast<int>(owned.width) - 1;
    last_walked_ = static_cast<int>(walked.width) - 1;
    ranges_ = walked_ranges;
    least_ = own->least;
    most_ = own->most;
  }

  // Finds how many of the steps [begin, end) of these heads are to be done, and the first of them.
  // By the whole block, which meets.
  __device__ void count(int begin, int end, int first_head, int heads) {
    const int different = mask_.heads == 1 ? 1 : heads;
    int found = hides() ? 0 : end - begin, first = hides() ? heads : 0;
    if (hides()) {
      for (int i = different; i-- > 0;) {
        if (threadIdx.x < 32) begin_head(first_head + i);
        __syncthreads();
        int of_head = 0;
        for (int step = begin; step < end; step += blockDim.x)
          of_head += __syncthreads_count(is_to_be_done(step + threadIdx.x, begin, end));
        if (of_head > 0) first = i;
        found += of_head;
      }
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      begin_head(first_head + first);
      const int step = from(begin, end);
      if (threadIdx.x == 0) {
        count_ = left_ = found * (heads / different);
        first_head_ = first_head + first;
        first_step_ = step;
      }
    }
    __syncthreads();
  }
  __device__ __forceinline__ int count() const { return count_; }
  __device__ __forceinline__ bool is_first(bool, int head, int step) const {
    return head == first_head_ && step == first_step_;
  }

  // By a whole warp, as what follows: the steps are now those of this query head.
  __device__ __forceinline__ void begin_head(int head, int64_t first_row = 0) {
    if (threadIdx.x % 32 == 0) {
      head_dq_ = all_dq_ + first_row * (step_floats_ / Entries);
      const int64_t plane = plane_ + (mask_.heads == 1 ? 0 : head);
      head_ = head;
      head_seen_ = mask_.seen + (plane * mask_.blocks + block_) * mask_.units;
      head_words_ = mask_.words + plane * mask_.units * 4 * mask_.owned;
    }
    __syncwarp();
  }

  __device__ __forceinline__ int head(int) const { return head_; }

  // The first step to be done from this one on, or `end`.
  __device__ __forceinline__ int from(int step, int end) const {
    if (!hides()) return step;
    for (; step < end; step += 32) {
      const int mine = step + threadIdx.x % 32;
      const uint32_t found = __ballot_sync(~0u, is_to_be_done(mine, step, end));
      if (found != 0) return step + __ffs(found) - 1;
    }
    return end;
  }
  // The same downwards, or begin - 1.
  __device__ __forceinline__ int back_from(int step, int begin) const {
    if (!hides()) return step;
    for (; step >= begin; step -= 32) {
      const int mine = step - static_cast<int>(threadIdx.x % 32);
      const uint32_t found = __ballot_sync(~0u, is_to_be_done(mine, begin, step + 1));
      if (found != 0) return step - (__ffs(found) - 1);
    }
    return begin - 1;
  }

  // Tells the consumers which step a stage has, before its barrier completes.
  __device__ __forceinline__ void note(int stage, int step) {
    const int lane = threadIdx.x % 32;
    const StepNote note(step, left_ == 1, walked_ && !of_step(step).is_only(own()),
                        mask_.words && !(seen(step) & BackwardMask::kAll));
    if (lane == 0) {
      notes_[stage] = note;
      --left_;
      heads_[stage] = head_;
      dq_[stage] = head_dq_ + int64_t{step} * step_floats_;
      words_[stage] = head_words_ + int64_t{unit(step)} * 4 * mask_.owned;
    }
    if (note.mixed())
#pragma unroll 1
      for (int i = lane; i < Entries; i += 32)
        segments_[stage][i] = __ldg(walked_ + min(step * Entries + i, last_walked_));
    __syncwarp();
  }

  // ---- the consumers' side
  __device__ __forceinline__ StepNote note_of(int stage) const { return notes_[stage]; }
  __device__ __forceinline__ bool has_alibi() const { return slopes_ != nullptr; }
  __device__ __forceinline__ float* dq_of(int stage) const { return dq_[stage]; }
  __device__ __forceinline__ float log2_slope(int stage) const {
    return __ldg(slopes_ + heads_[stage]) * kLog2e;
  }
  // What the mask shows this thread of a stage to an owned entry and the one 8 further.
  __device__ __forceinline__ uint2 mask_words(int stage, int entry) const {
    const uint32_t* words = words_[stage] + (threadIdx.x & 3) * mask_.owned;
    if (mask_.owned == 1) return {__ldg(words), __ldg(words)};
    return {__ldg(words + entry), __ldg(words + entry + 8)};
  }
  __device__ __forceinline__ float distance(int row, int key) const {
    return static_cast<float>(row + shift_ - key);
  }
  __device__ __forceinline__ int owned_segment(int entry) const {
    return __ldg(owned_ + min(entry, last_owned_));
  }
  // Of this entry of a step and the next.
  __device__ __forceinline__ int2 walked_segments(int stage, int entry) const {
    return *reinterpret_cast<const int2*>(&segments_[stage][entry]);
  }

  // Products of a step in which pairs are hidden. Where an entry is not finite, all its products
  // are not: those of one row of the fragment, and of one column, tell.
  template <int N>
  __device__ __forceinline__ void check(const float (&products)[N]) const {
    if (!hides()) return;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (i < 4 || i % 4 < 2) sum = fmaf(products[i], 0.f, sum);
    if (sum != 0.f) *again_ = 1.f;
  }
  // Only what row 0 or 1 of the fragment tells of the columns.
  template <int N>
  __device__ __forceinline__ void check_columns(const float (&products)[N], int row) const {
    if (!hides()) return;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < N; i += 4)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        sum = fmaf(row == 0 ? products[i + e] : products[i + 2 + e], 0.f, sum);
    if (sum != 0.f) *again_ = 1.f;
  }

 private:
  __device__ __forceinline__ SegmentRange of_step(int step) const {
    const int2 range = __ldg(reinterpret_cast<const int2*>(ranges_) + step);
    SegmentRange segments;
    segments.least = range.x;
    segments.most = range.y;
    return segments;
  }
  __device__ __forceinline__ int unit(int step) const { return mask_.units == 1 ? 0 : step; }
  __device__ __forceinline__ int seen(int step) const { return __ldg(head_seen_ + unit(step)); }
  __device__ __forceinline__ bool is_to_be_done(int step, int begin, int end) const {
    return step >= begin && step < end && (!walked_ || of_step(step).overlaps(own())) &&
           (!mask_.words || seen(step) & BackwardMask::kAny);
  }
  // Whether anything but the band hides pairs.
  __device__ __forceinline__ bool hides() const { return walked_ || mask_.words; }
  __device__ __forceinline__ SegmentRange own() const {
    SegmentRange range;
    range.least = least_;
    range.most = most_;
    return range;
  }

  alignas(16) int32_t segments_[2][Entries];  // of the steps that are mixed
  StepNote notes_[2];
  int heads_[2];
  float* dq_[2];  // where its dQ is added up, and that of a head's first step
  float *head_dq_, *all_dq_;
  int step_floats_;
  int first_head_, first_step_;
  BackwardMaskTask mask_;
  const uint32_t* words_[2];
  const uint32_t* head_words_;
  const uint8_t* head_seen_;
  int head_, plane_, block_;
  const float* slopes_;  // of the sequence's heads, or null
  int shift_;
  const int32_t *owned_, *walked_;  // segments of the sequence; walked_ is null without
  const SegmentRange* ranges_;      // of the steps
  int last_owned_, last_walked_;
  int least_, most_;  // of the block's own segments
  int count_, left_;  // steps in all, and not yet noted
  float* again_;
};

template <int Entries, bool Featured>
using BackwardSteps = std::conditional_t<Featured, FoundSteps<Entries>, EveryStep>;

// ---- scores to probabilities, on the fragments of either kind of kernel: rows are what a block
// owns, columns what it walks over

// Of the thread's rows, the first of which is `entry`.
template <int Columns>
__device__ __forceinline__ void hide_other_segments(float (&x)[Columns / 2],
                                                    const FoundSteps<Columns>& steps, int stage,
                                                    int entry, float hidden) {
  const int own = steps.owned_segment(entry), own_8 = steps.owned_segment(entry + 8);
#pragma unroll
  for (int j = 0; j < Columns / 8; ++j) {
    const int2 walked = steps.walked_segments(stage, 8 * j + 2 * (threadIdx.x & 3));
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if ((i & 1 ? walked.y : walked.x) != (i < 2 ? own : own_8)) x[4 * j + i] = hidden;
  }
}

template <int Columns>
__device__ __forceinline__ void hide_by_mask(float (&x)[Columns / 2],
                                             const FoundSteps<Columns>& steps, int stage, int entry,
                                             float hidden) {
  const uint2 seen = steps.mask_words(stage, entry);
#pragma unroll
  for (int i = 0; i < Columns / 2; ++i)
    if (!((i / 2 % 2 == 0 ? seen.x : seen.y) >> (2 * (i / 4) + i % 2) & 1)) x[i] = hidden;
}

// A number each of two columns, or of two rows: what the four elements of a fragment have of it.
struct OfColumns {
  float2 x;
  __device__ __forceinline__ float operator[](int i) const { return i % 2 == 0 ? x.x : x.y; }
};
struct OfRows {
  float2 x;
  __device__ __forceinline__ float operator[](int i) const { return i / 2 % 2 == 0 ? x.x : x.y; }
};

// Away from an element's logit by ALiBi, `distance` being that of the first. A far key alone can
// leave an lse too coarse to tell which way it was rounded; 2^128 is no probability.
__device__ __forceinline__ float with_alibi(float exponent, float log2_slope, float distance,
                                            int element) {
  const int further = 8 * (element / 4) + element % 2 - 8 * (element / 2 % 2);
  return min_or_nan(fmaf(-log2_slope, fabsf(distance + static_cast<float>(further)), exponent),
                    0.f);
}

// What a tanh never is: it marks a hidden pair.
constexpr float kHiddenTanh = 2.f;

// Products to what pairs are hidden in: probabilities, or tanhs under a cap. `lse2(j)` has those of
// elements 4 j to 4 j + 3.
template <int N, int Columns, class Lse2>
__device__ __forceinline__ void begin_probabilities(float (&s)[N], const BackwardCap& cap,
                                                    float scale_log2,
                                                    const FoundSteps<Columns>& steps, int stage,
                                                    float distance, const Lse2& lse2) {
  if (cap.is_given()) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      s[i] = fmaf(-2.f, rcp_approx(1.f + exp2_approx(s[i] * cap.exponent)), 1.f);
  } else if (steps.has_alibi()) {
    const float slope = steps.log2_slope(stage);
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
      const auto l = lse2(j);
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; ++i)
        s[i] = exp2_approx(with_alibi(fmaf(s[i], scale_log2, -l[i]), slope, distance, i));
    }
  } else {
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
      const auto l = lse2(j);
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; ++i) s[i] = exp2_approx(fmaf(s[i], scale_log2, -l[i]));
    }
  }
}

// The rest under a cap: of four tanhs, two words of probabilities and two of the derivatives of the
// cap, 1 - tanh^2, as halves, take the place.
template <class T, bool Alibi, int N, class Lse2>
__device__ __forceinline__ void finish_capped(float (&s)[N], const BackwardCap& cap,
                                              float log2_slope, float distance, const Lse2& lse2) {
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
    const auto l = lse2(j);
    float p[4], derivative[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float tanh = s[4 * j + i];
      float exponent = fmaf(cap.cap_log2, tanh, -l[i]);
      if constexpr (Alibi) exponent = with_alibi(exponent, log2_slope, distance, 4 * j + i);
      p[i] = tanh == kHiddenTanh ? 0.f : exp2_approx(exponent);
      derivative[i] = fmaf(-tanh, tanh, 1.f);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      s[4 * j + e] = __uint_as_float(pack<T>(p[2 * e], p[2 * e + 1]));
      s[4 * j + 2 + e] = __uint_as_float(pack<__half>(derivative[2 * e], derivative[2 * e + 1]));
    }
  }
}
// What it left: word w of the probabilities, and of the derivatives.
template <int N>
__device__ __forceinline__ uint32_t capped_probability(const float (&s)[N], int w) {
  return __float_as_uint(s[w / 2 * 4 + w % 2]);
}
template <int N>
__device__ __forceinline__ uint32_t capped_derivative(const float (&s)[N], int w) {
  return __float_as_uint(s[w / 2 * 4 + 2 + w % 2]);
}

// Probabilities to two a word, as operands of products.
template <class T, int Words>
__device__ __forceinline__ void pack_probabilities(uint32_t (&p)[Words],
                                                   const float (&s)[2 * Words],
                                                   const BackwardCap& cap) {
  if (cap.is_given()) {
#pragma unroll
    for (int w = 0; w < Words; ++w) p[w] = capped_probability(s, w);
  } else {
    pack_pairs<T>(p, s);
  }
}

// dS under a cap, from what finish_capped() left. `delta(j)` is as lse2(j).
template <class T, int N, class Delta>
__device__ __forceinline__ void capped_gradients(uint32_t (&ds)[N / 2], const float (&s)[N],
                                                 const float (&dp)[N], const Delta& delta) {
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
    const auto d = delta(j);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int w = 2 * j + e;
      const float2 p = unpack<T>(capped_probability(s, w));
      const float2 derivative = unpack<__half>(capped_derivative(s, w));
      const float x = score_gradient<true>(p.x, dp[2 * w], d[2 * e]);
      const float y = score_gradient<true>(p.y, dp[2 * w + 1], d[2 * e + 1]);
      ds[w] = pack<T>(x * derivative.x, y * derivative.y);
    }
  }
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_BACKWARD_FEATURES_SM90_CUH_
