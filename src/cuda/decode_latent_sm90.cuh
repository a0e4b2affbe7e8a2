// Latent attention on Hopper: one key head of 576 dims whose first 512 are the values, and many
// query heads. TMA, mbarriers, wgmma.
//
// A block holds 64 query rows and 64 keys at a time. One warpgroup computes all scores, the softmax
// and the left half of the output; the other, which gets the weights through shared memory, the
// right half. Values are the key tile itself, read with its rows as the depth of the product.
// docs/kernels/decode_latent.md explains why.
#ifndef FLASHATTN_CUDA_DECODE_LATENT_SM90_CUH_
#define FLASHATTN_CUDA_DECODE_LATENT_SM90_CUH_

#include "decode.cuh"
#include "decode_latent_consumer_sm90.cuh"
#include "decode_latent_producer_sm90.cuh"

namespace flashattn {

__device__ __forceinline__ void init_latent_barriers(LatentShared& shared) {
  for (int stage = 0; stage < kLatentStages; ++stage)
    for (int part = 0; part < kLatentParts; ++part) {
      mbarrier_init(shared_address(&shared.full[stage][part]), 1);
      mbarrier_init(shared_address(&shared.empty[stage][part]), 1);
    }
  mbarrier_init(shared_address(&shared.weights_full), kLatentWarps);
  mbarrier_init(shared_address(&shared.weights_empty), kLatentWarps);
  mbarrier_init_fence();
}

template <class T>
__global__ void __launch_bounds__(kLatentThreads, 1)
    decode_latent_kernel(const __grid_constant__ CUtensorMap map,
                         const __grid_constant__ DecodeArgs args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const LatentSmem smem{(shared_address(memory) + 1023) & ~1023u};
  auto& shared = *reinterpret_cast<LatentShared*>(memory + smem.base - shared_address(memory) +
                                                  kLatentBarriers);
  const int lane = threadIdx.x % 32;
  DecodeBlock block;
  if (!locate_block<LatentShape>(block, args, lane)) return;
  const int32_t* length = args.lengths + batch_entry(block.batch, args.length_batches);
  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(&map);
    init_latent_barriers(shared);
  }
  block.find_keys(args, __ldg(length));
  const LatentTiles tiles(block);
  __syncthreads();

  constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  const int warpgroup = __shfl_sync(kWholeWarp, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    registers_release<kProducerRegisters>();
    if (threadIdx.x < 32) LatentProducer(map, args, block, tiles, smem, shared, lane).run();
  } else if (warpgroup == 1) {
    registers_claim<kConsumerRegisters>();
    LatentScorer<T>(args, block, tiles, smem, shared).run();
  } else {
    registers_claim<kConsumerRegisters>();
    LatentRightHalf<T>(args, block, tiles, smem, shared).run();
  }
}

// ---- Host

inline Status encode_latent_map(CUtensorMap* map, const DecodeParams& params) {
  const Problem& problem = params.problem;
  TensorMapShape shape = {};
  shape.data = params.k.data;
  shape.bf16 = problem.dtype == DType::kBF16;
  shape.head_dim = kLatentHeadDim;
  shape.rows = params.page_table ? params.page_size : problem.kv_len;
  shape.heads = problem.kv_heads;
  shape.batches = params.k.batches;
  shape.row_stride = params.k.seq;
  shape.head_stride = params.k.head;
  shape.batch_stride = params.k.batch;
  shape.box_rows = latent_box_tokens(params);
  return encode_tensor_map_4d(map, shape);
}

// launch_decode_latent_sm90 with a plan of the caller's: benchmarks try others.
template <class T>
Status launch_latent_plan(const DecodeParams& params, const DecodePlan& plan, const Device& device,
                          cudaStream_t stream) {
  const Problem& problem = params.problem;
  if (Status status = check_decode<kLatentHeadDim>(params, plan, device); !status.ok())
    return status;
  CUtensorMap map;
  if (Status status = encode_latent_map(&map, params); !status.ok())
    return {"decode_latent: " + status.message};
  const DecodeArgs args = decode_args(params, plan);
  Launch what;
  what.kernel_name = "decode_latent";
  what.kernel = reinterpret_cast<const void*>(&decode_latent_kernel<T>);
  const unsigned sequences = problem.batch * plan.splits + plan.extra_blocks;
  what.grid = dim3(sequences * plan.row_blocks, problem.kv_heads);
  what.threads = kLatentThreads;
  what.shared_memory = plan.smem.total;
  void* kernel_args[] = {&map, const_cast<DecodeArgs*>(&args)};
  const Status status = launch(what, kernel_args, device, stream);
  if (!status.ok() || !plan.combines()) return status;
  return launch_decode_combine<T>(args, device, stream);
}

// For calls that latent_refusal() has no objection to.
template <class T, int HeadDim>
Status launch_decode_latent_sm90(const DecodeParams& params, const Device& device,
                                 cudaStream_t stream) {
  static_assert(HeadDim == kLatentHeadDim, "the one that is compiled");
  const Problem& problem = params.problem;
  if (problem.batch == 0 || problem.q_len == 0 || problem.q_heads == 0) return {};
  const DecodePlan plan =
      plan_latent(params, {device.sm_count, device.major, device.shared_memory_per_block});
  return launch_latent_plan<T>(params, plan, device, stream);
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_DECODE_LATENT_SM90_CUH_
