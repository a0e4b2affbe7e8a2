// The kernels of an instruction set. Only the translation unit that is compiled for it includes
// this.
#ifndef FLASHATTN_CPU_INSTANCES_H_
#define FLASHATTN_CPU_INSTANCES_H_

#include "cpu/backward.h"
#include "cpu/forward.h"
#include "cpu/kernels.h"
#include "cpu/vector.h"

namespace flashattn::cpu {

template <class V>
constexpr Kernels make_kernels() {
  return {V::kBlock,       forward<V>,        combine<V>,
          delta<V>,        query_gradient<V>, key_value_gradients<V>,
          sink_gradient<V>};
}

template <class Isa>
constexpr InstructionSet make_instruction_set(const char* name) {
  return {name, make_kernels<Simd<Isa, float>>(), make_kernels<Simd<Isa, double>>()};
}

}  // namespace flashattn::cpu

#endif  // FLASHATTN_CPU_INSTANCES_H_
