"""Time and memory of training with and without mixed precision: a tiny network, a U-Net, a BERT-shaped encoder."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import matplotlib
import torch
from torch import Tensor, nn

import amp_kernels
from amp_kernels.optim import FusedAdamW

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
    mean_and_error,
    number,
    ratio,
    seconds_side_by_side,
    spread,
)
from .memory import of_both_passes
from .networks import ENCODER, FEED_FORWARD, TASKS, U_NET, Batch, Task, task
from .peers import first_line, reasons_below

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FIRST_SCALE = 2.0**12  # from torch's default of 2^16 most runs lose their first step
TIME, MEMORY = "time", "memory"  # the two parts


# ------------------------------------------------------------------------------------------------------------- the ways
@dataclass(frozen=True)
class Way:
    """How a network is trained."""

    name: str
    optimizer: Callable[..., torch.optim.Optimizer]
    autocast: torch.dtype | None = None  # with fp32 weights
    weights: torch.dtype = torch.float32
    scaler: type[torch.amp.GradScaler] | None = None


def _flashoptim(params: list, **options: float) -> torch.optim.Optimizer:
    import flashoptim

    return flashoptim.FlashAdamW(params, **options)


def _bitsandbytes(params: list, **options: float) -> torch.optim.Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(params, **options)


def _torchao(params: list, **options: float) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, **options)


FP32, TORCH_FP16, TORCH_BF16 = "fp32", "torch autocast fp16", "torch autocast bf16"
OURS_FP16, OURS_BF16 = "amp_kernels fp16", "amp_kernels bf16"
LEAN_FP16, LEAN_BF16 = "amp_kernels fp16, int8 states", "amp_kernels bf16, int8 states"
BITSANDBYTES, TORCHAO, FLASHOPTIM = "autocast bf16, bitsandbytes", "autocast bf16, torchao", "flashoptim bf16"
_LEAN = partial(FusedAdamW, state_dtype=torch.int8)
_TORCH = partial(torch.optim.AdamW, fused=True)
WAYS = {
    way.name: way
    for way in (
        Way(FP32, _TORCH),
        Way(TORCH_FP16, _TORCH, torch.float16, scaler=torch.amp.GradScaler),
        Way(TORCH_BF16, _TORCH, torch.bfloat16),
        Way(OURS_FP16, FusedAdamW, weights=torch.float16, scaler=amp_kernels.GradScaler),
        Way(OURS_BF16, FusedAdamW, weights=torch.bfloat16),
        Way(LEAN_FP16, _LEAN, weights=torch.float16, scaler=amp_kernels.GradScaler),
        Way(LEAN_BF16, _LEAN, weights=torch.bfloat16),
        Way(BITSANDBYTES, _bitsandbytes, torch.bfloat16),
        Way(TORCHAO, _torchao, torch.bfloat16),
        Way(FLASHOPTIM, _flashoptim, weights=torch.bfloat16),
    )
}
HUES = ("grey", "tab:red", "tab:orange", *BLUES, "tab:purple", "tab:green", "tab:brown")
COLOURS = dict(zip(WAYS, HUES, strict=True))
PAIRS = [(name, *pair) for name in TASKS for pair in ((OURS_FP16, TORCH_FP16), (OURS_BF16, TORCH_BF16))]
LEAN_PAIRS = [(name, *pair) for name in TASKS for pair in ((LEAN_FP16, OURS_FP16), (LEAN_BF16, OURS_BF16))]


class Training:
    """A network under way, and the batches of its steps, which were made before: the clock sees none of that."""

    def __init__(self, task: Task, way: Way, seed: int, device: torch.device, batches: Sequence[Batch]) -> None:
        torch.manual_seed(seed)
        self.task, self.way, self.device = task, way, device
        self.model = task.make().to(device)
        if way.weights is not torch.float32:
            self.model.to(way.weights)
            for module in self.model.modules():
                if isinstance(module, nn.BatchNorm2d):  # its running averages change by less than 16 bits can show
                    module.float()
        if way.optimizer in (FusedAdamW, _LEAN) and any(
            isinstance(module, nn.Linear) for module in self.model.modules()
        ):
            amp_kernels.nn.convert_linear_(self.model)
        self.optimizer = way.optimizer(list(self.model.parameters()), lr=task.lr)
        make = way.scaler or torch.amp.GradScaler
        self.scaler = make(device.type, init_scale=FIRST_SCALE, enabled=way.scaler is not None)
        self.batches = iter(batches)

    def loss(self, batch: Batch) -> Tensor:
        x, expected = batch
        dtype = self.way.autocast
        with torch.autocast(self.device.type, dtype) if dtype else nullcontext():
            output = self.model(x.to(self.way.weights) if x.is_floating_point() else x)
        return self.task.loss(output, expected)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(next(self.batches))).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    @torch.no_grad()
    def held_out_loss(self, batches: int = 8) -> float:
        self.model.eval()
        some = self.task.batches(0, self.device, is_held_out=True)
        return statistics.mean(self.loss(next(some)).item() for _ in range(batches))

    def kept_bytes(self) -> int:
        """Weights, gradients and optimizer state, each storage once."""
        model = (t for p in (*self.model.parameters(), *self.model.buffers()) for t in (p, p.grad))
        states = (t for state in self.optimizer.state.values() for t in state.values())
        tensors = (t for each in (*model, *states) if isinstance(each, Tensor) for t in _plain(each))
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that a wrapper, such as torchao's 8-bit state, is made of."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor


def step_bytes(task: Task, way: Way, device: torch.device) -> int:
    """On a GPU the most that a whole step allocates. On a CPU what the forward pass leaves for the backward pass, and
    weights, gradients and state."""
    batches = list(islice(task.batches(0, device), 4))
    training = partial(Training, task, way, 0, device, batches)
    if device.type == "cuda":
        training().step()  # makes what stays: handles, workspaces
        gc.collect()
        before = torch.cuda.memory_allocated(device)
        one = training()
        for _ in batches[1:]:
            one.step()
        torch.cuda.reset_peak_memory_stats(device)
        one.step()
        return torch.cuda.max_memory_allocated(device) - before
    one = training()
    held = of_both_passes(lambda: one.loss(batches[0]), device).held
    one.optimizer.step()  # makes the state
    return held + one.kept_bytes()


# ------------------------------------------------------------------------------------------------------------ the parts
def is_slow(way: str, name: str, settings: Settings) -> bool:
    """On a CPU torch's convolutions and products in fp16 take 6 to 40 times as long as in fp32. We leave the first
    to torch and multiply in fp32."""
    if settings.device.type == "cuda" or name == FEED_FORWARD:
        return False
    return way == TORCH_FP16 or (way in (OURS_FP16, LEAN_FP16) and name == U_NET)


def left_out(way: str, name: str, settings: Settings) -> str:
    """Why torchao is not timed in every network: 60 s for the U-Net's 20 shapes."""
    if way == TORCHAO and (name != ENCODER or settings.is_quick):
        return (
            "timed only for the encoder, and only in a full run, because it compiles its step, which takes 2 to 7 s "
            "per shape"
        )
    return ""


def memory_of(settings: Settings, name: str) -> list[Row]:
    found = {}
    rows = [{"part": MEMORY, "task": name, "way": way} for way in WAYS]
    for row in rows:
        way = WAYS[row["way"]]
        try:
            if reason := left_out(way.name, name, settings):
                raise RuntimeError(reason)
            found[way.name] = step_bytes(task(name, settings), way, settings.device)
            row |= {"megabytes": f"{found[way.name] / 1e6:.5g}", "memory": f"{found[way.name] / found[FP32]:.4g}"}
        except Exception as error:  # whatever a peer raises is its reason
            row["note"] = first_line(error).removeprefix("RuntimeError: ")
    return rows


def time_of(settings: Settings, name: str, ways: Sequence[str], seed: int, rounds: int, learns: bool) -> list[Row]:
    """Steps of all `ways` in turn; `learns`: there are so many that a loss says something."""
    one = task(name, settings)
    batches = list(islice(one.batches(seed, settings.device), 1 + rounds))
    trainings = {}
    for way in ways:
        try:
            trainings[way] = Training(one, WAYS[way], seed, settings.device, batches)
            trainings[way].step()  # the warm-up
        except Exception:  # the row of its memory says why
            trainings.pop(way, None)
    times = seconds_side_by_side(
        {way: each.step for way, each in trainings.items()}, rounds, settings.device, warm_ups=0
    )
    rows = []
    for way, training in trainings.items():
        row = {"part": TIME, "task": name, "way": way, "seed": seed, "rounds": rounds}
        row |= figures("time", ratio(times[way], times[FP32]))
        row |= {"loss": f"{training.held_out_loss():.4g}"} if learns else {}
        rows.append(row)
    return rows


def runs(settings: Settings) -> list[Run]:
    found = []
    for name in TASKS:
        slow = [way for way in WAYS if is_slow(way, name, settings)]
        fast = [way for way in WAYS if way not in slow and not left_out(way, name, settings)]
        found.append(Run(f"{name} memory", partial(memory_of, settings, name)))
        rounds = task(name, settings).rounds
        found += [
            Run(f"{name} seed {seed}", partial(time_of, settings, name, fast, seed, rounds, True))
            for seed in settings.seeds
        ]
        if slow:
            few = settings.pick(cpu=4, cuda=4, quick=2)
            found.append(Run(f"{name} slow", partial(time_of, settings, name, [FP32, *slow], 0, few, False)))
    return found


# ----------------------------------------------------------------------------------------------------------- the claims
Spread = tuple[float, float, float]
NOT_MEASURED = Verdict(UNDECIDED, "Not measured.")


def times(rows: Sequence[Row], name: str, way: str) -> Spread:
    """Of fp32: the mean of the seeds' medians, the least 20th and the largest 80th percentile; NaN if not measured."""
    found = [row for row in rows if (row["part"], row["task"], row["way"]) == (TIME, name, way)]
    if not found:
        return math.nan, math.nan, math.nan
    medians, lows, highs = zip(*(spread(row, "time") for row in found), strict=True)
    return statistics.mean(medians), min(lows), max(highs)


def memory(rows: Sequence[Row], name: str, way: str) -> float:
    found = [row for row in rows if (row["part"], row["task"], row["way"]) == (MEMORY, name, way)]
    return number(found[0], "memory") if found else math.nan


def saves_time(name: str, limit: float, rows: Sequence[Row]) -> Verdict:
    """Whether torch's autocast to fp16 takes less than `limit` of fp32's time."""
    found, bf16 = times(rows, name, TORCH_FP16), times(rows, name, TORCH_BF16)
    if math.isnan(found[0]):
        return NOT_MEASURED
    because = f"torch's autocast to fp16 takes {_times(*found, ' as long as fp32')}, to bf16 {_times(*bf16)}."
    return decided(found[2] < limit, found[1] >= limit, because)


def gains_nothing(name: str, limit: float, rows: Sequence[Row]) -> Verdict:
    """The opposite of `saves_time`."""
    verdict = saves_time(name, limit, rows)
    opposite = {HOLDS: FALSIFIED, FALSIFIED: HOLDS, UNDECIDED: UNDECIDED}
    return Verdict(opposite[verdict.word], verdict.because)


def saves_memory(rows: Sequence[Row]) -> Verdict:
    tiny, *larger = (memory(rows, name, TORCH_FP16) for name in TASKS)
    if any(map(math.isnan, (tiny, *larger))):
        return NOT_MEASURED
    shown = ", ".join(f"{name} {value:.2f}" for name, value in zip(TASKS, (tiny, *larger), strict=True))
    return decided(
        max(larger) < 0.95 and 0.95 <= tiny <= 1.05, max(larger) >= 1, f"Memory as a multiple of fp32's: {shown}."
    )


def ours_takes_less_memory(rows: Sequence[Row]) -> Verdict:
    ratios = [memory(rows, name, ours) / memory(rows, name, theirs) for name, ours, theirs in PAIRS]
    if any(map(math.isnan, ratios)):
        return NOT_MEASURED
    return decided(max(ratios) < 0.98, max(ratios) > 1.02, f"Memory as a multiple of autocast's: {_by_pair(ratios)}.")


def ours_takes_less_time(rows: Sequence[Row]) -> Verdict:
    pairs = [(times(rows, name, ours), times(rows, name, theirs)) for name, ours, theirs in PAIRS]
    if any(math.isnan(ours[0] + theirs[0]) for ours, theirs in pairs):
        return NOT_MEASURED
    won, lost = sum(a[2] < b[1] for a, b in pairs), sum(a[1] > b[2] for a, b in pairs)
    shown = _by_pair([ours[0] / theirs[0] for ours, theirs in pairs])
    because = f"It wins {won} of {len(pairs)} pairs and loses {lost}. Time as a multiple of autocast's: {shown}."
    return decided(won >= 4 and not lost, lost >= 3, because)


def int8_states_take_less_memory(rows: Sequence[Row]) -> Verdict:
    """Than bitsandbytes'."""
    ratios = {name: memory(rows, name, LEAN_BF16) / memory(rows, name, BITSANDBYTES) for name in TASKS}
    if any(map(math.isnan, ratios.values())):
        return NOT_MEASURED
    shown = ", ".join(f"{name} {value:.2f}" for name, value in ratios.items())
    because = f"Memory as a multiple of bitsandbytes': {shown}."
    return decided(max(ratios.values()) < 0.98, max(ratios.values()) > 1.02, because)


def int8_states_take_no_more_time(rows: Sequence[Row]) -> Verdict:
    pairs = [(times(rows, name, lean), times(rows, name, full)) for name, lean, full in LEAN_PAIRS]
    if any(math.isnan(lean[0] + full[0]) for lean, full in pairs):
        return NOT_MEASURED
    ratios = [lean[0] / full[0] for lean, full in pairs]
    lost = sum(lean[1] > full[2] for lean, full in pairs)
    shown = _by_pair(ratios, LEAN_PAIRS)
    because = f"It loses {lost} of {len(pairs)} pairs. Time as a multiple of that with fp32 states: {shown}."
    return decided(not lost and max(ratios) <= 1.02, lost > 0, because)


def _range(middle: float, low: float, high: float) -> str:
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def _times(middle: float, low: float, high: float, than: str = "") -> str:
    return f"{middle:.3g} times{than} ({low:.3g} to {high:.3g})"


def _by_pair(ratios: Sequence[float], pairs: Sequence[tuple[str, str, str]] = PAIRS) -> str:
    named = [(name, ours.removeprefix("amp_kernels ").removesuffix(", int8 states")) for name, ours, _ in pairs]
    return ", ".join(f"{name} {dtype} {value:.3g}" for (name, dtype), value in zip(named, ratios, strict=True))


RULES = """
The time of a step is a multiple of the fp32 step's in the same round. p20 and p80 are its 20th and 80th percentile over
the rounds. The first three rules time torch's autocast to fp16 with GradScaler.
"""
LESS = "Holds if p80 < {0} for every seed. Falsified if p20 >= {0} for every seed. Otherwise undecided."
CLAIMS = (
    Claim(
        "A BERT-shaped encoder trains in less than half the time under mixed precision.",
        LESS.format(0.5),
        partial(saves_time, ENCODER, 0.5),
    ),
    Claim(
        "A U-Net trains in less time under mixed precision.",
        LESS.format(1),
        partial(saves_time, U_NET, 1),
    ),
    Claim(
        "A tiny feed-forward network gains no time by mixed precision.",
        "Holds if p20 >= 0.95 for every seed. Falsified if p80 < 0.95 for every seed. Otherwise undecided.",
        partial(gains_nothing, FEED_FORWARD, 0.95),
    ),
    Claim(
        "Autocast to fp16 saves memory in the U-Net and the encoder, and none in the tiny network.",
        "Holds if the first two take less than 0.95 of fp32's bytes and the last takes 0.95 to 1.05. Falsified if one "
        "of the first two takes at least as many bytes as fp32. Otherwise undecided.",
        saves_memory,
    ),
    Claim(
        "16-bit weights under the optimizer of amp_kernels take less memory than torch's autocast to the same dtype.",
        "Holds if the bytes are below 0.98 of autocast's in the three networks, in fp16 and bf16. Falsified if they "
        "are above 1.02 of autocast's in one case. Otherwise undecided.",
        ours_takes_less_memory,
    ),
    Claim(
        "16-bit weights under the optimizer of amp_kernels take less time than torch's autocast to the same dtype.",
        "A pair is a network and a dtype; here p20 is the smallest p20 of the seeds, and p80 the largest p80. A pair "
        "is won if the p80 of amp_kernels is below the p20 of autocast, and lost if the p20 of amp_kernels is above "
        "the p80 of autocast. Holds if at least four of the six pairs are won and none is lost. Falsified if at least "
        "three are lost. Otherwise undecided.",
        ours_takes_less_time,
    ),
    Claim(
        "With int8 states, bf16 weights under the optimizer of amp_kernels take less memory than autocast to bf16 with "
        "the 8-bit AdamW of bitsandbytes.",
        "Holds if the bytes are below 0.98 of bitsandbytes' in the three networks. Falsified if they are above 1.02 of "
        "them in one network. Otherwise undecided.",
        int8_states_take_less_memory,
    ),
    Claim(
        "A step with int8 states takes no more time than one with fp32 states.",
        "A pair is a network and a dtype. A pair is lost if the smallest p20 of the seeds with int8 states is above "
        "the largest p80 with fp32 states. Falsified if a pair is lost. Holds if none is lost and, in every pair, the "
        "mean of the medians is at most 1.02 of that with fp32 states. Otherwise undecided.",
        int8_states_take_no_more_time,
    ),
)


# ----------------------------------------------------------------------------------------------------------- the tables
def tables(rows: Sequence[Row]) -> list[Table]:
    notes = [row for row in rows if row["part"] == MEMORY]
    made = []
    for title, cell in (
        (
            "Time of a step, as a multiple of the fp32 step: mean of the seeds' medians (least 20th to largest 80th "
            "percentile)",
            _time_cell,
        ),
        ("Memory of a step, as a multiple of the fp32 step", _memory_cell),
        ("Loss on held-out data after the last step, mean ± standard error over the seeds", _loss_cell),
    ):
        lines = tuple((way, *(cell(rows, name, way) for name in TASKS)) for way in WAYS)
        made.append(Table(title, ("", *TASKS), lines, reasons_below(notes, "way") if cell is _time_cell else ()))
    return made


def _time_cell(rows: Sequence[Row], name: str, way: str) -> str:
    figures = times(rows, name, way)
    return "" if math.isnan(figures[0]) else "1" if way == FP32 else _range(*figures)


def _memory_cell(rows: Sequence[Row], name: str, way: str) -> str:
    value = memory(rows, name, way)
    return "" if math.isnan(value) else f"{value:.3g}"


def _loss_cell(rows: Sequence[Row], name: str, way: str) -> str:
    found = [number(row, "loss") for row in rows if (row["part"], row["task"], row["way"]) == (TIME, name, way)]
    found = [loss for loss in found if not math.isnan(loss)]
    if not found:
        return ""
    mean, error = mean_and_error(found)
    return f"{mean:.3f}" if math.isnan(error) else f"{mean:.3f} ± {error:.3f}"


PUBLISHED = (
    Table(
        "Training time without and with mixed precision (spell.ml)",
        ("network", "V100, without", "V100, with", "ratio", "T4, without", "T4, with", "ratio"),
        (
            ("tiny feed-forward", "10m10s", "10m55s", "1.07", "8m43s", "8m39s", "0.99"),
            ("U-Net", "8m25s", "7m58s", "0.95", "13m7s", "9m14s", "0.70"),
            ("BERT", "17m38s", "8m10s", "0.46", "55m17s", "20m27s", "0.37"),
        ),
    ),
    Table(
        "Memory without and with mixed precision, GB (spell.ml)",
        ("network", "V100, without", "V100, with", "ratio", "T4, without", "T4, with", "ratio"),
        (
            ("tiny feed-forward", "1.19", "1.19", "1.00", "0.932", "0.936", "1.00"),
            ("U-Net", "4.33", "3.71", "0.86", "4.26", "2.67", "0.63"),
            ("BERT", "9.62", "8.76", "0.91", "9.35", "8.49", "0.91"),
        ),
    ),
)
ABOUT = """
Three networks are trained with AdamW: a feed-forward network on scikit-learn's handwritten digits, a U-Net that finds
the noise in patches of scikit-learn's two photographs, and a BERT-shaped encoder that finds masked bytes in the source
of Python's standard library. The ways to train them are:

- fp32
- torch's autocast to fp16 with its GradScaler, or to bf16, with fp32 weights and `AdamW(fused=True)`
- amp_kernels: 16-bit weights (batch norms in fp32) under `FusedAdamW`, in fp16 with `amp_kernels.GradScaler`
- the same with `state_dtype=torch.int8`
- autocast to bf16 with the 8-bit AdamW of bitsandbytes or of torchao
- flashoptim

All ways take turns in one process. Each time is divided by the time of the fp32 step in the same round. On a GPU,
memory is the most that the allocator held during a step. On a CPU, it is the bytes of weights, gradients, optimizer
state and what the forward pass keeps for the backward pass. torch's fp16 convolutions and products on a CPU take many
times as long as its fp32 ones. On a CPU, autocast to fp16 (U-Net and encoder) and amp_kernels in fp16 (U-Net) are
therefore timed in 4 rounds only, and no loss is reported for them.
"""


def draw(rows: Sequence[Row], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.5), layout="constrained")
    shown = [way for way in WAYS if any(not math.isnan(memory(rows, name, way)) for name in TASKS)]
    height = 0.85 / max(len(shown), 1)
    for place, way in enumerate(shown):
        places = [position + height * (place - (len(shown) - 1) / 2) for position in range(len(TASKS))]
        figures = [times(rows, name, way) for name in TASKS]
        spread = [[f[0] - f[1] for f in figures], [f[2] - f[0] for f in figures]]
        left.errorbar([f[0] for f in figures], places, xerr=spread, fmt="o", color=COLOURS[way])
        right.barh(places, [memory(rows, name, way) for name in TASKS], height, color=COLOURS[way], label=way)
    for axes, label in (
        (left, "time of a step, fp32 = 1 (lower is better)"),
        (right, "memory of a step, fp32 = 1 (lower is better)"),
    ):
        axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
        axes.set_xlabel(label)
        axes.set_ylim(len(TASKS) - 0.5, -0.5)
    left.set_xscale("log")
    left.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    left.xaxis.set_minor_formatter("")
    left.set_yticks(range(len(TASKS)), TASKS)
    right.set_yticks(range(len(TASKS)), [""] * len(TASKS))
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


EXPERIMENT = Experiment(
    name="time_memory",
    title="Time and memory with and without mixed precision",
    about=ABOUT,
    columns=(
        "part", "task", "way", "seed", "rounds", "time", "time_low", "time_high", "megabytes", "memory", "loss",
    ),
    runs=runs,
    claims=CLAIMS,
    tables=tables,
    draw=draw,
    published=PUBLISHED,
    rules=RULES,
)  # fmt: skip
