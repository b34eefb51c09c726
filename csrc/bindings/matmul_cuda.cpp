// The matmul ops on CUDA tensors: device guard, current stream, launch.
#include "cuda_device.h"
#include "matmul_arguments.h"

namespace amp_kernels::cuda {
namespace {

void matmul(Tensor a, Tensor b, std::optional<Tensor> input, Tensor out, std::optional<Tensor> pre, double alpha,
            double beta, int64_t activation) {
  const Guard guard(a.get_device_index());
  const Matmul arguments = make_matmul(a, b, input, out, pre, alpha, beta, activation);
  const Tensor workspace = workspace_beside(a, matmul_workspace(arguments));
  launch_matmul(arguments, workspace.data_ptr(), current_stream(a));
}

void copy_pad(Tensor x, std::optional<Tensor> pre, Tensor out, std::optional<Tensor> bias_grad, int64_t activation) {
  const Guard guard(x.get_device_index());
  const CopyPad arguments = make_copy_pad(x, pre, out, bias_grad, activation);
  const Tensor workspace = workspace_beside(x, copy_pad_workspace(arguments));
  launch_copy_pad(arguments, workspace.data_ptr(), current_stream(x));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CUDA, m) {
  m.impl("_matmul_", TORCH_BOX(&matmul));
  m.impl("_copy_pad_", TORCH_BOX(&copy_pad));
}

}  // namespace amp_kernels::cuda
