"""Operators on tensors and on lists of tensors: updates, gradient passes, int8 and matrix products.

`amp_kernels.use_backend` says which kernels run. Matrix products are an exception: the docstrings of `matmul` and
`int8_matmul` say which library or kernel multiplies. All names are public as names of `amp_kernels`.

Only these calls wait for the device:

- `clip_grad_norm_` with `error_if_nonfinite=True`.
- `unscale_`, `grad_norm` and `clip_grad_norm_`, if a scalar has to be copied from a GPU to the CPU. This happens only
  if some of the tensors that they work on are on a GPU and others on the CPU.
"""

from .int8 import Int8Tensor, dequantize_int8, fake_quantize_int8, int8_conv2d, int8_matmul, quantize_int8
from .matmul import addmm, linear, matmul, pad_to_multiple
from .unscale import clip_grad_norm_, grad_norm, unscale_
from .update import adam_, rmsprop_, sgd_

__all__ = [
    "Int8Tensor",
    "adam_",
    "addmm",
    "clip_grad_norm_",
    "dequantize_int8",
    "fake_quantize_int8",
    "grad_norm",
    "int8_conv2d",
    "int8_matmul",
    "linear",
    "matmul",
    "pad_to_multiple",
    "quantize_int8",
    "rmsprop_",
    "sgd_",
    "unscale_",
]
