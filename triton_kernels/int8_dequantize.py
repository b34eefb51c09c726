"""Dequantization from int8 to floating point, and the gradient of fake quantization ("straight through").

    dequantize          out = (code - zero_point) * scale
    straight through    out = grad where low <= rint(x * (1 / scale)) + zero_point <= 127, else 0
                        low = -127 if there are no zero points (symmetric codes), else -128

    bytes per element     16-bit values     fp32
    dequantize                  3             5
    straight through            6            12

Each of the two kernels is one pass over its tensors. int8_tiles.py explains bands and tiles. A program keeps the scales
of its band in registers, and handles up to four tiles.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..ops.table import DTYPE_CODES
from .common import load_elements, store_elements
from .int8 import code_pointers, given_affine, launch_unfused, unclamped_codes, values_of
from .int8_tiles import Layout, groups_of_band, offsets_of_tile, streaming_plan


@triton.jit(do_not_specialize=list(range(10)))
def _dequantize_kernel(
    codes_ptr,
    scale_ptr,
    zero_point_ptr,
    out_ptr,
    outer: tl.int64,
    reduced: tl.int64,
    inner: tl.int64,
    row: tl.int64,
    n_tiles: tl.int32,
    n_pieces: tl.int32,
    DTYPE: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    VEC: tl.constexpr,
):
    sizes = (outer, reduced, inner, row)
    piece = tl.program_id(0) % n_pieces
    band = (tl.program_id(0) // n_pieces).to(tl.int64)
    groups, exist_groups = groups_of_band(sizes, band, BY_COLUMNS, ROWS, WIDTH)
    scale, _, zero_point = given_affine(scale_ptr, zero_point_ptr, groups, exist_groups)
    for tile in range(piece, n_tiles, n_pieces):
        offsets, exist = offsets_of_tile(sizes, band, tile, BY_COLUMNS, ROWS, WIDTH, VEC, 1)
        codes = tl.load(code_pointers(codes_ptr, offsets, VEC), mask=exist, other=0)
        store_elements(out_ptr.to(tl.int64), offsets, values_of(codes, scale, zero_point), exist, DTYPE, VEC)


@triton.jit(do_not_specialize=list(range(11)))
def _straight_through_kernel(
    grad_ptr,
    x_ptr,
    scale_ptr,
    zero_point_ptr,
    out_ptr,
    outer: tl.int64,
    reduced: tl.int64,
    inner: tl.int64,
    row: tl.int64,
    n_tiles: tl.int32,
    n_pieces: tl.int32,
    DTYPE: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    VEC: tl.constexpr,
):
    LOWEST: tl.constexpr = -127 if zero_point_ptr is None else -128
    sizes = (outer, reduced, inner, row)
    piece = tl.program_id(0) % n_pieces
    band = (tl.program_id(0) // n_pieces).to(tl.int64)
    groups, exist_groups = groups_of_band(sizes, band, BY_COLUMNS, ROWS, WIDTH)
    _, inverse, zero_point = given_affine(scale_ptr, zero_point_ptr, groups, exist_groups)
    for tile in range(piece, n_tiles, n_pieces):
        offsets, exist = offsets_of_tile(sizes, band, tile, BY_COLUMNS, ROWS, WIDTH, VEC, 1)
        x = load_elements(x_ptr.to(tl.int64), offsets, exist, DTYPE, VEC)
        grad = load_elements(grad_ptr.to(tl.int64), offsets, exist, DTYPE, VEC)
        codes = unclamped_codes(x, inverse, zero_point)
        grad = tl.where((codes >= LOWEST) & (codes <= 127), grad, 0.0)
        store_elements(out_ptr.to(tl.int64), offsets, grad, exist, DTYPE, VEC)


def _dequantize_int8_(
    values: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    out: torch.Tensor,
    layout: Sequence[int],
) -> None:
    walk = Layout(*layout)
    access = walk.access(out, values)
    plan = streaming_plan(walk, access["VEC"] > 1)
    launch_unfused(
        _dequantize_kernel, plan.programs, out.device, values, scale, zero_point, out, *walk, plan.tiles, plan.pieces,
        DTYPE=DTYPE_CODES[out.dtype], **plan.constants(), **access,
    )  # fmt: skip


def _straight_through_int8_(
    grad: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    out: torch.Tensor,
    layout: Sequence[int],
) -> None:
    walk = Layout(*layout)
    access = walk.access(x, grad, out)
    plan = streaming_plan(walk, access["VEC"] > 1)
    launch_unfused(
        _straight_through_kernel, plan.programs, out.device, grad, x, scale, zero_point, out, *walk, plan.tiles,
        plan.pieces, DTYPE=DTYPE_CODES[x.dtype], **plan.constants(), **access,
    )  # fmt: skip
