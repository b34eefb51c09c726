"""Unscaling of gradients with a check for NaN and inf, and their norm, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def unscale_(grads: Sequence[Tensor], *, inv_scale: Tensor, found_inf: Tensor) -> None:
    """Unscale gradients in plain torch: the specification of `amp_kernels.unscale_`.

    It takes the arguments of `amp_kernels.unscale_`, with all tensors on one device.

    Examples:
        >>> grads, found_inf = [torch.tensor([2.0, 4.0])], torch.zeros(())
        >>> amp_kernels.reference.unscale_(grads, inv_scale=torch.tensor(0.5), found_inf=found_inf)
        >>> grads, found_inf
        ([tensor([1., 2.])], tensor(0.))
    """
    for grad in grads:
        _record_non_finite(grad, found_inf)
        grad.copy_(grad.float() * inv_scale.view(()))


def grad_norm(grads: Sequence[Tensor], *, inv_scale: Tensor | None = None, found_inf: Tensor | None = None) -> Tensor:
    """Return the L2 norm of gradients in plain torch: the specification of `amp_kernels.grad_norm`.

    The squares are summed in fp64. The norm is computed in fp64 and rounded once, to fp32. The function takes the
    arguments of `amp_kernels.grad_norm`, with all tensors on one device.

    Returns:
        A 0-dim fp32 tensor.

    Examples:
        >>> amp_kernels.reference.grad_norm([torch.tensor([3.0, 4.0])])
        tensor(5.)
    """
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
