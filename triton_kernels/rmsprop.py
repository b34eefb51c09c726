"""RMSprop (Hinton 2012; centered: Graves 2013), as in torch.optim. update.py explains the arguments of `formula`.

g <- factor * grad + weight_decay * p
v <- alpha * v + (1 - alpha) * g^2
centered: a <- a + (1 - alpha) * (g - a)
d <- sqrt(v - a^2) + eps                       (a = 0 unless centered)
b <- momentum * b + g / d,  p <- p - lr * b    (b = g / d without momentum)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def formula(p, g, state, has, hyper, lr, factor, step):
    v, b, a = state  # square_avg, momentum_buffer, grad_avg; an absent state is 0
    alpha, one_minus_alpha, eps, weight_decay, sign, momentum = hyper[:6]
    momentum = tl.where(has[1], momentum, 0.0)
    centering = tl.where(has[2], one_minus_alpha, 0.0)
    g *= factor * sign
    # The decay is added by one fma, as in torch's add with alpha. If gradient and decay nearly cancel, a second
    # rounding would be visible. If weight_decay is 0, g is not touched, because 0 times an infinite parameter would be
    # NaN.
    g = tl.where(weight_decay == 0.0, g, tl.fma(weight_decay, p, g))
    v = alpha * v + one_minus_alpha * g * g
    a += centering * (g - a)
    # Rounding can make v - a^2 negative. torch then takes the root of a negative number, which is NaN. Here 0 replaces
    # the negative number. If v - a^2 is NaN, it stays NaN.
    variance = v - a * a
    variance = tl.where(variance < 0.0, 0.0, variance)
    b = momentum * b + tl.div_rn(g, tl.sqrt_rn(variance) + eps)  # plain / and tl.sqrt are approximate
    return p - lr * b, (v, b, a)
