// Prefill forward with mma.sync, for every GPU from sm_80 on.
// docs/kernels/prefill_sm80.md is its page.
//
// A block computes block_q query rows of one head, each warp 16 or 32 of them,
// over key tiles from the first visible to the last. K and V tiles rotate
// through three shared-memory buffers filled by cp.async: while one is
// multiplied the next is arriving and the third is being filled.
#ifndef FLASHATTN_CUDA_PREFILL_SM80_CUH_
#define FLASHATTN_CUDA_PREFILL_SM80_CUH_

#include <climits>
#include <cstdint>
#include <string>

#include "device.h"
#include "mask.cuh"
#include "params.h"
#include "prefill_sm80_tile.cuh"
#include "ptx.cuh"
#include "softmax.cuh"
#include "tiles_sm80.h"

namespace flashattn {

struct PrefillArgsSm80 {
  PrefillParams params;
  ScoreScale scale;
  int q_tiles;
};

// What a block works on. It lies in shared memory: the main loop has no
// registers to spare.
template <class T>
struct PrefillBlockSm80 {
  Sequence sequence;
  int head;
  int first_row;
  Range keys;  // that any of its rows sees
  const T *k, *v;
  HeadFeatures features;
  TileFinder finder;
  Range removed;              // from the first to the last tile that remove_not_finite() changed
  int tile[8], next_tile[8];  // a copy for each warp, so that none waits for another to read it

  // Blocks in order of their index: sections of a few heads, whose K and V the
  // L2 cache holds; within a section the last query rows of all its heads
  // first, since with a causal mask they take longest.
  __device__ void fill(const PrefillArgsSm80& args, int block_q) {
    constexpr unsigned kHeadsOfSection = 8;
    const PrefillParams& params = args.params;
    const unsigned q_heads = params.problem.q_heads;
    const unsigned section = blockIdx.x / (kHeadsOfSection * args.q_tiles);
    const unsigned first_head = section * kHeadsOfSection;
    const unsigned heads = min(kHeadsOfSection, params.problem.batch * q_heads - first_head);
    const unsigned index = blockIdx.x - first_head * args.q_tiles;
    const unsigned batch_head = first_head + index % heads;
    const int batch = batch_head / q_heads;
    head = batch_head % q_heads;
    first_row = (args.q_tiles - 1 - index / heads) * block_q;
    sequence = Sequence(params, batch);
    removed = {INT_MAX, 0};
    keys = {0, 0};
    if (first_row < sequence.q_len) {
      keys = sequence.keys_seen_by(first_row, min(first_row + block_q, sequence.q_len) - 1);
    }
    finder.start((keys.end + kPrefillBlockKv - 1) / kPrefillBlockKv);
    const int kv_head = head / params.problem.group();
    k = static_cast<const T*>(params.k.data) + params.k.offset(batch, 0, kv_head);
    v = static_cast<const T*>(params.v.data) + params.v.offset(batch, 0, kv_head);
    features.fill(params.features, batch, head);
  }

  __device__ void note_removed(int tile) {
    atomicMin(&removed.begin, tile);
    atomicMax(&removed.end, tile + 1);
  }

  // By all warps, after fill().
  template <int BlockQ, int WarpRows>
  __device__ void find_segments() {
    if (features.query_segments == nullptr || first_row >= sequence.q_len) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, last_row = sequence.q_len - 1;
    const Extent of_block =
        segment_extent<BlockQ>(features.query_segments, first_row, last_row, lane);
    const int warp_first = first_row + warp * WarpRows;
    const Extent of_warp = segment_extent<32>(features.query_segments, min(warp_first, last_row),
                                              min(warp_first + WarpRows - 1, last_row), lane);
    if (lane == 0) finder.warp_segments[warp] = of_warp;
    if (threadIdx.x == 0) finder.block_segments = of_block;
    __syncthreads();
  }
};

// The rows of a warp, up to the last of the sequence; none if that lies before
// the first.
struct WarpRows {
  int first, last;

  __device__ bool any() const { return first <= last; }
};

template <class Kernel>
__device__ __forceinline__ WarpRows rows_of_warp(const PrefillBlockSm80<typename Kernel::T>& block,
                                                 int thread) {
  const int first = block.first_row + thread / 32 * Kernel::kWarpRows;
  return {first, min(first + Kernel::kWarpRows, block.sequence.q_len) - 1};
}

// Whether some row of the block does not see some key of the tile, as far as can be told without a
// look at masks and segments.
template <class Kernel, bool Featured>
__device__ __forceinline__ bool may_hide_keys(const PrefillBlockSm80<typename Kernel::T>& block,
                                              int first_key) {
  if (Featured && (block.features.mask || block.features.key_segments)) return true;
  const int last_row = min(block.first_row + Kernel::kBlockQ, block.sequence.q_len) - 1;
  return !block.sequence.all_seen(block.first_row, last_row, first_key,
                                  first_key + Kernel::kBlockKv - 1);
}

// Adds what remove_not_finite() took out to just the rows that see it. Rare, so from memory. A tile
// in between from which nothing was taken adds once more what its product brought already.
template <class Kernel, bool Featured>
__device__ __forceinline__ void add_not_finite(typename Kernel::Output& o,
                                               const PrefillBlockSm80<typename Kernel::T>& block,
                                               const PrefillParams& params) {
  constexpr int kRows = 2 * Kernel::kRowBlocks, kBlockKv = Kernel::kBlockKv;
  const int lane = threadIdx.x % 32;
  const WarpRows rows = rows_of_warp<Kernel>(block, threadIdx.x);
  if (!rows.any()) return;
#pragma unroll 1
  for (int tile = block.removed.begin; tile < block.removed.end; ++tile) {
    const FragmentPlace place(rows.first, rows.last, tile * kBlockKv, lane);
    ScoreBits<Kernel::kRowBlocks> bits;
    bits.see_all();
    if constexpr (Featured) {
      look_at_tile(bits, params, block.features, block.finder.warp_segments[threadIdx.x / 32],
                   place);
    }
#pragma unroll 1
    for (int i = 0; i < kBlockKv; ++i) {
      const int key = place.first_key + i;
      bool sees[kRows], any_sees = false;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sees[r] = bits.sees(r, i) & block.sequence.sees(place.row(r), key);
        any_sees |= sees[r];
      }
      if (!__any_sync(~0u, any_sees)) continue;
      const auto* v = block.v + key * params.v.seq + 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < Kernel::kDimBlocks; ++n) {
        if (8 * n >= params.problem.value_dim) break;
        const float2 pair =
            unpack<typename Kernel::T>(__ldg(reinterpret_cast<const uint32_t*>(v + 8 * n)));
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float* at = &o[r / 2][n][r % 2 * 2];
          if (sees[r] && !isfinite(pair.x)) at[0] += pair.x;
          if (sees[r] && !isfinite(pair.y)) at[1] += pair.y;
        }
      }
    }
  }
}

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
  if (threadIdx.x == 0) block.fill(args, kBlockQ);
  __syncthreads();
  if constexpr (Featured) block.template find_segments<kBlockQ, Kernel::kWarpRows>();

  typename Kernel::Output o = {};
  OnlineSoftmax<T, kRowBlocks> softmax(args.scale.exponent);

  if (block.keys.begin < block.keys.end) {
    const uint32_t q_smem = shared_address(smem);
    const uint32_t buffers = q_smem + (kQueryInRegisters ? 0 : Kernel::kQueryBytes);
    BufferRing<Kernel> ring;

    const auto find_tile = [&](int from) {
      return Featured ? block.finder.from(from, params, block.features) : from;
    };
    const auto load_k = [&](uint32_t buffer, int tile) {
      if (tile < block.finder.end()) {
        load_rows<Kernel, kBlockKv>(buffer, block.k, params.k.seq, problem.head_dim,
                                    tile * kBlockKv, block.keys);
      }
      cp_async_commit();
    };
    const auto load_v = [&](uint32_t buffer, int tile) {
      if (tile < block.finder.end()) {
        load_rows<Kernel, kBlockKv>(buffer, block.v, params.v.seq, problem.value_dim,
                                    tile * kBlockKv, block.keys);
      }
      cp_async_commit();
    };

    int tile = find_tile(block.keys.begin / kBlockKv);
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

    while (tile < block.finder.end()) {
      if constexpr (Featured) {
        block.tile[opaque_thread() / 32] = tile;
        block.next_tile[opaque_thread() / 32] = find_tile(tile + 1);
      }
      const auto next = [&] { return Featured ? block.next_tile[opaque_thread() / 32] : tile + 1; };
      const auto first_key_of_tile = [&] {
        int first_key = (Featured ? block.tile[opaque_thread() / 32] : tile) * kBlockKv;
        opaque(first_key);  // else sums with it are kept in registers
        return first_key;
      };

      cp_async_wait<1>();  // all but V: K, and Q before the first tile
      __syncthreads();     // for all threads; and nobody reads the free buffer any more
      load_k(buffers + ring.free(), next());

      const int thread = opaque_thread();
      const WarpRows rows = rows_of_warp<Kernel>(block, thread);
      const int first_key = first_key_of_tile();
      const bool in_window = rows.any() && block.sequence.any_seen(rows.first, rows.last, first_key,
                                                                   first_key + kBlockKv - 1);
      ScoreBits<kRowBlocks> bits;
      if constexpr (Featured) {
        bits.see_nothing();
        if (in_window) {
          look_at_tile(bits, params, block.features, block.finder.warp_segments[thread / 32],
                       FragmentPlace(rows.first, rows.last, first_key, thread % 32));
        }
      }
      const auto is_visible = [&] { return Featured ? bits.any() : in_window; };

      typename Kernel::Probabilities p_regs;
      // Twice at most: the second time the exact way.
      bool done = false;
      if (is_visible()) do {
          typename Kernel::Scores s;
          const int thread = opaque_thread();
          multiply_keys<Kernel>(s, query, buffers + ring.k(), thread);
          const WarpRows rows = rows_of_warp<Kernel>(block, thread);
          const int first_key = first_key_of_tile(), last_key = first_key + kBlockKv - 1;
          const FragmentPlace place(rows.first, rows.last, first_key, thread % 32);
          if constexpr (Featured) {
            shape_scores(s, params, args.scale, block.features, block.sequence.shift, place);
            bits.apply(s);
          }
          if (!block.sequence.all_seen(rows.first, rows.last, first_key, last_key)) {
            mask_window(s, block.sequence, place);
          }
          const bool exact = softmax.exact();
          if (exact) {
            float factor[2 * kRowBlocks];
            if (softmax.raise(s, factor)) scale_rows<Kernel>(o, factor);
          }
          done = softmax.weigh(s, p_regs, exact);
        } while (!done);

      cp_async_wait<1>();  // all but the next K: V
      if (may_hide_keys<Kernel, Featured>(block, first_key_of_tile()) &&
          remove_not_finite<Kernel>(buffers + ring.v())) {
        block.note_removed(first_key_of_tile() / kBlockKv);
      }
      __syncthreads();  // for all threads; and nobody reads K any more
      load_v(buffers + ring.k(), next());
      if (is_visible()) {
        accumulate_values<Kernel>(o, p_regs, buffers + ring.v(), problem.value_dim,
                                  opaque_thread() % 32);
      }

      ring.rotate();
      tile = next();
      if constexpr (Featured) __syncwarp();  // before a lane writes the one after
    }
    cp_async_wait<0>();  // of Q, if there was no tile
    __syncthreads();     // the buffers become the staging tile
    add_not_finite<Kernel, Featured>(o, block, params);
  }

  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * Kernel::kWarpRows;
  const int first_row = block.first_row + warp_row;
  const int batch = block.sequence.batch;
  const Table<const float>& sinks = params.features.sinks;
  const float sink = sinks ? sinks.row(batch)[block.head] * kLog2e : -INFINITY;
  float* lse = static_cast<float*>(params.lse.data);
  RowResult results[2 * kRowBlocks];
#pragma unroll
  for (int r = 0; r < 2 * kRowBlocks; ++r) {
    const int row = first_row + 8 * r + lane / 4;
    results[r] = softmax.finish(r, sink);
    if (row >= block.sequence.q_len) results[r] = {0.0f, -INFINITY};
    if (lse != nullptr && lane % 4 == 0 && row < problem.q_len) {
      lse[params.lse.offset(batch, row, block.head)] = results[r].lse;
    }
  }
  store_output<Kernel>(smem, HeadView<T>(params.o, batch, block.head, problem.value_dim), o,
                       results, warp_row, first_row, problem.q_len, lane);
}

// What cp.async and 16-byte stores need of an operand.
inline bool is_aligned(const Strided& operand) {
  return reinterpret_cast<uintptr_t>(operand.data) % 16 == 0 && operand.batch % 8 == 0 &&
         operand.seq % 8 == 0 && operand.head % 8 == 0;
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
  const int64_t blocks = q_tiles * problem.batch * problem.q_heads;
  if (blocks == 0) return {};
  if (blocks > INT_MAX) {
    return {"prefill: too many query tiles for one launch, got " + std::to_string(blocks)};
  }

  PrefillArgsSm80 args{params, make_score_scale(params.scores, params.features),
                       static_cast<int>(q_tiles)};
  const auto kernel = params.features.any_mask_or_bias() || params.scores.softcap > 0.0
                          ? &prefill_sm80_kernel<T, HeadDim, true>
                          : &prefill_sm80_kernel<T, HeadDim, false>;
  Launch what{};
  what.kernel_name = "prefill_sm80";
  what.kernel = reinterpret_cast<const void*>(kernel);
  what.grid = dim3(static_cast<unsigned>(blocks));
  what.threads = Kernel::kThreads;
  what.shared_memory = prefill_shared_memory_sm80(HeadDim);
  void* arguments[] = {&args};
  return launch(what, arguments, device, stream);
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_PREFILL_SM80_CUH_
