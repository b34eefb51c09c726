"""Renders benchmarks/RESULTS.md and its quotation in docs/results.md from the committed CSVs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tabulate import tabulate

from ..summary import HERE, RESULTS, reason
from . import NAMES
from .__main__ import load
from .harness import Experiment, Table, read

PAGE = HERE / "RESULTS.md"
SHORT = HERE.parent / "docs" / "results.md"
BEGIN, END = "<!-- experiments: python -m benchmarks.experiments.page -->\n", "<!-- end of experiments -->"
EXCEPTION = r"(?<=: )\w+(?:Error|Exception)\b.*$"
INTRODUCTION = """# The published experiments, rerun

Published measurements of mixed-precision training, repeated with the kernels of amp_kernels ("ours") and with those of
other packages. The experiment on codes for optimizer states repeats nobody's. `make experiments` measures them on your
machine. `python -m benchmarks.experiments.page` writes this page from the committed CSVs.

- Published figures have tables of their own. Times under "Ours" are ratios within one process, since seconds on two
  machines cannot be compared. In a *round* each contender has one turn.
- Each claim and the rule that decides it were committed before the data was measured. One rule was made
  stricter afterwards; its text says so. A claim **holds**, is **falsified**, or stays **undecided**. Its rule says what
  leaves it undecided: a spread larger than the difference, or cases that do not agree.
"""


def table(of: Table) -> Iterator[str]:
    yield f"{of.title}:\n"
    yield tabulate(of.rows, of.columns, tablefmt="github", disable_numparse=True) + "\n"
    if of.not_run:
        yield "Not run here:\n"
        yield from (f"- {re.sub(EXCEPTION, lambda found: reason(found[0]), each)}" for each in of.not_run)
        yield ""


def measured(experiment: Experiment, path: Path) -> Iterator[str]:
    """What one machine's CSV says."""
    rows = read(path)
    first = rows[0]
    seconds = sum({row["run"]: float(row["seconds"]) for row in rows}.values())
    yield f"### Ours: {first['device_name']}\n"
    yield f"torch {first['torch_version']}, amp_kernels {first['amp_kernels_version']}, {first['date']}, " + (
        f"measured in {seconds / 60:.0f} min: [CSV]({path.relative_to(HERE)})\n"
    )
    for claim in experiment.claims:
        verdict = claim.judge(rows)
        yield f"- **{verdict.word}**: {claim.statement} {verdict.because}"
    yield ""
    for each in experiment.tables(rows):
        yield from table(each)
    yield f"![{experiment.title}]({path.with_suffix('.png').relative_to(HERE)})\n"


def section(position: int, experiment: Experiment) -> Iterator[str]:
    yield f"## {position}. {experiment.title}\n"
    yield experiment.about.strip() + "\n"
    yield "Rules:\n"
    if experiment.rules:
        yield experiment.rules.strip() + "\n"
    yield from (f"- {claim.statement} {claim.rule}" for claim in experiment.claims)
    yield ""
    if experiment.published:
        yield "### Published\n"
        for each in experiment.published:
            yield from table(each)
    for path in sorted(RESULTS.glob(f"*/experiments/{experiment.name}.csv")):
        yield from measured(experiment, path)


def page() -> str:
    sections = ("\n".join(section(k, load(name))) for k, name in enumerate(NAMES, start=1))
    return "\n".join((INTRODUCTION, *sections)).rstrip() + "\n"


def quotation() -> Iterator[str]:
    """A line for each experiment: its first claim, as every machine's CSV decides it."""
    for name in NAMES:
        experiment = load(name)
        for path in sorted(RESULTS.glob(f"*/experiments/{name}.csv")):
            rows = read(path)
            claim = experiment.claims[0]
            verdict = claim.judge(rows)
            yield f"- {rows[0]['device_name']}: {claim.statement} **{verdict.word.capitalize()}**: {verdict.because}\n"


def with_quotation(text: str) -> str:
    """docs/results.md with the lines between BEGIN and END written again."""
    before, rest = text.split(BEGIN)
    return "".join([before, BEGIN, *quotation(), rest[rest.index(END) :]])


def main() -> None:
    for path, text in ((PAGE, page()), (SHORT, with_quotation(SHORT.read_text()))):
        path.write_text(text)
        print(path)


if __name__ == "__main__":
    main()
