"""The specification: every list operator in plain torch, without a compiler, for any device.

Same names, arguments and results as in `amp_kernels`, which prefers a native kernel where there is one.
"""

from .rmsprop import rmsprop_
from .sgd import sgd_
from .unscale import grad_norm, unscale_

__all__ = ["grad_norm", "rmsprop_", "sgd_", "unscale_"]
