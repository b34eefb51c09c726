"""Compares amp_kernels with the fastest peer in every case of the CSVs, losses as well as wins.

python -m benchmarks.summary    # writes benchmarks/results/README.md, and the figures in README.md and docs/results.md

A case is a piece of work in one dtype at one size. The figures on the pages stand between
`<!-- NAME: python -m benchmarks.summary -->` and `<!-- end of NAME -->`. What is written there is the section NAME of
figures.md, in which braces name a cell of a CSV or a table of this module.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Row = dict[str, str]
HERE = Path(__file__).parent
RESULTS = HERE / "results"
TEMPLATES = HERE / "figures.md"
PAGES = tuple(HERE.parent / page for page in ("README.md", "docs/results.md", "docs/support.md"))
OURS, COPY = "amp_kernels", "copy"
OUR_SCALER = "GradScaler ours"  # in the column of scalers: amp_kernels.GradScaler
LARGE = ", few large"  # the layout whose size varies
HEADERS = (
    "case", "dtype", "elements", "amp_kernels, ms", "GB/s", "% of copy", "fastest peer", "peer, ms",
    "times faster (spread)", "fp32, ms",
)  # fmt: skip
FASTER, SLOWER, EVEN = "faster", "slower", "no verdict"


def read(path: Path) -> list[Row]:
    """Rows of a CSV, those too that were not timed. Raises a ValueError if there is no text in UTF-8."""
    if path.is_dir():
        raise ValueError(f"{path} must be a CSV file, got a folder")
    try:
        text = path.read_bytes().decode("utf-8-sig")  # spreadsheets write a byte order mark
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


def cases(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of each case: of the same work, dtype and number of elements."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


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
        ratio = with_spread(_ratio(peer), spread(peer, ours)) if peer else ""
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
            told["times_faster"], told["spread"] = _ratio(self.peer), spread(self.peer, self.ours)
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
        peers = [row for row in compared(group) if not does_less(row, ours)]
        in_fp32 = [row for row in peers if ours["dtype"] != "float32" and "fp32" in re.split(r"\W+", row["contender"])]
        yield Line(ours, fastest([row for row in peers if row not in in_fp32]), fastest(in_fp32))


def compared(group: Iterable[Row]) -> list[Row]:
    """The peers' rows of a case in which amp_kernels and the peer were timed."""
    return [row for row in group if row["ratio_to_ours"] and not row["contender"].startswith((OURS, COPY))]


def does_less(row: Row, ours: Row) -> bool:
    """Whether a peer has no scaler where amp_kernels has one. It is listed and takes no part in a verdict."""
    return row["scaler"] == "none" != ours["scaler"]


def _ratio(row: Row) -> float:
    return float(row["ratio_to_ours"])


def fastest(rows: Sequence[Row]) -> Row | None:
    return min(rows, key=_ratio, default=None)


# Words for the notes of rows that were not timed. The notes are made from exceptions of other packages.
REASONS = (
    (r"ModuleNotFoundError: No module named '(\w+).*", r"\1 is not installed"),
    (r"RuntimeError: ((?:left out|takes minutes to compile|torch has no engine)\b.*)", r"\1"),
    (r"NotImplementedError: ((?:flashoptim|torchao \S+|the network|its int8 convolutions) (?:has|are) .*)", r"\1"),
    (r".*__init__\(\) got an unexpected keyword argument '(\w+)'", r"has no argument \1"),
    (r"AttributeError: module '(\w+).*' has no attribute '(\w+)'", r"\1 has no \2"),
    (r".*requires a CUDA device.*", "runs on CUDA only"),
    (r".* not implemented for '(\w+)'.*", r"does not take \1"),
    (r".*self\.size\(\d\) needs to be greater than.*", "refuses this size"),
    (r"\w*(?:Error|Exception)\b.*", "failed in this run, as the note in the CSV says"),
)


def reason(note: str) -> str:
    """Why a row was not timed, in words."""
    for pattern, words in REASONS:
        if match := re.fullmatch(pattern, note, flags=re.DOTALL):
            return match.expand(words)
    return note


def not_timed(rows: Iterable[Row]) -> dict[tuple[str, str], int]:
    """(contender, reason): in how many cases. A wrong result is told with its case."""
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        if row["median_ms"]:
            continue
        why = reason(row["note"])
        if why.startswith("wrong: "):
            why += f", in {row['case'].removesuffix(LARGE)}, {row['dtype']}, {int(row['elements']):,} elements"
        counts[row["contender"], why] = counts.get((row["contender"], why), 0) + 1
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
than the fastest peer, and those in which it is slower. [The results](../../docs/results.md) say what each column means.
"""
AFTER_THE_COUNTS = """
`python -m benchmarks.summary` writes this page from the CSVs in the folders next to it. The tables below hold every
case of a benchmark. A case is a piece of work in one dtype at one size.

- **amp_kernels, ms**: the median over the rounds, of a call as users write it. For an optimizer that is the whole step,
  `scaler.step(optimizer); scaler.update()`.
- **GB/s**: the bytes that the algorithm of amp_kernels must move, divided by that time.
- **% of copy**: GB/s as a share of the speed of a plain copy in the same process. The share can exceed 100, because a
  copy is a yardstick and not a limit: updates in place, which write where they have just read, reach almost 200. Work
  that only reads reaches about 100. The share is small for small tensors, whose time is spent on calls, and for
  products of many rows, which are limited by arithmetic.
- **fastest peer**: the fastest contender that does the same work in the same dtype and passed the same check of its
  result. Peers of an optimizer step run under torch's scaler. The steps of flashoptim have no scaler, and FlashSGD
  keeps its momentum in 16 bits. They are listed below the table and take part in no comparison.
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
    rows = ((folder.name, *row) for folder in folders for row in counts(folder))
    return "\n".join([BEFORE_THE_COUNTS, *markdown(("machine", *COUNTED), rows), AFTER_THE_COUNTS, *sections])


COUNTED = (
    "benchmark", "cases", "faster", "slower", "no verdict", "peer / amp_kernels", "slower in", "slower than fp32 in",
)  # fmt: skip


def counts(folder: Path) -> list[tuple[str, ...]]:
    """Wins and losses of a machine: a row for each benchmark, which names the work that is lost, and one for all."""
    rows = []
    for name, timings in benchmarks(folder).items():
        found = list(lines(timings))
        rows.append(
            (
                f"[{name}](#{_anchor(folder, name)})",
                *_counted(found),
                _between(_ratio(line.peer) for line in found if line.peer is not None),
                _lost((line.ours, line.peer, line.verdict) for line in found),
                _lost((line.ours, line.fp32, line.verdict_of_fp32) for line in found),
            )
        )
    every = every_line(folder)
    return rows if len(rows) == 1 else [*rows, ("all", *_counted(every), "", "", _lost_to_fp32(every))]


def every_line(folder: Path) -> list[Line]:
    return [line for timings in benchmarks(folder).values() for line in lines(timings)]


def totals(*folders: Path) -> list[str]:
    """The sums of several machines."""
    found = [every_line(folder) for folder in folders]
    rows = ((each[0].ours["device_name"], *_counted(each), _lost_to_fp32(each)) for each in found)
    return markdown(("machine", *COUNTED[1:5], "slower than fp32"), rows)


def _counted(found: Iterable[Line]) -> tuple[str, ...]:
    of = Counter(line.verdict for line in found if line.peer is not None)
    return tuple(str(count) for count in (of.total(), of[FASTER], of[SLOWER], of[EVEN]))


def _lost_to_fp32(found: Iterable[Line]) -> str:
    in_fp32 = [line.verdict_of_fp32 for line in found if line.fp32 is not None]
    return f"{in_fp32.count(SLOWER)} of {len(in_fp32)}"


def _lost(found: Iterable[tuple[Row, Row | None, str]]) -> str:
    """The work with losses: in how many cases, and the smallest of the peer's times divided by ours."""
    of: dict[str, list[tuple[Row, str]]] = {}
    for ours, peer, verdict in found:
        if peer is not None:
            of.setdefault(ours["case"].partition(", ")[0], []).append((peer, verdict))
    told = []
    for work, members in of.items():
        if least := fastest([peer for peer, verdict in members if verdict == SLOWER]):
            lost = sum(verdict == SLOWER for _, verdict in members)
            told.append(f"{work}: {lost} of {len(members)}, down to {number(_ratio(least))}x")
    return "; ".join(told)


def _between(figures: Iterable[float], unit: str = "x") -> str:
    """The smallest and the largest, "" if there is none."""
    found = sorted(figures)
    return " to ".join(dict.fromkeys(f"{number(end)}{unit}" for end in (*found[:1], *found[-1:])))


def _size(row: Row) -> str:
    """A case without its work."""
    of = row["case"].removesuffix(LARGE).partition(", ")[2]
    return f"{of + ', ' if of else ''}{row['dtype']}, {int(row['elements']):,} elements"


def without_scaler(rows: Iterable[Row]) -> list[str]:
    """The peers that take no part in a verdict, with their times divided by ours."""
    found: dict[str, list[str]] = {}
    for group in cases(timed(rows)):
        for row in compared(group):
            if does_less(row, group[0]):
                found.setdefault(row["contender"], []).append(f"{number(_ratio(row))}x ({_size(row)})")
    return [f"- {peer}: {', '.join(told)}" for peer, told in found.items()]


def absent(folder: Path) -> list[str]:
    """A line for each reason: the peers that a benchmark did not time in any case."""
    found: dict[str, dict[str, None]] = {}
    for name, timings in benchmarks(folder).items():
        has_time = {row["contender"] for row in timed(timings)}
        for contender, why in not_timed(timings):
            if contender not in has_time:
                found.setdefault(why, {})[f"{contender.removeprefix('fp32 model, ')} ({name})"] = None
    return [f"- {why}: {'; '.join(peers)}" for why, peers in found.items()]


# Ways of device_times.csv that are no peers: yardsticks, and backends of amp_kernels that are not its default.
NO_PEERS = ("copy", "cuda", "triton", "torch linear, multiples of 8")
SAME = 1.02  # the two rows of one kernel, `default` and `cuda`, differ by up to 1.4 %


def device_times(folder: Path) -> Iterator[tuple[str, str, str, float, str, float]]:
    """(family, case, dtype, our microseconds, the fastest peer, its microseconds) of each case. A peer may be ""."""
    groups: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in read(folder / "device_times.csv"):
        if row["microseconds"]:
            group = groups.setdefault((row["family"], row["case"], row["dtype"]), {})
            group["default" if row["way"] == "ours" else row["way"]] = float(row["microseconds"])
    for case, times in groups.items():
        peers = {way: us for way, us in times.items() if way not in ("default", *NO_PEERS)}
        peer = min(peers, key=lambda way: peers[way], default="")
        if "default" in times:
            yield (*case, times["default"], peer, peers.get(peer, math.nan))


def on_the_device(folder: Path) -> list[str]:
    """A table of wins and losses in device_times.csv, by family."""
    found: dict[str, list[float]] = {}
    for family, _, _, ours, peer, theirs in device_times(folder):
        if peer:
            found.setdefault(family, []).append(theirs / ours)
    rows = []
    for family, ratios in found.items():
        of = Counter(FASTER if ratio > SAME else SLOWER if ratio < 1 / SAME else EVEN for ratio in ratios)
        cells = (str(len(ratios)), str(of[FASTER]), str(of[SLOWER]), str(of[EVEN]), _between(ratios))
        rows.append((family, *cells))
    return markdown(("time on the device", "cases", "faster", "slower", "the same", "peer / amp_kernels"), rows)


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
    if (folder / "device_times.csv").exists():
        yield f"### Time on the device, {folder.name}\n"
        cells = (
            (*case, number(ours), peer, *((number(theirs), number(theirs / ours)) if peer else ("", "")))
            for *case, ours, peer, theirs in device_times(folder)
        )
        headers = ("family", "case", "dtype", "amp_kernels, µs", "fastest peer", "peer, µs", "times faster")
        yield from (*markdown(headers, cells), "")


def section(folder: Path, name: str, rows: list[Row]) -> Iterator[str]:
    """A benchmark's heading, count, table, and what was not timed."""
    found = list(lines(rows))
    yield f"### {name} on {folder.name}\n"
    yield f"{_where(rows[0])}. {verdicts(found)}."
    pictures = [picture for picture in (f"{name}.png", f"{name}_largest.png") if (folder / picture).exists()]
    yield " ".join(["Figures:", *(f"[{picture}]({folder.name}/{picture})" for picture in pictures)])
    peers = (row for group in cases(timed(rows)) for row in compared(group) if not does_less(row, group[0]))
    yield f"\nPeers: {'; '.join(dict.fromkeys(row['contender'] for row in peers))}."
    if apart := without_scaler(rows):
        yield "\nNot compared, because they have no scaler:\n"
        yield from apart
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


# ---------------------------------------------------------------------------------------- the figures of other pages
UNITS = {"median_ms": " ms", "ratio_to_ours": "x", "ratio_p20": "x", "ratio_p80": "x", "time": "", "memory": ""}
EXACT = {"minutes": " minutes", "elements": ""}  # not rounded
TABLES: dict[str, Callable[..., list[str]]] = {
    "totals": totals,
    "counts": lambda folder: markdown(COUNTED, counts(folder)),
    "on_the_device": on_the_device,
    "without_scaler": lambda folder: [line for rows in benchmarks(folder).values() for line in without_scaler(rows)],
    "absent": absent,
}
TEMPLATE = re.compile(r"<!-- (\w+) -->\n(.*?)(?=<!-- \w+ -->\n|\Z)", re.DOTALL)
BLOCK = re.compile(r"(<!-- (\w+): python -m benchmarks\.summary -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
BRACES = re.compile(r"\{([^{}]+)\}")


def figure(columns: str, file: str, cells: Sequence[str]) -> str:
    """Cells of a row of a CSV, each with the unit of its column.

    Args:
        columns: of the figures, separated by commas.
        file: the CSV's path below the folder of the results, without `.csv`.
        cells: what the row has in other columns. A `*` stands for any text. With one, several rows may match, and the
            smallest and the largest figure are told.

    Raises:
        ValueError: if no row matches or, without a `*`, several.
    """
    patterns = [re.compile(".*".join(map(re.escape, cell.split("*")))) for cell in cells]
    rows = [
        row
        for row in read(RESULTS / f"{file}.csv")
        if all(any(pattern.fullmatch(cell or "") for cell in row.values()) for pattern in patterns)
    ]
    told = []
    for column in columns.split(", "):
        found = [row[column] for row in rows if row.get(column)]
        if not found or (len(found) > 1 and (column in EXACT or "*" not in "".join(cells))):
            raise ValueError(f"figure: {file}.csv must have one {column} of {' | '.join(cells)}, got {len(found)}")
        exact = f"{int(found[0]):,}" if found[0].isdigit() else found[0]
        told.append(f"{exact}{EXACT[column]}" if column in EXACT else _between(map(float, found), UNITS[column]))
    return ", ".join(told)


def filled(template: str) -> str:
    """A section of figures.md, with a figure or a table in place of all braces.

    `{in FILE | CELL | ...}` is replaced by nothing. It holds for the figures after it: `{COLUMN | CELL | ...}`.
    `{TABLE FOLDER ...}` is one of TABLES.
    """
    file, shared = "", list[str]()

    def told(braces: re.Match[str]) -> str:
        nonlocal file, shared
        first, *cells = braces[1].split(" | ")
        name, *folders = first.split()
        if name == "in":
            file, shared = folders[0], cells
            return ""
        if name in TABLES:
            made = "\n".join(TABLES[name](*(RESULTS / folder for folder in folders)))
            return made.replace("](#", "](../benchmarks/results/README.md#")
        return figure(first, file, [*shared, *cells])

    return BRACES.sub(told, template)


def with_figures(page: str) -> str:
    """A page whose blocks of figures are written again."""
    templates = dict(TEMPLATE.findall(TEMPLATES.read_text()))
    return BLOCK.sub(lambda block: f"{block[1]}{filled(templates[block[2]]).strip()}\n{block[3]}", page)


def main() -> None:
    folders = sorted(path for path in RESULTS.iterdir() if path.is_dir())
    for path, text in (
        (RESULTS / "README.md", page(folders)),
        *((path, with_figures(path.read_text())) for path in PAGES),
    ):
        path.write_text(text)
        print(path)


if __name__ == "__main__":
    main()
