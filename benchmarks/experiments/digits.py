"""Accuracy of int8 on the handwritten digits of scikit-learn, which come with the package.

    python -m benchmarks.experiments.digits [--device cuda] [--seeds 10] [--out folder]

An MLP 64-128-64-10 is trained in fp32 on a random half for each seed and predicts the other half, 8980 predictions for
ten seeds. fp16 and bf16 are that model cast; weight-only, dynamic and static are it quantized. QAT and int8 saved
activations are trained anew, from the same weights on the same batches, so that their difference to fp32 contains the
luck of another training run: the standard error of the mean is given. A flipped prediction is one that fp32 made
otherwise, for better or worse.
"""

from __future__ import annotations

import argparse
import copy
import csv
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import amp_kernels
from amp_kernels.quantization import convert_, int8_saved_activations, prepare_, prepare_qat_, quantize_

from ..common import device_name, results_folder

EPOCHS, BATCH, LR = 30, 64, 3e-3
COLUMNS = ("model", "accuracy_percent", "delta_points", "standard_error", "flipped", "predictions", "model_bytes")


class Split:
    """Images [n, 64] from 0 to 1 and labels, in two random halves."""

    def __init__(self, seed: int, device: torch.device) -> None:
        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        x = (torch.from_numpy(images).float() / 16)[order].to(device)
        y = torch.from_numpy(labels).long()[order].to(device)
        half = (len(y) + 1) // 2
        self.train, self.test = (x[:half], y[:half]), (x[half:], y[half:])


def network(seed: int, device: torch.device) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers).to(device)


def trained(model: nn.Module, split: Split, seed: int, epochs: int = EPOCHS, saves_int8: bool = False) -> nn.Module:
    x, y = split.train
    optimizer = torch.optim.Adam(model.parameters(), LR)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(y), generator=generator).to(x.device).split(BATCH):
            # batches of 64: the smallest activation has 640 elements
            with int8_saved_activations(min_numel=64) if saves_int8 else nullcontext():
                output = model(x[batch])
            loss = F.cross_entropy(output, y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def static(model: nn.Module, split: Split) -> nn.Module:
    prepare_(model)
    with torch.no_grad():
        model(split.train[0])
    return convert_(model)


def models(split: Split, seed: int, epochs: int = EPOCHS) -> Iterator[tuple[str, nn.Module]]:
    """(name, model) of every row, fp32 first."""
    device = split.train[0].device
    fp32 = trained(network(seed, device), split, seed, epochs)
    yield "fp32", fp32
    changes: dict[str, Callable[[nn.Module], nn.Module]] = {
        "fp16": lambda model: model.half(),
        "bf16": lambda model: model.bfloat16(),
        "weight-only": lambda model: quantize_(model.half(), "weight_only"),
        "dynamic": lambda model: quantize_(model, "dynamic"),
        "static": lambda model: static(model, split),
    }
    for name, change in changes.items():
        yield name, change(copy.deepcopy(fp32))
    for mode in ("dynamic", "static"):
        yield f"QAT, {mode}", convert_(trained(prepare_qat_(network(seed, device), mode), split, seed, epochs))
    yield "int8 saved activations", trained(network(seed, device), split, seed, epochs, saves_int8=True)


@torch.no_grad()
def predictions(model: nn.Module, x: Tensor) -> Tensor:
    dtype = next((p.dtype for p in model.parameters()), torch.float32)  # of the biases
    return model(x.to(dtype)).argmax(-1)


def nbytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def measure(seeds: int, device: torch.device, epochs: int = EPOCHS) -> list[dict[str, object]]:
    """A row for each model over all seeds."""
    accuracies: dict[str, list[float]] = {}
    flips: dict[str, int] = {}
    sizes: dict[str, int] = {}
    count = 0
    with tqdm(total=seeds * 9, desc="digits", unit="model", disable=None) as bar:
        for seed in range(seeds):
            split = Split(seed, device)
            x, y = split.test
            count += len(y)
            expected = None
            for name, model in models(split, seed, epochs):
                found = predictions(model, x)
                expected = found if expected is None else expected
                accuracies.setdefault(name, []).append((found == y).double().mean().item())
                flips[name] = flips.get(name, 0) + int((found != expected).sum())
                sizes[name] = nbytes(model)
                bar.update()
    rows = []
    for name, values in accuracies.items():
        deltas = [100 * (a - b) for a, b in zip(values, accuracies["fp32"], strict=True)]
        error = statistics.stdev(deltas) / math.sqrt(seeds) if seeds > 1 else math.nan
        numbers = (100 * statistics.mean(values), statistics.mean(deltas), error)
        row = (name, *(round(number, 3) for number in numbers), flips[name], count, sizes[name])
        rows.append(dict(zip(COLUMNS, row, strict=True)))
    return rows


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=default, help=f"cpu or cuda (here: {default})")
    parser.add_argument("--seeds", type=int, default=10, help="random halves (%(default)s)")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="folder of the CSV (benchmarks/results/<machine>)")
    args = parser.parse_args()
    name = device_name(args.device)
    out = args.out or results_folder(args.device)
    out.mkdir(parents=True, exist_ok=True)
    if args.device.type == "cpu":
        torch.set_num_threads(1)  # for layers so small a second thread takes three times as long
    rows = measure(args.seeds, args.device, args.epochs)
    print(tabulate(rows, headers="keys"))
    versions = {"device_name": name, "torch_version": torch.__version__}
    versions["amp_kernels_version"] = amp_kernels.__version__
    path = out / "digits.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, *versions])
        writer.writeheader()
        writer.writerows({**row, **versions} for row in rows)
    print(path)


if __name__ == "__main__":
    main()
