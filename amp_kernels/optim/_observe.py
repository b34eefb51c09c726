"""What a step has to know of every parameter: whether it moved or was written, and where its gradient lies."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _loader
from .._table import DTYPE_CODES, int64_tensor

NO_GRADIENT, UNREADABLE = -2, -1


class Seen(IntEnum):
    """Rows of an observation, an int64 host tensor with a column for each parameter."""

    ADDRESS = 0
    LAYOUT = 1  # a number for its dtype, shape and strides
    VERSION = 2  # where asked for
    GRAD = 3  # its address; 0 if kernels cannot read it
    GRAD_LAYOUT = 4  # as LAYOUT; or NO_GRADIENT, UNREADABLE


def local(tensor: Tensor) -> Tensor:
    """The memory on this rank: of a DTensor its shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def observe(params: list[Tensor], seen: Tensor, *, versions: bool, distributed: bool = False) -> None:
    """Fills `seen` (int64 [5, number of parameters], see `Seen`); `distributed`: DTensors are among them.

    For a thousand parameters the compiled sweep takes a twelfth of the time of the one in Python, with cold caches a
    fifth.
    """
    compiled = None if distributed else _compiled_sweep()
    if compiled is None:
        seen.copy_(int64_tensor(_sweep(params, versions)).view(len(params), len(Seen)).T)
    else:
        compiled(params, seen.data_ptr(), versions)


def _sweep(params: Sequence[Tensor], versions: bool) -> Iterator[int]:
    for param in params:
        yield local(param).data_ptr()
        yield _layout(local(param))
        yield param._version if versions else 0
        yield from _gradient(param.grad)


def _gradient(grad: Tensor | None) -> tuple[int, int]:
    if grad is None:
        return 0, NO_GRADIENT
    grad = local(grad)
    if grad.layout is not torch.strided or grad.dtype not in DTYPE_CODES:
        return 0, UNREADABLE
    return grad.data_ptr(), _layout(grad)


def _layout(tensor: Tensor) -> int:
    return hash((tensor.dtype, tensor.shape, tensor.stride())) & (2**63 - 1)


@functools.cache
def _compiled_sweep() -> Callable[[list[Tensor], int, bool], None] | None:
    api = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if api is None or not _loader.load():
        return None
    try:
        sweep = importlib.import_module("amp_kernels._C").observe
        sweep([], 0, False, api)
    except (AttributeError, TypeError, ValueError, NotImplementedError):  # another version, of `_C` or of the interface
        return None
    return lambda params, seen, versions: sweep(params, seen, versions, api)
