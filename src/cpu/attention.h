// Attention on the CPU: multi-threaded, vectorised, in O(T) memory.
#ifndef FLASHATTN_CPU_ATTENTION_H_
#define FLASHATTN_CPU_ATTENTION_H_

#include <cstdint>
#include <functional>

#include "params.h"

namespace flashattn::cpu {

// Runs task(i) for every i in [0, n), on any threads and in any order; returns when all are done.
using ParallelFor = std::function<void(int64_t n, const std::function<void(int64_t)>& task)>;

void prefill(const PrefillParams& params, const ParallelFor& parallel_for);
void backward(const BackwardParams& params, const ParallelFor& parallel_for);
void decode(const DecodeParams& params, const ParallelFor& parallel_for);

// The instructions that this machine gets: "avx512", "avx2" or "generic".
const char* instruction_set();

}  // namespace flashattn::cpu

#endif  // FLASHATTN_CPU_ATTENTION_H_
