"""Memory for kernels to be tried on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Arena:
    """Places arrays between guard bands: poison to whoever reads them, canaries where someone writes."""

    GUARD = 64  # bytes; a multiple of 16, so that `offset` alone decides the alignment
    NAN = 0xFF  # every byte of a guard: NaN in each dtype
    FINITE = 0x5A  # 1.5e16, or 203 in fp16: shows where NaN would only send the norm down its exact path

    def __init__(self, guard: int = NAN) -> None:
        self.guard = guard
        self._buffers: list[tuple[Tensor, slice]] = []
        self._holes: list[tuple[Tensor, Tensor]] = []

    def place(self, values: Tensor, offset: int = 0) -> Tensor:
        """A copy of `values`, `offset` elements past an address that is a multiple of 16."""
        start = self.GUARD + offset * values.element_size()
        inside = slice(start, start + values.numel() * values.element_size())
        buffer = torch.full((inside.stop + self.GUARD,), self.guard, dtype=torch.uint8)
        self._buffers.append((buffer, inside))
        placed = buffer[inside].view(values.dtype).view(values.shape)
        assert placed.numel() == 0 or (placed.data_ptr() - offset * values.element_size()) % 16 == 0
        return placed.copy_(values)

    def around(self, values: Tensor, shape: Sequence[int], index: Any, offset: int = 0) -> Tensor:
        """A copy of `values` as ``whole[index]`` of a larger array `whole`, the rest of which is guard as well."""
        whole = self.place(torch.full(tuple(shape), 0, dtype=values.dtype), offset)
        whole.view(torch.uint8).fill_(self.guard)
        inside = whole[index].view_as(values) if values.shape != whole[index].shape else whole[index]
        mask = torch.zeros(tuple(shape), dtype=torch.bool)
        mask[index] = True
        self._holes.append((whole, mask))
        return inside.copy_(values)

    def check(self) -> None:
        for buffer, inside in self._buffers:
            guards = torch.cat([buffer[: inside.start], buffer[inside.stop :]])
            assert (guards == self.guard).all(), "a kernel wrote outside an array"
        for whole, mask in self._holes:
            between = whole[~mask].view(torch.uint8)
            assert (between == self.guard).all(), "a kernel wrote between the elements of a view"

    def bytes(self) -> Tensor:
        return torch.cat([buffer for buffer, _ in self._buffers])
