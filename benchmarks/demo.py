"""Train a small causal Transformer with fp32 and with 16-bit weights, and say whether the results match.

    python benchmarks/demo.py [--model small] [--device cuda] [--optimizer rmsprop] [--out folder]

The text is the source of Python's standard library, byte by byte, so nothing is downloaded. The runs start from the same
weights, see the same batches and advance in turn, so that a load on the machine slows all of them and an interrupt
leaves comparable results. 16-bit means `model.to(dtype)`, norms and embeddings included; the only fp32 weights are the
masters inside our optimizers. fp16 runs have an `amp_kernels.GradScaler`. In the overflow drill it starts far too high.
"""

import argparse
import csv
import math
import random
import signal
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import amp_kernels
from amp_kernels.optim import FusedRMSprop, FusedSGD

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
OURS = {"sgd": FusedSGD, "rmsprop": FusedRMSprop}
TORCH = {"sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}
OPTIONS = {"sgd": {"lr": 0.3, "momentum": 0.9}, "rmsprop": {"lr": 1e-3}}
FASTEST = {"sgd": {"fused": True}, "rmsprop": {"foreach": True}}  # torch's best implementation of each
MAX_GRAD_NORM = 1.0
TEXT_BYTES = 4_000_000
EVALUATIONS, EVALUATION_BATCHES = 5, 10
TOLERANCE = 0.01  # 16-bit matches fp32 when their validation losses differ by at most this fraction
DRILL_SCALE = 2.0**24  # fp16 ends at 65504: the first backward passes must overflow


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    context: int
    batch: int


SIZES = {"small": Size(2, 64, 64, 8), "large": Size(6, 384, 128, 8)}


@dataclass
class Run:
    """What one training run is, then what was measured of it."""

    name: str
    panel: str  # of the figure; the first run of a panel is the one that the others are compared with
    size: Size
    optimizer: str
    precision: str
    ours: bool = True
    drill: bool = False
    steps: int = 0
    validation_loss: float = math.nan
    step_ms: float = math.nan
    optimizer_ms_ours: float = math.nan
    optimizer_ms_torch: float = math.nan
    peak_memory_mb: float = math.nan
    bytes_per_parameter: float = math.nan
    steps_skipped: int = 0
    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    overflows: list[amp_kernels.grad_scaler.Overflow] = field(default_factory=list)


# Text and model


def read_text() -> Tensor:
    """A few megabytes of the standard library's source. The order of the files is shuffled once and for all, so that the
    part held out for validation is not just the end of the alphabet."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idlelib", "encodings", "pydoc_data", "__pycache__"}
    paths = sorted(p.relative_to(root) for p in root.rglob("*.py"))
    paths = [root / p for p in paths if not skipped.intersection(p.parts)]
    random.Random(0).shuffle(paths)
    text = b"".join(path.read_bytes() for path in paths)[:TEXT_BYTES]
    if len(text) < 100_000:
        sys.exit(f"demo: {root} must hold the source of the standard library, got {len(text)} bytes of it.")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.token, self.position = nn.Embedding(256, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, 256)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """The loss in fp32: each byte from those before it."""
        text = text.long()
        x = self.token(text[:, :-1]) + self.position.weight
        return F.cross_entropy(
            self.head(self.norm(self.blocks(x))).float().flatten(0, 1), text[:, 1:].flatten()
        )


def batches(text: Tensor, size: Size, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(size.context + 1)
    while True:
        start = torch.randint(len(text) - size.context, (size.batch, 1), generator=generator)
        yield text[(start + window).to(text.device)]


# Training


class Training:
    """A run under way. `advance` keeps `run` up to date, so that an interrupt leaves what was measured until then."""

    def __init__(self, run: Run, text: Tensor, seed: int, steps: int):
        torch.manual_seed(seed)
        self.run, self.steps, self.times = run, steps, []
        self.model = Transformer(run.size).to(text.device, DTYPES[run.precision])
        options = OPTIONS[run.optimizer]
        if run.ours:
            named = (
                self.model.named_parameters()
            )  # with names, the scaler can say where an overflow came from
            self.optimizer = OURS[run.optimizer](named, **options, max_grad_norm=MAX_GRAD_NORM)
        else:
            self.optimizer = TORCH[run.optimizer](
                self.model.parameters(), **options, **FASTEST[run.optimizer]
            )
        scale, growth_interval = (DRILL_SCALE, 40) if run.drill else (2.0**16, 2000)
        self.scaler = amp_kernels.GradScaler(
            text.device.type,
            init_scale=scale,
            growth_interval=growth_interval,
            enabled=run.precision == "fp16",
        )
        # linear warm-up over a tenth of the steps, then half a cosine down to a tenth of the learning rate
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: min(
                (step + 1) / (1 + steps // 10), 0.55 + 0.45 * math.cos(math.pi * min(step / steps, 1))
            ),
        )
        self.batches = batches(text, run.size, seed)

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(next(self.batches))
        self.scaler.scale(loss).backward()
        if not self.run.ours:
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        return loss.detach()

    def advance(self, count: int) -> None:
        run, device, losses = self.run, self.model.head.weight.device, []
        held_bytes = sum(t.nbytes for t in self.held())
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            allocated = torch.cuda.memory_allocated(device)
        began = time.perf_counter()
        for _ in range(count):
            if run.drill:
                run.scales.append(self.scaler.get_scale())
            losses.append(self.step())
            if run.drill:
                self.note_overflow()
        run.losses += torch.stack(losses).tolist()  # waits for the device
        self.times.append((time.perf_counter() - began) / count)
        self.note_overflow()
        run.steps += count
        run.steps_skipped = int(self.scaler.skipped_steps)
        run.step_ms = 1e3 * statistics.median(self.times)
        if device.type == "cuda":
            others = allocated - held_bytes  # the other runs' models, on the same device
            run.peak_memory_mb = (torch.cuda.max_memory_allocated(device) - others) / 1e6

    def held(self) -> list[Tensor]:
        """Weights, gradients, optimizer state and masters."""
        state = self.optimizer.state
        everything = (t for p in self.model.parameters() for t in (p, p.grad, *state.get(p, {}).values()))
        return [t for t in everything if isinstance(t, Tensor)]

    def note_overflow(self) -> None:
        overflow = self.scaler.last_overflow
        if overflow and overflow not in self.run.overflows:
            self.run.overflows.append(overflow)
            tqdm.write(f"{self.run.name}: overflow at step {overflow.step} in {overflow.parameter}, skipped")

    def evaluate(self, held_out: Tensor) -> None:
        """The mean loss over the same batches whichever the run, and the bytes."""
        run = self.run
        some = islice(batches(held_out, run.size, 0), EVALUATION_BATCHES)
        with torch.no_grad():
            run.validation_loss = torch.stack([self.model(batch) for batch in some]).mean().item()
        run.validation.append((run.steps, run.validation_loss))
        held_bytes = sum(t.nbytes for t in self.held())
        run.bytes_per_parameter = held_bytes / sum(p.numel() for p in self.model.parameters())
        if not held_out.is_cuda:
            run.peak_memory_mb = (held_bytes + self.activation_bytes(held_out)) / 1e6

    def activation_bytes(self, text: Tensor) -> int:
        """What a forward pass keeps for the backward pass, the parameters not counted."""
        saved = {}

        def pack(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.model(next(batches(text, self.run.size, 0)))
        for p in self.model.parameters():
            saved.pop(p.data_ptr(), None)
        del loss  # kept the tensors alive until here, so that no address was used twice
        return sum(saved.values())


def train(trainings: list[Training], held_out: Tensor, steps: int, stop: Callable[[], bool]) -> None:
    """All runs in turn: a step each, on a GPU ten, since reading the loss waits for the device."""
    stride = 10 if held_out.is_cuda else 1
    bars = [
        tqdm(total=steps, desc=f"{t.run.name:20}", unit="step", position=i, disable=None, dynamic_ncols=True)
        for i, t in enumerate(trainings)
    ]
    done, evaluated = 0, -1
    while done < steps and not stop():
        count = min(stride, steps - done)
        for training, bar in zip(trainings, bars, strict=True):
            training.advance(count)
            bar.set_postfix(loss=f"{training.run.losses[-1]:.3f}", refresh=False)
            bar.update(count)
        done += count
        if done * EVALUATIONS // steps > (done - count) * EVALUATIONS // steps:
            evaluated = done
            for training in trainings:
                training.evaluate(held_out)
    for training, bar in zip(trainings, bars, strict=True):
        bar.close()
        if 0 < done != evaluated:
            training.evaluate(held_out)


# Our optimizer step against torch's


def compare_optimizers(training: Training, repeats: int = 20) -> None:
    """Median time of unscale, clip and update, ours and torch's in turn on equal weights and gradients."""
    rivals = {"optimizer_ms_ours": our_step, "optimizer_ms_torch": torch_step}
    steps = {}
    for name, make in rivals.items():
        parameters = [nn.Parameter(p.detach().clone()) for p in training.model.parameters()]
        for p in parameters:
            p.grad = torch.randn_like(p)
        steps[name] = make(training.run, parameters)
    times = {name: [] for name in rivals}
    for _ in range(repeats):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if training.model.head.weight.is_cuda:
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - began)
    for name, values in times.items():
        setattr(training.run, name, 1e3 * statistics.median(values[3:]))


def our_step(run: Run, parameters: list[nn.Parameter]) -> Callable[[], None]:
    optimizer = OURS[run.optimizer](parameters, **OPTIONS[run.optimizer], max_grad_norm=MAX_GRAD_NORM)
    scaler = ready_scaler(amp_kernels.GradScaler, run, parameters)

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return step


def torch_step(run: Run, parameters: list[nn.Parameter]) -> Callable[[], None]:
    """For 16-bit weights what people write by hand: fp32 copies, torch's optimizer over them, casts both ways."""
    masters = parameters
    if run.precision != "fp32":
        masters = [nn.Parameter(p.detach().float()) for p in parameters]
        for master in masters:
            master.grad = torch.empty_like(master)
    optimizer = TORCH[run.optimizer](masters, **OPTIONS[run.optimizer], **FASTEST[run.optimizer])
    scaler = ready_scaler(torch.amp.GradScaler, run, parameters)

    @torch.no_grad()
    def step() -> None:
        if masters is not parameters:
            torch._foreach_copy_([m.grad for m in masters], [p.grad for p in parameters])
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(masters, MAX_GRAD_NORM)
        scaler.step(optimizer)
        scaler.update()
        if masters is not parameters:
            torch._foreach_copy_(parameters, masters)

    return step


def ready_scaler(kind: type[torch.amp.GradScaler], run: Run, parameters: list[nn.Parameter]):
    device = parameters[0].device
    scaler = kind(device.type, init_scale=1.0, enabled=run.precision == "fp16")
    scaler.scale(torch.ones((), device=device))  # it makes its tensors when first asked to scale
    return scaler


# The plan: which runs, how many steps


def runs_of(args: argparse.Namespace, size: Size) -> list[Run]:
    optimizers = ["sgd", "rmsprop"] if args.optimizer == "both" else [args.optimizer]
    automatic = "fp16" if args.device.type == "cuda" else "bf16"  # torch's fp16 matmul crawls on most CPUs
    precision = automatic if args.precision == "auto" else args.precision
    runs = []
    for optimizer in optimizers:
        torch_name, our_name = TORCH[optimizer].__name__, OURS[optimizer].__name__
        panel = f"{torch_name}, {size.layers} layers of width {size.width}"
        runs.append(Run(f"fp32 {torch_name}", panel, size, optimizer, "fp32", ours=False))
        runs.append(Run(f"{precision} {our_name}", panel, size, optimizer, precision))
    if args.precision in ("auto", "fp16"):
        panel = f"Overflow drill: small model, {our_name}"
        runs.append(Run("drill, fp32", panel, SIZES["small"], optimizer, "fp32", ours=False))
        runs.append(Run("drill, fp16 + scaler", panel, SIZES["small"], optimizer, "fp16", drill=True))
    return runs


def seconds_per_step(run: Run, text: Tensor) -> float:
    training = Training(run, text, seed=0, steps=4)
    for _ in range(4):
        training.advance(1)
    return statistics.median(training.times[1:])


def plan(args: argparse.Namespace, text: Tensor) -> tuple[list[Run], int]:
    """Measures a few steps of every run, then takes as many as the budget holds, the same number for all. Without --model
    the small one stands in where the large one could not take half of its steps."""
    for name in [args.model] if args.model else ["large", "small"]:
        size = replace(SIZES[name], **{k: v for k in ("layers", "width") if (v := getattr(args, k))})
        second = sum(seconds_per_step(replace(run, drill=False), text) for run in runs_of(args, size))
        # an evaluation batch is a third of a step, comparing the optimizers takes about ten
        left = args.deadline - time.perf_counter()
        affordable = int(0.9 * left / second) - EVALUATIONS * EVALUATION_BATCHES // 3 - 10
        if affordable >= args.steps / 2:
            break
    steps = max(1, min(args.steps, affordable))
    if steps < args.steps:
        print(
            f"Cut from {args.steps} to {steps} steps a run to stay within --budget-seconds {args.budget_seconds}."
        )
    runs = runs_of(args, size)
    print(f"{len(runs)} runs of {steps} steps on {args.device}, seed {args.seed}: {size}", flush=True)
    return runs, steps


# The report

COLUMNS = {
    "run": "name",
    "steps": "steps",
    "validation\nloss": "validation_loss",
    "ms per\nstep": "step_ms",
    "optimizer\nms, ours": "optimizer_ms_ours",
    "optimizer\nms, torch": "optimizer_ms_torch",
    "peak\nMB": "peak_memory_mb",
    "bytes per\nparameter": "bytes_per_parameter",
    "steps\nskipped": "steps_skipped",
}


def verdict(runs: list[Run]) -> str:
    """The sentence this program exists for, from the numbers."""
    differences = {}
    for _, (base, *others) in groupby(runs, key=lambda run: run.panel):
        for run in others:
            differences[run.name] = run.validation_loss / base.validation_loss - 1
    matched = all(abs(difference) <= TOLERANCE for difference in differences.values())  # NaN does not match
    return (
        f"Training in {' and '.join(sorted({run.precision for run in runs if run.ours}))} "
        f"{'matched' if matched else 'did NOT match'} fp32: after {runs[0].steps} steps the validation loss differs by "
        f"{', '.join(f'{d:+.2%} ({name})' for name, d in differences.items())}; up to {TOLERANCE:.0%} is a match."
    )


def report(runs: list[Run], args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    rows = [[getattr(run, attribute) for attribute in COLUMNS.values()] for run in runs]
    with open(args.out / "demo.csv", "w", newline="") as file:
        csv.writer(file).writerows([COLUMNS.values(), *rows])
    print("\n" + tabulate(rows, COLUMNS, floatfmt=("", "", ".4f", ".1f", ".2f", ".2f", ".1f", ".1f", "")))
    peak = "counted: all of those and what forward keeps for backward"
    peak = (
        "torch.cuda.max_memory_allocated, without the other runs' models"
        if args.device.type == "cuda"
        else peak
    )
    print(
        "\noptimizer: unscale, clip, update; torch's is its fastest, for 16-bit weights over fp32 copies made by hand"
    )
    print(f"bytes per parameter: weights, gradients, optimizer state, masters\npeak: {peak}")
    for run in runs:
        if run.overflows:
            first, seen = (
                run.overflows[0],
                f"{run.steps_skipped} of {run.steps} steps overflowed and were skipped",
            )
            print(f"{run.name}: {seen}, the first at step {first.step} in {first.parameter}")
    draw(runs, args.out / "demo.png")
    print(f"\n{verdict(runs)}\nCurves and table: {args.out / 'demo.png'}, {args.out / 'demo.csv'}")


def draw(runs: list[Run], path: Path) -> None:
    panels = [(title, list(group)) for title, group in groupby(runs, key=lambda run: run.panel)]
    size = (5.2 * len(panels), 4.4)
    figure, all_axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    for axes, (title, group) in zip(all_axes[0], panels, strict=True):
        for run, line, dot in zip(group, ("C0-", "C1--"), ("C0o", "C1+"), strict=True):
            axes.plot(range(1, run.steps + 1), smooth(run.losses), line, label=f"{run.name}, training")
            axes.plot(*zip(*run.validation, strict=True), dot, ms=9, label=f"{run.name}, validation")
            if run.drill:
                right = axes.twinx()
                right.step(range(1, run.steps + 1), run.scales, color="0.6", lw=1)
                right.set_yscale("log", base=2)
                right.set_ylabel("loss scale (grey)")
        axes.set(title=title, xlabel="step", ylabel="loss in nats per byte, smoothed")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=130)


def smooth(values: list[float], weight: float = 0.8) -> list[float]:
    """An exponential mean that does not start at zero."""
    smoothed, total = [], 0.0
    for i, value in enumerate(values, 1):
        total = weight * total + (1 - weight) * value
        smoothed.append(total / (1 - weight**i))
    return smoothed


def parse_arguments() -> argparse.Namespace:
    def whole(text: str) -> int:
        if not text.isdecimal() or int(text) == 0:
            raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text}")
        return int(text)

    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", choices=list(SIZES), help="default: large, or small on a slow machine")
    parser.add_argument("--layers", type=whole, help="instead of the model's own")
    parser.add_argument("--width", type=whole, help="instead of the model's own; a multiple of 32")
    parser.add_argument("--steps", type=whole, default=150, help="of each run, if the budget holds them")
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda or cuda:N; auto takes a GPU if there is one"
    )
    parser.add_argument(
        "--precision", choices=["auto", *DTYPES], default="auto", help="of the weights in our runs"
    )
    parser.add_argument("--optimizer", choices=["sgd", "rmsprop", "both"], default="both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path("demo-results"), help="folder of demo.png and demo.csv"
    )
    parser.add_argument("--budget-seconds", type=whole, default=150, help="steps are cut to stay within")
    args = parser.parse_args()
    if (args.width or 32) % 32:
        parser.error(f"argument --width: must be a multiple of 32 (the width of a head), got {args.width}")
    try:
        args.device = torch.device(
            ("cpu", "cuda")[torch.cuda.is_available()] if args.device == "auto" else args.device
        )
        torch.empty((), device=args.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(
            f"argument --device: must be a device torch can use, got {args.device} ({str(error).splitlines()[0]})"
        )
    if args.device.type not in ("cpu", "cuda"):
        parser.error(f"argument --device: must be cpu or cuda, got {args.device}")
    return args


def main() -> int:
    args = parse_arguments()
    args.deadline = time.perf_counter() + args.budget_seconds
    interrupts = []

    def interrupt(*_) -> None:  # finish the step and report; a second Ctrl-C ends it at once
        interrupts.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, interrupt)
    text = read_text().to(args.device)
    cut = len(text) * 9 // 10
    runs, steps = plan(args, text[:cut])
    trainings = [Training(run, text[:cut], args.seed, steps) for run in runs]
    train(trainings, text[cut:], steps, lambda: bool(interrupts) or time.perf_counter() > args.deadline)
    if not runs[0].steps:
        print("Stopped before the first step, so there is nothing to report.")
        return 130
    if runs[0].steps < steps:
        print(
            f"Stopped at step {runs[0].steps} of {steps}: {'Ctrl-C' if interrupts else 'the budget is used up'}."
        )
    if not interrupts:
        for training in trainings:
            compare_optimizers(training)
    report(runs, args)
    return 130 if interrupts else 0


if __name__ == "__main__":
    sys.exit(main())
