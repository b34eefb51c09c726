// The functions of torch that operators on CUDA tensors need: to switch to a device, to find the stream for a launch,
// and to allocate memory.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "../cuda/kernels.h"
#include "arguments.h"

namespace amp_kernels::cuda {

using Guard = torch::stable::accelerator::DeviceGuard;

inline Stream current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<Stream>(stream);
}

// Returns new memory on the device of a tensor. The caller may free the memory before the kernels that use it have run,
// because torch's allocator reuses freed memory only for later work on the same stream.
inline Tensor workspace_beside(const Tensor& tensor, int64_t bytes) {
  return torch::stable::new_empty(tensor, {bytes}, torch::headeronly::ScalarType::Byte);
}

}  // namespace amp_kernels::cuda
