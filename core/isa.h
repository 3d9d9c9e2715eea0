// Which instruction sets this machine has, and which one to use. Owns the choice; HEADRACE_ISA and HEADRACE_ARITHMETIC
// limit it.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace headrace {

std::vector<std::string> available_isas();  // best first; never empty
std::vector<std::string> emulated_isas();   // for tests only: emulated in plain C++, because this machine lacks them
// The best of this machine, or the one that HEADRACE_ISA forces. `arithmetic`: native; portable, for one whose bits are
// those of the portable kernels; or empty for what HEADRACE_ARITHMETIC says, which is native by default. Throws
// std::invalid_argument where that is not to be had.
std::string default_isa(const std::string& arithmetic);
std::string arithmetic_of(const std::string& isa);  // instruction sets of one arithmetic give the same bits
const Kernels& kernels_of(const std::string& isa);  // throws std::invalid_argument

}  // namespace headrace
