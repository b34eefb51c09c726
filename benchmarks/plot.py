"""Figures and a table of machines from the CSVs that the benchmarks write.

    python -m benchmarks.plot [folder ...]   # PNGs beside the CSVs; every machine's folder without arguments
    python -m benchmarks.plot --table        # the README's table in markdown

`<benchmark>.png`: GB/s over the number of elements, with the copy of the same run.
`<benchmark>_largest.png`: milliseconds at the largest size, whole steps where an optimizer is measured.
Of benchmarks whose cases are not sizes of one thing, `<benchmark>.png`: each peer's time over ours, case by case.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import matplotlib
from tabulate import tabulate

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Row = dict[str, str]
RESULTS = Path(__file__).parent / "results"
OURS, COPY = "amp_kernels", "copy"
SIDES = (4096, 8192)  # of int8 matrices: on a CPU, on a GPU
LARGE = ", few large"  # the layout whose size varies
# (benchmark, case, dtype or "" for any, title): the README's table
TARGETS = (
    ("sgd", "fp16 weights + fp32 masters" + LARGE, "", "SGD with momentum, fp16 weights + fp32 masters"),
    ("rmsprop", "fp16 weights + fp32 masters" + LARGE, "", "RMSprop, fp16 weights + fp32 masters"),
    ("sgd", "fp32 model" + LARGE, "", "SGD with momentum, fp32"),
    ("rmsprop", "fp32 model" + LARGE, "", "RMSprop, fp32"),
    ("sgd", "fp16 weights + fp32 masters, 1000 x 64", "", "SGD, fp16 + masters, 1000 tensors of 64"),
    ("sgd", "fp32 model, 1000 x 64", "", "SGD, fp32, 1000 tensors of 64"),
    ("sgd", "fp32 model, 1000 x 64, cold caches", "", "the same, caches cold"),
    *(
        ("int8", f"quantize {groups}, {side} x {side}", dtype, f"quantize_int8, {groups}, {dtype}")
        for groups, dtype in (("rows", "float16"), ("tensor", "float32"), ("columns", "float32"))
        for side in SIDES
    ),
    *(("int8", f"dequantize rows, {side} x {side}", "float16", "dequantize_int8, rows, float16") for side in SIDES),
    *(("int8", f"int8_matmul, {size}x4096x4096", "", f"int8_matmul, {size} x 4096 x 4096") for size in (1, 8, 4096)),
)


def read(path: Path) -> list[Row]:
    """Rows that were timed."""
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row.get("median_ms")]


def largest(rows: Sequence[Row]) -> list[Row]:
    most = max(int(row["elements"]) for row in rows)
    return [row for row in rows if int(row["elements"]) == most]


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
    print(path)


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
    print(path)


def table(folders: Sequence[Path]) -> str:
    """Markdown: for each machine and target case ours, its fastest peer, the copy."""
    lines = []
    for folder in folders:
        for benchmark, case, dtype, title in TARGETS:
            path = folder / f"{benchmark}.csv"
            rows = [row for row in read(path) if row["case"] == case] if path.exists() else []
            rows = [row for row in rows if row["dtype"] == dtype or not dtype]
            if any(row["contender"].startswith(OURS) for row in rows):
                machine, *line = table_line(title, largest(rows))
                lines.append([machine + (", fresh memory" if folder.name.endswith("-fresh-memory") else ""), *line])
    header = ("machine", "what", "elements", "ours, ms", "% of copy", "fastest peer", "peer, ms", "times faster")
    return tabulate(lines, header, tablefmt="github", disable_numparse=True)


def table_line(title: str, rows: Sequence[Row]) -> list[str]:
    """Of a whole step the peers are those under a scaler too."""
    ours = next(row for row in rows if row["contender"].startswith(OURS))
    peers = [row for row in rows if not row["contender"].startswith((OURS, COPY))]
    peers = [row for row in peers if ours["scaler"] == "none" or row["scaler"] != "none"]
    peers = [row for row in peers if row["ratio_to_ours"]]  # none where our first could not run
    peer = min(peers, key=lambda row: float(row["ratio_to_ours"]), default=None)
    line = [ours["device_name"], title, f"{int(ours['elements']):,}", ours["median_ms"], ours["copy_percent"]]
    return [*line, *([peer["contender"], peer["median_ms"], peer["ratio_to_ours"]] if peer else ["", "", ""])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="folders with CSVs (benchmarks/results/*)")
    parser.add_argument("--table", action="store_true", help="print the table, draw nothing")
    args = parser.parse_args()
    folders = args.folders or sorted(path for path in RESULTS.glob("*") if path.is_dir())
    if args.table:
        print(table(folders))
        return
    for path in sorted(path for folder in folders for path in folder.glob("*.csv")):
        rows = read(path)
        if any(row.get("case", "").endswith(LARGE) for row in rows):  # digits.csv has no cases
            figure(path.with_suffix(".png"), rows, draw_speed)
            figure(path.with_name(f"{path.stem}_largest.png"), rows, draw_largest)
        elif rows and "contender" in rows[0]:
            ratios(path.with_suffix(".png"), rows)


if __name__ == "__main__":
    main()
