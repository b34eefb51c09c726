// The scalar arithmetic of the gradient pass, and the factor by which an update multiplies gradients.
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

// Whether the fast sum of some elements can be used. A pass first sums the squares of elements in fp32, because this is
// faster than fp64. The result is the fast sum. The sum of squares is also the check for NaN and inf. In fp64 no square
// of an fp32 number overflows or vanishes. So an fp64 sum of squares is finite exactly if all elements are finite. In
// fp32 the square of an element overflows if its magnitude is above 1.8e19. It loses bits or vanishes if the magnitude
// is below 1e-19. So the fast sum cannot be used if it is not finite, or if it is so small that the lost bits may
// matter.
//
// If the fast sum cannot be used, the squares of its elements are summed a second time. On a CPU, these elements are a
// block of 1024, and the second sum is in fp64. On a GPU, they are one pack, which is still in registers. There they
// are multiplied by rescue_scale() before the second sum.
template <class T>
AMP_KERNELS_HD bool fast_sum_is_exact(T sum) {
  return is_finite(sum) && sum >= T(1e-24);
}

// The factor by which a GPU multiplies elements before it sums their squares a second time. The second sum is in fp32,
// too, because on consumer GPUs an fp64 square takes 64 times as long as an fp32 square. This time matters, because
// second sums are frequent. For example, the gradients of embeddings are full of zeros, and the fast sum of zeros is 0.
//
// If the fast sum is small, the magnitudes of all elements are below 1e-12, and the factor is 2^100. If the fast sum is
// not finite, at least one element is not finite or has a magnitude above 6e18, and the factor is 2^-70. The squares of
// the multiplied finite elements are between 1e-30 and 2e36, except 0 and squares that are negligible next to the
// largest one.
template <class T>
AMP_KERNELS_HD float rescue_scale(T fast_sum) {
  return fast_sum < T(1) ? 0x1p100f : 0x1p-70f;
}

// The factor by which an update multiplies gradients. It unscales the gradients and clips them to max_norm. As in
// torch._fused_sgd_, grad_scale is a divisor. 1e-6 is the constant in torch.nn.utils.clip_grad_norm_.
AMP_KERNELS_HD float update_factor(const Update& update) {
  float factor = 1.0f;
  if (update.grad_scale != nullptr) factor /= *update.grad_scale;
  if (update.grad_norm != nullptr) {
    const float coefficient = update.max_norm / (*update.grad_norm + 1e-6f);
    factor *= coefficient > 1.0f ? 1.0f : coefficient;  // NaN > 1 is false, so a NaN norm makes the factor NaN
  }
  return factor;
}

AMP_KERNELS_HD bool is_skipped(const Update& update) {
  // A step is skipped for other values than 1, too, because found_inf may be a sum over devices or ranks, such as 2.
  return update.found_inf != nullptr && *update.found_inf != 0.0f;
}

}  // namespace amp_kernels
