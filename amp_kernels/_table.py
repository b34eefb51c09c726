"""The table that every native kernel takes (csrc/table.h): built here, on the host, for lists and for optimizers."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ._backends import DeviceKernels, Kernels

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
HYPER_COLUMNS = 8


class Row(IntEnum):
    """Rows of the table; the i-th state is row ``STATE + i``."""

    NUMEL = 0
    GRAD = 1
    GRAD_DTYPE = 2
    GROUP = 3
    PARAM = 4
    MASTER = 5
    STATE = 6


GRADIENT_ROWS = 3
UPDATE_ROWS = 9


class Chunks(NamedTuple):
    """How tensors are cut for the kernels: ``entries`` int32 [N, 2] of (tensor, chunk in the tensor)."""

    entries: Tensor
    size: int


def cut(numels: Sequence[int], order: Sequence[int] | None = None) -> Chunks:
    """Cuts tensors of these sizes into chunks, tensor by tensor, in `order` (default: as listed).

    16384 elements are 1560 chunks for ResNet-50, enough to go round 132 multiprocessors. From 2^27 elements on 65536
    do as well and keep the last block's fold over all chunks short.
    """
    size = 1 << 14 if sum(numels) < 1 << 27 else 1 << 16
    entries = array("i")  # in Python: torch's repeat_interleave wakes its threads even for three elements
    for tensor in range(len(numels)) if order is None else order:
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
        cast("DeviceKernels", ops)._send_(host.view(-1).view(torch.int64), to.view(-1).view(torch.int64))


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


def gradient_table(grads: Sequence[Tensor]) -> Tensor:
    """Host table of the gradient pass for dense tensors."""
    rows = ((g.numel() for g in grads), (g.data_ptr() for g in grads), (DTYPE_CODES[g.dtype] for g in grads))
    return int64_tensor(itertools.chain(*rows)).view(GRADIENT_ROWS, len(grads))
