"""The Triton kernels of the matmul family under the error rule, every array between guard bands.
harness/test_triton_interpret.py runs this file in a process of its own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from amp_kernels.triton_kernels import _copy_pad_, _matmul_, copy_pad, matmul
from amp_kernels.triton_kernels.product import Tiles
from torch import Tensor

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
    "each_row": lambda r, c: ((0, 0, 1), 0),
    "each_column": lambda r, c: ((r, 1, 0), 0),
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


def run(
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    *,
    forms: tuple[str, str] = ("row", "row"),
    input_form: str | None = None,
    out_form: str = "row",
    out_dtype: torch.dtype | None = None,
    pre: bool = False,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: int = 0,
) -> Tensor:
    batches, m, n, k = sizes
    out_dtype = out_dtype or dtype
    a, b = randn(batches, m, k, dtype=dtype, seed=1), randn(batches, k, n, dtype=dtype, seed=2)
    a, b = (x[:1].expand_as(x) if form == "one_for_all" else x for x, form in zip((a, b), forms, strict=True))
    operands = [place(a, forms[0]), place(b, forms[1])]
    exact = alpha * (a.double() @ b.double())
    input = None
    if input_form is not None:
        added = randn(batches, m, n, dtype=dtype, seed=3)
        if FORMS[input_form](m, n)[0][1] == 0:
            added = added[:1, :1].expand_as(added)
        elif FORMS[input_form](m, n)[0][2] == 0:
            added = added[:, :, :1].expand_as(added)
        exact += beta * added.double()
        input = place(added if beta != 0 else added.clone().fill_(math.nan), input_form)
        operands.append(input)
    strides, offset = FORMS[out_form](m, n)
    outs = [Placed((batches, m, n), strides, out_dtype, offset) for _ in range(1 + pre)]
    _matmul_(
        operands[0].view, operands[1].view, None if input is None else input.view, outs[0].view,
        outs[1].view if pre else None, alpha, beta, activation,
    )  # fmt: skip
    theirs = (exact - alpha * (a.double() @ b.double())).float() + alpha * (a.float() @ b.float())
    results = [outs[0].view.cpu().clone()]
    assert compare(
        "out", results[0], ACTIVATIONS[activation](theirs).to(out_dtype), ACTIVATIONS[activation](exact)
    ).passed
    if pre:
        assert compare("pre", outs[1].view.cpu(), theirs.to(out_dtype), exact).passed
    for placed in outs:
        placed.check()
    return results[0]


# ------------------------------------------------------------------------------------------- the kernel of pointers
SHAPES = [
    (1, 1, 1, 1),
    (1, 5, 3, 0),
    (3, 2, 33, 17),
    (1, 1, 40, 1300),
    (1, 33, 7, 65),
    (2, 70, 65, 40),
    (1, 17, 131, 8),
]


@LOW
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_shapes(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    run(sizes, dtype)
    run(sizes, dtype, forms=("column", "padded_column"), out_form="padded", input_form="each_row", pre=True)


# Every one on each side, with itself and with another; together they are too many for the interpreter.
MATRICES = [form for form in FORMS if not form.startswith("each")]
pairs = pytest.mark.parametrize(
    ("left", "right"), [(MATRICES[i - step], form) for i, form in enumerate(MATRICES) for step in (0, 2)]
)


@pairs
def test_layouts(left: str, right: str) -> None:
    run((2, 21, 37, 43), FP16, forms=(left, right), out_form="padded")


@LOW
@activations
@pytest.mark.parametrize("out_dtype", [FP16, BF16, FP32], ids=["fp16", "bf16", "fp32"])
def test_epilogue(activation: int, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    run(
        (2, 19, 27, 24), dtype, out_dtype=out_dtype, pre=True, alpha=-0.5, beta=2.0, activation=activation,
        input_form="each_row", out_form="padded",
    )  # fmt: skip


@pytest.mark.parametrize("form", ["row", "padded", "padded_column", "misaligned", "each_row", "each_column"])
@pytest.mark.parametrize("k", [0, 16, 1200], ids=["k0", "k16", "split"])
def test_input(form: str, k: int) -> None:
    run((2, 9, 21, k), BF16, input_form=form, out_form="padded", beta=-1.5)


@pytest.mark.parametrize("k", [0, 16, 1200], ids=["k0", "k16", "split"])
def test_beta_of_zero_reads_no_input(k: int) -> None:
    run((1, 9, 21, k), FP16, input_form="row", beta=0.0, alpha=0.5)


@pytest.mark.parametrize("out_form", ["row", "padded", "misaligned", "interleaved"])
@pytest.mark.parametrize("n", [32, 33, 71])
def test_nothing_beyond_n_is_written(out_form: str, n: int) -> None:
    for out_dtype in (FP16, FP32):
        run((2, 18, n, 16), FP16, out_form=out_form, out_dtype=out_dtype, pre=True)


def test_the_last_columns_keep_every_bit() -> None:
    """What the picking of the last columns must carry: NaN, infinity, the sign of zero."""
    odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1.0])
    input = torch.zeros(1, 3, 13, dtype=FP16, device=DEVICE)
    input[..., 8:] = odd
    out = Placed((1, 3, 13), (48, 16, 1), FP16)
    empty = torch.empty(1, 3, 0, dtype=FP16, device=DEVICE), torch.empty(1, 0, 13, dtype=FP16, device=DEVICE)
    _matmul_(*empty, input, out.view, None, -1.0, 1.0, 0)
    last = out.view[0, :, 8:].float().cpu()
    assert torch.equal(last.nan_to_num(nan=7.0), odd.nan_to_num(nan=7.0).expand(3, 5))
    out.check()


POINTER_TILES = {
    name: getattr(matmul, name)
    for name in (
        "_LARGE",
        "_MEDIUM",
        "_FEW_ROWS",
        "_FEW_COLUMNS",
        "_FEW_ROWS_BY_ELEMENT",
        "_FEW_COLUMNS_BY_ELEMENT",
        "_BY_ELEMENT",
        "_SMALL",
    )
}


@pytest.mark.parametrize("tiles", POINTER_TILES.values(), ids=POINTER_TILES.keys())
@pytest.mark.parametrize("form", ["padded", "column"])
def test_tiles(tiles: Tiles, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles each way, the last of each not full, whatever a device would take."""
    monkeypatch.setattr(matmul, "_tiles", lambda *_: tiles)
    run(
        (1, tiles.m + 5, 2 * tiles.n + 3, tiles.k + 9), BF16, forms=(form, form), input_form="padded", out_form="padded"
    )


@pytest.mark.parametrize(
    ("shape", "strides", "elements", "neighbours"),
    [
        ((2, 5, 16), (80, 16, 1), 160, 8),
        ((2, 5, 13), (80, 16, 1), 160, 8),  # what is read of the last row ends with the storage
        ((2, 5, 13), (80, 16, 1), 157, 1),  # would end behind it
        ((2, 13, 5), (80, 1, 16), 160, 8),
        ((2, 13, 5), (80, 1, 16), 159, 1),
        ((1, 1, 13), (13, 13, 1), 16, 8),
        ((1, 1, 13), (13, 13, 1), 13, 1),
        ((3, 5, 13), (0, 16, 1), 77, 1),
    ],
)
def test_nothing_is_read_behind_the_storage(
    shape: tuple[int, ...], strides: tuple[int, ...], elements: int, neighbours: int
) -> None:
    x = randn(elements, dtype=FP16, seed=1).to(DEVICE).as_strided(shape, strides)
    assert matmul._access(x)[1] == neighbours
    out = torch.empty(shape[0], shape[1], shape[1], dtype=FP32, device=DEVICE)
    _matmul_(x, x.mT, None, out, None, 1.0, 0.0, 0)
    torch.testing.assert_close(out, x.float() @ x.mT.float(), rtol=1e-5, atol=1e-5)


def test_shares_are_added_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    first = run((1, 3, 40, 2100), BF16, forms=("row", "column"))
    for _ in range(2):
        assert torch.equal(first, run((1, 3, 40, 2100), BF16, forms=("row", "column")))


# ----------------------------------------------------------------------------------------- the kernel of descriptors
@pytest.fixture
def small_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors for every product that they can address; a product that they cannot fails."""
    if DEVICE == "cuda" and torch.cuda.get_device_capability()[0] not in matmul._LARGE_DESCRIPTORS:
        pytest.skip("needs TMA")
    monkeypatch.setattr(matmul, "_SMALLEST_OF_DESCRIPTORS", 0)
    monkeypatch.setattr(matmul, "_descriptor_tiles", lambda *_: Tiles(64, 64, 64, 4, 2))

    def fail(*_: object) -> None:
        pytest.fail("not by descriptors")

    monkeypatch.setattr(matmul, "_by_pointers", fail)


DESCRIBED = ("padded", "padded_column", "one_for_all", "interleaved")


@pytest.mark.parametrize("left", DESCRIBED)
@pytest.mark.parametrize("right", DESCRIBED)
def test_descriptors(left: str, right: str, small_descriptors: None) -> None:
    dtype = (FP16, BF16)[(DESCRIBED.index(left) + DESCRIBED.index(right)) % 2]
    run((3, 70, 131, 67), dtype, forms=(left, right), out_form="padded", pre=True)


@activations
@pytest.mark.parametrize("input_form", ["each_row", "misaligned"])
def test_descriptors_with_epilogue(activation: int, input_form: str, small_descriptors: None) -> None:
    run(
        (2, 17, 66, 5), BF16, forms=("padded", "padded_column"), input_form=input_form, alpha=2.0, beta=-0.5,
        activation=activation, out_dtype=FP32, out_form="misaligned",
    )  # fmt: skip


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (5, 1, 9, 8), (1, 600, 8, 1), (1, 64, 64, 128)], ids=str)
def test_descriptors_of_shapes(sizes: tuple[int, int, int, int], small_descriptors: None) -> None:
    run(sizes, FP16, forms=("padded", "padded_column"))


@pytest.mark.parametrize(
    ("form", "sizes"),
    [("misaligned", (70, 70, 64)), ("every_other", (70, 70, 64)), ("row", (70, 70, 67)), ("padded", (1, 70, 64))],
)
def test_what_descriptors_cannot_address(
    form: str, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the other kernel multiplies; and it does for few rows, for which it has tiles of its own."""
    monkeypatch.setattr(matmul, "_SMALLEST_OF_DESCRIPTORS", 0)
    if DEVICE == "cpu":
        monkeypatch.setattr(matmul, "capability_of", lambda _: (9, 0))
    seen = []
    real = matmul._by_descriptors
    monkeypatch.setattr(matmul, "_by_descriptors", lambda *rest: seen.append(real(*rest)) or seen[-1])
    run((2, *sizes), FP16, forms=(form, "padded"))
    assert seen == [False]


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
