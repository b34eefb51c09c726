"""Argument checks of the operators: a sentence each, before anything is modified, shared with the fakes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ._table import DTYPE_CODES, shares_memory

_DTYPES = "float32, float16 or bfloat16"
MAX_K = 131071  # terms of a product of codes that int32 surely holds: 2^31 / 128^2


def check_are_tensors(op: str, **arguments: object) -> None:
    """Tensors, or what torch's functions take for one (a Proxy of torch.fx)."""
    for name, argument in arguments.items():
        if not isinstance(argument, Tensor) and not hasattr(argument, "__torch_function__"):
            raise TypeError(f"{op}: {name} must be a Tensor, got {type(argument).__name__}")


def check_are_tensors_or_none(op: str, **arguments: object) -> None:
    for name, argument in arguments.items():
        if argument is not None:
            check_are_tensors(op, **{name: argument})


def check_dtype(op: str, name: str, dtype: object) -> None:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{op}: {name} must be {_DTYPES}, got {dtype!r}; pass a torch.dtype")


def as_list(op: str, name: str, tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors of an iterable, all of them tensors (a gradient may well be None)."""
    if not hasattr(tensors, "__iter__") or (isinstance(tensors, Tensor) and tensors.dim() == 0):
        kind = type(tensors).__name__
        raise TypeError(f"{op}: {name} must be several Tensors, got {kind}; pass a list, perhaps an empty one")
    result = list(tensors)
    if set(map(type, result)) <= {Tensor, Parameter}:  # a tenth of the time of a look at each
        return result
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
    check_are_tensors(op, **{name: tensor})
    if tensor.dtype is not torch.float32 or tensor.numel() != 1:
        raise ValueError(f"{op}: {name} must be one float32 element, got {tensor.dtype} of shape {tuple(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{op}: {name} must be on {device} with the tensors, got {tensor.device}; move it there")


def why_not_loaded(what: str, saved: object, known: int) -> str | None:
    """A sentence if a state dict has a format number of a release to come; the first releases wrote none, so None."""
    if saved is None or saved in range(known + 1):
        return None
    return (
        f"{what}.load_state_dict: the format of the state dict must be at most {known}, got {saved!r}: a later release "
        "of amp_kernels saved it; upgrade amp_kernels"
    )


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


def check_pass(op: str, grads: Sequence[Tensor], inv_scale: Tensor | None, found_inf: Tensor, *, write: bool) -> None:
    """Arguments of `unscale_` (`write`) and `grad_norm`."""
    check_tensors(op, "grads", grads)
    if write:
        check_written(op, "grads", grads)
    check_pass_scalars(op, grads, inv_scale, found_inf)


def check_pass_scalars(op: str, grads: Sequence[Tensor], inv_scale: Tensor | None, found_inf: Tensor) -> None:
    check_scalar(op, "inv_scale", inv_scale, grads[0].device)
    check_scalar(op, "found_inf", found_inf, grads[0].device)


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


def check_memory(op: str, lists: Mapping[str, Sequence[Tensor]]) -> None:
    """Tensors that are written, all at once, share no memory; fake tensors have none to look at."""
    written = [(f"{name}[{i}]", tensor) for name, tensors in lists.items() for i, tensor in enumerate(tensors)]
    shared = shares_memory([tensor for _, tensor in written])
    if shared is not None:
        raise ValueError(
            f"{op}: {written[shared][0]} must have memory of its own, since it is written, but some element of it is "
            "one of another written tensor too, or twice its own; clone() it"
        )


# -------------------------------------------------------------------------------------------------------------- int8
def _check_values(op: str, name: str, x: Tensor, dtypes: Iterable[torch.dtype]) -> None:
    if x.layout is not torch.strided:
        raise ValueError(f"{op}: {name} must be a dense tensor, got {x.layout}; call to_dense() first")
    if x.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{op}: {name} must be {names}, got {x.dtype}")


def check_quantize(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, dim: Sequence[int] | None, block_size: int | None
) -> None:
    op = "quantize_int8"
    _check_values(op, "x", x, DTYPE_CODES)
    _check_blocks(op, x, block_size)
    if block_size is not None and dim is not None and [d % x.dim() for d in dim] != [x.dim() - 1]:
        raise ValueError(f"{op}: dim must be None or -1 with block_size, which splits the last dimension, got {dim}")
    if dim and x.dim() == 0:
        raise IndexError(f"{op}: dim must be None for a 0-dim tensor, which is one group, got {tuple(dim)}")
    for d in dim or ():
        if not -x.dim() <= d < x.dim():
            raise IndexError(f"{op}: dim must be in [{-x.dim()}, {x.dim() - 1}], got {d}")
    if dim is not None and len({d % max(x.dim(), 1) for d in dim}) != len(dim):
        raise ValueError(f"{op}: dim must name each dimension once, got {tuple(dim)}")
    if scale is not None:
        _check_scale(op, x, scale, zero_point, block_size)
    elif zero_point is not None:
        raise ValueError(f"{op}: zero_point must be None without scale, got a tensor; pass scale too")


def check_dequantize(
    values: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: int | None, dtype: torch.dtype
) -> None:
    op = "dequantize_int8"
    _check_values(op, "values", values, (torch.int8,))
    _check_blocks(op, values, block_size)
    _check_scale(op, values, scale, zero_point, block_size)
    if dtype not in DTYPE_CODES:
        raise TypeError(f"{op}: dtype must be {_DTYPES}, got {dtype}")


def _check_blocks(op: str, x: Tensor, block_size: int | None) -> None:
    if block_size is None:
        return
    if block_size < 1:
        raise ValueError(f"{op}: block_size must be at least 1, got {block_size}")
    if x.dim() == 0:
        raise ValueError(f"{op}: x must have a last dimension to split into blocks, got a 0-dim tensor")


def _check_scale(op: str, x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: int | None) -> None:
    expected = list(x.shape)
    if block_size is not None:
        expected[-1] = -(-expected[-1] // block_size)
        fits = list(scale.shape) == expected
    else:
        fits = scale.numel() == 1 or (
            scale.dim() == x.dim() and all(s in (1, n) for s, n in zip(scale.shape, x.shape, strict=True))
        )
    if not fits:
        what = "the number of blocks last" if block_size is not None else "1 for each reduced dimension"
        raise ValueError(f"{op}: scale must have the shape {tuple(expected)} with {what}, got {tuple(scale.shape)}")
    _check_parameter(op, "scale", scale, torch.float32, x.device)
    if zero_point is not None:
        _check_parameter(op, "zero_point", zero_point, torch.int32, x.device)
        if zero_point.shape != scale.shape:
            raise ValueError(
                f"{op}: zero_point must have scale's shape {tuple(scale.shape)}, got {tuple(zero_point.shape)}"
            )


def _check_parameter(op: str, name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    if tensor.dtype is not dtype:
        raise TypeError(f"{op}: {name} must be {str(dtype).removeprefix('torch.')}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{op}: {name} must be on {device} as the tensor is, got {tensor.device}; move it there")


def check_side(name: str, values: Tensor, scale: Tensor, inner: int) -> None:
    """An operand of `int8_matmul` whose scales do not change along its `inner` dimension."""
    if scale.numel() > 1 and (scale.dim() != 2 or scale.shape[inner] != 1):
        raise ValueError(
            f"int8_matmul: {name} must be quantized as a whole or with dim={-inner}, got scales of "
            f"shape {tuple(scale.shape)} for values of shape {tuple(values.shape)}"
        )


def check_int8_matmul(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    a_zero_point: Tensor | None,
    b_scale: Tensor,
    b_zero_point: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out_scale: Tensor | None,
    out_zero_point: Tensor | None,
) -> None:
    op = "int8_matmul"
    for name, x in (("a", a), ("b", b)):
        _check_values(op, name, x, (torch.int8,))
        if x.dim() != 2:
            raise ValueError(f"{op}: {name} must have 2 dimensions, got {x.dim()}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"{op}: b must have {a.shape[1]} rows, as many as a has columns, got {b.shape[0]}")
    if a.device != b.device:
        raise ValueError(f"{op}: b must be on {a.device} as a is, got {b.device}")
    if a.shape[1] > MAX_K:
        raise ValueError(
            f"{op}: the inner dimension must be at most {MAX_K}, beyond which int32 sums may overflow, got "
            f"{a.shape[1]}; split it and add the results"
        )
    sides = (("a", a_scale, a_zero_point, a.shape[0], "row"), ("b", b_scale, b_zero_point, b.shape[1], "column"))
    for name, scale, zero_point, count, what in sides:
        _check_parameter(op, f"{name}.scale", scale, torch.float32, a.device)
        if scale.numel() not in (1, count):
            raise ValueError(
                f"{op}: {name} must be quantized as a whole or per {what} ({count} scales), got {scale.numel()} scales"
            )
        if zero_point is not None:
            _check_parameter(op, f"{name}.zero_point", zero_point, torch.int32, a.device)
            if zero_point.numel() != scale.numel():
                raise ValueError(
                    f"{op}: {name} must have as many zero points as scales ({scale.numel()}), got {zero_point.numel()}"
                )
    if bias is not None:
        _check_parameter(op, "bias", bias, torch.float32, a.device)
        if list(bias.shape) != [b.shape[1]]:
            raise ValueError(f"{op}: bias must have shape ({b.shape[1]},), got {tuple(bias.shape)}")
    if out_dtype not in DTYPE_CODES:
        raise TypeError(f"{op}: out_dtype must be {_DTYPES}, got {out_dtype}")
    check_scalar(op, "out_scale", out_scale, a.device)
    if out_zero_point is not None:
        _check_parameter(op, "out_zero_point", out_zero_point, torch.int32, a.device)
        if out_scale is None or out_zero_point.numel() != 1:
            raise ValueError(f"{op}: out_zero_point must be one element beside out_scale, got {out_zero_point.numel()}")


def check_int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
    op = "int8_linear"
    _check_values(op, "x", x, DTYPE_CODES)
    _check_values(op, "weight", weight, (torch.int8,))
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{op}: x and weight must be [M, K] and [N, K], got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    for name, tensor in (("weight", weight), ("scale", scale), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{op}: {name} must be on {x.device} as x is, got {tensor.device}")
    if scale.dtype is not torch.float32 or scale.numel() not in (1, weight.shape[0]):
        raise ValueError(
            f"{op}: scale must be float32 with 1 or {weight.shape[0]} elements, got {scale.dtype} with {scale.numel()}"
        )
    if bias is not None and (bias.dtype is not x.dtype or list(bias.shape) != [weight.shape[0]]):
        raise ValueError(
            f"{op}: bias must be {x.dtype} of shape ({weight.shape[0]},), got {bias.dtype} of {tuple(bias.shape)}"
        )
