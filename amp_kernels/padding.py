"""What is padded for the tensor cores of a GPU: operands whose rows are not a multiple of 16 bytes apart, by a copy."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

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


class PaddedWeights:
    """Padded copies of weights for inference. A copy is valid while its weight has the version and the address it had,
    and on the stream that made it: another stream could read the copy before it is written, or after its memory was
    given to somebody else.

    Copies are not kept where a change could go unnoticed: in training, where a copy lives from forward to backward; in
    a process group (FSDP gathers a weight anew without a new version); and once a CUDA graph used a weight, since its
    replays change weights without one. Memory: as much as the weight, for weights with such a pitch.
    """

    def __init__(self) -> None:
        self._copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def padded(self, weight: Tensor, *, is_training: bool) -> Tensor:
        """`is_training`: a backward pass will follow."""
        if type(weight) not in (Tensor, torch.nn.Parameter):  # a fake tensor, for one, has no address
            return padded(weight)
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            self._copies[weight] = None  # from now on anew each time
            return padded(weight)
        known = weight in self._copies
        entry = self._copies.get(weight)
        shared = torch.distributed.is_available() and torch.distributed.is_initialized()
        if is_training or shared or weight.is_inference() or (known and entry is None):
            if entry is not None:
                del self._copies[weight]
            return padded(weight)
        stream = torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else 0
        key = (weight._version, weight.data_ptr(), stream)
        if entry is None or entry[0] != key:
            entry = self._copies[weight] = (key, padded(weight))
        return entry[1]


weights = PaddedWeights()
