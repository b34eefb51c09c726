"""Fused CUDA, Triton and C++ kernels for mixed-precision training with PyTorch.

Operators over lists of tensors, optimizers with fp32 masters for 16-bit weights (`amp_kernels.optim`), a `GradScaler`
whose checks ride along with the step, and the specification of it all in plain torch (`amp_kernels.reference`).
"""

from . import amp, functional, nn, optim, quantization, reference
from .audit import explain
from .backends import use_backend
from .functional import *  # noqa: F403 (every public function is a name of the package too)
from .grad_scaler import GradScaler

__version__ = "0.1.0"

__all__ = ["GradScaler", "__version__", "amp", "explain", "nn", "optim", "quantization", "reference", "use_backend"]
__all__ += functional.__all__
