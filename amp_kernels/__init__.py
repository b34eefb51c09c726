"""Fused CUDA, Triton and C++ kernels for mixed-precision training with PyTorch.

Operators over lists of tensors, optimizers with fp32 masters for 16-bit weights (`amp_kernels.optim`), a `GradScaler`
whose checks ride along with the step, and the specification of it all in plain torch (`amp_kernels.reference`).
"""

from . import nn, optim, quantization, reference
from .audit import explain
from .backends import use_backend
from .functional import (
    Int8Tensor,
    addmm,
    clip_grad_norm_,
    dequantize_int8,
    fake_quantize_int8,
    grad_norm,
    int8_matmul,
    linear,
    matmul,
    pad_to_multiple,
    quantize_int8,
    rmsprop_,
    sgd_,
    unscale_,
)
from .grad_scaler import GradScaler

__version__ = "0.1.0"

__all__ = [
    "GradScaler",
    "Int8Tensor",
    "__version__",
    "addmm",
    "clip_grad_norm_",
    "dequantize_int8",
    "explain",
    "fake_quantize_int8",
    "grad_norm",
    "int8_matmul",
    "linear",
    "matmul",
    "nn",
    "optim",
    "pad_to_multiple",
    "quantization",
    "quantize_int8",
    "reference",
    "rmsprop_",
    "sgd_",
    "unscale_",
    "use_backend",
]
