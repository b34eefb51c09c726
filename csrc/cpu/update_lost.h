// The pass over a table that counts the updates which 16-bit weights would lose without a master.
#pragma once

#include <string_view>

#include "../table.h"

namespace amp_kernels::cpu {

// Requires 16-bit weights with remainders.
void count_updates(std::string_view family, const UpdateCount& count);

}  // namespace amp_kernels::cpu
