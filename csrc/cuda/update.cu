// The update kernels (update.cuh) of all families (../formulas/families.h), chosen at run time by family and form.
#include "../formulas/families.h"
#include "update.cuh"

namespace amp_kernels::cuda {

int64_t load_update(std::string_view family, const Form& form) {
  if (form.state_dtype != kFloat) return load_update_lean(family, form);
  int64_t blocks = 0;
  Families::with(family, [&](auto formula) {
    with_kernel<typename decltype(formula)::type>(
        form, [&](auto* kernel, size_t shared_bytes) { blocks = blocks_at_a_time(kernel, shared_bytes); });
  });
  return blocks;
}

void launch_update(std::string_view family, const Update& update, Stream stream) {
  if (update.form.state_dtype != kFloat) return launch_update_lean(family, update, stream);
  if (update.table.chunk_count == 0) return;
  Families::with(family, [&](auto formula) {
    with_kernel<typename decltype(formula)::type>(update.form, [&](auto* kernel, size_t shared_bytes) {
      launch_over_chunks(kernel, shared_bytes, update, stream);
    });
  });
}

}  // namespace amp_kernels::cuda
