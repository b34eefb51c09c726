"""Gradient accumulation: as the large batch in fp32, not with sums in 16 bits, and not with batch norm."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import amp_kernels
from amp_kernels.optim import FusedAdamW, FusedSGD

from . import images
from .digits import Split, network
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
    mean_and_error,
    number,
)
from .peers import first_line, reasons_below

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BATCH = 32  # of what the fp32 networks learn from in one step, as published
LARGE, SPLIT, SMALL, REORDERED = "32 x 1", "16 x 2", "16 x 1", "32 x 1, other order"
PARTS = {LARGE: 1, SPLIT: 2, SMALL: 1, REORDERED: 1}
NORM, NO_NORM = "batch norm", "no batch norm"
SGD: dict[str, Any] = {"lr": 0.02, "momentum": 0.9}
FEW = 10  # how many times the distance that rounding alone makes still counts as rounding

SIXTEEN = {"bf16": torch.bfloat16, "fp16": torch.float16}
WHOLE, IN_16, IN_32 = "one batch of 256", "256 x 1, sums in 16 bits", "256 x 1, sums in fp32"
MICRO_BATCHES = 256
ADAMW_LR = 3e-3
SCALE = 2.0**12  # of fp16's loss, a power of two: it rounds nothing
AS_GOOD = 1.5  # times the error of the whole batch in the same precision

CURVES, GRADIENTS = "curves", "16 bits"
COLOURS = {WHOLE: "tab:gray", IN_16: "tab:orange", IN_32: "tab:blue"}


def plan(settings: Settings) -> tuple[int, int, range]:
    """Epochs of the fp32 networks, steps of those in 16 bits, seeds of the former, which take a second each."""
    epochs, steps, seeds = settings.pick(cpu=(12, 40, 10), cuda=(10, 15, 4), quick=(1, 1, 1))
    return epochs, steps, range(seeds)


# ---------------------------------------------------------------------------------------------------- fp32, batch norm
def losses(
    model: nn.Module,
    split: images.Halves,
    seed: int,
    epochs: int,
    parts: int = 1,
    size: int = BATCH,
    turned: bool = False,
) -> list[float]:
    """Of each step. A step takes `size` images, in so many parts. `turned`: in the opposite order."""
    x, y = split.train
    optimizer = FusedSGD(model.parameters(), **SGD)
    found = []
    for batch in order(len(y), size, seed, epochs):
        batch = (batch.flip(0) if turned else batch).to(x.device)
        optimizer.zero_grad()
        loss = torch.zeros((), device=x.device)
        for part in batch.chunk(parts):
            each = F.cross_entropy(model(x[part]), y[part]) / parts
            each.backward()
            loss += each.detach()
        optimizer.step()
        found.append(loss)
    return torch.stack(found).tolist()


def order(count: int, size: int, seed: int, epochs: int) -> Iterator[Tensor]:
    """Full batches; those of 16 are the halves of those of 32."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield from torch.randperm(count, generator=generator)[: count // BATCH * BATCH].split(size)


def curves(norm: str, seed: int, epochs: int, device: torch.device) -> list[Row]:
    """Accuracy of each way; for those of as many steps as 32 x 1 the distance of the loss, step by step."""
    split = Split(seed, device)
    rows = []
    base: list[float] = []
    for of in PARTS:
        torch.manual_seed(seed)
        model = images.cnn(norm == NORM).to(device)
        found = losses(model, split, seed, epochs, PARTS[of], 16 if of == SMALL else BATCH, of == REORDERED)
        base = base or found
        loss, accuracy = images.evaluate(model, split, torch.float32)
        row = {"part": CURVES, "model": norm, "way": of, "dtype": "fp32", "seed": seed, "steps": len(found)}
        row |= {"accuracy": f"{accuracy:.4f}", "loss": f"{loss:.6f}"}
        if len(found) == len(base):
            distances = [abs(a - b) / b for a, b in zip(found, base, strict=True)]
            row |= {"distance": f"{max(distances):.4g}"}
            marks = sorted({round((len(base) - 1) * k / 20) for k in range(21)})
            row |= {"curve": " ".join(f"{step}:{max(distances[: step + 1]):.3g}" for step in marks)}
        rows.append(row)
    return rows


# ------------------------------------------------------------------------------------------------------------- 16 bits
def ours(parameters: list[nn.Parameter]) -> Optimizer:
    return FusedAdamW(parameters, ADAMW_LR)


def _torch(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, ADAMW_LR)


def _flashoptim(parameters: list[nn.Parameter]) -> Optimizer:
    import flashoptim

    return flashoptim.FlashAdamW(parameters, ADAMW_LR)


def _bitsandbytes(parameters: list[nn.Parameter]) -> Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW(parameters, ADAMW_LR)


def _torchao(parameters: list[nn.Parameter]) -> Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters, ADAMW_LR, bf16_stochastic_round=True)


PEERS = {
    "torch, AdamW": _torch,
    "flashoptim, FlashAdamW": _flashoptim,
    "bitsandbytes, AdamW": _bitsandbytes,
    "torchao, AdamW8bit": _torchao,
}


def backward(model: nn.Module, x: Tensor, y: Tensor, way: str, scaler: amp_kernels.GradScaler) -> None:
    for a, b in zip(*(t.chunk(1 if way == WHOLE else len(y)) for t in (x, y)), strict=True):
        scaler.scale(F.cross_entropy(model(a).float(), b) * (len(b) / len(y))).backward()


def gradient_error(model: nn.Module, scale: float, x: Tensor, y: Tensor) -> float:
    """Of all gradients together, relative to the whole batch in fp64 with the same weights."""
    exact = copy.deepcopy(model).double()
    F.cross_entropy(exact(x.double()), y).backward()
    found, expected = (
        torch.cat([p.grad.flatten().double() for p in of.parameters() if p.grad is not None]) for of in (model, exact)
    )
    return float((found / scale - expected).norm() / expected.norm())


@dataclass(frozen=True)
class Trained:
    """A classifier in 16 bits that learns with one way of summing."""

    dtype: str
    way: str
    make: Callable[[list[nn.Parameter]], Optimizer] = ours

    def measure(self, seed: int, steps: int, device: torch.device) -> Row:
        dtype, scale = SIXTEEN[self.dtype], SCALE if self.dtype == "fp16" else 1.0
        split = Split(seed, device)
        x, y = split.train[0].to(dtype), split.train[1]
        model = network(seed, device).to(dtype)
        for p in model.parameters() if self.way == IN_32 else ():
            p.grad_dtype = torch.float32
        optimizer = self.make(list(model.parameters()))
        scaler = amp_kernels.GradScaler(device.type, scale, enabled=scale != 1)
        generator = torch.Generator().manual_seed(seed)
        error = math.nan
        for step in range(steps):
            batch = torch.randperm(len(y), generator=generator)[:MICRO_BATCHES].to(device)
            optimizer.zero_grad()
            backward(model, x[batch], y[batch], self.way, scaler)
            if step == 0:  # all ways have the same weights
                error = gradient_error(model, scaler.get_scale(), x[batch], y[batch])
            scaler.step(optimizer)
            scaler.update()
        loss, accuracy = images.evaluate(model, split, dtype)
        row = {"error": f"{error:.4g}", "accuracy": f"{accuracy:.4f}", "loss": f"{loss:.6f}"}
        return row | {"part": GRADIENTS, "way": self.way, "dtype": self.dtype, "seed": seed, "steps": steps}


def sixteen(dtype: str, seed: int, steps: int, device: torch.device) -> list[Row]:
    return [Trained(dtype, way).measure(seed, steps, device) | {"model": "amp_kernels"} for way in COLOURS]


def peers(seed: int, steps: int, device: torch.device) -> list[Row]:
    """Which optimizers take sums in fp32 for bf16 weights, and what they learn from them."""
    rows = []
    for name, make in PEERS.items():
        try:
            # torchao compiles its step for each shape, which takes longer than this training
            with torch.compiler.set_stance("force_eager"):
                row = Trained("bf16", IN_32, make).measure(seed, steps, device)
        except Exception as error:  # whatever a peer raises is its reason
            row = {"part": GRADIENTS, "way": IN_32, "dtype": "bf16", "seed": seed, "note": first_line(error)}
        rows.append(row | {"model": name})
    return rows


def runs(settings: Settings) -> list[Run]:
    epochs, steps, seeds = plan(settings)
    device = settings.device
    parts = [
        Run(f"{norm}, seed {seed}", partial(curves, norm, seed, epochs, device))
        for norm in (NO_NORM, NORM)
        for seed in seeds
    ]
    for seed in settings.seeds:
        parts += [Run(f"{dtype}, seed {seed}", partial(sixteen, dtype, seed, steps, device)) for dtype in SIXTEEN]
        parts.append(Run(f"peers, seed {seed}", partial(peers, seed, steps, device)))
    return parts


# ---------------------------------------------------------------------------------------------------------- the claims
def column(rows: Sequence[Row], model: str, way: str, name: str, dtype: str = "fp32") -> dict[str, float]:
    """By seed."""
    key = model, way, dtype
    found = [row for row in rows if (row["model"], row["way"], row["dtype"]) == key and not row["note"]]
    return {row["seed"]: number(row, name) for row in found if not math.isnan(number(row, name))}


def paired(a: dict[str, float], b: dict[str, float]) -> list[float]:
    return [a[seed] - b[seed] for seed in a if seed in b]


def beside_rounding(norm: str, is_far: bool, rows: Sequence[Row]) -> Verdict:
    """The distance of 16 x 2 and that of another order. It is far beyond the largest of the latter, which batch norm
    enlarges. The median bounds what is near: some seeds amplify rounding a hundredfold."""
    found = column(rows, norm, SPLIT, "distance")
    networks = (NO_NORM, NORM) if norm == NORM else (NO_NORM,)
    control = [value for each in networks for value in column(rows, each, REORDERED, "distance").values()]
    if not found or not control:
        return Verdict(UNDECIDED, "Not measured.")
    rounding = max(control) if is_far else statistics.median(control)
    limit = FEW * rounding
    far = [value > limit for value in found.values()]
    yes, no = (all(far), not any(far)) if is_far else (not any(far), all(far))
    least, most = min(found.values()), max(found.values())
    control_told = f"up to {rounding:.2g}" if is_far else f"{rounding:.2g} in the median seed"
    told = (
        f"The largest relative difference of the two loss curves is {least:.2g} to {most:.2g} over {len(found)} seeds. "
        f"For comparison: another order of the images within the batches of 32 changes the curve by {control_told}."
    )
    return decided(yes, no, told)


def accuracies(
    norm: str, rule: Callable[[list[float], float, float], tuple[bool, bool]], rows: Sequence[Row]
) -> Verdict:
    """16 x 2 beside 32 x 1."""
    values = paired(column(rows, norm, SPLIT, "accuracy"), column(rows, norm, LARGE, "accuracy"))
    if len(values) < 2:
        return Verdict(UNDECIDED, "Fewer than two seeds.")
    mean, error = mean_and_error(values)
    yes, no = rule(values, mean, error)
    return decided(yes, no, f"{mean:+.3f} points, standard error {error:.3f}, {len(values)} seeds.")


def drift(dtype: str, rows: Sequence[Row]) -> Verdict:
    a, b = (column(rows, "amp_kernels", way, "error", dtype) for way in (IN_16, IN_32))
    ratios = [a[seed] / b[seed] for seed in a if seed in b]
    if len(ratios) < 2:
        return Verdict(UNDECIDED, "Fewer than two seeds.")
    mean, error = mean_and_error(ratios)
    word = HOLDS if mean - 2 * error > 2 else FALSIFIED if mean + 2 * error < 2 else UNDECIDED
    share = statistics.mean(a.values())
    return Verdict(
        word,
        f"Added up in {dtype} the gradient is {100 * share:.2g} % off. That is {mean:.2f} times the error of sums in "
        f"fp32, standard error {error:.2f}, {len(ratios)} seeds.",
    )


def no_drift(dtype: str, rows: Sequence[Row]) -> Verdict:
    a, b = (column(rows, "amp_kernels", way, "error", dtype) for way in (IN_32, WHOLE))
    ratios = [a[seed] / b[seed] for seed in a if seed in b]
    if len(ratios) < 2:
        return Verdict(UNDECIDED, "Fewer than two seeds.")
    mean, error = mean_and_error(ratios)
    return decided(
        mean + 2 * error <= AS_GOOD,
        mean - 2 * error > AS_GOOD,
        f"The error is {mean:.2f} times the error of the whole batch, standard error {error:.2f}, {len(ratios)} seeds.",
    )


CLAIMS = (
    Claim(
        "Without batch norm, two accumulated batches of 16 give the same loss curve as one batch of 32, in fp32.",
        "The largest relative difference of the loss over all steps is compared with the difference that another order "
        "of the images in each batch of 32 makes, which is rounding alone. Holds if, in every seed, the difference is "
        f"at most {FEW} times the median (over seeds) of what another order makes. Falsified if it is more in every "
        "seed. Otherwise undecided. (The rule was changed after the measurement. Until then the bound was "
        f"{FEW} times the maximum over seeds, which is a thousand times the differences that were measured.)",
        partial(beside_rounding, NO_NORM, False),
    ),
    Claim(
        "Without batch norm the accuracy is the same too (published: a mAP of 0.3770 both).",
        "Holds if the accuracies of every seed are equal. Falsified if the mean difference is more than 2 standard "
        "errors. Otherwise undecided.",
        partial(accuracies, NO_NORM, lambda values, mean, error: (not any(values), abs(mean) > 2 * error)),
    ),
    Claim(
        "With batch norm the loss curves differ.",
        "Another order of the images makes a difference too, by rounding. The bound is the largest difference by "
        "order, over all seeds, with and without batch norm. Holds if the largest relative difference is more than "
        f"{FEW} times this bound in every seed. Falsified if it is so in no seed. Otherwise undecided.",
        partial(beside_rounding, NORM, True),
    ),
    Claim(
        "With batch norm two batches of 16 end less accurate than one of 32 (published: 73.25 against 73.85).",
        "Holds if the mean difference is below 0 by more than 2 standard errors over seeds. Falsified if it is above "
        "0 by as much. Otherwise undecided.",
        partial(accuracies, NORM, lambda values, mean, error: (mean + 2 * error < 0, mean - 2 * error > 0)),
    ),
    *(
        Claim(
            f"A gradient of {MICRO_BATCHES} micro-batches in {dtype} drifts if it is added up in {dtype}: its error "
            "is more than twice the error with fp32 sums.",
            "r is the ratio of the errors, averaged over seeds; s is the standard error of r. Holds if r - 2s > 2. "
            "Falsified if r + 2s < 2. Otherwise undecided.",
            partial(drift, dtype),
        )
        for dtype in SIXTEEN
    ),
    *(
        Claim(
            f"A gradient of {MICRO_BATCHES} micro-batches in {dtype} does not drift if it is added up in fp32 "
            "(`p.grad_dtype = torch.float32`).",
            f"r is its error divided by the error of the whole batch in {dtype}, averaged over seeds; s is the "
            f"standard error of r. Holds if r + 2s <= {AS_GOOD}. Falsified if r - 2s > {AS_GOOD}. Otherwise undecided.",
            partial(no_drift, dtype),
        )
        for dtype in SIXTEEN
    ),
)


# ---------------------------------------------------------------------------------------------------------- the tables
def shown(values: Sequence[float], digits: int = 2) -> str:
    if not values:
        return ""
    mean, error = mean_and_error(values)
    return f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def tables(rows: Sequence[Row]) -> list[Table]:
    lines = []
    for norm in (NO_NORM, NORM):
        for way in PARTS:
            found = {name: column(rows, norm, way, name) for name in ("accuracy", "loss", "distance")}
            far = max(found["distance"].values(), default=math.nan)
            cells = shown([*found["accuracy"].values()]), shown([*found["loss"].values()], 4)
            lines.append((norm, way, *cells, "" if math.isnan(far) else f"{far:.2g}"))
    seeds = len(column(rows, NORM, LARGE, "accuracy"))
    title = f"A CNN in fp32 on the digits, mean ± standard error over {seeds} seeds"
    columns = (
        "network",
        "batch x accumulated",
        "accuracy, %",
        "test loss",
        "loss curve: largest relative distance",
    )
    first = Table(title, columns, tuple(lines))
    contenders = list(
        dict.fromkeys((row["model"], row["dtype"], row["way"]) for row in rows if row["part"] == GRADIENTS)
    )
    lines = []
    for model, dtype, way in contenders:
        errors, accuracy = (list(column(rows, model, way, name, dtype).values()) for name in ("error", "accuracy"))
        if accuracy:
            lines.append((model, dtype, way, shown([100 * value for value in errors], 3), shown(accuracy)))
    columns = "optimizer", "weights", "gradient of 256 images", "its error, %", "accuracy, %"
    title = "A classifier in 16 bits on the digits, mean ± standard error over seeds"
    return [first, Table(title, columns, tuple(lines), reasons_below(rows, "model"))]


PUBLISHED = (
    Table(
        "Faster R-CNN without batch norm: mAP by batch x accumulated batches (MMCV, pull request 1221)",
        ("2 x 1", "1 x 2", "1 x 1"),
        (("0.3770", "0.3770", "0.3660"),),
    ),
    Table(
        "ResNet-34 with batch norm: accuracy in % by batch x accumulated batches (MMCV, pull request 1221)",
        ("32 x 1", "16 x 2", "16 x 1"),
        (("73.85", "73.25", "73.19"),),
    ),
)
ABOUT = """
A small CNN learns scikit-learn's digits in fp32 with SGD, with or without batch norm. One training takes batches of 32.
A second takes two batches of 16 with the same images and adds up their gradients. A third takes batches of 16 alone and
twice as many steps. In a fourth the images within each batch of 32 have another order. This changes only the rounding,
so it shows how far apart two loss curves are that are equal except for rounding.

An MLP with 16-bit weights then learns from 256 images a step: in one batch; one image after another, added up in
`.grad`, which has 16 bits; and one after another with `p.grad_dtype = torch.float32`. The error is the distance between
the first step's gradient and the gradient of the whole batch in fp64, relative to the latter. The fp32 sums are passed
to the optimizer of each package, with bf16 weights. If an optimizer refuses them, the list below the table quotes its
error.
"""


# --------------------------------------------------------------------------------------------------------- the picture
def draw(rows: Sequence[Row], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.5), layout="constrained", width_ratios=(4, 3))
    lines = ((NORM, SPLIT, "tab:red", "16 x 2, batch norm"), (NO_NORM, SPLIT, "tab:green", "16 x 2, no batch norm"))
    for norm, way, colour, label in (*lines, (NO_NORM, REORDERED, "black", "32 x 1 in another order, no batch norm")):
        for k, row in enumerate(row for row in rows if (row["model"], row["way"]) == (norm, way)):
            points = [tuple(map(float, point.split(":"))) for point in row["curve"].split()]
            points = [(step, distance) for step, distance in points if distance > 0]  # a logarithm has no 0
            left.plot(*zip(*points, strict=True), color=colour, alpha=0.7, linewidth=1, label="" if k else label)
    left.set(
        yscale="log", xlabel="step; a line for each seed", ylabel="largest relative distance so far (lower is nearer)"
    )
    left.set_title("fp32: distance of the loss from that of 32 x 1", fontsize=11)
    left.legend(fontsize=8, loc="center left", bbox_to_anchor=(0, 0.62))
    left.grid(alpha=0.3)
    for k, (way, colour) in enumerate(COLOURS.items()):
        for place, dtype in enumerate(SIXTEEN):
            values = [100 * value for value in column(rows, "amp_kernels", way, "error", dtype).values()]
            if values:
                mean, error = mean_and_error(values)
                yerr = None if math.isnan(error) else error
                bar = right.bar(
                    place + 0.27 * (k - 1), mean, 0.25, yerr=yerr, capsize=3, color=colour, label="" if place else way
                )
                right.bar_label(bar, fmt="%.2g", fontsize=8, padding=2)
    right.set_xticks(range(len(SIXTEEN)), SIXTEEN)
    right.set(ylabel="% of the gradient in fp64 (lower is better)")
    right.set_title("16 bits: error of the gradient", fontsize=11)
    right.margins(y=0.35)
    right.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


EXPERIMENT = Experiment(
    name="accumulation",
    title="Accumulation equals the large batch",
    about=ABOUT,
    columns=("part", "model", "way", "dtype", "seed", "steps", "accuracy", "loss", "distance", "error", "curve"),
    runs=runs,
    claims=CLAIMS,
    tables=tables,
    draw=draw,
    published=PUBLISHED,
)
