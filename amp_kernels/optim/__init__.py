"""`torch.optim` optimizers in fused kernels, with fp32 masters for 16-bit parameters."""

from .adam import FusedAdam, FusedAdamW
from .rmsprop import FusedRMSprop
from .sgd import FusedSGD

__all__ = ["FusedAdam", "FusedAdamW", "FusedRMSprop", "FusedSGD"]
