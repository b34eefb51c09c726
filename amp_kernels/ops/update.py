"""The update of lists, one operator for all families of `amp_kernels.families`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .._checks import check_memory, check_update
from ..families import FAMILIES
from . import lists
from .library import LIBRARY, operator


def _named_states(family: str, states: Sequence[Sequence[Tensor] | None]) -> dict[str, Sequence[Tensor]]:
    names = FAMILIES[family].states
    return {f"{name}s": state for name, state in zip(names, states, strict=False) if state is not None}


def _check(
    family: str,
    params: list[Tensor],
    grads: list[Tensor],
    state0: list[Tensor] | None,
    state1: list[Tensor] | None,
    state2: list[Tensor] | None,
    masters: list[Tensor] | None,
    hyper: list[float],
    lr: float,
    tensor_lr: Tensor | None,
    steps_taken: int,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    op = f"{family}_"
    if family not in FAMILIES:
        raise ValueError(f"update_: family must be one of {', '.join(FAMILIES)}, got {family!r}")
    if not params:
        return
    states = _named_states(family, (state0, state1, state2))
    scalars = {"lr": tensor_lr, "grad_scale": grad_scale, "found_inf": found_inf}
    check_update(op, params, grads, states, masters or (), scalars)
    if not lists.are_fake(params):  # which have no memory
        check_memory(op, {"params": params, "masters": masters or (), **states})


def _update(
    family: str,
    params: list[Tensor],
    grads: list[Tensor],
    state0: list[Tensor] | None,
    state1: list[Tensor] | None,
    state2: list[Tensor] | None,
    masters: list[Tensor] | None,
    hyper: list[float],
    lr: float,
    tensor_lr: Tensor | None,
    steps_taken: int,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    known = FAMILIES[family]
    states = [state or () for state in (state0, state1, state2)[: len(known.states)]]
    known.reference(
        params, grads, states, masters or (), known.hyper(*hyper), lr=lr if tensor_lr is None else tensor_lr,
        is_first_step=steps_taken == 0, grad_scale=grad_scale, found_inf=found_inf,
    )  # fmt: skip


update_ = operator(
    "update_(str family, Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[]? state0, Tensor(c!)[]? state1, "
    "Tensor(d!)[]? state2, Tensor(e!)[]? masters, float[] hyper, float lr, Tensor? tensor_lr, int steps_taken, "
    "Tensor? grad_scale, Tensor? found_inf) -> ()",
    check=_check,
    reference=_update,
    fake=lambda *arguments: None,
    launch=lists.update,
)
# Of the step plan: they write through addresses that their schema does not show, so that nothing may trace them.
LIBRARY.define(
    "_update_table_(str family, Tensor table, Tensor chunks, int chunk_size, Tensor(a!) steps, Tensor hyper, "
    "Tensor lr, int param_dtype, int grad_dtype, Tensor? grad_scale, Tensor? found_inf, Tensor? grad_norm, "
    "float max_norm) -> ()"
)
# Bytes travel as kernel arguments: no pinned memory, whose lifetime a captured copy would depend on.
LIBRARY.define("_send_(Tensor host, Tensor(a!) to) -> ()")
