"""Test cases for the int8 operators.

The results of all operators except `int8_linear` are compared bit for bit with the reference on the CPU.
tests/int8/test_int8.py compares the reference with numpy and with known answers. `int8_linear` sums in fp32, so its
results are compared by the rule of `error_and_allowed` (testing/common.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..functional import Int8Tensor, dequantize_int8, fake_quantize_int8, int8_conv2d, int8_matmul, quantize_int8
from .common import (
    DTYPES,
    LAYOUTS,
    SHAPE,
    Case,
    Result,
    by_operator,
    exact,
    generator,
    place,
    randn,
    same_kind,
    surrounded,
    unchanged,
    within,
)

# Arguments of `quantize_int8` that say which elements of a 4-dimensional input share a scale.
GROUPS: dict[str, dict[str, Any]] = {
    "tensor": {},
    "rows": {"dim": -1},
    "columns": {"dim": 0},
    "channels": {"dim": (0, 2, 3)},
    "middle": {"dim": 2},
    "interlocked": {"dim": (0, 2)},
    "all_but_last": {"dim": (0, 1, 2)},
    "nothing_named": {"dim": ()},
    "blocks": {"block_size": 4},
    "long_blocks": {"block_size": 64},
}
KINDS: dict[str, dict[str, Any]] = {"symmetric": {"symmetric": True}, "asymmetric": {"symmetric": False}}
# Zero points that are not codes (-128 to 127). A user may give them, because zero points are not checked. The formulas
# limit x / scale to the range from -512 to 512. Then they add the zero point, and clamp the sum to the codes. With the
# zero point 384, the lower limit becomes 384 - 512 = -128, the least code. With -385, the upper limit becomes
# -385 + 512 = 127, the largest code. With a zero point above 384 or below -385, a limit becomes the wrong code.
NO_CODES = (-2_000_000_000, -600, -385, 300, 384, 65_536)
# Bytes of the longest row that held_rows_kernel (csrc/cuda/int8_quantize.cu) takes. For a row of this length, a thread
# block of the kernel reads the row once, and holds it in registers until the codes are stored.
ON_CHIP = 1 << 16
# Lengths of rows: 1 to 5, and lengths around 8, 16, 32, 64, 128, 1024 and 4096. CPU kernels read segments of at most
# 1024 elements (csrc/cpu/int8_walk.h).
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 128, 129, 1023, 1025, 4099)


def _rows_of(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).repeat(3, 1) * torch.tensor([[1.0], [-1.0], [0.5]]).double()


def _scaled(exponent: float) -> Callable[[torch.dtype], Tensor]:
    return lambda _: randn(5, 37).double() * 10.0**exponent


def _with(value: float) -> Callable[[torch.dtype], Tensor]:
    def make(_: torch.dtype) -> Tensor:
        x = randn(5, 37).double()
        x[0, 0] = x[2, 36] = x[3, 17] = value
        return x

    return make


# Each function takes a dtype, and returns rows of numbers for which arithmetic in that dtype may go wrong. The numbers
# are fp32 or fp64. `_rounded` below rounds them to the dtype.
VALUES: dict[str, Callable[[torch.dtype], Tensor]] = {
    "nan": _with(math.nan),
    "inf": _with(math.inf),
    "minus_inf": _with(-math.inf),
    "inf_and_nan": lambda dtype: torch.where(_with(math.nan)(dtype).isnan(), math.nan, _with(math.inf)(dtype).roll(1)),
    "negative_zeros": lambda _: -torch.zeros(3, 37, dtype=torch.float64),
    "zero_rows": lambda _: randn(5, 37).double() * torch.tensor([[1.0], [0.0], [1.0], [0.0], [0.0]]),
    "constant": lambda _: torch.full((3, 37), 0.1, dtype=torch.float64),
    "negative_constant": lambda _: torch.full((3, 37), -0.1, dtype=torch.float64),
    "all_negative": lambda _: -randn(5, 37).double().abs() - 1,
    "all_positive": lambda _: randn(5, 37).double().abs() + 1,
    "denormals": lambda dtype: (torch.arange(5 * 37).view(5, 37) % 7 - 3) * (torch.finfo(dtype).smallest_normal / 4),
    "tiniest": lambda dtype: (torch.arange(5 * 37).view(5, 37) % 3 - 1) * torch.finfo(dtype).tiny / 2**10,
    # If no magnitude in a symmetric group is above 2^-128 * 127, then 1 / scale of this group is inf.
    "around_the_smallest_scale": lambda _: 2.0 ** torch.linspace(-124, -119, 5 * 37).double().view(5, 37),
    "largest": lambda dtype: (1.0 - 2.0 * (torch.arange(5 * 37).view(5, 37) % 2)) * torch.finfo(dtype).max,
    "one_largest": lambda dtype: (torch.arange(5 * 37).view(5, 37) == 50) * torch.finfo(dtype).max,
    "ties": lambda _: _rows_of([127.0, *(k + 0.5 for k in range(-64, 64)), 0.0, -127.0]),
    "large": _scaled(4),
    "small": _scaled(-4),
}


def _rounded(values: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> Tensor:
    return values(dtype).to(dtype)


class _Made(NamedTuple):
    values: Tensor
    scale: Tensor
    zero_point: Tensor | None


def _compare_codes(name: str, ours: Int8Tensor, expected: _Made) -> Iterator[Result]:
    yield exact(f"{name} values", ours.values, expected.values)
    yield exact(f"{name} scale", ours.scale, expected.scale)
    if (ours.zero_point is None) != (expected.zero_point is None):
        yield Result(f"{name} has a zero point", 1, 0)
    elif ours.zero_point is not None and expected.zero_point is not None:
        yield exact(f"{name} zero_point", ours.zero_point, expected.zero_point)


def _dims(options: dict[str, Any]) -> dict[str, Any]:
    dim = options.get("dim")
    return {**options, "dim": (dim,) if isinstance(dim, int) else dim}


def _named(options: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in options.items())


def _moved(arguments: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}


Make = Callable[[], Tensor]


def _rounding(seed: int | None) -> Literal["nearest", "stochastic"]:
    return "nearest" if seed is None else "stochastic"


def _quantize(make: Make, layout: str, all_options: Sequence[dict[str, Any]], device: torch.device) -> Iterator[Result]:
    x = make()
    laid_out = place([x], device, layout)[0]
    before = laid_out.clone()
    for options in all_options:
        name = _named(options)
        expected = _Made(*reference.quantize_int8(x, **_dims(options)))
        ours = quantize_int8(laid_out, rounding=_rounding(options.get("seed")), **options)
        yield from _compare_codes(name, ours, expected)
        yield same_kind(f"{name} shape of x", ours.values, x.shape, torch.int8)
    yield unchanged("x written", [before], [laid_out])


def _static(
    make: Make, scales: Callable[[Tensor], Tensor], zero_point: int | None, block: int | None, seed: int | None,
    device: torch.device,
) -> Iterator[Result]:  # fmt: skip
    x = make()
    scale = scales(x)
    zero = None if zero_point is None else torch.full_like(scale, zero_point, dtype=torch.int32)
    given: dict[str, Any] = {"block_size": block, "seed": seed, "scale": scale, "zero_point": zero}
    expected = _Made(*reference.quantize_int8(x, **given))
    ours = quantize_int8(x.to(device), rounding=_rounding(seed), **_moved(given, device))
    yield from _compare_codes("static", ours, expected)


def _dequantize(
    dtype: torch.dtype, layout: str, all_options: Sequence[dict[str, Any]], device: torch.device
) -> Iterator[Result]:
    for options in all_options:
        name = _named(options)
        made = _Made(*reference.quantize_int8(randn(*SHAPE), **_dims(options)))
        block = options.get("block_size")
        # Scales at the limits: NaN is the scale of a group that held NaN. 3e38 is nearly the largest number of fp32.
        # 1e-45 is rounded to the smallest positive number of fp32.
        made.scale.view(-1)[:3] = torch.tensor([math.nan, 3e38, 1e-45])[: made.scale.numel()]
        expected = reference.dequantize_int8(*made, block_size=block, dtype=dtype)
        values = INT8_LAYOUTS[layout](made.values.to(device))
        zero_point = None if made.zero_point is None else made.zero_point.to(device)
        q = Int8Tensor(values, made.scale.to(device), zero_point, block_size=block)
        yield exact(name, dequantize_int8(q, dtype), expected)


def _fake(make: Make, layout: str, all_options: Sequence[dict[str, Any]], device: torch.device) -> Iterator[Result]:
    x = make()
    laid_out = place([x], device, layout)[0]
    for options in all_options:
        name = _named(options)
        expected, scale, zero = reference.fake_quantize_int8(x, **_dims(options))
        leaf = laid_out.detach().requires_grad_()
        ours = fake_quantize_int8(leaf, **options)
        yield exact(name, ours, expected)
        block = options.get("block_size")
        for factor in (1.0, 0.5):  # with 1.0 all codes are in range, with 0.5 many are not
            given = (scale * factor).to(device)
            given_zero = None if zero is None else zero.to(device)
            static = fake_quantize_int8(leaf, block_size=block, scale=given, zero_point=given_zero)
            truth = reference.fake_quantize_int8(x, block_size=block, scale=scale * factor, zero_point=zero)[0]
            yield exact(f"{name} static", static, truth)
            grad = randn(*x.shape, dtype=x.dtype, seed=1)
            (ours_grad,) = torch.autograd.grad(static, leaf, grad.to(device))
            straight = reference.straight_through_int8(grad, x, scale * factor, zero, block_size=block)
            yield exact(f"{name} gradient", ours_grad, straight)


def _fake_given(dtype: torch.dtype, zero_point: int, device: torch.device) -> Iterator[Result]:
    # The formulas limit x / scale to the range from -512 to 512. Here some values of x / scale lie below this range,
    # and some lie above it.
    x = torch.cat([400 * randn(5, 37), torch.tensor([[math.inf, -math.inf, math.nan, 512.0, -513.0]]).T], 1).to(dtype)
    grad = randn(*x.shape, dtype=dtype, seed=1)
    for shape in ((5, 1), (1, 38)):
        scale = torch.ones(shape)
        scale[-1, -1] = math.inf
        zero = torch.full(shape, zero_point, dtype=torch.int32)
        leaf = x.to(device).requires_grad_()
        ours = fake_quantize_int8(leaf, scale=scale.to(device), zero_point=zero.to(device))
        expected = reference.fake_quantize_int8(x, scale=scale, zero_point=zero)[0]
        yield exact(f"{shape}", ours, expected)
        (ours_grad,) = torch.autograd.grad(ours, leaf, grad.to(device))
        straight = reference.straight_through_int8(grad, x, scale, zero)
        yield exact(f"{shape} gradient", ours_grad, straight)


# ------------------------------------------------------------------------------------------------------- products
SHAPES = (
    (1, 1, 1), (1, 5, 0), (1, 64, 64), (1, 127, 1023), (3, 2, 7), (8, 8, 8), (16, 16, 16), (17, 33, 65), (63, 65, 31),
    (64, 64, 64), (128, 96, 130), (130, 129, 127), (257, 7, 9), (5, 257, 96), (2, 1000, 5),
)  # fmt: skip
INT8_LAYOUTS = {name: LAYOUTS[name] for name in ("contiguous", "transposed", "sliced", "every_other", "misaligned")}


# NCHW: the codes of an image as torch stores it by default.
CONV_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": LAYOUTS["contiguous"],
    "nchw": lambda x: x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
    "sliced": LAYOUTS["sliced"],
    "cropped": lambda x: surrounded(
        x, (x.shape[0], x.shape[1] + 2, x.shape[2] + 3, x.shape[3]), (slice(None), slice(1, -1), slice(2, -1))
    ),
    "misaligned": LAYOUTS["misaligned"],
}


def integers(*shape: int, seed: int = 0) -> Tensor:
    """Return random codes from -128 to 127."""
    return torch.randint(-128, 128, shape, generator=generator(seed), dtype=torch.int8)


def _operand(rows: int, columns: int, per: int | None, zeros: bool, seed: int) -> _Made:
    """Return codes `[rows, columns]` with scales.

    If `per` is None, there is one scale. Otherwise there is a scale for each index of dimension `per`.
    """
    count = 1 if per is None else (rows, columns)[per]
    shape = (1, 1) if per is None else (count, 1) if per == 0 else (1, count)
    scale = (randn(count, seed=seed).abs() + 0.01).view(shape)
    zero = integers(count, seed=seed + 1).to(torch.int32).view(shape) if zeros else None
    return _Made(integers(rows, columns, seed=seed + 2), scale, zero)


def _out(dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of an operator for a result of this dtype."""
    if dtype is not torch.int8:
        return {"out_dtype": dtype}
    zero_point = torch.tensor(-7, dtype=torch.int32)
    return {"out_dtype": torch.float32, "out_scale": torch.tensor(30.0), "out_zero_point": zero_point}


def _product(
    sizes: tuple[int, int, int], layouts: tuple[str, str], per: bool, zeros: tuple[bool, bool], out: torch.dtype,
    extreme: bool, device: torch.device,
) -> Iterator[Result]:  # fmt: skip
    m, n, k = sizes
    a = _operand(m, k, 0 if per else None, zeros[0], 10)
    b = _operand(k, n, 1 if per else None, zeros[1], 20)
    if extreme:  # the largest sums that int32 holds
        a, b = (made._replace(values=torch.full_like(made.values, -128)) for made in (a, b))
    on_device = [
        Int8Tensor(INT8_LAYOUTS[layout](v.to(device)), s.to(device), None if z is None else z.to(device))
        for layout, (v, s, z) in zip(layouts, (a, b), strict=True)
    ]
    for bias in (None, randn(n, seed=30)):
        final = {"bias": bias, **_out(out)}
        expected = reference.int8_matmul(a.values, b.values, *a[1:], *b[1:], **final)
        ours = int8_matmul(*on_device, **_moved(final, device))
        yield exact(f"bias {bias is not None}", ours, expected)


class _Conv(NamedTuple):
    """The sizes of a convolution. Pairs are for height and width."""

    batch: int
    pixels: tuple[int, int]
    channels: int
    outputs: int
    taps: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)


CONVOLUTIONS: dict[str, _Conv] = {
    "3x3": _Conv(2, (9, 7), 16, 33, (3, 3), padding=(1, 1)),
    "odd_channels": _Conv(2, (6, 5), 5, 7, (3, 3), padding=(1, 1)),
    "many_channels": _Conv(1, (5, 4), 80, 20, (3, 3), padding=(1, 1)),  # a tap is longer than a tile of 64 codes
    "strided": _Conv(2, (9, 8), 16, 20, (3, 3), (2, 2), (1, 1)),
    "dilated": _Conv(2, (9, 10), 16, 20, (3, 3), padding=(2, 1), dilation=(2, 3)),
    "all_different": _Conv(3, (10, 11), 8, 20, (3, 2), (2, 3), (0, 2), (3, 2)),
    "stem": _Conv(1, (17, 17), 3, 16, (7, 7), (2, 2), (3, 3)),
    "padding_above_kernel": _Conv(2, (3, 4), 6, 5, (2, 2), padding=(5, 3)),
    "one_pixel": _Conv(3, (1, 1), 16, 9, (3, 3), padding=(1, 1)),
    "one_element": _Conv(1, (1, 1), 1, 1, (1, 1)),
    "line": _Conv(2, (1, 30), 12, 10, (1, 5), padding=(0, 2)),
    "plain_product": _Conv(2, (6, 5), 20, 40, (1, 1)),
    "1x1_strided": _Conv(2, (6, 5), 20, 40, (1, 1), (2, 2)),
    "1x1_padded": _Conv(2, (6, 5), 20, 40, (1, 1), padding=(1, 0)),
    "few_pixels": _Conv(1, (2, 3), 48, 40, (2, 2)),
    "whole_image": _Conv(2, (4, 4), 16, 10, (4, 4)),
    "no_images": _Conv(0, (5, 5), 3, 4, (3, 3)),
    "no_outputs": _Conv(2, (5, 5), 3, 0, (3, 3)),
    # With 3 multiprocessors, the CUDA kernel computes these in tiles of 128 x 64, 128 x 128 and 128 x 256.
    "narrow_tiles": _Conv(2, (16, 17), 16, 50, (2, 2)),
    "many_tiles": _Conv(2, (16, 17), 16, 130, (2, 2)),
    "large_tiles": _Conv(1, (12, 12), 16, 130, (3, 3), padding=(1, 1)),
}


def _convolution(
    conv: _Conv, layout: str, per: bool, zeros: bool, out: torch.dtype, change: str, device: torch.device
) -> Iterator[Result]:
    shape = (conv.batch, *conv.pixels, conv.channels)
    x, weight = integers(*shape, seed=1), integers(conv.outputs, *conv.taps, conv.channels, seed=2)
    sizes = (conv.batch, 1, 1, 1) if per else (1,)
    scale, zero = randn(*sizes, seed=3).abs() + 0.01, integers(*sizes, seed=4).to(torch.int32) if zeros else None
    weight_scale = randn(*((conv.outputs, 1, 1, 1) if per else (1,)), seed=5).abs() + 0.01
    if change == "extremes":
        x, weight = torch.full_like(x, -128), torch.full_like(weight, -128)
        zero = torch.full(sizes, 127, dtype=torch.int32)
    elif change == "nan":
        scale.view(-1)[0] = math.nan
    elif change == "no_code":
        zero = torch.full(sizes, 300, dtype=torch.int32)
        zero.view(-1)[-1] = -385
    q = Int8Tensor(CONV_LAYOUTS[layout](x.to(device)), scale.to(device), None if zero is None else zero.to(device))
    kernel = Int8Tensor(CONV_LAYOUTS[layout](weight.to(device)), weight_scale.to(device))
    steps: dict[str, Any] = {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}
    for bias in (None, randn(conv.outputs, seed=6)):
        final = {"bias": bias, **steps, **_out(out)}
        expected = reference.int8_conv2d(x, weight, scale, zero, weight_scale, **final)
        ours = int8_conv2d(q, kernel, **_moved(final, device))
        yield exact(f"bias {bias is not None}", ours, expected)
        yield same_kind("kind", ours, expected.shape, expected.dtype)


def _linear(sizes: tuple[int, int, int], dtype: torch.dtype, scales: int, device: torch.device) -> Iterator[Result]:
    m, n, k = sizes
    x, weight = randn(m, k, dtype=dtype, seed=1), integers(n, k, seed=2)
    scale = randn(n if scales else 1, seed=3).abs() + 0.01
    for bias in (None, randn(n, dtype=dtype, seed=4)):
        truth = (x.double() @ weight.double().T) * scale.double() + (0 if bias is None else bias.double())
        theirs = torch.nn.functional.linear(x.float(), weight.float() * scale.view(-1, 1)).add(
            0 if bias is None else bias.float()
        )
        bias_here = None if bias is None else bias.to(device)
        ours = torch.ops.amp_kernels.int8_linear(x.to(device), weight.to(device), scale.to(device), bias_here)
        yield within(f"bias {bias is not None}", ours.cpu(), theirs.to(dtype), truth)
        yield same_kind("dtype", ours, truth.shape, dtype)


# ---------------------------------------------------------------------------------------------------------- cases
def _all(*fixed: dict[str, Any]) -> list[dict[str, Any]]:
    """Return options for each grouping in `GROUPS`, once symmetric and once asymmetric.

    If `fixed` is given, each of these options is combined with each dict in `fixed`.
    """
    return [
        {**groups, **kind, **rest} for groups in GROUPS.values() for kind in KINDS.values() for rest in fixed or ({},)
    ]


_BLOCKS: dict[str, Any] = {"block_size": 8}
_BY_ROW: list[dict[str, Any]] = [{"dim": -1, **kind} for kind in KINDS.values()] + [
    {"dim": 0, **kind} for kind in KINDS.values()
]


def _quantize_cases() -> Iterator[Case]:
    def case(dtype: str, name: str, make: Make, layout: str, options: Sequence[dict[str, Any]]) -> Case:
        return Case("quantize_int8", dtype, name, partial(_quantize, make, layout, options))

    for dtype_name, dtype in DTYPES.items():
        shaped = partial(randn, *SHAPE, dtype=dtype)
        for layout in LAYOUTS:
            yield case(dtype_name, layout, shaped, layout, _all())
        seeds = ({"seed": 1}, {"seed": -(2**63)}, {"seed": 2**40 + 12345})
        yield case(dtype_name, "stochastic", shaped, "contiguous", _all(*seeds))
        yield case(dtype_name, "stochastic_channels_last", shaped, "channels_last", _all({"seed": 7}))
        for kind, values in VALUES.items():
            options = [*_BY_ROW, *KINDS.values(), _BLOCKS]
            yield case(dtype_name, kind, partial(_rounded, values, dtype), "contiguous", options)
        for length in ROWS:
            yield case(dtype_name, f"rows_of_{length}", partial(randn, 5, length, dtype=dtype), "contiguous", _BY_ROW)
        for length in (ON_CHIP // dtype.itemsize, ON_CHIP // dtype.itemsize + 1):
            longest = partial(randn, 2, length, dtype=dtype)
            yield case(dtype_name, f"rows_of_{length}", longest, "contiguous", _BY_ROW[:2])
        long = partial(randn, 2, 70001, dtype=dtype)
        options = [*_BY_ROW, *KINDS.values(), _BLOCKS, {"block_size": 70000}]
        yield case(dtype_name, "long_rows", long, "contiguous", options)
        yield case(dtype_name, "many_rows", partial(randn, 3001, 20, dtype=dtype), "contiguous", _BY_ROW)
        for shape in ((0,), (0, 5), (5, 0), (2, 0, 3)):
            empty = partial(torch.empty, shape, dtype=dtype)
            options = [*_BY_ROW[:2], {}, {"block_size": 4}]
            yield case(dtype_name, f"empty_{'x'.join(map(str, shape))}", empty, "contiguous", options)
        for first, last in ((0, 2), (2, 0)):  # both are contiguous and channels_last at once
            empty = partial(torch.empty, (first, 2, 2, last), dtype=dtype)
            options = [*_all(), *_all({"seed": 1})]
            yield case(dtype_name, f"empty_{first}x2x2x{last}", empty, "channels_last", options)
        yield case(dtype_name, "scalar", partial(randn, dtype=dtype), "contiguous", list(KINDS.values()))


def _static_cases() -> Iterator[Case]:
    def per_row(x: Tensor) -> Tensor:
        scale = x.float().nan_to_num(1, 1, 1).abs().amax(-1, keepdim=True).clamp(1e-3, 1e3) / 100
        scale[0] = 0.0  # 1 / scale is inf, so all numbers except 0 and NaN saturate
        scale[-1] = math.inf
        return scale

    for dtype_name, dtype in DTYPES.items():
        for kind in ("nan", "inf", "ties", "largest", "denormals", "large"):
            for zero_point in (None, -128, 5):
                body = partial(_static, partial(_rounded, VALUES[kind], dtype), per_row, zero_point, None, None)
                yield Case("quantize_int8", dtype_name, f"static_{kind}_{zero_point}", body)
        for zero_point in NO_CODES:
            body = partial(_static, partial(_rounded, VALUES["large"], dtype), per_row, zero_point, None, None)
            yield Case("quantize_int8", dtype_name, f"static_large_{zero_point}", body)
        x = partial(randn, 33, 70, dtype=dtype)
        for name, scales, block in (
            ("tensor", lambda _: torch.tensor(0.02), None),
            ("columns", lambda _: randn(1, 70, seed=3).abs() + 0.01, None),
            ("blocks", lambda _: randn(33, 5, seed=3).abs() + 0.01, 16),
        ):
            for seed in (None, 11):
                body = partial(_static, x, scales, 3, block, seed)
                yield Case("quantize_int8", dtype_name, f"static_{name}_seed_{seed}", body)


def _other_cases() -> Iterator[Case]:
    for dtype_name, dtype in DTYPES.items():
        for layout in INT8_LAYOUTS:
            yield Case("dequantize_int8", dtype_name, layout, partial(_dequantize, dtype, layout, _all()))
        for layout in LAYOUTS:
            shaped = partial(randn, *SHAPE, dtype=dtype)
            yield Case("fake_quantize_int8", dtype_name, layout, partial(_fake, shaped, layout, _all()))
        for kind in ("nan", "inf", "zero_rows", "denormals", "largest", "all_negative", "ties"):
            body = partial(_fake, partial(_rounded, VALUES[kind], dtype), "contiguous", [*_BY_ROW, *KINDS.values()])
            yield Case("fake_quantize_int8", dtype_name, kind, body)
        for zero_point in NO_CODES:
            body = partial(_fake_given, dtype, zero_point)
            yield Case("fake_quantize_int8", dtype_name, f"zero_point_{zero_point}", body)
        for sizes in SHAPES:
            name = "x".join(map(str, sizes))
            both = ("contiguous", "contiguous")
            product = partial(_product, sizes, both, True, (True, True), dtype, False)
            yield Case("int8_matmul", dtype_name, name, product)
            if sizes[2] > 0:
                yield Case("int8_linear", dtype_name, name, partial(_linear, sizes, dtype, 1))
        yield Case("int8_linear", dtype_name, "one_scale", partial(_linear, (5, 33, 70), dtype, 0))
    for sizes in ((17, 33, 65), (1, 130, 127), (70, 66, 64)):
        name = "x".join(map(str, sizes))
        for left in INT8_LAYOUTS:
            for right in INT8_LAYOUTS:
                body = partial(_product, sizes, (left, right), True, (True, False), torch.float32, False)
                yield Case("int8_matmul", "fp32", f"{name}_{left}_{right}", body)
        for right in ("contiguous", "sliced"):  # `a` is contiguous along k, `b` is not, and there are no zero points
            body = partial(_product, sizes, ("contiguous", right), True, (False, False), torch.float32, False)
            yield Case("int8_matmul", "fp32", f"{name}_{right}_without_zeros", body)
        both = ("contiguous", "transposed")
        for zeros in ((False, False), (True, False), (False, True)):
            for per in (True, False):
                body = partial(_product, sizes, both, per, zeros, torch.float32, False)
                yield Case("int8_matmul", "fp32", f"{name}_zeros_{zeros}_per_row_{per}", body)
        yield Case("int8_matmul", "int8", name, partial(_product, sizes, both, True, (True, True), torch.int8, False))
    # If the environment variable AMP_KERNELS_MULTIPROCESSORS is 3, the CUDA kernels count 3 multiprocessors on any GPU
    # (csrc/cuda/portable.h). They then compute the "narrow" sizes in tiles of 128 x 64, the "medium" sizes in tiles of
    # 128 x 128, and the "large" sizes in tiles of 128 x 256.
    for tile, sizes in (("narrow", (300, 50, 96)), ("medium", (300, 100, 96)), ("large", (130, 130, 96))):
        for with_zeros in (False, True):
            body = partial(_product, sizes, ("contiguous", "transposed"), True, (with_zeros,) * 2, torch.float32, False)
            yield Case("int8_matmul", "fp32", f"{tile}_zeros_{with_zeros}", body)
    for dtype_name in ("fp16", "bf16"):
        for tile, sizes in (("few_rows", (20, 33, 64)), ("small", (130, 70, 96)), ("medium", (300, 100, 96))):
            yield Case("int8_linear", dtype_name, tile, partial(_linear, sizes, DTYPES[dtype_name], 1))
    ways = {
        "few_rows": [*((rows, 37, inner) for rows in (1, 2, 3, 4) for inner in (255, 256, 320, 1000)), (20, 37, 256)],
        "few_columns": [(37, 1, 40), *((37, columns, inner) for columns in (1, 4, 7, 16) for inner in (512, 575))],
    }
    both = ("contiguous", "transposed")
    for (way, shapes), a_has_zeros, b_has_zeros in itertools.product(ways.items(), (False, True), (False, True)):
        for sizes in shapes:
            body = partial(_product, sizes, both, True, (a_has_zeros, b_has_zeros), torch.float32, False)
            yield Case(
                "int8_matmul", "fp32", f"{way}_{'x'.join(map(str, sizes))}_zeros_{a_has_zeros}_{b_has_zeros}", body
            )
    for sizes, with_zeros in itertools.product(((37, 7, 512), (17, 70, 96)), (False, True)):
        for out_name, out in (*DTYPES.items(), ("int8", torch.int8)):
            body = partial(_product, sizes, both, True, (with_zeros, with_zeros), out, False)
            yield Case("int8_matmul", out_name, f"epilogue_{'x'.join(map(str, sizes))}_zeros_{with_zeros}", body)
    yield Case(
        "int8_matmul", "fp32", "largest_sums",
        partial(_product, (3, 5, 131071), ("contiguous", "transposed"), True, (True, True), torch.float32, True),
    )  # fmt: skip


def _convolution_cases() -> Iterator[Case]:
    def case(name: str, conv: _Conv, out: str, *options: Any) -> Case:
        dtype = torch.int8 if out == "int8" else DTYPES[out]
        layout, per, zeros, change = options
        return Case("int8_conv2d", out, name, partial(_convolution, conv, layout, per, zeros, dtype, change))

    for name, conv in CONVOLUTIONS.items():
        yield case(name, conv, "fp32", "contiguous", True, True, "")
        yield case(f"{name}_without_zeros", conv, "int8", "contiguous", False, False, "")
    conv = CONVOLUTIONS["all_different"]
    for out in (*DTYPES, "int8"):
        for per, zeros in itertools.product((False, True), (False, True)):
            yield case(f"epilogue_{per}_{zeros}", conv, out, "contiguous", per, zeros, "")
    for layout in CONV_LAYOUTS:
        yield case(layout, CONVOLUTIONS["3x3"], "fp32", layout, True, True, "")
        yield case(f"odd_{layout}", CONVOLUTIONS["odd_channels"], "int8", layout, True, True, "")
    for change in ("extremes", "nan", "no_code"):
        yield case(change, CONVOLUTIONS["3x3"], "fp32", "contiguous", True, True, change)
        yield case(change, CONVOLUTIONS["strided"], "int8", "contiguous", True, True, change)


CASES = by_operator([*_quantize_cases(), *_static_cases(), *_other_cases(), *_convolution_cases()])
