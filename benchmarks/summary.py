"""Compares amp_kernels with the fastest peer in every case of the CSVs, losses as well as wins.

python -m benchmarks.summary    # writes benchmarks/results/README.md, and the figures in README.md
"""

from __future__ import annotations

import codecs
import csv
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Row = dict[str, str]
HERE = Path(__file__).parent
RESULTS = HERE / "results"
README = HERE.parent / "README.md"
OURS, COPY = "amp_kernels", "copy"
OUR_SCALER = "GradScaler ours"  # in the column of scalers: amp_kernels.GradScaler
LARGE = ", few large"  # the layout whose size varies
HEADERS = (
    "case", "dtype", "elements", "amp_kernels, ms", "GB/s", "% of copy", "fastest peer", "peer, ms",
    "times faster (spread)", "fp32, ms",
)  # fmt: skip
FASTER, SLOWER, EVEN = "faster", "slower", "no verdict"


def read(path: Path) -> list[Row]:
    """Rows of a CSV, those too that were not timed. Raises a ValueError if there is no text, as spreadsheets write it:
    UTF-8 with or without a byte order mark, or UTF-16 with one."""
    if path.is_dir():
        raise ValueError(f"{path} must be a CSV file, got a folder")
    data = path.read_bytes()
    is_utf_16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = data.decode("utf-16" if is_utf_16 else "utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ValueError(f"{path} must be text in UTF-8, got other bytes; save it again as CSV UTF-8")
    return list(csv.DictReader(io.StringIO(text, newline="")))


def number(value: float | str, digits: int = 3) -> str:
    """With so many significant digits, never in powers of ten; "" stays what it is."""
    if value == "":
        return ""
    value = float(value)
    decimals = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{round(value, decimals):,.{max(decimals, 0)}f}"


def spread(row: Row, ours: Row) -> tuple[float, float]:
    """The bounds of what a row's ratio is in three fifths of the rounds. Older CSVs hold percentiles of times alone:
    of these the bounds are wider, since a round's times rise and fall together."""
    if row.get("ratio_p20"):
        return float(row["ratio_p20"]), float(row["ratio_p80"])
    return quotients(row, ours)


def quotients(above: Row, below: Row) -> tuple[float, float]:
    """The bounds of the ratio of two times that were not taken in pairs."""
    return float(above["p20_ms"]) / float(below["p80_ms"]), float(above["p80_ms"]) / float(below["p20_ms"])


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
    """The rows of a case: amp_kernels, the fastest peer, and for cases of 16 or 8 bits the fastest in fp32."""

    ours: Row
    peer: Row | None
    fp32: Row | None

    @property
    def verdict(self) -> str:
        """Whether amp_kernels is faster than the fastest peer; neither if 1 lies within the spread; "" without one."""
        return _verdict(self.peer, self.ours)

    @property
    def verdict_of_fp32(self) -> str:
        """The same for the fastest that does the work in fp32."""
        return _verdict(self.fp32, self.ours)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What two runs have in common."""
        return key(self.ours)

    def cells(self, bold: str = "") -> list[str]:
        """In the order of HEADERS; `bold` goes around what shows a loss."""
        ours, peer = self.ours, self.peer or {}
        ratio = with_spread(float(peer["ratio_to_ours"]), spread(peer, ours)) if peer else ""
        fp32 = number((self.fp32 or {}).get("median_ms", ""))
        return [
            ours["case"].removesuffix(LARGE),
            ours["dtype"],
            f"{int(ours['elements']):,}",
            number(ours["median_ms"]),
            number(ours["gb_s"]),
            ours["copy_percent"],
            peer.get("contender", ""),
            number(peer.get("median_ms", "")),
            f"{bold}{ratio}{bold}" if self.verdict == SLOWER else ratio,
            f"{bold}{fp32}{bold}" if self.verdict_of_fp32 == SLOWER else fp32,
        ]

    def record(self) -> dict[str, object]:
        """The same for JSON, with the percentiles."""
        names = ("median_ms", "p20_ms", "p80_ms", "gb_s", "copy_percent")
        of = {"amp_kernels": self.ours, "peer": self.peer, "fp32": self.fp32}
        told: dict[str, object] = dict(zip(("family", "case", "dtype", "elements"), self.key, strict=True))
        for name, row in of.items():
            told[name] = row and {"name": row["contender"], **{column: float(row[column]) for column in names}}
        if self.peer is not None:
            told["times_faster"], told["spread"] = float(self.peer["ratio_to_ours"]), spread(self.peer, self.ours)
        return {**told, "verdict": self.verdict}


def _verdict(row: Row | None, ours: Row) -> str:
    if row is None:
        return ""
    low, high = spread(row, ours)
    return FASTER if low > 1 else SLOWER if high < 1 else EVEN


def key(row: Row) -> tuple[str, str, str, str]:
    return row["benchmark"], row["case"], row["dtype"], row["elements"]


def with_spread(ratio: float, bounds: tuple[float, float]) -> str:
    return f"{number(ratio)} ({number(bounds[0])} to {number(bounds[1])})"


def verdicts(found: Iterable[Line]) -> str:
    """How many cases are won and lost, in words."""
    counts = Counter(line.verdict for line in found if line.peer is not None)
    told = f"amp_kernels is faster than the fastest peer in {counts[FASTER]} of {counts.total()} cases"
    told += f" and slower in {counts[SLOWER]}"
    if counts[EVEN]:
        told += f". {counts[EVEN]} {'case has' if counts[EVEN] == 1 else 'cases have'} no verdict"
    return told


def lines(rows: Iterable[Row]) -> Iterator[Line]:
    """A line for each case with a time of amp_kernels.

    If that is the time of a whole step under a scaler, the times of the peers are too.
    """
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
    """(contender, reason): in how many cases. A wrong result is told with its case."""
    counts: dict[tuple[str, str], int] = {}
    for row in (row for group in cases(rows) for row in group if not row["median_ms"]):
        why = re.sub(r"^ModuleNotFoundError: No module named '(\w+).*", r"\1 is not installed", row["note"])
        if why.startswith("wrong: "):
            why += f", in {row['case'].removesuffix(LARGE)}, {row['dtype']}, {int(row['elements']):,} elements"
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
BEFORE_THE_COUNTS = """\
# Results

The table counts, for each machine and benchmark, the cases in which amp_kernels is faster
than the fastest peer, and those in which it is slower. "No verdict" counts the cases whose spread includes the ratio 1.
The column "fp32 is faster" counts the cases in which doing the same work in fp32 is faster.
"""
AFTER_THE_COUNTS = """
`python -m benchmarks.summary` writes this page from the CSVs in the folders next to it. The tables below hold every
case of a benchmark at its largest size.

- **amp_kernels, ms**: the median over the rounds, of a call as users write it. For an optimizer that is the whole step,
  `scaler.step(optimizer); scaler.update()`.
- **GB/s**: the bytes that the algorithm of amp_kernels must move, divided by that time.
- **% of copy**: GB/s as a share of the speed of a plain copy in the same process. The share can exceed 100, because a
  copy is a yardstick and not a limit: updates in place, which write where they have just read, reach almost 200. Work
  that only reads reaches about 100. The share is small for small tensors, whose time is spent on calls, and for
  products of many rows, which are limited by arithmetic.
- **fastest peer**: the fastest contender that does the same work in the same dtype and passed the same check of its
  result. Peers of an optimizer step run under torch's scaler.
- **times faster (spread)**: the peer's time divided by that of amp_kernels, the median over the rounds. In brackets:
  from the 20th to the 80th percentile. **Bold means that amp_kernels is slower.** If the spread includes 1 there is no
  verdict. Older CSVs have no spread of the ratio. For these the lower end is the peer's 20th percentile divided by the
  80th of amp_kernels, and the upper end the peer's 80th divided by the 20th of amp_kernels. These brackets are wider.
- **fp32, ms**: the fastest peer that does the work in fp32 instead. **Bold means that fp32 is faster.**

How it is measured:

- All contenders take turns in one process. In a *round* each has one turn, and every round has another order.
- On a shared machine the memory is sometimes slower for some seconds. Ratios and shares are therefore taken within a
  round, and the median over the rounds is shown.
- Before every call, a copy of arrays four times as large as all last-level caches together evicts the caches, as the
  rest of a training step does.
- Small tensors (they fit into a core's cache) have two rows: 50 calls in a row with warm caches, and single calls,
  named "cold caches". The CSVs of the Xeon are older: their one row has single calls. The table `lean` has single
  calls only. The table `overhead` has repeated calls only, on one thread. It shows what a call costs apart from its
  kernel.
- The benchmarks make glibc keep freed memory, in pages of 2 MB, as torch's allocator for GPUs does. For folders named
  `fresh-memory` they left glibc as it is, so tensors of more than 32 MB that a call returns lie in new pages.
- Two runs on these shared machines differ by up to 20 %, and by up to 50 % for 1000 small tensors. Treat smaller
  differences as none. The counts at the top do count them, because they use only the spread within one run.
- A step in the table `lean` is `optimizer.step()`, without a scaler. amp_kernels stores int8 states, except for tensors
  of 64 elements, whose states are fp32. The peers store states of 8 bits or fp32 states. A contender is wrong if the
  change of its weights differs by more than 5 % from the change in fp64.
- A contender with a wrong result is not timed; products and convolutions of floats by torch are trusted. Below each
  table is what was not timed, and why.
- When the products of the H200 were measured, `linear` also padded products of at most 2^34 multiplications. It no
  longer does. This concerns the row 8192 x 1023 x 1023, where the host takes longer than the device. `products.csv`
  has times on the device, and `kernels.csv` of the H100 has what Nsight Compute says.

`make bench` measures your machine into a folder here. `python -m amp_kernels bench` takes a few minutes, has fewer
sizes, and needs no clone. On a GPU `make gpu-check` builds, tests and measures, and says which folder to send us.
"""
# Where each is explained is its script's docstring.
OTHERS = {
    "digits": "Accuracy of int8 on the digits of scikit-learn (`benchmarks/experiments/digits.py`). A flipped "
    "prediction differs from that of fp32",
}
MACHINE_COLUMNS = ("device_name", "torch_version", "amp_kernels_version")


def markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (headers, ["---"] * len(headers), *rows)]


def page(folders: Sequence[Path]) -> str:
    """benchmarks/results/README.md."""
    sections = (line for folder in folders for line in machine(folder))
    return "\n".join([BEFORE_THE_COUNTS, *counts(folders), AFTER_THE_COUNTS, *sections])


def counts(folders: Sequence[Path]) -> list[str]:
    """Wins and losses, a row for each machine and benchmark."""
    rows = []
    for folder in folders:
        for name, timings in benchmarks(folder).items():
            found = list(lines(timings))
            of = Counter(line.verdict for line in found if line.peer is not None)
            in_fp32 = [line.verdict_of_fp32 for line in found if line.fp32 is not None]
            beaten = f"{in_fp32.count(SLOWER)} of {len(in_fp32)}" if in_fp32 else ""
            link = f"[{name}](#{_anchor(folder, name)})"
            told = (str(of[FASTER]), str(of[SLOWER]), str(of[EVEN]), beaten)
            rows.append((folder.name, link, str(of.total()), *told, max(row["timestamp"][:10] for row in timings)))
    headers = ("machine", "benchmark", "cases", "faster", "slower", "no verdict", "fp32 is faster", "measured")
    return markdown(headers, rows)


def _anchor(folder: Path, name: str) -> str:
    """Of a benchmark's heading, as GitHub makes it."""
    return f"{name}-on-{folder.name}"


def machine(folder: Path) -> Iterator[str]:
    yield f"## {folder.name}\n"
    for name, rows in benchmarks(folder).items():
        yield from section(folder, name, rows)
    for name, title in OTHERS.items():
        if (path := folder / f"{name}.csv").exists():
            rows = read(path)
            columns = [column for column in rows[0] if column not in MACHINE_COLUMNS]
            yield from (f"### {title}\n", f"{_where(rows[0])}.", "")
            yield from (*markdown(columns, ([_formatted(row[column]) for column in columns] for row in rows)), "")


def section(folder: Path, name: str, rows: list[Row]) -> Iterator[str]:
    """A benchmark's heading, count, table, and what was not timed."""
    found = list(lines(rows))
    yield f"### {name} on {folder.name}\n"
    yield f"{_where(rows[0])}. {verdicts(found)}."
    figures = [figure for figure in (f"{name}.png", f"{name}_largest.png") if (folder / figure).exists()]
    yield " ".join(["Figures:", *(f"[{figure}]({folder.name}/{figure})" for figure in figures)])
    yield ""
    yield from markdown(HEADERS, (line.cells("**") for line in found))
    absent = not_timed(rows)
    yield "\nNot timed:\n" if absent else ""
    for (contender, why), count in absent.items():
        yield f"- {contender}: {why} ({count} case{'s' * (count > 1)})"
    if absent:
        yield ""


def _formatted(text: str) -> str:
    """Numbers of a CSV as they are everywhere on the page."""
    if re.fullmatch(r"\d+", text):
        return f"{int(text):,}"
    return number(text) if re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", text) else text


def _where(row: Row) -> str:
    date = f", {row['timestamp'][:10]}" if "timestamp" in row else ""
    return f"{row['device_name']}, torch {row['torch_version']}, amp_kernels {row['amp_kernels_version']}{date}"


# The lines of README.md: (folder, benchmark, case, dtype, what, peers)
GAINS = (
    (
        "h200", "sgd", "fp16 weights + fp32 masters" + LARGE, "float16",
        "H200: a whole SGD step with momentum, {elements} fp16 weights with fp32 masters",
        ("masters by hand, torch fused SGD", "fp32 model, torch fused SGD"),
    ),
    (
        "h200", "adam", "fp16 weights + fp32 masters" + LARGE, "float16",
        "H200: the same for AdamW",
        ("masters by hand, torch fused AdamW", "fp32 model, torch fused AdamW"),
    ),
    (
        "h200", "matmul", "linear, 4096x4095x4095", "float16",
        "H200: `linear` of 4096 x 4095 x 4095 in fp16",
        ("torch linear", "F.pad, torch linear, slice"),
    ),
    (
        "cpu-2-cores-amd-epyc", "sgd", "fp16 weights + fp32 masters" + LARGE, "float16",
        "Two cores of an AMD EPYC: the SGD step",
        ("masters by hand, torch fused SGD", "masters by hand, compiled", "fp32 model, torch SGD, compiled"),
    ),
    (
        "cpu-2-cores-amd-epyc", "sgd", "fp16 weights + fp32 masters, 1000 x 64", "float16",
        "EPYC: the same for 1000 tensors of 64 weights",
        ("masters by hand, torch fused SGD", "fp32 model, torch fused SGD"),
    ),
    (
        "cpu-2-cores-amd-epyc", "int8", "quantize rows, 4096 x 4096", "float16",
        "EPYC: `quantize_int8` of a 4096 x 4096 matrix in fp16, by row",
        ("torch operators", "torch operators, compiled"),
    ),
)  # fmt: skip
# Indented, also the marks: so the lines are nested under a bullet of README.md, on GitHub too.
BEGIN, END = "  <!-- figures: python -m benchmarks.summary -->\n", "  <!-- end of figures -->"


def gain(folder: str, benchmark: str, case: str, dtype: str, what: str, peers: Sequence[str]) -> str:
    rows = timed(read(RESULTS / folder / f"{benchmark}.csv"))
    rows = largest([row for row in rows if (row["case"], row["dtype"]) == (case, dtype)])
    ours = next(row for row in rows if row["contender"].startswith(OURS))
    others = [next(row for row in rows if row["contender"] == peer) for peer in peers]
    told = [
        f"{row['contender'].replace('model, torch SGD,', 'model,')}: {float(row['median_ms']):.3g} ms, "
        f"{float(row['ratio_to_ours']):.2g}x"
        for row in others
    ]
    what = what.format(elements=f"{int(ours['elements']):,}")
    return f"  - {what}: **{float(ours['median_ms']):.3g} ms** ({'; '.join(told)})."


def with_gains(readme: str) -> str:
    """README.md with the lines from BEGIN to END written again, whatever their indentation was."""
    before, after = re.split(rf" *{BEGIN.strip()}\n.*?{END.strip()}", readme, flags=re.DOTALL)
    return "".join([before, BEGIN, *(gain(*given) + "\n" for given in GAINS), END, after])


def main() -> None:
    folders = sorted(path for path in RESULTS.iterdir() if path.is_dir())
    for path, text in ((RESULTS / "README.md", page(folders)), (README, with_gains(README.read_text()))):
        path.write_text(text)
        print(path)


if __name__ == "__main__":
    main()
