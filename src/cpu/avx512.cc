#include "cpu/instances.h"

namespace flashattn::cpu {

constexpr InstructionSet kAvx512 = make_instruction_set<Avx512>("avx512");

}  // namespace flashattn::cpu
