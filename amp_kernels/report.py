"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """By tabulate if it is installed, else plainly."""
    try:
        from tabulate import tabulate  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
        lines = (headers, ["-" * width for width in widths], *rows)
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )
    return str(tabulate(rows, headers, disable_numparse=True))
