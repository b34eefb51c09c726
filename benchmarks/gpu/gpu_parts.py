"""The parts of gpu_check.py that run in processes of their own.

python benchmarks/gpu/gpu_parts.py cases                    # cases on every tile; with --one, one for each operator
python benchmarks/gpu/gpu_parts.py captured                 # a training step, captured and replayed
python benchmarks/gpu/gpu_parts.py send --out FOLDER        # the cost of a send
python benchmarks/gpu/gpu_parts.py ceilings --out FOLDER    # how fast the machine reads, copies and multiplies
python benchmarks/gpu/gpu_parts.py kernels                  # one call of each kernel, to be profiled
python benchmarks/gpu/gpu_parts.py kernel_table --tables FOLDER --out FOLDER    # kernels.csv from the log of ncu
python benchmarks/gpu/gpu_parts.py routes --tables FOLDERS --out FOLDER    # the fastest backend for each case
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import amp_kernels
from amp_kernels import testing
from amp_kernels.optim import FusedAdamW, FusedRMSprop, FusedSGD, ema_
from amp_kernels.testing.common import lost_context
from amp_kernels.testing.updates import UPDATES

UPDATE_CASES = (
    "fp16-sizes",
    "bf16-misaligned",
    "fp32/fp16-options",
    "fp16-many_tensors",
    "fp16/bf16-split",
    "fp16/bf16-plain",
    "fp16/bf16-split_plain",
    "bf16-split_full",
)
PAIRS = ("padded_padded", "padded_padded_column", "padded_column_padded", "padded_column_padded_column")
# Cases that reach every kernel, every tile and every way to load it once the launchers believe in 3 multiprocessors,
# which tests/gpu_static/test_launches.py proves. For the smoke test, and for compute-sanitizer, where a kernel is tens
# of times slower.
TILES = {
    "unscale_": ("fp16-sizes", "bf16-misaligned"),
    "grad_norm": ("fp32-sizes", "fp16-many_tensors"),
    "count_exponents_": ("fp16-sizes", "bf16-misaligned", "fp32-many_tensors"),
    **dict.fromkeys((f"{name}_" for name in UPDATES), UPDATE_CASES),
    "quantize_int8": (
        "fp16-contiguous", "bf16-transposed", "fp32-sliced", "fp16-stochastic", "bf16-long_rows",
        "fp16-static_tensor_seed_11",
    ),
    "dequantize_int8": ("fp16-contiguous", "bf16-misaligned"),
    "fake_quantize_int8": ("fp16-contiguous", "bf16-transposed"),
    "int8_matmul": (
        "fp32-1x64x64", "fp16-17x33x65", "fp32-70x66x64_zeros_(False, False)_per_row_True",
        "fp32-70x66x64_contiguous_transposed", "fp32-narrow_zeros_False", "fp32-narrow_zeros_True",
        "fp32-medium_zeros_False", "fp32-medium_zeros_True",
        "fp32-large_zeros_False", "fp32-large_zeros_True", "fp32-few_rows_1x37x256_zeros_False_False",
        "fp32-few_columns_37x4x512_zeros_True_True", "fp32-17x33x65_contiguous_without_zeros",
        "fp32-70x66x64_contiguous_without_zeros", "fp32-few_rows_20x37x256_zeros_False_False",
    ),
    "int8_conv2d": (
        "fp32-3x3", "int8-strided_without_zeros", "fp32-all_different", "int8-odd_channels_without_zeros",
        "fp32-plain_product", "fp32-narrow_tiles", "fp32-many_tiles", "int8-many_tiles_without_zeros",
        "fp32-large_tiles",
    ),
    "int8_linear": (
        "fp16-1x1x1", "fp32-16x16x16", "bf16-1x64x64", "bf16-64x64x64", "fp16-17x33x65", "fp16-small", "bf16-small",
        "fp16-medium", "bf16-medium", "fp16-few_rows", "bf16-few_rows",
    ),
    "matmul": (
        "fp16-1x33x40", "bf16-few_rows_row_column", "fp16-few_rows_aligned_row_row", "fp16-33x7x40", "fp16-33x8x40",
        "fp16-33x1x40", "bf16-33x40x1", "fp16-padded_column_padded_column", "bf16-by_element_odd_pitch_every_other",
        "bf16-33x40x1023",
        *(f"fp16-{tile}_{pair}" for tile in ("medium", "large") for pair in PAIRS),
        *(f"{dtype}-{tile}_in_splits" for tile in ("medium", "large") for dtype in ("fp16", "bf16")),
    ),
    "addmm": ("bf16-nothing_to_sum", "fp16-batched"),
    "linear": ("fp16-None_65x130x127", "bf16-relu_65x130x127", "fp16-gelu_33x40x48", "bf16-gelu_tanh_17x23x23"),
}  # fmt: skip


@dataclass(frozen=True)
class LeanSteps:
    """Two steps of an optimizer whose states are not in fp32, compared with the reference's."""

    family: Any
    options: dict[str, Any]
    state_dtype: torch.dtype
    numel: int = 16_505  # its last group and its last pack are not full

    def __str__(self) -> str:
        options = "".join(f" {name}" for name in self.options)
        return f"{self.family.__name__}{options} {str(self.state_dtype).removeprefix('torch.')}"

    def change(self, device: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        weight, *grads = (torch.randn(self.numel, generator=generator, dtype=torch.bfloat16) for _ in range(3))
        parameter = torch.nn.Parameter(weight.to(device, copy=True))  # on a CPU it would be `weight`, which must stay
        optimizer = self.family([parameter], lr=0.01, state_dtype=self.state_dtype, **self.options)
        for grad in grads:
            parameter.grad = grad.to(device)
            optimizer.step()
        return optimizer.master(parameter).cpu() - weight

    def run(self, device: str) -> list[testing.Result]:
        """Raises an AssertionError if the weights are wrong. Some codes that differ by one stay far below the limit."""
        with amp_kernels.use_backend("reference"):
            expected = self.change("cpu")
        error = ((self.change(device) - expected).norm() / expected.norm()).item()
        assert error <= 1e-3, f"the weights' change is wrong by {error:.3g} of its norm, allowed 0.001"
        return []


LEAN = [
    LeanSteps(family, options, state_dtype)
    for state_dtype in (torch.int8, torch.bfloat16)
    for family, options in (
        (FusedSGD, {"momentum": 0.9}),
        (FusedRMSprop, {}),
        (FusedRMSprop, {"momentum": 0.9}),
        (FusedRMSprop, {"momentum": 0.9, "centered": True}),
        (FusedAdamW, {}),
        (FusedAdamW, {"amsgrad": True}),
    )
]


def cases(args: argparse.Namespace) -> int:
    """Runs the cases from the `--first` on; where one takes the context away, another process runs the rest."""
    chosen: list[tuple[str, Any]] = [
        (op, case)
        for op, names in TILES.items()
        for case in testing.CASES[op]
        if str(case) in (names[:1] if args.one else names)
    ]
    chosen = [("lean", case) for case in (LEAN[:1] if args.one else LEAN)] + chosen
    failures = args.failures
    for index, (op, case) in list(enumerate(chosen))[args.first :]:
        print(op, case, end=" ", flush=True)  # before it runs: a kernel may hang
        try:
            wrong = [str(result) for result in case.run(args.device) if not result.passed]
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        print(*(wrong or ["ok"]), flush=True)
        failures += bool(wrong)
        if wrong and (says := lost_context(args.device)):
            print(says, flush=True)
            rest = ["--first", str(index + 1), "--failures", str(failures), *(["--one"] if args.one else [])]
            os.execv(sys.executable, [sys.executable, __file__, "cases", "--device", args.device, *rest])
    print(f"{len(chosen)} cases, {failures} failed")
    return min(failures, 1)


def captured(args: argparse.Namespace) -> int:
    """Captures a training step with a scaler, replays it, and compares the weights with those of eager steps.

    One of the batches makes inf gradients, so one step has to be skipped. On a CPU, which captures nothing, all steps
    are eager.
    """
    inputs = torch.randn(12, 16, 64, device=args.device, dtype=torch.float16)
    inputs[7, 0, 0] = float("inf")
    if args.device == "cuda":
        torch.cuda.synchronize()  # another stream reads them

    def trained(captures: bool) -> tuple[int, torch.Tensor]:
        """Return the steps skipped, and the weight."""
        torch.manual_seed(0)
        layer = amp_kernels.nn.Linear(64, 64, device=args.device, dtype=torch.float16)
        optimizer = amp_kernels.optim.FusedAdamW(layer.parameters(), lr=0.01, max_grad_norm=1.0)
        scaler = amp_kernels.GradScaler(args.device, init_scale=1024.0)
        x = torch.zeros_like(inputs[0])

        def step() -> None:
            optimizer.zero_grad(set_to_none=False)
            scaler.scale(layer(x).float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()

        run = step
        for index, batch in enumerate(inputs):
            if captures and index == 3:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step()
                run = graph.replay
            x.copy_(batch)
            run()
        skipped = int(scaler.skipped_steps)
        print(f"{'captured' if captures else 'eager'}: {skipped} of {len(inputs)} steps skipped")
        return skipped, layer.weight.detach()

    with torch.cuda.stream(torch.cuda.Stream()) if args.device == "cuda" else contextlib.nullcontext():
        (skipped, eager), (skipped_too, replayed) = trained(False), trained(args.device == "cuda")
        is_equal = torch.equal(eager, replayed)
    print("the weights are equal" if is_equal else "the weights differ")
    return int(not (is_equal and skipped == skipped_too == 1))


def send(args: argparse.Namespace) -> int:
    """Times a send: what a step of an optimizer pays for each table whose addresses or scalars changed.

    A CPU needs no send. There a copy is timed, which shows that this part runs.
    """
    from amp_kernels.benchmarks.common import milliseconds

    device = torch.device(args.device)
    run = torch.ops.amp_kernels._send_ if device.type == "cuda" else lambda host, to: to.copy_(host)
    with (args.out / "send.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("words", "microseconds"))
        for words in (10, 500, 4000, 40_000):
            host = torch.arange(words)
            to = torch.zeros(words, dtype=torch.int64, device=device)
            milliseconds(lambda: run(host, to), device)  # noqa: B023 - it runs at once
            times = [1e3 * milliseconds(lambda: run(host, to), device, calls=20) for _ in range(9)]  # noqa: B023
            if not torch.equal(to.cpu(), host):
                print(f"{words} words did not arrive")
                return 1
            writer.writerow((words, f"{statistics.median(times):.3g}"))
            print(f"{words} words: {statistics.median(times):.3g} us", flush=True)
    return 0


# The constants and functions that choose between our backends. The keys are beginnings of the names of cases.
CHOSEN_BY = {
    **dict.fromkeys(
        ("int8_matmul", "int8_conv2d"),
        "kTritonProducts in csrc/ops/int8.cpp, _prefers_triton in amp_kernels/ops/int8.py",
    ),
    "linear": "engine_of in amp_kernels/functional/matmul.py, MIN_WORK and ODD_ROWS in amp_kernels/ops/matmul.py",
    "quantize_int8": "automatic in amp_kernels/backends.py",
}
AS_FAST = 1.05  # a default that takes at most so many times the time of the fastest is kept


def routes(args: argparse.Namespace) -> int:
    """Writes routes.csv: for each case that several of our backends computed, the fastest, and what should change.

    A table in a later folder replaces the table of that name in an earlier one.
    """
    tables = {path.name: path for folder in args.tables for path in sorted(folder.glob("*.csv"))}
    if not tables:
        print(f"there are no tables in {', '.join(map(str, args.tables))}")
        return 1
    kept = changed = 0
    with (args.out / "routes.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("case", "dtype", "default_ms", "fastest", "fastest_ms", "route", "chosen_by"))
        for table in tables.values():
            for (case, dtype), times in times_of_backends(table).items():
                default = times.pop("default")
                fastest = min(times, key=times.__getitem__)
                keeps = default <= AS_FAST * times[fastest]
                chosen_by = next((by for start, by in CHOSEN_BY.items() if case.startswith(start)), "")
                route = "keep" if keeps else f"change to {fastest}"
                writer.writerow((case, dtype, default, fastest, times[fastest], route, chosen_by))
                kept, changed = kept + keeps, changed + (not keeps)
                if not keeps:
                    print(f"{case} {dtype}: {fastest} takes {times[fastest] / default:.2f} of the default's time")
    print(f"{kept} routes to keep, {changed} to change")
    return 0


def times_of_backends(table: Path) -> dict[tuple[str, str], dict[str, float]]:
    """The times in ms by (case, dtype) and backend; "default" is what runs if none is forced. Cases with one backend
    are left out."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    with table.open(newline="") as file:
        for row in csv.DictReader(file):
            forced = re.fullmatch(r"amp_kernels\.\w+, (\w+) kernels", row.get("contender", ""))
            is_default = re.fullmatch(r"amp_kernels\.\w+", row.get("contender", ""))
            if (forced or is_default) and row["median_ms"]:
                name = forced[1] if forced else "default"
                found.setdefault((row["case"], row["dtype"]), {})[name] = float(row["median_ms"])
    return {key: times for key, times in found.items() if "default" in times and len(times) > 1}


def ceilings(args: argparse.Namespace) -> int:
    """What the machine can do at most: to read, to copy, to multiply; by torch's own functions."""
    from amp_kernels.benchmarks.common import milliseconds  # not above: what it needs is not needed by cases

    device, small = torch.device(args.device), args.device == "cpu"
    count, side = (2**20, 256) if small else (2**30, 8192)
    source, target = torch.ones(count, device=device), torch.empty(count, device=device)
    # Of ones, or zeros, a GPU multiplies 13 % more in the same time.
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    work: dict[str, tuple[Callable[[], object], float, str]] = {
        "read": (source.sum, 4 * count / 1e12, "TB/s"),
        "copy": (partial(target.copy_, source), 8 * count / 1e12, "TB/s"),
        f"bf16 {side}^3": (partial(torch.mm, a, b), 2 * side**3 / 1e12, "TFLOP/s"),
    }
    with (args.out / "ceilings.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("what", "rate", "unit"))
        for name, (run, amount, unit) in work.items():
            milliseconds(run, device)
            seconds = statistics.median(milliseconds(run, device) for _ in range(9)) / 1e3
            writer.writerow((name, f"{amount / seconds:.4g}", unit))
            print(name, f"{amount / seconds:.4g}", unit, flush=True)
    return 0


def kernels(args: argparse.Namespace) -> int:
    """Runs every kernel that matters once, at a size where it should be at its best: ncu adds the figures."""
    small = args.device == "cpu"
    elements, side, odd = (10_000, 64, 63) if small else (100_000_000, 4096, 4095)
    make = partial(torch.randn, device=args.device, dtype=torch.float16)

    def step(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
        parameter = torch.nn.Parameter(make(elements))
        parameter.grad = make(elements)
        optimizer([parameter], lr=0.1, **options).step()

    grads = [make(elements)]
    scalars = {
        "inv_scale": torch.full((), 0.5, device=args.device),
        "found_inf": torch.zeros((), device=args.device),
    }
    x, weight, bias = make(side, side), make(side, side), make(side)
    wide, few = make(2 * side, side), make(8, side)
    q, w = (amp_kernels.quantize_int8(t, dim=-1) for t in (x, weight))
    few_q = amp_kernels.quantize_int8(few, dim=-1)
    averaged = torch.nn.Parameter(make(elements))
    average, owner = averaged.detach().float(), FusedSGD([averaged], lr=0.1)
    owner.init_state()
    taps = amp_kernels.quantize_int8(make(64, 3, 3, 64), dim=(1, 2, 3))
    images = amp_kernels.quantize_int8(make(2 if small else 128, 56, 56, 64))
    odd_x, odd_weight, odd_bias = (t.requires_grad_() for t in (make(side, odd), make(odd, odd), make(odd)))
    work: dict[str, Callable[[], object]] = {
        "grad_norm": lambda: amp_kernels.grad_norm(grads, **scalars),
        "unscale_": lambda: amp_kernels.unscale_(grads, **scalars),
        **{
            f"{name}, {example}": partial(step, UPDATES[name].optimizer, **UPDATES[name].examples[example])
            for name in UPDATES
            for example in ("plain", "full")
        },
        **{
            f"{name}, {str(dtype).removeprefix('torch.')} states": partial(
                step, UPDATES[name].optimizer, state_dtype=dtype, **UPDATES[name].examples[example]
            )
            for name, example in (("sgd", "momentum"), ("rmsprop", "plain"), ("adam", "plain"))
            for dtype in (torch.int8, torch.bfloat16)
        },
        "ema_": lambda: ema_([average], owner, 0.999),
        "quantize rows": lambda: amp_kernels.quantize_int8(wide, dim=-1),
        "quantize columns": lambda: amp_kernels.quantize_int8(wide, dim=0),
        "quantize tensor": lambda: amp_kernels.quantize_int8(wide),
        "dequantize rows": lambda: amp_kernels.dequantize_int8(q, torch.float16),
        "int8_matmul": lambda: amp_kernels.int8_matmul(q, w.t()),
        "int8_matmul, few rows": lambda: amp_kernels.int8_matmul(few_q, w.t()),
        "int8_conv2d": lambda: amp_kernels.int8_conv2d(images, taps, padding=1),
        "int8_linear": lambda: torch.ops.amp_kernels.int8_linear(x, w.values, w.scale, None),
        "matmul": lambda: amp_kernels.linear(x, weight, bias),
        "matmul, few rows": lambda: amp_kernels.linear(few, weight, bias),
        "odd, gelu, both passes": lambda: amp_kernels.linear(odd_x, odd_weight, odd_bias, "gelu").sum().backward(),
    }
    with amp_kernels.use_backend(args.device):
        for name, run in work.items():
            start = time.perf_counter()
            run()
            print(f"{name}: {time.perf_counter() - start:.3f} s", flush=True)
    return 0


# Columns of kernels.csv, and the metrics of ncu that they hold (METRICS in gpu_check.py).
COLUMNS = {
    "microseconds": "gpu__time_duration.sum",
    "dram_percent_of_peak": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps_active_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "instructions_issued_percent": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "tensor_pipe_percent": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
}


def kernel_table(args: argparse.Namespace) -> int:
    """Writes kernels.csv, a row for each launch that ncu profiled, from its log in the folder of `--tables`."""
    log = args.tables[0] / "ncu.txt"
    if not log.exists() or '"ID"' not in (text := log.read_text(errors="replace")):
        print(f"ncu wrote no table to {log}")
        return 0
    launches: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(text[text.index('"ID"') :].splitlines()):
        if str(row["ID"]).isdigit():  # not a line that a program printed
            name = re.sub(r"^void |amp_kernels::|cuda::|\(anonymous namespace\)::|<?unnamed>::", "", row["Kernel Name"])
            launch = launches.setdefault(
                row["ID"], {"kernel": name, "grid": row["Grid Size"], "block": row["Block Size"]}
            )
            value = float(row["Metric Value"].replace(",", ""))
            is_in_nanoseconds = row["Metric Unit"] in ("ns", "nsecond")
            launch[row["Metric Name"]] = f"{value / 1e3 if is_in_nanoseconds else value:.5g}"
    with (args.out / "kernels.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("kernel", "grid", "block", *COLUMNS))
        for launch in launches.values():
            metrics = (launch.get(metric, "") for metric in COLUMNS.values())
            writer.writerow((launch["kernel"], launch["grid"], launch["block"], *metrics))
    print(f"{len(launches)} launches")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = {
        function.__name__: function for function in (cases, captured, send, ceilings, kernels, kernel_table, routes)
    }
    parser.add_argument("what", choices=what)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="and the backend of its name")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the table that is written")
    parser.add_argument("--tables", type=Path, nargs="*", default=[], help="folders of the benchmarks' tables")
    parser.add_argument("--one", action="store_true", help="one case for each operator")
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--failures", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    return what[args.what](args)


if __name__ == "__main__":
    sys.exit(main())
