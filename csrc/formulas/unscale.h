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

// The sum of squares is also the check for NaN and inf. In fp64 a sum of squares neither overflows nor vanishes, so it
// is finite exactly if all elements are. But a pass sums fp32 squares first, which is faster. There, the square of an
// element above 1.8e19 overflows too, and the square of one below 1e-19 vanishes. This function returns false if the
// fast sum is not finite, or so small that squares may have vanished. Then the same elements are summed again: on a CPU
// a block of 1024 elements, in fp64; on a GPU one pack, which is still in registers, multiplied by rescue_scale().
template <class T>
AMP_KERNELS_HD bool fast_sum_is_exact(T sum) {
  return is_finite(sum) && sum >= T(1e-24);
}

// The factor by which a GPU multiplies elements before it sums their squares a second time. The second sum is in fp32,
// too, because on consumer GPUs an fp64 square takes 64 times as long, and many second sums are needed: the gradients
// of embeddings are full of zeros, whose fast sum is 0.
//
// If the fast sum is small, all elements are below 1e-12, and the factor is 2^100. If it is not finite, one element is
// above 1e19 or not finite, and the factor is 2^-70. The squares of the multiplied elements are then between 1e-30 and
// 1e36, except some that are negligible next to the largest one.
template <class T>
AMP_KERNELS_HD float rescue_scale(T fast_sum) {
  return fast_sum < T(1) ? 0x1p100f : 0x1p-70f;
}

// The factor by which an update multiplies gradients. It unscales them (grad_scale is a divisor, as in
// torch._fused_sgd_), and clips them to max_norm. 1e-6 is the constant in torch.nn.utils.clip_grad_norm_.
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
  return update.found_inf != nullptr && *update.found_inf != 0.0f;  // it may be a sum over devices or ranks, such as 2
}

}  // namespace amp_kernels
