// Which instruction sets this machine has, and which one to use. Owns the choice; HEADRACE_ISA forces it.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace headrace {

std::vector<std::string> available_isas();  // best first; never empty
std::vector<std::string> emulated_isas();   // for tests only: emulated in plain C++, because this machine lacks them
std::string default_isa();                  // throws std::invalid_argument when HEADRACE_ISA cannot be had
const Kernels& kernels_of(const std::string& isa);  // throws std::invalid_argument

}  // namespace headrace
