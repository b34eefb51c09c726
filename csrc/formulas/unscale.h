// Scalars of the gradient pass and of the gradient's way into an update.
#pragma once

#include <cmath>

#include "../table.h"

namespace amp_kernels {

AMP_KERNELS_HD float unscale_factor(const GradientPass& pass) {
  if (pass.scale == nullptr) return 1.0f;
  return pass.divide ? 1.0f / *pass.scale : *pass.scale;
}

AMP_KERNELS_HD bool is_finite(double value) { return value - value == 0.0; }

// fp64 squares of fp32 elements neither overflow nor vanish, so a chunk's sum is finite iff its elements are:
// the sum is the check. The fast sum squares in fp32, where elements above 1.8e19 overflow as well and those
// below 1e-19 vanish; when it is not finite, or too small to rule that out, the chunk is summed again in
// fp64.
AMP_KERNELS_HD bool fast_sum_is_exact(double sum) { return is_finite(sum) && sum >= 1e-24; }

// grad_scale divides, as in torch._fused_sgd_; 1e-6 is torch.nn.utils.clip_grad_norm_'s.
AMP_KERNELS_HD float update_factor(const Update& update) {
  float factor = 1.0f;
  if (update.grad_scale != nullptr) factor /= *update.grad_scale;
  if (update.grad_norm != nullptr) {
    const float coefficient = update.max_norm / (*update.grad_norm + 1e-6f);
    factor *= coefficient > 1.0f ? 1.0f : coefficient;  // written so that a NaN norm stays visible
  }
  return factor;
}

AMP_KERNELS_HD bool is_skipped(const Update& update) {
  return update.found_inf != nullptr && *update.found_inf != 0.0f;  // 2.0 skips too: a sum over devices or ranks
}

}  // namespace amp_kernels
