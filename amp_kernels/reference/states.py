"""Optimizer states of 8 and 16 bits in plain torch: the specification of csrc/formulas/states.h.

A state of 8 bits has a code for each element, and an fp32 scale for each group of 128 neighbours in memory. The scale
is the largest magnitude of the group. It is 0 if the whole group is 0, and NaN if the group holds NaN or inf.

- A momentum has a signed code q from -127 to 127, which stands for ``sign(q) * (q / 127)^2 * scale``. If all magnitudes
  of a group are below `LEAST_SCALE`, the group becomes 0.
- A second moment has a code q from 1 to 255, which stands for ``(q / 255)^4 * scale``. No element of a group becomes 0
  unless the whole group is 0, since a step divides by the root of this state. The scale is at least `LEAST_SCALE`.

Rounding is at random, so that a slow average moves although most of its changes are smaller than a step of the code.
`amp_kernels.reference.encode` rounds to nearest if it gets no random bits.

The reasons for these codes are measured in benchmarks/RESULTS.md, "Codes for 8-bit optimizer states". All arithmetic is
fp32, in an order that no compiler can fuse. So every backend computes the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .int8 import philox
from .update import root

GROUP = 128
# With this scale or a larger one, decoded numbers are normal or 0, because (1 / 255)^4 is above 2^-32. So if a decoded
# group is encoded again, it has the same codes and the same scale.
LEAST_SCALE = 2.0**-90
NEAREST = 0x8000  # the bits that round to nearest


class Code(NamedTuple):
    """A code of 8 bits.

    Attributes:
        dtype: int8 if the state has a sign, else uint8.
        levels: The code of the largest magnitude.
        roots: The code is proportional to the square root of the square root ... of the magnitude.
    """

    dtype: torch.dtype
    levels: int
    roots: int

    @property
    def factor(self) -> float:
        """What the root of ``magnitude / scale`` is multiplied by, before 16 bits are rounded away.

        4 is added, because ``scale * (1 / scale)`` may be below 1 by 2^-24. The largest magnitude must have the largest
        code nevertheless. Otherwise the scale would change when the decoded group is encoded again.
        """
        return 65536.0 * self.levels + 4.0


MOMENTUM = Code(torch.int8, 127, 1)
SECOND_MOMENT = Code(torch.uint8, 255, 2)


def encode(x: Tensor, code: Code, bits: Tensor | int = NEAREST) -> tuple[Tensor, Tensor]:
    """Return the codes of a state, and the scale of each group.

    Args:
        x: fp32 [elements], in the order of memory.
        code: MOMENTUM or SECOND_MOMENT.
        bits: int64 [elements], random numbers from 0 to 65535.

    Returns:
        The codes of dtype `code.dtype` [elements], and the scales, fp32 [ceil(elements / 128)].
    """
    groups = _in_groups(x)
    magnitude = groups.abs().amax(1, keepdim=True)  # NaN if an element is NaN
    is_finite = magnitude.isfinite()
    is_zero = magnitude == 0 if code is SECOND_MOMENT else magnitude < LEAST_SCALE
    scale = torch.where(is_zero, 0.0, magnitude.clamp(min=LEAST_SCALE))
    # A tensor is divided, because torch turns a division by a number into a product on a GPU.
    inverse = torch.where(scale > 0, torch.ones_like(scale) / scale, 0.0)
    fraction = torch.where(is_finite, groups.abs() * inverse, 0.0)
    for _ in range(code.roots):
        fraction = root(fraction)
    steps = (fraction * code.factor).to(torch.int32)
    codes = ((steps + (_in_groups(bits) if isinstance(bits, Tensor) else bits)) >> 16).clamp(max=code.levels)
    if code.dtype is torch.uint8:
        codes = torch.where((scale > 0) & is_finite, codes.clamp(min=1), 0)
    else:
        codes = torch.where(groups < 0, -codes, codes)
    scale = torch.where(is_finite, scale, torch.nan)
    return codes.to(code.dtype).flatten()[: x.numel()], scale.flatten()


def decode(codes: Tensor, scale: Tensor, code: Code) -> Tensor:
    """Return the state that `encode` has encoded: fp32 [elements]."""
    fraction = codes.float() * (1 / code.levels)
    power = fraction * fraction.abs() if code.roots == 1 else fraction * fraction
    for _ in range(code.roots - 1):
        power = power * power
    return power * scale.repeat_interleave(GROUP)[: codes.numel()]


def to_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 numbers to bf16 at random: up in proportion to the distance from the number below.

    `bits` are random numbers from 0 to 65535.
    """
    rounded = ((x.view(torch.int32) + bits) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(x.isnan(), torch.nan, rounded)


def random_bits(numel: int, step: int | Tensor, column: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the random numbers of a step for the first and for the second state: int64 [elements], from 0 to 65535.

    Element j of a group takes the upper half of ``a * j + b``, modulo 2^32. So the numbers of any two elements of a
    group are independent (Dietzfelbinger 1996; csrc/formulas/states.h). The four Philox words whose counter is the
    position of the group, with the key ``(step, column)``, are a and b of the first and of the second state. `step` is
    the number of updates before this one, `column` the position of the parameter among the optimizer's parameters on
    its device.
    """
    words = philox(torch.arange(-(-numel // GROUP), device=device), (step & 0xFFFFFFFF) | column << 32)
    position = torch.arange(GROUP, device=device)
    hashed = [((words[:, k, None] * position + words[:, k + 1, None]) & 0xFFFFFFFF) >> 16 for k in (0, 2)]
    return hashed[0].flatten()[:numel], hashed[1].flatten()[:numel]


def _in_groups(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.numel() % GROUP)).view(-1, GROUP)
