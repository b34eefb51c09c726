"""`torch.optim.Adam` and `torch.optim.AdamW` as fused kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..families import ADAM
from ._base import FusedOptimizer


class FusedAdam(FusedOptimizer, torch.optim.Adam):  # type: ignore[override]
    """`torch.optim.Adam` as one fused kernel, with fp32 masters for fp16 and bf16 parameters.

    Formula: `torch.optim.Adam` (Kingma and Ba 2015; AMSGrad: Reddi et al. 2018), in fp32. `amp_kernels.adam_` spells it
    out. The bias correction does not count skipped steps. Masters, gradients, loss scaling and errors are as in
    `FusedSGD`. The other arguments are those of `torch.optim.Adam` and `amp_kernels.optim.FusedSGD`.

    Args:
        capturable: Has no effect. Every step can be captured in a CUDA graph.
        state_dtype: As in `FusedSGD`. With `amsgrad`, the second moments stay fp32, because the maximum of rounded
            numbers would be too large.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        >>> optimizer = amp_kernels.optim.FusedAdam([weight], lr=0.25)
        >>> weight.grad = torch.tensor([3.0, -3.0], dtype=torch.float16)
        >>> optimizer.step()
        >>> weight.data
        tensor([0.7500, 1.2500], dtype=torch.float16)
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
        state_dtype: torch.dtype | str = torch.float32,
    ) -> None:
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize,
            capturable=capturable, decoupled_weight_decay=decoupled_weight_decay, max_grad_norm=max_grad_norm,
            state_dtype=state_dtype, foreach=foreach, fused=fused,
            differentiable=differentiable,
        )  # fmt: skip

    def _state_names(self, group: dict[str, Any]) -> tuple[str | None, ...]:
        return "exp_avg", "exp_avg_sq", "max_exp_avg_sq" if group["amsgrad"] else None


class FusedAdamW(FusedOptimizer, torch.optim.AdamW):  # type: ignore[override]
    """`torch.optim.AdamW` as one fused kernel, with fp32 masters for fp16 and bf16 parameters.

    This is `FusedAdam` with decoupled weight decay (Loshchilov and Hutter 2019). The other arguments are those of
    `torch.optim.AdamW` and `amp_kernels.optim.FusedAdam`.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> optimizer = amp_kernels.optim.FusedAdamW([weight], lr=0.25, weight_decay=0.5)
        >>> weight.grad = torch.tensor([3.0, -3.0], dtype=torch.bfloat16)
        >>> optimizer.step()
        >>> weight.data
        tensor([0.6250, 1.1250], dtype=torch.bfloat16)
    """

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
        state_dtype: torch.dtype | str = torch.float32,
    ) -> None:
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize,
            capturable=capturable, max_grad_norm=max_grad_norm, state_dtype=state_dtype, foreach=foreach, fused=fused,
            differentiable=differentiable,
        )  # fmt: skip

    _state_names = FusedAdam._state_names
