"""The table of tensors that kernels read: its rows, the chunks of its tensors, and checks of their memory.

The table has a column for each tensor, and a row for each property of a tensor (csrc/table.h).
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from .library import Kernels

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
STATE_DTYPES = {torch.float32: 0, torch.bfloat16: 2, torch.int8: 3}
LEAST_LEAN = 4096  # parameters with fewer elements have fp32 states
STATES = 3  # the most states that a parameter has
SCALES = 2  # the most states of a parameter that are in codes
HYPER_COLUMNS = 8
RECORD = 4  # int64 numbers in the `Record` of csrc/table.h


class Row(IntEnum):
    """Rows of the table; the i-th state is row ``STATE + i``, and its scales are row ``SCALE + i``."""

    NUMEL = 0
    GRAD_DTYPE = 1
    GROUP = 2
    GRAD = 3
    PARAM = 4
    MASTER = 5
    STEP = 6
    STATE = 7
    SCALE = 10


FIXED_ROWS = 3  # the rows of sizes, dtypes and groups; rows of addresses follow
GRADIENT_ROWS = 4  # the rows that the gradient pass (csrc/cuda/unscale.cu) reads
UPDATE_ROWS = 12  # all rows, with three states and two scales


class Chunks(NamedTuple):
    """The pieces into which tensors are cut for the kernels."""

    entries: Tensor  # int32 [chunks, 2]: the index of the tensor in the table, and of the chunk in this tensor
    size: int  # elements of a chunk


# The number of elements in a chunk on a GPU is a multiple of `UNIT`, from `LEAST` to `MOST`. `UNIT` is 128, because a
# warp updates 128 elements at a time. Rounding up to a multiple of `UNIT` adds less than an eighth to a chunk, since a
# chunk has at least `LEAST` elements.
UNIT = 128
LEAST = 1024
# In chunks of this size, 10^9 elements are 15,000 chunks. In the gradient pass, one thread block adds up the sums of
# all chunks. For so few chunks this takes microseconds.
MOST = 1 << 16
# The time that a chunk takes in addition to its elements, for reading its entry and addresses, for barriers and for its
# last loads. It is assumed to be the time for updating 1024 elements.
OVERHEAD = 1024


def chunk_size(total: int, tensors: int, blocks: int) -> int:
    """Return the number of elements in a chunk. csrc/chunks.h has the same function.

    On a GPU each thread block takes `rounds` chunks, one after the other, so there are ``rounds * blocks`` chunks. The
    last chunk of each tensor can be nearly empty. So the other ``rounds * blocks - tensors`` chunks together have to
    hold all elements. With fewer rounds there are fewer of these chunks, so each has to be longer. With more rounds
    chunks are shorter, but each round adds the time of `OVERHEAD` elements. The function returns the size of the chunks
    for the number of rounds with the least work for a block, ``rounds * (size + OVERHEAD)``.

    On a CPU a chunk has 65536 elements if all tensors together have 2^27 elements or more. If they have fewer, a chunk
    has 16384 elements, so that the threads get nearly equal shares.

    Args:
        total: Elements of all tensors together.
        tensors: Number of tensors.
        blocks: Number of thread blocks that run at a time on a GPU; 0 on a CPU.
    """
    if blocks == 0:
        return 1 << 14 if total < 1 << 27 else MOST
    best, least_work = MOST, float("inf")
    for rounds in itertools.count(tensors // blocks + 1):
        even = total // max(1, rounds * blocks - tensors) + 1
        size = max(LEAST, -(-even // UNIT) * UNIT)
        if size <= MOST and rounds * (size + OVERHEAD) < least_work:
            best, least_work = size, rounds * (size + OVERHEAD)
        if size <= MOST // 8:
            break
    return best


def cut(numels: Sequence[int], order: Sequence[int] | None = None, blocks: int = 0) -> Chunks:
    """Cut tensors into chunks, one tensor after the other.

    Args:
        numels: Sizes of the tensors.
        order: Indices of the tensors to cut, in the order of their chunks. None for all tensors, in their order.
        blocks: As in `chunk_size`.
    """
    order = range(len(numels)) if order is None else order
    size = chunk_size(sum(numels[t] for t in order), len(order), blocks)
    entries = array("i")  # a loop in Python, since repeat_interleave wakes torch's threads even for three elements
    for tensor in order:
        for chunk in range(-(-numels[tensor] // size)):
            entries.append(tensor)
            entries.append(chunk)
    if not entries:
        return Chunks(torch.empty(0, 2, dtype=torch.int32, device="cpu"), size)
    return Chunks(torch.frombuffer(entries, dtype=torch.int32).view(-1, 2), size)


def int64_tensor(values: Iterable[int]) -> Tensor:
    """Return an int64 tensor on the host. This is ten times faster than torch.tensor(list), which matters in a step."""
    data = array("q", values)
    return torch.frombuffer(data, dtype=torch.int64) if data else torch.empty(0, dtype=torch.int64, device="cpu")


def send(ops: Kernels, host: Tensor, device: torch.device) -> Tensor:
    """Return a copy of `host` on `device`, without waiting. The copy can be captured in a graph.

    `host` must have a multiple of 8 bytes.
    """
    if device.type == "cpu":
        return host.clone()
    to = torch.empty_like(host, device=device)
    resend(ops, host, to)
    return to


def resend(ops: Kernels, host: Tensor, to: Tensor) -> None:
    """Copy `host` over `to`, which has as many bytes, a multiple of 8."""
    if to.device.type == "cpu":
        to.copy_(host)
    else:
        ops._send_(host.view(-1).view(torch.int64), to.view(-1).view(torch.int64))


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one range of memory, each once, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of the same shape are dense and have their elements in the same order in memory."""
    if a.is_contiguous() and b.is_contiguous():
        return True
    return a.stride() == b.stride() and is_dense(a)


def shares_memory(tensors: Sequence[Tensor]) -> int | None:
    """Return the index of a tensor that shares memory with itself or with another tensor; None if no tensor does.

    Kernels write all tensors at once, but torch writes one after the other. If tensors shared memory, the results of
    kernels would differ from torch's. Interleaved views, such as the columns of a fused matrix, share no memory.
    """
    spans = sorted((t.data_ptr(), _span(t), i) for i, t in enumerate(tensors) if t.numel() > 0)
    groups: list[list[int]] = []  # positions of tensors with overlapping spans
    end = 0
    for start, span, i in spans:
        if start >= end:
            groups.append([])
        groups[-1].append(i)
        end = max(end, start + span)
    for group in groups:
        if len(group) > 1 or not _is_apart(tensors[group[0]]):
            overlap = _first_overlap([tensors[i] for i in group])
            if overlap is not None:
                return group[overlap]
    return None


def _span(tensor: Tensor) -> int:
    """Return the number of bytes from the first element to the end of the last."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _is_apart(tensor: Tensor) -> bool:
    """Return True only if no two elements share memory. If the result is False, it is unknown whether any do.

    The result is True if each stride is larger than the span of all dimensions that have smaller strides.
    """
    if tensor.is_contiguous():
        return True
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += (size - 1) * stride
    return True


def _first_overlap(tensors: Sequence[Tensor]) -> int | None:
    """Return the index of a tensor that shares memory; None if no tensor does. The test is exact.

    `marks` has an entry for each `unit` bytes of memory. The tensors mark their entries, one tensor after the other. A
    tensor shares memory if it marks an entry twice, or if another tensor has marked the entry before.
    """
    begin = min(t.data_ptr() for t in tensors)
    unit = min(t.element_size() for t in tensors)
    marks = torch.zeros((max(t.data_ptr() + _span(t) for t in tensors) - begin) // unit, dtype=torch.bool, device="cpu")
    for i, tensor in enumerate(tensors):
        width = tensor.element_size() // unit
        strides = [*(stride * width for stride in tensor.stride()), 1]
        own = marks.as_strided((*tensor.shape, width), strides, (tensor.data_ptr() - begin) // unit)
        marked = int(marks.sum())
        if bool(own.any()) or any(s == 0 and n > 1 for s, n in zip(strides, own.shape, strict=True)):
            return i
        own.fill_(True)
        if int(marks.sum()) - marked < own.numel():
            return i
    return None


def gradient_table(grads: Sequence[Tensor]) -> Tensor:
    """Return the table of a gradient pass, on the host. The gradients must be dense."""
    table = torch.zeros(GRADIENT_ROWS, len(grads), dtype=torch.int64, device="cpu")
    table[Row.NUMEL] = int64_tensor(g.numel() for g in grads)
    table[Row.GRAD_DTYPE] = int64_tensor(DTYPE_CODES[g.dtype] for g in grads)
    table[Row.GRAD] = int64_tensor(g.data_ptr() for g in grads)
    return table
