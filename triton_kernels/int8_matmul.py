"""Products of matrices with int8 operands. A product of [M, K] and [K, N] takes 2 * M * N * K operations.

    int8 @ int8:  out[m, n] = (sum over k of (a[m, k] - za[m]) * (b[k, n] - zb[n])) * (sa[m] * sb[n]) + bias[n]
                  sa and za are the scale and the zero point of a row of a (or of all of a). sb and zb are those of a
                  column of b (or of all of b). The sum of products of codes is exact in int32, since K is at most
                  MAX_K (ops/int8.py). With zero points, the sum over k is computed as
                      sum(a * b) - za[m] * sum(b) - zb[n] * sum(a) + K * za[m] * zb[n]
                  So if a has zero points, the kernel also needs the sum of each column of b. If b has zero points, it
                  also needs the sum of each row of a.
    x @ int8:     out[m, n] = (sum over k of x[m, k] * b[k, n]) * sb[n] + bias[n]
                  Codes are converted to x's dtype in registers. Sums are fp32.

A code of an operand or of the output is one byte. A floating-point number is two or four bytes. Each part of an operand
is read once for each tile of the output that needs it. The first of these reads is from memory. Most of the later reads
are from L2, because programs that run at the same time compute tiles in the same eight rows of tiles (`place_of_tile`
in product.py).

    `b`                   BN             a program: one tile BM x BN of the output and one share of K
                      +---------+
               BK     |         |        _matmul_kernel:   shares = 1:  sums -> scales, bias, codes -> out
                      +---------+                          shares > 1:  sums -> partials[share, m, n]
    `a`   BM  [  ][  ] [ tile ]          _combine_kernel:  partials, added in the order of shares
               share 0   share 1                                       -> scales, bias, codes -> out
                                         _sums_kernel:     with zero points: sums of rows of a and of columns of b, if
                                                           _matmul_kernel has no registers to add them up

If there are too few tiles to fill a device, several programs share the K of one tile. In the code such a share of K is
a "split".
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..ops.table import DTYPE_CODES
from .common import load_elements, store_elements
from .int8 import code_pointers, codes_of, launch_unfused
from .product import (
    COLUMNS,
    FULL,
    INT8,
    ROWS,
    Tiles,
    access_of,
    capability_of,
    combined,
    place_of_program,
    pointers_of,
    product,
    round_up,
    shares_of,
)

_DTYPES = DTYPE_CODES | {torch.int8: INT8.value}
_COMBINE_TILE = tl.constexpr(512)


# --------------------------------------------------------------------------------------------------------- kernels
@triton.jit(do_not_specialize=list(range(6)))
def _sums_kernel(
    a_ptr,
    sums_ptr,  # int32 [m]
    m: tl.int64,
    k: tl.int64,
    a_m: tl.int64,
    a_k: tl.int64,
    INNER: tl.constexpr,
    VEC: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """Write the sum of each row of an int8 matrix [m, k]. `access_of` gives INNER and VEC."""
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inner = tl.arange(0, BK).to(tl.int64)
    mask = (rows < (m // VEC * VEC if INNER == ROWS else m))[:, None]
    end = round_up(k, VEC) if INNER == COLUMNS else k
    pointers = pointers_of(a_ptr, rows, inner, a_m, a_k, INT8, INNER, VEC)
    step = a_k // VEC * VEC if INNER == ROWS else a_k
    sums = tl.zeros((BM, BK), tl.int32)
    for i in range(0, tl.cdiv(k, BK).to(tl.int32)):
        x = tl.load(pointers, mask=mask & (i * BK + inner < end)[None, :], other=0)
        if INNER == COLUMNS and VEC > 1:  # an access may also read elements beyond k
            x = tl.where((i * BK + inner < k)[None, :], x, 0)
        sums += x.to(tl.int32)
        pointers += BK * (1 if INNER == COLUMNS else step)
    tl.store(sums_ptr + rows, tl.sum(sums, axis=1), mask=rows < m)


@triton.jit
def _zero_points(zero_point_ptr, indices, step, mask):
    return tl.load(zero_point_ptr + indices * step, mask=mask, other=0).to(tl.int64)


@triton.jit
def _finish(
    total, rows, columns, m, n, a_scale_ptr, a_scale_step, b_scale_ptr, b_scale_step, bias_ptr, out_ptr,
    out_scale_ptr, out_zero_point_ptr, BIAS_DTYPE: tl.constexpr, DTYPE: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Multiply sums by their scales, add the bias, and store the output, as codes if `out_scale_ptr` is not None.

    `rows` and `columns` broadcast to the shape of `total`.
    """
    exist_columns = columns < n
    scale = tl.load(b_scale_ptr + columns * b_scale_step, mask=exist_columns, other=0.0)
    if a_scale_ptr is not None:
        scale = tl.load(a_scale_ptr + rows * a_scale_step, mask=rows < m, other=0.0) * scale
    y = total.to(tl.float32) * scale
    if bias_ptr is not None:
        y += load_elements(bias_ptr.to(tl.int64), columns, exist_columns, BIAS_DTYPE, 1)
    if VEC > 1:
        n = n // VEC * VEC
    mask = (rows < m) & (columns < n)
    if out_scale_ptr is None:
        store_elements(out_ptr.to(tl.int64), rows * n + columns, y, mask, DTYPE, VEC)
    else:
        inverse = tl.div_rn(1.0, tl.load(out_scale_ptr))
        zero_point = tl.full((), 0, tl.int32)
        if out_zero_point_ptr is not None:
            zero_point = tl.load(out_zero_point_ptr)
        codes = codes_of(y, inverse, zero_point, out_zero_point_ptr is None)
        tl.store(code_pointers(out_ptr, rows * n + columns, VEC), codes.to(tl.int8), mask=mask)


@triton.jit(do_not_specialize=list(range(24)))
def _matmul_kernel(
    a_ptr,
    b_ptr,
    a_scale_ptr,
    a_zero_point_ptr,
    b_scale_ptr,
    b_zero_point_ptr,
    bias_ptr,
    out_ptr,
    out_scale_ptr,
    out_zero_point_ptr,
    a_sums_ptr,  # sums of a's rows, from _sums_kernel. If it is None and b has zero points, this kernel adds them up
    b_sums_ptr,  # sums of b's columns, from _sums_kernel. If it is None and a has zero points, this kernel adds them up
    partials_ptr,  # [n_splits, m, n], for _combine_kernel. If it is None, each program adds up all of K
    m: tl.int64,
    n: tl.int64,
    k: tl.int64,
    a_m: tl.int64,
    a_k: tl.int64,
    b_k: tl.int64,
    b_n: tl.int64,
    a_scale_step: tl.int64,
    b_scale_step: tl.int64,
    n_splits: tl.int32,
    tiles_of_split: tl.int32,
    A_DTYPE: tl.constexpr,  # INT8, or the floating-point dtype to which codes of b are converted
    AS_HALF: tl.constexpr,  # int8 operands are multiplied as fp16
    BIAS_DTYPE: tl.constexpr,
    DTYPE: tl.constexpr,
    VEC: tl.constexpr,
    A_INNER: tl.constexpr,
    A_VEC: tl.constexpr,
    B_INNER: tl.constexpr,
    B_VEC: tl.constexpr,
    K_VEC: tl.constexpr,  # k is a multiple of K_VEC
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    SUM_A: tl.constexpr = b_zero_point_ptr is not None and a_sums_ptr is None
    SUM_B: tl.constexpr = a_zero_point_ptr is not None and b_sums_ptr is None
    split, row, column = place_of_program(tl.program_id(0), m, n, n_splits, BM, BN)
    rows = row + tl.arange(0, BM)
    columns = column + tl.arange(0, BN)
    first = split * tiles_of_split
    last = tl.minimum(first + tiles_of_split, tl.cdiv(k, BK).to(tl.int32))
    total, a_sums, b_sums = product(
        a_ptr, b_ptr, rows, columns, m, n, k, a_m, a_k, b_k, b_n, first, last,
        A_DTYPE, AS_HALF, SUM_A, SUM_B, A_INNER, A_VEC, B_INNER, B_VEC, K_VEC, BM, BN, BK,
    )  # fmt: skip
    # A zero point times a sum may need more than 32 bits.
    if a_zero_point_ptr is not None or b_zero_point_ptr is not None:
        total = total.to(tl.int64)
    if a_zero_point_ptr is not None:
        a_zero = _zero_points(a_zero_point_ptr, rows, a_scale_step, rows < m)[:, None]
        if b_sums_ptr is not None:
            b_sums = tl.load(b_sums_ptr + columns, mask=columns < n, other=0)
        total -= a_zero * b_sums.to(tl.int64)[None, :]
    if b_zero_point_ptr is not None:
        b_zero = _zero_points(b_zero_point_ptr, columns, b_scale_step, columns < n)[None, :]
        if a_sums_ptr is not None:
            a_sums = tl.load(a_sums_ptr + rows, mask=rows < m, other=0)
        total -= b_zero * a_sums.to(tl.int64)[:, None]
        if a_zero_point_ptr is not None:
            terms = tl.minimum(k, last.to(tl.int64) * BK) - tl.minimum(k, first.to(tl.int64) * BK)
            total += terms * a_zero * b_zero
    rows = rows[:, None]
    columns = columns[None, :]
    if partials_ptr is None:
        _finish(
            total, rows, columns, m, n, a_scale_ptr, a_scale_step, b_scale_ptr, b_scale_step, bias_ptr, out_ptr,
            out_scale_ptr, out_zero_point_ptr, BIAS_DTYPE, DTYPE, VEC,
        )  # fmt: skip
    else:
        tl.store(partials_ptr + (split * m + rows) * n + columns, total, mask=(rows < m) & (columns < n))


@triton.jit(do_not_specialize=list(range(12)))
def _combine_kernel(
    partials_ptr,
    a_scale_ptr,
    b_scale_ptr,
    bias_ptr,
    out_ptr,
    out_scale_ptr,
    out_zero_point_ptr,
    m: tl.int64,
    n: tl.int64,
    a_scale_step: tl.int64,
    b_scale_step: tl.int64,
    n_splits: tl.int32,
    BIAS_DTYPE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    indices = tl.program_id(0).to(tl.int64) * _COMBINE_TILE + tl.arange(0, _COMBINE_TILE)
    total = combined(partials_ptr, indices, m * n, n_splits)
    _finish(
        total, indices // n, indices % n, m, n, a_scale_ptr, a_scale_step, b_scale_ptr, b_scale_step, bias_ptr,
        out_ptr, out_scale_ptr, out_zero_point_ptr, BIAS_DTYPE, DTYPE, 1,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- launch
# Tiles(m, n, k, warps, stages). A program holds parts of both operands in shared memory. These parts take at most
# 96 KB, because a thread block may use only 99 KB of shared memory on sm_86, sm_89 and sm_120. _LARGE_HOPPER is an
# exception: it is only for sm_90, and its parts take 192 KB. None of these tiles spills registers
# (tests/package/test_triton_compile.py).
_LARGE = {
    torch.int8: Tiles(128, 128, 128, 8, 3),
    torch.float16: Tiles(128, 128, 64, 8, 4),
    torch.bfloat16: Tiles(128, 128, 64, 8, 4),
    # Only 32 rows: in tiles of 64 rows or more, Triton 3.6 computes in TF32 on sm_100, although `product.dot` asks for
    # "ieee".
    torch.float32: Tiles(32, 128, 32, 8, 2),
}
# For int8 on sm_90. The parts of both operands are in shared memory, because wgmma, the matrix instruction of sm_90,
# reads them from there. They take 192 of the 227 KB that a thread block may use.
_LARGE_HOPPER = Tiles(128, 256, 128, 8, 4)
# For int8 products that are not plain (argument `plain` of `_tiles`). Such a product needs registers not only for its
# outputs. So its tile has fewer outputs than that of a plain product.
_LARGE_NARROW = Tiles(128, 64, 128, 8, 4)
_MEDIUM = {
    torch.int8: Tiles(64, 64, 128, 4, 4),
    torch.float16: Tiles(64, 64, 64, 4, 4),
    torch.bfloat16: Tiles(64, 64, 64, 4, 4),
    torch.float32: Tiles(32, 64, 32, 4, 3),
}
# For products with at most 16 rows. They have one row of tiles, so each element of b is read once.
_FEW_ROWS = {
    torch.int8: Tiles(16, 32, 256, 4, 4),
    torch.float16: Tiles(16, 32, 256, 4, 4),
    torch.bfloat16: Tiles(16, 32, 256, 4, 4),
    torch.float32: Tiles(16, 32, 64, 4, 3),
}
# For products with at most 16 columns. They have one column of tiles, so each element of a is read once.
_FEW_COLUMNS = {
    torch.int8: Tiles(32, 16, 256, 4, 4),
    torch.float16: Tiles(32, 16, 256, 4, 4),
    torch.bfloat16: Tiles(32, 16, 256, 4, 4),
    torch.float32: Tiles(32, 16, 64, 4, 3),
}
# For operands that are read one element at a time. Each element then needs an address and a predicate of its own. So a
# thread loads fewer elements at a time than with the tiles above.
_BY_ELEMENT = Tiles(64, 64, 32, 8, 2)
_BY_ELEMENT_FP32 = Tiles(32, 32, 16, 4, 2)
# For outputs with at most 32 rows or columns, if one or both operands are read one element at a time and a is not fp32.
# Also for all products on Turing, where Triton no longer uses tensor cores.
_SMALL = Tiles(32, 32, 32, 4, 2)


def _large_tiles(dtype: torch.dtype, plain: bool, capability: tuple[int, int]) -> Tiles:
    if dtype == torch.int8 and not plain:
        return _LARGE_NARROW
    return _LARGE_HOPPER if dtype == torch.int8 and capability[0] == 9 else _LARGE[dtype]


def _tiles(dtype: torch.dtype, m: int, n: int, wide: bool, plain: bool, capability: tuple[int, int]) -> Tiles:
    """Return the tile sizes for a product.

    Args:
        dtype: The dtype of a.
        m: The number of rows of the output.
        n: The number of columns of the output.
        wide: Whether both operands are read 16 bytes at a time.
        plain: Whether there are no zero points, the output is not codes, and at least one operand is contiguous along
            K. After its loop, a plain product is only multiplied by the scales and added to the bias.
        capability: The compute capability of the device.
    """
    if capability < (8, 0):
        return _SMALL
    if not wide:
        if dtype == torch.float32:
            return _BY_ELEMENT_FP32
        return _SMALL if m <= 32 or n <= 32 else _BY_ELEMENT
    if m <= 16:
        return _FEW_ROWS[dtype]
    if n <= 16:
        return _FEW_COLUMNS[dtype]
    large = _large_tiles(dtype, plain, capability)
    return large if math.ceil(m / large.m) * math.ceil(n / large.n) >= FULL else _MEDIUM[dtype]


def _sums(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row of an int8 matrix [rows, columns]."""
    rows, columns = x.shape
    inner, vec = access_of(x, 0)
    bm, bk = (128, 32) if inner == ROWS.value else (8, 512)
    sums = torch.empty(rows, dtype=torch.int32, device=x.device)
    launch_unfused(
        _sums_kernel, math.ceil(rows / bm), x.device, x, sums, rows, columns, *x.stride(),
        INNER=inner, VEC=vec, BM=bm, BK=bk, num_warps=4,
    )  # fmt: skip
    return sums


def _in_chunks(x: torch.Tensor) -> torch.Tensor:
    """Return int8 [rows, K] that can be read 16 bytes at a time: x itself, or a copy with padded rows.

    On an H200 a product of 4096 x 4096 x 4095 takes 1419 us if its operands are read by element. A product of
    4096 x 4096 x 4096, whose operands are read 16 bytes at a time, takes 148 us.
    """
    if access_of(x, 0)[1] > 1:
        return x
    rows, k = x.shape
    return x.new_empty(rows, math.ceil(k / 16) * 16)[:, :k].copy_(x)


def _multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    a_zero_point: torch.Tensor | None,
    b_scale: torch.Tensor,
    b_zero_point: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
    out_zero_point: torch.Tensor | None,
) -> None:
    (m, k), n = a.shape, b.shape[1]
    has_zero_points = a_zero_point is not None or b_zero_point is not None
    capability = capability_of(a.device)
    (a_inner, a_vec), (b_inner, b_vec) = access_of(a, 0), access_of(b, 1)
    plain = not has_zero_points and out_scale is None and (a_inner == COLUMNS.value or b_inner == ROWS.value)
    tiles = _tiles(a.dtype, m, n, a_vec > 1 and b_vec > 1, plain, capability)
    n_tiles = math.ceil(m / tiles.m) * math.ceil(n / tiles.n)
    n_splits, tiles_of_split = shares_of(n_tiles, math.ceil(k / tiles.k))
    # With zero points, sums of the rows of a or of the columns of b are needed. For large tiles `_sums_kernel` adds
    # them up, because the loop of the product has too few registers for these sums. Also, all tiles in a row of tiles
    # would add up the same rows of a, and all tiles in a column of tiles the same columns of b.
    apart = has_zero_points and tiles == _LARGE_NARROW
    a_sums = _sums(a) if apart and b_zero_point is not None else None
    b_sums = _sums(b.t()) if apart and a_zero_point is not None else None
    partials = None
    if n_splits > 1:
        exact = torch.int64 if has_zero_points else torch.int32
        dtype = exact if a.dtype == torch.int8 else torch.float32
        partials = torch.empty((n_splits, m, n), dtype=dtype, device=a.device)
    steps = (0 if a_scale is None or a_scale.numel() == 1 else 1, 0 if b_scale.numel() == 1 else 1)
    vec = 16 // out.element_size()
    dtypes = {"BIAS_DTYPE": _DTYPES[out.dtype if bias is None else bias.dtype], "DTYPE": _DTYPES[out.dtype]}
    launch_unfused(
        _matmul_kernel, n_tiles * n_splits, a.device, a, b, a_scale, a_zero_point, b_scale, b_zero_point, bias, out,
        out_scale, out_zero_point, a_sums, b_sums, partials, m, n, k, *a.stride(), *b.stride(), *steps, n_splits,
        tiles_of_split, A_DTYPE=_DTYPES[a.dtype], AS_HALF=a.dtype == torch.int8 and capability < (8, 0),
        VEC=vec if n % vec == 0 and out.data_ptr() % 16 == 0 else 1, A_INNER=a_inner, A_VEC=a_vec,
        B_INNER=b_inner, B_VEC=b_vec, K_VEC=16 if k % 16 == 0 else 1, **dtypes, **tiles.constants(),
    )  # fmt: skip
    if partials is not None:
        launch_unfused(
            _combine_kernel, math.ceil(m * n / _COMBINE_TILE.value), a.device, partials, a_scale, b_scale, bias, out,
            out_scale, out_zero_point, m, n, *steps, n_splits, **dtypes, num_warps=4,
        )  # fmt: skip


def _int8_matmul_(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    a_zero_point: torch.Tensor | None,
    b_scale: torch.Tensor,
    b_zero_point: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
    out_zero_point: torch.Tensor | None,
) -> None:
    if min(out.shape) > 16:  # with at most 16 rows or columns, the copy would take as long as the product
        a, b = _in_chunks(a), _in_chunks(b.t()).t()
    _multiply(a, b, a_scale, a_zero_point, b_scale, b_zero_point, bias, out, out_scale, out_zero_point)


def _int8_linear_(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    _multiply(x, weight.t(), None, None, scale, None, bias, out, None, None)
