"""The Triton kernels on tables, every array between guard bands. test_triton_interpret.py runs this file in a
process of its own: with TRITON_INTERPRET=1 on CPU tensors, without it on CUDA tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from amp_kernels.triton_kernels import _unscale_table_, _update_table_
from amp_kernels.triton_kernels.send import _write_by_value
from torch import Tensor

from amp_kernels._table import DTYPE_CODES, HYPER_COLUMNS, UPDATE_ROWS, Row

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
CODES = DTYPE_CODES
NAMES = {FP32: "fp32", FP16: "fp16", BF16: "bf16"}
CHUNK = 1024
SIZES = (0, 1, 7, 8, 9, 1023, 1024, 1025)  # around a 16-byte access and around a chunk
FEW = (9, 1024, 1027)
LARGE = 65537  # many tiles in a chunk of 16384, and one element more; the interpreter takes 10 ms a tile

dtypes = pytest.mark.parametrize("dtype", CODES, ids=NAMES.get)
offsets = pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "misaligned"])
# NumPy, underneath the interpreter, warns where IEEE arithmetic overflows; that it does is what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


class Arena:
    """Places arrays between guard bands of 0xff: NaN to whoever reads them, a canary where someone writes."""

    GUARD = 64  # bytes; a multiple of 16, so that `offset` alone decides the alignment

    def __init__(self) -> None:
        self.buffers: list[tuple[Tensor, slice]] = []

    def place(self, values: Tensor, offset: int = 0) -> Tensor:
        """A copy of `values`, `offset` elements past an address that is a multiple of 16."""
        start = self.GUARD + offset * values.element_size()
        inside = slice(start, start + values.numel() * values.element_size())
        buffer = torch.full((inside.stop + self.GUARD,), 0xFF, dtype=torch.uint8, device=DEVICE)
        assert buffer.data_ptr() % 16 == 0
        self.buffers.append((buffer, inside))
        return buffer[inside].view(values.dtype).copy_(values)

    def check(self) -> None:
        for buffer, inside in self.buffers:
            assert (buffer[: inside.start] == 0xFF).all() and (buffer[inside.stop :] == 0xFF).all()

    def bytes(self) -> Tensor:
        return torch.cat([buffer for buffer, _ in self.buffers]).clone()


def randn(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed * 1000 + size))


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=FP32, device=DEVICE)


def cut(numels: Sequence[int], chunk_size: int, first_chunk: int = 0) -> Tensor:
    chunks = [(t, first_chunk + k) for t, numel in enumerate(numels) for k in range(-(-numel // chunk_size))]
    return torch.tensor(chunks, dtype=torch.int32, device=DEVICE).view(-1, 2)


def address(tensor: Tensor | None, begin: int = 0) -> int:
    """Where an array starts of which `tensor` holds the elements from `begin` on."""
    return 0 if tensor is None else tensor.data_ptr() - begin * tensor.element_size()


# ---------------------------------------------------------------------------------------------- gradient pass


def run_pass(
    grads: Sequence[Tensor | None],
    *,
    numels: Sequence[int] | None = None,
    scale: float | None = None,
    divide: bool = False,
    write: bool = False,
    clear: bool = True,
    chunk_size: int = CHUNK,
    first_chunk: int = 0,
    found_inf: float = 7.0,
    record: Sequence[int] = (0, 41, -5, -6),
) -> SimpleNamespace:
    numels = [0 if g is None else g.numel() for g in grads] if numels is None else numels
    codes = [0 if g is None else CODES[g.dtype] for g in grads]
    begin = first_chunk * chunk_size
    table = [[begin + numel for numel in numels], [address(g, begin) for g in grads], codes]
    chunks = cut(numels, chunk_size, first_chunk)
    arena = Arena()
    out = SimpleNamespace(
        chunks=chunks.cpu(),
        partials=arena.place(torch.zeros(len(chunks), dtype=torch.float64)),
        found_inf=arena.place(torch.tensor([found_inf])),
        norm=arena.place(torch.tensor([-1.0])),
        record=arena.place(torch.tensor(record)),
    )
    _unscale_table_(
        torch.tensor(table, dtype=torch.int64, device=DEVICE), chunks, chunk_size,
        None if scale is None else scalar(scale), divide, write, clear,
        out.partials, out.found_inf[0], out.norm[0], out.record,
    )  # fmt: skip
    arena.check()
    return out


def exact_norm(grads: Sequence[Tensor]) -> float:
    return math.sqrt(sum(g.double().square().sum().item() for g in grads))


@dtypes
@offsets
@pytest.mark.parametrize(("sizes", "chunk_size"), [(SIZES, CHUNK), ((LARGE,), 1 << 14)], ids=["sizes", "large"])
def test_norm(dtype: torch.dtype, offset: int, sizes: tuple[int, ...], chunk_size: int) -> None:
    arena = Arena()
    grads = [arena.place(randn(size).to(dtype), offset) for size in sizes]
    before = arena.bytes()
    out = run_pass(grads, chunk_size=chunk_size)
    for partial, (t, k) in zip(out.partials.tolist(), out.chunks.tolist(), strict=True):
        expected = grads[t][k * chunk_size : (k + 1) * chunk_size].double().square().sum().item()
        assert partial == pytest.approx(expected, rel=1e-6)
    assert out.norm.item() == pytest.approx(exact_norm(grads), rel=2e-7)
    assert out.found_inf.item() == 0.0
    assert out.record.tolist() == [0, 42, -5, -6]
    assert torch.equal(arena.bytes(), before)


@dtypes
@offsets
@pytest.mark.parametrize("factor", [(None, False), (0.3, False), (3.0, True)], ids=["1", "scale", "1/scale"])
def test_write(dtype: torch.dtype, offset: int, factor: tuple[float | None, bool]) -> None:
    arena = Arena()
    values = [randn(size).mul(7).to(dtype) for size in (*FEW, 8193)]
    grads = [arena.place(value, offset) for value in values]
    scale, divide = factor
    multiplier = torch.tensor(1.0 if scale is None else 1 / scale if divide else scale)
    out = run_pass(grads, scale=scale, divide=divide, write=True)
    arena.check()
    for grad, value in zip(grads, values, strict=True):
        assert torch.equal(grad.cpu(), (value.float() * multiplier).to(dtype))
    assert out.norm.item() == pytest.approx(exact_norm(values) * multiplier.item(), rel=2e-7)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=NAMES.get)
@pytest.mark.parametrize("scale", [None, 0.75, 2.0**-11, 2.0**9])
def test_write_every_16_bit_value(dtype: torch.dtype, scale: float | None) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    grad = values.to(DEVICE, copy=True)
    run_pass([grad], scale=scale, write=True, chunk_size=1 << 16)
    expected = (values.float() * torch.tensor(scale or 1.0)).to(dtype)
    torch.testing.assert_close(grad.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@dtypes
def test_more_than_32_bits_of_elements(dtype: torch.dtype) -> None:
    """The last chunk of an array whose other 2**33 elements nobody needs."""
    arena = Arena()
    values = randn(1000).to(dtype)
    grad = arena.place(values)
    out = run_pass([grad], first_chunk=2**23, scale=0.5, write=True)
    arena.check()
    assert torch.equal(grad.cpu(), values / 2)
    assert out.norm.item() == pytest.approx(exact_norm([values]) / 2, rel=2e-7)


def test_mixed_dtypes_in_one_launch() -> None:
    grads = [randn(2000, seed).to(dtype).to(DEVICE) for seed, dtype in enumerate(CODES)]
    assert run_pass(grads).norm.item() == pytest.approx(exact_norm(grads), rel=2e-7)


@dtypes
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 1023, 1024, 5000], ids=lambda p: f"at{p}")
@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_non_finite(dtype: torch.dtype, bad: float, position: int, write: bool) -> None:
    values = [randn(1500).to(dtype), randn(5001).to(dtype), randn(1500).to(dtype)]
    values[1][position] = bad
    values[2][1] = bad  # the smallest index counts
    grads = [value.to(DEVICE, copy=True) for value in values]
    out = run_pass(grads, scale=0.0 if write else None, write=write)  # inf * 0: the check is on the input
    is_bad = [(t, k) in ((1, position // CHUNK), (2, 0)) for t, k in out.chunks.tolist()]
    assert (~out.partials.isfinite()).tolist() == is_bad
    assert out.found_inf.item() == 1.0
    norm = math.nan if write or math.isnan(bad) else math.inf  # inf * 0 is NaN
    torch.testing.assert_close(out.norm.item(), norm, equal_nan=True)
    assert out.record.tolist() == [0, 42, 42, 1]


@pytest.mark.parametrize("found_inf", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "overflow"])
def test_without_clear_found_inf_accumulates(found_inf: float, bad: bool) -> None:
    grad = torch.tensor([1.0, math.inf if bad else 2.0], device=DEVICE)
    out = run_pass([grad], clear=False, found_inf=found_inf)
    assert out.found_inf.item() == (1.0 if bad else found_inf)
    assert out.record.tolist() == [0, 41, -5, -6]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=NAMES.get)
@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize(
    ("fill", "scale"),
    [
        ([1e-30], 2.0**100),
        ([1e-45], 2.0**100),
        ([1e-40, 0.0], 2.0**100),
        ([3e38], 2.0**-20),
        ([-3e38, 1.0], 2.0**-20),
        ([1e-30, 3e38], 2.0**-20),
        ([1e-13], 1.0),
        ([3e19, 1e-38], 1.0),
    ],
    ids=str,
)
def test_squares_outside_the_range_of_fp32(dtype: torch.dtype, write: bool, fill: list[float], scale: float) -> None:
    values = torch.tensor(fill).repeat(1500)[:2500].to(dtype)
    out = run_pass([values.to(DEVICE, copy=True)], scale=scale, write=write)
    assert out.found_inf.item() == 0.0
    assert out.norm.item() == pytest.approx(exact_norm([values]) * scale, rel=2e-7, abs=0)


@dtypes
def test_zeros_and_skipped_tensors(dtype: torch.dtype) -> None:
    grads = [torch.zeros(2500, dtype=dtype, device=DEVICE), None, -torch.zeros(3, dtype=dtype, device=DEVICE)]
    out = run_pass(grads, numels=[2500, 3000, 3])
    assert out.partials.tolist() == [0.0] * 7
    assert out.norm.item() == 0.0 and out.found_inf.item() == 0.0


@pytest.mark.parametrize("grads", [[], [torch.empty(0)]], ids=["no tensor", "empty tensor"])
@pytest.mark.parametrize("clear", [False, True], ids=["keep", "clear"])
def test_no_chunks(grads: list[Tensor], clear: bool) -> None:
    out = run_pass(grads, clear=clear)
    assert out.norm.item() == 0.0
    assert out.found_inf.item() == (0.0 if clear else 7.0)
    assert out.record.tolist() == [0, 41 + clear, -5, -6]


def test_more_chunks_than_one_fold() -> None:
    grads: list[Tensor | None] = [None] * 1030
    grads[0], grads[1025] = randn(1).to(DEVICE), randn(1, 1).to(DEVICE)
    assert run_pass(grads, numels=[1] * 1030).norm.item() == pytest.approx(exact_norm([grads[0], grads[1025]]))
    grads[3], grads[1027] = torch.tensor([[math.nan], [math.inf]], device=DEVICE)
    assert run_pass(grads, numels=[1] * 1030).record.tolist() == [0, 42, 42, 3]


def test_record_across_passes_and_same_bits() -> None:
    grad = randn(30000).to(DEVICE)
    runs = [run_pass([grad]) for _ in range(3)]
    assert len({run.norm.item() for run in runs}) == 1
    grad[7] = math.nan
    bad = run_pass([grad], record=runs[0].record.tolist())
    assert bad.record.tolist() == [0, 43, 43, 0]
    assert run_pass([grad.nan_to_num()], record=bad.record.tolist()).record.tolist() == [0, 44, 43, 0]


# ---------------------------------------------------------------------------------------------------- updates
# A reference computes one step of one tensor in the dtype of its arguments: fp64 for the truth, fp32 for the
# error that plain torch makes.


@dataclasses.dataclass(frozen=True)
class Sgd:
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    table_op = staticmethod(functools.partial(_update_table_, "sgd"))

    def has_states(self) -> tuple[bool, ...]:
        return (self.momentum != 0,)

    def hyper(self) -> list[float]:
        sign = -1.0 if self.maximize else 1.0
        return [self.momentum, 1 - self.dampening, self.weight_decay, float(self.nesterov), sign, math.nan]

    def step(self, p: Tensor, g: Tensor, states: list[Tensor | None], lr: float, first: bool) -> Tensor:
        g = (-g if self.maximize else g) + self.weight_decay * p
        if states[0] is not None:
            buffer = g if first else self.momentum * states[0] + (1 - self.dampening) * g
            states[0] = buffer
            g = g + self.momentum * buffer if self.nesterov else buffer
        return p - lr * g


@dataclasses.dataclass(frozen=True)
class Rmsprop:
    alpha: float = 0.9
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    maximize: bool = False

    table_op = staticmethod(functools.partial(_update_table_, "rmsprop"))

    def has_states(self) -> tuple[bool, ...]:
        return (True, self.momentum != 0, self.centered)

    def hyper(self) -> list[float]:
        sign = -1.0 if self.maximize else 1.0
        return [self.alpha, 1 - self.alpha, self.eps, self.weight_decay, sign, self.momentum]

    def step(self, p: Tensor, g: Tensor, states: list[Tensor | None], lr: float, first: bool) -> Tensor:
        g = (-g if self.maximize else g) + self.weight_decay * p
        states[0] = self.alpha * states[0] + (1 - self.alpha) * g * g
        variance = states[0]
        if states[2] is not None:
            states[2] = states[2] + (1 - self.alpha) * (g - states[2])
            variance = (variance - states[2] * states[2]).clamp(min=0)
        step = g / (variance.sqrt() + self.eps)
        if states[1] is not None:
            states[1] = step = self.momentum * states[1] + step
        return p - lr * step


Config = Sgd | Rmsprop
SGDS = [
    Sgd(),
    Sgd(weight_decay=0.1, maximize=True),
    Sgd(momentum=0.9),
    Sgd(momentum=0.9, dampening=0.5, weight_decay=0.1),
    Sgd(momentum=0.9, weight_decay=0.1, nesterov=True, maximize=True),
]
RMSPROPS = [
    Rmsprop(),
    Rmsprop(alpha=0.99, eps=1e-3, weight_decay=0.1, maximize=True),
    Rmsprop(momentum=0.9),
    Rmsprop(centered=True, eps=1e-3),
    Rmsprop(centered=True, momentum=0.9, weight_decay=0.1),
]
FULL = [SGDS[-1], RMSPROPS[-1]]  # every array that the optimizer knows


def name(config: object) -> str:
    fields = dataclasses.asdict(config)  # type: ignore[call-overload]
    return "-".join([type(config).__name__.lower(), *(k for k, v in fields.items() if v and k != "eps")])


class Model:
    """Tensors of one parameter dtype and one gradient dtype, a group of hyper-parameters for each config."""

    def __init__(
        self,
        configs: Sequence[Config],
        sizes: Sequence[int] = FEW,
        param_dtype: torch.dtype = FP32,
        grad_dtype: torch.dtype = FP32,
        offset: int = 0,
        steps: int = 0,
        chunk_size: int = CHUNK,
        first_chunk: int = 0,
    ) -> None:
        self.arena = Arena()
        self.begin = first_chunk * chunk_size
        self.chunk_size = chunk_size
        self.configs = [config for config in configs for _ in sizes]
        self.groups = [g for g in range(len(configs)) for _ in sizes]
        self.numels = list(sizes) * len(configs)
        self.param_dtype, self.grad_dtype = param_dtype, grad_dtype
        self.lr = [scalar(0.1 / (1 + g)) for g in range(len(configs))]
        self.masters = [self.arena.place(randn(n, i), offset) for i, n in enumerate(self.numels)]
        self.params = self.masters
        if param_dtype != FP32:
            self.params = [self.arena.place(m.to(param_dtype), offset) for m in self.masters]
        self.states: list[list[Tensor | None]] = [
            [self.arena.place(torch.zeros(n), offset) if has else None for has in config.has_states()]
            for n, config in zip(self.numels, self.configs, strict=True)
        ]
        self.grads: list[Tensor | None] = [
            self.arena.place(randn(n, 50 + i).to(grad_dtype), offset) for i, n in enumerate(self.numels)
        ]
        self.chunks = cut(self.numels, chunk_size, first_chunk)
        self.steps = self.arena.place(torch.full((len(self.chunks),), steps, dtype=torch.int32))
        self.hyper = torch.tensor(
            [[*c.hyper(), *[math.nan] * (HYPER_COLUMNS - len(c.hyper()))] for c in configs], device=DEVICE
        )

    def new_grads(self, seed: int) -> None:
        for i, grad in enumerate(self.grads):
            if grad is not None:
                grad.copy_(randn(grad.numel(), seed + i))

    def step(
        self,
        grad_scale: float | None = None,
        found_inf: float | None = None,
        grad_norm: float | None = None,
        max_norm: float = 0.0,
    ) -> None:
        table = torch.zeros(UPDATE_ROWS, len(self.numels), dtype=torch.int64)
        table[Row.NUMEL] = torch.tensor([self.begin + numel for numel in self.numels])
        table[Row.GRAD] = torch.tensor([address(g, self.begin) for g in self.grads])
        table[Row.GRAD_DTYPE] = CODES[self.grad_dtype]
        table[Row.GROUP] = torch.tensor(self.groups)
        table[Row.PARAM] = torch.tensor([address(p, self.begin) for p in self.params])
        if self.param_dtype != FP32:
            table[Row.MASTER] = torch.tensor([address(m, self.begin) for m in self.masters])
        for k in range(len(self.states[0])):
            table[Row.STATE + k] = torch.tensor([address(states[k], self.begin) for states in self.states])
        optional = [None if x is None else scalar(x) for x in (grad_scale, found_inf, grad_norm)]
        self.configs[0].table_op(
            table.to(DEVICE), self.chunks, self.chunk_size, self.steps, self.hyper,
            torch.tensor([x.data_ptr() for x in self.lr], device=DEVICE),
            CODES[self.param_dtype], CODES[self.grad_dtype], *optional, max_norm,
        )  # fmt: skip
        self.arena.check()


class Expected:
    """The same tensors, updated by the reference in fp64 and in fp32."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.runs = {
            dtype: [(m.cpu().to(dtype), [None if s is None else s.cpu().to(dtype) for s in states])
                    for m, states in zip(model.masters, model.states, strict=True)]
            for dtype in (torch.float64, FP32)
        }  # fmt: skip

    def step(self, factor: float = 1.0, first: bool = False) -> None:
        m = self.model
        for dtype, run in self.runs.items():
            for i, (p, states) in enumerate(run):
                grad = m.grads[i]
                if grad is not None:
                    lr = m.lr[m.groups[i]].item()
                    g = grad.cpu().to(dtype) * torch.tensor(factor, dtype=dtype)
                    run[i] = (m.configs[i].step(p, g, states, lr, first), states)

    def check(self) -> None:
        m = self.model
        for i, (truth, plain) in enumerate(zip(*self.runs.values(), strict=True)):
            within(m.masters[i], truth[0], plain[0])
            for ours, exact, torch32 in zip(m.states[i], truth[1], plain[1], strict=True):
                if ours is not None:
                    within(ours, exact, torch32)
            assert torch.equal(m.params[i], m.masters[i].to(m.param_dtype))


def within(ours: Tensor, truth: Tensor, plain: Tensor) -> None:
    """The error rule: at most twice plain torch's error, plus 1e-7 of the largest value."""
    if truth.numel() == 0:
        return
    error = (ours.cpu().double() - truth).abs().max().item()
    allowed = 2 * (plain.double() - truth).abs().max().item() + 1e-7 * truth.abs().max().item()
    assert error <= allowed


@pytest.mark.parametrize("config", FULL, ids=name)
@pytest.mark.parametrize(
    ("param_dtype", "grad_dtype"), list(itertools.product(CODES, CODES)), ids=lambda dtype: NAMES[dtype]
)
@offsets
def test_update(config: Config, param_dtype: torch.dtype, grad_dtype: torch.dtype, offset: int) -> None:
    model = Model([config], SIZES, param_dtype, grad_dtype, offset)
    expected = Expected(model)
    for step in range(2):
        model.new_grads(100 * step)
        expected.step(first=step == 0)
        model.step()
        expected.check()
    assert (model.steps == 2).all()


@pytest.mark.parametrize("config", FULL, ids=name)
@offsets
def test_large_update(config: Config, offset: int) -> None:
    model = Model([config], [LARGE], BF16, FP16, offset, chunk_size=1 << 14)
    expected = Expected(model)
    expected.step(first=True)
    model.step()
    expected.check()


@pytest.mark.parametrize("configs", [*([c] for c in SGDS + RMSPROPS), SGDS, RMSPROPS],
                         ids=[*map(name, SGDS + RMSPROPS), "sgd-groups", "rmsprop-groups"])  # fmt: skip
def test_options(configs: list[Config]) -> None:
    model = Model(configs, param_dtype=BF16, grad_dtype=FP16)
    expected = Expected(model)
    for step in range(3):
        model.new_grads(100 * step)
        expected.step(first=step == 0)
        model.step()
        expected.check()


@pytest.mark.parametrize("config", FULL, ids=name)
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (FP16, BF16)], ids=["fp32", "16-bit"])
def test_update_of_more_than_32_bits_of_elements(config: Config, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    model = Model([config], [1000], *dtypes, first_chunk=2**23)
    expected = Expected(model)
    expected.step(first=True)
    model.step()
    expected.check()


@pytest.mark.parametrize("config", FULL, ids=name)
@pytest.mark.parametrize("array", ["grads", "params", "masters", "states"])
def test_one_misaligned_array(config: Config, array: str) -> None:
    """Each array alone decides that 16-byte accesses are off, wherever it stands in the table."""
    aligned = Model([config], param_dtype=FP16, grad_dtype=BF16)
    mixed = Model([config], param_dtype=FP16, grad_dtype=BF16)
    arrays = getattr(mixed, array)
    if array == "states":
        for states in arrays:
            states[-1] = mixed.arena.place(states[-1], 1)
    else:
        arrays[:] = [mixed.arena.place(a, 1) for a in arrays]
    for model in (aligned, mixed):
        model.step()
    for ours, theirs in zip(mixed.masters, aligned.masters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert all(torch.equal(p, m.to(FP16)) for p, m in zip(mixed.params, mixed.masters, strict=True))


@pytest.mark.parametrize("config", FULL, ids=name)
@pytest.mark.parametrize("steps", [0, 3], ids=["first", "later"])
@pytest.mark.parametrize("found_inf", [1.0, 2.0, math.inf, math.nan])
def test_overflow_changes_nothing(config: Config, steps: int, found_inf: float) -> None:
    model = Model([config], param_dtype=FP16, grad_dtype=FP16, steps=steps)
    before = model.arena.bytes()
    model.step(found_inf=found_inf)
    assert torch.equal(model.arena.bytes(), before)


@pytest.mark.parametrize("config", FULL, ids=name)
@pytest.mark.parametrize("found_inf", [None, 0.0, -0.0])
def test_scale_and_clip(config: Config, found_inf: float | None) -> None:
    model = Model([config], param_dtype=BF16, grad_dtype=FP32)
    expected = Expected(model)
    for step, (norm, coefficient) in enumerate([(4.0, 0.5 / 4), (0.25, 1.0), (0.0, 1.0)]):
        expected.step(coefficient / 64, first=step == 0)
        model.step(grad_scale=64.0, found_inf=found_inf, grad_norm=norm, max_norm=0.5)
    expected.check()


@pytest.mark.parametrize("config", FULL, ids=name)
def test_nan_norm_is_not_hidden(config: Config) -> None:
    model = Model([config])
    model.step(grad_norm=math.nan, max_norm=1.0)
    assert all(m.isnan().all() for m in model.masters)


@pytest.mark.parametrize("config", FULL, ids=name)
def test_tensors_without_a_gradient(config: Config) -> None:
    """A late gradient finds its first step, whatever the other tensors have done before."""
    model = Model([config], sizes=(1500, 2500), param_dtype=BF16)
    late, model.grads[0] = model.grads[0], None
    expected = Expected(model)
    for step in range(2):
        expected.step(first=step == 0)
        model.step()
    assert model.steps.tolist() == [0, 0, 2, 2, 2]
    expected.check()
    model.grads[0] = late
    fresh = Expected(model)
    fresh.step(first=True)
    model.step()
    within(model.masters[0], *(run[0][0] for run in fresh.runs.values()))
    assert model.steps.tolist() == [1, 1, 3, 3, 3]


@pytest.mark.parametrize("config", FULL, ids=name)
def test_no_chunks_to_update(config: Config) -> None:
    model = Model([config], sizes=(0,))
    model.step()
    assert model.steps.numel() == 0


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=NAMES.get)
def test_weights_round_to_nearest_even(dtype: torch.dtype) -> None:
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16  # ties, and their neighbours, of every exponent
    shift = 0 if dtype == BF16 else 3
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]) >> shift
    values = (upper[:, None] + lower).view(-1).to(torch.int32).view(FP32)
    special = torch.tensor([65504.0, 65519.996, 65520.0, 2.0**-24, 2.0**-25, 3 * 2.0**-25, -0.0, 3.3961e38])
    values = torch.cat([special, values[torch.randperm(len(values), generator=torch.Generator().manual_seed(0))]])
    model = Model([Sgd()], sizes=(40000,), param_dtype=dtype)
    model.masters[0].copy_(values[:40000])
    model.grads[0].zero_()  # type: ignore[union-attr]
    model.step()
    expected = model.masters[0].to(dtype)
    torch.testing.assert_close(model.params[0], expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(model.params[0].signbit()[~expected.isnan()], expected.signbit()[~expected.isnan()])


def test_negative_variance_counts_as_zero_and_nan_stays() -> None:
    model = Model([Rmsprop(centered=True, alpha=1.0, eps=1.0)], sizes=(8,))
    square_avg, _, grad_avg = model.states[0]
    square_avg.fill_(1.0)  # type: ignore[union-attr]
    grad_avg.fill_(2.0)  # type: ignore[union-attr]
    square_avg[3] = math.nan  # type: ignore[index]
    before, grad = model.masters[0].clone(), model.grads[0]
    model.step()
    torch.testing.assert_close(model.masters[0][:3], (before - 0.1 * grad)[:3])
    assert model.masters[0].isnan().tolist() == [i == 3 for i in range(8)]


# ------------------------------------------------------------------------------------------------------- send


def test_values_written_by_value_are_exact() -> None:
    host = torch.tensor([0, -1, 2**53 + 1, 2**63 - 1, -(2**63), *range(700)])
    to = torch.full_like(host, -7, device=DEVICE)
    _write_by_value(host, to)
    assert torch.equal(to.cpu(), host)
