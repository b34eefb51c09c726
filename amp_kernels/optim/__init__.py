"""Optimizers of `torch.optim` as fused kernels, with fp32 masters for 16-bit parameters.

Averages and exact weights of a model, and learning rates under loss scaling.
"""

from .adam import FusedAdam, FusedAdamW
from .averages import ema_
from .rmsprop import FusedRMSprop
from .schedulers import SkipAwareScheduler
from .sgd import FusedSGD
from .weights import fp32_state_dict, load_fp32_state_dict

__all__ = [
    "FusedAdam",
    "FusedAdamW",
    "FusedRMSprop",
    "FusedSGD",
    "SkipAwareScheduler",
    "ema_",
    "fp32_state_dict",
    "load_fp32_state_dict",
]
