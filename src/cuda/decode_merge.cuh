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

// What a merge knows of a row beside its accumulators. A row without a key has max kNoScore and
// sums of 0.
struct RowStats {
  float max = kNoScore;
  float sum = 0.0f;        // of the rounded weights that multiplied V
  float exact_sum = 0.0f;  // of the weights themselves

  __device__ RowStats() {}
  __device__ explicit RowStats(float4 x) : max(x.x), sum(x.y), exact_sum(x.z) {}
  __device__ float4 packed() const { return make_float4(max, sum, exact_sum, 0.0f); }

  // Adds sums that count by `weight`.
  __device__ void add(float weight, const RowStats& other) {
    sum = fmaf(weight, other.sum, sum);
    exact_sum = fmaf(weight, other.exact_sum, exact_sum);
  }
};

// Where the results of one query row go.
template <class T>
struct OutputRow {
  T* out;
  float* lse;         // null: not wanted
  const float* sink;  // null: none
  int value_dim;
};

template <class T>
__device__ __forceinline__ OutputRow<T> output_row(const DecodeArgs& args, const DecodeRow& row) {
  const int64_t out =
      row.batch * args.out_sequence + row.token * args.out_token + row.head * args.out_head;
  const int64_t lse =
      row.batch * args.lse_sequence + row.token * args.lse_token + row.head * args.lse_head;
  const int64_t sink = batch_entry(row.batch, args.sink_batches) * args.sinks_width + row.head;
  return {static_cast<T*>(args.out) + out, args.lse ? args.lse + lse : nullptr,
          args.sinks ? args.sinks + sink : nullptr, args.value_dim};
}

// Adds the sink, if there is one, and returns what the accumulators have to be multiplied with.
template <class T>
__device__ __forceinline__ float normalize(const OutputRow<T>& row, RowStats& stats) {
  float scale = 1.0f;
  if (row.sink) {
    const float sink = kLog2e * *row.sink;
    const float raised = fmaxf(stats.max, sink), weight = exp2_approx(sink - raised);
    scale = exp2_approx(stats.max - raised);
    stats.sum = fmaf(stats.sum, scale, weight);
    stats.exact_sum = fmaf(stats.exact_sum, scale, weight);
    stats.max = raised;
  }
  return stats.sum == 0.0f ? 0.0f : scale * rcp_approx(stats.sum);
}

// `stats` as normalize() leaves them.
template <class T>
__device__ __forceinline__ void store_lse(const OutputRow<T>& row, const RowStats& stats) {
  if (row.lse)
    *row.lse = stats.sum == 0.0f ? -INFINITY : (stats.max + log2_approx(stats.exact_sum)) * kLn2;
}

// Normalises and stores one item of a row; item 0 also stores the lse.
template <class T, bool ByteCache>
__device__ __forceinline__ void store_item(const OutputRow<T>& row, int item, float4 values,
                                           RowStats stats) {
  const float scale = normalize(row, stats);
  const float dims[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int dim =
        StagedDims<ByteCache>::first(item / 8, item % 8) + StagedDims<ByteCache>::step(i);
    if (dim < row.value_dim) row.out[dim] = static_cast<T>(dims[i] * scale);
  }
  if (item == 0) store_lse(row, stats);
}

// The partial outputs in the workspace: all rows of a slot, then their RowStats.
struct Partials {
  float* outs;
  float4* stats;
  int width, rows;

  static __device__ Partials of(const DecodeArgs& args) {
    return {args.partial_outs, args.partial_stats, decode_partial_width(args.value_dim),
            args.query_rows};
  }
  // `row` counts all q_len * group rows of the kv head.
  __device__ int64_t index(int64_t slot, int row) const { return slot * rows + row; }
  __device__ float4* out(int64_t index) const {
    return reinterpret_cast<float4*>(outs + index * width);
  }
};

// What a merge has to know of its block and its call. The lean kernel has its own
// (decode_lean.cuh).
template <class Shape>
struct MergeSite {
  const DecodeArgs& args;
  const DecodeBlock& block;

  static constexpr int kFewestThreads = 128;
  __device__ int warps() const { return args.warps; }
  __device__ int cluster() const { return kHasClusters ? args.cluster : 1; }
  __device__ int split() const { return block.split; }
  __device__ bool is_partial() const { return block.splits > 1; }
  __device__ int rows() const { return block.rows; }
  __device__ const DecodeSmem& smem() const { return args.smem; }
  __device__ int warp_region() const { return args.smem.warp_region; }
  // `row` counts from the block's first.
  __device__ OutputRow<typename Shape::Element> output(int row) const {
    return output_row<typename Shape::Element>(
        args, DecodeRow(args, block.batch, block.kv_head, block.first_row + row));
  }
  __device__ Partials partials() const { return Partials::of(args); }
  __device__ int64_t partial_index(const Partials& partials, int row) const {
    return partials.index(block.partial_slot(args), block.first_row + row);
  }
};

template <class Shape, class Site>
class BlockMerge {
 public:
  __device__ BlockMerge(const Site& site, unsigned char* smem)
      : site_(site), smem_(smem), stats_(reinterpret_cast<float4*>(smem + site.smem().stats)) {}

  // Makes the block ready to receive. The cluster barrier is waited for behind the first loads.
  __device__ void open() const {
    if (!in_cluster()) return;
    if constexpr (kHasClusters) {
      if (threadIdx.x == 0) {
        mbarrier_init(barrier(), 1);
        mbarrier_init_fence();
        mbarrier_expect_tx(
            barrier(), site_.rows() * (Shape::kHeadDim * 4 + site_.cluster() * kDecodeStatsBytes));
      }
      __syncwarp();
      cluster_arrive_relaxed();
    }
  }
  __device__ void wait_until_open() const {
    if constexpr (kHasClusters)
      if (in_cluster()) cluster_wait();
  }

  // Column blocks go one after another through the same staging memory, the rings' own.
  __device__ void run(const WarpState<Shape>& state) const {
#pragma unroll
    for (int c = 0; c < Shape::kColumnBlocks; ++c) {
      stage(state, c);
      __syncthreads();
      const int items = min(kDecodeColumns, site_.rows() - c * kDecodeColumns) * kItems;
      if (in_cluster()) {
        push(c, items);
      } else if (site_.is_partial()) {
        write_partials(c, items);
      } else {
        write_output(c, items);
      }
      if (c + 1 < Shape::kColumnBlocks) __syncthreads();
    }
    if (in_cluster()) receive();
  }

 private:
  static constexpr int kItems = decode_items(Shape::kHeadDim);
  static constexpr int kStagedRow = decode_staged_row(Shape::kHeadDim);
  static constexpr int kStagedColumn = decode_staged_column(Shape::kHeadDim);

  // How much each warp's state counts for one row.
  struct WarpWeights {
    float weight[kDecodeMaxWarps];
    RowStats stats;
  };

  __device__ bool in_cluster() const { return site_.cluster() > 1; }
  __device__ int threads() const { return 32 * site_.warps(); }
  __device__ uint32_t barrier() const { return shared_address(smem_); }

  __device__ void stage(const WarpState<Shape>& state, int c) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto* region =
        reinterpret_cast<float*>(smem_ + site_.smem().rings + warp * site_.warp_region());
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
      const float exact_sum = sum_over_tokens(state.exact_sum[c][h]);
      if (lane < 4)
        stats_[warp * kDecodeColumns + column] =
            make_float4(state.max[c][h], state.sum[c][h], exact_sum, 0.0f);
    }
  }

  __device__ WarpWeights weigh_warps(int column) const {
    WarpWeights w;
    RowStats stats[kDecodeMaxWarps];
#pragma unroll
    for (int i = 0; i < kDecodeMaxWarps; ++i) {
      if (i < site_.warps()) stats[i] = RowStats(stats_[i * kDecodeColumns + column]);
      w.stats.max = fmaxf(w.stats.max, stats[i].max);
    }
#pragma unroll
    for (int i = 0; i < kDecodeMaxWarps; ++i) {
      w.weight[i] = exp2_approx(stats[i].max - w.stats.max);
      w.stats.add(w.weight[i], stats[i]);
    }
    return w;
  }

  __device__ float4 merge_warps(int item, const WarpWeights& w) const {
    const int in_row = item % kItems;
    const auto* staged =
        smem_ + site_.smem().rings +
        4 * (item / kItems * kStagedColumn + in_row % 8 * kStagedRow + in_row / 8 * 4);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < kDecodeMaxWarps; ++i)
      if (i < site_.warps())
        sum = add_weighted(sum, w.weight[i],
                           *reinterpret_cast<const float4*>(staged + i * site_.warp_region()));
    return sum;
  }

  __device__ void write_output(int c, int items) const {
    for (int item = threadIdx.x; item < items; item += threads()) {
      const WarpWeights w = weigh_warps(item / kItems);
      store_item<typename Shape::Element, Shape::kByteCache>(
          site_.output(c * kDecodeColumns + item / kItems), item % kItems, merge_warps(item, w),
          w.stats);
    }
  }

  __device__ void write_partials(int c, int items) const {
    const Partials partials = site_.partials();
    for (int item = threadIdx.x; item < items; item += threads()) {
      const WarpWeights w = weigh_warps(item / kItems);
      const int64_t index = site_.partial_index(partials, c * kDecodeColumns + item / kItems);
      const int in_row = item % kItems;
      if (4 * in_row < partials.width) __stcg(partials.out(index) + in_row, merge_warps(item, w));
      if (in_row == 0) __stcg(partials.stats + index, w.stats.packed());
    }
  }

  // Items are dealt round robin over the blocks of the cluster, counted over all rows of the block.
  __device__ int slots() const { return site_.rows() * kItems / site_.cluster(); }
  __device__ uint32_t received(int from, int slot) const {
    return shared_address(smem_ + site_.smem().received) + (from * slots() + slot) * 16;
  }
  __device__ uint32_t received_stats(int from, int row) const {
    return shared_address(smem_ + site_.smem().received_stats) +
           (from * site_.rows() + row) * kDecodeStatsBytes;
  }

  // Sends every block of the cluster its items. All are read before the first is sent.
  __device__ void push(int c, int items) const {
    constexpr int kFewestThreads = Site::kFewestThreads;
    constexpr int kPasses = divide_up(kDecodeColumns * kItems, kFewestThreads);
    const int cluster = site_.cluster(), shift = __ffs(cluster) - 1;
    float4 values[kPasses], stats[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int item = threadIdx.x + i * threads();
      if (item >= items) break;
      const WarpWeights w = weigh_warps(item / kItems);
      values[i] = merge_warps(item, w);
      stats[i] = w.stats.packed();
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int item = threadIdx.x + i * threads(), in_row = item % kItems;
      if (item >= items) break;
      const int owner = item & (cluster - 1);
      const int slot = (c * kDecodeColumns * kItems + item) >> shift;
      store_async(cluster_address(received(site_.split(), slot), owner), values[i],
                  cluster_address(barrier(), owner));
      // The first items of a row take its sums along, one to each block.
      if (in_row < cluster)
        store_async(cluster_address(
                        received_stats(site_.split(), c * kDecodeColumns + item / kItems), owner),
                    stats[i], cluster_address(barrier(), owner));
    }
  }

  // Merges and stores this block's items. What does not depend on the others' is worked out in
  // front of the wait. The block's memory must last until all have arrived: the first threads,
  // which have items in every block, see to that.
  __device__ void receive() const {
    const int count = slots();
    for (int slot = threadIdx.x; slot < count; slot += threads()) {
      const int item = slot * site_.cluster() + site_.split(), row = item / kItems;
      const OutputRow<typename Shape::Element> output = site_.output(row);
      const auto* stats =
          reinterpret_cast<const float4*>(smem_ + site_.smem().received_stats) + row;
      const auto* items = reinterpret_cast<const float4*>(smem_ + site_.smem().received) + slot;
      mbarrier_wait_cluster(barrier(), 0);
      RowStats from[kDecodeMaxCluster], all;
#pragma unroll
      for (int i = 0; i < kDecodeMaxCluster; ++i) {
        if (i < site_.cluster()) from[i] = RowStats(stats[i * site_.rows()]);
        all.max = fmaxf(all.max, from[i].max);
      }
      float4 values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < kDecodeMaxCluster; ++i) {
        if (i >= site_.cluster()) break;
        const float weight = exp2_approx(from[i].max - all.max);
        all.add(weight, from[i]);
        values = add_weighted(values, weight, items[i * count]);
      }
      store_item<typename Shape::Element, Shape::kByteCache>(output, item % kItems, values, all);
    }
  }

  const Site& site_;
  unsigned char* smem_;
  float4* stats_;
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_DECODE_MERGE_CUH_
