"""`python -m amp_kernels verify`: the cases of `amp_kernels.testing` on every backend that runs here."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from .. import backends, testing
from ..report import table

HEADERS = ("operator", "backend", "dtype", "cases", "max error", "allowed", "pass")


class Row(NamedTuple):
    """The cases of one operator, backend and dtype, and the comparison that came nearest to its bound."""

    operator: str
    backend: str
    dtype: str
    cases: int
    error: float
    allowed: float
    failures: list[str]

    def cells(self) -> list[str]:
        errors = ["exact" if x == self.allowed == 0 else f"{x:.2g}" for x in (self.error, self.allowed)]
        passed = f"NO ({len(self.failures)} failed)" if self.failures else "yes"
        return [self.operator, self.backend, self.dtype, str(self.cases), *errors, passed]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``verify`` to the command line."""
    parser = commands.add_parser("verify", help="Checks every operator on every backend against torch and fp64.")
    parser.add_argument("--backend", choices=backends.BACKENDS, help="only this one (default: all that run here)")
    parser.add_argument("--device", choices=tuple(backends.PREFERENCE), help="only tensors on this device")
    parser.add_argument("--op", action="append", choices=tuple(testing.CASES), help="only this operator (repeatable)")
    parser.set_defaults(run=lambda args: verify(args.backend, args.device, args.op))


def verify(backend: str | None = None, device: str | None = None, ops: Sequence[str] | None = None) -> int:
    """Prints the table; returns 0, 1 if a case failed, or 2 if what was asked for cannot run here."""
    places, reasons = _places(backend, device)
    if not places:
        print(f"verify: {backend or 'that'} cannot run here: {'; '.join(reasons)}", file=sys.stderr)
        return 2
    operators = ops or list(testing.CASES)
    several = len({on for _, on in places}) > 1
    # Where no backend is forced torch multiplies on a GPU; every other operator has its first backend there.
    chosen = [
        (op, *place) for op in operators for place in places if place[0] != "default" or op in testing.matmul.CASES
    ]
    rows = [row for op, where, on in chosen for row in _rows(op, where, on, label=several)]
    print(_table([row.cells() for row in rows]))
    failures = [failure for row in rows for failure in row.failures]
    for failure in failures:
        print(failure)
    cases = sum(row.cases for row in rows)
    print(f"\n{cases} cases, {len(failures)} failed" if failures else f"\nall {cases} cases passed")
    return 1 if failures else 0


def _places(backend: str | None, device: str | None) -> tuple[list[tuple[str, str]], list[str]]:
    """(backend, device) that run here, of those asked for; and why the others do not."""
    places, reasons = [], []
    for on in [device] if device else list(backends.PREFERENCE):
        if on == "cuda" and not torch.cuda.is_available():
            reasons.append("on cuda tensors: there is no CUDA device")
            continue
        for name, reason in backends.backend_reasons(on).items():
            if backend not in (None, name):
                continue
            if reason is None:
                places.append((name, on))
            else:
                reasons.append(f"on {on} tensors: {reason}")
        if on == "cuda" and backend is None:
            places.append(("default", on))
    return places, reasons


def _rows(op: str, backend: str, device: str, *, label: bool) -> Iterator[Row]:
    name = f"{backend} on {device}" if label and backend in ("reference", "triton") else backend
    cases = testing.CASES[op]
    for dtype in dict.fromkeys(case.dtype for case in cases):
        worst, failures = testing.Result("", 0.0, 0.0), []
        chosen = [case for case in cases if case.dtype == dtype]
        for case in chosen:
            results = _run(case, backend, device)
            worst = max([worst, *results], key=_nearness)
            bad = [result for result in results if not result.passed]
            if bad:
                failures.append(
                    f"{op} on {name}, {case}: "
                    + "; ".join(f"{r.name}: error {r.error:.3g}, allowed {r.allowed:.3g}" for r in bad[:3])
                )
        yield Row(op, name, dtype, len(chosen), worst.error, worst.allowed, failures)


def _run(case: testing.Case, backend: str, device: str) -> list[testing.Result]:
    try:
        return case.run(backend, device)
    except Exception as error:  # a backend that crashes on one case still has its other cases shown
        return [testing.Result(f"{type(error).__name__}: {error}", math.inf, 0.0)]


def _nearness(result: testing.Result) -> float:
    """How much of its allowance a comparison uses; above all others where it fails."""
    if not result.passed:
        return math.inf
    return result.error / result.allowed if result.allowed > 0 else -1.0


def _table(rows: Sequence[Sequence[str]]) -> str:
    return table(HEADERS, rows)
