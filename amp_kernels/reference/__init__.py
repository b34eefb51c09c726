"""The specification: the operators in plain torch, which need no compiler and run on any device.

The functions run no compiled kernel and no Triton kernel, and they do not check their arguments. A function has the
arguments and the result of the function in `amp_kernels` that has the same name, with these exceptions:

- The int8 functions take and return plain tensors, with scales and zero points as separate tensors.
- `amp_kernels` has no `int8_linear`, which only weight-only `nn.Int8Linear` layers call, no `straight_through_int8`,
  the gradient of `fake_quantize_int8`, and no `count_exponents_`, which only `PrecisionReport` and `GradScaler` call.
- `matmul` is a module. Its functions specify the operators for 16-bit products.
- `sgd`, `rmsprop` and `adam` are modules. Their function `formula` updates one parameter. `update_` applies it to
  lists, as `sgd_`, `rmsprop_` and `adam_` of `amp_kernels` do.

Some functions that the package offers have no counterpart here, because they call operators that have one:
`clip_grad_norm_` calls `grad_norm` and `unscale_`. `optim.ema_` calls the operator of `sgd_`. `addmm` and `linear` call
the operator of `matmul`.
"""

from . import adam, matmul, rmsprop, sgd
from .exponents import count_exponents_
from .int8 import (
    dequantize_int8,
    fake_quantize_int8,
    int8_conv2d,
    int8_linear,
    int8_matmul,
    quantize_int8,
    straight_through_int8,
)
from .unscale import grad_norm, unscale_
from .update import update_

__all__ = [
    "adam",
    "count_exponents_",
    "dequantize_int8",
    "fake_quantize_int8",
    "grad_norm",
    "int8_conv2d",
    "int8_linear",
    "int8_matmul",
    "matmul",
    "quantize_int8",
    "rmsprop",
    "sgd",
    "straight_through_int8",
    "unscale_",
    "update_",
]
