"""The gradient pass: norm, check for NaN and inf, and unscaling. One launch handles any mix of dtypes.

    norm      = sqrt(sum of g^2) * factor
    found_inf = 1 if any g is NaN or inf; with `clear`, the first tensor with such a g then goes into the record
    g        <- g * factor                                  (with WRITE)

The factor is `scale`, 1 / `scale`, or 1. csrc/table.h explains the record, and the chunks into which gradients are
divided.

Per element, 4 bytes (fp32) or 2 (fp16, bf16) are read, and with WRITE as many are written. g^2 and g * factor are
computed from the same registers, so that a gradient is read once.

A program of 128 threads handles one chunk, tile by tile. A tile is 8192 bytes, four accesses of 16 bytes per thread.
The first tile begins where the gradient is aligned to 16 bytes. The elements before the first tile and after the last
one, less than 16 bytes at each end, are accessed one by one:

    chunk:   | tile 0 | tile 1 | ..                      fp32 sum of a tile -> fp64 sum of the chunk -> partials[chunk]
    tile:    | t0 | t1 | .. | t127 | t0 | t1 | ..        each 16 bytes: 4 fp32 or 8 16-bit elements

The program that ends last adds all partials in the order of the chunks, so that the same gradients give the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from .common import (
    BF16,
    FP16,
    FP32,
    GRAD,
    GRAD_DTYPE,
    address_of,
    chunk_bounds,
    is_last,
    launch,
    load,
    load_elements,
    optional_scalar,
    programs_at_a_time,
    store_elements,
    table_entry,
)

_NUM_WARPS = 4
# 64 bytes of gradient per thread: four 16-byte loads are in flight, and a thread adds at most 32 elements.
_TILE_BYTES = tl.constexpr(_NUM_WARPS * 32 * 64)
_FOLD = tl.constexpr(1024)  # partial sums read at a time


@triton.jit
def _sum_tiles(address, n, factor, WRITE: tl.constexpr, DTYPE: tl.constexpr, VEC: tl.constexpr):
    """Return the sum of squares of n elements from an aligned address on. n is a multiple of VEC."""
    TILE: tl.constexpr = _TILE_BYTES // (4 if DTYPE == FP32 else 2)
    total = tl.full((), 0.0, tl.float64)
    n = n // VEC * VEC
    for i in range(0, n, TILE):
        offsets = i + tl.arange(0, TILE)
        mask = offsets < n
        x = load_elements(address, offsets, mask, DTYPE, VEC)
        if WRITE:
            store_elements(address, offsets, x * factor, mask, DTYPE, VEC)
        # The fast sum adds fp32 squares, first in each thread and then as a tree. The fast sum is not finite if an
        # element is NaN or inf, or has a magnitude above 1.8e19. Squares of magnitudes below 1e-19 lose bits or vanish.
        # If the fast sum is at least 1e-24, these squares are negligible. If the fast sum is smaller or not finite, the
        # slow sum replaces it.
        s = tl.sum(x * x)
        if (s >= 1e-24) & (s < float("inf")):
            total += s
        else:
            # The slow sum adds fp64 squares. The fp64 square of an fp32 number neither overflows nor vanishes. The slow
            # sum uses the elements that are still in registers, because with WRITE the gradient in memory has already
            # changed. In a tile of zeros (unused rows of an embedding) the largest magnitude, as an integer, is 0. Such
            # a tile skips the fp64 work.
            magnitude = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
            if magnitude > 0:
                wide = x.to(tl.float64)
                total += tl.sum(wide * wide)
    return total


@triton.jit
def _sum_of_squares(address, n, factor, WRITE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the fp64 sum of the squares of a chunk's elements from before the multiplication by `factor`.

    The sum is finite if and only if all elements are.
    """
    BYTES: tl.constexpr = 4 if DTYPE == FP32 else 2
    VEC: tl.constexpr = 16 // BYTES
    head = tl.minimum((VEC - address // BYTES % VEC) % VEC, n).to(tl.int32)
    whole = (n - head) // VEC * VEC
    total = _sum_tiles(address + head * BYTES, whole, factor, WRITE, DTYPE, VEC)
    k = tl.arange(0, 2 * VEC)
    offsets = tl.where(k < head, k, k + whole)
    mask = k < n - whole
    x = load_elements(address, offsets, mask, DTYPE, 1)
    if WRITE:
        store_elements(address, offsets, x * factor, mask, DTYPE, 1)
    wide = x.to(tl.float64)
    return total + tl.sum(wide * wide)


@triton.jit
def _finish_pass(chunks_ptr, n_chunks, factor, partials_ptr, found_inf_ptr, norm_ptr, record_ptr, clear):
    # Whichever program is the last, the partials are added in the same order. Loads with .cg read them from L2, because
    # other programs wrote them.
    lanes = tl.full((_FOLD,), 0.0, tl.float64)
    for i in range(0, n_chunks, _FOLD):
        offsets = i + tl.arange(0, _FOLD)
        lanes += tl.load(partials_ptr + offsets, mask=offsets < n_chunks, other=0.0, cache_modifier=".cg")
    total = tl.sum(lanes)
    bad = total - total != 0.0
    tl.store(norm_ptr, (tl.sqrt(total) * factor.to(tl.float64)).to(tl.float32))
    if clear != 0:
        tl.store(found_inf_ptr, tl.where(bad, 1.0, 0.0))
        passes = tl.load(record_ptr + 1) + 1
        tl.debug_barrier()  # every thread has read the count before one of them stores the next
        tl.store(record_ptr + 1, passes)
        if bad:
            first = tl.full((_FOLD,), 0x7FFFFFFF, tl.int32)
            for i in range(0, n_chunks, _FOLD):
                offsets = i + tl.arange(0, _FOLD)
                mask = offsets < n_chunks
                partial = tl.load(partials_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg")
                tensor = tl.load(chunks_ptr + 2 * offsets.to(tl.int64), mask=mask, other=0)
                first = tl.where(partial - partial != 0.0, tl.minimum(first, tensor), first)
            tl.store(record_ptr + 2, passes)
            tl.store(record_ptr + 3, tl.min(first).to(tl.int64))
    elif bad:
        tl.store(found_inf_ptr, 1.0)


@triton.jit(do_not_specialize=list(range(13)))
def _unscale_kernel(
    table_ptr,  # int64 [rows, n_tensors]
    chunks_ptr,  # int32 [n_chunks, 2]
    n_tensors: tl.int32,
    n_chunks: tl.int32,
    chunk_size: tl.int32,
    scale: tl.int64,  # address of an fp32 scalar, the factor; 0: the factor is 1
    divide: tl.int32,  # not 0: the factor is 1 / scale
    clear: tl.int32,  # not 0: write 0 or 1 to found_inf, and update the record; 0: found_inf can only become 1
    partials_ptr,  # fp64 [n_chunks]
    found_inf_ptr,  # fp32 scalar
    norm_ptr,  # fp32 scalar
    record_ptr,  # int64 [4]: ticket, passes, pass and tensor of the last overflow
    squares: tl.int32,  # number of the row of factors of the squares; 0: there is none (csrc/table.h)
    WRITE: tl.constexpr,
):
    factor = optional_scalar(scale, 1.0)
    if divide != 0:
        factor = tl.div_rn(1.0, factor)
    chunk = tl.program_id(0).to(tl.int64)
    if chunk < n_chunks:  # if there are no chunks, one program runs and only finishes the pass
        tensor, begin, n = chunk_bounds(table_ptr, chunks_ptr, n_tensors, chunk, chunk_size)
        grad = table_entry(table_ptr, n_tensors, GRAD, tensor)
        dtype = table_entry(table_ptr, n_tensors, GRAD_DTYPE, tensor)
        total = tl.full((), 0.0, tl.float64)
        if grad != 0:
            if dtype == FP32:
                total = _sum_of_squares(grad + begin * 4, n, factor, WRITE, FP32)
            elif dtype == FP16:
                total = _sum_of_squares(grad + begin * 2, n, factor, WRITE, FP16)
            else:
                total = _sum_of_squares(grad + begin * 2, n, factor, WRITE, BF16)
        if squares != 0:
            bits = tl.load(table_ptr + squares.to(tl.int64) * n_tensors + tensor)
            total *= bits.to(tl.float64, bitcast=True)
        tl.store(partials_ptr + chunk, total)
    if is_last(record_ptr):
        _finish_pass(chunks_ptr, n_chunks, factor, partials_ptr, found_inf_ptr, norm_ptr, record_ptr, clear)


def _options(write: bool) -> dict[str, Any]:
    return {"WRITE": write, "num_warps": _NUM_WARPS}


def _unscale_table_(
    table: torch.Tensor,
    chunks: torch.Tensor,
    chunk_size: int,
    scale: torch.Tensor | None,
    divide: bool,
    write: bool,
    clear: bool,
    partials: torch.Tensor,
    found_inf: torch.Tensor,
    norm: torch.Tensor,
    record: torch.Tensor,
    squares: int = 0,
) -> None:
    n_chunks = chunks.shape[0]
    launch(
        _unscale_kernel,
        max(n_chunks, 1),
        table,
        chunks,
        table.shape[1],
        n_chunks,
        chunk_size,
        address_of(scale),
        int(divide),
        int(clear),
        partials,
        found_inf,
        norm,
        record,
        squares,
        **_options(write),
    )


def _load_unscale(beside: torch.Tensor) -> int:
    _load(beside.device)
    return programs_at_a_time(beside)


@functools.cache  # because every call of `unscale_` calls this function
def _load(device: torch.device) -> None:
    fp32, fp64, int32, int64 = torch.float32, torch.float64, torch.int32, torch.int64
    for write in (False, True):
        load(_unscale_kernel, device, int64, int32, 0, 0, 0, 0, 0, 0, fp64, fp32, fp32, int64, 0, **_options(write))
