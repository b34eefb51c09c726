"""`apex.amp` for scripts that were written for it: `initialize`, `scale_loss`, `master_params`, checkpoints.

NVIDIA removed it from Apex in 2025. ``from amp_kernels import amp`` instead of ``from apex import amp`` runs such a
script on torch.autocast, `amp_kernels.GradScaler` and `amp_kernels.optim`:

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    ...
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()

| level | weights | forward | loss scale |
|---|---|---|---|
| O0 | fp32 | fp32 | 1 |
| O1 | fp32 | under torch.autocast | dynamic |
| O2 | fp16, batch norms fp32 | inputs are cast to fp16 | dynamic |
| O3 | fp16 | inputs are cast to fp16 | 1 |

Outputs are fp32 at every level. Elsewhere than in Apex:

- fp16 weights have fp32 masters at O3 too, which cost 2 bytes a parameter.
- Nothing waits for the device, so an overflow is not printed.
- O1 covers what runs inside ``model(...)``; Apex patched torch's functions for the whole process.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .grad_scaler import GradScaler
from .optim import FusedAdam, FusedAdamW, FusedRMSprop, FusedSGD
from .optim._base import FusedOptimizer

__all__ = ["initialize", "load_state_dict", "master_params", "scale_loss", "state_dict"]

T = TypeVar("T")

_REPLACED: dict[type, type[FusedOptimizer]] = {
    torch.optim.SGD: FusedSGD,
    torch.optim.RMSprop: FusedRMSprop,
    torch.optim.Adam: FusedAdam,
    torch.optim.AdamW: FusedAdamW,
}
_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
_PARALLEL = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
# How a dynamic scale moves in Apex, and by torch's defaults too.
_LOSS_SCALE: dict[str, Any] = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


class _Level(NamedTuple):
    dtype: torch.dtype  # of weights and inputs
    autocast: bool
    keep_batchnorm_fp32: bool
    loss_scale: float | str


_LEVELS = {
    "O0": _Level(torch.float32, False, False, 1.0),
    "O1": _Level(torch.float32, True, False, "dynamic"),
    "O2": _Level(torch.float16, False, True, "dynamic"),
    "O3": _Level(torch.float16, False, False, 1.0),
}


@dataclass(frozen=True)
class _Amp:
    """What `initialize` was given."""

    optimizers: list[FusedOptimizer]
    scalers: list[GradScaler]  # one for each loss


# Apex's functions take no handle, so one module holds what `initialize` set up, and can do so once.
_amp: _Amp | None = None


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
    """Prepares models and optimizers for mixed precision, in place; call it once, before DistributedDataParallel.

    Weights are cast in place, and ``forward`` of each model is wrapped. An optimizer of torch becomes ours: the same
    object, with its groups and state, so that learning rate schedulers go on. (One that was made before warns once that
    ``optimizer.step()`` has been overridden.)

    Args:
        models: a module, or a list of modules, of fp32 parameters and buffers.
        optimizers: an SGD, RMSprop, Adam or AdamW of torch.optim, or one of amp_kernels.optim, or a list of them; None
            for inference.
        opt_level: "O0", "O1", "O2" or "O3"; see the table of this module.
        keep_batchnorm_fp32: True or False (or "True", "False"), instead of the level's; at O1 it must be None.
        loss_scale: "dynamic", or a number (also as a string) that the scale stays at, instead of the level's. A scale
            of 1 checks no gradients; at any other a step whose gradients hold NaN or inf is skipped.
        num_losses: how many scales there are; `scale_loss` says by its `loss_id` which is meant.
        verbosity: 0 prints nothing, 1 a line about what was done.
        min_loss_scale, max_loss_scale: bounds of a dynamic scale, which starts at 65536, halves at an overflow and
            doubles after 2000 steps without one.

    Returns:
        `models` and `optimizers`, lists for lists; `models` alone if `optimizers` is None.

    Raises:
        RuntimeError: it was called before.
        TypeError, ValueError: an argument is none of these, a model is wrapped for data parallelism or not in fp32, or
            an optimizer is another one; nothing was modified.
    """
    global _amp
    if _amp is not None:
        raise RuntimeError(
            "amp.initialize: must be called once in a process, got a second call; pass all models and optimizers to "
            "the first, as lists"
        )
    if unknown:
        raise TypeError(
            "amp.initialize: arguments must be models, optimizers, opt_level, keep_batchnorm_fp32, loss_scale, "
            f"num_losses, verbosity, min_loss_scale or max_loss_scale, got {', '.join(unknown)}; leave it out"
        )
    level = _level(opt_level, keep_batchnorm_fp32, loss_scale)
    if not isinstance(num_losses, int) or num_losses < 1:
        raise ValueError(f"amp.initialize: num_losses must be an integer of at least 1, got {num_losses!r}")
    all_models = _listed("models", models, torch.nn.Module)
    all_optimizers = [] if optimizers is None else _listed("optimizers", optimizers, torch.optim.Optimizer)
    for i, model in enumerate(all_models):
        _check_model(i, model)
    for i, optimizer in enumerate(all_optimizers):
        _check_optimizer(i, optimizer)
    device = next((p.device.type for model in all_models for p in model.parameters()), "cpu")
    make_scaler = functools.partial(_scaler, device, level.loss_scale, min_loss_scale or 0.0, max_loss_scale)
    scalers = [make_scaler() for _ in range(num_losses)]
    if verbosity > 0 and not (dist.is_available() and dist.is_initialized() and dist.get_rank() != 0):
        print(_summary(opt_level, level, all_optimizers))

    for model in all_models:
        if level.dtype is torch.float16:
            _cast_weights(model, level.keep_batchnorm_fp32)
        wrapped = model.__dict__.get("forward")  # of a trainer; pickling a bound method would not end
        model.forward = functools.partial(_forward, model, wrapped, level.dtype, device if level.autocast else None)
    ours = [_ours(optimizer) for optimizer in all_optimizers]
    for optimizer in ours:
        optimizer.register_step_post_hook(_forget_verdict)
    _amp = _Amp(ours, scalers)
    return models if optimizers is None else (models, optimizers)


@contextlib.contextmanager
def scale_loss(loss: Tensor, optimizers: Any, loss_id: int = 0, **unknown: Any) -> Iterator[Tensor]:
    """Yields the scaled loss; when the block ends gradients are unscaled, in fp32, and the scale follows.

    ``step()`` of the optimizers then skips if NaN or inf was met, and may be preceded by clipping. Gradients that were
    there before stay and are added to, each loss unscaled by its own scale, so several blocks may come before a step;
    an overflow in any of them skips it. Nothing waits for the device.

    Args:
        loss: 0-dim, of any dtype; it is scaled in fp32.
        optimizers: one that `initialize` returned, or a list of them: those whose gradients the loss reaches.
        loss_id: which of the `num_losses` scales is meant, from 0.

    Raises:
        RuntimeError: `initialize` was not called, or the block made no gradients.
        TypeError, ValueError: an argument is none of these.
    """
    amp = _initialized("scale_loss")
    if unknown:
        raise TypeError(
            f"amp.scale_loss: arguments must be loss, optimizers and loss_id, got {', '.join(unknown)}; leave it out: "
            "gradients of several losses are unscaled and added up by themselves"
        )
    if not isinstance(loss_id, int) or not 0 <= loss_id < len(amp.scalers):
        raise ValueError(
            f"amp.scale_loss: loss_id must be from 0 to {len(amp.scalers) - 1}, got {loss_id!r}; give amp.initialize "
            "a larger num_losses for more"
        )
    ours = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    for optimizer in ours:
        if not any(optimizer is known for known in amp.optimizers):
            raise TypeError(
                "amp.scale_loss: optimizers must be some that amp.initialize returned, got another "
                f"{type(optimizer).__name__}"
            )
    scaler = amp.scalers[loss_id]
    if not scaler.is_enabled():
        yield loss.float()
        return
    params = [p for optimizer in ours for p in master_params(optimizer)]
    # Copies, since DistributedDataParallel may write the next gradient where the last one lies.
    earlier = [None if p.grad is None else p.grad.clone() for p in params]
    for p in params:
        p.grad = None
    try:
        yield scaler.scale(loss.float())
        _unscale(scaler, ours, params)
    except BaseException:
        for p, grad in zip(params, earlier, strict=True):
            p.grad = grad  # what the block made is scaled still
        raise
    for p, grad in zip(params, earlier, strict=True):
        if grad is not None:
            p.grad = grad if p.grad is None else p.grad.add_(grad)


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The parameters of `optimizer`, for clipping between `scale_loss` and the step.

    fp16 parameters are their own masters: the ``grad`` of one is fp32 then, ``optimizer.master(param)`` its fp32 value.
    """
    return (p for group in optimizer.param_groups for p in group["params"])


def state_dict() -> dict[str, Any]:
    """``{"loss_scaler0": ..., ...}``, the state dict of each loss's `GradScaler`. Waits for the device.

    Raises:
        RuntimeError: `initialize` was not called.
    """
    return {f"loss_scaler{i}": s.state_dict() for i, s in enumerate(_initialized("state_dict").scalers)}


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Loads what `state_dict` returned, or apex.amp's of the same name did.

    Raises:
        RuntimeError: `initialize` was not called.
        ValueError: the state dict is of other losses, or of a scale of 1 where another one is needed; nothing was
            loaded.
    """
    scalers = _initialized("load_state_dict").scalers
    expected = [f"loss_scaler{i}" for i in range(len(scalers))]
    lacking = [name for name, s in zip(expected, scalers, strict=True) if s.is_enabled() and not state_dict.get(name)]
    if sorted(state_dict) != sorted(expected) or lacking:
        raise ValueError(
            f"amp.load_state_dict: state_dict must hold the scale of {', '.join(lacking or expected)}, got "
            f"{', '.join(name for name in state_dict if state_dict[name]) or 'none'}; call amp.initialize with the "
            "loss_scale and num_losses of the run that saved it"
        )
    for name, scaler in zip(expected, scalers, strict=True):
        scaler.load_state_dict(_of_apex(state_dict[name]) if "loss_scale" in state_dict[name] else state_dict[name])


def _of_apex(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {"scale": saved["loss_scale"], "_growth_tracker": saved["unskipped"], **_LOSS_SCALE}


def _initialized(caller: str) -> _Amp:
    if _amp is None:
        raise RuntimeError(f"amp.{caller}: amp.initialize must be called before, got no call of it")
    return _amp


# ------------------------------------------------------------------------------------------------------------- checks
def _level(opt_level: str, keep_batchnorm_fp32: bool | str | None, loss_scale: float | str | None) -> _Level:
    level = _LEVELS.get(opt_level)
    if level is None:
        raise ValueError(f"amp.initialize: opt_level must be one of {', '.join(_LEVELS)}, got {opt_level!r}")
    if keep_batchnorm_fp32 is not None:
        keep = {True: True, False: False, "True": True, "False": False}.get(keep_batchnorm_fp32)
        if keep is None:
            raise ValueError(
                f"amp.initialize: keep_batchnorm_fp32 must be True, False or None, got {keep_batchnorm_fp32!r}"
            )
        if level.autocast:
            raise ValueError(
                f"amp.initialize: keep_batchnorm_fp32 must be None at {opt_level}, got {keep_batchnorm_fp32!r}; all "
                "weights stay in fp32 there"
            )
        level = level._replace(keep_batchnorm_fp32=keep)
    if loss_scale is not None and loss_scale != "dynamic":
        number = _number(loss_scale)
        if number is None or not 0 < number < math.inf:
            raise ValueError(f'amp.initialize: loss_scale must be "dynamic" or a positive number, got {loss_scale!r}')
        loss_scale = number
    return level if loss_scale is None else level._replace(loss_scale=loss_scale)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _listed(name: str, value: Any, kind: type[T]) -> list[T]:
    values = value if isinstance(value, (list, tuple)) else [value]
    for v in values:
        if not isinstance(v, kind):
            raise TypeError(
                f"amp.initialize: {name} must be a torch {kind.__name__} or a list of them, got a {type(v).__name__}"
            )
    return list(values)


def _check_model(index: int, model: torch.nn.Module) -> None:
    if isinstance(model, _PARALLEL):
        raise TypeError(
            f"amp.initialize: models[{index}] must be a bare module, got a {type(model).__name__}; wrap it after "
            "amp.initialize"
        )
    for tensors in (model.named_parameters(), model.named_buffers()):
        for name, t in tensors:
            if t.is_floating_point() and t.dtype is not torch.float32:
                raise TypeError(
                    f"amp.initialize: {name} of models[{index}] must be float32 at every level, got {t.dtype}; leave "
                    "the casts to amp.initialize"
                )


def _check_optimizer(index: int, optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, FusedOptimizer) and type(optimizer) not in _REPLACED:
        raise TypeError(
            f"amp.initialize: optimizers[{index}] must be an SGD, RMSprop, Adam or AdamW of torch.optim or one of "
            f"amp_kernels.optim, got a {type(optimizer).__module__}.{type(optimizer).__name__}"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(f"amp.initialize: optimizers[{index}] must not be differentiable, got differentiable=True")


# ------------------------------------------------------------------------------------------------------------- set-up
def _scaler(device: str, loss_scale: float | str, least: float, most: float) -> GradScaler:
    if loss_scale == "dynamic":
        return GradScaler(device, min_scale=least, max_scale=most, **_LOSS_SCALE)
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


def _cast_weights(model: torch.nn.Module, keep_batchnorm_fp32: bool) -> None:
    """To fp16. Parameters keep their identity: optimizers hold them."""
    for module in model.modules():
        if keep_batchnorm_fp32 and isinstance(module, _BATCH_NORMS):
            continue
        for p in module.parameters(recurse=False):
            if p.is_floating_point():
                p.grad, p.data = None, p.data.half()
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.half())
        if isinstance(module, torch.nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants them in one piece, which casts of their own are not


def _ours(optimizer: torch.optim.Optimizer) -> FusedOptimizer:
    """An optimizer of torch becomes one of ours: the same object, since schedulers hold it."""
    if not isinstance(optimizer, FusedOptimizer):
        saved = optimizer.state_dict()
        optimizer.__class__ = _REPLACED[type(optimizer)]
        assert isinstance(optimizer, FusedOptimizer)
        optimizer.__dict__.pop("step", None)  # a scheduler's, around torch's step
        optimizer._setup(max_grad_norm=None, foreach=None, fused=None)
        optimizer.load_state_dict(saved)
    return optimizer


# ------------------------------------------------------------------------------------------------------- an iteration
def _forward(
    model: torch.nn.Module, wrapped: Any, dtype: torch.dtype, autocast: str | None, *args: Any, **kwargs: Any
) -> Any:
    forward = wrapped or functools.partial(type(model).forward, model)
    if autocast is None:
        return _cast(forward(*_cast(args, dtype), **_cast(kwargs, dtype)), torch.float32)
    with torch.autocast(autocast, torch.float16):
        return _cast(forward(*args, **kwargs), torch.float32)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in `dtype`, also in tuples, lists, dicts and what has a method `to`."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if hasattr(value, "to"):  # a packed sequence, a batch of one's own
        return value.to(dtype)
    if isinstance(value, dict):
        return type(value)({key: _cast(v, dtype) for key, v in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(v, dtype) for v in value))
    return type(value)(_cast(v, dtype) for v in value) if isinstance(value, (tuple, list)) else value


def _unscale(scaler: GradScaler, optimizers: Sequence[FusedOptimizer], params: Sequence[Tensor]) -> None:
    grads = [(p, p.grad) for p in params if p.grad is not None]
    if not grads:
        raise RuntimeError(
            "amp.scale_loss: backward() of the scaled loss must run inside the block and reach parameters of the "
            "optimizers, got no gradient"
        )
    for p, grad in grads:
        if grad.dtype is torch.float16:
            p.grad_dtype = None  # any may be assigned
            p.grad = grad.float()  # unscaled in fp16, what is below 2^-25 would be 0 again
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    found_inf = scaler._found_inf()
    assert found_inf is not None  # there was a gradient
    for optimizer in optimizers:
        # Where torch's scaler puts it; `_forget_verdict` takes it away after the step. A copy or a sum, since the next
        # check clears the flag.
        earlier = optimizer.__dict__.get("found_inf")
        optimizer.found_inf = found_inf.clone() if earlier is None else found_inf + earlier
    scaler.update()


def _forget_verdict(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    optimizer.__dict__.pop("found_inf", None)
