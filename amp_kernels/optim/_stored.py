"""How the states of a parameter are stored: in fp32, in bf16, or as codes of 8 bits (reference/states.py).

A state in fp32 or bf16 is stored under its own name, such as "exp_avg". A state in codes has two tensors: the codes
"exp_avg_codes", with the shape and strides of the parameter, and "exp_avg_scale", with an fp32 number for each group of
128 neighbours in memory. For a DTensor the codes are a DTensor too, and the groups are those of this rank's shard.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..families import FAMILIES, Family
from ..ops.table import SCALES, STATE_DTYPES, STATES
from ..reference.states import GROUP, Code, decode, encode
from ._options import check_state_dtype
from ._tensors import has_memory, is_laid_out, local


class Storage(NamedTuple):
    """How a parameter stores its states, as the sweep (_sweep.py) reads it.

    Attributes:
        dtype: The code in `STATE_DTYPES` of the states in `coded`. The other states are fp32.
        coded: A bit for each state that may have fewer than 32 bits (`Family.coded`). 0 if `dtype` is fp32.
        with_sign: A bit for each state whose codes have a sign.
        keys: The keys of ``optimizer.state[parameter]`` in the order of the table's rows, from `Row.STATE` on. None
            stands for a row that is not used.
        absent: Keys that hold a state in use in another dtype. There are none after `WithState._fit_state`.
    """

    dtype: int
    coded: int
    with_sign: int
    keys: tuple[str | None, ...]
    absent: tuple[str, ...]


class Stored(NamedTuple):
    """A state in use, and how it is stored."""

    name: str
    dtype: torch.dtype  # fp32, bf16, or int8 for codes
    code: Code | None


def codes_key(name: str) -> str:
    return f"{name}_codes"


def scale_key(name: str) -> str:
    return f"{name}_scale"


def keys_of(name: str) -> tuple[str, str, str]:
    """Returns the keys under which a state may be stored."""
    return name, codes_key(name), scale_key(name)


@functools.cache
def storages(family: str, names: tuple[str | None, ...], dtype: torch.dtype) -> tuple[Storage, Storage]:
    """Returns how parameters with fewer than `LEAST_LEAN` elements store the states in use, and how others do."""
    return _storage(FAMILIES[family], names, torch.float32), _storage(FAMILIES[family], names, dtype)


def _storage(family: Family, names: tuple[str | None, ...], dtype: torch.dtype) -> Storage:
    # Other code may have set the option of a group. ZeroRedundancyOptimizer sets it to the string in a state dict.
    dtype = check_state_dtype(f"the optimizer of {family.name}", dtype)
    coded = 0 if dtype is torch.float32 else family.coded(names)
    if coded == 0:
        dtype = torch.float32
    in_codes = [dtype is torch.int8 and bool(coded >> k & 1) for k in range(len(names))]
    keys: list[str | None] = [codes_key(name) if c and name else name for name, c in zip(names, in_codes, strict=True)]
    scales = [scale_key(name) if c and name else None for name, c in zip(names, in_codes, strict=True)]
    if coded:
        keys = [*keys, None, None][:STATES] + [*scales, None][:SCALES]
    used = [key for name in names if name is not None for key in keys_of(name)]
    with_sign = sum((code is not None and code.dtype is torch.int8) << k for k, code in enumerate(family.codes))
    absent = tuple(key for key in used if key not in keys)
    return Storage(STATE_DTYPES[dtype], coded, with_sign, tuple(keys), absent)


def stored_states(family: Family, names: Sequence[str | None], storage: Storage) -> list[Stored]:
    """Returns the states in use."""
    lean = next(dtype for dtype, code in STATE_DTYPES.items() if code == storage.dtype)
    return [
        Stored(name, lean if storage.coded >> k & 1 else torch.float32, family.codes[k])
        for k, name in enumerate(names)
        if name is not None
    ]


def flat(dense: Tensor) -> Tensor:
    """Returns the elements of a dense tensor in the order of memory."""
    return dense.as_strided((dense.numel(),), (1,), dense.storage_offset())


def groups_of(numel: int) -> int:
    return -(-numel // GROUP)


def holds_scales(scale: Any, numel: int) -> bool:
    """Whether `scale` holds the scales of `numel` elements."""
    is_plain = isinstance(scale, Tensor) and has_memory(scale) and not isinstance(scale, DTensor)
    return is_plain and scale.dtype is torch.float32 and scale.shape == (groups_of(numel),)


def is_stored(state: Mapping[str, Any], stored: Stored, target: Tensor) -> bool:
    """Whether kernels can use a state as it is. `target` is as in `is_laid_out`."""
    name, codes, scale = keys_of(stored.name)
    others: tuple[str, ...]
    if stored.dtype is not torch.int8:
        array, dtype, others = state.get(name), stored.dtype, (codes, scale)
    else:
        assert stored.code is not None
        array, dtype, others = state.get(codes), stored.code.dtype, (name,)
        scales: Any = state.get(scale)
        is_usable = holds_scales(scales, target.numel()) and not scales.is_inference() and scales.is_contiguous()
        if not is_usable or scales.device != target.device:
            return False
    is_array = isinstance(array, Tensor) and is_laid_out(local(array), target, dtype)
    return is_array and not any(key in state for key in others)


def value_of(state: Mapping[str, Any], name: str, code: Code | None) -> Tensor | None:
    """Returns a state as a floating-point tensor. None if there is no such state."""
    if state.get(name) is not None:  # even if there are codes: a step keeps only one, so other code has set this
        value: Tensor = state[name]
        return value
    codes, scale = state.get(codes_key(name)), state.get(scale_key(name))
    if codes is None or scale is None or code is None:
        return None
    value = torch.zeros_like(codes, dtype=torch.float32)
    flat(local(value)).copy_(decode(flat(local(codes)), scale.to(local(codes).device), code))
    return value


def store(state: dict[str, Any], stored: Stored, param: Tensor, value: Tensor | None) -> None:
    """Stores a state, rounded to nearest. None stands for zeros."""
    for key in keys_of(stored.name):
        state.pop(key, None)
    if stored.dtype is not torch.int8:
        array = torch.zeros_like(param, dtype=stored.dtype, requires_grad=False)
        state[stored.name] = array if value is None else array.copy_(value)
        return
    assert stored.code is not None
    codes = torch.zeros_like(param, dtype=stored.code.dtype, requires_grad=False)
    scale = torch.zeros(groups_of(local(codes).numel()), dtype=torch.float32, device=local(codes).device)
    if value is not None:
        fp32 = torch.zeros_like(param, dtype=torch.float32, requires_grad=False).copy_(value)
        new_codes, new_scale = encode(flat(local(fp32)), stored.code)
        flat(local(codes)).copy_(new_codes)
        scale.copy_(new_scale)
    state[codes_key(stored.name)], state[scale_key(stored.name)] = codes, scale
