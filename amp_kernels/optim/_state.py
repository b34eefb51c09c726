"""State of the fused optimizers: the entries of `optimizer.state`.

The entry of a parameter holds states such as ``momentum_buffer``, and ``step``, the int32 count of its updates. States
are in fp32, or as the option `state_dtype` says (_stored.py). For a 16-bit parameter the entry also holds an int16
``remainder``: parameter and remainder together are the fp32 master (csrc/formulas/remainder.h).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..families import Family
from ..ops.table import LEAST_LEAN, is_dense, shares_memory
from ..reference._master import join, split
from ._stored import (
    Storage,
    Stored,
    codes_key,
    groups_of,
    holds_scales,
    is_stored,
    keys_of,
    scale_key,
    storages,
    store,
    stored_states,
    value_of,
)
from ._tensors import check_parameter, dense, has_memory, is_count, is_laid_out, kind, local

# The end of errors. If the whole state is deleted, the rounded weight becomes the master.
_RESET = "delete everything except 'remainder' from optimizer.state[parameter] to reset it"


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

    def _params_by_group(self) -> Iterator[list[Tensor]]:
        return (group["params"] for group in self.param_groups)

    def _has_dtensors(self) -> bool:
        return any(isinstance(p, DTensor) for params in self._params_by_group() for p in params)

    @property
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

        Weight and remainder keep the master exactly, with these exceptions:

        - bf16: if a master lies exactly halfway between two bf16 numbers, and the weight is the one closer to 0, the
          master moves one fp32 unit towards 0. This happens to one in 131,072 masters.
        - fp16: a master closer to 0 than 2^-16 is kept to within 2^-40. If the weight overflows (beyond 65504), the
          weight and its master are infinite.
        - If other code changes the weight, the master differs from the new weight by at most half a unit in the last
          place of the weight.

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
        if not isinstance(state, dict) or "master" in state or ("remainder" in state) == is_fp32:
            return False
        target, step = dense(local(param)), state.get("step")
        if not (is_count(step, target.device) and step is not None and step.ndim == 0):
            return False
        remainder = state.get("remainder")
        if not is_fp32 and not (isinstance(remainder, Tensor) and is_laid_out(local(remainder), target, torch.int16)):
            return False
        return all(is_stored(state, stored, target) for stored in self._stored(param, group))

    def _steps_in(self, state: Mapping[str, Any]) -> Any:
        """Returns the count of steps. torch's SGD counts none, but has taken one if there is a momentum buffer."""
        first = self._set_at_first_step
        is_set = first is not None and any(state.get(key) is not None for key in keys_of(first))
        return state.get("step", int(is_set))

    def _stored(self, param: Tensor, group: dict[str, Any]) -> list[Stored]:
        return stored_states(self._family, self._state_names(group), self._storage(param, group))

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
            if is_stored(state, stored, target):
                continue
            value = value_of(state, stored.name, stored.code)
            store(state, stored, param, value)
            if value is None and stored.name == self._set_at_first_step:
                state["step"].zero_()
        if param.dtype is not torch.float32:
            remainder = state.get("remainder")
            if remainder is None:
                state["remainder"] = zeros_like(param, torch.int16)
            elif not is_laid_out(local(remainder), target, torch.int16):  # after model.to(device or memory format)
                state["remainder"] = zeros_like(param, torch.int16).copy_(remainder)

    def _check_before_fitting(self, name: str, param: Tensor, state: dict[str, Any], states: Sequence[Stored]) -> None:
        """Raises an error if `_fit_state` cannot make the state fit, before anything is modified."""
        target, step = dense(local(param)), state.get("step", 0)
        if not is_count(step, target.device):
            is_number = isinstance(step, Tensor) and step.numel() == 1 and has_memory(step)
            if not is_number or step.device.type == "cpu":
                check_step(f"{type(self).__name__}: step of {name}", step)
            self._check_own(name, "step", step)
        remainder = state.get("remainder") if param.dtype is not torch.float32 else None
        if remainder is not None and not _was_pruned(param, remainder):
            self._check_state(name, "remainder", param, remainder)
            if not is_laid_out(local(remainder), target, torch.int16):
                self._check_own(name, "remainder", remainder)
        if state.get("master") is not None:
            self._check_state(name, "master", param, state["master"])
        for stored in states:
            own, codes, scale = keys_of(stored.name)
            if state.get(own) is not None:
                self._check_state(name, own, param, state[own])
            elif state.get(codes) is not None or state.get(scale) is not None:
                self._check_codes(name, stored, param, state)
            if not is_stored(state, stored, target):
                for key in (own, codes, scale):
                    self._check_own(name, key, state.get(key))

    def _check_codes(self, name: str, stored: Stored, param: Tensor, state: dict[str, Any]) -> None:
        """Raises an error if the codes and scales of a state do not belong to a parameter."""
        if reason := why_not_codes(stored, param, state):
            arrays = (state.get(key) for key in keys_of(stored.name))
            have_memory = all(has_memory(array) for array in arrays if isinstance(array, Tensor))
            raise (RuntimeError if have_memory else ValueError)(
                f"{type(self).__name__}: {reason.format(name)}; to change a parameter and its state, set "
                f"state[{stored.name!r}] to an fp32 tensor and delete {codes_key(stored.name)!r} and "
                f"{scale_key(stored.name)!r}, or {_RESET}"
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


def why_not_codes(stored: Stored, param: Tensor, state: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with the codes and scales of a state. The result contains {} in place of the parameter."""
    codes, scale = state.get(codes_key(stored.name)), state.get(scale_key(stored.name))
    if stored.code is None:
        return f"{stored.name} of {{}} must not be in codes, since it always has 32 bits"
    if not (isinstance(codes, Tensor) and has_memory(codes) and codes.dtype is stored.code.dtype):
        return f"{codes_key(stored.name)} of {{}} must be a tensor of {stored.code.dtype} codes, got {kind(codes)}"
    if codes.shape != param.shape or local(codes).shape != local(param).shape or not is_dense(local(codes)):
        expected = f"the shape {tuple(param.shape)} of the parameter, without gaps"
        return f"{codes_key(stored.name)} of {{}} must have {expected}, got {tuple(codes.shape)}"
    groups = (groups_of(local(codes).numel()),)
    if not holds_scales(scale, local(codes).numel()):
        got = kind(scale)
        if isinstance(scale, Tensor) and scale.shape != groups:
            got = f"{tuple(scale.shape)} of {scale.dtype}"
        return f"{scale_key(stored.name)} of {{}} must be fp32 of shape {groups}, got {got}"
    return None


def _was_pruned(param: Tensor, remainder: Any) -> bool:
    return isinstance(remainder, Tensor) and remainder.numel() != param.numel()


def zeros_like(param: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros_like(param, dtype=dtype, requires_grad=False)


def _remainder(param: Tensor, master: Tensor) -> Tensor:
    fp32 = zeros_like(param).copy_(master)
    remainder = zeros_like(param, torch.int16)
    local(remainder).copy_(split(local(fp32), param.dtype)[1])
    return remainder
