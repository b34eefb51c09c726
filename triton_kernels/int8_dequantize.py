"""From int8 back to floating point, and the gradient of fake quantization."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..ops.table import DTYPE_CODES
from .common import load_elements, store_elements
from .int8 import code_pointers, given_affine, launch_unfused, unclamped_codes, values_of
from .int8_tiles import Layout, groups_of_block, offsets_of, positions_of_tile, streaming_plan


@triton.jit(do_not_specialize=list(range(21)))
def _dequantize_kernel(
    codes_ptr,
    scale_ptr,
    zero_point_ptr,
    out_ptr,
    size_g1: tl.int64,
    size_r1: tl.int64,
    size_g2: tl.int64,
    size_r2: tl.int64,
    out_g1: tl.int64,
    out_r1: tl.int64,
    out_g2: tl.int64,
    out_r2: tl.int64,
    codes_g1: tl.int64,
    codes_r1: tl.int64,
    codes_g2: tl.int64,
    codes_r2: tl.int64,
    scale_g1: tl.int64,
    scale_g2: tl.int64,
    length: tl.int64,
    n_tiles: tl.int32,
    n_splits: tl.int32,
    DTYPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    UNIT: tl.constexpr,
    VEC: tl.constexpr,
):
    sizes = (size_g1, size_r1, size_g2, size_r2, length)
    split = tl.program_id(0) % n_splits
    block = (tl.program_id(0) // n_splits).to(tl.int64)
    g1, g2, exist_groups = groups_of_block(sizes, block, COLUMNS, OUTER, INNER)
    scale, _, zero_point = given_affine(scale_ptr, zero_point_ptr, g1 * scale_g1 + g2 * scale_g2, exist_groups)
    for tile in range(split, n_tiles, n_splits):
        position, exist = positions_of_tile(sizes, block, tile, COLUMNS, OUTER, INNER, VEC, 1)
        offsets = offsets_of(position, (codes_g1, codes_r1, codes_g2, codes_r2), COLUMNS, True, VEC)
        codes = tl.load(code_pointers(codes_ptr, offsets, VEC), mask=exist, other=0)
        offsets = offsets_of(position, (out_g1, out_r1, out_g2, out_r2), COLUMNS, UNIT, VEC)
        store_elements(out_ptr.to(tl.int64), offsets, values_of(codes, scale, zero_point), exist, DTYPE, VEC)


@triton.jit(do_not_specialize=list(range(22)))
def _straight_through_kernel(
    grad_ptr,
    x_ptr,
    scale_ptr,
    zero_point_ptr,
    out_ptr,
    size_g1: tl.int64,
    size_r1: tl.int64,
    size_g2: tl.int64,
    size_r2: tl.int64,
    x_g1: tl.int64,
    x_r1: tl.int64,
    x_g2: tl.int64,
    x_r2: tl.int64,
    out_g1: tl.int64,
    out_r1: tl.int64,
    out_g2: tl.int64,
    out_r2: tl.int64,
    scale_g1: tl.int64,
    scale_g2: tl.int64,
    length: tl.int64,
    n_tiles: tl.int32,
    n_splits: tl.int32,
    DTYPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    UNIT: tl.constexpr,
    VEC: tl.constexpr,
):
    LOWEST: tl.constexpr = -127 if zero_point_ptr is None else -128
    sizes = (size_g1, size_r1, size_g2, size_r2, length)
    split = tl.program_id(0) % n_splits
    block = (tl.program_id(0) // n_splits).to(tl.int64)
    g1, g2, exist_groups = groups_of_block(sizes, block, COLUMNS, OUTER, INNER)
    _, inverse, zero_point = given_affine(scale_ptr, zero_point_ptr, g1 * scale_g1 + g2 * scale_g2, exist_groups)
    for tile in range(split, n_tiles, n_splits):
        position, exist = positions_of_tile(sizes, block, tile, COLUMNS, OUTER, INNER, VEC, 1)
        offsets = offsets_of(position, (x_g1, x_r1, x_g2, x_r2), COLUMNS, UNIT, VEC)
        x = load_elements(x_ptr.to(tl.int64), offsets, exist, DTYPE, VEC)
        offsets = offsets_of(position, (out_g1, out_r1, out_g2, out_r2), COLUMNS, True, VEC)
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
    walk = Layout(layout)
    access = walk.access((out, walk.x), (values, walk.out))
    plan = streaming_plan(walk.size, access["VEC"] > 1)
    launch_unfused(
        _dequantize_kernel, plan.programs, out.device, values, scale, zero_point, out, *walk.size, *walk.x, *walk.out,
        *walk.scale, walk.length, plan.tiles, plan.splits,
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
    walk = Layout(layout)
    access = walk.access((x, walk.x), (grad, walk.out), (out, walk.out))
    plan = streaming_plan(walk.size, access["VEC"] > 1)
    launch_unfused(
        _straight_through_kernel, plan.programs, out.device, grad, x, scale, zero_point, out, *walk.size, *walk.x,
        *walk.out, *walk.scale, walk.length, plan.tiles, plan.splits,
        DTYPE=DTYPE_CODES[x.dtype], **plan.constants(), **access,
    )  # fmt: skip
