// The operators of the gradient pass (GradientPass in ../table.h). `unscale_` and `grad_norm` take lists.
// `_unscale_table_` and `_load_unscale` are called by the step plan of an optimizer. The schemas of all four are in
// amp_kernels/ops/unscale.py.
#include "device.h"
#include "lists.h"
#include "step.h"

namespace amp_kernels {
namespace {

// Launches the gradient pass over a list of gradients, and returns their norm. The table, the entries of the chunks and
// the record are sent to the device (device.h), in this order. Behind them there is memory for the partial sums.
template <class Device>
Tensor gradient_pass(const Tensors& grads, const std::optional<Tensor>& scale, bool write, const Tensor& found_inf) {
  const Operand flag(found_inf);
  require_scalar(found_inf, flag);
  require_scalar(scale, flag);
  const Operands operands = operands_of(grads, flag);
  for (const Operand& grad : operands) require(!write || !grad.is_expanded());

  Device device(found_inf);
  Dense dense;
  const auto count = static_cast<int64_t>(grads.size());
  HostTable table(kGrad + 1, count);
  for (int64_t t = 0; t < count; ++t) table.put(t, dense(operands[t]));
  std::vector<int64_t> columns(count);
  std::iota(columns.begin(), columns.end(), 0);
  const Chunks chunks = table.cut(columns, device.load_pass());

  Words words;
  words.add(table.rows());
  const int64_t chunks_at = words.add(chunks.words);
  const int64_t record_at = words.add(std::vector<int64_t>(sizeof(Record) / sizeof(int64_t)));
  const auto partials_at = static_cast<int64_t>(words.get().size());
  int64_t* const at = device.send(words.get(), chunks.count(), [](int64_t*) {});
  const Tensor norm = torch::stable::new_empty(found_inf, {});
  device.run({{at, count, reinterpret_cast<int32_t*>(at + chunks_at), chunks.count(), chunks.size},
              data<float>(scale),
              /*divide=*/false,
              write,
              /*clear=*/false,
              reinterpret_cast<double*>(at + partials_at),
              data<float>(found_inf),
              data<float>(norm),
              reinterpret_cast<Record*>(at + record_at)});
  if (write) dense.copy_back();
  return norm;
}

template <class Device>
void unscale(Tensors grads, Tensor inv_scale, Tensor found_inf) {
  gradient_pass<Device>(grads, inv_scale, true, found_inf);
}

template <class Device>
Tensor grad_norm(Tensors grads, std::optional<Tensor> inv_scale, Tensor found_inf) {
  return gradient_pass<Device>(grads, inv_scale, false, found_inf);
}

template <class Device>
void unscale_table(Tensor table, Tensor chunks, int64_t chunk_size, std::optional<Tensor> scale, bool divide,
                   bool write, bool clear, Tensor partials, Tensor found_inf, Tensor norm, Tensor record) {
  Device(table).run(
      make_pass(table, chunks, chunk_size, scale, divide, write, clear, partials, found_inf, norm, record));
}

template <class Device>
int64_t load_unscale(Tensor beside) {
  const Device device(beside);
  device.load_send();
  return device.load_pass();
}

template <class Device, class Library>
void register_kernels(Library& m) {
  AMP_KERNELS_IMPL(m, Device, "unscale_", unscale<Device>);
  AMP_KERNELS_IMPL(m, Device, "grad_norm", grad_norm<Device>);
  m.impl("_unscale_table_", TORCH_BOX(&unscale_table<Device>));
  m.impl("_load_unscale", TORCH_BOX(&load_unscale<Device>));
}

}  // namespace

void run_on_cpu(const GradientPass& pass) { cpu::run_pass(pass); }

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { register_kernels<Cpu>(m); }
#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CUDA, m) { register_kernels<Cuda>(m); }
#endif

}  // namespace amp_kernels
