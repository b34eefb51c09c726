"""Copy of a matrix, in one pass. The rows of the copy are a multiple of 16 bytes apart.

    out[r, c]    = x[r, c] * derivative(pre[r, c])     (without `pre`: x[r, c])
                   0 for c after the last column of x
    bias_grad[c] = sum over r of out[r, c] before rounding

`derivative` is the derivative of an activation. `pre` is the argument of the activation, or its result if the
activation is relu.

Bytes per element: 2 read (4 with `pre`), 2 written.

The rows are divided into shares. A program copies up to 256 columns of one share, and sums each column for bias_grad.
It goes from top to bottom in tiles. If x and `pre` are read 16 bytes at a time, a tile has 2048 elements. If one of
them is read one element at a time, a tile has 1024. If there are several shares, a second kernel adds their sums in a
fixed order:

              columns 0-255   columns 256-511   ..
    share 0 | program 0     | program 1       | ..      -> sums[0, :]  \
    share 1 | program b     | program b + 1   | ..      -> sums[1, :]   > bias_grad      (b programs for each share)
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..ops.table import DTYPE_CODES
from .activation import derivative
from .common import launch, store_elements
from .product import COLUMNS, ROWS, access_of, load_tile, pointers_of, round_up

_FOLD_ROWS = tl.constexpr(32)
_FOLD_COLUMNS = tl.constexpr(64)


# ---------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def _load(
    ptr, rows, columns, n_rows, n_columns, row_stride, column_stride,
    DTYPE: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    pointers = pointers_of(ptr, rows, columns, row_stride, column_stride, DTYPE, INNER, VEC)
    # An access that covers at least one element of the matrix reads VEC elements. If some of these elements are outside
    # the matrix, they are still inside the storage (`access_of`), and become 0 below.
    exist_rows = rows < (round_up(n_rows, VEC) if INNER == ROWS else n_rows)
    exist_columns = columns < (round_up(n_columns, VEC) if INNER == COLUMNS else n_columns)
    x = load_tile(pointers, exist_rows[:, None] & exist_columns[None, :], DTYPE).to(tl.float32)
    return tl.where((rows < n_rows)[:, None] & (columns < n_columns)[None, :], x, 0.0)


@triton.jit(do_not_specialize=list(range(12)))
def _copy_kernel(
    out_ptr,
    x_ptr,
    pre_ptr,
    sums_ptr,  # [shares, n_columns]
    n_rows: tl.int64,
    n_columns: tl.int64,
    pitch: tl.int64,
    x_row: tl.int64,
    x_column: tl.int64,
    pre_row: tl.int64,
    pre_column: tl.int64,
    tiles_of_share: tl.int32,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
    X_INNER: tl.constexpr,
    X_VEC: tl.constexpr,
    PRE_INNER: tl.constexpr,
    PRE_VEC: tl.constexpr,
    OUT_VEC: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    blocks = tl.cdiv(pitch, BC).to(tl.int32)
    share = tl.program_id(0) // blocks
    columns = (tl.program_id(0) % blocks).to(tl.int64) * BC + tl.arange(0, BC)
    sums = tl.zeros((BR, BC), tl.float32)
    first = share.to(tl.int64) * tiles_of_share
    last = tl.minimum(first + tiles_of_share, tl.cdiv(n_rows, BR))
    for tile in range(first.to(tl.int32), last.to(tl.int32)):
        rows = tile * tl.full((), BR, tl.int64) + tl.arange(0, BR)
        x = _load(x_ptr, rows, columns, n_rows, n_columns, x_row, x_column, DTYPE, X_INNER, X_VEC)
        if pre_ptr is not None:
            pre = _load(pre_ptr, rows, columns, n_rows, n_columns, pre_row, pre_column, DTYPE, PRE_INNER, PRE_VEC)
            x *= derivative(pre, ACTIVATION)
        offsets = (rows * (pitch // 8 * 8))[:, None] + columns[None, :]
        mask = (rows < n_rows)[:, None] & (columns < pitch // 8 * 8)[None, :]
        store_elements(out_ptr.to(tl.int64), offsets, x, mask, DTYPE, OUT_VEC)
        if sums_ptr is not None:
            sums += x
    if sums_ptr is not None:
        tl.store(sums_ptr + share * n_columns + columns, tl.sum(sums, axis=0), mask=columns < n_columns)


@triton.jit(do_not_specialize=list(range(4)))
def _fold_kernel(sums_ptr, out_ptr, shares: tl.int32, n_columns: tl.int64):
    columns = tl.program_id(0).to(tl.int64) * _FOLD_COLUMNS + tl.arange(0, _FOLD_COLUMNS)
    rows = tl.arange(0, _FOLD_ROWS)
    total = tl.zeros((_FOLD_ROWS, _FOLD_COLUMNS), tl.float32)
    for first in range(0, shares, _FOLD_ROWS):
        mask = (first + rows < shares)[:, None] & (columns < n_columns)[None, :]
        total += tl.load(sums_ptr + (first + rows).to(tl.int64)[:, None] * n_columns + columns, mask=mask, other=0.0)
    tl.store(out_ptr + columns, tl.sum(total, axis=0), mask=columns < n_columns)


# ----------------------------------------------------------------------------------------------------------- launch
_PROGRAMS = 1024  # programs that fill a device: about eight for each multiprocessor of the largest GPU
_COLUMNS = 256


def _tile(pitch: int, wide: bool) -> tuple[int, int]:
    """Return (rows, columns) of a tile for four warps.

    With `wide`, x and `pre` are read 16 bytes at a time, and a thread has 16 elements. Otherwise x or `pre` is read one
    element at a time. A thread then has 8 elements, because each element needs an address of its own.
    """
    columns = min(_COLUMNS, 1 << (pitch - 1).bit_length())
    return (2048 if wide else 1024) // columns, columns


def _copy_pad_(
    x: torch.Tensor, pre: torch.Tensor | None, out: torch.Tensor, bias_grad: torch.Tensor | None, activation: int
) -> None:
    (n_rows, n_columns), pitch = x.shape, out.shape[1]
    (x_inner, x_vec), (pre_inner, pre_vec) = access_of(x), access_of(x if pre is None else pre)
    tile_rows, tile_columns = _tile(pitch, min(x_vec, pre_vec) > 1)
    blocks, tiles = math.ceil(pitch / tile_columns), math.ceil(n_rows / tile_rows)
    tiles_of_share = math.ceil(tiles / max(1, min(tiles, _PROGRAMS // blocks)))
    shares = math.ceil(tiles / tiles_of_share)
    sums = bias_grad
    if bias_grad is not None and shares > 1:
        sums = torch.empty((shares, n_columns), dtype=torch.float32, device=x.device)
    launch(
        _copy_kernel, blocks * shares, out, x, pre, sums, n_rows, n_columns, pitch, *x.stride(),
        *(x if pre is None else pre).stride(), tiles_of_share, ACTIVATION=activation, DTYPE=DTYPE_CODES[x.dtype],
        X_INNER=x_inner, X_VEC=x_vec, PRE_INNER=pre_inner, PRE_VEC=pre_vec,
        OUT_VEC=8 if out.data_ptr() % 16 == 0 else 1, BR=tile_rows, BC=tile_columns, num_warps=4,
    )  # fmt: skip
    if sums is not None and sums is not bias_grad:
        launch(
            _fold_kernel, math.ceil(n_columns / _FOLD_COLUMNS.value), sums, bias_grad, shares, n_columns, num_warps=4
        )
