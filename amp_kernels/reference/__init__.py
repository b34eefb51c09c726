"""The specification: the operators in plain torch, without a compiler, for any device.

The functions have the names, arguments and results of those in `amp_kernels`, which run a compiled or Triton kernel
where there is one. `clip_grad_norm_` is made of `grad_norm` and `unscale_`, `ema_` of `sgd_`; `addmm` and `linear` run
the operator that `matmul` specifies. `int8_linear` is the operator of a weight-only `nn.Int8Linear`. The int8 operators
here take and return plain tensors. Nothing is checked.
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
