"""accelerate: an Accelerator whose fp16 training uses `amp_kernels.GradScaler`, and does not wait in each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, KwargsHandler
from accelerate.utils import GradScalerKwargs as _GradScalerKwargs

from ..grad_scaler import GradScaler
from ..optim._base import FusedOptimizer

__all__ = ["FusedAcceleratedOptimizer", "FusedAccelerator", "FusedGradScalerKwargs"]


@dataclass
class FusedGradScalerKwargs(_GradScalerKwargs):
    """accelerate's `GradScalerKwargs` with `min_scale`, `max_scale` and `hysteresis` of `amp_kernels.GradScaler`.

    Only `FusedAccelerator` takes this handler. `FusedAccelerator` takes accelerate's own `GradScalerKwargs` too.

    Attributes:
        init_scale: As in accelerate.
        growth_factor: As in accelerate.
        backoff_factor: As in accelerate.
        growth_interval: As in accelerate.
        enabled: As in accelerate.
        min_scale: As in `amp_kernels.GradScaler`.
        max_scale: As in `amp_kernels.GradScaler`.
        hysteresis: As in `amp_kernels.GradScaler`.

    Examples:
        >>> from amp_kernels.integrations.accelerate import FusedGradScalerKwargs
        >>> FusedGradScalerKwargs(init_scale=1024.0, max_scale=32768.0).to_kwargs()
        {'init_scale': 1024.0, 'max_scale': 32768.0}
    """

    min_scale: float = 0.0
    max_scale: float = float("inf")
    hysteresis: int = 1


class FusedAcceleratedOptimizer(AcceleratedOptimizer):
    """The wrapper that `FusedAccelerator.prepare` puts around a fused optimizer. Its step does not wait.

    accelerate finds out whether a step was skipped by wrapping `optimizer.step`. A wrapped step makes the scaler wait
    for the device, and read and write the gradients once more. This class leaves the step as it is. The host waits
    only when `step_was_skipped` is read. A scheduler that was prepared too reads it in each of its steps.

    Args:
        optimizer: An optimizer of `amp_kernels.optim`.
        device_placement: As in accelerate.
        scaler: The scaler of the accelerator.

    Examples:
        >>> from accelerate import Accelerator
        >>> from amp_kernels.integrations.accelerate import FusedAcceleratedOptimizer
        >>> accelerator = Accelerator(cpu=True)
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = amp_kernels.optim.FusedSGD([weight], lr=0.5)
        >>> optimizer = FusedAcceleratedOptimizer(optimizer, scaler=amp_kernels.GradScaler("cpu"))
        >>> optimizer.scaler.scale(weight.sum() * float("inf")).backward()
        >>> optimizer.step()
        >>> optimizer.step_was_skipped, optimizer.scaler.get_scale()
        (True, 32768.0)
    """

    def __init__(self, optimizer: FusedOptimizer, device_placement: bool = True, scaler: Any = None) -> None:
        super().__init__(optimizer, device_placement)  # given a scaler, it would prepare to wrap optimizer.step
        self.scaler = scaler

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step unless gradients are being accumulated, and adapt the scale.

        Args:
            closure: Under a scaler it must be None, as in torch.

        Raises:
            RuntimeError: A closure was passed under a scaler.
        """
        if self.scaler is None or not self.gradient_state.sync_gradients:
            super().step(closure)
        else:
            self.scaler.step(self.optimizer, closure)
            self.scaler.update()

    @property
    def step_was_skipped(self) -> bool:
        """Whether a scaler skipped the last step. Reading it waits for the device."""
        return bool(self.optimizer.step_was_skipped)


class FusedAccelerator(Accelerator):
    """An `accelerate.Accelerator` for the optimizers of `amp_kernels.optim`.

    With `mixed_precision="fp16"` it scales losses by an `amp_kernels.GradScaler`, which takes fp16 weights too. The
    step of a fused optimizer then does not wait for the device. Everything else is as in accelerate. With FSDP and
    with other optimizers, steps are taken as accelerate takes them. FSDP1 keeps its own scaler.

    Args:
        *args: As in accelerate.
        kwargs_handlers: As in accelerate, or with a `FusedGradScalerKwargs` in place of a `GradScalerKwargs`.
        **kwargs: As in accelerate.

    Raises:
        TypeError: An option of the scaler has a wrong type.
        ValueError: An option of the scaler is out of its range, or there are two handlers of one kind.

    Examples:
        >>> from amp_kernels.integrations.accelerate import FusedAccelerator
        >>> accelerator = FusedAccelerator(cpu=True)
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = accelerator.prepare(amp_kernels.optim.FusedSGD([weight], lr=0.5))
        >>> accelerator.backward(weight.sum())
        >>> optimizer.step()
        >>> weight.data
        tensor([0.5000, 0.5000])
    """

    def __init__(self, *args: Any, kwargs_handlers: Iterable[KwargsHandler] | None = None, **kwargs: Any) -> None:
        handlers = list(kwargs_handlers or ())
        own: dict[str, Any] = {}
        for i, handler in enumerate(handlers):
            if isinstance(handler, FusedGradScalerKwargs):
                handlers[i], own = _split(handler)
        super().__init__(*args, kwargs_handlers=handlers, **kwargs)
        self.scaler = fused_scaler(self, **own)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wrap an optimizer, as in accelerate.

        Args:
            optimizer: Any optimizer.
            device_placement: As in accelerate.

        Returns:
            A `FusedAcceleratedOptimizer` if `optimizer` is fused and the accelerator has a scaler, otherwise what
                accelerate returns.
        """
        return super().prepare_optimizer(accelerated(self, optimizer, device_placement), device_placement)


def _split(handler: FusedGradScalerKwargs) -> tuple[_GradScalerKwargs, dict[str, Any]]:
    """Returns the handler that accelerate takes, and the options that it has no name for.

    accelerate looks up the exact class of a handler, so it refuses a subclass.
    """
    values = dict(handler.__dict__)
    theirs = {field.name: values.pop(field.name) for field in fields(_GradScalerKwargs)}
    return _GradScalerKwargs(**theirs), values


def fused_scaler(accelerator: Accelerator, **options: Any) -> Any:
    """Returns an `amp_kernels.GradScaler` with the options of the accelerator's scaler, and `options`.

    If the accelerator has no scaler, or a scaler of another kind (FSDP1, XLA), returns that.
    """
    scaler = accelerator.scaler
    if type(scaler) is not torch.amp.GradScaler:
        return scaler
    if not scaler.is_enabled():  # it has no options
        return GradScaler(accelerator.device.type, enabled=False)
    return GradScaler(
        accelerator.device.type,
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        **options,
    )


def accelerated(
    accelerator: Accelerator, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
) -> torch.optim.Optimizer:
    """Returns a `FusedAcceleratedOptimizer` around a fused optimizer, which `accelerator.prepare` leaves as it is.

    Returns `optimizer` itself if it is not fused, or if accelerate's own wrapper serves: there is no scaler of
    amp_kernels, or the model is FSDP's, whose preparation exchanges the parameters.
    """
    is_fsdp = accelerator.distributed_type == DistributedType.FSDP
    if is_fsdp or not isinstance(optimizer, FusedOptimizer) or not isinstance(accelerator.scaler, GradScaler):
        return optimizer
    placement = accelerator.device_placement if device_placement is None else device_placement
    prepared = FusedAcceleratedOptimizer(optimizer, placement, accelerator.scaler)
    # accelerate sets this mark on what it has prepared. It then does not wrap it again.
    prepared._is_accelerate_prepared = True
    return prepared
