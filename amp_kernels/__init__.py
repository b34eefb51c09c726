"""Fused CUDA, Triton and C++ kernels for mixed-precision training with PyTorch.

Operators over lists of tensors, optimizers with fp32 masters for 16-bit weights (`amp_kernels.optim`), a `GradScaler`
whose checks ride along with the step, and the specification of it all in plain torch (`amp_kernels.reference`).
"""

from . import optim, reference
from ._ops import use_backend
from .functional import clip_grad_norm_, grad_norm, rmsprop_, sgd_, unscale_
from .grad_scaler import GradScaler

__version__ = "0.1.0"

__all__ = [
    "GradScaler",
    "__version__",
    "clip_grad_norm_",
    "grad_norm",
    "optim",
    "reference",
    "rmsprop_",
    "sgd_",
    "unscale_",
    "use_backend",
]
