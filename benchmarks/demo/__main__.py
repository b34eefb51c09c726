"""Train a small causal Transformer with fp32 and with 16-bit weights, and say whether the results match.

    python -m benchmarks.demo [--model small] [--device cuda] [--optimizer rmsprop] [--out folder]

The text is the source of Python's standard library, byte by byte, so nothing is downloaded. The runs start
from the same weights, see the same batches and advance in turn, so that a load on the machine slows all of
them and an interrupt leaves comparable results. 16-bit means `model.to(dtype)`, norms and embeddings too, with
`amp_kernels.nn.Linear` for every `nn.Linear` (on most CPUs torch's fp16 products are 50 times slower than fp32);
the only fp32 weights are the masters inside our optimizers. fp16 runs have an `amp_kernels.GradScaler`, which in
the overflow drill starts far too high.
"""

import argparse
import csv
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path

# Before torch is imported. OpenMP's spinning waits make a step 5 times slower when another process is busy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import matplotlib
import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from .training import (
    DTYPES,
    EVALUATION_BATCHES,
    OURS,
    SIZES,
    TORCH,
    Run,
    Size,
    Training,
    compare_optimizers,
    read_text,
)

matplotlib.use("Agg")
import matplotlib.pyplot as plt

EVALUATIONS = 5
# 16-bit matches fp32 when their validation losses differ by at most this; seeds differ by some 3%
TOLERANCE = 0.01


def runs_of(args: argparse.Namespace, size: Size) -> list[Run]:
    optimizers = ["sgd", "rmsprop"] if args.optimizer == "both" else [args.optimizer]
    precision = "fp16" if args.precision == "auto" else args.precision
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
    return min(training.times)  # others may use the machine for a moment; the budget guards against more


def plan(args: argparse.Namespace, text: Tensor) -> tuple[list[Run], int]:
    """Times a few steps of every run, then plans as many as the budget holds, the same number for all.

    Without --model the small one stands in where the large one could not take half of its steps.
    """
    for name in [args.model] if args.model else ["large", "small"]:
        size = replace(SIZES[name], **{k: v for k in ("layers", "width") if (v := getattr(args, k))})
        seconds = sum(seconds_per_step(replace(run), text) for run in runs_of(args, size))
        # an evaluation batch takes a third of a step, comparing the optimizers about ten steps
        overhead = EVALUATIONS * EVALUATION_BATCHES // 3 + 10
        affordable = int((args.deadline - time.perf_counter()) / seconds) - overhead
        if affordable >= args.steps / 2:
            break
    steps = max(1, min(args.steps, affordable))
    if steps < args.steps:
        print(f"Cut from {args.steps} to {steps} steps, to fit --budget-seconds {args.budget_seconds}.")
    runs = runs_of(args, size)
    print(f"{len(runs)} runs of {steps} steps on {args.device}, seed {args.seed}: {size}", flush=True)
    return runs, steps


def train(trainings: list[Training], held_out: Tensor, steps: int, stop: Callable[[], bool]) -> None:
    """All runs in turn: a step each, on a GPU ten, since reading the loss waits for the device."""
    stride = 10 if held_out.is_cuda else 1
    bars = [
        tqdm(total=steps, desc=f"{training.run.name:20}", unit="step", position=row, disable=None)
        for row, training in enumerate(trainings)
    ]
    done = evaluated = 0
    while done < steps and not stop():
        count = min(stride, steps - done)
        for training, bar in zip(trainings, bars, strict=True):
            for overflow in training.advance(count):
                where = f"overflow in the gradient of {overflow.parameter}"
                tqdm.write(f"{training.run.name}: step {overflow.step} skipped, {where}")
            bar.set_postfix(loss=f"{training.run.losses[-1]:.3f}", refresh=False)
            bar.update(count)
        done += count
        if done * EVALUATIONS // steps > evaluated * EVALUATIONS // steps:
            evaluated = evaluate(trainings, held_out, done)
    for bar in bars:
        bar.close()
    if done > evaluated:
        evaluate(trainings, held_out, done)


def evaluate(trainings: list[Training], held_out: Tensor, step: int) -> int:
    for training in trainings:
        training.evaluate(held_out)
    return step


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
    """The sentence this program exists for, from the numbers (the drill lost steps on purpose)."""
    pairs = [pair for _, pair in panels(runs) if not pair[1].drill]
    differences = {run.name: run.validation_loss / base.validation_loss - 1 for base, run in pairs}
    matched = all(abs(difference) <= TOLERANCE for difference in differences.values())  # NaN is no match
    listed = " and ".join(f"{difference:+.2%} ({name})" for name, difference in differences.items())
    return (
        f"Training with {runs[1].precision} weights {'matched' if matched else 'did NOT match'} fp32: after "
        f"{runs[1].steps} steps the validation loss differs by {listed}; up to {TOLERANCE:.0%} is a match."
    )


def drill_summary(base: Run, drill: Run) -> str:
    first, last = (f"2^{math.log2(drill.scales[index]):.0f}" for index in (0, -1))
    return (
        f"Overflow drill: {drill.steps_skipped} of {drill.steps} steps overflowed and were skipped, the first in "
        f"{drill.overflows[0].parameter};\nthe loss scale went from {first} to {last}, the validation loss to "
        f"{drill.validation_loss:.3f} (fp32, which lost no step: {base.validation_loss:.3f})."
    )


def panels(runs: list[Run]) -> list[tuple[str, list[Run]]]:
    return [(title, list(group)) for title, group in groupby(runs, key=lambda run: run.panel)]


def report(runs: list[Run], args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    rows = [[getattr(run, attribute) for attribute in COLUMNS.values()] for run in runs]
    with open(args.out / "demo.csv", "w", newline="") as file:
        csv.writer(file).writerows([COLUMNS.values(), *rows])
    formats = ("", "", ".4f", ".1f", ".2f", ".2f", ".1f", ".1f", "")
    peak = "counted: those bytes, and what the forward pass keeps for the backward pass"
    if args.device.type == "cuda":
        peak = "torch.cuda.max_memory_allocated, less the other runs' models"
    print("\n" + tabulate(rows, list(COLUMNS), floatfmt=formats, missingval="-"), end="\n\n")
    print("optimizer: unscale, clip and update; torch's fastest, for 16-bit weights over fp32 copies by hand")
    print("bytes per parameter: weights, gradients, optimizer state and masters")
    print(f"peak: {peak}", end="\n\n")
    draw(runs, args.out / "demo.png")
    if runs[-1].overflows:
        print(drill_summary(*runs[-2:]), end="\n\n")
    print(verdict(runs), end="\n\n")
    print(f"Curves and table: {args.out / 'demo.png'}, {args.out / 'demo.csv'}")


def draw(runs: list[Run], path: Path) -> None:
    pairs = panels(runs)
    size = (5.2 * len(pairs), 4.4)
    figure, all_axes = plt.subplots(1, len(pairs), figsize=size, squeeze=False, layout="constrained")
    for axes, (title, group) in zip(all_axes[0], pairs, strict=True):
        for run, line, dot in zip(group, ("C1--", "C0-"), ("C1+", "C0o"), strict=True):
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
    add = parser.add_argument
    add("--model", choices=list(SIZES), help="large, or small where large would be too slow")
    add("--layers", type=whole, help="instead of the model's own")
    add("--width", type=whole, help="instead of the model's own; a multiple of 32")
    add("--steps", type=whole, default=120, help="of each run, if the budget holds them")
    add("--device", default="auto", help="cpu, cuda or cuda:N; auto takes a GPU if there is one")
    add("--precision", choices=["auto", *DTYPES], default="auto", help="of the weights in our runs")
    add("--optimizer", choices=["sgd", "rmsprop", "both"], default="both", help="which pairs of runs")
    add("--seed", type=int, default=0, help="of weights and batches")
    add("--out", type=Path, default=Path("demo-results"), help="folder of demo.png and demo.csv")
    add("--budget-seconds", type=whole, default=150, help="steps are cut to stay within")
    args = parser.parse_args()
    if (args.width or 32) % 32:
        parser.error(f"argument --width: must be a multiple of 32 (the width of a head), got {args.width}")
    name = args.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        args.device = torch.empty((), device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        parser.error(f"argument --device: must be a device torch can use, got {name} ({reason})")
    if args.device.type not in ("cpu", "cuda"):
        parser.error(f"argument --device: must be cpu or cuda, got {name}")
    return args


def main() -> int:
    args = parse_arguments()
    args.deadline = time.perf_counter() + 0.9 * args.budget_seconds  # the rest is for the report
    interrupts = []

    def interrupt(*_: object) -> None:  # finish the step and report; a second Ctrl-C ends it at once
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
        reason = "interrupted" if interrupts else "the budget is used up"
        print(f"Stopped at step {runs[0].steps} of {steps}: {reason}.")
    if not interrupts:
        for training in trainings:
            compare_optimizers(training)
    report(runs, args)
    return 130 if interrupts else 0


if __name__ == "__main__":
    sys.exit(main())
