"""The sweep: it reads the addresses, sizes and dtypes of a step's tensors into the columns of the table.

Nothing is kept for the next step, since other code may write, move or replace the tensors.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import _loader, torch_private

# In place of a form. ABSENT: the parameter has neither gradient nor state. UNREAD: the column is left to Python.
ABSENT, UNREAD = -1, -2


class Sweep(NamedTuple):
    """The functions of the sweep, from `amp_kernels._C`, or in Python if that cannot serve.

    Attributes:
        columns: ``(params, states, groups, keys, device, table, forms, checked, writes) -> (unread, gradients)``.
            Writes the column of each parameter into `table`, int64 [rows, parameters] on the host (`ops.table.Row`),
            and its form into `forms`, int64 [parameters]. Returns the number of columns left to Python, and the number
            of columns with a gradient. `states` are the entries of ``optimizer.state``, `groups` the parameters' group
            numbers, `keys` the names of each group's states in the order of rows. A parameter that shares its memory
            with a lazy clone gets memory of its own, since it will be written; if `writes` is True, so does a gradient.
            In C++ a thousand parameters take a twelfth of the time that Python takes.
        apart: ``(table, forms, checked, spans) -> int``. Returns the column of a gradient that lies in a tensor that
            the step writes; -2 if the spans of two written tensors overlap, perhaps as interleaved views; -1 if
            neither. It keeps copies of table and forms in `checked`, and computes nothing if they have not changed.
        same: ``(lists, copies, state, keys, values) -> bool``. Whether the lists hold the same objects as their copies,
            and the dict those in `keys` and `values`, in the same order.
    """

    columns: Callable[..., tuple[int, int]]
    apart: Callable[..., int]
    same: Callable[..., bool]


@functools.cache
def sweep() -> Sweep:
    api = torch_private.tensor_exchange_api()
    if api is None or not _loader.load():
        return _IN_PYTHON
    of_torch = (api, Tensor, Parameter, Tensor.is_neg, Tensor.data_ptr)
    compiled = importlib.import_module("amp_kernels._C")
    try:
        compiled.sweep([], [], [], (), (1, 0), 0, 0, 0, False, of_torch)
        compiled.same([], [], {}, [], [])
    except (AttributeError, TypeError, ValueError, NotImplementedError):  # `_C` or the capsule is of another version
        return _IN_PYTHON

    def columns(
        params: list[Tensor], states: list[Any], groups: list[int], keys: Any, device: torch.device, table: Tensor,
        forms: Tensor, checked: Tensor, writes: bool,
    ) -> tuple[int, int]:  # fmt: skip
        where = (1, 0) if device.type == "cpu" else (2, device.index)  # as DLPack numbers devices
        pointers = table.data_ptr(), forms.data_ptr(), checked.data_ptr()
        found: tuple[int, int] = compiled.sweep(params, states, groups, keys, where, *pointers, writes, of_torch)
        return found

    def apart(table: Tensor, forms: Tensor, checked: Tensor, spans: Tensor) -> int:
        rows, count = table.shape
        answer: int = compiled.apart(
            table.data_ptr(), forms.data_ptr(), count, rows, checked.data_ptr(), spans.data_ptr()
        )
        return answer

    return Sweep(columns, apart, compiled.same)


def _columns(
    params: list[Tensor], states: list[Any], groups: list[int], keys: Any, device: torch.device, table: Tensor,
    forms: Tensor, checked: Tensor, writes: bool,
) -> tuple[int, int]:  # fmt: skip
    """Leaves every column to Python."""
    table.zero_()
    forms.fill_(UNREAD)
    return len(params), sum(param.grad is not None for param in params)


def _apart(table: Tensor, forms: Tensor, checked: Tensor, spans: Tensor) -> int:
    """Returns -2, after which the plan compares the tensors in Python."""
    return -2


def _same(lists: list[Any], copies: list[Any], state: dict[Any, Any], keys: list[Any], values: list[Any]) -> bool:
    pairs = [*zip(lists, copies, strict=False), (list(state), keys), (list(state.values()), values)]
    return len(lists) == len(copies) and all(len(a) == len(b) and all(map(operator.is_, a, b)) for a, b in pairs)


_IN_PYTHON = Sweep(_columns, _apart, _same)
