"""SGD with momentum, the whole step: scaler.step(optimizer), scaler.update().

Bytes that a parameter costs with fp16 weights and fp32 masters: 20 = 2 gradient read by the check + 2
gradient read by the update + 4 weight + 4 remainder + 8 momentum, read and written. (Every gradient must
have been checked before the first weight changes, hence the second read.) With an fp32 model: 24 = 4 + 4
+ 8 weight + 8 momentum.

    python -m benchmarks.bench_sgd --help
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from amp_kernels.optim import FusedSGD

from .steps import Family, main

LR, MOMENTUM = 1e-3, 0.9


def update(
    weights: list[Tensor],
    grads: list[Tensor],
    masters: list[Tensor],
    buffers: list[Tensor],
    inv_scale: Tensor,
) -> None:
    torch._foreach_mul_(buffers, MOMENTUM)
    torch._foreach_add_(buffers, [grad.float() * inv_scale for grad in grads])
    torch._foreach_add_(masters, buffers, alpha=-LR)
    for weight, master in zip(weights, masters, strict=True):
        weight.copy_(master)


FAMILY = Family(
    name="sgd",
    ours=FusedSGD,
    torch_class=torch.optim.SGD,
    options={"lr": LR, "momentum": MOMENTUM},
    variants=("fused", "foreach"),
    update=update,
    traffic={
        torch.float16: (20, "20 bytes a parameter: 2 check + 2 gradient + 4 weight + 4 remainder + 8 momentum"),
        torch.float32: (24, "24 bytes a parameter: 4 check + 4 gradient + 8 weight + 8 momentum"),
    },
    flashoptim="FlashSGD",
)

if __name__ == "__main__":
    sys.exit(main(FAMILY, __doc__))
