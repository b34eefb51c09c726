"""Argument checks of the operators. They raise an error with a full message before anything is modified."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from .table import DTYPE_CODES, shares_memory


def _named(dtypes: Iterable[torch.dtype]) -> str:
    *names, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(names)} or {last}" if names else last


def check_are_tensors(op: str, **arguments: object) -> None:
    """Raise TypeError unless each argument is a Tensor, or acts as one in torch's functions, as torch.fx.Proxy does."""
    for name, argument in arguments.items():
        acts_as_one = hasattr(argument, "__torch_function__") and not isinstance(argument, type)  # a class has it too
        if not isinstance(argument, Tensor) and not acts_as_one:
            raise TypeError(f"{op}: {name} must be a Tensor, got {type(argument).__name__}")


def check_dtype(op: str, name: str, dtype: object) -> None:
    """Raise TypeError unless `dtype` is fp32, fp16 or bf16."""
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_CODES:
        remedy = "" if isinstance(dtype, torch.dtype) else "; pass a torch.dtype"
        raise TypeError(f"{op}: {name} must be {_named(DTYPE_CODES)}, got {dtype!r}{remedy}")


def to_list(op: str, name: str, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return an iterable as a list. Its elements are not checked, which takes 20 ns each."""
    if not hasattr(tensors, "__iter__") or (isinstance(tensors, Tensor) and tensors.dim() == 0):
        kind = type(tensors).__name__
        raise TypeError(f"{op}: {name} must be a list of Tensors, got {kind}; pass a list, which may be empty")
    return list(tensors)


def as_list(op: str, name: str, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return an iterable of tensors as a list. Raise TypeError if an element is no Tensor, for example None."""
    result = to_list(op, name, tensors)
    if set(map(type, result)) <= {Tensor, Parameter}:  # this test takes a tenth of the time of the loop below
        return result
    for i, tensor in enumerate(result):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name}[{i}] must be a Tensor, got {type(tensor).__name__}")
    return result


def check_tensors(op: str, name: str, tensors: Sequence[Tensor], dtypes: Iterable[torch.dtype] = DTYPE_CODES) -> None:
    """Raise unless all tensors are strided, have one of these dtypes, and are on one device."""
    for i, tensor in enumerate(as_list(op, name, tensors)):
        if tensor.layout is not torch.strided or tensor.dtype not in dtypes:
            check_values(op, f"{name}[{i}]", tensor, dtypes)
        if tensor.device != tensors[0].device:
            raise ValueError(f"{op}: {name}[{i}] must be on {tensors[0].device} as {name}[0] is, got {tensor.device}")


def check_written(op: str, name: str, tensors: Sequence[Tensor]) -> None:
    """Raise ValueError for an expanded tensor. It cannot be written, since several of its elements share memory."""
    for i, tensor in enumerate(tensors):
        if any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(f"{op}: {name}[{i}] must not be an expanded tensor, since it is written; clone() it first")


def check_scalar(op: str, name: str, tensor: Tensor | None, device: torch.device | None = None) -> None:
    """Raise unless `tensor` is None or has one fp32 element. If `device` is given, the element must be on it."""
    if tensor is None:
        return
    check_are_tensors(op, **{name: tensor})
    check_is_dense(op, name, tensor)
    if tensor.dtype is not torch.float32 or tensor.numel() != 1:
        raise ValueError(f"{op}: {name} must be one float32 element, got {tensor.dtype} of shape {tuple(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{op}: {name} must be on {device} with the tensors, got {tensor.device}; move it there")


def why_not_loaded(what: str, saved: object, known: int) -> str | None:
    """Return an error message if a state dict was saved in the format of a later release, else None.

    `saved` is the number of the format. It is None if the state dict has no such number, for example if one of torch's
    optimizers made it. Such a state dict is accepted. `known` is the number of the latest format that this release can
    load.
    """
    if saved is None or saved in range(known + 1):
        return None
    return (
        f"{what}.load_state_dict: the format of the state dict must be at most {known}, got {saved!r}: a later release "
        "of amp_kernels saved it; upgrade amp_kernels"
    )


def check_same_shapes(op: str, name: str, tensors: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    """Raise ValueError unless there is one tensor for each parameter, with its shape and on its device."""
    if len(tensors) != len(params):
        raise ValueError(f"{op}: {name} must hold one tensor for each of the {len(params)} params, got {len(tensors)}")
    for i, (tensor, param) in enumerate(zip(tensors, params, strict=True)):
        if tensor.shape != param.shape:
            raise ValueError(
                f"{op}: {name}[{i}] must have shape {tuple(param.shape)} as its parameter, got {tuple(tensor.shape)}"
            )
        if tensor.device != param.device:
            raise ValueError(f"{op}: {name}[{i}] must be on {param.device} with its parameter, got {tensor.device}")


def check_states(
    op: str, name: str, states: Sequence[Tensor], params: Sequence[Tensor], dtypes: Sequence[torch.dtype]
) -> None:
    """Raise unless `states` has one tensor for each parameter, which can be written and has one of these dtypes."""
    check_tensors(op, name, states, dtypes)
    check_same_shapes(op, name, states, params)
    check_written(op, name, states)


def check_update(
    op: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Mapping[str, Sequence[Tensor]],
    masters: Sequence[Tensor],
    scalars: Mapping[str, Tensor | None],
) -> None:
    """Check the arguments that all updates have, and raise an error if one does not fit.

    `states` must have no entry for a state that is not used.
    """
    check_tensors(op, "params", params)
    check_written(op, "params", params)
    check_tensors(op, "grads", grads)
    check_same_shapes(op, "grads", grads, params)
    for name, tensors in states.items():
        check_states(op, name, tensors, params, [torch.float32])
    low = [p for p in params if p.dtype is not torch.float32]
    if len(masters) != len(low):
        raise ValueError(
            f"{op}: masters must hold {len(low)} float32 or int16 tensors, one for each 16-bit param, in the same "
            f"order, got {len(masters)}"
        )
    check_states(op, "masters", masters, low, [torch.float32, torch.int16])
    for name, scalar in scalars.items():
        check_scalar(op, name, scalar, params[0].device)


def check_grad_remainders(
    op: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Mapping[str, Sequence[Tensor]],
    remainders: Sequence[Tensor],
) -> None:
    """Check the arguments of an update of averages (optim/averages.py), and raise an error if one does not fit.

    In such an update, `params` are fp32 averages, `grads` are the weights that the averages follow, and there are no
    states. `remainders` must have one int16 tensor for each 16-bit weight, in order.
    """
    if states:
        given = ", ".join(states)
        raise ValueError(f"{op}: grad_remainders must be None if the update has states, got the states {given}")
    check_tensors(op, "params", params, [torch.float32])
    check_tensors(op, "grad_remainders", remainders, [torch.int16])
    check_same_shapes(op, "grad_remainders", remainders, [g for g in grads if g.dtype is not torch.float32])


def check_memory(op: str, lists: Mapping[str, Sequence[Tensor]]) -> None:
    """Raise ValueError if written tensors share memory. Do not pass fake tensors, which have no memory.

    A kernel writes all tensors at once, but torch writes one after the other. If tensors shared memory, the results of
    a kernel would differ from torch's.
    """
    written = [(f"{name}[{i}]", tensor) for name, tensors in lists.items() for i, tensor in enumerate(tensors)]
    shared = shares_memory([tensor for _, tensor in written])
    if shared is not None:
        raise ValueError(
            f"{op}: {written[shared][0]} must not share memory with itself or another written tensor; pass a clone()"
        )


def check_is_dense(op: str, name: str, x: Tensor) -> None:
    """Raise ValueError if `x` is nested or sparse."""
    if x.is_nested:  # a nested tensor has no shape, and its layout may be torch.strided
        raise ValueError(f"{op}: {name} must be a dense tensor, got a nested one; call to_padded_tensor() first")
    if x.layout is not torch.strided:
        raise ValueError(f"{op}: {name} must be a dense tensor, got {x.layout}; call to_dense() first")


def check_values(op: str, name: str, x: Tensor, dtypes: Iterable[torch.dtype]) -> None:
    """Raise unless `x` is a dense tensor with one of these dtypes."""
    check_are_tensors(op, **{name: x})
    check_is_dense(op, name, x)
    if x.dtype not in dtypes:
        raise TypeError(f"{op}: {name} must be {_named(dtypes)}, got {x.dtype}")
