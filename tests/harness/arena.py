"""Memory for kernels to be tried on."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor


class Arena:
    """Places arrays between guard bands: poison to whoever reads them, canaries where someone writes.

    `guards`: the addresses from which and up to which nobody may read. A view in a larger array may be read from its
    first to its last element, with what lies between them.
    """

    alive: ClassVar[weakref.WeakSet[Arena]] = weakref.WeakSet()

    GUARD = 64  # bytes; a multiple of 16, so that `offset` alone decides the alignment
    NAN = 0xFF  # every byte of a guard: NaN in each dtype
    FINITE = 0x5A  # 1.5e16, or 203 in fp16: shows where NaN would only send the norm down its exact path

    def __init__(self, guard: int = NAN, device: str | torch.device = "cpu") -> None:
        self.guard, self.device = guard, device
        self._buffers: list[tuple[Tensor, slice]] = []
        self._holes: list[tuple[Tensor, Tensor]] = []
        self.guards: list[tuple[int, int]] = []
        self.alive.add(self)

    def place(self, values: Tensor, offset: int = 0) -> Tensor:
        """A copy of `values`, `offset` elements past an address that is a multiple of 16."""
        start = self.GUARD + offset * values.element_size()
        inside = slice(start, start + values.numel() * values.element_size())
        buffer = torch.full((inside.stop + self.GUARD,), self.guard, dtype=torch.uint8, device=self.device)
        self._buffers.append((buffer, inside))
        self._guard(buffer, buffer[inside])
        placed = buffer[inside].view(values.dtype).view(values.shape)
        assert placed.numel() == 0 or (placed.data_ptr() - offset * values.element_size()) % 16 == 0
        return placed.copy_(values)

    def around(self, values: Tensor, shape: Sequence[int], index: Any, offset: int = 0) -> Tensor:
        """A copy of `values` as ``whole[index]`` of a larger array `whole`, the rest of which is guard as well."""
        whole = self.place(torch.full(tuple(shape), 0, dtype=values.dtype, device=self.device), offset)
        whole.view(torch.uint8).fill_(self.guard)
        inside = whole[index].view_as(values) if values.shape != whole[index].shape else whole[index]
        mask = torch.zeros(tuple(shape), dtype=torch.bool, device=self.device)
        mask[index] = True
        self._holes.append((whole, mask))
        self._guard(whole, inside)
        return inside.copy_(values)

    def _guard(self, whole: Tensor, inside: Tensor) -> None:
        begin, end = whole.data_ptr(), whole.data_ptr() + whole.numel() * whole.element_size()
        if inside.numel() == 0:  # has no address
            self.guards.append((begin, end))
            return
        last = sum((size - 1) * stride for size, stride in zip(inside.shape, inside.stride(), strict=True))
        first = inside.data_ptr()
        self.guards += [(begin, first), (first + (last + 1) * inside.element_size(), end)]

    def check(self) -> None:
        for buffer, inside in self._buffers:
            guards = torch.cat([buffer[: inside.start], buffer[inside.stop :]])
            assert (guards == self.guard).all(), "a kernel wrote outside an array"
        for whole, mask in self._holes:
            between = whole[~mask].view(torch.uint8)
            assert (between == self.guard).all(), "a kernel wrote between the elements of a view"

    def bytes(self) -> Tensor:
        return torch.cat([buffer for buffer, _ in self._buffers])
