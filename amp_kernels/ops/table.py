"""The table that every native kernel takes (csrc/table.h): built here, on the host, for lists and for optimizers."""

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
HYPER_COLUMNS = 8
RECORD = 4  # int64 numbers of the `Record` of csrc/table.h


class Row(IntEnum):
    """Rows of the table; the i-th state is row ``STATE + i``."""

    NUMEL = 0
    GRAD_DTYPE = 1
    GROUP = 2
    GRAD = 3
    PARAM = 4
    MASTER = 5
    STEP = 6
    STATE = 7


FIXED_ROWS = 3  # the rows of sizes, dtypes and groups, which come before those of addresses
GRADIENT_ROWS = 4
UPDATE_ROWS = 10


class Chunks(NamedTuple):
    """How tensors are cut for the kernels: ``entries`` int32 [N, 2] of (tensor, chunk in the tensor)."""

    entries: Tensor
    size: int


# Of a chunk on a GPU, in elements.
UNIT = 128  # what a warp updates at a time: at most an eighth of a chunk is there to round its size up
LEAST = 1024
MOST = 1 << 16  # the chunks of 10^9 elements are then 15,000, which the last block folds in microseconds
OVERHEAD = 1024  # assumed: a chunk's header, barriers and last loads take as long as so many elements of an update


def chunk_size(total: int, tensors: int, blocks: int) -> int:
    """Elements of a chunk, for `tensors` tensors of `total` elements.

    `blocks` blocks of the kernels run at a time (0: kernels of a CPU).

    Each block takes `rounds` chunks, one after the other. Tensors end in chunks that are not full, one each, so that
    ``rounds * blocks - tensors`` full ones have to hold everything. Of all numbers of rounds we take the one that is
    done first: with few rounds the ends of tensors make chunks long, with many there is more overhead. csrc/chunks.h
    has the same function.

    A CPU takes 16384, which its threads share out evenly, and from 2^27 elements on 65536.
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
    """Cuts tensors of these sizes into chunks, tensor by tensor, in `order` (default: as listed).

    `blocks` blocks of the kernels run at a time.
    """
    order = range(len(numels)) if order is None else order
    size = chunk_size(sum(numels[t] for t in order), len(order), blocks)
    entries = array("i")  # in Python: torch's repeat_interleave wakes its threads even for three elements
    for tensor in order:
        for chunk in range(-(-numels[tensor] // size)):
            entries.append(tensor)
            entries.append(chunk)
    if not entries:
        return Chunks(torch.empty(0, 2, dtype=torch.int32, device="cpu"), size)
    return Chunks(torch.frombuffer(entries, dtype=torch.int32).view(-1, 2), size)


def int64_tensor(values: Iterable[int]) -> Tensor:
    """int64 host tensor; ten times faster than torch.tensor(list), which matters once a step."""
    data = array("q", values)
    return torch.frombuffer(data, dtype=torch.int64) if data else torch.empty(0, dtype=torch.int64, device="cpu")


def send(ops: Kernels, host: Tensor, device: torch.device) -> Tensor:
    """A copy of `host` (a multiple of 8 bytes) on `device`, without waiting and right inside a graph capture."""
    if device.type == "cpu":
        return host.clone()
    to = torch.empty_like(host, device=device)
    resend(ops, host, to)
    return to


def resend(ops: Kernels, host: Tensor, to: Tensor) -> None:
    """Overwrites `to`, which `send` made, with `host`."""
    if to.device.type == "cpu":
        to.copy_(host)
    else:
        ops._send_(host.view(-1).view(torch.int64), to.view(-1).view(torch.int64))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, each once, in whatever order of dimensions."""
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
    """Whether walking the storage of both visits the elements in the same order."""
    if a.is_contiguous() and b.is_contiguous():
        return True
    return a.stride() == b.stride() and is_dense(a)


def shares_memory(tensors: Sequence[Tensor]) -> int | None:
    """The position of a tensor that shares an element; None if all elements are apart.

    It shares the element with itself or with a tensor before it in memory.

    Kernels write all tensors at once, torch one after the other: where elements are shared, results differ. Views may
    be interleaved, as the columns of a fused matrix are.
    """
    spans = sorted((t.data_ptr(), _span(t), i) for i, t in enumerate(tensors) if t.numel() > 0)
    groups: list[list[int]] = []  # those whose spans meet
    end = 0
    for start, span, i in spans:
        if start >= end:
            groups.append([])
        groups[-1].append(i)
        end = max(end, start + span)
    for group in groups:
        if len(group) > 1 or not _is_apart(tensors[group[0]]):
            met = _first_meeting([tensors[i] for i in group])
            if met is not None:
                return group[met]
    return None


def _span(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _is_apart(tensor: Tensor) -> bool:
    """Whether each dimension steps over all that the smaller ones reach; if not, elements may still be apart."""
    if tensor.is_contiguous():
        return True
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += (size - 1) * stride
    return True


def _first_meeting(tensors: Sequence[Tensor]) -> int | None:
    """As `shares_memory`, exactly: marks every element of these, a byte for each, in a picture of their memory."""
    begin = min(t.data_ptr() for t in tensors)
    unit = min(t.element_size() for t in tensors)
    marks = torch.zeros((max(t.data_ptr() + _span(t) for t in tensors) - begin) // unit, dtype=torch.bool, device="cpu")
    for i, tensor in enumerate(tensors):
        width = tensor.element_size() // unit
        strides = [*(stride * width for stride in tensor.stride()), 1]
        mine = marks.as_strided((*tensor.shape, width), strides, (tensor.data_ptr() - begin) // unit)
        marked = int(marks.sum())
        if bool(mine.any()) or any(s == 0 and n > 1 for s, n in zip(strides, mine.shape, strict=True)):
            return i
        mine.fill_(True)
        if int(marks.sum()) - marked < mine.numel():
            return i
    return None


def gradient_table(grads: Sequence[Tensor]) -> Tensor:
    """Host table of the gradient pass for dense tensors."""
    table = torch.zeros(GRADIENT_ROWS, len(grads), dtype=torch.int64, device="cpu")
    table[Row.NUMEL] = int64_tensor(g.numel() for g in grads)
    table[Row.GRAD_DTYPE] = int64_tensor(DTYPE_CODES[g.dtype] for g in grads)
    table[Row.GRAD] = int64_tensor(g.data_ptr() for g in grads)
    return table
