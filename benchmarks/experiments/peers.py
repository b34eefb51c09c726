"""Contenders that may not run here: each gives a timing, or the reason why it has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .harness import Name, Row

Build = Callable[[], Callable[[], object]]  # makes a contender ready and returns what is timed


def ready(builds: Mapping[Name, Build]) -> tuple[dict[Name, Callable[[], object]], dict[Name, str]]:
    """Contenders that were built and have run once, and the reasons of the others: their exceptions' first lines."""
    runs: dict[Name, Callable[[], object]] = {}
    reasons: dict[Name, str] = {}
    for name, build in builds.items():
        try:
            run = build()
            run()
        except Exception as error:  # whatever a peer raises is its reason
            reasons[name] = first_line(error)
        else:
            runs[name] = run
    return runs, reasons


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def reasons_below(rows: Sequence[Row], column: str = "contender") -> tuple[str, ...]:
    """Each contender that has no timing, with its reason, once."""
    return tuple(dict.fromkeys(f"{row[column]}: {row['note']}" for row in rows if row["note"]))
