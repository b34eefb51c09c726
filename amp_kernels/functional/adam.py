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
    """One Adam step on lists, in the manner of ``torch._fused_adam_``, with masters for 16-bit parameters.

    Formula: `torch.optim.Adam` (Kingma and Ba 2015; AMSGrad: Reddi et al. 2018).

    Args:
        exp_avgs, exp_avg_sqs: one fp32 tensor for each parameter; zeros before the first step.
        max_exp_avg_sqs: the same; given iff the update is AMSGrad's.
        betas, eps, weight_decay, maximize, decoupled_weight_decay: as in `torch.optim.Adam`.
        steps_taken: 0 at the first step; a skipped step is none. A compiled graph serves every count.
        params, grads, masters, lr, grad_scale, found_inf: as in `sgd_`.

    Raises:
        TypeError, ValueError: lengths, shapes, dtypes or devices do not fit, `betas` are not two numbers or
            `steps_taken` is no int from 0 to 2^31 - 2; nothing was modified.
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


def adamw_(
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
    steps_taken: int,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One AdamW step on lists: `adam_` with ``decoupled_weight_decay=True``.

    Formula: `torch.optim.AdamW` (Loshchilov and Hutter 2019). Arguments are those of `adam_`, and so are
    errors, which begin with its name.
    """
    adam_(
        params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters, lr=lr, betas=betas, eps=eps,
        weight_decay=weight_decay, maximize=maximize, decoupled_weight_decay=True, steps_taken=steps_taken,
        grad_scale=grad_scale, found_inf=found_inf,
    )  # fmt: skip
