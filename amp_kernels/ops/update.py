"""The operator that updates lists of parameters, for all families of `amp_kernels.families`."""

from __future__ import annotations

from typing import Any

import torch

from .. import reference
from ..families import FAMILIES
from ..reference._master import join
from . import lists
from .checks import check_grad_remainders, check_memory, check_update
from .library import LIBRARY, operator


def _check(family: str, *rest: Any) -> None:
    if family not in FAMILIES:
        raise ValueError(f"update_: family must be one of {', '.join(FAMILIES)}, got {family!r}")
    given = lists.Update(family, *rest)
    steps = given.steps_taken
    if not (isinstance(steps, int | torch.SymInt) and 0 <= steps < 2**31 - 1):
        raise ValueError(f"{family}_: steps_taken must be an int from 0 to 2^31 - 2, got {steps!r}")
    if not given.params:
        return
    op, masters = f"{family}_", given.masters or ()
    named = zip(FAMILIES[family].states, given.states, strict=True)
    states = {f"{name}s": state for name, state in named if state is not None}
    scalars = {"lr": given.tensor_lr, "grad_scale": given.grad_scale, "found_inf": given.found_inf}
    check_update(op, given.params, given.grads, states, masters, scalars)
    if given.grad_remainders is not None:
        check_grad_remainders(op, given.params, given.grads, states, given.grad_remainders)
    if not lists.are_fake(given.params):  # fake tensors have no memory
        check_memory(op, {"params": given.params, "masters": masters, **states})


def _update(*arguments: Any) -> None:
    given = lists.Update(*arguments)
    known, grads = FAMILIES[given.family], given.grads
    if given.grad_remainders is not None:
        remainders = iter(given.grad_remainders)
        grads = [g if g.dtype is torch.float32 else join(g, next(remainders)) for g in grads]
    lr = given.lr if given.tensor_lr is None else given.tensor_lr
    reference.update_(
        known.formula, given.params, grads, given.states, given.masters or (), known.hyper(*given.hyper), lr=lr,
        steps_taken=given.steps_taken, grad_scale=given.grad_scale, found_inf=given.found_inf,
    )  # fmt: skip


update_ = operator(
    "update_(str family, Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[]? state0, Tensor(c!)[]? state1, "
    "Tensor(d!)[]? state2, Tensor(e!)[]? masters, float[] hyper, float lr, Tensor? tensor_lr, SymInt steps_taken, "
    "Tensor? grad_scale, Tensor? found_inf, Tensor[]? grad_remainders=None) -> ()",
    check=_check,
    reference=_update,
    fake=lambda *arguments: None,
    launch=lists.update,
    by_table=True,
)
# Only ops/lists.py and step plans (optim/_plan.py) call the operators below. `_update_table_` writes to addresses in a
# table, which its schema does not show, so it must not be traced.
LIBRARY.define(
    "_update_table_(str family, Tensor table, Tensor chunks, int chunk_size, Tensor(a!) record, Tensor hyper, "
    "Tensor lr, int param_dtype, bool split, int grad_dtype, int states, int state_dtype, Tensor? grad_scale, "
    "Tensor? found_inf, Tensor? grad_norm, float max_norm) -> ()"
)
# Loads the kernel on the device of `beside`. Loading is forbidden while a CUDA graph is captured, so it has to be done
# before the capture. Returns how many thread blocks of the kernel run at a time, 0 on a CPU.
LIBRARY.define(
    "_load_update(Tensor beside, str family, int param_dtype, bool split, int grad_dtype, int states, int state_dtype) "
    "-> int"
)
# Sends bytes as kernel arguments, so that `host` need not be kept for the replays of a CUDA graph. A captured copy from
# pinned memory would read that memory at every replay.
LIBRARY.define("_send_(Tensor host, Tensor(a!) to) -> ()")
