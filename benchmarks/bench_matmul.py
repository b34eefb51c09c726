"""Products of 16-bit matrices: aligned and odd sizes, with and without epilogue, forward and backward, few rows.

Peers: torch's product on the same operands, torch's on padded copies of them (F.pad, multiply, slice), the compiled
product (Inductor's pad_mm), and in fp32. Bytes are those of the operands and the result, read and written once.

    python -m benchmarks.bench_matmul --help
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

import amp_kernels
from amp_kernels.functional.matmul import Activation
from amp_kernels.ops import matmul as ops
from amp_kernels.testing.matmul import compare

from .common import (
    QUICK_SHAPES,
    Case,
    Contender,
    Job,
    Report,
    by_size,
    normal,
    on_other_backends,
    parse_arguments,
    run_case,
)

CHECKED_ROWS = 16
Function = Callable[[Tensor, Tensor, Tensor], Tensor]  # of input, weight and bias
# (rows, outputs, inputs): aligned ones and their odd neighbours, a vocabulary, few rows.
SIZES = {
    "cpu": (
        (64, 64, 64), (512, 512, 512), (1024, 1024, 1024), (1024, 1023, 1023), (2048, 1024, 256), (512, 4095, 1023),
        (256, 50257, 256), (1, 4096, 4096), (8, 4096, 4096),
    ),
    "cuda": (
        (1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192), (4096, 4095, 4095), (4096, 4096, 4095),
        (4096, 4095, 4096), (1024, 1023, 1023), (4096, 1023, 1023), (8192, 1023, 1023), (8192, 1024, 1023),
        (8192, 50257, 1024), (8192, 50257, 1023), (1, 4096, 4096), (8, 4096, 4096), (16, 4095, 4095),
    ),
}  # fmt: skip


def padded(x: Tensor, dim: int) -> Tensor:
    pad = [0, 0] * (x.dim() - 1 - dim) + [0, -x.shape[dim] % 8]
    return F.pad(x, pad)


class Data:
    """Operands of a case, and what the first and the last rows of its result are in fp64."""

    def __init__(
        self, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device, activation: Activation | None = None
    ) -> None:
        rows, outputs, inputs = sizes
        made = partial(normal, dtype=dtype, device=device)
        self.x = made(rows, inputs, seed=1)
        self.weight = (normal(outputs, inputs, dtype=torch.float32, device=device, seed=2) / inputs**0.5).to(dtype)
        self.bias = made(outputs, seed=3)
        self.grad = made(rows, outputs, seed=4)
        self.activation = activation

    def job(self, function: Function) -> Job:
        run = partial(function, self.x, self.weight, self.bias)
        picked = torch.cat([torch.arange(len(self.x))[:CHECKED_ROWS], torch.arange(len(self.x))[-CHECKED_ROWS:]])
        x = self.x[picked.to(self.x.device)]

        def check() -> str:
            def truth(dtype: torch.dtype) -> Tensor:
                y = F.linear(x.to(dtype), self.weight.to(dtype), self.bias.to(dtype))
                return F.gelu(y) if self.activation == "gelu" else y

            theirs = truth(torch.float32).to(self.x.dtype)
            result = compare("", run()[picked.to(x.device)].to(x.dtype), theirs.cpu(), truth(torch.float64).cpu())
            return "" if result.passed else f"wrong: error {result.error:.3g}, allowed {result.allowed:.3g}"

        return Job(run, check)

    def both_passes(self, function: Function) -> Job:
        """Forward and backward, as a training step does."""
        leaves = [t.clone().requires_grad_() for t in (self.x, self.weight, self.bias)]

        def run() -> tuple[Tensor, ...]:
            return torch.autograd.grad(function(*leaves), leaves, self.grad)

        def check() -> str:
            exact = [t.detach().double().requires_grad_() for t in leaves]
            y = F.linear(*exact)
            truth = torch.autograd.grad(F.gelu(y) if self.activation == "gelu" else y, exact, self.grad.double())
            for ours, true in zip(run(), truth, strict=True):
                if (ours.double() - true).abs().max() > 0.02 * true.abs().max():
                    return "wrong gradients"
            return ""

        return Job(run, check)


def contenders(data: Data, make: Callable[[Function], Job], args: argparse.Namespace) -> list[Contender]:
    ours = partial(amp_kernels.linear, activation=data.activation)

    def with_torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = F.linear(x, weight, bias)
        return F.gelu(y) if data.activation == "gelu" else y

    def by_padding(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = F.linear(padded(x, 1), padded(padded(weight, 1), 0), padded(bias, 0))[:, : weight.shape[0]]
        return F.gelu(y) if data.activation == "gelu" else y

    def in_fp32() -> Job:
        other = Data.__new__(Data)
        other.__dict__ = {k: v.float() if isinstance(v, torch.Tensor) else v for k, v in data.__dict__.items()}
        return (other.job if make == data.job else other.both_passes)(with_torch)

    def compiled() -> Job:
        if args.no_compile:
            raise RuntimeError("left out by --no-compile or --quick")
        return make(torch.compile(with_torch, dynamic=False))

    def with_threshold(name: str, value: int) -> Job:
        job = make(ours)

        def run() -> object:
            before = getattr(ops, name)
            setattr(ops, name, value)
            try:
                return job.run()
            finally:
                setattr(ops, name, before)

        return Job(run, job.check)

    rows, inputs = data.x.shape
    plan = [
        ("amp_kernels.linear", lambda: make(ours)),
        ("torch linear", lambda: make(with_torch)),
        ("F.pad, torch linear, slice", lambda: make(by_padding)),
        ("torch linear, compiled", compiled),
        ("fp32: torch linear", in_fp32),
    ]
    # What the defaults in amp_kernels/ops/matmul.py leave to torch. These contenders decide whether they should.
    if data.x.is_cuda and rows <= ops.FEW_ROWS:
        plan.append(("amp_kernels.linear, odd rows", lambda: with_threshold("ODD_ROWS", ops.FEW_ROWS)))
    elif data.x.is_cuda and rows * inputs * len(data.weight) <= ops.MIN_WORK:
        plan.append(("amp_kernels.linear, padded", lambda: with_threshold("MIN_WORK", 0)))
    forced = on_other_backends("amp_kernels.linear", 8, data.x.device, make, ours, ["cuda"])
    return [*(Contender(name, "none", 8, build) for name, build in plan), *forced]


def main() -> int:
    args = parse_arguments(__doc__)
    report = Report("matmul", args)
    sizes = args.shapes or (QUICK_SHAPES if args.quick else SIZES[args.device.type])
    for size, dtype in product(sizes, (torch.float16, torch.bfloat16)):
        rows, outputs, inputs = size
        for layout in by_size("x".join(map(str, size)), ((rows, inputs), (outputs, inputs)), args.device):
            if layout.elements > args.max_elements:
                continue
            passes: list[tuple[str, Activation | None, int]] = [("linear", None, 1), ("linear + gelu", "gelu", 1)]
            passes += [("forward and backward", None, 3)]
            # in fp16 torch's take minutes, with an activation no longer than without
            passes += [("forward and backward + gelu", "gelu", 3)] if dtype == torch.bfloat16 else []
            for name, activation, products in passes[:1] if args.quick or args.shapes else passes:
                if args.device.type == "cpu" and dtype == torch.float16 and products == 3 and layout.elements > 2**21:
                    continue  # torch's fp16 takes minutes there
                data = Data(size, dtype, args.device, activation)
                make = data.job if products == 1 else data.both_passes
                traffic = f"{products} x 2 bytes an element of the operands, the result beside them"
                operations = products * 2 * rows * outputs * inputs
                case = Case("matmul", name, dtype, layout, 2 * products, traffic, operations)
                run_case(case, contenders(data, make, args), args, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
