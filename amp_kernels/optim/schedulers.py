"""A learning rate scheduler that does not count skipped steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ._base import FusedOptimizer
from ._wrappers import wrapped


class SkipAwareScheduler(LRScheduler):
    """Steps a learning rate scheduler only for steps of the optimizer that a scaler did not skip.

    torch's schedulers count skipped steps, since a fused step under a scaler skips on the device. Each call of `step`
    here starts to copy the verdict on the last optimizer step to the host. It then reads the verdict that the call
    before has copied, and steps the scheduler if that was "not skipped". So where the device decides, the learning rate
    comes one iteration late: optimizer steps 0 and 1 both have the first learning rate, and step n + 1 has the one that
    the scheduler gives after n steps. CPUs behave the same, so that results are equal.

    Without a scaler there is no verdict, and nothing is late. The same holds if a scaler decides on the host, as it
    does for a step that is overridden or wrapped.

    On a GPU the host runs at most one iteration ahead of the device, since each call needs the verdict of the previous
    iteration. To combine schedulers, wrap the result: `SkipAwareScheduler(SequentialLR(...))`.

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
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, (ReduceLROnPlateau, SkipAwareScheduler)):
            raise TypeError(
                "SkipAwareScheduler: scheduler must be one of torch.optim.lr_scheduler that counts steps, got a "
                f"{type(scheduler).__name__}"
            )
        optimizer = wrapped(scheduler.optimizer)
        if not isinstance(optimizer, FusedOptimizer):
            raise TypeError(
                "SkipAwareScheduler: the optimizer of scheduler must be one of amp_kernels.optim, got a "
                f"{type(optimizer).__name__}; if amp.initialize replaces the optimizer, call it before"
            )
        self.scheduler = scheduler
        self.optimizer = scheduler.optimizer
        self._was_skipped: bool | _Verdict | None = None  # what the next call acts on

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
        """Step the scheduler by the verdict of the call before. Call it after each optimizer step.

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
            self._was_skipped = _ask(found_inf)
        if before is not None and not bool(before):
            self.scheduler.step()
        if found_inf is None:  # without a scaler no step is skipped
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler, and the verdict that the next step acts on. Waits for the device.

        Returns:
            A dict of plain values.
        """
        was_skipped = None if self._was_skipped is None else bool(self._was_skipped)
        return {"scheduler": self.scheduler.state_dict(), "was_skipped": was_skipped}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_was_skipped": None if self._was_skipped is None else bool(self._was_skipped)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Args:
            state_dict: A state dict of this class.

        Raises:
            TypeError: `state_dict` is not a dict.
            ValueError: `state_dict` is of another scheduler. Nothing was loaded.
        """
        if not isinstance(state_dict, dict):
            raise TypeError(f"SkipAwareScheduler: state_dict must be a dict, got a {type(state_dict).__name__}")
        if set(state_dict) != {"scheduler", "was_skipped"} or state_dict["was_skipped"] not in (None, True, False):
            raise ValueError(
                "SkipAwareScheduler: state_dict must have the keys scheduler and was_skipped (a bool or None), got "
                f"{', '.join(map(str, state_dict))}; load the state of a plain scheduler into `self.scheduler`"
            )
        self.scheduler.load_state_dict(state_dict["scheduler"])
        self._was_skipped = state_dict["was_skipped"]


def _ask(found_inf: Tensor) -> bool | _Verdict:
    return bool(found_inf) if found_inf.device.type == "cpu" else _Verdict(found_inf)


class _Verdict:
    """A copy of `found_inf` from the device to the host. Making it does not wait, reading it as a bool does."""

    def __init__(self, found_inf: Tensor) -> None:
        self._copied = found_inf.to("cpu", non_blocking=True)
        self._is_copied = torch.Event(found_inf.device)
        self._is_copied.record(torch.accelerator.current_stream(found_inf.device))

    def __bool__(self) -> bool:
        self._is_copied.synchronize()
        return bool(self._copied)
