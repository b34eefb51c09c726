"""Averages of weights in fp32, over the steps of a training (`ema_`) or over several models (`average_`)."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..families import SGD
from ..functional.unscale import to_device
from ..functional.update import update
from ..ops.checks import as_list, check_memory, check_same_shapes, check_states, check_tensors
from ..ops.table import DTYPE_CODES
from ._base import FusedOptimizer
from ._tensors import has_memory, kind, local
from ._wrappers import wrapped

# With these options, an SGD step computes average - lr * (average - weight). The average is passed as the parameter,
# and the weight as the gradient.
_FOLLOW = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 1.0, "nesterov": False, "maximize": True}


@torch.compiler.disable
@torch.no_grad()
def ema_(averages: Iterable[Tensor], optimizer: FusedOptimizer, decay: float) -> None:
    """Move fp32 averages of the weights towards the masters of an optimizer.

    For every parameter: `average <- decay * average + (1 - decay) * master`. Call it after each step.

    If a scaler skipped the last step, the averages do not change. The device decides this, so the host does not wait.
    There is one exception. If the optimizer's `step` is overridden, or wrapped by code outside of torch, `ema_` does
    not notice that `torch.amp.GradScaler` skipped a step, and changes the averages.

    A call reads 8 bytes and writes 4 bytes per weight, in one launch per combination of dtypes. The kernel computes
    `average - (1 - decay) * (average - master)`. With a decay of 0 the last bits of the average may therefore differ
    from those of the master.

    Args:
        averages: One fp32 tensor per parameter, in the order of the optimizer's groups, with the shape, the device and
            the DTensor placements of the parameter. Start with `[optimizer.master(p) for p in params]`. If the
            optimizer cannot train a parameter, for example an integer tensor, its average does not change.
        optimizer: An optimizer of `amp_kernels.optim`.
        decay: From 0 to 1, for example 0.9999.

    Raises:
        TypeError: `optimizer` is not from `amp_kernels.optim`, `decay` is not a number, or an average is not fp32.
            Nothing was modified.
        ValueError: `decay` is out of range, or the averages do not fit the parameters. Nothing was modified.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
        >>> optimizer = amp_kernels.optim.FusedSGD([weight], lr=1.0)
        >>> averages = [optimizer.master(weight)]
        >>> weight.grad = -torch.ones_like(weight)
        >>> optimizer.step()
        >>> amp_kernels.optim.ema_(averages, optimizer, decay=0.75)
        >>> averages
        [tensor([0.2500, 0.2500])]
    """
    if not isinstance(optimizer, FusedOptimizer):
        inner = wrapped(optimizer)
        hint = "for other optimizers use torch.optim.swa_utils"
        if isinstance(inner, FusedOptimizer):
            hint = "pass the optimizer that it wraps"
        got = type(optimizer).__name__
        raise TypeError(f"ema_: optimizer must be one of amp_kernels.optim, got a {got}; {hint}")
    is_number = isinstance(decay, numbers.Real) and not isinstance(decay, bool)
    if not is_number or not 0 <= decay <= 1:
        raise (ValueError if is_number else TypeError)(f"ema_: decay must be a number from 0 to 1, got {decay!r}")
    params = [p for _, _, p in optimizer._named_parameters()]
    own, weights = [local(a) for a in as_list("ema_", "averages", averages)], [local(p) for p in params]
    trainable = [t for t, p in enumerate(params) if p.dtype in DTYPE_CODES and has_memory(p)]
    if len(own) != len(params):
        check_same_shapes("ema_", "averages", own, weights)  # raises
    followers, leaders = [own[t] for t in trainable], [weights[t] for t in trainable]
    remainders = [optimizer._remainder_of(params[t]) for t in trainable]
    try:
        _follow(followers, leaders, remainders, 1 - decay, optimizer._last_found_inf)
    except (RuntimeError, TypeError, ValueError):  # C++ does not say which argument is wrong
        check_same_shapes("ema_", "averages", own, weights)
        _check(followers, leaders)
        raise


@torch.no_grad()
def average_(models: Iterable[torch.nn.Module]) -> torch.nn.Module:
    """Average the weights of several models into the first of them, a "model soup" (Wortsman et al. 2022).

    Floating-point parameters and buffers are averaged in fp32, or in fp64 if the tensor of the first model is fp64.
    Complex parameters and buffers are averaged in complex64, or in complex128 if the tensor of the first model is
    complex128. Each mean is rounded to the dtype of the tensor in the first model. Integers keep the values of the
    first model.

    If an optimizer trains the first model, its masters follow the new weights. The master of a 16-bit parameter is then
    within half a unit in the last place (of 16 bits) of the rounded mean, but it is not the mean of the masters. To
    average the masters themselves, load the `fp32_state_dict` of each model into an fp32 copy, average the copies, and
    load the mean with `load_fp32_state_dict`.

    Args:
        models: Models whose state dicts have the same names and shapes. Dtypes and devices may differ. The first model
            is changed.

    Returns:
        The first model.

    Raises:
        TypeError: One of the models is not an `nn.Module`.
        ValueError: There is no model, or names or shapes differ. Nothing was modified.

    Examples:
        >>> models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
        >>> for model, value in zip(models, [1.0, 2.0]):
        ...     _ = torch.nn.init.constant_(model.weight, value)
        >>> amp_kernels.optim.average_(models).weight.item()
        1.5
    """
    models = list(models)
    for i, model in enumerate(models):
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"average_: models[{i}] must be a torch Module, got {kind(model)}")
    if not models:
        raise ValueError("average_: models must contain at least one model, got none")
    first, *others = (_numbers(model) for model in models)
    for i, values in enumerate(others, 1):
        _check_same(first, values, i)
    names = list({id(value): name for name, value in reversed(first.items())}.values())  # one name per tied tensor
    means = [first[name].to(torch.promote_types(first[name].dtype, torch.float32), copy=True) for name in names]
    for count, values in enumerate(others, 2):
        theirs = [values[name].to(mean.device) for name, mean in zip(names, means, strict=True)]
        quick = [t for t, mean in enumerate(means) if mean.dtype is torch.float32 and theirs[t].dtype in DTYPE_CODES]
        _follow([means[t] for t in quick], [theirs[t] for t in quick], [None] * len(quick), 1 / count, None)
        for t in set(range(len(means))) - set(quick):
            means[t].lerp_(theirs[t].to(means[t].dtype), 1 / count)
    for name, mean in zip(names, means, strict=True):
        first[name].copy_(mean)
    return models[0]


def _check(averages: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    check_states("ema_", "averages", averages, weights, [torch.float32])
    check_memory("ema_", {"averages": averages})
    check_tensors("ema_", "the optimizer's parameters", weights)


def _follow(
    averages: Sequence[Tensor],
    weights: Sequence[Tensor],
    remainders: Sequence[Tensor | None],
    rate: float,
    found_inf: Tensor | None,
) -> None:
    """Moves each fp32 average towards its weight by the fraction `rate` of their difference.

    If the weight has a remainder, the average moves towards the master of the weight.
    """
    by_device: dict[torch.device, list[int]] = {}
    for t, weight in enumerate(weights):
        by_device.setdefault(weight.device, []).append(t)
    if len(by_device) > 1:  # before the averages on the first device are modified
        _check(averages, weights)
    for device, members in by_device.items():
        kept = [r for t in members if (r := remainders[t]) is not None]
        update(
            SGD, [averages[t] for t in members], [weights[t] for t in members], {"momentum_buffers": None}, (), _FOLLOW,
            rate, steps_taken=0, grad_scale=None, found_inf=None if found_inf is None else to_device(found_inf, device),
            grad_remainders=kept or None,
        )  # fmt: skip


def _numbers(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns the entries of the state dict that can be averaged: floating-point and complex tensors."""
    entries: dict[str, Any] = model.state_dict(keep_vars=True)
    tensors = {name: local(value) for name, value in entries.items() if isinstance(value, Tensor)}
    return {name: t for name, t in tensors.items() if t.is_floating_point() or t.is_complex()}


def _check_same(first: dict[str, Tensor], other: dict[str, Tensor], index: int) -> None:
    differing = next(iter(sorted(first.keys() ^ other.keys())), None)
    if differing is not None:
        raise ValueError(
            f"average_: models[{index}] must have the entries of models[0], but only one of them has {differing}"
        )
    for name, value in first.items():
        if other[name].shape != value.shape:
            raise ValueError(
                f"average_: {name} of models[{index}] must have shape {tuple(value.shape)} as in models[0], got "
                f"{tuple(other[name].shape)}"
            )
