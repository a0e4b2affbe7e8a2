// The second kernel of a decode call whose splits could not merge inside a cluster.
#ifndef FLASHATTN_CUDA_DECODE_COMBINE_CUH_
#define FLASHATTN_CUDA_DECODE_COMBINE_CUH_

#include "decode_locate.cuh"
#include "decode_merge.cuh"
#include "device.h"
#include "launch.h"

namespace flashattn {

constexpr int kCombineThreads = 256;

// A weighted sum of partial outputs, by the largest maximum among them.
struct Combined {
  RowStats stats;
  float4 values = {0.0f, 0.0f, 0.0f, 0.0f};

  // Adds Count of them; their loads are all in flight together.
  template <int Count>
  __device__ void add(const RowStats (&parts)[Count], const float4 (&outs)[Count]) {
    float raised = stats.max;
#pragma unroll
    for (int i = 0; i < Count; ++i) raised = fmaxf(raised, parts[i].max);
    const float scale = exp2_approx(stats.max - raised);
    stats.max = raised;
    stats.sum *= scale;
    stats.exact_sum *= scale;
    values = weighted(scale, values);
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      const float weight = exp2_approx(parts[i].max - raised);
      stats.add(weight, parts[i]);
      values = add_weighted(values, weight, outs[i]);
    }
  }
};

// Rows of a block: all of a kv head in a ragged batch, where most blocks find nothing to combine.
__host__ __device__ constexpr int combined_rows(int extra_blocks, int rows) {
  return extra_blocks > 0 ? rows : 1;
}

// A thread for each item of a row, and as many groups of them, each with every groups-th split, as
// fit. Splits, then groups, are summed in their order.
template <class T, bool ByteCache>
__global__ void __launch_bounds__(kCombineThreads)
    decode_combine_kernel(const __grid_constant__ DecodeArgs args) {
  constexpr int kBatch = 4;
  __shared__ float4 group_values[kCombineThreads];
  __shared__ float4 group_stats[kCombineThreads];
  const Partials partials = Partials::of(args);
  const int items = partials.width / 4, groups = kCombineThreads / items;
  const int group = threadIdx.x / items, item = threadIdx.x % items;
  const int rows = combined_rows(args.extra_blocks, partials.rows);
  const int pair = blockIdx.x / (partials.rows / rows);
  const int first_row = blockIdx.x % (partials.rows / rows) * rows;
  const int kv_heads = args.kv_heads;
  const int batch = pair / kv_heads, kv_head = pair % kv_heads;
  const PartialSlots slots(args, batch, kv_head, threadIdx.x % 32);
  if (slots.splits == 1) return;

  for (int row = first_row; row < first_row + rows; ++row) {
    Combined mine;
    if (group < groups) {
      for (int first = group; first < slots.splits; first += kBatch * groups) {
        RowStats stats[kBatch];
        float4 outs[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int split = first + i * groups;
          const int64_t index = partials.index(slots.of_part(split), row);
          const bool exists = split < slots.splits;
          if (exists) stats[i] = RowStats(__ldcg(partials.stats + index));
          outs[i] =
              exists ? __ldcg(partials.out(index) + item) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        mine.add(stats, outs);
      }
      group_values[threadIdx.x] = mine.values;
      if (item == 0) group_stats[group] = mine.stats.packed();
    }
    __syncthreads();
    if (group == 0) {
      Combined all;
      for (int i = 0; i < groups; ++i) {
        const RowStats stats[1] = {RowStats(group_stats[i])};
        const float4 values[1] = {group_values[i * items + item]};
        all.add(stats, values);
      }
      const DecodeRow where(args, batch, kv_head, row);
      store_item<T, ByteCache>(output_row<T>(args, where), item, all.values, all.stats);
    }
    __syncthreads();
  }
}

template <class T>
Status launch_decode_combine(const DecodeArgs& args, const Device& device, cudaStream_t stream) {
  Launch combine;
  combine.kernel_name = "decode_combine";
  combine.kernel = args.key_scales
                       ? reinterpret_cast<const void*>(&decode_combine_kernel<T, true>)
                       : reinterpret_cast<const void*>(&decode_combine_kernel<T, false>);
  combine.grid = dim3(static_cast<unsigned>(args.batch) * args.kv_heads * args.query_rows /
                      combined_rows(args.extra_blocks, args.query_rows));
  combine.threads = kCombineThreads;
  combine.shared_memory = 0;
  void* kernel_args[] = {const_cast<DecodeArgs*>(&args)};
  return launch(combine, kernel_args, device, stream);
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_DECODE_COMBINE_CUH_
