#include "cpu/attention.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>

#include "cpu/kernels.h"

namespace flashattn::cpu {
namespace {

std::vector<const InstructionSet*> supported() {
  std::vector<const InstructionSet*> sets;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    sets.push_back(&kAvx512);
  }
  if (avx2) sets.push_back(&kAvx2);
#endif
  sets.push_back(&kGeneric);
  return sets;
}

std::atomic<const InstructionSet*>& chosen() {
  static std::atomic<const InstructionSet*> instruction_set = supported().front();
  return instruction_set;
}

const Kernels& kernels_for(const Problem& problem) {
  const InstructionSet& instruction_set = *chosen().load();
  return problem.dtype == DType::kF64 ? instruction_set.float64 : instruction_set.float32;
}

// Weights far below a row's largest are subnormal, and arithmetic on those takes a hundred times as
// long. Threads also come with different settings, which would make bits depend on who did a task.
class FlushSubnormals {
 public:
  FlushSubnormals() : saved_(read()) { write(saved_ | kFlush); }
  ~FlushSubnormals() { write(saved_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
#if defined(__x86_64__)
  using Control = uint32_t;
  static constexpr Control kFlush = 0x8040;  // results and operands
  static Control read() { return __builtin_ia32_stmxcsr(); }
  static void write(Control control) { __builtin_ia32_ldmxcsr(control); }
#elif defined(__aarch64__)
  using Control = uint64_t;
  static constexpr Control kFlush = Control{1} << 24;
  static Control read() {
    Control control;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    return control;
  }
  static void write(Control control) { asm volatile("msr fpcr, %0" : : "r"(control)); }
#else
  using Control = uint32_t;
  static constexpr Control kFlush = 0;
  static Control read() { return 0; }
  static void write(Control) {}
#endif
  Control saved_;
};

template <class Call>
void run_tasks(const ParallelFor& parallel_for, int64_t tasks, void (*kernel)(const Call&, int64_t),
               const Call& call) {
  if (tasks <= 0) return;
  parallel_for(tasks, [&](int64_t task) {
    const FlushSubnormals scope;
    kernel(call, task);
  });
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Enough tasks that threads of unequal speed finish together.
int64_t wanted_tasks() {
  return 4 * static_cast<int64_t>(std::max(1u, std::thread::hardware_concurrency()));
}

// How many of `units` a task takes, at most `limit`, so that there are enough tasks: those of
// `others` sequences and heads times what the units give.
int units_per_task(int64_t units, int64_t others, int64_t limit) {
  const int64_t per_task = divide_up(units * others, wanted_tasks());
  return static_cast<int>(std::clamp<int64_t>(per_task, 1, limit));
}

bool is_empty(const Problem& problem) {
  return problem.batch <= 0 || problem.q_heads <= 0 || problem.kv_heads <= 0;
}

// Wide heads leave less of the cache to each block.
int largest_task(const Problem& problem, int limit) {
  constexpr int kNumbersPerUnit = 1024;
  const int wide = std::max(1, problem.head_dim + problem.value_dim);
  return std::clamp(kNumbersPerUnit / wide, 1, limit);
}

KeyValues contiguous(const PrefillParams& params) {
  return {params.k, params.v, params.problem.dtype, {}, 0, 0, {}, {}};
}

std::unique_ptr<char[]> make_buffer(const Problem& problem, int64_t numbers) {
  const int64_t width = problem.dtype == DType::kF64 ? sizeof(double) : sizeof(float);
  return std::unique_ptr<char[]>(new char[numbers * width]);
}

void run_forward(ForwardCall& call, const ParallelFor& parallel_for) {
  const Problem& problem = call.params.problem;
  if (is_empty(problem)) return;
  const Kernels& kernels = kernels_for(problem);
  const int64_t sequences = int64_t{problem.batch} * problem.kv_heads;
  const int64_t blocks = divide_up(int64_t{problem.q_len} * problem.group(), kernels.block_rows);
  call.blocks_per_task =
      units_per_task(blocks, sequences * call.splits, largest_task(problem, kMaxBlocks));
  call.row_tasks = divide_up(blocks, call.blocks_per_task);
  run_tasks(parallel_for, call.tasks(), kernels.forward, call);
}

// Keys of a chunk in a batch-invariant call: a constant, so that the cuts depend on nothing else.
constexpr int kInvariantChunk = 10 * kTileKeys;

int longest_sequence(const DecodeParams& params) {
  int longest = 0;
  for (int b = 0; b < params.problem.batch; ++b) longest = std::max(longest, params.length(b));
  return longest;
}

// Cuts the keys where there are fewer sequences and heads than threads, not below a few tiles each.
int choose_splits(const DecodeParams& params) {
  constexpr int kFewestTiles = 4;
  const Problem& problem = params.problem;
  const int64_t sequences = int64_t{problem.batch} * problem.kv_heads;
  const int64_t most = longest_sequence(params) / (kFewestTiles * kTileKeys);
  return static_cast<int>(std::clamp<int64_t>(wanted_tasks() / std::max<int64_t>(1, sequences), 1,
                                              std::max<int64_t>(1, most)));
}

void set_splits(const DecodeParams& params, ForwardCall& call) {
  if (params.batch_invariant) {
    call.keys_per_split = kInvariantChunk;
    const int64_t chunks = divide_up(longest_sequence(params), kInvariantChunk);
    call.splits = static_cast<int>(std::max<int64_t>(1, chunks));
  } else {
    const int64_t tiles = std::max<int64_t>(1, divide_up(params.problem.kv_len, kTileKeys));
    call.splits = params.num_splits > 0 ? min_int(params.num_splits, tiles) : choose_splits(params);
  }
}

}  // namespace

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const InstructionSet* set : supported()) names.push_back(set->name);
  return names;
}

std::string instruction_set() { return chosen().load()->name; }

bool set_instruction_set(std::string_view name) {
  for (const InstructionSet* set : supported()) {
    if (name != set->name) continue;
    chosen() = set;
    return true;
  }
  return false;
}

void prefill(const PrefillParams& params, const ParallelFor& parallel_for) {
  ForwardCall call;
  call.params = params;
  call.key_values = contiguous(params);
  run_forward(call, parallel_for);
}

void decode(const DecodeParams& params, const ParallelFor& parallel_for) {
  const Problem& problem = params.problem;
  if (is_empty(problem)) return;
  ForwardCall call;
  call.params.problem = problem;
  call.params.scores = params.scores;
  call.params.features.sinks = params.sinks;
  call.params.key_lengths = params.seq_lens;
  call.params.q = params.q;
  call.params.o = params.o;
  call.params.lse = params.lse;
  call.key_values = {params.k,         params.v,         params.cache_dtype, params.page_table,
                     params.page_size, params.num_pages, params.key_scale,   params.value_scale};
  set_splits(params, call);
  if (call.splits == 1) return run_forward(call, parallel_for);

  const int64_t rows = int64_t{problem.batch} * problem.q_len * problem.q_heads;
  const int64_t numbers = rows * call.splits * (problem.value_dim + 2);
  const std::unique_ptr<char[]> partials = make_buffer(problem, numbers);
  call.partials = partials.get();
  run_forward(call, parallel_for);
  run_tasks(parallel_for, int64_t{problem.batch} * problem.kv_heads, kernels_for(problem).combine,
            call);
}

void backward(const BackwardParams& params, const ParallelFor& parallel_for) {
  const Problem& problem = params.forward.problem;
  if (is_empty(problem)) return;
  const Kernels& kernels = kernels_for(problem);
  BackwardCall call;
  call.params = params;
  call.key_values = contiguous(params.forward);

  const int64_t sequences = int64_t{problem.batch} * problem.kv_heads;
  const int64_t blocks = divide_up(int64_t{problem.q_len} * problem.group(), kernels.block_rows);
  const int64_t tiles = divide_up(problem.kv_len, kTileKeys);
  call.blocks_per_task = units_per_task(blocks, sequences, largest_task(problem, kMaxBlocks / 2));
  call.tiles_per_task = units_per_task(tiles, sequences, largest_task(problem, kMaxTiles));
  call.row_tasks = divide_up(blocks, call.blocks_per_task);
  call.key_tasks = divide_up(tiles, call.tiles_per_task);

  const int64_t rows = int64_t{problem.batch} * problem.q_len * problem.q_heads;
  const std::unique_ptr<char[]> delta = make_buffer(problem, rows);
  call.delta = delta.get();
  run_tasks(parallel_for, blocks * sequences, kernels.delta, call);

  run_tasks(parallel_for, call.key_tasks * sequences, kernels.key_value_gradients, call);
  run_tasks(parallel_for, call.row_tasks * sequences, kernels.query_gradient, call);
  if (params.dsinks) {
    run_tasks(parallel_for, int64_t{problem.batch} * problem.q_heads, kernels.sink_gradient, call);
  }
}

}  // namespace flashattn::cpu
