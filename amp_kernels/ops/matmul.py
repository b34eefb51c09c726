"""Operators of the matmul family: products by this package's tensor-core kernels, and copies with padded rows.

Both have kernels in CUDA C++, and `copy_pad` has a Triton kernel. On other devices the reference computes them.
amp_kernels/functional/matmul.py chooses between these operators and torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import SymInt, Tensor

from .. import reference
from .checks import check_is_dense
from .library import Arguments, Kernels, define

ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh")  # in the order of enum Activation, csrc/matmul.h
DTYPES = (torch.float16, torch.bfloat16)
OUT_DTYPES = (torch.float32, *DTYPES)
# In bytes. The tiled kernels can load an operand 16 bytes at a time only if its rows begin at multiples of 16 bytes, or
# its columns if it is column-major. Otherwise they load one element at a time. To be fast, cuBLAS also needs rows (or
# columns) whose lengths are multiples of 16 bytes (functional/matmul.py).
ALIGNMENT = 16


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
    check_is_dense(op, name, x)
    if x.dtype is not first.dtype:
        remedy = f"convert it with .to({first.dtype}), or use torch.autocast"
        raise TypeError(f"{op}: {name} must be {first.dtype} as the first operand is, got {x.dtype}; {remedy}")
    if x.device != first.device:
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


matmul = define("matmul", _Matmul, "(Tensor, Tensor)")
copy_pad = define("copy_pad", _CopyPad, "(Tensor, Tensor)")
