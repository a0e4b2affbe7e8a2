// Prefill and decode: a task takes some row blocks through their visible keys, tile by tile, with
// an online softmax, and writes the output, or a partial result when the keys are split over tasks.
#ifndef FLASHATTN_CPU_FORWARD_H_
#define FLASHATTN_CPU_FORWARD_H_

#include <cmath>
#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/scores.h"

namespace flashattn::cpu {

// What a row block carries from tile to tile. A few rows, as in decode, would leave most lanes of
// the vectors empty: then the vectors of queries and output run along the head dim instead.
template <class V>
struct BlockState {
  using Real = typename V::Real;

  RowBlock<V> rows;
  bool few;
  Real* queries;  // [head_dim][width], few: [row][tile's k_stride]
  // Weighted values of the latest tiles and of those before them, [value_dim][width], few:
  // [row][tile's v_stride]; with the largest score and the sum of exp(score - maximum).
  struct Sums {
    Real* output;
    Real maximum[V::kBlock], sum[V::kBlock];
  } latest, settled;
};

// Tiles that are summed before they join the rest: a sum over a million keys is then one of some
// hundred terms, each of them a sum of as many, and rounds as little.
constexpr int kLatestTiles = 64;

struct ForwardTask {
  int b, kv_head, split, blocks;
  int64_t first_row, last_row;
};

// Late rows first: under a causal mask those are the long tasks.
template <class V>
ForwardTask find_forward_task(const ForwardCall& call, int64_t task) {
  const Problem& problem = call.params.problem;
  ForwardTask found;
  found.split = static_cast<int>(task % call.splits);
  task /= call.splits;
  found.kv_head = static_cast<int>(task % problem.kv_heads);
  task /= problem.kv_heads;
  found.b = static_cast<int>(task % problem.batch);
  const int64_t row_task = call.row_tasks - 1 - task / problem.batch;
  const int64_t task_rows = int64_t{call.blocks_per_task} * V::kBlock;
  const int64_t rows = int64_t{problem.q_len} * problem.group();
  found.first_row = row_task * task_rows;
  found.last_row = found.first_row + task_rows < rows ? found.first_row + task_rows : rows;
  found.blocks = static_cast<int>((found.last_row - found.first_row + V::kBlock - 1) / V::kBlock);
  return found;
}

// A sink is the state after a key that has this score and no value.
template <class V>
void start_block(const ForwardCall& call, const ForwardTask& task, int64_t first_row,
                 Scratch<V>& scratch, typename V::Real* buffer, BlockState<V>& block) {
  using Real = typename V::Real;
  const PrefillParams& params = call.params;
  const Problem& problem = params.problem;
  const int64_t left = task.last_row - first_row;
  block.rows = make_row_block<V>(params, task.b, task.kv_head, first_row, min_int(left, V::kBlock));
  block.few = block.rows.rows <= V::kLanes / 2;
  const int k_stride = tile_stride<V>(problem.head_dim);
  block.queries = scratch.take(int64_t{k_stride} * V::kBlock);
  const int64_t outputs = int64_t{tile_stride<V>(problem.value_dim)} * V::kBlock;
  block.latest.output = scratch.take_zeros(outputs);
  block.settled.output = scratch.take_zeros(outputs);
  load_rows<V>(params.q, problem.dtype, task.b, block.rows, problem.head_dim, params.scores.scale,
               block.few ? block.queries : buffer, k_stride);
  if (!block.few) {
    transpose<V>(buffer, k_stride, block.rows.width, problem.head_dim, block.queries);
  }
  for (int lane = 0; lane < block.rows.width; ++lane) {
    Real sink = -V::kInfinity;
    if (params.features.sinks && task.split == 0 && is_present(params, task.b, block.rows, lane)) {
      sink = params.features.sinks.row(task.b)[block.rows.head[lane]];
    }
    block.settled.maximum[lane] = sink;
    block.settled.sum[lane] = sink == -V::kInfinity ? 0 : 1;
    block.latest.maximum[lane] = -V::kInfinity;
    block.latest.sum[lane] = 0;
  }
}

// Moves the latest sums to the settled ones. Moving nothing changes no bit, so that it does not
// matter which tiles were skipped.
template <class V>
void settle(const Problem& problem, BlockState<V>& block) {
  using Vec = typename V::Vec;
  auto &latest = block.latest, &settled = block.settled;
  const int width = block.rows.width;
  typename V::Real kept[V::kBlock], joined[V::kBlock];
  for (int x = 0; x < width; x += V::kLanes) {
    const Vec before = V::load(settled.maximum + x), now = V::load(latest.maximum + x);
    const Vec maximum = V::max(before, now);
    const Vec origin = maximum == -V::kInfinity ? Vec{} : maximum;
    V::store(kept + x, V::exp(before - origin));
    V::store(joined + x, V::exp(now - origin));
    V::store(settled.sum + x, V::load(settled.sum + x) * V::load(kept + x) +
                                  V::load(latest.sum + x) * V::load(joined + x));
    V::store(latest.sum + x, Vec{});
    V::store(settled.maximum + x, maximum);
    V::store(latest.maximum + x, V::broadcast(-V::kInfinity));
  }
  const int rows = block.few ? block.rows.rows : problem.value_dim;
  const int columns = block.few ? tile_stride<V>(problem.value_dim) : width;
  for (int row = 0; row < rows; ++row) {
    for (int x = 0; x < columns; x += V::kLanes) {
      const int i = row * columns + x;
      const Vec keep = block.few ? V::broadcast(kept[row]) : V::load(kept + x);
      const Vec join = block.few ? V::broadcast(joined[row]) : V::load(joined + x);
      V::store(settled.output + i,
               V::load(settled.output + i) * keep + V::load(latest.output + i) * join);
      V::store(latest.output + i, Vec{});
    }
  }
}

// Turns scores into weights relative to the new maximum; factors bring what was summed so far
// there.
//
// The sum goes over the keys in the order and the panels of the product with V, so that both round
// alike and a constant V comes out as it went in.
template <class V>
void online_softmax(int keys, int width, typename V::Real* scores, typename V::Real* maximum,
                    typename V::Real* sum, typename V::Real* factors) {
  using Vec = typename V::Vec;
  for (int x = 0; x < width; x += V::kLanes) {
    typename V::Real* s = scores + x;
    const Vec old_maximum = V::load(maximum + x);
    Vec even = old_maximum, odd = old_maximum;
    int j = 0;
    for (; j + 2 <= keys; j += 2) {
      even = V::max(V::load(s + j * width), even);
      odd = V::max(V::load(s + (j + 1) * width), odd);
    }
    if (j < keys) even = V::max(V::load(s + j * width), even);
    const Vec new_maximum = V::max(even, odd);
    // Rows that have seen no key yet: exp(-infinity - 0) = 0.
    const Vec origin = new_maximum == -V::kInfinity ? Vec{} : new_maximum;
    const Vec factor = V::exp(old_maximum - origin);
    Vec total = V::load(sum + x);
    for (int first = 0; first < keys; first += kPanel) {
      Vec panel = {};
      for (j = first; j < min_int(first + kPanel, keys); ++j) {
        const Vec weight = V::exp(V::load(s + j * width) - origin);
        panel += weight;
        V::store(s + j * width, weight);
      }
      total = first == 0 ? total * factor + panel : total + panel;
    }
    V::store(factors + x, factor);
    V::store(sum + x, total);
    V::store(maximum + x, new_maximum);
  }
}

template <class V>
void attend(const PrefillParams& params, int b, const KeyTile<V>& tile, typename V::Real* scores,
            BlockState<V>& block) {
  using Sum = Result<typename V::Real>;
  const Problem& problem = params.problem;
  const int rows = block.rows.rows, width = block.rows.width, keys = tile.count();
  typename V::Real factors[V::kBlock];
  if (block.few) {
    multiply_few<V>(tile.k, tile.k_stride, block.queries, tile.k_stride, problem.head_dim, keys,
                    rows, scores, width);
  } else {
    multiply<V>({tile.k, 1, tile.k_stride}, block.queries, width, problem.head_dim, keys, width,
                {scores, width});
  }
  finish_scores<V>(params, b, block.rows, tile, scores);
  online_softmax<V>(keys, width, scores, block.latest.maximum, block.latest.sum, factors);
  if (block.few) {
    multiply_weighted<V>(tile.v_finite, Weights::kA, {scores, width, 1}, tile.v, tile.v_stride,
                         keys, rows, V::whole_vectors(problem.value_dim),
                         {block.latest.output, tile.v_stride, Sum::kRescaleRows, factors});
  } else {
    multiply_weighted<V>(tile.v_finite, Weights::kB, {tile.v, tile.v_stride, 1}, scores, width,
                         keys, problem.value_dim, width,
                         {block.latest.output, width, Sum::kRescaleColumns, factors});
  }
}

// The keys of the task: its split of what the sequence sees, as far as its own rows see them. Tiles
// start at multiples of their size and splits are cut for the sequence as a whole, so that a row's
// result does not depend on what else the task does.
template <class V>
KeyRange task_keys(const ForwardCall& call, const ForwardTask& task, const BlockState<V>* blocks) {
  const PrefillParams& params = call.params;
  const int q_len = params.q_length(task.b), kv_len = params.kv_length(task.b);
  const int first = visible_keys(params.scores, 0, q_len, kv_len).begin / kTileKeys * kTileKeys;
  const int last = visible_keys(params.scores, q_len - 1, q_len, kv_len).end;
  const int64_t tiles = (last - first + kTileKeys - 1) / kTileKeys;
  const int64_t split_keys = call.keys_per_split
                                 ? call.keys_per_split
                                 : (tiles + call.splits - 1) / call.splits * kTileKeys;
  KeyRange own = {kUnlimited, 0};
  for (int i = 0; i < task.blocks; ++i) {
    own.begin = min_int(own.begin, blocks[i].rows.first_key);
    own.end = max_int(own.end, blocks[i].rows.last_key);
  }
  const int64_t begin = first + task.split * split_keys;
  return {max_int(begin, own.begin / kTileKeys * kTileKeys), min_int(begin + split_keys, own.end)};
}

// One row of the result: output / sum, and the logarithm of the sum of exp(score).
template <class V>
void write_row(const PrefillParams& params, int b, int position, int head, typename V::Real* output,
               typename V::Real maximum, typename V::Real sum) {
  using Real = typename V::Real;
  const int dim = params.problem.value_dim;
  const bool empty = sum == 0;
  for (int d = 0; d < dim; ++d) output[d] = empty ? 0 : output[d] / sum;
  Convert<V>::store_row(params.o.data, output, params.problem.dtype,
                        params.o.offset(b, position, head), dim);
  if (params.lse.data == nullptr) return;
  static_cast<Real*>(params.lse.data)[params.lse.offset(b, position, head)] =
      empty ? -V::kInfinity : maximum + static_cast<Real>(std::log(sum));
}

template <class V>
void write_block(const ForwardCall& call, const ForwardTask& task, int64_t first_row,
                 typename V::Real* buffer, const BlockState<V>& block) {
  const Problem& problem = call.params.problem;
  const int dim = problem.value_dim;
  const int64_t rows = int64_t{problem.q_len} * problem.group();
  for (int lane = 0; lane < block.rows.rows; ++lane) {
    if (block.few) {
      gather_lane<V>(block.settled.output + int64_t{lane} * tile_stride<V>(dim), 1, 0, dim, buffer);
    } else {
      gather_lane<V>(block.settled.output, block.rows.width, lane, dim, buffer);
    }
    if (!call.partials) {
      write_row<V>(call.params, task.b, block.rows.position[lane], block.rows.head[lane], buffer,
                   block.settled.maximum[lane], block.settled.sum[lane]);
      continue;
    }
    const int64_t row =
        (int64_t{task.b} * problem.kv_heads + task.kv_head) * rows + first_row + lane;
    auto* partial = static_cast<typename V::Real*>(call.partials) +
                    (row * call.splits + task.split) * (dim + 2);
    for (int d = 0; d < dim; ++d) partial[d] = buffer[d];
    partial[dim] = block.settled.maximum[lane];
    partial[dim + 1] = block.settled.sum[lane];
  }
}

template <class V>
int64_t forward_scratch(const Problem& problem, int blocks) {
  const int64_t row_numbers =
      Scratch<V>::rounded(int64_t{tile_stride<V>(problem.head_dim)} * V::kBlock) +
      2 * Scratch<V>::rounded(int64_t{tile_stride<V>(problem.value_dim)} * V::kBlock);
  const int64_t buffer =
      V::kBlock * (int64_t{tile_stride<V>(problem.head_dim)} + problem.value_dim);
  return tile_size<V>(problem) + blocks * row_numbers + Scratch<V>::rounded(buffer) +
         Scratch<V>::rounded(kTileKeys * V::kBlock);
}

template <class V>
void forward(const ForwardCall& call, int64_t task_index) {
  const Problem& problem = call.params.problem;
  const ForwardTask task = find_forward_task<V>(call, task_index);
  Scratch<V> scratch(forward_scratch<V>(problem, task.blocks));
  KeyTile<V> tile = make_tile<V>(problem, scratch);
  typename V::Real* scores = scratch.take(kTileKeys * V::kBlock);
  typename V::Real* buffer =
      scratch.take(V::kBlock * (int64_t{tile_stride<V>(problem.head_dim)} + problem.value_dim));

  BlockState<V> blocks[kMaxBlocks];
  for (int i = 0; i < task.blocks; ++i) {
    start_block<V>(call, task, task.first_row + i * V::kBlock, scratch, buffer, blocks[i]);
  }
  const KeyRange keys = task_keys<V>(call, task, blocks);
  for (int begin = keys.begin; begin < keys.end; begin += kTileKeys) {
    const int end = min_int(begin + kTileKeys, keys.end);
    if (begin > keys.begin && begin / kTileKeys % kLatestTiles == 0) {
      for (int i = 0; i < task.blocks; ++i) settle<V>(problem, blocks[i]);
    }
    bool loaded = false;
    for (int i = 0; i < task.blocks; ++i) {
      if (is_hidden<V>(call.params.features, task.b, blocks[i].rows, begin, end)) continue;
      if (!loaded) load_tile<V>(problem, call.key_values, task.b, task.kv_head, begin, end, tile);
      loaded = true;
      attend<V>(call.params, task.b, tile, scores, blocks[i]);
    }
  }
  for (int i = 0; i < task.blocks; ++i) {
    settle<V>(problem, blocks[i]);
    write_block<V>(call, task, task.first_row + i * V::kBlock, buffer, blocks[i]);
  }
}

// The partial results of one row in the order of the keys: bitwise the same whoever computed them.
template <class V>
void combine_row(const ForwardCall& call, const typename V::Real* partials, int b, int position,
                 int head, typename V::Real* output) {
  using Real = typename V::Real;
  const int dim = call.params.problem.value_dim;
  Real maximum = -V::kInfinity, sum = 0;
  for (int split = 0; split < call.splits; ++split) {
    const Real candidate = partials[int64_t{split} * (dim + 2) + dim];
    maximum = candidate > maximum ? candidate : maximum;
  }
  for (int d = 0; d < dim; ++d) output[d] = 0;
  for (int split = 0; split < call.splits; ++split) {
    const Real* partial = partials + int64_t{split} * (dim + 2);
    if (partial[dim + 1] == 0) continue;  // saw no key
    const Real weight = static_cast<Real>(std::exp(partial[dim] - maximum));
    for (int d = 0; d < dim; ++d) output[d] += weight * partial[d];
    sum += weight * partial[dim + 1];
  }
  write_row<V>(call.params, b, position, head, output, maximum, sum);
}

template <class V>
void combine(const ForwardCall& call, int64_t task) {
  const Problem& problem = call.params.problem;
  const int group = problem.group();
  const int b = static_cast<int>(task / problem.kv_heads);
  const int kv_head = static_cast<int>(task % problem.kv_heads);
  const int64_t rows = int64_t{problem.q_len} * group;
  const int64_t row_size = int64_t{call.splits} * (problem.value_dim + 2);
  const auto* partials =
      static_cast<const typename V::Real*>(call.partials) + task * rows * row_size;
  Scratch<V> scratch(Scratch<V>::rounded(problem.value_dim));
  typename V::Real* output = scratch.take(problem.value_dim);
  for (int64_t row = 0; row < rows; ++row) {
    combine_row<V>(call, partials + row * row_size, b, static_cast<int>(row / group),
                   kv_head * group + static_cast<int>(row % group), output);
  }
}

}  // namespace flashattn::cpu

#endif  // FLASHATTN_CPU_FORWARD_H_
