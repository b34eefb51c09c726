"""The functions of `amp_kernels.amp`, on top of `GradScaler` and the fused optimizers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import operator
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..grad_scaler import GradScaler
from ..optim import FusedAdam, FusedAdamW, FusedRMSprop, FusedSGD
from ..optim._base import FusedOptimizer

T = TypeVar("T")

_REPLACED: dict[type, type[FusedOptimizer]] = {
    torch.optim.SGD: FusedSGD,
    torch.optim.RMSprop: FusedRMSprop,
    torch.optim.Adam: FusedAdam,
    torch.optim.AdamW: FusedAdamW,
}
_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
# `_casting` makes a subclass of a model's class. This attribute of the subclass holds the model's own class.
_PLAIN_CLASS = "_amp_kernels_plain_class"
_PARALLEL = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


class _Level(NamedTuple):
    dtype: torch.dtype  # of weights, and without autocast also of inputs
    autocast: bool
    keep_batchnorm_fp32: bool
    loss_scale: float | str


_LEVELS = {
    "O0": _Level(torch.float32, False, False, 1.0),
    "O1": _Level(torch.float32, True, False, "dynamic"),
    "O2": _Level(torch.float16, False, True, "dynamic"),
    "O3": _Level(torch.float16, False, False, 1.0),
}


@dataclasses.dataclass
class _SetUp:
    optimizers: list[FusedOptimizer]
    scalers: list[GradScaler]  # one for each loss
    warns_of_unscaled: bool  # whether to warn of a step without `scale_loss`


# The result of the last `initialize`. It is global because Apex's functions have no argument that could pass it on.
_set_up: _SetUp | None = None
# For each optimizer a gradient that its last `scale_loss` block computed, as long as this tensor lives.
_scaled = WeakIdKeyDictionary()


def initialize(
    models: Any,
    optimizers: Any = None,
    *,
    opt_level: str = "O1",
    keep_batchnorm_fp32: bool | str | None = None,
    loss_scale: float | str | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    **unknown: Any,
) -> Any:
    """Prepare models and optimizers for mixed precision, in place.

    Pass all models and optimizers in one call, before a model is wrapped in DistributedDataParallel or DataParallel. A
    torch optimizer becomes a fused one. It stays the same object with the same groups and state.

    Another call replaces the loss scales and the level. An optimizer that is passed again keeps its state and masters.
    `scale_loss` accepts only optimizers from the last call.

    Args:
        models: A module or a list of modules. Floating-point parameters and buffers must be fp32, except in a module
            from an earlier call.
        optimizers: An optimizer or a list of them: SGD, RMSprop, Adam or AdamW of `torch.optim`, or one of
            `amp_kernels.optim`. None for inference.
        opt_level: `"O0"`, `"O1"`, `"O2"` or `"O3"`; see the table of `amp_kernels.amp`.
        keep_batchnorm_fp32: True or False (or `"True"`, `"False"`) replaces the setting of the level. Must be
            None at O1.
        loss_scale: `"dynamic"`, or a fixed number (also as a string), replaces the setting of the level. At a fixed
            scale of 1 gradients are neither checked for NaN and inf nor cast to fp32.
        num_losses: Number of loss scales; `scale_loss` chooses one by its `loss_id`.
        verbosity: 0 prints nothing. 1 or more prints one line on rank 0.
        min_loss_scale: Lower bound of a dynamic scale.
        max_loss_scale: Upper bound of a dynamic scale.
        **unknown: Any other argument raises a TypeError.

    Returns:
        `models` and `optimizers`, as lists where lists were given; `models` alone if `optimizers` is None.

    Raises:
        TypeError: An argument has a wrong type or an unknown name, a parameter or buffer has a wrong dtype, a model is
            wrapped, or a `forward` was assigned to a model or a `step` to an optimizer. Nothing was modified.
        ValueError: An argument has a wrong value. Nothing was modified.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp_kernels.amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> type(optimizer), model.weight.dtype, model(torch.ones(3, 4)).dtype
        (<class 'amp_kernels.optim.optimizers.FusedSGD'>, torch.float16, torch.float32)
    """
    global _set_up
    if unknown:
        raise TypeError(
            "amp.initialize: arguments must be models, optimizers, opt_level, keep_batchnorm_fp32, loss_scale, "
            f"num_losses, verbosity, min_loss_scale or max_loss_scale, got {', '.join(unknown)}; remove these "
            'arguments; in place of enabled=False pass opt_level="O0"'
        )
    level = _level(opt_level, keep_batchnorm_fp32, loss_scale)
    if not isinstance(num_losses, int) or num_losses < 1:
        raise ValueError(f"amp.initialize: num_losses must be an integer of at least 1, got {num_losses!r}")
    least = _bound("min_loss_scale", 0.0 if min_loss_scale is None else min_loss_scale, 0.0)
    most = _bound("max_loss_scale", max_loss_scale, max(least, math.ulp(0.0)))
    all_models = _listed("models", models, torch.nn.Module)
    all_optimizers = [] if optimizers is None else _listed("optimizers", optimizers, torch.optim.Optimizer)
    cast: set[int] = set()  # what an earlier call may have made fp16
    for i, model in enumerate(all_models):
        is_earlier = _plain_class(model) is not type(model)
        own = {id(t) for t in itertools.chain(model.parameters(), model.buffers())} if is_earlier else set()
        _check_model(f"models[{i}]", model, own)
        cast |= own
    for i, optimizer in enumerate(all_optimizers):
        _check_optimizer(f"optimizers[{i}]", optimizer, cast)
    device = _device_type(p for model in all_models for p in model.parameters())
    scalers = [_scaler(device, level.loss_scale, least, most) for _ in range(num_losses)]
    if verbosity > 0 and not (dist.is_available() and dist.is_initialized() and dist.get_rank() != 0):
        print(_summary(opt_level, level, all_optimizers))

    earlier = [] if _set_up is None else _set_up.optimizers
    optimizer_of = {
        id(p): o for o in (*all_optimizers, *earlier) if isinstance(o, FusedOptimizer) for p in master_params(o)
    }
    for model in all_models:
        _cast_weights(model, level, optimizer_of)
        model.__class__ = _casting(_plain_class(model), level.dtype, level.autocast)
    fused = [_ours(optimizer) for optimizer in all_optimizers]
    for optimizer in fused:
        _take_verdict(optimizer)
        if all(optimizer is not other for other in earlier):
            optimizer.register_step_pre_hook(_before_step)
            optimizer.register_step_post_hook(_after_step)
    computes_in_fp16 = level.autocast or level.dtype is torch.float16
    _set_up = _SetUp(fused, scalers, computes_in_fp16 and any(scaler.is_enabled() for scaler in scalers))
    return models if optimizers is None else (models, optimizers)


@contextlib.contextmanager
def scale_loss(loss: Tensor, optimizers: Any, loss_id: int = 0, **unknown: Any) -> Iterator[Tensor]:
    """Scale a loss for the backward pass inside a `with` block, and unscale the gradients at the end of the block.

    At the end of the block the gradients are unscaled in fp32, added to those from before the block, and the scale is
    adapted. If a gradient holds NaN or inf, the next `step()` of the optimizers is skipped. Clip gradients between the
    block and the step. Nothing here waits for the device. At a fixed scale of 1 gradients are left unchanged.

    Args:
        loss: 0-dim, of any dtype. It is scaled in fp32.
        optimizers: An optimizer or a list of optimizers, from `initialize`. Pass all optimizers that have parameters on
            which the loss depends.
        loss_id: Number of the loss scale, from 0 to `num_losses - 1`.
        **unknown: Any other argument raises a TypeError, even if Apex has an argument of this name.

    Yields:
        The scaled loss, 0-dim fp32.

    Raises:
        RuntimeError: `initialize` was not called. Or the block computed no gradient for the parameters of the
            optimizers (at a fixed scale of 1 this is not checked).
        TypeError: An argument has a wrong type.
        ValueError: An argument has a wrong value.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp_kernels.amp.initialize(model, optimizer, loss_scale=128.0, verbosity=0)
        >>> with amp_kernels.amp.scale_loss(model(torch.ones(3, 4)).sum(), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> model.bias.grad
        tensor([3., 3.])
        >>> optimizer.step()
    """
    loss_scales, fused, params = _check_loss(loss, optimizers, loss_id, unknown)
    scaler = loss_scales[loss_id]
    if not scaler.is_enabled():
        yield loss.float()
        return
    # Copies, since DistributedDataParallel may write the next gradient into the memory of the last one.
    earlier = [None if p.grad is None else p.grad.clone() for p in params]
    for p in params:
        p.grad = None
    # If no gradient is left from an earlier block, for example after `zero_grad`, the `found_inf` of that block must
    # not skip the next step.
    if all(grad is None for grad in earlier):
        for optimizer in fused:
            _take_verdict(optimizer)
    try:
        yield scaler.scale(loss.float())
        _unscale(scaler, fused, params)
    except BaseException:
        for p, grad in zip(params, earlier, strict=True):
            p.grad = grad  # replaces a gradient that may still be scaled
        scaler._per_optimizer_states.clear()
        raise
    for p, grad in zip(params, earlier, strict=True):
        if grad is not None:
            p.grad = grad if p.grad is None else p.grad.add_(grad)


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Return an iterator over an optimizer's parameters, for clipping between `scale_loss` and the step.

    Args:
        optimizer: An optimizer from `initialize`.

    Returns:
        An iterator over the parameters of all groups.

    Examples:
        >>> list(amp_kernels.amp.master_params(amp_kernels.optim.FusedSGD([torch.ones(2)])))
        [tensor([1., 1.])]
    """
    return (p for group in optimizer.param_groups for p in group["params"])


def state_dict() -> dict[str, Any]:
    """Return the `GradScaler.state_dict` of every loss: `{"loss_scaler0": ..., ...}`. Waits for the device.

    Returns:
        A dict of dicts.

    Raises:
        RuntimeError: `initialize` was not called.

    Examples:
        >>> _ = amp_kernels.amp.initialize(torch.nn.Linear(4, 2), verbosity=0)
        >>> amp_kernels.amp.state_dict()["loss_scaler0"]["scale"]
        65536.0
    """
    return {f"loss_scaler{i}": s.state_dict() for i, s in enumerate(_initialized("state_dict").scalers)}


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load the loss scales and step counts from a `state_dict()` of this module or of `apex.amp`.

    The bounds of the scale are not loaded. They stay as `initialize` set them.

    Args:
        state_dict: The saved state.

    Raises:
        RuntimeError: `initialize` was not called.
        TypeError: A value has a wrong type. Nothing was loaded.
        ValueError: `state_dict` is for another number of losses or lacks a scale, or a value is out of range. Nothing
            was loaded.

    Examples:
        >>> _ = amp_kernels.amp.initialize(torch.nn.Linear(4, 2), verbosity=0)
        >>> amp_kernels.amp.load_state_dict({"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 5}})
        >>> amp_kernels.amp.state_dict()["loss_scaler0"]["scale"]
        1024.0
    """
    scalers = {f"loss_scaler{i}": s for i, s in enumerate(_initialized("load_state_dict").scalers)}
    loaded = {name: _scale_and_counts(state_dict.get(name)) for name in scalers}
    lacking = [name for name, scaler in scalers.items() if scaler.is_enabled() and not loaded[name]]
    if sorted(state_dict) != sorted(scalers) or lacking:
        raise ValueError(
            f"amp.load_state_dict: state_dict must hold the scale of {', '.join(lacking or scalers)}, got "
            f"{', '.join(name for name in state_dict if _scale_and_counts(state_dict[name])) or 'none'}; call "
            "amp.initialize with the loss_scale and num_losses of the run that saved it"
        )
    # Without bounds, so that the scale is clamped to those of the scaler.
    own = {name: {**torch.amp.GradScaler.state_dict(s), **s._counts()} for name, s in scalers.items()}
    checked = [
        (scaler, scaler._check_state_dict(f"amp.load_state_dict: {name}", {**own[name], **loaded[name]}))
        for name, scaler in scalers.items()
        if scaler.is_enabled()
    ]
    for scaler, values in checked:  # after all were checked
        scaler._load(values)


def _scale_and_counts(saved: Any) -> dict[str, Any]:
    """Return the saved scale and counts of one loss, as in a state dict of `GradScaler`. {} if one is missing."""
    if not isinstance(saved, Mapping):
        return {}
    if {"loss_scale", "unskipped"} <= saved.keys():  # saved by Apex
        return {"scale": saved["loss_scale"], "_growth_tracker": saved["unskipped"]}
    names = ("scale", "_growth_tracker", "skipped_steps")
    return {name: saved[name] for name in names if name in saved} if {*names[:2]} <= saved.keys() else {}


def _initialized(caller: str) -> _SetUp:
    if _set_up is None:
        raise RuntimeError(f"amp.{caller}: amp.initialize must be called first")
    return _set_up


# ------------------------------------------------------------------------------------------------------------- checks
def _level(opt_level: str, keep_batchnorm_fp32: bool | str | None, loss_scale: float | str | None) -> _Level:
    level = _LEVELS.get(opt_level) if isinstance(opt_level, str) else None
    if level is None:
        raise ValueError(f"amp.initialize: opt_level must be one of {', '.join(_LEVELS)}, got {opt_level!r}")
    if keep_batchnorm_fp32 is not None:
        keep = str(keep_batchnorm_fp32)
        if keep not in ("True", "False"):
            raise ValueError(
                f"amp.initialize: keep_batchnorm_fp32 must be True, False or None, got {keep_batchnorm_fp32!r}"
            )
        if level.autocast:
            raise ValueError(
                f"amp.initialize: keep_batchnorm_fp32 must be None at {opt_level}, got {keep_batchnorm_fp32!r}; "
                f"{opt_level} keeps all weights in fp32"
            )
        level = level._replace(keep_batchnorm_fp32=keep == "True")
    if loss_scale is not None and loss_scale != "dynamic":
        loss_scale = _number("loss_scale", loss_scale, lambda x: 0 < x < math.inf, '"dynamic" or a positive number')
    return level if loss_scale is None else level._replace(loss_scale=loss_scale)


def _number(name: str, value: Any, is_right: Callable[[float], bool], expected: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not is_right(number):
        raise ValueError(f"amp.initialize: {name} must be {expected}, got {value!r}")
    return number


def _bound(name: str, value: Any, least: float) -> float:
    return _number(name, value, lambda x: x >= least, f"a number of at least {least:g}")


def _listed(name: str, value: Any, kind: type[T]) -> list[T]:
    values = value if isinstance(value, (list, tuple)) else [value]
    for v in values:
        if not isinstance(v, kind):
            raise TypeError(
                f"amp.initialize: {name} must be a torch {kind.__name__} or a list of them, got a {type(v).__name__}"
            )
    return list(values)


def _check_model(name: str, model: torch.nn.Module, cast: Collection[int]) -> None:
    """Raise an error if `model` cannot be used. `cast`: ids of parameters and buffers that may be fp16."""
    if isinstance(model, _PARALLEL):
        raise TypeError(
            f"amp.initialize: {name} must be a bare module, got a {type(model).__name__}; wrap the model after "
            "amp.initialize"
        )
    if "forward" in vars(model):
        raise TypeError(
            f"amp.initialize: {name} must have the forward of its class, got one that other code assigned to the "
            "object; call amp.initialize before that code runs"
        )
    for key, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        _check_fp32(f"{key} of {name}", tensor, cast)


def _check_fp32(name: str, tensor: Tensor, cast: Collection[int]) -> None:
    if tensor.dtype is torch.float16 and id(tensor) in cast:
        return
    if tensor.is_floating_point() and tensor.dtype is not torch.float32:
        raise TypeError(
            f"amp.initialize: {name} must be float32 at every opt_level, got {tensor.dtype}; remove your own casts, "
            "amp.initialize makes those that are needed"
        )


def _check_optimizer(name: str, optimizer: torch.optim.Optimizer, cast: Collection[int]) -> None:
    """Raise an error if `optimizer` cannot be used. `cast`: ids of parameters that may be fp16."""
    if not isinstance(optimizer, FusedOptimizer) and type(optimizer) not in _REPLACED:
        raise TypeError(
            f"amp.initialize: {name} must be an SGD, RMSprop, Adam or AdamW of torch.optim or one of "
            f"amp_kernels.optim, got a {type(optimizer).__module__}.{type(optimizer).__name__}"
        )
    step = vars(optimizer).get("step")
    if step is not None and not getattr(step, "__globals__", {}).get("__name__", "").startswith("torch."):
        raise TypeError(
            f"amp.initialize: {name} must have the step of its class, or a wrapper of it from torch, got one that "
            "other code assigned to the object; call amp.initialize before that code runs"
        )
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise ValueError(f"amp.initialize: {name} must not be differentiable, got differentiable=True")
        for i, p in enumerate(group["params"]):
            _check_fp32(f"parameter {i} of {name}", p, cast)


def _check_loss(
    loss: Any, optimizers: Any, loss_id: int, unknown: Mapping[str, Any]
) -> tuple[list[GradScaler], list[FusedOptimizer], list[Tensor]]:
    """Check the arguments of `scale_loss`. Return the loss scales, the optimizers as a list, and their parameters."""
    set_up = _initialized("scale_loss")
    known, scalers = set_up.optimizers, set_up.scalers
    if unknown:
        raise TypeError(
            f"amp.scale_loss: arguments must be loss, optimizers and loss_id, got {', '.join(unknown)}; remove these "
            "arguments; if they delay unscaling, none is needed: gradients of several losses are added up unscaled"
        )
    if not isinstance(loss, Tensor):
        raise TypeError(f"amp.scale_loss: loss must be a Tensor, got a {type(loss).__name__}")
    if not isinstance(loss_id, int) or not 0 <= loss_id < len(scalers):
        raise ValueError(
            f"amp.scale_loss: loss_id must be from 0 to {len(scalers) - 1}, got {loss_id!r}; for more losses pass a "
            "larger num_losses to amp.initialize"
        )
    fused = list(dict.fromkeys(optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]))
    for optimizer in fused:
        if not any(optimizer is other for other in known):
            raise TypeError(
                "amp.scale_loss: optimizers must be among those that the last amp.initialize returned, got another "
                f"{type(optimizer).__name__}; pass all models and optimizers to one call of amp.initialize"
            )
    params = [p for optimizer in fused for p in master_params(optimizer)]
    if len(set(params)) < len(params):
        raise ValueError(
            "amp.scale_loss: optimizers must not share parameters, got one parameter in two of them; its gradient "
            "would be unscaled twice"
        )
    return scalers, fused, params


# ------------------------------------------------------------------------------------------------------------- set-up
def _scaler(device: str, loss_scale: float | str, least: float, most: float) -> GradScaler:
    if loss_scale == "dynamic":
        return GradScaler(device, min_scale=least, max_scale=most)  # the default factors and interval equal Apex's
    scale = float(loss_scale)
    return GradScaler(device, scale, min_scale=scale, max_scale=scale, enabled=scale != 1)


def _summary(opt_level: str, level: _Level, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    weights = "fp16" if level.dtype is torch.float16 else "fp32"
    norms = " (batch norms fp32)" if weights == "fp16" and level.keep_batchnorm_fp32 else ""
    replaced = [f"{_REPLACED[type(o)].__name__} for {type(o).__name__}" for o in optimizers if type(o) in _REPLACED]
    return (
        f"amp_kernels.amp {opt_level}: weights {weights}{norms}, "
        f"forward {'under autocast' if level.autocast else weights}, loss scale {level.loss_scale}"
        f"{'; ' if replaced else ''}{', '.join(replaced)}"
    )


def _cast_weights(model: torch.nn.Module, level: _Level, optimizers: Mapping[int, FusedOptimizer]) -> None:
    """Cast a model to the level's dtypes. Parameters stay the same objects, since optimizers hold them.

    `optimizers`, by ids of parameters, keep the masters, which the parameters get if they become fp32 again.
    """
    for module in model.modules():
        dtype = torch.float32 if level.keep_batchnorm_fp32 and isinstance(module, _BATCH_NORMS) else level.dtype
        is_changed = False
        for p in module.parameters(recurse=False):
            if p.is_floating_point() and p.dtype is not dtype:
                keeper = optimizers.get(id(p)) if p.dtype is torch.float16 else None
                p.grad, p.data, is_changed = None, p.data.to(dtype) if keeper is None else keeper.master(p), True
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and buffer.dtype is not dtype:
                setattr(module, name, buffer.to(dtype))
        if is_changed and isinstance(module, torch.nn.RNNBase):
            module.flatten_parameters()  # into one block of memory, for cuDNN


def _ours(optimizer: torch.optim.Optimizer) -> FusedOptimizer:
    """Turn a torch optimizer into a fused one: the same object with the same groups, since schedulers hold them."""
    if not isinstance(optimizer, FusedOptimizer):
        saved, groups = optimizer.state_dict(), optimizer.param_groups
        optimizer.__class__ = _REPLACED[type(optimizer)]
        assert isinstance(optimizer, FusedOptimizer)
        is_scheduled = optimizer.__dict__.pop("step", None) is not None  # torch's step, which a scheduler has wrapped
        for group in groups:  # torch's optimizer may have loaded a state dict of ours
            group.pop("state_dtype", None)
        optimizer._setup(max_grad_norm=None, state_dtype=torch.float32, foreach=None, fused=None)
        optimizer.load_state_dict(saved)
        for group, loaded in zip(groups, optimizer.param_groups, strict=True):
            group.update(loaded)
        optimizer.param_groups = groups
        if is_scheduled:
            _Idle(optimizer)
    return optimizer


class _Idle(torch.optim.lr_scheduler.LRScheduler):
    """Wraps the step of an optimizer. A scheduler that was made before would else warn that it was overridden."""

    def step(self, epoch: int | None = None) -> None:
        pass


# ------------------------------------------------------------------------------------------------------------ forward
@functools.cache
def _casting(model_class: Any, dtype: torch.dtype, autocast: bool) -> Any:
    """Return a subclass of `model_class` whose forward casts.

    A forward that is assigned to a model would be bound to that model. Copies of the model, and the replicas that
    DataParallel makes, would then compute with the weights of the original.
    """

    @functools.wraps(model_class.forward)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not autocast:
            output = model_class.forward(self, *_cast(args, dtype), **_cast(kwargs, dtype))
            return _cast(output, torch.float32)
        # Replicas of DataParallel have no parameters: an argument decides.
        with torch.autocast(_device_type(itertools.chain(self.parameters(), args, kwargs.values())), torch.float16):
            return _cast(model_class.forward(self, *args, **kwargs), torch.float32)

    members = {"forward": forward, "__module__": model_class.__module__, _PLAIN_CLASS: model_class}
    return type(model_class.__name__, (model_class,), members)


def _plain_class(model: torch.nn.Module) -> Any:
    """Return the class that a model had before `initialize`."""
    return vars(type(model)).get(_PLAIN_CLASS, type(model))


def _device_type(values: Iterable[Any]) -> str:
    return next((value.device.type for value in values if isinstance(value, Tensor)), "cpu")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast floating-point tensors, also in dicts, lists and tuples. Return `value` itself if there is none to cast."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (dict, list)):
        result = value
        for key, member in value.items() if isinstance(value, dict) else enumerate(value):
            new = _cast(member, dtype)
            if new is not member:
                result = copy.copy(value) if result is value else result
                result[key] = new
        return result
    if isinstance(value, tuple):
        members = [_cast(v, dtype) for v in value]
        if all(map(operator.is_, members, value)):
            return value
        return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)
    # If fp16 tensors in another object were passed on, the loss would be computed in fp16, and nobody would notice.
    seen: set[int] = set()
    for name, held in _attributes(value):
        if any(t.is_floating_point() and t.dtype is not dtype for t in _tensors_in(held, seen)):
            raise TypeError(
                f"amp: tensors inside a {type(value).__name__} must be {dtype}, got another dtype in {name}; cast them "
                "yourself, or put them into a tuple, list or dict, where they are cast"
            )
    return value


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a dataclass or of an object with a method `to`, except of a module."""
    if isinstance(value, torch.nn.Module) or not (dataclasses.is_dataclass(value) or hasattr(value, "to")):
        return
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            yield name, getattr(value, f"_{kind.__name__.lstrip('_')}{name}" if is_private else name, None)


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors that `_cast` would find. `seen` has the ids of visited objects, which may form cycles."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(member, seen)
    else:
        for _, held in _attributes(value):
            yield from _tensors_in(held, seen)


# ---------------------------------------------------------------------------------------------------- a training step
def _unscale(scaler: GradScaler, optimizers: Sequence[FusedOptimizer], params: Sequence[Tensor]) -> None:
    grads = [(p, p.grad) for p in params if p.grad is not None]
    if not grads:
        raise RuntimeError(
            "amp.scale_loss: backward() of the scaled loss must run inside the with block and reach parameters of the "
            "optimizers, got no gradient"
        )
    for p, grad in grads:
        if grad.dtype is torch.float16:
            p.grad_dtype = None  # allows a gradient of any dtype
            p.grad = grad.float()  # in fp16, unscaling would round values below 2^-25 to 0
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    found_inf = scaler._found_inf()
    assert found_inf is not None  # there was a gradient
    for optimizer in optimizers:
        # `step()` reads the attribute `found_inf`, as under torch's scaler. It must not be the scaler's own flag, since
        # the next check clears that flag.
        earlier = optimizer.__dict__.get("found_inf")
        optimizer.found_inf = found_inf.clone() if earlier is None else found_inf + earlier
        own = next((p.grad for p in master_params(optimizer) if p.grad is not None), None)
        if own is not None:
            _scaled[own] = True
    scaler.update()


def _take_verdict(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Remove and return the `found_inf` that `_unscale` set for the next step. None if there is none."""
    return optimizer.__dict__.pop("found_inf", None)


def _is_under_a_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` was called by a scaler of the user. It sets `grad_scale` and `found_inf`, and deletes both."""
    return "grad_scale" in vars(optimizer)


def _has_scaled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether gradients of the last `scale_loss` block are still there, perhaps with others added to them."""
    return any(p.grad is not None and p.grad in _scaled for p in master_params(optimizer))


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Check the gradients of this step if those that `scale_loss` has checked were thrown away by `zero_grad`.

    Without this an overflow in the block would skip a step without `scale_loss`.
    """
    if "found_inf" in vars(optimizer) and not _is_under_a_scaler(optimizer) and not _has_scaled(optimizer):
        assert isinstance(optimizer, FusedOptimizer)
        optimizer.found_inf = optimizer._check(None).found_inf


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Forget the verdict of this step, and warn once if its gradients do not come from `scale_loss`."""
    if _is_under_a_scaler(optimizer) or _take_verdict(optimizer) is not None or _set_up is None:
        return
    if not _set_up.warns_of_unscaled or all(optimizer is not other for other in _set_up.optimizers):
        return
    if any(p.grad is not None for p in master_params(optimizer)) and not _has_scaled(optimizer):
        _set_up.warns_of_unscaled = False
        warnings.warn(
            f"amp: {type(optimizer).__name__}.step() took gradients that do not come from amp.scale_loss, so the loss "
            "scale is 1, and gradients below 6e-8 become 0 in fp16; write `with amp.scale_loss(loss, optimizer) as "
            "scaled_loss: scaled_loss.backward()`, or pass loss_scale=1 to amp.initialize",
            stacklevel=3,
        )
