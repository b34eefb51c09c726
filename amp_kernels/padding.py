"""Padded copies of operands, with which products on a GPU's tensor cores are fast."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .ops.matmul import ALIGNMENT, copy_pad, round_up

Size = tuple[int, int]

# cuBLAS is fast where, in both operands and in the result, the length of the contiguous dimension and the pitch (the
# distance of rows, or of columns) are multiples of this many elements. On an H200 (torch 2.11) fp16
# x [4096, K] @ w [N, K].T takes 181 us with N = K = 4096. With N = K = 4095 it takes 1021 us without padding, 1500 with
# a pitch of 4096, 1322 with K padded, and 181 with K and N padded.
MULTIPLE = 8
# Up to this much work (M * N * K) the copies make a loop of calls slower. On an H200 fp16 of 8192 x 1023 x 1023 (2**33)
# takes the device 140 us without padding and 47 us padded, but a padded call takes the host 145 us and up to 300. One
# of 4096 x 4095 x 4095 (2**36) takes 1036 us without padding and 266 us padded, the host included.
MIN_WORK = 2**34


def is_aligned(x: Tensor) -> bool:
    """Whether a matrix, or every matrix of a batch, can be loaded 16 bytes at a time.

    It can if it is row- or column-major and its rows, or columns, begin at multiples of 16 bytes. Of an empty one
    nothing is loaded.
    """
    elements = ALIGNMENT // x.element_size()
    (rows, columns), (row, column) = x.shape[-2:], x.stride()[-2:]
    if x.numel() == 0:
        return True
    if x.storage_offset() % elements != 0:
        return False
    by_row = column == 1 and (rows == 1 or row % elements == 0)
    by_column = row == 1 and (columns == 1 or column % elements == 0)
    return (by_row or by_column) and all(stride % elements == 0 for stride in x.stride()[:-2])


def is_column_major(x: Tensor) -> bool:
    """Whether elements of a column are neighbours. A matrix that could be either counts as row-major."""
    return x.stride(-2) == 1 and x.stride(-1) != 1


def padded(x: Tensor, size: Size) -> Tensor:
    """A copy of a matrix, or of a batch of matrices, with zeros around it up to `size`.

    Its rows begin at multiples of 16 bytes; so do its columns, if `x` is column-major.
    """
    rows, columns = size
    if is_column_major(x):
        return padded(x.mT, (columns, rows)).mT
    if x.dim() == 2:
        copy, _ = copy_pad(x, None, None, False, rows)
    else:
        pitch = round_up(columns, ALIGNMENT // x.element_size())
        copy = F.pad(x, (0, pitch - x.shape[-1], 0, rows - x.shape[-2])).contiguous()
    return copy.narrow(-1, 0, columns)


def library_sizes(a: Tensor, b: Tensor) -> tuple[Size, Size]:
    """The sizes of two matrices with which cuBLAS is fast at their product ``a @ b``."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    inner = round_up(k, MULTIPLE)
    return (round_up(m, MULTIPLE) if is_column_major(a) else m, inner), (inner, round_up(n, MULTIPLE))
