"""Optimizers of `torch.optim` as fused kernels, with fp32 masters for 16-bit parameters.

Averages and exact weights of a model, and learning rates under loss scaling.
"""

from .averages import ema_
from .optimizers import FusedAdam, FusedAdamW, FusedRMSprop, FusedSGD
from .schedulers import SkipAwareScheduler
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
