"""Exact weights in and out: every bit of what an optimizer updates, under the names of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ._base import FusedOptimizer


@torch.no_grad()
def fp32_state_dict(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``model.state_dict()`` in fp32: of 16-bit parameters that `optimizer` trains their masters.

    It is the state dict of the same model in fp32, which ``load_state_dict`` of that model takes, or
    `load_fp32_state_dict`.

    Args:
        model: of parameters of any dtypes, in any mix; some may be tied, frozen, or another optimizer's.
        optimizer: ours, or one of torch's, whose 16-bit parameters have no masters.

    Returns:
        By the names of ``model.state_dict()``, copies: floating-point tensors of 16 bits in fp32, others in their
        dtypes; tied parameters are one tensor.
    """
    masters = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    copies: dict[int, Any] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in masters and isinstance(optimizer, FusedOptimizer):
            return optimizer.master(value)
        is_low = value.is_floating_point() and value.element_size() == 2
        return value.detach().to(torch.float32 if is_low else value.dtype, copy=True)

    state_dict = model.state_dict(keep_vars=True)
    for name, value in state_dict.items():
        if id(value) not in copies:
            copies[id(value)] = copy(value)
        state_dict[name] = copies[id(value)]
    return state_dict


@torch.no_grad()
def load_fp32_state_dict(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Loads what `fp32_state_dict`, or ``state_dict()`` of an fp32 model, returned: parameters and their masters.

    The state of the optimizer besides masters stays what it is; load it before or after. A bf16 parameter gets every
    bit, but that one tie in 131,072 masters is moved by one fp32 unit; `FusedOptimizer.master` says what an fp16 one
    gets.

    Args:
        model: of parameters of any dtypes.
        optimizer: of some or all of its parameters; ours keeps masters of 16-bit ones.

    Raises:
        RuntimeError: as ``model.load_state_dict``, for names and shapes that do not fit.
    """
    model.load_state_dict(state_dict)
    if not isinstance(optimizer, FusedOptimizer):
        return
    values = {id(p): state_dict[name] for name, p in model.state_dict(keep_vars=True).items() if name in state_dict}
    for name, index, param in optimizer._named_parameters():
        if id(param) in values and param.dtype is not torch.float32:
            optimizer._load_master(name, param, optimizer.param_groups[index], values[id(param)])
