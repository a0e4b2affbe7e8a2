// The end of a tile: what the warpgroups of a split tile hand over, sinks, values that are not
// finite, O and lse to memory, and Q's buffer given back.
#ifndef FLASHATTN_CUDA_PREFILL_EPILOGUE_SM90_CUH_
#define FLASHATTN_CUDA_PREFILL_EPILOGUE_SM90_CUH_

#include <cstring>

#include "prefill_layout_sm90.cuh"
#include "prefill_rows_sm90.cuh"
#include "softmax_sm90.cuh"

namespace flashattn {

// Word i of lane l of each quad for word l of lane i.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&x)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      uint32_t &low = x[i], &high = x[i + bit];
      const uint32_t other = __shfl_xor_sync(kWholeWarp, upper ? low : high, bit);
      (upper ? low : high) = other;
    }
  }
}

template <class T, class Tile>
class PrefillEpilogue : protected PrefillRows<T, Tile> {
  using Base = PrefillRows<T, Tile>;

 public:
  __device__ PrefillEpilogue(const PrefillMaps& maps, const PrefillParams& params,
                             const TileGrid& grid, const PrefillScale<Tile>& scale,
                             PrefillSmem<Tile> smem, PrefillShared<Tile>& shared, int warpgroup)
      : Base(params, grid, scale, smem, shared, warpgroup), maps_(maps) {}

 protected:
  using Base::params_, Base::grid_, Base::smem_, Base::shared_, Base::warpgroup_, Base::split_,
      Base::last_key_, Base::tile_;
  using Base::thread, Base::lane, Base::row_position, Base::packed_head, Base::query_head,
      Base::is_row, Base::first_position, Base::position, Base::fragment_address, Base::row_masks;

  // ---- split tiles: at the end the second warpgroup hands its O, sums and references over, 16
  // bytes a thread and piece.
  __device__ __forceinline__ void begin_split_tile(const TileWalk& walk) {
    split_ = is_split<Tile>(grid_, walk.position);
    // What was handed over in the tile before has been read.
    if (split_ && warpgroup_ == 0) named_barrier_arrive(kPartRead, 256);
  }
  __device__ uint32_t piece_of_part(int i) const {
    return smem_.part() + (i * 128 + thread()) * 16;
  }
  __device__ __forceinline__ void hand_over() {
    named_barrier_sync(kPartRead, 256);
    const auto store = [&](int i, const float (&x)[4]) {
      uint4 words;
      memcpy(&words, x, sizeof words);
      store_shared_16(piece_of_part(i), words);
    };
    store(0, {rows_.ref[0], rows_.ref[1], rows_.sum[0], rows_.sum[1]});
    float one = 1.f;  // accumulators stored as they are make ptxas serialise the products (C7514)
    opaque(one);
#pragma unroll
    for (int i = 0; i < Tile::kValueDim / 8; ++i) {
      const float* o = o_regs_ + 4 * i;
      store(i + 1, {o[0] * one, o[1] * one, o[2] * one, o[3] * one});
    }
    named_barrier_arrive(kPartWritten, 256);
    give_back_q();
  }
  // Under the greater of the two references. A row may have met no key here, or there.
  __device__ __forceinline__ void take_over() {
    named_barrier_sync(kPartWritten, 256);
    const auto load = [&](int i, float (&x)[4]) {
      const uint4 words = load_shared_16(piece_of_part(i));
      memcpy(x, &words, sizeof x);
    };
    float other[4], own_weight[2], weight[2];
    load(0, other);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float top = fmaxf(rows_.ref[half], other[half]);
      const float ref = top == -INFINITY ? 0.f : top;
      own_weight[half] = exp2_approx(rows_.ref[half] - ref);
      weight[half] = exp2_approx(other[half] - ref);
      rows_.sum[half] = rows_.sum[half] * own_weight[half] + other[2 + half] * weight[half];
      rows_.ref[half] = top;
    }
#pragma unroll
    for (int i = 0; i < Tile::kValueDim / 8; ++i) {
      float x[4];
      load(i + 1, x);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& o = o_regs_[4 * i + j];
        o = o * own_weight[j / 2] + x[j] * weight[j / 2];
      }
    }
  }

  // ---- the end of a tile: O / sum to memory
  __device__ __forceinline__ void finish_tile(const TileWork& work) {
    if constexpr (Tile::kSplitsLong)
      if (split_) take_over();
    const TilePlace place = load_part<TilePlace>(work);
    const int first = first_position(position());
    const bool v_not_finite = shared_.v_not_finite[tile_.work()];
    // Early where it is the longer way: less is in registers then.
    if (Tile::kAnyMask && v_not_finite) see_not_finite(work);
    float weight[2] = {1.f, 1.f};
    if constexpr (Tile::kAnyMask) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        weight[half] = add_sink(half, place.batch, query_head(place.head, half));
    }
    quad_sums(rows_.sum);
    float inverse[2];
    bool empty[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      empty[half] =
          first + row_position(half) >= place.q_len || rows_.sum[half] == 0.f || !is_row(half);
      inverse[half] = empty[half] ? 0.f : weight[half] * rcp_approx(rows_.sum[half]);
    }
    const bool rare = empty[0] || empty[1] || (!Tile::kAnyMask && v_not_finite);
    if (__any_sync(kWholeWarp, rare)) {
      if (!Tile::kAnyMask && v_not_finite) see_not_finite(work);
#pragma unroll
      for (int i = 0; i < Tile::kValueDim / 2; ++i)  // multiplied, they may be NaN
        if (empty[i / 2 % 2]) o_regs_[i] = 0.f;
    }
    if (params_.lse.data != nullptr) store_lse(place, first, empty);
    if constexpr (Tile::kDirectO)
      store_o(place, first, inverse);
    else
      stage_o(place, first, inverse);
  }

  // From registers: so Q is free long before, and the next tile's is there when this one ends.
  __device__ __forceinline__ void store_o(const TilePlace& place, int first,
                                          const float (&factor)[2]) {
    const Strided& o = params_.o;
    const int own_column = lane() % 4 * 8;
    int value_dim = params_.problem.value_dim;
    opaque(value_dim);  // else predicates are kept for all columns
    T* rows[2];
    bool stored[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      stored[half] = first + row_position(half) < grid_.q_len && is_row(half);
      rows[half] = static_cast<T*>(o.data) + static_cast<uint32_t>(place.batch) * o.batch +
                   static_cast<uint32_t>(first + row_position(half)) * o.seq +
                   static_cast<uint32_t>(query_head(place.head, half)) * o.head + own_column;
    }
#pragma unroll
    for (int column = 0; column < Tile::kValueDim; column += 32) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* own = o_regs_ + column / 2 + 4 * i + 2 * half;
          pairs[i] = pack<T>(own[0] * factor[half], own[1] * factor[half]);
        }
        transpose_in_quad(pairs);
        if (stored[half] && column + own_column < value_dim)
          store_global_16(rows[half] + column, pairs);
      }
    }
  }

  // Through this warpgroup's own Q rows.
  __device__ __forceinline__ void stage_o(const TilePlace& place, int first,
                                          const float (&factor)[2]) {
    const uint32_t q_smem = smem_.q(tile_.q_stage, warpgroup_);
#pragma unroll
    for (int i = 0; i < Tile::kValueDim / 2; ++i) o_regs_[i] *= factor[i / 2 % 2];
#pragma unroll
    for (int k = 0; k < Tile::kValueDim / 16; ++k) {
      const float* o = o_regs_ + 8 * k;
      stmatrix_x4(fragment_address(q_smem, k), pack<T>(o[0], o[1]), pack<T>(o[2], o[3]),
                  pack<T>(o[4], o[5]), pack<T>(o[6], o[7]));
    }
    fence_async_proxy();
    named_barrier_sync(kOwnThreads + warpgroup_, 128);
    if (thread() == 0) {
#pragma unroll
      for (int chunk = 0; chunk < Tile::kValueChunks; ++chunk)
        tma_store_packed(&maps_.o, q_smem + chunk * Tile::kQChunkBytes, chunk * 64, first,
                         place.head, place.batch);
      bulk_commit();
    }
    give_back_q();
  }

  // A sink is one more logit, without a value. It joins the row's sum, under the greater reference
  // of the two; returns what O has to be multiplied with to follow.
  __device__ __forceinline__ float add_sink(int half, int batch, int query_head) {
    const Table<const float>& sinks = params_.features.sinks;
    if (!sinks || !is_row(half)) return 1.f;
    const float sink = __ldg(sinks.row(batch) + query_head) * kLog2e;
    const float top = fmaxf(rows_.ref[half], sink);
    if (top == -INFINITY) return 1.f;
    const float weight = exp2_approx(rows_.ref[half] - top);
    const float own_share = lane() % 4 == 0 ? exp2_approx(sink - top) : 0.f;
    rows_.sum[half] = fmaf(rows_.sum[half], weight, own_share);
    rows_.ref[half] = top;
    return weight;
  }

  // Adds the values that the inspector took out to the rows that see them. Rare, so from memory.
  // Values of other blocks in the range are in the product already, and add nothing new.
  __device__ __forceinline__ void see_not_finite(const TileWork& work) {
    const T* v = static_cast<const T*>(params_.v.data) +
                 params_.v.offset(work.v_batch, 0, work.kv_head) + lane() % 4 * 2;
    const KeyRange keys = inspected_keys(work);
#pragma unroll 1
    for (int key = keys.begin; key <= keys.end - 1; ++key) {
      if constexpr (Tile::kAnyMask) {
        const RowMasks masks = row_masks();
        see_value(v + key * params_.v.seq, masks.sees(0, key), masks.sees(1, key));
      } else {
        see_value(v + key * params_.v.seq, key <= last_key_[0], key <= last_key_[1]);
      }
    }
  }
  __device__ __forceinline__ void see_value(const T* v, bool seen0, bool seen1) {
    if (!__any_sync(kWholeWarp, seen0 || seen1)) return;
    int value_dim = params_.problem.value_dim;
    opaque(value_dim);  // else predicates are kept for all columns
#pragma unroll
    for (int i = 0; i < Tile::kValueDim / 2; ++i) {
      const int column = i / 4 * 8 + i % 2;
      // A branch, without which the compiler loads everything at once and spills for it.
      if (i % 16 == 0 && column >= value_dim) break;
      if (column + lane() % 4 * 2 >= value_dim) continue;
      const float value = static_cast<float>(v[column]);
      if (!isfinite(value) && (i / 2 % 2 == 0 ? seen0 : seen1)) o_regs_[i] += value;
    }
  }
  __device__ __forceinline__ KeyRange inspected_keys(const TileWork& work) const {
    if constexpr (Tile::kAnyMask) {
      return {shared_.first_not_finite[tile_.work()] * Tile::kBlockKv,
              min(shared_.end_not_finite[tile_.work()] * Tile::kBlockKv, work.kv_len)};
    } else {
      return {work.first_inspected * Tile::kBlockKv,
              __shfl_sync(kWholeWarp, last_key_[1], 31) + 1};  // of the warp's last row
    }
  }

  __device__ __forceinline__ void store_lse(const TilePlace& place, int first,
                                            const bool (&empty)[2]) {
    const Rows& rows = params_.lse;
    // Of numbers that are not negative: half the instructions of a product with its sign.
    const auto offset = [&](uint32_t position, uint32_t head) {
      return position * rows.seq + head * rows.head;
    };
    float* const lse = static_cast<float*>(rows.data) +
                       static_cast<uint32_t>(place.batch) * rows.batch +
                       offset(first, place.head * grid_.packed_heads);
    if (lane() % 4 != 0) return;
    float value[2];
    int64_t of_row[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      value[half] =
          empty[half] ? -INFINITY : (rows_.ref[half] + log2_approx(rows_.sum[half])) * kLn2;
      of_row[half] = offset(row_position(half), packed_head(half));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (first + row_position(half) < grid_.q_len && is_row(half)) lse[of_row[half]] = value[half];
  }

  // ---- the Q buffer
  // This warpgroup's rows of Q once the tile's last scores are there. By every warp, since a warp
  // may read them again (recompute_s). Also says that it has left the tile before.
  __device__ __forceinline__ void release_read_q() {
    if constexpr (Tile::kDirectO)
      if (lane() == 0)
        mbarrier_arrive(shared_address(&shared_.barriers.q_empty[tile_.q_stage][warpgroup_]));
  }
  // The whole buffer, to be given back once O has left it.
  __device__ __forceinline__ void give_back_q() {
    unreleased_q_ = shared_address(&shared_.barriers.q_empty[tile_.q_stage][0]);
    if constexpr (Tile::kQStages == 1) release_previous_q();
  }
  // The Q buffer of the tile before, once its O has left it: late, so that nobody waits for the
  // store.
  __device__ __forceinline__ void release_previous_q() {
    if (Tile::kDirectO || unreleased_q_ == 0) return;
    if (thread() == 0) {
      bulk_wait_read<0>();
      mbarrier_arrive(unreleased_q_);
    }
    unreleased_q_ = 0;
  }

  const PrefillMaps& maps_;
  float o_regs_[Tile::kValueDim / 2];
  OnlineRows rows_;
  uint32_t unreleased_q_ = 0;
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_PREFILL_EPILOGUE_SM90_CUH_
