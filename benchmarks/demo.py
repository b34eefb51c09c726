"""Train a small causal Transformer with fp32 and with 16-bit weights, and say whether the results match.

    python benchmarks/demo.py [--model small] [--device cuda] [--optimizer rmsprop] [--out folder]

The text is the source of Python's standard library, byte by byte, so nothing is downloaded. Every run starts from the
same weights and sees the same batches. 16-bit means what it says: `model.to(dtype)`, norms and embeddings included; the
only fp32 copies are the masters inside the fused optimizer. Where the weights are fp16 an `amp_kernels.GradScaler` scales
the loss, and the overflow drill starts a small model at an absurd scale so that skipping and recovery can be watched.
"""

import argparse
import csv
import gc
import math
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
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
TEXT_BYTES = 4_000_000
MAX_GRAD_NORM = 1.0
REPORT_EVERY = 10  # steps between two reads of the loss: on a GPU each read waits for the device
EVALUATIONS, EVALUATION_BATCHES = 5, 10
TOLERANCE = 0.01  # 16-bit matches fp32 when their validation losses differ by at most this fraction
DRILL_SCALE = 2.0**24  # fp16 ends at 65504: the first backward passes must overflow

OURS = {"sgd": FusedSGD, "rmsprop": FusedRMSprop}
TORCH = {"sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}
OPTIONS = {"sgd": {"lr": 0.3, "momentum": 0.9}, "rmsprop": {"lr": 1e-3}}
FASTEST = {"sgd": {"fused": True}, "rmsprop": {"foreach": True}}  # torch's best implementation of each


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    context: int
    batch: int


SIZES = {"small": Size(2, 64, 64, 8), "large": Size(6, 384, 128, 8)}


@dataclass
class Run:
    """One training run: what it is, then what was measured."""

    name: str
    size: Size
    optimizer: str
    precision: str
    fused: bool = True
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
    overflows: list[tuple[int, str]] = field(default_factory=list)  # (step, parameter)


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


# One run


def learning_rate_factor(steps: int) -> Callable[[int], float]:
    """Linear warm-up over a tenth of the steps, then half a cosine down to a tenth."""
    warmup = max(1, steps // 10)
    return lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * min(step / steps, 1)))


def training_setup(run: Run, device: torch.device, seed: int):
    torch.manual_seed(seed)
    model = Transformer(run.size).to(device, DTYPES[run.precision])
    if run.fused:
        optimizer = OURS[run.optimizer](
            model.named_parameters(), **OPTIONS[run.optimizer], max_grad_norm=MAX_GRAD_NORM
        )
    else:
        optimizer = TORCH[run.optimizer](
            model.parameters(), **OPTIONS[run.optimizer], **FASTEST[run.optimizer]
        )
    scaler = amp_kernels.GradScaler(
        device.type,
        init_scale=DRILL_SCALE if run.drill else 2.0**16,
        growth_interval=50 if run.drill else 2000,
        enabled=run.precision == "fp16",
    )
    return model, optimizer, scaler


def training_step(run: Run, batch: Tensor, model, optimizer, scaler) -> Tensor:
    optimizer.zero_grad()
    loss = model(batch)
    scaler.scale(loss).backward()
    if not run.fused:
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


@torch.no_grad()
def evaluate(model: Transformer, held_out: Tensor, size: Size) -> float:
    """The mean loss over the same batches whoever asks."""
    return (
        torch.stack([model(batch) for batch in islice(batches(held_out, size, 0), EVALUATION_BATCHES)])
        .mean()
        .item()
    )


def train(run: Run, text: Tensor, held_out: Tensor, seed: int, steps: int) -> None:
    """Fill in `run` as training goes on, so that an interrupt leaves what was measured until then."""
    if text.is_cuda:
        gc.collect()  # the previous run's model must not count
        torch.cuda.reset_peak_memory_stats(text.device)
    model, optimizer, scaler = training_setup(run, text.device, seed)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor(steps))
    source = batches(text, run.size, seed)
    times = []
    try:
        with tqdm(total=steps, desc=f"{run.name:24}", unit="step", dynamic_ncols=True) as bar:
            while run.steps < steps:
                scale = scaler.get_scale() if run.drill else 1.0
                losses = []
                began = time.perf_counter()
                for batch in islice(source, 1 if run.drill else min(REPORT_EVERY, steps - run.steps)):
                    losses.append(training_step(run, batch, model, optimizer, scaler))
                    schedule.step()
                run.losses += torch.stack(losses).tolist()  # waits for the device
                times.append((time.perf_counter() - began) / len(losses))
                run.step_ms = 1e3 * statistics.median(times)
                run.steps += len(losses)
                run.scales.append(scale)
                bar.update(len(losses))
                bar.set_postfix(loss=f"{run.losses[-1]:.3f}", refresh=False)
                if run.steps * EVALUATIONS // steps > len(run.validation):
                    run.validation.append((run.steps, evaluate(model, held_out, run.size)))
                note_overflow(run, scaler)
    finally:
        if run.steps:
            finish(run, model, optimizer, scaler, text, held_out)
    compare_optimizers(run, model)


def note_overflow(run: Run, scaler: amp_kernels.GradScaler) -> None:
    overflow = scaler.last_overflow
    if overflow and (not run.overflows or overflow.step != run.overflows[-1][0]):
        run.overflows.append((overflow.step, str(overflow.parameter)))
        scale = f"2^{math.log2(run.scales[-1]):.0f}" if run.drill else "its scale"
        tqdm.write(
            f"  step {overflow.step}: the gradient of {overflow.parameter} overflowed at loss scale {scale}, step skipped"
        )


def finish(run: Run, model, optimizer, scaler, text: Tensor, held_out: Tensor) -> None:
    if not run.validation or run.validation[-1][0] < run.steps:  # interrupted
        run.validation.append((run.steps, evaluate(model, held_out, run.size)))
    run.validation_loss = run.validation[-1][1]
    run.steps_skipped = int(scaler.skipped_steps)
    parameters = list(model.parameters())
    held = [t for p in parameters for t in (p, p.grad, *optimizer.state[p].values()) if isinstance(t, Tensor)]
    held_bytes = sum(t.nbytes for t in held)
    run.bytes_per_parameter = held_bytes / sum(p.numel() for p in parameters)
    if text.is_cuda:
        peak = torch.cuda.max_memory_allocated(text.device)
    else:
        peak = held_bytes + activation_bytes(model, next(batches(text, run.size, 0)))
    run.peak_memory_mb = peak / 1e6


def activation_bytes(model: Transformer, batch: Tensor) -> int:
    """What one forward pass keeps for the backward pass, the parameters not counted."""
    parameters = {p.data_ptr() for p in model.parameters()}
    saved = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(batch)  # alive until the end, so that no address is used twice
    total = sum(size for address, size in saved.items() if address not in parameters)
    del loss
    return total


# Our optimizer step against torch's


def compare_optimizers(run: Run, model: Transformer, repeats: int = 20) -> None:
    """Median time of unscale, clip and update, ours and torch's in turn on equal weights and gradients."""
    rivals = {"optimizer_ms_ours": our_step, "optimizer_ms_torch": torch_step}
    steps = {name: make(run, with_gradients(model)) for name, make in rivals.items()}
    times = {name: [] for name in steps}
    for _ in range(repeats + 3):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - began)
    for name, values in times.items():
        setattr(run, name, 1e3 * statistics.median(values[3:]))


def with_gradients(model: Transformer) -> list[nn.Parameter]:
    parameters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    for p in parameters:
        p.grad = torch.randn_like(p)
    return parameters


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
    precision = args.precision
    if precision == "auto":
        precision = (
            "fp16" if args.device.type == "cuda" else "bf16"
        )  # torch's fp16 matmul crawls on most CPUs
    runs = []
    for optimizer in optimizers:
        runs.append(Run(f"fp32 {TORCH[optimizer].__name__}", size, optimizer, "fp32", fused=False))
        runs.append(Run(f"{precision} {OURS[optimizer].__name__}", size, optimizer, precision))
    if args.precision in ("auto", "fp16"):
        optimizer = optimizers[0]
        runs.append(Run("drill fp32", SIZES["small"], optimizer, "fp32", fused=False))
        runs.append(Run("drill fp16 + scaler", SIZES["small"], optimizer, "fp16", drill=True))
    return runs


def seconds_per_step(run: Run, text: Tensor) -> float:
    setup = training_setup(run, text.device, 0)
    times = []
    for batch in islice(batches(text, run.size, 0), 4):
        began = time.perf_counter()
        training_step(run, batch, *setup).item()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def plan(args: argparse.Namespace, text: Tensor) -> tuple[list[Run], int]:
    """Measure a few steps of every run, then take as many as the budget holds; all runs take the same number. Without
    --model the small one stands in where the large one could not take half of its steps."""
    deadline = time.perf_counter() + 0.85 * args.budget_seconds
    for name in [args.model] if args.model else ["large", "small"]:
        size = SIZES[name]
        size = replace(size, layers=args.layers or size.layers, width=args.width or size.width)
        runs = runs_of(args, size)
        second = sum(seconds_per_step(run, text) for run in runs)
        # an evaluation batch is a third of a step; comparing the optimizers takes about ten steps
        affordable = int(
            (deadline - time.perf_counter()) / second - EVALUATIONS * EVALUATION_BATCHES / 3 - 10
        )
        if affordable >= args.steps / 2:
            break
    steps = max(1, min(args.steps, affordable))
    if steps < args.steps:
        print(
            f"Cut to {steps} of {args.steps} steps a run, to stay within --budget-seconds {args.budget_seconds:.0f}."
        )
    print(f"{len(runs)} runs of {steps} steps on {args.device}: {size}, seed {args.seed}")
    return runs, steps


# The report


COLUMNS = {
    "run": "name",
    "steps": "steps",
    "validation loss": "validation_loss",
    "ms per step": "step_ms",
    "optimizer ms, ours": "optimizer_ms_ours",
    "optimizer ms, torch": "optimizer_ms_torch",
    "peak MB": "peak_memory_mb",
    "bytes per parameter": "bytes_per_parameter",
    "skipped": "steps_skipped",
}


def verdict(runs: list[Run], steps: int) -> str:
    """The sentence this program exists for, from the numbers."""
    differences, matched = [], True
    for base in (run for run in runs if not run.fused):
        for run in runs:
            if (
                run.fused
                and (run.size, run.optimizer) == (base.size, base.optimizer)
                and run.steps == base.steps == steps
            ):
                difference = run.validation_loss / base.validation_loss - 1
                matched &= abs(difference) <= TOLERANCE
                differences.append(f"{difference:+.2%} ({run.name})")
    if not differences:
        return "No pair of runs was finished, so whether 16-bit training matches fp32 is not known."
    word = "matched" if matched else "did NOT match"
    return (
        f"Training with 16-bit weights {word} fp32: after {steps} steps the validation loss differs by "
        f"{', '.join(differences)}, where at most {TOLERANCE:.0%} counts as a match."
    )


def report(runs: list[Run], steps: int, args: argparse.Namespace) -> None:
    runs = [run for run in runs if run.steps]
    if not runs:
        print("\nStopped before the first step, so there is nothing to report.")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    rows = [[getattr(run, attribute) for attribute in COLUMNS.values()] for run in runs]
    with open(args.out / "demo.csv", "w", newline="") as file:
        csv.writer(file).writerows([COLUMNS.values(), *rows])
    formats = ("", "", ".4f", ".1f", ".2f", ".2f", ".1f", ".1f", "")
    print("\n" + tabulate(rows, headers=[c.replace(", ", "\n") for c in COLUMNS], floatfmt=formats))
    print(
        "optimizer: unscale, clip and update on equal gradients; torch's is its fastest, over fp32 copies for 16-bit weights\n"
        + (
            "peak: torch.cuda.max_memory_allocated"
            if args.device.type == "cuda"
            else "peak: counted bytes of weights, gradients, optimizer state and what forward saves for backward"
        )
        + "\nbytes per parameter: weights, gradients, optimizer state and masters"
    )
    for run in runs:
        if run.overflows:
            step, parameter = run.overflows[0]
            print(
                f"{run.name}: {run.steps_skipped} overflows; first at step {step} in {parameter}; training went on."
            )
    draw(runs, args.out / "demo.png")
    print(f"\n{verdict(runs, steps)}\n\n{args.out}/demo.png and demo.csv hold the curves and the table.")


def draw(runs: list[Run], path: Path) -> None:
    """A panel per optimizer and model size: training loss thin and smoothed, validation loss as dots."""
    panels = list(dict.fromkeys((run.size, run.optimizer) for run in runs))
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(1 + 5 * len(panels), 4.2), squeeze=False, layout="constrained"
    )
    for axes, panel in zip(all_axes[0], panels, strict=True):
        for run in (run for run in runs if (run.size, run.optimizer) == panel):
            color, style = ("C1", "--") if run.fused else ("C0", "-")
            axes.plot(
                range(1, run.steps + 1), smooth(run.losses), style, color=color, label=f"{run.name}, training"
            )
            axes.plot(
                *zip(*run.validation, strict=True),
                "D" if run.fused else "o",
                color=color,
                fillstyle="none" if run.fused else "full",
                ms=9 if run.fused else 5,
                label=f"{run.name}, validation {run.validation_loss:.3f}",
            )
            if run.drill:
                scale = axes.twinx()
                scale.step(range(1, len(run.scales) + 1), run.scales, color="0.6", where="mid")
                scale.set_yscale("log", base=2)
                scale.set_ylabel("loss scale (grey)")
        size = panel[0]
        axes.set(
            title=f"{TORCH[panel[1]].__name__}, {size.layers} layers of width {size.width}",
            xlabel="step",
            ylabel="loss, nats per byte",
        )
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


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
    runs, steps = [], 0
    try:
        text = read_text().to(args.device)
        text, held_out = text[: -len(text) // 10], text[-len(text) // 10 :]
        runs, steps = plan(args, text)
        for run in runs:
            train(run, text, held_out, args.seed, steps)
    except KeyboardInterrupt:
        print("\nInterrupted; here is what was done.")
        report(runs, steps, args)
        return 130
    report(runs, steps, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
