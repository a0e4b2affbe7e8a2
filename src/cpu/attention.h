// Attention on the CPU: multi-threaded, vectorised, in O(T) memory.
#ifndef FLASHATTN_CPU_ATTENTION_H_
#define FLASHATTN_CPU_ATTENTION_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "params.h"

namespace flashattn::cpu {

// Runs task(i) for every i in [0, n), on any threads and in any order; returns when all are done.
using ParallelFor = std::function<void(int64_t n, const std::function<void(int64_t)>& task)>;

void prefill(const PrefillParams& params, const ParallelFor& parallel_for);
void backward(const BackwardParams& params, const ParallelFor& parallel_for);
void decode(const DecodeParams& params, const ParallelFor& parallel_for);

// What this machine can run of "avx512", "avx2" and "generic", the best first, and which one it
// does: the best, until another one is set.
std::vector<std::string> instruction_sets();
std::string instruction_set();
bool set_instruction_set(std::string_view name);  // false: not one of instruction_sets()

}  // namespace flashattn::cpu

#endif  // FLASHATTN_CPU_ATTENTION_H_
