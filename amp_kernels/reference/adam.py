"""Adam (Kingma and Ba 2015), AdamW (Loshchilov and Hutter 2019) and AMSGrad (Reddi et al. 2018) in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .update import States, decayed, root


def formula(
    p: Tensor, g: Tensor, s: States, hyper: Any, lr: float | Tensor, step: int | Tensor
) -> tuple[Tensor, States]:
    """Return a parameter and its states after an Adam step: the specification of `amp_kernels.adam_`.

    `update_` explains the arguments. The states are `exp_avg`, `exp_avg_sq` and, for AMSGrad, `max_exp_avg_sq`.
    """
    m, v, largest = s
    assert m is not None and v is not None
    if hyper.decoupled_weight_decay == 0:
        g = decayed(g, p, hyper.weight_decay)
    elif hyper.weight_decay != 0:
        p = p - lr * hyper.weight_decay * p
    m = m.lerp(g, hyper.one_minus_beta1)
    v = (1 - hyper.one_minus_beta2) * v + hyper.one_minus_beta2 * g * g
    if largest is not None:
        largest = torch.maximum(largest, v)
    t = torch.as_tensor(step, device=p.device).double() + 1
    correction1, correction2 = ((1 - (1 - x) ** t).float() for x in (hyper.one_minus_beta1, hyper.one_minus_beta2))
    direction = m / (root((v if largest is None else largest) / correction2) + hyper.eps)
    return p - lr / correction1 * direction, (m, v, largest)
