"""The public functions, a file for each family; nothing here waits for a device.

Without a compiled extension they run as Triton kernels or as plain torch (`amp_kernels.reference`).
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
