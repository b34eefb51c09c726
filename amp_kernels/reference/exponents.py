"""Counts of the exponents of tensors, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

COLUMNS = 257  # of `counts`: one for each exponent of fp32, and one for zeros
ZEROS = 256
# Elements that are counted at a time. What is computed from them takes about 40 bytes for each, 160 MB in all.
PART = 1 << 22


def count_exponents_(tensors: Sequence[Tensor], counts: Tensor, largest: Tensor, squares: Tensor) -> None:
    """Count how many elements of each tensor have which exponent, and add the counts to `counts`.

    Row t of the results belongs to ``tensors[t]``. All of them are on the device of the tensors.

    Args:
        tensors: fp16, bf16 or fp32 tensors of any strides.
        counts: int64 ``[tensors, 257]``. Column e is increased by the number of elements that are not 0 and whose
            biased exponent is e, if they are converted to fp32: their magnitude is at least ``2**(e - 127)`` and below
            ``2**(e - 126)``. Column 0 counts subnormal fp32 numbers, column 255 counts NaN and inf, and column 256
            counts zeros.
        largest: fp32 ``[tensors]``. It becomes the maximum of its value and of all finite magnitudes.
        squares: fp64 ``[tensors]``. The sum of squares of all elements is added to it.

    Examples:
        >>> tensor = torch.tensor([0.0, 1.0, -1.5, torch.inf])
        >>> counts, largest, squares = torch.zeros(1, 257).long(), torch.zeros(1), torch.zeros(1).double()
        >>> amp_kernels.reference.count_exponents_([tensor], counts, largest, squares)
        >>> counts[0, [127, 255, 256]], largest, squares
        (tensor([2, 1, 1]), tensor([1.5000]), tensor([inf], dtype=torch.float64))
    """
    for t, tensor in enumerate(tensors):
        for part in tensor.flatten().split(PART):
            fp32 = part.float()
            column = torch.where(fp32 == 0, ZEROS, fp32.view(torch.int32) >> 23 & 0xFF)
            counts[t].index_add_(0, column, torch.ones_like(column, dtype=torch.int64))
            finite = torch.where(fp32.isfinite(), fp32.abs(), 0.0)
            largest[t] = torch.cat([largest[t].view(1), finite]).amax()
            squares[t] += fp32.double().square().sum()
