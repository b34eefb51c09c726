"""Takes operators on CPU tensors to kernels that stand in for a GPU's."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from amp_kernels import backends
from amp_kernels.ops.library import DEFINITIONS

_PRODUCTS = importlib.import_module("amp_kernels.functional.matmul")  # the package's name for it is a function


class _Launch(TorchDispatchMode):
    """Whatever the CPU has of its own for an operator."""

    def __init__(self, kernels: Any) -> None:
        super().__init__()
        self.kernels = kernels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        definition = DEFINITIONS.get(func)
        if definition is None or types:
            return func(*args, **(kwargs or {}))
        if definition.launch is not None:
            return definition.launch(self.kernels, *args, **(kwargs or {}))
        definition.check(*args, **(kwargs or {}))
        return self.kernels.LAUNCHES[func](*args, **(kwargs or {}))


@contextlib.contextmanager
def served_by(kernels: Any) -> Iterator[None]:
    """Whatever takes CPU tensors to kernels takes them to these, a module like amp_kernels.triton_kernels, inside the
    ``with`` block."""
    replaced = {
        (backends, "select"): lambda device: "cuda",
        (backends, "kernels"): lambda name: kernels,
        (_PRODUCTS, "forced"): lambda: "cuda",
    }
    before = {place: getattr(*place) for place in replaced}
    for place, value in replaced.items():
        setattr(*place, value)
    try:
        with _Launch(kernels):
            yield
    finally:
        for place, value in before.items():
            setattr(*place, value)
