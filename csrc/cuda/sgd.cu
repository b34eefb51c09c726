#include "../formulas/sgd.h"
#include "update.cuh"

namespace amp_kernels::cuda {

void launch_sgd(const Update& update, Stream stream) { launch_update<SgdFormula>(update, stream); }

}  // namespace amp_kernels::cuda
