"""The step plan: everything a step needs on the device, built once, so that a step only looks for changes.

A plan owns tables, counters and scalars of one device; remainders and states belong to ``optimizer.state``, gradients
to their parameters. See csrc/table.h for the table.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..ops.table import (
    DTYPE_CODES,
    HYPER_COLUMNS,
    UPDATE_ROWS,
    Row,
    cut,
    int64_tensor,
    resend,
    same_layout,
    send,
    shares_memory,
)
from ._observe import PLACE, Seen, Spans, are_plain, local, observe, plain_gradient

if TYPE_CHECKING:
    from ..backends import Kernels
    from ..families import Family

LR_COLUMN = HYPER_COLUMNS - 1  # a group's float learning rate; a tensor lr is read where it lies


def read_gradient(member: Member) -> Tensor | None:
    """The gradient's memory on this rank, which kernels can read."""
    if member.param.grad is None:
        return None
    grad = plain_gradient(member.param, member.name)
    if grad.shape != member.target.shape:  # as one kept from before its parameter's .data was replaced
        raise RuntimeError(
            f"step: the gradient of {member.name} must have the parameter's shape {tuple(member.target.shape)}, got "
            f"{tuple(grad.shape)}; set it to None when the parameter's .data is replaced"
        )
    if grad.device != member.target.device:
        raise RuntimeError(
            f"step: the gradient of {member.name} must be on {member.target.device} with the parameter, got "
            f"{grad.device}; set it to None when the parameter is moved"
        )
    return grad


def check_written(members: Sequence[Member], grads: Sequence[Tensor | None]) -> None:
    """Before gradients are multiplied in place: each is written once, and autograd may know of it."""
    names = [m.name for m, g in zip(members, grads, strict=True) if g is not None]
    written = [g for g in grads if g is not None]
    inference = next((name for name, g in zip(names, written, strict=True) if g.is_inference()), None)
    if inference is not None:
        raise RuntimeError(
            f"unscale_: the gradient of {inference} must not be an inference tensor, since it is written; clone() it"
        )
    shared = shares_memory(written)
    if shared is not None:
        raise RuntimeError(
            f"unscale_: the gradient of {names[shared]} must have memory of its own, since it is written, but some "
            "element of it is one of another gradient too, or twice its own; clone() it"
        )


def _host(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="cpu")  # whatever torch.set_default_device says


def capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@dataclass(eq=False, slots=True)
class Member:
    """A parameter as a plan sees it. Without `states` (None) it is idle: it has no gradient, and `target` is empty."""

    param: Tensor
    name: str
    group: int
    target: Tensor  # what the kernel writes: the parameter's local memory, or a dense mirror of it
    remainder: Tensor | None  # of a 16-bit parameter's master
    states: tuple[Tensor | None, ...] | None
    state: dict[str, Any]  # optimizer.state[param]

    @property
    def is_mirrored(self) -> bool:
        return self.target.data_ptr() != local(self.param).data_ptr()


class Hyper(NamedTuple):
    """The hyper-parameters of a group, as the type of its family has them, and its learning rate."""

    values: Any
    lr: float | Tensor


class Plan:
    """What is common to the plan of the native kernels and the one of the reference."""

    def __init__(self, backend: str, device: torch.device, members: Sequence[Member], record: Tensor) -> None:
        self.backend = backend
        self.device = device
        self.members = members
        # In the order of the parameters, which is the same on every rank.
        self.meshes = list(dict.fromkeys(m.param.device_mesh for m in members if isinstance(m.param, DTensor)))
        self.record = record  # int64: ticket, passes, pass and member of the last overflow (csrc/table.h)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self.norm = torch.zeros((), dtype=torch.float32, device=device)
        self.written: list[Tensor] = []  # the parameters that an update writes: those with a gradient

    def refresh(self, *, writes: bool) -> bool:
        """Follows what changed since the last step; False if the plan has to be built anew. `writes`: gradients will be
        written."""
        raise NotImplementedError

    def set_hyper(self, hyper: Sequence[Hyper]) -> None:
        raise NotImplementedError

    def check(self, scale: Tensor | None, *, divide: bool, write: bool, clear: bool) -> None:
        """The gradient pass, into `norm`, `found_inf` and `record`; without `clear` the verdict of an earlier pass over
        the same gradients stands, and this one is not counted."""
        raise NotImplementedError

    def update(
        self,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        grad_norm: Tensor | None,
        max_norm: float,
    ) -> None:
        raise NotImplementedError

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph points to what this plan owns."""
        return False


class _Tables(NamedTuple):
    """Device copies of what the host knows; a capture gets its own, which no later step rewrites."""

    table: Tensor
    hyper: Tensor
    lr: Tensor


class _Form(NamedTuple):
    """What the kernel of an update is compiled for (csrc/table.h)."""

    param_dtype: int
    split: bool
    grad_dtype: int
    states: int


class _Bucket(NamedTuple):
    """The chunks of one combination of dtypes, and their counters."""

    form: _Form
    entries: Tensor
    steps: Tensor


class NativePlan(Plan):
    """Two launches a step: `check`, and `update` for each combination of dtypes."""

    def __init__(
        self,
        backend: str,
        ops: Kernels,
        family: Family,
        device: torch.device,
        members: Sequence[Member],
        record: Tensor,
    ) -> None:
        super().__init__(backend, device, members, record)
        self._ops = ops
        self._family = family.name
        self._rows = [t for t, m in enumerate(members) if m.states is not None]
        self._row_index = int64_tensor(self._rows)
        self._started = [members[t] for t in self._rows]
        self._idle = [m for m in members if m.states is None]
        self._targets = [m.target for m in self._started]
        self._params = [m.param for m in self._started]
        self._mirrored = [m for m in self._started if m.is_mirrored]
        self._owned = [t for m in self._started for t in (m.remainder, *(m.states or ())) if t is not None]
        self._is_plain = are_plain([*self._params, *self._owned])
        self._observation = _host(len(Seen), len(self._started), dtype=torch.int64)
        self._seen = self._observation.unbind()
        self._known = torch.zeros_like(self._observation).unbind()
        # A mirror is nobody else's.
        self._written = Spans([m.target for m in self._started if not m.is_mirrored] + self._owned)
        self._watched = self._owned
        self._places = _host(PLACE, len(self._watched), dtype=torch.int64)
        self._observe(writes=False)
        for row in (Seen.ADDRESS, Seen.LAYOUT):
            self._known[row].copy_(self._seen[row])
        self._known_places = self._places.clone()

        self._is_steady = False  # every started parameter has a gradient, laid out as it
        self._relaid: list[tuple[Tensor, Tensor]] = []  # gradients laid out otherwise, and what kernels read
        self._grad_dtypes: list[torch.dtype] = []
        self._codes: list[tuple[int, int]] = []
        self._buckets: list[_Bucket] = []
        self._host_table = self._make_table()
        self._hyper_key: list[object] = []
        self._host_hyper = _host(0, HYPER_COLUMNS, dtype=torch.float32)
        self._tensor_lr: dict[int, Tensor] = {}
        self._tables: _Tables | None = None
        self._was_captured = False
        self._kept: list[object] = []  # what captured graphs point to

    # ------------------------------------------------------------------------------------------------ refreshing
    def refresh(self, *, writes: bool) -> bool:
        is_captured = capturing(self.device)
        if is_captured or self._was_captured:
            self._tables = None  # a captured step sends tables of its own, which no later step rewrites
        self._was_captured = is_captured
        self._observe(writes=writes)
        if not (self._is_as_known(Seen.ADDRESS) and self._is_as_known(Seen.LAYOUT)):
            return False
        if not torch.equal(self._places, self._known_places):
            return False
        if any(m.param.grad is not None for m in self._idle):
            return False
        if not self._same_gradients():
            self._take_gradients()
        if writes:
            check_written(self._started, self._gradients())
        self._follow_steps()
        return True

    def _observe(self, *, writes: bool) -> None:
        observe(
            self._params, self._watched, self._written, self._observation, self._places,
            plain=self._is_plain, writes=writes,
        )  # fmt: skip

    def _is_as_known(self, row: Seen) -> bool:
        return torch.equal(self._seen[row], self._known[row])

    def _gradients(self) -> list[Tensor | None]:
        return [None if p.grad is None else local(p.grad) for p in self._params]

    def _same_gradients(self) -> bool:
        """The steady state: same dtypes and layout as in the last step."""
        if not self._is_steady or not self._is_as_known(Seen.GRAD_LAYOUT):
            return False
        if not self._is_as_known(Seen.GRAD):
            self._send_gradients(self._seen[Seen.GRAD])
        return True

    def _take_gradients(self) -> None:
        """Any state of affairs: None, other dtypes, other strides."""
        self._is_steady = False  # also if something below raises
        targets = self._targets
        self._relaid = []
        grads = [read_gradient(member) for member in self._started]
        for t, grad in enumerate(grads):
            if grad is None:
                continue
            if self._written.meet(grad):
                raise RuntimeError(
                    f"step: the gradient of {self._started[t].name} must share no memory with parameters or their "
                    "states, which the step writes; clone() it"
                )
            if not same_layout(grad, targets[t]):
                grads[t] = copy = torch.empty_like(targets[t], dtype=grad.dtype).copy_(grad)
                self._relaid.append((grad, copy))
        before = self._grad_dtypes or [t.dtype for t in targets]
        self._grad_dtypes = [d if g is None else g.dtype for d, g in zip(before, grads, strict=True)]
        codes = [(DTYPE_CODES[t.dtype], DTYPE_CODES[d]) for t, d in zip(targets, self._grad_dtypes, strict=True)]
        if codes != self._codes:
            self._arrange(codes)
        # Kernels pass over what has no address, but the updates of an empty tensor count.
        nowhere = self.norm.data_ptr()
        addresses = int64_tensor(0 if g is None else g.data_ptr() or nowhere for g in grads)
        self._send_gradients(addresses)
        self.written = [p for p, g in zip(self._params, grads, strict=True) if g is not None]
        self._is_steady = len(self.written) == len(self._started) and torch.equal(addresses, self._seen[Seen.GRAD])
        self._known[Seen.GRAD_LAYOUT].copy_(self._seen[Seen.GRAD_LAYOUT])

    def _send_gradients(self, addresses: Tensor) -> None:
        self._known[Seen.GRAD].copy_(addresses)
        self._host_table[Row.GRAD].index_copy_(0, self._row_index, addresses)
        if self._tables is not None:
            resend(self._ops, self._host_table[Row.GRAD], self._tables.table[Row.GRAD])

    # ---------------------------------------------------------------------------------------------------- tables
    def _make_table(self) -> Tensor:
        table = _host(UPDATE_ROWS, len(self.members), dtype=torch.int64)
        for t, member in zip(self._rows, self._started, strict=True):
            table[Row.NUMEL, t] = member.target.numel()
            table[Row.GROUP, t] = member.group
            table[Row.PARAM, t] = member.target.data_ptr()
            table[Row.MASTER, t] = 0 if member.remainder is None else member.remainder.data_ptr()
            for k, state in enumerate(member.states or ()):
                table[Row.STATE + k, t] = 0 if state is None else state.data_ptr()
        return table

    def _arrange(self, codes: list[tuple[int, int]]) -> None:
        """Cuts the tensors into chunks, those of a combination of dtypes side by side."""
        if capturing(self.device):
            raise RuntimeError(
                "step: a capture must follow a step with gradients of the same dtypes, since state cannot be "
                "allocated inside it; run one step before capturing"
            )
        form_of = self._forms(codes)
        numels = [max(1, m.target.numel()) for m in self.members]  # an empty tensor has a chunk, to count its updates
        chunks = cut(numels, sorted(self._rows, key=form_of.__getitem__), self._load_kernels(numels, form_of))
        self._chunk_rows = chunks.entries[:, 0].tolist()
        self._chunk_size = chunks.size
        self._codes = codes
        self._entries = send(self._ops, chunks.entries, self.device)
        self._take_steps()
        self._partials = torch.zeros(len(self._chunk_rows), dtype=torch.float64, device=self.device)
        self._host_table[Row.GRAD_DTYPE, self._rows] = int64_tensor(grad for _, grad in codes)
        self._tables = None
        self._buckets = []
        begin = 0
        for form, rows in itertools.groupby(self._chunk_rows, key=form_of.__getitem__):
            part = slice(begin, begin + len(list(rows)))
            self._buckets.append(_Bucket(form, self._entries[part], self._steps[part]))
            begin = part.stop

    def _forms(self, codes: list[tuple[int, int]]) -> dict[int, _Form]:
        """Of each row. Parameters of one combination of dtypes share a launch, with all states that one of them has."""
        states: dict[tuple[int, int], int] = {}
        for code, member in zip(codes, self._started, strict=True):
            mine = sum((state is not None) << k for k, state in enumerate(member.states or ()))
            states[code] = states.get(code, 0) | mine
        return {
            t: _Form(param, param != DTYPE_CODES[torch.float32], grad, states[param, grad])
            for t, (param, grad) in zip(self._rows, codes, strict=True)
        }

    def _load_kernels(self, numels: Sequence[int], form_of: dict[int, _Form]) -> int:
        """Loads the kernels of a step, which a capture may not do. Returns how many blocks run at a time of the update
        that has most elements."""
        self._ops._load_unscale(self.norm)
        blocks = {form: self._ops._load_update(self.norm, self._family, *form) for form in set(form_of.values())}
        elements = dict.fromkeys(blocks, 0)
        for t, form in form_of.items():
            elements[form] += numels[t]
        return max(blocks.items(), key=lambda item: elements[item[0]])[1] if blocks else 0

    def _take_steps(self) -> None:
        """Makes a counter for each chunk, and the first of a tensor its ``state["step"]``. Asks the device nothing."""
        zero = torch.zeros((), dtype=torch.int32, device=self.device)
        taken = torch.stack([zero if m.states is None else m.state["step"] for m in self.members])
        self._steps = taken[send(self._ops, int64_tensor(self._chunk_rows), self.device)]
        firsts: dict[int, int] = {}
        for chunk, row in enumerate(self._chunk_rows):
            firsts.setdefault(row, chunk)
        self._first_chunks = int64_tensor(firsts[row] for row in self._chunk_rows)
        for row, chunk in firsts.items():
            # Past the count of changes (`ParameterState`), which would have the next step build a plan.
            dict.__setitem__(self.members[row].state, "step", self._steps[chunk])
        self._steps_version = self._steps._version
        self._watched = self._owned + [m.state["step"] for m in self._started]  # its .data may be replaced too
        self._places = _host(PLACE, len(self._watched), dtype=torch.int64)
        self._observe(writes=False)
        self._known_places = self._places.clone()

    def _follow_steps(self) -> None:
        """Somebody wrote a ``state["step"]`` in place: all chunks of the tensor count on from there."""
        if self._codes and self._steps._version != self._steps_version:
            self._steps.copy_(self._steps[send(self._ops, self._first_chunks, self.device)])
            self._steps_version = self._steps._version

    def set_hyper(self, hyper: Sequence[Hyper]) -> None:
        key = [(h.values, self._lr_key(h.lr)) for h in hyper]
        if key == self._hyper_key:
            return
        self._hyper_key = list(key)
        self._host_hyper = _host(len(hyper), HYPER_COLUMNS, dtype=torch.float32)
        for row, (values, lr) in enumerate(key):
            self._host_hyper[row, : len(values)] = torch.tensor(values, dtype=torch.float32, device="cpu")
            self._host_hyper[row, LR_COLUMN] = lr if isinstance(lr, float) else 0.0
        self._tensor_lr = {g: h.lr for g, h in enumerate(hyper) if isinstance(h.lr, Tensor) and self._is_live(h.lr)}
        if self._tables is not None:
            self._tables = self._tables._replace(**self._send_hyper())

    def _is_live(self, lr: Tensor) -> bool:
        return lr.device == self.device and lr.dtype is torch.float32

    def _lr_key(self, lr: float | Tensor) -> float | int:
        """A float, or the address of a tensor; one that kernels cannot read costs a look at its value a step."""
        if isinstance(lr, Tensor):
            return lr.data_ptr() if self._is_live(lr) else float(lr)
        return float(lr)

    def _send_hyper(self) -> dict[str, Tensor]:
        hyper = send(self._ops, self._host_hyper, self.device)
        own = hyper.data_ptr() + hyper.element_size() * LR_COLUMN
        stride = hyper.element_size() * HYPER_COLUMNS
        rates = (
            self._tensor_lr[g].data_ptr() if g in self._tensor_lr else own + g * stride for g in range(hyper.shape[0])
        )
        return {"hyper": hyper, "lr": send(self._ops, int64_tensor(rates), self.device)}

    def _device_tables(self) -> _Tables:
        if self._tables is None:
            self._tables = _Tables(send(self._ops, self._host_table, self.device), **self._send_hyper())
            if self._was_captured:
                self._kept += [self._tables, self._relaid, self._entries, self._steps, self._partials, self._tensor_lr]
        return self._tables

    # --------------------------------------------------------------------------------------------------- launches
    def check(self, scale: Tensor | None, *, divide: bool, write: bool, clear: bool) -> None:
        self._ops._unscale_table_(
            self._device_tables().table,
            self._entries,
            self._chunk_size,
            scale,
            divide,
            write,
            clear,
            self._partials,
            self.found_inf,
            self.norm,
            self.record,
        )
        if write:
            torch.autograd.graph.increment_version([g for g in self._gradients() if g is not None])
            for grad, copy in self._relaid:
                grad.copy_(copy)

    def update(
        self,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        grad_norm: Tensor | None,
        max_norm: float,
    ) -> None:
        for member in self._mirrored:
            member.target.copy_(local(member.param))
        tables = self._device_tables()
        for bucket in self._buckets:
            self._ops._update_table_(
                self._family,
                tables.table,
                bucket.entries,
                self._chunk_size,
                bucket.steps,
                tables.hyper,
                tables.lr,
                *bucket.form,
                grad_scale,
                found_inf,
                grad_norm,
                max_norm,
            )
        torch.autograd.graph.increment_version(self.written)
        for member in self._mirrored:
            local(member.param).copy_(member.target)
        self._relaid = []

    @property
    def is_captured(self) -> bool:
        return bool(self._kept)
