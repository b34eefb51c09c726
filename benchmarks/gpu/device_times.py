"""How long a GPU takes for each piece of work, without the time of the host: calls in a CUDA graph, replayed.

Each case compares several ways to do the same work. A graph holds at least `CALLS` calls of one way. The calls use
different inputs, which together are larger than any L2, so each call reads from memory, as in a training step.
device_times.csv has a row for each way: the median of the replays, divided by the number of calls.

    python benchmarks/gpu/device_times.py --out FOLDER                 # all families
    python benchmarks/gpu/device_times.py --families int8_conv2d       # one of them
    python benchmarks/gpu/device_times.py --device cpu                 # small, without graphs: shows that it runs
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from amp_kernels.benchmarks.bench_int8_conv2d import SMALL, Conv, convolutions
from torch import Tensor

import amp_kernels
from amp_kernels import Int8Tensor, quantize_int8
from amp_kernels.optim import FusedAdamW, FusedRMSprop, FusedSGD, ema_

FIELDS = ("family", "case", "dtype", "way", "microseconds", "tb_s", "tera_ops", "note")
CALLS, REPLAYS = 8, 11
INPUT_BYTES = 2**28  # of all inputs of a case together; the L2 of a B200 holds 126 MB
MAX_SETS = 16

Calls = list[Callable[[], object]]
Ways = dict[str, Callable[[], Calls]]


@dataclass(frozen=True)
class Work:
    """A case: the bytes or operations of one call, and the functions that build the calls of each way."""

    case: str
    dtype: torch.dtype
    ways: Ways
    bytes: int = 0
    operations: int = 0


def sets_of(size: int) -> range:
    """One number for each set of inputs of `size` bytes."""
    return range(max(1, min(MAX_SETS, -(-INPUT_BYTES // size))))


def on_backend(backend: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with amp_kernels.use_backend(backend):
        return function(*args, **options)


def backends(device: torch.device) -> tuple[str, ...]:
    return ("cuda", "triton") if device.type == "cuda" else ("cpu", "reference")


# ------------------------------------------------------------------------------------------------------ the families
def streaming(device: torch.device) -> Iterator[Work]:
    """Work that is limited by memory. Its yardstick is the fastest copy.

    On an H200, copies of 0.2 to 2 GB reached 2.7 to 4.3 TB/s, depending on their size and place.
    """
    fp16, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32
    normal = partial(torch.randn, device=device)
    scalars = {"inv_scale": torch.full((), 0.5, device=device), "found_inf": torch.zeros((), device=device)}
    in_capture: dict[str, Any] = {"capturable": True} if device.type == "cuda" else {}

    def step(kind: Callable[..., torch.optim.Optimizer], elements: int, dtype: torch.dtype, **options: Any) -> Calls:
        parameter = torch.nn.Parameter(normal(elements, dtype=dtype))
        parameter.grad = normal(elements, dtype=dtype)
        return [kind([parameter], lr=1e-3, **options).step]

    def average(elements: int, dtype: torch.dtype) -> Calls:
        parameter = torch.nn.Parameter(normal(elements, dtype=dtype))
        optimizer = FusedSGD([parameter], lr=1e-3)
        optimizer.init_state()
        return [partial(ema_, [normal(elements)], optimizer, 0.999)]

    def torch_average(elements: int) -> Calls:
        return [partial(torch._foreach_lerp_, [normal(elements)], [normal(elements)], 1e-3)]

    def gradients(function: Callable[..., Any], elements: int, dtype: torch.dtype) -> Calls:
        return [
            partial(function, [normal(elements, dtype=dtype)], **scalars) for _ in sets_of(dtype.itemsize * elements)
        ]

    def torch_unscale(elements: int) -> Calls:
        run = torch._amp_foreach_non_finite_check_and_unscale_
        grads = ([normal(elements, dtype=fp16)] for _ in sets_of(2 * elements))
        return [partial(run, grad, scalars["found_inf"], scalars["inv_scale"]) for grad in grads]

    def rows(elements: int) -> Iterator[Tensor]:
        return (normal(elements // 4096, 4096, dtype=fp16) for _ in sets_of(3 * elements))

    def quantized(elements: int) -> Calls:
        return [partial(quantize_int8, x, dim=-1) for x in rows(elements)]

    def dequantized(elements: int) -> Calls:
        return [partial(amp_kernels.dequantize_int8, quantize_int8(x, dim=-1), fp16) for x in rows(elements)]

    def copied(size: int) -> Calls:
        sources = (normal(size // 8) for _ in sets_of(size))
        return [partial(torch.empty_like(source).copy_, source) for source in sources]

    def steps(elements: int) -> Iterator[tuple[str, torch.dtype, int, Ways]]:
        torch_sgd, torch_adamw = torch.optim.SGD, torch.optim.AdamW
        for name, ours, options, theirs in (
            ("SGD with momentum", FusedSGD, {"momentum": 0.9}, partial(torch_sgd, momentum=0.9, fused=True)),
            ("RMSprop", FusedRMSprop, {}, partial(torch.optim.RMSprop, foreach=True, **in_capture)),
            ("AdamW", FusedAdamW, {}, partial(torch_adamw, fused=True, **in_capture)),
        ):
            states, fused = 1 + (ours is FusedAdamW), {"torch, fp32 model": partial(step, theirs, elements, fp32)}
            yield name, fp16, 10 + 8 * states, {"ours": partial(step, ours, elements, fp16, **options), **fused}
            yield name, fp32, 12 + 8 * states, {"ours": partial(step, ours, elements, fp32, **options), **fused}
            for lean, size in ((torch.int8, 2), (bf16, 4)):
                run = partial(step, ours, elements, bf16, state_dtype=lean, **options)
                told = f"{name}, {str(lean).removeprefix('torch.')} states"
                yield told, bf16, 10 + size * states, {"ours": run, **fused}

    for elements in (25_600_000, 100_000_000) if device.type == "cuda" else (2**16,):
        plan: list[tuple[str, torch.dtype, int, Ways]] = [
            ("grad_norm", fp16, 2, {"ours": partial(gradients, amp_kernels.grad_norm, elements, fp16)}),
            ("grad_norm", fp32, 4, {"ours": partial(gradients, amp_kernels.grad_norm, elements, fp32)}),
            ("unscale_", fp16, 4, {
                "ours": partial(gradients, amp_kernels.unscale_, elements, fp16),
                "torch": partial(torch_unscale, elements),
            }),
            *steps(elements),
            ("ema_", fp16, 12, {
                "ours": partial(average, elements, fp16),
                "torch lerp of fp32 masters": partial(torch_average, elements),
            }),
            ("quantize rows", fp16, 3, {"ours": partial(quantized, elements)}),
            ("dequantize rows", fp16, 3, {"ours": partial(dequantized, elements)}),
        ]  # fmt: skip
        for name, dtype, size, ways in plan:
            ways = {**ways, "copy": partial(copied, size * elements)}
            yield Work(f"{name}, {elements / 1e6:g}M", dtype, ways, size * elements)


def int8_products(device: torch.device) -> Iterator[Work]:
    """`int8_matmul` with a scale for each row and column, and `torch._int_mm`, whose results are int32."""
    shapes = [(m, 4096, 4096) for m in (1, 8, 16, 17, 32, 64, 128, 256, 512, 1024, 4096)]
    shapes += [(16, 1024, 4096), (1024, 1024, 1024), (8192, 8192, 8192), (4095, 4095, 4095)]
    for m, n, k in shapes if device.type == "cuda" else [(17, 32, 64)]:
        count = sets_of(n * k)

        def codes(rows: int, columns: int) -> Int8Tensor:
            return quantize_int8(torch.randn(rows, columns, device=device), dim=-1)

        def calls(function: Callable[..., Any], m: int = m, n: int = n, k: int = k, count: range = count) -> Calls:
            x = codes(m, k)
            return [partial(function, x, codes(n, k).t()) for _ in count]

        def torchs(x: Int8Tensor, weight: Int8Tensor) -> Tensor:
            return torch._int_mm(x.values, weight.values)

        ours = partial(amp_kernels.int8_matmul, out_dtype=torch.float16)
        ways: Ways = {"default": partial(calls, ours)}
        ways |= {name: partial(calls, partial(on_backend, name, ours)) for name in backends(device)}
        yield Work(
            f"{m}x{n}x{k}",
            torch.int8,
            {**ways, "torch._int_mm": partial(calls, torchs)},
            m * k + n * k + 2 * m * n,
            2 * m * n * k,
        )


def int8_linear(device: torch.device) -> Iterator[Work]:
    """fp16 inputs and a weight of codes, beside a weight of fp16."""
    n = k = 4096 if device.type == "cuda" else 64
    for m in (1, 16, 64, 128, 256, 1024) if device.type == "cuda" else (3,):

        def calls(function: Callable[..., Any], quantizes: bool, m: int = m) -> Calls:
            x = torch.randn(m, k, device=device, dtype=torch.float16)
            weights = (torch.randn(n, k, device=device, dtype=torch.float16) for _ in sets_of(n * k))
            if not quantizes:
                return [partial(function, x, weight) for weight in weights]
            codes = (quantize_int8(weight, dim=-1) for weight in weights)
            return [partial(function, x, q.values, q.scale) for q in codes]

        def ours(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
            return torch.ops.amp_kernels.int8_linear(x, values, scale, None)

        ways: Ways = {"default": partial(calls, ours, True)}
        ways |= {name: partial(calls, partial(on_backend, name, ours), True) for name in backends(device)}
        ways["torch linear, fp16 weight"] = partial(calls, F.linear, False)
        yield Work(f"{m}x{n}x{k}", torch.float16, ways, n * k + 2 * m * (n + k), 2 * m * n * k)


def int8_conv2d(device: torch.device) -> Iterator[Work]:
    """Codes in and out, beside cuDNN in fp16. Both have images in channels_last."""
    many: Iterable[Conv] = (*convolutions(128), Conv(128, 56, 256, 64, 1), Conv(128, 28, 128, 128, 3, padding=1))
    for conv in many if device.type == "cuda" else SMALL:
        sizes = (conv.images, conv.weight, conv.result)
        size = sum(torch.Size(shape).numel() for shape in sizes)

        def ours(conv: Conv = conv, size: int = size, by: str = "") -> Calls:
            weight = quantize_int8(torch.randn(conv.weight, device=device), dim=(1, 2, 3))
            bias = torch.zeros(conv.outputs, device=device)
            out_scale = torch.full((), 0.5, device=device)
            function = partial(on_backend, by, amp_kernels.int8_conv2d) if by else amp_kernels.int8_conv2d
            run = partial(function, bias=bias, out_scale=out_scale, stride=conv.stride, padding=conv.padding)
            images = (quantize_int8(torch.randn(conv.images, device=device)) for _ in sets_of(size))
            return [partial(run, x, weight) for x in images]

        def cudnn(conv: Conv = conv, size: int = size) -> Calls:
            make = partial(torch.randn, device=device, dtype=torch.float16)
            weight, bias = make(conv.weight).permute(0, 3, 1, 2), make(conv.outputs)
            run = partial(F.conv2d, weight=weight, bias=bias, stride=conv.stride, padding=conv.padding)
            return [partial(run, make(conv.images).permute(0, 3, 1, 2)) for _ in sets_of(2 * size)]

        ways: Ways = {"default": ours, **{name: partial(ours, by=name) for name in backends(device)}}
        yield Work(str(conv), torch.int8, {**ways, "torch conv2d, fp16": cudnn}, size, conv.operations)


def linear(device: torch.device) -> Iterator[Work]:
    """Products of odd sizes, and products with GELU, forward and backward."""
    fp16 = torch.float16
    odd = [(4096, 4095, 4095), (8192, 1023, 1023), (8192, 50257, 1023), (16, 4095, 4095)]
    with_gelu = [(8192, 4096, 4096), (4096, 16384, 4096), (8192, 4095, 4095), (8192, 1024, 1024)]
    if device.type == "cpu":
        odd, with_gelu = [(16, 15, 15)], [(16, 32, 32)]

    def operands(m: int, n: int, k: int) -> list[tuple[Tensor, ...]]:
        make = partial(torch.randn, device=device, dtype=fp16)
        return [(make(m, k), make(n, k) * k**-0.5, make(n)) for _ in sets_of(2 * (m * k + n * k + m * n))]

    def by_padding(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rest_n, rest_k = (-size % 8 for size in weight.shape)
        padded = F.linear(F.pad(x, (0, rest_k)), F.pad(weight, (0, rest_k, 0, rest_n)), F.pad(bias, (0, rest_n)))
        return padded[:, : weight.shape[0]]

    def forward(function: Callable[..., Tensor], m: int, n: int, k: int) -> Calls:
        return [partial(function, *args) for args in operands(m, n, k)]

    def both(function: Callable[..., Tensor], m: int, n: int, k: int) -> Calls:
        def run(*args: Tensor) -> object:
            out = function(*args)
            return torch.autograd.grad(out, args, grad)

        grad = torch.randn(m, n, device=device, dtype=fp16)
        return [partial(run, *(t.requires_grad_() for t in args)) for args in operands(m, n, k)]

    def in_two(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(F.linear(x, weight, bias))

    for m, n, k in odd:
        aligned = m, -(-n // 8) * 8, -(-k // 8) * 8
        ways: Ways = {
            "ours": partial(forward, amp_kernels.linear, m, n, k),
            "torch linear": partial(forward, F.linear, m, n, k),
            "F.pad, torch linear, slice": partial(forward, by_padding, m, n, k),
            "torch linear, multiples of 8": partial(forward, F.linear, *aligned),
        }
        yield Work(f"linear, {m}x{n}x{k}", fp16, ways, 2 * (m * k + n * k + m * n), 2 * m * n * k)
    for m, n, k in with_gelu:
        ours = partial(amp_kernels.linear, activation="gelu")
        ways = {"ours": partial(both, ours, m, n, k), "torch linear, gelu": partial(both, in_two, m, n, k)}
        yield Work(f"linear with gelu, both passes, {m}x{n}x{k}", fp16, ways, 0, 6 * m * n * k)


FAMILIES = {f.__name__: f for f in (streaming, int8_conv2d, int8_products, int8_linear, linear)}


# ---------------------------------------------------------------------------------------------------------- the times
def microseconds(calls: Calls, device: torch.device) -> float:
    """The median time of a call."""
    order = list(itertools.islice(itertools.cycle(calls), max(CALLS, len(calls))))

    def run() -> None:
        for call in order:
            call()

    if device.type == "cpu":
        run()
        return 0.0  # the times of a CPU are those of other programs
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # kernels are compiled and loaded, and states exist
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    times = []
    for _ in range(2 + REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / len(order))
    return statistics.median(times[2:])


def rows_of(family: str, work: Work, device: torch.device) -> Iterator[dict[str, object]]:
    """A row for each way. A way that fails has a row with a note."""
    times: dict[str, float] = {}
    notes: dict[str, str] = {}
    for way, build in work.ways.items():
        try:
            times[way] = microseconds(build(), device)
        except Exception as error:
            notes[way] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    for way in work.ways:
        row: dict[str, object] = {"family": family, "case": work.case, "dtype": str(work.dtype).removeprefix("torch.")}
        row |= {"way": way, "note": notes.get(way, "")}
        if us := times.get(way):
            row["microseconds"] = f"{us:.4g}"
            if work.operations:
                row["tera_ops"] = f"{work.operations / us / 1e6:.4g}"
            if work.bytes and not way.startswith("torch"):  # a peer may move other bytes
                row["tb_s"] = f"{work.bytes / us / 1e6:.3g}"
        yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default="cuda", help="cuda, or cpu to show that it runs")
    parser.add_argument("--families", default=",".join(FAMILIES), help="separated by commas (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of device_times.csv")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True  # cuDNN then chooses its fastest algorithm
    failed = 0
    with (args.out / "device_times.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for family in args.families.split(","):
            for work in FAMILIES[family](args.device):
                rows = list(rows_of(family, work, args.device))
                writer.writerows(rows)
                file.flush()
                told = (f"{r['way']} {r.get('microseconds') or r['note'] or 'ran'}" for r in rows)
                print(f"{family}: {work.case} {work.dtype}: {'; '.join(told)}", flush=True)
                failed += any(row["note"] and not str(row["way"]).startswith("torch") for row in rows)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
