// Which (query, key) pairs see each other, and the way from a raw product q.k to the logit that the
// softmax takes, with its derivative.
#ifndef FLASHATTN_CUDA_SCORE_CUH_
#define FLASHATTN_CUDA_SCORE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <climits>
#include <cstdint>

#include "params.h"
#include "ptx.cuh"

namespace flashattn {

struct Range {
  int begin, end;

  // begin <= end. One comparison for two.
  __device__ bool has(int i) const {
    return static_cast<uint32_t>(i - begin) < static_cast<uint32_t>(end - begin);
  }
};

// The lengths of one sequence and its window as a band of diagonals: query i sees key j iff
// low <= j - i <= high. Equal to visible_keys(), but in a form that can also be asked the other way
// round and of whole tiles. Rows and columns are inclusive ranges [first, last].
struct Sequence {
  int batch;
  int q_len, kv_len;
  int shift;
  int low, high;

  Sequence() = default;  // so that it can lie in shared memory
  __device__ Sequence(const PrefillParams& params, int b)
      : batch(b), q_len(params.q_length(b)), kv_len(params.kv_length(b)) {
    const Scores& scores = params.scores;
    shift = scores.bottom_right ? kv_len - q_len : 0;
    low = scores.window_left == kUnlimited
              ? -kUnlimited
              : max_int(-int64_t{kUnlimited}, int64_t{shift} - scores.window_left);
    high = scores.window_right == kUnlimited
               ? kUnlimited
               : min_int(kUnlimited, int64_t{shift} + scores.window_right);
  }

  __device__ bool sees(int i, int j) const {
    const int diagonal = j - i;
    return i < q_len && j < kv_len && diagonal >= low && diagonal <= high;
  }
  __device__ bool all_seen(int i_first, int i_last, int j_first, int j_last) const {
    return i_last < q_len && j_last < kv_len && j_first - i_last >= low && j_last - i_first <= high;
  }
  __device__ bool any_seen(int i_first, int i_last, int j_first, int j_last) const {
    return i_first < q_len && j_first < kv_len && j_last - i_first >= low &&
           j_first - i_last <= high;
  }

  // The keys that any query of the range sees, or all do, and the queries that see any key of the
  // range.
  __device__ Range keys_seen_by(int i_first, int i_last) const {
    return {max_int(0, int64_t{i_first} + low),
            min_int(kv_len, int64_t{min_int(i_last, q_len - 1)} + high + 1)};
  }
  __device__ Range keys_seen_by_all(int i_first, int i_last) const {
    if (i_last >= q_len) return {0, 0};
    return {max_int(0, int64_t{i_last} + low), min_int(kv_len, int64_t{i_first} + high + 1)};
  }
  __device__ Range queries_seeing(int j_first, int j_last) const {
    return {max_int(0, int64_t{j_first} - high),
            min_int(q_len, int64_t{min_int(j_last, kv_len - 1)} - low + 1)};
  }
};

// Smallest and largest segment of a range.
struct SegmentRange {
  int least = INT_MAX, most = INT_MIN;

  __device__ void include(int segment) {
    least = min(least, segment);
    most = max(most, segment);
  }
  // Over all lanes.
  __device__ void gather() {
    least = __reduce_min_sync(~0u, least);
    most = __reduce_max_sync(~0u, most);
  }
  __device__ bool overlaps(const SegmentRange& other) const {
    return least <= other.most && other.least <= most;
  }
  __device__ bool is_only(const SegmentRange& other) const {
    return least == most && other.least == least && other.most == least;
  }
};

struct Logit {
  float value;  // in log2 units
  float slope;  // derivative with respect to scale * q.k, apart from those units
};

// tanh.approx errs by 2^-11, which a cap of 50 turns into percents of a probability; this form errs
// by 1e-7 absolute.
__device__ __forceinline__ float tanh_by_exp2(float x) {
  return 1.0f - 2.0f * rcp_approx(1.0f + exp2_approx(2.0f * kLog2e * x));
}

__device__ __forceinline__ float load_as_float(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(data)[index];
    case DType::kF16:
      return __half2float(static_cast<const __half*>(data)[index]);
    case DType::kBF16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    default:
      return static_cast<float>(static_cast<const double*>(data)[index]);
  }
}

// A finite bias stays finite in log2 units. Numbers as large as finfo.min stand for "masked", and a
// row that has nothing else must get their softmax, not that of no key at all.
__device__ __forceinline__ float bounded_bias(float bias) {
  constexpr float kLimit = 2.3e38f;  // times log2(e): just below the largest float
  const float size = fabsf(bias);
  return size > kLimit && size < INFINITY ? copysignf(kLimit, bias) : bias;
}

// The scores of one query head of one sequence. Without features a logit is a multiple of q.k.
template <bool Featured>
class ScoreMap {
 public:
  __device__ ScoreMap(const PrefillParams& params, const Sequence&, int)
      : scale_log2_(static_cast<float>(params.scores.scale * kLog2e)) {}

  __device__ bool hides(int, int) const { return false; }
  __device__ Logit logit(float product, int, int) const { return {product * scale_log2_, 1.0f}; }

 private:
  float scale_log2_;
};

template <>
class ScoreMap<true> {
 public:
  __device__ ScoreMap(const PrefillParams& params, const Sequence& sequence, int head)
      : features_(params.features),
        scale_(static_cast<float>(params.scores.scale)),
        cap_(static_cast<float>(params.scores.softcap)),
        shift_(sequence.shift),
        bias_(features_.bias.data ? features_.bias.offset(sequence.batch, head, 0, 0) : 0),
        mask_(features_.mask.data ? features_.mask.offset(sequence.batch, head, 0, 0) : 0),
        alibi_slope_(features_.alibi_slopes ? features_.alibi_slopes.row(sequence.batch)[head]
                                            : 0.0f) {
    if (features_.query_segments) {
      query_segments_ = features_.query_segments.row(sequence.batch);
      key_segments_ = features_.key_segments.row(sequence.batch);
    }
  }

  // What the band does not say; (i, j) must be inside both lengths.
  __device__ bool hides(int i, int j) const {
    if (query_segments_ && query_segments_[i] != key_segments_[j]) return true;
    const Broadcast& mask = features_.mask;
    return mask.data &&
           !static_cast<const uint8_t*>(mask.data)[mask_ + i * mask.row + j * mask.col];
  }

  __device__ Logit logit(float product, int i, int j) const {
    float score = product * scale_;
    float slope = 1.0f;
    if (cap_ > 0.0f) {
      const float tanh = tanh_by_exp2(score / cap_);
      score = cap_ * tanh;
      slope = 1.0f - tanh * tanh;
    }
    if (features_.alibi_slopes) score -= alibi_slope_ * fabsf(static_cast<float>(i + shift_ - j));
    const Broadcast& bias = features_.bias;
    if (bias.data) {
      score +=
          bounded_bias(load_as_float(bias.data, bias.dtype, bias_ + i * bias.row + j * bias.col));
    }
    return {score * kLog2e, slope};
  }

 private:
  const Features& features_;
  float scale_, cap_;
  int shift_;
  int64_t bias_, mask_;  // where the head's part begins
  float alibi_slope_;
  const int32_t* query_segments_ = nullptr;
  const int32_t* key_segments_ = nullptr;
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_SCORE_CUH_
