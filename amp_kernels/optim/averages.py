"""Averages of weights in fp32: over the steps of a training (`ema_`), or over models (`average_`, `greedy_soup`)."""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
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
from .weights import _check_arguments, _with_masters

# With these options, an SGD step computes average - lr * (average - weight). The average is passed as the parameter,
# and the weight as the gradient.
_FOLLOW = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 1.0, "nesterov": False, "maximize": True}


@torch.compiler.disable
@torch.no_grad()
def ema_(averages: Iterable[Tensor], optimizer: FusedOptimizer, decay: float) -> None:
    """Move fp32 averages of the weights towards the masters of an optimizer.

    For every parameter: `average <- decay * average + (1 - decay) * master`. Call it after each step.

    If a scaler skipped the last step, the averages do not change. The device decides this, so the host does not wait.
    If other code overrides or wraps the optimizer's step, or holds the optimizer, `torch.amp.GradScaler` does not tell
    the optimizer about a skipped step. `ema_` then looks for NaN and inf in the gradients, so call it before
    `zero_grad`. `step_was_skipped` says when it cannot see them.

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
        _follow(followers, leaders, remainders, 1 - decay, optimizer._verdict())
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

    While it runs, the fp32 mean takes 4 bytes per weight. `greedy_soup` leaves all models as they are.

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
        _check_same("average_", first, values, i)
    names = _untied(first)
    means = [first[name].to(_sum_dtype(first[name]), copy=True) for name in names]
    for count, values in enumerate(others, 2):
        theirs = [values[name].to(mean.device) for name, mean in zip(names, means, strict=True)]
        quick = [t for t, mean in enumerate(means) if mean.dtype is torch.float32 and theirs[t].dtype in DTYPE_CODES]
        _follow([means[t] for t in quick], [theirs[t] for t in quick], [None] * len(quick), 1 / count, None)
        for t in set(range(len(means))) - set(quick):
            means[t].lerp_(theirs[t].to(means[t].dtype), 1 / count)
    for name, mean in zip(names, means, strict=True):
        first[name].copy_(mean)
    return models[0]


def greedy_soup(
    models: Iterable[torch.nn.Module | tuple[torch.nn.Module, torch.optim.Optimizer]],
    metric: Callable[[torch.nn.Module], float],
) -> tuple[torch.nn.Module, list[int]]:
    """Average those of several models that make the average better, a "greedy soup" (Wortsman et al. 2022, recipe 1).

    The models are sorted by `metric`, the best first, and the best one is the first soup. Then each model is tried in
    this order: it is added to the soup if the metric of the mean does not fall. If `metric` is deterministic, the
    soup is therefore at least as good as the best model.

    If a model comes with its optimizer, the fp32 masters are averaged in place of 16-bit weights. A model and its
    optimizer are one entry of the list, so that models without an optimizer need no placeholder.

    No model is changed. Each model and each soup is evaluated in one copy of the first model, which is also the result.
    The mean is computed in fp32 (fp64 for fp64 tensors) and rounded once, to the dtype of the first model. Integers and
    other entries of the state dict are those of the best model.

    Memory: 4 bytes per weight for the fp32 sum, and one copy of the first model (2 bytes per weight if it is in bf16),
    however many models there are. `average_` takes the 4 bytes only, and overwrites its first model. `metric` is called
    `2 * len(models) - 1` times.

    Args:
        models: Models, or pairs of a model and the optimizer that trains it, whose state dicts have the same names and
            shapes. Dtypes and devices may differ. The first model must be one that `copy.deepcopy` can copy.
        metric: A function of a model that returns a number, such as the accuracy on validation data. Higher is better.
            The training mode of the model is that of the first model, so the function should call `model.eval()`.

    Returns:
        The soup, a new model, and the positions of its ingredients in `models`, in the order in which they were added.

    Raises:
        TypeError: An entry is neither a model nor a pair of a model and an optimizer, the optimizer is a wrapper around
            a fused optimizer, `metric` is not callable, or it did not return a number.
        ValueError: There is no model, names or shapes differ, or `metric` returned NaN.
        RuntimeError: The state dict of a model contains other tensors in place of parameters that have masters.

    Examples:
        >>> models = [torch.nn.Linear(1, 1, bias=False) for _ in range(3)]
        >>> for model, value in zip(models, [1.0, 4.0, 9.0]):
        ...     _ = torch.nn.init.constant_(model.weight, value)
        >>> soup, members = amp_kernels.optim.greedy_soup(models, lambda model: -abs(model.weight.item() - 3.0))
        >>> soup.weight.item(), members  # 4 is the best; with 1 it would be 2.5, with 9 it would be 6.5
        (2.5, [1, 0])
    """
    entries = [entry if isinstance(entry, (tuple, list)) else (entry,) for entry in models]
    for i, entry in enumerate(entries):
        if not 1 <= len(entry) <= 2 or not isinstance(entry[0], torch.nn.Module):
            got = kind(entry[0]) if len(entry) == 1 else f"({', '.join(map(kind, entry))})"
            raise TypeError(
                f"greedy_soup: models[{i}] must be a torch Module, or a pair of a Module and its optimizer, got {got}"
            )
    if not entries:
        raise ValueError("greedy_soup: models must contain at least one model, got none")
    if not callable(metric):
        raise TypeError(f"greedy_soup: metric must be a function of a model, got {kind(metric)}")
    ingredients = [_Ingredient(f"greedy_soup: models[{i}]", *entry) for i, entry in enumerate(entries)]
    for i, ingredient in enumerate(ingredients[1:], 1):
        _check_same("greedy_soup", ingredients[0].numbers, ingredient.numbers, i)

    soup = copy.deepcopy(ingredients[0].model)
    targets = _numbers(soup)
    names = _untied(targets)
    singles = []
    for i, ingredient in enumerate(ingredients):
        soup.load_state_dict(ingredient.model.state_dict())
        singles.append(_score(metric, soup, f"models[{i}]"))
    best, *others = sorted(range(len(ingredients)), key=lambda i: -singles[i])  # stable: equals stay in their order

    sums = {name: torch.zeros_like(targets[name], dtype=_sum_dtype(targets[name])) for name in names}
    members: list[int] = []

    def fill(added: _Ingredient | None = None) -> None:
        soup.load_state_dict(ingredients[best].model.state_dict())  # what is not averaged; `metric` may have changed it
        with torch.no_grad():
            for name, total in sums.items():
                more = 0 if added is None else added.value(name).to(total)
                targets[name].copy_((total + more) / (len(members) + (added is not None)))

    def add(i: int) -> None:
        members.append(i)
        with torch.no_grad():
            for name, total in sums.items():
                total.add_(ingredients[i].value(name).to(total))

    add(best)
    score = singles[best]
    for i in others:
        fill(ingredients[i])
        tried = _score(metric, soup, f"the mean of models {[*members, i]}")
        if tried >= score:
            score = tried
            add(i)
    fill()
    return soup, members


class _Ingredient:
    """A model and, if an optimizer keeps some, its masters."""

    def __init__(self, caller: str, model: torch.nn.Module, optimizer: Any = None) -> None:
        self.model, self.numbers = model, _numbers(model)
        self._optimizer = None if optimizer is None else _check_arguments(caller, model, optimizer)
        self._with_masters: dict[str, Tensor] = {}
        if self._optimizer is not None:
            entries = model.state_dict(keep_vars=True)
            params = _with_masters(caller, self._optimizer, model, entries)
            self._with_masters = {name: params[id(v)][1] for name, v in entries.items() if id(v) in params}

    def value(self, name: str) -> Tensor:
        param = self._with_masters.get(name)
        if param is None or self._optimizer is None:
            return self.numbers[name]
        return local(self._optimizer._master(name, param))


def _score(metric: Callable[[torch.nn.Module], float], model: torch.nn.Module, what: str) -> float:
    value: Any = metric(model)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"greedy_soup: metric must return a number, got {kind(value)} for {what}")
    if math.isnan(value):
        raise ValueError(f"greedy_soup: metric must return a number to sort by, got NaN for {what}")
    return float(value)


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _untied(entries: dict[str, Tensor]) -> list[str]:
    """Returns one name for each tensor. A tied tensor has several, of which the first is taken."""
    return list({id(value): name for name, value in reversed(entries.items())}.values())


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


def _check_same(caller: str, first: dict[str, Tensor], other: dict[str, Tensor], index: int) -> None:
    differing = next(iter(sorted(first.keys() ^ other.keys())), None)
    if differing is not None:
        raise ValueError(
            f"{caller}: models[{index}] must have the entries of models[0], but only one of them has {differing}"
        )
    for name, value in first.items():
        if other[name].shape != value.shape:
            raise ValueError(
                f"{caller}: {name} of models[{index}] must have shape {tuple(value.shape)} as in models[0], got "
                f"{tuple(other[name].shape)}"
            )
