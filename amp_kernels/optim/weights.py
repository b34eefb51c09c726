"""Saves and loads weights in full precision, with masters in place of 16-bit parameters."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ._base import FusedOptimizer
from ._tensors import kind
from ._wrappers import wrapped

_LOW = (torch.float16, torch.bfloat16)


@torch.no_grad()
def fp32_state_dict(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return `model.state_dict()` in fp32, with the master in place of each 16-bit parameter.

    Load the result into an fp32 model with `load_state_dict`, or into 16-bit weights with `load_fp32_state_dict`.

    Args:
        model: A model of any dtypes. Parameters may be tied, frozen, or trained by another optimizer.
        optimizer: An optimizer of `amp_kernels.optim`. With any other optimizer 16-bit parameters have no masters, and
            their own values are returned in fp32.

    Returns:
        A dict of copies, with the names of `model.state_dict()`. 16-bit floating-point tensors are converted to fp32.
            All others keep their dtype. Tied parameters are one tensor.

    Raises:
        TypeError: `model` is not an `nn.Module`. Or `optimizer` is not a torch optimizer, or is a wrapper around a
            fused optimizer.
        RuntimeError: The state dict of `model` contains other tensors in place of parameters that have masters. These
            masters would be lost.

    Examples:
        >>> model = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
        >>> optimizer = amp_kernels.optim.FusedAdamW(model.parameters())
        >>> {name: value.dtype for name, value in amp_kernels.optim.fp32_state_dict(model, optimizer).items()}
        {'weight': torch.float32, 'bias': torch.float32}
    """
    ours = _check_arguments("fp32_state_dict", model, optimizer)
    state_dict = model.state_dict(keep_vars=True)
    with_masters = {} if ours is None else _with_masters("fp32_state_dict", ours, model, state_dict)
    copies: dict[int, Any] = {}
    for name, value in state_dict.items():
        if id(value) not in copies:
            copy = value
            if ours is not None and id(value) in with_masters:
                copy = ours.master(value)
            elif isinstance(value, Tensor):
                copy = value.detach().to(torch.float32 if value.dtype in _LOW else value.dtype, copy=True)
            copies[id(value)] = copy
        state_dict[name] = copies[id(value)]
    return state_dict


@torch.no_grad()
def load_fp32_state_dict(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Load fp32 weights into a model and into the masters of its optimizer.

    The rest of the optimizer's state, such as momentum, does not change. If `optimizer.load_state_dict` loads masters
    after this call, they replace those from this call. The `master` method of the optimizers says how exact they are.

    Args:
        model: A model of any dtypes.
        optimizer: An optimizer that trains some or all parameters of the model. Only optimizers of `amp_kernels.optim`
            have masters.
        state_dict: The result of `fp32_state_dict`, or of `state_dict()` of the same model in fp32.

    Raises:
        TypeError: As in `fp32_state_dict`.
        RuntimeError: As in `fp32_state_dict`. Or from `model.load_state_dict`, if names or shapes do not fit.

    Examples:
        >>> model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        >>> optimizer = amp_kernels.optim.FusedAdamW(model.parameters())
        >>> amp_kernels.optim.load_fp32_state_dict(model, optimizer, {"weight": torch.tensor([[1 + 2**-10]])})
        >>> model.weight.item(), optimizer.master(model.weight).item()
        (1.0, 1.0009765625)
    """
    ours = _check_arguments("load_fp32_state_dict", model, optimizer)
    if ours is None:
        model.load_state_dict(state_dict)
        return
    names = _with_masters("load_fp32_state_dict", ours, model, model.state_dict(keep_vars=True))
    model.load_state_dict(state_dict)
    for name, param in names.values():
        # If a hook of the model renames the entry, its fp32 value is not found. The master is then the loaded weight.
        value = state_dict.get(name, param.detach())
        ours._load_master(name, param, value.to(torch.float32).reshape(param.shape))
    lacking = [name for name, _ in names.values() if name not in state_dict]
    if lacking:
        warnings.warn(
            "load_fp32_state_dict: the state dict must have the names of model.state_dict(), but a hook of the model "
            f"renames {len(lacking)} of them ({lacking[0]} is the first); the masters of these weights are now the "
            "rounded weights; rename the entries before the call",
            stacklevel=3,
        )


def _check_arguments(caller: str, model: Any, optimizer: Any) -> FusedOptimizer | None:
    """Checks the arguments. Returns the optimizer if it is from `amp_kernels.optim`, otherwise None."""
    for name, value, what in (("model", model, torch.nn.Module), ("optimizer", optimizer, torch.optim.Optimizer)):
        if not isinstance(value, what):
            raise TypeError(f"{caller}: {name} must be a torch {what.__name__}, got {kind(value)}")
    inner = wrapped(optimizer)
    if isinstance(inner, FusedOptimizer) and inner is not optimizer:
        raise TypeError(
            f"{caller}: optimizer must be the {type(inner).__name__} that keeps the masters, got a "
            f"{type(optimizer).__name__} around it; pass the {type(inner).__name__}"
        )
    return inner if isinstance(inner, FusedOptimizer) else None


def _with_masters(
    caller: str, optimizer: FusedOptimizer, model: torch.nn.Module, state_dict: Mapping[str, Any]
) -> dict[int, tuple[str, Tensor]]:
    """Returns the names and parameters, by id, of the model's 16-bit parameters that `optimizer` trains.

    A tied parameter has several names in `state_dict`. The first one is returned.
    """
    of_model = {id(p): name for name, p in model.named_parameters()}
    params = {id(p): p for _, _, p in optimizer._named_parameters() if id(p) in of_model and p.dtype in _LOW}
    names: dict[int, tuple[str, Tensor]] = {}
    for name, value in state_dict.items():
        if id(value) in params:
            names.setdefault(id(value), (name, params[id(value)]))
    missing = [of_model[key] for key in params if key not in names]
    if missing:
        raise RuntimeError(
            f"{caller}: model.state_dict(keep_vars=True) must hold the model's own parameters, but lacks "
            f"{len(missing)} of them ({missing[0]} is the first), so their masters would be lost; FSDP1 and hooks put "
            "other tensors in their place: pass the module inside FSDP1, or a module without such hooks"
        )
    return names
