"""The inner loop of products with an int8 operand: tiles of two matrices, multiplied along K."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import _INTERPRETED, BF16

INT8 = tl.constexpr(3)  # beside FP32, FP16 and BF16
_GROUP = tl.constexpr(8)  # rows of tiles that are computed together

# Which axis of an operand's tile is innermost in memory.
NEITHER = tl.constexpr(0)
ROWS = tl.constexpr(1)
COLUMNS = tl.constexpr(2)


@triton.jit
def pointers_of(
    ptr, rows, columns, row_stride, column_stride, DTYPE: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr
):
    """Pointers to [rows, columns]. VEC: elements of 16 bytes, where base and outer stride are multiples of them."""
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
def _load(pointers, mask, DTYPE: tl.constexpr):
    x = tl.load(pointers, mask=mask, other=0)
    if DTYPE == BF16 and _INTERPRETED:
        # The interpreter reads bf16 wrongly, and its bf16 dot is garbage: fp32 there, which holds the same products.
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _dot(x, y, sums, DTYPE: tl.constexpr, AS_HALF: tl.constexpr):
    if DTYPE == INT8 and AS_HALF:
        # Exact: 256 products of codes are below 2**24.
        tl.static_assert(x.shape[1] <= 256)
        sums += tl.dot(x.to(tl.float16), y.to(tl.float16)).to(tl.int32)
    elif DTYPE == INT8:
        sums = tl.dot(x, y, sums, out_dtype=tl.int32)
    else:
        sums = tl.dot(x, y.to(x.dtype), sums, input_precision="ieee")  # every code is exact in 8 bits of significand
    return sums


@triton.jit
def place_of_program(m, n, n_splits, BM: tl.constexpr, BN: tl.constexpr):
    """(share of K, first row, first column) of this program's tile."""
    split = tl.program_id(0) % n_splits
    tile = tl.program_id(0) // n_splits
    tiles_m = tl.cdiv(m, BM).to(tl.int32)
    tiles_n = tl.cdiv(n, BN).to(tl.int32)
    band = tile // (_GROUP * tiles_n)
    height = tl.minimum(tiles_m - band * _GROUP, _GROUP)
    inside = tile % (_GROUP * tiles_n)
    row = band * _GROUP + inside % height
    return split, row.to(tl.int64) * BM, (inside // height).to(tl.int64) * BN


@triton.jit
def product(
    a_ptr, b_ptr, rows, columns, m, n, k, a_m, a_k, b_k, b_n, first, last,
    A_DTYPE: tl.constexpr, AS_HALF: tl.constexpr, SUM_A: tl.constexpr, SUM_B: tl.constexpr,
    A_INNER: tl.constexpr, A_VEC: tl.constexpr, B_INNER: tl.constexpr, B_VEC: tl.constexpr,
    K_VEC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """a @ b over the tiles of K from `first` to `last`, and sums of a's rows and b's columns if asked for."""
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
    a_mask = (rows < (m // A_VEC * A_VEC if A_INNER == ROWS else m))[:, None]
    b_mask = (columns < (n // B_VEC * B_VEC if B_INNER == COLUMNS else n))[None, :]
    whole = tl.minimum(last, (k // BK).to(tl.int32))
    for _ in range(first, whole):
        x = _load(a_pointers, a_mask, A_DTYPE)
        y = _load(b_pointers, b_mask, INT8)
        sums = _dot(x, y, sums, A_DTYPE, AS_HALF)
        if SUM_A:
            a_sums += tl.sum(x.to(tl.int32), axis=1)
        if SUM_B:
            b_sums += tl.sum(y.to(tl.int32), axis=0)
        a_pointers += BK * a_step
        b_pointers += BK * b_step
    if whole < last:  # the end of K, apart, so that the loop needs no mask over it
        rest = inner < (k - whole.to(tl.int64) * BK) // K_VEC * K_VEC
        x = _load(a_pointers, a_mask & rest[None, :], A_DTYPE)
        y = _load(b_pointers, b_mask & rest[:, None], INT8)
        sums = _dot(x, y, sums, A_DTYPE, AS_HALF)
        if SUM_A:
            a_sums += tl.sum(x.to(tl.int32), axis=1)
        if SUM_B:
            b_sums += tl.sum(y.to(tl.int32), axis=0)
    return sums, a_sums, b_sums
