"""Operators on tensors and on lists of tensors: updates, gradient passes, int8 and matrix products.

If the compiled extension has kernels for the device of the tensors, these kernels run. Otherwise CUDA tensors use
Triton kernels if Triton is installed, and all other tensors use plain torch (`amp_kernels.reference`). `matmul` says
which library multiplies 16-bit matrices. Every function can also be imported from `amp_kernels`.

No function waits for the device, with two exceptions: `clip_grad_norm_` with `error_if_nonfinite=True`, and `unscale_`
and `grad_norm` if gradients are on a GPU but `found_inf` or the first gradient is on the CPU.
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
