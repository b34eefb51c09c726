"""A plan takes the step on one device. It writes a table of the tensors, and launches kernels that read the table.

- The *table* (csrc/table.h) is int64 and has a column for each parameter. Its first rows hold the size, the dtype of
  the gradient and the group. The other rows hold addresses: of the gradient, the parameter, the remainder of its fp32
  master (csrc/formulas/remainder.h), the count of steps, and the states.
- The *form* of a column is a number. It encodes the dtypes of parameter, gradient and states, and which states the
  parameter has. A launch updates columns with the same dtypes. Its `Form` holds these dtypes, and every state that at
  least one of the columns has. An update kernel is compiled for one `Form`.
- A *chunk* is a piece of a tensor. A thread block of a GPU, or a thread of a CPU, takes one chunk at a time. A *chunk
  entry* holds the index of the tensor, and the index of the chunk in that tensor.
- A *layout* is the data of a step that depend only on sizes, dtypes and groups, such as the chunk entries. They stay on
  the device for later steps. A key on the host tells which steps they fit.
- A `Block` is the memory that a step sends to the device: forms, table and hyper-parameters.
- A *mirror* is a dense copy of a parameter. It is needed if the parameter is a negated view, or if its elements do not
  fill one range of memory, as in a column of a matrix. Kernels write the mirror, and the plan copies the mirror to
  the parameter.

A plan keeps scratch memory and layouts from one step to the next. It reads the tensors themselves again in every step.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import torch_private
from ..ops.table import (
    DTYPE_CODES,
    FIXED_ROWS,
    HYPER_COLUMNS,
    STATES,
    Row,
    cut,
    resend,
    same_layout,
    send,
    shares_memory,
)
from ._state import Storage
from ._sweep import ABSENT, UNREAD, dlpack_device, sweep
from ._tensors import Spans, check_written, has_memory, local, read_gradient

if TYPE_CHECKING:
    from ..families import Family
    from ..ops.library import Kernels

LR_COLUMN = HYPER_COLUMNS - 1  # the learning rate of a group; not used if kernels read the rate from a tensor
HYPER_WORDS = HYPER_COLUMNS // 2  # int64 words for the fp32 hyper-parameters of a group
LAYOUTS = 4  # the most layouts that a plan keeps, since steps may alternate between sets of gradients, or their dtypes


def capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Members(NamedTuple):
    """The parameters on one device, in the order of the groups."""

    params: list[Tensor]
    names: list[str]
    groups: list[int]
    states: list[dict[str, Any] | None]  # the entries of ``optimizer.state``
    weights: list[float]  # how often the squares of each gradient count in the norm (_shards.py)


class Column(NamedTuple):
    """The tensors of one parameter on this rank."""

    memory: Tensor  # the parameter, or this rank's shard of it
    param: Tensor  # what kernels write: `memory`, or its mirror
    remainder: Tensor | None  # of the master, if the parameter has 16 bits
    step: Tensor
    states: tuple[Tensor | None, ...]  # the rows of the table from `Row.STATE` on: states, and scales of codes
    storage: Storage

    @property
    def is_mirrored(self) -> bool:
        return self.param is not self.memory

    def written(self) -> list[Tensor]:
        return [t for t in (self.memory, self.remainder, self.step, *self.states) if t is not None]


# `FusedOptimizer._column` has this type. Its arguments are the name of a parameter, the number of its group, and the
# parameter. It returns None if the step leaves the parameter out.
Read = Callable[[str, int, Tensor], Column | None]


# For each group, how its parameters with fewer than `LEAST_LEAN` elements store their states, and how others do.
Keys = tuple[tuple[Storage, Storage], ...]


class Hyper(NamedTuple):
    """The hyper-parameters of a group, and its learning rate."""

    values: Any  # of the type `Family.hyper`
    lr: float | Tensor


def check_apart(names: Sequence[str], columns: Sequence[Column], grads: Sequence[Tensor]) -> None:
    """Raises RuntimeError if two tensors that a step writes share memory, or if a gradient overlaps one of them."""
    named = [(name, tensor) for name, column in zip(names, columns, strict=True) for tensor in column.written()]
    position = shares_memory([tensor for _, tensor in named])
    if position is not None:
        raise RuntimeError(
            "step: parameters and their states must not share memory with each other or within a tensor, got shared "
            f"memory in {named[position][0]} or its state; use one Parameter for the shared memory, or clone() one of "
            "the tensors"
        )
    # A mirrored parameter itself is left out, because `Spans` takes only dense tensors. So a gradient that overlaps it
    # raises no error here. The mirror is left out too, because it is new memory, which no gradient can overlap.
    written = Spans([tensor for column in columns for tensor in column.written()[column.is_mirrored :]])
    for name, grad in zip(names, grads, strict=True):
        if written.overlaps(grad):
            refuse_gradient(name)


def check_gradients(named: Iterable[tuple[Tensor, str]]) -> None:
    """Raises an error if a gradient cannot be read. A wrong parameter is left to the check of its state."""
    for param, name in named:
        if param.grad is not None and param.dtype in DTYPE_CODES and has_memory(param):
            read_gradient(param, name, local(param))


def refuse_gradient(name: str) -> None:
    raise RuntimeError(
        f"step: the gradient of {name} must not share memory with parameters or their states, since the step writes "
        "these; clone() the gradient"
    )


class Plan:
    """Base class of the plans for native kernels and for the reference."""

    def __init__(self, backend: str, device: torch.device, members: Members, record: Tensor) -> None:
        self.backend = backend
        self.device = device
        self.members = members
        # The `Record` of csrc/table.h, int64: the ticket, the number of passes, and the pass and parameter of the last
        # overflow.
        self.record = record
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self.norm = torch.zeros((), dtype=torch.float32, device=device)
        self.written: list[Tensor] = []  # the parameters that an update writes: those with a gradient

    def refresh(self, keys: Keys, read: Read, *, writes: bool) -> bool:
        """Reads the tensors for the next pass and update. Returns False if a parameter has moved to another device.

        Args:
            keys: For each group, how its parameters store their states.
            read: Reads the column of a parameter.
            writes: Whether gradients will be written.
        """
        raise NotImplementedError

    def load(self) -> None:
        """Allocates scratch memory and chunk entries, and loads kernels. A graph capture must not do any of this."""

    def set_hyper(self, hyper: Sequence[Hyper]) -> None:
        raise NotImplementedError

    def check(self, scale: Tensor | None, *, write: bool, clear: bool) -> None:
        """Runs the gradient pass, which sets `norm`, `found_inf` and `record`.

        Args:
            scale: The divisor of the gradients. None stands for 1. `norm` is the norm of the divided gradients.
            write: Whether to write the divided gradients.
            clear: If True, `found_inf` starts at 0, and `record` counts the pass. If False, `found_inf` starts from the
                result of an earlier pass over the same gradients, and `record` does not change.
        """
        raise NotImplementedError

    def update(
        self,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        grad_norm: Tensor | None,
        max_norm: float,
    ) -> None:
        """Updates the parameters if `found_inf` is 0 or None. Gradients are divided by `grad_scale` and clipped."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drops the tensors of this step, since a plan does not keep gradients alive."""

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph uses memory of this plan."""
        return False


class Form(NamedTuple):
    """The combination of dtypes and states that an update kernel is compiled for (csrc/table.h)."""

    param_dtype: int  # of `DTYPE_CODES`
    split: bool  # whether masters are stored as remainders
    grad_dtype: int
    states: int  # bit k is set if at least one tensor of the launch has the k-th state
    state_dtype: int  # of `STATE_DTYPES`


class Block(NamedTuple):
    """The int64 words that a step sends to the device, and views of their parts."""

    words: Tensor
    forms: Tensor  # [parameters]
    table: Tensor  # [rows, parameters]
    weights: Tensor  # fp64 [parameters], a last row of the table; or [0]
    rates: Tensor  # [groups], the addresses of the learning rates
    hyper: Tensor  # fp32 [groups, HYPER_COLUMNS]

    @classmethod
    def of(cls, words: Tensor, count: int, rows: int, weights: int, groups: int) -> Block:
        """Splits `words` into the parts for `count` parameters. There are as many weights, or none."""
        parts = words.split([count, rows * count, weights, groups, groups * HYPER_WORDS])
        forms, table, weights_there, rates, hyper = parts
        hyper = hyper.view(torch.float32).view(groups, HYPER_COLUMNS)
        return cls(words, forms, table.view(rows, count), weights_there.view(torch.float64), rates, hyper)


class Layout(NamedTuple):
    """The data of a step that depend only on sizes, dtypes and groups. They stay on the device for later steps."""

    key: Tensor  # on the host: the forms, and the table's rows of sizes, dtypes and groups
    chunk_size: int
    entries: Tensor  # the chunk entries, int32 [chunks, 2]
    buckets: list[tuple[Form, Tensor]]  # the chunk entries of each form
    partials: Tensor  # fp64, a sum of squares for each chunk
    block: Block  # on the device; the key is already in it
    streams: set[int]  # the CUDA streams for which `record_stream` was called on this memory

    def for_cpp(self) -> tuple[Any, ...]:
        """Returns addresses and numbers, in the order in which csrc/ops/step.cpp reads them."""
        tensors = self.key, self.block.words, self.entries, self.partials
        return *(t.data_ptr() for t in tensors), self.chunk_size, [(form, len(own)) for form, own in self.buckets]


class Warm(NamedTuple):
    """A call of C++ that takes steps (csrc/ops/step.h)."""

    plan: NativePlan
    is_gpu: bool
    options: list[Any]
    modes: Callable[[], int]  # torch_private.dispatch_mode_count
    step: Callable[..., int]  # (optimizer, grad_scale, found_inf, max_norm, work) -> answer
    arguments: tuple[Any, ...]  # which `step` borrows


class NativePlan(Plan):
    """A plan that launches native kernels: one for `check`, and one per form for `update`.

    Each step writes the table into a block on the host. The layout's block on the device already holds the key, so only
    the part after the key is sent:

        | forms | sizes, dtypes, groups | addresses: a row for each array | weights | addresses of rates | numbers |
        |------------- key -------------|
    """

    def __init__(
        self, backend: str, ops: Kernels, family: Family, device: torch.device, members: Members, record: Tensor
    ) -> None:
        super().__init__(backend, device, members, record)
        self._ops = ops
        self._family = family.name
        self._required = len(family.states) - family.optional  # the number of states that every parameter has
        self._count = len(members.params)
        self._weights = self._count if any(weight != 1 for weight in members.weights) else 0  # how many are sent
        self.given_storages: Keys | None = None  # the last keys, and what `_fitted` returned for them
        self._storages: Keys = ()
        self._unread = 0  # how many columns Python read in the last step
        self._shape: tuple[int, int, int] | None = None  # the numbers of rows of the table, of weights, and of groups
        self._layouts: list[Layout] = []  # the most recently used first
        self._block: Block | None = None  # the block that the kernels of this step read; None until it is sent
        self._columns: dict[int, Column] = {}  # columns that Python read; the C++ sweep (_sweep.py) keeps no tensors
        self._held: list[object] = []  # what the table points to, since another thread may replace it during the step
        self._relaid: list[tuple[Tensor, Tensor]] = []  # (gradient, its copy in the strides of the parameter)
        self._rate_tensors: dict[int, Tensor] = {}  # for each group, the learning rate if kernels read it from a tensor
        self._kept: list[object] = []  # objects whose memory captured graphs use

    # ---------------------------------------------------------------------------------------------- reading the tensors
    def refresh(self, keys: Keys, read: Read, *, writes: bool) -> bool:
        self._block = None
        self.forget()
        if keys != self.given_storages:
            self.given_storages, self._storages = keys, _fitted(keys, self._required)
        self._fit_block(len(self._storages[0][0].keys) if keys else 0, len(keys))
        members = self.members
        unread, gradients = sweep().columns(
            members.params,
            members.states,
            members.groups,
            self._storages,
            self.device,
            self._table,
            self._forms,
            self._checked_table,
            self._held,
        )
        self._unread = unread
        if unread and not self._read_columns(read):
            return False
        self._check_memory(read)
        self.written = members.params
        if gradients < self._count:
            self.written = [p for p, g in zip(members.params, self._row(Row.GRAD), strict=True) if g]
        if writes:
            check_written(*self._gradients())
        return True

    def _fit_block(self, states: int, groups: int) -> None:
        """Allocates the block on the host, for a table with `states` rows for states and scales."""
        rows = Row.STATE + states
        shape = rows, self._weights, groups
        if shape == self._shape:
            return
        self._shape = shape
        # Python reads numbers from this array, and not from a tensor, because tests forbid a step to read the value of
        # a tensor. They forbid it even for a tensor on the host, since they cannot tell whether a read waits for a
        # device.
        self._words = array("q", bytes(8 * ((1 + rows) * self._count + self._weights + groups * (1 + HYPER_WORDS))))
        self._host = Block.of(torch.frombuffer(self._words, dtype=torch.int64), self._count, *shape)
        self._host.weights.copy_(torch.tensor(self.members.weights[: self._weights], dtype=torch.float64, device="cpu"))
        self._forms, self._table = self._host.forms, self._host.table
        self._key = self._host.words[: (1 + FIXED_ROWS) * self._count]
        # Scratch memory of `Sweep.apart` (_sweep.py): the last table and forms for which it found no overlap, and the
        # memory ranges that a step writes.
        self._checked_table = torch.full(((rows + 1) * self._count + 1,), -1, dtype=torch.int64, device="cpu")
        self._spans = _host(2 * self._count * (rows - Row.PARAM))
        # The fp32 hyper-parameters, written by way of a view of the array: a tensor would take 10 us for each group.
        self._hyper = memoryview(self._words).cast("B").cast("f")[-2 * groups * HYPER_WORDS :]
        self._layouts = []

    @property
    def _squares(self) -> int:
        """The row of the table with the weights, or 0 (`Table::squares` of csrc/table.h)."""
        return len(self._table) if self._weights else 0

    def _row(self, row: int) -> Sequence[int]:
        """Returns a row of the table on the host. Row -1 holds the forms."""
        return self._words[(1 + row) * self._count : (2 + row) * self._count]

    def _read_columns(self, read: Read) -> bool:
        """Writes the columns that the sweep left unread. Returns False if a parameter is on another device.

        All gradients are checked first. Reading a column may convert its states, and a refused step must not do that.
        """
        unread = [t for t, form in enumerate(self._row(-1)) if form == UNREAD]
        check_gradients((self.members.params[t], self.members.names[t]) for t in unread)
        for t in unread:
            param, name = self.members.params[t], self.members.names[t]
            column = read(name, self.members.groups[t], param)
            self._write(t, ABSENT, [0] * len(self._table))
            # A mirrored parameter without a gradient does not change. So its column stays `ABSENT`, and no mirror is
            # copied to it.
            if column is None or (column.is_mirrored and param.grad is None):
                continue
            if column.param.device != self.device:
                return False
            self._columns[t] = column
            grad = None if param.grad is None else self._laid_out(read_gradient(param, name, column.param), column)
            self._put(t, column, grad)
            self._held.append(param.grad)
        return True

    def _write(self, t: int, form: int, rows: Sequence[int]) -> None:
        # This writes to the array, because two assignments to tensors would take 11 us more for each column.
        self._words[t : (1 + len(self._table)) * self._count : self._count] = array("q", (form, *rows))

    def _laid_out(self, grad: Tensor, column: Column) -> Tensor:
        """Returns the gradient if it has the strides of its parameter, otherwise a copy with these strides.

        There are fewer kernels for states that are not fp32. For these the gradient has the dtype of its parameter, or
        is fp32. So another gradient is copied to fp32.
        """
        dtype = grad.dtype
        if column.storage.coded and dtype is not column.param.dtype:
            dtype = torch.float32
        if dtype is grad.dtype and same_layout(grad, column.param):
            return grad
        copy = torch.empty_like(column.param, dtype=dtype).copy_(grad)
        self._relaid.append((grad, copy))
        return copy

    def _put(self, t: int, column: Column, grad: Tensor | None) -> None:
        code = DTYPE_CODES[column.param.dtype]
        grad_code = code if grad is None else DTYPE_CODES[grad.dtype]
        # Kernels skip a column if the address of its gradient is 0. An empty gradient has no address, but the updates
        # of its parameter have to be counted. So for an empty gradient, the table holds the address of the count of
        # steps.
        where = 0 if grad is None else grad.data_ptr() or column.step.data_ptr()
        count = len(self._table) - Row.STATE
        own = (*column.states, *[None] * count)[:count]
        arrays = (column.param, column.remainder, column.step, *own)
        states = sum((state is not None) << k for k, state in enumerate(own[:STATES]))
        rows = column.param.numel(), grad_code, self.members.groups[t], where, *map(_address, arrays)
        kind = column.storage.dtype << 7 | column.storage.coded << 9
        self._write(t, code | grad_code << 2 | states << 4 | kind, rows)

    def _gradients(self) -> tuple[list[str], list[Tensor]]:
        """Returns the names of the parameters that have a gradient, and their gradients."""
        named = zip(self.members.names, self.members.params, strict=True)
        found = [(name, local(p.grad)) for name, p in named if p.grad is not None]
        return [name for name, _ in found], [grad for _, grad in found]

    # ------------------------------------------------------------------------------------------------------ memory
    def _check_memory(self, read: Read) -> None:
        """Raises RuntimeError if two tensors that a step writes share memory, or if a gradient overlaps one of them."""
        met = sweep().apart(self._table, self._forms, self._checked_table, self._spans)
        if met >= 0:
            refuse_gradient(self.members.names[met])
        if met == -2 or any(column.is_mirrored for column in self._columns.values()):
            self._check_each(read)

    def _check_each(self, read: Read) -> None:
        """Does the check of `_check_memory` in Python.

        Unlike a comparison of memory ranges, this check is exact: it allows interleaved views. It does not look at
        parameters without a gradient.
        """
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
        """Returns the layout of this step: a kept one with the same key, otherwise a new one."""
        for i, layout in enumerate(self._layouts):
            if torch.equal(layout.key, self._key):
                if i > 0:
                    self._layouts.insert(0, self._layouts.pop(i))
                return layout
        if capturing(self.device):
            raise RuntimeError(
                "step: a capture must follow a step with gradients of the same dtypes, since tables cannot be "
                "allocated inside a capture; run one step before capturing"
            )
        self._layouts = [self._make_layout(), *self._layouts][:LAYOUTS]
        return self._layouts[0]

    def _make_layout(self) -> Layout:
        """Cuts the tensors into chunks, sorted by form. The chunk entries of a launch are therefore contiguous."""
        forms = self._kernel_forms()
        numels = [max(1, n) for n in self._row(Row.NUMEL)]  # an empty tensor gets a chunk too, which counts its updates
        chunks = cut(numels, sorted(forms, key=forms.__getitem__), self._load_kernels(numels, forms))
        rows = chunks.entries[:, 0].tolist()
        entries = send(self._ops, chunks.entries, self.device)
        buckets, begin = [], 0
        for form, part in itertools.groupby(rows, key=forms.__getitem__):
            end = begin + len(list(part))
            buckets.append((form, entries[begin:end]))
            begin = end
        partials = torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        is_host = self.device.type == "cpu"
        block = self._host if is_host else self._as_block(send(self._ops, self._host.words, self.device))
        return Layout(self._key.clone(), chunks.size, entries, buckets, partials, block, set())

    def _as_block(self, words: Tensor) -> Block:
        assert self._shape is not None
        return Block.of(words, self._count, *self._shape)

    def _kernel_forms(self) -> dict[int, Form]:
        """Returns the form of the kernel that updates each column. Columns with the form `ABSENT` are left out.

        Parameters with the same dtypes share a launch. If their states are fp32, the form of the launch has every state
        that at least one of them has. If not, they also have the same states, so that it is known which of these are
        fp32.
        """
        present = {t: form for t, form in enumerate(self._row(-1)) if form >= 0}
        shared: dict[int, int] = {}  # by the dtypes of parameter and gradient
        for form in present.values():
            if form >> 7 == 0:
                shared[form & 15] = shared.get(form & 15, 0) | form >> 4
        fp32 = DTYPE_CODES[torch.float32]
        return {
            t: Form(f & 3, f & 3 != fp32, f >> 2 & 3, f >> 4 & 7 if f >> 7 else shared[f & 15], f >> 7 & 3)
            for t, f in present.items()
        }

    def _load_kernels(self, numels: Sequence[int], forms: dict[int, Form]) -> int:
        """Loads the kernels of a step. A graph capture must not do this.

        Launches can differ in the number of thread blocks that run at the same time. Returns this number for the
        launch that updates the most elements.
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
        for g, (values, lr) in enumerate(hyper):
            row = g * HYPER_COLUMNS
            for k, value in enumerate(values):
                self._hyper[row + k] = value
            self._hyper[row + LR_COLUMN] = 0.0 if g in self._rate_tensors else float(lr)

    def _is_live(self, lr: Tensor) -> bool:
        """Whether kernels can read a tensor learning rate in place. If not, each step reads `lr` on the host."""
        return lr.device == self.device and lr.dtype is torch.float32 and not lr.is_neg()

    # --------------------------------------------------------------------------------------------------- launches
    def _ready(self) -> tuple[Layout, Block]:
        """Returns the layout of this step and the block on the device. Sends the block if this step has not sent it."""
        layout = self._layout()
        if self._block is None and capturing(self.device):  # a graph gets its own block, which no later step overwrites
            self._block = self._as_block(torch.empty_like(layout.block.words))
            self._put_rates(self._block)
            resend(self._ops, self._host.words, self._block.words)
            self._kept += [layout, self._block, self._columns, self._relaid, self._rate_tensors]
        elif self._block is None:
            self._block = layout.block
            self._put_rates(self._block)
            if self._block is not self._host:
                begin = len(layout.key)
                resend(self._ops, self._host.words[begin:], self._block.words[begin:])
        self._keep_for_stream(layout)
        return layout, self._block

    def _keep_for_stream(self, layout: Layout) -> None:
        """Tells torch's allocator that the current stream uses the scratch memory of this step.

        The memory may have been allocated on another stream. After this call, if the plan drops the memory, the
        allocator waits for the current stream before it gives the memory to another tensor. A block that a capture
        allocated is not dropped.
        """
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device)
        copies = [copy for _, copy in self._relaid]
        used = copies + [column.param for column in self._columns.values() if column.is_mirrored]
        if stream.cuda_stream not in layout.streams:
            layout.streams.add(stream.cuda_stream)
            used += [layout.entries, layout.partials, layout.block.words, self.found_inf, self.norm, self.record]
        for scratch in used:
            scratch.record_stream(stream)

    def _put_rates(self, block: Block) -> None:
        """Writes the addresses of the learning rates. A float rate lies in `block`, among the hyper-parameters."""
        first, pitch = block.hyper.data_ptr() + 4 * LR_COLUMN, 4 * HYPER_COLUMNS
        tensors = self._rate_tensors
        rates = [tensors[g].data_ptr() if g in tensors else first + pitch * g for g in range(len(block.rates))]
        begin = (1 + len(self._table)) * self._count + self._weights
        self._words[begin : begin + len(rates)] = array("q", rates)

    def check(self, scale: Tensor | None, *, write: bool, clear: bool) -> None:
        layout, block = self._ready()
        self._ops._unscale_table_(
            block.table,
            layout.entries,
            layout.chunk_size,
            scale,
            True,  # divide
            write,
            clear,
            layout.partials,
            self.found_inf,
            self.norm,
            self.record,
            self._squares,
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
        self.forget()

    def warm(self, params: list[list[Tensor]], state: tuple[list[Any], list[Any]], options: list[Any]) -> Warm | None:
        """Returns what C++ needs to take the next step, or None if it could not take the last one.

        Args:
            params: The parameters of each group.
            state: The keys and values of ``optimizer.state``.
            options: For each group, the options on which the hyper-parameters and states depend: name, value, name, ...
                In each step C++ tests whether the values are the same objects. It writes the learning rates itself.
        """
        compiled, torchs = sweep().compiled, sweep().torchs
        modes = torch_private.dispatch_mode_count()
        is_gpu = self.device.type == "cuda"
        if compiled is None or modes is None or modes() > 0 or self.backend not in ("cpu", "cuda") or self._unread:
            return None
        if capturing(self.device):
            return None
        stream = torch.cuda.current_stream(self.device).cuda_stream if is_gpu else 0
        layouts = [layout for layout in self._layouts if not is_gpu or stream in layout.streams]
        arguments = (
            torchs, self.members.params, self.members.states, self.members.groups, self._storages, params, *state,
            options, modes, torch_private.increment_version(), dlpack_device(self.device), stream,
            len(self._table), self._squares, self._host.words.data_ptr(), self._checked_table.data_ptr(),
            self._spans.data_ptr(), self.record.data_ptr(), self.found_inf.data_ptr(), self.norm.data_ptr(),
            self._family,
            [layout.for_cpp() for layout in layouts],
            (self._words, self._checked_table, self._spans, self.record, self.found_inf, self.norm, layouts),
        )  # fmt: skip
        capsule = compiled.make_step(*arguments)
        return Warm(self, is_gpu, options, modes, functools.partial(compiled.step, capsule), arguments)

    def forget(self) -> None:
        self._columns, self._relaid, self._held = {}, [], []

    @property
    def is_captured(self) -> bool:
        return bool(self._kept)


def _fitted(keys: Keys, required: int) -> Keys:
    """Returns the storages with equally many keys, one for each row of the table from `Row.STATE` on.

    If no parameter uses an optional state or a scale, the table has only the rows of the required states.
    """
    every = [storage.keys for pair in keys for storage in pair]
    is_short = not any(name for names in every for name in names[required:])
    count = required if is_short else max(map(len, every))

    def fitted(storage: Storage) -> Storage:
        return storage._replace(keys=(*storage.keys, *[None] * count)[:count])

    return tuple((fitted(small), fitted(large)) for small, large in keys)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _host(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int64, device="cpu")  # even if torch.set_default_device chose another device
