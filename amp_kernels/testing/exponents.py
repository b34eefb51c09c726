"""Test cases for `count_exponents_`, the operator that reads tensors for `amp_kernels.PrecisionReport`.

Counts and largest magnitudes must exactly equal those of the reference. The square root of each sum of squares is
compared with that of an fp64 sum, as a norm is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from .. import reference
from ..reference.exponents import COLUMNS
from .common import (
    DTYPES,
    Case,
    Make,
    Result,
    clones,
    exact,
    norms,
    place,
    unchanged,
    written_outside,
)
from .unscale import at_borders, gradient_inputs, non_finite_inputs


def results_for(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return `counts`, `largest` and `squares` for these tensors, all of them 0."""
    count = len(tensors)
    return (
        torch.zeros(count, COLUMNS, dtype=torch.int64, device=device),
        torch.zeros(count, device=device),
        torch.zeros(count, dtype=torch.float64, device=device),
    )


def _count(make: Make, layout: str, device: torch.device) -> Iterator[Result]:
    tensors = place(make(), device, layout)
    before = clones(tensors)
    counts, largest, squares = results_for(tensors, device)
    torch.ops.amp_kernels.count_exponents_(tensors, counts, largest, squares)
    on_cpu = [t.cpu() for t in before]
    expected = results_for(on_cpu, torch.device("cpu"))
    reference.count_exponents_(on_cpu, *expected)
    yield exact("counts", counts, expected[0])
    yield exact("largest", largest, expected[1])
    yield norms("norms", squares.sqrt(), expected[2].sqrt())
    first = clones([counts, largest, squares])
    torch.ops.amp_kernels.count_exponents_(tensors, counts, largest, squares)
    # The second run adds the same numbers, and twice a number is exact.
    yield exact("counts of two runs", counts, 2 * first[0])
    yield exact("largest of two runs", largest, first[1])
    yield exact("squares of two runs", squares, 2 * first[2])
    yield unchanged("tensors written", before, tensors)
    yield Result("memory around tensors", sum(map(written_outside, tensors)), 0)


def _cases() -> Iterator[Case]:
    for dtype, name, make, layout in gradient_inputs():
        yield Case("count_exponents_", dtype, name, partial(_count, make, layout))
    for dtype, name, make in non_finite_inputs():
        yield Case("count_exponents_", dtype, name, partial(_count, make, "contiguous"))
    for dtype, of in DTYPES.items():
        yield Case("count_exponents_", dtype, "positions", partial(_count, partial(at_borders, of), "contiguous"))


CASES: dict[str, tuple[Case, ...]] = {"count_exponents_": tuple(_cases())}
