"""Recomputation against quantization: what a training step keeps in memory, how long it takes, what it learns.

    python -m benchmarks.recompute [--device cuda] [--precision bf16] [--batches 4 16 64] [--out folder]

One causal Transformer on the source of Python's standard library (`demo_training.py`) is trained four times from the
same weights on the same batches: as it is; every block under `torch.utils.checkpoint`; with `int8_saved_activations`
around all but the loss; with both, where what the checkpoints keep is int8. The four take their steps in turn, so that
a load on the machine slows all of them.

Memory is counted in one step of its own: "held" is what the forward pass leaves for the backward pass, "peak" the most
during both, gradients too, above what was there before (weights, optimizer state). On a GPU the allocator is asked; on
a CPU every tensor that an operator returns counts with the bytes of its storage for as long as that is alive, which
leaves out scratch memory inside of operators. The loss is that on held-out text after the last step.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

# Before torch is imported, as in demo.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import matplotlib
import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import amp_kernels
from amp_kernels.optim import FusedRMSprop
from amp_kernels.quantization import int8_saved_activations

from .common import device_name, results_folder
from .demo_training import DTYPES, MAX_GRAD_NORM, OPTIONS, Size, Transformer, batches, read_text

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SIZES = {"cpu": Size(4, 128, 128, 0), "cuda": Size(12, 768, 512, 0)}
BATCHES = {"cpu": (2, 8, 32), "cuda": (4, 16, 64)}
EVALUATION = 10, 16  # batches of so many sequences
COLUMNS = (
    "batch", "kept", "held_mb", "peak_mb", "held_percent", "median_ms", "time_percent", "loss",
    "steps", "precision", "layers", "width", "context", "device_name", "torch_version", "amp_kernels_version",
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """How activations wait for the backward pass."""

    name: str
    recomputes: bool
    saves_int8: bool


WAYS = (
    Way("everything", False, False),
    Way("checkpoints", True, False),
    Way("int8", False, True),
    Way("int8 checkpoints", True, True),
)


class Live(TorchDispatchMode):
    """Bytes of the tensors that operators have returned and that are still alive; `peak` the most so far."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in inputs:
                storage = StorageWeakRef(tensor.untyped_storage())
                self.storages[storage.cdata] = storage, tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, self.bytes())
        return result

    def bytes(self) -> int:
        self.storages = {key: pair for key, pair in self.storages.items() if not pair[0].expired()}
        return sum(size for _, size in self.storages.values())


class Training:
    """One way under way."""

    def __init__(self, way: Way, size: Size, text: Tensor, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.way, self.size = way, size
        self.model = Transformer(size).to(text.device, dtype)
        self.optimizer = FusedRMSprop(self.model.parameters(), **OPTIONS["rmsprop"], max_grad_norm=MAX_GRAD_NORM)
        self.batches = batches(text, size, seed=0)
        self.times: list[float] = []

    def loss(self, text: Tensor) -> Tensor:
        text, model = text.long(), self.model
        with int8_saved_activations() if self.way.saves_int8 else nullcontext():
            x = model.token(text[:, :-1]) + model.position.weight
            for block in model.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.way.recomputes else block(x)
            logits = model.head(model.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    def step(self) -> None:
        batch = next(self.batches)
        _wait(batch.device)
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        self.optimizer.step()
        _wait(batch.device)
        self.times.append(time.perf_counter() - began)

    def memory(self) -> tuple[int, int]:
        """(held, peak) bytes of a forward and backward pass, which change nothing."""
        batch = next(batches(torch.zeros(10 * self.size.context, dtype=torch.uint8), self.size, 0))
        batch = batch.to(self.model.head.weight.device)
        self.optimizer.zero_grad()
        if not batch.is_cuda:
            with Live() as live:
                loss = self.loss(batch)
                held = live.bytes()
                loss.backward()
            return held, live.peak
        self.loss(batch).backward()  # makes what stays: handles, workspaces
        self.optimizer.zero_grad()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = self.loss(batch)
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        return held, torch.cuda.max_memory_allocated() - before

    @torch.no_grad()
    def evaluate(self, held_out: Tensor) -> float:
        count, sequences = EVALUATION
        some = islice(batches(held_out, replace(self.size, batch=sequences), 0), count)
        return torch.stack([self.loss(batch) for batch in some]).mean().item()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rung(args: argparse.Namespace, batch: int, text: Tensor, held_out: Tensor) -> list[dict[str, object]]:
    """A row for each way at one batch size."""
    size = replace(args.size, batch=batch)
    trainings = [Training(way, size, text, DTYPES[args.precision]) for way in WAYS]
    memory = [training.memory() for training in trainings]
    for _ in tqdm(range(args.steps), desc=f"batch {batch}", unit="step", disable=None):
        for training in trainings:
            training.step()
    rows = []
    medians = [1e3 * statistics.median(training.times[2:] or training.times) for training in trainings]
    for training, (held, peak), median in zip(trainings, memory, medians, strict=True):
        row = {"batch": batch, "kept": training.way.name}
        row |= {"held_mb": round(held / 1e6, 3), "peak_mb": round(peak / 1e6, 3)}
        row |= {"held_percent": round(100 * held / memory[0][0], 1), "median_ms": float(f"{median:.4g}")}
        row |= {"time_percent": round(100 * median / medians[0], 1), "loss": round(training.evaluate(held_out), 4)}
        rows.append(row)
    return rows


def draw(path: Path, rows: list[dict[str, object]], title: str) -> None:
    panels = (("held_mb", "MB held for the backward pass"), ("median_ms", "ms per step"), ("loss", "held-out loss"))
    chart, grid = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    for axes, (column, label) in zip(grid, panels, strict=True):
        for way in WAYS:
            points = [(row["batch"], row[column]) for row in rows if row["kept"] == way.name]
            axes.plot(*zip(*points, strict=True), marker="o", label=way.name)
        axes.set(xscale="log", xlabel="sequences in a batch", ylabel=label)
        axes.set_xticks(ticks := sorted({row["batch"] for row in rows}), [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        if column != "loss":
            axes.set_yscale("log")
    grid[0].legend(title="what is kept", fontsize=8)
    chart.suptitle(title)
    chart.savefig(path, dpi=110)
    plt.close(chart)
    print(path)


def parse_arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=default, help=f"cpu or cuda (here: {default})")
    parser.add_argument("--precision", choices=DTYPES, help="of the weights (CPU: fp32, GPU: bf16)")
    parser.add_argument("--batches", type=int, nargs="+", help="the ladder (CPU: 2 8 32, GPU: 4 16 64)")
    parser.add_argument("--steps", type=int, default=40, help="of each run (%(default)s)")
    for name in ("layers", "width", "context"):
        parser.add_argument(f"--{name}", type=int, help="of the Transformer")
    parser.add_argument("--out", type=Path, help="folder of CSV and PNG (benchmarks/results/<machine>)")
    args = parser.parse_args()
    kind = args.device.type
    given = {name: value for name in ("layers", "width", "context") if (value := getattr(args, name))}
    args.size = replace(SIZES[kind], **given)
    args.batches = args.batches or BATCHES[kind]
    args.precision = args.precision or ("bf16" if kind == "cuda" else "fp32")
    args.out = args.out or results_folder(args.device)
    return args


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    text = read_text().to(args.device)
    border = len(text) * 9 // 10
    shared = {
        "steps": args.steps, "precision": args.precision, "layers": args.size.layers, "width": args.size.width,
        "context": args.size.context, "device_name": device_name(args.device), "torch_version": torch.__version__,
        "amp_kernels_version": amp_kernels.__version__,
    }  # fmt: skip
    rows = []
    path = args.out / "recompute.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for batch in args.batches:
            new = rung(args, batch, text[:border], text[border:])
            print(tabulate(new, headers="keys", floatfmt="g"))
            writer.writerows(row | shared for row in new)
            file.flush()
            rows += new
    print(path)
    size = f"{args.size.layers} layers of width {args.size.width}, context {args.size.context}, {args.precision}"
    draw(path.with_suffix(".png"), rows, f"A Transformer of {size} on {shared['device_name']}")


if __name__ == "__main__":
    main()
