"""The specification: the operators in plain torch, without a compiler, for any device.

The functions have the names, arguments and results of those in `amp_kernels`, but they run no compiled or Triton
kernel. Some functions of `amp_kernels` need no specification of their own: `clip_grad_norm_` calls `grad_norm` and
`unscale_`, `ema_` calls the operator of `sgd_`, and `addmm` and `linear` call that of `matmul`. `int8_linear` is the
operator of a weight-only `nn.Int8Linear`. The int8 operators here take and return plain tensors. Arguments are not
checked.
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
