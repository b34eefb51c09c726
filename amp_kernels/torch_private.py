"""All private interfaces of torch that this package uses.

The docstrings say what each is needed for, and what happens with a version of torch that lacks it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch


def tensor_exchange_api() -> Any:
    """Return the capsule of DLPack's C functions, or None if torch has none.

    `_C` uses them in the sweep of an optimizer's step, which reads the addresses and dtypes of all tensors
    (optim/_sweep.py). It reads a thousand tensors in a twelfth of the time that Python takes. Without the capsule the
    sweep is done in Python.
    """
    return getattr(Tensor, "__dlpack_c_exchange_api__", None)


def are_functorch_transforms_active() -> bool:
    """Return whether a transform of `torch.func` is active.

    An autograd function fails inside a transform for which it has no rule.

    If torch has no way to tell, the answer is True. Products are then computed by torch, without padding, which is
    always correct.
    """
    ask = getattr(torch._C, "_are_functorch_transforms_active", None)
    return ask is None or ask()


def is_transformed() -> bool:
    """Return whether a transform of `torch.func` or forward-mode differentiation is active.

    There an autograd function without a rule fails, or returns a derivative of 0. If torch has no way to tell, the
    answer is True.
    """
    return are_functorch_transforms_active() or getattr(forward_ad, "_current_level", 0) >= 0


def dispatch_modes() -> list[Any] | None:
    """Return the dispatch modes of this thread, the innermost last; None if torch lacks the function.

    `amp_kernels.use_backend` enters such a mode, and looks for it here. Without the function, a forced backend does not
    reach autograd's threads.
    """
    ask = getattr(_python_dispatch, "_get_current_dispatch_mode_stack", None)
    return None if ask is None else ask()


# A tensor subclass with this `__torch_function__` gets results that are not wrapped in the subclass. torch documents it
# for authors of subclasses.
no_torch_function = getattr(torch._C, "_disabled_torch_function_impl", None)


def wrapper_tensor(kind: type[Any], like: Tensor, dtype: torch.dtype) -> Any:
    """Return a tensor of class `kind` with the shape, strides and device of `like`, but without memory.

    If torch has `_set_throw_on_mutable_data_ptr`, C code that reads the memory of this tensor raises an error.
    Otherwise it would read from address 0.

    If torch cannot make such tensors, None is returned. The weight of an int8 layer is then dequantized whenever it is
    read.
    """
    make = getattr(Tensor, "_make_wrapper_subclass", None)
    if make is None or no_torch_function is None:
        return None
    made = make(kind, like.shape, strides=like.stride(), dtype=dtype, device=like.device)
    getattr(torch._C, "_set_throw_on_mutable_data_ptr", bool)(made)
    # This attribute makes the tensor an instance of nn.Parameter, which tie_weights of transformers requires. If a
    # version of torch looks for another attribute, tie_weights raises an error.
    made._is_param = True
    return made


def _mixes_rows() -> bool:
    """Return whether a NaN in one row of a bf16 matrix reaches the row before it in torch's CPU product.

    If K is not a multiple of 32, torch may read past the end of a row of the left matrix, into the next row. It
    multiplies what it reads there by 0, but a NaN or inf times 0 is NaN. torch 2.13 does this on a CPU with AMX,
    from 17 rows on and for most of these K, for example 33 and 1000. torch 2.11 does not.

    Without AMX the answer is False. With AMX, or if torch lacks the test for it, a product is tried. If this package is
    imported in a mode that makes fake tensors, the product has no values, and the answer is True.
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
