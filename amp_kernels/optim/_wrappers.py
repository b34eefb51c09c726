"""Finds out whether other code wraps an optimizer, or its step. Wrappers have no common mark."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

_OURS = "amp_kernels.optim."  # modules of optimizers that hold no other
_CONTAINERS = list, tuple, dict, set, deque
_DEPTH = 4  # of nested containers; a list may contain itself
_LONG = 256  # entries; a longer container is searched only if it does not begin with a number or a text


def wrapped(optimizer: Any) -> Any:
    """Returns the innermost optimizer in a chain of wrappers. If `optimizer` wraps none, returns `optimizer`.

    If a wrapper holds several optimizers, the chain goes on with the first of them.
    """
    seen = [optimizer]
    while new := _held(seen[-1], seen):
        seen.append(new[0])
    return seen[-1]


def with_wrapped(optimizer: Any) -> list[Any]:
    """Returns `optimizer` and all optimizers that it holds, at any depth."""
    found = [optimizer]
    for holder in found:  # the list grows in the loop
        found += _held(holder, found)
    return found


def innermost(optimizer: Any) -> list[Any]:
    """Returns the optimizers among `with_wrapped` that hold no other one. If `optimizer` holds none, returns it."""
    found = with_wrapped(optimizer)
    return [one for one in found if not _held(one, [one, optimizer])]


def _held(holder: Any, seen: list[Any]) -> list[Any]:
    """Returns the optimizers in attributes of `holder`, of any name, without those in `seen`.

    If `holder` has parameter groups of its own, it steps an optimizer only if that optimizer has at least one parameter
    of these groups.
    """
    if type(holder).__module__.startswith(_OURS):  # also if one refers to its wrapper
        return []
    named = [getattr(holder, name, None) for name in ("optim", "optimizer", "optimizers")]  # may be properties
    values = [*named, *getattr(holder, "__dict__", {}).values()]
    values.sort(key=lambda value: not _is_optimizer(value))  # first those that are in no container
    new: list[Any] = []
    for optimizer in (optimizer for value in values for optimizer in _optimizers_in(value)):
        if all(optimizer is not other for other in (*seen, *new)) and _shares(optimizer, holder):
            new.append(optimizer)
    return new


def _is_optimizer(value: Any) -> bool:
    """Whether `value` is an optimizer, or an object that has a step and parameter groups as one has."""
    if isinstance(value, torch.optim.Optimizer):
        return True
    return callable(getattr(type(value), "step", None)) and hasattr(value, "param_groups")


def _optimizers_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yields `value`, or the optimizers in a list, tuple or dict and in its entries.

    Data (parameters, states, a list of all losses) is left out, since it may have thousands of entries.
    """
    if _is_optimizer(value):
        yield value
    elif isinstance(value, _CONTAINERS) and depth < _DEPTH and not _is_data(value):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _optimizers_in(entry, depth + 1)


def _is_data(value: Any) -> bool:
    plain = (Tensor, int, float, str) if len(value) > _LONG else Tensor
    for _ in range(_DEPTH):
        if not isinstance(value, _CONTAINERS) or not value:
            break
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return isinstance(value, plain)


def _shares(inner: Any, holder: Any) -> bool:
    groups = getattr(holder, "param_groups", None)
    if groups is None or groups is inner.param_groups:
        return True
    params = {id(p) for group in groups for p in group["params"]}
    return any(id(p) in params for group in inner.param_groups for p in group["params"])


def holder_of_more(optimizer: torch.optim.Optimizer) -> Any:
    """Returns an object on the call stack whose own optimizers leave out a part of its parameters, or None.

    An object is taken for a sharding wrapper if its groups have all trainable parameters of `optimizer`, and others
    that none of its own optimizers has. An object that splits its parameters by kind has an optimizer for each kind, so
    it is not found. Frozen parameters do not count.
    """
    mine = _trainable(optimizer.param_groups)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Only methods `step`, since before Python 3.13 `f_locals` keeps the variables of a function until it returns.
        is_step = frame.f_code.co_name == "step" and "self" in frame.f_code.co_varnames[:1]
        holder = frame.f_locals.get("self") if is_step else None
        groups = None
        with contextlib.suppress(Exception):  # `param_groups` may be a property
            groups = getattr(holder, "param_groups", None)
        if holder is not optimizer and mine < (theirs := _trainable(groups)):
            held = (inner for inner in with_wrapped(holder) if inner is not holder)
            if theirs - mine.union(*(_trainable(inner.param_groups) for inner in held)):
                return holder
        frame = frame.f_back
    return None


def _trainable(groups: Any) -> set[int]:
    params = [group.get("params") for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    every = (p for some in params if isinstance(some, list) for p in some)
    return {id(p) for p in every if isinstance(p, Tensor) and p.requires_grad}


def is_in_wrappers_of_torch(step: Any, ours: Any) -> bool:
    """Whether `step` is the function `ours`, and all its wrappers belong to torch (hooks, profiler, schedulers).

    The module of a wrapper is read from its globals, because `functools.wraps` copies everything else from the function
    that it wraps.
    """
    step = getattr(step, "__func__", step)
    while step is not ours and getattr(step, "__globals__", {}).get("__name__", "").startswith("torch."):
        step = getattr(step, "__wrapped__", None)
    return step is ours


def caller(module: str, most: int = sys.maxsize) -> FrameType | None:
    """Returns the innermost function of `module` on the call stack, or None if the `most` last calls have none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        most -= 1
        frame = frame.f_back if most > 0 else None
    return frame
