// One element of RMSprop (Hinton 2012), and of centered RMSprop (Graves 2013), as torch.optim.RMSprop writes them:
//   g <- g + weight_decay * p
//   v <- alpha * v + (1 - alpha) * g^2
//   centered: a <- a + (1 - alpha) * (g - a)
//   d <- sqrt(v - a^2) + eps                       (a = 0 unless centered)
//   b <- momentum * b + g / d,  p <- p - lr * b    (b = g / d without momentum)
#pragma once

#include <cmath>

#include "states.h"

namespace amp_kernels {

struct RmspropFormula {
  static constexpr const char* kName = "rmsprop";
  static constexpr int kStates = 3;  // square_avg, momentum_buffer, grad_avg; an absent one reads as 0
  static constexpr int kRequired = 1;
  static constexpr Code kCodes[kStates] = {Code::kSecondMoment, Code::kMomentum, Code::kNone};

  // hyper: alpha, 1 - alpha, eps, weight_decay, -1 to maximize (else 1), momentum
  float factor, lr, alpha, one_minus_alpha, centering, eps, weight_decay, momentum;

  AMP_KERNELS_HD RmspropFormula(const float* hyper, float lr, float factor, uint32_t, const bool (&has)[kStates])
      : factor(factor * hyper[4]),
        lr(lr),
        alpha(hyper[0]),
        one_minus_alpha(hyper[1]),
        centering(has[2] ? hyper[1] : 0.0f),
        eps(hyper[2]),
        weight_decay(hyper[3]),
        momentum(has[1] ? hyper[5] : 0.0f) {}

  template <class Arithmetic = Ieee>
  AMP_KERNELS_HD float operator()(float p, float g, float (&s)[kStates], Arithmetic&& arithmetic = {}) const {
    g *= factor;
    // One fma, which rounds once, as torch's g.add(p, alpha=weight_decay) does. If gradient and decay nearly cancel, a
    // second rounding would be visible.
    if (weight_decay != 0.0f) g = fmaf(weight_decay, p, g);
    s[0] = alpha * s[0] + one_minus_alpha * g * g;
    s[2] += centering * (g - s[2]);
    const float variance = s[0] - s[2] * s[2];
    // Rounding can make v - a^2 negative. torch then takes the root of a negative number, which is NaN. Here a negative
    // v - a^2 is replaced by 0. If v - a^2 is NaN, it stays NaN.
    s[1] = momentum * s[1] + arithmetic.quotient(g, arithmetic.root(variance < 0.0f ? 0.0f : variance) + eps);
    return p - lr * s[1];
  }
};

}  // namespace amp_kernels
