"""State of the fused optimizers: the entries of `optimizer.state`, and the options that decide how they are stored.

The entry of a parameter holds states such as ``momentum_buffer``, and ``step``, the int32 count of its updates. For a
16-bit parameter the entry also holds an int16 ``remainder``: parameter and remainder together are the fp32 master
(csrc/formulas/remainder.h).

States are in fp32, or as the option `state_dtype` says. A state in fp32 or bf16 is stored under its own name, such as
"exp_avg". A state in codes of 8 bits (reference/states.py) has two tensors: the codes "exp_avg_codes", with the shape
and strides of the parameter, and "exp_avg_scale", with an fp32 number for each group of 128 neighbours in memory. For a
DTensor the codes are a DTensor too, and the groups are those of this rank's shard.
"""

from __future__ import annotations

import contextlib
import functools
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..families import FAMILIES, Family
from ..ops.table import LEAST_LEAN, SCALES, STATE_DTYPES, STATES, is_dense, shares_memory
from ..reference._master import join, split
from ..reference.states import GROUP, Code, decode, encode
from ._tensors import check_parameter, dense, has_memory, is_count, is_laid_out, kind, local

# torch compares these options with numbers before it checks their types, and its error does not name them.
_NUMBERS = ("lr", "momentum", "dampening", "weight_decay", "alpha", "eps")
_FLAGS = ("nesterov", "centered", "amsgrad", "decoupled_weight_decay", "maximize")
# The end of errors. If the whole state is deleted, the rounded weight becomes the master.
_RESET = "delete everything except 'remainder' from optimizer.state[parameter] to reset it"


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
    dtype: torch.dtype  # fp32, bf16, int8 for codes, or int16 for the remainder
    code: Code | None


@functools.cache
def keys_of(name: str) -> tuple[str, str, str]:
    """Returns the keys under which a state may be stored: its own name, and those of its codes and scales.

    A remainder is never in codes. A key such as `remainder_scale` belongs to other code, so the answer has no such key.
    """
    return (name, "", "") if name == "remainder" else (name, f"{name}_codes", f"{name}_scale")


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
    keys = list(names)
    scales: list[str | None] = [None] * len(names)
    for k, name in enumerate(names):
        if name is not None and dtype is torch.int8 and coded >> k & 1:
            _, keys[k], scales[k] = keys_of(name)
    if coded:
        keys = [*keys, None, None][:STATES] + [*scales, None][:SCALES]
    used = [key for name in names if name is not None for key in keys_of(name)]
    with_sign = sum((code is not None and code.dtype is torch.int8) << k for k, code in enumerate(family.codes))
    absent = tuple(key for key in used if key not in keys)
    return Storage(STATE_DTYPES[dtype], coded, with_sign, tuple(keys), absent)


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
    return is_array and state.keys().isdisjoint(others)


def value_of(state: Mapping[str, Any], name: str, code: Code | None) -> Tensor | None:
    """Returns a state as a floating-point tensor. None if there is no such state."""
    value, codes, scale = map(state.get, keys_of(name))
    # A state is used even if there are codes: a step keeps only one of them, so other code has set the state.
    if value is not None or codes is None or scale is None or code is None:
        return value
    value = zeros_like(codes)
    flat(local(value)).copy_(decode(flat(local(codes)), scale.to(local(codes).device), code))
    return value


def store(state: dict[str, Any], stored: Stored, param: Tensor, value: Tensor | None) -> None:
    """Stores a state, rounded to nearest. None stands for zeros."""
    own, codes_key, scale_key = keys_of(stored.name)
    for key in (own, codes_key, scale_key):
        state.pop(key, None)
    if stored.dtype is not torch.int8:
        array = zeros_like(param, stored.dtype)
        state[own] = array if value is None else array.copy_(value)
        return
    assert stored.code is not None
    codes = zeros_like(param, stored.code.dtype)
    scale = torch.zeros(groups_of(local(codes).numel()), dtype=torch.float32, device=local(codes).device)
    if value is not None:
        new_codes, new_scale = encode(flat(local(zeros_like(param).copy_(value))), stored.code)
        flat(local(codes)).copy_(new_codes)
        scale.copy_(new_scale)
    state[codes_key], state[scale_key] = codes, scale


class WithState(torch.optim.Optimizer):
    """The part of a fused optimizer that keeps the state. States have the strides of their parameters."""

    _family: Family
    _set_at_first_step: str | None = None  # the state, if any, that the first step sets without reading it

    def _state_names(self, group: dict[str, Any]) -> tuple[str | None, ...]:
        """Returns the names of a group's states, in the order of the rows in csrc/table.h. None: not used."""
        raise NotImplementedError

    def _named_parameters(self) -> Iterator[tuple[str, int, Tensor]]:
        for g, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for i, param in enumerate(group["params"]):
                yield (names[i] if names else f"param_groups[{g}]['params'][{i}]"), g, param

    def _has_dtensors(self) -> bool:
        return any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"])

    @functools.cached_property
    def _keys(self) -> set[str]:
        """The keys of a parameter's state that the optimizer uses. It leaves all other keys as they are."""
        return {"step", "master", "remainder", *(key for name in self._family.states for key in keys_of(name))}

    def _storage(self, param: Tensor, group: dict[str, Any]) -> Storage:
        both = storages(self._family.name, self._state_names(group), group["state_dtype"])
        return both[local(param).numel() >= LEAST_LEAN]

    # ------------------------------------------------------------------------------------------------ the fp32 master
    @torch.compiler.disable
    @torch.inference_mode(False)
    @torch.no_grad()
    def master(self, param: Tensor) -> Tensor:
        """Return a copy of the fp32 master of a parameter.

        A 16-bit weight is its master rounded to nearest even. `state[param]["remainder"]` holds the rest: 16 bits per
        element. An fp32 parameter is its own master.

        Weight and remainder keep the master exactly, with two exceptions: one bf16 master in 131,072 moves one fp32
        unit towards 0, and an fp16 master closer to 0 than 2^-16 is kept to within 2^-40. The guide to optimizers also
        says what happens if a weight overflows, or if other code changes it.

        Args:
            param: One of the optimizer's parameters, of any dtype. It may be a DTensor.

        Returns:
            An fp32 tensor with the shape of `param`. It is a DTensor if `param` is one.

        Raises:
            ValueError: `param` is not one of the optimizer's parameters.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
            >>> optimizer = amp_kernels.optim.FusedSGD([weight], lr=2**-10)
            >>> weight.grad = torch.full((1,), 0.125, dtype=torch.bfloat16)
            >>> optimizer.step()
            >>> weight.item(), optimizer.master(weight).item()
            (1.0, 0.9998779296875)
        """
        name = next((name for name, _, p in self._named_parameters() if p is param), None)
        if name is None:
            raise ValueError(
                f"{type(self).__name__}.master: param must be one of the optimizer's parameters, got {kind(param)}"
            )
        return self._master(name, param)

    def _master(self, name: str, param: Tensor, low: torch.dtype | None = None) -> Tensor:
        """Returns a copy of the fp32 master of a parameter.

        `low`: an fp32 parameter with a remainder was cast from this 16-bit dtype. Its master is that before the cast.
        """
        master, state = zeros_like(param), self.state.get(param, {})
        is_fp32 = param.dtype is torch.float32
        if (is_fp32 and low is None) or "remainder" not in state:
            return master.copy_(state.get("master", param))
        self._check_state(name, "remainder", param, state["remainder"])
        weight = local(param).to(low) if is_fp32 else local(param)
        local(master).copy_(join(weight, local(state["remainder"]).to(param.device)))
        if is_fp32:  # an element that was written after the cast is its own master
            local(master).copy_(torch.where(weight.float() == local(param), local(master), local(param)))
        return master

    def _load_master(self, name: str, param: Tensor, master: Tensor) -> None:
        """Stores the remainder of a 16-bit parameter. The caller sets the parameter itself to `master`, rounded."""
        if param.dtype is not torch.float32:
            self._check_state(name, "master", param, master)
            self.state[param]["remainder"] = _remainder(param, master)

    def _remainder_of(self, param: Tensor) -> Tensor | None:
        """Returns the remainder of a 16-bit parameter on the parameter's device, or zeros. None for fp32."""
        if param.dtype is torch.float32:
            return None
        remainder = self.state.get(param, {}).get("remainder")
        remainder = local(zeros_like(param, torch.int16) if remainder is None else remainder)
        return remainder if remainder.device == param.device else remainder.to(param.device)

    # ---------------------------------------------------------------------------------------------------------- state
    def _is_fitted(self, name: str, param: Tensor, group: dict[str, Any]) -> bool:
        """Whether `_fit_state` would change nothing."""
        check_parameter(type(self).__name__, name, param)
        state, is_fp32 = self.state.get(param), param.dtype is torch.float32
        if not isinstance(state, dict) or "master" in state or (is_fp32 and "remainder" in state):
            return False
        target, step = dense(local(param)), state.get("step")
        if not (is_count(step, target.device) and step is not None and step.ndim == 0):
            return False
        return all(is_stored(state, stored, target) for stored in self._stored(param, group))

    def _steps_in(self, state: Mapping[str, Any]) -> Any:
        """Returns the count of steps. torch's SGD counts none, but has taken one if there is a momentum buffer."""
        first = self._set_at_first_step
        is_set = first is not None and any(state.get(key) is not None for key in keys_of(first))
        return state.get("step", int(is_set))

    def _stored(self, param: Tensor, group: dict[str, Any]) -> list[Stored]:
        """Returns the states in use and the remainder, if there is one, and how they are stored."""
        storage, codes = self._storage(param, group), self._family.codes
        lean = next(dtype for dtype, number in STATE_DTYPES.items() if number == storage.dtype)
        stored = [
            Stored(name, lean if storage.coded >> k & 1 else torch.float32, codes[k])
            for k, name in enumerate(self._state_names(group))
            if name is not None
        ]
        return stored if param.dtype is torch.float32 else [*stored, Stored("remainder", torch.int16, None)]

    def _fit_state(self, name: str, param: Tensor, group: dict[str, Any]) -> None:
        """Makes the state of a parameter fit its dtype and the options of its group. Existing values are kept."""
        check_parameter(type(self).__name__, name, param)
        state, target, states = self.state[param], dense(local(param)), self._stored(param, group)
        self._check_before_fitting(name, param, state, states)
        state["step"] = _as_count(self._steps_in(state), target.device)
        master = state.pop("master", None)  # from a state dict: ZeroRedundancyOptimizer writes it into `state`
        if param.dtype is torch.float32:
            state.pop("remainder", None)
        elif master is not None:
            state["remainder"] = _remainder(param, master)
        elif _was_pruned(param, state.get("remainder")):
            # The weights that are left become their own masters. This changes each master by at most half a 16-bit
            # unit, because it was no further away from its weight.
            del state["remainder"]
        for stored in states:
            if not is_stored(state, stored, target):  # for example, after model.to(device or memory format)
                value = value_of(state, stored.name, stored.code)
                store(state, stored, param, value)
                if value is None and stored.name == self._set_at_first_step:
                    state["step"].zero_()

    def _check_before_fitting(self, name: str, param: Tensor, state: dict[str, Any], states: Sequence[Stored]) -> None:
        """Raises an error if `_fit_state` cannot make the state fit, before anything is modified."""
        target, step = dense(local(param)), state.get("step", 0)
        if not is_count(step, target.device):
            is_number = isinstance(step, Tensor) and step.numel() == 1 and has_memory(step)
            if not is_number or step.device.type == "cpu":
                check_step(f"{type(self).__name__}: step of {name}", step)
            self._check_own(name, "step", step)
        if state.get("master") is not None:
            self._check_state(name, "master", param, state["master"])
        for stored in states:
            own, codes, scale = keys_of(stored.name)
            if is_stored(state, stored, target) or (own == "remainder" and _was_pruned(param, state.get(own))):
                continue
            if state.get(own) is not None:
                self._check_state(name, own, param, state[own])
            elif state.get(codes) is not None or state.get(scale) is not None:
                self._check_codes(name, stored, param, state)
            for key in (own, codes, scale):
                self._check_own(name, key, state.get(key))

    def _check_codes(self, name: str, stored: Stored, param: Tensor, state: dict[str, Any]) -> None:
        """Raises an error if the codes and scales of a state do not belong to a parameter."""
        if found := why_not_codes(stored, param, state):
            key, reason = found
            own, codes, scale = keys_of(stored.name)
            arrays = (state.get(key) for key in (own, codes, scale))
            have_memory = all(has_memory(array) for array in arrays if isinstance(array, Tensor))
            raise (RuntimeError if have_memory else ValueError)(
                f"{type(self).__name__}: {key} of {name} {reason}; to change a parameter and its state, set "
                f"state[{own!r}] to an fp32 tensor and delete {codes!r} and {scale!r}, or {_RESET}"
            )

    def _check_own(self, name: str, key: str, state: Any) -> None:
        """Raises RuntimeError if a state that has to be replaced is shared. Other processes would use the old one."""
        if isinstance(state, Tensor) and has_memory(state) and local(state).device.type == "cpu" and state.is_shared():
            raise RuntimeError(
                f"{type(self).__name__}: {key} of {name} must have the dtype, device and layout that init_state() "
                f"gives it, since it is in shared memory and cannot be replaced, got {kind(state)}; call init_state() "
                "before share_memory_()"
            )

    def _check_state(self, name: str, key: str, param: Tensor, state: Tensor) -> None:
        remedy = f"delete {key!r}, and the weight is its master" if key in ("master", "remainder") else _RESET
        is_plain = isinstance(state, Tensor) and has_memory(state)
        is_number = is_plain and (state.dtype is torch.int16 if key == "remainder" else state.is_floating_point())
        if not (is_number and shares_memory([local(state)]) is None):
            what = "int16 numbers" if key == "remainder" else "floats"
            raise TypeError(
                f"{type(self).__name__}: {key} of {name} must be a tensor of {what} whose elements do not share "
                f"memory, got {kind(state)}; {remedy}"
            )
        if state.shape != param.shape:
            raise RuntimeError(
                f"{type(self).__name__}: {key} of {name} must have the parameter's shape {tuple(param.shape)}, got "
                f"{tuple(state.shape)}; {remedy}"
            )

    def _drop_unset_states(self) -> None:
        """Deletes momentum buffers that no step has set (the count of steps is 0), if the options do not need them.

        Otherwise, if momentum was switched on again after some steps, the next step would use the buffer of zeros as if
        a step had set it. Reading the count waits for the device.
        """
        first = self._set_at_first_step
        for _, index, param in self._named_parameters():
            state = self.state.get(param)
            if first is None or not isinstance(state, dict) or "step" not in state:
                continue
            keys = [key for key in keys_of(first) if key in state]
            if keys and first not in self._state_names(self.param_groups[index]) and int(state["step"]) == 0:
                for key in keys:
                    del state[key]


def check_step(what: str, value: Any) -> int:
    """Returns a count of steps as an int, or raises ValueError. Waits for the device if the count is a tensor."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 and has_memory(value) else value
    is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
    if not (is_number and math.isfinite(number) and number == int(number) and 0 <= number < 2**31 - 1):
        got = kind(number) if isinstance(number, Tensor) else repr(number)
        raise ValueError(f"{what} must be a whole number from 0 to 2^31 - 2, got {got}")
    return int(number)


def _as_count(step: Any, device: torch.device) -> Tensor:
    if is_count(step, device):
        return step.view(())
    if isinstance(step, Tensor) and step.device.type != "cpu":
        return step.detach().to(device, torch.int32).view(())
    return torch.full((), int(step), dtype=torch.int32, device=device)


def why_not_codes(stored: Stored, param: Tensor, state: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the key under which the codes or scales of a state are wrong, and what is wrong, as text."""
    own, codes_key, scale_key = keys_of(stored.name)
    codes, scale = state.get(codes_key), state.get(scale_key)
    if stored.code is None:
        return own, "must not be in codes, since it always has 32 bits"
    if not (isinstance(codes, Tensor) and has_memory(codes) and codes.dtype is stored.code.dtype):
        return codes_key, f"must be a tensor of {stored.code.dtype} codes, got {kind(codes)}"
    if codes.shape != param.shape or local(codes).shape != local(param).shape or not is_dense(local(codes)):
        expected = f"the shape {tuple(param.shape)} of the parameter, without gaps"
        return codes_key, f"must have {expected}, got {tuple(codes.shape)}"
    groups = (groups_of(local(codes).numel()),)
    if not holds_scales(scale, local(codes).numel()):
        got = kind(scale)
        if isinstance(scale, Tensor) and scale.shape != groups:
            got = f"{tuple(scale.shape)} of {scale.dtype}"
        return scale_key, f"must be fp32 of shape {groups}, got {got}"
    return None


def _was_pruned(param: Tensor, remainder: Any) -> bool:
    return isinstance(remainder, Tensor) and remainder.numel() != param.numel()


def zeros_like(param: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros_like(param, dtype=dtype, requires_grad=False)


def _remainder(param: Tensor, master: Tensor) -> Tensor:
    remainder = zeros_like(param, torch.int16)
    local(remainder).copy_(split(local(zeros_like(param).copy_(master)), param.dtype)[1])
    return remainder


def check_params(name: str, params: Any) -> None:
    if isinstance(params, torch.nn.Module):
        got = f"the module {type(params).__name__}; pass model.parameters()"
    elif isinstance(params, Mapping):
        got = f"one {type(params).__name__}; pass model.parameters(), or a list of groups [{{'params': ...}}]"
    elif isinstance(params, Iterable):  # this includes a Tensor, for which torch raises an error
        return
    else:
        got = f"{params!r}; pass model.parameters()"
    raise TypeError(f"{name}: params must be an iterable of parameters or of parameter groups, got {got}")


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises TypeError if an option has a wrong type. torch checks the ranges."""
    for key in _NUMBERS:
        value = options.get(key, 0)
        if not isinstance(value, (numbers.Real, Tensor)):
            raise TypeError(f"{name}: {key} must be a number or a Tensor of one element, got {value!r}")
    for key in _FLAGS:
        if isinstance(options.get(key), str):  # "False" would count as True
            raise TypeError(f"{name}: {key} must be True or False, got {options[key]!r}")
    betas: Any = options.get("betas", (0, 0))
    is_pair = isinstance(betas, Sequence) and len(betas) == 2
    if not (is_pair and all(isinstance(beta, (numbers.Real, Tensor)) for beta in betas)):
        raise TypeError(f"{name}: betas must be two numbers such as (0.9, 0.999), got {betas!r}")
    check_max_grad_norm(name, options.get("max_grad_norm"))


def check_max_grad_norm(name: str, value: Any) -> float | None:
    if value is None:  # first, since a test against an abstract class takes 0.4 us in every step
        return None
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (is_number and value > 0):
        error = ValueError if is_number else TypeError
        raise error(f"{name}: max_grad_norm must be a positive number or None, got {value!r}")
    return value


def check_state_dtype(name: str, value: Any) -> torch.dtype:
    """Returns the option as a torch.dtype. Configuration files and command lines say "int8" or "torch.int8"."""
    if not isinstance(value, (torch.dtype, str)):
        raise TypeError(f"{name}: state_dtype must be a torch.dtype such as torch.int8, got {value!r}")
    text = f"torch.{str(value).removeprefix('torch.')}"
    dtype = next((known for known in STATE_DTYPES if str(known) == text), None)
    if dtype is None:
        raise ValueError(f"{name}: state_dtype must be torch.float32, torch.bfloat16 or torch.int8, got {value!r}")
    return dtype


@contextlib.contextmanager
def restored(groups: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Restores the caller's group dicts if the block raises an error, since torch writes its defaults into them."""
    before = [(group, dict(group)) for group in groups]
    try:
        yield
    except BaseException:
        for group, items in before:
            group.clear()
            group.update(items)
        raise
