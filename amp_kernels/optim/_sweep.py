"""The sweep writes the addresses, sizes and dtypes of a step's tensors into the columns of the table.

It reads them from the tensors again in every step, since other code may write, move or replace tensors between steps.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _loader

# Values that a column has in place of a form (_plan.py explains forms). ABSENT: the step leaves the parameter out, for
# example because it has neither a gradient nor a count of steps. UNREAD: the sweep could not read the column, and the
# plan has to read it in Python.
ABSENT, UNREAD = -1, -2


# What a warm step does (`Work` in csrc/ops/step.h), and its answers (`Answer`).
READ, PASS, CLEAR, UPDATE, WRITE, KEEP = 1, 2, 4, 8, 16, 32
TAKEN, CHANGED = 0, 1


class Sweep(NamedTuple):
    """The functions of the sweep: those of `amp_kernels._C`, or those in Python if that module cannot be used.

    Attributes:
        columns: ``(params, states, groups, keys, device, table, forms, checked, held=None) -> (unread,
            gradients)``.
            Writes the column of each parameter into `table`, int64 [rows, parameters] on the host (`ops.table.Row`),
            and its form into `forms`, int64 [parameters]. Returns the number of columns that Python still has to read,
            and the number of columns with a gradient. `states` are the entries of ``optimizer.state``. `groups` are the
            group numbers of the parameters. `keys` has a pair of `Storage` (_state.py) for each group.
            `checked` is the memory in which `apart` keeps the last table. A parameter and its states are tested for
            being negated views only if one of their addresses differs from the one there. An object that
            holds the gradients and states is appended to the list `held`.
        apart: ``(table, forms, checked, spans) -> int``. Returns the column of a gradient that overlaps a tensor that
            the step writes. Returns -2 if the memory ranges of two written tensors overlap. The plan then has to test
            the tensors exactly. Returns -1 if nothing overlaps. `checked` keeps the table and the forms of the last
            call that returned -1. If they have not changed, -1 is returned without a comparison of ranges. `spans`
            keeps the memory ranges that the step writes.
        same: ``(lists, copies, state, keys, values) -> bool``. Returns True if two conditions hold. Each list holds the
            same objects as its copy, in the same order. The dict `state` holds the objects in `keys` as its keys and
            the objects in `values` as its values, in the same order.
        compiled: The module `amp_kernels._C`, whose `make_step` and `step` take warm steps. None if it cannot be used.
        torchs: The functions and types of torch with which C++ reads tensors.
    """

    columns: Callable[..., tuple[int, int]]
    apart: Callable[..., int]
    same: Callable[..., bool]
    compiled: Any = None
    torchs: tuple[Any, ...] = ()


@functools.cache
def sweep() -> Sweep:
    reader = _loader.reader()
    if reader is None:
        return _IN_PYTHON
    compiled, torchs = reader

    def columns(
        params: list[Tensor], states: list[Any], groups: list[int], keys: Any, device: torch.device, table: Tensor,
        forms: Tensor, checked: Tensor, held: list[Any] | None = None,
    ) -> tuple[int, int]:  # fmt: skip
        pointers = table.data_ptr(), forms.data_ptr(), checked.data_ptr()
        on = dlpack_device(device)
        found: tuple[int, int] = compiled.sweep(params, states, groups, keys, on, *pointers, torchs, held)
        return found

    def apart(table: Tensor, forms: Tensor, checked: Tensor, spans: Tensor) -> int:
        rows, count = table.shape
        answer: int = compiled.apart(
            table.data_ptr(), forms.data_ptr(), count, rows, checked.data_ptr(), spans.data_ptr()
        )
        return answer

    return Sweep(columns, apart, compiled.same, compiled, torchs)


def dlpack_device(device: torch.device) -> tuple[int, int]:
    """Returns the device as DLPack numbers it."""
    return (1, 0) if device.type == "cpu" else (2, device.index)


def _columns(
    params: list[Tensor], states: list[Any], groups: list[int], keys: Any, device: torch.device, table: Tensor,
    forms: Tensor, checked: Tensor, held: list[Any] | None = None,
) -> tuple[int, int]:  # fmt: skip
    """Marks every column as UNREAD. The plan then reads it in Python."""
    table.zero_()
    forms.fill_(UNREAD)
    return len(params), sum(param.grad is not None for param in params)


def _apart(table: Tensor, forms: Tensor, checked: Tensor, spans: Tensor) -> int:
    """Returns -2, so that the plan tests the tensors in Python."""
    return -2


def _same(lists: list[Any], copies: list[Any], state: dict[Any, Any], keys: list[Any], values: list[Any]) -> bool:
    pairs = [*zip(lists, copies, strict=False), (list(state), keys), (list(state.values()), values)]
    return len(lists) == len(copies) and all(len(a) == len(b) and all(map(operator.is_, a, b)) for a, b in pairs)


_IN_PYTHON = Sweep(_columns, _apart, _same)
