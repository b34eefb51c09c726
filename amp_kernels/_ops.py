"""Operators: schemas, fakes, and one implementation each that runs on whatever backend serves its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _checks, _matmul
from ._backends import library

SCHEMAS = {
    "addmm": "(Tensor? input, Tensor a, Tensor b, float beta, float alpha, ScalarType out_dtype) -> Tensor",
    # (result, argument of the activation, padded x, padded weight), the last three empty if not needed; `keeps`: for
    # a backward pass.
    "linear": "(Tensor x, Tensor weight, Tensor? bias, int activation, bool keeps) -> (Tensor, Tensor, Tensor, Tensor)",
    "linear_backward": "(Tensor grad, Tensor x, Tensor weight, Tensor saved, int activation, bool[] needs) -> "
    "(Tensor, Tensor, Tensor)",
}


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
    ("addmm", _addmm, _fake_addmm),
    ("linear", _linear, _fake_linear),
    ("linear_backward", _linear_backward, _fake_linear_backward),
):
    library.define(_name + SCHEMAS[_name])
    # One kernel for every device: it selects the backend itself, so that use_backend reaches it.
    library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"amp_kernels::{_name}", _fake, lib=library)

for _name, _setup, _backward in (
    ("addmm", _addmm_setup, _addmm_backward),
    ("linear", _linear_setup, _linear_autograd),
):
    torch.library.register_autograd(f"amp_kernels::{_name}", _backward, setup_context=_setup, lib=library)

OPS = torch.ops.amp_kernels
