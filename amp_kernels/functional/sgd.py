"""SGD on lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..families import SGD
from .update import update


def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    masters: Sequence[Tensor] = (),
    *,
    lr: float | Tensor,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One SGD step on lists, in the manner of ``torch._fused_sgd_``, with masters for 16-bit parameters.

    All arithmetic is fp32; a 16-bit parameter becomes its master rounded to nearest even. Gradients are never written.
    Formula: `torch.optim.SGD` (Sutskever et al. 2013).

    Args:
        params: fp16, bf16 or fp32 tensors of any strides.
        grads: one for each parameter, of its shape, in any of those dtypes.
        momentum_buffers: one fp32 tensor for each parameter; empty or ignored when `momentum` is 0. Not read in the
            first step.
        masters: one tensor for each 16-bit parameter, in their order: fp32 masters, or int16 remainders, which with the
            parameter make one (`FusedSGD.master`); zeros begin at the parameter itself.
        lr: a float, or one fp32 element on the parameters' device, which is read there.
        is_first_step: the momentum buffer becomes the gradient, whatever the dampening.
        grad_scale: one fp32 element by which the gradients are divided.
        found_inf: one fp32 element; unless it is 0 nothing at all is changed.

    Raises:
        TypeError, ValueError: lengths, shapes, dtypes or devices do not fit; nothing was modified.
    """
    options = {
        "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov,
        "maximize": maximize,
    }  # fmt: skip
    update(
        SGD, params, grads, {"momentum_buffers": momentum_buffers if momentum != 0 else None}, masters, options, lr,
        steps_taken=0 if is_first_step else 1, grad_scale=grad_scale, found_inf=found_inf,
    )  # fmt: skip
