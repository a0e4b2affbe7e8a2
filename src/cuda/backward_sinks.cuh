// The gradient of the sinks: a sum over what every backward knows of its query rows.
#ifndef FLASHATTN_CUDA_BACKWARD_SINKS_CUH_
#define FLASHATTN_CUDA_BACKWARD_SINKS_CUH_

#include <cmath>

#include "params.h"
#include "ptx.cuh"

namespace flashattn {

struct RowStatistics {
  float lse2;   // lse in log2 units; +inf where a row contributes nothing: every 2^(s - lse2) is 0
  float delta;  // rowsum(dO * O) - dlse; 0 for such a row
};

constexpr int kSinkThreads = 256;

// dsinks = -sum over rows of p_sink * delta, one block a head of a sequence, always in the same
// order. `row_at(t)` gives the statistics of a row.
template <class RowAt>
__device__ __forceinline__ void store_sink_gradient(const BackwardParams& params,
                                                    const RowAt& row_at) {
  const Problem& problem = params.forward.problem;
  const int n = blockIdx.x % problem.q_heads, b = blockIdx.x / problem.q_heads;
  const float sink2 = params.forward.features.sinks.row(b)[n] * kLog2e;

  float sum = 0.0f;
  for (int t = threadIdx.x; t < problem.q_len; t += kSinkThreads) {
    const RowStatistics row = row_at(t);
    if (row.lse2 != INFINITY) sum -= exp2_approx(sink2 - row.lse2) * row.delta;
  }
  __shared__ float sums[kSinkThreads];
  sums[threadIdx.x] = sum;
  for (int count = kSinkThreads / 2; count > 0; count /= 2) {
    __syncthreads();
    if (threadIdx.x < count) sums[threadIdx.x] += sums[threadIdx.x + count];
  }
  if (threadIdx.x == 0) params.dsinks[blockIdx.x] = sums[0];
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_BACKWARD_SINKS_CUH_
