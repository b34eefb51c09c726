"""Code that all product kernels use: the loop along K, the order of the output tiles, and choices of the launch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..ops.table import DTYPE_CODES
from .common import _INTERPRETED, BF16

INT8 = tl.constexpr(len(DTYPE_CODES))  # the next code after those of floating point
_GROUP = tl.constexpr(8)  # rows of tiles that are computed together

# The axis of an operand's tile that has stride 1. With ROWS, elements that are neighbours in memory are in the same
# column of the matrix, in neighbouring rows. With COLUMNS, they are in the same row, in neighbouring columns.
NEITHER = tl.constexpr(0)
ROWS = tl.constexpr(1)
COLUMNS = tl.constexpr(2)


@triton.jit
def pointers_of(
    ptr, rows, columns, row_stride, column_stride, DTYPE: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr
):
    """Return pointers to the elements [rows, columns] of a matrix.

    VEC is 1, or the number of elements in 16 bytes. If it is above 1, the caller has made sure that the base address
    and the outer stride are multiples of 16 bytes. (If the outer axis has one element, its stride may be any number,
    because it is not used.) This function rounds the base address and the outer stride down to multiples of 16 bytes.
    This does not change the pointers, but it shows the compiler that accesses of 16 bytes are possible.
    """
    if VEC > 1:
        BYTES: tl.constexpr = 16
        address = tl.multiple_of((ptr.to(tl.int64) // BYTES * BYTES).to(ptr.dtype), BYTES)
    else:
        address = ptr
    if DTYPE == BF16 and _INTERPRETED:
        address = address.to(tl.int64).to(tl.pointer_type(tl.int16))
    if INNER == COLUMNS:
        offsets = (rows * (row_stride // VEC * VEC))[:, None] + columns[None, :]
    elif INNER == ROWS:
        offsets = rows[:, None] + (columns * (column_stride // VEC * VEC))[None, :]
    else:
        offsets = (rows * row_stride)[:, None] + (columns * column_stride)[None, :]
    return address + offsets


@triton.jit
def load_tile(pointers, mask, DTYPE: tl.constexpr):
    x = tl.load(pointers, mask=mask, other=0)
    if DTYPE == BF16 and _INTERPRETED:
        # The interpreter reads bf16 wrongly, and its dot of bf16 returns garbage. So in the interpreter, bf16 operands
        # are read as int16 and converted to fp32. The conversion is exact, so it does not change products.
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x


@triton.jit
def dot(x, y, sums, DTYPE: tl.constexpr, AS_HALF: tl.constexpr):
    if DTYPE == INT8 and AS_HALF:
        # int8 codes as fp16 numbers: fp32 sums are exact here, since the sum of 256 products of codes is below 2**24.
        tl.static_assert(x.shape[1] <= 256)
        sums += tl.dot(x.to(tl.float16), y.to(tl.float16)).to(tl.int32)
    elif DTYPE == INT8:
        sums = tl.dot(x, y, sums, out_dtype=tl.int32)
    else:
        # y may be codes. Their conversion is exact, since 8 bits of significand (bf16) can hold every code.
        sums = tl.dot(x, y.to(x.dtype), sums, input_precision="ieee")
    return sums


@triton.jit
def place_of_program(program, m, n, n_splits, BM: tl.constexpr, BN: tl.constexpr):
    """Return (share of K, first row, first column) of a program's tile."""
    row, column = place_of_tile(program // n_splits, m, n, BM, BN)
    return program % n_splits, row.to(tl.int64) * BM, column.to(tl.int64) * BN


@triton.jit
def place_of_tile(tile, m, n, BM: tl.constexpr, BN: tl.constexpr):
    """Return the place of a tile as (row of tiles, column of tiles)."""
    tiles_m = tl.cdiv(m, BM).to(tl.int32)
    tiles_n = tl.cdiv(n, BN).to(tl.int32)
    band = tile // (_GROUP * tiles_n)
    height = tl.minimum(tiles_m - band * _GROUP, _GROUP)
    inside = tile % (_GROUP * tiles_n)
    return band * _GROUP + inside % height, inside // height


@triton.jit
def round_up(n, VEC: tl.constexpr):
    return (n + (VEC - 1)) // VEC * VEC


@triton.jit
def product(
    a_ptr, b_ptr, rows, columns, m, n, k, a_m, a_k, b_k, b_n, first, last,
    A_DTYPE: tl.constexpr, AS_HALF: tl.constexpr, SUM_A: tl.constexpr, SUM_B: tl.constexpr,
    A_INNER: tl.constexpr, A_VEC: tl.constexpr, B_INNER: tl.constexpr, B_VEC: tl.constexpr,
    K_VEC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return (a @ b, sums of a's rows, sums of b's columns) over the tiles of K from `first` to `last` - 1.

    b has int8 codes, and a has codes or floating-point numbers.

    The sums of rows are 0 unless SUM_A is set. The sums of columns are 0 unless SUM_B is set.
    """
    ACCUMULATOR: tl.constexpr = tl.int32 if A_DTYPE == INT8 else tl.float32
    sums = tl.zeros((BM, BN), ACCUMULATOR)
    a_sums = tl.zeros((BM,), tl.int32)
    b_sums = tl.zeros((BN,), tl.int32)
    inner = tl.arange(0, BK).to(tl.int64)
    start = first.to(tl.int64) * BK
    a_pointers = pointers_of(a_ptr, rows, start + inner, a_m, a_k, A_DTYPE, A_INNER, A_VEC)
    b_pointers = pointers_of(b_ptr, start + inner, columns, b_k, b_n, INT8, B_INNER, B_VEC)
    a_step = 1 if A_INNER == COLUMNS else (a_k // A_VEC * A_VEC)
    b_step = 1 if B_INNER == ROWS else (b_k // B_VEC * B_VEC)
    # If VEC is above 1, one access reads VEC elements along the innermost axis. The masks let through each access that
    # reads at least one element of the matrix. Such an access may also read elements beyond the last row of a, or
    # beyond the last column of b. These affect only elements of the tile that are outside the result.
    a_mask = (rows < (round_up(m, A_VEC) if A_INNER == ROWS else m))[:, None]
    b_mask = (columns < (round_up(n, B_VEC) if B_INNER == COLUMNS else n))[None, :]
    whole = tl.minimum(last, (k // BK).to(tl.int32))
    for _ in range(first, whole):
        x = load_tile(a_pointers, a_mask, A_DTYPE)
        y = load_tile(b_pointers, b_mask, INT8)
        sums = dot(x, y, sums, A_DTYPE, AS_HALF)
        if SUM_A:
            a_sums += tl.sum(x.to(tl.int32), axis=1)
        if SUM_B:
            b_sums += tl.sum(y.to(tl.int32), axis=0)
        a_pointers += BK * a_step
        b_pointers += BK * b_step
    if whole < last:  # the end of K is not in the loop, so that the loop needs no mask along K
        rest = (k - whole.to(tl.int64) * BK) // K_VEC * K_VEC
        a_rest = inner < (round_up(rest, A_VEC) if A_INNER == COLUMNS else rest)
        b_rest = inner < (round_up(rest, B_VEC) if B_INNER == ROWS else rest)
        x = load_tile(a_pointers, a_mask & a_rest[None, :], A_DTYPE)
        y = load_tile(b_pointers, b_mask & b_rest[:, None], INT8)
        # An access along K may read elements beyond the end of K. They may be NaN, and their products would be added to
        # every sum. So they are replaced by 0. For codes of b this is not needed: they are never NaN, and beyond the
        # end of K they are multiplied by elements of a that are 0. Only the sums of b's columns (SUM_B) need zeros
        # there.
        if A_INNER == COLUMNS and K_VEC < A_VEC:
            x = tl.where((inner < rest)[None, :], x, 0)
        if B_INNER == ROWS and K_VEC < B_VEC and SUM_B:
            y = tl.where((inner < rest)[:, None], y, 0)
        sums = dot(x, y, sums, A_DTYPE, AS_HALF)
        if SUM_A:
            a_sums += tl.sum(x.to(tl.int32), axis=1)
        if SUM_B:
            b_sums += tl.sum(y.to(tl.int32), axis=0)
    return sums, a_sums, b_sums


@triton.jit
def combined(partials_ptr, indices, size, n_splits):
    """For each index, return the sum over all splits. The splits are always added in the same order."""
    mask = indices < size
    total = tl.load(partials_ptr + indices, mask=mask, other=0)
    for _ in range(1, n_splits):
        partials_ptr += size
        total += tl.load(partials_ptr + indices, mask=mask, other=0)
    return total


# ---------------------------------------------------------------------------------------------------------- launch
FULL = 132  # tiles of the output that keep a large device busy: one for each multiprocessor of an H100


class Tiles(NamedTuple):
    m: int
    n: int
    k: int
    warps: int
    stages: int

    def constants(self) -> dict[str, int]:
        return {"BM": self.m, "BN": self.n, "BK": self.k, "num_warps": self.warps, "num_stages": self.stages}


def capability_of(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


def access_of(x: torch.Tensor, masked: int | None = None) -> tuple[int, int]:
    """Return (innermost axis, number of neighbouring elements per access) of a matrix.

    An access at the edge of the matrix reads 16 bytes, even if only a part of them is in the matrix. If one of these
    accesses would end beyond the storage, the whole matrix is read one element at a time.

    Args:
        x: The matrix.
        masked: An axis along which nothing beyond the end may be read, or None. If it is the innermost axis, and its
            length is not a multiple of the number of elements in 16 bytes, the matrix is read one element at a time,
            too.
    """
    vec = 16 // x.element_size()
    if x.stride(1) == 1 or x.shape[1] == 1:
        inner, axis = COLUMNS, 1
    elif x.stride(0) == 1 or x.shape[0] == 1:
        inner, axis = ROWS, 0
    else:
        return NEITHER.value, 1
    wide = x.data_ptr() % 16 == 0 and (x.stride(1 - axis) % vec == 0 or x.shape[1 - axis] == 1)
    if axis == masked:
        wide = wide and x.shape[axis] % vec == 0
    last = x.storage_offset() + (x.shape[1 - axis] - 1) * x.stride(1 - axis) + math.ceil(x.shape[axis] / vec) * vec
    wide = wide and last * x.element_size() <= x.untyped_storage().nbytes()
    return inner.value, vec if wide else 1


def shares_of(n_tiles: int, k_tiles: int) -> tuple[int, int]:
    """Return (number of programs that share the K of one output tile, number of tiles of K for each program).

    The last of these programs may get fewer tiles of K.
    """
    # If programs share K, tiles_of_split is at least four, because the pipeline of loads needs that many to fill.
    n_splits = max(1, min(2 * FULL // n_tiles, k_tiles // 4)) if n_tiles < FULL else 1
    tiles_of_split = max(1, math.ceil(k_tiles / n_splits))
    return max(1, math.ceil(k_tiles / tiles_of_split)), tiles_of_split
