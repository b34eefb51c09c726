"""Adam, AdamW and AMSGrad, as in torch.optim. update.py explains the arguments of `formula`.

Sources: Kingma and Ba 2015, Loshchilov and Hutter 2019, Reddi et al. 2018.

Adam:   g <- factor * grad + weight_decay * p
AdamW:  p <- p - lr * weight_decay * p
m <- beta1 * m + (1 - beta1) * g
v <- beta2 * v + (1 - beta2) * g^2
u <- v        (with AMSGrad: the largest v so far)
p <- p - lr / (1 - beta1^t) * m / (sqrt(u / (1 - beta2^t)) + eps),  t = step + 1
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def formula(p, g, state, has, hyper, lr, factor, step):
    m, v, u = state  # exp_avg, exp_avg_sq, max_exp_avg_sq; an absent state is 0
    one_minus_beta1, one_minus_beta2, eps, weight_decay, sign, decoupled = hyper[:6]
    g *= factor * sign
    # is_added: Adam adds the decay to the gradient. The addition is one fma, as in torch's add with alpha. If gradient
    # and decay nearly cancel, a second rounding would be visible. is_taken: AdamW subtracts the decay from the
    # parameter. If weight_decay is 0, g and p are not touched, because 0 times an infinite parameter would be NaN.
    is_added = (weight_decay != 0.0) & (decoupled == 0.0)
    is_taken = (weight_decay != 0.0) & (decoupled != 0.0)
    g = tl.where(is_added, tl.fma(weight_decay, p, g), g)
    p = tl.where(is_taken, tl.fma(-lr * weight_decay, p, p), p)
    # This is torch's lerp with weight 1 - beta1. The kernel gets 1 - beta1. If it got beta1 instead, the rounding of
    # beta1 to fp32 would change m by up to 1e-6 of m. If beta1 is 0, the new m is exactly g.
    m = tl.where(one_minus_beta1 < 0.5, m + one_minus_beta1 * (g - m), g - (1.0 - one_minus_beta1) * (g - m))
    v = (1.0 - one_minus_beta2) * v + one_minus_beta2 * g * g
    u = tl.where(has[2] & ((u > v) | (u != u)), u, v)  # NaN is kept
    rate = tl.div_rn(lr, _correction(one_minus_beta1, step))
    root = tl.sqrt_rn(_correction(one_minus_beta2, step))
    p -= rate * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(u), root) + eps)
    return p, (m, v, u)


@triton.jit
def _correction(one_minus_beta, step):
    """Return 1 - beta^t for t = step + 1, by repeated squaring in fp64.

    If beta^t were an fp32 number, the result would be off by 1e-5 of its value at the first step with beta = 0.999. The
    power is not computed by `tl.exp`, because `tl.exp` compiles to .ftz instructions, which flush subnormals to 0.
    """
    square = 1.0 - one_minus_beta.to(tl.float64)
    power = tl.full((), 1.0, tl.float64)
    t = step + 1
    for _ in range(33):
        power = tl.where(t & 1 != 0, power * square, power)
        square *= square
        t >>= 1
    return (1.0 - power).to(tl.float32)
