"""Saves and loads the state dicts of the fused optimizers: torch's format, with fp32 masters for 16-bit parameters."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..families import ADAM, FAMILIES
from ..ops.checks import why_not_loaded
from ._reference_plan import unsigned
from ._state import (
    Stored,
    WithState,
    check_options,
    check_state_dtype,
    check_step,
    keys_of,
    store,
    value_of,
    why_not_codes,
    zeros_like,
)
from ._tensors import has_memory, kind, local

_LOW = (torch.float16, torch.bfloat16)
_FLATTENED = (
    ", probably from torch.distributed.checkpoint with flatten_optimizer_state_dict=True; get, load and set state "
    "dicts without that option"
)


class WithCheckpoints(WithState):
    """An optimizer that saves its fp32 masters, and that can also load state dicts of torch's optimizers."""

    _format = 1  # the version of state dicts; it grows if earlier releases would misread the new ones

    def state_dict(self, *, compact: bool = False) -> dict[str, Any]:
        """Return a state dict in torch's format, with the fp32 masters of 16-bit parameters. Waits for the device.

        States are in fp32 and `step` is an fp32 CPU tensor, as in torch. If there are no 16-bit parameters, the
        matching torch optimizer can load the state dict too.

        Args:
            compact: Whether states that are bf16 or int8 (option `state_dtype`) stay as they are. Torch's optimizers
                cannot load such a state dict. Codes of a parameter that is not contiguous become fp32 all the same.

        Returns:
            The state dict.

        Raises:
            RuntimeError: `compact` is True, and a DTensor is in a group whose `state_dtype` is not fp32. Another
                sharding could not load such states.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
            >>> optimizer = amp_kernels.optim.FusedSGD([weight], lr=0.5)
            >>> optimizer.init_state()
            >>> optimizer.state_dict()["state"][0]["master"]
            tensor([1., 1.])
        """
        if compact:
            self._refuse_codes_of_shards()

        def export(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            self._export(state_dict, compact)

        handle = self.register_state_dict_post_hook(export, prepend=True)  # before the user's hooks
        try:
            return super().state_dict()
        finally:
            handle.remove()

    @torch.no_grad()
    def _export(self, state_dict: dict[str, Any], compact: bool) -> None:
        """Converts the entries of a state dict for saving: `remainder` becomes `master`, states become fp32."""
        state_dict["format"] = self._format
        for group in state_dict["param_groups"]:
            # torch.distributed.checkpoint raises an error for a torch.dtype.
            group["state_dtype"] = str(check_state_dtype(type(self).__name__, group["state_dtype"]))
        keys = (key for group in state_dict["param_groups"] for key in group["params"])
        params = dict(zip(keys, self._named_parameters(), strict=True))
        low = self._dtypes_before_fp32()
        for key, state in state_dict["state"].items():
            if not isinstance(state, dict) or key not in params:
                continue
            new: dict[str, Tensor | None] = {}  # None: the key is left out
            name, index, param = params[key]
            if "remainder" in state:
                master = self._master(name, param, low.get(param))
                # If a parameter was cast to fp32 and is equal to its master, the master is left out.
                is_needed = param.dtype is not torch.float32 or not torch.equal(local(master), local(param))
                new = {"remainder": None, "master": master if is_needed else None}
            new |= self._in_fp32(state, compact)
            new |= self._exported_steps(param, self.param_groups[index], {**state, **new})
            state_dict["state"][key] = {k: v for k, v in {**state, **new}.items() if k not in new or v is not None}

    def _in_fp32(self, state: dict[str, Any], compact: bool) -> dict[str, Tensor | None]:
        """Returns the entries that replace states which are not fp32. None: the key is left out.

        Groups of codes are neighbours in memory. Codes of parameters that are not contiguous would be misread if
        another program saved them in another memory format.
        """
        new: dict[str, Tensor | None] = {}
        for name, code in zip(self._family.states, self._family.codes, strict=True):
            value = value_of(state, name, code)
            if value is None:
                continue
            _, codes_key, scale_key = keys_of(name)
            codes = state.get(codes_key)
            if codes is not None and not (compact and name not in state and codes.is_contiguous()):
                new |= {codes_key: None, scale_key: None, name: value}
            elif value.dtype is torch.bfloat16 and not compact:
                new[name] = value.float()
        return new

    def _exported_steps(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Tensor | None]:
        """Returns the entry `step`, zeros for states that the next step would make, and None for states to leave out.

        Left out are `step` and states of a parameter that was not updated yet, unless other code has written a state.
        The values of a DTensor are not looked at, because ranks must agree on its entries.
        """
        keys = self._keys - {"remainder", "master"}
        if keys.isdisjoint(state):
            return {}
        step = self._steps_in(state)
        step = unsigned(step) if isinstance(step, Tensor) and step.dtype is torch.int32 else torch.as_tensor(step)
        step = step.to("cpu", torch.float32).view(())  # as torch saves it
        if step > 0:
            names = [name for name in self._needed(group) if all(state.get(key) is None for key in keys_of(name))]
            return {"step": step, **{name: zeros_like(param) for name in names}}
        unread = {} if self._set_at_first_step is None else dict.fromkeys(keys_of(self._set_at_first_step))
        values = [value for key in keys - unread.keys() - {"step"} if isinstance(value := state.get(key), Tensor)]
        is_written = any(isinstance(v, DTensor) or not has_memory(v) or bool(v.any()) for v in values)
        return {"step": step, **unread} if is_written else dict.fromkeys(keys)

    def _refuse_codes_of_shards(self) -> None:
        # Every rank decides alike, although a small shard has fp32 states.
        for name, g, param in self._named_parameters():
            dtype = check_state_dtype(type(self).__name__, self.param_groups[g]["state_dtype"])
            if isinstance(param, DTensor) and dtype is not torch.float32:
                raise RuntimeError(
                    f"{type(self).__name__}.state_dict: compact must be False, since {name} is a DTensor, whose "
                    "shards store their states by their own sizes; save the fp32 states"
                )

    def _dtypes_before_fp32(self) -> dict[Tensor, torch.dtype]:
        """Guesses the 16-bit dtypes that fp32 parameters with a remainder had before a cast such as ``model.float()``.

        Remainders are int16 for fp16 and bf16 alike, so the guess is made from the weights. An fp16 parameter with many
        different values does not look like bf16, since one in eight random fp16 numbers is also a bf16 number. One with
        few values counts as bf16 only if all fp32 parameters with a remainder look like bf16.
        """
        of_fp32 = (p for _, _, p in self._named_parameters() if p.dtype is torch.float32)
        are_bf16 = {p: _looks_like_bf16(local(p)) for p in of_fp32 if "remainder" in self.state.get(p, ())}
        usual = torch.bfloat16 if all(are_bf16.values()) else torch.float16
        return {
            p: (torch.bfloat16 if _has_many_values(local(p)) else usual) if is_bf16 else torch.float16
            for p, is_bf16 in are_bf16.items()
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of the matching torch optimizer.

        If the state dict has no masters, as for fp32 parameters, the optimizer keeps the masters that it has. But if an
        optimizer of this class saved the state dict, and had no state yet, the weights become the masters. If a torch
        state dict lacks a state, that state starts as in a new optimizer. To change from fp16 to bf16, or the other way
        round, use `load_fp32_state_dict`, since the masters that are loaded here would lose bits.

        Args:
            state_dict: What `state_dict()` returned.

        Raises:
            ValueError: The state dict belongs to another optimizer, or a later release saved it. Or a state is not a
                floating-point tensor, or has another shape than its parameter. Or a state, a master or a step is
                missing or invalid. Nothing was modified.
            TypeError: An option in the state dict has a wrong type. Nothing was modified.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> torch_optimizer = torch.optim.Adam([weight], lr=0.5)
            >>> weight.sum().backward()
            >>> torch_optimizer.step()
            >>> optimizer = amp_kernels.optim.FusedAdam([weight])
            >>> optimizer.load_state_dict(torch_optimizer.state_dict())
            >>> optimizer.param_groups[0]["lr"], int(optimizer.state[weight]["step"])
            (0.5, 1)
        """
        # For each parameter, the entries that this class loads. torch does not get these entries, because it would cast
        # them to the dtypes of the parameters.
        saved: dict[Tensor, dict[str, Any]] = {}
        is_part = False  # whether this class saved the state dict, and other code may have left out entries

        def set_aside(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            nonlocal is_part
            if reason := why_not_loaded(type(self).__name__, loaded.get("format"), self._format):
                raise ValueError(reason)
            for group in loaded["param_groups"]:
                self._check_family(group)
                check_options(f"{type(self).__name__}.load_state_dict", group)
            is_part = not is_whole and any("state_dtype" in group for group in loaded["param_groups"])
            # How states are stored is a choice of this optimizer, as their device is.
            loaded = {**loaded, "param_groups": [dict(group) for group in loaded["param_groups"]]}
            for group, own in zip(loaded["param_groups"], self.param_groups, strict=False):
                group["state_dtype"] = own["state_dtype"]
            rest = dict(loaded["state"])
            keys = ((key, group) for group in loaded["param_groups"] for key in group["params"])
            for (key, group), (name, _index, param) in zip(keys, self._named_parameters(), strict=False):
                entry = rest.get(key)
                if isinstance(entry, dict):
                    saved[param] = {k: v for k, v in entry.items() if k in self._keys}
                    rest[key] = {k: v for k, v in entry.items() if k not in self._keys}
                    self._check_entry(f"{type(self).__name__}.load_state_dict: {{}} of {name}", param, group, entry)
            return {**loaded, "state": {key: entry for key, entry in rest.items() if entry != {}}}

        def load(_: torch.optim.Optimizer) -> None:
            self._load_entries(saved, before["state"], is_whole)

        before = dict(self.__dict__)
        is_whole = "format" in state_dict
        handles = (
            self.register_load_state_dict_pre_hook(set_aside),  # runs after the user's hooks
            self.register_load_state_dict_post_hook(load, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            self.__dict__.update(before)  # a load replaces `state` and `param_groups`, and does not modify them
            raise
        finally:
            for handle in handles:
                handle.remove()
        self._warn_of_lost_bits(saved)
        if is_part:
            self._warn_of_lost_masters(saved)

    def _load_entries(self, saved: dict[Tensor, dict[str, Any]], before: dict[Any, Any], is_whole: bool) -> None:
        """Loads the saved entries.

        A parameter without a saved master keeps its master in `before`, with one exception. If `is_whole`, the state
        dict has all entries that this class saved. If it has masters, or no entries, the other parameters had no state
        yet when it was saved, and their weights become the masters.
        """
        has_masters = any("master" in entry for entry in saved.values())
        keeps_masters = not (is_whole and (has_masters or not saved))
        for name, index, param in self._named_parameters():
            if keeps_masters and "remainder" in before.get(param, {}):
                self.state[param]["remainder"] = before[param]["remainder"]
            if param in saved:
                self._load_entry(name, param, self.param_groups[index], saved[param])

    def _check_family(self, group: dict[str, Any]) -> None:
        found = [family.name for family in FAMILIES.values() if group.keys() >= set(family.options)]
        if not found and _is_adam_of_another_package(group):
            found = [ADAM.name]
        if self._family.name not in found:
            other = found[0] if found else _optimizer_of(group)
            raise ValueError(
                f"{type(self).__name__}.load_state_dict: the state dict must be from {self._family.name}, got one from "
                f"{other} (its groups lack the option {' or '.join(self._family.options)}); load it into an optimizer "
                "of that kind"
            )

    def _check_entry(self, what: str, param: Tensor, group: dict[str, Any], entry: dict[str, Any]) -> None:
        """Raises ValueError if a saved entry cannot be loaded. `what` begins the message, with {} for the key."""
        if "remainder" in entry and entry.get("master") is None:
            # To flatten a state dict, torch takes the keys from `optimizer.state`. They include "remainder", but not
            # "master".
            raise ValueError(
                f"{what.format('the fp32 master')} must be in the state dict, got a remainder in its place{_FLATTENED}"
            )
        for key in ("master", *self._family.states):
            value = entry.get(key)
            if value is None:
                continue
            if not (isinstance(value, Tensor) and has_memory(value) and value.is_floating_point()):
                raise ValueError(f"{what.format(key)} must be a floating-point tensor with memory, got {kind(value)}")
            if value.shape != param.shape:
                raise ValueError(f"{what.format(key)} must have shape {tuple(param.shape)}, got {tuple(value.shape)}")
        entry = {**entry, **self._checked_codes(what, param, entry)}
        steps = check_step(what.format("step"), entry["step"]) if "step" in entry else None
        needed = self._needed(group)
        if self._set_at_first_step is None and steps is None and any(entry.get(key) is not None for key in needed):
            raise ValueError(
                f"{what.format('step')} must be in the state dict if there are other states; the state dict has none"
            )
        missing = sorted(key for key in needed if entry.get(key) is None)
        if steps and missing:
            raise ValueError(
                f"{what.format(missing[0])} must be in the state dict after {steps} steps; the state dict has none"
            )

    def _needed(self, group: dict[str, Any]) -> set[str]:
        """Returns the names of the states that a parameter needs after its first step."""
        return {name for name in self._state_names({**self.defaults, **group}) if name} - {self._set_at_first_step}

    def _checked_codes(self, what: str, param: Tensor, entry: dict[str, Any]) -> dict[str, Tensor]:
        """Returns the codes of a saved entry by the names of their states. Raises ValueError if one does not fit."""
        found = {}
        for name, code in zip(self._family.states, self._family.codes, strict=True):
            _, codes_key, scale_key = keys_of(name)
            codes: Any = entry.get(codes_key)
            scale: Any = entry.get(scale_key)
            if entry.get(name) is not None or (codes is None and scale is None):
                continue
            if isinstance(codes, dict):  # torch takes the keys from `optimizer.state`
                got = f"got a dict of codes in its place{_FLATTENED}"
                raise ValueError(f"{what.format(name)} must be in the state dict, {got}")
            wrong = why_not_codes(Stored(name, torch.int8, code), param, entry)
            if wrong is None and not codes.is_contiguous():
                wrong = codes_key, "must be contiguous, since state_dict(compact=True) saves them so"
            if wrong is not None:
                raise ValueError(f"{what.format(wrong[0])} {wrong[1]}")
            if not ((scale >= 0) & (scale < torch.inf)).all():
                raise ValueError(
                    f"{what.format(scale_key)} must be finite and not negative, got {scale.min().item()} to "
                    f"{scale.max().item()}; if the state held NaN or inf, save it by state_dict(), without compact"
                )
            found[name] = codes
        return found

    def _warn_of_lost_bits(self, saved: dict[Tensor, dict[str, Any]]) -> None:
        named = self._named_parameters()
        lacking = [name for name, _, param in named if _lacks_bits(param, saved.get(param, {}).get("master"))]
        if lacking:
            warnings.warn(
                f"{type(self).__name__}.load_state_dict: {len(lacking)} fp32 parameters ({lacking[0]} is the first) "
                "hold 16-bit weights, whose fp32 masters in this checkpoint have more bits; to keep these bits, save "
                "weights with amp_kernels.optim.fp32_state_dict(model, optimizer) and load them with "
                "load_fp32_state_dict",
                stacklevel=4,
            )

    def _warn_of_lost_masters(self, saved: dict[Tensor, dict[str, Any]]) -> None:
        """Warns if some parameters have an entry in a state dict of this class, and others of 16 bits have none."""
        lacking = [name for name, _, p in self._named_parameters() if p.dtype in _LOW and p not in saved]
        if lacking and saved:
            warnings.warn(
                f"{type(self).__name__}.load_state_dict: {len(lacking)} 16-bit parameters ({lacking[0]} is the first) "
                "have no entry in the state dict, so their fp32 masters are not loaded; torch.distributed.checkpoint "
                "leaves out parameters that are frozen; if they were trained before, call requires_grad_() on them "
                "before the load, and freeze them after it",
                stacklevel=4,
            )

    def _load_entry(self, name: str, param: Tensor, group: dict[str, Any], saved: dict[str, Any]) -> None:
        if saved.get("master") is not None:
            self._load_master(name, param, saved["master"])
        if not param.requires_grad and saved.keys() <= {"master"}:
            return
        state, used = self.state[param], {stored.name: stored for stored in self._stored(param, group)}
        state["step"] = int(self._steps_in(saved))  # the first key, as in torch
        for key, code in zip(self._family.states, self._family.codes, strict=True):
            value = value_of(saved, key, code)
            if value is not None:
                # A state that is not needed with the present options is kept too, since these may be changed back.
                store(state, used.get(key, Stored(key, torch.float32, code)), param, value)
        self._fit_state(name, param, group)  # makes the states that are missing


def _lacks_bits(param: Tensor, master: Tensor | None) -> bool:
    """Whether a parameter is fp32, differs from its master, and is this master rounded to 16 bits."""
    if param.dtype is not torch.float32 or master is None:
        return False
    plain, fp32 = local(param), local(zeros_like(param).copy_(master))
    return not torch.equal(plain, fp32) and any(torch.equal(plain, fp32.to(dtype).float()) for dtype in _LOW)


def _options_of_torch() -> dict[str, set[str]]:
    return {
        name: inspect.signature(kind).parameters.keys() - {"params"}
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }


def _optimizer_of(group: dict[str, Any]) -> str:
    """Returns the name of torch's optimizer whose options a saved group has. If several fit, the largest one wins."""
    fitting = {name: len(options) for name, options in _options_of_torch().items() if options <= group.keys()}
    return max(fitting, key=lambda name: fitting[name], default="another optimizer")


def _is_adam_of_another_package(group: dict[str, Any]) -> bool:
    """Whether a saved group is from an Adam without the option amsgrad, such as the one of DeepSpeed.

    torch's other optimizers with betas also have options, such as maximize, that these Adams lack.
    """
    of_torch = group.keys() & set().union(*_options_of_torch().values())
    return "betas" in group and of_torch <= {"lr", "betas", "eps", "weight_decay"}


def _has_many_values(weights: Tensor) -> bool:
    return weights.flatten()[:65536].unique().numel() >= 16  # sorting all weights of a large layer would take seconds


def _looks_like_bf16(weights: Tensor) -> bool:
    """Whether at least as many elements are bf16 numbers as are fp16 numbers."""
    bf16, fp16 = (int((weights.to(dtype).float() == weights).sum()) for dtype in (torch.bfloat16, torch.float16))
    return bf16 >= fp16
