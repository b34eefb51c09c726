// Twelve of the 92 kernels of csrc/cuda/update.cu, for the tests of what nvcc makes of them (tests/harness/nvcc.py):
// each formula with each number of states, and each form of a parameter.
#include "../../../csrc/cuda/update.cuh"
#include "../../../csrc/formulas/families.h"

namespace amp_kernels::cuda {

#define KERNEL(FORMULA, STATES, P, M, G) \
  template __global__ void update_kernel<Variant<FORMULA, STATES, P, M, G>>(const Update)

KERNEL(SgdFormula, 0, __half, int16_t, __half);
KERNEL(SgdFormula, 0, float, int16_t, __nv_bfloat16);
KERNEL(SgdFormula, 1, __nv_bfloat16, int16_t, __nv_bfloat16);
KERNEL(SgdFormula, 1, float, float, float);
KERNEL(RmspropFormula, 1, __half, float, __half);
KERNEL(RmspropFormula, 3, __nv_bfloat16, int16_t, float);
KERNEL(AdamFormula, 2, float, float, float);
KERNEL(AdamFormula, 2, __nv_bfloat16, int16_t, __nv_bfloat16);
KERNEL(AdamFormula, 2, __half, float, __half);
KERNEL(AdamFormula, 3, __half, int16_t, __half);
KERNEL(AdamFormula, 3, __nv_bfloat16, float, float);
KERNEL(AdamFormula, 3, float, float, __half);

}  // namespace amp_kernels::cuda
