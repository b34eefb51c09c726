"""int8: quantize and dequantize, whose limit is memory, and products of codes, whose limit is arithmetic.

Bytes are what the work must move: a row is read once and its codes written (3 bytes an element of fp16, 5 of fp32);
with one scale for the whole tensor it is read twice; to dequantize costs the same as rows. One scale for each head of a
permuted [B, H, T, D] costs a copy of x and one of the codes. Peers: the formula in
torch's operators, compiled or not, torch's own fake quantization and per-channel quantization, torch._int_mm, torch's
products in fp32 and bf16, and torchao and bitsandbytes where they run.

    python -m benchmarks.bench_int8 --help
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import amp_kernels
from amp_kernels import Int8Tensor, reference
from amp_kernels.testing.int8 import integers

from .common import (
    QUICK_SHAPES,
    Case,
    Contender,
    Job,
    Layout,
    Report,
    by_size,
    normal,
    on_other_backends,
    parse_arguments,
    run_case,
)

SIDE = {"cpu": 4096, "cuda": 8192}
GROUPS: dict[str, dict[str, Any]] = {
    "rows": {"dim": -1},
    "rows, asymmetric": {"dim": -1, "symmetric": False},
    "tensor": {},
    "columns": {"dim": 0},
    "blocks of 128": {"block_size": 128},
}
# (rows, columns, inner)
SIZES = {
    "cpu": (
        (64, 64, 64), (256, 256, 256), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096),
        (1023, 1023, 1023), (512, 4095, 1023), (256, 50257, 1023), (1, 4096, 4096), (8, 4096, 4096), (127, 4096, 16),
    ),
    "cuda": (
        (1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192), (4095, 4095, 4095), (4096, 4095, 4096),
        (8192, 50257, 1023), (1, 4096, 4096), (1, 14336, 4096), (8, 4096, 4096), (16, 4096, 4096),
    ),
}  # fmt: skip
LINEAR_ROWS = (1, 8, 512)

Cases = Iterator[tuple[Case, list[Contender]]]  # made as they come


def by_torch(
    x: Tensor, dim: int | None = None, block_size: int | None = None, symmetric: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The formula in torch's operators, as one would write it."""
    view = x if block_size is None else x.view(*x.shape[:-1], -1, block_size)
    dims = -1 if block_size is not None else tuple(range(x.dim())) if dim is None else dim
    if symmetric:
        scale = view.float().abs().amax(dims, keepdim=True) / 127
        return (view / scale).round().clamp(-127, 127).to(torch.int8), scale, None
    low = view.float().amin(dims, keepdim=True).clamp(max=0)
    high = view.float().amax(dims, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    zero_point = (-128 - low / scale).round().clamp(-128, 127)
    return ((view / scale).round() + zero_point).clamp(-128, 127).to(torch.int8), scale, zero_point


def exact(run: Callable[[], Int8Tensor], expected: Callable[[], tuple[Tensor, Tensor, Tensor | None]]) -> Job:
    """Ours: every code and scale."""

    def check() -> str:
        ours = run()
        pairs = zip((ours.values, ours.scale), expected()[:2], strict=True)
        return "" if all(torch.equal(a, b) for a, b in pairs) else "wrong: codes or scales differ"

    return Job(run, check)


def nearly(run: Callable[[], Tensor], expected: Callable[[], Tensor], tolerance: float) -> Job:
    """Peers may round otherwise."""

    def check() -> str:
        ours, theirs = run().float().flatten(), expected().float().flatten()
        error = (ours - theirs).abs().max().item()
        return "" if error <= tolerance else f"wrong: off by {error:.3g}, allowed {tolerance:.3g}"

    return Job(run, check)


def compiled(args: argparse.Namespace, function: Callable[..., Any]) -> Callable[..., Any]:
    if args.no_compile:
        raise RuntimeError("left out by --no-compile or --quick")
    return torch.compile(function, dynamic=False)


def contender(name: str, memory: int, build: Callable[[], Job]) -> Contender:
    return Contender(name, "none", memory, build)


def quantize_case(x: Tensor, options: dict[str, Any], args: argparse.Namespace) -> list[Contender]:
    dim = options.get("dim")
    dims = {**options, "dim": (dim,)} if isinstance(dim, int) else options

    @cache
    def expected() -> tuple[Tensor, Tensor, Tensor | None]:
        return reference.quantize_int8(x, **dims)

    def codes() -> Tensor:
        return expected()[0].flatten()

    def with_torch() -> Tensor:
        return by_torch(x, **options)[0]

    def by_compiler() -> Job:
        function = compiled(args, by_torch)
        return nearly(lambda: function(x, **options)[0], codes, 1)

    plan = [
        ("amp_kernels.quantize_int8", lambda: exact(partial(amp_kernels.quantize_int8, x, **options), expected)),
        ("torch operators", lambda: nearly(with_torch, codes, 1)),
        ("torch operators, compiled", by_compiler),
    ]
    is_rows = options == {"dim": -1} and x.dim() == 2
    if is_rows and x.dtype == torch.float32 and x.device.type == "cpu":
        scale = expected()[1].flatten().double()
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        given = partial(torch.quantize_per_channel, x, scale, zeros, 0, torch.qint8)
        plan.append(("torch.quantize_per_channel, scales given", lambda: nearly(lambda: given().int_repr(), codes, 1)))
    if is_rows and x.dtype == torch.float16:
        plan.append(("bitsandbytes int8_vectorwise_quant", lambda: nearly(bitsandbytes_rows(x), codes, 1)))
    forced = on_other_backends(
        "amp_kernels.quantize_int8",
        8,
        x.device,
        lambda function: exact(partial(function, x), expected),
        partial(amp_kernels.quantize_int8, **options),
    )
    return [*(contender(name, 8, build) for name, build in plan), *forced]


def bitsandbytes_rows(x: Tensor) -> Callable[[], Tensor]:
    from bitsandbytes.functional import int8_vectorwise_quant

    return lambda: int8_vectorwise_quant(x)[0]


def dequantize_case(q: Int8Tensor, dtype: torch.dtype, args: argparse.Namespace) -> list[Contender]:
    def with_torch(values: Tensor = q.values, scale: Tensor = q.scale) -> Tensor:
        return (values * scale).to(dtype)

    @cache
    def expected() -> Tensor:
        return reference.dequantize_int8(q.values, q.scale, dtype=dtype)

    plan = [
        ("amp_kernels.dequantize_int8", lambda: nearly(partial(amp_kernels.dequantize_int8, q, dtype), expected, 0)),
        ("torch operators", lambda: nearly(with_torch, expected, 0)),
        ("torch operators, compiled", lambda: nearly(compiled(args, with_torch), expected, 0)),
    ]
    return [contender(name, 8, build) for name, build in plan]


def fake_case(x: Tensor, scale: Tensor) -> list[Contender]:
    step = scale.item()  # once: it waits for the device

    def with_torch() -> Tensor:
        return torch.fake_quantize_per_tensor_affine(x, step, 0, -127, 127)

    @cache
    def expected() -> Tensor:
        return reference.fake_quantize_int8(x, scale=scale)[0]

    plan = [
        (
            "amp_kernels.fake_quantize_int8",
            lambda: nearly(lambda: amp_kernels.fake_quantize_int8(x, scale=scale), expected, 0),
        ),
        ("torch.fake_quantize_per_tensor_affine", lambda: nearly(with_torch, expected, 1.001 * step)),
    ]
    return [contender(name, 12, build) for name, build in plan]


def matmul_case(size: tuple[int, ...], device: torch.device) -> list[Contender]:
    """Codes by row and column with scales; the peers that stop at int32 do less."""
    rows, columns, inner = size
    a, weight = integers(rows, inner, seed=1).to(device), integers(columns, inner, seed=2).to(device)
    left = Int8Tensor(a, torch.full((rows, 1), 0.01, device=device), dim=(-1,))
    right = Int8Tensor(weight.t(), torch.full((1, columns), 0.02, device=device), dim=(0,))
    zeros = torch.full((rows, 1), 5, dtype=torch.int32, device=device)
    shifted = Int8Tensor(a, left.scale, zeros, dim=(-1,))
    fp32, bf16 = ((a.to(dtype), weight.to(dtype)) for dtype in (torch.float32, torch.bfloat16))

    def expected(operand: Int8Tensor = left) -> Tensor:
        zeros = None if operand.zero_point is None else operand.zero_point[:16].cpu()
        parts = (x.cpu() for x in (operand.values[:16], right.values, operand.scale[:16], right.scale))
        codes, weights, scale, weight_scale = parts
        return reference.int8_matmul(codes, weights, scale, zeros, weight_scale, None).to(device)

    def first(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return lambda: run()[:16]

    def ours(operand: Int8Tensor) -> Job:
        run = partial(amp_kernels.int8_matmul, operand, right)
        return Job(run, nearly(first(run), partial(expected, operand), 0).check)

    def integer() -> Job:
        run = partial(torch._int_mm, a, weight.t())
        return Job(run, nearly(first(run), lambda: a[:16].double() @ weight.double().t(), 0).check)

    def scaled_by_torchao() -> Job:
        from torchao.kernel import int_scaled_matmul

        run = partial(int_scaled_matmul, a, weight.t(), left.scale)
        exact = (a[:16].double() @ weight.double().t()) * left.scale[:16]
        return Job(run, nearly(first(run), lambda: exact, 1e-6 * exact.abs().max().item()).check)

    plan = [
        ("amp_kernels.int8_matmul", lambda: ours(left)),
        ("amp_kernels.int8_matmul, zero points", lambda: ours(shifted)),
        ("torch._int_mm, int32 out", integer),
        ("fp32 torch matmul", lambda: Job(lambda: fp32[0] @ fp32[1].t(), lambda: "")),
        ("bf16 torch matmul", lambda: Job(lambda: bf16[0] @ bf16[1].t(), lambda: "")),
        ("torchao int_scaled_matmul", scaled_by_torchao),
    ]
    forced = on_other_backends(
        "amp_kernels.int8_matmul",
        10,
        device,
        lambda function: Job(
            partial(function, left, right), nearly(lambda: function(left, right)[:16], expected, 0).check
        ),
        amp_kernels.int8_matmul,
    )
    return [*(contender(name, 10, build) for name, build in plan), *forced]


def linear_case(rows: int, dtype: torch.dtype, device: torch.device) -> list[Contender]:
    x = normal(rows, 4096, dtype=dtype, device=device, seed=1)
    weight = normal(4096, 4096, dtype=torch.float32, device=device, seed=2)
    q = amp_kernels.quantize_int8(weight, dim=-1)
    full, fp32 = weight.to(dtype), weight.float()

    def ours() -> Tensor:
        return torch.ops.amp_kernels.int8_linear(x, q.values, q.scale, None)

    @cache
    def expected() -> Tensor:
        return reference.int8_linear(x.cpu(), q.values.cpu(), q.scale.cpu()).to(device)

    largest = 64 * 5 * torch.finfo(dtype).eps + 1e-3
    plan = [
        ("amp_kernels int8_linear", lambda: nearly(ours, expected, 4 * largest)),
        (f"torch linear, {dtype} weight", lambda: Job(partial(F.linear, x, full), lambda: "")),
        ("torch linear, fp32", lambda: Job(partial(F.linear, x.float(), fp32), lambda: "")),
    ]
    return [contender(name, 8, build) for name, build in plan]


def quantization_cases(args: argparse.Namespace) -> Cases:
    device = args.device
    side = SIDE[device.type] // (4 if args.quick else 1)
    square = Layout(f"{side} x {side}", ((side, side),))
    for dtype in (torch.float32, torch.float16):
        size = dtype.itemsize
        x = normal(side, side, dtype=dtype, device=device, seed=0)
        for name, options in GROUPS.items():
            reads = 1 if name.startswith(("rows", "blocks")) else 2
            words = f"{reads} x {size} read + 1 written"
            yield (
                Case("int8", f"quantize {name}", dtype, square, reads * size + 1, words),
                quantize_case(x, options, args),
            )
        batch, heads, depth = 8, 32, 128
        permuted = x.view(batch, -1, heads, depth).transpose(1, 2)  # dense
        layout = Layout("[B, H, T, D] permuted", (tuple(permuted.shape),))
        words = f"1 x {size} read + 1 written"
        yield (
            Case("int8", "quantize tokens", dtype, layout, size + 1, words),
            quantize_case(permuted, {"dim": -1}, args),
        )
        # Heads take a fourth axis, so each becomes a row of a copy.
        words = f"4 x {size} + 3: copies of x and of the codes, which hold {size + 1} bytes an element during the call"
        yield (
            Case("int8", "quantize heads", dtype, layout, 4 * size + 3, words),
            quantize_case(permuted, {"dim": (2, 3)}, args),
        )
        q = amp_kernels.quantize_int8(x, dim=-1)
        words = f"1 read + {size} written"
        yield Case("int8", "dequantize rows", dtype, square, 1 + size, words), dequantize_case(q, dtype, args)
        scale = torch.tensor(0.03, device=device)
        words = f"{size} read + {size} written"
        yield Case("int8", "fake quantize, scale given", dtype, square, 2 * size, words), fake_case(x, scale)


def product_cases(args: argparse.Namespace) -> Cases:
    device = args.device
    for size in args.shapes or (QUICK_SHAPES if args.quick else SIZES[device.type]):
        rows, columns, inner = size
        for layout in by_size("x".join(map(str, size)), ((rows, inner), (columns, inner)), device):
            operations = 2 * rows * columns * inner
            case = Case("int8", "int8_matmul", torch.int8, layout, 1, "the codes, read once", operations)
            yield case, matmul_case(size, device)


def linear_cases(args: argparse.Namespace) -> Cases:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rows in LINEAR_ROWS[:: 2 if args.quick else 1]:
            layout = Layout(f"{rows}x4096x4096", ((4096, 4096),))
            operations = 2 * rows * 4096 * 4096
            case = Case("int8", "int8_linear (w8a16)", dtype, layout, 1, "the weight, read once", operations)
            yield case, linear_case(rows, dtype, args.device)


def main() -> int:
    args = parse_arguments(__doc__)
    report = Report("int8", args)
    for cases in (product_cases,) if args.shapes else (quantization_cases, product_cases, linear_cases):
        for case, contenders in cases(args):
            run_case(case, contenders, args, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
