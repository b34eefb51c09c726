"""The gradient pass over lists: unscaling, the check for NaN and inf, the norm, clipping.

Lists may mix fp16, bf16 and fp32, hold empty tensors and views of any strides, and span devices. Nothing here waits for
a device.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor

from ..ops import unscale as ops
from ..ops.checks import as_list, check_scalar
from ..ops.library import call, note_written
from ..ops.table import DTYPE_CODES


def unscale_(grads: Sequence[Tensor], *, inv_scale: Tensor, found_inf: Tensor) -> None:
    """Multiplies gradients by `inv_scale` in place and records whether an element was NaN or inf.

    Both scalars are keyword-only: torch's ``_amp_foreach_non_finite_check_and_unscale_`` has them the other way round.

    Args:
        grads: fp16, bf16 or fp32 tensors of any strides, on any devices. The product is taken in fp32 and rounded once.
        inv_scale: one fp32 element.
        found_inf: one fp32 element; becomes 1.0 if an element (before scaling) is NaN or inf, and is never cleared.

    Raises:
        TypeError, ValueError: a tensor has another dtype, is sparse or expanded; a scalar is not one fp32 element.
    """
    grads = as_list("unscale_", "grads", grads)
    _check_scalars("unscale_", inv_scale, found_inf)
    _on_each_device(ops.unscale_, grads, inv_scale, found_inf)
    note_written(grads, [found_inf])


def grad_norm(grads: Sequence[Tensor], *, inv_scale: Tensor | None = None, found_inf: Tensor | None = None) -> Tensor:
    """L2 norm of ``inv_scale * grads`` over all elements, in one read; nothing but `found_inf` is written.

    Squares are added in fp32 a few at a time and in fp64 from there on; where they overflow or vanish in fp32 they are
    taken in fp64, so elements up to the largest of their dtype give the right norm. Not differentiable.

    Args:
        grads: fp16, bf16 or fp32 tensors of any strides, on any devices.
        inv_scale: one fp32 element, or None for 1.
        found_inf: one fp32 element or None; becomes 1.0 if an element is NaN or inf, and is never cleared.

    Returns:
        0-dim fp32 tensor on the device of the first gradient; inf or NaN if an element is. 0 for an empty list.

    Raises:
        TypeError, ValueError: as `unscale_`.
    """
    grads = as_list("grad_norm", "grads", grads)
    _check_scalars("grad_norm", inv_scale, found_inf)
    norms = _on_each_device(ops.grad_norm, grads, inv_scale, found_inf)
    if found_inf is not None:
        note_written([found_inf])
    if not norms:
        return torch.zeros((), dtype=torch.float32)
    return norms[0] if len(norms) == 1 else total_norm(norms)


def moved(scalar: Tensor, device: torch.device) -> Tensor:
    """`scalar` on `device`; waits only where it is the host that reads it, which an asynchronous copy would race."""
    return scalar if scalar.device == device else scalar.to(device, non_blocking=device.type != "cpu")


def total_norm(norms: Sequence[Tensor]) -> Tensor:
    """The norm over devices from a norm a device, on the first one's; nothing overflows that the result does not."""
    device = norms[0].device
    gathered = torch.stack([moved(norm, device) for norm in norms])
    return torch.linalg.vector_norm(gathered, dtype=torch.float64).float()


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` with the norm taken in one fused read and the scaling in one fused pass.

    Gradients are multiplied by ``min(1, max_norm / (norm + 1e-6))``. For training use ``max_grad_norm`` of our
    optimizers instead: it clips inside the update and writes no gradient.

    Args:
        parameters: tensors, or one; those without a gradient are passed over. A generator that yields nothing, since it
            was used before, gives torch's warning.
        max_norm: the norm to clip to.
        norm_type: other norms than 2 are left to torch.
        error_if_nonfinite: raise RuntimeError if the norm is NaN or inf (waits for the device).
        foreach: passed to torch for other norms; without a meaning here.

    Returns:
        The norm before clipping, a 0-dim tensor.
    """
    is_generator = isinstance(parameters, GeneratorType)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if is_generator and not parameters:
        warnings.warn("`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=3)  # torch's
    grads = [p.grad for p in parameters if p.grad is not None]
    ours = all(type(g) is Tensor and g.layout is torch.strided and g.dtype in DTYPE_CODES for g in grads)
    if float(norm_type) != 2.0 or not grads or not ours:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    norm = grad_norm(grads)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of the gradients must be finite, got {norm.item()}; "
            "pass error_if_nonfinite=False to clip by it"
        )
    coefficient = (float(max_norm) / (norm + 1e-6)).clamp(max=1.0)
    unscale_(grads, inv_scale=coefficient, found_inf=torch.zeros_like(norm))
    return norm


def _check_scalars(op: str, inv_scale: Tensor | None, found_inf: Tensor | None) -> None:
    check_scalar(op, "inv_scale", inv_scale)
    check_scalar(op, "found_inf", found_inf)


def _on_each_device(op: Any, grads: list[Tensor], inv_scale: Tensor | None, found_inf: Tensor | None) -> list[Tensor]:
    """Results of the operator for the gradients of each device; nearly always there is one."""
    if not grads:
        return []
    try:
        return [_on_device(op, grads[0].device, grads, inv_scale, found_inf)]
    except (RuntimeError, TypeError, ValueError):  # several devices, or something does not fit
        groups = _by_device(grads).items()
    return [_on_device(partial(call, op), device, group, inv_scale, found_inf) for device, group in groups]


def _by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return groups


def _on_device(
    op: Any, device: torch.device, grads: list[Tensor], inv_scale: Tensor | None, found_inf: Tensor | None
) -> Tensor:
    """The result of the operator with the scalars on `device`."""
    flag = found_inf
    if flag is None or flag.device != device:
        flag = torch.zeros((), dtype=torch.float32, device=device)
    result = op(grads, None if inv_scale is None else moved(inv_scale, device), flag)
    if found_inf is not None and flag is not found_inf:
        arrived = moved(flag, found_inf.device).view_as(found_inf)
        found_inf.copy_(torch.where(arrived != 0, arrived, found_inf))
    return result
