"""Products of fp16 and bf16 matrices of any shape: fp32 sums, one rounding, tensor-core speed without round sizes."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import _checks, _matmul
from .._matmul import is_torchs
from .._ops import OPS as _ops
from ..reference.matmul import activate

Activation = Literal["relu", "gelu", "gelu_tanh"]

# Between two products a look-up in torch's large module misses the caches: 0.5 us, a fortieth of a product of 64 rows.
_torch_matmul, _torch_linear = torch.matmul, F.linear


def matmul(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """``torch.matmul(a, b)`` whose speed does not depend on sizes being multiples of 8.

    fp16 and bf16 are accumulated in fp32 and rounded once, except that cuBLAS may round the parts of a split sum, as
    `torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction` and that of bf16 allow. Left to torch are other
    dtypes but float8, tensor subclasses (DTensor, nested), and transforms of `torch.func`. Differentiable, twice too.
    On a GPU the rows of the result are a multiple of 16 bytes apart, so it may be a view of a wider tensor.

    Args:
        a, b: of one dtype, in the shapes that torch.matmul takes, of any strides: transposed, sliced, expanded.
        out_dtype: fp16, bf16 or fp32 (default: that of the operands).

    Raises:
        TypeError, ValueError: dtypes, devices or shapes do not fit, or an operand is float8.
    """
    if is_torchs(a) and (out_dtype is None or out_dtype is a.dtype):
        try:
            return _torch_matmul(a, b)
        except RuntimeError:
            pass  # the checks below say what is wrong
    _checks.check_are_tensors("matmul", a=a, b=b)
    a, b = _autocast(a, b)
    _checks.check_products("matmul", out_dtype, a=a, b=b)
    _checks.check_dimensions("matmul", a=a, b=b)
    dtype = out_dtype or a.dtype
    if _is_for_torch(a, b):
        return torch.matmul(a, b).to(dtype)
    if b.dim() == 1:
        return matmul(a, b.unsqueeze(1), out_dtype=dtype).squeeze(-1)
    if a.dim() == 1:
        return matmul(a.unsqueeze(0), b, out_dtype=dtype).squeeze(-2)
    if b.dim() == 2 and a.dim() > 2:
        rows = a.flatten(0, -2)
        return _ops.addmm(None, rows, b, 0.0, 1.0, dtype).unflatten(0, a.shape[:-1])
    if a.dim() == 2 and b.dim() == 2:
        return _ops.addmm(None, a, b, 0.0, 1.0, dtype)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (x.expand(*batch, *x.shape[-2:]).flatten(0, -3) for x in (a, b))
    return _ops.addmm(None, a, b, 0.0, 1.0, dtype).unflatten(0, batch)


def addmm(
    input: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``beta * input + alpha * (a @ b)`` in fp32, rounded once: `torch.addmm`, of batches too (`torch.baddbmm`).

    Args:
        input: of the operands' dtype, broadcast to the result; not read if `beta` is 0.
        a, b: [M, K] and [K, N], or batches of as many; fp16 or bf16, of any strides. fp32 is left to torch.
        out_dtype: as in `matmul`.

    Raises:
        TypeError, ValueError: dtypes, devices or shapes do not fit, or an operand is float8.
    """
    _checks.check_are_tensors("addmm", input=input, a=a, b=b)
    a, b, input = _autocast(a, b, input)
    _checks.check_products("addmm", out_dtype, a=a, b=b, input=input)
    if a.dim() not in (2, 3) or b.dim() != a.dim():
        raise ValueError(
            f"addmm: a and b must be two matrices or two batches of them, got {a.dim()} and {b.dim()} dims"
        )
    if _is_for_torch(a, b, input):
        multiply = torch.addmm if a.dim() == 2 else torch.baddbmm
        return multiply(input, a, b, beta=beta, alpha=alpha).to(out_dtype or a.dtype)
    shape = (*a.shape[:-1], b.shape[-1])
    return _ops.addmm(input.expand(shape), a, b, float(beta), float(alpha), out_dtype or a.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation | None = None) -> Tensor:
    """``activation(x @ weight.T + bias)``: `torch.nn.functional.linear` whose bias is added before rounding.

    On a GPU cuBLAS multiplies, and a pass over the rounded result applies the activation; our kernels, where
    `use_backend` forces them, fuse it, as a CPU does where that is faster. The backward pass reads the gradient once
    for the activation's derivative, the bias's gradient (fp32 sums) and the padding that its two products need. Under
    autocast the operands are cast as torch's are.

    Args:
        x: [..., in_features], fp16 or bf16, of any strides; fp32 is left to torch.
        weight: [out_features, in_features] of x's dtype.
        bias: [out_features] of x's dtype, or None.
        activation: ``"relu"``, ``"gelu"`` (by erf), ``"gelu_tanh"`` (torch's ``approximate="tanh"``), or None.

    Returns:
        [..., out_features] of x's dtype; on a GPU its rows are a multiple of 16 bytes apart.

    Raises:
        TypeError, ValueError: dtypes, devices or shapes do not fit, an operand is float8, or `activation` is none of
            these.
    """
    if is_torchs(x) and _adds_before_rounding(x, bias):
        try:
            result = _torch_linear(x, weight, bias) if activation is None else _activated(x, weight, bias, activation)
        except RuntimeError:
            result = None  # the checks below say what is wrong
        if result is not None:
            return result
    if activation not in _matmul.ACTIVATIONS:
        names = ", ".join(map(repr, _matmul.ACTIVATIONS))
        raise ValueError(f"linear: activation must be one of {names}, got {activation!r}")
    _checks.check_are_tensors("linear", x=x, weight=weight)
    _checks.check_are_tensors_or_none("linear", bias=bias)
    given = [x, weight] if bias is None else [x, weight, bias]
    x, weight, *rest = _autocast(*given)
    bias = rest[0] if rest else None
    _checks.check_products("linear", None, x=x, weight=weight)
    _checks.check_dimensions("linear", x=x, weight=weight)
    if _is_for_torch(x, weight) or weight.shape[-1] == 0:
        return activate(F.linear(x, weight, bias), activation)
    _checks.check_linear(x, weight, bias)
    keeps = _needs_grad(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    out = _ops.linear(rows, weight, bias, _matmul.ACTIVATIONS.index(activation), keeps)[0]
    return out if x.dim() == 2 else out.view(*x.shape[:-1], weight.shape[0])


def _adds_before_rounding(x: Tensor, bias: Tensor | None) -> bool:
    """Whether torch's `linear` of bf16 on a CPU is one product with a bias, rounded once, not a product and a sum."""
    return bias is None or x.dim() == 2 or (x.is_contiguous() and isinstance(bias, Tensor) and bias.is_contiguous())


def _activated(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor | None:
    """`linear` of what `_matmul.is_torchs`; None where it takes an operator all the same."""
    is_traced = torch._C._get_tracing_state() is not None  # oneDNN's operator cannot be
    if activation not in _matmul.ACTIVATIONS or is_traced or _is_for_torch(x, weight):
        return None
    _checks.check_linear(x, weight, bias)
    if activation == "relu":
        return F.relu(F.linear(x, weight, bias))
    if _needs_grad(x, weight, bias) or not _matmul.has_onednn_bf16():
        return None
    return _matmul.gelu_linear(x, weight, bias, activation)


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def pad_to_multiple(x: Tensor, multiple: int = 8) -> Tensor:
    """A copy of `x` as a view of padded storage: rows begin `multiple` elements apart or a multiple of that.

    The view has x's shape (a [N, 1023] view of [N, 1024]); the padding is zero. Of any dtype; differentiable.
    """
    if multiple < 1:
        raise ValueError(f"pad_to_multiple: multiple must be at least 1, got {multiple}")
    if x.dim() == 0:
        raise ValueError("pad_to_multiple: x must have a last dimension to pad, got a 0-dim tensor")
    return F.pad(x, (0, -x.shape[-1] % multiple))[..., : x.shape[-1]]


def _is_for_torch(*tensors: Tensor) -> bool:
    """Whether the operators have no rule for such tensors; in forward mode they would return a derivative of 0."""
    return (
        all(t.dtype not in _matmul.DTYPES for t in tensors)
        or any(t.is_meta or is_traceable_wrapper_subclass(t) for t in tensors)
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """Under autocast floating-point operands get its dtype, as those of torch's products do."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [t.to(dtype) if t.is_floating_point() and t.dtype is not torch.float64 else t for t in tensors]
