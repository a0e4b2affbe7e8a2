// Blocks of query rows: which rows they are, what each may see, and how they get into vectors.
#ifndef FLASHATTN_CPU_ROWS_H_
#define FLASHATTN_CPU_ROWS_H_

#include <cstdint>
#include <new>

#include "cpu/convert.h"
#include "cpu/vector.h"
#include "params.h"

namespace flashattn::cpu {

// One task's memory, handed out in pieces. The kernels ask for less than a few MiB a task.
template <class V>
class Scratch {
 public:
  using Real = typename V::Real;

  static constexpr int64_t rounded(int64_t count) { return (count + 63) / 64 * 64; }

  explicit Scratch(int64_t count)
      : begin_(static_cast<Real*>(::operator new(count * sizeof(Real), kAlignment))),
        next_(begin_) {}
  ~Scratch() { ::operator delete(begin_, kAlignment); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  Real* take(int64_t count) {
    Real* piece = next_;
    next_ += rounded(count);
    return piece;
  }
  Real* take_zeros(int64_t count) {
    Real* piece = take(count);
    for (int64_t i = 0; i < count; ++i) piece[i] = 0;
    return piece;
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  Real* begin_;
  Real* next_;
};

// Row r of a sequence and key/value head is head r % G of the group at position r / G: neighbours
// see nearly the same keys, and every vector is full however short the sequence is.
template <class V>
struct RowBlock {
  int rows, width;  // width: rows in whole vectors; the rest of the last one sees no key
  int position[V::kBlock], head[V::kBlock];
  int begin[V::kBlock], end[V::kBlock];  // keys that window and lengths leave to the row
  int first_key, last_key;               // [first_key, last_key): what any row sees
  int first_common, last_common;         // what all rows see

  bool sees_any(int tile_begin, int tile_end) const {
    return first_key < tile_end && tile_begin < last_key;
  }
  bool sees_all(int tile_begin, int tile_end) const {
    return first_common <= tile_begin && tile_end <= last_common;
  }
};

// Whether the row's position is within the query length of its sequence.
template <class V>
bool is_present(const PrefillParams& params, int b, const RowBlock<V>& rows, int lane) {
  return rows.position[lane] < params.q_length(b);
}

template <class V>
RowBlock<V> make_row_block(const PrefillParams& params, int b, int kv_head, int64_t first_row,
                           int row_count) {
  const int group = params.problem.group();
  const int q_len = params.q_length(b), kv_len = params.kv_length(b);
  RowBlock<V> block;
  block.rows = row_count;
  block.width = V::whole_vectors(row_count);
  block.first_key = block.last_common = kUnlimited;
  block.last_key = block.first_common = 0;
  for (int lane = 0; lane < block.width; ++lane) {
    const int64_t row = first_row + (lane < row_count ? lane : 0);
    const int position = static_cast<int>(row / group);
    KeyRange keys = {0, 0};
    if (lane < row_count) {
      if (position < q_len) keys = visible_keys(params.scores, position, q_len, kv_len);
      keys.end = max_int(keys.begin, keys.end);
      if (keys.begin < keys.end) {
        block.first_key = min_int(block.first_key, keys.begin);
        block.last_key = max_int(block.last_key, keys.end);
      }
      block.first_common = max_int(block.first_common, keys.begin);
      block.last_common = min_int(block.last_common, keys.end);
    }
    block.position[lane] = position;
    block.head[lane] = kv_head * group + static_cast<int>(row % group);
    block.begin[lane] = keys.begin;
    block.end[lane] = keys.end;
  }
  return block;
}

// Compares magnitudes as integers, which order like the numbers, with infinity on top and NaN
// above.
template <class V>
bool rows_finite(const typename V::Real* p, int stride, int rows, int dim) {
  using IntVec = typename V::IntVec;
  constexpr typename V::Int kMagnitude = ~(typename V::Int{1} << (8 * sizeof(typename V::Int) - 1));
  constexpr auto kInfinity = (2 * V::Exp::kBias + 1) << V::Exp::kMantissaBits;
  IntVec largest = {};
  typename V::Real rest = 0;
  for (int row = 0; row < rows; ++row, p += stride) {
    int d = 0;
    for (; d + V::kLanes <= dim; d += V::kLanes) {
      const IntVec magnitude = (IntVec)V::load(p + d) & kMagnitude;
      largest = magnitude > largest ? magnitude : largest;
    }
    for (; d < dim; ++d) rest += p[d] - p[d];  // NaN but for numbers
  }
  bool finite = rest == 0;
  for (int lane = 0; lane < V::kLanes; ++lane) finite &= largest[lane] < kInfinity;
  return finite;
}

// Rows of an operand, one after the other and `stride` apart, times a factor. Rows that see no key
// and the padding are zero, whatever the operand holds there.
template <class V>
void load_rows(const Strided& operand, DType dtype, int b, const RowBlock<V>& rows, int dim,
               double factor, typename V::Real* to, int stride) {
  using Real = typename V::Real;
  const Real scale = static_cast<Real>(factor);
  for (int lane = 0; lane < rows.width; ++lane) {
    Real* row = to + int64_t{lane} * stride;
    const bool visible = rows.begin[lane] < rows.end[lane];
    if (visible) {
      Convert<V>::load_row(row, operand.data, dtype,
                           operand.offset(b, rows.position[lane], rows.head[lane]), dim);
      for (int d = 0; d < dim; ++d) row[d] *= scale;
    }
    for (int d = visible ? dim : 0; d < stride; ++d) row[d] = 0;
  }
}

// to[d][lane] = from[lane][d].
template <class V>
void transpose(const typename V::Real* from, int stride, int lanes, int dim, typename V::Real* to) {
  constexpr int kStep = 8;  // a column of so many lines stays in the cache
  for (int first = 0; first < lanes; first += V::kLanes) {
    for (int d0 = 0; d0 < dim; d0 += kStep) {
      const int d1 = min_int(d0 + kStep, dim);
      for (int d = d0; d < d1; ++d) {
        for (int lane = first; lane < first + V::kLanes; ++lane) {
          to[int64_t{d} * lanes + lane] = from[int64_t{lane} * stride + d];
        }
      }
    }
  }
}

// Row `lane` of what `from` holds as columns, [dim][width].
template <class V>
void gather_lane(const typename V::Real* from, int width, int lane, int dim,
                 typename V::Real* row) {
  for (int d = 0; d < dim; ++d) row[d] = from[int64_t{d} * width + lane];
}

}  // namespace flashattn::cpu

#endif  // FLASHATTN_CPU_ROWS_H_
