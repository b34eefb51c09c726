"""The check for races of the emulator (races.h)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator


@contextlib.contextmanager
def checked(library: ctypes.CDLL) -> Iterator[None]:
    """Inside the ``with`` block, a launch with a race fails, and takes some hundred times as long."""
    library.check_races(ctypes.c_bool(True))
    try:
        yield
    finally:
        library.check_races(ctypes.c_bool(False))
