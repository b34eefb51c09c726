// Five of the 60 kernels of csrc/cuda/update_lean.cu, for the tests of what nvcc makes of them (tests/harness/nvcc.py).
#include "../../../csrc/cuda/update_lean.cuh"
#include "../../../csrc/formulas/families.h"

namespace amp_kernels::cuda {

#define KERNEL(FORMULA, PRESENT, P, G, S) \
  template __global__ void update_lean_kernel<LeanVariant<FORMULA, PRESENT, P, G, S>>(const Update)

KERNEL(SgdFormula, 1, __half, __half, uint8_t);
KERNEL(RmspropFormula, 3, float, float, uint8_t);
KERNEL(AdamFormula, 3, __nv_bfloat16, __nv_bfloat16, uint8_t);
KERNEL(AdamFormula, 3, __half, float, uint16_t);
KERNEL(AdamFormula, 7, __nv_bfloat16, __nv_bfloat16, uint8_t);

}  // namespace amp_kernels::cuda
