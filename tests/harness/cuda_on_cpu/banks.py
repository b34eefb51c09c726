"""The cycles that kernels on the emulator spend in shared memory (banks.h)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import NamedTuple

_KINDS = ("load", "store", "ldmatrix", "cp.async", "atomic")  # enum AccessKind
_WIDTHS = (1, 2, 4, 8, 16)


class Cycles(NamedTuple):
    """Of all instructions of a kind: how many there are at best, and how many there are."""

    phases: int
    cycles: int

    @property
    def degree(self) -> float:
        """1 without a bank conflict, 2 if on average two words of each phase are in one bank."""
        return self.cycles / self.phases


@contextlib.contextmanager
def counted(library: ctypes.CDLL) -> Iterator[dict[str, Cycles]]:
    """What was launched inside the ``with`` block, when it ends, by names as ``load of 4 bytes`` and ``ldmatrix``."""
    numbers = (ctypes.c_uint64 * (2 * len(_KINDS) * len(_WIDTHS)))()
    counts: dict[str, Cycles] = {}
    library.count_banks(ctypes.c_bool(True), None)
    try:
        yield counts
    finally:
        library.count_banks(ctypes.c_bool(False), numbers)
    for i, (phases, cycles) in enumerate(zip(numbers[::2], numbers[1::2], strict=True)):
        kind, width = _KINDS[i // len(_WIDTHS)], _WIDTHS[i % len(_WIDTHS)]
        if phases:
            counts[kind if kind in _KINDS[2:] else f"{kind} of {width} bytes"] = Cycles(phases, cycles)
