"""The same accuracy as fp32 with the same hyper-parameters, and what loss scaling and fp32 masters protect."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import amp_kernels
from amp_kernels.optim import FusedAdam, FusedAdamW, FusedRMSprop, FusedSGD

from ..demo.training import Size, Transformer, batches
from ..plot import BLUES
from . import images, text
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
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
CNN, TRANSFORMER, MLP = "CNN", "Transformer", "MLP"
OURS = {"SGD": FusedSGD, "RMSprop": FusedRMSprop, "AdamW": FusedAdamW}
LONG_OURS = {**OURS, "Adam": FusedAdam}
OPTIONS = {
    (CNN, "SGD"): {"lr": 0.05, "momentum": 0.9},
    (CNN, "RMSprop"): {"lr": 1e-3},
    (CNN, "AdamW"): {"lr": 2e-3},
    (TRANSFORMER, "SGD"): {"lr": 0.1, "momentum": 0.9},
    (TRANSFORMER, "RMSprop"): {"lr": 3e-4},  # at 1e-3 rounding grows to 4 % of the loss (demo/training.py)
    (TRANSFORMER, "AdamW"): {"lr": 1e-3},
    (TRANSFORMER, "Adam"): {"lr": 1e-3},
}
FIRST_SCALE = 2.0**12  # from the default of 2^16 most runs of the Transformer lose their first step
MARGIN = 0.3  # points: the published accuracies of fp32 and mixed precision differ by at most 0.28
BATCH = 64  # digits

# A step of 1024 micro-batches of 8 x 64 bytes has half a million tokens, as the reproductions of GPT-2 do. Whoever
# accumulates divides each loss by the number of micro-batches. One of them is computed: AdamW's step does not depend on
# a factor of all gradients, if eps is small beside them.
DIVISORS = (1, 2**7, 2**10)
DIVISOR = 2**10
SCALED_ADAMW = {"lr": 1e-3, "eps": 1e-15}
# Of plain SGD: so small that most updates are below half a unit in the last place of a 16-bit weight
SMALL_LR, SMALL_BATCH = 0.003, 32

SAME, SCALING, RANGE, MASTERS = "same hyper-parameters", "loss scaling", "histogram", "masters"
LONG = "long"
AS_FP32, AS_AUTOCAST, AS_FP16, AS_BF16 = "fp32, torch", "fp16 autocast, torch", "fp16, ours", "bf16, ours"
LEAN_FP16, LEAN_BF16 = "fp16, int8 states, ours", "bf16, int8 states, ours"
LEAN = {LEAN_FP16: AS_FP16, LEAN_BF16: AS_BF16}  # and the same with fp32 states
WITHOUT_SCALER = "fp16 without a scaler, ours"
COLOURS = {
    AS_FP32: "tab:gray", AS_AUTOCAST: "tab:purple", AS_FP16: BLUES[0], AS_BF16: BLUES[1], LEAN_FP16: BLUES[2],
    LEAN_BF16: BLUES[3],
}  # fmt: skip
PEER_COLOUR, WITHOUT_COLOUR = "tab:brown", "tab:orange"


@dataclass(frozen=True)
class Plan:
    size: Size
    steps: int  # of the Transformer
    long_steps: int  # of the Transformer with lean states
    epochs: int  # of the CNN
    small_epochs: int  # of the MLP with a small learning rate


def plan(settings: Settings) -> Plan:
    return settings.pick(
        cpu=Plan(Size(2, 64, 64, 8), 200, 2000, 20, 200),
        cuda=Plan(Size(4, 256, 128, 16), 150, 2000, 10, 60),
        quick=Plan(Size(1, 32, 32, 2), 2, 2, 1, 1),
    )


# ------------------------------------------------------------------------------------------------------ the contenders
Make = Callable[..., Optimizer]


def _bitsandbytes(optimizer: str) -> Make:
    import bitsandbytes

    return getattr(bitsandbytes.optim, f"{optimizer}8bit")


def _torchao(optimizer: str) -> Make:
    import torchao.optim

    return partial(getattr(torchao.optim, f"{optimizer}8bit"), bf16_stochastic_round=True)


def _flashoptim(optimizer: str) -> Make:
    import flashoptim

    return getattr(flashoptim, f"Flash{optimizer}")


@dataclass(frozen=True)
class Way:
    name: str
    find: Callable[[str], Make]  # the class of optimizers for a name; raises where there is none
    weights: torch.dtype = FP32
    autocast: torch.dtype | None = None
    scaler: Callable[..., torch.amp.GradScaler] | None = None


def torch_optimizer(name: str) -> Make:
    return getattr(torch.optim, name)


def with_int8_states(name: str) -> Make:
    return partial(LONG_OURS[name], state_dtype=torch.int8)


WAYS = (
    Way(AS_FP32, torch_optimizer),
    Way(AS_AUTOCAST, torch_optimizer, autocast=FP16, scaler=torch.amp.GradScaler),
    Way(AS_FP16, LONG_OURS.__getitem__, FP16, scaler=amp_kernels.GradScaler),
    Way(AS_BF16, LONG_OURS.__getitem__, BF16),
    Way(LEAN_FP16, with_int8_states, FP16, scaler=amp_kernels.GradScaler),
    Way(LEAN_BF16, with_int8_states, BF16),
)
PEERS = (
    Way("bf16 autocast, bitsandbytes 8-bit", _bitsandbytes, autocast=BF16),
    Way("bf16 stochastic, torchao 8-bit", _torchao, BF16),
    Way("bf16, flashoptim", _flashoptim, BF16),
)


class Training:
    """A model that learns in one way, with warm-up over a tenth of the steps and half a cosine down to 0."""

    def __init__(self, model: nn.Module, way: Way, optimizer: str, options: dict, steps: int, device: torch.device):
        self.way, self.device = way, device
        self.model: Any = images.in_16_bits(model.to(device), way.weights)
        if way.weights is not FP32:
            amp_kernels.nn.convert_linear_(self.model)
        self.optimizer = way.find(optimizer)(self.model.parameters(), **options)
        scaler, is_scaled = way.scaler or torch.amp.GradScaler, way.scaler is not None
        self.scaler = scaler(device.type, init_scale=FIRST_SCALE, enabled=is_scaled)
        warm_up = 1 + steps // 10
        self.schedule = LambdaLR(
            self.optimizer, lambda k: min((k + 1) / warm_up, (1 + math.cos(math.pi * k / steps)) / 2)
        )

    def step(self, loss: Callable[[], Tensor], divisor: int = 1) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, self.way.autocast, enabled=self.way.autocast is not None):
            value = loss()
        self.scaler.scale(value / divisor).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()


# ---------------------------------------------------------------------------------------------------------- trainings
def picks(count: int, size: int, epochs: int, seed: int, device: torch.device) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield from torch.randperm(count, generator=generator).to(device).split(size)


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), y)


def cnn(way: Way, optimizer: str, seed: int, of: Plan, device: torch.device) -> tuple[float, float]:
    torch.manual_seed(seed)
    split = Split(seed, device)
    x, y = split.train
    order = list(picks(len(y), BATCH, of.epochs, seed, device))
    training = Training(images.cnn(), way, optimizer, OPTIONS[CNN, optimizer], len(order), device)
    for batch in order:
        training.step(partial(_loss, training.model, x[batch].to(way.weights), y[batch]))
    return images.evaluate(training.model, split, way.weights)


def transformer(
    way: Way, optimizer: str, seed: int, of: Plan, device: torch.device, options: dict | None = None, divisor: int = 1
) -> Training:
    torch.manual_seed(seed)
    options = options or OPTIONS[TRANSFORMER, optimizer]
    training = Training(Transformer(of.size), way, optimizer, options, of.steps, device)
    for batch in islice(batches(text.text(device)[0], of.size, seed), of.steps):
        training.step(partial(training.model, batch), divisor)
    return training


def result(loss: float, accuracy: float) -> Row:
    return {"loss": f"{loss:.5f}", "accuracy": f"{accuracy:.4f}"}


def same(model: str, optimizer: str, way: Way, seed: int, of: Plan, device: torch.device) -> list[Row]:
    row = {"part": SAME, "model": model, "optimizer": optimizer, "way": way.name, "seed": seed}
    try:
        # torchao compiles its step for each shape, which takes longer than this training
        with torch.compiler.set_stance("force_eager"):
            if model == CNN:
                return [row | result(*cnn(way, optimizer, seed, of, device))]
            training = transformer(way, optimizer, seed, of, device)
            return [row | result(*text.evaluate(training.model, of.size.context, device))]
    except Exception as error:  # whatever a peer raises is its reason
        if way in WAYS:
            raise
        return [row | {"note": first_line(error)}]


def scaling(divisor: int, seed: int, of: Plan, device: torch.device) -> list[Row]:
    """fp32, and fp16 with and without a scaler, of losses divided by the number of micro-batches."""
    by_name = {way.name: way for way in WAYS}
    without = replace(by_name[AS_FP16], name=WITHOUT_SCALER, scaler=None)
    rows = []
    for way in (by_name[AS_FP32], by_name[AS_FP16], without):
        training = transformer(way, "AdamW", seed, of, device, SCALED_ADAMW, divisor)
        row = {"part": SCALING, "model": TRANSFORMER, "optimizer": "AdamW", "way": way.name, "seed": seed}
        row |= result(*text.evaluate(training.model, of.size.context, device))
        rows.append(row | {"divisor": divisor})
        if way.name == AS_FP32:
            rows.append(
                {"part": RANGE, "model": TRANSFORMER, "seed": seed, "divisor": divisor} | _range(training, of, divisor)
            )
    return rows


def long(optimizer: str, name: str, seed: int, of: Plan, device: torch.device) -> list[Row]:
    way = next(way for way in WAYS if way.name == name)
    training = transformer(way, optimizer, seed, replace(of, steps=of.long_steps), device)
    row = {"part": LONG, "model": TRANSFORMER, "optimizer": optimizer, "way": name, "seed": seed}
    return [row | result(*text.evaluate(training.model, of.size.context, device))]


def _range(training: Training, of: Plan, divisor: int) -> Row:
    """The gradients of the linear layers' outputs after training in fp32: how large, and which are 0 in fp16."""
    found: list[Tensor] = []
    linear = (layer for layer in training.model.modules() if isinstance(layer, nn.Linear))

    def keep(_: nn.Module, __: object, grads: Any) -> None:
        found.append(grads[0].flatten())

    hooks = [layer.register_full_backward_hook(keep) for layer in linear]
    (training.model(next(batches(text.text(training.device)[0], of.size, seed=1))) / divisor).backward()
    for hook in hooks:
        hook.remove()
    values = torch.cat(found).abs()
    values = values[values > 0]
    exponents, counts = values.log2().floor().int().unique(return_counts=True)
    shares = zip(exponents.tolist(), (100 * counts / len(values)).tolist(), strict=True)
    zeros = {
        name: 100 * ((scale * values).half() == 0).double().mean().item()
        for name, scale in (("zeros", 1), ("zeros_scaled", FIRST_SCALE))
    }
    return {"histogram": " ".join(f"{e}:{share:.4g}" for e, share in shares)} | {
        k: f"{v:.4g}" for k, v in zeros.items()
    }


MASTERS_OF = {"masters, ours": FusedSGD, "no masters, torch": torch.optim.SGD}


def masters(seed: int, of: Plan, device: torch.device) -> list[Row]:
    """Plain SGD with a small learning rate; our optimizer keeps fp32 masters of 16-bit weights, torch's does not."""
    rows = []
    for name, dtype in (("fp32", FP32), ("fp16", FP16), ("bf16", BF16)):
        for way, kind in MASTERS_OF.items():
            if dtype is not FP32 or kind is torch.optim.SGD:
                label = "fp32, torch" if dtype is FP32 else f"{name}, {way}"
                rows.append({"part": MASTERS, "model": MLP, "optimizer": "SGD", "way": label, "seed": seed})
                rows[-1] |= small_updates(kind, dtype, seed, of, device)
    return rows


def small_updates(kind: Make, dtype: torch.dtype, seed: int, of: Plan, device: torch.device) -> Row:
    split = Split(seed, device)
    x, y = split.train
    model = network(seed, device).to(dtype)
    parameters = list(model.parameters())
    optimizer = kind(parameters, lr=SMALL_LR)
    scaler = amp_kernels.GradScaler(device.type, init_scale=2.0**10, enabled=dtype is FP16)
    order = list(picks(len(y), SMALL_BATCH, of.small_epochs, seed, device))
    lost = math.nan
    for step, batch in enumerate(order):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x[batch].to(dtype)).float(), y[batch])).backward()
        before = [p.detach().clone() for p in parameters] if step == len(order) // 2 else None
        scaler.step(optimizer)
        scaler.update()
        if before:
            moved = sum(int((p != old).sum()) for p, old in zip(parameters, before, strict=True))
            lost = 100 - 100 * moved / sum(int(p.grad.count_nonzero()) for p in parameters if p.grad is not None)
    return result(*images.evaluate(model, split, dtype)) | {"unchanged": f"{lost:.4g}"}


def runs(settings: Settings) -> list[Run]:
    of, device = plan(settings), settings.device
    parts = []
    for seed in settings.seeds:
        for model in (CNN, TRANSFORMER):
            for optimizer in OURS:
                for each in (*WAYS, *PEERS):
                    key = f"{model}, {optimizer}, {each.name}, seed {seed}"
                    parts.append(Run(key, partial(same, model, optimizer, each, seed, of, device)))
        for optimizer in LONG_OURS:
            for way in (AS_FP16, AS_BF16, LEAN_FP16, LEAN_BF16):
                key = f"{LONG}, {optimizer}, {way}, seed {seed}"
                parts.append(Run(key, partial(long, optimizer, way, seed, of, device)))
        parts += [Run(f"loss / {d}, seed {seed}", partial(scaling, d, seed, of, device)) for d in DIVISORS]
        parts.append(Run(f"masters, seed {seed}", partial(masters, seed, of, device)))
    return parts


# ---------------------------------------------------------------------------------------------------------- the claims
def accuracies(rows: Sequence[Row], **picked: object) -> dict[tuple[str, str], float]:
    """By optimizer and seed."""
    found = [row for row in rows if all(row[name] == str(value) for name, value in picked.items()) and not row["note"]]
    return {(row["optimizer"], row["seed"]): number(row, "accuracy") for row in found}


def differences(rows: Sequence[Row], way: str, than: str = AS_FP32, **picked: object) -> list[float]:
    """In points from `than`, of the same optimizer and seed."""
    found, base = (accuracies(rows, way=name, **picked) for name in (way, than))
    return [value - base[key] for key, value in found.items() if key in base]


def no_worse(mean: float, error: float) -> str:
    return HOLDS if mean - 2 * error >= -MARGIN else FALSIFIED if mean + 2 * error < -MARGIN else UNDECIDED


def worse(mean: float, error: float) -> str:
    return {HOLDS: FALSIFIED, FALSIFIED: HOLDS, UNDECIDED: UNDECIDED}[no_worse(mean, error)]


def sentence(values: Sequence[float]) -> str:
    mean, error = mean_and_error(values)
    return f"{mean:+.2f} points, standard error {error:.2f}, {len(values)} runs"


def as_accurate(way: str, than: str, rows: Sequence[Row]) -> Verdict:
    found = {model: differences(rows, way, than, part=SAME, model=model) for model in (CNN, TRANSFORMER)}
    if any(len(values) < 2 for values in found.values()):
        return Verdict(UNDECIDED, "Fewer than two runs of a model.")
    words = [no_worse(*mean_and_error(values)) for values in found.values()]
    word = FALSIFIED if FALSIFIED in words else HOLDS if set(words) == {HOLDS} else UNDECIDED
    return Verdict(word, "; ".join(f"{model}: {sentence(values)}" for model, values in found.items()) + ".")


def losses(rows: Sequence[Row], optimizer: str, way: str) -> list[float]:
    """After the long training, by seed."""
    of = {"part": LONG, "optimizer": optimizer, "way": way}
    return [number(row, "loss") for row in rows if all(row[name] == value for name, value in of.items())]


def within_spread(rows: Sequence[Row]) -> Verdict:
    pairs, said = [], []
    for optimizer in LONG_OURS:
        for lean, full in LEAN.items():
            in_int8, in_fp32 = losses(rows, optimizer, lean), losses(rows, optimizer, full)
            if len(in_int8) < 2 or len(in_fp32) < 2:
                return Verdict(UNDECIDED, "Fewer than two seeds.")
            difference, spread = mean_and_error(in_int8)[0] - mean_and_error(in_fp32)[0], max(in_fp32) - min(in_fp32)
            pairs.append((difference, spread))
            said.append(f"{optimizer} {full.removesuffix(', ours')} {difference:+.4f} ({spread:.4f})")
    because = f"Differences, with the spread in brackets: {', '.join(said)}."
    return decided(all(d <= s for d, s in pairs), any(d > 2 * s for d, s in pairs), because)


def protected(part: str, way: str, rule: Callable[[float, float], str], rows: Sequence[Row]) -> Verdict:
    picked: dict[str, Any] = {"divisor": DIVISOR} if part == SCALING else {}
    values = differences(rows, way, part=part, **picked)
    if len(values) < 2:
        return Verdict(UNDECIDED, "Fewer than two seeds.")
    return Verdict(rule(*mean_and_error(values)), sentence(values) + ".")


RULES = f"""
The accuracy minus that of fp32 is taken in points, between runs with the same optimizer and seed. d is its mean over
the runs, s the standard error of d. The bound is {MARGIN} points, because the published accuracies differ by up to 0.28
points.

- **No loss**: holds if d - 2s >= -{MARGIN}. Falsified if d + 2s < -{MARGIN}. Otherwise undecided.
- **Loss**: holds if d + 2s < -{MARGIN}. Falsified if d - 2s >= -{MARGIN}. Otherwise undecided.

The claims and their rules:
"""
NO_LOSS, LOSS = 'Rule "no loss".', 'Rule "loss".'
NO_LOSS_OF_BOTH = 'Rule "no loss", which must hold for both models. Falsified if it is falsified for one of them.'
CLAIMS = (
    *(
        Claim(
            f"Training {how} ends as accurate as training in fp32, with the same hyper-parameters.",
            NO_LOSS_OF_BOTH,
            partial(as_accurate, way, AS_FP32),
        )
        for how, way in (
            ("in fp16 with amp_kernels", AS_FP16),
            ("in bf16 with amp_kernels", AS_BF16),
            ("under torch's autocast to fp16", AS_AUTOCAST),
        )
    ),
    *(
        Claim(
            f"With int8 states, training in {full.removesuffix(', ours')} ends as accurate as with fp32 states.",
            NO_LOSS_OF_BOTH + " The difference is taken from training with fp32 states in the same dtype.",
            partial(as_accurate, lean, full),
        )
        for lean, full in LEAN.items()
    ),
    Claim(
        "After a long training, the loss with int8 states is within the spread of the seeds.",
        "A pair is one of four optimizers and fp16 or bf16. The difference is the mean loss with int8 states minus the "
        "mean loss with fp32 states. The spread is the largest minus the smallest loss of the seeds with fp32 states. "
        "Holds if no difference is above its spread. Falsified if one is above twice its spread. Otherwise undecided.",
        within_spread,
    ),
    Claim(
        f"Without loss scaling, training in fp16 loses accuracy if a step averages over {DIVISOR} micro-batches.",
        LOSS,
        partial(protected, SCALING, WITHOUT_SCALER, worse),
    ),
    Claim(
        f"With `amp_kernels.GradScaler`, training in fp16 over {DIVISOR} micro-batches loses no accuracy.",
        NO_LOSS,
        partial(protected, SCALING, AS_FP16, no_worse),
    ),
    *(
        Claim(
            f"Without fp32 masters, {dtype} weights lose accuracy if the learning rate is small.",
            LOSS,
            partial(protected, MASTERS, f"{dtype}, no masters, torch", worse),
        )
        for dtype in ("fp16", "bf16")
    ),
    *(
        Claim(
            f"With the fp32 masters of amp_kernels, {dtype} weights lose no accuracy at that learning rate.",
            NO_LOSS,
            partial(protected, MASTERS, f"{dtype}, masters, ours", no_worse),
        )
        for dtype in ("fp16", "bf16")
    ),
)


# ---------------------------------------------------------------------------------------------------------- the tables
def shown(values: Sequence[float], digits: int = 2) -> str:
    if not values:
        return ""
    mean, error = mean_and_error(values)
    return f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def names(rows: Sequence[Row], part: str) -> list[str]:
    return list(dict.fromkeys(row["way"] for row in rows if row["part"] == part))


def tables(rows: Sequence[Row]) -> list[Table]:
    ways = names(rows, SAME)
    cells = {
        (model, optimizer, way): list(accuracies(rows, part=SAME, model=model, optimizer=optimizer, way=way).values())
        for model in (CNN, TRANSFORMER)
        for optimizer in OURS
        for way in ways
    }
    lines = (
        (model, optimizer, *(shown(cells[model, optimizer, way]) for way in ways))
        for model in (CNN, TRANSFORMER)
        for optimizer in OURS
    )
    main = Table(
        "Accuracy in % (digits recognized, bytes of held-out text predicted), mean ± standard error over seeds",
        ("model", "optimizer", *ways),
        tuple(lines),
        reasons_below(rows, "way"),
    )
    by_divisor = []
    for divisor in DIVISORS:
        found = (accuracies(rows, part=SCALING, divisor=divisor, way=way) for way in names(rows, SCALING))
        zeros = [number(row, "zeros") for row in rows if (row["part"], row["divisor"]) == (RANGE, str(divisor))]
        by_divisor.append((f"{divisor}", *(shown(list(values.values())) for values in found), shown(zeros)))
    scaled = Table(
        "Transformer, AdamW: accuracy in % if each loss is divided by the number of micro-batches. Last column: of the "
        "gradients with respect to the outputs of linear layers, the share that becomes 0 in fp16 without scaling",
        ("divided by", *names(rows, SCALING), "become 0, %"),
        tuple(by_divisor),
    )
    by_masters = []
    for way in names(rows, MASTERS):
        unchanged = [number(row, "unchanged") for row in rows if (row["part"], row["way"]) == (MASTERS, way)]
        by_masters.append((way, shown(list(accuracies(rows, part=MASTERS, way=way).values())), shown(unchanged)))
    small = Table(
        f"MLP, plain SGD with a learning rate of {SMALL_LR}: accuracy in %. Last column: of the weights whose gradient "
        "is not 0, the share that one step in the middle of training leaves unchanged. With masters the update is kept "
        "there although the 16-bit weight does not change",
        ("weights", "accuracy", "unchanged weights, %"),
        tuple(by_masters),
    )
    long_ways = names(rows, LONG)
    trained = Table(
        "Transformer, long training: loss on held-out text, mean ± standard error over seeds",
        ("optimizer", *long_ways),
        tuple((name, *(shown(losses(rows, name, way), digits=4) for way in long_ways)) for name in LONG_OURS),
    )
    return [main, *([trained] if long_ways else []), scaled, small]


PUBLISHED = (
    Table(
        "Accuracy in % of fp32 and of mixed precision with the same hyper-parameters (Micikevicius et al. 2017, table "
        "1; BERT: NVIDIA's DeepLearningExamples)",
        ("model", "fp32", "mixed precision", "difference"),
        tuple(
            (model, f"{a:.2f}", f"{b:.2f}", f"{b - a:+.2f}")
            for model, a, b in (
                ("AlexNet", 56.77, 56.93),
                ("VGG-D", 65.40, 65.43),
                ("GoogLeNet", 68.33, 68.43),
                ("Inception v2", 70.03, 70.02),
                ("Inception v3", 73.85, 74.13),
                ("ResNet-50", 75.92, 76.04),
                ("BERT", 91.18, 91.24),
            )
        ),
    ),
)
ABOUT = f"""
Two models are trained. A CNN with batch norm learns scikit-learn's digits: one random half for training, the other for
the test. A Transformer learns the source of Python's standard library, byte by byte. In every precision a model starts
from the same weights and trains on the same batches. The precisions are fp32, torch's autocast with its GradScaler, and
16-bit weights under the optimizers of amp_kernels ("ours"), which keep fp32 masters; fp16 also uses
`amp_kernels.GradScaler`. "int8 states" are those of `state_dtype=torch.int8`. The optimizers of other packages train
with their own ways of saving memory. The CNN is small because fp16 convolutions on a CPU take several times as long as
fp32 ones.

Errors of states may add up over many steps. The long training of the Transformer therefore has 2,000 steps. It compares
int8 states with fp32 states for all four optimizers.

Two more cases show what loss scaling and masters protect.

- Gradient accumulation divides each loss by the number of micro-batches. {DIVISOR} micro-batches of 512 tokens make a
  step of half a million tokens. To save time only one micro-batch is computed per step, and its loss is still divided
  by {DIVISOR}. AdamW's update does not change if all gradients are divided by the same number. But in fp16 without a
  scaler many of these gradients become 0.
- Plain SGD with a small learning rate makes updates smaller than half a unit in the last place of a 16-bit weight. Half
  a unit is at most 2^-11 of an fp16 weight and 2^-8 of a bf16 weight. Without masters such updates are lost. The
  learning rate, {SMALL_LR}, was chosen after a pilot. At 0.01 fp16 weights without masters lost 0.3 points. Three
  seeds cannot distinguish that from 0.
"""


# --------------------------------------------------------------------------------------------------------- the picture
def draw(rows: Sequence[Row], path: Path) -> None:
    figure = plt.figure(figsize=(9, 5), layout="constrained")
    grid = figure.add_gridspec(2, 2)
    _draw_differences(figure.add_subplot(grid[:, 0]), rows)
    _draw_range(figure.add_subplot(grid[0, 1]), rows)
    _draw_masters(figure.add_subplot(grid[1, 1]), rows)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_differences(axes: Axes, rows: Sequence[Row]) -> None:
    ways = [way for way in names(rows, SAME) if way != AS_FP32]
    for model, marker, shift in ((CNN, "s", -0.15), (TRANSFORMER, "o", 0.15)):
        for place, way in enumerate(ways):
            if values := differences(rows, way, part=SAME, model=model):
                mean, error = mean_and_error(values)
                error = 0 if math.isnan(error) else 2 * error
                colour = COLOURS.get(way, PEER_COLOUR)
                axes.errorbar(mean, place + shift, xerr=error, color=colour, marker=marker, capsize=3)
            else:
                why = next((row["note"] for row in rows if row["way"] == way and row["note"]), "not measured")
                text = textwrap.fill(f"not trained: {why}", 40)
                axes.text(0, place, text if shift < 0 else "", fontsize=7, ha="center", va="center")
    span = axes.axvspan(-MARGIN, MARGIN, color="tab:gray", alpha=0.15, linewidth=0)
    axes.axvline(0, color="tab:gray", linewidth=0.8)
    axes.set_yticks(
        range(len(ways)), [way.replace(", ours", ", amp_kernels").replace(", ", "\n") for way in ways], fontsize=8
    )
    axes.set_ylim(len(ways) - 0.5, -0.5)
    axes.set_xlabel("accuracy minus that of fp32, points (higher is better)\n± 2 standard errors", fontsize=9)
    axes.set_title("Same hyper-parameters as fp32", fontsize=11)
    markers = [Line2D([], [], color="black", marker=marker, linestyle="") for marker in "so"]
    axes.legend([*markers, span], [CNN, TRANSFORMER, f"± {MARGIN} points"], fontsize=8, loc="upper right")


def _draw_range(axes: Axes, rows: Sequence[Row]) -> None:
    row = next((row for row in rows if (row["part"], row["divisor"]) == (RANGE, str(DIVISOR))), None)
    pairs = [tuple(map(float, pair.split(":"))) for pair in row["histogram"].split()] if row else []
    shift = int(math.log2(FIRST_SCALE))
    for add, colour, label in (
        (0, WITHOUT_COLOUR, "loss as it is"),
        (shift, COLOURS[AS_FP16], f"loss times 2^{shift}"),
    ):
        if pairs:
            exponents, shares = zip(*((e + add, share) for e, share in pairs), strict=True)
            axes.step(exponents, shares, where="mid", color=colour, label=label)
    axes.axvspan(-60, -25, color="black", alpha=0.12, linewidth=0, label="0 in fp16")
    axes.margins(y=0.3)
    axes.set(xlim=(-48, 2), xlabel="log2 of a gradient", ylabel="% of gradients")
    axes.set_ylim(bottom=0)
    axes.set_title(f"Gradients of one of {DIVISOR} micro-batches", fontsize=11)
    axes.legend(fontsize=8, loc="upper center", ncols=3)


def _draw_masters(axes: Axes, rows: Sequence[Row]) -> None:
    ways = names(rows, MASTERS)
    for place, way in enumerate(ways):
        values = list(accuracies(rows, part=MASTERS, way=way).values())
        mean, error = mean_and_error(values)
        colour = (
            WITHOUT_COLOUR if "no masters" in way else COLOURS.get(way, COLOURS[AS_FP16 if "fp16" in way else AS_BF16])
        )
        bar = axes.bar(place, mean, yerr=0 if math.isnan(error) else 2 * error, color=colour, capsize=3)
        axes.bar_label(bar, fmt="%.1f", fontsize=8, padding=2)
    labels = [way.rsplit(", ", 1)[0].replace(", ", "\n").replace("no masters", "without\nmasters") for way in ways]
    axes.set_xticks(range(len(ways)), labels, fontsize=8)
    axes.set(ylabel="accuracy, % (higher is better)", ylim=(0, 119))
    axes.set_title("Small learning rate, with and without masters", fontsize=11)


EXPERIMENT = Experiment(
    name="accuracy",
    title="Same accuracy as fp32 with the same hyper-parameters",
    about=ABOUT,
    columns=(
        "part", "model", "optimizer", "way", "seed", "divisor", "accuracy", "loss", "zeros", "zeros_scaled",
        "unchanged", "histogram",
    ),
    runs=runs,
    claims=CLAIMS,
    tables=tables,
    draw=draw,
    published=PUBLISHED,
    rules=RULES,
)  # fmt: skip
