#include "cpu/instances.h"

namespace flashattn::cpu {

constexpr InstructionSet kGeneric = make_instruction_set<Generic>("generic");

}  // namespace flashattn::cpu
