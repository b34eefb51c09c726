// The table ops on CUDA tensors: device guard, current stream, launch.
#include "cuda.h"

#include <algorithm>
#include <cstring>

#include "cuda_device.h"
#include "gradient_table.h"

namespace amp_kernels::cuda {
namespace {

void unscale_table(Tensor table, Tensor chunks, int64_t chunk_size, std::optional<Tensor> scale, bool divide,
                   bool write, bool clear, Tensor partials, Tensor found_inf, Tensor norm, Tensor record) {
  const Guard guard(table.get_device_index());
  launch_unscale(make_pass(table, chunks, chunk_size, scale, divide, write, clear, partials, found_inf, norm, record),
                 current_stream(table));
}

// The gradient pass over a list; false, with nothing done, if there is no table of it.
bool gradient_pass(std::vector<Tensor> grads, std::optional<Tensor> scale, bool write, Tensor found_inf, Tensor norm) {
  int64_t elements = 0;
  for (const Tensor& grad : grads) elements += grad.numel();
  const int64_t chunk_size = elements < 1 << 27 ? 1 << 14 : 1 << 16;  // as in _table.cut
  const std::optional<GradientTable> made = gradient_table(grads, chunk_size);
  if (!made || !grads[0].is_cuda()) return false;
  constexpr int64_t kWord = sizeof(int64_t);
  const auto count = static_cast<int64_t>(grads.size());
  const int64_t chunks_at = made->rows.size(), record_at = chunks_at + made->chunk_count();
  std::vector<int64_t> words(record_at + sizeof(Record) / kWord);  // what is sent; the record begins with zeros
  std::copy(made->rows.begin(), made->rows.end(), words.begin());
  if (!made->chunks.empty()) std::memcpy(&words[chunks_at], made->chunks.data(), made->chunk_count() * kWord);
  const Guard guard(grads[0].get_device_index());
  const Stream stream = current_stream(grads[0]);
  const Tensor memory = workspace_beside(grads[0], (words.size() + made->chunk_count()) * kWord);
  auto* const at = data<int64_t>(memory);
  launch_send(words.data(), at, words.size(), stream);
  const auto* const chunks = reinterpret_cast<const int32_t*>(at + chunks_at);
  launch_unscale({{at, count, chunks, made->chunk_count(), chunk_size},
                  data<float>(scale),
                  /*divide=*/false,
                  write,
                  /*clear=*/false,
                  reinterpret_cast<double*>(at + words.size()),
                  data<float>(found_inf),
                  data<float>(norm),
                  reinterpret_cast<Record*>(at + record_at)},
                 stream);
  return true;
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

PyObject* why_no_kernel(PyObject*, PyObject*) { return PyUnicode_FromString(why_no_kernel().c_str()); }

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CUDA, m) {
  m.impl("_unscale_table_", TORCH_BOX(&unscale_table));
  m.impl("_gradient_pass_", TORCH_BOX(&gradient_pass));
  m.impl("_send_", TORCH_BOX(&send));
  m.impl("_sgd_table_", TORCH_BOX(&update_table<launch_sgd>));
  m.impl("_rmsprop_table_", TORCH_BOX(&update_table<launch_rmsprop>));
}

}  // namespace amp_kernels::cuda
