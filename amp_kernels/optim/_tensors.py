"""Tests whether kernels can read and write a tensor, and replaces a tensor if they cannot."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from ..ops.table import DTYPE_CODES, is_dense, same_layout, shares_memory


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor, or the shard of a DTensor, has strided memory of its own.

    Fake and meta tensors and wrapper subclasses (those that define ``__torch_dispatch__``) have none.
    """
    tensor = local(tensor)
    is_wrapper = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return not (is_wrapper or tensor.is_meta) and tensor.layout is torch.strided


def is_held(plain: Tensor) -> bool:
    """Whether the memory of a tensor holds its values. `torch._efficientzerotensor` has no memory."""
    return not plain.is_neg() and (plain.data_ptr() != 0 or plain.numel() == 0)


def kind(tensor: Any) -> str:
    """Describes `tensor` for an error message."""
    if not isinstance(tensor, Tensor):
        return f"a {type(tensor).__name__}"
    layout = "" if tensor.layout is torch.strided else f" of layout {tensor.layout}"
    return f"a {tensor.dtype} {type(tensor).__name__}{layout} on {tensor.device}"


def dense(plain: Tensor) -> Tensor:
    """Returns `plain` if it is dense and not negated, otherwise a mirror of it.

    A mirror is a dense tensor that kernels write in place of `plain` (_plan.py). The new mirror is not filled yet.
    """
    return plain if is_dense(plain) and not plain.is_neg() else torch.empty_like(plain)


def is_laid_out(state: Tensor, target: Tensor, dtype: torch.dtype) -> bool:
    """Whether kernels can use a state as it is.

    `target` is what kernels write to update the parameter: its plain tensor, or a mirror (see `dense`).
    """
    is_usable = state.dtype is dtype and has_memory(state) and is_held(state) and not state.is_inference()
    is_alike = state.device == target.device and state.shape == target.shape
    return is_usable and is_alike and same_layout(state, target)


def is_count(step: Any, device: torch.device) -> bool:
    """Whether kernels can use `step` as the count of steps."""
    if not isinstance(step, Tensor) or step.dtype is not torch.int32 or step.numel() != 1 or not has_memory(step):
        return False
    return step.device == device and not isinstance(step, DTensor) and not step.is_inference()


def check_parameter(caller: str, name: str, param: Tensor) -> None:
    """Raises an error if no kernel can update `param`. `caller` and `name` begin the message."""
    if param.dtype not in DTYPE_CODES:
        raise TypeError(f"{caller}: {name} must be float32, float16 or bfloat16, got {param.dtype}")
    is_partial = isinstance(param, DTensor) and any(placement.is_partial() for placement in param.placements)
    if not has_memory(param) or local(param).data_ptr() == 0 < local(param).numel() or is_partial:
        raise TypeError(
            f"{caller}: {name} must be a Tensor, or a sharded or replicated DTensor, with memory of its own, got "
            f"{kind(param)}; use torch.optim for it"
        )
    if param.is_inference():
        raise RuntimeError(
            f"{caller}: {name} must not be an inference tensor, since autograd cannot track its changes; create it "
            "outside torch.inference_mode()"
        )


def read_gradient(param: Tensor, name: str, target: Tensor) -> Tensor:
    """Returns the gradient on this rank as a plain tensor that kernels can read, or raises an error."""
    grad = _plain_gradient(param, name)
    if grad.shape != target.shape:  # for example, the parameter's .data was replaced after the backward pass
        raise RuntimeError(
            f"step: the gradient of {name} must have the parameter's shape {tuple(target.shape)}, got "
            f"{tuple(grad.shape)}; set it to None when the parameter's .data is replaced"
        )
    if grad.device != target.device:
        raise RuntimeError(
            f"step: the gradient of {name} must be on {target.device} with the parameter, got {grad.device}; set it to "
            "None when the parameter is moved"
        )
    return grad


def _plain_gradient(param: Tensor, name: str) -> Tensor:
    """Returns the gradient of `param` on this rank as a plain tensor.

    ``param.grad`` is replaced by an equal tensor that kernels can read if a collective still computes it, if its
    placements are not those of its parameter, or if its memory does not hold its values.
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
            f"step: {name} and its gradient must both be plain tensors, or both be DTensors on the same mesh, got "
            f"{kind(param)} and {kind(grad)}"
        )
    if param.placements != grad.placements:
        grad = grad.redistribute(placements=param.placements)
        param.grad = grad
    return grad


def check_written(names: Sequence[str], grads: Sequence[Tensor]) -> None:
    """Raises RuntimeError if gradients cannot be written, because they share memory or are inference tensors."""
    inference = next((name for name, g in zip(names, grads, strict=True) if g.is_inference()), None)
    if inference is not None:
        raise RuntimeError(
            f"unscale_: the gradient of {inference} must not be an inference tensor, since it is written; clone() it"
        )
    shared = shares_memory(grads)
    if shared is not None:
        raise RuntimeError(
            f"unscale_: the gradient of {names[shared]} must not share memory with itself or another gradient, "
            "since it is written; clone() it"
        )


class Spans:
    """The memory ranges of dense tensors. The ranges must not overlap. They are sorted, so that a search is fast."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        spans = sorted((t.data_ptr(), _end(t)) for t in tensors if t.numel() > 0)
        self.starts = [start for start, _ in spans]
        self.ends = [end for _, end in spans]

    def overlaps(self, tensor: Tensor) -> bool:
        """Whether a tensor overlaps one of the ranges."""
        # A plan (_plan.py) copies a gradient with gaps before it writes anything, so an overlap does no harm.
        if tensor.numel() == 0 or not is_dense(tensor):
            return False
        i = bisect.bisect_right(self.ends, tensor.data_ptr())
        return i < len(self.ends) and self.starts[i] < _end(tensor)


def _end(tensor: Tensor) -> int:
    return tensor.data_ptr() + tensor.numel() * tensor.element_size()
