"""Padded copies of matrices. Products of the copies are fast on a GPU's tensor cores."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .ops.matmul import ALIGNMENT, copy_pad, round_up

Size = tuple[int, int]

# cuBLAS is fast if, in both operands and in the result, the length and the pitch of the rows are multiples of this many
# elements. The pitch is the distance from the beginning of a row to that of the next one. If a matrix is column-major,
# this applies to its columns instead. On an H200 (torch 2.11), the time of fp16 x [4096, K] @ w [N, K].T, in us:
#
#   N = K = 4096                                         181
#   N = K = 4095                                        1021
#   N = K = 4095, only the pitch is rounded up to 4096  1500
#   N = K = 4095, K is padded to 4096                   1322
#   N = K = 4095, K and N are padded to 4096             181
MULTIPLE = 8
# Up to this much work (M * N * K) operands are not copied. For so little work, the host takes longer for a call with
# copies than the device takes for a call without copies. So copies would make a loop of calls slower. On an H200, for
# fp16:
#
#   8192 x 1023 x 1023 (2**33)    Without padding the device takes 140 us. With padding the device takes 47 us, but the
#                                 host takes 145 to 300 us.
#   4096 x 4095 x 4095 (2**36)    A call takes 1036 us without padding and 266 us with padding, including the time of
#                                 the host.
MIN_WORK = 2**34


def is_aligned(x: Tensor) -> bool:
    """Return whether a matrix, or every matrix of a batch, can be loaded 16 bytes at a time.

    A row-major matrix is aligned if its rows begin at multiples of 16 bytes. A column-major matrix is aligned if its
    columns begin at multiples of 16 bytes. An empty matrix is aligned, since nothing is loaded.
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
    """Return whether the elements of each column are contiguous, but the elements of each row are not."""
    return x.stride(-2) == 1 and x.stride(-1) != 1


def padded(x: Tensor, size: Size) -> Tensor:
    """Return a copy of a matrix, or of a batch of matrices, padded with zeros to `size`.

    If `x` is column-major, the copy is column-major too, and the columns of the copy begin at multiples of 16 bytes. If
    not, the rows of the copy begin at multiples of 16 bytes.
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
    """Return the sizes to which `a` and `b` have to be padded, so that cuBLAS computes ``a @ b`` fast."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    inner = round_up(k, MULTIPLE)
    return (round_up(m, MULTIPLE) if is_column_major(a) else m, inner), (inner, round_up(n, MULTIPLE))
