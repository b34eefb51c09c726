"""Products of fp16 and bf16 matrices, with sums in fp32 and one rounding. On a GPU, odd sizes are padded.

For each call `engine_of` chooses the engine that multiplies. ops/matmul.py has the products themselves.
docs/internals/walks.md has a table of the engines.
"""

from __future__ import annotations

import numbers
from types import NoneType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import torch_private
from ..backends import PLAIN, forced, refuse
from ..ops import matmul as ops
from ..ops.checks import check_is_dense
from ..ops.matmul import CPU, LIBRARY, TORCH, TRITON, check_beside, is_one_torch_call
from ..reference.matmul import activate

Activation = Literal["relu", "gelu", "gelu_tanh"]


# ---------------------------------------------------------------------------------------------------- public functions
def matmul(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Multiply 16-bit matrices. On a GPU, sizes that would slow down tensor cores are padded.

    This is `torch.matmul` with fp32 accumulation and one rounding. On a GPU cuBLAS multiplies. If sizes or strides
    would make cuBLAS slow, the operands are copied and padded with zeros, and cuBLAS multiplies the copies. Without
    this, odd sizes can halve the speed of tensor cores, or worse. If
    `torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction` (or the setting for bf16) allows it, cuBLAS may
    split a sum and round its parts.

    On a CPU torch multiplies. If the operands are fp16 and `a` has more than 16 rows, torch multiplies in fp32, because
    torch's fp16 product is slow.

    Some calls are left to `torch.matmul`: operands of other dtypes or on other devices, tensor subclasses such as
    DTensor, nested tensors, forward-mode differentiation, transforms of `torch.func`, and compiled code for a GPU, in
    which Inductor pads the operands.

    The product can be differentiated, also twice.

    Args:
        a: A vector, matrix or batch of matrices, as in `torch.matmul`; fp16 or bf16, of any strides.
        b: The same, in the dtype of `a`.
        out_dtype: fp16, bf16 or fp32; None for the dtype of the operands.

    Returns:
        The product. On a GPU it may be a view of a wider tensor.

    Raises:
        TypeError: Dtypes do not fit, or an operand is float8.
        ValueError: Shapes or devices do not fit.
        RuntimeError: The call was left to torch, and torch raised an error. The message ends with that error.

    Examples:
        >>> a, b = torch.ones(3, 5, dtype=torch.bfloat16), torch.ones(5, 7, dtype=torch.bfloat16)
        >>> amp_kernels.matmul(a, b, out_dtype=torch.float32)[0, 0]
        tensor(5.)
    """
    _check_are_tensors("matmul", a=a, b=b)
    kind = _kind_of(a)
    a, b = autocast(kind, a, b)
    engine = engine_of("matmul", a.dtype, kind)
    dtype = a.dtype if out_dtype is None else _result_dtype("matmul", out_dtype, a)
    if engine == TORCH or _is_special(kind, a, b):
        return _by_torch("matmul", torch.matmul, a, b, dtype=dtype)
    check_serves(engine, kind)
    left, right = as_matrices("matmul", a, b)
    if dtype is a.dtype and is_one_torch_call(engine, left, right):
        return torch.matmul(a, b)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    out = ops.product(engine, left, right, out=dtype)
    return out.view((*batch, *a.shape[-2:-1], *b.shape[-1:][: b.dim() - 1]))


def addmm(
    input: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return `beta * input + alpha * (a @ b)`, computed in fp32 and rounded once.

    This is `torch.addmm` for matrices and `torch.baddbmm` for batches. Devices, dtypes and errors are as in `matmul`.

    Args:
        input: A tensor that broadcasts to the result, in the dtype of the operands. If `beta` is 0, it is not read.
        a: `[M, K]` or `[B, M, K]`, fp16 or bf16, of any strides. Other dtypes are left to torch.
        b: `[K, N]` or `[B, K, N]`, in the dtype of `a`.
        beta: Factor of `input`.
        alpha: Factor of the product.
        out_dtype: fp16, bf16 or fp32; None for the dtype of the operands.

    Returns:
        `[M, N]` or `[B, M, N]`.

    Examples:
        >>> a, b = torch.ones(3, 5, dtype=torch.float16), torch.ones(5, 2, dtype=torch.float16)
        >>> amp_kernels.addmm(torch.ones(2, dtype=torch.float16), a, b, beta=0.5)[0]
        tensor([5.5000, 5.5000], dtype=torch.float16)
    """
    _check_are_tensors("addmm", input=input, a=a, b=b)
    kind = _kind_of(a)
    a, b, input = autocast(kind, a, b, input)
    engine = engine_of("addmm", a.dtype, kind)
    dtype = a.dtype if out_dtype is None else _result_dtype("addmm", out_dtype, a)
    _check_factor("beta", beta, a)
    _check_factor("alpha", alpha, a)
    if a.dim() not in (2, 3) or b.dim() != a.dim():
        raise ValueError(
            f"addmm: a and b must be two matrices or two batches of them, got {a.dim()} and {b.dim()} dims"
        )
    multiply = torch.addmm if a.dim() == 2 else torch.baddbmm
    if engine == TORCH or _is_special(kind, a, b, input):
        return _by_torch("addmm", multiply, input, a, b, dtype=dtype, beta=beta, alpha=alpha)
    check_serves(engine, kind)
    ops.check_product("addmm", a, b)
    term = _term(input, a, b)
    if dtype is a.dtype and alpha != 0 and engine == LIBRARY and is_one_torch_call(engine, a, b):
        return multiply(input, a, b, beta=beta, alpha=alpha)
    return ops.product(engine, a, b, float(alpha), term, float(beta), dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation | None = None) -> Tensor:
    """Apply a linear layer and an activation to 16-bit tensors of any size.

    The result is `activation(x @ weight.T + bias)`, as from `torch.nn.functional.linear`. The bias is added before
    rounding. Under autocast the operands are cast, as in torch's `linear`.

    The activation is a second pass over the rounded result, with three exceptions:

    - Inside `use_backend("cuda")` and `use_backend("reference")` it is applied before rounding.
    - On a CPU, fp16 products with more than 16 rows are computed in fp32. The activation is applied before rounding.
    - On a GPU, if there is a bias, cuBLAS applies `relu` itself, and `gelu_tanh` if no gradient is needed. But if a
      gradient is needed and no operand has to be padded, torch's `linear` may compute the product. `relu` is then a
      second pass.

    On a GPU operands and results are padded as in `matmul`. If operands were padded, or a backend is forced, the
    backward pass reads the gradient of the result once, and sums the gradient of the bias in fp32.

    Args:
        x: `[..., in_features]`, fp16 or bf16, of any strides. Other dtypes are left to torch.
        weight: `[out_features, in_features]`, in the dtype of `x`.
        bias: `[out_features]`, in the dtype of `x`, or None.
        activation: `"relu"`, `"gelu"` (by erf), `"gelu_tanh"` (as torch's `approximate="tanh"`; Hendrycks and Gimpel
            2016), or None.

    Returns:
        `[..., out_features]` in the dtype of `x`. On a GPU it may be a view of a wider tensor.

    Raises:
        ValueError: `activation` is not one of these. All other errors are as in `matmul`.

    Examples:
        >>> x, weight = torch.ones(2, 3, dtype=torch.bfloat16), -torch.ones(5, 3, dtype=torch.bfloat16)
        >>> amp_kernels.linear(x, weight).unique()
        tensor([-3.], dtype=torch.bfloat16)
        >>> amp_kernels.linear(x, weight, activation="relu").shape
        torch.Size([2, 5])
    """
    if activation is not None:
        ops.check_activation("linear", activation)
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or not isinstance(bias, (Tensor, NoneType)):
        _check_are_tensors("linear", x=x, weight=weight, bias=bias)
    kind = _kind_of(x)
    x, weight, bias = autocast(kind, x, weight, bias)
    engine = engine_of("linear", x.dtype, kind)
    if engine == TORCH or _is_special(kind, x, weight):
        function = F.linear if activation is None else lambda *operands: activate(F.linear(*operands), activation)
        return _by_torch("linear", function, x, weight, bias)
    check_serves(engine, kind)
    _check_linear(x, weight, bias)
    dims = x.dim()
    rows = x if dims == 2 else x.flatten(0, -2) if dims > 2 else x.unsqueeze(0)
    # On a GPU without a forced backend, torch's `linear` and torch's activation are called if three conditions hold:
    # nothing is padded, torch's `linear` rounds once, and a gradient is needed or there is no activation. In these
    # cases `ops.linear` was not faster than torch, although its backward pass reads the gradient once (`copy_pad`) and
    # torch's reads it twice. On an H200, gelu with fp16 4096^3, forward and backward, took 0.69 ms by `ops.linear` and
    # 0.67 ms by torch.
    rounds_once = dims == 2 or bias is None or (x.is_contiguous() and bias.is_contiguous())
    is_one_call = rounds_once and (engine == CPU or activation is None or ops.needs_grad(x, weight, bias))
    if is_one_call and is_one_torch_call(engine, rows, weight if engine == CPU else weight.t()):
        y = F.linear(x, weight, bias)
        return y if activation is None else activate(y, activation)
    out = ops.linear(engine, rows, weight, bias, activation)
    return out if dims == 2 else out.view(*x.shape[:-1], weight.shape[0])


def pad_to_multiple(x: Tensor, multiple: int = 8) -> Tensor:
    """Copy a tensor into padded memory, where each row begins at a multiple of `multiple` elements.

    The result is a view with the shape of `x`, for example a `[N, 1023]` view of `[N, 1024]`. The padding is 0.
    Differentiable.

    Args:
        x: A tensor of any dtype with at least one dimension.
        multiple: The distance between the beginnings of rows is rounded up to a multiple of this many elements.

    Returns:
        The view, with x's shape and dtype.

    Raises:
        TypeError: `x` is not a tensor, or `multiple` is not an int.
        ValueError: `x` has no dimension, or `multiple` is below 1.

    Examples:
        >>> y = amp_kernels.pad_to_multiple(torch.ones(2, 5))
        >>> y.shape, y.stride()
        (torch.Size([2, 5]), (8, 1))
    """
    _check_are_tensors("pad_to_multiple", x=x)
    if not isinstance(multiple, (int, torch.SymInt)):
        raise TypeError(f"pad_to_multiple: multiple must be an int, got {multiple!r}")
    if multiple < 1:
        raise ValueError(f"pad_to_multiple: multiple must be at least 1, got {multiple}")
    if x.dim() == 0:
        raise ValueError("pad_to_multiple: x must have a last dimension to pad, got a 0-dim tensor")
    return _by_torch("pad_to_multiple", lambda x: F.pad(x, (0, -x.shape[-1] % multiple))[..., : x.shape[-1]], x)


# -------------------------------------------------------------------------------------------------- choice of engine
def engine_of(op: str, dtype: torch.dtype, kind: str) -> str:
    """Return the engine that multiplies on a type of device: TORCH, CPU, LIBRARY, or the backend that is forced.

    There is no Triton kernel for 16-bit products. If `"triton"` is forced, torch multiplies. Triton pads the operands
    that need it, in small products too.
    """
    if dtype not in ops.DTYPES:
        # torch would round a product of float8 to 8 bits, even if `out_dtype` has 16 or 32 bits.
        if dtype.itemsize == 1 and dtype.is_floating_point:
            raise TypeError(
                f"{op}: operands must have at least 16 bits per element, got {dtype}; convert them with "
                ".to(torch.bfloat16)"
            )
        return TORCH
    is_compiled = torch.compiler.is_compiling()
    # A compiled graph may run again outside of the `use_backend` block in which it was traced, so it ignores the block.
    # A compiled graph for a GPU calls torch's own product (TORCH), and Inductor pads the operands.
    name = None if is_compiled else forced()
    if kind == "cpu" and name in (None, "cpu"):
        return CPU
    if name is not None:
        return name
    return LIBRARY if kind == "cuda" and not is_compiled else TORCH


def check_serves(engine: str, kind: str) -> None:
    """Raise RuntimeError if the backend that is forced cannot serve a type of device.

    Other backends than these two check the tensors of each operator that they are called for.
    """
    if engine == TRITON or (engine == CPU and kind != "cpu"):
        refuse(engine, torch.device(kind))


def _is_special(kind: str, *tensors: Tensor) -> bool:
    """Return whether the product has to be left to torch, because the autograd functions below cannot compute it.

    - Tensor subclasses may hold several tensors (DTensor), or none.
    - Fake tensors of a GPU and meta tensors have no memory that could be padded.
    - In forward-mode differentiation these functions would return a derivative of 0.
    - In transforms of `torch.func` they fail.
    """
    for t in tensors:
        if t.is_nested or (type(t) not in PLAIN and (kind == "cuda" or is_traceable_wrapper_subclass(t))):
            return True
    return kind == "meta" or torch_private.is_transformed()


def rounds_before_activation(a: Tensor) -> bool:
    """Return whether a product's result is rounded before an activation is applied to it."""
    engine = engine_of("linear", a.dtype, a.device.type)
    return engine == LIBRARY or (engine in (CPU, TRITON) and (a.is_cuda or not ops.is_slow(a)))


# ---------------------------------------------------------------------------------------------------------- arguments
def _check_are_tensors(op: str, **operands: object) -> None:
    """Raise TypeError if an operand is not a Tensor. A bias may be None."""
    for name, x in operands.items():
        if not isinstance(x, Tensor) and (x is not None or name != "bias"):
            raise TypeError(f"{op}: {name} must be a Tensor, got {type(x).__name__}")


def _kind_of(x: Tensor) -> str:
    return "cpu" if x.is_cpu else x.device.type  # is_cpu takes 0.1 us, device.type 0.4 us


def autocast(kind: str, *tensors: Any) -> Any:
    """Return the operands, cast to autocast's dtype if autocast is on. As in torch, fp64 and integers are not cast."""
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        t if t is None or not t.is_floating_point() or t.dtype is torch.float64 else t.to(dtype) for t in tensors
    )


def _result_dtype(op: str, out_dtype: object, a: Tensor) -> torch.dtype:
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in (*ops.OUT_DTYPES, a.dtype):
        raise TypeError(
            f"{op}: out_dtype must be float32, float16 or bfloat16, got {out_dtype!r}; leave it out to keep the "
            "operands' dtype"
        )
    return out_dtype


def _check_factor(name: str, factor: object, a: Tensor) -> None:
    if type(factor) in (int, float):
        return
    is_number = isinstance(factor, (numbers.Number, torch.SymInt, torch.SymFloat))
    if not is_number or (isinstance(factor, complex) and not a.is_complex()):
        raise TypeError(f"addmm: {name} must be a{'' if is_number else ' real'} number, got {factor!r}")


def as_matrices(op: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return `a` and `b` as two matrices, or as two equally large batches of matrices, with the same product.

    Both must have at least 1 dimension.
    """
    if a.dim() == 0 or b.dim() == 0:
        dims = f"{a.dim()} and {b.dim()}"
        raise ValueError(f"{op}: a and b must have at least 1 dimension, got {dims}; to multiply by a number use *")
    check_is_dense(op, "a", a)
    check_beside(op, "b", b, a)
    of_a, of_b = a.shape, b.shape
    if len(of_a) == len(of_b) == 2 and of_a[1] == of_b[0]:  # the usual case
        return a, b
    a, b = a.unsqueeze(0) if a.dim() == 1 else a, b.unsqueeze(1) if b.dim() == 1 else b
    if b.dim() == 2:
        a = a.flatten(0, -2) if a.dim() > 2 else a
    elif all(m == n or 1 in (m, n) for m, n in zip(of_a[-3::-1], of_b[-3::-1], strict=False)):
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a, b = (x.expand(*batch, *x.shape[-2:]).flatten(0, -3) for x in (a, b))
    ops.check_shapes(op, a, b)
    return a, b


def _term(input: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the `input` of `addmm`, broadcast to the shape of the result."""
    check_beside("addmm", "input", input, a)
    shape = (*a.shape[:-1], b.shape[-1])
    if input.shape == shape:
        return input
    sizes = zip(reversed(input.shape), reversed(shape), strict=False)
    if input.dim() > len(shape) or not all(n in (1, wanted) for n, wanted in sizes):
        raise ValueError(f"addmm: input must broadcast to the result's shape {shape}, got {tuple(input.shape)}")
    return input.expand(shape)


def _check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise if an operand of `linear` does not fit, even if torch would broadcast or convert it."""
    if x.layout is not torch.strided:
        check_is_dense("linear", "x", x)
    check_beside("linear", "weight", weight, x)
    if weight.dim() != 2 or x.dim() == 0 or x.size(-1) != weight.size(1):
        raise ValueError(
            f"linear: x and weight must be [..., in_features] and [out_features, in_features], got {tuple(x.shape)} "
            f"and {tuple(weight.shape)}"
        )
    if bias is not None:
        check_beside("linear", "bias", bias, x)
        if bias.dim() != 1 or bias.size(0) != weight.size(0):
            raise ValueError(f"linear: bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")


# The errors that torch raises for operands that do not fit. The last two come from torch's code for nested tensors.
_REFUSALS = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AttributeError, AssertionError)


def _by_torch(
    op: str, function: Any, *operands: Tensor | None, dtype: torch.dtype | None = None, **factors: float
) -> Tensor:
    """Call a function of torch. If it raises an error, raise it with a message that describes the operands first."""
    try:
        out: Tensor = function(*operands, **factors)
        return out if dtype is None or out.dtype is dtype else out.to(dtype)
    except _REFUSALS as error:
        # Subclasses of these errors have other causes: memory ran out, or a GPU reports that an earlier kernel failed.
        if type(error) not in _REFUSALS:
            raise
        given = [x for x in operands if x is not None]
        got = ", ".join(map(_told, given))
        if len({x.dtype for x in given}) > 1:
            remedy = "convert them with .to(), or use torch.autocast"
            raise TypeError(f"{op}: operands must have one dtype, got {got}; {remedy}") from error
        kind = TypeError if isinstance(error, TypeError) else RuntimeError
        raise kind(f"{op}: operands must be valid for torch, got {got}; torch says: {error}") from error


def _told(x: Tensor) -> str:
    shape = "nested" if x.is_nested else tuple(x.shape)
    layout = "" if x.layout is torch.strided else f", {x.layout},"
    return f"{str(x.dtype).removeprefix('torch.')} {shape}{layout} on {x.device}"
