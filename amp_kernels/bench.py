"""`python -m amp_kernels bench`: times every operator on this machine, in a few minutes.

Next to each operator it times the peers: the same work by torch and by other libraries.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _loader
from .report import CannotRun, environment, table

if TYPE_CHECKING:
    from .benchmarks.summary import Line, Row

# The time for the rounds of one case, in seconds. In each round, amp_kernels and every peer take a turn. With the
# option `--quick`, which `_run` passes, a case has at least five rounds, however long they take. Before each turn, a
# memory copy is timed. On a CPU its arrays are several times as large as the last-level cache, so a run takes longer on
# a CPU with a large cache: with an L3 of 300 MB, the family ema took 39 s, overhead 48 s, and int8 86 s.
SECONDS = "0.1"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``bench`` to the command line."""
    parser = commands.add_parser(
        "bench",
        help="Times every operator, and other libraries at the same work, in a few minutes.",
        description="Times every operator, and other libraries at the same work, at few sizes, in a few minutes. "
        "Prints a table and writes CSV to a new folder, and PNG if matplotlib is installed.",
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="families to time (default: all)")
    parser.add_argument("--compare", type=Path, metavar="FOLDER", help="CSVs of another run, shown next to this one")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where the results go (default: amp_kernels-bench/<time>)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.set_defaults(run=lambda args: bench(args.families, args.compare, args.out, as_json=args.json))


def bench(
    families: Sequence[str], compare: Path | None = None, out: Path | None = None, *, as_json: bool = False
) -> int:
    """Run the benchmark of each family in its own process. Return 0, or 1 if one failed. CannotRun if none can run."""
    chosen = _families(families)
    earlier = _earlier(compare) if compare is not None else None
    out = out or Path("amp_kernels-bench", time.strftime("%Y-%m-%d-%H%M%S"))
    facts = environment()
    if not as_json:
        width = max(map(len, facts))
        print("\n".join(f"{name.ljust(width)}  {value}" for name, value in facts.items()), end="\n\n")
    # With `as_json`, progress goes to stderr, so that stdout holds only the JSON document.
    failed = [family for family in chosen if not _run(family, out, sys.stderr if as_json else sys.stdout)]
    _report(chosen, out, earlier, {"environment": facts, "failed": failed} if as_json else None)
    return 1 if failed else 0


def _families(wanted: Sequence[str]) -> list[str]:
    """Return the wanted families, or all if none is named. Raise CannotRun if one is unknown or they cannot run."""
    if find_spec(f"{__package__}.benchmarks") is None:
        remedy = "install with `pip install --no-build-isolation -e .`"
        raise CannotRun(_loader.shadowed() or f"the benchmarks are not installed with the package; {remedy}")
    from .benchmarks import FAMILIES

    unknown = [family for family in wanted if family not in FAMILIES]
    if unknown:
        raise CannotRun(f"FAMILY must be one of {', '.join(FAMILIES)}, got {unknown[0]!r}")
    return [family for family in FAMILIES if family in wanted or not wanted]


def _earlier(folder: Path) -> dict[tuple[str, ...], Row]:
    """Return the rows of amp_kernels in the CSVs of a folder, by case. Raise CannotRun if the CSVs cannot be used."""
    from .benchmarks import summary

    try:
        tables = summary.benchmarks(folder)
    except ValueError as error:
        raise CannotRun(f"--compare: {error}") from None
    if not tables:
        raise CannotRun(f"--compare must be a folder with the CSVs of another run, got {str(folder)!r}, which has none")
    rows: dict[tuple[str, ...], Row] = {}
    for name, table_rows in tables.items():
        for row in summary.timed(table_rows):
            if row["contender"].startswith(summary.OURS):
                _check_times(folder / f"{name}.csv", row)
                rows.setdefault(summary.key(row), row)
    return rows


def _check_times(path: Path, row: Row) -> None:
    for column in ("median_ms", "p20_ms", "p80_ms"):
        text = row.get(column)
        try:
            is_time = math.isfinite(float(text or "")) and float(text or "") > 0
        except ValueError:
            is_time = False
        if not is_time:
            raise CannotRun(f"--compare: {column} must be a positive number in all of {path}, got {text!r}")


def _run(family: str, out: Path, progress: Any) -> bool:
    print(f"{family}: ", end="", flush=True, file=progress)
    start = time.monotonic()
    command = [sys.executable, "-m", f"{__package__}.benchmarks.bench_{family}"]
    command += ["--quick", "--seconds", SECONDS, "--out", str(out)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f"{'FAILED, ' if done.returncode else ''}{time.monotonic() - start:.0f} s", flush=True, file=progress)
    if done.returncode:
        print("\n".join(f"  {line}" for line in done.stdout.splitlines()[-10:]), file=progress)
    return done.returncode == 0


def _report(
    families: Sequence[str], out: Path, earlier: dict[tuple[str, ...], Row] | None, document: dict[str, Any] | None
) -> None:
    """Draw the figures and print the results, as JSON in `document` if it is not None."""
    from .benchmarks import summary

    tables = {name: rows for name, rows in summary.benchmarks(out).items() if name in families}
    rows = [row for table_rows in tables.values() for row in table_rows]
    found = [line for table_rows in tables.values() for line in summary.lines(table_rows)]
    # The benchmarks ran with `--quick`, which leaves out all peers under torch.compile. `absent` does not list these
    # peers, because the line that begins with "Peers under torch.compile" says how to time them.
    absent = {key: count for key, count in summary.not_timed(rows).items() if "--quick" not in key[1]}
    draws = find_spec("matplotlib") is not None
    if draws:
        from .benchmarks import plot

        plot.draw(out)
    if document is not None:
        document["cases"] = [line.record() | _compared(line, earlier or {}) for line in found]
        document["not_timed"] = [{"name": name, "why": why, "cases": count} for (name, why), count in absent.items()]
        print(json.dumps(document | {"folder": str(out)}, indent=1))
        return
    _print_table(found, earlier)
    for (contender, why), count in absent.items():
        print(f"not timed in {count} case{'s' * (count > 1)}: {contender}: {why}")
    print(f"Peers under torch.compile and larger sizes: `python -m {__package__}.benchmarks.bench_<family>`")
    if missing := summary.missing_packages(rows):
        print(f"Missing peers: run `pip install {' '.join(missing)}` to have them timed")
    print(f"{out}: CSV" + (" and PNG" if draws else "; run `pip install matplotlib` to have figures drawn"))


def _print_table(found: Sequence[Line], earlier: dict[tuple[str, ...], Row] | None) -> None:
    from .benchmarks import summary

    cells = []
    for line in found:
        then = _compared(line, earlier or {})
        ratio = summary.with_spread(then["times_as_long"], then["times_as_long_spread"]) if then else ""
        other = [summary.number(then.get("other_ms", "")), ratio] if earlier is not None else []
        cells.append([line.ours["benchmark"], *line.cells(), *other])
    compared = ["other run, ms", "this / other run (spread)"] if earlier is not None else []
    print(f"\n{table(['family', *summary.HEADERS, *compared], cells)}\n\n{summary.verdicts(found)}.\n" if cells else "")


def _compared(line: Line, earlier: dict[tuple[str, ...], Row]) -> dict[str, Any]:
    """Return the earlier time, and the time in this run divided by it. {} if the earlier run lacks the case."""
    from .benchmarks import summary

    then = earlier.get(line.key)
    if then is None:
        return {}
    ratio = float(line.ours["median_ms"]) / float(then["median_ms"])
    bounds = summary.quotients(line.ours, then)
    return {"other_ms": float(then["median_ms"]), "times_as_long": ratio, "times_as_long_spread": bounds}
