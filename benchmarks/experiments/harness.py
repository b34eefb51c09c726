"""What the experiments share: runs that can be resumed, a CSV, claims with their rules, timing side by side.

An experiment is a list of runs, each with a key and rows of numbers. The rows of a run are appended to the CSV when it
ends, so that an experiment that was interrupted goes on with the first run that is not there. Claims are judged from
the rows alone: whoever has the CSV gets the same verdicts.
"""

from __future__ import annotations

import csv
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

import amp_kernels

from ..common import device_name

Row = dict[str, Any]
Name = TypeVar("Name", bound=Hashable)
HOLDS, FALSIFIED, UNDECIDED = "holds", "falsified", "undecided"
LEAST_SEEDS = 3  # fewer decide nothing
SHARED = ("run", "seconds", "device_name", "torch_version", "amp_kernels_version", "date", "note")


@dataclass(frozen=True)
class Settings:
    """Where and how large: `is_quick` only shows that it runs."""

    device: torch.device
    is_quick: bool = False

    @property
    def seeds(self) -> range:
        return range(1 if self.is_quick else 3)

    def pick(self, cpu: Any, cuda: Any, quick: Any) -> Any:
        """The size for this machine."""
        return quick if self.is_quick else cuda if self.device.type == "cuda" else cpu


@dataclass(frozen=True)
class Run:
    """A part of an experiment that is repeated as a whole."""

    key: str
    measure: Callable[[], list[Row]]


@dataclass(frozen=True)
class Verdict:
    word: str  # HOLDS, FALSIFIED or UNDECIDED
    because: str  # a sentence with the figure and its spread


def decided(holds: bool, is_false: bool, because: str) -> Verdict:
    return Verdict(HOLDS if holds else FALSIFIED if is_false else UNDECIDED, because)


@dataclass(frozen=True)
class Claim:
    """What others have published or what we say, and the rule that decides, committed before the data."""

    statement: str
    rule: str
    judge: Callable[[Sequence[Row]], Verdict]


@dataclass(frozen=True)
class Table:
    """A table of the page; below it stands who was not run, and why."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    not_run: tuple[str, ...] = ()


@dataclass(frozen=True)
class Experiment:
    """One file of this folder holds one of these, named EXPERIMENT."""

    name: str  # of the file, the CSV and the PNG
    title: str
    about: str  # paragraphs of the page: what is compared, on what data, how it is measured
    columns: tuple[str, ...]  # of the CSV, beside SHARED
    runs: Callable[[Settings], list[Run]]
    claims: tuple[Claim, ...]
    tables: Callable[[Sequence[Row]], list[Table]]  # ours: ratios, never bare seconds
    draw: Callable[[Sequence[Row], Path], None]  # one idea, one PNG
    published: tuple[Table, ...] = field(default=())
    rules: str = ""  # what the rules of several claims share


def read(path: Path) -> list[Row]:
    """Numbers are numbers again, and what was not measured is NaN where a number is asked for (see `number`)."""
    with path.open(newline="") as file:
        return [dict(row) for row in csv.DictReader(file)]


def number(row: Mapping[str, Any], column: str) -> float:
    text = row.get(column, "")
    return float(text) if text not in ("", None) else math.nan


def carry_out(experiment: Experiment, settings: Settings, folder: Path, is_fresh: bool) -> Path:
    """Measures what the CSV in `folder` lacks, and draws it.

    Raises:
        ValueError: The CSV has other columns, because another version of the experiment wrote it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{experiment.name}.csv"
    shared = {
        "device_name": device_name(settings.device),
        "torch_version": torch.__version__,
        "amp_kernels_version": amp_kernels.__version__,
    }
    columns = (*experiment.columns, *SHARED)
    if is_fresh or not path.exists():
        with path.open("w", newline="") as file:
            csv.DictWriter(file, columns, lineterminator="\n").writeheader()
    with path.open(newline="") as file:
        if tuple(next(csv.reader(file))) != columns:
            raise ValueError(f"{path} has the columns of another version; measure it again with --fresh.")
    done = {row["run"] for row in read(path)}
    missing = [run for run in experiment.runs(settings) if run.key not in done]
    for run in tqdm(missing, desc=experiment.name, unit="run", disable=None):
        began = time.perf_counter()
        rows = run.measure()
        seconds = f"{time.perf_counter() - began:.1f}"
        date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writerows({**shared, "run": run.key, "seconds": seconds, "date": date, **row} for row in rows)
    experiment.draw(read(path), path.with_suffix(".png"))
    return path


def seconds_side_by_side(
    contenders: Mapping[Name, Callable[[], object]], rounds: int, device: torch.device, warm_ups: int = 2
) -> dict[Name, list[float]]:
    """Seconds of each contender in each round. They take turns, so that a load on the machine slows all of them; ratios
    are to be taken within a round (`ratio`)."""
    times: dict[Name, list[float]] = {name: [] for name in contenders}
    for turn in range(warm_ups + rounds):
        for name, run in contenders.items():
            _wait(device)
            began = time.perf_counter()
            run()
            _wait(device)
            if turn >= warm_ups:
                times[name].append(time.perf_counter() - began)
    return times


def ratio(times: Sequence[float], of: Sequence[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile of the ratios within a round."""
    ratios = sorted(a / b for a, b in zip(times, of, strict=True))
    low, high = (ratios[min(len(ratios) - 1, int(share * len(ratios)))] for share in (0.2, 0.8))
    return statistics.median(ratios), low, high


ENDS = "", "_low", "_high"  # of three columns, for what `ratio` returns


def figures(column: str, values: Sequence[float]) -> Row:
    return {f"{column}{end}": f"{value:.4g}" for end, value in zip(ENDS, values, strict=True)}


def spread(row: Row, column: str) -> tuple[float, float, float]:
    """What `figures` wrote; NaN where it was not measured."""
    median, low, high = (number(row, f"{column}{end}") for end in ENDS)
    return median, low, high


def mean_and_error(values: Iterable[float]) -> tuple[float, float]:
    """Mean and its standard error; NaN for the error of a single value, and for both where a value is NaN."""
    values = list(values)
    if any(map(math.isnan, values)):  # `statistics.stdev` raises AttributeError
        return math.nan, math.nan
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def no_loss(points: Sequence[float], margin: float) -> Verdict:
    """Whether an accuracy is not lower than another by more than `margin`.

    `points` are their differences, one for each seed. With their mean d and its standard error s the claim holds if
    d - 2s >= -margin, and is falsified if d + 2s < -margin.
    """
    if len(points) < LEAST_SEEDS:
        return Verdict(UNDECIDED, f"{len(points)} of {LEAST_SEEDS} seeds are there.")
    mean, error = mean_and_error(points)
    because = f"{mean:+.2f} points, standard error {error:.2f}, {len(points)} seeds."
    return decided(mean - 2 * error >= -margin, mean + 2 * error < -margin, because)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
