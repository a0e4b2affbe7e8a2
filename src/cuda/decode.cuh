// Attention of one or a few new tokens a sequence over a KV cache: the kernel and its launcher.
//
// The keys of a (sequence, kv head) are dealt, tile by tile, over all warps of its blocks. A warp
// works alone: its own ring of cp.async tiles, its own maxima and accumulators. Only the end brings
// warps and blocks together (decode_merge.cuh). docs/kernels/decode.md explains why.
#ifndef FLASHATTN_CUDA_DECODE_CUH_
#define FLASHATTN_CUDA_DECODE_CUH_

#include <string>

#include "decode_lean.cuh"
#include "decode_locate.cuh"
#include "device.h"
#include "launch.h"

namespace flashattn {

// The tiles of one warp: begin, begin + step, ... below end.
template <class Shape>
struct TileWalk {
  int begin, end, step;

  __device__ TileWalk(const DecodeArgs& args, const DecodeBlock& block, int warp)
      : begin(block.split * args.warps + warp), end(0), step(block.splits * args.warps) {}

  __device__ void limit(KeyRange keys) {
    begin += keys.begin / Shape::kTileTokens;
    if (keys.begin < keys.end) end = divide_up(keys.end, Shape::kTileTokens);
  }
};

// From products to the scores that softmax takes, and the scales of 8-bit caches.
template <class Shape>
class ScoreRule {
 public:
  // Asks for the scales that do not go by page.
  __device__ ScoreRule(const DecodeArgs& args, const DecodeBlock& block, int lane)
      : args_(args), block_(block), lane_(lane) {
    if constexpr (Shape::kByteCache) {
      key_scale_ = load_scale(args.key_scales, args.key_scale_page);
      value_scale_ = load_scale(args.value_scales, args.value_scale_page);
    }
  }

  // Waits for them; called behind the first tiles.
  __device__ void finish(const QueryFragments<Shape>& query) {
    if constexpr (Shape::kByteCache) {
#pragma unroll
      for (int c = 0; c < Shape::kColumnBlocks; ++c)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          column_scale_[c][h] =
              query.column_scale(c, 2 * (lane_ % 4) + h) * key_scale_ * args_.scale_log2;
    }
  }

  __device__ bool value_scales_by_page() const { return args_.value_scale_page != 0; }
  __device__ float value_scale() const { return value_scale_; }

  // Applies everything but a last factor, which it returns: scores in log2 units are its multiples.
  __device__ float apply(TileScores<Shape>& scores, int tile, uint32_t present,
                         const float* key_scales) const {
    float to_log2 = args_.scale_log2;
    if constexpr (Shape::kByteCache) {
      dequantize(scores, key_scales);
      to_log2 = 1.0f;
    }
    if (args_.softcap > 0.0f) {
      cap_scores<Shape>(scores, args_.softcap, to_log2);
      to_log2 = 1.0f;
    }
    hide_scores<Shape>(scores, args_, block_, tile, present, lane_);
    return to_log2;
  }

 private:
  __device__ float load_scale(const float* scales, int page_stride) const {
    return page_stride == 0 ? __int_as_float(load_now_b32(scales + block_.kv_head)) : 1.0f;
  }
  __device__ void dequantize(TileScores<Shape>& scores, const float* key_scales) const {
    const bool by_page = args_.key_scale_page != 0;
#pragma unroll
    for (int n = 0; n < Shape::kTokenBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float token_scale = by_page ? key_scales[16 * n + 8 * i + lane_ / 4] : 1.0f;
#pragma unroll
        for (int c = 0; c < Shape::kColumnBlocks; ++c)
#pragma unroll
          for (int h = 0; h < 2; ++h) scores[c][n][2 * i + h] *= column_scale_[c][h] * token_scale;
      }
  }

  const DecodeArgs& args_;
  const DecodeBlock& block_;
  int lane_;
  float key_scale_ = 1.0f, value_scale_ = 1.0f;
  float column_scale_[Shape::kByteCache ? Shape::kColumnBlocks : 1][2];
};

// The places of a warp's first tiles, a register for each stage.
struct FirstPlaces {
  TokenPlace places[kDecodeMaxStages];

  template <class Shape>
  __device__ void find(const TokenMap<Shape>& map, const TileWalk<Shape>& walk, int lane) {
#pragma unroll
    for (int i = 0; i < kDecodeMaxStages; ++i)
      places[i] = map.find(walk.begin + i * walk.step, lane);
  }
  __device__ TokenPlace next() {
    const TokenPlace first = places[0];
#pragma unroll
    for (int i = 1; i < kDecodeMaxStages; ++i) places[i - 1] = places[i];
    return first;
  }
};

// Asks for the first tiles of a warp, as many as its ring holds. One copy of the code for all
// stages: a short call meets it cold in the instruction cache.
template <class Shape>
__device__ __forceinline__ void fill_ring(const TileRing<Shape>& ring, FirstPlaces& places,
                                          StageWords& present, const TileWalk<Shape>& walk,
                                          KeyRange keys, int stages) {
#pragma unroll 1
  for (int i = 0; i < stages; ++i) {
    const int tile = walk.begin + i * walk.step;
    const TokenPlace place = places.next();
    const uint32_t tokens = ring.map().present(tile, place, keys);
    present.set(i, tokens);
    if (tile < walk.end) ring.ask_keys(i, place, tokens);
    cp_async_commit();
    if (tile < walk.end) ring.ask_values(i, place, tokens);
    cp_async_commit();
  }
}

// All tiles of a warp. Each slot of the ring is asked for again as soon as it was read; the place
// of the tile after that is looked up one step before it is needed.
template <class Shape>
__device__ __forceinline__ void attend(WarpState<Shape>& state, const TileRing<Shape>& ring,
                                       StageWords& present, const ScoreRule<Shape>& rule,
                                       const QueryFragments<Shape>& query,
                                       const TileWalk<Shape>& walk, KeyRange keys, int stages,
                                       int lane) {
  const int ahead = stages * walk.step;
  TokenPlace next = ring.map().find(walk.begin + ahead, lane);
  int stage = 0;
#pragma unroll 1
  for (int tile = walk.begin; tile < walk.end; tile += walk.step) {
    const TokenScales<Shape> scales = ring.scales(stage);
    const bool more = tile + ahead < walk.end;
    const uint32_t tokens = present.get(stage);
    const uint32_t next_tokens = ring.map().present(tile + ahead, next, keys);
    present.set(stage, next_tokens);

    wait_for_oldest<kDecodeMaxStages>(stages);
    __syncwarp();
    TileScores<Shape> scores;
    score_tile<Shape>(scores, ring.keys(stage), query, lane);
    const float to_log2 = rule.apply(scores, tile, tokens, scales.keys);
    __syncwarp();
    if (more) ring.ask_keys(stage, next, next_tokens);
    cp_async_commit();

    TileWeights<Shape> weights;
    weigh_tile<Shape>(state, scores, weights, to_log2);

    wait_for_oldest<kDecodeMaxStages>(stages);
    __syncwarp();
    if constexpr (Shape::kByteCache) {
      if (rule.value_scales_by_page()) {
        scale_weights<Shape>(scores, state, scales.values, lane);
        pack_weights<Shape>(weights, scores);
      }
    }
    accumulate_values<Shape>(state, ring.values(stage), weights, lane);
    __syncwarp();
    if (more) ring.ask_values(stage, next, next_tokens);
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
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, stages = args.stages;

  // All that has to come from memory is asked for before any of it is waited for.
  DecodeBlock block;
  if (!locate_block<Shape>(block, args, lane)) return;
  const int length =
      static_cast<int>(load_now_b32(args.lengths + batch_entry(block.batch, args.length_batches)));
  QueryFragments<Shape> query(args, block, smem, warp, lane);
  ScoreRule<Shape> rule(args, block, lane);
  const TileRing<Shape> ring(args, block, smem, warp, lane);
  TileWalk<Shape> walk(args, block, warp);
  FirstPlaces places;
  // With a window, the length decides where the first tile is.
  const bool windowed = args.window < args.capacity;
  if (!windowed) places.find(ring.map(), walk, lane);
  const MergeSite<Shape> site = {args, block};
  const BlockMerge<Shape, MergeSite<Shape>> merge(site, smem);
  merge.open();

  block.find_keys(args, length);
  walk.limit(block.keys);
  if (windowed) places.find(ring.map(), walk, lane);
  StageWords present(lane);
  fill_ring<Shape>(ring, places, present, walk, block.keys, stages);
  query.finish();
  rule.finish(query);
  merge.wait_until_open();

  WarpState<Shape> state;
  attend<Shape>(state, ring, present, rule, query, walk, block.keys, stages, lane);
  if constexpr (Shape::kByteCache)
    if (!rule.value_scales_by_page()) state.value_scale = rule.value_scale();
  merge.run(state);
}

// ---- Host

// decode_combine.cuh, which a unit of its own compiles for all head dims.
template <class T>
Status launch_decode_combine(const DecodeArgs& args, const Device& device, cudaStream_t stream);

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

template <class Shape>
Status launch_decode_shape(const DecodeParams& params, const DecodePlan& plan, const Device& device,
                           cudaStream_t stream) {
  const Problem& problem = params.problem;
  const DecodeArgs args = decode_args(params, plan);
  const unsigned sequences = problem.batch * plan.splits + plan.extra_blocks;
  const Status status = launch_kernel(
      "decode", reinterpret_cast<const void*>(&decode_kernel<Shape>),
      dim3(sequences * plan.row_blocks, problem.kv_heads), &args, plan, device, stream);
  if (!status.ok() || !plan.combines()) return status;
  return launch_decode_combine<typename Shape::Element>(args, device, stream);
}

template <class Shape, int Warps, int Cluster>
const void* lean_kernel(bool featured) {
  return featured
             ? reinterpret_cast<const void*>(&decode_lean_kernel<Shape, Warps, Cluster, true>)
             : reinterpret_cast<const void*>(&decode_lean_kernel<Shape, Warps, Cluster, false>);
}

template <class Shape, int Warps>
const void* lean_kernel(const DecodePlan& plan) {
  switch (plan.cluster) {
    case 8:
      return lean_kernel<Shape, Warps, 8>(plan.featured);
    case 4:
      return lean_kernel<Shape, Warps, 4>(plan.featured);
    case 2:
      return lean_kernel<Shape, Warps, 2>(plan.featured);
    default:
      return lean_kernel<Shape, Warps, 1>(plan.featured);
  }
}

template <class Shape>
Status launch_decode_lean(const DecodeParams& params, const DecodePlan& plan, const Device& device,
                          cudaStream_t stream) {
  constexpr int kMost = decode_most_warps(Shape::kTileBytes);
  const Problem& problem = params.problem;
  const void* kernel = nullptr;
  if (plan.warps == kMost) {
    kernel = lean_kernel<Shape, kMost>(plan);
  } else if constexpr (Shape::kColumnBlocks == 1) {
    if constexpr (decode_clusters_share_sm(Shape::kRowBytes)) {
      kernel = lean_kernel<Shape, kDecodeFewWarps>(plan);
    } else {
      kernel = lean_kernel<Shape, kDecodeFewWarps, 1>(plan.featured);
    }
  }
  const unsigned pairs = static_cast<unsigned>(problem.batch) * problem.kv_heads;
  const dim3 grid(pairs * plan.cluster, plan.splits / plan.cluster);
  const DecodeArgs args = decode_args(params, plan);
  const auto lean = lean_args<Shape>(params, plan, args);
  const Status status = launch_kernel("decode_lean", kernel, grid, &lean, plan, device, stream);
  if (!status.ok() || !plan.combines()) return status;
  return launch_decode_combine<typename Shape::Element>(args, device, stream);
}

template <class Shape>
Status launch_decode_blocks(const DecodeParams& params, const DecodePlan& plan,
                            const Device& device, cudaStream_t stream) {
  if constexpr (!Shape::kByteCache && decode_has_lean(Shape::kHeadDim, Shape::kColumnBlocks))
    if (plan.lean) return launch_decode_lean<Shape>(params, plan, device, stream);
  return launch_decode_shape<Shape>(params, plan, device, stream);
}

template <class T, CacheFormat Format, int HeadDim>
Status launch_decode_columns(const DecodeParams& params, const DecodePlan& plan,
                             const Device& device, cudaStream_t stream) {
  constexpr int kMost = decode_max_column_blocks(HeadDim, Format == CacheFormat::k16Bit ? 2 : 1);
  if constexpr (kMost >= 4)
    if (plan.column_blocks == 4)
      return launch_decode_shape<DecodeShape<T, Format, HeadDim, 4>>(params, plan, device, stream);
  if constexpr (kMost >= 2)
    if (plan.column_blocks == 2)
      return launch_decode_blocks<DecodeShape<T, Format, HeadDim, 2>>(params, plan, device, stream);
  return launch_decode_blocks<DecodeShape<T, Format, HeadDim, 1>>(params, plan, device, stream);
}

// What would break the kernel rather than only be wrong; make_params checks what users can do.
template <int HeadDim>
Status check_decode(const DecodeParams& params, const DecodePlan& plan, const Device& device) {
  const Problem& problem = params.problem;
  const auto fail = [](const std::string& what) { return Status{"decode: " + what}; };
  const int width = byte_width(params.cache_dtype);
  if (problem.widest_dim() > HeadDim)
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
  switch (params.cache_dtype) {
    case DType::kF8E4M3:
      return launch_decode_columns<T, CacheFormat::kE4M3, HeadDim>(params, plan, device, stream);
    case DType::kS8:
      return launch_decode_columns<T, CacheFormat::kInt8, HeadDim>(params, plan, device, stream);
    default:
      return launch_decode_columns<T, CacheFormat::k16Bit, HeadDim>(params, plan, device, stream);
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
