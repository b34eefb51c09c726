"""The gradient pass over tables, as every backend's kernel does it, arrays between guard bands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import pytest
import torch
from arena import Arena
from cuda_on_cpu import backend as emulator
from table_kernels import CHUNK, LARGE, SIZES, Launcher, address, cut, randn, why_not_emulated
from torch import Tensor

from amp_kernels import testing
from amp_kernels.ops.table import DTYPE_CODES
from amp_kernels.testing.common import DTYPES, differing

# NumPy, underneath Triton's interpreter, warns where IEEE arithmetic overflows; that it does is tested.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
emulated = pytest.mark.skipif(why_not_emulated() is not None, reason=str(why_not_emulated()))
offsets = pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "misaligned"])
NON_FINITE = pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])


@dataclass
class Pass:
    """One gradient pass over `grads` (None: a tensor that is skipped), its arguments and, after `run`, its results.

    A gradient holds the elements of its tensor from chunk `first_chunk` on; those before it are nowhere.
    """

    grads: Sequence[Tensor | None]
    scale: float | None = None
    divide: bool = False
    write: bool = False
    clear: bool = True
    found_inf: float = 0.0
    record: Sequence[int] = (0, 4, 2, 1)
    chunks: list[tuple[int, int]] | None = None
    chunk: int = CHUNK
    first_chunk: int = 0
    offset: int = 0
    counts_reads: bool = False  # of the first gradient
    factors: Sequence[float] | None = None  # of the squares of each tensor; None: the table has no such row

    def run(self, launcher: Launcher) -> Pass:
        # NaN beside a gradient would send the norm down its exact path: a read too far shows as a finite number too.
        self.launcher = launcher
        arena = launcher.arena(Arena.NAN if launcher.order == "forwards" else Arena.FINITE)
        begin = self.first_chunk * self.chunk
        out = [None if g is None else arena.place(g, self.offset) for g in self.grads]
        numels = [CHUNK if g is None else g.numel() for g in self.grads]
        rows = [
            [begin + numel for numel in numels],
            [0 if g is None else DTYPE_CODES[g.dtype] for g in out],
            [0 for _ in out],
            [address(g, begin) for g in out],
        ]
        if self.factors is not None:
            rows += [[0 for _ in out], torch.tensor(self.factors, dtype=torch.float64).view(torch.int64).tolist()]
        if self.chunks is None:
            self.chunks = cut(numels, self.chunk, self.first_chunk)
        chunks = torch.tensor(self.chunks, dtype=torch.int32).reshape(-1, 2)
        partials = arena.place(torch.full((len(chunks),), math.nan, dtype=torch.float64))
        flag, norm = arena.place(torch.tensor([self.found_inf]))[0], arena.place(torch.tensor([123.0]))[0]
        record = arena.place(torch.tensor(self.record))
        scale = None if self.scale is None else arena.place(torch.tensor([self.scale]))[0]
        table, entries = arena.place(torch.tensor(rows, dtype=torch.int64).reshape(len(rows), -1)), arena.place(chunks)
        arguments = (
            table, entries, self.chunk, scale, self.divide, self.write, self.clear, partials, flag, norm, record,
            0 if self.factors is None else len(rows) - 1,
        )  # fmt: skip
        if self.counts_reads:
            self.reads = emulator.reads_of(out[0], lambda: launcher.unscale_table_(*arguments))
        else:
            launcher.unscale_table_(*arguments)
        arena.check()
        self.out = [None if g is None else g.cpu() for g in out]
        self.partials, self.after = partials.cpu(), record.tolist()
        self.flag, self.norm = flag.item(), norm.cpu()
        return self

    @property
    def factor(self) -> Tensor:
        scale = torch.tensor(1.0 if self.scale is None else self.scale)
        return 1 / scale if self.divide else scale

    def check(self) -> None:
        """Everything that a pass over finite gradients promises."""
        sums = []
        for t, k in self.chunks or ():
            grad, k = self.grads[t], k - self.first_chunk
            part = torch.zeros(0) if grad is None else grad[k * self.chunk : (k + 1) * self.chunk]
            sums.append(part.double().square().sum() * (1.0 if self.factors is None else self.factors[t]))
        expected = torch.stack(sums) if sums else torch.zeros(0, dtype=torch.float64)
        if self.offset == 0 or self.launcher.backend != "cuda":
            torch.testing.assert_close(self.partials, expected, rtol=1e-6, atol=0)
        else:  # chunks of these kernels begin where packs do, and only the sum of a tensor is known
            of = torch.tensor([t for t, _ in self.chunks or ()], dtype=torch.int64)
            zeros = torch.zeros(len(self.grads), dtype=torch.float64)
            ours, sums = (zeros.index_add(0, of, x) for x in (self.partials, expected))
            torch.testing.assert_close(ours, sums, rtol=1e-6, atol=0)
        norm = (expected.sum().sqrt() * self.factor.double()).float()
        torch.testing.assert_close(self.norm, norm, rtol=2e-7, atol=1e-45)
        assert self.flag == (0.0 if self.clear else self.found_inf)
        passes = self.record[1] + self.clear
        assert self.after == [0, passes, self.record[2], self.record[3]]
        self.check_gradients()

    def check_gradients(self) -> None:
        for before, after in zip(self.grads, self.out, strict=True):
            if before is not None and after is not None:
                expected = (before.float() * self.factor).to(before.dtype) if self.write else before
                assert differing(after, expected) == 0


@offsets
@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@dtypes
def test_sizes(dtype: torch.dtype, write: bool, offset: int, ordered_launcher: Launcher) -> None:
    Pass([randn(n, n, dtype) for n in SIZES], scale=1 / 48, write=write, offset=offset).run(ordered_launcher).check()


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_squares_count_as_often_as_their_factor_says(write: bool, launcher: Launcher) -> None:
    factors = [0.25, 0.75, 1.0, 2.0**-30, 1 / 3, 1 / 7, 1.0, 1e-3, 0.5]
    Pass([randn(n, n) for n in SIZES], scale=1 / 48, write=write, factors=factors).run(launcher).check()
    bad = [torch.ones(CHUNK + 1), torch.tensor([math.inf])]
    run = Pass(bad, factors=[2.0**-1000, 2.0**-1000]).run(launcher)
    assert run.flag == 1.0 and run.after[2:] == [run.record[1] + 1, 1]


@emulated
@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@dtypes
def test_gradients_are_read_once_and_16_bytes_at_a_time(dtype: torch.dtype, write: bool, offset: int) -> None:
    """But for at most three elements at either end of a tensor, and of 16 bits four more. Each chunk is as long as what
    a block has under way."""
    bytes_, pack = dtype.itemsize, 16 // dtype.itemsize
    chunk = 1024 * pack
    for rest in (0, 1, pack - 1):
        size = 2 * chunk - 8 + rest
        grads = [randn(size, rest, dtype)]
        case = Pass(grads, scale=0.5, write=write, chunk=chunk, offset=offset, counts_reads=True)
        reads = case.run(Launcher("cuda", order="shuffled")).reads
        head = -offset % pack
        tail = (size - head) % pack
        one_by_one = head % 4 + tail % 4
        assert one_by_one <= 7 and reads.get(bytes_, 0) == one_by_one
        assert reads.get(8, 0) == head // 4 + tail // 4
        # A thread without a fourth pack reads its first one again.
        assert (size - head - tail) // pack <= reads[16] <= 2 * 1024
        case.check()
    short = [randn(n, n, dtype) for n in range(1, 24)]
    Pass(short, scale=0.5, write=write, offset=offset).run(Launcher("cuda", order="shuffled")).check()


@dtypes
def test_more_chunks_than_blocks(dtype: torch.dtype, ordered_launcher: Launcher) -> None:
    grads = [randn(LARGE, 1, dtype)]
    Pass(grads, scale=3.0, divide=True, write=True, chunk=2 * CHUNK).run(ordered_launcher).check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("scale", [None, 0.75, 2.0**-11, 2.0**9])
def test_write_every_16_bit_value(dtype: torch.dtype, scale: float | None, launcher: Launcher) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    Pass([values], scale=scale, write=True, chunk=1 << 16).run(launcher).check_gradients()


@dtypes
def test_more_than_32_bits_of_elements(dtype: torch.dtype, launcher: Launcher) -> None:
    """The last chunk of an array whose other 2**33 elements nobody needs."""
    Pass([randn(1000, dtype=dtype)], first_chunk=2**23, scale=0.5, write=True).run(launcher).check()


def test_mixed_dtypes_and_skipped_tensors(ordered_launcher: Launcher) -> None:
    grads = [None, *(randn(size, size, dtype) for size in (9, 1025) for dtype in DTYPES.values()), None]
    Pass(grads, scale=0.125, write=True).run(ordered_launcher).check()


@pytest.mark.parametrize("grads", [[], [torch.zeros(0)], [None]], ids=["no-tensor", "no-element", "all-skipped"])
@pytest.mark.parametrize("clear", [False, True], ids=["keep", "clear"])
def test_nothing(grads: list[Tensor | None], clear: bool, launcher: Launcher) -> None:
    result = Pass(grads, clear=clear, found_inf=2.0).run(launcher)
    result.check()
    assert result.norm.item() == 0.0


@pytest.mark.parametrize("found_inf", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("clear", [False, True], ids=["keep", "clear"])
def test_found_inf_of_an_earlier_pass(clear: bool, found_inf: float, launcher: Launcher) -> None:
    Pass([randn(9)], clear=clear, found_inf=found_inf).run(launcher).check()
    overflow = Pass([torch.tensor([1.0, math.inf])], clear=clear, found_inf=found_inf).run(launcher)
    assert overflow.flag == 1.0


# --------------------------------------------------------------------------------------------------- extreme elements
@pytest.mark.parametrize("scale", [None, 0.5, 2.0**-20])
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float32, 0.0),
        (torch.float32, -0.0),
        (torch.float32, 3e38),  # its square, and the sum of two, are beyond fp32
        (torch.float32, 1e19),  # its square is not, the sum of a pack is
        (torch.float32, 1e-13),  # its square is a denormal fp32, with few bits left
        (torch.float32, 1e-30),  # its square is below fp32
        (torch.float32, 1e-44),
        (torch.bfloat16, 3e38),
        (torch.bfloat16, 1e-30),
        (torch.float16, 65504.0),
        (torch.float16, 6e-8),
    ],
)
def test_norm_of_extreme_elements(dtype: torch.dtype, value: float, scale: float | None, launcher: Launcher) -> None:
    x = torch.full((2 * CHUNK + 3,), value, dtype=dtype)
    alone = torch.cat([torch.zeros(CHUNK, dtype=dtype), x[:9], torch.zeros(5, dtype=dtype)])
    for grads in ([x], [x[:1]], [alone]):
        result = Pass(grads, scale=scale).run(launcher)
        expected = grads[0].double().norm() * (1 if scale is None else scale)
        assert result.flag == 0.0
        if expected > torch.finfo(torch.float32).max:
            assert result.norm.item() == math.inf
        else:
            torch.testing.assert_close(result.norm, expected.float(), rtol=2e-7, atol=1e-45)


@pytest.mark.parametrize("magnitude", [1e-40, 1e-30, 1e-13, 1e19, 1e37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_some_squares_that_fp32_does_not_hold(dtype: torch.dtype, magnitude: float, ordered_launcher: Launcher) -> None:
    grads = [(randn(size, size).double() * magnitude).to(dtype) for size in SIZES]
    mixed = torch.cat([torch.ones(9).to(dtype), grads[-1], torch.zeros(CHUNK).to(dtype)])
    Pass([*grads, mixed], scale=0.5, write=True).run(ordered_launcher).check()


# ----------------------------------------------------------------------------------------------------------- overflow
@NON_FINITE
@dtypes
@pytest.mark.parametrize("clear", [False, True], ids=["keep", "clear"])
def test_overflow_is_found_wherever_it_is(clear: bool, dtype: torch.dtype, value: float, launcher: Launcher) -> None:
    size = 2 * CHUNK + 9
    for position in (0, 6, 7, CHUNK - 1, CHUNK, size - 2, size - 1):
        grads = [randn(n, n, dtype) for n in (5, size, 20)]
        grads[1][position] = value
        result = Pass(grads, scale=0.0, write=True, clear=clear).run(launcher)  # the check is on the input: inf * 0
        assert result.flag == 1.0 and not math.isfinite(result.norm.item())
        assert result.after == ([0, 5, 5, 1] if clear else [0, 4, 2, 1])
        bad = [(t, k) == (1, position // CHUNK) for t, k in result.chunks or ()]
        assert result.partials.isfinite().logical_not().tolist() == bad
        result.check_gradients()


def test_an_infinite_norm_is_no_nan(launcher: Launcher) -> None:
    assert Pass([torch.tensor([1.0, -math.inf])]).run(launcher).norm.item() == math.inf
    assert math.isnan(Pass([torch.tensor([math.inf, math.nan])]).run(launcher).norm.item())


def test_an_opposite_pair_of_infinities_and_a_lone_huge_chunk(ordered_launcher: Launcher) -> None:
    x = torch.full((CHUNK + 1,), 3e38)
    x[CHUNK] = -math.inf
    result = Pass([x, x.neg()]).run(ordered_launcher)
    assert result.partials.isfinite().tolist() == [True, False, True, False]
    assert result.flag == 1.0 and result.after == [0, 5, 5, 0]


def test_first_overflow_is_the_smallest_tensor_whatever_the_order_of_chunks(ordered_launcher: Launcher) -> None:
    grads = [randn(2 * CHUNK, t) for t in range(8)]
    for t in (6, 3, 5):
        grads[t][CHUNK + t] = math.inf
    result = Pass(grads, chunks=cut([2 * CHUNK] * 8)[::-1]).run(ordered_launcher)
    assert result.after == [0, 5, 5, 3]


def test_more_chunks_than_one_fold(launcher: Launcher) -> None:
    grads: list[Tensor | None] = [torch.zeros(1)] * 1030
    grads[0], grads[1025] = randn(1), randn(1, 1)
    Pass(grads).run(launcher).check()
    grads[3], grads[1027] = torch.tensor([math.nan]), torch.tensor([math.inf])
    assert Pass(grads).run(launcher).after == [0, 5, 5, 3]


def test_the_record_across_passes(launcher: Launcher) -> None:
    grad = randn(3000)
    good = Pass([grad]).run(launcher)
    grad[7] = math.nan
    bad = Pass([grad], record=good.after).run(launcher)
    assert (good.after, bad.after) == ([0, 5, 2, 1], [0, 6, 6, 0])
    assert Pass([grad.nan_to_num()], record=bad.after).run(launcher).after == [0, 7, 6, 0]


def test_same_bits_in_every_order(ordered_launcher: Launcher) -> None:
    """The reduction has one order, whatever threads and blocks do; of that it is right other tests say."""
    grads = [randn(size, size, dtype) for size in (*SIZES, LARGE) for dtype in DTYPES.values()]
    first, second = (Pass(grads).run(ordered_launcher) for _ in range(2))
    assert torch.equal(first.partials, second.partials) and torch.equal(first.norm, second.norm)
    if ordered_launcher.order is not None:
        other = Pass(grads).run(Launcher("cuda", order="backwards"))
        assert torch.equal(first.partials, other.partials) and torch.equal(first.norm, other.norm)


# -------------------------------------------------------------------------------------------------------- shared cases
@pytest.mark.skipif(why_not_emulated() is not None, reason=str(why_not_emulated()))
@pytest.mark.parametrize("case", list(chain(*testing.unscale.CASES.values())), ids=lambda case: f"{case.op}-{case}")
def test_shared_case_on_the_emulator(case: testing.Case) -> None:
    assert all(result.passed for result in emulator.run(case))
