// What operators on CUDA tensors ask torch: the device to switch to, the stream to launch on.
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

// From torch's allocator, which gives the memory to nobody else on this stream before the kernels are done with it.
inline Tensor workspace_beside(const Tensor& tensor, int64_t bytes) {
  return torch::stable::new_empty(tensor, {bytes}, torch::headeronly::ScalarType::Byte);
}

}  // namespace amp_kernels::cuda
