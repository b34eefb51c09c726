"""Codes of 8 bits for the states of optimizers, in plain torch.

A group of neighbouring elements has one scale, its largest magnitude. The magnitude of each element, divided by the
scale, is a number from 0 to 1. The sign is kept apart. A code is an increasing function from these numbers to
0 .. levels. The value of the function is rounded to an integer. The inverse function turns the integer into a number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NEAREST, STOCHASTIC = "nearest", "stochastic"
UNSIGNED, SIGNED = 255, 127  # levels of a second moment, and of a momentum without its sign
OCTAVES = 24.0  # of the logarithmic code


@dataclass(frozen=True)
class Code:
    name: str
    levels: int
    encode: Callable[[Tensor], Tensor]  # from 0 .. 1 to 0 .. levels, not yet rounded
    decode: Callable[[Tensor], Tensor]  # the inverse, of whole numbers
    lowest: int = 0  # the lowest code of a group that is not all 0; 1 if no element may become 0


def linear(levels: int) -> Code:
    return Code("linear", levels, lambda x: x * levels, lambda q: q / levels)


def root(levels: int, lowest: int = 0) -> Code:
    return Code("square root", levels, lambda x: x.sqrt() * levels, lambda q: (q / levels).square(), lowest)


def fourth_root(lowest: int = 0) -> Code:
    levels = UNSIGNED
    return Code(
        "fourth root",
        levels,
        lambda x: x.sqrt().sqrt() * levels,
        lambda q: (q / levels).square().square(),
        lowest,
    )


def softsign() -> Code:
    """The companding of FlashOptim's momentum."""
    levels = SIGNED
    return Code("softsign", levels, lambda x: 2 * x / (1 + x) * levels, lambda q: q / (2 * levels - q))


def logarithmic(lowest: int = 0) -> Code:
    """Equal steps in the exponent over 24 octaves. Code 0 is the number 0."""
    steps = UNSIGNED - 1

    def decode(q: Tensor) -> Tensor:
        return torch.where(q < 1, 0.0, torch.exp2(OCTAVES * (q - UNSIGNED) / steps))

    return Code("logarithmic", UNSIGNED, lambda x: (1 + steps * (1 + x.log2() / OCTAVES)).clamp(min=0), decode, lowest)


def dynamic(is_signed: bool) -> Code:
    """The dynamic tree of bitsandbytes (Dettmers et al. 2022): 7 decades, each with twice the numbers of the one below.

    Between two numbers of the table the function is linear, so that stochastic rounding keeps the mean. bitsandbytes
    has no -1. Here both signs have the same numbers.
    """
    table = dynamic_numbers(is_signed)
    levels = len(table) - 1

    def encode(x: Tensor) -> Tensor:
        above = torch.searchsorted(table, x.contiguous()).clamp(1, levels)
        low, high = table[above - 1], table[above]
        return above - 1 + (x - low) / (high - low)

    return Code("dynamic", levels, encode, lambda q: table[q.long()])


def dynamic_numbers(is_signed: bool) -> Tensor:
    """The numbers from 0 to 1: 129 beside a sign, 256 without."""
    numbers = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not is_signed)) + 1, dtype=torch.float64)
        numbers += (10.0 ** (decade - 6) * (edges[1:] + edges[:-1]) / 2).tolist()
    return torch.tensor(sorted(numbers), dtype=torch.float32)


def stored(x: Tensor, code: Code, rounding: str, group: int, generator: torch.Generator | None = None) -> Tensor:
    """Return what is left of a state after it was stored: encoded, rounded and decoded.

    Args:
        x: fp32, with a multiple of `group` elements. With 255 levels, none is negative.
        rounding: NEAREST or STOCHASTIC, with numbers from `generator`.
    """
    groups = x.view(-1, group)
    scale = groups.abs().amax(1, keepdim=True)
    exact = code.encode(torch.where(scale > 0, groups.abs() / scale, 0.0).clamp(max=1))
    shift = 0.5 if rounding == NEAREST else torch.rand(exact.shape, generator=generator, device=x.device)
    codes = (exact + shift).floor().clamp(code.lowest, code.levels)
    return (code.decode(codes) * scale * torch.where(groups < 0, -1.0, 1.0)).view_as(x)
