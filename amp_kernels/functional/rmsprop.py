"""RMSprop on lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..families import RMSPROP
from .update import update


def rmsprop_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    square_avgs: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] = (),
    grad_avgs: Sequence[Tensor] = (),
    masters: Sequence[Tensor] = (),
    *,
    lr: float | Tensor,
    alpha: float,
    eps: float,
    weight_decay: float,
    momentum: float,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Take one RMSprop step on lists of tensors, with fp32 masters for 16-bit parameters.

    All arithmetic is fp32.

    Formula: `torch.optim.RMSprop` (Hinton 2012; centered: Graves 2013). `g` is the gradient divided by `grad_scale`.

    ```text
    g <- g + weight_decay * p
    v <- alpha * v + (1 - alpha) * g^2
    a <- a + (1 - alpha) * (g - a)                       (only if centered, else a = 0)
    b <- momentum * b + g / (sqrt(v - a^2) + eps)
    p <- p - lr * b
    ```

    If rounding makes `v - a^2` negative, it counts as 0. torch returns NaN there.

    The other arguments are those of `amp_kernels.sgd_`.

    Args:
        square_avgs: `v`, one fp32 tensor per parameter, updated in place. Pass zeros for the first step.
        momentum_buffers: `b`, in the same form as `square_avgs`. If `momentum` is 0, the list is ignored and may be
            empty.
        grad_avgs: `a`, in the same form as `square_avgs`. If they are given, the variance is centered.
        alpha: Decay of the averages.
        eps: Added to the square root in the denominator.

    Raises:
        TypeError: A dtype does not fit. Nothing was modified.
        ValueError: A length, shape or device does not fit. Nothing was modified.

    Examples:
        >>> param, square_avg = torch.tensor([1.0]), torch.zeros(1)
        >>> amp_kernels.rmsprop_(
        ...     [param], [torch.tensor([2.0])], [square_avg], lr=0.25, alpha=0.75, eps=0.0, weight_decay=0, momentum=0,
        ...     maximize=False,
        ... )
        >>> param, square_avg
        (tensor([0.5000]), tensor([1.]))
    """
    options = {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum, "maximize": maximize}
    states = {
        "square_avgs": square_avgs,
        "momentum_buffers": momentum_buffers if momentum != 0 else None,
        "grad_avgs": grad_avgs if len(grad_avgs) > 0 else None,
    }
    update(
        RMSPROP, params, grads, states, masters, options, lr, steps_taken=1, grad_scale=grad_scale, found_inf=found_inf
    )
