"""SGD (Sutskever et al. 2013) in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .update import States, decayed


def formula(
    p: Tensor, g: Tensor, s: States, hyper: Any, lr: float | Tensor, step: int | Tensor
) -> tuple[Tensor, States]:
    """Return a parameter and its momentum buffer after an SGD step: the specification of `amp_kernels.sgd_`.

    `update_` explains the arguments.
    """
    (b,) = s
    g = decayed(g, p, hyper.weight_decay)
    if b is None:
        return p - lr * g, (None,)
    b = torch.where(torch.as_tensor(step, device=g.device) == 0, g, hyper.momentum * b + hyper.one_minus_dampening * g)
    return p - lr * (g + hyper.momentum * b if hyper.nesterov else b), (b,)
