"""The operator that counts the exponents of tensors, for `amp_kernels.PrecisionReport` and the scaler."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from .checks import check_tensors
from .library import operator

COLUMNS = reference.exponents.COLUMNS


def _check(tensors: list[Tensor], counts: Tensor, largest: Tensor, squares: Tensor) -> None:
    check_tensors("count_exponents_", "tensors", tensors)
    shapes = {"counts": (len(tensors), COLUMNS), "largest": (len(tensors),), "squares": (len(tensors),)}
    dtypes = {"counts": torch.int64, "largest": torch.float32, "squares": torch.float64}
    for (name, shape), result in zip(shapes.items(), (counts, largest, squares), strict=True):
        if result.dtype is not dtypes[name] or tuple(result.shape) != shape or not result.is_contiguous():
            raise ValueError(
                f"count_exponents_: {name} must be a contiguous {dtypes[name]} tensor of shape {shape}, got "
                f"{result.dtype} of shape {tuple(result.shape)}; allocate it with torch.zeros"
            )
        if tensors and result.device != tensors[0].device:
            raise ValueError(
                f"count_exponents_: {name} must be on {tensors[0].device} with the tensors, got {result.device}; move "
                "it there"
            )


# Only `amp_kernels.PrecisionReport` and `amp_kernels.GradScaler` (_zero_gradients.py) call this operator, the scaler in
# every hundredth step. There is no Triton kernel: where Triton alone serves a GPU, the reference counts.
count_exponents_ = operator(
    "count_exponents_(Tensor[] tensors, Tensor(a!) counts, Tensor(b!) largest, Tensor(c!) squares) -> ()",
    check=_check,
    reference=reference.count_exponents_,
    fake=lambda *arguments: None,
)
