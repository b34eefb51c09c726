"""Codes for 8-bit optimizer states: which of them keep a training as it is with fp32 states."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..demo.training import Size, Transformer, batches
from ..plot import BLUES
from . import codes, encoder, images, quantization, text
from .codes import NEAREST, SIGNED, STOCHASTIC, UNSIGNED, Code, stored
from .digits import Split
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
    mean_and_error,
    number,
)

matplotlib.use("Agg")
import matplotlib.pyplot as plt

GROUPS = (32, 64, 128, 256)
GROUP = 128
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
EXPLODED = 10.0  # times the largest update of fp32 states
ROUNDINGS = (NEAREST, STOCHASTIC)
MOMENTA = (codes.linear(SIGNED), codes.root(SIGNED), codes.softsign(), codes.dynamic(is_signed=True))
FLOORED = (codes.root(UNSIGNED, lowest=1), codes.fourth_root(lowest=1), codes.logarithmic(lowest=1))
WITH_ZERO = (
    codes.linear(UNSIGNED), codes.root(UNSIGNED), codes.fourth_root(), codes.logarithmic(),
    codes.dynamic(is_signed=False),
)  # fmt: skip
CHOSEN = (codes.root(SIGNED), codes.fourth_root(lowest=1))
UPDATE, DRIFT, DECAY, LOSS = "update", "drift", "decay", "loss"
TRANSFORMER, CNN, ROWS, ENCODER = "byte Transformer", "digits CNN", "embedding with rare rows", "MiniLM encoder"


def name_of(code: Code) -> str:
    return code.name + (", no zero" if code.lowest else "")


# ------------------------------------------------------------------------------------------------------ Adam by hand
@dataclass(frozen=True)
class Storage:
    """How Adam's two states are stored. None: in fp32."""

    momentum: Code | None = None
    second: Code | None = None
    rounding: str = NEAREST
    group: int = GROUP

    def row(self) -> Row:
        names = {"momentum": self.momentum, "second": self.second}
        found: Row = {key: "fp32" if code is None else name_of(code) for key, code in names.items()}
        return found | {"rounding": self.rounding if self.momentum or self.second else "", "group": self.group}


class Adam:
    """Adam on flat fp32 tensors whose sizes are multiples of all groups. Both states are stored after each step."""

    def __init__(self, size: int, storage: Storage, seed: int = 0):
        self.storage, self.steps = storage, 0
        self.exp_avg, self.exp_avg_sq = torch.zeros(size), torch.zeros(size)
        self._generator = torch.Generator().manual_seed(seed)

    def update(self, grad: Tensor) -> Tensor:
        """Move the states, and return the change of the weights for a learning rate of -1."""
        self.steps += 1
        self.exp_avg.lerp_(grad, 1 - BETA1)
        self.exp_avg_sq.lerp_(grad.square(), 1 - BETA2)
        update = self.direction()
        how = self.storage.rounding, self.storage.group, self._generator
        if self.storage.momentum is not None:
            self.exp_avg = stored(self.exp_avg, self.storage.momentum, *how)
        if self.storage.second is not None:
            self.exp_avg_sq = stored(self.exp_avg_sq, self.storage.second, *how)
        return update

    def direction(self) -> Tensor:
        """The update that the states would make now."""
        corrected = self.exp_avg_sq / (1 - BETA2**self.steps)
        return self.exp_avg / (1 - BETA1**self.steps) / (corrected.sqrt() + EPS)


class Flat:
    """The parameters and gradients of a model in two flat tensors. Each parameter begins at a multiple of 256."""

    def __init__(self, model: nn.Module):
        parameters = list(model.parameters())
        sizes = [-(-parameter.numel() // max(GROUPS)) * max(GROUPS) for parameter in parameters]
        self.weight, self.grad = torch.zeros(sum(sizes)), torch.zeros(sum(sizes))
        self.exists = torch.zeros(sum(sizes), dtype=torch.bool)
        first = 0
        for parameter, size in zip(parameters, sizes, strict=True):
            place = slice(first, first + parameter.numel())
            self.weight[place] = parameter.data.flatten()
            parameter.data, parameter.grad = (x[place].view_as(parameter) for x in (self.weight, self.grad))
            self.exists[place] = True
            first += size


# ---------------------------------------------------------------------------------------------------------- trainings
class RareRows(nn.Module):
    """An embedding of 1024 rows that occur by Zipf's law, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(1024, 64), nn.Linear(64, 32)
        nn.init.normal_(self.rows.weight, std=0.1)

    def losses(self, seed: int) -> Iterator[Tensor]:
        probabilities = 1 / torch.arange(1, 1025).float()
        targets = (2 * torch.randn(1024, 32, generator=torch.Generator().manual_seed(1))).softmax(-1)
        generator = torch.Generator().manual_seed(seed)
        while True:
            rows = torch.multinomial(probabilities, 64, replacement=True, generator=generator)
            wanted = torch.multinomial(targets[rows], 1, generator=generator)[:, 0]
            yield F.cross_entropy(self.head(self.rows(rows)), wanted)


def losses_of(name: str, seed: int, size: Size) -> tuple[Any, Iterator[Tensor], float]:
    """A model, its losses without end, and a learning rate."""
    torch.manual_seed(seed)
    cpu = torch.device("cpu")
    if name == TRANSFORMER:
        transformer = Transformer(size)
        return transformer, map(transformer, batches(text.text(cpu)[0], size, seed)), 1e-3
    if name == CNN:
        return (cnn := images.cnn()), _digits(cnn, seed), 1e-3
    if name == ROWS:
        return (rare := RareRows()), rare.losses(seed), 5e-3
    model = encoder.pretrained(cpu).train()
    return model, _matches(model, seed), quantization.LR


def _digits(model: nn.Module, seed: int) -> Iterator[Tensor]:
    x, y = Split(seed, torch.device("cpu")).train
    generator = torch.Generator().manual_seed(seed)
    while True:
        for batch in torch.randperm(len(y), generator=generator).split(64):
            yield F.cross_entropy(model(x[batch]), y[batch])


def _matches(model: nn.Module, seed: int) -> Iterator[Tensor]:
    """Each query must find its document among those of its batch, as in experiment 5."""
    training = encoder.pairs()[0]
    for part in torch.randperm(len(training), generator=torch.Generator().manual_seed(seed)).split(8):
        queries, documents = (
            model(encoder.tokens([texts[i] for i in part.tolist()], 32, torch.device("cpu")))
            for texts in (training.queries, training.documents)
        )
        yield F.cross_entropy(queries @ documents.T / quantization.TEMPERATURE, torch.arange(len(part)))


# ----------------------------------------------------------------------------------------------------- what is measured
def shadows() -> list[Storage]:
    seconds = [Storage(second=code, rounding=rounding) for code in (*WITH_ZERO, *FLOORED) for rounding in ROUNDINGS]
    momenta = [Storage(momentum=code, rounding=rounding) for code in MOMENTA for rounding in ROUNDINGS]
    other_groups = [Storage(*CHOSEN, STOCHASTIC, group) for group in GROUPS]
    return [*seconds, *momenta, *other_groups]


def updates(name: str, steps: int, size: Size) -> list[Row]:
    """Errors of the updates, with coded states that get the gradients of a training with fp32 states.

    Measured are every fourth 1024 elements of a model, and every 64th 1024 elements of the encoder. A model with up to
    65536 elements is measured whole.
    """
    model, losses, lr = losses_of(name, 0, size)
    flat = Flat(model)
    every = 64 if name == ENCODER else 4 if flat.weight.numel() > 2**16 else 1
    parts = torch.arange(flat.weight.numel() // 1024 * 1024).view(-1, 1024)[::every].flatten()
    trained = Adam(flat.weight.numel(), Storage())
    exact = Adam(len(parts), Storage())
    shadow = {storage: Adam(len(parts), storage) for storage in shadows()}
    errors: dict[Storage, list[float]] = {storage: [] for storage in shadow}
    largest: dict[Storage, list[float]] = {storage: [] for storage in shadow}
    largest_exact = 0.0
    for step, loss in enumerate(islice(losses, steps)):
        flat.grad.zero_()
        loss.backward()
        flat.weight.add_(trained.update(flat.grad), alpha=-lr)
        expected = exact.update(flat.grad[parts])
        largest_exact = max(largest_exact, expected.abs().max().item())
        moved = flat.exists[parts] & (expected != 0)
        for storage, adam in shadow.items():
            update = adam.update(flat.grad[parts])
            largest[storage].append(update.abs().max().item())
            if step >= steps // 2:
                errors[storage].append(((update - expected)[moved].norm() / expected[moved].norm()).item())
    return [
        storage.row()
        | {
            "part": UPDATE,
            "model": name,
            "steps": steps,
            "error": f"{sorted(errors[storage])[len(errors[storage]) // 2]:.4g}",
            "exploded": sum(not value <= EXPLODED * largest_exact for value in largest[storage]),
            "largest": f"{max(largest[storage]) / largest_exact:.4g}",
        }
        for storage in shadow
    ]


def drift(second: Code, rounding: str, seed: int, steps: int) -> list[Row]:
    """A second moment after the gradients of half of the elements became 30 % larger, for `steps` steps.

    The magnitudes of the gradients are log-normal. Gradients are constant otherwise.
    """
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(2048, generator=generator).exp()
    rises = torch.rand(2048, generator=generator) < 0.5
    coded, exact = grad.square(), grad.square()  # where a long training would have led
    coded = stored(coded, second, rounding, GROUP, generator)
    raised = (grad * torch.where(rises, 1.3, 1.0)).square()
    for _ in range(steps):
        exact = exact.lerp(raised, 1 - BETA2)
        coded = stored(coded.lerp(raised, 1 - BETA2), second, rounding, GROUP, generator)
    error = ((coded / exact).sqrt()[rises] - 1).square().mean().sqrt().item()
    stuck = ((grad.square() / exact).sqrt()[rises] - 1).square().mean().sqrt().item()
    return [Storage(None, second, rounding).row() | {"part": DRIFT, "steps": steps, "error": f"{error / stuck:.4g}"}]


def decay(momentum: Code, rounding: str, seed: int) -> list[Row]:
    """The sum of a momentum over 300 steps after its gradients became 0, divided by the exact sum.

    Half of the gradients become 0. The sum is that of their elements.
    """
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(8192, generator=generator).exp()
    silent = torch.rand(8192, generator=generator) < 0.5
    coded = stored(grad, momentum, rounding, GROUP, generator)
    pushed = torch.zeros(8192)
    for _ in range(300):
        coded = coded.lerp(torch.where(silent, 0.0, grad), 1 - BETA1)
        pushed += coded
        coded = stored(coded, momentum, rounding, GROUP, generator)
    share = (pushed[silent].sum() / (grad[silent].sum() * BETA1 / (1 - BETA1))).item()
    return [Storage(momentum, None, rounding).row() | {"part": DECAY, "steps": 300, "error": f"{share:.4g}"}]


# Trained with: the chosen pair, and the codes of the peers. "perturbed" is fp32 with weights changed by a thousandth.
TRAINED = {
    "fp32": Storage(),
    "fp32, perturbed": Storage(),
    "chosen": Storage(*CHOSEN, STOCHASTIC),
    "chosen, nearest": Storage(*CHOSEN, NEAREST),
    "FlashOptim's": Storage(codes.softsign(), codes.root(UNSIGNED), NEAREST, 32),
    "bitsandbytes'": Storage(codes.dynamic(is_signed=True), codes.dynamic(is_signed=False), NEAREST, 256),
}


def training(seed: int, steps: int, size: Size) -> list[Row]:
    """The held-out loss of the byte Transformer after training by each storage, from the same weights and batches."""
    rows = []
    for way, storage in TRAINED.items():
        model, losses, lr = losses_of(TRANSFORMER, seed, size)
        flat = Flat(model)
        if way == "fp32, perturbed":
            flat.weight.mul_(1 + 1e-3 * torch.randn(flat.weight.shape, generator=torch.Generator().manual_seed(7)))
        adam = Adam(flat.weight.numel(), storage, seed)
        largest = 0.0
        for loss in islice(losses, steps):
            flat.grad.zero_()
            loss.backward()
            update = adam.update(flat.grad)
            largest = max(largest, update.abs().max().item())
            flat.weight.add_(update, alpha=-lr)
        found, _ = text.evaluate(model, size.context, torch.device("cpu"))
        row = {"part": LOSS, "model": TRANSFORMER, "way": way, "seed": seed, "steps": steps}
        rows.append(storage.row() | row | {"loss": f"{found:.5f}", "largest": f"{largest:.4g}"})
    return rows


def runs(settings: Settings) -> list[Run]:
    size = Size(1, 32, 32, 2) if settings.is_quick else Size(2, 64, 64, 8)
    steps = {TRANSFORMER: 400, CNN: 400, ROWS: 400, ENCODER: 40}
    if settings.is_quick:
        steps = dict.fromkeys(steps, 2)
    if any(importlib.util.find_spec(name) is None for name in (encoder.PACKAGE, "tokenizers", "safetensors")):
        del steps[ENCODER]
    each = [Run(f"update, {name}", partial(updates, name, count, size)) for name, count in steps.items()]
    for seed in settings.seeds:
        for rounding in ROUNDINGS:
            for code in (*WITH_ZERO, *FLOORED):
                count = 4 if settings.is_quick else 1400
                key = f"drift, {name_of(code)}, {rounding}, {seed}"
                each.append(Run(key, partial(drift, code, rounding, seed, count)))
            for code in MOMENTA:
                key = f"decay, {name_of(code)}, {rounding}, {seed}"
                each.append(Run(key, partial(decay, code, rounding, seed)))
        count = 2 if settings.is_quick else 1000
        each.append(Run(f"loss, {seed}", partial(training, seed, count, size)))
    return each


# ----------------------------------------------------------------------------------------------------------- the claims
def picked(rows: Sequence[Row], part: str, **values: object) -> list[Row]:
    """The rows of a part whose columns have these values, compared as text."""
    return [row for row in rows if row["part"] == part and all(row[k] == str(v) for k, v in values.items())]


def range_of(values: Sequence[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g}" if values else "not measured"


def measured(*values: Sequence[float]) -> bool:
    """Whether there are values, and none of them is NaN."""
    return all(of and not any(map(math.isnan, of)) for of in values)


def by_rounding(rows: Sequence[Row], part: str, **values: object) -> dict[str, list[float]]:
    return {how: [number(row, "error") for row in picked(rows, part, rounding=how, **values)] for how in ROUNDINGS}


def apart(of: dict[str, list[float]], nearest: Callable[[float], bool], at_random: Callable[[float], bool]) -> Verdict:
    """Holds if both are true of all values of their rounding; falsified if one of them is true of none."""
    if not measured(*of.values()):
        return Verdict(UNDECIDED, "Not measured.")
    both = [list(map(nearest, of[NEAREST])), list(map(at_random, of[STOCHASTIC]))]
    because = f"To nearest {range_of(of[NEAREST])}, at random {range_of(of[STOCHASTIC])}."
    return decided(all(map(all, both)), not all(map(any, both)), because)


STUCK, MOVES = 0.3, 0.1


def stalls(rows: Sequence[Row]) -> Verdict:
    of: dict[str, list[float]] = {how: [] for how in ROUNDINGS}
    for code in FLOORED:
        for how, values in by_rounding(rows, DRIFT, second=name_of(code)).items():
            of[how] += values
    return apart(of, lambda error: error >= STUCK, lambda error: error <= MOVES)


PUSHES, ENDS = 1.2, 0.05


def pushes(rows: Sequence[Row]) -> Verdict:
    return apart(by_rounding(rows, DECAY), lambda share: share >= PUSHES, lambda share: abs(share - 1) <= ENDS)


def explodes(rows: Sequence[Row]) -> Verdict:
    of = {
        name_of(code): [number(row, "exploded") for row in picked(rows, UPDATE, second=name_of(code), momentum="fp32")]
        for code in (*WITH_ZERO, *FLOORED)
    }
    if not measured(*of.values()):
        return Verdict(UNDECIDED, "Not measured.")
    most = {name: int(max(values)) for name, values in of.items()}
    with_zero, floored = ([most[name_of(code)] for code in codes_] for codes_ in (WITH_ZERO, FLOORED))
    because = "Most such steps in a training: " + "; ".join(f"{name} {count}" for name, count in most.items()) + "."
    return decided(all(with_zero) and not any(floored), any(floored) or not any(with_zero), because)


def is_most_exact(rows: Sequence[Row]) -> Verdict:
    def errors(code: Code) -> dict[str, float]:
        """By model, with groups of 128 and a momentum in fp32."""
        of = picked(rows, UPDATE, second=name_of(code), momentum="fp32", rounding=STOCHASTIC)
        return {row["model"]: number(row, "error") for row in of}

    by_code = {name_of(code): errors(code) for code in FLOORED}
    models = list(by_code[name_of(CHOSEN[1])])
    if not measured(*([by_code[name].get(model, math.nan) for name in by_code] for model in models)) or not models:
        return Verdict(UNDECIDED, "Not measured.")
    won = 0
    said = []
    for model in models:
        of_model = {name: errors[model] for name, errors in by_code.items()}
        won += min(of_model.values()) == of_model[name_of(CHOSEN[1])]
        said.append(f"{model}: " + ", ".join(f"{name} {error:.3g}" for name, error in of_model.items()))
    return decided(won == len(models), won <= len(models) / 2, "; ".join(said) + ".")


NEARLY, CLEARLY = 1.25, 1.5


def groups_cost_little(rows: Sequence[Row]) -> Verdict:
    pair = {"momentum": name_of(CHOSEN[0]), "second": name_of(CHOSEN[1])}
    of = {size: [number(row, "error") for row in picked(rows, UPDATE, **pair, group=size)] for size in (32, GROUP)}
    if not measured(*of.values()):
        return Verdict(UNDECIDED, "Not measured.")
    ratios = [b / a for a, b in zip(of[32], of[GROUP], strict=True)]
    holds, is_false = all(r <= NEARLY for r in ratios), any(r > CLEARLY for r in ratios)
    return decided(holds, is_false, f"Error with 128 relative to 32: {range_of(ratios)}.")


def differences(rows: Sequence[Row], way: str) -> list[float]:
    """In held-out loss from fp32 states, by seed."""
    fp32 = {row["seed"]: number(row, "loss") for row in picked(rows, LOSS, way="fp32")}
    return [number(row, "loss") - fp32.get(row["seed"], math.nan) for row in picked(rows, LOSS, way=way)]


def trains_as_fp32(way: str, rows: Sequence[Row]) -> Verdict:
    perturbed, found = differences(rows, "fp32, perturbed"), differences(rows, way)
    if not measured(perturbed, found):
        return Verdict(UNDECIDED, "Not measured.")
    spread = max(map(abs, perturbed))
    mean, error = mean_and_error(found)
    because = (
        f"Difference of the loss {mean:+.4f}, standard error {error:.4f}, {len(found)} seeds. Perturbed weights change "
        f"it by up to {spread:.4f}."
    )
    return decided(mean <= spread, mean - 2 * error > spread, because)


RULES = f"""
- The limits were set after a probe with other programs and seeds, which is no part of the data.
- *Drift*: a second moment (beta2 0.999) has followed constant gradients for a long time. Then half of the gradients
  become 30 % larger, for 1400 steps. Its error is the root mean square of sqrt(v) / sqrt(exact v) - 1 over this half,
  relative to the error of a moment that did not move at all.
- *Decay*: a momentum (beta1 0.9) has followed constant gradients. Then half of them become 0, for 300 steps. This half
  of the momentum is summed over these steps, relative to the exact sum.
- *Error of the update*: states in a code get the gradients of a training whose own states are fp32. The error is the
  norm of the difference of Adam's update from fp32's, relative to the norm of fp32's, in the median step of the second
  half. Only one of the two states is coded, if nothing else is said. A step has *exploded* if its largest update is
  more than {EXPLODED:.0f} times the largest of the whole training with fp32 states.
"""
CLAIMS = (
    Claim(
        "Rounded to nearest, a slow average stalls. Rounded at random, it moves.",
        f"Holds if the drift's error is at least {STUCK} to nearest and at most {MOVES} at random, for each code "
        "without a zero and each seed; falsified if one of the two is true of none.",
        stalls,
    ),
    Claim(
        "Rounded to nearest, a momentum pushes on when the gradients have fallen silent.",
        f"Holds if the decay's sum is at least {PUSHES} to nearest and within {ENDS} of 1 at random, for each code and "
        "seed; falsified if one of the two is true of none.",
        pushes,
    ),
    Claim(
        "A second moment that may become 0 explodes. With a lowest code above 0 it does not.",
        "Holds if each code with a zero has an exploded step in some training, and no code without one has; falsified "
        "if a code without a zero has one, or none with a zero.",
        explodes,
    ),
    Claim(
        "Of the second moments without a zero, rounded at random, the fourth root has the least error of the update.",
        "Holds if it is the smallest for each model; falsified if for at most half of them.",
        is_most_exact,
    ),
    Claim(
        "Groups of 128 elements are nearly as exact as groups of 32.",
        "Both states coded, signed square root and fourth root, at random. Holds if the error of the update is at most "
        f"{NEARLY} times as large for each model; falsified if for one of them it is more than {CLEARLY} times.",
        groups_cost_little,
    ),
    *(
        Claim(
            f"AdamW by hand, its states in {which}, trains the byte Transformer as well as with fp32 states.",
            "Holds if the mean difference of the held-out loss is at most the largest one between two trainings with "
            "fp32 states, of which one begins with weights perturbed by a thousandth; falsified if it is more by two "
            "standard errors.",
            partial(trains_as_fp32, way),
        )
        for way, which in (
            ("chosen", "the signed square root and the fourth root without a zero, at random, groups of 128"),
            ("chosen, nearest", "the same codes to nearest"),
            ("FlashOptim's", "softsign and square root to nearest, groups of 32, as FlashOptim has them"),
            ("bitsandbytes'", "the dynamic code to nearest, groups of 256, as bitsandbytes has them"),
        )
    ),
)
PUBLISHED = (
    Table(
        "States of 8 bits in other packages (Dettmers et al. 2022, arXiv 2110.02861; FlashOptim, arXiv 2602.23349)",
        ("package", "momentum", "second moment", "group", "published"),
        (
            ("bitsandbytes", "dynamic", "dynamic", "256", "the performance of 32-bit states, same hyper-parameters"),
            ("FlashOptim", "softsign", "square root", "32", "35 % less peak memory for a model of 8B parameters"),
        ),
    ),
)
ABOUT = """
An optimizer with states of 8 bits keeps a code for each element, and a scale for each group of neighbours. The codes
differ in how they divide the range below the scale, in whether an element may become 0, and in how they round. All
codes are in plain torch here, so that nothing but the code differs. Adam is written by hand, its weights are fp32.
"""


# ------------------------------------------------------------------------------------------------- tables and picture
def models_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in picked(rows, UPDATE)))


def tables(rows: Sequence[Row]) -> list[Table]:
    models = models_of(rows)

    def cell(of: Sequence[Row]) -> str:
        (row,) = of
        exploded = f" ({row['exploded']} exploded)" if row["exploded"] != "0" else ""
        return f"{number(row, 'error'):.3g}{exploded}"

    def of_codes(column: str, other: str, chosen: Sequence[Code], part: str) -> Iterator[tuple[object, ...]]:
        for name in map(name_of, chosen):
            for how in ROUNDINGS:
                values = {column: name, other: "fp32", "rounding": how}
                by_model = (cell(picked(rows, UPDATE, model=model, **values)) for model in models)
                yield name, how, *by_model, range_of([number(row, "error") for row in picked(rows, part, **values)])

    pair = {"momentum": name_of(CHOSEN[0]), "second": name_of(CHOSEN[1])}
    losses = [(way, " ".join(f"{v:+.4f}" for v in differences(rows, way))) for way in TRAINED if way != "fp32"]
    return [
        Table(
            "The second moment: error of the update by model, and error of the drift",
            ("code", "rounding", *models, "drift"),
            tuple(of_codes("second", "momentum", (*WITH_ZERO, *FLOORED), DRIFT)),
        ),
        Table(
            "The momentum: error of the update by model, and sum of the decay",
            ("code", "rounding", *models, "decay"),
            tuple(of_codes("momentum", "second", MOMENTA, DECAY)),
        ),
        Table(
            "Both states, signed square root and fourth root without a zero, at random",
            ("group", *models),
            tuple(
                (size, *(cell(picked(rows, UPDATE, model=model, group=size, **pair)) for model in models))
                for size in GROUPS
            ),
        ),
        Table(
            "Held-out loss of the byte Transformer, minus that with fp32 states, by seed",
            ("states", "difference"),
            tuple(losses),
        ),
    ]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Each code of the second moment: its errors, in both roundings."""
    shown = [code for code in (*WITH_ZERO, *FLOORED) if code.name != "linear"]  # which is a thousand times worse
    figure, panels = plt.subplots(1, 2, sharey=True, figsize=(9, 4), layout="constrained")
    for axes, part, label in zip(
        panels, (UPDATE, DRIFT), ("error of the update, byte Transformer", "error of the drift"), strict=True
    ):
        for position, code in enumerate(shown):
            for how, colour in zip(ROUNDINGS, ("tab:gray", BLUES[0]), strict=True):
                values = {"second": name_of(code), "momentum": "fp32", "rounding": how}
                found = picked(rows, part, **values, **({"model": TRANSFORMER} if part == UPDATE else {}))
                mean = sum(number(row, "error") for row in found) / max(len(found), 1)
                exploded = any(row["exploded"] != "0" for row in picked(rows, UPDATE, **values))
                axes.scatter(mean, position, color=colour, marker="x" if exploded else "o", s=50)
        axes.set_xlabel(label)
        axes.set_xlim(left=0)
        axes.grid(axis="x", alpha=0.3)
    panels[0].set_yticks(range(len(shown)), [name_of(code) for code in shown])
    panels[0].invert_yaxis()
    for how, colour in zip(("to nearest", "at random"), ("tab:gray", BLUES[0]), strict=True):
        panels[1].scatter([], [], color=colour, label=f"rounded {how}")
    panels[1].scatter([], [], color="black", marker="x", label="steps exploded in some training")
    figure.legend(frameon=False, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


EXPERIMENT = Experiment(
    name="state_codes",
    title="Codes for 8-bit optimizer states",
    about=ABOUT,
    columns=(
        "part", "model", "way", "momentum", "second", "rounding", "group", "seed", "steps", "error", "exploded",
        "largest", "loss",
    ),
    runs=runs,
    claims=CLAIMS,
    tables=tables,
    draw=draw,
    published=PUBLISHED,
    rules=RULES,
)  # fmt: skip
