"""Helpers of the Triton kernels: reads of the table (csrc/table.h), loads and stores at int64 addresses, launches."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl

from ..ops import table
from ..ops.table import DTYPE_CODES, Row

# The rows of the table and the codes of the dtypes, as constants that kernels can use.
NUMEL = tl.constexpr(Row.NUMEL.value)
GRAD = tl.constexpr(Row.GRAD.value)
GRAD_DTYPE = tl.constexpr(Row.GRAD_DTYPE.value)
GROUP = tl.constexpr(Row.GROUP.value)
PARAM = tl.constexpr(Row.PARAM.value)
MASTER = tl.constexpr(Row.MASTER.value)
STEP = tl.constexpr(Row.STEP.value)
STATE = tl.constexpr(Row.STATE.value)  # STATE + k is the k-th state
SCALE = tl.constexpr(Row.SCALE.value)  # SCALE + k are the scales of the k-th state
HYPER_COLUMNS = tl.constexpr(table.HYPER_COLUMNS)

FP32 = tl.constexpr(DTYPE_CODES[torch.float32])
FP16 = tl.constexpr(DTYPE_CODES[torch.float16])
BF16 = tl.constexpr(DTYPE_CODES[torch.bfloat16])
INT8 = tl.constexpr(table.STATE_DTYPES[torch.int8])
INT16 = tl.constexpr(INT8.value + 1)

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


# ------------------------------------------------------------------------------------------ table and scalars


@triton.jit
def table_entry(table_ptr, n_tensors, ROW: tl.constexpr, tensor):
    """Return the entry of a tensor in a row of the table. The table has one column for each tensor."""
    return tl.load(table_ptr + ROW * n_tensors.to(tl.int64) + tensor)


@triton.jit
def chunk_bounds(table_ptr, chunks_ptr, n_tensors, chunk, chunk_size):
    """Return (tensor, first element, number of elements) of a chunk. The first element is an int64."""
    tensor = tl.load(chunks_ptr + 2 * chunk)
    begin = tl.load(chunks_ptr + 2 * chunk + 1).to(tl.int64) * chunk_size
    rest = table_entry(table_ptr, n_tensors, NUMEL, tensor) - begin
    return tensor, begin, tl.minimum(rest, chunk_size).to(tl.int32)


@triton.jit
def chunk_address(table_ptr, n_tensors, ROW: tl.constexpr, tensor, begin, DTYPE: tl.constexpr):
    """Return the address of a chunk's first element in the array of this row; 0 if the tensor has no such array."""
    address = table_entry(table_ptr, n_tensors, ROW, tensor)
    return tl.where(address == 0, 0, address + begin * (4 if DTYPE == FP32 else (1 if DTYPE == INT8 else 2)))


@triton.jit
def optional_scalar(address, absent):
    """Return the fp32 scalar at an int64 address, or `absent` if the address is 0. The masked load needs no branch."""
    pointer = address.to(tl.int64).to(tl.pointer_type(tl.float32))
    return tl.load(pointer, mask=address != 0, other=absent)


@triton.jit
def is_last(ticket_ptr):
    """Return whether this program is the last one in its launch to call this function.

    The last program can read everything that the other programs wrote before their calls.

    Args:
        ticket_ptr: An int64 counter, which is 0 between launches. The last program sets it back to 0.
    """
    tl.debug_barrier()
    pointer = ticket_ptr.to(tl.pointer_type(tl.int32))
    last = tl.atomic_add(pointer, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1
    if last:
        tl.store(pointer, 0)
    return last


# --------------------------------------------------------------------------------------------- element access
# VEC is the number of neighbouring elements that a thread loads or stores in one access. If VEC > 1, kernels access
# memory only if two conditions hold: the address is aligned to the size of one access, and the number of elements is a
# multiple of VEC. Still, element_pointers() rounds the address down to a multiple of the size of one access, and
# kernels round the number of elements down to a multiple of VEC. If the conditions hold, this rounding changes nothing.
# If they do not hold, nothing is accessed, but the compiler may compute an address anyway. Without the rounding,
# `multiple_of` would be false for this address.
#
# bf16 is loaded and stored as int16, because the interpreter (Triton 3.6 to 3.9) misreads bf16 subnormals, and
# truncates fp32 to bf16 instead of rounding it.


@triton.jit
def is_aligned(address, DTYPE: tl.constexpr, VEC: tl.constexpr):
    return address % (VEC * (4 if DTYPE == FP32 else (1 if DTYPE == INT8 else 2))) == 0


@triton.jit
def element_pointers(address, offsets, DTYPE: tl.constexpr, VEC: tl.constexpr):
    BYTES: tl.constexpr = VEC * (4 if DTYPE == FP32 else (1 if DTYPE == INT8 else 2))
    if VEC > 1:
        address = address // BYTES * BYTES
    if DTYPE == FP32:
        base = address.to(tl.pointer_type(tl.float32))
    elif DTYPE == FP16:
        base = address.to(tl.pointer_type(tl.float16))
    elif DTYPE == INT8:
        base = address.to(tl.pointer_type(tl.int8))
    else:
        base = address.to(tl.pointer_type(tl.int16))
    if VEC > 1:
        base = tl.multiple_of(base, BYTES)
    return base + offsets


@triton.jit
def load_elements(address, offsets, mask, DTYPE: tl.constexpr, VEC: tl.constexpr):
    """Return elements as fp32, or with INT8 and INT16 as int32. Where the mask is off, return 0."""
    x = tl.load(element_pointers(address, offsets, DTYPE, VEC), mask=mask, other=0)
    if DTYPE >= INT8:  # or INT16
        x = x.to(tl.int32)
    elif DTYPE == BF16:
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        x = x.to(tl.float32)
    return x


@triton.jit
def store_elements(address, offsets, x, mask, DTYPE: tl.constexpr, VEC: tl.constexpr):
    """Store fp32 values, rounded to nearest even. With INT8 and INT16, store the low bits of int32 values."""
    if DTYPE == FP32:
        y = x
    elif DTYPE == INT8:
        y = x.to(tl.int8)
    elif DTYPE == INT16:
        y = x.to(tl.int16)
    elif DTYPE == FP16:
        y = x.to(tl.float16)
    elif _INTERPRETED:
        y = _bf16_bits(x)
    else:
        y = x.to(tl.bfloat16).to(tl.int16, bitcast=True)
    tl.store(element_pointers(address, offsets, DTYPE, VEC), y, mask=mask)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Return fp32 values, rounded to what FP16 or BF16 can hold."""
    if DTYPE == FP16:
        return x.to(tl.float16).to(tl.float32)
    elif _INTERPRETED:
        return (_bf16_bits(x).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _bf16_bits(x):
    """Return the bits of fp32 values rounded to bf16, as int16."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.int16)


# ----------------------------------------------------------------------------------------------------- launch


# How many programs run at a time on a multiprocessor that has 65536 registers. A program has 128 threads, and a thread
# has 96 registers.
_PROGRAMS = 5


def programs_at_a_time(tensor: torch.Tensor) -> int:
    """Return how many programs of 128 threads run at a time on the device of a tensor.

    For a tensor on the CPU, where Triton's interpreter runs the kernels, return 0. `chunk_size` in ops/table.py then
    returns the size that CPU kernels use.
    """
    if not tensor.is_cuda:
        return 0
    return _PROGRAMS * torch.cuda.get_device_properties(tensor.device).multi_processor_count


def address_of(scalar: torch.Tensor | None) -> int:
    """Return the address of an optional fp32 scalar, or 0 for None.

    Kernels get 0 rather than None, because Triton would compile another variant for None.
    """
    return 0 if scalar is None else scalar.data_ptr()


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which `device` is the current device. Triton loads and launches kernels on that device."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return contextlib.nullcontext()


def load(kernel: Any, device: torch.device, *args: Any, **constants: Any) -> None:
    """Compile a variant of a kernel, and load it on `device`.

    A kernel must be loaded before a graph capture begins, because loading fails during the capture.

    Args:
        kernel: The `@triton.jit` function.
        device: The device.
        *args: The kernel's arguments, with a dtype in place of each tensor. Numbers may have any value, since kernels
            do not specialise on values.
        **constants: The kernel's constants and options.
    """
    if isinstance(kernel, triton.JITFunction):  # the interpreter compiles nothing
        with current(device):
            # `warmup` compiles the kernel. The first time that `run` is read, Triton loads the kernel.
            _ = kernel.warmup(*args, **constants, **_OPTIONS, grid=(1,)).run


# Allow fused multiply-add, as nvcc does. The option is given explicitly, because Triton 3.10 changes its default.
_OPTIONS = {"enable_fp_fusion": True}


def launch(kernel: Any, n_programs: int, first: torch.Tensor, *args: Any, **constants: Any) -> None:
    """Run `n_programs` programs on the device of the kernel's first argument, on the current stream of that device.

    By default Triton compiles other variants for arguments that are 1, or multiples of 16. The kernels turn this off
    for all arguments, because such variants would gain nothing. Every number has an annotated type, because Triton
    would otherwise choose the type of a Python int by its value. So a new value of an argument never makes Triton
    compile a variant, which could otherwise happen in the middle of a graph capture.

    Kernels that walk a table have one program for each chunk. The hardware starts a program when another one ends. So
    multiprocessors stay busy although some chunks are short (the ends of tensors), and others are skipped. In a
    persistent grid, a program would take several chunks. The work would then be divided before the launch, and the
    launch would need the multiprocessor count of the device.
    """
    if n_programs == 0:
        return
    with current(first.device):
        kernel[(n_programs,)](first, *args, **constants, **_OPTIONS)
