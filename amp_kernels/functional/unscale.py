"""Unscaling, the check for NaN and inf, the norm and clipping, for lists of gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate

from .. import _shards, torch_private
from ..ops import unscale as ops
from ..ops.checks import as_list, check_are_tensors, check_scalar, to_list
from ..ops.library import call, note_written
from ..ops.lists import norm_in_one_call, pass_in_one_call
from ..ops.table import DTYPE_CODES

_LOCAL_TENSOR, _ = torch_private.dtensor_attributes()


def unscale_(grads: Sequence[Tensor], *, inv_scale: Tensor, found_inf: Tensor) -> None:
    """Multiply gradients by `inv_scale` in place, and record whether an element was NaN or inf.

    The product is computed in fp32 and rounded once: `grad <- round(grad * inv_scale)` (loss scaling: Micikevicius et
    al. 2018). Both scalars are keyword-only, because `torch._amp_foreach_non_finite_check_and_unscale_` takes them in
    the opposite order.

    Args:
        grads: fp16, bf16 or fp32 tensors of any sizes and strides, on any devices.
        inv_scale: One fp32 element.
        found_inf: One fp32 element. It becomes 1.0 if a gradient holds NaN or inf before the product. It is never set
            to 0.

    Raises:
        TypeError: A gradient has another dtype or is not a tensor.
        ValueError: A gradient is sparse or expanded, or a scalar is not one fp32 element.

    Examples:
        >>> grads, found_inf = [torch.tensor([2.0, 4.0]), torch.tensor([torch.inf])], torch.zeros(())
        >>> amp_kernels.unscale_(grads, inv_scale=torch.tensor(0.5), found_inf=found_inf)
        >>> grads, found_inf
        ([tensor([1., 2.]), tensor([inf])], tensor(1.))
    """
    grads = to_list("unscale_", "grads", grads)
    if inv_scale is None or not pass_in_one_call(grads, inv_scale, found_inf, None, write=True):
        check_are_tensors("unscale_", inv_scale=inv_scale, found_inf=found_inf)
        grads = as_list("unscale_", "grads", grads)
        check_scalar("unscale_", "inv_scale", inv_scale)
        check_scalar("unscale_", "found_inf", found_inf)
        _on_each_device(ops.unscale_, grads, inv_scale, found_inf)
    note_written(grads, [found_inf])


def grad_norm(grads: Sequence[Tensor], *, inv_scale: Tensor | None = None, found_inf: Tensor | None = None) -> Tensor:
    """Return the L2 norm over all elements of all gradients, in one pass over memory.

    The result is `sqrt(sum((inv_scale * grad)^2))`. Squares are summed in fp32, a few at a time. The fp32 sums are then
    summed in fp64. Elements whose fp32 sum may have overflowed or lost small squares are squared and summed a second
    time, in fp64 or scaled by a power of 2, so that every finite element counts. Not differentiable. The errors are
    those of `unscale_`, but a gradient may be expanded. If there are DTensors on two device meshes, one mesh must have
    all ranks of the other.

    Args:
        grads: fp16, bf16 or fp32 tensors of any sizes and strides, on any devices. They are not changed. If one is a
            DTensor, norm and `found_inf` are those of all ranks of its mesh. These ranks all have to make this call,
            with gradients on the same meshes.
        inv_scale: One fp32 element; None for 1.
        found_inf: One fp32 element, or None. It becomes 1.0 if a gradient holds NaN or inf. It is never set to 0.

    Returns:
        A 0-dim fp32 tensor on the device of the first gradient. It is inf or NaN if a gradient holds inf or NaN, and 0
            for an empty list.

    Examples:
        >>> amp_kernels.grad_norm([torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float16)])
        tensor(5.)
    """
    grads = as_list("grad_norm", "grads", grads)
    norm = norm_in_one_call(grads, inv_scale, found_inf)
    if norm is None and any(isinstance(g, DTensor) for g in grads):
        return _norm_over_ranks(grads, inv_scale, found_inf)
    if norm is None:
        check_scalar("grad_norm", "inv_scale", inv_scale)
        check_scalar("grad_norm", "found_inf", found_inf)
        norms = _on_each_device(ops.grad_norm, grads, inv_scale, found_inf)
        norm = norms[0] if len(norms) == 1 else total_norm(norms) if norms else torch.zeros((), dtype=torch.float32)
    if found_inf is not None:
        note_written([found_inf])
    return norm


def _norm_over_ranks(
    grads: Sequence[Tensor], inv_scale: Tensor | None, found_inf: Tensor | None, absent: Sequence[Tensor] = ()
) -> Tensor:
    """Computes `grad_norm` of DTensors. `absent`: parameters without a gradient on this rank, but perhaps on others."""
    check_scalar("grad_norm", "inv_scale", inv_scale)
    check_scalar("grad_norm", "found_inf", found_inf)
    settled = [_settled(g) if isinstance(g, DTensor) else g for g in grads]
    shards = _shards.of_dtensors([*settled, *absent])
    if shards is None:
        return grad_norm([local(g) for g in settled], inv_scale=inv_scale, found_inf=found_inf)
    shards.check("grad_norm", is_ok_alone=True)
    by_weight: dict[float, list[Tensor]] = {}
    for gradient, weight in zip(settled, shards.weights, strict=False):
        by_weight.setdefault(weight, []).append(local(gradient))
    flag = torch.zeros((), dtype=torch.float32, device=shards.device)
    norms = [
        math.sqrt(weight) * to_device(grad_norm(own, inv_scale=inv_scale, found_inf=flag), shards.device).double()
        for weight, own in by_weight.items()
    ]
    norm = total_norm(norms) if norms else torch.zeros_like(flag)
    shards.add_up_(norm, flag)
    if found_inf is not None:
        found_inf.copy_(torch.where(to_device(flag, found_inf.device).view_as(found_inf) != 0, 1.0, found_inf))
        note_written([found_inf])
    return norm


def _settled(gradient: DTensor) -> DTensor:
    """Returns a gradient whose parts need not be added up over ranks."""
    if not any(placement.is_partial() for placement in gradient.placements):
        return gradient
    return gradient.redistribute(placements=[Replicate() if p.is_partial() else p for p in gradient.placements])


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; any other tensor itself."""
    part: Tensor = tensor
    if isinstance(tensor, DTensor):  # the attribute takes a hundredth of the 3 us of `to_local`
        held: Tensor | None = getattr(tensor, _LOCAL_TENSOR, None)
        part = tensor.to_local() if held is None else held
    return part.wait() if isinstance(part, AsyncCollectiveTensor) else part


def to_device(scalar: Tensor, device: torch.device) -> Tensor:
    """Return `scalar`, or a copy of it on `device`.

    A copy to the CPU waits for the device. Otherwise the host could read the copy before it is complete.
    """
    return scalar if scalar.device == device else scalar.to(device, non_blocking=device.type != "cpu")


def total_norm(norms: Sequence[Tensor]) -> Tensor:
    """Combine the norms of several devices into one, on the device of the first norm. Squares are summed in fp64."""
    device = norms[0].device
    gathered = torch.stack([to_device(norm, device) for norm in norms])
    return torch.linalg.vector_norm(gathered, dtype=torch.float64).float()


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip the L2 norm of gradients in place, as `torch.nn.utils.clip_grad_norm_`, in two fused passes.

    Gradients are multiplied by `min(1, max_norm / (norm + 1e-6))` (Pascanu et al. 2013). The optimizers of
    `amp_kernels.optim` have the option `max_grad_norm`, which clips inside the update and writes no gradient.

    The other arguments are those of `torch.nn.utils.clip_grad_norm_`.

    Args:
        parameters: Tensors with gradients. If there are DTensors, the norm is that of all ranks of their meshes. These
            ranks all have to make this call, even without a gradient.
        norm_type: Type of the norm. `torch.nn.utils.clip_grad_norm_` is called instead of the two passes if this is not
            2, or if a gradient is sparse, of another tensor subclass, or of another dtype than fp16, bf16 and fp32.
        error_if_nonfinite: Raise an error if the norm is NaN or inf. This waits for the device.
        foreach: Passed on to `torch.nn.utils.clip_grad_norm_` if that is called; otherwise unused.

    Returns:
        The norm before clipping, a plain 0-dim tensor.

    Raises:
        RuntimeError: The norm is not finite and `error_if_nonfinite` is True.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([6.0, 8.0])
        >>> amp_kernels.clip_grad_norm_([weight], max_norm=5.0)
        tensor(10.)
        >>> weight.grad.norm().round(decimals=3)
        tensor(5.)
    """
    is_generator = isinstance(parameters, GeneratorType)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if is_generator and not parameters:
        # torch gives this warning too.
        warnings.warn("`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=3)
    grads = [p.grad for p in parameters if p.grad is not None]
    kinds = set(map(type, grads))
    fit = kinds <= {Tensor, DTensor} and all(g.layout is torch.strided and g.dtype in DTYPE_CODES for g in grads)
    is_spread = DTensor in kinds or DTensor in set(map(type, parameters))
    if float(norm_type) != 2.0 or not (grads or is_spread) or not fit:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    if is_spread:
        norm = _norm_over_ranks(grads, None, None, absent=[p for p in parameters if p.grad is None])
        grads = [local(g) for g in grads]
    else:
        norm = grad_norm(grads)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of the gradients must be finite, got {norm.item()}; "
            "pass error_if_nonfinite=False to clip by this norm anyway"
        )
    coefficient = (float(max_norm) / (norm + 1e-6)).clamp(max=1.0)
    unscale_(grads, inv_scale=coefficient, found_inf=torch.zeros_like(norm))
    return norm


def _on_each_device(op: Any, grads: list[Tensor], inv_scale: Tensor | None, found_inf: Tensor | None) -> list[Tensor]:
    """Call the operator once for each device, with the gradients on that device.

    A single call with all gradients is tried first, because they are nearly always on one device.
    """
    if not grads:
        return []
    try:
        return [_on_device(op, grads[0].device, grads, inv_scale, found_inf)]
    except (RuntimeError, TypeError, ValueError):  # several devices, or a bad argument, for which `call` raises below
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
    """Call the operator for gradients on `device`, with copies of the scalars that are on another device."""
    flag = found_inf
    if flag is None or flag.device != device:
        flag = torch.zeros((), dtype=torch.float32, device=device)
    result = op(grads, None if inv_scale is None else to_device(inv_scale, device), flag)
    if found_inf is not None and flag is not found_inf:
        arrived = to_device(flag, found_inf.device).view_as(found_inf)
        found_inf.copy_(torch.where(arrived != 0, arrived, found_inf))
    return result
