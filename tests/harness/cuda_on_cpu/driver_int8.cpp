// C functions for ctypes: csrc/cuda's launchers of the int8 ops. Their structs hold nothing but what ctypes can fill.
#include "../../../csrc/cuda/kernels.h"
#include "guarded.h"
#include "workspace.h"

using namespace amp_kernels;  // NOLINT: this file is nothing but an interface to it

extern "C" {

void set_device(int compute_capability, int compiled_for) { emulator::set_device(compute_capability, compiled_for); }

const char* quantize_int8(const Quantize* quantize) {
  return guarded([&] {
    Workspace workspace(cuda::quantize_workspace(*quantize));
    cuda::launch_quantize(*quantize, workspace.get(), nullptr);
    workspace.check();
  });
}

const char* dequantize_int8(const Dequantize* dequantize) {
  return guarded([&] { cuda::launch_dequantize(*dequantize, nullptr); });
}

const char* straight_through_int8(const StraightThrough* pass) {
  return guarded([&] { cuda::launch_straight_through(*pass, nullptr); });
}

const char* int8_matmul(const Int8Matmul* matmul) {
  return guarded([&] { cuda::launch_int8_matmul(*matmul, nullptr); });
}

const char* int8_conv2d(const Int8Conv2d* conv) {
  return guarded([&] { cuda::launch_int8_conv2d(*conv, nullptr); });
}

const char* int8_linear(const Int8Linear* linear) {
  return guarded([&] { cuda::launch_int8_linear(*linear, nullptr); });
}
}
