"""RMSprop in plain torch, with fp32 masters for 16-bit parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ._update import assign, gradient, parameters, root


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
    """Take one RMSprop step in plain torch: the specification of `amp_kernels.rmsprop_`.

    It takes the arguments of `amp_kernels.rmsprop_`.

    Examples:
        >>> param, square_avg = torch.tensor([1.0]), torch.zeros(1)
        >>> amp_kernels.reference.rmsprop_(
        ...     [param], [torch.tensor([2.0])], [square_avg], lr=0.25, alpha=0.75, eps=0.0, weight_decay=0, momentum=0,
        ...     maximize=False,
        ... )
        >>> param
        tensor([0.5000])
    """
    rate = lr.view(()).float() if isinstance(lr, Tensor) else lr
    for i, param in enumerate(parameters(params, masters)):
        fp32 = param.fp32()
        g = gradient(grads[i], fp32, weight_decay=weight_decay, maximize=maximize, grad_scale=grad_scale)
        square_avg = alpha * square_avgs[i] + (1 - alpha) * g * g
        variance = square_avg
        if grad_avgs:
            grad_avg = grad_avgs[i] + (1 - alpha) * (g - grad_avgs[i])
            # Rounding can make the variance negative. torch.optim.RMSprop then takes the root of a negative number,
            # which is NaN. Here a negative variance is replaced by 0.
            variance = (square_avg - grad_avg * grad_avg).clamp(min=0)
            assign(grad_avgs[i], grad_avg, found_inf)
        step = g / (root(variance) + eps)
        if momentum_buffers and momentum != 0:
            step = momentum * momentum_buffers[i] + step
            assign(momentum_buffers[i], step, found_inf)
        assign(square_avgs[i], square_avg, found_inf)
        param.assign(fp32 - rate * step, found_inf)
