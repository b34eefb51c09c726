"""Products of fp16 or bf16 matrices: out = activation(alpha * a @ b + beta * input), summed in fp32 and rounded once.

A product has 2 m n k operations. Each part of a and b is read once for each tile [BM, BN] of `out` that needs it.
Programs compute the tiles of `out` in bands. A band is at most 8 tiles high, and its tiles are computed column by
column. The tiles of a column read the same part of b. At most one of these tiles reads this part from memory, and
the other tiles find it in L2.

There are two kernels:

- `_descriptor_kernel` loads operands through tensor descriptors. Loads beyond M, N and K give 0. A program computes
  one tile or several, one after the other. This kernel needs a device with a tensor memory accelerator (TMA), which
  compute capabilities from 9.0 have. TMA must be able to address the operands (`_describe`).
- `_matmul_kernel` loads operands through pointers, with any strides. A program computes one tile. If there are too few
  tiles to fill a device, several programs share the K of one tile, and `_combine_kernel` adds their sums in a fixed
  order.

Both kernels store results through pointers, because a store through a descriptor can only end at a multiple of 16
bytes. The memory between the end of the result and that multiple may belong to another tensor.
"""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..ops.table import DTYPE_CODES
from .activation import activate
from .common import _INTERPRETED, launch, load_elements, store_elements
from .product import (
    COLUMNS,
    FULL,
    NEITHER,
    ROWS,
    Tiles,
    access_of,
    as_operand,
    capability_of,
    combined,
    dot,
    load_tile,
    place_of_program,
    place_of_tile,
    pointers_of,
    product,
    round_up,
    shares_of,
)

_COMBINE_TILE = tl.constexpr(512)
# The value of INPUT_INNER if `input` is a bias, so that all rows of `input` are the same. Otherwise INPUT_INNER is
# NEITHER, ROWS or COLUMNS, as in product.py.
_EACH_ROW = tl.constexpr(3)


# --------------------------------------------------------------------------------------------------------- epilogue
@triton.jit
def _tile_of_input(
    ptr, rows, columns, m, n, row_stride, column_stride, DTYPE: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr
):
    if INNER == _EACH_ROW:
        return load_elements(ptr.to(tl.int64), columns * column_stride, columns < n, DTYPE, 1)[None, :]
    else:
        pointers = pointers_of(ptr, rows, columns, row_stride, column_stride, DTYPE, INNER, VEC)
        # An access reads VEC elements. As in `product`, the mask includes an access if at least one of its elements is
        # in the matrix.
        exist_rows = rows < (round_up(m, VEC) if INNER == ROWS else m)
        exist_columns = columns < (round_up(n, VEC) if INNER == COLUMNS else n)
        return load_tile(pointers, exist_rows[:, None] & exist_columns[None, :], DTYPE).to(tl.float32)


@triton.jit
def _argument(sums, input, alpha, beta):
    """Return the argument of the activation. `input` is None if the product has no input, or if beta is 0."""
    x = alpha * sums
    if input is not None:
        x += beta * input
    return x


@triton.jit
def _store_last(
    address, starts, exist_rows, column, n, x,
    DTYPE: tl.constexpr, VEC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Store the last n % VEC columns one by one, if they are in this tile. A wide access to them would end beyond n."""
    first = n // VEC * VEC
    if (first < n) & (column <= first) & (first < column + BN):
        # The last columns are first picked out of the tile. If the whole tile were stored with a mask, each of its
        # elements would need an address and a predicate, and large tiles would spill registers.
        is_last = (column + tl.arange(0, BN)) // VEC * VEC == first
        bits = tl.where(is_last[None, :], x.to(tl.int32, bitcast=True), 0)
        last = tl.sum(tl.reshape(bits, (BM, BN // VEC, VEC)), axis=1).to(tl.float32, bitcast=True)
        columns = first + tl.arange(0, VEC)
        store_elements(address, starts + columns[None, :], last, exist_rows & (columns < n)[None, :], DTYPE, 1)


@triton.jit
def _store_tile(
    ptr, rows, column, m, n, row_stride, x,
    DTYPE: tl.constexpr, VEC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    address = ptr.to(tl.int64)
    exist_rows = (rows < m)[:, None]
    starts = (rows * (row_stride // VEC * VEC))[:, None]
    columns = column + tl.arange(0, BN)
    mask = exist_rows & (columns < n // VEC * VEC)[None, :]
    store_elements(address, starts + columns[None, :], x, mask, DTYPE, VEC)
    if VEC > 1:
        _store_last(address, starts, exist_rows, column, n, x, DTYPE, VEC, BM, BN)


@triton.jit
def _finish_part(
    sums, batch, row, column, m, n, input_ptr, input_b, input_m, input_n, out_ptr, pre_ptr, out_b, out_m, alpha, beta,
    ACTIVATION: tl.constexpr, DTYPE: tl.constexpr, INPUT_INNER: tl.constexpr, INPUT_VEC: tl.constexpr,
    OUT_DTYPE: tl.constexpr, OUT_VEC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    rows = row + tl.arange(0, BM)
    if input_ptr is not None:
        input_ptr += batch * input_b
        columns = column + tl.arange(0, BN)
        input = _tile_of_input(input_ptr, rows, columns, m, n, input_m, input_n, DTYPE, INPUT_INNER, INPUT_VEC)
    else:
        input = None
    x = _argument(sums, input, alpha, beta)
    if pre_ptr is not None:
        _store_tile(pre_ptr + batch * out_b, rows, column, m, n, out_m, x, OUT_DTYPE, OUT_VEC, BM, BN)
    x = activate(x, ACTIVATION)
    _store_tile(out_ptr + batch * out_b, rows, column, m, n, out_m, x, OUT_DTYPE, OUT_VEC, BM, BN)


@triton.jit
def _finish_tile(
    sums, batch, row, column, m, n, input_ptr, input_b, input_m, input_n, out_ptr, pre_ptr, out_b, out_m, alpha, beta,
    ACTIVATION: tl.constexpr, DTYPE: tl.constexpr, INPUT_INNER: tl.constexpr, INPUT_VEC: tl.constexpr,
    OUT_DTYPE: tl.constexpr, OUT_VEC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Store a tile of results.

    A large tile is stored in parts of 32 columns, because there are too few registers for the sums and another array of
    the tile's size. With parts of 64 columns, registers still spill on sm_90 and sm_100.
    """
    PART: tl.constexpr = 32 if BM * BN > 64 * 64 and BN > 64 else BN
    PARTS: tl.constexpr = BN // PART
    parts = (sums,)
    if PARTS > 1:
        parts = _halves(sums, BM, BN // 2)
    if PARTS > 2:
        parts = _halves(parts[0], BM, BN // 4) + _halves(parts[1], BM, BN // 4)
    if PARTS > 4:
        left = _halves(parts[0], BM, PART) + _halves(parts[1], BM, PART)
        parts = left + _halves(parts[2], BM, PART) + _halves(parts[3], BM, PART)
    for i in tl.static_range(PARTS):
        _finish_part(
            parts[i], batch, row, column + i * PART, m, n, input_ptr, input_b, input_m, input_n, out_ptr, pre_ptr,
            out_b, out_m, alpha, beta, ACTIVATION, DTYPE, INPUT_INNER, INPUT_VEC, OUT_DTYPE, OUT_VEC, BM, PART,
        )  # fmt: skip


@triton.jit
def _halves(x, ROWS: tl.constexpr, HALF: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, HALF)), (0, 2, 1)))


# ---------------------------------------------------------------------------------------------------------- kernels
@triton.jit(do_not_specialize=list(range(25)))
def _matmul_kernel(
    a_ptr,
    b_ptr,
    input_ptr,
    out_ptr,
    pre_ptr,
    partials_ptr,  # [n_splits, batches, m, n] for _combine_kernel; None: each program adds up all of K
    batches: tl.int32,
    m: tl.int64,
    n: tl.int64,
    k: tl.int64,
    a_b: tl.int64,
    a_m: tl.int64,
    a_k: tl.int64,
    b_b: tl.int64,
    b_k: tl.int64,
    b_n: tl.int64,
    input_b: tl.int64,
    input_m: tl.int64,
    input_n: tl.int64,
    out_b: tl.int64,
    out_m: tl.int64,
    n_splits: tl.int32,
    tiles_of_split: tl.int32,
    alpha: tl.float32,
    beta: tl.float32,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    A_INNER: tl.constexpr,
    A_VEC: tl.constexpr,
    B_INNER: tl.constexpr,
    B_VEC: tl.constexpr,
    INPUT_INNER: tl.constexpr,
    INPUT_VEC: tl.constexpr,
    OUT_VEC: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    programs = (tl.cdiv(m, BM) * tl.cdiv(n, BN)).to(tl.int32) * n_splits
    batch = (tl.program_id(0) // programs).to(tl.int64)
    split, row, column = place_of_program(tl.program_id(0) % programs, m, n, n_splits, BM, BN)
    rows = row + tl.arange(0, BM)
    columns = column + tl.arange(0, BN)
    first = split * tiles_of_split
    last = tl.minimum(first + tiles_of_split, tl.cdiv(k, BK).to(tl.int32))
    sums, _, _ = product(
        a_ptr + batch * a_b, b_ptr + batch * b_b, rows, columns, m, n, k, a_m, a_k, b_k, b_n, first, last,
        DTYPE, DTYPE, False, False, False, A_INNER, A_VEC, B_INNER, B_VEC, 1, BM, BN, BK,
    )  # fmt: skip
    if partials_ptr is None:
        _finish_tile(
            sums, batch, row, column, m, n, input_ptr, input_b, input_m, input_n, out_ptr, pre_ptr, out_b, out_m,
            alpha, beta, ACTIVATION, DTYPE, INPUT_INNER, INPUT_VEC, OUT_DTYPE, OUT_VEC, BM, BN,
        )  # fmt: skip
    else:
        first_row = (split * batches + batch) * m
        mask = (rows < m)[:, None] & (columns < n)[None, :]
        tl.store(partials_ptr + (first_row + rows)[:, None] * n + columns[None, :], sums, mask=mask)


@triton.jit(do_not_specialize=list(range(15)))
def _combine_kernel(
    partials_ptr,
    input_ptr,
    out_ptr,
    pre_ptr,
    batches: tl.int32,
    m: tl.int64,
    n: tl.int64,
    input_b: tl.int64,
    input_m: tl.int64,
    input_n: tl.int64,
    out_b: tl.int64,
    out_m: tl.int64,
    n_splits: tl.int32,
    alpha: tl.float32,
    beta: tl.float32,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
):
    indices = tl.program_id(0).to(tl.int64) * _COMBINE_TILE + tl.arange(0, _COMBINE_TILE)
    size = batches * m * n
    sums = combined(partials_ptr, indices, size, n_splits)
    mask = indices < size
    column = indices % n
    row = indices // n % m
    batch = indices // (m * n)
    if input_ptr is not None:
        offsets = batch * input_b + row * input_m + column * input_n
        input = load_elements(input_ptr.to(tl.int64), offsets, mask, DTYPE, 1)
    else:
        input = None
    x = _argument(sums, input, alpha, beta)
    offsets = batch * out_b + row * out_m + column
    if pre_ptr is not None:
        store_elements(pre_ptr.to(tl.int64), offsets, x, mask, OUT_DTYPE, 1)
    store_elements(out_ptr.to(tl.int64), offsets, activate(x, ACTIVATION), mask, OUT_DTYPE, 1)


@triton.jit
def _tile_of(descriptor, batch, outer, inner, DTYPE: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr):
    x = tl.reshape(descriptor.load([batch, outer, inner]), (OUTER, INNER))
    return as_operand(x, DTYPE)


@triton.jit(do_not_specialize=list(range(18)))
def _descriptor_kernel(
    out_ptr,
    pre_ptr,
    input_ptr,
    a,  # descriptor of [batches or 1, m, k]; if A_INNER == ROWS, of [batches or 1, k, m]
    b,
    batches: tl.int32,
    m: tl.int64,
    n: tl.int64,
    k: tl.int64,
    a_step: tl.int32,  # 0 if all batches have the same a, else 1
    b_step: tl.int32,
    input_b: tl.int64,
    input_m: tl.int64,
    input_n: tl.int64,
    out_b: tl.int64,
    out_m: tl.int64,
    alpha: tl.float32,
    beta: tl.float32,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    A_INNER: tl.constexpr,
    B_INNER: tl.constexpr,
    INPUT_INNER: tl.constexpr,
    INPUT_VEC: tl.constexpr,
    OUT_VEC: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    FLATTEN: tl.constexpr,  # one loop over tiles and K; loads for the next tile then begin before this tile is stored
):
    tiles_of_matrix = (tl.cdiv(m, BM) * tl.cdiv(n, BN)).to(tl.int32)
    k_tiles = tl.cdiv(k, BK).to(tl.int32)
    for tile in tl.range(tl.program_id(0), tiles_of_matrix * batches, tl.num_programs(0), flatten=FLATTEN):
        batch = tile // tiles_of_matrix
        tile_row, tile_column = place_of_tile(tile % tiles_of_matrix, m, n, BM, BN)
        row = tile_row * BM
        column = tile_column * BN
        sums = tl.zeros((BM, BN), tl.float32)
        for i in range(k_tiles):
            if A_INNER == COLUMNS:
                x = _tile_of(a, batch * a_step, row, i * BK, DTYPE, BM, BK)
            else:
                x = _tile_of(a, batch * a_step, i * BK, row, DTYPE, BK, BM).T
            if B_INNER == COLUMNS:
                y = _tile_of(b, batch * b_step, i * BK, column, DTYPE, BK, BN)
            else:
                y = _tile_of(b, batch * b_step, column, i * BK, DTYPE, BN, BK).T
            sums = dot(x, y, sums, DTYPE, False)
        _finish_tile(
            sums, batch.to(tl.int64), row.to(tl.int64), column.to(tl.int64), m, n, input_ptr, input_b, input_m,
            input_n, out_ptr, pre_ptr, out_b, out_m, alpha, beta, ACTIVATION, DTYPE, INPUT_INNER, INPUT_VEC,
            OUT_DTYPE, OUT_VEC, BM, BN,
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- launch
# Tiles for `_matmul_kernel`. The parts of operands that a program holds in shared memory take at most 96 KB, because on
# sm_86, sm_89 and sm_120 a block may have 99 KB. None of these tiles spills registers
# (tests/package/test_triton_compile.py).
_LARGE = Tiles(128, 128, 64, 8, 3)
_MEDIUM = Tiles(64, 64, 64, 4, 4)
# For products with at most 16 rows. They have one row of tiles, so each element of b is read once.
_FEW_ROWS = Tiles(16, 32, 256, 4, 4)
# For products with at most 16 columns. They have one column of tiles, so each element of a is read once.
_FEW_COLUMNS = Tiles(32, 16, 256, 4, 4)
# For operands that are read one element at a time. A thread has fewer elements than with the tiles above, because each
# element then needs an address and a predicate of its own.
_FEW_ROWS_BY_ELEMENT = Tiles(16, 128, 32, 4, 2)
_FEW_COLUMNS_BY_ELEMENT = Tiles(128, 16, 32, 4, 2)
_BY_ELEMENT = Tiles(64, 64, 32, 8, 2)
# For products with one or both operands read one element at a time, if the smaller of m and n is from 17 to 32. Also
# for all products on Turing, where Triton no longer uses tensor cores.
_SMALL = Tiles(32, 32, 32, 4, 2)
# Tiles for `_descriptor_kernel`, by the major compute capability.
_LARGE_DESCRIPTORS = {9: Tiles(128, 256, 64, 8, 4), 10: Tiles(128, 256, 64, 8, 4), 12: Tiles(128, 128, 64, 8, 2)}
_MEDIUM_DESCRIPTORS = {9: Tiles(128, 128, 64, 8, 4), 10: Tiles(128, 128, 64, 8, 4), 12: Tiles(64, 64, 64, 4, 4)}
# Up to CUDA 13.1 the driver wrongly encodes the descriptor of a strided tensor that is smaller than this
# (NVIDIA/cutlass, copy_traits_sm90_tma.hpp).
_SMALLEST_OF_DESCRIPTORS = 128 * 1024  # bytes


def _tiles(m: int, n: int, batches: int, a_vec: int, b_vec: int, capability: tuple[int, int]) -> Tiles:
    """Return the tile sizes for `_matmul_kernel`."""
    if capability < (8, 0):
        return _SMALL
    if m <= 16:
        return _FEW_ROWS if b_vec > 1 else _FEW_ROWS_BY_ELEMENT
    if n <= 16:
        return _FEW_COLUMNS if a_vec > 1 else _FEW_COLUMNS_BY_ELEMENT
    if min(a_vec, b_vec) == 1:
        return _SMALL if min(m, n) <= 32 else _BY_ELEMENT
    return _LARGE if _count(_LARGE, m, n, batches) >= FULL else _MEDIUM


def _count(tiles: Tiles, m: int, n: int, batches: int) -> int:
    return batches * math.ceil(m / tiles.m) * math.ceil(n / tiles.n)


def _descriptor_tiles(m: int, n: int, k: int, batches: int, capability: tuple[int, int]) -> Tiles | None:
    if capability[0] not in _LARGE_DESCRIPTORS or min(m, n) <= 16 or k == 0:
        return None
    large, medium = _LARGE_DESCRIPTORS[capability[0]], _MEDIUM_DESCRIPTORS[capability[0]]
    if _count(large, m, n, batches) >= FULL:
        return large
    # If there are too few medium tiles as well, return None, because several programs should then share the K of a
    # tile. `_matmul_kernel` does that.
    return medium if _count(medium, m, n, batches) >= FULL // 2 else None


def _flattens(capability: tuple[int, int]) -> bool:
    """Return whether `_descriptor_kernel` makes one loop over tiles and K.

    On sm_120 it does not, because compiling that loop took two minutes. Before Triton 3.9 it does not, because Triton
    3.6 to 3.8 fail to compile it: "source has 1 operands, but target successor needs 6".
    """
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    return capability[0] in (9, 10) and version >= (3, 9)


def _access(x: torch.Tensor) -> tuple[int, int]:
    """Return what `access_of` returns, for a batch of matrices."""
    # `access_of` checks whether accesses end beyond the storage. The last matrix is the one nearest to its end.
    inner, vec = access_of(x[-1])
    return inner, vec if x.shape[0] == 1 or x.stride(0) % vec == 0 else 1


def _describe(x: torch.Tensor, block: tuple[int, int], access: tuple[int, int]) -> tuple[TensorDescriptor, int] | None:
    """Return (descriptor, step of its first index from one batch to the next), or None if TMA cannot address x.

    Args:
        x: A batch of matrices.
        block: The size of a load along the last two axes of x.
        access: What `_access` returns for x.
    """
    inner, vec = access
    batches = x.shape[0] if x.stride(0) != 0 else 1
    if inner == ROWS.value:
        x, block = x.mT, block[::-1]
    outer, length = x.shape[1:]
    # The stride of a dimension of size 1 is never used, so x may have any stride there. But TMA requires a multiple of
    # 16 bytes for this stride, too. So such a stride is replaced.
    row = x.stride(1) if outer > 1 else math.ceil(length / 8) * 8
    step = x.stride(0) if batches > 1 else math.ceil(outer * row / 8) * 8
    span = 2 * ((batches - 1) * step + (outer - 1) * row + length)
    fits = max(x.shape) < 2**31 and max(step, row) < 2**39 and span >= _SMALLEST_OF_DESCRIPTORS
    if vec == 1 or row < length or not fits:
        return None
    if _INTERPRETED and x.dtype == torch.bfloat16:
        x = x.view(torch.int16)  # see as_operand
    descriptor = TensorDescriptor(x, [batches, outer, length], [step, row, 1], [1, *block])
    return descriptor, int(batches > 1)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    pretended = os.environ.get("AMP_KERNELS_MULTIPROCESSORS")  # see multiprocessor_count() of csrc/cuda/portable.h
    if pretended is not None:
        return int(pretended)
    # For the interpreter the number is small, so that a program computes several tiles.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _by_descriptors(
    a: torch.Tensor,
    b: torch.Tensor,
    input: torch.Tensor | None,
    out: torch.Tensor,
    pre: torch.Tensor | None,
    numbers: tuple[tuple[int, ...], float, float],
    constants: dict[str, Any],
) -> bool:
    """Compute the product with `_descriptor_kernel` if that is possible. Return whether it was."""
    (batches, m, k), n = a.shape, b.shape[2]
    capability = capability_of(a.device)
    tiles = _descriptor_tiles(m, n, k, batches, capability)
    if tiles is None:
        return False
    a_access, b_access = _access(a), _access(b)
    a_described, b_described = _describe(a, (tiles.m, tiles.k), a_access), _describe(b, (tiles.k, tiles.n), b_access)
    if a_described is None or b_described is None:
        return False
    strides, alpha, beta = numbers
    programs = min(_count(tiles, m, n, batches), _multiprocessors(a.device))
    launch(
        _descriptor_kernel, programs, out, pre, input, a_described[0], b_described[0], batches, m, n, k,
        a_described[1], b_described[1], *strides, alpha, beta, A_INNER=a_access[0], B_INNER=b_access[0],
        FLATTEN=_flattens(capability), **constants, **tiles.constants(),
    )  # fmt: skip
    return True


def _by_pointers(
    a: torch.Tensor,
    b: torch.Tensor,
    input: torch.Tensor | None,
    out: torch.Tensor,
    pre: torch.Tensor | None,
    numbers: tuple[tuple[int, ...], float, float],
    constants: dict[str, Any],
) -> None:
    (batches, m, k), n = a.shape, b.shape[2]
    (a_inner, a_vec), (b_inner, b_vec) = _access(a), _access(b)
    tiles = _tiles(m, n, batches, a_vec, b_vec, capability_of(a.device))
    n_tiles = _count(tiles, m, n, batches)
    n_splits, tiles_of_split = shares_of(n_tiles, math.ceil(k / tiles.k))
    partials = None
    if n_splits > 1:
        partials = torch.empty((n_splits, batches, m, n), dtype=torch.float32, device=a.device)
    strides, alpha, beta = numbers
    launch(
        _matmul_kernel, n_tiles * n_splits, a, b, input, out, pre, partials, batches, m, n, k, *a.stride(),
        *b.stride(), *strides, n_splits, tiles_of_split, alpha, beta, A_INNER=a_inner, A_VEC=a_vec, B_INNER=b_inner,
        B_VEC=b_vec, **constants, **tiles.constants(),
    )  # fmt: skip
    if partials is not None:
        names = ("ACTIVATION", "DTYPE", "OUT_DTYPE")
        launch(
            _combine_kernel, math.ceil(batches * m * n / _COMBINE_TILE.value), partials, input, out, pre, batches, m,
            n, *strides, n_splits, alpha, beta, num_warps=4, **{name: constants[name] for name in names},
        )  # fmt: skip


def _matmul_(
    a: torch.Tensor,
    b: torch.Tensor,
    input: torch.Tensor | None,
    out: torch.Tensor,
    pre: torch.Tensor | None,
    alpha: float,
    beta: float,
    activation: int,
) -> None:
    if beta == 0:
        input = None
    input_strides, input_access = (0, 0, 0), (NEITHER.value, 1)
    if input is not None:
        input_strides = input.stride()
        input_access = (_EACH_ROW.value, 1) if input.stride(1) == 0 else _access(input)
    vec = 16 // out.element_size()
    wide = all(x.data_ptr() % 16 == 0 for x in (out, pre) if x is not None)
    wide = wide and all(
        size == 1 or stride % vec == 0 for size, stride in zip(out.shape[:2], out.stride(), strict=False)
    )
    constants = {
        "ACTIVATION": activation, "DTYPE": DTYPE_CODES[a.dtype], "OUT_DTYPE": DTYPE_CODES[out.dtype],
        "INPUT_INNER": input_access[0], "INPUT_VEC": input_access[1], "OUT_VEC": vec if wide else 1,
    }  # fmt: skip
    numbers = ((*input_strides, *out.stride()[:2]), alpha, beta)
    if not _by_descriptors(a, b, input, out, pre, numbers, constants):
        _by_pointers(a, b, input, out, pre, numbers, constants)
