"""The passes over gradients: unscale_, grad_norm, clip_grad_norm_, against torch's foreach functions.

Bytes that a gradient element costs: unscale_ reads and writes it (2 times its size), grad_norm reads it
(1), and clip_grad_norm_ reads it for the norm, then reads and writes it to scale (3). grad_norm checks for
NaN and inf in the same read; the peer that does the same work runs torch's check before torch's norm.

    python -m benchmarks.bench_unscale --help
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

import amp_kernels

from .common import Case, Contender, Job, Layout, Report, disagreement, layouts, parse_arguments, run_case, sample

CHECK_SCALE = 1 / 1024
torch_norm = partial(torch.nn.utils.get_total_norm, foreach=True)
torch_clip = partial(torch.nn.utils.clip_grad_norm_, foreach=True)


def our_unscale(grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    amp_kernels.unscale_(grads, inv_scale=inv_scale, found_inf=found_inf)


def torch_unscale(grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)


def our_norm(grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> Tensor:
    return amp_kernels.grad_norm(grads, inv_scale=inv_scale, found_inf=found_inf)


def torch_check_and_norm(grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> Tensor:
    torch_unscale(grads, inv_scale, found_inf)
    return torch_norm(grads)


def torch_norm_alone(grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> Tensor:
    return torch_norm(grads)


class Gradients:
    """The gradients of a case and the right answers for them."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        shapes = layout.shapes
        self.grads = [torch.randn(s, generator=generator, device=device).to(dtype) for s in shapes]
        self.device, self.dtype = device, dtype

    def clones(self) -> list[Tensor]:
        return [g.clone() for g in self.grads]

    def scalars(self, inv_scale: float) -> tuple[Tensor, Tensor]:
        """(inv_scale, found_inf)"""
        return torch.full((), inv_scale, device=self.device), torch.zeros((), device=self.device)

    @cached_property
    def norm(self) -> float:
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in self.grads]
        return torch.linalg.vector_norm(torch.stack(norms)).item()

    def disagreement(self, grads: Sequence[Tensor], factor: float, slack: float = 0.0) -> str:
        """What is wrong with gradients that should be `factor` times ours."""
        before = sample(self.grads)
        by_torch = (before.float() * factor).to(self.dtype)
        return disagreement(sample(grads), by_torch, before.double() * factor, slack)


def unscale_job(data: Gradients, function: Callable[..., object]) -> Job:
    grads, (inv_scale, found_inf) = data.clones(), data.scalars(CHECK_SCALE)
    run = partial(function, grads, inv_scale, found_inf)

    def check() -> str:
        run()
        wrong = data.disagreement(grads, CHECK_SCALE)
        if wrong or found_inf.item() != 0:
            return wrong or "wrong: found_inf set by finite gradients"
        grads[-1].view(-1)[-1] = torch.inf
        run()
        return "" if found_inf.item() == 1 else "wrong: missed an inf"

    def settle() -> None:
        torch._foreach_copy_(grads, data.grads)
        inv_scale.fill_(1.0)

    return Job(run, check, settle)


def norm_job(data: Gradients, function: Callable[..., Tensor], tolerance: float) -> Job:
    run = partial(function, data.clones(), *data.scalars(1.0))

    def check() -> str:
        error = abs(run().item() / data.norm - 1)
        return "" if error <= tolerance else f"wrong: relative error {error:.3g}, allowed {tolerance:.3g}"

    return Job(run, check)


def clip_job(data: Gradients, function: Callable[..., object], slack: float) -> Job:
    """From the second run on the norm is the limit and the factor about 1: the values stay."""
    params, limit = data.clones(), data.norm / 2
    for p in params:
        p.grad = p.detach()  # clipping reads only the gradients
    run = partial(function, params, limit)

    def check() -> str:
        run()
        return data.disagreement(params, limit / (data.norm + 1e-6), slack)

    return Job(run, check)


def operators(data: Gradients) -> Iterator[tuple[str, int, str, list[Contender]]]:
    """(operator, how many times it moves an element, what for, contenders)"""

    def contender(name: str, job: Callable[..., Job], function: Callable[..., Any], *tolerance: float) -> Contender:
        build = partial(job, data, function, *tolerance)
        return Contender(name, "none", data.dtype.itemsize, build)

    # torch's norm and clip factor have the gradients' dtype, and its CPU norm of fp32 adds squares in fp32
    coarse = max(1e-3, torch.finfo(data.dtype).eps)
    yield (
        "unscale_", 2, "read + write",
        [
            contender("amp_kernels.unscale_", unscale_job, our_unscale),
            contender("torch._amp_foreach_non_finite_check_and_unscale_", unscale_job, torch_unscale),
        ],
    )  # fmt: skip
    yield (
        "grad_norm", 1, "read",
        [
            contender("amp_kernels.grad_norm", norm_job, our_norm, 1e-6),
            contender("torch check, then get_total_norm", norm_job, torch_check_and_norm, coarse),
            contender("torch get_total_norm, no check", norm_job, torch_norm_alone, coarse),
        ],
    )  # fmt: skip
    yield (
        "clip_grad_norm_", 3, "read for the norm + read + write",
        [
            contender("amp_kernels.clip_grad_norm_", clip_job, amp_kernels.clip_grad_norm_, 0.0),
            contender("torch clip_grad_norm_", clip_job, torch_clip, coarse),
        ],
    )  # fmt: skip


def main() -> int:
    args = parse_arguments(__doc__)
    report = Report("unscale", args)
    for layout in layouts(args):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            data = Gradients(layout, dtype, args.device)
            for operator, passes, words, contenders in operators(data):
                size = passes * dtype.itemsize
                traffic = f"{size} bytes an element: {words}, {dtype.itemsize} each"
                run_case(Case("unscale", operator, dtype, layout, size, traffic), contenders, args, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
