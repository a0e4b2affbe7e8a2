// A tile of keys and values, in the type that the kernels compute in.
#ifndef FLASHATTN_CPU_TILE_H_
#define FLASHATTN_CPU_TILE_H_

#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/rows.h"

namespace flashattn::cpu {

template <class V>
struct KeyTile {
  typename V::Real *k, *v;  // [kTileKeys][stride], zeros beyond the head dim
  int k_stride, v_stride;
  int begin, end;
  bool k_finite, v_finite;
  bool any_absent, absent[kTileKeys];  // keys on a page that does not exist

  int count() const { return end - begin; }
};

// An odd number of vectors, so that the rows of a tile do not all fall into the same cache sets.
template <class V>
constexpr int tile_stride(int dim) {
  return V::whole_vectors(dim) + (V::whole_vectors(dim) / V::kLanes % 2 == 0 ? V::kLanes : 0);
}

template <class V>
int64_t tile_size(const Problem& problem) {
  return Scratch<V>::rounded(int64_t{kTileKeys} * tile_stride<V>(problem.head_dim)) +
         Scratch<V>::rounded(int64_t{kTileKeys} * tile_stride<V>(problem.value_dim));
}

template <class V>
KeyTile<V> make_tile(const Problem& problem, Scratch<V>& scratch) {
  KeyTile<V> tile;
  tile.k_stride = tile_stride<V>(problem.head_dim);
  tile.v_stride = tile_stride<V>(problem.value_dim);
  tile.k = scratch.take_zeros(int64_t{kTileKeys} * tile.k_stride);
  tile.v = scratch.take_zeros(int64_t{kTileKeys} * tile.v_stride);
  tile.begin = tile.end = 0;
  return tile;
}

template <class V>
void multiply_row(typename V::Real* row, int dim, float factor) {
  for (int d = 0; d < dim; ++d) row[d] *= factor;
}

// Loads keys [begin, end), the keys of a sequence that exist; end - begin is at most kTileKeys.
template <class V>
void load_tile(const Problem& problem, const KeyValues& from, int b, int head, int begin, int end,
               KeyTile<V>& tile) {
  tile.begin = begin;
  tile.end = end;
  tile.any_absent = false;
  for (int j = begin; j < end; ++j) {
    typename V::Real* k = tile.k + int64_t{j - begin} * tile.k_stride;
    typename V::Real* v = tile.v + int64_t{j - begin} * tile.v_stride;
    int page = b, slot = j;
    bool absent = false;
    if (from.page_table) {
      page = from.page_table.row(b)[j / from.page_size];
      slot = j % from.page_size;
      absent = page < 0 || page >= from.num_pages;
    }
    tile.absent[j - begin] = absent;
    tile.any_absent |= absent;
    if (absent) {
      for (int d = 0; d < problem.head_dim; ++d) k[d] = 0;
      for (int d = 0; d < problem.value_dim; ++d) v[d] = 0;
      continue;
    }
    Convert<V>::load_row(k, from.k.data, from.dtype, from.k.offset(page, slot, head),
                         problem.head_dim);
    Convert<V>::load_row(v, from.v.data, from.dtype, from.v.offset(page, slot, head),
                         problem.value_dim);
    if (from.key_scale) multiply_row<V>(k, problem.head_dim, from.key_scale.row(page)[head]);
    if (from.value_scale) multiply_row<V>(v, problem.value_dim, from.value_scale.row(page)[head]);
  }
  tile.k_finite = rows_finite<V>(tile.k, tile.k_stride, end - begin, problem.head_dim);
  tile.v_finite = rows_finite<V>(tile.v, tile.v_stride, end - begin, problem.value_dim);
}

}  // namespace flashattn::cpu

#endif  // FLASHATTN_CPU_TILE_H_
