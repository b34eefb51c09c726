"""Unscale-and-check and the gradient norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def unscale_(grads: Sequence[Tensor], *, inv_scale: Tensor, found_inf: Tensor) -> None:
    """``grad <- round(grad * inv_scale)``; ``found_inf <- 1`` if an element was NaN or inf, else left as it is."""
    for grad in grads:
        _record_non_finite(grad, found_inf)
        grad.copy_(grad.float() * inv_scale.view(()))


def grad_norm(grads: Sequence[Tensor], *, inv_scale: Tensor | None = None, found_inf: Tensor | None = None) -> Tensor:
    """``sqrt(sum((grad * inv_scale)^2))`` over all elements, in fp64, rounded once to a 0-dim fp32 tensor."""
    device = grads[0].device if grads else None
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        if found_inf is not None:
            _record_non_finite(grad, found_inf)
        total = total + grad.double().square().sum()
    norm = total.sqrt()
    return (norm if inv_scale is None else norm * inv_scale.view(())).float()


def _record_non_finite(grad: Tensor, found_inf: Tensor) -> None:
    found_inf.copy_(torch.where(grad.isfinite().all(), found_inf, torch.ones_like(found_inf)))
