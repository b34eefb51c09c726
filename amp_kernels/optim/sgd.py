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

    **Masters.** A 16-bit parameter has an fp32 master. The parameter is the master rounded to nearest even. Another 16
    bits per element, in the state, hold the rest of the master (see `master`). If other code changes the parameter, the
    master changes with it. A new optimizer over 16-bit weights starts from the rounded weights. To keep the full
    masters, use `fp32_state_dict` or the optimizer's own state dict.

    **Gradients.** They may be fp16, bf16 or fp32. A step does not write them.

    **Loss scaling.** Use `amp_kernels.GradScaler`, `torch.amp.GradScaler` (slower), or no scaler. If a scaler finds NaN
    or inf (its `found_inf` is not 0), the step changes nothing. In a step pre-hook the gradients are still scaled. To
    get them unscaled there, call `scaler.unscale_` before `scaler.step`. If `step` is overridden, or wrapped by code
    outside of torch, the scaler unscales the gradients before it calls `step`.

    The other arguments are those of `torch.optim.SGD`.

    Args:
        params: Parameters, parameter groups or named parameters, as in torch: fp32, fp16 and bf16 in any mix.
        lr: Learning rate. An fp32 tensor on the parameters' device is read there at every step.
        foreach: Has no effect.
        differentiable: Must be False.
        fused: Has no effect.
        max_grad_norm: Clip the global L2 norm of the gradients to this value inside the step (Pascanu et al. 2013). The
            gradients are not written. After the step, the optimizer's `grad_norm` is the norm before clipping. With
            `math.inf` the norm is measured and nothing is clipped. Like `lr`, `max_grad_norm` is an option of every
            parameter group, and state dicts contain it. Its value must be the same in all groups.
        state_dtype: How states are stored: in torch.float32, torch.bfloat16 (2 bytes for each element of a state) or
            torch.int8 (1 byte, and an fp32 scale for every 128 elements). A name such as "int8" will do. New states are
            rounded at random, so that small changes are not lost. The random numbers depend only on the step, on the
            position of the parameter in the optimizer, and on the position of the element in memory. A parameter with
            fewer than 4,096 elements has fp32 states; of a DTensor, the elements of this rank's shard count. Masters
            stay exact. In int8, `optimizer.state[parameter]` has the keys "momentum_buffer_codes" and
            "momentum_buffer_scale", and not "momentum_buffer". Like `lr`, `state_dtype` is an option of every parameter
            group. It may be changed, and the next step then converts the states. Do not change it after a CUDA graph
            has captured a step, since a replay would use the old states. `load_state_dict` does not change it.

    Raises:
        ValueError: An argument is out of its range.
        TypeError: An argument has a wrong type, or a parameter that requires a gradient is fp64. At the first step, if
            a parameter with a gradient is not fp32, fp16 or bf16.
        RuntimeError: At the first step, if parameters share memory, or if `max_grad_norm` is set and a rank has only a
            part of the gradients (DTensor, FSDP1, ZeroRedundancyOptimizer).

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
