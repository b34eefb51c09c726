// Scalars of the gradient pass and of the gradient's way into an update.
#pragma once

#include <cmath>

#include "../table.h"

namespace amp_kernels {

AMP_KERNELS_HD float unscale_factor(const GradientPass& pass) {
  if (pass.scale == nullptr) return 1.0f;
  return pass.divide ? 1.0f / *pass.scale : *pass.scale;
}

template <class T>
AMP_KERNELS_HD bool is_finite(T value) {
  return value - value == T(0);
}

// A chunk's sum of squares is the check: in fp64 it neither overflows nor vanishes, so it is finite iff the elements
// are. The fast sum squares in fp32, where elements above 1.8e19 overflow as well and those below 1e-19 vanish; when it
// is not finite, or too small to rule that out, the chunk is summed again, in fp64 or rescaled.
// A GPU asks that of the few elements that a thread has loaded together, which are still in its registers.
template <class T>
AMP_KERNELS_HD bool fast_sum_is_exact(T sum) {
  return is_finite(sum) && sum >= T(1e-24);
}

// What to multiply elements by for a second sum in fp32, by the first: below 1e-12 each, at least one above 1e19, or
// not finite. Squares are then between 1e-30 and 1e36, but for some that are nothing beside the largest. GPUs for
// consumers take 64 times as long for an fp64 square, and gradients of embeddings are full of zeros.
template <class T>
AMP_KERNELS_HD float rescue_scale(T fast_sum) {
  return fast_sum < T(1) ? 0x1p100f : 0x1p-70f;
}

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
