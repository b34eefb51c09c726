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
    """Take one SGD step on lists of tensors, with fp32 masters for 16-bit parameters.

    All arithmetic is fp32. A 16-bit parameter is set to its new master, rounded to nearest even. Gradients are not
    changed. Lists may hold tensors of different dtypes, empty tensors and views of any strides. All tensors of a call
    must be on one device.

    Formula: `torch.optim.SGD` (Sutskever et al. 2013). `g` is the gradient divided by `grad_scale`.

    ```text
    g <- g + weight_decay * p
    b <- momentum * b + (1 - dampening) * g              (first step: b <- g)
    p <- p - lr * (g + momentum * b if nesterov else b)
    ```

    Args:
        params: fp16, bf16 or fp32 tensors of any strides, updated in place.
        grads: One gradient per parameter, of its shape, in any of the three dtypes.
        momentum_buffers: One fp32 tensor per parameter, updated in place. The first step writes them without reading
            them. If `momentum` is 0, the list is ignored and may be empty.
        masters: One tensor per 16-bit parameter, in the order of `params`, updated in place. It is either the fp32
            master of the parameter, or its int16 remainder: the parameter and the remainder together are the master
            (see `FusedSGD.master`). If a remainder is 0, the master is equal to the parameter.
        lr: Learning rate, a number or one fp32 element on the parameters' device.
        momentum: Momentum factor.
        dampening: Dampening of the momentum.
        weight_decay: Factor of the L2 penalty.
        nesterov: Use Nesterov momentum.
        maximize: Negate the gradients.
        is_first_step: Set the momentum buffers to the gradients. `dampening` then has no effect.
        grad_scale: One fp32 element; the gradients are divided by it. None for 1.
        found_inf: One fp32 element. If it is not 0, the call changes nothing.

    Raises:
        TypeError: A dtype does not fit. Nothing was modified.
        ValueError: A length, shape or device does not fit. Nothing was modified.

    Examples:
        A step that is too small for bf16 is kept by the fp32 master:

        >>> weight, master = torch.ones(1, dtype=torch.bfloat16), torch.ones(1)
        >>> amp_kernels.sgd_(
        ...     [weight], [torch.full((1,), 0.125)], [], [master], lr=2**-10, momentum=0, dampening=0, weight_decay=0,
        ...     nesterov=False, maximize=False, is_first_step=True,
        ... )
        >>> weight.item(), master.item()
        (1.0, 0.9998779296875)
    """
    options = {
        "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov,
        "maximize": maximize,
    }  # fmt: skip
    update(
        SGD, params, grads, {"momentum_buffers": momentum_buffers if momentum != 0 else None}, masters, options, lr,
        steps_taken=0 if is_first_step else 1, grad_scale=grad_scale, found_inf=found_inf,
    )  # fmt: skip
