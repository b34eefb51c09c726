"""The order in which the int8 Triton kernels walk the memory of a tensor. csrc/int8.h explains Int8Layout and groups.

A band consists of one or more neighbouring groups, and is divided into tiles of [ROWS, WIDTH] elements. The number of
programs that share the tiles of a band is `pieces`; it may be 1. In each of these programs the scales of the band's
groups stay in registers from tile to tile.

    by rows (inner is 1): a band is ROWS groups,            by columns (inner is above 1): a band is WIDTH columns,
    and a tile has WIDTH neighbouring elements              each of which is a group, and a tile has ROWS elements
    of each group                                           of each column

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
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


# `sizes` is (outer, reduced, inner, row), as in Int8Layout.
@triton.jit
def offsets_of_tile(
    sizes, band, tile,
    BY_COLUMNS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, VEC: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return the offsets of a tile's elements, and a mask of those that exist.

    With STEP > 1, offsets and mask are those of every STEP-th element in each row of the tile. VEC is the number of
    neighbouring elements that one access covers. With VEC > 1, every group (by rows) or every row of `inner` elements
    (by columns) must begin and end at a multiple of VEC elements.
    """
    outer, reduced, inner, row = sizes
    down = tl.arange(0, ROWS)[:, None].to(tl.int64)
    across = (tl.arange(0, WIDTH // STEP) * STEP)[None, :].to(tl.int64)
    if BY_COLUMNS:
        if VEC > 1:
            inner = inner // VEC * VEC
        bands = tl.cdiv(inner, WIDTH)
        r = tile * tl.full((), ROWS, tl.int64) + down
        first = band % bands * WIDTH
        begin = band // bands * reduced * inner + first + r * inner
        exist = (r < reduced) & (first + across < inner)
    else:
        if VEC > 1:
            reduced = reduced // VEC * VEC
            row = row // VEC * VEC
        groups_of_row = tl.cdiv(row, reduced)
        group = band * ROWS + down
        before = group % groups_of_row * reduced  # elements before the group in its row
        first = tile * tl.full((), WIDTH, tl.int64)
        begin = group // groups_of_row * row + before + first
        exist = (group < outer) & (first + across < tl.minimum(reduced, row - before))
    return begin + across, exist


@triton.jit
def groups_of_band(sizes, band, BY_COLUMNS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the numbers of a band's groups, and a mask of those that exist.

    Both have one element for each group of a tile: their shape is [ROWS, 1] by rows, and [1, WIDTH] by columns.
    """
    outer, _, inner, _ = sizes
    if BY_COLUMNS:
        bands = tl.cdiv(inner, WIDTH)
        column = band % bands * WIDTH + tl.arange(0, WIDTH)[None, :].to(tl.int64)
        group = band // bands * inner + column
        exist = column < inner
    else:
        group = band * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
        exist = group < outer
    return group, exist


# ----------------------------------------------------------------------------------------------------------- plans
# How many elements the largest tile of `streaming_plan` has. The key is whether access is wide, which means that one
# access covers several elements. A tile of this size has four warps. With wide access a thread has 16 elements. With
# access by element it has 8, because each element then needs an address and a predicate of its own.
_TILE = {True: 2048, False: 1024}
# How many elements the largest tile of `register_plan` has. A tile of this size has 16 warps, so a thread has twice as
# many elements as above.
_REGISTER_TILE = {True: 16384, False: 8192}
_PROGRAMS = 1024  # enough to fill a device: about eight for each multiprocessor of the largest GPU
# The least width of a tile by columns, unless `inner` is smaller: 128 bytes of neighbouring 16-bit elements.
_COLUMNS_OF_TILE = 64


@dataclasses.dataclass(frozen=True)
class Plan:
    """The tiles, bands and programs with which one kernel walks a layout."""

    by_columns: bool
    rows: int  # of a tile
    width: int  # of a tile
    bands: int
    tiles: int  # in each band
    pieces: int  # programs that share the tiles of a band
    warps: int

    @property
    def programs(self) -> int:
        return self.bands * self.pieces

    def constants(self) -> dict[str, Any]:
        return {"BY_COLUMNS": self.by_columns, "ROWS": self.rows, "WIDTH": self.width, "num_warps": self.warps}


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


class Layout(NamedTuple):
    """The fields of Int8Layout (csrc/int8.h)."""

    outer: int
    reduced: int
    inner: int
    row: int

    @property
    def is_by_columns(self) -> bool:
        return self.inner > 1

    def access(self, *tensors: torch.Tensor) -> dict[str, Any]:
        """Return the constant VEC: how many neighbouring elements one access to each of these tensors covers."""
        vec = min(16 // tensor.element_size() for tensor in tensors)
        runs = (self.inner,) if self.is_by_columns else (self.reduced, self.row)  # no access crosses the end of a run
        wide = all(n % vec == 0 for n in runs)
        wide = wide and all(tensor.data_ptr() % (vec * tensor.element_size()) == 0 for tensor in tensors)
        return {"VEC": vec if wide else 1}

    def has_index_of_fours(self) -> bool:
        """Return whether every four elements in a row of a tile (0 to 3, 4 to 7, ...) share one counter of Philox.

        A counter gives four random words (`philox` in csrc/formulas/int8.h).
        """
        if self.is_by_columns:
            return self.inner >= 4 and (self.inner % 4 == 0 or self.outer * self.reduced == 1)
        groups_of_row = -(-self.row // self.reduced)
        groups_begin = self.outer == 1 or self.reduced % 4 == 0
        return self.reduced >= 4 and groups_begin and (self.outer == groups_of_row or self.row % 4 == 0)


def _plan(layout: Layout, rows: int, width: int, wide: bool) -> Plan:
    if layout.is_by_columns:
        bands, tiles = layout.outer * math.ceil(layout.inner / width), math.ceil(layout.reduced / rows)
    else:
        bands, tiles = math.ceil(layout.outer / rows), math.ceil(layout.reduced / width)
    warps = min(max(rows * width // (512 if wide else 256), 1), 16)
    return Plan(layout.is_by_columns, rows, width, bands, tiles, 1, warps)


@functools.lru_cache(maxsize=4096)
def streaming_plan(layout: Layout, wide: bool) -> Plan:
    """Return the plan for kernels to which the caller gives the scales. A program handles at most four tiles."""
    if layout.is_by_columns:
        width = min(_power_of_two(layout.inner), 4 * _COLUMNS_OF_TILE)
        rows = min(_power_of_two(layout.reduced), _TILE[wide] // width)
    else:
        width = min(_power_of_two(layout.reduced), _TILE[wide])
        rows = min(_power_of_two(layout.outer), _TILE[wide] // width)
    plan = _plan(layout, rows, width, wide)
    return dataclasses.replace(plan, pieces=math.ceil(plan.tiles / 4))


@functools.lru_cache(maxsize=4096)
def register_plan(layout: Layout, wide: bool) -> Plan | None:
    """Return a plan in which a tile holds whole groups, or None if that tile would exceed `_REGISTER_TILE`."""
    if layout.is_by_columns:
        rows = _power_of_two(layout.reduced)
        width = min(_power_of_two(layout.inner), max(_COLUMNS_OF_TILE, _TILE[wide] // rows))
    else:
        width = _power_of_two(layout.reduced)
        rows = min(_power_of_two(layout.outer), max(1, _TILE[wide] // width))
    return _plan(layout, rows, width, wide) if rows * width <= _REGISTER_TILE[wide] else None


@functools.lru_cache(maxsize=4096)
def two_pass_plan(layout: Layout, wide: bool) -> Plan:
    """Return a plan with one program for each band, or with several if there are too few bands to fill the device."""
    plan = streaming_plan(layout, wide)
    # If several programs share a band, one kernel finds the extremes of the tiles of each program. In a second kernel,
    # every program folds the extremes of all programs of its band. The square root limits the number of programs that
    # share a band, so that a program has few extremes to fold, compared with the number of its elements.
    most = min(_PROGRAMS // plan.bands, math.isqrt(layout.reduced))
    return dataclasses.replace(plan, pieces=max(1, min(plan.tiles, most)))
