"""Operators: schemas, fakes, and one implementation each that runs on whatever backend serves its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from . import _checks, _direct, _int8, reference
from ._backends import PLAIN, kernels, library, select

SCHEMAS = {
    # Codes, or with `fake` dequantized values. A scale that was given is not returned, nor the zero point of symmetric
    # codes: an output may not be an input, or None, and these are tensors without elements.
    "quantize_int8": "(Tensor x, Tensor? scale, Tensor? zero_point, int[]? dim, int? block_size, bool symmetric, "
    "int? seed, bool fake) -> (Tensor, Tensor, Tensor)",
    "dequantize_int8": "(Tensor values, Tensor scale, Tensor? zero_point, int? block_size, ScalarType dtype) -> Tensor",
    "straight_through_int8": "(Tensor grad, Tensor x, Tensor scale, Tensor? zero_point, int? block_size) -> Tensor",
    "int8_matmul": "(Tensor a, Tensor b, Tensor a_scale, Tensor? a_zero_point, Tensor b_scale, Tensor? b_zero_point, "
    "Tensor? bias, ScalarType out_dtype, Tensor? out_scale, Tensor? out_zero_point) -> Tensor",
    "int8_linear": "(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor",
}


def _is_watched(tensors: Iterable[object]) -> bool:
    """Whether a call has to be seen by torch's dispatcher: by what watches all calls, by autograd, or since one of
    `tensors` is no plain one of a CPU or CUDA device (views that the dispatcher negates would reach a kernel as a copy
    with other strides)."""
    if _direct.is_watched():
        return True
    keeps_grad = torch.is_grad_enabled()
    return not all(
        isinstance(tensor, Tensor)
        and type(tensor) in PLAIN
        and (tensor.is_cpu or tensor.is_cuda)
        and not (tensor.is_neg() or tensor._is_zerotensor() or (keeps_grad and tensor.requires_grad))
        for tensor in tensors
    )


# -------------------------------------------------------------------------------------------------------------- int8
def _quantize_int8(
    x: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    dim: list[int] | None,
    block_size: int | None,
    symmetric: bool,
    seed: int | None,
    fake: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _checks.check_quantize(x, scale, zero_point, dim, block_size)
    ops = kernels(select(x.device))
    zero_point = _laid_out_as(scale, zero_point)
    if ops is not None:
        dtype = x.dtype if fake else torch.int8
        out, *own = _int8.quantize(ops, x, dtype, dim, block_size, scale, zero_point, symmetric, seed)
    elif fake:
        out, *own = reference.fake_quantize_int8(
            x, dim=dim, block_size=block_size, symmetric=symmetric, scale=scale, zero_point=zero_point
        )
    else:
        out, *own = reference.quantize_int8(
            x, dim=dim, block_size=block_size, symmetric=symmetric, seed=seed, scale=scale, zero_point=zero_point
        )
    own_scale, own_zero_point = own if scale is None else (None, None)
    return (
        out,
        x.new_empty(0, dtype=torch.float32) if own_scale is None else own_scale,
        x.new_empty(0, dtype=torch.int32) if own_zero_point is None else own_zero_point,
    )


def _dequantize_int8(
    values: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: int | None, dtype: torch.dtype
) -> Tensor:
    _checks.check_dequantize(values, scale, zero_point, block_size, dtype)
    ops = kernels(select(values.device))
    zero_point = _laid_out_as(scale, zero_point)
    if ops is None:
        return reference.dequantize_int8(values, scale, zero_point, block_size=block_size, dtype=dtype)
    return _int8.dequantize(ops, values, block_size, scale, zero_point, dtype)


def _straight_through_int8(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: int | None
) -> Tensor:
    ops = kernels(select(x.device))
    zero_point = _laid_out_as(scale, zero_point)
    if ops is None:
        return reference.straight_through_int8(grad, x, scale, zero_point, block_size=block_size)
    return _int8.straight_through(ops, grad, x, block_size, scale, zero_point)


def _int8_matmul(
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
) -> Tensor:
    out = _fake_int8_matmul(
        a, b, a_scale, a_zero_point, b_scale, b_zero_point, bias, out_dtype, out_scale, out_zero_point
    )
    if out.numel() == 0:
        return out
    ops = kernels(select(a.device))
    scales = (a_scale, a_zero_point, b_scale, b_zero_point)
    if ops is None:
        final = {"out_dtype": out_dtype, "out_scale": out_scale, "out_zero_point": out_zero_point}
        return reference.int8_matmul(a, b, *scales, bias=bias, **final)  # type: ignore[arg-type]
    ops._int8_matmul_(a, b, *map(_dense, scales), _dense(bias), out, out_scale, out_zero_point)
    return out


def _int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    out = _fake_int8_linear(x, weight, scale, bias)
    if out.numel() == 0:
        return out
    ops = kernels(select(x.device))
    if ops is None:
        return reference.int8_linear(x, weight, scale, bias)
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    ops._int8_linear_(x, weight.contiguous(), _dense(scale), _dense(bias), out)
    return out


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _laid_out_as(scale: Tensor | None, zero_point: Tensor | None) -> Tensor | None:
    """Kernels walk both by the same strides."""
    if scale is None or zero_point is None or scale.stride() == zero_point.stride():
        return zero_point
    return torch.empty_strided(scale.shape, scale.stride(), dtype=torch.int32, device=scale.device).copy_(zero_point)


def _fake_quantize_int8(
    x: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    dim: list[int] | None,
    block_size: int | None,
    symmetric: bool,
    seed: int | None,
    fake: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _checks.check_quantize(x, scale, zero_point, dim, block_size)
    groups = _int8.grouping(x.shape, None if scale is None else scale.shape, dim, block_size)
    out = _int8.like(groups, x, x.dtype if fake else torch.int8)
    if scale is not None:
        return out, x.new_empty(0, dtype=torch.float32), x.new_empty(0, dtype=torch.int32)
    own = x.new_empty_strided(groups.scale_shape, _int8.scale_strides(groups, out), dtype=torch.float32)
    return out, own, x.new_empty(0, dtype=torch.int32) if symmetric else torch.empty_like(own, dtype=torch.int32)


def _fake_straight_through_int8(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: int | None
) -> Tensor:
    return _int8.like(_int8.grouping(x.shape, scale.shape, None, block_size), x, x.dtype)


def _fake_dequantize_int8(
    values: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: int | None, dtype: torch.dtype
) -> Tensor:
    _checks.check_dequantize(values, scale, zero_point, block_size, dtype)
    return _int8.like(_int8.grouping(values.shape, scale.shape, None, block_size), values, dtype)


def _fake_int8_matmul(
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
) -> Tensor:
    _checks.check_int8_matmul(
        a, b, a_scale, a_zero_point, b_scale, b_zero_point, bias, out_dtype, out_scale, out_zero_point
    )
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype if out_scale is None else torch.int8)


def _fake_int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    _checks.check_int8_linear(x, weight, scale, bias)
    return x.new_empty((x.shape[0], weight.shape[0]))


def _save_for_straight_through(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, scale, zero_point, _, ctx.block_size, symmetric, _, fake = inputs
    out, own_scale, own_zero_point = output
    ctx.mark_non_differentiable(own_scale, own_zero_point, *(() if fake else (out,)))
    if scale is None:
        scale, zero_point = own_scale, None if symmetric else own_zero_point
    ctx.save_for_backward(x, scale, zero_point)


def _straight_through(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    x, scale, zero_point = ctx.saved_tensors
    result = torch.ops.amp_kernels.straight_through_int8(grad, x, scale, zero_point, ctx.block_size)
    return result, *([None] * 7)


for _name, _kernel, _fake in (
    ("quantize_int8", _quantize_int8, _fake_quantize_int8),
    ("dequantize_int8", _dequantize_int8, _fake_dequantize_int8),
    ("straight_through_int8", _straight_through_int8, _fake_straight_through_int8),
    ("int8_matmul", _int8_matmul, _fake_int8_matmul),
    ("int8_linear", _int8_linear, _fake_int8_linear),
):
    library.define(_name + SCHEMAS[_name])
    # One kernel for every device: it selects the backend itself, so that use_backend reaches it.
    library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"amp_kernels::{_name}", _fake, lib=library)

for _name, _setup, _backward in (("quantize_int8", _save_for_straight_through, _straight_through),):
    torch.library.register_autograd(f"amp_kernels::{_name}", _backward, setup_context=_setup, lib=library)

OPS = torch.ops.amp_kernels


def _unless_watched(op: Callable[..., Any], kernel: Callable[..., Any], *signature: tuple[type, ...]) -> Any:
    """Calls the kernel of an operator, or where an argument is of another type than its `signature` says the operator,
    whose dispatcher says what is wrong."""

    def call(*args: object) -> Any:
        fits = all(type(arg) in types for arg, types in zip(args, signature, strict=True))
        is_watched = not fits or _is_watched(arg for arg in args if isinstance(arg, Tensor))
        return (op if is_watched else kernel)(*args)

    return call


# The dispatcher, and of quantize_int8 autograd, take 20 us of a call, and several times that with cold caches.
_MAYBE = (*PLAIN, NoneType)
quantize_int8 = _unless_watched(
    OPS.quantize_int8, _quantize_int8, PLAIN, _MAYBE, _MAYBE, (list, NoneType), (int, NoneType), (bool,),
    (int, NoneType), (bool,),
)  # fmt: skip
dequantize_int8 = _unless_watched(
    OPS.dequantize_int8, _dequantize_int8, PLAIN, PLAIN, _MAYBE, (int, NoneType), (torch.dtype,)
)
int8_linear = _unless_watched(OPS.int8_linear, _int8_linear, PLAIN, PLAIN, PLAIN, _MAYBE)
