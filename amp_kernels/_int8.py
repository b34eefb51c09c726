"""int8: how a tensor is cut into groups, and the operators made of kernel ops.

A group is what shares a scale. `Grouping` says which dimensions it spans; `layout` turns that, with the strides of the
tensors, into the nested loops that every kernel walks (csrc/int8.h).
"""

from __future__ import annotations

import functools
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


def grouping(
    shape: Sequence[int], scale: Sequence[int] | None, dim: Sequence[int] | None, block_size: int | None
) -> Grouping:
    """That of blocks, of a given scale by its shape, or over `dim` (none: everything), in this order."""
    every = range(len(shape))
    if block_size is not None:
        return Grouping(tuple(shape), frozenset(), block_size)
    if scale is not None:
        is_one = math.prod(scale) == 1
        return Grouping(tuple(shape), frozenset(d for d in every if is_one or scale[d] == 1))
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
        last, count = levels.pop(), groups.scale_shape[-1]
        inner = blocks if count > 1 else last.size
        tail.append(_Level(count, last.x * blocks, last.out * blocks, last.position * blocks, scale[-1], True))
        tail.append(_Level(inner, last.x, last.out, last.position, 0, False))
        if count * inner == last.size:  # as if the blocks were a dimension
            levels, tail = levels + tail, []
        else:
            length = last.size
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


class Plan(NamedTuple):
    """What a call needs that shapes and strides decide."""

    groups: Grouping
    out: tuple[int, ...]  # strides of the result, the dense layout nearest to x's
    scale_shape: tuple[int, ...]
    scale: tuple[int, ...]  # strides of scale and zero point
    layout: tuple[int, ...] | None  # None where dimensions interlock too deeply for four levels
    copies: bool  # x has to be laid out as the result first


# Python takes longer to find a plan than a kernel to quantize 50,000 elements.
@functools.lru_cache(maxsize=1024)
def plan(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dim: tuple[int, ...] | None,
    block_size: int | None,
    *,
    scale: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    indexed: bool = False,
) -> Plan:
    """Of a tensor with these strides; `scale`: shape and strides of a given one."""
    groups = grouping(shape, None if scale is None else scale[0], dim, block_size)
    out = like(groups, torch.empty_strided(shape, strides, device="meta"), torch.int8)
    scales = tuple(scale_strides(groups, out)) if scale is None else scale[1]
    found = [layout(groups, x, out.stride(), scales, indexed=indexed) for x in (strides, out.stride())]
    copies, best = found[0] is None, found[0] or found[1]
    levels = None if best is None else tuple(best)
    return Plan(groups, out.stride(), tuple(groups.scale_shape), scales, levels, copies)


def _laid_out(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


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
    dtype: torch.dtype,
    dim: Sequence[int] | None,
    block_size: int | None,
    scale: Tensor | None,
    zero_point: Tensor | None,
    symmetric: bool,
    seed: int | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes (`dtype` int8) or fake-quantized values (x's dtype) with scale and zero point, given or computed."""
    given = None if scale is None else (scale.shape, scale.stride())
    reduced = None if dim is None else tuple(dim)
    made = plan(x.shape, x.stride(), reduced, block_size, scale=given, indexed=seed is not None)
    if made.layout is None and x.numel() > 0:
        return _quantize_by_element(ops, x, made, dtype, scale, zero_point, symmetric, seed)
    out = torch.empty_strided(x.shape, made.out, dtype=dtype, device=x.device)
    if scale is None:
        scale = torch.empty_strided(made.scale_shape, made.scale, dtype=torch.float32, device=x.device)
        zero_point = None if symmetric else torch.empty_like(scale, dtype=torch.int32)
    if x.numel() > 0:
        x = _laid_out(x, made.out) if made.copies else x
        is_static = given is not None
        ops._quantize_int8_(x, out, scale, zero_point, made.layout, is_static, seed is not None, seed or 0)
    elif given is None:
        scale.fill_(1.0)
        zero_point = None if zero_point is None else zero_point.fill_(0)
    return out, scale, zero_point


def dequantize(
    ops: Kernels, values: Tensor, block_size: int | None, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype
) -> Tensor:
    made = plan(values.shape, values.stride(), None, block_size, scale=(scale.shape, scale.stride()))
    if values.stride() != made.out:  # kernels know codes as dense
        return dequantize(ops, _laid_out(values, made.out), block_size, scale, zero_point, dtype)
    out = torch.empty_strided(values.shape, made.out, dtype=dtype, device=values.device)
    if values.numel() == 0:
        return out
    if made.layout is None:
        spread, zero = _by_element(made.groups, scale, zero_point)
        return out.copy_(dequantize(ops, values.contiguous(), None, spread, zero, dtype))
    ops._dequantize_int8_(values, scale, zero_point, out, made.layout)
    return out


def straight_through(
    ops: Kernels, grad: Tensor, x: Tensor, block_size: int | None, scale: Tensor, zero_point: Tensor | None
) -> Tensor:
    made = plan(x.shape, x.stride(), None, block_size, scale=(scale.shape, scale.stride()))
    out = torch.empty_strided(x.shape, made.out, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    if made.layout is None:
        spread, zero = _by_element(made.groups, scale, zero_point)
        return out.copy_(straight_through(ops, grad, x.contiguous(), None, spread, zero))
    if grad.stride() != made.out or grad.dtype != x.dtype:
        grad = torch.empty_like(out).copy_(grad)
    x = _laid_out(x, made.out) if made.copies else x
    ops._straight_through_int8_(grad, x, scale, zero_point, out, made.layout)
    return out


# Dimensions that interlock too deeply for four levels cost another pass: every element gets a scale of its own.
def _quantize_by_element(
    ops: Kernels,
    x: Tensor,
    made: Plan,
    dtype: torch.dtype,
    scale: Tensor | None,
    zero_point: Tensor | None,
    symmetric: bool,
    seed: int | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    if scale is None:
        own, own_zero_point = _scale_of_rows(ops, x, made.groups, symmetric)
        scale = torch.empty_strided(made.scale_shape, made.scale, dtype=torch.float32, device=x.device).copy_(own)
        zero_point = (
            own_zero_point
            if own_zero_point is None
            else torch.empty_like(scale, dtype=torch.int32).copy_(own_zero_point)
        )
    spread = _by_element(made.groups, scale, zero_point)
    values, _, _ = quantize(ops, x.contiguous(), dtype, None, None, *spread, symmetric, seed)
    return _laid_out(values, made.out), scale, zero_point


def _scale_of_rows(ops: Kernels, x: Tensor, groups: Grouping, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point, from a copy of x in which every group is a row."""
    order = sorted(range(x.dim()), key=lambda d: (d in groups.reduced, d))
    back = sorted(range(x.dim()), key=order.__getitem__)
    rows = x.permute(order).contiguous()
    reduced = range(x.dim() - len(groups.reduced), x.dim())
    _, scale, zero_point = quantize(ops, rows, torch.int8, reduced, None, None, None, symmetric, None)
    return scale.permute(back), None if zero_point is None else zero_point.permute(back)


def _by_element(groups: Grouping, scale: Tensor, zero_point: Tensor | None) -> tuple[Tensor, Tensor | None]:
    def spread(side: Tensor) -> Tensor:
        if groups.block_size is not None:
            side = side.repeat_interleave(groups.block_size, -1)[..., : groups.shape[-1]]
        return side.expand(groups.shape).contiguous()

    return spread(scale), None if zero_point is None else spread(zero_point)
