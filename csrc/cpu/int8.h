// The int8 kernels for a CPU. csrc/ops/int8.cpp calls them.
#pragma once

#include "../int8.h"

namespace amp_kernels::cpu {

void quantize(const Quantize& args);
void dequantize(const Dequantize& args);
void straight_through(const StraightThrough& args);
void multiply(const Int8Matmul& args);
void multiply(const Int8Conv2d& args);
void multiply(const Int8Linear& args);

}  // namespace amp_kernels::cpu
