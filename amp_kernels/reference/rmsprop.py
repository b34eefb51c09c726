"""RMSprop (Hinton 2012; centered: Graves 2013) in plain torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .update import States, decayed, root


def formula(
    p: Tensor, g: Tensor, s: States, hyper: Any, lr: float | Tensor, step: int | Tensor
) -> tuple[Tensor, States]:
    """Return a parameter and its states after an RMSprop step: the specification of `amp_kernels.rmsprop_`.

    `update_` explains the arguments. The states are `square_avg`, `momentum_buffer` and `grad_avg`.
    """
    v, b, a = s
    assert v is not None
    g = decayed(g, p, hyper.weight_decay)
    v = hyper.alpha * v + hyper.one_minus_alpha * g * g
    variance = v
    if a is not None:
        a = a + hyper.one_minus_alpha * (g - a)
        # Rounding can make the variance negative. torch.optim.RMSprop then takes the root of a negative number, which
        # is NaN. Here a negative variance is replaced by 0.
        variance = (v - a * a).clamp(min=0)
    direction = g / (root(variance) + hyper.eps)
    if b is not None:
        direction = b = hyper.momentum * b + direction
    return p - lr * direction, (v, b, a)
