// The two warpgroups that multiply: one computes all scores, the softmax and the left half of the
// output; the other, which gets the weights through shared memory, the right half.
#ifndef FLASHATTN_CUDA_DECODE_LATENT_CONSUMER_SM90_CUH_
#define FLASHATTN_CUDA_DECODE_LATENT_CONSUMER_SM90_CUH_

#include "decode_latent_layout_sm90.cuh"
#include "decode_merge.cuh"
#include "softmax_sm90.cuh"

namespace flashattn {

// What both do.
template <class T>
class LatentConsumer {
 public:
  __device__ LatentConsumer(const DecodeArgs& args, const DecodeBlock& block, LatentTiles tiles,
                            LatentSmem smem, LatentShared& shared)
      : args_(args), block_(block), tiles_(tiles), smem_(smem), shared_(shared) {}

 protected:
  using Weights = uint32_t[kLatentTile / 4];  // of this thread's two rows

  __device__ int thread() const { return threadIdx.x % 128; }
  __device__ int warp() const { return thread() / 32; }
  __device__ int lane() const { return threadIdx.x % 32; }
  // This thread's two rows of the block's 64.
  __device__ int row(int half) const { return warp() * 16 + lane() / 4 + half * 8; }

  // The whole block's query, zeros behind its rows, by the threads of both warpgroups.
  __device__ __forceinline__ void store_query() const {
    constexpr int kRowPieces = kLatentHeadDim / 8, kThreads = kLatentThreads - 128;
    const char* query =
        args_.query + batch_entry(block_.batch, args_.query_batches) * args_.query_sequence;
    for (int i = threadIdx.x - 128; i < kLatentRows * kRowPieces; i += kThreads) {
      const int row = i / kRowPieces, piece = i % kRowPieces;
      const DecodeRow where(args_, block_.batch, block_.kv_head,
                            block_.first_row + min(row, block_.rows - 1));
      cp_async_16_zfill(
          latent_address(smem_.query(), row, piece),
          query + where.token * args_.query_token + where.head * args_.query_head + piece * 16,
          row < block_.rows ? 16 : 0);
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_async_proxy();
    named_barrier_sync(kLatentQueryStored, kThreads);
  }

  // Keys behind the sequence's last may hold anything; a weight of 0 would not silence a NaN.
  __device__ __forceinline__ void clear_unused_rows(int n, int first_chunk, int barrier) const {
    const int used = block_.keys.end - (tiles_.first + n) * kLatentTile;
    if (used >= kLatentTile) return;
    constexpr int kHalfChunks = 4;
    for (int i = thread(); i < (kLatentTile - used) * kHalfChunks * 8; i += 128)
      store_shared_16(smem_.tile(n) + (first_chunk + i % kHalfChunks) * kLatentChunkBytes +
                          used * 128 + i / kHalfChunks * 16,
                      uint4{});
    fence_async_proxy();
    named_barrier_sync(barrier, 128);
  }

  __device__ __forceinline__ void wait_full(int n, int part) const {
    mbarrier_wait(shared_address(&shared_.full[latent_stage(n)][part]), latent_parity(n));
  }
  __device__ __forceinline__ void release(int n, int part) const {
    if (thread() == 0) mbarrier_arrive(shared_address(&shared_.empty[latent_stage(n)][part]));
  }
  __device__ __forceinline__ void arrive_by_warp(uint64_t& barrier) const {
    __syncwarp();
    if (lane() == 0) mbarrier_arrive(shared_address(&barrier));
  }

  __device__ __forceinline__ void load_weights(Weights& p) const {
#pragma unroll
    for (int i = 0; i < kLatentTile / 16; ++i) {
      const uint4 piece = load_shared_16(smem_.weights(thread()) + i * 2048);
      p[4 * i] = piece.x, p[4 * i + 1] = piece.y, p[4 * i + 2] = piece.z, p[4 * i + 3] = piece.w;
    }
  }

  // o += weights x the values from `first_chunk` on, as many columns as o has. Descriptors count in
  // 16 bytes: 512 is a chunk, 128 are 16 rows of it.
  template <int N>
  __device__ __forceinline__ void multiply_values(float (&o)[N], Weights& p, int n,
                                                  int first_chunk) const {
    uint32_t low =
        descriptor_low_mn_major(smem_.tile(n) + first_chunk * kLatentChunkBytes, kLatentTile);
    opaque(low);
#pragma unroll
    for (int k = 0; k < kLatentTile / 16; ++k)
      Wgmma<T, 2 * N>::template rs<true>(o, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3],
                                         descriptor(low + k * 128), 1);
  }
  template <int N>
  __device__ __forceinline__ void multiply_rows(float (&o)[N], const float (&factor)[2]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) o[i] *= factor[i / 2 % 2];
  }

  // A row without a key: values that others see may have made it NaN.
  template <int N>
  __device__ __forceinline__ void clear_empty_rows(float (&o)[N],
                                                   const RowStats (&stats)[2]) const {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (stats[i / 2 % 2].sum == 0.f) o[i] = 0.f;
  }

  // The columns of o are those of the output from `first_group` groups of 32 on.
  template <int N>
  __device__ __forceinline__ void store(float (&o)[N], int first_group,
                                        const RowStats (&stats)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row(half) >= block_.rows) continue;
      if (block_.splits > 1) {
        store_partial(o, first_group, half, stats[half]);
      } else {
        store_output(o, first_group, half, stats[half]);
      }
    }
  }

 private:
  // Partial outputs have the order of decode_merge.cuh: an item of four floats are columns 8 apart.
  template <int N>
  __device__ __forceinline__ void store_partial(float (&o)[N], int first_group, int half,
                                                const RowStats& stats) const {
    const Partials partials = Partials::of(args_);
    const int64_t index = partials.index(block_.partial_slot(args_), block_.first_row + row(half));
    float4* out = partials.out(index) + first_group * 8 + lane() % 4 * 2;
#pragma unroll
    for (int group = 0; group < N / 16; ++group)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float* x = o + group * 16 + half * 2 + e;
        __stcg(out + group * 8 + e, make_float4(x[0], x[4], x[8], x[12]));
      }
    if (first_group == 0 && lane() % 4 == 0) __stcg(partials.stats + index, stats.packed());
  }

  template <int N>
  __device__ __forceinline__ void store_output(float (&o)[N], int first_group, int half,
                                               RowStats stats) const {
    const DecodeRow where(args_, block_.batch, block_.kv_head, block_.first_row + row(half));
    const OutputRow<T> out = output_row<T>(args_, where);
    const float scale = normalize(out, stats);
    auto* pairs = reinterpret_cast<uint32_t*>(out.out + first_group * 32) + lane() % 4;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const float* x = o + i * 4 + half * 2;
      pairs[i * 4] = pack<T>(x[0] * scale, x[1] * scale);
    }
    if (first_group == 0 && lane() % 4 == 0) store_lse(out, stats);
  }

 protected:
  const DecodeArgs& args_;
  const DecodeBlock& block_;
  const LatentTiles tiles_;
  const LatentSmem smem_;
  LatentShared& shared_;
};

// The scores and the left half of the output.
template <class T>
class LatentScorer : public LatentConsumer<T> {
 public:
  using LatentConsumer<T>::LatentConsumer;

  __device__ __forceinline__ void run() {
    this->store_query();
    query_low_ = descriptor_low_k_major(smem_.query());
    set_row_limits();
#pragma unroll
    for (float& o : left_first_) o = 0.f;
#pragma unroll
    for (float& o : left_last_) o = 0.f;
    const int count = tiles_.count;
    if (count > 0) {
      first_scores();
#pragma unroll 1
      for (int n = 1; n < count; ++n) step(n);
      last_values(count - 1);
    }
    finish();
  }

 private:
  using Base = LatentConsumer<T>;
  using Base::args_, Base::block_, Base::shared_, Base::smem_, Base::tiles_;

  __device__ __forceinline__ void set_row_limits() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows_.ref[half] = -INFINITY;
      rows_.sum[half] = 0.f;
      const int row = block_.first_row + min(this->row(half), block_.rows - 1);
      last_key_[half] = block_.keys_of(row, args_).end - 1;
    }
  }

  __device__ __forceinline__ void first_scores() {
    this->wait_full(0, kRight);
    this->wait_full(0, kLeftFirst);
    this->wait_full(0, kLeftLast);
    wgmma_fence();
    multiply_keys<kRight>(0);
    multiply_keys<kLeftFirst>(0);
    multiply_keys<kLeftLast>(0);
    wgmma_commit();
    wgmma_wait<0>();
    softmax(0);
    this->load_weights(weights_);
  }

  // The scores and the softmax of tile n, and the product of tile n - 1 with its values.
  __device__ __forceinline__ void step(int n) {
    this->wait_full(n, kRight);
    wgmma_fence();
    multiply_keys<kRight>(n);
    wgmma_commit();
    rescale();
    wgmma_fence();
    this->multiply_values(left_first_, weights_, n - 1, 0);
    wgmma_commit();
    this->wait_full(n, kLeftFirst);
    wgmma_fence();
    multiply_keys<kLeftFirst>(n);
    this->wait_full(n, kLeftLast);
    wgmma_fence();
    multiply_keys<kLeftLast>(n);
    wgmma_commit();
    this->multiply_values(left_last_, weights_, n - 1, 2);
    wgmma_commit();
    wgmma_wait<2>();
    this->release(n - 1, kLeftFirst);
    wgmma_wait<1>();
    softmax(n);
    wgmma_wait<0>();
    this->release(n - 1, kLeftLast);
    this->load_weights(weights_);
  }

  __device__ __forceinline__ void last_values(int n) {
    this->clear_unused_rows(n, 0, kLatentLeftCleared);
    rescale();
    wgmma_fence();
    this->multiply_values(left_first_, weights_, n, 0);
    this->multiply_values(left_last_, weights_, n, 2);
    wgmma_commit();
    wgmma_wait<0>();
  }

  // Descriptors count in 16 bytes: 512 is a chunk, 2 a step of 16 columns.
  template <int Part>
  __device__ __forceinline__ void multiply_keys(int n) {
    uint32_t query_low = query_low_, keys_low = descriptor_low_k_major(smem_.tile(n));
    opaque(query_low);
    opaque(keys_low);
#pragma unroll
    for (int i = 0; i < latent_chunks(Part) * 4; ++i) {
      const int at = (latent_first_chunk(Part) + i / 4) * 512 + i % 4 * 2;
      Wgmma<T, kLatentTile>::template ss<false, false>(
          s_, descriptor(query_low + at), descriptor(keys_low + at), Part != kRight || i > 0);
    }
  }

  // s_ becomes the weights, which the other warpgroup gets at once, and this one as soon as its
  // products with the last ones are done.
  __device__ __forceinline__ void softmax(int n) {
    hide_keys(n);
    softmax_with_maximum<true>(s_, rows_, args_.scale_log2);
    mbarrier_wait(shared_address(&shared_.weights_empty), (n & 1) ^ 1);
    const int thread = this->thread();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* p = s_ + 8 * i;
      store_shared_16(smem_.weights(thread) + i * 2048, {pack<T>(p[0], p[1]), pack<T>(p[2], p[3]),
                                                         pack<T>(p[4], p[5]), pack<T>(p[6], p[7])});
    }
    shared_store_f32x2(smem_.factors(thread), rows_.factor[0], rows_.factor[1]);
    this->arrive_by_warp(shared_.weights_full);
  }

  __device__ __forceinline__ void hide_keys(int n) {
    const int first = (tiles_.first + n) * kLatentTile;
    if (first + kLatentTile > block_.interior.end) {
      const int own = first + this->lane() % 4 * 2;
      mask_columns<false>(s_, VisibleColumns{{last_key_[0] - own, last_key_[1] - own}, 0, 0});
    }
    const uint32_t present = *const_cast<volatile uint32_t*>(&shared_.present[latent_stage(n)]);
    if (present == 0xff) return;
#pragma unroll
    for (int i = 0; i < kLatentTile / 2; ++i)
      if ((present >> (i / 4) & 1) == 0) s_[i] = -INFINITY;
  }

  __device__ __forceinline__ void rescale() {
    if (!rows_.o_is_behind) return;
    this->multiply_rows(left_first_, rows_.factor);
    this->multiply_rows(left_last_, rows_.factor);
  }

  // The other warpgroup gets the rows' statistics as if they were the weights of one more tile.
  __device__ __forceinline__ void finish() {
    RowStats stats[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(rows_.sum[half]);
      if (sum != 0.f) stats[half].max = rows_.ref[half];
      stats[half].sum = stats[half].exact_sum = sum;
    }
    mbarrier_wait(shared_address(&shared_.weights_empty), (tiles_.count & 1) ^ 1);
    shared_store_f32x4(smem_.weights(this->thread()), stats[0].max, stats[0].sum, stats[1].max,
                       stats[1].sum);
    this->arrive_by_warp(shared_.weights_full);
    this->clear_empty_rows(left_first_, stats);
    this->clear_empty_rows(left_last_, stats);
    this->store(left_first_, 0, stats);
    this->store(left_last_, 4, stats);
  }

  float s_[kLatentTile / 2], left_first_[64], left_last_[64];  // 128 columns each
  typename Base::Weights weights_;
  OnlineRows rows_;
  int last_key_[2];
  uint32_t query_low_ = 0;
};

// The right half of the output.
template <class T>
class LatentRightHalf : public LatentConsumer<T> {
 public:
  using LatentConsumer<T>::LatentConsumer;

  __device__ __forceinline__ void run() {
    this->store_query();
#pragma unroll
    for (float& o : right_) o = 0.f;
#pragma unroll 1
    for (int n = 0; n < tiles_.count; ++n) add_values(n);
    finish();
  }

 private:
  using Base = LatentConsumer<T>;
  using Base::shared_, Base::smem_, Base::tiles_;
  static constexpr int kFirstChunk = 4;

  __device__ __forceinline__ void add_values(int n) {
    typename Base::Weights weights;
    take_weights(n, weights);
    this->wait_full(n, kRight);
    if (n == tiles_.count - 1) this->clear_unused_rows(n, kFirstChunk, kLatentRightCleared);
    wgmma_fence();
    this->multiply_values(right_, weights, n, kFirstChunk);
    wgmma_commit();
    wgmma_wait<0>();
    this->release(n, kRight);
  }

  __device__ __forceinline__ void wait_weights(int n) const {
    mbarrier_wait(shared_address(&shared_.weights_full), n & 1);
  }

  __device__ __forceinline__ void take_weights(int n, typename Base::Weights& weights) {
    wait_weights(n);
    this->load_weights(weights);
    const float2 pair = shared_load_f32x2(smem_.factors(this->thread()));
    this->arrive_by_warp(shared_.weights_empty);
    const float factor[2] = {pair.x, pair.y};
    if (__any_sync(kWholeWarp, factor[0] != 1.f || factor[1] != 1.f))
      this->multiply_rows(right_, factor);
  }

  __device__ __forceinline__ void finish() {
    wait_weights(tiles_.count);
    const uint4 packed = load_shared_16(smem_.weights(this->thread()));
    RowStats stats[2];
    stats[0].max = __uint_as_float(packed.x);
    stats[0].sum = stats[0].exact_sum = __uint_as_float(packed.y);
    stats[1].max = __uint_as_float(packed.z);
    stats[1].sum = stats[1].exact_sum = __uint_as_float(packed.w);
    this->clear_empty_rows(right_, stats);
    this->store(right_, kLatentValueDim / 64, stats);
  }

  float right_[kLatentValueDim / 4];  // 256 columns
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_DECODE_LATENT_CONSUMER_SM90_CUH_
