"""SGD (Sutskever et al. 2013), as in torch.optim. update.py explains the arguments of `formula`.

g <- factor * grad + weight_decay * p
b <- momentum * b + (1 - dampening) * g        (b <- g at the first step)
p <- p - lr * (nesterov ? g + momentum * b : b)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def formula(p, g, state, has, hyper, lr, factor, step):
    (b,) = state  # momentum_buffer
    momentum, one_minus_dampening, weight_decay, nesterov, sign = hyper[:5]
    g *= factor * sign
    # The decay is added by one fma, as in torch's add with alpha. If gradient and decay nearly cancel, a second
    # rounding would be visible. If weight_decay is 0, g is not touched, because 0 times an infinite parameter would be
    # NaN.
    g = tl.where(weight_decay == 0.0, g, tl.fma(weight_decay, p, g))
    first = (step == 0) | (not has[0])  # without a buffer every step is computed like the first: b = g
    b = tl.where(first, g, momentum * b + one_minus_dampening * g)
    lookahead = tl.where((nesterov != 0.0) & has[0], momentum, 0.0)
    p -= lr * tl.where(lookahead != 0.0, g + lookahead * b, b)
    return p, (b,)
