// The scalar arithmetic of the gradient pass, and of the factor of gradients in an update.
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

// The sum of squares is also the check for NaN and inf: in fp64 it neither overflows nor vanishes, so that it is finite
// iff the elements are. The fast sum is of fp32 squares, where elements above 1.8e19 overflow too, and elements below
// 1e-19 vanish. If it is not finite, or too small to rule that out, the same elements are summed again: on a CPU a
// block of 1024, in fp64; on a GPU one pack, which is still in registers, rescaled.
template <class T>
AMP_KERNELS_HD bool fast_sum_is_exact(T sum) {
  return is_finite(sum) && sum >= T(1e-24);
}

// The factor of elements for their second sum on a GPU. That sum is fp32, too: on consumer GPUs an fp64 square takes 64
// times as long, and gradients of embeddings, full of zeros, need many second sums. If the fast sum is small, all
// elements are below 1e-12; if not, one is above 1e19 or not finite. Squares of the multiplied elements are between
// 1e-30 and 1e36, except some that are negligible next to the largest.
template <class T>
AMP_KERNELS_HD float rescue_scale(T fast_sum) {
  return fast_sum < T(1) ? 0x1p100f : 0x1p-70f;
}

// The factor of gradients in an update: unscaling and clipping. grad_scale divides, as in torch._fused_sgd_; 1e-6 is
// the constant of torch.nn.utils.clip_grad_norm_.
AMP_KERNELS_HD float update_factor(const Update& update) {
  float factor = 1.0f;
  if (update.grad_scale != nullptr) factor /= *update.grad_scale;
  if (update.grad_norm != nullptr) {
    const float coefficient = update.max_norm / (*update.grad_norm + 1e-6f);
    factor *= coefficient > 1.0f ? 1.0f : coefficient;  // NaN > 1 is false, so that a NaN norm stays visible
  }
  return factor;
}

AMP_KERNELS_HD bool is_skipped(const Update& update) {
  return update.found_inf != nullptr && *update.found_inf != 0.0f;  // 2.0 skips too: a sum over devices or ranks
}

}  // namespace amp_kernels
