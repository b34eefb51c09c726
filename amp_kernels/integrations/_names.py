"""The names by which configuration files and command lines choose a fused optimizer."""

from __future__ import annotations

import torch

from ..optim import FusedAdam, FusedAdamW, FusedRMSprop, FusedSGD

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "fused_sgd": FusedSGD,
    "fused_rmsprop": FusedRMSprop,
    "fused_adam": FusedAdam,
    "fused_adamw": FusedAdamW,
}
