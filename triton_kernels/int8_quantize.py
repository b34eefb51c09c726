"""Quantization to int8: the extremes of groups, and codes or what they stand for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..ops.table import DTYPE_CODES
from .common import load_elements, store_elements
from .int8 import (
    affine_of,
    code_pointers,
    codes_of,
    given_affine,
    launch_unfused,
    noise_of_each,
    noise_of_fours,
    ordered_key,
    stochastic_codes_of,
    values_of,
)
from .int8_tiles import (
    Layout,
    groups_of_block,
    offsets_of,
    positions_of_tile,
    register_plan,
    streaming_plan,
    two_pass_plan,
)

# Where a group's scale comes from.
GIVEN = tl.constexpr(0)  # the caller
REGISTERS = tl.constexpr(1)  # the tile, which holds whole groups and is read once
TWO_READS = tl.constexpr(2)  # a first walk of the same program; the second finds much of the group in L2
PARTIALS = tl.constexpr(3)  # _extremes_kernel: groups too few to fill the device one program each


# --------------------------------------------------------------------------------------------------- the extremes
# As integers, whose maximum knows NaN and any order of evaluation. Elements that do not exist are 0, which the
# range contains.
@triton.jit
def _include(low, high, x, SYMMETRIC: tl.constexpr):
    if SYMMETRIC:
        high = tl.maximum(high, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    else:
        key = ordered_key(x)
        low = tl.minimum(low, key)
        high = tl.maximum(high, key)
    return low, high


@triton.jit
def _reduced(low, high, SYMMETRIC: tl.constexpr, COLUMNS: tl.constexpr):
    AXIS: tl.constexpr = 0 if COLUMNS else 1
    high = tl.max(high, axis=AXIS, keep_dims=True)
    if not SYMMETRIC:
        low = tl.min(low, axis=AXIS, keep_dims=True)
    return low, high


@triton.jit
def _extremes_of_tiles(
    x_address, sizes, x_strides, block, first, n_tiles, step,
    SYMMETRIC: tl.constexpr, DTYPE: tl.constexpr,
    COLUMNS: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr, UNIT: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    low = tl.zeros((OUTER, INNER), tl.int32)
    high = tl.zeros((OUTER, INNER), tl.int32)
    for tile in range(first, n_tiles, step):
        position, exist = positions_of_tile(sizes, block, tile, COLUMNS, OUTER, INNER, VEC, 1)
        x = load_elements(x_address, offsets_of(position, x_strides, COLUMNS, UNIT, VEC), exist, DTYPE, VEC)
        low, high = _include(low, high, x, SYMMETRIC)
    return _reduced(low, high, SYMMETRIC, COLUMNS)


@triton.jit
def _extremes_of_partials(
    partials_ptr, n_splits, n_groups, group, exist,
    SYMMETRIC: tl.constexpr, COLUMNS: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    low = tl.zeros((OUTER, INNER), tl.int32)
    high = tl.zeros((OUTER, INNER), tl.int32)
    FOLD: tl.constexpr = OUTER if COLUMNS else INNER
    AXIS: tl.constexpr = 1 if COLUMNS else 0
    lanes = tl.expand_dims(tl.arange(0, FOLD), AXIS)
    for i in range(0, n_splits, FOLD):
        split = i + lanes
        mask = (split < n_splits) & exist
        pointers = partials_ptr + split.to(tl.int64) * n_groups + group
        high = tl.maximum(high, tl.load(pointers, mask=mask, other=0))
        if not SYMMETRIC:
            low = tl.minimum(low, tl.load(pointers + n_splits * n_groups, mask=mask, other=0))
    return _reduced(low, high, SYMMETRIC, COLUMNS)


@triton.jit(do_not_specialize=list(range(13)))
def _extremes_kernel(
    x_ptr,
    partials_ptr,  # int32 [1 or 2, splits, groups]: high, low
    size_g1: tl.int64,
    size_r1: tl.int64,
    size_g2: tl.int64,
    size_r2: tl.int64,
    x_g1: tl.int64,
    x_r1: tl.int64,
    x_g2: tl.int64,
    x_r2: tl.int64,
    length: tl.int64,
    n_tiles: tl.int32,
    n_splits: tl.int32,
    SYMMETRIC: tl.constexpr,
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
    low, high = _extremes_of_tiles(
        x_ptr.to(tl.int64), sizes, (x_g1, x_r1, x_g2, x_r2), block, split, n_tiles, n_splits,
        SYMMETRIC, DTYPE, COLUMNS, OUTER, INNER, UNIT, VEC,
    )  # fmt: skip
    g1, g2, exist = groups_of_block(sizes, block, COLUMNS, OUTER, INNER)
    n_groups = size_g1 * size_g2
    pointers = partials_ptr + split.to(tl.int64) * n_groups + g1 * size_g2 + g2
    tl.store(pointers, high, mask=exist)
    if not SYMMETRIC:
        tl.store(pointers + n_splits * n_groups, low, mask=exist)


# ------------------------------------------------------------------------------------------------------- quantize
@triton.jit
def _noise(
    sizes, index_strides, block, tile, seed,
    COLUMNS: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr, FOURS: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = 4 if FOURS else 1
    position, _ = positions_of_tile(sizes, block, tile, COLUMNS, OUTER, INNER, 1, STEP)
    index = offsets_of(position, index_strides, COLUMNS, False, 1)
    return noise_of_fours(index, seed, OUTER, INNER) if FOURS else noise_of_each(index, seed)


@triton.jit
def _write(
    out_ptr, x, scale, inverse, zero_point, sizes, position, exist, out_strides, index_strides, block, tile, seed,
    SYMMETRIC: tl.constexpr, FAKE: tl.constexpr, STOCHASTIC: tl.constexpr, FOURS: tl.constexpr, DTYPE: tl.constexpr,
    COLUMNS: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    if STOCHASTIC:
        noise = _noise(sizes, index_strides, block, tile, seed, COLUMNS, OUTER, INNER, FOURS)
        codes = stochastic_codes_of(x, noise, inverse, zero_point, SYMMETRIC)
    else:
        codes = codes_of(x, inverse, zero_point, SYMMETRIC)
    offsets = offsets_of(position, out_strides, COLUMNS, True, VEC)
    if FAKE:
        values = tl.where(x == x, values_of(codes, scale, zero_point), x)
        store_elements(out_ptr.to(tl.int64), offsets, values, exist, DTYPE, VEC)
    else:
        tl.store(code_pointers(out_ptr, offsets, VEC), codes.to(tl.int8), mask=exist)


@triton.jit(do_not_specialize=list(range(28)))
def _quantize_kernel(
    x_ptr,
    out_ptr,  # int8 codes, or with FAKE values of x's dtype
    scale_ptr,
    zero_point_ptr,  # or None: symmetric
    partials_ptr,  # of _extremes_kernel, or None
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
    index_g1: tl.int64,
    index_r1: tl.int64,
    index_g2: tl.int64,
    index_r2: tl.int64,
    scale_g1: tl.int64,
    scale_g2: tl.int64,
    length: tl.int64,
    n_tiles: tl.int32,  # of a group
    n_splits: tl.int32,  # programs that share them
    n_partials: tl.int32,
    seed: tl.int64,
    FROM: tl.constexpr,
    FAKE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FOURS: tl.constexpr,  # the inner stride of `index` is 1, the others are multiples of 4
    DTYPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    UNIT: tl.constexpr,
    VEC: tl.constexpr,
):
    SYMMETRIC: tl.constexpr = zero_point_ptr is None
    sizes = (size_g1, size_r1, size_g2, size_r2, length)
    x_strides = (x_g1, x_r1, x_g2, x_r2)
    out_strides = (out_g1, out_r1, out_g2, out_r2)
    index_strides = (index_g1, index_r1, index_g2, index_r2)
    split = tl.program_id(0) % n_splits
    block = (tl.program_id(0) // n_splits).to(tl.int64)
    x_address = x_ptr.to(tl.int64)
    g1, g2, exist_groups = groups_of_block(sizes, block, COLUMNS, OUTER, INNER)
    scale_offset = g1 * scale_g1 + g2 * scale_g2

    if FROM == REGISTERS:
        position, exist = positions_of_tile(sizes, block, split, COLUMNS, OUTER, INNER, VEC, 1)
        x = load_elements(x_address, offsets_of(position, x_strides, COLUMNS, UNIT, VEC), exist, DTYPE, VEC)
        none = tl.zeros((OUTER, INNER), tl.int32)
        low, high = _include(none, none, x, SYMMETRIC)
        low, high = _reduced(low, high, SYMMETRIC, COLUMNS)
    elif FROM == TWO_READS:
        low, high = _extremes_of_tiles(
            x_address, sizes, x_strides, block, split, n_tiles, 1,
            SYMMETRIC, DTYPE, COLUMNS, OUTER, INNER, UNIT, VEC,
        )  # fmt: skip
    elif FROM == PARTIALS:
        low, high = _extremes_of_partials(
            partials_ptr, n_partials, size_g1 * size_g2, g1 * size_g2 + g2, exist_groups,
            SYMMETRIC, COLUMNS, OUTER, INNER,
        )  # fmt: skip
    if FROM == GIVEN:
        scale, inverse, zero_point = given_affine(scale_ptr, zero_point_ptr, scale_offset, exist_groups)
    else:
        scale, inverse, zero_point = affine_of(low, high, SYMMETRIC)
        if split == 0:
            tl.store(scale_ptr + scale_offset, scale, mask=exist_groups)
            if not SYMMETRIC:
                tl.store(zero_point_ptr + scale_offset, zero_point, mask=exist_groups)

    if FROM == REGISTERS:
        _write(
            out_ptr, x, scale, inverse, zero_point, sizes, position, exist, out_strides, index_strides, block, split,
            seed, SYMMETRIC, FAKE, STOCHASTIC, FOURS, DTYPE, COLUMNS, OUTER, INNER, VEC,
        )  # fmt: skip
    else:
        for tile in range(split, n_tiles, n_splits):
            position, exist = positions_of_tile(sizes, block, tile, COLUMNS, OUTER, INNER, VEC, 1)
            x = load_elements(x_address, offsets_of(position, x_strides, COLUMNS, UNIT, VEC), exist, DTYPE, VEC)
            _write(
                out_ptr, x, scale, inverse, zero_point, sizes, position, exist, out_strides, index_strides, block,
                tile, seed, SYMMETRIC, FAKE, STOCHASTIC, FOURS, DTYPE, COLUMNS, OUTER, INNER, VEC,
            )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- launch
def _quantize_int8_(
    x: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    layout: Sequence[int],
    is_static: bool,
    stochastic: bool,
    seed: int,
) -> None:
    walk = Layout(layout)
    access = walk.access((x, walk.x), (out, walk.out)) | {"DTYPE": DTYPE_CODES[x.dtype]}
    wide, partials = access["VEC"] > 1, None
    if is_static:
        source, plan = GIVEN, streaming_plan(walk.size, wide)
    elif (fitting := register_plan(walk.size, wide)) is not None:
        source, plan = REGISTERS, fitting
    else:
        plan = two_pass_plan(walk.size, wide)
        source = TWO_READS if plan.splits == 1 else PARTIALS
    if source == PARTIALS:
        symmetric = zero_point is None
        shape = (1 if symmetric else 2, plan.splits, walk.size[0] * walk.size[2])
        partials = torch.empty(shape, dtype=torch.int32, device=x.device)
        launch_unfused(
            _extremes_kernel, plan.programs, x.device, x, partials, *walk.size, *walk.x, walk.length,
            plan.tiles, plan.splits, SYMMETRIC=symmetric, **plan.constants(), **access,
        )  # fmt: skip
    launch_unfused(
        _quantize_kernel, plan.programs, x.device, x, out, scale, zero_point, partials, *layout,
        plan.tiles, plan.splits, plan.splits, _signed(seed),
        FROM=source.value, FAKE=out.dtype != torch.int8, STOCHASTIC=stochastic,
        FOURS=stochastic and walk.has_index_of_fours(), **plan.constants(), **access,
    )  # fmt: skip


def _signed(seed: int) -> int:
    """The same 64 bits as an int64."""
    return (seed + 2**63) % 2**64 - 2**63
