"""Bytes that a training step keeps: asked of the allocator on a GPU, counted tensor by tensor on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Bytes of the tensors that operators have returned and that are still alive; `peak` the most so far.

    A tensor counts with its storage, for as long as that is alive. Scratch memory inside of operators does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in inputs:
                storage = StorageWeakRef(tensor.untyped_storage())
                self.storages[storage.cdata] = storage, tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, self.bytes())
        return result

    def bytes(self) -> int:
        self.storages = {key: pair for key, pair in self.storages.items() if not pair[0].expired()}
        return sum(size for _, size in self.storages.values())


@dataclass(frozen=True)
class Bytes:
    """Above what was there before the forward pass."""

    held: int  # what the forward pass leaves for the backward pass
    peak: int  # the most during both, gradients too


def of_both_passes(loss: Callable[[], Tensor], device: torch.device) -> Bytes:
    """Of `loss().backward()`. Gradients should be None before, and are there afterwards."""
    if device.type != "cuda":
        with Live() as live:
            value = loss()
            held = live.bytes()
            value.backward()
        return Bytes(held, live.peak)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    value = loss()
    held = torch.cuda.memory_allocated(device) - before
    value.backward()
    return Bytes(held, torch.cuda.max_memory_allocated(device) - before)


def of_first_step(step: Callable[[], object], device: torch.device) -> Bytes:
    """Of an optimizer that has no state yet. `held` is its state, `peak` also what the step allocates and frees."""
    if device.type != "cuda":
        with Live() as live:
            step()
            return Bytes(live.bytes(), live.peak)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return Bytes(torch.cuda.memory_allocated(device) - before, torch.cuda.max_memory_allocated(device) - before)
