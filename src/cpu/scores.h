// The scores of a row block with a tile of keys: scale, soft cap, ALiBi, bias and masks.
//
// Everything here holds a tile as [key][row], the rows in the lanes of the vectors.
#ifndef FLASHATTN_CPU_SCORES_H_
#define FLASHATTN_CPU_SCORES_H_

#include <cstdint>

#include "cpu/matmul.h"
#include "cpu/tile.h"

namespace flashattn::cpu {

// scores = cap * tanh(scores / cap). slopes, unless null, receives the derivative.
template <class V>
void apply_softcap(double softcap, int64_t size, typename V::Real* scores,
                   typename V::Real* slopes) {
  using Real = typename V::Real;
  const Real cap = static_cast<Real>(softcap), inverse = static_cast<Real>(1 / softcap);
  for (int64_t i = 0; i < size; i += V::kLanes) {
    const typename V::Vec tanh = V::tanh(V::load(scores + i) * inverse);
    V::store(scores + i, tanh * cap);
    if (slopes) V::store(slopes + i, 1 - tanh * tanh);
  }
}

template <class V>
void add_alibi(const PrefillParams& params, int b, const RowBlock<V>& rows, const KeyTile<V>& tile,
               typename V::Real* scores) {
  using Real = typename V::Real;
  const int shift = params.scores.bottom_right ? params.kv_length(b) - params.q_length(b) : 0;
  const float* slopes = params.features.alibi_slopes.row(b);
  for (int x = 0; x < rows.width; x += V::kLanes) {
    typename V::Vec slope, center;
    for (int lane = 0; lane < V::kLanes; ++lane) {
      slope[lane] = slopes[rows.head[x + lane]];
      center[lane] = static_cast<Real>(rows.position[x + lane] + shift - tile.begin);
    }
    for (int j = 0; j < tile.count(); ++j) {
      Real* s = scores + j * rows.width + x;
      V::store(s, V::load(s) - slope * V::abs(center - Real(j)));
    }
  }
}

template <class V>
void load_bias_row(const Broadcast& bias, int64_t offset, int count, typename V::Real* to) {
  if (bias.col == 1) return Convert<V>::load_row(to, bias.data, bias.dtype, offset, count);
  for (int j = 0; j < count; ++j) {
    Convert<V>::load_row(to + j, bias.data, bias.dtype, offset + j * bias.col, 1);
  }
}

template <class V>
void add_bias(const Broadcast& bias, int b, const RowBlock<V>& rows, const KeyTile<V>& tile,
              typename V::Real* scores) {
  typename V::Real values[kTileKeys];
  int64_t loaded = -1;
  for (int lane = 0; lane < rows.rows; ++lane) {
    const int64_t offset = bias.offset(b, rows.head[lane], rows.position[lane], tile.begin);
    if (offset != loaded) load_bias_row<V>(bias, offset, tile.count(), values);
    loaded = offset;
    for (int j = 0; j < tile.count(); ++j) scores[j * rows.width + lane] += values[j];
  }
}

template <class V>
void apply_mask(const Broadcast& mask, int b, const RowBlock<V>& rows, const KeyTile<V>& tile,
                typename V::Real* scores) {
  const auto* data = static_cast<const bool*>(mask.data);
  for (int lane = 0; lane < rows.rows; ++lane) {
    const bool* row = data + mask.offset(b, rows.head[lane], rows.position[lane], tile.begin);
    bool all = true;
    for (int j = 0; j < tile.count(); ++j) all &= row[j * mask.col];
    if (all) continue;
    for (int j = 0; j < tile.count(); ++j) {
      typename V::Real& score = scores[j * rows.width + lane];
      score = row[j * mask.col] ? score : -V::kInfinity;
    }
  }
}

template <class V>
void apply_segments(const PrefillParams& params, int b, const RowBlock<V>& rows,
                    const KeyTile<V>& tile, typename V::Real* scores) {
  int32_t segments[V::kBlock];
  for (int lane = 0; lane < rows.width; ++lane) {
    segments[lane] = params.features.query_segments.row(b)[rows.position[lane]];
  }
  for (int j = 0; j < tile.count(); ++j) {
    const int32_t segment = params.features.key_segments.row(b)[tile.begin + j];
    typename V::Real* s = scores + j * rows.width;
    for (int lane = 0; lane < rows.width; ++lane) {
      s[lane] = segments[lane] == segment ? s[lane] : -V::kInfinity;
    }
  }
}

// Window, causality and lengths.
template <class V>
void apply_window(const RowBlock<V>& rows, const KeyTile<V>& tile, typename V::Real* scores) {
  using Real = typename V::Real;
  for (int x = 0; x < rows.width; x += V::kLanes) {
    typename V::Vec begin, end;
    for (int lane = 0; lane < V::kLanes; ++lane) {
      begin[lane] = static_cast<Real>(rows.begin[x + lane] - tile.begin);
      end[lane] = static_cast<Real>(rows.end[x + lane] - tile.begin);
    }
    const typename V::Vec hidden = V::broadcast(-V::kInfinity);
    for (int j = 0; j < tile.count(); ++j) {
      Real* s = scores + j * rows.width + x;
      const typename V::Vec key = V::broadcast(static_cast<Real>(j));
      V::store(s, ((key >= begin) & (key < end)) ? V::load(s) : hidden);
    }
  }
}

template <class V>
void hide_absent_keys(const RowBlock<V>& rows, const KeyTile<V>& tile, typename V::Real* scores) {
  for (int j = 0; j < tile.count(); ++j) {
    if (!tile.absent[j]) continue;
    for (int lane = 0; lane < rows.width; ++lane) scores[j * rows.width + lane] = -V::kInfinity;
  }
}

// Turns products of keys and scaled queries into the final scores, -infinity where a row does not
// see a key.
template <class V>
void finish_scores(const PrefillParams& params, int b, const RowBlock<V>& rows,
                   const KeyTile<V>& tile, typename V::Real* scores,
                   typename V::Real* softcap_slopes = nullptr) {
  const Features& features = params.features;
  if (params.scores.softcap != 0) {
    apply_softcap<V>(params.scores.softcap, int64_t{tile.count()} * rows.width, scores,
                     softcap_slopes);
  }
  if (features.alibi_slopes) add_alibi<V>(params, b, rows, tile, scores);
  if (features.bias.data) add_bias<V>(features.bias, b, rows, tile, scores);
  if (features.mask.data) apply_mask<V>(features.mask, b, rows, tile, scores);
  if (features.query_segments) apply_segments<V>(params, b, rows, tile, scores);
  if (tile.any_absent) hide_absent_keys<V>(rows, tile, scores);
  if (!rows.sees_all(tile.begin, tile.end)) apply_window<V>(rows, tile, scores);
}

struct SegmentRange {
  int32_t first, last;

  bool overlaps(const SegmentRange& other) const {
    return first <= other.last && other.first <= last;
  }
};

template <class V>
SegmentRange segment_range(const int32_t* segments, int count) {
  SegmentRange range = {segments[0], segments[0]};
  for (int i = 1; i < count; ++i) {
    range.first = segments[i] < range.first ? segments[i] : range.first;
    range.last = segments[i] > range.last ? segments[i] : range.last;
  }
  return range;
}

template <class V>
bool hidden_by_mask(const Broadcast& mask, int b, const RowBlock<V>& rows, int begin, int end) {
  const auto* data = static_cast<const bool*>(mask.data);
  int64_t seen = -1;
  for (int lane = 0; lane < rows.rows; ++lane) {
    const int64_t offset = mask.offset(b, rows.head[lane], rows.position[lane], begin);
    if (offset == seen) continue;
    seen = offset;
    bool any = false;
    for (int j = 0; j < end - begin; ++j) any |= data[offset + j * mask.col];
    if (any) return false;
  }
  return true;
}

template <class V>
bool hidden_by_segments(const Features& features, int b, const RowBlock<V>& rows, int begin,
                        int end) {
  const int first = rows.position[0], last = rows.position[rows.rows - 1];
  return !segment_range<V>(features.query_segments.row(b) + first, last - first + 1)
              .overlaps(segment_range<V>(features.key_segments.row(b) + begin, end - begin));
}

// Whether it is certain that no row of the block sees any of these keys: tiles of other documents
// and of padding cost nothing.
template <class V>
bool is_hidden(const Features& features, int b, const RowBlock<V>& rows, int begin, int end) {
  return !rows.sees_any(begin, end) ||
         (features.query_segments && hidden_by_segments<V>(features, b, rows, begin, end)) ||
         (features.mask.data && hidden_by_mask<V>(features.mask, b, rows, begin, end));
}

}  // namespace flashattn::cpu

#endif  // FLASHATTN_CPU_SCORES_H_
