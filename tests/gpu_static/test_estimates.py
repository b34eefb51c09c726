"""The table of docs/internals/estimates.md follows from its own model, which its text describes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "estimates.md"
COPY, LATENCY, CLOCK = 4.3e12, 1.1e-6, 1.755e9  # of an H200: bytes, seconds, cycles a second
MULTIPROCESSORS, LANES = 132, 128
ROWS = re.findall(
    r"^\| (.+?) \| (\d+) \((\d+)\).*? \| \d+, \d \| (\d+) \((\d+)\) \| (?:at most )?([\d.]+) \| ([\d.]+) \| (.+?) \|$",
    PAGE.read_text(),
    flags=re.M,
)


def test_every_row_is_read() -> None:
    table = PAGE.read_text().split("| kernel | bytes per element (read)")[1].split("\n\n")[0]
    assert len(ROWS) == table.count("\n") - 1 > 15


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_is_what_the_model_says(row: tuple[str, ...]) -> None:
    total, read, kilobytes, needed, instructions, margin = map(float, row[1:7])
    rate = COPY * read / total / MULTIPROCESSORS  # that a multiprocessor has to read with
    assert needed == round(rate * LATENCY / 1024)
    in_flight = 1024 * kilobytes
    issuing = in_flight / read * instructions / LANES / CLOCK
    model = in_flight / (LATENCY + issuing) / rate
    assert margin == pytest.approx(model, abs=0.006)
    estimate = row[7]
    if margin < 1:
        assert estimate == f"{100 * model:.0f}: instructions"
    elif "on H200: " not in estimate:
        assert estimate == ("88 or more" if margin >= 1.5 else "80 to 88")
