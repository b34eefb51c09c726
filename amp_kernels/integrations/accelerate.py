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

    Only `FusedAccelerator` takes this handler. The other arguments are those of `amp_kernels.GradScaler`.

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

    accelerate wraps `optimizer.step`, and a wrapped step makes the scaler wait for the device. This class does not. The
    host waits only when `step_was_skipped` is read.

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
        """Step unless gradients are being accumulated, and adapt the scale. Under a scaler `closure` must be None."""
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
    step of a fused optimizer then does not wait for the device, except with FSDP. FSDP1 keeps its own scaler.

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
                own = dict(handler.__dict__)
                # accelerate looks up the exact class of a handler, so it refuses a subclass.
                theirs = {field.name: own.pop(field.name) for field in fields(_GradScalerKwargs)}
                handlers[i] = _GradScalerKwargs(**theirs)
        super().__init__(*args, kwargs_handlers=handlers, **kwargs)
        self.scaler = fused_scaler(self, **own)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wrap an optimizer as in accelerate, or in a `FusedAcceleratedOptimizer` if it is fused, under a scaler."""
        return super().prepare_optimizer(accelerated(self, optimizer, device_placement), device_placement)


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

    Returns `optimizer` itself if it is not fused, if the accelerator has no scaler of amp_kernels, or if FSDP exchanges
    the parameters.
    """
    is_fsdp = accelerator.distributed_type == DistributedType.FSDP
    if is_fsdp or not isinstance(optimizer, FusedOptimizer) or not isinstance(accelerator.scaler, GradScaler):
        return optimizer
    placement = accelerator.device_placement if device_placement is None else device_placement
    prepared = FusedAcceleratedOptimizer(optimizer, placement, accelerator.scaler)
    # accelerate sets this mark on what it has prepared. It then does not wrap it again.
    prepared._is_accelerate_prepared = True
    return prepared
