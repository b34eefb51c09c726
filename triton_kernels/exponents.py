"""Counts of exponents. One launch handles any mix of dtypes.

For each tensor t:

    counts[t][e]   += number of elements that are not 0 and whose biased fp32 exponent is e
    counts[t][256] += number of zeros
    largest[t]      = max(largest[t], largest finite |x|)
    squares[t]     += sum of x^2

Per element, 4 bytes (fp32) or 2 (fp16, bf16) are read.

A program of 128 threads handles one chunk (csrc/table.h), tile by tile. A tile is 8192 bytes, four accesses of 16 bytes
per thread. The first tile begins where the tensor is aligned to 16 bytes. The elements before the first tile and after
the last one, less than 16 bytes at each end, are read one by one:

    chunk:   | tile 0 | tile 1 | ..        exponents -> histogram of the chunk -> counts, by atomic additions
    tile:    | t0 | t1 | .. | t127 | t0 | t1 | ..            squares -> fp32 sum of a tile -> fp64 sum of the chunk

Counts and magnitudes are integers, so they do not depend on the order of the programs. The program that ends last adds
the sums of squares of each tensor's chunks in one order, so that the same tensors give the same bits.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..ops.exponents import COLUMNS
from .common import (
    BF16,
    FP16,
    FP32,
    GRAD,
    GRAD_DTYPE,
    NUMEL,
    add_squares,
    chunk_bounds,
    is_last,
    launch,
    load,
    load_elements,
    programs_at_a_time,
    table_entry,
)

_NUM_WARPS = 4
# With 96 registers, as other kernels have, it would spill on sm_90. With 128, four programs run on a multiprocessor.
_REGISTERS, _PROGRAMS = 128, 4
_TILE_BYTES = tl.constexpr(_NUM_WARPS * 32 * 64)  # as in unscale.py
_COLUMNS, _ZEROS = tl.constexpr(COLUMNS), tl.constexpr(COLUMNS - 1)
_FOLD = tl.constexpr(32)  # chunks, and partial sums of each of them, that are read at a time


@triton.jit
def _magnitude_bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _finite(bits):
    """Return the bits of magnitudes, with 0 in place of NaN and inf."""
    return tl.where(bits < 0x7F800000, bits, 0)


@triton.jit
def _count_ends(address, head, whole, n, counts_ptr, DTYPE: tl.constexpr, VEC: tl.constexpr):
    """Count the elements before and after the tiles, which are `whole` elements from element `head` on.

    They are at most 14, so each of them is added to the counts in memory.

    Returns:
        The fp64 sum of the squares of these elements, and the bits of the largest finite magnitude.
    """
    k = tl.arange(0, 2 * VEC)
    mask = k < n - whole
    x = load_elements(address, tl.where(k < head, k, k + whole), mask, DTYPE, 1)
    wide = x.to(tl.float64)
    bits = _magnitude_bits(x)
    column = tl.where(bits == 0, _ZEROS, bits >> 23)
    tl.atomic_add(counts_ptr + column, tl.full((2 * VEC,), 1, tl.int64), mask=mask, sem="relaxed")
    return tl.sum(wide * wide), tl.max(_finite(bits))


@triton.jit
def _count_chunk(address, n, counts_ptr, largest_ptr, DTYPE: tl.constexpr):
    """Add the counts of n elements to a row of the results, and raise the largest magnitude.

    Returns:
        The fp64 sum of the squares of the elements.
    """
    BYTES: tl.constexpr = 4 if DTYPE == FP32 else 2
    VEC: tl.constexpr = 16 // BYTES
    TILE: tl.constexpr = _TILE_BYTES // BYTES
    head = tl.minimum((VEC - address // BYTES % VEC) % VEC, n).to(tl.int32)
    whole = (n - head) // VEC * VEC
    total, largest = _count_ends(address, head, whole, n, counts_ptr, DTYPE, VEC)
    columns = tl.arange(0, _ZEROS)
    histogram = tl.zeros((_ZEROS,), tl.int32)
    zeros = tl.full((), 0, tl.int32)
    for i in range(0, whole, TILE):
        offsets = i + tl.arange(0, TILE)
        mask = offsets < whole
        x = load_elements(address + head * BYTES, offsets, mask, DTYPE, VEC)
        total = add_squares(total, x)
        bits = _magnitude_bits(x)
        histogram += tl.histogram(bits >> 23, _ZEROS, mask=mask)
        zeros += tl.sum(((bits == 0) & mask).to(tl.int32))
        largest = tl.maximum(largest, tl.max(_finite(bits)))
    # Zeros and subnormal numbers have the same exponent.
    histogram = tl.where(columns == 0, histogram - zeros, histogram)
    tl.atomic_add(counts_ptr + columns, histogram.to(tl.int64), mask=histogram != 0, sem="relaxed")
    tl.atomic_add(counts_ptr + _ZEROS, zeros.to(tl.int64), sem="relaxed")
    tl.atomic_max(largest_ptr.to(tl.pointer_type(tl.int32)), largest, sem="relaxed")
    return total


@triton.jit
def _add_squares(table_ptr, chunks_ptr, n_tensors, n_chunks, chunk_size, partials_ptr, squares_ptr):
    # The program looks at 32 chunks at a time. For each one that is the first of its tensor, it adds up the partial
    # sums of the tensor, 32 at a time. They are read from L2 (.cg), because other programs wrote them.
    for first in range(0, n_chunks, _FOLD):
        chunk = first + tl.arange(0, _FOLD).to(tl.int64)
        exists = chunk < n_chunks
        tensor = tl.load(chunks_ptr + 2 * chunk, mask=exists, other=0)
        index = tl.load(chunks_ptr + 2 * chunk + 1, mask=exists, other=0)
        before = tl.load(chunks_ptr + 2 * chunk - 2, mask=exists & (chunk > 0), other=-1)
        numel = table_entry(table_ptr, n_tensors, NUMEL, tensor)
        count = tl.where(exists & (tensor != before), (numel + chunk_size - 1) // chunk_size - index, 0)
        sums = tl.zeros((_FOLD, _FOLD), tl.float64)
        for k in range(0, tl.max(count).to(tl.int32), _FOLD):
            offsets = k + tl.arange(0, _FOLD)[None, :]
            pointers = partials_ptr + chunk[:, None] + offsets
            sums += tl.load(pointers, mask=offsets < count[:, None], other=0.0, cache_modifier=".cg")
        pointers = squares_ptr + tensor
        total = tl.load(pointers, mask=count > 0, other=0.0) + tl.sum(sums, axis=1)
        tl.store(pointers, total, mask=count > 0)


@triton.jit(do_not_specialize=list(range(10)))
def _exponents_kernel(
    table_ptr,  # int64 [rows, n_tensors]
    chunks_ptr,  # int32 [n_chunks, 2]; the chunks of a tensor are neighbours, in order
    n_tensors: tl.int32,
    n_chunks: tl.int32,
    chunk_size: tl.int32,
    partials_ptr,  # fp64 [n_chunks]
    record_ptr,  # int64; the first is the ticket
    counts_ptr,  # int64 [n_tensors, 257]
    largest_ptr,  # fp32 [n_tensors]
    squares_ptr,  # fp64 [n_tensors]
):
    chunk = tl.program_id(0).to(tl.int64)
    tensor, begin, n = chunk_bounds(table_ptr, chunks_ptr, n_tensors, chunk, chunk_size)
    address = table_entry(table_ptr, n_tensors, GRAD, tensor)
    dtype = table_entry(table_ptr, n_tensors, GRAD_DTYPE, tensor)
    row = counts_ptr + tensor.to(tl.int64) * _COLUMNS
    total = tl.full((), 0.0, tl.float64)
    if dtype == FP32:
        total = _count_chunk(address + begin * 4, n, row, largest_ptr + tensor, FP32)
    elif dtype == FP16:
        total = _count_chunk(address + begin * 2, n, row, largest_ptr + tensor, FP16)
    else:
        total = _count_chunk(address + begin * 2, n, row, largest_ptr + tensor, BF16)
    tl.store(partials_ptr + chunk, total)
    if is_last(record_ptr):
        _add_squares(table_ptr, chunks_ptr, n_tensors, n_chunks, chunk_size, partials_ptr, squares_ptr)


_OPTIONS = {"num_warps": _NUM_WARPS, "maxnreg": _REGISTERS}


def _count_exponents_(
    table: torch.Tensor,
    chunks: torch.Tensor,
    chunk_size: int,
    partials: torch.Tensor,
    record: torch.Tensor,
    counts: torch.Tensor,
    largest: torch.Tensor,
    squares: torch.Tensor,
) -> None:
    n_chunks = chunks.shape[0]
    launch(
        _exponents_kernel,
        n_chunks,
        table,
        chunks,
        table.shape[1],
        n_chunks,
        chunk_size,
        partials,
        record,
        counts,
        largest,
        squares,
        **_OPTIONS,
    )


def _load_exponents(beside: torch.Tensor) -> int:
    _load(beside.device)
    return programs_at_a_time(beside, _PROGRAMS)


@functools.cache
def _load(device: torch.device) -> None:
    fp32, fp64, int32, int64 = torch.float32, torch.float64, torch.int32, torch.int64
    load(_exponents_kernel, device, int64, int32, 0, 0, 0, fp64, int64, int64, fp32, fp64, **_OPTIONS)
