"""Base class of the fused optimizers: the step, and the methods that a scaler calls.

`FusedOptimizer` inherits state dicts from `WithCheckpoints` (`_checkpoints.py`), which inherits states and masters from
`WithState` (`_state.py`). A step uses one plan for each device. `_plan.py` explains the terms plan, table, layout and
form. The *gradient pass* (`Plan.check`) computes the norm of the gradients, and looks for NaN and inf. It runs only
under `amp_kernels.GradScaler` or for clipping. The update (`Plan.update`) writes the parameters.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT, _global_optimizer_pre_hooks

from .. import _shards, backends, torch_private
from .._shards import Shards
from ..functional.unscale import grad_norm, to_device, total_norm
from ..ops.table import DTYPE_CODES, RECORD
from ._checkpoints import WithCheckpoints
from ._plan import Column, Hyper, Keys, Members, NativePlan, Plan, Warm, capturing
from ._reference_plan import ReferencePlan
from ._state import check_max_grad_norm, check_options, check_params, check_state_dtype, restored, storages
from ._sweep import CHANGED, CLEAR, KEEP, PASS, READ, TAKEN, UPDATE, WRITE, sweep
from ._tensors import check_parameter, dense, local
from ._wrappers import caller, holder_of_more, is_in_wrappers_of_torch, wrapped

# ZeroRedundancyOptimizer, and the scaler that reads an attribute, can be found only on the call stack (`caller`).
_ZERO, _SCALER = "torch.distributed.optim.zero_redundancy_optimizer", "torch.amp.grad_scaler"
# Two constants that `Verdict.plans` may be. `_READ_BY_CPP`: C++ has read the tensors. `_ADDED_UP`: the step reads the
# tensors again, but ranks have added up their squares already, and must not do so twice.
_READ_BY_CPP: tuple[Plan, ...] = ()
_ADDED_UP: list[Plan] = []
_FIXED = (float, int, str, torch.dtype, type(None))  # types of options whose values cannot change in place
_NEAR = 40  # calls from the step of a scaler to that of an optimizer inside a holder, of which hooks make several each


class _Noted(dict[str, Any]):
    """A copy of a dict that notes which entries are read."""

    def __init__(self, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        self.read: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        value = self.read[key] = super().__getitem__(key)
        return value


@dataclass(eq=False)
class OverflowLog:
    """For each device, the last gradient pass under a scaler in which an optimizer's gradients held NaN or inf."""

    records: dict[torch.device, Tensor] = field(default_factory=dict)  # the `Record` of csrc/table.h
    names: dict[torch.device, list[str]] = field(default_factory=dict)  # the names of the device's parameters
    checks: int = 0  # gradient passes under a scaler; replays of a CUDA graph are not counted

    def overflows(self) -> Iterator[tuple[int, str]]:
        """Yields number and first parameter of the last pass with NaN or inf on each device. Waits for the device."""
        for device, record in self.records.items():
            _, _, number, member = record.tolist()
            if number > 0:
                names = self.names[device]
                gone = "a parameter of another rank, or one that was removed"
                yield number, names[member] if member < len(names) else gone


class Verdict(NamedTuple):
    """The result of a gradient pass under a scaler, for the step that follows.

    plans: The plans that the pass has refreshed. The step uses them without reading the tensors again, which saves
        20 us. `_READ_BY_CPP` if C++ has read the tensors. After `unscale_`, None. If there are step hooks, which may
        change gradients, None, or with shards `_ADDED_UP`.
    """

    grad_scale: Tensor | None  # the update divides gradients by it; None if they are already unscaled
    found_inf: Tensor | None  # not 0 if a device or rank found NaN or inf; None if there was no gradient
    plans: Sequence[Plan] | None = None


class FusedOptimizer(WithCheckpoints):
    """Base class of the fused optimizers. The docstring of `FusedSGD` describes it for users."""

    _plans: list[Plan] | None = None
    _warm: Warm | None = None  # the call of C++ that takes the next step; None if Python has to take it
    _steps_in_python = 0  # since the last one in C++
    # The parameters, and the keys and values of `state`, for which the plans were made. Each step compares them with
    # the objects in `param_groups` and `state`.
    _plan_params: list[list[Tensor]]
    _plan_state: tuple[list[Any], list[Any]]
    _plan_keys: tuple[tuple[str | None, ...], ...] | None = None  # for each group, the names of its states
    _norm_group: dist.ProcessGroup | None
    _is_whole = False  # whether `norm_group` was a group of this rank alone
    _shards: Shards | None = None  # made with the plans; None if each rank has all gradients
    _ids: Tensor | None = None  # of the parameters; see `Shards.ids_of`
    _whole: list[Plan] | None = None  # the last plans for which it was found that their norm is the global one
    _captured: tuple[Plan, ...] = ()  # dropped plans whose memory CUDA graphs still use
    # The next three attributes are the verdict of a scaler on the current step. torch's scaler sets `grad_scale` and
    # `found_inf`. `_step_under` sets all three.
    grad_scale: Tensor | None
    found_inf: Tensor | None
    _checked_plans: Sequence[Plan] | None = None
    # For `PrecisionReport` (precision.py): the report that samples this step, the report that samples some steps, and
    # how many other steps come before its next one.
    _observer: Any = None
    _sampler: Any = None
    _steps_to_sample = 0
    # What is known about the last step, as `_verdict` reads it. `_steps` counts the calls of `step`, and the steps that
    # a scaler skipped without a call.
    _steps = 0
    _last_found_inf: Tensor | None = None  # not 0 if a scaler skipped the step; None if no scaler looked at it
    # If a scaler decided on the host that this step is taken: weak references to one of the gradients that the step
    # took and to the object whose step the scaler called, and the version of the gradient.
    _last_taken: tuple[Callable[[], Any], int, Callable[[], Any]] | None = None

    def __init__(
        self,
        params: ParamsT,
        *,
        max_grad_norm: float | None,
        state_dtype: torch.dtype | str,
        norm_group: dist.ProcessGroup | None,
        foreach: bool | None,
        fused: bool | None,
        differentiable: bool,
        **options: Any,
    ) -> None:
        name = type(self).__name__
        if differentiable:
            torchs = [c.__name__ for c in type(self).__mro__ if c.__module__.startswith("torch.optim.")]
            remedy = f"; use torch.optim.{torchs[0]} for that" if torchs[0] != "Optimizer" else ""
            raise ValueError(f"{name}: differentiable must be False, got True{remedy}")
        dtype = check_state_dtype(name, state_dtype)
        check_params(name, params)
        check_options(name, {**options, "max_grad_norm": max_grad_norm})
        if norm_group is not None:
            _shards.check_group(name, "norm_group", norm_group)
        if foreach and fused:
            raise RuntimeError(f"{name}: foreach and fused must not both be True; leave both out, they have no effect")
        given: Any = params if isinstance(params, Tensor) else list(params)  # for a Tensor torch raises an error
        with restored(group for group in given if isinstance(group, dict)):
            super().__init__(given, foreach=False, **options)  # type: ignore[call-arg]
        self._setup(max_grad_norm=max_grad_norm, state_dtype=dtype, foreach=foreach, fused=fused)
        self._is_whole = norm_group is not None and dist.get_world_size(norm_group) == 1
        self._norm_group = None if self._is_whole else norm_group

    def _setup(
        self, *, max_grad_norm: float | None, state_dtype: torch.dtype, foreach: bool | None, fused: bool | None
    ) -> None:
        """Adds the options and attributes of a fused optimizer to those that torch's constructor has set."""
        for group in (self.defaults, *self.param_groups):
            group["foreach"], group["fused"] = foreach, fused
            group.setdefault("max_grad_norm", max_grad_norm)
            group.setdefault("state_dtype", state_dtype)
        self._norm: Tensor | None = None
        self._norm_group = None
        self._log = OverflowLog()
        self._note_given()

    # ---------------------------------------------------------------------------------------------- public properties
    @property
    def max_grad_norm(self) -> float | None:
        """The norm that gradients are clipped to inside the step, or None. Setting it sets every group's option."""
        groups = self.param_groups
        if len(groups) == 1 and groups[0]["max_grad_norm"] is None:  # saves 0.2 us in every step
            return None
        norms = [group["max_grad_norm"] for group in groups] or [self.defaults["max_grad_norm"]]
        if norms.count(norms[0]) < len(norms):
            raise ValueError(
                f"{type(self).__name__}: max_grad_norm must be the same in all parameter groups, since it bounds the "
                f"norm over all of them, got {list(dict.fromkeys(norms))}; set it in all groups by "
                "optimizer.max_grad_norm = value"
            )
        return check_max_grad_norm(type(self).__name__, norms[0])

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        check_max_grad_norm(type(self).__name__, value)
        for group in (self.defaults, *self.param_groups):
            group["max_grad_norm"] = value

    @property
    def grad_norm(self) -> Tensor | None:
        """The gradient norm before clipping, as last measured by a step or a scaler. None if it was not measured yet.

        It is a copy: 0-dim, fp32, on the device of the parameters. For DTensors, and with `norm_group`, it is the norm
        over all ranks. Raises RuntimeError if ranks cannot add up all gradients, for example as stages of a pipeline.
        """
        if self._norm is not None and self._shards is not None:
            self._shards.check(f"{type(self).__name__}.grad_norm")
        return None if self._norm is None else self._norm.clone()

    @property
    def step_was_skipped(self) -> Tensor:
        """Whether a scaler skipped the last step: a 0-dim bool tensor, on the device of the scaler's verdict.

        Making it does not wait for the device, but ``if optimizer.step_was_skipped`` waits for a GPU. Read it before
        the next step, and under `torch.amp.GradScaler` before `zero_grad` if other code overrides or wraps the step, or
        holds the optimizer. The guide to loss scaling says why, and which skips are not seen.
        """
        found_inf = self._verdict()
        return torch.tensor(False, device="cpu") if found_inf is None else found_inf != 0

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a scaler may set ``grad_scale`` and ``found_inf`` instead of unscaling and waiting for the device.

        False for torch's scaler if it steps another object that forwards this attribute. It would set ``grad_scale``
        and ``found_inf`` on that object, where this optimizer does not read them.
        """
        scaler = caller(_SCALER)
        if self._norm_group is not None and scaler is not None:
            # Ranks always agree under amp_kernels.GradScaler. Under ShardedGradScaler they do with FSDP1.
            kind = type(scaler.f_locals["self"])
            agrees = hasattr(kind, "_agree_over_groups")
            if not agrees and (kind is torch.amp.GradScaler or self._takes_verdicts()):
                raise RuntimeError(
                    f"{type(self).__name__}: norm_group must be None under a {kind.__name__} of torch, whose ranks do "
                    "not agree on a skip here; use amp_kernels.GradScaler"
                )
        return self._takes_verdicts() and (scaler is None or scaler.f_locals.get("optimizer") is self)

    def _takes_verdicts(self) -> bool:
        # Code outside of torch that overrides or wraps the step may read the gradients, and expects them unscaled.
        # Ranks of FSDP1 have to skip the same steps. torch's ShardedGradScaler combines their `found_inf`, but only
        # while it unscales gradients.
        return is_in_wrappers_of_torch(self.step, _OUR_STEP) and not self._is_flattened()

    def _is_flattened(self) -> bool:
        # FSDP1 needs a process group. If there is none, a step need not look at every parameter (perhaps a thousand).
        params = (p for group in self.param_groups for p in group["params"])
        return _shards.has_ranks() and any(map(torch_private.is_flattened_by_fsdp1, params))

    # ------------------------------------------------------------------------------------------------------- step
    @torch.compiler.disable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. If a scaler found NaN or inf, nothing changes. Does not wait for the device.

        Args:
            closure: A function that evaluates the model again and returns the loss. Under a scaler a closure is an
                error, as in torch.

        Returns:
            What `closure` returned, or None.

        Raises:
            TypeError: A parameter or gradient is not fp32, fp16 or bf16. Or it has no memory of its own, for example
                because it is a wrapper subclass, a fake or a meta tensor.
            RuntimeError: A gradient is sparse, or differs from its parameter in shape, device or mesh. Or two tensors
                that the step writes share memory. Or `max_grad_norm` is set, this rank has only a part of the
                gradients, and it is not known which ranks have the other parts (see the guide to trainers). Or the step
                is captured in a CUDA graph before there is state, or with DTensors.

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
            with torch.inference_mode(False), torch.enable_grad():
                loss = closure()
        grad_scale = found_inf = None
        if "found_inf" in self.__dict__:
            grad_scale, found_inf = _scalar(self, "grad_scale"), _scalar(self, "found_inf")
        max_norm, checked = self.max_grad_norm, self._checked_plans
        if max_norm is not None:
            if self._whole is not self._plans:
                self._warm = None  # `_prepare` has to find out whether the norm is the global one
            elif self._shards is not None and checked is None:
                checked = self._measure_norm(grad_scale)
        work = UPDATE if checked is _READ_BY_CPP else READ | UPDATE
        if max_norm is not None and checked is None:
            work |= PASS
        plan = self._run_warm(work, grad_scale, found_inf, max_norm)  # the step in one call of C++ (csrc/ops/step.h)
        if plan is None:
            self._step_in_python(checked, grad_scale, found_inf, max_norm)
            return loss
        if work & PASS:
            self._norm = plan.norm
        self._note_step(found_inf, plan.members.params)
        if self._steps_to_sample > 0:
            self._count_down()
        return loss

    def _measure_norm(self, grad_scale: Tensor | None) -> tuple[Plan, ...] | None:
        """Has C++ run the gradient pass before ranks add up. If C++ cannot, returns None."""
        plan = self._run_warm(READ | PASS | KEEP, grad_scale)
        if plan is None:
            return None
        self._combine([plan])
        return _READ_BY_CPP

    def _run_warm(
        self, work: int, grad_scale: Tensor | None, found_inf: Tensor | None = None, max_norm: float | None = None
    ) -> Plan | None:
        """Has C++ do `work`. Returns None if it did nothing, because something is not as in the step before."""
        warm = self._warm
        if warm is None or self._observer is not None or (warm.is_gpu and torch.cuda.is_current_stream_capturing()):
            return None
        if work & WRITE and warm.modes() == 0:  # in a mode that makes fake tensors nothing can be copied, or done
            self._copy_verdict()
        answer = warm.step(self, grad_scale, found_inf, max_norm, work)
        if answer == CHANGED and self._read_options_again(warm):
            answer = warm.step(self, grad_scale, found_inf, max_norm, work)
        if answer != TAKEN:
            return None
        self._steps_in_python = 0
        return warm.plan

    def _read_options_again(self, warm: Warm) -> bool:
        """Writes the hyper-parameters of options that have changed. Returns False if C++ cannot use them.

        A schedule of momentum changes its option in every step.
        """
        self._warm = None  # after an error below, C++ would take the old options for those that were written
        options = self._options()
        if options is None or self._storages() != warm.plan.given_storages:
            return False
        warm.plan.set_hyper(self._hyper())
        warm.options[:] = options
        self._warm = warm
        return True

    def _options(self) -> list[Any] | None:
        """For each group, name and value of the options that hyper-parameters and states depend on.

        None if a value may change in place, as a tensor may. C++ would not notice that.
        """
        every = []
        for group in self.param_groups:
            options = _Noted(group)
            self._family.hyper_of(options)
            storages(self._family.name, self._state_names(options), options["state_dtype"])
            values = [v for value in options.read.values() for v in (value if isinstance(value, tuple) else (value,))]
            if not all(isinstance(value, _FIXED) for value in values):
                return None
            every.append(tuple(chain.from_iterable(options.read.items())))
        return every

    def _make_warm(self, plan: Plan) -> None:
        """Makes the call of C++ for the next steps, after a step in Python that found nothing unusual."""
        # If C++ has left several steps in a row to Python, it will probably leave the next one too. Making the
        # call takes 10 us, so it is then made in every 16th step only.
        self._steps_in_python += 1
        if isinstance(plan, NativePlan) and (self._steps_in_python < 4 or self._steps_in_python % 16 == 0):
            options = self._options()
            if options is not None:
                self._warm = plan.warm(self._plan_params, self._plan_state, options)

    @torch.inference_mode(False)  # state made in inference mode could not be written outside of it
    @torch.no_grad()
    def _step_in_python(
        self,
        checked: Sequence[Plan] | None,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        max_norm: float | None,
    ) -> None:
        with self._forgetting():
            plans = checked or self._prepare()
            if checked is None and max_norm is not None:
                self._run_gradient_pass(plans, grad_scale, write=False, clear=False)
                self._combine(plans)
            self._note_step(found_inf, plans[0].written if plans else ())
            norm = self._norm if max_norm is not None else None
            observer = self._observer
            if observer is not None:
                observer._observe(plans, grad_scale)
            for plan in plans:
                plan.update(
                    _on(grad_scale, plan.device), _on(found_inf, plan.device), _on(norm, plan.device), max_norm or 0.0
                )
            if observer is not None:
                observer._end_step()
            else:
                self._count_down()
        if plans and len(self._plans or ()) == 1:
            self._make_warm(plans[0])

    @contextlib.contextmanager
    def _forgetting(self, keeps: bool = False) -> Iterator[None]:
        """Lets the plans forget the tensors that the ``with`` block reads. `keeps`: only after an error."""
        try:
            yield
        except BaseException:
            keeps = False
            raise
        finally:
            for plan in () if keeps else self._plans or ():
                plan.forget()

    def _count_down(self) -> None:
        """Counts a step that is not sampled. If the next one is to be sampled, lets the report prepare for it."""
        if self._steps_to_sample > 0:
            self._steps_to_sample -= 1
            if self._steps_to_sample == 0 and self._sampler is not None:
                self._sampler._start()

    @torch.no_grad()
    def _skip(self, found_inf: Tensor) -> None:
        """Notes that a scaler skips this step on the host, without a call of `step`. `found_inf` is not 0."""
        self._note_step(found_inf)
        if self._observer is not None:
            with self._forgetting():
                self._observer._observe(self._prepare(), None)
            self._observer._end_step()

    def _note_step(self, found_inf: Tensor | None, params: Sequence[Tensor] = ()) -> None:
        """Notes the verdict on this step. If a scaler decided on the host, notes the first gradient of `params`."""
        self._steps += 1
        self._last_found_inf, self._last_taken = found_inf, None
        scaler = caller(_SCALER, _NEAR) if found_inf is None and params else None
        if scaler is not None and scaler.f_locals["self"].is_enabled():
            gradient = next(p.grad for p in params if p.grad is not None)
            self._last_taken = ref(gradient), _version_of(gradient), _weak(scaler.f_locals.get("optimizer"))

    def _verdict(self, holder: Any = None) -> Tensor | None:
        """Returns a flag that is not 0 if a scaler skipped the last step, or None if no scaler looked at it.

        `holder`: the object that the scaler steps, if the caller knows it.
        """
        inner = wrapped(self) if self._steps == 0 else self
        if inner is not self:  # `self` is a wrapper whose class was derived from that of the optimizer
            return inner._verdict(holder) if isinstance(inner, FusedOptimizer) else None
        return self._last_found_inf if self._last_found_inf is not None else self._found_in_new_gradients(holder)

    @torch.compiler.disable
    @torch.no_grad()
    def _found_in_new_gradients(self, holder: Any) -> Tensor | None:
        """Returns a flag that is not 0 if a gradient holds NaN or inf, so that torch's scaler skipped the step.

        None if there is no gradient, if no scaler decides on the host, or if the gradient that the last step noted was
        not written since. Also None if this rank has only shards of the gradients, because the ranks would disagree.
        """
        # Before the first step it is not known whether a scaler decides on the host, except if one of `amp_kernels`
        # has checked gradients for this optimizer.
        if self._last_taken is None and (self._steps > 0 or self._log.checks > 0):
            return None
        last, version, stepped = self._last_taken or (_nothing, 0, _nothing)
        if (stepper := stepped()) is not None:
            holder = stepper
        groups = (self if holder is None else holder).param_groups
        by_device: dict[torch.device, list[Tensor]] = {}
        for param in (p for group in groups for p in group["params"]):
            gradient = param.grad
            if isinstance(param, DTensor) or torch_private.is_flattened_by_fsdp1(param):
                return None
            if gradient is None:
                continue
            if gradient is last() and _version_of(gradient) == version:
                return None
            if gradient.dtype in DTYPE_CODES and gradient.layout is torch.strided:  # others are of other optimizers
                by_device.setdefault(gradient.device, []).append(gradient)
        flags = [torch.zeros((), dtype=torch.float32, device=device) for device in by_device]
        for flag, gradients in zip(flags, by_device.values(), strict=True):
            grad_norm(gradients, found_inf=flag)
        return any_of(flags)

    def _refuse_partial_norm(self) -> None:
        """Raises RuntimeError if this rank has a part of the gradients, and does not know which ranks have the rest."""
        if self._shards is not None:
            self._shards.check(f"{type(self).__name__} with max_grad_norm")
        elif self._norm_group is None and not self._is_whole and _shards.has_ranks() and dist.get_world_size() > 1:
            what = ""
            if self._is_flattened():
                what = "parameters of FSDP1"
            elif caller(_ZERO) is not None:
                what = "a ZeroRedundancyOptimizer"
            elif (holder := holder_of_more(self)) is not None:
                what = f"a {type(holder).__name__}, which has more parameters than this optimizer,"
            elif self._are_replaced():
                what = "parameters that other code has put in place of those given to the optimizer,"
            if what:
                raise RuntimeError(
                    f"{type(self).__name__}: max_grad_norm must be None with {what} since each rank would clip by the "
                    "norm of its part; pass norm_group=, the process group whose ranks hold the other parts, or clip "
                    "before the step; if this rank has all gradients, pass "
                    "norm_group=torch.distributed.new_subgroups(group_size=1)[0]"
                )
        self._whole = self._plans

    def _note_given(self) -> None:
        # These are `id`s, since a weak reference would forbid torch.utils.swap_tensors. An `id` can be that of another
        # object only after its parameter was deleted. Parameters that a wrapper shards live on in the model.
        self._given = {id(p) for group in self.param_groups for p in group["params"]}

    def _are_replaced(self) -> bool:
        """Whether other code has put ordinary tensors in place of all parameters, as wrappers do with flat shards."""
        current = [id(p) for _, _, p in self._named_parameters()]
        return bool(current and self._given) and self._given.isdisjoint(current)

    def _run_gradient_pass(self, plans: Sequence[Plan], scale: Tensor | None, *, write: bool, clear: bool) -> None:
        """Runs the gradient pass on every device; see `Plan.check`. `_combine` has to follow."""
        self._log.checks += clear
        for plan in plans:
            plan.check(_on(scale, plan.device), write=write, clear=clear)

    def _combine(self, plans: Sequence[Plan], *, is_counted: bool = False) -> Tensor | None:
        """Combines the results of a gradient pass over all devices and ranks. Returns the flag, and sets `_norm`.

        A rank without a gradient takes part too, since the other ranks wait for it. `is_counted`: the pass was counted
        in the records of `plans`.
        """
        if self._shards is None and len(plans) == 1:
            self._norm = plans[0].norm
            return plans[0].found_inf
        with torch.inference_mode(False), torch.no_grad():
            norms = [plan.norm for plan in plans]
            self._norm = total_norm(norms) if len(norms) > 1 else next(iter(norms), None)
            found_inf = any_of([plan.found_inf for plan in plans])
            return found_inf if self._shards is None else self._add_up(plans, found_inf, is_counted)

    def _add_up(self, plans: Sequence[Plan], found_inf: Tensor | None, is_counted: bool) -> Tensor:
        """Does the part of `_combine` that needs the other ranks."""
        assert self._shards is not None
        own: Sequence[Plan] = self._plans or ()
        zero = torch.zeros((), dtype=torch.float32, device=self._shards.device)
        self._norm = zero.clone() if self._norm is None else to_device(self._norm, zero.device)
        found_inf = zero if found_inf is None else to_device(found_inf, zero.device)
        record = ids = None
        if is_counted:
            has_one = len(own) == 1
            if self._ids is None:
                self._ids = self._shards.ids_of(own[0].members.names if has_one else ())
            ids = self._ids
            record = own[0].record if has_one else torch.zeros(RECORD, dtype=torch.int64, device=zero.device)
            record[1] += len(plans) == 0
        self._shards.add_up_(self._norm, found_inf, record, ids)
        return found_inf

    # ------------------------------------------------------------------------------------------- what a scaler calls
    @torch.compiler.disable
    def _check(self, scale: Tensor | None, *, write: bool = False) -> Verdict:
        """Runs the gradient pass for a scaler. Gradients are divided by `scale`; `write`: as in `Plan.check`."""
        # Step hooks may change gradients after this pass. The step then reads the tensors again. As in torch, gradients
        # from hooks are not checked for NaN and inf, except if `max_grad_norm` is set: then the step runs a second
        # gradient pass. If this pass finds NaN or inf, it sets `Plan.found_inf`, and parameters on one device skip.
        # With shards the norm is not measured again, because another rank may have no hooks.
        keeps = not (write or self._optimizer_step_pre_hooks or _global_optimizer_pre_hooks)
        plan = None
        if self._shards is None or self._shards.groups:  # otherwise `_check_in_python` raises an error
            plan = self._run_warm(READ | PASS | CLEAR | (WRITE if write else 0) | (KEEP if keeps else 0), scale)
        if plan is not None:
            plans = [plan]
            self._log.checks += 1
        else:
            plans = self._check_in_python(scale, write=write, keeps=keeps)
        read = plans if plan is None else _READ_BY_CPP
        found_inf = self._combine(plans, is_counted=True)
        again = None if write or self._shards is None else _ADDED_UP
        return Verdict(None if write else scale, found_inf, read if keeps else again)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _check_in_python(self, scale: Tensor | None, *, write: bool, keeps: bool) -> list[Plan]:
        with self._forgetting(keeps):
            plans = self._prepare(writes=write)
            if self._shards is not None:
                self._shards.check_groups(f"{type(self).__name__}.step")
            if write:
                self._copy_verdict()
            self._run_gradient_pass(plans, scale, write=write, clear=True)
            return plans

    def _copy_verdict(self) -> None:
        """Copies the verdict on the step before, which is known until the next step, but which a pass overwrites."""
        last = self._last_found_inf
        if last is not None and any(plan.found_inf is last for plan in self._plans or ()):
            self._last_found_inf = last.clone()

    @torch.compiler.disable  # dynamo of torch 2.11 cannot trace how the attributes are set
    def _step_under(self, verdict: Verdict, *args: Any, **kwargs: Any) -> Any:
        """Calls `step`, including the wrappers that torch and schedulers have put around it.

        The verdict is passed in attributes, as torch's scaler passes it, because step hooks may replace arguments.
        """
        self.grad_scale, self.found_inf, self._checked_plans = verdict
        try:
            return self.step(*args, **kwargs)
        finally:
            del self.grad_scale, self.found_inf, self._checked_plans

    # ------------------------------------------------------------------------------------------------------ plans
    def _prepare(self, *, writes: bool = False, of_all: bool = False) -> list[Plan]:
        """Refreshes the plans, as `Plan.refresh` says. Returns those with a gradient, or all (`of_all`)."""
        if type(torch.empty(0, device="cpu")) is not Tensor:
            raise RuntimeError(
                f"{type(self).__name__}.step: must not run in a mode that makes fake tensors, since these have no "
                "memory; use torch.optim there"
            )
        self._warm = None
        self._follow()
        is_spread = self._norm_group is not None or self._has_dtensors()
        if is_spread and any(capturing(plan.device) for plan in self._plans or ()):
            raise RuntimeError(
                f"{type(self).__name__}.step: must not be captured with DTensor parameters or a norm_group, since this "
                "has not been tried on a GPU yet; capture the forward and backward pass only"
            )
        if self._whole is not self._plans and any(group["max_grad_norm"] is not None for group in self.param_groups):
            self._refuse_partial_norm()
        if not self._refresh(writes):  # a parameter has moved to another device
            self._make_plans()
            if not self._refresh(writes):
                raise RuntimeError(f"{type(self).__name__}.step: parameters changed while the step was prepared")
        assert self._plans is not None
        hyper = self._hyper()
        plans = [plan for plan in self._plans if of_all or plan.written]
        for plan in plans:
            plan.set_hyper(hyper)
        return plans

    def _hyper(self) -> list[Hyper]:
        return [Hyper(self._family.hyper_of(group), group["lr"]) for group in self.param_groups]

    def _refresh(self, writes: bool) -> bool:
        names = tuple(self._state_names(group) for group in self.param_groups)
        if names != self._plan_keys:
            self._drop_unset_states()
            self._plan_keys = names
        keys = self._storages()
        return all(plan.refresh(keys, self._column, writes=writes) for plan in self._plans or ())

    def _storages(self) -> Keys:
        groups = self.param_groups
        return tuple(storages(self._family.name, self._state_names(g), g["state_dtype"]) for g in groups)

    def _follow(self) -> None:
        """Makes new plans if parameters or backends changed. If only `state` changed, the plans get its new entries."""
        params_by_group = (group["params"] for group in self.param_groups)
        lists = [params if isinstance(params, list) else list(params) for params in params_by_group]
        same = sweep().same
        if self._plans is None or any(plan.backend != backends.select(plan.device) for plan in self._plans):
            self._make_plans()
        elif not same(lists, self._plan_params, self.state, *self._plan_state):
            if same(lists, self._plan_params, {}, [], []):
                self._refresh_state_entries()
            else:
                self._make_plans()

    def _make_plans(self) -> None:
        self._drop_plans()
        by_device: dict[torch.device, Members] = {}
        devices = (param.device for _, _, param in self._named_parameters() if not param.is_meta)
        first = next(devices, torch.device("cpu"))
        for name, index, param in self._named_parameters():
            # No device has kernels for a meta parameter. It is put into the first plan. Any plan would do, since each
            # raises an error if such a parameter has a gradient.
            device = first if param.is_meta else param.device
            members = by_device.setdefault(device, Members([], [], [], [], []))
            members.params.append(param)
            members.names.append(name)
            members.groups.append(index)
        self._ids = None
        self._shards = self._make_shards([param for members in by_device.values() for param in members.params])
        weights = iter(() if self._shards is None else self._shards.weights)
        for members in by_device.values():
            members.weights[:] = [next(weights, 1.0) for _ in members.params]
        self._plans = [self._make_plan(device, members) for device, members in by_device.items()]
        self._plan_params = [list(group["params"]) for group in self.param_groups]
        self._refresh_state_entries()

    def _make_shards(self, params: list[Tensor]) -> Shards | None:
        shards = _shards.of_dtensors(params)
        if self._norm_group is None:
            return shards
        if self._has_dtensors():
            raise RuntimeError(
                f"{type(self).__name__}: norm_group must be None with DTensor parameters, since their meshes say which "
                "ranks hold the other parts"
            )
        return _shards.of_parts(params, self._norm_group)

    def _refresh_state_entries(self) -> None:
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
        """Makes the state of a parameter fit its dtype and options, and returns the parameter's tensors.

        Returns None for a parameter without a gradient if it has no count of steps, or if its state cannot be made fit.
        """
        has_gradient = param.grad is not None
        if not has_gradient and "step" not in self.state.get(param, ()):
            return None
        group = self.param_groups[index]
        try:
            if not self._is_fitted(name, param, group):
                self._refuse_capture(param.device)
                self._fit_state(name, param, group)
        except (TypeError, ValueError, RuntimeError):
            if has_gradient:
                raise
            return None
        state, memory = self.state[param], local(param)
        storage = self._storage(param, group)
        states = tuple(None if key is None else local(state[key]) for key in storage.keys)
        remainder = local(state["remainder"]) if "remainder" in state else None
        return Column(memory, dense(memory), remainder, state["step"], states, storage)

    def _refuse_capture(self, device: torch.device) -> None:
        if capturing(device):
            raise RuntimeError(
                f"{type(self).__name__}: a capture must follow a step or init_state(), since state and tables cannot "
                "be allocated inside a capture; run one step before capturing"
            )

    @torch.compiler.disable
    @torch.inference_mode(False)
    @torch.no_grad()
    def init_state(self) -> None:
        """Allocate state and tables before the first step, for every parameter that requires a gradient.

        Call this, or take a step, before you capture a CUDA graph. If gradients will have other dtypes than their
        parameters, take a step with such gradients.

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
        with self._forgetting():
            for plan in self._prepare(of_all=True):
                plan.load()

    def _drop_plans(self) -> None:
        # A plan that a CUDA graph uses is kept. Otherwise a later replay of the graph would write into freed memory.
        self._captured += tuple(plan for plan in self._plans or () if plan.is_captured)
        self._plans = self._warm = self._shards = self._whole = None

    def __getstate__(self) -> dict[str, Any]:
        if self._norm_group is not None:
            raise TypeError(
                f"{type(self).__name__}: an optimizer with a norm_group cannot be copied or pickled, since a group "
                "belongs to its process; save its state_dict()"
            )
        return {**super().__getstate__(), **({"_is_whole": True} if self._is_whole else {})}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._drop_plans()
        state.get("defaults", {}).setdefault("state_dtype", torch.float32)  # pickled by a release without the option
        # torch expects the key "step" in every entry that is not empty.
        entries = state.get("state", {})
        stepless = {p: entry for p, entry in entries.items() if isinstance(entry, dict) and "step" not in entry}
        rest = defaultdict(dict, {p: entry for p, entry in entries.items() if p not in stepless})
        super().__setstate__({**state, "state": rest})
        self.state.update(stepless)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        self._last_found_inf = self._last_taken = None  # they belong to a step before the load
        self.__dict__.setdefault("_log", OverflowLog())
        self.__dict__.setdefault("_norm", None)
        self.__dict__.setdefault("_norm_group", None)
        if "_given" not in self.__dict__:  # `load_state_dict` comes here too
            self._note_given()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch.

        Args:
            param_group: A dict with "params" and any of the optimizer's options.

        Raises:
            TypeError: As in the constructor.
            ValueError: As in the constructor.

        Examples:
            >>> optimizer = amp_kernels.optim.FusedSGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
            >>> optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "lr": 0.25})
            >>> [group["lr"] for group in optimizer.param_groups]
            [0.5, 0.25]
        """
        name, own = type(self).__name__, {}
        given = param_group if isinstance(param_group, dict) else {}  # for anything else torch raises an error
        if "state_dtype" in given:
            own["state_dtype"] = check_state_dtype(name, given["state_dtype"])
        if "params" in given:
            check_params(name, given["params"])
            check_options(name, given)
        with restored([given]):
            super().add_param_group(param_group)
            group = self.param_groups[-1]
            # Parameters of other dtypes that kernels cannot update are refused once they have a gradient.
            wide = next((p for p in group["params"] if p.dtype is torch.float64 and p.requires_grad), None)
            if wide is not None:
                parameter = next(name for name, _, p in self._named_parameters() if p is wide)
                self.param_groups.pop()
                check_parameter(name, parameter, wide)
            group.update(own)
        if "_given" in self.__dict__:  # the constructor of torch calls this method
            self._given.update(map(id, group["params"]))


_OUR_STEP = inspect.unwrap(FusedOptimizer.__dict__["step"])


def _scalar(optimizer: FusedOptimizer, name: str) -> Tensor | None:
    """Returns the attribute that a scaler set, as a 0-dim fp32 tensor.

    None if there is none, or no tensor: torch's scaler sets the int 0 if there was no gradient.
    """
    value = getattr(optimizer, name, None)
    if not isinstance(value, Tensor):
        return None
    return value if value.dtype is torch.float32 and value.ndim == 0 else value.float().view(())


def any_of(flags: list[Tensor]) -> Tensor | None:
    """Returns a flag that is not 0 if one of `flags` is not 0, on the device of the first. None if there is none."""
    if len(flags) < 2:
        return next(iter(flags), None)
    return torch.stack([to_device(flag, flags[0].device) for flag in flags]).sum()


def _weak(holder: Any) -> Callable[[], Any]:
    try:
        return ref(holder)
    except TypeError:  # its class has `__slots__`
        return _nothing


def _nothing() -> Any:
    return None


def _version_of(gradient: Tensor) -> int:
    return -1 if gradient.is_inference() else gradient._version


def _on(scalar: Tensor | None, device: torch.device) -> Tensor | None:
    return None if scalar is None else to_device(scalar, device)
