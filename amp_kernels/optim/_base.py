"""Base class of the fused optimizers: state, checkpoints, the protocol with a scaler, the step."""

from __future__ import annotations

import contextlib
import inspect
import math
import numbers
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT, _global_optimizer_pre_hooks

from .. import backends
from ..families import FAMILIES, Family
from ..functional.unscale import moved, total_norm
from ..ops.checks import why_not_loaded
from ..ops.table import DTYPE_CODES, RECORD, is_dense, same_layout, shares_memory
from ..reference._master import join, split
from ._observe import has_memory, is_held, kind, local, sweep
from ._plan import Column, Hyper, Members, NativePlan, Plan, capturing
from ._reference_plan import ReferencePlan, unsigned

_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"


@dataclass(eq=False)
class OverflowLog:
    """Where a scaler's checks met NaN or inf. A scaler keeps it until the update after the optimizer's
    death."""

    records: dict[torch.device, Tensor] = field(default_factory=dict)  # the `Record` of csrc/table.h
    names: dict[torch.device, list[str]] = field(default_factory=dict)  # of the parameters there
    checks: int = 0  # gradient passes under a scaler, as far as the host knows

    def overflows(self) -> Iterator[tuple[int, str]]:
        """For each device the last check that met NaN or inf, and the parameter. Waits for it."""
        for device, record in self.records.items():
            _, _, number, member = record.tolist()
            if number > 0:
                names = self.names[device]
                yield number, names[member] if member < len(names) else "a parameter that was removed"


class Verdict(NamedTuple):
    """What a gradient pass under a scaler found, for the step that it is for.

    plans: those that the pass read. The step goes on from them, since nothing runs in between; to look for changes
        again would take a small step 20 us. None if step hooks may change gradients.
    """

    grad_scale: Tensor | None  # by which the update divides; None once gradients are unscaled
    found_inf: Tensor | None  # over devices and ranks; None if there was no gradient
    plans: list[Plan] | None = None


class FusedOptimizer(torch.optim.Optimizer):
    """Base class of the fused optimizers; `FusedSGD` documents what they share."""

    _family: Family
    _set_at_first_step: str | None = None  # a state that the first step sets without reading it
    _format = 1  # of state dicts; a higher one is for what earlier releases would misread

    _plans: list[Plan] | None = None
    # The parameters and the entries of `state` that the plans use. Each step compares them with `param_groups` and
    # `state`, object by object.
    _plan_params: list[list[Tensor]]
    _plan_state: tuple[list[Any], list[Any]]
    _plan_keys: tuple[tuple[str | None, ...], ...] | None = None  # the states that the options asked for
    _captured: tuple[Plan, ...] = ()  # plans that CUDA graphs still point to
    # The verdict on the step under way: torch's scaler sets the first two, `_step_under` all three.
    grad_scale: Tensor | None
    found_inf: Tensor | None
    _checked: list[Plan] | None = None
    # That of the last step, for averages; a scaler that skips a step on the host sets it too.
    _last_found_inf: Tensor | None = None

    def __init__(
        self,
        params: ParamsT,
        *,
        max_grad_norm: float | None,
        foreach: bool | None,
        fused: bool | None,
        **options: Any,
    ) -> None:
        name = type(self).__name__
        check_max_grad_norm(name, max_grad_norm)
        _check_params(name, params)
        _check_options(name, options)
        if foreach and fused:
            raise RuntimeError(f"{name}: only one of foreach and fused can be True, got both; neither has an effect")
        given: Any = params if isinstance(params, Tensor) else list(params)  # torch has words for a Tensor
        with _restored(group for group in given if isinstance(group, dict)):
            super().__init__(given, foreach=False, **options)  # type: ignore[call-arg]
        self._setup(max_grad_norm=max_grad_norm, foreach=foreach, fused=fused)

    def _setup(self, *, max_grad_norm: float | None, foreach: bool | None, fused: bool | None) -> None:
        """Adds the options and attributes of a fused optimizer to what torch's constructor has set up."""
        for group in (self.defaults, *self.param_groups):
            group["foreach"], group["fused"] = foreach, fused
        self.defaults["max_grad_norm"] = max_grad_norm
        for group in self.param_groups:
            group.setdefault("max_grad_norm", max_grad_norm)
        self._norm: Tensor | None = None
        self._log = OverflowLog()

    # ------------------------------------------------------------------------------------------- what users may read
    @property
    def max_grad_norm(self) -> float | None:
        """The norm that gradients are clipped to inside the step, or None.

        Setting it sets it in every parameter group.
        """
        norms = list(dict.fromkeys(group["max_grad_norm"] for group in self.param_groups))
        if len(norms) > 1:
            raise ValueError(
                f"{type(self).__name__}: max_grad_norm must be the same in all parameter groups, since it bounds the "
                f"norm over all of them, got {norms}; set optimizer.max_grad_norm"
            )
        return check_max_grad_norm(type(self).__name__, norms[0]) if norms else self.defaults["max_grad_norm"]

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        check_max_grad_norm(type(self).__name__, value)
        for group in (self.defaults, *self.param_groups):
            group["max_grad_norm"] = value

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm that the last step or scaler measured, before clipping; None before there was one.

        A copy, 0-dim fp32 on the device of the parameters. For DTensors it is the norm of this rank's shards.
        """
        return None if self._norm is None else self._norm.clone()

    @torch.compiler.disable
    @torch.inference_mode(False)
    @torch.no_grad()
    def master(self, param: Tensor) -> Tensor:
        """Return a copy of the fp32 master of a parameter.

        A 16-bit weight is its master rounded to nearest even. `state[param]["remainder"]` holds the rest: 16 bits per
        element. An fp32 parameter is its own master.

        Weight and remainder keep the master exactly, with these exceptions:

        - bf16: of two masters that lie halfway between two weights and round to the same one, the one farther from 0
          moves by one fp32 unit. These are one in 131,072 masters.
        - fp16: a master below 2^-16 is kept to within 2^-40. A master that rounds to more than 65504 is infinite.
        - After other code changed the weight, the master is within half a unit in the last place of the weight.

        Args:
            param: One of the optimizer's parameters, of any dtype; a DTensor too.

        Returns:
            An fp32 tensor in the shape of `param`; for a DTensor a DTensor.

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

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a scaler may set ``grad_scale`` and ``found_inf``, instead of unscaling the gradients and waiting
        for the device.

        Not if the step that it calls is not ours alone: a subclass, a wrapper or a delegating object may change
        gradients, and is owed what torch's default optimizers get. Nor for parameters of FSDP1, whose ranks have to
        agree on a skip: torch's ShardedGradScaler lets them only as it unscales.
        """
        return _is_ours(self.step) and not self._is_flattened()

    def _is_flattened(self) -> bool:
        # FSDP1 needs a process group. Without one a thousand parameters would be asked at every step.
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return False
        return any(getattr(p, "_fsdp_flattened", False) for params in self._params_by_group() for p in params)

    # ------------------------------------------------------------------------------------ what a family says of itself
    def _state_names(self, group: dict[str, Any]) -> tuple[str | None, ...]:
        """The states of a parameter in table order; None for one that the options do without."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------- step
    @torch.compiler.disable
    @torch.inference_mode(False)  # else state made here could not be written outside
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, or none if a scaler found NaN or inf. Does not wait for the device.

        Args:
            closure: Re-evaluates the model and returns the loss. Not under a scaler, as in torch.

        Returns:
            What `closure` returned, or None.

        Raises:
            TypeError: A parameter or gradient is not fp32, fp16 or bf16, or has no memory of its own (wrapper
                subclasses, fake and meta tensors).
            RuntimeError: A gradient is sparse, or its shape, device or mesh differs from its parameter's. Tensors that
                are written share memory. `max_grad_norm` is set with sharded parameters. A CUDA graph is captured
                before there is state.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = amp_kernels.optim.FusedSGD([weight], lr=0.5)
            >>> weight.sum().backward()
            >>> optimizer.step()
            >>> weight.data
            tensor([0.5000, 0.5000])
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale, found_inf = _scalar(self, "grad_scale"), _scalar(self, "found_inf")
        self._last_found_inf = found_inf
        max_norm = self.max_grad_norm
        if max_norm is not None:
            self._refuse_partial_norm()
        plans = self._checked
        if plans is None:
            plans = self._prepare()
            if max_norm is not None:
                self._pass_over(plans, grad_scale, divide=True, write=False, clear=False)
        norm = self._norm if max_norm is not None else None
        for plan in plans:
            plan.update(
                _on(grad_scale, plan.device), _on(found_inf, plan.device), _on(norm, plan.device), max_norm or 0.0
            )
        return loss

    def _refuse_partial_norm(self) -> None:
        """Where this optimizer sees only a part of the gradients."""
        parts = {
            "DTensor parameters": any(isinstance(p, DTensor) for ps in self._params_by_group() for p in ps),
            "parameters of FSDP1": self._is_flattened(),
            "ZeroRedundancyOptimizer": _is_called_by(_ZERO),
        }
        for what, is_so in parts.items():
            if is_so:
                raise RuntimeError(
                    f"{type(self).__name__}: max_grad_norm must be None with {what}, since each rank would clip by the "
                    "norm of its part; call torch's clip_grad_norm_, or FSDP's, before the step"
                )

    def _pass_over(
        self, plans: Sequence[Plan], scale: Tensor | None, *, divide: bool, write: bool, clear: bool
    ) -> None:
        """The gradient pass on every device; see `Plan.check`."""
        self._log.checks += clear
        for plan in plans:
            plan.check(_on(scale, plan.device), divide=divide, write=write, clear=clear)
        norms = [plan.norm for plan in plans]
        self._norm = total_norm(norms) if len(norms) > 1 else next(iter(norms), None)

    # ------------------------------------------------------------------------------------------- what a scaler calls
    @torch.compiler.disable
    @torch.inference_mode(False)
    @torch.no_grad()
    def _check(self, scale: Tensor | None, *, divide: bool = True, write: bool = False) -> Verdict:
        """The gradient pass of an iteration. `divide`, `write`: as in `Plan.check`."""
        plans = self._prepare(writes=write)
        self._pass_over(plans, scale, divide=divide, write=write, clear=True)
        found_inf = self._agree([plan.found_inf for plan in plans])
        # Hooks may change gradients, but the verdict is on what the scaler was given, as in torch.
        is_hooked = self._optimizer_step_pre_hooks or _global_optimizer_pre_hooks
        return Verdict(None if write else scale, found_inf, None if write or is_hooked else plans)

    def _agree(self, flags: list[Tensor]) -> Tensor | None:
        """The verdict of all devices and of all ranks that hold shards of a parameter, also those without a gradient:
        they skip together, or weights part ways."""
        meshes = list(dict.fromkeys(mesh for plan in self._plans or () for mesh in plan.meshes))
        if not flags and meshes:
            flags = [torch.zeros((), dtype=torch.float32, device=meshes[0].device_type)]
        if not flags:
            return None
        found_inf = flags[0]
        if len(flags) > 1:
            found_inf = torch.stack([moved(flag, found_inf.device) for flag in flags]).sum()
        for mesh in meshes:
            for dim in range(mesh.ndim):
                torch.distributed.all_reduce(found_inf, torch.distributed.ReduceOp.MAX, group=mesh.get_group(dim))
        return found_inf

    @torch.compiler.disable  # dynamo of torch 2.11 cannot trace how the attributes are set
    def _step_under(self, verdict: Verdict, *args: Any, **kwargs: Any) -> Any:
        """`step`, in all that torch and schedulers wrapped around it."""
        self.grad_scale, self.found_inf, self._checked = verdict
        try:
            return self.step(*args, **kwargs)
        finally:
            del self.grad_scale, self.found_inf, self._checked

    # ------------------------------------------------------------------------------------------------------ plans
    def _prepare(self, *, writes: bool = False, of_all: bool = False) -> list[Plan]:
        """Lets the plans read the tensors of this step, and returns them.

        Args:
            writes: gradients will be written.
            of_all: return plans without any gradient too.
        """
        if type(torch.empty(0, device="cpu")) is not Tensor:
            raise RuntimeError(
                f"{type(self).__name__}.step: must run outside of a mode that makes fake tensors, which have no "
                "memory; use torch.optim there"
            )
        self._follow()
        if not self._refresh(writes):  # a parameter has moved to another device
            self._make_plans()
            if not self._refresh(writes):
                raise RuntimeError(f"{type(self).__name__}.step: parameters changed while the step was prepared")
        assert self._plans is not None
        hyper = [Hyper(self._family.hyper.of(group), group["lr"]) for group in self.param_groups]
        plans = [plan for plan in self._plans if of_all or plan.written]
        for plan in plans:
            plan.set_hyper(hyper)
        return plans

    def _refresh(self, writes: bool) -> bool:
        keys = tuple(self._state_names(group) for group in self.param_groups)
        if keys != self._plan_keys:
            self._drop_unset_states()
            self._plan_keys = keys
        return all(plan.refresh(keys, self._column, writes=writes) for plan in self._plans or ())

    def _drop_unset_states(self) -> None:
        """Deletes momentum buffers that no step has set, if the options no longer ask for momentum.

        The first step with momentum sets the buffer, and a kept buffer of zeros would count as set. Reading the count
        waits for the device; only parameters with such a buffer are read.
        """
        first = self._set_at_first_step
        for _, index, param in self._named_parameters():
            state = self.state.get(param)
            if first is None or not isinstance(state, dict) or first not in state or "step" not in state:
                continue
            if first not in self._state_names(self.param_groups[index]) and int(state["step"]) == 0:
                del state[first]

    def _follow(self) -> None:
        """Makes new plans if parameters or backends changed, and passes them changed entries of `state`."""
        lists = [params if isinstance(params, list) else list(params) for params in self._params_by_group()]
        same = sweep().same
        if self._plans is None or any(plan.backend != backends.select(plan.device) for plan in self._plans):
            self._make_plans()
        elif not same(lists, self._plan_params, self.state, *self._plan_state):
            if same(lists, self._plan_params, {}, [], []):
                self._take_states()
            else:
                self._make_plans()

    def _params_by_group(self) -> Iterator[list[Tensor]]:
        return (group["params"] for group in self.param_groups)

    def _make_plans(self) -> None:
        self._drop_plans()
        by_device: dict[torch.device, Members] = {}
        devices = (param.device for _, _, param in self._named_parameters() if not param.is_meta)
        first = next(devices, torch.device("cpu"))
        for name, index, param in self._named_parameters():
            # What has no memory is on no device that has kernels; a gradient for it is refused in any plan.
            device = first if param.is_meta else param.device
            members = by_device.setdefault(device, Members([], [], [], []))
            members.params.append(param)
            members.names.append(name)
            members.groups.append(index)
        self._plans = [self._make_plan(device, members) for device, members in by_device.items()]
        self._plan_params = [list(params) for params in self._params_by_group()]
        self._take_states()

    def _take_states(self) -> None:
        for plan in self._plans or ():
            states = (self.state.get(param) for param in plan.members.params)
            plan.members.states[:] = [state if isinstance(state, dict) else None for state in states]
        self._plan_state = list(self.state), list(self.state.values())

    def _make_plan(self, device: torch.device, members: Members) -> Plan:
        if device not in self._log.records:
            self._log.records[device] = torch.zeros(RECORD, dtype=torch.int64, device=device)
        self._log.names[device] = members.names
        record = self._log.records[device]
        backend = backends.select(device)
        ops = backends.kernels(backend)
        if ops is None:
            return ReferencePlan(self._family, device, members, record)
        return NativePlan(backend, ops, self._family, device, members, record)

    def _column(self, name: str, index: int, param: Tensor) -> Column | None:
        """The tensors of a parameter, in state that fits it; None if it has neither gradient nor a count of steps."""
        has_gradient = param.grad is not None
        if not has_gradient and "step" not in self.state.get(param, ()):
            return None
        group = self.param_groups[index]
        names = self._state_names(group)
        try:
            if not self._is_fitted(name, param, names):
                self._refuse_capture(param.device)
                self._fit_state(name, param, group)
        except (TypeError, ValueError, RuntimeError):
            if has_gradient:
                raise
            return None
        state, memory = self.state[param], local(param)
        states = tuple(None if n is None else local(state[n]) for n in names)
        remainder = local(state["remainder"]) if "remainder" in state else None
        return Column(memory, _dense(memory), remainder, state["step"], states)

    def _refuse_capture(self, device: torch.device) -> None:
        if capturing(device):
            raise RuntimeError(
                f"{type(self).__name__}: a capture must follow a step, or init_state(), since state and tables cannot "
                "be allocated inside it"
            )

    def _named_parameters(self) -> Iterator[tuple[str, int, Tensor]]:
        for g, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for i, param in enumerate(group["params"]):
                yield (names[i] if names else f"param_groups[{g}]['params'][{i}]"), g, param

    # ------------------------------------------------------------------------------------------------------ state
    @torch.compiler.disable
    @torch.inference_mode(False)
    @torch.no_grad()
    def init_state(self) -> None:
        """Allocate state and tables for every parameter that requires a gradient, as the first step would.

        Call it before capturing a CUDA graph whose first replay is the first step. Gradients are expected in their
        parameters' dtypes.

        Raises:
            TypeError: A parameter is not fp32, fp16 or bf16.
            RuntimeError: A CUDA graph is being captured.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
            >>> optimizer = amp_kernels.optim.FusedSGD([weight], lr=0.5, momentum=0.9)
            >>> optimizer.init_state()
            >>> sorted(optimizer.state[weight])
            ['momentum_buffer', 'remainder', 'step']
        """
        for name, index, param in self._named_parameters():
            if param.requires_grad:
                self._refuse_capture(param.device)
                self._fit_state(name, param, self.param_groups[index])
        for plan in self._prepare(of_all=True):
            plan.load()

    def reload_masters(self) -> None:
        """Do nothing: masters follow their weights without it. Kept for two releases, for loops that call it.

        Examples:
            >>> amp_kernels.optim.FusedSGD([torch.nn.Parameter(torch.ones(2))]).reload_masters()
        """

    def _is_fitted(self, name: str, param: Tensor, names: Sequence[str | None]) -> bool:
        """Whether `_fit_state` would change nothing."""
        self._check_parameter(name, param)
        state, is_fp32 = self.state.get(param), param.dtype is torch.float32
        if not isinstance(state, dict) or "master" in state or ("remainder" in state) == is_fp32:
            return False
        target, step = _dense(local(param)), state.get("step")
        if not (_is_count(step, target.device) and step is not None and step.ndim == 0):
            return False
        return all(
            isinstance(state.get(key), Tensor) and _is_laid_out(local(state[key]), target, _dtype_of(key))
            for key in (*names, None if is_fp32 else "remainder")
            if key is not None
        )

    def _fit_state(self, name: str, param: Tensor, group: dict[str, Any]) -> None:
        """Gives a parameter the state that its dtype and the options of its group ask for, keeping what it has."""
        self._check_parameter(name, param)
        state, target = self.state[param], _dense(local(param))
        names = [key for key in self._state_names(group) if key is not None]
        if param.dtype is not torch.float32:
            names.append("remainder")
        self._check_before_fitting(name, param, state, names)
        state["step"] = _as_count(state.get("step", 0), target.device)
        master = state.pop("master", None)  # of an earlier release, or of a state dict
        if param.dtype is torch.float32:
            state.pop("remainder", None)
        elif master is not None:
            state["remainder"] = _remainder(param, master)
        elif "remainder" in state and state["remainder"].shape != param.shape:
            del state["remainder"]  # a pruned parameter's: without it the master is the weight, half a unit away
        for key in names:
            if state.get(key) is None:
                state[key] = _zeros_like(param, _dtype_of(key))
                if key == self._set_at_first_step:
                    state["step"].zero_()
            elif not _is_laid_out(local(state[key]), target, _dtype_of(key)):  # model.to(): a device, a memory format
                state[key] = _zeros_like(param, _dtype_of(key)).copy_(state[key])

    def _check_before_fitting(self, name: str, param: Tensor, state: dict[str, Any], names: Sequence[str]) -> None:
        """Raises an error if `_fit_state` could not fit the state; nothing was modified."""
        target, step = _dense(local(param)), state.get("step", 0)
        if not _is_count(step, target.device):
            if not isinstance(step, Tensor) or step.device.type == "cpu":
                check_step(f"{type(self).__name__}: step of {name}", step)
            self._check_own(name, "step", step)
        for key in ("master", *names):
            value = state.get(key)
            if value is None or (key == "remainder" and value.shape != param.shape):
                continue
            self._check_state(name, key, param, value)
            if key != "master" and not _is_laid_out(local(value), target, _dtype_of(key)):
                self._check_own(name, key, value)

    def _check_own(self, name: str, key: str, state: Any) -> None:
        """Raises RuntimeError if a state that has to be replaced is in shared memory: other processes would keep the
        old one."""
        if isinstance(state, Tensor) and has_memory(state) and local(state).device.type == "cpu" and state.is_shared():
            raise RuntimeError(
                f"{type(self).__name__}: {key} of {name} must be as init_state() makes it, since it is in shared "
                f"memory and cannot be replaced, got {kind(state)}; call init_state() before share_memory_()"
            )

    def _load_master(self, name: str, param: Tensor, master: Tensor) -> None:
        """Into the state of a 16-bit parameter, which itself is `master`, rounded, or will be."""
        if param.dtype is not torch.float32:
            self._check_state(name, "master", param, master)
            self.state[param]["remainder"] = _remainder(param, master)

    def _master(self, name: str, param: Tensor, low: torch.dtype | None = None) -> Tensor:
        """The fp32 value of a parameter. `low`: the dtype that an fp32 one with a remainder was cast from, to have the
        master that it had then; without it an fp32 parameter is its own master."""
        master, state = _zeros_like(param), self.state.get(param, {})
        is_fp32 = param.dtype is torch.float32
        if (is_fp32 and low is None) or "remainder" not in state:
            return master.copy_(state.get("master", param))
        self._check_state(name, "remainder", param, state["remainder"])
        weight = local(param).to(low) if is_fp32 else local(param)
        local(master).copy_(join(weight, local(state["remainder"]).to(param.device)))
        if is_fp32:  # other elements were written after the cast
            local(master).copy_(torch.where(weight.float() == local(param), local(master), local(param)))
        return master

    def _remainder_of(self, param: Tensor) -> Tensor | None:
        """The memory of the remainder of a 16-bit parameter, on its device; None for others."""
        if param.dtype is torch.float32:
            return None
        remainder = self.state.get(param, {}).get("remainder")
        remainder = local(_zeros_like(param, torch.int16) if remainder is None else remainder)
        return remainder if remainder.device == param.device else remainder.to(param.device)

    def _check_state(self, name: str, key: str, param: Tensor, state: Tensor) -> None:
        is_number = state.dtype is torch.int16 if key == "remainder" else state.is_floating_point()
        if not (has_memory(state) and is_number and shares_memory([local(state)]) is None):
            what = "int16 numbers" if key == "remainder" else "floats"
            raise TypeError(
                f"{type(self).__name__}: {key} of {name} must be a tensor of {what} with memory for each, got "
                f"{kind(state)}; delete optimizer.state[parameter] to reset it"
            )
        if state.shape != param.shape:
            raise RuntimeError(
                f"{type(self).__name__}: {name} must keep its shape {tuple(state.shape)}, got {tuple(param.shape)}; "
                "delete optimizer.state[parameter] to reset it"
            )

    def _check_parameter(self, name: str, param: Tensor) -> None:
        if param.dtype not in DTYPE_CODES:
            raise TypeError(f"{type(self).__name__}: {name} must be float32, float16 or bfloat16, got {param.dtype}")
        is_partial = isinstance(param, DTensor) and any(placement.is_partial() for placement in param.placements)
        if not has_memory(param) or local(param).data_ptr() == 0 < local(param).numel() or is_partial:
            raise TypeError(
                f"{type(self).__name__}: {name} must be a Tensor or sharded or replicated DTensor with memory of its "
                f"own, got {kind(param)}; use torch.optim for it"
            )
        if param.is_inference():
            raise RuntimeError(
                f"{type(self).__name__}: {name} must not be an inference tensor, whose changes autograd cannot see; "
                "create it outside torch.inference_mode()"
            )

    def _drop_plans(self) -> None:
        # A graph may be replayed all the same, which must not write into freed memory.
        self._captured += tuple(plan for plan in self._plans or () if plan.is_captured)
        self._plans = None

    # ------------------------------------------------------------------------------------------------ checkpoints
    def state_dict(self) -> dict[str, Any]:
        """Return a state dict as torch's, with the fp32 masters of 16-bit parameters. Waits for the device.

        States are in fp32 and `step` is an fp32 CPU tensor, as in torch. If there are no 16-bit parameters, the
        matching torch optimizer loads the state dict too; it ignores the additional key "format".

        Returns:
            The state dict.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
            >>> optimizer = amp_kernels.optim.FusedSGD([weight], lr=0.5)
            >>> optimizer.init_state()
            >>> optimizer.state_dict()["state"][0]["master"]
            tensor([1., 1.])
        """
        handle = self.register_state_dict_post_hook(self._export, prepend=True)  # before the user's
        try:
            return super().state_dict()
        finally:
            handle.remove()

    @staticmethod
    @torch.no_grad()
    def _export(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """State as torch keeps it: `step` an fp32 tensor of the CPU, masters in fp32; before the first update no state
        but the master."""
        assert isinstance(optimizer, FusedOptimizer)
        state_dict["format"] = FusedOptimizer._format
        keys = (key for group in state_dict["param_groups"] for key in group["params"])
        params = {key: (name, p) for key, (name, _, p) in zip(keys, optimizer._named_parameters(), strict=True)}
        low = optimizer._dtypes_before_fp32()
        for key, state in state_dict["state"].items():
            if not isinstance(state, dict) or key not in params:
                continue
            ours: dict[str, Tensor | None] = {}
            if "remainder" in state:
                name, param = params[key]
                master = optimizer._master(name, param, low.get(param))
                is_needed = param.dtype is not torch.float32 or not torch.equal(local(master), local(param))
                ours = {"remainder": None, "master": master if is_needed else None}
            if "step" in state:
                step = _exported(state["step"])
                ours |= {"step": step} if step > 0 else dict.fromkeys({"step", *optimizer._family.states})
            state_dict["state"][key] = {k: v for k, v in {**state, **ours}.items() if k not in ours or v is not None}

    def _dtypes_before_fp32(self) -> dict[Tensor, torch.dtype]:
        """The 16-bit dtypes that fp32 parameters with a remainder had before a cast, as ``model.float()``.

        A remainder does not say its dtype, so the weights have to: a parameter was bf16 if at least half of its
        elements are bf16 numbers. Of random fp16 numbers one in eight is. With fewer than 16 elements other than 0, the
        other parameters decide.
        """
        params = [
            p
            for _, _, p in self._named_parameters()
            if p.dtype is torch.float32 and "remainder" in self.state.get(p, ())
        ]
        are_bf16 = {p: _is_mostly(local(p), torch.bfloat16) for p in params}
        usual = torch.bfloat16 if all(are_bf16.values()) else torch.float16
        return {
            p: (torch.bfloat16 if int(local(p).count_nonzero()) >= 16 else usual) if is_bf16 else torch.float16
            for p, is_bf16 in are_bf16.items()
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of the matching torch optimizer.

        Masters and states stay fp32 whatever the dtype of the parameters. Whatever a torch state dict lacks starts from
        its default. A state dict of fp32 parameters has no masters: the present ones stay. If the weights were saved in
        the other 16-bit dtype, a master is within a unit in the last place of the weight. To keep all its bits, use
        `load_fp32_state_dict`.

        Args:
            state_dict: What `state_dict()` returned.

        Raises:
            ValueError: The state dict belongs to another optimizer or to a later release; a state has another shape
                than its parameter or is not a floating-point tensor; a state, a master or a step is missing or invalid.
                Nothing was modified.

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
        saved: dict[int, dict[str, Any]] = {}

        def set_aside(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            if reason := why_not_loaded(type(self).__name__, loaded.get("format"), self._format):
                raise ValueError(reason)
            for group in loaded["param_groups"]:
                self._check_family(group)
            rest = dict(loaded["state"])
            keys = ((key, group) for group in loaded["param_groups"] for key in group["params"])
            named = self._named_parameters()
            for position, ((key, group), (name, _index, param)) in enumerate(zip(keys, named, strict=False)):
                entry = rest.get(key)
                if isinstance(entry, dict):
                    saved[position] = {k: v for k, v in entry.items() if k in self._keys}
                    rest[key] = {k: v for k, v in entry.items() if k not in self._keys}
                    self._check_entry(f"{type(self).__name__}.load_state_dict: {{}} of {name}", param, group, entry)
            return {**loaded, "state": {key: entry for key, entry in rest.items() if entry != {}}}

        handle = self.register_load_state_dict_pre_hook(set_aside)  # the last to run
        self._saved_state = saved
        before = dict(self.__dict__)
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            self.__dict__.update(before)  # whose state and groups are still what they were
            raise
        finally:
            handle.remove()
            del self._saved_state
        self._warn_of_lost_bits(saved)

    @property
    def _keys(self) -> set[str]:
        """The keys of a parameter's state that belong to the optimizer; all other keys are passed through."""
        return {"step", "master", "remainder", *self._family.states}

    def _check_family(self, group: dict[str, Any]) -> None:
        others = [family.name for family in FAMILIES.values() if family.option in group]
        if others and self._family.name not in others:
            raise ValueError(
                f"{type(self).__name__}.load_state_dict: the state dict must be one of {self._family.name}, got one of "
                f"{others[0]} (its groups have {FAMILIES[others[0]].option!r}); load it into that optimizer"
            )

    def _check_entry(self, what: str, param: Tensor, group: dict[str, Any], entry: dict[str, Any]) -> None:
        """Raises ValueError if a saved state cannot be loaded. `what` begins the message, with a place for the key."""
        if "remainder" in entry and entry.get("master") is None:
            # torch fills a flattened state dict by the names in `optimizer.state`, and so drops the masters.
            raise ValueError(
                f"{what.format('the fp32 master')} must be in the state dict, got a remainder in its place, as "
                "torch.distributed.checkpoint makes it with flatten_optimizer_state_dict=True; get, load and set state "
                "dicts without that option"
            )
        for key in ("master", *self._family.states):
            value = entry.get(key)
            if value is None:
                continue
            if not (isinstance(value, Tensor) and has_memory(value) and value.is_floating_point()):
                raise ValueError(f"{what.format(key)} must be a tensor of floats with memory, got {kind(value)}")
            if value.shape != param.shape:
                raise ValueError(f"{what.format(key)} must have shape {tuple(param.shape)}, got {tuple(value.shape)}")
        steps = check_step(what.format("step"), entry["step"]) if "step" in entry else None
        needed = {key for key in self._state_names({**self.defaults, **group}) if key is not None}
        needed -= {self._set_at_first_step}  # torch.optim.SGD counts no steps, and may have no buffer yet
        if self._set_at_first_step is None and steps is None and any(entry.get(key) is not None for key in needed):
            raise ValueError(f"{what.format('step')} must be in the state dict with the other states; it has none")
        missing = sorted(key for key in needed if entry.get(key) is None)
        if steps and missing:
            raise ValueError(
                f"{what.format(missing[0])} must be in the state dict after the first of {steps} steps; it has none"
            )

    def _warn_of_lost_bits(self, saved: dict[int, dict[str, Any]]) -> None:
        lacking = [
            name
            for position, (name, _, param) in enumerate(self._named_parameters())
            if _lacks_bits(param, saved.get(position, {}).get("master"))
        ]
        if lacking:
            warnings.warn(
                f"{type(self).__name__}.load_state_dict: {len(lacking)} fp32 parameters ({lacking[0]} is the first) "
                "hold 16-bit weights, whose fp32 masters in this checkpoint have more bits; to keep them save weights "
                "with amp_kernels.optim.fp32_state_dict(model, optimizer) and load them with load_fp32_state_dict",
                stacklevel=4,
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._captured += tuple(plan for plan in self._plans or () if plan.is_captured)
        before = self.__dict__.get("state", {})
        # torch expects a step in every entry that is not empty.
        entries = state.get("state", {})
        stepless = {p: entry for p, entry in entries.items() if isinstance(entry, dict) and "step" not in entry}
        rest = defaultdict(dict, {p: entry for p, entry in entries.items() if p not in stepless})
        super().__setstate__({**state, "state": rest})
        self.state.update(stepless)
        self._plans = None
        self._last_found_inf = None  # of a step before what is loaded
        self.__dict__.setdefault("_log", OverflowLog())
        self.__dict__.setdefault("_norm", None)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        saved = self.__dict__.get("_saved_state", {})
        # That of fp32 parameters has no masters: what load_fp32_state_dict loaded stays.
        keeps_masters = not any("master" in entry for entry in saved.values())
        for position, (name, index, param) in enumerate(self._named_parameters() if saved else ()):
            if keeps_masters and "remainder" in before.get(param, {}):
                self.state[param]["remainder"] = before[param]["remainder"]
            if position in saved:
                self._load_parameter_state(name, param, self.param_groups[index], saved[position])

    def _load_parameter_state(self, name: str, param: Tensor, group: dict[str, Any], saved: dict[str, Any]) -> None:
        if saved.get("master") is not None:
            self._load_master(name, param, saved["master"])
        if not param.requires_grad and saved.keys() <= {"master"}:
            return
        self._fit_state(name, param, group)
        state = self.state[param]
        for key in self._family.states:
            if saved.get(key) is not None:
                if key not in state:  # the options do without it now, but may ask for it again
                    state[key] = _zeros_like(param)
                state[key].copy_(saved[key])
        # torch.optim.SGD counts no steps: a momentum buffer says that there was one.
        step = saved.get("step", 0 if saved.get("momentum_buffer") is None else 1)
        state["step"].fill_(int(step))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch.

        Args:
            param_group: A dict with "params" and any of the optimizer's options.

        Raises:
            TypeError: `max_grad_norm` is not a number, or torch refuses the group.
            ValueError: `max_grad_norm` is not positive, or torch refuses the group.

        Examples:
            >>> optimizer = amp_kernels.optim.FusedSGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
            >>> optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "lr": 0.25})
            >>> [group["lr"] for group in optimizer.param_groups]
            [0.5, 0.25]
        """
        if isinstance(param_group, dict):  # torch has words for others
            check_max_grad_norm(type(self).__name__, param_group.get("max_grad_norm"))
        name, is_group = type(self).__name__, isinstance(param_group, dict)
        if is_group and "params" in param_group:
            _check_params(name, param_group["params"])
            _check_options(name, param_group)
        with _restored([param_group] if is_group else []):
            super().add_param_group(param_group)


def _check_params(name: str, params: Any) -> None:
    if isinstance(params, torch.nn.Module):
        got = f"the module {type(params).__name__}; pass model.parameters()"
    elif isinstance(params, Mapping):
        got = f"one {type(params).__name__}; pass model.parameters(), or a list of groups [{{'params': ...}}]"
    elif isinstance(params, Iterable):  # a Tensor too, for which torch has words
        return
    else:
        got = f"{params!r}; pass model.parameters()"
    raise TypeError(f"{name}: params must be an iterable of parameters or of parameter groups, got {got}")


# Options that torch compares with numbers before it looks at their types.
_NUMBERS = ("lr", "momentum", "dampening", "weight_decay", "alpha", "eps")


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    """Of the constructor or of a parameter group; torch checks the ranges."""
    for key in _NUMBERS:
        value = options.get(key, 0)
        if not isinstance(value, (numbers.Real, Tensor)):
            raise TypeError(f"{name}: {key} must be a number or a Tensor of one element, got {value!r}")
    betas: Any = options.get("betas", (0, 0))
    is_pair = isinstance(betas, Sequence) and len(betas) == 2
    if not (is_pair and all(isinstance(beta, (numbers.Real, Tensor)) for beta in betas)):
        raise TypeError(f"{name}: betas must be two numbers, as (0.9, 0.999), got {betas!r}")


def check_max_grad_norm(name: str, value: Any) -> float | None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if value is not None and not (is_number and value > 0):
        error = ValueError if is_number else TypeError
        raise error(f"{name}: max_grad_norm must be a positive number or None, got {value!r}")
    return value


def check_step(what: str, value: Any) -> int:
    """The number of steps that were taken; waits for the device of a tensor."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 and has_memory(value) else value
    is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
    if not (is_number and math.isfinite(number) and number == int(number) and 0 <= number < 2**31 - 1):
        got = kind(value) if isinstance(value, Tensor) and value.numel() != 1 else repr(number)
        raise ValueError(f"{what} must be a whole number from 0 to 2^31 - 2, got {got}")
    return int(number)


@contextlib.contextmanager
def _restored(groups: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Restores the caller's parameter groups after an error: torch writes its defaults into them."""
    before = [(group, dict(group)) for group in groups]
    try:
        yield
    except BaseException:
        for group, items in before:
            group.clear()
            group.update(items)
        raise


_OUR_STEP = inspect.unwrap(FusedOptimizer.__dict__["step"])


def _is_ours(step: Any) -> bool:
    """Whether `step` is `FusedOptimizer.step` in torch's wrappers alone: hooks, profiler, learning rate schedulers.

    The globals of a wrapper's code tell whose it is; `functools.wraps` copies everything else.
    """
    step = getattr(step, "__func__", step)
    while step is not _OUR_STEP and getattr(step, "__globals__", {}).get("__name__", "").startswith("torch."):
        step = getattr(step, "__wrapped__", None)
    return step is _OUR_STEP


def _is_called_by(module: str) -> bool:
    """Whether a function of `module` waits for this one to return."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _lacks_bits(param: Tensor, master: Tensor | None) -> bool:
    """Whether an fp32 parameter is what its master was rounded to. Waits for the device."""
    if param.dtype is not torch.float32 or master is None:
        return False
    plain, fp32 = local(param), local(_zeros_like(param).copy_(master))
    low = (torch.float16, torch.bfloat16)
    return not torch.equal(plain, fp32) and any(torch.equal(plain, fp32.to(dtype).float()) for dtype in low)


def _is_count(step: Any, device: torch.device) -> bool:
    """Whether kernels can count there."""
    if not isinstance(step, Tensor) or step.dtype is not torch.int32 or step.numel() != 1 or not has_memory(step):
        return False
    return step.device == device and not isinstance(step, DTensor) and not step.is_inference()


def _as_count(step: Any, device: torch.device) -> Tensor:
    if _is_count(step, device):
        return step.view(())
    if isinstance(step, Tensor) and step.device.type != "cpu":
        return step.detach().to(device, torch.int32).view(())
    return torch.full((), int(step), dtype=torch.int32, device=device)


def _exported(step: Any) -> Tensor:
    """As torch keeps it."""
    is_count = isinstance(step, Tensor) and step.dtype is torch.int32
    return (unsigned(step) if is_count else torch.as_tensor(step)).to("cpu", torch.float32).view(())


def _is_mostly(plain: Tensor, dtype: torch.dtype) -> bool:
    """Whether more than half of the elements that are not 0 are numbers of `dtype`."""
    numbers = plain[plain != 0]
    return 2 * int((numbers.to(dtype).float() == numbers).sum()) >= numbers.numel()


def _dtype_of(key: str) -> torch.dtype:
    return torch.int16 if key == "remainder" else torch.float32


def _zeros_like(param: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros_like(param, dtype=dtype, requires_grad=False)


def _remainder(param: Tensor, master: Tensor) -> Tensor:
    fp32 = _zeros_like(param).copy_(master)
    remainder = _zeros_like(param, torch.int16)
    local(remainder).copy_(split(local(fp32), param.dtype)[1])
    return remainder


def _dense(plain: Tensor) -> Tensor:
    """What kernels can walk: `plain`, or where it has gaps or is a negated view a mirror of it, not filled."""
    return plain if is_dense(plain) and not plain.is_neg() else torch.empty_like(plain)


def _is_laid_out(state: Tensor, target: Tensor, dtype: torch.dtype) -> bool:
    is_usable = state.dtype is dtype and has_memory(state) and is_held(state) and not state.is_inference()
    is_alike = state.device == target.device and state.shape == target.shape
    return is_usable and is_alike and same_layout(state, target)


def _scalar(optimizer: FusedOptimizer, name: str) -> Tensor | None:
    """What a scaler set: an fp32 tensor, or nothing; torch's sets the int 0 when there was no gradient."""
    value = getattr(optimizer, name, None)
    if not isinstance(value, Tensor):
        return None
    return value if value.dtype is torch.float32 and value.ndim == 0 else value.float().view(())


def _on(scalar: Tensor | None, device: torch.device) -> Tensor | None:
    return None if scalar is None else moved(scalar, device)
