"""`torch.optim.SGD` in one fused pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..families import SGD
from ._base import FusedOptimizer


class FusedSGD(FusedOptimizer, torch.optim.SGD):  # type: ignore[override]
    """`torch.optim.SGD` for fp32, fp16 and bf16 parameters in any mix, in one pass over memory.

    A 16-bit parameter is updated in fp32 and gets fp32 state: the parameter is the fp32 `master` rounded to nearest
    even, the rest of it is 16 bits of state, and whoever writes the parameter writes the master. Gradients may have any
    of the three dtypes and are never written. Works under `torch.amp.GradScaler`, faster under
    `amp_kernels.GradScaler`, and without a scaler; a step whose ``found_inf`` is not 0 changes nothing at all. Under
    either scaler a step pre-hook sees gradients as they are, scaled unless ``scaler.unscale_`` was called; a `step`
    that is overridden or wrapped sees them unscaled.

    An optimizer that is created again over 16-bit weights starts from the rounded weights. `fp32_state_dict`, or the
    optimizer's own state dict, keeps the bits below them.

    Args:
        params: parameters, groups or named parameters, as in torch.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch; an fp32 tensor `lr` on the parameters'
            device is read there at every step.
        foreach, fused: accepted and ignored; the step is fused.
        differentiable: must be False.
        max_grad_norm: clip the global L2 norm of the gradients to this inside the step; nothing is written to the
            gradients. The norm before clipping is then ``optimizer.grad_norm``; `math.inf` measures it and clips
            nothing. An option of every parameter group, the same in all. A checkpoint brings its own, as it brings lr.

    Raises:
        ValueError: an argument is out of its range.
        RuntimeError: at the first step, if `max_grad_norm` is set where a rank sees a part of the gradients (DTensor,
            FSDP1, ZeroRedundancyOptimizer), or if parameters share memory.
        TypeError: at the first step, if a parameter is not fp32, fp16 or bf16.
    """

    _family = SGD
    _set_at_first_step = "momentum_buffer"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        if differentiable:
            raise ValueError("FusedSGD: differentiable must be False, got True; use torch.optim.SGD for that")
        super().__init__(
            params, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov,
            maximize=maximize, max_grad_norm=max_grad_norm, foreach=foreach, fused=fused,
        )  # fmt: skip

    def _state_names(self, group: dict[str, Any]) -> tuple[str | None, ...]:
        return ("momentum_buffer" if group["momentum"] != 0 else None,)
