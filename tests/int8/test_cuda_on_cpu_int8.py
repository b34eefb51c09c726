"""The int8 CUDA kernels, run on the CPU: memory between guard bands, threads and blocks in every order, every way
through the kernels. Values at the ends of the range are in the shared cases."""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from arena import Arena
from cuda_on_cpu import backend, cases
from cuda_on_cpu.build import missing_headers
from torch import Tensor
from torch.nn import functional as F

from amp_kernels import reference
from amp_kernels.ops import int8 as ops
from amp_kernels.reference.int8 import philox
from amp_kernels.testing.common import DTYPES, differing, error_and_allowed
from amp_kernels.testing.int8 import CONVOLUTIONS

pytestmark = pytest.mark.skipif(missing_headers() is not None, reason=str(missing_headers()))
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
low = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
ORDERS = itertools.cycle(backend.ORDERS)
Place = Callable[[Arena, Tensor], Tensor]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def _permuted(arena: Arena, x: Tensor, dims: Sequence[int]) -> Tensor:
    back = sorted(range(x.dim()), key=dims.__getitem__)
    return arena.place(x.permute(*dims).contiguous()).permute(*back)


LAYOUTS: dict[str, Place] = {
    "dense": lambda arena, x: arena.place(x),
    "misaligned": lambda arena, x: arena.place(x, 1),
    "transposed": lambda arena, x: _permuted(arena, x, (*range(x.dim() - 2), x.dim() - 1, x.dim() - 2)),
}


def _first(x: Tensor) -> tuple[object, ...]:
    return (..., slice(0, x.shape[-1]))


# ------------------------------------------------------------------------------------------- quantization
def strided(arena: Arena, fill: float, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Dense memory with these strides."""
    flat = arena.place(torch.full((math.prod(shape),), fill, dtype=dtype))
    return flat.as_strided(tuple(shape), tuple(strides))


class Problem:
    """A tensor in guarded memory, cut into groups, and what the reference makes of it."""

    def __init__(self, x: Tensor, layout: str, *, dim: Sequence[int] | None = None, block: int | None = None) -> None:
        self.arena = Arena()
        self.x = x
        self.placed = LAYOUTS[layout](self.arena, x)
        self.dim, self.block = dim, block
        self.groups = ops.groups_of(x, None, dim, block)
        self.plan = ops.Plan.of(self.placed, None, dim, block)
        assert self.plan.walk == self.plan.out, "operators copy other tensors"

    def result(self, dtype: torch.dtype) -> Tensor:
        return strided(self.arena, 99, self.x.shape, self.plan.walk, dtype)

    def group_values(self, values: Tensor | None, fill: float, dtype: torch.dtype) -> Tensor:
        placed = strided(self.arena, fill, self.groups.scale_shape, self.plan.scale, dtype)
        return placed if values is None else placed.copy_(values)

    def quantize(
        self,
        symmetric: bool,
        *,
        fake: bool = False,
        seed: int | None = None,
        scale: Tensor | None = None,
        zero_point: Tensor | None = None,
    ) -> None:
        """Runs the kernel, with a `scale` the static one, and compares everything it writes."""
        options = {"dim": self.dim, "block_size": self.block, "symmetric": symmetric}
        zero = None if symmetric else self.group_values(None, 77, torch.int32)
        if scale is not None:
            if zero is not None:
                zero.copy_(torch.arange(zero.numel()).view(zero.shape) % 200 - 100)
            if zero is not None and zero_point is not None:
                zero.copy_(zero_point)
            options |= {"scale": scale, "zero_point": zero}
        if fake:
            expected = reference.fake_quantize_int8(self.x, **options)
        else:
            expected = reference.quantize_int8(self.x, seed=seed, **options)
        out = self.result(self.x.dtype if fake else torch.int8)
        placed_scale = self.group_values(scale, 55, torch.float32)
        with backend.scheduled(next(ORDERS), seed=5):
            backend._quantize_int8_(
                self.placed, out, placed_scale, zero, self.plan.layout, scale is not None, seed is not None, seed or 0
            )
        self.arena.check()
        name = f"symmetric={symmetric}, fake={fake}, seed={seed}, static={scale is not None}"
        assert differing(placed_scale, expected[1]) == 0, f"scale, {name}"
        assert zero is None or torch.equal(zero, expected[2]), f"zero point, {name}"
        assert differing(out.float(), expected[0].float()) == 0, f"values, {name}"

    def quantize_all_ways(self) -> None:
        for symmetric in (True, False):
            self.quantize(symmetric)
            self.quantize(symmetric, fake=True)
            if self.is_numbered:
                self.quantize(symmetric, seed=2**63 + 7)
        scale = randn(*self.groups.scale_shape, seed=1).abs() * 0.02 + 0.001
        self.quantize(True, scale=scale)
        self.quantize(False, scale=scale, seed=3 if self.is_numbered else None)

    @property
    def is_numbered(self) -> bool:
        """Whether random bits can be: by place in a row-major result."""
        return self.result(torch.int8).is_contiguous()

    def back(self, dtype: torch.dtype) -> None:
        """Dequantizes, and takes the gradient of fake quantization."""
        scale = self.group_values(randn(*self.groups.scale_shape, seed=1).abs() * 0.02 + 0.001, 0, torch.float32)
        zero = self.group_values(None, 3, torch.int32)
        for zero_point in (None, zero):
            given = (scale, zero_point)
            values = self.result(torch.int8).copy_(codes(*self.x.shape))
            out = self.result(dtype)
            with backend.scheduled(next(ORDERS), seed=6):
                backend._dequantize_int8_(values, *given, out, self.plan.layout)
            self.arena.check()
            expected = reference.dequantize_int8(values, *given, block_size=self.block, dtype=dtype)
            assert differing(out, expected) == 0
            grad = self.result(self.x.dtype).copy_(randn(*self.x.shape, seed=2))
            passed = self.result(self.x.dtype)
            with backend.scheduled(next(ORDERS), seed=7):
                backend._straight_through_int8_(grad, self.placed, *given, passed, self.plan.layout)
            self.arena.check()
            expected = reference.straight_through_int8(grad, self.x, *given, block_size=self.block)
            assert differing(passed, expected) == 0
            assert 0 < (passed == 0).sum() < passed.numel() or passed.numel() < 50


# Rows of a few lanes, of a warp, of several warps, of more than a block's wide packs; and of more than fits on chip.
ROWS = ((70, 1), (9, 8), (37, 40), (9, 100), (5, 1000), (3, 1032), (2, 4104), (2, 2051))
TOO_LONG = ((2, 33000),)
# Bands of one lane, of a warp and of two; more rows than one block takes, and more than it has in flight.
COLUMNS = ((3, 8), (70, 9), (420, 264), (1100, 16), (1, 300))
SHAPES: list[tuple[Sequence[int], dict[str, object]]] = [
    *((shape, {"dim": (1,)}) for shape in ROWS),
    *((shape, {"dim": (0,)}) for shape in COLUMNS),
    *((shape, {}) for shape in ((37, 129), (64, 64))),
    *((shape, {"dim": (1,)}) for shape in ((3, 5, 24), (4, 49, 5), (3, 17, 64))),
    ((6, 40), {"dim": ()}),
    *(((9, length), {"block": block}) for length, block in ((64, 64), (100, 32), (130, 128), (50, 7), (30, 64))),
]


def _cases() -> Iterator[object]:
    """Every shape in every layout, and in every dtype in some of them."""
    kinds = itertools.cycle(DTYPES)
    for (shape, how), layout in itertools.product(SHAPES, LAYOUTS):
        if layout == "transposed" and "block" in how:  # operators copy it
            continue
        name, dtype = ", ".join(f"{k}={v}" for k, v in how.items()) or "tensor", next(kinds)
        yield pytest.param(shape, how, layout, dtype, id=f"{'x'.join(map(str, shape))}-{name}-{layout}-{dtype}")


@pytest.mark.parametrize(("shape", "how", "layout", "dtype"), list(_cases()))
def test_quantize(shape: Sequence[int], how: dict[str, object], layout: str, dtype: str) -> None:
    problem = Problem(randn(*shape).to(DTYPES[dtype]), layout, **how)  # type: ignore[arg-type]
    problem.quantize_all_ways()
    problem.back(DTYPES[dtype])


def test_rows_of_16384_fit_on_chip() -> None:
    """Rows of fp32 that take 512 threads, whose warps exchange extremes in shared memory."""
    Problem(randn(2, 16384), "dense", dim=(1,)).quantize(False)


@dtypes
@pytest.mark.parametrize("shape", TOO_LONG, ids=str)
def test_rows_that_do_not_fit_on_chip(shape: Sequence[int], dtype: torch.dtype) -> None:
    Problem(randn(*shape).to(dtype), "dense", dim=(1,)).quantize(False)
    Problem(randn(*shape).to(dtype), "misaligned", dim=(1,)).quantize(True)
    Problem(randn(1, 33000).to(dtype), "dense", dim=(1,)).quantize(True, seed=4)


@dtypes
def test_a_tensor_in_several_pieces(dtype: torch.dtype) -> None:
    x = randn(100, 701).to(dtype)
    x[77, 3], x[2, 600] = 50.0, -60.0
    for layout in ("dense", "misaligned", "transposed"):
        for symmetric in (True, False):
            Problem(x, layout).quantize(symmetric)


# Of rows and columns; the grid has 192 blocks here, each taking its next with what it left behind.
@pytest.mark.parametrize(
    ("shape", "dim", "layout"),
    [
        ((230, 1100), (1,), "dense"),
        ((200, 3, 8), (1,), "dense"),
        ((200, 3, 8), (1,), "transposed"),
        ((2, 70000), (1,), "dense"),
    ],
)
def test_more_pieces_than_blocks(shape: Sequence[int], dim: Sequence[int], layout: str) -> None:
    for symmetric in (True, False):
        Problem(randn(*shape), layout, dim=dim).quantize(symmetric)


@dtypes
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0])
@pytest.mark.parametrize("dim", [None, (0,), (1,)], ids=str)
def test_a_group_without_a_scale(dim: Sequence[int] | None, value: float, dtype: torch.dtype) -> None:
    x = randn(5, 33).to(dtype)
    x[2] = value
    x[:, 7] = value
    for layout in ("dense", "transposed"):
        Problem(x, layout, dim=dim).quantize(False)
        Problem(x, layout, dim=dim).quantize(True, fake=True)
    Problem(x, "dense", dim=dim).quantize(True, seed=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [(0,), (1,)], ids=str)
def test_every_number_of_16_bits(dim: Sequence[int], dtype: torch.dtype) -> None:
    """Beside others of its size and, shuffled, beside NaN; zero points that are codes and some that are not."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    shuffled = numbers[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    for scale in (0.02, 2e-39, 0.0, math.nan):
        problem = Problem(numbers.view(dtype).view(256, 256), "dense", dim=dim)
        given = torch.full(problem.groups.scale_shape, scale)
        problem.quantize(True, scale=given)
        problem.quantize(False, scale=given, fake=True)
        for zero_point in (torch.arange(-128, 128), torch.arange(-768, 768, 6)):
            problem.quantize(False, scale=given, zero_point=zero_point.view(given.shape).int())
    for x in (numbers, shuffled):
        problem = Problem(x.view(dtype).view(256, 256), "dense", dim=dim)
        problem.quantize(True)
        problem.quantize(False, fake=True)


def test_the_largest_of_a_group_is_its_highest_code() -> None:
    largest = torch.cat([torch.logspace(-38.5, 38.5, 300), torch.arange(1, 200).int().view(torch.float32) * 2.0**12])
    x = largest.view(-1, 1) * (torch.arange(-256, 256) / 256)
    for sign, symmetric in itertools.product((1, -1), (True, False)):
        Problem(x * sign, "dense", dim=(1,)).quantize(symmetric)


@pytest.mark.parametrize("first", [0, 5, 2**34 - 6, 2**34 + 3, 2**50 + 2])
def test_random_bits_of_indices_beyond_32_bits(first: int) -> None:
    """A counter of Philox counts four elements."""
    out = cases.run("noise", "forwards", torch.tensor([first, 9]).double(), torch.empty(8).double(), block=1)
    index = first + torch.arange(8)
    words = philox(index >> 2, 9).gather(-1, (index & 3).unsqueeze(-1)).squeeze(-1)
    assert torch.equal(out.float(), (words >> 8).float() * 2.0**-24)


# ---------------------------------------------------------------------------------------------- products
def chunks(arena: Arena, x: Tensor, extra: int = 0) -> Tensor:
    """Rows in chunks of 16 bytes, with zeros behind them and then `extra` elements that are nobody's."""
    k = x.shape[1]
    zeros = F.pad(x, (0, -k % 16))
    return arena.around(zeros, (len(x), zeros.shape[1] + extra), _first(zeros))[:, :k]


PRODUCTS: dict[str, Place] = {
    "rows": chunks,
    "wide_rows": lambda arena, x: chunks(arena, x, 16),
    "one_row": lambda arena, x: chunks(arena, x[:1]).expand_as(x),  # stride 0
}
M = (1, 7, 8, 9, 16, 17, 31, 33, 64, 65, 127, 130)
N = (1, 7, 8, 9, 31, 33, 127, 130)
K = (0, 1, 7, 8, 9, 16, 31, 33, 64, 127, 130, 330)


def _products() -> Iterator[object]:
    """Every pair of layouts, and every size with sizes of all kinds, by a walk with steps prime to the counts."""
    pairs = itertools.cycle(itertools.product(PRODUCTS, PRODUCTS))
    for i in range(64):
        a, b = next(pairs)
        m, n, k = M[i * 5 % len(M)], N[(i * 3 + i // 8) % len(N)], K[(i * 7 + i // 12) % len(K)]
        yield pytest.param(m, n, k, a, b, i, id=f"{m}x{n}x{k}-{a}-{b}")


def check_product(m: int, n: int, k: int, a_layout: str, b_layout: str, variant: int) -> None:
    arena = Arena(0x5A)  # a code, so that what is read outside shows
    a, b = PRODUCTS[a_layout](arena, codes(m, k, seed=1)), PRODUCTS[b_layout](arena, codes(n, k, seed=2))
    a_zeros, b_zeros, a_one, b_one, has_bias = (variant >> i & 1 for i in range(5))
    a_scale, b_scale = randn(1 if a_one else m, seed=3).abs() + 0.01, randn(1 if b_one else n, seed=4).abs() + 0.01
    a_zero = codes(a_scale.numel(), seed=5).int() if a_zeros else None
    b_zero = codes(b_scale.numel(), seed=6).int() if b_zeros else None
    bias = randn(n, seed=7) if has_bias else None
    dtype = (torch.float32, torch.float16, torch.bfloat16, torch.int8)[variant % 4]
    final = {"out_scale": torch.tensor([40.0]), "out_zero_point": torch.tensor([9], dtype=torch.int32)}
    if dtype != torch.int8:
        final = dict.fromkeys(final)
    elif variant % 8 == 3:
        final["out_zero_point"] = None
    out = arena.place(torch.full((m, n), 99, dtype=dtype), variant % 3)
    placed = [None if t is None else arena.place(t) for t in (a_scale, a_zero, b_scale, b_zero, bias)]
    with backend.scheduled(backend.ORDERS[variant % 3], seed=variant):
        backend.int8_matmul_of_chunks(a, b, *placed, out, *final.values())
    arena.check()
    left = a.long() - (0 if a_zero is None else a_zero.view(-1, 1))
    right = b.t().long() - (0 if b_zero is None else b_zero)
    expected = (left @ right).float() * (a_scale.view(-1, 1) * b_scale)
    expected = expected if bias is None else expected + bias
    if dtype == torch.int8:
        expected = reference.quantize_int8(expected, scale=final["out_scale"], zero_point=final["out_zero_point"])[0]
    expected = expected.to(dtype)
    assert differing(out.float(), expected.float()) == 0


@pytest.mark.parametrize(("m", "n", "k", "a", "b", "variant"), list(_products()))
def test_matmul(m: int, n: int, k: int, a: str, b: str, variant: int) -> None:
    check_product(m, n, k, a, b, variant)


@pytest.mark.parametrize("k", [0, 1, 16, 48, 63, 64, 129, 528, 2064])
@pytest.mark.parametrize("m", [1, 5, 16, 17, 32, 33, 47, 64])
def test_matmul_of_few_rows(m: int, k: int) -> None:
    check_product(m, 37, k, "wide_rows", "rows", k + m)
    check_product(m, 16, k, "wide_rows", "rows", k + m + 3)


def test_matmul_of_few_rows_in_tiles_that_keep_all_multiprocessors_busy() -> None:
    for variant in range(4):
        check_product(33, 130, 80, "wide_rows", "rows", variant)


@pytest.mark.parametrize("k", [0, 16, 65, 192, 321])
def test_matmul_of_large_tiles(k: int) -> None:
    check_product(130, 259, k, "wide_rows", "rows", 4 + k)
    check_product(257, 252, k, "wide_rows", "rows", 3 + k)
    check_product(257, 201, k, "wide_rows", "rows", 6 + k)
    for capability in (75, 90):
        with backend.compute_capability(capability, compiled_for=75):
            check_product(257, 130, k, "wide_rows", "rows", 5 + k)


@pytest.mark.parametrize("m", [2, 17])
def test_matmul_beyond_32_bits(m: int) -> None:
    k = 66000
    a, b = torch.full((m, k), -128, dtype=torch.int8), torch.full((1, k), -128, dtype=torch.int8).t()
    one, zero = torch.ones(1), torch.tensor([127], dtype=torch.int32)
    out = torch.empty(m, 1)
    backend._int8_matmul_(a, b, one, zero, one, zero, None, out, None, None)
    assert torch.equal(out, torch.full_like(out, 255.0**2 * k))


# ---------------------------------------------------------------------------------------- convolutions
TILES = CONVOLUTIONS["many_tiles"]
CONVOLVED = {
    **{name: conv for name, conv in CONVOLUTIONS.items() if conv.batch > 0 and conv.outputs > 0},
    # 64 bytes along k hold four lines of this kernel.
    "tall_kernel": CONVOLUTIONS["3x3"]._replace(taps=(5, 1), padding=(2, 0)),
    "images_in_one_tile": CONVOLUTIONS["3x3"]._replace(batch=5, pixels=(3, 3)),
    # The others take tiles of 64 x 64. These take tiles of 128 x 128 and of 128 x 256, on 3 multiprocessors.
    **{f"{channels}_channels_in_medium_tiles": TILES._replace(channels=channels) for channels in (48, 64, 144)},
    **{
        f"{channels}_channels_in_large_tiles": TILES._replace(
            batch=1, pixels=(25, 13), channels=channels, taps=(3, 3), stride=(2, 1), padding=(1, 1)
        )
        for channels in (16, 48, 64, 144)
    },
}


def check_convolution(conv: Any, variant: int) -> None:
    """There are guards of the size of an image before the first image and behind the last one."""
    arena = Arena(0x5A)  # a code, so that what is read outside shows
    x, weight = codes(conv.batch, *conv.pixels, conv.channels, seed=1), codes(conv.outputs, *conv.taps, conv.channels)
    placed = []
    for values in (x, weight):
        padded = F.pad(values, (0, -conv.channels % 16))
        placed.append(arena.around(padded, (len(padded) + 2, *padded.shape[1:]), slice(1, -1)))
    has_zeros, per_image, has_bias, per_output = (variant >> i & 1 for i in range(4))
    scale = randn(conv.batch if per_image else 1, seed=3).abs() + 0.01
    zero = codes(scale.numel(), seed=5).int() * 2 if has_zeros else None  # some are no codes
    weight_scale = randn(conv.outputs if per_output else 1, seed=4).abs() + 0.01
    bias = randn(conv.outputs, seed=7) if has_bias else None
    dtype = (torch.float32, torch.float16, torch.bfloat16, torch.int8)[variant // 2 % 4]
    final = {"out_scale": None, "out_zero_point": None}
    if dtype == torch.int8:
        final = {"out_scale": torch.tensor([40.0]), "out_zero_point": torch.tensor([9], dtype=torch.int32)}
    steps = {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}
    out_dtype = torch.float32 if dtype == torch.int8 else dtype
    expected = reference.int8_conv2d(
        x, weight, scale, zero, weight_scale, bias=bias, **steps, out_dtype=out_dtype, **final
    )
    pixels = expected.shape[1] * expected.shape[2] if per_image and conv.batch > 1 else 1
    rows = [None if t is None else arena.place(t.repeat_interleave(pixels)) for t in (scale, zero)]
    columns = [None if t is None else arena.place(t) for t in (weight_scale, bias)]
    out = arena.place(torch.full(expected.shape, 99, dtype=dtype), variant % 3)
    with backend.scheduled(backend.ORDERS[variant % 3], seed=variant):
        backend.int8_conv2d_of_chunks(*placed, *rows, *columns, *steps.values(), out, *final.values())
    arena.check()
    assert differing(out.float(), expected.float()) == 0


@pytest.mark.parametrize("name", CONVOLVED)
def test_conv2d(name: str) -> None:
    first = list(CONVOLVED).index(name)
    for variant in (first, first + 7, first + 11):  # of all three orders
        check_convolution(CONVOLVED[name], variant)


def test_conv2d_in_tiles_of_sm_75() -> None:
    with backend.compute_capability(75):
        check_convolution(CONVOLVED["64_channels_in_large_tiles"], 7)


def test_conv2d_of_sums_beyond_32_bits() -> None:
    x = torch.full((1, 1, 8191, 16), -128, dtype=torch.int8)
    one, zero, out = torch.ones(1), torch.tensor([127], dtype=torch.int32), torch.empty(1, 1, 1, 1)
    backend._int8_conv2d_(x, x, one, zero, one, None, (1, 1), (0, 0), (1, 1), out, None, None)
    assert out.item() == 255.0 * 128 * x.numel()


def test_conv2d_of_more_than_4_gib() -> None:
    """Of which a few pages are touched."""
    step = 2**28  # pixels of 16 bytes
    memory = mmap.mmap(-1, 16 * (step + 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    x = torch.frombuffer(memory, dtype=torch.int8).view(1, 1, -1, 16)
    x[0, 0, 0], x[0, 0, step] = 1, 2
    weight, one, out = torch.ones(1, 1, 1, 16, dtype=torch.int8), torch.ones(1), torch.empty(1, 1, 2, 1)
    backend.int8_conv2d_of_chunks(x, weight, one, None, one, None, (1, step), (0, 0), (1, 1), out, None, None)
    assert out.flatten().tolist() == [16, 32]
    images = x[:, :, :step].view(2, 1, -1, 16)  # the second one begins 2 GiB after the first
    x[0, 0, step // 2] = 3
    out = torch.empty(2, 1, 1, 1)
    backend.int8_conv2d_of_chunks(images, weight, one, None, one, None, (1, step), (0, 0), (1, 1), out, None, None)
    assert out.flatten().tolist() == [16, 48]


def far(distance: int, stride: int, kernel: int, outputs: int) -> Tensor:
    """A convolution along a line of two pixels, with so much padding, and with taps that are as far apart."""
    x = torch.tensor([1, 2], dtype=torch.int8).view(1, 2, 1, 1)
    weight = torch.ones(1, kernel, 1, 1, dtype=torch.int8)
    one, out = torch.ones(1), torch.empty(1, outputs, 1, 1)
    steps = (stride, 1), (distance, 0), (distance, 1)
    backend._int8_conv2d_(x, weight, one, None, one, None, *steps, out, None, None)
    return out.flatten()


def test_conv2d_of_pixels_that_are_far_apart() -> None:
    """Coordinates have 32 bits."""
    assert far(2**31, 2**31, 1, 3).tolist() == [0, 1, 0]
    assert far(2**31, 2**31 + 1, 1, 2).tolist() == [0, 2]
    assert far(2**31, 2**32, 2, 1).tolist() == [1]
    assert far(2**32 - 3, 2**32 - 3, 1, 3).tolist() == [0, 1, 0]
    with pytest.raises(RuntimeError, match=r"fewer than 2\^32 pixels.* got 4294967296"):
        far(2**32 - 2, 2**32 - 2, 1, 3)


# ---------------------------------------------------------------------------------------- int8 weights
def check_linear(m: int, n: int, k: int, dtype: torch.dtype, variant: int) -> None:
    arena = Arena(Arena.NAN)
    x = chunks(arena, randn(m, k, seed=1).to(dtype), (0, 8)[variant % 2])
    weight = chunks(arena, codes(n, k, seed=2), (0, 16, 0)[variant % 3])
    scale = arena.place(randn(1 if variant % 2 else n, seed=3).abs() + 0.01)
    bias = arena.place(randn(n, seed=4).to(dtype)) if variant % 4 < 2 else None
    out = arena.place(torch.full((m, n), 99, dtype=dtype), variant % 5)
    with backend.scheduled(backend.ORDERS[variant % 3], seed=variant):
        backend.int8_linear_of_chunks(x, weight, scale, bias, out)
    arena.check()
    truth = (x.double() @ weight.double().T) * scale.double() + (0 if bias is None else bias.double())
    # The order of torch's sum depends on the CPU, and with it torch's error on so few elements: two orders.
    backwards = reference.int8_linear(x.flip(1), weight.flip(1), scale, bias)
    allowed = [
        error_and_allowed(out, theirs, truth)[1]
        for theirs in (reference.int8_linear(x, weight, scale, bias), backwards)
    ]
    error = error_and_allowed(out, backwards, truth)[0]
    assert error <= max(allowed)


@low
@pytest.mark.parametrize("k", [0, 1, 16, 33, 64, 80, 272])
def test_linear(k: int, dtype: torch.dtype) -> None:
    sizes = itertools.product((1, 4, 8, 9, 16, 17, 65), (1, 8, 33))
    for variant, (m, n) in enumerate(sizes):
        check_linear(m, n, k, dtype, variant + k)


@low
def test_linear_of_several_tiles(dtype: torch.dtype) -> None:
    for variant in (0, 1, 6):
        check_linear(140, 150, 160, dtype, variant)
        check_linear(66, 131, 336, dtype, variant)


@low
@pytest.mark.parametrize("m", [9, 17, 31, 32, 33, 47, 64])
def test_linear_of_few_rows(m: int, dtype: torch.dtype) -> None:
    for variant, (n, k) in enumerate(((33, 16), (64, 48), (128, 1040), (130, 48))):
        check_linear(m, n, k, dtype, variant)


@low
@pytest.mark.parametrize("m", [16, 64, 96, 256])
@pytest.mark.parametrize("k", [256, 257])
def test_linear_has_every_code_exactly(k: int, m: int, dtype: torch.dtype) -> None:
    x, weight = torch.eye(m, k, dtype=dtype), torch.arange(-128, 128).repeat(300)[: 257 * k].view(257, k).char()
    out = torch.empty(m, 257, dtype=dtype)
    backend._int8_linear_(x, weight, torch.ones(1), None, out)
    assert torch.equal(out, weight.t()[:m].to(dtype))


def test_linear_does_not_overflow_inside() -> None:
    x, weight = torch.full((20, 64), 1000.0).half(), torch.full((8, 64), 127, dtype=torch.int8)
    out = torch.empty(20, 8, dtype=torch.float16)
    backend._int8_linear_(x, weight, torch.tensor([2.0**-10]), None, out)
    assert torch.equal(out, torch.full_like(out, 1000 * 127 * 64 * 2.0**-10))
