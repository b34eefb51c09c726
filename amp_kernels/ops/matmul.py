"""Operators of the matmul family, and what they share with products that call no operator.

- `matmul` is a product by this package's tensor-core kernels. `copy_pad` copies a matrix into padded rows.
- `padded_matmul` and `padded_linear_backward` are products by torch, on operands that are first padded where padding
  makes cuBLAS fast.

All have kernels in CUDA C++, and `copy_pad` has a Triton kernel. On other devices the reference computes them.
amp_kernels/functional/matmul.py chooses between these operators and torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import SymInt, Tensor

from .. import reference, torch_private
from .checks import check_is_dense
from .library import DEFINITIONS, Arguments, Kernels, call, define

ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh")  # in the order of enum Activation, csrc/matmul.h
DTYPES = (torch.float16, torch.bfloat16)
OUT_DTYPES = (torch.float32, *DTYPES)
Size = tuple[int, int]
Copies = tuple[Size | None, Size | None]
NO_COPIES: Copies = (None, None)
TORCH, CPU, LIBRARY, TRITON = "torch", "cpu", "cublas", "triton"  # engines; the others are the backends that are forced
ON_TENSOR_CORES = (LIBRARY, TRITON, "cuda")
# In bytes. The tiled kernels can load an operand 16 bytes at a time only if its rows begin at multiples of 16 bytes, or
# its columns if it is column-major. Otherwise they load one element at a time.
ALIGNMENT = 16
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
# Up to this much work (M * N * K) cuBLAS gets operands as they are. When Python made the copies, fp16 8192 x 1023 x
# 1023 (2**33) took an H200 140 us without copies and 47 us with them, but the host 145 to 300 us. Now one C++ operator
# makes them, which no GPU has measured yet. The contender "amp_kernels.linear, padded" in the rows "linear" of
# benchmarks/bench_matmul.py will decide this number. About 2**30 is expected.
MIN_WORK = 2**34
# Products with up to this many rows, whose operands are not aligned, are left to this package's kernel for few rows.
# The contender "amp_kernels.linear, odd rows" in the row "linear" 16x4095x4095 of benchmarks/bench_matmul.py will
# decide whether 0 becomes `FEW_ROWS`. 17 to 19 us are expected on an H200, where torch takes 37 us.
ODD_ROWS = 0
# The activations that cuBLAS can apply itself, if there is a bias. With use_gelu, `_addmm_activation` of a CUDA tensor
# computes the tanh form. For a CPU tensor it would compute the form with erf.
IN_ONE_CALL = ("relu", "gelu_tanh")


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


def new_result(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, pads_rows: bool) -> Tensor:
    """Return uninitialised memory for a result. With `pads_rows` its rows begin at multiples of 16 bytes."""
    if not pads_rows:
        return like.new_empty(shape, dtype=dtype)
    pitch = round_up(shape[-1], ALIGNMENT // dtype.itemsize)
    # `.data` hides from autograd that the result is a view. An autograd function may return this result. If autograd
    # knew that it is a view, autograd would forbid the caller to write to it in place.
    return like.new_empty((*shape[:-1], pitch), dtype=dtype).narrow(-1, 0, shape[-1]).data


# ------------------------------------------------------------------------------------------------------------ checks
def check_activation(op: str, activation: object) -> None:
    """Raise ValueError unless `activation` is one of `ACTIVATIONS`."""
    if activation is not None and (not isinstance(activation, str) or activation not in ACTIVATIONS):
        names = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"{op}: activation must be one of {names}, got {activation!r}")


def check_low(op: str, name: str, x: Tensor) -> None:
    """Raise unless `x` is a dense fp16 or bf16 tensor."""
    check_is_dense(op, name, x)
    if x.dtype not in DTYPES:
        remedy = "convert it with .half() or .bfloat16(), or use torch.autocast"
        raise TypeError(f"{op}: {name} must be float16 or bfloat16, got {x.dtype}; {remedy}")


def check_beside(op: str, name: str, x: Tensor, first: Tensor) -> None:
    """Raise unless `x` is dense and has the dtype and the device of the first operand."""
    if x.is_nested or x.layout is not torch.strided:
        check_is_dense(op, name, x)
    if x.dtype is not first.dtype:
        remedy = f"convert it with .to({first.dtype}), or use torch.autocast"
        raise TypeError(f"{op}: {name} must be {first.dtype} as the first operand is, got {x.dtype}; {remedy}")
    if not (x.is_cpu and first.is_cpu) and x.device != first.device:  # `device` takes longer
        raise ValueError(f"{op}: {name} must be on {first.device} as the first operand is, got {x.device}")


def check_product(op: str, a: Tensor, b: Tensor) -> None:
    """Raise unless `a` and `b` are 16-bit matrices, or equally large batches of them, that can be multiplied."""
    check_low(op, "a", a)
    check_beside(op, "b", b, a)
    check_shapes(op, a, b)


def check_shapes(op: str, a: Tensor, b: Tensor) -> None:
    """Raise ValueError unless the shapes are [M, K] and [K, N], or [B, M, K] and [B, K, N]."""
    (*batch, _, k), of_b = a.shape, b.shape
    if len(of_b) != len(batch) + 2 or len(batch) > 1 or of_b[-2] != k or list(of_b[:-2]) != batch:
        raise ValueError(
            f"{op}: b must be a matrix that a can be multiplied with, got {tuple(a.shape)} @ {tuple(b.shape)}"
        )


# --------------------------------------------------------------------------------------------------------- operators
@dataclass
class _Matmul(Arguments):
    """Returns ``activation(alpha * a @ b + beta * input)`` for 16-bit matrices or batches of them, and its argument.

    Both are summed in fp32 and rounded once. Without `needs_pre` the second result, the argument of the activation, has
    no elements. With `pads_rows` the rows of both results begin at multiples of 16 bytes.
    """

    a: Tensor
    b: Tensor
    input: Tensor | None
    alpha: float
    beta: float
    activation: str | None
    out_dtype: torch.dtype
    pads_rows: bool
    needs_pre: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.a.shape[:-1], self.b.shape[-1])

    def check(self) -> None:
        check_activation("matmul", self.activation)
        check_product("matmul", self.a, self.b)
        if self.input is not None:
            check_beside("matmul", "input", self.input, self.a)
            if self.input.shape != self.shape:
                got = tuple(self.input.shape)
                raise ValueError(f"matmul: input must have the result's shape {self.shape}, got {got}")
        if self.out_dtype not in OUT_DTYPES:
            raise TypeError(f"matmul: out_dtype must be float32, float16 or bfloat16, got {self.out_dtype}")

    def fake(self) -> tuple[Tensor, Tensor]:
        out, pre = (
            new_result(self.a, shape, self.out_dtype, pads_rows=self.pads_rows)
            for shape in (self.shape, self.shape if self.needs_pre else (0,))
        )
        return out, pre

    def in_torch(self) -> tuple[Tensor, Tensor]:
        return reference.matmul.addmm(
            self.input, self.a, self.b, beta=self.beta, alpha=self.alpha, activation=self.activation,
            out_dtype=self.out_dtype,
        )  # fmt: skip


@dataclass
class _CopyPad(Arguments):
    """Computes two tensors in one pass over x [R, C].

    The first is x padded with zeros to [rows, P], where P is the smallest number that is at least C and makes the
    length of a row a multiple of 16 bytes. If `saved` is given, x is multiplied by the derivative of the activation.
    For gelu and gelu_tanh, `saved` is the argument of the activation. For relu it is the result of the activation.
    The second tensor holds the sum of each column of x (of the products, if `saved` is given). The sums [C] are fp32,
    and the numbers are added before they are rounded for the first tensor. Without `needs_sums` it has no elements.
    """

    x: Tensor
    saved: Tensor | None
    activation: str | None
    needs_sums: bool
    rows: SymInt

    def check(self) -> None:
        x, saved = self.x, self.saved
        check_activation("copy_pad", self.activation)
        check_low("copy_pad", "x", x)
        if x.dim() != 2:
            raise ValueError(f"copy_pad: x must have 2 dimensions, got {x.dim()}")
        if self.rows < x.shape[0]:
            raise ValueError(f"copy_pad: rows must be at least x's {x.shape[0]}, got {self.rows}")
        if (saved is None) != (self.activation is None):
            raise ValueError(
                "copy_pad: saved must be a Tensor if there is an activation, and otherwise None, got a "
                f"{type(saved).__name__} with activation {self.activation!r}"
            )
        if saved is not None:
            check_beside("copy_pad", "saved", saved, x)
            if saved.shape != x.shape:
                raise ValueError(f"copy_pad: saved must have x's shape {tuple(x.shape)}, got {tuple(saved.shape)}")

    def fake(self) -> tuple[Tensor, Tensor]:
        x = self.x
        out = x.new_empty((self.rows, round_up(x.shape[1], ALIGNMENT // x.element_size())))
        return out, x.new_empty(x.shape[1] if self.needs_sums else 0, dtype=torch.float32)

    def in_torch(self) -> tuple[Tensor, Tensor | None]:
        x, saved = self.x, self.saved
        values = x.float() if saved is None else reference.matmul.activation_backward(x, saved, self.activation)
        pads: Any = (0, -x.shape[1] % (ALIGNMENT // x.element_size()), 0, self.rows - x.shape[0])
        return F.pad(values.to(x.dtype), pads), values.sum(0) if self.needs_sums else None

    def launch(self, kernels: Kernels) -> tuple[Tensor, Tensor]:
        x, (out, sums) = self.x, self.fake()
        out[x.shape[0] :].zero_()
        if x.numel() > 0:
            written, wanted = out[: x.shape[0]], sums if self.needs_sums else None
            kernels._copy_pad_(x, self.saved, written, wanted, ACTIVATIONS.index(self.activation))
        return out, sums.zero_() if x.numel() == 0 else sums


@dataclass
class _PaddedMatmul(_Matmul):
    """Returns what `matmul` returns, computed by torch, and the padded copies of `a` and `b`.

    A copy without elements means that the operand was multiplied as it is. Up to `min_work` (M * N * K) nothing is
    copied. If `a` has at most `odd_rows` rows, and an operand is not aligned, the operator `matmul` multiplies: its
    kernel for few rows reads odd rows as they are.

    The C++ kernel calls the reference if there are factors other than 1, an `input` with rows that differ, or another
    dtype of the result.
    """

    min_work: SymInt
    odd_rows: SymInt

    def fake(self) -> Any:
        return _multiply_by_torch(*list(vars(self).values())[:-1])

    reference = fake


@dataclass
class _PaddedLinearBackward(Arguments):
    """Returns the gradients of `linear` for x [rows, inner] and for weight, and the fp32 sums of columns for the bias.

    `x` and `weight` are the operands, or the padded copies of them that were multiplied. `saved` is what `copy_pad`
    takes. Without `needs_x`, `needs_weight` or `needs_bias` the result has no elements.
    """

    grad: Tensor
    x: Tensor
    weight: Tensor
    saved: Tensor | None
    activation: str | None
    needs_x: bool
    needs_weight: bool
    needs_bias: bool
    inner: SymInt
    min_work: SymInt

    def check(self) -> None:
        rows: Any = self.grad.shape[0]
        _CopyPad(self.grad, self.saved, self.activation, self.needs_bias, rows).check()
        check_product("padded_linear_backward", self.x, self.weight.t())

    def fake(self) -> tuple[Tensor, ...]:
        multiply = functools.partial(_multiply_by_torch, min_work=self.min_work)
        return _linear_backward(copy_pad, multiply, *list(vars(self).values())[:-1])

    reference = fake


matmul = define("matmul", _Matmul, "(Tensor, Tensor)")
copy_pad = define("copy_pad", _CopyPad, "(Tensor, Tensor)")
padded_matmul = define("padded_matmul", _PaddedMatmul, "(Tensor, Tensor, Tensor, Tensor)")
padded_linear_backward = define("padded_linear_backward", _PaddedLinearBackward, "(Tensor, Tensor, Tensor)")


# ------------------------------------------------------------------------------------------------------ padded copies
def copies_of(engine: str, a: Tensor, b: Tensor) -> Copies:
    """Return the sizes of the padded copies that replace `a` and `b`; None for an operand that is not copied.

    Copies for torch's product may be larger than the operands, so that cuBLAS is fast (`MULTIPLE`). Copies for this
    package's kernels have the sizes of the operands, because these kernels are fast with any size if rows begin at
    multiples of 16 bytes.
    """
    if engine not in ON_TENSOR_CORES:
        return NO_COPIES
    return _copies_of(a, b, MIN_WORK if engine == LIBRARY else 0, 1 if engine == "cuda" else MULTIPLE)


def _copies_of(a: Tensor, b: Tensor, min_work: int | SymInt, multiple: int = MULTIPLE) -> Copies:
    """As `copies_of`. csrc/ops/matmul.cpp has the same rule."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    if m <= FEW_ROWS or a.numel() * n <= min_work:
        return NO_COPIES
    m = round_up(m, multiple) if is_column_major(a) else m
    k, n = round_up(k, multiple), round_up(n, multiple)
    left, right = (None if x.shape[-2:] == s and is_aligned(x) else s for x, s in ((a, (m, k)), (b, (k, n))))
    return left, right


def is_aligned(x: Tensor) -> bool:
    """Return whether a matrix, or every matrix of a batch, can be loaded 16 bytes at a time.

    A row-major matrix is aligned if its rows begin at multiples of 16 bytes. A column-major matrix is aligned if its
    columns begin at multiples of 16 bytes. An empty matrix is aligned, since nothing is loaded.
    """
    elements = ALIGNMENT // x.element_size()
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


def padded(x: Tensor, size: Size | None) -> Tensor:
    """Return a copy of a matrix, or of a batch of matrices, padded with zeros to `size`. None: return `x` itself.

    If `x` is column-major, the copy is column-major too, and the columns of the copy begin at multiples of 16 bytes. If
    not, the rows of the copy begin at multiples of 16 bytes.
    """
    if size is None:
        return x
    rows, columns = size
    if is_column_major(x):
        return padded(x.mT, (columns, rows)).mT
    if x.dim() == 2:
        copy, _ = copy_pad(x, None, None, False, rows)
    else:
        pitch = round_up(columns, ALIGNMENT // x.element_size())
        copy = F.pad(x, (0, pitch - x.shape[-1], 0, rows - x.shape[-2])).contiguous()
    return copy.narrow(-1, 0, columns)


# ----------------------------------------------------------------------------------------------------------- products
def is_one_torch_call(engine: str, a: Tensor, b: Tensor) -> bool:
    """Return whether a single call of torch's own function computes the product. Then torch's autograd is used too."""
    if engine == CPU:
        return a.dtype is torch.bfloat16 and _pad_of_inner(a) == 0
    if engine != LIBRARY or copies_of(engine, a, b) != NO_COPIES:
        return False
    return a.shape[-2] > ODD_ROWS or (is_aligned(a) and is_aligned(b))


def is_slow(a: Tensor) -> bool:
    """Return whether torch's product with `a` is slow on a CPU: if `a` is fp16 and has more than 16 rows.

    Slow products are computed in fp32. With two cores, forward and backward of [2048, 256] @ [256, 1024] took torch a
    second in fp16 and 19 ms in fp32.
    """
    return a.dtype is torch.float16 and a.shape[-2] > FEW_ROWS


def multiply(
    engine: str,
    a: Tensor,
    b: Tensor,
    input: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    needs_pre: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return ``activation(alpha * a @ b + beta * input)``, the argument of the activation, and the padded operands.

    Without `needs_pre` the argument has no meaning. None stands for an operand that was not copied. `input` may also be
    a bias, which has one dimension.
    """
    if input is not None and input.dim() == 1:
        input = input.expand(a.shape[0], b.shape[1])
    arguments = (a, b, input, alpha, beta, activation, out_dtype or a.dtype)
    if engine == CPU:
        return *_multiply_on_cpu(*arguments), None, None
    if engine == TRITON and a.is_cpu:  # Triton's interpreter pads, and the CPU multiplies
        wide_a, wide_b = (padded(x, size) for x, size in zip((a, b), copies_of(engine, a, b), strict=True))
        term = None if input is None else _widened(input, (*wide_a.shape[:-1], wide_b.shape[-1]))
        out, pre = _multiply_on_cpu(wide_a, wide_b, term, *arguments[3:])
        size = (a.shape[-2], b.shape[-1])
        return _narrowed(out, size), _narrowed(pre, size), None, None
    if engine == LIBRARY:
        out, pre, *copies = _call(padded_matmul, *arguments, True, needs_pre, MIN_WORK, ODD_ROWS)
    elif engine == TRITON:
        out, pre, *copies = _multiply_by_torch(*arguments, True, needs_pre)
    else:
        copies = [padded(x, size) for x, size in zip((a, b), copies_of(engine, a, b), strict=True)]
        out, pre = matmul(*copies, *arguments[2:], engine == "cuda", needs_pre)
    left, right = (None if copy is x or copy.numel() == 0 else copy for copy, x in zip(copies, (a, b), strict=True))
    return out, pre, left, right


def _call(op: Any, *arguments: Any) -> Any:
    """Call an operator that calls torch. If it fails, Python repeats it, since C++ loses the type of torch's errors."""
    try:
        return call(op, *arguments)
    except RuntimeError:  # for example torch.OutOfMemoryError
        return DEFINITIONS[op].reference(*arguments)


def _multiply_by_torch(
    a: Tensor,
    b: Tensor,
    input: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    pads_rows: bool = True,  # torch's rows are as long as those of `b`, which may be padded
    needs_pre: bool = False,
    min_work: int | SymInt = 0,
) -> tuple[Tensor, ...]:
    """Return what `padded_matmul` returns, by functions of torch and the operator `copy_pad`."""
    size, dtype, input = (a.shape[-2], b.shape[-1]), out_dtype or a.dtype, None if beta == 0 else input
    copies = _copies_of(a, b, min_work)
    a, b = (padded(x, copy) for x, copy in zip((a, b), copies, strict=True))
    kept = (x.new_empty(0) if copy is None else x for x, copy in zip((a, b), copies, strict=True))
    # If K is 0, `_addmm_activation` of torch 2.11 does not apply the activation.
    is_one_call = activation in IN_ONE_CALL and not needs_pre and dtype is a.dtype and a.shape[-1] > 0
    bias = _bias_of(input, b) if is_one_call else None
    if bias is not None and alpha == beta == 1:
        # One call applies the activation in the epilogue of the product. On an H100 fp16 [8192, 1024] @ [1024, 4096]
        # with relu takes 116 us, and as two calls 160 us.
        out = argument = torch._addmm_activation(bias, a, b, use_gelu=activation == "gelu_tanh")
    else:
        argument = _by_library(a, b, input, alpha, beta, dtype)
        out = _activate_into(torch.empty_like(argument) if needs_pre else argument, argument, activation)
    pre = _narrowed(argument, size) if needs_pre else a.new_empty(0, dtype=dtype)
    return _narrowed(out, size), pre, *kept


def _multiply_on_cpu(
    a: Tensor, b: Tensor, input: Tensor | None, alpha: float, beta: float, activation: str | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return ``activation(alpha * a @ b + beta * input)`` and the argument of the activation, of CPU tensors."""
    input = None if beta == 0 else input
    if is_slow(a) or dtype is not a.dtype or a.shape[-1] == 0:
        argument = reference.matmul.sums(input, a, b, beta=beta, alpha=alpha)
    else:
        if pad := _pad_of_inner(a):
            a, b = F.pad(a, (0, pad)), F.pad(b, (0, 0, 0, pad))
        argument = _by_library(a, b, input, alpha, beta, dtype)
    return reference.matmul.activate(argument, activation).to(dtype), argument.to(dtype)


def _pad_of_inner(a: Tensor) -> int:
    """Return how many zeros have to be appended to each row of `a`.

    If `torch_private.MIXES_ROWS` is True, torch's bf16 product on this CPU reads past the end of a row: a NaN or inf in
    the next row would reach the result of this row.
    """
    return -a.shape[-1] % 32 if torch_private.MIXES_ROWS and a.dtype is torch.bfloat16 else 0


def _by_library(a: Tensor, b: Tensor, input: Tensor | None, alpha: float, beta: float, dtype: torch.dtype) -> Tensor:
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


def _narrowed(x: Tensor, size: Size) -> Tensor:
    """Return a view of the first rows and columns of matrices."""
    if x.shape[-2:] == size:
        return x
    # `new_result` explains `.data`.
    return x.narrow(-2, 0, size[0]).narrow(-1, 0, size[1]).data


def _activate_into(out: Tensor, argument: Tensor, activation: str | None) -> Tensor:
    """Write the activation of `argument` to `out` in one pass. `argument` and `out` may be the same tensor."""
    if activation == "relu":
        return torch.ops.aten.relu.out(argument, out=out)
    if activation is not None:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        return torch.ops.aten.gelu.out(argument, approximate=approximate, out=out)
    return out


# ---------------------------------------------------------------------------------------------------------- gradients
class _Product(torch.autograd.Function):
    """``alpha * a @ b + beta * input`` for matrices, or for batches of matrices."""

    @staticmethod
    def forward(
        ctx: Any, engine: str, input: Tensor | None, a: Tensor, b: Tensor, beta: float, alpha: float, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.engine, ctx.beta, ctx.alpha = engine, beta, alpha
        return multiply(engine, a, b, input, alpha, beta, None, dtype)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        _, needs_input, needs_a, needs_b, *_ = ctx.needs_input_grad
        grad = grad.to(a.dtype)
        grad_input = grad * ctx.beta if needs_input else None
        grad_a = product(ctx.engine, grad, b.mT, ctx.alpha) if needs_a else None
        grad_b = product(ctx.engine, a.mT, grad, ctx.alpha) if needs_b else None
        return None, grad_input, grad_a, grad_b, None, None, None


def product(
    engine: str,
    a: Tensor,
    b: Tensor,
    alpha: float = 1.0,
    term: Tensor | None = None,
    beta: float = 0.0,
    out: Any = None,
) -> Tensor:
    """Return ``alpha * a @ b + beta * term`` in the dtype `out`. It can be differentiated twice."""
    return _Product.apply(engine, term, a, b, beta, alpha, out or a.dtype)


def needs_grad(*tensors: Tensor | None) -> bool:
    """Return whether autograd would record a function of these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def linear(engine: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Return ``activation(x @ weight.T + bias)`` of a matrix, which can be differentiated twice."""
    if needs_grad(x, weight, bias):
        return _Linear.apply(engine, x, weight, bias, activation)
    return multiply(engine, x, weight.t(), bias, activation=activation)[0]


class _Linear(torch.autograd.Function):
    """``activation(x @ weight.T + bias)`` of a matrix."""

    @staticmethod
    def forward(
        ctx: Any, engine: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        # A weight that needs padding is copied at every call. A copy from an earlier call could be outdated, because
        # some writes to a weight (`.data`, a CUDA graph, FSDP) change neither its version nor its address.
        needs_pre = activation in ("gelu", "gelu_tanh")
        out, pre, *copies = multiply(engine, x, weight.t(), bias, activation=activation, needs_pre=needs_pre)
        ctx.engine, ctx.activation = engine, activation
        # The derivative of relu is computed from its result, the derivatives of the others from their argument.
        saved = None if activation is None else out if activation == "relu" else pre
        ctx.save_for_backward(x, weight, bias, saved, *copies)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, saved, left, right = ctx.saved_tensors
        _, needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # this gradient will be differentiated
            return None, *_linear_backward_by_torch(ctx.engine, grad, x, weight, bias, ctx.activation), None
        operands = x if left is None else left, weight if right is None else right.t()
        arguments = (grad, *operands, saved, ctx.activation, needs_x, needs_weight, needs_bias, x.shape[1])
        if ctx.engine == LIBRARY:
            grads = _call(padded_linear_backward, *arguments, MIN_WORK)
        else:
            copy = _derivative_on_cpu if ctx.engine == CPU else copy_pad
            grads = _linear_backward(copy, functools.partial(multiply, ctx.engine), *arguments)
        grad_x, grad_weight, sums = grads
        grad_bias = sums.to(grad.dtype) if needs_bias else None
        return None, grad_x if needs_x else None, grad_weight if needs_weight else None, grad_bias, None


def _linear_backward(
    copy: Callable[..., Any],
    multiply: Callable[..., Any],
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    saved: Tensor | None,
    activation: str | None,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
    inner: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `padded_linear_backward` returns. `copy` has the arguments and the results of `copy_pad`."""
    (rows, columns), (grad_x, grad_weight) = grad.shape, (grad.new_empty(0) for _ in range(2))
    sums = grad.new_empty(0, dtype=torch.float32)
    # On a CPU `copy` is always called, because torch.compile cannot trace `is_aligned`.
    if saved is not None or needs_bias or grad.is_cpu or grad.shape != (len(x), len(weight)) or not is_aligned(grad):
        # One pass applies the derivative, sums the bias's gradient, and pads. The copy of a column-major `x` may have
        # more rows than `grad`.
        grad, sums = copy(grad, saved, activation, needs_bias, len(x))
        # `grad` must have as many columns as `weight` has rows. If `weight` was padded with rows of zeros, the columns
        # of zeros that `copy` added are kept. Otherwise they are cut off.
        grad = grad.narrow(1, 0, len(weight))
    if needs_x:
        grad_x = _narrowed(multiply(grad, weight)[0], (rows, inner))
    if needs_weight:  # the gradient of a parameter is dense, as the parameter is, so its rows are not padded
        grad_weight = _narrowed(multiply(grad.t(), x)[0], (columns, inner))
        if not grad_weight.is_contiguous():
            grad_weight = grad_weight.clone(memory_format=torch.contiguous_format)
    return grad_x, grad_weight, sums


def _derivative_on_cpu(
    grad: Tensor, saved: Any, activation: str | None, needs_sums: bool, rows: int
) -> tuple[Tensor, Tensor]:
    """Return what the operator `copy_pad` returns, without padding, which a CPU does not need."""
    wide = reference.matmul.activation_backward(grad, saved, activation)
    return wide.to(grad.dtype), wide.sum(0) if needs_sums else wide


def _linear_backward_by_torch(
    engine: str, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of `x`, `weight` and `bias`, computed by operators that can be differentiated again."""
    if activation is not None:
        argument = _Linear.apply(engine, x, weight, bias, None)
        if activation == "relu":
            grad = torch.where(argument > 0, grad, 0.0)
        else:
            approximate = "tanh" if activation == "gelu_tanh" else "none"
            grad = torch.ops.aten.gelu_backward(grad, argument, approximate=approximate)
    return (
        product(engine, grad, weight),
        product(engine, grad.t(), x),
        None if bias is None else grad.sum(0),
    )
