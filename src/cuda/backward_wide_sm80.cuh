// One block of the generic backward for head dims above 256 (tiles_sm80.h: is_wide);
// backward_sm80.cuh has the algorithm.
//
// The owned rows lie whole in shared memory, as many as fit. The streamed rows come in pieces of
// 128 columns through three buffers: while one is multiplied the next is arriving and the third is
// being filled. A step takes the pieces of y0 for s, those of y1 for dp, and once more those that
// the sums are made of. A block sums up 256 columns of one gradient, since those of 16 rows fill
// half of a thread's registers; blocks of the same rows and other columns make s and dp again.
#ifndef FLASHATTN_CUDA_BACKWARD_WIDE_SM80_CUH_
#define FLASHATTN_CUDA_BACKWARD_WIDE_SM80_CUH_

#include <cstdint>

#include "backward_sm80_walk.cuh"
#include "backward_tile.cuh"
#include "params.h"
#include "ptx.cuh"

namespace flashattn {

template <class T_, Owned Side_, bool Featured_>
struct BackwardWideSm80Config {
  using T = T_;
  static constexpr bool kOwnsKeys = Side_ == Owned::kKeys;
  static constexpr bool kFeatured = Featured_;
  static constexpr bool kSplitsSums = false, kFixedWarps = false;
  static constexpr int kRowTiles = 1, kMaxWarps = 8, kMinBlocks = 1;
  static constexpr int kPieceColumns = 128;
  static constexpr int kSumPieces = 2;  // of a block's sums
  static constexpr int kBuffers = 3;
  static constexpr int kPieceBytes = kStreamedRows * 2 * kPieceColumns;
  static constexpr int kStatisticsBytes = kStreamedRows * static_cast<int>(sizeof(RowStatistics));

  static constexpr int pieces(int columns) { return (columns + kPieceColumns - 1) / kPieceColumns; }
  static constexpr int groups(int columns) {
    return (pieces(columns) + kSumPieces - 1) / kSumPieces;
  }
  // The blocks of a tile of owned rows: dK's columns (dQ's), then dV's.
  static constexpr int parts(const Problem& problem) {
    return groups(problem.head_dim) + (kOwnsKeys ? groups(problem.value_dim) : 0);
  }
  static constexpr int owned_rows(int warps) { return 16 * kRowTiles * warps; }
  static constexpr int owned_bytes(const Problem& problem, int warps) {
    return (pieces(problem.head_dim) + pieces(problem.value_dim)) * owned_rows(warps) * 2 *
           kPieceColumns;
  }
  static constexpr int shared_memory(const Problem& problem, int warps) {
    return owned_bytes(problem, warps) + kBuffers * kPieceBytes + 2 * kStatisticsBytes;
  }
};

template <class Config>
class BackwardWideSm80Block : BackwardSm80Walk<Config> {
  using Walk = BackwardSm80Walk<Config>;
  using typename Walk::T;
  using Walk::capacity_, Walk::first_row_, Walk::forward_, Walk::head_, Walk::lane_, Walk::memory_,
      Walk::params_, Walk::part_, Walk::problem_, Walk::rows_, Walk::sequence_, Walk::shared_,
      Walk::streamed_;
  using Walk::first_position, Walk::length, Walk::load_statistics, Walk::narrow_to_segments,
      Walk::next, Walk::step_count, Walk::threads, Walk::warp_row, Walk::warps, Walk::writes_dbias,
      Walk::zero_rows_without_keys, Walk::zero_unvisited_dbias;
  using Walk::kOwnsKeys;
  static constexpr int kPieceColumns = Config::kPieceColumns;
  static constexpr int kSumPieces = Config::kSumPieces;

  using Products = float[1][kStreamedRows / 16][8];
  using Sum = float[1][kPieceColumns / 8][4];

 public:
  __device__ BackwardWideSm80Block(const BackwardParams& params, unsigned char* memory, int index)
      : Walk(params, memory, index / Config::parts(params.forward.problem),
             index % Config::parts(params.forward.problem)),
        key_pieces_(Config::pieces(problem_.head_dim)),
        value_pieces_(Config::pieces(problem_.value_dim)),
        key_groups_(Config::groups(problem_.head_dim)),
        first_sum_((part_ < key_groups_ ? part_ : part_ - key_groups_) * kSumPieces),
        buffers_(Config::owned_bytes(problem_, warps())) {}

  // Sums of the owned rows, into shared memory.
  __device__ void run() {
    const int b = sequence_.batch, kv_head = kOwnsKeys ? head_ : head_ / problem_.group();
    if constexpr (Config::kFeatured) {
      if (forward_.features.query_segments) narrow_to_segments();
    }
    if constexpr (kOwnsKeys) {
      copy_owned(HeadView<T>(forward_.k, b, kv_head, problem_.head_dim), 0, key_pieces_);
      copy_owned(HeadView<T>(forward_.v, b, kv_head, problem_.value_dim), key_pieces_,
                 value_pieces_);
    } else {
      copy_owned(HeadView<T>(forward_.q, b, head_, problem_.head_dim), 0, key_pieces_);
      copy_owned(HeadView<T>(params_.dout, b, head_, problem_.value_dim), key_pieces_,
                 value_pieces_);
      zero_unvisited_dbias();
    }
    if (part_ < key_groups_) {
      accumulate<Sums::kScores>();
    } else {
      accumulate<Sums::kValues>();
    }
  }

  __device__ void store() const {
    const int b = sequence_.batch;
    if (!kOwnsKeys) {
      store_sums(HeadView<T>(params_.dq, b, head_, problem_.head_dim));
    } else if (part_ < key_groups_) {
      store_sums(HeadView<T>(params_.dk, b, head_, problem_.head_dim));
    } else {
      store_sums(HeadView<T>(params_.dv, b, head_, problem_.value_dim));
    }
  }

 private:
  // A step's pieces in the order of their use.
  template <Sums Wanted>
  __device__ int product_pieces() const {
    return key_pieces_ + (Wanted == Sums::kValues ? 0 : value_pieces_);
  }
  template <Sums Wanted>
  __device__ int sum_pieces() const {
    const int all = Wanted == Sums::kValues ? value_pieces_ : key_pieces_;
    return min(all - first_sum_, kSumPieces);
  }

  __device__ int owned_piece(int piece) const { return piece * rows_ * 2 * kPieceColumns; }
  __device__ uint32_t buffer(int index) const {
    return shared_ + buffers_ + index * Config::kPieceBytes;
  }
  __device__ int statistics(int step) const {
    return buffers_ + Config::kBuffers * Config::kPieceBytes +
           (step % 2 ? Config::kStatisticsBytes : 0);
  }

  static __device__ HeadView<T> columns_from(HeadView<T> view, int piece) {
    view.data += piece * kPieceColumns;
    view.columns -= piece * kPieceColumns;
    return view;
  }

  __device__ void copy_owned(const HeadView<T>& x, int first_piece, int pieces) const {
    for (int piece = 0; piece < pieces; ++piece) {
      copy_rows_async<kPieceColumns>(shared_ + owned_piece(first_piece + piece),
                                     columns_from(x, piece), first_row_, rows_, {0, length()},
                                     threads());
    }
    cp_async_commit();
  }

  // A piece of a step's rows, and with the first one their statistics, to a buffer.
  template <Sums Wanted>
  __device__ void load(int step, const StreamPosition& at, int piece, int index) const {
    const int products = product_pieces<Wanted>();
    const bool is_sum = piece >= products;
    const bool is_y0 = is_sum ? Wanted != Sums::kValues : piece < key_pieces_;
    const int index_in_row = is_sum  ? piece - products + first_sum_
                             : is_y0 ? piece
                                     : piece - key_pieces_;
    // Found anew for every piece: views would take registers that the sums have filled.
    int batch = sequence_.batch;
    opaque(batch);
    const int head = kOwnsKeys ? at.q_head : head_ / problem_.group();
    const HeadView<T> y =
        is_y0 ? HeadView<T>(kOwnsKeys ? forward_.q : forward_.k, batch, head, problem_.head_dim)
              : HeadView<T>(kOwnsKeys ? params_.dout : forward_.v, batch, head, problem_.value_dim);
    copy_rows_async<kPieceColumns>(buffer(index), columns_from(y, index_in_row), at.first,
                                   kStreamedRows, streamed_, threads());
    if constexpr (kOwnsKeys) {
      // Owned queries read theirs once, into registers.
      constexpr int kRowsAChunk = 16 / sizeof(RowStatistics);
      if (piece == 0 && threadIdx.x < kStreamedRows / kRowsAChunk) {
        cp_async_16(shared_ + statistics(step) + 16 * threadIdx.x,
                    head_statistics(params_, sequence_.batch, at.q_head) + at.first +
                        kRowsAChunk * threadIdx.x);
      }
    }
  }

  // The main loop, and the sums into the block's own tiles.
  template <Sums Wanted>
  __device__ void accumulate() {
    Sum sums[kSumPieces] = {};
    if constexpr (!kOwnsKeys) load_statistics();

    const int steps = step_count(), products = product_pieces<Wanted>();
    const int pieces = products + sum_pieces<Wanted>();  // two at least
    StreamPosition at = first_position();
    int current = 0;  // buffer
    if (steps > 0) {
      load<Wanted>(0, at, 0, 0);
      cp_async_commit();
      load<Wanted>(0, at, 1, 1);
      cp_async_commit();
    }
    for (int step = 0; step < steps; ++step) {
      const StreamPosition ahead = next(at);
      // The next piece, when all its bytes are there; the one after the next starts to arrive in
      // the buffer that nobody reads any more.
      const auto await = [&](int piece) {
        cp_async_wait<1>();
        __syncthreads();
        const int free = current == 0 ? Config::kBuffers - 1 : current - 1;
        if (piece + 2 < pieces) {
          load<Wanted>(step, at, piece + 2, free);
        } else if (step + 1 < steps) {
          load<Wanted>(step + 1, ahead, piece + 2 - pieces, free);
        }
        cp_async_commit();
        const uint32_t y = buffer(current);
        current = current + 1 == Config::kBuffers ? 0 : current + 1;
        return y;
      };

      const int i = kOwnsKeys ? at.first : own_row(), j = kOwnsKeys ? own_row() : at.first;
      const int i_last = i + (kOwnsKeys ? kStreamedRows : 16) - 1;
      const int j_last = j + (kOwnsKeys ? 16 : kStreamedRows) - 1;
      const bool is_masked = Config::kFeatured || !sequence_.all_seen(i, i_last, j, j_last);
      bool is_visible = sequence_.any_seen(i, i_last, j, j_last);
      uint32_t visible = is_visible ? ~0u : 0;
      if (is_visible && is_masked) {
        visible = this->template visible_elements<kStreamedRows / 16>(at, 0);
        is_visible = __any_sync(~0u, visible);
      }

      Products p = {}, ds = {};
#pragma unroll 1
      for (int piece = 0; piece < products; ++piece) {
        const uint32_t x = shared_ + owned_piece(piece) + warp_row() * 2 * kPieceColumns;
        const uint32_t y = await(piece);
        if (!is_visible) continue;
        if (Wanted == Sums::kValues || piece < key_pieces_) {
          multiply_rows<T, kPieceColumns>(p, x, y, lane_);
        } else {
          multiply_rows<T, kPieceColumns>(ds, x, y, lane_);
        }
      }

      uint32_t weights[1][kStreamedRows / 16][4], row_masks[kStreamedRows / 16][2];
      if (is_visible || writes_dbias()) {
        this->template weigh<true>(reinterpret_cast<const float4*>(memory_ + statistics(step)), at,
                                   0, visible, p, ds);
        const uint32_t seen =
            __reduce_or_sync(~0u, this->template visible_columns<kStreamedRows / 16>(visible));
        lane_row_masks(row_masks, seen, lane_);
        pack_rows<T>(weights, Wanted == Sums::kValues ? p : ds);
      }
#pragma unroll
      for (int piece = 0; piece < kSumPieces; ++piece) {
        if (piece >= sum_pieces<Wanted>()) break;
        const uint32_t y = await(products + piece);
        if (!is_visible) continue;
        if (is_masked) {
          accumulate_rows<T, kPieceColumns, true>(sums[piece], weights, y, row_masks, lane_);
        } else {
          accumulate_rows<T, kPieceColumns, false>(sums[piece], weights, y, row_masks, lane_);
        }
      }
      at = ahead;
    }

    cp_async_wait<0>();
    __syncthreads();  // the owned rows have been read for the last time; the results take their
                      // place
    const float factor = Wanted == Sums::kValues ? 1.0f : static_cast<float>(forward_.scores.scale);
#pragma unroll
    for (int piece = 0; piece < kSumPieces; ++piece) {
      if (piece >= sum_pieces<Wanted>()) break;
      if constexpr (!kOwnsKeys) zero_rows_without_keys(sums[piece]);
      stage_rows<T, kPieceColumns>(memory_ + owned_piece(piece), warp_row(), sums[piece], factor,
                                   lane_);
    }
  }

  __device__ int own_row() const { return first_row_ + warp_row(); }

  __device__ void store_sums(const HeadView<T>& to) const {
    for (int piece = 0; piece < kSumPieces; ++piece) {
      const HeadView<T> columns = columns_from(to, first_sum_ + piece);
      if (columns.columns <= 0) break;
      store_rows<kPieceColumns>(columns, memory_ + owned_piece(piece), first_row_, rows_, length(),
                                capacity_);
    }
  }

  const int key_pieces_, value_pieces_;
  const int key_groups_;  // groups of dK's or dQ's columns
  const int first_sum_;   // first piece of the block's sums
  const int buffers_;     // where they begin
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_BACKWARD_WIDE_SM80_CUH_
