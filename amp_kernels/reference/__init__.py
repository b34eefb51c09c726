"""The specification: the operators in plain torch, which need no compiler and run on any device.

The functions have the names, arguments and results of those in `amp_kernels`, but they run no compiled or Triton
kernel. They do not check their arguments. The int8 operators here take and return plain tensors.

Some functions of `amp_kernels` are not listed here, because they call operators that are: `clip_grad_norm_` calls
`grad_norm` and `unscale_`, `ema_` calls the operator of `sgd_`, and `addmm` and `linear` call that of `matmul`.
`int8_linear` is listed, although only weight-only `nn.Int8Linear` layers call its operator.
"""

from . import matmul
from .adam import adam_, adamw_
from .int8 import dequantize_int8, fake_quantize_int8, int8_linear, int8_matmul, quantize_int8, straight_through_int8
from .rmsprop import rmsprop_
from .sgd import sgd_
from .unscale import grad_norm, unscale_

__all__ = [
    "adam_",
    "adamw_",
    "dequantize_int8",
    "fake_quantize_int8",
    "grad_norm",
    "int8_linear",
    "int8_matmul",
    "matmul",
    "quantize_int8",
    "rmsprop_",
    "sgd_",
    "straight_through_int8",
    "unscale_",
]
