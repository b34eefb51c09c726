"""RMSprop on lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..families import RMSPROP
from .update import update


def rmsprop_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    square_avgs: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] = (),
    grad_avgs: Sequence[Tensor] = (),
    masters: Sequence[Tensor] = (),
    *,
    lr: float | Tensor,
    alpha: float,
    eps: float,
    weight_decay: float,
    momentum: float,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One RMSprop step on lists, in the manner of ``torch._fused_sgd_``, with masters for 16-bit parameters.

    Formula: `torch.optim.RMSprop` (Hinton 2012; centered: Graves 2013). Where rounding makes the centered variance
    negative it counts as 0; torch gets NaN there.

    Args:
        square_avgs: one fp32 tensor for each parameter; zeros before the first step, as the other states.
        momentum_buffers: the same, empty or ignored when `momentum` is 0.
        grad_avgs: the same; given iff the variance is centered.
        params, grads, masters, lr, grad_scale, found_inf: as in `sgd_`.

    Raises:
        TypeError, ValueError: lengths, shapes, dtypes or devices do not fit; nothing was modified.
    """
    options = {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum, "maximize": maximize}
    states = {
        "square_avgs": square_avgs,
        "momentum_buffers": momentum_buffers if momentum != 0 else None,
        "grad_avgs": grad_avgs if len(grad_avgs) > 0 else None,
    }
    update(
        RMSPROP, params, grads, states, masters, options, lr, steps_taken=1, grad_scale=grad_scale, found_inf=found_inf
    )
