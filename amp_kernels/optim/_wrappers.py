"""The optimizer inside of an optimizer."""

from __future__ import annotations

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
