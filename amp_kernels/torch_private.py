"""Every private interface of torch that this package uses: why, and what serves a torch that has it no more."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def tensor_exchange_api() -> Any:
    """The capsule of DLPack's C functions, by which `_C` looks at a thousand tensors in a twelfth of Python's time.

    None where torch has none; the sweep of the step plan is then done in Python.
    """
    return getattr(Tensor, "__dlpack_c_exchange_api__", None)
