// One element of SGD (Sutskever et al. 2013, as torch.optim.SGD writes it):
//   g <- g + weight_decay * p
//   b <- momentum * b + (1 - dampening) * g        (b <- g at the first step)
//   p <- p - lr * (nesterov ? g + momentum * b : b)
#pragma once

#include <cmath>

#include "states.h"

namespace amp_kernels {

struct SgdFormula {
  static constexpr const char* kName = "sgd";
  static constexpr int kStates = 1;  // momentum_buffer
  static constexpr int kRequired = 0;
  static constexpr Code kCodes[kStates] = {Code::kMomentum};

  // hyper: momentum, 1 - dampening, weight_decay, nesterov, -1 to maximize (else 1)
  float factor, lr, momentum, one_minus_dampening, weight_decay, lookahead;
  bool first;

  // If the parameter has no momentum buffer, every step is computed like the first one, with b = g.
  AMP_KERNELS_HD SgdFormula(const float* hyper, float lr, float factor, uint32_t step, const bool (&has)[kStates])
      : factor(factor * hyper[4]),
        lr(lr),
        momentum(hyper[0]),
        one_minus_dampening(hyper[1]),
        weight_decay(hyper[2]),
        lookahead(hyper[3] != 0.0f && has[0] ? hyper[0] : 0.0f),
        first(step == 0 || !has[0]) {}

  template <class Arithmetic = Ieee>
  AMP_KERNELS_HD float operator()(float p, float g, float (&s)[kStates], Arithmetic&& = {}) const {
    g *= factor;
    // One fma, which rounds once, as torch's g.add(p, alpha=weight_decay) does. If gradient and decay nearly cancel, a
    // second rounding would be visible.
    if (weight_decay != 0.0f) g = fmaf(weight_decay, p, g);
    s[0] = first ? g : momentum * s[0] + one_minus_dampening * g;
    const float direction = lookahead != 0.0f ? g + lookahead * s[0] : s[0];
    return p - lr * direction;
  }
};

}  // namespace amp_kernels
