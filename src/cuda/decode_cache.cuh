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

// From token positions of one sequence to pages. A contiguous cache is a page for each sequence.
template <class Shape>
struct TokenMap {
  const int32_t* table;  // of the sequence; null: contiguous
  FastDivisor page_size;
  int num_pages;
  int whole_page;  // contiguous: the sequence's
  bool tile_in_page;
  KeyRange keys;  // the only tokens that are read

  __device__ TokenMap(const DecodeParams& params, const FastDivisor& page_divisor, int b,
                      KeyRange visible)
      : table(nullptr),
        page_size(page_divisor),
        num_pages(params.k.batches),
        whole_page(batch_entry(b, params.k.batches)),
        tile_in_page(true),
        keys(visible) {
    if (!params.page_table) return;
    table = params.page_table.data +
            batch_entry(b, params.page_table.batches) * params.page_table.width;
    num_pages = params.num_pages;
    tile_in_page = params.page_size % Shape::kTileTokens == 0;
  }

  __device__ bool has(int page) const { return static_cast<unsigned>(page) < num_pages; }

  // The place of the tile's first token or, when a tile may lie on several pages, of the token that
  // has this lane's number in the tile. Called long before the place is used: it waits for the
  // table.
  __device__ TokenPlace find(int tile, int lane) const {
    const int token = tile * Shape::kTileTokens + (tile_in_page ? 0 : lane % Shape::kTileTokens);
    if (!table) return {whole_page, token};
    const int index = divide(token, page_size);
    const int slot = token - index * static_cast<int>(page_size.divisor);
    const int page = token < keys.end ? static_cast<int>(load_now_b32(table + index)) : -1;
    return {page, slot};
  }

  // The place of row `row` of the tile that `found` is for; the whole warp calls it.
  __device__ TokenPlace of_row(TokenPlace found, int row) const {
    if (tile_in_page) return {found.page, found.slot + row};
    return {__shfl_sync(~0u, found.page, row), __shfl_sync(~0u, found.slot, row)};
  }

  // Bit i: token i of the tile has a page.
  __device__ uint32_t present(TokenPlace found) const {
    return __ballot_sync(~0u, has(found.page));
  }

  __device__ bool whole_tile(int tile, TokenPlace found) const {
    const int first = tile * Shape::kTileTokens;
    return tile_in_page && has(found.page) && first >= keys.begin &&
           first + Shape::kTileTokens <= keys.end;
  }
};

// K or V of one kv head, as one lane copies it. Strides are in bytes.
template <class Shape>
struct CacheHead {
  const char* lane_data;  // the lane's first chunk of page 0, token 0
  int64_t page_stride, token_stride;
  int lane_chunks;  // from there to the end of a row
  bool whole_rows;  // rows are as long as the compiled head dim

  __device__ CacheHead(const Strided& cache, int kv_head, int dims, int lane)
      : lane_data(static_cast<const char*>(cache.data) + kv_head * cache.head * Shape::kWidth +
                  lane % Shape::kLanesPerRow * 16),
        page_stride(cache.batch * Shape::kWidth),
        token_stride(cache.seq * Shape::kWidth),
        lane_chunks(dims * Shape::kWidth / 16 - lane % Shape::kLanesPerRow),
        whole_rows(dims == Shape::kHeadDim) {}

  __device__ const char* at(TokenPlace place) const {
    return lane_data + place.page * page_stride + place.slot * token_stride;
  }
};

// Starts the copy of one tile. lane_tile is where the lane's first chunk goes. What no token of the
// sequence fills becomes zero: V rows behind the length are multiplied, by zero, and must not be
// NaN.
template <class Shape>
__device__ __forceinline__ void copy_tile(uint32_t lane_tile, const CacheHead<Shape>& head,
                                          const TokenMap<Shape>& map, int tile, TokenPlace found,
                                          int lane) {
  const int lane_row = lane / Shape::kLanesPerRow;
  if (head.whole_rows && map.whole_tile(tile, found)) {
    const char* source = head.at({found.page, found.slot + lane_row});
#pragma unroll
    for (int i = 0; i < Shape::kCopies; ++i) {
#pragma unroll
      for (int piece = 0; piece < Shape::kPieces; ++piece)
        cp_async_16(Shape::move(lane_tile, i * Shape::kRowsPerCopy, piece * Shape::kLanesPerRow),
                    source + piece * Shape::kLanesPerRow * 16);
      source += Shape::kRowsPerCopy * head.token_stride;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < Shape::kCopies; ++i) {
    const int row = lane_row + i * Shape::kRowsPerCopy;
    const int token = tile * Shape::kTileTokens + row;
    const TokenPlace place = map.of_row(found, row);
    const bool visible = token >= map.keys.begin && token < map.keys.end && map.has(place.page);
    const char* source = visible ? head.at(place) : head.lane_data;
#pragma unroll
    for (int piece = 0; piece < Shape::kPieces; ++piece) {
      const bool filled = visible && piece * Shape::kLanesPerRow < head.lane_chunks;
      cp_async_16_zfill(
          Shape::move(lane_tile, i * Shape::kRowsPerCopy, piece * Shape::kLanesPerRow),
          filled ? source + piece * Shape::kLanesPerRow * 16 : head.lane_data, filled ? 16 : 0);
    }
  }
}

// What a warp keeps beside each tile of its ring.
template <class Shape>
struct DecodeTileNotes {
  static constexpr int kScales = Shape::kByteCache ? Shape::kTileTokens : 0;
  static constexpr int kBytes = decode_notes_bytes(Shape::kRowBytes, Shape::kWidth);

  unsigned char* data;

  __device__ uint32_t& present() const { return *reinterpret_cast<uint32_t*>(data); }
  __device__ float* key_scales() const { return reinterpret_cast<float*>(data + 16); }
  __device__ float* value_scales() const { return key_scales() + kScales; }
};

// Until the oldest of the 2 * stages groups in flight has landed.
__device__ __forceinline__ void wait_for_oldest(int stages) {
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
  __device__ TileRing(const DecodeParams& params, const TokenMap<Shape>& map, int kv_head,
                      unsigned char* region, unsigned char* notes, int lane)
      : params_(params),
        map_(map),
        keys_(params.k, kv_head, params.problem.head_dim, lane),
        values_(params.v, kv_head, params.problem.value_dim, lane),
        kv_head_(kv_head),
        region_(shared_address(region)),
        notes_(notes),
        lane_(lane),
        lane_place_(Shape::place(lane / Shape::kLanesPerRow, lane % Shape::kLanesPerRow)) {}

  __device__ uint32_t keys(int stage) const { return region_ + stage * 2 * Shape::kTileBytes; }
  __device__ uint32_t values(int stage) const { return keys(stage) + Shape::kTileBytes; }
  __device__ DecodeTileNotes<Shape> notes(int stage) const {
    return {notes_ + stage * DecodeTileNotes<Shape>::kBytes};
  }
  __device__ const TokenMap<Shape>& map() const { return map_; }
  __device__ bool scales_by_page() const { return map_.table && params_.key_scale.batches > 1; }

  __device__ void ask_keys(int stage, int tile, TokenPlace found) const {
    copy_tile(keys(stage) + lane_place_, keys_, map_, tile, found, lane_);
    if (!map_.table) return;
    const uint32_t present = map_.present(found);
    if (lane_ == 0) notes(stage).present() = present;
    if constexpr (Shape::kByteCache)
      ask_scales(params_.key_scale, notes(stage).key_scales(), found);
  }
  __device__ void ask_values(int stage, int tile, TokenPlace found) const {
    copy_tile(values(stage) + lane_place_, values_, map_, tile, found, lane_);
    if constexpr (Shape::kByteCache)
      if (map_.table) ask_scales(params_.value_scale, notes(stage).value_scales(), found);
  }

 private:
  // The scale of every token of the tile, when pages have their own.
  __device__ void ask_scales(const Table<const float>& table, float* scales,
                             TokenPlace found) const {
    if (table.batches <= 1) return;
    const bool present = map_.has(found.page);
    const int64_t index = present ? found.page * table.width + kv_head_ : 0;
    if (lane_ < Shape::kTileTokens)
      cp_async_4_zfill(shared_address(scales + lane_), table.data + index, present ? 4 : 0);
  }

  const DecodeParams& params_;
  const TokenMap<Shape>& map_;
  CacheHead<Shape> keys_, values_;
  int kv_head_;
  uint32_t region_;
  unsigned char* notes_;
  int lane_;
  uint32_t lane_place_;
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_DECODE_CACHE_CUH_
