// The int8 kernels of a CPU, for their ops (int8_cpu.cpp) and for direct calls (direct.cpp).
#pragma once

#include "../int8.h"

namespace amp_kernels::cpu {

void quantize(const Quantize& args);
void dequantize(const Dequantize& args);
void multiply(const Int8Matmul& args);
void multiply(const Int8Linear& args);

}  // namespace amp_kernels::cpu
