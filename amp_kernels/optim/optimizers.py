"""The optimizers: `torch.optim.SGD`, `RMSprop`, `Adam` and `AdamW` as fused kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import ParamsT

from ..families import ADAM, RMSPROP, SGD
from ._base import FusedOptimizer


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a constructor, without `self`. `arguments` are its `locals()`."""
    return {name: value for name, value in arguments.items() if name not in ("self", "__class__")}


class FusedSGD(FusedOptimizer, torch.optim.SGD):  # type: ignore[override]
    """`torch.optim.SGD` as one fused kernel, with fp32 masters for fp16 and bf16 parameters.

    Formula: `torch.optim.SGD` (Sutskever et al. 2013), in fp32. `amp_kernels.sgd_` spells it out.

    A 16-bit parameter has an fp32 master (see `master`). Gradients may be fp16, bf16 or fp32, and a step does not write
    them. If a scaler (`amp_kernels.GradScaler`, or `torch.amp.GradScaler`, which is slower) finds NaN or inf, the step
    changes nothing. The guide to optimizers explains masters, clipping, states of 8 bits and steps of your own.

    The other arguments are those of `torch.optim.SGD`. `foreach` and `fused` have no effect, and `differentiable` must
    be False.

    Args:
        params: Parameters, parameter groups or named parameters, as in torch: fp32, fp16 and bf16 in any mix.
        lr: Learning rate. An fp32 tensor on the parameters' device is read there at every step.
        max_grad_norm: Clip the global L2 norm of the gradients to this value inside the step (Pascanu et al. 2013). The
            gradients are not written. `math.inf` measures the norm (see `grad_norm`) and clips nothing. An option of
            every parameter group, with the same value in all groups.
        state_dtype: How states are stored: in torch.float32, torch.bfloat16 (2 bytes for each element of a state) or
            torch.int8 (1 byte, and an fp32 scale for every 128 elements). A name such as "int8" will do. A parameter
            with fewer than 4,096 elements has fp32 states. In int8, `optimizer.state[parameter]` has the keys
            "momentum_buffer_codes" and "momentum_buffer_scale". An option of every parameter group, which
            `load_state_dict` does not change.
        norm_group: If each rank of a process group has only a part of the gradients (FSDP1, ZeroRedundancyOptimizer,
            DeepSpeed), this group. The norm is then that of all ranks. DTensors need no group. An optimizer with a
            group cannot be copied or pickled.

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
        norm_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(**_given(locals()))

    def _state_names(self, group: dict[str, Any]) -> tuple[str | None, ...]:
        return ("momentum_buffer" if group["momentum"] != 0 else None,)


class FusedRMSprop(FusedOptimizer, torch.optim.RMSprop):
    """`torch.optim.RMSprop` as one fused kernel, with fp32 masters for fp16 and bf16 parameters.

    Formula: `torch.optim.RMSprop` (Hinton 2012; centered: Graves 2013), in fp32. `amp_kernels.rmsprop_` spells it out.
    If rounding makes the centered variance negative, 0 is used in its place, where torch returns NaN. Masters,
    gradients, loss scaling and errors are as in `FusedSGD`. The other arguments are those of `torch.optim.RMSprop` and
    `amp_kernels.optim.FusedSGD`.

    Args:
        capturable: Has no effect. Every step can be captured in a CUDA graph.
        state_dtype: As in `FusedSGD`. With `centered`, `square_avg` and `grad_avg` stay fp32.

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
        norm_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(**_given(locals()))

    def _state_names(self, group: dict[str, Any]) -> tuple[str | None, ...]:
        momentum, mean = group["momentum"] > 0, group["centered"]
        return "square_avg", "momentum_buffer" if momentum else None, "grad_avg" if mean else None


class FusedAdam(FusedOptimizer, torch.optim.Adam):  # type: ignore[override]
    """`torch.optim.Adam` as one fused kernel, with fp32 masters for fp16 and bf16 parameters.

    Formula: `torch.optim.Adam` (Kingma and Ba 2015; AMSGrad: Reddi et al. 2018), in fp32. `amp_kernels.adam_` spells it
    out. The bias correction does not count skipped steps. Masters, gradients, loss scaling and errors are as in
    `FusedSGD`. The other arguments are those of `torch.optim.Adam` and `amp_kernels.optim.FusedSGD`.

    Args:
        capturable: Has no effect. Every step can be captured in a CUDA graph.
        state_dtype: As in `FusedSGD`. With `amsgrad`, the second moments stay fp32.

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
        norm_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(**_given(locals()))

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
        norm_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(**_given(locals()))

    _state_names = FusedAdam._state_names
