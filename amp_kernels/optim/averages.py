"""Averages of the weights in fp32 over the steps of a training."""

from __future__ import annotations

import numbers
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..families import SGD
from ..functional.unscale import to_device
from ..functional.update import update
from ..ops.checks import as_list, check_memory, check_same_shapes, check_states, check_tensors, to_list
from ..ops.library import note_written
from ..ops.lists import update_in_one_call
from ..ops.table import DTYPE_CODES
from ._base import FusedOptimizer
from ._tensors import has_memory, local
from ._wrappers import wrapped

# With these options, an SGD step computes average - lr * (average - weight). The average is passed as the parameter,
# and the weight as the gradient.
_FOLLOW = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 1.0, "nesterov": False, "maximize": True}


@torch.compiler.disable
@torch.no_grad()
def ema_(averages: Iterable[Tensor], optimizer: FusedOptimizer, decay: float) -> None:
    """Move fp32 averages of the weights towards the masters of an optimizer.

    For every parameter: `average <- average - (1 - decay) * (average - master)`. With a decay of 0 the last bits of the
    average may therefore differ from those of the master. Call it after each step.

    If a scaler skipped the last step, the averages do not change. The device decides this, so the host does not wait.
    For a wrapped optimizer under `torch.amp.GradScaler`, call it before `zero_grad` (see `step_was_skipped`).

    Args:
        averages: One fp32 tensor per parameter, in the order of the optimizer's groups, with the shape, the device and
            the DTensor placements of the parameter. Start with `[optimizer.master(p) for p in params]`. If the
            optimizer cannot train a parameter, for example an integer tensor, its average does not change.
        optimizer: An optimizer of `amp_kernels.optim`.
        decay: From 0 to 1, for example 0.9999.

    Raises:
        TypeError: `optimizer` is not from `amp_kernels.optim`, `decay` is not a number, or an average is not fp32.
            Nothing was modified.
        ValueError: `decay` is out of range, or the averages do not fit the parameters. Nothing was modified.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
        >>> optimizer = amp_kernels.optim.FusedSGD([weight], lr=1.0)
        >>> averages = [optimizer.master(weight)]
        >>> weight.grad = -torch.ones_like(weight)
        >>> optimizer.step()
        >>> amp_kernels.optim.ema_(averages, optimizer, decay=0.75)
        >>> averages
        [tensor([0.2500, 0.2500])]
    """
    if not isinstance(optimizer, FusedOptimizer):
        inner = wrapped(optimizer)
        hint = "for other optimizers use torch.optim.swa_utils"
        if isinstance(inner, FusedOptimizer):
            hint = "pass the optimizer that it wraps"
        got = type(optimizer).__name__
        raise TypeError(f"ema_: optimizer must be one of amp_kernels.optim, got a {got}; {hint}")
    check_decay("ema_", decay)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    own = to_list("ema_", "averages", averages)
    found_inf = optimizer._verdict()
    states = masters = None
    if params and update_in_one_call(
        "sgd", own, params, states, None, None, masters, list(SGD.hyper_of(_FOLLOW)), 1 - decay, None, 0, None,
        found_inf, optimizer.state,
    ):  # fmt: skip
        note_written(own)
        return
    own, weights = [local(a) for a in as_list("ema_", "averages", own)], [local(p) for p in params]
    trainable = [t for t, p in enumerate(params) if p.dtype in DTYPE_CODES and has_memory(p)]
    if len(own) != len(params):
        check_same_shapes("ema_", "averages", own, weights)  # raises
    followers, leaders = [own[t] for t in trainable], [weights[t] for t in trainable]
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for t in trainable:
        by_device[weights[t].device].append(t)
    try:
        if len(by_device) > 1:  # before the averages on the first device are modified
            _check(followers, leaders)
        for device, members in by_device.items():
            remainders = [r for t in members if (r := optimizer._remainder_of(params[t])) is not None]
            update(
                SGD, [own[t] for t in members], [weights[t] for t in members], [None], (), _FOLLOW,
                1 - decay, steps_taken=0, grad_scale=None, grad_remainders=remainders or None,
                found_inf=None if found_inf is None else to_device(found_inf, device),
            )  # fmt: skip
    except (RuntimeError, TypeError, ValueError):  # C++ does not say which argument is wrong
        check_same_shapes("ema_", "averages", own, weights)
        _check(followers, leaders)
        raise


def check_decay(caller: str, decay: float) -> None:
    """Raise an error if `decay` is not a number from 0 to 1."""
    is_number = isinstance(decay, numbers.Real) and not isinstance(decay, bool)
    if not is_number or not 0 <= decay <= 1:
        raise (ValueError if is_number else TypeError)(f"{caller}: decay must be a number from 0 to 1, got {decay!r}")


def _check(averages: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    check_states("ema_", "averages", averages, weights, [torch.float32])
    check_memory("ema_", {"averages": averages})
    check_tensors("ema_", "the optimizer's parameters", weights)
