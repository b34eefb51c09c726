"""`torch.optim.SGD` as a fused kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..families import SGD
from ._base import FusedOptimizer


class FusedSGD(FusedOptimizer, torch.optim.SGD):  # type: ignore[override]
    """`torch.optim.SGD` as one fused kernel, with fp32 masters for fp16 and bf16 parameters.

    Formula: `torch.optim.SGD` (Sutskever et al. 2013), in fp32. `amp_kernels.sgd_` spells it out.

    A 16-bit parameter has an fp32 master (see `master`). Gradients may be fp16, bf16 or fp32, and a step does not write
    them. If a scaler (`amp_kernels.GradScaler`, or `torch.amp.GradScaler`, which is slower) finds NaN or inf, the step
    changes nothing. The guide to optimizers explains masters, clipping, states of 8 bits and steps of your own.

    The other arguments are those of `torch.optim.SGD`.

    Args:
        params: Parameters, parameter groups or named parameters, as in torch: fp32, fp16 and bf16 in any mix.
        lr: Learning rate. An fp32 tensor on the parameters' device is read there at every step.
        foreach: Has no effect.
        differentiable: Must be False.
        fused: Has no effect.
        max_grad_norm: Clip the global L2 norm of the gradients to this value inside the step (Pascanu et al. 2013). The
            gradients are not written. `math.inf` measures the norm (see `grad_norm`) and clips nothing. An option of
            every parameter group, with the same value in all groups.
        state_dtype: How states are stored: in torch.float32, torch.bfloat16 (2 bytes for each element of a state) or
            torch.int8 (1 byte, and an fp32 scale for every 128 elements). A name such as "int8" will do. New states are
            rounded at random. A parameter with fewer than 4,096 elements has fp32 states. In int8,
            `optimizer.state[parameter]` has the keys "momentum_buffer_codes" and "momentum_buffer_scale". An option of
            every parameter group, which `load_state_dict` does not change.

    Raises:
        ValueError: An argument is out of its range.
        TypeError: An argument has a wrong type, or a parameter that requires a gradient is fp64.

    Examples:
        >>> model = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
        >>> optimizer = amp_kernels.optim.FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> model(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["momentum_buffer"].dtype, optimizer.master(model.weight).dtype
        (torch.float32, torch.float32)
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
        state_dtype: torch.dtype | str = torch.float32,
    ) -> None:
        super().__init__(
            params, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov,
            maximize=maximize, max_grad_norm=max_grad_norm, state_dtype=state_dtype, foreach=foreach, fused=fused,
            differentiable=differentiable,
        )  # fmt: skip

    def _state_names(self, group: dict[str, Any]) -> tuple[str | None, ...]:
        return ("momentum_buffer" if group["momentum"] != 0 else None,)
