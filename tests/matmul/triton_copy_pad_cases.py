"""Triton's copy_pad, every array between guard bands, and products inside `use_backend("triton")`, which use it.
harness/test_triton_interpret.py runs this file in a process of its own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from amp_kernels.triton_kernels import _copy_pad_, copy_pad
from torch import Tensor

import amp_kernels
from amp_kernels import testing
from amp_kernels.ops.library import triton_kernels
from amp_kernels.testing.matmul import compare

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
LOW = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
BITS = {2: torch.int16, 4: torch.int32}
ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x, F.relu, F.gelu, lambda x: F.gelu(x, approximate="tanh"),
)  # fmt: skip
activations = pytest.mark.parametrize("activation", range(4), ids=["none", "relu", "gelu", "gelu_tanh"])
# NumPy, underneath the interpreter, warns where IEEE arithmetic overflows.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


# ----------------------------------------------------------------------------------------------------- the arrays
class Placed:
    """A view in memory that is 0xff everywhere else: NaN to whoever reads it, a canary where someone writes."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> None:
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
        guard = 64 // dtype.itemsize
        self.memory = torch.full((2 * guard + offset + span,), -1, dtype=BITS[dtype.itemsize], device=DEVICE)
        assert self.memory.data_ptr() % 16 == 0
        self.view = self.memory.view(dtype).as_strided(shape, strides, guard + offset)
        once = tuple(1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True))
        self._once = self.view.as_strided(once, strides)

    def fill(self, values: Tensor) -> None:
        self._once.copy_(values[tuple(slice(n) for n in self._once.shape)])

    def check(self) -> None:
        """Nothing was written around the view; overwrites it."""
        self._once.view(self.memory.dtype).fill_(-1)
        assert (self.memory == -1).all()


# Strides of [batches, rows, columns], and offset of the first element.
FORMS: dict[str, Callable[[int, int], tuple[tuple[int, int, int], int]]] = {
    "row": lambda r, c: ((r * c, c, 1), 0),
    "column": lambda r, c: ((r * c, 1, r), 0),
    "padded": lambda r, c: ((r * (up(c) + 8), up(c) + 8, 1), 0),
    "padded_column": lambda r, c: ((c * (up(r) + 8), 1, up(r) + 8), 0),
    "misaligned": lambda r, c: ((r * up(c) + 8, up(c), 1), 1),
    "every_other": lambda r, c: ((2 * r * c, 2 * c, 2), 0),
    "one_for_all": lambda r, c: ((0, up(c), 1), 0),
    "interleaved": lambda r, c: ((up(c), 4 * up(c), 1), 0),  # heads of attention, up to four
}


def up(n: int) -> int:
    return -(-n // 8) * 8


def place(values: Tensor, form: str) -> Placed:
    strides, offset = FORMS[form](*values.shape[1:])
    placed = Placed(tuple(values.shape), strides, values.dtype, offset)
    placed.fill(values)
    return placed


def randn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---------------------------------------------------------------------------------------------------------- copy_pad
def run_copy(
    rows: int, columns: int, dtype: torch.dtype, *, forms: tuple[str, str] = ("row", "row"), activation: int = 0,
    extra: int = 0, sums: bool = True,
) -> Tensor:  # fmt: skip
    x, pre = randn(1, rows, columns, dtype=dtype, seed=1), randn(1, rows, columns, dtype=dtype, seed=2)
    x_placed, pre_placed = place(x, forms[0]), place(pre, forms[1])
    out = Placed((rows, up(columns) + extra), (up(columns) + extra, 1), dtype)
    bias_grad = Placed((columns,), (1,), FP32)
    _copy_pad_(
        x_placed.view[0], pre_placed.view[0] if activation else None, out.view, bias_grad.view if sums else None,
        activation,
    )  # fmt: skip

    def product(kind: torch.dtype) -> Tensor:
        leaf = pre[0].to(kind).requires_grad_()
        return torch.autograd.grad(ACTIVATIONS[activation](leaf), leaf, x[0].to(kind))[0]

    theirs, exact = product(FP32), product(torch.float64)
    assert compare("out", out.view[:, :columns].cpu(), theirs.to(dtype), exact).passed
    if activation == 0:
        assert torch.equal(out.view[:, :columns].cpu(), x[0])
    assert (out.view[:, columns:] == 0).all()
    result = bias_grad.view.cpu().clone()
    if sums:
        # Added in another order than torch's, which on few rows is exact by chance.
        error = (result.double() - exact.sum(0)).abs().max()
        assert error <= 2 * (theirs.sum(0).double() - exact.sum(0)).abs().max() + 1e-6 * exact.abs().sum(0).max()
    else:
        assert (bias_grad.memory == -1).all()
    out.check()
    bias_grad.check()
    return result


@LOW
@activations
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 8), (40, 13), (5, 300), (130, 9)])
def test_copy(rows: int, columns: int, activation: int, dtype: torch.dtype) -> None:
    run_copy(rows, columns, dtype, activation=activation)


# Every one on each side, with itself and with another; together they are too many for the interpreter.
pairs = pytest.mark.parametrize(
    ("left", "right"), [(list(FORMS)[i - step], form) for i, form in enumerate(FORMS) for step in (0, 2)]
)


@pairs
def test_copy_of_layouts(left: str, right: str) -> None:
    run_copy(37, 21, BF16, forms=(left, right), activation=2, extra=16)


def test_copy_without_sums() -> None:
    run_copy(37, 21, FP16, sums=False)


def test_sums_of_many_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """More shares than the fold takes at once, each of several tiles; the same bits every time."""
    monkeypatch.setattr(copy_pad, "_PROGRAMS", 35)
    monkeypatch.setattr(copy_pad, "_tile", lambda *_: (4, 128))
    first = run_copy(203, 70, FP16, activation=3)
    assert torch.equal(first, run_copy(203, 70, FP16, activation=3))


@pytest.mark.parametrize("activation", [1, 2, 3])
def test_derivatives_at_the_ends(activation: int) -> None:
    values = torch.tensor([0.0, -0.0, 1e-4, -1e-4, 20.0, -20.0, 6e4, -6e4, math.nan]).to(BF16).repeat(2, 1)
    x = torch.ones_like(values)
    out = Placed((2, 16), (16, 1), BF16)
    _copy_pad_(x.to(DEVICE), values.to(DEVICE), out.view, None, activation)
    leaf = values.double().requires_grad_()
    exact = torch.autograd.grad(ACTIVATIONS[activation](leaf).sum(), leaf)[0]
    if activation == 1:
        exact = (values > 0).double()  # by the result: NaN counts as not positive
    ours = out.view[:, :9].cpu().double()
    assert torch.equal(ours.isnan(), exact.isnan())
    assert torch.allclose(ours.nan_to_num(), exact.nan_to_num(), atol=0, rtol=2**-8 + 1e-6) or (
        (ours.nan_to_num() - exact.nan_to_num()).abs().max() <= 2**-9
    )


# ---------------------------------------------------------------------------------------------------------- products
CASES = [
    case
    for op in ("matmul", "addmm", "linear")
    for case in testing.CASES[op]
    if not {"4095", "50257", "1023", "medium", "large"} & set(case.name.replace("x", "_").split("_"))
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}-{case}")
def test_products(case: testing.Case) -> None:
    assert [result for result in case.run("triton", torch.device(DEVICE)) if not result.passed] == []


@pytest.mark.parametrize(
    ("m", "n", "k", "shapes"),
    [
        (40, 33, 17, [(40, 24), (24, 40)]),  # K and N become multiples of 8
        (40, 40, 24, []),
        (16, 33, 17, []),  # takes the time of reading b
    ],
)
def test_operands_of_any_size_are_padded(
    m: int, n: int, k: int, shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[tuple[int, ...]] = []

    def copy_pad(x: Tensor, pre: Tensor | None, out: Tensor, *rest: object) -> None:
        copies.append(tuple(out.shape))
        _copy_pad_(x, pre, out, *rest)

    monkeypatch.setattr(triton_kernels(), "_copy_pad_", copy_pad)
    a, b = (randn(*shape, dtype=BF16, seed=1).to(DEVICE) for shape in ((m, k), (k, n)))
    with amp_kernels.use_backend("triton"):
        assert amp_kernels.matmul(a, b).shape == (m, n)
    assert copies == [(min(rows, size), columns) for (rows, columns), size in zip(shapes, (m, k), strict=False)]
