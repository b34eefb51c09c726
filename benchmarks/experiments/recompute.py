"""Recomputation against quantization: what a training step keeps in memory, how long it takes, what it learns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from amp_kernels.optim import FusedAdamW

from ..demo.training import Size, Transformer, batches
from ..plot import BLUES
from . import images, text
from .accumulation import losses
from .digits import Split
from .harness import (
    FALSIFIED,
    HOLDS,
    LEAST_SEEDS,
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
    no_loss,
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
STEP, LARGEST, TRAINED, DROPOUT, NORM = "step", "largest", "trained", "dropout", "batch norm"
MOMENTUM = 0.1  # of torch's batch norms: the share of the newest batch
TWICE, HALF = 1 - (1 - MOMENTUM) ** 2, 1 - math.sqrt(1 - MOMENTUM)  # the shares after two updates, and of half a one
ROUNDING, CLEAR = 1e-5, 1e-3  # relative distances that are rounding, and that are not


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


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, in the operators that BERT's code had when the published table was measured."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -math.inf).softmax(-1) @ v


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


class Written(nn.Module):
    """A block of the Transformer whose attention and GeLU are written out, and recomputed or not."""

    def __init__(self, block: nn.Module, recomputes: bool) -> None:
        super().__init__()
        self.block, self.recomputes = block, recomputes

    def run(self, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        return checkpoint(function, *args, use_reentrant=False) if self.recomputes else function(*args)

    def forward(self, x: Tensor) -> Tensor:
        b: Any = self.block
        q, k, v = b.qkv(b.norm1(x)).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4)
        x = x + b.out(self.run(attention, q, k, v).transpose(1, 2).flatten(2))
        return x + b.down(self.run(gelu, b.up(b.norm2(x))))


def _written(model: Transformer, recomputes: bool) -> Optimizer:
    model.blocks = nn.Sequential(*(Written(block, recomputes) for block in model.blocks))
    return _ours(model)


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
WRITTEN = Way("written out", prepare=partial(_written, recomputes=False))
PIECES = Way("attention and GeLU recomputed", prepare=partial(_written, recomputes=True))
BLOCKS = Way("written out, checkpoints", recomputes=True, prepare=partial(_written, recomputes=False))
WRITTEN_WAYS = WRITTEN, PIECES, BLOCKS
# No peer saves activations in int8. Each has something related: a backward pass that frees gradients at once, or
# products in int8, whose inputs could be saved as codes.
PEERS = (
    Way("flashoptim, gradients released", prepare=_flashoptim),
    Way("bitsandbytes, int8 products", prepare=_bitsandbytes),
    Way("torchao, int8 products", prepare=_torchao),
)
HUES = ("tab:gray", "tab:orange", *BLUES[:2], "black", "tab:green", "tab:red")
COLOURS = dict(zip((way.name for way in (*WAYS, *WRITTEN_WAYS)), HUES, strict=True))


@dataclass(frozen=True)
class Plan:
    size: Size
    dtype: torch.dtype
    ladder: tuple[int, ...]  # sequences in a batch
    budget: float  # MB
    rounds: int
    sequences: int  # that a training sees, whatever its batch
    epochs: int  # of the digits


def plan(settings: Settings) -> Plan:
    return settings.pick(
        # 16 MB and 6 GB are what a batch of 8 and of 16 to 20 takes where everything is kept.
        cpu=Plan(Size(4, 96, 64, 0), torch.float32, (2, 8), 16, 25, 3072, 5),
        cuda=Plan(Size(12, 768, 512, 0), torch.bfloat16, (4, 16), 6000, 15, 2048, 5),
        quick=Plan(Size(1, 32, 32, 0), torch.float32, (2,), 0.6, 3, 16, 1),
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
            if way not in PEERS:
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
            if way_named(name) in (PIECES, BLOCKS):
                row |= figures("of_written", ratio(seconds[name], seconds[WRITTEN.name]))
                row |= figures("of_blocks", ratio(seconds[name], seconds[BLOCKS.name]))
            rows.append(row)
    return rows


def way_named(name: str) -> Way:
    return next(way for way in (*WAYS, *WRITTEN_WAYS, *PEERS) if way.name == name)


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


# ------------------------------------------------------------------------------- what is computed twice, is it the same
class Recomputed(nn.Module):
    def __init__(self, part: nn.Module, keeps_state: bool = True) -> None:
        super().__init__()
        self.part, self.keeps_state = part, keeps_state

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, x, use_reentrant=False, preserve_rng_state=self.keeps_state)


def differing(model: nn.Module, other: nn.Module, gradients: bool) -> Row:
    """How many weights, or their gradients, are not the same bits."""

    def flat(of: nn.Module) -> Tensor:
        found = (p.grad if gradients else p.detach() for p in of.parameters())
        return torch.cat([t.flatten() for t in found if t is not None])

    a, b = flat(model), flat(other)
    return {"differ": int((a.view(torch.int32) != b.view(torch.int32)).sum()), "elements": len(a)}


def with_dropout(seed: int, device: torch.device) -> list[Row]:
    """Gradients of an MLP whose layers with dropout are recomputed, compared with those of the same MLP."""
    x, y = Split(seed, device).train
    found = {}
    for way, kept in (
        ("everything kept", None),
        ("preserve_rng_state=True", True),
        ("preserve_rng_state=False", False),
    ):
        torch.manual_seed(seed)
        hidden = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 64), nn.GELU(), nn.Dropout(0.5)
        )
        part = hidden if kept is None else Recomputed(hidden, kept)
        model = nn.Sequential(part, nn.Linear(64, 10)).to(device)
        torch.manual_seed(seed)
        nn.functional.cross_entropy(model(x), y).backward()
        found[way] = model
    base = found.pop("everything kept")
    rows = ({"way": way, **differing(model, base, gradients=True)} for way, model in found.items())
    return [{"part": DROPOUT, "seed": seed} | row for row in rows]


def two_parts(seed: int, device: torch.device, recomputes: bool, momentum: float = MOMENTUM) -> nn.Sequential:
    """The CNN for digits. Its first convolution and batch norm, of this momentum, may be recomputed."""
    torch.manual_seed(seed)
    layers = images.cnn()
    first, second = layers[:4], layers[4:]
    norm_of(first).momentum = momentum
    return nn.Sequential(Recomputed(first) if recomputes else first, second).to(device)


def norm_of(model: nn.Module) -> nn.BatchNorm2d:
    return next(layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d))


def distance(a: Tensor | None, b: Tensor | None) -> str:
    assert a is not None and b is not None
    return f"{((a - b).norm() / b.norm()).item():.4g}"


KEPT, AS_TWICE, REPEATED, AT_HALF = (
    "everything kept", f"everything kept, momentum {TWICE:.3g}", "recomputed", f"recomputed, momentum {HALF:.3g}",
)  # fmt: skip


def with_batch_norm(seed: int, epochs: int, device: torch.device) -> list[Row]:
    """A CNN after training: its weights, the running statistics of both batch norms, its accuracy."""
    split = Split(seed, device)
    trained = {}
    for way, options in ((KEPT, (False,)), (AS_TWICE, (False, TWICE)), (REPEATED, (True,)), (AT_HALF, (True, HALF))):
        model = trained[way] = two_parts(seed, device, *options)
        losses(model, split, seed, epochs)
    rows = []
    for way, model in trained.items():
        row: Row = {"part": NORM, "way": way, "seed": seed} | differing(model, trained[KEPT], gradients=False)
        for place, name in enumerate(("inside", "outside")):
            mine, kept, twice = (norm_of(each[place]) for each in (model, trained[KEPT], trained[AS_TWICE]))
            for what, column in (("mean", "means"), ("var", "variances")):
                a, b, c = (getattr(norm, f"running_{what}") for norm in (mine, kept, twice))
                row[f"{column}_{name}"] = distance(a, b)
                if name == "inside":
                    row[f"{column}_of_twice"] = distance(a, c)
        row["updates"] = int(norm_of(model[0]).num_batches_tracked or 0) / int(
            norm_of(model[1]).num_batches_tracked or 1
        )
        loss, accuracy = images.evaluate(model, split, torch.float32)
        rows.append(row | {"loss": f"{loss:.5f}", "accuracy": f"{accuracy:.4f}"})
    return rows


def runs(settings: Settings) -> list[Run]:
    of, device = plan(settings), settings.device
    shared = {
        "budget_mb": of.budget, "layers": of.size.layers, "width": of.size.width, "context": of.size.context,
        "precision": str(of.dtype).removeprefix("torch."), "rounds": of.rounds,
    }  # fmt: skip
    parts = [
        Run(f"batch {batch}", partial(side_by_side, of, batch, device, (*WAYS, *WRITTEN_WAYS))) for batch in of.ladder
    ]
    parts.append(Run("peers", partial(side_by_side, of, of.ladder[-1], device, (ALL, *PEERS))))
    parts.append(Run("largest batches", partial(within_budget, of, device)))
    for seed in settings.seeds:
        parts += [Run(f"trained, {way.name}, seed {seed}", partial(trained, of, way, seed, device)) for way in WAYS]
        filled = partial(trained, of, CHECKPOINTS, seed, device, True)
        parts.append(Run(f"trained, {CHECKPOINTS.name} in larger batches, seed {seed}", filled))
        parts.append(Run(f"{DROPOUT}, seed {seed}", partial(with_dropout, seed, device)))
        parts.append(Run(f"{NORM}, seed {seed}", partial(with_batch_norm, seed, of.epochs, device)))
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


def peaks(rows: Sequence[Row], way: Way, than: Way) -> dict[str, float]:
    """The ratio of the peaks, by batch."""
    found, base = ({row["batch"]: number(row, "peak_mb") for row in picked(rows, STEP, each)} for each in (way, than))
    ratios = {batch: value / base[batch] for batch, value in found.items() if batch in base}
    return {batch: value for batch, value in ratios.items() if not math.isnan(value)}


def has_at_most(way: Way, than: Way, limit: float, rows: Sequence[Row]) -> Verdict:
    """Of the other's peak."""
    found = peaks(rows, way, than)
    if not found:
        return Verdict(UNDECIDED, "Not measured.")
    count = sum(value <= limit for value in found.values())
    said = "; ".join(f"batch {batch}: {value:.2f} of the other peak" for batch, value in found.items())
    return decided(count == len(found), count == 0, f"{said}.")


def columns_of(part: str, way: str, names: Sequence[str], rows: Sequence[Row]) -> list[tuple[float, ...]]:
    """Of each seed."""
    mine = [row for row in rows if (row["part"], row["way"]) == (part, way)]
    found = [tuple(number(row, name) for name in names) for row in mine]
    return [values for values in found if not any(map(math.isnan, values))]


def is_the_same(part: str, way: str, opposite: bool, rows: Sequence[Row]) -> Verdict:
    """No bit differs in any seed; with `opposite`, some do in every seed."""
    found = columns_of(part, way, ("differ", "elements"), rows)
    if len(found) < LEAST_SEEDS:
        return Verdict(UNDECIDED, f"{len(found)} of {LEAST_SEEDS} seeds are there.")
    said = f"By seed, {', '.join(f'{differ:.0f}' for differ, _ in found)} of {found[0][1]:.0f} differ."
    some = [differ > 0 for differ, _ in found]
    return decided(all(some), not any(some), said) if opposite else decided(not any(some), all(some), said)


INSIDE = "means_inside", "variances_inside"


def updates_twice(rows: Sequence[Row]) -> Verdict:
    names = *INSIDE, "means_of_twice", "variances_of_twice", "means_outside", "variances_outside"
    found = columns_of(NORM, REPEATED, names, rows)
    if len(found) < LEAST_SEEDS:
        return Verdict(UNDECIDED, f"{len(found)} of {LEAST_SEEDS} seeds are there.")
    plain, twice, outside = ([max(v[k : k + 2]) for v in found] for k in (0, 2, 4))
    nearest = min(min(v[:2]) for v in found)
    said = (
        f"Relative distances of means and variances: recomputed, {nearest:.2g} to {max(plain):.2g} from those without "
        f"recomputation and up to {max(twice):.2g} from those with a momentum of {TWICE:.3g}; of the other batch norm, "
        f"up to {max(outside):.2g}."
    )
    good = [min(v[:2]) >= CLEAR and max(v[2:]) <= ROUNDING for v in found]
    return decided(all(good), not any(good), said)


def is_undone(rows: Sequence[Row]) -> Verdict:
    found = columns_of(NORM, AT_HALF, INSIDE, rows)
    if len(found) < LEAST_SEEDS:
        return Verdict(UNDECIDED, f"{len(found)} of {LEAST_SEEDS} seeds are there.")
    worst = [max(values) for values in found]
    said = f"The largest relative distance is {max(worst):.2g}."
    return decided(max(worst) <= ROUNDING, min(worst) > ROUNDING, said)


def evaluates_as_well(rows: Sequence[Row]) -> Verdict:
    found, base = (columns_of(NORM, way, ("accuracy",), rows) for way in (REPEATED, KEPT))
    if len(found) != len(base):
        return Verdict(UNDECIDED, "A seed is missing.")
    return no_loss([a - b for (a,), (b,) in zip(found, base, strict=True)], MARGIN)


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
    Claim(
        "Where attention and GeLU are written out in small operators, recomputing these two alone halves the peak of "
        "memory, or better (published: 0.36 of it).",
        'Holds if the peak is at most half of the peak of "written out", at every batch size. Falsified if it is more '
        "at every batch size. Otherwise undecided.",
        partial(has_at_most, PIECES, WRITTEN, 0.5),
    ),
    Claim(
        "Recomputing attention and GeLU alone lengthens a step, by half or less (published: 1.36 times).",
        'The ratio is to "written out". Holds if p20 >= 1 and p80 <= 1.5 at every batch size. Falsified if p80 < 1 '
        "or p20 > 1.5 at any batch size. Otherwise undecided.",
        partial(compared_time, STEP, PIECES, "of_written", 1.0, 1.5),
    ),
    Claim(
        "Recomputing attention and GeLU alone takes less time than checkpoints of whole blocks.",
        'The ratio is to "written out, checkpoints". Holds if p80 <= 1 at every batch size. Falsified if p20 > 1 at '
        "any. Otherwise undecided.",
        partial(compared_time, STEP, PIECES, "of_blocks", 0.0, 1.0),
    ),
    Claim(
        "With the fused attention and GeLU of torch nothing is left to gain: with everything kept, the peak is at most "
        "that of recomputing both where they are written out.",
        'Compares "everything kept" with "attention and GeLU recomputed". Holds if its peak is at most '
        "1.02 times as high at every batch size. Falsified if it is higher at every batch size. Otherwise undecided.",
        partial(has_at_most, ALL, PIECES, 1.02),
    ),
    Claim(
        "Recomputation with dropout gives the same gradients to the bit, with `preserve_rng_state=True`.",
        "Holds if no element differs in any seed. Falsified if some do in every seed. Otherwise, and with fewer than "
        f"{LEAST_SEEDS} seeds, undecided.",
        partial(is_the_same, DROPOUT, "preserve_rng_state=True", False),
    ),
    Claim(
        "Recomputation with dropout gives other gradients with `preserve_rng_state=False`.",
        "Holds if some elements differ in every seed. Falsified if none does in any seed. Otherwise, and with fewer "
        f"than {LEAST_SEEDS} seeds, undecided.",
        partial(is_the_same, DROPOUT, "preserve_rng_state=False", True),
    ),
    Claim(
        "A network with a recomputed batch norm learns the same weights to the bit.",
        "Holds if no weight differs in any seed after the training. Falsified if some do in every seed. Otherwise, and "
        f"with fewer than {LEAST_SEEDS} seeds, undecided.",
        partial(is_the_same, NORM, REPEATED, False),
    ),
    Claim(
        "The running statistics of a recomputed batch norm are updated twice a step, as with a momentum of "
        f"{TWICE:.3g} instead of {MOMENTUM:g}. Those of a batch norm that is not recomputed do not differ.",
        f"Holds if in every seed the relative distance of the running means and variances is at least {CLEAR:g} from "
        f"those without recomputation, at most {ROUNDING:g} from those with that momentum, and at most "
        f"{ROUNDING:g} for the other batch norm. Falsified if it is so in no seed. Otherwise, and with fewer than "
        f"{LEAST_SEEDS} seeds, undecided.",
        updates_twice,
    ),
    Claim(
        f"A momentum of 1 - sqrt(1 - {MOMENTUM:g}) = {HALF:.3g} for a recomputed batch norm undoes the second update.",
        f"Holds if the relative distance from the statistics without recomputation is at most {ROUNDING:g} in every "
        f"seed. Falsified if it is more in every seed. Otherwise, and with fewer than {LEAST_SEEDS} seeds, undecided.",
        is_undone,
    ),
    Claim(
        "The second update costs no accuracy.",
        f"Holds if d - 2s >= -{MARGIN}. Falsified if d + 2s < -{MARGIN}. Otherwise, and with fewer than {LEAST_SEEDS} "
        "seeds, undecided.",
        evaluates_as_well,
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
    title = "Held-out text after training on the same number of sequences, mean ± standard error"
    return [first, second, Table(title, columns, tuple(ends)), *repeated(rows)]


def repeated(rows: Sequence[Row]) -> list[Table]:
    """Dropout and batch norm under recomputation."""
    dropout = [row for row in rows if row["part"] == DROPOUT]
    norm = [row for row in rows if row["part"] == NORM]
    columns = "means_inside", "variances_inside", "means_outside", "variances_outside"

    def cells(way: str) -> tuple[str, ...]:
        found = [row for row in norm if row["way"] == way]
        ranges = [[number(row, column) for row in found] for column in columns]
        told = (f"{min(values):.2g} to {max(values):.2g}" for values in ranges)
        return (
            " ".join(row["differ"] for row in found),
            f"{number(found[0], 'updates'):g}",
            *told,
            shown([number(row, "accuracy") for row in found], 2),
        )

    return [
        Table(
            "Gradients with dropout that are not the same bits as without recomputation",
            ("recomputed with", "seed", "differ", "of"),
            tuple((row["way"], row["seed"], row["differ"], row["elements"]) for row in dropout),
        ),
        Table(
            "A CNN for digits whose first batch norm is recomputed, compared with everything kept: weights that differ "
            "by seed, updates of the running statistics in a step, relative distance of the running statistics of the "
            "first and of the second batch norm (range over the seeds), and accuracy ± standard error",
            ("way", "weights", "updates", "means, first", "variances, first", "means, second", "variances, second",
             "accuracy, %"),
            tuple((way, *cells(way)) for way in dict.fromkeys(row["way"] for row in norm)),
        ),
    ]  # fmt: skip


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

The published table recomputed only attention and GeLU, in a model of small operators, each of which saves activations.
The four ways above use torch's fused attention and GeLU, which save little more than their inputs. In three more ways
attention and GeLU are "written out" in small operators: with everything kept, with these two recomputed, and with every
block recomputed. All ways take turns in one process.

Memory is the bytes of activations and gradients in one step, without weights and optimizer state. "held" is what the
forward pass leaves; "peak" is the most during both passes. On a GPU the allocator counts it. On a CPU each tensor that
an operator returns counts, with the bytes of its storage, as long as it lives; scratch memory inside operators does not
count. Accuracy is the share of the bytes of held-out text that the model predicts, after training on the same number of
sequences. No other package saves activations in int8. The nearest features of the others are measured instead:
gradients that are released during the backward pass, and linear layers with int8 products.

A recomputed layer runs twice. That matters if it draws random numbers or has a state. Two networks for scikit-learn's
digits are compared with the same networks without recomputation. Of an MLP with dropout, the gradients of one step are
compared bit by bit. A CNN with two batch norms is trained. The first batch norm is recomputed, the second is not.

The rules on what is written out, on dropout and on batch norm were added later than the others. Before they were
committed, a pilot had shown peaks, and times of three rounds. With batches of 8, recomputing attention and GeLU alone
took 0.77 of the peak. The pilot changed no rule.
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
    figure.legend(handles, labels, fontsize=9, loc="outside upper center", ncols=4)
    left.set(
        xlabel="peak memory of a step, everything kept = 1 (lower is better)",
        ylabel="time of a step, everything kept = 1 (lower is better)",
    )
    left.set_xlim(left=0)
    left.set_title("What memory costs in time")
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
        "time", "time_low", "time_high", "of_checkpoints", "of_checkpoints_low", "of_checkpoints_high", "of_written",
        "of_written_low", "of_written_high", "of_blocks", "of_blocks_low", "of_blocks_high", "accuracy", "loss",
        "differ", "elements", "updates", "means_inside", "variances_inside", "means_of_twice", "variances_of_twice",
        "means_outside", "variances_outside", "budget_mb", "layers", "width", "context", "precision", "rounds",
    ),
    runs=runs,
    claims=CLAIMS,
    tables=tables,
    draw=draw,
    published=PUBLISHED,
    rules=RULES,
)  # fmt: skip
