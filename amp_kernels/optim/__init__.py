"""Optimizers of `torch.optim` as fused kernels, with fp32 masters for 16-bit parameters. Averages of weights.

Helpers for parameter groups and for learning rates under loss scaling.
"""

from .adam import FusedAdam, FusedAdamW
from .averages import average_, ema_, greedy_soup
from .groups import param_groups
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
    "average_",
    "ema_",
    "fp32_state_dict",
    "greedy_soup",
    "load_fp32_state_dict",
    "param_groups",
]
