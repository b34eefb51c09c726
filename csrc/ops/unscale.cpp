// The operators of the gradient pass (GradientPass in ../table.h). Their schemas are in amp_kernels/ops/unscale.py.
#include "../cpu/run.h"
#include "arguments.h"
#include "launcher.h"

namespace amp_kernels {
namespace {

void unscale_table(Tensor table, Tensor chunks, int64_t chunk_size, std::optional<Tensor> scale, bool divide,
                   bool write, bool clear, Tensor partials, Tensor found_inf, Tensor norm, Tensor record,
                   int64_t squares) {
  launcher_beside(table).run(
      make_pass(table, chunks, chunk_size, scale, divide, write, clear, partials, found_inf, norm, record, squares));
}

int64_t load_unscale(Tensor beside) { return launcher_beside(beside).load_pass(); }

template <class Library>
void register_kernels(Library& m) {
  m.impl("_unscale_table_", TORCH_BOX(&unscale_table));
  m.impl("_load_unscale", TORCH_BOX(&load_unscale));
}

}  // namespace

void run_on_cpu(const GradientPass& pass) { cpu::run_pass(pass); }

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { register_kernels(m); }
#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CUDA, m) { register_kernels(m); }
#endif

}  // namespace amp_kernels
