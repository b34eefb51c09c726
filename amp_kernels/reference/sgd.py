"""SGD in plain torch, with fp32 masters for 16-bit parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._update import assign, gradient, parameters


def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    masters: Sequence[Tensor] = (),
    *,
    lr: float | Tensor,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool | Tensor,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Take one SGD step in plain torch: the specification of `amp_kernels.sgd_`.

    It takes the arguments of `amp_kernels.sgd_`. `is_first_step` may also be a 0-dim bool tensor.

    Examples:
        >>> param = torch.tensor([1.0])
        >>> amp_kernels.reference.sgd_(
        ...     [param], [torch.tensor([2.0])], [], lr=0.25, momentum=0, dampening=0, weight_decay=0, nesterov=False,
        ...     maximize=False, is_first_step=True,
        ... )
        >>> param
        tensor([0.5000])
    """
    rate = lr.view(()).float() if isinstance(lr, Tensor) else lr
    for i, param in enumerate(parameters(params, masters)):
        fp32 = param.fp32()
        g = gradient(grads[i], fp32, weight_decay=weight_decay, maximize=maximize, grad_scale=grad_scale)
        direction = g
        if momentum_buffers and momentum != 0:
            buffer = momentum_buffers[i]
            first = torch.as_tensor(is_first_step, device=g.device)
            buf = torch.where(first, g, momentum * buffer + (1 - dampening) * g)
            direction = g + momentum * buf if nesterov else buf
            assign(buffer, buf, found_inf)
        param.assign(fp32 - rate * direction, found_inf)
