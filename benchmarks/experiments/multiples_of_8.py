"""Products whose sizes are no multiples of 8, and one product in four precisions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_kernels
from amp_kernels.quantization import quantize_

from ..plot import BLUES
from .harness import (
    FALSIFIED,
    HOLDS,
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
    spread,
)
from .peers import Build, ready, reasons_below

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogFormatter

MIDDLE = 1024
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32, **DTYPES}
OURS, TORCH, PAD = "amp_kernels", "torch", "F.pad, then torch"
COLOURS = {OURS: BLUES[0], TORCH: "tab:red", PAD: "tab:orange"}
SWEEP, PRECISION = "sweep", "precision"  # the two parts
# Two runs of one contender differ by less than this in the median of their rounds; a size is slower by more.
SLACK = 1.1
MOST = 0.75  # of the sizes


# ------------------------------------------------------------------------------------------------------ the contenders
def padded(x: Tensor, dim: int) -> Tensor:
    """A copy whose size in `dim` is the next multiple of 8."""
    behind = -x.shape[dim] % 8
    return F.pad(x, (0, behind) if dim == 1 else (0, 0, 0, behind)) if behind else x


def by_padding(a: Tensor, b: Tensor) -> Tensor:
    """What a user writes: both operands are padded at each call, as activations and a weight under autocast are."""
    return torch.matmul(padded(a, 1), padded(padded(b, 0), 1))[:, : b.shape[1]]


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    OURS: amp_kernels.matmul,
    TORCH: torch.matmul,
    PAD: by_padding,
}


def operands(rows: int, inner: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shapes = (rows, inner), (inner, columns)
    a, b = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)
    return a, b


def repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    """On a GPU a product of this size takes as long as the wait for it: several are queued."""

    def run() -> None:
        for _ in range(times):
            call()

    return run


# ------------------------------------------------------------------------------------------------------------ the parts
def sweep(settings: Settings, dtype: str, dimension: str, rows: int, rounds: int) -> list[Row]:
    """All sizes of a dimension and all contenders take turns. Times are per multiplication, of torch's mean over the
    multiples of 8 in the same round."""
    sizes = settings.pick(cpu=range(1016, 1033), cuda=range(1016, 1033), quick=(1016, 1021, 1024, 1028, 1032))
    calls = {}
    for size in sizes:
        inner, columns = (size, MIDDLE) if dimension == "K" else (MIDDLE, size)
        a, b = operands(rows, inner, columns, DTYPES[dtype], settings.device)
        for name, multiply in PRODUCTS.items():
            calls[name, size] = repeated(partial(multiply, a, b), settings.pick(cpu=1, cuda=10, quick=1))
    times = seconds_side_by_side(calls, rounds, settings.device)
    per_size = {(name, size): [seconds / size for seconds in times[name, size]] for name, size in times}
    round_sizes = [per_size[TORCH, size] for size in sizes if size % 8 == 0]
    aligned = [statistics.mean(seconds) for seconds in zip(*round_sizes, strict=True)]
    shared = {"part": SWEEP, "dtype": dtype, "dimension": dimension, "rows": rows, "rounds": rounds}
    found = []
    for (name, size), seconds in per_size.items():
        of_torch = ratio(seconds, per_size[TORCH, size])
        measured = figures("ratio", ratio(seconds, aligned)) | figures("of_torch", of_torch)
        found.append({**shared, "contender": name, "size": size, **measured})
    return found


def precisions(settings: Settings, rows: int, size: int, rounds: int) -> list[Row]:
    """One product in every precision, of fp32 and of fp64 in the same round; and in int8, by those who have it."""
    on = settings.device
    builds: dict[tuple[str, str], Build] = {}
    for dtype in PRECISIONS:
        builds[TORCH, dtype] = partial(_product, torch.matmul, rows, size, PRECISIONS[dtype], on)
    for dtype in DTYPES:
        builds[OURS, dtype] = partial(_product, amp_kernels.matmul, rows, size, DTYPES[dtype], on)
    for name, layer in (OURS, _ours_int8), ("bitsandbytes", _bitsandbytes_int8), ("torchao", _torchao_int8):
        builds[name, "int8"] = partial(_layer, layer, rows, size, on)
    builds["flashoptim", "fp16"] = _flashoptim
    runs, reasons = ready(builds)
    times = seconds_side_by_side(runs, rounds, on)
    shared = {"part": PRECISION, "dimension": "none", "size": size, "rows": rows, "rounds": rounds}
    found = []
    for name, dtype in builds:
        row = {**shared, "contender": name, "dtype": dtype, "note": reasons.get((name, dtype), "")}
        if seconds := times.get((name, dtype)):
            row |= figures("speed", ratio(times[TORCH, "fp32"], seconds))
            row |= figures("speed_of_fp64", ratio(times[TORCH, "fp64"], seconds))
        found.append(row)
    return found


def _product(multiply: Callable, rows: int, size: int, dtype: torch.dtype, device: torch.device) -> Callable:
    return partial(multiply, *operands(rows, size, size, dtype, device))


def _layer(make: Callable[[nn.Module], nn.Module], rows: int, size: int, device: torch.device) -> Callable:
    """A linear layer of bf16 in int8: activations are quantized at each call, as those of a model are."""
    layer = make(nn.Sequential(nn.Linear(size, size, bias=False)).to(device, torch.bfloat16))
    x, _ = operands(rows, size, size, torch.bfloat16, device)
    return torch.no_grad()(partial(layer, x))


def _ours_int8(model: nn.Module) -> nn.Module:
    return quantize_(model, "dynamic")


def _torchao_int8(model: nn.Module) -> nn.Module:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig
    from torchao.quantization import quantize_ as quantize_by_torchao

    quantize_by_torchao(model, Int8DynamicActivationInt8WeightConfig())
    return model


def _bitsandbytes_int8(model: nn.Module) -> nn.Module:
    import bitsandbytes

    weight: Any = next(model.parameters())
    layer = bitsandbytes.nn.Linear8bitLt(*weight.shape[::-1], bias=False, has_fp16_weights=False)
    layer.weight = bitsandbytes.nn.Int8Params(weight.data.half().cpu(), requires_grad=False, has_fp16_weights=False)
    return nn.Sequential(layer.to(weight.device))


def _flashoptim() -> Callable:
    import flashoptim

    return flashoptim.matmul  # it has optimizers alone: the exception says so


def runs(settings: Settings) -> list[Run]:
    # torch's fp16 product on a CPU took 100 ms for 32 rows, where bf16 took 0.4. With 16 rows or fewer ours leaves it
    # to torch, but they are enough to show that it runs.
    rows = settings.pick(
        cpu={"bf16": 512, "fp16": 32}, cuda=dict.fromkeys(DTYPES, 8192), quick=dict.fromkeys(DTYPES, 16)
    )
    rounds = settings.pick(
        cpu={"bf16": 60, "fp16": 12}, cuda=dict.fromkeys(DTYPES, 100), quick=dict.fromkeys(DTYPES, 3)
    )
    one = settings.pick(cpu=(128, 1024, 20), cuda=(4096, 4096, 20), quick=(16, 256, 3))
    parts = [
        Run(f"{dtype} {dimension}", partial(sweep, settings, dtype, dimension, rows[dtype], rounds[dtype]))
        for dtype, dimension in product(DTYPES, "KN")
    ]
    return [*parts, Run("precisions", partial(precisions, settings, *one))]


# ----------------------------------------------------------------------------------------------------------- the claims
def odd_sizes(rows: Sequence[Row], contender: str) -> list[Row]:
    picked = (row for row in rows if row["part"] == SWEEP and row["contender"] == contender)
    return [row for row in picked if int(row["size"]) % 8]


TO = {"ratio": "torch's at the multiples of 8", "of_torch": "torch's product alone"}  # what a column divides by


def by_sizes(contender: str, column: str, limit: float, is_above: bool, rows: Sequence[Row]) -> Verdict:
    """Holds for MOST of the sizes, or not for half of them, with the 20th and 80th percentiles on one side of `limit`;
    what most of them say is given for each dtype."""
    sizes = odd_sizes(rows, contender)
    if not sizes:
        return Verdict(UNDECIDED, "Not measured.")
    above = [number(row, f"{column}_low") > limit for row in sizes]
    below = [number(row, f"{column}_high") <= limit for row in sizes]
    yes, no = (above, below) if is_above else (below, above)
    word = HOLDS if sum(yes) >= MOST * len(sizes) else FALSIFIED if sum(no) >= len(sizes) / 2 else UNDECIDED
    medians = "; ".join(
        f"{dtype} {statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
        for dtype in DTYPES
        if (found := [number(row, column) for row in sizes if row["dtype"] == dtype])
    )
    counted = f"True for {_counted(yes)} of {len(sizes)} sizes, false for {_counted(no)}"
    return Verdict(word, f"{counted}. Median time relative to {TO[column]} (range over the sizes): {medians}.")


def _counted(which: Sequence[bool]) -> str:
    return "none" if not any(which) else f"all {len(which)}" if all(which) else str(sum(which))


def as_fast_as(factor: float, column: str, rows: Sequence[Row]) -> Verdict:
    found = [row for row in rows if (row["part"], row["contender"], row["dtype"]) == (PRECISION, TORCH, "fp16")]
    if not found or math.isnan(number(found[0], column)):
        return Verdict(UNDECIDED, "Not measured.")
    median, low, high = spread(found[0], column)
    return decided(low >= factor, high < factor, f"It is {median:.3g} times as fast ({low:.3g} to {high:.3g}).")


RULES = f"""
Ratios are taken within a round; p20 and p80 are their 20th and 80th percentile over the rounds. The first three claims
are about the sizes from 1016 to 1032 of K and of N that are no multiples of 8, in bf16 and fp16 together. Each rule
says for which sizes its claim is true, and for which it is false. A claim holds if it is true for at least {MOST:.0%}
of the sizes. It is falsified if it is false for at least half of them. Otherwise it is undecided.

The claims and their rules:
"""
ABOVE, BELOW = "True if p20 > {0}, false if p80 <= {0}.", "True if p80 <= {0}, false if p20 > {0}."
TIMES = "The ratio compares the speeds. Holds if p20 >= {0}. Falsified if p80 < {0}. Otherwise undecided."
CLAIMS = (
    Claim(
        f"If K or N of [M, K] @ [K, N] is no multiple of 8, torch's 16-bit product takes more than {SLACK} times as "
        "long as torch's average over the sizes 1016, 1024 and 1032, which are multiples of 8.",
        ABOVE.format(SLACK),
        partial(by_sizes, TORCH, "ratio", SLACK, True),
    ),
    Claim(
        "If K or N is no multiple of 8, F.pad and a multiplication take less time than torch's product alone.",
        BELOW.format(1),
        partial(by_sizes, PAD, "of_torch", 1.0, False),
    ),
    Claim(
        f"If K or N is no multiple of 8, the product of amp_kernels takes at most {SLACK} times as long as torch's "
        "average over the sizes 1016, 1024 and 1032, which are multiples of 8.",
        BELOW.format(SLACK),
        partial(by_sizes, OURS, "ratio", SLACK, False),
    ),
    Claim(
        "torch's product in half precision is at least 4 times as fast as in single precision.",
        TIMES.format(4),
        partial(as_fast_as, 4, "speed"),
    ),
    Claim(
        "torch's product in half precision is at least 10 times as fast as in double precision.",
        TIMES.format(10),
        partial(as_fast_as, 10, "speed_of_fp64"),
    ),
)


# ----------------------------------------------------------------------------------------------------------- the tables
def of_sizes(rows: Sequence[Row], divides: Callable[[int], bool]) -> str:
    found = [number(row, "ratio") for row in rows if divides(int(row["size"]))]
    return f"{statistics.median(found):.3g} ({min(found):.3g} to {max(found):.3g})" if found else ""


def told(row: Row, column: str) -> str:
    median, low, high = spread(row, column)
    return "" if math.isnan(median) else f"{median:.3g} ({low:.3g} to {high:.3g})"


def tables(rows: Sequence[Row]) -> list[Table]:
    lines = []
    for dtype, dimension, contender in product(DTYPES, "KN", PRODUCTS):
        key = SWEEP, dtype, dimension, contender
        found = [row for row in rows if (row["part"], row["dtype"], row["dimension"], row["contender"]) == key]
        if found:
            groups = (lambda size: size % 8 == 0, lambda size: size % 8 and size % 2 == 0, lambda size: size % 2)
            cells = (of_sizes(found, divides) for divides in groups)
            lines.append((f"{dtype}, {found[0]['rows']} rows", dimension, contender, *cells))
    columns = ("product", "varied", "contender", "multiples of 8", "other even sizes", "odd sizes")
    title = (
        "Time per multiplication, as a multiple of torch's mean over the multiples of 8: median over the sizes (least "
        "to most)"
    )
    found = [row for row in rows if row["part"] == PRECISION]
    times = tuple((row["contender"], row["dtype"], told(row, "speed"), told(row, "speed_of_fp64")) for row in found)
    size = f"{found[0]['rows']} x {found[0]['size']} x {found[0]['size']}" if found else "none"
    speeds = Table(
        f"One product, {size}: times as fast as torch in fp32 and in fp64, median (20th to 80th percentile)",
        ("contender", "precision", "times fp32", "times fp64"),
        times,
        reasons_below(found),
    )
    return [Table(title, columns, tuple(lines)), speeds]


PUBLISHED = (
    Table(
        "Speed of half precision on GPUs with tensor cores, sizes multiples of 8 (NVIDIA's page on mixed precision)",
        ("compared with", "times as fast"),
        (("single precision", "4"), ("double precision", "10")),
    ),
)
ABOUT = """
Matrices of random 16-bit numbers are multiplied, [rows, K] x [K, N]. K goes from 1016 to 1032 while N is 1024; then N
does while K is 1024. The contenders are torch, torch after `F.pad` of both operands to the next multiple of 8, and
amp_kernels. On a GPU amp_kernels copies operands into padded storage where that is faster. On a CPU it calls torch's
product, in fp32 for fp16 matrices of more than 16 rows. All sizes and contenders take turns in one process. Each
time is divided by the number of multiplications, so that sizes can be compared, and then by the mean of torch's at the
multiples of 8 (1016, 1024 and 1032) in the same round.

One aligned product is then timed in fp64, fp32, bf16 and fp16. bitsandbytes and torchao have no product of 16-bit
matrices, so their int8 layers are timed instead: they quantize a bf16 input at each call and multiply it by an int8
weight. The published claims are about GPUs with tensor cores; every machine is judged by the same rules. On a CPU
torch's fp16 products are so slow that the fp16 ones have 32 rows and the bf16 ones 512.
"""


def draw(rows: Sequence[Row], path: Path) -> None:
    figure, grid = plt.subplots(2, 2, figsize=(9, 5.5), layout="constrained", sharex=True, sharey="row")
    for line, (axes, (dtype, dimension)) in enumerate(zip(grid.flat, product(DTYPES, "KN"), strict=True)):
        for contender, colour in COLOURS.items():
            key = SWEEP, dtype, dimension, contender
            found = [row for row in rows if (row["part"], row["dtype"], row["dimension"], row["contender"]) == key]
            found.sort(key=lambda row: int(row["size"]))
            sizes = [int(row["size"]) for row in found]
            middle, low, high = zip(*(spread(row, "ratio") for row in found), strict=True)
            axes.plot(sizes, middle, marker="o", markersize=4, color=colour, label=contender)
            axes.fill_between(sizes, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.axhline(1, color="grey", linewidth=0.8, linestyle="--")
        axes.set(yscale="log", title=f"{dtype}, {dimension} varies")
        axes.set_xticks((1016, 1024, 1032))
        axes.set_xticks(range(1016, 1033), minor=True)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(LogFormatter())  # labels 2, 3, ... only where the axis is short
        axes.grid(axis="x", alpha=0.5)
        if line >= 2:
            axes.set_xlabel(f"{dimension}; grid lines at multiples of 8")
    figure.supylabel("time per multiplication, torch at multiples of 8 = 1 (lower is better)", fontsize=10)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


EXPERIMENT = Experiment(
    name="multiples_of_8",
    title="Multiples of 8",
    about=ABOUT,
    columns=(
        "part", "contender", "dtype", "dimension", "size", "rows", "rounds", "ratio", "ratio_low", "ratio_high",
        "of_torch", "of_torch_low", "of_torch_high", "speed", "speed_low", "speed_high",
        "speed_of_fp64", "speed_of_fp64_low", "speed_of_fp64_high",
    ),
    runs=runs,
    claims=CLAIMS,
    tables=tables,
    draw=draw,
    published=PUBLISHED,
    rules=RULES,
)  # fmt: skip
