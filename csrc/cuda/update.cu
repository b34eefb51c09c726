#include "../formulas/families.h"
#include "update.cuh"

namespace amp_kernels::cuda {

void launch_update(std::string_view family, const Update& update, Stream stream) {
  Families::with(family, [&](auto formula) { launch_update<typename decltype(formula)::type>(update, stream); });
}

}  // namespace amp_kernels::cuda
