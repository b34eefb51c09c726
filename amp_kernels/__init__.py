"""Fused CUDA, Triton and C++ kernels for mixed-precision training with PyTorch.

- `amp_kernels.optim`: optimizers with fp32 masters for 16-bit weights.
- `amp_kernels.GradScaler`: loss scaling. The optimizer step itself checks the gradients for NaN and inf.
- `amp_kernels.matmul`, `amp_kernels.unscale_` and others: operators on tensors and lists of tensors.
- `amp_kernels.nn` and `amp_kernels.quantization`: linear layers that are fast with any number of features, int8 layers,
  and the conversion of models to these layers.
- `amp_kernels.reference`: every operator in plain torch, as the specification.
"""

from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import amp, functional, nn, optim, quantization, reference
from .audit import explain
from .backends import use_backend
from .functional import *  # noqa: F403
from .grad_scaler import GradScaler
from .precision import PrecisionReport

__version__ = "0.1.0"

__all__ = ["GradScaler", "PrecisionReport", "__version__", "amp", "explain", "nn", "optim", "quantization"]
__all__ += ["reference", "use_backend"]
__all__ += functional.__all__

if not _TYPE_CHECKING:  # type checkers would take every name for one of the package

    def __getattr__(name: str) -> object:
        modules = {place: globals()[place] for place in __all__ if isinstance(globals()[place], _ModuleType)}
        found = [f"amp_kernels.{place}.{name}" for place, module in modules.items() if name in module.__all__]
        where = f"; it is {' or '.join(found)}" if found else ""
        raise AttributeError(f"module 'amp_kernels' has no attribute {name!r}{where}")
