"""`torch.optim.Adam` and `torch.optim.AdamW` in one fused pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..families import ADAM
from ._base import FusedOptimizer


class FusedAdam(FusedOptimizer, torch.optim.Adam):  # type: ignore[override]
    """`torch.optim.Adam` for fp32, fp16 and bf16 parameters in any mix, in one pass over memory.

    Masters, gradients, scalers, `max_grad_norm` and the errors are those of `FusedSGD`. The bias correction counts the
    steps that were taken, on the device: a skipped step is none. States are fp32, so that `eps` is not rounded to 0, as
    in fp16 it is.

    Args:
        params: parameters, groups or named parameters, as in torch.
        lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay: as in torch; an fp32 tensor `lr` on the
            parameters' device is read there at every step.
        capturable, foreach, fused: accepted and ignored; the step is fused and can always be captured.
        differentiable: must be False.
        max_grad_norm: as in `FusedSGD`.
    """

    _family = ADAM

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        max_grad_norm: float | None = None,
    ) -> None:
        if differentiable:
            raise ValueError("FusedAdam: differentiable must be False, got True; use torch.optim.Adam for that")
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize,
            capturable=capturable, decoupled_weight_decay=decoupled_weight_decay, max_grad_norm=max_grad_norm,
            foreach=foreach, fused=fused,
        )  # fmt: skip

    def _state_names(self, group: dict[str, Any]) -> tuple[str | None, ...]:
        return "exp_avg", "exp_avg_sq", "max_exp_avg_sq" if group["amsgrad"] else None


class FusedAdamW(FusedOptimizer, torch.optim.AdamW):  # type: ignore[override]
    """`torch.optim.AdamW`: `FusedAdam` with decoupled weight decay (Loshchilov and Hutter 2019)."""

    _family = ADAM

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        if differentiable:
            raise ValueError("FusedAdamW: differentiable must be False, got True; use torch.optim.AdamW for that")
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize,
            capturable=capturable, max_grad_norm=max_grad_norm, foreach=foreach, fused=fused,
        )  # fmt: skip

    _state_names = FusedAdam._state_names
