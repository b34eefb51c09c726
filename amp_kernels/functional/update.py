"""The code that `sgd_`, `rmsprop_` and `adam_` share.

Lists may mix fp16, bf16 and fp32 and hold empty tensors and views of any strides. The tensors of one update are on one
device. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..families import Family
from ..ops.checks import as_list
from ..ops.library import call, note_written
from ..ops.update import update_


def update(
    family: Family,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Mapping[str, Sequence[Tensor] | None],
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
        states: For each state of the family, in the family's order: its name in the plural, and the list of its
            tensors. The list is None if the state is not kept.
        options: The hyper-parameters except the learning rate, under their names in torch.
        steps_taken: Number of earlier steps. If it is 0, some states are written without being read.
        grad_remainders: Given only to update averages of weights (optim/averages.py). Then `params` are fp32 averages,
            and `grads` are the weights that they follow. `grad_remainders` are the remainders of those weights that
            have 16 bits, in the order of the weights.
    """
    op = f"{family.name}_"
    params, grads, masters = (
        as_list(op, name, tensors) for name, tensors in (("params", params), ("grads", grads), ("masters", masters))
    )
    given = [None if state is None else as_list(op, name, state) for name, state in states.items()]
    call(
        update_, family.name, params, grads, *given, *[None] * (3 - len(given)), masters or None,
        list(family.hyper_of(options)), 0.0 if isinstance(lr, Tensor) else float(lr),
        lr if isinstance(lr, Tensor) else None, steps_taken, grad_scale, found_inf, grad_remainders,
    )  # fmt: skip
    note_written(params, masters, *(state for state in given if state is not None))
