"""Products of fp16 and bf16 matrices, with sums in fp32 and one rounding. On a GPU, odd sizes are padded.

For each call `engine_of` chooses the engine that multiplies, and `copies_of` chooses which operands are copied first.
docs/internals/walks.md has a table of the engines.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import reference, torch_private
from ..backends import PLAIN, forced, refuse
from ..ops import matmul as ops
from ..ops.checks import check_is_dense
from ..ops.matmul import DTYPES, OUT_DTYPES, check_activation, check_beside, check_product, check_shapes
from ..reference.matmul import activate

Activation = Literal["relu", "gelu", "gelu_tanh"]
Size = tuple[int, int]
Copies = tuple[Size | None, Size | None]
NO_COPIES: Copies = (None, None)

TORCH, CPU, LIBRARY, TRITON = "torch", "cpu", "cublas", "triton"
ON_TENSOR_CORES = (LIBRARY, TRITON, "cuda")
# If the first matrix has at most 16 rows, a product on a GPU takes as long as reading the second matrix once. Tensor
# cores and padding do not shorten this time. On a CPU, torch's fp16 product is slow only with more rows (`is_slow`).
FEW_ROWS = 16
# cuBLAS is fast if, in both operands and in the result, the length and the pitch of the rows are multiples of this many
# elements. The pitch is the distance from the beginning of a row to that of the next one. If a matrix is column-major,
# this applies to its columns instead. On an H200 (torch 2.11), the time of fp16 x [4096, K] @ w [N, K].T, in us:
#
#   N = K = 4096                                         181
#   N = K = 4095                                        1021
#   N = K = 4095, only the pitch is rounded up to 4096  1500
#   N = K = 4095, K is padded to 4096                   1322
#   N = K = 4095, K and N are padded to 4096             181
MULTIPLE = 8
# Up to this much work (M * N * K) operands are not copied. For so little work, the host takes longer for a call with
# copies than the device takes for a call without copies. So copies would make a loop of calls slower. On an H200, for
# fp16:
#
#   8192 x 1023 x 1023 (2**33)    Without padding the device takes 140 us. With padding the device takes 47 us, but the
#                                 host takes 145 to 300 us.
#   4096 x 4095 x 4095 (2**36)    A call takes 1036 us without padding and 266 us with padding, including the time of
#                                 the host.
MIN_WORK = 2**34
# The activations that cuBLAS can apply itself, if there is a bias. With use_gelu, `_addmm_activation` of a CUDA tensor
# computes the tanh form. For a CPU tensor it would compute the form with erf.
IN_ONE_CALL = ("relu", "gelu_tanh")


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
    copies = copies_of(engine, left, right)
    if dtype is a.dtype and _is_one_torch_call(engine, copies, left):
        return torch.matmul(a, b)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    out = _Product.apply(engine, copies, None, left, right, 0.0, 1.0, dtype)
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
    check_product("addmm", a, b)
    term = _term(input, a, b)
    copies = copies_of(engine, a, b)
    if dtype is a.dtype and alpha != 0 and engine == LIBRARY and _is_one_torch_call(engine, copies, a):
        return multiply(input, a, b, beta=beta, alpha=alpha)
    return _Product.apply(engine, copies, term, a, b, float(beta), float(alpha), dtype)


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
    check_activation("linear", activation)
    _check_are_tensors("linear", x=x, weight=weight, bias=bias)
    kind = _kind_of(x)
    x, weight, bias = autocast(kind, x, weight, bias)
    engine = engine_of("linear", x.dtype, kind)
    if engine == TORCH or _is_special(kind, x, weight):
        function = F.linear if activation is None else lambda *operands: activate(F.linear(*operands), activation)
        return _by_torch("linear", function, x, weight, bias)
    check_serves(engine, kind)
    _check_linear(x, weight, bias)
    rows = x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)
    tensors = (rows, weight) if bias is None else (rows, weight, bias)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    copies = copies_of(engine, rows, weight.t()) if engine in ON_TENSOR_CORES else NO_COPIES
    # On a GPU without a forced backend, torch's `linear` and torch's activation are called if three conditions hold:
    # nothing is padded, torch's `linear` rounds once, and a gradient is needed or there is no activation. In these
    # cases `_Linear` was not faster than torch, although its backward pass reads the gradient once (`copy_pad`) and
    # torch's reads it twice. On an H200, gelu with fp16 4096^3, forward and backward, took 0.69 ms by `_Linear` and
    # 0.67 ms by torch.
    rounds_once = bias is None or x.dim() == 2 or (x.is_contiguous() and bias.is_contiguous())
    is_one_call = rounds_once and (engine == CPU or activation is None or needs_grad)
    if is_one_call and _is_one_torch_call(engine, copies, rows):
        return activate(F.linear(x, weight, bias), activation)
    if needs_grad:
        out = _Linear.apply(engine, copies, rows, weight, bias, activation)
    else:
        out = _linear_forward(engine, copies, rows, weight, bias, activation, is_training=False)[0]
    return out if x.dim() == 2 else out.view(*x.shape[:-1], weight.shape[0])


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
    if dtype not in DTYPES:
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
    """Raise RuntimeError for CUDA tensors inside ``use_backend("cpu")``. All other backends check their tensors."""
    if engine == CPU and kind != "cpu":
        refuse(engine, torch.device(kind))


def copies_of(engine: str, a: Tensor, b: Tensor) -> Copies:
    """Return the sizes of the padded copies that replace `a` and `b`; None for an operand that is not copied.

    Copies for torch's product may be larger than the operands, so that cuBLAS is fast (`MULTIPLE`). Copies for this
    package's kernels have the sizes of the operands, because these kernels are fast with any size if rows begin at
    multiples of 16 bytes.
    """
    if engine not in ON_TENSOR_CORES or a.shape[-2] <= FEW_ROWS:
        return NO_COPIES
    (m, k), n = a.shape[-2:], b.shape[-1]
    if engine == LIBRARY and a.numel() * n <= MIN_WORK:
        return NO_COPIES
    if engine != "cuda":
        m = ops.round_up(m, MULTIPLE) if is_column_major(a) else m
        k, n = ops.round_up(k, MULTIPLE), ops.round_up(n, MULTIPLE)
    return _size_of_copy(a, (m, k)), _size_of_copy(b, (k, n))


def _size_of_copy(x: Tensor, size: Size) -> Size | None:
    return None if x.shape[-2:] == size and is_aligned(x) else size


def _copied(copies: Copies, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    left, right = copies
    return a if left is None else padded(a, left), b if right is None else padded(b, right)


def _is_one_torch_call(engine: str, copies: Copies, a: Tensor) -> bool:
    """Return whether a single call of torch's own function computes the product. Then torch's autograd is used too."""
    if engine == CPU:
        return a.dtype is torch.bfloat16 and _pad_of_inner(a) == 0
    return engine == LIBRARY and copies == NO_COPIES


def _is_special(kind: str, *tensors: Tensor) -> bool:
    """Return whether the product has to be left to torch, because the autograd functions below cannot compute it.

    - Tensor subclasses may hold several tensors (DTensor), or none.
    - Fake tensors of a GPU and meta tensors have no memory that could be padded.
    - In forward-mode differentiation these functions would return a derivative of 0.
    - In transforms of `torch.func` they fail.
    """
    if kind == "meta" or torch_private.is_transformed():
        return True
    for t in tensors:
        if t.is_nested or (type(t) not in PLAIN and (kind == "cuda" or is_traceable_wrapper_subclass(t))):
            return True
    return False


def rounds_before_activation(a: Tensor) -> bool:
    """Return whether a product's result is rounded before an activation is applied to it."""
    engine = engine_of("linear", a.dtype, a.device.type)
    return engine == LIBRARY or (engine in (CPU, TRITON) and (a.is_cuda or not is_slow(a)))


def is_slow(a: Tensor) -> bool:
    """Return whether torch's product with `a` is slow on a CPU: if `a` is fp16 and has more than 16 rows.

    Slow products are computed in fp32. With two cores, forward and backward of [2048, 256] @ [256, 1024] took torch a
    second in fp16 and 19 ms in fp32.
    """
    return a.dtype is torch.float16 and a.shape[-2] > FEW_ROWS


# ------------------------------------------------------------------------------------------------------ padded copies
def is_aligned(x: Tensor) -> bool:
    """Return whether a matrix, or every matrix of a batch, can be loaded 16 bytes at a time.

    A row-major matrix is aligned if its rows begin at multiples of 16 bytes. A column-major matrix is aligned if its
    columns begin at multiples of 16 bytes. An empty matrix is aligned, since nothing is loaded.
    """
    elements = ops.ALIGNMENT // x.element_size()
    (rows, columns), (row, column) = x.shape[-2:], x.stride()[-2:]
    if x.numel() == 0:
        return True
    if x.storage_offset() % elements != 0:
        return False
    by_row = column == 1 and (rows == 1 or row % elements == 0)
    by_column = row == 1 and (columns == 1 or column % elements == 0)
    return (by_row or by_column) and all(stride % elements == 0 for stride in x.stride()[:-2])


def is_column_major(x: Tensor) -> bool:
    """Return whether the elements of each column are contiguous, but the elements of each row are not."""
    return x.stride(-2) == 1 and x.stride(-1) != 1


def padded(x: Tensor, size: Size) -> Tensor:
    """Return a copy of a matrix, or of a batch of matrices, padded with zeros to `size`.

    If `x` is column-major, the copy is column-major too, and the columns of the copy begin at multiples of 16 bytes. If
    not, the rows of the copy begin at multiples of 16 bytes.
    """
    rows, columns = size
    if is_column_major(x):
        return padded(x.mT, (columns, rows)).mT
    if x.dim() == 2:
        copy, _ = ops.copy_pad(x, None, None, False, rows)
    else:
        pitch = ops.round_up(columns, ops.ALIGNMENT // x.element_size())
        copy = F.pad(x, (0, pitch - x.shape[-1], 0, rows - x.shape[-2])).contiguous()
    return copy.narrow(-1, 0, columns)


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
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in (*OUT_DTYPES, a.dtype):
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
    check_shapes(op, a, b)
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
    check_is_dense("linear", "x", x)
    check_beside("linear", "weight", weight, x)
    if x.shape[-1:] != weight.shape[1:] or weight.dim() != 2:
        raise ValueError(
            f"linear: x and weight must be [..., in_features] and [out_features, in_features], got {tuple(x.shape)} "
            f"and {tuple(weight.shape)}"
        )
    if bias is not None:
        check_beside("linear", "bias", bias, x)
        if bias.shape != weight.shape[:1]:
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


# ---------------------------------------------------------------------------------------------------------- gradients
class _Product(torch.autograd.Function):
    """``alpha * a @ b + beta * input`` for matrices, or for batches of matrices."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: str,
        copies: Copies,
        input: Tensor | None,
        a: Tensor,
        b: Tensor,
        beta: float,
        alpha: float,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.engine, ctx.beta, ctx.alpha = engine, beta, alpha
        size = (a.shape[-2], b.shape[-1])
        operands = _copied(copies, a, b)
        return _multiply(engine, *operands, input, size=size, beta=beta, alpha=alpha, dtype=dtype)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        _, _, needs_input, needs_a, needs_b, *_ = ctx.needs_input_grad
        grad = grad.to(a.dtype)
        grad_input = grad * ctx.beta if needs_input else None
        grad_a = _product(ctx.engine, grad, b.mT, ctx.alpha) if needs_a else None
        grad_b = _product(ctx.engine, a.mT, grad, ctx.alpha) if needs_b else None
        return None, None, grad_input, grad_a, grad_b, None, None, None


def _product(engine: str, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    return _Product.apply(engine, copies_of(engine, a, b), None, a, b, 0.0, alpha, a.dtype)


class _Linear(torch.autograd.Function):
    """``activation(x @ weight.T + bias)`` of a matrix."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: str,
        copies: Copies,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation | None,
    ) -> Tensor:
        out, pre, *padded_operands = _linear_forward(engine, copies, x, weight, bias, activation, is_training=True)
        ctx.engine, ctx.activation = engine, activation
        # The derivative of relu is computed from its result, the derivatives of the others from their argument.
        saved = None if activation is None else out if activation == "relu" else pre
        ctx.save_for_backward(x, weight, bias, saved, *padded_operands)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, saved, x_padded, weight_padded = ctx.saved_tensors
        _, _, needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # this gradient will be differentiated
            return None, None, *_linear_backward_by_torch(ctx.engine, grad, x, weight, bias, ctx.activation), None
        engine, (rows, columns), inner = ctx.engine, grad.shape, x.shape[1]
        x, weight = x if x_padded is None else x_padded, weight if weight_padded is None else weight_padded
        sums = grad.new_empty(0)
        if engine == CPU:
            wide = reference.matmul.activation_backward(grad, saved, ctx.activation)
            grad, sums = wide.to(grad.dtype), wide.sum(0) if needs_bias else sums
        elif saved is not None or needs_bias or len(weight) != columns or copies_of(engine, grad, weight)[0]:
            # One pass applies the derivative, sums the bias's gradient, and pads.
            grad, sums = ops.copy_pad(grad, saved, ctx.activation, needs_bias, rows)
            # `grad` must have as many columns as `weight` has rows. If `weight` was padded with rows of zeros, the
            # columns of zeros that `copy_pad` added are kept. Otherwise they are cut off.
            grad = grad.narrow(1, 0, len(weight))
        grad_x = grad_weight = None
        if needs_x:
            grad_x = _multiply(engine, *_copied(copies_of(engine, grad, weight), grad, weight), size=(rows, inner))[0]
        if needs_weight:  # the gradient of a parameter is dense, as the parameter is, so its rows are not padded
            operands = _copied(copies_of(engine, grad.t(), x), grad.t(), x)
            grad_weight = _multiply(engine, *operands, size=(columns, inner), pads_rows=False)[0]
            if not grad_weight.is_contiguous():
                grad_weight = grad_weight.clone(memory_format=torch.contiguous_format)
        grad_bias = sums.to(grad.dtype) if needs_bias else None
        return None, None, grad_x, grad_weight, grad_bias, None


def _linear_forward(
    engine: str,
    copies: Copies,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
    *,
    is_training: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the result, the argument of the activation, and the padded copies of `x` and `weight` (None: no copy)."""
    # A weight that needs padding is copied at every call. A copy from an earlier call could be outdated, because some
    # writes to a weight (`.data`, a CUDA graph, FSDP) change neither its version nor its address.
    transposed = weight.t()
    left, right = _copied(copies, x, transposed)
    input = None if bias is None else bias.expand(x.shape[0], weight.shape[0])
    needs_pre = is_training and activation in ("gelu", "gelu_tanh")
    size = (x.shape[0], weight.shape[0])
    out, pre = _multiply(engine, left, right, input, size=size, activation=activation, needs_pre=needs_pre)
    return out, pre, None if left is x else left, None if right is transposed else right.t()


def _linear_backward_by_torch(
    engine: str, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of `x`, `weight` and `bias`, computed by operators that can be differentiated again."""
    if activation is not None:
        argument = _Linear.apply(engine, copies_of(engine, x, weight.t()), x, weight, bias, None)
        if activation == "relu":
            grad = torch.where(argument > 0, grad, 0.0)
        else:
            approximate = "tanh" if activation == "gelu_tanh" else "none"
            grad = torch.ops.aten.gelu_backward(grad, argument, approximate=approximate)
    return (
        _product(engine, grad, weight),
        _product(engine, grad.t(), x),
        None if bias is None else grad.sum(0),
    )


# ----------------------------------------------------------------------------------------------------------- products
def _multiply(
    engine: str,
    a: Tensor,
    b: Tensor,
    input: Tensor | None = None,
    *,
    size: tuple[int, int],
    beta: float = 1.0,
    alpha: float = 1.0,
    activation: Activation | None = None,
    dtype: torch.dtype | None = None,
    pads_rows: bool = True,
    needs_pre: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return two tensors, of which the first is ``activation(alpha * a @ b + beta * input)``.

    With `needs_pre` the second is the argument of the activation. Without `needs_pre` it has no meaning.

    Args:
        size: Rows and columns of the result. Padded operands have more rows or columns.
        pads_rows: Whether this package's kernels may pad the rows of the results. With torch's product it has no
            effect: the rows of the results are as long as the rows of `b`, which may be padded.
    """
    dtype, input = dtype or a.dtype, None if beta == 0 else input
    pads_rows = pads_rows and engine in ON_TENSOR_CORES
    if engine == TRITON:
        refuse(engine, a.device)  # operands that need no copies call no operator that would check them
    if engine == CPU or (engine == TRITON and a.is_cpu):  # in Triton's interpreter, operands may be padded
        term = None if input is None else _widened(input, (*a.shape[:-1], b.shape[-1]))
        argument = _multiply_on_cpu(a, b, term, beta, alpha, dtype)
        out = activate(argument, activation).to(dtype)
        return _narrowed(out, size), _narrowed(argument.to(dtype) if needs_pre else out, size)
    if engine in (LIBRARY, TRITON):
        # If K is 0, `_addmm_activation` of torch 2.11 does not apply the activation.
        is_one_call = activation in IN_ONE_CALL and not needs_pre and dtype is a.dtype and a.shape[-1] > 0
        bias = _bias_of(input, b) if is_one_call else None
        if bias is not None and alpha == beta == 1:
            # One call applies the activation in the epilogue of the product. On an H100 fp16 [8192, 1024] @
            # [1024, 4096] with relu takes 116 us, and as two calls 160 us.
            out = argument = torch._addmm_activation(bias, a, b, use_gelu=activation == "gelu_tanh")
        else:
            argument = _multiply_by_library(a, b, input, beta, alpha, dtype)
            out = _activate_into(torch.empty_like(argument) if needs_pre else argument, argument, activation)
        return _narrowed(out, size), _narrowed(argument, size)
    return ops.matmul(a, b, input, alpha, beta, activation, dtype, pads_rows, needs_pre)


def _multiply_on_cpu(
    a: Tensor, b: Tensor, input: Tensor | None, beta: float, alpha: float, dtype: torch.dtype
) -> Tensor:
    """Return ``alpha * a @ b + beta * input``, either in fp32, not yet rounded, or already in `dtype`."""
    if is_slow(a) or dtype is not a.dtype or a.shape[-1] == 0:
        return reference.matmul.sums(input, a, b, beta=beta, alpha=alpha)
    if pad := _pad_of_inner(a):
        a, b = F.pad(a, (0, pad)), F.pad(b, (0, 0, 0, pad))
    return _multiply_by_library(a, b, input, beta, alpha, dtype)


def _pad_of_inner(a: Tensor) -> int:
    """Return how many zeros have to be appended to each row of `a`.

    If `torch_private.MIXES_ROWS` is True, torch's bf16 product on this CPU reads past the end of a row: a NaN or inf in
    the next row would reach the result of this row.
    """
    return -a.shape[-1] % 32 if torch_private.MIXES_ROWS and a.dtype is torch.bfloat16 else 0


def _multiply_by_library(
    a: Tensor, b: Tensor, input: Tensor | None, beta: float, alpha: float, dtype: torch.dtype
) -> Tensor:
    """Return ``alpha * a @ b + beta * input``, computed by torch's product, which sums in fp32 and rounds once.

    If operands are padded, `input` may be smaller than the result.
    """
    shape = (*a.shape[:-1], b.shape[-1])
    if alpha == 0:  # torch 2.13's baddbmm of bf16 on a CPU would ignore beta
        return (a.new_zeros(shape) if input is None else beta * _widened(input, shape).float()).to(dtype)
    if input is None and alpha == 1:
        multiply = torch.bmm if a.dim() == 3 else torch.mm
        # The result of torch's 16-bit product can have the operands' dtype or fp32, not the other 16-bit dtype.
        return multiply(a, b) if dtype is a.dtype else multiply(a, b, out_dtype=torch.float32).to(dtype)
    add = torch.baddbmm if a.dim() == 3 else torch.addmm
    term = _bias_of(input, b)
    if term is None:
        term = a.new_zeros(()).expand(shape) if input is None else _widened(input, shape)
    beta = 0.0 if input is None else beta
    if dtype is a.dtype:
        return add(term, a, b, beta=beta, alpha=alpha)
    return add(term.float(), a, b, out_dtype=torch.float32, beta=beta, alpha=alpha).to(dtype)


def _bias_of(input: Tensor | None, b: Tensor) -> Tensor | None:
    """Return the row that `input` repeats, padded to the length of a row of `b`; None if it does not repeat a row.

    cuBLASLt adds a tensor with one dimension in the kernel that multiplies. A tensor with two dimensions, such as
    `input`, would first be copied by torch.
    """
    if input is None or input.dim() != 2 or input.shape[0] == 0 or (input.stride(0) != 0 and input.shape[0] > 1):
        return None
    return _widened(input.select(0, 0), b.shape[1:])


def _widened(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `x`, extended to this shape by zeros at the end of each dimension."""
    pads = [pad for size, wanted in zip(reversed(x.shape), reversed(shape), strict=True) for pad in (0, wanted - size)]
    return F.pad(x, pads) if any(pads) else x


def _narrowed(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Return a view of the first rows and columns of matrices."""
    if x.shape[-2:] == size:
        return x
    # `ops.new_result` explains `.data`.
    return x.narrow(-2, 0, size[0]).narrow(-1, 0, size[1]).data


def _activate_into(out: Tensor, argument: Tensor, activation: Activation | None) -> Tensor:
    """Write the activation of `argument` to `out` in one pass. `argument` and `out` may be the same tensor."""
    if activation == "relu":
        return torch.ops.aten.relu.out(argument, out=out)
    if activation is not None:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        return torch.ops.aten.gelu.out(argument, approximate=approximate, out=out)
    return out
