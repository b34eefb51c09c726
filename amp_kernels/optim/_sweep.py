"""Reads the tensors of a step: where they lie, how they are laid out, which gradients there are.

Nothing of it is kept for the next step, since anybody may write, move or replace them.
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

ABSENT, UNREAD = -1, -2  # in place of a form: a column without gradient and state, and one that is left to Python


class Sweep(NamedTuple):
    """What reads the tensors of a step: `amp_kernels._C`, or where it cannot, Python.

    Attributes:
        columns: ``(params, states, groups, keys, device, table, forms, checked, writes) -> (unread, gradients)``.
            Writes the column of each parameter into `table`, int64 [rows, parameters] of the host (`ops.table.Row`),
            and into `forms`, int64 [parameters], its dtypes and states, or `ABSENT`, or `UNREAD`. `states` are the
            dicts of ``optimizer.state``, `groups` the parameters' group numbers, `keys` the names of each group's
            states in the order of rows. `writes`: gradients will be written, which ends their sharing of memory with
            lazy clones; parameters always do. For a thousand parameters it takes a twelfth of the time of Python.
        apart: ``(table, forms, checked, spans) -> int``. -1 if no two of the tensors that a step writes share memory,
            and no gradient lies in them; else the column of a gradient that does, or -2. It answers as the last time
            if table and forms, of which it keeps a copy in `checked`, are bit for bit what they were.
        same: ``(lists, copies, state, keys, values) -> bool``. Whether lists of parameters and the dict hold the same
            objects in the same order.
    """

    columns: Callable[..., tuple[int, int]]
    apart: Callable[..., int]
    same: Callable[..., bool]


@functools.cache
def sweep() -> Sweep:
    api = torch_private.tensor_exchange_api()
    if api is None or not _loader.load():
        return _IN_PYTHON
    torchs = (api, Tensor, Parameter, Tensor.is_neg, Tensor.data_ptr)
    compiled = importlib.import_module("amp_kernels._C")
    try:
        compiled.sweep([], [], [], (), (1, 0), 0, 0, 0, False, torchs)
        compiled.same([], [], {}, [], [])
    except (AttributeError, TypeError, ValueError, NotImplementedError):  # another version, of `_C` or of the interface
        return _IN_PYTHON

    def columns(
        params: list[Tensor], states: list[Any], groups: list[int], keys: Any, device: torch.device, table: Tensor,
        forms: Tensor, checked: Tensor, writes: bool,
    ) -> tuple[int, int]:  # fmt: skip
        where = (1, 0) if device.type == "cpu" else (2, device.index)  # as DLPack numbers devices
        pointers = table.data_ptr(), forms.data_ptr(), checked.data_ptr()
        found: tuple[int, int] = compiled.sweep(params, states, groups, keys, where, *pointers, writes, torchs)
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
    """Leaves all to the plan, which looks at each column in Python."""
    table.zero_()
    forms.fill_(UNREAD)
    return len(params), sum(param.grad is not None for param in params)


def _apart(table: Tensor, forms: Tensor, checked: Tensor, spans: Tensor) -> int:
    """-2: the plan looks at the tensors themselves."""
    return -2


def _same(lists: list[Any], copies: list[Any], state: dict[Any, Any], keys: list[Any], values: list[Any]) -> bool:
    pairs = [*zip(lists, copies, strict=False), (list(state), keys), (list(state.values()), values)]
    return len(lists) == len(copies) and all(len(a) == len(b) and all(map(operator.is_, a, b)) for a, b in pairs)


_IN_PYTHON = Sweep(_columns, _apart, _same)
