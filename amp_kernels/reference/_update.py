"""What the optimizers' references share: gradients in, masters and weights out, and the skip without a sync."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def gradient(grad: Tensor, fp32: Tensor, *, weight_decay: float, maximize: bool, grad_scale: Tensor | None) -> Tensor:
    """The gradient as the update sees it: fp32, divided by `grad_scale`, negated to maximize, plus decay."""
    value = grad.float()
    if grad_scale is not None:
        value = value * grad_scale.view(()).float().reciprocal()
    if maximize:
        value = -value
    # add(alpha) is one fma: two roundings would show where gradient and decay nearly cancel.
    return value if weight_decay == 0 else torch.add(value, fp32, alpha=weight_decay)


def fp32_parameters(params: Sequence[Tensor], masters: Sequence[Tensor]) -> Iterator[Tensor]:
    """For each parameter the fp32 tensor that is updated: its master, or itself where it is fp32."""
    master = iter(masters)
    return (param if param.dtype == torch.float32 else next(master) for param in params)


def assign(target: Tensor, value: Tensor, found_inf: Tensor | None) -> None:
    """``target <- value`` unless the step is skipped (``found_inf != 0``)."""
    if found_inf is not None:
        value = torch.where(found_inf.view(()) != 0, target, value)
    target.copy_(value)


def write_weight(param: Tensor, fp32: Tensor, found_inf: Tensor | None) -> None:
    """``param <- fp32.to(dtype)``, unless `param` is that tensor or the step is skipped."""
    if param is not fp32:
        assign(param, fp32.to(param.dtype), found_inf)
