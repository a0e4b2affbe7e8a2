// The gradients of prefill, from the inputs, the output, lse and their cotangents.
//
//   P = exp(scores - lse)        dP = dO V^T        dS = P * (dP - delta) * softcap'
//   dV = P^T dO                  dK = dS^T Q        dQ = dS K
//   delta = rowsum(dO * O) - dlse
//
// Two kinds of task compute the same P and dS: one owns row blocks and sums dQ over keys, the other
// owns tiles of keys and sums dK and dV over the rows of all heads that read them. Each gradient
// has one owner, which adds in a fixed order: no atomics, no partial sums in memory.
#ifndef FLASHATTN_CPU_BACKWARD_H_
#define FLASHATTN_CPU_BACKWARD_H_

#include <cmath>
#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/scores.h"

namespace flashattn::cpu {

template <class V>
typename V::Real read_row_number(const Rows& from, int b, int position, int head) {
  return static_cast<const typename V::Real*>(from.data)[from.offset(b, position, head)];
}

template <class V>
typename V::Real& delta_of_row(const BackwardCall& call, int b, int position, int head) {
  const Problem& problem = call.params.forward.problem;
  const int64_t row = (int64_t{b} * problem.q_heads + head) * problem.q_len + position;
  return static_cast<typename V::Real*>(call.delta)[row];
}

// Query rows with what the gradients need of them.
template <class V>
struct GradientBlock {
  using Real = typename V::Real;

  RowBlock<V> rows;
  Real *q, *dout;                  // [row][q_stride], scaled; [row][v_stride]
  Real *q_columns, *dout_columns;  // [head_dim][width], [value_dim][width]
  Real lse[V::kBlock], delta[V::kBlock];
  bool q_finite, dout_finite;
};

// P and dS of a row block and a tile, [key][row].
template <class V>
struct GradientTile {
  typename V::Real *p, *ds, *softcap_slopes;
};

template <class V>
int64_t gradient_block_size(const Problem& problem) {
  const int64_t natural =
      Scratch<V>::rounded(int64_t{tile_stride<V>(problem.head_dim)} * V::kBlock) +
      Scratch<V>::rounded(int64_t{tile_stride<V>(problem.value_dim)} * V::kBlock);
  return 2 * natural;
}

template <class V>
GradientBlock<V> make_gradient_block(const Problem& problem, Scratch<V>& scratch) {
  GradientBlock<V> block;
  block.q = scratch.take(int64_t{tile_stride<V>(problem.head_dim)} * V::kBlock);
  block.q_columns = scratch.take(int64_t{problem.head_dim} * V::kBlock);
  block.dout = scratch.take(int64_t{tile_stride<V>(problem.value_dim)} * V::kBlock);
  block.dout_columns = scratch.take(int64_t{problem.value_dim} * V::kBlock);
  return block;
}

template <class V>
GradientTile<V> make_gradient_tile(Scratch<V>& scratch) {
  constexpr int kSize = kTileKeys * V::kBlock;
  return {scratch.take(kSize), scratch.take(kSize), scratch.take(kSize)};
}

template <class V>
constexpr int64_t gradient_tile_size() {
  return 3 * Scratch<V>::rounded(kTileKeys * V::kBlock);
}

// A row that sees no key gets the lse that makes every weight 0.
template <class V>
void load_gradient_block(const BackwardCall& call, int b, int kv_head, int64_t first_row, int rows,
                         GradientBlock<V>& block) {
  const BackwardParams& params = call.params;
  const PrefillParams& forward = params.forward;
  const Problem& problem = forward.problem;
  const int q_stride = tile_stride<V>(problem.head_dim);
  const int v_stride = tile_stride<V>(problem.value_dim);
  block.rows = make_row_block<V>(forward, b, kv_head, first_row, rows);
  const int width = block.rows.width;
  load_rows<V>(forward.q, problem.dtype, b, block.rows, problem.head_dim, forward.scores.scale,
               block.q, q_stride);
  load_rows<V>(params.dout, problem.dtype, b, block.rows, problem.value_dim, 1.0, block.dout,
               v_stride);
  block.q_finite = rows_finite<V>(block.q, q_stride, width, problem.head_dim);
  block.dout_finite = rows_finite<V>(block.dout, v_stride, width, problem.value_dim);
  for (int lane = 0; lane < width; ++lane) {
    const int position = block.rows.position[lane], head = block.rows.head[lane];
    block.lse[lane] = V::kInfinity;
    block.delta[lane] = 0;
    if (block.rows.begin[lane] >= block.rows.end[lane]) continue;
    const typename V::Real lse = read_row_number<V>(forward.lse, b, position, head);
    if (lse == -V::kInfinity) continue;
    block.lse[lane] = lse;
    block.delta[lane] = delta_of_row<V>(call, b, position, head);
  }
  transpose<V>(block.q, q_stride, width, problem.head_dim, block.q_columns);
  transpose<V>(block.dout, v_stride, width, problem.value_dim, block.dout_columns);
}

// scores become P, and dP becomes dS before the soft cap. Positions that the row does not see are
// exactly 0 in both, whatever dP holds.
template <class V>
void weigh_gradients(const GradientBlock<V>& block, int keys, typename V::Real* scores,
                     typename V::Real* dp) {
  using Vec = typename V::Vec;
  const int width = block.rows.width;
  for (int x = 0; x < width; x += V::kLanes) {
    const Vec lse = V::load(block.lse + x), delta = V::load(block.delta + x);
    const auto blind = lse == V::kInfinity;
    for (int j = 0; j < keys; ++j) {
      const Vec score = V::load(scores + j * width + x);
      const Vec p = V::exp(score - lse);
      const Vec ds = p * (V::load(dp + j * width + x) - delta);
      const auto hidden = (score == -V::kInfinity) | blind;
      V::store(scores + j * width + x, hidden ? Vec{} : p);
      V::store(dp + j * width + x, hidden ? Vec{} : ds);
    }
  }
}

// dS is the gradient of the scores after the soft cap, which a bias adds to.
template <class V>
void store_bias_gradient(const BackwardParams& params, int b, const RowBlock<V>& rows,
                         const KeyTile<V>& tile, const typename V::Real* ds) {
  const Problem& problem = params.forward.problem;
  for (int lane = 0; lane < rows.rows; ++lane) {
    const int64_t row =
        (int64_t{b} * problem.q_heads + rows.head[lane]) * problem.q_len + rows.position[lane];
    float* to = params.dbias + row * problem.kv_len + tile.begin;
    for (int j = 0; j < tile.count(); ++j) {
      to[j] = static_cast<float>(ds[j * rows.width + lane]);
    }
  }
}

enum class BiasGradient { kSkip, kStore };

template <class V>
void compute_gradient_tile(const BackwardParams& params, int b, const KeyTile<V>& tile,
                           const GradientBlock<V>& block, BiasGradient bias_gradient,
                           const GradientTile<V>& to) {
  const PrefillParams& forward = params.forward;
  const int width = block.rows.width;
  multiply<V>({tile.k, 1, tile.k_stride}, block.q_columns, width, forward.problem.head_dim,
              tile.count(), width, {to.p, width});
  finish_scores<V>(forward, b, block.rows, tile, to.p, to.softcap_slopes);
  multiply<V>({tile.v, 1, tile.v_stride}, block.dout_columns, width, forward.problem.value_dim,
              tile.count(), width, {to.ds, width});
  weigh_gradients<V>(block, tile.count(), to.p, to.ds);
  if (bias_gradient == BiasGradient::kStore) {
    store_bias_gradient<V>(params, b, block.rows, tile, to.ds);
  }
  if (forward.scores.softcap == 0) return;
  for (int i = 0; i < tile.count() * width; i += V::kLanes) {
    // A hidden position stays 0 where its slope is NaN.
    const typename V::Vec ds = V::load(to.ds + i);
    V::store(to.ds + i, ds == 0 ? typename V::Vec{} : ds * V::load(to.softcap_slopes + i));
  }
}

// delta of the rows of one row block. The sum goes over the value dim in the order in which the
// product of dO and V does: where one key has all the weight and O is its V, dP - delta is exactly
// 0.
template <class V>
void delta(const BackwardCall& call, int64_t task) {
  using Real = typename V::Real;
  const PrefillParams& forward = call.params.forward;
  const Problem& problem = forward.problem;
  const int kv_head = static_cast<int>(task % problem.kv_heads);
  task /= problem.kv_heads;
  const int b = static_cast<int>(task % problem.batch);
  const int64_t first_row = task / problem.batch * V::kBlock;
  const int64_t rows = int64_t{problem.q_len} * problem.group();
  const int dim = problem.value_dim, stride = tile_stride<V>(dim);
  const RowBlock<V> block =
      make_row_block<V>(forward, b, kv_head, first_row, min_int(rows - first_row, V::kBlock));

  const int64_t size = Scratch<V>::rounded(int64_t{stride} * V::kBlock);
  Scratch<V> scratch(3 * size);
  Real *buffer = scratch.take(size), *output = scratch.take(size), *dout = scratch.take(size);
  load_rows<V>(forward.o, problem.dtype, b, block, dim, 1.0, buffer, stride);
  transpose<V>(buffer, stride, block.width, dim, output);
  load_rows<V>(call.params.dout, problem.dtype, b, block, dim, 1.0, buffer, stride);
  transpose<V>(buffer, stride, block.width, dim, dout);
  for (int x = 0; x < block.width; x += V::kLanes) {
    typename V::Vec sum = {};
    for (int d = 0; d < dim; ++d) {
      sum += V::load(output + d * block.width + x) * V::load(dout + d * block.width + x);
    }
    V::store(buffer + x, sum);
  }
  const Rows& dlse = call.params.dlse;
  for (int lane = 0; lane < block.rows; ++lane) {
    const int position = block.position[lane], head = block.head[lane];
    delta_of_row<V>(call, b, position, head) =
        buffer[lane] - (dlse.data ? read_row_number<V>(dlse, b, position, head) : 0);
  }
}

// dQ and dbias of some row blocks.

template <class V>
void clear_bias_gradient(const BackwardParams& params, int b, const RowBlock<V>& rows) {
  const Problem& problem = params.forward.problem;
  for (int lane = 0; lane < rows.rows; ++lane) {
    const int64_t row =
        (int64_t{b} * problem.q_heads + rows.head[lane]) * problem.q_len + rows.position[lane];
    for (int64_t j = 0; j < problem.kv_len; ++j) params.dbias[row * problem.kv_len + j] = 0;
  }
}

// dq: [head_dim][width].
template <class V>
void store_query_gradient(const BackwardParams& params, int b, const GradientBlock<V>& block,
                          const typename V::Real* dq, typename V::Real* buffer) {
  const Problem& problem = params.forward.problem;
  const auto scale = static_cast<typename V::Real>(params.forward.scores.scale);
  for (int lane = 0; lane < block.rows.rows; ++lane) {
    gather_lane<V>(dq, block.rows.width, lane, problem.head_dim, buffer);
    for (int d = 0; d < problem.head_dim; ++d) buffer[d] *= scale;
    Convert<V>::store_row(params.dq.data, buffer, problem.dtype,
                          params.dq.offset(b, block.rows.position[lane], block.rows.head[lane]),
                          problem.head_dim);
  }
}

template <class V>
void query_gradient(const BackwardCall& call, int64_t task) {
  const BackwardParams& params = call.params;
  const PrefillParams& forward = params.forward;
  const Problem& problem = forward.problem;
  const int kv_head = static_cast<int>(task % problem.kv_heads);
  task /= problem.kv_heads;
  const int b = static_cast<int>(task % problem.batch);
  const int64_t row_task = call.row_tasks - 1 - task / problem.batch;  // long tasks first
  const int64_t rows = int64_t{problem.q_len} * problem.group();
  const int64_t dq_size = int64_t{problem.head_dim} * V::kBlock;
  const int blocks =
      min_int(call.blocks_per_task,
              (rows - row_task * call.blocks_per_task * V::kBlock + V::kBlock - 1) / V::kBlock);
  Scratch<V> scratch(tile_size<V>(problem) + gradient_tile_size<V>() +
                     blocks * (gradient_block_size<V>(problem) + Scratch<V>::rounded(dq_size)));
  KeyTile<V> tile = make_tile<V>(problem, scratch);
  const GradientTile<V> gradients = make_gradient_tile<V>(scratch);
  GradientBlock<V> block[kMaxBlocks];
  typename V::Real* dq[kMaxBlocks];
  KeyRange keys = {kUnlimited, 0};
  for (int i = 0; i < blocks; ++i) {
    const int64_t first_row = (row_task * call.blocks_per_task + i) * V::kBlock;
    block[i] = make_gradient_block<V>(problem, scratch);
    load_gradient_block<V>(call, b, kv_head, first_row, min_int(rows - first_row, V::kBlock),
                           block[i]);
    if (params.dbias) clear_bias_gradient<V>(params, b, block[i].rows);
    dq[i] = scratch.take_zeros(dq_size);
    keys.begin = min_int(keys.begin, block[i].rows.first_key);
    keys.end = max_int(keys.end, block[i].rows.last_key);
  }
  const BiasGradient bias_gradient = params.dbias ? BiasGradient::kStore : BiasGradient::kSkip;
  keys.begin -= keys.begin % kTileKeys;
  for (int begin = keys.begin; begin < keys.end; begin += kTileKeys) {
    const int end = min_int(begin + kTileKeys, keys.end);
    bool loaded = false;
    for (int i = 0; i < blocks; ++i) {
      if (is_hidden<V>(forward.features, b, block[i].rows, begin, end)) continue;
      if (!loaded) load_tile<V>(problem, call.key_values, b, kv_head, begin, end, tile);
      loaded = true;
      compute_gradient_tile<V>(params, b, tile, block[i], bias_gradient, gradients);
      const int width = block[i].rows.width;
      multiply_weighted<V>(tile.k_finite, Weights::kB, {tile.k, tile.k_stride, 1}, gradients.ds,
                           width, tile.count(), problem.head_dim, width,
                           {dq[i], width, Result<typename V::Real>::kAdd});
    }
  }
  for (int i = 0; i < blocks; ++i) {
    store_query_gradient<V>(params, b, block[i], dq[i], block[i].q);
  }
}

// dK and dV of some tiles of keys.

// The query positions that can see any of the keys.
template <class V>
KeyRange visible_queries(const Scores& scores, KeyRange keys, int q_len, int kv_len) {
  const int64_t shift = scores.bottom_right ? kv_len - q_len : 0;
  return {
      scores.window_right == kUnlimited ? 0 : max_int(0, keys.begin - shift - scores.window_right),
      scores.window_left == kUnlimited ? q_len
                                       : min_int(q_len, keys.end - shift + scores.window_left)};
}

template <class V>
struct KeyGradients {
  KeyTile<V> tile;
  typename V::Real *dk, *dv;  // [key][stride of the tile]
};

template <class V>
void add_key_value_gradients(const Problem& problem, const GradientBlock<V>& block,
                             const GradientTile<V>& gradients, const KeyGradients<V>& to) {
  using Sum = Result<typename V::Real>;
  const int width = block.rows.width, keys = to.tile.count();
  multiply_weighted<V>(block.dout_finite, Weights::kA, {gradients.p, 1, width}, block.dout,
                       to.tile.v_stride, width, keys, V::whole_vectors(problem.value_dim),
                       Sum{to.dv, to.tile.v_stride, Sum::kAdd});
  multiply_weighted<V>(block.q_finite, Weights::kA, {gradients.ds, 1, width}, block.q,
                       to.tile.k_stride, width, keys, V::whole_vectors(problem.head_dim),
                       Sum{to.dk, to.tile.k_stride, Sum::kAdd});
}

template <class V>
void store_key_gradients(const BackwardParams& params, int b, int kv_head, int begin, int end,
                         const KeyGradients<V>& from) {
  const Problem& problem = params.forward.problem;
  for (int j = begin; j < end; ++j) {
    const int64_t row = j - begin;
    Convert<V>::store_row(params.dk.data, from.dk + row * from.tile.k_stride, problem.dtype,
                          params.dk.offset(b, j, kv_head), problem.head_dim);
    Convert<V>::store_row(params.dv.data, from.dv + row * from.tile.v_stride, problem.dtype,
                          params.dv.offset(b, j, kv_head), problem.value_dim);
  }
}

template <class V>
void key_value_gradients(const BackwardCall& call, int64_t task) {
  const BackwardParams& params = call.params;
  const PrefillParams& forward = params.forward;
  const Problem& problem = forward.problem;
  const int kv_head = static_cast<int>(task % problem.kv_heads);
  task /= problem.kv_heads;
  const int b = static_cast<int>(task % problem.batch);
  const int64_t key_task = task / problem.batch;  // early keys first: most rows see those
  const int first_key = static_cast<int>(key_task * call.tiles_per_task * kTileKeys);
  const int last_key = min_int(first_key + call.tiles_per_task * kTileKeys, problem.kv_len);
  const int tiles = (last_key - first_key + kTileKeys - 1) / kTileKeys;
  const int q_len = forward.q_length(b), kv_len = forward.kv_length(b);

  Scratch<V> scratch(2 * tiles * tile_size<V>(problem) + gradient_tile_size<V>() +
                     gradient_block_size<V>(problem));
  const GradientTile<V> gradients = make_gradient_tile<V>(scratch);
  GradientBlock<V> block = make_gradient_block<V>(problem, scratch);
  KeyGradients<V> keys[kMaxTiles];
  for (int i = 0; i < tiles; ++i) {
    const int begin = min_int(first_key + i * kTileKeys, kv_len);
    keys[i].tile = make_tile<V>(problem, scratch);
    keys[i].dk = scratch.take_zeros(int64_t{kTileKeys} * keys[i].tile.k_stride);
    keys[i].dv = scratch.take_zeros(int64_t{kTileKeys} * keys[i].tile.v_stride);
    load_tile<V>(problem, call.key_values, b, kv_head, begin, min_int(begin + kTileKeys, kv_len),
                 keys[i].tile);
  }
  const KeyRange positions =
      visible_queries<V>(forward.scores, {first_key, min_int(last_key, kv_len)}, q_len, kv_len);
  const int64_t last_row = first_key < kv_len ? int64_t{positions.end} * problem.group() : 0;
  for (int64_t row = int64_t{positions.begin} * problem.group(); row < last_row; row += V::kBlock) {
    load_gradient_block<V>(call, b, kv_head, row, min_int(last_row - row, V::kBlock), block);
    for (int i = 0; i < tiles; ++i) {
      const KeyTile<V>& tile = keys[i].tile;
      if (is_hidden<V>(forward.features, b, block.rows, tile.begin, tile.end)) continue;
      compute_gradient_tile<V>(params, b, tile, block, BiasGradient::kSkip, gradients);
      add_key_value_gradients<V>(problem, block, gradients, keys[i]);
    }
  }
  for (int i = 0; i < tiles; ++i) {
    const int begin = first_key + i * kTileKeys;
    store_key_gradients<V>(params, b, kv_head, begin, min_int(begin + kTileKeys, problem.kv_len),
                           keys[i]);
  }
}

// A sink takes weight exp(sink - lse) away from the keys of every row.
template <class V>
void sink_gradient(const BackwardCall& call, int64_t task) {
  const PrefillParams& forward = call.params.forward;
  const int b = static_cast<int>(task / forward.problem.q_heads);
  const int head = static_cast<int>(task % forward.problem.q_heads);
  const auto sink = static_cast<typename V::Real>(forward.features.sinks.row(b)[head]);
  double sum = 0;
  for (int position = 0; position < forward.q_length(b); ++position) {
    const typename V::Real lse = read_row_number<V>(forward.lse, b, position, head);
    if (lse == -V::kInfinity) continue;
    const double weight = std::exp(static_cast<double>(sink - lse));
    sum -= weight * delta_of_row<V>(call, b, position, head);
  }
  call.params.dsinks[task] = static_cast<float>(sum);
}

}  // namespace flashattn::cpu

#endif  // FLASHATTN_CPU_BACKWARD_H_
