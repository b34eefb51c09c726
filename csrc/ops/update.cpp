// The operators of updates, for all families (../formulas/families.h). Their schemas are in amp_kernels/ops/update.py.
#include <string>

#include "../cpu/run.h"
#include "arguments.h"
#include "launcher.h"

namespace amp_kernels {
namespace {

void update_table(std::string family, Tensor table, Tensor chunks, int64_t chunk_size, Tensor record, Tensor hyper,
                  Tensor lr, int64_t param_dtype, bool split, int64_t grad_dtype, int64_t states, int64_t state_dtype,
                  std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf, std::optional<Tensor> grad_norm,
                  double max_norm) {
  const Form form = make_form(param_dtype, split, grad_dtype, states, state_dtype);
  launcher_beside(table).run(family, make_update(table, chunks, chunk_size, record, hyper, lr, form, grad_scale,
                                                 found_inf, grad_norm, max_norm));
}

int64_t load_update(Tensor beside, std::string family, int64_t param_dtype, bool split, int64_t grad_dtype,
                    int64_t states, int64_t state_dtype) {
  return launcher_beside(beside).load_update(family, make_form(param_dtype, split, grad_dtype, states, state_dtype));
}

template <class Library>
void register_kernels(Library& m) {
  m.impl("_update_table_", TORCH_BOX(&update_table));
  m.impl("_load_update", TORCH_BOX(&load_update));
}

}  // namespace

void run_on_cpu(std::string_view family, const Update& update) {
  Families::with(family, [&](auto formula) { cpu::run_update<typename decltype(formula)::type>(update); });
}

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { register_kernels(m); }
#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CUDA, m) { register_kernels(m); }
#endif

}  // namespace amp_kernels
