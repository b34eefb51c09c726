"""`python -m amp_kernels bench`: every operator beside its peers on this machine, in two minutes."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from . import _loader
from .report import table

NEEDS = ("matplotlib", "tabulate", "tqdm")
SECONDS = "0.1"  # for the rounds of a case, which are at least nine: all families take 90 s of one core


class CannotRun(Exception):
    """With a sentence for the user."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``bench`` to the command line."""
    parser = commands.add_parser(
        "bench",
        help="Times every operator beside its peers, two minutes in all.",
        description="Times every operator beside its peers at few sizes, two minutes in all. Prints a table and "
        "writes CSV and PNG to a new folder.",
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="only these (default: all that there are)")
    parser.add_argument("--compare", type=Path, metavar="FOLDER", help="of another run, to put its times beside")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of the results (default: amp_kernels-bench/<time>)")
    parser.set_defaults(run=lambda args: bench(args.families, args.compare, args.out))


def bench(families: Sequence[str], compare: Path | None = None, out: Path | None = None) -> int:
    """Runs the benchmarks, each in a process of its own; returns 0, 1 if one failed, or 2 if none can run here."""
    try:
        chosen = _families(families)
        earlier = _earlier(compare) if compare is not None else None
    except CannotRun as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    out = out or Path("amp_kernels-bench", time.strftime("%Y-%m-%d-%H%M%S"))
    failed = [family for family in chosen if not _run(family, out)]
    _report(chosen, out, earlier)
    return 1 if failed else 0


def _families(wanted: Sequence[str]) -> list[str]:
    """All families, or those that are wanted; raises where they cannot run."""
    if find_spec(f"{__package__}.benchmarks") is None:
        remedy = "install with `pip install --no-build-isolation -e .`"
        raise CannotRun(_loader.shadowed() or f"the benchmarks are not installed with the package; {remedy}")
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise CannotRun(f"needs {' and '.join(missing)}; run `pip install {' '.join(missing)}`")
    from .benchmarks import FAMILIES

    unknown = [family for family in wanted if family not in FAMILIES]
    if unknown:
        raise CannotRun(f"FAMILY must be one of {', '.join(FAMILIES)}, got {unknown[0]!r}")
    return [family for family in FAMILIES if family in wanted or not wanted]


def _earlier(folder: Path) -> dict[tuple[str, ...], float]:
    """Our times in a folder, by case."""
    from .benchmarks.summary import benchmarks, lines

    tables = benchmarks(folder).values()
    if not tables:
        raise CannotRun(f"--compare must be a folder with the CSVs of another run, got {str(folder)!r}, which has none")
    return {line.key: float(line.ours["median_ms"]) for rows in tables for line in lines(rows)}


def _run(family: str, out: Path) -> bool:
    print(f"{family}: ", end="", flush=True)
    start = time.monotonic()
    command = [sys.executable, "-m", f"{__package__}.benchmarks.bench_{family}"]
    command += ["--quick", "--seconds", SECONDS, "--out", str(out)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f"{'FAILED, ' if done.returncode else ''}{time.monotonic() - start:.0f} s", flush=True)
    if done.returncode:
        print("\n".join(f"  {line}" for line in done.stdout.splitlines()[-10:]))
    return done.returncode == 0


def _report(families: Sequence[str], out: Path, earlier: dict[tuple[str, ...], float] | None) -> None:
    """Prints the table and what was not timed, and draws the figures."""
    from .benchmarks import plot, summary

    tables = {name: rows for name, rows in summary.benchmarks(out).items() if name in families}
    cells = []
    for line in (line for rows in tables.values() for line in summary.lines(rows)):
        then = (earlier or {}).get(line.key)
        compared = ["", ""] if then is None else [f"{then:.5g}", f"{float(line.ours['median_ms']) / then:.2f}"]
        cells.append([line.ours["benchmark"], *line.cells(), *(compared if earlier is not None else [])])
    headers = ["family", *summary.HEADERS, *(["other run, ms", "ours / other"] if earlier is not None else [])]
    print(f"\n{table(headers, cells)}\n" if cells else "")
    rows = [row for table_rows in tables.values() for row in table_rows]
    for (contender, why), count in summary.not_timed(rows).items():
        if "--quick" not in why:  # no peer under torch.compile is timed here
            print(f"not timed in {count} case{'s' * (count > 1)}: {contender}: {why}")
    print(f"Peers under torch.compile and larger sizes: `python -m {__package__}.benchmarks.bench_<family>`")
    if missing := summary.missing_packages(rows):
        print(f"Missing peers: run `pip install {' '.join(missing)}` to have them timed")
    plot.draw(out)
    print(f"{out}: CSV and PNG")
