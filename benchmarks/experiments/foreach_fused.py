"""foreach against fused: which implementation of an optimizer is fastest for which numbers and sizes of tensors."""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import torch

from amp_kernels.optim import FusedAdamW, FusedRMSprop, FusedSGD

from ..plot import BLUES
from .harness import (
    UNDECIDED,
    Claim,
    Experiment,
    Row,
    Run,
    Settings,
    Table,
    Verdict,
    decided,
    figures,
    number,
    ratio,
    seconds_side_by_side,
)
from .peers import Build, ready, reasons_below

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

OURS = {"SGD": FusedSGD, "RMSprop": FusedRMSprop, "AdamW": FusedAdamW}
OPTIONS = {"SGD": {"lr": 1e-3, "momentum": 0.9}, "RMSprop": {"lr": 1e-3}, "AdamW": {"lr": 1e-3}}
LOOP, FOREACH, FUSED = "torch for-loop", "torch foreach", "torch fused"
FLAGS: dict[str, dict[str, Any]] = {LOOP: {"foreach": False}, FOREACH: {"foreach": True}, FUSED: {"fused": True}}
FP32, FP16 = "amp_kernels", "amp_kernels, fp16 weights"
BITSANDBYTES, FLASHOPTIM, FLASHOPTIM_FP16 = "bitsandbytes", "flashoptim", "flashoptim, fp16 weights"
TORCHAO = "torchao, 8-bit state"
SAME_WORK = (LOOP, FOREACH, FUSED, FP32, BITSANDBYTES, FLASHOPTIM)  # fp32 weights and state
COLOURS = {
    LOOP: "lightgrey", FOREACH: "tab:green", FUSED: "tab:red", FP32: BLUES[0], BITSANDBYTES: "tab:purple",
    FLASHOPTIM: "tab:orange",
}  # fmt: skip
MOST = 0.75  # of the cells
MIN_ROUNDS, MAX_ROUNDS = 7, 60
MIN_SECONDS = 1e-3  # of what is timed at once: the step of one small tensor takes 10 us
MAX_IN_A_ROW = 50


# ------------------------------------------------------------------------------------------------------ the contenders
def parameters(numbers: int, size: int, dtype: torch.dtype, device: torch.device) -> list[torch.nn.Parameter]:
    weight, grad = (torch.randn(size, device=device).to(dtype) for _ in range(2))
    params = [torch.nn.Parameter(weight.clone()) for _ in range(numbers)]
    for p in params:
        p.grad = grad.clone()
    return params


def builds(name: str, make: Callable[[torch.dtype], list], settings: Settings) -> dict[str, Build]:
    """Every contender; `make` returns parameters with gradients."""
    options = OPTIONS[name]

    def step(optimizer: Callable[..., torch.optim.Optimizer], dtype: torch.dtype = torch.float32, **more: Any) -> Build:
        return lambda: optimizer(make(dtype), **options, **more).step

    def peer(package: str, of: str, dtype: torch.dtype = torch.float32, **more: Any) -> Build:
        def build() -> Callable[[], object]:
            module = importlib.import_module(package)
            return step(getattr(module, of), dtype, **more)()

        return build

    on_gpu = settings.device.type == "cuda"
    # The one way that runs on a CPU.
    plain: dict[str, Any] = {"quantize": False, "master_weight_bits": None, "fused": on_gpu}
    found = {variant: step(getattr(torch.optim, name), **flag) for variant, flag in FLAGS.items()}
    found |= {
        FP32: step(OURS[name]),
        FP16: step(OURS[name], torch.float16),
        BITSANDBYTES: peer("bitsandbytes.optim", name),
        FLASHOPTIM: peer("flashoptim", f"Flash{name}", **plain),
        FLASHOPTIM_FP16: peer("flashoptim", f"Flash{name}", torch.float16, quantize=False, master_weight_bits=32),
        TORCHAO: _left_out if settings.is_quick and name == "AdamW" else peer("torchao.optim", f"{name}8bit"),
    }
    return found


def _left_out() -> Callable[[], object]:
    raise RuntimeError("left out of a quick run, because it compiles its step for 2 to 7 s for each size of a tensor")


# ------------------------------------------------------------------------------------------------------------ the parts
def cell(settings: Settings, name: str, numbers: int, size: int, seconds: float) -> list[Row]:
    """One optimizer, so many tensors of one size; `seconds` for all rounds of all contenders."""
    torch.manual_seed(0)
    ready_ones, reasons = ready(builds(name, lambda dtype: parameters(numbers, size, dtype, settings.device), settings))
    first = {c: taken for c, [taken] in seconds_side_by_side(ready_ones, 1, settings.device).items()}
    calls = {c: min(MAX_IN_A_ROW, math.ceil(MIN_SECONDS / taken)) for c, taken in first.items()}
    rounds = int(seconds / sum(calls[c] * taken for c, taken in first.items()))
    rounds = min(max(rounds, MIN_ROUNDS), MAX_ROUNDS)
    in_a_row = {c: partial(_repeat, run, calls[c]) for c, run in ready_ones.items()}
    times = seconds_side_by_side(in_a_row, rounds, settings.device, warm_ups=1)
    times = {c: [each / calls[c] for each in taken] for c, taken in times.items()}
    best = min((v for v in FLAGS if v in times), key=lambda variant: statistics.median(times[variant]))
    shared = {"optimizer": name, "numbers": numbers, "size": size, "rounds": rounds}
    rows = []
    for contender in (*times, *reasons):
        row = {**shared, "contender": contender, "calls": calls.get(contender, ""), "note": reasons.get(contender, "")}
        if taken := times.get(contender):
            for column, of in (("of_loop", LOOP), ("of_foreach", FOREACH), ("of_best_torch", best)):
                row |= figures(column, ratio(taken, times[of]))
        rows.append(row)
    return rows


def _repeat(run: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        run()


def runs(settings: Settings) -> list[Run]:
    numbers = settings.pick(cpu=(1, 10, 100, 1000), cuda=(1, 10, 100, 1000), quick=(1, 100))
    sizes = (64, 1024, 2**14, 2**17, 2**20)
    sizes = settings.pick(cpu=sizes, cuda=sizes, quick=(64, 2**14))
    most = settings.pick(cpu=17_000_000, cuda=110_000_000, quick=2_000_000)  # elements: 1000 x 2**14, 100 x 2**20
    seconds = settings.pick(cpu=2.5, cuda=0.4, quick=0.2)
    grid = product(OURS, numbers, sizes)
    return [
        Run(f"{name} {count} x {size}", partial(cell, settings, name, count, size, seconds))
        for name, count, size in grid
        if count * size <= most
    ]


# ----------------------------------------------------------------------------------------------------------- the claims
SHORT = {FOREACH: "foreach", FUSED: "fused", FP32: "amp_kernels"}
TO = {"of_foreach": "foreach", "of_loop": "the for-loop", "of_best_torch": "the fastest of torch's"}


def in_general(contender: str, column: str, optimizers: Sequence[str], rows: Sequence[Row]) -> Verdict:
    """Holds if `contender` wins most cells, falsified if it loses half of them; a cell is won if the 80th percentile of
    its ratio is below 1, lost if the 20th is above."""
    found = [row for row in rows if row["contender"] == contender and row["optimizer"] in optimizers]
    found = [row for row in found if not math.isnan(number(row, column))]
    if not found:
        return Verdict(UNDECIDED, "Not measured.")
    won = [row for row in found if number(row, f"{column}_high") < 1]
    lost = [row for row in found if number(row, f"{column}_low") > 1]
    gains = sorted(1 / number(row, column) for row in found)
    least, middle, most = gains[0], statistics.median(gains), gains[-1]
    because = (
        f"{SHORT[contender]} is faster in {len(won)} of {len(found)} cases and slower in {len(lost)}. In the median "
        f"case it has {middle:.2f} times the speed of {TO[column]} ({least:.2f} to {most:.2f})."
    )
    return decided(len(won) >= MOST * len(found), len(lost) >= len(found) / 2, because)


RULES = f"""
A case is an optimizer, a number and a size of tensors. The ratio of two times is taken within a round. A case counts as
faster if the 80th percentile of the ratio over the rounds is below 1, as slower if the 20th is above 1. A claim holds
if at least {MOST:.0%} of its cases are faster. It is falsified if at least half are slower. Otherwise it is undecided.

The claims and their cases:
"""
CLAIMS = (
    Claim(
        'In torch, fused SGD and AdamW take less time than foreach (torch\'s documentation: "fused > foreach").',
        "All numbers and sizes, SGD and AdamW.",
        partial(in_general, FUSED, "of_foreach", ("SGD", "AdamW")),
    ),
    Claim(
        "In torch, foreach SGD, RMSprop and AdamW take less time than the for-loop (torch's documentation: "
        '"foreach > for-loop").',
        "All numbers and sizes, the three optimizers.",
        partial(in_general, FOREACH, "of_loop", tuple(OURS)),
    ),
    Claim(
        "The fp32 step of amp_kernels takes less time than the fastest of torch's three for the same tensors.",
        "All numbers and sizes, the three optimizers.",
        partial(in_general, FP32, "of_best_torch", tuple(OURS)),
    ),
)


# ----------------------------------------------------------------------------------------------------------- the tables
def cells(rows: Sequence[Row]) -> dict[tuple[str, int, int], dict[str, Row]]:
    """The rows of each (optimizer, number, size) by contender."""
    found: dict[tuple[str, int, int], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["optimizer"], int(row["numbers"]), int(row["size"])), {})[row["contender"]] = row
    return found


def tables(rows: Sequence[Row]) -> list[Table]:
    made = []
    contenders = (FOREACH, FUSED, FP32, BITSANDBYTES, FLASHOPTIM, FP16, FLASHOPTIM_FP16, TORCHAO)
    for name in OURS:
        lines = []
        for (optimizer, count, size), found in cells(rows).items():
            if optimizer == name:
                figures = (_figure(found.get(contender, {})) for contender in contenders)
                lines.append((f"{count} x {size:,}", *figures))
        title = f"{name}: time of a step, as a multiple of the step of torch's for-loop, median of the rounds"
        notes = reasons_below([row for row in rows if row["optimizer"] == name])
        made.append(Table(title, ("tensors", *contenders), tuple(lines), notes))
    return made


def _figure(row: Row) -> str:
    value = number(row, "of_loop")
    return "" if math.isnan(value) else f"{value:.2g}"


PUBLISHED = (
    Table(
        "Order of speed that torch's documentation of torch.optim gives",
        ("optimizer", "order"),
        (("in general", "fused > foreach > for-loop"), ("RMSprop", "foreach > for-loop (no fused implementation)")),
    ),
)
ABOUT = """
A step of SGD with momentum 0.9, of RMSprop and of AdamW is timed on 1 to 1000 tensors of 64 to 1,048,576 fp32 weights,
with random weights and gradients. The contenders are torch's for-loop, foreach and fused implementations (RMSprop has
no fused one), amp_kernels, bitsandbytes with 32-bit state, and flashoptim without its compression. Three contenders do
other work and have columns of their own: fp16 weights with fp32 masters under amp_kernels and under flashoptim, and
torchao's AdamW with 8-bit state.

All contenders take turns in one process, each with its own parameters. Each time is divided by the time of the for-loop
in the same round. Steps of less than a millisecond are repeated, up to 50 times, so small tensors are in the caches.
The plot at the end of this section shows which implementation is the fastest by the median. It also shows how many
times as fast as the for-loop this implementation is.
"""


# ------------------------------------------------------------------------------------------------------------- the maps
def draw(rows: Sequence[Row], path: Path) -> None:
    groups = {"torch's own": (LOOP, FOREACH, FUSED), "all with fp32 weights and state": SAME_WORK}
    figure, grid = plt.subplots(2, 3, figsize=(10, 6.5), layout="constrained", sharex=True, sharey=True)
    found, shown = cells(rows), set()
    counts, sizes = sorted({count for _, count, _ in found}), sorted({size for *_, size in found})
    for line, (title, contenders) in zip(grid, groups.items(), strict=True):
        for axes, name in zip(line, OURS, strict=True):
            axes.set_title(f"{name}, {title}", fontsize=10)
            for (optimizer, count, size), of in found.items():
                if optimizer == name:
                    times = {c: number(of[c], "of_loop") for c in contenders if c in of}
                    shown.add(_tile(axes, sizes.index(size), counts.index(count), times))
            axes.set(xlim=(-0.5, len(sizes) - 0.5), ylim=(-0.5, len(counts) - 0.5))
            axes.set_xticks(range(len(sizes)), [_short(size) for size in sizes])
            axes.set_yticks(range(len(counts)), [str(count) for count in counts])
            axes.tick_params(length=0)
    figure.supxlabel("weights in a tensor", fontsize=10)
    figure.supylabel("tensors", fontsize=10)
    handles = [Patch(color=COLOURS[contender], label=contender) for contender in COLOURS if contender in shown]
    title = "the fastest, and how many times as fast as the for-loop (empty: too many weights to measure)"
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), title=title)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _tile(axes: Axes, x: int, y: int, times: Mapping[str, float]) -> str:
    """Draws the winner of a cell and returns its name."""
    winner = min((c for c in times if not math.isnan(times[c])), key=lambda c: times[c])
    axes.add_patch(Rectangle((x - 0.47, y - 0.47), 0.94, 0.94, color=COLOURS[winner], alpha=0.6, linewidth=0))
    axes.text(x, y, f"{1 / times[winner]:.2g}", ha="center", va="center", fontsize=10)
    return winner


def _short(size: int) -> str:
    return f"{size >> 20}M" if size >= 2**20 else f"{size >> 10}k" if size >= 2**10 else str(size)


EXPERIMENT = Experiment(
    name="foreach_fused",
    title="foreach against fused",
    about=ABOUT,
    columns=(
        "optimizer", "contender", "numbers", "size", "rounds", "calls", "of_loop", "of_loop_low", "of_loop_high",
        "of_foreach", "of_foreach_low", "of_foreach_high", "of_best_torch", "of_best_torch_low", "of_best_torch_high",
    ),
    runs=runs,
    claims=CLAIMS,
    tables=tables,
    draw=draw,
    published=PUBLISHED,
    rules=RULES,
)  # fmt: skip
