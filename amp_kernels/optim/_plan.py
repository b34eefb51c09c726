"""The step on one device: it writes a table of the tensors that it finds, and launches the kernels that read the table.

A plan remembers nothing about a tensor. It owns scratch memory, and chunk entries, which depend on sizes and dtypes
alone. csrc/table.h describes the table.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..ops.table import (
    DTYPE_CODES,
    FIXED_ROWS,
    HYPER_COLUMNS,
    Row,
    cut,
    int64_tensor,
    resend,
    same_layout,
    send,
    shares_memory,
)
from ._sweep import ABSENT, UNREAD, sweep
from ._tensors import Spans, check_written, local, read_gradient

if TYPE_CHECKING:
    from ..families import Family
    from ..ops.library import Kernels

LR_COLUMN = HYPER_COLUMNS - 1  # a group's float learning rate; a tensor lr is read where it lies
HYPER_WORDS = HYPER_COLUMNS // 2  # int64 words that a group's fp32 hyper-parameters take
LAYOUTS = 4  # that a plan keeps, for steps that alternate between sets of gradients or their dtypes


def capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Members(NamedTuple):
    """The parameters of one device, in the order of the groups."""

    params: list[Tensor]
    names: list[str]
    groups: list[int]
    states: list[dict[str, Any] | None]  # those of ``optimizer.state``


class Column(NamedTuple):
    """The tensors of one parameter on this rank."""

    memory: Tensor  # the parameter's
    param: Tensor  # what kernels write: the same, or a dense mirror of it
    remainder: Tensor | None  # of a 16-bit parameter's master
    step: Tensor
    states: tuple[Tensor | None, ...]

    @property
    def is_mirrored(self) -> bool:
        return self.param is not self.memory

    def written(self) -> list[Tensor]:
        return [t for t in (self.memory, self.remainder, self.step, *self.states) if t is not None]


# (name, number of the group, parameter) -> its column; None if it has neither gradient nor state.
Read = Callable[[str, int, Tensor], Column | None]


class Hyper(NamedTuple):
    """The hyper-parameters of a group, as the type of its family has them, and its learning rate."""

    values: Any
    lr: float | Tensor


def check_apart(names: Sequence[str], columns: Sequence[Column], grads: Sequence[Tensor]) -> None:
    """Raises RuntimeError if tensors that a step writes share memory, or a gradient lies in one of them."""
    named = [(name, tensor) for name, column in zip(names, columns, strict=True) for tensor in column.written()]
    position = shares_memory([tensor for _, tensor in named])
    if position is not None:
        raise RuntimeError(
            f"step: {named[position][0]} and its state must not share memory with themselves, another parameter or "
            "its state; make one Parameter of what is shared, or clone() it"
        )
    # Nobody else has a mirror, and a parameter that has one may have gaps.
    written = Spans([tensor for column in columns for tensor in column.written()[column.is_mirrored :]])
    for name, grad in zip(names, grads, strict=True):
        if written.meet(grad):
            refuse_gradient(name)


def refuse_gradient(name: str) -> None:
    raise RuntimeError(
        f"step: the gradient of {name} must share no memory with parameters or their states, which the step writes; "
        "clone() it"
    )


class Plan:
    """What is common to the plan of the native kernels and the one of the reference."""

    def __init__(self, backend: str, device: torch.device, members: Members, record: Tensor) -> None:
        self.backend = backend
        self.device = device
        self.members = members
        # In the order of the parameters, which is the same on every rank.
        self.meshes = list(dict.fromkeys(p.device_mesh for p in members.params if isinstance(p, DTensor)))
        self.record = record  # int64: ticket, passes, pass and member of the last overflow (csrc/table.h)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self.norm = torch.zeros((), dtype=torch.float32, device=device)
        self.written: list[Tensor] = []  # the parameters that an update writes: those with a gradient

    def refresh(self, keys: tuple[tuple[str | None, ...], ...], read: Read, *, writes: bool) -> bool:
        """Reads the tensors of the step to come; False if a parameter is on another device.

        Args:
            keys: for each group the names of its states, in the order of rows.
            writes: gradients will be written.
        """
        raise NotImplementedError

    def load(self) -> None:
        """Makes ready what a capture may not: scratch memory, chunk entries, kernels."""

    def set_hyper(self, hyper: Sequence[Hyper]) -> None:
        raise NotImplementedError

    def check(self, scale: Tensor | None, *, divide: bool, write: bool, clear: bool) -> None:
        """The gradient pass, into `norm`, `found_inf` and `record`.

        Without `clear` the verdict of an earlier pass over the same gradients stands, and this one is not counted.
        """
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


class Form(NamedTuple):
    """What the kernel of an update is compiled for (csrc/table.h)."""

    param_dtype: int
    split: bool
    grad_dtype: int
    states: int


class Block(NamedTuple):
    """Words that a step sends, and their parts."""

    words: Tensor
    forms: Tensor
    table: Tensor
    rates: Tensor  # addresses
    hyper: Tensor

    @classmethod
    def of(cls, words: Tensor, count: int, rows: int, groups: int) -> Block:
        """For `count` parameters in so many groups."""
        forms, table, rates, hyper = words.split([count, rows * count, groups, groups * HYPER_WORDS])
        hyper = hyper.view(torch.float32).view(groups, HYPER_COLUMNS)
        return cls(words, forms, table.view(rows, count), rates, hyper)


class Layout(NamedTuple):
    """What follows from sizes, dtypes and groups alone, on the device."""

    key: Tensor  # host copy of those: the plan's forms and the fixed rows of its table
    chunk_size: int
    entries: Tensor
    buckets: list[tuple[Form, Tensor]]  # the entries of one combination of dtypes
    partials: Tensor
    block: Block  # as the plan's block on the host, of which it holds the key


class NativePlan(Plan):
    """Two launches a step: `check`, and `update` for each combination of dtypes, over a table that each step writes.

    The table is a part of one block of int64 words. A step sends what follows the key:

        | forms | sizes, dtypes, groups | addresses: a row for each array | addresses of rates | fp32 hyper-parameters |
        |------------- key -------------|
    """

    def __init__(
        self, backend: str, ops: Kernels, family: Family, device: torch.device, members: Members, record: Tensor
    ) -> None:
        super().__init__(backend, device, members, record)
        self._ops = ops
        self._family = family.name
        self._required = len(family.states) - family.optional
        self._count = len(members.params)
        self._shape: tuple[int, int] | None = None  # rows of the table, and groups
        self._layouts: list[Layout] = []  # the last used first
        self._block: Block | None = None  # where the kernels of this step find theirs
        self._columns: dict[int, Column] = {}  # those that Python read
        self._relaid: list[tuple[Tensor, Tensor]] = []  # gradients laid out otherwise, and what kernels read
        self._rate_tensors: dict[int, Tensor] = {}
        self._kept: list[object] = []  # what captured graphs point to

    # ------------------------------------------------------------------------------------------------ what a step finds
    def refresh(self, keys: tuple[tuple[str | None, ...], ...], read: Read, *, writes: bool) -> bool:
        self._block = None
        self._columns, self._relaid = {}, []
        if not any(name for names in keys for name in names[self._required :]):
            keys = tuple(names[: self._required] for names in keys)
        self._fit_block(keys)
        members = self.members
        unread, gradients = sweep().columns(
            members.params,
            members.states,
            members.groups,
            keys,
            self.device,
            self._table,
            self._forms,
            self._checked,
            writes,
        )
        if unread and not self._read_columns(read):
            return False
        self._check_memory(read)
        self.written = members.params
        if gradients < self._count:
            self.written = [p for p, g in zip(members.params, self._row(Row.GRAD), strict=True) if g]
        if writes:
            check_written(*self._gradients())
        return True

    def _fit_block(self, keys: tuple[tuple[str | None, ...], ...]) -> None:
        """Makes host memory for as many rows as `keys` has states: the kernels read all rows, or the required ones."""
        shape = Row.STATE + len(keys[0]) if keys else Row.STATE, len(keys)
        if shape == self._shape:
            return
        self._shape = rows, groups = shape
        # Python reads the array: a look into a tensor could as well be one that waits for a device.
        self._words = array("q", bytes(8 * ((1 + rows) * self._count + groups * (1 + HYPER_WORDS))))
        self._host = Block.of(torch.frombuffer(self._words, dtype=torch.int64), self._count, *shape)
        self._forms, self._table = self._host.forms, self._host.table
        self._key = self._host.words[: (1 + FIXED_ROWS) * self._count]
        # For `Sweep.apart`: the table and forms that it saw last, and the memory that is written by them.
        self._checked = torch.full(((rows + 1) * self._count + 1,), -1, dtype=torch.int64, device="cpu")
        self._spans = _host(2 * self._count * (rows - Row.PARAM))
        self._hyper_key: list[Any] = []
        self._rates: list[int] = []
        self._layouts = []

    def _row(self, row: int) -> Sequence[int]:
        """A row of the table on the host; row -1 holds the forms."""
        return self._words[(1 + row) * self._count : (2 + row) * self._count]

    def _read_columns(self, read: Read) -> bool:
        """Fills in the columns that the sweep left. False if a parameter is on another device."""
        for t in [t for t, form in enumerate(self._row(-1)) if form == UNREAD]:
            param, name = self.members.params[t], self.members.names[t]
            column = read(name, self.members.groups[t], param)
            self._write(t, ABSENT, [0] * len(self._table))
            if column is None or (column.is_mirrored and param.grad is None):  # a mirror would be written back
                continue
            if column.param.device != self.device:
                return False
            self._columns[t] = column
            grad = None if param.grad is None else self._laid_out(read_gradient(param, name, column.param), column)
            self._put(t, column, grad)
        return True

    def _write(self, t: int, form: int, rows: Sequence[int]) -> None:
        # Through the array: two assignments to tensors take 11 us more for each column.
        self._words[t : (1 + len(self._table)) * self._count : self._count] = array("q", (form, *rows))

    def _laid_out(self, grad: Tensor, column: Column) -> Tensor:
        if same_layout(grad, column.param):
            return grad
        copy = torch.empty_like(column.param, dtype=grad.dtype).copy_(grad)
        self._relaid.append((grad, copy))
        return copy

    def _put(self, t: int, column: Column, grad: Tensor | None) -> None:
        code = DTYPE_CODES[column.param.dtype]
        grad_code = code if grad is None else DTYPE_CODES[grad.dtype]
        # Kernels pass over a tensor whose gradient has no address, but the updates of an empty tensor count.
        where = 0 if grad is None else grad.data_ptr() or column.step.data_ptr()
        arrays = (column.param, column.remainder, column.step, *column.states[: len(self._table) - Row.STATE])
        kept = sum((state is not None) << k for k, state in enumerate(column.states))
        rows = column.param.numel(), grad_code, self.members.groups[t], where, *map(_address, arrays)
        self._write(t, code | grad_code << 2 | kept << 4, rows)

    def _gradients(self) -> tuple[list[str], list[Tensor]]:
        """Those that kernels may write, and their parameters' names."""
        named = zip(self.members.names, self.members.params, strict=True)
        found = [(name, local(p.grad)) for name, p in named if p.grad is not None]
        return [name for name, _ in found], [grad for _, grad in found]

    # ------------------------------------------------------------------------------------------------------ memory
    def _check_memory(self, read: Read) -> None:
        """Raises RuntimeError if tensors that a step writes share memory, or a gradient lies in one of them."""
        met = sweep().apart(self._table, self._forms, self._checked, self._spans)
        if met >= 0:
            refuse_gradient(self.members.names[met])
        if met == -2 or any(column.is_mirrored for column in self._columns.values()):
            self._check_each(read)

    def _check_each(self, read: Read) -> None:
        """The same in Python, where views may be interleaved, and those without a gradient may share memory."""
        members, columns = self.members, {}
        for t in [t for t, grad in enumerate(self._row(Row.GRAD)) if grad]:
            column = self._columns.get(t) or read(members.names[t], members.groups[t], members.params[t])
            if column is not None:
                columns[t] = column
        check_apart([members.names[t] for t in columns], list(columns.values()), self._gradients()[1])

    # ----------------------------------------------------------------------------------------------------- layouts
    def load(self) -> None:
        self._layout()

    def _layout(self) -> Layout:
        """That of this step."""
        for i, layout in enumerate(self._layouts):
            if torch.equal(layout.key, self._key):
                if i > 0:
                    self._layouts.insert(0, self._layouts.pop(i))
                return layout
        if capturing(self.device):
            raise RuntimeError(
                "step: a capture must follow a step with gradients of the same dtypes, since state cannot be "
                "allocated inside it; run one step before capturing"
            )
        self._layouts = [self._make_layout(), *self._layouts][:LAYOUTS]
        return self._layouts[0]

    def _make_layout(self) -> Layout:
        """Cuts the tensors into chunks, those of a combination of dtypes side by side."""
        forms = self._kernel_forms()
        numels = [max(1, n) for n in self._row(Row.NUMEL)]  # an empty tensor has a chunk, which counts updates
        chunks = cut(numels, sorted(forms, key=forms.__getitem__), self._load_kernels(numels, forms))
        rows = chunks.entries[:, 0].tolist()
        entries = send(self._ops, chunks.entries, self.device)
        buckets, begin = [], 0
        for form, part in itertools.groupby(rows, key=forms.__getitem__):
            end = begin + len(list(part))
            buckets.append((form, entries[begin:end]))
            begin = end
        partials = torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        block = self._host if self.device.type == "cpu" else self._block_on_device()
        return Layout(self._key.clone(), chunks.size, entries, buckets, partials, block)

    def _block_on_device(self) -> Block:
        """One with the words that the host's has now."""
        assert self._shape is not None
        return Block.of(send(self._ops, self._host.words, self.device), self._count, *self._shape)

    def _kernel_forms(self) -> dict[int, Form]:
        """Of each column that is there.

        Parameters of one combination of dtypes share a launch, with all states that one of them has.
        """
        present = {t: form for t, form in enumerate(self._row(-1)) if form >= 0}
        states: dict[int, int] = {}
        for form in present.values():
            states[form & 15] = states.get(form & 15, 0) | form >> 4
        fp32 = DTYPE_CODES[torch.float32]
        return {t: Form(f & 3, f & 3 != fp32, f >> 2 & 3, states[f & 15]) for t, f in present.items()}

    def _load_kernels(self, numels: Sequence[int], forms: dict[int, Form]) -> int:
        """Loads the kernels of a step, which a capture may not do.

        Returns how many blocks run at a time of the update that has most elements.
        """
        self._ops._load_unscale(self.norm)
        blocks = {form: self._ops._load_update(self.norm, self._family, *form) for form in set(forms.values())}
        elements = dict.fromkeys(blocks, 0)
        for t, form in forms.items():
            elements[form] += numels[t]
        return max(blocks.items(), key=lambda item: elements[item[0]])[1] if blocks else 0

    # ------------------------------------------------------------------------------------------------ hyper-parameters
    def set_hyper(self, hyper: Sequence[Hyper]) -> None:
        self._rate_tensors = {g: h.lr for g, h in enumerate(hyper) if isinstance(h.lr, Tensor) and self._is_live(h.lr)}
        key = [(h.values, 0.0 if g in self._rate_tensors else float(h.lr)) for g, h in enumerate(hyper)]
        if key == self._hyper_key:
            return
        self._hyper_key = key
        for row, (values, lr) in zip(self._host.hyper, key, strict=True):
            row[: len(values)] = torch.tensor(values, dtype=torch.float32, device="cpu")
            row[LR_COLUMN] = lr

    def _is_live(self, lr: Tensor) -> bool:
        """Whether kernels can read it; another one costs a look at its value a step."""
        return lr.device == self.device and lr.dtype is torch.float32

    # --------------------------------------------------------------------------------------------------- launches
    def _ready(self) -> tuple[Layout, Block]:
        """The layout of this step, and the block on the device."""
        layout = self._layout()
        if self._block is None and capturing(self.device):
            self._put_rates(layout.block)
            self._block = self._block_on_device()
            self._put_rates(self._block)
            resend(self._ops, self._host.words, self._block.words)
            self._kept += [layout, self._block, self._columns, self._relaid, self._rate_tensors]
        elif self._block is None:
            self._block = layout.block
            self._put_rates(self._block)
            if self._block is not self._host:
                begin = len(layout.key)
                resend(self._ops, self._host.words[begin:], self._block.words[begin:])
        return layout, self._block

    def _put_rates(self, block: Block) -> None:
        """A float rate lies in the block itself."""
        own, step = block.hyper.data_ptr() + 4 * LR_COLUMN, 4 * HYPER_COLUMNS
        tensors = self._rate_tensors
        rates = [tensors[g].data_ptr() if g in tensors else own + step * g for g in range(len(block.rates))]
        if rates != self._rates:
            self._rates = rates
            self._host.rates.copy_(int64_tensor(rates))

    def check(self, scale: Tensor | None, *, divide: bool, write: bool, clear: bool) -> None:
        layout, block = self._ready()
        self._ops._unscale_table_(
            block.table,
            layout.entries,
            layout.chunk_size,
            scale,
            divide,
            write,
            clear,
            layout.partials,
            self.found_inf,
            self.norm,
            self.record,
        )
        if write:
            torch.autograd.graph.increment_version(self._gradients()[1])
            for grad, copy in self._relaid:
                grad.copy_(copy)

    def update(
        self,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        grad_norm: Tensor | None,
        max_norm: float,
    ) -> None:
        layout, block = self._ready()
        mirrored = [column for column in self._columns.values() if column.is_mirrored]
        for column in mirrored:
            column.param.copy_(column.memory)
        for form, entries in layout.buckets:
            self._ops._update_table_(
                self._family,
                block.table,
                entries,
                layout.chunk_size,
                self.record,
                block.hyper,
                block.rates,
                *form,
                grad_scale,
                found_inf,
                grad_norm,
                max_norm,
            )
        torch.autograd.graph.increment_version(self.written)
        for column in mirrored:
            column.memory.copy_(column.param)
        self._columns, self._relaid = {}, []  # gradients are not ours to keep

    @property
    def is_captured(self) -> bool:
        return bool(self._kept)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _host(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int64, device="cpu")  # whatever torch.set_default_device says
