"""The operators on lists of tensors.

Each call writes the sizes, dtypes and addresses of its tensors into a new table (csrc/table.h), which kernels read. C++
does all this in one call (`pass_in_one_call`, `update_in_one_call`; csrc/ops/lists.h) for lists that kernels can walk
as they are. The operators in C++ also take lists whose tensors have to be copied first. The other functions do all this
in Python: for Triton, and for tensors whose memory interleaves.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import _loader, torch_private
from ..families import FAMILIES
from .library import Kernels
from .table import (
    DTYPE_CODES,
    GRADIENT_ROWS,
    HYPER_COLUMNS,
    RECORD,
    STATE_DTYPES,
    Row,
    cut,
    gradient_table,
    int64_tensor,
    is_dense,
    same_layout,
    send,
)

# Cached, because each step cuts the same sizes into the same chunks. In Python this takes 1 or 2 ms for a billion
# elements.
_cut = functools.lru_cache(maxsize=8)(cut)


def are_fake(tensors: Sequence[Tensor]) -> bool:
    """Return whether the tensors have no memory, as during tracing. Only the first tensor is looked at."""
    first = tensors[0]
    return first.is_meta or type(first).__torch_dispatch__ is not Tensor.__torch_dispatch__


def pass_in_one_call(
    grads: list[Tensor], scale: Tensor | None, found_inf: Tensor, norm: Tensor | None, *, write: bool
) -> bool:
    """Do what `gradient_pass` does, in one call of C++. If C++ cannot do it, do nothing and return False."""
    reader = None if torch_private.is_watched() else _loader.reader()
    return reader is not None and reader[0].gradient_pass(reader[1], grads, scale, found_inf, norm, write)


def norm_in_one_call(grads: list[Tensor], scale: Tensor | None, found_inf: Tensor | None) -> Tensor | None:
    """Return what `gradient_pass` returns, from one call of C++. If C++ cannot do it, do nothing and return None."""
    if not grads or type(grads[0]) not in (Tensor, Parameter):  # a fake tensor may be on a device that is not here
        return None
    norm = torch.empty((), dtype=torch.float32, device=grads[0].device)
    flag = torch.zeros_like(norm) if found_inf is None else found_inf
    return norm if pass_in_one_call(grads, scale, flag, norm, write=False) else None


def update_in_one_call(*arguments: Any) -> bool:
    """Do what `update` does, in one call of C++. If C++ cannot do it, do nothing and return False."""
    reader = None if torch_private.is_watched() else _loader.reader()
    return reader is not None and reader[0].update(reader[1], *arguments)


def refuse_negated(*arguments: Any) -> None:
    """Raise ValueError if a tensor in one of the optional lists of `update_` is negated.

    torch's dispatcher looks for negated tensors only in lists that are not optional. Kernels would take the negative of
    the values of the others.
    """
    given = Update(*arguments)
    for tensors in (*given.states, given.masters, given.grad_remainders):
        if any(isinstance(t, Tensor) and t.is_neg() for t in tensors or ()):
            raise ValueError(f"{given.family}_: states and masters must not be negated views; call resolve_neg() first")


def gradient_pass(
    ops: Kernels, grads: Sequence[Tensor], inv_scale: Tensor | None, found_inf: Tensor, *, write: bool
) -> Tensor:
    """Check all gradients for NaN and inf, and return their norm, in one read. With `write`, unscale them too."""
    device = found_inf.device
    dense = [g if is_dense(g) else g.contiguous() for g in grads]
    chunks = _cut(tuple(g.numel() for g in dense), blocks=ops._load_unscale(found_inf))
    norm = torch.empty((), dtype=torch.float32, device=device)
    ops._unscale_table_(
        send(ops, gradient_table(dense), device),
        send(ops, chunks.entries, device),
        chunks.size,
        inv_scale,
        False,  # divide
        write,
        False,  # clear
        torch.empty(chunks.entries.shape[0], dtype=torch.float64, device=device),
        found_inf,
        norm,
        torch.zeros(RECORD, dtype=torch.int64, device=device),
    )
    if write:
        _copy_back(grads, dense)
    return norm


class Update(NamedTuple):
    """The arguments of the operator `update_`."""

    family: str
    params: list[Tensor]
    grads: list[Tensor]
    state0: list[Tensor] | None
    state1: list[Tensor] | None
    state2: list[Tensor] | None
    masters: list[Tensor] | None
    hyper: list[float]
    lr: float
    tensor_lr: Tensor | None
    steps_taken: int
    grad_scale: Tensor | None
    found_inf: Tensor | None
    # Only for averages. Their `grads` are the weights that they follow. This list holds the remainders of those weights
    # that are 16-bit.
    grad_remainders: list[Tensor] | None = None

    @property
    def states(self) -> tuple[list[Tensor] | None, ...]:
        """The lists of states, one for each state of the family."""
        return (self.state0, self.state1, self.state2)[: len(FAMILIES[self.family].states)]


def update(ops: Kernels, *arguments: Any) -> None:
    """Update every parameter once, with one launch for each combination of dtypes."""
    given = Update(*arguments)
    if not given.params:
        return
    params, grads, masters = given.params, given.grads, given.masters or ()
    states = [state or () for state in given.states]
    device = params[0].device
    dense_params = [p if is_dense(p) else p.contiguous() for p in params]
    dense_grads = [_as_laid_out(g, p) for g, p in zip(grads, dense_params, strict=True)]
    dense_states = [[_as_laid_out(s, p) for s, p in zip(state, dense_params, strict=False)] for state in states]
    is_average = given.grad_remainders is not None
    # Row MASTER of the table. The entry of a parameter is its fp32 master, or the remainder that together with the
    # parameter gives the master (csrc/formulas/remainder.h). The entry of an average is the remainder of the weight
    # that it follows. An entry is None if there is no such tensor.
    master_row = (
        _for_low_precision(grads, given.grad_remainders or ()) if is_average else _for_low_precision(params, masters)
    )
    dense_row = [None if m is None else _as_laid_out(m, p) for m, p in zip(master_row, dense_params, strict=True)]

    steps = torch.full((len(params),), given.steps_taken, dtype=torch.int32, device=device)
    table = send(ops, _update_table(dense_params, dense_grads, dense_states, dense_row, steps), device)
    record = torch.zeros(RECORD, dtype=torch.int64, device=device)
    hyper_row = torch.tensor(
        [*given.hyper, *itertools.repeat(0.0, HYPER_COLUMNS - len(given.hyper))], dtype=torch.float32, device="cpu"
    )
    rate = (
        send(ops, torch.tensor([given.lr, 0.0], dtype=torch.float32, device="cpu"), device)
        if given.tensor_lr is None
        else given.tensor_lr
    )
    present = sum(bool(state) << k for k, state in enumerate(states))  # bit k: there is a k-th state
    numels, fp32 = tuple(p.numel() for p in dense_params), STATE_DTYPES[torch.float32]
    for codes, order in _by_dtypes(dense_params, dense_row, dense_grads):
        chunks = _cut(
            numels, order, ops._load_update(table, given.family, *codes, present, STATE_DTYPES[torch.float32])
        )
        entries = send(ops, chunks.entries, device)
        ops._update_table_(
            given.family,
            table,
            entries,
            chunks.size,
            record,
            send(ops, hyper_row, device),
            send(ops, int64_tensor([rate.data_ptr()]), device),
            *codes,
            present,
            fp32,
            given.grad_scale,
            given.found_inf,
            None,
            0.0,
        )
    _copy_back(params, dense_params)
    if not is_average:
        _copy_back(masters, [m for m in dense_row if m is not None])
    for state, dense_state in zip(states, dense_states, strict=True):
        _copy_back(state, dense_state)


def _for_low_precision(tensors: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor | None]:
    """Return a list that matches `tensors`: None for an fp32 tensor, and the next element of `given` for any other."""
    rest = iter(given)
    return [None if t.dtype is torch.float32 else next(rest) for t in tensors]


def _update_table(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    master_row: Sequence[Tensor | None],
    steps: Tensor,
) -> Tensor:
    table = torch.zeros(Row.SCALE, len(params), dtype=torch.int64, device="cpu")
    table[:GRADIENT_ROWS] = gradient_table(grads)
    table[Row.PARAM] = int64_tensor(p.data_ptr() for p in params)
    table[Row.MASTER] = int64_tensor(0 if m is None else m.data_ptr() for m in master_row)
    table[Row.STEP] = int64_tensor(steps.data_ptr() + t * steps.element_size() for t in range(len(params)))
    for k, state in enumerate(states):
        if state:
            table[Row.STATE + k] = int64_tensor(s.data_ptr() for s in state)
    return table


def _by_dtypes(
    params: Sequence[Tensor], master_row: Sequence[Tensor | None], grads: Sequence[Tensor]
) -> Iterator[tuple[tuple[int, bool, int], tuple[int, ...]]]:
    """Yield each combination of dtypes, with the positions of the parameters that have it."""
    codes = [
        (DTYPE_CODES[p.dtype], m is not None and m.dtype is torch.int16, DTYPE_CODES[g.dtype])
        for p, m, g in zip(params, master_row, grads, strict=True)
    ]
    for code in sorted(set(codes)):
        yield code, tuple(i for i, c in enumerate(codes) if c == code)


def _as_laid_out(tensor: Tensor, model: Tensor) -> Tensor:
    """Return a tensor with the elements of `tensor`, laid out in memory like `model`, which must be dense.

    The result is `tensor` itself if it is laid out like that, otherwise a copy.
    """
    return tensor if same_layout(tensor, model) else torch.empty_like(model, dtype=tensor.dtype).copy_(tensor)


def _copy_back(tensors: Sequence[Tensor], worked_on: Sequence[Tensor]) -> None:
    for tensor, copy in zip(tensors, worked_on, strict=True):
        if copy is not tensor:
            tensor.copy_(copy)
