"""The exponential moving average of weights in fp32: ema_, against torch's foreach functions.

Bytes that a parameter costs: 12 = 8 average, read and written + 4 weight, in fp32 or as a 16-bit weight and
the remainder of its master. A peer without masters averages rounded weights, another keeps fp32 masters and pays for
them in its step (bench_sgd).

    python -m benchmarks.bench_ema --help
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from amp_kernels.optim import FusedSGD, ema_

from .common import Case, Contender, Job, Layout, Report, disagreement, layouts, parse_arguments, run_case, sample

DECAY, CHECKED_CALLS = 0.999, 2


class Weights:
    """What is averaged: fp32 values, of which 16-bit weights with remainders lose next to nothing."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.dtype = dtype
        self.masters = [torch.randn(s, generator=generator, device=device) for s in layout.shapes]
        self.start = [torch.randn(s, generator=generator, device=device) for s in layout.shapes]

    def averages(self) -> list[Tensor]:
        return [x.clone() for x in self.start]

    def expected(self, masters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Sampled averages after the checked calls."""
        average, master = sample(self.start).to(dtype), sample(masters).to(dtype)
        for _ in range(CHECKED_CALLS):
            average.lerp_(master, 1 - DECAY)
        return average

    def job(
        self, run: Callable[[], object], averages: list[Tensor], masters: Sequence[Tensor], slack: float = 0.0
    ) -> Job:
        def check() -> str:
            for _ in range(CHECKED_CALLS):
                run()
            exact = self.expected(masters, torch.float64)
            return disagreement(sample(averages), self.expected(masters, torch.float32), exact, slack)

        return Job(run, check, settle=lambda: torch._foreach_copy_(averages, self.start))


def ours(data: Weights) -> Job:
    params = [torch.nn.Parameter(m.to(data.dtype, copy=True)) for m in data.masters]
    optimizer = FusedSGD(params, lr=1e-3)
    for p in params:
        p.grad = torch.full_like(p, 1 / 3)
    optimizer.step()  # after which masters have bits that their weights lack
    for p in params:
        p.grad = None
    averages = data.averages()
    masters = [optimizer.master(p) for p in params]
    return data.job(partial(ema_, averages, optimizer, DECAY), averages, masters)


def of_masters(data: Weights) -> Job:
    averages = data.averages()

    def run() -> None:
        torch._foreach_lerp_(averages, data.masters, 1 - DECAY)

    return data.job(run, averages, data.masters)


def of_weights(data: Weights) -> Job:
    weights, averages = [m.to(data.dtype) for m in data.masters], data.averages()
    widened = [torch.empty_like(m) for m in data.masters]

    def run() -> None:
        torch._foreach_copy_(widened, weights)
        torch._foreach_lerp_(averages, widened, 1 - DECAY)

    return data.job(run, averages, data.masters, slack=torch.finfo(data.dtype).eps)


def contenders(data: Weights) -> list[Contender]:
    def contender(name: str, build: Callable[[Weights], Job]) -> Contender:
        return Contender(name, "none", 8, partial(build, data))

    if data.dtype is torch.float32:
        return [contender("amp_kernels.optim.ema_", ours), contender("torch._foreach_lerp_", of_masters)]
    return [
        contender("amp_kernels.optim.ema_", ours),
        contender("torch._foreach_lerp_ of fp32 masters", of_masters),
        contender("torch._foreach_copy_ and _foreach_lerp_ of weights", of_weights),
    ]


def main() -> int:
    args = parse_arguments(__doc__)
    report = Report("ema", args)
    for layout in layouts(args):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            low = "weight" if dtype is torch.float32 else "weight and remainder"
            case = Case("ema", "ema_", dtype, layout, 12, f"12 bytes a parameter: 8 average + 4 {low}")
            run_case(case, contenders(Weights(layout, dtype, args.device)), args, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
