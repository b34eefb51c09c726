"""Every private interface of torch that this package uses: why, and what happens with a torch that lacks it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch


def tensor_exchange_api() -> Any:
    """Returns the capsule of DLPack's C functions, or None if torch has none.

    With it `_C` reads a thousand tensors in a twelfth of the time that Python takes. Without it the sweep of an
    optimizer's step (optim/_sweep.py) is done in Python.
    """
    return getattr(Tensor, "__dlpack_c_exchange_api__", None)


def are_functorch_transforms_active() -> bool:
    """Whether a transform of `torch.func` is active. Autograd functions without a rule for the transform fail in it.

    True if torch lacks the function. Products are then computed by torch, without padding, which is always correct.
    """
    ask = getattr(torch._C, "_are_functorch_transforms_active", None)
    return ask is None or ask()


def is_transformed() -> bool:
    """Whether a transform of `torch.func` or forward-mode differentiation is active.

    Autograd functions without a rule for it fail, or return a derivative of 0.
    """
    return are_functorch_transforms_active() or getattr(forward_ad, "_current_level", 0) >= 0


def dispatch_modes() -> list[Any] | None:
    """Returns the dispatch modes of this thread, the innermost last. `amp_kernels.use_backend` is one of them.

    None if torch lacks the function. A forced backend then does not reach autograd's threads.
    """
    ask = getattr(_python_dispatch, "_get_current_dispatch_mode_stack", None)
    return None if ask is None else ask()


# For `__torch_function__` of a tensor subclass, so that results are not wrapped. Documented for authors of subclasses.
no_torch_function = getattr(torch._C, "_disabled_torch_function_impl", None)


def wrapper_tensor(kind: type[Any], like: Tensor, dtype: torch.dtype) -> Any:
    """Returns a tensor of class `kind` with the shape, strides and device of `like`, and without memory.

    C code that reads its memory raises an error, if torch has the function for it; otherwise it would read from address
    0. None if torch has no wrappers: the weight of an int8 layer is then dequantized whenever it is read.
    """
    make = getattr(Tensor, "_make_wrapper_subclass", None)
    if make is None or no_torch_function is None:
        return None
    made = make(kind, like.shape, strides=like.stride(), dtype=dtype, device=like.device)
    getattr(torch._C, "_set_throw_on_mutable_data_ptr", bool)(made)
    # This attribute makes it an instance of nn.Parameter, which transformers' tie_weights requires. If torch looks for
    # another attribute, tie_weights raises an error.
    made._is_param = True
    return made


def _mixes_rows() -> bool:
    """Whether torch's CPU product of bf16 reads past the end of rows of the left matrix if K is not a multiple of 32.

    torch 2.13 does, on a CPU with AMX, from 17 rows on and for most K (33, 1000); torch 2.11 does not. What is read is
    the next row, multiplied by 0: a NaN or inf in it makes the result of this row NaN. If torch lacks the test for AMX,
    the product is tried. True if this package is imported in a mode that makes fake tensors.
    """
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    if has_amx is not None and not has_amx():
        return False
    x, ones = (torch.ones(shape, dtype=torch.bfloat16, device="cpu") for shape in ((40, 33), (33, 8)))
    x[1] = torch.nan
    try:
        return bool((x @ ones)[0].isnan().any())
    except RuntimeError:  # a fake tensor has no values
        return True


MIXES_ROWS = _mixes_rows()
