"""Underflow: which activation gradients of a Transformer are 0 or subnormal in fp16, and what counting them costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor

import amp_kernels
from amp_kernels.nn import convert_linear_
from amp_kernels.ops.exponents import count_exponents_
from amp_kernels.optim import FusedAdamW
from amp_kernels.precision import PrecisionReport
from amp_kernels.reference.exponents import COLUMNS

from ..demo.training import Size, Transformer, batches
from . import text
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
    spread,
)

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SCALES = (1.0, 2.0**8, 2.0**16)
LAYER, ADVICE, STEP, PASS = "layer", "advice", "step", "pass"
GRAD = "activation_grad"
VANISHED = 0.05  # the share at a scale of 1 from which underflow counts as large
SMALL = 0.01  # the share that may vanish at the largest scale
SLOWEST_STEP, SLOWEST_PASS = 2.0, 3.0
LOW, HIGH = -24, 15  # exponents of fp16
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Training:
    """A Transformer with fp16 weights, its optimizer and its scaler."""

    def __init__(self, seed: int, size: Size, device: torch.device):
        torch.manual_seed(seed)
        self.device = device
        self.model = convert_linear_(Transformer(size).to(device, torch.float16))
        self.optimizer = FusedAdamW(self.model.parameters(), lr=1e-3)
        self.batches = batches(text.text(device)[0], size, seed)
        self.scaler = amp_kernels.GradScaler(device.type, init_scale=2.0**12)

    def step(self) -> None:
        self.scaler.scale(self.model(next(self.batches))).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def sample(self, batch: Tensor, scale: float) -> PrecisionReport:
        """One backward pass at this scale. The weights do not change, since the learning rate of the step is 0."""
        (group,) = self.optimizer.param_groups
        scaler = amp_kernels.GradScaler(self.device.type, init_scale=scale)
        lr, group["lr"] = group["lr"], 0.0
        with PrecisionReport(self.model, self.optimizer, scaler) as report:
            scaler.scale(self.model(batch)).backward()
            scaler.step(self.optimizer)
        group["lr"] = lr
        self.optimizer.zero_grad()
        return report


# ----------------------------------------------------------------------------------------------------- what is measured
def layers(seed: int, steps: int, size: Size, device: torch.device) -> list[Row]:
    """The activation gradients of each layer at each scale, after so many steps, of the same batch."""
    training = Training(seed, size, device)
    for _ in range(steps):
        training.step()
    batch = next(training.batches)
    rows: list[Row] = []
    room = math.nan
    for scale in SCALES:
        report = training.sample(batch, scale)
        shared = {"part": LAYER, "seed": seed, "steps": steps, "scale": f"{scale:g}"}
        order = [name for name, _ in training.model.named_modules()]
        found = {row.name: row for row in report.rows() if row.kind == GRAD}
        for name in sorted(found, key=order.index):
            row = found[name]
            counts = row.exponents[LOW + 127 : HIGH + 128].tolist()
            rows.append(
                shared
                | {
                    "layer": name,
                    "elements": row.total,
                    "zeros": f"{row.zeros:.4g}",
                    "subnormal": f"{row.subnormal:.4g}",
                    "nonfinite": row.nonfinite,
                    "largest": f"{row.largest:.4g}",
                    "exponents": " ".join(map(str, counts)),
                }
            )
        if scale == 1:
            room = advised(report)
    for more in (0, 1):
        scale = 2.0 ** (room + more)
        bad = sum(row.nonfinite for row in training.sample(batch, scale).rows())
        shared = {"part": ADVICE, "seed": seed, "steps": steps, "scale": f"{scale:g}"}
        rows.append(shared | {"layer": f"+{more}", "nonfinite": bad})
    return rows


def advised(report: PrecisionReport) -> int:
    """By how many doublings the report says that the scale may rise."""
    said = next(sentence for sentence in report.advice() if "the scale may rise by 2^" in sentence)
    return int(said.split("2^")[1].split()[0])


def step_time(size: Size, rounds: int, device: torch.device) -> list[Row]:
    """A whole training step that is sampled, against one that is not."""
    training = Training(0, size, device)
    report = PrecisionReport(training.model, training.optimizer, training.scaler)

    def sampled() -> None:
        with report:
            training.step()

    times = seconds_side_by_side({"plain": training.step, "sampled": sampled}, rounds, device)
    return [{"part": STEP, "layer": "sampled", **figures("time", ratio(times["sampled"], times["plain"]))}]


def pass_time(name: str, numel: int, rounds: int, device: torch.device) -> list[Row]:
    """The gradient pass with statistics, against the one without."""
    gradients = [torch.randn(numel, device=device).to(DTYPES[name])]
    found_inf = torch.zeros((), device=device)
    counts = torch.zeros(1, COLUMNS, dtype=torch.int64, device=device)
    largest, squares = torch.zeros(1, device=device), torch.zeros(1, dtype=torch.float64, device=device)
    ways = {
        "norm": lambda: amp_kernels.grad_norm(gradients, found_inf=found_inf),
        "counts": lambda: count_exponents_(gradients, counts, largest, squares),
    }
    times = seconds_side_by_side(ways, rounds, device)
    return [{"part": PASS, "layer": name, "elements": numel, **figures("time", ratio(times["counts"], times["norm"]))}]


def runs(settings: Settings) -> list[Run]:
    size = settings.pick(cpu=Size(4, 128, 64, 8), cuda=Size(4, 256, 128, 32), quick=Size(1, 32, 32, 2))
    demo = settings.pick(cpu=Size(4, 256, 128, 8), cuda=Size(4, 256, 128, 8), quick=Size(1, 32, 32, 2))
    steps, rounds = settings.pick(cpu=300, cuda=300, quick=2), settings.pick(cpu=20, cuda=50, quick=2)
    numel = settings.pick(cpu=25_000_000, cuda=100_000_000, quick=100_000)
    device = settings.device
    each = [Run(f"layers, {seed}", partial(layers, seed, steps, size, device)) for seed in settings.seeds]
    each.append(Run("step", partial(step_time, demo, rounds, device)))
    return each + [Run(f"pass, {name}", partial(pass_time, name, numel, rounds, device)) for name in DTYPES]


# ----------------------------------------------------------------------------------------------------------- the claims
def of(rows: Sequence[Row], part: str, **values: object) -> list[Row]:
    return [row for row in rows if row["part"] == part and all(row[k] == str(v) for k, v in values.items())]


def seeds(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["seed"] for row in of(rows, LAYER)))


def vanished(rows: Sequence[Row], scale: float, columns: Sequence[str] = ("zeros", "subnormal")) -> list[float]:
    """For each seed, the share of all activation gradients that are 0 or subnormal because of fp16."""
    shares = []
    for seed in seeds(rows):
        found = of(rows, LAYER, seed=seed, scale=f"{scale:g}")
        total = sum(number(row, "elements") for row in found)
        gone = sum(sum(number(row, column) for column in columns) * number(row, "elements") for row in found)
        shares.append(gone / total)
    return shares


def percents(shares: Sequence[float]) -> str:
    return " ".join(f"{share:.1%}" for share in shares)


def underflows(rows: Sequence[Row]) -> Verdict:
    shares = vanished(rows, SCALES[0])
    if not shares:
        return Verdict(UNDECIDED, "Not measured.")
    return decided(
        all(share >= VANISHED for share in shares),
        all(share < VANISHED for share in shares),
        f"At a scale of 1, by seed, {percents(vanished(rows, SCALES[0], ['zeros']))} are 0. With the subnormal values, "
        f"which the rule counts too: {percents(shares)}.",
    )


def is_cured(rows: Sequence[Row]) -> Verdict:
    shares = vanished(rows, SCALES[-1])
    if not shares:
        return Verdict(UNDECIDED, "Not measured.")
    bad = sum(int(row["nonfinite"]) for row in of(rows, LAYER, scale=f"{SCALES[-1]:g}"))
    before = percents(vanished(rows, SCALES[1]))
    return decided(
        bad == 0 and all(share < SMALL for share in shares),
        all(share >= SMALL for share in shares) or bad > 0,
        f"Vanished at 2^16, by seed: {percents(shares)}; at 2^8: {before}. NaN or inf at 2^16: {bad}.",
    )


def is_advised_well(rows: Sequence[Row]) -> Verdict:
    found = {more: [int(row["nonfinite"]) for row in of(rows, ADVICE, layer=f"+{more}")] for more in (0, 1)}
    if not found[0]:
        return Verdict(UNDECIDED, "Not measured.")
    scales = " ".join(row["scale"] for row in of(rows, ADVICE, layer="+0"))
    good = all(bad == 0 for bad in found[0]) and all(bad > 0 for bad in found[1])
    return decided(
        good,
        not good,
        f"Scales that the report advises, by seed: {scales}. NaN or inf at these: {sum(found[0])}; at twice these: "
        f"{' '.join(map(str, found[1]))}.",
    )


def costs(part: str, limit: float, rows: Sequence[Row]) -> Verdict:
    found = of(rows, part)
    if not found:
        return Verdict(UNDECIDED, "Not measured.")
    times = {row["layer"]: spread(row, "time") for row in found}
    said = ", ".join(f"{name} {median:.2f} ({low:.2f} to {high:.2f})" for name, (median, low, high) in times.items())
    return decided(
        all(high <= limit for _, _, high in times.values()),
        any(low > limit for _, low, _ in times.values()),
        f"Median and 20th to 80th percentile of the ratio: {said}.",
    )


RULES = """
An activation gradient *vanished* if it is 0 or subnormal in fp16. The model has no layer that makes zeros of its own.
Shares are of all activation gradients of a model. Three seeds are trained.

The claims and their rules:
"""
CLAIMS = (
    Claim(
        "Without loss scaling, many activation gradients of a network become 0 in fp16 (Micikevicius et al. 2018, "
        "figure 3).",
        f"Holds if at a scale of 1 at least {VANISHED:.0%} vanished for each seed; falsified if less for each seed.",
        underflows,
    ),
    Claim(
        "The default scale of 2^16 cures it.",
        f"Holds if at 2^16 less than {SMALL:.0%} vanished for each seed, and no activation gradient is NaN or inf. "
        "Falsified if more vanished for each seed, or if one is NaN or inf.",
        is_cured,
    ),
    Claim(
        "The largest scale that `PrecisionReport` advises from a backward pass at a scale of 1 is the largest power of "
        "two at which nothing overflows.",
        "Holds if for each seed no gradient is NaN or inf at that scale, and one is at twice that scale. Otherwise "
        "falsified.",
        is_advised_well,
    ),
    Claim(
        f"A sampled step of the demo's Transformer takes at most {SLOWEST_STEP:g} times as long as another step.",
        "Holds if the 80th percentile of the ratio within a round is at most that; falsified if the 20th is above.",
        partial(costs, STEP, SLOWEST_STEP),
    ),
    Claim(
        f"Reading the gradients with all counts takes at most {SLOWEST_PASS:g} times as long as `grad_norm`.",
        "fp32, fp16 and bf16. Holds if for each the 80th percentile of the ratio within a round is at most that; "
        "falsified if the 20th of one is above.",
        partial(costs, PASS, SLOWEST_PASS),
    ),
)


# ------------------------------------------------------------------------------------------------- tables and picture
def tables(rows: Sequence[Row]) -> list[Table]:
    first = seeds(rows)[:1]
    names = list(dict.fromkeys(row["layer"] for row in of(rows, LAYER)))

    def cells(name: str) -> Iterator[str]:
        for scale in SCALES:
            for row in of(rows, LAYER, seed=first[0], scale=f"{scale:g}", layer=name):
                yield f"{number(row, 'zeros'):.1%}, {number(row, 'subnormal'):.1%}, {number(row, 'largest'):.2g}"

    return [
        Table(
            f"Activation gradients of seed {''.join(first)}: zeros, subnormal, and the largest magnitude, by scale",
            ("layer", *(f"{scale:g}" for scale in SCALES)),
            tuple((name, *cells(name)) for name in names),
        )
    ]


def draw(rows: Sequence[Row], path: Path) -> None:
    """For each scale, the exponents of the activation gradients of each layer, and their zeros."""
    first = seeds(rows)[:1]
    figure, panels = plt.subplots(1, len(SCALES), sharey=True, figsize=(11, 6), layout="constrained")
    image: Any = None
    for axes, scale in zip(panels, SCALES, strict=True):
        found = of(rows, LAYER, seed=first[0], scale=f"{scale:g}")
        shares = []
        for row in found:
            counts = torch.tensor([float(count) for count in row["exponents"].split()]) / number(row, "elements")
            shares.append([number(row, "zeros"), 0.0, *counts.tolist()])
        extent = (LOW - 2, HIGH + 1, len(found) - 0.5, -0.5)
        image = axes.imshow(
            shares, aspect="auto", cmap="Blues", interpolation="nearest", extent=extent, vmin=0, vmax=0.3
        )
        axes.axvline(-14, color="black", linewidth=0.8, linestyle="--")
        axes.set_yticks(range(len(found)), [row["layer"] for row in found], fontsize=8)
        axes.set_xticks([LOW - 1.5, -20, -14, -8, 0, 8], ["0", "-20", "-14", "-8", "0", "8"])
        axes.set_title(f"loss scale {scale:g}", fontsize=10)
        axes.set_xlabel("exponent; 0 at the left: zeros")
    figure.colorbar(image, ax=panels, label="share of a layer's activation gradients", extend="max")
    figure.suptitle("fp16 activation gradients. Left of the dashed line they are subnormal", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


ABOUT = """
A byte-level Transformer with fp16 weights (4 layers of width 128, AdamW of amp_kernels with a scaler) is trained for
300 steps on the source of Python's standard library. Then one batch goes through a backward pass at loss scales of 1,
2^8 and 2^16, and `amp_kernels.PrecisionReport` counts the exponents of the gradient of each layer's output.

The last two claims are about the time of these counts: of a whole training step of the demo's Transformer (4 layers of
width 256), and of a pass over 25 million gradients.
"""
PUBLISHED = (
    Table(
        "Activation gradients in Multibox SSD (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2)",
        ("what", "published"),
        (
            ("without a scale", "many values are below the range of fp16 and become 0, and the training diverges"),
            ("with a scale of 8", "the accuracy of fp32"),
        ),
    ),
)

EXPERIMENT = Experiment(
    name="underflow",
    title="Underflow in the backward pass",
    about=ABOUT,
    columns=(
        "part", "seed", "steps", "scale", "layer", "elements", "zeros", "subnormal", "nonfinite", "largest",
        "exponents", "time", "time_low", "time_high",
    ),
    runs=runs,
    claims=CLAIMS,
    tables=tables,
    draw=draw,
    published=PUBLISHED,
    rules=RULES,
)  # fmt: skip
