"""What is padded for the tensor cores of a GPU: operands whose rows are not a multiple of 16 bytes apart, by a copy."""

from __future__ import annotations

from torch import Tensor

from .ops.matmul import ALIGNMENT, copy_pad


def is_aligned(x: Tensor) -> bool:
    """Whether a matrix, or every one of a batch, can be loaded 16 bytes at a time: row- or column-major with an aligned
    pitch. Nothing is loaded of an empty one."""
    elements = ALIGNMENT // x.element_size()
    (rows, columns), (row, column) = x.shape[-2:], x.stride()[-2:]
    if x.numel() == 0:
        return True
    if x.storage_offset() % elements != 0:
        return False
    by_row = column == 1 and (rows == 1 or row % elements == 0)
    by_column = row == 1 and (columns == 1 or column % elements == 0)
    return (by_row or by_column) and all(stride % elements == 0 for stride in x.stride()[:-2])


def padded(x: Tensor) -> Tensor:
    """A copy of a matrix, or of a batch of them, in padded storage; what was column-major stays so."""
    if x.stride(-2) == 1 and x.stride(-1) != 1:
        return padded(x.mT).mT
    rows, _ = copy_pad(x.reshape(-1, x.shape[-1]), None, None, False)
    return rows.view(*x.shape[:-1], -1).narrow(-1, 0, x.shape[-1])
