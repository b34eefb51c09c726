"""`count_exponents_` on every backend. Counts and largest magnitudes equal the reference exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from arena import Arena
from cuda_on_cpu import backend as emulator
from table_kernels import CHUNK, LARGE, SIZES, Launcher, address, cut, launchers, why_not_emulated
from torch import Tensor

from amp_kernels import reference, testing
from amp_kernels.ops.exponents import count_exponents_
from amp_kernels.ops.library import call
from amp_kernels.ops.table import DTYPE_CODES, RECORD
from amp_kernels.reference.exponents import COLUMNS, ZEROS
from amp_kernels.testing.common import DTYPES, differing, mixed, norms, randn
from amp_kernels.testing.exponents import results_for

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
offsets = pytest.mark.parametrize("offset", [0, 1, 5], ids=["aligned", "misaligned", "misaligned-by-5"])
CASES = testing.CASES["count_exponents_"]


def spread(size: int, dtype: torch.dtype, seed: int = 0, widest: bool = False) -> Tensor:
    """Numbers of many exponents, with zeros of both signs, subnormals, and for `widest` NaN and inf."""
    generator = torch.Generator().manual_seed(seed * 1000 + size)
    low, high = (-26, 17) if dtype == torch.float16 else (-150, 129)
    exponents = torch.randint(low, high, (size,), generator=generator).double()
    x = torch.randn(size, generator=generator, dtype=torch.float64).sign() * torch.exp2(exponents) * 1.25
    x = x.to(dtype)
    x[::7], x[3::11] = 0.0, -0.0
    return x if widest else x.nan_to_num(1.0, 2.0, -3.0)


def check(tensors: Sequence[Tensor], results: tuple[Tensor, Tensor, Tensor]) -> None:
    """The results of tensors, if all of them were 0 before."""
    expected = results_for(tensors, torch.device("cpu"))
    reference.count_exponents_([t.cpu() for t in tensors], *expected)
    assert torch.equal(results[0].cpu(), expected[0]) and torch.equal(results[1].cpu(), expected[1])
    assert norms("norms", results[2].sqrt(), expected[2].sqrt()).passed
    assert results[0].sum(1).tolist() == [t.numel() for t in tensors]


def counted(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    results = results_for(tensors, device)
    call(count_exponents_, list(tensors), *results)
    return results


# ----------------------------------------------------------------------------------------------------- of each backend
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: testing.Case, backend: str, device: torch.device) -> None:
    assert not [result for result in case.run(backend, device) if not result.passed]


def test_what_a_column_is(backend: str, device: torch.device) -> None:
    """Expected values are written by hand here. The other tests compare with the reference."""
    x = torch.tensor([0.0, -0.0, 1.0, -1.9999, 2.0, 1e-40, 2.0**-126, 3e38, torch.inf, -torch.inf, torch.nan])
    counts, largest, squares = counted([x.to(device), torch.tensor([2.0**-24, 6e-8]).half().to(device)], device)
    columns = {ZEROS: 2, 127: 2, 128: 1, 0: 1, 1: 1, 254: 1, 255: 3}
    assert {e: n for e, n in enumerate(counts[0].tolist()) if n} == columns
    assert {e: n for e, n in enumerate(counts[1].tolist()) if n} == {127 - 24: 2}
    assert largest[0].item() == pytest.approx(3e38) and math.isnan(squares[0].item())


@offsets
@dtypes
def test_sizes(dtype: torch.dtype, offset: int, backend: str, device: torch.device) -> None:
    """Around packs, blocks of the CPU and chunks, between guards that are NaN."""
    arena = Arena(Arena.NAN, str(device))
    sizes = (*SIZES, 31, 32, 33, 63, 64, 4095, 4096, 4097, 2 * 4096 + 37)
    tensors = [arena.place(spread(n, dtype).to(device), offset) for n in sizes]
    check(tensors, counted(tensors, device))
    arena.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_every_16_bit_value(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    finite = values[values.isfinite()]
    check([values, finite], counted([values, finite], device))


def test_every_exponent_of_fp32(backend: str, device: torch.device) -> None:
    edges = torch.arange(256, dtype=torch.int32)[:, None] << 23 | torch.tensor([0, 1, 0x7FFFFF], dtype=torch.int32)
    x = torch.cat([edges.flatten(), edges.flatten() | -(2**31)]).view(torch.float32).to(device)
    check([x, x[x.isfinite()]], counted([x, x[x.isfinite()]], device))


# A CPU counts the exponents of 4096 neighbours that are near the largest one by vectors, those below it one by one if
# they are few, and all one by one if they are many or not finite.
KINDS = {
    "normal": lambda x, e: x,
    "small": lambda x, e: x * 2.0**-20,
    "a few far below": lambda x, e: torch.where(e % 300 == 0, x * 2.0**-18, x),
    "a huge one": lambda x, e: torch.where(e == 5000, x * 2.0**15, x * 2.0**-9),
    "three groups": lambda x, e: x * 2.0 ** -((e % 3) * 12.0),
    "uniform exponents": lambda x, e: x * 2.0 ** -(e % 24.0),
    "sparse": lambda x, e: torch.where(e % 10 == 0, x, 0.0),
    "zeros": lambda x, e: x * 0.0,
    "a NaN": lambda x, e: torch.where(e == 4097, torch.nan, x),
    "all inf": lambda x, e: x / 0.0,
}


@pytest.mark.parametrize("kind", KINDS)
@dtypes
def test_distributions(dtype: torch.dtype, kind: str, backend: str, device: torch.device) -> None:
    size = 3 * 4096 + 77
    x = torch.randn(size, generator=torch.Generator().manual_seed(3))
    x = KINDS[kind](x, torch.arange(size)).to(dtype).to(device)
    check([x], counted([x], device))


def test_layouts_and_mixed_dtypes(backend: str, device: torch.device) -> None:
    x = spread(6000, torch.float32).to(device)
    half, low = spread(6000, torch.float16).to(device), spread(6000, torch.bfloat16).to(device)
    tensors = [
        x.view(60, 100).t(),  # dense, in another order
        x.view(60, 100)[:, ::3],
        half.view(2, 30, 100).permute(2, 0, 1),
        low[1:4001].view(40, 100)[1:-1, 2:-2],
        low[:5].expand(7, 5),
        half[7].expand(3, 2),
        x[11],
        torch.empty(0, 3, device=device),
        low.view(5, 4, 30, 10).to(memory_format=torch.channels_last),
        x,
    ]
    check(tensors, counted(tensors, device))


def test_the_reference_counts_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [spread(size, torch.float16) for size in (0, 999, 1000, 1001, 3456)]
    expected = counted(tensors, torch.device("cpu"))
    monkeypatch.setattr(reference.exponents, "PART", 1000)
    check(tensors, expected)


def test_results_are_added_to(backend: str, device: torch.device) -> None:
    tensors = [torch.tensor([1.0, -3.0, 0.0, torch.inf], device=device), torch.empty(0, device=device)]
    counts, largest, squares = results_for(tensors, device)
    counts += 2**40
    largest += torch.tensor([2.5, 7.0], device=device)
    squares -= 1.0
    call(count_exponents_, tensors[:1], counts[:1], largest[:1], squares[:1])
    assert largest.tolist() == [3.0, 7.0] and squares.tolist() == [torch.inf, -1.0]
    assert (counts - 2**40)[0, [127, 128, 255, ZEROS]].tolist() == [1, 1, 1, 1]
    tensors[0][3] = 2.0
    call(count_exponents_, tensors, counts, largest, squares)
    assert counts.sum().item() == 2 * COLUMNS * 2**40 + 8 and largest.tolist() == [3.0, 7.0]
    finite = torch.full((1,), 10.0, dtype=torch.float64, device=device)
    call(count_exponents_, tensors[:1], counts[:1], largest[:1], finite)
    assert finite.item() == 24.0


def test_nothing(backend: str, device: torch.device) -> None:
    for tensors in ([], [torch.empty(0, device=device)] * 2):
        counts, largest, squares = counted(tensors, device)
        assert not counts.any() and not largest.any() and not squares.any()


@pytest.mark.parametrize("value", [3e38, 1e19, 1e-13, 1e-30, 1e-44, 65504.0, 6e-8])
def test_squares_of_extreme_elements(value: float, backend: str, device: torch.device) -> None:
    tensors = [torch.full((2 * CHUNK + 3,), value, device=device).to(dtype) for dtype in DTYPES.values()]
    check(tensors, counted(tensors, device))
    assert counted(tensors[:1], device)[2].isfinite().all()  # in fp64 these squares neither overflow nor vanish
    assert counted(tensors[:1], device)[2].item() > 0


def test_same_bits_on_any_number_of_threads(backend: str) -> None:
    if backend != "cpu":
        pytest.skip("CPU threads")
    tensors = [
        *mixed(),
        randn(300_000),
        randn(40_000, dtype=torch.bfloat16),
    ]
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3, 8):
            torch.set_num_threads(n)
            found.append(counted(tensors, torch.device("cpu")))
            check(tensors, found[-1])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for results in found[1:] for a, b in zip(results, found[0], strict=True))


def test_the_results_are_no_tensors_that_autograd_saved(backend: str, device: torch.device) -> None:
    tensor = torch.ones(3, device=device, requires_grad=True)
    results = counted([tensor], device)
    assert not any(x.requires_grad for x in results) and tensor.grad_fn is None
    with torch.inference_mode():
        check([torch.ones(3, device=device)], counted([torch.ones(3, device=device)], device))


WRONG = {
    "dtype-of-a-tensor": (lambda x, c, m, s: ([x.int()], c, m, s), r"tensors\[0\] must be float32, .*got torch.int32"),
    "dtype-of-counts": (lambda x, c, m, s: ([x], c.int(), m, s), r"counts must be a contiguous torch.int64 tensor"),
    "rows-of-counts": (lambda x, c, m, s: ([x, x], c, m, s), r"counts must be .*shape \(2, 257\), got .*\(1, 257\)"),
    "columns-of-counts": (lambda x, c, m, s: ([x], c[:, :256].clone(), m, s), r"counts must .*got .*\(1, 256\)"),
    "gaps-in-counts": (lambda x, c, m, s: ([x] * 2, c.mT.expand(-1, 2).mT, m, s), r"counts must be a contiguous"),
    "dtype-of-largest": (lambda x, c, m, s: ([x], c, m.double(), s), r"largest must be .*float32.*got torch.float64"),
    "shape-of-largest": (lambda x, c, m, s: ([x], c, m[0], s), r"largest must be .*shape \(1,\), got .*\(\)"),
    "dtype-of-squares": (lambda x, c, m, s: ([x], c, m, s.float()), r"squares must be .*float64.*got torch.float32"),
    "length-of-squares": (lambda x, c, m, s: ([x], c, m, s.expand(2)), r"squares must be .*shape \(1,\), got .*\(2,\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str, backend: str, device: torch.device) -> None:
    """Nothing is written then."""
    x = torch.ones(5, device=device)
    results = results_for([x], device)
    arguments, message = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=f"count_exponents_: {message}"):
        call(count_exponents_, *arguments(x, *results))
    assert not any(result.any() for result in results)


# ------------------------------------------------------------------------------- of kernels on the emulator, by a table
on_tables = pytest.mark.parametrize("by", [launcher for launcher in launchers() if launcher.order], ids=str)
emulated = pytest.mark.skipif(why_not_emulated() is not None, reason=str(why_not_emulated()))


def run_table(
    launcher: Launcher, tensors: Sequence[Tensor], offset: int = 0, chunk: int = CHUNK, first_chunk: int = 0,
    reads: bool = False,
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[int, int]]:  # fmt: skip
    """The results of tensors, and how many reads of each number of bytes the first tensor took. A tensor has the
    elements of a larger one from chunk `first_chunk` on; those before it are nowhere."""
    arena = launcher.arena()
    begin = first_chunk * chunk
    placed = [arena.place(t, offset) for t in tensors]
    rows = [[begin + t.numel() for t in tensors], [DTYPE_CODES[t.dtype] for t in tensors], [0] * len(tensors)]
    table = arena.place(torch.tensor([*rows, [address(t, begin) for t in placed]]))
    chunks = cut([t.numel() for t in tensors], chunk, first_chunk)
    entries = arena.place(torch.tensor(chunks, dtype=torch.int32).reshape(-1, 2))
    partials = arena.place(torch.full((len(chunks),), math.nan, dtype=torch.float64))
    record = arena.place(torch.zeros(RECORD, dtype=torch.int64))
    results = tuple(map(arena.place, results_for(tensors, torch.device("cpu"))))
    run = lambda: launcher.count_exponents_(table, entries, chunk, partials, record, *results)  # noqa: E731
    counts = emulator.reads_of(placed[0], run) if reads else run()
    arena.check()
    assert record.tolist() == [0] * RECORD
    return (results[0].cpu(), results[1].cpu(), results[2].cpu()), counts or {}


@on_tables
@pytest.mark.parametrize("offset", [0, 3], ids=["aligned", "misaligned"])
def test_chunks(by: Launcher, offset: int) -> None:
    """Tensors of one chunk, of a few, of more than a warp has lanes, and more chunks than blocks; the same bits in
    every order."""
    tensors = [spread(n, dtype, seed=n) for dtype in DTYPES.values() for n in (*SIZES, 12 * CHUNK + 5)]
    tensors += [spread(2 * CHUNK + 9, dtype, widest=True) for dtype in DTYPES.values()]
    tensors = [*tensors, spread(LARGE, torch.bfloat16), *(spread(1, torch.float16, seed) for seed in range(40))]
    results, _ = run_table(by, tensors, offset)
    check(tensors, results)
    other, _ = run_table(Launcher("cuda", order="forwards"), tensors, offset)
    assert all(differing(a, b) == 0 for a, b in zip(results, other, strict=True))


@on_tables
@dtypes
def test_more_than_32_bits_of_elements(dtype: torch.dtype, by: Launcher) -> None:
    """The last chunk of an array whose other 2**33 elements nobody needs."""
    tensors = [spread(1000, dtype)]
    check(tensors, run_table(by, tensors, first_chunk=2**23)[0])


@emulated
def test_a_lane_counts_65536_elements_of_one_exponent() -> None:
    """A word has 16 bits for them."""
    tensors = [torch.full((65536 + 7,), value, dtype=torch.float16) for value in (1.0, 2.0, 0.0)]
    results, _ = run_table(Launcher("cuda", order="shuffled"), tensors, offset=1, chunk=65536)
    check(tensors, results)


@emulated
@dtypes
def test_elements_are_read_once_and_16_bytes_at_a_time(dtype: torch.dtype) -> None:
    pack = 16 // dtype.itemsize
    size = 2 * 1024 * pack - 8
    for offset in (0, 1, 7):
        launcher = Launcher("cuda", order="shuffled")
        results, reads = run_table(launcher, [spread(size, dtype)], offset, chunk=1024 * pack, reads=True)
        check([spread(size, dtype)], results)
        head = -offset % pack
        ends = head + (size - head) % pack
        # A thread without a fourth pack reads its first one again.
        assert reads.get(dtype.itemsize, 0) == ends and (size - ends) // pack <= reads[16] <= 2 * 1024


@emulated
@pytest.mark.parametrize("case", CASES, ids=str)
def test_shared_case_on_the_emulator(case: testing.Case) -> None:
    assert all(result.passed for result in emulator.run(case))
