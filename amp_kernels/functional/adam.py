"""Adam and AdamW on lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..families import ADAM
from .update import update


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

    All arithmetic is fp32.

    Formula: `torch.optim.Adam` (Kingma and Ba 2015; decoupled weight decay: Loshchilov and Hutter 2019; AMSGrad: Reddi
    et al. 2018). `g` is the gradient divided by `grad_scale`, and `t = steps_taken + 1`.

    ```text
    g <- g + weight_decay * p                            (if decoupled, instead: p <- p - lr * weight_decay * p)
    m <- beta1 * m + (1 - beta1) * g
    v <- beta2 * v + (1 - beta2) * g^2
    u <- v                                               (AMSGrad: u <- max(u, v))
    p <- p - lr / (1 - beta1^t) * m / (sqrt(u / (1 - beta2^t)) + eps)
    ```

    The other arguments are those of `amp_kernels.sgd_`.

    Args:
        exp_avgs: `m`, one fp32 tensor per parameter, updated in place. Pass zeros for the first step.
        exp_avg_sqs: `v`, in the same form as `exp_avgs`.
        max_exp_avg_sqs: `u`, in the same form as `exp_avgs`. If they are given, the update is AMSGrad.
        betas: Decays of the two averages.
        eps: Added to the square root in the denominator.
        weight_decay: Factor of the weight decay.
        decoupled_weight_decay: Apply the weight decay to the parameters, not to the gradients (AdamW).
        steps_taken: Number of steps before this one, from 0 to 2^31 - 2. Do not count skipped steps.

    Raises:
        TypeError: A dtype does not fit. Nothing was modified.
        ValueError: A length, shape or device does not fit, `betas` are not two numbers, or `steps_taken` is not an int
            in its range. Nothing was modified.

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
    states = {
        "exp_avgs": exp_avgs,
        "exp_avg_sqs": exp_avg_sqs,
        "max_exp_avg_sqs": max_exp_avg_sqs if len(max_exp_avg_sqs) > 0 else None,
    }
    update(
        ADAM, params, grads, states, masters, options, lr, steps_taken=steps_taken, grad_scale=grad_scale,
        found_inf=found_inf,
    )  # fmt: skip
