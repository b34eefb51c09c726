"""Optimizers of `torch.optim` as fused kernels, with fp32 masters for 16-bit parameters. Averages of weights."""

from .adam import FusedAdam, FusedAdamW
from .averages import average_, ema_, greedy_soup
from .rmsprop import FusedRMSprop
from .sgd import FusedSGD
from .weights import fp32_state_dict, load_fp32_state_dict

__all__ = [
    "FusedAdam",
    "FusedAdamW",
    "FusedRMSprop",
    "FusedSGD",
    "average_",
    "ema_",
    "fp32_state_dict",
    "greedy_soup",
    "load_fp32_state_dict",
]
