"""Figures from the CSVs that the benchmarks write.

    python -m benchmarks.plot [folder ...]   # PNGs beside the CSVs; every machine's folder without arguments

`<benchmark>.png`: GB/s over the number of elements, with the copy of the same run.
`<benchmark>_largest.png`: milliseconds at the largest size, whole steps where an optimizer is measured.
If the cases of a benchmark are not sizes of one thing, `<benchmark>.png` shows, for each case, the time of every peer
divided by the time of amp_kernels, with its spread.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_kernels._loader import import_extra

from .summary import COPY, LARGE, OUR_SCALER, OURS, RESULTS, Row, benchmarks, cases, number, reason, spread, timed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

plt, ticker = (import_extra("benchmarks.plot", f"matplotlib.{name}", "bench") for name in ("pyplot", "ticker"))
plt.switch_backend("Agg")

# amp_kernels is blue in every figure, and nothing else is. Where it has several series they are shades of blue.
BLUES = ("tab:blue", "#7fb6e0", "#0b3c66", "#4a7fd0")
PEERS = (
    "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:gray", "gold",
    "darkgreen", "darkmagenta", "lightcoral",
)  # fmt: skip
MARKERS = "os^D"  # the next one when PEERS are used up
MAX_ROWS = 40  # of a panel of ratios


def label(row: Row, between: str = ", ") -> str:
    """A contender, and the scaler that its step ran under. A panel's title says which function of amp_kernels it is."""
    name = re.sub(rf"^{OURS}(\.\w+)+", OURS, row["contender"])
    scaler = "amp_kernels.GradScaler" if row["scaler"] == OUR_SCALER else row["scaler"]
    return name if scaler == "none" else f"{name}{between}{scaler}"


def styles(rows: Iterable[Row]) -> dict[str, dict[str, object]]:
    """Colour and marker of each contender, the same in all panels of a figure."""
    blues, peers = itertools.cycle(BLUES), ((colour, marker) for marker in MARKERS for colour in PEERS)
    found: dict[str, dict[str, object]] = {}
    for row in rows:
        if label(row) in found:
            continue
        if row["contender"] == COPY:
            found[label(row)] = {"color": "black", "linestyle": "--"}
        elif row["contender"].startswith(OURS):
            found[label(row)] = {"color": next(blues), "marker": "o", "linewidth": 2.5}
        else:
            colour, marker = next(peers)
            found[label(row)] = {"color": colour, "marker": marker}
    return found


def title(rows: Sequence[Row]) -> str:
    """What is measured: a class of amp_kernels, else the benchmark; and where."""
    ours = {row["contender"] for row in rows if row["contender"].startswith(OURS)}
    classes = [found[1] for name in ours if (found := re.fullmatch(rf"{OURS} ([A-Z]\w+)", name))]
    name = classes[0] if len(ours) == len(classes) == 1 else rows[0]["benchmark"]
    return f"{name} on {rows[0]['device_name']}, torch {rows[0]['torch_version']}"


def panels(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """(title, rows) of each case with few large tensors."""

    def name(row: Row) -> str:
        return f"{row['case'].removesuffix(LARGE)}, {row['dtype']}"

    large = sorted((row for row in rows if row["case"].endswith(LARGE)), key=name)
    for case, group in groupby(large, name):
        yield case, list(group)


def draw_speed(axes: Axes, rows: Sequence[Row], style: dict[str, dict[str, Any]]) -> None:
    rows = timed(rows)
    for name in dict.fromkeys(map(label, rows)):
        points = sorted((int(row["elements"]), float(row["gb_s"])) for row in rows if label(row) == name)
        axes.plot(*zip(*points, strict=True), label=name, **{"linewidth": 1.2, "markersize": 3, **style[name]})
    axes.set(xscale="log", yscale="log", xlabel="elements", ylabel="GB/s (higher is better)")
    axes.grid(alpha=0.3)


def draw_largest(axes: Axes, rows: Sequence[Row], style: dict[str, dict[str, Any]]) -> None:
    """The slowest below, and on top what was not timed."""
    most = max(int(row["elements"]) for row in rows)
    rows = [row for row in rows if int(row["elements"]) == most and row["contender"] != COPY]
    rows.sort(key=lambda row: -float(row["median_ms"] or 0))
    colours = [style[label(row)]["color"] if row["contender"].startswith(OURS) else "tab:gray" for row in rows]
    bars = axes.barh([label(row, "\n") for row in rows], [float(row["median_ms"] or 0) for row in rows], color=colours)
    told = [number(row["median_ms"]) or f"not timed: {reason(row['note'])}" for row in rows]
    axes.bar_label(bars, [textwrap.fill(text, 50) for text in told], fontsize=7, padding=2)
    axes.set(xlabel=f"ms for {int(rows[0]['elements']):,} elements (lower is better)")
    axes.tick_params(axis="y", labelsize=6)
    axes.margins(x=0.12)


def why_empty(axes: Axes, rows: Sequence[Row]) -> None:
    """A panel without data says why."""
    reasons = dict.fromkeys(reason(row["note"]) for row in rows if row["note"])
    text = textwrap.fill(f"not timed: {'; '.join(reasons)}", 60)
    axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=8)
    axes.set(xticks=[], yticks=[])


def figure(path: Path, rows: Sequence[Row], draw: Callable[..., None], has_legend: bool) -> None:
    """A panel for each case; `rows` also has what was not timed."""
    found, style = list(panels(rows)), styles(rows)
    columns = min(3, len(found))
    height = math.ceil(len(found) / columns)
    chart, grid = plt.subplots(height, columns, figsize=(6 * columns, 4 * height), squeeze=False, layout="constrained")
    for axes, (name, members) in zip(grid.flat, found, strict=False):
        if any(row["contender"] != COPY for row in timed(members)):
            draw(axes, members, style)
        else:
            why_empty(axes, members)
        axes.set_title(name, fontsize=9)
    for axes in grid.flat[len(found) :]:
        axes.set_axis_off()
    if has_legend:
        legend(chart, columns)
    chart.suptitle(title(timed(rows) or rows))
    chart.savefig(path, dpi=110)
    plt.close(chart)


def legend(chart: Figure, columns: int) -> None:
    """One for all panels, below them."""
    handles = {name: h for axes in chart.axes for h, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    if handles:
        chart.legend(handles.values(), handles, loc="outside lower center", ncols=min(columns, 2) + 1, fontsize=8)


def parts(rows: Sequence[Row]) -> list[tuple[str, list[tuple[str, list[Row]]]]]:
    """(title, cases) of each panel: a case's name and rows. Many cases are divided by their work and dtype."""
    groups = cases(rows)
    if len(groups) <= MAX_ROWS:
        return [("", [(f"{group[0]['case']}, {group[0]['dtype']}", group) for group in groups])]
    found: dict[str, list[tuple[str, list[Row]]]] = {}
    for group in groups:
        work, _, size = group[0]["case"].partition(", ")
        found.setdefault(f"{work}, {group[0]['dtype']}", []).append((size, group))
    return list(found.items())


def ratios(path: Path, rows: Sequence[Row]) -> None:
    """A row of points for each case: to the right of 1 amp_kernels is faster."""
    found = parts(rows)
    others = [row for row in timed(rows) if row["contender"] != COPY and not row["contender"].startswith(OURS)]
    style = styles(others)
    columns = min(2, len(found))
    tallest = [max(len(members) for _, members in found[i : i + columns]) for i in range(0, len(found), columns)]
    heights = [1.2 + 0.24 * cases for cases in tallest]
    size = (9 if columns == 1 else 7 * columns, sum(heights) + 0.8)
    chart, grid = plt.subplots(
        len(heights), columns, figsize=size, height_ratios=heights, squeeze=False, layout="constrained", sharex=True
    )
    for axes, (name, members) in zip(grid.flat, found, strict=False):
        draw_ratios(axes, members, style)
        axes.set_title(name, fontsize=9)
    for axes in grid.flat[len(found) :]:
        axes.set_axis_off()
    for axes in grid.flat[max(0, len(found) - columns) : len(found)]:  # the lowest panel of each column
        axes.set_xlabel(
            "time of the peer / time of amp_kernels\n(left of 1 the peer is faster, right of 1 amp_kernels)"
        )
    for axes in grid.flat:
        axes.tick_params(labelbottom=True)
    legend(chart, columns)
    chart.suptitle(title(timed(rows)), fontsize=10)
    chart.savefig(path, dpi=110)
    plt.close(chart)


def draw_ratios(axes: Axes, members: Sequence[tuple[str, list[Row]]], style: dict[str, dict[str, Any]]) -> None:
    for place, (_, group) in enumerate(members):
        ours = next((row for row in timed(group) if row["contender"].startswith(OURS)), None)
        peers = [row for row in timed(group) if label(row) in style and row["ratio_to_ours"]]
        for row in peers:
            if ours is None:
                break
            ratio, (low, high) = float(row["ratio_to_ours"]), spread(row, ours)
            around = [[max(ratio - low, 0)], [max(high - ratio, 0)]]
            axes.errorbar(
                ratio,
                place,
                xerr=around,
                linestyle="",
                markersize=5,
                elinewidth=0.8,
                **style[label(row)],
                label=label(row),
            )
        if not peers or ours is None:
            reasons = dict.fromkeys(reason(row["note"]) for row in group if row["note"] and not row["median_ms"])
            axes.text(1, place, f" not timed: {'; '.join(reasons) or 'no peer'}", fontsize=6, va="center")
    axes.axvline(1.0, color="black", linestyle="--", linewidth=1)
    axes.set(xscale="log", yticks=range(len(members)))
    axes.set_ylim(len(members) - 0.5, -0.5)
    axes.set_yticklabels([name for name, _ in members], fontsize=7)
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(alpha=0.3)


def draw(folder: Path) -> None:
    """The figures of all CSVs of a folder, beside them."""
    for name, rows in benchmarks(folder).items():
        path = folder / f"{name}.png"
        if any(row["case"].endswith(LARGE) for row in rows):
            figure(path, rows, draw_speed, has_legend=True)
            figure(path.with_name(f"{name}_largest.png"), rows, draw_largest, has_legend=False)
        elif timed(rows):
            ratios(path, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="folders with CSVs (benchmarks/results/*)")
    for folder in parser.parse_args().folders or sorted(path for path in RESULTS.glob("*") if path.is_dir()):
        draw(folder)
        print(f"{folder}: drawn")


if __name__ == "__main__":
    main()
