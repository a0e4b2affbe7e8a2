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
  query += (Shape::kByteCache ? 4 : 2) * (lane % 4);
#pragma unroll
  for (int j = 0; j < Shape::kDimBlocks; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Head dims are multiples of 8, of 16 with bytes: what is behind one, is so for all lanes.
      const int block = 16 * j + (Shape::kByteCache ? 0 : 8 * half);
      const int d = 16 * j + (Shape::kByteCache ? 2 : 8) * half;
      fragments[j][half] = block < head_dim ? load_now_b32(query + d) : 0;
    }
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
  // Asks for the query: before the first tiles, since cold lines would queue behind megabytes of
  // them.
  __device__ QueryFragments(const DecodeArgs& args, const DecodeBlock& block, unsigned char* smem,
                            int warp, int lane)
      : shared_(reinterpret_cast<uint2*>(smem + args.smem.query)),
        shared_scales_(reinterpret_cast<float*>(smem + args.smem.query_scales)) {
    const char* query =
        args.query + batch_entry(block.batch, args.query_batches) * args.query_sequence;
    if constexpr (Shape::kQueryInRegisters) {
#pragma unroll
      for (int c = 0; c < Shape::kColumnBlocks; ++c) load(columns_[c], query, args, block, c, lane);
    } else {
      for (int c = warp; c < Shape::kColumnBlocks; c += args.warps) {
        ColumnFragments<Shape> column;
        load(column, query, args, block, c, lane);
        const float row_scale = normalize(column);
#pragma unroll
        for (int j = 0; j < Shape::kDimBlocks; ++j)
          shared_[(c * Shape::kDimBlocks + j) * 32 + lane] = make_uint2(column[j][0], column[j][1]);
        if (Shape::kByteCache && lane % 4 == 0)
          shared_scales_[c * kDecodeColumns + lane / 4] = row_scale;
      }
    }
  }

  // Waits for the query; called behind the first tiles. The whole block calls it.
  __device__ void finish() {
    if constexpr (Shape::kQueryInRegisters) {
#pragma unroll
      for (int c = 0; c < Shape::kColumnBlocks; ++c) row_scales_[c] = normalize(columns_[c]);
    } else {
      __syncthreads();
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
  // `query` is the sequence's.
  static __device__ void load(ColumnFragments<Shape>& column, const char* query,
                              const DecodeArgs& args, const DecodeBlock& block, int c, int lane) {
    const int row = block.row_of_column(c * kDecodeColumns + lane / 4);
    const DecodeRow where(args, block.batch, block.kv_head, row);
    query += where.token * args.query_token + where.head * args.query_head;
    load_query_row<Shape>(column, reinterpret_cast<const typename Shape::Element*>(query),
                          args.head_dim, lane);
  }
  static __device__ float normalize(ColumnFragments<Shape>& column) {
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
