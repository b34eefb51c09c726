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
    out. Arithmetic is fp32, because in fp16 the default `eps` would be rounded to 0. The bias correction
    does not count skipped steps. The count of steps is kept on the device.

    Masters, gradients, loss scaling and errors are as in `FusedSGD`.

    Args:
        params: Parameters, parameter groups or named parameters, as in torch: fp32, fp16 and bf16 in any mix.
        lr: Learning rate. An fp32 tensor on the parameters' device is read there at every step.
        betas: As in torch.
        eps: As in torch.
        weight_decay: As in torch.
        amsgrad: As in torch.
        foreach: Accepted for compatibility; no effect.
        maximize: As in torch.
        capturable: Accepted for compatibility; every step can be captured in a CUDA graph.
        differentiable: Must be False.
        fused: Accepted for compatibility; no effect.
        decoupled_weight_decay: As in torch.
        max_grad_norm: Clip the global L2 norm of the gradients inside the step, as in `FusedSGD`.
        state_dtype: How states are stored. torch.float32, or torch.bfloat16 (2 bytes for an element of a state), or
            torch.int8 (1 byte and a scale for every 128 elements). An option of every parameter group, as in
            `FusedSGD`.
            With `amsgrad`, the second moments stay fp32: the maximum of rounded numbers would be too large.

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
        if differentiable:
            raise ValueError("FusedAdam: differentiable must be False, got True; use torch.optim.Adam for that")
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize,
            capturable=capturable, decoupled_weight_decay=decoupled_weight_decay, max_grad_norm=max_grad_norm,
            state_dtype=state_dtype, foreach=foreach, fused=fused,
        )  # fmt: skip

    def _state_names(self, group: dict[str, Any]) -> tuple[str | None, ...]:
        return "exp_avg", "exp_avg_sq", "max_exp_avg_sq" if group["amsgrad"] else None


class FusedAdamW(FusedOptimizer, torch.optim.AdamW):  # type: ignore[override]
    """`torch.optim.AdamW` as one fused kernel, with fp32 masters for fp16 and bf16 parameters.

    This is `FusedAdam` with decoupled weight decay (Loshchilov and Hutter 2019). Masters, gradients, loss scaling and
    errors are as in `FusedSGD`.

    Args:
        params: Parameters, parameter groups or named parameters, as in torch: fp32, fp16 and bf16 in any mix.
        lr: Learning rate. An fp32 tensor on the parameters' device is read there at every step.
        betas: As in torch.
        eps: As in torch.
        weight_decay: As in torch.
        amsgrad: As in torch.
        foreach: Accepted for compatibility; no effect.
        maximize: As in torch.
        capturable: Accepted for compatibility; every step can be captured in a CUDA graph.
        differentiable: Must be False.
        fused: Accepted for compatibility; no effect.
        max_grad_norm: Clip the global L2 norm of the gradients inside the step, as in `FusedSGD`.
        state_dtype: How states are stored. torch.float32, or torch.bfloat16 (2 bytes for an element of a state), or
            torch.int8 (1 byte and a scale for every 128 elements). An option of every parameter group, as in
            `FusedSGD`.
            With `amsgrad`, the second moments stay fp32: the maximum of rounded numbers would be too large.

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
        if differentiable:
            raise ValueError("FusedAdamW: differentiable must be False, got True; use torch.optim.AdamW for that")
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize,
            capturable=capturable, max_grad_norm=max_grad_norm, state_dtype=state_dtype, foreach=foreach, fused=fused,
        )  # fmt: skip

    _state_names = FusedAdam._state_names
