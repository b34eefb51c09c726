"""What other code has put around an optimizer, or around its step.

Wrappers do not say that they are there, so they are recognized: by the optimizer that they hold, by the module of the
function around a step, and by the functions that wait for the step to return. A scaler needs the first two: a step that
is not ours alone is owed unscaled gradients. `max_grad_norm` needs the third: under ZeroRedundancyOptimizer each rank
would clip by the norm of its part.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def wrapped(optimizer: Any) -> Any:
    """The innermost optimizer that others hold as an attribute, whatever its name.

    torch's wrappers (ZeRO, PostLocalSGD) call it ``optim``, trainers ``optimizer``, Lookahead and SAM
    ``_base_optimizer``, ``base_optimizer`` and more. An attribute counts if it steps parameters of its holder.
    """
    seen = [optimizer]  # one may also refer to its holder
    while True:
        held = (getattr(seen[-1], "optim", None), getattr(seen[-1], "optimizer", None))  # may be properties
        inner = (
            o
            for o in (*held, *getattr(seen[-1], "__dict__", {}).values())
            if isinstance(o, torch.optim.Optimizer) and all(o is not other for other in seen) and _shares(o, seen[-1])
        )
        found = next(inner, None)
        if found is None:
            return seen[-1]
        seen.append(found)


def _shares(inner: torch.optim.Optimizer, holder: Any) -> bool:
    groups = getattr(holder, "param_groups", None)
    if groups is None or groups is inner.param_groups:
        return True
    params = {id(p) for group in groups for p in group["params"]}
    return any(id(p) in params for group in inner.param_groups for p in group["params"])


def is_in_wrappers_of_torch(step: Any, ours: Any) -> bool:
    """Whether `step` is the function `ours` in torch's wrappers alone: hooks, profiler, learning rate schedulers.

    The globals of a wrapper's code tell whose it is; `functools.wraps` copies everything else.
    """
    step = getattr(step, "__func__", step)
    while step is not ours and getattr(step, "__globals__", {}).get("__name__", "").startswith("torch."):
        step = getattr(step, "__wrapped__", None)
    return step is ours


def is_called_by(module: str) -> bool:
    """Whether a function of `module` waits for this one to return."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
