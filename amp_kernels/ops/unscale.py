"""The gradient pass: check for NaN and inf, norm, and unscaling, in one read of the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .. import reference
from . import lists
from .checks import check_scalar, check_tensors, check_written
from .library import LIBRARY, Kernels, operator


def _check(op: str, grads: Sequence[Tensor], inv_scale: Tensor | None, found_inf: Tensor) -> None:
    check_tensors(op, "grads", grads)
    check_scalar(op, "inv_scale", inv_scale, found_inf.device)
    check_scalar(op, "found_inf", found_inf, grads[0].device if grads else None)


def _check_unscale(grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    _check("unscale_", grads, inv_scale, found_inf)
    check_written("unscale_", "grads", grads)


def _launch_unscale(kernels: Kernels, grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    lists.gradient_pass(kernels, grads, inv_scale, found_inf, write=True)


def _norm(grads: list[Tensor], inv_scale: Tensor | None, found_inf: Tensor) -> Tensor:
    norm = reference.grad_norm(grads, inv_scale=inv_scale, found_inf=found_inf)
    return norm if grads else norm.to(found_inf.device)


unscale_ = operator(
    "unscale_(Tensor(a!)[] grads, Tensor inv_scale, Tensor(b!) found_inf) -> ()",
    check=_check_unscale,
    reference=lambda grads, inv_scale, found_inf: reference.unscale_(grads, inv_scale=inv_scale, found_inf=found_inf),
    fake=lambda *arguments: None,
    launch=_launch_unscale,
    by_table=True,
)
# found_inf is not optional: Inductor crashes on an optional mutable Tensor that is absent.
grad_norm = operator(
    "grad_norm(Tensor[] grads, Tensor? inv_scale, Tensor(a!) found_inf) -> Tensor",
    check=partial(_check, "grad_norm"),
    reference=_norm,
    fake=lambda grads, inv_scale, found_inf: torch.empty((), dtype=torch.float32, device=found_inf.device),
    launch=partial(lists.gradient_pass, write=False),
    by_table=True,
)
# Only ops/lists.py and step plans (optim/_plan.py) call the operators below. `_unscale_table_` writes to addresses in a
# table. Its schema does not show these writes, so this operator must not be traced.
LIBRARY.define(
    "_unscale_table_(Tensor table, Tensor chunks, int chunk_size, Tensor? scale, bool divide, bool write, bool clear, "
    "Tensor(a!) partials, Tensor(b!) found_inf, Tensor(c!) norm, Tensor(d!) record, int squares=0) -> ()"
)
# Loads the kernel of the gradient pass, and the kernels that send tables, on the device of `beside`. This must be done
# before a graph capture, as for `_load_update` (ops/update.py). Returns how many thread blocks of the gradient pass run
# at a time, 0 on a CPU.
LIBRARY.define("_load_unscale(Tensor beside) -> int")
