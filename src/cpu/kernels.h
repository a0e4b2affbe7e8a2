// What the dispatcher (attention.cc) and the kernels of each instruction set say to each other.
//
// A call is a set of independent tasks. A kernel does one task, from start to end, on one thread;
// the dispatcher decides how large tasks are and in what order they start.
#ifndef FLASHATTN_CPU_KERNELS_H_
#define FLASHATTN_CPU_KERNELS_H_

#include <cstdint>

#include "params.h"

namespace flashattn::cpu {

// Keys of a tile, the unit of the online softmax. A multiple of every register block.
constexpr int kTileKeys = 96;
// Row blocks that a task may take through the tiles together, so that loading a tile is shared.
constexpr int kMaxBlocks = 8;
// Tiles whose gradients a task may hold.
constexpr int kMaxTiles = 4;

// The cache that decode reads. For prefill and backward it is their k and v.
struct KeyValues {
  Strided k, v;
  DType dtype;
  Table<const int32_t> page_table;
  int page_size = 0, num_pages = 0;
  Table<const float> key_scale, value_scale;
};

// Prefill and decode. The T query rows of the G heads that share a key/value head are G * T rows in
// one sequence, position by position; a task is some row blocks of it over one range of its keys.
struct ForwardCall {
  PrefillParams params;  // k and v are in key_values
  KeyValues key_values;
  int blocks_per_task = 1;
  int64_t row_tasks = 0;  // tasks that share out the rows of one sequence and key/value head

  // Split keys: partial results of (batch, kv head, row, split), each value_dim + 2 numbers: output
  // not yet divided by the sum, maximum, sum. Either a number of equal ranges, or ranges of fixed
  // size.
  int splits = 1;
  int keys_per_split = 0;  // 0: the visible keys divided by splits
  void* partials = nullptr;

  int64_t tasks() const {
    return row_tasks * splits * params.problem.kv_heads * params.problem.batch;
  }
};

struct BackwardCall {
  BackwardParams params;
  KeyValues key_values;
  int blocks_per_task = 1;  // of the gradient of the query
  int tiles_per_task = 1;   // of the gradients of key and value
  int64_t row_tasks = 0, key_tasks = 0;
  void* delta = nullptr;  // (B, N, T), filled by the kernel of that name
};

// The kernels of one instruction set and one type to compute in.
struct Kernels {
  int block_rows;
  void (*forward)(const ForwardCall&, int64_t task);
  void (*combine)(const ForwardCall&, int64_t task);  // task: (batch, kv head)
  void (*delta)(const BackwardCall&, int64_t task);
  void (*query_gradient)(const BackwardCall&, int64_t task);
  void (*key_value_gradients)(const BackwardCall&, int64_t task);
  void (*sink_gradient)(const BackwardCall&, int64_t task);  // task: (batch, query head)
};

struct InstructionSet {
  const char* name;
  Kernels float32, float64;
};

extern const InstructionSet kGeneric, kAvx2, kAvx512;

}  // namespace flashattn::cpu

#endif  // FLASHATTN_CPU_KERNELS_H_
