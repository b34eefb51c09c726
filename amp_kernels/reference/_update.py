"""Functions that all reference optimizers call: read gradients, write masters, skip a step without a device sync."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._master import join, split


def gradient(grad: Tensor, fp32: Tensor, *, weight_decay: float, maximize: bool, grad_scale: Tensor | None) -> Tensor:
    """Return the gradient that the update uses, in fp32.

    If `grad_scale` is given, `grad` is multiplied by its reciprocal. If `maximize` is set, the result is negated.
    ``weight_decay * fp32`` is added last.
    """
    value = grad.float()
    if grad_scale is not None:
        value = value * grad_scale.view(()).float().reciprocal()
    if maximize:
        value = -value
    # torch.add with `alpha` is one fma, which rounds once. The kernels use an fma too. If gradient and decay nearly
    # cancel, a second rounding would be visible.
    return value if weight_decay == 0 else torch.add(value, fp32, alpha=weight_decay)


class Parameter(NamedTuple):
    """A parameter and its master.

    The master of a 16-bit parameter is an fp32 tensor, or the remainder that `_master.split` returns. For an fp32
    parameter `master` is None.
    """

    param: Tensor
    master: Tensor | None

    def fp32(self) -> Tensor:
        """Return the fp32 value that the step updates."""
        if self.master is None:
            return self.param
        return self.master if self.master.dtype is torch.float32 else join(self.param, self.master)

    def assign(self, value: Tensor, found_inf: Tensor | None) -> None:
        """Set the parameter and its master to `value`. A 16-bit parameter is set to the rounded value.

        If the step is skipped (``found_inf != 0``), nothing is changed.
        """
        if self.master is None:
            assign(self.param, value, found_inf)
            return
        weight, remainder = split(value, self.param.dtype)
        assign(self.master, value if self.master.dtype is torch.float32 else remainder, found_inf)
        assign(self.param, weight, found_inf)


def parameters(params: Sequence[Tensor], masters: Sequence[Tensor]) -> Iterator[Parameter]:
    """Pair parameters with their masters. `masters` has an entry for each 16-bit parameter, in order."""
    master = iter(masters)
    return (Parameter(p, None if p.dtype is torch.float32 else next(master)) for p in params)


def assign(target: Tensor, value: Tensor, found_inf: Tensor | None) -> None:
    """Copy `value` to `target`. If the step is skipped (``found_inf != 0``), `target` keeps its value."""
    if found_inf is not None:
        value = torch.where(found_inf.view(()) != 0, target, value)
    target.copy_(value)


def root(x: Tensor) -> Tensor:
    """Return the square root of an fp32 tensor, rounded correctly.

    torch takes fp32 square roots from MKL. On an AMD EPYC they are wrong by one in the last place for a fifth of all
    numbers (torch 2.13).
    """
    return x.double().sqrt().float()
