"""`sgd_`, `rmsprop_` and `adam_`, which update lists of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..families import ADAM, RMSPROP, SGD, Family
from ..ops.checks import to_list
from ..ops.library import call, note_written
from ..ops.lists import refuse_negated, update_in_one_call
from ..ops.update import update_


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
        SGD, params, grads, [momentum_buffers if momentum != 0 else None], masters, options, lr,
        steps_taken=0 if is_first_step else 1, grad_scale=grad_scale, found_inf=found_inf,
    )  # fmt: skip


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
    """Take one RMSprop step on lists of tensors, with fp32 masters for 16-bit parameters.

    Formula, in fp32: `torch.optim.RMSprop` (Hinton 2012; centered: Graves 2013). `g` is the gradient divided by
    `grad_scale`.

    ```text
    g <- g + weight_decay * p
    v <- alpha * v + (1 - alpha) * g^2
    a <- a + (1 - alpha) * (g - a)                       (only if centered, else a = 0)
    b <- momentum * b + g / (sqrt(v - a^2) + eps)
    p <- p - lr * b
    ```

    If rounding makes `v - a^2` negative, it counts as 0. torch returns NaN there.

    The errors and the other arguments are those of `amp_kernels.sgd_`.

    Args:
        square_avgs: `v`, one fp32 tensor per parameter, updated in place. Pass zeros for the first step.
        momentum_buffers: `b`, in the same form as `square_avgs`. If `momentum` is 0, the list is ignored and may be
            empty.
        grad_avgs: `a`, in the same form as `square_avgs`. If they are given, the variance is centered.
        alpha: Decay of the averages.
        eps: Added to the square root in the denominator.

    Examples:
        >>> param, square_avg = torch.tensor([1.0]), torch.zeros(1)
        >>> amp_kernels.rmsprop_(
        ...     [param], [torch.tensor([2.0])], [square_avg], lr=0.25, alpha=0.75, eps=0.0, weight_decay=0, momentum=0,
        ...     maximize=False,
        ... )
        >>> param, square_avg
        (tensor([0.5000]), tensor([1.]))
    """
    options = {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum, "maximize": maximize}
    states = [square_avgs, momentum_buffers if momentum != 0 else None, grad_avgs if len(grad_avgs) > 0 else None]
    update(
        RMSPROP, params, grads, states, masters, options, lr, steps_taken=1, grad_scale=grad_scale, found_inf=found_inf
    )


def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor] = (),
    masters: Sequence[Tensor] = (),
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool,
    decoupled_weight_decay: bool,
    steps_taken: int,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Take one Adam step on lists of tensors, with fp32 masters for 16-bit parameters.

    Formula, in fp32: `torch.optim.Adam` (Kingma and Ba 2015; decoupled weight decay: Loshchilov and Hutter 2019;
    AMSGrad: Reddi et al. 2018). `g` is the gradient divided by `grad_scale`, and `t = steps_taken + 1`.

    ```text
    g <- g + weight_decay * p                            (if decoupled, instead: p <- p - lr * weight_decay * p)
    m <- beta1 * m + (1 - beta1) * g
    v <- beta2 * v + (1 - beta2) * g^2
    u <- v                                               (AMSGrad: u <- max(u, v))
    p <- p - lr / (1 - beta1^t) * m / (sqrt(u / (1 - beta2^t)) + eps)
    ```

    The errors and the other arguments are those of `amp_kernels.sgd_` and `amp_kernels.rmsprop_`.

    Args:
        exp_avgs: `m`, one fp32 tensor per parameter, updated in place. Pass zeros for the first step.
        exp_avg_sqs: `v`, in the same form as `exp_avgs`.
        max_exp_avg_sqs: `u`, in the same form as `exp_avgs`. If they are given, the update is AMSGrad.
        betas: Decays of the two averages.
        weight_decay: Factor of the L2 penalty, or of the decay if `decoupled_weight_decay` is True.
        decoupled_weight_decay: Apply the weight decay to the parameters, not to the gradients (AdamW).
        steps_taken: Number of steps before this one, from 0 to 2^31 - 2. Do not count skipped steps.

    Raises:
        ValueError: `betas` are not two numbers, or `steps_taken` is not an int in its range. Nothing was modified.

    Examples:
        >>> param, exp_avg, exp_avg_sq = torch.tensor([1.0]), torch.zeros(1), torch.zeros(1)
        >>> amp_kernels.adam_(
        ...     [param], [torch.tensor([2.0])], [exp_avg], [exp_avg_sq], lr=0.25, betas=(0.5, 0.75), eps=0.0,
        ...     weight_decay=0, maximize=False, decoupled_weight_decay=False, steps_taken=0,
        ... )
        >>> param, exp_avg, exp_avg_sq
        (tensor([0.7500]), tensor([1.]), tensor([1.]))
    """
    if len(betas) != 2:
        raise ValueError(f"adam_: betas must be two numbers, got {betas!r}")
    options = {
        "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize,
        "decoupled_weight_decay": decoupled_weight_decay,
    }  # fmt: skip
    states = [exp_avgs, exp_avg_sqs, max_exp_avg_sqs if len(max_exp_avg_sqs) > 0 else None]
    update(
        ADAM, params, grads, states, masters, options, lr, steps_taken=steps_taken, grad_scale=grad_scale,
        found_inf=found_inf,
    )  # fmt: skip


def update(
    family: Family,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor] | None],
    masters: Sequence[Tensor],
    options: Mapping[str, Any],
    lr: float | Tensor,
    *,
    steps_taken: int,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    grad_remainders: Sequence[Tensor] | None = None,
) -> None:
    """Update every parameter once.

    Args:
        states: For each state of the family the list of its tensors, or None if the state is not kept.
        options: The hyper-parameters except the learning rate, under their names in torch.
        steps_taken: Number of earlier steps. If it is 0, some states are written without being read.
        grad_remainders: Given only to update averages of weights (optim/averages.py). Then `params` are fp32 averages,
            and `grads` are the weights that they follow. `grad_remainders` are the remainders of those weights that
            have 16 bits, in the order of the weights.
    """
    op = f"{family.name}_"
    params, grads, masters = (
        to_list(op, name, tensors) for name, tensors in (("params", params), ("grads", grads), ("masters", masters))
    )
    given = [
        None if state is None else to_list(op, f"{name}s", state)
        for name, state in zip(family.states, states, strict=True)
    ]
    arguments = (
        family.name, params, grads, *given, *[None] * (3 - len(given)), masters or None,
        list(family.hyper_of(options)), 0.0 if isinstance(lr, Tensor) else float(lr),
        lr if isinstance(lr, Tensor) else None, steps_taken, grad_scale, found_inf, grad_remainders,
    )  # fmt: skip
    if not (params and update_in_one_call(*arguments)):
        if not torch.compiler.is_compiling():
            refuse_negated(*arguments)
        call(update_, *arguments)
    note_written(params, masters, *(state for state in given if state is not None))
