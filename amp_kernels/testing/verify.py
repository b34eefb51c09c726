"""The command `python -m amp_kernels verify`.

It runs the cases of `amp_kernels.testing` on every backend that can run here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .. import backends, testing
from ..report import CannotRun, environment
from .common import Difference, lost_context, seeded

DTYPES = sorted({case.dtype for cases in testing.CASES.values() for case in cases})
HEADERS = ("operator", "backend", "dtype", "cases", "seconds", "max error", "allowed", "pass")
_BACKENDS = (*backends.BACKENDS, "default")
_WIDTHS = (max(map(len, testing.CASES)), len("reference on cuda"), max(map(len, DTYPES)), 5, 7, 9, 9, 4)
# The counter is written 10 times per second to a terminal, and every 10 seconds to a file.
_PER_SECOND, _SECONDS_IN_A_LOG = 10, 10


_NONE = testing.Result("", 0.0, 0.0)


@dataclass(frozen=True)
class Failure:
    """A case that failed: its first wrong comparison, or the exception that it raised, and the command to repeat it."""

    operator: str
    backend: str
    dtype: str
    case: str
    comparison: str
    error: float
    allowed: float
    at: Difference | None
    command: str

    @property
    def kind(self) -> tuple[str, ...]:
        """The key by which failures are grouped.

        It is the exception if the case raised one, otherwise the operator, the backend and the comparison.
        """
        if self.allowed == 0 and self.error == math.inf and self.at is None:
            return (self.comparison,)
        return self.operator, self.backend, re.sub(r"\[\d+\]", "", self.comparison)

    def sentence(self) -> str:
        """Return a sentence that says where the case failed and what was wrong."""
        where = f"{self.operator} on {self.backend}, dtype {self.dtype}, case {self.case}: {self.comparison}"
        if self.at is not None:
            index = "" if self.at.index is None else f" at index {list(self.at.index)}"
            where += f" of shape {list(self.at.shape)}, {self.at.dtype},{index} got {self.at.got}, "
            where += f"expected {self.at.expected}"
        if self.error == math.inf and self.at is None:
            return where
        return f"{where}; error {self.error:.3g}, allowed {self.allowed:.3g}"


@dataclass
class Row:
    """The results for one operator, backend and dtype: a row of the table.

    `worst` is the comparison that used the largest share of its allowed error.
    """

    operator: str
    backend: str
    dtype: str
    cases: int = 0
    seconds: float = 0.0
    worst: testing.Result = _NONE
    failures: list[Failure] = field(default_factory=list)

    def cells(self) -> list[str]:
        """Return the texts of the table's columns."""
        errors = (self.worst.error, self.worst.allowed)
        shown = ["exact" if x == self.worst.allowed == 0 else f"{x:.2g}" for x in errors]
        passed = f"NO ({len(self.failures)} failed)" if self.failures else "yes"
        return [self.operator, self.backend, self.dtype, str(self.cases), f"{self.seconds:.1f}", *shown, passed]

    def record(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {
            "operator": self.operator, "backend": self.backend, "dtype": self.dtype, "cases": self.cases,
            "seconds": round(self.seconds, 3), "error": self.worst.error, "allowed": self.worst.allowed,
            "passed": not self.failures,
        }  # fmt: skip


class Counter:
    """Prints to stderr how many cases are done.

    On a terminal it overwrites its last line. Otherwise it prints a line every ten seconds.
    """

    def __init__(self, total: int) -> None:
        self._total, self._done, self._in_place = total, 0, sys.stderr.isatty()
        self._next = time.monotonic() + (0 if self._in_place else _SECONDS_IN_A_LOG)

    def count(self, where: str) -> None:
        """Count a case that is done, and print the number if it is time to."""
        self._done += 1
        if time.monotonic() < self._next and self._done < self._total:
            return
        start, end, pause = ("\r", "\x1b[K", 1 / _PER_SECOND) if self._in_place else ("", "\n", _SECONDS_IN_A_LOG)
        print(f"{start}{self._done} of {self._total} cases: {where}", end=end, file=sys.stderr, flush=True)
        self._next = time.monotonic() + pause

    def clear(self) -> None:
        """Erase the number on a terminal, so that another line can be printed there."""
        if self._in_place:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``verify`` to the command line."""
    what = "Compares the operators on every backend with torch in fp64, or bit for bit with the reference."
    parser = commands.add_parser("verify", help=what)
    parser.add_argument(
        "--backend", choices=_BACKENDS, help="only this backend; 'default' forces none (default: all that run here)"
    )
    parser.add_argument("--device", choices=tuple(backends.PREFERENCE), help="only tensors on this device")
    choices = {"op": ("operator", [*testing.CASES]), "dtype": ("dtype, or dtypes of parameters/gradients", DTYPES)}
    for name, (kind, known) in choices.items():
        words = f"only this {kind}: {', '.join(known)} (repeatable)"
        parser.add_argument(f"--{name}", action="append", choices=known, metavar=name.upper(), help=words)
    parser.add_argument("--case", action="append", metavar="NAME", help="only cases with this name (repeatable)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs (default: 0, as in the tests)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.set_defaults(run=lambda a: verify(a.backend, a.device, a.op, a.dtype, a.case, seed=a.seed, as_json=a.json))


def verify(
    backend: str | None = None,
    device: str | None = None,
    ops: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    *,
    seed: int = 0,
    as_json: bool = False,
) -> int:
    """Run the requested cases, and print each row of the table when its cases are done. Return 1 if a case failed.

    Raise CannotRun if none of the requested cases can run here.
    """
    places, reasons = _places(backend, device)
    if not places:
        raise CannotRun(f"{backend or 'what was asked for'} cannot run here: {'; '.join(reasons)}")
    several = len({on for _, on in places}) > 1
    plan = [  # (device, row, its cases)
        (on, Row(op, f"{where} on {on}" if several and where in ("reference", "triton") else where, dtype), cases)
        for op in ops or testing.CASES
        for where, on in places
        # "default" forces no backend, and is planned only for a GPU. If no backend is forced there, torch computes the
        # products of testing/matmul.py, so these products get rows for "default". All other cases would run on the
        # first backend that can run. That backend has its own rows, so these cases get no rows for "default".
        if where != "default" or op in testing.matmul.CASES
        for dtype, cases in _by_dtype(op, dtypes, names).items()
    ]
    if not plan:
        raise CannotRun("no case has that operator, dtype and name; run without --dtype and --case")
    if not as_json:
        _print_cells(HEADERS)
        _print_cells(["-" * width for width in _WIDTHS])
    stopped, counter = "", Counter(sum(len(cases) for *_, cases in plan))
    for on, row, cases in plan:
        with seeded(seed):
            stopped = _run_row(row, cases, on, seed, counter)
        counter.clear()
        if not as_json:
            _print_cells(row.cells())
        if stopped:
            break
    if reasons and not as_json:
        print(f"\nNot verified, because it cannot run here: {'; '.join(reasons)}")
    rows = [row for _, row, _ in plan if row.cases]
    return (_print_json if as_json else _print_failures)(rows, stopped, seed)


def _by_dtype(op: str, dtypes: Sequence[str] | None, names: Sequence[str] | None) -> dict[str, list[testing.Case]]:
    found: dict[str, list[testing.Case]] = {}
    for case in testing.CASES[op]:
        if (not dtypes or case.dtype in dtypes) and (not names or case.name in names):
            found.setdefault(case.dtype, []).append(case)
    return found


def _places(backend: str | None, device: str | None) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the requested pairs (backend, device) that can run here, and reasons why the others cannot."""
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
        if on == "cuda" and backend in (None, "default"):
            places.append(("default", on))
    return places, reasons


def _run_row(row: Row, cases: Sequence[testing.Case], device: str, seed: int, counter: Counter) -> str:
    """Run the cases of a row. Stop and return CUDA's message if a case lost the CUDA context, otherwise return ""."""
    start, backend = time.monotonic(), row.backend.partition(" ")[0]
    for case in cases:
        results = _run(case, backend, device)
        row.cases, row.seconds = row.cases + 1, time.monotonic() - start
        row.worst = max([row.worst, *results], key=_nearness)
        if bad := [result for result in results if not result.passed]:
            command = _command(case, backend, device, seed)
            row.failures.append(Failure(row.operator, row.backend, row.dtype, case.name, *bad[0], command))
            if stopped := lost_context(device):
                return stopped
        counter.count(f"{row.operator} on {row.backend}")
    return ""


def _run(case: testing.Case, backend: str, device: str) -> list[testing.Result]:
    try:
        return case.run(backend, device)
    except Exception as error:  # becomes a failure of this case, so that the other cases still run
        return [testing.Result(f"{type(error).__name__}: {error}", math.inf, 0.0)]


def _nearness(result: testing.Result) -> float:
    """Return the error of a comparison as a share of the allowed error.

    The share is inf for a failed comparison, and -1 for one that passed with no error allowed.
    """
    if not result.passed:
        return math.inf
    return result.error / result.allowed if result.allowed > 0 else -1.0


def _command(case: testing.Case, backend: str, device: str, seed: int) -> str:
    """Return the shell command that runs this case alone."""
    words = ["python", "-m", "amp_kernels", "verify", "--backend", backend, "--device", device]
    words += ["--op", case.op, "--dtype", case.dtype, "--case", case.name, *(["--seed", str(seed)] if seed else [])]
    interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET")
    return ("TRITON_INTERPRET=1 " if interpreted else "") + shlex.join(words)


def _print_cells(cells: Sequence[str]) -> None:
    print("  ".join(cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip(), flush=True)


def _print_failures(rows: Sequence[Row], stopped: str, _: int) -> int:
    """Print the first failure of each kind and the number of others like it, then how many cases ran and failed."""
    kinds: dict[tuple[str, ...], list[Failure]] = {}
    for failure in (failure for row in rows for failure in row.failures):
        kinds.setdefault(failure.kind, []).append(failure)
    for first, *others in kinds.values():
        print(f"\n{first.sentence()}\n  run it alone: {first.command}")
        if others:
            print(f"  {len(others)} other cases fail in the same way (--json lists them)")
    cases, failed = sum(row.cases for row in rows), sum(len(row.failures) for row in rows)
    print(f"\n{cases} cases, {failed} failed" if failed else f"\nall {cases} cases passed")
    if stopped:
        last = rows[-1].failures[-1]
        print(
            f"verify: {last.operator} on {last.backend} lost the CUDA context in case {last.dtype}-{last.case}, so "
            f"nothing later could run: {stopped}",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _print_json(rows: Sequence[Row], stopped: str, seed: int) -> int:
    failures = [failure for row in rows for failure in row.failures]
    document = {
        "environment": environment(), "seed": seed, "cases": sum(row.cases for row in rows), "failed": len(failures),
        "lost_context": stopped or None, "rows": [row.record() for row in rows],
        "failures": [asdict(failure) for failure in failures],
    }  # fmt: skip
    # JSON has neither NaN nor inf. They become texts, such as "nan".
    document = json.loads(json.dumps(document), parse_constant=lambda name: str(float(name)))
    print(json.dumps(document, indent=1, allow_nan=False))
    return 1 if failures else 0
