"""RMSprop, the whole step: scaler.step(optimizer), scaler.update().

Bytes that a parameter costs with fp16 weights and fp32 masters: 20 = 2 gradient read by the check + 2
gradient read by the update + 4 weight + 4 remainder + 8 square average, read and written. With an fp32
model: 24 = 4 + 4 + 8 weight + 8 square average. torch has no fused RMSprop.

    python -m benchmarks.bench_rmsprop --help
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from amp_kernels.optim import FusedRMSprop

from .steps import Family, main

LR, ALPHA, EPS = 1e-3, 0.99, 1e-8


def update(
    weights: list[Tensor],
    grads: list[Tensor],
    masters: list[Tensor],
    square_avgs: list[Tensor],
    inv_scale: Tensor,
) -> None:
    grads = [grad.float() * inv_scale for grad in grads]
    torch._foreach_mul_(square_avgs, ALPHA)
    torch._foreach_addcmul_(square_avgs, grads, grads, value=1 - ALPHA)
    roots = torch._foreach_add(torch._foreach_sqrt(square_avgs), EPS)
    torch._foreach_addcdiv_(masters, grads, roots, value=-LR)
    for weight, master in zip(weights, masters, strict=True):
        weight.copy_(master)


FAMILY = Family(
    name="rmsprop",
    ours=FusedRMSprop,
    torch_class=torch.optim.RMSprop,
    options={"lr": LR, "alpha": ALPHA, "eps": EPS},
    variants=("foreach",),
    update=update,
    traffic={
        torch.float16: (
            20,
            "20 bytes a parameter: 2 check + 2 gradient + 4 weight + 4 remainder + 8 square avg",
        ),
        torch.float32: (24, "24 bytes a parameter: 4 check + 4 gradient + 8 weight + 8 square avg"),
    },
)

if __name__ == "__main__":
    sys.exit(main(FAMILY, __doc__))
