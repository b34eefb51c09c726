"""What the functional updates share.

Lists may mix fp16, bf16 and fp32 and hold empty tensors and views of any strides; the tensors of one update share a
device. Nothing here waits for it.
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
    """One update of every parameter.

    Args:
        states: by the plural of their names, in the order of the family; None for one that there is not.
        options: the hyper-parameters but the learning rate, by their names in torch.
        steps_taken: 0 if this is the first step, which some states are set by.
        grad_remainders: given if the parameters are fp32 averages, and `grads` the weights that they follow: those of
            the 16-bit weights, in their order.
    """
    op = f"{family.name}_"
    params, grads, masters = (
        as_list(op, name, tensors) for name, tensors in (("params", params), ("grads", grads), ("masters", masters))
    )
    given = [None if state is None else as_list(op, name, state) for name, state in states.items()]
    call(
        update_, family.name, params, grads, *given, *[None] * (3 - len(given)), masters or None,
        list(family.hyper.of(options)), 0.0 if isinstance(lr, Tensor) else float(lr),
        lr if isinstance(lr, Tensor) else None, steps_taken, grad_scale, found_inf, grad_remainders,
    )  # fmt: skip
    note_written(params, masters, *(state for state in given if state is not None))
