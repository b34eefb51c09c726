"""Every private interface of torch that this package uses: why, and what serves a torch that has it no more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch


def tensor_exchange_api() -> Any:
    """The capsule of DLPack's C functions, by which `_C` looks at a thousand tensors in a twelfth of Python's time.

    None where torch has none; the sweep of the step plan is then done in Python.
    """
    return getattr(Tensor, "__dlpack_c_exchange_api__", None)


def are_functorch_transforms_active() -> bool:
    """Whether a transform of `torch.func` runs, in which autograd functions that have no rule for it fail.

    True for a torch that cannot say: products are then torch's own, without padding, and right everywhere.
    """
    ask = getattr(torch._C, "_are_functorch_transforms_active", None)
    return ask is None or ask()


def is_transformed() -> bool:
    """Whether a transform of `torch.func` or forward-mode differentiation runs.

    Autograd functions without rules for them fail there, or return a derivative of 0.
    """
    return are_functorch_transforms_active() or getattr(forward_ad, "_current_level", 0) >= 0


def dispatch_modes() -> list[Any] | None:
    """The modes of this thread, the innermost last, in which `amp_kernels.use_backend` is found.

    None if this torch lacks the function. A forced backend then does not reach autograd's threads.
    """
    ask = getattr(_python_dispatch, "_get_current_dispatch_mode_stack", None)
    return None if ask is None else ask()
