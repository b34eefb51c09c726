"""What this package wants to reach on a GPU, and what was measured: goals.csv, from the tables in a folder of results.

    python benchmarks/gpu/goals.py benchmarks/results/h200

A goal that is not met has a limiter: what the time is spent on.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

FIELDS = ("goal", "case", "measured", "unit", "peer", "met", "limiter")
Row = dict[str, str]
Tables = dict[str, list[Row]]  # by the stem of the file


@dataclass(frozen=True)
class Found:
    """A measured case of a goal. `limiter` explains it if the goal is not met."""

    case: str
    measured: float
    peer: str
    limiter: str


@dataclass(frozen=True)
class Goal:
    """`least` is the smallest value that meets the goal. If it is None, the goal is to be at most `most`."""

    text: str
    unit: str
    find: Callable[[Tables], Iterator[Found]]
    least: float | None = None
    most: float | None = None

    def is_met(self, measured: float) -> bool:
        return measured >= self.least if self.least is not None else measured <= (self.most or 0)


# ----------------------------------------------------------------------------------------------- times on the device
def on_device(tables: Tables, family: str) -> dict[tuple[str, str], dict[str, float]]:
    """Microseconds by (case, dtype), then by way."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in tables.get("device_times", []):
        if row["family"] == family and row["microseconds"]:
            found.setdefault((row["case"], row["dtype"]), {})[row["way"]] = float(row["microseconds"])
    return found


def streaming(tables: Tables) -> Iterator[Found]:
    """In percent of the fastest copy. States of 8 and 16 bits have a goal of their own."""
    rows = [row for row in tables.get("device_times", []) if row["family"] == "streaming" and row["tb_s"]]
    copy = max((float(row["tb_s"]) for row in rows if row["way"] == "copy"), default=0.0)
    for row in rows:
        if row["way"] != "ours" or "states" in row["case"]:
            continue
        fixed = "a fixed cost of 5 to 12 us: launches, the first loads, the last blocks"
        limiter = fixed if "25.6M" in row["case"] else "a table of addresses is sent first, in 3 us"
        share = 100 * float(row["tb_s"]) / copy
        yield Found(f"{row['case']}, {row['dtype']}", share, f"a copy, {copy:g} TB/s", limiter)


def odd_sizes(tables: Tables, peer: str) -> Iterator[Found]:
    for (case, dtype), times in on_device(tables, "linear").items():
        if peer in times:
            limiter = "copies of the operands"
            if times["ours"] > 0.8 * times["torch linear"]:
                limiter = "the call is torch's: with copies the host would take longer than the device"
            elif times["ours"] < times["torch linear, multiples of 8"] / 0.95:
                limiter = "the product itself: copies take less than 5 % of the time"
            yield Found(f"{case}, {dtype}", times[peer] / times["ours"], peer, limiter)


def with_gelu(tables: Tables) -> Iterator[Found]:
    for (case, dtype), times in on_device(tables, "linear").items():
        if "torch linear, gelu" in times:
            yield Found(
                f"{case}, {dtype}", times["torch linear, gelu"] / times["ours"], "torch linear, gelu",
                "the products of cuBLAS, which both call",
            )  # fmt: skip


def int8_products(tables: Tables) -> Iterator[Found]:
    """Of torch's product without scales, or of the faster one of our two engines."""
    for (case, _), times in on_device(tables, "int8_products").items():
        peers = {way: us for way, us in times.items() if way in ("cuda", "triton", "torch._int_mm")}
        peer = min(peers, key=peers.__getitem__)
        limiter = "mma.sync; a call of Triton's would take the host longer" if peer != "cuda" else "few blocks"
        yield Found(case, peers[peer] / times["default"], peer, limiter)


# -------------------------------------------------------------------------------------------------------- whole steps
def steps(tables: Tables, table: str, case: str, elements: int, peer: str, ours: str = "") -> Iterator[Found]:
    """The peer's time divided by ours. `peer` and `ours` are in the contenders' names."""
    rows = [
        row
        for row in tables.get(table, [])
        if row["case"].startswith(case) and row["elements"] == str(elements) and row["median_ms"]
    ]
    mine = next((row for row in rows if row["contender"].startswith("amp_kernels") and ours in row["contender"]), None)
    theirs = [row for row in rows if peer in row["contender"] and not row["contender"].startswith("amp_kernels")]
    if mine is None or not theirs:
        return
    best = min(theirs, key=lambda row: float(row["median_ms"]))
    ratio = float(best["median_ms"]) / float(mine["median_ms"])
    limiter = "host: addresses of all tensors are read in each step" if elements == 64_000 else "instructions"
    yield Found(f"{mine['case']}, {mine['dtype']}, {elements:,}", ratio, best["contender"], limiter)


def milliseconds(tables: Tables) -> Iterator[Found]:
    for table in ("sgd", "rmsprop", "adam"):
        for row in tables.get(table, []):
            if row["elements"] == "64000" and row["contender"].startswith("amp_kernels") and "ours" in row["scaler"]:
                limiter = "host: addresses of all tensors are read in each step"
                yield Found(f"{row['contender']}, {row['dtype']}", float(row["median_ms"]), "", limiter)


def small_steps(tables: Tables) -> Iterator[Found]:
    for table, peer in (("sgd", "torch"), ("rmsprop", "torch"), ("adam", "torch")):
        yield from steps(tables, table, "fp16 weights", 64_000, peer)


MANY = 100_000_000
GOALS = (
    Goal("streaming kernels at 88 % of the rate of a copy, from 25M elements on", "%", streaming, least=88),
    Goal(
        "an SGD step of fp16 weights 1.4 times as fast as torch's fused step of fp32 weights", "times",
        partial(steps, table="sgd", case="fp16 weights", elements=MANY, peer="fp32 model, torch fused"), least=1.4,
    ),
    Goal(
        "an RMSprop step of fp16 weights 2.5 times as fast as torch's foreach step of fp32 weights", "times",
        partial(steps, table="rmsprop", case="fp16 weights", elements=MANY, peer="fp32 model, torch foreach"),
        least=2.5,
    ),
    Goal(
        "an AdamW step with int8 states 1.2 times as fast as torch's fused step of fp32 weights", "times",
        partial(steps, table="lean", case="AdamW, bf16", elements=MANY, peer="fp32 model, torch fused", ours="int8"),
        least=1.2,
    ),
    Goal("a step of 1000 tensors of 64 elements in 0.5 ms", "ms", milliseconds, most=0.5),
    Goal("a step of 1000 tensors of 64 elements 4 times as fast as torch's best", "times", small_steps, least=4),
    Goal(
        "odd K and N: 95 % of the speed of multiples of 8", "of the speed",
        partial(odd_sizes, peer="torch linear, multiples of 8"), least=0.95,
    ),
    Goal(
        "odd K and N: 1.2 times as fast as F.pad", "times", partial(odd_sizes, peer="F.pad, torch linear, slice"),
        least=1.2,
    ),
    Goal("linear with gelu, both passes: 1.05 times as fast as two calls of torch", "times", with_gelu, least=1.05),
    Goal(
        "int8 products: 95 % of the speed of the fastest of torch._int_mm and our engines", "of the speed",
        int8_products, least=0.95,
    ),
)  # fmt: skip


def rows_of(tables: Tables) -> Iterator[dict[str, str]]:
    for goal in GOALS:
        for found in goal.find(tables):
            met = goal.is_met(found.measured)
            limiter = "" if met else found.limiter
            values = (
                goal.text,
                found.case,
                f"{found.measured:.3g}",
                goal.unit,
                found.peer,
                "yes" if met else "no",
                limiter,
            )
            yield dict(zip(FIELDS, values, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the tables; goals.csv is written there")
    folder = parser.parse_args().folder
    tables: Tables = {}
    for path in folder.glob("*.csv"):
        with path.open(newline="") as file:
            tables[path.stem] = list(csv.DictReader(file))
    rows = list(rows_of(tables))
    with (folder / "goals.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(*row.values(), sep="; ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
