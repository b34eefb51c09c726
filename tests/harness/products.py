"""Launches of products on the emulator, for tests of how kernels use shared memory. The operands are zeros."""

from __future__ import annotations

import torch
from cuda_on_cpu import backend
from torch import Tensor


def laid_out(rows: int, columns: int, batches: int, dtype: torch.dtype, is_transposed: bool) -> Tensor:
    shape = (batches, columns, rows) if is_transposed else (batches, rows, columns)
    made = torch.zeros(shape, dtype=dtype)
    return made.mT if is_transposed else made


def matmul(m: int, n: int, k: int, a_along: bool = True, b_along: bool = True, batches: int = 3) -> None:
    """`along`: neighbours in memory are neighbours along k."""
    a = laid_out(m, k, batches, torch.float16, not a_along)
    b = laid_out(k, n, batches, torch.float16, b_along)
    backend._matmul_(a, b, None, torch.zeros(batches, m, n, dtype=torch.float16), None, 1.0, 0.0, 0)


def int8_matmul(m: int, n: int, k: int, zero_points: bool = False) -> None:
    a, b = torch.zeros(m, k, dtype=torch.int8), torch.zeros(n, k, dtype=torch.int8).t()
    zero = torch.zeros(m, 1, dtype=torch.int32) if zero_points else None
    backend._int8_matmul_(a, b, torch.ones(m, 1), zero, torch.ones(1, n), None, None, torch.zeros(m, n), None, None)


def int8_conv2d(pixels: tuple[int, int, int], channels: int, n: int, kernel: int = 3) -> None:
    """A convolution of images, [batch, height, width], with padding that keeps their sizes if `kernel` is odd."""
    x, weight = (torch.zeros(*sizes, channels, dtype=torch.int8) for sizes in (pixels, (n, kernel, kernel)))
    sides = torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.ones(n)
    steps = (1, 1), (kernel // 2,) * 2, (1, 1)
    backend._int8_conv2d_(x, weight, *sides, None, *steps, torch.zeros(*pixels, n), None, None)


def int8_linear(m: int, n: int, k: int) -> None:
    x, weight = torch.zeros(m, k, dtype=torch.float16), torch.zeros(n, k, dtype=torch.int8)
    backend._int8_linear_(x, weight, torch.ones(n), None, torch.zeros(m, n, dtype=torch.float16))
