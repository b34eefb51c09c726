"""Checks of the options that users pass to the constructor of a fused optimizer, or in parameter groups."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.table import STATE_DTYPES

# torch compares these options with numbers before it checks their types, and its error does not name them.
_NUMBERS = ("lr", "momentum", "dampening", "weight_decay", "alpha", "eps")
_FLAGS = ("nesterov", "centered", "amsgrad", "decoupled_weight_decay", "maximize")


def check_params(name: str, params: Any) -> None:
    if isinstance(params, torch.nn.Module):
        got = f"the module {type(params).__name__}; pass model.parameters()"
    elif isinstance(params, Mapping):
        got = f"one {type(params).__name__}; pass model.parameters(), or a list of groups [{{'params': ...}}]"
    elif isinstance(params, Iterable):  # this includes a Tensor, for which torch raises an error
        return
    else:
        got = f"{params!r}; pass model.parameters()"
    raise TypeError(f"{name}: params must be an iterable of parameters or of parameter groups, got {got}")


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises TypeError if an option has a wrong type. torch checks the ranges."""
    for key in _NUMBERS:
        value = options.get(key, 0)
        if not isinstance(value, (numbers.Real, Tensor)):
            raise TypeError(f"{name}: {key} must be a number or a Tensor of one element, got {value!r}")
    for key in _FLAGS:
        if isinstance(options.get(key), str):  # "False" would count as True
            raise TypeError(f"{name}: {key} must be True or False, got {options[key]!r}")
    betas: Any = options.get("betas", (0, 0))
    is_pair = isinstance(betas, Sequence) and len(betas) == 2
    if not (is_pair and all(isinstance(beta, (numbers.Real, Tensor)) for beta in betas)):
        raise TypeError(f"{name}: betas must be two numbers such as (0.9, 0.999), got {betas!r}")
    check_max_grad_norm(name, options.get("max_grad_norm"))


def check_max_grad_norm(name: str, value: Any) -> float | None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if value is not None and not (is_number and value > 0):
        error = ValueError if is_number else TypeError
        raise error(f"{name}: max_grad_norm must be a positive number or None, got {value!r}")
    return value


def check_state_dtype(name: str, value: Any) -> torch.dtype:
    """Returns the option as a torch.dtype. Configuration files and command lines say "int8" or "torch.int8"."""
    if not isinstance(value, (torch.dtype, str)):
        raise TypeError(f"{name}: state_dtype must be a torch.dtype such as torch.int8, got {value!r}")
    text = f"torch.{str(value).removeprefix('torch.')}"
    dtype = next((known for known in STATE_DTYPES if str(known) == text), None)
    if dtype is None:
        raise ValueError(f"{name}: state_dtype must be torch.float32, torch.bfloat16 or torch.int8, got {value!r}")
    return dtype


@contextlib.contextmanager
def restored(groups: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Restores the caller's group dicts if the block raises an error, since torch writes its defaults into them."""
    before = [(group, dict(group)) for group in groups]
    try:
        yield
    except BaseException:
        for group, items in before:
            group.clear()
            group.update(items)
        raise
