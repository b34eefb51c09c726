"""Argument checks of the operators: a sentence each, before anything is modified, shared with the fakes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ._table import DTYPE_CODES

_DTYPES = "float32, float16 or bfloat16"


def as_list(op: str, name: str, tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors of an iterable, all of them tensors (a gradient may well be None)."""
    result = list(tensors)
    for i, tensor in enumerate(result):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name}[{i}] must be a Tensor, got {type(tensor).__name__}")
    return result


def check_tensors(op: str, name: str, tensors: Sequence[Tensor]) -> None:
    """Strided fp32, fp16 or bf16 tensors, all on one device."""
    for i, tensor in enumerate(as_list(op, name, tensors)):
        if tensor.layout is not torch.strided:
            raise ValueError(f"{op}: {name}[{i}] must be a dense tensor, got {tensor.layout}; call to_dense() first")
        if tensor.dtype not in DTYPE_CODES:
            raise TypeError(f"{op}: {name}[{i}] must be {_DTYPES}, got {tensor.dtype}")
        if tensor.device != tensors[0].device:
            raise ValueError(f"{op}: {name}[{i}] must be on {tensors[0].device} as {name}[0] is, got {tensor.device}")


def check_written(op: str, name: str, tensors: Sequence[Tensor]) -> None:
    """No element of a tensor that is written may stand for several (an expanded tensor)."""
    for i, tensor in enumerate(tensors):
        if any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(f"{op}: {name}[{i}] must not be an expanded tensor, since it is written; clone() it first")


def check_scalar(op: str, name: str, tensor: Tensor | None, device: torch.device | None = None) -> None:
    """A one-element fp32 tensor, on `device` if given."""
    if tensor is None:
        return
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, got {type(tensor).__name__}")
    if tensor.dtype is not torch.float32 or tensor.numel() != 1:
        raise ValueError(f"{op}: {name} must be one float32 element, got {tensor.dtype} of shape {tuple(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{op}: {name} must be on {device} with the tensors, got {tensor.device}; move it there")


def check_same_shapes(op: str, name: str, tensors: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    """One tensor for each parameter, of its shape and on its device."""
    if len(tensors) != len(params):
        raise ValueError(f"{op}: {name} must hold one tensor for each of the {len(params)} params, got {len(tensors)}")
    for i, (tensor, param) in enumerate(zip(tensors, params, strict=True)):
        if tensor.shape != param.shape:
            raise ValueError(
                f"{op}: {name}[{i}] must have shape {tuple(param.shape)} as its parameter, got {tuple(tensor.shape)}"
            )
        if tensor.device != param.device:
            raise ValueError(f"{op}: {name}[{i}] must be on {param.device} with its parameter, got {tensor.device}")


def check_states(op: str, name: str, states: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    """fp32 optimizer state, one tensor for each parameter."""
    check_tensors(op, name, states)
    check_same_shapes(op, name, states, params)
    check_written(op, name, states)
    for i, state in enumerate(states):
        if state.dtype is not torch.float32:
            raise TypeError(f"{op}: {name}[{i}] must be float32, got {state.dtype}; state is kept in float32")


def check_unscale(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    check_tensors("unscale_", "grads", grads)
    check_written("unscale_", "grads", grads)
    check_scalar("unscale_", "inv_scale", inv_scale, grads[0].device)
    check_scalar("unscale_", "found_inf", found_inf, grads[0].device)


def check_grad_norm(grads: Sequence[Tensor], inv_scale: Tensor | None, found_inf: Tensor | None) -> None:
    check_tensors("grad_norm", "grads", grads)
    check_scalar("grad_norm", "inv_scale", inv_scale, grads[0].device)
    check_scalar("grad_norm", "found_inf", found_inf, grads[0].device)


def check_update(
    op: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Mapping[str, Sequence[Tensor]],
    masters: Sequence[Tensor],
    scalars: Mapping[str, Tensor | None],
) -> None:
    """What `sgd_` and `rmsprop_` have in common; an empty optional list stands for an absent state."""
    check_tensors(op, "params", params)
    check_written(op, "params", params)
    check_tensors(op, "grads", grads)
    check_same_shapes(op, "grads", grads, params)
    for name, tensors in states.items():
        check_states(op, name, tensors, params)
    low = [p for p in params if p.dtype is not torch.float32]
    if len(masters) != len(low):
        raise ValueError(
            f"{op}: masters must hold one float32 tensor for each of the {len(low)} 16-bit params, in their order, "
            f"got {len(masters)}"
        )
    check_states(op, "masters", masters, low)
    for name, scalar in scalars.items():
        check_scalar(op, name, scalar, params[0].device)
