"""What the CSVs say: in every case ours beside the fastest peer, losses as well as wins.

python -m benchmarks.summary    # writes benchmarks/results/README.md, and the figures in README.md
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Row = dict[str, str]
HERE = Path(__file__).parent
RESULTS = HERE / "results"
README = HERE.parent / "README.md"
OURS, COPY = "amp_kernels", "copy"
LARGE = ", few large"  # the layout whose size varies
HEADERS = ("case", "dtype", "elements", "ours, ms", "% of copy", "fastest peer", "peer, ms", "times faster", "fp32, ms")


def read(path: Path) -> list[Row]:
    """Rows of a CSV, those too that were not timed."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def timed(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.get("median_ms")]


def largest(rows: Sequence[Row]) -> list[Row]:
    most = max(int(row["elements"]) for row in rows)
    return [row for row in rows if int(row["elements"]) == most]


def cases(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of each case and dtype, at their largest size."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["case"], row["dtype"]), []).append(row)
    return [largest(group) for group in groups.values()]


@dataclass(frozen=True)
class Line:
    """A case: our row, that of the fastest peer, and of the fastest in fp32 where the case is in fewer bits."""

    ours: Row
    peer: Row | None
    fp32: Row | None

    @property
    def is_loss(self) -> bool:
        return self.peer is not None and float(self.peer["ratio_to_ours"]) < 1

    @property
    def is_faster_in_fp32(self) -> bool:
        return self.fp32 is not None and float(self.fp32["ratio_to_ours"]) < 1

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What two runs have in common."""
        return self.ours["benchmark"], self.ours["case"], self.ours["dtype"], self.ours["elements"]

    def cells(self, bold: str = "") -> list[str]:
        """In the order of HEADERS; `bold` goes around what shows a loss."""
        ours, peer = self.ours, self.peer or {}
        ratio, fp32 = peer.get("ratio_to_ours", ""), (self.fp32 or {}).get("median_ms", "")
        return [
            ours["case"].removesuffix(LARGE),
            ours["dtype"],
            f"{int(ours['elements']):,}",
            ours["median_ms"],
            ours["copy_percent"],
            peer.get("contender", ""),
            peer.get("median_ms", ""),
            f"{bold}{ratio}{bold}" if self.is_loss else ratio,
            f"{bold}{fp32}{bold}" if self.is_faster_in_fp32 else fp32,
        ]


def lines(rows: Iterable[Row]) -> Iterator[Line]:
    """A line for each case that ours was timed in. Where ours is a whole step under a scaler, so are its peers."""
    for group in cases(timed(rows)):
        ours = next((row for row in group if row["contender"].startswith(OURS)), None)
        if ours is None:
            continue
        peers = [row for row in group if row["ratio_to_ours"] and not row["contender"].startswith((OURS, COPY))]
        peers = [row for row in peers if ours["scaler"] == "none" or row["scaler"] != "none"]
        in_fp32 = [row for row in peers if ours["dtype"] != "float32" and "fp32" in re.split(r"\W+", row["contender"])]
        yield Line(ours, fastest([row for row in peers if row not in in_fp32]), fastest(in_fp32))


def fastest(rows: Sequence[Row]) -> Row | None:
    return min(rows, key=lambda row: float(row["ratio_to_ours"]), default=None)


def not_timed(rows: Iterable[Row]) -> dict[tuple[str, str], int]:
    """(contender, reason): in how many cases."""
    counts: dict[tuple[str, str], int] = {}
    for row in (row for group in cases(rows) for row in group if not row["median_ms"]):
        why = re.sub(r"^ModuleNotFoundError: No module named '(\w+).*", r"\1 is not installed", row["note"])
        key = row["contender"], why.removeprefix("RuntimeError: ")
        counts[key] = counts.get(key, 0) + 1
    return counts


def missing_packages(rows: Iterable[Row]) -> list[str]:
    """Packages of peers that a run did not find."""
    found = (re.match(r"ModuleNotFoundError: No module named '(\w+)", row["note"]) for row in rows)
    return sorted({match[1] for match in found if match})


def benchmarks(folder: Path) -> dict[str, list[Row]]:
    """The rows of each CSV of a folder that has cases."""
    tables = {path.stem: read(path) for path in sorted(folder.glob("*.csv"))}
    return {name: rows for name, rows in tables.items() if rows and "contender" in rows[0]}


# ----------------------------------------------------------------------------------------------------------- the pages
INTRODUCTION = """\
# Results

Written by `python -m benchmarks.summary` from the CSVs beside it. **No GPU has been measured.** Each table has every
case of a benchmark at its largest size, wins and losses.

- **ours, ms**: the median of the rounds, of `amp_kernels` as a user calls it. For an optimizer that is the whole step,
  `scaler.step(optimizer); scaler.update()`.
- **% of copy**: the bytes that our algorithm must move, over our time, as a share of the speed of a plain copy in the
  same process. It can exceed 100: a copy is a yardstick and no limit. It is small for small tensors, whose time is that
  of calls, and for products of many rows, whose limit is arithmetic.
- **fastest peer**: the fastest of all that do the same work in the same dtype and passed the same check of their
  result. Peers of a step run under torch's scaler.
- **times faster**: the peer's time over ours, the median over the rounds. **Bold means that we lose.**
- **fp32, ms**: the fastest peer that does the work in fp32 instead. **Bold means that fp32 is the faster choice.**

How it is measured:

- All contenders take turns in one process, in another order in each round. Ratios and shares are medians of what was
  timed side by side, since a shared machine's memory can have two speeds, for seconds each.
- Before every call a copy of four times all last-level caches runs, so that caches are cold, as after the rest of a
  training step. What fits a core's cache is timed twice: 50 calls in a row, and single calls with "cold caches". In
  `overhead` are calls in a row alone, on one thread: what a call costs besides its kernel.
- glibc keeps freed memory, in pages of 2 MB, as torch's allocator for GPUs does. In folders named `fresh-memory` it
  does not: results of more than 32 MB then come from new pages at every call.
- Two runs on these shared machines differ by up to a fifth, of 1000 small tensors by up to a half.
- A contender whose result is wrong is not timed; plain products by torch are trusted. Below each table is what was not
  timed, and why.

`make bench` measures your machine into a folder here. `python -m amp_kernels bench` takes two minutes, with fewer
sizes, and needs no clone. On a GPU `make gpu-check` builds for it, tests, measures, and says which folder to send us.
"""
# Where each is explained is its script's docstring.
OTHERS = {
    "digits": "Accuracy of int8 on the digits of scikit-learn (`benchmarks/digits.py`)",
}
MACHINE_COLUMNS = ("device_name", "torch_version", "amp_kernels_version")


def markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (headers, ["---"] * len(headers), *rows)]


def page(folders: Sequence[Path]) -> str:
    """benchmarks/results/README.md."""
    return "\n".join([INTRODUCTION, *(line for folder in folders for line in machine(folder))])


def machine(folder: Path) -> Iterator[str]:
    yield f"## {folder.name}\n"
    for name, rows in benchmarks(folder).items():
        yield from section(folder, name, rows)
    for name, title in OTHERS.items():
        if (path := folder / f"{name}.csv").exists():
            rows = read(path)
            columns = [column for column in rows[0] if column not in MACHINE_COLUMNS]
            yield from (f"### {title}\n", _where(rows[0]), "")
            yield from (*markdown(columns, ([row[column] for column in columns] for row in rows)), "")


def section(folder: Path, name: str, rows: list[Row]) -> Iterator[str]:
    """A benchmark's heading, count, table, and what was not timed."""
    found = list(lines(rows))
    losses, slower = sum(line.is_loss for line in found), sum(line.is_faster_in_fp32 for line in found)
    beaten = f" fp32 is faster than ours in {slower}." if any(line.fp32 for line in found) else ""
    yield f"### {name}\n"
    yield f"{_where(rows[0])}. Ours loses in {losses} of {len(found)} cases.{beaten}"
    yield " ".join(["Figures:", *(f"[{p.name}]({folder.name}/{p.name})" for p in sorted(folder.glob(f"{name}*.png")))])
    yield ""
    yield from markdown(HEADERS, (line.cells("**") for line in found))
    absent = not_timed(rows)
    yield "\nNot timed:\n" if absent else ""
    for (contender, why), count in absent.items():
        yield f"- {contender}: {why} ({count} case{'s' * (count > 1)})"
    if absent:
        yield ""


def _where(row: Row) -> str:
    date = f", {row['timestamp'][:10]}" if "timestamp" in row else ""
    return f"{row['device_name']}, torch {row['torch_version']}, amp_kernels {row['amp_kernels_version']}{date}"


# The lines of README.md: (folder, benchmark, case, dtype, what, peers)
GAINS = (
    (
        "cpu-2-cores-amd-epyc", "sgd", "fp16 weights + fp32 masters" + LARGE, "float16",
        "A whole SGD step with momentum, {elements} fp16 weights with fp32 masters",
        ("masters by hand, torch fused SGD", "masters by hand, compiled"),
    ),
    (
        "cpu-2-cores-amd-epyc", "sgd", "fp16 weights + fp32 masters, 1000 x 64", "float16",
        "The same for 1000 tensors of 64 weights",
        ("masters by hand, torch fused SGD", "fp32 model, torch fused SGD"),
    ),
    (
        "cpu-2-cores-amd-epyc", "int8", "quantize rows, 4096 x 4096", "float16",
        "`quantize_int8` of a 4096 x 4096 matrix in fp16, by row",
        ("torch operators", "torch operators, compiled"),
    ),
)  # fmt: skip
BEGIN, END = "<!-- figures: python -m benchmarks.summary -->\n", "<!-- end of figures -->"


def gain(folder: str, benchmark: str, case: str, dtype: str, what: str, peers: Sequence[str]) -> str:
    rows = timed(read(RESULTS / folder / f"{benchmark}.csv"))
    rows = largest([row for row in rows if (row["case"], row["dtype"]) == (case, dtype)])
    ours = next(row for row in rows if row["contender"].startswith(OURS))
    others = [next(row for row in rows if row["contender"] == peer) for peer in peers]
    told = [
        f"{row['contender']}: {float(row['median_ms']):.3g} ms, {float(row['ratio_to_ours']):.2g}x" for row in others
    ]
    what = what.format(elements=f"{int(ours['elements']):,}")
    return f"- {what}: **{float(ours['median_ms']):.3g} ms** ({'; '.join(told)})."


def with_gains(readme: str) -> str:
    """README.md with the lines between BEGIN and END written anew."""
    before, rest = readme.split(BEGIN)
    after = rest[rest.index(END) :]
    return "".join([before, BEGIN, *(gain(*given) + "\n" for given in GAINS), after])


def main() -> None:
    folders = sorted(path for path in RESULTS.iterdir() if path.is_dir())
    for path, text in ((RESULTS / "README.md", page(folders)), (README, with_gains(README.read_text()))):
        path.write_text(text)
        print(path)


if __name__ == "__main__":
    main()
