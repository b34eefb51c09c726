"""int8: how a tensor is cut into groups, and the operators made of kernel ops.

A group is what shares a scale. `Grouping` says which dimensions it spans; `layout` turns that, with the strides of the
tensors, into the nested loops that every kernel walks (csrc/int8.h).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ._backends import Kernels


class Grouping(NamedTuple):
    """Dimensions of a tensor that share a scale: `reduced` ones, or blocks of the last."""

    shape: tuple[int, ...]
    reduced: frozenset[int]
    block_size: int | None = None

    @property
    def scale_shape(self) -> list[int]:
        """As `torch.amax(keepdim=True)`; of blocks their number."""
        if self.block_size is not None:
            return [*self.shape[:-1], -(-self.shape[-1] // self.block_size)]
        return [1 if d in self.reduced else size for d, size in enumerate(self.shape)]


def grouping(shape: Sequence[int], scale: Tensor | None, dim: Sequence[int] | None, block_size: int | None) -> Grouping:
    """That of blocks, of a given scale by its shape, or over `dim` (none: everything), in this order."""
    every = range(len(shape))
    if block_size is not None:
        return Grouping(tuple(shape), frozenset(), block_size)
    if scale is not None:
        return Grouping(tuple(shape), frozenset(d for d in every if scale.numel() == 1 or scale.shape[d] == 1))
    return Grouping(tuple(shape), frozenset(d % len(shape) for d in (dim or every)))


# ------------------------------------------------------------------------------------------------------ the layout
class _Level(NamedTuple):
    size: int
    x: int
    out: int
    position: int
    scale: int
    kept: bool

    def merged(self, inner: _Level) -> _Level | None:
        """Both as one level, if their strides allow it."""
        if self.kept != inner.kept:
            return None
        mine, theirs = self[1:5], inner[1:5]
        if any(outer != stride * inner.size for outer, stride in zip(mine, theirs, strict=True)):
            return None
        return inner._replace(size=self.size * inner.size)


_UNUSED = (1, 0, 0, 0, 0)


def layout(
    groups: Grouping, x: Sequence[int], out: Sequence[int], scale: Sequence[int], *, indexed: bool = False
) -> list[int] | None:
    """struct Int8Layout for these strides of the tensors, as a flat list; None if four levels cannot express it.

    `indexed`: with the strides of the logical index, which random bits are numbered by; without them (zeros) more
    dimensions can be one level.
    """
    position = _row_major(groups.shape) if indexed else [0] * len(groups.shape)
    levels = [
        _Level(size, x[d], out[d], position[d], 0 if d in groups.reduced else scale[d], d not in groups.reduced)
        for d, size in enumerate(groups.shape)
    ]
    length, blocks = None, groups.block_size
    tail: list[_Level] = []
    if blocks is not None:
        last = levels.pop()
        length, count = last.size, groups.scale_shape[-1]
        tail.append(_Level(count, last.x * blocks, last.out * blocks, last.position * blocks, scale[-1], True))
        inner = blocks if count > 1 else last.size
        tail.append(_Level(inner, last.x, last.out, last.position, 0, False))
    levels = _merge(sorted((level for level in levels if level.size > 1), key=lambda level: -level.out)) + tail
    # From the inside out: R2, G2, R1, G1.
    places: list[_Level | None] = []
    while levels or len(places) < 4:
        is_kept_place = len(places) % 2 == 1
        fits = bool(levels) and levels[-1].kept == is_kept_place
        places.append(levels.pop() if fits else None)
    if len(places) > 4:
        return None
    outward = [_UNUSED if level is None else level[:5] for level in reversed(places)]
    sizes, xs, outs, positions, scales = zip(*outward, strict=True)
    if length is None:
        length = sizes[2] * sizes[3]
    return [*sizes, *xs, *outs, *positions, scales[0], scales[2], length]


def _row_major(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def _merge(levels: Sequence[_Level]) -> list[_Level]:
    merged: list[_Level] = []
    for level in levels:
        both = merged[-1].merged(level) if merged else None
        if both is None:
            merged.append(level)
        else:
            merged[-1] = both
    return merged


class _Plan(NamedTuple):
    """What a kernel gets: `x` itself or a copy of it, memory for the result, the strides of scales, and the layout."""

    x: Tensor
    out: Tensor
    scale: tuple[int, ...]
    layout: list[int]


def _plan(
    groups: Grouping, x: Tensor, dtype: torch.dtype, scale: Sequence[int] | None = None, *, indexed: bool = False
) -> _Plan | None:
    """For a result in the dense layout nearest to x's; x is copied only if its own strides do not fit.

    `scale`: the strides of a given one. None where dimensions interlock too deeply for four levels.
    """
    out = like(groups, x, dtype)
    strides = tuple(scale_strides(groups, out) if scale is None else scale)
    found = layout(groups, x.stride(), out.stride(), strides, indexed=indexed)
    if found is None:
        x = torch.empty_strided(x.shape, out.stride(), dtype=x.dtype, device=x.device).copy_(x)
        found = layout(groups, x.stride(), out.stride(), strides, indexed=indexed)
    return None if found is None else _Plan(x, out, strides, found)


def like(groups: Grouping, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for a result."""
    # Blocks are cut from the last dimension, which must then be the innermost of the result.
    form = torch.preserve_format if groups.block_size is None else torch.contiguous_format
    return torch.empty_like(x, dtype=dtype, memory_format=form)


def scale_strides(groups: Grouping, out: Tensor) -> list[int]:
    """Scales lie in the order of their groups in `out`, so that kept dimensions that are one there are one here."""
    shape, strides = groups.scale_shape, [1] * out.dim()
    step = 1
    for d in sorted(range(out.dim()), key=lambda d: (out.stride(d), -d)):
        strides[d] = step
        step *= shape[d]
    return strides


# --------------------------------------------------------------------------------------------------- the operators
def quantize(
    ops: Kernels,
    x: Tensor,
    groups: Grouping,
    dtype: torch.dtype,
    scale: Tensor | None,
    zero_point: Tensor | None,
    symmetric: bool,
    seed: int | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes (`dtype` int8) or fake-quantized values (x's dtype) with scale and zero point, given or computed."""
    is_static = scale is not None
    plan = _plan(groups, x, dtype, scale.stride() if scale is not None else None, indexed=seed is not None)
    if plan is None:
        return _quantize_by_element(ops, x, groups, dtype, scale, zero_point, symmetric, seed)
    if scale is None:
        scale = torch.empty_strided(groups.scale_shape, plan.scale, dtype=torch.float32, device=x.device).fill_(1.0)
        zero_point = None if symmetric else torch.zeros_like(scale, dtype=torch.int32)
    if x.numel() > 0:
        ops._quantize_int8_(plan.x, plan.out, scale, zero_point, plan.layout, is_static, seed is not None, seed or 0)
    return plan.out, scale, zero_point


def dequantize(
    ops: Kernels, values: Tensor, groups: Grouping, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype
) -> Tensor:
    out = like(groups, values, dtype)
    if values.numel() == 0:
        return out
    # Kernels know codes as dense.
    codes = values if values.stride() == out.stride() else torch.empty_like(out, dtype=torch.int8).copy_(values)
    found = layout(groups, out.stride(), codes.stride(), scale.stride())
    if found is None:
        every, parameters = _by_element(groups, scale, zero_point)
        return out.copy_(dequantize(ops, values.contiguous(), every, *parameters, dtype))
    ops._dequantize_int8_(codes, scale, zero_point, out, found)
    return out


def straight_through(
    ops: Kernels, grad: Tensor, x: Tensor, groups: Grouping, scale: Tensor, zero_point: Tensor | None
) -> Tensor:
    plan = _plan(groups, x, x.dtype, scale.stride())
    if plan is None:
        every, parameters = _by_element(groups, scale, zero_point)
        out = like(groups, x, x.dtype)
        return out.copy_(straight_through(ops, grad, x.contiguous(), every, *parameters))
    if x.numel() == 0:
        return plan.out
    if grad.stride() != plan.out.stride() or grad.dtype != x.dtype:
        grad = torch.empty_like(plan.out).copy_(grad)
    ops._straight_through_int8_(grad, plan.x, scale, zero_point, plan.out, plan.layout)
    return plan.out


# Dimensions that interlock too deeply for four levels cost another pass: every element gets a scale of its own.
def _quantize_by_element(
    ops: Kernels,
    x: Tensor,
    groups: Grouping,
    dtype: torch.dtype,
    scale: Tensor | None,
    zero_point: Tensor | None,
    symmetric: bool,
    seed: int | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    out = like(groups, x, dtype)
    if scale is None:
        own, own_zero_point = _scale_of_rows(ops, x, groups, symmetric)
        strides = scale_strides(groups, out)
        scale = torch.empty_strided(groups.scale_shape, strides, dtype=torch.float32, device=x.device).copy_(own)
        zero_point = (
            own_zero_point
            if own_zero_point is None
            else torch.empty_like(scale, dtype=torch.int32).copy_(own_zero_point)
        )
    every, parameters = _by_element(groups, scale, zero_point)
    values, _, _ = quantize(ops, x.contiguous(), every, dtype, *parameters, symmetric, seed)
    return out.copy_(values), scale, zero_point


def _scale_of_rows(ops: Kernels, x: Tensor, groups: Grouping, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point, from a copy of x in which every group is a row."""
    order = sorted(range(x.dim()), key=lambda d: (d in groups.reduced, d))
    back = sorted(range(x.dim()), key=order.__getitem__)
    rows = x.permute(order).contiguous()
    reduced = frozenset(range(x.dim() - len(groups.reduced), x.dim()))
    _, scale, zero_point = quantize(
        ops, rows, Grouping(tuple(rows.shape), reduced), torch.int8, None, None, symmetric, None
    )
    return scale.permute(back), None if zero_point is None else zero_point.permute(back)


def _by_element(
    groups: Grouping, scale: Tensor, zero_point: Tensor | None
) -> tuple[Grouping, tuple[Tensor, Tensor | None]]:
    spread = scale.expand(groups.shape).contiguous()
    zero = None if zero_point is None else zero_point.expand(groups.shape).contiguous()
    return Grouping(groups.shape, frozenset()), (spread, zero)
