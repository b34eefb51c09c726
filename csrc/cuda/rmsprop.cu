#include "../formulas/rmsprop.h"
#include "update.cuh"

namespace amp_kernels::cuda {

void launch_rmsprop(const Update& update, Stream stream) { launch_update<RmspropFormula>(update, stream); }

}  // namespace amp_kernels::cuda
