"""`torch.optim.RMSprop` as a fused kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..families import RMSPROP
from ._base import FusedOptimizer


class FusedRMSprop(FusedOptimizer, torch.optim.RMSprop):
    """`torch.optim.RMSprop` as one fused kernel, with fp32 masters for fp16 and bf16 parameters.

    Formula: `torch.optim.RMSprop` (Hinton 2012; centered: Graves 2013), in fp32. `amp_kernels.rmsprop_` spells it out.
    If rounding makes the centered variance negative, 0 is used in its place, where torch returns NaN. Masters,
    gradients, loss scaling and errors are as in `FusedSGD`. The other arguments are those of `torch.optim.RMSprop` and
    `amp_kernels.optim.FusedSGD`.

    Args:
        capturable: Has no effect. Every step can be captured in a CUDA graph.
        state_dtype: As in `FusedSGD`. With `centered`, `square_avg` and `grad_avg` stay fp32, because their difference
            may be small.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> optimizer = amp_kernels.optim.FusedRMSprop([weight], lr=0.25, alpha=0.75)
        >>> weight.grad = torch.tensor([2.0, -2.0], dtype=torch.bfloat16)
        >>> optimizer.step()
        >>> weight.data
        tensor([0.5000, 1.5000], dtype=torch.bfloat16)
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
        state_dtype: torch.dtype | str = torch.float32,
    ) -> None:
        super().__init__(
            params, lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum, centered=centered,
            capturable=capturable, maximize=maximize, max_grad_norm=max_grad_norm, state_dtype=state_dtype,
            foreach=foreach, fused=fused,
            differentiable=differentiable,
        )  # fmt: skip

    def _state_names(self, group: dict[str, Any]) -> tuple[str | None, ...]:
        return (
            "square_avg",
            "momentum_buffer" if group["momentum"] > 0 else None,
            "grad_avg" if group["centered"] else None,
        )
