// From the KV cache in global memory, contiguous or paged, to the ring of tiles that each warp
// keeps for itself in shared memory.
#ifndef FLASHATTN_CUDA_DECODE_CACHE_CUH_
#define FLASHATTN_CUDA_DECODE_CACHE_CUH_

#include "decode_block.cuh"
#include "decode_shape.cuh"

namespace flashattn {

// Where a token lies. A page outside [0, num_pages) means that the token has no key.
struct TokenPlace {
  int page, slot;
};

// Bits 0 to n - 1.
__device__ __forceinline__ uint32_t bits_below(int n) { return n > 0 ? ~0u >> max(32 - n, 0) : 0; }
// Bit i: the tile's token i, token first + i of the sequence, is among `keys`.
__device__ __forceinline__ uint32_t tokens_among(KeyRange keys, int first) {
  return bits_below(keys.end - first) & ~bits_below(keys.begin - first);
}

// A word about the tile in each stage of a warp's ring; lane i keeps that of stage i.
class StageWords {
 public:
  __device__ explicit StageWords(int lane) : lane_(lane) {}
  __device__ void set(int stage, uint32_t word) {
    if (lane_ == stage) mine_ = word;
  }
  __device__ uint32_t get(int stage) const { return __shfl_sync(~0u, mine_, stage); }

 private:
  int lane_;
  uint32_t mine_ = 0;
};

// From token positions of one sequence to pages. A contiguous cache has one page, which holds the
// sequence.
template <class Shape>
struct TokenMap {
  const int32_t* table;  // of the sequence; null: contiguous
  FastDivisor page_size;
  int last_entry, num_pages;
  bool straddles;  // a tile may lie on several pages

  __device__ TokenMap(const DecodeArgs& args, int b)
      : table(nullptr),
        page_size(args.page_size),
        last_entry(args.table_width - 1),
        num_pages(args.num_pages),
        straddles(false) {
    if (!args.page_table) return;
    table = args.page_table + int64_t{batch_entry(b, args.table_batches)} * args.table_width;
    straddles = page_size.divisor % Shape::kTileTokens != 0;
  }

  // The place of the tile's first token or, when a tile may lie on several pages, of the token that
  // has this lane's number in the tile. Called long before the place is used. Waits for the table
  // alone: entries behind the length are read, but not followed.
  __device__ TokenPlace find(int tile, int lane) const {
    const int token = tile * Shape::kTileTokens + (straddles ? lane % Shape::kTileTokens : 0);
    if (!table) return {0, token};
    const int index = min(divide(token, page_size), last_entry);
    return {static_cast<int>(load_now_b32(table + index)),
            token - index * static_cast<int>(page_size.divisor)};
  }

  // Bit i: token i of the tile at `place` is one of `keys` and has a page.
  __device__ uint32_t present(int tile, TokenPlace place, KeyRange keys) const {
    const uint32_t has_page = __ballot_sync(~0u, static_cast<unsigned>(place.page) < num_pages);
    return has_page & tokens_among(keys, tile * Shape::kTileTokens) & Shape::kAllTokens;
  }
};

// K or V of one kv head, as one lane copies it.
template <class Shape>
struct CacheHead {
  const char* lane_data;  // the lane's first chunk of page 0, token 0
  int64_t page_stride, token_stride;
  int lane_chunks;  // from there to the end of a row

  __device__ CacheHead(const DecodeArgs& args, const DecodeCache& cache, int b, int kv_head,
                       int lane)
      : lane_data(cache.data + kv_head * cache.head + lane % Shape::kLanesPerRow * 16 +
                  (args.page_table ? 0 : batch_entry(b, cache.batches)) * cache.page),
        page_stride(cache.page),
        token_stride(cache.token),
        lane_chunks(cache.row_chunks - lane % Shape::kLanesPerRow) {}
};

// Starts the copy of one tile at `place`. lane_tile is where the lane's first chunk goes. Tokens
// that are not `present` are not read but become zero: values are multiplied by weights of zero and
// must not be NaN.
template <class Shape>
__device__ __forceinline__ void copy_tile(uint32_t lane_tile, const CacheHead<Shape>& head,
                                          TokenPlace place, bool straddles, uint32_t present,
                                          int lane) {
  const int lane_row = lane / Shape::kLanesPerRow;
  const auto copy_row = [&](int i, const char* source) {
    const int bytes = present >> lane_row >> i * Shape::kRowsPerCopy & 1 ? 16 : 0;
#pragma unroll
    for (int piece = 0; piece < Shape::kPieces; ++piece)
      cp_async_16_zfill(
          Shape::move(lane_tile, i * Shape::kRowsPerCopy, piece * Shape::kLanesPerRow),
          source + piece * Shape::kLanesPerRow * 16,
          piece * Shape::kLanesPerRow < head.lane_chunks ? bytes : 0);
  };
  const int64_t page = place.page * head.page_stride;
  if (straddles) {
    const int64_t token = page + place.slot * head.token_stride;
#pragma unroll 1  // less code for the others to skip
    for (int i = 0; i < Shape::kCopies; ++i)
      copy_row(i, head.lane_data + __shfl_sync(~0u, token, lane_row + i * Shape::kRowsPerCopy));
  } else {
    const char* source = head.lane_data + page + (place.slot + lane_row) * head.token_stride;
#pragma unroll
    for (int i = 0; i < Shape::kCopies; ++i) {
      copy_row(i, source);
      source += Shape::kRowsPerCopy * head.token_stride;
    }
  }
}

// The scales of a tile's tokens, when pages have their own.
template <class Shape>
struct TokenScales {
  float *keys, *values;

  __device__ TokenScales(unsigned char* data)
      : keys(reinterpret_cast<float*>(data)), values(keys + Shape::kTileTokens) {}
};

// Until the oldest of the 2 * stages groups in flight has landed. Many possible numbers of stages
// make a table of jumps, which itself has to come from memory.
template <int MostStages>
__device__ __forceinline__ void wait_for_oldest(int stages) {
  if constexpr (MostStages <= 2) {
    if (stages == 1) return cp_async_wait<1>();
    return cp_async_wait<3>();
  }
  switch (stages) {
    case 1:
      return cp_async_wait<1>();
    case 2:
      return cp_async_wait<3>();
    case 3:
      return cp_async_wait<5>();
    default:
      return cp_async_wait<7>();
  }
}

// The tiles that one warp has asked for and not yet used. Every tile is two groups of cp.async,
// keys first; a slot is asked for again as soon as its warp has read it, so that no barrier of the
// block is met before the end.
template <class Shape>
class TileRing {
 public:
  __device__ TileRing(const DecodeArgs& args, const DecodeBlock& block, unsigned char* smem,
                      int warp, int lane)
      : args_(args),
        map_(args, block.batch),
        keys_(args, args.keys, block.batch, block.kv_head, lane),
        values_(args, args.values, block.batch, block.kv_head, lane),
        kv_head_(block.kv_head),
        region_(shared_address(smem + args.smem.rings) + warp * args.smem.warp_region),
        scales_(smem + args.smem.scales + warp * args.stages * kScaleBytes),
        lane_(lane),
        lane_place_(Shape::place(lane / Shape::kLanesPerRow, lane % Shape::kLanesPerRow)) {}

  __device__ uint32_t keys(int stage) const { return region_ + stage * 2 * Shape::kTileBytes; }
  __device__ uint32_t values(int stage) const { return keys(stage) + Shape::kTileBytes; }
  __device__ TokenScales<Shape> scales(int stage) const { return scales_ + stage * kScaleBytes; }
  __device__ const TokenMap<Shape>& map() const { return map_; }

  __device__ void ask_keys(int stage, TokenPlace place, uint32_t present) const {
    copy_tile(keys(stage) + lane_place_, keys_, place, map_.straddles, present, lane_);
    if constexpr (Shape::kByteCache)
      ask_scales(args_.key_scales, args_.key_scale_page, scales(stage).keys, place, present);
  }
  __device__ void ask_values(int stage, TokenPlace place, uint32_t present) const {
    copy_tile(values(stage) + lane_place_, values_, place, map_.straddles, present, lane_);
    if constexpr (Shape::kByteCache)
      ask_scales(args_.value_scales, args_.value_scale_page, scales(stage).values, place, present);
  }

 private:
  static constexpr int kScaleBytes = decode_scale_bytes(Shape::kRowBytes, Shape::kWidth);

  __device__ void ask_scales(const float* scales, int page_stride, float* to, TokenPlace place,
                             uint32_t present) const {
    if (page_stride == 0) return;
    const float* source = scales + int64_t{place.page} * page_stride + kv_head_;
    if (lane_ < Shape::kTileTokens)
      cp_async_4_zfill(shared_address(to + lane_), source, present >> lane_ & 1 ? 4 : 0);
  }

  const DecodeArgs& args_;
  TokenMap<Shape> map_;
  CacheHead<Shape> keys_, values_;
  int kv_head_;
  uint32_t region_;
  unsigned char* scales_;
  int lane_;
  uint32_t lane_place_;
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_DECODE_CACHE_CUH_
