// The query of a block as operands of the tensor cores.
#ifndef FLASHATTN_CUDA_DECODE_QUERY_CUH_
#define FLASHATTN_CUDA_DECODE_QUERY_CUH_

#include "decode_block.cuh"
#include "decode_shape.cuh"

namespace flashattn {

// One column block as B fragments, 16 dims x 8 rows each. A lane holds, of row lane / 4, the dims
// that load_key_fragments gives it.
template <class Shape>
using ColumnFragments = uint32_t[Shape::kDimBlocks][2];

template <class Shape>
__device__ __forceinline__ void load_query_row(ColumnFragments<Shape>& fragments,
                                               const typename Shape::Element* query, int head_dim,
                                               int lane) {
  const int dim = (Shape::kByteCache ? 4 : 2) * (lane % 4);
#pragma unroll
  for (int j = 0; j < Shape::kDimBlocks; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int d = 16 * j + dim + half * (Shape::kByteCache ? 2 : 8);
      fragments[j][half] = d < head_dim ? load_now_b32(query + d) : 0;
    }
}

template <class Shape>
__device__ __forceinline__ void load_query(ColumnFragments<Shape>& fragments,
                                           const DecodeArgs& args, const DecodeBlock& block,
                                           int column_block, int lane) {
  const DecodeParams& params = args.params;
  const int row = block.row_of_column(column_block * kDecodeColumns + lane / 4);
  const DecodeRow where(args, block.batch, block.kv_head, row);
  const auto* query = static_cast<const typename Shape::Element*>(params.q.data) +
                      batch_entry(block.batch, params.q.batches) * params.q.batch +
                      where.token * params.q.seq + where.head * params.q.head;
  load_query_row<Shape>(fragments, query, params.problem.head_dim, lane);
}

__device__ __forceinline__ float2 as_float2(uint32_t pair, __half) {
  return __half22float2(as_half2(pair));
}
__device__ __forceinline__ float2 as_float2(uint32_t pair, __nv_bfloat16) {
  return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&pair));
}

// For the fp16 products of 8-bit caches: scales each query row by a power of two to a largest
// element of 128 to 256, so that a bfloat16 row of any magnitude keeps its 8 bits. Returns what
// undoes it, for the row lane / 4.
template <class Shape>
__device__ __forceinline__ float normalize_query(ColumnFragments<Shape>& fragments) {
  using Element = typename Shape::Element;
  float largest = 0.0f;
#pragma unroll
  for (int j = 0; j < Shape::kDimBlocks; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 x = as_float2(fragments[j][half], Element());
      largest = fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
    }
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  // 2^(7 - exponent), from the exponent field; kept away from the ends, where it would overflow.
  const int exponent = min(max(__float_as_int(largest) >> 23, 40), 220);
  const float scale = __int_as_float((2 * 127 + 7 - exponent) << 23);
#pragma unroll
  for (int j = 0; j < Shape::kDimBlocks; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 x = as_float2(fragments[j][half], Element());
      fragments[j][half] = pack<__half>(x.x * scale, x.y * scale);
    }
  return __int_as_float((exponent - 7) << 23);
}

// All column blocks, in registers or shared by the warps.
template <class Shape>
class QueryFragments {
 public:
  // Loads the query. Called before the first tiles are asked for: cold lines would queue behind
  // megabytes of them. What the warps share is there after the next __syncthreads().
  __device__ QueryFragments(const DecodeArgs& args, const DecodeBlock& block, unsigned char* smem)
      : shared_(reinterpret_cast<uint2*>(smem + args.plan.smem.query)),
        shared_scales_(reinterpret_cast<float*>(smem + args.plan.smem.query_scales)) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if constexpr (Shape::kQueryInRegisters) {
#pragma unroll
      for (int c = 0; c < Shape::kColumnBlocks; ++c)
        row_scales_[c] = load_column(columns_[c], args, block, c, lane);
    } else {
      for (int c = warp; c < Shape::kColumnBlocks; c += args.plan.warps) {
        ColumnFragments<Shape> column;
        const float row_scale = load_column(column, args, block, c, lane);
#pragma unroll
        for (int j = 0; j < Shape::kDimBlocks; ++j)
          shared_[(c * Shape::kDimBlocks + j) * 32 + lane] = make_uint2(column[j][0], column[j][1]);
        if (Shape::kByteCache && lane % 4 == 0)
          shared_scales_[c * kDecodeColumns + lane / 4] = row_scale;
      }
    }
  }

  __device__ uint2 get(int column_block, int dim_block, int lane) const {
    if constexpr (Shape::kQueryInRegisters) {
      const auto& pair = columns_[column_block][dim_block];
      return make_uint2(pair[0], pair[1]);
    } else {
      return shared_[(column_block * Shape::kDimBlocks + dim_block) * 32 + lane];
    }
  }

  // By what products with a column are to be multiplied. The whole warp calls it.
  __device__ float column_scale(int column_block, int column) const {
    if constexpr (Shape::kQueryInRegisters) {
      return __shfl_sync(~0u, row_scales_[column_block], 4 * column);
    } else {
      return shared_scales_[column_block * kDecodeColumns + column];
    }
  }

 private:
  static __device__ float load_column(ColumnFragments<Shape>& column, const DecodeArgs& args,
                                      const DecodeBlock& block, int c, int lane) {
    load_query<Shape>(column, args, block, c, lane);
    if constexpr (Shape::kByteCache) return normalize_query<Shape>(column);
    return 1.0f;
  }

  static constexpr int kInRegisters = Shape::kQueryInRegisters ? Shape::kColumnBlocks : 1;
  ColumnFragments<Shape> columns_[kInRegisters];
  float row_scales_[kInRegisters];
  uint2* shared_;
  float* shared_scales_;
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_DECODE_QUERY_CUH_
