// C functions for ctypes: csrc/cuda's launchers of the matmul ops. Their structs hold nothing but what ctypes can fill.
#include "../../../csrc/cuda/kernels.h"
#include "guarded.h"
#include "workspace.h"

using namespace amp_kernels;  // NOLINT: this file is nothing but an interface to it

extern "C" {

const char* matmul(const Matmul* arguments) {
  return guarded([&] {
    Workspace workspace(cuda::matmul_workspace(*arguments));
    cuda::launch_matmul(*arguments, workspace.get(), nullptr);
    workspace.check();
  });
}

const char* copy_pad(const CopyPad* arguments) {
  return guarded([&] {
    Workspace workspace(cuda::copy_pad_workspace(*arguments));
    cuda::launch_copy_pad(*arguments, workspace.get(), nullptr);
    workspace.check();
  });
}
}
