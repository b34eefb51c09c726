"""Adam, AdamW and AMSGrad in plain torch, with fp32 masters for 16-bit parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._update import assign, gradient, parameters, root


def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor] = (),
    masters: Sequence[Tensor] = (),
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool,
    decoupled_weight_decay: bool,
    steps_taken: int | Tensor,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Take one Adam step in plain torch: the specification of `amp_kernels.adam_`.

    It takes the arguments of `amp_kernels.adam_`. `steps_taken` may also be a 0-dim tensor.

    Examples:
        >>> param, exp_avg, exp_avg_sq = torch.tensor([1.0]), torch.zeros(1), torch.zeros(1)
        >>> amp_kernels.reference.adam_(
        ...     [param], [torch.tensor([2.0])], [exp_avg], [exp_avg_sq], lr=0.25, betas=(0.5, 0.75), eps=0.0,
        ...     weight_decay=0, maximize=False, decoupled_weight_decay=False, steps_taken=0,
        ... )
        >>> param
        tensor([0.7500])
    """
    rate = lr.view(()).float() if isinstance(lr, Tensor) else lr
    l2_decay, decoupled_decay = (0.0, weight_decay) if decoupled_weight_decay else (weight_decay, 0.0)
    for i, param in enumerate(parameters(params, masters)):
        fp32 = param.fp32()
        t = torch.as_tensor(steps_taken, device=fp32.device).double() + 1
        corrections = [(1 - beta**t).float() for beta in betas]
        g = gradient(grads[i], fp32, weight_decay=l2_decay, maximize=maximize, grad_scale=grad_scale)
        exp_avg = exp_avgs[i].lerp(g, 1 - betas[0])
        exp_avg_sq = betas[1] * exp_avg_sqs[i] + (1 - betas[1]) * g * g
        largest = exp_avg_sq
        if max_exp_avg_sqs:
            largest = torch.maximum(max_exp_avg_sqs[i], exp_avg_sq)
            assign(max_exp_avg_sqs[i], largest, found_inf)
        step = exp_avg / (root(largest / corrections[1]) + eps)
        value = fp32 if decoupled_decay == 0 else fp32 - rate * decoupled_decay * fp32
        assign(exp_avgs[i], exp_avg, found_inf)
        assign(exp_avg_sqs[i], exp_avg_sq, found_inf)
        param.assign(value - rate / corrections[0] * step, found_inf)
