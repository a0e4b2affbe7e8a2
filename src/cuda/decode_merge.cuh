// The end of a decode block: the warps' states become one, and that one the output, a partial
// output for decode_combine.cuh, or this block's contribution to its cluster. All in a fixed order.
#ifndef FLASHATTN_CUDA_DECODE_MERGE_CUH_
#define FLASHATTN_CUDA_DECODE_MERGE_CUH_

#include "decode_tile.cuh"
#include "ptx_sm90.cuh"

namespace flashattn {

// Device code for 8.0 is also what newer GPUs translate from PTX; it has no cluster merge.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kHasClusters = true;
#else
constexpr bool kHasClusters = false;
#endif

// The unit of all merging: four output dims of one row, as a lane staged them. Item x * 8 + r of a
// row holds the dims StagedDims::first(x, r) + step(0 .. 3).
constexpr int decode_items(int head_dim) { return head_dim / 4; }

__device__ __forceinline__ float4 weighted(float weight, float4 x) {
  return make_float4(weight * x.x, weight * x.y, weight * x.z, weight * x.w);
}
__device__ __forceinline__ float4 add_weighted(float4 sum, float weight, float4 x) {
  return make_float4(fmaf(weight, x.x, sum.x), fmaf(weight, x.y, sum.y), fmaf(weight, x.z, sum.z),
                     fmaf(weight, x.w, sum.w));
}

// Normalises and stores one item of a row whose scores have this maximum and sum of weights; item 0
// also stores the lse. A row without a key has max kNoScore and sum 0.
template <class T, bool ByteCache>
__device__ __forceinline__ void store_item(const DecodeParams& params, const DecodeRow& row,
                                           int item, float4 values, float max, float sum) {
  float scale = 1.0f;
  if (params.sinks) {
    const float sink =
        kLog2e *
        params.sinks
            .data[batch_entry(row.batch, params.sinks.batches) * params.sinks.width + row.head];
    const float raised = fmaxf(max, sink);
    scale = exp2_approx(max - raised);
    sum = fmaf(sum, scale, exp2_approx(sink - raised));
    max = raised;
  }
  scale = sum == 0.0f ? 0.0f : scale * rcp_approx(sum);
  T* out = static_cast<T*>(params.o.data) + params.o.offset(row.batch, row.token, row.head);
  const float dims[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int dim =
        StagedDims<ByteCache>::first(item / 8, item % 8) + StagedDims<ByteCache>::step(i);
    if (dim < params.problem.value_dim) out[dim] = static_cast<T>(dims[i] * scale);
  }
  if (item == 0 && params.lse.data)
    static_cast<float*>(params.lse.data)[params.lse.offset(row.batch, row.token, row.head)] =
        sum == 0.0f ? -INFINITY : (max + log2_approx(sum)) * kLn2;
}

// The partial outputs in the workspace: all rows of a slot, then their (max, sum).
struct Partials {
  float* outs;
  float2* stats;
  int width, rows;

  __device__ explicit Partials(const DecodeArgs& args) {
    const Problem& problem = args.params.problem;
    width = decode_partial_width(problem.value_dim);
    rows = problem.q_len * problem.group();
    outs = args.params.workspace;
    stats = reinterpret_cast<float2*>(outs + args.plan.partial_slots(problem) * rows * width);
  }
  // `row` counts all q_len * group rows of the kv head.
  __device__ int64_t index(int64_t slot, int row) const { return slot * rows + row; }
  __device__ float4* out(int64_t index) const {
    return reinterpret_cast<float4*>(outs + index * width);
  }
};

template <class Shape>
class BlockMerge {
 public:
  __device__ BlockMerge(const DecodeArgs& args, const DecodeBlock& block, unsigned char* smem)
      : args_(args),
        block_(block),
        smem_(smem),
        stats_(reinterpret_cast<float2*>(smem + args.plan.smem.stats)) {}

  // Column blocks go one after another through the same staging memory, the rings' own.
  __device__ void run(const WarpState<Shape>& state) {
#pragma unroll
    for (int c = 0; c < Shape::kColumnBlocks; ++c) {
      stage(state, c);
      __syncthreads();
      const int items = min(kDecodeColumns, block_.rows - c * kDecodeColumns) * kItems;
      if (in_cluster()) {
        push(c, items);
      } else if (block_.splits > 1) {
        write_partials(c, items);
      } else {
        write_output(c, items);
      }
      if (c + 1 < Shape::kColumnBlocks) __syncthreads();
    }
    if (in_cluster()) receive();
  }

  // Makes the block ready to receive. The cluster barrier is waited for behind the first loads.
  static __device__ void open(const DecodeArgs& args, const DecodeBlock& block,
                              unsigned char* smem) {
    if constexpr (kHasClusters) {
      if (args.plan.cluster == 1) return;
      if (threadIdx.x == 0) {
        const uint32_t barrier = shared_address(smem + args.plan.smem.barrier);
        mbarrier_init(barrier, 1);
        mbarrier_init_fence();
        mbarrier_expect_tx(barrier, block.rows * (Shape::kHeadDim * 4 + args.plan.cluster * 8));
      }
      __syncwarp();
      cluster_arrive_relaxed();
    }
  }
  static __device__ void wait_until_open(const DecodeArgs& args) {
    if constexpr (kHasClusters)
      if (args.plan.cluster > 1) cluster_wait();
  }

 private:
  static constexpr int kItems = decode_items(Shape::kHeadDim);
  static constexpr int kStagedRow = decode_staged_row(Shape::kHeadDim);
  static constexpr int kStagedColumn = decode_staged_column(Shape::kHeadDim);

  // How much each warp's state counts for one row.
  struct WarpWeights {
    float weight[kDecodeMaxWarps];
    float max, sum;
  };

  __device__ bool in_cluster() const { return kHasClusters && args_.plan.cluster > 1; }
  __device__ int row(int column_block, int item) const {
    return block_.first_row + column_block * kDecodeColumns + item / kItems;
  }

  __device__ void stage(const WarpState<Shape>& state, int c) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto* region = reinterpret_cast<float*>(smem_ + warp * args_.plan.smem.warp_region);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int column = 2 * (lane % 4) + h;
      float* staged = region + column * kStagedColumn + lane / 4 * kStagedRow;
#pragma unroll
      for (int x = 0; x < Shape::kDimBlocks / 2; ++x) {
        float4 values = make_float4(state.out[c][2 * x][h], state.out[c][2 * x][2 + h],
                                    state.out[c][2 * x + 1][h], state.out[c][2 * x + 1][2 + h]);
        if constexpr (Shape::kByteCache) values = weighted(state.value_scale, values);
        *reinterpret_cast<float4*>(staged + 4 * x) = values;
      }
      if (lane < 4)
        stats_[warp * kDecodeColumns + column] = make_float2(state.max[c][h], state.sum[c][h]);
    }
  }

  __device__ WarpWeights weigh_warps(int column) const {
    WarpWeights w;
    w.max = kNoScore;
    w.sum = 0.0f;
    float2 stats[kDecodeMaxWarps];
#pragma unroll
    for (int i = 0; i < kDecodeMaxWarps; ++i) {
      stats[i] =
          i < args_.plan.warps ? stats_[i * kDecodeColumns + column] : make_float2(kNoScore, 0.0f);
      w.max = fmaxf(w.max, stats[i].x);
    }
#pragma unroll
    for (int i = 0; i < kDecodeMaxWarps; ++i) {
      w.weight[i] = exp2_approx(stats[i].x - w.max);
      w.sum = fmaf(w.weight[i], stats[i].y, w.sum);
    }
    return w;
  }

  __device__ float4 merge_warps(int item, const WarpWeights& w) const {
    const int in_row = item % kItems;
    const auto* staged =
        smem_ + 4 * (item / kItems * kStagedColumn + in_row % 8 * kStagedRow + in_row / 8 * 4);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < kDecodeMaxWarps; ++i)
      if (i < args_.plan.warps)
        sum = add_weighted(
            sum, w.weight[i],
            *reinterpret_cast<const float4*>(staged + i * args_.plan.smem.warp_region));
    return sum;
  }

  __device__ void write_output(int c, int items) const {
    for (int item = threadIdx.x; item < items; item += blockDim.x) {
      const WarpWeights w = weigh_warps(item / kItems);
      const DecodeRow where(args_, block_.batch, block_.kv_head, row(c, item));
      store_item<typename Shape::Element, Shape::kByteCache>(args_.params, where, item % kItems,
                                                             merge_warps(item, w), w.max, w.sum);
    }
  }

  __device__ void write_partials(int c, int items) const {
    const Partials partials(args_);
    for (int item = threadIdx.x; item < items; item += blockDim.x) {
      const WarpWeights w = weigh_warps(item / kItems);
      const int64_t index = partials.index(block_.partial_slot, row(c, item));
      const int in_row = item % kItems;
      if (4 * in_row < partials.width) __stcg(partials.out(index) + in_row, merge_warps(item, w));
      if (in_row == 0) __stcg(partials.stats + index, make_float2(w.max, w.sum));
    }
  }

  // Items are dealt round robin over the blocks of the cluster, counted over all rows of the block.
  __device__ int slots() const { return block_.rows * kItems / args_.plan.cluster; }
  __device__ uint32_t received(int from, int slot) const {
    return shared_address(smem_ + args_.plan.smem.received) + (from * slots() + slot) * 16;
  }
  __device__ uint32_t received_stats(int from, int row) const {
    return shared_address(smem_ + args_.plan.smem.received_stats) + (from * block_.rows + row) * 8;
  }

  // Sends every block of the cluster its items. All are read before the first is sent.
  __device__ void push(int c, int items) const {
    constexpr int kFewestThreads = 128;
    constexpr int kPasses = divide_up(kDecodeColumns * kItems, kFewestThreads);
    const int cluster = args_.plan.cluster, shift = __ffs(cluster) - 1;
    const uint32_t barrier = shared_address(smem_ + args_.plan.smem.barrier);
    float4 values[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int item = threadIdx.x + i * blockDim.x;
      if (item < items) values[i] = merge_warps(item, weigh_warps(item / kItems));
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int item = threadIdx.x + i * blockDim.x;
      if (item >= items) break;
      const int owner = item & (cluster - 1);
      const int slot = (c * kDecodeColumns * kItems + item) >> shift;
      store_async(cluster_address(received(block_.split, slot), owner), values[i],
                  cluster_address(barrier, owner));
    }
    // The last threads have the fewest items.
    const int last = blockDim.x - 1 - threadIdx.x;
    const int column = last % kDecodeColumns, owner = last / kDecodeColumns;
    if (owner < cluster && column * kItems < items) {
      const WarpWeights w = weigh_warps(column);
      const int row = c * kDecodeColumns + column;
      store_async(cluster_address(received_stats(block_.split, row), owner),
                  make_float2(w.max, w.sum), cluster_address(barrier, owner));
    }
  }

  // Merges and stores this block's items. The block's memory must last until all have arrived: warp
  // 0 waits even without items of its own.
  __device__ void receive() const {
    const int threads = blockDim.x, thread = threadIdx.x, count = slots();
    if (thread >= 32 && thread >= count) return;
    mbarrier_wait_cluster(shared_address(smem_ + args_.plan.smem.barrier), 0);
    for (int slot = thread; slot < count; slot += threads) {
      const int item = slot * args_.plan.cluster + block_.split, row = item / kItems;
      const auto* stats =
          reinterpret_cast<const float2*>(smem_ + args_.plan.smem.received_stats) + row;
      const auto* items = reinterpret_cast<const float4*>(smem_ + args_.plan.smem.received) + slot;
      float2 from[kDecodeMaxCluster];
      float max = kNoScore, sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kDecodeMaxCluster; ++i) {
        from[i] = i < args_.plan.cluster ? stats[i * block_.rows] : make_float2(kNoScore, 0.0f);
        max = fmaxf(max, from[i].x);
      }
      float4 values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < kDecodeMaxCluster; ++i) {
        if (i >= args_.plan.cluster) break;
        const float weight = exp2_approx(from[i].x - max);
        sum = fmaf(weight, from[i].y, sum);
        values = add_weighted(values, weight, items[i * count]);
      }
      const DecodeRow where(args_, block_.batch, block_.kv_head, block_.first_row + row);
      store_item<typename Shape::Element, Shape::kByteCache>(args_.params, where, item % kItems,
                                                             values, max, sum);
    }
  }

  const DecodeArgs& args_;
  const DecodeBlock& block_;
  unsigned char* smem_;
  float2* stats_;
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_DECODE_MERGE_CUH_
