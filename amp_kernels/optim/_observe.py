"""What a step has to know of tensors that anybody may have changed since the last one: where they lie, how they are
laid out, and where the gradients are."""

from __future__ import annotations

import bisect
import functools
import importlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from .. import _loader, torch_private
from ..ops.table import DTYPE_CODES, int64_tensor, is_dense

NO_GRADIENT, UNREADABLE = -2, -1


class Seen(IntEnum):
    """Rows of what is seen, an int64 host tensor with a column for each parameter; states have the first two."""

    ADDRESS = 0
    LAYOUT = 1  # a number for its dtype, shape and strides; UNREADABLE if kernels cannot walk it
    GRAD = 2  # its address; 0 if kernels cannot read it
    GRAD_LAYOUT = 3  # as LAYOUT; or NO_GRADIENT, UNREADABLE


PLACE = 2  # the rows of a state


def has_memory(tensor: Tensor) -> bool:
    """Whether the elements of `tensor`, of a DTensor those of its shard, lie in strided memory of its own.

    Not those of wrapper subclasses, which lie in other tensors or nowhere, nor of fake and meta tensors. A subclass
    without a ``__torch_dispatch__`` of its own is ordinary memory.
    """
    tensor = local(tensor)
    is_wrapper = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return not (is_wrapper or tensor.is_meta) and tensor.layout is torch.strided


def local(tensor: Tensor) -> Tensor:
    """The memory on this rank: of a DTensor its shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def kind(tensor: Any) -> str:
    """For an error message: what `tensor` is."""
    if not isinstance(tensor, Tensor):
        return f"a {type(tensor).__name__}"
    layout = "" if tensor.layout is torch.strided else f" of layout {tensor.layout}"
    return f"a {tensor.dtype} {type(tensor).__name__}{layout} on {tensor.device}"


def plain_gradient(param: Tensor, name: str) -> Tensor:
    """The memory of the gradient of `param` on this rank.

    Where kernels cannot read ``param.grad``, an equal tensor that they can read takes its place: of a gradient that is
    placed otherwise than its DTensor parameter (redistributed, as torch's operators do), that a collective is still
    computing (waited for), that is a negated view or a tensor of zeros without memory.

    Raises:
        TypeError, RuntimeError: there is no such tensor.
    """
    grad = param.grad
    assert grad is not None
    if isinstance(grad, AsyncCollectiveTensor):
        grad = param.grad = grad.wait()
    if isinstance(param, DTensor) or isinstance(grad, DTensor):
        grad = _redistributed(param, grad, name)
        if isinstance(local(grad), AsyncCollectiveTensor):
            grad = param.grad = torch.empty_like(grad).copy_(grad)
    if grad.layout is not torch.strided:
        raise RuntimeError(f"step: the gradient of {name} must be dense, got {grad.layout}; use torch.optim for it")
    if not has_memory(grad):
        raise TypeError(
            f"step: the gradient of {name} must be a Tensor or DTensor with memory of its own, got {kind(grad)}; use "
            "torch.optim for it"
        )
    if grad.dtype not in DTYPE_CODES:
        raise TypeError(f"step: the gradient of {name} must be float32, float16 or bfloat16, got {grad.dtype}")
    if not is_held(local(grad)):
        grad = param.grad = torch.empty_like(grad).copy_(grad)
    return local(grad)


def _redistributed(param: Tensor, grad: Tensor, name: str) -> DTensor:
    if not (isinstance(param, DTensor) and isinstance(grad, DTensor) and param.device_mesh == grad.device_mesh):
        raise RuntimeError(
            f"step: {name} and its gradient must both be tensors, or both DTensors of one mesh, got {kind(param)} and "
            f"{kind(grad)}"
        )
    if param.placements != grad.placements:
        grad = grad.redistribute(placements=param.placements)
        param.grad = grad
    return grad


def is_held(plain: Tensor) -> bool:
    """Whether memory holds the elements: not those of a negated view, nor of `torch._efficientzerotensor`."""
    return not plain.is_neg() and (plain.data_ptr() != 0 or plain.numel() == 0)


class Spans:
    """The memory of dense tensors that share none: what a step writes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        spans = sorted((t.data_ptr(), _end(t)) for t in tensors if t.numel() > 0)
        self.starts = array("q", (start for start, _ in spans))
        self.ends = array("q", (end for _, end in spans))

    def meet(self, tensor: Tensor) -> bool:
        """Whether a dense tensor lies in it. One that has gaps is copied before anything is written."""
        if tensor.numel() == 0 or not is_dense(tensor):
            return False
        i = bisect.bisect_right(self.ends, tensor.data_ptr())
        return i < len(self.ends) and self.starts[i] < _end(tensor)


def _end(tensor: Tensor) -> int:
    return tensor.data_ptr() + tensor.numel() * tensor.element_size()


def are_plain(tensors: Iterable[Tensor]) -> bool:
    """Whether the compiled sweep sees these; one that becomes another object later it calls UNREADABLE."""
    return set(map(type, tensors)) <= {Tensor, Parameter}


def observe(
    params: list[Tensor],
    states: list[Tensor],
    written: Spans,
    seen: Tensor,
    places: Tensor,
    *,
    plain: bool,
    writes: bool = False,
) -> None:
    """Looks at parameters and their gradients, and at states.

    For a thousand parameters the compiled sweep takes a twelfth of the time of the one in Python, with cold caches a
    fifth; it sees plain tensors only.

    Args:
        written: memory where gradients may not lie.
        seen: int64 [4, number of parameters], see `Seen`.
        places: int64 [2, number of states].
        plain: whether all parameters and states were tensors of no subclass when the plan was built (`are_plain`).
        writes: whether gradients will be written, which ends their sharing of memory with lazy clones; parameters
            always do.
    """
    compiled = _compiled_sweep() if plain else None
    if compiled is None:
        seen.copy_(int64_tensor(_sweep(params, written)).view(len(params), len(Seen)).T)
        places.copy_(int64_tensor(x for state in states for x in _place(state)).view(len(states), PLACE).T)
    else:
        spans = (written.starts.buffer_info()[0], *written.ends.buffer_info())
        compiled(params, states, spans, seen.data_ptr(), places.data_ptr(), writes)


def _sweep(params: Sequence[Tensor], written: Spans) -> Iterator[int]:
    for param in params:
        yield from _place(param)
        yield from _gradient(param, written)


def _place(tensor: Tensor) -> tuple[int, int]:
    return (local(tensor).data_ptr(), _layout(local(tensor))) if has_memory(tensor) else (0, UNREADABLE)


def _gradient(param: Tensor, written: Spans) -> tuple[int, int]:
    grad = param.grad
    if grad is None:
        return 0, NO_GRADIENT
    if isinstance(grad, DTensor) and not (isinstance(param, DTensor) and grad.placements == param.placements):
        return 0, UNREADABLE
    if not has_memory(grad) or grad.dtype not in DTYPE_CODES:
        return 0, UNREADABLE
    plain = local(grad)
    if not is_held(plain) or written.meet(plain):
        return 0, UNREADABLE
    return plain.data_ptr(), _layout(plain)


def _layout(tensor: Tensor) -> int:
    return hash((tensor.dtype, tensor.shape, tensor.stride())) & (2**63 - 1)


@functools.cache
def _compiled_sweep() -> Callable[..., None] | None:
    api = torch_private.tensor_exchange_api()
    if api is None or not _loader.load():
        return None
    torchs = (api, Tensor, Parameter, Tensor.is_neg, Tensor.data_ptr)
    try:
        sweep = importlib.import_module("amp_kernels._C").observe
        sweep([], [], (0, 0, 0), 0, 0, False, torchs)
    except (AttributeError, TypeError, ValueError, NotImplementedError):  # another version, of `_C` or of the interface
        return None
    return lambda *arguments: sweep(*arguments, torchs)
