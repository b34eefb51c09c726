"""`torch.optim.RMSprop` in one fused pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..families import RMSPROP
from ._base import FusedOptimizer


class FusedRMSprop(FusedOptimizer, torch.optim.RMSprop):
    """`torch.optim.RMSprop` for fp32, fp16 and bf16 parameters in any mix, in one pass over memory.

    Masters, gradients, scalers, `max_grad_norm` and the errors are those of `FusedSGD`. Where rounding makes the
    centered variance negative it counts as 0; torch gets NaN there.

    Args:
        params: parameters, groups or named parameters, as in torch.
        lr, alpha, eps, weight_decay, momentum, centered, maximize: as in torch.
        capturable, foreach, fused: accepted and ignored; the step is fused and can always be captured.
        differentiable: must be False.
        max_grad_norm: as in `FusedSGD`.
    """

    _family = RMSPROP

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        *,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        if differentiable:
            raise ValueError("FusedRMSprop: differentiable must be False, got True; use torch.optim.RMSprop for that")
        super().__init__(
            params, lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum, centered=centered,
            capturable=capturable, maximize=maximize, max_grad_norm=max_grad_norm, foreach=foreach, fused=fused,
        )  # fmt: skip

    def _state_names(self, group: dict[str, Any]) -> tuple[str | None, ...]:
        return (
            "square_avg",
            "momentum_buffer" if group["momentum"] > 0 else None,
            "grad_avg" if group["centered"] else None,
        )
