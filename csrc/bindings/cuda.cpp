// The table ops on CUDA tensors: device guard, current stream, launch.
#include "cuda_device.h"

namespace amp_kernels::cuda {
namespace {

void unscale_table(Tensor table, Tensor chunks, int64_t chunk_size, std::optional<Tensor> scale, bool divide,
                   bool write, bool clear, Tensor partials, Tensor found_inf, Tensor norm, Tensor record) {
  const Guard guard(table.get_device_index());
  launch_unscale(make_pass(table, chunks, chunk_size, scale, divide, write, clear, partials, found_inf, norm, record),
                 current_stream(table));
}

template <void (*kLaunch)(const Update&, Stream)>
void update_table(Tensor table, Tensor chunks, int64_t chunk_size, Tensor steps, Tensor hyper, Tensor lr,
                  int64_t param_dtype, int64_t grad_dtype, std::optional<Tensor> grad_scale,
                  std::optional<Tensor> found_inf, std::optional<Tensor> grad_norm, double max_norm) {
  const Guard guard(table.get_device_index());
  kLaunch(make_update(table, chunks, chunk_size, steps, hyper, lr, param_dtype, grad_dtype, grad_scale, found_inf,
                      grad_norm, max_norm),
          current_stream(table));
}

void send(Tensor host, Tensor to) {
  const Guard guard(to.get_device_index());
  launch_send(data<int64_t>(host), data<int64_t>(to), host.numel(), current_stream(to));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CUDA, m) {
  m.impl("_unscale_table_", TORCH_BOX(&unscale_table));
  m.impl("_send_", TORCH_BOX(&send));
  m.impl("_sgd_table_", TORCH_BOX(&update_table<launch_sgd>));
  m.impl("_rmsprop_table_", TORCH_BOX(&update_table<launch_rmsprop>));
}

}  // namespace amp_kernels::cuda
