"""The Triton kernels of the int8 family against a plain statement of the contract, bit for bit, every array between
guard bands. harness/test_triton_interpret.py runs this file in a process of its own.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from amp_kernels.triton_kernels import (
    _dequantize_int8_,
    _int8_conv2d_,
    _int8_linear_,
    _int8_matmul_,
    _quantize_int8_,
    _straight_through_int8_,
    int8,
    int8_conv2d,
    int8_matmul,
    int8_quantize,
    int8_tiles,
)
from arena import Arena
from torch import Tensor

from amp_kernels.ops.table import DTYPE_CODES
from amp_kernels.testing import Case
from amp_kernels.testing.common import DTYPES
from amp_kernels.testing.int8 import CASES

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
symmetries = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
INT8, INT32 = torch.int8, torch.int32
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


# --------------------------------------------------------------------------------------------------- the contract
@dataclasses.dataclass(frozen=True)
class Layout:
    """struct Int8Layout of csrc/int8.h; without `row` no group is cut."""

    outer: int
    reduced: int
    inner: int = 1
    row: int = 0

    @property
    def groups(self) -> int:
        return self.outer * self.inner

    @property
    def size(self) -> tuple[int, int, int]:
        return self.outer, self.reduced, self.inner

    def numbers(self) -> list[int]:
        return [*self.size, self.row or math.prod(self.size)]

    def begins(self) -> tuple[Tensor, Tensor]:
        """Where each of the outer groups begins in memory, and how many of its elements exist."""
        row = self.row or self.outer * self.reduced
        sizes = [min(self.reduced, row - at) for at in range(0, row, self.reduced)]
        all_sizes = torch.tensor(sizes * (self.outer // len(sizes)))
        return (all_sizes.cumsum(0) - all_sizes) * self.inner, all_sizes

    def exist(self) -> Tensor:
        return (torch.arange(self.reduced)[:, None] < self.begins()[1][:, None, None]).expand(self.size)

    def offsets(self) -> Tensor:
        within = torch.arange(self.reduced * self.inner).view(1, self.reduced, self.inner)
        return self.begins()[0][:, None, None] + within

    def of_groups(self, values: Tensor) -> Tensor:
        return values.cpu().view(self.outer, 1, self.inner)


def expected_affine(x: Tensor, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(scale, 1 / scale or 0, zero point) of fp32 [outer, reduced, inner] that holds 0 where no element exists."""
    low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
    if symmetric:
        scale = torch.maximum(-low, high) / torch.tensor(127.0)
    else:
        scale = high / torch.tensor(255.0) - low / torch.tensor(255.0)
    finite = x.isfinite().all(1, keepdim=True)
    inverse = torch.ones(()) / scale
    usable = finite & inverse.isfinite()
    inverse = torch.where(usable, inverse, 0)
    scale = torch.where(usable, scale, torch.where(finite, 1.0, math.nan))
    if symmetric:
        return scale, inverse, torch.zeros_like(scale).int()
    zero = (-128 - torch.where(usable, low, 0) * inverse).round().clamp(-128, 127)
    return scale, inverse, torch.where(usable, zero, 0).int()


def unclamped(x: Tensor, inverse: Tensor, zero_point: Tensor, noise: Tensor | None = None) -> Tensor:
    steps = x * inverse
    steps = steps.round() if noise is None else (steps + noise).floor()
    return steps.nan_to_num(nan=0.0).clamp(-512, 512).int() + zero_point


def expected_codes(
    x: Tensor, inverse: Tensor, zero_point: Tensor, symmetric: bool, noise: Tensor | None = None
) -> Tensor:
    codes = torch.where(inverse == 0, zero_point, unclamped(x, inverse, zero_point, noise))
    return codes.clamp(-127 if symmetric else -128, 127).to(INT8)


def expected_values(codes: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    return (codes.int() - zero_point).float() * scale


def philox(counter: np.ndarray, seed: int) -> list[np.ndarray]:
    low = np.uint64(0xFFFFFFFF)
    c = [counter & low, counter >> np.uint64(32), np.zeros_like(counter), np.zeros_like(counter)]
    k = [seed % 2**32, (seed >> 32) % 2**32]
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        high = [second >> np.uint64(32), first >> np.uint64(32)]
        c = [high[0] ^ c[1] ^ np.uint64(k[0]), second & low, high[1] ^ c[3] ^ np.uint64(k[1]), first & low]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def noise_of(index: Tensor, seed: int) -> Tensor:
    i = index.numpy().astype(np.uint64)
    words = np.stack(philox(i >> np.uint64(2), seed))
    word = np.take_along_axis(words, (i & np.uint64(3)).astype(np.int64)[None], 0)[0]
    return torch.from_numpy((word >> np.uint64(8)).astype(np.float32)) * 2.0**-24


def test_philox_of_this_file() -> None:
    """The first vectors of Random123's kat_vectors whose counter and key have these forms."""
    words = [int(word[0]) for word in philox(np.zeros(1, dtype=np.uint64), 0)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


# ----------------------------------------------------------------------------------------------------- the arrays
class Guarded:
    """The elements of a layout between guards."""

    def __init__(self, layout: Layout, dtype: torch.dtype, misaligned: bool = False) -> None:
        self.arena, self.exist = Arena(device=DEVICE), layout.exist()
        self.offsets = layout.offsets()[self.exist]
        bits = BITS[dtype.itemsize]
        self.flat = self.arena.place(torch.full((len(self.offsets),), -1, dtype=bits).view(dtype), int(misaligned))

    def fill(self, values: Tensor) -> Tensor:
        self.flat[self.offsets.to(DEVICE)] = values[self.exist].to(self.flat.dtype).to(DEVICE)
        return self.flat

    def read(self) -> Tensor:
        """[outer, reduced, inner], 0 where nothing exists; checks that nothing else was written."""
        result = torch.zeros(self.exist.shape, dtype=self.flat.dtype)
        offsets = self.offsets.to(DEVICE)
        result[self.exist] = self.flat[offsets].cpu()
        self.arena.check()
        return result


def same(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


def _with(values: Tensor, **at: float) -> Tensor:
    values = values.clone()
    values[-1], values[0] = at.get("last", values[-1]), at.get("first", values[0])
    return values


def kinds(n: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Groups of n fp64 elements: every special case."""
    g = torch.Generator().manual_seed(seed)
    normal = torch.randn(n, generator=g, dtype=torch.float64)
    steps = torch.arange(n) % 9
    info = torch.finfo(dtype)
    return [
        normal,
        _with(normal, last=math.nan),
        normal * 1e4,
        _with(normal, first=math.inf),
        torch.zeros(n).double(),
        -torch.zeros(n).double(),
        torch.full((n,), 0.1).double(),
        torch.full((n,), -0.3).double(),
        -normal.abs() - 1,
        normal.abs() + 1,
        _with(normal, last=-math.inf),
        _with(_with(normal, first=math.nan), last=math.inf),
        _with((steps - 4) + 0.5, first=127.0),  # ties
        _with((steps - 4) + 0.5, first=-128.0, last=127.0),
        (steps - 4) * info.smallest_normal / 8,  # subnormal
        (steps - 4) * info.tiny / 512,
        _with(info.max * (1 - 2.0 * (steps % 2)), first=info.max),
        _with(torch.zeros(n).double(), first=info.max),
        normal * 2.0**-126,  # 1 / scale around the largest float
        _with(normal, first=math.copysign(math.nan, -1.0)),
    ]


def values_of_kinds(layout: Layout, dtype: torch.dtype, first: int = 0) -> Tensor:
    """Each group of another kind; fp32 [outer, reduced, inner], rounded to dtype, 0 where nothing exists."""
    all_kinds = kinds(layout.reduced, dtype, first)
    groups = [all_kinds[(first + group) % len(all_kinds)] for group in range(layout.groups)]
    x = torch.stack(groups).view(layout.outer, layout.inner, layout.reduced).transpose(1, 2)
    return torch.where(layout.exist(), x.to(dtype).float(), 0)


N_KINDS = len(kinds(4, FP32, 0))

LAYOUTS = {
    "rows": Layout(5, 37),
    "rows_of_fours": Layout(6, 64),
    "columns": Layout(1, 9, 37),
    "columns_of_fours": Layout(2, 5, 40),
    "experts": Layout(3, 9, 37),
    "blocks": Layout(12, 16, row=37),
    "blocks_of_fours": Layout(12, 16, row=40),
    "tensor": Layout(1, 1000),
    "elements": Layout(1, 1, 50),
    "one": Layout(1, 1),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
# The interpreter takes some 10 ms a tile: every layout with one dtype, a few with the others.
_FEW = ("rows", "rows_of_fours", "columns_of_fours")
layouts_and_dtypes = pytest.mark.parametrize(
    ("layout", "dtype"),
    [(layout, FP16) for layout in LAYOUTS.values()] + [(LAYOUTS[name], d) for name in _FEW for d in (FP32, BF16)],
    ids=[*LAYOUTS, *(f"{name}-{d}" for name in _FEW for d in ("fp32", "bf16"))],
)


@pytest.fixture(params=["registers", "two_reads", "partials"])
def plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How extremes are found; what the sizes of real tensors decide, tiles too small for these decide here."""
    if request.param != "registers":
        monkeypatch.setattr(int8_tiles, "_TILE", {True: 64, False: 64})
        monkeypatch.setattr(int8_tiles, "_REGISTER_TILE", {True: 0, False: 0})
        monkeypatch.setattr(int8_tiles, "_COLUMNS_OF_TILE", 4)
        monkeypatch.setattr(int8_tiles, "_PROGRAMS", 0 if request.param == "two_reads" else 64)
    yield request.param
    for cached in (int8_tiles.streaming_plan, int8_tiles.register_plan, int8_tiles.two_pass_plan):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def fresh_plans() -> None:
    for cached in (int8_tiles.streaming_plan, int8_tiles.register_plan, int8_tiles.two_pass_plan):
        cached.cache_clear()


# ------------------------------------------------------------------------------------------------------- quantize
@dataclasses.dataclass
class Quantized:
    """One call, its groups' scales and zero points, and what the contract says."""

    out: Tensor
    scale: Tensor
    zero_point: Tensor


def run_quantize(
    layout: Layout,
    x: Tensor,
    dtype: torch.dtype,
    symmetric: bool,
    *,
    given: tuple[Tensor, Tensor] | None = None,
    fake: bool = False,
    seed: int | None = None,
    misaligned: bool = False,
) -> Quantized:
    source = Guarded(layout, dtype, misaligned)
    out = Guarded(layout, dtype if fake else INT8, misaligned)
    arena = Arena(device=DEVICE)
    n = layout.groups
    nothing = (torch.full((n,), -7.0), torch.full((n,), -7, dtype=INT32))
    scale, zero_point = (arena.place(values) for values in given or nothing)
    numbers = layout.numbers()
    _quantize_int8_(
        source.fill(x), out.flat, scale, None if symmetric else zero_point, numbers, given is not None,
        seed is not None, 0 if seed is None else seed,
    )  # fmt: skip
    arena.check()
    same(source.read().float(), x)
    return Quantized(out.read(), layout.of_groups(scale), layout.of_groups(zero_point))


def check_quantize(layout: Layout, x: Tensor, dtype: torch.dtype, symmetric: bool, **options: bool | int) -> None:
    ours = run_quantize(layout, x, dtype, symmetric, **options)  # type: ignore[arg-type]
    scale, inverse, zero_point = expected_affine(x, symmetric)
    same(ours.scale, scale)
    if not symmetric:
        same(ours.zero_point, zero_point)
    seed = options.get("seed")
    noise = None if seed is None else noise_of(layout.offsets(), seed)
    codes = expected_codes(x, inverse, zero_point, symmetric, noise)
    if options.get("fake"):
        values = torch.where(x.isnan(), x, expected_values(codes, scale, zero_point))
        codes = values.to(dtype)
    same(torch.where(layout.exist(), ours.out, 0), torch.where(layout.exist(), codes, 0))


@layouts
def test_layouts(layout: Layout, plan: str) -> None:
    # The interpreter takes 80 ms: each layout is symmetric for one or two of the three plans.
    symmetric = (list(LAYOUTS.values()).index(layout) + len(plan)) % 2 == 0
    dtype = FP16 if symmetric else FP32
    check_quantize(layout, values_of_kinds(layout, dtype, 7), dtype, symmetric)


ALL_KINDS = {
    "rows": Layout(N_KINDS, 16),
    "odd_rows": Layout(N_KINDS, 13),
    "columns": Layout(1, 11, N_KINDS),
}


all_kinds = pytest.mark.parametrize("layout", ALL_KINDS.values(), ids=ALL_KINDS.keys())


@dtypes
@symmetries
@all_kinds
def test_values(layout: Layout, dtype: torch.dtype, symmetric: bool) -> None:
    x = values_of_kinds(layout, dtype)
    check_quantize(layout, x, dtype, symmetric)
    check_quantize(layout, x, dtype, symmetric, misaligned=True)
    check_quantize(layout, x, dtype, symmetric, fake=True)
    check_quantize(layout, x, dtype, symmetric, seed=5)


@symmetries
@all_kinds
def test_values_of_plans(layout: Layout, symmetric: bool, plan: str) -> None:
    check_quantize(layout, values_of_kinds(layout, BF16), BF16, symmetric, fake=True)


@symmetries
@pytest.mark.parametrize("kind", range(N_KINDS))
def test_values_of_a_tensor(kind: int, symmetric: bool) -> None:
    layout = LAYOUTS["tensor"]
    check_quantize(layout, values_of_kinds(layout, FP32, kind), FP32, symmetric)


SEEDS = (0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0x9E3779B97F4A7C15)


@pytest.mark.parametrize("seed", SEEDS, ids=hex)
def test_seeds(seed: int) -> None:
    for name in ("rows", "rows_of_fours"):
        check_quantize(LAYOUTS[name], values_of_kinds(LAYOUTS[name], FP32), FP32, False, seed=seed)


@layouts
def test_stochastic_layouts(layout: Layout) -> None:
    check_quantize(layout, values_of_kinds(layout, BF16), BF16, True, seed=-3)


@triton.jit
def _noise_kernel(index_ptr, out_ptr, seed: tl.int64, FOURS: tl.constexpr):
    if FOURS:
        index = tl.load(index_ptr + tl.arange(0, 8) * 4)[None, :]
        tl.store(out_ptr + tl.arange(0, 32)[None, :], int8.noise_of_fours(index, seed, 1, 32))
    else:
        each = tl.arange(0, 32)
        tl.store(out_ptr + each, int8.noise_of_each(tl.load(index_ptr + each), seed))


@pytest.mark.parametrize("first", [0, 2**33, 2**34 - 8, 2**34 + 4, 2**50])
def test_noise_of_large_indices(first: int) -> None:
    """Counters of more than 32 bits, each for four elements and not."""
    for fours, index in ((True, first + torch.arange(32)), (False, first + 3 + torch.arange(32))):
        out = torch.empty(32, device=DEVICE)
        _noise_kernel[(1,)](index.to(DEVICE), out, 11, FOURS=fours)
        same(out.cpu(), noise_of(index, 11))


@layouts
def test_fake_layouts(layout: Layout) -> None:
    check_quantize(layout, values_of_kinds(layout, FP16, 3), FP16, False, fake=True)


@pytest.mark.parametrize("numel", [8191, 8193, 16384, 16392, 20011])
def test_long_rows(numel: int) -> None:
    layout = Layout(2, numel)
    check_quantize(layout, values_of_kinds(layout, FP16, 12), FP16, False)


def test_same_bits_each_time() -> None:
    layout = Layout(1, 30000)
    x = values_of_kinds(layout, FP32)
    runs = [run_quantize(layout, x, FP32, False, seed=1) for _ in range(2)]
    assert torch.equal(runs[0].out, runs[1].out) and torch.equal(runs[0].scale, runs[1].scale)


@pytest.mark.parametrize("by_columns", [False, True], ids=["rows", "columns"])
def test_more_than_32_bits_of_elements(by_columns: bool) -> None:
    """The first tile of two rows that are 2**31 elements apart; nobody touches the memory between them."""
    far = 2**31 + 8
    x = torch.empty(far + 16, dtype=FP16, device=DEVICE)
    out = torch.empty(far + 16, dtype=INT8, device=DEVICE)
    values = torch.randn(2, 16, generator=torch.Generator().manual_seed(3)).to(FP16)
    x[:16], x[far:] = values.to(DEVICE)
    scale = torch.linspace(0.02, 0.05, 16).view(1, 16) if by_columns else torch.tensor([[0.02], [0.03]])
    sizes = (1, 2, far) if by_columns else (2, far, 1)
    int8.launch_unfused(
        int8_quantize._quantize_kernel, 1, x.device, x, out, scale.to(DEVICE), None, None, *sizes, 2 * far, 1, 1, 1, 0,
        FROM=int8_quantize.GIVEN.value, FAKE=False, STOCHASTIC=False, FOURS=False, DTYPE=DTYPE_CODES[FP16],
        BY_COLUMNS=by_columns, ROWS=2, WIDTH=16, VEC=8,
    )  # fmt: skip
    expected = expected_codes(values.float(), 1 / scale, torch.zeros_like(scale).int(), True)
    same(torch.stack([out[:16], out[far:]]).cpu(), expected)


# ----------------------------------------------------------------------------------------------------- given scales
GIVEN = (0.01, 0.5, 3.0, 1e-45, 1e-38, 3e38, math.inf, math.nan, 1e-30)
ZERO_POINTS = (0, -128, 127, 5, -77, -600, 300)  # those that are no codes too


def given_for(layout: Layout, symmetric: bool) -> tuple[Tensor, Tensor]:
    n = layout.groups
    scale = torch.tensor([GIVEN[i % len(GIVEN)] for i in range(n)])
    zero_point = torch.tensor([0 if symmetric else ZERO_POINTS[i % len(ZERO_POINTS)] for i in range(n)])
    return scale, zero_point.int()


@layouts_and_dtypes
@symmetries
def test_given_scales(layout: Layout, symmetric: bool, dtype: torch.dtype) -> None:
    scale, zero_point = given_for(layout, symmetric)
    scales, zeros = layout.of_groups(scale), layout.of_groups(zero_point)
    inverse = 1 / scales
    x = values_of_kinds(layout, dtype)
    exist = layout.exist()
    codes = expected_codes(x, inverse, zeros, symmetric)
    ours = run_quantize(layout, x, dtype, symmetric, given=(scale, zero_point))
    same(ours.out, torch.where(exist, codes, 0))
    same(ours.scale, scales)
    fake = run_quantize(layout, x, dtype, symmetric, given=(scale, zero_point), fake=True)
    values = torch.where(x.isnan(), x, expected_values(codes, scales, zeros)).to(dtype)
    same(fake.out, torch.where(exist, values, 0))
    noise = noise_of(layout.offsets(), 3)
    stochastic = run_quantize(layout, x, dtype, symmetric, given=(scale, zero_point), seed=3)
    same(stochastic.out, torch.where(exist, expected_codes(x, inverse, zeros, symmetric, noise), 0))


@layouts_and_dtypes
@symmetries
@pytest.mark.parametrize("misaligned", [False, True], ids=["aligned", "misaligned"])
def test_dequantize(layout: Layout, symmetric: bool, dtype: torch.dtype, misaligned: bool) -> None:
    scale, zero_point = given_for(layout, symmetric)
    codes = torch.randint(-128, 128, layout.size, generator=torch.Generator().manual_seed(1), dtype=INT8)
    source = Guarded(layout, INT8, misaligned)
    out = Guarded(layout, dtype, misaligned)
    arena = Arena(device=DEVICE)
    scales, zeros = arena.place(scale), arena.place(zero_point)
    _dequantize_int8_(source.fill(codes), scales, None if symmetric else zeros, out.flat, layout.numbers())
    arena.check()
    expected = expected_values(codes, layout.of_groups(scale), layout.of_groups(zero_point)).to(dtype)
    same(out.read(), torch.where(layout.exist(), expected, 0))


@layouts_and_dtypes
@symmetries
def test_straight_through(layout: Layout, symmetric: bool, dtype: torch.dtype) -> None:
    scale, zero_point = given_for(layout, symmetric)
    x = values_of_kinds(layout, dtype)
    grad = torch.randn(layout.size, generator=torch.Generator().manual_seed(2)).to(dtype)
    x_source, grad_source, out = (Guarded(layout, dtype) for _ in range(3))
    arena = Arena(device=DEVICE)
    scales, zeros = arena.place(scale), arena.place(zero_point)
    zeros_or_none = None if symmetric else zeros
    _straight_through_int8_(grad_source.fill(grad), x_source.fill(x), scales, zeros_or_none, out.flat, layout.numbers())
    arena.check()
    codes = unclamped(x, 1 / layout.of_groups(scale), layout.of_groups(zero_point))
    inside = (codes >= (-127 if symmetric else -128)) & (codes <= 127)
    same(out.read(), torch.where(layout.exist() & inside, grad, 0))


# ---------------------------------------------------------------------------------------------------- int8 @ int8
def codes_matrix(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randint(-128, 128, (rows, columns), generator=torch.Generator().manual_seed(seed), dtype=INT8)


# Strides of [rows, columns], and offset of the first element.
MATRICES = {
    "contiguous": lambda r, c: ((c, 1), 0),
    "transposed": lambda r, c: ((1, r), 0),
    "sliced": lambda r, c: ((-(-c // 16) * 16 + 16, 1), 0),
    "misaligned": lambda r, c: ((c + 3, 1), 1),
    "transposed_slice": lambda r, c: ((1, -(-r // 16) * 16 + 16), 0),
    "every_other": lambda r, c: ((2 * c, 2), 0),
}


def place_matrix(values: Tensor, form: str) -> tuple[Tensor, Arena]:
    """A view of `values`, its gaps poisoned as the guard bands are."""
    rows, columns = values.shape
    (row, column), offset = MATRICES[form](rows, columns)
    arena = Arena(device=DEVICE)
    size = max((rows - 1) * row + (columns - 1) * column + 1, 0) if values.numel() else 0
    flat = arena.place(torch.full((size,), -1, dtype=BITS[values.itemsize]).view(values.dtype), offset)
    view = flat.as_strided(values.shape, (row, column), flat.storage_offset())
    view.copy_(values)
    return view, arena


def run_matmul(
    a: Tensor,
    b: Tensor,
    *,
    forms: tuple[str, str] = ("contiguous", "contiguous"),
    zero_points: tuple[bool, bool] = (False, False),
    zero_point: int | None = None,
    per: tuple[bool, bool] = (True, True),
    bias: bool = True,
    dtype: torch.dtype = FP32,
    out_zero_point: int | None = None,
) -> None:
    (m, k), n = a.shape, b.shape[1]
    g = torch.Generator().manual_seed(m * 7 + n * 3 + k)
    arena = Arena(device=DEVICE)

    def of(size: int, is_per: bool) -> tuple[Tensor, Tensor]:
        size = size if is_per else 1
        scale = torch.rand(size, generator=g) * 0.02 + 0.001
        zeros = torch.randint(-128, 128, (size,), generator=g, dtype=INT32)
        return scale, zeros if zero_point is None else torch.full_like(zeros, zero_point)

    (a_scale, a_zero), (b_scale, b_zero) = of(m, per[0]), of(n, per[1])
    added = torch.randn(n, generator=g)
    left = a.long() - (a_zero[:, None] if zero_points[0] else 0)
    right = b.long() - (b_zero if zero_points[1] else 0)
    y = (left @ right).float() * (a_scale[:, None] * b_scale)
    if bias:
        y = y + added
    out_scale = None
    if dtype == INT8:
        out_scale = y.abs().max() / 90 + 1e-3  # so that some codes are clamped with a zero point
        zero = torch.tensor(out_zero_point or 0)
        expected = expected_codes(y, 1 / out_scale, zero, out_zero_point is None)
    else:
        expected = y.to(dtype)
    (a_view, a_arena), (b_view, b_arena) = place_matrix(a, forms[0]), place_matrix(b, forms[1])
    out = arena.place(torch.zeros(m * n, dtype=dtype))
    _int8_matmul_(
        a_view, b_view, arena.place(a_scale), arena.place(a_zero) if zero_points[0] else None,
        arena.place(b_scale), arena.place(b_zero) if zero_points[1] else None,
        arena.place(added) if bias else None, out.view(m, n),
        None if out_scale is None else arena.place(out_scale.view(1)),
        None if out_zero_point is None else arena.place(torch.tensor([out_zero_point], dtype=INT32)),
    )  # fmt: skip
    for each in (arena, a_arena, b_arena):
        each.check()
    same(out.view(m, n).cpu(), expected)


NO_ZEROS, BOTH_ZEROS = (False, False), (True, True)
SHAPES = [(1, 1, 1), (1, 5, 0), (40, 70, 0), (1, 40, 300), (3, 2, 1100), (17, 33, 65), (65, 70, 130), (70, 9, 64)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))


@shapes
@pytest.mark.parametrize(
    ("zero_points", "bias"), [(NO_ZEROS, True), ((True, False), False), ((False, True), True), (BOTH_ZEROS, False)]
)
def test_matmul(shape: tuple[int, int, int], zero_points: tuple[bool, bool], bias: bool) -> None:
    m, n, k = shape
    run_matmul(codes_matrix(m, k, 1), codes_matrix(k, n, 2), zero_points=zero_points, bias=bias)


@shapes
@pytest.mark.parametrize(
    ("dtype", "out_zero_point", "options"),
    [
        (FP16, None, {"zero_points": BOTH_ZEROS}), (BF16, None, {"per": (False, False)}),
        (INT8, None, {"per": (False, False)}), (INT8, 40, {"zero_points": BOTH_ZEROS}),
    ],
    ids=["fp16", "bf16", "int8", "int8 with a zero point"],
)  # fmt: skip
def test_matmul_outputs(
    shape: tuple[int, int, int], dtype: torch.dtype, out_zero_point: int | None, options: dict[str, Any]
) -> None:
    m, n, k = shape
    a, b = codes_matrix(m, k, 3), codes_matrix(k, n, 4)
    run_matmul(a, b, dtype=dtype, out_zero_point=out_zero_point, **options)


@pytest.mark.parametrize("a_form", MATRICES)
@pytest.mark.parametrize("b_form", MATRICES)
@pytest.mark.parametrize("shape", [(33, 48, 96), (21, 37, 70)], ids=["aligned", "odd"])
def test_matmul_layouts(a_form: str, b_form: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    run_matmul(codes_matrix(m, k, 5), codes_matrix(k, n, 6), forms=(a_form, b_form), zero_points=BOTH_ZEROS)


@pytest.mark.parametrize("form", MATRICES)
def test_matmul_copies_what_it_cannot_read_in_chunks(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wide, tiles = [], int8_matmul._tiles
    monkeypatch.setattr(int8_matmul, "_tiles", lambda *args: wide.append(args[3]) or tiles(*args))
    for m, n in ((17, 37), (37, 17), (16, 37), (37, 16)):
        run_matmul(codes_matrix(m, 70, 5), codes_matrix(70, n, 6), forms=(form, form), zero_points=BOTH_ZEROS)
    assert wide[:2] == [True, True]
    assert form != "misaligned" or wide[2:] == [False, False]  # few rows, or columns


LARGE = {
    "large": (int8_matmul._LARGE[INT8], NO_ZEROS),
    "hopper": (int8_matmul._LARGE_HOPPER, NO_ZEROS),
    "zero_points": (int8_matmul._LARGE_NARROW, BOTH_ZEROS),
    "turing": (int8_matmul._SMALL, BOTH_ZEROS),
}


@pytest.mark.parametrize(("tiles", "zero_points"), LARGE.values(), ids=LARGE.keys())
@pytest.mark.parametrize("form", ["contiguous", "transposed", "every_other", "sliced"])
def test_matmul_tiles(
    tiles: int8_matmul.Tiles, zero_points: tuple[bool, bool], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only large products and other devices take."""
    if tiles == int8_matmul._LARGE_HOPPER and DEVICE == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper's shared memory")
    monkeypatch.setattr(int8_matmul, "_tiles", lambda *_: tiles)
    if tiles == int8_matmul._SMALL:
        monkeypatch.setattr(int8_matmul, "capability_of", lambda _: (7, 5))
    n = 70 if tiles == int8_matmul._SMALL else 272
    a, b = codes_matrix(150, 130, 7), codes_matrix(130, n, 8)
    run_matmul(a, b, forms=(form, form), zero_points=zero_points)


def test_matmul_order_of_tiles() -> None:
    """More rows of tiles than are computed together, and the last band not full."""
    run_matmul(codes_matrix(64 * 9 + 5, 16, 9), codes_matrix(16, 130, 10), zero_points=(True, False))


@pytest.mark.parametrize("zero_points", [NO_ZEROS, BOTH_ZEROS], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("value", [-128, 127])
def test_matmul_of_extremes(value: int, zero_points: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest sum of the largest products, and a correction that leaves 32 bits."""
    if DEVICE == "cpu":  # the interpreter takes 10 ms a tile of any size
        monkeypatch.setattr(int8_matmul, "_tiles", lambda *_: int8_matmul.Tiles(16, 16, 8192, 4, 1))
    a, b = torch.full((2, 131071), -128, dtype=INT8), torch.full((131071, 3), value, dtype=INT8)
    run_matmul(a, b, zero_points=zero_points, zero_point=127)


def test_matmul_of_nan_and_overflow() -> None:
    a, b = codes_matrix(2, 64, 1), codes_matrix(64, 3, 2)
    out = torch.zeros(2, 3, dtype=FP16, device=DEVICE)
    scale = torch.tensor([math.nan, 1e30], device=DEVICE)
    _int8_matmul_(a.to(DEVICE), b.to(DEVICE), scale, None, torch.ones(1, device=DEVICE), None, None, out, None, None)
    y = (a.long() @ b.long()).float()
    assert out[0].isnan().all()
    same(out[1].cpu(), (y * torch.tensor(1e30))[1].to(FP16))
    codes = torch.zeros(2, 3, dtype=INT8, device=DEVICE)
    zero = torch.tensor([9], dtype=INT32, device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    _int8_matmul_(a.to(DEVICE), b.to(DEVICE), scale, None, one, None, None, codes, one, zero)
    assert codes[0].tolist() == [9, 9, 9]
    assert codes[1].tolist() == [127 if v > 0 else -128 for v in y[1].tolist()]


# --------------------------------------------------------------------------------------------------- convolutions
@pytest.mark.parametrize("case", CASES["int8_conv2d"], ids=str)
def test_conv2d_cases(case: Case) -> None:
    """All shared cases, since each way of gathering rows is in one of them."""
    assert [result for result in case.run("triton", DEVICE) if not result.passed] == []


@pytest.fixture
def reads_stay_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of a guard fails where the interpreter runs, whatever becomes of what was read."""
    if DEVICE != "cpu":
        return
    from triton.runtime.interpreter import InterpreterBuilder

    load = InterpreterBuilder.create_masked_load

    def checked(self: Any, pointers: Any, mask: Any, *options: Any) -> Any:
        addresses = pointers.data[mask.data]
        for begin, end in [guard for arena in Arena.alive for guard in arena.guards]:
            assert not ((addresses >= begin) & (addresses < end)).any(), "a kernel read outside an array"
        return load(self, pointers, mask, *options)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", checked)


def run_conv2d(
    shape: tuple[int, int, int, int], outputs: int, taps: tuple[int, int], stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0), dilation: tuple[int, int] = (1, 1), *, zero_points: bool = True,
    zero_point: int | None = None, out_zero_point: int | None = None,
) -> None:  # fmt: skip
    """A convolution of images that lie between 16 KB of guards, so that a wrong line or image is in a guard too."""
    far = 1 << 14
    g = torch.Generator().manual_seed(outputs)
    x = torch.randint(-128, 128, shape, generator=g, dtype=INT8)
    weight = torch.randint(-128, 128, (outputs, *taps, shape[3]), generator=g, dtype=INT8)
    zero = torch.randint(-128, 128, (shape[0], 1, 1, 1), generator=g, dtype=INT32) * zero_points
    if zero_point is not None:
        zero = torch.full_like(zero, zero_point)
    scale, weight_scale = torch.rand(shape[0], generator=g) + 0.5, torch.rand(outputs, generator=g) * 1e-3
    bias = torch.randn(outputs, generator=g)
    # Padding is the zero point, so it is 0 behind the subtraction.
    moved, kernel = (x.long() - zero).permute(0, 3, 1, 2).double(), weight.permute(0, 3, 1, 2).double()
    total = torch.nn.functional.conv2d(moved, kernel, None, stride, padding, dilation).permute(0, 2, 3, 1)
    y = (total + 0.0).float() * (scale.view(-1, 1, 1, 1) * weight_scale) + bias
    out_scale = None if out_zero_point is None else y.abs().max() / 90
    expected = y
    if out_zero_point is not None and out_scale is not None:
        expected = expected_codes(y, 1 / out_scale, torch.tensor(out_zero_point), False)
    arena, pixels = Arena(device=DEVICE), y.shape[1] * y.shape[2]

    def surrounded(codes: Tensor) -> Tensor:
        return arena.around(codes.flatten(), (codes.numel() + 2 * far,), slice(far, -far)).view(codes.shape)

    out = arena.place(torch.zeros(y.numel(), dtype=expected.dtype)).view(y.shape)
    zeros = zero.flatten().repeat_interleave(pixels)
    _int8_conv2d_(
        surrounded(x), surrounded(weight), arena.place(scale.repeat_interleave(pixels)),
        arena.place(zeros) if zero_points else None, arena.place(weight_scale), arena.place(bias), stride, padding,
        dilation, out, None if out_scale is None else arena.place(out_scale.view(1)),
        None if out_zero_point is None else arena.place(torch.tensor([out_zero_point], dtype=INT32)),
    )  # fmt: skip
    arena.check()
    same(out.cpu(), expected)


CONVOLUTIONS: dict[str, tuple[Any, ...]] = {
    "3x3": ((2, 9, 7, 16), 33, (3, 3), (1, 1), (1, 1)),
    "all_different": ((2, 10, 11, 48), 20, (3, 2), (2, 3), (2, 1), (3, 2)),
    "valid": ((3, 6, 5, 32), 20, (2, 3)),
    "far_padding": ((2, 3, 4, 16), 5, (2, 2), (1, 1), (5, 3)),
    "tap_of_two_tiles": ((1, 5, 4, 272), 20, (3, 3), (1, 1), (1, 1)),
    "copied": ((2, 6, 5, 5), 7, (3, 3), (1, 1), (1, 1)),
}
convolutions = pytest.mark.parametrize("conv", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
zero_points_or_not = pytest.mark.parametrize("zero_points", [False, True], ids=["symmetric", "asymmetric"])


@convolutions
@zero_points_or_not
@pytest.mark.usefixtures("reads_stay_inside")
def test_conv2d_reads_inside(conv: tuple[Any, ...], zero_points: bool) -> None:
    run_conv2d(*conv, zero_points=zero_points)


CONV_TILES = {
    "large": int8_matmul._LARGE[INT8],
    "narrow": int8_matmul._LARGE_NARROW,
    "newest": int8_conv2d._conv2d_tiles(1 << 20, 64, True, (12, 0)),
    "few_rows": int8_matmul._FEW_ROWS[INT8],
    "few_columns": int8_matmul._FEW_COLUMNS[INT8],
    "turing": int8_matmul._SMALL,
}


@zero_points_or_not
@pytest.mark.parametrize("tiles", CONV_TILES.values(), ids=CONV_TILES)
@pytest.mark.usefixtures("reads_stay_inside")
def test_conv2d_tiles(tiles: int8_matmul.Tiles, zero_points: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other devices take, and more images. A tile of K has several taps, and a row of tiles several images."""
    monkeypatch.setattr(int8_conv2d, "_conv2d_tiles", lambda *_: tiles)
    if tiles == int8_matmul._SMALL:
        monkeypatch.setattr(int8_conv2d, "capability_of", lambda _: (7, 5))
    conv = ((4, 7, 6, 48), 70, (3, 2), (1, 2), (1, 1), (2, 1))
    run_conv2d(*conv, zero_points=zero_points, out_zero_point=-7 if zero_points else 0)


@pytest.mark.parametrize("zero_point", [2**30, -(2**31)])
def test_conv2d_corrections_of_64_bits(zero_point: int) -> None:
    """A zero point that is no code, times the sum of an output channel."""
    run_conv2d(*CONVOLUTIONS["valid"], zero_point=zero_point)


def test_conv2d_tiles_of_devices() -> None:
    """The large tiles are for products that need no registers for 64 bits; 128 columns are a waste for 64 outputs."""
    large, narrow = int8_matmul._LARGE[INT8], int8_matmul._LARGE_NARROW
    of = int8_conv2d._conv2d_tiles
    assert [of(1 << 20, 256, False, (major, 0)) for major in (8, 9, 10, 12)] == [narrow, large, large, large]
    assert [of(1 << 20, 256, True, (major, 0)) for major in (8, 9, 10)] == [narrow] * 3
    assert of(1 << 20, 64, False, (9, 0)) == narrow
    assert of(1 << 20, 256, True, (12, 0)) == narrow._replace(k=64)
    assert of(1 << 20, 256, True, (7, 5)) == int8_matmul._SMALL


def test_conv2d_of_more_than_32_bits() -> None:
    """Pixels that are 2**31 codes apart, in both images; nobody touches the memory between them."""
    far = 2**27
    x = torch.empty(2, 1, far + 2, 16, dtype=INT8, device=DEVICE)
    ends = torch.randint(-128, 128, (2, 1, 4, 16), generator=torch.Generator().manual_seed(4), dtype=INT8)
    x[:, :, :2], x[:, :, far:] = ends[:, :, :2].to(DEVICE), ends[:, :, 2:].to(DEVICE)
    weight = torch.randint(-128, 128, (17, 1, 2, 16), generator=torch.Generator().manual_seed(5), dtype=INT8)
    out = torch.zeros(2, 1, 2, 17, device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    _int8_conv2d_(x, weight.to(DEVICE), one, None, one, None, (1, 1), (0, 0), (1, far), out, None, None)
    taps = torch.stack([ends[:, 0, :2], ends[:, 0, 2:]], 2).flatten(2).double()
    same(out.view(2, 2, 17).cpu(), (taps @ weight.flatten(1).double().T).float())


def test_conv2d_of_too_many_pixels() -> None:
    """Coordinates of pixels are 32-bit integers."""
    x, weight = torch.zeros(1, 1, 1, 16, dtype=INT8), torch.zeros(1, 1, 1, 16, dtype=INT8)
    one, out = torch.ones(1), torch.zeros(1, 1, 2, 1)
    with pytest.raises(ValueError, match="int8_conv2d: x must have at most 1073741824 pixels"):
        _int8_conv2d_(x, weight, one, None, one, None, (1, 2**30), (0, 2**29), (1, 1), out, None, None)


# --------------------------------------------------------------------------------------------------- int8 weights
def run_linear(
    m: int, n: int, k: int, dtype: torch.dtype, *, gap: int = 0, per: bool = True, bias: bool = True
) -> None:
    g = torch.Generator().manual_seed(m + n + k)
    x = torch.randn(m, k, generator=g).to(dtype)
    weight = codes_matrix(n, k, 3)
    scale = torch.rand(n if per else 1, generator=g) * 0.02 + 0.001
    added = torch.randn(n, generator=g).to(dtype)
    arena = Arena(device=DEVICE)
    rows = arena.place(torch.full((m * (k + gap),), math.nan, dtype=dtype)).view(m, k + gap)[:, :k]
    rows.copy_(x)
    out = arena.place(torch.full((m * n,), math.nan, dtype=dtype)).view(m, n)
    weights = arena.place(weight.view(-1)).view(n, k)
    _int8_linear_(rows, weights, arena.place(scale), arena.place(added) if bias else None, out)
    arena.check()
    exact = (x.double() @ weight.double().T) * scale.double() + (added.double() if bias else 0)
    dequantized = weight.float() * scale[:, None]
    torch_result = (x.float() @ dequantized.T + (added.float() if bias else 0)).to(dtype)
    allowed = 2 * (torch_result.double() - exact).abs().max() + 1e-7 * exact.abs().max()
    assert (out.cpu().double() - exact).abs().max() <= allowed


@dtypes
@shapes
def test_linear(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    run_linear(*shape, dtype)


@dtypes
@pytest.mark.parametrize("gap", [0, 1, 8])
def test_linear_rows_apart(dtype: torch.dtype, gap: int) -> None:
    run_linear(33, 40, 96, dtype, gap=gap, per=False, bias=False)


@dtypes
def test_linear_large_tiles(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_matmul, "_tiles", lambda *_: int8_matmul._LARGE[dtype])
    run_linear(150, 140, 70, dtype)


def test_linear_of_fp16_does_not_overflow_inside() -> None:
    x = torch.full((2, 256), 1000.0, dtype=FP16, device=DEVICE)
    weight = torch.full((3, 256), 127, dtype=INT8, device=DEVICE)
    out = torch.zeros(2, 3, dtype=FP16, device=DEVICE)
    _int8_linear_(x, weight, torch.full((1,), 1e-4, device=DEVICE), None, out)
    assert out.tolist() == [[torch.tensor(256 * 127 * 1000 * 1e-4).half().item()] * 3] * 2
