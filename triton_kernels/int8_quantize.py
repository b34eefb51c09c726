"""Quantization to int8, and fake quantization. csrc/int8.h explains groups, and int8_tiles.py bands and tiles.

code = clamp(rint(x * (1 / scale)) + zero_point, low, 127)          fake = (code - zero_point) * scale
low = -127 if there are no zero points (symmetric codes), else -128

The elements of a group share one scale. It comes from one of four sources, which differ in how often x is read. The
last two columns are the bytes per element for a 16-bit x and for an fp32 x, if the results are codes.

source       reads of x                                                                           16-bit     fp32
GIVEN        1                                                                                    3          5
REGISTERS    1: the tile of a program holds whole groups                                          3          5
TWO_READS    2: one program for each band; much of the second read comes from L2                  3 to 5     5 to 9
PARTIALS     2: two launches, with several programs for each band                                 5          9
"""

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
    groups_of_band,
    offsets_of_tile,
    register_plan,
    streaming_plan,
    two_pass_plan,
)

# Where a group's scale comes from.
GIVEN = tl.constexpr(0)  # the caller
REGISTERS = tl.constexpr(1)  # the tile, which holds whole groups and is read once
TWO_READS = tl.constexpr(2)  # the program itself, which reads its band twice; much of the second read comes from L2
PARTIALS = tl.constexpr(3)  # _extremes_kernel, if there are too few bands to fill the device with one program each


# --------------------------------------------------------------------------------------------------- the extremes
# The extremes are found by comparing integers: for symmetric codes the bits of the magnitudes, otherwise the keys of
# `ordered_key`. As integers, NaNs are beyond inf or -inf, so they are not lost. The order of the comparisons does not
# matter. Elements outside the tensor count as 0. This changes no scale, since the range of every group is extended to
# include 0.
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
def _reduced(low, high, SYMMETRIC: tl.constexpr, BY_COLUMNS: tl.constexpr):
    AXIS: tl.constexpr = 0 if BY_COLUMNS else 1
    high = tl.max(high, axis=AXIS, keep_dims=True)
    if not SYMMETRIC:
        low = tl.min(low, axis=AXIS, keep_dims=True)
    return low, high


@triton.jit
def _extremes_of_tiles(
    x_address, sizes, band, first, n_tiles, step,
    SYMMETRIC: tl.constexpr, DTYPE: tl.constexpr,
    BY_COLUMNS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    low = tl.zeros((ROWS, WIDTH), tl.int32)
    high = tl.zeros((ROWS, WIDTH), tl.int32)
    for tile in range(first, n_tiles, step):
        offsets, exist = offsets_of_tile(sizes, band, tile, BY_COLUMNS, ROWS, WIDTH, VEC, 1)
        x = load_elements(x_address, offsets, exist, DTYPE, VEC)
        low, high = _include(low, high, x, SYMMETRIC)
    return _reduced(low, high, SYMMETRIC, BY_COLUMNS)


@triton.jit
def _extremes_of_partials(
    partials_ptr, n_pieces, n_groups, groups, exist,
    SYMMETRIC: tl.constexpr, BY_COLUMNS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    low = tl.zeros((ROWS, WIDTH), tl.int32)
    high = tl.zeros((ROWS, WIDTH), tl.int32)
    FOLD: tl.constexpr = ROWS if BY_COLUMNS else WIDTH
    AXIS: tl.constexpr = 1 if BY_COLUMNS else 0
    lanes = tl.expand_dims(tl.arange(0, FOLD), AXIS)
    for i in range(0, n_pieces, FOLD):
        piece = i + lanes
        mask = (piece < n_pieces) & exist
        pointers = partials_ptr + groups + piece.to(tl.int64) * n_groups
        high = tl.maximum(high, tl.load(pointers, mask=mask, other=0))
        if not SYMMETRIC:
            low = tl.minimum(low, tl.load(pointers + n_pieces * n_groups, mask=mask, other=0))
    return _reduced(low, high, SYMMETRIC, BY_COLUMNS)


@triton.jit(do_not_specialize=list(range(8)))
def _extremes_kernel(
    x_ptr,
    partials_ptr,  # int32 [2, pieces, groups]: high, then low; with SYMMETRIC [1, pieces, groups]: only high
    outer: tl.int64,
    reduced: tl.int64,
    inner: tl.int64,
    row: tl.int64,
    n_tiles: tl.int32,
    n_pieces: tl.int32,
    SYMMETRIC: tl.constexpr,
    DTYPE: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    VEC: tl.constexpr,
):
    sizes = (outer, reduced, inner, row)
    piece = tl.program_id(0) % n_pieces
    band = (tl.program_id(0) // n_pieces).to(tl.int64)
    low, high = _extremes_of_tiles(
        x_ptr.to(tl.int64), sizes, band, piece, n_tiles, n_pieces,
        SYMMETRIC, DTYPE, BY_COLUMNS, ROWS, WIDTH, VEC,
    )  # fmt: skip
    groups, exist = groups_of_band(sizes, band, BY_COLUMNS, ROWS, WIDTH)
    n_groups = outer * inner
    pointers = partials_ptr + piece.to(tl.int64) * n_groups + groups
    tl.store(pointers, high, mask=exist)
    if not SYMMETRIC:
        tl.store(pointers + n_pieces * n_groups, low, mask=exist)


# ------------------------------------------------------------------------------------------------------- quantize
@triton.jit
def _noise(
    sizes, band, tile, seed,
    BY_COLUMNS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, FOURS: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = 4 if FOURS else 1
    index, _ = offsets_of_tile(sizes, band, tile, BY_COLUMNS, ROWS, WIDTH, 1, STEP)
    return noise_of_fours(index, seed, ROWS, WIDTH) if FOURS else noise_of_each(index, seed)


@triton.jit
def _write(
    out_ptr, x, scale, inverse, zero_point, offsets, exist, sizes, band, tile, seed,
    SYMMETRIC: tl.constexpr, FAKE: tl.constexpr, STOCHASTIC: tl.constexpr, FOURS: tl.constexpr, DTYPE: tl.constexpr,
    BY_COLUMNS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    if STOCHASTIC:
        noise = _noise(sizes, band, tile, seed, BY_COLUMNS, ROWS, WIDTH, FOURS)
        codes = stochastic_codes_of(x, noise, inverse, zero_point, SYMMETRIC)
    else:
        codes = codes_of(x, inverse, zero_point, SYMMETRIC)
    if FAKE:
        values = tl.where(x == x, values_of(codes, scale, zero_point), x)
        store_elements(out_ptr.to(tl.int64), offsets, values, exist, DTYPE, VEC)
    else:
        tl.store(code_pointers(out_ptr, offsets, VEC), codes.to(tl.int8), mask=exist)


@triton.jit(do_not_specialize=list(range(13)))
def _quantize_kernel(
    x_ptr,
    out_ptr,  # int8 codes; if FAKE is set, dequantized values in x's dtype
    scale_ptr,
    zero_point_ptr,  # None: symmetric
    partials_ptr,  # from _extremes_kernel, or None
    outer: tl.int64,
    reduced: tl.int64,
    inner: tl.int64,
    row: tl.int64,
    n_tiles: tl.int32,  # in each band
    n_pieces: tl.int32,  # programs that share the tiles of a band
    n_partials: tl.int32,
    seed: tl.int64,
    FROM: tl.constexpr,
    FAKE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FOURS: tl.constexpr,  # four neighbours in a row of a tile use one counter of Philox (Layout.has_index_of_fours)
    DTYPE: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    VEC: tl.constexpr,
):
    SYMMETRIC: tl.constexpr = zero_point_ptr is None
    sizes = (outer, reduced, inner, row)
    piece = tl.program_id(0) % n_pieces
    band = (tl.program_id(0) // n_pieces).to(tl.int64)
    x_address = x_ptr.to(tl.int64)
    groups, exist_groups = groups_of_band(sizes, band, BY_COLUMNS, ROWS, WIDTH)

    if FROM == REGISTERS:
        offsets, exist = offsets_of_tile(sizes, band, piece, BY_COLUMNS, ROWS, WIDTH, VEC, 1)
        x = load_elements(x_address, offsets, exist, DTYPE, VEC)
        none = tl.zeros((ROWS, WIDTH), tl.int32)
        low, high = _include(none, none, x, SYMMETRIC)
        low, high = _reduced(low, high, SYMMETRIC, BY_COLUMNS)
    elif FROM == TWO_READS:
        low, high = _extremes_of_tiles(
            x_address, sizes, band, piece, n_tiles, 1,
            SYMMETRIC, DTYPE, BY_COLUMNS, ROWS, WIDTH, VEC,
        )  # fmt: skip
    elif FROM == PARTIALS:
        low, high = _extremes_of_partials(
            partials_ptr, n_partials, outer * inner, groups, exist_groups, SYMMETRIC, BY_COLUMNS, ROWS, WIDTH,
        )  # fmt: skip
    if FROM == GIVEN:
        scale, inverse, zero_point = given_affine(scale_ptr, zero_point_ptr, groups, exist_groups)
    else:
        scale, inverse, zero_point = affine_of(low, high, SYMMETRIC)
        if piece == 0:
            tl.store(scale_ptr + groups, scale, mask=exist_groups)
            if not SYMMETRIC:
                tl.store(zero_point_ptr + groups, zero_point, mask=exist_groups)

    if FROM == REGISTERS:
        _write(
            out_ptr, x, scale, inverse, zero_point, offsets, exist, sizes, band, piece, seed,
            SYMMETRIC, FAKE, STOCHASTIC, FOURS, DTYPE, BY_COLUMNS, ROWS, WIDTH, VEC,
        )  # fmt: skip
    else:
        for tile in range(piece, n_tiles, n_pieces):
            offsets, exist = offsets_of_tile(sizes, band, tile, BY_COLUMNS, ROWS, WIDTH, VEC, 1)
            x = load_elements(x_address, offsets, exist, DTYPE, VEC)
            _write(
                out_ptr, x, scale, inverse, zero_point, offsets, exist, sizes, band, tile, seed,
                SYMMETRIC, FAKE, STOCHASTIC, FOURS, DTYPE, BY_COLUMNS, ROWS, WIDTH, VEC,
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
    walk = Layout(*layout)
    access = walk.access(x, out) | {"DTYPE": DTYPE_CODES[x.dtype]}
    wide, partials = access["VEC"] > 1, None
    if is_static:
        source, plan = GIVEN, streaming_plan(walk, wide)
    elif (fitting := register_plan(walk, wide)) is not None:
        source, plan = REGISTERS, fitting
    else:
        plan = two_pass_plan(walk, wide)
        source = TWO_READS if plan.pieces == 1 else PARTIALS
    if source == PARTIALS:
        symmetric = zero_point is None
        shape = (1 if symmetric else 2, plan.pieces, walk.outer * walk.inner)
        partials = torch.empty(shape, dtype=torch.int32, device=x.device)
        launch_unfused(
            _extremes_kernel, plan.programs, x.device, x, partials, *walk, plan.tiles, plan.pieces,
            SYMMETRIC=symmetric, **plan.constants(), **access,
        )  # fmt: skip
    launch_unfused(
        _quantize_kernel, plan.programs, x.device, x, out, scale, zero_point, partials, *walk,
        plan.tiles, plan.pieces, plan.pieces, _signed(seed),
        FROM=source.value, FAKE=out.dtype != torch.int8, STOCHASTIC=stochastic,
        FOURS=stochastic and walk.has_index_of_fours(), **plan.constants(), **access,
    )  # fmt: skip


def _signed(seed: int) -> int:
    """Return the int64 that has the same 64 bits as the unsigned `seed`."""
    return (seed + 2**63) % 2**64 - 2**63
