"""Shared by the Triton kernels: the table (csrc/table.h), element access through int64 addresses, the launch."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl

from ..ops import table
from ..ops.table import DTYPE_CODES, Row

# Rows of the table and codes of the dtypes, as kernels take them.
NUMEL = tl.constexpr(Row.NUMEL.value)
GRAD = tl.constexpr(Row.GRAD.value)
GRAD_DTYPE = tl.constexpr(Row.GRAD_DTYPE.value)
GROUP = tl.constexpr(Row.GROUP.value)
PARAM = tl.constexpr(Row.PARAM.value)
MASTER = tl.constexpr(Row.MASTER.value)
STEP = tl.constexpr(Row.STEP.value)
STATE = tl.constexpr(Row.STATE.value)  # STATE + k is the k-th state
HYPER_COLUMNS = tl.constexpr(table.HYPER_COLUMNS)

FP32 = tl.constexpr(DTYPE_CODES[torch.float32])
FP16 = tl.constexpr(DTYPE_CODES[torch.float16])
BF16 = tl.constexpr(DTYPE_CODES[torch.bfloat16])
INT16 = tl.constexpr(len(DTYPE_CODES))

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


# ------------------------------------------------------------------------------------------ table and scalars


@triton.jit
def table_entry(table_ptr, n_tensors, ROW: tl.constexpr, tensor):
    """The word in a row of the table, and in the column of a tensor."""
    return tl.load(table_ptr + ROW * n_tensors.to(tl.int64) + tensor)


@triton.jit
def chunk_bounds(table_ptr, chunks_ptr, n_tensors, chunk, chunk_size):
    """(tensor, first element, number of elements) of a chunk; the first element is 64-bit."""
    tensor = tl.load(chunks_ptr + 2 * chunk)
    begin = tl.load(chunks_ptr + 2 * chunk + 1).to(tl.int64) * chunk_size
    rest = table_entry(table_ptr, n_tensors, NUMEL, tensor) - begin
    return tensor, begin, tl.minimum(rest, chunk_size).to(tl.int32)


@triton.jit
def chunk_address(table_ptr, n_tensors, ROW: tl.constexpr, tensor, begin, DTYPE: tl.constexpr):
    """The address of the chunk's first element in the array of this row; 0 if the tensor has no such array."""
    address = table_entry(table_ptr, n_tensors, ROW, tensor)
    return tl.where(address == 0, 0, address + begin * (4 if DTYPE == FP32 else 2))


@triton.jit
def optional_scalar(address, absent):
    """The fp32 scalar at an int64 address; `absent` if the address is 0. A mask costs no branch."""
    pointer = address.to(tl.int64).to(tl.pointer_type(tl.float32))
    return tl.load(pointer, mask=address != 0, other=absent)


@triton.jit
def is_last(ticket_ptr):
    """Whether this program comes here last. The last program can read what all others wrote before they came here.

    `ticket_ptr`: an int64 counter, which is 0 between launches. The last program sets it back to 0.
    """
    tl.debug_barrier()
    pointer = ticket_ptr.to(tl.pointer_type(tl.int32))
    last = tl.atomic_add(pointer, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1
    if last:
        tl.store(pointer, 0)
    return last


# --------------------------------------------------------------------------------------------- element access
# VEC is how many neighbours one access of a thread covers. VEC > 1 is only for a branch where address and count are
# multiples of it. Both are rounded down to it there. This changes no value, but `multiple_of` then stays true wherever
# the compiler moves the code.
#
# bf16 is loaded and stored as int16: the interpreter (3.6 to 3.9) misreads bf16 subnormals, and truncates where it
# should round.


@triton.jit
def is_aligned(address, DTYPE: tl.constexpr, VEC: tl.constexpr):
    return address % (VEC * (4 if DTYPE == FP32 else 2)) == 0


@triton.jit
def element_pointers(address, offsets, DTYPE: tl.constexpr, VEC: tl.constexpr):
    BYTES: tl.constexpr = VEC * (4 if DTYPE == FP32 else 2)
    if VEC > 1:
        address = address // BYTES * BYTES
    if DTYPE == FP32:
        base = address.to(tl.pointer_type(tl.float32))
    elif DTYPE == FP16:
        base = address.to(tl.pointer_type(tl.float16))
    else:
        base = address.to(tl.pointer_type(tl.int16))
    if VEC > 1:
        base = tl.multiple_of(base, BYTES)
    return base + offsets


@triton.jit
def load_elements(address, offsets, mask, DTYPE: tl.constexpr, VEC: tl.constexpr):
    """Returns elements as fp32, INT16 elements as int32, and 0 where the mask is off."""
    x = tl.load(element_pointers(address, offsets, DTYPE, VEC), mask=mask, other=0)
    if DTYPE == INT16:
        x = x.to(tl.int32)
    elif DTYPE == BF16:
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        x = x.to(tl.float32)
    return x


@triton.jit
def store_elements(address, offsets, x, mask, DTYPE: tl.constexpr, VEC: tl.constexpr):
    """Stores fp32 values, rounded to nearest even, or int32 values as INT16."""
    if DTYPE == FP32:
        y = x
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
    """fp32 values rounded to FP16 or BF16, in fp32."""
    if DTYPE == FP16:
        return x.to(tl.float16).to(tl.float32)
    elif _INTERPRETED:
        return (_bf16_bits(x).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _bf16_bits(x):
    """fp32 values rounded to bf16, as int16."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.int16)


# ----------------------------------------------------------------------------------------------------- launch


# Programs of 128 threads with 96 registers each, on a multiprocessor with 65536 registers.
_PROGRAMS = 5


def programs_at_a_time(beside: torch.Tensor) -> int:
    """How many programs of 128 threads run at a time; 0 on a CPU (interpreted), as for CPU kernels."""
    if not beside.is_cuda:
        return 0
    return _PROGRAMS * torch.cuda.get_device_properties(beside.device).multi_processor_count


def address_of(scalar: torch.Tensor | None) -> int:
    """The address of an optional fp32 scalar, or 0. For None Triton would compile another variant."""
    return 0 if scalar is None else scalar.data_ptr()


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes `device` the current one, for which Triton loads and launches kernels."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return contextlib.nullcontext()


def load(kernel: Any, device: torch.device, *args: Any, **constants: Any) -> None:
    """Compiles a variant of a kernel, and loads it on `device`: loading fails during a graph capture.

    `args` are the kernel's arguments, with a dtype in place of each tensor. The values of numbers do not matter, since
    kernels specialise on none.
    """
    if isinstance(kernel, triton.JITFunction):  # the interpreter compiles nothing
        with current(device):
            # `warmup` compiles. The driver loads a kernel when its launcher is first asked for.
            _ = kernel.warmup(*args, **constants, **_OPTIONS, grid=(1,)).run


# Fused multiply-add, as with nvcc. Triton 3.10 changes the default.
_OPTIONS = {"enable_fp_fusion": True}


def launch(kernel: Any, n_programs: int, table: torch.Tensor, *args: Any, **constants: Any) -> None:
    """Runs `n_programs` programs on the device of `table` (or another first tensor), on its current stream.

    Kernels specialise on no argument ("is 1", "is a multiple of 16"), and every number has an annotated type, since
    Triton would type a Python int by its value. Specialising would gain nothing, and a new value could then compile a
    variant in the middle of a graph capture.

    Kernels that walk a table have a program for each chunk. The hardware starts a program when another ends, which
    evens out short tails and skipped tensors. A persistent grid would divide the work beforehand, and would need the
    multiprocessor count of the right device.
    """
    if n_programs == 0:
        return
    with current(table.device):
        kernel[(n_programs,)](table, *args, **constants, **_OPTIONS)
