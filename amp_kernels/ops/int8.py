"""The int8 operators, quantization and products: schemas, checks, fakes for tracing, gradients, and calls of Triton.

csrc/int8.h explains how a tensor is cut into groups and in which order kernels read them. `Plan` computes the strides
of an operator's results, and the memory layout that its kernels read and write. The fakes need the strides. The code
that calls Triton's kernels needs the layout. C++ operators compute both in csrc/ops/int8_layout.h, which also lists
which tensors are copied. The calls of Triton cannot use that C++ code, because they also have to work if nothing is
compiled.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _loader, reference
from .checks import check_are_tensors, check_dtype, check_is_dense, check_scalar, check_values
from .library import LIBRARY, Kernels, operator
from .table import DTYPE_CODES, is_dense

MAX_K = 131071  # a sum of so many products of codes fits int32; each is at most 128^2, and 131072 * 128^2 is 2^31
_FLOATS = "float32, float16 or bfloat16"


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


def groups_of(
    x: Tensor, scale: Tensor | None, dim: Sequence[int] | None = None, block_size: int | None = None
) -> Groups:
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
    # Strides of scales and zero points. Their order in memory is the order in which kernels number the groups.
    scale: tuple[int, ...]
    # What `layout_of` returns for `walk`. It is None only if random bits need row-major memory, in which three axes
    # cannot describe the groups.
    layout: tuple[int, int, int, int] | None

    @classmethod
    def of(cls, x: Tensor, groups: Groups, *, is_numbered: bool = False) -> Plan:
        """Return the plan for `x`.

        Args:
            x: The tensor. Kernels read it or a copy of it.
            groups: Its groups.
            is_numbered: Whether kernels number the elements in row-major order, for random bits.
        """
        row_major = dense_strides(groups.shape, range(x.dim()))
        out = dense_strides(groups.shape, storage_order(x.stride())) if is_dense(x) else row_major
        walk = row_major if is_numbered else out
        layout = layout_of(groups, walk)
        if layout is None and not is_numbered:
            # The kept dimensions become the outermost ones. Each group is then a row, so three axes describe the
            # groups.
            walk = dense_strides(groups.shape, sorted(storage_order(out), key=lambda d: not groups.kept[d]))
            layout = layout_of(groups, walk)
        return cls(out, walk, dense_strides(groups.scale_shape, storage_order(walk)), layout)


# -------------------------------------------------------------------------------------- kernels that Python launches
def _with_strides(x: Tensor, strides: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Return the tensor itself if it has these strides and this dtype, otherwise a copy that has them."""
    have = all(n == 1 or s == wanted for n, s, wanted in zip(x.shape, x.stride(), strides, strict=True))
    if have and dtype in (None, x.dtype):
        return x
    return torch.empty_strided(x.shape, strides, dtype=dtype or x.dtype, device=x.device).copy_(x)


def _in_order(side: Tensor | None, strides: Sequence[int]) -> Tensor | None:
    """Return scales or zero points in the order in which kernels number the groups. A single one needs no order."""
    return side if side is None or side.numel() == 1 else _with_strides(side, strides)


Quantized = tuple[Tensor, Tensor, Tensor]


def _quantize(
    kernels: Kernels, x: Tensor, scale: Tensor | None, zero_point: Tensor | None, dim: Sequence[int] | None,
    block_size: int | None, symmetric: bool, seed: int | None, *, fake: bool = False,
) -> Quantized:  # fmt: skip
    groups = groups_of(x, scale, dim, block_size)
    plan = Plan.of(x, groups, is_numbered=seed is not None)
    if plan.layout is None:
        # Random bits need x in row-major order, and three axes cannot describe these groups in that order. If no scales
        # are given, a call without random bits computes them. Then each element becomes a group of its own, with the
        # scale of its former group.
        x, own = x.contiguous(), _absent(x)
        if scale is None:
            _, scale, zero_point = _quantize(kernels, x, None, None, dim, None, symmetric, None)
            own, zero_point = (scale, zero_point), None if symmetric else zero_point
        spread, zeros = (None if side is None else side.expand(x.shape).contiguous() for side in (scale, zero_point))
        codes = _quantize(kernels, x, spread, zeros, None, None, symmetric, seed)[0]
        return _with_strides(codes, plan.out), *own
    is_static = scale is not None
    if scale is None:
        scale = torch.empty_strided(groups.scale_shape, plan.scale, dtype=torch.float32, device=x.device)
        zero_point = None if symmetric else torch.empty_like(scale, dtype=torch.int32)
    out = torch.empty_strided(x.shape, plan.walk, dtype=x.dtype if fake else torch.int8, device=x.device)
    sides = [_in_order(side, plan.scale) for side in (scale, zero_point)]
    if x.numel() > 0:
        x = _with_strides(x, plan.walk)
        kernels._quantize_int8_(x, out, *sides, plan.layout, is_static, seed is not None, seed or 0)
    elif not is_static:  # a group without elements gets the same scale as a group of zeros
        scale.fill_(1.0)
        zero_point = None if zero_point is None else zero_point.fill_(0)
    none, no_zero_point = _absent(x)
    out = _with_strides(out, plan.out)
    return out, none if is_static else scale, no_zero_point if is_static or zero_point is None else zero_point


def _absent(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a scale and a zero point without elements, for an operator that computes none.

    The scale and zero point that the caller passed cannot be returned, because an operator must not return its input.
    None cannot be returned either, because the schemas below declare Tensors.
    """
    return x.new_empty(0, dtype=torch.float32), x.new_empty(0, dtype=torch.int32)


def _fake_quantize(
    kernels: Kernels, x: Tensor, scale: Tensor | None, zero_point: Tensor | None, dim: Sequence[int] | None,
    block_size: int | None, symmetric: bool,
) -> Quantized:  # fmt: skip
    return _quantize(kernels, x, scale, zero_point, dim, block_size, symmetric, None, fake=True)


def _dequantize(
    kernels: Kernels, values: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: int | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    plan = Plan.of(values, groups_of(values, scale, None, block_size))
    out = torch.empty_strided(values.shape, plan.walk, dtype=dtype, device=values.device)
    if values.numel() > 0:
        sides = (_in_order(side, plan.scale) for side in (scale, zero_point))
        kernels._dequantize_int8_(_with_strides(values, plan.walk), *sides, out, plan.layout)
    return _with_strides(out, plan.out)


def _straight_through(
    kernels: Kernels, grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: int | None
) -> Tensor:
    plan = Plan.of(x, groups_of(x, scale, None, block_size))
    out = torch.empty_strided(x.shape, plan.walk, dtype=x.dtype, device=x.device)
    if x.numel() > 0:
        sides = (_in_order(side, plan.scale) for side in (scale, zero_point))
        grad, x = _with_strides(grad, plan.walk, x.dtype), _with_strides(x, plan.walk)
        kernels._straight_through_int8_(grad, x, *sides, out, plan.layout)
    return _with_strides(out, plan.out)


def _matmul(
    kernels: Kernels, a: Tensor, b: Tensor, a_scale: Tensor, a_zero_point: Tensor | None, b_scale: Tensor,
    b_zero_point: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype, out_scale: Tensor | None,
    out_zero_point: Tensor | None,
) -> Tensor:  # fmt: skip
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype if out_scale is None else torch.int8)
    if out.numel() > 0:
        sides = map(_contiguous, (a_scale, a_zero_point, b_scale, b_zero_point, bias))
        kernels._int8_matmul_(a, b, *sides, out, out_scale, out_zero_point)
    return out


def out_pixels(
    x: Sequence[int], weight: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[int, int]:
    """Return height and width of the output of a convolution of `x` [B, H, W, C] with `weight` [N, kh, kw, C]."""
    height, width = (
        (x[1 + d] + 2 * padding[d] - dilation[d] * (weight[1 + d] - 1) - 1) // stride[d] + 1 for d in range(2)
    )
    return height, width


def _of_pixels(side: Tensor | None, pixels: int) -> Tensor | None:
    """Return scales or zero points with one element for each output pixel, if there is one for each image."""
    return side if side is None or side.numel() == 1 else side.flatten().repeat_interleave(pixels)


def _conv2d(
    kernels: Kernels, x: Tensor, weight: Tensor, x_scale: Tensor, x_zero_point: Tensor | None, weight_scale: Tensor,
    bias: Tensor | None, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    out_dtype: torch.dtype, out_scale: Tensor | None, out_zero_point: Tensor | None,
) -> Tensor:  # fmt: skip
    out = _traced_conv2d(
        x, weight, x_scale, x_zero_point, weight_scale, bias, stride, padding, dilation, out_dtype, out_scale,
        out_zero_point,
    )  # fmt: skip
    if out.numel() == 0:
        return out
    x, weight = x.contiguous(), weight.contiguous()
    scale, zero_point = (_of_pixels(side, out.shape[1] * out.shape[2]) for side in (x_scale, x_zero_point))
    sides = scale, zero_point, weight_scale.contiguous()
    bias = _contiguous(bias)
    if is_plain_product(weight.shape, stride, padding):
        a, b, rows = x.flatten(0, 2), weight.flatten(1).t(), out.flatten(0, 2)
        kernels._int8_matmul_(a, b, *sides, None, bias, rows, out_scale, out_zero_point)
    else:
        kernels._int8_conv2d_(x, weight, *sides, bias, stride, padding, dilation, out, out_scale, out_zero_point)
    return out


def is_plain_product(weight: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> bool:
    """Return whether each output pixel reads only the pixel in its place: the convolution is then a plain product."""
    return tuple(weight[1:3]) == tuple(stride) == (1, 1) and tuple(padding) == (0, 0)


def _linear(kernels: Kernels, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    out = x.new_empty((x.shape[0], weight.shape[0]))
    if out.numel() > 0:
        x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
        kernels._int8_linear_(x, weight.contiguous(), _contiguous(scale), _contiguous(bias), out)
    return out


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


# ----------------------------------------------------------------------------------------------------- the reference
def _as_traced(
    x: Tensor, groups: Groups, made: tuple[Tensor, Tensor | None, Tensor | None], scale: Tensor | None,
    *, is_numbered: bool = False,
) -> Quantized:  # fmt: skip
    """Return the results of the reference with the strides that the fake gives them.

    Args:
        x: The quantized tensor.
        groups: Its groups.
        made: Values, scale and zero point from the reference.
        scale: The scale that the caller passed, or None.
        is_numbered: As in `Plan.of`.
    """
    plan, (none, no_zero_point) = Plan.of(x, groups, is_numbered=is_numbered), _absent(x)
    own_scale, own_zero_point = made[1:] if scale is None else (None, None)
    return (
        _with_strides(made[0], plan.out),
        none if own_scale is None else _with_strides(own_scale, plan.scale),
        no_zero_point if own_zero_point is None else _with_strides(own_zero_point, plan.scale),
    )


def _reference_quantize(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, dim: list[int] | None, block_size: int | None,
    symmetric: bool, seed: int | None,
) -> Quantized:  # fmt: skip
    made = reference.quantize_int8(
        x, dim=dim, block_size=block_size, symmetric=symmetric, seed=seed, scale=scale, zero_point=zero_point
    )
    return _as_traced(x, groups_of(x, scale, dim, block_size), made, scale, is_numbered=seed is not None)


def _reference_fake_quantize(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, dim: list[int] | None, block_size: int | None,
    symmetric: bool,
) -> Quantized:  # fmt: skip
    made = reference.fake_quantize_int8(
        x, dim=dim, block_size=block_size, symmetric=symmetric, scale=scale, zero_point=zero_point
    )
    return _as_traced(x, groups_of(x, scale, dim, block_size), made, scale)


def _reference_dequantize(
    values: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: int | None, dtype: torch.dtype
) -> Tensor:
    out = reference.dequantize_int8(values, scale, zero_point, block_size=block_size, dtype=dtype)
    return _with_strides(out, Plan.of(values, groups_of(values, scale, None, block_size)).out)


def _reference_straight_through(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: int | None
) -> Tensor:
    out = reference.straight_through_int8(grad, x, scale, zero_point, block_size=block_size)
    return _with_strides(out, Plan.of(x, groups_of(x, scale, None, block_size)).out, x.dtype)


# ------------------------------------------------------------------------------------------------------------- checks
def _check_quantize(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, dim: Sequence[int] | None, block_size: int | None,
    symmetric: bool, seed: int | None = None, *, op: str = "quantize_int8",
) -> None:  # fmt: skip
    check_values(op, "x", x, DTYPE_CODES)
    check_blocks(op, x, block_size)
    if block_size is not None and dim is not None and [d % x.dim() for d in dim] != [x.dim() - 1]:
        raise ValueError(f"{op}: dim must be None or -1 with block_size, which splits the last dimension, got {dim}")
    if dim and x.dim() == 0:
        raise IndexError(f"{op}: dim must be None for a 0-dim tensor, which is one group, got {tuple(dim)}")
    for d in dim or ():
        if not -x.dim() <= d < x.dim():
            raise IndexError(f"{op}: dim must be in [{-x.dim()}, {x.dim() - 1}], got {d}")
    if dim is not None and len({d % max(x.dim(), 1) for d in dim}) != len(dim):
        raise ValueError(f"{op}: dim must name each dimension at most once, got {tuple(dim)}")
    if scale is not None:
        _check_scale(op, "x", x, scale, zero_point, block_size)
    elif zero_point is not None:
        raise ValueError(f"{op}: zero_point must be None without scale, got a tensor; pass scale too")


def _check_dequantize(
    values: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: int | None, dtype: torch.dtype
) -> None:
    op = "dequantize_int8"
    check_are_tensors(op, **{"q.values": values, "q.scale": scale})
    check_values(op, "values", values, (torch.int8,))
    check_blocks(op, values, block_size)
    _check_scale(op, "values", values, scale, zero_point, block_size)
    _check_float(op, "dtype", dtype)


def _check_straight_through(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: int | None
) -> None:
    op = "straight_through_int8"
    check_values(op, "x", x, DTYPE_CODES)
    check_values(op, "grad", grad, DTYPE_CODES)
    if grad.shape != x.shape or grad.device != x.device:
        raise ValueError(
            f"{op}: grad must have x's shape {tuple(x.shape)} on {x.device}, got {tuple(grad.shape)} on {grad.device}"
        )
    check_blocks(op, x, block_size)
    _check_scale(op, "x", x, scale, zero_point, block_size)


def _check_float(op: str, name: str, dtype: torch.dtype) -> None:
    check_dtype(op, name, dtype)
    if dtype not in DTYPE_CODES:
        raise TypeError(f"{op}: {name} must be {_FLOATS}, got {dtype}")


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


def _check_parameter(op: str, name: str, tensor: Tensor, dtype: torch.dtype, of: str, x: Tensor) -> None:
    """Raise unless `tensor` is dense, has the dtype, and is on the device of `x`.

    `of` is the name of `x` in the message.
    """
    check_are_tensors(op, **{name: tensor})
    check_is_dense(op, name, tensor)
    if tensor.dtype is not dtype:
        raise TypeError(f"{op}: {name} must be {str(dtype).removeprefix('torch.')}, got {tensor.dtype}")
    if tensor.device != x.device:
        raise ValueError(f"{op}: {name} must be on {x.device} as {of} is, got {tensor.device}; move it there")


def _check_matmul(
    a: Tensor, b: Tensor, a_scale: Tensor, a_zero_point: Tensor | None, b_scale: Tensor, b_zero_point: Tensor | None,
    bias: Tensor | None, out_dtype: torch.dtype, out_scale: Tensor | None, out_zero_point: Tensor | None,
) -> None:  # fmt: skip
    op = "int8_matmul"
    for name, x in (("a", a), ("b", b)):
        check_values(op, name, x, (torch.int8,))
        if x.dim() != 2:
            raise ValueError(f"{op}: {name} must have 2 dimensions, got {x.dim()}")
    _check_side("a", a, a_scale, a_zero_point, 1)
    _check_side("b", b, b_scale, b_zero_point, 0)
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"{op}: b must have {a.shape[1]} rows, as many as a has columns, got {b.shape[0]}")
    if a.device != b.device:
        raise ValueError(f"{op}: b must be on {a.device} as a is, got {b.device}")
    if a.shape[1] > MAX_K:
        raise ValueError(
            f"{op}: the inner dimension must be at most {MAX_K}, beyond which int32 sums may overflow, got "
            f"{a.shape[1]}; split it and add the results"
        )
    _check_result(op, "a", a, b.shape[1], bias, out_dtype, out_scale, out_zero_point)


def _check_result(
    op: str, name: str, x: Tensor, columns: int, bias: Tensor | None, out_dtype: torch.dtype, out_scale: Tensor | None,
    out_zero_point: Tensor | None,
) -> None:  # fmt: skip
    """Raise if an argument that says what becomes of sums does not fit. `name` is the name of `x` in messages."""
    if bias is not None:
        _check_parameter(op, "bias", bias, torch.float32, name, x)
        if list(bias.shape) != [columns]:
            raise ValueError(f"{op}: bias must have shape ({columns},), got {tuple(bias.shape)}")
    _check_float(op, "out_dtype", out_dtype)
    check_scalar(op, "out_scale", out_scale, x.device)
    if out_zero_point is not None:
        _check_parameter(op, "out_zero_point", out_zero_point, torch.int32, name, x)
        if out_scale is None or out_zero_point.numel() != 1:
            raise ValueError(
                f"{op}: out_zero_point must have one element, and be given only with out_scale, got "
                f"{out_zero_point.numel()} elements {'without' if out_scale is None else 'with'} out_scale"
            )


def _check_side(name: str, codes: Tensor, scale: Tensor, zero_point: Tensor | None, inner: int) -> None:
    """Raise if scales and zero points of an operand of `int8_matmul` do not fit.

    `inner` is the dimension over which the product sums. There must be one scale for the whole operand, or one for each
    index of the other dimension. There must be as many zero points as scales, or none.
    """
    op = "int8_matmul"
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


def _check_zero_points(op: str, name: str, codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> None:
    """Raise unless there are as many zero points as scales, or none."""
    if zero_point is not None:
        _check_parameter(op, f"{name}.zero_point", zero_point, torch.int32, name, codes)
        if zero_point.numel() != scale.numel():
            raise ValueError(
                f"{op}: {name} must have as many zero points as scales ({scale.numel()}), got {zero_point.numel()}"
            )


def _check_conv2d(
    x: Tensor, weight: Tensor, x_scale: Tensor, x_zero_point: Tensor | None, weight_scale: Tensor, bias: Tensor | None,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], out_dtype: torch.dtype,
    out_scale: Tensor | None, out_zero_point: Tensor | None,
) -> None:  # fmt: skip
    op = "int8_conv2d"
    for name, codes in (("x", x), ("weight", weight)):
        check_values(op, name, codes, (torch.int8,))
        if codes.dim() != 4:
            raise ValueError(
                f"{op}: {name} must have 4 dimensions, with channels as the last, got {codes.dim()}; give a line of "
                "pixels the height 1"
            )
    if weight.shape[3] != x.shape[3] or weight.device != x.device:
        raise ValueError(
            f"{op}: weight must have {x.shape[3]} channels on {x.device} as x has, got {weight.shape[3]} on "
            f"{weight.device}"
        )
    terms = math.prod(weight.shape[1:])
    if not 0 < terms <= MAX_K:
        raise ValueError(
            f"{op}: weight must have from 1 to {MAX_K} elements for each output channel, beyond which int32 sums may "
            f"overflow, got {terms}"
        )
    for name, sizes, least in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
        if len(sizes) != 2 or any(not least <= size < 2**31 for size in sizes):
            raise ValueError(
                f"{op}: {name} must be one or two ints that are at least {least} and below 2^31, got {tuple(sizes)}"
            )
    if any(size < 1 for size in out_pixels(x.shape, weight.shape, stride, padding, dilation)):
        raise ValueError(
            f"{op}: x must be at least as large as the dilated kernel after padding, got {tuple(x.shape[1:3])} pixels "
            f"for a kernel of {tuple(weight.shape[1:3])}, padding {tuple(padding)} and dilation {tuple(dilation)}"
        )
    pixels = x.shape[0] * max(x.shape[1], 1) * max(x.shape[2], 1)
    # A comparison of a symbolic number would limit the batch size in torch.export. C++ checks sizes in each call.
    if isinstance(pixels, int) and pixels >= 2**32:
        raise ValueError(
            f"{op}: x must have fewer than 2^32 pixels, got {tuple(x.shape[:3])}; give fewer images at a time"
        )
    _check_scale_of_first(op, "x", x, x_scale, x_zero_point, "image")
    _check_scale_of_first(op, "weight", weight, weight_scale, None, "output channel")
    _check_result(op, "x", x, weight.shape[0], bias, out_dtype, out_scale, out_zero_point)


def _check_scale_of_first(
    op: str, name: str, codes: Tensor, scale: Tensor, zero_point: Tensor | None, what: str
) -> None:
    """Raise unless there is one scale for `codes`, or one for each index of the first dimension."""
    _check_parameter(op, f"{name}.scale", scale, torch.float32, name, codes)
    if scale.numel() != 1 and list(scale.shape) != [codes.shape[0], 1, 1, 1]:
        raise ValueError(
            f"{op}: {name} must be quantized as a whole or per {what} (dim=(1, 2, 3), scales of shape "
            f"{(codes.shape[0], 1, 1, 1)}), got scales of shape {tuple(scale.shape)}"
        )
    _check_zero_points(op, name, codes, scale, zero_point)


def _check_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
    op = "int8_linear"
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
    if bias is not None:
        _check_parameter(op, "bias", bias, x.dtype, "x", x)
        if list(bias.shape) != [weight.shape[0]]:
            raise ValueError(f"{op}: bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")


# ------------------------------------------------------------------------------------------------------- the operators
def _traced_quantize(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, dim: list[int] | None, block_size: int | None,
    symmetric: bool, seed: int | None, *, fake: bool = False,
) -> Quantized:  # fmt: skip
    groups = groups_of(x, scale, dim, block_size)
    plan = Plan.of(x, groups, is_numbered=seed is not None)
    out = x.new_empty_strided(x.shape, plan.out, dtype=x.dtype if fake else torch.int8)
    none, no_zero_point = _absent(x)
    if scale is not None:
        return out, none, no_zero_point
    scales = groups.scale_shape, plan.scale
    own = x.new_empty_strided(*scales, dtype=torch.float32)
    return out, own, no_zero_point if symmetric else x.new_empty_strided(*scales, dtype=torch.int32)


def _traced_fake_quantize(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, dim: list[int] | None, block_size: int | None,
    symmetric: bool,
) -> Quantized:  # fmt: skip
    return _traced_quantize(x, scale, zero_point, dim, block_size, symmetric, None, fake=True)


def _traced_dequantize(
    values: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: int | None, dtype: torch.dtype
) -> Tensor:
    plan = Plan.of(values, groups_of(values, scale, None, block_size))
    return values.new_empty_strided(values.shape, plan.out, dtype=dtype)


def _traced_straight_through(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: int | None
) -> Tensor:
    return x.new_empty_strided(x.shape, Plan.of(x, groups_of(x, scale, None, block_size)).out)


def _traced_matmul(
    a: Tensor, b: Tensor, a_scale: Tensor, a_zero_point: Tensor | None, b_scale: Tensor, b_zero_point: Tensor | None,
    bias: Tensor | None, out_dtype: torch.dtype, out_scale: Tensor | None, out_zero_point: Tensor | None,
) -> Tensor:  # fmt: skip
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype if out_scale is None else torch.int8)


def _traced_conv2d(
    x: Tensor, weight: Tensor, x_scale: Tensor, x_zero_point: Tensor | None, weight_scale: Tensor, bias: Tensor | None,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], out_dtype: torch.dtype,
    out_scale: Tensor | None, out_zero_point: Tensor | None,
) -> Tensor:  # fmt: skip
    pixels = out_pixels(x.shape, weight.shape, stride, padding, dilation)
    return x.new_empty((x.shape[0], *pixels, weight.shape[0]), dtype=out_dtype if out_scale is None else torch.int8)


def _traced_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


# Returns codes, scale and zero point. If the scale was passed by the caller, the returned scale and zero point are
# tensors without elements. For symmetric codes the returned zero point has no elements either.
quantize_int8 = operator(
    "quantize_int8(Tensor x, Tensor? scale, Tensor? zero_point, int[]? dim, int? block_size, bool symmetric, "
    "int? seed) -> (Tensor, Tensor, Tensor)",
    check=_check_quantize,
    reference=_reference_quantize,
    fake=_traced_quantize,
    launch=_quantize,
)
# Returns the same as `quantize_int8`, but with dequantized values in place of codes.
fake_quantize_int8 = operator(
    "fake_quantize_int8(Tensor x, Tensor? scale, Tensor? zero_point, int[]? dim, int? block_size, bool symmetric) -> "
    "(Tensor, Tensor, Tensor)",
    check=functools.partial(_check_quantize, op="fake_quantize_int8"),
    reference=_reference_fake_quantize,
    fake=_traced_fake_quantize,
    launch=_fake_quantize,
    is_differentiable=True,
)
dequantize_int8 = operator(
    "dequantize_int8(Tensor values, Tensor scale, Tensor? zero_point, int? block_size, ScalarType dtype) -> Tensor",
    check=_check_dequantize,
    reference=_reference_dequantize,
    fake=_traced_dequantize,
    launch=_dequantize,
)
straight_through_int8 = operator(
    "straight_through_int8(Tensor grad, Tensor x, Tensor scale, Tensor? zero_point, int? block_size) -> Tensor",
    check=_check_straight_through,
    reference=_reference_straight_through,
    fake=_traced_straight_through,
    launch=_straight_through,
)
int8_matmul = operator(
    "int8_matmul(Tensor a, Tensor b, Tensor a_scale, Tensor? a_zero_point, Tensor b_scale, Tensor? b_zero_point, "
    "Tensor? bias, ScalarType out_dtype, Tensor? out_scale, Tensor? out_zero_point) -> Tensor",
    check=_check_matmul,
    reference=lambda *args: reference.int8_matmul(*args).contiguous(),
    fake=_traced_matmul,
    launch=_matmul,
    delegates=True,
)
int8_conv2d = operator(
    "int8_conv2d(Tensor x, Tensor weight, Tensor x_scale, Tensor? x_zero_point, Tensor weight_scale, Tensor? bias, "
    "int[] stride, int[] padding, int[] dilation, ScalarType out_dtype, Tensor? out_scale, Tensor? out_zero_point) -> "
    "Tensor",
    check=_check_conv2d,
    reference=lambda *args: reference.int8_conv2d(*args).contiguous(),
    fake=_traced_conv2d,
    launch=_conv2d,
    delegates=True,
)
int8_linear = operator(
    "int8_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor",
    check=_check_linear,
    reference=reference.int8_linear,
    fake=_traced_linear,
    launch=_linear,
    delegates=True,
)


def _prefers_triton(gpu: int) -> bool:
    """Return whether large int8 products and convolutions on this GPU are Triton's. C++ calls this once for each GPU.

    It is True only for compute capability 9.0, the only one on which Triton was measured.
    """
    reasons = importlib.import_module("amp_kernels.backends").backend_reasons(f"cuda:{gpu}")
    return reasons["triton"] is None and torch.cuda.get_device_capability(gpu) == (9, 0)


if _loader.has_cuda():
    LIBRARY.define("_prefers_triton(int gpu) -> bool")
    LIBRARY.impl("_prefers_triton", _prefers_triton, "CompositeExplicitAutograd")


def straight_through(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: int | None = None
) -> Tensor:
    """Return the gradient of `fake_quantize_int8` as a result of `torch.where`, which can be differentiated again.

    The operator `straight_through_int8` has no gradient. If its result were returned, the derivative of this result
    would silently be 0. So here the operator computes only where the gradient passes through.
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
