#include "cpu/instances.h"

namespace flashattn::cpu {

constexpr InstructionSet kAvx2 = make_instruction_set<Avx2>("avx2");

}  // namespace flashattn::cpu
