// The update kernels for states of 8 and 16 bits (update_lean.cuh) of all families, chosen at run time.
#include "../formulas/families.h"
#include "update_lean.cuh"

namespace amp_kernels::cuda {

int64_t load_update_lean(std::string_view family, const Form& form) {
  int64_t blocks = 0;
  Families::with(family, [&](auto formula) {
    with_lean_kernel<typename decltype(formula)::type>(
        form, [&](auto* kernel, size_t shared_bytes) { blocks = blocks_at_a_time(kernel, shared_bytes); });
  });
  return blocks;
}

void launch_update_lean(std::string_view family, const Update& update, Stream stream) {
  if (update.table.chunk_count == 0) return;
  Families::with(family, [&](auto formula) {
    with_lean_kernel<typename decltype(formula)::type>(update.form, [&](auto* kernel, size_t shared_bytes) {
      launch_over_chunks(kernel, shared_bytes, update, stream);
    });
  });
}

}  // namespace amp_kernels::cuda
