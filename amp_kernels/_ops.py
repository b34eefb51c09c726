"""Operators: schemas, fakes, and one implementation each that runs on whatever backend serves its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from . import _checks, _direct, _int8, _matmul, reference
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
    "addmm": "(Tensor? input, Tensor a, Tensor b, float beta, float alpha, ScalarType out_dtype) -> Tensor",
    # (result, argument of the activation, padded x, padded weight), the last three empty if not needed; `keeps`: for
    # a backward pass.
    "linear": "(Tensor x, Tensor weight, Tensor? bias, int activation, bool keeps) -> (Tensor, Tensor, Tensor, Tensor)",
    "linear_backward": "(Tensor grad, Tensor x, Tensor weight, Tensor saved, int activation, bool[] needs) -> "
    "(Tensor, Tensor, Tensor)",
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


# ------------------------------------------------------------------------------------------------------------ matmul
def _addmm(input: Tensor | None, a: Tensor, b: Tensor, beta: float, alpha: float, out_dtype: torch.dtype) -> Tensor:
    out = _fake_addmm(input, a, b, beta, alpha, out_dtype)
    if out.numel() > 0:
        _matmul.product(a, b, input, out=out, alpha=alpha, beta=beta)
    return out


def _fake_addmm(
    input: Tensor | None, a: Tensor, b: Tensor, beta: float, alpha: float, out_dtype: torch.dtype
) -> Tensor:
    _checks.check_addmm(input, a, b, out_dtype)
    return _matmul.new_output(a, (*a.shape[:-1], b.shape[-1]), out_dtype)


def _addmm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, a, b, ctx.beta, ctx.alpha, _ = inputs
    ctx.has_input = input is not None
    ctx.save_for_backward(a, b)


def _addmm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    grad = grad.to(a.dtype)
    needs_input, needs_a, needs_b = ctx.needs_input_grad[:3]

    def times(left: Tensor, right: Tensor) -> Tensor:
        return OPS.addmm(None, left, right, 0.0, ctx.alpha, left.dtype)

    return (
        grad * ctx.beta if ctx.has_input and needs_input else None,
        times(grad, b.mT) if needs_a else None,
        times(a.mT, grad) if needs_b else None,
        None,
        None,
        None,
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: int, keeps: bool) -> tuple[Tensor, ...]:
    out, pre, x_padded, weight_padded = _fake_linear(x, weight, bias, activation, keeps)
    if out.numel() > 0:
        name = _matmul.ACTIVATIONS[activation]
        pads_x, pads_weight = _matmul.choose(x, weight.t(), name).pads
        left = _matmul.pad_copy(x) if pads_x else x
        right = _matmul.weights.padded(weight, keeps=keeps) if pads_weight else weight
        input = None if bias is None else bias.expand(out.shape)
        saved = pre if pre.numel() > 0 else None
        _matmul.product(left, right.t(), input, out=out, pre=saved, activation=activation)
        x_padded = left if x_padded.numel() > 0 else x_padded
        weight_padded = right if weight_padded.numel() > 0 else weight_padded
    return out, pre, x_padded, weight_padded


def _fake_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: int, keeps: bool) -> tuple[Tensor, ...]:
    _checks.check_linear(x, weight, bias)
    name = _matmul.ACTIVATIONS[activation]
    out = _matmul.new_output(x, (x.shape[0], weight.shape[0]), x.dtype)
    pads_x, pads_weight = _matmul.choose(x, weight.t(), name).pads if out.numel() > 0 else (False, False)
    return (
        out,
        _matmul.new_output(x, tuple(out.shape), x.dtype) if keeps and name in _matmul.SMOOTH else x.new_empty(0),
        _matmul.padded_like(x) if keeps and pads_x else x.new_empty(0),
        _matmul.padded_like(weight) if keeps and pads_weight else x.new_empty(0),
    )


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, ctx.activation, _ = inputs
    out, pre, x_padded, weight_padded = output
    ctx.mark_non_differentiable(pre, x_padded, weight_padded)
    saved = out if _matmul.ACTIVATIONS[ctx.activation] == "relu" else pre
    ctx.save_for_backward(x, weight, bias, saved, x_padded, weight_padded)


def _linear_autograd(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, saved, x_padded, weight_padded = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    if torch.is_grad_enabled():  # for a double backward
        grads: Sequence[Tensor] = _linear_backward_by_torch(grad, x, weight, bias, ctx.activation)
    else:
        x, weight = (p if p.numel() > 0 else t for p, t in ((x_padded, x), (weight_padded, weight)))
        grads = OPS.linear_backward(grad, x, weight, saved, ctx.activation, needs)
    return *(g if needed else None for g, needed in zip(grads, needs, strict=True)), None, None


def _linear_backward_by_torch(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: int
) -> tuple[Tensor, Tensor, Tensor]:
    """By operators that can be differentiated again."""
    name = _matmul.ACTIVATIONS[activation]
    if name is not None:
        argument = OPS.linear(x, weight, bias, 0, True)[0]
        if name == "relu":
            grad = torch.where(argument > 0, grad, 0.0)
        else:
            approximate = "tanh" if name == "gelu_tanh" else "none"
            grad = torch.ops.aten.gelu_backward(grad, argument, approximate=approximate)
    return (
        OPS.addmm(None, grad, weight, 0.0, 1.0, x.dtype),
        OPS.addmm(None, grad.t(), x, 0.0, 1.0, x.dtype),
        grad.sum(0),
    )


def _linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, saved: Tensor, activation: int, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """One pass over `grad` for the activation's derivative, the bias's gradient and padding; then two products."""
    grad_x, grad_weight, grad_bias = _fake_linear_backward(grad, x, weight, saved, activation, needs)
    few = grad.shape[0] <= _matmul.FEW_ROWS or grad.device.type != "cuda"
    if activation != 0 or needs[2] or not (few or _matmul.is_aligned(grad)):
        argument = saved if activation != 0 else None
        columns = grad.shape[1]
        padded, sums = _matmul.copy_pad(grad, argument, activation, needs_bias_grad=needs[2])
        grad, grad_bias = padded[:, :columns], sums.to(grad.dtype) if needs[2] else grad_bias
    if grad_x.numel() > 0:
        _matmul.product(grad, weight, out=grad_x)
    if grad_weight.numel() > 0:
        _matmul.product(grad.t(), x, out=grad_weight)
    return grad_x, grad_weight, grad_bias


def _fake_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, saved: Tensor, activation: int, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _matmul.new_output(x, tuple(x.shape), x.dtype) if needs[0] else x.new_empty(0),
        x.new_empty(weight.shape if needs[1] else 0),
        x.new_empty(weight.shape[0] if needs[2] else 0),
    )


for _name, _kernel, _fake in (
    ("quantize_int8", _quantize_int8, _fake_quantize_int8),
    ("dequantize_int8", _dequantize_int8, _fake_dequantize_int8),
    ("straight_through_int8", _straight_through_int8, _fake_straight_through_int8),
    ("int8_matmul", _int8_matmul, _fake_int8_matmul),
    ("int8_linear", _int8_linear, _fake_int8_linear),
    ("addmm", _addmm, _fake_addmm),
    ("linear", _linear, _fake_linear),
    ("linear_backward", _linear_backward, _fake_linear_backward),
):
    library.define(_name + SCHEMAS[_name])
    # One kernel for every device: it selects the backend itself, so that use_backend reaches it.
    library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"amp_kernels::{_name}", _fake, lib=library)

for _name, _setup, _backward in (
    ("quantize_int8", _save_for_straight_through, _straight_through),
    ("addmm", _addmm_setup, _addmm_backward),
    ("linear", _linear_setup, _linear_autograd),
):
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
