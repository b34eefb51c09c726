"""The int8 operators, quantization and products: arguments, checks, fakes for tracing, gradients, and calls of Triton.

csrc/int8.h explains how a tensor is cut into groups and in which order kernels read them. `Plan` computes what C++
operators compute in csrc/ops/int8_layout.h, which also lists which tensors are copied: the strides of results, for the
fakes, and the memory layout that kernels use. Triton needs the layout in Python, because it has to work if nothing is
compiled.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import _loader, reference
from .checks import check_are_tensors, check_dtype, check_scalar, check_values
from .library import LIBRARY, Arguments, Kernels, define
from .table import DTYPE_CODES, is_dense

Dims = Sequence[int] | None
MAX_K = 131071  # a sum of so many products of codes fits int32; each is at most 128^2, and 131072 * 128^2 is 2^31


# ---------------------------------------------------------------------------------------------------------- groups
class Groups(NamedTuple):
    """How a tensor is divided into groups. The elements of a group share a scale.

    Every dimension is either kept or reduced. Two elements are in one group if their indices differ only in reduced
    dimensions. With blocks, only the last dimension is reduced, and it is cut into blocks.
    """

    shape: tuple[int, ...]
    kept: tuple[bool, ...]  # for each dimension, whether it is not reduced
    block: int | None = None  # elements of a block; None: no blocks

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape that `torch.amax(keepdim=True)` returns. With blocks, the last size is the number of blocks."""
        sizes = [n if kept else 1 for n, kept in zip(self.shape, self.kept, strict=True)]
        return tuple(sizes) if self.block is None else (*sizes[:-1], -(-self.shape[-1] // self.block))


def groups_of(x: Tensor, scale: Tensor | None, dim: Dims = None, block_size: int | None = None) -> Groups:
    """Return the groups of `x`.

    If there is a `block_size`, they are blocks. If not, but there is a `scale`, the dimensions in which the scale has
    size 1 are reduced; a scale of one element reduces all. With neither, the dimensions in `dim` are reduced, or all if
    it is None.
    """
    if block_size is not None:
        reduced = {x.dim() - 1}
    elif scale is None:
        reduced = {d % x.dim() for d in (dim or range(x.dim()))}
    else:
        reduced = {d for d in range(x.dim()) if scale.numel() == 1 or scale.shape[d] == 1}
    return Groups(tuple(x.shape), tuple(d not in reduced for d in range(x.dim())), block_size)


def dense_strides(shape: Sequence[int], order: Iterable[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor that has its dimensions in this order in memory, the outermost first."""
    strides, step = [1] * len(shape), 1
    for d in reversed(list(order)):
        strides[d] = step
        step *= max(1, shape[d])
    return tuple(strides)


def storage_order(strides: Sequence[int]) -> list[int]:
    """Return the dimensions from the outermost to the innermost. If strides are equal, the first dimension is outer."""
    return sorted(range(len(strides)), key=lambda d: -strides[d])


def layout_of(groups: Groups, strides: Sequence[int]) -> tuple[int, int, int, int] | None:
    """Return the struct Int8Layout (csrc/int8.h) of a dense tensor with these strides.

    None if three axes, [outer][reduced][inner], do not describe its groups.
    """
    sizes, axis = [1, 1, 1], 0  # inner, reduced, outer
    for d in reversed(storage_order(strides)):
        # Dimensions of size 0 or 1 are skipped. Skipping a size of 0 is allowed: no kernel is called for such a tensor,
        # and `dense_strides` counts the size as 1, too.
        if groups.shape[d] > 1:
            # Axes 0 and 2 take kept dimensions, axis 1 takes reduced ones. A dimension of the other kind begins the
            # next axis.
            axis += groups.kept[d] != (axis != 1)
            if axis > 2:
                return None
            sizes[axis] *= groups.shape[d]
    inner, reduced, outer = sizes
    # `row` is the number of all elements, with one exception. If the last block of each row of the tensor is shorter
    # than the other blocks, `row` is the length of such a row.
    row = inner * reduced * outer
    if groups.block is not None and reduced > groups.block:
        if inner > 1:
            return None
        row = row if reduced % groups.block == 0 else reduced
        outer, reduced = outer * groups.scale_shape[-1], groups.block
    if reduced == 1:  # each element is a group: the layout has one row, and every element is a column
        return 1, 1, outer * inner, row
    return outer, reduced, inner, row


class Plan(NamedTuple):
    """The strides of the tensors of a call, and the layout that its kernels use."""

    out: tuple[int, ...]  # strides of results
    # Strides of the tensors that kernels read and write. If these strides differ from `out`, kernels read a copy of the
    # tensor, and what they write is copied to a tensor with the strides `out`.
    walk: tuple[int, ...]
    scale_shape: tuple[int, ...]
    # Strides of scales and zero points. Their order in memory is the order in which kernels number the groups.
    scale: tuple[int, ...]
    # What `layout_of` returns for `walk`. It is None only if random bits need row-major memory, in which three axes
    # cannot describe the groups.
    layout: tuple[int, int, int, int] | None

    @classmethod
    def of(cls, x: Tensor, scale: Tensor | None, dim: Dims, block_size: int | None, is_numbered: bool = False) -> Plan:
        """Return the plan for `x`. If `is_numbered`, kernels number elements in row-major order, for random bits."""
        groups = groups_of(x, scale, dim, block_size)
        row_major = dense_strides(groups.shape, range(x.dim()))
        out = dense_strides(groups.shape, storage_order(x.stride())) if is_dense(x) else row_major
        walk = row_major if is_numbered else out
        layout = layout_of(groups, walk)
        if layout is None and not is_numbered:
            # The kept dimensions become the outermost ones. Each group is then a row, so three axes describe the
            # groups.
            walk = dense_strides(groups.shape, sorted(storage_order(out), key=lambda d: not groups.kept[d]))
            layout = layout_of(groups, walk)
        shape = groups.scale_shape
        return cls(out, walk, shape, dense_strides(shape, storage_order(walk)), layout)

    def in_order(self, *sides: Tensor | None) -> list[Tensor | None]:
        """Return scales or zero points in the order in which kernels number the groups. One alone needs no order."""
        return [side if side is None or side.numel() == 1 else _with_strides(side, self.scale) for side in sides]


# ----------------------------------------------------------------------------------------- what several operators share
def _with_strides(x: Tensor, strides: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Return the tensor itself if it has these strides and this dtype, otherwise a copy that has them."""
    have = all(n == 1 or s == wanted for n, s, wanted in zip(x.shape, x.stride(), strides, strict=True))
    if have and dtype in (None, x.dtype):
        return x
    return torch.empty_strided(x.shape, strides, dtype=dtype or x.dtype, device=x.device).copy_(x)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def check_blocks(op: str, x: Tensor, block_size: int | None) -> None:
    """Raise an error unless the last dimension of `x` can be split into blocks of this size. None means no blocks."""
    if block_size is None:
        return
    # The type is tested first: the compiler can test the type of a symbolic size, but not whether it has __index__.
    if not isinstance(block_size, (int, torch.SymInt)) and not hasattr(block_size, "__index__"):
        raise TypeError(f"{op}: block_size must be an int or None, got {block_size!r}")
    if block_size < 1:
        raise ValueError(f"{op}: block_size must be at least 1, got {block_size}")
    if x.dim() == 0:
        raise ValueError(f"{op}: x must have a last dimension to split into blocks, got a 0-dim tensor")


def _check_parameter(op: str, name: str, tensor: Tensor, dtype: torch.dtype, of: str, x: Tensor) -> None:
    """Raise unless `tensor` is dense, has the dtype, and is on the device of `x`. Messages call `x` what `of` says."""
    check_values(op, name, tensor, (dtype,))
    if tensor.device != x.device:
        raise ValueError(f"{op}: {name} must be on {x.device} as {of} is, got {tensor.device}; move it there")


def _check_scale(
    op: str, name: str, x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: int | None
) -> None:
    _check_parameter(op, "scale", scale, torch.float32, name, x)
    expected = list(x.shape)
    if block_size is not None:
        expected[-1] = -(-expected[-1] // block_size)
        fits = list(scale.shape) == expected
    else:
        fits = scale.numel() == 1 or (
            scale.dim() == x.dim() and all(s in (1, n) for s, n in zip(scale.shape, x.shape, strict=True))
        )
    if not fits:
        what = f"shape {tuple(expected)}, with the number of blocks as the last size"
        if block_size is None:
            what = f"one element, or the shape {tuple(expected)} with 1 for each reduced dimension"
        raise ValueError(f"{op}: scale must have {what}, got {tuple(scale.shape)}")
    if zero_point is not None:
        _check_parameter(op, "zero_point", zero_point, torch.int32, name, x)
        if zero_point.shape != scale.shape:
            raise ValueError(
                f"{op}: zero_point must have scale's shape {tuple(scale.shape)}, got {tuple(zero_point.shape)}"
            )


def _check_zero_points(op: str, name: str, codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> None:
    """Raise unless there are as many zero points as scales, or none."""
    if zero_point is not None:
        _check_parameter(op, f"{name}.zero_point", zero_point, torch.int32, name, codes)
        if zero_point.numel() != scale.numel():
            raise ValueError(
                f"{op}: {name} must have as many zero points as scales ({scale.numel()}), got {zero_point.numel()}"
            )


def _check_bias(op: str, bias: Tensor | None, dtype: torch.dtype, name: str, x: Tensor, columns: int) -> None:
    if bias is not None:
        _check_parameter(op, "bias", bias, dtype, name, x)
        if list(bias.shape) != [columns]:
            raise ValueError(f"{op}: bias must have shape ({columns},), got {tuple(bias.shape)}")


# ------------------------------------------------------------------------------------------------------- quantization
Quantized = tuple[Tensor, Tensor, Tensor]


@dataclass
class _FakeQuantize(Arguments):
    """Returns the numbers that the codes stand for, scale and zero point.

    If the scale was passed, the returned scale and zero point have no elements. The passed tensors cannot be returned,
    because an operator must not return its input. None cannot be returned either, because the schema declares Tensors.
    For symmetric codes the returned zero point has no elements either.
    """

    x: Tensor
    scale: Tensor | None
    zero_point: Tensor | None
    dim: Sequence[int] | None
    block_size: int | None
    symmetric: bool
    seed: ClassVar[int | None] = None

    @property
    def dtype(self) -> torch.dtype:  # of the first result
        return self.x.dtype

    @property
    def plan(self) -> Plan:
        return Plan.of(self.x, self.scale, self.dim, self.block_size, self.seed is not None)

    def check(self) -> None:
        op, x, dim, block_size = self.name, self.x, self.dim, self.block_size
        check_values(op, "x", x, DTYPE_CODES)
        check_blocks(op, x, block_size)
        if block_size is not None and dim is not None and [d % x.dim() for d in dim] != [x.dim() - 1]:
            raise ValueError(
                f"{op}: dim must be None or -1 with block_size, which splits the last dimension, got {dim}"
            )
        if dim and x.dim() == 0:
            raise IndexError(f"{op}: dim must be None for a 0-dim tensor, which is one group, got {tuple(dim)}")
        for d in dim or ():
            if not -x.dim() <= d < x.dim():
                raise IndexError(f"{op}: dim must be in [{-x.dim()}, {x.dim() - 1}], got {d}")
        if dim is not None and len({d % max(x.dim(), 1) for d in dim}) != len(dim):
            raise ValueError(f"{op}: dim must name each dimension at most once, got {tuple(dim)}")
        if self.scale is not None:
            _check_scale(op, "x", x, self.scale, self.zero_point, block_size)
        elif self.zero_point is not None:
            raise ValueError(f"{op}: zero_point must be None without scale, got a tensor; pass scale too")

    def fake(self) -> Quantized:
        plan = self.plan
        return self.x.new_empty_strided(self.x.shape, plan.out, dtype=self.dtype), *self.new_sides(plan)

    def new_sides(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """Return memory for a scale and a zero point. A tensor that is not computed has no elements."""
        full, none = (plan.scale_shape, plan.scale), ((0,), (1,))
        has_zero_point = self.scale is None and not self.symmetric
        scale = self.x.new_empty_strided(*(full if self.scale is None else none), dtype=torch.float32)
        return scale, self.x.new_empty_strided(*(full if has_zero_point else none), dtype=torch.int32)

    def launch(self, kernels: Kernels) -> Quantized:
        x, plan, scale, zero_point = self.x, self.plan, self.scale, self.zero_point
        own = self.new_sides(plan)
        if plan.layout is None:
            # Random bits need x in row-major order, and three axes cannot describe these groups in that order. If no
            # scales are given, a call without random bits computes them. Then each element becomes a group of its own,
            # with the scale of its former group.
            x = x.contiguous()
            if scale is None:
                own = _Quantize(x, None, None, self.dim, None, self.symmetric, None).launch(kernels)[1:]
                scale, zero_point = own[0], None if self.symmetric else own[1]
            spread, zeros = (
                None if side is None else side.expand(x.shape).contiguous() for side in (scale, zero_point)
            )
            codes, *_ = _Quantize(x, spread, zeros, None, None, self.symmetric, self.seed).launch(kernels)
            return _with_strides(codes, plan.out), *own
        if scale is None:
            scale, zero_point = own[0], None if self.symmetric else own[1]
        out = torch.empty_strided(x.shape, plan.walk, dtype=self.dtype, device=x.device)
        if x.numel() > 0:
            sides = plan.in_order(scale, zero_point)
            x, is_random = _with_strides(x, plan.walk), self.seed is not None
            kernels._quantize_int8_(x, out, *sides, plan.layout, self.scale is not None, is_random, self.seed or 0)
        else:  # a group without elements gets the same scale as a group of zeros
            own[0].fill_(1.0)
            own[1].fill_(0)
        return _with_strides(out, plan.out), *own


@dataclass
class _Quantize(_FakeQuantize):
    """Returns codes in place of the numbers that they stand for."""

    seed: int | None  # type: ignore[misc]

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8


@dataclass
class _Dequantize(Arguments):
    values: Tensor
    scale: Tensor
    zero_point: Tensor | None
    block_size: int | None
    dtype: torch.dtype

    def check(self) -> None:
        op, values = self.name, self.values
        check_are_tensors(op, **{"q.values": values, "q.scale": self.scale})
        check_values(op, "values", values, (torch.int8,))
        check_blocks(op, values, self.block_size)
        _check_scale(op, "values", values, self.scale, self.zero_point, self.block_size)
        check_dtype(op, "dtype", self.dtype)

    def fake(self) -> Tensor:
        strides = Plan.of(self.values, self.scale, None, self.block_size).out
        return self.values.new_empty_strided(self.values.shape, strides, dtype=self.dtype)

    def launch(self, kernels: Kernels) -> Tensor:
        values, plan = self.values, Plan.of(self.values, self.scale, None, self.block_size)
        out = torch.empty_strided(values.shape, plan.walk, dtype=self.dtype, device=values.device)
        if values.numel() > 0:
            sides = plan.in_order(self.scale, self.zero_point)
            kernels._dequantize_int8_(_with_strides(values, plan.walk), *sides, out, plan.layout)
        return _with_strides(out, plan.out)


@dataclass
class _StraightThrough(Arguments):
    grad: Tensor
    x: Tensor
    scale: Tensor
    zero_point: Tensor | None
    block_size: int | None

    def check(self) -> None:
        op, grad, x = self.name, self.grad, self.x
        check_values(op, "x", x, DTYPE_CODES)
        check_values(op, "grad", grad, DTYPE_CODES)
        if grad.shape != x.shape or grad.device != x.device:
            raise ValueError(
                f"{op}: grad must have x's shape {tuple(x.shape)} on {x.device}, got {tuple(grad.shape)} on "
                f"{grad.device}"
            )
        check_blocks(op, x, self.block_size)
        _check_scale(op, "x", x, self.scale, self.zero_point, self.block_size)

    def fake(self) -> Tensor:
        return self.x.new_empty_strided(self.x.shape, Plan.of(self.x, self.scale, None, self.block_size).out)

    def launch(self, kernels: Kernels) -> Tensor:
        x, plan = self.x, Plan.of(self.x, self.scale, None, self.block_size)
        out = torch.empty_strided(x.shape, plan.walk, dtype=x.dtype, device=x.device)
        if x.numel() > 0:
            sides = plan.in_order(self.scale, self.zero_point)
            grad = _with_strides(self.grad, plan.walk, x.dtype)
            kernels._straight_through_int8_(grad, _with_strides(x, plan.walk), *sides, out, plan.layout)
        return _with_strides(out, plan.out)


# ----------------------------------------------------------------------------------------------------------- products
@dataclass
class _Matmul(Arguments):
    a: Tensor
    b: Tensor
    a_scale: Tensor
    a_zero_point: Tensor | None
    b_scale: Tensor
    b_zero_point: Tensor | None
    bias: Tensor | None
    out_dtype: torch.dtype
    out_scale: Tensor | None
    out_zero_point: Tensor | None

    def check(self) -> None:
        op, a, b = self.name, self.a, self.b
        for name, x in (("a", a), ("b", b)):
            check_values(op, name, x, (torch.int8,))
            if x.dim() != 2:
                raise ValueError(f"{op}: {name} must have 2 dimensions, got {x.dim()}")
        self.check_side("a", a, self.a_scale, self.a_zero_point, 1)
        self.check_side("b", b, self.b_scale, self.b_zero_point, 0)
        if a.shape[1] != b.shape[0]:
            raise ValueError(f"{op}: b must have {a.shape[1]} rows, as many as a has columns, got {b.shape[0]}")
        if a.device != b.device:
            raise ValueError(f"{op}: b must be on {a.device} as a is, got {b.device}")
        if a.shape[1] > MAX_K:
            raise ValueError(
                f"{op}: the inner dimension must be at most {MAX_K}, beyond which int32 sums may overflow, got "
                f"{a.shape[1]}; split it and add the results"
            )
        _check_result(op, "a", a, b.shape[1], self)

    def check_side(self, name: str, codes: Tensor, scale: Tensor, zero_point: Tensor | None, inner: int) -> None:
        """Raise unless there is one scale, or one per row of `a` or column of `b`. Dimension `inner` is summed over."""
        op = self.name
        _check_parameter(op, f"{name}.scale", scale, torch.float32, name, codes)
        if scale.numel() > 1 and (scale.dim() != 2 or scale.shape[inner] != 1):
            raise ValueError(
                f"{op}: {name} must be quantized as a whole or with dim={-inner}, got scales of "
                f"shape {tuple(scale.shape)} for values of shape {tuple(codes.shape)}"
            )
        if scale.numel() not in (1, codes.shape[1 - inner]):
            what = "row" if inner == 1 else "column"
            raise ValueError(
                f"{op}: {name} must be quantized as a whole or per {what} ({codes.shape[1 - inner]} scales), "
                f"got {scale.numel()} scales"
            )
        _check_zero_points(op, name, codes, scale, zero_point)

    def fake(self) -> Tensor:
        dtype = self.out_dtype if self.out_scale is None else torch.int8
        return self.a.new_empty((self.a.shape[0], self.b.shape[1]), dtype=dtype)

    def launch(self, kernels: Kernels) -> Tensor:
        out = self.fake()
        if out.numel() > 0:
            given = self.a_scale, self.a_zero_point, self.b_scale, self.b_zero_point, self.bias
            sides = map(_contiguous, given)
            kernels._int8_matmul_(self.a, self.b, *sides, out, self.out_scale, self.out_zero_point)
        return out


@dataclass
class _Conv2d(Arguments):
    x: Tensor
    weight: Tensor
    x_scale: Tensor
    x_zero_point: Tensor | None
    weight_scale: Tensor
    bias: Tensor | None
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    out_dtype: torch.dtype
    out_scale: Tensor | None
    out_zero_point: Tensor | None

    @property
    def out_pixels(self) -> list[int]:  # height and width
        return [
            (pixels + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
            for pixels, taps, stride, padding, dilation in zip(
                self.x.shape[1:3], self.weight.shape[1:3], self.stride, self.padding, self.dilation, strict=True
            )
        ]

    def check(self) -> None:
        op, x, weight = self.name, self.x, self.weight
        for name, codes in (("x", x), ("weight", weight)):
            check_values(op, name, codes, (torch.int8,))
            if codes.dim() != 4:
                raise ValueError(
                    f"{op}: {name} must have 4 dimensions, with channels as the last, got {codes.dim()}; give a line "
                    "of pixels the height 1"
                )
        if weight.shape[3] != x.shape[3] or weight.device != x.device:
            raise ValueError(
                f"{op}: weight must have {x.shape[3]} channels on {x.device} as x has, got {weight.shape[3]} on "
                f"{weight.device}"
            )
        terms = math.prod(weight.shape[1:])
        if not 0 < terms <= MAX_K:
            raise ValueError(
                f"{op}: weight must have from 1 to {MAX_K} elements for each output channel, beyond which int32 sums "
                f"may overflow, got {terms}"
            )
        for name, least in (("stride", 1), ("padding", 0), ("dilation", 1)):
            sizes = getattr(self, name)
            if len(sizes) != 2 or any(not least <= size < 2**31 for size in sizes):
                raise ValueError(
                    f"{op}: {name} must be one or two ints that are at least {least} and below 2^31, got {tuple(sizes)}"
                )
        if any(size < 1 for size in self.out_pixels):
            raise ValueError(
                f"{op}: x must be at least as large as the dilated kernel after padding, got {tuple(x.shape[1:3])} "
                f"pixels for a kernel of {tuple(weight.shape[1:3])}, padding {tuple(self.padding)} and dilation "
                f"{tuple(self.dilation)}"
            )
        pixels = x.shape[0] * max(x.shape[1], 1) * max(x.shape[2], 1)
        # A comparison of a symbolic number would limit the batch size in torch.export. C++ checks sizes in each call.
        if isinstance(pixels, int) and pixels >= 2**32:
            raise ValueError(
                f"{op}: x must have fewer than 2^32 pixels, got {tuple(x.shape[:3])}; give fewer images at a time"
            )
        self.check_side("x", x, self.x_scale, self.x_zero_point, "image")
        self.check_side("weight", weight, self.weight_scale, None, "output channel")
        _check_result(op, "x", x, weight.shape[0], self)

    def check_side(self, name: str, codes: Tensor, scale: Tensor, zero_point: Tensor | None, what: str) -> None:
        """Raise unless there is one scale for `codes`, or one for each index of the first dimension."""
        op = self.name
        _check_parameter(op, f"{name}.scale", scale, torch.float32, name, codes)
        if scale.numel() != 1 and list(scale.shape) != [codes.shape[0], 1, 1, 1]:
            raise ValueError(
                f"{op}: {name} must be quantized as a whole or per {what} (dim=(1, 2, 3), scales of shape "
                f"{(codes.shape[0], 1, 1, 1)}), got scales of shape {tuple(scale.shape)}"
            )
        _check_zero_points(op, name, codes, scale, zero_point)

    def fake(self) -> Tensor:
        shape = (self.x.shape[0], *self.out_pixels, self.weight.shape[0])
        return self.x.new_empty(shape, dtype=self.out_dtype if self.out_scale is None else torch.int8)

    def launch(self, kernels: Kernels) -> Tensor:
        out = self.fake()
        if out.numel() == 0:
            return out
        x, weight, bias = self.x.contiguous(), self.weight.contiguous(), _contiguous(self.bias)
        given, pixels = (self.x_scale, self.x_zero_point), out.shape[1] * out.shape[2]
        sides = *(reference.int8.of_pixels(side, pixels) for side in given), self.weight_scale.contiguous()
        steps, codes_of_result = (self.stride, self.padding, self.dilation), (self.out_scale, self.out_zero_point)
        if tuple(weight.shape[1:3]) == tuple(self.stride) == (1, 1) and tuple(self.padding) == (0, 0):
            # Each output pixel reads only the pixel in its place.
            a, b, rows = x.flatten(0, 2), weight.flatten(1).t(), out.flatten(0, 2)
            kernels._int8_matmul_(a, b, *sides, None, bias, rows, *codes_of_result)
        else:
            kernels._int8_conv2d_(x, weight, *sides, bias, *steps, out, *codes_of_result)
        return out


def _check_result(op: str, name: str, x: Tensor, columns: int, given: _Matmul | _Conv2d) -> None:
    """Raise if an argument that says what becomes of the sums does not fit. Messages call `x` by this name."""
    _check_bias(op, given.bias, torch.float32, name, x, columns)
    check_dtype(op, "out_dtype", given.out_dtype)
    out_scale, out_zero_point = given.out_scale, given.out_zero_point
    check_scalar(op, "out_scale", out_scale, x.device)
    if out_zero_point is not None:
        _check_parameter(op, "out_zero_point", out_zero_point, torch.int32, name, x)
        if out_scale is None or out_zero_point.numel() != 1:
            raise ValueError(
                f"{op}: out_zero_point must have one element, and be given only with out_scale, got "
                f"{out_zero_point.numel()} elements {'without' if out_scale is None else 'with'} out_scale"
            )


@dataclass
class _Linear(Arguments):
    x: Tensor
    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def check(self) -> None:
        op, x, weight, scale = self.name, self.x, self.weight, self.scale
        check_values(op, "x", x, DTYPE_CODES)
        check_values(op, "weight", weight, (torch.int8,))
        if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
            raise ValueError(
                f"{op}: x and weight must be [M, K] and [N, K], got {tuple(x.shape)} and {tuple(weight.shape)}"
            )
        _check_parameter(op, "weight", weight, torch.int8, "x", x)
        _check_parameter(op, "scale", scale, torch.float32, "x", x)
        if scale.numel() not in (1, weight.shape[0]):
            raise ValueError(f"{op}: scale must have 1 or {weight.shape[0]} elements, got {scale.numel()}")
        _check_bias(op, self.bias, x.dtype, "x", x, weight.shape[0])

    def fake(self) -> Tensor:
        return self.x.new_empty((self.x.shape[0], self.weight.shape[0]))

    def launch(self, kernels: Kernels) -> Tensor:
        out, x = self.fake(), self.x
        if out.numel() > 0:
            x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
            kernels._int8_linear_(x, self.weight.contiguous(), _contiguous(self.scale), _contiguous(self.bias), out)
        return out


# ------------------------------------------------------------------------------------------------------ the operators
quantize_int8 = define("quantize_int8", _Quantize, "(Tensor, Tensor, Tensor)")
fake_quantize_int8 = define("fake_quantize_int8", _FakeQuantize, "(Tensor, Tensor, Tensor)", is_differentiable=True)
dequantize_int8 = define("dequantize_int8", _Dequantize)
straight_through_int8 = define("straight_through_int8", _StraightThrough)
int8_matmul = define("int8_matmul", _Matmul, delegates=True)
int8_conv2d = define("int8_conv2d", _Conv2d, delegates=True)
int8_linear = define("int8_linear", _Linear, delegates=True)


def _prefers_triton(gpu: int) -> bool:
    """Return whether large int8 products on this GPU are Triton's. C++ calls this once for each GPU."""
    # Triton was measured on compute capability 9.0 only.
    reasons = importlib.import_module("amp_kernels.backends").backend_reasons(f"cuda:{gpu}")
    return reasons["triton"] is None and torch.cuda.get_device_capability(gpu) == (9, 0)


if _loader.has_cuda():
    LIBRARY.define("_prefers_triton(int gpu) -> bool")
    LIBRARY.impl("_prefers_triton", _prefers_triton, "CompositeExplicitAutograd")


def straight_through(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: int | None = None
) -> Tensor:
    """Return the gradient of `fake_quantize_int8` as a result of `torch.where`, which can be differentiated again.

    The operator `straight_through_int8` has no gradient: the derivative of its result would silently be 0. So here it
    computes only where the gradient passes through.
    """
    x = x.detach()
    inside = straight_through_int8(torch.ones_like(x), x, scale, zero_point, block_size) != 0
    return torch.where(inside, grad, 0)


def _save_for_straight_through(ctx: Any, inputs: tuple[Any, ...], output: Quantized) -> None:
    x, scale, zero_point, _, ctx.block_size, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    if scale is not None:
        ctx.save_for_backward(x, scale, zero_point)


def _fake_quantize_backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.saved_tensors:
        compute = straight_through if torch.is_grad_enabled() else straight_through_int8
        x, scale, zero_point = ctx.saved_tensors
        grad = compute(grad, x, scale, zero_point, ctx.block_size)
    return grad, *([None] * 5)  # without a given scale the range is that of x, and no value is outside


torch.library.register_autograd(
    "amp_kernels::fake_quantize_int8", _fake_quantize_backward, setup_context=_save_for_straight_through, lib=LIBRARY
)
