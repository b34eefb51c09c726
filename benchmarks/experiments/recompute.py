"""Recomputation against quantization: what a training step keeps in memory, how long it takes, what it learns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import matplotlib
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_kernels.optim import FusedAdamW

from ..demo.training import Size, Transformer, batches
from ..plot import BLUES
from . import text
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
    mean_and_error,
    number,
    ratio,
    seconds_side_by_side,
    spread,
)
from .memory import Bytes, of_both_passes
from .peers import first_line, reasons_below

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

LR = 1e-3
MARGIN = 0.3  # points: published accuracies in 16 bits and in fp32 differ by at most this (experiment 1)
STEP, LARGEST, TRAINED = "step", "largest", "trained"


# ------------------------------------------------------------------------------------------------------ the contenders
def _ours(model: Transformer) -> Optimizer:
    return FusedAdamW(model.parameters(), LR, max_grad_norm=1.0)


def _flashoptim(model: Transformer) -> Optimizer:
    import flashoptim

    optimizer = flashoptim.FlashAdamW(model.parameters(), LR)
    flashoptim.enable_gradient_release(model, optimizer)
    return optimizer


def _bitsandbytes(model: Transformer) -> Optimizer:
    import bitsandbytes

    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                int8 = bitsandbytes.nn.Linear8bitLt(layer.in_features, layer.out_features)
                int8.load_state_dict(layer.state_dict())
                setattr(block, name, int8.to(layer.weight))
    return _ours(model)


def _torchao(model: Transformer) -> Optimizer:
    from torchao.prototype.quantized_training import int8_mixed_precision_training
    from torchao.quantization import quantize_

    quantize_(model.blocks, int8_mixed_precision_training())
    return torch.optim.AdamW(model.parameters(), LR)


@dataclass(frozen=True)
class Way:
    """How activations wait for the backward pass."""

    name: str
    recomputes: bool = False
    saves_int8: bool = False
    prepare: Callable[[Transformer], Optimizer] = _ours


ALL = Way("everything kept")
CHECKPOINTS = Way("checkpoints", recomputes=True)
INT8 = Way("int8 kept", saves_int8=True)
BOTH = Way("int8 checkpoints", recomputes=True, saves_int8=True)
WAYS = ALL, CHECKPOINTS, INT8, BOTH
# No peer saves activations in int8. Each has something related: a backward pass that frees gradients at once, or
# products in int8, whose inputs could be saved as codes.
PEERS = (
    Way("flashoptim, gradients released", prepare=_flashoptim),
    Way("bitsandbytes, int8 products", prepare=_bitsandbytes),
    Way("torchao, int8 products", prepare=_torchao),
)
COLOURS = dict(zip((way.name for way in WAYS), ("tab:gray", "tab:orange", *BLUES[:2]), strict=True))


@dataclass(frozen=True)
class Plan:
    size: Size
    dtype: torch.dtype
    ladder: tuple[int, ...]  # sequences in a batch
    budget: float  # MB
    rounds: int
    sequences: int  # that a training sees, whatever its batch


def plan(settings: Settings) -> Plan:
    return settings.pick(
        # 16 MB and 6 GB are what a batch of 8 and of 16 to 20 takes where everything is kept.
        cpu=Plan(Size(4, 96, 64, 0), torch.float32, (2, 8), 16, 25, 3072),
        cuda=Plan(Size(12, 768, 512, 0), torch.bfloat16, (4, 16), 6000, 15, 2048),
        quick=Plan(Size(1, 32, 32, 0), torch.float32, (2,), 0.6, 3, 16),
    )


class Training:
    """One way under way."""

    def __init__(self, way: Way, batch: int, of: Plan, device: torch.device, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.way, self.device, self.context = way, device, of.size.context
        self.model = Transformer(of.size).to(device, of.dtype)
        self.optimizer = way.prepare(self.model)
        self.batches = batches(text.text(device)[0], replace(of.size, batch=batch), seed)

    def loss(self, batch: Tensor) -> Tensor:
        return text.loss(self.model, batch, self.way.recomputes, self.way.saves_int8)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(next(self.batches)).backward()
        self.optimizer.step()

    def memory(self) -> Bytes:
        """The bytes that a step takes in addition to weights and optimizer. The step changes nothing."""
        batch = next(self.batches)
        if batch.is_cuda:  # a first pass makes what stays: handles, workspaces
            self.loss(batch).backward()
        self.optimizer.zero_grad()
        found = of_both_passes(lambda: self.loss(batch), self.device)
        self.optimizer.zero_grad()
        return found


# ------------------------------------------------------------------------------------------------------------ the runs
def megabytes(found: Bytes) -> Row:
    return {"held_mb": f"{found.held / 1e6:.4g}", "peak_mb": f"{found.peak / 1e6:.4g}"}


def side_by_side(of: Plan, batch: int, device: torch.device, ways: Sequence[Way]) -> list[Row]:
    """A row for each way at one batch size; everything kept is the first."""
    trainings, memory, rows = {}, {}, []
    for way in ways:
        try:
            training = Training(way, batch, of, device)
            memory[way.name] = training.memory()
            training.step()
        except Exception as error:  # whatever a peer raises is its reason
            if way in WAYS:
                raise
            rows.append({"part": STEP, "way": way.name, "batch": batch, "note": first_line(error)})
        else:
            trainings[way.name] = training
    seconds = seconds_side_by_side({name: each.step for name, each in trainings.items()}, of.rounds, device)
    for name, found in memory.items():
        if name in trainings:
            row = {"part": STEP, "way": name, "batch": batch, **megabytes(found)}
            row |= {"peak_ratio": f"{found.peak / memory[ALL.name].peak:.4g}"}
            row |= {"held_ratio": f"{found.held / memory[ALL.name].held:.4g}"}
            row |= figures("time", ratio(seconds[name], seconds[ALL.name]))
            if CHECKPOINTS.name in seconds:
                row |= figures("of_checkpoints", ratio(seconds[name], seconds[CHECKPOINTS.name]))
            rows.append(row)
    return rows


def largest(way: Way, of: Plan, device: torch.device) -> int:
    """The largest batch whose peak is within the budget, at least 1."""

    def fits(batch: int) -> bool:
        try:
            return Training(way, batch, of, device).memory().peak <= 1e6 * of.budget
        except torch.OutOfMemoryError:  # of a GPU that has little more than the budget
            return False

    low = 1
    while fits(2 * low):
        low *= 2
    high = 2 * low  # does not fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def within_budget(of: Plan, device: torch.device) -> list[Row]:
    """Each way at its own largest batch: time per sequence."""
    sizes = {way: largest(way, of, device) for way in WAYS}
    trainings = {way: Training(way, batch, of, device) for way, batch in sizes.items()}
    peaks = {way: training.memory() for way, training in trainings.items()}
    seconds = seconds_side_by_side({way.name: each.step for way, each in trainings.items()}, of.rounds, device)
    each = {way: [time / batch for time in seconds[way.name]] for way, batch in sizes.items()}
    return [
        {"part": LARGEST, "way": way.name, "batch": batch, **megabytes(peaks[way])}
        | figures("time", ratio(each[way], each[ALL]))
        for way, batch in sizes.items()
    ]


def trained(of: Plan, way: Way, seed: int, device: torch.device, fills: bool = False) -> list[Row]:
    """At the batch that everything kept allows or, with `fills`, at the way's own largest."""
    batch = largest(way if fills else ALL, of, device)
    training = Training(way, batch, of, device, seed)
    steps = max(1, of.sequences // batch)
    for _ in range(steps):
        training.step()
    loss, accuracy = text.evaluate(training.model, training.context, device)
    row = {"part": TRAINED, "way": way.name, "batch": batch, "seed": seed, "steps": steps, "fills": int(fills)}
    return [row | {"loss": f"{loss:.5f}", "accuracy": f"{accuracy:.4f}"}]


def runs(settings: Settings) -> list[Run]:
    of, device = plan(settings), settings.device
    shared = {
        "budget_mb": of.budget, "layers": of.size.layers, "width": of.size.width, "context": of.size.context,
        "precision": str(of.dtype).removeprefix("torch."), "rounds": of.rounds,
    }  # fmt: skip
    parts = [Run(f"batch {batch}", partial(side_by_side, of, batch, device, WAYS)) for batch in of.ladder]
    parts.append(Run("peers", partial(side_by_side, of, of.ladder[-1], device, (ALL, *PEERS))))
    parts.append(Run("largest batches", partial(within_budget, of, device)))
    for seed in settings.seeds:
        parts += [Run(f"trained, {way.name}, seed {seed}", partial(trained, of, way, seed, device)) for way in WAYS]
        filled = partial(trained, of, CHECKPOINTS, seed, device, True)
        parts.append(Run(f"trained, {CHECKPOINTS.name} in larger batches, seed {seed}", filled))
    return [Run(part.key, partial(_with, shared, part.measure)) for part in parts]


def _with(shared: Row, measure: Callable[[], list[Row]]) -> list[Row]:
    return [shared | row for row in measure()]


# ---------------------------------------------------------------------------------------------------------- the claims
def picked(rows: Sequence[Row], part: str, way: Way | None = None) -> list[Row]:
    found = [row for row in rows if row["part"] == part and not row["note"] and row["run"] != "peers"]
    return [row for row in found if way is None or row["way"] == way.name]


def halves_memory(rows: Sequence[Row]) -> Verdict:
    found = {row["batch"]: number(row, "peak_ratio") for row in picked(rows, STEP, CHECKPOINTS)}
    found = {batch: value for batch, value in found.items() if not math.isnan(value)}
    if not found:
        return Verdict(UNDECIDED, "Not measured.")
    count = sum(value <= 0.5 for value in found.values())
    return decided(
        count == len(found),
        count == 0,
        "; ".join(f"batch {batch}: {value:.2f} of the peak without checkpoints" for batch, value in found.items())
        + ".",
    )


def compared_time(part: str, way: Way, column: str, low: float, high: float, rows: Sequence[Row]) -> Verdict:
    """The ratio lies between `low` and `high`."""
    found = [row for row in picked(rows, part, way) if not math.isnan(number(row, column))]
    if not found:
        return Verdict(UNDECIDED, "Not measured.")
    yes = [spread(row, column)[1] >= low and spread(row, column)[2] <= high for row in found]
    no = [spread(row, column)[2] < low or spread(row, column)[1] > high for row in found]
    word = HOLDS if all(yes) else FALSIFIED if any(no) else UNDECIDED
    told = (
        f"batch {row['batch']}: {middle:.2f} times as long ({a:.2f} to {b:.2f})"
        for row in found
        for middle, a, b in [spread(row, column)]
    )
    return Verdict(word, "; ".join(told) + ".")


def differences(rows: Sequence[Row], way: Way, fills: bool = False) -> list[float]:
    """Points of accuracy beside everything kept, seed by seed."""
    found = {(row["way"], row["seed"], row["fills"]): number(row, "accuracy") for row in picked(rows, TRAINED)}
    mine = {seed: value for (name, seed, full), value in found.items() if (name, full) == (way.name, str(int(fills)))}
    return [value - found[ALL.name, seed, "0"] for seed, value in mine.items() if (ALL.name, seed, "0") in found]


def told(values: Sequence[float]) -> tuple[float, float, str]:
    mean, error = mean_and_error(values)
    return mean, error, f"{mean:+.3f} points, standard error {error:.3f}, {len(values)} seeds."


def equal_accuracy(rows: Sequence[Row]) -> Verdict:
    values = differences(rows, CHECKPOINTS)
    if len(values) < 2:
        return Verdict(UNDECIDED, "Fewer than two seeds.")
    mean, error, words = told(values)
    return decided(all(abs(v) < 0.005 for v in values), abs(mean) > 2 * error, words)


def lower_accuracy(rows: Sequence[Row]) -> Verdict:
    values = differences(rows, CHECKPOINTS, fills=True)
    if len(values) < 2:
        return Verdict(UNDECIDED, "Fewer than two seeds.")
    mean, error, words = told(values)
    return decided(mean + 2 * error < 0, mean - 2 * error > 0, words)


def no_worse(way: Way, rows: Sequence[Row]) -> Verdict:
    values = differences(rows, way)
    if len(values) < 2:
        return Verdict(UNDECIDED, "Fewer than two seeds.")
    mean, error, words = told(values)
    return decided(mean - 2 * error >= -MARGIN, mean + 2 * error < -MARGIN, words)


RULES = """
A ratio of times is taken within a round. p20 and p80 are its 20th and 80th percentile over the rounds. Differences in
accuracy are in points, against the run "everything kept" with the same seed; d is their mean over the seeds, s the
standard error of d.
"""
CLAIMS = (
    Claim(
        "Activation checkpoints halve the peak of memory, or better (published: 0.36 of it).",
        'Holds if the peak is at most half of the peak of "everything kept", at every batch size. Falsified if '
        "it is more than half at every batch size. Otherwise undecided.",
        halves_memory,
    ),
    Claim(
        "Checkpoints lengthen a step, by half or less (published: 1.36 times).",
        'The ratio is to "everything kept". Holds if p20 >= 1 and p80 <= 1.5 at every batch size. Falsified if p80 < 1 '
        "or p20 > 1.5 at any batch size. Otherwise undecided.",
        partial(compared_time, STEP, CHECKPOINTS, "time", 1.0, 1.5),
    ),
    Claim(
        "Checkpoints change no accuracy (published: 0.7997 both).",
        "Holds if the accuracies differ by less than 0.005 points in every seed. Falsified if |d| > 2s. Otherwise "
        "undecided.",
        equal_accuracy,
    ),
    Claim(
        "With the largest batch that fits the memory, checkpoints still take longer per sequence than "
        '"everything kept" with its largest batch (published: 1.16 times).',
        "The ratio compares the times per sequence. Holds if p20 >= 1. Falsified if p80 < 1. Otherwise undecided.",
        partial(compared_time, LARGEST, CHECKPOINTS, "time", 1.0, math.inf),
    ),
    Claim(
        "After the same number of sequences the larger batch ends less accurate (published: 0.7946 against 0.7997).",
        "Holds if d + 2s < 0. Falsified if d - 2s > 0. Otherwise undecided.",
        lower_accuracy,
    ),
    Claim(
        "A step with int8 kept takes less time than one with checkpoints.",
        "The ratio is to checkpoints. Holds if p80 <= 1 at every batch size. Falsified if p20 > 1 at any. Otherwise "
        "undecided.",
        partial(compared_time, STEP, INT8, "of_checkpoints", 0.0, 1.0),
    ),
    *(
        Claim(
            f"Training with {way.name} loses no accuracy.",
            f"Holds if d - 2s >= -{MARGIN}. Falsified if d + 2s < -{MARGIN}. Otherwise undecided.",
            partial(no_worse, way),
        )
        for way in (INT8, BOTH)
    ),
)


# ---------------------------------------------------------------------------------------------------------- the tables
def shown(values: Sequence[float], digits: int) -> str:
    mean, error = mean_and_error(values)
    return f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def tables(rows: Sequence[Row]) -> list[Table]:
    if not rows:
        return []
    of = rows[0]
    model = f"{of['layers']} layers of width {of['width']}, context {of['context']}, {of['precision']}"
    told_as = "{:.2f} ({:.2f} to {:.2f})"
    steps = [row for row in rows if row["part"] == STEP and not row["note"]]
    seen: dict[tuple[str, str], Row] = {}
    for row in steps:  # those of the peers come last, with everything kept once more
        seen.setdefault((row["batch"], row["way"]), row)
    lines = sorted(seen.values(), key=lambda row: int(row["batch"]))
    columns = "batch", "way", "held for the backward pass", "peak", "time (20th to 80th percentile)"
    cells = (
        (row["batch"], row["way"], row["held_ratio"], row["peak_ratio"], told_as.format(*spread(row, "time")))
        for row in lines
    )
    first = Table(
        f'One step, as a multiple of "everything kept" at the same batch; {model}',
        columns,
        tuple(cells),
        reasons_below(rows, "way"),
    )
    full = (
        (row["way"], row["batch"], row["peak_mb"], told_as.format(*spread(row, "time")))
        for row in picked(rows, LARGEST)
    )
    title = f"Largest batch whose activations and gradients fit {of['budget_mb']} MB"
    of_largest = "way", "batch", "peak, MB", "time per sequence (everything kept: 1)"
    second = Table(title, of_largest, tuple(full))
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in picked(rows, TRAINED):
        groups.setdefault((row["way"], row["batch"], row["steps"]), []).append(row)
    ends = (
        (
            *key,
            shown([number(row, "accuracy") for row in group], 2),
            shown([number(row, "loss") for row in group], 4),
        )
        for key, group in groups.items()
    )
    columns = "way", "batch", "steps", "bytes predicted, %", "loss"
    return [
        first,
        second,
        Table(
            "Held-out text after training on the same number of sequences, mean ± standard error", columns, tuple(ends)
        ),
    ]


PUBLISHED = (
    Table(
        "Fine-tuning with and without checkpoints (the blog of qywu, qywu.github.io)",
        ("way", "batch", "memory, MB", "time", "accuracy"),
        (
            ("everything kept", "24", "10972", "27m05s", "0.7997"),
            ("checkpoints", "24", "3944 (0.36)", "36m50s (1.36)", "0.7997"),
            ("checkpoints", "132", "10212 (0.93)", "31m20s (1.16)", "0.7946"),
        ),
    ),
)
ABOUT = """
A causal Transformer learns to predict the source of Python's standard library byte by byte. It is trained in four ways,
with the same initial weights and batches:

- everything kept: what the backward pass needs stays in memory
- checkpoints: every block is computed again under `torch.utils.checkpoint`
- int8 kept: `int8_saved_activations` quantizes what autograd saves
- int8 checkpoints: both; what the checkpoints save is int8

The four ways take turns in one process.

Memory is the bytes of activations and gradients in one step, without weights and optimizer state. "held" is what the
forward pass leaves; "peak" is the most during both passes. On a GPU the allocator counts it. On a CPU each tensor that
an operator returns counts, with the bytes of its storage, as long as it lives; scratch memory inside operators does not
count. Accuracy is the share of the bytes of held-out text that the model predicts, after training on the same number of
sequences. No other package saves activations in int8. The nearest features of the others are measured instead:
gradients that are released during the backward pass, and linear layers with int8 products.
"""


# --------------------------------------------------------------------------------------------------------- the picture
def draw(rows: Sequence[Row], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.5), layout="constrained", width_ratios=(3, 2))
    markers = dict(zip(sorted({row["batch"] for row in picked(rows, STEP)}, key=int), "o^sDv", strict=False))
    aside = {CHECKPOINTS.name: -0.01, BOTH.name: 0.01}  # both have nearly the same peak
    for row in picked(rows, STEP):
        middle, low, high = spread(row, "time")
        bars = [[middle - low], [high - middle]]
        style = {"color": COLOURS[row["way"]], "marker": markers[row["batch"]], "markersize": 8, "capsize": 3}
        left.errorbar(number(row, "peak_ratio") + aside.get(row["way"], 0), middle, yerr=bars, **style)
    handles = [Line2D([], [], color=colour, marker="s", linestyle="") for colour in COLOURS.values()]
    handles += [Line2D([], [], color="black", marker=marker, linestyle="") for marker in markers.values()]
    labels = [*COLOURS, *(f"batch {batch}" for batch in markers)]
    figure.legend(handles, labels, fontsize=9, loc="outside upper center", ncols=len(labels))
    left.set(
        xlabel="peak memory of a step, everything kept = 1 (lower is better)",
        ylabel="time of a step, everything kept = 1 (lower is better)",
    )
    left.set(xlim=(0, 1.1), title="What memory costs in time")
    left.grid(alpha=0.3)
    full = picked(rows, LARGEST)
    bars = right.bar([row["way"].replace(" ", "\n") for row in full], [int(row["batch"]) for row in full])
    for bar, row in zip(bars, full, strict=True):
        bar.set_color(COLOURS[row["way"]])
    right.bar_label(bars)
    right.margins(y=0.1)
    right.tick_params(axis="x", labelsize=8)
    right.set(
        ylabel="sequences (higher is better)", title=f"Largest batch in {rows[0]['budget_mb'] if rows else '?'} MB"
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


EXPERIMENT = Experiment(
    name="recompute",
    title="Recomputation against quantization",
    about=ABOUT,
    columns=(
        "part", "way", "batch", "seed", "steps", "fills", "held_mb", "peak_mb", "held_ratio", "peak_ratio",
        "time", "time_low", "time_high", "of_checkpoints", "of_checkpoints_low", "of_checkpoints_high", "accuracy",
        "loss", "budget_mb", "layers", "width", "context", "precision", "rounds",
    ),
    runs=runs,
    claims=CLAIMS,
    tables=tables,
    draw=draw,
    published=PUBLISHED,
    rules=RULES,
)  # fmt: skip
