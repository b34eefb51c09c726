"""Test cases for the operators that read gradients: `unscale_`, `grad_norm`, `clip_grad_norm_`.

Unscaled gradients must exactly equal those that torch computes. Norms and clipped gradients are compared with fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..functional import clip_grad_norm_, grad_norm, unscale_
from .common import (
    DTYPES,
    LAYOUTS,
    VALUES,
    Case,
    Make,
    Result,
    clones,
    compare,
    exact,
    many,
    mixed,
    norms,
    of_sizes,
    place,
    same_kind,
    shaped,
    unchanged,
    values,
    with_element,
    written_outside,
)


def gradient_inputs() -> Iterator[tuple[str, str, Make, str]]:
    """Yield (dtype, name, function that makes the tensors, layout) for the operators that read lists of gradients."""
    for name, dtype in DTYPES.items():
        yield name, "sizes", partial(of_sizes, dtype), "contiguous"
        yield name, "many_tensors", partial(many, dtype), "contiguous"
        for layout in LAYOUTS:
            yield name, layout, partial(shaped, dtype), layout
        for kind in VALUES:
            yield name, kind, partial(values, kind, dtype), "contiguous"
    yield "mixed", "sizes", mixed, "contiguous"


def non_finite_inputs() -> Iterator[tuple[str, str, Make]]:
    """Yield (dtype, name, function that makes the tensors) for lists with one element that is NaN or inf."""
    for name, dtype in DTYPES.items():
        for value in (math.nan, math.inf, -math.inf):
            for position in ("first", "middle", "last"):
                yield name, f"{value}_{position}", partial(with_element, value, position, dtype)


LENGTHS = {1023: "contiguous", 2000: "misaligned", 5001: "contiguous"}
"""Lengths of the vectors in which NaN and inf are moved over all `borders`, and the layouts of these vectors."""


def borders(length: int, layout: str, dtype: torch.dtype) -> list[int]:
    """Return the first and the last position of a vector, and the positions on both sides of a kernel's borders.

    Packs of 16 bytes, groups of packs, blocks, tiles and chunks begin at multiples of 16 bytes, 32 or 256 elements,
    counted from an aligned address. The borders are all multiples of 256, and the first and the last multiple of the
    smaller sizes.
    """
    before = int(layout == "misaligned")  # elements between an aligned address and the vector
    end = length + before
    small = (16 // dtype.itemsize, 32)
    multiples = {m for size in small for m in (size, end // size * size)} | {*range(256, end + 1, 256)}
    begins = {multiple - before for multiple in multiples}
    sides = {0, length - 1, *begins, *(begin - 1 for begin in begins)}
    return sorted(position for position in sides if 0 <= position < length)


def at_borders(dtype: torch.dtype) -> list[Tensor]:
    """Return a vector of ones for each of `LENGTHS`, with NaN and inf in turn at all `borders`."""
    vectors = [torch.ones(length, dtype=dtype) for length in LENGTHS]
    for vector, layout in zip(vectors, LENGTHS.values(), strict=True):
        for i, position in enumerate(borders(len(vector), layout, dtype)):
            vector[position] = (math.nan, math.inf)[i % 2]
    return vectors


def _positions(
    find: Callable[..., object], dtype: torch.dtype, values: tuple[float, float], device: torch.device
) -> Iterator[Result]:
    """Check that `find([vector], found_inf=flag)` sets the flag for one NaN or inf, at each of the `borders`.

    The two `values` take turns. Each position needs a call of its own, because all gradients of a call share one flag.
    """
    for length, layout in LENGTHS.items():
        positions = borders(length, layout, dtype)
        (vector,) = place([torch.ones(length, dtype=dtype)], device, layout)
        flags = torch.zeros(length, device=device)  # one for each position, so that a message names the position
        for i, position in enumerate(positions):
            vector[position] = values[i % 2]
            find([vector], found_inf=flags[position])
            vector[position] = 1.0
        expected = torch.zeros(length).index_fill(0, torch.tensor(positions), 1.0)
        yield exact("found_inf of each position", flags, expected)


def _unscale(
    make: Make, device: torch.device, *, layout: str = "contiguous", inv_scale: float = 0.37, found: float = 0.0,
    expected: float = 0.0,
) -> Iterator[Result]:  # fmt: skip
    grads = place(make(), device, layout)
    before = clones(grads)
    factor, found_inf = torch.tensor(inv_scale, device=device), torch.tensor(found, device=device)
    unscale_(grads, inv_scale=factor, found_inf=found_inf)
    for i, (grad, old) in enumerate(zip(grads, before, strict=True)):
        yield exact(f"grads[{i}]", grad, (old.float() * factor).to(grad.dtype))
    yield exact("found_inf", found_inf, torch.tensor(expected))
    yield Result("memory around grads", sum(map(written_outside, grads)), 0)


def _true_norm(grads: Sequence[Tensor], factor: Tensor | None = None) -> Tensor:
    """Return the norm of `grads` times `factor`, in fp64. If fp32 cannot hold it, return inf."""
    truth = torch.stack([g.double().square().sum() for g in grads]).sum().sqrt()
    truth = truth if factor is None else truth * factor.double()
    return truth.masked_fill(truth > torch.finfo(torch.float32).max, math.inf)


def _grad_norm(
    make: Make, device: torch.device, *, layout: str = "contiguous", inv_scale: float | None = None,
    found: float = 0.0, expected: float = 0.0,
) -> Iterator[Result]:  # fmt: skip
    grads = place(make(), device, layout)
    before = clones(grads)
    factor = None if inv_scale is None else torch.tensor(inv_scale, device=device)
    found_inf = torch.tensor(found, device=device)
    norm = grad_norm(grads, inv_scale=factor, found_inf=found_inf)
    yield norms("norm", norm, _true_norm(grads, factor))
    yield same_kind("dtype and shape", norm, (), torch.float32)
    yield exact("found_inf", found_inf, torch.tensor(expected))
    yield unchanged("bits of a second run", [norm], [grad_norm(grads, inv_scale=factor)])
    yield unchanged("grads written", before, grads)


def _unscale_by_1(grads: Sequence[Tensor], found_inf: Tensor) -> None:
    unscale_(grads, inv_scale=torch.ones_like(found_inf), found_inf=found_inf)


def _gradient_cases(op: str, body: Callable[..., Iterator[Result]]) -> Iterator[Case]:
    def case(dtype: str, name: str, make: Make, **rest: Any) -> Case:
        return Case(op, dtype, name, partial(body, make, **rest))

    for dtype, name, make, layout in gradient_inputs():
        yield case(dtype, name, make, layout=layout)
    for dtype, name, make in non_finite_inputs():
        yield case(dtype, name, make, expected=1.0)
    is_norm = body is _grad_norm  # a value at a position that one operator reads as NaN is inf for the other
    finds, values = (grad_norm, (math.inf, math.nan)) if is_norm else (_unscale_by_1, (math.nan, math.inf))
    for dtype, torch_dtype in DTYPES.items():
        yield Case(op, dtype, "positions", partial(_positions, finds, torch_dtype, values))
        make = partial(of_sizes, torch_dtype, (9, 1025))
        # found_inf says whether a gradient is NaN or inf. If only its product with inv_scale overflows or rounds to 0,
        # found_inf must stay 0.
        for inv_scale in (2.0**-16, 1.0, 3e38, 1e-40, 0.0):
            yield case(dtype, f"times_{inv_scale:g}", make, inv_scale=inv_scale)
        for found in (1.0, 2.0, math.nan):
            yield case(dtype, f"found_{found}_kept", make, found=found, expected=found)


def _clip(make: Make, layout: str, max_norm: float, device: torch.device) -> Iterator[Result]:
    grads = place(make(), device, layout)
    params = [torch.empty_like(g, requires_grad=True) for g in grads]
    theirs = [torch.empty_like(g, requires_grad=True) for g in grads]
    truth = [torch.empty_like(g, dtype=torch.float64, requires_grad=True) for g in grads]
    for grad, ours, other, true in zip(grads, params, theirs, truth, strict=True):
        ours.grad, other.grad, true.grad = grad, grad.clone(), grad.double()
    true_norm = _true_norm(grads)  # computed first, since clipping changes the gradients
    yield norms("norm", clip_grad_norm_(params, max_norm), true_norm)
    torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.nn.utils.clip_grad_norm_(truth, max_norm)
    groups = ([p.grad for p in group if p.grad is not None] for group in (params, theirs, truth))
    yield from compare("grads", *groups)


def _clip_cases() -> Iterator[Case]:
    for name, dtype in DTYPES.items():
        sizes = partial(of_sizes, dtype, (0, 9, 1025))
        for max_norm in (0.5, 1e6):
            yield Case("clip_grad_norm_", name, f"to_{max_norm:g}", partial(_clip, sizes, "contiguous", max_norm))
        for layout in LAYOUTS:
            yield Case("clip_grad_norm_", name, layout, partial(_clip, partial(shaped, dtype), layout, 1.0))


CASES: dict[str, tuple[Case, ...]] = {
    "unscale_": tuple(_gradient_cases("unscale_", _unscale)),
    "grad_norm": tuple(_gradient_cases("grad_norm", _grad_norm)),
    "clip_grad_norm_": tuple(_clip_cases()),
}
