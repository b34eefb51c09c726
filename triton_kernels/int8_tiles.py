"""How the int8 kernels of Triton walk an Int8Layout, in the words of csrc/int8.h.

A program takes a band of groups, or a piece of one (`pieces` programs share a band), in tiles of [ROWS, WIDTH]: some
rows by some neighbours of each. The scales of the band's groups stay in registers from tile to tile.

    by rows: a band is ROWS groups,                         by columns: a band is WIDTH columns,
    a tile a segment of each                                a tile ROWS of their rows

              WIDTH                                                    WIDTH
         [a a a a | a a a a | a ...   scale a                     [a b c d
    ROWS [b b b b | b b b b | b ...   scale b                ROWS  a b c d]  tile 0
         [c c c c | c c c c | c ...   scale c                     [a b c d
           tile 0    tile 1                                        a b c d]  tile 1
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl


# `sizes` are those of the four axes and the length; strides and positions are tuples over the axes: outer group, outer
# reduced, inner group, inner reduced.
@triton.jit
def positions_of_tile(
    sizes, band, tile,
    BY_COLUMNS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, VEC: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Positions of a tile's elements, every STEP-th of the inner axis, and which of them exist."""
    size_outer_group, size_outer_reduced, size_inner_group, size_inner_reduced, length = sizes
    outer = tl.arange(0, ROWS)[:, None].to(tl.int64)
    inner = (tl.arange(0, WIDTH // STEP) * STEP)[None, :].to(tl.int64)
    if BY_COLUMNS:
        bands = tl.cdiv(size_inner_group, WIDTH)
        outer_group = band // bands
        inner_group = band % bands * WIDTH + inner
        outer_reduced = tile * tl.full((), ROWS, tl.int64) + outer
        inner_reduced = tl.full((), 0, tl.int64)
        end = tl.where(outer_reduced < size_outer_reduced, length, 0)
        position = inner_group
    else:
        group = band * ROWS + outer
        outer_group = group // size_inner_group
        inner_group = group % size_inner_group
        tiles = tl.cdiv(size_inner_reduced, WIDTH).to(tl.int32)  # 32 bits: a division in every tile
        outer_reduced = (tile // tiles).to(tl.int64)
        inner_reduced = (tile % tiles).to(tl.int64) * WIDTH + inner
        rest = length - inner_group * size_inner_reduced  # a last block may be shorter than the others
        end = tl.where(outer_group < size_outer_group, tl.minimum(size_inner_reduced, rest), 0)
        position = inner_reduced
    if VEC > 1:
        end = end // VEC * VEC
    return (outer_group, outer_reduced, inner_group, inner_reduced), position < end


@triton.jit
def offsets_of(position, strides, BY_COLUMNS: tl.constexpr, VEC: tl.constexpr):
    """The inner stride is 1, and with VEC the others are multiples of it."""
    outer_group, outer_reduced, inner_group, inner_reduced = position
    stride_outer_group, stride_outer_reduced, stride_inner_group, _ = strides
    if VEC > 1:
        stride_outer_group = stride_outer_group // VEC * VEC
        stride_outer_reduced = stride_outer_reduced // VEC * VEC
        stride_inner_group = stride_inner_group // VEC * VEC
    row = outer_group * stride_outer_group + outer_reduced * stride_outer_reduced
    if BY_COLUMNS:
        return row + inner_group
    return row + inner_group * stride_inner_group + inner_reduced


@triton.jit
def groups_of_band(sizes, band, BY_COLUMNS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """(outer group, inner group) of each group of a band, and which of them exist, in the shape of a reduced tile."""
    size_inner_group = sizes[2]
    if BY_COLUMNS:
        bands = tl.cdiv(size_inner_group, WIDTH)
        outer_group = band // bands
        inner_group = band % bands * WIDTH + tl.arange(0, WIDTH)[None, :].to(tl.int64)
        exist = inner_group < size_inner_group
    else:
        group = band * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
        outer_group = group // size_inner_group
        inner_group = group % size_inner_group
        exist = outer_group < sizes[0]
    return outer_group, inner_group, exist


# ----------------------------------------------------------------------------------------------------------- plans
# Elements by whether access is wide: 16 a thread of four warps. By element each needs an address and a predicate of
# its own, so there are half as many.
_TILE = {True: 2048, False: 1024}
_REGISTER_TILE = {True: 16384, False: 8192}
_PROGRAMS = 1024  # enough to fill a device, about eight for each multiprocessor of the largest
_COLUMNS_OF_TILE = 64  # neighbours in memory that a tile of columns reads at least: 128 bytes of 16-bit elements


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one kernel walks a layout."""

    by_columns: bool
    rows: int  # of a tile
    width: int  # of a tile
    bands: int
    tiles: int  # of a band
    pieces: int  # of a band: programs that share its tiles
    warps: int

    @property
    def programs(self) -> int:
        return self.bands * self.pieces

    def constants(self) -> dict[str, Any]:
        return {"BY_COLUMNS": self.by_columns, "ROWS": self.rows, "WIDTH": self.width, "num_warps": self.warps}


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _is_by_columns(size: Sequence[int]) -> bool:
    return size[3] == 1


def _plan(size: Sequence[int], rows: int, width: int, wide: bool) -> Plan:
    outer_group, outer_reduced, inner_group, inner_reduced = size
    by_columns = _is_by_columns(size)
    if by_columns:
        bands, tiles = outer_group * math.ceil(inner_group / width), math.ceil(outer_reduced / rows)
    else:
        bands, tiles = math.ceil(outer_group * inner_group / rows), outer_reduced * math.ceil(inner_reduced / width)
    warps = min(max(rows * width // (512 if wide else 256), 1), 16)
    return Plan(by_columns, rows, width, bands, tiles, 1, warps)


@functools.lru_cache(maxsize=4096)
def streaming_plan(size: tuple[int, ...], wide: bool) -> Plan:
    """For kernels that need no extremes. A program has at most four tiles."""
    outer_group, outer_reduced, inner_group, inner_reduced = size
    if _is_by_columns(size):
        width = min(_power_of_two(inner_group), 4 * _COLUMNS_OF_TILE)
        rows = min(_power_of_two(outer_reduced), _TILE[wide] // width)
    else:
        width = min(_power_of_two(inner_reduced), _TILE[wide])
        rows = min(_power_of_two(outer_group * inner_group), _TILE[wide] // width)
    plan = _plan(size, rows, width, wide)
    return dataclasses.replace(plan, pieces=math.ceil(plan.tiles / 4))


@functools.lru_cache(maxsize=4096)
def register_plan(size: tuple[int, ...], wide: bool) -> Plan | None:
    """With whole groups in one tile, or None where they do not fit."""
    outer_group, outer_reduced, inner_group, inner_reduced = size
    if _is_by_columns(size):
        rows = _power_of_two(outer_reduced)
        width = min(_power_of_two(inner_group), max(_COLUMNS_OF_TILE, _TILE[wide] // rows))
    else:
        width = _power_of_two(inner_reduced)
        rows = min(_power_of_two(outer_group * inner_group), max(1, _TILE[wide] // width))
    fits = rows * width <= _REGISTER_TILE[wide] and (_is_by_columns(size) or outer_reduced == 1)
    return _plan(size, rows, width, wide) if fits else None


@functools.lru_cache(maxsize=4096)
def two_pass_plan(size: tuple[int, ...], wide: bool) -> Plan:
    """One program for each band where that fills the device; else several share a band."""
    plan = streaming_plan(size, wide)
    # Every program of the second kernel folds the extremes of all pieces of its band: few, beside its elements.
    most = min(_PROGRAMS // plan.bands, math.isqrt(size[1] * size[3]))
    return dataclasses.replace(plan, pieces=max(1, min(plan.tiles, most)))


class Layout:
    """The 15 integers of Int8Layout (csrc/int8.h)."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.size, self.x, self.out = (tuple(numbers[i : i + 4]) for i in (0, 4, 8))
        self.scale, self.length = tuple(numbers[12:14]), numbers[14]
        self.inner = 2 if _is_by_columns(self.size) else 3

    def _divides(self, n: int, strides: Sequence[int]) -> bool:
        """Whether rows are a multiple of n elements apart."""
        return all(strides[axis] % n == 0 for axis in range(4) if axis != self.inner and self.size[axis] > 1)

    def access(self, *tensors: tuple[torch.Tensor, Sequence[int]]) -> dict[str, Any]:
        """How many neighbours go into one access to all of these tensors."""
        vec = min(16 // tensor.element_size() for tensor, _ in tensors)
        wide = self.size[self.inner] % vec == 0 and self.length % vec == 0
        wide = wide and all(t.data_ptr() % (vec * t.element_size()) == 0 and self._divides(vec, s) for t, s in tensors)
        return {"VEC": vec if wide else 1}

    def has_index_of_fours(self) -> bool:
        """Whether the random bits of four neighbours always have one counter."""
        return self._divides(4, self.out) and self.size[self.inner] >= 4
