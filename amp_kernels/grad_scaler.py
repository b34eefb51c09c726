"""A `torch.amp.GradScaler` for the fused optimizers. The step of a fused optimizer checks gradients for NaN and inf."""

from __future__ import annotations

import math
import numbers
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeGuard
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.cuda.amp.common import amp_definitely_not_available
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from . import torch_private
from ._shards import check_group, has_ranks
from ._zero_gradients import ZeroGradients
from .functional.unscale import to_device, unscale_
from .ops.checks import why_not_loaded
from .ops.table import DTYPE_CODES
from .optim._base import FusedOptimizer, OverflowLog, Verdict, any_of
from .optim._plan import capturing
from .optim._wrappers import innermost, with_wrapped, wrapped

__all__ = ["Overflow"]  # GradScaler is public as amp_kernels.GradScaler

# After this many skipped steps in a row there is a warning. So many NaN or inf in a row are likely to come from the
# model, and not from the scale.
SKIPS_BEFORE_WARNING = 50
# The torch optimizers whose eps may round to 0 in fp16, and the fused optimizers to use in their place.
_FUSED_NAMES = {name: f"amp_kernels.optim.Fused{name}" for name in ("Adam", "AdamW", "RMSprop")}


def _handles_scaling(optimizer: torch.optim.Optimizer) -> TypeGuard[FusedOptimizer]:
    """Whether the step of `optimizer` reads the scale and `found_inf` on the device."""
    return isinstance(optimizer, FusedOptimizer) and optimizer._takes_verdicts()


def _is_proxy(optimizer: Any) -> bool:
    """Whether `optimizer` forwards ``_step_supports_amp_scaling`` to another object, by its ``__getattr__``."""
    # The optimizer inside would not read `grad_scale` and `found_inf`, which torch's scaler sets on the proxy.
    name = "_step_supports_amp_scaling"
    is_its_own = hasattr(type(optimizer), name) or name in getattr(optimizer, "__dict__", ())
    return not is_its_own and getattr(optimizer, name, False)


def _warn_of_eps(optimizer: Any) -> None:
    """Warns if `optimizer` computes in fp16 and has an eps that rounds to 0 in fp16. It may then divide by 0."""
    optimizer = wrapped(optimizer)
    if isinstance(optimizer, FusedOptimizer):
        return
    for group in getattr(optimizer, "param_groups", ()):
        eps = group.get("eps")
        vanishes = isinstance(eps, float) and torch.tensor(eps, dtype=torch.float16, device="cpu") == 0
        # With fused=True, an optimizer of torch computes in fp32.
        if vanishes and not group.get("fused") and any(p.dtype is torch.float16 for p in group["params"]):
            name = type(optimizer).__name__
            ours = _FUSED_NAMES.get(name, "an optimizer of amp_kernels.optim")
            warnings.warn(
                f"GradScaler: {name} computes in fp16, the dtype of its parameters; its eps of {eps:g} and the squares "
                f"of small gradients round to 0 in fp16, so weights become NaN or inf; use {ours}, which computes in "
                "fp32",
                stacklevel=3,
            )
            return


def _check_device(device: Any) -> None:
    try:
        torch.device(device)
    except (RuntimeError, TypeError) as error:
        remedy = "; for a GPU pass 'cuda'" if isinstance(device, str) else ""
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"GradScaler: device must be a device type like 'cuda' or 'cpu', got {device!r}{remedy}") from None


class _Rule(NamedTuple):
    """The range of an option or a count, from `least` to `most`, both included. `words` describes it in errors."""

    words: str
    least: float
    most: float
    is_integer: bool = False


_MAX_FP32 = torch.finfo(torch.float32).max
_INT32, _INT64 = 2**31 - 1, 2**63 - 1
# Keys are the names in the constructor and in state dicts. The scale is stored as fp32, the trackers as int32, and the
# count of skipped steps as int64. These dtypes set the largest values.
_RULES = {
    **dict.fromkeys(
        ("init_scale", "scale", "new_scale", "min_scale"), _Rule("a finite number of at least 0", 0, _MAX_FP32)
    ),
    "growth_factor": _Rule("a number above 1", math.nextafter(1, 2), math.inf),
    "backoff_factor": _Rule("a number of at least 0 and below 1", 0, math.nextafter(1, 0)),
    "growth_interval": _Rule("an integer", -_INT64, _INT64, True),
    "_growth_tracker": _Rule("an integer of at least 0", 0, _INT32, True),
    "max_scale": _Rule("a number above 0", math.ulp(0.0), math.inf),
    "hysteresis": _Rule("an integer of at least 1", 1, _INT32, True),
    "_hysteresis_tracker": _Rule("an integer", -_INT32, _INT32, True),
    "skipped_steps": _Rule("an integer of at least 0", 0, _INT64, True),
}
# The keys of a state dict that torch's scaler also saves, and the keys that only amp_kernels.GradScaler saves.
_TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_OWN_KEYS = ("min_scale", "max_scale", "hysteresis", "_hysteresis_tracker", "skipped_steps")


def _check_number(caller: str, name: str, value: Any) -> None:
    rule = _RULES[name]
    kind = numbers.Integral if rule.is_integer else numbers.Real
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if not (is_number and rule.least <= value <= rule.most):
        error = ValueError if is_number else TypeError
        raise error(f"{caller}: {name} must be {rule.words}, got {value!r}")


def _check_numbers(caller: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        _check_number(caller, name, value)
    least, most = values["min_scale"], values["max_scale"]
    if least > most:
        raise ValueError(f"{caller}: max_scale must be a number of at least min_scale ({least:g}), got {most!r}")


def _as_number(value: Any) -> Any:
    """Returns the number in a tensor of one element. Some checkpoint formats store numbers as tensors."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


class Overflow(NamedTuple):
    """A step whose gradients held NaN or inf, and the first parameter with such a gradient.

    Attributes:
        step: Number of the step, counted from 1. Only steps of the parameter's optimizer under a scaler are counted.
            Skipped steps are counted too.
        parameter: Name of the first parameter whose gradient held NaN or inf in that step.

    Examples:
        >>> amp_kernels.grad_scaler.Overflow(step=3, parameter="head.weight").parameter
        'head.weight'
    """

    step: int
    parameter: str


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` that steps the optimizers of `amp_kernels.optim` without waiting for the device.

    Formula: dynamic loss scaling (Micikevicius et al. 2018), as in `torch.amp.GradScaler`.

    The step of a fused optimizer does not write the gradients, so they are still scaled after it. To read them
    unscaled, call `unscale_` before `step`. fp16 and bf16 gradients are accepted. With any other optimizer, or a fused
    one whose step is overridden or wrapped by code outside of torch, or whose parameters belong to FSDP1, this class
    works like torch's scaler. The guide to loss scaling has the details, and lists the warnings.

    The other arguments are those of `torch.amp.GradScaler`.

    Args:
        min_scale: Lower bound of the scale. A lower `init_scale` is raised to it.
        max_scale: Upper bound of the scale. A higher `init_scale` is lowered to it. If the loss is fp16, its gradient
            is the scale, and the default of 65536 always overflows.
        hysteresis: The first `hysteresis - 1` overflows in a row do not reduce the scale. Every further overflow in a
            row reduces it, as in Apex. A step without overflow starts the count again.
        process_group: A group of ranks that skip steps together. Every rank must call `step` (or `unscale_`) for the
            same optimizers in the same order, even without a gradient. No group is needed for DTensors, or if gradients
            are averaged over the ranks (DistributedDataParallel). A scaler with a group cannot be copied or pickled.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A number is out of its range, `min_scale` is above `max_scale`, or torch knows no device with the
            name `device`. Or `process_group` belongs to other ranks, or does not reduce tensors of `device`.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        >>> optimizer = amp_kernels.optim.FusedSGD([("weight", weight)], lr=0.5)
        >>> scaler = amp_kernels.GradScaler("cpu", init_scale=1024.0)
        >>> for factor in (1.0, float("inf")):
        ...     optimizer.zero_grad()
        ...     scaler.scale((weight.float() * factor).sum()).backward()
        ...     scaler.step(optimizer)
        ...     scaler.update()
        >>> weight.data, scaler.get_scale()
        (tensor([0.5000, 0.5000], dtype=torch.float16), 512.0)
        >>> int(scaler.skipped_steps), scaler.last_overflow
        (1, Overflow(step=2, parameter='weight'))
    """

    _format = 1  # the version of state dicts; increased when earlier releases would misread new ones
    _has_warned_of_no_gradient = False
    # The last overflow among those of deleted optimizers, as a pair of its iteration and the overflow.
    _last_deleted_overflow: tuple[int, Overflow] | None = None

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 0.0,
        max_scale: float = math.inf,
        hysteresis: int = 1,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        options = {"init_scale": init_scale, "min_scale": min_scale, "max_scale": max_scale, "hysteresis": hysteresis}
        _check_device(device)
        _check_numbers("GradScaler", options)
        if process_group is not None:
            check_group("GradScaler", "process_group", process_group, torch.device(device).type)
        init_scale = min(max(init_scale, min_scale), max_scale)
        if enabled and device == "cuda" and amp_definitely_not_available():  # torch would warn of its own scaler
            warnings.warn(
                "amp_kernels.GradScaler: device is 'cuda', but CUDA is not available, so the scaler is disabled; for a "
                "CPU pass device='cpu'",
                stacklevel=2,
            )
            enabled = False
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        if self._enabled:  # after torch's own checks, which let NaN pass
            factors = {"growth_factor": growth_factor, "backoff_factor": backoff_factor}
            _check_numbers("GradScaler", {**options, **factors, "growth_interval": growth_interval})
        self._min_scale = min_scale
        self._max_scale = max_scale
        self._process_group = process_group
        self._skips_in_a_row = 0
        self._seen_optimizers = WeakIdKeyDictionary()  # not a set of ids: a new object may get the id of a deleted one
        self._hysteresis = hysteresis
        self._init_hysteresis_tracker = hysteresis
        self._hysteresis_tracker: Tensor | None = None
        self._init_skipped_steps = 0
        self._skipped_steps: Tensor | None = None
        # Maps the log of each optimizer to an offset and the optimizer. The offset puts the overflows of all logs in
        # order: check n of an optimizer's gradients belongs to iteration n + offset, if the optimizer was checked once
        # in every iteration since.
        self._logs: dict[OverflowLog, tuple[int, ReferenceType[FusedOptimizer]]] = {}
        self._iterations = 0
        self._zero_gradients = ZeroGradients()

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if self._process_group is not None and self._scale is None:
            # This rank had no loss to scale, but the other ranks wait for its `found_inf`.
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return super()._check_scale_growth_tracker(funcname)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if capturing(torch.device(dev)):
            raise RuntimeError(
                "GradScaler: a capture must follow an ordinary iteration, since a scale allocated inside a capture "
                "would be reset at every replay; run one iteration before capturing"
            )
        super()._lazy_init_scale_growth_tracker(dev)
        self._skipped_steps = torch.full((), self._init_skipped_steps, dtype=torch.int64, device=dev)
        self._hysteresis_tracker = torch.full((), self._init_hysteresis_tracker, dtype=torch.int32, device=dev)

    # ------------------------------------------------------------------------------------ the scale and the overflows
    def __repr__(self) -> str:
        """Returns the scale and the options that change it. Waits for the device, as `get_scale` does."""
        if not self._enabled:
            return f"{type(self).__name__}(enabled=False)"
        shown = {
            "device": repr(str(self._device if self._scale is None else self._scale.device)), "scale": self._shown(),
            "growth_factor": self._growth_factor, "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval, "min_scale": self._min_scale, "max_scale": self._max_scale,
            "hysteresis": self._hysteresis,
        }  # fmt: skip
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in shown.items())})"

    def _shown(self) -> str:
        """Returns the scale as text, or why it cannot be read: in a capture, or after a CUDA error."""
        if self._scale is None:
            return str(self._init_scale)
        if capturing(self._scale.device):
            return "unknown during a capture"
        try:
            return str(self._scale.item())
        except RuntimeError as error:
            return f"unreadable: {str(error).splitlines()[0]}"

    @property
    def skipped_steps(self) -> Tensor:
        """Number of iterations with a skipped step: 0-dim, int64, on the scale's device, or a CPU before `scale`."""
        if self._skipped_steps is None:
            return torch.tensor(self._init_skipped_steps, device="cpu")
        return self._skipped_steps

    @property
    def last_overflow(self) -> Overflow | None:
        """The last `Overflow` in the gradients of a fused optimizer, or None. Reading it waits for the device.

        Overflows in deleted optimizers count too. If an optimizer takes no part in some iterations, its earlier
        overflow may be returned in place of a later one in another optimizer.
        """
        last = self._last_in(self._logs)
        return None if last is None else last[1]

    def _last_in(self, logs: Iterable[OverflowLog]) -> tuple[int, Overflow] | None:
        """Returns the last overflow in `logs` and in deleted optimizers, and first its iteration."""
        found = [(last[0] + self._logs[log][0], Overflow(*last)) for log in logs for last in log.overflows()]
        if self._last_deleted_overflow is not None:
            found.append(self._last_deleted_overflow)
        return max(found, key=lambda overflow: overflow[0], default=None)

    def _forget_the_gone(self) -> None:
        """Drops the logs of deleted optimizers, and keeps the last overflow that they hold. Waits for the device."""
        gone = [log for log, (_, owner) in self._logs.items() if owner() is None]
        if gone and not any(capturing(device) for log in gone for device in log.records):
            self._last_deleted_overflow = self._last_in(gone)
            for log in gone:
                del self._logs[log]

    # ------------------------------------------------------------------------------------------------ one iteration
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, as in torch. fp16 and bf16 gradients are accepted.

        Args:
            optimizer: The optimizer.

        Raises:
            RuntimeError: `unscale_` or `step` was called for the optimizer since the last `update`.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = amp_kernels.optim.FusedSGD([weight], lr=0.5)
            >>> scaler = amp_kernels.GradScaler("cpu")
            >>> scaler.scale(weight.sum()).backward()
            >>> scaler.unscale_(optimizer)
            >>> weight.grad
            tensor([1., 1.])
        """
        self._zero_gradients.look(optimizer)
        if not self._enabled or not _handles_scaling(optimizer):
            return super().unscale_(optimizer)
        scale, _ = self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        self._record(optimizer, optimizer._check(scale, write=True))
        state["stage"] = OptState.UNSCALED

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step an optimizer unless its gradients hold NaN or inf.

        For a fused optimizer the gradients of all devices are checked first, then all parameters are updated.

        Args:
            optimizer: The optimizer.
            *args: Passed on to `optimizer.step`.
            **kwargs: Passed on to `optimizer.step`. Closures are not supported, as in torch.

        Returns:
            What `optimizer.step` returned, or None if it was not called.

        Raises:
            RuntimeError: `step` was called for the optimizer since the last `update`, or a closure was passed.
        """
        self._zero_gradients.look(optimizer)
        is_proxy = self._enabled and _is_proxy(optimizer)
        is_fused = self._enabled and _handles_scaling(optimizer) and not hasattr(optimizer, "grad_scale")
        if not (is_proxy or is_fused):
            if self._enabled and self._is_new(optimizer):
                _warn_of_eps(optimizer)
            return super().step(optimizer, *args, **kwargs)
        # A closure would compute new gradients after the check.
        if is_fused and (any(arg is not None for arg in args) or "closure" in kwargs):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if is_proxy:  # is stepped as torch's scaler steps most optimizers
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        else:
            assert isinstance(optimizer, FusedOptimizer)
            verdict = Verdict(None, next(iter(state["found_inf_per_device"].values()), None))
            if state["stage"] is OptState.READY:
                verdict = self._record(optimizer, optimizer._check(scale))
            result = optimizer._step_under(verdict, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def _is_new(self, optimizer: Any) -> bool:
        """Whether this is the first step of `optimizer`."""
        try:
            is_new = optimizer not in self._seen_optimizers
            self._seen_optimizers[optimizer] = True
        except TypeError:  # no weak reference can be made: its class has ``__slots__``
            return False
        return is_new

    def _record(self, optimizer: FusedOptimizer, verdict: Verdict) -> Verdict:
        """Registers the optimizer's log. Returns `verdict` with the `found_inf` that all ranks agree on."""
        flag = verdict.found_inf  # ranks of DTensors and of a `norm_group` have agreed on it
        self._logs[optimizer._log] = self._iterations - optimizer._log.checks, ref(optimizer)
        flags = self._agree_over_groups({} if flag is None else {flag.device: flag}, self._process_group)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = flags
        return verdict._replace(found_inf=next(iter(flags.values()), None))

    def _agree_over_groups(
        self, flags: dict[torch.device, Tensor], *groups: dist.ProcessGroup | None
    ) -> dict[torch.device, Tensor]:
        groups = tuple(group for group in groups if group is not None)
        if not groups:
            return flags
        scale, _ = self._check_scale_growth_tracker("step")
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        for flag in flags.values():
            found_inf += to_device(flag, scale.device)
        for group in groups:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)
        return {scale.device: found_inf}

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        is_torchs = type(optimizer).__module__.startswith("torch.optim.")  # holds no other; the search takes 40 us
        found = innermost(optimizer) if has_ranks() and not is_torchs else ()
        inside = (inner._norm_group for inner in found if isinstance(inner, FusedOptimizer))
        groups = dict.fromkeys((self._process_group, *inside))  # without doubles
        by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
        for param in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            if param.grad.is_sparse and param.grad.dtype is torch.float16:
                # coalesce() adds up entries of the same index. A sum may overflow, so the check must come after it.
                param.grad = param.grad.coalesce()
            grad = param.grad._values() if param.grad.is_sparse else param.grad
            if isinstance(grad, DTensor) or grad.dtype not in DTYPE_CODES:
                flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
                return self._agree_over_groups(flags, *groups)
            by_device[grad.device].append(grad)
        flags = {device: torch.zeros((), dtype=torch.float32, device=device) for device in by_device}
        for device, grads in by_device.items():
            unscale_(grads, inv_scale=inv_scale, found_inf=flags[device])
        return self._agree_over_groups(flags, *groups)

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        """Steps if all gradients were finite, as torch does. If not, tells the fused optimizers inside `optimizer`."""
        found_inf = next((flag for flag in optimizer_state["found_inf_per_device"].values() if flag.item()), None)
        optimizer_state["is_skipped"] = found_inf is not None
        if found_inf is None:
            return optimizer.step(*args, **kwargs)
        for skipped in with_wrapped(optimizer):
            torch_private.note_skipped_step(skipped)
        for skipped in innermost(optimizer):  # the class of a wrapper may be derived from that of the optimizer inside
            if isinstance(skipped, FusedOptimizer):
                skipped._skip(found_inf)
        return None

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        if not isinstance(optimizer, FusedOptimizer):
            return super()._check_inf_per_device(optimizer)
        self._record(optimizer, optimizer._check(None))
        return self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the scale to the NaN and inf found since the last `update`, and count skipped steps.

        If the scale and the parameters are on one device, `update` waits for this device in only two cases: an
        optimizer was deleted, or there is the warning after 50 skipped steps in a row.

        Args:
            new_scale: Set the scale to this number, even if the number is outside of the bounds. A tensor must have one
                element, lie on the scale's device and not require a gradient. Its value is not checked.

        Raises:
            TypeError: `new_scale` is neither a number nor a tensor.
            ValueError: `new_scale` is a number below 0, above the largest fp32 number or NaN. Or it is a tensor with
                several elements, on another device, or one that requires a gradient.
            AssertionError: There is no scale yet, because `scale` was not called. Or `new_scale` is None, and nothing
                was checked since the last `update`: `step` was not called, and no call of `unscale_` found a gradient.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            new_scale = self._checked_scale(new_scale)
        states = list(self._per_optimizer_states.values())
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        found_inf = self._found_inf()
        if found_inf is not None:
            assert self._skipped_steps is not None  # allocated with the scale
            self._skipped_steps.add_(found_inf.bool())
        self._zero_gradients.evaluate(found_inf, scale)
        if new_scale is not None:
            return super().update(new_scale)
        if found_inf is not None:
            self._adapt_scale(scale, growth_tracker, found_inf)
        elif all(s["stage"] is not OptState.STEPPED for s in states):  # a step without any gradient is no error
            raise AssertionError("No inf checks were recorded prior to update.")
        self._iterations += 1
        if found_inf is not None:
            self._warn_of_skips(found_inf, states)
        elif not self._has_warned_of_no_gradient:
            self._has_warned_of_no_gradient = True
            warnings.warn(
                "GradScaler: optimizers stepped, but none of their parameters has a gradient, so nothing changed; "
                "call backward() before step(), and check that the loss depends on the optimizers' parameters",
                stacklevel=2,
            )
        self._forget_the_gone()
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    def _checked_scale(self, new_scale: Any) -> float | Tensor:
        """Returns `new_scale` as torch's `update` takes it. torch refuses an int with an AttributeError."""
        if not isinstance(new_scale, Tensor):
            _check_number("GradScaler.update", "new_scale", new_scale)
            return float(new_scale)
        if new_scale.numel() != 1 or new_scale.requires_grad or new_scale.device.type != self._device:
            gradient = " that requires a gradient" if new_scale.requires_grad else ""
            raise ValueError(
                f"GradScaler.update: new_scale must be a number, or a tensor of one element on {self._device} that "
                f"requires no gradient, got a tensor of shape {list(new_scale.shape)} on {new_scale.device}{gradient}"
            )
        return new_scale

    def _found_inf(self) -> Tensor | None:
        """Returns the sum of all flags since the last update, on the scale's device. None if there was no gradient."""
        scale, _ = self._check_scale_growth_tracker("update")
        states = self._per_optimizer_states.values()
        return any_of([to_device(flag, scale.device) for s in states for flag in s["found_inf_per_device"].values()])

    def _adapt_scale(self, scale: Tensor, growth_tracker: Tensor, found_inf: Tensor) -> None:
        before = scale.clone() if self._hysteresis > 1 else scale
        torch._amp_update_scale_(
            scale, growth_tracker, found_inf, self._growth_factor, self._backoff_factor, self._growth_interval
        )
        if self._hysteresis > 1:
            # The tracker starts at `hysteresis`. An overflow that brings it to 0 or less reduces the scale.
            assert self._hysteresis_tracker is not None  # allocated with the scale
            full = torch.full_like(self._hysteresis_tracker, self._hysteresis)
            left = self._hysteresis_tracker.copy_(torch.where(found_inf != 0, self._hysteresis_tracker - 1, full))
            scale.copy_(torch.where((found_inf != 0) & (left > 0), before, scale))
        if self._min_scale > 0 or self._max_scale < math.inf:
            scale.clamp_(self._min_scale, self._max_scale)

    def _warn_of_skips(self, found_inf: Tensor, states: list[dict[str, Any]]) -> None:
        if found_inf.device.type == "cpu":
            is_skipped = bool(found_inf)
        elif all("is_skipped" in state for state in states):
            is_skipped = any(state["is_skipped"] for state in states)
        else:
            return
        self._skips_in_a_row = self._skips_in_a_row + 1 if is_skipped else 0
        if self._skips_in_a_row == SKIPS_BEFORE_WARNING:
            last = self.last_overflow
            where = f" (last in the gradient of {last.parameter})" if last else ""
            warnings.warn(
                f"GradScaler: {SKIPS_BEFORE_WARNING} steps in a row found NaN or inf{where} and were skipped; at a "
                f"scale of {self.get_scale():g} the cause is probably the model, not the scale; check the loss before "
                "it is scaled",
                stacklevel=3,
            )

    # ------------------------------------------------------------------------------------------------- checkpoints
    def state_dict(self) -> dict[str, Any]:
        """Return a state dict that torch's scaler can load too. Waits for the device.

        Returns:
            A dict with torch's keys and those of this class. It is empty if the scaler is not enabled.

        Examples:
            >>> sorted(amp_kernels.GradScaler("cpu", max_scale=1024.0).state_dict().items())[:3]
            [('_growth_tracker', 0), ('_hysteresis_tracker', 1), ('backoff_factor', 0.5)]
        """
        if not self._enabled:
            return {}
        return {
            **super().state_dict(),
            "format": self._format,
            "min_scale": self._min_scale,
            "max_scale": self._max_scale,
            "hysteresis": self._hysteresis,
            **self._counts(),
        }

    def _counts(self) -> dict[str, int]:
        left = self._hysteresis_tracker
        return {
            "_hysteresis_tracker": self._init_hysteresis_tracker if left is None else int(left),
            "skipped_steps": int(self.skipped_steps),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch's scaler.

        If a state dict of torch's scaler is loaded, bounds and hysteresis stay as they are in this scaler, its scale is
        clamped to the bounds, and the count of skipped steps starts at 0.

        Args:
            state_dict: What `state_dict()` returned.

        Raises:
            TypeError: `state_dict` is not a dict, or a value has another type than the constructor takes. Nothing was
                loaded.
            ValueError: A value is out of range, a key of torch's scaler is missing, or a later release saved the state
                dict. Nothing was loaded.
            RuntimeError: `state_dict` is empty, possibly because its scaler was not enabled.

        Examples:
            >>> scaler = amp_kernels.GradScaler("cpu")
            >>> scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=256.0).state_dict())
            >>> scaler.get_scale()
            256.0
        """
        if self._enabled:
            self._load(self._check_state_dict("GradScaler.load_state_dict", state_dict))

    def _check_state_dict(self, caller: str, state_dict: Any) -> dict[str, Any]:
        """Returns all values that `_load` needs, or raises an error."""
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"{caller}: state_dict must be a dict, got a {type(state_dict).__name__}")
        if not state_dict:
            raise RuntimeError(
                f"{caller}: the source state dict is empty, possibly because it was saved from a scaler that was not "
                "enabled"
            )
        if reason := why_not_loaded("GradScaler", state_dict.get("format"), self._format):
            raise ValueError(reason)
        lacking = [name for name in _TORCH_KEYS if name not in state_dict]
        if lacking:
            raise ValueError(f"{caller}: state_dict must hold {', '.join(_TORCH_KEYS)}, got no {', '.join(lacking)}")
        values = {"min_scale": self._min_scale, "max_scale": self._max_scale, "hysteresis": self._hysteresis}
        values["skipped_steps"] = 0
        values |= {name: _as_number(state_dict[name]) for name in (*_TORCH_KEYS, *_OWN_KEYS) if name in state_dict}
        values.setdefault("_hysteresis_tracker", values["hysteresis"])
        _check_numbers(caller, values)
        if "min_scale" not in state_dict:  # a scale with its own bounds may be outside of them: `update` can set it
            values["scale"] = min(max(values["scale"], values["min_scale"]), values["max_scale"])
        return values

    def _load(self, values: dict[str, Any]) -> None:
        self._min_scale, self._max_scale = values["min_scale"], values["max_scale"]
        super().load_state_dict(values)
        self._hysteresis = values["hysteresis"]
        self._init_hysteresis_tracker = values["_hysteresis_tracker"]
        self._init_skipped_steps = values["skipped_steps"]
        # The tensors are overwritten, not replaced, because a captured graph uses their addresses.
        if self._hysteresis_tracker is not None:
            self._hysteresis_tracker.fill_(self._init_hysteresis_tracker)
        if self._skipped_steps is not None:
            self._skipped_steps.fill_(self._init_skipped_steps)

    def __getstate__(self) -> dict[str, Any]:
        if self._process_group is not None:
            raise TypeError(
                "GradScaler: a scaler with a process_group cannot be copied or pickled, since a group belongs to its "
                "process; save its state_dict()"
            )
        state = super().__getstate__()
        if self._enabled:
            counts = self._counts()
            state["_init_hysteresis_tracker"] = counts["_hysteresis_tracker"]
            state["_init_skipped_steps"] = counts["skipped_steps"]
            state["_hysteresis_tracker"] = state["_skipped_steps"] = None
        state["_logs"], state["_last_deleted_overflow"] = {}, None
        state["_zero_gradients"] = self._zero_gradients.has_warned
        del state["_seen_optimizers"]  # weak references cannot be pickled
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._seen_optimizers = WeakIdKeyDictionary()
        self._zero_gradients = ZeroGradients(has_warned=state["_zero_gradients"])
