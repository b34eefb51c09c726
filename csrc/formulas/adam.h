// One element of Adam (Kingma and Ba 2015), AdamW (Loshchilov and Hutter 2019) and AMSGrad (Reddi et al. 2018), as
// torch.optim writes them, at step t = 1, 2, ...:
//   Adam:   g <- g + weight_decay * p
//   AdamW:  p <- p - lr * weight_decay * p
//   m <- beta1 * m + (1 - beta1) * g
//   v <- beta2 * v + (1 - beta2) * g^2
//   u <- v, with AMSGrad the largest v so far
//   p <- p - lr / (1 - beta1^t) * m / (sqrt(u / (1 - beta2^t)) + eps)
#pragma once

#include <cmath>

#include "states.h"

namespace amp_kernels {

struct AdamFormula {
  static constexpr const char* kName = "adam";
  static constexpr int kStates = 3;  // exp_avg, exp_avg_sq, and with AMSGrad max_exp_avg_sq
  static constexpr int kRequired = 2;
  static constexpr Code kCodes[kStates] = {Code::kMomentum, Code::kSecondMoment, Code::kNone};

  float factor, one_minus_beta1, beta2, one_minus_beta2, eps, added_decay, shrinkage, rate, inverse_root;
  bool amsgrad;

  // `hyper` holds 1 - beta1, 1 - beta2, eps, weight_decay, sign and decoupled, in this order. `sign` is -1 to maximize,
  // else 1. `decoupled` is 0 for the weight decay of Adam, and not 0 for that of AdamW. `step` is t - 1.
  AMP_KERNELS_HD AdamFormula(const float* hyper, float lr, float factor, uint32_t step, const bool (&has)[kStates])
      : factor(factor * hyper[4]),
        one_minus_beta1(hyper[0]),
        beta2(1.0f - hyper[1]),
        one_minus_beta2(hyper[1]),
        eps(hyper[2]),
        added_decay(hyper[5] != 0.0f ? 0.0f : hyper[3]),
        shrinkage(hyper[5] != 0.0f ? lr * hyper[3] : 0.0f),
        rate(lr / correction(hyper[0], step)),
        inverse_root(1.0f / sqrtf(correction(hyper[1], step))),
        amsgrad(has[2]) {}

  template <class Arithmetic = Ieee>
  AMP_KERNELS_HD float operator()(float p, float g, float (&s)[kStates], Arithmetic&& arithmetic = {}) const {
    g *= factor;
    // One fma, which rounds once, as torch's g.add(p, alpha=weight_decay) does. If gradient and decay nearly cancel, a
    // second rounding would be visible.
    if (added_decay != 0.0f) g = fmaf(added_decay, p, g);
    if (shrinkage != 0.0f) p = fmaf(-shrinkage, p, p);
    // The formula of torch's lerp(m, g, 1 - beta1). With beta1 = 0 it gives exactly g. The number that is rounded to
    // fp32 is 1 - beta1. If beta1 were rounded to fp32 instead, m would differ by up to 1e-6 of its value.
    s[0] = one_minus_beta1 < 0.5f ? s[0] + one_minus_beta1 * (g - s[0]) : g - (1.0f - one_minus_beta1) * (g - s[0]);
    s[1] = beta2 * s[1] + one_minus_beta2 * g * g;
    s[2] = amsgrad && (s[2] > s[1] || s[2] != s[2]) ? s[2] : s[1];  // NaN is kept
    return p - rate * arithmetic.quotient(s[0], arithmetic.root(s[2]) * inverse_root + eps);
  }

 private:
  // 1 - beta^t, computed from 1 - beta. If it were computed as 1 minus an fp32 power, its relative error at the first
  // step with beta = 0.999 would be 1e-5.
  static AMP_KERNELS_HD float correction(float one_minus_beta, uint32_t step) {
    return -expm1f((static_cast<float>(step) + 1.0f) * log1pf(-one_minus_beta));
  }
};

}  // namespace amp_kernels
