// The operator `_send_`, with which the step plan of an optimizer sends int64 words to a GPU. Its schema is in
// amp_kernels/ops/update.py.
#ifdef USE_CUDA
#include "cuda_device.h"

namespace amp_kernels::cuda {
namespace {

void send(Tensor host, Tensor to) {
  const Guard guard(to.get_device_index());
  launch_send(data<int64_t>(host), data<int64_t>(to), host.numel(), current_stream(to));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CUDA, m) { m.impl("_send_", TORCH_BOX(&send)); }

}  // namespace amp_kernels::cuda
#endif
