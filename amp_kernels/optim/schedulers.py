"""A learning rate scheduler that does not count skipped steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ._base import FusedOptimizer
from ._wrappers import innermost


class SkipAwareScheduler(LRScheduler):
    """Steps a learning rate scheduler only for steps of the optimizer that a scaler did not skip.

    Each call of `step` acts on the verdict of the iteration before, so the learning rate comes one iteration late. It
    is not late without a scaler, or if a scaler decides on the host. If such a scaler is torch's, call `step` before
    `zero_grad` (see `step_was_skipped` of the optimizers). The guide to loss scaling has examples.

    All other attributes are those of the scheduler. To combine schedulers, wrap the result,
    `SkipAwareScheduler(SequentialLR(...))`, since a SequentialLR counts its own calls.

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
        optimizer = _stepped(scheduler.optimizer)
        if optimizer is None:
            raise TypeError(
                "SkipAwareScheduler: the optimizer of scheduler must be one of amp_kernels.optim, got a "
                f"{type(scheduler.optimizer).__name__}; if amp.initialize replaces the optimizer, call it before"
            )
        self.scheduler = scheduler
        self._was_skipped: bool | _Verdict | None = None  # what the next call acts on
        self._steps_before = optimizer._steps  # the optimizer's count at the last call

    def __getattribute__(self, name: str) -> Any:
        classes = type(self).__mro__  # those before LRScheduler are this class and subclasses of it
        is_own = name in _OWN or name.startswith("__")
        is_own = is_own or any(name in vars(each) for each in classes[: classes.index(LRScheduler)])
        return super().__getattribute__(name) if is_own else getattr(self.scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.scheduler, name, value)

    def step(self, epoch: int | None = None) -> None:
        """Step the scheduler by the verdict of the call before. Call it after each optimizer step.

        Args:
            epoch: None, as torch deprecated it. Or 0, with which the SequentialLR of older versions of torch starts its
                next scheduler.

        Raises:
            ValueError: `epoch` is another number.
        """
        if epoch not in (None, 0):
            raise ValueError(f"SkipAwareScheduler.step: epoch must be None, got {epoch!r}")
        optimizer, before = _stepped(self.optimizer), self._was_skipped
        steps = optimizer._steps - self._steps_before
        self._was_skipped, self._steps_before = None, optimizer._steps
        if epoch == 0:
            return self.scheduler.step(epoch)
        # After a step, gradients need not be looked at: `step` noted its verdict.
        found_inf = optimizer._last_found_inf if steps > 0 else optimizer._verdict(self.optimizer)
        is_at_once = found_inf is None or steps > 1
        if not is_at_once:
            self._was_skipped = _ask(found_inf)
        if before is not None and not bool(before):
            self.scheduler.step()
        if is_at_once:
            self.scheduler.step()

    def _update_lr(self, epoch: int | None = None) -> None:
        """Sets the learning rate of `epoch`, with which SequentialLR starts its next scheduler."""
        self._was_skipped, self._steps_before = None, _stepped(self.optimizer)._steps
        self.scheduler._update_lr(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler, and what the next step acts on. Waits for the device.

        Returns:
            A dict of plain values. `steps` is the number of steps of the optimizer since the last call.
        """
        return {**self.__getstate__(), "scheduler": self.scheduler.state_dict()}

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
        state = {"steps": 0, **state_dict}
        if set(state) != {"scheduler", "was_skipped", "steps"} or state["was_skipped"] not in (None, True, False):
            raise ValueError(
                "SkipAwareScheduler: state_dict must have the keys scheduler and was_skipped (a bool or None), got "
                f"{', '.join(map(str, state_dict))}; load the state of a plain scheduler into `self.scheduler`"
            )
        self.scheduler.load_state_dict(state["scheduler"])
        self.__setstate__({**state, "scheduler": self.scheduler})

    def __getstate__(self) -> dict[str, Any]:
        was_skipped = None if self._was_skipped is None else bool(self._was_skipped)
        steps = _stepped(self.optimizer)._steps - self._steps_before
        return {"scheduler": self.scheduler, "was_skipped": was_skipped, "steps": steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.scheduler, self._was_skipped = state["scheduler"], state["was_skipped"]
        # The optimizer of a copy, or of another process, counts from 0.
        self._steps_before = _stepped(self.optimizer)._steps - state["steps"]


_OWN = frozenset({"scheduler", "_was_skipped", "_steps_before"})


def _stepped(optimizer: Any) -> Any:
    """Returns the fused optimizer in a chain of wrappers, the first one if they hold several. None if there is none."""
    # If an optimizer has counted steps, it is not a wrapper. The search would take longer than the scheduler's step.
    if isinstance(optimizer, FusedOptimizer) and optimizer._steps > 0:
        return optimizer
    return next((one for one in innermost(optimizer) if isinstance(one, FusedOptimizer)), None)


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
