// Prefill forward with mma.sync, for every GPU from sm_80 on.
// docs/kernels/prefill_sm80.md is its page.
//
// A block computes block_q query rows of one head, each warp 16 or 32 of them,
// over key tiles from the first visible to the last. K and V tiles rotate
// through three shared-memory buffers filled by cp.async: while one is
// multiplied the next is arriving and the third is being filled. Where memory
// allows, they come in pairs, one multiplied while the other arrives.
#ifndef FLASHATTN_CUDA_PREFILL_SM80_CUH_
#define FLASHATTN_CUDA_PREFILL_SM80_CUH_

#include <climits>
#include <cstdint>
#include <string>

#include "device.h"
#include "params.h"
#include "prefill_sm80_block.cuh"
#include "prefill_wide_sm80.cuh"
#include "tiles_sm80.h"

namespace flashattn {

// The tile's index stays in a register up to this head dim. Code for 8.0 takes more registers than
// for 9.0, and would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr int kMostDimsWithTile = 256;
#else
constexpr int kMostDimsWithTile = 96;
#endif

template <class T, int HeadDim, bool Featured>
__global__ void __launch_bounds__(32 * prefill_tile_sm80(HeadDim).warps,
                                  prefill_tile_sm80(HeadDim).blocks_per_sm)
    prefill_sm80_kernel(const __grid_constant__ PrefillArgsSm80 args) {
  using Kernel = PrefillSm80<T, HeadDim>;
  constexpr int kBlockQ = Kernel::kBlockQ, kBlockKv = Kernel::kBlockKv;
  constexpr int kRowBlocks = Kernel::kRowBlocks;
  constexpr bool kQueryInRegisters = Kernel::kTile.q_in_registers;
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ PrefillBlockSm80<T> block;

  const PrefillParams& params = args.params;
  const Problem& problem = params.problem;
  if (threadIdx.x % 32 == 0) block.template fill<Featured>(args, kBlockQ, blockIdx.x);
  __syncthreads();
  if constexpr (Featured) block.template find_segments<kBlockQ, Kernel::kWarpRows>();

  typename Kernel::Output o = {};
  OnlineSoftmax<T, kRowBlocks> softmax(args.scale.exponent);

  if (block.keys.begin < block.keys.end) {
    const uint32_t q_smem = shared_address(smem);
    const uint32_t buffers = q_smem + (kQueryInRegisters ? 0 : Kernel::kQueryBytes);
    const auto find_tile = [&](int from) {
      return Featured ? block.finder.from(from, params, block.features) : from;
    };
    int tile = find_tile(block.keys.begin / kBlockKv);
    constexpr bool kPairs = Kernel::kTile.buffers == 4;
    auto ring = [&] {
      if constexpr (kPairs) {
        return BufferPairs<Kernel>(tile);
      } else {
        return BufferRing<Kernel>();
      }
    }();
    TileCursor<Kernel, !Featured> keys(block.k, params.k.seq, tile);
    TileCursor<Kernel, !Featured> values(block.v, params.v.seq, tile);
    const auto load_k = [&](uint32_t buffer, int tile) {
      if (tile < block.finder.end()) {
        keys.load(buffer, block.k, params.k.seq, problem.head_dim, tile, block.keys);
      }
      cp_async_commit();
    };
    const auto load_v = [&](uint32_t buffer, int tile) {
      if (tile < block.finder.end()) {
        values.load(buffer, block.v, params.v.seq, problem.value_dim, tile, block.keys);
      }
      cp_async_commit();
    };

    load_rows<Kernel, kBlockQ>(
        q_smem,
        static_cast<const T*>(params.q.data) + params.q.offset(block.sequence.batch, 0, block.head),
        params.q.seq, problem.head_dim, block.first_row, {0, block.sequence.q_len});
    load_k(buffers + ring.k(), tile);
    if constexpr (kQueryInRegisters) {
      cp_async_wait<0>();
      __syncthreads();
    }
    const QueryOperand<Kernel> query(q_smem);
    if constexpr (kQueryInRegisters) __syncthreads();
    load_v(buffers + ring.v(), tile);
    // Read behind the loop's first barrier.
    block.template find_tiles<kBlockQ, Kernel::kWarpRows>();

    constexpr bool kTileInMemory = Featured || HeadDim > kMostDimsWithTile;
    while (tile < block.finder.end()) {
      if constexpr (kTileInMemory) {
        block.tile[opaque_thread() / 32] = tile;
        block.next_tile[opaque_thread() / 32] = find_tile(tile + 1);
      }
      const auto next = [&] {
        return kTileInMemory ? block.next_tile[opaque_thread() / 32] : tile + 1;
      };
      const auto this_tile = [&] {
        return kTileInMemory ? block.tile[opaque_thread() / 32] : tile;
      };

      const auto take_values = [&] {
        if (may_hide_keys<Featured>(block, this_tile()) &&
            remove_not_finite<Kernel>(buffers + ring.v())) {
          block.note_removed(this_tile());
        }
      };

      // K, with V if they come in pairs, and Q before the first tile.
      cp_async_wait<kPairs ? 0 : 1>();
      if constexpr (kPairs) take_values();
      __syncthreads();  // for all threads; and nobody reads what is filled next any more
      load_k(buffers + ring.next_k(), next());
      if constexpr (kPairs) load_v(buffers + ring.next_v(), next());

      const int thread = opaque_thread();
      const bool in_window = block.seen_by_warp[thread / 32].any.has(this_tile());
      ScoreBits<kRowBlocks> bits;
      if constexpr (Featured) {
        bits.see_nothing();
        if (in_window) {
          const WarpRows rows = rows_of_warp<Kernel>(block, thread);
          look_at_tile(bits, params, block.features, block.finder.warp_segments[thread / 32],
                       FragmentPlace(rows.first, rows.last, this_tile() * kBlockKv, thread % 32));
        }
      }
      const auto is_visible = [&] { return Featured ? bits.any() : in_window; };

      typename Kernel::Probabilities p_regs;
      // Twice at most: the second time the exact way.
      bool done = false;
      if (is_visible()) do {
          typename Kernel::Scores s = {};
          const int thread = opaque_thread();
          multiply_keys<Kernel>(s, query, buffers + ring.k(), thread);
          finish_scores<Kernel, Featured>(s, block, args, bits, this_tile());
          const bool exact = softmax.exact();
          if (exact) {
            float factor[2 * kRowBlocks];
            if (softmax.raise(s, factor)) scale_rows<Kernel>(o, factor);
          }
          done = softmax.weigh(s, p_regs, exact);
        } while (!done);

      if constexpr (!kPairs) {
        cp_async_wait<1>();  // all but the next K: V
        take_values();
        __syncthreads();  // for all threads; and nobody reads K any more
        load_v(buffers + ring.next_v(), next());
      }
      if (is_visible()) {
        accumulate_values<Kernel>(o, p_regs, buffers + ring.v(), problem.value_dim,
                                  opaque_thread() % 32);
      }

      ring.rotate();
      tile = next();
      if constexpr (kTileInMemory) __syncwarp();  // before a lane writes the one after
    }
    cp_async_wait<0>();  // of Q, if there was no tile
    __syncthreads();     // the buffers become the staging tile
    add_not_finite<Kernel, Featured>(o, block, params);
  }

  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * Kernel::kWarpRows;
  const int first_row = block.first_row + warp_row;
  RowResult results[2 * kRowBlocks];
  finish_rows<Kernel>(results, softmax, block, params);
  store_output<Kernel>(smem,
                       HeadView<T>(params.o, block.sequence.batch, block.head, problem.value_dim),
                       o, results, warp_row, first_row, problem.q_len, lane);
}

// What cp.async and 16-byte stores need of an operand.
inline bool is_aligned(const Strided& operand) {
  return reinterpret_cast<uintptr_t>(operand.data) % 16 == 0 && operand.batch % 8 == 0 &&
         operand.seq % 8 == 0 && operand.head % 8 == 0;
}

inline const void* prefill_entry(void (*kernel)(PrefillArgsSm80)) {
  return reinterpret_cast<const void*>(kernel);
}

// Head dims (of keys and of values) below HeadDim must be multiples of 8; they
// cost what HeadDim costs.
template <class T, int HeadDim>
Status launch_prefill_sm80(const PrefillParams& params, const Device& device, cudaStream_t stream) {
  using Kernel = PrefillSm80<T, HeadDim>;
  const Problem& problem = params.problem;
  for (const int dim : {problem.head_dim, problem.value_dim}) {
    if (dim % 8 != 0 || dim > HeadDim) {
      return {"prefill: head dim not served by the sm_80 kernel, got " + std::to_string(dim) +
              "; a multiple of 8 up to " + std::to_string(HeadDim) + " is allowed"};
    }
  }
  for (const Strided* operand : {&params.q, &params.k, &params.v, &params.o}) {
    if (!is_aligned(*operand)) {
      return {"prefill: an operand is not aligned to 16 bytes in every row"};
    }
  }
  const int64_t q_tiles = (int64_t{problem.q_len} + Kernel::kBlockQ - 1) / Kernel::kBlockQ;
  const int value_groups = is_wide(HeadDim) ? value_groups_of(problem.value_dim) : 1;
  const int64_t blocks = q_tiles * problem.batch * problem.q_heads * value_groups;
  if (blocks == 0) return {};
  if (blocks > INT_MAX) {
    return {"prefill: too many query tiles for one launch, got " + std::to_string(blocks)};
  }

  PrefillArgsSm80 args{params,
                       make_score_scale(params.scores, params.features),
                       static_cast<int>(q_tiles),
                       FastDivisor(kHeadsOfSection * static_cast<int>(q_tiles)),
                       FastDivisor(problem.q_heads),
                       FastDivisor(problem.group()),
                       value_groups,
                       false};
  const bool featured = params.features.any_mask_or_bias() || params.scores.softcap > 0.0;
  Launch what{};
  what.kernel_name = "prefill_sm80";
  if constexpr (is_wide(HeadDim)) {
    args.query_stays =
        prefill_wide_shared_memory_sm80(problem.head_dim, true) <= device.shared_memory_per_block;
    what.shared_memory = prefill_wide_shared_memory_sm80(problem.head_dim, args.query_stays);
    what.kernel = prefill_entry(featured ? &prefill_wide_sm80_kernel<T, HeadDim, true>
                                         : &prefill_wide_sm80_kernel<T, HeadDim, false>);
  } else {
    what.shared_memory = prefill_shared_memory_sm80(HeadDim);
    what.kernel = prefill_entry(featured ? &prefill_sm80_kernel<T, HeadDim, true>
                                         : &prefill_sm80_kernel<T, HeadDim, false>);
  }
  what.grid = dim3(static_cast<unsigned>(blocks));
  what.threads = Kernel::kThreads;
  void* arguments[] = {&args};
  return launch(what, arguments, device, stream);
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_PREFILL_SM80_CUH_
