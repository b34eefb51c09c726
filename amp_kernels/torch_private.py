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


# Of a tensor subclass: its operators run without a wrapper around every result. Documented for authors of subclasses.
no_torch_function = getattr(torch._C, "_disabled_torch_function_impl", None)


def wrapper_tensor(kind: type[Any], like: Tensor, dtype: torch.dtype) -> Any:
    """A tensor of class `kind` with the shape, strides and device of `like`, and without memory.

    C code that would read its memory raises an error, where torch has the function for it; else it would read from
    address 0. None for a torch without wrappers: the weight of an int8 layer is then dequantized whenever it is read.
    """
    make = getattr(Tensor, "_make_wrapper_subclass", None)
    if make is None or no_torch_function is None:
        return None
    made = make(kind, like.shape, strides=like.stride(), dtype=dtype, device=like.device)
    getattr(torch._C, "_set_throw_on_mutable_data_ptr", bool)(made)
    # By this attribute it is an instance of nn.Parameter: transformers' tie_weights takes nothing else, and raises an
    # error for a torch that looks for another attribute.
    made._is_param = True
    return made


def _mixes_rows() -> bool:
    """Whether torch's CPU product of bf16 reads behind each row of the left matrix if K is not a multiple of 32.

    torch 2.13 does on a CPU with AMX from 17 rows on, for most K (33, 1000); torch 2.11 does not. What it reads is
    multiplied by 0, so that a NaN or inf there makes the row NaN: a NaN reaches the row before its own. Where torch
    cannot say whether there is AMX, the product is tried. True if this package is imported where tensors are fake.
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
