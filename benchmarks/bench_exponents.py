"""The pass of PrecisionReport over gradients: counts of exponents, largest magnitudes, sums of squares.

It reads each element once, as grad_norm does, whose time stands beside it: the pass with statistics is meant to take at
most three times that. No function of torch counts exponents; its peer is the same work written in plain torch.

    python -m benchmarks.bench_exponents --help
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor

import amp_kernels

from .common import Case, Contender, Job, Layout, Report, layouts, parse_arguments, run_case

COLUMNS = 257
Results = tuple[Tensor, Tensor, Tensor]


def ours(tensors: list[Tensor], results: Results) -> None:
    torch.ops.amp_kernels.count_exponents_(tensors, *results)


def plain_torch(tensors: list[Tensor], results: Results) -> None:
    amp_kernels.reference.count_exponents_(tensors, *results)


class Gradients:
    """The gradients of a case, with some zeros, and the right answers for them."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.device, self.dtype = device, dtype
        self.grads = []
        for shape in layout.shapes:
            grad = torch.randn(shape, generator=generator, device=device).mul_(1e-3).to(dtype)
            grad.view(-1)[::100] = 0.0
            self.grads.append(grad)

    def results(self) -> Results:
        count = len(self.grads)
        return (
            torch.zeros(count, COLUMNS, dtype=torch.int64, device=self.device),
            torch.zeros(count, device=self.device),
            torch.zeros(count, dtype=torch.float64, device=self.device),
        )

    @cached_property
    def expected(self) -> Results:
        results = self.results()
        plain_torch(self.grads, results)
        return results

    def disagreement(self, results: Results) -> str:
        counts, largest, squares = results
        if not torch.equal(counts, self.expected[0]) or not torch.equal(largest, self.expected[1]):
            return "wrong: other counts, or another largest magnitude"
        error = (squares.sqrt() / self.expected[2].sqrt() - 1).abs().max().item()
        return "" if error <= 1e-6 else f"wrong: relative error of a norm {error:.3g}, allowed 1e-06"


def count_job(data: Gradients, function: Callable[[list[Tensor], Results], None]) -> Job:
    results = data.results()
    run = partial(function, data.grads, results)

    def check() -> str:
        run()
        return data.disagreement(results)

    return Job(run, check)


def norm_job(data: Gradients) -> Job:
    found_inf = torch.zeros((), device=data.device)
    run = partial(amp_kernels.grad_norm, data.grads, found_inf=found_inf)

    def check() -> str:
        error = abs(run().item() / data.expected[2].sum().sqrt().item() - 1)
        return "" if error <= 1e-6 else f"wrong: relative error {error:.3g}, allowed 1e-06"

    return Job(run, check)


def contenders(data: Gradients) -> list[Contender]:
    size = data.dtype.itemsize
    return [
        Contender("amp_kernels.count_exponents_", "none", size, partial(count_job, data, ours)),
        Contender("amp_kernels.grad_norm without counts", "none", size, partial(norm_job, data)),
        Contender("plain torch", "none", size, partial(count_job, data, plain_torch)),
    ]


def main() -> int:
    args = parse_arguments(__doc__)
    report = Report("exponents", args)
    for layout in layouts(args):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            size = dtype.itemsize
            case = Case("exponents", "count_exponents_", dtype, layout, size, f"{size} bytes an element: read")
            run_case(case, contenders(Gradients(layout, dtype, args.device)), args, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
