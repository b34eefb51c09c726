"""Figures from the CSVs that the benchmarks write.

    python -m benchmarks.plot [folder ...]   # PNGs beside the CSVs; every machine's folder without arguments

`<benchmark>.png`: GB/s over the number of elements, with the copy of the same run.
`<benchmark>_largest.png`: milliseconds at the largest size, whole steps where an optimizer is measured.
Of benchmarks whose cases are not sizes of one thing, `<benchmark>.png`: each peer's time over ours, case by case.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .summary import COPY, LARGE, OURS, RESULTS, Row, benchmarks, largest, timed


def label(row: Row) -> str:
    return row["contender"] if row["scaler"] == "none" else f"{row['contender']}, {row['scaler']}"


def panels(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """(title, rows) of each case with few large tensors."""

    def title(row: Row) -> str:
        return f"{row['case'].removesuffix(LARGE)}, {row['dtype']}"

    large = sorted((row for row in rows if row["case"].endswith(LARGE)), key=title)
    for name, group in groupby(large, title):
        yield name, list(group)


def draw_speed(axes: Axes, rows: Sequence[Row]) -> None:
    for name in dict.fromkeys(map(label, rows)):
        points = sorted((int(row["elements"]), float(row["gb_s"])) for row in rows if label(row) == name)
        style = {"color": "black", "linestyle": "--"} if name == COPY else {"marker": "o", "markersize": 3}
        axes.plot(*zip(*points, strict=True), label=name, linewidth=2.5 if name.startswith(OURS) else 1.2, **style)
    axes.set(xscale="log", yscale="log", xlabel="elements", ylabel="GB/s that the work needs")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6)


def draw_largest(axes: Axes, rows: Sequence[Row]) -> None:
    rows = sorted((row for row in largest(rows) if row["contender"] != COPY), key=lambda row: -float(row["median_ms"]))
    colours = ["tab:red" if row["contender"].startswith(OURS) else "tab:gray" for row in rows]
    bars = axes.barh([label(row) for row in rows], [float(row["median_ms"]) for row in rows], color=colours)
    axes.bar_label(bars, [f"{float(row['median_ms']):.4g}" for row in rows], fontsize=6, padding=2)
    axes.set(xlabel=f"ms for {int(rows[0]['elements']):,} elements" if rows else "")
    axes.tick_params(axis="y", labelsize=6)
    axes.margins(x=0.12)


def ratios(path: Path, rows: Sequence[Row]) -> None:
    """A row of points for each case: to the right of 1 a peer is slower than ours."""
    cases = list(dict.fromkeys((row["case"], row["dtype"]) for row in rows))[::-1]
    chart, axes = plt.subplots(figsize=(9, 1 + 0.22 * len(cases)), layout="constrained")
    others = [row for row in rows if row["contender"] != COPY and not row["contender"].startswith(OURS)]
    for name in dict.fromkeys(row["contender"] for row in others):
        points = [
            (float(row["ratio_to_ours"]), cases.index((row["case"], row["dtype"])))
            for row in others
            if row["contender"] == name and row["ratio_to_ours"]
        ]
        if points:
            axes.plot(*zip(*points, strict=True), "o", markersize=5, label=name)
    axes.axvline(1.0, color="black", linestyle="--")
    axes.set(xscale="log", xlabel="time of a peer / ours", yticks=range(len(cases)))
    axes.set_yticklabels([f"{case}, {dtype}" for case, dtype in cases], fontsize=6)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6)
    axes.set_title(f"{rows[0]['benchmark']} on {rows[0]['device_name']}, torch {rows[0]['torch_version']}", fontsize=9)
    chart.savefig(path, dpi=110)
    plt.close(chart)


def figure(path: Path, rows: Sequence[Row], draw: Callable[[Axes, Sequence[Row]], None]) -> None:
    cases = list(panels(rows))
    columns = min(3, len(cases))
    height = math.ceil(len(cases) / columns)
    chart, grid = plt.subplots(height, columns, figsize=(6 * columns, 4 * height), squeeze=False, layout="constrained")
    for axes, (title, members) in zip(grid.flat, cases, strict=False):
        draw(axes, members)
        axes.set_title(title, fontsize=9)
    for axes in grid.flat[len(cases) :]:
        axes.set_axis_off()
    chart.suptitle(f"{rows[0]['benchmark']} on {rows[0]['device_name']}, torch {rows[0]['torch_version']}")
    chart.savefig(path, dpi=110)
    plt.close(chart)


def draw(folder: Path) -> None:
    """The figures of all CSVs of a folder, beside them."""
    for name, rows in benchmarks(folder).items():
        path, rows = folder / f"{name}.png", timed(rows)
        if any(row["case"].endswith(LARGE) for row in rows):
            figure(path, rows, draw_speed)
            figure(path.with_name(f"{name}_largest.png"), rows, draw_largest)
        elif rows:
            ratios(path, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="folders with CSVs (benchmarks/results/*)")
    for folder in parser.parse_args().folders or sorted(path for path in RESULTS.glob("*") if path.is_dir()):
        draw(folder)
        print(f"{folder}: drawn")


if __name__ == "__main__":
    main()
