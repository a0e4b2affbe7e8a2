// Prefill forward with mma.sync for head dims above 256 (tiles_sm80.h: is_wide).
// docs/kernels/prefill_sm80.md is its page.
//
// As prefill_sm80.cuh, but a key tile comes in pieces of 64 columns, those of K and then those of
// the block's part of V, through the same three buffers: while one is multiplied the next is
// arriving and the third is being filled. The scores of a tile add up in registers over the pieces
// of K.
#ifndef FLASHATTN_CUDA_PREFILL_WIDE_SM80_CUH_
#define FLASHATTN_CUDA_PREFILL_WIDE_SM80_CUH_

#include <cstdint>

#include "params.h"
#include "prefill_sm80_block.cuh"
#include "tiles_sm80.h"

namespace flashattn {

// The pieces of a block in the order of their use: for every key tile those of K, then those of V.
template <class T, int HeadDim>
class PieceStream {
  using Kernel = PrefillSm80<T, HeadDim>;

 public:
  __device__ PieceStream(const PrefillArgsSm80& args, const PrefillBlockSm80<T>& block,
                         int first_value_column, uint32_t smem)
      : args_(args),
        block_(block),
        q_(static_cast<const T*>(args.params.q.data) +
           args.params.q.offset(block.sequence.batch, 0, block.head)),
        first_value_column_(first_value_column),
        buffers_(smem),
        q_smem_(smem + 3 * Kernel::kBufferBytes) {}

  // The first two pieces, and Q where it stays.
  __device__ void start(int tile) {
    if (args_.query_stays) {
      for (int piece = 0; piece < key_pieces(); ++piece) load_query(piece, piece);
    }
    load(tile, 0, ring_.k());
    load(tile, 1, ring_.v());
  }

  __device__ int key_pieces() const { return pieces_of(args_.params.problem.head_dim); }

  // To a piece: its bytes that this thread copied have arrived. Between this and share() the thread
  // may change them.
  __device__ uint32_t await() {
    cp_async_wait<1>();  // all but the piece after it
    return buffers_ + ring_.k();
  }
  // All threads may read the piece, and the piece after the next is on its way to the buffer that
  // nobody reads any more. next_tile: after `tile`.
  __device__ void share(int tile, int next_tile, int piece) {
    __syncthreads();
    const int pieces = key_pieces() + value_pieces(), ahead = piece + 2;
    if (ahead < pieces) {
      load(tile, ahead, ring_.free());
    } else {
      load(next_tile, ahead - pieces, ring_.free());
    }
  }
  // The part of Q that belongs to a piece of K.
  __device__ QueryOperand<Kernel> query(int piece) const {
    return QueryOperand<Kernel>(query_address(args_.query_stays ? piece : slot(ring_.k())));
  }
  __device__ void next() { ring_.advance(); }

 private:
  __device__ int value_pieces() const {
    return min(pieces_of(args_.params.problem.value_dim - first_value_column_),
               kWideValueColumns / kWidePieceColumns);
  }

  static __device__ int slot(int buffer) { return buffer / Kernel::kBufferBytes; }
  __device__ uint32_t query_address(int slot) const { return q_smem_ + slot * Kernel::kQueryBytes; }

  __device__ void load_query(int piece, int slot) const {
    const int column = piece * kWidePieceColumns;
    load_rows<Kernel, Kernel::kBlockQ>(query_address(slot), q_ + column, args_.params.q.seq,
                                       args_.params.problem.head_dim - column, block_.first_row,
                                       {0, block_.sequence.q_len});
  }

  __device__ void load(int tile, int piece, int buffer) const {
    const PrefillParams& params = args_.params;
    if (tile < block_.finder.end()) {
      const bool is_key = piece < key_pieces();
      const int column = is_key ? piece * kWidePieceColumns
                                : first_value_column_ + (piece - key_pieces()) * kWidePieceColumns;
      load_rows<Kernel, Kernel::kBlockKv>(
          buffers_ + buffer, (is_key ? block_.k : block_.v) + column,
          is_key ? params.k.seq : params.v.seq,
          (is_key ? params.problem.head_dim : params.problem.value_dim) - column,
          tile * Kernel::kBlockKv, block_.keys);
      if (is_key && !args_.query_stays) load_query(piece, slot(buffer));
    }
    cp_async_commit();
  }

  const PrefillArgsSm80& args_;
  const PrefillBlockSm80<T>& block_;
  const T* const q_;
  const int first_value_column_;
  const uint32_t buffers_, q_smem_;
  BufferRing<Kernel> ring_;
};

template <class T, int HeadDim, bool Featured>
__global__ void __launch_bounds__(32 * prefill_tile_sm80(HeadDim).warps,
                                  prefill_tile_sm80(HeadDim).blocks_per_sm)
    prefill_wide_sm80_kernel(const __grid_constant__ PrefillArgsSm80 args) {
  using Kernel = PrefillSm80<T, HeadDim>;
  constexpr int kBlockQ = Kernel::kBlockQ, kBlockKv = Kernel::kBlockKv;
  constexpr int kParts = kWideValueColumns / kWidePieceColumns;
  static_assert(Kernel::kRowBlocks == 1, "a piece of the output is 32 registers");
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ PrefillBlockSm80<T> block;

  const PrefillParams& params = args.params;
  const Problem& problem = params.problem;
  const int first_value_column = blockIdx.x % args.value_groups * kWideValueColumns;
  const auto has_part = [&](int part) {
    return first_value_column + part * kWidePieceColumns < problem.value_dim;
  };
  if (threadIdx.x % 32 == 0) {
    block.template fill<Featured>(args, kBlockQ, blockIdx.x / args.value_groups);
  }
  __syncthreads();
  block.template find_tiles<kBlockQ, Kernel::kWarpRows>();
  __syncthreads();
  if constexpr (Featured) block.template find_segments<kBlockQ, Kernel::kWarpRows>();

  typename Kernel::Output o[kParts] = {};
  OnlineSoftmax<T, 1> softmax(args.scale.exponent);

  if (block.keys.begin < block.keys.end) {
    const auto find_tile = [&](int from) {
      return Featured ? block.finder.from(from, params, block.features) : from;
    };
    PieceStream<T, HeadDim> stream(args, block, first_value_column, shared_address(smem));
    int tile = find_tile(block.keys.begin / kBlockKv);
    stream.start(tile);

    while (tile < block.finder.end()) {
      const int next_tile = find_tile(tile + 1);
      bool is_visible = block.seen_by_warp[threadIdx.x / 32].any.has(tile);
      ScoreBits<1> bits;
      if constexpr (Featured) {
        bits.see_nothing();
        if (is_visible) {
          const WarpRows rows = rows_of_warp<Kernel>(block, threadIdx.x);
          look_at_tile(bits, params, block.features, block.finder.warp_segments[threadIdx.x / 32],
                       FragmentPlace(rows.first, rows.last, tile * kBlockKv, threadIdx.x % 32));
        }
        is_visible = bits.any();
      }

      typename Kernel::Scores s = {};
#pragma unroll 1
      for (int piece = 0; piece < stream.key_pieces(); ++piece) {
        const uint32_t k_smem = stream.await();
        stream.share(tile, next_tile, piece);
        if (is_visible) multiply_keys<Kernel>(s, stream.query(piece), k_smem, threadIdx.x);
        stream.next();
      }

      typename Kernel::Probabilities p_regs;
      if (is_visible) {
        finish_scores<Kernel, Featured>(s, block, args, bits, tile);
        // Always the exact way, since the pieces of K are gone.
        float factor[2];
        if (softmax.raise(s, factor)) {
#pragma unroll
          for (int part = 0; part < kParts; ++part) scale_rows<Kernel>(o[part], factor);
        }
        softmax.weigh(s, p_regs, true);
      }

      const bool may_hide = may_hide_keys<Featured>(block, tile);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (!has_part(part)) break;
        const uint32_t v_smem = stream.await();
        if (may_hide && remove_not_finite<Kernel>(v_smem)) block.note_removed(tile);
        stream.share(tile, next_tile, stream.key_pieces() + part);
        if (is_visible) {
          accumulate_values<Kernel>(o[part], p_regs, v_smem, kWidePieceColumns, threadIdx.x % 32);
        }
        stream.next();
      }
      tile = next_tile;
    }
    cp_async_wait<0>();  // of Q, if there was no tile
    __syncthreads();     // the buffers become the staging tile
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      add_not_finite<Kernel, Featured>(o[part], block, params,
                                       first_value_column + part * kWidePieceColumns);
    }
  }

  RowResult results[2];
  finish_rows<Kernel>(results, softmax, block, params);
  const int warp_row = threadIdx.x / 32 * Kernel::kWarpRows;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if (!has_part(part)) break;
    const int column = first_value_column + part * kWidePieceColumns;
    HeadView<T> to(params.o, block.sequence.batch, block.head, problem.value_dim - column);
    to.data += column;
    store_output<Kernel>(smem, to, o[part], results, warp_row, block.first_row + warp_row,
                         problem.q_len, threadIdx.x % 32);
    __syncwarp();  // the next part takes the same staging rows
  }
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_PREFILL_WIDE_SM80_CUH_
