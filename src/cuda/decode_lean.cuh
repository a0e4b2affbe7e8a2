// The lean kernel: decode_kernel for the common call, in less than half of the code. One new token
// in one column block, or a few in two; a 16-bit cache, rows of the compiled head dim, tiles inside
// one page. Featured adds sliding windows, the soft cap and pages of any size. A short call is
// mostly cold instructions and cold parameters; both are few here.
#ifndef FLASHATTN_CUDA_DECODE_LEAN_CUH_
#define FLASHATTN_CUDA_DECODE_LEAN_CUH_

#include "decode_merge.cuh"

namespace flashattn {

// Code for 8.0, also what newer GPUs than Hopper run, has the plain kernels without clusters.
template <int Cluster, bool Featured>
constexpr bool kHasLeanKernel = kHasClusters || (Cluster == 1 && !Featured);

// What several new tokens need besides: for the query's addresses, so in front of all else.
struct LeanSeveralTokens {
  int group, last_token, query_token, out_token, lse_token;
  FastDivisor heads_of_token;
};
struct LeanOneToken {};

// What the lean kernel reads. What every call reads comes first, its end included: each further
// line of the parameters is a miss. Strides of what it loads are in bytes, of what it stores in
// elements, and 0 where all sequences share an operand. One column block is compiled for one token.
template <class Shape>
struct LeanArgs : std::conditional_t<Shape::kColumnBlocks == 1, LeanOneToken, LeanSeveralTokens> {
  const int32_t* lengths;
  const char* query;
  const int32_t* page_table;  // null: contiguous
  const char* keys;
  const char* values;
  int64_t query_sequence;
  int64_t key_page, value_page;  // contiguous: from sequence to sequence
  FastDivisor kv_heads;
  int length_step;  // in numbers
  int query_head, key_head, value_head, key_token, value_token;
  int capacity, rows, stages;  // rows: of the query, in a kv head
  int eager;                   // 1: the first tile is fetched before the length is known
  float scale_log2;

  void* out;
  float* lse;          // null: not wanted
  const float* sinks;  // null: none
  int64_t out_sequence, lse_sequence;
  int out_head, lse_head, sinks_step;

  int table_step, num_pages;  // pages
  FastDivisor page_size;
  float* partial_outs;
  float4* partial_stats;

  int window;     // keys that a row sees in front of its own, at most the capacity
  float softcap;  // 0: none
};

// Which (sequence, kv head) and which of its splits a block has. Splits lie along x when they are a
// cluster, else along y. Query rows are ordered by token, then by head of the group.
template <class Shape, int Warps, int Cluster, bool Featured>
struct LeanSite {
  static constexpr bool kFeatured = Featured;
  const LeanArgs<Shape>& args;
  int batch, kv_head;

  __device__ explicit LeanSite(const LeanArgs<Shape>& call) : args(call) {
    const int pair = blockIdx.x / Cluster;
    batch = divide(pair, args.kv_heads);
    kv_head = pair - batch * static_cast<int>(args.kv_heads.divisor);
  }

  static constexpr int kFewestThreads = 32 * Warps;
  static constexpr __device__ int warps() { return Warps; }
  static constexpr __device__ int cluster() { return Cluster; }
  __device__ int split() const { return Cluster > 1 ? blockIdx.x % Cluster : blockIdx.y; }
  __device__ int splits() const { return Cluster > 1 ? Cluster : gridDim.y; }
  __device__ bool is_partial() const { return Cluster == 1 && gridDim.y > 1; }
  __device__ int rows() const { return args.rows; }
  static constexpr __device__ DecodeSmem smem() {
    return decode_smem(Shape::kHeadDim, Shape::kWidth, Shape::kColumnBlocks, Warps, 1, Cluster);
  }
  static constexpr int kMostStages = decode_most_stages(Shape::kRowBytes, Shape::kWidth, Cluster);
  __device__ int stages() const { return kMostStages == 1 ? 1 : args.stages; }
  __device__ int warp_region() const {
    return decode_warp_region(Shape::kHeadDim, Shape::kWidth, stages());
  }

  // The first key that any row sees.
  __device__ int first_key(int length) const {
    return Featured ? max(0, length - 1 - last_token() - args.window) : 0;
  }

  static constexpr bool kOneToken = Shape::kColumnBlocks == 1;
  __device__ int last_token() const {
    if constexpr (kOneToken)
      return 0;
    else
      return args.last_token;
  }
  __device__ int token(int row) const {
    if constexpr (kOneToken)
      return 0;
    else
      return divide(row, args.heads_of_token);
  }
  __device__ int head(int row) const {
    if constexpr (kOneToken)
      return kv_head * args.rows + row;
    else
      return kv_head * args.group + row - token(row) * args.group;
  }
  // Columns behind the rows repeat the last one; they are never stored.
  __device__ int row_of_column(int column) const { return min(column, args.rows - 1); }

  __device__ OutputRow<typename Shape::Element> output(int row) const {
    const int of_head = head(row), of_token = token(row);
    int64_t out = batch * args.out_sequence + int64_t{of_head} * args.out_head;
    int64_t lse = batch * args.lse_sequence + int64_t{of_head} * args.lse_head;
    if constexpr (!kOneToken) {
      out += int64_t{of_token} * args.out_token;
      lse += int64_t{of_token} * args.lse_token;
    }
    return {static_cast<typename Shape::Element*>(args.out) + out,
            args.lse ? args.lse + lse : nullptr,
            args.sinks ? args.sinks + int64_t{batch} * args.sinks_step + of_head : nullptr,
            Shape::kHeadDim};
  }
  __device__ Partials partials() const {
    return {args.partial_outs, args.partial_stats, Shape::kHeadDim, args.rows};
  }
  __device__ int64_t partial_index(const Partials& partials, int row) const {
    const int64_t pair = blockIdx.x;
    return partials.index(pair * splits() + split(), row);
  }
};

// The query of a block, loaded once, 16 bytes a thread, and shared like a tile whose tokens are its
// rows. Loaded by fragments, every lane of every warp would have an instruction for 4 bytes, all in
// front of the first tiles.
template <class Shape, int Warps>
class LeanQuery {
 public:
  static constexpr int kPieces = Shape::kRows * Shape::kRowChunks;
  static constexpr int kPasses = divide_up(kPieces, 32 * Warps);

  template <class Site>
  __device__ void ask(const Site& site) {
    const LeanArgs<Shape>& args = site.args;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int piece = threadIdx.x + i * 32 * Warps;
      if (kPieces % (32 * Warps) != 0 && piece >= kPieces) break;
      const int row = site.row_of_column(piece / Shape::kRowChunks);
      const char* data = args.query + site.batch * args.query_sequence +
                         int64_t{site.head(row)} * args.query_head + piece % Shape::kRowChunks * 16;
      if constexpr (!Site::kOneToken) data += int64_t{site.token(row)} * args.query_token;
      pieces_[i] = load_now_16(data);
    }
  }

  // Waits for it. The whole block calls it.
  __device__ void share(uint32_t smem, int lane) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int piece = threadIdx.x + i * 32 * Warps;
      if (kPieces % (32 * Warps) != 0 && piece >= kPieces) break;
      store_shared_16(smem + Shape::place(piece / Shape::kRowChunks, piece % Shape::kRowChunks),
                      pieces_[i]);
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < Shape::kColumnBlocks; ++c)
#pragma unroll
      for (int j = 0; j < Shape::kDimBlocks; j += 2) {
        uint32_t x[4];
        ldmatrix_x4(x, smem + Shape::place(c * kDecodeColumns + lane % 8, 2 * j + lane / 8));
        columns_[c][j][0] = x[0];
        columns_[c][j][1] = x[1];
        columns_[c][j + 1][0] = x[2];
        columns_[c][j + 1][1] = x[3];
      }
  }

  __device__ uint2 get(int column_block, int dim_block, int) const {
    const auto& pair = columns_[column_block][dim_block];
    return make_uint2(pair[0], pair[1]);
  }

 private:
  uint4 pieces_[kPasses];
  ColumnFragments<Shape> columns_[Shape::kColumnBlocks];
};

// The tokens of a tile that are read. Only the featured kernel has a begin and holes.
struct LeanTokens {
  int begin, end;
  uint32_t holes;  // a bit for each token, of a tile on several pages, that has no page
};

// The ring of one warp: as TileRing, for tokens that are visible up to a limit. Tiles lie inside
// one page, except in the featured kernel.
template <class Shape, bool Featured>
class LeanRing {
 public:
  template <class Site>
  __device__ LeanRing(const Site& site, unsigned char* smem, int warp, int lane)
      : args_(site.args),
        batch_(site.batch),
        lane_row_(lane / Shape::kLanesPerRow),
        ring_(shared_address(smem + site.smem().rings) + warp * site.warp_region()),
        lane_place_(Shape::place(lane / Shape::kLanesPerRow, lane % Shape::kLanesPerRow)) {
    const int chunk = lane % Shape::kLanesPerRow * 16;
    keys_ = args_.keys + int64_t{site.kv_head} * args_.key_head + chunk;
    values_ = args_.values + int64_t{site.kv_head} * args_.value_head + chunk;
    if (args_.page_table) table_ = args_.page_table + int64_t{site.batch} * args_.table_step;
    if constexpr (Featured)
      straddles_ = args_.page_table && args_.page_size.divisor % Shape::kTileTokens != 0;
  }

  __device__ uint32_t keys(int stage) const { return ring_ + stage * 2 * Shape::kTileBytes; }
  __device__ uint32_t values(int stage) const { return keys(stage) + Shape::kTileBytes; }

  __device__ bool contiguous() const { return args_.page_table == nullptr; }
  // The place of a tile's first token or, where tiles straddle pages, of the token that has this
  // lane's number in the tile. Waits for nothing but the table: behind the length its entries are
  // read, as far as the table goes, and not followed.
  __device__ TokenPlace find(int tile) const {
    int token = tile * Shape::kTileTokens;
    if constexpr (Featured)
      if (straddles_) token += threadIdx.x % Shape::kTileTokens;
    if (!args_.page_table) return {batch_, token};
    const int index = divide(token, args_.page_size);
    const int page = token < args_.capacity ? static_cast<int>(load_now_b32(table_ + index)) : -1;
    return {page, token - index * static_cast<int>(args_.page_size.divisor)};
  }
  // How many tokens of a tile there are, of which `left` lie in front of the limit.
  __device__ int tokens(TokenPlace place, int left) const {
    if constexpr (Featured)
      if (straddles_) return left;
    return absent(place) ? 0 : left;
  }
  __device__ uint32_t holes(TokenPlace place) const {
    return straddles_ ? __ballot_sync(~0u, absent(place)) : 0;
  }

  __device__ void ask_keys(int stage, TokenPlace place, LeanTokens tokens) const {
    copy(keys(stage), keys_, args_.key_page, args_.key_token, place, tokens);
  }
  __device__ void ask_values(int stage, TokenPlace place, LeanTokens tokens) const {
    copy(values(stage), values_, args_.value_page, args_.value_token, place, tokens);
  }

  // Zeroes the values behind the first `tokens`, which a copy of before the length has read.
  __device__ void clear_values(int stage, int tokens) const {
#pragma unroll 1
    for (int i = 0; i < Shape::kCopies; ++i) {
      const int row = lane_row_ + i * Shape::kRowsPerCopy;
      if (row < tokens) continue;
#pragma unroll
      for (int piece = 0; piece < Shape::kPieces; ++piece)
        store_shared_16(values(stage) + Shape::move(lane_place_, i * Shape::kRowsPerCopy,
                                                    piece * Shape::kLanesPerRow),
                        make_uint4(0, 0, 0, 0));
    }
    __syncwarp();
  }

 private:
  __device__ bool absent(TokenPlace place) const {
    return args_.page_table && static_cast<unsigned>(place.page) >= args_.num_pages;
  }

  // The copy of a tile that straddles pages: each lane has the distance from the first token of
  // page 0 to the token of its number.
  __device__ void gather(uint32_t tile, const char* cache, int64_t token, LeanTokens tokens) const {
#pragma unroll 1
    for (int i = 0; i < Shape::kCopies; ++i) {
      const int row = lane_row_ + i * Shape::kRowsPerCopy;
      const char* source = cache + __shfl_sync(~0u, token, row);
      const bool read = row >= tokens.begin && row < tokens.end && (tokens.holes >> row & 1) == 0;
#pragma unroll
      for (int piece = 0; piece < Shape::kPieces; ++piece)
        cp_async_16_zfill(
            tile + Shape::move(lane_place_, i * Shape::kRowsPerCopy, piece * Shape::kLanesPerRow),
            source + piece * Shape::kLanesPerRow * 16, read ? 16 : 0);
    }
  }

  // Rows outside `tokens` are not read but become zero: values are multiplied by weights of zero
  // and must not be NaN.
  __device__ void copy(uint32_t tile, const char* cache, int64_t page_stride, int token_stride,
                       TokenPlace place, LeanTokens tokens) const {
    const char* page = cache + place.page * page_stride;
    if constexpr (Featured)
      if (straddles_)
        return gather(tile, cache, page - cache + int64_t{place.slot} * token_stride, tokens);
    const char* source = page + static_cast<int64_t>(place.slot + lane_row_) * token_stride;
    const int64_t step = int64_t{Shape::kRowsPerCopy} * token_stride;
#pragma unroll
    for (int i = 0; i < Shape::kCopies; ++i) {
      const int row = lane_row_ + i * Shape::kRowsPerCopy;
      const int bytes = row < tokens.end && (!Featured || row >= tokens.begin) ? 16 : 0;
#pragma unroll
      for (int piece = 0; piece < Shape::kPieces; ++piece)
        cp_async_16_zfill(
            tile + Shape::move(lane_place_, i * Shape::kRowsPerCopy, piece * Shape::kLanesPerRow),
            source + piece * Shape::kLanesPerRow * 16, bytes);
      source += step;
    }
  }

  const LeanArgs<Shape>& args_;
  int batch_, lane_row_;
  uint32_t ring_, lane_place_;
  const char *keys_, *values_;  // the lane's first chunk of page 0, token 0
  const int32_t* table_;
  bool straddles_;
};

// The places of the tiles begin, begin + step, ... of a warp, one after another. Those of 32 tiles
// are looked up together, one a lane, long before they are needed: a look-up between copies queues
// behind megabytes of them. The featured kernel, where a tile may take all lanes, looks one tile
// ahead.
template <class Shape, bool Featured>
class LeanPlaces {
  using Ring = LeanRing<Shape, Featured>;

 public:
  __device__ LeanPlaces(const Ring& ring, int begin, int step) : begin_(begin), step_(step) {
    if (!Featured && ring.contiguous()) return;
    now_ = look_up(ring, 0);
  }

  __device__ TokenPlace next(const Ring& ring, int tile) {
    if (!Featured && ring.contiguous()) return ring.find(tile);
    const int lane = passed_++;
    if constexpr (Featured) return now_;
    return {__shfl_sync(~0u, now_.page, lane), __shfl_sync(~0u, now_.slot, lane)};
  }

  // Behind each next(); only the featured kernel needs it before the ring is full.
  __device__ void look_ahead(const Ring& ring) {
    if constexpr (Featured) {
      now_ = look_up(ring, passed_);
    } else if (!ring.contiguous()) {
      if (passed_ % 32 == kAhead) later_ = look_up(ring, passed_ - kAhead + 32);
      if (passed_ % 32 == 0) now_ = later_;
    }
  }

 private:
  // Of the n-th tile; of the lane's own behind it, or of the lane's token of it.
  __device__ TokenPlace look_up(const Ring& ring, int n) const {
    return ring.find(begin_ + (n + (Featured ? 0 : threadIdx.x % 32)) * step_);
  }

  static constexpr int kAhead = kDecodeMaxStages + 1;  // the first that look_ahead() can see

  int begin_, step_, passed_ = 0;
  TokenPlace now_, later_;
};

// Hides the tokens of a tile behind the first `tokens`, the holes, and from a row the tokens newer
// than its own or in front of its window.
template <class Shape, class Site>
__device__ __forceinline__ void hide_tokens(TileScores<Shape>& scores, const Site& site, int tokens,
                                            uint32_t holes, int lane) {
  bool all_visible = tokens >= Shape::kTileTokens + site.last_token();
  if constexpr (Site::kFeatured)
    all_visible = all_visible && tokens - 1 <= site.args.window && holes == 0;
  if (all_visible) return;
#pragma unroll
  for (int c = 0; c < Shape::kColumnBlocks; ++c)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = site.row_of_column(c * kDecodeColumns + 2 * (lane % 4) + h);
      const int visible = tokens - (site.last_token() - site.token(row));
#pragma unroll
      for (int n = 0; n < Shape::kTokenBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int token = 16 * n + 8 * i + lane / 4;
          if (token >= visible) scores[c][n][2 * i + h] = -INFINITY;
          if constexpr (Site::kFeatured)
            if (token < visible - 1 - site.args.window || (holes >> token & 1) != 0)
              scores[c][n][2 * i + h] = -INFINITY;
        }
    }
}

// Starts the copies of one tile: two groups, keys first.
template <class Shape, bool Featured>
__device__ __forceinline__ void ask_tile(const LeanRing<Shape, Featured>& ring, int stage,
                                         TokenPlace place, LeanTokens tokens, bool exists) {
  if (exists) ring.ask_keys(stage, place, tokens);
  cp_async_commit();
  if (exists) ring.ask_values(stage, place, tokens);
  cp_async_commit();
}

template <class Shape, int Warps, int Cluster, bool Featured>
__device__ __forceinline__ void decode_lean(const LeanArgs<Shape>& args, unsigned char* smem) {
  constexpr int kTokens = Shape::kTileTokens;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  using Site = LeanSite<Shape, Warps, Cluster, Featured>;
  const Site site(args);
  const int stages = site.stages();
  const int found_length =
      static_cast<int>(load_now_b32(args.lengths + int64_t{site.batch} * args.length_step));
  LeanQuery<Shape, Warps> query;
  query.ask(site);

  const LeanRing<Shape, Featured> ring(site, smem, warp, lane);
  const int step = site.splits() * site.warps();
  int begin = site.split() * site.warps() + warp;
  // Contiguous. Not by find(): where that loads from a page table, ptxas makes all that follows
  // wait for the query too, half a microsecond.
  if (!Featured && args.eager != 0) {
    const int token = begin * kTokens, left = args.capacity - token;
    ask_tile(ring, 0, {site.batch, token}, {0, left, 0}, left > 0);
  }
  LeanPlaces<Shape, Featured> places(ring, begin, step);
  const BlockMerge<Shape, Site> merge(site, smem);
  merge.open();

  const int length = clamp_length(found_length, args.capacity);
  const int end = (length + kTokens - 1) / kTokens;
  const int first_key = site.first_key(length);
  if constexpr (Featured)
    if (first_key > 0) {
      begin += first_key / kTokens;
      places = LeanPlaces<Shape, Featured>(ring, begin, step);
    }
  StageWords holes(lane);
  uint32_t absent = 0;  // a bit for each stage
  const auto tokens_of = [&](int tile, int stage) {
    return absent >> stage & 1 ? 0 : length - tile * kTokens;
  };
#pragma unroll 1
  for (int i = args.eager; i < stages; ++i) {
    const int tile = begin + i * step;
    const TokenPlace place = places.next(ring, tile);
    const int tokens = ring.tokens(place, length - tile * kTokens);
    if (tokens == 0) absent |= 1u << i;
    LeanTokens read = {first_key - tile * kTokens, tokens, 0};
    if constexpr (Featured) {
      read.holes = ring.holes(place);
      holes.set(i, read.holes);
      places.look_ahead(ring);
    }
    ask_tile(ring, i, place, read, tile < end);
  }
  query.share(shared_address(smem + site.smem().query), lane);
  merge.wait_until_open();

  WarpState<Shape> state;
  const int ahead = stages * step;
  int stage = 0;
#pragma unroll 1
  for (int tile = begin; tile < end; tile += step) {
    const bool more = tile + ahead < end;
    const int tokens = tokens_of(tile, stage);
    const TokenPlace next = places.next(ring, tile + ahead);
    const int next_tokens = ring.tokens(next, length - (tile + ahead) * kTokens);
    places.look_ahead(ring);
    LeanTokens next_read = {first_key - (tile + ahead) * kTokens, next_tokens, 0};
    uint32_t tile_holes = 0;
    if constexpr (Featured) {
      next_read.holes = ring.holes(next);
      tile_holes = holes.get(stage);
      holes.set(stage, next_read.holes);
    }

    wait_for_oldest<Site::kMostStages>(stages);
    __syncwarp();
    TileScores<Shape> scores;
    score_tile<Shape>(scores, ring.keys(stage), query, lane);
    float to_log2 = args.scale_log2;
    if constexpr (Featured) {
      if (args.softcap > 0.0f) {
        cap_scores<Shape>(scores, args.softcap, to_log2);
        to_log2 = 1.0f;
      }
    }
    hide_tokens<Shape>(scores, site, tokens, tile_holes, lane);
    __syncwarp();
    if (more) ring.ask_keys(stage, next, next_read);
    cp_async_commit();

    TileWeights<Shape> weights;
    weigh_tile<Shape>(state, scores, weights, to_log2);

    wait_for_oldest<Site::kMostStages>(stages);
    __syncwarp();
    if (!Featured && tokens < kTokens) ring.clear_values(stage, tokens);
    accumulate_values<Shape>(state, ring.values(stage), weights, lane);
    __syncwarp();
    if (more) ring.ask_values(stage, next, next_read);
    cp_async_commit();

    absent = next_tokens == 0 ? absent | 1u << stage : absent & ~(1u << stage);
    stage = stage + 1 == stages ? 0 : stage + 1;
  }
  cp_async_wait<0>();
  __syncwarp();
  merge.run(state);
}

template <class Shape, int Warps, int Cluster, bool Featured>
__global__ void __launch_bounds__(32 * Warps, Shape::kColumnBlocks == 1 && Shape::kHeadDim <= 128
                                                  ? 16 / Warps
                                                  : 1)
    decode_lean_kernel(const __grid_constant__ LeanArgs<Shape> args) {
  extern __shared__ __align__(1024) unsigned char smem[];
  if constexpr (kHasLeanKernel<Cluster, Featured>)
    decode_lean<Shape, Warps, Cluster, Featured>(args, smem);
}

// ---- Host

// Where sequence b finds an operand with `batches` of them, `stride` apart: b * step.
constexpr int64_t sequence_step(int batches, int64_t stride) { return batches == 1 ? 0 : stride; }

template <class Shape>
LeanArgs<Shape> lean_args(const DecodeParams& params, const DecodePlan& plan,
                          const DecodeArgs& call) {
  const int width = byte_width(params.cache_dtype);
  const auto bytes = [&](int64_t elements) { return static_cast<int>(elements * width); };
  LeanArgs<Shape> args;
  args.lengths = params.seq_lens.data;
  args.query = static_cast<const char*>(params.q.data);
  args.page_table = params.page_table.data;
  args.keys = static_cast<const char*>(params.k.data);
  args.values = static_cast<const char*>(params.v.data);
  args.query_sequence = sequence_step(params.q.batches, params.q.batch) * width;
  args.key_page = sequence_step(params.k.batches, params.k.batch) * width;
  args.value_page = sequence_step(params.v.batches, params.v.batch) * width;
  args.kv_heads = FastDivisor(params.problem.kv_heads);
  args.length_step =
      static_cast<int>(sequence_step(params.seq_lens.batches, params.seq_lens.width));
  args.table_step =
      static_cast<int>(sequence_step(params.page_table.batches, params.page_table.width));
  args.query_head = bytes(params.q.head);
  args.key_head = bytes(params.k.head);
  args.value_head = bytes(params.v.head);
  args.key_token = bytes(params.k.seq);
  args.value_token = bytes(params.v.seq);
  args.capacity = params.problem.kv_len;
  args.rows = params.problem.q_len * params.problem.group();
  if constexpr (Shape::kColumnBlocks > 1) {
    args.group = params.problem.group();
    args.last_token = params.problem.q_len - 1;
    args.heads_of_token = call.group;
    args.query_token = bytes(params.q.seq);
    args.out_token = static_cast<int>(params.o.seq);
    args.lse_token = static_cast<int>(params.lse.seq);
  }
  args.stages = call.stages;
  args.eager = plan.eager;
  args.page_size = call.page_size;
  args.num_pages = params.num_pages;
  args.scale_log2 = call.scale_log2;
  args.out = params.o.data;
  args.lse = static_cast<float*>(params.lse.data);
  args.sinks = params.sinks.data;
  args.out_sequence = params.o.batch;
  args.lse_sequence = params.lse.batch;
  args.out_head = static_cast<int>(params.o.head);
  args.lse_head = static_cast<int>(params.lse.head);
  args.sinks_step = static_cast<int>(sequence_step(params.sinks.batches, params.sinks.width));
  args.partial_outs = call.partial_outs;
  args.partial_stats = call.partial_stats;
  args.window = call.window;
  args.softcap = call.softcap;
  return args;
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_DECODE_LEAN_CUH_
