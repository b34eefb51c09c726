"""Test cases for the int8 operators.

The results of all operators except `int8_linear` are compared bit for bit with the reference on the CPU.
tests/int8/test_int8.py compares the reference with numpy and with known answers. `int8_linear` sums in fp32, so its
results are compared by the rule of `error_and_allowed` (testing/common.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

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
    "rows": {"dim": (-1,)},
    "columns": {"dim": (0,)},
    "channels": {"dim": (0, 2, 3)},
    "middle": {"dim": (2,)},
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


def _named(options: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in options.items())


def _placed(q: Int8Tensor, device: torch.device, layout: Callable[[Tensor], Tensor]) -> Int8Tensor:
    """Copy codes, scales and zero points to a device, and the codes into a layout."""
    moved = q.to(device)
    return replace(moved, values=layout(moved.values))


def _moved(arguments: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}


Make = Callable[[], Tensor]


def _codes(name: str, x: Tensor, on_device: Tensor, options: dict[str, Any]) -> Iterator[Result]:
    """Compare the codes of `on_device` with those that the reference computes from `x`, the same tensor on the CPU."""
    rounding: Any = "nearest" if options.get("seed") is None else "stochastic"
    ours = quantize_int8(on_device, rounding=rounding, **_moved(options, on_device.device))
    for part, expected in zip(("values", "scale", "zero_point"), reference.quantize_int8(x, **options), strict=True):
        got = getattr(ours, part)
        if got is None or expected is None:
            yield Result(f"{name} has a {part}", float(got is not expected), 0)
        else:
            yield exact(f"{name} {part}", got, expected)
    yield same_kind(f"{name} shape of x", ours.values, x.shape, torch.int8)


def _quantize(
    make: Make, all_options: Sequence[dict[str, Any]], device: torch.device, *, layout: str = "contiguous"
) -> Iterator[Result]:
    x = make()
    laid_out = place([x], device, layout)[0]
    before = laid_out.clone()
    for options in all_options:
        yield from _codes(_named(options), x, laid_out, options)
    yield unchanged("x written", [before], [laid_out])


def _static(
    make: Make, scales: Callable[[Tensor], Tensor], zero_point: int | None, device: torch.device, **options: Any
) -> Iterator[Result]:
    x = make()
    scale = scales(x)
    zero = None if zero_point is None else torch.full_like(scale, zero_point, dtype=torch.int32)
    yield from _codes("static", x, x.to(device), {"scale": scale, "zero_point": zero, **options})


def _dequantize(
    dtype: torch.dtype, layout: str, all_options: Sequence[dict[str, Any]], device: torch.device
) -> Iterator[Result]:
    for options in all_options:
        made = reference.quantize_int8(randn(*SHAPE), **options)
        block = options.get("block_size")
        # Scales at the limits: NaN is the scale of a group that held NaN. 3e38 is nearly the largest number of fp32.
        # 1e-45 is rounded to the smallest positive number of fp32.
        made[1].view(-1)[:3] = torch.tensor([math.nan, 3e38, 1e-45])[: made[1].numel()]
        expected = reference.dequantize_int8(*made, block_size=block, dtype=dtype)
        q = _placed(Int8Tensor(*made, block_size=block), device, INT8_LAYOUTS[layout])
        yield exact(_named(options), dequantize_int8(q, dtype), expected)


def _fake(make: Make, layout: str, all_options: Sequence[dict[str, Any]], device: torch.device) -> Iterator[Result]:
    x = make()
    leaf = place([x], device, layout)[0].requires_grad_()
    for options in all_options:
        name = _named(options)
        expected, scale, zero = reference.fake_quantize_int8(x, **options)
        yield exact(name, fake_quantize_int8(leaf, **options), expected)
        for factor in (1.0, 0.5):  # with 1.0 all codes are in range, with 0.5 many are not
            yield from _fake_static(name, x, leaf, scale * factor, zero, options.get("block_size"))


def _fake_static(
    name: str, x: Tensor, leaf: Tensor, scale: Tensor, zero: Tensor | None, block: int | None = None
) -> Iterator[Result]:
    """Compare fake quantization by given scales, and its gradient. `leaf` is `x` on the device of the case."""
    given: dict[str, Any] = {"scale": scale, "zero_point": zero, "block_size": block}
    ours = fake_quantize_int8(leaf, **_moved(given, leaf.device))
    yield exact(f"{name} static", ours, reference.fake_quantize_int8(x, **given)[0])
    grad = randn(*x.shape, dtype=x.dtype, seed=1)
    (ours_grad,) = torch.autograd.grad(ours, leaf, grad.to(leaf.device))
    yield exact(f"{name} gradient", ours_grad, reference.straight_through_int8(grad, x, **given))


def _fake_given(dtype: torch.dtype, zero_point: int, device: torch.device) -> Iterator[Result]:
    # The formulas limit x / scale to the range from -512 to 512. Here some values of x / scale lie below this range,
    # and some lie above it.
    x = torch.cat([400 * randn(5, 37), torch.tensor([[math.inf, -math.inf, math.nan, 512.0, -513.0]]).T], 1).to(dtype)
    for shape in ((5, 1), (1, 38)):
        scale = torch.ones(shape)
        scale[-1, -1] = math.inf
        zero = torch.full(shape, zero_point, dtype=torch.int32)
        yield from _fake_static(f"{shape}", x, x.to(device, copy=True).requires_grad_(), scale, zero)


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


def _operand(shape: Sequence[int], scales: Sequence[int], zeros: bool, seed: int) -> Int8Tensor:
    """Return codes, with scales of the shape `scales`, and with zero points if `zeros` is True."""
    zero = integers(*scales, seed=seed + 1).to(torch.int32) if zeros else None
    return Int8Tensor(integers(*shape, seed=seed + 2), randn(*scales, seed=seed).abs() + 0.01, zero)


def _out(dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of an operator for a result of this dtype."""
    if dtype is not torch.int8:
        return {"out_dtype": dtype}
    zero_point = torch.tensor(-7, dtype=torch.int32)
    return {"out_dtype": torch.float32, "out_scale": torch.tensor(30.0), "out_zero_point": zero_point}


def _product(
    sizes: tuple[int, int, int], zeros: tuple[bool, bool], out: torch.dtype, device: torch.device, *,
    layouts: tuple[str, str] = ("contiguous", "transposed"), per: bool = True, extreme: bool = False,
) -> Iterator[Result]:  # fmt: skip
    m, n, k = sizes
    a = _operand((m, k), (m if per else 1, 1), zeros[0], 10)
    b = _operand((k, n), (1, n if per else 1), zeros[1], 20)
    if extreme:  # the largest sums that int32 holds
        for q in (a, b):
            q.values.fill_(-128)
    on_device = [_placed(q, device, INT8_LAYOUTS[layout]) for q, layout in zip((a, b), layouts, strict=True)]
    for bias in (None, randn(n, seed=30)):
        final = {"bias": bias, **_out(out)}
        expected = reference.int8_matmul(a.values, b.values, a.scale, a.zero_point, b.scale, b.zero_point, **final)
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
    conv: _Conv, out: torch.dtype, device: torch.device, *, layout: str = "contiguous", per: bool = True,
    zeros: bool = True, change: str = "",
) -> Iterator[Result]:  # fmt: skip
    x = _operand((conv.batch, *conv.pixels, conv.channels), (conv.batch, 1, 1, 1) if per else (1,), zeros, 10)
    weight = _operand((conv.outputs, *conv.taps, conv.channels), (conv.outputs, 1, 1, 1) if per else (1,), False, 20)
    zero = x.zero_point
    if change == "nan":
        x.scale[0] = math.nan
    elif change == "extremes" and zero is not None:
        for codes, code in ((x.values, -128), (weight.values, -128), (zero, 127)):
            codes.fill_(code)
    elif change == "no_code" and zero is not None:
        zero.fill_(300)[-1] = -385
    q, kernel = (_placed(operand, device, CONV_LAYOUTS[layout]) for operand in (x, weight))
    steps: dict[str, Any] = {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}
    for bias in (None, randn(conv.outputs, seed=6)):
        final = {"bias": bias, **steps, **_out(out)}
        expected = reference.int8_conv2d(x.values, weight.values, x.scale, x.zero_point, weight.scale, **final)
        ours = int8_conv2d(q, kernel, **_moved(final, device))
        yield exact(f"bias {bias is not None}", ours, expected)
        yield same_kind("kind", ours, expected.shape, expected.dtype)


def _linear(sizes: tuple[int, int, int], dtype: torch.dtype, scales: int, device: torch.device) -> Iterator[Result]:
    m, n, k = sizes
    x, weight = randn(m, k, dtype=dtype, seed=1), integers(n, k, seed=2)
    scale = randn(n if scales else 1, seed=3).abs() + 0.01
    for bias in (None, randn(n, dtype=dtype, seed=4)):
        added = torch.zeros(n) if bias is None else bias.float()
        truth = (x.double() @ weight.double().T) * scale.double() + added
        theirs = torch.nn.functional.linear(x.float(), weight.float() * scale.view(-1, 1)) + added
        operands = {"x": x, "weight": weight, "scale": scale, "bias": bias}
        ours = torch.ops.amp_kernels.int8_linear(*_moved(operands, device).values())
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
_BY_ROW: list[dict[str, Any]] = [{"dim": (dim,), **kind} for dim in (-1, 0) for kind in KINDS.values()]
_OUT = {**DTYPES, "int8": torch.int8}  # the dtypes of a product's result


def _quantize_cases() -> Iterator[Case]:
    every = [*_BY_ROW, *KINDS.values(), _BLOCKS]

    def case(dtype: str, name: str, make: Make, options: Sequence[dict[str, Any]], **rest: Any) -> Case:
        return Case("quantize_int8", dtype, name, partial(_quantize, make, options, **rest))

    for dtype_name, dtype in DTYPES.items():
        shaped = partial(randn, *SHAPE, dtype=dtype)
        for layout in LAYOUTS:
            yield case(dtype_name, layout, shaped, _all(), layout=layout)
        seeds = ({"seed": 1}, {"seed": -(2**63)}, {"seed": 2**40 + 12345})
        yield case(dtype_name, "stochastic", shaped, _all(*seeds))
        yield case(dtype_name, "stochastic_channels_last", shaped, _all({"seed": 7}), layout="channels_last")
        for kind, values in VALUES.items():
            yield case(dtype_name, kind, partial(_rounded, values, dtype), every)
        for length in ROWS:
            yield case(dtype_name, f"rows_of_{length}", partial(randn, 5, length, dtype=dtype), _BY_ROW)
        for length in (ON_CHIP // dtype.itemsize, ON_CHIP // dtype.itemsize + 1):
            yield case(dtype_name, f"rows_of_{length}", partial(randn, 2, length, dtype=dtype), _BY_ROW[:2])
        long = partial(randn, 2, 70001, dtype=dtype)
        yield case(dtype_name, "long_rows", long, [*every, {"block_size": 70000}])
        yield case(dtype_name, "many_rows", partial(randn, 3001, 20, dtype=dtype), _BY_ROW)
        for shape in ((0,), (0, 5), (5, 0), (2, 0, 3)):
            empty = partial(torch.empty, shape, dtype=dtype)
            options = [*_BY_ROW[:2], {}, {"block_size": 4}]
            yield case(dtype_name, f"empty_{'x'.join(map(str, shape))}", empty, options)
        for first, last in ((0, 2), (2, 0)):  # both are contiguous and channels_last at once
            empty = partial(torch.empty, (first, 2, 2, last), dtype=dtype)
            options = [*_all(), *_all({"seed": 1})]
            yield case(dtype_name, f"empty_{first}x2x2x{last}", empty, options, layout="channels_last")
        yield case(dtype_name, "scalar", partial(randn, dtype=dtype), list(KINDS.values()))


def _static_cases() -> Iterator[Case]:
    def per_row(x: Tensor) -> Tensor:
        scale = x.float().nan_to_num(1, 1, 1).abs().amax(-1, keepdim=True).clamp(1e-3, 1e3) / 100
        scale[0] = 0.0  # 1 / scale is inf, so all numbers except 0 and NaN saturate
        scale[-1] = math.inf
        return scale

    for dtype_name, dtype in DTYPES.items():
        for kind in ("nan", "inf", "ties", "largest", "denormals", "large"):
            for zero_point in (None, -128, 5, *(NO_CODES if kind == "large" else ())):
                body = partial(_static, partial(_rounded, VALUES[kind], dtype), per_row, zero_point)
                yield Case("quantize_int8", dtype_name, f"static_{kind}_{zero_point}", body)
        x = partial(randn, 33, 70, dtype=dtype)
        for name, scales, block in (
            ("tensor", lambda _: torch.tensor(0.02), None),
            ("columns", lambda _: randn(1, 70, seed=3).abs() + 0.01, None),
            ("blocks", lambda _: randn(33, 5, seed=3).abs() + 0.01, 16),
        ):
            for seed in (None, 11):
                body = partial(_static, x, scales, 3, block_size=block, seed=seed)
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


def _product_cases() -> Iterator[Case]:
    def case(
        out: str, name: str, sizes: tuple[int, int, int], a_has_zeros: bool, b_has_zeros: bool, **rest: Any
    ) -> Case:
        return Case("int8_matmul", out, name, partial(_product, sizes, (a_has_zeros, b_has_zeros), _OUT[out], **rest))

    for out, sizes in itertools.product(DTYPES, SHAPES):
        yield case(out, "x".join(map(str, sizes)), sizes, True, True, layouts=("contiguous", "contiguous"))
    for sizes in ((17, 33, 65), (1, 130, 127), (70, 66, 64)):
        name = "x".join(map(str, sizes))
        for layouts in itertools.product(INT8_LAYOUTS, INT8_LAYOUTS):
            yield case("fp32", f"{name}_{'_'.join(layouts)}", sizes, True, False, layouts=layouts)
        for right in ("contiguous", "sliced"):  # `a` is contiguous along k, `b` is not, and there are no zero points
            layouts = "contiguous", right
            yield case("fp32", f"{name}_{right}_without_zeros", sizes, False, False, layouts=layouts)
        for zeros in ((False, False), (True, False), (False, True)):
            for per in (True, False):
                yield case("fp32", f"{name}_zeros_{zeros}_per_row_{per}", sizes, *zeros, per=per)
        yield case("int8", name, sizes, True, True)
    # If the environment variable AMP_KERNELS_MULTIPROCESSORS is 3, the CUDA kernels count 3 multiprocessors on any GPU
    # (csrc/cuda/portable.h). They then compute the "narrow" sizes in tiles of 128 x 64, the "medium" sizes in tiles of
    # 128 x 128, and the "large" sizes in tiles of 128 x 256.
    for tile, sizes in (("narrow", (300, 50, 96)), ("medium", (300, 100, 96)), ("large", (130, 130, 96))):
        for has_zeros in (False, True):
            yield case("fp32", f"{tile}_zeros_{has_zeros}", sizes, has_zeros, has_zeros)
    ways = {
        "few_rows": [*((rows, 37, inner) for rows in (1, 2, 3, 4) for inner in (255, 256, 320, 1000)), (20, 37, 256)],
        "few_columns": [(37, 1, 40), *((37, columns, inner) for columns in (1, 4, 7, 16) for inner in (512, 575))],
    }
    for (way, shapes), a_zeros, b_zeros in itertools.product(ways.items(), (False, True), (False, True)):
        for sizes in shapes:
            name = f"{way}_{'x'.join(map(str, sizes))}_zeros_{a_zeros}_{b_zeros}"
            yield case("fp32", name, sizes, a_zeros, b_zeros)
    for sizes, has_zeros, out in itertools.product(((37, 7, 512), (17, 70, 96)), (False, True), _OUT):
        yield case(out, f"epilogue_{'x'.join(map(str, sizes))}_zeros_{has_zeros}", sizes, has_zeros, has_zeros)
    yield case("fp32", "largest_sums", (3, 5, 131071), True, True, extreme=True)
    for dtype_name, dtype in DTYPES.items():
        for sizes in SHAPES:
            if sizes[2] > 0:
                yield Case("int8_linear", dtype_name, "x".join(map(str, sizes)), partial(_linear, sizes, dtype, 1))
        yield Case("int8_linear", dtype_name, "one_scale", partial(_linear, (5, 33, 70), dtype, 0))
    for dtype_name in ("fp16", "bf16"):
        for tile, sizes in (("few_rows", (20, 33, 64)), ("small", (130, 70, 96)), ("medium", (300, 100, 96))):
            yield Case("int8_linear", dtype_name, tile, partial(_linear, sizes, DTYPES[dtype_name], 1))


def _convolution_cases() -> Iterator[Case]:
    def case(name: str, conv: str, out: str, **rest: Any) -> Case:
        return Case("int8_conv2d", out, name, partial(_convolution, CONVOLUTIONS[conv], _OUT[out], **rest))

    for name in CONVOLUTIONS:
        yield case(name, name, "fp32")
        yield case(f"{name}_without_zeros", name, "int8", per=False, zeros=False)
    for out, per, zeros in itertools.product(_OUT, (False, True), (False, True)):
        yield case(f"epilogue_{per}_{zeros}", "all_different", out, per=per, zeros=zeros)
    for layout in CONV_LAYOUTS:
        yield case(layout, "3x3", "fp32", layout=layout)
        yield case(f"odd_{layout}", "odd_channels", "int8", layout=layout)
    for change in ("extremes", "nan", "no_code"):
        yield case(change, "3x3", "fp32", change=change)
        yield case(change, "strided", "int8", change=change)


CASES = by_operator([*_quantize_cases(), *_static_cases(), *_other_cases(), *_product_cases(), *_convolution_cases()])
