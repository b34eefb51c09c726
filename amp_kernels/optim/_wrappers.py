"""Finds out whether other code wraps an optimizer, or its step.

Wrappers have no common mark, so each kind is found in its own way:

- The wrapper of an optimizer has the optimizer as an attribute (`wrapped`, `with_wrapped`).
- The wrapper of a step is a function. Its module tells whether it belongs to torch (`is_in_wrappers_of_torch`).
- ZeroRedundancyOptimizer is on the call stack (`is_called_by`).

Code around a step expects unscaled gradients. So if `is_in_wrappers_of_torch` returns False, a scaler unscales them
first. `wrapped` finds the optimizer that computes the step, or that keeps the masters. `is_called_by` is used to refuse
`max_grad_norm`, since with ZeroRedundancyOptimizer each rank would clip by the norm of its part.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def wrapped(optimizer: Any) -> Any:
    """Returns the innermost optimizer in a chain of wrappers. If `optimizer` wraps none, returns `optimizer`."""
    return with_wrapped(optimizer)[-1]


def with_wrapped(optimizer: Any) -> list[Any]:
    """Returns `optimizer` and the optimizers that it wraps, the innermost last.

    The attribute that holds an optimizer may have any name. torch's wrappers (ZeRO, PostLocalSGD) call it ``optim``,
    trainers call it ``optimizer``, and Lookahead and SAM call it ``_base_optimizer``, ``base_optimizer`` and more. If
    the wrapper has parameter groups of its own, an optimizer in one of its attributes is followed only if it steps at
    least one parameter of these groups.
    """
    # The chain so far. An optimizer in it is not found again, so the search ends even if an optimizer has its own
    # wrapper as an attribute.
    seen = [optimizer]
    while True:
        held = (getattr(seen[-1], "optim", None), getattr(seen[-1], "optimizer", None))  # may be properties
        inner = (
            o
            for o in (*held, *getattr(seen[-1], "__dict__", {}).values())
            if isinstance(o, torch.optim.Optimizer) and all(o is not other for other in seen) and _shares(o, seen[-1])
        )
        found = next(inner, None)
        if found is None:
            return seen
        seen.append(found)


def _shares(inner: torch.optim.Optimizer, holder: Any) -> bool:
    groups = getattr(holder, "param_groups", None)
    if groups is None or groups is inner.param_groups:
        return True
    params = {id(p) for group in groups for p in group["params"]}
    return any(id(p) in params for group in inner.param_groups for p in group["params"])


def is_in_wrappers_of_torch(step: Any, ours: Any) -> bool:
    """Whether `step` is the function `ours`, and all its wrappers belong to torch (hooks, profiler, schedulers).

    The module of a wrapper is read from its globals, because `functools.wraps` copies everything else from the function
    that it wraps.
    """
    step = getattr(step, "__func__", step)
    while step is not ours and getattr(step, "__globals__", {}).get("__name__", "").startswith("torch."):
        step = getattr(step, "__wrapped__", None)
    return step is ours


def is_called_by(module: str) -> bool:
    """Whether a function of `module` is on the call stack."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
