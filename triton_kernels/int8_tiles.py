"""How the int8 kernels walk the nested levels of csrc/int8.h.

A program walks tiles of two axes. The inner one is what is innermost in the codes: R2 (rows, blocks, channels of
NCHW), with groups of G1 and G2 on the outer axis; or, with COLUMNS, G2 with R1 on the outer axis.
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


# `sizes` are those of the four levels and the length; strides and positions are tuples over the levels.
@triton.jit
def positions_of_tile(
    sizes, block, tile,
    COLUMNS: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Positions of a tile's elements, every STEP-th of the inner axis, and which of them exist."""
    size_g1, size_r1, size_g2, size_r2, length = sizes
    outer = tl.arange(0, OUTER)[:, None].to(tl.int64)
    inner = (tl.arange(0, INNER // STEP) * STEP)[None, :].to(tl.int64)
    if COLUMNS:
        blocks = tl.cdiv(size_g2, INNER)
        g1 = block // blocks
        g2 = block % blocks * INNER + inner
        r1 = tile * tl.full((), OUTER, tl.int64) + outer
        r2 = tl.full((), 0, tl.int64)
        end = tl.where(r1 < size_r1, length, 0)
        position = g2
    else:
        group = block * OUTER + outer
        g1 = group // size_g2
        g2 = group % size_g2
        tiles = tl.cdiv(size_r2, INNER).to(tl.int32)  # 32 bits: a division in every tile
        r1 = (tile // tiles).to(tl.int64)
        r2 = (tile % tiles).to(tl.int64) * INNER + inner
        end = tl.where(g1 < size_g1, tl.minimum(size_r2, length - g2 * size_r2), 0)
        position = r2
    if VEC > 1:
        end = end // VEC * VEC
    return (g1, r1, g2, r2), position < end


@triton.jit
def offsets_of(position, strides, COLUMNS: tl.constexpr, UNIT: tl.constexpr, VEC: tl.constexpr):
    """UNIT: the inner stride is 1. VEC: the others are multiples of it."""
    g1, r1, g2, r2 = position
    stride_g1, stride_r1, stride_g2, stride_r2 = strides
    if VEC > 1:
        stride_g1 = stride_g1 // VEC * VEC
        stride_r1 = stride_r1 // VEC * VEC
    if COLUMNS:
        outer = g1 * stride_g1 + r1 * stride_r1
        inner = g2 if UNIT else g2 * stride_g2
    else:
        if VEC > 1:
            stride_g2 = stride_g2 // VEC * VEC
        outer = g1 * stride_g1 + r1 * stride_r1 + g2 * stride_g2
        inner = r2 if UNIT else r2 * stride_r2
    return outer + inner


@triton.jit
def groups_of_block(sizes, block, COLUMNS: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr):
    """Position (g1, g2) of a block's groups and which of them exist: shaped as a reduced tile."""
    size_g2 = sizes[2]
    if COLUMNS:
        blocks = tl.cdiv(size_g2, INNER)
        g1 = block // blocks
        g2 = block % blocks * INNER + tl.arange(0, INNER)[None, :].to(tl.int64)
        exist = g2 < size_g2
    else:
        group = block * OUTER + tl.arange(0, OUTER)[:, None].to(tl.int64)
        g1 = group // size_g2
        g2 = group % size_g2
        exist = g1 < sizes[0]
    return g1, g2, exist


# ----------------------------------------------------------------------------------------------------------- plans
# Elements by whether access is wide: 16 a thread of four warps. By element each needs an address and a predicate of
# its own, so there are half as many.
_TILE = {True: 2048, False: 1024}
_REGISTER_TILE = {True: 16384, False: 8192}
_PROGRAMS = 1024  # enough to fill a device, about eight for each multiprocessor of the largest
_COLUMNS_OF_TILE = 64  # neighbours in memory that a tile of COLUMNS reads at least: 128 bytes of 16-bit elements


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one kernel walks a layout."""

    columns: bool
    outer: int
    inner: int
    blocks: int  # of groups
    tiles: int  # of a group
    splits: int
    warps: int

    @property
    def programs(self) -> int:
        return self.blocks * self.splits

    def constants(self) -> dict[str, Any]:
        return {"COLUMNS": self.columns, "OUTER": self.outer, "INNER": self.inner, "num_warps": self.warps}


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _is_columns(size: Sequence[int]) -> bool:
    return size[3] == 1


def _plan(size: Sequence[int], tile: tuple[int, int], wide: bool) -> Plan:
    g1, r1, g2, r2 = size
    outer, inner = tile
    columns = _is_columns(size)
    if columns:
        blocks, tiles = g1 * math.ceil(g2 / inner), math.ceil(r1 / outer)
    else:
        blocks, tiles = math.ceil(g1 * g2 / outer), r1 * math.ceil(r2 / inner)
    warps = min(max(outer * inner // (512 if wide else 256), 1), 16)
    return Plan(columns, outer, inner, blocks, tiles, 1, warps)


@functools.lru_cache(maxsize=4096)
def streaming_plan(size: tuple[int, ...], wide: bool) -> Plan:
    """For kernels that need no extremes; a program has at most four tiles."""
    g1, r1, g2, r2 = size
    if _is_columns(size):
        inner = min(_power_of_two(g2), 4 * _COLUMNS_OF_TILE)
        outer = min(_power_of_two(r1), _TILE[wide] // inner)
    else:
        inner = min(_power_of_two(r2), _TILE[wide])
        outer = min(_power_of_two(g1 * g2), _TILE[wide] // inner)
    plan = _plan(size, (outer, inner), wide)
    return dataclasses.replace(plan, splits=math.ceil(plan.tiles / 4))


@functools.lru_cache(maxsize=4096)
def register_plan(size: tuple[int, ...], wide: bool) -> Plan | None:
    """With whole groups in one tile, where they fit."""
    g1, r1, g2, r2 = size
    if _is_columns(size):
        outer = _power_of_two(r1)
        inner = min(_power_of_two(g2), max(_COLUMNS_OF_TILE, _TILE[wide] // outer))
    else:
        inner = _power_of_two(r2)
        outer = min(_power_of_two(g1 * g2), max(1, _TILE[wide] // inner))
    fits = outer * inner <= _REGISTER_TILE[wide] and (_is_columns(size) or r1 == 1)
    return _plan(size, (outer, inner), wide) if fits else None


@functools.lru_cache(maxsize=4096)
def two_pass_plan(size: tuple[int, ...], wide: bool) -> Plan:
    """A program for each block of groups where that fills the device; else several share one."""
    plan = streaming_plan(size, wide)
    # Every program of the second kernel folds as many partial extremes as there are splits: few beside its elements.
    most = min(_PROGRAMS // plan.blocks, math.isqrt(size[1] * size[3]))
    return dataclasses.replace(plan, splits=max(1, min(plan.tiles, most)))


class Layout:
    """The 19 integers of csrc/int8.h."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.size, self.x, self.out, self.index = (tuple(numbers[i : i + 4]) for i in (0, 4, 8, 12))
        self.scale, self.length = tuple(numbers[16:18]), numbers[18]
        self.inner = 2 if _is_columns(self.size) else 3

    def _is_unit(self, strides: Sequence[int]) -> bool:
        return strides[self.inner] == 1 or self.size[self.inner] == 1

    def _divides(self, n: int, strides: Sequence[int]) -> bool:
        """Whether rows of n elements are a multiple of n apart."""
        return all(strides[level] % n == 0 for level in range(4) if level != self.inner and self.size[level] > 1)

    def access(self, *tensors: tuple[torch.Tensor, Sequence[int]]) -> dict[str, Any]:
        """Whether x has inner stride 1, and how many neighbours go into one access to all of these tensors."""
        unit = self._is_unit(self.x)
        vec = min(16 // tensor.element_size() for tensor, _ in tensors)
        wide = unit and self.size[self.inner] % vec == 0 and self.length % vec == 0
        wide = wide and all(t.data_ptr() % (vec * t.element_size()) == 0 and self._divides(vec, s) for t, s in tensors)
        return {"UNIT": unit, "VEC": vec if wide else 1}

    def has_index_of_fours(self) -> bool:
        return self._is_unit(self.index) and self._divides(4, self.index) and self.size[self.inner] >= 4
