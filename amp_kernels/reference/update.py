"""The loop over parameters that all optimizers share, in plain torch: masters, gradients, skipped steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ._master import join, split

States: TypeAlias = tuple[Tensor | None, ...]


def update_(
    formula: Callable[..., tuple[Tensor, States]],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor] | None],
    masters: Sequence[Tensor],
    hyper: Any,
    *,
    lr: float | Tensor,
    steps_taken: int | Tensor,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update lists of parameters by a formula: the specification of `sgd_`, `rmsprop_` and `adam_` of `amp_kernels`.

    Nothing waits for the device, so every choice that depends on its values is a `torch.where`. The other arguments are
    those of `amp_kernels.sgd_`.

    Args:
        formula: The function `formula` of the module `sgd`, `rmsprop` or `adam`. It is called for each parameter:
            ``p, s = formula(p, g, s, hyper, lr, step)``. `p` is the fp32 parameter or master. `g` is the fp32 gradient,
            unscaled, and negated if `hyper.sign` is -1. `s` is the tuple of fp32 states, with None for an absent one.
            `step` is the number of earlier steps.
        states: For each state of the formula, a list of fp32 tensors, updated in place. None or an empty list if the
            state is absent.
        hyper: The hyper-parameters of the formula, from `amp_kernels.families`.
        steps_taken: Number of earlier steps, an int or a 0-dim tensor.

    Examples:
        >>> param, grad = torch.tensor([1.0]), torch.tensor([2.0])
        >>> sgd = amp_kernels.families.SGD
        >>> hyper = sgd.hyper(momentum=0, one_minus_dampening=1, weight_decay=0, nesterov=False, sign=1)
        >>> amp_kernels.reference.update_(sgd.formula, [param], [grad], [None], [], hyper, lr=0.25, steps_taken=0)
        >>> param
        tensor([0.5000])
    """
    rate = lr.view(()).float() if isinstance(lr, Tensor) else lr
    rest = iter(masters)
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        master = None if param.dtype is torch.float32 else next(rest)
        g = grad.float()
        if grad_scale is not None:
            g = g * grad_scale.view(()).float().reciprocal()
        own = tuple(state[i] if state else None for state in states)
        value, new = formula(fp32(param, master), -g if hyper.sign < 0 else g, own, hyper, rate, steps_taken)
        for state, after in zip(own, new, strict=True):
            if state is not None and after is not None:
                assign(state, after, found_inf)
        if master is None:
            assign(param, value, found_inf)
        else:
            weight, remainder = split(value, param.dtype)
            assign(master, value if master.dtype is torch.float32 else remainder, found_inf)
            assign(param, weight, found_inf)


def fp32(param: Tensor, master: Tensor | None) -> Tensor:
    """Return the fp32 value of a parameter, whose master is None, an fp32 tensor or an int16 remainder."""
    if master is None:
        return param
    return master if master.dtype is torch.float32 else join(param, master)


def assign(target: Tensor, value: Tensor, found_inf: Tensor | None) -> None:
    """Copy `value` to `target`. If the step is skipped (``found_inf != 0``), `target` keeps its value."""
    if found_inf is not None:
        value = torch.where(found_inf.view(()) != 0, target, value)
    target.copy_(value)


def decayed(g: Tensor, p: Tensor, weight_decay: float) -> Tensor:
    """Return ``g + weight_decay * p``.

    torch.add with `alpha` is one fma, which rounds once. The kernels use an fma too. If gradient and decay nearly
    cancel, a second rounding would be visible.
    """
    return g if weight_decay == 0 else torch.add(g, p, alpha=weight_decay)


def root(x: Tensor) -> Tensor:
    """Return the square root of an fp32 tensor, rounded correctly.

    torch takes fp32 square roots from MKL. On an AMD EPYC they are wrong by one in the last place for a fifth of all
    numbers (torch 2.13).
    """
    return x.double().sqrt().float()
