"""The plan in plain torch: it specifies the native plan, and replaces it where there are no kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import reference
from ..families import Family
from ..ops.table import STATE_DTYPES, STATES, is_dense
from ..reference.states import decode, encode, random_bits, to_bf16
from ..reference.update import assign
from ._plan import Column, Hyper, Keys, Members, Plan, Read, check_apart, check_gradients
from ._state import flat
from ._tensors import check_written, read_gradient


class ReferencePlan(Plan):
    """Updates one parameter after the other.

    Like the native plan, this plan does not wait for the device. Every decision that depends on a value on the device
    is therefore a `torch.where`.
    """

    def __init__(self, family: Family, device: torch.device, members: Members, record: Tensor) -> None:
        super().__init__("reference", device, members, record)
        self._family = family
        self._hyper: Sequence[Hyper] = ()
        self._found: dict[int, tuple[Column, Tensor]] = {}  # the columns of this step, and their gradients

    def refresh(self, keys: Keys, read: Read, *, writes: bool) -> bool:
        self._found = {}
        members = self.members
        check_gradients(zip(members.params, members.names, strict=True))  # before `read` may convert states
        for t, (param, name, group) in enumerate(zip(members.params, members.names, members.groups, strict=True)):
            column = None if param.grad is None else read(name, group, param)
            if column is None:
                continue
            if column.param.device != self.device:
                return False
            self._found[t] = column, read_gradient(param, name, column.param)
        names = [members.names[t] for t in self._found]
        check_apart(names, [column for column, _ in self._found.values()], self._gradients())
        self.written = [members.params[t] for t in self._found]
        if writes:
            check_written(names, self._gradients())
        return True

    def _gradients(self) -> list[Tensor]:
        return [grad for _, grad in self._found.values()]

    def set_hyper(self, hyper: Sequence[Hyper]) -> None:
        self._hyper = [h._replace(lr=h.lr.view(())) if isinstance(h.lr, Tensor) else h for h in hyper]

    def check(self, scale: Tensor | None, *, write: bool, clear: bool) -> None:
        factor = None if scale is None else scale.reciprocal()
        flags = [torch.zeros_like(self.found_inf) for _ in self.members.params]
        squares = torch.zeros_like(self.norm, dtype=torch.float64)
        for t, (_, grad) in self._found.items():
            norm = reference.grad_norm([grad], inv_scale=factor, found_inf=flags[t])
            squares += self.members.weights[t] * norm.double().square()
        grads = self._gradients()
        self.norm.copy_(squares.sqrt())
        bad = torch.stack(flags) != 0
        self.found_inf.copy_(bad.any() if clear else (self.found_inf != 0) | bad.any())
        if clear:
            self.record[1] += 1
            overflow = torch.stack([self.record[1], bad.int().argmax()])
            self.record[2:] = torch.where(bad.any(), overflow, self.record[2:])
        if write and factor is not None:
            reference.unscale_(grads, inv_scale=factor, found_inf=torch.zeros_like(self.found_inf))

    def update(
        self,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        grad_norm: Tensor | None,
        max_norm: float,
    ) -> None:
        grad_scale = _clipped(grad_scale, grad_norm, max_norm)
        applied = 1 if found_inf is None else (found_inf == 0).to(torch.int32).view(())
        # A gradient with gaps may lie in the memory of a parameter. So it is copied before any parameter is written, as
        # in native plans.
        found = {t: (c, grad if is_dense(grad) else grad.clone()) for t, (c, grad) in self._found.items()}
        for t, (column, grad) in found.items():
            masters = [] if column.remainder is None else [column.remainder]
            states = [self._fp32(column, k) for k in range(len(self._family.states))]
            hyper = self._hyper[self.members.groups[t]]
            reference.update_(
                self._family.formula, [column.memory], [grad], [None if s is None else [s] for s in states], masters,
                hyper.values, lr=hyper.lr, steps_taken=unsigned(column.step), grad_scale=grad_scale,
                found_inf=found_inf,
            )  # fmt: skip
            self._store(t, column, states, found_inf)
            column.step.add_(applied)
        self.forget()

    def forget(self) -> None:
        self._found = {}

    def _fp32(self, column: Column, k: int) -> Tensor | None:
        """Returns a state in fp32: the state itself, or a copy if it is bf16 or in codes."""
        state, storage = column.states[k], column.storage
        if state is None or not storage.coded >> k & 1:
            return state
        fp32 = state.float()
        if storage.dtype == STATE_DTYPES[torch.int8]:
            scale, code = column.states[STATES + k], self._family.codes[k]
            assert scale is not None and code is not None
            flat(fp32).copy_(decode(flat(state), scale, code))
        return fp32

    def _store(self, t: int, column: Column, states: Sequence[Tensor | None], found_inf: Tensor | None) -> None:
        """Rounds the new states of column t at random, and stores them."""
        storage, step = column.storage, unsigned(column.step)
        if storage.coded == 0:
            return
        bits = random_bits(column.memory.numel(), step, t, self.device)
        for k in [k for k in range(len(bits)) if storage.coded >> k & 1]:
            state, new, code = column.states[k], states[k], self._family.codes[k]
            assert state is not None and new is not None and code is not None
            if storage.dtype == STATE_DTYPES[torch.int8]:
                scale = column.states[STATES + k]
                assert scale is not None
                codes, new_scale = encode(flat(new), code, bits[k])
                assign(scale, new_scale, found_inf)
            else:
                codes = to_bf16(flat(new), bits[k])
            assign(flat(state), codes, found_inf)


def _clipped(grad_scale: Tensor | None, grad_norm: Tensor | None, max_norm: float) -> Tensor | None:
    """Returns `grad_scale` with the clip coefficient in it. Gradients are divided by the result."""
    if grad_norm is None:
        return grad_scale
    coefficient = (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    return coefficient.reciprocal() if grad_scale is None else grad_scale / coefficient


def unsigned(step: Tensor) -> Tensor:
    """Returns an int32 count of steps as int64. The count is read as an unsigned number, as in the kernels."""
    return step.to(torch.int64) & 0xFFFFFFFF
