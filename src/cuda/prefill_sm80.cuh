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

#include "backward_tile.cuh"
#include "device.h"
#include "mask.cuh"
#include "params.h"
#include "ptx.cuh"
#include "softmax.cuh"
#include "tiles_sm80.h"

namespace flashattn {

struct PrefillArgsSm80 {
  PrefillParams params;
  ScoreScale scale;
  int q_tiles;
};

template <class T_, int HeadDim>
struct PrefillSm80 {
  using T = T_;
  using Rows = RowTile<HeadDim>;
  static constexpr PrefillTileSm80 kTile = prefill_tile_sm80(HeadDim);
  static constexpr int kBlockQ = kTile.block_q, kBlockKv = kPrefillBlockKv;
  static constexpr int kThreads = 32 * kTile.warps;
  static constexpr int kWarpRows = kBlockQ / kTile.warps;
  static constexpr int kRowBlocks = kWarpRows / 16;  // m16 blocks of a warp
  static constexpr int kKeyBlocks = kBlockKv / 8;    // n8 blocks of the scores
  static constexpr int kDimBlocks = HeadDim / 8;     // n8 blocks of the output
  static constexpr int kBufferBytes = kBlockKv * Rows::kRowBytes;
  static constexpr int kQueryBytes = kBlockQ * Rows::kRowBytes;
  static_assert(!kTile.q_in_registers || kQueryBytes <= 2 * kBufferBytes,
                "Q passes through the two buffers that the first K tile does not take");

  using Scores = float[kRowBlocks][kKeyBlocks][4];
  using Probabilities = uint32_t[kRowBlocks][kKeyBlocks / 2][4];
  using Output = float[kRowBlocks][kDimBlocks][4];
};

// Rows [first, first + Count) of a head to shared memory. Rows outside
// `present` and columns that the tensor lacks arrive as zeros and are not read.
template <class Kernel, int Count>
__device__ __forceinline__ void load_rows(uint32_t tile_smem, const typename Kernel::T* head,
                                          int64_t stride, int columns, int first, Range present) {
  using Rows = typename Kernel::Rows;
  constexpr int kChunksAtOnce = Rows::kSegmentBytes / 16;
  constexpr int kRowsAtOnce = Kernel::kThreads / kChunksAtOnce;
  static_assert(kRowsAtOnce % 8 == 0 && Count % kRowsAtOnce == 0, "the swizzle must not change");
  opaque(stride);
  const int thread = opaque_thread();
  const int chunk = thread % kChunksAtOnce, row = thread / kChunksAtOnce;
  const auto* source = head + (int64_t{first} + row) * stride + 8 * chunk;
  const uint32_t target = tile_smem + Rows::offset(row, chunk);
  const uint32_t distance = first + row - present.begin;
  const uint32_t count = max(present.end - present.begin, 0);
#pragma unroll
  for (int i = 0; i < Count / kRowsAtOnce; ++i) {
    const bool is_present = distance + i * kRowsAtOnce < count;
#pragma unroll
    for (int c = 0; c < Rows::kChunks; c += kChunksAtOnce) {
      const bool read = is_present && 8 * (chunk + c) < columns;
      cp_async_16_zfill(target + i * kRowsAtOnce * Rows::kRowBytes + 16 * c, source + 8 * c,
                        read ? 16 : 0);
    }
    source += kRowsAtOnce * stride;
  }
}

// The three buffers of a block rotate backwards: V lies behind K, and what is
// free behind V. All are offsets from the first.
template <class Kernel>
class BufferRing {
 public:
  __device__ int k() const { return k_; }
  __device__ int v() const { return k_ == kLast ? 0 : k_ + kSize; }
  __device__ int free() const { return k_ == 0 ? kLast : k_ - kSize; }
  // K goes to the free buffer, V to K's.
  __device__ void rotate() { k_ = free(); }

 private:
  static constexpr int kSize = Kernel::kBufferBytes, kLast = 2 * kSize;
  int k_ = kLast;
};

// The A operands of a warp's query rows: kept in registers, or read again at
// every use.
template <class Kernel, bool InRegisters = Kernel::kTile.q_in_registers>
class QueryOperand {
 public:
  __device__ explicit QueryOperand(uint32_t q_smem) : q_smem_(q_smem) {}

  __device__ __forceinline__ void get(uint32_t (&a)[4], int m, int k, int thread) const {
    using Rows = typename Kernel::Rows;
    const uint32_t warp_rows = q_smem_ + thread / 32 * Kernel::kWarpRows * Rows::kRowBytes;
    ldmatrix_x4(
        a, Rows::advance(Rows::rows_first(warp_rows, thread % 32), k) + 16 * m * Rows::kRowBytes);
  }

 private:
  uint32_t q_smem_;
};

template <class Kernel>
class QueryOperand<Kernel, true> {
 public:
  __device__ explicit QueryOperand(uint32_t q_smem) {
    const QueryOperand<Kernel, false> in_smem(q_smem);
#pragma unroll
    for (int m = 0; m < Kernel::kRowBlocks; ++m) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) in_smem.get(q_regs_[m][k], m, k, threadIdx.x);
    }
  }

  __device__ __forceinline__ void get(uint32_t (&a)[4], int m, int k, int) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = q_regs_[m][k][i];
  }

 private:
  static constexpr int kSteps = Kernel::kDimBlocks / 2;
  uint32_t q_regs_[Kernel::kRowBlocks][kSteps][4];
};

// s = q k^T.
template <class Kernel>
__device__ __forceinline__ void multiply_keys(typename Kernel::Scores& s,
                                              const QueryOperand<Kernel>& query, uint32_t k_smem,
                                              int thread) {
  using Rows = typename Kernel::Rows;
#pragma unroll
  for (int i = 0; i < Kernel::kRowBlocks * Kernel::kKeyBlocks * 4; ++i) {
    s[i / 4 / Kernel::kKeyBlocks][i / 4 % Kernel::kKeyBlocks][i % 4] = 0.0f;
  }
  const uint32_t k_lane = Rows::chunks_first(k_smem, thread % 32);
#pragma unroll
  for (int k = 0; k < Kernel::kDimBlocks / 2; ++k) {
    uint32_t q_regs[Kernel::kRowBlocks][4];
#pragma unroll
    for (int m = 0; m < Kernel::kRowBlocks; ++m) query.get(q_regs[m], m, k, thread);
#pragma unroll
    for (int n = 0; n < Kernel::kKeyBlocks; n += 2) {
      uint32_t k_regs[4];
      ldmatrix_x4(k_regs, Rows::advance(k_lane, k) + n * 8 * Rows::kRowBytes);
#pragma unroll
      for (int m = 0; m < Kernel::kRowBlocks; ++m) {
        mma_m16n8k16<typename Kernel::T>(s[m][n], q_regs[m], k_regs[0], k_regs[1]);
        mma_m16n8k16<typename Kernel::T>(s[m][n + 1], q_regs[m], k_regs[2], k_regs[3]);
      }
    }
  }
}

// o += p v, in parts of 64 columns; those beyond the value's are left out.
template <class Kernel>
__device__ __forceinline__ void accumulate_values(typename Kernel::Output& o,
                                                  const typename Kernel::Probabilities& p_regs,
                                                  uint32_t v_smem, int columns, int lane) {
  using Rows = typename Kernel::Rows;
  constexpr int kPart = Kernel::kDimBlocks % 8 == 0 ? 8 : Kernel::kDimBlocks;
  const uint32_t v_lane = Rows::rows_first(v_smem, lane);
#pragma unroll
  for (int part = 0; part < Kernel::kDimBlocks; part += kPart) {
    if (part > 0 && 8 * part >= columns) continue;
#pragma unroll
    for (int k = 0; k < Kernel::kKeyBlocks / 2; ++k) {
#pragma unroll
      for (int n = part; n < part + kPart; n += 2) {
        uint32_t v_regs[4];
        ldmatrix_x4_trans(v_regs, Rows::advance(v_lane, n / 2) + k * 16 * Rows::kRowBytes);
#pragma unroll
        for (int m = 0; m < Kernel::kRowBlocks; ++m) {
          mma_m16n8k16<typename Kernel::T>(o[m][n], p_regs[m][k], v_regs[0], v_regs[1]);
          mma_m16n8k16<typename Kernel::T>(o[m][n + 1], p_regs[m][k], v_regs[2], v_regs[3]);
        }
      }
    }
  }
}

template <class Kernel>
__device__ __forceinline__ void scale_rows(typename Kernel::Output& o,
                                           const float (&factor)[2 * Kernel::kRowBlocks]) {
#pragma unroll
  for (int m = 0; m < Kernel::kRowBlocks; ++m) {
#pragma unroll
    for (int n = 0; n < Kernel::kDimBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[m][n][e] *= factor[2 * m + e / 2];
    }
  }
}

// The rows of a warp to global memory, through its rows of the staging tile so
// that 16-byte stores fill whole sectors.
template <class Kernel>
__device__ __forceinline__ void store_output(unsigned char* stage,
                                             const HeadView<typename Kernel::T>& to,
                                             const typename Kernel::Output& o,
                                             const RowResult (&results)[2 * Kernel::kRowBlocks],
                                             int warp_row, int first_row, int capacity, int lane) {
  using Rows = typename Kernel::Rows;
#pragma unroll
  for (int r = 0; r < 2 * Kernel::kRowBlocks; ++r) {
    const float scale = results[r].output_scale;
#pragma unroll
    for (int n = 0; n < Kernel::kDimBlocks; ++n) {
      const float* pair = &o[r / 2][n][r % 2 * 2];
      const uint32_t packed =
          scale == 0.0f ? 0u : pack<typename Kernel::T>(pair[0] * scale, pair[1] * scale);
      const int offset = Rows::offset(warp_row + 8 * r + lane / 4, n) + 4 * (lane % 4);
      *reinterpret_cast<uint32_t*>(stage + offset) = packed;
    }
  }
  __syncwarp();
  constexpr int kChunksAtOnce = Rows::kSegmentBytes / 16;
  constexpr int kRowsAtOnce = 32 / kChunksAtOnce;
  const int chunk = lane % kChunksAtOnce;
#pragma unroll
  for (int i = lane / kChunksAtOnce; i < Kernel::kWarpRows; i += kRowsAtOnce) {
    const int64_t row = int64_t{first_row} + i;
    if (row >= capacity) break;
#pragma unroll
    for (int c = chunk; c < Rows::kChunks; c += kChunksAtOnce) {
      if (8 * c >= to.columns) break;
      *reinterpret_cast<uint4*>(to.data + row * to.stride + 8 * c) =
          *reinterpret_cast<const uint4*>(stage + Rows::offset(warp_row + i, c));
    }
  }
}

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
  int next_tile[8];  // a copy for each warp, so that none waits for another to
                     // read it

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
      if constexpr (Featured) block.next_tile[opaque_thread() / 32] = find_tile(tile + 1);
      const auto next = [&] { return Featured ? block.next_tile[opaque_thread() / 32] : tile + 1; };
      int first_key = tile * kBlockKv;
      opaque(first_key);  // else sums with it are kept in registers
      const int last_key = first_key + kBlockKv - 1;

      cp_async_wait<1>();  // all but V: K, and Q before the first tile
      __syncthreads();     // for all threads; and nobody reads the free buffer any more
      load_k(buffers + ring.free(), next());

      const int thread = opaque_thread();
      const WarpRows rows = rows_of_warp<Kernel>(block, thread);
      const bool in_window =
          rows.any() && block.sequence.any_seen(rows.first, rows.last, first_key, last_key);
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
      __syncthreads();     // for all threads; and nobody reads K any more
      load_v(buffers + ring.k(), next());
      if (is_visible()) {
        accumulate_values<Kernel>(o, p_regs, buffers + ring.v(), problem.value_dim,
                                  opaque_thread() % 32);
      }

      ring.rotate();
      tile = next();
    }
    cp_async_wait<0>();  // of Q, if there was no tile
    __syncthreads();     // the buffers become the staging tile
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
    if (lane % 4 == 0 && row < problem.q_len) {
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
