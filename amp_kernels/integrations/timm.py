"""The fused optimizers in timm's registry, timm's scaler with `amp_kernels.GradScaler`, and its averages of masters.

Importing this module registers ``fused-sgd``, ``fused-momentum``, ``fused-rmsprop``, ``fused-adam`` and
``fused-adamw``. Arguments, parameter groups and defaults are those of timm's names without ``fused-``. There are two
more arguments, `max_grad_norm` and `state_dtype`.

Examples:
    >>> import timm, amp_kernels.integrations.timm
    >>> model = timm.create_model("resnet10t", num_classes=10).bfloat16()
    >>> optimizer = timm.optim.create_optimizer_v2(model, "fused-adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
    >>> type(optimizer).__name__
    'FusedAdamW'
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from timm import utils
from timm.optim import get_optimizer_info

# `timm.optim` exports the functions that read its registry, and no function that adds to it.
from timm.optim._optim_factory import default_registry
from torch import Tensor, nn

from ..grad_scaler import GradScaler
from ..optim import FusedAdam, FusedAdamW, FusedRMSprop, FusedSGD, ema_
from ..optim._base import FusedOptimizer

__all__ = ["ModelEma", "NativeScaler"]

# timm's names, and the optimizers that take their place. In timm "sgd" has Nesterov momentum, "momentum" has not.
_COUNTERPARTS = {
    "sgd": FusedSGD,
    "momentum": FusedSGD,
    "rmsprop": FusedRMSprop,
    "adam": FusedAdam,
    "adamw": FusedAdamW,
}
# The options of ModelEmaV3 that ModelEma takes. The others choose a dtype, a device and how to compute.
_EMA_OPTIONS = (
    "exclude_buffers", "min_decay", "update_after_step", "use_warmup", "warmup_gamma", "warmup_power"
)  # fmt: skip


class NativeScaler(utils.NativeScaler):
    """`timm.utils.NativeScaler` with `amp_kernels.GradScaler`, for fp16 weights and steps without waiting.

    Args:
        device: The type of the device that the loss is on, such as "cuda" or "cpu".
        **options: Options of `amp_kernels.GradScaler`, such as `init_scale`.

    Examples:
        >>> import amp_kernels.integrations.timm
        >>> scaler = amp_kernels.integrations.timm.NativeScaler("cpu", init_scale=2.0**10)
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        >>> optimizer = amp_kernels.optim.FusedSGD([weight], lr=0.5, max_grad_norm=100.0)
        >>> scaler(weight.float().sum(), optimizer)
        >>> weight.data
        tensor([0.5000, 0.5000], dtype=torch.float16)
    """

    def __init__(self, device: str = "cuda", **options: Any) -> None:
        # The only attribute of timm's class. Its constructor would make a scaler of torch.
        self._scaler = GradScaler(device, **options)


class ModelEma(utils.ModelEmaV3):
    """`timm.utils.ModelEmaV3` that averages the fp32 masters of a fused optimizer.

    It calls `amp_kernels.optim.ema_`, so nothing changes after a step that a scaler skipped. ``ema.module`` is the
    averaged model, in fp32, on the device of the model. `timm.utils.CheckpointSaver` saves it as ``state_dict_ema``.

    Args:
        model: The model, before it is wrapped by DistributedDataParallel or compiled. The averages start at its
            weights.
        optimizer: The optimizer of `amp_kernels.optim` that trains the model. A parameter that it does not train is
            averaged as `ModelEmaV3` does it.
        decay: The share of the old average that a step keeps, from 0 to 1.
        **options: `min_decay`, `update_after_step`, `use_warmup`, `warmup_gamma`, `warmup_power` and `exclude_buffers`,
            as in `ModelEmaV3`.

    Raises:
        TypeError: `optimizer` is not from `amp_kernels.optim`, or there is another option.

    Examples:
        >>> import amp_kernels.integrations.timm
        >>> model = torch.nn.Linear(1, 1, bias=False).bfloat16()
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> optimizer = amp_kernels.optim.FusedSGD(model.parameters(), lr=1.0)
        >>> ema = amp_kernels.integrations.timm.ModelEma(model, optimizer, decay=0.75)
        >>> model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> ema.update(model)
        >>> ema.module.weight.item()
        -0.25
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, decay: float = 0.9999, **options: Any
    ) -> None:
        if not isinstance(optimizer, FusedOptimizer):
            raise TypeError(
                f"ModelEma: optimizer must be one of amp_kernels.optim, got a {type(optimizer).__name__}; for other "
                "optimizers use timm.utils.ModelEmaV3"
            )
        unknown = ", ".join(name for name in options if name not in _EMA_OPTIONS)
        if unknown:
            raise TypeError(f"ModelEma: options must be {', '.join(_EMA_OPTIONS)}, got {unknown}")
        super().__init__(model, decay=decay, dtype=torch.float32, **options)
        self.optimizer = optimizer

    @torch.no_grad()
    def update(self, model: nn.Module, step: int | None = None) -> None:
        """Move the averages towards the masters. Call it after each step of the optimizer.

        Args:
            model: The model that the optimizer trains, or a wrapper around it.
            step: The number of the step, for the warm-up of the decay, as in `ModelEmaV3`.

        Raises:
            ValueError: The optimizer trains a parameter that `model` does not hold. Or `model` has other shapes or
                another number of parameters and buffers than the averaged model. Nothing was modified.
        """
        decay = self.get_decay(step)
        if _shapes(model) != _shapes(self.module):
            raise ValueError(
                "ModelEma.update: model must have the parameters and buffers of the averaged model, got one with other "
                "shapes or another number of them; pass the model that the optimizer trains"
            )
        # By position, as in ModelEmaV3: wrappers of the model put a prefix before its names.
        averages = {id(p): a for p, a in zip(model.parameters(), self.module.parameters(), strict=True)}
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        if any(id(p) not in averages for p in trained):
            raise ValueError(
                "ModelEma.update: model must hold all parameters of the optimizer, got one that lacks some"
            )
        ema_([averages.pop(id(p)) for p in trained], self.optimizer, decay)
        for p in model.parameters():
            if id(p) in averages:
                _follow(averages[id(p)], p, decay)
        for average, buffer in zip(self.module.buffers(), model.buffers(), strict=True):
            _follow(average, buffer, 0.0 if self.exclude_buffers else decay)


def _shapes(model: nn.Module) -> tuple[list[torch.Size], list[torch.Size]]:
    return [p.shape for p in model.parameters()], [b.shape for b in model.buffers()]


def _follow(average: Tensor, value: Tensor, decay: float) -> None:
    if average.is_floating_point() and decay > 0:
        average.lerp_(value.to(average.dtype), 1 - decay)
    else:
        average.copy_(value)


def _accept_underscore(create: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Wraps the registry's `create_optimizer`, so that ``fused_adamw`` is ``fused-adamw``, and not torch's AdamW."""

    @functools.wraps(create)
    def create_optimizer(model_or_params: Any, opt: str, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        prefix, fused, name = opt.lower().rpartition("fused_")
        is_ours = bool(fused) and name in _COUNTERPARTS
        return create(model_or_params, f"{prefix}fused-{name}" if is_ours else opt, *args, **kwargs)

    return create_optimizer


def _register() -> None:
    for theirs, ours in _COUNTERPARTS.items():
        info = dataclasses.replace(
            get_optimizer_info(theirs),
            name=f"fused-{theirs}",
            opt_class=ours,
            description=f"amp_kernels.optim.{ours.__name__}, with fp32 masters of 16-bit weights",
        )
        default_registry.register(info)
        default_registry.register_alias(f"fused_{theirs}", info.name)
    default_registry.create_optimizer = _accept_underscore(default_registry.create_optimizer)


_register()
