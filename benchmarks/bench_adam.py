"""AdamW, the whole step: scaler.step(optimizer), scaler.update().

Bytes that a parameter costs with fp16 weights and fp32 masters: 28 = 2 gradient read by the check + 2
gradient read by the update + 4 weight + 4 remainder + 16 averages, read and written. With an fp32 model:
32 = 4 + 4 + 8 weight + 16 averages.

    python -m benchmarks.bench_adam --help
"""

import sys

import torch

from amp_kernels.optim import FusedAdamW

from .steps import Family, main

FAMILY = Family(
    name="adam",
    ours=FusedAdamW,
    torch_class=torch.optim.AdamW,
    options={"lr": 1e-3, "weight_decay": 0.01},
    variants=("fused", "foreach"),
    update=None,
    traffic={
        torch.float16: (28, "28 bytes a parameter: 2 check + 2 gradient + 4 weight + 4 remainder + 16 averages"),
        torch.float32: (32, "32 bytes a parameter: 4 check + 4 gradient + 8 weight + 16 averages"),
    },
    held_bytes=20,
    flashoptim="FlashAdamW",
)

if __name__ == "__main__":
    sys.exit(main(FAMILY, __doc__))
