"""Bytes a parameter for optimizers: weights, gradients, masters and states, as the table of docs/guides/optimizers.md.

    python -m benchmarks.experiments.bytes

Rows are measured on the CPU in two ways.

- A model of a million parameters takes a step, and the memory of every tensor that is then alive is added up.
- The peak is the most memory that the process held (VmHWM of Linux) while a model of 16 million parameters was made and
  took two steps, less what it held before. It includes what a step allocates and frees.

flashoptim needs CUDA, so its rows are counted from the format that it documents: one byte an element and one fp16 scale
for each group of 32; 8 or 16 more bits for the master of a 16-bit weight.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amp_kernels import optim

SHAPES = ((512, 512),) * 4
LARGE = ((1024, 1024),) * 16  # for the peak
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LOW = DTYPES[1:]

Make = Callable[[list[Tensor]], torch.optim.Optimizer]


class MastersByHand(torch.optim.Optimizer):
    """torch's optimizer on fp32 copies of 16-bit weights and of their gradients, as scripts without a library do it."""

    def __init__(self, params: list[Tensor], make: Make) -> None:
        super().__init__(params, {})
        self.params, self.masters = params, [p.detach().float() for p in params]
        self.inner = make(self.masters)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param, master in zip(self.params, self.masters, strict=True):
            master.grad = param.grad.float()  # type: ignore[union-attr]
        self.inner.step()
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)


@dataclass(frozen=True)
class Row:
    """A line of the table, measured if there is something to `make`, else counted."""

    library: str
    optimizer: str
    option: str
    make: Make | None = None
    dtypes: tuple[torch.dtype, ...] = DTYPES
    grad_dtype: torch.dtype | None = None
    counted: dict[int, tuple[float, float]] | None = None  # masters and states, by the bytes of a weight


def fused(name: str, option: str = "", grad_dtype: torch.dtype | None = None, **options: Any) -> Row:
    dtypes = DTYPES if grad_dtype is None else LOW
    return Row("amp_kernels", name, option, partial(getattr(optim, name), **options), dtypes, grad_dtype)


def by_torch(name: str, option: str = "", **options: Any) -> list[Row]:
    make = partial(getattr(torch.optim, name), **options)
    by_hand = ", ".join(part for part in (option, "masters by hand") if part)
    return [Row("torch", name, option, make), Row("torch", name, by_hand, lambda p: MastersByHand(p, make), LOW)]


def by_peer(package: str, name: str, option: str = "", **options: Any) -> Row:
    """Without masters."""

    def make(params: list[Tensor]) -> torch.optim.Optimizer:
        return getattr(importlib.import_module(package), name)(params, **options)

    return Row(package.partition(".")[0], name, option, make)


def flashoptim(name: str, states: int, bits: int, option: str = "") -> Row:
    each = 1 + 2 / 32
    counted = {2: ((bits - 16) / 8, states * each)}
    if bits == 24:  # the default; fp32 weights have no such option
        counted[4] = 0, states * each
    return Row("flashoptim", name, f"{option}masters of {bits} bits", counted=counted)


ROWS = [
    fused("FusedSGD"),
    fused("FusedSGD", "momentum", momentum=0.9),
    fused("FusedSGD", "momentum, gradients in fp32", torch.float32, momentum=0.9),
    fused("FusedSGD", "momentum, states in bf16", momentum=0.9, state_dtype=torch.bfloat16),
    fused("FusedSGD", "momentum, states in int8", momentum=0.9, state_dtype=torch.int8),
    *by_torch("SGD"),
    *by_torch("SGD", "momentum", momentum=0.9),
    by_peer("bitsandbytes.optim", "SGD8bit", "momentum", lr=0.1, momentum=0.9),
    flashoptim("FlashSGD", 1, 24, "momentum, "),
    flashoptim("FlashSGD", 1, 32, "momentum, "),
    fused("FusedRMSprop"),
    fused("FusedRMSprop", "momentum", momentum=0.9),
    fused("FusedRMSprop", "centered", centered=True),
    fused("FusedRMSprop", "momentum, centered", momentum=0.9, centered=True),
    fused("FusedRMSprop", "states in int8", state_dtype=torch.int8),
    fused("FusedRMSprop", "momentum, states in int8", momentum=0.9, state_dtype=torch.int8),
    *by_torch("RMSprop"),
    *by_torch("RMSprop", "momentum, centered", momentum=0.9, centered=True),
    by_peer("bitsandbytes.optim", "RMSprop8bit"),
    fused("FusedAdam"),
    fused("FusedAdam", "amsgrad", amsgrad=True),
    fused("FusedAdamW"),
    fused("FusedAdamW", "amsgrad", amsgrad=True),
    fused("FusedAdamW", "gradients in fp32", torch.float32),
    fused("FusedAdamW", "max_grad_norm", max_grad_norm=1.0),
    fused("FusedAdamW", "states in bf16", state_dtype=torch.bfloat16),
    fused("FusedAdamW", "states in int8", state_dtype=torch.int8),
    fused("FusedAdamW", "amsgrad, states in int8", amsgrad=True, state_dtype=torch.int8),
    *by_torch("AdamW"),
    *by_torch("AdamW", "amsgrad", amsgrad=True),
    by_peer("bitsandbytes.optim", "AdamW8bit"),
    by_peer("torchao.optim", "AdamW8bit"),
    by_peer("torchao.optim", "AdamW8bit", "bf16_stochastic_round", bf16_stochastic_round=True),
    by_peer("deepspeed.ops.adam", "DeepSpeedCPUAdam"),
    flashoptim("FlashAdamW", 2, 24),
    flashoptim("FlashAdamW", 2, 32),
]


def storages(objects: Iterable[Any]) -> dict[int, int]:
    """The bytes of each piece of memory that the tensors among these lie in, by its address."""
    found = {}
    for each in objects:
        if issubclass(type(each), Tensor):  # isinstance() runs others' code
            with contextlib.suppress(RuntimeError):  # wrappers and fake tensors have no memory
                storage = each.untyped_storage()
                if storage.nbytes():
                    found[storage.data_ptr()] = storage.nbytes()
    return found


@contextlib.contextmanager
def only_new_objects() -> Iterator[None]:
    """Inside, `gc` lists only objects that were made inside: to look at every object of torch takes half a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def model(
    dtype: torch.dtype, grad_dtype: torch.dtype | None = None, shapes: tuple[tuple[int, ...], ...] = SHAPES
) -> list[Tensor]:
    params: list[Tensor] = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for p in params:
        if grad_dtype is not None:
            p.grad_dtype = grad_dtype
        p.grad = torch.ones(p.shape, dtype=grad_dtype or dtype)
    return params


def measure(make: Make, dtype: torch.dtype, grad_dtype: torch.dtype | None = None) -> tuple[float, ...]:
    """Bytes a parameter after one step: weights, gradients, masters with what belongs to them, states."""
    gc.collect()
    old = storages(gc.get_objects())  # of packages that an earlier row has imported
    params = model(dtype, grad_dtype)
    optimizer = make(params)
    optimizer.step()
    inner = getattr(optimizer, "inner", optimizer)
    masters = [*getattr(optimizer, "masters", ())]
    masters += [m.grad for m in masters] + [s["remainder"] for s in inner.state.values() if "remainder" in s]
    parts = [storages(params), storages(p.grad for p in params), storages(masters)]
    sizes = [sum(part.values()) for part in parts]
    gc.collect()
    every = storages(gc.get_objects()) | {address: size for part in parts for address, size in part.items()}
    new = sum(size for address, size in every.items() if address not in old)
    states = new - sum(sizes)  # whatever else is alive, also what no state dict names
    return tuple(size / sum(p.numel() for p in params) for size in (*sizes, states))


def bytes_of(row: Row, dtype: torch.dtype) -> tuple[float, ...] | None:
    """The parts of the bytes a parameter; None if the row has no weights of this dtype."""
    if row.make is not None:
        return measure(row.make, dtype, row.grad_dtype) if dtype in row.dtypes else None
    assert row.counted is not None
    extra = row.counted.get(dtype.itemsize)
    return None if extra is None else (dtype.itemsize, dtype.itemsize, *extra)


def peak(row: Row, dtype: torch.dtype) -> float:
    """The largest number of bytes a parameter that this process holds in two steps, above what it holds now."""
    assert row.make is not None
    row.make(model(dtype, row.grad_dtype, LARGE[:1])).step()  # loads what stays: libraries, compiled kernels
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what the process holds
    before = _held("VmRSS")
    params = model(dtype, row.grad_dtype, LARGE)
    optimizer = row.make(params)
    for _ in range(2):
        optimizer.step()
    return (_held("VmHWM") - before) / sum(p.numel() for p in params)


def _held(what: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return 1024 * int(line.split()[1])


def peaks(row: Row) -> str:
    """In fp32 and bf16."""
    if row.make is None:
        return "counted"
    dtypes = (dtype for dtype in (torch.float32, torch.bfloat16) if dtype in row.dtypes)
    return " and ".join(f"{peak(row, dtype):.1f}" for dtype in dtypes)


def cell(parts: tuple[float, ...] | None) -> str:
    if parts is None:
        return ""
    numbers = [f"{round(part, 2):g}" for part in parts]
    return f"{' + '.join(numbers)} = **{round(sum(parts), 2):g}**"


def line(row: Row) -> str:
    """The cells up to the peaks."""
    full, fp16, bf16 = (cell(bytes_of(row, dtype)) for dtype in DTYPES)
    assert fp16 == bf16, f"{row}: {fp16} in fp16, {bf16} in bf16"
    return f"| {row.library} `{row.optimizer}` | {row.option} | {full} | {fp16} |"


def table() -> list[str]:
    head = ["| optimizer | options | fp32 weights | fp16 or bf16 weights | peak |", "| --- | --- | --- | --- | --- |"]
    with only_new_objects():
        return head + [f"{line(row)} {peaks(row)} |" for row in ROWS]


if __name__ == "__main__":
    # Freed pieces above 16 KB go back to the system at once. By default glibc raises this limit as it goes, and scales
    # of codes (32 KB) would lie in memory that the process has already.
    ctypes.CDLL(None).mallopt(-3, 2**14)  # M_MMAP_THRESHOLD
    print("\n".join(table()))
