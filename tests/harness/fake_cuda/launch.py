"""Launches every Triton kernel by Triton's own launcher, on a GPU that runs nothing. The last line is JSON.

Its argument is the compute capability, 90 for 9.0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from gpus import gpus, kernels, libcuda, name_of
from triton.runtime.jit import JITFunction

import amp_kernels
from amp_kernels.families import FAMILIES
from amp_kernels.testing.updates import UPDATES

FP16, BF16 = torch.float16, torch.bfloat16


# ------------------------------------------------------------------------------------------------- what is launched
def matrix(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def step_of(family: str) -> Callable[[], None]:
    parameters = [torch.nn.Parameter(matrix(4096, dtype=FP16))]
    parameters[0].grad = matrix(4096, dtype=FP16)
    optimizer = UPDATES[family].optimizer(parameters, lr=0.1)
    return optimizer.step


def straight_through() -> None:
    leaf = matrix(64, 256).requires_grad_()
    amp_kernels.fake_quantize_int8(leaf, scale=torch.ones(64, 1)).sum().backward()


def codes(rows: int, columns: int, has_zero_points: bool = False) -> amp_kernels.Int8Tensor:
    zero_points = torch.zeros(rows, 1, dtype=torch.int32) if has_zero_points else None
    return amp_kernels.Int8Tensor(matrix(rows, columns, dtype=torch.int8), torch.ones(rows, 1), zero_points)


def images(*shape: int, has_zero_points: bool = False) -> amp_kernels.Int8Tensor:
    scales = (shape[0], 1, 1, 1)
    zero_points = torch.zeros(scales, dtype=torch.int32) if has_zero_points else None
    return amp_kernels.Int8Tensor(matrix(*shape, dtype=torch.int8), torch.ones(scales), zero_points)


def scalars() -> dict[str, torch.Tensor]:
    return {"inv_scale": torch.ones(()), "found_inf": torch.zeros(())}


CALLS: dict[str, Callable[[], object]] = {
    "unscale_": lambda: amp_kernels.unscale_([matrix(4096, dtype=FP16)], **scalars()),
    "grad_norm": lambda: amp_kernels.grad_norm([matrix(4096)], **scalars()),
    **{family: lambda family=family: step_of(family)() for family in FAMILIES},
    "quantize rows": lambda: amp_kernels.quantize_int8(matrix(2048, 4096), dim=-1),
    "quantize columns, asymmetric": lambda: amp_kernels.quantize_int8(matrix(2048, 4096), dim=0, symmetric=False),
    "quantize a tensor, stochastic": lambda: amp_kernels.quantize_int8(
        matrix(2048, 4096), rounding="stochastic", seed=2**63 - 1
    ),
    "dequantize": lambda: amp_kernels.dequantize_int8(codes(64, 256), BF16),
    "fake_quantize_int8": straight_through,
    "int8_matmul": lambda: amp_kernels.int8_matmul(codes(2048, 512), codes(4096, 512).t()),
    "int8_matmul, zero points": lambda: amp_kernels.int8_matmul(codes(2048, 512, True), codes(2048, 512, True).t()),
    "int8_matmul, few rows": lambda: amp_kernels.int8_matmul(codes(1, 8192), codes(64, 8192).t()),
    "int8_conv2d": lambda: amp_kernels.int8_conv2d(images(4, 64, 64, 64), images(256, 3, 3, 64), padding=1),
    "int8_conv2d, zero points": lambda: amp_kernels.int8_conv2d(
        images(4, 64, 64, 64, has_zero_points=True), images(64, 3, 3, 64), padding=1
    ),
    "int8_linear": lambda: torch.ops.amp_kernels.int8_linear(
        matrix(64, 512), matrix(64, 512, dtype=torch.int8), torch.ones(64), None
    ),
    "copy_pad": lambda: torch.ops.amp_kernels.copy_pad(matrix(4096, 1023), None, None, True, 4096),
    "copy_pad, gelu": lambda: torch.ops.amp_kernels.copy_pad(matrix(64, 1023), matrix(64, 1023), "gelu", False, 64),
}


def main() -> None:
    launched: set[str] = set()
    run = JITFunction.run

    def noted(self: JITFunction, *arguments: Any, warmup: bool, **options: Any) -> Any:
        before = libcuda.fake_launches()
        result = run(self, *arguments, warmup=warmup, **options)
        assert libcuda.fake_launches() == before + (not warmup), f"{name_of(self)} was not launched once"
        if not warmup:
            launched.add(name_of(self))
        return result

    JITFunction.run = noted
    with gpus(int(sys.argv[1])):
        for name, call in CALLS.items():
            print(name, end=": ", flush=True)  # before it runs: it may crash
            call()
            call()  # as it is found in the launcher's cache
            print(f"{libcuda.fake_launches()} launches so far", flush=True)
    print(json.dumps({"triton": triton.__version__, "missing": sorted(kernels().keys() - launched)}))


if __name__ == "__main__":
    main()
