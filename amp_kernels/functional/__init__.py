"""Operators on tensors and on lists of tensors: updates, gradient passes, int8 and matrix products.

A compiled extension serves the tensors of its device. Without one they are served by Triton kernels (CUDA tensors) or
by plain torch (`amp_kernels.reference`). No function waits for the device, except `clip_grad_norm_` with
`error_if_nonfinite=True`. Every name is also a name of `amp_kernels`.
"""

from .adam import adam_, adamw_
from .int8 import Int8Tensor, dequantize_int8, fake_quantize_int8, int8_matmul, quantize_int8
from .matmul import addmm, linear, matmul, pad_to_multiple
from .rmsprop import rmsprop_
from .sgd import sgd_
from .unscale import clip_grad_norm_, grad_norm, unscale_

__all__ = [
    "Int8Tensor",
    "adam_",
    "adamw_",
    "addmm",
    "clip_grad_norm_",
    "dequantize_int8",
    "fake_quantize_int8",
    "grad_norm",
    "int8_matmul",
    "linear",
    "matmul",
    "pad_to_multiple",
    "quantize_int8",
    "rmsprop_",
    "sgd_",
    "unscale_",
]
