// Attention of one or a few new tokens a sequence over a KV cache: the kernel and its launcher.
//
// The keys of a (sequence, kv head) are dealt, tile by tile, over all warps of its blocks. A warp
// works alone: its own ring of cp.async tiles, its own maxima and accumulators. Only the end brings
// warps and blocks together (decode_merge.cuh). docs/kernels/decode.md explains why.
#ifndef FLASHATTN_CUDA_DECODE_CUH_
#define FLASHATTN_CUDA_DECODE_CUH_

#include <algorithm>
#include <string>

#include "decode_combine.cuh"
#include "decode_lean.cuh"
#include "device.h"
#include "launch.h"

namespace flashattn {

// The tiles of one warp: begin, begin + step, ... below end.
struct TileWalk {
  int begin, end, step;

  template <class Shape>
  static __device__ TileWalk of_warp(const DecodeArgs& args, const DecodeBlock& block, int warp) {
    constexpr int kTokens = Shape::kTileTokens;
    const KeyRange keys = block.keys;
    return {keys.begin / kTokens + block.split * args.plan.warps + warp,
            keys.begin < keys.end ? (keys.end + kTokens - 1) / kTokens : 0,
            block.splits * args.plan.warps};
  }
};

// From products to the scores that softmax takes.
template <class Shape>
class ScoreRule {
 public:
  __device__ ScoreRule(const DecodeArgs& args, const DecodeBlock& block,
                       const QueryFragments<Shape>& query, bool scales_by_page, int lane)
      : args_(args), block_(block), scales_by_page_(scales_by_page), lane_(lane) {
    if constexpr (Shape::kByteCache) {
      const float key_scale = scales_by_page ? 1.0f : args.params.key_scale.data[block.kv_head];
#pragma unroll
      for (int c = 0; c < Shape::kColumnBlocks; ++c)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          column_scale_[c][h] =
              query.column_scale(c, 2 * (lane % 4) + h) * key_scale * args.scale_log2;
    }
  }

  // Applies everything but a last factor, which it returns: scores in log2 units are its multiples.
  __device__ float apply(TileScores<Shape>& scores, int tile, uint32_t present,
                         const DecodeTileNotes<Shape>& notes) const {
    float to_log2 = args_.scale_log2;
    if constexpr (Shape::kByteCache) {
      dequantize(scores, notes);
      to_log2 = 1.0f;
    }
    if (args_.softcap > 0.0f) {
      cap_scores<Shape>(scores, args_.softcap, to_log2);
      to_log2 = 1.0f;
    }
    const int first = tile * Shape::kTileTokens;
    if (first < block_.interior.begin || first + Shape::kTileTokens > block_.interior.end ||
        present != ~0u)
      mask_scores<Shape>(scores, args_, block_, tile, present, lane_);
    return to_log2;
  }

 private:
  __device__ void dequantize(TileScores<Shape>& scores, const DecodeTileNotes<Shape>& notes) const {
#pragma unroll
    for (int n = 0; n < Shape::kTokenBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float token_scale =
            scales_by_page_ ? notes.key_scales()[16 * n + 8 * i + lane_ / 4] : 1.0f;
#pragma unroll
        for (int c = 0; c < Shape::kColumnBlocks; ++c)
#pragma unroll
          for (int h = 0; h < 2; ++h) scores[c][n][2 * i + h] *= column_scale_[c][h] * token_scale;
      }
  }

  const DecodeArgs& args_;
  const DecodeBlock& block_;
  bool scales_by_page_;
  int lane_;
  float column_scale_[Shape::kByteCache ? Shape::kColumnBlocks : 1][2];
};

// Asks for the first tiles of a warp, as many as its ring holds. All places are looked up before
// the first is waited for. One copy of the code for all stages: a short call meets it cold in the
// instruction cache.
template <class Shape>
__device__ __forceinline__ void fill_ring(const TileRing<Shape>& ring, const TileWalk& walk,
                                          int stages, int lane) {
  TokenPlace places[kDecodeMaxStages];
#pragma unroll
  for (int i = 0; i < kDecodeMaxStages; ++i)
    places[i] = i < stages ? ring.map().find(walk.begin + i * walk.step, lane) : TokenPlace{-1, 0};
#pragma unroll 1
  for (int i = 0; i < stages; ++i) {
    const int tile = walk.begin + i * walk.step;
    if (tile < walk.end) ring.ask_keys(i, tile, places[0]);
    cp_async_commit();
    if (tile < walk.end) ring.ask_values(i, tile, places[0]);
    cp_async_commit();
#pragma unroll
    for (int next = 1; next < kDecodeMaxStages; ++next) places[next - 1] = places[next];
  }
}

// All tiles of a warp. Each slot of the ring is asked for again as soon as it was read; the place
// of the tile after that is looked up one step before it is needed.
template <class Shape>
__device__ __forceinline__ void attend(WarpState<Shape>& state, const TileRing<Shape>& ring,
                                       const ScoreRule<Shape>& rule,
                                       const QueryFragments<Shape>& query, const TileWalk& walk,
                                       int stages, int lane) {
  const int ahead = stages * walk.step;
  TokenPlace next = ring.map().find(walk.begin + ahead, lane);
  int stage = 0;
#pragma unroll 1
  for (int tile = walk.begin; tile < walk.end; tile += walk.step) {
    const DecodeTileNotes<Shape> notes = ring.notes(stage);
    const bool more = tile + ahead < walk.end;

    wait_for_oldest(stages);
    __syncwarp();
    TileScores<Shape> scores;
    score_tile<Shape>(scores, ring.keys(stage), query, lane);
    const uint32_t present = ring.map().table ? notes.present() : ~0u;
    const float to_log2 = rule.apply(scores, tile, present, notes);
    __syncwarp();
    if (more) ring.ask_keys(stage, tile + ahead, next);
    cp_async_commit();

    TileWeights<Shape> weights;
    weigh_tile<Shape>(state, scores, weights, to_log2);

    wait_for_oldest(stages);
    __syncwarp();
    if constexpr (Shape::kByteCache) {
      if (ring.scales_by_page()) {
        scale_weights<Shape>(scores, state, notes.value_scales(), lane);
        pack_weights<Shape>(weights, scores);
      }
    }
    accumulate_values<Shape>(state, ring.values(stage), weights, lane);
    __syncwarp();
    if (more) ring.ask_values(stage, tile + ahead, next);
    cp_async_commit();

    next = ring.map().find(tile + ahead + walk.step, lane);
    stage = stage + 1 == stages ? 0 : stage + 1;
  }
  cp_async_wait<0>();
  __syncwarp();
}

template <class Shape>
constexpr int decode_blocks_per_sm() {
  return Shape::kColumnBlocks == 1 && Shape::kHeadDim <= 64 && !Shape::kByteCache ? 2 : 1;
}

template <class Shape>
__global__ void __launch_bounds__(32 * kDecodeMaxWarps, decode_blocks_per_sm<Shape>())
    decode_kernel(const __grid_constant__ DecodeArgs args) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const DecodeParams& params = args.params;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, stages = args.plan.stages;

  DecodeBlock block;
  if (!locate_block<Shape>(block, args, lane)) return;
  const int length = static_cast<int>(
      load_now_b32(params.seq_lens.data + batch_entry(block.batch, params.seq_lens.batches)));
  const QueryFragments<Shape> query(args, block, smem);
  const MergeSite<Shape> site = {args, block};
  const BlockMerge<Shape, MergeSite<Shape>> merge(site, smem);
  merge.open();
  find_keys(block, args, length);

  const TokenMap<Shape> map(params, args.page_size, block.batch, block.keys);
  const TileRing<Shape> ring(
      params, map, block.kv_head, smem + args.plan.smem.rings + warp * args.plan.smem.warp_region,
      smem + args.plan.smem.notes + warp * stages * DecodeTileNotes<Shape>::kBytes, lane);
  const TileWalk walk = TileWalk::of_warp<Shape>(args, block, warp);
  fill_ring<Shape>(ring, walk, stages, lane);
  if constexpr (!Shape::kQueryInRegisters) __syncthreads();
  merge.wait_until_open();

  WarpState<Shape> state;
  const ScoreRule<Shape> rule(args, block, query, ring.scales_by_page(), lane);
  attend<Shape>(state, ring, rule, query, walk, stages, lane);
  if constexpr (Shape::kByteCache)
    if (!ring.scales_by_page()) state.value_scale = params.value_scale.data[block.kv_head];
  merge.run(state);
}

// ---- Host

inline Status launch_kernel(const char* name, const void* kernel, dim3 grid, const void* args,
                            const DecodePlan& plan, const Device& device, cudaStream_t stream) {
  Launch what;
  what.kernel_name = name;
  what.kernel = kernel;
  what.grid = grid;
  what.threads = 32 * plan.warps;
  what.shared_memory = plan.smem.total;
  what.cluster = plan.cluster;
  void* kernel_args[] = {const_cast<void*>(args)};
  return launch(what, kernel_args, device, stream);
}

template <class T, bool ByteCache>
Status launch_combine(const DecodeArgs& args, const Device& device, cudaStream_t stream) {
  const Problem& problem = args.params.problem;
  const int rows = problem.q_len * problem.group();
  Launch combine;
  combine.kernel_name = "decode_combine";
  combine.kernel = reinterpret_cast<const void*>(&decode_combine_kernel<T, ByteCache>);
  combine.grid = dim3(static_cast<unsigned>(problem.batch) * problem.kv_heads * rows /
                      combined_rows(args.plan, rows));
  combine.threads = kCombineThreads;
  combine.shared_memory = 0;
  void* kernel_args[] = {const_cast<DecodeArgs*>(&args)};
  return launch(combine, kernel_args, device, stream);
}

template <class Shape>
Status launch_decode_shape(const DecodeArgs& args, const Device& device, cudaStream_t stream) {
  const Problem& problem = args.params.problem;
  const DecodePlan& plan = args.plan;
  const unsigned sequences = problem.batch * plan.splits + plan.extra_blocks;
  const Status status = launch_kernel(
      "decode", reinterpret_cast<const void*>(&decode_kernel<Shape>),
      dim3(sequences * plan.row_blocks, problem.kv_heads), &args, plan, device, stream);
  if (!status.ok() || !plan.combines()) return status;
  return launch_combine<typename Shape::Element, Shape::kByteCache>(args, device, stream);
}

template <class Shape, int Warps>
const void* lean_kernel(int cluster) {
  return reinterpret_cast<const void*>(cluster == 8   ? &decode_lean_kernel<Shape, Warps, 8>
                                       : cluster == 4 ? &decode_lean_kernel<Shape, Warps, 4>
                                       : cluster == 2 ? &decode_lean_kernel<Shape, Warps, 2>
                                                      : &decode_lean_kernel<Shape, Warps, 1>);
}

template <class Shape>
Status launch_decode_lean(const DecodeArgs& args, const Device& device, cudaStream_t stream) {
  constexpr int kMost = decode_most_warps(Shape::kTileBytes);
  const Problem& problem = args.params.problem;
  const DecodePlan& plan = args.plan;
  const void* kernel = nullptr;
  if (plan.warps == kMost) {
    kernel = lean_kernel<Shape, kMost>(plan.cluster);
  } else if constexpr (Shape::kColumnBlocks == 1) {
    if constexpr (decode_clusters_share_sm(Shape::kRowBytes)) {
      kernel = lean_kernel<Shape, kDecodeFewWarps>(plan.cluster);
    } else {
      kernel = reinterpret_cast<const void*>(&decode_lean_kernel<Shape, kDecodeFewWarps, 1>);
    }
  }
  const unsigned pairs = static_cast<unsigned>(problem.batch) * problem.kv_heads;
  const dim3 grid(pairs * plan.cluster, plan.splits / plan.cluster);
  const LeanArgs lean = lean_args(args);
  const Status status = launch_kernel("decode_lean", kernel, grid, &lean, plan, device, stream);
  if (!status.ok() || !plan.combines()) return status;
  return launch_combine<typename Shape::Element, false>(args, device, stream);
}

template <class Shape>
Status launch_decode_blocks(const DecodeArgs& args, const Device& device, cudaStream_t stream) {
  if constexpr (!Shape::kByteCache && decode_has_lean(Shape::kHeadDim, Shape::kColumnBlocks))
    if (args.plan.lean) return launch_decode_lean<Shape>(args, device, stream);
  return launch_decode_shape<Shape>(args, device, stream);
}

template <class T, CacheFormat Format, int HeadDim>
Status launch_decode_columns(const DecodeArgs& args, const Device& device, cudaStream_t stream) {
  constexpr int kMost = decode_max_column_blocks(HeadDim, Format == CacheFormat::k16Bit ? 2 : 1);
  if constexpr (kMost >= 4)
    if (args.plan.column_blocks == 4)
      return launch_decode_shape<DecodeShape<T, Format, HeadDim, 4>>(args, device, stream);
  if constexpr (kMost >= 2)
    if (args.plan.column_blocks == 2)
      return launch_decode_blocks<DecodeShape<T, Format, HeadDim, 2>>(args, device, stream);
  return launch_decode_blocks<DecodeShape<T, Format, HeadDim, 1>>(args, device, stream);
}

// What would break the kernel rather than only be wrong; make_params checks what users can do.
template <int HeadDim>
Status check_decode(const DecodeParams& params, const DecodePlan& plan, const Device& device) {
  const Problem& problem = params.problem;
  const auto fail = [](const std::string& what) { return Status{"decode: " + what}; };
  const int width = byte_width(params.cache_dtype);
  if (std::max(problem.head_dim, problem.value_dim) > HeadDim)
    return fail("head_dim " + std::to_string(problem.head_dim) + " and value_dim " +
                std::to_string(problem.value_dim) + " exceed the kernel's " +
                std::to_string(HeadDim));
  const int64_t bytes[] = {int64_t{problem.head_dim} * width,
                           int64_t{problem.value_dim} * width,
                           params.k.seq * width,
                           params.v.seq * width,
                           params.k.head * width,
                           params.v.head * width};
  for (const int64_t b : bytes)
    if (b % 16 != 0)
      return fail("rows of the cache must be multiples of 16 bytes, got " + std::to_string(b));
  if (width == 1 && (!params.key_scale || !params.value_scale))
    return fail("an 8-bit cache needs key_scale and value_scale");
  if (plan.combines()) {
    const int64_t needed = plan.partial_slots(problem) * problem.q_len * problem.group() *
                           (decode_partial_width(problem.value_dim) + kDecodeStatsFloats);
    if (params.workspace_size < needed)
      return fail("workspace of " + std::to_string(params.workspace_size) + " floats, " +
                  std::to_string(needed) + " are needed");
  }
  if (plan.smem.total > device.shared_memory_per_block)
    return fail("needs " + std::to_string(plan.smem.total) +
                " B of shared memory, the device has " +
                std::to_string(device.shared_memory_per_block));
  return {};
}

// launch_decode with a plan of the caller's: benchmarks try others.
template <class T, int HeadDim>
Status launch_decode_plan(const DecodeParams& params, const DecodePlan& plan, const Device& device,
                          cudaStream_t stream) {
  const Problem& problem = params.problem;
  if (problem.batch == 0 || problem.q_len == 0 || problem.q_heads == 0) return {};
  if (Status status = check_decode<HeadDim>(params, plan, device); !status.ok()) return status;
  DecodeArgs args;
  args.params = params;
  args.plan = plan;
  args.scale_log2 = std::max(static_cast<float>(params.scores.scale * kLog2e), kSmallestScale);
  args.softcap = static_cast<float>(params.scores.softcap);
  args.group = FastDivisor(problem.group());
  args.row_blocks = FastDivisor(plan.row_blocks);
  args.splits = FastDivisor(plan.splits);
  args.page_size = FastDivisor(std::max(1, params.page_size));
  switch (params.cache_dtype) {
    case DType::kF8E4M3:
      return launch_decode_columns<T, CacheFormat::kE4M3, HeadDim>(args, device, stream);
    case DType::kS8:
      return launch_decode_columns<T, CacheFormat::kInt8, HeadDim>(args, device, stream);
    default:
      return launch_decode_columns<T, CacheFormat::k16Bit, HeadDim>(args, device, stream);
  }
}

template <class T, int HeadDim>
Status launch_decode(const DecodeParams& params, const Device& device, cudaStream_t stream) {
  const Problem& problem = params.problem;
  if (problem.batch == 0 || problem.q_len == 0 || problem.q_heads == 0) return {};
  const DecodePlan plan =
      plan_decode(params, HeadDim, {device.sm_count, device.major, device.shared_memory_per_block});
  return launch_decode_plan<T, HeadDim>(params, plan, device, stream);
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_DECODE_CUH_
