"""The CUDA kernels of the matmul family, run on the CPU: memory between guard bands, threads and blocks in every order,
every way through the kernels. The shared cases run on the emulator's GPUs (harness/test_fake_gpus.py)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from arena import Arena
from cuda_on_cpu import backend
from cuda_on_cpu.build import missing_headers
from torch import Tensor

from amp_kernels import reference, testing
from amp_kernels.testing import matmul as cases

pytestmark = pytest.mark.skipif(missing_headers() is not None, reason=str(missing_headers()))
dtypes = pytest.mark.parametrize("dtype", cases.LOW.values(), ids=cases.LOW)
activations = pytest.mark.parametrize("activation", range(len(cases.ACTIVATIONS)), ids=map(str, cases.ACTIVATIONS))
Place = Callable[[Arena, Tensor], Tensor]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return testing.common.randn(*shape, dtype=dtype, seed=seed)


def padded(n: int) -> int:
    return -(-n // 8) * 8


def _columns(place: Place) -> Place:
    return lambda arena, x: place(arena, x.mT.contiguous()).mT


LAYOUTS: dict[str, Place] = {
    "row": lambda arena, x: arena.place(x),
    "column": _columns(lambda arena, x: arena.place(x)),
    "padded_row": lambda arena, x: arena.around(x, (*x.shape[:-1], padded(x.shape[-1]) + 8), _first(x)),
    "padded_column": _columns(lambda arena, x: LAYOUTS["padded_row"](arena, x)),
    "odd_row": lambda arena, x: arena.around(x, (*x.shape[:-1], x.shape[-1] + 3), _first(x), 1),
    "odd_column": _columns(lambda arena, x: LAYOUTS["odd_row"](arena, x)),
    "shifted_row": lambda arena, x: arena.around(x, (*x.shape[:-1], padded(x.shape[-1]) + 8), _first(x), 3),
    "every_other": lambda arena, x: arena.around(x, (*x.shape[:-1], 2 * x.shape[-1]), (..., slice(None, None, 2))),
    "one_row": lambda arena, x: arena.place(x[..., :1, :]).expand_as(x),
    "one_column": lambda arena, x: arena.place(x[..., :1]).expand_as(x),
    "one_number": lambda arena, x: arena.place(x[..., :1, :1]).expand_as(x),
}
WIDE = ("padded_row", "padded_column")  # 16 bytes at a time, along k and across it
DENSE = ("padded_row", "padded_column", "odd_row", "odd_column", "shifted_row")


def _first(x: Tensor) -> tuple[object, ...]:
    return (..., slice(0, x.shape[-1]))


# ---------------------------------------------------------------------------------------------- products
ORDERS = itertools.cycle(backend.ORDERS)


def product(
    sizes: tuple[int, int, int, int],
    layouts: tuple[str, str],
    dtype: torch.dtype,
    *,
    activation: int = 0,
    out_dtype: torch.dtype | None = None,
    out_layout: str = "padded_row",
    input: str | None = None,
    beta: float = 0.5,
    alpha: float = 1.0,
    pre: bool = False,
    order: str = "shuffled",
) -> tuple[Tensor, ...]:
    """Runs one product in guarded memory, holds it to the error rule and returns the results."""
    batch, m, n, k = sizes
    arena = Arena(Arena.NAN)
    out_dtype = out_dtype or dtype
    a = LAYOUTS[layouts[0]](arena, randn(batch, m, k, dtype=dtype, seed=1))
    b = LAYOUTS[layouts[1]](arena, randn(batch, k, n, dtype=dtype, seed=2))
    term = None if input is None else LAYOUTS[input](arena, randn(batch, m, n, dtype=dtype, seed=3))
    if term is not None and beta == 0:
        term.fill_(math.nan)
    results = [LAYOUTS[out_layout](arena, torch.full((batch, m, n), 99, dtype=out_dtype)) for _ in range(1 + pre)]
    with backend.scheduled(order, seed=m + n + k):
        backend._matmul_(a, b, term, results[0], results[1] if pre else None, alpha, beta, activation)
    arena.check()
    name = cases.ACTIVATIONS[activation]
    argument = alpha * (a.double() @ b.double())
    if term is not None and beta != 0:
        argument += beta * term.double()
    truths = (cases.exact(argument, name), argument)
    theirs = reference.matmul.addmm(term, a, b, beta=beta, alpha=alpha, activation=name, out_dtype=out_dtype)
    for ours, their, true in zip(results, theirs, truths, strict=False):
        result = cases.compare("", ours, their, true)
        assert result.passed, result
    return tuple(results)


M = (1, 7, 8, 9, 17, 31, 63, 65, 127, 129)
N = (1, 7, 8, 9, 33, 63, 65, 127, 129)
K = (0, 1, 7, 8, 9, 31, 32, 33, 65, 127, 129)


def _products() -> Iterator[object]:
    """Every pair of layouts, and every size with sizes of all kinds, by a walk with steps prime to the counts."""
    for i, layouts in enumerate(itertools.product(LAYOUTS, LAYOUTS)):
        sizes = (1 + i % 7 // 6, M[i * 3 % len(M)], N[(i * 5 + i // 9) % len(N)], K[(i * 7 + i // 11) % len(K)])
        yield pytest.param(i, sizes, layouts, id=f"{'x'.join(map(str, sizes))}-{'-'.join(layouts)}")


@pytest.mark.parametrize(("variant", "sizes", "layouts"), list(_products()))
def test_matmul(variant: int, sizes: tuple[int, int, int, int], layouts: tuple[str, str]) -> None:
    product(
        sizes,
        layouts,
        (torch.float16, torch.bfloat16)[variant % 2],
        activation=variant // 2 % 4,
        out_dtype=(None, torch.float32, None, torch.bfloat16)[variant // 3 % 4],
        out_layout=("padded_row", "odd_row", "row", "shifted_row", "padded_row")[variant % 5],
        input=(None, "one_row", "row", "padded_row", "column", "every_other", "one_number")[variant % 7],
        beta=(0.5, 1.0, 0.0)[variant // 5 % 3],
        alpha=(1.0, -2.0)[variant // 2 % 2],
        pre=variant % 3 == 0,
        order=backend.ORDERS[variant % 3],
    )


SQUARE = tuple(itertools.product(WIDE, WIDE))


# On the emulator's 3 multiprocessors three tiles of 64 x 64, of 128 x 128 or of 128 x 256 are the cheapest.
@pytest.mark.parametrize("layouts", SQUARE, ids="-".join)
@pytest.mark.parametrize("m_n", [(57, 61), (120, 125), (121, 250)], ids=["small", "medium", "large"])
def test_every_tile(m_n: tuple[int, int], layouts: tuple[str, str]) -> None:
    variants = zip(backend.ORDERS, (40, 1, 167), ("padded_row", "odd_row", "shifted_row"), strict=True)
    for i, (order, k, out_layout) in enumerate(variants):
        dtype = (torch.float16, torch.bfloat16)[i % 2]
        product((3, *m_n, k), layouts, dtype, order=order, out_layout=out_layout, input="one_row", activation=2)


@pytest.mark.parametrize("k", [0, 31, 32, 33, 64, 96, 129, 200])
def test_depth_of_the_pipeline(k: int) -> None:
    for layouts in (("padded_row", "padded_column"), ("every_other", "every_other")):
        for order in backend.ORDERS:
            product((1, 20, 20, k), layouts, torch.float16, order=order)


def test_many_tiles() -> None:
    product((1, 650, 70, 33), ("padded_row", "padded_row"), torch.float16)  # more than a band of tiles
    product((2, 130, 200, 33), ("padded_column", "padded_row"), torch.bfloat16)


@dtypes
@activations
def test_epilogue(activation: int, dtype: torch.dtype) -> None:
    inputs = (None, "one_row", "one_column", "one_number", "padded_row", "odd_row", "column", "every_other")
    outs = ("padded_row", "odd_row")
    for input, out_layout in itertools.product(inputs, outs):
        for m in (5, 33):
            options = {"activation": activation, "input": input, "pre": True, "out_layout": out_layout, "alpha": -1.5}
            product((1, m, 21, 16), ("padded_row", "padded_row"), dtype, **options)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@dtypes
def test_dtypes_of_results(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    for m, out_layout in itertools.product((3, 40), ("padded_row", "odd_row", "shifted_row", "row")):
        product((2, m, 29, 24), WIDE, dtype, out_dtype=out_dtype, out_layout=out_layout, pre=True, activation=1)


@pytest.mark.parametrize("n", [4, 12, 20])
def test_fp32_results_with_a_pitch_of_16_bytes(n: int) -> None:
    product((2, 33, n, 8), WIDE, torch.float16, out_dtype=torch.float32, out_layout="row")


# The argument of an activation is rounded for `pre`, not for the activation itself.
@pytest.mark.parametrize("m", [2, 33])
def test_activation_of_the_unrounded_argument(m: int) -> None:
    a, b = torch.full((1, m, 8), 1 + 2.0**-10).half(), torch.full((1, 8, 8), 1.0 + 2.0**-10).half()
    out, pre = torch.empty(1, m, 8), torch.empty(1, m, 8)
    backend._matmul_(a, b, None, out, pre, 1.0, 0.0, 0)
    assert torch.equal(out, pre) and torch.equal(out, torch.full_like(out, 8 * (1 + 2.0**-10) ** 2))
    wide, low = torch.empty(1, m, 8), torch.empty(1, m, 8, dtype=torch.float16)
    backend._matmul_(a, b, None, wide, None, 3.0, 0.0, 2)
    backend._matmul_(a, b, None, low, torch.empty_like(low), 3.0, 0.0, 2)
    assert torch.equal(wide.half(), low)


def test_nan_and_infinity_stay_in_their_rows_and_columns() -> None:
    for m in (5, 40):
        a, b = torch.ones(1, m, 24).half(), torch.ones(1, 24, 24).half()
        a[0, 2, 3], b[0, 5, 7] = math.nan, math.inf
        for activation in range(4):
            out = torch.empty(1, m, 24)
            backend._matmul_(a, b, None, out, None, 1.0, 0.0, activation)
            assert out[0, 2].isnan().all() and out[0, [0, 1, 3, 4]][:, 7].isinf().all()
            rest = torch.cat([out[0, :2], out[0, 3:]])
            rest[:, 7] = 0
            assert rest.isfinite().all()


# ---------------------------------------------------------------------------------------------- few rows
@dtypes
@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize("m", [1, 8, 9, 16])
def test_few_rows(m: int, layout: str, dtype: torch.dtype) -> None:
    sizes = itertools.product((1, 8, 33, 70), (0, 7, 8, 129, 271))
    for i, (n, k) in enumerate(sizes):
        left = ("padded_row", "odd_row", "padded_column", "every_other", "row")[(i + m) % 5]
        product((1 + i % 2, m, n, k), (left, layout), dtype, input="one_row", order=backend.ORDERS[i % 3])


@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize(("batch", "m", "n", "k"), [(1, 3, 20, 1030), (1, 16, 70, 1543), (2, 9, 33, 1100)])
def test_few_rows_in_splits_of_k(batch: int, m: int, n: int, k: int, layout: str) -> None:
    results = [
        product((batch, m, n, k), ("padded_row", layout), torch.float16, activation=2, pre=True, order=order)
        for order in backend.ORDERS
    ]
    assert all(torch.equal(x, y) for others in results[1:] for x, y in zip(results[0], others, strict=True))


# On the emulator's 3 multiprocessors three splits of one tile of 64 x 64, of two, of one of 128 x 128, of 128 x 256.
@pytest.mark.parametrize(
    ("batch", "m", "n", "k", "layouts"),
    [
        *((1, 17, 20, 1543, layouts) for layouts in (SQUARE[1], SQUARE[2], ("every_other", "odd_row"))),
        (2, 33, 9, 2600, SQUARE[1]),
        (1, 120, 125, 1600, SQUARE[2]),
        (1, 121, 250, 2600, SQUARE[1]),
    ],
)
def test_tiles_in_splits_of_k(batch: int, m: int, n: int, k: int, layouts: tuple[str, str]) -> None:
    options = {"activation": 2, "pre": True, "input": "one_row", "alpha": -1.5}
    orders = backend.ORDERS if m < 100 else ("shuffled",)
    results = [product((batch, m, n, k), layouts, torch.bfloat16, order=order, **options) for order in orders]
    assert all(torch.equal(x, y) for others in results[1:] for x, y in zip(results[0], others, strict=True))


# ---------------------------------------------------------------------------------------------- sm_75
# A newer GPU runs that code too: it compiles the PTX in a binary for TORCH_CUDA_ARCH_LIST=7.5+PTX.
@dtypes
@pytest.mark.parametrize("capability", [75, 90])
def test_where_tensor_cores_have_no_bf16(capability: int, dtype: torch.dtype) -> None:
    with backend.compute_capability(capability, compiled_for=75):
        for i, layouts in enumerate(itertools.product(("padded_row", "odd_column", "every_other"), repeat=2)):
            product((1 + i % 2, (3, 70)[i % 2], 67, 33), layouts, dtype, activation=i % 4, pre=True, input="row")
        product((3, 121, 250, 40), WIDE, dtype)


# ---------------------------------------------------------------------------------------------- copies
def copy(
    x: Tensor,
    layout: str,
    activation: int = 0,
    *,
    pre_layout: str = "row",
    extra: int = 0,
    sums: bool = True,
    offset: int = 0,
    order: str = "shuffled",
) -> tuple[Tensor, Tensor | None]:
    arena = Arena(Arena.NAN)
    rows, columns = x.shape
    placed = LAYOUTS[layout](arena, x)
    pre = LAYOUTS[pre_layout](arena, randn(rows, columns, dtype=x.dtype, seed=5)) if activation else None
    out = arena.place(torch.full((rows, padded(columns) + extra), 99, dtype=x.dtype), offset)
    bias_grad = arena.place(torch.full((columns,), 99.0), offset) if sums else None
    with backend.scheduled(order, seed=rows + columns):
        backend._copy_pad_(placed, pre, out, bias_grad, activation)
    arena.check()
    name = cases.ACTIVATIONS[activation]
    assert torch.equal(out[:, columns:], torch.zeros(rows, padded(columns) + extra - columns, dtype=x.dtype))
    if pre is None:
        assert testing.common.differing(out[:, :columns].float(), placed.float()) == 0
        theirs, truth = placed.float(), placed.double()
    else:
        theirs = reference.matmul.activation_backward(placed, pre, name)
        argument = pre.double().requires_grad_(name != "relu")
        truth = placed * (pre > 0) if name == "relu" else placed.double()
        if name != "relu":
            (truth,) = torch.autograd.grad(cases.exact(argument, name), argument, truth)
        result = cases.compare("values", out[:, :columns], theirs.to(x.dtype), truth.double())
        assert result.passed, result
    if bias_grad is not None:
        result = cases.compare("sums", bias_grad, theirs.sum(0), truth.double().sum(0))
        assert result.passed, result
    return out, bias_grad


@dtypes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copy_pad(layout: str, dtype: torch.dtype) -> None:
    sizes = itertools.product((1, 2, 9, 65), (1, 7, 8, 9, 63, 65, 257))
    for i, (rows, columns) in enumerate(sizes):
        options = {"extra": i % 3 * 8, "sums": i % 4 != 0, "offset": i % 5 // 4, "order": backend.ORDERS[i % 3]}
        copy(randn(rows, columns, dtype=dtype), layout, **options)


@dtypes
@activations
def test_copy_pad_with_a_derivative(activation: int, dtype: torch.dtype) -> None:
    for i, layout in enumerate(LAYOUTS):
        pre_layout = tuple(LAYOUTS)[(i * 3 + 1) % len(LAYOUTS)]
        sizes = ((9, 31), (1, 8), (70, 129))[i % 3]
        copy(randn(*sizes, dtype=dtype), layout, activation, pre_layout=pre_layout, order=backend.ORDERS[i % 3])


@pytest.mark.parametrize(("rows", "columns"), [(300, 257), (131, 1000), (4100, 3), (2100, 17)])
def test_sums_of_columns_by_many_blocks(rows: int, columns: int) -> None:
    x = randn(rows, columns, dtype=torch.bfloat16) + 1
    results = [copy(x, "odd_row", activation, order=order) for activation in (0, 2) for order in backend.ORDERS]
    for first in (0, 3):  # the same bits in every order
        assert all(torch.equal(results[first][1], results[first + i][1]) for i in (1, 2))  # type: ignore[arg-type]


def test_sums_of_columns_are_of_unrounded_products() -> None:
    x, pre = torch.full((64, 8), 1 / 3).half(), torch.full((64, 8), 0.3).half()
    _, sums = copy(x, "row", 2)
    assert sums is not None
    bias_grad, out = torch.empty(8), torch.empty(64, 8, dtype=torch.float16)
    backend._copy_pad_(x, pre, out, bias_grad, 2)
    product_ = reference.matmul.activation_backward(x, pre, "gelu")
    assert (out.float() - product_).abs().max() > 1e-5
    torch.testing.assert_close(bias_grad, product_.sum(0), rtol=1e-6, atol=0)


def test_nan_stays_in_its_column() -> None:
    x = randn(70, 11).half()
    x[33, 4] = math.nan
    out, sums = torch.empty(70, 16, dtype=torch.float16), torch.empty(11)
    backend._copy_pad_(x, None, out, sums, 0)
    assert sums.isnan().nonzero().flatten().tolist() == [4] and int(out.isnan().sum()) == 1
