"""A learning rate scheduler that does not count skipped steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ._base import FusedOptimizer
from ._wrappers import wrapped


class SkipAwareScheduler(LRScheduler):
    """Steps a learning rate scheduler only for steps of the optimizer that a scaler did not skip.

    torch's schedulers count skipped steps, since a fused step under a scaler skips on the device. This class asks the
    device, and the host does not wait for the answer. Each call of `step` starts a copy of the verdict on the last
    optimizer step, and steps the scheduler if the verdict before it was "not skipped". So under a scaler the learning
    rate comes one iteration late: optimizer steps 0 and 1 both have the first learning rate, and step n + 1 has the one
    that the scheduler gives after n steps. This is so on every device, for equal results. Without a scaler there is no
    verdict, and nothing is late.

    On a GPU the host runs at most one iteration ahead of the device, since each call needs the verdict of the previous
    iteration.

    Args:
        scheduler: A scheduler of `torch.optim.lr_scheduler`, except ReduceLROnPlateau. Its optimizer must be one of
            `amp_kernels.optim`, or wrap one.

    Raises:
        TypeError: `scheduler` is not such a scheduler, or its optimizer is not one of `amp_kernels.optim`.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = amp_kernels.optim.FusedSGD([weight], lr=1.0)
        >>> scaler = amp_kernels.GradScaler("cpu")
        >>> scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        >>> scheduler = amp_kernels.optim.SkipAwareScheduler(scheduler)
        >>> for factor in (1.0, float("inf"), 1.0, 1.0):
        ...     optimizer.zero_grad()
        ...     scaler.scale((weight * factor).sum()).backward()
        ...     scaler.step(optimizer)
        ...     scaler.update()
        ...     scheduler.step()
        ...     print(scheduler.get_last_lr())
        [1.0]
        [0.5]
        [0.5]
        [0.25]
        >>> saved = scheduler.state_dict()
        >>> saved["was_skipped"]  # the last step, which is not counted yet
        False
        >>> scheduler.load_state_dict(saved)
    """

    def __init__(self, scheduler: LRScheduler) -> None:  # not LRScheduler's, which sets the learning rate
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError(
                "SkipAwareScheduler: scheduler must be one of torch.optim.lr_scheduler that counts steps, got a "
                f"{type(scheduler).__name__}"
            )
        optimizer = wrapped(scheduler.optimizer)
        if not isinstance(optimizer, FusedOptimizer):
            raise TypeError(
                "SkipAwareScheduler: the optimizer of scheduler must be one of amp_kernels.optim, got a "
                f"{type(optimizer).__name__}; torch's scaler and scheduler need no such help there, since that scaler "
                "decides on the host: step the scheduler if scaler.get_scale() did not fall"
            )
        self.scheduler = scheduler
        self.optimizer = scheduler.optimizer
        # The verdict that the next call acts on: waits for a copy, and tells whether the step was skipped.
        self._was_skipped: Callable[[], bool] | None = None

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """Number of steps of the scheduler."""
        return self.scheduler.last_epoch

    def get_last_lr(self) -> list[Any]:
        """Return the learning rates that the scheduler has set, one for each parameter group.

        Returns:
            One float or tensor for each group.
        """
        return self.scheduler.get_last_lr()

    def step(self, epoch: int | None = None) -> None:
        """Step the scheduler if the step before the last one was not skipped. Call it after each optimizer step.

        Args:
            epoch: Must be None, as torch deprecated it.

        Raises:
            ValueError: `epoch` is not None.
        """
        if epoch is not None:
            raise ValueError(f"SkipAwareScheduler.step: epoch must be None, got {epoch!r}")
        before, self._was_skipped = self._was_skipped, None
        found_inf = wrapped(self.optimizer)._last_found_inf
        if found_inf is not None:
            self._was_skipped = _read_later(found_inf)
        if before is not None and not before():
            self.scheduler.step()
        if found_inf is None:  # without a scaler no step is skipped
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler, and the verdict that the next step acts on. Waits for the device.

        Returns:
            A dict of plain values.
        """
        return {
            "scheduler": self.scheduler.state_dict(),
            "was_skipped": None if self._was_skipped is None else self._was_skipped(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Args:
            state_dict: A state dict of this class.

        Raises:
            ValueError: `state_dict` is of another scheduler. Nothing was loaded.
        """
        if set(state_dict) != {"scheduler", "was_skipped"}:
            raise ValueError(
                "SkipAwareScheduler: state_dict must have the keys scheduler and was_skipped, got "
                f"{', '.join(map(str, state_dict))}; load the state of a plain scheduler into `self.scheduler`"
            )
        self.scheduler.load_state_dict(state_dict["scheduler"])
        was_skipped = state_dict["was_skipped"]
        self._was_skipped = None if was_skipped is None else lambda: was_skipped


def _read_later(found_inf: Tensor) -> Callable[[], bool]:
    """Copies a flag to the host without waiting. Returns a function that waits for the copy and reads it."""
    if found_inf.device.type == "cpu":
        was_skipped = bool(found_inf)
        return lambda: was_skipped
    copied = found_inf.to("cpu", non_blocking=True)
    is_copied = torch.Event(found_inf.device)
    is_copied.record(torch.accelerator.current_stream(found_inf.device))

    def read() -> bool:
        is_copied.synchronize()
        return bool(copied)

    return read
