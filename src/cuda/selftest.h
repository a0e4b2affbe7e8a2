// The building blocks of the Hopper kernels, tried one by one (selftest_sm90.cuh); for tests only.
#ifndef FLASHATTN_CUDA_SELFTEST_H_
#define FLASHATTN_CUDA_SELFTEST_H_

#include <cuda_runtime_api.h>

#include "device.h"

namespace flashattn {

// d (64, n), fp32, and rounded (64, n), bfloat16, become a b, where `mode` (a WgmmaMode) says how a
// and b, bfloat16, are stored. n is 64, 96 or 128.
Status selftest_wgmma(int mode, int n, const void* a, const void* b, float* d, void* rounded,
                      const Device& device, cudaStream_t stream);
// raw (chunks, 64, 64), bfloat16: shared memory after a packed load of x (positions, heads, head
// dim).
Status selftest_tma(const void* x, void* raw, int positions, int heads, int head_dim, int group,
                    int position, int group_index, const Device& device, cudaStream_t stream);
// sum (64, 64), fp32: the sum of the tiles of x (64 tiles, 64), bfloat16, through a barrier ring.
Status selftest_ring(const void* x, float* sum, int tiles, const Device& device,
                     cudaStream_t stream);

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_SELFTEST_H_
