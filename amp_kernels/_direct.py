"""Direct calls: on a CPU, with nobody watching, from the public int8 functions straight to the compiled kernels.

Checks, plans and torch's dispatcher take 30 us of a call, and with cold caches, as between the layers of a model, 200:
a tenth of quantizing 16M elements. So what a call needs is kept by what it depends on, shapes, strides and dtypes, or
where that takes no plan it is looked at in C.

Each function returns None, and did nothing, if the call is not as plain as that; the operators serve it then, or say
what is wrong.
"""

from __future__ import annotations

import functools
import importlib
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _checks, _int8, _loader
from ._backends import HAS_CPU, PLAIN, forced
from ._table import DTYPE_CODES

# By names of this module: with cold caches each look-up in torch's large ones costs a microsecond or two.
_is_traced_by_dynamo = torch.compiler.is_dynamo_compiling
_WATCHERS = (
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._are_functorch_transforms_active,
    torch._C._get_tracing_state,
    torch._C._autograd._profiler_enabled,
)
_is_grad_enabled = torch.is_grad_enabled


def _compiled(name: str) -> Callable[..., Any] | None:
    """None in a `_C` without CPU kernels, or that was built before it had the function."""
    return getattr(importlib.import_module("amp_kernels._C"), name, None) if _loader.load() and HAS_CPU else None


# What the code that Inductor compiles makes tensors of its handles with; a torch without it has no direct calls.
_steal = getattr(getattr(torch._C, "_aoti", None), "alloc_tensors_by_stealing_from_void_ptrs", None)
_NAMES = ("are_plain", "new_quantize_int8", "new_dequantize_int8", "new_int8_matmul", "new_int8_linear")
_are_plain, _quantize, _dequantize, _multiply, _linear = map(_compiled, _NAMES) if _steal else (None,) * 5
_TORCH = (  # what C needs to know of it (csrc/bindings/direct.h)
    getattr(Tensor, "__dlpack_c_exchange_api__", None),
    *PLAIN,
    Tensor.is_neg,
    _steal,
    tuple(sorted(DTYPE_CODES, key=DTYPE_CODES.__getitem__)),
    _WATCHERS,
)

Described = tuple[torch.Size, tuple[int, ...], torch.dtype]


def is_watched() -> bool:
    """Whether calls have to be seen by torch's dispatcher: by the compiler, a mode, a transform of `torch.func`, a
    trace or the profiler."""
    if _is_traced_by_dynamo():  # first: dynamo traces all up to here
        return True
    dispatch_modes, function_modes, has_transforms, tracing_state, is_profiled = _WATCHERS
    return bool(dispatch_modes() or function_modes() or has_transforms() or tracing_state() or is_profiled())


def quantize_int8(
    x: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    dim: tuple[int, ...] | None,
    block_size: int | None,
    symmetric: bool,
    seed: int | None,
    *,
    fake: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Codes, or with `fake` values of x's dtype; scale and zero point, computed or as given."""
    if _quantize is None or x is None or not _serves(x, scale, zero_point) or not _are_exact(block_size, symmetric):
        return None
    if fake and _keeps_grad(x, scale):
        return None
    given = None if scale is None else _describe(scale), None if zero_point is None else _describe(zero_point)
    recipe = _quantization(_describe(x), *given, dim, block_size, symmetric, seed is not None, fake)
    made = None if recipe is None else _quantize(_TORCH, recipe, seed or 0, symmetric, x, scale, zero_point)
    if made is None:
        return None
    if scale is not None:
        return made[0], scale, zero_point
    return made[0], made[1], None if symmetric else made[2]


def dequantize_int8(
    values: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: int | None, dtype: torch.dtype
) -> Tensor | None:
    if _dequantize is None or not _serves(values, scale, zero_point) or not _are_exact(block_size):
        return None
    if values is None or scale is None or type(dtype) is not torch.dtype or _keeps_grad(scale):
        return None
    zero = None if zero_point is None else _describe(zero_point)
    recipe = _dequantization(_describe(values), _describe(scale), zero, block_size, dtype)
    return None if recipe is None else _dequantize(_TORCH, recipe, values, scale, zero_point)


def int8_matmul(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    a_zero_point: Tensor | None,
    b_scale: Tensor,
    b_zero_point: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor | None:
    if _multiply is None or not _is_ours():
        return None
    return _multiply(_TORCH, a, b, a_scale, a_zero_point, b_scale, b_zero_point, bias, out_dtype)


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor | None:
    if _linear is None or not _is_ours() or _keeps_grad(x, scale, bias):
        return None
    return _linear(_TORCH, x, weight, scale, bias)


# ------------------------------------------------------------------------------------------------------ the recipes
@functools.lru_cache(maxsize=1024)
def _quantization(
    x: Described,
    scale: Described | None,
    zero_point: Described | None,
    dim: tuple[int, ...] | None,
    block_size: int | None,
    symmetric: bool,
    indexed: bool,
    fake: bool,
) -> bytes | None:
    _checks.check_quantize(_shaped(x), _shaped_or_none(scale), _shaped_or_none(zero_point), dim, block_size)
    made = _int8.plan(x[0], x[1], dim, block_size, scale=None if scale is None else scale[:2], indexed=indexed)
    return _recipe(x, made, scale, zero_point, DTYPE_CODES[x[2]], fake, scale is not None, indexed)


@functools.lru_cache(maxsize=1024)
def _dequantization(
    values: Described, scale: Described, zero_point: Described | None, block_size: int | None, dtype: torch.dtype
) -> bytes | None:
    _checks.check_dequantize(_shaped(values), _shaped(scale), _shaped_or_none(zero_point), block_size, dtype)
    made = _int8.plan(values[0], values[1], None, block_size, scale=scale[:2])
    are_codes_dense = values[1] == made.out
    return _recipe(values, made, scale, zero_point, DTYPE_CODES[dtype]) if are_codes_dense else None


def _recipe(
    x: Described, made: _int8.Plan, scale: Described | None, zero_point: Described | None, *options: int
) -> bytes | None:
    """What the kernel is told (csrc/bindings/direct.h); None if it takes copies, or nothing at all."""
    one_layout = scale is None or zero_point is None or scale[1] == zero_point[1]
    if 0 in x[0] or made.layout is None or made.copies or not one_layout:
        return None
    # Of a given scale nothing is made, and it may have other dimensions.
    scales = (made.scale_shape, made.scale) if scale is None else (x[0], x[1])
    numbers = (*made.layout, *options, len(x[0]), *made.out, *scales[0], *scales[1])
    return struct.pack(f"{len(numbers)}q", *numbers)


def _shaped(described: Described) -> Tensor:
    """What the checks need of a tensor."""
    shape, strides, dtype = described
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _shaped_or_none(described: Described | None) -> Tensor | None:
    return None if described is None else _shaped(described)


# ---------------------------------------------------------------------------------------------------- the arguments
def _is_ours() -> bool:
    """Whether our kernels for a CPU serve its tensors, and no compiler traces what is done with them."""
    return not _is_traced_by_dynamo() and forced() in (None, "cpu")  # dynamo first: it traces all up to here


def _serves(*tensors: Tensor | None) -> bool:
    """Whether they, None apart, are memory of a CPU that our kernels for it serve, with nobody watching."""
    return _is_ours() and _are_plain is not None and _are_plain(_TORCH, *tensors)


def _keeps_grad(*tensors: Tensor | None) -> bool:
    return _is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors)


def _are_exact(block_size: object, symmetric: object = True) -> bool:
    """Of the types that are written in the signatures, as the dispatcher insists on."""
    return (block_size is None or type(block_size) is int) and type(symmetric) is bool


def _describe(tensor: Tensor) -> Described:
    return tensor.shape, tensor.stride(), tensor.dtype
