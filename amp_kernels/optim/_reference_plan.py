"""A step in plain torch, with the outcomes of the native plan: where nothing is compiled, and as its specification."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import reference
from ..families import Family
from ._observe import local
from ._plan import Hyper, Member, Plan, check_written, read_gradient


class ReferencePlan(Plan):
    """Loops over the parameters; sync-free like the kernels, since every choice is a `torch.where`."""

    def __init__(self, family: Family, device: torch.device, members: Sequence[Member], record: Tensor) -> None:
        super().__init__("reference", device, members, record)
        self._family = family
        self._hyper: Sequence[Hyper] = ()
        self._pairs: list[tuple[int, Tensor]] = []
        self._memory = self._parameter_memory()

    def refresh(self, *, writes: bool) -> bool:
        if self._parameter_memory() != self._memory:
            return False
        self._pairs = []
        for t, member in enumerate(self.members):
            if member.param.grad is None:
                continue
            if member.states is None:
                return False
            grad = read_gradient(member)
            assert grad is not None
            self._pairs.append((t, grad))
        self.written = [self.members[t].param for t, _ in self._pairs]
        if writes:
            check_written([self.members[t] for t, _ in self._pairs], [grad for _, grad in self._pairs])
        return True

    def _parameter_memory(self) -> list[object]:
        return [(local(m.param).data_ptr(), m.param.dtype) for m in self.members if m.states is not None]

    def set_hyper(self, hyper: Sequence[Hyper]) -> None:
        self._hyper = [h._replace(lr=h.lr.view(())) if isinstance(h.lr, Tensor) else h for h in hyper]

    def check(self, scale: Tensor | None, *, divide: bool, write: bool, clear: bool) -> None:
        factor = scale.reciprocal() if scale is not None and divide else scale
        flags = [torch.zeros_like(self.found_inf) for _ in self.members]
        for t, grad in self._pairs:
            reference.grad_norm([grad], found_inf=flags[t])
        grads = [grad for _, grad in self._pairs]
        self.norm.copy_(reference.grad_norm(grads, inv_scale=factor) if grads else torch.zeros_like(self.norm))
        bad = torch.stack(flags) != 0 if flags else torch.zeros(1, dtype=torch.bool, device=self.device)
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
        if grad_norm is not None:
            coefficient = (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)
            grad_scale = coefficient.reciprocal() if grad_scale is None else grad_scale / coefficient
        applied = 1 if found_inf is None else (found_inf == 0).to(torch.int32).view(())
        for t, grad in self._pairs:
            member = self.members[t]
            param = local(member.param)
            masters = [] if member.remainder is None else [member.remainder]
            states = [[] if s is None else [s] for s in member.states or ()]
            step = member.state["step"]
            hyper = self._hyper[member.group]
            self._family.reference(
                [param], [grad], states, masters, hyper.values, lr=hyper.lr, steps_taken=step,
                grad_scale=grad_scale, found_inf=found_inf,
            )  # fmt: skip
            step.add_(applied)
        self._pairs = []  # gradients are not ours to keep
