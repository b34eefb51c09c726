"""`torch.optim.RMSprop` in one fused pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .. import reference
from ._base import FusedOptimizer
from ._plan import Hyper


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

    _table_op = "_rmsprop_table_"

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
        super().__init__(params, lr, alpha, eps, weight_decay, momentum, centered, capturable, False, maximize)
        self._setup(max_grad_norm=max_grad_norm, foreach=foreach, fused=fused)

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        return Hyper(
            (
                group["alpha"],
                1 - group["alpha"],
                group["eps"],
                group["weight_decay"],
                -1.0 if group["maximize"] else 1.0,
                group["momentum"],
            ),
            group["lr"],
        )

    def _state_names(self, group: dict[str, Any]) -> tuple[str | None, ...]:
        return (
            "square_avg",
            "momentum_buffer" if group["momentum"] > 0 else None,
            "grad_avg" if group["centered"] else None,
        )

    @staticmethod
    def _reference_step(
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        masters: Sequence[Tensor],
        is_first_step: Tensor,
        hyper: Hyper,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        alpha, _, eps, weight_decay, sign, momentum = hyper.values
        reference.rmsprop_(
            params, grads, states[0], states[1], states[2], masters, lr=hyper.lr, alpha=alpha, eps=eps,
            weight_decay=weight_decay, momentum=momentum, maximize=sign < 0, grad_scale=grad_scale, found_inf=found_inf,
        )  # fmt: skip
